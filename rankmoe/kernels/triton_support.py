"""What the Triton kernels share: whether this machine can run them, and on which device a launch goes.

Importing this module needs no Triton; the modules named ``*_triton`` do, so ask ``available()`` before importing one.
"""

from __future__ import annotations

import contextlib
import importlib.util
from contextlib import AbstractContextManager

import torch


def available(device: torch.device | int | None = None) -> bool:
    """True where Triton is installed and can run for ``device``: on a GPU, or anywhere in its interpreter."""
    if importlib.util.find_spec("triton") is None:
        return False
    if interprets():
        return True
    if isinstance(device, torch.device) and device.type != "cuda":
        return False
    return torch.cuda.is_available()


def interprets() -> bool:
    """True where kernels run in Triton's interpreter on the CPU (``TRITON_INTERPRET=1`` before Triton's import)."""
    try:
        from triton import knobs
    except ImportError:  # installed, but not whole
        return False
    return bool(knobs.runtime.interpret)


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make a tensor's GPU the current one for a launch: Triton launches there, on torch's current stream."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else contextlib.nullcontext()


def check_same_device(expected: torch.device, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError, naming the argument, unless every tensor that is given lies on the expected device."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != expected:
            raise ValueError(f"{name}: expected device {expected}, got {tensor.device}")


def check_output(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise TypeError or ValueError unless a tensor to write is contiguous and has this shape and dtype."""
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype}, got {tensor.dtype}")
    if tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(f"{name}: expected contiguous {shape}, got {tuple(tensor.shape)} strides {tensor.stride()}")


def next_power_of_2(number: int) -> int:
    """Smallest power of two that is at least ``number`` and at least 1; Triton's tiles have such sizes."""
    return 1 << max(0, number - 1).bit_length()
