"""The expert GEMMs in Triton: on a GPU or else in Triton's interpreter; test_experts.py runs them beside the others."""

import dataclasses
import math
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

import expert_cases
from expert_cases import SHAPES, expected_middle, expected_rows
from helpers import assert_bitwise_equal, random_batch, random_mxfp4, relative_l2, seeded

from rankmoe import reference
from rankmoe.backends import choose_backend, get_backend
from rankmoe.experts import down, gate_up, pack_experts
from rankmoe.kernels import experts_triton
from rankmoe.kernels.experts_triton import TritonConfig, default_config
from rankmoe.moe import routed_moe
from rankmoe.quantize import dequantize, quantize_mxfp8
from rankmoe.schedule import build_schedule
from rankmoe.types import (
    ExpertPlacement,
    ExpertSchedule,
    MXTensor,
    Problem,
    RouterConfig,
    SiTU,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes with NumPy, which warns where a GPU gives NaN or infinity in silence.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
#: Rows of each expert: none, one, a tile, one more than a tile, several tiles.
COUNTS = [0, 1, 16, 17, 0, 40, 3]


make_experts = partial(expert_cases.make_experts, backend="triton", device=DEVICE)


def schedule_of(counts: list[int]) -> ExpertSchedule:
    """Tokens shuffled among their one expert each, and two unused rows as kernels leave them."""
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    ids = ids[torch.randperm(len(ids), generator=seeded(7))].int()
    schedule = build_schedule(ids[:, None].to(DEVICE), len(counts), num_experts=len(counts))
    unused = torch.full((2,), -1, dtype=torch.int32, device=DEVICE)
    return dataclasses.replace(schedule, row_tokens=torch.cat([schedule.row_tokens[: len(ids)], unused]))


def check_gemms(name: str, counts: list[int], config: TritonConfig | None = None, is_scaled: bool = False) -> None:
    """Both GEMMs against float64 on the same dequantised operands, in buffers that held NaN."""
    hidden_size, intermediate_size, activation, has_bias = SHAPES[name]
    weights, w13, w2 = make_experts(len(counts), hidden_size, intermediate_size, activation, has_bias)
    schedule, num_rows = schedule_of(counts), sum(counts)
    x = quantize_mxfp8(torch.randn(num_rows, hidden_size, generator=seeded(5)).bfloat16().to(DEVICE))
    options = {"config": config, "is_scaled": is_scaled}
    scratch = torch.full((num_rows + 2, intermediate_size), math.nan, device=DEVICE)
    padded = experts_triton.gate_up(x, schedule, weights, scratch, **options)
    middle = padded[:num_rows]
    expected = quantize_mxfp8(expected_middle(x, schedule, weights, w13).float())
    assert (middle.data.view(torch.uint8) == expected.data.view(torch.uint8)).double().mean() > 0.9995
    assert relative_l2(dequantize(middle, torch.float64), dequantize(expected, torch.float64)) < 2e-3
    buffer = torch.full((num_rows + 2, hidden_size), math.nan, device=DEVICE)
    rows = experts_triton.down(padded, schedule, weights, buffer, **options)
    exact = expected_rows(middle, schedule, weights, w2)
    assert relative_l2(rows[:num_rows], exact) < 5e-6  # the rule allows 1e-5
    assert float((rows[:num_rows].double() - exact).abs().max()) < 1e-5 * float(exact.abs().max())
    assert rows[num_rows:].isnan().all()


def test_each_gemm_is_float64_to_the_tolerance():
    check_gemms("small", COUNTS)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("tokens", [16, 32, 64, 128])
@pytest.mark.parametrize("name", SHAPES)
def test_each_gemm_is_float64_to_the_tolerance_on_a_gpu(name, tokens):
    check_gemms(name, [0, 1, 16, 33, 129, 8], TritonConfig(tokens, 128, num_warps=8 if tokens == 128 else 4))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["kimi-k3", "gpt-oss", "small"])
def test_block_scaled_multiplication_is_float64_to_the_tolerance(name):
    """On a GPU without the instruction, where Triton takes it apart, this says that tiles and scales meet rightly."""
    check_gemms(name, [0, 1, 16, 33, 70, 8], TritonConfig(32, 128), is_scaled=True)


def test_all_scale_bytes_and_codes_are_exact():
    """A row of one 1.0 reads a column of the weight back, for every scale byte that is taken."""
    num_bytes = experts_triton.MAX_SCALE_BYTE + 1
    codes = torch.arange(16, dtype=torch.uint8)
    data = (codes | (codes.roll(1) << 4)).expand(1, num_bytes, 16).contiguous()
    scale = torch.arange(num_bytes, dtype=torch.uint8)[None, :, None].contiguous()
    pad = -num_bytes % 32
    w2 = MXTensor(
        torch.nn.functional.pad(data, (0, 0, 0, pad)), torch.nn.functional.pad(scale, (0, 0, 0, pad)), "mxfp4"
    )
    w13 = random_mxfp4(1, 64, num_bytes + pad)
    weights = pack_experts(w13.to(DEVICE), w2.to(DEVICE), SiTU(), ExpertPlacement(1), backend="triton")
    schedule = build_schedule(torch.zeros(32, 1, dtype=torch.int32).to(DEVICE), 1, num_experts=1)
    middle = MXTensor(torch.eye(32).to(torch.float8_e4m3fn), torch.full((32, 1), 127, dtype=torch.uint8), "mxfp8")
    rows = down(middle.to(DEVICE), schedule, weights).cpu()
    assert torch.equal(rows, reference.dequantize(w2)[0].float().T)


@pytest.mark.parametrize("byte", [253, 254])
def test_a_scale_beyond_bfloat16_is_refused_by_place(byte):
    w13, w2 = random_mxfp4(2, 64, 64), random_mxfp4(2, 64, 32)
    w13.scale[1, 5, 1] = byte
    with pytest.raises(ValueError, match=f"w13: .* up to 252, .* got {byte} in expert 1, row 5, group 1"):
        pack_experts(w13.to(DEVICE), w2.to(DEVICE), SiTU(), ExpertPlacement(2), backend="triton")
    w13.data[1, 5, 16:] = 0x80
    pack_experts(w13.to(DEVICE), w2.to(DEVICE), SiTU(), ExpertPlacement(2), backend="triton")


def test_tensors_that_are_there_are_not_copied():
    w13, w2 = random_mxfp4(2, 64, 64).to(DEVICE), random_mxfp4(2, 64, 32).to(DEVICE)
    weights = pack_experts(w13, w2, SiTU(), ExpertPlacement(2), backend="triton")
    assert weights.w13.data.data_ptr() == w13.data.data_ptr()
    assert weights.w2.scale.data_ptr() == w2.scale.data_ptr()


def test_a_row_alone_has_the_bits_it_has_among_others():
    weights, _, _ = make_experts(3, 96, 64)
    x = quantize_mxfp8(torch.randn(20, 96, generator=seeded(5)).to(DEVICE))
    together = build_schedule(torch.ones(20, 1, dtype=torch.int32).to(DEVICE), 3, num_experts=3)
    alone = build_schedule(torch.ones(1, 1, dtype=torch.int32).to(DEVICE), 3, num_experts=3)
    rows = down(gate_up(x, together, weights), together, weights)
    for token in (0, 19):
        only = down(gate_up(x[token : token + 1], alone, weights), alone, weights)
        assert_bitwise_equal(only, rows[token : token + 1])


@pytest.mark.parametrize("num_tokens", [5, 70])
def test_the_layer_is_the_references_for_global_and_rank_local_ids(num_tokens):
    placement, config = ExpertPlacement(24, 2, 1), RouterConfig(4)
    w13, w2 = random_mxfp4(12, 64, 64, seed=1), random_mxfp4(12, 64, 32, seed=2)
    weights = pack_experts(w13.to(DEVICE), w2.to(DEVICE), SiTU(), placement, backend="triton")
    on_cpu = pack_experts(w13, w2, SiTU(), placement, backend="reference")
    hidden_states, logits = random_batch(num_tokens, 24, 64)
    options = {"out_dtype": torch.float32}
    got = routed_moe(hidden_states.to(DEVICE), logits.to(DEVICE), weights, config, **options)
    other = routed_moe(hidden_states.to(DEVICE), logits.to(DEVICE), weights, config, rank_local=False, **options)
    assert_bitwise_equal(other, got)
    expected = routed_moe(hidden_states, logits, on_cpu, config, **options)
    assert relative_l2(got.cpu(), expected) < 5e-3


def test_the_tile_grows_with_the_rows_that_shapes_let_expect():
    tokens = []
    for num_tokens in (1, 64, 512, 1024, 16_384):
        ids = torch.full((num_tokens, 16), -1, dtype=torch.int32)
        tokens.append(default_config(build_schedule(ids, 112, num_experts=896), 896).tokens)
    assert tokens == [16, 16, 32, 64, 128]


def test_block_scaled_multiplication_is_only_for_who_asks():
    problem = Problem(8, 64, 64, SiTU(), device_type="cuda")
    scaled = get_backend("triton_scaled")
    assert scaled.approximated(problem)
    assert not scaled.covered(problem)
    if not scaled.available():
        with pytest.raises(ValueError, match="backend: expected one that is available here"):
            choose_backend(problem, "triton_scaled")


@pytest.mark.gpu
@needs_gpu
def test_weights_beyond_2_to_the_31_elements_reach_the_last_expert():
    num_experts, hidden_size, intermediate_size = 112, 7168, 3072
    w13, w2 = (random_mxfp4(1, *shape).to("cuda") for shape in ((6144, 7168), (7168, 3072)))
    alone = pack_experts(w13, w2, SiTU(), ExpertPlacement(1), backend="triton")

    def repeated(weight: MXTensor) -> MXTensor:
        many = MXTensor(*(t.new_zeros(num_experts, *t.shape[1:]) for t in (weight.data, weight.scale)), "mxfp4")
        many.data[-1], many.scale[-1] = weight.data[0], weight.scale[0]
        return many

    assert num_experts * 2 * intermediate_size * hidden_size > 2**31
    weights = dataclasses.replace(
        alone, w13=repeated(w13), w2=repeated(w2), placement=ExpertPlacement(num_experts, 1, 0)
    )
    x = quantize_mxfp8(torch.randn(3, hidden_size, generator=seeded(0)).cuda())
    last = build_schedule(torch.full((3, 1), num_experts - 1, device="cuda"), num_experts, num_experts=num_experts)
    only = build_schedule(torch.zeros(3, 1, dtype=torch.int64, device="cuda"), 1, num_experts=1)
    expected = down(gate_up(x, only, alone), only, alone)
    assert expected.any()
    assert_bitwise_equal(down(gate_up(x, last, weights), last, weights), expected)
