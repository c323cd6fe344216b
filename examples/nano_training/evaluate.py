"""Bits per byte of held-out windows, and how the experts share them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nano_training.clock import log
from nano_training.data import Window
from nano_training.dispatch import count_slots
from nano_training.fake_quantize import EXPERT_FORMATS, ExpertFormat
from nano_training.grouped_matmul import LOOP, GroupedMatmul
from nano_training.model import Nano


@dataclass(frozen=True)
class Evaluation:
    """bits_per_byte over num_bytes; expert_counts: [layers, E], slots of the scored positions."""

    bits_per_byte: float
    num_bytes: int
    expert_counts: Tensor


@torch.no_grad()
def evaluate(
    model: Nano, windows: Sequence[Window], expert_format: ExpertFormat, grouped_matmul: GroupedMatmul
) -> Evaluation:
    """Bits per byte over windows. The loop form of the grouped GEMM runs everything in float32."""
    device = model.embed_tokens.weight.device
    is_cuda = device.type == "cuda"
    model.eval()
    nats = torch.zeros((), dtype=torch.float64, device=device)
    num_bytes = 0
    counts = torch.zeros(len(model.layers), model.config.num_experts, dtype=torch.int64, device=device)
    batch = max(1, (65_536 if is_cuda else 4_096) // len(windows[0].tokens))
    for first in range(0, len(windows), batch):
        tokens = torch.stack([window.tokens for window in windows[first : first + batch]]).to(device)
        is_scored = torch.stack([window.is_scored for window in windows[first : first + batch]]).to(device).flatten()
        with torch.autocast(device.type, torch.bfloat16, enabled=is_cuda and grouped_matmul is not LOOP):
            logits, topk_ids = model(tokens[:, :-1], expert_format, grouped_matmul)
        losses = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        nats += (losses.double() * is_scored).sum()
        num_bytes += int(is_scored.sum())
        counts += count_slots(topk_ids, model.config.num_experts, is_scored)
    model.train()
    return Evaluation(nats.item() / math.log(2) / num_bytes, num_bytes, counts.cpu())


def measure(model: Nano, held_out: Mapping[str, Sequence[Window]]) -> dict[str, Any]:
    """Evaluate every part in every expert format in float32; what ``training.json`` says of it."""
    bits_per_byte: dict[str, dict[str, float]] = {}
    num_bytes: dict[str, int] = {}
    expert_counts = torch.zeros(len(model.layers), model.config.num_experts, dtype=torch.int64)
    for part, windows in held_out.items():
        bits_per_byte[part] = {}
        for expert_format in EXPERT_FORMATS:
            result = evaluate(model, windows, expert_format, LOOP)
            bits_per_byte[part][expert_format] = round(result.bits_per_byte, 5)
            num_bytes[part] = result.num_bytes
            log(f"held out {part}: {result.bits_per_byte:.4f} bits/byte, {expert_format}, {result.num_bytes:,} bytes")
        expert_counts += result.expert_counts  # of the last format, the one that is served
    for layer, counts in enumerate(expert_counts):
        load = counts / counts.float().mean()
        log(f"layer {layer}: load of an expert, mean 1: min {load.min():.3f}, max {load.max():.3f}")
    dead = int((expert_counts == 0).sum())
    log(f"experts without a token: {dead} of {expert_counts.numel()}")
    return {
        "held_out_bits_per_byte": bits_per_byte,
        "held_out_bytes": num_bytes,
        "expert_counts": expert_counts.tolist(),
        "experts_without_a_token": dead,
    }
