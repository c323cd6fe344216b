# mypy: disable-error-code="no-untyped-def"
"""``pack_topk`` in Triton: global or rank-local packed ids in one launch, where torch takes one for each operation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rankmoe.kernels import triton_support
from rankmoe.types import LocalRange

available = triton_support.available

_SLOTS_PER_BLOCK = 1024


def pack(topk_ids: torch.Tensor, topk_weights: torch.Tensor, local_range: LocalRange | None) -> torch.Tensor:
    """Pack ids and weights in one launch. No host sync; capturable.

    topk_ids: [T, K] int32, int64 or uint32 global ids, any strides. topk_weights: [T, K] float32.
    local_range: write ids local to this range; None keeps them global.
    Returns [T, K] int32, bit for bit what ``rankmoe.pack.pack_topk`` states.
    """
    if topk_ids.dtype == torch.uint32:
        topk_ids = topk_ids.view(torch.int32)
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    packed = torch.empty(topk_ids.shape, dtype=torch.int32, device=topk_ids.device)
    num_slots = topk_ids.numel()
    if num_slots:
        with triton_support.on_device_of(topk_ids):
            _pack_kernel[(triton.cdiv(num_slots, _SLOTS_PER_BLOCK),)](
                topk_ids,
                topk_weights.view(torch.int32),
                packed,
                num_slots,
                local_range.offset if local_range else 0,
                local_range.count if local_range else 0,
                top_k=topk_ids.shape[-1],
                is_local=local_range is not None,
                slots_per_block=_SLOTS_PER_BLOCK,
            )
    return packed


@triton.jit
def _pack_kernel(
    topk_ids,
    topk_weights,
    packed,
    num_slots,
    offset,
    count,
    top_k: tl.constexpr,
    is_local: tl.constexpr,
    slots_per_block: tl.constexpr,
):
    """Pack some slots. topk_weights: the bits of the float32 weights."""
    slot = tl.program_id(0).to(tl.int64) * slots_per_block + tl.arange(0, slots_per_block)
    is_slot = slot < num_slots
    ids = tl.load(topk_ids + slot, mask=is_slot, other=0).to(tl.int64)
    if is_local:
        local = ids - offset
        ids = tl.where((local >= 0) & (local < count), local, count + slot % top_k)
    bits = tl.load(topk_weights + slot, mask=is_slot, other=0)
    # To nearest even on the bits: the interpreter's cast truncates. A NaN has one form.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded) & 0xFFFF
    tl.store(packed + slot, (tl.maximum(ids, -1).to(tl.int32) << 16) | rounded, mask=is_slot)
