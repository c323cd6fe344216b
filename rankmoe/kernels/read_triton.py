# mypy: disable-error-code="no-untyped-def"
"""Read the bytes of some experts once and do nothing with them: the floor of anything that must read them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rankmoe.kernels import triton_support
from rankmoe.types import ExpertSchedule

available = triton_support.available

#: Eight-byte words that a program reads, all of them in flight at once.
_WORDS_PER_BLOCK = 8192
_WARPS = 8


def num_blocks_of(experts: torch.Tensor) -> tuple[int, int]:
    """(experts, blocks an expert) of the launch for [L, words] int64 ``experts``."""
    return experts.shape[0], triton.cdiv(experts.shape[1], _WORDS_PER_BLOCK)


def read_experts(experts: torch.Tensor, schedule: ExpertSchedule, sums: torch.Tensor) -> torch.Tensor:
    """Add up the words of every expert that has a row.

    experts: [L, words] int64, contiguous.
    sums: [L, blocks] int64, as ``num_blocks_of`` says. A block's sum; what belongs to an expert without rows is left.
    Returns sums. One launch, no host sync.
    """
    with triton_support.on_device_of(experts):
        _read_kernel[num_blocks_of(experts)](
            experts,
            schedule.expert_offsets,
            sums,
            experts.shape[1],
            words_per_block=_WORDS_PER_BLOCK,
            num_warps=_WARPS,
        )
    return sums


@triton.jit
def _read_kernel(experts, expert_offsets, sums, num_words, words_per_block: tl.constexpr):
    """One block of one expert."""
    expert, block = tl.program_id(0), tl.program_id(1)
    if tl.load(expert_offsets + expert) == tl.load(expert_offsets + expert + 1):
        return
    word = block * words_per_block + tl.arange(0, words_per_block)
    source = experts + expert.to(tl.int64) * num_words + word
    total = tl.sum(tl.load(source, mask=word < num_words, other=0))
    tl.store(sums + expert * tl.num_programs(1) + block, total)
