"""`rankmoe pack`: the layers of a checkpoint, one rank's experts, into files of packed weights."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rankmoe.backends import get_backend
from rankmoe.checkpoint import Checkpoint, ProgressCallback
from rankmoe.models.presets import ModelPreset
from rankmoe.packed import packed_file_name, save_packed
from rankmoe.shards import CheckpointError
from rankmoe.types import ExpertPlacement, PlacementStrategy


@dataclass(frozen=True)
class PackOptions:
    """What to pack.

    layers: numbers as in the checkpoint's names; None for every layer with routed experts.
    backend, device: as ``rankmoe.pack_experts``; without a device, a GPU where there is one and the backend runs on it.
    """

    checkpoint: Path
    out: Path
    preset: ModelPreset
    ep_size: int = 1
    ep_rank: int = 0
    layers: Sequence[int] | None = None
    strategy: str = "contiguous"
    backend: str = "auto"
    device: str | None = None


@dataclass(frozen=True)
class PackedFile:
    """One file that was written.

    backend: whose layout it has.
    pack_seconds: reading the checkpoint and packing.
    """

    layer: int
    path: Path
    backend: str
    nbytes: int
    pack_seconds: float
    write_seconds: float


def run(options: PackOptions, progress: ProgressCallback) -> Iterator[PackedFile]:
    """Pack and write the layers one after the other; each file is there whole or not at all.

    progress: called after each tensor of the checkpoint, counted over all layers.
    Yields each file once it is written.
    Raises ValueError for options that do not fit, before anything is read, and CheckpointError for faults of the
    checkpoint.
    """
    preset = options.preset
    if preset.has_bias:
        raise ValueError(f"model: expected one whose experts have no bias, got {preset.name!r}")
    device = options.device or _default_device(options.backend)
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {device!r}")
    placement = ExpertPlacement(
        preset.num_experts, options.ep_size, options.ep_rank, cast(PlacementStrategy, options.strategy)
    )
    checkpoint = Checkpoint.open(options.checkpoint)
    prefixes = checkpoint.layer_prefixes()
    layers = sorted(prefixes) if options.layers is None else sorted(set(options.layers))
    for layer in layers:
        if layer not in prefixes:
            got = f"layers {', '.join(map(str, prefixes))}" if prefixes else "none"
            raise CheckpointError(checkpoint.directory, None, f"routed experts in layer {layer}", got)
    if not layers:
        raise CheckpointError(checkpoint.directory, None, "a layer with routed experts", "none")

    for index, layer in enumerate(layers):

        def report(done: int, total: int, name: str, index: int = index) -> None:
            progress(index * total + done, len(layers) * total, name)

        start = time.perf_counter()
        weights = checkpoint.pack_experts(
            prefixes[layer],
            placement,
            preset.hidden_size,
            preset.intermediate_size,
            preset.activation,
            backend=options.backend,
            device=device,
            progress=report,
        )
        packed = time.perf_counter()
        path = options.out / packed_file_name(layer, placement)
        nbytes = save_packed(weights, path)
        yield PackedFile(layer, path, weights.backend, nbytes, packed - start, time.perf_counter() - packed)
        del weights  # before the next layer's take their place


def _default_device(backend: str) -> str:
    preferred = get_backend("cuda" if backend == "auto" else backend)
    return preferred.device_type if preferred.available() else "cpu"
