"""The CUDA front: what it covers, that it compiles clean without a GPU, and, on a GPU, that it follows the rules."""

from __future__ import annotations

import ctypes
import dataclasses
import re

import pytest
import torch
from front_cases import FrontCase, check_front, front_cases, make_buffers, make_inputs, poison, run_front

from rankmoe.kernels import front_cuda, nvrtc
from rankmoe.kernels.front_cuda import FrontVariant, allocate_buffers, covered, launch_front, macros_of, why_not_covered
from rankmoe.types import LocalRange, RouterConfig

needs_compiler = pytest.mark.skipif(not nvrtc.can_compile(), reason="needs NVRTC and cuda-bindings")
needs_gpu = pytest.mark.skipif(
    not front_cuda.available(), reason="needs a Hopper or Blackwell GPU, NVRTC, cuda-bindings"
)

KIMI = {
    "num_experts": 896,
    "hidden_size": 3584,
    "config": RouterConfig(16),
    "logits_dtype": torch.float32,
    "hidden_dtype": torch.bfloat16,
    "has_bias": True,
    "has_map": False,
    "has_num_valid": False,
    "pack": "rank_local",
    "schedule": "masks",
    "has_vector_loads": True,
}
GROUPED = RouterConfig(8, num_expert_groups=8, topk_groups=4, routed_scaling_factor=2.5)
COMPILED = {
    "kimi": KIMI | {"num_tokens": 8},
    "kimi, 64 tokens": KIMI | {"num_tokens": 64},
    "kimi, one token": KIMI | {"num_tokens": 1},
    "kimi, rows": KIMI | {"num_tokens": 64, "schedule": "rows"},
    "kimi, front only": KIMI | {"num_tokens": 24, "schedule": "none"},
    "kimi, routing alone": KIMI | {"num_tokens": 4096, "hidden_size": 0, "pack": "none", "schedule": "none"},
    "kimi, 4 warps": KIMI | {"num_tokens": 24, "variant": FrontVariant(4, 8, threshold=1)},
    "kimi, unaligned": KIMI | {"num_tokens": 24, "has_vector_loads": False, "has_num_valid": True},
    "deepseek": KIMI | {"num_tokens": 8, "num_experts": 256, "hidden_size": 7168, "config": GROUPED},
    "qwen3": KIMI
    | {
        "num_tokens": 8,
        "num_experts": 128,
        "hidden_size": 2048,
        "has_bias": False,
        "config": RouterConfig(8, "softmax"),
    },
    "gpt-oss": KIMI
    | {
        "num_tokens": 8,
        "num_experts": 128,
        "hidden_size": 2880,
        "logits_dtype": torch.bfloat16,
        "config": RouterConfig(4, "softmax_selected", renormalize=False),
    },
    "largest": KIMI
    | {
        "num_tokens": 64,
        "num_experts": 1024,
        "hidden_size": 8192,
        "hidden_dtype": torch.float32,
        "has_map": True,
        "has_num_valid": True,
        "schedule": "rows",
        "config": RouterConfig(32, slot_order="value"),
    },
}


@needs_compiler
@pytest.mark.parametrize("architecture", sorted(set(nvrtc.ARCHITECTURES.values()) - {"sm_103a"}))
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_without_local_memory(name, architecture):
    macros = dict(macros_of(**COMPILED[name]))
    cubin, log = nvrtc.compile_cubin(front_cuda.source(), macros, architecture)
    usage = nvrtc.parse_resource_usage(log)
    assert cubin[:4] == b"\x7fELF"
    assert not usage.uses_local_memory, usage
    assert usage.registers * 32 * macros["ROUTE_WARPS"] <= 65536 // 4, "four blocks must fit a multiprocessor"


@needs_compiler
def test_compiler_error_is_raised_with_its_log():
    with pytest.raises(RuntimeError, match="undefined_name"):
        nvrtc.compile_cubin('extern "C" __global__ void f() { undefined_name(); }', {}, "sm_90a")


@needs_compiler
def test_disk_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RANKMOE_CACHE_DIR", str(tmp_path))
    source = 'extern "C" __global__ void f(int* p) { *p = VALUE; }'
    first = nvrtc.load_or_compile(source, {"VALUE": 1}, "sm_90a")
    path = nvrtc.cubin_path(source, {"VALUE": 1}, "sm_90a")
    assert [path] == list(tmp_path.iterdir())
    assert path != nvrtc.cubin_path(source, {"VALUE": 2}, "sm_90a") != nvrtc.cubin_path(source, {"VALUE": 2}, "sm_100a")
    monkeypatch.setattr(nvrtc, "compile_cubin", None)  # a second look must not compile
    assert nvrtc.load_or_compile(source, {"VALUE": 1}, "sm_90a") == first
    monkeypatch.undo()
    monkeypatch.setenv("RANKMOE_CACHE_DIR", str(tmp_path))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.warns(UserWarning, match="damaged"):
        assert nvrtc.load_or_compile(source, {"VALUE": 1}, "sm_90a") == first


def test_unwritable_cache_directory_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RANKMOE_CACHE_DIR", str(tmp_path / "file"))
    nvrtc._write_cubin(nvrtc.cache_directory() / "x.cubin", b"cubin")
    assert nvrtc._read_cubin(nvrtc.cache_directory() / "x.cubin") is None


def test_resource_usage_takes_the_largest():
    log = """
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
    ptxas info    : Used 48 registers, used 1 barriers, 24760 bytes smem
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads"""
    usage = nvrtc.parse_resource_usage(log)
    assert usage == nvrtc.ResourceUsage(48, 8, 4, 12)
    assert usage.uses_local_memory
    with pytest.raises(ValueError, match="registers"):
        nvrtc.parse_resource_usage("")


def test_arguments_match_the_source():
    """The structure that Python fills has the fields of the one that the kernel reads, in order and size."""
    text = re.search(r"struct FrontArguments \{(.*?)\};", front_cuda.source(), re.DOTALL).group(1)
    declared = re.findall(r"^\s*(.*?)\s*(\w+);", text, re.MULTILINE)
    sizes = {"int": 4, "float": 4, "long long": 8}
    expected = [(name, 8 if kind.endswith("*") else sizes[kind]) for kind, name in declared]
    assert [(name, ctypes.sizeof(kind)) for name, kind in front_cuda.FrontArguments._fields_] == expected


@pytest.mark.parametrize("num_tokens", range(1, 65))
@pytest.mark.parametrize("schedule", ["none", "masks", "rows"])
def test_grid_covers_every_token_and_chunk(num_tokens, schedule):
    macros = dict(macros_of(**KIMI | {"num_tokens": num_tokens, "schedule": schedule}))
    blocks, cluster = front_cuda.num_blocks_of(macros, num_tokens), macros["CLUSTER"]
    routing = -(-num_tokens // cluster) * cluster
    assert blocks % cluster == 0
    assert cluster in (1, 2, 4, 8)
    assert cluster == 8 or num_tokens <= cluster or schedule != "masks"  # a small cluster is alone
    quantizing = blocks - routing - (schedule == "rows")
    assert quantizing * 32 * macros["ROUTE_WARPS"] * macros["QUANT_CHUNKS"] >= num_tokens * 3584 // 8


def _meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_covered_is_a_predicate_over_shapes():
    config = RouterConfig(16)
    logits, hidden = _meta(8, 896, dtype=torch.float32), _meta(8, 3584)
    assert covered(logits, hidden, config)
    assert covered(_meta(8, 1030)[:, :896], hidden, config)  # any row stride of the logits
    assert covered(logits, _meta(8, 7168)[:, 3584:], config)
    assert covered(_meta(0, 896), _meta(0, 3584), config)
    refused = {
        "num_tokens: expected at most 64, got 65": (_meta(65, 896), _meta(65, 3584), config),
        "num_experts: expected 1 to 1024, got 1025": (_meta(8, 1025), hidden, config),
        "top_k: expected at most 32, got 33": (logits, hidden, RouterConfig(33)),
        "hidden_size: expected a multiple of 32": (logits, _meta(8, 3600), config),
        "up to 8192, got 8224": (logits, _meta(8, 8224), config),
        "router_logits: expected inner stride 1": (_meta(896, 8).T, hidden, config),
        "hidden_states: expected inner stride 1": (logits, _meta(3584, 8).T, config),
        "multiple of 32 bytes": (logits, _meta(8, 3592)[:, :3584], config),
        "rows that start on 16 bytes": (logits, _meta(8, 3616)[:, 4:3588], config),
        "dtypes: expected float32 or bfloat16": (logits, _meta(8, 3584, dtype=torch.float16), config),
    }
    for reason, arguments in refused.items():
        assert reason in why_not_covered(*arguments)
        assert not covered(*arguments)


def test_arguments_are_checked_before_anything_runs():
    config = RouterConfig(4)
    logits, hidden = torch.randn(3, 32), torch.randn(3, 64)
    buffers = allocate_buffers(3, 4, 64, 8, "cpu")

    def launch(logits=logits, hidden=hidden, buffers=buffers, **options):
        launch_front(logits, hidden, config, buffers, **{"num_local_experts": 8} | options)

    with pytest.raises(ValueError, match=r"as many rows as router_logits \(3\), got 2"):
        launch(hidden=hidden[:2])
    with pytest.raises(ValueError, match="offset=30, count=8"):
        launch(local_expert_offset=30)
    with pytest.raises(ValueError, match="inner stride 1"):
        launch(logits=torch.randn(32, 3).T)
    with pytest.raises(ValueError, match="expert_token_mask"):
        launch(num_local_experts=9)
    with pytest.raises(TypeError, match="expert_map: expected int32"):
        launch(expert_map=torch.zeros(32, dtype=torch.int64))
    with pytest.raises(TypeError, match="num_valid_tokens"):
        launch(num_valid_tokens=torch.zeros(1))
    rows = allocate_buffers(3, 4, 64, 8, "cpu", schedule="rows")
    with pytest.raises(ValueError, match="mailbox"):
        launch(buffers=dataclasses.replace(rows, mailbox=None))


def test_no_tokens():
    buffers = allocate_buffers(0, 4, 64, 8, "cpu", schedule="rows")
    launch_front(torch.randn(0, 32), torch.randn(0, 64), RouterConfig(4), buffers, num_local_experts=8)
    assert not buffers.expert_token_mask.any()
    assert not buffers.expert_offsets.any()


@pytest.mark.parametrize("case", front_cases(), ids=str)
def test_front_follows_the_rules(kernel_device, case):
    inputs = make_inputs(case, kernel_device)
    buffers = make_buffers(case, inputs)
    for is_programmatic in (True, False) if kernel_device == "cuda" else (False,):
        poison(buffers)
        run_front(case, inputs, buffers, is_programmatic=is_programmatic)
        assert check_front(case, inputs, buffers) == []


@pytest.mark.parametrize("schedule", ["masks", "rows"])
def test_bad_rows_leave_the_others_alone(kernel_device, schedule):
    good = FrontCase(num_tokens=24, schedule=schedule)
    outputs = []
    for case in (good, dataclasses.replace(good, rows="bad")):
        inputs = make_inputs(case, kernel_device)
        buffers = make_buffers(case, inputs)
        run_front(case, inputs, buffers)
        outputs.append(buffers)
    assert torch.equal(outputs[0].topk_ids[::2], outputs[1].topk_ids[::2])
    assert torch.equal(outputs[0].topk_weights[::2], outputs[1].topk_weights[::2])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("schedule", ["masks", "rows"])
def test_graph_replays_with_new_inputs(schedule):
    case = FrontCase(num_tokens=24, schedule=schedule, num_valid=24, local_range=LocalRange(0, 112))
    inputs = make_inputs(case, "cuda")
    buffers = make_buffers(case, inputs)
    run_front(case, inputs, buffers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            run_front(case, inputs, buffers)
    for replay in range(100):
        fresh = make_inputs(dataclasses.replace(case, seed=2 * replay, num_valid=(7 * replay) % 25), "cuda")
        for name in ("router_logits", "hidden_states", "correction_bias", "num_valid_tokens"):
            getattr(inputs, name).copy_(getattr(fresh, name))
        poison(buffers)
        graph.replay()
        assert check_front(case, inputs, buffers) == []
