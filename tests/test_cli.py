"""The command line as a newcomer meets it: help with an example, tables, JSON, errors in one line, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rankmoe.pack
from rankmoe.cli import app

COMMANDS = [["info"], ["check"], ["generate"], ["tune"], ["bench", "layer"], ["bench", "front"]]


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
    assert {key["source"] for key in keys} == {"heuristic"}
    assert keys[-1]["config"].startswith("grouped: columns 112")
    assert "decode: warps 8" in CliRunner().invoke(app, arguments, env=environment).stdout
