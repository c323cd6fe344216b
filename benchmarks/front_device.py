"""Check and time the one-launch front on the GPU of this machine: ``python benchmarks/front_device.py --out DIR``.

Every case of tests/front_cases.py is checked against the torch statements, then graph replays are checked with new
inputs, then variants are timed. Times come from replays of graphs of 100 launches over rotated buffers, variants
interleaved; the JSON holds median and spread. Ends with a short table.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from rankmoe.kernels import front_cuda, nvrtc  # noqa: E402
from rankmoe.kernels.front_cuda import FrontVariant  # noqa: E402
from rankmoe.types import LocalRange, RouterConfig  # noqa: E402

front_cases: Any = importlib.import_module("front_cases")
FrontCase, make_inputs, make_buffers = front_cases.FrontCase, front_cases.make_inputs, front_cases.make_buffers
check_front, poison, run_front = front_cases.check_front, front_cases.poison, front_cases.run_front

TOKENS = (1, 2, 4, 8, 16, 24, 32, 64)
DETAIL_TOKENS = (8, 64)
LAUNCHES = 100
INPUT_SETS = 8  # stay in L2, as logits and rows do that the previous kernels wrote
MARKS = ("start", "previous done", "scores", "column maxima", "threshold", "candidates", "winners", "schedule sent",
         "weights", "bits arrived", "end")  # fmt: skip


def kimi_case(num_tokens: int, schedule: str, variant: FrontVariant) -> Any:
    """One rank of Kimi-K3 on EP8."""
    return FrontCase(
        num_tokens=num_tokens,
        num_experts=896,
        hidden_size=3584,
        config=RouterConfig(16),
        local_range=LocalRange(336, 112),
        schedule=schedule,
        variant=variant,
    )


def compile_all(calls: Iterable[Callable[[], None]]) -> None:
    """Compile every kernel that ``calls`` need, in parallel: record the macros, launch nothing."""
    wanted = set()
    original = front_cuda._kernel

    class Recorder:
        def launch(self, *_: object) -> None:
            pass

    def record(macros: front_cuda.Macros) -> Recorder:
        wanted.add(macros)
        return Recorder()

    front_cuda._kernel = record  # type: ignore[assignment]
    try:
        for call in calls:
            call()
    finally:
        front_cuda._kernel = original
    start = time.perf_counter()
    architecture = nvrtc.ARCHITECTURES[torch.cuda.get_device_capability()]

    def compile_one(macros: front_cuda.Macros) -> None:
        nvrtc.load_or_compile(front_cuda.source(), dict(macros), architecture)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(compile_one, wanted))
    print(f"compiled {len(wanted)} kernels in {time.perf_counter() - start:.1f} s", flush=True)


def check_cases(cases: list[Any], last_case: Path) -> list[str]:
    """Run each case on poisoned outputs, with and without programmatic launch; ``last_case`` names one that hangs."""
    prepared = []
    for case in cases:
        inputs = make_inputs(case, "cuda")
        prepared.append((case, inputs, make_buffers(case, inputs)))
    compile_all([functools.partial(run_front, *p) for p in prepared])
    failures = []
    for case, inputs, buffers in prepared:
        for is_programmatic in (True, False, True):
            last_case.write_text(f"{case} (programmatic {is_programmatic})")
            poison(buffers)
            run_front(case, inputs, buffers, is_programmatic=is_programmatic)
            torch.cuda.synchronize()
            problems = check_front(case, inputs, buffers)
            if problems:
                failures.append(f"{case} (programmatic {is_programmatic}): {problems}")
                break
    return failures


def check_replays(schedule: str, variant: FrontVariant) -> list[str]:
    """A captured graph of back-to-back launches, replayed with new inputs and valid counts, poisoned in between."""
    case = dataclasses.replace(kimi_case(24, schedule, variant), num_valid=24)
    sets = []
    for seed in range(4):
        inputs = make_inputs(dataclasses.replace(case, seed=2 * seed), "cuda")
        sets.append((inputs, make_buffers(case, inputs)))
    run_front(case, *sets[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            for inputs, buffers in sets:
                run_front(case, inputs, buffers)
    failures = []
    for replay in range(16):
        for i, (inputs, buffers) in enumerate(sets):
            num_valid = (7 * replay + 5 * i) % 25
            fresh = make_inputs(
                dataclasses.replace(case, seed=2 * (1000 + replay * 4 + i), num_valid=num_valid), "cuda"
            )
            for name in ("router_logits", "hidden_states", "correction_bias", "num_valid_tokens"):
                getattr(inputs, name).copy_(getattr(fresh, name))
            poison(buffers)
        graph.replay()
        torch.cuda.synchronize()
        for inputs, buffers in sets:
            problems = check_front(case, inputs, buffers)
            if problems:
                failures.append(f"replay {replay} {schedule}: {problems}")
    return failures[:3]


@dataclasses.dataclass
class Timed:
    """One line of the result."""

    tokens: int
    variant: str
    case: Any
    is_programmatic: bool = True
    graph: Any = None
    buffers: Any = None
    times: list[float] = dataclasses.field(default_factory=list)


def timed_variants(tokens: int) -> list[Timed]:
    """What is timed at a token count."""
    default = FrontVariant()
    lines = [
        Timed(tokens, "empty", kimi_case(tokens, "none", FrontVariant(stop_after=0))),
        Timed(tokens, "empty, PDL off", kimi_case(tokens, "none", FrontVariant(stop_after=0)), False),
        Timed(tokens, "front", kimi_case(tokens, "none", default)),
        Timed(tokens, "front, PDL off", kimi_case(tokens, "none", default), False),
        Timed(tokens, "front+masks (cluster)", kimi_case(tokens, "masks", default)),
        Timed(tokens, "front+masks (cluster), PDL off", kimi_case(tokens, "masks", default), False),
        Timed(tokens, "front+masks (collector)", kimi_case(tokens, "masks", FrontVariant(collector=True))),
        Timed(tokens, "front+rows (collector)", kimi_case(tokens, "rows", default)),
    ]
    if tokens in DETAIL_TOKENS:
        for name, stop in (("loads", 1), ("loads+scores", 2), ("loads+scores+selection", 3)):
            lines.append(Timed(tokens, f"until {name}", kimi_case(tokens, "none", FrontVariant(stop_after=stop))))
        for warps, values in ((4, 8), (8, 4)):
            for threshold in (0, 1):
                if (warps, threshold) == (4, 0):
                    continue
                variant = FrontVariant(warps, values, threshold)
                label = f"{warps} warps, threshold {threshold}"
                lines.append(Timed(tokens, f"front, {label}", kimi_case(tokens, "none", variant)))
                lines.append(Timed(tokens, f"front+masks (cluster), {label}", kimi_case(tokens, "masks", variant)))
        for chunks in (1, 2, 4):
            variant = FrontVariant(quant_chunks=chunks)
            lines.append(Timed(tokens, f"front, {chunks} chunks", kimi_case(tokens, "none", variant)))
    return lines


def capture(line: Timed, sets: list[Any]) -> None:
    """Capture 100 launches over the rotated sets."""
    buffers = [make_buffers(line.case, inputs) for inputs in sets]
    options = {"is_programmatic": line.is_programmatic}
    for inputs, outputs in zip(sets, buffers, strict=True):
        run_front(line.case, inputs, outputs, **options)
    torch.cuda.synchronize()
    line.graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(line.graph):
        for launch in range(LAUNCHES):
            i = launch % len(sets)
            run_front(line.case, sets[i], buffers[i], **options)
    line.buffers = buffers  # a graph does not keep them alive


def time_lines(lines: list[Timed], rounds: int, replays: int) -> None:
    """Interleave the graphs; a round's figure is the mean of a few back-to-back replays."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for line in lines:
        line.graph.replay()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for line in lines:
            line.graph.replay()
            start.record()
            for _ in range(replays):
                line.graph.replay()
            end.record()
            end.synchronize()
            line.times.append(start.elapsed_time(end) * 1000 / (replays * LAUNCHES))


def profile_marks(tokens: int, schedule: str) -> dict[str, float]:
    """Median cycles from the end of the previous launch to each mark, over routing blocks, in back-to-back launches."""
    case = kimi_case(tokens, schedule, FrontVariant(profile=True))
    sets = [make_inputs(dataclasses.replace(case, seed=s), "cuda") for s in range(INPUT_SETS)]
    buffers = [make_buffers(case, inputs) for inputs in sets]
    profiles = [torch.zeros(512, 16, dtype=torch.int32, device="cuda") for _ in sets]

    def run() -> None:
        for inputs, outputs, profile in zip(sets, buffers, profiles, strict=True):
            run_front(case, inputs, outputs, profile=profile)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
        run()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    marks = torch.stack([p[:tokens] for p in profiles]).long().cpu()  # set, block, mark
    since = (marks - marks[..., 1:2]) & 0xFFFFFFFF
    since = torch.where(since >= 2**31, since - 2**32, since)
    result = {}
    for i, name in enumerate(MARKS):
        if name == "bits arrived":
            if schedule != "masks":
                continue
            result[name] = since[:, ::8, i].double().median().item()
        else:
            result[name] = since[..., i].double().median().item()
    result["largest to weights"] = since[..., 8].amax(1).double().median().item()
    return result


def main() -> None:
    """Check, time, write the JSON, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--replays", type=int, default=4)
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--checks-only", action="store_true", help="for a memory checker: no graphs, no timing")
    parser.add_argument("--every", type=int, default=1, help="check every n-th case")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    print(torch.cuda.get_device_name(), torch.__version__, "NVRTC", nvrtc._compiler_version(), flush=True)
    failures = []
    if not arguments.skip_checks:
        cases = front_cases.front_cases()
        cases += [kimi_case(t, s, FrontVariant()) for t in TOKENS for s in ("masks", "rows")]
        cases = cases[:: arguments.every]
        failures += check_cases(cases, arguments.out / "last_case.txt")
        print(f"{len(cases)} cases, {len(failures)} failures, {time.perf_counter() - began:.0f} s", flush=True)
        collector = FrontVariant(collector=True)
        for schedule, variant in (("masks", FrontVariant()), ("rows", FrontVariant()), ("masks", collector)):
            if arguments.checks_only:
                break
            found = check_replays(schedule, variant)
            print(f"replays, schedule {schedule}: {len(found)} failures", flush=True)
            failures += found
        for failure in failures[:12]:
            print("FAIL", failure[:600], flush=True)
    if arguments.checks_only:
        sys.exit(bool(failures))
    results: list[dict[str, Any]] = []
    plan = {tokens: timed_variants(tokens) for tokens in TOKENS}
    base = {t: [make_inputs(dataclasses.replace(lines[0].case, seed=s), "cuda") for s in range(INPUT_SETS)]
            for t, lines in plan.items()}  # fmt: skip
    compile_all(
        [
            functools.partial(run_front, line.case, base[t][0], make_buffers(line.case, base[t][0]))
            for t, lines in plan.items()
            for line in lines
        ]
    )
    for tokens, lines in plan.items():
        for line in lines:
            capture(line, base[tokens])
        time_lines(lines, arguments.rounds, arguments.replays)
        for line in lines:
            low, median, high = statistics.quantiles(line.times, n=4)
            results.append(
                {"tokens": tokens, "variant": line.variant, "us": round(median, 3), "spread": round(high - low, 3),
                 "min": round(min(line.times), 3)}
            )  # fmt: skip
            line.graph = line.buffers = None
    profiles = {f"{t} tokens, {s}": profile_marks(t, s) for t in DETAIL_TOKENS for s in ("none", "masks")}
    record = {
        "bench": "front_device",
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "nvrtc": nvrtc._compiler_version()},
        "date": time.strftime("%Y-%m-%d"),
        "failures": failures,
        "rows": results,
        "profiles": profiles,
    }
    (arguments.out / "front_device.json").write_text(json.dumps(record, indent=1))
    names = list(dict.fromkeys(r["variant"] for r in results))
    print(f"{'us (median)':48s}" + "".join(f"{t:>7d}" for t in TOKENS))
    for name in names:
        values = {r["tokens"]: r["us"] for r in results if r["variant"] == name}
        print(f"{name:48s}" + "".join(f"{values[t]:7.2f}" if t in values else "      -" for t in TOKENS))
    for name, marks in profiles.items():
        print(f"cycles, {name}: " + ", ".join(f"{k} {v:.0f}" for k, v in marks.items()))
    largest = max(float(r["spread"]) for r in results)
    seconds = time.perf_counter() - began
    print(f"largest spread {largest:.3f} us; {seconds:.0f} s; failures {len(failures)}")


if __name__ == "__main__":
    main()
