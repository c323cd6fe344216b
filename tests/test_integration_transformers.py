"""rankmoe as an experts implementation of Transformers, on small random models that Transformers itself builds.

Expert weights are scaled up so that the routed part makes most of the logits; a test says so. The models run in
float32 unless a test is about another dtype, so that differences are those of the experts and not of rounding around
them.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import os
import subprocess
import sys
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_bitwise_equal, relative_l2, seeded

if importlib.util.find_spec("transformers") is None:  # one that is there and broken fails
    pytest.skip("needs transformers >= 5.7: pip install rankmoe[transformers]", allow_module_level=True)

import tokenizers
import transformers
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import rankmoe.integrations.transformers as integration
from rankmoe.distributed import ExpertParallelGroup, launch
from rankmoe.packed import load_packed, save_packed
from rankmoe.quantize import dequantize, quantize_mxfp4, quantize_mxfp8
from rankmoe.types import ExpertPlacement, MXTensor, SwiGLU

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 8, "head_dim": 16, "norm_topk_prob": True},
    "deepseek_v3": {
        **{"moe_intermediate_size": 32, "intermediate_size": 64, "n_routed_experts": 8, "n_shared_experts": 1},
        **{"n_group": 2, "topk_group": 2, "first_k_dense_replace": 0, "routed_scaling_factor": 1.5},
        **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16},
    },
    "gpt_oss": {"intermediate_size": 32, "num_local_experts": 8, "head_dim": 16, "swiglu_limit": 1.0},
    "mixtral": {"intermediate_size": 32, "num_local_experts": 8},
}
# Order of adding alone (eager adds by expert, we by slot), through two layers and the head.
FAITHFUL = 1e-5
# docs/numerics.md: whole layer at most 5e-3, as a code of the middle activation may flip.
QUANTIZED = 5e-3
# An e4m3 element is off by at most 2^-4 of itself, 2.6 % in the mean square. Gate and up carry that into their product
# and its rounding adds it once more: sqrt(3) * 2.6 % = 4.5 %; silu is steeper than a line, hence up to as much again.
ACTIVATIONS = 0.08


@cache
def _model(family: str, **changes: Any) -> Any:
    options = {"experts_implementation": "eager", **SMALL, **FAMILIES[family], **changes}
    config = transformers.AutoConfig.for_model(family, **options)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Biases too: they start as zeros, and an error in them would go unseen.
            if ".experts." in name:
                parameter.normal_(std=0.3, generator=seeded(len(name)))
            elif ".mlp.gate." in name or ".mlp.router." in name:
                parameter.normal_(std=0.2, generator=seeded(len(name)))
    return model


def build(family: str, **changes: Any) -> Any:
    """A model of its own for each test: what the functions change, they change in place."""
    return copy.deepcopy(_model(family, **changes))


def tokens() -> torch.Tensor:
    return torch.randint(2, SMALL["vocab_size"], (2, 17), generator=seeded(5))


def logits(model: Any, implementation: str | None = None) -> torch.Tensor:
    if implementation is not None:
        model.set_experts_implementation(implementation)
    with torch.no_grad():
        return model(tokens()).logits.float()


def generated(model: Any, implementation: str | None = None) -> torch.Tensor:
    if implementation is not None:
        model.set_experts_implementation(implementation)
    return model.generate(tokens(), max_new_tokens=12, do_sample=False)


def experts_of(model: Any) -> Any:
    return next(module for name, module in model.named_modules() if name.endswith("mlp.experts"))


def round_rows(rows: torch.Tensor) -> torch.Tensor:
    return dequantize(quantize_mxfp8(rows))


def eager_on_rounded_rows(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Eager, a token and a slot at a time, with the activations rounded to MXFP8 where the MXFP4 path rounds them."""
    out = torch.zeros_like(hidden_states)
    for token, expert_ids in enumerate(top_k_index.tolist()):
        for slot, expert in enumerate(expert_ids):
            first, second = self.gate_up_proj[expert], self.down_proj[expert]
            row = round_rows(hidden_states[token : token + 1]) @ (first if self.is_transposed else first.T)
            row = self._apply_gate(row + (self.gate_up_proj_bias[expert] if self.has_bias else 0))
            row = round_rows(row) @ (second if self.is_transposed else second.T)
            row = row + (self.down_proj_bias[expert] if self.has_bias else 0)
            out[token] += top_k_weights[token, slot] * row[0]
    return out


@pytest.fixture(autouse=True)
def oracle():
    ALL_EXPERTS_FUNCTIONS.register("eager_on_rounded_rows", eager_on_rounded_rows)


# --- the weights' own dtype ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_eager(family):
    model = build(family)
    expected = logits(model, "eager")
    got = logits(model, "rankmoe")
    assert relative_l2(got, expected) < FAITHFUL
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.zero_()
    assert relative_l2(logits(model), expected) > 0.3, "the routed part must matter for the comparison to mean much"


@pytest.mark.parametrize("family", FAMILIES)
def test_generated_tokens_are_those_of_eager(family):
    model = build(family)
    expected = generated(model, "eager")
    assert len(expected[:, tokens().shape[1] :].unique()) > 3
    assert torch.equal(generated(model, "rankmoe"), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_experts_are_no_further_from_float32_than_eager_is(family):
    experts = experts_of(build(family))
    exact, rounded = copy.deepcopy(experts).double(), experts.bfloat16()
    exact.load_state_dict(rounded.state_dict())
    rows = torch.randn(40, 64, generator=seeded(0)).bfloat16()
    ids = torch.rand(40, 8, generator=seeded(1)).argsort(1)[:, :3]
    weights = torch.rand(40, 3, generator=seeded(2)).bfloat16()
    with torch.no_grad():
        experts.config._experts_implementation = "eager"
        expected = exact(rows.double(), ids, weights.double())
        eager = rounded(rows, ids, weights)
        experts.config._experts_implementation = "rankmoe"
        got = rounded(rows, ids, weights)
    assert got.dtype == torch.bfloat16
    assert relative_l2(got, expected) <= relative_l2(eager, expected) < 2e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_eager(family):
    gradients = []
    for implementation in ("eager", "rankmoe"):
        model = build(family)
        model.set_experts_implementation(implementation)
        model(tokens(), labels=tokens()).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    expected, got = gradients
    assert sum(".experts." in name for name in expected) >= 4
    for name, gradient in expected.items():
        assert (gradient is None) == (got[name] is None), name
        if gradient is not None:
            assert gradient.norm() > 0 or "experts" not in name
            torch.testing.assert_close(
                got[name], gradient, rtol=1e-3, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
            )


def test_experts_without_a_gate_are_those_of_eager():
    config = transformers.AutoConfig.for_model(
        "nemotron_h", hidden_size=64, moe_intermediate_size=32, n_routed_experts=6, moe_latent_size=None
    )
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    experts = NemotronHExperts(config)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.3, generator=seeded(parameter.shape[1]))
        rows, ids = torch.randn(9, 64, generator=seeded(0)), torch.arange(18).view(9, 2) % 6
        weights = torch.rand(9, 2, generator=seeded(1))
        experts.config._experts_implementation = "eager"
        expected = experts(rows, ids, weights)
        experts.config._experts_implementation = "rankmoe"
        assert expected.norm() > 1
        assert relative_l2(experts(rows, ids, weights), expected) < 1e-6
    with pytest.raises(ValueError, match="has_gate: expected True for MXFP4 experts, got False"):
        integration.quantize_experts(experts)


# --- MXFP4 -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
def test_mxfp4_logits_and_tokens_are_those_of_eager_on_the_dequantised_weights(family):
    model = build(family)
    unquantised = logits(model, "eager")
    names = integration.quantize_experts(model)
    assert names == [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    got, got_tokens = logits(model), generated(model)

    assert integration.dequantize_experts(model) == names
    expected = logits(model, "eager_on_rounded_rows")
    assert relative_l2(got, expected) < QUANTIZED
    assert torch.equal(got_tokens, generated(model))
    assert relative_l2(got, unquantised) > 10 * QUANTIZED, "the weights before must be told from the dequantised ones"


@pytest.mark.parametrize("family", FAMILIES)
def test_mxfp4_experts_are_plain_eager_but_for_the_rounding_of_activations(family):
    # One module and given ids: through a whole model, another activation may route a token elsewhere.
    experts = experts_of(build(family))
    rows = torch.randn(40, 64, generator=seeded(0))
    ids = torch.rand(40, 8, generator=seeded(1)).argsort(1)[:, :3]
    weights = torch.rand(40, 3, generator=seeded(2))
    with torch.no_grad():
        unquantised = experts(rows, ids, weights)
        experts.config._experts_implementation = "rankmoe"
        integration.quantize_experts(experts)
        got = experts(rows, ids, weights)
        integration.dequantize_experts(experts)
        experts.config._experts_implementation = "eager"
        expected = experts(rows, ids, weights)
    assert QUANTIZED < relative_l2(got, expected) < ACTIVATIONS
    assert relative_l2(unquantised, expected) > ACTIVATIONS


@pytest.mark.parametrize("family", FAMILIES)
def test_dequantised_parameters_are_the_rounded_ones_in_the_models_own_layout(family):
    model, before = build(family).bfloat16(), build(family).bfloat16()
    integration.quantize_experts(model)
    integration.dequantize_experts(model)
    expected = dict(before.named_parameters())
    assert list(dict(model.named_parameters())) == list(expected) or set(dict(model.named_parameters())) == set(
        expected
    )
    for name, parameter in model.named_parameters():
        value = expected[name].detach()
        assert (parameter.dtype, parameter.shape) == (value.dtype, value.shape), name
        assert parameter.requires_grad == expected[name].requires_grad, name
        if name.endswith(("gate_up_proj", "down_proj")) and ".experts." in name:
            # Groups run along the input dimension, which gpt-oss stores before the output's.
            is_transposed = family == "gpt_oss"
            rounded = dequantize(quantize_mxfp4(value.mT if is_transposed else value))
            value = (rounded.mT if is_transposed else rounded).bfloat16()
        assert_bitwise_equal(parameter.detach(), value, name)


def test_the_quantised_experts_can_be_reached_saved_and_loaded(tmp_path):
    model = build("gpt_oss")
    bias = experts_of(model).gate_up_proj_bias.detach().clone()
    integration.quantize_experts(model)
    weights = integration.quantized_experts(model)["model.layers.0.mlp.experts"]
    assert weights.activation == SwiGLU(alpha=model.config.swiglu_alpha, limit=1.0, up_offset=1.0)
    assert_bitwise_equal(weights.w13_bias, torch.cat([bias[:, 0::2], bias[:, 1::2]], 1))
    save_packed(weights, tmp_path / "layer.safetensors")
    loaded = load_packed(tmp_path / "layer.safetensors", placement=weights.placement)
    assert_bitwise_equal(loaded.w13, weights.w13)


def test_parameters_are_freed_layer_by_layer(monkeypatch):
    model = build("qwen3_moe")
    modules = [layer.mlp.experts for layer in model.model.layers]
    storages = [weakref.ref(module.gate_up_proj) for module in modules]
    alive = []

    def pack_experts(w13: Any, *arguments: Any, **options: Any) -> Any:
        gc.collect()
        alive.append([storage() is not None for storage in storages])
        assert not isinstance(w13, MXTensor), "all experts at once"
        return original(w13, *arguments, **options)

    original = integration.pack_experts
    monkeypatch.setattr(integration, "pack_experts", pack_experts)
    integration.quantize_experts(model)
    gc.collect()
    assert alive == [[True, True], [False, True]]
    assert [storage() for storage in storages] == [None, None]
    assert not any(".experts." in name for name, _ in model.named_parameters())


def test_float16_and_bfloat16_rows_go_through_mxfp4_experts():
    experts = experts_of(build("qwen3_moe"))
    experts.config._experts_implementation = "rankmoe"
    integration.quantize_experts(experts)
    rows, ids = torch.randn(5, 64, generator=seeded(0)).bfloat16(), torch.arange(10).view(5, 2) % 8
    weights = torch.rand(5, 2, generator=seeded(1))
    outputs = {dtype: experts(rows.to(dtype), ids, weights) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    for dtype, out in outputs.items():
        assert_bitwise_equal(out, outputs[torch.float32].to(dtype))
    assert outputs[torch.float32].norm() > 1


# --- ids -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("is_quantised", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_negative_ids_and_ids_from_the_local_count_on_are_skipped(family, is_quantised):
    experts = experts_of(build(family))
    experts.config._experts_implementation = "rankmoe"
    if is_quantised:
        integration.quantize_experts(experts)
    rows = torch.randn(6, 64, generator=seeded(0))
    ids = torch.tensor([[0, 7, 3], [8, -1, 2], [2**40, -(2**40), 2**32 + 1], [5, 8, 9], [-1, -1, -1], [1, 1, 6]])
    weights = torch.rand(6, 3, generator=seeded(1))
    is_local = (ids >= 0) & (ids < 8)
    with torch.no_grad():
        got = experts(rows, ids, torch.where(is_local, weights, torch.nan))  # a skipped weight never matters
        expected = torch.zeros_like(rows)
        for token in range(6):
            for slot in range(3):
                if is_local[token, slot]:
                    one = experts(rows[token : token + 1], ids[token : token + 1, slot : slot + 1], torch.ones(1, 1))
                    expected[token] += weights[token, slot] * one[0]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(got[[2, 4]], torch.zeros(2, 64))
    assert (got[[0, 1, 3, 5]].norm(dim=1) > 0.1).all()


@pytest.mark.parametrize("is_quantised", [False, True])
def test_no_token_and_no_local_slot_give_zeros(is_quantised):
    experts = experts_of(build("mixtral"))
    experts.config._experts_implementation = "rankmoe"
    if is_quantised:
        integration.quantize_experts(experts)
    with torch.no_grad():
        assert experts(torch.randn(0, 64), torch.zeros(0, 3, dtype=torch.long), torch.rand(0, 3)).shape == (0, 64)
        rows = torch.full((2, 64), torch.inf) if not is_quantised else torch.randn(2, 64)
        out = experts(rows, torch.full((2, 3), 8), torch.ones(2, 3))
    assert torch.equal(out, torch.zeros(2, 64))


# --- expert parallelism ----------------------------------------------------------------------------------------------
PLACEMENTS: dict[str, dict[str, Any]] = {
    "contiguous": {"num_experts": 8},
    "uneven": {"num_experts": 7},
    "round_robin": {"num_experts": 7, "strategy": "round_robin"},
    "redundant": {"num_experts": 10, "physical_to_logical": (3, 0, 5, 7, 1, 2, 6, 4, 0, 5)},
}


def run_sharded(group: ExpertParallelGroup, kind: str, is_quantised: bool) -> list[Any]:
    """Every rank's logits, tokens and number of experts."""
    options = PLACEMENTS[kind]
    placement = ExpertPlacement(**options, ep_size=group.ep_size, ep_rank=group.ep_rank)
    model = build("qwen3_moe", num_experts=placement.num_logical_experts)
    integration.shard_experts(model, placement, group)
    if is_quantised:
        integration.quantize_experts(model)
        held = {name: weights.w13.shape[0] for name, weights in integration.quantized_experts(model).items()}
    else:
        held = {name: p.shape[0] for name, p in model.named_parameters() if name.endswith("experts.gate_up_proj")}
    return group.gather_objects((logits(model), generated(model), sorted(held.values())))


def run_all_sharded(group: ExpertParallelGroup) -> dict[tuple[str, bool], list[Any]]:
    return {(kind, q): run_sharded(group, kind, q) for kind in PLACEMENTS for q in (False, True)}


@pytest.fixture(scope="module")
def sharded() -> dict[tuple[str, bool], list[Any]]:
    return launch(run_all_sharded, 2)


@pytest.mark.parametrize("is_quantised", [False, True])
@pytest.mark.parametrize("kind", PLACEMENTS)
def test_two_ranks_over_gloo_give_the_whole_models_logits_and_tokens(sharded, kind, is_quantised):
    ranks = sharded[kind, is_quantised]
    placements = [ExpertPlacement(**PLACEMENTS[kind], ep_size=2, ep_rank=rank) for rank in range(2)]
    model = build("qwen3_moe", num_experts=placements[0].num_logical_experts)
    if is_quantised:
        integration.quantize_experts(model)
    expected, expected_tokens = logits(model, "rankmoe"), generated(model)
    for placement, (got, got_tokens, held) in zip(placements, ranks, strict=True):
        assert held == [placement.num_local_experts] * 2
        # Float32 partial sums: another order of adding, or a flipped code of MXFP8 where that moved an activation.
        assert relative_l2(got, expected) < (QUANTIZED if is_quantised else FAITHFUL)
        assert torch.equal(got_tokens, expected_tokens)
    assert_bitwise_equal(ranks[0][0], ranks[1][0])


def test_a_single_rank_holds_a_part_and_refuses_gradients_saving_and_eager():
    model = build("qwen3_moe")
    integration.shard_experts(model, ExpertPlacement(8), ExpertParallelGroup())
    with pytest.raises(RuntimeError, match="no gradients through sharded experts"):
        model(tokens())
    with pytest.raises(
        RuntimeError, match=r"model\.layers\.0\.mlp\.experts: one rank's experts are no whole checkpoint"
    ):
        model.state_dict()
    with pytest.raises(RuntimeError, match="expected 'rankmoe' for sharded experts, got 'eager'"):
        logits(model, "eager")
    with pytest.raises(ValueError, match="expected all experts, got those of a rank"):
        integration.shard_experts(model, ExpertPlacement(8), ExpertParallelGroup())


def test_a_placement_that_does_not_fit_is_refused_and_changes_nothing():
    model = build("qwen3_moe")
    expected = logits(model, "eager")
    with pytest.raises(ValueError, match="group: expected rank 1 of 2 as the placement, got rank 0 of 1"):
        integration.shard_experts(model, ExpertPlacement(8, 2, 1), ExpertParallelGroup())
    with pytest.raises(ValueError, match="group: expected a process group for 2 ranks, got None"):
        integration.shard_experts(model, ExpertPlacement(8, 2, 1), ExpertParallelGroup(1, 2))
    with pytest.raises(ValueError, match=r"placement: expected 8 experts as model\.layers\.0\.mlp\.experts, got 9"):
        integration.shard_experts(model, ExpertPlacement(9), ExpertParallelGroup())
    assert torch.equal(logits(model), expected)
    integration.quantize_experts(model)
    with pytest.raises(ValueError, match="expected experts that are not quantised"):
        integration.shard_experts(model, ExpertPlacement(8), ExpertParallelGroup())


# --- turning it on and off, refusals ---------------------------------------------------------------------------------
def test_a_saved_model_is_loaded_with_the_implementation_by_name(tmp_path):
    model = build("qwen3_moe")
    expected = logits(model, "eager")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="rankmoe")
    assert loaded.get_experts_implementation() == {"": "rankmoe"}
    assert relative_l2(logits(loaded), expected) < FAITHFUL
    calls = []
    handle = experts_of(loaded).register_forward_pre_hook(lambda module, arguments: calls.append(module))
    loaded.set_experts_implementation("eager")
    assert_bitwise_equal(logits(loaded), expected)
    handle.remove()
    assert len(calls) == 1


def test_the_example_writes_text_from_mxfp4_experts(tmp_path):
    model = build("qwen3_moe")
    model.save_pretrained(tmp_path)
    words = {f"word{i}": i for i in range(SMALL["vocab_size"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    example = Path(__file__).parent.parent / "examples" / "transformers_experts.py"
    command = [sys.executable, str(example), str(tmp_path), "word5 word17 word40"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, text = done.stdout.splitlines()
    assert first == "MXFP4 now: model.layers.0.mlp.experts, model.layers.1.mlp.experts"

    model = build("qwen3_moe").bfloat16()
    integration.quantize_experts(model)
    ids = model.generate(torch.tensor([[5, 17, 40]]), max_new_tokens=64)[0]
    assert text == " ".join(f"word{i}" for i in ids)


def test_mxfp4_experts_refuse_eager_saving_gradients_and_a_second_time(tmp_path):
    model = build("mixtral")
    integration.quantize_experts(model)
    with pytest.raises(RuntimeError, match="no gradients through MXFP4 experts"):
        model(tokens())
    with pytest.raises(RuntimeError, match=r"mlp\.experts: MXFP4 experts have no place in Transformers' checkpoint"):
        model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected experts that are not quantised, got MXFP4 ones"):
        integration.quantize_experts(model)
    with pytest.raises(RuntimeError, match="expected 'rankmoe' for MXFP4 experts, got 'eager'"):
        logits(model, "eager")
    twin = copy.deepcopy(model)
    integration.dequantize_experts(model)
    assert_bitwise_equal(logits(model, "eager"), logits(model, "eager"))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")
    assert_bitwise_equal(logits(loaded), logits(model))
    assert list(integration.quantized_experts(twin)) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    with pytest.raises(ValueError, match="expected experts that quantize_experts has quantised, got none"):
        integration.dequantize_experts(model)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3_moe", {"hidden_act": "gelu"}, r"mlp\.experts\._apply_gate: expected SwiGLU .* act_fn GELU"),
        ("qwen3_moe", {"moe_intermediate_size": 48}, "intermediate_size: expected a multiple of 32, got 48"),
        ("qwen3_moe", {"hidden_size": 80}, "hidden_size: expected a multiple of 32, got 80"),
    ],
)
def test_what_mxfp4_experts_cannot_be_is_refused_and_still_runs_in_its_own_dtype(family, changes, message):
    model = build(family, **changes)
    expected = logits(model, "eager")
    with pytest.raises(ValueError, match=message):
        integration.quantize_experts(model)
    assert integration.quantized_experts(model) == {}
    assert relative_l2(logits(model, "rankmoe"), expected) < FAITHFUL


def test_nothing_is_quantised_where_one_layer_cannot_be():
    model = build("qwen3_moe")
    last = model.model.layers[1].mlp.experts
    last.act_fn = torch.nn.Tanh()
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.experts\._apply_gate"):
        integration.quantize_experts(model)
    assert integration.quantized_experts(model) == {}


def test_a_clamp_that_the_module_names_is_found():
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

    config = transformers.AutoConfig.for_model("deepseek_v4", hidden_size=64, swiglu_limit=0.5)
    config.num_local_experts, config.intermediate_size = 4, 32
    experts = DeepseekV4Experts(config)
    rows, ids, weights = torch.randn(5, 64, generator=seeded(0)), torch.arange(10).view(5, 2) % 4, torch.ones(5, 2)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.3, generator=seeded(parameter.shape[1]))
        experts.config._experts_implementation = "rankmoe"
        integration.quantize_experts(experts)
        assert integration.quantized_experts(experts)[""].activation == SwiGLU(limit=0.5)
        got = experts(rows, ids, weights)
        integration.dequantize_experts(experts)
        experts.config._experts_implementation = "eager_on_rounded_rows"
        assert relative_l2(got, experts(rows, ids, weights)) < QUANTIZED
        experts.limit = 50.0
        assert relative_l2(got, experts(rows, ids, weights)) > 10 * QUANTIZED


@pytest.mark.parametrize("limit", [0.7, 5e3])
def test_a_clamp_that_no_attribute_names_is_seen(limit):
    experts = experts_of(build("qwen3_moe"))

    def apply_gate(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return experts.act_fn(gate.clamp(max=limit)) * up

    experts._apply_gate = apply_gate
    with pytest.raises(ValueError, match="_apply_gate: expected SwiGLU"):
        integration.quantize_experts(experts)


def test_experts_that_transformers_has_sharded_or_replaced_are_refused():
    experts = experts_of(build("qwen3_moe"))
    experts._is_expert_parallel = True
    with pytest.raises(ValueError, match="expected no expert parallelism of Transformers' own, got it"):
        integration.quantize_experts(experts)
    experts._is_expert_parallel = False

    class Replaced(torch.nn.Parameter):
        pass

    experts.down_proj = Replaced(experts.down_proj.detach())
    with pytest.raises(ValueError, match="down_proj: expected a plain parameter, got Replaced"):
        integration.quantize_experts(experts)


def test_weights_packed_for_a_gpu_are_not_decoded_here():
    model = build("qwen3_moe", hidden_size=128, moe_intermediate_size=128)
    integration.quantize_experts(model, backend="cuda")
    with pytest.raises(ValueError, match=r"expected weights in the checkpoint's order, .* got those of 'cuda'"):
        integration.dequantize_experts(model)
    assert len(integration.quantized_experts(model)) == 2


def test_a_weight_that_the_backend_cannot_hold_is_refused_with_the_modules_name():
    model = build("qwen3_moe")
    with torch.no_grad():
        experts_of(model).down_proj[3, 5, 12] = 3e38
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.experts: w2: .* in expert 3, row 5, group 0"):
        integration.quantize_experts(model)


def test_a_model_without_such_experts_is_refused():
    with pytest.raises(ValueError, match=r"model: expected a module that passes through .* got none in Linear"):
        integration.quantize_experts(torch.nn.Linear(32, 32))


def test_other_dtypes_and_shapes_are_refused():
    experts = experts_of(build("qwen3_moe"))
    experts.config._experts_implementation = "rankmoe"
    ids, weights = torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3)
    with pytest.raises(TypeError, match=r"hidden_states: expected bfloat16, float16 or float32, got torch\.float64"):
        experts(torch.ones(2, 64, dtype=torch.float64), ids, weights)
    with pytest.raises(ValueError, match=r"got \(1, 2, 64\), \(2, 3\) and \(2, 3\)"):
        experts(torch.ones(1, 2, 64), ids, weights)
    with pytest.raises(ValueError, match=r"got \(2, 64\), \(2, 3\) and \(2, 2\)"):
        experts(torch.ones(2, 64), ids, weights[:, :2])
    with pytest.raises(ValueError, match=r"expected weights in bfloat16, float16 or float32, got torch\.float64"):
        integration.quantize_experts(experts.double())


def test_registering_again_changes_nothing():
    before = ALL_EXPERTS_FUNCTIONS["rankmoe"]
    integration.register()
    assert ALL_EXPERTS_FUNCTIONS["rankmoe"] is before
