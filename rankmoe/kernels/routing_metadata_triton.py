# mypy: disable-error-code="no-untyped-def"
"""``fill_routing_metadata`` in Triton: one launch, in which every program counts the tiles for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from rankmoe.kernels import triton_support
from rankmoe.types import ExpertSchedule

if TYPE_CHECKING:
    from rankmoe.routing_metadata import RoutingMetadata

available = triton_support.available

_PLACES = 64


def fill(metadata: RoutingMetadata, schedule: ExpertSchedule, local_expert_offset: int, tile_n: int) -> None:
    """See ``rankmoe.routing_metadata.fill_routing_metadata``, which has checked the sizes."""
    num_slots, num_rows = metadata.expanded_idx_to_permuted_idx.numel(), metadata.permuted_idx_to_token_idx.numel()
    num_experts = metadata.num_tokens_per_expert.numel()
    num_tiles = metadata.cta_idx_xy_to_batch_idx.numel()
    num_programs = triton.cdiv(max(num_slots, num_rows, num_experts), _PLACES)
    with triton_support.on_device_of(schedule.slot_rows):
        _fill_kernel[(num_programs,)](
            schedule.expert_offsets,
            schedule.row_tokens,
            schedule.slot_rows,
            metadata.total_num_padded_tokens,
            metadata.expanded_idx_to_permuted_idx,
            metadata.permuted_idx_to_token_idx,
            metadata.num_tokens_per_expert,
            metadata.cta_idx_xy_to_batch_idx,
            metadata.cta_idx_xy_to_mn_limit,
            metadata.num_non_exiting_ctas,
            schedule.num_local_experts,
            num_slots,
            num_rows,
            num_experts,
            num_tiles,
            local_expert_offset,
            tile_n,
            experts=triton_support.next_power_of_2(schedule.num_local_experts),
            places=_PLACES,
        )


@triton.jit
def _fill_kernel(
    expert_offsets,
    row_tokens,
    slot_rows,
    total_num_padded_tokens,
    expanded_idx_to_permuted_idx,
    permuted_idx_to_token_idx,
    num_tokens_per_expert,
    cta_idx_xy_to_batch_idx,
    cta_idx_xy_to_mn_limit,
    num_non_exiting_ctas,
    num_local_experts,
    num_slots,
    num_rows,
    num_experts,
    num_tiles,
    local_expert_offset,
    tile_n,
    experts: tl.constexpr,
    places: tl.constexpr,
):
    """Write ``places`` neighbouring places of every tensor."""
    expert = tl.arange(0, experts)
    is_expert = expert < num_local_experts
    first_row = tl.load(expert_offsets + expert, mask=is_expert, other=0)
    count = tl.load(expert_offsets + expert + 1, mask=is_expert, other=0) - first_row
    tiles = (count + tile_n - 1) // tile_n
    first_tile = tl.cumsum(tiles, 0) - tiles
    used_tiles = tl.sum(tiles, 0)
    first_padded = first_tile * tile_n
    program = tl.program_id(0)
    if program == 0:
        tl.store(total_num_padded_tokens, used_tiles * tile_n)
        tl.store(num_non_exiting_ctas, used_tiles)
    place = program * places + tl.arange(0, places)

    row = tl.load(slot_rows + place, mask=place < num_slots, other=-1)
    is_in = (row[:, None] >= first_row[None, :]) & (row[:, None] < (first_row + count)[None, :])
    padded = row + tl.sum(tl.where(is_in, (first_padded - first_row)[None, :], 0), 1)
    padded = tl.where(row >= 0, padded, -1)
    tl.store(expanded_idx_to_permuted_idx + place, padded, mask=place < num_slots)

    is_in = (place[:, None] >= first_padded[None, :]) & (place[:, None] < (first_padded + count)[None, :])
    is_used = tl.sum(is_in.to(tl.int32), 1) > 0
    source = place + tl.sum(tl.where(is_in, (first_row - first_padded)[None, :], 0), 1)
    token = tl.load(row_tokens + source, mask=is_used, other=-1)
    tl.store(permuted_idx_to_token_idx + place, token, mask=place < num_rows)

    is_in = (place[:, None] >= first_tile[None, :]) & (place[:, None] < (first_tile + tiles)[None, :])
    owner = tl.sum(tl.where(is_in, expert[None, :], 0), 1)
    end = tl.sum(tl.where(is_in, (first_padded + count)[None, :], 0), 1)
    is_tile = (place < used_tiles) & (place < num_tiles)
    tl.store(cta_idx_xy_to_batch_idx + place, owner, mask=is_tile)
    tl.store(cta_idx_xy_to_mn_limit + place, tl.minimum((place + 1) * tile_n, end), mask=is_tile)

    local = place - local_expert_offset
    is_local = (local >= 0) & (local < num_local_experts)
    low = tl.load(expert_offsets + local, mask=is_local, other=0)
    high = tl.load(expert_offsets + local + 1, mask=is_local, other=0)
    tl.store(num_tokens_per_expert + place, high - low, mask=place < num_experts)
