"""Expert GEMMs on the CPU: MXFP4 weights are decoded tile by tile into cache, then multiplied in float32.

Only experts with rows are touched, each weight once. A product of an e4m3 and an e2m1 value times powers of two is
exact in float32, so the one rounding is that of the accumulation.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from rankmoe.activation import apply_activation
from rankmoe.layout import in_checkpoint_order
from rankmoe.quantize import ScaleError, decode_scale, dequantize, e2m1_pair_table, quantize_mxfp8
from rankmoe.types import GROUP_SIZE, ExpertSchedule, ExpertSource, ExpertWeights, MXTensor, PackedExperts

#: Weights decoded at a time: 1 MiB of float32, which stays in a core's L2 between decoding and multiplying.
TILE_ELEMENTS = 256 * 1024


#: Largest scale byte whose weights float32 holds: 6 * 2^(252 - 127) < 2^128. Byte 255 is NaN, which it holds too.
MAX_SCALE_BYTE = 252


def pack(w13: ExpertSource, w2: ExpertSource, device: torch.device) -> PackedExperts:
    """Keep the checkpoint's layout. Raises ScaleError for a scale that float32 arithmetic cannot hold."""
    return PackedExperts(_pack_one("w13", w13, device), _pack_one("w2", w2, device))


def _pack_one(name: str, source: ExpertSource, device: torch.device) -> MXTensor:
    weight = in_checkpoint_order(source, device)
    for expert, scale in enumerate(weight.scale):
        if int(scale.max()) > MAX_SCALE_BYTE:  # rare: look closer
            too_large = ((scale > MAX_SCALE_BYTE) & (scale < 255)).nonzero()
            if len(too_large):
                row, group = too_large[0].tolist()
                expected = f"scale bytes up to {MAX_SCALE_BYTE} or 255"
                raise ScaleError(name, expert, row, group, expected, int(scale[row, group]))
    return weight


def gate_up(x: MXTensor, schedule: ExpertSchedule, weights: ExpertWeights, out: torch.Tensor) -> MXTensor:
    """[T, H] MXFP8 activations to the [R, I] MXFP8 middle; see ``rankmoe.experts.gate_up``."""
    tokens = dequantize(x)
    for expert, start, stop in active_experts(schedule):
        rows = tokens[schedule.row_tokens[start:stop].long()]
        accumulators = matmul(rows, weights.w13[expert])
        if weights.w13_bias is not None:
            accumulators += weights.w13_bias[expert]
        out[start:stop] = apply_activation(accumulators, weights.activation)
    return quantize_mxfp8(out)


def down(middle: MXTensor, schedule: ExpertSchedule, weights: ExpertWeights, out: torch.Tensor) -> torch.Tensor:
    """[R, I] MXFP8 middle to [R, H] float32 rows; see ``rankmoe.experts.down``."""
    rows = dequantize(middle)
    for expert, start, stop in active_experts(schedule):
        out[start:stop] = matmul(rows[start:stop], weights.w2[expert])
        if weights.w2_bias is not None:
            out[start:stop] += weights.w2_bias[expert]
    return out


def active_experts(schedule: ExpertSchedule) -> list[tuple[int, int, int]]:
    """(local expert, first row, end row) of every expert that has rows."""
    offsets = schedule.expert_offsets.tolist()
    return [(e, start, stop) for e, (start, stop) in enumerate(pairwise(offsets)) if stop > start]


def matmul(rows: torch.Tensor, weight: MXTensor) -> torch.Tensor:
    """Multiply [m, N] float32 rows by a [out, N] MXFP4 weight, transposed: [m, out] float32."""
    num_outputs, num_inputs = weight.shape
    # One 8-byte gather decodes two weights; torch gathers float64 faster than pairs of float32.
    pairs = e2m1_pair_table(torch.float32, weight.data.device).view(torch.float64).squeeze(1)
    out = rows.new_empty(rows.shape[0], num_outputs)
    step = max(1, TILE_ELEMENTS // num_inputs)
    for start in range(0, num_outputs, step):
        data = weight.data[start : start + step]
        decoded = pairs.index_select(0, data.int().flatten()).view(torch.float32)
        groups = decoded.view(data.shape[0], num_inputs // GROUP_SIZE, GROUP_SIZE)
        groups *= decode_scale(weight.scale[start : start + step])[..., None]
        torch.mm(rows, groups.view(data.shape[0], num_inputs).T, out=out[:, start : start + step])
    return out
