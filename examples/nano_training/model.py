"""``nano`` as it is trained: all experts here and differentiable, whole sequences at once, no cache.

Parameters and buffers carry the checkpoint's names, but for the leading ``model.`` and the routed experts, which are
stacked. Whatever is the same in training and in serving is the library's.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from nano_training.dispatch import dispatch
from nano_training.fake_quantize import ExpertFormat, fake_quantize_rows, fake_quantize_weight
from nano_training.grouped_matmul import GroupedMatmul
from rankmoe.activation import apply_activation
from rankmoe.models.kimi_k3 import GatedMLP
from rankmoe.models.nano_config import NanoConfig
from rankmoe.route import route


class Attention(nn.Module):
    """Causal grouped-query attention with RoPE (rotate-half)."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.config = config
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, S, hidden] to [B, S, hidden]."""
        query = _rotate(self._heads(self.q_proj(hidden_states)), cos, sin)
        key = _rotate(self._heads(self.k_proj(hidden_states)), cos, sin)
        value = self._heads(self.v_proj(hidden_states))
        repeats = self.config.num_attention_heads // self.config.num_key_value_heads
        attended = functional.scaled_dot_product_attention(
            query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1), is_causal=True
        )
        return self.o_proj(attended.transpose(1, 2).flatten(-2))

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to [B, heads, S, head_dim]; cos, sin: [S, head_dim / 2] float32."""
    first, second = states.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(states.dtype)


class Gate(nn.Module):
    """The router: float32 logits, and the correction bias, which no gradient reaches."""

    e_score_correction_bias: Tensor

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.router = config.router
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """hidden_states [T, hidden] to topk_weights [T, K] float32 (differentiable) and topk_ids [T, K] int64."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            logits = functional.linear(hidden_states.float(), self.weight)
            routing = route(logits, self.router, self.e_score_correction_bias)
        return routing.topk_weights, routing.topk_ids.long()


class RoutedExperts(nn.Module):
    """All routed experts, in latent space. w13 holds gate rows, then up rows."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.activation = config.activation
        num_experts, latent_size = config.num_experts, config.routed_expert_hidden_size
        self.w13 = nn.Parameter(torch.empty(num_experts, 2 * config.moe_intermediate_size, latent_size))
        self.w2 = nn.Parameter(torch.empty(num_experts, latent_size, config.moe_intermediate_size))

    def forward(
        self,
        latent: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        expert_format: ExpertFormat,
        grouped_matmul: GroupedMatmul,
    ) -> Tensor:
        """latent [T, latent] to the weighted sum over each token's experts, [T, latent] float32."""
        plan = dispatch(topk_ids, self.w2.shape[0])
        dtype = grouped_matmul.dtype
        with torch.autocast(latent.device.type, enabled=False):
            rows = plan.to_rows(fake_quantize_rows(latent, expert_format).to(dtype))
            w13 = fake_quantize_weight(self.w13, expert_format).to(dtype)
            gate_up = grouped_matmul.multiply(rows, w13, plan.row_ends)
            middle = apply_activation(gate_up.float(), self.activation)
            w2 = fake_quantize_weight(self.w2, expert_format).to(dtype)
            out = grouped_matmul.multiply(fake_quantize_rows(middle, expert_format).to(dtype), w2, plan.row_ends)
            return (plan.to_slots(out) * topk_weights[..., None]).sum(1)


class SparseMoeBlock(nn.Module):
    """Latent mixture of experts: down, routed experts, norm after their sum, up; plus the shared experts."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        latent_size = config.routed_expert_hidden_size
        self.gate = Gate(config)
        self.routed_expert_down_proj = nn.Linear(config.hidden_size, latent_size, bias=False)
        self.experts = RoutedExperts(config)
        self.routed_expert_norm = nn.RMSNorm(latent_size, eps=config.rms_norm_eps)
        self.routed_expert_up_proj = nn.Linear(latent_size, config.hidden_size, bias=False)
        self.shared_experts = GatedMLP(config.hidden_size, config.shared_expert_intermediate_size, config.activation)

    def forward(
        self, hidden_states: Tensor, expert_format: ExpertFormat, grouped_matmul: GroupedMatmul
    ) -> tuple[Tensor, Tensor]:
        """hidden_states [T, hidden] to the block's output [T, hidden] and topk_ids [T, K]."""
        topk_weights, topk_ids = self.gate(hidden_states)
        latent = self.routed_expert_down_proj(hidden_states)
        routed = self.experts(latent, topk_weights, topk_ids, expert_format, grouped_matmul)
        routed = self.routed_expert_up_proj(self.routed_expert_norm(routed))
        return routed + self.shared_experts(hidden_states), topk_ids


class DecoderLayer(nn.Module):
    """Attention and the MoE block, each behind its norm, each added to the float32 residual."""

    def __init__(self, config: NanoConfig, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.block_sparse_moe = SparseMoeBlock(config)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        hidden_states: Tensor,
        cos: Tensor,
        sin: Tensor,
        expert_format: ExpertFormat,
        grouped_matmul: GroupedMatmul,
    ) -> tuple[Tensor, Tensor]:
        """[B, S, hidden] to [B, S, hidden] and topk_ids [B * S, K]."""
        attended = self.self_attn(self.input_layernorm(hidden_states), cos, sin)
        hidden_states = hidden_states + self.dropout(attended)
        tokens = self.post_attention_layernorm(hidden_states).flatten(0, 1)
        mixed, topk_ids = self.block_sparse_moe(tokens, expert_format, grouped_matmul)
        return hidden_states + self.dropout(mixed.view_as(hidden_states)), topk_ids


class Nano(nn.Module):
    """The whole model.

    dropout: on every residual branch.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: NanoConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, dropout) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        half = config.head_dim // 2
        frequency = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(config.max_position_embeddings, dtype=torch.float64)[:, None] * frequency
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)
        self._initialize()

    @torch.no_grad()
    def _initialize(self) -> None:
        for name, parameter in self.named_parameters():
            if name == "embed_tokens.weight":
                parameter.normal_(std=0.02)
            elif parameter.dim() >= 2:
                # Residual branches begin at zero: the first gates then see the tokens themselves, which differ, and
                # not what attention averages over a window, which does not and would send all tokens to one expert.
                is_residual = name.endswith(("o_proj.weight", "expert_up_proj.weight", "experts.down_proj.weight"))
                parameter.normal_(std=0.0 if is_residual else parameter.shape[-1] ** -0.5)

    @property
    def moe_blocks(self) -> list[SparseMoeBlock]:
        """The MoE block of each layer."""
        return [cast(DecoderLayer, layer).block_sparse_moe for layer in self.layers]

    def forward(
        self, tokens: Tensor, expert_format: ExpertFormat, grouped_matmul: GroupedMatmul
    ) -> tuple[Tensor, Tensor]:
        """tokens [B, S] to float32 logits [B, S, vocab] and topk_ids [layers, B * S, K]."""
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        hidden_states = self.embed_tokens(tokens)
        topk_ids = []
        for layer in self.layers:
            hidden_states, layer_topk_ids = layer(hidden_states, cos, sin, expert_format, grouped_matmul)
            topk_ids.append(layer_topk_ids)
        with torch.autocast(tokens.device.type, enabled=False):
            logits = functional.linear(self.norm(hidden_states), self.embed_tokens.weight)
        return logits, torch.stack(topk_ids)

    @torch.no_grad()
    def balance(self, expert_counts: Tensor, rate: float) -> None:
        """Move every correction bias one step towards an even load (loss-free balancing).

        expert_counts: [layers, E]. Slots of each expert in the last step.
        """
        load = expert_counts.float()
        steps = rate * torch.sign(load.mean(1, keepdim=True) - load)
        for block, step in zip(self.moe_blocks, steps, strict=True):
            block.gate.e_score_correction_bias += step - step.mean()  # only differences rank: keep the mean in place
