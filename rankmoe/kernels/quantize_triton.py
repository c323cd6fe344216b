# mypy: disable-error-code="no-untyped-def"
"""``quantize_mxfp8`` in Triton: one launch, any number of rows.

Everything but one exact multiplication and one exact rounding addition is integer arithmetic, so a GPU, the interpreter
and the torch statement in ``rankmoe/quantize.py`` give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rankmoe.kernels import triton_support
from rankmoe.quantize import check_group_multiple
from rankmoe.types import GROUP_SIZE, MXTensor

available = triton_support.available

_DTYPES = (torch.bfloat16, torch.float32)
_GROUPS_PER_BLOCK = 64
_NUM_WARPS = 4


def why_not_covered(hidden_states: torch.Tensor) -> str | None:
    """Why ``quantize_mxfp8`` does not take these rows, or None where it does. Looks at shape, dtype, strides alone."""
    if hidden_states.dim() != 2:
        return f"hidden_states: expected [num_tokens, hidden], got {tuple(hidden_states.shape)}"
    if hidden_states.dtype not in _DTYPES:
        return f"hidden_states: expected bfloat16 or float32, got {hidden_states.dtype}"
    if hidden_states.shape[1] % GROUP_SIZE:
        return f"hidden_states.shape[1]: expected a multiple of {GROUP_SIZE}, got {hidden_states.shape[1]}"
    if hidden_states.stride(1) != 1:
        return f"hidden_states: expected inner stride 1, got strides {hidden_states.stride()}"
    return None


def covered(hidden_states: torch.Tensor) -> bool:
    """True where ``quantize_mxfp8`` takes these rows; a pure predicate, see ``why_not_covered``."""
    return why_not_covered(hidden_states) is None


def quantize_mxfp8(
    hidden_states: torch.Tensor, num_valid_tokens: torch.Tensor | None = None, *, out: MXTensor | None = None
) -> MXTensor:
    """Quantise activation rows to MXFP8 in one launch. No host sync; capturable.

    hidden_states: [T, H] bfloat16 or float32, H a multiple of 32, inner stride 1, any row stride.
    num_valid_tokens: [1] integer on the device, or None. Rows from this one on are not read and are taken as zero.
    out: contiguous tensors to write, or None to allocate them.
    Returns data [T, H] float8_e4m3fn and scale [T, H/32] uint8, bit for bit those of ``rankmoe.quantize``.
    Raises TypeError for a dtype, ValueError for a shape, stride or device that does not fit.
    """
    reason = why_not_covered(hidden_states)
    if reason is not None:
        raise (TypeError if hidden_states.dtype not in _DTYPES else ValueError)(reason)
    num_tokens, hidden_size = hidden_states.shape
    check_group_multiple("hidden_states.shape[1]", hidden_size)
    groups_per_row = hidden_size // GROUP_SIZE
    if out is None:
        out = MXTensor(
            torch.empty((num_tokens, hidden_size), dtype=torch.float8_e4m3fn, device=hidden_states.device),
            torch.empty((num_tokens, groups_per_row), dtype=torch.uint8, device=hidden_states.device),
            "mxfp8",
        )
    triton_support.check_output("out.data", out.data, (num_tokens, hidden_size), torch.float8_e4m3fn)
    triton_support.check_output("out.scale", out.scale, (num_tokens, groups_per_row), torch.uint8)
    triton_support.check_same_device(
        hidden_states.device, num_valid_tokens=num_valid_tokens, data=out.data, scale=out.scale
    )
    num_groups = num_tokens * groups_per_row
    if num_groups:
        bits = hidden_states.view(torch.int16 if hidden_states.dtype == torch.bfloat16 else torch.int32)
        with triton_support.on_device_of(hidden_states):
            _quantize_kernel[(triton.cdiv(num_groups, _GROUPS_PER_BLOCK),)](
                bits,
                num_valid_tokens,
                out.data.view(torch.uint8),
                out.scale,
                num_groups,
                bits.stride(0),
                groups_per_row=groups_per_row,
                group_size=GROUP_SIZE,
                groups_per_block=_GROUPS_PER_BLOCK,
                num_warps=_NUM_WARPS,
            )
    return out


@triton.jit
def _quantize_kernel(
    hidden_states,
    num_valid_tokens,
    data,
    scale,
    num_groups,
    row_stride,
    groups_per_row: tl.constexpr,
    group_size: tl.constexpr,
    groups_per_block: tl.constexpr,
):
    """Quantise some groups. hidden_states: the bits of the rows, int16 (bfloat16) or int32 (float32)."""
    group = tl.program_id(0) * groups_per_block + tl.arange(0, groups_per_block)
    element = tl.arange(0, group_size)[None, :]
    is_group = group < num_groups
    token = group // groups_per_row
    is_read = is_group
    if num_valid_tokens is not None:
        is_read = is_group & (token < tl.load(num_valid_tokens))
    source = token.to(tl.int64) * row_stride + (group - token * groups_per_row) * group_size
    bits = tl.load(hidden_states + source[:, None] + element, mask=is_read[:, None], other=0).to(tl.int32)
    if hidden_states.dtype.element_ty == tl.int16:
        bits = bits << 16
    codes, scale_byte = encode_groups(bits)
    tl.store(data + group.to(tl.int64)[:, None] * group_size + element, codes.to(tl.uint8), mask=is_group[:, None])
    tl.store(scale + group, scale_byte.to(tl.uint8), mask=is_group)


@triton.jit
def encode_groups(bits):
    """MXFP8 codes [groups, 32] and scale bytes [groups], int32, of float32 values given as their bits."""
    # As integers, magnitudes are in the order of the floats, with infinity and then NaN above every finite one.
    amax = tl.max(bits & 0x7FFFFFFF, axis=1)
    is_finite = amax < 0x7F800000
    amax = tl.where(is_finite, tl.maximum(amax, 0x2EDBE6FF), 0x3F800000)  # the floor is 1e-10
    # amax = m * 2^k with m in [1, 2): the smallest 2^e >= amax / 448 has e = k - 8, one more where m > 1.75.
    scale_byte = (amax >> 23) - 8 + ((amax & 0x7FFFFF) > 0x600000).to(tl.int32)
    reciprocal = ((254 - scale_byte) << 23).to(tl.float32, bitcast=True)
    codes = _e4m3_codes(bits.to(tl.float32, bitcast=True) * reciprocal[:, None])
    return tl.where(is_finite[:, None], codes, 0x7F), tl.where(is_finite, scale_byte, 255)


@triton.jit
def _e4m3_codes(value):
    """Codes (int32) of the e4m3 values nearest to float32 ones, ties to even, saturating."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Round the mantissa to 3 bits; a carry runs into the exponent, whose bias changes from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the codes count 2^-9; the spacing of floats at 2^14 is 2^-9 too, so that the addition rounds.
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.minimum(tl.where(magnitude < 0x3C800000, subnormal, normal), 0x7E)
    return code | ((bits >> 24) & 0x80)
