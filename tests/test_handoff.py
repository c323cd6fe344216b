import threading
import weakref

import pytest
import torch
from helpers import assert_bitwise_equal, random_batch

from rankmoe.front import route_quantize
from rankmoe.handoff import Handoff
from rankmoe.types import ExpertPlacement, LocalRange, RouterConfig

NUM_EXPERTS, CONFIG = 64, RouterConfig(4)
LOCAL_RANGE = ExpertPlacement(NUM_EXPERTS, 8, 3).local_range
BIAS = torch.linspace(-0.1, 0.1, NUM_EXPERTS)


@pytest.fixture
def handoff() -> Handoff:
    return Handoff()


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Activations and logits."""
    return random_batch(5, NUM_EXPERTS)


# --- hits ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 64, 65])
@pytest.mark.parametrize("local_range", [LOCAL_RANGE, None, LocalRange(0, 0)], ids=["range", "none", "count_0"])
def test_a_hit_is_the_front_of_the_staged_activations(handoff, num_tokens, local_range):
    x, logits = random_batch(num_tokens, NUM_EXPERTS)
    expected = route_quantize(logits, x, CONFIG, BIAS, local_range=local_range)
    handoff.stage(x, local_range)
    routing = handoff.try_route(logits, CONFIG, BIAS)
    assert_bitwise_equal(routing, expected.routing)
    assert handoff.take_local_range(routing.packed) == expected.routing.local_range
    assert_bitwise_equal(handoff.take(x), expected)


def test_the_published_routing_is_the_one_that_take_returns(handoff, batch):
    x, logits = batch
    handoff.stage(x, LOCAL_RANGE)
    routing = handoff.try_route(logits, CONFIG)
    assert handoff.take(x).routing is routing


def test_count_zero_keeps_ids_global(handoff, batch):
    x, logits = batch
    handoff.stage(x, LocalRange(0, 0))
    routing = handoff.try_route(logits, CONFIG)
    assert routing.local_range is None
    assert handoff.take_local_range(routing.packed) is None
    assert handoff.take(x).schedule is None


def test_padded_rows_pass_through(handoff, batch):
    x, logits = batch
    num_valid_tokens = torch.tensor([3])
    handoff.stage(x, LOCAL_RANGE)
    handoff.try_route(logits, CONFIG, num_valid_tokens=num_valid_tokens)
    expected = route_quantize(logits, x, CONFIG, local_range=LOCAL_RANGE, num_valid_tokens=num_valid_tokens)
    assert_bitwise_equal(handoff.take(x), expected)


# --- consumed once ---------------------------------------------------------------------------------------------------
def test_a_request_is_routed_once(handoff, batch):
    x, logits = batch
    handoff.stage(x, LOCAL_RANGE)
    assert handoff.try_route(logits, CONFIG) is not None
    assert handoff.try_route(logits, CONFIG) is None


def test_a_result_is_taken_once(handoff, batch):
    x, logits = batch
    handoff.stage(x, LOCAL_RANGE)
    handoff.try_route(logits, CONFIG)
    assert handoff.take(x) is not None
    assert handoff.take(x) is None


def test_a_range_is_taken_once(handoff, batch):
    x, logits = batch
    handoff.stage(x, LOCAL_RANGE)
    packed = handoff.try_route(logits, CONFIG).packed
    assert handoff.take_local_range(packed) == LOCAL_RANGE
    assert handoff.take_local_range(packed) is None


def test_staging_replaces_what_is_pending(handoff, batch):
    x, logits = batch
    handoff.stage(x, LOCAL_RANGE)
    packed = handoff.try_route(logits, CONFIG).packed
    handoff.stage(x.clone(), LOCAL_RANGE)
    assert handoff.take(x) is None
    assert handoff.take_local_range(packed) is None


@pytest.mark.parametrize("when", ["staged", "published"])
def test_clearing_drops_what_is_pending(handoff, batch, when):
    x, logits = batch
    handoff.stage(x, LOCAL_RANGE)
    packed = handoff.try_route(logits, CONFIG).packed if when == "published" else torch.zeros(5, 4, dtype=torch.int32)
    handoff.clear()
    assert handoff.try_route(logits, CONFIG) is None
    assert handoff.take(x) is None
    assert handoff.take_local_range(packed) is None


def test_clearing_releases_the_result(handoff, batch):
    x, logits = batch
    handoff.stage(x, LOCAL_RANGE)
    result = weakref.ref(handoff.try_route(logits, CONFIG).packed)
    assert result() is not None
    handoff.clear()
    assert result() is None


# --- misses ----------------------------------------------------------------------------------------------------------
def test_nothing_staged_is_a_miss(handoff, batch):
    x, logits = batch
    assert handoff.try_route(logits, CONFIG) is None
    assert handoff.take(x) is None


def test_a_staged_request_that_was_not_routed_cannot_be_taken(handoff, batch):
    handoff.stage(batch[0], LOCAL_RANGE)
    assert handoff.take(batch[0]) is None


OTHER_TENSORS = {
    "clone": lambda x: x.clone(),
    "other_shape": lambda x: x.view(-1, 32),
    "fewer_rows": lambda x: x[:4],
    "other_offset": lambda x: x[1:],
    "other_strides": lambda x: x.as_strided(x.shape, (0, 1)),
    "other_dtype": lambda x: x.view(torch.float16),
}


@pytest.mark.parametrize("name", OTHER_TENSORS)
def test_a_tensor_that_is_not_the_staged_one_is_a_miss(handoff, batch, name):
    x, logits = batch
    handoff.stage(x, LOCAL_RANGE)
    handoff.try_route(logits, CONFIG)
    assert handoff.take(OTHER_TENSORS[name](x)) is None


def test_another_view_of_the_same_rows_is_a_hit(handoff, batch):
    x, logits = batch
    handoff.stage(x, LOCAL_RANGE)
    handoff.try_route(logits, CONFIG)
    assert handoff.take(x.view(-1).view(5, 64)) is not None


def test_another_packed_tensor_has_no_range(handoff, batch):
    x, logits = batch
    handoff.stage(x, LOCAL_RANGE)
    packed = handoff.try_route(logits, CONFIG).packed
    assert handoff.take_local_range(packed.clone()) is None
    assert handoff.take_local_range(packed[:4]) is None
    assert handoff.take_local_range(packed) == LOCAL_RANGE


def test_activations_written_after_staging_are_not_routed(handoff, batch):
    x, logits = batch
    handoff.stage(x, LOCAL_RANGE)
    x.mul_(2)
    assert handoff.try_route(logits, CONFIG) is None


def test_activations_written_after_routing_are_not_taken(handoff, batch):
    x, logits = batch
    handoff.stage(x, LOCAL_RANGE)
    handoff.try_route(logits, CONFIG)
    x[0, 0] = 7
    assert handoff.take(x) is None


def test_a_new_tensor_in_freed_memory_is_not_mistaken_for_the_staged_one(handoff):
    for _ in range(50):
        x, logits = random_batch(5, NUM_EXPERTS)
        handoff.stage(x, LOCAL_RANGE)
        handoff.try_route(logits, CONFIG)
        del x
        assert handoff.take(torch.randn(5, 64).bfloat16()) is None


def test_different_numbers_of_tokens_raise_and_consume_the_request(handoff, batch):
    x, logits = batch
    handoff.stage(x, LOCAL_RANGE)
    with pytest.raises(ValueError, match="router_logits: expected 5 tokens as hidden_states, got 4"):
        handoff.try_route(logits[:4], CONFIG)
    assert handoff.try_route(logits, CONFIG) is None
    assert handoff.take(x) is None


# --- several users ---------------------------------------------------------------------------------------------------
def test_two_layers_one_after_the_other_get_their_own_results(handoff):
    for seed, rank in ((0, 3), (5, 6)):
        x, logits = random_batch(5, NUM_EXPERTS, seed=seed)
        local_range = ExpertPlacement(NUM_EXPERTS, 8, rank).local_range
        handoff.stage(x, local_range)
        handoff.try_route(logits, CONFIG)
        assert_bitwise_equal(handoff.take(x), route_quantize(logits, x, CONFIG, local_range=local_range))


def test_a_second_layer_never_gets_what_the_first_one_left(handoff, batch):
    x, logits = batch
    other_x, other_logits = random_batch(5, NUM_EXPERTS, seed=5)
    handoff.stage(x, LOCAL_RANGE)
    handoff.try_route(logits, CONFIG)  # and its runner never comes
    assert handoff.try_route(other_logits, CONFIG) is None
    assert handoff.take(other_x) is None


def test_two_handoffs_share_nothing(handoff, batch):
    x, logits = batch
    handoff.stage(x, LOCAL_RANGE)
    assert Handoff().try_route(logits, CONFIG) is None


def test_another_thread_sees_nothing_of_this_ones_request(handoff, batch):
    x, logits = batch
    seen = []
    handoff.stage(x, LOCAL_RANGE)
    thread = threading.Thread(target=lambda: seen.append(handoff.try_route(logits, CONFIG)))
    thread.start()
    thread.join()
    handoff.try_route(logits, CONFIG)
    thread = threading.Thread(target=lambda: (seen.append(handoff.take(x)), handoff.clear()))
    thread.start()
    thread.join()
    assert seen == [None, None]
    assert handoff.take(x) is not None


def test_two_threads_in_step_get_their_own_results(handoff):
    barrier, results = threading.Barrier(2, timeout=60), {}

    def layer(rank: int) -> None:
        x, logits = random_batch(5, NUM_EXPERTS, seed=rank)
        local_range = ExpertPlacement(NUM_EXPERTS, 8, rank).local_range
        barrier.wait()
        handoff.stage(x, local_range)
        barrier.wait()
        routing = handoff.try_route(logits, CONFIG)
        barrier.wait()
        results[rank] = (handoff.take_local_range(routing.packed), handoff.take(x), x, logits, local_range)

    threads = [threading.Thread(target=layer, args=(rank,)) for rank in (2, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [2, 5]
    for taken_range, taken, x, logits, local_range in results.values():
        assert taken_range == local_range
        assert_bitwise_equal(taken, route_quantize(logits, x, CONFIG, local_range=local_range))


def test_an_exception_between_stage_and_take_leaves_nothing_behind(handoff, batch):
    x, logits = batch

    def layer() -> None:
        try:
            handoff.stage(x, LOCAL_RANGE)
            handoff.try_route(logits, CONFIG)
            raise RuntimeError("a layer failed")
        finally:
            handoff.clear()

    with pytest.raises(RuntimeError, match="a layer failed"):
        layer()
    assert handoff.take(x) is None


def test_every_hit_and_miss_is_counted(handoff, batch):
    x, logits = batch
    handoff.try_route(logits, CONFIG)
    handoff.stage(x, LOCAL_RANGE)
    handoff.try_route(logits, CONFIG)
    handoff.take(x.clone())
    handoff.take(x)
    handoff.take(x)
    counters = handoff.counters
    assert (counters.route_hits, counters.route_misses) == (1, 1)
    assert (counters.take_hits, counters.take_misses) == (1, 2)
