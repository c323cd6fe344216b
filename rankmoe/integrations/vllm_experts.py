"""What the vLLM adapter computes, on plain tensors: nothing of vLLM is imported here."""

from __future__ import annotations

from typing import Any

import torch

from rankmoe.integrations.mxfp4_layers import pack_loaded
from rankmoe.moe import fused_moe
from rankmoe.quantize import quantize_mxfp8
from rankmoe.types import Activation, ExpertPlacement, ExpertWeights, Routing, SiTU, SwiGLU

#: vLLM's activations by their values, and whether their rows of w13 alternate.
_SWIGLU_OF_GPT_OSS = {"swigluoai": True, "swigluoai_uninterleave": False}


def activation_of(moe: Any) -> Activation:
    """The activation of a ``FusedMoEConfig``. Raises ValueError for one that the experts cannot have."""
    name = moe.activation.value
    if name == "situ":
        if moe.activation_situ_beta is None or moe.activation_situ_linear_beta is None:
            raise ValueError("moe.activation_situ_beta, activation_situ_linear_beta: expected two numbers, got None")
        return SiTU(beta=moe.activation_situ_beta, linear_beta=moe.activation_situ_linear_beta)
    if name in _SWIGLU_OF_GPT_OSS:
        return SwiGLU(
            alpha=1.702 if moe.swiglu_alpha is None else moe.swiglu_alpha,
            limit=7.0 if moe.swiglu_limit is None else moe.swiglu_limit,
            up_offset=1.0 if moe.swiglu_beta is None else moe.swiglu_beta,
        )
    if name == "silu":
        return SwiGLU(
            alpha=1.0 if moe.swiglu_alpha is None else moe.swiglu_alpha,
            limit=moe.swiglu_limit,
            up_offset=0.0 if moe.swiglu_beta is None else moe.swiglu_beta,
        )
    raise ValueError(f"moe.activation: expected situ, silu, {' or '.join(_SWIGLU_OF_GPT_OSS)}, got {name}")


def pack_layer(layer: Any, moe: Any, hidden_size: int, intermediate_size: int) -> ExpertWeights:
    """Pack a loaded MXFP4 layer's experts (``Mxfp4MoEMethod.create_weights``); see ``mxfp4_layers.pack_loaded``.

    moe: its ``FusedMoEConfig``. Which of the model's experts these are is said by ``expert_map`` in every call; here
        only how many there are counts, of which configurations are chosen.
    Raises ValueError also for another number of experts than an even share.
    """
    parallel = moe.moe_parallel_config
    placement = ExpertPlacement(moe.num_experts, parallel.ep_size, parallel.ep_rank)
    if placement.num_local_experts != moe.num_local_experts:
        raise ValueError(
            f"moe.num_local_experts: expected {placement.num_local_experts} of {moe.num_experts} experts on rank "
            f"{parallel.ep_rank} of {parallel.ep_size}, got {moe.num_local_experts}"
        )
    return pack_loaded(
        layer,
        activation_of(moe),
        placement,
        hidden_size,
        intermediate_size,
        is_alternating=_SWIGLU_OF_GPT_OSS.get(moe.activation.value, False),
        bias_names=("w13_bias", "w2_bias"),
    )


def run_experts(
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: ExpertWeights,
    *,
    global_num_experts: int,
    expert_map: torch.Tensor | None,
) -> None:
    """Write this rank's part of a layer's output, weighted and added up.

    output: [T, H]. hidden_states: [T, H] bfloat16 or float32.
    topk_ids: [T, K] int32 or int64 global ids; -1 for padding.
    expert_map: [E] int32, local id or -1 of each expert, linear or round-robin; None where all experts are here.
    """
    routing = Routing(topk_weights.float().contiguous(), topk_ids)
    num_experts = weights.num_local_experts if expert_map is None else global_num_experts
    x = quantize_mxfp8(hidden_states.contiguous())
    result = fused_moe(x, routing, weights, num_experts=num_experts, expert_map=expert_map, out_dtype=torch.float32)
    output.copy_(result)
