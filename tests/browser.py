"""A page as a headless Chromium lays it out, told by a script in a wrapper that holds the page at several widths."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
#: Chromium's own names of the two answers to prefers-color-scheme.
_SCHEMES = {"dark": 0, "light": 1}
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --virtual-time-budget=10000 --window-size=1600,1200 --dump-dom"
)

# A window has a least width in some versions of Chromium; a frame has none.
_SCRIPT = """
function look(frame) {
  const page = frame.contentDocument, view = frame.contentWindow;
  page.querySelectorAll("details").forEach(item => { item.open = true; });
  const name = item => item.tagName + (item.id ? "#" + item.id : "") + " " + item.textContent.trim().slice(0, 40);
  const box = item => item.getBoundingClientRect();
  const figures = [...page.querySelectorAll("svg")];
  const texts = figures.map(figure => [...figure.querySelectorAll("text")]);
  const meets = (a, b) =>
    a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3;
  const outside = figures.flatMap((figure, index) => texts[index].filter(item => {
    const own = box(item), whole = box(figure);
    return own.left < whole.left - 0.5 || own.right > whole.right + 0.5 || own.bottom > whole.bottom + 0.5;
  }));
  const overlapping = texts.flatMap(items => items.flatMap((one, index) =>
    items.slice(index + 1).filter(other => meets(box(one), box(other))).map(other => name(one) + " / " + name(other))));
  return {
    width: view.innerWidth,
    scrollWidth: page.documentElement.scrollWidth,
    isDark: view.matchMedia("(prefers-color-scheme: dark)").matches,
    background: view.getComputedStyle(page.body).backgroundColor,
    figures: figures.map(figure => [box(figure).width, box(figure).height]),
    empty: [...page.querySelectorAll("svg .dot, svg path")].filter(item => !box(item).width).length,
    wide: [...page.body.querySelectorAll("*")].filter(item =>
      !item.parentElement.closest(".scroll") && (box(item).right > view.innerWidth + 0.5 || box(item).left < -0.5)
    ).map(name),
    outside: outside.map(name),
    overlapping: overlapping,
    scrolling: [...page.querySelectorAll(".scroll")].filter(item => item.scrollWidth > item.clientWidth).length,
  };
}
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(look);
  document.body.innerHTML = "<pre id=findings></pre>";
  document.getElementById("findings").textContent = JSON.stringify(found);
});
"""


def look(page: str, scheme: str, widths: tuple[int, ...], folder: Path) -> list[dict[str, Any]]:
    """What the script found, for each width. ``scheme`` is light or dark; ``folder`` is empty and this call's own."""
    assert CHROMIUM is not None
    frames = "".join(
        f'<iframe style="border: 0; width: {width}px; height: 1000px" srcdoc="{html.escape(page)}"></iframe>'
        for width in widths
    )
    wrapper = folder / "wrapper.html"
    wrapper.write_text(f"<!DOCTYPE html><meta charset=utf-8><script>{_SCRIPT}</script><body>{frames}", encoding="utf-8")
    flags = [*_FLAGS.split(), f"--blink-settings=preferredColorScheme={_SCHEMES[scheme]}"]
    command = [CHROMIUM, *flags, f"--user-data-dir={folder / 'profile'}", wrapper.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    match = re.search(r'<pre id="findings">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match is not None, f"no findings: exit code {done.returncode}, {done.stderr[-2000:]}"
    found: list[dict[str, Any]] = json.loads(html.unescape(match[1]))
    return found
