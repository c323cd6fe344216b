"""The routed path as ``torch.library`` operators, so that torch.compile and torch.export see each part as one call.

``import rankmoe.ops`` registers ``torch.ops.rankmoe.{route_quantize, build_schedule, fused_moe}``; ``import rankmoe``
does not, for the registry belongs to the whole process. The functions here take and return the library's values and
give the bits of ``rankmoe.front``, ``rankmoe.schedule`` and ``rankmoe.moe``. They differ in this:

- Every shape follows from the arguments' shapes: ``row_tokens`` has one entry a slot, -1 in the unused ones.
- ``fused_moe`` takes a schedule, never ids. There is no workspace.
- A graph holds for up to ``MAX_FRONT_TOKENS`` tokens or for more, not for both: only the former has token masks.

For inference: a backward pass through an operator raises ``NotImplementedError``, and so does compiling where one would
be traced; compile under ``torch.no_grad()`` or ``torch.inference_mode()``.
"""

from __future__ import annotations

from typing import Any, NoReturn, cast

import torch

from rankmoe import front, schedule
from rankmoe.combine import combine
from rankmoe.experts import gemms
from rankmoe.pack import rank_local_num_experts, unpack
from rankmoe.quantize import check_rows
from rankmoe.route import check_router_inputs
from rankmoe.types import (
    GROUP_SIZE,
    MAX_FRONT_TOKENS,
    Activation,
    ExpertPlacement,
    ExpertSchedule,
    ExpertWeights,
    LocalRange,
    MXTensor,
    RouterConfig,
    Routing,
    ScheduleOutput,
    Scoring,
    SiTU,
    SlotOrder,
    SwiGLU,
    widen_ids,
)

_Tensor = torch.Tensor
#: expert_token_mask ([0] beyond 64 tokens), expert_offsets, row_tokens, slot_rows; each [0] where it is not made.
_ScheduleTensors = tuple[_Tensor, _Tensor, _Tensor, _Tensor]
#: topk_weights, topk_ids, packed, x.data, x.scale and the schedule's tensors.
_FrontTensors = tuple[_Tensor, _Tensor, _Tensor, _Tensor, _Tensor, _Tensor, _Tensor, _Tensor, _Tensor]


# --- front -----------------------------------------------------------------------------------------------------------
def route_quantize(
    router_logits: torch.Tensor,
    hidden_states: torch.Tensor,
    config: RouterConfig,
    correction_bias: torch.Tensor | None = None,
    *,
    local_range: LocalRange | None = None,
    rank_local: bool = True,
    num_valid_tokens: torch.Tensor | None = None,
    schedule: ScheduleOutput = "rows",
) -> front.FrontResult:
    """Route, quantise, pack and schedule a batch; arguments, result and errors as ``rankmoe.front.route_quantize``."""
    asked_range = local_range or LocalRange(0, 0)
    topk_weights, topk_ids, packed, data, scale, *schedule_tensors = _route_quantize(
        router_logits,
        hidden_states,
        correction_bias,
        num_valid_tokens,
        top_k=config.top_k,
        scoring=config.scoring,
        renormalize=config.renormalize,
        routed_scaling_factor=config.routed_scaling_factor,
        num_expert_groups=config.num_expert_groups,
        topk_groups=config.topk_groups,
        slot_order=config.slot_order,
        local_expert_offset=asked_range.offset,
        num_local_experts=asked_range.count,
        rank_local=rank_local,
        schedule=schedule,
    )
    if asked_range.count == 0:
        local_range, schedule = None, "none"
    packed_range = None
    if local_range and rank_local:
        is_relabelled = rank_local_num_experts(router_logits.shape[1], local_range, config.top_k) is not None
        packed_range = local_range if is_relabelled else None
    return front.FrontResult(
        Routing(topk_weights, topk_ids, packed, packed_range),
        MXTensor(data, scale, "mxfp8"),
        _schedule_of(schedule_tensors) if schedule == "rows" else None,
        local_range,
        schedule_tensors[0] if schedule == "masks" else None,
        num_valid_tokens,
    )


@torch.library.custom_op("rankmoe::route_quantize", mutates_args=())
def _route_quantize(
    router_logits: torch.Tensor,
    hidden_states: torch.Tensor,
    correction_bias: torch.Tensor | None,
    num_valid_tokens: torch.Tensor | None,
    *,
    top_k: int,
    scoring: str,
    renormalize: bool,
    routed_scaling_factor: float,
    num_expert_groups: int,
    topk_groups: int,
    slot_order: str,
    local_expert_offset: int,
    num_local_experts: int,
    rank_local: bool,
    schedule: str,
) -> _FrontTensors:
    result = front.route_quantize(
        router_logits,
        hidden_states,
        RouterConfig(
            top_k=top_k,
            scoring=cast(Scoring, scoring),
            renormalize=renormalize,
            routed_scaling_factor=routed_scaling_factor,
            num_expert_groups=num_expert_groups,
            topk_groups=topk_groups,
            slot_order=cast(SlotOrder, slot_order),
        ),
        correction_bias,
        local_range=LocalRange(local_expert_offset, num_local_experts),
        rank_local=rank_local,
        num_valid_tokens=num_valid_tokens,
        schedule=cast(ScheduleOutput, schedule),
    )
    routing, x = result.routing, result.x
    assert routing.packed is not None
    if result.schedule is not None:
        schedule_tensors = _tensors_of(result.schedule)
    else:
        schedule_tensors = _no_schedule(hidden_states.device, result.expert_token_mask)
    return (routing.topk_weights, routing.topk_ids, routing.packed, x.data, x.scale, *schedule_tensors)


@_route_quantize.register_fake
def _(
    router_logits: torch.Tensor,
    hidden_states: torch.Tensor,
    correction_bias: torch.Tensor | None,
    num_valid_tokens: torch.Tensor | None,
    *,
    local_expert_offset: int,
    num_local_experts: int,
    rank_local: bool,
    schedule: str,
    **router: Any,
) -> _FrontTensors:
    config = RouterConfig(**router)
    check_router_inputs(router_logits, config, correction_bias)
    check_rows(hidden_states)
    front.check_same_tokens(router_logits, hidden_states)
    if num_local_experts:
        LocalRange(local_expert_offset, num_local_experts).validate(router_logits.shape[1])
    num_tokens, hidden_size = hidden_states.shape
    device = hidden_states.device
    slots = (num_tokens, config.top_k)
    schedule_tensors = _no_schedule(device)
    if num_local_experts and schedule != "none":
        whole = _empty_schedule(device, num_tokens, config.top_k, num_local_experts)
        schedule_tensors = whole if schedule == "rows" else _no_schedule(device, whole[0])
    return (
        torch.empty(slots, dtype=torch.float32, device=device),
        torch.empty(slots, dtype=torch.int32, device=device),
        torch.empty(slots, dtype=torch.int32, device=device),
        torch.empty(num_tokens, hidden_size, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(num_tokens, hidden_size // GROUP_SIZE, dtype=torch.uint8, device=device),
        *schedule_tensors,
    )


# --- schedule --------------------------------------------------------------------------------------------------------
def build_schedule(
    topk_ids: torch.Tensor,
    num_local_experts: int,
    *,
    num_experts: int,
    local_expert_offset: int = 0,
    expert_map: torch.Tensor | None = None,
    is_packed: bool = False,
) -> ExpertSchedule:
    """Schedule the slots whose expert this rank owns; as ``rankmoe.schedule.build_schedule``.

    topk_ids: [T, K] int32, int64 or uint32.
    is_packed: topk_ids are packed ids (int32) of the id space that the other arguments describe.
    """
    return _schedule_of(
        _build_schedule(
            topk_ids,
            expert_map,
            num_local_experts=num_local_experts,
            num_experts=num_experts,
            local_expert_offset=local_expert_offset,
            is_packed=is_packed,
        )
    )


@torch.library.custom_op("rankmoe::build_schedule", mutates_args=())
def _build_schedule(
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    *,
    num_local_experts: int,
    num_experts: int,
    local_expert_offset: int,
    is_packed: bool,
) -> _ScheduleTensors:
    return _tensors_of(
        schedule.build_schedule(
            topk_ids,
            num_local_experts,
            num_experts=num_experts,
            local_expert_offset=local_expert_offset,
            expert_map=expert_map,
            is_packed=is_packed,
        )
    )


@_build_schedule.register_fake
def _(
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    *,
    num_local_experts: int,
    num_experts: int,
    local_expert_offset: int,
    is_packed: bool,
) -> _ScheduleTensors:
    # Only for what they raise. Without the map, whose entries are checked when the operator runs.
    schedule.check_id_space(topk_ids, num_local_experts, num_experts, local_expert_offset, None)
    widen_ids(unpack(topk_ids)[0] if is_packed else topk_ids)
    num_tokens, top_k = topk_ids.shape
    return _empty_schedule(topk_ids.device, num_tokens, top_k, num_local_experts)


def _empty_schedule(device: torch.device, num_tokens: int, top_k: int, num_local_experts: int) -> _ScheduleTensors:
    """Uninitialised tensors of a schedule's shapes."""
    return _tensors_of(ExpertSchedule.empty(num_tokens, top_k, num_local_experts, device))


def _no_schedule(device: torch.device, expert_token_mask: torch.Tensor | None = None) -> _ScheduleTensors:
    """Where none is made, or the masks alone."""
    if expert_token_mask is None:
        expert_token_mask = torch.empty(0, dtype=torch.int64, device=device)
    nothing = [torch.empty(0, dtype=torch.int32, device=device) for _ in range(3)]
    return expert_token_mask, nothing[0], nothing[1], nothing[2]


def _tensors_of(schedule: ExpertSchedule) -> _ScheduleTensors:
    """The operators' form of a schedule: row_tokens padded with -1 to one entry a slot, an empty mask for none."""
    mask, row_tokens = schedule.expert_token_mask, schedule.row_tokens
    if mask is None:
        mask = row_tokens.new_empty(0, dtype=torch.int64)
    num_unused = schedule.slot_rows.numel() - row_tokens.shape[0]
    if num_unused:
        row_tokens = torch.cat([row_tokens, row_tokens.new_full((num_unused,), -1)])
    return mask, schedule.expert_offsets, row_tokens, schedule.slot_rows


def _schedule_of(tensors: list[torch.Tensor] | _ScheduleTensors) -> ExpertSchedule:
    mask, expert_offsets, row_tokens, slot_rows = tensors
    num_tokens = slot_rows.shape[0]
    return ExpertSchedule(
        num_tokens, mask if num_tokens <= MAX_FRONT_TOKENS else None, expert_offsets, row_tokens, slot_rows
    )


# --- experts and combine ---------------------------------------------------------------------------------------------
def fused_moe(
    x: MXTensor,
    topk_weights: torch.Tensor,
    schedule: ExpertSchedule,
    weights: ExpertWeights,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Run this rank's experts on quantised rows, and combine.

    x: [T, H] mxfp8.
    topk_weights: [T, K] float32.
    schedule: from ``route_quantize`` or ``build_schedule``. It says all there is to know of ids and placement.
    Returns [T, H] ``out_dtype``: this rank's part of the sum.
    Raises as ``gate_up``, ``down`` and ``combine`` do; ValueError for weights whose layout takes factors out of the
    scales (the ``humming`` backend), which the operator does not carry.
    """
    if weights.w13_factor is not None or weights.w2_factor is not None:
        raise ValueError(f"weights: expected a backend without scale factors for the operator, got {weights.backend!r}")
    activation = weights.activation
    if isinstance(activation, SiTU):
        name, constants, limit = "situ", [activation.beta, activation.linear_beta], None
    else:
        name, constants, limit = "swiglu", [activation.alpha, activation.up_offset], activation.limit
    return _fused_moe(
        x.data.view(torch.uint8),  # opcheck cannot compare float8 arguments
        x.scale,
        topk_weights,
        schedule.expert_token_mask,
        schedule.expert_offsets,
        schedule.row_tokens,
        schedule.slot_rows,
        weights.w13.data,
        weights.w13.scale,
        weights.w2.data,
        weights.w2.scale,
        weights.w13_bias,
        weights.w2_bias,
        activation=name,
        activation_constants=constants,
        activation_limit=limit,
        backend=weights.backend,
        out_dtype=out_dtype,
    )


@torch.library.custom_op("rankmoe::fused_moe", mutates_args=())
def _fused_moe(
    x_data: torch.Tensor,
    x_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_token_mask: torch.Tensor | None,
    expert_offsets: torch.Tensor,
    row_tokens: torch.Tensor,
    slot_rows: torch.Tensor,
    w13_data: torch.Tensor,
    w13_scale: torch.Tensor,
    w2_data: torch.Tensor,
    w2_scale: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    *,
    activation: str,
    activation_constants: list[float],
    activation_limit: float | None,
    backend: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    if row_tokens.device.type == "cpu":  # reading the number of rows waits for nothing, and unused rows cost time
        row_tokens = row_tokens[: int(expert_offsets[-1])]
    schedule = ExpertSchedule(x_data.shape[0], expert_token_mask, expert_offsets, row_tokens, slot_rows)
    weights = ExpertWeights(
        MXTensor(w13_data, w13_scale, "mxfp4"),
        MXTensor(w2_data, w2_scale, "mxfp4"),
        _activation(activation, activation_constants, activation_limit),
        # The GEMMs know their experts by local ids alone, so this rank may as well be the only one.
        ExpertPlacement(w13_data.shape[0]),
        backend,
        w13_bias,
        w2_bias,
    )
    x = MXTensor(x_data.view(torch.float8_e4m3fn), x_scale, "mxfp8")
    return combine(gemms(x, schedule, weights), topk_weights, schedule, out_dtype)


@_fused_moe.register_fake
def _(x_data: torch.Tensor, *_: Any, out_dtype: torch.dtype, **__: Any) -> torch.Tensor:
    return torch.empty(x_data.shape, dtype=out_dtype, device=x_data.device)


def _activation(name: str, constants: list[float], limit: float | None) -> Activation:
    if name == "situ":
        beta, linear_beta = constants
        return SiTU(beta, linear_beta)
    if name == "swiglu":
        alpha, up_offset = constants
        return SwiGLU(alpha, limit, up_offset)
    raise ValueError(f"activation: expected 'situ' or 'swiglu', got {name!r}")


# --- the whole layer -------------------------------------------------------------------------------------------------
def routed_moe(
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    weights: ExpertWeights,
    config: RouterConfig,
    correction_bias: torch.Tensor | None = None,
    *,
    rank_local: bool = True,
    num_valid_tokens: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The whole routed layer of one rank; arguments, result and errors as ``rankmoe.moe.routed_moe``.

    Raises ValueError for redundant experts, whose ids are replaced by code that depends on their values.
    """
    placement = weights.placement
    if placement.physical_to_logical is not None:
        raise ValueError("weights.placement: expected no redundant experts, got physical_to_logical")
    if router_logits.shape[1] != placement.num_experts:
        raise ValueError(
            f"router_logits: expected [num_tokens, {placement.num_experts}] as the placement, "
            f"got {tuple(router_logits.shape)}"
        )
    result = route_quantize(
        router_logits,
        hidden_states,
        config,
        correction_bias,
        local_range=placement.local_range,
        rank_local=rank_local,
        num_valid_tokens=num_valid_tokens,
    )
    schedule = result.schedule
    if schedule is None:  # round-robin: the experts are found through the map
        schedule = build_schedule(
            result.routing.topk_ids,
            placement.num_local_experts,
            num_experts=placement.num_experts,
            expert_map=placement.expert_map,
        )
    return fused_moe(result.x, result.routing.topk_weights, schedule, weights, out_dtype=out_dtype)


# --- gradients -------------------------------------------------------------------------------------------------------
def _refuse_backward(name: str) -> None:
    def backward(*_: Any) -> NoReturn:
        raise NotImplementedError(
            f"{name} has no backward: the routed path is for inference. "
            "Call it under torch.no_grad() or torch.inference_mode()."
        )

    torch.library.register_autograd(name, backward)


# Without these, a backward pass would speak of a missing registration; build_schedule has integer results only.
_refuse_backward("rankmoe::route_quantize")
_refuse_backward("rankmoe::fused_moe")
