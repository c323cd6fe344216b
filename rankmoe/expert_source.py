"""One weight of a rank's experts, handed out one expert at a time."""

from __future__ import annotations

from typing import Protocol

import torch

from rankmoe.types import GROUP_SIZE, MXFormat, MXTensor


class ExpertSource(Protocol):
    """What ``pack_experts`` reads: an ``MXTensor`` [L, out, in], or something that fetches each expert when asked."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[L, out, in], counted in elements."""

    @property
    def format(self) -> MXFormat:
        """Of every expert."""

    def __getitem__(self, index: int, /) -> MXTensor:
        """[out, in] of one expert."""


def stack_experts(source: ExpertSource, device: torch.device) -> MXTensor:
    """All experts of a source in checkpoint order on a device, contiguous.

    A contiguous tensor that is there already is not copied; else at most one expert is held beside the result.
    """
    if isinstance(source, MXTensor):
        moved = source.to(device)
        return MXTensor(moved.data.contiguous(), moved.scale.contiguous(), moved.format)
    *shape, num_inputs = source.shape
    data = torch.empty(*shape, num_inputs // 2, dtype=torch.uint8, device=device)
    scale = torch.empty(*shape, num_inputs // GROUP_SIZE, dtype=torch.uint8, device=device)
    for expert in range(shape[0]):
        own = source[expert]
        data[expert], scale[expert] = own.data, own.scale
    return MXTensor(data, scale, source.format)
