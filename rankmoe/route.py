"""Router logits to experts and weights, for every routing family that the served models use.

The rules, in order: score, rank value (score + bias), groups, top-k with ties to the smaller id, slots in ascending id,
weights from the scores. See docs/numerics.md.
"""

from __future__ import annotations

import torch

from rankmoe.backends import cuda_kernel, triton_kernel
from rankmoe.quantize import needs_gradient, valid_rows
from rankmoe.types import RouterConfig, Routing, widen_ids

_NAN_RANK_VALUE = -1e30
_INELIGIBLE = torch.iinfo(torch.int32).min  # below the key of every float, -inf included


def route(
    router_logits: torch.Tensor,
    config: RouterConfig,
    correction_bias: torch.Tensor | None = None,
    num_valid_tokens: torch.Tensor | None = None,
) -> Routing:
    """Choose each token's experts.

    router_logits: [T, E] float32 or bfloat16, inner stride 1, any row stride.
    correction_bias: [E] float32 or None. Added to the scores for ranking only.
    num_valid_tokens: [1] integer or None. Rows from this one on get ids -1 and weights 0.
    Returns topk_weights [T, K] float32 and topk_ids [T, K] int32, ids distinct in a row whatever the logits hold.
    Raises TypeError for a dtype, ValueError for a shape or stride that does not fit.
    """
    check_router_inputs(router_logits, config, correction_bias)
    routing = _route_on_gpu(router_logits, config, correction_bias, num_valid_tokens)
    if routing is not None:
        return routing
    logits = router_logits.float()
    if config.scoring == "sigmoid":
        # In float64 and rounded once: torch's float32 sigmoid differs in the last bit between the vectorised part of a
        # tensor and its tail, which would make a token's weights depend on its place in the batch.
        scores = logits.double().sigmoid().float()
    elif config.scoring == "softmax":
        scores = logits.softmax(-1)
    else:
        scores = logits  # ranked as they are; softmax follows on the selected ones
    keys = _rank_keys(scores if correction_bias is None else scores + correction_bias)
    if config.num_expert_groups > 1:
        keys = _keep_best_groups(keys, config)
    # A stable descending sort leaves equal keys in ascending id.
    topk_ids = keys.sort(dim=-1, descending=True, stable=True).indices[:, : config.top_k]
    if config.slot_order == "id":
        topk_ids = topk_ids.sort(dim=-1).values
    selected = scores.gather(-1, topk_ids)
    if config.scoring == "softmax_selected":
        selected = selected.softmax(-1)
    weights = _weights(selected, config)
    routing = Routing(weights, topk_ids.int())
    return routing if num_valid_tokens is None else mask_padding(routing, num_valid_tokens)


def _route_on_gpu(
    router_logits: torch.Tensor,
    config: RouterConfig,
    correction_bias: torch.Tensor | None,
    num_valid_tokens: torch.Tensor | None,
) -> Routing | None:
    """By the kernel that the front uses too, so that both give the same bits; None without one, or for training."""
    device = router_logits.device
    if device.type != "cuda" or needs_gradient(router_logits):
        return None
    no_rows = router_logits.new_empty(router_logits.shape[0], 0)
    kernel = cuda_kernel("front", device)
    if kernel is not None and kernel.covered(router_logits, no_rows, config, "none"):
        buffers = kernel.allocate_buffers(
            router_logits.shape[0], config.top_k, 0, 0, device, packed=False, schedule="none"
        )
        kernel.launch_front(
            router_logits,
            no_rows,
            config,
            buffers,
            correction_bias=correction_bias,
            num_local_experts=0,
            num_valid_tokens=num_valid_tokens,
        )
        return buffers.routing()
    kernel = triton_kernel("route", device)
    if kernel is not None and kernel.covered(router_logits, config):
        return kernel.route(router_logits, config, correction_bias, num_valid_tokens=num_valid_tokens)
    return None


def mask_padding(routing: Routing, num_valid_tokens: torch.Tensor) -> Routing:
    """Give the rows from ``num_valid_tokens`` ([1] integer) on ids -1 and weights 0, in the packed ids too."""
    is_valid = valid_rows(routing.topk_ids.shape[0], num_valid_tokens, routing.topk_ids.device)
    packed = routing.packed
    if packed is not None:
        no_expert = torch.full((packed.shape[1],), -1, dtype=torch.int32, device=packed.device)
        if routing.local_range is not None:  # as any foreign id
            no_expert = torch.arange(packed.shape[1], dtype=torch.int32, device=packed.device)
            no_expert += routing.local_range.count
        packed = torch.where(is_valid, packed, no_expert << 16)
    return Routing(
        torch.where(is_valid, routing.topk_weights, 0.0),
        torch.where(is_valid, widen_ids(routing.topk_ids), -1).int(),
        packed,
        routing.local_range,
    )


def _rank_keys(rank_values: torch.Tensor) -> torch.Tensor:
    """int32 keys in the order of the float32 rank values: NaN as -1e30, -0.0 equal to +0.0."""
    sanitized = torch.where(rank_values.isnan(), _NAN_RANK_VALUE, rank_values) + 0.0
    bits = sanitized.view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _values_of_keys(keys: torch.Tensor) -> torch.Tensor:
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).view(torch.float32)


def _keep_best_groups(keys: torch.Tensor, config: RouterConfig) -> torch.Tensor:
    """Make every expert outside the best ``topk_groups`` groups ineligible."""
    grouped = keys.unflatten(-1, (config.num_expert_groups, -1))
    best_two = _values_of_keys(grouped.topk(min(2, grouped.shape[-1]), dim=-1).values)
    group_keys = _rank_keys(best_two.sum(-1))
    best_groups = group_keys.sort(dim=-1, descending=True, stable=True).indices[:, : config.topk_groups]
    is_kept = torch.zeros_like(group_keys, dtype=torch.bool).scatter_(-1, best_groups, True)
    return torch.where(is_kept[..., None], grouped, _INELIGIBLE).flatten(-2)


def _weights(selected: torch.Tensor, config: RouterConfig) -> torch.Tensor:
    if config.renormalize:
        total = selected[:, 0].clone()
        for slot in range(1, config.top_k):  # slot order is part of the rule
            total = total + selected[:, slot]
        selected = selected / torch.where(total > 0, total, 1.0)[:, None]
    return selected * config.routed_scaling_factor if config.routed_scaling_factor != 1.0 else selected


def check_router_inputs(
    router_logits: torch.Tensor, config: RouterConfig, correction_bias: torch.Tensor | None
) -> None:
    """Raise TypeError or ValueError unless the router's inputs have the dtypes, shapes and strides of ``route``."""
    if router_logits.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"router_logits: expected float32 or bfloat16, got {router_logits.dtype}")
    if router_logits.dim() != 2:
        raise ValueError(f"router_logits: expected [num_tokens, num_experts], got {tuple(router_logits.shape)}")
    num_experts = router_logits.shape[1]
    if router_logits.stride(1) != 1 and num_experts > 1:
        raise ValueError(f"router_logits: expected inner stride 1, got strides {router_logits.stride()}")
    config.validate(num_experts)
    if correction_bias is not None:
        if correction_bias.dtype != torch.float32:
            raise TypeError(f"correction_bias: expected float32, got {correction_bias.dtype}")
        if tuple(correction_bias.shape) != (num_experts,):
            raise ValueError(f"correction_bias: expected ({num_experts},), got {tuple(correction_bias.shape)}")
