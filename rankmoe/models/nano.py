"""``nano``: the embedded byte-level language model, built from Kimi-K3's MoE block; sizes in ``nano_config``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from rankmoe.checkpoint import Checkpoint, ProgressCallback
from rankmoe.distributed import ExpertParallelGroup
from rankmoe.handoff import Handoff
from rankmoe.models.kimi_k3 import KimiK3MoE, KimiK3MoEConfig
from rankmoe.models.nano_config import NanoConfig
from rankmoe.types import ExpertPlacement

#: The trained checkpoint that the package ships.
CHECKPOINT_DIRECTORY = Path(__file__).parent / "nano_checkpoint"


class KeyValueCache:
    """Keys and values of one layer, for a batch of sequences of equal length."""

    def __init__(self, batch_size: int, config: NanoConfig) -> None:
        shape = (batch_size, config.num_key_value_heads, config.max_position_embeddings, config.head_dim)
        self.keys = torch.empty(shape)
        self.values = torch.empty(shape)
        self.length = 0

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add [B, heads, S, head_dim] keys and values; return all that are held."""
        end = self.length + keys.shape[2]
        if end > self.keys.shape[2]:
            raise ValueError(f"sequence: expected at most {self.keys.shape[2]} positions, got {end}")
        self.keys[:, :, self.length : end] = keys
        self.values[:, :, self.length : end] = values
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.config = config
        query_size = config.num_attention_heads * config.head_dim
        key_value_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_value_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_value_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor, cache: KeyValueCache) -> torch.Tensor:
        """[B, S, hidden] new positions to [B, S, hidden]; the cache holds the earlier ones and takes these."""
        first = cache.length
        positions = torch.arange(first, first + hidden_states.shape[1])
        queries = self._rotate(self._heads(self.q_proj(hidden_states)), positions)
        keys = self._rotate(self._heads(self.k_proj(hidden_states)), positions)
        keys, values = cache.append(keys, self._heads(self.v_proj(hidden_states)))
        is_visible = torch.arange(keys.shape[2]) <= positions[:, None]
        attended = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=is_visible, enable_gqa=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def _rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = self.config.head_dim // 2
        frequencies = self.config.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = positions[:, None] * frequencies
        first, second = heads[..., :half], heads[..., half:]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
        )


class DecoderLayer(nn.Module):
    """Attention and MoE block, each behind a norm and added to the residual."""

    def __init__(self, config: NanoConfig, group: ExpertParallelGroup, handoff: Handoff, rank_local: bool) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.block_sparse_moe = KimiK3MoE(
            moe_config(config), group, handoff, rank_local=rank_local, reduce_dtype=torch.float32
        )

    def forward(self, hidden_states: torch.Tensor, cache: KeyValueCache) -> torch.Tensor:
        """[B, S, hidden] to [B, S, hidden]."""
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), cache)
        tokens = self.post_attention_layernorm(hidden_states).flatten(0, 1)
        return hidden_states + self.block_sparse_moe(tokens).view_as(hidden_states)


class Decoder(nn.Module):
    """Embedding, layers, final norm: the part whose parameters the checkpoint names ``model.``."""

    def __init__(self, config: NanoConfig, group: ExpertParallelGroup, handoff: Handoff, rank_local: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [DecoderLayer(config, group, handoff, rank_local) for _ in range(config.num_hidden_layers)]
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class NanoModel(nn.Module):
    """The language model on one rank: everything but the routed experts is replicated.

    handoff: shared by all layers; its counters say how often the fused front's result was used.
    """

    def __init__(self, config: NanoConfig, group: ExpertParallelGroup, *, rank_local: bool = True) -> None:
        super().__init__()
        self.config = config
        self.group = group
        self.handoff = Handoff()
        self.model = Decoder(config, group, self.handoff, rank_local)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def moe_blocks(self) -> list[KimiK3MoE]:
        """The MoE block of each layer."""
        return [cast(DecoderLayer, layer).block_sparse_moe for layer in self.model.layers]

    def new_caches(self, batch_size: int) -> list[KeyValueCache]:
        """An empty cache for each layer."""
        return [KeyValueCache(batch_size, self.config) for _ in self.model.layers]

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, caches: Sequence[KeyValueCache]) -> torch.Tensor:
        """Logits of the positions after the given ones.

        tokens: [B, S] integer bytes that follow what the caches hold.
        Returns [B, S, vocabulary] float32. Raises ValueError beyond ``max_position_embeddings`` positions.
        """
        hidden_states = self.model.embed_tokens(tokens)
        for layer, cache in zip(self.model.layers, caches, strict=True):
            hidden_states = layer(hidden_states, cache)
        head = self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight
        return functional.linear(self.model.norm(hidden_states), head)


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of ``nano``, as its model card states them."""

    total: int
    routed_experts: int
    active_per_token: int


def count_parameters(config: NanoConfig) -> ParameterCounts:
    """Count all parameters, those of routed experts, and those that one token uses."""
    model = NanoModel(config, ExpertParallelGroup())
    expert = 3 * config.routed_expert_hidden_size * config.moe_intermediate_size
    replicated = sum(parameter.numel() for parameter in model.parameters())
    routed = expert * config.num_experts * config.num_hidden_layers
    active = expert * config.num_experts_per_token * config.num_hidden_layers
    return ParameterCounts(replicated + routed, routed, replicated + active)


def moe_config(config: NanoConfig) -> KimiK3MoEConfig:
    """The MoE block's configuration."""
    return KimiK3MoEConfig(
        hidden_size=config.hidden_size,
        routed_expert_hidden_size=config.routed_expert_hidden_size,
        num_experts=config.num_experts,
        moe_intermediate_size=config.moe_intermediate_size,
        shared_intermediate_size=config.shared_expert_intermediate_size,
        rms_norm_eps=config.rms_norm_eps,
        router=config.router,
        activation=config.activation,
    )


def load_config(directory: Path = CHECKPOINT_DIRECTORY) -> NanoConfig:
    """Sizes of a ``nano`` checkpoint."""
    return NanoConfig.from_dict(Checkpoint.open(directory).config)


def load_nano(
    group: ExpertParallelGroup | None = None,
    directory: Path = CHECKPOINT_DIRECTORY,
    *,
    rank_local: bool = True,
    backend: str = "auto",
    progress: ProgressCallback | None = None,
) -> NanoModel:
    """Load ``nano`` for one rank: all replicated parameters, and this rank's experts only.

    group: this rank's place; None for a single rank.
    rank_local: form of the packed ids; no output depends on it.
    progress: called after each expert tensor.
    Raises CheckpointError naming file and tensor for whatever does not fit.
    """
    group = group or ExpertParallelGroup()
    checkpoint = Checkpoint.open(directory)
    config = NanoConfig.from_dict(checkpoint.config)
    model = NanoModel(config, group, rank_local=rank_local)
    # Computed in float32 on the CPU, from the checkpoint's bfloat16.
    state = {
        name: checkpoint.tensor(name, tuple(parameter.shape)).float() for name, parameter in model.named_parameters()
    }
    model.load_state_dict(state)
    placement = ExpertPlacement(config.num_experts, group.ep_size, group.ep_rank)
    for index, block in enumerate(model.moe_blocks):
        weights = checkpoint.pack_experts(
            f"model.layers.{index}.block_sparse_moe",
            placement,
            config.routed_expert_hidden_size,
            config.moe_intermediate_size,
            config.activation,
            backend=backend,
            progress=progress,
        )
        block.bind_experts(weights)
    return model.eval()


def bits_per_byte(model: NanoModel, text: bytes) -> float:
    """Mean negative log2 probability of each byte of a document, in windows of the trained context length.

    The document separator stands before the text, so its first byte counts too. Windows after the first see half of
    the one before as context, so every byte beyond the first window has at least half a window of context.
    """
    config = model.config
    tokens = torch.tensor([config.document_separator, *text])
    window, total = config.max_position_embeddings, 0.0
    start, scored = 0, 1  # ``scored``: first position whose byte has no loss yet
    while scored < len(tokens):
        chunk = tokens[start : start + window]
        logits = model(chunk[None, :], model.new_caches(1))[0]
        losses = functional.cross_entropy(logits[:-1], chunk[1:], reduction="none")
        total += losses[scored - start - 1 :].double().sum().item()
        scored = start + len(chunk)
        start = max(scored - window // 2, 0)
    return total / math.log(2) / len(text)
