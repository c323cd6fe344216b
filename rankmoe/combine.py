"""Expert rows to token rows: the weighted sum over a token's slots, in slot order, without atomics."""

from __future__ import annotations

import torch

from rankmoe.backends import cuda_kernel, triton_kernel
from rankmoe.quantize import needs_gradient
from rankmoe.types import ExpertSchedule

#: Slots of a token that the kernels take.
MAX_TOP_K = 128


def combine(
    rows: torch.Tensor,
    topk_weights: torch.Tensor,
    schedule: ExpertSchedule,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Sum this rank's slots: ``out[t] = sum over slots k, in slot order, of weight[t, k] * rows[slot_rows[t, k]]``.

    rows: [R, H] float32. The down GEMM's rows in the schedule's order.
    topk_weights: [T, K] float32.
    out_dtype: bfloat16, rounded once from the float32 sum; float32 for a caller whose all-reduce runs in float32.
    Returns [T, H] ``out_dtype``; zeros for a token without a slot on this rank. The weight of a slot that this rank
    does not compute is never used, so a NaN there does not leak.
    """
    for name, tensor in (("rows", rows), ("topk_weights", topk_weights)):
        if tensor.dtype != torch.float32:
            raise TypeError(f"{name}: expected float32, got {tensor.dtype}")
    if topk_weights.shape != schedule.slot_rows.shape:
        raise ValueError(
            f"topk_weights: expected {tuple(schedule.slot_rows.shape)} as the schedule, got {tuple(topk_weights.shape)}"
        )
    num_rows = schedule.row_tokens.shape[0]
    if rows.dim() != 2 or rows.shape[0] < num_rows:
        raise ValueError(f"rows: expected [{num_rows}, hidden] as the schedule, got {tuple(rows.shape)}")
    kernel = cuda_kernel("combine", rows.device) or triton_kernel("combine", rows.device)
    is_followed = needs_gradient(rows) or needs_gradient(topk_weights)
    if kernel is not None and _covered_by_kernels(rows, topk_weights, out_dtype) and not is_followed:
        return kernel.combine(rows, topk_weights, schedule, out_dtype)
    out = torch.zeros(schedule.num_tokens, rows.shape[1], dtype=torch.float32, device=rows.device)
    for slot in range(topk_weights.shape[1]):
        slot_rows = schedule.slot_rows[:, slot]
        tokens = (slot_rows >= 0).nonzero().squeeze(1)
        out[tokens] += topk_weights[tokens, slot, None] * rows[slot_rows[tokens].long()]
    return out.to(out_dtype)


def _covered_by_kernels(rows: torch.Tensor, topk_weights: torch.Tensor, out_dtype: torch.dtype) -> bool:
    """Whether a kernel takes these rows; looks at shapes, dtypes and strides alone."""
    return (
        rows.dim() == topk_weights.dim() == 2
        and rows.dtype == topk_weights.dtype == torch.float32
        and out_dtype in (torch.bfloat16, torch.float32)
        and rows.stride(1) == 1
        and topk_weights.shape[1] <= MAX_TOP_K
    )
