"""The page: sections in order, one file, nothing from outside."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rankmoe import __version__
from rankmoe.bench.record import write_whole
from rankmoe.report.blocks import section, table
from rankmoe.report.coverage_section import coverage_section
from rankmoe.report.decode_section import decode_section
from rankmoe.report.front_section import front_section
from rankmoe.report.layer_section import layer_section
from rankmoe.report.load_section import load_section
from rankmoe.report.markup import element, text
from rankmoe.report.records import StoredRecord, read_records
from rankmoe.report.style import style_sheet
from rankmoe.report.summary import draw_headlines, headlines


def write_report(directory: Path, out: Path) -> int:
    """Write the page of a folder's records; returns how many they are.

    Raises RecordError, naming the file, before anything is written, and OSError where the page cannot be.
    """
    records = read_records(directory)
    write_whole(out, render(records))
    return len(records)


def render(records: Sequence[StoredRecord]) -> str:
    """The page as HTML."""
    sections = (
        layer_section(records),
        front_section(records),
        decode_section(records),
        load_section(records),
        coverage_section(records),
        _records_section(records),
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", text("rankmoe: benchmark report")),
        element("style", style_sheet()),
    )
    intro = text(
        "The routed part of mixture-of-experts layers, as one rank of an expert-parallel group runs it. Every number "
        "is a record's: a median, or the ratio of two medians of one run."
    )
    header = element(
        "header",
        element("h1", text("rankmoe benchmark report")),
        element("p", intro),
        element("nav", *(_link(markup) for markup in sections), aria_label="Sections"),
        draw_headlines(headlines(records)),
    )
    footer = element("footer", text(f"Made by rankmoe {__version__} from {len(records)} records."))
    body = element("body", header, element("main", *sections), footer)
    return "<!DOCTYPE html>\n" + element("html", head, body, lang="en") + "\n"


def _link(markup: str) -> str:
    match = re.match(r'<section id="([\w-]+)"><h2>(.*?)</h2>', markup)
    assert match is not None, "a section begins with its title"
    return element("a", match[2], href=f"#{match[1]}")


def _records_section(records: Sequence[StoredRecord]) -> str:
    rows = [["record", "benchmark", "model", "device", "date", "commit", "rows"]]
    for stored in sorted(records, key=lambda stored: stored.name):
        record = stored.record
        cells = (record.bench, record.model, record.device, record.date, record.commit, str(len(record.rows)))
        rows.append([stored.name, *cells])
    return section("records", "Records", table(rows, "Records"))
