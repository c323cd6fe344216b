"""How a backend's packed weights lie in memory: what saving and loading them need to know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from rankmoe.types import ExpertSource, MXTensor


@dataclass(frozen=True)
class Layout:
    """One layout of a weight [L, out, in].

    version: another one whenever the same weights would get other bytes or places; a saved file is read with its own
        version only.
    empty: (shape, device) to an uninitialised weight; nothing is allocated on the meta device.
    buffers: the contiguous-by-expert buffers [L, ...] that hold all of a weight, by name. Raises ValueError for
        something that was not made by ``empty``.
    factor_dtypes: what a factor beside the weight may be: its dtype by its number of dimensions, 1 for [L] and 2 for
        [L, out]; 0 where there may be none.
    """

    version: str
    empty: Callable[[tuple[int, ...], torch.device], MXTensor]
    buffers: Callable[[MXTensor], dict[str, torch.Tensor]]
    factor_dtypes: Mapping[int, torch.dtype | None]


#: Codes and scales apart, rows as the checkpoint has them.
CHECKPOINT_ORDER = Layout(
    version="checkpoint/1",
    empty=MXTensor.empty,
    buffers=lambda weight: {"data": weight.data, "scale": weight.scale},
    factor_dtypes={0: None},
)


def in_checkpoint_order(source: ExpertSource, device: torch.device) -> MXTensor:
    """All experts of a source on a device; nothing is copied where they are there."""
    if isinstance(source, MXTensor):
        return source.to(device)
    weight = MXTensor.empty(source.shape, device)
    for expert in range(source.shape[0]):
        _fill(weight, expert, source)
    return weight


def _fill(weight: MXTensor, expert: int, source: ExpertSource) -> None:
    # In a function of its own, so that no expert is held while the next one is fetched.
    own = source[expert]
    weight.data[expert] = own.data
    weight.scale[expert] = own.scale
