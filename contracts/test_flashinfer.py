"""What `rankmoe.integrations.flashinfer` relies on, in FlashInfer's published sources."""

import pytest
from contract_check import Fields, Function, Member, Name
from contract_sources import FLASHINFER

_CORE, _ENUMS = "flashinfer/fused_moe/core.py", "flashinfer/tllm_enums.py"
EXPECTED = [
    Name("flashinfer/__init__.py", "autotune"),
    Name("flashinfer/__init__.py", "shuffle_matrix_a"),
    Name("flashinfer/__init__.py", "shuffle_matrix_sf_a"),
    Name("flashinfer/fused_moe/__init__.py", "trtllm_fp4_block_scale_routed_moe"),
    Function("flashinfer/autotuner/autotuner.py", "autotune", ("tune_mode", "cache")),
    Function(
        "flashinfer/quantization/fp4_quantization.py", "shuffle_matrix_a", ("input_tensor", "epilogue_tile_m"), True
    ),
    Function(
        "flashinfer/quantization/fp4_quantization.py",
        "shuffle_matrix_sf_a",
        ("input_tensor", "epilogue_tile_m", "num_elts_per_sf"),
        True,
    ),
    Function(
        _CORE,
        "trtllm_fp4_block_scale_routed_moe",
        (
            *("topk_ids", "routing_bias", "hidden_states", "hidden_states_scale", "gemm1_weights"),
            *("gemm1_weights_scale", "gemm1_bias", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "gemm2_weights"),
            *("gemm2_weights_scale", "gemm2_bias", "output1_scale_scalar", "output1_scale_gate_scalar"),
            *("output2_scale_scalar", "num_experts", "top_k", "n_group", "topk_group", "intermediate_size"),
            *("local_expert_offset", "local_num_experts", "routed_scaling_factor", "routing_method_type"),
            *("do_finalize", "activation_type", "tune_max_num_tokens", "valid_hidden_size"),
            *("valid_intermediate_size", "hidden_states_scale_layout", "routing_metadata"),
        ),
    ),
    Fields(
        _CORE,
        "TrtllmMoERoutingMetadataSlot",
        (
            *("tile_n", "total_num_padded_tokens", "expanded_idx_to_permuted_idx", "permuted_idx_to_token_idx"),
            *("expert_weights", "expert_count_histogram", "num_tokens_per_expert", "cta_idx_xy_to_batch_idx"),
            *("cta_idx_xy_to_mn_limit", "num_non_exiting_ctas"),
        ),
        is_complete=True,
    ),
    Member(_ENUMS, "ActivationType", "Swiglu", 3),
    Member(_ENUMS, "ActivationType", "Situ", 10),
    Member(_ENUMS, "RoutingMethodType", "TopK", 5),
    Member(_ENUMS, "SfLayout", "layout_linear", 2),
    # What the ids of a tuning run are made for.
    Function(
        "flashinfer/fused_moe/shared/tuning.py", "_routes_are_concentrated", ("route_rows", "num_experts", "packed")
    ),
    Function(
        "flashinfer/fused_moe/shared/tuning.py",
        "make_repeating_tensor_initializer",
        ("source", "*", "num_experts", "packed"),
        True,
    ),
]


@pytest.mark.parametrize("expected", EXPECTED, ids=lambda e: getattr(e, "member", e.name))
def test_flashinfer_is_as_the_adapter_takes_it(expected, source_tree):
    expected.check(source_tree(FLASHINFER))
