import math
from functools import cache

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers import assert_bitwise_equal, result_or_refusal, seeded
from hypothesis import given
from hypothesis import strategies as st

from rankmoe import reference
from rankmoe.quantize import dequantize, quantize_mxfp4, quantize_mxfp8
from rankmoe.types import MXTensor

E4M3, E2M1, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu
FLOAT32_MAX = float(np.finfo(np.float32).max)


# --- helpers ---------------------------------------------------------------------------------------------------------
def decoded_by_ml_dtypes(codes: np.ndarray, dtype: type) -> np.ndarray:
    return codes.astype(np.uint8).view(dtype).astype(np.float64)


def mxfp8(codes: np.ndarray, scale: np.ndarray) -> MXTensor:
    data = torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn)
    return MXTensor(data, torch.from_numpy(scale.astype(np.uint8)), "mxfp8")


def codes_of(tensor: MXTensor) -> np.ndarray:
    """One code per element."""
    if tensor.format == "mxfp8":
        return tensor.data.view(torch.uint8).numpy()
    data = tensor.data.numpy()
    return np.stack([data & 15, data >> 4], -1).reshape(*data.shape[:-1], -1)


def group(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """One row of one group: the values, then zeros."""
    return torch.tensor([[*values, *[0.0] * (32 - len(values))]], dtype=dtype)


@cache
def rounding_cases(element: type, num_codes: int) -> np.ndarray:
    """Every code's value, the midpoint to the next, and one float32 ulp on both sides of it; both signs."""
    values = decoded_by_ml_dtypes(np.arange(num_codes), element).astype(np.float32)
    middles = (values[1:] + values[:-1]) / 2
    up, down = np.nextafter(middles, np.float32(np.inf)), np.nextafter(middles, np.float32(-np.inf))
    cases = np.concatenate([values, middles, up, down])
    return np.concatenate([cases, -cases])


def groups_with_maximum(cases: np.ndarray, maximum: float) -> torch.Tensor:
    """Rows of 31 cases and the maximum, so that the maximum decides the scale."""
    padded = np.resize(cases, (-(-len(cases) // 31), 31))
    return torch.from_numpy(np.column_stack([padded, np.full(len(padded), maximum, np.float32)]))


def maxima_and_one_ulp_above(maximum: float, exponents: np.ndarray) -> torch.Tensor:
    """Rows of one group whose maximum is ``maximum * 2**exponent``, then as many with the next float32 above it."""
    maxima = np.ldexp(np.float32(maximum), exponents)
    rows = np.zeros((2 * len(exponents), 32), np.float32)
    rows[:, 0] = np.concatenate([maxima, np.nextafter(maxima, np.float32(np.inf))])
    return torch.from_numpy(rows)


# --- MXFP8: decoding -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_e4m3_code_times_every_scale_byte_decodes_as_ml_dtypes(dtype):
    codes = np.tile(np.arange(256), (256, 1))
    scales = np.tile(np.arange(256)[:, None], (1, 8))
    with np.errstate(over="ignore"):
        expected = decoded_by_ml_dtypes(codes, E4M3) * decoded_by_ml_dtypes(scales, E8M0)[:, :1]
        expected = torch.from_numpy(expected).to(dtype)
    decoded = dequantize(mxfp8(codes, scales), dtype)
    assert torch.equal(decoded.isnan(), expected.isnan())
    assert_bitwise_equal(decoded.nan_to_num(nan=0), expected.nan_to_num(nan=0))
    assert torch.equal(reference.dequantize(mxfp8(codes, scales), dtype).nan_to_num(7), decoded.nan_to_num(7))


# --- MXFP8: scale ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("amax", "byte"),
    [(448.0, 127), (449.0, 128), (1.0, 119), (0.0, 85), (1e-10, 85), (1e-38, 85), (2e-10, 86), (FLOAT32_MAX, 247)],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_scale_byte_of_a_worked_example(amax, byte, sign):
    assert quantize_mxfp8(group(0.0, sign * amax)).scale.item() == byte


def test_the_scale_moves_up_one_ulp_above_448_times_a_power_of_two():
    exponents = np.arange(-41, 120)
    quantized = quantize_mxfp8(maxima_and_one_ulp_above(448, exponents))
    assert quantized.scale[:, 0].tolist() == [*(127 + exponents), *(128 + exponents)]
    assert set(codes_of(quantized)[: len(exponents), 0]) == {0x7E}  # 448
    assert set(codes_of(quantized)[len(exponents) :, 0]) == {0x76}  # 224 at twice the scale


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-38, -1e-38])
def test_a_group_below_the_floor_is_all_zero(value):
    quantized = quantize_mxfp8(torch.full((1, 32), value))
    assert quantized.scale.item() == 85
    assert torch.all(dequantize(quantized) == 0)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32))
def test_no_finite_value_saturates_and_the_scale_is_the_smallest_such(values):
    row = torch.tensor([values])
    quantized = quantize_mxfp8(row)
    amax, byte = max(row.double().abs().max().item(), float(np.float32(1e-10))), quantized.scale.item()
    assert amax <= 448 * 2.0 ** (byte - 127)
    assert amax > 448 * 2.0 ** (byte - 128)
    with np.errstate(over="ignore"):
        scaled = (row.double().numpy() / 2.0 ** (byte - 127)).astype(np.float32)
    assert codes_of(quantized).tolist() == scaled.astype(E4M3).view(np.uint8).tolist()


# --- MXFP8: elements -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("exponent", [0, -1, 1, -41, 40, 119])
def test_mxfp8_elements_round_to_nearest_even_at_and_beside_every_midpoint(exponent):
    cases = groups_with_maximum(rounding_cases(E4M3, 0x7F), 448)
    quantized = quantize_mxfp8(cases * 2.0**exponent)
    assert torch.all(quantized.scale == 127 + exponent)
    assert np.array_equal(codes_of(quantized), cases.numpy().astype(E4M3).view(np.uint8))


def test_float32_rows_do_not_pass_through_bf16():
    row = group(448.0, 17.0 + 2**-8)  # a tie between 16 and 18 in bfloat16, which goes to 16
    assert dequantize(quantize_mxfp8(row))[0, 1] == 18
    assert dequantize(quantize_mxfp8(row.bfloat16()))[0, 1] == 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("magnitude", [1e-38, 1e-9, 1.0, 1e30])
def test_random_rows_equal_the_reference(dtype, magnitude):
    rows = (torch.randn(5, 96, generator=seeded(0)) * magnitude).to(dtype)
    rows[1], rows[2, 32:64], rows[3, 5] = 0, -0.0, 448
    assert_bitwise_equal(quantize_mxfp8(rows), reference.quantize_mxfp8(rows))


# --- MXFP8: bad groups, padding, sizes -------------------------------------------------------------------------------
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_that_is_not_finite_is_nan_and_changes_no_other(bad, dtype):
    rows = torch.randn(4, 96, generator=seeded(1)).to(dtype)
    clean = quantize_mxfp8(rows)
    rows[2, 40] = bad
    quantized = quantize_mxfp8(rows)
    codes, scale = clean.data.view(torch.uint8).clone(), clean.scale.clone()
    codes[2, 32:64], scale[2, 1] = 0x7F, 255
    assert_bitwise_equal(quantized, MXTensor(codes.view(torch.float8_e4m3fn), scale, "mxfp8"))
    assert_bitwise_equal(quantized, reference.quantize_mxfp8(rows))
    assert dequantize(quantized)[2, 32:64].isnan().all()


@pytest.mark.parametrize("num_valid", [0, 2, 4])
def test_rows_beyond_the_valid_tokens_are_taken_as_zero_and_may_hold_nan(num_valid):
    rows = torch.randn(4, 64, generator=seeded(2))
    zeroed = rows.clone()
    rows[num_valid:], zeroed[num_valid:] = math.nan, 0
    assert_bitwise_equal(quantize_mxfp8(rows, torch.tensor([num_valid])), quantize_mxfp8(zeroed))


@pytest.mark.parametrize("quantize", [quantize_mxfp8, quantize_mxfp4])
def test_no_rows_give_empty_tensors(quantize):
    quantized = quantize(torch.empty(0, 96))
    assert (quantized.shape, quantized.scale.shape) == ((0, 96), (0, 3))
    assert dequantize(quantized).shape == (0, 96)


@pytest.mark.parametrize("hidden_size", [96, 2880])
def test_a_hidden_size_that_is_a_multiple_of_32_is_enough(hidden_size):
    rows = torch.randn(2, hidden_size, generator=seeded(3))
    assert_bitwise_equal(quantize_mxfp8(rows), reference.quantize_mxfp8(rows))


@pytest.mark.parametrize(
    "embed",
    [
        lambda rows: torch.cat([rows, rows], 1)[:, : rows.shape[1]],
        lambda rows: torch.cat([rows, rows], 1)[:, rows.shape[1] :],
        lambda rows: torch.stack([rows, rows], 1).flatten(0, 1)[::2],
    ],
    ids=["wider_rows", "column_slice", "every_second_row"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_strided_view_gives_the_same_bits(embed, dtype):
    rows = torch.randn(4, 64, generator=seeded(4)).to(dtype)
    assert not embed(rows).is_contiguous()
    assert_bitwise_equal(quantize_mxfp8(embed(rows)), quantize_mxfp8(rows))


def test_a_transposed_view_is_right_or_refused_by_its_strides():
    rows = torch.randn(4, 64, generator=seeded(5))
    quantized = result_or_refusal("stride", lambda: quantize_mxfp8(rows.t().contiguous().t()))
    if quantized is not None:
        assert_bitwise_equal(quantized, quantize_mxfp8(rows))


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        (torch.zeros(2, 32).half(), TypeError, "hidden_states: expected bfloat16 or float32, got torch.float16"),
        (torch.zeros(2, 32).double(), TypeError, "hidden_states: expected bfloat16 or float32, got torch.float64"),
        (torch.zeros(32), ValueError, r"hidden_states: expected \[num_tokens, hidden\], got \(32,\)"),
        (torch.zeros(2, 360), ValueError, r"hidden_states.shape\[1\]: expected a multiple of 32, got 360"),
    ],
)
def test_activations_that_do_not_fit_are_refused_by_name(rows, error, message):
    with pytest.raises(error, match=message):
        quantize_mxfp8(rows)


# --- MXFP4: decoding -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_e2m1_code_times_every_scale_byte_decodes_as_ml_dtypes(dtype):
    codes, scale = np.arange(16), np.arange(256)
    low_nibbles, high_nibbles = codes, codes[::-1]
    data = np.tile((low_nibbles | (high_nibbles << 4)).astype(np.uint8), (256, 1))
    tensor = MXTensor(torch.from_numpy(data), torch.from_numpy(scale.astype(np.uint8))[:, None], "mxfp4")

    elements = decoded_by_ml_dtypes(np.stack([low_nibbles, high_nibbles], 1).ravel(), E2M1)
    with np.errstate(over="ignore"):
        expected = torch.from_numpy(elements * decoded_by_ml_dtypes(scale, E8M0)[:, None]).to(dtype)
    for decoded in (dequantize(tensor, dtype), reference.dequantize(tensor, dtype)):
        assert decoded[255].isnan().all()
        assert_bitwise_equal(decoded[:255], expected[:255])


def test_the_smallest_scale_is_a_float32_subnormal_and_is_not_flushed():
    tensor = MXTensor(torch.full((1, 16), 0x11, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8), "mxfp4")
    assert torch.all(dequantize(tensor).double() == 2.0**-128)


def test_element_2j_sits_in_the_low_nibble_of_byte_j():
    tensor = quantize_mxfp4(group(6.0, -0.5, 1.0, 3.0))
    assert tensor.data[0, :2].tolist() == [0x97, 0x52]


# --- MXFP4: rounding -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("exponent", [0, -1, 1, -127, -100, 100, 125])
def test_mxfp4_elements_round_to_nearest_even_at_and_beside_every_midpoint(exponent):
    cases = groups_with_maximum(rounding_cases(E2M1, 8), 6)
    if exponent < -100:  # float32 subnormals hold the midpoints, not the ulps beside them
        cases = groups_with_maximum(rounding_cases(E2M1, 8).reshape(2, -1)[:, :15].ravel(), 6)
    scaled = torch.from_numpy(np.ldexp(cases.numpy(), exponent))
    quantized = quantize_mxfp4(scaled)
    assert torch.all(quantized.scale == 127 + exponent)
    assert np.array_equal(codes_of(quantized), cases.numpy().astype(E2M1).view(np.uint8))


def test_the_weight_scale_moves_up_one_ulp_above_6_times_a_power_of_two():
    exponents = np.arange(-120, 126)
    quantized = quantize_mxfp4(maxima_and_one_ulp_above(6, exponents))
    assert quantized.scale[:, 0].tolist() == [*(127 + exponents), *(128 + exponents)]
    assert set(codes_of(quantized)[: len(exponents), 0]) == {7}  # 6
    assert set(codes_of(quantized)[len(exponents) :, 0]) == {5}  # 3 at twice the scale


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32))
def test_any_finite_weights_equal_the_reference(values):
    weight = torch.tensor([values])
    assert_bitwise_equal(quantize_mxfp4(weight), reference.quantize_mxfp4(weight))


def test_an_all_zero_group_has_scale_byte_zero():
    assert quantize_mxfp4(torch.zeros(1, 32)).scale.item() == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_weight_group_that_is_not_finite_has_scale_byte_255_and_changes_no_other(bad):
    weight = torch.randn(3, 64, generator=seeded(6))
    clean = quantize_mxfp4(weight)
    weight[1, 40] = bad
    quantized = quantize_mxfp4(weight)
    assert dequantize(quantized)[1, 32:].isnan().all()
    expected = clean.scale.clone()
    expected[1, 1] = 255
    assert_bitwise_equal(quantized.scale, expected)
    codes, clean_codes = codes_of(quantized).copy(), codes_of(clean).copy()
    codes[1, 32:] = clean_codes[1, 32:] = 0
    assert np.array_equal(codes, clean_codes)


def test_weights_of_many_experts_quantise_as_each_alone():
    weights = torch.randn(3, 4, 64, generator=seeded(7))
    together = quantize_mxfp4(weights)
    for expert in range(3):
        assert_bitwise_equal(together[expert], quantize_mxfp4(weights[expert]))


def test_a_weight_whose_input_size_is_no_multiple_of_32_is_refused_by_name():
    with pytest.raises(ValueError, match=r"weight.shape\[-1\]: expected a multiple of 32, got 360"):
        quantize_mxfp4(torch.zeros(2, 360))
