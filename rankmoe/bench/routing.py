"""`rankmoe bench routing`: the slots that experts get, of real text through ``nano`` or of skewed random logits."""

from __future__ import annotations

from pathlib import Path

import torch

from rankmoe.bench.layer_cuda import skewed_bias
from rankmoe.bench.record import Record, device_name
from rankmoe.models.nano import NanoModel, load_nano
from rankmoe.models.presets import ModelPreset, get_preset
from rankmoe.route import route
from rankmoe.runner import RoutedMoeRunner
from rankmoe.types import Routing


def record_text(file: Path, ep_size: int) -> Record:
    """The load of each layer of ``nano`` over a file, read in windows of the trained context length.

    ep_size: the group that a reader of the record is to divide the experts among; the routing does not depend on it.
    """
    text = file.read_bytes()
    if not text:
        raise ValueError(f"text: expected a file with text, got {file} of 0 bytes")
    rows = [
        {"layer": layer, "counts": counts.tolist()} for layer, counts in enumerate(count_text_slots(load_nano(), text))
    ]
    source = f"text of {file.name}, {len(text):,} bytes"
    notes = {"ep_size": ep_size, "source": source, "tokens": len(text)}
    return Record("routing", "nano", device_name("cpu"), rows, notes=notes)


def record_skewed(preset: ModelPreset, ep_size: int, num_tokens: int, seed: int = 0) -> Record:
    """The load of one layer under random logits where an expert's popularity falls as one over its rank."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, preset.num_experts, generator=generator) + skewed_bias(preset.num_experts, seed)
    counts = route(logits, preset.router).topk_ids.flatten().bincount(minlength=preset.num_experts)
    source = f"skewed random logits, {num_tokens:,} tokens"
    notes = {"ep_size": ep_size, "source": source, "tokens": num_tokens, "seed": seed}
    return Record("routing", preset.name, device_name("cpu"), [{"layer": 0, "counts": counts.tolist()}], notes=notes)


def count_text_slots(model: NanoModel, text: bytes) -> list[torch.Tensor]:
    """[E] slots of each expert over a text, a tensor for each layer. Leaves the model as it was."""
    counters = []
    plain = [block.runner for block in model.moe_blocks]
    try:
        for block in model.moe_blocks:
            assert block.runner is not None, "load_nano binds the experts"
            runner = block.runner
            block.runner = _CountingRunner(runner.weights, runner.handoff, runner.workspace, runner.out_dtype)
            block.runner.counts = torch.zeros(model.config.num_experts, dtype=torch.int64)
            counters.append(block.runner.counts)
        tokens = torch.tensor([list(text)])
        for window in tokens.split(model.config.max_position_embeddings, dim=1):
            model(window, model.new_caches(1))
    finally:
        for block, runner_before in zip(model.moe_blocks, plain, strict=True):
            block.runner = runner_before
    return counters


class _CountingRunner(RoutedMoeRunner):
    """A runner that counts the slots of each expert into ``counts``; it reads the global ids, whatever is packed."""

    counts: torch.Tensor

    def __call__(
        self, hidden_states: torch.Tensor, routing: Routing, num_valid_tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.counts += routing.topk_ids.flatten().bincount(minlength=len(self.counts))
        return super().__call__(hidden_states, routing, num_valid_tokens)


def run(model: str, ep_size: int, text: Path | None, num_tokens: int) -> Record:
    """The record of ``nano`` over a text where one is given, else of a model's router under skewed logits."""
    if text is None:
        return record_skewed(get_preset(model), ep_size, num_tokens)
    if model != "nano":
        raise ValueError(f"model: expected nano, which alone can read text, got {model!r}")
    return record_text(text, ep_size)
