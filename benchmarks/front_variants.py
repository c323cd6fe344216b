"""Check the one-launch front on this machine's GPU, time its variants, and show where its cycles go.

``python benchmarks/front_variants.py --out DIR``. Every case of tests/front_cases.py is checked against the torch
statements, then graph replays with new inputs; then variants are timed as `rankmoe bench front` times, and the
kernel's own clock marks are read. With ``--checks-only`` it is what a memory checker runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from rankmoe.bench.front import table_rows  # noqa: E402
from rankmoe.bench.record import Record, device_name, markdown  # noqa: E402
from rankmoe.bench.timing import Launches, capture_launches, time_launches  # noqa: E402
from rankmoe.kernels import front_cuda, nvrtc  # noqa: E402
from rankmoe.kernels.front_cuda import FrontVariant  # noqa: E402
from rankmoe.types import LocalRange, RouterConfig  # noqa: E402

front_cases: Any = importlib.import_module("front_cases")
FrontCase, make_inputs, make_buffers = front_cases.FrontCase, front_cases.make_inputs, front_cases.make_buffers
check_front, poison, run_front = front_cases.check_front, front_cases.poison, front_cases.run_front

TOKENS = (1, 2, 4, 8, 16, 24, 32, 64)
DETAIL_TOKENS = (8, 64)
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

    def record(macros: nvrtc.Macros) -> Recorder:
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

    def compile_one(macros: nvrtc.Macros) -> None:
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


def timed_variants(num_tokens: int) -> dict[str, tuple[Any, bool]]:
    """What is timed at a token count: the case, and whether launches are programmatic."""
    default, empty = FrontVariant(), FrontVariant(stop_after=0)
    lines = {
        "empty": (kimi_case(num_tokens, "none", empty), True),
        "empty, PDL off": (kimi_case(num_tokens, "none", empty), False),
        "front": (kimi_case(num_tokens, "none", default), True),
        "front, PDL off": (kimi_case(num_tokens, "none", default), False),
        "front+masks (cluster)": (kimi_case(num_tokens, "masks", default), True),
        "front+masks (cluster), PDL off": (kimi_case(num_tokens, "masks", default), False),
        "front+masks (collector)": (kimi_case(num_tokens, "masks", FrontVariant(collector=True)), True),
        "front+rows (collector)": (kimi_case(num_tokens, "rows", default), True),
    }
    if num_tokens not in DETAIL_TOKENS:
        return lines
    for name, stop in (("loads", 1), ("loads+scores", 2), ("loads+scores+selection", 3)):
        lines[f"until {name}"] = (kimi_case(num_tokens, "none", FrontVariant(stop_after=stop)), True)
    for variant in (FrontVariant(4, 8, 0), FrontVariant(4, 8, 1), FrontVariant(8, 4, 1)):
        label = f"{variant.route_warps} warps, threshold {variant.threshold}"
        lines[f"front, {label}"] = (kimi_case(num_tokens, "none", variant), True)
        lines[f"front+masks (cluster), {label}"] = (kimi_case(num_tokens, "masks", variant), True)
    for chunks in (1, 2, 4):
        lines[f"front, {chunks} chunks"] = (kimi_case(num_tokens, "none", FrontVariant(quant_chunks=chunks)), True)
    return lines


def capture(case: Any, is_programmatic: bool, sets: list[Any]) -> Launches:
    """Capture launches over the rotated sets."""
    buffers = [make_buffers(case, inputs) for inputs in sets]
    return capture_launches(lambda i: run_front(case, sets[i], buffers[i], is_programmatic=is_programmatic), len(sets))


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
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--checks-only", action="store_true", help="for a memory checker: no graphs, no timing")
    parser.add_argument("--every", type=int, default=1, help="check every n-th case")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    print(torch.cuda.get_device_name(), torch.__version__, "NVRTC", nvrtc.compiler_version(), flush=True)
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
    rows: list[dict[str, Any]] = []
    for num_tokens in TOKENS:
        lines = timed_variants(num_tokens)
        sets = [
            make_inputs(dataclasses.replace(kimi_case(num_tokens, "none", FrontVariant()), seed=seed), "cuda")
            for seed in range(INPUT_SETS)
        ]
        captured = {name: capture(case, programmatic, sets) for name, (case, programmatic) in lines.items()}
        for name, timing in time_launches(captured, arguments.rounds).items():
            rows.append(
                {"tokens": num_tokens, "variant": name, "us": round(timing.us, 3), "spread": round(timing.spread, 3)}
            )
    profiles = {f"{t} tokens, {s}": profile_marks(t, s) for t in DETAIL_TOKENS for s in ("none", "masks")}
    record = Record("front-variants", "kimi-k3", device_name("cuda"), rows, notes={"cycles": profiles})
    record.write(arguments.out / "front-variants.json")
    print(markdown(table_rows(record)))
    for name, marks in profiles.items():
        print(f"cycles, {name}: " + ", ".join(f"{k} {v:.0f}" for k, v in marks.items()))
    print(f"{time.perf_counter() - began:.0f} s; failures {len(failures)}")


if __name__ == "__main__":
    main()
