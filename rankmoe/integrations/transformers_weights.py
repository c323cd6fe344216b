"""How a Transformers experts module stores its weights, and the way to checkpoint order (gate rows, up rows) and back.

Transformers' flags: ``is_transposed`` stores [in, out], ``is_concatenated`` gate before up (else they alternate, as in
gpt-oss), ``has_gate`` one weight for gate and up, ``has_bias`` a bias for each weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from rankmoe.activation import apply_activation
from rankmoe.quantize import dequantize, quantize_mxfp4
from rankmoe.types import Activation, ExpertWeights, MXFormat, MXTensor, SwiGLU

_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate")
# From zero to far beyond every clamp in use: two activations that agree on all pairs of these are the same.
_PROBE = (0.0, 1e-3, 0.1, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 11.0, 21.0, 60.0, 300.0, 1e3, 3e3, 1e4)


@dataclass(frozen=True)
class StoredExperts:
    """The weights as the module stores them.

    up: [L, 2 I, H] of gate and up, or [L, I, H] where there is no gate; [L, H, out] where transposed.
    down: [L, H, I], or [L, I, H] where transposed.
    up_bias, down_bias: [L, out] or None.
    """

    up: torch.Tensor
    down: torch.Tensor
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    has_gate: bool
    is_transposed: bool
    is_concatenated: bool

    @classmethod
    def of(cls, module: Any) -> StoredExperts:
        """Read a module that ``is_experts_module``, not quantised."""
        names = _names(module)
        return cls(
            up=getattr(module, names["up"]),
            down=getattr(module, names["down"]),
            up_bias=getattr(module, names["up_bias"]) if module.has_bias else None,
            down_bias=getattr(module, names["down_bias"]) if module.has_bias else None,
            has_gate=module.has_gate,
            is_transposed=module.is_transposed,
            is_concatenated=module.is_concatenated,
        )

    @property
    def num_local_experts(self) -> int:
        """L."""
        return self.up.shape[0]

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.up.shape[1 if self.is_transposed else 2]

    @property
    def intermediate_size(self) -> int:
        """I."""
        return self.down.shape[1 if self.is_transposed else 2]

    def linear(self, which: Literal["up", "down"], expert: int, rows: torch.Tensor) -> torch.Tensor:
        """[m, out] from [m, in] rows in the weights' dtype; the bias is added after the product is rounded to it."""
        weight, bias = (self.up, self.up_bias) if which == "up" else (self.down, self.down_bias)
        out = rows @ (weight[expert] if self.is_transposed else weight[expert].T)
        return out if bias is None else out + bias[expert]


def is_experts_module(module: nn.Module) -> bool:
    """Whether a module passes through Transformers' experts interface."""
    return all(hasattr(module, flag) for flag in _FLAGS)


def parameter_names(module: Any) -> list[str]:
    """Names of the parameters that hold the experts of a module that is not quantised."""
    names = _names(module)
    return [name for key, name in names.items() if module.has_bias or not key.endswith("_bias")]


def _names(module: Any) -> dict[str, str]:
    up = "gate_up_proj" if module.has_gate else "up_proj"
    return {"up": up, "down": "down_proj", "up_bias": f"{up}_bias", "down_bias": "down_proj_bias"}


def in_checkpoint_order(stored: StoredExperts, which: Literal["up", "down"], expert: int) -> torch.Tensor:
    """[out, in] in the weights' dtype. One expert's weight, all gate rows before all up rows."""
    weight = (stored.up if which == "up" else stored.down).detach()[expert]
    weight = weight.T if stored.is_transposed else weight
    return weight if which == "down" or stored.is_concatenated else _gate_first(weight, 0)


def up_bias_in_checkpoint_order(stored: StoredExperts) -> torch.Tensor | None:
    """[L, 2 I] float32 or None. The bias of gate and up, all of gate first."""
    if stored.up_bias is None:
        return None
    bias = stored.up_bias.detach().float()
    return bias if stored.is_concatenated else _gate_first(bias, 1)


def _gate_first(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Alternating gate and up along a dimension to all of gate, then all of up."""
    return values.unflatten(dim, (-1, 2)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def _alternating(values: torch.Tensor, dim: int) -> torch.Tensor:
    """The way back from ``_gate_first``."""
    return values.unflatten(dim, (2, -1)).transpose(dim, dim + 1).flatten(dim, dim + 1)


@dataclass(frozen=True)
class QuantizingSource:
    """A weight of a module with gates as ``pack_experts`` takes it; an expert is quantised when it is asked for."""

    stored: StoredExperts
    which: Literal["up", "down"]

    @property
    def shape(self) -> tuple[int, ...]:
        """(L, 2 I, H) for gate and up, (L, H, I) for down."""
        stored = self.stored
        if self.which == "up":
            return stored.num_local_experts, 2 * stored.intermediate_size, stored.hidden_size
        return stored.num_local_experts, stored.hidden_size, stored.intermediate_size

    @property
    def format(self) -> MXFormat:
        """What an expert is given out in."""
        return "mxfp4"

    def __getitem__(self, expert: int, /) -> MXTensor:
        """One expert's [out, in] weight."""
        return quantize_mxfp4(in_checkpoint_order(self.stored, self.which, expert))


def restore(module: Any, weights: ExpertWeights, dtype: torch.dtype, requires_grad: bool) -> None:
    """Give the module parameters of its own layout again, decoded expert by expert.

    weights: in checkpoint order.
    """
    names = _names(module)
    for key, source in (("up", weights.w13), ("down", weights.w2)):
        num_experts, num_outputs, num_inputs = source.shape
        shape = (num_inputs, num_outputs) if module.is_transposed else (num_outputs, num_inputs)
        values = torch.empty(num_experts, *shape, dtype=dtype, device=source.data.device)
        for expert in range(num_experts):
            decoded = dequantize(source[expert])
            if key == "up" and not module.is_concatenated:
                decoded = _alternating(decoded, 0)
            values[expert] = decoded.T if module.is_transposed else decoded
        setattr(module, names[key], nn.Parameter(values, requires_grad=requires_grad))
    for key, bias in (("up_bias", weights.w13_bias), ("down_bias", weights.w2_bias)):
        if bias is not None:
            values = _alternating(bias, 1) if key == "up_bias" and not module.is_concatenated else bias
            setattr(module, names[key], nn.Parameter(values.to(dtype), requires_grad=requires_grad))


def find_activation(name: str, module: Any) -> Activation:
    """The activation of ours that a module's ``_apply_gate`` computes, proved on values and not by its name.

    name: of the module, for the error.
    Raises ValueError where no activation of this library gives its values.
    """
    limit = next((float(v) for v in _options(module, "limit", "swiglu_limit") if 0 < v < math.inf), None)
    alpha = next((float(v) for v in _options(module, "alpha", "swiglu_alpha")), 1.0)
    device = module.down_proj.device
    values = torch.tensor([-v for v in _PROBE] + list(_PROBE), device=device)
    gate, up = torch.cartesian_prod(values, values).T
    gate_up = torch.cat([gate, up])[None]
    with torch.no_grad():
        got = module._apply_gate(gate_up if module.is_concatenated else _alternating(gate_up, 1)).double()
    for candidate in (SwiGLU(), SwiGLU(limit=limit), SwiGLU(alpha=alpha, limit=limit, up_offset=1.0)):
        if torch.allclose(got, apply_activation(gate_up.double(), candidate), rtol=1e-5, atol=1e-6):
            return candidate
    raise ValueError(
        f"{name}._apply_gate: expected SwiGLU as rankmoe.SwiGLU states it, got another function of gate and up from "
        f"{type(module).__name__} with act_fn {type(getattr(module, 'act_fn', None)).__name__}"
    )


def _options(module: Any, *names: str) -> list[float]:
    values = [getattr(module, name, None) for name in names]
    return [value for value in values if isinstance(value, int | float)]
