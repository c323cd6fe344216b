"""Time configurations of the native expert GEMMs on one Kimi-K3 EP8 rank, after checking each against float64.

python benchmarks/experts_variants.py --tokens 1,8,64 --output record.json
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from functools import partial
from pathlib import Path

import torch

from rankmoe.activation import apply_activation
from rankmoe.bench.cases import random_weight
from rankmoe.bench.record import Record, device_name
from rankmoe.bench.timing import capture_launches, time_launches
from rankmoe.experts import pack_experts
from rankmoe.front import FrontResult, route_quantize
from rankmoe.kernels import experts_cuda
from rankmoe.kernels.experts_cuda import ExpertsConfig
from rankmoe.models.presets import get_preset
from rankmoe.quantize import dequantize, quantize_mxfp8
from rankmoe.types import ExpertPlacement, ExpertWeights, MXTensor

NUM_ROUTINGS = 6
FIELDS = [field.name for field in dataclasses.fields(ExpertsConfig)]


@dataclasses.dataclass(frozen=True)
class Case:
    """What every configuration is run on: weights, routings, and buffers for each routing."""

    weights: ExpertWeights
    fronts: list[FrontResult]
    middle: torch.Tensor
    rows: torch.Tensor
    down_changes: dict[str, int]

    def gate_up(self, config: ExpertsConfig, i: int) -> MXTensor:
        """The first GEMM of the i-th routing."""
        front = self.fronts[i]
        assert front.schedule is not None
        return experts_cuda.gate_up(front.x, front.schedule, self.weights, self.middle[i], config=config)

    def down(self, config: ExpertsConfig, i: int) -> torch.Tensor:
        """The second GEMM, on whatever the first one left."""
        return self._down(experts_cuda.middle_in(self.middle[i]), config, i, False)

    def gemms(self, config: ExpertsConfig, i: int) -> torch.Tensor:
        """Both, the second one's weights fetched while the first one drains."""
        return self._down(self.gate_up(config, i), config, i, True)

    def _down(self, middle: MXTensor, config: ExpertsConfig, i: int, is_chained: bool) -> torch.Tensor:
        schedule = self.fronts[i].schedule
        assert schedule is not None
        config = dataclasses.replace(config, **self.down_changes)
        return experts_cuda.down(middle, schedule, self.weights, self.rows[i], config=config, is_chained=is_chained)


def check(case: Case, config: ExpertsConfig, w13: MXTensor, w2: MXTensor) -> tuple[float, float]:
    """Largest relative L2 of some experts' (middle, rows) against float64."""
    front, schedule = case.fronts[0], case.fronts[0].schedule
    assert schedule is not None
    case.middle.fill_(float("nan"))
    case.rows.fill_(float("nan"))
    rows = case.gemms(config, 0)
    middle = experts_cuda.middle_in(case.middle[0])
    offsets = schedule.expert_offsets.tolist()
    worst = [0.0, 0.0]
    active = [e for e in range(len(offsets) - 1) if offsets[e] < offsets[e + 1]]
    x = dequantize(front.x, torch.float64)
    for expert in [active[0], *active[-3:], max(active, key=lambda e: offsets[e + 1] - offsets[e])]:
        own = slice(offsets[expert], offsets[expert + 1])
        accumulators = x[schedule.row_tokens[own].long()] @ dequantize(w13[expert], torch.float64).T
        activated = quantize_mxfp8(apply_activation(accumulators, case.weights.activation).float())
        got = dequantize(middle[own], torch.float64)
        results = (
            (got, dequantize(activated, torch.float64)),
            (rows[own].double(), got @ dequantize(w2[expert], torch.float64).T),
        )
        for i, (result, expected) in enumerate(results):
            worst[i] = max(worst[i], float((result - expected).norm() / expected.norm()))
    if not (worst[0] <= 5e-3 and worst[1] <= 1e-5):
        raise AssertionError(f"{config}: relative L2 {worst} from float64; nothing is timed")
    return worst[0], worst[1]


def _change(text: str) -> tuple[str, int]:
    name, value = text.split("=")
    return name, int(value)


def main() -> None:
    """Measure the product of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64")
    for field in dataclasses.fields(ExpertsConfig):
        parser.add_argument(f"--{field.name}", default=str(field.default))
    parser.add_argument("--down", nargs="*", type=_change, help="fields that differ for the down GEMM, as depth=2")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--check-only", action="store_true", help="run each configuration once, for a profiler")
    options = parser.parse_args()
    product = itertools.product(*([int(n) for n in getattr(options, name).split(",")] for name in FIELDS))
    preset = get_preset("kimi-k3")
    placement = ExpertPlacement(preset.num_experts, 8, 0)
    torch.manual_seed(0)
    num_local, hidden, width = placement.num_local_experts, preset.hidden_size, preset.intermediate_size
    generator = torch.Generator("cuda").manual_seed(0)
    w13 = random_weight(num_local, 2 * width, hidden, generator)
    w2 = random_weight(num_local, hidden, width, generator)
    weights = pack_experts(w13, w2, preset.activation, placement, backend="cuda")
    configs = [config for config in itertools.starmap(ExpertsConfig, product) if config.is_valid(hidden, 128)]
    parts = {"gate_up": weights.w13.nbytes, "down": weights.w2.nbytes, "gemms": weights.nbytes}
    rows: list[dict[str, object]] = []
    for num_tokens in map(int, options.tokens.split(",")):
        fronts = []
        for _ in range(NUM_ROUTINGS):
            logits = torch.randn(num_tokens, preset.num_experts, device="cuda")
            x = torch.randn(num_tokens, hidden, device="cuda").bfloat16()
            fronts.append(route_quantize(logits, x, preset.router, local_range=placement.local_range))
        num_rows = num_tokens * preset.router.top_k
        middle = torch.empty(NUM_ROUTINGS, num_rows, width, device="cuda")
        out = torch.empty(NUM_ROUTINGS, num_rows, hidden, device="cuda")
        case = Case(weights, fronts, middle, out, dict(options.down or ()))
        num_active = sum(int((f.schedule.expert_counts > 0).sum()) for f in fronts if f.schedule) / NUM_ROUTINGS
        errors = {config: check(case, config, w13, w2) for config in configs}
        if options.check_only:
            continue
        launches = {
            f"{config} {stage}": capture_launches(partial(getattr(case, stage), config), NUM_ROUTINGS, 24)
            for config in configs
            for stage in parts
        }
        timings = time_launches(launches, options.rounds, 2)
        for config in configs:
            line = []
            for stage, whole in parts.items():
                nbytes, timing = int(whole / num_local * num_active), timings[f"{config} {stage}"]
                row = {"tokens": num_tokens, "stage": stage, "us": round(timing.us, 2), "bytes": nbytes}
                rows.append(row | {"spread": round(timing.spread, 2), "variant": dataclasses.asdict(config)})
                line.append(f"{stage} {timing.us:6.1f} us {nbytes / timing.us / 1e6:4.2f} TB/s")
            values = " ".join(map(str, dataclasses.astuple(config)))
            print(f"{num_tokens:3} {num_active:5.1f} [{values}]", *line, "%.0e %.0e" % errors[config], flush=True)  # noqa: UP031
    if options.output:
        Record("experts-variants", preset.name, device_name("cuda"), rows).write(options.output)


if __name__ == "__main__":
    main()
