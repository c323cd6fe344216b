"""The expert MLP's activation, on float accumulators: SiTU and SwiGLU with their options."""

from __future__ import annotations

import torch

from rankmoe.types import Activation, SiTU


def apply_activation(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Combine gate and up.

    gate_up: [R, 2 I] float32 or float64. Gate in the first half of the columns, up in the second.
    Returns [R, I] in the same dtype.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if isinstance(activation, SiTU):
        beta, linear_beta = activation.beta, activation.linear_beta
        bounded_gate = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
        return bounded_gate * (linear_beta * torch.tanh(up / linear_beta))
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.up_offset)
