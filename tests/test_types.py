import pytest
import torch

from rankmoe.types import ExpertPlacement, LocalRange, MXTensor


# --- ExpertPlacement -------------------------------------------------------------------------------------------------
def every_rank(num_experts: int, ep_size: int, **fields) -> list[ExpertPlacement]:
    return [ExpertPlacement(num_experts, ep_size, rank, **fields) for rank in range(ep_size)]


@pytest.mark.parametrize("strategy", ["contiguous", "round_robin"])
@pytest.mark.parametrize(("num_experts", "ep_size"), [(896, 8), (30, 8), (64, 1), (7, 7)])
def test_the_ranks_own_every_expert_once(num_experts, ep_size, strategy):
    owned = [e for placement in every_rank(num_experts, ep_size, strategy=strategy) for e in placement.expert_ids]
    assert sorted(owned) == list(range(num_experts))


def test_thirty_experts_over_eight_ranks_are_four_and_three_each():
    ranges = [placement.local_range for placement in every_rank(30, 8)]
    assert [r.count for r in ranges] == [4, 4, 4, 4, 4, 4, 3, 3]
    assert [r.offset for r in ranges] == [0, 4, 8, 12, 16, 20, 24, 27]


def test_a_round_robin_rank_owns_every_eighth_expert_and_has_no_range():
    placement = ExpertPlacement(30, 8, 5, strategy="round_robin")
    assert placement.expert_ids == (5, 13, 21, 29)
    assert placement.local_range is None
    with pytest.raises(ValueError, match="local_expert_offset"):
        _ = placement.local_expert_offset


@pytest.mark.parametrize("strategy", ["contiguous", "round_robin"])
def test_the_expert_map_gives_local_ids_in_ascending_order(strategy):
    for placement in every_rank(30, 8, strategy=strategy):
        expert_map = placement.expert_map.tolist()
        assert [expert_map[e] for e in placement.expert_ids] == list(range(placement.num_local_experts))
        assert expert_map.count(-1) == 30 - placement.num_local_experts


def test_copies_of_an_expert_are_taken_in_turn_by_token():
    placement = ExpertPlacement(5, physical_to_logical=(0, 1, 0, 2, 0))
    ids = torch.tensor([[0, 2]] * 4, dtype=torch.int32)
    assert placement.to_physical(ids).tolist() == [[0, 3], [2, 3], [4, 3], [0, 3]]
    assert placement.to_physical(ids).dtype == torch.int32


def test_negative_ids_stay_negative_among_copies():
    placement = ExpertPlacement(3, physical_to_logical=(0, 1, 0))
    assert placement.to_physical(torch.tensor([[-1, 0], [-5, 0]])).tolist() == [[-1, 0], [-5, 2]]


def test_uint32_ids_have_their_copies_too_and_their_minus_one_stays():
    placement = ExpertPlacement(3, physical_to_logical=(0, 1, 0))
    ids = torch.tensor([[-1, 0], [1, 0]], dtype=torch.int32).view(torch.uint32)
    physical = placement.to_physical(ids)
    assert physical.dtype == torch.uint32
    assert physical.view(torch.int32).tolist() == [[-1, 0], [1, 2]]


def test_no_tokens_have_no_physical_ids():
    placement = ExpertPlacement(3, physical_to_logical=(0, 1, 0))
    assert placement.to_physical(torch.empty(0, 2, dtype=torch.int32)).shape == (0, 2)


def test_a_logical_id_that_does_not_exist_is_refused():
    placement = ExpertPlacement(3, physical_to_logical=(0, 1, 0))
    with pytest.raises(ValueError, match="topk_ids: expected logical ids below 2, got 2"):
        placement.to_physical(torch.tensor([[2]]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 0}, "num_experts: expected at least 1, got 0"),
        ({"ep_size": 0}, "ep_size: expected 1 to num_experts=8, got 0"),
        ({"ep_size": 9}, "ep_size: expected 1 to num_experts=8, got 9"),
        ({"ep_rank": 2}, "ep_rank: expected 0 <= ep_rank < ep_size=2, got 2"),
        ({"ep_rank": -1}, "ep_rank: expected 0 <= ep_rank < ep_size=2, got -1"),
        ({"strategy": "random"}, "strategy: expected 'contiguous' or 'round_robin', got 'random'"),
        ({"physical_to_logical": (0, 1)}, r"physical_to_logical: .* \(8\), got 2"),
        ({"physical_to_logical": (0, 1, 2, 3, 4, 5, 6, 8)}, "physical_to_logical: expected every .*, got 8 .* 0 to 8"),
    ],
)
def test_an_impossible_placement_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        ExpertPlacement(**{"num_experts": 8, "ep_size": 2, **fields})


@pytest.mark.parametrize(("offset", "count"), [(60, 5), (-1, 4), (0, 65), (0, -1)])
def test_a_range_outside_the_experts_is_refused_naming_both_numbers(offset, count):
    with pytest.raises(ValueError, match=f"num_experts=64, got offset={offset}, count={count}"):
        LocalRange(offset, count).validate(64)


# --- MXTensor --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("data", "scale", "format", "error", "message"),
    [
        ((torch.uint8, 2, 32), (torch.uint8, 2, 1), "mxfp8", TypeError, "data: expected torch.float8_e4m3fn"),
        ((torch.int8, 2, 16), (torch.uint8, 2, 1), "mxfp4", TypeError, "data: expected torch.uint8 for mxfp4"),
        ((torch.uint8, 2, 16), (torch.int8, 2, 1), "mxfp4", TypeError, "scale: expected torch.uint8, got torch.int8"),
        ((torch.uint8, 2, 32), (torch.uint8, 2, 1), "mxfp4", ValueError, r"scale: expected \(2, 2\).*, got \(2, 1\)"),
        ((torch.uint8, 2, 180), (torch.uint8, 2, 11), "mxfp4", ValueError, "expected a multiple of 32, got 360"),
        ((torch.uint8, 2, 16), (torch.uint8, 2, 1), "mxfp6", ValueError, "format: expected .*, got 'mxfp6'"),
    ],
)
def test_elements_and_scales_that_do_not_fit_are_refused_by_name(data, scale, format, error, message):
    elements = torch.zeros(data[1:], dtype=torch.uint8).view(data[0])
    scales = torch.zeros(scale[1:], dtype=torch.uint8).view(scale[0])
    with pytest.raises(error, match=message):
        MXTensor(elements, scales, format)


def test_the_shape_counts_elements_and_an_index_keeps_their_scales():
    tensor = MXTensor(
        torch.zeros(3, 2, 32, dtype=torch.uint8), torch.arange(12, dtype=torch.uint8).view(3, 2, 2), "mxfp4"
    )
    assert tensor.shape == (3, 2, 64)
    assert tensor.nbytes == 3 * 2 * 32 + 12
    assert tensor[1].scale.tolist() == [[4, 5], [6, 7]]
