"""The proof on this machine: rank-local ids against the reference, and the two id forms against each other, bitwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rankmoe import reference
from rankmoe.experts import pack_experts
from rankmoe.front import FrontResult, route_quantize
from rankmoe.models.presets import get_preset
from rankmoe.moe import routed_moe
from rankmoe.quantize import quantize_mxfp4
from rankmoe.types import MAX_FRONT_TOKENS, ExpertPlacement, ExpertWeights, LocalRange, MXTensor, RouterConfig, Routing

#: Expert-parallel sizes whose ids are checked, at the first, a middle and the last rank.
ID_EP_SIZES = (2, 8, 16)
#: Expert-parallel sizes whose outputs are compared, on every rank.
OUTPUT_EP_SIZES = (2, 4, 8, 16)
#: Token counts of the output comparison; 65 is beyond the fused front.
OUTPUT_TOKEN_COUNTS = (1, 2, 3, 8, 16, 33, 63, 64, 65)
#: Widths of the experts in the output comparison: real K3 routing over narrow experts, so that it runs anywhere.
HIDDEN_SIZE, INTERMEDIATE_SIZE = 64, 32


@dataclass(frozen=True)
class CheckResult:
    """One row of the proof: what was compared, how many comparisons, and the first that failed."""

    name: str
    ep_size: int
    ranks: str
    num_comparisons: int
    failure: str | None

    @property
    def passed(self) -> bool:
        """No comparison failed, and there was one."""
        return self.failure is None and self.num_comparisons > 0


@dataclass(frozen=True)
class _Batch:
    logits: torch.Tensor
    bias: torch.Tensor
    hidden_states: torch.Tensor
    config: RouterConfig
    num_experts: int


def run_checks(seed: int = 0) -> Iterator[CheckResult]:
    """Run the proof row by row: Kimi-K3's routing (896 experts, top-16), random logits, every token count to 64."""
    preset = get_preset("kimi-k3")
    generator = torch.Generator().manual_seed(seed)
    num_tokens = max(OUTPUT_TOKEN_COUNTS)
    batch = _Batch(
        logits=torch.randn(num_tokens, preset.num_experts, generator=generator),
        bias=torch.randn(preset.num_experts, generator=generator) * 0.05,
        hidden_states=torch.randn(num_tokens, HIDDEN_SIZE, generator=generator).bfloat16(),
        config=preset.router,
        num_experts=preset.num_experts,
    )
    expected_routing = reference.route(batch.logits, batch.config, batch.bias)
    expected_rows = reference.quantize_mxfp8(batch.hidden_states)
    for ep_size in ID_EP_SIZES:
        yield _check_ids(batch, ep_size, expected_routing, expected_rows)
    w13 = torch.randn(preset.num_experts, 2 * INTERMEDIATE_SIZE, HIDDEN_SIZE, generator=generator) * 0.1
    w2 = torch.randn(preset.num_experts, HIDDEN_SIZE, INTERMEDIATE_SIZE, generator=generator) * 0.1
    experts = quantize_mxfp4(w13), quantize_mxfp4(w2)
    for ep_size in OUTPUT_EP_SIZES:
        yield _check_outputs(batch, ep_size, *experts)


def _check_ids(batch: _Batch, ep_size: int, expected: Routing, expected_rows: MXTensor) -> CheckResult:
    ranks = (0, ep_size // 2, ep_size - 1)
    num_comparisons, failure = 0, None
    for ep_rank in dict.fromkeys(ranks):
        local_range = ExpertPlacement(batch.num_experts, ep_size, ep_rank).local_range
        assert local_range is not None, "a contiguous placement has a range"
        local_ids = reference.rank_local_ids(expected.topk_ids, local_range)
        expected_packed = reference.pack(local_ids, expected.topk_weights)
        for num_tokens in range(1, MAX_FRONT_TOKENS + 1):
            rank_local, plain = (_front(batch, num_tokens, local_range, form) for form in (True, False))
            wrong = _wrong_parts(rank_local, plain, expected, expected_packed, expected_rows)
            num_comparisons += 1
            if wrong and failure is None:
                failure = f"rank {ep_rank}, {num_tokens} tokens: {', '.join(wrong)}"
    return CheckResult("rank-local ids", ep_size, ", ".join(map(str, dict.fromkeys(ranks))), num_comparisons, failure)


def _front(batch: _Batch, num_tokens: int, local_range: LocalRange, rank_local: bool) -> FrontResult:
    return route_quantize(
        batch.logits[:num_tokens],
        batch.hidden_states[:num_tokens],
        batch.config,
        batch.bias,
        local_range=local_range,
        rank_local=rank_local,
    )


def _wrong_parts(
    rank_local: FrontResult, plain: FrontResult, expected: Routing, expected_packed: torch.Tensor, rows: MXTensor
) -> list[str]:
    """Names of what differs from the reference, or between the two forms where only the packed ids may."""
    num_tokens = rank_local.x.shape[0]
    packed = rank_local.routing.packed
    plain_packed = plain.routing.packed
    assert packed is not None, "the front always packs"
    assert plain_packed is not None, "the front always packs"
    same = {
        "topk_ids": torch.equal(rank_local.routing.topk_ids, expected.topk_ids[:num_tokens]),
        "topk_weights": torch.allclose(
            rank_local.routing.topk_weights, expected.topk_weights[:num_tokens], rtol=1e-5, atol=0
        ),
        "rank-local ids": torch.equal(packed >> 16, expected_packed[:num_tokens] >> 16),
        "packed weights": torch.equal(packed & 0xFFFF, plain_packed & 0xFFFF),
        "MXFP8 codes": torch.equal(_codes(rank_local.x), _codes(rows)[:num_tokens]),
        "MXFP8 scales": torch.equal(rank_local.x.scale, rows.scale[:num_tokens]),
        "form changes topk_ids": torch.equal(rank_local.routing.topk_ids, plain.routing.topk_ids),
        "form changes topk_weights": torch.equal(rank_local.routing.topk_weights, plain.routing.topk_weights),
        "form changes the schedule": _same_schedule(rank_local, plain),
    }
    return [name for name, is_same in same.items() if not is_same]


def _codes(tensor: MXTensor) -> torch.Tensor:
    return tensor.data.view(torch.uint8)


def _same_schedule(a: FrontResult, b: FrontResult) -> bool:
    return all(torch.equal(mine, other) for mine, other in zip(_schedule_parts(a), _schedule_parts(b), strict=True))


def _schedule_parts(front: FrontResult) -> tuple[torch.Tensor, ...]:
    schedule = front.schedule
    assert schedule is not None, "a range was given"
    assert schedule.expert_token_mask is not None, "a front's batch fits the mask"
    return schedule.expert_token_mask, schedule.expert_offsets, schedule.row_tokens, schedule.slot_rows


def _check_outputs(batch: _Batch, ep_size: int, w13: MXTensor, w2: MXTensor) -> CheckResult:
    num_comparisons, failure = 0, None
    for ep_rank in range(ep_size):
        placement = ExpertPlacement(batch.num_experts, ep_size, ep_rank)
        owned = torch.tensor(placement.expert_ids)
        weights = pack_experts(w13[owned], w2[owned], get_preset("kimi-k3").activation, placement)
        for num_tokens in OUTPUT_TOKEN_COUNTS:
            rank_local, plain = (_output(batch, num_tokens, weights, form) for form in (True, False))
            num_comparisons += 1
            if failure is None and not torch.equal(rank_local.view(torch.int32), plain.view(torch.int32)):
                failure = f"rank {ep_rank}, {num_tokens} tokens: outputs differ"
    return CheckResult("MoE output, both forms", ep_size, "all", num_comparisons, failure)


def _output(batch: _Batch, num_tokens: int, weights: ExpertWeights, rank_local: bool) -> torch.Tensor:
    return routed_moe(
        batch.hidden_states[:num_tokens],
        batch.logits[:num_tokens],
        weights,
        batch.config,
        batch.bias,
        rank_local=rank_local,
        out_dtype=torch.float32,
    )
