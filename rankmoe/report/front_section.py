"""The launch from router logits to the schedule, beside its parts and its peer."""

from __future__ import annotations

from collections.abc import Sequence

from rankmoe.bench.record import Record
from rankmoe.report.blocks import figure, paragraph, place, record_table, section
from rankmoe.report.line_chart import Line, LineChart, draw_lines
from rankmoe.report.markup import element, text
from rankmoe.report.records import StoredRecord

#: Variants in the figure, with the label and the colour of each; the table has them all.
_VARIANTS = {
    "front+schedule": ("front+schedule", "native"),
    "front": ("front", "native"),
    "sglang": ("sglang", "sglang"),
    "unfused": ("unfused", "triton"),
    "empty": ("empty", "floor"),
}


def front_section(records: Sequence[StoredRecord]) -> str:
    """The section; says so where the folder has no such record."""
    chosen = [stored.record for stored in records if stored.record.bench == "front"]
    title = "From router logits to the schedule"
    if not chosen:
        words = paragraph("There is no record of the front in this folder; `rankmoe bench front` makes one.")
        return section("front", title, words)
    words = (
        "front: one launch that routes, quantises and packs the ids; front+schedule builds the schedule in it, too. "
        "sglang: its fused launch, without a schedule, which its consumer makes in a pass of its own. unfused: our "
        "separate passes. The filled area is a launch of the same grid that does nothing."
    )
    return section("front", title, paragraph(words), *(_one(record) for record in chosen))


def _one(record: Record) -> str:
    panels = [draw_lines(chart) for chart in (front_chart(record), front_chart(record, with_passes=False)) if chart]
    title = place(record)
    return element(
        "article", element("h3", text(title)), figure(panels, record), record_table(record, f"Front of {title}")
    )


def front_chart(record: Record, with_passes: bool = True) -> LineChart | None:
    """Times of a launch over token counts, or None where nothing is to be shown.

    with_passes: also the separate passes, which take so much longer that the axis is logarithmic.
    """
    us: dict[str, dict[int, float]] = {}
    for row in sorted(record.rows, key=lambda row: int(row["tokens"])):
        us.setdefault(row["variant"], {})[row["tokens"]] = row["us"]
    lines = tuple(
        Line(label, role, tuple(us[name].items()), is_dashed=name == "front", is_floor=name == "empty")
        for name, (label, role) in _VARIANTS.items()
        if name in us and (with_passes or name != "unfused")
    )
    if not lines or (not with_passes and "unfused" not in us):
        return None
    title = "with the separate passes, µs (log)" if "unfused" in us and with_passes else "one launch, µs"
    return LineChart(title, lines, is_log=with_passes)
