"""Timing: variants interleaved, medians with their interquartile range; graph replays on a GPU."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch


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


@dataclass(frozen=True)
class Launches:
    """A captured graph of launches, all of one variant.

    keep_alive: what the launches read and write; a graph does not hold it.
    """

    graph: torch.cuda.CUDAGraph
    num_launches: int
    keep_alive: object


def capture_launches(run: Callable[[int], object], num_sets: int, num_launches: int = 100) -> Launches:
    """Capture ``run(i)`` for rotating sets ``i`` of buffers; each set runs once eagerly first, so everything compiles.

    What the calls return is kept alive with the graph.
    """
    for i in range(num_sets):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        keep_alive = [run(launch % num_sets) for launch in range(num_launches)]
    return Launches(graph, num_launches, (run, keep_alive))


def time_launches(variants: Mapping[str, Launches], rounds: int = 25, replays: int = 4) -> dict[str, Timing]:
    """Replay the graphs in turn and time each round by device events; figures are for one launch.

    Rounds have different orders, see ``orders``. A graph is replayed once unmeasured, then ``replays`` times back to
    back.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    measured: dict[str, list[float]] = {name: [] for name in variants}
    for order in orders(list(variants), rounds):
        for name in order:
            launches = variants[name]
            launches.graph.replay()
            start.record()
            for _ in range(replays):
                launches.graph.replay()
            end.record()
            end.synchronize()
            measured[name].append(start.elapsed_time(end) * 1e3 / (replays * launches.num_launches))
    return {name: Timing.of(values) for name, values in measured.items()}


def orders(names: list[str], rounds: int) -> Iterator[list[str]]:
    """The names in another random order each round, the same ones in every run.

    A GPU's clock, bound by power, is what the variant timed before has left: none may always follow the same one.
    """
    generator = random.Random(0)
    for _ in range(rounds):
        yield generator.sample(names, len(names))
