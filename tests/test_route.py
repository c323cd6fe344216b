import dataclasses
import math

import numpy as np
import pytest
import torch
from helpers import assert_bitwise_equal, seeded
from hypothesis import given
from hypothesis import strategies as st

from rankmoe import reference
from rankmoe.route import route
from rankmoe.types import RouterConfig

SCORINGS = ("sigmoid", "softmax", "softmax_selected")
DEEPSEEK_V3_GROUPS = {"num_expert_groups": 8, "topk_groups": 4}
NUM_EXPERTS = (8, 30, 60, 128, 160, 256, 257, 384, 512, 896, 1024)
TOP_K = (1, 2, 4, 8, 10, 16, 22, 32)


# --- an independent statement of the rule: sort (rank value descending, id ascending) tuples --------------------------
def float32_scores(logits: torch.Tensor, config: RouterConfig) -> np.ndarray:
    logits = logits.float()
    if config.scoring == "sigmoid":
        return logits.double().sigmoid().float().numpy()
    return logits.softmax(-1).numpy() if config.scoring == "softmax" else logits.numpy()


def choose(rank_values: np.ndarray, config: RouterConfig) -> list[int]:
    values = [-1e30 if math.isnan(value) else value for value in rank_values.tolist()]
    best_first = sorted(range(len(values)), key=lambda expert: (-values[expert], expert))
    if config.num_expert_groups > 1:
        size = len(values) // config.num_expert_groups

        def group_value(group: int) -> float:
            best_two = [values[expert] for expert in best_first if expert // size == group][:2]
            return float(sum(np.float32(value) for value in best_two))

        best_groups = sorted(range(config.num_expert_groups), key=lambda group: (-group_value(group), group))
        best_first = [expert for expert in best_first if expert // size in best_groups[: config.topk_groups]]
    chosen = best_first[: config.top_k]
    return sorted(chosen) if config.slot_order == "id" else chosen


def weigh(chosen_scores: np.ndarray, config: RouterConfig) -> np.ndarray:
    if config.scoring == "softmax_selected":
        chosen_scores = torch.from_numpy(chosen_scores).softmax(-1).numpy()
    if config.renormalize:
        total = np.float32(0)
        for score in chosen_scores:
            total = np.float32(total + score)
        chosen_scores = chosen_scores / (total if total > 0 else np.float32(1))
    return chosen_scores * np.float32(config.routed_scaling_factor)


def rule(
    logits: torch.Tensor, config: RouterConfig, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = float32_scores(logits, config)
    with np.errstate(invalid="ignore"):  # inf - inf
        rank_values = scores if bias is None else scores + bias.numpy()
    ids = [choose(row, config) for row in rank_values]
    weights = [weigh(row[chosen], config) for row, chosen in zip(scores, ids, strict=True)]
    return torch.from_numpy(np.array(weights, dtype=np.float32)), torch.tensor(ids, dtype=torch.int32)


def assert_follows_rule(logits: torch.Tensor, config: RouterConfig, bias: torch.Tensor | None = None) -> None:
    routing = route(logits, config, bias)
    weights, ids = rule(logits, config, bias)
    assert torch.equal(routing.topk_ids, ids)
    torch.testing.assert_close(routing.topk_weights, weights, rtol=1e-5, atol=0, equal_nan=True)


def random_logits(num_tokens: int, num_experts: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (2 * torch.randn(num_tokens, num_experts, generator=seeded(num_experts))).to(dtype)


def random_bias(num_experts: int) -> torch.Tensor:
    return 0.2 * torch.randn(num_experts, generator=seeded(7))


# --- families --------------------------------------------------------------------------------------------------------
@pytest.fixture(params=[False, True], ids=["one_group", "deepseek_v3_groups"])
def groups(request: pytest.FixtureRequest) -> dict[str, int]:
    return DEEPSEEK_V3_GROUPS if request.param else {}


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("renormalize", [True, False], ids=["renormalized", "as_scored"])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("slot_order", ["id", "value"])
def test_every_family_follows_the_rule_and_the_reference(scoring, renormalize, has_bias, dtype, slot_order, groups):
    config = RouterConfig(8, scoring, renormalize, 2.5, slot_order=slot_order, **groups)
    logits, bias = random_logits(2, 256, dtype), random_bias(256) if has_bias else None
    assert_follows_rule(logits, config, bias)
    assert_bitwise_equal(route(logits, config, bias), reference.route(logits, config, bias))


@pytest.mark.parametrize(("num_experts", "top_k"), [(e, k) for e in NUM_EXPERTS for k in TOP_K if k <= e])
def test_every_number_of_experts_and_slots_follows_the_rule(num_experts, top_k):
    logits = random_logits(3, num_experts, torch.bfloat16)  # bfloat16 repeats values
    assert_follows_rule(logits, RouterConfig(top_k), random_bias(num_experts))
    assert_follows_rule(logits, RouterConfig(top_k, "softmax"))


@pytest.mark.parametrize("scoring", SCORINGS)
def test_scores_agree_with_float64(scoring):
    logits = random_logits(16, 128).numpy().astype(np.float64)
    scores = 1 / (1 + np.exp(-logits)) if scoring == "sigmoid" else np.exp(logits)
    if scoring == "softmax":
        scores /= scores.sum(-1, keepdims=True)
    chosen = np.sort(np.argsort(-scores, axis=-1)[:, :8], axis=-1)
    chosen_scores = np.take_along_axis(scores, chosen, axis=-1)
    if scoring == "softmax_selected":
        chosen_scores /= chosen_scores.sum(-1, keepdims=True)
    routing = route(random_logits(16, 128), RouterConfig(8, scoring, renormalize=False))
    assert routing.topk_ids.tolist() == chosen.tolist()
    np.testing.assert_allclose(routing.topk_weights.numpy(), chosen_scores, rtol=1e-5)


@st.composite
def routing_problems(draw):
    num_groups, group_size = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    num_experts, topk_groups = num_groups * group_size, draw(st.integers(1, num_groups))
    config = RouterConfig(
        draw(st.integers(1, topk_groups * group_size)),
        draw(st.sampled_from(SCORINGS)),
        draw(st.booleans()),
        num_expert_groups=num_groups,
        topk_groups=topk_groups,
        slot_order=draw(st.sampled_from(["id", "value"])),
    )
    few_values = st.sampled_from([-math.inf, -1e4, -1.0, -0.0, 0.0, 0.5, 1.0, math.inf, math.nan])
    rows = draw(st.lists(st.lists(few_values, min_size=num_experts, max_size=num_experts), min_size=1, max_size=4))
    bias = draw(st.none() | st.lists(few_values, min_size=num_experts, max_size=num_experts))
    return torch.tensor(rows), config, None if bias is None else torch.tensor(bias)


@given(routing_problems())
def test_logits_and_biases_full_of_ties_and_special_values_follow_the_rule(problem):
    logits, config, bias = problem
    assert_follows_rule(logits, config, bias)
    assert_bitwise_equal(route(logits, config, bias).topk_ids, reference.route(logits, config, bias).topk_ids)


# --- ranking ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("value", [0.0, -3.5, -1e4, 1e4, math.inf, -math.inf, math.nan])
def test_a_row_of_one_value_gives_the_smallest_ids(value, scoring, groups):
    routing = route(torch.full((2, 256), value), RouterConfig(8, scoring, **groups))
    assert routing.topk_ids.tolist() == [list(range(8))] * 2


@pytest.mark.parametrize("scoring", SCORINGS)
def test_repeated_bf16_values_go_to_the_smaller_ids(scoring):
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 3.0, 2.0]]).bfloat16()
    assert route(logits, RouterConfig(5, scoring)).topk_ids.tolist() == [[1, 2, 3, 4, 6]]


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("shift", [-30.0, -100.0, -1e4])
@pytest.mark.parametrize("num_experts", [30, 257, 896])
def test_all_negative_logits_choose_as_the_rule(shift, num_experts, scoring):
    logits = random_logits(4, num_experts) + shift
    config = RouterConfig(8, scoring)
    assert torch.equal(route(logits, config).topk_ids, reference.route(logits, config).topk_ids)
    assert_follows_rule(logits, config)


def test_negative_zero_ties_with_zero():
    logits = torch.tensor([[-0.0, 0.0, -0.0, 0.0]])
    assert route(logits, RouterConfig(2, "softmax_selected")).topk_ids.tolist() == [[0, 1]]


def test_a_nan_rank_value_lies_between_minus_1e30_and_minus_infinity():
    logits = torch.tensor([[-math.inf, math.nan, -2e30, -1e29]])
    config = RouterConfig(3, "softmax_selected", slot_order="value")
    assert route(logits, config).topk_ids.tolist() == [[3, 1, 2]]


def test_logits_are_not_rounded_to_bf16():
    logits = torch.tensor([[1.0, 1.0 + 2**-20]])
    assert route(logits, RouterConfig(1, "sigmoid")).topk_ids.tolist() == [[1]]


def test_an_ineligible_group_never_wins_over_minus_infinity():
    config = RouterConfig(4, "softmax_selected", num_expert_groups=2, topk_groups=1)
    logits = torch.tensor([[-9.0, -9.0, -9.0, -9.0, -1.0, -1.0, -math.inf, -math.inf]])
    assert route(logits, config).topk_ids.tolist() == [[4, 5, 6, 7]]


def test_a_group_counts_by_its_two_best_experts():
    config = RouterConfig(1, "softmax_selected", num_expert_groups=2, topk_groups=1)
    logits = torch.tensor([[9.0, 0.0, 0.0, 5.0, 5.0, 4.0]])
    assert route(logits, config).topk_ids.tolist() == [[3]]


# --- rows that hold what they should not -----------------------------------------------------------------------------
BAD_ROWS = {
    "all_nan": lambda row: row.fill_(math.nan),
    "one_nan": lambda row: row[7:8].fill_(math.nan),
    "all_plus_inf": lambda row: row.fill_(math.inf),
    "one_plus_inf": lambda row: row[5:6].fill_(math.inf),
    "all_minus_inf": lambda row: row.fill_(-math.inf),
    "mixed": lambda row: row.copy_(torch.tensor([math.nan, math.inf, -math.inf, 1.0]).repeat(len(row) // 4)),
}


@pytest.mark.parametrize("bad", BAD_ROWS)
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_bad_row_has_valid_ids_and_changes_no_other_row(bad, scoring, dtype, groups):
    config, bias = RouterConfig(8, scoring, **groups), random_bias(256)
    logits = random_logits(5, 256, dtype)
    clean = route(logits, config, bias)
    BAD_ROWS[bad](logits[2])
    routing = route(logits, config, bias)

    others = torch.tensor([0, 1, 3, 4])
    assert_bitwise_equal(routing.topk_ids[others], clean.topk_ids[others])
    assert_bitwise_equal(routing.topk_weights[others], clean.topk_weights[others])
    ids = routing.topk_ids[2].tolist()
    assert len(set(ids)) == 8
    assert 0 <= min(ids) <= max(ids) < 256
    assert_follows_rule(logits, config, bias)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_bias_that_is_not_finite_ranks_an_expert_last_and_leaves_its_score(value):
    logits, bias = torch.zeros(1, 4), torch.zeros(4)
    bias[0] = value
    assert route(logits, RouterConfig(3), bias).topk_ids.tolist() == [[1, 2, 3]]
    weights = route(logits, RouterConfig(4, renormalize=False), bias).topk_weights
    assert weights.tolist() == [[0.5] * 4]


# --- weights ---------------------------------------------------------------------------------------------------------
def test_the_bias_moves_the_ranking_and_never_the_weight():
    logits = torch.tensor([[2.0, 0.0, -2.0, -4.0]])
    bias = torch.tensor([0.0, 0.0, 5.0, 5.0])
    routing = route(logits, RouterConfig(2, renormalize=False), bias)
    assert routing.topk_ids.tolist() == [[2, 3]]
    torch.testing.assert_close(routing.topk_weights, logits[:, 2:].sigmoid())


@pytest.mark.parametrize("slot_order", ["id", "value"])
def test_the_sum_of_scores_is_taken_in_slot_order(slot_order):
    config = RouterConfig(16, slot_order=slot_order)
    logits = 4 * torch.randn(64, 128, generator=seeded(3))
    scores = route(logits, dataclasses.replace(config, renormalize=False)).topk_weights.numpy()
    expected = np.array([weigh(row, config) for row in scores])
    assert_bitwise_equal(route(logits, config).topk_weights, torch.from_numpy(expected))
    backwards = np.array([weigh(row[::-1], config)[::-1] for row in scores])
    assert not np.array_equal(backwards, expected), "the order must matter for these logits"


def test_a_sum_of_zero_divides_by_one():
    assert route(torch.full((1, 8), -1e4), RouterConfig(4)).topk_weights.tolist() == [[0.0] * 4]


def test_a_sum_of_nan_divides_by_one():
    logits = torch.tensor([[0.0, math.nan, 1.0]])
    scores = route(logits, RouterConfig(3, renormalize=False)).topk_weights
    assert scores.isnan().tolist() == [[False, True, False]]
    assert_bitwise_equal(route(logits, RouterConfig(3, routed_scaling_factor=2.0)).topk_weights, 2 * scores)


def test_the_scaling_factor_comes_last():
    logits = random_logits(4, 32)
    plain = route(logits, RouterConfig(4)).topk_weights
    assert_bitwise_equal(route(logits, RouterConfig(4, routed_scaling_factor=2.827)).topk_weights, plain * 2.827)


# --- sizes and strides -----------------------------------------------------------------------------------------------
def embed_in_wider_rows(logits: torch.Tensor) -> torch.Tensor:
    return torch.cat([logits, torch.full_like(logits, 99)], 1)[:, : logits.shape[1]]


def embed_in_columns(logits: torch.Tensor) -> torch.Tensor:
    margin = torch.full_like(logits[:, :3], 99)
    return torch.cat([margin, logits, margin], 1)[:, 3:-3]


def embed_in_every_second_row(logits: torch.Tensor) -> torch.Tensor:
    return torch.stack([logits, torch.full_like(logits, 99)], 1).flatten(0, 1)[::2]


@pytest.mark.parametrize("embed", [embed_in_wider_rows, embed_in_columns, embed_in_every_second_row])
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_strided_view_gives_the_same_bits(embed, scoring, dtype):
    logits = random_logits(5, 60, dtype)
    view = embed(logits)
    assert not view.is_contiguous()
    assert_bitwise_equal(route(view, RouterConfig(4, scoring)), route(logits, RouterConfig(4, scoring)))


def test_a_transposed_view_is_refused_by_its_strides():
    with pytest.raises(ValueError, match=r"router_logits: expected inner stride 1, got strides \(1, 60\)"):
        route(torch.zeros(8, 60).t(), RouterConfig(4))


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("num_experts", [8, 30, 60, 64, 257])
def test_a_token_does_not_depend_on_its_place_in_the_batch(scoring, num_experts):
    logits, config = random_logits(65, num_experts), RouterConfig(8, scoring)
    whole = route(logits, config)
    for first, last in [(0, 1), (0, 7), (0, 63), (0, 64), (1, 65), (62, 65), (64, 65)]:
        part = route(logits[first:last], config)
        assert_bitwise_equal(part.topk_ids, whole.topk_ids[first:last])
        assert_bitwise_equal(part.topk_weights, whole.topk_weights[first:last])


@pytest.mark.parametrize("scoring", SCORINGS)
def test_no_tokens_give_empty_results(scoring, groups):
    routing = route(torch.empty(0, 256), RouterConfig(8, scoring, **groups), torch.zeros(256))
    assert (routing.topk_weights.shape, routing.topk_weights.dtype) == ((0, 8), torch.float32)
    assert (routing.topk_ids.shape, routing.topk_ids.dtype) == ((0, 8), torch.int32)


@pytest.mark.parametrize("num_valid", [0, 1, 3, 5])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_rows_beyond_the_valid_tokens_get_no_expert_and_may_hold_nan(num_valid, dtype):
    config, logits = RouterConfig(4), random_logits(5, 32)
    clean = route(logits, config)
    logits[num_valid:] = math.nan
    routing = route(logits, config, num_valid_tokens=torch.tensor([num_valid], dtype=dtype))
    assert_bitwise_equal(routing.topk_ids[:num_valid], clean.topk_ids[:num_valid])
    assert_bitwise_equal(routing.topk_weights[:num_valid], clean.topk_weights[:num_valid])
    assert torch.all(routing.topk_ids[num_valid:] == -1)
    assert torch.all(routing.topk_weights[num_valid:] == 0)


def test_the_inputs_are_not_changed():
    logits, bias = random_logits(3, 32), random_bias(32)
    copies = logits.clone(), bias.clone()
    route(logits, RouterConfig(4), bias, torch.tensor([2]))
    assert_bitwise_equal(logits, copies[0])
    assert_bitwise_equal(bias, copies[1])


# --- errors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("logits", "bias", "error", "message"),
    [
        (torch.zeros(2, 8).half(), None, TypeError, "router_logits: expected float32 or bfloat16, got torch.float16"),
        (torch.zeros(8), None, ValueError, r"router_logits: expected \[num_tokens, num_experts\], got \(8,\)"),
        (torch.zeros(2, 3), None, ValueError, r"top_k: expected at most 3, .*, got 4"),
        (torch.zeros(2, 8), torch.zeros(8).bfloat16(), TypeError, "correction_bias: expected float32, got torch.bfl"),
        (torch.zeros(2, 8), torch.zeros(7), ValueError, r"correction_bias: expected \(8,\), got \(7,\)"),
    ],
)
def test_an_input_that_does_not_fit_is_refused_by_name(logits, bias, error, message):
    with pytest.raises(error, match=message):
        route(logits, RouterConfig(4), bias)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 0}, "top_k: expected at least 1, got 0"),
        ({"scoring": "tanh"}, "scoring: expected .*, got 'tanh'"),
        ({"slot_order": "random"}, "slot_order: expected 'id' or 'value', got 'random'"),
        ({"num_expert_groups": 4, "topk_groups": 5}, "topk_groups: expected 1 to num_expert_groups=4, got 5"),
        ({"topk_groups": 0}, "topk_groups: expected 1 to num_expert_groups=1, got 0"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        RouterConfig(**{"top_k": 2, **fields})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RouterConfig(2, num_expert_groups=3), "num_expert_groups: expected a divisor of num_experts=8, got 3"),
        (
            RouterConfig(5, num_expert_groups=4, topk_groups=2),
            r"top_k: expected at most 4, the experts in 2 of 4 groups of 8 experts, got 5",
        ),
    ],
)
def test_groups_that_do_not_fit_the_experts_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        route(torch.zeros(2, 8), config)
