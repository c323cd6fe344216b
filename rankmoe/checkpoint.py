"""Sharded safetensors checkpoints with Kimi-K3's expert names: open lazily, load one rank's experts, save.

A checkpoint is a folder: ``config.json``, and either one ``model.safetensors`` or shards
``model-00001-of-0000N.safetensors`` with ``model.safetensors.index.json``. An expert's matrices are ``w1`` (gate),
``w3`` (up) and ``w2`` (down), each as ``weight_packed`` [out, in/2] uint8 and ``weight_scale`` [out, in/32] uint8:
the ``mxfp4-pack-quantized`` format of compressed-tensors.

Experts are packed one at a time from the disk (``Checkpoint.pack_experts``): nothing is held twice.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rankmoe.experts import pack_experts
from rankmoe.quantize import ScaleError, check_group_multiple
from rankmoe.shards import DTYPES, CheckpointError, TensorEntry, parse_json, read_header, read_into
from rankmoe.types import GROUP_SIZE, Activation, ExpertPlacement, ExpertWeights, MXFormat, MXTensor

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
#: Largest shard that is written unless the caller says otherwise; the ecosystem's usual size.
MAX_SHARD_BYTES = 5_000_000_000

#: Called after each tensor that is loaded: tensors done, tensors in all, the tensor's name.
ProgressCallback = Callable[[int, int, str], None]

_SHARD_NAME = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.safetensors")
_FIRST_EXPERT = re.compile(r"(?P<prefix>(?:.+\.)?layers\.(?P<layer>\d+)\..+)\.experts\.0\.w1\.weight_packed")


@dataclass(frozen=True)
class Checkpoint:
    """A folder of safetensors of which only the headers have been read.

    entries: where each tensor lies, by name.
    config: the content of ``config.json``; empty where there is none.
    """

    directory: Path
    entries: Mapping[str, TensorEntry] = field(repr=False)
    config: dict[str, Any] = field(repr=False)

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """Read the headers of the shards that the index names, or of every ``*.safetensors`` file without an index.

        Raises CheckpointError for a shard that is missing, truncated or malformed, and for an index that disagrees
        with the headers.
        """
        directory = Path(directory)
        config_file = directory / CONFIG_FILE
        config = parse_json(config_file, config_file.read_bytes()) if config_file.exists() else {}
        return cls(directory, _read_entries(directory), config)

    def tensor(self, name: str, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Load one tensor.

        shape, dtype: what it must be; None takes what the header says.
        Raises CheckpointError, before a byte is read, where the tensor is missing or is something else.
        """
        entry = self._checked_entry(name, shape, dtype)
        out = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        with entry.file.open("rb") as file:
            read_into(file, name, entry, out)
        return out

    def load_experts(
        self,
        layer_prefix: str,
        placement: ExpertPlacement,
        hidden_size: int,
        intermediate_size: int,
        progress: ProgressCallback | None = None,
    ) -> tuple[MXTensor, MXTensor]:
        """Load the experts of one layer that this rank owns, and read nothing else.

        layer_prefix: the names before ``.experts.E.``, such as ``model.layers.3.block_sparse_moe``.
        progress: called after each tensor.
        Returns w13 [L, 2 I, H] mxfp4, gate rows first, and w2 [L, H, I] mxfp4, in the order of
        ``placement.logical_expert_ids``. Memory beyond these is less than one tensor's.
        Raises CheckpointError, before anything is read or allocated, unless every tensor of every owned expert is
        there with its shape and dtype; ValueError for a size that is not a multiple of 32.
        """
        sources = self._sources(layer_prefix, placement, hidden_size, intermediate_size, progress)
        w13, w2 = (MXTensor.empty(source.shape) for source in sources)
        for expert in range(placement.num_local_experts):  # about the order of the disk
            for source, out in zip(sources, (w13, w2), strict=True):
                source.read_into(expert, out[expert])
        return w13, w2

    def pack_experts(
        self,
        layer_prefix: str,
        placement: ExpertPlacement,
        hidden_size: int,
        intermediate_size: int,
        activation: Activation,
        *,
        w13_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        progress: ProgressCallback | None = None,
    ) -> ExpertWeights:
        """Pack the experts of one layer that this rank owns, one at a time from the disk.

        The packed weights are those of ``load_experts`` and ``rankmoe.pack_experts``, bit for bit; beside them the
        host, and the device, hold at most one expert. Some layouts read the checkpoint twice.

        layer_prefix, progress: as ``load_experts``.
        activation, w13_bias, w2_bias, backend, device: as ``rankmoe.pack_experts``; without a device, on the CPU.
        Raises CheckpointError as ``load_experts``, and for a scale that the backend's arithmetic cannot hold, naming
        the tensor in the checkpoint; otherwise as ``rankmoe.pack_experts``.
        """
        w13, w2 = self._sources(layer_prefix, placement, hidden_size, intermediate_size, progress)
        biases = {"w13_bias": w13_bias, "w2_bias": w2_bias}
        try:
            return pack_experts(w13, w2, activation, placement, **biases, backend=backend, device=device)
        except ScaleError as error:
            source = w2 if error.weight == "w2" else w13
            matrix, row = source.locate(error.row)
            name = source.name(error.expert, matrix, "weight_scale")
            got = f"{error.got} in row {row}, group {error.group}"
            raise CheckpointError(self.entries[name].file, name, error.expected, got) from error

    def layer_prefixes(self) -> dict[int, str]:
        """The prefix of each layer that has routed experts, by the layer's number, ascending.

        Raises CheckpointError where two prefixes have the same number.
        """
        prefixes: dict[int, str] = {}
        for name, entry in self.entries.items():
            if found := _FIRST_EXPERT.fullmatch(name):
                layer = int(found["layer"])
                if layer in prefixes:
                    raise CheckpointError(entry.file, name, f"one layer {layer}", f"{prefixes[layer]} too")
                prefixes[layer] = found["prefix"]
        return dict(sorted(prefixes.items()))

    def _sources(
        self,
        layer_prefix: str,
        placement: ExpertPlacement,
        hidden_size: int,
        intermediate_size: int,
        progress: ProgressCallback | None,
    ) -> tuple[_CheckpointExperts, _CheckpointExperts]:
        """w13 and w2 of one layer, every tensor of them checked and nothing read."""
        check_group_multiple("hidden_size", hidden_size)
        check_group_multiple("intermediate_size", intermediate_size)
        # A placement of fewer experts than the model has would silently leave some out.
        surplus = f"{layer_prefix}.experts.{placement.num_logical_experts}.w1.weight_packed"
        if surplus in self.entries:
            expected = f"no expert beyond the placement's {placement.num_logical_experts}"
            raise CheckpointError(self.entries[surplus].file, surplus, expected, "this tensor")
        expert_ids = placement.logical_expert_ids
        counter = _Counter(6 * len(set(expert_ids)), progress)  # three matrices, each codes and scales
        gate_up_size, down_size = (intermediate_size, hidden_size), (hidden_size, intermediate_size)
        w13 = _CheckpointExperts(self, layer_prefix, expert_ids, ("w1", "w3"), gate_up_size, counter)
        w2 = _CheckpointExperts(self, layer_prefix, expert_ids, ("w2",), down_size, counter)
        for expert in range(len(expert_ids)):
            w13.check(expert)
            w2.check(expert)
        return w13, w2

    def _checked_entry(self, name: str, shape: Sequence[int] | None, dtype: torch.dtype | None) -> TensorEntry:
        entry = self.entries.get(name)
        if entry is None:
            files = sorted({entry.file.name for entry in self.entries.values()})
            searched = ", ".join(files if len(files) <= 8 else [*files[:3], "...", files[-1]])
            raise CheckpointError(self.directory, name, "this tensor", f"none in {len(files)} files ({searched})")
        entry.check(name, shape, dtype)
        return entry


class _Counter:
    """Calls ``progress`` for each tensor once, however often it is read."""

    def __init__(self, total: int, progress: ProgressCallback | None) -> None:
        self.total, self.progress = total, progress
        self.names: set[str] = set()

    def __call__(self, name: str) -> None:
        if self.progress is not None and name not in self.names:
            self.names.add(name)
            self.progress(len(self.names), self.total, name)


@dataclass(frozen=True)
class _CheckpointExperts:
    """An ``ExpertSource`` that reads an expert when it is asked for.

    matrices: the checkpoint's matrices that are stacked, each with ``matrix_shape`` (out, in).
    """

    checkpoint: Checkpoint
    layer_prefix: str
    expert_ids: tuple[int, ...]
    matrices: tuple[str, ...]
    matrix_shape: tuple[int, int]
    counter: _Counter
    format: MXFormat = "mxfp4"

    @property
    def shape(self) -> tuple[int, ...]:
        num_rows, num_columns = self.matrix_shape
        return (len(self.expert_ids), len(self.matrices) * num_rows, num_columns)

    def __getitem__(self, expert: int) -> MXTensor:
        out = MXTensor.empty(self.shape[1:])
        self.read_into(expert, out)
        return out

    def name(self, expert: int, matrix: str, part: str) -> str:
        """The checkpoint's name of a tensor of a local expert."""
        return f"{self.layer_prefix}.experts.{self.expert_ids[expert]}.{matrix}.{part}"

    def locate(self, row: int) -> tuple[str, int]:
        """The matrix that a row of the stacked ones is from, and the row in it."""
        index, row = divmod(row, self.matrix_shape[0])
        return self.matrices[index], row

    def check(self, expert: int) -> None:
        """Raise CheckpointError unless every tensor of the expert is there with its shape and dtype."""
        for name, view in self._views(expert, MXTensor.empty(self.shape[1:], device="meta")):
            self.checkpoint._checked_entry(name, view.shape, view.dtype)

    def read_into(self, expert: int, out: MXTensor) -> None:
        """Read a local expert into ``out``, contiguous and in host memory."""
        for name, view in self._views(expert, out):
            entry = self.checkpoint.entries[name]
            with entry.file.open("rb") as file:
                read_into(file, name, entry, view)
            self.counter(name)

    def _views(self, expert: int, out: MXTensor) -> Iterator[tuple[str, torch.Tensor]]:
        for index, matrix in enumerate(self.matrices):
            weight = out[index * self.matrix_shape[0] : (index + 1) * self.matrix_shape[0]]
            yield self.name(expert, matrix, "weight_packed"), weight.data
            yield self.name(expert, matrix, "weight_scale"), weight.scale


def _read_entries(directory: Path) -> dict[str, TensorEntry]:
    """Read the headers of all shards; each tensor lies in one shard, and an index must agree with the headers."""
    index_file = directory / INDEX_FILE
    weight_map: dict[str, str] = {}
    if index_file.exists():
        weight_map = parse_json(index_file, index_file.read_bytes()).get("weight_map", {})
        if not weight_map or not isinstance(weight_map, dict):
            raise CheckpointError(index_file, None, "a weight_map that names tensors", f"{weight_map!r}")
    for file_name, name in {str(file_name): name for name, file_name in weight_map.items()}.items():
        if not (directory / file_name).is_file():
            raise CheckpointError(directory / file_name, name, f"the file that {INDEX_FILE} names", "no such file")

    file_names = sorted(set(weight_map.values()) or {path.name for path in directory.glob("*.safetensors")})
    if not file_names:
        raise CheckpointError(directory, None, f"a folder with {INDEX_FILE} or *.safetensors files", "none of them")
    if not weight_map:
        _check_shard_set(directory, file_names)
    entries: dict[str, TensorEntry] = {}
    for file_name in file_names:
        for name, entry in read_header(directory / file_name)[0].items():
            if name in entries:
                raise CheckpointError(entry.file, name, "a tensor of one file", f"one in {entries[name].file.name} too")
            entries[name] = entry
            if weight_map and weight_map.get(name) != file_name:
                expected = f"{weight_map.get(name, 'no such tensor')} by {INDEX_FILE}"
                raise CheckpointError(entry.file, name, expected, "a header with it")
    for name in sorted(weight_map.keys() - entries.keys()):
        expected = f"this tensor in the header, by {INDEX_FILE}"
        raise CheckpointError(directory / weight_map[name], name, expected, "a header without it")
    return entries


def _check_shard_set(directory: Path, file_names: list[str]) -> None:
    """Without an index, a lone ``-00001-of-00003`` is what an interrupted copy leaves; it is no smaller model."""
    for shard in filter(None, map(_SHARD_NAME.fullmatch, file_names)):
        for number in range(1, int(shard["count"]) + 1):
            sibling = f"{shard['stem']}-{number:05d}-of-{shard['count']}.safetensors"
            if sibling not in file_names:
                raise CheckpointError(directory / sibling, None, f"a shard beside {shard.string}", "no such file")


def expert_tensors(
    layer_prefix: str, w13: MXTensor, w2: MXTensor, first_expert: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name the checkpoint tensors of one layer's stacked experts; the tensors are views.

    w13: [L, 2 I, H] mxfp4, gate rows first. w2: [L, H, I] mxfp4.
    first_expert: the model's id of the first one.
    Raises ValueError for another format or for shapes that do not fit each other.
    """
    if (w13.format, w2.format) != ("mxfp4", "mxfp4"):
        raise ValueError(f"w13, w2: expected mxfp4, got {w13.format} and {w2.format}")
    num_experts, hidden_size, intermediate_size = w2.shape
    if w13.shape != (num_experts, 2 * intermediate_size, hidden_size):
        expected = (num_experts, 2 * intermediate_size, hidden_size)
        raise ValueError(f"w13: expected {expected} beside w2 {w2.shape}, got {w13.shape}")
    return _expert_views(layer_prefix, range(first_expert, first_expert + num_experts), w13, w2)


def _expert_views(
    layer_prefix: str, expert_ids: Iterable[int], w13: MXTensor, w2: MXTensor
) -> Iterator[tuple[str, torch.Tensor]]:
    intermediate_size = w2.shape[-1]
    for local_id, expert_id in enumerate(expert_ids):
        gate_up, down = w13[local_id], w2[local_id]
        matrices = {"w1": gate_up[:intermediate_size], "w2": down, "w3": gate_up[intermediate_size:]}
        for matrix, weight in matrices.items():
            prefix = f"{layer_prefix}.experts.{expert_id}.{matrix}"
            yield f"{prefix}.weight_packed", weight.data
            yield f"{prefix}.weight_scale", weight.scale


def mxfp4_quantization_config(ignore: Sequence[str] = ()) -> dict[str, Any]:
    """The ``quantization_config`` that compressed-tensors writes for MXFP4 weights without activation quantisation.

    ignore: names of the modules that are not quantised.
    """
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": GROUP_SIZE,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
    }
    group = {
        "format": "mxfp4-pack-quantized",
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }


def save_checkpoint(
    directory: str | Path,
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    config: Mapping[str, Any],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a checkpoint, replacing the one that is there.

    tensors: names and tensors. An iterator is consumed as it is written: at most one shard and the tensor after it are
        held, so a model that fits nowhere can be converted.
    config: content of ``config.json``. Where packed weights are saved and it has no ``quantization_config``, that is
        added; its ``ignore`` lists the modules that were saved unpacked.
    max_shard_bytes: a shard is closed before it would grow beyond this; a larger tensor gets its own.

    Everything is first written into a hidden folder beside the final place. Only when all of it is there the old
    checkpoint is removed and the new files are renamed, the index last. An exception from ``tensors`` therefore leaves
    the old checkpoint as it was, and a process killed in between leaves no index and no torn shard.
    Raises ValueError for a name that occurs twice, RuntimeError (of safetensors) for tensors of one shard that overlap
    in memory.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=directory) as hidden:
        staging = Path(hidden)
        shard_of, total_bytes = _write_shards(staging, pairs, max_shard_bytes)
        num_shards = max(shard_of.values(), default=1)
        if num_shards == 1:
            file_names = [SINGLE_FILE]
        else:
            file_names = [f"model-{shard:05d}-of-{num_shards:05d}.safetensors" for shard in range(1, num_shards + 1)]
            weight_map = {name: file_names[shard - 1] for name, shard in sorted(shard_of.items())}
            _write_json(staging / INDEX_FILE, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})
        _write_json(staging / CONFIG_FILE, _with_quantization_config(config, shard_of))

        # Old shards go, index first, before new ones come: an index never names a mixture of the two, and without one
        # an incomplete set is refused. A single file needs no such care, its renaming replaces the old one at once.
        stale = [directory / INDEX_FILE, *directory.glob("model-*-of-*.safetensors")]
        for path in stale if num_shards == 1 else [*stale, directory / SINGLE_FILE]:
            path.unlink(missing_ok=True)
        os.replace(staging / CONFIG_FILE, directory / CONFIG_FILE)
        for shard, file_name in enumerate(file_names, start=1):
            # safetensors makes its files readable by their owner only.
            shutil.copymode(directory / CONFIG_FILE, staging / f"{shard}")
            os.replace(staging / f"{shard}", directory / file_name)
        if num_shards > 1:
            os.replace(staging / INDEX_FILE, directory / INDEX_FILE)


def _write_shards(
    staging: Path, pairs: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int
) -> tuple[dict[str, int], int]:
    """Write shards named 1, 2, ... (their number is not known yet). Returns each tensor's shard and the total bytes."""
    shard_of: dict[str, int] = {}
    shard: dict[str, torch.Tensor] = {}
    num_shards, shard_bytes, total_bytes = 1, 0, 0

    for name, tensor in pairs:
        if name in shard_of:
            raise ValueError(f"tensors: expected each name once, got {name} twice")
        if shard and shard_bytes + tensor.nbytes > max_shard_bytes:
            save_file(shard, staging / f"{num_shards}", metadata={"format": "pt"})
            shard.clear()
            num_shards, shard_bytes = num_shards + 1, 0
        shard[name] = tensor.detach().cpu().contiguous()
        shard_of[name] = num_shards
        shard_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    save_file(shard, staging / f"{num_shards}", metadata={"format": "pt"})
    return shard_of, total_bytes


def _with_quantization_config(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    is_stated = "quantization_config" in config or "quantization_config" in (config.get("text_config") or {})
    if is_stated or not any(name.endswith(".weight_packed") for name in names):
        return dict(config)
    unpacked = sorted(name.removesuffix(".weight") for name in names if name.endswith(".weight"))
    return {**config, "quantization_config": mxfp4_quantization_config(unpacked)}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextmanager
def progress_bar(description: str, force: bool = False) -> Iterator[ProgressCallback]:
    """Show progress on standard error, and yield the callback that drives it.

    force: draw even where standard error is not a terminal; otherwise nothing is printed there.
    """
    if not (force or sys.stderr.isatty()):
        yield lambda done, total, name: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True, force_terminal=True)
    with Progress(
        *Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn(), console=console
    ) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total, name: bar.update(task, completed=done, total=total)
