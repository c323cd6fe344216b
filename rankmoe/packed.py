"""Packed experts in a file: what ``pack_experts`` made, saved once and loaded without packing again.

A file is a safetensors file with the experts of one layer and one rank. Its metadata say for which backend and layout,
activation and placement they are; its tensors are the layout's buffers (``w13.*``, ``w2.*``), factors and biases.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rankmoe import __version__
from rankmoe.backends import Backend, backend_names, choose_packer, get_backend
from rankmoe.quantize import check_group_multiple
from rankmoe.shards import DTYPES, CheckpointError, TensorEntry, read_header, read_slices_into, write_file
from rankmoe.types import Activation, ExpertPlacement, ExpertWeights, Problem, SiTU, SwiGLU

#: Names of tensors and metadata; another one whenever these change.
FORMAT_VERSION = "1"
_KIND = "rankmoe packed experts"
_ACTIVATIONS: dict[str, type[SiTU] | type[SwiGLU]] = {"situ": SiTU, "swiglu": SwiGLU}


def packed_file_name(layer: int, placement: ExpertPlacement) -> str:
    """The usual name of a layer's file for one rank."""
    return f"layer-{layer:03d}-rank-{placement.ep_rank}-of-{placement.ep_size}.safetensors"


def save_packed(weights: ExpertWeights, path: str | Path) -> int:
    """Write packed experts, replacing the file that is there; returns the bytes written.

    The host holds at most one expert beside the weights. The file is written beside its place and renamed when all of
    it is on the disk: a failure leaves the old one as it was.
    Raises ValueError for weights whose parts are not where their backend's ``pack`` puts them.
    """
    backend = get_backend(weights.backend)
    tensors = _small_tensors(weights)
    for name, weight in (("w13", weights.w13), ("w2", weights.w2)):
        for part, buffer in backend.layout.buffers(weight).items():
            tensors[f"{name}.{part}"] = buffer
    metadata = {
        "kind": _KIND,
        "format_version": FORMAT_VERSION,
        "rankmoe_version": __version__,
        "backend": backend.name,
        "layout": backend.layout.version,
        "activation": json.dumps(_describe_activation(weights.activation)),
        "placement": json.dumps(_describe_placement(weights.placement)),
        "hidden_size": str(weights.hidden_size),
        "intermediate_size": str(weights.intermediate_size),
    }
    return write_file(Path(path), tensors, metadata)


def load_packed(
    path: str | Path, *, device: torch.device | str | None = None, placement: ExpertPlacement | None = None
) -> ExpertWeights:
    """Load what ``save_packed`` wrote, bit for bit.

    device: where the weights live; None for the kind of device that their backend runs on. Every file can be loaded
        on the CPU whose layout can be packed there, to be looked at or saved again.
    placement: what the file's must be; None takes whatever it is.
    A GPU gets one expert at a time, through one expert's worth of host memory; host memory is read in place.
    Raises CheckpointError, before anything is allocated, for a file of another kind or version, of another layout than
    this library's, of another placement, for a backend that does not run here, and for one that is truncated or whose
    tensors are not what its metadata announce. Bits that flipped in the data go unnoticed, as in any checkpoint.
    """
    path = Path(path)
    entries, metadata = read_header(path)
    description = _Description.of(path, metadata)
    if placement is not None and placement != description.placement:
        raise CheckpointError(path, None, f"{placement}", f"{description.placement}")
    device = torch.device(device or description.backend.device_type)
    description.check_covered(entries, device)
    description.check_tensors(entries)

    loaded: dict[str, torch.Tensor] = {}
    layout = description.backend.layout
    weights = {name: layout.empty(shape, device) for name, shape in description.shapes.items()}
    for name, weight in weights.items():
        loaded |= {f"{name}.{part}": buffer for part, buffer in layout.buffers(weight).items()}
    small = {
        name: torch.empty(entries[name].shape, dtype=DTYPES[entries[name].dtype], device=device)
        for name in _SMALL_TENSORS
        if name in entries
    }
    with path.open("rb") as file:
        for name, out in sorted((small | loaded).items(), key=lambda item: entries[item[0]].start):
            read_slices_into(file, name, entries[name], out)
    return ExpertWeights(
        weights["w13"],
        weights["w2"],
        description.activation,
        description.placement,
        description.backend.name,
        **small,
    )


#: Tensors of ExpertWeights that may be None, and are then not in the file.
_SMALL_TENSORS = ("w13_bias", "w2_bias", "w13_factor", "w2_factor")


def _small_tensors(weights: ExpertWeights) -> dict[str, torch.Tensor]:
    tensors = {name: getattr(weights, name) for name in _SMALL_TENSORS}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@dataclass(frozen=True)
class _Description:
    """What a file's metadata say, all of it known to this library."""

    path: Path
    backend: Backend
    activation: Activation
    placement: ExpertPlacement
    hidden_size: int
    intermediate_size: int

    @classmethod
    def of(cls, path: Path, metadata: dict[str, Any]) -> _Description:
        """Raise CheckpointError unless the file is one of ours, of this format and of a layout that is still made."""
        kind, version = metadata.get("kind"), metadata.get("format_version")
        if kind != _KIND:
            raise CheckpointError(path, None, f"metadata with kind {_KIND!r}", f"{kind!r}")
        writer = f"(written by rankmoe {metadata.get('rankmoe_version')})"
        if version != FORMAT_VERSION:
            raise CheckpointError(path, None, f"format_version {FORMAT_VERSION!r}", f"{version!r} {writer}")
        name = metadata.get("backend")
        if name not in backend_names():
            raise CheckpointError(path, None, f"a backend of {', '.join(backend_names())}", f"{name!r} {writer}")
        backend = get_backend(name)
        if metadata.get("layout") != backend.layout.version:
            expected = f"layout {backend.layout.version!r} of backend {name!r}; pack the checkpoint again"
            raise CheckpointError(path, None, expected, f"{metadata.get('layout')!r} {writer}")

        def parse(key: str, convert: Callable[[str], Any]) -> Any:
            try:
                return convert(metadata[key])
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise CheckpointError(path, None, f"metadata with {key}", f"{error!r}") from error

        return cls(
            path,
            backend,
            parse("activation", _parse_activation),
            parse("placement", _parse_placement),
            parse("hidden_size", _parse_size),
            parse("intermediate_size", _parse_size),
        )

    @property
    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """Logical shape of each weight."""
        num_experts = self.placement.num_local_experts
        return {
            "w13": (num_experts, 2 * self.intermediate_size, self.hidden_size),
            "w2": (num_experts, self.hidden_size, self.intermediate_size),
        }

    def check_covered(self, entries: dict[str, TensorEntry], device: torch.device) -> None:
        """Raise CheckpointError unless the backend runs these experts on the device, or only packs them there."""
        problem = Problem(
            num_local_experts=self.placement.num_local_experts,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            activation=self.activation,
            has_bias="w13_bias" in entries or "w2_bias" in entries,
            device_type=device.type,
        )
        try:
            choose_packer(problem, self.backend.name)
        except ValueError as error:
            expected = f"a backend that is available here and covers {problem}"
            raise CheckpointError(self.path, None, expected, repr(self.backend.name)) from error

    def check_tensors(self, entries: dict[str, TensorEntry]) -> None:
        """Raise CheckpointError unless the file has exactly the tensors that it should, as they should be."""
        layout, meta = self.backend.layout, torch.device("meta")
        optional = set(_SMALL_TENSORS)
        expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, shape in self.shapes.items():
            for part, buffer in layout.buffers(layout.empty(shape, meta)).items():
                expected[f"{name}.{part}"] = (tuple(buffer.shape), buffer.dtype)
            expected[f"{name}_bias"] = (shape[:2], torch.float32)
            factor = f"{name}_factor"
            num_dims = len(entries[factor].shape) if factor in entries else 0
            if num_dims not in layout.factor_dtypes:
                allowed = " or ".join(map(_describe_factor, layout.factor_dtypes))
                raise CheckpointError(self.path, factor, allowed, _describe_factor(num_dims))
            if dtype_of_it := layout.factor_dtypes[num_dims]:
                expected[factor] = (shape[:num_dims], dtype_of_it)
        for name in entries:
            if name not in expected:
                raise CheckpointError(self.path, name, f"one of {', '.join(expected)}", "this tensor")
        for name, (shape_of_it, dtype) in expected.items():
            if name in entries:
                entries[name].check(name, shape_of_it, dtype)
            elif name not in optional:
                raise CheckpointError(self.path, name, "this tensor", "none")


def _describe_factor(num_dims: int) -> str:
    return f"{num_dims} dimension{'s' * (num_dims > 1)}" if num_dims else "no tensor"


def _describe_activation(activation: Activation) -> dict[str, Any]:
    kind = "situ" if isinstance(activation, SiTU) else "swiglu"
    return {"kind": kind, **asdict(activation)}


def _parse_activation(text: str) -> Activation:
    options = json.loads(text)
    return _ACTIVATIONS[options.pop("kind")](**options)


def _describe_placement(placement: ExpertPlacement) -> dict[str, Any]:
    return {
        "num_experts": placement.num_experts,
        "ep_size": placement.ep_size,
        "ep_rank": placement.ep_rank,
        "strategy": placement.strategy,
        "physical_to_logical": placement.physical_to_logical,
    }


def _parse_placement(text: str) -> ExpertPlacement:
    options = json.loads(text)
    copies = options.pop("physical_to_logical")
    return ExpertPlacement(**options, physical_to_logical=None if copies is None else tuple(copies))


def _parse_size(text: str) -> int:
    size = int(text)
    check_group_multiple("size", size)
    if size < 1:
        raise ValueError(f"expected at least 1, got {size}")
    return size
