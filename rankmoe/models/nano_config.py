"""Sizes of ``nano``, the embedded byte-level language model, and which source files it may be measured on."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankmoe.types import GROUP_SIZE, RouterConfig, SiTU

#: Directories whose files are not sources that people write, or not of the standard library.
_EXCLUDED_DIRECTORIES = frozenset({"__pycache__", "site-packages", "dist-packages", "encodings", "pydoc_data"})
#: Directories (at any depth) that hold tests.
_TEST_DIRECTORIES = frozenset({"test", "tests", "idle_test"})
#: A file is held out where the first byte of its path's sha256 is below this: 10 of 256, 3.9 %.
_HELD_OUT_FIRST_BYTES = 10


@dataclass(frozen=True)
class NanoConfig:
    """Sizes and constants of ``nano``; written into ``config.json`` as they are.

    A layer is ``x = x + attention(input_layernorm(x))`` and then ``x = x + moe(post_attention_layernorm(x))``; ``x`` is
    float32. After the last layer come ``model.norm`` and float32 logits by the embedding matrix (tied) or ``lm_head``.

    Norms: ``x * rsqrt(mean(x^2) + rms_norm_eps) * weight`` in float32.
    Attention: causal, scale ``head_dim ** -0.5``; query head ``h`` reads key/value head
    ``h // (num_attention_heads // num_key_value_heads)``; no biases. RoPE in the rotate-half (NeoX) convention on all
    of ``head_dim``: with ``half = head_dim // 2``, ``angle[p, i] = p * rope_theta ** (-i / half)`` for ``i < half`` and
    positions ``p`` from 0, elements ``i`` and ``i + half`` become ``a cos - b sin`` and ``b cos + a sin``.
    MoE: ``routed_expert_up_proj(routed_expert_norm(sum over experts)) + shared_experts(x)``; the experts read
    ``routed_expert_down_proj(x)``. Router logits are float32; see ``router``. Shared experts are one SiTU MLP.
    Text: bytes are the vocabulary. ``document_separator`` stands before every document, so that a prompt that begins a
    file begins with it; it never occurs inside one.

    vocab_size: 256 bytes.
    hidden_size, num_hidden_layers: width and depth.
    num_attention_heads, num_key_value_heads, head_dim: grouped-query attention.
    max_position_embeddings: the context length of training; the longest sequence that the model was measured on.
    num_experts, num_experts_per_token: E and K.
    routed_expert_hidden_size: H, the latent width that the routed experts work in.
    moe_intermediate_size: I of a routed expert.
    shared_expert_intermediate_size: intermediate size of the shared experts' MLP.
    routed_scaling_factor: multiplied into the renormalised weights.
    situ_beta, situ_linear_beta: the activation's constants, routed and shared experts alike.

    Raises ValueError for sizes that do not fit together.
    """

    vocab_size: int = 256
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10000.0
    max_position_embeddings: int = 1024
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    num_experts: int = 64
    num_experts_per_token: int = 4
    routed_expert_hidden_size: int = 128
    moe_intermediate_size: int = 96
    shared_expert_intermediate_size: int = 64
    routed_scaling_factor: float = 1.0
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    document_separator: int = 0

    def __post_init__(self) -> None:
        for name in ("routed_expert_hidden_size", "moe_intermediate_size"):
            size = getattr(self, name)
            if size < GROUP_SIZE or size % GROUP_SIZE:
                raise ValueError(f"{name}: expected a multiple of {GROUP_SIZE}, got {size}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads: expected a divisor of num_attention_heads={self.num_attention_heads}, "
                f"got {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number, got {self.head_dim}")
        self.router.validate(self.num_experts)

    @property
    def router(self) -> RouterConfig:
        """How the gate's logits and the correction bias become experts and weights."""
        return RouterConfig(top_k=self.num_experts_per_token, routed_scaling_factor=self.routed_scaling_factor)

    @property
    def activation(self) -> SiTU:
        """The activation of routed and shared experts."""
        return SiTU(self.situ_beta, self.situ_linear_beta)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``config.json``."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> NanoConfig:
        """Read a ``config.json``; keys that are not sizes of ``nano`` are left alone, absent ones keep the default."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})


def list_source_files(directory: str | Path) -> list[str]:
    """Relative POSIX paths of the Python sources under a standard library, sorted; the same on every machine.

    Left out: installed packages, generated tables (``encodings``, ``pydoc_data``) and the build's ``_sysconfigdata``.
    Raises ValueError where the directory holds no such file.
    """
    root = Path(directory)
    paths = sorted(
        relative.as_posix()
        for relative in (path.relative_to(root) for path in root.rglob("*.py") if path.is_file())
        if _EXCLUDED_DIRECTORIES.isdisjoint(relative.parts) and not relative.name.startswith("_sysconfigdata")
    )
    if not paths:
        raise ValueError(f"directory: expected Python sources under it, got none under {directory}")
    return paths


def is_test_file(relative_path: str) -> bool:
    """Whether a source file lies in a directory of tests."""
    return not _TEST_DIRECTORIES.isdisjoint(relative_path.split("/")[:-1])


def is_held_out(relative_path: str) -> bool:
    """Whether a source file is kept out of training: a stable hash of its relative POSIX path says so (3.9 %)."""
    return hashlib.sha256(relative_path.encode()).digest()[0] < _HELD_OUT_FIRST_BYTES
