"""One rank's weights in `rankmoe bench decode`: random, of the model's sizes; every layer has its own memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rankmoe.backends import get_backend
from rankmoe.bench.cases import random_experts
from rankmoe.models.presets import ModelPreset, get_preset
from rankmoe.types import ExpertPlacement, ExpertWeights, MXTensor


@dataclass(frozen=True)
class DecodeSizes:
    """What a layer has beside its routed experts, for the whole model.

    hidden_size: of the model; the routed experts' own, latent one is the preset's.
    shared_intermediate_size, vocab_size: split over the ranks.
    num_heads: queries that read the cache; every rank has all of them, and its part of the positions.
    cache_width: numbers that a layer keeps for a position, bfloat16.
    """

    preset: ModelPreset
    hidden_size: int
    shared_intermediate_size: int
    vocab_size: int
    num_heads: int
    cache_width: int


#: Kimi-K3's block; vocabulary, heads and the MLA cache (512 + 64) are Kimi-K2's. `nano`'s are those of its model.
SIZES = {
    "kimi-k3": DecodeSizes(get_preset("kimi-k3"), 7168, 6144, 163_840, 64, 576),
    "nano": DecodeSizes(get_preset("nano"), 256, 64, 256, 4, 192),
}

#: Numbers of a row of the cache as attention reads it: the 576 of a position are three rows, a size that PyTorch's fast
#: attention takes.
HEAD_SIZE = 192
#: Parts of a sequence's cache that are read at once; a rank's positions are a multiple of these.
CACHE_PARTS = 16


@dataclass(frozen=True)
class DecodeLayer:
    """Weights and cache of one layer on one rank, hidden size D, latent size H, all but experts and bias bfloat16.

    query: [head size, D], and head_scale: [heads, head size]. attention_out: [D, head size].
    cache: [batch, rows, head size], the rank's part of the positions.
    front: [E + H, D], the router's rows before those that bring hidden states to latent ones.
    correction_bias: [E] float32.
    latent_norm: [H]. up: [D, H].
    shared_gate_up: [2 S, D], shared_down: [D, S], this rank's part of the shared experts.
    """

    query: torch.Tensor
    head_scale: torch.Tensor
    attention_out: torch.Tensor
    cache: torch.Tensor
    front: torch.Tensor
    correction_bias: torch.Tensor
    experts: ExpertWeights
    latent_norm: torch.Tensor
    up: torch.Tensor
    shared_gate_up: torch.Tensor
    shared_down: torch.Tensor


@dataclass(frozen=True)
class DecodeModel:
    """One rank's model: distinct layers, run in turn until a step has ``num_layers``.

    embedding, head: [V of this rank, D] bfloat16.
    """

    sizes: DecodeSizes
    placement: ExpertPlacement
    num_layers: int
    layers: list[DecodeLayer]
    embedding: torch.Tensor
    head: torch.Tensor


def layer_nbytes(sizes: DecodeSizes, placement: ExpertPlacement, batch_size: int, cache_length: int) -> int:
    """Bytes of one layer, for choosing how many distinct ones there are."""
    preset, hidden = sizes.preset, sizes.hidden_size
    shared = 3 * hidden * sizes.shared_intermediate_size // placement.ep_size
    dense = (preset.num_experts + 2 * preset.hidden_size + 2 * HEAD_SIZE) * hidden + shared
    cache = batch_size * cache_length * sizes.cache_width
    return placement.num_local_experts * preset.expert_nbytes + 2 * (dense + cache)


def make_model(
    sizes: DecodeSizes,
    placement: ExpertPlacement,
    num_layers: int,
    num_distinct: int,
    batch_size: int,
    cache_length: int,
    device: torch.device,
    seed: int = 0,
) -> DecodeModel:
    """A random model. Experts are drawn once; a further layer has the same ones in other memory, in another order.

    cache_length: positions of each sequence that this rank keeps.
    """
    generator = torch.Generator(device).manual_seed(seed)
    hidden, vocabulary = sizes.hidden_size, sizes.vocab_size // placement.ep_size
    experts = random_experts(sizes.preset, placement, seed=seed, device=device)
    layers = []
    for i in range(num_distinct):
        own = experts if i == 0 else _reordered(experts, generator)
        layers.append(_make_layer(sizes, placement, own, batch_size, cache_length, generator))
    return DecodeModel(
        sizes,
        placement,
        num_layers,
        layers,
        embedding=_normal(generator, vocabulary, hidden),
        head=_normal(generator, vocabulary, hidden, scale=hidden**-0.5),
    )


def _make_layer(
    sizes: DecodeSizes,
    placement: ExpertPlacement,
    experts: ExpertWeights,
    batch_size: int,
    cache_length: int,
    generator: torch.Generator,
) -> DecodeLayer:
    preset, hidden = sizes.preset, sizes.hidden_size
    shared, latent = sizes.shared_intermediate_size // placement.ep_size, preset.hidden_size
    num_rows = cache_length * sizes.cache_width // HEAD_SIZE

    def weight(num_outputs: int, num_inputs: int) -> torch.Tensor:
        return _normal(generator, num_outputs, num_inputs, scale=num_inputs**-0.5)

    return DecodeLayer(
        query=weight(HEAD_SIZE, hidden),
        head_scale=_normal(generator, sizes.num_heads, HEAD_SIZE),
        attention_out=weight(hidden, HEAD_SIZE),
        cache=_normal(generator, batch_size, num_rows, HEAD_SIZE),
        front=weight(preset.num_experts + latent, hidden),
        correction_bias=_normal(generator, preset.num_experts, scale=0.01).float(),
        experts=experts,
        latent_norm=_normal(generator, latent),
        up=weight(hidden, latent),
        shared_gate_up=weight(2 * shared, hidden),
        shared_down=weight(hidden, shared),
    )


def _normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
    values = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    return values.normal_(0.0, scale, generator=generator)


def _reordered(experts: ExpertWeights, generator: torch.Generator) -> ExpertWeights:
    """The same experts in another order and in memory of their own, which packing anew would take minutes for."""
    layout = get_backend(experts.backend).layout
    order = torch.randperm(experts.num_local_experts, device=generator.device, generator=generator)

    def reorder(weight: MXTensor) -> MXTensor:
        copy = layout.empty(weight.shape, weight.data.device)
        for source, target in zip(layout.buffers(weight).values(), layout.buffers(copy).values(), strict=True):
            torch.index_select(source, 0, order, out=target)
        return copy

    assert experts.w13_factor is experts.w2_factor is None, "random scales need no factor"
    return replace(experts, w13=reorder(experts.w13), w2=reorder(experts.w2))
