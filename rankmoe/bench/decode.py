"""`rankmoe bench decode`: output tokens a second of one rank, with the routed layer run in three ways in turn."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rankmoe import tuned
from rankmoe.bench.decode_model import CACHE_PARTS, DecodeModel, DecodeSizes, layer_nbytes, make_model
from rankmoe.bench.decode_step import RunRouted, arms, step
from rankmoe.bench.record import Record, device_name
from rankmoe.bench.timing import Timing, orders
from rankmoe.kernels import experts_common, experts_cuda
from rankmoe.moe import Workspace
from rankmoe.route import route
from rankmoe.tuned import TuningKey
from rankmoe.tuning import Profiler, default_of, plan_keys, tune
from rankmoe.types import MAX_FRONT_TOKENS, ExpertPlacement

#: Part of a GPU's free memory that layers may take.
_MEMORY_SHARE = 0.8
#: Steps between two looks at the clock.
_STEPS = 4


@dataclass(frozen=True)
class DecodeOptions:
    """What to measure: one rank of ``ep_size`` at each batch size.

    input_length, output_length: of each sequence; attention reads a cache as long as it is on average, split over the
        ranks.
    num_distinct_layers: that have memory of their own; None for as many as fit.
    rounds: of each arm.
    is_fresh: also search for configurations anew in each arm, and time these.
    """

    sizes: DecodeSizes
    ep_size: int
    batch_sizes: Sequence[int]
    input_length: int = 8192
    output_length: int = 512
    num_distinct_layers: int | None = None
    rounds: int = 15
    is_fresh: bool = True
    device: str = "cuda"
    seed: int = 0

    @property
    def cache_length(self) -> int:
        """Positions of a sequence that one rank keeps, on average; up to a multiple that attention can split."""
        return -(-(self.input_length + self.output_length // 2) // (self.ep_size * CACHE_PARTS)) * CACHE_PARTS


class DecodeError(RuntimeError):
    """Why nothing was timed, or that arms disagree."""


def run(options: DecodeOptions, progress: Callable[[str], None] | None = None) -> Record:
    """Compare the arms' outputs bit for bit, and measure. Returns the record, rows as docs/benchmarks.md has them.

    Raises DecodeError where arms give different hidden states or tokens, ValueError for a batch beyond a decode step.
    """
    report = progress or (lambda text: None)
    for batch_size in options.batch_sizes:
        if not 1 <= batch_size <= MAX_FRONT_TOKENS:
            raise ValueError(f"batch: expected 1 to {MAX_FRONT_TOKENS} sequences, got {batch_size}")
    device = torch.device(options.device)
    placement = ExpertPlacement(options.sizes.preset.num_experts, options.ep_size, 0)
    num_layers = options.sizes.preset.num_moe_layers
    num_distinct = options.num_distinct_layers or _layers_that_fit(options, placement)
    num_distinct = min(num_distinct, num_layers)
    report(f"making {num_distinct} layers")
    model = make_model(
        options.sizes,
        placement,
        num_layers,
        num_distinct,
        max(options.batch_sizes),
        options.cache_length,
        device,
        options.seed,
    )
    profiler = _profiler(options, placement) if options.is_fresh and device.type == "cuda" else None
    rows: list[dict[str, Any]] = []
    details: dict[str, Any] = {}
    for batch_size in options.batch_sizes:
        report(f"batch {batch_size}")
        measured, details[str(batch_size)] = _measure(options, model, batch_size, profiler)
        rows += measured
    notes = {
        "ep_size": options.ep_size,
        "num_layers": num_layers,
        "distinct_layers": num_distinct,
        "input": options.input_length,
        "output": options.output_length,
        "bitwise_equal": True,
        "batches": details,
    }
    return Record("decode", options.sizes.preset.name, device_name(device.type), rows, notes=notes)


def _layers_that_fit(options: DecodeOptions, placement: ExpertPlacement) -> int:
    if options.device != "cuda":
        return options.sizes.preset.num_moe_layers
    free, _ = torch.cuda.mem_get_info()
    nbytes = layer_nbytes(options.sizes, placement, max(options.batch_sizes), options.cache_length)
    # While the first layer's experts are packed they are there twice, and once more for the profiler.
    return max(1, int(_MEMORY_SHARE * free / nbytes) - 3)


# --- one batch size --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Arm:
    """One way to decode: its own tokens and last hidden states, and what runs a step."""

    tokens: torch.Tensor
    hidden: torch.Tensor
    run: Callable[[], None]


def _measure(
    options: DecodeOptions, model: DecodeModel, batch_size: int, profiler: Profiler | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    workspace = Workspace.allocate(batch_size, options.sizes.preset.router.top_k, model.layers[0].experts)
    keys = _keys(options, model, batch_size)
    held = {key: experts_cuda.config_values(default_of(key)) for key in keys}
    variants: dict[tuple[str, str], _Arm] = {}
    picks: dict[str, dict[str, Any]] = {"held": {}, "fresh": {}}
    num_runs: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, run_routed in arms(workspace).items():
            with tuned.use(held), tuned.recording() as answers:
                variants[name, "held"] = _prepare(model, batch_size, run_routed)
            picks["held"][name] = _picks(answers)
            if profiler is None:
                continue
            # Every arm asks for a search; what the first one found are the others' keys too.
            found, num_runs[name] = _tune(keys, profiler, Path(directory) / "tuned.json")
            with tuned.use(found), tuned.recording() as answers:
                variants[name, "fresh"] = _prepare(model, batch_size, run_routed)
            picks["fresh"][name] = _picks(answers)
    timings = _time(variants, options)
    details = {
        "active_experts": round(_mean_active(model, batch_size, workspace, options.seed), 1),
        "identical_picks": all(len({str(p) for p in of_arms.values()}) <= 1 for of_arms in picks.values()),
        "picks": {tuning: of_arms["a"] for tuning, of_arms in picks.items() if of_arms},
        "profile_runs": num_runs,
    }
    rows = [
        {
            "batch": batch_size,
            "arm": arm,
            "tuning": tuning,
            "tokens_per_s": round(batch_size / timing.us * 1e6, 2),
            "step_us": round(timing.us, 1),
            "spread": round(timing.spread, 1),
        }
        for (arm, tuning), timing in timings.items()
    ]
    return rows, details


def _prepare(model: DecodeModel, batch_size: int, run_routed: RunRouted) -> _Arm:
    """A captured graph of one step on a GPU; the step itself elsewhere."""
    device = model.embedding.device
    tokens = torch.zeros(batch_size, dtype=torch.int64, device=device)
    hidden = torch.empty(batch_size, model.sizes.hidden_size, dtype=torch.bfloat16, device=device)

    @torch.no_grad()
    def one_step() -> None:
        hidden.copy_(step(model, tokens, run_routed))

    if device.type != "cuda":
        return _Arm(tokens, hidden, one_step)
    one_step()  # compiles what is not compiled yet, and looks configurations up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_step()
    return _Arm(tokens, hidden, graph.replay)


def _time(variants: Mapping[tuple[str, str], _Arm], options: DecodeOptions) -> dict[tuple[str, str], Timing]:
    """Microseconds of a step. In a round every arm decodes the same sequences, so that all get the same routing."""
    measured: dict[tuple[str, str], list[float]] = {name: [] for name in variants}
    vocabulary = options.sizes.vocab_size // options.ep_size
    names = [f"{arm}/{tuning}" for arm, tuning in variants]
    by_name = dict(zip(names, variants, strict=True))
    for number, order in enumerate(orders(names, options.rounds)):
        outputs: dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]] = {}
        for name in order:
            key = by_name[name]
            arm = variants[key]
            _restart(arm, vocabulary, options.seed + number)
            arm.run()
            measured[key].append(_timed(arm) / _STEPS)
            outputs[key] = arm.hidden.clone(), arm.tokens.clone()
        _check_equal(outputs)
    return {name: Timing.of(values) for name, values in measured.items()}


def _check_equal(outputs: Mapping[tuple[str, str], tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Raise DecodeError unless all arms with the same configurations have the same hidden states and tokens."""
    for (arm, tuning), own in outputs.items():
        if not all(map(torch.equal, own, outputs["a", tuning])):
            raise DecodeError(f"arms a and {arm} ({tuning} configurations) gave different hidden states or tokens")


def _restart(arm: _Arm, vocabulary: int, seed: int) -> None:
    torch.manual_seed(seed)  # of every device: samples come from torch's own generator
    generator = torch.Generator().manual_seed(seed)
    arm.tokens.copy_(torch.randint(0, vocabulary, arm.tokens.shape, generator=generator))


def _timed(arm: _Arm) -> float:
    """Microseconds of some steps in a row."""
    if arm.tokens.device.type != "cuda":
        started = time.perf_counter()
        for _ in range(_STEPS):
            arm.run()
        return (time.perf_counter() - started) * 1e6
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(_STEPS):
        arm.run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


@torch.no_grad()
def _mean_active(model: DecodeModel, batch_size: int, workspace: Workspace, seed: int) -> float:
    """Experts of this rank that a layer runs, counted over one step."""
    counts: list[int] = []
    own, config = model.placement, model.sizes.preset.router
    run_routed = arms(workspace)["c"]

    def counting(model: DecodeModel, layer: Any, logits: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        ids = route(logits, config, layer.correction_bias).topk_ids.unique()
        first = own.local_expert_offset
        counts.append(int(((ids >= first) & (ids < first + own.num_local_experts)).sum()))
        return run_routed(model, layer, logits, latent)

    tokens = torch.arange(batch_size, device=model.embedding.device)
    torch.manual_seed(seed)
    step(model, tokens, counting)
    return statistics.mean(counts)


# --- configurations --------------------------------------------------------------------------------------------------
def _keys(options: DecodeOptions, model: DecodeModel, batch_size: int) -> list[TuningKey]:
    device = model.embedding.device
    if device.type != "cuda" or model.layers[0].experts.backend != "cuda":
        return []
    architecture = experts_common.architecture(device)
    return plan_keys(options.sizes.preset, model.placement, [batch_size], architecture)


def _profiler(options: DecodeOptions, placement: ExpertPlacement) -> Profiler:
    from rankmoe.bench.profile import GpuProfiler

    return GpuProfiler(options.sizes.preset, placement, seed=options.seed)


def _tune(keys: Sequence[TuningKey], profiler: Profiler, path: Path) -> tuple[dict[TuningKey, Mapping[str, Any]], int]:
    """The configurations of a search, and how many candidates it timed."""
    counted, fingerprint = _Counted(profiler), experts_common.fingerprint()
    tune(keys, counted, path, fingerprint)
    entries = tuned.read_file(path, fingerprint)
    return {key: entries[str(key)]["config"] for key in keys}, counted.num_runs


def _picks(answers: Mapping[TuningKey, tuned.Answer]) -> dict[str, Any]:
    return {str(key): answer.values for key, answer in sorted(answers.items())}


class _Counted:
    """A profiler that counts what it is asked to run."""

    def __init__(self, profiler: Profiler) -> None:
        self._profiler = profiler
        self.num_runs = 0
        self.prepare, self.check = profiler.prepare, profiler.check

    def time(self, key: TuningKey, config: experts_cuda.GemmConfig) -> float:
        """As the profiler."""
        self.num_runs += 1
        return self._profiler.time(key, config)


def table_rows(record: Record) -> list[list[str]]:
    """The record as a table: a line a batch size and tuning; tokens a second by arm, then what b and c gain on a."""
    lines = [["batch", "tuning", "active", "a, tokens/s", "b", "c", "c, us a step", "b over a", "c over a"]]
    by_line: dict[tuple[int, str], dict[str, dict[str, Any]]] = {}
    for row in record.rows:
        by_line.setdefault((row["batch"], row["tuning"]), {})[row["arm"]] = row
    for (batch, tuning), of_arm in sorted(by_line.items(), key=lambda line: (line[0][1] != "held", line[0][0])):
        rates = {arm: row["tokens_per_s"] for arm, row in of_arm.items()}
        lines.append(
            [
                str(batch),
                tuning,
                f"{record.notes['batches'][str(batch)]['active_experts']}",
                *(f"{rates[arm]:.1f}" for arm in "abc"),
                f"{of_arm['c']['step_us']:.0f}",
                *(f"{100 * (rates[arm] / rates['a'] - 1):+.1f} %" for arm in "bc"),
            ]
        )
    return lines
