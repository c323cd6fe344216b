"""Expert ids to an expert schedule: which of this rank's experts computes which tokens, and in which row."""

from __future__ import annotations

import torch

from rankmoe.backends import cuda_kernel, triton_kernel
from rankmoe.pack import unpack
from rankmoe.types import MAX_FRONT_TOKENS, ExpertSchedule, Routing, widen_ids


def build_schedule(
    topk_ids: torch.Tensor,
    num_local_experts: int,
    *,
    num_experts: int,
    local_expert_offset: int = 0,
    expert_map: torch.Tensor | None = None,
    is_packed: bool = False,
) -> ExpertSchedule:
    """Schedule the slots whose expert this rank owns; every other id, negative or too large ones included, is skipped.

    topk_ids: [T, K] int32, int64 or uint32, in the id space that the other arguments describe: global ids with this
        rank's offset, or rank-local ids with ``num_experts=rank_local_num_experts(...)`` and offset 0.
    num_local_experts: L.
    num_experts: ids are valid in [0, num_experts).
    local_expert_offset: first id of this rank.
    expert_map: [num_experts] int32 or None. Local id or -1 of each expert, for ranks that own no contiguous range;
        the offset must then be 0.
    is_packed: ``topk_ids`` are packed ids, int32, whose upper half is the id.
    Raises TypeError for the ids' dtype, ValueError for sizes that do not fit.
    """
    check_id_space(topk_ids, num_local_experts, num_experts, local_expert_offset, expert_map)
    if is_packed and topk_ids.dtype != torch.int32:
        raise TypeError(f"topk_ids: expected int32 where they are packed, got {topk_ids.dtype}")
    device = topk_ids.device
    if device.type != "cpu" and expert_map is not None:
        expert_map = expert_map.to(device)
    for kernel in (cuda_kernel("schedule", device), triton_kernel("schedule", device)):
        if kernel is not None and kernel.covered(topk_ids, num_local_experts, expert_map):
            return kernel.build_schedule(
                topk_ids,
                num_local_experts,
                num_experts=num_experts,
                local_expert_offset=local_expert_offset,
                expert_map=expert_map,
                is_packed=is_packed,
            )
    if is_packed:
        topk_ids = unpack(topk_ids)[0]
    local = _local_expert_ids(topk_ids, num_local_experts, num_experts, local_expert_offset, expert_map)
    num_tokens, _ = local.shape
    token = torch.arange(num_tokens, device=device)[:, None].expand_as(local)
    # has_token[expert, token]: one row each, in row-major order, however often a token names an expert.
    has_token = torch.zeros(num_local_experts, num_tokens, dtype=torch.bool, device=device)
    is_local = local >= 0
    has_token[local[is_local], token[is_local]] = True
    offsets = torch.zeros(num_local_experts + 1, dtype=torch.int32, device=device)
    offsets[1:] = has_token.sum(1).cumsum(0)
    row_of_pair = has_token.flatten().cumsum(0).view_as(has_token) - 1
    slot_rows = torch.full_like(local, -1)
    slot_rows[is_local] = row_of_pair[local[is_local], token[is_local]]
    mask = None
    if num_tokens <= MAX_FRONT_TOKENS:
        bit = torch.ones((), dtype=torch.int64, device=device) << torch.arange(num_tokens, device=device)
        mask = (has_token * bit).sum(1)
    return ExpertSchedule(
        num_tokens=num_tokens,
        expert_token_mask=mask,
        expert_offsets=offsets,
        row_tokens=has_token.nonzero()[:, 1].int(),
        slot_rows=slot_rows.int().contiguous(),
    )


def schedule_routing(
    routing: Routing,
    num_local_experts: int,
    *,
    num_experts: int,
    local_expert_offset: int = 0,
    expert_map: torch.Tensor | None = None,
) -> ExpertSchedule:
    """Schedule a routing from its packed ids where it has them, else from its global ids; see ``build_schedule``."""
    return build_schedule(
        routing.topk_ids if routing.packed is None else routing.packed,
        num_local_experts,
        num_experts=num_experts,
        local_expert_offset=local_expert_offset,
        expert_map=expert_map,
        is_packed=routing.packed is not None,
    )


def _local_expert_ids(
    topk_ids: torch.Tensor,
    num_local_experts: int,
    num_experts: int,
    local_expert_offset: int,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    """[T, K] int64. Local expert of each slot, -1 where this rank does not own it."""
    ids = widen_ids(topk_ids)
    is_valid = (ids >= 0) & (ids < num_experts)
    if expert_map is None:
        local = ids - local_expert_offset
    else:
        local = expert_map.to(ids.device)[torch.where(is_valid, ids, 0)].long()
    is_local = is_valid & (local >= 0) & (local < num_local_experts)
    return torch.where(is_local, local, -1)


def check_id_space(
    topk_ids: torch.Tensor,
    num_local_experts: int,
    num_experts: int,
    local_expert_offset: int,
    expert_map: torch.Tensor | None,
) -> None:
    """Raise ValueError unless the ids are [T, K] and their space, as ``build_schedule`` takes it, is possible."""
    if topk_ids.dim() != 2:
        raise ValueError(f"topk_ids: expected [num_tokens, top_k], got {tuple(topk_ids.shape)}")
    if num_local_experts < 0 or local_expert_offset < 0 or local_expert_offset + num_local_experts > num_experts:
        raise ValueError(
            f"local_expert_offset: expected offset + num_local_experts <= num_experts={num_experts}, "
            f"got offset={local_expert_offset}, num_local_experts={num_local_experts}"
        )
    if expert_map is None:
        return
    if tuple(expert_map.shape) != (num_experts,) or local_expert_offset:
        raise ValueError(
            f"expert_map: expected ({num_experts},) with local_expert_offset 0, "
            f"got {tuple(expert_map.shape)} with {local_expert_offset}"
        )
    if expert_map.device.type == "cpu" and num_experts and int(expert_map.max()) >= num_local_experts:
        raise ValueError(
            f"expert_map: expected local ids below num_local_experts={num_local_experts}, got {int(expert_map.max())}"
        )
