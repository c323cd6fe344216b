"""Host side of ``experts.cu``: the weights' layout, what the kernel covers, and its two launches.

Layout of one expert's [out, in] weight: tiles of 64 outputs, in each tile steps of 128 inputs, in each step two halves.
A step is one bulk copy; a half of it is 32 outputs of the tile by 128 inputs, in the order in which the 32 threads of a
warp read them: 16 bytes a thread and output, and then a scale byte for each of these. The eight codes of a word are
spread so that a shift brings each pair to where bfloat16 has its sign and exponent.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from rankmoe.kernels import combine_cuda, nvrtc
from rankmoe.layout import Layout
from rankmoe.quantize import ScaleError, groups_with_values
from rankmoe.types import (
    GROUP_SIZE,
    Activation,
    ExpertSchedule,
    ExpertSource,
    ExpertWeights,
    MXTensor,
    PackedExperts,
    Problem,
    Routing,
    SiTU,
)

TILE = 64
STEP = 128
#: Bytes of half a step: 32 outputs by 128 inputs in half bytes, and their 128 scales.
HALF_BYTES = 2048 + 128
#: What a block may use of a multiprocessor's shared memory, and what the system takes beside it for each block.
MAX_SHARED_BYTES, RESERVED_SHARED_BYTES = 232_448, 1024
MAX_LOCAL_EXPERTS = 1024
#: A stored scale byte is the checkpoint's plus this, the exponent of the factor that e2m1 bits in bfloat16 want.
_SCALE_OFFSET = 126
#: Checkpoint scale bytes that need no factor; the smallest differences below are exact as bfloat16 subnormals.
MAX_SCALE_BYTE = 128
MIN_SCALE_BYTE = -5
_NEUTRAL_SCALE_BYTE = 127


@dataclass(frozen=True)
class ExpertsConfig:
    """Choices that change the speed of a launch and, but for the order of adding, nothing else.

    warps: multiplying warps of a block; they share an output's inputs, so the order of adding depends on it.
    depth: steps that each of them has in its ring.
    rows: rows of an expert that one pass over its weights takes, 4 or 8.
    finishers: warps that add up and write outputs.
    buffers: items whose parts may wait for them.
    blocks: blocks that share a multiprocessor.
    """

    warps: int = 8
    depth: int = 1
    rows: int = 8
    finishers: int = 2
    buffers: int = 1
    blocks: int = 2

    def shared_bytes(self, num_inputs: int, max_local_experts: int) -> int:
        """Shared memory of a block, as ``struct Shared`` lays it out."""
        steps = -(-num_inputs // STEP)
        ring = self.warps * self.depth * 2 * HALF_BYTES
        inputs = self.rows * steps * STEP * 2
        partial = self.buffers * min(steps, self.warps) * self.rows * TILE * 4
        barriers = (self.warps * self.depth + 2 * self.buffers) * 8
        tables = 2 * (max_local_experts + 1) * 4 + (self.warps + self.finishers) * 8
        return -(-(ring + inputs + partial + barriers + tables) // 128) * 128

    def is_valid(self, num_inputs: int, max_local_experts: int) -> bool:
        """Whether a block fits a multiprocessor."""
        return (
            self.warps >= 1
            and self.finishers >= 1
            and self.warps + self.finishers <= 32
            and 1 <= self.depth <= 32
            and 1 <= self.buffers <= 32
            and self.rows in (4, 8)
            and 1 <= self.blocks <= 8
            and self.blocks * (self.shared_bytes(num_inputs, max_local_experts) + RESERVED_SHARED_BYTES)
            <= MAX_SHARED_BYTES + RESERVED_SHARED_BYTES
        )


@cache
def default_config(num_inputs: int, num_local_experts: int) -> ExpertsConfig | None:
    """The first of a few configurations that fits, or None."""
    tables = _table_size(num_local_experts)
    candidates = (
        ExpertsConfig(8, 1, 8, 2, 1, 2),
        ExpertsConfig(8, 1, 4, 1, 1, 2),
        ExpertsConfig(16, 1, 8, 2, 1, 1),
        ExpertsConfig(16, 1, 4, 2, 1, 1),
        ExpertsConfig(8, 1, 4, 2, 1, 1),
    )
    return next((config for config in candidates if config.is_valid(num_inputs, tables)), None)


def available() -> bool:
    """Whether a GPU that the kernel was tested on, NVRTC and NVIDIA's driver bindings are here."""
    return nvrtc.can_launch()


def covered(problem: Problem) -> bool:
    """Whether every rule of docs/numerics.md is followed for a problem."""
    sizes = (problem.hidden_size, problem.intermediate_size)
    return (
        problem.device_type == "cuda"
        and 0 < problem.num_local_experts <= MAX_LOCAL_EXPERTS
        and all(default_config(size, problem.num_local_experts) is not None for size in sizes)
    )


# --- layout ----------------------------------------------------------------------------------------------------------
def pack(w13: ExpertSource, w2: ExpertSource, device: torch.device) -> PackedExperts:
    """Checkpoint order to the kernel's order on a device, an expert at a time and a few tiles of it at once.

    ``data`` and ``scale`` of a packed tensor have the logical shape and are the two parts of an expert's buffer; codes
    and scales are interleaved in it, so neither part means anything alone.
    Raises ScaleError for a scale that the arithmetic cannot hold.
    """
    packed_w13, w13_factor = _pack_one("w13", w13, True, device)
    packed_w2, w2_factor = _pack_one("w2", w2, False, device)
    return PackedExperts(packed_w13, packed_w2, w13_factor, w2_factor)


def expert_nbytes(num_outputs: int, num_inputs: int) -> int:
    """Bytes of one expert's weight in the kernel's order, padding included."""
    return -(-num_outputs // TILE) * -(-num_inputs // STEP) * 2 * HALF_BYTES


def empty_packed(shape: tuple[int, ...], device: torch.device) -> MXTensor:
    """An uninitialised weight [L, out, in] in the kernel's order: one buffer, and its two parts."""
    num_experts, num_outputs, num_inputs = shape
    num_codes, num_scales = num_outputs * num_inputs // 2, num_outputs * num_inputs // GROUP_SIZE
    buffer = torch.empty(num_experts, expert_nbytes(num_outputs, num_inputs), dtype=torch.uint8, device=device)
    data = buffer[:, :num_codes].view(num_experts, num_outputs, num_inputs // 2)
    scale = buffer[:, num_codes : num_codes + num_scales].view(num_experts, num_outputs, num_inputs // GROUP_SIZE)
    return MXTensor(data, scale, "mxfp4")


def buffer_of(weight: MXTensor) -> torch.Tensor:
    """[L, bytes of an expert] uint8: all of a weight, padding included. ValueError for a copy of its parts."""
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


def _pack_one(
    name: str, source: ExpertSource, is_gate_up: bool, device: torch.device
) -> tuple[MXTensor, torch.Tensor | None]:
    num_experts, num_outputs, _ = source.shape
    packed = empty_packed(source.shape, device)
    buffer = buffer_of(packed)
    rows = _rows_of_tiles(num_outputs, is_gate_up).to(device)
    table = _code_table().to(device)
    shifts = torch.zeros(num_experts, dtype=torch.int32)
    for expert in range(num_experts):
        shifts[expert] = _pack_expert(name, expert, source, rows, table, buffer[expert])
    return packed, torch.exp2(shifts.double()).float().to(device) if bool(shifts.any()) else None


def _pack_expert(
    name: str, expert: int, source: ExpertSource, rows: torch.Tensor, table: torch.Tensor, out: torch.Tensor
) -> int:
    """Pack an expert into its part of the buffer; returns the octaves of its factor.

    In a function of its own, so that no expert is held while the next one is fetched.
    """
    weight = source[expert].to(out.device)
    scale, shift = stored_scales(name, expert, weight)
    num_tiles, num_steps = rows.shape[0], -(-weight.shape[1] // STEP)
    slots = out.view(num_tiles, num_steps, 2, HALF_BYTES)
    for first in range(0, num_tiles, _TILES_AT_ONCE):
        tiles = slice(first, first + _TILES_AT_ONCE)
        slots[tiles] = _pack_tiles(weight.data, scale, rows[tiles], table, num_steps)
    return shift


#: Tiles that are packed together: the temporaries stay far below one expert.
_TILES_AT_ONCE = 4


def _rows_of_tiles(num_outputs: int, is_gate_up: bool) -> torch.Tensor:
    """[tiles, TILE] int64. Row of the checkpoint at each place of a tile; num_outputs and more for padding."""
    if not is_gate_up:
        return torch.arange(-(-num_outputs // TILE) * TILE).view(-1, TILE)
    return torch.arange(num_outputs).view(2, -1, TILE // 2).transpose(0, 1).reshape(-1, TILE)


def _code_table() -> torch.Tensor:
    """[4 * 256] int32. What the p-th byte of a group of four, two codes, adds to a word: entry 256 p + byte."""
    magnitude_bits, sign_bits = torch.tensor([6, 3, 0, 9])[:, None], torch.tensor([15, 12, 14, 13])[:, None]
    code = torch.arange(16)
    half = ((code & 7) << magnitude_bits) + ((code >> 3) << sign_bits)
    byte = torch.arange(256)
    word = half[:, byte & 15] + (half[:, byte >> 4] << 16)
    return torch.where(word >= 2**31, word - 2**32, word).int().flatten()


def _pack_tiles(
    data: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, table: torch.Tensor, num_steps: int
) -> torch.Tensor:
    """[tiles, steps, 2, HALF_BYTES] uint8 of the given rows of an expert's data and stored scales."""
    (num_tiles, _), num_outputs = rows.shape, data.shape[0]
    is_padding = (rows.flatten() >= num_outputs)[:, None]
    rows = rows.flatten().clamp(max=num_outputs - 1)
    codes = torch.nn.functional.pad(data[rows], (0, num_steps * STEP // 2 - data.shape[1])).masked_fill(is_padding, 0)
    scale = torch.nn.functional.pad(scale[rows], (0, num_steps * STEP // GROUP_SIZE - scale.shape[1]))
    # A row's place is (side, half, block, quad row), an input's (step, quad thread, byte).
    byte = codes.view(-1, 4).int() + 256 * torch.arange(4, dtype=torch.int32, device=codes.device)
    words = torch.nn.functional.embedding(byte, table[:, None]).sum(1, dtype=torch.int32)
    words = words.view(num_tiles, 2, 2, 2, 8, num_steps, 4, 4).permute(0, 5, 2, 3, 1, 4, 6, 7).contiguous()
    scales = scale.view(num_tiles, 2, 2, 2, 8, num_steps, 4).permute(0, 5, 2, 4, 6, 3, 1)
    shape = (num_tiles, num_steps, 2, -1)
    return torch.cat([words.view(torch.uint8).view(shape), scales.reshape(shape)], dim=-1)


def stored_scales(name: str, expert: int, weight: MXTensor) -> tuple[torch.Tensor, int]:
    """([out, groups] uint8 as the kernel reads them, octaves that the expert's factor makes up for).

    Groups of zeros have no say. Raises ScaleError for the byte of NaN and for scales too far below the largest.
    """
    has_value, scale = groups_with_values(weight), weight.scale.to(torch.int16)
    largest = int(torch.where(has_value & (scale < 255), scale, 0).amax())
    shift = max(0, largest - MAX_SCALE_BYTE)
    is_wrong = (has_value & (scale - shift < MIN_SCALE_BYTE)) | (scale == 255)
    if bool(is_wrong.any()):
        row, group = is_wrong.nonzero()[0].tolist()
        smallest = max(0, MIN_SCALE_BYTE + shift)
        expected = f"scale bytes from {smallest} to 254 in an expert whose largest is {largest}"
        raise ScaleError(name, expert, row, group, expected, int(scale[row, group]))
    return torch.where(has_value, scale - shift + _SCALE_OFFSET, _NEUTRAL_SCALE_BYTE).to(torch.uint8), shift


# --- launches --------------------------------------------------------------------------------------------------------
def gate_up(
    x: MXTensor,
    schedule: ExpertSchedule,
    weights: ExpertWeights,
    out: torch.Tensor,
    *,
    config: ExpertsConfig | None = None,
) -> MXTensor:
    """[T, H] MXFP8 activations to the [R, I] MXFP8 middle; see ``rankmoe.experts.gate_up``.

    The middle lies in ``out`` where that is contiguous. No host sync; capturable.
    """
    middle = middle_in(out)
    if out.numel():
        _launch(_Stage(weights, True), x, _Source.of(schedule), middle, None, config)
    return middle


def down(
    middle: MXTensor,
    schedule: ExpertSchedule,
    weights: ExpertWeights,
    out: torch.Tensor,
    *,
    config: ExpertsConfig | None = None,
    is_chained: bool = False,
) -> torch.Tensor:
    """[R, I] MXFP8 middle to [R, H] float32 rows; see ``rankmoe.experts.down``.

    is_chained: the launch before this one in the stream is the gate_up of the same schedule, so that the schedule may
        be read, and weights fetched, while that one still runs.
    Rows beyond the schedule's last one keep what ``out`` holds. No host sync; capturable.
    """
    rows = out if out.is_contiguous() else torch.empty(out.shape, device=out.device)
    if out.numel():
        _launch(_Stage(weights, False), middle, _Source.of(schedule), None, rows, config, is_chained)
    return rows


def gemms(
    x: MXTensor, schedule: ExpertSchedule, weights: ExpertWeights, middle: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """gate_up and down, whose weights are fetched while gate_up still runs; scratch as theirs. [R, H] float32."""
    return down(gate_up(x, schedule, weights, middle), schedule, weights, rows, is_chained=True)


def middle_in(out: torch.Tensor) -> MXTensor:
    """An MXFP8 tensor of the scratch's shape, in its memory."""
    num_rows, width = out.shape
    num_bytes = num_rows * width
    scratch = out if out.is_contiguous() else torch.empty(out.shape, device=out.device)
    scratch = scratch.view(-1).view(torch.uint8)
    data = scratch[:num_bytes].view(torch.float8_e4m3fn).view(num_rows, width)
    scale = scratch[num_bytes : num_bytes + num_bytes // GROUP_SIZE].view(num_rows, width // GROUP_SIZE)
    return MXTensor(data, scale, "mxfp8")


@dataclass(frozen=True)
class _Stage:
    """One of the two GEMMs of some weights."""

    weights: ExpertWeights
    is_gate_up: bool

    @property
    def weight(self) -> MXTensor:
        return self.weights.w13 if self.is_gate_up else self.weights.w2

    @property
    def factor(self) -> torch.Tensor | None:
        return self.weights.w13_factor if self.is_gate_up else self.weights.w2_factor

    @property
    def bias(self) -> torch.Tensor | None:
        return self.weights.w13_bias if self.is_gate_up else self.weights.w2_bias


def masked(
    x: MXTensor,
    routing: Routing,
    expert_token_mask: torch.Tensor,
    weights: ExpertWeights,
    middle: torch.Tensor,
    rows: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """gate_up, down and combine in three launches that overlap, from the token masks of 1 to 64 tokens.

    x: [T, H] mxfp8. routing: [T, K] global ids and weights, made with the masks [L] int64 by the front.
    middle, rows: scratch of at least [R, I] and [R, H] float32, R the largest number of rows that T tokens can give.
    Returns [T, H] ``out_dtype``. No host sync; capturable.
    """
    placement = weights.placement
    source = _Source(expert_token_mask=expert_token_mask)
    activated = middle_in(middle)
    _launch(_Stage(weights, True), x, source, activated, None)
    _launch(_Stage(weights, False), activated, source, None, rows, is_chained=True)
    local_range = placement.local_range
    return combine_cuda.combine_masks(
        rows,
        routing,
        expert_token_mask,
        num_experts=placement.num_experts,
        local_expert_offset=local_range.offset if local_range else 0,
        expert_map=None if local_range else placement.expert_map_on(x.data.device),
        out_dtype=out_dtype,
        is_chained=True,
    )


@dataclass(frozen=True)
class _Source:
    """Where the kernel finds the rows of each expert: token masks, or offsets and row tokens."""

    expert_token_mask: torch.Tensor | None = None
    expert_offsets: torch.Tensor | None = None
    row_tokens: torch.Tensor | None = None

    @classmethod
    def of(cls, schedule: ExpertSchedule) -> _Source:
        if schedule.expert_token_mask is not None:
            return cls(expert_token_mask=schedule.expert_token_mask)
        return cls(expert_offsets=schedule.expert_offsets, row_tokens=schedule.row_tokens)


def _launch(
    stage: _Stage,
    x: MXTensor,
    source: _Source,
    middle: MXTensor | None,
    rows: torch.Tensor | None,
    config: ExpertsConfig | None = None,
    is_chained: bool = False,
) -> None:
    num_experts, num_outputs, num_inputs = stage.weight.shape
    device = x.data.device
    config = config or default_config(num_inputs, num_experts)
    assert config is not None, "checked when the weights were packed"
    _check_buffer(stage.weight)
    data, scale = x.data.contiguous(), x.scale.contiguous()
    kernel = _kernel(
        macros_of(
            stage.is_gate_up,
            num_inputs,
            num_outputs,
            num_experts,
            stage.weights.activation,
            config,
            from_masks=source.expert_token_mask is not None,
            has_bias=stage.bias is not None,
            has_factor=stage.factor is not None,
        ),
        config.shared_bytes(num_inputs, _table_size(num_experts)),
    )
    arguments = ExpertsArguments(
        weights=stage.weight.data.data_ptr(),
        factor=nvrtc.address(stage.factor),
        bias=nvrtc.address(stage.bias),
        data=data.data_ptr(),
        scale=scale.data_ptr(),
        expert_token_mask=nvrtc.address(source.expert_token_mask),
        expert_offsets=nvrtc.address(source.expert_offsets),
        row_tokens=nvrtc.address(source.row_tokens),
        rows=nvrtc.address(rows),
        middle=None if middle is None else middle.data.data_ptr(),
        middle_scale=None if middle is None else middle.scale.data_ptr(),
        num_local_experts=num_experts,
        is_chained=is_chained,
        activation=_activation_constants(stage.weights.activation),
    )
    num_blocks = config.blocks * _num_multiprocessors(device)
    with torch.cuda.device(device):
        kernel.launch(device.index, num_blocks, 32 * (config.warps + config.finishers), arguments)


def _check_buffer(weight: MXTensor) -> None:
    """Raise ValueError unless both parts lie in the buffer that ``pack`` made."""
    num_experts, num_outputs, num_inputs = weight.shape
    is_joined = weight.scale.data_ptr() - weight.data.data_ptr() == num_outputs * num_inputs // 2
    if not is_joined or (num_experts > 1 and weight.data.stride(0) != expert_nbytes(num_outputs, num_inputs)):
        raise ValueError("weights: expected the buffer that pack made, got a copy of its parts")


def macros_of(
    is_gate_up: bool,
    num_inputs: int,
    num_outputs: int,
    num_local_experts: int,
    activation: Activation,
    config: ExpertsConfig,
    *,
    from_masks: bool,
    has_bias: bool,
    has_factor: bool,
) -> nvrtc.Macros:
    """The macros that ``experts.cu`` is compiled with."""
    return (
        ("GATE_UP", int(is_gate_up)),
        ("NUM_INPUTS", num_inputs),
        ("NUM_OUTPUTS", num_outputs),
        ("MAX_LOCAL_EXPERTS", _table_size(num_local_experts)),
        ("WARPS", config.warps),
        ("DEPTH", config.depth),
        ("ROWS", config.rows),
        ("FINISHERS", config.finishers),
        ("BUFFERS", config.buffers),
        ("BLOCKS", config.blocks),
        ("FROM_MASKS", int(from_masks)),
        ("HAS_BIAS", int(has_bias)),
        ("HAS_FACTOR", int(has_factor)),
        # What only gate_up reads is the same for every down, so that activations share its kernel.
        ("ACTIVATION", int(is_gate_up and not isinstance(activation, SiTU))),
        ("HAS_LIMIT", int(is_gate_up and not isinstance(activation, SiTU) and activation.limit is not None)),
    )


@cache
def source() -> str:
    """The text of ``experts.cu``."""
    return (Path(__file__).parent / "experts.cu").read_text()


@cache
def _kernel(macros: nvrtc.Macros, shared_bytes: int) -> nvrtc.Kernel:
    return nvrtc.Kernel(source(), "experts", dict(macros), shared_bytes)


class ExpertsArguments(ctypes.Structure):
    """The kernel's parameter; the same fields in the same order as in ``experts.cu``."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                "weights",
                "factor",
                "bias",
                "data",
                "scale",
                "expert_token_mask",
                "expert_offsets",
                "row_tokens",
                "rows",
                "middle",
                "middle_scale",
            )
        ),
        ("num_local_experts", ctypes.c_int),
        ("is_chained", ctypes.c_int),
        ("activation", ctypes.c_float * 3),
    ]


def _activation_constants(activation: Activation) -> ctypes.Array[ctypes.c_float]:
    constants = ctypes.c_float * 3
    if isinstance(activation, SiTU):
        return constants(activation.beta, activation.linear_beta, 0.0)
    return constants(activation.alpha, activation.limit or 0.0, activation.up_offset)


def _table_size(num_local_experts: int) -> int:
    """Experts that the kernel's tables hold, in steps so that few kernels are compiled."""
    return -(-num_local_experts // 128) * 128


@cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
