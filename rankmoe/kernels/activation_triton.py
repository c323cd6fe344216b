# mypy: disable-error-code="no-untyped-def"
"""Activation and requantisation in Triton: [R, 2 I] accumulators to the [R, I] MXFP8 middle in one launch.

The activation runs in float32 and is quantised from float32, with no rounding between. Rows beyond the schedule's last
one are neither read nor written. No host sync; capturable.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rankmoe.kernels import triton_support
from rankmoe.kernels.quantize_triton import encode_groups
from rankmoe.kernels.rows_triton import expert_of_row
from rankmoe.kernels.triton_support import next_power_of_2
from rankmoe.types import GROUP_SIZE, Activation, ExpertSchedule, MXTensor, SiTU

available = triton_support.available

_GROUPS_PER_BLOCK = 32
_DTYPES = (torch.bfloat16, torch.float32)


def activate_quantize(
    gate_up: torch.Tensor, activation: Activation, schedule: ExpertSchedule, bias: torch.Tensor | None = None
) -> MXTensor:
    """Apply the expert MLP's activation and quantise the result.

    gate_up: [R, 2 I] bfloat16 or float32, contiguous, in the schedule's row order; gate in the first half of a row.
    bias: [L, 2 I] float32 or None. Added to the accumulators of its expert's rows.
    Returns [R, I] mxfp8; rows that the schedule does not use hold anything.
    Raises TypeError for another dtype, ValueError for a shape that does not fit.
    """
    num_rows, width = gate_up.shape
    if gate_up.dtype not in _DTYPES:
        raise TypeError(f"gate_up: expected bfloat16 or float32, got {gate_up.dtype}")
    if width % (2 * GROUP_SIZE) or num_rows != schedule.row_tokens.shape[0] or not gate_up.is_contiguous():
        raise ValueError(
            f"gate_up: expected contiguous [{schedule.row_tokens.shape[0]}, a multiple of {2 * GROUP_SIZE}], "
            f"got {tuple(gate_up.shape)} strides {gate_up.stride()}"
        )
    num_groups = width // (2 * GROUP_SIZE)
    data = torch.empty(num_rows, width // 2, dtype=torch.float8_e4m3fn, device=gate_up.device)
    scale = torch.empty(num_rows, num_groups, dtype=torch.uint8, device=gate_up.device)
    if num_rows:
        with triton_support.on_device_of(gate_up):
            _activate_quantize_kernel[(num_rows, triton.cdiv(num_groups, _GROUPS_PER_BLOCK))](
                gate_up.view(torch.int16 if gate_up.dtype == torch.bfloat16 else torch.int32),
                schedule.expert_offsets,
                None if bias is None else bias.contiguous(),
                data.view(torch.uint8),
                scale,
                num_groups,
                **activation_constants(activation),
                num_local_experts=schedule.num_local_experts,
                experts_per_block=next_power_of_2(schedule.num_local_experts),
                group_size=GROUP_SIZE,
                groups_per_block=_GROUPS_PER_BLOCK,
            )
    return MXTensor(data, scale, "mxfp8")


def activation_constants(activation: Activation) -> dict[str, float | bool | None]:
    """What ``activate`` is told of an activation; None for what the other kind has."""
    if isinstance(activation, SiTU):
        own: dict[str, float | bool | None] = {"beta": activation.beta, "linear_beta": activation.linear_beta}
        return {"is_situ": True, **own, "alpha": None, "limit": None, "up_offset": None}
    own = {"alpha": activation.alpha, "limit": activation.limit, "up_offset": activation.up_offset}
    return {"is_situ": False, "beta": None, "linear_beta": None, **own}


@triton.jit
def _activate_quantize_kernel(
    gate_up,
    expert_offsets,
    bias,
    data,
    scale,
    num_groups,
    is_situ: tl.constexpr,
    beta: tl.constexpr,
    linear_beta: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    up_offset: tl.constexpr,
    num_local_experts: tl.constexpr,
    experts_per_block: tl.constexpr,
    group_size: tl.constexpr,
    groups_per_block: tl.constexpr,
):
    """Some groups of one row. gate_up: the bits of the accumulators, int16 (bfloat16) or int32 (float32)."""
    row = tl.program_id(0)
    if row >= tl.load(expert_offsets + num_local_experts):
        return
    group = tl.program_id(1) * groups_per_block + tl.arange(0, groups_per_block)
    is_group = group < num_groups
    column = group[:, None] * group_size + tl.arange(0, group_size)[None, :]
    intermediate_size = num_groups * group_size
    source = gate_up + row.to(tl.int64) * (2 * intermediate_size) + column
    gate = _load_float(source, is_group)
    up = _load_float(source + intermediate_size, is_group)
    if bias is not None:
        expert = expert_of_row(row, expert_offsets, num_local_experts, experts_per_block)
        own = bias + expert.to(tl.int64) * (2 * intermediate_size) + column
        gate += tl.load(own, mask=is_group[:, None], other=0.0)
        up += tl.load(own + intermediate_size, mask=is_group[:, None], other=0.0)
    value = activate(gate, up, is_situ, beta, linear_beta, alpha, limit, up_offset)
    codes, scale_byte = encode_groups(value.to(tl.int32, bitcast=True))
    tl.store(data + row.to(tl.int64) * intermediate_size + column, codes.to(tl.uint8), mask=is_group[:, None])
    tl.store(scale + row.to(tl.int64) * num_groups + group, scale_byte.to(tl.uint8), mask=is_group)


@triton.jit
def activate(
    gate,
    up,
    is_situ: tl.constexpr,
    beta: tl.constexpr,
    linear_beta: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    up_offset: tl.constexpr,
):
    """SiTU or SwiGLU of float32 accumulators."""
    if is_situ:
        value = beta * _tanh(gate / beta) * _sigmoid(gate) * (linear_beta * _tanh(up / linear_beta))
    else:
        if limit is not None:  # comparisons, since a minimum would replace NaN
            gate = tl.where(gate > limit, limit, gate)
            up = tl.where(up > limit, limit, up)
            up = tl.where(up < -limit, -limit, up)
        value = gate * _sigmoid(alpha * gate) * (up + up_offset)
    return value


@triton.jit
def _load_float(pointers, is_group):
    """Float32 values of [groups, 32] bits."""
    bits = tl.load(pointers, mask=is_group[:, None], other=0).to(tl.int32)
    if pointers.dtype.element_ty == tl.int16:
        bits = bits << 16
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    """Hyperbolic tangent within 2 ulp: an odd polynomial near 0, where ``1 - 2 / (exp(2 x) + 1)`` cancels."""
    square = x * x
    p = 0.0033036924432963133 * square - 0.00878969207406044  # least squares for |x| <= 0.625
    p = p * square + 0.02185956947505474
    p = p * square - 0.05396759882569313
    p = p * square + 0.13333331048488617
    p = p * square - 0.3333333432674408
    small = x + x * (square * p)
    magnitude = tl.abs(x)
    large = 1.0 - 2.0 / (tl.exp(2.0 * magnitude) + 1.0)
    return tl.where(magnitude < 0.625, small, tl.where(x < 0, -large, large))
