"""The order in which variants are timed."""

from itertools import pairwise

from rankmoe.bench.timing import Timing, orders


def test_each_round_has_every_variant_and_none_always_follows_the_same_one():
    names = [f"variant {n}" for n in range(12)]
    rounds = list(orders(names, 20))
    assert all(sorted(order) == sorted(names) for order in rounds)
    for name in names:
        before = {first for order in rounds for first, second in pairwise(order) if second == name}
        assert len(before) >= 6


def test_orders_are_the_same_in_every_run():
    assert list(orders(["a", "b", "c"], 5)) == list(orders(["a", "b", "c"], 5))


def test_a_timing_is_median_and_interquartile_range():
    assert Timing.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Timing(3.0, 2.0)
    assert Timing.of([7.0]) == Timing(7.0, 0.0)
