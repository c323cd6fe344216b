import pytest
import torch
from helpers import random_mxfp4

from rankmoe.backends import backend_names, choose_backend, get_backend
from rankmoe.experts import pack_experts
from rankmoe.types import ExpertPlacement, Problem, SiTU

ON_CPU = Problem(num_local_experts=2, hidden_size=64, intermediate_size=32, activation=SiTU())
ON_GPU = Problem(2, 64, 32, SiTU(), device_type="cuda")


@pytest.mark.parametrize("name", backend_names())
def test_every_backend_answers_whether_it_is_available_and_covers_a_problem(name):
    backend = get_backend(name)
    assert backend.name == name
    assert backend.available() in (True, False)
    assert backend.covered(ON_CPU) in (True, False)


def test_the_chosen_backend_is_available_and_covers_the_problem():
    backend = choose_backend(ON_CPU)
    assert backend.name == "cpu"
    assert backend.available()
    assert backend.covered(ON_CPU)


def test_a_named_backend_that_does_not_cover_the_problem_is_refused():
    with pytest.raises(ValueError, match=r"backend: expected one .* covers .*device_type='cuda'.*, got 'cpu'"):
        choose_backend(ON_GPU, "cpu")


def test_an_unknown_backend_is_refused_with_the_known_names():
    with pytest.raises(ValueError, match=r"backend: expected one of .*reference.*, got 'gpu'"):
        get_backend("gpu")


def test_packed_experts_remember_their_backend():
    weights = pack_experts(
        random_mxfp4(2, 64, 64), random_mxfp4(2, 64, 32), SiTU(), ExpertPlacement(2), backend="reference"
    )
    assert weights.backend == "reference"
    assert (weights.hidden_size, weights.intermediate_size, weights.num_local_experts) == (64, 32, 2)
    assert weights.nbytes == 2 * (64 * 64 + 64 * 32) // 2 + 2 * (64 * 2 + 64 * 1)
    assert weights.w13.data.dtype == torch.uint8
