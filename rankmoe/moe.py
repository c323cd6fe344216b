"""The routed path in order: front, gate_up, down, combine; and the buffers that a caller can keep between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from rankmoe.backends import get_backend
from rankmoe.combine import MAX_TOP_K, combine
from rankmoe.experts import check_device, check_scratch, gemms
from rankmoe.front import check_same_tokens, route_quantize
from rankmoe.pack import IdSpace, id_space
from rankmoe.schedule import schedule_routing
from rankmoe.types import MAX_FRONT_TOKENS, ExpertSchedule, ExpertWeights, LocalRange, MXTensor, RouterConfig, Routing


@dataclass(frozen=True)
class Workspace:
    """Buffers of the expert GEMMs, allocated once and reused by every step. What they hold at entry never matters.

    middle: [rows, I] float32. Activations before requantisation.
    rows: [rows, H] float32. Output of the down GEMM.
    """

    middle: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def allocate(cls, max_tokens: int, top_k: int, weights: ExpertWeights) -> Workspace:
        """Buffers for up to ``max_tokens`` tokens through these weights."""
        num_rows = max_tokens * min(top_k, weights.num_local_experts)
        device = weights.w13.data.device
        return cls(
            middle=torch.empty(num_rows, weights.intermediate_size, dtype=torch.float32, device=device),
            rows=torch.empty(num_rows, weights.hidden_size, dtype=torch.float32, device=device),
        )

    def check(self, num_tokens: int, top_k: int, weights: ExpertWeights) -> None:
        """Raise ValueError unless the buffers hold what ``num_tokens`` tokens can need."""
        num_rows = num_tokens * min(top_k, weights.num_local_experts)
        check_scratch("workspace.middle", self.middle, num_rows, weights.intermediate_size)
        check_scratch("workspace.rows", self.rows, num_rows, weights.hidden_size)


class ExpertRows(NamedTuple):
    """The expert rows before the combine, for a caller whose all-reduce does it on the way (deferred finalize).

    rows: [R, H] float32. Output of the down GEMM, one row a (expert, token) pair.
    schedule: its ``slot_rows`` [T, K] say which row each slot adds, -1 where another rank has it.
    topk_weights: [T, K] float32. ``combine(rows, topk_weights, schedule)`` finishes the layer.
    """

    rows: torch.Tensor
    schedule: ExpertSchedule
    topk_weights: torch.Tensor


def expert_rows(
    x: MXTensor,
    routing: Routing,
    weights: ExpertWeights,
    *,
    num_experts: int,
    local_expert_offset: int = 0,
    expert_map: torch.Tensor | None = None,
    schedule: ExpertSchedule | None = None,
    workspace: Workspace | None = None,
) -> ExpertRows:
    """Run this rank's experts on quantised rows and leave the combine to the caller.

    x: [T, H] mxfp8.
    routing: its packed ids are read where present, else its global ids; its float32 weights are always the ones used.
    num_experts, local_expert_offset, expert_map: the space of those ids, see ``build_schedule``. Rank-local packed ids
        take ``rank_local_num_experts(...)`` and 0.
    schedule: where the front made it already; else it is made here.
    workspace: its ``rows`` hold the result until the next call with it.
    Raises ValueError where rank-local packed ids would be read in another id space than their own.
    """
    if routing.local_range is not None:
        own = id_space(routing, weights.placement.num_experts, weights.placement.local_range or LocalRange(0, 0))
        if (num_experts, local_expert_offset) != (own.num_experts, own.local_expert_offset) or expert_map is not None:
            raise ValueError(
                f"num_experts: expected {own.num_experts} with local_expert_offset 0 and no expert_map for packed ids "
                f"local to {routing.local_range}, got {num_experts} with {local_expert_offset}"
            )
    if schedule is None:
        schedule = schedule_routing(
            routing,
            weights.num_local_experts,
            num_experts=num_experts,
            local_expert_offset=local_expert_offset,
            expert_map=expert_map,
        )
    scratch = (workspace.middle, workspace.rows) if workspace else (None, None)
    return ExpertRows(gemms(x, schedule, weights, *scratch), schedule, routing.topk_weights)


def fused_moe(
    x: MXTensor,
    routing: Routing,
    weights: ExpertWeights,
    *,
    num_experts: int,
    local_expert_offset: int = 0,
    expert_map: torch.Tensor | None = None,
    schedule: ExpertSchedule | None = None,
    workspace: Workspace | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Run this rank's experts on quantised rows, and combine; arguments and errors as ``expert_rows``.

    Returns [T, H] ``out_dtype``: this rank's part of the sum.
    """
    result = expert_rows(
        x,
        routing,
        weights,
        num_experts=num_experts,
        local_expert_offset=local_expert_offset,
        expert_map=expert_map,
        schedule=schedule,
        workspace=workspace,
    )
    return combine(result.rows, result.topk_weights, result.schedule, out_dtype)


def routed_moe(
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    weights: ExpertWeights,
    config: RouterConfig,
    correction_bias: torch.Tensor | None = None,
    *,
    rank_local: bool = True,
    num_valid_tokens: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The whole routed layer of one rank, from router logits to this rank's part of the output.

    hidden_states: [T, H] bfloat16 or float32.
    router_logits: [T, E] float32 or bfloat16, E the placement's number of experts the router chooses from.
    rank_local: form of the packed ids; the output is the same, bit for bit.
    Returns [T, H] ``out_dtype``. Add the ranks' outputs for the layer's.
    """
    placement = weights.placement
    num_logical_experts = placement.num_logical_experts
    check_same_tokens(router_logits, hidden_states)
    check_device("hidden_states", hidden_states, weights)
    if router_logits.shape[1] != num_logical_experts:
        raise ValueError(
            f"router_logits: expected [num_tokens, {num_logical_experts}] as the placement, "
            f"got {tuple(router_logits.shape)}"
        )
    is_redundant = placement.physical_to_logical is not None
    num_tokens = hidden_states.shape[0]
    takes_masks = 0 < num_tokens <= MAX_FRONT_TOKENS and config.top_k <= MAX_TOP_K and not is_redundant
    masked = get_backend(weights.backend).masked if takes_masks else None
    local_range = None if is_redundant else placement.local_range
    expert_map = placement.expert_map_on(hidden_states.device) if local_range is None else None
    front = route_quantize(
        router_logits,
        hidden_states,
        config,
        correction_bias,
        local_range=local_range,
        expert_map=None if is_redundant else expert_map,
        num_local_experts=placement.num_local_experts,
        rank_local=rank_local,
        num_valid_tokens=num_valid_tokens,
        schedule="rows" if masked is None else "masks",
    )
    if masked is not None and front.expert_token_mask is not None:
        workspace = workspace or Workspace.allocate(num_tokens, config.top_k, weights)
        workspace.check(num_tokens, config.top_k, weights)
        scratch = (workspace.middle, workspace.rows)
        return masked(front.x, front.routing, front.expert_token_mask, weights, *scratch, out_dtype)
    routing, space = front.routing, IdSpace(placement.num_experts, 0)
    if local_range is not None:
        space = id_space(routing, placement.num_experts, local_range)
    elif is_redundant:
        routing = Routing(routing.topk_weights, placement.to_physical(routing.topk_ids))
    return fused_moe(
        front.x,
        routing,
        weights,
        num_experts=space.num_experts,
        local_expert_offset=space.local_expert_offset,
        expert_map=expert_map,
        schedule=front.schedule,
        workspace=workspace,
        out_dtype=out_dtype,
    )
