"""An expert schedule as the padded tiles of FlashInfer's grouped GEMMs, so that their routing pass is not needed.

Source of the format: FlashInfer 0.7.4, ``TrtllmMoERoutingMetadataSlot`` and the routing kernels that fill it. An
expert's rows are padded to whole tiles; experts without rows have none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rankmoe.backends import triton_kernel
from rankmoe.pack import IdSpace
from rankmoe.types import ExpertSchedule

#: Numbers of the scratch that FlashInfer's router counts in: two an expert, for at least so many experts.
_MIN_HISTOGRAM_EXPERTS = 256


class RoutingMetadata(NamedTuple):
    """The nine tensors, in FlashInfer's order; int32 on the schedule's device but for the weights.

    total_num_padded_tokens: [1]. Rows of all tiles.
    expanded_idx_to_permuted_idx: [T * K]. Padded row of each slot; -1 where another rank computes it.
    permuted_idx_to_token_idx: [P + 1]. Token of each padded row; -1 in unused ones. P is what the sizes allow at most.
    expert_weights: [T, K] float32, the routing weights themselves.
    expert_count_histogram: [max(2 E, 512)]. Scratch; not written.
    num_tokens_per_expert: [E] in the id space that the GEMMs are told; 0 for experts of other ranks.
    cta_idx_xy_to_batch_idx: [C]. Local expert of each tile, ascending; not written from ``num_non_exiting_ctas`` on.
    cta_idx_xy_to_mn_limit: [C]. First padded row beyond the tile's used ones, likewise.
    num_non_exiting_ctas: [1]. Tiles that have rows.
    """

    total_num_padded_tokens: torch.Tensor
    expanded_idx_to_permuted_idx: torch.Tensor
    permuted_idx_to_token_idx: torch.Tensor
    expert_weights: torch.Tensor
    expert_count_histogram: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    cta_idx_xy_to_batch_idx: torch.Tensor
    cta_idx_xy_to_mn_limit: torch.Tensor
    num_non_exiting_ctas: torch.Tensor


def max_num_tiles(num_slots: int, num_experts: int, tile_n: int) -> int:
    """Tiles that the slots can fill at most: one for each expert that gets a row, and one more for each full tile of
    what is left then."""
    num_filled = min(num_experts, num_slots)
    return num_filled + (num_slots - num_filled) // tile_n


def allocate_routing_metadata(topk_weights: torch.Tensor, space: IdSpace, tile_n: int) -> RoutingMetadata:
    """Tensors for a batch's sizes; a captured graph may fill them again and again.

    topk_weights: [T, K] float32 or bfloat16; it becomes ``expert_weights`` itself.
    """
    if tile_n < 1:
        raise ValueError(f"tile_n: expected at least 1, got {tile_n}")
    num_slots = topk_weights.numel()
    num_tiles = max_num_tiles(num_slots, space.num_experts, tile_n)

    def empty(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=topk_weights.device)

    return RoutingMetadata(
        total_num_padded_tokens=empty(1),
        expanded_idx_to_permuted_idx=empty(num_slots),
        permuted_idx_to_token_idx=empty(num_tiles * tile_n + 1),
        expert_weights=topk_weights,
        expert_count_histogram=empty(2 * max(space.num_experts, _MIN_HISTOGRAM_EXPERTS)),
        num_tokens_per_expert=empty(space.num_experts),
        cta_idx_xy_to_batch_idx=empty(num_tiles),
        cta_idx_xy_to_mn_limit=empty(num_tiles),
        num_non_exiting_ctas=empty(1),
    )


def fill_routing_metadata(
    metadata: RoutingMetadata, schedule: ExpertSchedule, local_expert_offset: int, tile_n: int
) -> None:
    """Write a schedule into what ``allocate_routing_metadata`` made. No host sync; capturable; one launch on a GPU.

    schedule: with ``expert_offsets``, ``row_tokens`` and ``slot_rows``. A token that names an expert twice has one row.
    Raises ValueError where the schedule's slots or experts do not fit the tensors.
    """
    num_experts, num_slots = metadata.num_tokens_per_expert.shape[0], metadata.expanded_idx_to_permuted_idx.shape[0]
    if schedule.slot_rows.numel() != num_slots:
        raise ValueError(f"schedule: expected {num_slots} slots as the metadata, got {schedule.slot_rows.numel()}")
    if local_expert_offset < 0 or local_expert_offset + schedule.num_local_experts > num_experts:
        raise ValueError(
            f"local_expert_offset: expected offset + {schedule.num_local_experts} local experts <= {num_experts}, "
            f"got {local_expert_offset}"
        )
    kernel = triton_kernel("routing_metadata", schedule.slot_rows.device)
    if kernel is not None:
        kernel.fill(metadata, schedule, local_expert_offset, tile_n)
        return
    offsets = schedule.expert_offsets.long()
    counts = offsets.diff()
    tiles = (counts + tile_n - 1) // tile_n
    first_tile = tiles.cumsum(0) - tiles
    num_tiles = int(tiles.sum())
    rows = torch.arange(int(offsets[-1]))
    expert_of_row = torch.repeat_interleave(torch.arange(len(counts)), counts)
    padded_row = first_tile[expert_of_row] * tile_n + rows - offsets[expert_of_row]
    metadata.total_num_padded_tokens.fill_(num_tiles * tile_n)
    metadata.num_non_exiting_ctas.fill_(num_tiles)
    metadata.permuted_idx_to_token_idx.fill_(-1)
    metadata.permuted_idx_to_token_idx[padded_row] = schedule.row_tokens[rows]
    slots = schedule.slot_rows.flatten().long()
    if len(rows):
        padded = torch.where(slots >= 0, padded_row[slots.clamp(min=0)], -1)
        metadata.expanded_idx_to_permuted_idx.copy_(padded)
    else:
        metadata.expanded_idx_to_permuted_idx.fill_(-1)
    metadata.num_tokens_per_expert.zero_()
    own = slice(local_expert_offset, local_expert_offset + len(counts))
    metadata.num_tokens_per_expert[own] = counts.int()
    expert_of_tile = torch.repeat_interleave(torch.arange(len(counts)), tiles)
    metadata.cta_idx_xy_to_batch_idx[:num_tiles] = expert_of_tile.int()
    used = first_tile[expert_of_tile] * tile_n + counts[expert_of_tile]
    limit = torch.minimum((torch.arange(num_tiles) + 1) * tile_n, used)
    metadata.cta_idx_xy_to_mn_limit[:num_tiles] = limit.int()
