"""Host side of ``experts_grouped.cu`` and ``widen_rows.cu``: the expert GEMMs of more rows than a decode step has."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch

from rankmoe.kernels import experts_common, nvrtc
from rankmoe.kernels.experts_common import HALF_BYTES, MAX_SHARED_BYTES, STEP, ActivationConstants, Stage
from rankmoe.types import ExpertSchedule, MXTensor

#: wgmma, which only these have, is what the kernel multiplies with.
_ARCHITECTURE = "sm_90"
#: Rows that lie together in memory, bytes of a row's half step, bytes that a warpgroup's accumulators go through.
_ROW_BLOCK, _CHUNK_BYTES, _STAGED_BYTES = 8, 128, 32 * 76 * 4
#: Registers of a multiprocessor, what a thread of the streaming warpgroup keeps, and the most that a thread can have.
_REGISTERS, _STREAMING_REGISTERS, _MAX_REGISTERS = 65_536, 24, 240
_WIDEN_WARPS = 8


@dataclass(frozen=True)
class GroupedConfig:
    """Choices that change the speed of a launch and nothing else.

    columns: most rows of an expert that one pass over its weights takes; an expert's rows are shared out evenly.
    groups: multiplying warpgroups of a block.
    group_tiles: tiles of 64 outputs that each of them multiplies.
    stages: steps of 128 inputs that a block's ring holds. A block has a multiprocessor to itself.
    """

    columns: int = 112
    groups: int = 2
    group_tiles: int = 2
    stages: int = 4

    @property
    def num_threads(self) -> int:
        """Of a block: one more warpgroup streams."""
        return (self.groups + 1) * 128

    @property
    def registers(self) -> int:
        """Of a multiplying thread: an even part, and what the streaming warpgroup gives away."""
        at_launch = _REGISTERS // self.num_threads // 8 * 8
        free = at_launch * self.num_threads - _STREAMING_REGISTERS * 128
        return min(_MAX_REGISTERS, free // (self.groups * 128) // 8 * 8)

    def shared_bytes(self, num_local_experts: int) -> int:
        """Shared memory of a block of gate_up, the one that needs more, as ``struct Shared`` lays it out."""
        ring = self.stages * (2 * self.columns * _CHUNK_BYTES + self.groups * self.group_tiles * 2 * HALF_BYTES)
        staged = self.groups * _STAGED_BYTES
        tables = 2 * (experts_common.table_size(num_local_experts) + 1) * 4 + self.num_threads // 32 * 4
        return -(-(ring + staged + 2 * self.stages * 8 + tables) // 1024) * 1024

    def is_valid(self, num_local_experts: int) -> bool:
        """Whether the kernel is written for it and a block fits a multiprocessor."""
        return (
            self.columns % 16 == 0
            and 16 <= self.columns <= 128
            and 1 <= self.groups <= 7
            and 1 <= self.group_tiles <= 4
            # Accumulators and operands, with as many again as addresses and the finishing take.
            and self.group_tiles * (self.columns // 2 + 16) + 64 <= self.registers
            and 2 <= self.stages <= 16
            and self.shared_bytes(num_local_experts) <= MAX_SHARED_BYTES
        )

    def macros(self, num_local_experts: int) -> nvrtc.Macros:
        """What ``experts_grouped.cu`` is compiled with, beside what ``experts_common.cuh`` wants."""
        return (
            ("MAX_LOCAL_EXPERTS", experts_common.table_size(num_local_experts)),
            ("COLUMNS", self.columns),
            ("GROUPS", self.groups),
            ("GROUP_TILES", self.group_tiles),
            ("REGISTERS", self.registers),
            ("STAGES", self.stages),
        )


DEFAULT_CONFIG = GroupedConfig()
#: Mean rows an expert, were routing uniform, from which this is faster than experts.cu with its eight rows a pass.
FROM_ROWS = 8


def is_chosen(num_rows: float, num_local_experts: int, architecture: str) -> bool:
    """Whether these kernels are the heuristic choice, on a GPU that has their instructions.

    num_rows: what uniform routing gives the rank.
    """
    return architecture == _ARCHITECTURE and num_rows >= FROM_ROWS * num_local_experts


def launch(
    stage: Stage,
    x: MXTensor,
    schedule: ExpertSchedule,
    middle: MXTensor | None,
    rows: torch.Tensor | None,
    config: GroupedConfig = DEFAULT_CONFIG,
) -> None:
    """One GEMM. No host sync; capturable.

    x: [T, H] mxfp8 activations for gate_up, the [R, I] mxfp8 middle for down.
    middle: [R, I] mxfp8, what gate_up writes, else None. rows: [R, H] float32, what down writes, else None.
    """
    stage.check_buffer()
    num_experts, num_outputs, num_inputs = stage.weight.shape
    device = x.data.device
    macros = experts_common.macros_of(
        stage.is_gate_up,
        num_inputs,
        num_outputs,
        stage.weights.activation,
        has_bias=stage.bias is not None,
        has_factor=stage.factor is not None,
    )
    inputs, num_row_blocks = _widen(x, schedule, stage, macros, config)
    kernel = _kernel((*macros, *config.macros(num_experts)), config.shared_bytes(num_experts))
    arguments = GroupedArguments(
        weights=stage.weight.data.data_ptr(),
        factor=nvrtc.address(stage.factor),
        bias=nvrtc.address(stage.bias),
        inputs=inputs.data_ptr(),
        expert_offsets=schedule.expert_offsets.data_ptr(),
        rows=nvrtc.address(rows),
        middle=None if middle is None else middle.data.data_ptr(),
        middle_scale=None if middle is None else middle.scale.data_ptr(),
        num_row_blocks=num_row_blocks,
        num_local_experts=num_experts,
        activation=experts_common.activation_constants(stage.weights.activation),
    )
    with torch.cuda.device(device):
        kernel.launch(device.index, experts_common.num_multiprocessors(device), config.num_threads, arguments)


def _widen(
    x: MXTensor, schedule: ExpertSchedule, stage: Stage, macros: nvrtc.Macros, config: GroupedConfig
) -> tuple[torch.Tensor, int]:
    """Rows as the GEMM copies them, and blocks of eight rows of each half step."""
    num_experts, _, num_inputs = stage.weight.shape
    num_rows, num_chunks = schedule.row_tokens.shape[0], 2 * -(-num_inputs // STEP)
    num_row_blocks = num_rows // _ROW_BLOCK + num_experts
    # The last item of the last half step may read on to the width of its multiplication.
    size = (num_chunks * num_row_blocks * _ROW_BLOCK + config.columns) * _CHUNK_BYTES
    device = x.data.device
    inputs = torch.empty(size, dtype=torch.uint8, device=device)
    data, scale = x.data.contiguous(), x.scale.contiguous()
    kernel = _widen_kernel((*macros, ("HAS_TOKENS", int(stage.is_gate_up))))
    arguments = WidenArguments(
        data=data.data_ptr(),
        scale=scale.data_ptr(),
        row_tokens=schedule.row_tokens.data_ptr(),
        expert_offsets=schedule.expert_offsets.data_ptr(),
        out=inputs.data_ptr(),
        num_row_blocks=num_row_blocks,
        num_local_experts=num_experts,
    )
    num_blocks = min(-(-num_rows // _WIDEN_WARPS), 8 * experts_common.num_multiprocessors(device))
    with torch.cuda.device(device):
        kernel.launch(device.index, num_blocks, _WIDEN_WARPS * 32, arguments)
    return inputs, num_row_blocks


@cache
def source() -> str:
    """The text of ``experts_grouped.cu`` and what stands before it."""
    widths = range(16, 129, 16)
    return "".join(_multiply_add_columns(width) for width in widths) + experts_common.source("experts_grouped.cu")


def _multiply_add_columns(width: int) -> str:
    """A function of one wgmma: 64 outputs from registers by ``width`` columns, 16 inputs. Its operands are many."""
    num_sums = width // 2
    sums, places = ", ".join(f'"+f"(sum[{i}])' for i in range(num_sums)), ", ".join(f"%{i}" for i in range(num_sums))
    a, columns = ", ".join(f"%{num_sums + i}" for i in range(4)), f"%{num_sums + 4}"
    return f"""
__device__ __forceinline__ void multiply_add_columns(float (&sum)[{num_sums}], const unsigned (&a)[4],
                                                     unsigned long long columns) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16 {{{places}}}, {{{a}}}, {columns}, 1, 1, 1, 0;"
               : {sums} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns));
}}
"""


@cache
def _kernel(macros: nvrtc.Macros, shared_bytes: int) -> nvrtc.Kernel:
    return nvrtc.Kernel(source(), "experts_grouped", dict(macros), shared_bytes)


@cache
def _widen_kernel(macros: nvrtc.Macros) -> nvrtc.Kernel:
    return nvrtc.Kernel(experts_common.source("widen_rows.cu"), "widen_rows", dict(macros))


def _pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_void_p) for name in names]


class GroupedArguments(ctypes.Structure):
    """The GEMM's parameter; the same fields in the same order as in ``experts_grouped.cu``."""

    _fields_ = [
        *_pointers("weights", "factor", "bias", "inputs", "expert_offsets", "rows", "middle", "middle_scale"),
        ("num_row_blocks", ctypes.c_longlong),
        ("num_local_experts", ctypes.c_int),
        ("activation", ActivationConstants),
    ]


class WidenArguments(ctypes.Structure):
    """The row kernel's parameter; the same fields in the same order as in ``widen_rows.cu``."""

    _fields_ = [
        *_pointers("data", "scale", "row_tokens", "expert_offsets", "out"),
        ("num_row_blocks", ctypes.c_longlong),
        ("num_local_experts", ctypes.c_int),
    ]
