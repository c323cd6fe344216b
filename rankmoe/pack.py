"""Packed ids: the wire format ``(id << 16) | bf16_bits(weight)`` of external runners, global or rank-local.

A rank-local packed tensor makes the consumer solve a problem of ``round_up(count + top_k, 4)`` experts with offset 0
instead of the whole model's: own ids become ``id - offset``, a foreign id in slot ``k`` becomes ``count + k``, which is
distinct within the row and never owned.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from rankmoe.backends import triton_kernel
from rankmoe.types import LocalRange, Routing, check_ids_dtype, widen_ids

#: Largest id that the packed form's int16 half can hold.
MAX_PACKED_ID = 32767


def rank_local_num_experts(num_experts: int, local_range: LocalRange, top_k: int) -> int | None:
    """The ``num_experts`` to hand a consumer of rank-local ids, or None where ids stay global.

    It is ``round_up(count + top_k, 4)`` and applies only where ``0 < count < num_experts`` and it is smaller than
    ``num_experts``. Kimi-K3 on EP8: 896 experts, count 112, top-16 give 128.
    Raises ValueError for a range outside the experts.
    """
    local_range.validate(num_experts)
    local_num_experts = (local_range.count + top_k + 3) // 4 * 4
    applies = 0 < local_range.count < num_experts and local_num_experts < num_experts
    return local_num_experts if applies else None


def rank_local_ids(topk_ids: torch.Tensor, local_range: LocalRange, num_experts: int) -> torch.Tensor:
    """Relabel global ids for one rank: owned ids to ``id - offset``, any other id in slot ``k`` to ``count + k``.

    topk_ids: [T, K] int32, int64 or uint32. Global ids; the tensor is not changed.
    Returns [T, K] int32.
    Raises ValueError, naming both numbers, where relabelling does not apply (see ``rank_local_num_experts``).
    """
    if topk_ids.dim() != 2:
        raise ValueError(f"topk_ids: expected [num_tokens, top_k], got {tuple(topk_ids.shape)}")
    top_k = topk_ids.shape[1]
    if rank_local_num_experts(num_experts, local_range, top_k) is None:
        raise ValueError(
            f"local_range: rank-local ids need 0 < count and round_up(count + top_k, 4) < num_experts, got "
            f"offset={local_range.offset}, count={local_range.count}, top_k={top_k}, num_experts={num_experts}"
        )
    local = widen_ids(topk_ids) - local_range.offset
    slot = torch.arange(top_k, device=topk_ids.device)
    is_owned = (local >= 0) & (local < local_range.count)
    return torch.where(is_owned, local, local_range.count + slot).int()


def pack_topk(routing: Routing, num_experts: int, local_range: LocalRange | None = None) -> Routing:
    """Add the packed tensor to a routing.

    routing: global topk_ids [T, K] and float32 topk_weights [T, K]; both are returned as they are.
    local_range: write rank-local ids for this range. None, a count of 0, and every range for which
        ``rank_local_num_experts`` is None keep global ids; the result's ``local_range`` says which was done.
    Raises ValueError for a range outside the experts or an id that int16 cannot hold.
    """
    ids, written_for = routing.topk_ids, None
    if local_range is not None and rank_local_num_experts(num_experts, local_range, ids.shape[1]) is not None:
        written_for = local_range
    elif num_experts > MAX_PACKED_ID + 1:
        raise ValueError(f"num_experts: expected at most {MAX_PACKED_ID + 1} for packed global ids, got {num_experts}")
    kernel = _packing_kernel(ids, routing.topk_weights)
    if kernel is not None:
        packed = kernel.pack(ids, routing.topk_weights, written_for)
    else:
        if written_for is not None:
            ids = rank_local_ids(ids, written_for, num_experts)
        packed = pack(ids, routing.topk_weights)
    return dataclasses.replace(routing, packed=packed, local_range=written_for)


@dataclass(frozen=True)
class IdSpace:
    """What a consumer of packed ids is told: how many experts there are, and where this rank's range begins."""

    num_experts: int
    local_expert_offset: int


def id_space(routing: Routing, num_experts: int, local_range: LocalRange) -> IdSpace:
    """The id space of a routing's packed ids, for the rank that owns ``local_range``.

    Rank-local ids live in ``rank_local_num_experts(...)`` experts with offset 0, global ones in the model's.
    Raises ValueError where the packed ids were written for another rank's range: reading them as this rank's, or
    relabelling them again, would silently pick wrong experts.
    """
    if routing.local_range is None:
        return IdSpace(num_experts, local_range.offset)
    if routing.local_range != local_range:
        raise ValueError(
            f"routing.local_range: expected the weights' range offset={local_range.offset}, "
            f"count={local_range.count}, got offset={routing.local_range.offset}, count={routing.local_range.count}"
        )
    local_num_experts = rank_local_num_experts(num_experts, local_range, routing.topk_ids.shape[1])
    if local_num_experts is None:
        raise ValueError(
            f"routing.local_range: rank-local ids do not apply to count={local_range.count} of {num_experts} experts"
        )
    return IdSpace(local_num_experts, 0)


def pack(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Pack ids and weights into ``(id << 16) | bf16_bits(weight)``.

    ids: [T, K] int32, int64 or uint32, at most 32767; negative ids stay negative.
    weights: [T, K] float32. Rounded to bfloat16, to nearest even.
    Returns [T, K] int32. Raises TypeError or ValueError; the check of the ids' values runs for CPU tensors.
    """
    kernel = _packing_kernel(ids, weights)
    if kernel is not None:
        return kernel.pack(ids, weights, None)
    ids = widen_ids(ids)
    if ids.device.type == "cpu" and ids.numel() and int(ids.max()) > MAX_PACKED_ID:
        raise ValueError(f"ids: expected at most {MAX_PACKED_ID} for the packed form, got {int(ids.max())}")
    bits = weights.to(torch.bfloat16).view(torch.int16).long() & 0xFFFF
    bits = torch.where(weights.isnan(), 0x7FC0, bits)  # which NaN torch's cast gives depends on its vector width
    return ((ids.clamp(min=-1) << 16) | bits).int()


def _packing_kernel(ids: torch.Tensor, weights: torch.Tensor) -> Any:
    """The kernel that packs on their device, or None; TypeError or ValueError where there is nothing to pack."""
    if weights.dtype != torch.float32:
        raise TypeError(f"weights: expected float32, got {weights.dtype}")
    if ids.shape != weights.shape:
        raise ValueError(f"weights: expected the ids' shape {tuple(ids.shape)}, got {tuple(weights.shape)}")
    check_ids_dtype(ids)
    return triton_kernel("pack", ids.device)


def unpack(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split packed ids into ids [T, K] int32 (signed) and weights [T, K] bfloat16."""
    if packed.dtype != torch.int32:
        raise TypeError(f"packed: expected int32, got {packed.dtype}")
    weights = (packed & 0xFFFF).to(torch.int16).view(torch.bfloat16)
    return packed >> 16, weights
