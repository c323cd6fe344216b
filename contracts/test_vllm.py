"""What `rankmoe.integrations.vllm` and `vllm_method` rely on, in vLLM's published sources."""

import pytest
from contract_check import Fields, Function, Member, Name, Text
from contract_sources import VLLM

_MOE = "vllm/model_executor/layers/fused_moe"
_QUANTIZATION = "vllm/model_executor/layers/quantization"
_KERNEL = f"{_MOE}/modular_kernel.py"
_CONFIG = f"{_QUANTIZATION}/base_config.py"
_BASE = f"{_MOE}/fused_moe_method_base.py"
_MXFP4 = f"{_QUANTIZATION}/mxfp4.py"
EXPECTED = [
    Text("vllm/plugins/__init__.py", "vllm.general_plugins"),
    Function(f"{_QUANTIZATION}/__init__.py", "register_quantization_config", ("quantization",), True),
    Function(_CONFIG, "QuantizationConfig.get_quant_method", ("self", "layer", "prefix"), True),
    Function(
        _CONFIG,
        "QuantizationConfig.override_quantization_method",
        ("cls", "hf_quant_cfg", "user_quant", "hf_config"),
        True,
    ),
    Function(_CONFIG, "QuantizationConfig.from_config", ("cls", "config"), True),
    Fields(
        _CONFIG,
        "QuantizationConfig",
        ("get_name", "get_supported_act_dtypes", "get_min_capability", "get_config_filenames"),
    ),
    Name(f"{_MOE}/__init__.py", "RoutedExperts"),
    Name("vllm/model_executor/layers/linear.py", "LinearBase"),
    Name("vllm/model_executor/layers/linear.py", "UnquantizedLinearMethod"),
    Function(_MXFP4, "Mxfp4MoEMethod.process_weights_after_loading", ("self", "layer"), True),
    Fields(_MXFP4, "Mxfp4MoEMethod", ("hidden_size", "intermediate_size", "supports_pre_processed_weights")),
    *(Text(_MXFP4, name) for name in ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")),
    *(Text(_MXFP4, name) for name in ("w13_bias", "w2_bias", "mxfp4")),
    # Kimi-K3's checkpoint is renamed to what Mxfp4MoEMethod loads.
    Name("vllm/model_executor/models/config.py", "KimiK3ForConditionalGenerationConfig"),
    *(Text("vllm/model_executor/models/config.py", name) for name in ("mxfp4-pack-quantized", "mxfp4")),
    Function(_BASE, "FusedMoEMethodBase.__init__", ("self", "moe"), True),
    Fields(
        _BASE,
        "FusedMoEMethodBase",
        (
            *("moe", "moe_quant_config", "moe_kernel", "supports_eplb", "skip_forward_padding"),
            *("has_unpadded_output", "get_fused_moe_quant_config"),
        ),
    ),
    Function(
        _BASE,
        "FusedMoEMethodBase.apply",
        ("self", "layer", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input"),
        True,
    ),
    Function(
        _BASE,
        "FusedMoEMethodBase.maybe_roundup_sizes",
        ("self", "hidden_size", "intermediate_size_per_partition", "act_dtype", "moe_parallel_config"),
        True,
    ),
    Function(
        _KERNEL,
        "FusedMoEExpertsModular.apply",
        (
            *("self", "output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation"),
            *("global_num_experts", "expert_map", "a1q_scale", "a2_scale", "workspace13", "workspace2"),
            *("expert_tokens_meta", "apply_router_weight_on_input"),
        ),
        True,
    ),
    Function(
        _KERNEL,
        "FusedMoEExpertsModular.workspace_shapes",
        (
            *("self", "M", "N", "K", "topk", "global_num_experts", "local_num_experts", "expert_tokens_meta"),
            "activation",
        ),
        True,
    ),
    Function(_KERNEL, "FusedMoEExpertsModular.moe_problem_size", ("self", "a1", "w1", "w2", "topk_ids"), True),
    Function(
        _KERNEL,
        "FusedMoEExperts.__init__",
        ("self", "moe_config", "quant_config", "max_num_tokens", "num_dispatchers"),
        True,
    ),
    Fields(
        _KERNEL,
        "FusedMoEExperts",
        (
            *("expects_unquantized_inputs", "activation_format", "_supports_current_device"),
            *("_supports_no_act_and_mul", "_supports_quant_scheme", "_supports_activation"),
            "_supports_parallel_config",
        ),
    ),
    Fields(_KERNEL, "FusedMoEExpertsModular", ("finalize_weight_and_reduce_impl",)),
    Member(_KERNEL, "FusedMoEActivationFormat", "Standard", "standard"),
    Function(_KERNEL, "FusedMoEKernel.__init__", ("self", "prepare_finalize", "fused_experts"), True),
    Function(
        _KERNEL,
        "FusedMoEKernel.apply",
        (
            *("self", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation", "global_num_experts"),
            *("apply_router_weight_on_input", "expert_map", "shared_experts", "shared_experts_input"),
        ),
    ),
    Function(
        f"{_MOE}/all2all_utils.py",
        "maybe_make_prepare_finalize",
        ("moe", "quant_config", "routing_tables", "allow_new_interface"),
    ),
    Name(f"{_MOE}/config.py", "FUSED_MOE_UNQUANTIZED_CONFIG"),
    Fields(
        f"{_MOE}/config.py",
        "FusedMoEConfig",
        (
            *("num_experts", "num_local_experts", "activation", "moe_parallel_config", "swiglu_limit"),
            *("swiglu_alpha", "swiglu_beta", "activation_situ_beta", "activation_situ_linear_beta"),
        ),
    ),
    Fields(f"{_MOE}/config.py", "FusedMoEParallelConfig", ("ep_size", "ep_rank")),
    Name(f"{_MOE}/topk_weight_and_reduce.py", "TopKWeightAndReduceNoOP"),
    *(
        Member(f"{_MOE}/activation.py", "MoEActivation", name, value)
        for name, value in (
            ("SILU", "silu"),
            ("SITU", "situ"),
            ("SWIGLUOAI", "swigluoai"),
            ("SWIGLUOAI_UNINTERLEAVE", "swigluoai_uninterleave"),
        )
    ),
    Fields(
        f"{_MOE}/routed_experts.py",
        "RoutedExperts",
        (
            *("_expert_routing_tables", "expert_map", "activation", "global_num_experts"),
            *("apply_router_weight_on_input", "moe_config"),
        ),
    ),
    Function(
        _MXFP4,
        "Mxfp4MoEMethod.create_weights",
        ("self", "layer", "num_experts", "hidden_size", "intermediate_size_per_partition", "params_dtype"),
    ),
    Text(_MXFP4, "weight_loader"),
]


def _name(expected):
    return getattr(expected, "member", getattr(expected, "literal", getattr(expected, "name", "")))


@pytest.mark.parametrize("expected", EXPECTED, ids=_name)
def test_vllm_is_as_the_adapter_takes_it(expected, source_tree):
    expected.check(source_tree(VLLM))
