"""Which configuration the native GEMMs launch, on a GPU that is only made believe: nothing is compiled or launched."""

import contextlib
from typing import Any

import pytest
import torch
from helpers import random_batch, random_mxfp4

from rankmoe import tuned
from rankmoe.front import route_quantize
from rankmoe.kernels import combine_cuda, experts_common, experts_cuda, experts_grouped_cuda, nvrtc
from rankmoe.kernels.experts_cuda import ExpertsConfig, config_values
from rankmoe.kernels.experts_grouped_cuda import DEFAULT_CONFIG, GroupedConfig
from rankmoe.models.presets import ModelPreset
from rankmoe.schedule import build_schedule
from rankmoe.tuning import plan_keys
from rankmoe.types import ExpertPlacement, ExpertSchedule, ExpertWeights, RouterConfig, SiTU

HIDDEN, INTERMEDIATE = 256, 128
PLACEMENT = ExpertPlacement(32, 4, 1)
_H200 = {
    "num_multiprocessors": lambda device: 132,
    "device_name": lambda device: "NVIDIA H200",
    "architecture": lambda device: "sm_90",
}
MANY, FEW = ExpertsConfig(), ExpertsConfig(16, 1, 8, 2, 1, 1)


@pytest.fixture
def launches(monkeypatch, tmp_path) -> list[tuple[str, dict[str, Any], int, int]]:
    """What would be launched: kernel, macros, blocks, threads."""
    recorded: list[tuple[str, dict[str, Any], int, int]] = []

    def record(self, device, num_blocks, num_threads, arguments, is_programmatic=None) -> None:
        recorded.append((self.name, dict(self.macros), num_blocks, num_threads))

    monkeypatch.setattr(nvrtc.Kernel, "launch", record)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    for module, values in (
        (experts_common, _H200),
        (combine_cuda, {"combine_masks": lambda *arguments, **options: "combined"}),
    ):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setenv("RANKMOE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("RANKMOE_BATCH_INVARIANT", raising=False)
    tuned.forget()
    return recorded


def make_weights() -> ExpertWeights:
    w13 = random_mxfp4(8, 2 * INTERMEDIATE, HIDDEN, scale_bytes=(117, 123))
    w2 = random_mxfp4(8, HIDDEN, INTERMEDIATE, scale_bytes=(117, 123))
    packed = experts_cuda.pack(w13, w2, torch.device("cpu"))
    return ExpertWeights(packed.w13, packed.w2, SiTU(), PLACEMENT, "cuda")


def run_gemms(num_tokens: int, weights: ExpertWeights, rank_local: bool = True) -> ExpertSchedule:
    hidden_states, logits = random_batch(num_tokens, 32, HIDDEN)
    front = route_quantize(
        logits, hidden_states, RouterConfig(4), local_range=PLACEMENT.local_range, rank_local=rank_local
    )
    schedule = front.schedule or build_schedule(front.routing.topk_ids, 8, num_experts=32, local_expert_offset=8)
    buffers = (torch.empty(num_tokens * 4, width) for width in (INTERMEDIATE, HIDDEN))
    experts_cuda.gemms(front.x, schedule, weights, *buffers)
    return schedule


def configs(launches: list[tuple[str, dict[str, Any], int, int]]) -> list[ExpertsConfig | GroupedConfig]:
    """The configurations of the GEMMs among the launches, their grids checked."""
    found: list[ExpertsConfig | GroupedConfig] = []
    for name, macros, num_blocks, num_threads in launches:
        if name == "experts":
            fields = ("WARPS", "DEPTH", "ROWS", "FINISHERS", "BUFFERS", "BLOCKS")
            config = ExpertsConfig(*(macros[field] for field in fields))
            assert (num_blocks, num_threads) == (132 * config.blocks, 32 * (config.warps + config.finishers))
        elif name == "experts_grouped":
            config = GroupedConfig(*(macros[field] for field in ("COLUMNS", "GROUPS", "GROUP_TILES", "STAGES")))
            assert (num_blocks, num_threads) == (132, config.num_threads)
        else:
            assert name == "widen_rows"
            continue
        found.append(config)
    return found


# A quarter of the slots is this rank's: 1 to 4 tokens of 4 are 1 to 4 rows, 64 tokens 64, 65 tokens 65, 8 an expert.
@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(1, FEW), (4, FEW), (5, MANY), (64, MANY), (65, DEFAULT_CONFIG), (300, DEFAULT_CONFIG)]
)
@pytest.mark.parametrize("rank_local", [True, False])
def test_the_heuristic_goes_by_the_rows_that_shapes_let_expect(launches, num_tokens, expected, rank_local):
    run_gemms(num_tokens, make_weights(), rank_local)
    assert configs(launches) == [expected, expected]
    assert sum(name == "widen_rows" for name, *_ in launches) == (2 if expected == DEFAULT_CONFIG else 0)


@pytest.mark.parametrize("num_tokens", [1, 64, 65, 300])
def test_the_batch_invariant_mode_has_one_configuration_whatever_was_tuned(launches, num_tokens, monkeypatch):
    monkeypatch.setenv("RANKMOE_BATCH_INVARIANT", "1")
    weights = make_weights()
    key = experts_cuda.tuning_key(experts_common.Stage(weights, True), num_tokens * 4, torch.device("cpu"))
    with tuned.use({key: config_values(FEW)}):
        run_gemms(num_tokens, weights)
    assert configs(launches) == [MANY, MANY]


def test_a_tuned_configuration_is_launched_for_its_own_gemm_alone(launches):
    weights, other = make_weights(), ExpertsConfig(8, 1, 8, 1, 2, 1)
    key = experts_cuda.tuning_key(experts_common.Stage(weights, False), 16 * 4, torch.device("cpu"))
    with tuned.use({key: config_values(other)}):
        run_gemms(16, weights)
        run_gemms(17, weights)  # another power of two of rows
    assert configs(launches) == [MANY, other, MANY, MANY]


@pytest.mark.parametrize("tuned_to", [ExpertsConfig(16, 8, 8, 2, 1, 2), DEFAULT_CONFIG])
def test_a_tuned_configuration_that_does_not_fit_the_call_is_passed_over(launches, tuned_to):
    weights = make_weights()
    key = experts_cuda.tuning_key(experts_common.Stage(weights, True), 16 * 4, torch.device("cpu"))
    with tuned.use({key: config_values(tuned_to)}):  # too large; or for offsets where there are masks
        run_gemms(16, weights)
    assert configs(launches) == [MANY, MANY]


def test_the_masked_layer_launches_both_gemms_and_hands_on_to_the_combine(launches):
    weights = make_weights()
    hidden_states, logits = random_batch(3, 32, HIDDEN)
    front = route_quantize(logits, hidden_states, RouterConfig(4), local_range=PLACEMENT.local_range, schedule="masks")
    buffers = (torch.empty(12, width) for width in (INTERMEDIATE, HIDDEN))
    out = experts_cuda.masked(front.x, front.routing, front.expert_token_mask, weights, *buffers, torch.bfloat16)
    assert out == "combined"
    assert configs(launches) == [FEW, FEW]
    assert [macros["FROM_MASKS"] for _, macros, *_ in launches] == [1, 1]


def test_kernels_of_many_rows_are_for_hopper_alone():
    for architecture, expected in (("sm_90", True), ("sm_100", False)):
        assert experts_grouped_cuda.is_chosen(64, 8, architecture) is expected
    assert not experts_grouped_cuda.is_chosen(63, 8, "sm_90")


@pytest.mark.parametrize("num_tokens", [1, 7, 64, 300])
def test_a_plans_keys_are_those_that_launches_look_up(launches, num_tokens):
    weights, device = make_weights(), torch.device("cpu")
    preset = ModelPreset("small", 32, HIDDEN, INTERMEDIATE, 1, RouterConfig(4), SiTU())
    stages = (experts_common.Stage(weights, is_gate_up) for is_gate_up in (True, False))
    looked_up = [experts_cuda.tuning_key(stage, num_tokens * 4, device) for stage in stages]
    assert plan_keys(preset, PLACEMENT, [num_tokens], "sm_90")[-2:] == looked_up
