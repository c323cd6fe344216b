"""`rankmoe bench layer` on a GPU: every engine beside the floor and beside a composition of library parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rankmoe.backends import get_backend
from rankmoe.bench.cases import random_weight
from rankmoe.bench.exact import down_float64, gate_up_float64
from rankmoe.bench.record import Record, device_name
from rankmoe.bench.timing import capture_launches, time_launches
from rankmoe.combine import combine
from rankmoe.experts import down, gate_up, gemms, pack_experts
from rankmoe.front import FrontResult, route_quantize
from rankmoe.models.presets import ModelPreset
from rankmoe.moe import Workspace, fused_moe, routed_moe
from rankmoe.pack import id_space
from rankmoe.types import MAX_FRONT_TOKENS, ExpertPlacement, ExpertSchedule, ExpertWeights, MXTensor, Problem

#: How logits are drawn.
ROUTINGS = ("uniform", "skewed")
#: Routings that take turns, the same ones for every variant, and launches of a captured graph; fewer beyond decode
#: sizes, where every launch reads more than a cache holds, and buffers are large.
NUM_ROUTINGS, NUM_LAUNCHES = 12, 24
NUM_LARGE_ROUTINGS, NUM_LARGE_LAUNCHES = 2, 4
#: Bytes of experts that routings take turns at, in copies where a rank has less: some times what an L2 cache holds.
ROTATED_BYTES = 1_000_000_000
#: Engines by the name they have in records; the peer is made of humming's GEMMs.
ENGINES = {"native": "cuda", "humming": "humming", "triton": "triton"}
COMPOSITION_ENGINE = "humming"
#: Relative L2 of a layer's output from float64. An engine that rounds each GEMM's output to bfloat16 has the wider one:
#: the rounding moves about one code in thirty of the middle to its neighbour, a sixteenth away.
TOLERANCE, ROUNDED_TOLERANCE = 5e-3, 3e-2


class BenchmarkError(RuntimeError):
    """Why nothing was timed: no GPU, or a variant whose output is wrong."""


@dataclass(frozen=True)
class LayerCudaOptions:
    """What to measure: rank 0 of ``ep_size``, at each token count.

    routing: ``uniform`` logits, or ``skewed`` ones, where an expert's popularity falls as 1 / rank.
    rounds: measurements of each variant; the median is reported.
    """

    preset: ModelPreset
    ep_size: int
    token_counts: Sequence[int]
    routing: str = "uniform"
    rounds: int = 15
    seed: int = 0


def skewed_bias(num_experts: int, seed: int = 0) -> torch.Tensor:
    """[E] float32. Added to random logits, it makes the n-th most popular expert about 1 / n as likely as the first."""
    generator = torch.Generator().manual_seed(seed)
    rank = torch.randperm(num_experts, generator=generator) + 1
    bias = -rank.float().log()
    return bias - bias.mean()


@dataclass(frozen=True)
class _Batch:
    """One routing: inputs and what the front makes of them."""

    hidden_states: torch.Tensor
    router_logits: torch.Tensor
    front: FrontResult
    schedule: ExpertSchedule


@dataclass(frozen=True)
class _Experts:
    """Checkpoint-order weights, the same bytes as the floor reads them by stage, and the engines' packed weights."""

    w13: MXTensor
    w2: MXTensor
    biases: dict[str, torch.Tensor]
    words: dict[str, torch.Tensor]
    engines: dict[str, ExpertWeights]

    @property
    def nbytes(self) -> int:
        """Bytes of both weights of all experts."""
        return self.w13.nbytes + self.w2.nbytes


def run(options: LayerCudaOptions, progress: Callable[[str], None] | None = None) -> Record:
    """Check every variant's output, then measure. Returns the record, rows as docs/benchmarks.md has them.

    Raises BenchmarkError without a GPU, and, before anything is timed, where a variant's output is wrong.
    """
    if not torch.cuda.is_available():
        raise BenchmarkError("bench layer: expected a CUDA device, found none; --device cpu needs none")
    report = progress or (lambda text: None)
    placement = ExpertPlacement(options.preset.num_experts, options.ep_size, 0)
    num_copies = -(-ROTATED_BYTES // (placement.num_local_experts * options.preset.expert_nbytes))
    report("making random experts")
    copies = [_random_experts(options, placement, copy) for copy in range(min(num_copies, NUM_ROUTINGS))]
    names = list(copies[0].engines)
    left_out = [name for name in ENGINES if name not in names]
    if COMPOSITION_ENGINE in left_out:
        left_out.append("composition")
    rows: list[dict[str, object]] = []
    for num_tokens in options.token_counts:
        report(f"{num_tokens} tokens")
        rows += _measure(options, placement, copies, num_tokens)
    notes = {
        "ep_size": options.ep_size,
        "engines": sorted(names),
        "left_out": left_out,
        "weight_bytes": copies[0].nbytes,
        "copies": len(copies),
    }
    return Record("layer", options.preset.name, device_name("cuda"), rows, notes=notes)


def _random_experts(options: LayerCudaOptions, placement: ExpertPlacement, copy: int) -> _Experts:
    preset, num_experts = options.preset, placement.num_local_experts
    generator = torch.Generator("cuda").manual_seed(options.seed + copy)

    hidden_size, intermediate_size = preset.hidden_size, preset.intermediate_size
    w13 = random_weight(num_experts, 2 * intermediate_size, hidden_size, generator)
    w2 = random_weight(num_experts, hidden_size, intermediate_size, generator)
    biases: dict[str, torch.Tensor] = {}
    if preset.has_bias:
        for name, width in (("w13_bias", 2 * intermediate_size), ("w2_bias", hidden_size)):
            biases[name] = torch.randn(num_experts, width, device="cuda", generator=generator)
    problem = Problem(num_experts, hidden_size, intermediate_size, preset.activation, preset.has_bias, "cuda")
    engines: dict[str, ExpertWeights] = {}
    for name, backend_name in ENGINES.items():
        backend = get_backend(backend_name)
        if backend.available() and (backend.covered(problem) or backend.approximated(problem)):
            engines[name] = pack_experts(
                w13,
                w2,
                preset.activation,
                placement,
                w13_bias=biases.get("w13_bias"),
                w2_bias=biases.get("w2_bias"),
                backend=backend_name,
            )
    words = {"gate_up": _words(w13), "down": _words(w2)}
    return _Experts(w13, w2, biases, words, engines)


def _words(weight: MXTensor) -> torch.Tensor:
    """[L, words] int64. An expert's codes, then its scales; sizes are multiples of 32, so words are whole."""
    num_experts = weight.shape[0]
    parts = [weight.data.view(num_experts, -1), weight.scale.view(num_experts, -1)]
    return torch.cat(parts, dim=1).view(torch.int64)


def _random_batches(options: LayerCudaOptions, placement: ExpertPlacement, num_tokens: int) -> list[_Batch]:
    preset = options.preset
    generator = torch.Generator("cuda").manual_seed(options.seed + num_tokens)
    bias = skewed_bias(preset.num_experts, options.seed).cuda() if options.routing == "skewed" else 0.0
    batches = []
    for _ in range(NUM_ROUTINGS if num_tokens <= MAX_FRONT_TOKENS else NUM_LARGE_ROUTINGS):
        hidden_states = torch.randn(num_tokens, preset.hidden_size, device="cuda", generator=generator).bfloat16()
        logits = torch.randn(num_tokens, preset.num_experts, device="cuda", generator=generator) + bias
        front = route_quantize(logits, hidden_states, preset.router, local_range=placement.local_range)
        assert front.schedule is not None, "a contiguous placement has a range"
        batches.append(_Batch(hidden_states, logits, front, front.schedule))
    return batches


def _measure(
    options: LayerCudaOptions, placement: ExpertPlacement, copies: list[_Experts], num_tokens: int
) -> list[dict[str, object]]:
    batches = _random_batches(options, placement, num_tokens)
    turns = [copies[i % len(copies)] for i in range(len(batches))]
    variants = _floor(turns, batches)
    for name in copies[0].engines:
        variants |= _engine(options, name, [experts.engines[name] for experts in turns], batches)
    if COMPOSITION_ENGINE in copies[0].engines:
        weights = [experts.engines[COMPOSITION_ENGINE] for experts in turns]
        variants |= _composition(options, weights, placement, batches)
    # Each routing, since a rank may have no expert in one of few tokens.
    for i, batch in enumerate(batches):
        expected = _layer_float64(options, turns[i], batch)
        for (variant, stage), call in variants.items():
            got = call(i)
            if stage == "gemms" and variant != "floor":
                assert isinstance(got, torch.Tensor)
                got = combine(got, batch.front.routing.topk_weights, batch.schedule)
            elif stage != "layer":
                continue
            _check(f"{variant} {stage}", got, expected, is_rounded=variant in ("humming", "composition"))
    num_launches = NUM_LAUNCHES if len(batches) == NUM_ROUTINGS else NUM_LARGE_LAUNCHES
    launches = {f"{v}/{s}": capture_launches(call, len(batches), num_launches) for (v, s), call in variants.items()}
    timings = time_launches(launches, options.rounds, 2)
    num_active = sum(int((batch.schedule.expert_counts > 0).sum()) for batch in batches) / len(batches)
    whole = copies[0].nbytes
    parts = {"gate_up": copies[0].w13.nbytes, "down": copies[0].w2.nbytes}
    rows: list[dict[str, object]] = []
    for variant, stage in variants:
        timing = timings[f"{variant}/{stage}"]
        rows.append(
            {
                "tokens": num_tokens,
                "routing": options.routing,
                "variant": variant,
                "stage": stage,
                "us": round(timing.us, 2),
                "spread": round(timing.spread, 2),
                "bytes": int(parts.get(stage, whole) / placement.num_local_experts * num_active),
                "active_experts": round(num_active, 1),
            }
        )
    return rows


_Variants = dict[tuple[str, str], Callable[[int], torch.Tensor | MXTensor]]


def _floor(turns: list[_Experts], batches: list[_Batch]) -> _Variants:
    """Reading the touched experts' bytes once: codes and scales of one GEMM's weight, and of both."""
    from rankmoe.kernels import read_triton

    actives = [batch.schedule.expert_counts.nonzero().flatten() for batch in batches]
    sums = {
        stage: torch.empty(words.shape[0], read_triton.num_blocks_of(words), dtype=torch.int64, device="cuda")
        for stage, words in turns[0].words.items()
    }

    def read(stage: str) -> Callable[[int], torch.Tensor]:
        return lambda i: read_triton.read_experts(turns[i].words[stage], actives[i], sums[stage])

    def read_both(i: int) -> torch.Tensor:
        read("gate_up")(i)
        return read("down")(i)

    return {("floor", "gate_up"): read("gate_up"), ("floor", "down"): read("down"), ("floor", "gemms"): read_both}


def _engine(options: LayerCudaOptions, name: str, weights: list[ExpertWeights], batches: list[_Batch]) -> _Variants:
    """An engine's two GEMMs, both, and the whole layer from router logits; weights of each routing."""
    num_tokens, config = batches[0].hidden_states.shape[0], options.preset.router
    workspaces = [Workspace.allocate(num_tokens, config.top_k, weights[0]) for _ in batches]
    middles = [
        gate_up(batch.front.x, batch.schedule, own, torch.empty_like(workspace.middle))
        for batch, own, workspace in zip(batches, weights, workspaces, strict=True)
    ]

    def run_layer(i: int) -> torch.Tensor:
        batch = batches[i]
        return routed_moe(batch.hidden_states, batch.router_logits, weights[i], config, workspace=workspaces[i])

    return {
        (name, "gate_up"): lambda i: gate_up(batches[i].front.x, batches[i].schedule, weights[i], workspaces[i].middle),
        (name, "down"): lambda i: down(middles[i], batches[i].schedule, weights[i], workspaces[i].rows),
        (name, "gemms"): lambda i: gemms(
            batches[i].front.x, batches[i].schedule, weights[i], workspaces[i].middle, workspaces[i].rows
        ),
        (name, "layer"): run_layer,
    }


def _composition(
    options: LayerCudaOptions, weights: list[ExpertWeights], placement: ExpertPlacement, batches: list[_Batch]
) -> _Variants:
    """What can be put together from library parts: the front, a schedule pass over its packed ids, GEMM, activation and
    quantisation, GEMM, combine, each a launch or more of its own."""
    num_tokens, config = batches[0].hidden_states.shape[0], options.preset.router
    workspaces = [Workspace.allocate(num_tokens, config.top_k, weights[0]) for _ in batches]
    local_range = placement.local_range
    assert local_range is not None

    def run_layer(i: int) -> torch.Tensor:
        batch = batches[i]
        front = route_quantize(
            batch.router_logits, batch.hidden_states, config, local_range=local_range, schedule="none"
        )
        space = id_space(front.routing, placement.num_experts, local_range)
        return fused_moe(
            front.x,
            front.routing,
            weights[i],
            num_experts=space.num_experts,
            local_expert_offset=space.local_expert_offset,
            workspace=workspaces[i],
        )

    return {("composition", "layer"): run_layer}


def _layer_float64(options: LayerCudaOptions, experts: _Experts, batch: _Batch) -> torch.Tensor:
    """[T, H] float64 sums of the active experts over dequantised operands, the middle quantised as the rules say."""
    schedule, biases = batch.schedule, experts.biases
    middle = gate_up_float64(batch.front.x, schedule, experts.w13, biases.get("w13_bias"), options.preset.activation)
    rows = down_float64(middle, schedule, experts.w2, biases.get("w2_bias"))
    num_rows = len(rows)
    rows = torch.nn.functional.pad(rows, (0, 0, 0, 1))  # of slots that are not here
    weights = torch.where(schedule.slot_rows >= 0, batch.front.routing.topk_weights, 0.0).double()
    slots = torch.where(schedule.slot_rows >= 0, schedule.slot_rows, num_rows).long()
    return (weights[..., None] * rows[slots]).sum(1)


def _check(variant: str, got: torch.Tensor | MXTensor, expected: torch.Tensor, *, is_rounded: bool) -> None:
    assert isinstance(got, torch.Tensor)
    tolerance = ROUNDED_TOLERANCE if is_rounded else TOLERANCE
    scale = expected.norm()
    error = float((got.double() - expected).norm() / scale) if scale else float(got.double().norm())
    if not error <= tolerance:
        raise BenchmarkError(f"{variant}: the output is {error:.1e} from float64, allowed {tolerance:.1e}; not timed")


def table_rows(record: Record) -> list[list[str]]:
    """The record as a table: token counts in the first row, microseconds of each variant's stages, then ratios."""
    counts = sorted({row["tokens"] for row in record.rows})
    us = {(row["variant"], row["stage"], row["tokens"]): row["us"] for row in record.rows}
    active = {row["tokens"]: row["active_experts"] for row in record.rows}

    def cells(values: dict[int, float], digits: int) -> list[str]:
        return [f"{values[count]:.{digits}f}" if count in values else "" for count in counts]

    def times(variant: str, stage: str) -> dict[int, float]:
        return {count: us[variant, stage, count] for count in counts if (variant, stage, count) in us}

    def ratios(name: str, over: tuple[str, str], under: tuple[str, str]) -> list[list[str]]:
        one, other = times(*over), times(*under)
        both = {count: one[count] / other[count] for count in one if count in other}
        return [[name, *cells(both, 2)]] if both else []

    rows = [["us at T =", *map(str, counts)], ["active experts", *cells(active, 1)]]
    for variant, stage in dict.fromkeys((row["variant"], row["stage"]) for row in record.rows):
        rows.append([f"{variant} {stage}", *cells(times(variant, stage), 1)])
    layer = ("native", "layer")
    rows += ratios("native layer / floor", layer, ("floor", "gemms"))
    rows += ratios("composition layer / native layer", ("composition", "layer"), layer)
    return rows + ratios("humming gemms / native gemms", ("humming", "gemms"), ("native", "gemms"))
