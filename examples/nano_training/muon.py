"""Muon for the matrices, AdamW for what is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nano_training.model import Nano


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal per matrix (Newton-Schulz), scaled to the size of an AdamW update.

    See K. Jordan's Muon and, for the 0.2 * sqrt(max(rows, columns)) scale, "Muon is Scalable for LLM Training".

    matrix_shapes: (rows, columns) of the single matrices in a parameter that stacks them along its rows, such as
        [E, 2 I, H] of gate and up matrices. Others are matrices of their last two dimensions.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
        matrix_shapes: Mapping[nn.Parameter, tuple[int, int]] | None = None,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.matrix_shapes = dict(matrix_shapes or {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Returns what the closure, called first, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            same_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(state["momentum"], group["momentum"])
                shape = self.matrix_shapes.get(parameter, (parameter.shape[-2], parameter.shape[-1]))
                same_shape.setdefault(shape, []).append((parameter, update.reshape(-1, *shape)))
            for (rows, columns), members in same_shape.items():
                updates = orthogonalize(torch.cat([update for _, update in members]))
                scale = 0.2 * max(rows, columns) ** 0.5
                parts = updates.split([update.shape[0] for _, update in members])
                for (parameter, _), update in zip(members, parts, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update.reshape(parameter.shape).to(parameter.dtype), alpha=-group["lr"] * scale)
        return loss


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of [N, rows, columns] towards 1 by a quintic Newton-Schulz iteration (bf16 on a GPU)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    is_tall = x.shape[1] > x.shape[2]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


def make_optimizers(model: Nano, lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the embedding and the norms."""
    matrices, others, undecayed = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            undecayed.append(parameter)
        elif name == "embed_tokens.weight":
            others.append(parameter)
        else:
            matrices.append(parameter)
    w13_shape = (model.config.moe_intermediate_size, model.config.routed_expert_hidden_size)
    matrix_shapes = {block.experts.w13: w13_shape for block in model.moe_blocks}
    groups = [{"params": others, "weight_decay": weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=model.embed_tokens.weight.is_cuda)
    return [Muon(matrices, lr, weight_decay, matrix_shapes=matrix_shapes), adam]
