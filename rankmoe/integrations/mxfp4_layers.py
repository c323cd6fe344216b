"""MXFP4 layers as serving engines have loaded them: weights, scales and biases as parameters of one module."""

from __future__ import annotations

from typing import Any

import torch

from rankmoe.experts import pack_experts
from rankmoe.types import Activation, ExpertPlacement, ExpertWeights, MXTensor

_WEIGHTS = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")


def pack_loaded(
    layer: Any,
    activation: Activation,
    placement: ExpertPlacement,
    hidden_size: int,
    intermediate_size: int,
    *,
    is_alternating: bool,
    bias_names: tuple[str, str],
) -> ExpertWeights:
    """Pack a layer's experts where they lie, one at a time.

    layer: with ``w13_weight`` [L, 2 I, H / 2] and ``w13_weight_scale`` [L, 2 I, H / 32] uint8, ``w2_weight``
        [L, H, I / 2] and ``w2_weight_scale``; biases [L, 2 I] and [L, H] by their names, or None, or zeros for a model
        without.
    is_alternating: rows of w13 are gate, up, gate, up, ...; else all gates, then all ups.
    Raises ValueError for other sizes, padded ones among them.
    """
    w13_data, w13_scale, w2_data, w2_scale = (getattr(layer, name).data for name in _WEIGHTS)
    w13, w2 = MXTensor(w13_data, w13_scale, "mxfp4"), MXTensor(w2_data, w2_scale, "mxfp4")
    expected = (placement.num_local_experts, 2 * intermediate_size, hidden_size)
    if w13.shape != expected:
        raise ValueError(f"layer.w13_weight: expected {expected} unpadded, got {w13.shape}")
    w13_bias, w2_bias = (_bias_of(getattr(layer, name, None)) for name in bias_names)
    if is_alternating:
        w13 = MXTensor(_gates_first(w13.data), _gates_first(w13.scale), "mxfp4")
        w13_bias = None if w13_bias is None else _gates_first(w13_bias)
    return pack_experts(w13, w2, activation, placement, w13_bias=w13_bias, w2_bias=w2_bias)


def free_loaded(layer: Any) -> None:
    """Let go of the weights and scales that ``pack_loaded`` has read; experts and rows can still be counted."""
    for name in _WEIGHTS:
        parameter = getattr(layer, name)
        parameter.data = parameter.data.new_empty(*parameter.shape[:2], 0)


def _bias_of(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return None if parameter is None or not bool(parameter.any()) else parameter.data.float()


def _gates_first(rows: torch.Tensor) -> torch.Tensor:
    """[L, 2 I, ...] of alternating gates and ups to all gates, then all ups."""
    return torch.cat([rows[:, 0::2], rows[:, 1::2]], dim=1)
