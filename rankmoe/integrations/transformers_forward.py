"""What a Transformers experts module computes where ``rankmoe`` is its implementation."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from rankmoe.combine import combine
from rankmoe.integrations.transformers_state import ExpertsState, state_of
from rankmoe.integrations.transformers_weights import StoredExperts
from rankmoe.moe import fused_moe
from rankmoe.quantize import needs_gradient, quantize_mxfp8
from rankmoe.schedule import build_schedule
from rankmoe.types import ExpertWeights, Routing, widen_ids

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run the experts of a module on the slots that it holds.

    self: the experts module.
    hidden_states: [T, H] bfloat16, float16 or float32.
    top_k_index: [T, K] integer. Local ids; a slot with a negative id, or one that is not below the module's number of
        experts, is skipped, and its weight never matters. Global ids where ``shard_experts`` has sharded the module.
    top_k_weights: [T, K] floating point.
    Returns [T, H] in the dtype of hidden_states: the weighted sum in slot order, in float32, rounded once; added over
    the group where the module is sharded.
    Raises TypeError for another dtype, ValueError for other shapes, and RuntimeError where gradients are asked of
    quantised or sharded experts.
    """
    if hidden_states.dtype not in _DTYPES:
        raise TypeError(f"hidden_states: expected bfloat16, float16 or float32, got {hidden_states.dtype}")
    if hidden_states.dim() != 2 or top_k_weights.shape != top_k_index.shape:
        raise ValueError(
            "hidden_states, top_k_index, top_k_weights: expected [num_tokens, hidden] and twice [num_tokens, top_k], "
            f"got {tuple(hidden_states.shape)}, {tuple(top_k_index.shape)} and {tuple(top_k_weights.shape)}"
        )
    state = state_of(self)
    is_followed = needs_gradient(hidden_states) or needs_gradient(top_k_weights)
    if is_followed and (state.weights is not None or state.placement is not None):
        what = "sharded" if state.weights is None else "MXFP4"
        raise RuntimeError(
            f"hidden_states: expected no gradients through {what} experts, which are for inference only, got tensors "
            "that autograd follows; run under torch.no_grad() or torch.inference_mode()"
        )
    ids = widen_ids(top_k_index)
    if state.weights is None:
        out = _run_stored(self, state, hidden_states, ids, top_k_weights.float())
    else:
        out = _run_quantized(state, state.weights, hidden_states, ids, top_k_weights.float())
    if state.group is not None:
        out = state.group.all_reduce(out)
    return out.to(hidden_states.dtype)


def _run_quantized(
    state: ExpertsState, weights: ExpertWeights, hidden_states: torch.Tensor, ids: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """[T, H] float32 by MXFP8 x MXFP4; ids [T, K] int64, slots their weights [T, K] float32."""
    if hidden_states.dtype == torch.float16:
        hidden_states = hidden_states.float()  # exact; float16 rows have no kernel
    ids, space = _placed(state, ids, weights.num_local_experts)
    routing = Routing(slots.contiguous(), ids.int())
    return fused_moe(quantize_mxfp8(hidden_states.contiguous()), routing, weights, out_dtype=torch.float32, **space)


def _run_stored(
    module: Any, state: ExpertsState, hidden_states: torch.Tensor, ids: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """[T, H] float32 by the module's own weights, gate and dtype; autograd follows it."""
    stored = StoredExperts.of(module)
    ids, space = _placed(state, ids, stored.num_local_experts)
    schedule = build_schedule(ids, stored.num_local_experts, **space)
    offsets = schedule.expert_offsets.tolist()
    tokens = schedule.row_tokens[: offsets[-1]].long()
    rows = hidden_states.to(stored.up.dtype)[tokens]
    outputs = [
        _expert(module, stored, expert, rows[start:stop])
        for expert, (start, stop) in enumerate(pairwise(offsets))
        if stop > start
    ]
    if not outputs:
        return torch.zeros_like(hidden_states, dtype=torch.float32)
    return combine(torch.cat(outputs).float(), slots, replace(schedule, row_tokens=tokens.int()), torch.float32)


def _expert(module: Any, stored: StoredExperts, expert: int, rows: torch.Tensor) -> torch.Tensor:
    """[m, H] rows of one expert, in the weights' dtype."""
    middle = stored.linear("up", expert, rows)
    middle = module._apply_gate(middle) if stored.has_gate else module.act_fn(middle)
    out = stored.linear("down", expert, middle)
    return module.post_expert_norm(out) if getattr(module, "has_post_expert_norm", False) else out


def _placed(state: ExpertsState, ids: torch.Tensor, num_local_experts: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """The ids, physical ones where experts are redundant, and the space they are in, as ``build_schedule`` takes it.

    An id that means nobody becomes -1, so that its value never depends on a narrower integer type.
    """
    placement = state.placement
    num_experts = num_local_experts if placement is None else placement.num_logical_experts
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, -1)
    if placement is None:
        return ids, {"num_experts": num_experts}
    return placement.to_physical(ids), {
        "num_experts": placement.num_experts,
        "expert_map": placement.expert_map_on(ids.device),
    }
