"""The front of a layer: router logits and hidden states in; routing, packed ids, MXFP8 rows and schedule out.

On a Hopper or Blackwell GPU all of it is one launch for up to ``MAX_FRONT_TOKENS`` tokens; beyond, the schedule is a
pass of its own. Elsewhere every part is a pass of its own. Nothing that a caller sees depends on which it was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from rankmoe.backends import cuda_kernel
from rankmoe.pack import IdSpace, id_space, pack_topk, rank_local_num_experts
from rankmoe.quantize import quantize_mxfp8
from rankmoe.route import route
from rankmoe.schedule import schedule_routing
from rankmoe.types import MAX_FRONT_TOKENS, ExpertSchedule, LocalRange, MXTensor, RouterConfig, Routing, ScheduleOutput

if TYPE_CHECKING:
    from rankmoe.kernels.front_cuda import FrontBuffers


@dataclass(frozen=True)
class FrontResult:
    """Everything that the expert GEMMs and external runners need of a batch.

    routing: with packed ids.
    x: [T, H] mxfp8.
    schedule: None where neither range nor map was given, or only masks were asked for.
    local_range: the range that schedule or masks are for; None where that is an expert map.
    expert_token_mask: [L] int64, see ``ExpertSchedule``, where only masks were asked for.
    num_valid_tokens: the caller's tensor, by which rows were masked; None where all are valid.
    """

    routing: Routing
    x: MXTensor
    schedule: ExpertSchedule | None = None
    local_range: LocalRange | None = None
    expert_token_mask: torch.Tensor | None = None
    num_valid_tokens: torch.Tensor | None = None


def route_quantize(
    router_logits: torch.Tensor,
    hidden_states: torch.Tensor,
    config: RouterConfig,
    correction_bias: torch.Tensor | None = None,
    *,
    local_range: LocalRange | None = None,
    expert_map: torch.Tensor | None = None,
    num_local_experts: int = 0,
    rank_local: bool = True,
    num_valid_tokens: torch.Tensor | None = None,
    schedule: ScheduleOutput = "rows",
    workspace: FrontBuffers | None = None,
) -> FrontResult:
    """Route, quantise, pack and schedule a batch.

    router_logits: [T, E] float32 or bfloat16.
    hidden_states: [T, H] bfloat16 or float32, H a multiple of 32.
    correction_bias: [E] float32 or None.
    local_range: this rank's experts. None or a count of 0: packed ids stay global and no schedule is made, unless
        there is a map.
    expert_map, num_local_experts: [E] int32 on the device, local id or -1 of each expert, and L; for a rank whose
        experts are no range. Packed ids stay global.
    rank_local: write rank-local packed ids where they apply; False keeps them global, the schedule is the same.
    num_valid_tokens: [1] integer on the device or None. Rows from this one on cost no expert work and give zeros.
    schedule: ``masks`` is cheaper than ``rows`` and enough for consumers that read token masks (T <= 64).
    workspace: on a GPU, what ``allocate_workspace`` made for these sizes; the result lives in it until the next call.
    Raises ValueError where the two token counts differ, and as ``route`` and ``quantize_mxfp8`` do.
    """
    check_same_tokens(router_logits, hidden_states)
    num_tokens, num_experts = router_logits.shape
    if schedule not in ("none", "masks", "rows"):
        raise ValueError(f"schedule: expected 'none', 'masks' or 'rows', got {schedule!r}")
    if schedule == "masks" and num_tokens > MAX_FRONT_TOKENS:
        raise ValueError(f"schedule: expected 'rows' beyond {MAX_FRONT_TOKENS} tokens, got 'masks' for {num_tokens}")
    if local_range is not None:
        local_range.validate(num_experts)
        if expert_map is not None:
            raise ValueError(f"expert_map: expected None beside a local_range, got both ({local_range})")
        local_range = local_range if local_range.count else None
    owned = _Owned(local_range, expert_map, local_range.count if local_range else num_local_experts)
    if local_range is None and expert_map is None:
        schedule = "none"
    result = _launch(
        router_logits,
        hidden_states,
        config,
        correction_bias,
        owned,
        rank_local,
        num_valid_tokens,
        schedule,
        workspace,
    )
    if result is None:
        routing = route(router_logits, config, correction_bias, num_valid_tokens)
        routing = pack_topk(routing, num_experts, local_range if rank_local else None)
        result = FrontResult(routing, quantize_mxfp8(hidden_states, num_valid_tokens), local_range=local_range)
    return _with_schedule(replace(result, num_valid_tokens=num_valid_tokens), owned, num_experts, schedule)


@dataclass(frozen=True)
class _Owned:
    """The experts that the schedule is for: a range, or a map and its count, or none."""

    local_range: LocalRange | None
    expert_map: torch.Tensor | None
    count: int


def _launch(
    router_logits: torch.Tensor,
    hidden_states: torch.Tensor,
    config: RouterConfig,
    correction_bias: torch.Tensor | None,
    owned: _Owned,
    rank_local: bool,
    num_valid_tokens: torch.Tensor | None,
    schedule: ScheduleOutput,
    workspace: FrontBuffers | None,
) -> FrontResult | None:
    """The one launch, with the schedule where it covers that too; None where it does not cover the inputs at all."""
    num_tokens, num_experts = router_logits.shape
    if num_tokens > MAX_FRONT_TOKENS:
        schedule = "none"
    device = hidden_states.device
    kernel = cuda_kernel("front", device)
    if kernel is None or not kernel.covered(router_logits, hidden_states, config, schedule):
        return None
    if workspace is None or num_tokens > MAX_FRONT_TOKENS:
        workspace = kernel.allocate_buffers(
            num_tokens, config.top_k, hidden_states.shape[1], owned.count, device, schedule=schedule
        )
    local_range, packed_range = owned.local_range, None
    if local_range and rank_local and rank_local_num_experts(num_experts, local_range, config.top_k) is not None:
        packed_range = local_range
    kernel.launch_front(
        router_logits,
        hidden_states,
        config,
        workspace,
        correction_bias=correction_bias,
        local_expert_offset=local_range.offset if local_range else 0,
        num_local_experts=owned.count,
        expert_map=owned.expert_map,
        packed_range=packed_range,
        num_valid_tokens=num_valid_tokens,
    )
    return FrontResult(
        workspace.routing(packed_range),
        workspace.rows(),
        workspace.schedule(),
        local_range,
        workspace.expert_token_mask if workspace.schedule_output == "masks" else None,
    )


def _with_schedule(result: FrontResult, owned: _Owned, num_experts: int, schedule: ScheduleOutput) -> FrontResult:
    """Add what of the schedule is asked for and not made yet, by the separate pass."""
    if schedule == "none" or result.schedule is not None or result.expert_token_mask is not None:
        return result
    space = IdSpace(num_experts, 0)
    if owned.local_range is not None:
        space = id_space(result.routing, num_experts, owned.local_range)
    made = schedule_routing(
        result.routing,
        owned.count,
        num_experts=space.num_experts,
        local_expert_offset=space.local_expert_offset,
        expert_map=owned.expert_map,
    )
    if schedule == "rows":
        return replace(result, schedule=made)
    return replace(result, expert_token_mask=made.expert_token_mask)


def allocate_workspace(
    num_tokens: int,
    top_k: int,
    hidden_size: int,
    num_local_experts: int,
    device: torch.device | str,
    schedule: ScheduleOutput = "rows",
) -> FrontBuffers:
    """Outputs of ``route_quantize`` for exactly these sizes (T <= 64), to be kept across calls and captured graphs."""
    from rankmoe.kernels import front_cuda

    if num_tokens > MAX_FRONT_TOKENS:
        raise ValueError(f"num_tokens: expected at most {MAX_FRONT_TOKENS}, got {num_tokens}")
    return front_cuda.allocate_buffers(num_tokens, top_k, hidden_size, num_local_experts, device, schedule=schedule)


def check_same_tokens(router_logits: torch.Tensor, hidden_states: torch.Tensor) -> None:
    """Raise ValueError unless logits and activations hold the same number of tokens."""
    if router_logits.shape[0] != hidden_states.shape[0]:
        raise ValueError(
            f"router_logits: expected {hidden_states.shape[0]} tokens as hidden_states, got {router_logits.shape[0]}"
        )
