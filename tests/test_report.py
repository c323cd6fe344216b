"""`rankmoe report`: what the page says is what the records say, what is no record is refused, and it renders."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, look

from rankmoe import tuned
from rankmoe.bench.record import Record
from rankmoe.bench.tables import table_rows
from rankmoe.kernels import experts_common
from rankmoe.report.axis import Axis, linear_ticks, log_ticks, spread
from rankmoe.report.heat_map import STEPS, HeatRow, rank_shares, step_of
from rankmoe.report.layer_section import STAGES
from rankmoe.report.page import render, write_report
from rankmoe.report.records import RecordError, StoredRecord, read_records
from rankmoe.report.theme import HEAT, SERIES, THEMES, colours

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DECODE_ROWS = [
    {"batch": batch, "arm": arm, "tuning": tuning, "tokens_per_s": rate, "step_us": batch / rate * 1e6, "spread": 1.5}
    for tuning, factor in (("held", 1.0), ("fresh", 1.02))
    for batch in (1, 8, 64)
    for arm, rate in (("a", 110.0 * batch**0.6), ("b", 113.0 * batch**0.6), ("c", factor * 118.0 * batch**0.6))
]


class Page(HTMLParser):
    """Cells of every table, hints of every figure's points, tags and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.hints: list[str] = []
        self.texts: dict[str, str] = {}
        self._open: list[str] = []
        self._section = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "meta":
            return
        self._open.append(tag)
        if tag == "section":
            self._section = dict(attrs)["id"] or ""
        elif tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, "every element that is opened is closed"

    def handle_data(self, data: str) -> None:
        self.texts[self._section] = self.texts.get(self._section, "") + data
        if {"td", "th"} & set(self._open):
            self.tables[-1][-1][-1] += data
        elif self._open[-2:] == ["circle", "title"]:
            self.hints.append(data)


@pytest.fixture(scope="module")
def records() -> list[StoredRecord]:
    return read_records(RESULTS)


@pytest.fixture(scope="module")
def decode(records: list[StoredRecord]) -> StoredRecord:
    base = next(stored.record for stored in records if stored.record.bench == "front")
    return StoredRecord("decode-kimi-k3-nvidia-h200", dataclasses.replace(base, bench="decode", rows=DECODE_ROWS))


@pytest.fixture(autouse=True)
def no_tuning_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANKMOE_CACHE_DIR", str(tmp_path / "cache"))
    tuned.forget()


def test_every_record_has_its_table_and_its_measured_place(records: list[StoredRecord]) -> None:
    page = Page(render(records))
    assert {"layer", "front", "routing"} <= {stored.record.bench for stored in records}
    for stored in records:
        record = stored.record
        if record.bench in ("layer", "front"):
            rows = table_rows(record)
            rows[0][0] = rows[0][0].replace("us at", "µs at")
            assert rows in page.tables
        assert any(row[0] == stored.name and record.commit in row for row in page.tables[-1])
    for stored in records:
        if stored.record.bench in ("layer", "front", "routing"):
            section = "load" if stored.record.bench == "routing" else stored.record.bench
            assert f"{stored.record.device}, {stored.record.date}, commit {stored.record.commit}" in page.texts[section]


def test_every_point_of_a_figure_says_its_value(records: list[StoredRecord]) -> None:
    hints = Page(render(records)).hints
    record = next(s.record for s in records if s.name == "layer-kimi-k3-nvidia-h200")
    for row in record.rows:
        if row["variant"] == "floor" or row["stage"] not in STAGES:
            continue
        digits = 2 if row["us"] < 10 else 1
        assert f"{row['variant']}, {row['tokens']} tokens: {row['us']:,.{digits}f}" in hints


def test_the_numbers_at_a_floor_are_ratios_of_the_record(records: list[StoredRecord]) -> None:
    record = next(s for s in records if s.name == "layer-kimi-k3-nvidia-h200")
    us = {(row["variant"], row["stage"], row["tokens"]): row["us"] for row in record.record.rows}
    notes = re.findall(r'class="note"[^>]*>([^<]*)<', render([record]))
    expected = [
        f"{us['native', stage, tokens] / us['floor', floor, tokens]:.2f}"
        for stage, floor in STAGES.items()
        for tokens in (1, 2, 4, 8, 16, 32, 64)
    ]
    assert [note for note in notes if note != "× floor"] == expected


def test_the_decode_section_says_that_there_is_no_record(records: list[StoredRecord]) -> None:
    page = Page(render([stored for stored in records if stored.record.bench != "decode"]))
    assert "There is no record of decode throughput in this folder" in page.texts["decode"]


def test_the_decode_section_shows_arms_and_what_they_gain(records: list[StoredRecord], decode: StoredRecord) -> None:
    page = Page(render([*(stored for stored in records if stored.record.bench != "decode"), decode]))
    (table,) = [table for table in page.tables if table[0][:3] == ["tuning", "batch", "arm"]]
    assert len(table) == 1 + len(DECODE_ROWS)
    for row in DECODE_ROWS:
        base = next(
            other
            for other in DECODE_ROWS
            if (other["batch"], other["tuning"], other["arm"]) == (row["batch"], row["tuning"], "a")
        )
        cells = [row["tuning"], str(row["batch"]), f"{row['tokens_per_s']:,.1f}", f"{row['step_us']:,.1f}"]
        (shown,) = [s for s in table if s[:2] == cells[:2] and s[2].startswith(f"({row['arm']})")]
        assert shown[3:5] == cells[2:]
        assert shown[-1] == f"{row['tokens_per_s'] / base['tokens_per_s']:.3f}"
    assert "no record" not in page.texts["decode"]


def test_the_loads_of_ranks_are_those_of_the_record(records: list[StoredRecord]) -> None:
    nano = next(s.record for s in records if s.name == "routing-nano")
    text = Page(render(records)).texts["load"]
    for row in nano.rows:
        totals = [sum(row["counts"][first : first + 16]) for first in range(0, 64, 16)]
        for total in totals:
            assert f"{total / sum(totals) * 4:.2f}×" in text
    assert nano.rows[0]["counts"] != nano.rows[1]["counts"]


def test_a_cell_has_the_step_of_its_load() -> None:
    assert [step_of(slots, 100.0) for slots in (0, 1, 50, 51, 81, 125, 126, 401, 800, 801)] == [
        0,
        1,
        1,
        2,
        3,
        3,
        4,
        6,
        6,
        7,
    ]
    assert len(STEPS) == len(HEAT) == 8
    assert rank_shares(HeatRow("", ((1, 1), (3, 3)))) == [0.5, 1.5]


def test_coverage_tells_a_tuned_key_from_the_others(records: list[StoredRecord]) -> None:
    record = next(s for s in records if s.name == "layer-kimi-k3-nvidia-h200")
    before = Page(render([record]))
    grid, keys = (table for table in before.tables if table[0][0] in ("GEMM \\ batch", "key"))
    assert grid[0][1:] == ["1", "2", "3-4", "5-8", "9-16", "17-32", "33-64"]
    assert {row[1] for row in keys[1:]} <= {"heuristic", "shipped"}
    path = tuned.user_file(experts_common.fingerprint(), record.record.device)
    path.parent.mkdir(parents=True)
    config = {"kernel": "decode", "warps": 8, "depth": 1, "finishers": 1, "blocks": 2}
    entries = {keys[1][0]: {"config": config}}
    content = {"format": tuned.FILE_FORMAT, "fingerprint": experts_common.fingerprint(), "entries": entries}
    path.write_text(json.dumps(content))
    tuned.forget()
    after = Page(render([record]))
    _, keys_after = (table for table in after.tables if table[0][0] in ("GEMM \\ batch", "key"))
    assert keys_after[1][1:] == ["user cache", "decode: warps 8, depth 1, finishers 1, blocks 2"]
    assert keys_after[2:] == keys[2:]
    assert "1 from the user's cache" in after.texts["coverage"]


def test_the_page_needs_nothing_from_outside_and_runs_nothing(records: list[StoredRecord]) -> None:
    markup = render(records)
    page = Page(markup)
    assert not {"script", "link", "img", "iframe", "object", "image", "use"} & set(page.tags)
    for name, value in page.attributes:
        assert name not in ("src", "srcset", "style")
        assert not name.startswith("on")
        assert name != "href" or (value or "").startswith("#")
    assert "url(" not in markup
    assert "@import" not in markup
    assert "@font-face" not in markup
    addresses = set(re.findall(r"\w+://[^\s\"<]+", markup))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, which nothing opens


def test_what_a_record_says_is_text_and_never_markup(records: list[StoredRecord], decode: StoredRecord) -> None:
    bad = "<script>alert('x')</script>&\""
    loads = next(s.record for s in records if s.record.bench == "routing")
    hostile = [
        StoredRecord(bad, dataclasses.replace(decode.record, model=bad, device=bad, commit=bad)),
        StoredRecord("b", dataclasses.replace(loads, device=bad, notes={**loads.notes, "source": bad})),
    ]
    page = Page(render(hostile))
    assert "script" not in page.tags
    assert bad in page.texts["decode"]
    assert bad in page.texts["load"]


def _changed(change: Callable[[dict[str, Any]], object]) -> str:
    values = json.loads((RESULTS / "layer-kimi-k3-nvidia-h200.json").read_text())
    change(values)
    return json.dumps(values)


def _rows(change: Callable[[list[dict[str, Any]]], object]) -> str:
    return _changed(lambda values: change(values["rows"]))


BAD = {
    "empty": ("", "expected JSON"),
    "cut off": ((RESULTS / "front-nvidia-h200.json").read_text()[:500], "expected JSON"),
    "not text": (b"\xff\xfe\x00", "expected JSON"),
    "a list": ("[]", "expected a record with exactly bench, commit"),
    "foreign": ('{"results": [1, 2]}', "expected a record with exactly bench, commit"),
    "one field more": (_changed(lambda v: v.update(extra=1)), "expected a record with exactly"),
    "no rows": (_changed(lambda v: v.update(rows=[])), "rows: expected at least one, got []"),
    "rows of text": (_changed(lambda v: v.update(rows=["x"])), "rows[0]: expected an object, got 'x'"),
    "device a number": (_changed(lambda v: v.update(device=3)), "device: expected text, got 3"),
    "no group": (
        _changed(lambda v: v["notes"].pop("ep_size")),
        "notes.ep_size: expected a whole number above 0, got None",
    ),
    "not a number": (_rows(lambda r: r[3].update(us=float("nan"))), "rows[3].us: expected a number above 0, got nan"),
    "no time": (_rows(lambda r: r[2].pop("us")), "rows[2].us: expected a number above 0, got None"),
    "negative": (_rows(lambda r: r[2].update(us=-1)), "rows[2].us: expected a number above 0, got -1"),
    "tokens true": (
        _rows(lambda r: r[0].update(tokens=True)),
        "rows[0].tokens: expected a whole number above 0, got True",
    ),
    "a row twice": (
        _rows(lambda r: r.append(copy.copy(r[0]))),
        "rows[112]: expected one row for each tokens, variant, stage",
    ),
    "arm d": (
        _changed(lambda v: v.update(bench="decode", rows=[{**DECODE_ROWS[0], "arm": "d"}])),
        "rows[0].arm: expected one of a, b, c, got 'd'",
    ),
    "no slots": (
        _changed(lambda v: v.update(bench="routing", rows=[{"layer": 0, "counts": [0, 0]}])),
        "rows[0].counts: expected slots of each expert, not all 0, got [0, 0]",
    ),
    "fewer experts than ranks": (
        _changed(lambda v: v.update(bench="routing", rows=[{"layer": 0, "counts": [1, 0]}])),
        "rows[0].counts: expected an expert a rank",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_record_is_named_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    content, message = BAD[name]
    folder, out = tmp_path / "records", tmp_path / "out" / "report.html"
    folder.mkdir()
    out.parent.mkdir()
    out.write_text("the page of before")
    (folder / "front-nvidia-h200.json").write_bytes((RESULTS / "front-nvidia-h200.json").read_bytes())
    bad = folder / "some-record.json"
    bad.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RecordError) as caught:
        write_report(folder, out)
    assert str(caught.value).startswith(f"{bad}: ")
    assert message in str(caught.value)
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]
    assert out.read_text() == "the page of before"


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"expected records \(\*\.json\), found none"):
        write_report(tmp_path, tmp_path / "out.html")
    with pytest.raises(RecordError, match="expected a folder of records, found none"):
        write_report(tmp_path / "none", tmp_path / "out.html")
    assert list(tmp_path.iterdir()) == []


def test_a_fault_while_writing_leaves_the_page_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "report.html"
    out.write_text("the page of before")

    def full(*arguments: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no space left"):
        write_report(RESULTS, out)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert out.read_text() == "the page of before"


def test_the_command_writes_the_page_and_says_a_fault_in_one_line(tmp_path: Path) -> None:
    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "rankmoe", "report", *arguments]
        return subprocess.run(line, capture_output=True, text=True, check=False)

    out = tmp_path / "deep" / "report.html"
    done = command("--records", str(RESULTS), "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{out}: {len(list(RESULTS.glob('*.json')))} records\n"
    assert out.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    for arguments, message in (
        (["--records", str(tmp_path)], f"rankmoe: {tmp_path}: expected records"),
        (["--records", str(RESULTS), "--out", str(tmp_path)], "rankmoe: [Errno"),
    ):
        refused = command(*arguments)
        assert refused.returncode == 2
        assert refused.stderr.startswith(message)
        assert len(refused.stderr.splitlines()) == 1


def test_the_same_records_give_the_same_page(records: list[StoredRecord]) -> None:
    assert render(records) == render(read_records(RESULTS))


@pytest.mark.parametrize("bench", ["layer", "front", "decode", "routing"])
def test_a_page_of_one_kind_of_record_says_what_is_missing(
    records: list[StoredRecord], decode: StoredRecord, bench: str
) -> None:
    page = Page(render([stored for stored in [*records, decode] if stored.record.bench == bench]))
    sections = {"layer": "layer", "front": "front", "decode": "decode", "routing": "load"}
    for other, section in sections.items():
        assert ("There is no record" in page.texts[section]) == (other != bench)
    assert ("no serving plan" in page.texts["coverage"]) == (bench != "layer")


def test_a_record_of_one_token_count_and_one_engine_is_drawn() -> None:
    row = {"tokens": 8, "routing": "uniform", "variant": "native", "stage": "layer", "us": 75.0}
    row |= {"spread": 0.0, "bytes": 1, "active_experts": 1.0}
    record = Record("layer", "of another model", "NVIDIA H200", [row], {}, "c", "2026-12-01", {"ep_size": 8})
    page = Page(render([StoredRecord("x", record)]))
    assert "native, 8 tokens: 75.0" in page.hints
    assert "no serving plan" in page.texts["coverage"]


# --- axes ------------------------------------------------------------------------------------------------------------
def test_axes_and_ticks() -> None:
    axis = Axis(1, 100, 0, 200)
    assert [axis(value) for value in (1, 10, 100)] == [0, 100, 200]
    assert Axis(8, 8, 0, 200)(8) == 100
    assert log_ticks(4, 130) == [5, 10, 20, 50, 100]
    assert log_ticks(1, 1e6) == [10.0**power for power in range(7)]
    assert linear_ticks(0.98, 1.09) == [0.98, 1.0, 1.02, 1.04, 1.06, 1.08]
    assert linear_ticks(0, 2.6) == [0, 0.5, 1, 1.5, 2, 2.5]


def test_labels_stay_in_order_apart_and_within() -> None:
    placed = spread([100, 101, 102, 30, 199], gap=15, low=0, high=190)
    assert placed[3] == 30
    assert placed[4] == 190
    assert placed[0] < placed[1] < placed[2]
    ordered = sorted(placed)
    assert all(b - a >= 15 - 1e-9 for a, b in itertools.pairwise(ordered))


# --- colours ---------------------------------------------------------------------------------------------------------
def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 has it."""
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", THEMES)
def test_text_and_lines_stand_out_in_both_themes(theme: str) -> None:
    colour = colours(theme)
    for name in ("ink", "muted", "good", *SERIES):
        for behind in ("page", "card", "area"):
            assert contrast(colour[name], colour[behind]) >= 4.5, f"{name} on {behind}"


@pytest.mark.parametrize("theme", THEMES)
def test_a_fuller_expert_stands_out_more(theme: str) -> None:
    against_card = [contrast(colours(theme)[name], colours(theme)["card"]) for name in HEAT]
    assert against_card[1:] == sorted(against_card[1:])
    assert against_card[0] < 1.3
    assert against_card[-1] > 7


# --- the committed figures -------------------------------------------------------------------------------------------
def test_the_figures_of_the_documents_are_those_of_the_records() -> None:
    check = [sys.executable, str(ROOT / "benchmarks" / "figures.py"), "--check"]
    result = subprocess.run(check, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    shown = re.findall(r'(?:src|srcset)="(docs/images/[^"]+)"', (ROOT / "README.md").read_text())
    assert len(shown) == 4
    for path in shown:
        svg = (ROOT / path).read_text(encoding="utf-8")
        assert "var(" not in svg
        assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")


# --- in a browser ----------------------------------------------------------------------------------------------------
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, which .ci/run installs where it can")
@pytest.mark.parametrize("scheme", THEMES)
def test_the_page_renders_wide_and_narrow(
    records: list[StoredRecord], decode: StoredRecord, tmp_path: Path, scheme: str
) -> None:
    shown = [*records, decode]
    # Decode: throughput, and what is gained over (a) for each way of tuning.
    panels = {"layer": lambda rows: 3, "front": lambda rows: 2, "routing": lambda rows: 1}
    panels["decode"] = lambda rows: 1 + len({row["tuning"] for row in rows})
    num_figures = sum(panels[s.record.bench](s.record.rows) for s in shown if s.record.bench in panels)
    for found in look(render(shown), scheme, (1280, 390), tmp_path):
        assert found["isDark"] == (scheme == "dark")
        page_colour = colours(scheme)["page"]
        assert found["background"] == "rgb({}, {}, {})".format(*(int(page_colour[i : i + 2], 16) for i in (1, 3, 5)))
        assert len(found["figures"]) == num_figures
        assert all(width > 250 and height > 100 for width, height in found["figures"])
        assert found["empty"] == 0
        assert found["scrollWidth"] <= found["width"]
        assert found["wide"] == []
        assert found["outside"] == []
        assert found["overlapping"] == []
        if found["width"] == 390:
            assert found["scrolling"] > 0  # tables are wider than the screen, each in its own box
