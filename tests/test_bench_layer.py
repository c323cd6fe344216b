"""`bench layer` on a GPU: its inputs and tables anywhere, the floor's kernel, and the whole of it on a GPU."""

import dataclasses

import pytest
import torch

from rankmoe.bench import layer_cuda
from rankmoe.bench.layer_cuda import LayerCudaOptions, skewed_bias, table_rows
from rankmoe.bench.record import Record, markdown
from rankmoe.kernels import experts_cuda, read_triton
from rankmoe.models.presets import get_preset
from rankmoe.types import RouterConfig

needs_gpu = pytest.mark.skipif(not experts_cuda.available(), reason="needs a Hopper or Blackwell GPU, NVRTC")


def test_skewed_routing_gives_few_experts_most_tokens():
    bias = skewed_bias(256, seed=1)
    assert abs(float(bias.mean())) < 1e-5
    assert torch.equal(bias, skewed_bias(256, seed=1))
    assert not torch.equal(bias, skewed_bias(256, seed=2))
    logits = torch.randn(2000, 256, generator=torch.Generator().manual_seed(0))
    counts, uniform = ((logits + b).topk(8).indices.flatten().bincount(minlength=256) for b in (bias, 0.0))
    assert counts.sort(descending=True).values[:32].sum() > 0.5 * counts.sum()
    assert uniform.sort(descending=True).values[:32].sum() < 0.2 * uniform.sum()


def test_the_table_has_a_column_a_token_count_and_the_ratios():
    rows = []
    for tokens, scale in ((8, 1.0), (64, 4.0)):
        for variant, stage, us in (
            ("floor", "gemms", 50.0),
            ("native", "gemms", 60.0),
            ("native", "layer", 65.0),
            ("humming", "gemms", 90.0),
            ("composition", "layer", 97.5),
        ):
            row = {"tokens": tokens, "routing": "uniform", "variant": variant, "stage": stage, "us": us * scale}
            rows.append(row | {"spread": 0.1, "bytes": 1, "active_experts": 15.0})
    table = table_rows(Record("layer", "kimi-k3", "somewhere", rows))
    assert table[0] == ["us at T =", "8", "64"]
    assert table[-3:] == [
        ["native layer / floor", "1.30", "1.30"],
        ["composition layer / native layer", "1.50", "1.50"],
        ["humming gemms / native gemms", "1.50", "1.50"],
    ]
    assert markdown(table).splitlines()[1] == "|---|---|---|"
    one_missing = [row for row in rows if (row["variant"], row["tokens"]) != ("native", 8)]
    table = table_rows(Record("layer", "kimi-k3", "somewhere", one_missing))
    assert ["native layer", "", "260.0"] in table
    assert ["native layer / floor", "", "1.30"] in table
    without_peer = [row for row in rows if row["variant"] in ("floor", "native")]
    assert table_rows(Record("layer", "kimi-k3", "somewhere", without_peer))[-1][0] == "native layer / floor"


def test_the_floor_reads_every_byte_of_the_given_experts():
    device = "cuda" if read_triton.available() and torch.cuda.is_available() else "cpu"
    words = torch.randint(-(2**62), 2**62, (4, 9000), generator=torch.Generator().manual_seed(0)).to(device)
    active = torch.tensor([3, 0], device=device)
    assert read_triton.num_blocks_of(words) == 2
    sums = read_triton.read_experts(words, active, torch.full((2, 2), 7, device=device))
    assert torch.equal(sums.sum(1), words[active].sum(1))


def test_without_a_gpu_the_benchmark_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match="bench layer: expected a CUDA device"):
        layer_cuda.run(LayerCudaOptions(get_preset("kimi-k3"), 8, [1]))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("routing", layer_cuda.ROUTINGS)
def test_the_whole_benchmark_runs_on_a_small_model(routing):
    preset = dataclasses.replace(
        get_preset("gpt-oss-120b"), num_experts=32, hidden_size=256, intermediate_size=128, router=RouterConfig(4)
    )
    record = layer_cuda.run(LayerCudaOptions(preset, 4, [1, 8], routing, rounds=1))
    stages = {(row["variant"], row["stage"]) for row in record.rows}
    assert {("floor", "gemms"), ("native", "gate_up"), ("native", "down"), ("native", "layer")} <= stages
    assert all(row["us"] > 0 and row["routing"] == routing for row in record.rows)
