import math

import pytest
import torch
from helpers import assert_bitwise_equal, seeded

from rankmoe import reference
from rankmoe.combine import combine
from rankmoe.schedule import build_schedule
from rankmoe.types import ExpertSchedule


def schedule_of(ids: list[list[int]], num_local_experts: int = 8) -> ExpertSchedule:
    return build_schedule(torch.tensor(ids), num_local_experts, num_experts=64)


def test_slots_are_added_in_slot_order():
    schedule = schedule_of([[0, 1, 2], [2, 1, 0]])
    rows = torch.tensor([2.0**24, 2.0**24, 1.0, 1.0, -(2.0**24), -(2.0**24)])[:, None]
    out = combine(rows, torch.ones(2, 3), schedule, torch.float32)
    # (2^24 + 1) - 2^24 loses the 1; (-2^24 + 1) + 2^24 keeps it.
    assert out.tolist() == [[0.0], [1.0]]


def test_random_rows_equal_a_float32_loop_in_slot_order():
    ids = torch.rand(9, 16, generator=seeded(0)).argsort(1)[:, :6]
    schedule = build_schedule(ids, 8, num_experts=16, local_expert_offset=4)
    rows = torch.randn(len(schedule.row_tokens), 64, generator=seeded(1))
    weights = torch.rand(9, 6, generator=seeded(2))
    out = combine(rows, weights, schedule, torch.float32)
    assert_bitwise_equal(out, reference.combine(rows, weights, schedule))
    assert_bitwise_equal(combine(rows, weights, schedule), out.bfloat16())


def test_weights_are_used_in_float32():
    weight = 1 + 2.0**-20
    out = combine(torch.ones(1, 1), torch.tensor([[weight]]), schedule_of([[0]]), torch.float32)
    assert out.item() == weight


def test_the_sum_is_rounded_to_bf16_once():
    rows = torch.tensor([[1.0], [2.0**-8], [2.0**-9]])  # 1 + 2^-8 is a tie of bfloat16, the rest lifts it
    out = combine(rows, torch.ones(1, 3), schedule_of([[0, 1, 2]]))
    assert out.dtype == torch.bfloat16
    assert out.item() == 1 + 2.0**-7


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_weight_of_a_slot_that_another_rank_computes_does_not_leak(bad):
    schedule = schedule_of([[0, 40], [-1, 1]])
    weights = torch.tensor([[0.5, bad], [bad, 0.25]])
    assert combine(torch.ones(2, 1), weights, schedule).tolist() == [[0.5], [0.25]]


def test_a_nan_row_makes_only_its_tokens_nan():
    schedule = schedule_of([[0, 1], [1, 2], [0, 2]])
    rows = torch.ones(6, 4)
    rows[schedule.slot_rows[1, 0]] = math.nan
    is_nan = combine(rows, torch.ones(3, 2), schedule).isnan()
    assert is_nan.all(1).tolist() == is_nan.any(1).tolist() == [False, True, False]


def test_an_expert_named_twice_counts_twice():
    out = combine(torch.tensor([[3.0]]), torch.tensor([[0.5, 0.25]]), schedule_of([[2, 2]]))
    assert out.item() == 2.25


def test_a_token_without_local_slots_is_zero():
    out = combine(torch.ones(1, 4), torch.ones(3, 2), schedule_of([[0, 40], [40, 41], [-1, -5]]))
    assert out.tolist() == [[1.0] * 4, [0.0] * 4, [0.0] * 4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_tokens_give_no_rows(dtype):
    schedule = build_schedule(torch.empty(0, 2, dtype=torch.int32), 8, num_experts=64)
    out = combine(torch.empty(0, 32), torch.empty(0, 2), schedule, dtype)
    assert (out.shape, out.dtype) == ((0, 32), dtype)


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        (torch.ones(1, 2).bfloat16(), TypeError, "topk_weights: expected float32, got torch.bfloat16"),
        (torch.ones(2, 2), ValueError, r"topk_weights: expected \(1, 2\) as the schedule, got \(2, 2\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(weights, error, message):
    with pytest.raises(error, match=message):
        combine(torch.ones(2, 4), weights, schedule_of([[0, 1]]))


def test_fewer_rows_than_the_schedule_has_are_refused_by_name():
    with pytest.raises(ValueError, match=r"rows: expected .*2.*, got .*1"):
        combine(torch.ones(1, 4), torch.ones(1, 2), schedule_of([[0, 1]]))
