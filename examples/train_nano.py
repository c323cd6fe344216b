"""Train ``nano``, the embedded byte-level mixture-of-experts language model, and write its checkpoint.

    python examples/train_nano.py --out nano                      # the running interpreter's standard library
    python examples/train_nano.py --minutes 8 --device cuda --out nano
    python examples/train_nano.py --minutes 0.3 --batch 4 --seq 128 --out /tmp/nano   # does it run at all?

The experts are trained for the formats that they are served in: from ``--quantize-from`` of the run on, their weights
pass through MXFP4 and the rows that enter both expert GEMMs through MXFP8, by the very functions that serving uses,
with straight-through gradients. The router's load is balanced by the correction bias alone; there is no auxiliary loss.

Nothing on the GPU path waits for the device inside a step: the rows of each expert stand at offsets that only the
device knows, and every shape is static.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from rankmoe.models.nano_config import NanoConfig, is_held_out, is_test_file, list_source_files
from rankmoe.quantize import dequantize, quantize_mxfp4, quantize_mxfp8
from rankmoe.route import route

START = time.monotonic()
#: The whole checkpoint, headers included, has to stay within this.
MAX_CHECKPOINT_BYTES = 8_000_000
#: The grouped GEMM needs every expert's first row aligned to 16 bytes in either layout.
ROW_ALIGNMENT = 8

#: What the routed experts see: master weights, MXFP4 weights, or MXFP4 weights and MXFP8 activations.
ExpertFormat = Literal["unquantized", "mxfp4", "mxfp4_mxfp8"]
EXPERT_FORMATS: tuple[ExpertFormat, ...] = ("unquantized", "mxfp4", "mxfp4_mxfp8")

GroupedMatmul = Callable[[Tensor, Tensor, Tensor], Tensor]


def log(message: str) -> None:
    """Print a line with the seconds since the start, at once."""
    print(f"[{time.monotonic() - START:6.1f} s] {message}", flush=True)


# Straight-through quantisers and permutations ----------------------------------------------------------------------


class FakeQuantizeMxfp4(torch.autograd.Function):
    """Weights [..., N] to the values that their MXFP4 form decodes to; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:
        return dequantize(quantize_mxfp4(weight))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


class FakeQuantizeMxfp8(torch.autograd.Function):
    """Rows [T, N] to the values that their MXFP8 form decodes to; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx, rows: Tensor) -> Tensor:
        return dequantize(quantize_mxfp8(rows)).to(rows.dtype)  # a decoded element has 4 significant bits

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


class DispatchRows(torch.autograd.Function):
    """Token rows [T, H] to expert rows [R, H], zero in padding rows. Both directions gather, so no atomics."""

    @staticmethod
    def forward(ctx, rows: Tensor, row_slots: Tensor, slot_rows: Tensor) -> Tensor:
        ctx.save_for_backward(slot_rows)
        dispatched = rows[row_slots.clamp(min=0) // slot_rows.shape[1]]
        return dispatched.masked_fill_((row_slots < 0)[:, None], 0)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (slot_rows,) = ctx.saved_tensors
        return gradient[slot_rows].sum(1), None, None


class CollectSlots(torch.autograd.Function):
    """Expert rows [R, H] to one row per slot [T, K, H]; the gradient of a padding row is zero."""

    @staticmethod
    def forward(ctx, rows: Tensor, row_slots: Tensor, slot_rows: Tensor) -> Tensor:
        ctx.save_for_backward(row_slots)
        return rows[slot_rows]

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (row_slots,) = ctx.saved_tensors
        rows = gradient.flatten(0, 1)[row_slots.clamp(min=0)]
        return rows.masked_fill_((row_slots < 0)[:, None], 0), None, None


# Grouped GEMM ------------------------------------------------------------------------------------------------------


def grouped_matmul_loop(rows: Tensor, weight: Tensor, row_ends: Tensor) -> Tensor:
    """Multiply each expert's rows by its weight, one GEMM an expert.

    rows: [R, N], by expert. weight: [E, M, N]. row_ends: [E] int32, the row after each expert's last; the last is R.
    Returns [R, M].
    """
    sizes = row_ends.diff(prepend=row_ends.new_zeros(1)).tolist()
    return torch.cat([part @ w.t() for part, w in zip(rows.split(sizes), weight.unbind(), strict=True)])


def grouped_matmul_device(rows: Tensor, weight: Tensor, row_ends: Tensor) -> Tensor:
    """``grouped_matmul_loop`` as one kernel that reads the offsets on the device (bf16)."""
    return torch._grouped_mm(rows, weight.transpose(-2, -1), offs=row_ends)


def select_grouped_matmul(device: torch.device) -> GroupedMatmul:
    """The one-kernel form where this GPU has it and it agrees with the loop, forward and backward."""
    if device.type != "cuda":
        return grouped_matmul_loop
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(512, 128, generator=generator).to(device, torch.bfloat16)
    weight = torch.randn(8, 192, 128, generator=generator).to(device, torch.bfloat16)
    row_ends = torch.tensor([8, 8, 136, 200, 208, 208, 392, 512], dtype=torch.int32, device=device)
    upstream = torch.randn(512, 192, generator=generator).to(device, torch.bfloat16)
    results = []
    try:
        for grouped_matmul in (grouped_matmul_loop, grouped_matmul_device):
            leaves = [rows.clone().requires_grad_(), weight.clone().requires_grad_()]
            out = grouped_matmul(*leaves, row_ends)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, upstream)])
        for name, expected, got in zip(("output", "rows", "weight"), *results, strict=True):
            difference = ((got - expected).float().norm() / expected.float().norm()).item()
            if not difference < 1e-2:
                raise RuntimeError(f"{name}: relative difference {difference:.2e} from the loop")
    except (RuntimeError, AttributeError) as error:
        log(f"grouped GEMM: one per expert ({error})")
        return grouped_matmul_loop
    log("grouped GEMM: torch._grouped_mm")
    return grouped_matmul_device


# Model -------------------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """``x * rsqrt(mean(x^2) + eps) * weight`` in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.rms_norm(hidden_states.float(), self.weight.shape, self.weight, self.eps)


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU in float32: ``beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)``."""
    gate, up = gate.float(), up.float()
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear_beta * torch.tanh(up / linear_beta)


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
        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

        query = rotate(heads(self.q_proj(hidden_states)), cos, sin)
        key = rotate(heads(self.k_proj(hidden_states)), cos, sin)
        value = heads(self.v_proj(hidden_states))
        repeats = self.config.num_attention_heads // self.config.num_key_value_heads
        attended = F.scaled_dot_product_attention(
            query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1), is_causal=True
        )
        return self.o_proj(attended.transpose(1, 2).flatten(-2))


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to [B, heads, S, head_dim]; cos, sin: [S, head_dim / 2] float32."""
    first, second = states.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(states.dtype)


class SharedExperts(nn.Module):
    """The MLP that every token passes."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.config = config
        self.gate_proj = nn.Linear(config.hidden_size, config.shared_expert_intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.shared_expert_intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.shared_expert_intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        config = self.config
        gate, up = self.gate_proj(hidden_states), self.up_proj(hidden_states)
        return self.down_proj(situ(gate, up, config.situ_beta, config.situ_linear_beta))


class Gate(nn.Module):
    """The router: float32 logits, and the correction bias that keeps the load balanced."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """hidden_states [T, hidden] to topk_weights [T, K] float32 (differentiable) and topk_ids [T, K] int64."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            logits = F.linear(hidden_states.float(), self.weight)
        with torch.no_grad():
            topk_ids = route(logits, self.config.router, self.e_score_correction_bias).topk_ids.long()
        selected = logits.sigmoid().gather(-1, topk_ids)
        return selected / selected.sum(-1, keepdim=True) * self.config.routed_scaling_factor, topk_ids


@dataclass(frozen=True)
class Dispatch:
    """Where each slot's row stands, with every expert's first row aligned; static shapes, made on the device.

    slot_rows: [T, K] int64. Row of each slot.
    row_slots: [R] int64. Slot (``t * K + k``) of each row; -1 in padding rows. R: T * K aligned, and E * ROW_ALIGNMENT.
    row_ends: [E] int32. The row after each expert's last; the last expert also takes all the rows that are left over.
    """

    slot_rows: Tensor
    row_slots: Tensor
    row_ends: Tensor


def dispatch(topk_ids: Tensor, num_experts: int) -> Dispatch:
    """Sort the slots by expert. topk_ids: [T, K] int64."""
    flat = topk_ids.flatten()
    sorted_ids, order = flat.sort(stable=True)
    experts = torch.arange(num_experts, device=flat.device)
    ends = torch.searchsorted(sorted_ids, experts, right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    # At least one padding row each: a grouped GEMM over no rows need not write its weight gradient.
    padded_counts = (counts + ROW_ALIGNMENT) // ROW_ALIGNMENT * ROW_ALIGNMENT
    padded_ends = padded_counts.cumsum(0)
    padding_before = (padded_ends - padded_counts) - (ends - counts)
    rows = torch.arange(flat.numel(), device=flat.device) + padding_before[sorted_ids]
    num_rows = (flat.numel() + ROW_ALIGNMENT - 1) // ROW_ALIGNMENT * ROW_ALIGNMENT + num_experts * ROW_ALIGNMENT
    slot_rows = torch.empty_like(flat).scatter_(0, order, rows)
    row_slots = flat.new_full((num_rows,), -1).scatter_(0, rows, order)
    row_ends = padded_ends.int()
    row_ends[-1] = num_rows
    return Dispatch(slot_rows.view_as(topk_ids), row_slots, row_ends)


def count_slots(topk_ids: Tensor, num_experts: int, is_counted: Tensor | None = None) -> Tensor:
    """Slots of each expert in each layer.

    topk_ids: [layers, T, K] int64. is_counted: [T] bool or None; tokens that count.
    Returns [layers, E] int64.
    """
    ones = torch.ones_like(topk_ids)
    if is_counted is not None:
        ones = ones * is_counted[:, None]
    counts = topk_ids.new_zeros(topk_ids.shape[0], num_experts)
    return counts.scatter_add_(1, topk_ids.flatten(1), ones.flatten(1))


class RoutedExperts(nn.Module):
    """All routed experts, in latent space. w13 holds gate rows, then up rows."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.config = config
        experts, hidden, intermediate = (
            config.num_experts,
            config.routed_expert_hidden_size,
            config.moe_intermediate_size,
        )
        self.w13 = nn.Parameter(torch.empty(experts, 2 * intermediate, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, intermediate))

    def forward(
        self,
        rows: Tensor,
        topk_weights: Tensor,
        plan: Dispatch,
        expert_format: ExpertFormat,
        grouped_matmul: GroupedMatmul,
    ) -> Tensor:
        """rows [T, latent] to the weighted sum over each token's experts, [T, latent] float32."""
        config = self.config
        quantize_weight = FakeQuantizeMxfp4.apply if expert_format != "unquantized" else lambda weight: weight
        quantize = FakeQuantizeMxfp8.apply if expert_format == "mxfp4_mxfp8" else lambda rows: rows
        dtype = torch.float32 if grouped_matmul is grouped_matmul_loop else torch.bfloat16
        with torch.autocast(rows.device.type, enabled=False):
            dispatched = DispatchRows.apply(quantize(rows).to(dtype), plan.row_slots, plan.slot_rows)
            gate_up = grouped_matmul(dispatched, quantize_weight(self.w13).to(dtype), plan.row_ends)
            gate, up = gate_up.chunk(2, dim=-1)
            middle = quantize(ACTIVATE(gate, up, config.situ_beta, config.situ_linear_beta)).to(dtype)
            out = grouped_matmul(middle, quantize_weight(self.w2).to(dtype), plan.row_ends)
            slots = CollectSlots.apply(out, plan.row_slots, plan.slot_rows)
            return (slots * topk_weights[..., None]).sum(1)


#: The routed experts' activation; ``--compile`` puts the compiled one here.
ACTIVATE = situ


class SparseMoeBlock(nn.Module):
    """Latent mixture of experts: down, routed experts, norm after their sum, up; plus the shared experts."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.config = config
        latent = config.routed_expert_hidden_size
        self.gate = Gate(config)
        self.routed_expert_down_proj = nn.Linear(config.hidden_size, latent, bias=False)
        self.experts = RoutedExperts(config)
        self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps)
        self.routed_expert_up_proj = nn.Linear(latent, config.hidden_size, bias=False)
        self.shared_experts = SharedExperts(config)

    def forward(self, hidden_states: Tensor, expert_format: ExpertFormat, grouped_matmul: GroupedMatmul):
        """hidden_states [T, hidden] to the block's output [T, hidden] and topk_ids [T, K]."""
        topk_weights, topk_ids = self.gate(hidden_states)
        plan = dispatch(topk_ids, self.config.num_experts)
        latent = self.routed_expert_down_proj(hidden_states)
        routed = self.experts(latent, topk_weights, plan, expert_format, grouped_matmul)
        routed = self.routed_expert_up_proj(self.routed_expert_norm(routed))
        return routed + self.shared_experts(hidden_states), topk_ids


class DecoderLayer(nn.Module):
    """Attention and the MoE block, each behind its norm, each added to the float32 residual."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.block_sparse_moe = SparseMoeBlock(config)


class Nano(nn.Module):
    """The whole model in its training form: all experts here, whole sequences at once."""

    def __init__(self, config: NanoConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.dropout = dropout
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
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

    def forward(
        self, tokens: Tensor, expert_format: ExpertFormat, grouped_matmul: GroupedMatmul
    ) -> tuple[Tensor, Tensor]:
        """tokens [B, S] to float32 logits [B, S, vocab] and topk_ids [layers, B * S, K]."""
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        hidden_states = self.embed_tokens(tokens)
        topk_ids = []
        for layer in self.layers:
            attended = layer.self_attn(layer.input_layernorm(hidden_states), cos, sin)
            hidden_states = hidden_states + F.dropout(attended, self.dropout, self.training)
            rows = layer.post_attention_layernorm(hidden_states).flatten(0, 1)
            routed, layer_topk_ids = layer.block_sparse_moe(rows, expert_format, grouped_matmul)
            hidden_states = hidden_states + F.dropout(routed.view_as(hidden_states), self.dropout, self.training)
            topk_ids.append(layer_topk_ids)
        with torch.autocast(tokens.device.type, enabled=False):
            logits = F.linear(self.norm(hidden_states), self.embed_tokens.weight)
        return logits, torch.stack(topk_ids)

    @torch.no_grad()
    def balance(self, expert_counts: Tensor, rate: float) -> None:
        """Move every correction bias one step towards an even load (loss-free balancing).

        expert_counts: [layers, E]. Slots of each expert in the last step.
        """
        load = expert_counts.float()
        steps = rate * torch.sign(load.mean(1, keepdim=True) - load)
        for layer, step in zip(self.layers, steps, strict=True):
            bias = layer.block_sparse_moe.gate.e_score_correction_bias
            bias += step - step.mean()  # only differences rank, so keep the mean where it is


# Optimiser ---------------------------------------------------------------------------------------------------------


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal per matrix (Newton-Schulz), scaled to the size of an AdamW update.

    See K. Jordan's Muon and, for the 0.2 * sqrt(max(rows, columns)) scale, "Muon is Scalable for LLM Training".
    A parameter [E, 2 I, H] of stacked matrices sets ``muon_shape`` to the shape of the single ones.
    """

    def __init__(self, parameters, lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            same_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(state["momentum"], group["momentum"])
                shape = getattr(parameter, "muon_shape", parameter.shape[-2:])
                same_shape.setdefault(tuple(shape), []).append((parameter, update.reshape(-1, *shape)))
            for (rows, columns), members in same_shape.items():
                updates = orthogonalize(torch.cat([update for _, update in members]))
                scale = 0.2 * max(rows, columns) ** 0.5
                parts = updates.split([update.shape[0] for _, update in members])
                for (parameter, _), update in zip(members, parts, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update.reshape(parameter.shape).to(parameter.dtype), alpha=-group["lr"] * scale)


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of [N, rows, columns] towards 1 by a quintic Newton-Schulz iteration in bf16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    is_tall = x.shape[1] > x.shape[2]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


def make_optimizers(model: Nano, lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the embedding and the norms."""
    matrices, others, undecayed = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            undecayed.append(parameter)
        elif name == "embed_tokens.weight":
            others.append(parameter)
        else:
            if name.endswith("w13"):
                parameter.muon_shape = (model.config.moe_intermediate_size, model.config.routed_expert_hidden_size)
            matrices.append(parameter)
    is_cuda = model.embed_tokens.weight.is_cuda
    groups = [{"params": others, "weight_decay": weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=is_cuda)
    return [Muon(matrices, lr=lr, weight_decay=weight_decay), adam]


# Data --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Documents:
    """Files as one string of bytes, a separator before each and one at the end.

    tokens: [N] uint8.  starts: [files] int64, the position of each file's separator.
    """

    tokens: Tensor
    starts: Tensor

    @classmethod
    def read(cls, directory: Path, paths: list[str], separator: int) -> Documents:
        """Read files; one that holds the separator byte is left out."""
        parts = [content for path in paths if separator not in (content := (directory / path).read_bytes())]
        joined = bytes([separator]) + b"".join(content + bytes([separator]) for content in parts)
        starts = torch.tensor([0, *(len(content) + 1 for content in parts)]).cumsum(0)[:-1]
        return cls(torch.frombuffer(bytearray(joined), dtype=torch.uint8), starts)

    def to(self, device: torch.device) -> Documents:
        """The same on a device."""
        return Documents(self.tokens.to(device), self.starts.to(device))

    def sample(self, batch: int, length: int, generator: torch.Generator) -> Tensor:
        """Random windows [batch, length] int64; every 16th begins at the beginning of a file."""
        device = self.tokens.device
        start = torch.randint(self.tokens.numel(), (batch,), generator=generator, device=device)
        at_file = self.starts[torch.randint(self.starts.numel(), (batch,), generator=generator, device=device)]
        begins_file = torch.rand(batch, generator=generator, device=device) < 1 / 16
        start = torch.where(begins_file, at_file, start).clamp(max=max(self.tokens.numel() - length, 0))
        return self.tokens[start[:, None] + torch.arange(length, device=device)].long()


def held_out_windows(
    directory: Path, paths: list[str], separator: int, length: int, max_bytes: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows that score every byte of the held-out files once.

    A file is a separator and its bytes. Windows advance by half their length and score their second half, the first
    one all of it, so that a byte has at least half a window of context where the file offers it. Files come in the
    order of their paths' hashes until ``max_bytes`` are reached.
    Yields tokens [length] int64 and scored [length - 1] bool, for the predictions of tokens[1:].
    """
    remaining = max_bytes
    for path in sorted(paths, key=lambda path: hashlib.sha256(path.encode()).digest()):
        content = (directory / path).read_bytes()[:remaining]
        remaining -= len(content)
        tokens = torch.tensor([separator, *content])
        scored_until = 0  # predictions of tokens[1 : scored_until + 1] are counted already
        for start in range(0, max(len(content), 1), (length - 1) // 2):
            window = tokens[start : start + length]
            scored = torch.zeros(length - 1, dtype=torch.bool)
            scored[scored_until - start : len(window) - 1] = True
            scored_until = start + len(window) - 1
            yield F.pad(window, (0, length - len(window))), scored
            if scored_until >= len(content):
                break
        if remaining <= 0:
            return


@dataclass(frozen=True)
class Evaluation:
    """bits_per_byte over num_bytes; expert_counts: [layers, E], slots of the scored positions."""

    bits_per_byte: float
    num_bytes: int
    expert_counts: Tensor


@torch.no_grad()
def evaluate(
    model: Nano,
    windows: list[tuple[Tensor, Tensor]],
    expert_format: ExpertFormat,
    grouped_matmul: GroupedMatmul,
    tokens_per_batch: int,
) -> Evaluation:
    """Bits per byte over windows. The loop form of the grouped GEMM runs everything in float32."""
    device = model.embed_tokens.weight.device
    is_exact = grouped_matmul is grouped_matmul_loop
    model.eval()
    nats = torch.zeros((), dtype=torch.float64, device=device)
    num_bytes = 0
    counts = torch.zeros(len(model.layers), model.config.num_experts, dtype=torch.int64, device=device)
    batch = max(1, tokens_per_batch // len(windows[0][0]))
    for first in range(0, len(windows), batch):
        tokens = torch.stack([window for window, _ in windows[first : first + batch]]).to(device)
        scored = torch.stack([scored for _, scored in windows[first : first + batch]]).to(device).flatten()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda" and not is_exact):
            logits, topk_ids = model(tokens[:, :-1], expert_format, grouped_matmul)
        losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        nats += (losses.double() * scored).sum()
        num_bytes += int(scored.sum())
        counts += count_slots(topk_ids, model.config.num_experts, scored)
    model.train()
    return Evaluation(nats.item() / math.log(2) / num_bytes, num_bytes, counts.cpu())


# Checkpoint --------------------------------------------------------------------------------------------------------


def checkpoint_tensors(model: Nano) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by its name: experts in MXFP4, the correction bias float32, the rest bf16."""
    tensors = {}
    for name, value in model.state_dict().items():
        value = value.detach().float()
        if name.endswith("experts.w13") or name.endswith("experts.w2"):
            prefix, _, _ = name.rpartition(".")
            names = ("w1", "w3") if name.endswith("w13") else ("w2",)
            quantized = quantize_mxfp4(value)
            for expert, (data, scale) in enumerate(zip(quantized.data.cpu(), quantized.scale.cpu(), strict=True)):
                parts = zip(names, data.chunk(len(names)), scale.chunk(len(names)), strict=True)
                for part_name, data_part, scale_part in parts:
                    tensors[f"model.{prefix}.{expert}.{part_name}.weight_packed"] = data_part.clone()
                    tensors[f"model.{prefix}.{expert}.{part_name}.weight_scale"] = scale_part.clone()
        elif name.endswith("e_score_correction_bias"):
            tensors[f"model.{name}"] = value.cpu()
        else:
            tensors[f"model.{name}"] = value.bfloat16().cpu()
    return tensors


def quantization_config() -> dict:
    """compressed-tensors' description of MXFP4 weights and MXFP8 activations in the routed experts' linear layers."""
    scheme = {"type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "scale_dtype": "torch.uint8"}
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "format": "mxfp4-pack-quantized",
                "targets": ["re:.*block_sparse_moe\\.experts\\.\\d+\\.w[123]$"],
                "weights": {"num_bits": 4, "dynamic": False, **scheme},
                "input_activations": {"num_bits": 8, "dynamic": True, **scheme},
                "output_activations": None,
            }
        },
        "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*gate$", "re:.*routed_expert_.*_proj$", "lm_head"],
    }


def write_checkpoint(model: Nano, out: Path, training: dict) -> int:
    """Write model.safetensors, config.json and training.json, each beside its name and then renamed.

    Returns the bytes of model.safetensors. Raises ValueError where they are more than the package may carry.
    """
    out.mkdir(parents=True, exist_ok=True)
    weights = out / "model.safetensors.partial"
    save_file(checkpoint_tensors(model), weights, metadata={"format": "pt"})
    size = weights.stat().st_size
    if size > MAX_CHECKPOINT_BYTES:
        raise ValueError(f"model.safetensors: expected at most {MAX_CHECKPOINT_BYTES} bytes, got {size}")
    weights.chmod(0o644)
    weights.replace(out / "model.safetensors")
    config = {
        "architectures": ["NanoForCausalLM"],
        "model_type": "rankmoe-nano",
        "dtype": "bfloat16",
        **model.config.to_dict(),
        "quantization_config": quantization_config(),
    }
    for name, values in (("config.json", config), ("training.json", training)):
        partial = out / f"{name}.partial"
        partial.write_text(json.dumps(values, indent=1) + "\n")
        partial.replace(out / name)
    return size


@torch.no_grad()
def round_as_checkpoint(model: Nano) -> None:
    """Round every tensor that the checkpoint holds in bf16; the routed experts keep their master values."""
    for name, parameter in model.named_parameters():
        if not name.endswith(("experts.w13", "experts.w2")):
            parameter.copy_(parameter.bfloat16())


# Training ----------------------------------------------------------------------------------------------------------


def learning_rate_factor(progress: float, step: int, warmup_steps: int, decay_from: float) -> float:
    """Warm-up by steps, then flat, then linear decay to zero by the fraction of the time that is spent."""
    decay = min(1.0, (1.0 - progress) / (1.0 - decay_from))
    return max(decay, 0.0) * min(1.0, (step + 1) / warmup_steps)


def bias_rate_factor(progress: float) -> float:
    """Large steps of the correction bias while the experts are new, none at the end, when the biases have to hold."""
    return 1.0 + 9.0 * max(0.0, 1.0 - progress / 0.1) if progress < 0.3 else (1.0 - progress) / 0.7


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="directory of sources")
    parser.add_argument("--data-python", help="Python version of --data (default: the running one)")
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, help="training time, start-up included (8 on cuda, 60 on cpu)")
    parser.add_argument("--batch", type=int, help="sequences a step (64 on cuda, 16 on cpu)")
    parser.add_argument("--seq", type=int, help="bytes a sequence, also the model's context (1024 on cuda, 512 on cpu)")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, help="on every residual branch (0.1 on cuda, 0 on cpu)")
    parser.add_argument("--decay-from", type=float, default=0.3, help="where of the run (0 to 1) the decay begins")
    parser.add_argument("--quantize-from", type=float, default=0.3, help="where MXFP4 x MXFP8 begins")
    parser.add_argument("--bias-update-rate", type=float, default=1e-3, help="step of the correction bias")
    parser.add_argument("--library-share", type=float, default=0.4, help="share of windows outside of test directories")
    parser.add_argument("--eval-bytes", type=int, help="held-out bytes at the end (1,000,000 on cuda, 60,000 on cpu)")
    parser.add_argument("--save-every", type=float, default=120.0, help="seconds between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="compile the routed experts' activation")
    arguments = parser.parse_args()
    is_cuda = torch.device(arguments.device).type == "cuda"
    for name, on_cuda, on_cpu in (
        ("minutes", 8.0, 60.0),
        ("batch", 64, 16),
        ("seq", 1024, 512),
        ("dropout", 0.1, 0.0),
        ("eval_bytes", 1_000_000, 60_000),
        ("data_python", platform.python_version(), platform.python_version()),
    ):
        if getattr(arguments, name) is None:
            setattr(arguments, name, on_cuda if is_cuda else on_cpu)
    return arguments


def device_name(device: torch.device) -> str:
    """The accelerator's name, or the processor's architecture."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


def main() -> None:
    """Train, evaluate, write."""
    global ACTIVATE
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    is_cuda = device.type == "cuda"
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    config = NanoConfig(max_position_embeddings=arguments.seq)
    separator = config.document_separator

    paths = list_source_files(arguments.data)
    splits: dict[str, list[str]] = {"library": [], "tests": [], "held_out_library": [], "held_out_tests": []}
    for path in paths:
        splits[("held_out_" if is_held_out(path) else "") + ("tests" if is_test_file(path) else "library")].append(path)
    train = {
        name: Documents.read(arguments.data, splits[name], separator).to(device)
        for name in ("library", "tests")
        if splits[name]
    }
    train = {name: documents for name, documents in train.items() if documents.tokens.numel() > arguments.seq + 1}
    windows = {
        name: list(
            held_out_windows(arguments.data, splits[f"held_out_{name}"], separator, arguments.seq + 1, num_bytes)
        )
        for name, num_bytes in (("library", arguments.eval_bytes // 2), ("tests", arguments.eval_bytes // 2))
        if splits[f"held_out_{name}"]
    }
    if not train or not windows:
        raise SystemExit(f"--data: expected sources for training and held-out ones, got {len(paths)} files")
    for name, documents in train.items():
        log(f"{name}: {len(splits[name])} files, {documents.tokens.numel():,} bytes")
    log(f"held out: {len(splits['held_out_library'])} library files, {len(splits['held_out_tests'])} test files")
    library_share = {"library": arguments.library_share, "tests": 1 - arguments.library_share}
    in_use = sum(library_share[name] for name in train)
    shares = {name: round(arguments.batch * library_share[name] / in_use) for name in train}

    model = Nano(config, arguments.dropout).to(device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    log(f"{num_parameters:,} parameters on {device_name(device)}, torch {torch.__version__}")
    optimizers = make_optimizers(model, arguments.lr, arguments.weight_decay)
    grouped_matmul = select_grouped_matmul(device)
    if arguments.compile:
        ACTIVATE = torch.compile(situ)
    sampler = torch.Generator(device).manual_seed(arguments.seed)

    data = {
        "python": arguments.data_python,
        "train_bytes": {name: documents.tokens.numel() for name, documents in train.items()},
        "held_out_files": {name: len(splits[f"held_out_{name}"]) for name in windows},
    }
    training = {
        "device": device_name(device),
        "torch": torch.__version__,
        "data": data,
        "parameters": num_parameters,
        "arguments": {
            name: value for name, value in vars(arguments).items() if name not in ("data", "data_python", "out")
        },
        "curve": [],
    }
    monitor = next(iter(windows.values()))[: max(1, 262_144 // arguments.seq if is_cuda else 4)]
    tokens_per_batch = 65_536 if is_cuda else 4_096
    end = arguments.minutes * 60
    begin = time.monotonic() - START
    report_every = min(20.0, (end - begin) / 8)
    evaluate_every = min(60.0, (end - begin) / 3)
    last_report, last_evaluation, last_save = begin, begin, begin
    step, num_tokens, reported_step = 0, 0, 0
    loss_sum = torch.zeros((), device=device)
    recent_counts = torch.zeros(config.num_hidden_layers, config.num_experts, device=device)
    log(f"training for {end - begin:.0f} s, {arguments.batch} x {arguments.seq} bytes a step")
    while True:
        elapsed = time.monotonic() - START
        progress = (elapsed - begin) / max(end - begin, 1e-9)
        if progress >= 1.0:
            break
        expert_format: ExpertFormat = "mxfp4_mxfp8" if progress >= arguments.quantize_from else "unquantized"
        factor = learning_rate_factor(progress, step, 100 if is_cuda else 10, arguments.decay_from)
        tokens = torch.cat(
            [documents.sample(shares[name], arguments.seq + 1, sampler) for name, documents in train.items()]
        )
        with torch.autocast(device.type, torch.bfloat16, enabled=is_cuda):
            logits, topk_ids = model(tokens[:, :-1], expert_format, grouped_matmul)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = arguments.lr * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        expert_counts = count_slots(topk_ids, config.num_experts)
        model.balance(expert_counts, arguments.bias_update_rate * bias_rate_factor(progress))
        with torch.no_grad():
            loss_sum += loss
            recent_counts.lerp_(expert_counts.float(), 0.05)
        step += 1
        num_tokens += tokens.shape[0] * arguments.seq
        if is_cuda and step % 8 == 0:
            torch.cuda.synchronize()  # so that the clock that drives the schedule is the device's
        now = time.monotonic() - START
        if now - last_report >= report_every:
            bits = (loss_sum / (step - reported_step)).item() / math.log(2)
            if not math.isfinite(bits):
                raise SystemExit(f"loss: expected a finite value, got {bits} at step {step}")
            rate = (step - reported_step) / (now - last_report)
            load = recent_counts / recent_counts.mean(1, keepdim=True)
            log(
                f"step {step:6d}  train {bits:.4f} bits/byte  lr {arguments.lr * factor:.2e}  {rate:.2f} steps/s  "
                f"{rate * tokens.shape[0] * arguments.seq / 1e3:.0f} kB/s  {expert_format}  "
                f"load min {load.min():.2f} max {load.max():.2f}"
            )
            training["curve"].append({"step": step, "seconds": round(now), "train_bits_per_byte": round(bits, 4)})
            loss_sum.zero_()
            last_report, reported_step = now, step
        if now - last_evaluation >= evaluate_every:
            held_out = evaluate(model, monitor, expert_format, grouped_matmul, tokens_per_batch).bits_per_byte
            log(f"step {step:6d}  held out {held_out:.4f} bits/byte ({expert_format}, first {len(monitor)} windows)")
            training["curve"].append(
                {"step": step, "seconds": round(now), "held_out_bits_per_byte": round(held_out, 4)}
            )
            last_evaluation = time.monotonic() - START
        if now - last_save >= arguments.save_every:
            size = write_checkpoint(model, arguments.out, {**training, "steps": step, "is_final": False})
            log(f"checkpoint: {size:,} bytes")
            last_save = time.monotonic() - START

    if is_cuda:
        torch.cuda.synchronize()
    seconds = time.monotonic() - START
    log(f"trained {step} steps, {num_tokens:,} bytes ({num_tokens / sum(data['train_bytes'].values()):.2f} epochs)")
    training |= {"steps": step, "tokens": num_tokens, "seconds": round(seconds, 1), "is_final": False}
    write_checkpoint(model, arguments.out, training)

    # Measured on what the checkpoint holds, everything in float32: the numbers that serving has to reproduce.
    torch.set_float32_matmul_precision("highest")
    ACTIVATE = situ
    round_as_checkpoint(model)
    measured: dict[str, dict[str, float]] = {}
    num_bytes, expert_counts = {}, torch.zeros(config.num_hidden_layers, config.num_experts, dtype=torch.int64)
    for name, part in windows.items():
        measured[name] = {}
        for expert_format in EXPERT_FORMATS:
            result = evaluate(model, part, expert_format, grouped_matmul_loop, tokens_per_batch)
            measured[name][expert_format] = round(result.bits_per_byte, 5)
            num_bytes[name] = result.num_bytes
            log(f"held out {name}: {result.bits_per_byte:.4f} bits/byte, {expert_format}, {result.num_bytes:,} bytes")
        expert_counts += result.expert_counts  # of the last format, the one that is served
    dead = int((expert_counts == 0).sum())
    for layer, counts in enumerate(expert_counts):
        load = counts / counts.float().mean()
        log(f"layer {layer}: load of an expert, mean 1: min {load.min():.3f}, max {load.max():.3f}")
    log(f"experts without a token: {dead} of {expert_counts.numel()}")
    training |= {
        "is_final": True,
        "held_out_bits_per_byte": measured,
        "held_out_bytes": num_bytes,
        "expert_counts": expert_counts.tolist(),
        "experts_without_a_token": dead,
        "wall_seconds": round(time.monotonic() - START, 1),
    }
    size = write_checkpoint(model, arguments.out, training)
    total = sum(path.stat().st_size for path in arguments.out.iterdir())
    log(f"wrote {arguments.out}: model.safetensors {size:,} bytes, all files {total:,} bytes")


if __name__ == "__main__":
    main()
