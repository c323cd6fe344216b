"""How slots fall on the experts of each rank: real text through ``nano``, and skewed random routing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rankmoe.bench.record import Record
from rankmoe.report.blocks import figure, paragraph, section
from rankmoe.report.heat_map import STEPS, HeatMap, HeatRow, draw_heat_map, rank_shares
from rankmoe.report.markup import element, text
from rankmoe.report.records import StoredRecord
from rankmoe.types import ExpertPlacement

_TITLE = "Expert load by rank"


def load_section(records: Sequence[StoredRecord]) -> str:
    """The section; says so where the folder has no such record."""
    chosen = [stored.record for stored in records if stored.record.bench == "routing"]
    if not chosen:
        words = paragraph("There is no record of routing in this folder; `rankmoe bench routing` makes one.")
        return section("load", _TITLE, words)
    words = (
        "A block is a rank, a cell one of its experts in order of their ids. Its colour is its number of slots over "
        "the mean of all experts of that layer; above a block stands the rank's own total over the mean of the "
        "ranks. A layer waits for its fullest rank. The loads are recorded, not run anew for this page, so that the "
        "same records give the same page."
    )
    steps = [
        element("li", element("span", class_=f"heat step-{step}", aria_hidden="true"), text(name))
        for step, name in enumerate(STEPS)
    ]
    legend = element("ul", *steps, class_="legend", aria_label="Slots of an expert over the mean")
    return section("load", _TITLE, paragraph(words), legend, element("div", *map(_one, chosen), class_="pair"))


def _one(record: Record) -> str:
    chart = load_chart(record)
    words = paragraph(_summary(record, chart))
    title = f"{record.model}, EP {record.notes['ep_size']}: {record.notes.get('source', 'recorded routing')}"
    return element("article", element("h3", text(title)), words, figure([draw_heat_map(chart)], record))


def load_chart(record: Record) -> HeatMap:
    """The record's layers, experts divided among contiguous ranks."""
    is_one = len(record.rows) == 1
    rows = tuple(HeatRow("" if is_one else f"layer {row['layer']}", _by_rank(record, row)) for row in record.rows)
    return HeatMap("slots of an expert over the mean", rows, min(4, record.notes["ep_size"]))


def _by_rank(record: Record, row: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    ep_size, counts = record.notes["ep_size"], row["counts"]
    placements = [ExpertPlacement(len(counts), ep_size, rank) for rank in range(ep_size)]
    return tuple(tuple(counts[expert] for expert in placement.logical_expert_ids) for placement in placements)


def _summary(record: Record, chart: HeatMap) -> str:
    fullest = max(share for row in chart.rows for share in rank_shares(row))
    counts = [count for row in record.rows for count in row["counts"]]
    largest = max(max(row["counts"]) * len(row["counts"]) / sum(row["counts"]) for row in record.rows)
    return (
        f"The fullest rank has {fullest:.2f} times the mean, the fullest expert {largest:.1f} times; "
        f"{counts.count(0)} of {len(counts)} experts have no slot."
    )
