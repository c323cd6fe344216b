"""Host side of ``experts_common.cuh``: what the launches of the expert GEMMs share."""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from rankmoe.kernels import nvrtc
from rankmoe.layout import Layout
from rankmoe.types import GROUP_SIZE, Activation, ExpertWeights, MXTensor, SiTU

TILE = 64
STEP = 128
#: Bytes of half a step: 32 outputs by 128 inputs in half bytes, and their 128 scales.
HALF_BYTES = 2048 + 128
#: What a block may use of a multiprocessor's shared memory, and what the system takes beside it for each block.
MAX_SHARED_BYTES, RESERVED_SHARED_BYTES = 232_448, 1024


@dataclass(frozen=True)
class Stage:
    """One of the two GEMMs of some weights."""

    weights: ExpertWeights
    is_gate_up: bool

    @property
    def weight(self) -> MXTensor:
        """[L, out, in] mxfp4, packed."""
        return self.weights.w13 if self.is_gate_up else self.weights.w2

    @property
    def factor(self) -> torch.Tensor | None:
        """[L] float32 or None."""
        return self.weights.w13_factor if self.is_gate_up else self.weights.w2_factor

    @property
    def bias(self) -> torch.Tensor | None:
        """[L, out] float32 or None."""
        return self.weights.w13_bias if self.is_gate_up else self.weights.w2_bias

    def check_buffer(self) -> None:
        """Raise ValueError unless both parts of the weight lie in the buffer that ``pack`` made."""
        buffer_of(self.weight)


def expert_nbytes(num_outputs: int, num_inputs: int) -> int:
    """Bytes of one expert's weight in the kernels' order, padding included."""
    return -(-num_outputs // TILE) * -(-num_inputs // STEP) * 2 * HALF_BYTES


def empty_packed(shape: tuple[int, ...], device: torch.device) -> MXTensor:
    """An uninitialised weight [L, out, in] in the kernels' order: one buffer, and its two parts."""
    num_experts, num_outputs, num_inputs = shape
    num_codes, num_scales = num_outputs * num_inputs // 2, num_outputs * num_inputs // GROUP_SIZE
    buffer = torch.empty(num_experts, expert_nbytes(num_outputs, num_inputs), dtype=torch.uint8, device=device)
    data = buffer[:, :num_codes].view(num_experts, num_outputs, num_inputs // 2)
    scale = buffer[:, num_codes : num_codes + num_scales].view(num_experts, num_outputs, num_inputs // GROUP_SIZE)
    return MXTensor(data, scale, "mxfp4")


def buffer_of(weight: MXTensor) -> torch.Tensor:
    """[L, bytes of an expert] uint8: all of a weight, padding included, on any device, meta too.

    Raises ValueError for a copy of its parts.
    """
    num_experts, num_outputs, num_inputs = weight.shape
    data, scale, nbytes = weight.data, weight.scale, expert_nbytes(num_outputs, num_inputs)
    is_joined = (
        data.untyped_storage().data_ptr() == scale.untyped_storage().data_ptr()
        and scale.storage_offset() - data.storage_offset() == num_outputs * num_inputs // 2
        and (num_experts == 1 or data.stride(0) == scale.stride(0) == nbytes)
    )
    if not is_joined:
        raise ValueError("weights: expected the buffer that pack made, got a copy of its parts")
    return data.as_strided((num_experts, nbytes), (nbytes, 1))


#: A packer that puts a bit elsewhere makes another version; tests/test_packed.py holds the bytes of each.
LAYOUT = Layout(
    version="cuda/1",
    empty=empty_packed,
    buffers=lambda weight: {"buffer": buffer_of(weight)},
    factor_dtypes={0: None, 1: torch.float32},
)


@cache
def source(name: str) -> str:
    """The text of a kernel file, ``experts_common.cuh`` before it."""
    directory = Path(__file__).parent
    return (directory / "experts_common.cuh").read_text() + (directory / name).read_text()


def macros_of(
    is_gate_up: bool,
    num_inputs: int,
    num_outputs: int,
    activation: Activation,
    *,
    has_bias: bool,
    has_factor: bool,
) -> nvrtc.Macros:
    """The macros that ``experts_common.cuh`` wants."""
    return (
        ("GATE_UP", int(is_gate_up)),
        ("NUM_INPUTS", num_inputs),
        ("NUM_OUTPUTS", num_outputs),
        ("HAS_BIAS", int(has_bias)),
        ("HAS_FACTOR", int(has_factor)),
        # What only gate_up reads is the same for every down, so that activations share its kernel.
        ("ACTIVATION", int(is_gate_up and not isinstance(activation, SiTU))),
        ("HAS_LIMIT", int(is_gate_up and not isinstance(activation, SiTU) and activation.limit is not None)),
    )


ActivationConstants = ctypes.c_float * 4


def activation_constants(activation: Activation) -> ctypes.Array[ctypes.c_float]:
    """What ``activate`` is given."""
    if isinstance(activation, SiTU):
        return ActivationConstants(
            activation.beta, activation.linear_beta, 1 / activation.beta, 1 / activation.linear_beta
        )
    return ActivationConstants(activation.alpha, activation.limit or 0.0, activation.up_offset)


def table_size(num_local_experts: int) -> int:
    """Experts that the kernels' tables hold, in steps so that few kernels are compiled."""
    return -(-num_local_experts // 128) * 128


@cache
def fingerprint() -> str:
    """Of what a tuned configuration's time depends on: digest of sources and layout, ``-``, compiler and version."""
    names = ("experts.cu", "experts_grouped.cu", "widen_rows.cu")
    parts = [*(source(name) for name in names), LAYOUT.version]
    version = nvrtc.compiler_version()
    compiler = "none" if version is None else f"nvrtc{version[0]}.{version[1]}"
    return f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()}-{compiler}"


@cache
def architecture(device: torch.device) -> str:
    """Of a GPU, as ``sm_90``."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@cache
def device_name(device: torch.device) -> str:
    """Of a GPU."""
    return str(torch.cuda.get_device_name(device))


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
