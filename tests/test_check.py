"""The proof passes on a correct library, and catches a broken one."""

from __future__ import annotations

import pytest
import torch

import rankmoe.front
import rankmoe.pack
from rankmoe.check import ID_EP_SIZES, OUTPUT_EP_SIZES, CheckResult, run_checks
from rankmoe.types import LocalRange


def test_every_comparison_holds_and_none_is_empty() -> None:
    results = list(run_checks())
    assert [r.ep_size for r in results] == [*ID_EP_SIZES, *OUTPUT_EP_SIZES]
    assert all(result.passed for result in results), results
    # 2 ranks of EP 2 and 3 ranks of EP 8 and 16, times 64 token counts; all ranks times 9 token counts.
    assert [r.num_comparisons for r in results] == [128, 192, 192, 18, 36, 72, 144]


def test_a_row_without_comparisons_does_not_pass() -> None:
    assert not CheckResult("nothing", 2, "", 0, None).passed


def _off_by_one(ids: torch.Tensor, local_range: LocalRange, num_experts: int) -> torch.Tensor:
    """Owned ids of the neighbouring expert."""
    relabelled = _CORRECT(ids, local_range, num_experts)
    return torch.where(relabelled < local_range.count, (relabelled + 1) % local_range.count, relabelled)


def _foreign_as_owned(ids: torch.Tensor, local_range: LocalRange, num_experts: int) -> torch.Tensor:
    """Foreign ids that land on this rank's experts."""
    return _CORRECT(ids, local_range, num_experts) % local_range.count


def _foreign_all_alike(ids: torch.Tensor, local_range: LocalRange, num_experts: int) -> torch.Tensor:
    """Foreign ids that are not distinct: the output is right, the wire format is not."""
    return _CORRECT(ids, local_range, num_experts).clamp(max=local_range.count)


_CORRECT = rankmoe.pack.rank_local_ids


@pytest.mark.parametrize("broken", [_off_by_one, _foreign_as_owned, _foreign_all_alike])
def test_a_broken_relabelling_is_caught(monkeypatch: pytest.MonkeyPatch, broken: object) -> None:
    monkeypatch.setattr(rankmoe.pack, "rank_local_ids", broken)
    results = list(run_checks())
    id_rows, output_rows = results[: len(ID_EP_SIZES)], results[len(ID_EP_SIZES) :]
    assert not any(result.passed for result in id_rows)
    assert all("rank-local ids" in str(result.failure) for result in id_rows)
    assert all(result.passed for result in output_rows) == (broken is _foreign_all_alike)


def test_a_form_that_changes_the_schedule_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = rankmoe.front.id_space

    def broken(routing, num_experts, local_range):
        space = correct(routing, num_experts, local_range)
        # The consumer takes the rank's range to begin one expert later, and drops the first one.
        return rankmoe.pack.IdSpace(space.num_experts, 1) if routing.local_range else space

    monkeypatch.setattr(rankmoe.front, "id_space", broken)
    results = list(run_checks())
    assert not all(result.passed for result in results)
