"""Run and time candidates of `rankmoe tune` on a GPU: random experts, the rank's real share of rows, cold weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from rankmoe.bench.cases import random_weight
from rankmoe.bench.exact import down_float64, gate_up_float64
from rankmoe.bench.timing import Launches, capture_launches, time_launches
from rankmoe.experts import pack_experts
from rankmoe.kernels import experts_cuda
from rankmoe.kernels.experts_common import Stage
from rankmoe.kernels.experts_cuda import ExpertsConfig, GemmConfig
from rankmoe.models.presets import ModelPreset
from rankmoe.quantize import dequantize, quantize_mxfp8
from rankmoe.schedule import build_schedule
from rankmoe.tuned import TuningKey
from rankmoe.tuning import CandidateError, default_of
from rankmoe.types import MAX_FRONT_TOKENS, ExpertPlacement, ExpertSchedule, ExpertWeights, MXTensor

#: Routings that take turns: no launch finds the last one's experts in the L2 cache, and a choice is made for what few
#: tokens hit on average; rounds of timing.
_NUM_ROUTINGS, _ROUNDS = 12, 7
#: A launch of so many rows reads nearly every expert: fewer routings serve.
_MANY_ROWS, _NUM_ROUTINGS_OF_MANY = 1024, 3
#: What a candidate's output may be from float64.
_TOLERANCE = {"gate_up": 5e-3, "down": 1e-5}
#: Words of the errors that mean that a launch does not fit: of the driver, of ptxas, of torch's allocator.
_NO_ROOM = ("OUT_OF_RESOURCES", "OUT_OF_MEMORY", "INVALID_VALUE", "ptxas", "out of memory")


@dataclass(frozen=True)
class _Case:
    """Inputs of one key: rows for the first GEMM, a middle for the second.

    checked: the routing whose outputs are compared, the one with most rows.
    """

    checked: int
    x: list[MXTensor]
    schedules: list[ExpertSchedule]
    middles: list[MXTensor]
    scratch: torch.Tensor
    rows: torch.Tensor


class GpuProfiler:
    """Candidates on this process's GPU.

    preset: whose experts' sizes, activation, biases and experts a token are used.
    popularity: [E] float, how often each expert is chosen, from recorded routing; None for all alike. The rank gets its
        real share of the rows: ids are drawn from all experts and those of other ranks are skipped.
    """

    def __init__(
        self, preset: ModelPreset, placement: ExpertPlacement, popularity: torch.Tensor | None = None, seed: int = 0
    ) -> None:
        self._preset, self._placement, self._seed = preset, placement, seed
        shape = (placement.num_experts,)
        self._popularity = torch.ones(shape) if popularity is None else popularity
        if self._popularity.shape != shape or not bool((self._popularity >= 0).all()):
            raise ValueError(f"popularity: expected {shape[0]} numbers from 0 on, got {tuple(self._popularity.shape)}")
        num_experts = placement.num_local_experts
        generator = torch.Generator("cuda").manual_seed(seed)
        hidden, width = preset.hidden_size, preset.intermediate_size
        self._w13 = random_weight(num_experts, 2 * width, hidden, generator)
        self._w2 = random_weight(num_experts, hidden, width, generator)
        w13_bias = w2_bias = None
        if preset.has_bias:
            w13_bias = torch.randn(num_experts, 2 * width, device="cuda", generator=generator)
            w2_bias = torch.randn(num_experts, hidden, device="cuda", generator=generator)
        self._weights: ExpertWeights = pack_experts(
            self._w13, self._w2, preset.activation, placement, w13_bias=w13_bias, w2_bias=w2_bias, backend="cuda"
        )
        self._key: TuningKey | None = None
        self._case: _Case | None = None
        self._exact: torch.Tensor | None = None
        self._default: tuple[Launches, float] | None = None

    def prepare(self, key: TuningKey, configs: Sequence[GemmConfig]) -> None:
        """Compile the decode kernels on all cores. What fails here fails again, and is counted, when it is launched."""
        stage, device = Stage(self._weights, key.stage == "gate_up"), torch.cuda.current_device()

        def compile_one(config: GemmConfig) -> None:
            if isinstance(config, ExpertsConfig):
                with suppress(RuntimeError):
                    experts_cuda.kernel_for(stage, config, from_masks=self._has_masks(key)).prepare(device)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, configs))

    def check(self, key: TuningKey, config: GemmConfig) -> None:
        """Raise AssertionError unless a routing's output is float64's to the tolerance."""
        case = self._case_of(key)
        got = self._run(key, config, case, case.checked)
        got = dequantize(got, torch.float64) if isinstance(got, MXTensor) else got.double()
        if self._exact is None:
            self._exact = self._expected(key, case)
        expected = self._exact
        error = float((got[: len(expected)] - expected).norm() / expected.norm())
        if not error <= _TOLERANCE[key.stage]:
            raise AssertionError(f"{key}: {config} is {error:.1e} from float64")

    def time(self, key: TuningKey, config: GemmConfig) -> float:
        """Median of graph replays, in turn with the default's, whose drift is taken out."""
        case = self._case_of(key)
        if self._default is None:
            launches = self._capture(key, default_of(key), case)
            self._default = launches, time_launches({"default": launches}, _ROUNDS)["default"].us
        default, default_us = self._default
        if config == default_of(key):
            return default_us
        timings = time_launches({"default": default, "candidate": self._capture(key, config, case)}, _ROUNDS)
        return timings["candidate"].us * default_us / timings["default"].us

    def _capture(self, key: TuningKey, config: GemmConfig, case: _Case) -> Launches:
        num_routings = len(case.schedules)
        return capture_launches(lambda i: self._run(key, config, case, i), num_routings, num_routings)

    def _run(self, key: TuningKey, config: GemmConfig, case: _Case, i: int) -> MXTensor | torch.Tensor:
        # Masks are what a decode step's kernel reads; the one of many rows reads offsets.
        schedule = case.schedules[i]
        if not isinstance(config, ExpertsConfig):
            schedule = replace(schedule, expert_token_mask=None)
        try:
            if key.stage == "gate_up":
                return experts_cuda.gate_up(case.x[i], schedule, self._weights, case.scratch, config=config)
            return experts_cuda.down(case.middles[i], schedule, self._weights, case.rows, config=config)
        except RuntimeError as error:
            if any(word in str(error) for word in _NO_ROOM):
                raise CandidateError(str(error).splitlines()[0]) from error
            raise

    def _case_of(self, key: TuningKey) -> _Case:
        if key != self._key or self._case is None:
            self._key, self._case, self._exact, self._default = key, None, None, None
            self._case = self._make_case(key)
        return self._case

    def _num_tokens(self, key: TuningKey) -> int:
        share = self._preset.router.top_k * self._placement.num_local_experts / self._placement.num_experts
        return max(1, round(key.expected_rows / share))

    def _has_masks(self, key: TuningKey) -> bool:
        return self._num_tokens(key) <= MAX_FRONT_TOKENS

    def _make_case(self, key: TuningKey) -> _Case:
        """As many tokens as give the rank the rows that the key expects, where all experts are alike."""
        placement, preset, num_tokens = self._placement, self._preset, self._num_tokens(key)
        generator = torch.Generator().manual_seed(self._seed + key.expected_rows)
        on_gpu = torch.Generator("cuda").manual_seed(self._seed + key.expected_rows)
        popularity = self._popularity.double() + 1e-9 * self._popularity.double().sum()
        x, schedules = [], []
        for _ in range(_NUM_ROUTINGS if key.expected_rows < _MANY_ROWS else _NUM_ROUTINGS_OF_MANY):
            ids = torch.multinomial(popularity.expand(num_tokens, -1), preset.router.top_k, generator=generator)
            schedules.append(
                build_schedule(
                    ids.int().cuda(),
                    placement.num_local_experts,
                    num_experts=placement.num_experts,
                    expert_map=placement.expert_map,
                )
            )
            x.append(quantize_mxfp8(_random(num_tokens, preset.hidden_size, on_gpu)))
        num_rows = [int(schedule.expert_offsets[-1]) for schedule in schedules]
        middle = _random(max(1, *num_rows), preset.intermediate_size, on_gpu)
        middles = [quantize_mxfp8(middle.roll(i, 0)) for i in range(len(schedules))]
        num_slots = num_tokens * preset.router.top_k
        scratch = torch.empty(num_slots, preset.intermediate_size, device="cuda")
        rows = torch.empty(num_slots, preset.hidden_size, device="cuda")
        return _Case(num_rows.index(max(num_rows)), x, schedules, middles, scratch, rows)

    def _expected(self, key: TuningKey, case: _Case) -> torch.Tensor:
        """[R, out] float64 of the routing that is checked."""
        schedule, weights = case.schedules[case.checked], self._weights
        if key.stage == "gate_up":
            x = case.x[case.checked]
            return gate_up_float64(x, schedule, self._w13, weights.w13_bias, self._preset.activation)
        middle = dequantize(case.middles[case.checked], torch.float64)
        return down_float64(middle, schedule, self._w2, weights.w2_bias)


def _random(num_rows: int, num_columns: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(num_rows, num_columns, device="cuda", generator=generator).bfloat16()


def popularity_of(topk_ids: torch.Tensor, placement: ExpertPlacement) -> torch.Tensor:
    """[E] float. How often recorded routing chose each expert.

    topk_ids: [N, K] integer global ids; negative ones do not count.
    Raises ValueError for an id beyond the placement's, and where none is this rank's.
    """
    ids = topk_ids.flatten().long()
    if ids.numel() and int(ids.max()) >= placement.num_experts:
        raise ValueError(f"topk_ids: expected ids below {placement.num_experts}, got {int(ids.max())}")
    counts = torch.bincount(ids[ids >= 0], minlength=placement.num_experts).float()
    if not bool(counts[list(placement.expert_ids)].any()):
        raise ValueError("topk_ids: expected some ids of this rank's experts, got none")
    return counts
