"""The native expert GEMMs: layout and refusals anywhere, that they compile clean, and on a GPU that they are exact."""

import dataclasses
import math

import pytest
import torch
from expert_cases import (
    GPT_OSS,
    PUBLISHED,
    SHAPES,
    expected_middle,
    expected_rows,
    make_experts,
    move,
    random_ids,
    shape_on,
    skip_some,
)
from helpers import (
    assert_bitwise_equal,
    random_batch,
    random_experts,
    random_mxfp4,
    relative_l2,
    seeded,
)

from rankmoe import reference
from rankmoe.backends import choose_backend
from rankmoe.combine import combine
from rankmoe.experts import down, gate_up, pack_experts
from rankmoe.front import route_quantize
from rankmoe.kernels import combine_cuda, experts_cuda, experts_grouped_cuda, nvrtc
from rankmoe.kernels.experts_common import expert_nbytes
from rankmoe.kernels.experts_cuda import (
    ExpertsConfig,
    config_from,
    config_values,
    default_config,
    macros_of,
    stored_scales,
)
from rankmoe.moe import Workspace, fused_moe, routed_moe
from rankmoe.quantize import dequantize, quantize_mxfp8
from rankmoe.schedule import build_schedule
from rankmoe.types import (
    ExpertPlacement,
    ExpertWeights,
    MXTensor,
    Problem,
    RouterConfig,
    Routing,
    SiTU,
    SwiGLU,
)

needs_compiler = pytest.mark.skipif(not nvrtc.can_compile(), reason="needs NVRTC and cuda-bindings")
needs_gpu = pytest.mark.skipif(not experts_cuda.available(), reason="needs a Hopper or Blackwell GPU, NVRTC")


# --- layout ----------------------------------------------------------------------------------------------------------
def decode_words(words: torch.Tensor) -> torch.Tensor:
    """[..., 2] int32 words to [..., 16] float64: 2^-126 of the values, found on bits as the kernels do."""
    unsigned = words.long() & 0xFFFFFFFF
    first, second = unsigned.unbind(-1)
    rest = (first & 0x06030603) | (second & 0xF9FCF9FC)
    pairs = ((first, 0), (first, 4), (first, 10), (rest, 8), (second, 2), (second, 6), (second, 12), (rest, 14))
    halves = []
    for word, rotation in pairs:
        rotated = ((word << rotation) | (word >> (32 - rotation))) & 0x81C081C0
        halves += [rotated & 0xFFFF, rotated >> 16]
    bits = torch.stack(halves, dim=-1) << 16
    return torch.where(bits >= 2**31, bits - 2**32, bits).int().view(torch.float32).double()


def unpack(packed: MXTensor, num_outputs: int, num_inputs: int, *, is_gate_up: bool) -> torch.Tensor:
    """[L, out, in] float64: the layout read as the kernel reads it, thread by thread."""
    num_experts, num_steps = packed.data.shape[0], -(-num_inputs // 128)
    nbytes = expert_nbytes(num_outputs, num_inputs)
    slots = packed.data.as_strided((num_experts, nbytes), (nbytes, 1)).view(num_experts, -1, num_steps, 2, 2176)
    num_tiles = slots.shape[1]
    words = (
        slots[..., :2048].contiguous().view(torch.int32).view(num_experts, num_tiles, num_steps, 2, 2, 2, 8, 4, 2, 2)
    )
    scales = slots[..., 2048:].reshape(num_experts, num_tiles, num_steps, 2, 8, 4, 2, 2).int()
    scales = (scales << 23).view(torch.float32).double().permute(0, 1, 2, 3, 6, 7, 4, 5)  # block, side, lane
    out = decode_words(words) * scales[..., None, None]
    # expert, tile, step, half, block, side, row, thread, word, code -> side, half, block, row; step, thread, ...
    places = out.permute(0, 1, 5, 3, 4, 6, 2, 7, 8, 9).reshape(num_experts, num_tiles, 2, 32, num_steps * 128)
    if is_gate_up:
        return places.transpose(1, 2).reshape(num_experts, num_tiles * 64, -1)[:, :num_outputs, :num_inputs]
    return places.reshape(num_experts, num_tiles * 64, -1)[:, :num_outputs, :num_inputs]


@pytest.mark.parametrize(("intermediate_size", "hidden_size"), [(32, 32), (64, 96), (96, 288)])
def test_the_packed_layout_holds_every_weight(intermediate_size, hidden_size):
    w13 = random_mxfp4(2, 2 * intermediate_size, hidden_size, seed=1, scale_bytes=(0, 128))
    w2 = random_mxfp4(2, hidden_size, intermediate_size, seed=2, scale_bytes=(100, 128))
    packed = experts_cuda.pack(w13, w2, torch.device("cpu"))
    assert packed.w13_factor is packed.w2_factor is None
    assert (packed.w13.shape, packed.w2.shape) == (w13.shape, w2.shape)
    for got, weight, is_gate_up in ((packed.w13, w13, True), (packed.w2, w2, False)):
        num_outputs, num_inputs = weight.shape[1:]
        unpacked = unpack(got, num_outputs, num_inputs, is_gate_up=is_gate_up)
        assert torch.equal(unpacked, reference.dequantize(weight))


def constant_weight(*scale_rows: list[int]) -> MXTensor:
    scale = torch.tensor(scale_rows, dtype=torch.uint8)
    return MXTensor(torch.full((len(scale_rows), 16 * scale.shape[1]), 0x22, dtype=torch.uint8), scale, "mxfp4")


def test_large_scales_are_taken_out_as_an_experts_factor():
    scale, shift = stored_scales("w2", 0, constant_weight([130, 128], [0, 127]))
    assert shift == 2
    assert scale.tolist() == [[254, 252], [124, 251]]
    assert stored_scales("w2", 0, constant_weight([128, 0]))[1] == 0


def test_groups_of_zeros_have_no_say_in_the_factor():
    weight = constant_weight([254, 120])
    weight.data[0, :16] = 0x80
    scale, shift = stored_scales("w2", 0, weight)
    assert (scale.tolist(), shift) == ([[127, 246]], 0)


@pytest.mark.parametrize(("row", "group", "byte"), [([255, 120], 0, 255), ([200, 66], 1, 66), ([120, 255], 1, 255)])
def test_a_scale_that_the_arithmetic_cannot_hold_is_refused_by_place(row, group, byte):
    message = f"w13: expected scale bytes .*, got {byte} in expert 3, row 1, group {group}"
    with pytest.raises(ValueError, match=message):
        stored_scales("w13", 3, constant_weight([row[0] if row[0] < 255 else 120, 120], row))


def test_the_smallest_scale_beside_the_largest_is_kept():
    assert stored_scales("w2", 0, constant_weight([254, 121]))[0].tolist() == [[254, 121]]


# --- which problems --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_published_models_are_covered(name):
    hidden_size, intermediate_size, activation, has_bias = SHAPES[name]
    problem = Problem(112, hidden_size, intermediate_size, activation, has_bias, "cuda")
    assert experts_cuda.covered(problem)
    assert not experts_cuda.covered(dataclasses.replace(problem, device_type="cpu"))
    assert not experts_cuda.covered(dataclasses.replace(problem, num_local_experts=1025))
    assert not experts_cuda.covered(dataclasses.replace(problem, hidden_size=65536))


def test_few_rows_have_a_configuration_of_their_own_but_not_where_batches_must_not_matter(monkeypatch):
    monkeypatch.delenv("RANKMOE_BATCH_INVARIANT", raising=False)
    many, few = default_config(3584, 112), default_config(3584, 112, experts_cuda.FEW_ROWS)
    assert few != many
    assert default_config(3584, 112, experts_cuda.FEW_ROWS + 1) == many
    monkeypatch.setenv("RANKMOE_BATCH_INVARIANT", "1")
    assert default_config(3584, 112, 1) == many


def test_configurations_survive_as_plain_values():
    for config in (ExpertsConfig(16, 2), experts_grouped_cuda.DEFAULT_CONFIG):
        assert config_from(config_values(config)) == config
    for values in ({}, {"kernel": "other"}, {"kernel": "decode", "warp": 1}):
        with pytest.raises(ValueError, match="values: expected a kernel of decode, grouped and its fields"):
            config_from(values)


def test_configurations_that_do_not_fit_are_invalid():
    assert ExpertsConfig().is_valid(3584, 128)
    for change in ({"rows": 5}, {"depth": 0}, {"warps": 31, "finishers": 2}, {"blocks": 3}, {"depth": 8}):
        assert not dataclasses.replace(ExpertsConfig(), **change).is_valid(3584, 128)


# --- compilation -----------------------------------------------------------------------------------------------------
@needs_compiler
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("is_gate_up", [True, False])
@pytest.mark.parametrize(
    ("name", "rows_of_a_pass"), [(name, 8) for name in SHAPES] + [(name, 16) for name in PUBLISHED]
)
def test_the_gemms_compile_without_local_memory(architecture, name, is_gate_up, rows_of_a_pass):
    hidden_size, intermediate_size, activation, has_bias = SHAPES[name]
    sizes = (hidden_size, 2 * intermediate_size) if is_gate_up else (intermediate_size, hidden_size)
    config = default_config(sizes[0], 112) if rows_of_a_pass == 8 else ExpertsConfig(12, rows=16, finishers=3, blocks=1)
    options = {"from_masks": name != "small", "has_bias": has_bias, "has_factor": has_bias}
    macros = macros_of(is_gate_up, *sizes, 112, activation, config, **options)
    check = (
        f"static_assert(sizeof(Shared) == {config.shared_bytes(sizes[0], 128)}, "
        f'"the host and the kernel lay shared memory out alike");'
    )
    cubin, log = nvrtc.compile_cubin(experts_cuda.source() + check, dict(macros), architecture)
    assert cubin
    usage = nvrtc.parse_resource_usage(log)
    assert not usage.uses_local_memory
    assert usage.registers * 32 * (config.warps + config.finishers) * config.blocks <= 65536


@needs_compiler
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("num_local_experts", [0, 112, 1024])
def test_the_combine_compiles_without_local_memory(architecture, num_local_experts):
    macros = combine_cuda.macros_of(num_local_experts, torch.bfloat16, is_aligned=num_local_experts == 112)
    cubin, log = nvrtc.compile_cubin(combine_cuda.source(), dict(macros), architecture)
    assert cubin
    assert not nvrtc.parse_resource_usage(log).uses_local_memory


# --- on a GPU: each GEMM against float64 ----------------------------------------------------------------------------
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 9, 64])
@pytest.mark.parametrize("name", SHAPES)
def test_each_gemm_is_float64_to_the_tolerance(kernel_device, name, num_tokens):
    hidden_size, intermediate_size, activation, has_bias = shape_on(kernel_device, name)
    weights, w13, w2 = make_experts(8, hidden_size, intermediate_size, activation, has_bias, device=kernel_device)
    schedule = build_schedule(random_ids(num_tokens, 8, 3).to(kernel_device), 8, num_experts=8)
    x = quantize_mxfp8(torch.randn(num_tokens, hidden_size, generator=seeded(5)).bfloat16().to(kernel_device))
    scratch = torch.full((schedule.row_tokens.shape[0], intermediate_size), math.nan, device=kernel_device)
    num_rows = int(schedule.expert_offsets[-1])
    middle = gate_up(x, schedule, weights, scratch)[:num_rows]
    expected = quantize_mxfp8(expected_middle(x, schedule, weights, w13).float())
    # float32 sums of exact products: a code differs only where the activation falls on the border between two.
    same = (middle.data.view(torch.uint8) == expected.data.view(torch.uint8)).double().mean()
    assert same > 0.9995
    assert relative_l2(dequantize(middle, torch.float64), dequantize(expected, torch.float64)) < 2e-3
    padded = gate_up(x, schedule, weights, scratch)
    rows = down(padded, schedule, weights, torch.full((len(padded.data), hidden_size), math.nan, device=kernel_device))
    exact = expected_rows(middle, schedule, weights, w2)
    assert relative_l2(rows[:num_rows], exact) < 1e-6  # the rule allows 1e-5
    assert float((rows[:num_rows].double() - exact).abs().max()) < 1e-5 * float(exact.abs().max())


def test_all_scale_bytes_and_codes_are_exact(kernel_device):
    """A row of one 1.0 reads a column of the weight back, for every scale byte but that of NaN."""
    bytes_ = torch.arange(255, dtype=torch.uint8)
    codes = torch.arange(16, dtype=torch.uint8)
    data = (codes | (codes.roll(1) << 4)).expand(255, 64, 16).contiguous()
    w2 = MXTensor(data, bytes_[:, None, None].expand(255, 64, 1).contiguous(), "mxfp4")
    packed = experts_cuda.pack(random_mxfp4(255, 64, 64), w2, torch.device(kernel_device))
    placement = ExpertPlacement(255, 1, 0)
    weights = ExpertWeights(packed.w13, packed.w2, SiTU(), placement, "cuda", w2_factor=packed.w2_factor)
    assert packed.w2_factor is not None
    ids = torch.arange(255).expand(32, 255).contiguous().to(kernel_device)
    schedule = build_schedule(ids, 255, num_experts=255)
    one_hot = torch.eye(32).repeat(255, 1)
    middle = MXTensor(one_hot.to(torch.float8_e4m3fn), torch.full((255 * 32, 1), 127, dtype=torch.uint8), "mxfp8")
    rows = down(middle.to(kernel_device), schedule, weights).view(255, 32, 64).cpu()
    assert torch.equal(rows, reference.dequantize(w2).float().transpose(1, 2))


def test_a_group_of_nan_makes_its_row_nan_and_no_other(kernel_device):
    weights, _, _ = make_experts(4, 256, 128, device=kernel_device)
    schedule = build_schedule(torch.zeros(5, 1, dtype=torch.int32).to(kernel_device), 4, num_experts=4)
    hidden_states = torch.randn(5, 256, generator=seeded(1)).to(kernel_device)
    clean = down(gate_up(quantize_mxfp8(hidden_states), schedule, weights), schedule, weights)
    hidden_states[2, 77] = math.inf
    rows = down(gate_up(quantize_mxfp8(hidden_states), schedule, weights), schedule, weights)
    assert rows.isnan().all(1).tolist() == rows.isnan().any(1).tolist() == [False, False, True, False, False]
    others = [0, 1, 3, 4]
    assert_bitwise_equal(rows[others], clean[others])


def test_activations_of_any_size_are_exact(kernel_device):
    weights, w13, _ = make_experts(2, 128, 64, SwiGLU(), device=kernel_device)
    magnitudes = torch.tensor([1e-38, 1e-20, 448.0, 448.0 * 2**20, 449.0, 0.0, 1e-10, 3.0])
    hidden_states = (torch.randn(8, 128, generator=seeded(1)) * magnitudes[:, None]).to(kernel_device)
    x = quantize_mxfp8(hidden_states)
    schedule = build_schedule(torch.ones(8, 1, dtype=torch.int32).to(kernel_device), 2, num_experts=2)
    middle = gate_up(x, schedule, weights)
    expected = quantize_mxfp8(expected_middle(x, schedule, weights, w13).float())
    assert relative_l2(dequantize(middle, torch.float64), dequantize(expected, torch.float64)) < 2e-3


# --- on a GPU: the layer ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("activation", [SiTU(), SwiGLU(), GPT_OSS])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_layer_is_the_references(kernel_device, activation, has_bias):
    for num_tokens in (1, 17, 64, 65) if kernel_device == "cuda" else (17, 65):
        placement = ExpertPlacement(24, 2, 1)
        on_cpu = random_experts(placement, 96, 64, activation, has_bias=has_bias, backend="reference")
        weights = move(on_cpu, kernel_device)
        hidden_states, logits = random_batch(num_tokens, 24, 96)
        config = RouterConfig(6)
        got = routed_moe(
            hidden_states.to(kernel_device), logits.to(kernel_device), weights, config, out_dtype=torch.float32
        )
        front = route_quantize(logits, hidden_states, config, local_range=placement.local_range)
        expected = reference.fused_moe(front.x, front.routing.topk_ids, front.routing.topk_weights, on_cpu)
        assert relative_l2(got.cpu(), expected) < 5e-3


@pytest.mark.parametrize("ep_size", [2, 4, 8, 16])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 33, 64])
def test_global_and_rank_local_ids_give_the_same_bits_through_every_path(
    kernel_device, num_tokens, ep_size, monkeypatch
):
    skip_some(kernel_device, ep_size not in (4, 16) or num_tokens not in (1, 8, 33))
    config = RouterConfig(8)
    placement = ExpertPlacement(128, ep_size, ep_size - 1)
    weights = random_experts(placement, 256, 128, backend="reference")
    weights = move(weights, kernel_device)
    hidden_states, logits = (t.to(kernel_device) for t in random_batch(num_tokens, 128, 256))
    expected = routed_moe(hidden_states, logits, weights, config)
    assert_bitwise_equal(routed_moe(hidden_states, logits, weights, config, rank_local=False), expected)
    for rank_local in (True, False):
        front = route_quantize(logits, hidden_states, config, local_range=placement.local_range, rank_local=rank_local)
        rows = down(gate_up(front.x, front.schedule, weights), front.schedule, weights)
        assert_bitwise_equal(combine(rows, front.routing.topk_weights, front.schedule), expected)
    # Beyond 64 tokens rows come from the sorted schedule: the first tokens of a larger batch have the same bits.
    monkeypatch.setenv("RANKMOE_BATCH_INVARIANT", "1")
    expected = routed_moe(hidden_states, logits, weights, config)
    more_states, more_logits = (torch.cat([t, t[:1].expand(70, -1)]) for t in (hidden_states, logits))
    assert_bitwise_equal(routed_moe(more_states, more_logits, weights, config)[:num_tokens], expected)


def test_the_ranks_outputs_add_up_to_the_whole_layer(kernel_device):
    config, (hidden_states, logits) = RouterConfig(4), (t.to(kernel_device) for t in random_batch(16, 30, 96))
    options = {"out_dtype": torch.float32}

    def run(placement: ExpertPlacement) -> torch.Tensor:
        weights = random_experts(placement, 96, 64, backend="reference")
        return routed_moe(hidden_states, logits, move(weights, kernel_device), config, **options)

    whole = run(ExpertPlacement(30, 1, 0))
    for strategy in ("contiguous", "round_robin"):
        parts = [run(ExpertPlacement(30, 8, rank, strategy)) for rank in range(8)]
        assert all(part.any() for part in parts)
        assert relative_l2(sum(parts), whole) < 1e-6


def test_ids_that_are_nobodys_cost_nothing_and_leak_nothing(kernel_device):
    placement = ExpertPlacement(8, 2, 1)
    on_cpu = random_experts(placement, 96, 64, backend="reference")
    weights, least = move(on_cpu, kernel_device), torch.iinfo(torch.int32).min
    ids = torch.tensor([[-1, 4, 5], [7, -1, 6], [5, 4, -1], [-1, -5, least], [0, 1, 2], [4, 4, 7], [99, 7, 8]]).int()
    topk_weights = torch.rand(7, 3, generator=seeded(1))
    topk_weights[3:5] = math.nan
    hidden_states, _ = random_batch(7, 8, 96)
    x = quantize_mxfp8(hidden_states.to(kernel_device))
    workspace = Workspace.allocate(7, 3, weights)
    for fill in (math.nan, 0.0):
        workspace.middle.fill_(fill)
        workspace.rows.fill_(fill)
        routing = Routing(topk_weights.to(kernel_device), ids.to(kernel_device))
        space = {"num_experts": 8, "local_expert_offset": 4, "out_dtype": torch.float32}
        got = fused_moe(x, routing, weights, workspace=workspace, **space).cpu()
        assert torch.equal(got[3:5], torch.zeros(2, 96))
        valid = torch.where((ids >= 0) & (ids < 8), ids, -1)
        expected = reference.fused_moe(quantize_mxfp8(hidden_states), valid, topk_weights, on_cpu)
        assert relative_l2(got, expected) < 5e-3


@pytest.mark.gpu
@needs_gpu
def test_a_rank_without_a_token_gives_zeros_also_in_a_graph():
    placement = ExpertPlacement(16, 2, 1)
    weights = move(random_experts(placement, 96, 64, backend="reference"))
    hidden_states, logits = (t.cuda() for t in random_batch(4, 16, 96))
    logits[:, 8:] = -50.0
    graph = torch.cuda.CUDAGraph()
    routed_moe(hidden_states, logits, weights, RouterConfig(4))
    with torch.cuda.graph(graph):
        out = routed_moe(hidden_states, logits, weights, RouterConfig(4))
    graph.replay()
    assert not out.any()
    logits[:, 8:] = 50.0
    graph.replay()
    assert out.any(1).all()


@pytest.mark.parametrize("is_batch_invariant", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 63, 64, 65])
def test_no_jump_at_the_fronts_limit_and_no_tokens(kernel_device, num_tokens, is_batch_invariant, monkeypatch):
    monkeypatch.setenv("RANKMOE_BATCH_INVARIANT", str(int(is_batch_invariant)))
    weights = move(random_experts(ExpertPlacement(32, 1, 0), 128, 64, backend="reference"), kernel_device)
    hidden_states, logits = (t.to(kernel_device) for t in random_batch(65, 32, 128))
    options = {"out_dtype": torch.float32}
    whole = routed_moe(hidden_states, logits, weights, RouterConfig(4), **options)[:num_tokens]
    part = routed_moe(hidden_states[:num_tokens], logits[:num_tokens], weights, RouterConfig(4), **options)
    if is_batch_invariant:
        assert_bitwise_equal(part, whole)
    elif num_tokens:  # the order of adding alone, and what codes of the middle that moves
        assert relative_l2(part, whole) < 1e-3


@pytest.mark.gpu
@needs_gpu
def test_in_the_batch_invariant_mode_a_row_has_the_same_bits_alone_and_in_any_batch(monkeypatch):
    monkeypatch.setenv("RANKMOE_BATCH_INVARIANT", "1")
    weights = move(random_experts(ExpertPlacement(64, 4, 1), 512, 256, backend="reference"))
    hidden_states, logits = (t.cuda() for t in random_batch(64, 64, 512))
    together = routed_moe(hidden_states, logits, weights, RouterConfig(8))
    for token in range(64):
        alone = routed_moe(hidden_states[token : token + 1], logits[token : token + 1], weights, RouterConfig(8))
        assert_bitwise_equal(alone, together[token : token + 1])
    many = [torch.cat([t] * 5) for t in (hidden_states, logits)]  # rows enough for the kernels of many rows
    assert_bitwise_equal(routed_moe(*many, weights, RouterConfig(8))[:64], together)


@pytest.mark.gpu
@needs_gpu
def test_repeats_and_programmatic_launch_give_the_same_bits(monkeypatch):
    weights = move(random_experts(ExpertPlacement(64, 4, 1), 512, 256, backend="reference"))
    hidden_states, logits = (t.cuda() for t in random_batch(33, 64, 512))
    workspace = Workspace.allocate(33, 8, weights)

    def run() -> torch.Tensor:
        return routed_moe(hidden_states, logits, weights, RouterConfig(8), workspace=workspace)

    monkeypatch.setenv("RANKMOE_PDL", "0")
    expected = run()
    monkeypatch.setenv("RANKMOE_PDL", "1")
    num_different = torch.zeros((), dtype=torch.int64, device="cuda")
    for repeat in range(1000):
        if repeat % 10 == 0:
            workspace.middle.view(torch.int32).fill_(0x7FFFFFFF)
            workspace.rows.fill_(math.nan)
        num_different += (run().view(torch.int16) != expected.view(torch.int16)).sum()
    assert int(num_different) == 0


@pytest.mark.gpu
@needs_gpu
def test_graphs_of_two_layers_replay_with_new_routings():
    config, num_experts = RouterConfig(8), 64
    layers = [move(random_experts(ExpertPlacement(64, 4, 1), 256, 128, backend="reference", seed=s)) for s in (0, 50)]
    hidden_states, logits = (t.cuda() for t in random_batch(48, num_experts, 256))
    graphs, outs = [], []
    for weights in layers:
        workspace = Workspace.allocate(48, 8, weights)
        routed_moe(hidden_states, logits, weights, config, workspace=workspace)
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outs.append(routed_moe(hidden_states, logits, weights, config, workspace=workspace))
    for replay in range(100):
        fresh_states, fresh_logits = random_batch(48, num_experts, 256, seed=replay)
        fresh_logits[:, 16:32] += (-3.0, 0.0, 3.0)[replay % 3]  # few, some, many rows for this rank
        hidden_states.copy_(fresh_states)
        logits.copy_(fresh_logits)
        for layer in (0, 1, 0):
            graphs[layer].replay()
            torch.full((1 << (16 + replay % 4),), math.nan, device="cuda")  # allocated and freed between replays
        for weights, out in zip(layers, outs, strict=True):
            if replay % 10 == 0:
                assert_bitwise_equal(out.clone(), routed_moe(hidden_states, logits, weights, config))


@pytest.mark.gpu
@needs_gpu
def test_weights_reloaded_in_place_are_used_by_the_next_replay():
    first = move(random_experts(ExpertPlacement(16, 1, 0), 128, 128, backend="reference", seed=0))
    second = move(random_experts(ExpertPlacement(16, 1, 0), 128, 128, backend="reference", seed=90))
    hidden_states, logits = (t.cuda() for t in random_batch(8, 16, 128))
    expected = routed_moe(hidden_states, logits, second, RouterConfig(4))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = routed_moe(hidden_states, logits, first, RouterConfig(4))
    for mine, other in ((first.w13, second.w13), (first.w2, second.w2)):
        mine.data.copy_(other.data)
        mine.scale.copy_(other.scale)
    graph.replay()
    assert_bitwise_equal(out, expected)


@pytest.mark.gpu
@needs_gpu
def test_rows_beyond_the_valid_ones_are_zero_and_may_hold_nan():
    weights = move(random_experts(ExpertPlacement(32, 2, 0), 128, 64, backend="reference"))
    hidden_states, logits = (t.cuda() for t in random_batch(40, 32, 128))
    expected = routed_moe(hidden_states, logits, weights, RouterConfig(4))
    num_valid = torch.tensor([40], device="cuda")
    graph = torch.cuda.CUDAGraph()
    routed_moe(hidden_states, logits, weights, RouterConfig(4), num_valid_tokens=num_valid)
    with torch.cuda.graph(graph):
        out = routed_moe(hidden_states, logits, weights, RouterConfig(4), num_valid_tokens=num_valid)
    for valid in (40, 7, 0, 23):
        if valid < 40:
            hidden_states[valid:] = math.nan
            logits[valid:] = math.nan
        num_valid.fill_(valid)
        graph.replay()
        assert_bitwise_equal(out[:valid].clone(), expected[:valid])
        assert not out[valid:].any()
        hidden_states.copy_(random_batch(40, 32, 128)[0])
        logits.copy_(random_batch(40, 32, 128)[1])


def test_how_many_rows_a_pass_takes_does_not_change_a_bit(kernel_device):
    hidden_size, intermediate_size, activation, has_bias = SHAPES["medium"]
    weights, _, _ = make_experts(5, hidden_size, intermediate_size, activation, has_bias, device=kernel_device)
    # An idle expert, and experts with the rows of a whole pass of either size, one more and one less.
    counts = torch.tensor([8, 0, 17, 31, 41])
    ids = (torch.rand(41, 5, generator=seeded(3)).argsort(0) < counts).int() * (torch.arange(5) + 1) - 1
    x = quantize_mxfp8(torch.randn(41, hidden_size, generator=seeded(5)).to(kernel_device))
    with_masks = build_schedule(ids.to(kernel_device), 5, num_experts=5)
    with_offsets = dataclasses.replace(with_masks, expert_token_mask=None)
    num_rows, results = int(counts.sum()), []
    for rows_of_a_pass, schedule in ((8, with_masks), (4, with_masks), (16, with_masks), (16, with_offsets)):
        config = ExpertsConfig(12, rows=rows_of_a_pass, blocks=1)
        scratch = torch.full((41 * 5, intermediate_size), math.nan, device=kernel_device)
        rows = torch.full((41 * 5, hidden_size), math.nan, device=kernel_device)
        middle = experts_cuda.gate_up(x, schedule, weights, scratch, config=config)
        experts_cuda.down(middle, schedule, weights, rows, config=config)
        assert not rows[:num_rows].isnan().any()
        assert rows[num_rows:].isnan().all()
        results.append((middle[:num_rows], rows[:num_rows]))
    for other in results[1:]:
        assert_bitwise_equal(other, results[0])


@pytest.mark.gpu
@needs_gpu
def test_packing_takes_little_beside_the_packed_weights():
    placement = ExpertPlacement(16, 1, 0)
    w13, w2 = random_mxfp4(16, 2048, 2048), random_mxfp4(16, 2048, 1024)
    expected = pack_experts(w13.to("cuda"), w2.to("cuda"), SiTU(), placement, backend="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    weights = pack_experts(w13, w2, SiTU(), placement, backend="cuda", device="cuda")
    extra = torch.cuda.max_memory_allocated() - before - weights.nbytes
    assert 0 <= extra <= weights.nbytes // 16  # one expert
    assert_bitwise_equal(weights.w13, expected.w13)
    assert_bitwise_equal(weights.w2, expected.w2)


@pytest.mark.gpu
@needs_gpu
def test_weights_beyond_4_gib_and_2_to_the_31_elements_reach_the_last_expert():
    num_experts, hidden_size, intermediate_size = 256, 3584, 3072
    generator = torch.Generator("cuda").manual_seed(0)

    def weight(*shape: int) -> MXTensor:
        data = torch.randint(
            0, 256, (1, shape[0], shape[1] // 2), dtype=torch.uint8, device="cuda", generator=generator
        )
        scale = torch.full((1, shape[0], shape[1] // 32), 120, dtype=torch.uint8, device="cuda")
        return MXTensor(data, scale, "mxfp4")

    w13, w2 = weight(2 * intermediate_size, hidden_size), weight(hidden_size, intermediate_size)
    alone = pack_experts(w13, w2, SiTU(), ExpertPlacement(1, 1, 0), backend="cuda")
    many = []
    for packed in (alone.w13, alone.w2):
        num_codes, nbytes = packed.data[0].numel(), expert_nbytes(*packed.shape[1:])
        buffer = torch.zeros(num_experts, nbytes, dtype=torch.uint8, device="cuda")
        buffer[-1] = packed.data.as_strided((nbytes,), (1,))
        data = buffer[:, :num_codes].view(num_experts, *packed.data.shape[1:])
        scale = buffer[:, num_codes:].view(num_experts, *packed.scale.shape[1:])
        many.append(MXTensor(data, scale, "mxfp4"))
    assert many[0].nbytes + many[1].nbytes > 2**32
    weights = ExpertWeights(*many, SiTU(), ExpertPlacement(num_experts, 1, 0), "cuda")
    x = quantize_mxfp8(torch.randn(3, hidden_size, generator=seeded(0)).cuda())
    ones = torch.ones(3, 1, device="cuda")
    last = Routing(ones, torch.full((3, 1), num_experts - 1, dtype=torch.int32, device="cuda"))
    only = Routing(ones, torch.zeros(3, 1, dtype=torch.int32, device="cuda"))
    expected = fused_moe(x, only, alone, num_experts=1)
    assert expected.any()
    assert_bitwise_equal(fused_moe(x, last, weights, num_experts=num_experts), expected)


def test_a_workspace_that_is_too_small_is_refused_before_a_launch(kernel_device):
    weights = move(random_experts(ExpertPlacement(16, 1, 0), 128, 64, backend="reference"), kernel_device)
    hidden_states, logits = (t.to(kernel_device) for t in random_batch(8, 16, 128))
    small = Workspace.allocate(7, 4, weights)
    with pytest.raises(ValueError, match=r"workspace.middle: expected float32 with at least 32 rows of 64, got \(28"):
        routed_moe(hidden_states, logits, weights, RouterConfig(4), workspace=small)


@pytest.mark.gpu
@needs_gpu
def test_it_is_the_choice_for_a_gpu():
    assert choose_backend(Problem(8, 128, 64, SiTU(), device_type="cuda")).name == "cuda"


def test_a_copy_of_the_parts_is_refused(kernel_device):
    weights, _, _ = make_experts(2, 128, 64, device=kernel_device)
    copied = MXTensor(weights.w2.data.clone(), weights.w2.scale.clone(), "mxfp4")
    schedule = build_schedule(torch.zeros(1, 1, dtype=torch.int32).to(kernel_device), 2, num_experts=2)
    middle = gate_up(quantize_mxfp8(torch.ones(1, 128).to(kernel_device)), schedule, weights)
    with pytest.raises(ValueError, match="weights: expected the buffer that pack made"):
        down(middle, schedule, dataclasses.replace(weights, w2=copied))


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("num_tokens", "hidden_size", "top_k"), [(1, 3584, 16), (64, 96, 8), (130, 33, 3), (7, 516, 128)]
)
def test_the_combine_has_the_bits_of_the_torch_statement(kernel_device, num_tokens, hidden_size, top_k, out_dtype):
    ids = torch.randint(-1, 200, (num_tokens, top_k), generator=seeded(1), dtype=torch.int32)
    schedule = build_schedule(ids, 100, num_experts=200, local_expert_offset=50)
    rows = torch.randn(max(1, len(schedule.row_tokens)), hidden_size, generator=seeded(2))
    rows[0, :3] = torch.tensor([math.nan, math.inf, -0.0])
    topk_weights = torch.rand(num_tokens, top_k, generator=seeded(3))
    topk_weights[ids == -1] = math.nan
    on_device = build_schedule(ids.to(kernel_device), 100, num_experts=200, local_expert_offset=50)
    padded = torch.full((num_tokens * top_k, hidden_size), math.nan)
    padded[: len(rows)] = rows
    expected = combine(rows, topk_weights, schedule, out_dtype)
    arguments = (padded.to(kernel_device), topk_weights.to(kernel_device), on_device, out_dtype)
    got = combine_cuda.combine(*arguments).cpu()
    assert torch.equal(got.isnan(), expected.isnan())
    assert_bitwise_equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
    if num_tokens <= 64 and top_k < 128:
        routing = Routing(topk_weights.to(kernel_device), ids.to(kernel_device))
        masks = {"num_experts": 200, "local_expert_offset": 50, "out_dtype": out_dtype}
        assert on_device.expert_token_mask is not None
        from_masks = combine_cuda.combine_masks(padded.to(kernel_device), routing, on_device.expert_token_mask, **masks)
        assert_bitwise_equal(from_masks.cpu().nan_to_num(7.0), expected.nan_to_num(7.0))
