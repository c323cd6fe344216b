"""The training example: a run of seconds end to end, and the parts whose faults a run would not show."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import seeded

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_nano  # noqa: E402
from nano_training import export  # noqa: E402
from nano_training.data import held_out_windows  # noqa: E402
from nano_training.dispatch import dispatch  # noqa: E402
from nano_training.evaluate import evaluate  # noqa: E402
from nano_training.fake_quantize import fake_quantize_rows, fake_quantize_weight  # noqa: E402
from nano_training.grouped_matmul import LOOP  # noqa: E402
from nano_training.model import Gate, Nano  # noqa: E402
from nano_training.muon import Muon, orthogonalize  # noqa: E402

from rankmoe.models.nano import bits_per_byte, load_nano  # noqa: E402
from rankmoe.models.nano_config import NanoConfig, is_held_out  # noqa: E402
from rankmoe.quantize import dequantize, quantize_mxfp4, quantize_mxfp8  # noqa: E402

SEQ = 64
#: Fewer layers and experts than nano's: the run is then one of seconds.
small_config = partial(NanoConfig, num_hidden_layers=2, num_experts=8)


def paths(pattern: str, *, held_out: bool) -> list[str]:
    """Three made-up paths that are held out, or three that are not."""
    names = (pattern.format(number) for number in count())
    return list(islice((name for name in names if is_held_out(name) == held_out), 3))


class Run(NamedTuple):
    out: Path
    training: dict[str, Any]
    held_out_text: bytes


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train two steps on a small folder; the clock moves a second whenever it is read, however busy the machine is."""
    folder = tmp_path_factory.mktemp("train_nano")
    data, out = folder / "data", folder / "out"
    source = b"".join((Path(sysconfig.get_paths()["stdlib"]) / name).read_bytes() for name in ("sched.py", "bisect.py"))
    # A document that one window holds: the library and the trainer then give every byte the same context.
    held_out_text = source[: SEQ - 1]
    (held_out_library, *_) = paths("module_{}.py", held_out=True)
    contents = {held_out_library: held_out_text}
    contents |= dict.fromkeys(paths("module_{}.py", held_out=False), source)
    contents |= dict.fromkeys(paths("test/test_{}.py", held_out=False), source)
    for path, content in contents.items():
        (data / path).parent.mkdir(parents=True, exist_ok=True)
        (data / path).write_bytes(content)
    options = f"--minutes 0.1 --batch 2 --seq {SEQ} --eval-bytes 2000 --save-every 3 --quantize-from 0 --device cpu"
    clock = count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_nano, "NanoConfig", small_config)
        patch.setattr(train_nano, "elapsed_seconds", lambda: float(next(clock)))
        patch.setattr(sys, "argv", ["train_nano.py", *options.split(), "--data", str(data), "--out", str(out)])
        train_nano.main()
    return Run(out, json.loads((out / "training.json").read_text()), held_out_text)


def test_training_learns_and_says_what_it_did(run: Run, tmp_path: Path) -> None:
    training = run.training
    assert training["is_final"]
    assert (training["steps"], training["tokens"]) == (2, 2 * 2 * SEQ)
    assert training["data"]["held_out_files"] == {"library": 1}
    assert training["held_out_bytes"] == {"library": SEQ - 1}
    config = small_config(max_position_embeddings=SEQ)
    slots = config.num_experts_per_token * (SEQ - 1)
    assert [sum(counts) for counts in training["expert_counts"]] == [slots] * config.num_hidden_layers
    assert sum("train_bits_per_byte" in point for point in training["curve"]) == 2
    assert all(math.isfinite(value) for point in training["curve"] for value in point.values())
    assert sorted(path.name for path in run.out.iterdir()) == ["config.json", "model.safetensors", "training.json"]

    torch.manual_seed(0)
    untrained = Nano(config)  # what the run began with
    (tmp_path / "held_out.py").write_bytes(run.held_out_text)
    windows = list(held_out_windows(tmp_path, ["held_out.py"], config.document_separator, SEQ + 1, SEQ))
    before = evaluate(untrained, windows, "unquantized", LOOP).bits_per_byte
    assert training["held_out_bits_per_byte"]["library"]["unquantized"] < before


def test_the_library_serves_what_training_measured(run: Run) -> None:
    model = load_nano(directory=run.out)
    assert model.config.max_position_embeddings == SEQ
    measured = run.training["held_out_bits_per_byte"]["library"]["mxfp4_mxfp8"]
    assert bits_per_byte(model, run.held_out_text) == pytest.approx(measured, rel=2e-3)


def test_the_script_starts_from_any_directory(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "train_nano.py", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "--library-share" in done.stdout


def test_a_checkpoint_that_is_too_large_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "MAX_CHECKPOINT_BYTES", 100_000)
    model = Nano(small_config(max_position_embeddings=SEQ))
    with pytest.raises(ValueError, match=r"model\.safetensors: expected at most 100000 bytes, got \d+"):
        export.write_checkpoint(model, tmp_path, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("fake_quantize", "quantize"), [(fake_quantize_weight, quantize_mxfp4), (fake_quantize_rows, quantize_mxfp8)]
)
def test_fake_quantisers_are_the_library_s_and_straight_through(fake_quantize: Callable, quantize: Callable) -> None:
    values = torch.randn(5, 96, generator=seeded(0)).requires_grad_()
    upstream = torch.randn(5, 96, generator=seeded(1))
    got = fake_quantize(values, "mxfp4_mxfp8")
    assert torch.equal(got, dequantize(quantize(values.detach())))
    assert not torch.equal(got, values)
    (gradient,) = torch.autograd.grad(got, values, upstream)
    assert torch.equal(gradient, upstream)
    assert fake_quantize(values, "unquantized") is values


def test_only_the_full_format_quantises_rows() -> None:
    rows = torch.randn(2, 32, generator=seeded(0))
    assert fake_quantize_rows(rows, "mxfp4") is rows
    assert not torch.equal(fake_quantize_weight(rows, "mxfp4"), rows)


def test_the_gate_s_gradient_is_that_of_renormalised_sigmoids() -> None:
    gate = Gate(small_config())
    torch.nn.init.normal_(gate.weight, std=0.1, generator=seeded(0))
    tokens = torch.randn(5, gate.weight.shape[1], generator=seeded(1))
    weights, ids = gate(tokens)
    selected = (tokens @ gate.weight.T).sigmoid().gather(-1, ids)
    expected = selected / selected.sum(-1, keepdim=True)
    upstream = torch.randn(weights.shape, generator=seeded(2))
    gradients = [torch.autograd.grad(out, gate.weight, upstream) for out in (weights, expected)]
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("shape", [(3, 48, 32), (3, 32, 48), (2, 32, 32)])
def test_orthogonalize_brings_singular_values_near_one(shape: tuple[int, int, int]) -> None:
    # No singular value close to zero: five steps lift those only so far.
    left, _ = torch.linalg.qr(torch.randn(shape[0], shape[1], shape[1], generator=seeded(0)))
    right, _ = torch.linalg.qr(torch.randn(shape[0], shape[2], shape[2], generator=seeded(1)))
    rank = min(shape[1:])
    matrices = left[..., :rank] * torch.linspace(0.5, 50.0, rank) @ right[..., :rank].mT
    singular_values = torch.linalg.svdvals(orthogonalize(matrices))
    assert singular_values.min() > 0.6
    assert singular_values.max() < 1.3


def test_muon_treats_stacked_matrices_one_by_one() -> None:
    gradient = torch.randn(2, 8, 6, generator=seeded(0))
    stacked, single = torch.nn.Parameter(torch.zeros(2, 8, 6)), torch.nn.Parameter(torch.zeros(4, 4, 6))
    stacked.grad, single.grad = gradient, gradient.view(4, 4, 6).clone()
    Muon([stacked], 0.1, 0.0, matrix_shapes={stacked: (4, 6)}).step()
    Muon([single], 0.1, 0.0).step()
    assert torch.equal(stacked.view(4, 4, 6), single)
    assert stacked.abs().max() > 0


def test_experts_over_sorted_rows_are_the_sum_over_slots() -> None:
    num_experts, top_k = 6, 2
    topk_ids = torch.rand(9, num_experts - 1, generator=seeded(0)).argsort(-1)[:, :top_k]  # the last expert is idle
    tokens = torch.randn(9, 4, generator=seeded(1)).double().requires_grad_()
    weight = torch.randn(num_experts, 3, 4, generator=seeded(2)).double().requires_grad_()
    plan = dispatch(topk_ids, num_experts)
    got = plan.to_slots(LOOP.multiply(plan.to_rows(tokens), weight, plan.row_ends))
    expected = torch.einsum("th,tkmh->tkm", tokens, weight[topk_ids])
    torch.testing.assert_close(got, expected)
    upstream = torch.randn(9, top_k, 3, generator=seeded(3)).double()
    gradients = [torch.autograd.grad(out, (tokens, weight), upstream) for out in (got, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("max_bytes", [10_000, 60])
def test_held_out_windows_score_every_byte_once(tmp_path: Path, max_bytes: int) -> None:
    length, separator = 17, 0
    # Bytes differ within a file and between files as far as they go, so that none can stand for another.
    files = {f"{size}.py": bytes((size + i) % 255 + 1 for i in range(size)) for size in (1, 15, 16, 17, 24, 25, 100)}
    for path, content in files.items():
        (tmp_path / path).write_bytes(content)
    scored: list[bytes] = []
    for tokens, is_scored in held_out_windows(tmp_path, list(files), separator, length, max_bytes):
        assert (tokens.shape, is_scored.shape) == ((length,), (length - 1,))
        if tokens[0] == separator:  # a file's first window
            scored.append(b"")
        else:
            assert not is_scored[: length // 2].any()  # every byte that counts has at least half a window of context
        scored[-1] += bytes(tokens[1:][is_scored].tolist())
    if max_bytes > sum(map(len, files.values())):
        assert sorted(scored) == sorted(files.values())
    else:
        assert sum(map(len, scored)) == max_bytes
        assert all(any(content.startswith(part) for content in files.values()) for part in scored)
