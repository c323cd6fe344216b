"""Host side of ``experts.cu``: the weights' layout, what the kernel covers, and its two launches.

Layout of one expert's [out, in] weight: tiles of 64 outputs, in each tile steps of 128 inputs, in each step two halves.
A step is one bulk copy; a half of it is 32 outputs of the tile by 128 inputs, in the order in which the 32 threads of a
warp read them: 16 bytes a thread and output, and then a scale byte for each of these. The sixteen codes of two words
are spread so that a rotation brings each pair to where bfloat16 has its sign and exponent.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rankmoe import tuned
from rankmoe.env import is_batch_invariant
from rankmoe.kernels import combine_cuda, experts_common, experts_grouped_cuda, nvrtc
from rankmoe.kernels.experts_common import (
    HALF_BYTES,
    MAX_SHARED_BYTES,
    RESERVED_SHARED_BYTES,
    STEP,
    TILE,
    ActivationConstants,
    Stage,
    buffer_of,
    empty_packed,
)
from rankmoe.kernels.experts_grouped_cuda import GroupedConfig
from rankmoe.quantize import ScaleError, groups_with_values
from rankmoe.tuned import TuningKey
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
    rows: most rows of an expert that one pass over its weights takes, 4, 8 or 16.
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
            and self.rows in (4, 8, 16)
            and 1 <= self.blocks <= 8
            and self.blocks * (self.shared_bytes(num_inputs, max_local_experts) + RESERVED_SHARED_BYTES)
            <= MAX_SHARED_BYTES + RESERVED_SHARED_BYTES
        )


#: Up to this many expected rows of the rank, blocks of twice the warps, one a multiprocessor, have more of the few
#: items' bytes under way.
FEW_ROWS = 4
#: What a launch can be configured by: the kernel of a decode step, or the one of many rows.
GemmConfig = ExpertsConfig | GroupedConfig
_KERNELS: dict[str, type[ExpertsConfig] | type[GroupedConfig]] = {"decode": ExpertsConfig, "grouped": GroupedConfig}


def config_values(config: GemmConfig) -> dict[str, Any]:
    """A configuration as plain values, for files."""
    kernel = next(name for name, cls in _KERNELS.items() if isinstance(config, cls))
    return {"kernel": kernel, **dataclasses.asdict(config)}


def config_from(values: Mapping[str, Any]) -> GemmConfig:
    """What ``config_values`` was given. Raises ValueError for anything else."""
    fields = dict(values)
    try:
        return _KERNELS[fields.pop("kernel")](**fields)
    except (KeyError, TypeError) as error:
        raise ValueError(f"values: expected a kernel of {', '.join(_KERNELS)} and its fields, got {values}") from error


def is_valid(config: GemmConfig, num_inputs: int, num_local_experts: int) -> bool:
    """Whether a launch of this configuration fits a multiprocessor and is written for."""
    if isinstance(config, GroupedConfig):
        return config.is_valid(num_local_experts)
    return config.is_valid(num_inputs, experts_common.table_size(num_local_experts))


def default_config(num_inputs: int, num_local_experts: int, num_rows: float | None = None) -> ExpertsConfig | None:
    """The first of a few configurations of the decode kernel that fits, or None.

    num_rows: what uniform routing gives the rank; None, and with ``RANKMOE_BATCH_INVARIANT`` every number, gets the
        configuration for many.
    """
    is_few = num_rows is not None and num_rows <= FEW_ROWS and not is_batch_invariant()
    return _first_config(num_inputs, experts_common.table_size(num_local_experts), is_few)


@cache
def _first_config(num_inputs: int, max_local_experts: int, is_few: bool) -> ExpertsConfig | None:
    few = ExpertsConfig(16, 1, 8, 2, 1, 1)
    candidates = (
        *([few] if is_few else []),
        ExpertsConfig(8, 1, 8, 2, 1, 2),
        few,
        ExpertsConfig(8, 1, 4, 1, 1, 2),
        ExpertsConfig(16, 1, 4, 2, 1, 1),
        ExpertsConfig(8, 1, 4, 2, 1, 1),
    )
    return next((config for config in candidates if config.is_valid(num_inputs, max_local_experts)), None)


def heuristic_config(
    num_inputs: int, num_local_experts: int, num_rows: float, *, has_masks: bool, architecture: str
) -> GemmConfig:
    """What is launched where nothing was tuned.

    num_rows: what uniform routing gives the rank; from shapes alone, so the same for global and rank-local ids.
    has_masks: whether the schedule has token masks, which a decode step's has.
    """
    # The sums of the two kernels have another order each.
    if (
        not has_masks
        and not is_batch_invariant()
        and experts_grouped_cuda.is_chosen(num_rows, num_local_experts, architecture)
    ):
        return experts_grouped_cuda.DEFAULT_CONFIG
    config = default_config(num_inputs, num_local_experts, num_rows)
    assert config is not None, "checked when the weights were packed"
    return config


def tuning_key(stage: Stage, num_slots: int, device: torch.device) -> TuningKey:
    """The key of one GEMM of some weights for a batch of ``num_slots`` tokens by experts a token."""
    num_local_experts, num_outputs, num_inputs = stage.weight.shape
    return TuningKey(
        stage="gate_up" if stage.is_gate_up else "down",
        num_local_experts=num_local_experts,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        activation=activation_name(stage.weights.activation) if stage.is_gate_up else "",
        has_bias=stage.bias is not None,
        expected_rows=tuned.expected_rows(num_slots, num_local_experts, stage.weights.placement.num_experts),
        architecture=experts_common.architecture(device),
    )


def activation_name(activation: Activation) -> str:
    """What gate_up is compiled for."""
    if isinstance(activation, SiTU):
        return "situ"
    return "swiglu" if activation.limit is None else "swiglu-limit"


def chosen_config(stage: Stage, num_slots: int, *, has_masks: bool, device: torch.device) -> GemmConfig:
    """The tuned configuration where there is one that fits, else the heuristic one."""
    num_local_experts, _, num_inputs = stage.weight.shape
    if not is_batch_invariant():
        key = tuning_key(stage, num_slots, device)
        answer = tuned.lookup(key, experts_common.fingerprint(), experts_common.device_name(device))
        if answer.values is not None:
            config = config_from(answer.values)
            if is_valid(config, num_inputs, num_local_experts) and not (
                has_masks and isinstance(config, GroupedConfig)
            ):
                return config
    num_rows = num_slots * num_local_experts / stage.weights.placement.num_experts
    architecture = experts_common.architecture(device)
    return heuristic_config(num_inputs, num_local_experts, num_rows, has_masks=has_masks, architecture=architecture)


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
_TILES_AT_ONCE = 2


def _rows_of_tiles(num_outputs: int, is_gate_up: bool) -> torch.Tensor:
    """[tiles, TILE] int64. Row of the checkpoint at each place of a tile; num_outputs and more for padding."""
    if not is_gate_up:
        return torch.arange(-(-num_outputs // TILE) * TILE).view(-1, TILE)
    return torch.arange(num_outputs).view(2, -1, TILE // 2).transpose(0, 1).reshape(-1, TILE)


#: Of the eight pairs of codes that two words hold: how far left ``decode`` in experts_common.cuh rotates for each, and
#: from which word; None where from what the other pairs leave of both.
_ROTATIONS = ((0, 0), (4, 0), (10, 0), (8, None), (2, 1), (6, 1), (12, 1), (14, None))
#: Bits of a half of the first word that the pairs of it alone leave.
_REST_OF_FIRST = 0x0603
#: Bits of a half that a pair's codes are wanted at: magnitude from its lowest bit on, sign.
_WANTED_BITS = (6, 7, 8, 15)


def _code_table() -> torch.Tensor:
    """[8 * 256] int64. What the p-th of eight bytes, two codes, adds to two words, first low: entry 256 p + byte."""
    table = torch.zeros(8, 256, dtype=torch.int64)
    byte = torch.arange(256)
    for pair, (rotation, word) in enumerate(_ROTATIONS):
        for half in range(2):
            for bit, wanted in enumerate(_WANTED_BITS):
                place = (wanted + 16 * half - rotation) % 32
                is_second = not _REST_OF_FIRST >> place % 16 & 1 if word is None else word == 1
                table[pair] |= (byte >> (4 * half + bit) & 1) << (place + 32 * is_second)
    return table.flatten()


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
    byte = codes.view(-1, 8).int() + 256 * torch.arange(8, dtype=torch.int32, device=codes.device)
    words = torch.nn.functional.embedding(byte, table[:, None]).sum(1, dtype=torch.int64).view(torch.int32)
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
    config: GemmConfig | None = None,
) -> MXTensor:
    """[T, H] MXFP8 activations to the [R, I] MXFP8 middle; see ``rankmoe.experts.gate_up``.

    The middle lies in ``out`` where that is contiguous. No host sync; capturable.
    """
    middle = middle_in(out)
    if out.numel():
        _run(Stage(weights, True), x, schedule, middle, None, config)
    return middle


def down(
    middle: MXTensor,
    schedule: ExpertSchedule,
    weights: ExpertWeights,
    out: torch.Tensor,
    *,
    config: GemmConfig | None = None,
    is_chained: bool = False,
) -> torch.Tensor:
    """[R, I] MXFP8 middle to [R, H] float32 rows; see ``rankmoe.experts.down``.

    is_chained: the launch before this one in the stream is the gate_up of the same schedule, so that the schedule may
        be read, and weights fetched, while that one still runs.
    Rows beyond the schedule's last one keep what ``out`` holds. No host sync; capturable.
    """
    rows = out if out.is_contiguous() else torch.empty(out.shape, device=out.device)
    if out.numel():
        _run(Stage(weights, False), middle, schedule, None, rows, config, is_chained)
    return rows


def _run(
    stage: Stage,
    x: MXTensor,
    schedule: ExpertSchedule,
    middle: MXTensor | None,
    rows: torch.Tensor | None,
    config: GemmConfig | None,
    is_chained: bool = False,
) -> None:
    """One GEMM of either kernel, by what its configuration is for."""
    config = config or _config_for(stage, schedule)
    if isinstance(config, GroupedConfig):
        experts_grouped_cuda.launch(stage, x, schedule, middle, rows, config)
    else:
        _launch(stage, x, _Source.of(schedule), middle, rows, config, is_chained)


def _config_for(stage: Stage, schedule: ExpertSchedule) -> GemmConfig:
    has_masks = schedule.expert_token_mask is not None
    return chosen_config(stage, schedule.slot_rows.numel(), has_masks=has_masks, device=schedule.row_tokens.device)


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
    source, activated = _Source(expert_token_mask=expert_token_mask), middle_in(middle)
    first, second = Stage(weights, True), Stage(weights, False)
    configs = []
    for stage in (first, second):
        config = chosen_config(stage, routing.topk_ids.numel(), has_masks=True, device=x.data.device)
        assert isinstance(config, ExpertsConfig), "with masks nothing else is chosen"
        configs.append(config)
    _launch(first, x, source, activated, None, configs[0])
    _launch(second, activated, source, None, rows, configs[1], is_chained=True)
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
    stage: Stage,
    x: MXTensor,
    source: _Source,
    middle: MXTensor | None,
    rows: torch.Tensor | None,
    config: ExpertsConfig,
    is_chained: bool = False,
) -> None:
    num_experts = stage.weight.shape[0]
    device = x.data.device
    stage.check_buffer()
    data, scale = x.data.contiguous(), x.scale.contiguous()
    kernel = kernel_for(stage, config, from_masks=source.expert_token_mask is not None)
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
        activation=experts_common.activation_constants(stage.weights.activation),
    )
    num_blocks = config.blocks * experts_common.num_multiprocessors(device)
    with torch.cuda.device(device):
        kernel.launch(device.index, num_blocks, 32 * (config.warps + config.finishers), arguments)


def kernel_for(stage: Stage, config: ExpertsConfig, *, from_masks: bool) -> nvrtc.Kernel:
    """The kernel that a launch takes; compiled when it is prepared or launched first."""
    num_experts, num_outputs, num_inputs = stage.weight.shape
    macros = macros_of(
        stage.is_gate_up,
        num_inputs,
        num_outputs,
        num_experts,
        stage.weights.activation,
        config,
        from_masks=from_masks,
        has_bias=stage.bias is not None,
        has_factor=stage.factor is not None,
    )
    return _kernel(macros, config.shared_bytes(num_inputs, experts_common.table_size(num_experts)))


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
    common = experts_common.macros_of(
        is_gate_up, num_inputs, num_outputs, activation, has_bias=has_bias, has_factor=has_factor
    )
    return (
        *common,
        ("MAX_LOCAL_EXPERTS", experts_common.table_size(num_local_experts)),
        ("WARPS", config.warps),
        ("DEPTH", config.depth),
        ("ROWS", config.rows),
        ("FINISHERS", config.finishers),
        ("BUFFERS", config.buffers),
        ("BLOCKS", config.blocks),
        ("FROM_MASKS", int(from_masks)),
    )


def source() -> str:
    """The text of ``experts.cu`` and what stands before it."""
    return experts_common.source("experts.cu")


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
        ("activation", ActivationConstants),
    ]
