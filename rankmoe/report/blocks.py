"""What sections are made of: paragraphs, figures with where they were measured, tables in a box that scrolls."""

from __future__ import annotations

from collections.abc import Sequence

from rankmoe.bench.record import Record
from rankmoe.bench.tables import table_rows
from rankmoe.report.markup import element, text
from rankmoe.report.theme import SERIES

#: Whose colour the variants of the front have.
_FRONT_ROLES = {
    "front": "native",
    "front+schedule": "native",
    "front+rows": "native",
    "unfused": "triton",
    "empty": "floor",
}


def section(name: str, title: str, *children: str) -> str:
    """A section; ``name`` is its anchor."""
    return element("section", element("h2", text(title)), *children, id=name)


def paragraph(words: str) -> str:
    """A paragraph of plain text."""
    return element("p", text(words))


def figure(panels: Sequence[str], record: Record) -> str:
    """Panels beside each other, or below each other where the screen is narrow, and where they were measured."""
    return element("figure", element("div", *panels, class_="panels"), element("figcaption", text(measured_on(record))))


def measured_on(record: Record) -> str:
    """Device, date, commit and versions of a record."""
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items() if name != "rankmoe")
    return f"{record.device}, {record.date}, commit {record.commit}, {versions}."


def place(record: Record) -> str:
    """Model, group and device, as a heading has them."""
    return f"{record.model}, EP {record.notes['ep_size']}, {record.device}"


def table(rows: Sequence[Sequence[str]], label: str) -> str:
    """Rows of cells, the header first, in a box of its own that scrolls; first cells that name an engine are marked."""
    header, *body = rows
    are_words = [not any(cell[:1].isdigit() for cell in column) for column in zip(*body, strict=True)]
    kinds = ["words" if is_words else None for is_words in are_words]
    heads = [element("th", text(cell), scope="col", class_=kind) for cell, kind in zip(header, kinds, strict=True)]
    lines = []
    for cells in body:
        rest = [element("td", text(cell), class_=kind) for cell, kind in zip(cells[1:], kinds[1:], strict=True)]
        lines.append(element("tr", _first(cells[0]), *rest, class_=_kind(cells)))
    content = element("table", element("thead", element("tr", *heads)), element("tbody", *lines))
    return element("div", content, class_="scroll", tabindex="0", role="region", aria_label=label)


def record_table(record: Record, label: str) -> str:
    """A record's table as the documents have it."""
    rows = table_rows(record)
    rows[0][0] = rows[0][0].replace("us at", "µs at")
    return table(rows, label)


def _first(cell: str) -> str:
    name = cell.split(" ")[0]
    engine = _FRONT_ROLES.get(name, name)
    if engine not in SERIES or " / " in cell:
        return element("th", text(cell), scope="row")
    return element("th", element("span", class_=f"swatch {engine}", aria_hidden="true"), text(cell), scope="row")


def _kind(cells: Sequence[str]) -> str | None:
    if " / " in cells[0]:
        return "ratio"
    return "main" if cells[0] in ("native layer", "front+schedule") else None
