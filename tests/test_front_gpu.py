"""The front through the public functions on a GPU: one launch, separate passes and the CPU agree."""

import pytest
import torch
from helpers import assert_bitwise_equal, seeded

from rankmoe.front import FrontResult, allocate_workspace, route_quantize
from rankmoe.handoff import Handoff
from rankmoe.kernels import front_cuda
from rankmoe.quantize import quantize_mxfp8
from rankmoe.route import route
from rankmoe.types import ExpertPlacement, LocalRange, RouterConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not front_cuda.available(), reason="needs a Hopper or Blackwell GPU, NVRTC, cuda-bindings"),
]
NUM_EXPERTS, HIDDEN_SIZE = 896, 3584
CONFIG, LOCAL_RANGE = RouterConfig(16), LocalRange(336, 112)
TOKEN_COUNTS = [0, 1, 8, 63, 64, 65, 300, 4096]


def batch(num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, hidden states and bias on the GPU."""
    generator = seeded(seed)
    logits = torch.randn(num_tokens, NUM_EXPERTS, generator=generator)
    hidden_states = torch.randn(num_tokens, HIDDEN_SIZE, generator=generator).bfloat16()
    return logits.cuda(), hidden_states.cuda(), (torch.randn(NUM_EXPERTS, generator=generator) * 0.1).cuda()


def front(num_tokens: int, device: str = "cuda", seed: int = 0, **options: object) -> FrontResult:
    logits, hidden_states, bias = (tensor.to(device) for tensor in batch(num_tokens, seed))
    return route_quantize(logits, hidden_states, CONFIG, bias, **{"local_range": LOCAL_RANGE} | options)


def assert_same_schedule(got: FrontResult, expected: FrontResult) -> None:
    num_rows = int(expected.schedule.expert_offsets[-1])
    assert_bitwise_equal(got.schedule.expert_offsets.cpu(), expected.schedule.expert_offsets)
    assert_bitwise_equal(got.schedule.slot_rows.cpu(), expected.schedule.slot_rows)
    assert_bitwise_equal(got.schedule.row_tokens[:num_rows].cpu(), expected.schedule.row_tokens)
    assert torch.all(got.schedule.row_tokens[num_rows:] == -1)
    if expected.schedule.expert_token_mask is not None:
        assert_bitwise_equal(got.schedule.expert_token_mask.cpu(), expected.schedule.expert_token_mask)


@pytest.mark.parametrize("rank_local", [True, False])
@pytest.mark.parametrize("num_tokens", TOKEN_COUNTS)
def test_the_gpu_gives_what_the_cpu_gives(num_tokens, rank_local):
    got, expected = front(num_tokens, rank_local=rank_local), front(num_tokens, "cpu", rank_local=rank_local)
    assert torch.equal(got.routing.topk_ids.cpu(), expected.routing.topk_ids)
    torch.testing.assert_close(got.routing.topk_weights.cpu(), expected.routing.topk_weights, rtol=1e-5, atol=0)
    assert torch.equal(got.routing.packed.cpu() >> 16, expected.routing.packed >> 16)
    assert got.routing.local_range == expected.routing.local_range
    assert_bitwise_equal(got.x.data.cpu(), expected.x.data)
    assert_bitwise_equal(got.x.scale.cpu(), expected.x.scale)
    assert_same_schedule(got, expected)


@pytest.mark.parametrize("num_tokens", [65, 300, 4096])
def test_a_row_has_the_same_bits_on_both_sides_of_the_limit(num_tokens):
    logits, hidden_states, bias = batch(num_tokens)
    large = route_quantize(logits, hidden_states, CONFIG, bias, local_range=LOCAL_RANGE)
    small = route_quantize(logits[:64], hidden_states[:64], CONFIG, bias, local_range=LOCAL_RANGE)
    for name in ("topk_weights", "topk_ids", "packed"):
        assert_bitwise_equal(getattr(large.routing, name)[:64], getattr(small.routing, name), name)
    assert_bitwise_equal(large.x[:64], small.x)


@pytest.mark.parametrize("num_tokens", [1, 8, 64, 65, 4096])
def test_a_miss_gives_the_same_bits_as_the_one_launch(num_tokens):
    logits, hidden_states, bias = batch(num_tokens)
    together = route_quantize(logits, hidden_states, CONFIG, bias)
    alone = route(logits, CONFIG, bias)
    assert_bitwise_equal(alone.topk_weights, together.routing.topk_weights)
    assert_bitwise_equal(alone.topk_ids, together.routing.topk_ids)
    assert_bitwise_equal(quantize_mxfp8(hidden_states), together.x)


@pytest.mark.parametrize("num_tokens", [1, 24, 64])
def test_masks_alone_are_those_of_the_whole_schedule(num_tokens):
    masks = front(num_tokens, schedule="masks")
    assert masks.schedule is None
    assert_bitwise_equal(masks.expert_token_mask, front(num_tokens).schedule.expert_token_mask)


@pytest.mark.parametrize("num_tokens", [8, 65])
def test_rows_beyond_the_valid_tokens_get_no_expert_and_may_hold_nan(num_tokens):
    logits, hidden_states, bias = batch(num_tokens)
    logits[5:], hidden_states[5:] = torch.nan, torch.nan
    num_valid = torch.tensor([5], dtype=torch.int32, device="cuda")
    result = route_quantize(logits, hidden_states, CONFIG, bias, local_range=LOCAL_RANGE, num_valid_tokens=num_valid)
    expected = route_quantize(logits[:5], hidden_states[:5], CONFIG, bias, local_range=LOCAL_RANGE)
    assert torch.all(result.routing.topk_ids[5:] == -1)
    assert torch.all(result.routing.topk_weights[5:] == 0)
    assert torch.all(result.schedule.slot_rows[5:] == -1)
    assert torch.all(result.x.data[5:].float() == 0)
    assert_bitwise_equal(result.routing.topk_ids[:5], expected.routing.topk_ids)
    assert_bitwise_equal(result.schedule.expert_offsets, expected.schedule.expert_offsets)


def test_captured_fronts_of_two_layers_replay_in_turn_with_new_inputs():
    layers = []
    for seed in range(2):
        logits, hidden_states, bias = batch(24, seed)
        workspace = allocate_workspace(24, 16, HIDDEN_SIZE, 112, "cuda")

        def run(logits=logits, hidden_states=hidden_states, bias=bias, workspace=workspace):
            return route_quantize(logits, hidden_states, CONFIG, bias, local_range=LOCAL_RANGE, workspace=workspace)

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = run()
        layers.append((graph, logits, hidden_states, result, bias, workspace))  # a graph holds none of them
    for replay in range(100):
        garbage = torch.full((1 << 20,), torch.nan, device="cuda")  # memory that comes and goes between replays
        for layer in (0, 1, 0):
            graph, logits, hidden_states, result, bias, _ = layers[layer]
            fresh_logits, fresh_hidden_states, _ = batch(24, 100 + 3 * replay + layer)
            logits.copy_(fresh_logits)
            hidden_states.copy_(fresh_hidden_states)
            graph.replay()
            if replay % 25 == 0:
                expected = route_quantize(logits, hidden_states, CONFIG, bias, local_range=LOCAL_RANGE)
                assert_bitwise_equal(result.routing, expected.routing)
                assert_bitwise_equal(result.schedule, expected.schedule)
        del garbage


def test_the_handoff_hits_on_the_gpu():
    logits, hidden_states, bias = batch(8)
    handoff = Handoff()
    handoff.stage(hidden_states, LOCAL_RANGE)
    routing = handoff.try_route(logits, CONFIG, bias)
    result = handoff.take(hidden_states)
    assert_bitwise_equal(routing, result.routing)
    assert result.schedule is not None
    assert handoff.take_local_range(routing.packed) == LOCAL_RANGE
    assert (handoff.counters.route_hits, handoff.counters.take_hits) == (1, 1)


def test_a_workspace_of_another_size_is_refused():
    logits, hidden_states, bias = batch(8)
    workspace = allocate_workspace(16, 16, HIDDEN_SIZE, 112, "cuda")
    with pytest.raises(ValueError, match=r"buffers\.topk_weights: expected contiguous \(8, 16\), got \(16, 16\)"):
        route_quantize(logits, hidden_states, CONFIG, bias, local_range=LOCAL_RANGE, workspace=workspace)


@pytest.mark.parametrize("ep_size", [2, 8, 16])
def test_every_token_count_on_the_first_a_middle_and_the_last_rank(ep_size):
    logits, hidden_states, bias = batch(64, seed=ep_size)
    on_cpu = (logits.cpu(), hidden_states.cpu())
    for ep_rank in sorted({0, ep_size // 2, ep_size - 1}):
        local_range = ExpertPlacement(NUM_EXPERTS, ep_size, ep_rank).local_range
        options = {"local_range": local_range}
        for num_tokens in range(1, 65):
            got = route_quantize(logits[:num_tokens], hidden_states[:num_tokens], CONFIG, bias, **options)
            masks = route_quantize(
                logits[:num_tokens], hidden_states[:num_tokens], CONFIG, bias, schedule="masks", **options
            )
            expected = route_quantize(*(tensor[:num_tokens] for tensor in on_cpu), CONFIG, bias.cpu(), **options)
            assert torch.equal(got.routing.packed.cpu() >> 16, expected.routing.packed >> 16)
            assert torch.equal(got.routing.topk_ids.cpu(), expected.routing.topk_ids)
            assert_bitwise_equal(got.x.data.cpu(), expected.x.data)
            assert_bitwise_equal(got.x.scale.cpu(), expected.x.scale)
            assert_same_schedule(got, expected)
            assert_bitwise_equal(masks.expert_token_mask.cpu(), expected.schedule.expert_token_mask)
            assert_bitwise_equal(masks.routing, got.routing)


def test_programmatic_launches_agree_with_plain_ones_a_thousand_times():
    sets = [batch(24, seed) for seed in range(8)]
    bias = sets[0][2]
    expected = []
    for logits, hidden_states, _ in sets:
        buffers = front_cuda.allocate_buffers(24, 16, HIDDEN_SIZE, 112, "cuda", schedule="rows")
        launch(logits, hidden_states, bias, buffers, is_programmatic=False)
        expected.append(buffers)
    logits, hidden_states = torch.empty_like(sets[0][0]), torch.empty_like(sets[0][1])
    num_different = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(1000):
        # The copies are what a launch that does not wait would overtake.
        logits.copy_(sets[i % 8][0])
        hidden_states.copy_(sets[i % 8][1])
        buffers = front_cuda.allocate_buffers(24, 16, HIDDEN_SIZE, 112, "cuda", schedule="rows")
        launch(logits, hidden_states, bias, buffers, is_programmatic=True)
        for name in ("topk_weights", "packed", "scale", "expert_token_mask", "slot_rows", "row_tokens"):
            num_different += (getattr(buffers, name) != getattr(expected[i % 8], name)).sum()
        num_different += (buffers.data.view(torch.uint8) != expected[i % 8].data.view(torch.uint8)).sum()
    assert num_different.item() == 0


def launch(
    logits: torch.Tensor,
    hidden_states: torch.Tensor,
    bias: torch.Tensor,
    buffers: front_cuda.FrontBuffers,
    is_programmatic: bool,
) -> None:
    front_cuda.launch_front(
        logits,
        hidden_states,
        CONFIG,
        buffers,
        correction_bias=bias,
        local_expert_offset=LOCAL_RANGE.offset,
        num_local_experts=LOCAL_RANGE.count,
        packed_range=LOCAL_RANGE,
        is_programmatic=is_programmatic,
    )
