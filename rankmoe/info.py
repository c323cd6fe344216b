"""What expert parallelism means for a model: ranges, bytes, expected load and time floors of one rank."""

from __future__ import annotations

from dataclasses import dataclass

from rankmoe.models.presets import ModelPreset
from rankmoe.pack import rank_local_num_experts
from rankmoe.types import ExpertPlacement, LocalRange


@dataclass(frozen=True)
class RankInfo:
    """One rank's share of the experts.

    rank_local_num_experts: what a consumer of rank-local ids is handed, or None where ids stay global.
    nbytes_per_layer: bytes of this rank's experts in one layer.
    """

    ep_rank: int
    local_range: LocalRange
    rank_local_num_experts: int | None
    nbytes_per_layer: int


@dataclass(frozen=True)
class BatchInfo:
    """The fullest rank's expected work for one layer and a batch, under uniform routing.

    active_experts: expected local experts with at least one token.
    nbytes: bytes of those experts' weights, each read once.
    floor_us: time to read them at the given memory speed, in microseconds.
    """

    num_tokens: int
    active_experts: float
    rows_per_active_expert: float
    nbytes: float
    floor_us: float


def describe_ranks(preset: ModelPreset, ep_size: int) -> list[RankInfo]:
    """Every rank's range and bytes. Raises ValueError for an impossible ``ep_size``."""
    ranks = []
    for ep_rank in range(ep_size):
        local_range = ExpertPlacement(preset.num_experts, ep_size, ep_rank).local_range
        assert local_range is not None, "a contiguous placement has a range"
        local_num_experts = rank_local_num_experts(preset.num_experts, local_range, preset.router.top_k)
        ranks.append(RankInfo(ep_rank, local_range, local_num_experts, local_range.count * preset.expert_nbytes))
    return ranks


def why_rank_local(preset: ModelPreset, rank: RankInfo) -> str:
    """One sentence: why rank-local ids apply to this rank, or why they do not."""
    count, top_k, num_experts = rank.local_range.count, preset.router.top_k, preset.num_experts
    rounded = (count + top_k + 3) // 4 * 4
    if count == num_experts:
        return f"ids stay global: the rank owns all {num_experts} experts"
    if rank.rank_local_num_experts is None:
        return f"ids stay global: round_up({count} + {top_k}, 4) = {rounded} is not below {num_experts}"
    return f"ids are rank-local: round_up({count} + {top_k}, 4) = {rounded} is below {num_experts}"


def describe_batch(preset: ModelPreset, ep_size: int, num_tokens: int, tb_per_s: float) -> BatchInfo:
    """Expected work of rank 0 (no rank holds more experts) for ``num_tokens`` uniformly routed tokens.

    tb_per_s: memory read speed in 10^12 bytes a second.
    """
    count = ExpertPlacement(preset.num_experts, ep_size, 0).num_local_experts
    fraction = preset.router.top_k / preset.num_experts
    active = count * (1 - (1 - fraction) ** num_tokens)
    nbytes = active * preset.expert_nbytes
    return BatchInfo(
        num_tokens=num_tokens,
        active_experts=active,
        rows_per_active_expert=count * fraction * num_tokens / active if active else 0.0,
        nbytes=nbytes,
        floor_us=nbytes / tb_per_s / 1e6,
    )
