# mypy: disable-error-code="no-untyped-def"
"""``combine`` in Triton: one launch, slots added in slot order in float32, rounded once. No atomics, no host sync."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rankmoe.kernels import triton_support
from rankmoe.types import ExpertSchedule

available = triton_support.available

_COLUMNS_PER_BLOCK = 512


def combine(
    rows: torch.Tensor,
    topk_weights: torch.Tensor,
    schedule: ExpertSchedule,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Sum this rank's slots; arguments, covered and checked by the caller, as ``rankmoe.combine.combine``.

    Returns [T, H] ``out_dtype``, the bits of the torch statement. Capturable.
    """
    (num_tokens, top_k), hidden_size = topk_weights.shape, rows.shape[1]
    out = torch.empty(num_tokens, hidden_size, dtype=out_dtype, device=rows.device)
    if out.numel():
        with triton_support.on_device_of(rows):
            _combine_kernel[(num_tokens, triton.cdiv(hidden_size, _COLUMNS_PER_BLOCK))](
                rows,
                topk_weights.contiguous(),
                schedule.slot_rows.contiguous(),
                out.view(torch.int16) if out_dtype == torch.bfloat16 else out,
                hidden_size,
                rows.stride(0),
                top_k=top_k,
                columns_per_block=_COLUMNS_PER_BLOCK,
                # A fused multiply-add would round once where the rule rounds the product and the sum.
                enable_fp_fusion=False,
            )
    return out


@triton.jit
def _combine_kernel(
    rows,
    topk_weights,
    slot_rows,
    out,
    hidden_size,
    row_stride,
    top_k: tl.constexpr,
    columns_per_block: tl.constexpr,
):
    """Sum some columns of one token. out: float32, or int16 for the bits of bfloat16."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns_per_block + tl.arange(0, columns_per_block)
    is_column = column < hidden_size
    total = tl.zeros((columns_per_block,), tl.float32)
    for slot in tl.static_range(top_k):
        row = tl.load(slot_rows + token * top_k + slot)
        weight = tl.load(topk_weights + token * top_k + slot)
        is_here = row >= 0
        value = tl.load(rows + row.to(tl.int64) * row_stride + column, mask=is_column & is_here, other=0.0)
        # Chosen, not multiplied by zero: the weight of a slot that is not here may be NaN.
        total = tl.where(is_here, total + weight * value, total)
    if out.dtype.element_ty == tl.int16:
        # To nearest even on integers, as the interpreter would truncate; NaN apart, which a carry could turn into zero.
        bits = total.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        total = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).to(tl.int16)
    tl.store(out + token * hidden_size + column, total, mask=is_column)
