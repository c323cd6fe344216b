"""Colours, light and dark, and the style sheets made of them. An engine has one colour wherever it is drawn."""

from __future__ import annotations

import re
from collections.abc import Mapping

#: What is drawn in a colour of its own. Text has these colours too, so each stands out from ``card`` and ``page`` by at
#: least 4.5 to 1 in both themes, which tests/test_report.py measures.
SERIES: Mapping[str, tuple[str, str]] = {
    "native": ("#1a5fc4", "#79b0ff"),
    "humming": ("#b04a00", "#ffa263"),
    "composition": ("#a3217c", "#f58ccb"),
    "triton": ("#0a7558", "#54d3aa"),
    "cpu": ("#6a3fc2", "#bda4ff"),
    "sglang": ("#856000", "#e2b84b"),
    "floor": ("#5a6472", "#a4aebc"),
    "arm-a": ("#a3217c", "#f58ccb"),
    "arm-b": ("#0b6e83", "#62cfe6"),
    "arm-c": ("#1a5fc4", "#79b0ff"),
}
_SURFACES: Mapping[str, tuple[str, str]] = {
    "page": ("#f6f7f9", "#101318"),
    "card": ("#ffffff", "#191d24"),
    "ink": ("#1b2027", "#e8ebef"),
    "muted": ("#58616d", "#a3acb8"),
    "rule": ("#e2e5ea", "#323843"),
    "area": ("#eceff3", "#262c36"),
    "good": ("#0a7558", "#54d3aa"),
}
#: Load relative to the mean, from no slot to more than eight times the mean: the fuller, the further from the card.
HEAT: Mapping[str, tuple[str, str]] = {
    "heat-0": ("#e9ecf0", "#262b33"),
    "heat-1": ("#fcefd9", "#3d2f20"),
    "heat-2": ("#fbdcae", "#5a3f22"),
    "heat-3": ("#f6c077", "#7f5526"),
    "heat-4": ("#ee9a3f", "#ad6f28"),
    "heat-5": ("#d96f17", "#db9036"),
    "heat-6": ("#ad4509", "#f5b966"),
    "heat-7": ("#701f04", "#ffe8bd"),
}
THEMES = ("light", "dark")

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"
#: How figures look, in the page and alone.
_FIGURE_RULES = f"""
svg text {{ font-family: {FONT}; font-size: 12px; fill: var(--muted); font-variant-numeric: tabular-nums; }}
svg .strong {{ font-weight: 600; fill: var(--ink); }}
svg .title {{ font-size: 14px; font-weight: 600; fill: var(--ink); }}
svg .label {{ font-weight: 600; fill: currentColor; }}
svg .note {{ font-size: 11px; font-weight: 600; fill: currentColor; }}
svg .grid {{ stroke: var(--rule); stroke-width: 1; }}
svg .axis {{ stroke: var(--muted); stroke-width: 1; }}
svg .line {{ stroke: currentColor; stroke-width: 2; fill: none; stroke-linejoin: round; }}
svg .dashed {{ stroke-dasharray: 5 4; }}
svg .leader {{ stroke: currentColor; stroke-width: 1; opacity: 0.5; }}
svg .dot {{ fill: currentColor; stroke: var(--card); stroke-width: 1.5; }}
svg .area {{ fill: var(--area); }}
"""


def colours(theme: str) -> dict[str, str]:
    """Every colour of a theme by name."""
    index = THEMES.index(theme)
    return {name: pair[index] for group in (_SURFACES, SERIES, HEAT) for name, pair in group.items()}


def variables(theme: str) -> str:
    """The colours as custom properties of a style sheet."""
    return " ".join(f"--{name}: {colour};" for name, colour in colours(theme).items())


def figure_rules() -> str:
    """The rules of figures, colours as custom properties."""
    series = "".join(f".{name} {{ color: var(--{name}); }}\n" for name in SERIES)
    return _FIGURE_RULES + series + "".join(f".{name} {{ fill: var(--{name}); }}\n" for name in HEAT)


def standalone(svg: str, theme: str) -> str:
    """A figure as a file of its own in one theme, with plain colours: not every viewer knows custom properties."""
    chosen = colours(theme)
    rules = re.sub(r"var\(--([\w-]+)\)", lambda match: chosen[match[1]], figure_rules())
    start = svg.index(">") + 1
    backdrop = f'<rect class="backdrop" width="100%" height="100%" rx="6" fill="{chosen["card"]}"></rect>'
    return f"{svg[:start]}<style>{rules}</style>{backdrop}{svg[start:]}\n"
