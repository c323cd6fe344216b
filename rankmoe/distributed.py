"""Expert parallelism with replicated tokens: every rank routes all tokens and runs its own experts; sums are shared."""

from __future__ import annotations

import gc
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessRaisedException

from rankmoe.env import is_under_torchrun

_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class ExpertParallelGroup:
    """This process's place in an expert-parallel group.

    group: the process group, or None for a single rank.
    """

    ep_rank: int = 0
    ep_size: int = 1
    group: dist.ProcessGroup | None = None

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Add the ranks' partial sums, in place; returns the same tensor."""
        if self.group is not None:
            dist.all_reduce(partial, group=self.group)
        return partial

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor on every rank, in place; returns the same tensor."""
        if self.group is not None:
            dist.broadcast(tensor, group_src=0, group=self.group)
        return tensor

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.ep_size
        dist.all_gather_object(values, value, group=self.group)
        return values


def join_torchrun_group() -> ExpertParallelGroup:
    """Join the group that torchrun's environment describes."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    return ExpertParallelGroup(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


def launch(function: Callable[..., Any], ep_size: int, *args: Any) -> Any:
    """Run ``function(group, *args)`` on ``ep_size`` ranks and return rank 0's value.

    function: importable by name, as the ranks are fresh processes.
    Under torchrun this process is one of the ranks already, and ``ep_size`` must be the world's size; the other ranks
    return None. Otherwise one process a rank is started here; a rank that fails ends the others and its error is
    raised. A single rank runs in this process.
    """
    if is_under_torchrun():
        group = join_torchrun_group()
        try:
            if group.ep_size != ep_size:
                raise ValueError(f"ep_size: expected the started world size {group.ep_size}, got {ep_size}")
            value = function(group, *args)
        finally:
            dist.destroy_process_group()
        return value if group.ep_rank == 0 else None
    if ep_size == 1:
        return function(ExpertParallelGroup(), *args)
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(_rank_main, args=(ep_size, folder, function, args), nprocs=ep_size)
        except ProcessRaisedException as error:
            # A rank that fails closes its connections, which fails the others: the first error is the cause.
            errors = list(Path(folder).glob("error-*"))
            if not errors:
                raise
            first = min(errors, key=lambda path: path.stat().st_mtime_ns)
            raise RuntimeError(f"rank {first.name.removeprefix('error-')} failed:\n{first.read_text()}") from error
        return pickle.loads((Path(folder) / "value").read_bytes())


def _rank_main(ep_rank: int, ep_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    # Ranks on one machine share its cores; more threads than that only wait for each other.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ep_size))
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=ep_rank, world_size=ep_size, timeout=_TIMEOUT
        )
        value = function(ExpertParallelGroup(ep_rank, ep_size, dist.group.WORLD), *args)
        if ep_rank == 0:
            (Path(folder) / "value").write_bytes(pickle.dumps(value))
    except Exception:
        (Path(folder) / f"error-{ep_rank}").write_text(traceback.format_exc())
        raise
    finally:
        # A cycle that an error left, through its traceback, may hold the group; freed only when the process ends, its
        # threads would abort it.
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
