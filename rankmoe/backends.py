"""Which implementations exist, what each one covers, and which one a problem or a device gets.

A module with device code is imported when it is asked for, so that ``import rankmoe`` needs no compiler and no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from typing import Any, Literal, Protocol

import torch

from rankmoe.layout import CHECKPOINT_ORDER, Layout, in_checkpoint_order
from rankmoe.types import ExpertSchedule, ExpertSource, ExpertWeights, MXTensor, PackedExperts, Problem, Routing


class _GateUp(Protocol):
    def __call__(
        self, x: MXTensor, schedule: ExpertSchedule, weights: ExpertWeights, out: torch.Tensor
    ) -> MXTensor: ...


class _Masked(Protocol):
    def __call__(
        self,
        x: MXTensor,
        routing: Routing,
        expert_token_mask: torch.Tensor,
        weights: ExpertWeights,
        middle: torch.Tensor,
        rows: torch.Tensor,
        out_dtype: torch.dtype,
    ) -> torch.Tensor: ...


class _Gemms(Protocol):
    def __call__(
        self, x: MXTensor, schedule: ExpertSchedule, weights: ExpertWeights, middle: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor: ...


class _Down(Protocol):
    def __call__(
        self, middle: MXTensor, schedule: ExpertSchedule, weights: ExpertWeights, out: torch.Tensor
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class Backend:
    """One implementation of the expert GEMMs.

    available: whether this machine can run it. Never raises.
    covered: whether it follows every rule of docs/numerics.md for a problem. A pure predicate.
    pack: checkpoint-order w13 and w2, wherever they are, to the layout that its kernels read, on a device. Holds at
        most one expert beside the result.
    layout: that layout.
    gate_up, down: the GEMMs, with the arguments of ``rankmoe.experts``.
    device_type: type of the devices that it runs on.
    packs_on_cpu: whether ``pack`` makes the layout on a CPU too, for weights that run elsewhere.
    approximated: whether it computes a problem with the departure from those rules that docs/kernels.md states. Such a
        problem is computed only where the backend is asked for by name.
    gemms: gate_up and down where launches of the two can overlap, or None.
    masked: gate_up, down and combine for up to 64 tokens from global ids and the token masks alone, or None.
    """

    name: str
    available: Callable[[], bool]
    covered: Callable[[Problem], bool]
    pack: Callable[[ExpertSource, ExpertSource, torch.device], PackedExperts]
    layout: Layout
    gate_up: _GateUp
    down: _Down
    device_type: str = "cpu"
    packs_on_cpu: bool = True
    approximated: Callable[[Problem], bool] = lambda problem: False
    gemms: _Gemms | None = None
    masked: _Masked | None = None


def _reference() -> Backend:
    from rankmoe import reference

    return Backend(
        name="reference",
        available=lambda: True,
        covered=lambda problem: problem.device_type == "cpu",
        pack=lambda w13, w2, device: PackedExperts(in_checkpoint_order(w13, device), in_checkpoint_order(w2, device)),
        layout=CHECKPOINT_ORDER,
        gate_up=reference.gate_up,
        down=reference.down,
    )


def _cpu() -> Backend:
    from rankmoe.kernels import experts_cpu

    return Backend(
        name="cpu",
        available=lambda: True,
        covered=lambda problem: problem.device_type == "cpu",
        pack=experts_cpu.pack,
        layout=CHECKPOINT_ORDER,
        gate_up=experts_cpu.gate_up,
        down=experts_cpu.down,
    )


def _humming() -> Backend:
    from rankmoe.kernels import experts_humming

    return Backend(
        name="humming",
        available=experts_humming.available,
        covered=experts_humming.covered,
        pack=experts_humming.pack,
        layout=experts_humming.LAYOUT,
        gate_up=experts_humming.gate_up,
        down=experts_humming.down,
        device_type="cuda",
        packs_on_cpu=False,
        approximated=experts_humming.approximated,
    )


def _cuda() -> Backend:
    from rankmoe.kernels import experts_common, experts_cuda

    return Backend(
        name="cuda",
        available=experts_cuda.available,
        covered=experts_cuda.covered,
        pack=experts_cuda.pack,
        layout=experts_common.LAYOUT,
        gate_up=experts_cuda.gate_up,
        down=experts_cuda.down,
        device_type="cuda",
        gemms=experts_cuda.gemms,
        masked=experts_cuda.masked,
    )


_not_here: Any = NotImplemented  # never called: what is not available is not chosen


def _triton(is_scaled: bool = False) -> Backend:
    from rankmoe.kernels import triton_support

    name = "triton_scaled" if is_scaled else "triton"
    if not triton_support.available():
        # Its module needs Triton to be imported.
        return Backend(name, lambda: False, lambda problem: False, _not_here, CHECKPOINT_ORDER, _not_here, _not_here)
    from rankmoe.kernels import experts_triton

    return Backend(
        name=name,
        available=experts_triton.scaled_available if is_scaled else experts_triton.available,
        covered=(lambda problem: False) if is_scaled else experts_triton.covered,
        pack=experts_triton.pack,
        layout=CHECKPOINT_ORDER,
        gate_up=partial(experts_triton.gate_up, is_scaled=is_scaled),
        down=partial(experts_triton.down, is_scaled=is_scaled),
        device_type="cpu" if triton_support.interprets() else "cuda",
        approximated=experts_triton.scaled_approximated if is_scaled else lambda problem: False,
    )


# In order of preference.
_LOADERS: dict[str, Callable[[], Backend]] = {
    "cuda": _cuda,
    "cpu": _cpu,
    "triton": _triton,
    "reference": _reference,
    "humming": _humming,
    "triton_scaled": partial(_triton, is_scaled=True),
}


def backend_names() -> list[str]:
    """Names that ``get_backend`` takes, the preferred one first."""
    return list(_LOADERS)


@cache
def get_backend(name: str) -> Backend:
    """Look a backend up by name. Raises ValueError, naming the known ones, for another name."""
    if name not in _LOADERS:
        raise ValueError(f"backend: expected one of {', '.join(_LOADERS)}, got {name!r}")
    return _LOADERS[name]()


def choose_backend(problem: Problem, name: str = "auto") -> Backend:
    """The preferred backend that is available and covers the problem, or the named one, which may approximate it.

    Raises ValueError where that backend, or every one, does not cover the problem or is not available here.
    """
    if name != "auto":
        backend = get_backend(name)
        if not (backend.available() and (backend.covered(problem) or backend.approximated(problem))):
            raise ValueError(f"backend: expected one that is available here and covers {problem}, got {name!r}")
        return backend
    for candidate in map(get_backend, _LOADERS):
        if candidate.available() and candidate.covered(problem):
            return candidate
    raise ValueError(f"backend: expected one that covers {problem}, got none of {', '.join(_LOADERS)}")


def choose_packer(problem: Problem, name: str = "auto") -> Backend:
    """``choose_backend``, and on the CPU also a named backend whose layout can be made there for use on a GPU.

    Raises ValueError as ``choose_backend``.
    """
    if name != "auto" and problem.device_type == "cpu":
        backend = get_backend(name)
        if backend.packs_on_cpu and backend.covered(replace(problem, device_type=backend.device_type)):
            return backend
    return choose_backend(problem, name)


@cache
def cuda_kernel(operation: Literal["front", "schedule", "combine"], device: torch.device) -> Any:
    """The module ``kernels.<operation>_cuda`` where ``device`` runs it, else None."""
    if device.type != "cuda":
        return None
    from rankmoe.kernels import nvrtc

    return import_module(f"{__package__}.kernels.{operation}_cuda") if nvrtc.can_launch(device) else None


@cache
def triton_kernel(
    operation: Literal["route", "quantize", "pack", "schedule", "combine", "routing_metadata"], device: torch.device
) -> Any:
    """The module ``kernels.<operation>_triton`` where ``device`` is a GPU that Triton is installed for, else None."""
    if device.type != "cuda":
        return None
    from rankmoe.kernels import triton_support

    return import_module(f"{__package__}.kernels.{operation}_triton") if triton_support.available(device) else None
