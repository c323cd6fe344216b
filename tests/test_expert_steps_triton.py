"""Combine, activation and row movement in Triton: on a GPU or else in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from helpers import assert_bitwise_equal, relative_l2, seeded

from rankmoe import reference
from rankmoe.activation import apply_activation
from rankmoe.kernels import activation_triton, combine_triton, rows_triton
from rankmoe.quantize import decode_scale, dequantize, quantize_mxfp8
from rankmoe.schedule import build_schedule
from rankmoe.types import ExpertSchedule, MXTensor, SiTU, SwiGLU

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes with NumPy, which warns where a GPU gives NaN or infinity in silence.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
ACTIVATIONS = {
    "situ": SiTU(),
    "swiglu": SwiGLU(),
    "gpt_oss": SwiGLU(alpha=1.702, limit=7.0, up_offset=1.0),
}


def schedule_of(ids: Tensor, num_local_experts: int, spare_rows: int = 2) -> ExpertSchedule:
    """A schedule on the device whose ``row_tokens`` has unused rows, as the kernels make it."""
    exact = build_schedule(ids, num_local_experts, num_experts=64)
    row_tokens = torch.cat([exact.row_tokens, torch.full((spare_rows,), -1, dtype=torch.int32)])
    return ExpertSchedule(
        exact.num_tokens,
        None,
        exact.expert_offsets.to(DEVICE),
        row_tokens.to(DEVICE),
        exact.slot_rows.to(DEVICE),
    )


def random_ids(num_tokens: int, top_k: int, num_experts: int, seed: int = 0) -> Tensor:
    return torch.rand(num_tokens, num_experts, generator=seeded(seed)).argsort(1)[:, :top_k]


# --- combine ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_tokens", "top_k", "hidden_size"), [(1, 1, 1), (3, 6, 40), (5, 16, 700), (0, 2, 32)])
def test_combine_has_the_bits_of_a_float32_loop_in_slot_order(num_tokens, top_k, hidden_size, out_dtype):
    schedule = schedule_of(random_ids(num_tokens, top_k, 24), 8)
    num_rows = len(schedule.row_tokens)
    rows = torch.randn(num_rows, hidden_size, generator=seeded(1))
    rows[num_rows - 2 :] = math.nan  # rows that nobody uses
    weights = torch.rand(num_tokens, top_k, generator=seeded(2))
    weights[schedule.slot_rows.cpu() < 0] = math.nan  # slots of other ranks
    out = combine_triton.combine(rows.to(DEVICE), weights.to(DEVICE), schedule, out_dtype)
    expected = reference.combine(
        rows, weights, ExpertSchedule(num_tokens, None, *(t.cpu() for t in fields_of(schedule)))
    )
    assert_bitwise_equal(out.cpu(), expected.to(out_dtype))


def fields_of(schedule: ExpertSchedule) -> tuple[Tensor, Tensor, Tensor]:
    return schedule.expert_offsets, schedule.row_tokens, schedule.slot_rows


def test_combine_reads_rows_of_a_larger_buffer():
    schedule = schedule_of(torch.tensor([[0, 1]]), 2, spare_rows=0)
    rows = torch.tensor([[1.0, 9.0, 9.0], [2.0, 9.0, 9.0]], device=DEVICE)[:, :1]
    out = combine_triton.combine(rows, torch.tensor([[0.5, 2.0]], device=DEVICE), schedule, torch.float32)
    assert out.tolist() == [[4.5]]


# --- activation ------------------------------------------------------------------------------------------------------
def expected_middle(
    gate_up: Tensor, activation: SiTU | SwiGLU, bias: Tensor | None, schedule: ExpertSchedule
) -> Tensor:
    if bias is not None:
        experts = torch.arange(len(bias)).repeat_interleave(schedule.expert_counts.cpu())
        gate_up = gate_up + bias[experts]
    return apply_activation(gate_up.double(), activation)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_middle_is_the_quantised_float64_activation(activation, has_bias, dtype):
    ids = torch.tensor([[0, 2], [0, 5], [5, 0]])  # experts 1, 3 and 4 idle
    schedule = schedule_of(ids, 6)
    num_rows, width = 6, 1088
    magnitude = torch.logspace(-4, 2, 2 * width)  # from where tanh is its argument to where it is 1
    gate_up = (torch.randn(num_rows + 2, 2 * width, generator=seeded(3)) * magnitude).to(dtype)
    gate_up[num_rows:] = math.nan
    bias = torch.randn(6, 2 * width, generator=seeded(4)) if has_bias else None
    middle = activation_triton.activate_quantize(
        gate_up.to(DEVICE), ACTIVATIONS[activation], schedule, None if bias is None else bias.to(DEVICE)
    )
    got = MXTensor(middle.data.cpu(), middle.scale.cpu(), "mxfp8")[:num_rows]
    exact = expected_middle(gate_up[:num_rows].float(), ACTIVATIONS[activation], bias, schedule)
    expected = quantize_mxfp8(exact.float())
    codes, expected_codes = got.data.view(torch.uint8).int(), expected.data.view(torch.uint8).int()
    assert (got.scale != expected.scale).double().mean() <= 1e-3
    is_same_scale = (got.scale == expected.scale).repeat_interleave(32, dim=1)
    assert (codes - expected_codes)[is_same_scale].abs().max() <= 1
    assert (codes != expected_codes)[is_same_scale].double().mean() <= 1e-3
    assert relative_l2(dequantize(got), dequantize(expected)) <= 1e-3


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bad_and_extreme_accumulators_give_what_torch_gives(activation):
    values = [0.0, -0.0, 1e-30, -1e-30, 3e38, -3e38, math.inf, -math.inf, math.nan, 90.0, -90.0, -110.0]
    pairs = torch.cartesian_prod(torch.tensor(values), torch.tensor(values))
    # One pair to a group, so that a bad one spoils no other.
    gate_up = torch.zeros(1, 2, len(pairs), 32)
    gate_up[0, :, :, 0] = pairs.T
    schedule = schedule_of(torch.tensor([[0]]), 1, spare_rows=0)
    middle = activation_triton.activate_quantize(gate_up.view(1, -1).to(DEVICE), ACTIVATIONS[activation], schedule)
    expected = quantize_mxfp8(apply_activation(gate_up.view(1, -1), ACTIVATIONS[activation]))
    got = MXTensor(middle.data.cpu(), middle.scale.cpu(), "mxfp8")
    assert torch.equal(got.scale, expected.scale)
    torch.testing.assert_close(dequantize(got), dequantize(expected), rtol=0.07, atol=0, equal_nan=True)


def test_accumulators_that_do_not_fit_are_refused_by_name():
    schedule = schedule_of(torch.tensor([[0]]), 1, spare_rows=0)
    with pytest.raises(TypeError, match=r"gate_up: expected bfloat16 or float32, got torch\.float16"):
        activation_triton.activate_quantize(torch.zeros(1, 64, device=DEVICE).half(), SiTU(), schedule)
    with pytest.raises(ValueError, match=r"gate_up: expected contiguous \[1, a multiple of 64\], got \(2, 64\)"):
        activation_triton.activate_quantize(torch.zeros(2, 64, device=DEVICE), SiTU(), schedule)


# --- rows ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("width", [64, 4160])
def test_gathered_rows_are_the_tokens_of_the_schedule_with_exact_scales(width):
    schedule = schedule_of(torch.tensor([[0, 3], [3, 1], [0, 1]]), 4, spare_rows=1)
    x = quantize_mxfp8(torch.randn(3, width, generator=seeded(5)))
    scale = torch.arange(3 * width // 32).view(3, -1).to(torch.uint8)
    scale[2, :2] = torch.tensor([0, 255])
    on_device = MXTensor(x.data.to(DEVICE), scale.to(DEVICE), "mxfp8")
    data, scales = rows_triton.gather_rows(on_device, schedule)
    tokens = schedule.row_tokens[:6].cpu().long()
    assert data.shape == (7, width)
    assert scales.shape == (width // 32, 8)
    assert_bitwise_equal(data[:6].cpu(), x.data[tokens])
    torch.testing.assert_close(scales[:, :6].cpu().T, decode_scale(scale)[tokens], rtol=0, atol=0, equal_nan=True)
    in_order = MXTensor(data, torch.cat([scale[tokens], scale[:1]]).to(DEVICE), "mxfp8")
    again = rows_triton.decode_scales(in_order, schedule)
    assert_bitwise_equal(again[:, :6].contiguous(), scales[:, :6].contiguous())


@pytest.mark.parametrize("has_bias", [False, True], ids=["no_bias", "bias"])
def test_widened_rows_are_exact_and_unused_ones_stay(has_bias):
    schedule = schedule_of(torch.tensor([[0, 3], [3, 1], [0, 1]]), 4, spare_rows=1)
    rows = torch.randn(7, 1100, generator=seeded(6)).bfloat16()
    bias = torch.randn(4, 1100, generator=seeded(7)) if has_bias else None
    out = torch.full((7, 1100), 5.0, device=DEVICE)
    rows_triton.widen_rows(rows.to(DEVICE), schedule, None if bias is None else bias.to(DEVICE), out)
    expected = rows.float()
    if bias is not None:
        expected[:6] += bias[torch.tensor([0, 0, 1, 1, 3, 3])]
    expected[6] = 5.0
    assert_bitwise_equal(out.cpu(), expected)
