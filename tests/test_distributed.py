import os

import pytest
import torch
from helpers import assert_bitwise_equal, random_experts
from torch.multiprocessing.spawn import ProcessRaisedException

from rankmoe.distributed import ExpertParallelGroup, launch
from rankmoe.models.kimi_k3 import KimiK3MoE, KimiK3MoEConfig
from rankmoe.types import ExpertPlacement, RouterConfig

CONFIG = KimiK3MoEConfig(64, 32, 16, 32, 64, router=RouterConfig(4))


# The ranks are fresh processes that import these functions by name.
def block_output(group: ExpertParallelGroup, rank_local: bool) -> list[torch.Tensor]:
    """Every rank's output of one block, whose experts are spread over the group."""
    torch.manual_seed(0)
    block = KimiK3MoE(CONFIG, group, rank_local=rank_local, reduce_dtype=torch.float32)
    placement = ExpertPlacement(CONFIG.num_experts, group.ep_size, group.ep_rank)
    block.bind_experts(random_experts(placement, hidden_size=32))
    with torch.no_grad():
        return group.gather_objects(block(torch.randn(5, CONFIG.hidden_size)))


def process_and_sum(group: ExpertParallelGroup, values: list[float]) -> tuple[int, list[float], list[torch.Tensor]]:
    total = group.all_reduce(torch.tensor([values[group.ep_rank]])).tolist()
    return os.getpid(), total, block_output(group, rank_local=True)


def fail_on_the_last_rank(group: ExpertParallelGroup) -> None:
    if group.ep_rank == group.ep_size - 1:
        raise ValueError("this rank has no experts")
    group.all_reduce(torch.zeros(1))  # waits for the rank that failed


def test_two_ranks_sum_over_gloo_and_give_the_single_ranks_layer():
    process, total, outputs = launch(process_and_sum, 2, [0.25, 4.0])
    assert process != os.getpid()
    assert total == [4.25]
    assert_bitwise_equal(outputs[0], outputs[1])
    (alone,) = launch(block_output, 1, False)
    torch.testing.assert_close(outputs[0], alone, rtol=1e-5, atol=1e-5)


def test_an_error_in_one_rank_ends_the_others_and_is_raised_here():
    with pytest.raises(Exception, match="this rank has no experts"):
        launch(fail_on_the_last_rank, 2)


def test_an_error_before_the_ranks_have_joined_is_raised_as_it_is(monkeypatch):
    def fail(*arguments: object, **options: object) -> None:
        raise ProcessRaisedException("no free port", 0, 1)

    monkeypatch.setattr(torch.multiprocessing, "spawn", fail)
    with pytest.raises(Exception, match="no free port"):
        launch(process_and_sum, 2, [0.25, 4.0])


def test_a_single_rank_runs_in_this_process():
    process, total, outputs = launch(process_and_sum, 1, [0.25])
    assert (process, total, len(outputs)) == (os.getpid(), [0.25], 1)


@pytest.fixture
def torchrun_of_one(monkeypatch, tmp_path):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("torchrun_of_one")
def test_under_torchrun_this_process_is_one_of_the_ranks():
    process, total, _ = launch(process_and_sum, 1, [0.25])
    assert (process, total) == (os.getpid(), [0.25])
    assert not torch.distributed.is_initialized()


@pytest.mark.usefixtures("torchrun_of_one")
def test_another_number_of_ranks_than_torchrun_started_is_refused():
    with pytest.raises(ValueError, match="ep_size: expected the started world size 1, got 2"):
        launch(process_and_sum, 2, [0.25, 4.0])
    assert not torch.distributed.is_initialized()
