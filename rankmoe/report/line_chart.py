"""A panel of lines over a logarithmic axis of token counts, each named at its end and not in a legend."""

from __future__ import annotations

from dataclasses import dataclass

from rankmoe.report.axis import Axis, linear_ticks, log_ticks, spread
from rankmoe.report.markup import element, number, text

WIDTH, HEIGHT = 400, 290
_TOP, _BOTTOM = 44, 42
_BASE = HEIGHT - _BOTTOM
_LABEL_GAP = 15
#: Widths of a letter of a label, which is bold, and of a digit, in the widest of the fonts.
_LETTER, _DIGIT = 8.4, 7.7
#: Room above the horizontal axis for a row of notes.
_NOTES = 26


@dataclass(frozen=True)
class Line:
    """One line.

    points: (x, y), by rising x.
    role: whose colour it has, a name of ``theme.SERIES``.
    is_floor: what nothing can be below; the space beneath it is filled.
    notes: a short text for each point, written above the horizontal axis in the line's colour; ``notes_label`` behind.
    """

    label: str
    role: str
    points: tuple[tuple[float, float], ...]
    is_dashed: bool = False
    is_floor: bool = False
    notes: tuple[str, ...] = ()
    notes_label: str = ""


@dataclass(frozen=True)
class LineChart:
    """What a panel shows; ``title`` names the quantity and its unit."""

    title: str
    lines: tuple[Line, ...]
    x_label: str = "tokens"
    is_log: bool = True


@dataclass(frozen=True)
class _Plot:
    """Where things are: axes, and the right end of the grid, behind which labels stand."""

    x: Axis
    y: Axis
    left: float
    right: float


def draw_lines(chart: LineChart) -> str:
    """The panel as an SVG element."""
    counts = sorted({x for line in chart.lines for x, _ in line.points})
    y, ticks = _vertical(chart)
    left = 14 + _DIGIT * max(len(_tick_text(tick)) for tick in ticks)
    right = WIDTH - 14 - _LETTER * max(8, *(len(line.label) for line in chart.lines))
    plot = _Plot(Axis(counts[0], counts[-1], left + 18, right - 8), y, left, right)
    parts = [element("text", text(chart.title), class_="title", x=12, y=24)]
    parts += [_area(line, plot) for line in chart.lines if line.is_floor]
    for tick in ticks:
        parts.append(element("line", class_="grid", x1=left, x2=right, y1=y(tick), y2=y(tick)))
        parts.append(element("text", text(_tick_text(tick)), x=left - 6, y=y(tick) + 4, text_anchor="end"))
    parts.append(element("line", class_="axis", x1=left, x2=right, y1=_BASE, y2=_BASE))
    for count in _apart(counts, plot.x):
        parts.append(element("text", text(_tick_text(count)), x=plot.x(count), y=_BASE + 17, text_anchor="middle"))
    parts.append(element("text", text(chart.x_label), x=(left + right) / 2, y=HEIGHT - 8, text_anchor="middle"))
    lowest = _BASE - (_NOTES if any(line.notes for line in chart.lines) else 4)
    ends = spread([y(line.points[-1][1]) for line in chart.lines], _LABEL_GAP, _TOP, lowest)
    # The first line is the one to look at: it is drawn last, over the others.
    for line, end in reversed(list(zip(chart.lines, ends, strict=True))):
        parts.append(_line(line, plot, end, chart.x_label))
    return element(
        "svg",
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        width=WIDTH,
        height=HEIGHT,
        role="img",
        aria_label=_description(chart),
    )


def _vertical(chart: LineChart) -> tuple[Axis, list[float]]:
    values = [value for line in chart.lines for _, value in line.points]
    low, high = min(values), max(values)
    if not chart.is_log:
        margin = (high - low) * 0.1 or abs(high) * 0.1
        # A filled area is read as an amount, and an amount begins at nothing.
        low, high = 0.0 if any(line.is_floor for line in chart.lines) else low - margin, high + margin
        return Axis(low, high, _BASE, _TOP, is_log=False), linear_ticks(low, high)
    low, high = low / 1.1, high * 1.1
    if any(line.notes for line in chart.lines):  # the lowest point stands above the notes
        share = _NOTES / (_BASE - _TOP)
        low = low / (high / low) ** (share / (1 - share))
    while len(ticks := log_ticks(low, high)) < 2:  # a range without round values between
        low, high = low / 1.5, high * 1.5
    return Axis(low, high, _BASE, _TOP), ticks


def _apart(counts: list[float], x: Axis) -> list[float]:
    """The counts whose labels have room: from the left, but the last one always."""
    kept = [counts[-1]]
    for count in counts[:-1]:
        neighbours = [other for other in kept if abs(x(other) - x(count)) < _DIGIT * len(_tick_text(other)) + 6]
        if not neighbours:
            kept.append(count)
    return kept


def _area(floor: Line, plot: _Plot) -> str:
    places = [(plot.x(count), plot.y(value)) for count, value in floor.points]
    corners = [(places[0][0], float(_BASE)), *places, (places[-1][0], float(_BASE))]
    return element("polygon", class_="area", points=_coordinates(corners))


def _line(line: Line, plot: _Plot, end: float, x_label: str) -> str:
    places = [(plot.x(count), plot.y(value)) for count, value in line.points]
    style = "line dashed" if line.is_dashed or line.is_floor else "line"
    parts = [element("polyline", class_=style, points=_coordinates(places))] if len(places) > 1 else []
    for (count, value), (x, y) in zip(line.points, places, strict=True):
        hint = element("title", text(f"{line.label}, {count:,.0f} {x_label}: {value_text(value)}"))
        parts.append(element("circle", hint, class_="dot", cx=x, cy=y, r=2 if line.is_floor else 3.5))
    for note, (x, _) in zip(line.notes, places, strict=False):
        parts.append(element("text", text(note), class_="note", x=x, y=_BASE - 8, text_anchor="middle"))
    if line.notes:
        parts.append(element("text", text(line.notes_label), class_="note", x=plot.right + 14, y=_BASE - 8))
    x, y = places[-1]
    parts.append(element("line", class_="leader", x1=x + 5, y1=y, x2=plot.right + 5, y2=end))
    parts.append(element("text", text(line.label), class_="label", x=plot.right + 8, y=end + 4))
    return element("g", *parts, class_=line.role)


def _coordinates(places: list[tuple[float, float]]) -> str:
    return " ".join(f"{number(a)},{number(b)}" for a, b in places)


def _tick_text(value: float) -> str:
    return f"{value:,.10g}"


def value_text(value: float) -> str:
    """A value as a reader wants it: three digits or so."""
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 10_000 else 0
    return f"{value:,.{digits}f}"


def _description(chart: LineChart) -> str:
    """What a reader who cannot see the panel is told: each line's ends."""
    ends = [
        f"{line.label} from {value_text(line.points[0][1])} to {value_text(line.points[-1][1])}" for line in chart.lines
    ]
    return f"{chart.title}: {'; '.join(ends)}"
