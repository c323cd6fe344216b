"""Hugging Face Transformers: an experts implementation named ``rankmoe``; importing this module registers it.

    import rankmoe.integrations.transformers
    model.set_experts_implementation("rankmoe")  # or from_pretrained(..., experts_implementation="rankmoe")

That alone computes what the model's own experts compute, in their dtype. ``quantize_experts`` turns the weights into
MXFP4 and the computation into MXFP8 x MXFP4; ``shard_experts`` leaves one rank's experts of an expert-parallel group.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator

import torch
import transformers
from torch import nn

from rankmoe.backends import get_backend
from rankmoe.distributed import ExpertParallelGroup
from rankmoe.experts import pack_experts
from rankmoe.integrations.transformers_forward import experts_forward
from rankmoe.integrations.transformers_state import NAME, ExpertsState, set_state, state_of
from rankmoe.integrations.transformers_weights import (
    QuantizingSource,
    StoredExperts,
    find_activation,
    is_experts_module,
    parameter_names,
    restore,
    up_bias_in_checkpoint_order,
)
from rankmoe.layout import CHECKPOINT_ORDER
from rankmoe.quantize import check_group_multiple
from rankmoe.types import ExpertPlacement, ExpertWeights

try:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

    _IS_COVERED = "is_concatenated" in inspect.signature(use_experts_implementation).parameters
except ImportError:
    _IS_COVERED = False
if not _IS_COVERED:
    raise ImportError(
        "transformers: expected 5.7 or newer, whose experts modules state how gate and up lie, "
        f"got {transformers.__version__}"
    )

__all__ = ["dequantize_experts", "quantize_experts", "quantized_experts", "register", "shard_experts"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def register() -> None:
    """Make ``rankmoe`` known to Transformers as an experts implementation; once or many times is the same."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def quantize_experts(model: nn.Module, *, backend: str = "auto") -> list[str]:
    """Turn the weights of a model's experts into MXFP4, in place, and run them by ``rankmoe`` from now on.

    model: a Transformers model, on the device that it will run on. One layer at a time is packed, expert by expert,
        and its parameters are dropped before the next one.
    backend: of the expert GEMMs; its name, or ``auto`` for the preferred one.
    Returns the names of the experts modules that were quantised. Their forward is for inference only.
    Raises ValueError, before anything is changed, where the model has no experts module that passes through
    Transformers' interface, or one has weights, sizes or an activation that MXFP4 experts cannot have, naming module,
    argument, expected and got; also for a weight that the backend's arithmetic cannot hold: the modules before that
    one are quantised by then.
    """
    modules = dict(_experts_modules(model))
    activations = {}
    for name, module in modules.items():
        _check_quantizable(name, module)
        activations[name] = find_activation(name, module)
    for name, module in modules.items():
        stored = StoredExperts.of(module)
        state = state_of(module)
        try:
            weights = pack_experts(
                QuantizingSource(stored, "up"),
                QuantizingSource(stored, "down"),
                activations[name],
                state.placement or ExpertPlacement(stored.num_local_experts),
                w13_bias=up_bias_in_checkpoint_order(stored),
                w2_bias=None if stored.down_bias is None else stored.down_bias.detach().float(),
                backend=backend,
                device=stored.up.device,
            )
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        for parameter in parameter_names(module):
            delattr(module, parameter)
        dtype, requires_grad = stored.up.dtype, stored.up.requires_grad
        set_state(module, dataclasses.replace(state, weights=weights, dtype=dtype, requires_grad=requires_grad))
    _choose(model)
    return list(modules)


def quantized_experts(model: nn.Module) -> dict[str, ExpertWeights]:
    """The MXFP4 experts of a model by the name of their module; empty where nothing is quantised."""
    states = {name: state_of(module).weights for name, module in model.named_modules()}
    return {name: weights for name, weights in states.items() if weights is not None}


def dequantize_experts(model: nn.Module) -> list[str]:
    """Put the decoded MXFP4 values back as parameters of the model's own layout and dtype, in place.

    Decoding to float32 is exact; in bfloat16 it is for every scale that bfloat16 holds. A sharded model stays sharded.
    Returns the names of the modules.
    Raises ValueError where nothing is quantised, or, before anything is changed, where weights are in a layout that
    only their backend reads (``cuda``, ``humming``).
    """
    experts = quantized_experts(model)
    if not experts:
        raise ValueError("model: expected experts that quantize_experts has quantised, got none")
    for name, weights in experts.items():
        if get_backend(weights.backend).layout is not CHECKPOINT_ORDER:
            raise ValueError(
                f"{name}: expected weights in the checkpoint's order, as the backends cpu, reference and triton keep "
                f"them, got those of {weights.backend!r}"
            )
    for name, weights in experts.items():
        module = model.get_submodule(name)
        state = state_of(module)
        assert state.dtype is not None, "quantize_experts has written it"
        restore(module, weights, state.dtype, state.requires_grad)
        set_state(module, dataclasses.replace(state, weights=None, dtype=None))
    return list(experts)


def shard_experts(model: nn.Module, placement: ExpertPlacement, group: ExpertParallelGroup) -> list[str]:
    """Keep one rank's experts of every experts module, in place, and run them by ``rankmoe`` from now on.

    Every rank of the group must hold the same tokens: the router chooses among all experts, each rank computes its
    own, and the partial outputs are added in float32 over the group. For inference only. Comes before
    ``quantize_experts``, so that no rank quantises what it drops.

    placement: which of the model's experts this rank keeps: contiguous, uneven, round-robin, with redundant copies.
    group: of that size, and this process's rank in it.
    Returns the names of the experts modules.
    Raises ValueError, before anything is changed, for a placement of another group or another number of experts, and
    for experts that are sharded or quantised already.
    """
    if (group.ep_size, group.ep_rank) != (placement.ep_size, placement.ep_rank):
        raise ValueError(
            f"group: expected rank {placement.ep_rank} of {placement.ep_size} as the placement, "
            f"got rank {group.ep_rank} of {group.ep_size}"
        )
    if group.group is None and group.ep_size > 1:
        raise ValueError(f"group: expected a process group for {group.ep_size} ranks, got None")
    modules = dict(_experts_modules(model))
    for name, module in modules.items():
        _check_whole(name, module)
        if (num_experts := StoredExperts.of(module).num_local_experts) != placement.num_logical_experts:
            raise ValueError(
                f"placement: expected {num_experts} experts as {name}, got {placement.num_logical_experts}"
            )
    kept = list(placement.logical_expert_ids)
    for module in modules.values():
        for parameter in parameter_names(module):
            whole = getattr(module, parameter)
            own = whole.detach()[torch.tensor(kept, device=whole.device)]  # a copy: the whole one can be freed
            setattr(module, parameter, nn.Parameter(own, requires_grad=whole.requires_grad))
        if hasattr(module, "num_experts"):  # as Transformers' own sharding does
            setattr(module, "num_experts", len(kept))  # noqa: B010 -- a typed module takes only modules and tensors
        set_state(module, ExpertsState(placement=placement, group=group))
    _choose(model)
    return list(modules)


def _choose(model: nn.Module) -> None:
    if isinstance(model, transformers.PreTrainedModel):
        model.set_experts_implementation(NAME)


def _experts_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    found = [(name, module) for name, module in model.named_modules() if is_experts_module(module)]
    if not found:
        raise ValueError(
            "model: expected a module that passes through Transformers' experts interface "
            f"(use_experts_implementation), got none in {type(model).__name__}"
        )
    yield from found


def _check_whole(name: str, module: nn.Module) -> None:
    state = state_of(module)
    if state.placement is not None:
        raise ValueError(f"{name}: expected all experts, got those of a rank, sharded before")
    _check_not_quantized(name, module)


def _check_not_quantized(name: str, module: nn.Module) -> None:
    if state_of(module).weights is not None:
        raise ValueError(f"{name}: expected experts that are not quantised, got MXFP4 ones")
    if getattr(module, "_is_expert_parallel", False):
        raise ValueError(f"{name}: expected no expert parallelism of Transformers' own, got it; see shard_experts")
    for parameter in parameter_names(module):
        weight = getattr(module, parameter)
        if type(weight) is not nn.Parameter:  # a DTensor, a quantiser's own class
            raise ValueError(f"{name}.{parameter}: expected a plain parameter, got {type(weight).__name__}")


def _check_quantizable(name: str, module: nn.Module) -> None:
    _check_not_quantized(name, module)
    stored = StoredExperts.of(module)
    if not stored.has_gate:
        raise ValueError(f"{name}.has_gate: expected True for MXFP4 experts, got False")
    if getattr(module, "has_post_expert_norm", False):
        raise ValueError(f"{name}.has_post_expert_norm: expected False for MXFP4 experts, got True")
    if stored.up.dtype not in _DTYPES:
        raise ValueError(f"{name}: expected weights in bfloat16, float16 or float32, got {stored.up.dtype}")
    if stored.up.device.type == "meta":
        raise ValueError(f"{name}: expected weights with values, got them on the meta device")
    check_group_multiple(f"{name}, hidden_size", stored.hidden_size)
    check_group_multiple(f"{name}, intermediate_size", stored.intermediate_size)


register()
