"""Kimi-K3's latent MoE block: experts work in a narrow latent space, and the norm follows the sum over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from rankmoe.activation import apply_activation
from rankmoe.distributed import ExpertParallelGroup
from rankmoe.handoff import Handoff
from rankmoe.route import route
from rankmoe.runner import RoutedMoeRunner
from rankmoe.types import Activation, ExpertWeights, LocalRange, RouterConfig, SiTU


@dataclass(frozen=True)
class KimiK3MoEConfig:
    """Sizes of the block; the defaults are Kimi-K3's."""

    hidden_size: int = 7168
    routed_expert_hidden_size: int = 3584
    num_experts: int = 896
    moe_intermediate_size: int = 3072
    shared_intermediate_size: int = 6144
    rms_norm_eps: float = 1e-5
    router: RouterConfig = field(default_factory=lambda: RouterConfig(top_k=16))
    activation: Activation = field(default_factory=SiTU)


class GatedMLP(nn.Module):
    """Shared experts: one dense MLP in hidden space with the experts' activation."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[T, hidden] to [T, hidden]."""
        gate_up = torch.cat([self.gate_proj(hidden_states), self.up_proj(hidden_states)], dim=-1)
        middle = apply_activation(gate_up.float(), self.activation).to(hidden_states.dtype)
        return self.down_proj(middle)


class RouterGate(nn.Module):
    """Router: float32 logits, and the correction bias that ranks experts without touching their weights."""

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(num_experts, dtype=torch.float32))
        nn.init.normal_(self.weight, std=hidden_size**-0.5)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> RouterGate:
        """Move with the module, but stay float32 when it is cast: the bias decides between close experts."""
        bias = self.e_score_correction_bias.data
        super()._apply(fn, recurse)
        if bias.is_meta:  # given memory only now
            bias = self.e_score_correction_bias.data.float()
        self.e_score_correction_bias.data = bias.to(self.weight.device)
        return self

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[T, hidden] to [T, E] float32."""
        return functional.linear(hidden_states.float(), self.weight.float())


class KimiK3MoE(nn.Module):
    """The block on one rank of an expert-parallel group with replicated tokens.

    The routed experts are no parameters: ``bind_experts`` attaches this rank's packed weights, also again later (for
    another range, say); the range is read at every forward.

    config: sizes.
    group: the ranks among which the experts are spread; partial sums are added in latent space.
    handoff: shared by the layers of a model; made here if None.
    rank_local: form of the packed ids; the output is the same, bit for bit.
    reduce_dtype: dtype of the partial sums that the ranks add; bfloat16 as served, float32 where the order of adding
        must matter less.
    """

    def __init__(
        self,
        config: KimiK3MoEConfig,
        group: ExpertParallelGroup | None = None,
        handoff: Handoff | None = None,
        *,
        rank_local: bool = True,
        reduce_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        hidden_size, latent_size = config.hidden_size, config.routed_expert_hidden_size
        self.config = config
        self.group = group or ExpertParallelGroup()
        self.handoff = handoff or Handoff()
        self.rank_local = rank_local
        self.reduce_dtype = reduce_dtype
        self.gate = RouterGate(hidden_size, config.num_experts)
        self.routed_expert_down_proj = nn.Linear(hidden_size, latent_size, bias=False)
        self.routed_expert_norm = nn.RMSNorm(latent_size, eps=config.rms_norm_eps)
        self.routed_expert_up_proj = nn.Linear(latent_size, hidden_size, bias=False)
        self.shared_experts = GatedMLP(hidden_size, config.shared_intermediate_size, config.activation)
        self.runner: RoutedMoeRunner | None = None

    def bind_experts(self, weights: ExpertWeights) -> None:
        """Attach this rank's experts. Raises ValueError where they do not fit the configuration."""
        config = self.config
        expected = (config.num_experts, config.routed_expert_hidden_size, config.moe_intermediate_size)
        got = (weights.placement.num_logical_experts, weights.hidden_size, weights.intermediate_size)
        if got != expected:
            raise ValueError(f"weights: expected (experts, latent, intermediate) {expected}, got {got}")
        if weights.activation != config.activation:
            raise ValueError(f"weights: expected activation {config.activation}, got {weights.activation}")
        self.runner = RoutedMoeRunner(weights, self.handoff, out_dtype=self.reduce_dtype)

    def forward(self, hidden_states: torch.Tensor, num_valid_tokens: torch.Tensor | None = None) -> torch.Tensor:
        """[T, hidden] to [T, hidden] in the same dtype; every rank gets the same rows.

        num_valid_tokens: [1] integer or None. Rows from this one on cost no expert work; what they give is undefined.
        Raises RuntimeError before ``bind_experts``, ValueError for another shape.
        """
        if hidden_states.dim() != 2 or hidden_states.shape[1] != self.config.hidden_size:
            raise ValueError(
                f"hidden_states: expected [num_tokens, {self.config.hidden_size}], got {tuple(hidden_states.shape)}"
            )
        routed = self.group.all_reduce(self.routed_partial(hidden_states, num_valid_tokens))
        latent = self.routed_expert_norm(routed.to(hidden_states.dtype))
        return self.routed_expert_up_proj(latent) + self.shared_experts(hidden_states)

    def routed_partial(self, hidden_states: torch.Tensor, num_valid_tokens: torch.Tensor | None = None) -> torch.Tensor:
        """[T, latent] ``reduce_dtype``. This rank's part of the routed experts' sum, before the sum over ranks."""
        if self.runner is None:
            raise RuntimeError("KimiK3MoE: expected bind_experts() before forward()")
        logits = self.gate(hidden_states)
        latent = self.routed_expert_down_proj(hidden_states)
        bias = self.gate.e_score_correction_bias
        try:
            self.handoff.stage(latent, self._range_to_stage())
            routing = self.handoff.try_route(logits, self.config.router, bias, num_valid_tokens)
            if routing is None:
                routing = route(logits, self.config.router, bias, num_valid_tokens)
            return self.runner(latent, routing, num_valid_tokens)
        finally:
            self.handoff.clear()

    def _range_to_stage(self) -> LocalRange | None:
        assert self.runner is not None
        placement = self.runner.weights.placement
        return placement.local_range if self.rank_local and placement.physical_to_logical is None else None
