"""The front of a layer: router logits and hidden states in; routing, packed ids, MXFP8 rows and schedule out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rankmoe.pack import id_space, pack_topk
from rankmoe.quantize import quantize_mxfp8
from rankmoe.route import route
from rankmoe.schedule import schedule_routing
from rankmoe.types import ExpertSchedule, LocalRange, MXTensor, RouterConfig, Routing


@dataclass(frozen=True)
class FrontResult:
    """Everything that the expert GEMMs and external runners need of a batch.

    routing: with packed ids.
    x: [T, H] mxfp8.
    schedule: for ``local_range``; both are None where no range was given.
    """

    routing: Routing
    x: MXTensor
    schedule: ExpertSchedule | None = None
    local_range: LocalRange | None = None


def route_quantize(
    router_logits: torch.Tensor,
    hidden_states: torch.Tensor,
    config: RouterConfig,
    correction_bias: torch.Tensor | None = None,
    *,
    local_range: LocalRange | None = None,
    rank_local: bool = True,
    num_valid_tokens: torch.Tensor | None = None,
) -> FrontResult:
    """Route, quantise, pack and schedule a batch.

    router_logits: [T, E] float32 or bfloat16.
    hidden_states: [T, H] bfloat16 or float32, H a multiple of 32.
    correction_bias: [E] float32 or None.
    local_range: this rank's experts. None or a count of 0: packed ids stay global and no schedule is made.
    rank_local: write rank-local packed ids where they apply; False keeps them global, the schedule is the same.
    num_valid_tokens: [1] integer on the device or None. Rows from this one on cost no expert work and give zeros.
    Raises ValueError where the two token counts differ, and as ``route`` and ``quantize_mxfp8`` do.
    """
    check_same_tokens(router_logits, hidden_states)
    num_experts = router_logits.shape[1]
    routing = route(router_logits, config, correction_bias, num_valid_tokens)
    routing = pack_topk(routing, num_experts, local_range if rank_local else None)
    x = quantize_mxfp8(hidden_states, num_valid_tokens)
    if local_range is None or local_range.count == 0:
        return FrontResult(routing, x)
    space = id_space(routing, num_experts, local_range)
    schedule = schedule_routing(
        routing,
        local_range.count,
        num_experts=space.num_experts,
        local_expert_offset=space.local_expert_offset,
    )
    return FrontResult(routing, x, schedule, local_range)


def check_same_tokens(router_logits: torch.Tensor, hidden_states: torch.Tensor) -> None:
    """Raise ValueError unless logits and activations hold the same number of tokens."""
    if router_logits.shape[0] != hidden_states.shape[0]:
        raise ValueError(
            f"router_logits: expected {hidden_states.shape[0]} tokens as hidden_states, got {router_logits.shape[0]}"
        )
