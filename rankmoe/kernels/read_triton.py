# mypy: disable-error-code="no-untyped-def"
"""Read the bytes of some experts once and do nothing with them: the floor of anything that must read them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rankmoe.kernels import triton_support

available = triton_support.available

#: Eight-byte words that a program reads, all of them in flight at once.
_WORDS_PER_BLOCK = 8192
_WARPS = 8


def num_blocks_of(experts: torch.Tensor) -> int:
    """Blocks that read one expert of [L, words] int64."""
    return triton.cdiv(experts.shape[1], _WORDS_PER_BLOCK)


def read_experts(experts: torch.Tensor, active: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Add up the words of some experts.

    experts: [L, words] int64, contiguous.
    active: [A] int64. The experts to read; no block is launched for another one.
    sums: [A, blocks] int64, blocks as ``num_blocks_of`` says. A block's sum.
    Returns sums. One launch, no host sync.
    """
    with triton_support.on_device_of(experts):
        _read_kernel[(active.shape[0], num_blocks_of(experts))](
            experts,
            active,
            sums,
            experts.shape[1],
            words_per_block=_WORDS_PER_BLOCK,
            num_warps=_WARPS,
        )
    return sums


@triton.jit
def _read_kernel(experts, active, sums, num_words, words_per_block: tl.constexpr):
    """One block of one expert."""
    expert, block = tl.load(active + tl.program_id(0)), tl.program_id(1)
    word = block * words_per_block + tl.arange(0, words_per_block)
    total = tl.sum(tl.load(experts + expert * num_words + word, mask=word < num_words, other=0))
    tl.store(sums + tl.program_id(0) * tl.num_programs(1) + block, total)
