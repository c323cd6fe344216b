"""The humming backend: what its packer refuses (anywhere), and its GEMMs against float64 (on a Hopper GPU)."""

import dataclasses
import math

import pytest
import torch
from helpers import assert_bitwise_equal, random_mxfp4, relative_l2, seeded
from torch import Tensor

from rankmoe.activation import apply_activation
from rankmoe.backends import backend_names, choose_backend, get_backend
from rankmoe.combine import combine
from rankmoe.experts import down, gate_up, pack_experts
from rankmoe.kernels import experts_humming
from rankmoe.kernels.experts_humming import SCALE_BYTES, SCALE_OCTAVES, check_scales, neutral_scales
from rankmoe.moe import Workspace, routed_moe
from rankmoe.quantize import dequantize, quantize_mxfp8
from rankmoe.schedule import build_schedule
from rankmoe.types import (
    Activation,
    ExpertPlacement,
    ExpertSchedule,
    ExpertWeights,
    MXTensor,
    Problem,
    RouterConfig,
    SiTU,
    SwiGLU,
)

needs_hopper = pytest.mark.skipif(not experts_humming.available(), reason="needs a Hopper GPU and humming-kernels")
#: Rounding to bfloat16, a departure from docs/numerics.md: at most 2^-8 of a value.
BFLOAT16_L2 = 2.0**-8
#: Outputs that are the rounded float64 product to the bit. Others come from the tensor cores, which cut the products of
#: 32 elements off 13 bits below the largest; it shows where these differ more in size, as behind an activation.
SAME_BITS = {"gate_up": 0.98, "down": 0.92}


# --- which problems ---------------------------------------------------------------------------------------------------
def test_the_backend_never_claims_to_follow_every_rule():
    problem = Problem(4, 128, 64, SiTU(), device_type="cuda")
    backend = get_backend("humming")
    assert not backend.covered(problem)
    assert backend.approximated(problem)
    assert not backend.approximated(dataclasses.replace(problem, device_type="cpu"))
    assert not backend.approximated(dataclasses.replace(problem, hidden_size=96))
    assert not backend.approximated(dataclasses.replace(problem, intermediate_size=32))


def test_it_is_never_chosen_unasked():
    problem = Problem(4, 128, 64, SiTU(), device_type="cuda")
    others = [name for name in backend_names() if name != "humming" and get_backend(name).available()]
    if any(get_backend(name).covered(problem) for name in others):
        assert choose_backend(problem).name in others
    else:
        with pytest.raises(ValueError, match="backend: expected one that covers"):
            choose_backend(problem)


# --- scales -----------------------------------------------------------------------------------------------------------
def weight_with_scales(*rows: list[int]) -> MXTensor:
    """[out, in]: every element 1.0, scale bytes as given."""
    scale = torch.tensor(rows, dtype=torch.uint8)
    return MXTensor(torch.full((len(rows), 16 * scale.shape[1]), 0x22, dtype=torch.uint8), scale, "mxfp4")


def test_the_span_of_an_expert_is_counted_over_groups_that_hold_values():
    weight = weight_with_scales([120, 110], [125, 30])
    weight.data[1, 16:] = 0x80  # zeros of both signs
    assert check_scales("w13", 0, weight) == 15
    assert neutral_scales(weight, per_row=True).tolist() == [[120, 110], [125, 125]]
    assert neutral_scales(weight, per_row=False).tolist() == [[120, 110], [125, 125]]
    weight.data[:] = 0
    assert check_scales("w13", 0, weight) == 0
    assert neutral_scales(weight, per_row=True).tolist() == [[127, 127], [127, 127]]


@pytest.mark.parametrize(
    ("row", "group"),
    [
        ([120, SCALE_BYTES[0] - 1], 1),
        ([SCALE_BYTES[1] + 1, 239], 0),
        ([255, 120], 0),
        ([120, 120 + SCALE_OCTAVES], 0),
    ],
)
def test_a_scale_that_cannot_be_held_is_refused_by_tensor_expert_row_and_group(row, group):
    weight = weight_with_scales([120, 120], row)
    with pytest.raises(ValueError, match=rf"w2: expected scale bytes .* in expert 3, row 1, group {group}$"):
        check_scales("w2", 3, weight)


def test_a_nan_scale_of_a_group_of_zeros_is_refused_too():
    weight = weight_with_scales([120, 255])
    weight.data[:] = 0
    with pytest.raises(ValueError, match="got 255 in expert 0, row 0, group 1"):
        check_scales("w13", 0, weight)


# --- on a GPU ---------------------------------------------------------------------------------------------------------
PLACEMENT = ExpertPlacement(6)
# Expert 3 gets no row, expert 0 all tokens.
TOPK_IDS = torch.tensor([[0, 1], [0, 5], [0, 4], [0, 2], [0, 5]])


@dataclasses.dataclass
class Experts:
    """Packed weights and the checkpoint's tensors that they were made of."""

    weights: ExpertWeights
    w13: MXTensor
    w2: MXTensor


def experts(
    hidden_size: int = 192,
    intermediate_size: int = 320,
    activation: Activation = SiTU(),  # noqa: B008
    *,
    placement: ExpertPlacement = PLACEMENT,
    has_bias: bool = False,
    row_span: int = 0,
) -> Experts:
    """Random experts; ``row_span``: octaves by which rows differ."""
    num_experts = placement.num_experts
    w13 = random_mxfp4(num_experts, 2 * intermediate_size, hidden_size, seed=1)
    w2 = random_mxfp4(num_experts, hidden_size, intermediate_size, seed=2)
    mine = torch.tensor(placement.expert_ids)
    for tensor in (w13, w2):
        if row_span:
            shift = torch.arange(tensor.shape[1]) % (row_span + 1)
            tensor.scale.copy_((tensor.scale.int() - shift[None, :, None]).to(torch.uint8))
    w13, w2 = w13[mine], w2[mine]
    biases = {}
    if has_bias:
        biases["w13_bias"] = torch.randn(len(mine), 2 * intermediate_size, generator=seeded(3)).cuda()
        biases["w2_bias"] = torch.randn(len(mine), hidden_size, generator=seeded(4)).cuda()
    weights = pack_experts(w13.to("cuda"), w2.to("cuda"), activation, placement, backend="humming", **biases)
    return Experts(weights, w13, w2)


def batch(hidden_size: int = 192, ids: Tensor = TOPK_IDS, num_experts: int = 6) -> tuple[MXTensor, ExpertSchedule]:
    x = quantize_mxfp8(2 * torch.randn(len(ids), hidden_size, generator=seeded(5)))
    return x.to("cuda"), build_schedule(ids.cuda(), num_experts, num_experts=num_experts)


def products(rows: MXTensor, index: Tensor, schedule: ExpertSchedule, weight: MXTensor, bias: Tensor | None) -> Tensor:
    """[number of rows, out] float64 on the CPU: the same operands, dequantised."""
    operands, matrices = dequantize(rows, torch.float64).cpu()[index.cpu()], dequantize(weight, torch.float64)
    owner = torch.arange(schedule.num_local_experts).repeat_interleave(schedule.expert_counts.cpu())
    out = torch.einsum("rn,ron->ro", operands, matrices[owner])
    return out if bias is None else out + bias.cpu()[owner]


def used_rows(schedule: ExpertSchedule) -> int:
    return int(schedule.expert_offsets[-1])


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("row_span", [0, 7, 30])
@pytest.mark.parametrize("sizes", [(192, 320), (128, 64), (64, 128)], ids=str)
def test_each_gemm_is_the_float64_product_rounded_to_bfloat16(sizes, row_span):
    hidden_size, intermediate_size = sizes
    made = experts(hidden_size, intermediate_size, row_span=row_span)
    x, schedule = batch(hidden_size)
    num_rows = used_rows(schedule)
    scratch = torch.full((len(schedule.row_tokens), intermediate_size), math.nan, device="cuda")
    middle = gate_up(x, schedule, made.weights, scratch)
    accumulators = scratch.view(torch.bfloat16)[:num_rows].cpu()
    expected = products(x, schedule.row_tokens[:num_rows].long(), schedule, made.w13, None)
    assert relative_l2(accumulators, expected) <= BFLOAT16_L2
    assert (accumulators == expected.bfloat16()).double().mean() >= SAME_BITS["gate_up"]
    rows = down(middle, schedule, made.weights)[:num_rows].cpu()
    expected = products(middle, torch.arange(num_rows), schedule, made.w2, None)
    assert rows.dtype == torch.float32
    assert relative_l2(rows, expected) <= BFLOAT16_L2
    assert (rows.bfloat16() == expected.bfloat16()).double().mean() >= SAME_BITS["down"]


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("activation", [SiTU(), SwiGLU(), SwiGLU(1.702, 7.0, 1.0)], ids=["situ", "swiglu", "gpt_oss"])
def test_the_middle_comes_from_the_accumulators_and_the_float32_bias(activation):
    made = experts(activation=activation, has_bias=True)
    x, schedule = batch()
    num_rows = used_rows(schedule)
    scratch = torch.empty(len(schedule.row_tokens), 320, device="cuda")
    middle = gate_up(x, schedule, made.weights, scratch)[:num_rows]
    accumulators = scratch.view(torch.bfloat16)[:num_rows].float().cpu()
    owner = torch.arange(6).repeat_interleave(schedule.expert_counts.cpu())
    expected = quantize_mxfp8(apply_activation(accumulators + made.weights.w13_bias.cpu()[owner], activation))
    codes, expected_codes = middle.data.cpu().view(torch.uint8).int(), expected.data.view(torch.uint8).int()
    assert (codes != expected_codes).double().mean() <= 1e-3
    rows = down(gate_up(x, schedule, made.weights), schedule, made.weights)[:num_rows].cpu()
    expected_rows = products(middle, torch.arange(num_rows), schedule, made.w2, made.weights.w2_bias)
    assert relative_l2(rows, expected_rows) <= BFLOAT16_L2


@pytest.mark.gpu
@needs_hopper
def test_a_layer_has_the_same_bits_in_100_runs_and_whatever_the_buffers_hold():
    made = experts()
    hidden_states, logits = (
        torch.randn(64, 192, generator=seeded(6)).cuda(),
        torch.randn(64, 6, generator=seeded(7)).cuda(),
    )
    workspace = Workspace.allocate(64, 3, made.weights)
    results = []
    for poison in [math.nan, -1e38, *([math.inf] * 98)]:
        for buffer in (workspace.middle, workspace.rows):
            buffer.fill_(poison)
        results.append(routed_moe(hidden_states, logits, made.weights, RouterConfig(3), workspace=workspace))
    for result in results[1:]:
        assert_bitwise_equal(result, results[0])


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 33, 64])
@pytest.mark.parametrize("ep_size", [2, 4, 8, 16])
def test_global_and_rank_local_ids_give_the_same_bits(ep_size, num_tokens):
    placement = ExpertPlacement(64, ep_size, 1)
    made = experts(128, 64, placement=placement)
    hidden_states = torch.randn(num_tokens, 128, generator=seeded(8)).cuda()
    logits = torch.randn(num_tokens, 64, generator=seeded(9)).cuda()
    one, other = (
        routed_moe(hidden_states, logits, made.weights, RouterConfig(8), rank_local=rank_local)
        for rank_local in (True, False)
    )
    assert_bitwise_equal(one, other)


@pytest.mark.gpu
@needs_hopper
def test_a_row_has_the_same_bits_alone_and_in_a_batch():
    made = experts(placement=ExpertPlacement(16))
    hidden_states = torch.randn(300, 192, generator=seeded(10)).cuda()
    logits = torch.randn(300, 16, generator=seeded(11)).cuda()
    whole = routed_moe(hidden_states, logits, made.weights, RouterConfig(4))
    for count in (1, 64):
        part = routed_moe(hidden_states[:count], logits[:count], made.weights, RouterConfig(4))
        assert_bitwise_equal(part, whole[:count])


@pytest.mark.gpu
@needs_hopper
def test_a_nan_row_makes_its_own_output_nan_and_no_other():
    made = experts()
    hidden_states, logits = (
        torch.randn(5, 192, generator=seeded(12)).cuda(),
        torch.randn(5, 6, generator=seeded(13)).cuda(),
    )
    clean = routed_moe(hidden_states, logits, made.weights, RouterConfig(3))
    hidden_states[1, 40] = math.nan
    out = routed_moe(hidden_states, logits, made.weights, RouterConfig(3))
    assert out[1].isnan().all()
    others = [0, 2, 3, 4]
    assert_bitwise_equal(out[others], clean[others])


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("num_tokens", [0, 3], ids=["no_tokens", "no_local_tokens"])
def test_a_rank_without_rows_gives_zeros(num_tokens):
    made = experts()
    x = quantize_mxfp8(torch.ones(num_tokens, 192)).to("cuda")
    schedule = build_schedule(torch.full((num_tokens, 2), -1).cuda(), 6, num_experts=6)
    rows = down(gate_up(x, schedule, made.weights), schedule, made.weights)
    out = combine(rows, torch.ones(num_tokens, 2).cuda(), schedule)
    assert_bitwise_equal(out, torch.zeros(num_tokens, 192, dtype=torch.bfloat16, device="cuda"))


@pytest.mark.gpu
@needs_hopper
def test_a_captured_layer_replays_with_new_inputs():
    made = experts()
    hidden_states, logits = (
        torch.randn(8, 192, generator=seeded(14)).cuda(),
        torch.randn(8, 6, generator=seeded(15)).cuda(),
    )
    workspace = Workspace.allocate(8, 3, made.weights)

    def run() -> Tensor:
        return routed_moe(hidden_states, logits, made.weights, RouterConfig(3), workspace=workspace)

    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seed in (16, 17):
        hidden_states.copy_(torch.randn(8, 192, generator=seeded(seed)))
        logits.copy_(torch.randn(8, 6, generator=seeded(seed + 10)))
        graph.replay()
        assert_bitwise_equal(out, run())


@pytest.mark.gpu
@needs_hopper
def test_the_layer_agrees_with_the_cpu_backend():
    made = experts()
    hidden_states, logits = torch.randn(16, 192, generator=seeded(18)), torch.randn(16, 6, generator=seeded(19))
    weights = pack_experts(made.w13, made.w2, SiTU(), PLACEMENT, backend="cpu")
    options = {"out_dtype": torch.float32}
    expected = routed_moe(hidden_states, logits, weights, RouterConfig(3), **options)
    got = routed_moe(hidden_states.cuda(), logits.cuda(), made.weights, RouterConfig(3), **options)
    assert relative_l2(got.cpu(), expected) <= 2e-2
