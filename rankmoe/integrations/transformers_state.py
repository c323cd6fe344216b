"""What this library has made of a Transformers experts module, and the guards that keep others from misreading it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rankmoe.distributed import ExpertParallelGroup
from rankmoe.types import ExpertPlacement, ExpertWeights

#: Name of the experts implementation.
NAME = "rankmoe"
_ATTRIBUTE = "_rankmoe_state"


@dataclass(frozen=True)
class ExpertsState:
    """State of one experts module; the default is a module as Transformers made it.

    placement, group: which experts it holds and with whom it adds partial outputs, where it is sharded.
    weights: MXFP4 experts that took the parameters' place.
    dtype, requires_grad: of the parameters before.
    """

    placement: ExpertPlacement | None = None
    group: ExpertParallelGroup | None = None
    weights: ExpertWeights | None = None
    dtype: torch.dtype | None = None
    requires_grad: bool = False


def state_of(module: nn.Module) -> ExpertsState:
    """The module's state; the default one where nothing was done to it."""
    state: ExpertsState = getattr(module, _ATTRIBUTE, _UNTOUCHED)
    return state


_UNTOUCHED = ExpertsState()


def set_state(module: nn.Module, state: ExpertsState) -> None:
    """Write the module's state. From the first time on, two guards watch what others do with the module."""
    if not hasattr(module, _ATTRIBUTE):
        module.register_forward_pre_hook(_refuse_other_implementations)
        module.register_state_dict_pre_hook(_refuse_saving)
    setattr(module, _ATTRIBUTE, state)


def _refuse_other_implementations(module: Any, arguments: Any) -> None:
    """Other implementations would miss the quantised weights, or take a sharded module's global ids for local ones."""
    state, chosen = state_of(module), module.config._experts_implementation
    if chosen != NAME and (state.weights is not None or state.placement is not None):
        what = "sharded" if state.weights is None else "MXFP4"
        raise RuntimeError(
            f"experts_implementation: expected {NAME!r} for {what} experts, got {chosen!r}; call "
            f"set_experts_implementation({NAME!r}), or dequantize_experts first where they are MXFP4 and not sharded"
        )


def _refuse_saving(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """A state dict would hold no experts, or a part of them, and nothing would say so."""
    state, name = state_of(module), prefix.removesuffix(".")
    if state.weights is not None:
        raise RuntimeError(
            f"{name}: MXFP4 experts have no place in Transformers' checkpoint; call dequantize_experts first, or save "
            "each of quantized_experts(model) by rankmoe.packed.save_packed"
        )
    if state.placement is not None:
        raise RuntimeError(f"{name}: one rank's experts are no whole checkpoint; save the model before shard_experts")
