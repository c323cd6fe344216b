"""Microscaling quantisation: MXFP8 activations (e4m3) and MXFP4 weights (e2m1), one power-of-two scale per 32.

Format: OCP Microscaling Formats (MX) v1.0. The scale is rounded *up*, so that no finite value saturates; this differs
from that document's suggested floor and is what the served models use.
"""

from __future__ import annotations

from functools import cache

import torch

from rankmoe.backends import triton_kernel
from rankmoe.types import GROUP_SIZE, MXTensor

#: Smallest group maximum that a MXFP8 scale is made for; it keeps the scale's reciprocal finite.
MXFP8_AMAX_FLOOR = 1e-10
#: Values of the e2m1 codes 0..15.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

_E4M3_MAX = 448.0  # 1.75 * 2^8
_E2M1_MAX = 6.0  # 1.5 * 2^2
_E4M3_NAN_CODE = 0x7F
_NAN_SCALE = 255
_ROWS_AT_ONCE = 256


def check_group_multiple(name: str, size: int) -> None:
    """Raise ValueError unless a dimension is a multiple of the group size."""
    if size % GROUP_SIZE:
        raise ValueError(f"{name}: expected a multiple of {GROUP_SIZE}, got {size}")


def quantize_mxfp8(hidden_states: torch.Tensor, num_valid_tokens: torch.Tensor | None = None) -> MXTensor:
    """Quantise activation rows to MXFP8.

    hidden_states: [T, H] bfloat16 or float32, H a multiple of 32, inner stride 1.
    num_valid_tokens: [1] integer or None. Rows from this one on are taken as zero and never influence anything.
    Returns data [T, H] float8_e4m3fn and scale [T, H/32] uint8. A group that holds NaN or infinity gets scale byte 255
    and element codes 0x7F; no other group changes.
    Raises TypeError for another dtype, ValueError for another shape.
    """
    check_rows(hidden_states)
    kernel = triton_kernel("quantize", hidden_states.device)
    if kernel is not None and kernel.covered(hidden_states) and not needs_gradient(hidden_states):
        return kernel.quantize_mxfp8(hidden_states, num_valid_tokens)
    if num_valid_tokens is not None:
        hidden_states = torch.where(
            valid_rows(hidden_states.shape[0], num_valid_tokens, hidden_states.device), hidden_states, 0
        )
    groups = hidden_states.float().unflatten(-1, (-1, GROUP_SIZE))
    amax = groups.abs().amax(-1, keepdim=True)  # NaN propagates through amax
    is_finite = amax.isfinite()
    bits = torch.where(is_finite, amax, 1.0).clamp(min=MXFP8_AMAX_FLOOR).view(torch.int32)
    # amax = m * 2^k with m in [1, 2): the smallest 2^e >= amax / 448 has e = k - 8, one more where m > 1.75.
    scale = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).int()
    reciprocal = ((254 - scale) << 23).view(torch.float32)
    elements = (groups * reciprocal).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
    codes = torch.where(is_finite, elements.view(torch.uint8), _E4M3_NAN_CODE)
    scale = torch.where(is_finite, scale, _NAN_SCALE).to(torch.uint8).squeeze(-1)
    return MXTensor(codes.flatten(-2).view(torch.float8_e4m3fn), scale, "mxfp8")


def needs_gradient(tensor: torch.Tensor) -> bool:
    """Whether autograd follows this tensor, as in training; the kernels have no backward."""
    return torch.is_grad_enabled() and tensor.requires_grad


def valid_rows(num_tokens: int, num_valid_tokens: torch.Tensor, device: torch.device) -> torch.Tensor:
    """[T, 1] bool. True for the rows below ``num_valid_tokens`` ([1] integer), without reading it on the host."""
    if not isinstance(num_valid_tokens, torch.Tensor) or num_valid_tokens.dtype not in (torch.int32, torch.int64):
        got = getattr(num_valid_tokens, "dtype", type(num_valid_tokens).__name__)
        raise TypeError(f"num_valid_tokens: expected an int32 or int64 tensor, got {got}")
    if num_valid_tokens.numel() != 1:
        raise ValueError(f"num_valid_tokens: expected one number, got shape {tuple(num_valid_tokens.shape)}")
    return torch.arange(num_tokens, device=device)[:, None] < num_valid_tokens.to(device).view(1, 1)


def quantize_mxfp4(weight: torch.Tensor) -> MXTensor:
    """Quantise weights to MXFP4: scale rounded up, elements to nearest even, saturating.

    weight: [..., N] floating point, N (the input dimension) a multiple of 32.
    Returns data [..., N/2] uint8 and scale [..., N/32] uint8; an all-zero group has scale byte 0. A group that holds
    NaN or infinity gets scale byte 255.
    """
    if not weight.is_floating_point() or weight.dim() == 0:
        raise TypeError(f"weight: expected floating-point values [..., N], got {weight.dtype} {tuple(weight.shape)}")
    check_group_multiple("weight.shape[-1]", weight.shape[-1])
    groups = weight.float().unflatten(-1, (-1, GROUP_SIZE))
    amax = groups.abs().amax(-1, keepdim=True)
    is_finite = amax.isfinite()
    mantissa, exponent = torch.frexp(torch.where(is_finite, amax, 0.0))  # amax = mantissa * 2^exponent, in [0.5, 1)
    # 6 = 0.75 * 2^3, hence the smallest 2^e >= amax / 6.
    scale = torch.where(amax == 0, 0, (exponent - 3 + (mantissa > 0.75).int() + 127).clamp(0, 254))
    scaled = torch.ldexp(torch.where(is_finite, groups, 0.0).double(), 127 - scale).float()
    codes = _round_to_e2m1(scaled).flatten(-2)
    scale = torch.where(is_finite, scale, _NAN_SCALE).to(torch.uint8).squeeze(-1)
    return MXTensor(codes[..., 0::2] | (codes[..., 1::2] << 4), scale, "mxfp4")


def _round_to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Nearest e2m1 code as uint8, ties to the even code, saturating; the sign of zero is kept."""
    magnitude = values.abs()
    # Midpoints between neighbouring codes; a tie goes up only where the upper code is even.
    ties_up = magnitude.new_tensor([0.75, 1.75, 3.5])
    ties_down = magnitude.new_tensor([0.25, 1.25, 2.5, 5.0])
    code = (magnitude[..., None] >= ties_up).sum(-1) + (magnitude[..., None] > ties_down).sum(-1)
    return (code + 8 * values.signbit().int()).to(torch.uint8)


def dequantize(tensor: MXTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decode a MX tensor exactly.

    Returns [..., N] ``dtype`` (float32 or float64). Scale byte 255 gives NaN, byte 0 means 2^-127. In float32 the one
    value that cannot be held is a magnitude of 2^128 or more, which gives infinity.
    """
    groups = _elements(tensor, dtype).unflatten(-1, (-1, GROUP_SIZE))
    return (groups * decode_scale(tensor.scale, dtype)[..., None]).flatten(-2)


def decode_scale(scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of UE8M0 scale bytes: ``2^(byte - 127)``, NaN for byte 255."""
    return _scale_table(dtype, scale.device)[scale.int()]


@cache
def _scale_table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    table = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127).to(dtype)
    table[_NAN_SCALE] = torch.nan
    return table.to(device)


def _elements(tensor: MXTensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.format == "mxfp8":
        return tensor.data.to(dtype)
    pairs = e2m1_pair_table(dtype, tensor.data.device)
    return pairs[tensor.data.int()].flatten(-2)


@cache
def e2m1_pair_table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256, 2]. The two e2m1 values in each byte, low nibble first."""
    values = torch.tensor(E2M1_VALUES, dtype=dtype)
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=1).to(device)


def check_rows(hidden_states: torch.Tensor) -> None:
    """Raise TypeError or ValueError unless ``hidden_states`` are rows that ``quantize_mxfp8`` takes."""
    if hidden_states.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"hidden_states: expected bfloat16 or float32, got {hidden_states.dtype}")
    if hidden_states.dim() != 2:
        raise ValueError(f"hidden_states: expected [num_tokens, hidden], got {tuple(hidden_states.shape)}")
    check_group_multiple("hidden_states.shape[1]", hidden_states.shape[1])


class ScaleError(ValueError):
    """A weight scale that a backend's arithmetic cannot hold, found while packing.

    weight: ``w13`` or ``w2``.
    expert, row, group: its place; the expert's local id, and the row of the expert's [out, in] weight.
    got: the scale byte.
    """

    def __init__(self, weight: str, expert: int, row: int, group: int, expected: str, got: int) -> None:
        super().__init__(weight, expert, row, group, expected, got)  # all, so that the error survives pickling
        self.weight, self.expert, self.row, self.group = weight, expert, row, group
        self.expected, self.got = expected, got

    def __str__(self) -> str:
        place = f"expert {self.expert}, row {self.row}, group {self.group}"
        return f"{self.weight}: expected {self.expected}, got {self.got} in {place}"


def groups_with_values(weight: MXTensor) -> torch.Tensor:
    """[..., groups] bool. Whether a group of an mxfp4 tensor holds anything but zeros of either sign."""
    words = weight.data.contiguous().view(torch.int64).unflatten(-1, (-1, GROUP_SIZE // 16))
    # Some rows at a time: masking all of them at once would take another expert's worth of memory.
    return torch.cat([((part & 0x7777777777777777) != 0).any(-1) for part in words.split(_ROWS_AT_ONCE)])
