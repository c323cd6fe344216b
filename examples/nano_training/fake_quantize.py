"""Straight-through quantisers: forward the values that the served formats decode to, backward the identity."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from rankmoe.quantize import dequantize, quantize_mxfp4, quantize_mxfp8

#: What the routed experts see: master weights, MXFP4 weights, or MXFP4 weights and MXFP8 activations.
ExpertFormat = Literal["unquantized", "mxfp4", "mxfp4_mxfp8"]
EXPERT_FORMATS: tuple[ExpertFormat, ...] = get_args(ExpertFormat)


class FakeQuantizeMxfp4(torch.autograd.Function):
    """Weights [..., N] to the values that their MXFP4 form decodes to; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        """Quantise and decode."""
        return dequantize(quantize_mxfp4(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Pass the gradient through."""
        return gradient


class FakeQuantizeMxfp8(torch.autograd.Function):
    """Rows [T, N] to the values that their MXFP8 form decodes to; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        """Quantise and decode."""
        return dequantize(quantize_mxfp8(rows)).to(rows.dtype)  # a decoded element has 4 significant bits

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Pass the gradient through."""
        return gradient


def fake_quantize_weight(weight: Tensor, expert_format: ExpertFormat) -> Tensor:
    """Weights as the experts see them in a format."""
    return weight if expert_format == "unquantized" else FakeQuantizeMxfp4.apply(weight)


def fake_quantize_rows(rows: Tensor, expert_format: ExpertFormat) -> Tensor:
    """A GEMM's input rows as the experts see them in a format."""
    return FakeQuantizeMxfp8.apply(rows) if expert_format == "mxfp4_mxfp8" else rows
