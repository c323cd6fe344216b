"""Elements of HTML and SVG as text. Whatever comes from a record passes through ``text``, and is then only text."""

from __future__ import annotations

import html

#: Elements of HTML that have no end.
_VOID = frozenset({"meta", "link", "br"})


def text(value: object) -> str:
    """A value as markup that shows it."""
    return html.escape(str(value))


def element(tag: str, *children: str, **attributes: str | float | None) -> str:
    """An element around markup. ``class_`` stands for class, underscores for hyphens; None leaves an attribute out."""
    parts = [tag]
    for name, value in attributes.items():
        if value is not None:
            shown = value if isinstance(value, str) else number(value)
            parts.append(f'{name.rstrip("_").replace("_", "-")}="{html.escape(shown)}"')
    head = " ".join(parts)
    return f"<{head}>" if tag in _VOID else f"<{head}>{''.join(children)}</{tag}>"


def number(value: float) -> str:
    """A coordinate: to a tenth, which no eye tells from more, and the same text on every machine."""
    return f"{round(value, 1) + 0.0:.1f}".removesuffix(".0")
