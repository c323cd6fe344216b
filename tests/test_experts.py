import math

import pytest
import torch
from helpers import assert_bitwise_equal, random_experts, random_mxfp4, relative_l2, result_or_refusal, seeded
from torch import Tensor

from rankmoe.experts import down, gate_up, pack_experts
from rankmoe.kernels import experts_cpu, triton_support
from rankmoe.quantize import dequantize, quantize_mxfp8
from rankmoe.schedule import build_schedule
from rankmoe.types import ExpertPlacement, ExpertSchedule, ExpertWeights, MXTensor, SiTU, SwiGLU

BACKENDS = ["cpu", "reference", *(["triton"] if triton_support.interprets() else [])]
# The interpreter computes with NumPy, which warns where a GPU gives NaN or infinity in silence.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
ACTIVATIONS = {
    "situ": SiTU(),
    "situ_other_betas": SiTU(beta=1.5, linear_beta=3.0),
    "swiglu": SwiGLU(),
    "swiglu_limit": SwiGLU(limit=2.0),
    "gpt_oss": SwiGLU(alpha=1.702, limit=7.0, up_offset=1.0),
}
PLACEMENT = ExpertPlacement(6)
# Expert 3 gets no row, expert 0 all tokens.
TOPK_IDS = torch.tensor([[0, 1], [0, 5], [0, 4], [0, 2], [0, 5]])


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def rows_and_schedule(hidden_size: int = 96) -> tuple[MXTensor, ExpertSchedule]:
    x = quantize_mxfp8(2 * torch.randn(len(TOPK_IDS), hidden_size, generator=seeded(5)))
    return x, build_schedule(TOPK_IDS, PLACEMENT.num_local_experts, num_experts=PLACEMENT.num_experts)


# --- the oracle: the same dequantised operands, in float64, a few lines each ------------------------------------------
def accumulate(rows: MXTensor, row_index: Tensor, schedule: ExpertSchedule, weight: MXTensor, bias: Tensor | None):
    """[R, out] float64 products, and the bound on a float32 accumulation's error of each of them."""
    operands, matrices = dequantize(rows, torch.float64)[row_index], dequantize(weight, torch.float64)
    experts = torch.arange(schedule.num_local_experts).repeat_interleave(schedule.expert_counts)
    product = torch.einsum("rn,ron->ro", operands, matrices[experts])
    magnitude = torch.einsum("rn,ron->ro", operands.abs(), matrices[experts].abs())
    if bias is not None:
        product, magnitude = product + bias[experts], magnitude + bias[experts].abs()
    return product, magnitude * (operands.shape[1] + 1) * 2.0**-24


def activate(accumulators: Tensor, kind: SiTU | SwiGLU) -> Tensor:
    gate, up = accumulators.chunk(2, dim=1)
    if isinstance(kind, SiTU):
        gate = kind.beta * (gate / kind.beta).tanh() / (1 + (-gate).exp())
        return gate * kind.linear_beta * (up / kind.linear_beta).tanh()
    if kind.limit is not None:
        gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
    return (up + kind.up_offset) * gate / (1 + (-kind.alpha * gate).exp())


def middle_oracle(x: MXTensor, schedule: ExpertSchedule, weights: ExpertWeights) -> Tensor:
    accumulators, _ = accumulate(x, schedule.row_tokens.long(), schedule, weights.w13, weights.w13_bias)
    return activate(accumulators, weights.activation)


def assert_middle_agrees(middle: MXTensor, expected: Tensor) -> None:
    """Equal to the quantised oracle but for single codes where the float32 accumulation crosses a rounding boundary."""
    oracle = quantize_mxfp8(expected.float())
    codes, oracle_codes = middle.data.view(torch.uint8).int(), oracle.data.view(torch.uint8).int()
    is_same_scale = (middle.scale == oracle.scale).repeat_interleave(32, dim=1)
    assert (middle.scale != oracle.scale).double().mean() <= 0.01
    assert (codes - oracle_codes)[is_same_scale].abs().max() <= 1
    assert (codes != oracle_codes)[is_same_scale].double().mean() <= 0.01
    assert relative_l2(dequantize(middle), dequantize(oracle)) <= 5e-3


# --- accuracy --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [False, True], ids=["no_bias", "bias"])
def test_gate_up_is_the_quantised_float64_activation(backend, activation, has_bias):
    weights = random_experts(PLACEMENT, 96, 64, ACTIVATIONS[activation], has_bias=has_bias, backend=backend)
    x, schedule = rows_and_schedule()
    assert_middle_agrees(gate_up(x, schedule, weights), middle_oracle(x, schedule, weights))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_first_gemm_is_within_float32_accumulation_of_float64(activation):
    weights = random_experts(PLACEMENT, 96, 64, ACTIVATIONS[activation], has_bias=True, backend="cpu")
    x, schedule = rows_and_schedule()
    scratch = torch.empty(len(schedule.row_tokens), 64)
    gate_up(x, schedule, weights, scratch)  # the cpu backend leaves the activation before requantisation there
    assert relative_l2(scratch, middle_oracle(x, schedule, weights)) <= 1e-5


@pytest.mark.parametrize("has_bias", [False, True], ids=["no_bias", "bias"])
def test_down_is_within_float32_accumulation_of_float64(backend, has_bias):
    weights = random_experts(PLACEMENT, 96, 64, has_bias=has_bias, backend=backend)
    x, schedule = rows_and_schedule()
    middle = gate_up(x, schedule, weights)
    rows = down(middle, schedule, weights)
    expected, bound = accumulate(middle, torch.arange(middle.shape[0]), schedule, weights.w2, weights.w2_bias)
    assert rows.dtype == torch.float32
    assert relative_l2(rows, expected) <= 1e-5
    assert torch.all((rows - expected).abs() <= bound)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_accumulators_stay_finite_and_saturate_as_in_float64(backend, activation):
    weights = random_experts(PLACEMENT, 96, 64, ACTIVATIONS[activation], backend=backend)
    _, schedule = rows_and_schedule()
    x = quantize_mxfp8(3e4 * torch.randn(len(TOPK_IDS), 96, generator=seeded(6)))
    middle = gate_up(x, schedule, weights)
    assert dequantize(middle).isfinite().all()
    assert_middle_agrees(middle, middle_oracle(x, schedule, weights))


@pytest.mark.parametrize(("hidden_size", "intermediate_size"), [(2880, 32), (32, 2880), (96, 96)])
def test_sizes_that_are_no_tile_multiples_agree_with_float64(hidden_size, intermediate_size):
    placement, ids = ExpertPlacement(2), torch.tensor([[0], [1], [1]])
    weights = random_experts(placement, hidden_size, intermediate_size, backend="cpu")
    x = quantize_mxfp8(torch.randn(3, hidden_size, generator=seeded(7)))
    schedule = build_schedule(ids, 2, num_experts=2)
    middle = gate_up(x, schedule, weights)
    assert_middle_agrees(middle, middle_oracle(x, schedule, weights))
    expected, bound = accumulate(middle, torch.arange(3), schedule, weights.w2, None)
    assert torch.all((down(middle, schedule, weights) - expected).abs() <= bound)


def test_several_weight_tiles_agree_with_float64():
    num_outputs = 2 * (experts_cpu.TILE_ELEMENTS // 1024) + 3
    weight, rows = random_mxfp4(num_outputs, 1024), torch.randn(3, 1024, generator=seeded(8))
    expected = rows.double() @ dequantize(weight, torch.float64).T
    assert relative_l2(experts_cpu.matmul(rows, weight), expected) <= 1e-5


# --- formats ---------------------------------------------------------------------------------------------------------
def weights_of_every_scale_byte(scale_bytes: range) -> MXTensor:
    """[1, len(scale_bytes), 32]: row b has the b-th scale byte and holds all 16 codes twice."""
    codes = torch.arange(0, 256, 17, dtype=torch.int32).to(torch.uint8)
    data = codes.expand(1, len(scale_bytes), 16).contiguous()
    return MXTensor(data, torch.tensor(scale_bytes, dtype=torch.uint8)[None, :, None], "mxfp4")


def down_with(w2: MXTensor, middle: MXTensor, backend: str) -> Tensor:
    """Every middle row through one expert with this w2."""
    hidden_size = w2.shape[1]
    weights = pack_experts(random_mxfp4(1, 64, hidden_size), w2, SiTU(), ExpertPlacement(1), backend=backend)
    ids = torch.zeros(middle.shape[0], 1, dtype=torch.int32)
    return down(middle, build_schedule(ids, 1, num_experts=1), weights)


def unit_rows(value: float = 1.0) -> MXTensor:
    return quantize_mxfp8(value * torch.eye(32))


@pytest.mark.parametrize("first", [*range(0, 221, 32), 221])
def test_every_scale_byte_up_to_252_times_every_code_passes_the_gemm_exactly(backend, first):
    w2 = weights_of_every_scale_byte(range(first, first + 32))
    assert torch.equal(down_with(w2, unit_rows(), backend), dequantize(w2)[0].T)


@pytest.mark.parametrize("byte", [253, 254])
def test_a_scale_whose_weights_overflow_float32_is_exact_or_refused(backend, byte):
    w2 = weights_of_every_scale_byte(range(byte - 31, byte + 1))
    rows = result_or_refusal("w2", lambda: down_with(w2, unit_rows(2.0**-20), backend))
    if rows is not None:
        assert torch.equal(rows.double(), dequantize(w2, torch.float64)[0].T * 2.0**-20)


def test_scale_byte_255_makes_its_own_output_nan_and_no_other(backend):
    w2 = weights_of_every_scale_byte(range(96, 128))
    clean = down_with(w2, unit_rows(), backend)
    w2.scale[0, 7] = 255
    rows = down_with(w2, unit_rows(), backend)
    assert rows[:, 7].isnan().all()
    rows[:, 7] = clean[:, 7]
    assert_bitwise_equal(rows, clean)


# --- what must not leak ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["w13_bias", "w2_bias"])
def test_a_nan_bias_of_an_expert_that_nobody_chose_does_not_leak(backend, name):
    x, schedule = rows_and_schedule()
    weights = random_experts(PLACEMENT, 96, 64, has_bias=True, backend=backend)
    clean = down(gate_up(x, schedule, weights), schedule, weights)
    getattr(weights, name)[3] = math.nan
    assert_bitwise_equal(down(gate_up(x, schedule, weights), schedule, weights), clean)


def test_a_nan_row_makes_its_own_output_nan_and_no_other(backend):
    hidden_states = torch.randn(len(TOPK_IDS), 96, generator=seeded(9))
    _, schedule = rows_and_schedule()
    weights = random_experts(PLACEMENT, 96, 64, backend=backend)

    def run() -> Tensor:
        return down(gate_up(quantize_mxfp8(hidden_states), schedule, weights), schedule, weights)

    clean = run()
    hidden_states[1, 40] = math.nan
    rows, is_bad = run(), schedule.row_tokens == 1
    assert rows[is_bad].isnan().all()
    assert_bitwise_equal(rows[~is_bad], clean[~is_bad])


@pytest.mark.parametrize("poison", [math.nan, math.inf, -1e38])
@pytest.mark.parametrize("spare_rows", [0, 3])
def test_what_the_buffers_hold_at_entry_never_matters(backend, poison, spare_rows):
    x, schedule = rows_and_schedule()
    weights = random_experts(PLACEMENT, 96, 64, has_bias=True, backend=backend)
    middle = gate_up(x, schedule, weights)
    rows = down(middle, schedule, weights)
    num_rows = len(schedule.row_tokens) + spare_rows
    assert_bitwise_equal(gate_up(x, schedule, weights, torch.full((num_rows, 64), poison)), middle)
    assert_bitwise_equal(down(middle, schedule, weights, torch.full((num_rows, 96), poison)), rows)


def test_down_writes_into_the_buffer_that_it_is_given(backend):
    x, schedule = rows_and_schedule()
    weights = random_experts(PLACEMENT, 96, 64, backend=backend)
    buffer = torch.empty(len(schedule.row_tokens), 96)
    rows = down(gate_up(x, schedule, weights), schedule, weights, buffer)
    assert rows.data_ptr() == buffer.data_ptr()


@pytest.mark.parametrize("num_tokens", [0, 3], ids=["no_tokens", "no_local_tokens"])
def test_a_rank_without_rows_computes_nothing(backend, num_tokens):
    weights = random_experts(PLACEMENT, 96, 64, has_bias=True, backend=backend)
    x = quantize_mxfp8(torch.ones(num_tokens, 96))
    schedule = build_schedule(torch.full((num_tokens, 2), -1), 6, num_experts=6)
    middle = gate_up(x, schedule, weights)
    assert middle.shape == (0, 64)
    assert down(middle, schedule, weights).shape == (0, 96)


# --- errors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"w13": random_mxfp4(3, 64, 64)}, ValueError, r"w13: expected \[2, out, in\] .*, got \(3, 64, 64\)"),
        ({"w2": random_mxfp4(64, 32)}, ValueError, r"w2: expected \[2, out, in\] .*, got \(64, 32\)"),
        ({"w13": random_mxfp4(2, 96, 64)}, ValueError, r"w13: expected \[L, 2 \* 32, H\].*got \(2, 96, 64\)"),
        ({"w2": random_mxfp4(2, 96, 32)}, ValueError, r"w2 \[L, H, 32\] with the same H.*\(2, 96, 32\)"),
        ({"w13_bias": torch.zeros(2, 63)}, ValueError, r"w13_bias: expected \(2, 64\) float32, got \(2, 63\)"),
        ({"w2_bias": torch.zeros(2, 64).half()}, ValueError, r"w2_bias: expected \(2, 64\) float32, got .*float16"),
        ({"w2": quantize_mxfp8(torch.zeros(2, 32))}, TypeError, "w2: expected format mxfp4, got mxfp8"),
        ({"backend": "gpu"}, ValueError, "backend: expected one of .*cpu.*, got 'gpu'"),
    ],
)
def test_experts_that_do_not_fit_are_refused_by_name(fields, error, message):
    arguments = {"w13": random_mxfp4(2, 64, 64), "w2": random_mxfp4(2, 64, 32), **fields}
    with pytest.raises(error, match=message):
        pack_experts(activation=SiTU(), placement=ExpertPlacement(2), **arguments)


@pytest.mark.parametrize(("hidden_size", "intermediate_size"), [(360, 32), (32, 360)])
def test_a_size_of_360_is_refused_by_name(hidden_size, intermediate_size):
    with pytest.raises(ValueError, match="expected a multiple of 32, got 360"):
        random_experts(PLACEMENT, hidden_size, intermediate_size)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, s, w: gate_up(x[:2], s, w), r"x: expected mxfp8 \(5, 96\), got mxfp8 \(2, 96\)"),
        (lambda x, s, w: gate_up(quantize_mxfp8(torch.zeros(5, 64)), s, w), r"x: expected .*5, 96\), got .*5, 64\)"),
        (lambda x, s, w: gate_up(random_mxfp4(5, 96), s, w), "x: expected mxfp8 .*, got mxfp4"),
        (
            lambda x, s, w: gate_up(x, build_schedule(TOPK_IDS, 7, num_experts=7), w),
            "schedule: expected 6 local experts as the weights, got 7",
        ),
        (lambda x, s, w: down(x, s, w), r"middle: expected mxfp8 \(10, 64\), got mxfp8 \(5, 96\)"),
        (lambda x, s, w: gate_up(x, s, w, torch.empty(9, 64)), r"out: expected .* 10 rows of 64, got \(9, 64\)"),
        (lambda x, s, w: gate_up(x, s, w, torch.empty(10, 32)), r"out: expected .* 10 rows of 64, got \(10, 32\)"),
        (lambda x, s, w: gate_up(x, s, w, torch.empty(640)), r"out: expected .* 10 rows of 64, got \(640,\)"),
        (lambda x, s, w: gate_up(x, s, w, torch.empty(10, 64).half()), "out: expected float32 .*, got .*float16"),
    ],
)
def test_operands_that_do_not_fit_are_refused_by_name(call, message):
    x, schedule = rows_and_schedule()
    with pytest.raises(ValueError, match=message):
        call(x, schedule, random_experts(PLACEMENT, 96, 64))
