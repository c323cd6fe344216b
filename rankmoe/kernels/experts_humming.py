"""Expert GEMMs by humming-kernels, compiled by it at first use: grouped MXFP8 x MXFP4 with float32 accumulation.

Products and group scales are applied as docs/numerics.md has them, but humming writes 16-bit outputs only: each GEMM's
result is rounded to bfloat16 before this module goes on in float32. That is a departure from the rules, so
``covered`` is False and the backend runs only where it is asked for by name.

humming's form of MXFP4 weights for e4m3 activations folds a group's scale into the weight's e4m3 exponent, which spans
12 octaves; the rest is a power of two per expert or, where an expert's scales span more, per row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
from functools import cache
from typing import Any

import torch

from rankmoe.kernels import triton_support
from rankmoe.layout import CHECKPOINT_ORDER
from rankmoe.quantize import ScaleError, groups_with_values
from rankmoe.tuned import expected_rows
from rankmoe.types import GROUP_SIZE, ExpertSchedule, ExpertSource, ExpertWeights, MXTensor, PackedExperts, Problem

#: Octaves between the smallest and the largest scale of a row, exclusive, that weights in e4m3 hold exactly.
SCALE_OCTAVES = 12
#: Scale bytes that are taken; those beyond would meet subnormal or infinite factors.
SCALE_BYTES = (16, 239)
#: Sizes are multiples of this, the narrowest tile.
SIZE_MULTIPLE = 64
_NEUTRAL_SCALE = 127
#: The rows of humming's smallest block, and the expected rows of a rank from which the widest block is faster.
_FEW_ROWS, _ROWS_FOR_WIDEST = 8, 16
_ARCHITECTURE = (9, 0)
#: humming's order within an expert; it may be another one in another version of the package.
LAYOUT = dataclasses.replace(
    CHECKPOINT_ORDER, version="humming-0.1.20/1", factor_dtypes={1: torch.float32, 2: torch.bfloat16}
)


def available() -> bool:
    """Whether humming-kernels is installed and a GPU that this was tested on is here."""
    return (
        importlib.util.find_spec("humming") is not None
        and triton_support.available()
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability() == _ARCHITECTURE
    )


def covered(problem: Problem) -> bool:
    """False: no problem is computed without the rounding of each GEMM's output to bfloat16."""
    return False


def approximated(problem: Problem) -> bool:
    """Whether a problem is computed with that rounding, following every other rule."""
    sizes = (problem.hidden_size, problem.intermediate_size)
    return problem.device_type == "cuda" and problem.num_local_experts > 0 and not any(s % SIZE_MULTIPLE for s in sizes)


def pack(w13: ExpertSource, w2: ExpertSource, device: torch.device) -> PackedExperts:
    """Checkpoint order to humming's order on a GPU, one expert at a time.

    Each expert is fetched twice: the scales of all of them decide on the form of the factors.
    Raises ScaleError for a scale that the arithmetic cannot hold.
    """
    (packed_w13, w13_factor), (packed_w2, w2_factor) = _pack_one("w13", w13, device), _pack_one("w2", w2, device)
    return PackedExperts(packed_w13, packed_w2, w13_factor, w2_factor)


def gate_up(x: MXTensor, schedule: ExpertSchedule, weights: ExpertWeights, out: torch.Tensor) -> MXTensor:
    """[T, H] MXFP8 activations to the [R, I] MXFP8 middle; see ``rankmoe.experts.gate_up``.

    Rows beyond the schedule's last one hold anything. ``out`` is scratch. No host sync.
    """
    from rankmoe.kernels import activation_triton, rows_triton

    if not out.numel():
        scale = torch.empty(out.shape[0], out.shape[1] // GROUP_SIZE, dtype=torch.uint8, device=out.device)
        return MXTensor(out.to(torch.float8_e4m3fn), scale, "mxfp8")
    assert weights.w13_factor is not None
    rows, scales = rows_triton.gather_rows(x, schedule)
    # [R, I] float32 and [R, 2 I] bfloat16 take the same room.
    accumulators = (out if out.is_contiguous() else torch.empty(out.shape, device=out.device)).view(torch.bfloat16)
    num_rows = _expected_rows(schedule, weights)
    _grouped_gemm(rows, scales, weights.w13, weights.w13_factor, schedule, num_rows, accumulators)
    return activation_triton.activate_quantize(accumulators, weights.activation, schedule, weights.w13_bias)


def down(middle: MXTensor, schedule: ExpertSchedule, weights: ExpertWeights, out: torch.Tensor) -> torch.Tensor:
    """[R, I] MXFP8 middle to [R, H] float32 rows; see ``rankmoe.experts.down``.

    Rows beyond the schedule's last one keep what ``out`` holds. No host sync.
    """
    from rankmoe.kernels import rows_triton

    if not out.numel():
        return out
    assert weights.w2_factor is not None
    scales = rows_triton.decode_scales(middle, schedule)
    rows = torch.empty(out.shape, dtype=torch.bfloat16, device=out.device)
    data = middle.data.contiguous()
    _grouped_gemm(data, scales, weights.w2, weights.w2_factor, schedule, _expected_rows(schedule, weights), rows)
    return rows_triton.widen_rows(rows, schedule, weights.w2_bias, out)


def _expected_rows(schedule: ExpertSchedule, weights: ExpertWeights) -> int:
    """What tiles are chosen for."""
    return expected_rows(schedule.slot_rows.numel(), weights.num_local_experts, weights.placement.num_experts)


def _grouped_gemm(
    rows: torch.Tensor,
    scales: torch.Tensor,
    weight: MXTensor,
    factor: torch.Tensor,
    schedule: ExpertSchedule,
    expected_rows: int,
    out: torch.Tensor,
) -> None:
    from humming import ops

    num_experts, num_outputs, num_inputs = weight.shape
    num_groups = num_inputs // GROUP_SIZE
    kernel = _kernel(num_experts, num_outputs, num_inputs, factor.dim() == 2, expected_rows, rows.device)
    ops.launch_kernel(
        configs=kernel,
        inputs=rows,
        weight=weight.data.view(torch.int32).view(num_experts, num_groups, -1),
        weight_scale=weight.scale.view(torch.float8_e8m0fnu).view(num_experts, num_groups, num_outputs),
        weight_scale_2=factor,
        input_scale=scales,
        outputs=out,
        expert_layout=schedule.expert_offsets,
    )


# One output tile is computed by one block over all of K, in order: humming's split K adds bfloat16 partial sums, by
# atomics where there are many. So a row has the same bits whatever else is in the batch.
_COMPUTE = {"gemm_type": "grouped_contiguous", "use_batch_invariant": True, "use_m_major_input_scale": True}


@cache
def _kernel(
    num_experts: int,
    num_outputs: int,
    num_inputs: int,
    is_factor_per_row: bool,
    expected_rows: int,
    device: torch.device,
) -> torch.Tensor:
    """humming's handle of the kernel for a shape, compiled where it is not in its cache on disk."""
    from humming.kernel.humming import HummingKernel
    from humming.tune import get_heuristics_config

    config = _layer_config(num_experts, num_outputs, num_inputs, is_factor_per_row, device)
    tuning = get_heuristics_config(config, shape_m=expected_rows, device=device, **_COMPUTE)

    def prepare(tile: dict[str, tuple[int, int, int]]) -> torch.Tensor:
        return HummingKernel.prepare_kernels(config.to_str(), json.dumps(_COMPUTE), json.dumps(tuning | tile), device)

    for tile in _wider_tiles(tuning["block_shape"], num_outputs, expected_rows):
        # Which tiles fit a shape is known to humming alone.
        with contextlib.suppress(Exception):
            return prepare(tile)
    return prepare({})


def _wider_tiles(
    block_shape: tuple[int, int, int], num_outputs: int, expected_rows: int
) -> list[dict[str, tuple[int, int, int]]]:
    """What to change in humming's heuristics, best first: at few rows an expert they take 64 outputs.

    On one NVIDIA H200 at 64 tokens blocks of 256 outputs read a Kimi-K3 rank's w13 1.17 times as fast as blocks of 128,
    and blocks of 128 its w2 1.4 times as fast as blocks of 64.
    """
    block_m, _, block_k = block_shape
    widths = [256, 128] if expected_rows >= _ROWS_FOR_WIDEST else [128]
    return [
        {"block_shape": (block_m, width, block_k), "warp_shape": (block_m, 32, block_k)}
        for width in widths
        if block_m == _FEW_ROWS and num_outputs % width == 0
    ]


def _layer_config(
    num_experts: int, num_outputs: int, num_inputs: int, is_factor_per_row: bool, device: torch.device
) -> Any:
    from humming.config import LayerConfig

    major, minor = torch.cuda.get_device_capability(device)
    return LayerConfig(
        sm_version=10 * major + minor,
        shape_n=num_outputs,
        shape_k=num_inputs,
        num_experts=num_experts,
        a_dtype="float8e4m3",
        b_dtype="float4e2m1",
        c_dtype="bfloat16",
        bs_dtype="float8e8m0",
        input_scale_group_size=GROUP_SIZE,
        weight_scale_group_size=GROUP_SIZE,
        weight_scale_2_type="channel" if is_factor_per_row else "tensor",
    )


def _pack_one(name: str, source: ExpertSource, device: torch.device) -> tuple[MXTensor, torch.Tensor]:
    """One weight tensor in humming's order, and the factor of each expert [L] or row [L, out]."""
    from humming.transform import transform_humming_tensors

    num_experts, num_outputs, num_inputs = source.shape
    ranges = [check_scales(name, expert, source[expert]) for expert in range(num_experts)]
    is_factor_per_row = any(whole >= SCALE_OCTAVES for whole in ranges)
    config = _layer_config(1, num_outputs, num_inputs, is_factor_per_row, device)
    packed = MXTensor.empty(source.shape, device)

    def pack_expert(expert: int) -> torch.Tensor:  # a function, so that no expert is held while the next is fetched
        own = source[expert].to(device)
        weight = own.data[None].contiguous().view(torch.int32)
        scale = neutral_scales(own, per_row=is_factor_per_row)[None]
        with torch.cuda.device(device):
            outputs = transform_humming_tensors(config, {"weight": weight, "weight_scale": scale}, already_padded=True)
        packed.data[expert] = outputs["weight"].view(torch.uint8).view(num_outputs, -1)
        packed.scale[expert] = outputs["weight_scale"].view(torch.uint8).view(num_outputs, -1)
        return outputs["weight_scale_2"]

    return packed, torch.cat([pack_expert(expert) for expert in range(num_experts)]).contiguous()


def check_scales(name: str, expert: int, weight: MXTensor) -> int:
    """Octaves that the scales of an expert's [out, in] weight span; groups of zeros have no say.

    Raises ScaleError for a scale byte beyond ``SCALE_BYTES`` and for a row that spans ``SCALE_OCTAVES`` or more.
    """
    has_value, scale = groups_with_values(weight), weight.scale.int()
    low, high = SCALE_BYTES
    largest = torch.where(has_value, scale, low).amax(1, keepdim=True)
    # NaN bytes (255) of groups of zeros are NaN all the same.
    is_wrong = (has_value & ((scale < low) | (scale > high) | (largest - scale >= SCALE_OCTAVES))) | (scale == 255)
    if bool(is_wrong.any()):
        row, group = is_wrong.nonzero()[0].tolist()
        expected = (
            f"scale bytes from {low} to {high} that span less than {SCALE_OCTAVES} octaves in a row, whose largest is "
            f"{int(largest[row])}"
        )
        raise ScaleError(name, expert, row, group, expected, int(scale[row, group]))
    if not bool(has_value.any()):
        return 0
    return int(scale[has_value].max() - scale[has_value].min())


def neutral_scales(weight: MXTensor, *, per_row: bool) -> torch.Tensor:
    """[out, groups] uint8. The scale bytes, with those of groups of zeros replaced so that they widen no range."""
    has_value = groups_with_values(weight)
    largest = torch.where(has_value, weight.scale, 0).amax((1,) if per_row else (0, 1), keepdim=True)
    return torch.where(has_value, weight.scale, torch.where(largest > 0, largest, _NEUTRAL_SCALE).to(torch.uint8))
