"""A schedule as FlashInfer's padded tiles: against a plain statement of its router's result, in torch and in Triton."""

import pytest
import torch
from helpers import seeded

from rankmoe.kernels import triton_support
from rankmoe.pack import IdSpace
from rankmoe.routing_metadata import RoutingMetadata, allocate_routing_metadata, fill_routing_metadata, max_num_tiles
from rankmoe.schedule import build_schedule

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def fill_with_torch(metadata, schedule, offset, tile_n):
    fill_routing_metadata(metadata, schedule, offset, tile_n)


def fill_with_triton(metadata, schedule, offset, tile_n):
    if not triton_support.available():
        pytest.skip("needs Triton")
    from rankmoe.kernels import routing_metadata_triton

    routing_metadata_triton.fill(metadata, schedule, offset, tile_n)


FILLS = [pytest.param(fill_with_torch, id="torch"), pytest.param(fill_with_triton, id="triton")]


def routed_elsewhere(ids: torch.Tensor, num_local: int, num_experts: int, offset: int, tile_n: int):
    """(tiles as (expert, first row, limit), padded row of each slot, tokens of padded rows, counts), slot by slot."""
    own = [sorted({token for token, row in enumerate(ids.tolist()) if offset + e in row}) for e in range(num_local)]
    tiles, row_of, tokens = [], {}, []
    for expert, expert_tokens in enumerate(own):
        first = len(tokens)
        for start in range(0, len(expert_tokens), tile_n):
            part = expert_tokens[start : start + tile_n]
            tiles.append((expert, first + start + len(part)))
            tokens += part + [-1] * (tile_n - len(part))
        row_of |= {(expert, token): first + place for place, token in enumerate(expert_tokens)}
    slots = [row_of.get((id_ - offset, token), -1) for token, row in enumerate(ids.tolist()) for id_ in row]
    counts = [0] * num_experts
    counts[offset : offset + num_local] = [len(expert_tokens) for expert_tokens in own]
    return tiles, slots, tokens, counts


def allocate(ids: torch.Tensor, space: IdSpace, tile_n: int) -> RoutingMetadata:
    """Every tensor holds what was there before."""
    metadata = allocate_routing_metadata(torch.rand(ids.shape, device=DEVICE), space, tile_n)
    for tensor in metadata:
        if tensor.dtype == torch.int32:
            tensor.fill_(0x7FFFFFFF)
    return metadata


CASES = [  # tokens, top_k, experts, local experts, offset, tile
    (1, 4, 16, 4, 8, 8),
    (7, 4, 16, 4, 0, 8),
    (33, 2, 6, 3, 3, 16),
    (64, 16, 128, 112, 0, 8),
    (100, 8, 40, 5, 0, 32),
    (0, 4, 16, 4, 0, 8),
]


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize(("num_tokens", "top_k", "num_experts", "num_local", "offset", "tile_n"), CASES)
def test_the_tiles_are_those_that_a_router_makes(fill, num_tokens, top_k, num_experts, num_local, offset, tile_n):
    generator = seeded(num_tokens)
    ids = torch.stack(
        [torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(num_tokens)]
        or [torch.zeros(top_k, dtype=torch.int64)]
    )[:num_tokens].int()
    ids[::5] = -1
    if num_tokens > 1:
        ids[1, 0] = ids[1, 1] = offset  # an expert twice in a row: one row for both slots
    schedule = build_schedule(ids.to(DEVICE), num_local, num_experts=num_experts, local_expert_offset=offset)
    metadata = allocate(ids, IdSpace(num_experts, offset), tile_n)
    fill(metadata, schedule, offset, tile_n)
    tiles, slots, tokens, counts = routed_elsewhere(ids, num_local, num_experts, offset, tile_n)
    assert metadata.num_non_exiting_ctas.tolist() == [len(tiles)]
    assert metadata.total_num_padded_tokens.tolist() == [len(tokens)] == [len(tiles) * tile_n]
    assert metadata.expanded_idx_to_permuted_idx.tolist() == slots
    permuted = metadata.permuted_idx_to_token_idx.tolist()
    assert permuted == tokens + [-1] * (len(permuted) - len(tokens))
    assert metadata.num_tokens_per_expert.tolist() == counts
    assert metadata.cta_idx_xy_to_batch_idx[: len(tiles)].tolist() == [expert for expert, _ in tiles]
    assert metadata.cta_idx_xy_to_mn_limit[: len(tiles)].tolist() == [limit for _, limit in tiles]
    assert len(tiles) <= len(metadata.cta_idx_xy_to_batch_idx) == max_num_tiles(ids.numel(), num_experts, tile_n)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_one_graph_fills_the_metadata_of_every_batch():
    generator = seeded(1)
    ids = torch.zeros(64, 16, dtype=torch.int32, device=DEVICE)
    metadata = allocate(ids, IdSpace(896, 112), 8)

    def fill() -> None:
        schedule = build_schedule(ids, 112, num_experts=896, local_expert_offset=112)
        fill_routing_metadata(metadata, schedule, 112, 8)

    fill()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill()
    for _ in range(5):
        ids.copy_(torch.stack([torch.randperm(896, generator=generator)[:16] for _ in range(64)]))
        graph.replay()
        tiles, slots, tokens, counts = routed_elsewhere(ids.cpu(), 112, 896, 112, 8)
        assert metadata.num_non_exiting_ctas.tolist() == [len(tiles)]
        assert metadata.expanded_idx_to_permuted_idx.tolist() == slots
        assert metadata.permuted_idx_to_token_idx[: len(tokens)].tolist() == tokens
        assert metadata.num_tokens_per_expert.tolist() == counts
        assert metadata.cta_idx_xy_to_mn_limit[: len(tiles)].tolist() == [limit for _, limit in tiles]


def test_more_tiles_than_allowed_for_cannot_be():
    # One token for each expert first, then full tiles to one of them.
    assert max_num_tiles(64 * 16, 128, 8) == 128 + (1024 - 128) // 8
    assert max_num_tiles(3, 128, 8) == 3
    assert max_num_tiles(0, 128, 8) == 0


def test_what_does_not_fit_is_refused():
    schedule = build_schedule(torch.zeros(3, 2, dtype=torch.int32), 4, num_experts=8)
    metadata = allocate_routing_metadata(torch.rand(2, 2), IdSpace(8, 0), 8)
    with pytest.raises(ValueError, match="schedule: expected 4 slots as the metadata, got 6"):
        fill_routing_metadata(metadata, schedule, 0, 8)
    metadata = allocate_routing_metadata(torch.rand(3, 2), IdSpace(8, 0), 8)
    with pytest.raises(ValueError, match=r"local_expert_offset: expected offset \+ 4 local experts <= 8, got 5"):
        fill_routing_metadata(metadata, schedule, 5, 8)
    with pytest.raises(ValueError, match="tile_n: expected at least 1, got 0"):
        allocate_routing_metadata(torch.rand(3, 2), IdSpace(8, 0), 0)
