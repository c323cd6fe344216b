"""`bench decode`: arms, steps and records on the CPU with `nano`'s sizes; the whole of it on a GPU."""

import dataclasses
import itertools

import pytest
import torch
from typer.testing import CliRunner

from rankmoe.bench import decode
from rankmoe.bench.decode import DecodeError, DecodeOptions, run, table_rows
from rankmoe.bench.decode_model import CACHE_PARTS, SIZES, layer_nbytes, make_model
from rankmoe.bench.decode_step import arms, step
from rankmoe.bench.record import Record
from rankmoe.cli import app
from rankmoe.kernels import experts_cuda
from rankmoe.models.presets import get_preset
from rankmoe.moe import Workspace
from rankmoe.types import ExpertPlacement, RouterConfig

needs_gpu = pytest.mark.skipif(not experts_cuda.available(), reason="needs a Hopper or Blackwell GPU, NVRTC")
NANO = SIZES["nano"]
PLACEMENT = ExpertPlacement(64, 4, 0)


def small_model(num_layers=5, num_distinct=2):
    return make_model(NANO, PLACEMENT, num_layers, num_distinct, 3, 32, torch.device("cpu"))


def test_a_cache_is_as_long_as_it_is_on_average_on_one_rank():
    assert DecodeOptions(SIZES["kimi-k3"], 8, [8]).cache_length == (8192 + 256) // 8
    assert DecodeOptions(NANO, 4, [1], 1, 1).cache_length == CACHE_PARTS


def test_distinct_layers_have_the_same_experts_in_other_memory():
    first, second = (layer.experts for layer in small_model().layers)
    assert first.w13.data.untyped_storage().data_ptr() != second.w13.data.untyped_storage().data_ptr()
    rows = [experts.w2.data.flatten(1) for experts in (first, second)]
    assert not torch.equal(*rows)
    assert sorted(map(bytes, rows[0].numpy())) == sorted(map(bytes, rows[1].numpy()))


def test_bytes_of_a_layer_are_those_that_it_has():
    (layer,) = small_model(1, 1).layers
    tensors = [getattr(layer, field.name) for field in dataclasses.fields(layer) if field.name != "experts"]
    # All but small vectors: head scales, correction bias, latent norm.
    small = layer.head_scale.nbytes + layer.correction_bias.nbytes + layer.latent_norm.nbytes
    got = layer_nbytes(NANO, PLACEMENT, 3, 32)
    assert got == layer.experts.nbytes + sum(tensor.nbytes for tensor in tensors) - small


@torch.no_grad()
def test_arms_agree_bit_for_bit_and_each_step_has_other_tokens():
    model = small_model()
    seen = []
    for run_routed in arms(Workspace.allocate(3, 4, model.layers[0].experts)).values():
        torch.manual_seed(5)
        tokens = torch.tensor([1, 2, 3])
        for _ in range(3):
            hidden = step(model, tokens, run_routed)
            seen.append((hidden, tokens.clone()))
    assert len({tuple(tokens.tolist()) for _, tokens in seen[:3]}) == 3
    for number in range(3):
        for other in (seen[number + 3], seen[number + 6]):
            assert torch.equal(other[0], seen[number][0])
            assert torch.equal(other[1], seen[number][1])
    assert bool(seen[0][0].isfinite().all())


@torch.no_grad()
def test_every_layer_changes_what_comes_out():
    model = small_model()
    run_routed = arms(Workspace.allocate(3, 4, model.layers[0].experts))["c"]
    outputs = []
    for num_layers in range(1, 6):
        tokens = torch.tensor([1, 2, 3])
        outputs.append(step(dataclasses.replace(model, num_layers=num_layers), tokens, run_routed))
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(outputs))


def test_a_record_has_a_row_an_arm_and_says_what_ran():
    record = run(DecodeOptions(NANO, 4, [1, 3], 64, 16, rounds=2, device="cpu"))
    assert [(row["batch"], row["arm"], row["tuning"]) for row in record.rows] == [
        (batch, arm, "held") for batch in (1, 3) for arm in "abc"
    ]
    for row in record.rows:
        assert row["tokens_per_s"] == pytest.approx(row["batch"] / row["step_us"] * 1e6, rel=1e-3)
    notes = record.notes
    assert (notes["num_layers"], notes["distinct_layers"], notes["bitwise_equal"]) == (4, 4, True)
    details = notes["batches"]["3"]
    assert details["identical_picks"]
    assert details["profile_runs"] == {}
    assert 0 < details["active_experts"] <= 12


def test_arms_that_disagree_are_not_timed(monkeypatch):
    def wrong_arms(workspace):
        right = arms(workspace)

        def off_by_a_bit(*arguments):
            return right["b"](*arguments) * 1.01

        return {**right, "b": off_by_a_bit}

    monkeypatch.setattr(decode, "arms", wrong_arms)
    with pytest.raises(DecodeError, match="gave different hidden states or tokens"):
        run(DecodeOptions(NANO, 4, [2], 64, 16, rounds=1, device="cpu"))


def test_a_batch_beyond_a_decode_step_is_refused_before_anything_is_made():
    with pytest.raises(ValueError, match="batch: expected 1 to 64 sequences, got 65"):
        run(DecodeOptions(NANO, 4, [65], device="cpu"))


def test_the_table_has_a_line_a_batch_and_tuning_and_what_is_gained():
    rows = [
        {"batch": 8, "arm": arm, "tuning": tuning, "tokens_per_s": rate, "step_us": 8e6 / rate, "spread": 0.0}
        for tuning in ("fresh", "held")
        for arm, rate in (("a", 100.0), ("b", 104.0), ("c", 110.0))
    ]
    record = Record("decode", "kimi-k3", "somewhere", rows, notes={"batches": {"8": {"active_experts": 15.1}}})
    _, held, fresh = table_rows(record)
    assert held == ["8", "held", "15.1", "100.0", "104.0", "110.0", "72727", "+4.0 %", "+10.0 %"]
    assert fresh[1] == "fresh"


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_arms_agree_and_pick_the_same_configurations():
    preset = dataclasses.replace(
        get_preset("kimi-k3"),
        num_experts=64,
        hidden_size=256,
        intermediate_size=128,
        num_moe_layers=3,
        router=RouterConfig(4),
    )
    sizes = dataclasses.replace(SIZES["kimi-k3"], preset=preset, hidden_size=512, vocab_size=1024)
    record = run(DecodeOptions(sizes, 4, [5], 256, 64, rounds=2, num_distinct_layers=2))
    assert [(row["arm"], row["tuning"]) for row in record.rows] == [(a, t) for a in "abc" for t in ("held", "fresh")]
    details = record.notes["batches"]["5"]
    assert details["identical_picks"]
    assert details["profile_runs"]["a"] > 0
    assert details["profile_runs"]["b"] == details["profile_runs"]["c"] == 0
    assert details["picks"]["held"].keys() == details["picks"]["fresh"].keys()
    assert len(details["picks"]["held"]) == 2


def test_the_command_says_what_the_arms_picked_and_searched(monkeypatch):
    rows = [
        {"batch": 8, "arm": arm, "tuning": "fresh", "tokens_per_s": 100.0, "step_us": 8e4, "spread": 0.0}
        for arm in "abc"
    ]
    details = {"active_experts": 15.1, "identical_picks": True, "profile_runs": {"a": 28, "b": 0, "c": 0}, "picks": {}}
    notes = {"num_layers": 92, "distinct_layers": 52, "batches": {"8": details}}
    monkeypatch.setattr(
        decode, "run", lambda options, progress: Record("decode", "nano", "somewhere", rows, notes=notes)
    )
    output = CliRunner().invoke(app, ["bench", "decode", "--model", "nano"], env={"COLUMNS": "160"}).output
    assert "batch 8: the arms picked the same configurations" in output
    assert "a 28, b 0, c 0" in output
