# mypy: disable-error-code="no-untyped-def"
"""Rows for a grouped GEMM in Triton: token rows gathered into the schedule's order, and its outputs widened.

Rows beyond the schedule's last one are neither read nor written. No host sync; capturable.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rankmoe.kernels import triton_support
from rankmoe.kernels.triton_support import next_power_of_2
from rankmoe.types import GROUP_SIZE, ExpertSchedule, MXTensor

available = triton_support.available

_GROUPS_PER_BLOCK = 128
_COLUMNS_PER_BLOCK = 1024
_WORDS_PER_GROUP = tl.constexpr(GROUP_SIZE // 4)


def gather_rows(x: MXTensor, schedule: ExpertSchedule) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy each row's token, and decode the scales into the order in which a grouped GEMM streams them.

    x: [T, N] mxfp8, contiguous.
    Returns data [R, N] float8_e4m3fn and scales [N/32, round_up(R, 4)] float32, one column a row.
    """
    data = torch.empty(schedule.row_tokens.shape[0], x.shape[1], dtype=x.data.dtype, device=x.data.device)
    return data, _launch(x, schedule, data)


def decode_scales(x: MXTensor, schedule: ExpertSchedule) -> torch.Tensor:
    """[N/32, round_up(R, 4)] float32 scales, one column a row, of rows [R, N] that are in the schedule's order."""
    return _launch(x, schedule, None)


def _launch(x: MXTensor, schedule: ExpertSchedule, data: torch.Tensor | None) -> torch.Tensor:
    num_rows, num_groups = schedule.row_tokens.shape[0], x.scale.shape[1]
    stride = -(-num_rows // 4) * 4
    scales = torch.empty(num_groups, stride, dtype=torch.float32, device=x.scale.device)
    with triton_support.on_device_of(x.scale):
        _gather_kernel[(num_rows, triton.cdiv(num_groups, _GROUPS_PER_BLOCK))](
            x.data.contiguous().view(torch.int32),
            x.scale.contiguous(),
            schedule.row_tokens,
            schedule.expert_offsets,
            None if data is None else data.view(torch.int32),
            scales,
            num_groups,
            stride,
            num_local_experts=schedule.num_local_experts,
            groups_per_block=_GROUPS_PER_BLOCK,
        )
    return scales


@triton.jit
def _gather_kernel(
    source,
    source_scale,
    row_tokens,
    expert_offsets,
    data,
    scales,
    num_groups,
    scale_stride,
    num_local_experts: tl.constexpr,
    groups_per_block: tl.constexpr,
):
    """Some groups of one row; ``data`` is None where the rows lie in order already. Elements are four to a word."""
    row = tl.program_id(0)
    if row >= tl.load(expert_offsets + num_local_experts):
        return
    first = tl.program_id(1) * groups_per_block
    token = row
    if data is not None:
        token = tl.load(row_tokens + row)
        num_words = num_groups * _WORDS_PER_GROUP
        word = first * _WORDS_PER_GROUP + tl.arange(0, groups_per_block * _WORDS_PER_GROUP)
        values = tl.load(source + token.to(tl.int64) * num_words + word, mask=word < num_words)
        tl.store(data + row.to(tl.int64) * num_words + word, values, mask=word < num_words)
    group = first + tl.arange(0, groups_per_block)
    is_group = group < num_groups
    byte = tl.load(source_scale + token.to(tl.int64) * num_groups + group, mask=is_group, other=127).to(tl.int32)
    tl.store(scales + group.to(tl.int64) * scale_stride + row, scale_of(byte), mask=is_group)


@triton.jit
def scale_of(byte):
    """Float32 of UE8M0 bytes given as int32."""
    bits = tl.where(byte == 0, 0x400000, byte << 23)  # byte 0 is 2^-127, a subnormal
    bits = tl.where(byte == 255, 0x7FC00000, bits)  # byte 255 is NaN, where these bits would be infinity
    return bits.to(tl.float32, bitcast=True)


def widen_rows(
    rows: torch.Tensor, schedule: ExpertSchedule, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """Write ``rows + bias[expert of the row]`` in float32.

    rows: [R, N] bfloat16, contiguous.
    bias: [L, N] float32 or None.
    out: [R, N] float32, contiguous. Rows that the schedule does not use keep what they hold.
    """
    num_rows, width = rows.shape
    with triton_support.on_device_of(rows):
        _widen_kernel[(num_rows, triton.cdiv(width, _COLUMNS_PER_BLOCK))](
            rows.view(torch.int16),
            schedule.expert_offsets,
            None if bias is None else bias.contiguous(),
            out,
            width,
            num_local_experts=schedule.num_local_experts,
            experts_per_block=next_power_of_2(schedule.num_local_experts),
            columns_per_block=_COLUMNS_PER_BLOCK,
        )
    return out


@triton.jit
def _widen_kernel(
    rows,
    expert_offsets,
    bias,
    out,
    width,
    num_local_experts: tl.constexpr,
    experts_per_block: tl.constexpr,
    columns_per_block: tl.constexpr,
):
    """Some columns of one row. rows: the bits of bfloat16 values."""
    row = tl.program_id(0)
    if row >= tl.load(expert_offsets + num_local_experts):
        return
    column = tl.program_id(1) * columns_per_block + tl.arange(0, columns_per_block)
    is_column = column < width
    bits = tl.load(rows + row.to(tl.int64) * width + column, mask=is_column, other=0).to(tl.int32) << 16
    value = bits.to(tl.float32, bitcast=True)
    if bias is not None:
        expert = expert_of_row(row, expert_offsets, num_local_experts, experts_per_block)
        value += tl.load(bias + expert.to(tl.int64) * width + column, mask=is_column, other=0.0)
    tl.store(out + row.to(tl.int64) * width + column, value, mask=is_column)


@triton.jit
def expert_of_row(row, expert_offsets, num_local_experts: tl.constexpr, experts_per_block: tl.constexpr):
    """Local expert of a row that the schedule uses: the number of experts that end at or before it."""
    expert = tl.arange(0, experts_per_block)
    end = tl.load(expert_offsets + 1 + expert, mask=expert < num_local_experts, other=2147483647)
    return tl.sum((end <= row).to(tl.int32), axis=0)
