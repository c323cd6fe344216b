"""The expert GEMMs in float64 over dequantised operands, for checking what is to be timed; on any device."""

from __future__ import annotations

import torch

from rankmoe.activation import apply_activation
from rankmoe.quantize import dequantize, quantize_mxfp8
from rankmoe.types import Activation, ExpertSchedule, MXTensor


def gate_up_float64(
    x: MXTensor, schedule: ExpertSchedule, w13: MXTensor, bias: torch.Tensor | None, activation: Activation
) -> torch.Tensor:
    """[R, I] float64 of R scheduled rows: the middle, quantised as the rules say and decoded again.

    x: [T, H] mxfp8. w13: [L, 2 I, H] mxfp4 in checkpoint order. bias: [L, 2 I] or None.
    """
    num_rows = int(schedule.expert_offsets[-1])
    rows = dequantize(x, torch.float64)[schedule.row_tokens[:num_rows].long()]
    activated = apply_activation(_products(rows, schedule, w13, bias), activation).float()
    return dequantize(quantize_mxfp8(activated), torch.float64)


def down_float64(
    middle: torch.Tensor, schedule: ExpertSchedule, w2: MXTensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """[R, H] float64. middle: [R, I] float64. w2: [L, H, I] mxfp4 in checkpoint order. bias: [L, H] or None."""
    return _products(middle[: int(schedule.expert_offsets[-1])], schedule, w2, bias)


def _products(
    rows: torch.Tensor, schedule: ExpertSchedule, weight: MXTensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """[R, out] float64 of rows [R, in] in the schedule's order; one expert is decoded at a time."""
    out = torch.empty(rows.shape[0], weight.shape[1], dtype=torch.float64, device=rows.device)
    offsets = schedule.expert_offsets.tolist()
    for expert in range(schedule.num_local_experts):
        own = slice(offsets[expert], offsets[expert + 1])
        if own.start < own.stop:
            out[own] = rows[own] @ dequantize(weight[expert], torch.float64).T
            if bias is not None:
                out[own] += bias[expert].double()
    return out
