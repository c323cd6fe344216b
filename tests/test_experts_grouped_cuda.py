"""The expert GEMMs of many rows: that they compile clean, and on a GPU that they are exact whatever the rows."""

import dataclasses
import math

import pytest
import torch
from expert_cases import SHAPES, expected_middle, expected_rows, make_experts, move, shape_on, skip_some
from helpers import assert_bitwise_equal, random_batch, random_experts, random_mxfp4, relative_l2, seeded

from rankmoe import reference
from rankmoe.experts import down, gate_up, pack_experts
from rankmoe.front import route_quantize
from rankmoe.kernels import experts_common, experts_cuda, experts_grouped_cuda, nvrtc
from rankmoe.kernels.experts_common import Stage
from rankmoe.kernels.experts_grouped_cuda import DEFAULT_CONFIG, GroupedConfig
from rankmoe.moe import Workspace, routed_moe
from rankmoe.quantize import dequantize, quantize_mxfp8
from rankmoe.schedule import build_schedule
from rankmoe.types import ExpertPlacement, ExpertSchedule, ExpertWeights, MXTensor, RouterConfig, SiTU

needs_compiler = pytest.mark.skipif(not nvrtc.can_compile(), reason="needs NVRTC and cuda-bindings")
needs_gpu = pytest.mark.skipif(
    not (experts_cuda.available() and torch.cuda.get_device_capability() == (9, 0)), reason="needs a Hopper GPU, NVRTC"
)
#: One expert's rows at and around every size where another width, or another item, begins.
COUNTS = [0, 1, 15, 16, 17, 0, 111, 112, 113, 225, 300, 8]


# --- configurations and compilation ----------------------------------------------------------------------------------
def test_the_default_fits_any_number_of_experts():
    assert DEFAULT_CONFIG.is_valid(1)
    assert DEFAULT_CONFIG.is_valid(experts_cuda.MAX_LOCAL_EXPERTS)


@pytest.mark.parametrize(
    "change", [{"columns": 100}, {"columns": 144}, {"columns": 0}, {"stages": 1}, {"stages": 6}, {"group_tiles": 4}]
)
def test_configurations_that_do_not_fit_are_invalid(change):
    assert not dataclasses.replace(DEFAULT_CONFIG, **change).is_valid(128)


@needs_compiler
@pytest.mark.parametrize("is_gate_up", [True, False])
@pytest.mark.parametrize("name", ["kimi-k3", "gpt-oss", "small"])
def test_the_gemms_compile_without_local_memory_or_serialised_multiplications(name, is_gate_up):
    hidden_size, intermediate_size, activation, has_bias = SHAPES[name]
    sizes = (hidden_size, 2 * intermediate_size) if is_gate_up else (intermediate_size, hidden_size)
    common = experts_common.macros_of(is_gate_up, *sizes, activation, has_bias=has_bias, has_factor=has_bias)
    check = f'static_assert(sizeof(Shared) <= {DEFAULT_CONFIG.shared_bytes(112)}, "the host gives what is needed");'
    macros = dict((*common, *DEFAULT_CONFIG.macros(112)))
    cubin, log = nvrtc.compile_cubin(experts_grouped_cuda.source() + check, macros, "sm_90a")
    assert cubin
    assert not nvrtc.parse_resource_usage(log).uses_local_memory
    assert "serialized" not in log


@needs_compiler
@pytest.mark.parametrize("has_tokens", [0, 1])
@pytest.mark.parametrize("num_inputs", [3584, 2880])
def test_the_row_kernel_compiles_without_local_memory(num_inputs, has_tokens):
    common = experts_common.macros_of(False, num_inputs, 64, SiTU(), has_bias=False, has_factor=False)
    macros = dict((*common, ("HAS_TOKENS", has_tokens)))
    cubin, log = nvrtc.compile_cubin(experts_common.source("widen_rows.cu"), macros, "sm_90a")
    assert cubin
    assert not nvrtc.parse_resource_usage(log).uses_local_memory


# --- on a GPU, and on a CPU as tests/cuda_on_cpu.py runs kernels ------------------------------------------------------
@pytest.fixture
def kernel_device(kernel_device):
    """Of GPUs only Hopper's have wgmma."""
    if kernel_device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    return kernel_device


def schedule_of(counts: list[int], device: str = "cuda") -> ExpertSchedule:
    """Tokens in order of their one expert, on a device, and unused rows as the kernels leave them."""
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    ids = ids[torch.randperm(len(ids), generator=seeded(7))].int()
    schedule = build_schedule(ids[:, None].to(device), len(counts), num_experts=len(counts))
    unused = torch.full((5,), -1, dtype=torch.int32, device=device)
    return dataclasses.replace(
        schedule, expert_token_mask=None, row_tokens=torch.cat([schedule.row_tokens[: len(ids)], unused])
    )


def run_gemms(
    x: MXTensor, schedule: ExpertSchedule, weights: ExpertWeights, config: GroupedConfig = DEFAULT_CONFIG
) -> tuple[MXTensor, torch.Tensor]:
    """Middle and rows, in buffers that held NaN."""
    num_rows, device = schedule.row_tokens.shape[0], x.data.device
    middle = experts_cuda.middle_in(torch.full((num_rows, weights.intermediate_size), math.nan, device=device))
    rows = torch.full((num_rows, weights.hidden_size), math.nan, device=device)
    experts_grouped_cuda.launch(Stage(weights, True), x, schedule, middle, None, config)
    experts_grouped_cuda.launch(Stage(weights, False), middle, schedule, None, rows, config)
    return middle, rows


@pytest.mark.parametrize("name", SHAPES)
def test_each_gemm_is_float64_to_the_tolerance(kernel_device, name):
    hidden_size, intermediate_size, activation, has_bias = shape_on(kernel_device, name)
    weights, w13, w2 = make_experts(
        len(COUNTS), hidden_size, intermediate_size, activation, has_bias, device=kernel_device
    )
    schedule, num_rows = schedule_of(COUNTS, kernel_device), sum(COUNTS)
    x = quantize_mxfp8(torch.randn(num_rows, hidden_size, generator=seeded(5)).bfloat16().to(kernel_device))
    middle, rows = run_gemms(x, schedule, weights)
    middle = middle[:num_rows]
    expected = quantize_mxfp8(expected_middle(x, schedule, weights, w13).float())
    assert (middle.data.view(torch.uint8) == expected.data.view(torch.uint8)).double().mean() > 0.9995
    assert relative_l2(dequantize(middle, torch.float64), dequantize(expected, torch.float64)) < 2e-3
    exact = expected_rows(middle, schedule, weights, w2)
    assert relative_l2(rows[:num_rows], exact) < 5e-6  # the rule allows 1e-5
    assert float((rows[:num_rows].double() - exact).abs().max()) < 1e-5 * float(exact.abs().max())
    assert rows[num_rows:].isnan().all()


@pytest.mark.parametrize("sizes", [(16, 4, 1, 2), (64, 2, 2, 4), (128, 2, 1, 3)])
def test_configurations_give_the_same_bits(kernel_device, sizes):
    skip_some(kernel_device, sizes != (64, 2, 2, 4))
    weights, _, _ = make_experts(len(COUNTS), 288, 160, device=kernel_device)
    schedule = schedule_of(COUNTS, kernel_device)
    x = quantize_mxfp8(torch.randn(sum(COUNTS), 288, generator=seeded(5)).to(kernel_device))
    middle, rows = run_gemms(x, schedule, weights)
    other_middle, other_rows = run_gemms(x, schedule, weights, GroupedConfig(*sizes))
    num_rows = sum(COUNTS)
    assert_bitwise_equal(other_middle[:num_rows], middle[:num_rows])
    assert_bitwise_equal(other_rows[:num_rows], rows[:num_rows])


def test_a_row_has_the_same_bits_alone_and_among_others(kernel_device):
    hidden_size = 1024 if kernel_device == "cuda" else 256
    weights, _, _ = make_experts(3, hidden_size, hidden_size // 2, device=kernel_device)
    x = quantize_mxfp8(torch.randn(400, hidden_size, generator=seeded(5)).to(kernel_device))
    together, alone = schedule_of([0, 400, 0], kernel_device), schedule_of([0, 1, 0], kernel_device)
    _, rows = run_gemms(x, together, weights)
    for row in (0, 17, 399):
        token = int(together.row_tokens[row])
        _, only = run_gemms(x[token : token + 1], alone, weights)
        assert_bitwise_equal(only[:1], rows[row : row + 1])


def test_a_group_of_nan_makes_its_row_nan_and_no_other(kernel_device):
    weights, _, _ = make_experts(2, 256, 128, device=kernel_device)
    schedule = schedule_of([40, 90], kernel_device)
    hidden_states = torch.randn(130, 256, generator=seeded(1)).to(kernel_device)
    _, clean = run_gemms(quantize_mxfp8(hidden_states), schedule, weights)
    token = int(schedule.row_tokens[55])
    hidden_states[token, 77] = math.inf
    middle, rows = run_gemms(quantize_mxfp8(hidden_states), schedule, weights)
    is_nan = torch.arange(130, device=kernel_device) == 55
    assert torch.equal(rows[:130].isnan().all(1), is_nan)
    assert (middle.scale[55] == 255).all()
    assert_bitwise_equal(rows[:130][~is_nan], clean[:130][~is_nan])


def test_all_scale_bytes_and_codes_are_exact(kernel_device):
    """A row of one 1.0 reads a column of the weight back, for every scale byte but that of NaN."""
    codes = torch.arange(16, dtype=torch.uint8)
    data = (codes | (codes.roll(1) << 4)).expand(255, 64, 16).contiguous()
    scale = torch.arange(255, dtype=torch.uint8)[:, None, None].expand(255, 64, 1).contiguous()
    w2 = MXTensor(data, scale, "mxfp4")
    weights = pack_experts(
        random_mxfp4(255, 64, 64).to(kernel_device),
        w2.to(kernel_device),
        SiTU(),
        ExpertPlacement(255, 1, 0),
        backend="cuda",
    )
    schedule = schedule_of([32] * 255, kernel_device)
    middle = MXTensor(
        torch.eye(32).repeat(256, 1)[: 255 * 32 + 5].to(torch.float8_e4m3fn),
        torch.full((255 * 32 + 5, 1), 127, dtype=torch.uint8),
        "mxfp8",
    ).to(kernel_device)
    rows = torch.empty(255 * 32 + 5, 64, device=kernel_device)
    experts_grouped_cuda.launch(Stage(weights, False), middle, schedule, None, rows)
    got = rows[: 255 * 32].view(255, 32, 64).cpu()
    assert torch.equal(got, reference.dequantize(w2).float().transpose(1, 2))


@pytest.mark.gpu
@needs_gpu
def test_more_than_2_to_the_31_output_elements_reach_the_last_row():
    num_rows, hidden_size = 300_000, 7168
    assert num_rows * hidden_size > 2**31
    weights, _, w2 = make_experts(2, hidden_size, 32)
    schedule = schedule_of([num_rows - 3, 3])
    x = quantize_mxfp8(torch.randn(1, hidden_size, generator=seeded(5)).cuda())
    x = MXTensor(x.data.expand(num_rows, -1).contiguous(), x.scale.expand(num_rows, -1).contiguous(), "mxfp8")
    middle, rows = run_gemms(x, schedule, weights)
    exact = dequantize(middle[num_rows - 1 : num_rows], torch.float64) @ dequantize(w2[1], torch.float64).T
    assert relative_l2(rows[num_rows - 1 : num_rows], exact) < 5e-6
    assert_bitwise_equal(rows[num_rows - 4], rows[0])


def test_beyond_the_switch_the_layer_is_the_references_and_the_decode_kernels(kernel_device):
    placement, config = ExpertPlacement(24, 2, 1), RouterConfig(6)
    on_cpu = random_experts(placement, 96, 64, backend="reference")
    weights = move(on_cpu, kernel_device)
    hidden_states, logits = random_batch(90, 24, 96)
    workspace = Workspace.allocate(90, 6, weights)
    outs = []
    for fill in (math.nan, 0.0):
        workspace.middle.fill_(fill)
        workspace.rows.fill_(fill)
        options = {"out_dtype": torch.float32, "workspace": workspace}
        outs.append(routed_moe(hidden_states.to(kernel_device), logits.to(kernel_device), weights, config, **options))
        outs.append(
            routed_moe(
                hidden_states.to(kernel_device), logits.to(kernel_device), weights, config, rank_local=False, **options
            )
        )
    for other in outs[1:]:
        assert_bitwise_equal(other, outs[0])
    front = route_quantize(logits, hidden_states, config, local_range=placement.local_range)
    expected = reference.fused_moe(front.x, front.routing.topk_ids, front.routing.topk_weights, on_cpu)
    assert relative_l2(outs[0].cpu(), expected) < 5e-3
    few = routed_moe(
        hidden_states[:64].to(kernel_device), logits[:64].to(kernel_device), weights, config, out_dtype=torch.float32
    )
    assert relative_l2(few, outs[0][:64]) < 1e-5


def test_the_switch_is_by_shapes_alone(kernel_device):
    weights, _, _ = make_experts(8, 128, 64, device=kernel_device)
    x = quantize_mxfp8(torch.ones(70, 128).to(kernel_device))
    everyone = build_schedule(torch.zeros(70, 1, dtype=torch.int32).to(kernel_device), 8, num_experts=8)
    nobody = build_schedule(torch.full((70, 1), -1, dtype=torch.int32).to(kernel_device), 8, num_experts=8)
    for schedule in (everyone, nobody):
        for is_gate_up in (True, False):
            config = experts_cuda._config_for(Stage(weights, is_gate_up), schedule)
            assert isinstance(config, GroupedConfig)
    assert not experts_grouped_cuda.is_chosen(63, 8, "sm_90")
    assert not down(gate_up(x, nobody, weights), nobody, weights, torch.zeros(70, 128, device=kernel_device)).any()


@pytest.mark.gpu
@needs_gpu
def test_a_captured_graph_takes_new_routings():
    weights = move(random_experts(ExpertPlacement(16, 2, 0), 256, 128, backend="reference"))
    hidden_states, logits = (t.cuda() for t in random_batch(100, 16, 256))
    graph = torch.cuda.CUDAGraph()
    routed_moe(hidden_states, logits, weights, RouterConfig(4))
    with torch.cuda.graph(graph):
        out = routed_moe(hidden_states, logits, weights, RouterConfig(4))
    for replay in range(20):
        fresh_states, fresh_logits = random_batch(100, 16, 256, seed=replay)
        fresh_logits[:, :8] += (-50.0, 0.0, 50.0)[replay % 3]  # none, some, all of the rows for this rank
        hidden_states.copy_(fresh_states)
        logits.copy_(fresh_logits)
        graph.replay()
        assert_bitwise_equal(out.clone(), routed_moe(hidden_states, logits, weights, RouterConfig(4)))
