"""A panel of expert load: a block for each rank, a cell for each of its experts, coloured by load over the mean."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from rankmoe.report.line_chart import WIDTH
from rankmoe.report.markup import element, text
from rankmoe.report.theme import HEAT

#: Highest load over the mean of each step but the last, and how the legend names the steps.
_BOUNDS = (0.0, 0.5, 0.8, 1.25, 2.0, 4.0, 8.0)
STEPS = ("no slot", "to ½", "to 0.8", "to 1.25", "to 2", "to 4", "to 8", "above 8 times the mean")
_LEFT, _TOP, _GAP, _TITLE = 12, 44, 12, 18


@dataclass(frozen=True)
class HeatRow:
    """Ranks beside each other: slots of each expert, a list for each rank. ``label`` stands at the left, if any."""

    label: str
    ranks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class HeatMap:
    """What a panel shows; every row has its own mean."""

    title: str
    rows: tuple[HeatRow, ...]
    blocks_a_line: int = 4


def step_of(slots: int, mean: float) -> int:
    """Which of ``STEPS`` a load is."""
    return bisect_left(_BOUNDS, slots / mean)


def rank_shares(row: HeatRow) -> list[float]:
    """Slots of each rank over the mean of the ranks."""
    totals = [sum(rank) for rank in row.ranks]
    mean = sum(totals) / len(totals)
    return [total / mean for total in totals]


def draw_heat_map(chart: HeatMap) -> str:
    """The panel as an SVG element."""
    has_labels = any(row.label for row in chart.rows)
    left = _LEFT + (52 if has_labels else 0)
    block = (WIDTH - left - 12 - _GAP * (chart.blocks_a_line - 1)) / chart.blocks_a_line
    across = _cells_across(max(len(rank) for row in chart.rows for rank in row.ranks))
    cell = block / across
    parts = [element("text", text(chart.title), class_="title", x=12, y=24)]
    top = float(_TOP)
    if has_labels:  # the ranks stand beneath each other, and are named once
        across_ranks = range(min(chart.blocks_a_line, len(chart.rows[0].ranks)))
        parts += [element("text", text(f"rank {r}"), x=left + r * (block + _GAP), y=top + 10) for r in across_ranks]
        top += 20
    for row in chart.rows:
        counts = [count for slots in row.ranks for count in slots]
        mean, shares = sum(counts) / len(counts), rank_shares(row)
        for first in range(0, len(row.ranks), chart.blocks_a_line):
            ranks = row.ranks[first : first + chart.blocks_a_line]
            deep = -(-max(map(len, ranks)) // across)
            if row.label and not first:
                parts.append(element("text", text(row.label), x=12, y=top + _TITLE + deep * cell / 2 + 4))
            for number, slots in enumerate(ranks, start=first):
                x, share = left + (number - first) * (block + _GAP), f"{shares[number]:.2f}×"
                words = share if has_labels and len(row.ranks) <= chart.blocks_a_line else f"rank {number}: {share}"
                fullest = "strong" if shares[number] == max(shares) else None
                parts.append(element("text", text(words), class_=fullest, x=x, y=top + 12))
                parts.append(_cells(slots, mean, x, top + _TITLE, cell, across))
            top += _TITLE + deep * cell + 10
    return element(
        "svg",
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {top:.0f}",
        width=WIDTH,
        height=round(top),
        role="img",
        aria_label=_description(chart),
    )


def _cells_across(num_experts: int) -> int:
    return min(16, max(4, round((4 * num_experts) ** 0.5)))


def _cells(rank: tuple[int, ...], mean: float, left: float, top: float, cell: float, across: int) -> str:
    """One path for each step, since nearly a thousand elements would say no more."""
    paths: dict[int, list[str]] = {}
    for expert, slots in enumerate(rank):
        x, y = left + expert % across * cell, top + expert // across * cell
        side = cell - min(1.0, cell / 6)
        paths.setdefault(step_of(slots, mean), []).append(f"M{x:.2f} {y:.2f}h{side:.2f}v{side:.2f}h-{side:.2f}z")
    return "".join(element("path", class_=list(HEAT)[step], d="".join(d)) for step, d in sorted(paths.items()))


def _description(chart: HeatMap) -> str:
    rows = [
        f"{row.label or 'load over the mean'} by rank {', '.join(f'{share:.2f}' for share in rank_shares(row))}"
        for row in chart.rows
    ]
    return f"{chart.title}: {'; '.join(rows)}"
