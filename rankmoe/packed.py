"""Save packed experts, and load them again without packing: one safetensors file a layer and rank.

The file's metadata says what the bytes mean: the layout and its version, activation, placement and sizes. A file of
another layout than this library's backend reads is refused, never read wrongly.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rankmoe.backends import Backend, choose_backend, get_backend
from rankmoe.checkpoint import DTYPES, CheckpointError, TensorEntry, read_header, read_into
from rankmoe.types import (
    GROUP_SIZE,
    Activation,
    ExpertPlacement,
    ExpertWeights,
    MXTensor,
    PackedExperts,
    Problem,
    SiTU,
    SwiGLU,
)

FORMAT = "rankmoe packed experts 1"
_ACTIVATIONS = {"situ": SiTU, "swiglu": SwiGLU}
_OPTIONAL = ("w13_bias", "w2_bias", "w13_factor", "w2_factor")


def save_packed(weights: ExpertWeights, path: str | Path) -> None:
    """Write packed experts to a file, replacing the one that is there.

    The file is written beside and renamed, so that whatever stops the writing leaves the old one. Weights on a GPU are
    copied one expert at a time.
    """
    path, backend = Path(path), get_backend(weights.backend)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in (("w13", weights.w13), ("w2", weights.w2)):
        tensors |= _tensors_of(name, weight, backend)
    for name in _OPTIONAL:
        optional = getattr(weights, name)
        if optional is not None:
            tensors[name] = optional
    kind = next(kind for kind, cls in _ACTIVATIONS.items() if isinstance(weights.activation, cls))
    placement = {f.name: getattr(weights.placement, f.name) for f in dataclasses.fields(weights.placement) if f.init}
    metadata = {
        "format": FORMAT,
        "layout": backend.layout,
        "backend": weights.backend,
        "activation": json.dumps({"kind": kind, **dataclasses.asdict(weights.activation)}),
        "placement": json.dumps(placement),
        "sizes": json.dumps({"hidden_size": weights.hidden_size, "intermediate_size": weights.intermediate_size}),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_header(tensors, metadata))
            for tensor in tensors.values():
                for part in tensor if tensor.dim() > 1 else (tensor,):
                    file.write(part.detach().cpu().contiguous().view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # temporary files are their owner's alone
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load_packed(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    placement: ExpertPlacement | None = None,
    backend: str | None = None,
) -> ExpertWeights:
    """Read what ``save_packed`` wrote straight into its place on a device, through at most one expert of host memory.

    placement: what the file's must be; None takes it as it is.
    backend: which one is to run them, of those that read the file's layout; None for the one that packed them.
    Raises CheckpointError naming file, tensor, expected and got for a file of another format, layout, placement or
    size, and for one that is cut short; ValueError where the backend does not run here. Nothing is half-loaded.
    """
    path, device = Path(path), torch.device(device)
    entries, metadata = read_header(path)
    if metadata.get("format") != FORMAT:
        raise CheckpointError(path, None, f"format {FORMAT!r}", f"{metadata.get('format')!r}")
    try:
        activation = _activation(json.loads(metadata["activation"]))
        own = _placement(json.loads(metadata["placement"]))
        sizes = json.loads(metadata["sizes"])
        hidden_size, intermediate_size = int(sizes["hidden_size"]), int(sizes["intermediate_size"])
        name = backend or metadata["backend"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(path, None, "metadata that save_packed writes", f"{error!r}") from error
    if placement is not None and own != placement:
        raise CheckpointError(path, None, f"{placement}", f"{own}")
    has_bias = "w13_bias" in entries or "w2_bias" in entries
    num_experts = own.num_local_experts
    problem = Problem(num_experts, hidden_size, intermediate_size, activation, has_bias, device.type)
    chosen = choose_backend(problem, name)
    if chosen.layout != metadata.get("layout"):
        raise CheckpointError(path, None, f"layout {chosen.layout!r} for {name}", f"{metadata.get('layout')!r}")
    packed = PackedExperts(
        _weight(path, entries, "w13", (num_experts, 2 * intermediate_size, hidden_size), chosen, device),
        _weight(path, entries, "w2", (num_experts, hidden_size, intermediate_size), chosen, device),
    )
    shapes = {"w13_bias": (num_experts, 2 * intermediate_size), "w2_bias": (num_experts, hidden_size)}
    optional = {key: _read(path, entries, key, shapes.get(key), device) for key in _OPTIONAL if key in entries}
    return ExpertWeights(packed.w13, packed.w2, activation, own, chosen.name, **optional)


def _tensors_of(name: str, weight: MXTensor, backend: Backend) -> dict[str, torch.Tensor]:
    if backend.buffer_of is not None:
        return {name: backend.buffer_of(weight)}
    return {f"{name}.data": weight.data, f"{name}.scale": weight.scale}


def _weight(
    path: Path,
    entries: Mapping[str, TensorEntry],
    name: str,
    shape: tuple[int, int, int],
    backend: Backend,
    device: torch.device,
) -> MXTensor:
    num_experts, num_outputs, num_inputs = shape
    if backend.from_buffer is not None:
        buffer = _read(path, entries, name, None, device)
        try:
            weight = backend.from_buffer(buffer, num_outputs, num_inputs)
        except ValueError as error:
            raise CheckpointError(path, name, f"what holds a weight of {shape}", f"{tuple(buffer.shape)}") from error
        if len(buffer) != num_experts:
            raise CheckpointError(path, name, f"{num_experts} experts", f"{len(buffer)}")
        return weight
    data = _read(path, entries, f"{name}.data", (num_experts, num_outputs, num_inputs // 2), device)
    scale = _read(path, entries, f"{name}.scale", (num_experts, num_outputs, num_inputs // GROUP_SIZE), device)
    return MXTensor(data, scale, "mxfp4")


def _read(
    path: Path, entries: Mapping[str, TensorEntry], name: str, shape: tuple[int, ...] | None, device: torch.device
) -> torch.Tensor:
    """One tensor on a device: to a GPU in parts along its first dimension."""
    if name not in entries:
        raise CheckpointError(path, name, "this tensor", f"none; there are {', '.join(sorted(entries))}")
    entry = entries[name]
    if shape is not None and entry.shape != shape:
        raise CheckpointError(path, name, f"shape {shape}", f"{entry.shape}")
    out = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device=device)
    with path.open("rb") as file:
        if device.type == "cpu" or not out.numel():
            read_into(file, name, entry, out)
            return out
        part = torch.empty(entry.shape[1:], dtype=out.dtype)
        for index in range(entry.shape[0]):
            start = entry.start + index * part.nbytes
            read_into(file, name, entry._replace(start=start, stop=start + part.nbytes), part)
            out[index] = part
    return out


def _header(tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> bytes:
    """The eight bytes of length and the JSON before the tensors (https://github.com/huggingface/safetensors#format)."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    fields: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for name, tensor in tensors.items():
        offsets = [start, start + tensor.nbytes]
        fields[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        start = offsets[1]
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _activation(values: dict[str, Any]) -> Activation:
    kind = values.pop("kind")
    return _ACTIVATIONS[kind](**values)


def _placement(values: dict[str, Any]) -> ExpertPlacement:
    copies = values.pop("physical_to_logical")
    return ExpertPlacement(**values, physical_to_logical=None if copies is None else tuple(copies))
