"""Token rows to rows sorted by expert and back; static shapes and no wait for the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: The grouped GEMM needs every expert's first row aligned to 16 bytes in either layout.
ROW_ALIGNMENT = 8


@dataclass(frozen=True)
class Dispatch:
    """Where each slot's row stands, with every expert's first row aligned; static shapes, made on the device.

    slot_rows: [T, K] int64. Row of each slot.
    row_slots: [R] int64. Slot (``t * K + k``) of each row; -1 in padding rows. R: T * K aligned, and E * ROW_ALIGNMENT.
    row_ends: [E] int32. The row after each expert's last; the last expert also takes all the rows that are left over.
    """

    slot_rows: Tensor
    row_slots: Tensor
    row_ends: Tensor

    def to_rows(self, tokens: Tensor) -> Tensor:
        """Token rows [T, H] to expert rows [R, H]."""
        return _DispatchRows.apply(tokens, self.row_slots, self.slot_rows)

    def to_slots(self, rows: Tensor) -> Tensor:
        """Expert rows [R, H] to one row per slot [T, K, H]."""
        return _CollectSlots.apply(rows, self.row_slots, self.slot_rows)


def dispatch(topk_ids: Tensor, num_experts: int) -> Dispatch:
    """Sort the slots by expert. topk_ids: [T, K] int64."""
    flat = topk_ids.flatten()
    sorted_ids, order = flat.sort(stable=True)
    experts = torch.arange(num_experts, device=flat.device)
    ends = torch.searchsorted(sorted_ids, experts, right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    # At least one padding row each: a grouped GEMM over no rows need not write its weight gradient.
    padded_counts = (counts + ROW_ALIGNMENT) // ROW_ALIGNMENT * ROW_ALIGNMENT
    padded_ends = padded_counts.cumsum(0)
    padding_before = (padded_ends - padded_counts) - (ends - counts)
    rows = torch.arange(flat.numel(), device=flat.device) + padding_before[sorted_ids]
    num_rows = (flat.numel() + ROW_ALIGNMENT - 1) // ROW_ALIGNMENT * ROW_ALIGNMENT + num_experts * ROW_ALIGNMENT
    slot_rows = torch.empty_like(flat).scatter_(0, order, rows)
    row_slots = flat.new_full((num_rows,), -1).scatter_(0, rows, order)
    row_ends = padded_ends.int()
    row_ends[-1] = num_rows
    return Dispatch(slot_rows.view_as(topk_ids), row_slots, row_ends)


def count_slots(topk_ids: Tensor, num_experts: int, is_counted: Tensor | None = None) -> Tensor:
    """Slots of each expert in each layer.

    topk_ids: [layers, T, K] int64. is_counted: [T] bool or None; tokens that count.
    Returns [layers, E] int64.
    """
    ones = torch.ones_like(topk_ids)
    if is_counted is not None:
        ones = ones * is_counted[:, None]
    counts = topk_ids.new_zeros(topk_ids.shape[0], num_experts)
    return counts.scatter_add_(1, topk_ids.flatten(1), ones.flatten(1))


class _DispatchRows(torch.autograd.Function):
    """Token rows [T, H] to expert rows [R, H], zero in padding rows. Both directions gather, so no atomics."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, row_slots: Tensor, slot_rows: Tensor) -> Tensor:
        ctx.save_for_backward(slot_rows)
        dispatched = tokens[row_slots.clamp(min=0) // slot_rows.shape[1]]
        return dispatched.masked_fill_((row_slots < 0)[:, None], 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (slot_rows,) = ctx.saved_tensors
        return gradient[slot_rows].sum(1), None, None


class _CollectSlots(torch.autograd.Function):
    """Expert rows [R, H] to one row per slot [T, K, H]; the gradient of a padding row is zero."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, row_slots: Tensor, slot_rows: Tensor) -> Tensor:
        ctx.save_for_backward(row_slots)
        return rows[slot_rows]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (row_slots,) = ctx.saved_tensors
        rows = gradient.flatten(0, 1)[row_slots.clamp(min=0)]
        return rows.masked_fill_((row_slots < 0)[:, None], 0), None, None
