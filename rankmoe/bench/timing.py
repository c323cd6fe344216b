"""Timing: variants interleaved, medians with their interquartile range."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Median and interquartile range of repeated runs, in microseconds."""

    us: float
    spread: float

    @classmethod
    def of(cls, microseconds: list[float]) -> Timing:
        """Summarise at least one measurement."""
        if len(microseconds) == 1:
            return cls(microseconds[0], 0.0)
        lower, _, upper = statistics.quantiles(microseconds, n=4, method="inclusive")
        return cls(statistics.median(microseconds), upper - lower)


def time_interleaved(variants: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, Timing]:
    """Time host functions in turn, so that drift of the machine reaches all alike; each runs once unmeasured first."""
    for run in variants.values():
        run()
    measured: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, run in variants.items():
            started = time.perf_counter()
            run()
            measured[name].append((time.perf_counter() - started) * 1e6)
    return {name: Timing.of(values) for name, values in measured.items()}
