"""`rankmoe bench layer`: one rank's routed layer, stage by stage, against reading the touched weights once."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rankmoe.bench.cases import random_batch, random_experts
from rankmoe.bench.record import Record, device_name
from rankmoe.bench.timing import time_interleaved
from rankmoe.combine import combine
from rankmoe.experts import down, gate_up
from rankmoe.front import route_quantize
from rankmoe.models.presets import ModelPreset
from rankmoe.moe import Workspace, routed_moe
from rankmoe.types import ExpertPlacement, ExpertSchedule, ExpertWeights


@dataclass(frozen=True)
class LayerOptions:
    """What to measure: one rank of ``ep_size``, at each token count, ``repeats`` times with fresh routings."""

    preset: ModelPreset
    ep_size: int
    token_counts: Sequence[int]
    repeats: int = 5
    backend: str = "auto"
    seed: int = 0


def run(options: LayerOptions, progress: Callable[[int, int], None] | None = None) -> Record:
    """Measure on the CPU and return the record.

    Rows: ``floor`` reads the touched experts' bytes once; the backend's rows are ``gate_up``, ``down`` and the whole
    ``layer`` from router logits to combined output.
    """
    placement = ExpertPlacement(options.preset.num_experts, options.ep_size, 0)
    weights = random_experts(options.preset, placement, options.backend, options.seed, progress)
    memory_before = peak_memory_bytes()
    rows = []
    for num_tokens in options.token_counts:
        rows += _measure(options, weights, num_tokens)
    notes = {
        "ep_size": options.ep_size,
        "weight_bytes": weights.nbytes,
        "peak_memory_bytes": peak_memory_bytes(),
        "peak_memory_beyond_weights_bytes": peak_memory_bytes() - weights.nbytes,
        "peak_memory_of_the_layer_bytes": peak_memory_bytes() - memory_before,
    }
    return Record("layer", options.preset.name, device_name("cpu"), rows, notes=notes)


def _measure(options: LayerOptions, weights: ExpertWeights, num_tokens: int) -> list[dict[str, object]]:
    preset = options.preset
    logits, hidden_states = random_batch(preset, num_tokens, options.seed + num_tokens)
    workspace = Workspace.allocate(num_tokens, preset.router.top_k, weights)
    front = route_quantize(logits, hidden_states, preset.router, local_range=weights.placement.local_range)
    schedule = front.schedule
    assert schedule is not None, "a contiguous placement has a range"
    middle = gate_up(front.x, schedule, weights, workspace.middle)

    def layer() -> torch.Tensor:
        return routed_moe(hidden_states, logits, weights, preset.router, workspace=workspace)

    rows = down(middle, schedule, weights, workspace.rows)
    if not torch.equal(layer(), combine(rows, front.routing.topk_weights, schedule)):
        raise AssertionError("the layer and its stages disagree: nothing was timed")
    variants = {
        ("floor", "gemms"): lambda: _read_once(weights, schedule),
        (weights.backend, "gate_up"): lambda: gate_up(front.x, schedule, weights, workspace.middle),
        (weights.backend, "down"): lambda: down(middle, schedule, weights, workspace.rows),
        (weights.backend, "layer"): layer,
    }
    timings = time_interleaved({"/".join(key): function for key, function in variants.items()}, options.repeats)
    num_active = int((schedule.expert_counts > 0).sum())
    touched = {"gate_up": weights.w13.nbytes, "down": weights.w2.nbytes}
    result: list[dict[str, object]] = []
    for variant, stage in variants:
        nbytes = touched.get(stage, weights.nbytes) // weights.num_local_experts * num_active
        timing = timings[f"{variant}/{stage}"]
        result.append(
            {
                "tokens": num_tokens,
                "variant": variant,
                "stage": stage,
                "us": round(timing.us, 1),
                "spread": round(timing.spread, 1),
                "bytes": nbytes,
                "active_experts": num_active,
            }
        )
    return result


def _read_once(weights: ExpertWeights, schedule: ExpertSchedule) -> None:
    """Read every byte of the active experts once: a sum over 8-byte words."""
    for expert in (schedule.expert_counts > 0).nonzero().flatten().tolist():
        for tensor in (weights.w13[expert], weights.w2[expert]):
            tensor.data.view(-1).view(torch.int64).sum()
            tensor.scale.view(-1).view(torch.int64).sum()


def peak_memory_bytes() -> int:
    """Largest resident memory of this process so far, interpreter and libraries included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
