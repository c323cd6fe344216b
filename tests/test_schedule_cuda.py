"""The standalone schedule pass on a GPU: it compiles clean without one, and equals the torch statement with one."""

import pytest
import torch
from helpers import seeded

from rankmoe.kernels import nvrtc, schedule_cuda
from rankmoe.pack import pack
from rankmoe.schedule import build_schedule
from rankmoe.types import ExpertSchedule

needs_compiler = pytest.mark.skipif(not nvrtc.can_compile(), reason="needs NVRTC and cuda-bindings")
needs_gpu = pytest.mark.skipif(not schedule_cuda.available(), reason="needs a Hopper or Blackwell GPU, NVRTC")


@needs_compiler
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_local_experts", [1, 112, 1024])
def test_it_compiles_without_local_memory(architecture, dtype, num_local_experts):
    macros = dict(schedule_cuda.macros_of(dtype, num_local_experts, is_packed=dtype == torch.int32))
    cubin, log = nvrtc.compile_cubin(schedule_cuda.source(), macros, architecture)
    assert cubin
    assert not nvrtc.parse_resource_usage(log).uses_local_memory


def test_covered_is_a_predicate_over_shapes_and_dtypes():
    ids = torch.empty(64, 16, dtype=torch.int32, device="meta")
    assert schedule_cuda.covered(ids, 112)
    assert not schedule_cuda.covered(ids.expand(2, 64, 16).flatten(0, 1), 112)
    assert not schedule_cuda.covered(ids[:0], 112)
    assert not schedule_cuda.covered(ids, 1025)
    assert not schedule_cuda.covered(ids.short(), 112)


def check(device: str, ids: torch.Tensor, num_local_experts: int, **space: object) -> None:
    expert_map = space.pop("expert_map", None)
    expected = build_schedule(ids, num_local_experts, expert_map=expert_map, **space)
    moved = None if expert_map is None else expert_map.to(device)
    got = schedule_cuda.build_schedule(ids.to(device), num_local_experts, expert_map=moved, **space)
    assert_equal(got, expected)


def assert_equal(got: ExpertSchedule, expected: ExpertSchedule) -> None:
    num_rows = int(expected.expert_offsets[-1])
    assert torch.equal(got.expert_token_mask.cpu(), expected.expert_token_mask)
    assert torch.equal(got.expert_offsets.cpu(), expected.expert_offsets)
    assert torch.equal(got.slot_rows.cpu(), expected.slot_rows)
    assert torch.equal(got.row_tokens.cpu()[:num_rows], expected.row_tokens)
    assert torch.all(got.row_tokens[num_rows:] == -1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 16, 33, 63, 64])
def test_any_ids_give_the_schedule_of_the_torch_statement(kernel_device, num_tokens, dtype):
    for top_k, num_experts, offset, count in ((1, 4, 1, 2), (4, 30, 26, 4), (16, 896, 336, 112), (32, 1024, 0, 1024)):
        ids = torch.randint(-3, num_experts + 3, (num_tokens, top_k), generator=seeded(num_tokens), dtype=dtype)
        ids[0, 0] = torch.iinfo(dtype).min
        check(kernel_device, ids, count, num_experts=num_experts, local_expert_offset=offset)


def test_packed_ids_strided_ids_and_an_expert_map(kernel_device):
    ids = torch.randint(0, 896, (64, 16), generator=seeded(1), dtype=torch.int32)
    packed = pack(ids, torch.rand(64, 16))
    check(kernel_device, packed, 112, num_experts=896, local_expert_offset=112, is_packed=True)
    check(kernel_device, ids.T.contiguous().T, 112, num_experts=896, local_expert_offset=112)
    expert_map = torch.where(torch.arange(896) % 8 == 3, torch.arange(896) // 8, -1).int()
    check(kernel_device, ids, 112, num_experts=896, expert_map=expert_map)


@pytest.mark.gpu
@needs_gpu
def test_captured_replays_follow_new_ids():
    ids = torch.zeros(24, 16, dtype=torch.int32, device="cuda")
    space = {"num_experts": 128, "local_expert_offset": 0}
    schedule_cuda.build_schedule(ids, 112, **space)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = schedule_cuda.build_schedule(ids, 112, **space)
    for replay in range(20):
        fresh = torch.randint(0, 128, (24, 16), generator=seeded(replay), dtype=torch.int32)
        ids.copy_(fresh)
        for tensor in (captured.expert_token_mask, captured.expert_offsets, captured.row_tokens, captured.slot_rows):
            tensor.fill_(0x7F7F7F7F)
        graph.replay()
        assert_equal(captured, build_schedule(fresh, 112, **space))
