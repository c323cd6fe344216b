"""Decode throughput of a whole model by arm: what is gained where the steps around the experts become one launch."""

from __future__ import annotations

from collections.abc import Sequence

from rankmoe.bench.record import Record
from rankmoe.report.blocks import figure, paragraph, section, table
from rankmoe.report.line_chart import Line, LineChart, draw_lines
from rankmoe.report.markup import element, text
from rankmoe.report.records import StoredRecord

ARMS = {"a": "(a) separate", "b": "(b) fused front", "c": "(c) one launch"}
TUNINGS = {"held": "held", "fresh": "searched for anew"}
_TITLE = "Decode throughput by arm"


def decode_section(records: Sequence[StoredRecord]) -> str:
    """The section; says plainly where the folder has no such record."""
    chosen = [stored.record for stored in records if stored.record.bench == "decode"]
    if not chosen:
        words = "There is no record of decode throughput in this folder, so nothing is shown here."
        return section("decode", _TITLE, paragraph(words))
    words = (
        "Arm (a): route, pack, quantise and a schedule over global ids, a launch each. (b): one launch for the first "
        "three, and a schedule over rank-local ids. (c): one launch for all. Held: every arm runs the expert GEMMs in "
        "the heuristic's configurations. Fresh: in those of a search that each arm asked for; they share its keys."
    )
    return section("decode", _TITLE, paragraph(words), *(_one(record) for record in chosen))


def _one(record: Record) -> str:
    tunings = [name for name in TUNINGS if any(row["tuning"] == name for row in record.rows)]
    charts = [throughput_chart(record, tunings[0])]
    charts += [chart for name in tunings if (chart := gain_chart(record, name)) is not None]
    rows = [["tuning", "batch", "arm", "tokens/s", "step, µs", "spread, µs", "over (a)"]]
    rate = rates(record)
    for row in sorted(record.rows, key=lambda row: (list(TUNINGS).index(row["tuning"]), row["batch"], row["arm"])):
        base = rate.get((row["tuning"], "a"), {}).get(row["batch"])
        numbers = (f"{row['tokens_per_s']:,.1f}", f"{row['step_us']:,.1f}", f"{row['spread']:,.1f}")
        gain = f"{row['tokens_per_s'] / base:.3f}" if base else ""
        rows.append([row["tuning"], str(row["batch"]), ARMS[row["arm"]], *numbers, gain])
    title = f"{record.model}, {record.device}"
    panels = [draw_lines(chart) for chart in charts]
    label = f"Decode throughput of {title}"
    return element("article", element("h3", text(title)), figure(panels, record), table(rows, label))


def rates(record: Record) -> dict[tuple[str, str], dict[int, float]]:
    """Tokens a second by batch, for each tuning and arm."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in sorted(record.rows, key=lambda row: int(row["batch"])):
        found.setdefault((row["tuning"], row["arm"]), {})[row["batch"]] = row["tokens_per_s"]
    return found


def throughput_chart(record: Record, tuning: str) -> LineChart:
    """Tokens a second of each arm."""
    rate = rates(record)
    lines = tuple(
        Line(ARMS[arm], f"arm-{arm}", tuple(rate[tuning, arm].items())) for arm in "cba" if (tuning, arm) in rate
    )
    return LineChart(f"tokens/s, configurations {TUNINGS[tuning]}", lines, "sequences")


def gain_chart(record: Record, tuning: str) -> LineChart | None:
    """Throughput of the other arms over (a)'s at the same batch, or None without (a)."""
    rate = rates(record)
    base = rate.get((tuning, "a"), {})
    lines = []
    for arm in "cba":
        points = tuple(
            (batch, value / base[batch]) for batch, value in rate.get((tuning, arm), {}).items() if batch in base
        )
        if points:
            lines.append(Line(ARMS[arm], f"arm-{arm}", points, is_dashed=arm == "a"))
    if len(lines) < 2:
        return None
    return LineChart(f"over (a), configurations {TUNINGS[tuning]}", tuple(lines), "sequences", is_log=False)
