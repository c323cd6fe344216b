import copy
import dataclasses
import math
from dataclasses import dataclass, field

import pytest
import torch
from helpers import assert_bitwise_equal, random_experts, relative_l2, seeded
from torch import Tensor

from rankmoe.distributed import ExpertParallelGroup
from rankmoe.handoff import Handoff
from rankmoe.models.kimi_k3 import KimiK3MoE, KimiK3MoEConfig
from rankmoe.quantize import dequantize, quantize_mxfp8
from rankmoe.types import ExpertPlacement, ExpertWeights, LocalRange, RouterConfig, SiTU

CONFIG = KimiK3MoEConfig(
    hidden_size=96,
    routed_expert_hidden_size=64,
    num_experts=32,
    moe_intermediate_size=32,
    shared_intermediate_size=128,
    router=RouterConfig(top_k=4),
)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def experts(ep_size: int = 1, ep_rank: int = 0, **fields) -> ExpertWeights:
    fields = {"num_experts": CONFIG.num_experts, **fields}
    return random_experts(ExpertPlacement(ep_size=ep_size, ep_rank=ep_rank, **fields))


def block(weights: ExpertWeights | None = None, group: ExpertParallelGroup | None = None, **options) -> KimiK3MoE:
    """The same random parameters every time."""
    module = KimiK3MoE(CONFIG, group, **options)
    for name, parameter in sorted(module.named_parameters()):
        scale = 0.1 if name.endswith(("bias", "norm.weight")) else parameter.shape[-1] ** -0.5
        parameter.copy_(scale * torch.randn(parameter.shape, generator=seeded(len(name))))
    if weights is not None:
        module.bind_experts(weights)
    return module


def tokens(num_tokens: int = 9) -> Tensor:
    return 2 * torch.randn(num_tokens, CONFIG.hidden_size, generator=seeded(1))


# --- a plain float64 statement of the block --------------------------------------------------------------------------
def situ(gate: Tensor, up: Tensor) -> Tensor:
    return 4 * torch.tanh(gate / 4) / (1 + torch.exp(-gate)) * 25 * torch.tanh(up / 25)


def through_mxfp8(rows: Tensor) -> Tensor:
    return dequantize(quantize_mxfp8(rows.float()), torch.float64)


def plain_block(module: KimiK3MoE, weights: ExpertWeights, hidden_states: Tensor) -> Tensor:
    x = hidden_states.double()
    parameters = {name: parameter.double() for name, parameter in module.named_parameters()}
    w13, w2 = dequantize(weights.w13, torch.float64), dequantize(weights.w2, torch.float64)
    scores = (x @ parameters["gate.weight"].T).sigmoid()
    latent = through_mxfp8(x @ parameters["routed_expert_down_proj.weight"].T)
    routed = torch.zeros_like(latent)
    for token in range(len(x)):
        ranked = scores[token] + parameters["gate.e_score_correction_bias"]
        chosen = ranked.argsort(descending=True)[: CONFIG.router.top_k].sort().values
        for expert in chosen:
            gate, up = (w13[expert] @ latent[token]).chunk(2)
            row = w2[expert] @ through_mxfp8(situ(gate, up)[None])[0]
            routed[token] += scores[token, expert] / scores[token, chosen].sum() * row
    normed = routed / (routed.square().mean(-1, keepdim=True) + CONFIG.rms_norm_eps).sqrt()
    out = (normed * parameters["routed_expert_norm.weight"]) @ parameters["routed_expert_up_proj.weight"].T
    gate, up = (x @ parameters[f"shared_experts.{name}_proj.weight"].T for name in ("gate", "up"))
    return out + situ(gate, up) @ parameters["shared_experts.down_proj.weight"].T


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
def test_the_block_agrees_with_a_plain_float64_statement(reduce_dtype):
    weights = experts()
    module = block(weights, reduce_dtype=reduce_dtype)
    assert relative_l2(module(tokens()), plain_block(module, weights, tokens())) <= 5e-3


def test_the_parameters_have_the_models_names():
    assert set(block().state_dict()) == {
        "gate.weight",
        "gate.e_score_correction_bias",
        "routed_expert_down_proj.weight",
        "routed_expert_norm.weight",
        "routed_expert_up_proj.weight",
        "shared_experts.gate_proj.weight",
        "shared_experts.up_proj.weight",
        "shared_experts.down_proj.weight",
    }


# --- id forms and ranges ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("ep_size", "ep_rank"), [(2, 0), (4, 1), (8, 7)])
@pytest.mark.parametrize("num_tokens", [0, 1, 9, 64, 65])
def test_the_form_of_the_ids_changes_no_bit(ep_size, ep_rank, num_tokens):
    weights = experts(ep_size, ep_rank)
    outputs = [block(weights, rank_local=rank_local)(tokens(num_tokens)) for rank_local in (True, False)]
    assert outputs[0].shape == (num_tokens, CONFIG.hidden_size)
    assert_bitwise_equal(outputs[0], outputs[1])


def test_the_handoff_is_hit_at_every_forward():
    module = block(experts(4, 1))
    for _ in range(3):
        module(tokens())
    counters = module.handoff.counters
    assert (counters.route_hits, counters.route_misses, counters.take_hits, counters.take_misses) == (3, 0, 3, 0)


@dataclass
class RecordingHandoff(Handoff):
    """Remembers the ranges that were staged."""

    ranges: list[LocalRange | None] = field(default_factory=list)

    def stage(self, x: Tensor, local_range: LocalRange | None = None) -> None:
        self.ranges.append(local_range)
        super().stage(x, local_range)


def test_the_range_is_read_at_every_forward():
    handoff = RecordingHandoff()
    module = block(experts(4, 1), handoff=handoff)
    module(tokens())
    module.bind_experts(experts())  # all experts bound to one rank after construction
    assert_bitwise_equal(module(tokens()), block(experts())(tokens()))
    module.runner.weights = experts(2, 1)
    assert_bitwise_equal(module(tokens()), block(experts(2, 1))(tokens()))
    assert handoff.ranges == [LocalRange(8, 8), LocalRange(0, 32), LocalRange(16, 16)]


# --- ranks -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SumWith(ExpertParallelGroup):
    """A group whose other ranks' partial sum is known already."""

    others: Tensor | float = 0.0

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial + self.others


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"strategy": "round_robin"},
        {"num_experts": 36, "physical_to_logical": tuple(sorted([*range(32), *range(4)]))},
    ],
    ids=["contiguous", "round_robin", "redundant"],
)
def test_the_ranks_partial_sums_add_up_before_the_norm(fields):
    first, second = (block(experts(2, rank, **fields), reduce_dtype=torch.float32) for rank in range(2))
    whole = block(experts(), reduce_dtype=torch.float32)
    others = second.routed_partial(tokens())
    total = first.routed_partial(tokens()) + others
    torch.testing.assert_close(total, whole.routed_partial(tokens()), rtol=1e-5, atol=1e-4)
    first.group = SumWith(others=others)
    torch.testing.assert_close(first(tokens()), whole(tokens()), rtol=1e-5, atol=1e-4)


# --- state and errors ------------------------------------------------------------------------------------------------
def test_two_layers_that_share_a_handoff_do_not_disturb_each_other():
    handoff = Handoff()
    first, second = block(experts(4, 1), handoff=handoff), block(experts(4, 2), handoff=handoff)
    alone = block(experts(4, 2))(block(experts(4, 1))(tokens()))
    assert_bitwise_equal(second(first(tokens())), alone)


def test_an_exception_in_the_experts_leaves_the_handoff_empty(monkeypatch):
    module, staged = block(experts(4, 1)), []

    def fail(latent: Tensor, routing: object, num_valid_tokens: object) -> Tensor:
        staged.append(latent)
        raise RuntimeError("the experts failed")

    monkeypatch.setattr(module, "runner", fail)
    fail.weights = experts(4, 1)
    with pytest.raises(RuntimeError, match="the experts failed"):
        module(tokens())
    assert module.handoff.take(staged[0]) is None


def test_a_nan_token_changes_no_other_token():
    module, hidden_states = block(experts()), tokens()
    clean = module(hidden_states)
    hidden_states[2, 5] = math.nan
    out, others = module(hidden_states), torch.arange(9) != 2
    assert out[2].isnan().all()
    assert_bitwise_equal(out[others], clean[others])


def test_a_block_cast_to_bf16_routes_with_its_float32_bias():
    module = block(experts()).bfloat16()
    out = module(tokens().bfloat16())
    assert out.dtype == torch.bfloat16
    assert relative_l2(out, block(experts())(tokens())) <= 0.05


def test_a_block_made_without_memory_gets_it_later():
    with torch.device("meta"):
        module = KimiK3MoE(CONFIG)
    module = module.to_empty(device="cpu")
    module.load_state_dict(block().state_dict())
    module.bind_experts(experts())
    assert_bitwise_equal(module(tokens()), block(experts())(tokens()))


def test_a_forward_before_bind_experts_is_an_error():
    with pytest.raises(RuntimeError, match=r"expected bind_experts\(\) before forward\(\)"):
        block()(tokens())


@pytest.mark.parametrize(
    ("weights", "got"),
    [
        (random_experts(ExpertPlacement(30)), r"\(30, 64, 32\)"),
        (random_experts(ExpertPlacement(32), hidden_size=96), r"\(32, 96, 32\)"),
        (random_experts(ExpertPlacement(32), intermediate_size=64), r"\(32, 64, 64\)"),
    ],
)
def test_experts_that_do_not_fit_the_configuration_are_refused(weights, got):
    with pytest.raises(ValueError, match=rf"weights: expected .* \(32, 64, 32\), got {got}"):
        block().bind_experts(weights)


def test_experts_of_another_activation_are_refused():
    weights = dataclasses.replace(experts(), activation=SiTU(beta=2.0))
    with pytest.raises(ValueError, match=r"weights: expected activation SiTU\(beta=4.0.*, got SiTU\(beta=2.0"):
        block().bind_experts(weights)


def test_rows_beyond_the_valid_tokens_change_no_other_row():
    module, hidden_states = block(experts()), tokens()
    expected = module(hidden_states)[:3]
    hidden_states[3:] = math.nan
    assert_bitwise_equal(module(hidden_states, torch.tensor([3]))[:3], expected)


def test_a_block_can_be_copied():
    module = block(experts())
    assert_bitwise_equal(copy.deepcopy(module)(tokens()), module(tokens()))


def test_hidden_states_of_another_shape_are_refused_by_name():
    with pytest.raises(ValueError, match=r"hidden_states: expected \[num_tokens, .*got \(1, "):
        block(experts())(tokens()[None])
