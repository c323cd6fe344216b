"""Where each key of a serving plan gets its configuration: the plan of every model that a GPU's layer record has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rankmoe import tuned
from rankmoe.kernels import experts_common
from rankmoe.models.presets import PRESETS
from rankmoe.report.blocks import paragraph, section, table
from rankmoe.report.markup import element, text
from rankmoe.report.records import StoredRecord
from rankmoe.tuning import Coverage, batches_of, config_text, coverage, plan_keys
from rankmoe.types import MAX_FRONT_TOKENS, ExpertPlacement

#: The native kernels are tuned for this one; a record names its device and not its architecture.
_ARCHITECTURE = "sm_90"
_TITLE = "Tuning coverage"
_SOURCES = {
    "user cache": "searched for on this machine",
    "shipped": "ships with the package",
    "heuristic": "nothing tuned, the heuristic decides",
}


def coverage_section(records: Sequence[StoredRecord]) -> str:
    """The section; says so where no record names a GPU and a model to plan for."""
    plans = _plans(records)
    if not plans:
        words = "There is no layer record of a GPU in this folder, so there is no serving plan to look up."
        return section("coverage", _TITLE, paragraph(words))
    words = (
        f"What the native expert GEMMs look up to serve 1 to {MAX_FRONT_TOKENS} tokens and the records' larger "
        "batches, as this machine and this version of the kernels answer it. Columns are batch sizes that share a "
        "key; both forms of ids do."
    )
    legend = element("ul", *(element("li", _pill(s), text(f" {meaning}")) for s, meaning in _SOURCES.items()))
    articles = [_one(model, ep_size, device, batches) for (model, ep_size, device), batches in plans.items()]
    return section("coverage", _TITLE, paragraph(words), element("div", legend, class_="sources"), *articles)


def _plans(records: Iterable[StoredRecord]) -> dict[tuple[str, int, str], list[int]]:
    """Batch sizes to serve for each model, group and device."""
    plans: dict[tuple[str, int, str], list[int]] = {}
    for stored in records:
        record = stored.record
        if record.bench == "layer" and not stored.is_cpu and record.model in PRESETS:
            key = (record.model, record.notes["ep_size"], record.device)
            own = plans.get(key, list(range(1, MAX_FRONT_TOKENS + 1)))
            plans[key] = sorted({*own, *(row["tokens"] for row in record.rows)})
    return plans


def _one(model: str, ep_size: int, device: str, batches: list[int]) -> str:
    preset = PRESETS[model]
    title = f"{model}, EP {ep_size}, {device}"
    try:
        placement = ExpertPlacement(preset.num_experts, ep_size, 0)
        keys = plan_keys(preset, placement, batches, _ARCHITECTURE)
        found = coverage(keys, experts_common.fingerprint(), device)
    except ValueError as error:  # a group or a shape that the native kernels do not serve
        return element("article", element("h3", text(title)), paragraph(f"Nothing is looked up: {error}."))
    columns = {item.key.expected_rows: batches_of(item.key, preset, placement, batches) for item in found}
    by_cell = {(item.key.stage, item.key.expected_rows): item for item in found}
    head = element("tr", *(element("th", text(c), scope="col") for c in ("GEMM \\ batch", *columns.values())))
    lines = [
        element("tr", element("th", text(stage), scope="row"), *(_cell(by_cell[stage, rows]) for rows in columns))
        for stage in ("gate_up", "down")
    ]
    grid = element("table", element("thead", head), element("tbody", *lines), class_="coverage")
    box = element("div", grid, class_="scroll", tabindex="0", role="region", aria_label=f"Tuning coverage of {title}")
    details = [["key", "comes from", "configuration"]]
    details += [[str(item.key), item.source, config_text(item.config)] for item in found]
    more = element("details", element("summary", text("Keys and configurations")), table(details, f"Keys of {title}"))
    return element("article", element("h3", text(title)), paragraph(_summary(found)), box, more)


def _summary(found: Sequence[Coverage]) -> str:
    counts = Counter(item.source for item in found)
    parts = [f"{count} from the {_NAMES[source]}" for source, count in counts.items()]
    return f"{len(found)} keys: {', '.join(parts)}."


_NAMES: dict[tuned.Source, str] = {
    "explicit": "caller",
    "user cache": "user's cache",
    "shipped": "shipped file",
    "heuristic": "heuristic",
}


def _cell(item: Coverage) -> str:
    return element("td", _pill(item.source), title=config_text(item.config))


def _pill(source: str) -> str:
    return element("span", text(source), class_=f"pill {source.replace(' ', '-')}")
