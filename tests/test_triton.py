"""The portable front in Triton: against the torch statement of each rule, on a GPU or else in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
triton = pytest.importorskip("triton", reason="needs Triton")

from front_cases import FrontCase, check_front, front_cases, make_buffers, make_inputs, poison  # noqa: E402
from helpers import assert_bitwise_equal, seeded  # noqa: E402

from rankmoe.kernels import pack_triton, quantize_triton, route_triton, schedule_triton, triton_support  # noqa: E402
from rankmoe.pack import pack_topk, rank_local_num_experts  # noqa: E402
from rankmoe.quantize import quantize_mxfp8  # noqa: E402
from rankmoe.route import route  # noqa: E402
from rankmoe.schedule import build_schedule  # noqa: E402
from rankmoe.types import ExpertSchedule, LocalRange, MXTensor, RouterConfig, Routing  # noqa: E402

needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
ARCHITECTURES = (90, 100)
# The interpreter computes with NumPy, which warns where a GPU gives NaN or infinity in silence.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


def test_available_where_the_kernels_can_run():
    assert triton_support.available()
    assert all(module.available() for module in (route_triton, quantize_triton, pack_triton, schedule_triton))
    assert triton_support.interprets() == (DEVICE == "cpu")


def test_kernels_compile_without_a_gpu(tmp_path):
    """Also says that no kernel uses what the interpreter alone can do."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    script = str(Path(__file__).with_name("triton_compile.py"))
    done = subprocess.run(
        [sys.executable, script, *map(str, ARCHITECTURES)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    kernels = set(json.loads(done.stdout))
    assert kernels == {
        *("_route_kernel", "_quantize_kernel", "_pack_kernel", "_schedule_kernel"),
        *("_set_bits_kernel", "_count_rows_kernel", "_add_counts_kernel", "_place_slots_kernel"),
        *("_gather_kernel", "_widen_kernel", "_activate_quantize_kernel", "_combine_kernel"),
        *("_read_kernel", "_planes_kernel", "_gemm_kernel", "_fill_kernel"),
    }


# ---------------------------------------------------------------------------------------------- the pieces in a row


def run_pieces(case: FrontCase, inputs, buffers) -> None:
    """The front as three passes into its buffers; the schedule is made from the packed ids."""
    routing = route_triton.route(
        inputs.router_logits,
        case.config,
        inputs.correction_bias,
        inputs.num_valid_tokens,
        packed=True,
        local_range=inputs.packed_range,
        out=buffers.routing(),
    )
    assert routing.local_range == inputs.packed_range
    quantize_triton.quantize_mxfp8(inputs.hidden_states, inputs.num_valid_tokens, out=buffers.rows())
    num_experts, offset = case.num_experts, inputs.local_expert_offset
    if inputs.packed_range is not None:
        num_experts, offset = rank_local_num_experts(num_experts, inputs.packed_range, case.config.top_k), 0
    schedule_triton.build_schedule(
        routing.packed,
        inputs.num_local_experts,
        is_packed=True,
        num_experts=num_experts,
        local_expert_offset=offset,
        expert_map=inputs.expert_map,
        out=ExpertSchedule(
            case.num_tokens,
            buffers.expert_token_mask,
            buffers.expert_offsets,
            buffers.row_tokens,
            buffers.slot_rows,
        ),
    )


def small_cases() -> list[FrontCase]:
    """Few tokens, since the interpreter takes long for each: every family, kind of row, size, rank and option."""
    replace = dataclasses.replace
    base = FrontCase(num_tokens=2, schedule="rows")
    cases = [replace(base, num_tokens=t) for t in (1, 2, 5)]
    kinds = ("equal", "low", "very_low", "edge", "wide", "repeats", "columns")
    cases += [replace(base, rows=kind, has_bias=i % 2 == 0) for i, kind in enumerate(kinds)]
    cases += [replace(base, num_experts=96, num_tokens=13, rows="bad", local_range=LocalRange(12, 12))]
    for num_experts, top_k in ((1, 1), (8, 8), (30, 4), (160, 1), (257, 10), (384, 22), (1024, 32)):
        count = max(1, num_experts // 8)
        local_range = LocalRange(num_experts - count, count)
        cases += [replace(base, num_experts=num_experts, config=RouterConfig(top_k), local_range=local_range, rows=r)
                  for r in ("normal", "repeats")]  # fmt: skip
    base = replace(base, num_experts=40, local_range=LocalRange(5, 5))
    for scoring in ("sigmoid", "softmax", "softmax_selected"):
        for renormalize in (True, False):
            config = RouterConfig(4, scoring, renormalize, 2.5, slot_order="value" if renormalize else "id")
            cases.append(replace(base, config=config, logits_dtype=torch.bfloat16))
            cases.append(replace(base, config=config, rows="wide", has_bias=False))
        cases.append(replace(base, config=RouterConfig(4, scoring), rows="bad", num_tokens=13, has_bias=False))
    for num_experts, top_k, groups, kept in ((256, 8, 8, 4), (160, 6, 8, 3), (64, 6, 64, 8), (60, 4, 3, 2)):
        config = RouterConfig(top_k, num_expert_groups=groups, topk_groups=kept, routed_scaling_factor=2.5)
        cases += [replace(base, num_experts=num_experts, config=config, rows=rows) for rows in ("normal", "repeats")]
    config = RouterConfig(6, num_expert_groups=8, topk_groups=4)
    cases += [replace(base, num_tokens=13, num_experts=64, config=config, rows="bad")]
    base = replace(base, config=RouterConfig(4))
    cases += [replace(base, num_tokens=4, num_valid=n, seed=n, rank_local=n < 2) for n in (0, 1, 4)]
    cases += [replace(base, local_range=r) for r in (None, LocalRange(0, 40), LocalRange(5, 0), LocalRange(35, 5))]
    cases += [replace(base, extra_stride=3, map_stride=4, hidden_dtype=torch.float32, hidden_size=96)]
    return cases


@pytest.mark.parametrize("case", small_cases(), ids=str)
def test_pieces_follow_the_rules(case):
    inputs = make_inputs(case, DEVICE)
    buffers = make_buffers(case, inputs)
    poison(buffers)
    run_pieces(case, inputs, buffers)
    assert check_front(case, inputs, buffers) == []


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", front_cases(), ids=str)
def test_pieces_follow_the_rules_in_every_case_of_the_front(case):
    case = dataclasses.replace(case, schedule="rows")
    test_pieces_follow_the_rules(case)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("num_tokens", [24, 300])
def test_graph_replays_with_new_inputs(num_tokens):
    case = FrontCase(num_tokens=num_tokens, num_valid=num_tokens, seed=1)
    inputs = make_inputs(case, "cuda")
    arguments = (inputs.router_logits, case.config, inputs.correction_bias, inputs.num_valid_tokens)

    def run():
        routing = route_triton.route(*arguments, packed=True)
        x = quantize_triton.quantize_mxfp8(inputs.hidden_states, inputs.num_valid_tokens)
        schedule = schedule_triton.build_schedule(
            routing.packed, 112, num_experts=896, local_expert_offset=112, is_packed=True
        )
        return routing, x, schedule

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    for replay in range(20):
        fresh = make_inputs(dataclasses.replace(case, seed=2 * replay + 1, num_valid=(7 * replay) % 25), "cuda")
        for name in ("router_logits", "hidden_states", "correction_bias", "num_valid_tokens"):
            getattr(inputs, name).copy_(getattr(fresh, name))
        graph.replay()
        for got, expected in zip(outputs, run(), strict=True):
            assert_bitwise_equal(got, expected)


# ------------------------------------------------------------------------------------------------------------- route


def test_packed_ids_are_those_of_the_torch_statement():
    logits = torch.randn(3, 40, generator=seeded(0)).to(DEVICE)
    logits[1] = torch.nan
    for local_range in (None, LocalRange(0, 5), LocalRange(8, 5), LocalRange(0, 40)):
        config = RouterConfig(4, renormalize=False)
        routing = route_triton.route(logits, config, packed=True, local_range=local_range)
        assert_bitwise_equal(routing, pack_topk(routing, 40, local_range))
        assert torch.equal(routing.topk_ids, route(logits, config).topk_ids)
    plain = route_triton.route(logits, config, local_range=LocalRange(0, 5))
    assert (plain.packed, plain.local_range) == (None, None)


def test_a_row_does_not_depend_on_the_batch():
    logits = torch.randn(5, 200, generator=seeded(1)).to(DEVICE)
    config = RouterConfig(4, "softmax")
    whole = route_triton.route(logits, config, packed=True)
    for part in (logits[3:4], torch.stack([torch.full_like(logits[0], torch.nan), logits[3]])):
        routing = route_triton.route(part, config, packed=True)
        assert_bitwise_equal(routing.topk_weights[-1:], whole.topk_weights[3:4])
        assert_bitwise_equal(routing.packed[-1:], whole.packed[3:4])


def test_route_refuses_what_it_does_not_cover():
    logits = torch.zeros(2, 8, device=DEVICE)
    with pytest.raises(TypeError, match="router_logits"):
        route_triton.route(logits.double(), RouterConfig(2))
    with pytest.raises(ValueError, match="inner stride 1"):
        route_triton.route(logits.T, RouterConfig(2))
    with pytest.raises(ValueError, match="num_experts: expected 1 to 1024, got 1025"):
        route_triton.route(torch.zeros(1, 1025, device=DEVICE), RouterConfig(2))
    with pytest.raises(ValueError, match="top_k: expected at most 32, got 33"):
        route_triton.route(torch.zeros(1, 64, device=DEVICE), RouterConfig(33))
    with pytest.raises(ValueError, match="offset=7, count=2"):
        route_triton.route(logits, RouterConfig(2), packed=True, local_range=LocalRange(7, 2))
    with pytest.raises(ValueError, match=r"out\.packed"):
        route_triton.route(logits, RouterConfig(2), packed=True, out=route_triton.route(logits, RouterConfig(2)))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("num_tokens", [65, 4096, 65536])
def test_many_tokens(num_tokens):
    config, local_range = RouterConfig(16), LocalRange(112, 112)
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(num_tokens, 896, device="cuda", generator=generator)
    bias = torch.randn(896, device="cuda", generator=generator) * 0.1
    hidden_states = torch.randn(num_tokens, 3584, device="cuda", generator=generator).bfloat16()
    routing = route_triton.route(logits, config, bias, packed=True, local_range=local_range)
    expected = route(logits, config, bias)
    is_equal = (routing.topk_ids == expected.topk_ids).all(1)
    assert is_equal.float().mean() > 0.999  # a near tie may go either way
    torch.testing.assert_close(routing.topk_weights[is_equal], expected.topk_weights[is_equal], rtol=1e-5, atol=0)
    assert_bitwise_equal(routing, pack_topk(routing, 896, local_range))
    assert_bitwise_equal(quantize_triton.quantize_mxfp8(hidden_states), quantize_mxfp8(hidden_states))
    sizes = {"num_experts": 896, "local_expert_offset": 112}
    check_schedule(routing.topk_ids, 112, **sizes)
    schedule = schedule_triton.build_schedule(routing.packed, 112, num_experts=128, is_packed=True)
    assert_bitwise_equal(schedule, schedule_triton.build_schedule(routing.topk_ids, 112, **sizes))


# ---------------------------------------------------------------------------------------------------------- quantize


def check_quantize(hidden_states: torch.Tensor, num_valid_tokens: torch.Tensor | None = None) -> None:
    got = quantize_triton.quantize_mxfp8(hidden_states, num_valid_tokens)
    assert_bitwise_equal(got, quantize_mxfp8(hidden_states, num_valid_tokens))


def test_every_bfloat16():
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    order = torch.randperm(2**16, generator=seeded(0))
    for bits in (patterns, patterns[order]):  # groups of neighbours, then of strangers
        check_quantize(bits.view(torch.bfloat16).view(64, 1024).to(DEVICE))
    finite = patterns[patterns.view(torch.bfloat16).isfinite()]
    finite = finite[torch.randperm(len(finite), generator=seeded(1))]
    check_quantize(finite.view(torch.bfloat16).view(-1, 960).to(DEVICE))


def test_every_rounding_of_float32():
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([codes, middles, middles.nextafter(codes[1:]), middles.nextafter(codes[:-1])])
    values = torch.cat([values, -values, torch.tensor([1e-38, -1e-38, 1e-42, 447.99997])])
    values = torch.nn.functional.pad(values, (0, -len(values) % 31)).view(-1, 31)
    groups = torch.cat([torch.full((len(values), 1), 448.0), values], 1)
    exponents = torch.tensor([-140, -126, -50, -43, -42, -41, -1, 0, 1, 100, 119])
    check_quantize(torch.ldexp(groups.flatten().expand(len(exponents), -1), exponents[:, None]).to(DEVICE))
    random_bits = torch.randint(-(2**31), 2**31, (64, 512), generator=seeded(0)).to(torch.int32)
    check_quantize(random_bits.view(torch.float32).to(DEVICE))


def test_scale_examples():
    amax = torch.tensor([448.0, 449.0, 1.0, 0.0, 1e-10, 1e-38, 3e38, torch.inf, torch.nan])
    rows = torch.zeros(len(amax), 32)
    rows[:, 5] = amax
    got = quantize_triton.quantize_mxfp8(rows.to(DEVICE))
    assert got.scale.flatten().tolist() == [127, 128, 119, 85, 85, 85, 247, 255, 255]
    assert got.data.view(torch.uint8)[-2:].unique().tolist() == [0x7F]
    check_quantize(rows.to(DEVICE))


def test_rows_beyond_the_valid_ones_are_zero():
    rows = torch.randn(5, 96, generator=seeded(0)).to(DEVICE)
    for dtype, num_valid in ((torch.int32, 3), (torch.int64, 0), (torch.int64, 7)):
        padded = rows.clone()
        padded[num_valid:] = torch.nan
        check_quantize(padded, torch.tensor([num_valid], dtype=dtype, device=DEVICE))


def test_any_row_stride_and_no_rows():
    wide = torch.randn(7, 333, generator=seeded(0)).bfloat16().to(DEVICE)
    check_quantize(wide[:, 5:165])
    check_quantize(wide[:0, :64])
    check_quantize(wide[:, :0])


def test_quantize_writes_where_it_is_told():
    rows = torch.randn(3, 64, generator=seeded(0)).to(DEVICE)
    expected = quantize_mxfp8(rows)
    out = MXTensor(torch.full_like(expected.data, 1.0), torch.full_like(expected.scale, 9), "mxfp8")
    assert quantize_triton.quantize_mxfp8(rows, out=out) is out
    assert_bitwise_equal(out, expected)
    with pytest.raises(ValueError, match=r"out\.data: expected contiguous \(2, 64\)"):
        quantize_triton.quantize_mxfp8(rows[:2], out=out)
    with pytest.raises(ValueError, match="multiple of 32, got 33"):
        quantize_triton.quantize_mxfp8(torch.zeros(2, 33, device=DEVICE))
    with pytest.raises(ValueError, match="inner stride 1"):
        quantize_triton.quantize_mxfp8(torch.zeros(64, 64, device=DEVICE).T)
    with pytest.raises(TypeError, match="float16"):
        quantize_triton.quantize_mxfp8(rows.half())


@pytest.mark.gpu
@needs_gpu
def test_rows_far_apart():
    stride = 2**26 + 32
    storage = torch.zeros(33 * stride, dtype=torch.bfloat16, device="cuda")
    rows = storage.as_strided((33, 64), (stride, 1))
    rows.copy_(torch.randn(33, 64))
    check_quantize(rows)


# -------------------------------------------------------------------------------------------------------------- pack


def check_pack(topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, local_range) -> None:
    expected = pack_topk(Routing(topk_weights.cpu(), topk_ids.cpu()), num_experts, local_range)
    got = pack_triton.pack(topk_ids.to(DEVICE), topk_weights.to(DEVICE), expected.local_range)
    assert torch.equal(got.cpu(), expected.packed)


@pytest.mark.parametrize("local_range", [None, LocalRange(0, 5), LocalRange(8, 5), LocalRange(0, 40)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32], ids=str)
def test_packing_ids_that_were_routed_elsewhere(dtype, local_range):
    ids = torch.randint(0, 40, (300, 4), generator=seeded(2), dtype=torch.int32)
    ids[0], ids[1, 2], ids[2] = -1, -1, torch.tensor([39, 5, -2147483648, 7])
    ids = ids.int().view(torch.uint32) if dtype == torch.uint32 else ids.to(dtype)
    check_pack(ids, torch.rand(300, 4, generator=seeded(3)), 40, local_range)
    check_pack(ids[:0], torch.rand(0, 4), 40, local_range)
    wide = ids.view(torch.int32).repeat(1, 2)[:, ::2] if dtype != torch.int64 else ids.repeat(1, 2)[:, ::2]
    check_pack(wide, torch.rand(4, 300, generator=seeded(4)).T, 40, local_range)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("local_range", [None, LocalRange(112, 112)], ids=str)
def test_packing_many_tokens_on_a_gpu(local_range):
    ids = torch.randint(-1, 896, (16_384, 16), generator=seeded(5), dtype=torch.int32)
    weights = torch.rand(16_384, 16, generator=seeded(6))
    check_pack(ids, weights, 896, local_range)
    routing = pack_topk(Routing(weights.to(DEVICE), ids.to(DEVICE)), 896, local_range)
    assert torch.equal(routing.packed.cpu(), pack_topk(Routing(weights, ids), 896, local_range).packed)


def test_weights_are_rounded_to_the_nearest_bfloat16():
    bits = torch.arange(-(2**15), 2**15) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        weights = (bits + low).int().view(torch.float32).view(-1, 16)
        check_pack(torch.zeros_like(weights, dtype=torch.int32), weights, 40, None)


# ---------------------------------------------------------------------------------------------------------- schedule


def check_schedule(topk_ids: torch.Tensor, num_local_experts: int, **sizes) -> None:
    expected = build_schedule(topk_ids, num_local_experts, **sizes)
    row_tokens = torch.full((topk_ids.numel(),), -1, dtype=torch.int32, device=topk_ids.device)
    row_tokens[: len(expected.row_tokens)] = expected.row_tokens
    expected = dataclasses.replace(expected, row_tokens=row_tokens)
    got = schedule_triton.build_schedule(topk_ids, num_local_experts, **sizes)
    assert got.num_tokens == expected.num_tokens
    for name in ("expert_token_mask", "expert_offsets", "row_tokens", "slot_rows"):
        mine, theirs = getattr(got, name), getattr(expected, name)
        if theirs is None:
            assert mine is None, name
        else:
            assert mine.dtype == theirs.dtype, name
            assert torch.equal(mine, theirs), name


def drawn_ids(num_tokens: int, top_k: int, num_experts: int, seed: int = 0) -> torch.Tensor:
    """Ids with repeats within a row, and some that nobody owns."""
    ids = torch.randint(0, num_experts, (num_tokens, top_k), generator=seeded(seed))
    strange = torch.tensor([-1, -5, -(2**31), num_experts, 2**31 - 1])
    is_strange = torch.rand(ids.shape, generator=seeded(seed + 1)) < 0.1
    return torch.where(is_strange, strange[ids % len(strange)], ids).to(DEVICE)


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 33, 64, 65, 128, 1000])
@pytest.mark.parametrize(
    ("top_k", "num_experts", "count", "offset"), [(1, 3, 1, 2), (5, 30, 13, 4), (16, 200, 100, 100)]
)
def test_schedule(num_tokens, top_k, num_experts, count, offset):
    ids = drawn_ids(num_tokens, top_k, num_experts).to(torch.int32 if num_tokens % 2 else torch.int64)
    check_schedule(ids, count, num_experts=num_experts, local_expert_offset=offset)


@pytest.mark.parametrize("num_tokens", [7, 100])
def test_schedule_of_every_way_to_give_ids(num_tokens):
    ids = drawn_ids(num_tokens, 4, 24)
    expert_map = torch.full((24,), -1, dtype=torch.int32)
    expert_map[1::3] = torch.arange(8, dtype=torch.int32).flip(0)
    expert_map[3] = -7  # nobody on this rank, like -1
    check_schedule(ids.int(), 8, num_experts=24, expert_map=expert_map.to(DEVICE))
    check_schedule(ids.int().T.contiguous().T, 8, num_experts=24, local_expert_offset=8)
    check_schedule(ids.int().view(torch.uint32), 8, num_experts=24, local_expert_offset=16)
    check_schedule(ids + 2**32 * (ids % 3 - 1), 8, num_experts=24)  # as int32 they would be valid
    check_schedule(ids, 0, num_experts=24, local_expert_offset=3)
    check_schedule(torch.full_like(ids, -1), 8, num_experts=24)
    packed = (ids.clamp(-1, 100).int() << 16) | 0xBF80
    got = schedule_triton.build_schedule(packed, 24, num_experts=24, is_packed=True)
    assert_bitwise_equal(got, schedule_triton.build_schedule(ids, 24, num_experts=24))


@pytest.mark.parametrize("num_tokens", [5, 70])
def test_schedule_writes_where_it_is_told(num_tokens):
    ids = drawn_ids(num_tokens, 3, 12)
    expected = schedule_triton.build_schedule(ids, 6, num_experts=12)
    fields = [getattr(expected, field.name) for field in dataclasses.fields(expected)[1:]]
    out = ExpertSchedule(num_tokens, *(None if tensor is None else torch.full_like(tensor, 77) for tensor in fields))
    assert schedule_triton.build_schedule(ids, 6, num_experts=12, out=out) is out
    assert_bitwise_equal(out, expected)
    with pytest.raises(ValueError, match=r"out\.num_tokens: expected 1"):
        schedule_triton.build_schedule(ids[:1], 6, num_experts=12, out=out)
    with pytest.raises(ValueError, match=r"out\.expert_offsets: expected contiguous \(6,\)"):
        schedule_triton.build_schedule(ids, 5, num_experts=12, out=dataclasses.replace(
            out, expert_token_mask=None if out.expert_token_mask is None else out.expert_token_mask[:5]))  # fmt: skip


def test_schedule_refuses_what_does_not_fit():
    ids = torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)
    expert_map = torch.zeros(12, dtype=torch.int32, device=DEVICE)
    build = schedule_triton.build_schedule
    with pytest.raises(ValueError, match="offset=8, num_local_experts=6"):
        build(ids, 6, num_experts=12, local_expert_offset=8)
    with pytest.raises(ValueError, match="expert_map: expected"):
        build(ids, 6, num_experts=12, local_expert_offset=1, expert_map=expert_map)
    with pytest.raises(TypeError, match="expert_map: expected int32"):
        build(ids, 6, num_experts=12, expert_map=expert_map.long())
    with pytest.raises(TypeError, match="topk_ids: expected int32, int64 or uint32"):
        build(ids.short(), 6, num_experts=12)
    with pytest.raises(TypeError, match="where they are packed"):
        build(ids.long(), 6, num_experts=12, is_packed=True)


# ----------------------------------------------------------------------------------------------------------- covered


def _meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_covered_is_a_predicate_over_shapes():
    config = RouterConfig(16)
    assert route_triton.covered(_meta(65536, 1030)[:, :896], config)
    assert route_triton.covered(_meta(0, 896, dtype=torch.bfloat16), config)
    for logits, other in ((_meta(896, 8).T, config), (_meta(8, 1025), config), (_meta(8, 896), RouterConfig(33))):
        assert not route_triton.covered(logits, other)
    assert not route_triton.covered(_meta(8, 896, dtype=torch.float16), config)
    assert quantize_triton.covered(_meta(65536, 8192, dtype=torch.bfloat16))
    assert quantize_triton.covered(_meta(5, 100)[:, 3:99])
    for rows in (_meta(5, 33), _meta(64, 64).T, _meta(4), _meta(5, 32, dtype=torch.float16)):
        assert not quantize_triton.covered(rows)
    ids = _meta(65536, 16, dtype=torch.int32)
    assert schedule_triton.covered(ids, 896)
    assert schedule_triton.covered(ids.T[:16].T, 896, _meta(896, dtype=torch.int32))
    assert not schedule_triton.covered(_meta(65537, 16, dtype=torch.int32), 896)
    assert not schedule_triton.covered(ids, 4097)
    assert not schedule_triton.covered(ids.short(), 896)
    assert not schedule_triton.covered(ids, 896, _meta(896, dtype=torch.int64))
