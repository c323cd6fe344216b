"""One rank's decode step in `rankmoe bench decode`, and the three ways to run its routed layers.

What a rank computes for its group is there; the collectives that it would wait for are not, since there is one GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from rankmoe.activation import apply_activation
from rankmoe.bench.decode_model import CACHE_PARTS, DecodeLayer, DecodeModel
from rankmoe.front import route_quantize
from rankmoe.moe import Workspace, fused_moe, routed_moe
from rankmoe.pack import id_space, pack_topk
from rankmoe.quantize import quantize_mxfp8
from rankmoe.route import route
from rankmoe.types import Activation

NORM_EPS = 1e-5


def step(model: DecodeModel, tokens: torch.Tensor, run_routed: RunRouted) -> torch.Tensor:
    """One token for each sequence: embedding, all layers, this rank's part of the vocabulary, a sample.

    tokens: [batch] int64, replaced by the next ones, so that routing is another one at each step.
    Returns the last hidden states [batch, D] bfloat16. Capturable; the sample takes torch's generator of the device.
    """
    add_norm = _fused(_add_norm, tokens.device.type)
    hidden = functional.embedding(tokens, model.embedding)
    normed = functional.rms_norm(hidden, hidden.shape[-1:], eps=NORM_EPS)
    for i in range(model.num_layers):
        layer = model.layers[i % len(model.layers)]
        hidden, normed = add_norm(hidden, attention(layer, normed))
        hidden, normed = add_norm(hidden, moe_block(model, layer, normed, run_routed))
    logits = functional.linear(normed, model.head).float()
    noise = torch.empty_like(logits).exponential_()
    tokens.copy_((logits.softmax(-1) / noise).argmax(-1))
    return hidden


def attention(layer: DecodeLayer, hidden: torch.Tensor) -> torch.Tensor:
    """What stands for attention: every head reads this rank's part of the cache, keys and values in one, as MLA does.

    The cache's bytes and the multiplications over it are MLA's, in parts that fill the GPU. The projections of queries
    and outputs are not, and the parts are not joined: what the first head finds in the first part goes on.
    """
    batch_size, num_rows, _ = layer.cache[: hidden.shape[0]].shape
    parts = layer.cache[:batch_size].unflatten(1, (CACHE_PARTS, num_rows // CACHE_PARTS))
    queries = functional.linear(hidden, layer.query)[:, None, None, :] * layer.head_scale
    attended = functional.scaled_dot_product_attention(queries.expand(-1, CACHE_PARTS, -1, -1), parts, parts)
    return functional.linear(attended[:, 0, 0], layer.attention_out)


def moe_block(model: DecodeModel, layer: DecodeLayer, hidden: torch.Tensor, run_routed: RunRouted) -> torch.Tensor:
    """[batch, D]: one GEMM for router and latent states, routed experts, latent norm, up projection, shared experts."""
    preset, device_type = model.sizes.preset, hidden.device.type
    merged = _float32_linear(hidden, layer.front)
    routed = run_routed(model, layer, merged[:, : preset.num_experts], merged[:, preset.num_experts :])
    latent = _fused(_norm, device_type)(routed, layer.latent_norm)
    gate_up = functional.linear(hidden, layer.shared_gate_up)
    middle = _fused(_activate, device_type)(gate_up, preset.activation)
    return torch.addmm(functional.linear(middle, layer.shared_down), latent, layer.up.T)


def _float32_linear(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if hidden.device.type == "cuda":
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return functional.linear(hidden.float(), weight.float())


def _add_norm(hidden: torch.Tensor, update: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = hidden + update
    return hidden, functional.rms_norm(hidden, hidden.shape[-1:], eps=NORM_EPS)


def _norm(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(hidden, hidden.shape[-1:], weight, NORM_EPS)


def _activate(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    return apply_activation(gate_up.float(), activation).to(gate_up.dtype)


@cache
def _fused(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """On a GPU compiled to one launch, as engines have it."""
    return torch.compile(function) if device_type == "cuda" else function


# --- the routed layer ------------------------------------------------------------------------------------------------
#: (model, layer, router logits [T, E], latent states [T, H]) to this rank's part of the routed experts' sum, [T, H].
RunRouted = Callable[[DecodeModel, DecodeLayer, torch.Tensor, torch.Tensor], torch.Tensor]


def arms(workspace: Workspace) -> Mapping[str, RunRouted]:
    """The ways to run it, which differ in launches and not in a bit; the same GEMMs in all.

    a: routing, packing, quantising and a schedule pass over the model's ids, a launch each.
    b: one launch for the first three, ids rank-local, and a schedule pass over these.
    c: one launch for all four.
    """

    def separate(model: DecodeModel, layer: DecodeLayer, logits: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        placement = model.placement
        routing = route(logits, model.sizes.preset.router, layer.correction_bias)
        return fused_moe(
            quantize_mxfp8(latent),
            pack_topk(routing, placement.num_experts),
            layer.experts,
            num_experts=placement.num_experts,
            local_expert_offset=placement.local_expert_offset,
            workspace=workspace,
        )

    def fused_front(model: DecodeModel, layer: DecodeLayer, logits: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        placement, config = model.placement, model.sizes.preset.router
        own = placement.local_range
        assert own is not None, "the benchmark's placements are contiguous"
        front = route_quantize(logits, latent, config, layer.correction_bias, local_range=own, schedule="none")
        space = id_space(front.routing, placement.num_experts, own)
        return fused_moe(
            front.x,
            front.routing,
            layer.experts,
            num_experts=space.num_experts,
            local_expert_offset=space.local_expert_offset,
            workspace=workspace,
        )

    def one_launch(model: DecodeModel, layer: DecodeLayer, logits: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        config = model.sizes.preset.router
        return routed_moe(latent, logits, layer.experts, config, layer.correction_bias, workspace=workspace)

    return {"a": separate, "b": fused_front, "c": one_launch}
