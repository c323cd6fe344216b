"""Axes: where a value stands, and which values are worth a tick."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """Values from ``low`` to ``high`` along coordinates from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = True

    def __call__(self, value: float) -> float:
        """The coordinate of a value."""
        if self.low == self.high:
            return (self.start + self.end) / 2
        return self.start + (self.end - self.start) * (self._place(value) - self._place(self.low)) / self._span

    def _place(self, value: float) -> float:
        return math.log10(value) if self.is_log else value

    @property
    def _span(self) -> float:
        return self._place(self.high) - self._place(self.low)


def log_ticks(low: float, high: float, most: int = 9) -> list[float]:
    """1, 2 and 5 of each power of ten within a range, or the powers alone where those are too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1,)):
        ticks = [step * 10.0**power for power in powers for step in steps]
        within = [tick for tick in ticks if low <= tick * (1 + 1e-9) and tick <= high * (1 + 1e-9)]
        if len(within) <= most:
            return within
    return within


def linear_ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round values within a range, about so many."""
    if low == high:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(step * index, 10) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def spread(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """Coordinates as near to the wanted ones as labels ``gap`` apart can be, between low and high; the order stays."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    groups: list[tuple[float, int]] = []  # middle and size of labels that touch each other
    for index in order:
        groups.append((wanted[index], 1))
        while len(groups) > 1:
            (upper, above), (lower, below) = groups[-2:]
            if lower - upper >= gap * (above + below) / 2:
                break
            groups[-2:] = [((upper * above + lower * below) / (above + below), above + below)]
    placed = []
    for middle, size in groups:
        reach = gap * (size - 1) / 2
        middle = min(max(middle, low + reach), high - reach)
        placed += [middle - reach + gap * place for place in range(size)]
    result = [0.0] * len(wanted)
    for index, place in zip(order, placed, strict=True):
        result[index] = place
    return result
