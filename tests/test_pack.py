import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers import assert_bitwise_equal, seeded
from hypothesis import given
from hypothesis import strategies as st

from rankmoe import reference
from rankmoe.pack import IdSpace, id_space, pack, pack_topk, rank_local_ids, rank_local_num_experts, unpack
from rankmoe.route import route
from rankmoe.types import ExpertPlacement, LocalRange, RouterConfig, Routing

ID_DTYPES = [torch.int32, torch.int64, torch.uint32]


def routing_of(ids: list[list[int]], dtype: torch.dtype = torch.int32) -> Routing:
    topk_ids = torch.tensor(ids, dtype=torch.int64).to(torch.int32)
    topk_ids = topk_ids.view(dtype) if dtype == torch.uint32 else topk_ids.to(dtype)
    return Routing(torch.rand(topk_ids.shape, generator=seeded(0)), topk_ids)


# --- the packed word -------------------------------------------------------------------------------------------------
def test_weights_are_rounded_to_bf16_as_ml_dtypes_does():
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)  # 0x8000 is the tie
    values = (high[:, None] | low).view(np.float32)
    values = np.where(np.isnan(values), np.float32(0), values)
    with np.errstate(over="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.int32)
    weights = torch.from_numpy(values)
    packed = pack(torch.zeros(weights.shape, dtype=torch.int32), weights)
    assert np.array_equal(packed.numpy(), expected)
    assert torch.equal(packed, reference.pack(torch.zeros(weights.shape, dtype=torch.int32), weights))


@pytest.mark.parametrize("width", [1, 16, 37])
def test_a_nan_weight_packs_as_the_canonical_nan(width):
    ids, weights = torch.full((1, width), 5, dtype=torch.int32), torch.full((1, width), math.nan)
    packed = pack(ids, weights)
    assert torch.equal(unpack(packed)[0], ids)
    assert_bitwise_equal(packed, reference.pack(ids, weights))
    assert packed[0, 0].item() == (5 << 16) | 0x7FC0


@pytest.mark.parametrize(("weight", "code"), [(math.inf, 0x7F80), (-math.inf, 0xFF80), (1.0, 0x3F80), (-0.0, 0x8000)])
def test_the_weight_sits_in_the_low_half_and_the_id_in_the_high_half(weight, code):
    packed = pack(torch.tensor([[3]]), torch.tensor([[weight]]))
    assert packed.dtype == torch.int32
    assert packed.item() == (3 << 16) | code


def test_unpacking_extends_the_sign_of_the_id():
    ids, weights = unpack(torch.tensor([[-1, -65536, 0x7FFF0000 | 0x3F80]], dtype=torch.int32))
    assert ids.tolist() == [[-1, -1, 32767]]
    assert weights.dtype == torch.bfloat16
    assert weights[0, 2] == 1


@pytest.mark.parametrize("dtype", ID_DTYPES)
def test_every_id_dtype_packs_the_same_word(dtype):
    routing = routing_of([[0, 7, 32767, -1]], dtype)
    packed = pack(routing.topk_ids, routing.topk_weights)
    assert unpack(packed)[0].tolist() == [[0, 7, 32767, -1]]
    assert_bitwise_equal(unpack(packed)[1], routing.topk_weights.bfloat16())


@pytest.mark.parametrize("dtype", ID_DTYPES)
def test_an_id_above_32767_is_refused(dtype):
    routing = routing_of([[0, 32768]], dtype)
    with pytest.raises(ValueError, match=r"ids: expected at most 32767 .*, got 32768"):
        pack(routing.topk_ids, routing.topk_weights)


@pytest.mark.parametrize("ids", [-1, -5, -(2**31)])
def test_a_negative_id_stays_negative(ids):
    packed = pack(torch.tensor([[ids]], dtype=torch.int32), torch.tensor([[0.5]]))
    assert unpack(packed)[0].item() < 0
    assert unpack(packed)[1].item() == 0.5


def test_no_tokens_pack_to_no_words():
    packed = pack(torch.empty(0, 4, dtype=torch.int32), torch.empty(0, 4))
    assert (packed.shape, packed.dtype) == ((0, 4), torch.int32)
    assert unpack(packed)[0].shape == (0, 4)


# --- whether rank-local ids apply ------------------------------------------------------------------------------------
def test_kimi_k3_on_eight_ranks_needs_128_experts():
    local_range = ExpertPlacement(896, 8, 3).local_range
    assert local_range == LocalRange(336, 112)
    assert rank_local_num_experts(896, local_range, top_k=16) == 128


@pytest.mark.parametrize(
    ("num_experts", "count", "top_k", "expected"),
    [
        (64, 0, 4, None),  # no range
        (64, 64, 4, None),  # all experts
        (64, 63, 1, None),  # 64 experts are not fewer than 64
        (64, 57, 4, None),  # 61 rounds up to 64
        (64, 56, 4, 60),
        (64, 1, 1, 4),
        (64, 8, 4, 12),
        (64, 8, 5, 16),  # 13 rounds up to 16
    ],
)
def test_rank_local_ids_apply_where_the_rounded_count_is_smaller(num_experts, count, top_k, expected):
    assert rank_local_num_experts(num_experts, LocalRange(0, count), top_k) == expected
    assert reference.rank_local_num_experts(num_experts, LocalRange(0, count), top_k) == expected


@pytest.mark.parametrize("count", [0, 63, 64])
def test_ids_stay_global_where_rank_local_ones_do_not_apply(count):
    routing = routing_of([[1, 5, 63, 20]])
    packed = pack_topk(routing, 64, LocalRange(0, count))
    assert packed.local_range is None
    assert_bitwise_equal(packed, pack_topk(routing, 64))
    assert torch.equal(unpack(packed.packed)[0], routing.topk_ids)


@pytest.mark.parametrize(("offset", "count"), [(60, 8), (-1, 4), (64, 1), (0, 65)])
def test_a_range_outside_the_experts_is_refused_naming_both_numbers(offset, count):
    local_range, routing = LocalRange(offset, count), routing_of([[1, 2]])
    message = f"num_experts=64, got offset={offset}, count={count}"
    for call in (
        lambda: rank_local_num_experts(64, local_range, 2),
        lambda: rank_local_ids(routing.topk_ids, local_range, 64),
        lambda: pack_topk(routing, 64, local_range),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("count", [0, 64])
def test_relabelling_for_no_expert_or_all_experts_is_refused_naming_both_numbers(count):
    with pytest.raises(ValueError, match=f"offset=0, count={count}, top_k=2, num_experts=64"):
        rank_local_ids(torch.tensor([[1, 2]]), LocalRange(0, count), 64)


# --- relabelling -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ID_DTYPES)
def test_own_ids_move_down_and_a_foreign_id_becomes_count_plus_its_slot(dtype):
    ids = routing_of([[8, 15, 16, 7], [0, 63, 9, -1]], dtype).topk_ids
    relabelled = rank_local_ids(ids, LocalRange(8, 8), 64)
    assert relabelled.dtype == torch.int32
    assert relabelled.tolist() == [[0, 7, 10, 11], [8, 9, 1, 11]]
    if dtype != torch.uint32:
        assert torch.equal(relabelled, reference.rank_local_ids(ids, LocalRange(8, 8)).int())


def test_packing_rank_local_ids_leaves_ids_and_weights_global():
    routing = routing_of([[8, 15, 16, 7]])
    ids, weights = routing.topk_ids.clone(), routing.topk_weights.clone()
    packed = pack_topk(routing, 64, LocalRange(8, 8))
    for result in (routing, packed):
        assert_bitwise_equal(result.topk_ids, ids)
        assert_bitwise_equal(result.topk_weights, weights)
    assert packed.local_range == LocalRange(8, 8)
    assert unpack(packed.packed)[0].tolist() == [[0, 7, 10, 11]]


def test_an_expert_named_twice_is_relabelled_in_both_slots():
    assert rank_local_ids(torch.tensor([[9, 9, 3, 3]]), LocalRange(8, 8), 64).tolist() == [[1, 1, 10, 11]]


def test_a_large_id_space_packs_where_the_relabelled_ids_fit():
    routing = routing_of([[40_000, 39_999]])
    assert unpack(pack_topk(routing, 50_000, LocalRange(40_000, 8)).packed)[0].tolist() == [[0, 9]]
    with pytest.raises(ValueError, match="got 50000"):
        pack_topk(routing, 50_000)


def test_no_tokens_relabel_to_no_ids():
    assert rank_local_ids(torch.empty(0, 4, dtype=torch.int32), LocalRange(8, 8), 64).shape == (0, 4)


@st.composite
def relabelling_problems(draw):
    num_experts = draw(st.integers(8, 200))
    top_k = draw(st.integers(1, 8))
    count = draw(st.integers(1, num_experts).filter(lambda c: (c + top_k + 3) // 4 * 4 < num_experts))
    local_range = LocalRange(draw(st.integers(0, num_experts - count)), count)
    row = st.lists(st.integers(0, num_experts - 1), min_size=top_k, max_size=top_k, unique=True)
    ids = torch.tensor(draw(st.lists(row, min_size=1, max_size=5)), dtype=torch.int32)
    return Routing(torch.rand(ids.shape, generator=seeded(1)), ids), num_experts, local_range


@given(relabelling_problems())
def test_both_forms_name_the_same_token_expert_weight_triples_in_the_same_order(problem):
    routing, num_experts, local_range = problem
    rank_local = pack_topk(routing, num_experts, local_range)
    triples = []
    for form in (pack_topk(routing, num_experts), rank_local):
        ids, weights = unpack(form.packed)
        local = ids - id_space(form, num_experts, local_range).local_expert_offset
        is_owned = (local >= 0) & (local < local_range.count)
        triples.append((is_owned.nonzero(), local[is_owned], weights[is_owned]))
    for from_global, from_rank_local in zip(*triples, strict=True):
        assert torch.equal(from_global, from_rank_local)


@given(relabelling_problems())
def test_relabelled_ids_stay_distinct_and_inside_the_consumers_experts(problem):
    routing, num_experts, local_range = problem
    ids = unpack(pack_topk(routing, num_experts, local_range).packed)[0]
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    assert int(ids.min()) >= 0
    assert int(ids.max()) < rank_local_num_experts(num_experts, local_range, ids.shape[1])
    assert torch.equal(ids, reference.rank_local_ids(routing.topk_ids, local_range))


@pytest.mark.parametrize("ep_size", [2, 8, 16])
def test_routed_kimi_k3_ids_are_relabelled_as_the_reference_on_every_rank(ep_size):
    routing = route(torch.randn(9, 896, generator=seeded(2)), RouterConfig(16))
    for rank in range(ep_size):
        local_range = ExpertPlacement(896, ep_size, rank).local_range
        packed = pack_topk(routing, 896, local_range)
        expected = reference.pack(reference.rank_local_ids(routing.topk_ids, local_range), routing.topk_weights)
        assert_bitwise_equal(packed.packed, expected)


# --- the id space ----------------------------------------------------------------------------------------------------
def test_the_id_space_of_each_form_is_stated():
    routing, local_range = routing_of([[8, 15, 16, 7]]), LocalRange(8, 8)
    assert id_space(pack_topk(routing, 64, local_range), 64, local_range) == IdSpace(12, 0)
    assert id_space(pack_topk(routing, 64), 64, local_range) == IdSpace(64, 8)
    assert id_space(routing, 64, local_range) == IdSpace(64, 8)


def test_ids_written_for_another_rank_have_no_id_space_here():
    packed = pack_topk(routing_of([[8, 15, 16, 7]]), 64, LocalRange(8, 8))
    with pytest.raises(ValueError, match="expected the weights' range offset=16, count=8, got offset=8, count=8"):
        id_space(packed, 64, LocalRange(16, 8))


def test_a_range_that_rank_local_ids_cannot_have_is_refused():
    routing, all_experts = pack_topk(routing_of([[1, 2]]), 64), LocalRange(0, 64)
    claimed = dataclasses.replace(routing, local_range=all_experts)
    with pytest.raises(ValueError, match="count=64 of 64"):
        id_space(claimed, 64, all_experts)


def test_packing_a_second_time_starts_from_the_global_ids():
    routing, local_range = routing_of([[8, 15, 16, 7]]), LocalRange(8, 8)
    once = pack_topk(routing, 64, local_range)
    assert_bitwise_equal(pack_topk(once, 64, local_range), once)
    assert_bitwise_equal(pack_topk(once, 64), pack_topk(routing, 64))


# --- errors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ids", "weights", "error", "message"),
    [
        (torch.zeros(1, 2).short(), torch.zeros(1, 2), TypeError, "expected int32, int64 or uint32, got torch.int16"),
        (torch.zeros(1, 2), torch.zeros(1, 2), TypeError, "expected int32, int64 or uint32, got torch.float32"),
        (torch.zeros(1, 2).int(), torch.zeros(1, 2).bfloat16(), TypeError, "weights: expected float32, got torch.bfl"),
        (torch.zeros(1, 2).int(), torch.zeros(2, 2), ValueError, r"weights: expected .* \(1, 2\), got \(2, 2\)"),
    ],
)
def test_ids_and_weights_that_do_not_fit_are_refused_by_name(ids, weights, error, message):
    with pytest.raises(error, match=message):
        pack(ids, weights)


def test_unpacking_anything_but_int32_is_refused():
    with pytest.raises(TypeError, match="packed: expected int32, got"):
        unpack(torch.zeros(1, 2, dtype=torch.int64))
