"""Layer time by stage, each engine above the time of reading the touched weights once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rankmoe.bench.record import Record
from rankmoe.report.blocks import figure, paragraph, place, record_table, section
from rankmoe.report.line_chart import Line, LineChart, draw_lines
from rankmoe.report.markup import element, text
from rankmoe.report.records import StoredRecord

#: Panels: a stage, and which of the floor's stages it stands on.
STAGES = {"gate_up": "gate_up", "down": "down", "layer": "gemms"}
#: From the one to look at to the one that is only there; the floor is drawn beneath all.
_ENGINES = ("native", "cpu", "composition", "humming", "triton")
_MILLISECONDS_FROM = 100_000.0


def layer_section(records: Sequence[StoredRecord]) -> str:
    """The section; says so where the folder has no such record."""
    chosen = [stored.record for stored in records if stored.record.bench == "layer"]
    if not chosen:
        words = paragraph("There is no record of layer times in this folder; `rankmoe bench layer` makes one.")
        return section("layer", "Layer time by stage", words)
    words = (
        "One rank's routed layer on random weights of the model's real size. The filled area is the floor, the "
        "measured time of reading the touched experts' weights once. The numbers at its foot are the time of the "
        "engine in their colour over the floor's. Both axes are logarithmic."
    )
    articles = [_one(record, is_open=number == 0) for number, record in enumerate(chosen)]
    return section("layer", "Layer time by stage", paragraph(words), *articles)


def _one(record: Record, is_open: bool) -> str:
    panels = [draw_lines(chart) for stage in STAGES if (chart := layer_chart(record, stage)) is not None]
    counts = sorted({row["tokens"] for row in record.rows})
    tokens = f"{counts[0]:,} to {counts[-1]:,} tokens" if len(counts) > 1 else f"{counts[0]:,} tokens"
    title = f"{place(record)}: {tokens}{', skewed routing' if is_skewed(record) else ''}"
    times_table = element(
        "details",
        element("summary", text("All stages and ratios")),
        record_table(record, f"Layer times of {title}"),
        open="" if is_open else None,
    )
    return element("article", element("h3", text(title)), figure(panels, record), times_table)


def is_skewed(record: Record) -> bool:
    """Whether few experts got most tokens."""
    return any(row.get("routing") == "skewed" for row in record.rows)


def layer_chart(record: Record, stage: str) -> LineChart | None:
    """Times of one stage over token counts, or None where the record has none."""
    us = times(record)
    engines = [name for name in _ENGINES if (name, stage) in us]
    if not engines:
        return None
    largest = max(max(us[name, stage].values()) for name in engines)
    unit, divisor = ("ms", 1e3) if largest >= _MILLISECONDS_FROM else ("µs", 1.0)
    floor = us.get(("floor", STAGES[stage]), {})
    lines = [Line(name, name, _points(us[name, stage], divisor)) for name in engines]
    if floor:
        notes = tuple(_ratio(value, floor.get(count)) for count, value in us[engines[0], stage].items())
        lines[0] = dataclasses.replace(lines[0], notes=notes, notes_label="× floor")
        lines.append(Line("floor", "floor", _points(floor, divisor), is_floor=True))
    name = {"gate_up": "gate and up GEMM", "down": "down GEMM", "layer": "whole layer"}[stage]
    return LineChart(f"{name}, {unit}", tuple(lines))


def times(record: Record) -> dict[tuple[str, str], dict[int, float]]:
    """Microseconds by token count, for each variant and stage."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in sorted(record.rows, key=lambda row: int(row["tokens"])):
        found.setdefault((row["variant"], row["stage"]), {})[row["tokens"]] = row["us"]
    return found


def _ratio(value: float, floor: float | None) -> str:
    return "" if floor is None else f"{value / floor:.{2 if value < 10 * floor else 1}f}"


def _points(values: dict[int, float], divisor: float) -> tuple[tuple[float, float], ...]:
    return tuple((count, value / divisor) for count, value in values.items())
