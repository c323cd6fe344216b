"""Benchmark inputs: random expert weights of a model's real size, and random routings."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rankmoe.experts import pack_experts
from rankmoe.models.presets import ModelPreset
from rankmoe.types import GROUP_SIZE, ExpertPlacement, ExpertWeights, MXTensor

#: Scale bytes of random weights: 2^-9 to 2^-4, about what trained matrices of these widths have.
_SCALE_BYTES = (118, 123)


def random_experts(
    preset: ModelPreset,
    placement: ExpertPlacement,
    backend: str = "auto",
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    device: torch.device | str = "cpu",
) -> ExpertWeights:
    """Random MXFP4 experts of one rank, filled in place so that nothing is held twice; without biases.

    progress: called with (experts done, experts in all).
    """
    generator = torch.Generator(device).manual_seed(seed)
    num_experts, hidden_size, intermediate_size = (
        placement.num_local_experts,
        preset.hidden_size,
        preset.intermediate_size,
    )
    w13 = _empty(num_experts, 2 * intermediate_size, hidden_size, generator.device)
    w2 = _empty(num_experts, hidden_size, intermediate_size, generator.device)
    for expert in range(num_experts):
        for tensor in (w13, w2):
            _fill(tensor[expert], generator)
        if progress is not None:
            progress(expert + 1, num_experts)
    return pack_experts(w13, w2, preset.activation, placement, backend=backend)


def random_weight(num_experts: int, num_outputs: int, num_inputs: int, generator: torch.Generator) -> MXTensor:
    """[L, out, in] random mxfp4 on the generator's device."""
    weight = _empty(num_experts, num_outputs, num_inputs, generator.device)
    _fill(weight, generator)
    return weight


def _empty(num_experts: int, num_outputs: int, num_inputs: int, device: torch.device | str = "cpu") -> MXTensor:
    data = torch.empty(num_experts, num_outputs, num_inputs // 2, dtype=torch.uint8, device=device)
    scale = torch.empty(num_experts, num_outputs, num_inputs // GROUP_SIZE, dtype=torch.uint8, device=device)
    return MXTensor(data, scale, "mxfp4")


def _fill(weight: MXTensor, generator: torch.Generator) -> None:
    # Whole words are random bits too, at an eighth of the cost.
    weight.data.view(torch.int64).random_(generator=generator)
    weight.scale.random_(_SCALE_BYTES[0], _SCALE_BYTES[1] + 1, generator=generator)


def random_batch(preset: ModelPreset, num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(router_logits [T, E] float32, hidden_states [T, H] bfloat16) of uniformly random routing."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, preset.num_experts, generator=generator)
    hidden_states = torch.randn(num_tokens, preset.hidden_size, generator=generator)
    return logits, hidden_states.bfloat16()
