import math

import pytest
import torch
from helpers import assert_bitwise_equal, random_batch

from rankmoe.front import FrontResult, route_quantize
from rankmoe.pack import pack_topk
from rankmoe.quantize import quantize_mxfp8
from rankmoe.route import route
from rankmoe.schedule import build_schedule
from rankmoe.types import ExpertPlacement, LocalRange, RouterConfig

NUM_EXPERTS, CONFIG = 64, RouterConfig(4)
LOCAL_RANGE = ExpertPlacement(NUM_EXPERTS, 4, 2).local_range
BIAS = torch.linspace(-0.1, 0.1, NUM_EXPERTS)


def front(num_tokens: int, **options) -> FrontResult:
    hidden_states, logits = random_batch(num_tokens, NUM_EXPERTS)
    return route_quantize(logits, hidden_states, CONFIG, BIAS, **{"local_range": LOCAL_RANGE, **options})


def separate_passes(num_tokens: int, packed_range: LocalRange | None, num_valid_tokens=None) -> FrontResult:
    hidden_states, logits = random_batch(num_tokens, NUM_EXPERTS)
    routing = route(logits, CONFIG, BIAS, num_valid_tokens)
    schedule = build_schedule(
        routing.topk_ids, LOCAL_RANGE.count, num_experts=NUM_EXPERTS, local_expert_offset=LOCAL_RANGE.offset
    )
    x = quantize_mxfp8(hidden_states, num_valid_tokens)
    routing = pack_topk(routing, NUM_EXPERTS, packed_range)
    return FrontResult(routing, x, schedule, LOCAL_RANGE, num_valid_tokens=num_valid_tokens)


@pytest.mark.parametrize("num_tokens", [0, 1, 8, 63, 64, 65, 100])
@pytest.mark.parametrize("rank_local", [True, False])
def test_the_front_equals_the_separate_passes(num_tokens, rank_local):
    expected = separate_passes(num_tokens, LOCAL_RANGE if rank_local else None)
    assert_bitwise_equal(front(num_tokens, rank_local=rank_local), expected)


@pytest.mark.parametrize("num_tokens", [63, 64, 65])
@pytest.mark.parametrize("rows", [1, 7, 63])
def test_a_row_does_not_depend_on_the_number_of_tokens(num_tokens, rows):
    hidden_states, logits = random_batch(num_tokens, NUM_EXPERTS)
    whole = route_quantize(logits, hidden_states, CONFIG, BIAS, local_range=LOCAL_RANGE)
    part = route_quantize(logits[:rows], hidden_states[:rows], CONFIG, BIAS, local_range=LOCAL_RANGE)
    assert_bitwise_equal(whole.routing.topk_ids[:rows], part.routing.topk_ids)
    assert_bitwise_equal(whole.routing.topk_weights[:rows], part.routing.topk_weights)
    assert_bitwise_equal(whole.routing.packed[:rows], part.routing.packed)
    assert_bitwise_equal(whole.x[:rows], part.x)


@pytest.mark.parametrize("num_valid", [0, 1, 5])
def test_rows_beyond_the_valid_tokens_get_no_expert_and_may_hold_nan(num_valid):
    hidden_states, logits = random_batch(5, NUM_EXPERTS)
    expected = separate_passes(5, LOCAL_RANGE, torch.tensor([num_valid]))
    hidden_states[num_valid:], logits[num_valid:] = math.nan, math.nan
    result = route_quantize(
        logits, hidden_states, CONFIG, BIAS, local_range=LOCAL_RANGE, num_valid_tokens=torch.tensor([num_valid])
    )
    assert_bitwise_equal(result, expected)
    assert torch.all(result.schedule.slot_rows[num_valid:] == -1)


@pytest.mark.parametrize("local_range", [None, LocalRange(0, 0)], ids=["no_range", "count_0"])
def test_without_a_range_ids_stay_global_and_no_schedule_is_made(local_range):
    result = front(5, local_range=local_range)
    assert result.schedule is None
    assert result.local_range is None
    assert_bitwise_equal(result.routing, separate_passes(5, None).routing)


@pytest.mark.parametrize("num_tokens", [0, 1, 64])
def test_masks_alone_are_those_of_the_schedule(num_tokens):
    whole, masks = front(num_tokens), front(num_tokens, schedule="masks")
    assert masks.schedule is None
    assert_bitwise_equal(masks.expert_token_mask, whole.schedule.expert_token_mask)
    assert_bitwise_equal((masks.routing, masks.x, masks.local_range), (whole.routing, whole.x, whole.local_range))


def test_no_schedule_is_made_where_none_is_asked_for():
    result = front(5, schedule="none")
    assert (result.schedule, result.expert_token_mask) == (None, None)
    assert_bitwise_equal(result.routing, front(5).routing)


def test_masks_alone_are_refused_for_more_tokens_than_a_mask_has_bits():
    with pytest.raises(ValueError, match=r"schedule: .*64.*65"):
        front(65, schedule="masks")


def test_another_kind_of_schedule_is_refused_by_name():
    with pytest.raises(ValueError, match=r"schedule: expected .*, got 'row'"):
        front(5, schedule="row")


def test_a_rank_with_all_experts_keeps_global_ids_and_has_a_schedule():
    result = front(5, local_range=LocalRange(0, NUM_EXPERTS))
    assert result.routing.local_range is None
    assert torch.all(result.schedule.slot_rows >= 0)


def test_different_numbers_of_tokens_are_refused():
    hidden_states, logits = random_batch(5, NUM_EXPERTS)
    with pytest.raises(ValueError, match="router_logits: expected 5 tokens as hidden_states, got 4"):
        route_quantize(logits[:4], hidden_states, CONFIG)


@pytest.mark.parametrize("rank_local", [True, False])
def test_a_range_outside_the_experts_is_refused_naming_both_numbers(rank_local):
    with pytest.raises(ValueError, match=r"num_experts=64, got offset=60, (count|num_local_experts)=8"):
        front(5, local_range=LocalRange(60, 8), rank_local=rank_local)


@pytest.mark.parametrize("schedule", ["rows", "masks"])
def test_an_expert_map_gives_the_schedule_of_a_rank_without_a_range(schedule):
    placement = ExpertPlacement(NUM_EXPERTS, 4, 1, strategy="round_robin")
    options = {"expert_map": placement.expert_map, "num_local_experts": placement.num_local_experts}
    result = front(9, local_range=None, schedule=schedule, **options)
    expected = build_schedule(
        result.routing.topk_ids,
        placement.num_local_experts,
        num_experts=NUM_EXPERTS,
        expert_map=placement.expert_map,
    )
    assert result.routing.local_range is None
    assert result.local_range is None
    if schedule == "rows":
        assert_bitwise_equal(result.schedule, expected)
    else:
        assert_bitwise_equal(result.expert_token_mask, expected.expert_token_mask)


def test_a_range_and_a_map_together_are_refused():
    with pytest.raises(ValueError, match="expert_map: expected None beside a local_range"):
        front(3, expert_map=torch.zeros(NUM_EXPERTS, dtype=torch.int32), num_local_experts=1)
