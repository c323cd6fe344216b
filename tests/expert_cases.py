"""Experts and batches that the tests of the native expert GEMMs share, and what float64 makes of them."""

from __future__ import annotations

import pytest
import torch
from helpers import random_mxfp4, seeded

from rankmoe.activation import apply_activation
from rankmoe.experts import pack_experts
from rankmoe.quantize import dequantize
from rankmoe.types import Activation, ExpertPlacement, ExpertSchedule, ExpertWeights, MXTensor, SiTU, SwiGLU

GPT_OSS = SwiGLU(alpha=1.702, limit=7.0, up_offset=1.0)
SHAPES = {
    "kimi-k3": (3584, 3072, SiTU(), False),
    "kimi-k2": (7168, 2048, SwiGLU(), False),
    "qwen3-moe": (4096, 1536, SwiGLU(), False),
    "gpt-oss": (2880, 2880, GPT_OSS, True),
    "medium": (416, 192, SiTU(), False),
    "small": (96, 64, SwiGLU(limit=3.0), True),
    "smallest": (32, 32, SiTU(), False),
}
#: Those of published models.
PUBLISHED = [name for name, (hidden_size, *_) in SHAPES.items() if hidden_size > 1024]


def skip_some(device: str, condition: bool) -> None:
    """Skip what would take a CPU too long, where that is the device and the condition holds."""
    if device == "cpu" and condition:
        pytest.skip("a GPU runs all of them, a CPU some")


def shape_on(device: str, name: str) -> tuple[int, int, Activation, bool]:
    """Hidden size, intermediate size, activation, whether there are biases."""
    skip_some(device, name in PUBLISHED)
    return SHAPES[name]


def make_experts(
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    activation: Activation = SiTU(),  # noqa: B008
    has_bias: bool = False,
    *,
    backend: str = "cuda",
    device: str = "cuda",
) -> tuple[ExpertWeights, MXTensor, MXTensor]:
    """Experts packed on a device, and the checkpoint's tensors there."""
    w13 = random_mxfp4(num_experts, 2 * intermediate_size, hidden_size, seed=1, scale_bytes=(117, 123)).to(device)
    w2 = random_mxfp4(num_experts, hidden_size, intermediate_size, seed=2, scale_bytes=(117, 123)).to(device)
    biases = {}
    if has_bias:
        biases["w13_bias"] = torch.randn(num_experts, 2 * intermediate_size, generator=seeded(3)).to(device)
        biases["w2_bias"] = torch.randn(num_experts, hidden_size, generator=seeded(4)).to(device)
    weights = pack_experts(w13, w2, activation, ExpertPlacement(num_experts, 1, 0), backend=backend, **biases)
    return weights, w13, w2


def random_ids(num_tokens: int, num_experts: int, top_k: int, seed: int = 0) -> torch.Tensor:
    """Distinct ids a row; expert 0 is nobody's and the last expert everybody's first choice."""
    ids = torch.rand(num_tokens, num_experts - 2, generator=seeded(seed)).argsort(1)[:, :top_k] + 1
    ids[:, 0] = num_experts - 1
    return ids.int()


def expected_middle(x: MXTensor, schedule: ExpertSchedule, weights: ExpertWeights, w13: MXTensor) -> torch.Tensor:
    """[R, I] float64 activations before requantisation."""
    rows, parts = dequantize(x, torch.float64), []
    for expert in range(weights.num_local_experts):
        own = slice(int(schedule.expert_offsets[expert]), int(schedule.expert_offsets[expert + 1]))
        accumulators = rows[schedule.row_tokens[own].long()] @ dequantize(w13[expert], torch.float64).T
        if weights.w13_bias is not None:
            accumulators = accumulators + weights.w13_bias[expert].double()
        parts.append(apply_activation(accumulators, weights.activation))
    return torch.cat(parts)


def expected_rows(middle: MXTensor, schedule: ExpertSchedule, weights: ExpertWeights, w2: MXTensor) -> torch.Tensor:
    """[R, H] float64."""
    rows, parts = dequantize(middle, torch.float64), []
    for expert in range(weights.num_local_experts):
        own = slice(int(schedule.expert_offsets[expert]), int(schedule.expert_offsets[expert + 1]))
        product = rows[own] @ dequantize(w2[expert], torch.float64).T
        parts.append(product if weights.w2_bias is None else product + weights.w2_bias[expert].double())
    return torch.cat(parts)


def move(weights: ExpertWeights, device: str = "cuda") -> ExpertWeights:
    """The same experts, packed for the GPU, on a device."""
    biases = {
        name: None if bias is None else bias.to(device)
        for name, bias in (("w13_bias", weights.w13_bias), ("w2_bias", weights.w2_bias))
    }
    tensors = (weights.w13.to(device), weights.w2.to(device))
    return pack_experts(*tensors, weights.activation, weights.placement, backend="cuda", **biases)
