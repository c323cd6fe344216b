"""What the page says first: a few numbers, each a record's or the ratio of two of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rankmoe.bench.record import Record
from rankmoe.report.decode_section import TUNINGS, rates
from rankmoe.report.layer_section import times
from rankmoe.report.markup import element, text
from rankmoe.report.records import StoredRecord

#: Tokens of the numbers, where a record has them.
_TOKENS = 8


@dataclass(frozen=True)
class Headline:
    """A number and what it is."""

    value: str
    words: str


def headlines(records: Sequence[StoredRecord]) -> list[Headline]:
    """The first record of each benchmark speaks; what has no record says nothing."""
    found: list[Headline] = []
    for bench, make in {"layer": _layer, "front": _front, "decode": _decode}.items():
        record = next((stored.record for stored in records if stored.record.bench == bench), None)
        if record is not None:
            found += make(record)
    return found


def draw_headlines(lines: Sequence[Headline]) -> str:
    """The numbers beside each other."""
    tiles = [
        element("div", element("dt", text(line.words)), element("dd", text(line.value)), class_="tile")
        for line in lines
    ]
    return element("dl", *tiles, class_="tiles") if tiles else ""


def _layer(record: Record) -> Iterator[Headline]:
    us = times(record)
    engine = next((name for name in ("native", "cpu") if (name, "layer") in us), None)
    if engine is None:
        return
    layer, floor, peer = (us.get(key, {}) for key in ((engine, "layer"), ("floor", "gemms"), ("composition", "layer")))
    tokens = _TOKENS if _TOKENS in layer else max(layer)
    unit, divisor = ("ms", 1e3) if layer[tokens] >= 10_000 else ("µs", 1.0)
    plural = "s" * (tokens > 1)
    yield Headline(
        f"{layer[tokens] / divisor:.1f} {unit}", f"one {record.model} layer on one rank, {tokens} token{plural}"
    )
    if tokens in floor:
        yield Headline(f"{layer[tokens] / floor[tokens]:.2f}×", "the time of reading the touched weights once")
    if tokens in peer:
        yield Headline(f"{peer[tokens] / layer[tokens]:.2f}×", "as fast as library parts around humming's GEMMs")


def _front(record: Record) -> Iterator[Headline]:
    us = {row["variant"]: row["us"] for row in record.rows if row["tokens"] == _TOKENS}
    if "front+schedule" in us:
        peer = f"; SGLang, without schedule, {us['sglang']:.2f}" if "sglang" in us else ""
        yield Headline(f"{us['front+schedule']:.2f} µs", f"logits to schedule, {_TOKENS} tokens{peer}")


def _decode(record: Record) -> Iterator[Headline]:
    rate = rates(record)
    for tuning, name in TUNINGS.items():
        one, other = rate.get((tuning, "c"), {}), rate.get((tuning, "a"), {})
        both = [batch for batch in one if batch in other]
        if both:
            batch = _TOKENS if _TOKENS in both else both[0]
            yield Headline(
                f"{one[batch] / other[batch]:.3f}×",
                f"decode, one launch over separate steps, batch {batch}, configurations {name}",
            )
            return
