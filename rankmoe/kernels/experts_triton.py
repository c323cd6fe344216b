# mypy: disable-error-code="no-untyped-def"
"""The expert GEMMs in Triton, for any GPU that it supports and for its interpreter.

Weights stay in checkpoint order. A byte of them holds two neighbouring inputs, so rows are first brought to bfloat16 as
two planes, even and odd inputs, scales applied, which is exact; a step of the GEMM is then two multiplications, of the
low and of the high codes. gate_up computes the gate and the up of the same columns and activates and quantises them.

No sum is split among programs, and a step has the same inputs whatever the tile, so repeats have the same bits. A tile
is chosen by the rows that the shapes let expect; whether tiles of other sizes add up in the same order is the
compiler's choice, so across batch sizes the bits may differ.

With ``is_scaled`` the multiplication is ``tl.dot_scaled``, on codes and scales as they are: what GPUs with block-scaled
matrix instructions (compute capability 10) have in hardware. How exactly those add up could not be measured here, so
that is a backend of its own, which runs only where it is asked for by name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rankmoe.kernels import triton_support
from rankmoe.kernels.activation_triton import activate, activation_constants
from rankmoe.kernels.quantize_triton import encode_groups
from rankmoe.kernels.rows_triton import scale_of
from rankmoe.kernels.triton_support import next_power_of_2
from rankmoe.layout import in_checkpoint_order
from rankmoe.quantize import ScaleError, groups_with_values
from rankmoe.types import (
    GROUP_SIZE,
    ExpertSchedule,
    ExpertSource,
    ExpertWeights,
    MXTensor,
    PackedExperts,
    Problem,
)

available = triton_support.available

#: The largest scale byte whose product with 6 is a finite bfloat16.
MAX_SCALE_BYTE = 252
#: Major compute capability of the GPUs that have block-scaled matrix instructions and enough room for their tiles.
_SCALED_CAPABILITY = 10
_PAIRS_PER_BLOCK = 1024


@dataclass(frozen=True)
class TritonConfig:
    """The tile of one program.

    tokens: rows of one expert. outputs: of the weight; of gate_up half are gates and half ups. inputs: of a step.
    """

    tokens: int
    outputs: int
    inputs: int = 128
    num_warps: int = 4
    num_stages: int = 3


def covered(problem: Problem) -> bool:
    """Whether every rule of docs/numerics.md is followed for a problem: any, where Triton runs."""
    runs_on = "cpu" if triton_support.interprets() else "cuda"
    return problem.device_type == runs_on and problem.num_local_experts > 0


def scaled_available() -> bool:
    """Whether a GPU with block-scaled matrix instructions is here."""
    return available() and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == _SCALED_CAPABILITY


def scaled_approximated(problem: Problem) -> bool:
    """Whether a problem is computed by ``tl.dot_scaled``, whose order and precision of adding is the hardware's."""
    return problem.device_type == "cuda" and problem.num_local_experts > 0


def pack(w13: ExpertSource, w2: ExpertSource, device: torch.device) -> PackedExperts:
    """Checkpoint order as it is, on a device; tensors that are there already are not copied.

    Raises ScaleError for a scale that bfloat16 cannot hold times every code.
    """
    packed = PackedExperts(_contiguous(in_checkpoint_order(w13, device)), _contiguous(in_checkpoint_order(w2, device)))
    for name, tensor in (("w13", packed.w13), ("w2", packed.w2)):
        for expert in range(tensor.shape[0]):
            check_scales(name, expert, tensor[expert])
    return packed


def _contiguous(weight: MXTensor) -> MXTensor:
    return MXTensor(weight.data.contiguous(), weight.scale.contiguous(), weight.format)


def check_scales(name: str, expert: int, weight: MXTensor) -> None:
    """Raise ScaleError for a scale byte above ``MAX_SCALE_BYTE`` in a group that has values; 255 is NaN, as ever."""
    is_wrong = groups_with_values(weight) & (weight.scale > MAX_SCALE_BYTE) & (weight.scale < 255)
    if bool(is_wrong.any()):
        row, group = is_wrong.nonzero()[0].tolist()
        expected = f"scale bytes up to {MAX_SCALE_BYTE}, or 255 for NaN"
        raise ScaleError(name, expert, row, group, expected, int(weight.scale[row, group]))


def default_config(schedule: ExpertSchedule, num_experts: int) -> TritonConfig:
    """By the rows that uniform routing gives an expert; from shapes alone, so the same for global and local ids."""
    expected = schedule.slot_rows.numel() / num_experts
    tokens = next((tokens for tokens in (16, 32, 64) if expected <= tokens // 2), 128)
    return TritonConfig(tokens, 128, num_warps=8 if tokens == 128 else 4)


def gate_up(
    x: MXTensor,
    schedule: ExpertSchedule,
    weights: ExpertWeights,
    out: torch.Tensor,
    *,
    config: TritonConfig | None = None,
    is_scaled: bool = False,
) -> MXTensor:
    """[T, H] MXFP8 activations to the [R, I] MXFP8 middle; see ``rankmoe.experts.gate_up``.

    is_scaled: whether to multiply by ``tl.dot_scaled``.
    Rows beyond the schedule's last one hold anything. No host sync; capturable.
    """
    num_rows, width = out.shape
    data = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=out.device)
    scale = torch.empty(num_rows, width // GROUP_SIZE, dtype=torch.uint8, device=out.device)
    if num_rows:
        config = config or default_config(schedule, weights.placement.num_experts)
        outputs = (data.view(torch.uint8), scale)
        _launch(x, schedule, weights, weights.w13, weights.w13_bias, outputs, config, is_scaled, is_gate_up=True)
    return MXTensor(data, scale, "mxfp8")


def down(
    middle: MXTensor,
    schedule: ExpertSchedule,
    weights: ExpertWeights,
    out: torch.Tensor,
    *,
    config: TritonConfig | None = None,
    is_scaled: bool = False,
) -> torch.Tensor:
    """[R, I] MXFP8 middle to [R, H] float32 rows; see ``rankmoe.experts.down``.

    Rows beyond the schedule's last one keep what ``out`` holds. No host sync; capturable.
    """
    rows = out if out.is_contiguous() else torch.empty(out.shape, device=out.device)
    if rows.numel():
        config = config or default_config(schedule, weights.placement.num_experts)
        outputs = (rows, None)
        _launch(middle, schedule, weights, weights.w2, weights.w2_bias, outputs, config, is_scaled, is_gate_up=False)
    return rows


def _launch(
    x: MXTensor,
    schedule: ExpertSchedule,
    weights: ExpertWeights,
    weight: MXTensor,
    bias: torch.Tensor | None,
    outputs: tuple[torch.Tensor, torch.Tensor | None],
    config: TritonConfig,
    is_scaled: bool,
    *,
    is_gate_up: bool,
) -> None:
    num_experts, num_outputs, num_inputs = weight.shape
    num_rows = schedule.row_tokens.shape[0]
    row_tokens = schedule.row_tokens if is_gate_up else None
    x = MXTensor(x.data.contiguous(), x.scale.contiguous(), "mxfp8")
    even = odd = None
    if not is_scaled:
        even, odd = row_planes(x, schedule, row_tokens)
    num_columns = num_outputs // 2 if is_gate_up else num_outputs
    # Every tile but the last of each expert is full, and none is empty.
    num_tiles = min(num_rows, triton.cdiv(num_rows, config.tokens) + num_experts)
    with triton_support.on_device_of(x.scale):
        _gemm_kernel[(triton.cdiv(num_outputs, config.outputs), num_tiles)](
            even,
            odd,
            x.data.view(torch.uint8),
            x.scale,
            row_tokens,
            weight.data,
            weight.scale,
            schedule.expert_offsets,
            None if bias is None else bias.contiguous(),
            *outputs,
            num_columns=num_columns,
            num_inputs=num_inputs,
            is_gate_up=is_gate_up,
            is_scaled=is_scaled,
            **activation_constants(weights.activation),
            num_local_experts=num_experts,
            experts_per_block=next_power_of_2(num_experts),
            tokens=config.tokens,
            outputs=config.outputs,
            inputs=config.inputs,
            group_size=GROUP_SIZE,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


def row_planes(
    x: MXTensor, schedule: ExpertSchedule, row_tokens: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Even and odd inputs of each row, scales applied.

    row_tokens: [R] int32, which row of x each row is; None where they lie in order.
    Returns two [R, N/2] bfloat16, which holds these products exactly (below 2^-133, subnormal to it, they are rounded;
    scales that ``quantize_mxfp8`` writes are 2^-42 and above). The interpreter has no bfloat16: float32 there.
    """
    num_rows, num_pairs = schedule.row_tokens.shape[0], x.shape[1] // 2
    dtype = torch.float32 if triton_support.interprets() else torch.bfloat16
    even, odd = (torch.empty(num_rows, num_pairs, dtype=dtype, device=x.scale.device) for _ in range(2))
    with triton_support.on_device_of(x.scale):
        _planes_kernel[(num_rows, triton.cdiv(num_pairs, _PAIRS_PER_BLOCK))](
            x.data.view(torch.int16),
            x.scale,
            row_tokens,
            schedule.expert_offsets,
            even,
            odd,
            num_pairs,
            num_local_experts=schedule.num_local_experts,
            pairs_per_group=GROUP_SIZE // 2,
            block=_PAIRS_PER_BLOCK,
        )
    return even, odd


@triton.jit
def _planes_kernel(
    data,
    scale,
    row_tokens,
    expert_offsets,
    even,
    odd,
    num_pairs,
    num_local_experts: tl.constexpr,
    pairs_per_group: tl.constexpr,
    block: tl.constexpr,
):
    """Some pairs of inputs of one row. data: two codes to a word."""
    row = tl.program_id(0)
    if row >= tl.load(expert_offsets + num_local_experts):
        return
    source = row
    if row_tokens is not None:
        source = tl.load(row_tokens + row)
    pair = tl.program_id(1) * block + tl.arange(0, block)
    is_pair = pair < num_pairs
    codes = tl.load(data + source.to(tl.int64) * num_pairs + pair, mask=is_pair, other=0).to(tl.int32)
    num_groups = num_pairs // pairs_per_group
    byte = tl.load(scale + source.to(tl.int64) * num_groups + pair // pairs_per_group, mask=is_pair, other=127)
    factor = scale_of(byte.to(tl.int32))
    place = row.to(tl.int64) * num_pairs + pair
    tl.store(even + place, (_e4m3_value(codes & 0xFF) * factor).to(even.dtype.element_ty), mask=is_pair)
    tl.store(odd + place, (_e4m3_value((codes >> 8) & 0xFF) * factor).to(odd.dtype.element_ty), mask=is_pair)


@triton.jit
def _e4m3_value(code):
    """Float32 of e4m3 codes given as int32."""
    magnitude = code & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)  # below 2^-6 codes count 2^-9
    bits = value.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)
    return tl.where(magnitude == 0x7F, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _e2m1_value(bits):
    """Float32 of e2m1 codes whose magnitudes stand at bits 24..22 and signs at bit 31 of int32, zeros elsewhere.

    So they are 2^-126 times too small, a subnormal for the two smallest, and a power of two is all that is missing.
    """
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def _gemm_kernel(
    even,
    odd,
    data,
    scale,
    row_tokens,
    weight,
    weight_scale,
    expert_offsets,
    bias,
    out,
    out_scale,
    num_columns: tl.constexpr,
    num_inputs: tl.constexpr,
    is_gate_up: tl.constexpr,
    is_scaled: tl.constexpr,
    is_situ: tl.constexpr,
    beta: tl.constexpr,
    linear_beta: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    up_offset: tl.constexpr,
    num_local_experts: tl.constexpr,
    experts_per_block: tl.constexpr,
    tokens: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    group_size: tl.constexpr,
):
    """Some columns of some rows of one expert. out: the middle's codes and out_scale its scales, or float32 rows."""
    # The tiles of each expert, and the expert of this one.
    expert = tl.arange(0, experts_per_block)
    is_expert = expert < num_local_experts
    start = tl.load(expert_offsets + expert, mask=is_expert, other=0)
    count = tl.load(expert_offsets + 1 + expert, mask=is_expert, other=0) - start
    tiles = (count + tokens - 1) // tokens
    end = tl.cumsum(tiles, axis=0)
    tile = tl.program_id(1)
    own = tl.sum((end <= tile).to(tl.int32), axis=0)
    if own >= num_local_experts:
        return
    is_own = expert == own
    place = (tile - tl.sum(tl.where(expert < own, tiles, 0), axis=0)) * tokens
    row = tl.sum(tl.where(is_own, start, 0), axis=0) + place + tl.arange(0, tokens)
    is_row = place + tl.arange(0, tokens) < tl.sum(tl.where(is_own, count, 0), axis=0)

    # A tile of gate_up is half gates and half ups of the same columns.
    columns: tl.constexpr = outputs // 2 if is_gate_up else outputs
    first_column = tl.program_id(0) * columns
    place_out = tl.arange(0, outputs)
    column_of_output = first_column + place_out % columns
    num_outputs: tl.constexpr = 2 * num_columns if is_gate_up else num_columns
    output = own.to(tl.int64) * num_outputs + column_of_output + place_out // columns * num_columns
    is_output = column_of_output < num_columns
    source = row
    if row_tokens is not None and is_scaled:
        source = tl.load(row_tokens + row, mask=is_row, other=0)
    source = source.to(tl.int64)[None, :]

    total = tl.zeros((outputs, tokens), tl.float32)
    num_groups: tl.constexpr = num_inputs // group_size
    for first in range(0, num_inputs, inputs):
        byte = first // 2 + tl.arange(0, inputs // 2)
        group = first // group_size + tl.arange(0, inputs // group_size)
        is_byte = is_output[:, None] & (byte < num_inputs // 2)[None, :]
        is_group = is_output[:, None] & (group < num_groups)[None, :]
        codes = tl.load(weight + output[:, None] * (num_inputs // 2) + byte[None, :], mask=is_byte, other=0)
        scales = tl.load(weight_scale + output[:, None] * num_groups + group[None, :], mask=is_group, other=127)
        if is_scaled:
            place_in = first + tl.arange(0, inputs)
            is_input = (place_in < num_inputs)[:, None] & is_row[None, :]
            rows = tl.load(data + source * num_inputs + place_in[:, None], mask=is_input, other=0)
            is_row_group = is_row[:, None] & (group < num_groups)[None, :]
            places = tl.trans(source) * num_groups + group[None, :]
            row_scales = tl.load(scale + places, mask=is_row_group, other=127)
            total = tl.dot_scaled(codes, scales, "e2m1", rows, row_scales, "e4m3", total)
        else:
            is_pair = (byte < num_inputs // 2)[:, None] & is_row[None, :]
            places = source * (num_inputs // 2) + byte[:, None]
            even_rows = tl.load(even + places, mask=is_pair, other=0.0)
            odd_rows = tl.load(odd + places, mask=is_pair, other=0.0)
            factor = scale_of(scales.to(tl.int32))[:, :, None]
            factor = tl.broadcast_to(factor, (outputs, inputs // group_size, group_size // 2))
            factor = tl.reshape(factor, (outputs, inputs // 2))
            codes = codes.to(tl.int32)
            low = _e2m1_value(((codes & 0x07) << 22) | ((codes & 0x08) << 28)) * factor
            high = _e2m1_value(((codes & 0x70) << 18) | ((codes & 0x80) << 24)) * factor
            total = tl.dot(low.to(even_rows.dtype), even_rows, total)
            total = tl.dot(high.to(odd_rows.dtype), odd_rows, total)

    if bias is not None:
        total += tl.load(bias + output, mask=is_output, other=0.0)[:, None]
    column = first_column + tl.arange(0, columns)
    place = row.to(tl.int64)[:, None] * num_columns + column[None, :]
    is_inside = is_row[:, None] & (column < num_columns)[None, :]
    if is_gate_up:
        gate, up = tl.split(tl.permute(tl.reshape(total, (2, columns, tokens)), (2, 1, 0)))
        value = activate(gate, up, is_situ, beta, linear_beta, alpha, limit, up_offset)
        groups: tl.constexpr = columns // group_size
        bits = tl.reshape(value.to(tl.int32, bitcast=True), (tokens * groups, group_size))
        codes, scale_bytes = encode_groups(bits)
        tl.store(out + place, tl.reshape(codes, (tokens, columns)).to(tl.uint8), mask=is_inside)
        group = tl.program_id(0) * groups + tl.arange(0, groups)
        is_group = is_row[:, None] & (group < num_columns // group_size)[None, :]
        place = row.to(tl.int64)[:, None] * (num_columns // group_size) + group[None, :]
        tl.store(out_scale + place, tl.reshape(scale_bytes, (tokens, groups)).to(tl.uint8), mask=is_group)
    else:
        tl.store(out + place, tl.trans(total), mask=is_inside)
