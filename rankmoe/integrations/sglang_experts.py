"""What the SGLang adapter computes, on plain tensors: nothing of SGLang is imported here."""

from __future__ import annotations

from typing import Any

import torch

from rankmoe.backends import cuda_kernel
from rankmoe.front import route_quantize
from rankmoe.integrations.mxfp4_layers import pack_loaded
from rankmoe.moe import fused_moe
from rankmoe.quantize import quantize_mxfp8
from rankmoe.types import (
    GROUP_SIZE,
    MAX_FRONT_TOKENS,
    Activation,
    ExpertPlacement,
    ExpertWeights,
    MXTensor,
    RouterConfig,
    Routing,
    SiTU,
    SwiGLU,
)


def activation_of(config: Any) -> Activation:
    """The activation of a ``MoeRunnerConfig``; Kimi-K3's constants stand in its ``gemm1_`` fields.

    Raises ValueError for one that the experts cannot have.
    """
    if not config.is_gated:
        raise ValueError("moe_runner_config.is_gated: expected True, got False")
    if config.activation == "situ":
        if config.gemm1_alpha is None or config.gemm1_clamp_limit is None:
            raise ValueError(
                "moe_runner_config.gemm1_alpha, gemm1_clamp_limit: expected SiTU's two constants, got None"
            )
        return SiTU(beta=config.gemm1_alpha, linear_beta=config.gemm1_clamp_limit)
    if config.activation != "silu":
        raise ValueError(f"moe_runner_config.activation: expected situ or silu, got {config.activation!r}")
    if config.gemm1_alpha is not None:
        return SwiGLU(alpha=config.gemm1_alpha, limit=config.gemm1_clamp_limit, up_offset=1.0)
    return SwiGLU(limit=config.swiglu_limit)


def pack_layer(layer: Any, config: Any) -> ExpertWeights:
    """Pack a loaded MXFP4 layer's experts (``Mxfp4MoEMethod.create_weights``); see ``mxfp4_layers.pack_loaded``.

    config: its ``MoeRunnerConfig``; rows alternate where ``gate_up_interleaved`` and an alpha say so.
    Raises ValueError for fused shared experts, padded sizes, and an activation that the experts cannot have.
    """
    activation = activation_of(config)
    if config.num_fused_shared_experts:
        raise ValueError(
            f"moe_runner_config.num_fused_shared_experts: expected 0, got {config.num_fused_shared_experts}"
        )
    return pack_loaded(
        layer,
        activation,
        ExpertPlacement(config.num_experts, config.moe_ep_size, config.moe_ep_rank),
        config.hidden_size,
        config.intermediate_size_per_partition,
        is_alternating=config.activation == "silu" and config.gemm1_alpha is not None and config.gate_up_interleaved,
        bias_names=("w13_weight_bias", "w2_weight_bias"),
    )


def run_experts(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: ExpertWeights,
    *,
    is_global: bool,
    routed_scaling_factor: float | None = None,
    staged: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """This rank's part of a layer's output.

    hidden_states: [T, H] bfloat16 or float32.
    topk_ids: [T, K] int32 or int64. Local ids, -1 for experts of other ranks and padding; with ``is_global`` the
        model's, which are mapped here and nowhere else.
    topk_weights: [T, K] float.
    staged: packed ids, rows [T, H] e4m3 and scales [T, H / 128] int32 (four bytes each) of a fused front that has seen
        these very hidden states; its rows are taken.
    Returns [T, H] in the dtype of hidden_states.
    """
    placement = weights.placement
    if staged is None:
        x = quantize_mxfp8(hidden_states.contiguous())
    else:
        x = MXTensor(staged[1], staged[2].view(torch.uint8), "mxfp8")
    scale = 1.0 if routed_scaling_factor is None else routed_scaling_factor
    topk_weights = topk_weights.float().contiguous()
    return fused_moe(
        x,
        Routing(topk_weights if scale == 1.0 else topk_weights * scale, topk_ids),
        weights,
        num_experts=placement.num_experts if is_global else placement.num_local_experts,
        local_expert_offset=placement.local_expert_offset if is_global else 0,
        out_dtype=hidden_states.dtype,
    )


# --- the front behind SGLang's route-quantise handoff ----------------------------------------------------------------
def front_covered(scores: torch.Tensor, bias: torch.Tensor, topk: int, x: torch.Tensor) -> bool:
    """Whether one launch takes these inputs; in place of ``moe_route_quant_fused.covered``."""
    kernel = cuda_kernel("front", x.device)
    if kernel is None or bias.dtype != torch.float32 or x.dim() != 2 or not 0 < x.shape[0] <= MAX_FRONT_TOKENS:
        return False
    config = RouterConfig(topk)
    return x.shape[1] % (4 * GROUP_SIZE) == 0 and bool(kernel.covered(scores, x, config, "none"))


def route_quant_fused(
    scores: torch.Tensor,
    bias: torch.Tensor,
    x: torch.Tensor,
    topk: int,
    renormalize: bool,
    routed_scaling_factor: float,
    apply_scale: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """In place of ``moe_route_quant_fused.route_quant_fused``: sigmoid routing, packing and quantising at once.

    scores: [T, E] float32 or bfloat16 logits. bias: [E] float32. x: [T, H] bfloat16 or float32.
    Returns weights [T, K] float32, global ids [T, K] int32 in ascending order, packed ids [T, K] int32, rows [T, H]
    float8_e4m3fn, and their scales [T, H / 128] int32, four bytes each.
    """
    config = RouterConfig(
        topk, renormalize=renormalize, routed_scaling_factor=routed_scaling_factor if apply_scale else 1.0
    )
    front = route_quantize(scores, x, config, bias, schedule="none")
    routing = front.routing
    assert routing.packed is not None, "the front packs always"
    return routing.topk_weights, routing.topk_ids, routing.packed, front.x.data, front.x.scale.view(torch.int32)
