import dataclasses
import math
import threading
from functools import cache

import pytest
import torch
from helpers import assert_bitwise_equal, random_batch, random_experts, result_or_refusal
from torch import Tensor

import rankmoe.runner
from rankmoe.handoff import Handoff
from rankmoe.moe import Workspace, fused_moe, routed_moe
from rankmoe.pack import pack_topk
from rankmoe.route import route
from rankmoe.runner import RoutedMoeRunner
from rankmoe.types import ExpertPlacement, ExpertWeights, LocalRange, RouterConfig, Routing

NUM_EXPERTS, CONFIG = 64, RouterConfig(8)
BIAS = torch.linspace(-0.1, 0.1, NUM_EXPERTS)
PLACEMENT = ExpertPlacement(NUM_EXPERTS, 4, 1)
LOCAL_RANGE = LocalRange(16, 16)


@cache
def experts(placement: ExpertPlacement = PLACEMENT) -> ExpertWeights:
    return random_experts(placement)


def batch(num_tokens: int = 9, seed: int = 0) -> tuple[Tensor, Tensor, Routing]:
    """Hidden states, logits, and the plain routing with global ids."""
    x, logits = random_batch(num_tokens, NUM_EXPERTS, seed=seed)
    return x, logits, route(logits, CONFIG, BIAS)


def expected_of(x: Tensor, logits: Tensor, weights: ExpertWeights | None = None) -> Tensor:
    return routed_moe(x, logits, weights or experts(), CONFIG, BIAS, rank_local=False)


def staged(x: Tensor, logits: Tensor, local_range: LocalRange | None = LOCAL_RANGE) -> tuple[Handoff, Routing]:
    handoff = Handoff()
    handoff.stage(x, local_range)
    return handoff, handoff.try_route(logits, CONFIG, BIAS)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """The arguments of every call that the runner hands on."""
    calls = []

    def recorded(x, routing, weights, **arguments):
        calls.append({"x": x, "routing": routing, **arguments})
        return fused_moe(x, routing, weights, **arguments)

    monkeypatch.setattr(rankmoe.runner, "fused_moe", recorded)
    return calls


# --- values ----------------------------------------------------------------------------------------------------------
FORMS = {
    "plain": lambda routing: routing,
    "packed_global": lambda routing: pack_topk(routing, NUM_EXPERTS),
    "packed_rank_local": lambda routing: pack_topk(routing, NUM_EXPERTS, LOCAL_RANGE),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_tokens", [0, 1, 9, 64, 65])
def test_every_form_of_the_ids_gives_the_same_bits(form, num_tokens):
    x, logits, routing = batch(num_tokens)
    assert_bitwise_equal(RoutedMoeRunner(experts())(x, FORMS[form](routing)), expected_of(x, logits))


@pytest.mark.parametrize("local_range", [LOCAL_RANGE, None, LocalRange(0, 0)], ids=["range", "none", "count_0"])
@pytest.mark.parametrize("num_tokens", [0, 1, 9, 64, 65])
def test_the_handoffs_result_gives_the_same_bits(local_range, num_tokens):
    x, logits, _ = batch(num_tokens)
    handoff, routing = staged(x, logits, local_range)
    assert_bitwise_equal(RoutedMoeRunner(experts(), handoff)(x, routing), expected_of(x, logits))
    assert handoff.counters.take_hits == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_output_dtype_is_the_callers(dtype):
    x, logits, routing = batch()
    out = RoutedMoeRunner(experts(), out_dtype=dtype)(x, routing)
    assert_bitwise_equal(out, routed_moe(x, logits, experts(), CONFIG, BIAS, out_dtype=dtype))


def test_a_workspace_full_of_nan_gives_the_same_bits():
    x, logits, routing = batch()
    workspace = Workspace.allocate(9, CONFIG.top_k, experts())
    workspace.middle.fill_(math.nan)
    workspace.rows.fill_(math.nan)
    assert_bitwise_equal(RoutedMoeRunner(experts(), workspace=workspace)(x, routing), expected_of(x, logits))


# --- what the backend is told ----------------------------------------------------------------------------------------
def test_rank_local_ids_are_handed_over_with_their_own_number_of_experts_and_offset_zero(spy):
    x, _, routing = batch()
    packed = pack_topk(routing, NUM_EXPERTS, LOCAL_RANGE)
    RoutedMoeRunner(experts())(x, packed)
    (call,) = spy
    assert (call["num_experts"], call["local_expert_offset"], call["expert_map"]) == (24, 0, None)
    assert call["routing"].packed is packed.packed, "the ids must not be remapped again"


def test_the_handoffs_rank_local_ids_are_handed_over_as_they_are_with_their_schedule(spy):
    x, logits, _ = batch()
    handoff, routing = staged(x, logits)
    RoutedMoeRunner(experts(), handoff)(x, routing)
    (call,) = spy
    assert (call["num_experts"], call["local_expert_offset"], call["expert_map"]) == (24, 0, None)
    assert call["routing"].packed is routing.packed
    assert call["schedule"] is not None


@pytest.mark.parametrize("form", ["plain", "packed_global"])
def test_global_ids_are_handed_over_with_the_models_numbers(spy, form):
    x, _, routing = batch()
    RoutedMoeRunner(experts())(x, FORMS[form](routing))
    assert (spy[0]["num_experts"], spy[0]["local_expert_offset"], spy[0]["expert_map"]) == (64, 16, None)


@pytest.mark.parametrize(
    "placement",
    [
        ExpertPlacement(64, 4, 1, "round_robin"),
        ExpertPlacement(72, 4, 1, physical_to_logical=tuple(sorted([*range(64), *range(8)]))),
    ],
    ids=["round_robin", "redundant"],
)
@pytest.mark.parametrize("form", ["plain", "packed_global"])
def test_a_placement_without_one_range_goes_through_its_map(spy, placement, form):
    x, logits, routing = batch()
    weights = experts(placement)
    out = RoutedMoeRunner(weights)(x, FORMS[form](routing))
    assert_bitwise_equal(out, expected_of(x, logits, weights))
    assert (spy[0]["num_experts"], spy[0]["local_expert_offset"]) == (placement.num_experts, 0)
    assert torch.equal(spy[0]["expert_map"], placement.expert_map)


@pytest.mark.parametrize("placement", [ExpertPlacement(64, 4, 1, "round_robin"), ExpertPlacement(64)])
def test_the_handoff_serves_other_placements_too(placement):
    x, logits, _ = batch()
    handoff, routing = staged(x, logits, placement.local_range)
    weights = experts(placement)
    assert_bitwise_equal(RoutedMoeRunner(weights, handoff)(x, routing), expected_of(x, logits, weights))


# --- misses fall back to the same values -----------------------------------------------------------------------------
OTHER_VIEWS = {
    "clone": lambda x: x.clone(),
    "wider_rows": lambda x: torch.cat([x, x], 1)[:, :64],
    "float32": lambda x: x.float(),
}


@pytest.mark.parametrize("name", OTHER_VIEWS)
def test_other_activations_than_the_staged_ones_are_quantised_here(name):
    x, logits, _ = batch()
    handoff, routing = staged(x, logits)
    assert_bitwise_equal(RoutedMoeRunner(experts(), handoff)(OTHER_VIEWS[name](x), routing), expected_of(x, logits))
    assert handoff.counters.take_misses == 1


def test_a_reviewed_tensor_of_the_same_storage_is_quantised_here():
    both = torch.cat([batch(seed=0)[0], batch(seed=5)[0]])
    _, logits, _ = batch()
    handoff, routing = staged(both[:9], logits)
    out = RoutedMoeRunner(experts(), handoff)(both[9:], routing)
    assert_bitwise_equal(out, expected_of(both[9:], logits))
    assert handoff.counters.take_misses == 1


def test_activations_written_in_place_after_staging_are_quantised_again():
    x, logits, _ = batch()
    handoff, routing = staged(x, logits)
    x.mul_(2)
    assert_bitwise_equal(RoutedMoeRunner(experts(), handoff)(x, routing), expected_of(x, logits))


def test_a_second_call_with_the_same_activations_gives_the_same_bits():
    x, logits, _ = batch()
    handoff, routing = staged(x, logits)
    runner = RoutedMoeRunner(experts(), handoff)
    assert_bitwise_equal(runner(x, routing), runner(x, routing))
    assert (handoff.counters.take_hits, handoff.counters.take_misses) == (1, 1)


def test_a_routing_other_than_the_published_one_is_obeyed():
    x, logits, _ = batch()
    handoff, _ = staged(x, logits)
    other_logits = batch(seed=7)[1]
    other = pack_topk(route(other_logits, CONFIG, BIAS), NUM_EXPERTS, LOCAL_RANGE)
    assert_bitwise_equal(RoutedMoeRunner(experts(), handoff)(x, other), expected_of(x, other_logits))


def test_the_published_ids_written_in_place_are_obeyed():
    x, logits, _ = batch()
    handoff, routing = staged(x, logits)
    other = pack_topk(batch(seed=7)[2], NUM_EXPERTS, LOCAL_RANGE)
    routing.packed.copy_(other.packed)
    expected = RoutedMoeRunner(experts())(x, dataclasses.replace(other, topk_weights=routing.topk_weights))
    assert_bitwise_equal(RoutedMoeRunner(experts(), handoff)(x, routing), expected)


def test_two_layers_interleaved_fall_back_to_the_same_bits():
    first, second = batch(seed=0), batch(seed=5)
    handoff = Handoff()
    runner = RoutedMoeRunner(experts(), handoff)
    handoff.stage(first[0], LOCAL_RANGE)
    routing = handoff.try_route(first[1], CONFIG, BIAS)
    handoff.stage(second[0], LOCAL_RANGE)
    assert_bitwise_equal(runner(first[0], routing), expected_of(*first[:2]))
    second_routing = handoff.try_route(second[1], CONFIG, BIAS)
    assert_bitwise_equal(runner(second[0], second_routing), expected_of(*second[:2]))
    assert (handoff.counters.take_hits, handoff.counters.take_misses) == (1, 1)


def test_two_threads_share_one_runner():
    handoff = Handoff()
    runner, barrier, outputs = RoutedMoeRunner(experts(), handoff), threading.Barrier(2, timeout=60), {}

    def layer(seed: int) -> None:
        x, logits, _ = batch(seed=seed)
        handoff.stage(x, LOCAL_RANGE)
        barrier.wait()
        routing = handoff.try_route(logits, CONFIG, BIAS)
        barrier.wait()
        outputs[seed] = runner(x, routing)

    threads = [threading.Thread(target=layer, args=(seed,)) for seed in (0, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in (0, 5):
        assert_bitwise_equal(outputs[seed], expected_of(*batch(seed=seed)[:2]))
    assert handoff.counters.take_hits == 2


# --- the range -------------------------------------------------------------------------------------------------------
def test_rank_local_ids_of_another_rank_are_refused():
    x, _, routing = batch()
    packed = pack_topk(routing, NUM_EXPERTS, LocalRange(32, 16))
    with pytest.raises(ValueError, match="expected the weights' range offset=16, count=16, got offset=32, count=16"):
        RoutedMoeRunner(experts())(x, packed)


@pytest.mark.parametrize("staged_range", [LocalRange(32, 16), LocalRange(16, 8), LocalRange(0, 64)])
def test_a_batch_staged_for_another_range_is_refused(staged_range):
    x, logits, _ = batch()
    handoff, routing = staged(x, logits, staged_range)
    with pytest.raises(ValueError, match=r"handoff: expected the weights' range .*offset=16, count=16.*, got"):
        RoutedMoeRunner(experts(), handoff)(x, routing)


@pytest.mark.parametrize("handed_off", [True, False])
def test_weights_bound_to_another_range_after_routing_are_an_error(handed_off):
    x, logits, _ = batch()
    handoff, routing = staged(x, logits)
    runner = RoutedMoeRunner(experts(), handoff if handed_off else None)
    runner.weights = experts(ExpertPlacement(NUM_EXPERTS))  # all experts bound to this rank
    with pytest.raises(ValueError, match="expected the weights' range"):
        runner(x, routing)


def test_weights_bound_to_another_range_before_the_next_batch_are_used():
    x, logits, _ = batch()
    runner = RoutedMoeRunner(experts(), Handoff())
    runner.weights = experts(ExpertPlacement(NUM_EXPERTS))
    runner.handoff.stage(x, runner.weights.placement.local_range)
    routing = runner.handoff.try_route(logits, CONFIG, BIAS)
    assert_bitwise_equal(runner(x, routing), expected_of(x, logits, runner.weights))


def test_rank_local_ids_for_a_round_robin_placement_are_refused():
    x, _, routing = batch()
    packed = pack_topk(routing, NUM_EXPERTS, LOCAL_RANGE)
    with pytest.raises(ValueError, match=r"routing.local_range: expected None .*, got LocalRange"):
        RoutedMoeRunner(experts(ExpertPlacement(NUM_EXPERTS, 4, 1, "round_robin")))(x, packed)


def test_a_routing_that_claims_a_range_without_packed_ids_is_refused_or_right():
    x, logits, routing = batch()
    rank_local = pack_topk(routing, NUM_EXPERTS, LOCAL_RANGE)

    def run() -> Tensor:
        return RoutedMoeRunner(experts())(x, dataclasses.replace(rank_local, packed=None))

    out = result_or_refusal("local_range", run)
    if out is not None:
        assert_bitwise_equal(out, expected_of(x, logits))


# --- padding ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_valid", [0, 4, 9])
@pytest.mark.parametrize("use_handoff", [True, False])
def test_rows_beyond_the_valid_tokens_are_zero_and_may_hold_nan(num_valid, use_handoff):
    weights = random_experts(PLACEMENT, has_bias=True)
    x, logits, _ = batch()
    alone = routed_moe(x[:num_valid], logits[:num_valid], weights, CONFIG, BIAS)
    x[num_valid:], logits[num_valid:] = math.nan, math.nan
    num_valid_tokens, handoff = torch.tensor([num_valid]), Handoff()
    if use_handoff:
        handoff.stage(x, LOCAL_RANGE)
        routing = handoff.try_route(logits, CONFIG, BIAS, num_valid_tokens)
    else:
        routing = route(logits, CONFIG, BIAS, num_valid_tokens)
    out = RoutedMoeRunner(weights, handoff)(x, routing, num_valid_tokens)
    assert_bitwise_equal(out[:num_valid], alone)
    assert torch.all(out[num_valid:] == 0)


@pytest.mark.parametrize("published", [True, False], ids=["published_routing", "other_routing"])
def test_rows_beyond_the_valid_tokens_are_zero_where_only_the_runner_knows_of_them(published):
    x, logits, routing = batch()
    handoff, staged_routing = staged(x, logits)
    runner = RoutedMoeRunner(random_experts(PLACEMENT, has_bias=True), handoff)
    out = runner(x, staged_routing if published else routing, torch.tensor([4]))
    assert handoff.counters.take_hits == 1
    assert torch.any(out[:4] != 0)
    assert torch.all(out[4:] == 0)


def test_padded_rows_of_uint32_ids_are_zero():
    x, _, routing = batch()
    unsigned = Routing(routing.topk_weights, routing.topk_ids.view(torch.uint32))
    runner, num_valid_tokens = RoutedMoeRunner(experts()), torch.tensor([4])
    assert_bitwise_equal(runner(x, unsigned, num_valid_tokens), runner(x, routing, num_valid_tokens))


def test_padded_rows_that_an_outside_router_routed_are_zero():
    weights = random_experts(PLACEMENT, has_bias=True)
    x, _, routing = batch()  # a router that knows nothing of the padding
    unpadded = RoutedMoeRunner(weights)(x, routing)
    assert torch.any(unpadded[4:] != 0)
    x[4:] = math.nan
    out = RoutedMoeRunner(weights)(x, routing, torch.tensor([4]))
    assert_bitwise_equal(out[:4], unpadded[:4])
    assert torch.all(out[4:] == 0)
