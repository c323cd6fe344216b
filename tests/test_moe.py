import dataclasses
import math
from functools import cache

import pytest
import torch
from helpers import assert_bitwise_equal, random_batch, random_experts, relative_l2
from torch import Tensor

import rankmoe.pack
from rankmoe import reference
from rankmoe.moe import Workspace, expert_rows, fused_moe, routed_moe
from rankmoe.pack import id_space, pack_topk
from rankmoe.quantize import quantize_mxfp8
from rankmoe.route import route
from rankmoe.schedule import build_schedule
from rankmoe.types import ExpertPlacement, ExpertWeights, RouterConfig, Routing, SwiGLU

NUM_EXPERTS, CONFIG = 64, RouterConfig(8)
BIAS = torch.linspace(-0.1, 0.1, NUM_EXPERTS)
TOKEN_COUNTS = [0, 1, 2, 7, 33, 63, 64, 65]


@cache
def experts(ep_size: int = 1, ep_rank: int = 0, **fields) -> ExpertWeights:
    return random_experts(ExpertPlacement(NUM_EXPERTS, ep_size, ep_rank, **fields))


def layer(weights: ExpertWeights, num_tokens: int = 9, **options) -> Tensor:
    hidden_states, logits = random_batch(num_tokens, weights.placement.num_logical_experts)
    return routed_moe(hidden_states, logits, weights, CONFIG, BIAS, **options)


# --- values ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("ep_size", "ep_rank"), [(n, rank) for n in (1, 2, 4, 8) for rank in range(n)])
def test_every_rank_agrees_with_the_reference_layer(ep_size, ep_rank):
    weights = experts(ep_size, ep_rank)
    hidden_states, logits = random_batch(24, NUM_EXPERTS)
    routing, x = reference.route(logits, CONFIG, BIAS), reference.quantize_mxfp8(hidden_states)
    expected = reference.fused_moe(x, routing.topk_ids, routing.topk_weights, weights)
    out = layer(weights, 24, out_dtype=torch.float32)
    assert relative_l2(out, expected) <= 5e-3
    assert (out - expected).abs().max() <= 0.03 * expected.abs().max()
    assert_bitwise_equal(layer(weights, 24), out.bfloat16())


@pytest.mark.parametrize("ep_size", [2, 4, 8])
def test_the_ranks_add_up_to_the_single_rank_and_none_drops_everything(ep_size):
    partials = [layer(experts(ep_size, rank), 24, out_dtype=torch.float32) for rank in range(ep_size)]
    assert all(partial.abs().max() > 0 for partial in partials)
    whole = layer(experts(), 24, out_dtype=torch.float32)
    torch.testing.assert_close(sum(partials), whole, rtol=1e-5, atol=1e-6 * float(whole.abs().max()))


@pytest.mark.parametrize(
    "fields",
    [
        {"num_experts": 64, "strategy": "round_robin"},
        {"num_experts": 72, "physical_to_logical": tuple(sorted([*range(64), *range(8)]))},
        {"num_experts": 72, "physical_to_logical": (*range(64), *range(8)), "strategy": "round_robin"},
    ],
    ids=["round_robin", "redundant", "redundant_round_robin"],
)
@pytest.mark.parametrize("ep_size", [1, 8])
def test_other_placements_add_up_to_the_single_rank(fields, ep_size):
    ranks = [random_experts(ExpertPlacement(ep_size=ep_size, ep_rank=rank, **fields)) for rank in range(ep_size)]
    partials = [layer(weights, out_dtype=torch.float32) for weights in ranks]
    whole = layer(experts(), out_dtype=torch.float32)
    torch.testing.assert_close(sum(partials), whole, rtol=1e-5, atol=1e-6 * float(whole.abs().max()))


def test_thirty_experts_over_eight_ranks_add_up_to_the_single_rank():
    def run(ep_size: int, ep_rank: int) -> Tensor:
        hidden_states, logits = random_batch(9, 30)
        weights = random_experts(ExpertPlacement(30, ep_size, ep_rank))
        return routed_moe(hidden_states, logits, weights, CONFIG, out_dtype=torch.float32)

    whole = run(1, 0)
    total = sum(run(8, rank) for rank in range(8))
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-6 * float(whole.abs().max()))


def test_biases_and_activation_options_agree_with_the_reference_layer():
    gpt_oss = SwiGLU(alpha=1.702, limit=7.0, up_offset=1.0)
    weights = random_experts(ExpertPlacement(NUM_EXPERTS, 4, 1), activation=gpt_oss, has_bias=True)
    hidden_states, logits = random_batch(9, NUM_EXPERTS)
    config = RouterConfig(4, "softmax_selected", renormalize=False)
    routing = reference.route(logits, config)
    x = reference.quantize_mxfp8(hidden_states)
    expected = reference.fused_moe(x, routing.topk_ids, routing.topk_weights, weights)
    assert relative_l2(routed_moe(hidden_states, logits, weights, config, out_dtype=torch.float32), expected) <= 5e-3


def test_float32_hidden_states_are_not_rounded_to_bf16():
    hidden_states, logits = random_batch(9, NUM_EXPERTS)
    finer = hidden_states.float() * (1 + 2.0**-10)
    weights = experts(4, 1)
    expected = fused_moe(quantize_mxfp8(finer), route(logits, CONFIG), weights, num_experts=64, local_expert_offset=16)
    assert_bitwise_equal(routed_moe(finer, logits, weights, CONFIG), expected)
    assert not torch.equal(routed_moe(finer.bfloat16(), logits, weights, CONFIG), expected)


# --- the two forms of the ids ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("ep_size", [2, 4, 8, 16])
@pytest.mark.parametrize("num_tokens", TOKEN_COUNTS)
def test_global_and_rank_local_ids_give_the_same_bits(ep_size, num_tokens):
    hidden_states, logits = random_batch(num_tokens, NUM_EXPERTS)
    x, routing = quantize_mxfp8(hidden_states), route(logits, CONFIG, BIAS)
    for rank in {0, ep_size // 2, ep_size - 1}:
        weights = experts(ep_size, rank)
        local_range = weights.placement.local_range
        outputs = []
        for form in (routing, pack_topk(routing, NUM_EXPERTS), pack_topk(routing, NUM_EXPERTS, local_range)):
            space = dataclasses.asdict(id_space(form, NUM_EXPERTS, local_range))
            outputs.append(fused_moe(x, form, weights, **space))
        assert space["num_experts"] < NUM_EXPERTS, "the last form must be rank-local"
        assert_bitwise_equal(outputs[1], outputs[0])
        assert_bitwise_equal(outputs[2], outputs[0])
        assert_bitwise_equal(layer(weights, num_tokens, rank_local=True), outputs[0])
        assert_bitwise_equal(layer(weights, num_tokens, rank_local=False), outputs[0])


@pytest.mark.parametrize(
    "break_ids",
    [
        lambda ids, local_range: torch.where(ids < local_range.count, ids + 1, ids),
        lambda ids, local_range: torch.where(ids >= local_range.count, 0, ids),
        lambda ids, local_range: ids.flip(1),
    ],
    ids=["own_ids_off_by_one", "foreign_ids_owned", "slots_swapped"],
)
def test_a_broken_relabelling_is_caught_by_comparing_the_two_forms(monkeypatch, break_ids):
    right = rankmoe.pack.rank_local_ids

    def broken(topk_ids, local_range, num_experts):
        return break_ids(right(topk_ids, local_range, num_experts), local_range)

    monkeypatch.setattr(rankmoe.pack, "rank_local_ids", broken)
    assert not torch.equal(layer(experts(4, 1), rank_local=True), layer(experts(4, 1), rank_local=False))


def test_rank_local_ids_read_in_the_global_id_space_are_refused():
    hidden_states, logits = random_batch(9, NUM_EXPERTS)
    weights = experts(4, 1)
    packed = pack_topk(route(logits, CONFIG), NUM_EXPERTS, weights.placement.local_range)
    with pytest.raises(ValueError, match="num_experts"):
        fused_moe(quantize_mxfp8(hidden_states), packed, weights, num_experts=64, local_expert_offset=16)


def test_rank_local_ids_of_another_rank_are_refused():
    hidden_states, logits = random_batch(9, NUM_EXPERTS)
    packed = pack_topk(route(logits, CONFIG), NUM_EXPERTS, experts(4, 2).placement.local_range)
    with pytest.raises(ValueError, match="local_range"):
        fused_moe(quantize_mxfp8(hidden_states), packed, experts(4, 1), num_experts=24)


# --- batches ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rank_local", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_tokens_give_no_rows(rank_local, dtype):
    out = layer(experts(4, 1), 0, rank_local=rank_local, out_dtype=dtype)
    assert (out.shape, out.dtype) == ((0, 64), dtype)


def test_a_rank_that_owns_none_of_the_batchs_experts_gives_zeros():
    hidden_states, logits = random_batch(9, NUM_EXPERTS)
    logits[:, 16:] = -1e4
    assert torch.all(routed_moe(hidden_states, logits, experts(4, 1), CONFIG) == 0)


@pytest.mark.parametrize("num_valid", [0, 1, 6, 9])
@pytest.mark.parametrize("rank_local", [True, False])
def test_rows_beyond_the_valid_tokens_are_zero_and_may_hold_nan(num_valid, rank_local):
    hidden_states, logits = random_batch(9, NUM_EXPERTS)
    weights = random_experts(ExpertPlacement(NUM_EXPERTS, 4, 1), has_bias=True)
    alone = routed_moe(hidden_states[:num_valid], logits[:num_valid], weights, CONFIG)
    hidden_states[num_valid:], logits[num_valid:] = math.nan, math.nan
    out = routed_moe(
        hidden_states, logits, weights, CONFIG, rank_local=rank_local, num_valid_tokens=torch.tensor([num_valid])
    )
    assert_bitwise_equal(out[:num_valid], alone)
    assert torch.all(out[num_valid:] == 0)


@pytest.mark.parametrize("where", ["hidden_states", "router_logits"])
def test_a_nan_token_makes_its_own_output_nan_and_no_other(where):
    hidden_states, logits = random_batch(9, NUM_EXPERTS)
    clean = routed_moe(hidden_states, logits, experts(), CONFIG)
    (hidden_states if where == "hidden_states" else logits)[2] = math.nan
    out, others = routed_moe(hidden_states, logits, experts(), CONFIG), torch.arange(9) != 2
    assert out[2].isnan().all()
    assert_bitwise_equal(out[others], clean[others])


@pytest.mark.parametrize("bad_id", [-1, -5, -(2**31), NUM_EXPERTS])
@pytest.mark.parametrize("ep_rank", [0, 3], ids=["first_rank", "rank_with_the_last_expert"])
def test_a_slot_of_nobody_is_as_one_of_another_rank(bad_id, ep_rank):
    hidden_states, logits = random_batch(9, NUM_EXPERTS)
    x, weights = quantize_mxfp8(hidden_states), experts(4, ep_rank)
    workspace = Workspace.allocate(9, CONFIG.top_k, weights)

    def run(nobody: int) -> Tensor:
        routing = route(logits, CONFIG)
        routing.topk_ids[1, 0] = routing.topk_ids[2, -1] = nobody
        routing.topk_ids[3] = nobody
        workspace.middle.fill_(math.nan)
        workspace.rows.fill_(math.nan)
        offset = weights.placement.local_expert_offset
        return fused_moe(x, routing, weights, num_experts=64, local_expert_offset=offset, workspace=workspace)

    assert_bitwise_equal(run(bad_id), run(20))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint32])
def test_every_id_dtype_gives_the_same_bits(dtype):
    hidden_states, logits = random_batch(9, NUM_EXPERTS)
    x, routing, weights = quantize_mxfp8(hidden_states), route(logits, CONFIG), experts(4, 1)
    outputs = []
    for topk_ids in (routing.topk_ids, routing.topk_ids.to(dtype)):
        form = pack_topk(Routing(routing.topk_weights, topk_ids), NUM_EXPERTS, weights.placement.local_range)
        outputs.append(fused_moe(x, form, weights, num_experts=24))
        form = dataclasses.replace(form, packed=None, local_range=None)
        outputs.append(fused_moe(x, form, weights, num_experts=64, local_expert_offset=16))
    for output in outputs[1:]:
        assert_bitwise_equal(output, outputs[0])


def test_the_same_expert_in_two_slots_counts_twice():
    x, weights = quantize_mxfp8(random_batch(1, 64)[0]), experts()

    def run(ids: list[int], topk_weights: list[float]) -> Tensor:
        routing = Routing(torch.tensor([topk_weights]), torch.tensor([ids], dtype=torch.int32))
        return fused_moe(x, routing, weights, num_experts=64, out_dtype=torch.float32)

    assert_bitwise_equal(run([5, 5], [0.5, 0.25]), run([5], [0.75]))


# --- state -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("poison", [math.nan, math.inf, 0x7FFFFFFF])
def test_a_workspace_gives_the_same_bits_whatever_it_holds(poison):
    weights = experts(4, 1)
    workspace = Workspace.allocate(65, CONFIG.top_k, weights)
    for num_tokens in (65, 9, 0, 64):
        for buffer in (workspace.middle, workspace.rows):
            if isinstance(poison, int):
                buffer.view(torch.int32).fill_(poison)
            else:
                buffer.fill_(poison)
        assert_bitwise_equal(layer(weights, num_tokens, workspace=workspace), layer(weights, num_tokens))


def test_a_result_does_not_change_when_the_workspace_is_used_again():
    weights = experts(4, 1)
    workspace = Workspace.allocate(9, CONFIG.top_k, weights)
    first = layer(weights, workspace=workspace)
    copy = first.clone()
    layer(weights, 5, workspace=workspace)
    assert_bitwise_equal(first, copy)


def test_a_workspace_is_large_enough_where_every_slot_is_local():
    weights = experts(16, 3)  # as many experts as slots
    hidden_states, logits = random_batch(65, NUM_EXPERTS)
    logits[:, 12:16] += 100
    workspace = Workspace.allocate(65, CONFIG.top_k, weights)
    out = routed_moe(hidden_states, logits, weights, CONFIG, workspace=workspace)
    assert_bitwise_equal(out, routed_moe(hidden_states, logits, weights, CONFIG))


def test_a_workspace_is_float32_whatever_the_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        workspace = Workspace.allocate(9, CONFIG.top_k, experts(4, 1))
    finally:
        torch.set_default_dtype(torch.float32)
    assert (workspace.middle.dtype, workspace.rows.dtype) == (torch.float32, torch.float32)


def test_a_workspace_that_is_too_small_is_refused():
    weights = experts()
    workspace = Workspace.allocate(8, CONFIG.top_k, weights)
    with pytest.raises(ValueError, match=r"expected .* at least 72 rows of 32, got \(64, 32\)"):
        layer(weights, 9, workspace=workspace)


def test_a_second_run_gives_the_same_bits():
    assert_bitwise_equal(layer(experts(4, 1), 65), layer(experts(4, 1), 65))


# --- errors ----------------------------------------------------------------------------------------------------------
def test_different_numbers_of_tokens_are_refused():
    hidden_states, logits = random_batch(9, NUM_EXPERTS)
    with pytest.raises(ValueError, match="router_logits: expected 9 tokens as hidden_states, got 8"):
        routed_moe(hidden_states, logits[:8], experts(), CONFIG)


def test_logits_for_other_experts_than_the_placements_are_refused():
    hidden_states, logits = random_batch(9, 63)
    with pytest.raises(ValueError, match=r"router_logits: expected \[num_tokens, 64\] .*, got \(9, 63\)"):
        routed_moe(hidden_states, logits, experts(), CONFIG)


def test_a_schedule_for_another_batch_is_refused():
    hidden_states, logits = random_batch(9, NUM_EXPERTS)
    routing = route(logits, CONFIG)
    schedule = build_schedule(routing.topk_ids[:8], 64, num_experts=64)
    with pytest.raises(ValueError, match=r"x: expected mxfp8 \(8, 64\), got mxfp8 \(9, 64\)"):
        fused_moe(quantize_mxfp8(hidden_states), routing, experts(), num_experts=64, schedule=schedule)


# --- deferred finalize -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_tokens", [0, 5, 70])
def test_the_combine_can_be_left_to_the_caller(num_tokens):
    weights = experts(4, 1)
    hidden_states, logits = random_batch(num_tokens, NUM_EXPERTS)
    x, routing = quantize_mxfp8(hidden_states), route(logits, CONFIG, BIAS)
    space = {"num_experts": NUM_EXPERTS, "local_expert_offset": 16}
    deferred = expert_rows(x, routing, weights, **space)
    assert deferred.schedule.slot_rows.shape == (num_tokens, 8)
    total = torch.zeros(num_tokens, 64)
    for token, slots in enumerate(deferred.schedule.slot_rows.tolist()):
        for slot, row in enumerate(slots):
            if row >= 0:
                total[token] += deferred.topk_weights[token, slot] * deferred.rows[row]
    assert_bitwise_equal(total.bfloat16(), fused_moe(x, routing, weights, **space))
