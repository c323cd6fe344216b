import pytest
import torch
from helpers import assert_bitwise_equal, seeded
from hypothesis import given
from hypothesis import strategies as st

from rankmoe import reference
from rankmoe.pack import id_space, pack_topk
from rankmoe.route import route
from rankmoe.schedule import build_schedule, schedule_routing
from rankmoe.types import ExpertPlacement, ExpertSchedule, LocalRange, RouterConfig, Routing

INT_MIN = -(2**31)


def random_ids(num_tokens: int, num_experts: int, top_k: int, seed: int = 0) -> torch.Tensor:
    """Distinct in a row."""
    order = torch.rand(num_tokens, num_experts, generator=seeded(seed)).argsort(1)
    return order[:, :top_k].sort(1).values.int()


def pairs(schedule: ExpertSchedule) -> list[tuple[int, int]]:
    """(local expert, token) of every row, read from the offsets and row tokens."""
    counts = schedule.expert_counts.long()
    experts = torch.arange(schedule.num_local_experts).repeat_interleave(counts)
    return list(zip(experts.tolist(), schedule.row_tokens.tolist(), strict=True))


def assert_consistent(schedule: ExpertSchedule, local_ids: list[list[int]]) -> None:
    """Every field against a plain statement; ``local_ids`` has -1 where this rank computes nothing."""
    expected = sorted({(e, t) for t, row in enumerate(local_ids) for e in row if e >= 0})
    assert pairs(schedule) == expected
    slot_rows = [[expected.index((e, t)) if e >= 0 else -1 for e in row] for t, row in enumerate(local_ids)]
    assert schedule.slot_rows.tolist() == slot_rows
    if schedule.expert_token_mask is not None:
        tokens = [
            [t for t in range(schedule.num_tokens) if (mask >> t) & 1] for mask in schedule.expert_token_mask.tolist()
        ]
        assert [(e, t) for e, row in enumerate(tokens) for t in row] == expected


def local(ids: list[list[int]], offset: int, count: int) -> list[list[int]]:
    return [[e - offset if offset <= e < offset + count else -1 for e in row] for row in ids]


# --- what a schedule is ----------------------------------------------------------------------------------------------
def test_the_worked_example_of_the_docstring():
    schedule = build_schedule(torch.tensor([[0, 3], [2, 3], [0, 3]]), 4, num_experts=4)
    assert schedule.num_tokens == 3
    assert schedule.expert_token_mask.tolist() == [0b101, 0, 0b010, 0b111]
    assert schedule.expert_counts.tolist() == [2, 0, 1, 3]
    assert schedule.expert_offsets.tolist() == [0, 2, 2, 3, 6]
    assert schedule.row_tokens.tolist() == [0, 2, 1, 0, 1, 2]
    assert schedule.slot_rows.tolist() == [[0, 3], [2, 4], [1, 5]]


@pytest.mark.parametrize("num_tokens", [*range(1, 65), 65, 100])
def test_every_number_of_tokens_equals_the_reference(num_tokens):
    ids, count, offset = random_ids(num_tokens, 32, 4, seed=num_tokens), 8, 8
    schedule = build_schedule(ids, count, num_experts=32, local_expert_offset=offset)
    assert_bitwise_equal(schedule, reference.build_schedule(ids - offset, count))
    assert_consistent(schedule, local(ids.tolist(), offset, count))
    assert (schedule.expert_token_mask is None) == (num_tokens > 64)


def test_the_last_of_64_tokens_is_the_masks_sign_bit():
    ids = torch.full((64, 1), 1)
    ids[63] = 0
    mask = build_schedule(ids, 2, num_experts=2).expert_token_mask
    assert [value % 2**64 for value in mask.tolist()] == [2**63, 2**63 - 1]


def test_all_64_tokens_set_all_64_bits():
    schedule = build_schedule(torch.zeros(64, 1, dtype=torch.int64), 1, num_experts=1)
    assert schedule.expert_token_mask.tolist() == [-1]
    assert schedule.expert_counts.tolist() == [64]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32])
def test_every_id_dtype_gives_the_same_schedule(dtype):
    ids = random_ids(5, 32, 4)
    ids[2, 1] = -1
    other = ids.view(dtype) if dtype == torch.uint32 else ids.to(dtype)
    build = {"num_local_experts": 8, "num_experts": 32, "local_expert_offset": 24}
    assert_bitwise_equal(build_schedule(other, **build), build_schedule(ids, **build))


# --- slots that nobody computes --------------------------------------------------------------------------------------
@pytest.mark.parametrize("offset", [0, 24], ids=["first_rank", "rank_with_the_last_expert"])
@pytest.mark.parametrize("bad_id", [-1, -5, INT_MIN, 32, 2**31 - 1])
@pytest.mark.parametrize("slot", [0, 3], ids=["first_slot", "last_slot"])
def test_an_id_outside_the_experts_is_skipped(bad_id, slot, offset):
    ids = random_ids(5, 32, 4)
    ids[1, slot] = bad_id
    ids[3] = bad_id
    schedule = build_schedule(ids, 8, num_experts=32, local_expert_offset=offset)
    assert_consistent(schedule, local(ids.tolist(), offset, 8))


@pytest.mark.parametrize("bad_id", [-1, -5, INT_MIN, 30, 2**31 - 1])
def test_an_id_outside_the_map_is_skipped(bad_id):
    ids, placement = random_ids(5, 30, 4), ExpertPlacement(30, 8, 0, "round_robin")
    ids[1, 0] = ids[2, 3] = bad_id
    schedule = build_schedule(ids, 4, num_experts=30, expert_map=placement.expert_map)
    owned = {expert: position for position, expert in enumerate(placement.expert_ids)}
    assert_consistent(schedule, [[owned.get(expert, -1) for expert in row] for row in ids.tolist()])


def test_int64_ids_beyond_int32_are_skipped_and_do_not_wrap():
    ids = torch.tensor([[2**32 + 1, 1], [-(2**32) + 1, 2**40]])
    assert build_schedule(ids, 4, num_experts=4).slot_rows.tolist() == [[-1, 0], [-1, -1]]


def test_a_rank_without_any_of_the_batchs_experts_has_no_rows():
    schedule = build_schedule(torch.tensor([[0, 1], [2, 3]]), 4, num_experts=8, local_expert_offset=4)
    assert schedule.expert_offsets.tolist() == [0] * 5
    assert schedule.row_tokens.shape == (0,)
    assert torch.all(schedule.slot_rows == -1)


def test_an_expert_named_twice_gets_one_row_which_both_slots_read():
    schedule = build_schedule(torch.tensor([[1, 1, 0], [0, 1, 0]]), 2, num_experts=2)
    assert schedule.row_tokens.tolist() == [0, 1, 0, 1]
    assert schedule.slot_rows.tolist() == [[2, 2, 0], [1, 3, 1]]


@pytest.mark.parametrize("num_local_experts", [0, 4])
def test_no_tokens_give_a_schedule_without_rows(num_local_experts):
    schedule = build_schedule(torch.empty(0, 2, dtype=torch.int32), num_local_experts, num_experts=8)
    assert schedule.expert_token_mask.tolist() == [0] * num_local_experts
    assert schedule.expert_offsets.tolist() == [0] * (num_local_experts + 1)
    assert schedule.row_tokens.shape == (0,)
    assert schedule.slot_rows.shape == (0, 2)


# --- placements ------------------------------------------------------------------------------------------------------
PLACEMENTS = {
    "contiguous": [ExpertPlacement(32, 8, rank) for rank in range(8)],
    "thirty_over_eight": [ExpertPlacement(30, 8, rank) for rank in range(8)],
    "round_robin": [ExpertPlacement(30, 8, rank, "round_robin") for rank in range(8)],
    # 32 of 256 experts have two copies, most pairs of them on one rank.
    "redundant": [
        ExpertPlacement(288, 8, rank, physical_to_logical=tuple(sorted([*range(256), *range(0, 256, 8)])))
        for rank in range(8)
    ],
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_slot_is_computed_by_exactly_one_rank(name):
    ranks = PLACEMENTS[name]
    ids = random_ids(20, ranks[0].num_logical_experts, 6)
    computed_by = torch.zeros(ids.shape, dtype=torch.int32)
    for placement in ranks:
        schedule = build_schedule(
            placement.to_physical(ids),
            placement.num_local_experts,
            num_experts=placement.num_experts,
            expert_map=placement.expert_map,
        )
        rows = pairs(schedule)
        for token, slot in schedule.slot_rows.ge(0).nonzero().tolist():
            expert, row_token = rows[schedule.slot_rows[token, slot]]
            assert row_token == token
            assert placement.logical_expert_ids[expert] == ids[token, slot]
        computed_by += schedule.slot_rows >= 0
    assert torch.all(computed_by == 1)


def test_two_copies_of_an_expert_may_be_on_one_rank():
    copies = PLACEMENTS["redundant"][0].logical_expert_ids
    assert len(copies) > len(set(copies))


def test_a_contiguous_range_gives_the_same_schedule_as_its_map():
    ids = random_ids(9, 30, 4)
    for placement in PLACEMENTS["thirty_over_eight"]:
        by_map = build_schedule(ids, placement.num_local_experts, num_experts=30, expert_map=placement.expert_map)
        by_range = build_schedule(
            ids, placement.num_local_experts, num_experts=30, local_expert_offset=placement.local_expert_offset
        )
        assert_bitwise_equal(by_map, by_range)


# --- id spaces -------------------------------------------------------------------------------------------------------
@st.composite
def routings(draw):
    num_experts, top_k = draw(st.sampled_from([(32, 4), (64, 6), (60, 8), (896, 16)]))
    ep_size = draw(st.sampled_from([2, 4, 8]))
    placement = ExpertPlacement(num_experts, ep_size, draw(st.integers(0, ep_size - 1)))
    num_tokens = draw(st.sampled_from([0, 1, 3, 63, 64, 65]))
    logits = torch.randn(num_tokens, num_experts, generator=seeded(draw(st.integers(0, 99))))
    return route(logits, RouterConfig(top_k)), num_experts, placement.local_range


@given(routings())
def test_global_and_rank_local_ids_give_the_identical_schedule(problem):
    routing, num_experts, local_range = problem
    schedules = []
    for form in (routing, pack_topk(routing, num_experts), pack_topk(routing, num_experts, local_range)):
        space = id_space(form, num_experts, local_range)
        schedules.append(
            schedule_routing(
                form,
                local_range.count,
                num_experts=space.num_experts,
                local_expert_offset=space.local_expert_offset,
            )
        )
    assert_bitwise_equal(schedules[1], schedules[0])
    assert_bitwise_equal(schedules[2], schedules[0])


def test_packed_ids_are_read_where_there_are_any():
    routing = Routing(torch.ones(1, 2), torch.tensor([[5, 6]], dtype=torch.int32))
    packed = pack_topk(routing, 64, LocalRange(4, 4))
    assert schedule_routing(packed, 4, num_experts=8).slot_rows.tolist() == [[0, 1]]


# --- errors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ids", "fields", "error", "message"),
    [
        (torch.zeros(2, 2), {}, TypeError, "topk_ids: expected int32, int64 or uint32, got torch.float32"),
        (torch.zeros(2).int(), {}, ValueError, r"topk_ids: expected \[num_tokens, top_k\], got \(2,\)"),
        (None, {"local_expert_offset": 5}, ValueError, "num_experts=8, got offset=5, num_local_experts=4"),
        (None, {"local_expert_offset": -1}, ValueError, "num_experts=8, got offset=-1, num_local_experts=4"),
        (None, {"num_local_experts": 9}, ValueError, "num_experts=8, got offset=0, num_local_experts=9"),
        (None, {"num_local_experts": -1}, ValueError, "num_experts=8, got offset=0, num_local_experts=-1"),
        (None, {"expert_map": torch.zeros(7)}, ValueError, r"expert_map: expected \(8,\) .*, got \(7,\)"),
        (None, {"expert_map": torch.zeros(8), "local_expert_offset": 4}, ValueError, "expert_map: .* got .* with 4"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(ids, fields, error, message):
    ids = torch.zeros(2, 2, dtype=torch.int32) if ids is None else ids
    with pytest.raises(error, match=message):
        build_schedule(ids, **{"num_local_experts": 4, "num_experts": 8, **fields})
