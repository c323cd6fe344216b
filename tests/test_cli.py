"""The command line as a newcomer meets it: help with an example, tables, JSON, errors in one line, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import assert_bitwise_equal
from typer.testing import CliRunner

import rankmoe.pack
from rankmoe.checkpoint import Checkpoint
from rankmoe.cli import app
from rankmoe.models.nano import CHECKPOINT_DIRECTORY as NANO
from rankmoe.packed import load_packed
from rankmoe.types import ExpertPlacement, SiTU

PACK_NANO = ["pack", str(NANO), "--model", "nano", "--out", os.devnull]
COMMANDS = [["info"], ["check"], ["generate"], ["pack"], ["tune"], ["report"]]
COMMANDS += [["bench", "layer"], ["bench", "front"], ["bench", "decode"], ["bench", "routing"]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    assert "Example: rankmoe " + " ".join(command) in " ".join(result.output.split())


@pytest.mark.parametrize("model", ["kimi-k3", "kimi-k2", "deepseek-v3", "qwen3-moe", "gpt-oss-120b"])
def test_info_prints_a_table_and_the_same_as_json(model: str) -> None:
    table = CliRunner().invoke(app, ["info", "--model", model, "--ep", "8"])
    assert table.exit_code == 0
    assert "ids are rank-local" in table.output
    values = json.loads(CliRunner().invoke(app, ["info", "--model", model, "--ep", "8", "--json"]).output)
    assert len(values["ranks"]) == 8
    assert all(str(rank["rank_local_num_experts"]) in table.output for rank in values["ranks"])


def test_check_exits_with_0_and_with_1_where_the_relabelling_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CliRunner().invoke(app, ["check"]).exit_code == 0
    correct = rankmoe.pack.rank_local_ids
    monkeypatch.setattr(rankmoe.pack, "rank_local_ids", lambda *arguments: correct(*arguments) + 1)
    broken = CliRunner().invoke(app, ["check", "--json"])
    assert broken.exit_code == 1
    assert json.loads(broken.stdout)["passed"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "--model", "gpt-2"], "rankmoe: model: expected one of kimi-k3"),
        (["info", "--batch", "1,x"], "rankmoe: batch: expected whole numbers"),
        (["info", "--ep", "1000"], "rankmoe: ep_size: expected 1 to num_experts=896, got 1000"),
        (["bench", "layer", "--routing", "all"], "rankmoe: routing: expected one of uniform, skewed, got 'all'"),
        (["tune", "--batch", "8-"], "rankmoe: batch: expected whole numbers above 0 and ranges"),
        (["bench", "layer", "--device", "tpu"], "rankmoe: device: expected cpu or cuda, got 'tpu'"),
        ([*PACK_NANO, "--device", "tpu"], "rankmoe: device: expected cpu or cuda, got 'tpu'"),
        (
            [*PACK_NANO, "--backend", "tpu"],
            "rankmoe: backend: expected one of cuda, cpu, triton, reference, humming, triton_scaled, got 'tpu'",
        ),
        (
            [*PACK_NANO, "--strategy", "random"],
            "rankmoe: strategy: expected 'contiguous' or 'round_robin', got 'random'",
        ),
        ([*PACK_NANO, "--ep-rank", "1"], "rankmoe: ep_rank: expected 0 <= ep_rank < ep_size=1, got 1"),
        ([*PACK_NANO, "--layer", "4"], f"rankmoe: {NANO}: expected routed experts in layer 4, got layers 0, 1, 2, 3"),
        ([*PACK_NANO, "--model", "gpt-oss-120b"], "rankmoe: model: expected one whose experts have no bias, got"),
        ([*PACK_NANO, "--model", "kimi-k3"], f"rankmoe: {NANO / 'model.safetensors'}: tensor model.layers.0.block_"),
        (["pack", str(NANO.parent), "--out", os.devnull], f"rankmoe: {NANO.parent}: expected a folder with"),
        ([*PACK_NANO, "--out", os.devnull], "rankmoe: [Errno"),
    ],
)
def test_a_wrong_value_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = subprocess.run([sys.executable, "-m", "rankmoe", *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith(message)
    assert len(result.stderr.splitlines()) == 1


def test_bench_layer_writes_a_record_that_its_table_shows(tmp_path: Path, small_preset: str) -> None:
    path = tmp_path / "record.json"
    arguments = [
        "bench",
        "layer",
        "--device",
        "cpu",
        "--model",
        small_preset,
        "--ep",
        "2",
        "--tokens",
        "4,8",
        "--repeats",
        "2",
    ]
    result = CliRunner().invoke(app, [*arguments, "--output", str(path)])
    assert result.exit_code == 0, result.output
    record = json.loads(path.read_text())
    assert {"bench", "model", "device", "versions", "commit", "date", "rows"} <= record.keys()
    assert [(row["tokens"], row["variant"], row["stage"]) for row in record["rows"]] == [
        (tokens, *rest)
        for tokens in (4, 8)
        for rest in (("floor", "gemms"), ("cpu", "gate_up"), ("cpu", "down"), ("cpu", "layer"))
    ]
    for row in record["rows"]:
        assert row["us"] > 0
        assert row["bytes"] > 0
    by_stage = {(row["tokens"], row["stage"]): row["bytes"] for row in record["rows"]}
    assert by_stage[4, "gate_up"] + by_stage[4, "down"] == by_stage[4, "layer"] == by_stage[4, "gemms"]


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("strategy", ["contiguous", "round_robin"])
def test_pack_writes_the_layers_that_it_names(tmp_path: Path, backend: str, strategy: str) -> None:
    arguments = [
        "pack",
        str(NANO),
        "--model",
        "nano",
        "--ep-size",
        "4",
        "--ep-rank",
        "3",
        "--layer",
        "2",
        "--layer",
        "0",
    ]
    options = ["--strategy", strategy, "--backend", backend, "--device", "cpu", "--out", str(tmp_path / "packed")]
    result = CliRunner().invoke(app, [*arguments, *options])
    assert result.exit_code == 0, result.output
    names = [f"layer-{layer:03d}-rank-3-of-4.safetensors" for layer in (0, 2)]
    assert sorted(path.name for path in (tmp_path / "packed").iterdir()) == names
    placement = ExpertPlacement(64, 4, 3, strategy)
    for layer, name, line in zip((0, 2), names, result.output.splitlines(), strict=True):
        path = tmp_path / "packed" / name
        assert line.startswith(
            f"{path}: layer {layer}, {path.stat().st_size:,} bytes for backend {backend}, packed in "
        )
        prefix = f"model.layers.{layer}.block_sparse_moe"
        expected = Checkpoint.open(NANO).pack_experts(prefix, placement, 128, 96, SiTU(), backend=backend)
        assert_bitwise_equal(load_packed(path, device="cpu", placement=placement), expected)


def test_pack_takes_every_layer_and_writes_json(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*PACK_NANO, "--device", "cpu", "--out", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    files = json.loads(result.stdout)
    assert [file["layer"] for file in files] == [0, 1, 2, 3]
    for file in files:
        assert file["backend"] == "cpu"
        assert file["nbytes"] == Path(file["path"]).stat().st_size
        assert min(file["pack_seconds"], file["write_seconds"]) > 0


def test_pack_says_what_it_wrote_before_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack_experts = Checkpoint.pack_experts

    def failing(self: Checkpoint, layer_prefix: str, *arguments: Any, **options: Any) -> Any:
        if "layers.1." in layer_prefix:
            raise OSError("disk gone")
        return pack_experts(self, layer_prefix, *arguments, **options)

    monkeypatch.setattr(Checkpoint, "pack_experts", failing)
    result = CliRunner().invoke(app, [*PACK_NANO, "--device", "cpu", "--out", str(tmp_path)])
    assert isinstance(result.exception, ValueError)
    assert str(result.exception) == "disk gone"
    (line,) = result.output.splitlines()
    assert line.startswith(str(tmp_path / "layer-000-rank-0-of-1.safetensors"))
    assert [path.name for path in tmp_path.iterdir()] == ["layer-000-rank-0-of-1.safetensors"]


@pytest.fixture
def small_preset(monkeypatch: pytest.MonkeyPatch) -> str:
    from rankmoe.models.presets import PRESETS, ModelPreset
    from rankmoe.types import RouterConfig, SiTU

    monkeypatch.setitem(PRESETS, "small", ModelPreset("small", 16, 64, 32, 1, RouterConfig(top_k=4), SiTU()))
    return "small"


def test_tune_shows_where_each_configuration_comes_from(tmp_path: Path) -> None:
    arguments = ["tune", "--coverage", "--batch", "1-64,512", "--device-name", "NVIDIA H200"]
    environment = {"RANKMOE_CACHE_DIR": str(tmp_path), "COLUMNS": "160"}
    result = CliRunner().invoke(app, [*arguments, "--json"], env=environment)
    assert result.exit_code == 0
    keys = json.loads(result.stdout)["keys"]
    assert [key["batches"] for key in keys[::2]] == ["1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "512"]
    assert {key["source"] for key in keys} == {"shipped"}
    other = CliRunner().invoke(app, [*arguments, "--json", "--ep", "16"], env=environment)
    assert {key["source"] for key in json.loads(other.stdout)["keys"]} == {"heuristic"}
    assert keys[-1]["config"].startswith("grouped: columns 112")
    assert "decode: warps 8" in CliRunner().invoke(app, arguments, env=environment).stdout


def test_tune_under_torchrun_keeps_the_choice_that_is_best_for_the_slowest_rank(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("tune_without_gpu.py"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", script]
    arguments = ["tune", "--model", "gpt-oss-120b", "--ep", "2", "--batch", "1,100", "--json"]
    environment = {**os.environ, "RANKMOE_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*launcher, *arguments], capture_output=True, text=True, timeout=240, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr
    values = json.loads(result.stdout)  # of rank 0 alone
    assert values["keys"][0]["batches"] == "1"  # and all decode steps beside 100
    assert len(values["keys"]) == 2 * 8
    entries = json.loads(Path(values["file"]).read_text())["entries"]
    for key in values["keys"]:
        assert key["source"] == "user cache"
        entry = entries[key["key"]]
        assert entry["config"] == entry["candidates"][2]["config"]
        assert [tried["us"] for tried in entry["candidates"][:3]] == [100.0, 90.0, 50.0]
