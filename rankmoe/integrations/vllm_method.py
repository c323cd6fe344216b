"""vLLM's MXFP4 experts run by rankmoe: the method of a layer, and the experts behind its modular kernel.

Imported by ``rankmoe.integrations.vllm`` when the first layer is made, since it brings in vLLM's kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod

from rankmoe.integrations import vllm_experts
from rankmoe.integrations.mxfp4_layers import free_loaded
from rankmoe.kernels import experts_cuda
from rankmoe.types import ExpertWeights


class RankmoeMoEMethod(Mxfp4MoEMethod):
    """vLLM's own loading of MXFP4 experts; packed and run by rankmoe."""

    supports_pre_processed_weights = False

    def __init__(self, moe: Any) -> None:
        # Not Mxfp4MoEMethod's, which chooses among vLLM's kernels.
        FusedMoEMethodBase.__init__(self, moe)
        self.experts_cls = RankmoeExperts
        vllm_experts.activation_of(moe)  # before weights are loaded

    @property
    def supports_eplb(self) -> bool:
        """Packed experts cannot be moved."""
        return False

    @property
    def skip_forward_padding(self) -> bool:
        """Nothing is padded."""
        return False

    @property
    def has_unpadded_output(self) -> bool:
        """Nothing is padded."""
        return False

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, moe_parallel_config: Any
    ) -> tuple[int, int]:
        """Sizes as they are."""
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """None of vLLM's: the experts quantise for themselves."""
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack, free what was loaded, and build the modular kernel."""
        packed = vllm_experts.pack_layer(layer, self.moe, self.hidden_size, self.intermediate_size)
        free_loaded(layer)
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        prepare_finalize = maybe_make_prepare_finalize(
            moe=self.moe,
            quant_config=self.moe_quant_config,
            routing_tables=layer._expert_routing_tables(),
            allow_new_interface=True,
        )
        assert prepare_finalize is not None, "the new interface makes one always"
        experts = RankmoeExperts(moe_config=self.moe, quant_config=self.moe_quant_config)
        experts.weights = packed
        self.moe_kernel = mk.FusedMoEKernel(prepare_finalize, experts)

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> Any:
        """The modular kernel on this layer's routing."""
        assert self.moe_kernel is not None, "built when the weights were loaded"
        return self.moe_kernel.apply(
            hidden_states=x,
            w1=layer.w13_weight,
            w2=layer.w2_weight,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            expert_map=layer.expert_map,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )


class RankmoeExperts(mk.FusedMoEExpertsModular):
    """Both GEMMs, the activation and the weighted sum of one rank's experts."""

    weights: ExpertWeights

    @property
    def expects_unquantized_inputs(self) -> bool:
        """Rows are quantised here, to MXFP8."""
        return True

    @staticmethod
    def activation_format() -> Any:
        """[tokens, hidden]."""
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return experts_cuda.available()

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return False  # chosen by the name of the quantisation alone

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation.value in ("situ", "silu", "swigluoai", "swigluoai_uninterleave")

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    def moe_problem_size(
        self, a1: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor
    ) -> tuple[int, int, int, int, int]:
        """(local experts, tokens, rows of w13, hidden size, experts a token); the packed weights have no such shape."""
        weights = self.weights
        return (
            weights.num_local_experts,
            a1.shape[0],
            2 * weights.intermediate_size,
            weights.hidden_size,
            topk_ids.shape[1],
        )

    def workspace_shapes(
        self,
        M: int,  # noqa: N803 -- vLLM's names
        N: int,  # noqa: N803
        K: int,  # noqa: N803
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """No workspace of vLLM's; the output is [tokens, hidden]."""
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        """Weighted and added up already."""
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write the weighted sum into ``output``. Raises NotImplementedError for rows that were quantised before."""
        if a1q_scale is not None or apply_router_weight_on_input:
            what = "apply_router_weight_on_input" if a1q_scale is None else "rows quantised before dispatch"
            raise NotImplementedError(f"--quantization rankmoe: {what} is not covered")
        vllm_experts.run_experts(
            output,
            hidden_states,
            topk_ids,
            topk_weights,
            self.weights,
            global_num_experts=global_num_experts,
            expert_map=expert_map,
        )
