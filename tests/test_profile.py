"""What `rankmoe tune` runs on a GPU, and recorded routing as its input."""

import dataclasses

import pytest
import torch

from rankmoe import tuned
from rankmoe.bench.profile import GpuProfiler, popularity_of
from rankmoe.kernels import experts_common, experts_cuda
from rankmoe.kernels.experts_cuda import ExpertsConfig
from rankmoe.models.presets import get_preset
from rankmoe.tuning import CandidateError, candidates_of, plan_keys, tune
from rankmoe.types import ExpertPlacement, RouterConfig

needs_gpu = pytest.mark.skipif(not experts_cuda.available(), reason="needs a Hopper or Blackwell GPU, NVRTC")
SMALL = dataclasses.replace(
    get_preset("gpt-oss-120b"), num_experts=16, hidden_size=288, intermediate_size=160, router=RouterConfig(4)
)
PLACEMENT = ExpertPlacement(16, 4, 1)


def test_popularity_is_how_often_each_expert_was_chosen():
    ids = torch.tensor([[4, 5], [5, 0], [7, -1]])
    assert popularity_of(ids, PLACEMENT).tolist() == [1, 0, 0, 0, 1, 2, 0, 1] + 8 * [0]


def test_recorded_routing_of_another_model_or_rank_is_refused():
    with pytest.raises(ValueError, match="topk_ids: expected ids below 16, got 16"):
        popularity_of(torch.tensor([[16]]), PLACEMENT)
    with pytest.raises(ValueError, match="topk_ids: expected some ids of this rank's experts, got none"):
        popularity_of(torch.tensor([[0, 1]]), PLACEMENT)


@pytest.mark.gpu
@needs_gpu
def test_a_search_checks_and_times_every_candidate_and_the_choice_is_found_again(tmp_path):
    keys = plan_keys(SMALL, PLACEMENT, [64], experts_common.architecture(torch.device("cuda")))
    profiler = GpuProfiler(SMALL, PLACEMENT, torch.tensor([1.0, 2.0, 0.0, 5.0]).repeat(4))
    report = tune(keys, profiler, tmp_path / "tuned.json", "f" * 64)
    assert [result.key for result in report.tuned] == sorted(keys)
    for result in report.tuned:
        assert [c.config for c in result.candidates] == candidates_of(result.key)
        assert all(c.us is None or c.us > 0 for c in result.candidates)
    assert tuned.read_file(tmp_path / "tuned.json", "f" * 64).keys() == {str(key) for key in keys}
    assert tune(keys, profiler, tmp_path / "tuned.json", "f" * 64).tuned == []


@pytest.mark.gpu
@needs_gpu
def test_a_candidate_that_does_not_fit_is_a_failure_and_a_wrong_output_is_an_error(monkeypatch):
    key = plan_keys(SMALL, PLACEMENT, [8], experts_common.architecture(torch.device("cuda")))[0]
    profiler = GpuProfiler(SMALL, PLACEMENT)
    with pytest.raises(CandidateError):
        profiler.check(key, ExpertsConfig(warps=16, depth=32))
    profiler.check(key, candidates_of(key)[0])
    monkeypatch.setattr(profiler, "_exact", torch.ones(1, 160, device="cuda").double())
    with pytest.raises(AssertionError, match="from float64"):
        profiler.check(key, candidates_of(key)[0])
