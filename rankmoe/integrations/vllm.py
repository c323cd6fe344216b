"""vLLM: a quantisation named ``rankmoe`` for MXFP4 checkpoints; vLLM calls ``register`` through its plugin entry point.

    vllm serve MODEL --quantization rankmoe --enable-expert-parallel

Written for vLLM 0.33.0; contracts/ holds the names. Every process of vLLM's loads this module at its start, so it
imports little; the experts are in ``vllm_method``.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

NAME = "rankmoe"
#: What vLLM calls the checkpoints that its ``Mxfp4MoEMethod`` loads; Kimi-K3's compressed-tensors is renamed to it.
_MXFP4 = "mxfp4"
_is_registered = False


def register() -> None:
    """Register the quantisation; once or many times is the same.

    The entry point ``rankmoe`` of the group ``vllm.general_plugins``; vLLM calls it in each of its processes.
    """
    global _is_registered
    if not _is_registered:
        _is_registered = True
        register_quantization_config(NAME)(RankmoeConfig)


class RankmoeConfig(QuantizationConfig):
    """An MXFP4 checkpoint: experts by rankmoe, everything else unquantised, as vLLM's own ``Mxfp4Config`` has it."""

    @classmethod
    def get_name(cls) -> str:
        """What ``--quantization`` takes."""
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Rows are quantised from bfloat16."""
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Hopper, whose kernels these are."""
        return 90

    @staticmethod
    def get_config_filenames() -> list[str]:
        """The checkpoint's own configuration says all."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> RankmoeConfig:
        """Nothing of the checkpoint's quantisation is an option here."""
        return cls()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Take an MXFP4 checkpoint where the user asks for it by name, and no other."""
        is_mxfp4 = isinstance(hf_quant_cfg, dict) and hf_quant_cfg.get("quant_method") == _MXFP4
        return NAME if user_quant == NAME and is_mxfp4 else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of a layer; None where it has no weights of its own to quantise."""
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

        if isinstance(layer, RoutedExperts):
            from rankmoe.integrations.vllm_method import RankmoeMoEMethod

            return RankmoeMoEMethod(layer.moe_config)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
