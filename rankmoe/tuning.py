"""Search for the fastest configuration of each GEMM, only when asked to, and keep what was found.

How a candidate is run and timed is the caller's (``Profiler``); a GPU's is ``rankmoe.bench.profile``. The rest is here:
candidates, the choice, files that processes share, and the agreement of an expert-parallel group.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rankmoe import tuned
from rankmoe.distributed import ExpertParallelGroup
from rankmoe.files import replacing
from rankmoe.kernels.experts_cuda import (
    FEW_ROWS,
    ExpertsConfig,
    GemmConfig,
    activation_name,
    config_values,
    default_config,
    is_valid,
)
from rankmoe.kernels.experts_grouped_cuda import DEFAULT_CONFIG, FROM_ROWS, GroupedConfig, is_chosen
from rankmoe.models.presets import ModelPreset
from rankmoe.tuned import TuningKey, expected_rows
from rankmoe.types import MAX_FRONT_TOKENS, ExpertPlacement

#: What a candidate must be faster by than the default; less is noise, and noise goes to the default.
MARGIN = 0.02


class CandidateError(RuntimeError):
    """A candidate that could not be launched, or not with the resources there are. Counted, and the search goes on."""


class Profiler(Protocol):
    """Runs candidates. Whatever else than ``CandidateError`` is raised ends the search."""

    def prepare(self, key: TuningKey, configs: Sequence[GemmConfig]) -> None:
        """Do together what can be done before any candidate runs, such as compiling; failures are for ``check``."""

    def check(self, key: TuningKey, config: GemmConfig) -> None:
        """Raise AssertionError unless the candidate's output is right."""

    def time(self, key: TuningKey, config: GemmConfig) -> float:
        """Microseconds of one launch, nothing of the weights in the L2 cache."""


class Candidate(NamedTuple):
    """One configuration that was tried: its time in microseconds, or why there is none."""

    config: GemmConfig
    us: float | None
    failure: str | None = None


@dataclass(frozen=True)
class Tuned:
    """What came of one key: the default first among the candidates."""

    key: TuningKey
    chosen: GemmConfig
    candidates: tuple[Candidate, ...]

    @property
    def num_failures(self) -> int:
        """Candidates that could not be launched."""
        return sum(candidate.us is None for candidate in self.candidates)

    def entry(self) -> dict[str, Any]:
        """What a file keeps: the choice, and every time."""
        tried = [
            {"config": config_values(c.config), "us": c.us, **({"failure": c.failure} if c.failure else {})}
            for c in self.candidates
        ]
        return {"config": config_values(self.chosen), "candidates": tried}


@dataclass
class Report:
    """What a call of ``tune`` did.

    tuned: the keys that were searched, sorted. num_known: keys that a file had already.
    """

    tuned: list[Tuned] = field(default_factory=list)
    num_known: int = 0


# --- keys and candidates ---------------------------------------------------------------------------------------------
def plan_batches(batches: Iterable[int]) -> list[int]:
    """The numbers of tokens to tune for, ascending: those given and, where one is beyond a decode step, every decode
    step's, since who serves large batches serves the small ones, too."""
    found = {num_tokens for num_tokens in batches if num_tokens > 0}
    if any(num_tokens > MAX_FRONT_TOKENS for num_tokens in found):
        found |= set(range(1, MAX_FRONT_TOKENS + 1))
    return sorted(found)


def plan_keys(
    preset: ModelPreset, placement: ExpertPlacement, batches: Iterable[int], architecture: str
) -> list[TuningKey]:
    """The keys that a model's layers look up for these numbers of tokens (see ``plan_batches``), each once, in order.

    Neither the form of ids nor padding to a graph's size changes a key, but for the rows expected.
    """
    num_local_experts = placement.num_local_experts
    rows = sorted(
        {
            expected_rows(num_tokens * preset.router.top_k, num_local_experts, placement.num_experts)
            for num_tokens in plan_batches(batches)
        }
    )
    hidden, intermediate, bias = preset.hidden_size, preset.intermediate_size, preset.has_bias
    activation = activation_name(preset.activation)
    keys = []
    for count in rows:
        rest = (bias, count, architecture)
        keys.append(TuningKey("gate_up", num_local_experts, 2 * intermediate, hidden, activation, *rest))
        keys.append(TuningKey("down", num_local_experts, hidden, intermediate, "", *rest))
    return keys


def default_of(key: TuningKey) -> GemmConfig:
    """What runs where nothing was tuned; see ``experts_cuda.heuristic_config``."""
    if is_chosen(key.expected_rows, key.num_local_experts, key.architecture):
        return DEFAULT_CONFIG
    config = default_config(key.num_inputs, key.num_local_experts, key.expected_rows)
    if config is None:
        raise ValueError(f"key: expected a shape that the kernels cover, got {key}")
    return config


def candidates_of(key: TuningKey) -> list[GemmConfig]:
    """Configurations worth trying for a key, each valid and once, the default first."""
    found: list[GemmConfig] = [default_of(key)]
    num_local_experts = key.num_local_experts
    if key.expected_rows < 4 * FROM_ROWS * num_local_experts:
        shapes = [(8, 2), (16, 1), (12, 1), (8, 1)] if key.expected_rows > FEW_ROWS else [(16, 1), (8, 2), (12, 1)]
        found += [
            ExpertsConfig(warps=warps, depth=depth, finishers=finishers, blocks=blocks)
            for (warps, blocks), depth, finishers in itertools.product(shapes, (1, 2), (1, 2))
        ]
    # Sixteen rows a pass read weights once where experts get more than eight, beyond decode steps or by skewed routing.
    if num_local_experts <= key.expected_rows < 4 * FROM_ROWS * num_local_experts:
        found += [ExpertsConfig(12, rows=16, finishers=finishers, blocks=1) for finishers in (2, 3)]
    if key.architecture == "sm_90" and 4 * key.expected_rows >= FROM_ROWS * num_local_experts:
        found += [GroupedConfig(columns, 2, 2, stages) for columns in (64, 96, 112) for stages in (3, 4)]
    valid = (config for config in found if is_valid(config, key.num_inputs, key.num_local_experts))
    return list(dict.fromkeys(valid))


# --- the search ------------------------------------------------------------------------------------------------------
def tune(
    keys: Sequence[TuningKey],
    profiler: Profiler,
    path: Path,
    fingerprint: str,
    *,
    group: ExpertParallelGroup | None = None,
    force: bool = False,
    progress: Callable[[int, int, TuningKey], None] | None = None,
) -> Report:
    """Search for the keys that ``path`` does not have yet, and write each as soon as it is found.

    group: ranks that tune together. Each takes part in every key that any of them lacks, measures those that are its
        own, and all choose by the slowest rank's times, so that none picks otherwise than the rest.
    force: search for known keys, too.
    progress: called before each key: keys done, keys in all, the key.
    Raises what a profiler raises, on every rank: RuntimeError naming the rank on the others. Keys found before stay.
    """
    group = group or ExpertParallelGroup()
    known = tuned.read_file(path, fingerprint)
    missing = [key for key in dict.fromkeys(keys) if force or str(key) not in known]
    everyone = sorted(set().union(*group.gather_objects(missing)))
    report = Report(num_known=len(set(keys)) - len(missing))
    for number, key in enumerate(everyone):
        if progress is not None:
            progress(number, len(everyone), key)
        result = _tune_key(key, profiler if key in keys else None, group)
        report.tuned.append(result)
        _write(path, fingerprint, {str(key): result.entry()})
    tuned.forget()
    return report


def _tune_key(key: TuningKey, profiler: Profiler | None, group: ExpertParallelGroup) -> Tuned:
    """One exchange whatever happens on this rank, so that no other waits for one that never comes."""
    own: list[Candidate] | None = None
    error: BaseException | None = None
    if profiler is not None:
        try:
            candidates = candidates_of(key)
            profiler.prepare(key, candidates)
            own = [_measure(key, config, profiler) for config in candidates]
        except BaseException as raised:  # told to the others first, then raised
            error = raised
    told = group.gather_objects((own, None if error is None else f"{type(error).__name__}: {error}"))
    if error is not None:
        try:
            raise error
        finally:
            error = None  # its traceback holds this frame: a cycle that would keep the process group beyond its end
    for rank, (_, failure) in enumerate(told):
        if failure is not None:
            raise RuntimeError(f"tuning {key}: rank {rank} failed: {failure}")
    measured = [candidates for candidates, _ in told if candidates is not None]
    together = tuple(_slowest(list(tries)) for tries in zip(*measured, strict=True))
    return Tuned(key, _choose(together), together)


def _measure(key: TuningKey, config: GemmConfig, profiler: Profiler) -> Candidate:
    try:
        profiler.check(key, config)
        return Candidate(config, profiler.time(key, config))
    except CandidateError as failure:
        return Candidate(config, None, str(failure))


def _slowest(tries: list[Candidate]) -> Candidate:
    failed = next((candidate for candidate in tries if candidate.us is None), None)
    return failed or max(tries, key=lambda candidate: candidate.us or 0.0)


def _choose(candidates: Sequence[Candidate]) -> GemmConfig:
    """The fastest, unless the default is as fast but for noise."""
    default = candidates[0]
    best = min(candidates, key=lambda candidate: math.inf if candidate.us is None else candidate.us)
    if best.us is None or (default.us is not None and best.us > default.us * (1 - MARGIN)):
        return default.config
    return best.config


# --- files -----------------------------------------------------------------------------------------------------------
def _write(path: Path, fingerprint: str, entries: dict[str, Any]) -> None:
    """Add entries to a file that other processes may be adding to: under a lock, written beside and renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        content = {
            "format": tuned.FILE_FORMAT,
            "fingerprint": fingerprint,
            "entries": {**tuned.read_file(path, fingerprint), **entries},
        }
        with replacing(path) as file:
            file.write(_text(content).encode())


def _text(content: dict[str, Any]) -> str:
    """JSON with an entry a line, for people and for diffs."""
    entries = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in content["entries"].items())
    head = json.dumps({name: value for name, value in content.items() if name != "entries"})
    return f'{head[:-1]}, "entries": {{\n{entries}\n}}}}\n'


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, and when the process dies
        yield


# --- coverage --------------------------------------------------------------------------------------------------------
class Coverage(NamedTuple):
    """Where the configuration of a key comes from, and which it is."""

    key: TuningKey
    config: GemmConfig | dict[str, Any]
    source: tuned.Source


def coverage(keys: Iterable[TuningKey], fingerprint: str, device_name: str) -> list[Coverage]:
    """For each key that a serving plan will look up, where the answer comes from."""
    found = []
    for key in keys:
        values, source = tuned.lookup(key, fingerprint, device_name)
        found.append(Coverage(key, default_of(key) if values is None else dict(values), source))
    return found


def config_text(config: GemmConfig | dict[str, Any]) -> str:
    """A configuration as `decode: warps 8, depth 1, ...`."""
    values = dict(config) if isinstance(config, dict) else config_values(config)
    kernel = values.pop("kernel")
    return f"{kernel}: " + ", ".join(f"{name} {value}" for name, value in values.items())


def batches_of(key: TuningKey, preset: ModelPreset, placement: ExpertPlacement, batches: Sequence[int]) -> str:
    """The batch sizes that look a key up, as ranges; ``batches`` rise."""
    top_k = preset.router.top_k
    own = [
        tokens
        for tokens in batches
        if expected_rows(tokens * top_k, placement.num_local_experts, placement.num_experts) == key.expected_rows
    ]
    return f"{own[0]}" if len(own) == 1 else f"{own[0]}-{own[-1]}"
