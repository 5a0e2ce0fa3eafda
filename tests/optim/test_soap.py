"""SOAP: the algorithm of its paper, and where its state is kept."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fullshard.comm import EventKind, EventLog, observe
from fullshard.optim import SOAP
from fullshard.optim.eigenbasis import falling_order, first_basis, next_basis
from support.optim.given import Result, assert_same
from support.optim.matrices import SOAP_OPTIONS, SOAP_STEPS
from support.optim.shapes import MATRICES, Shapes, gradients, groups_of
from support.optim.ways import WAYS, Way, full_state, full_values, give
from support.ranks import distributed
from support.threads.ranks import ThreadRank, run_on_threads
from support.threads.world import run_program_on_threads

# -- the algorithm --------------------------------------------------------------------------------


def _by_the_paper(weight: torch.Tensor, given: list[torch.Tensor], most: int) -> torch.Tensor:
    """Algorithm 3, in fp64, written with whole matrices, and the first step and decay of the code.

    A side that is longer than ``most`` has the unit matrix for its basis, which never moves.
    """
    lr, decay, frequency, beta, eps = 0.02, 0.1, 2, 0.95, 1e-8
    first, *rest = [each.double() for each in given]
    left, right = 0.05 * first @ first.T, 0.05 * first.T @ first
    bases = []
    for factor in (left, right):
        vectors = torch.linalg.eigh(factor).eigenvectors.flip(1)
        bases.append(vectors if len(factor) <= most else torch.eye(len(factor)).double())
    mean, squares, weight = torch.zeros_like(first), torch.zeros_like(first), weight.double()
    for step, gradient in enumerate(rest, 1):
        q_left, q_right = bases
        mean = beta * mean + (1 - beta) * gradient
        squares = beta * squares + (1 - beta) * (q_left.T @ gradient @ q_right) ** 2
        adam = (q_left.T @ mean @ q_right) / (squares.sqrt() + eps)
        adam *= math.sqrt(1 - beta**step) / (1 - beta**step)
        weight = (weight - lr * q_left @ adam @ q_right.T) * (1 - lr * decay)
        left = beta * left + (1 - beta) * gradient @ gradient.T
        right = beta * right + (1 - beta) * gradient.T @ gradient
        if step % frequency == 0:
            for side, factor in enumerate((left, right)):
                if len(factor) <= most:
                    estimates = (bases[side].T @ factor @ bases[side]).diagonal()
                    order = estimates.argsort(descending=True)
                    bases[side] = torch.linalg.qr(factor @ bases[side][:, order]).Q
                    squares = squares[order] if side == 0 else squares[:, order]
    return weight


@pytest.mark.parametrize(
    ("name", "most"), [("square", 10000), ("square", 7), ("wide", 7), ("tall", 7), ("uneven", 6)]
)
def test_it_is_the_papers_algorithm(name: str, most: int) -> None:
    """Signs of eigenvectors do not matter to it: those of the definition are left as they come.

    Only factors of full rank define a basis: where a factor is singular, its null space has any.
    """
    given = [
        (torch.linspace(1, 2, 400).view(20, 20)[: len(g), : g.shape[1]] * g)
        for g in (gradients(step)[name] for step in range(6))
    ]
    weight = nn.Parameter(Shapes().get_parameter(name).detach().clone())
    optimizer = SOAP([weight], **SOAP_OPTIONS, max_precond_dim=most)
    start = weight.detach().clone()
    for gradient in given:
        weight.grad = gradient.clone()
        optimizer.step()
    expected = _by_the_paper(start, given, most)
    moved = (expected - start).abs().max()
    assert (weight - expected).abs().max() < 1e-2 * moved


def test_the_first_step_fills_preconditioners_and_changes_no_matrix() -> None:
    weight = nn.Parameter(torch.randn(4, 3))
    start = weight.detach().clone()
    optimizer = SOAP([weight], lr=0.1)
    weight.grad = torch.randn(4, 3)
    optimizer.step()
    assert torch.equal(weight, start)
    state = optimizer.state_dict()["state"][0]
    assert state["step"] == 0 and not state["exp_avg"].any()
    outer = 0.05 * weight.grad @ weight.grad.T
    torch.testing.assert_close(state["row_factor"].view(4, 4), outer)
    basis = state["column_basis"].view(3, 3)
    torch.testing.assert_close(basis.T @ basis, torch.eye(3))
    optimizer.step()
    assert not torch.equal(weight, start)


def test_eigenvectors_have_one_sign_and_fall_whatever_the_factorisation_gave() -> None:
    root = torch.randn(9, 9, generator=torch.Generator().manual_seed(1))
    factor = root @ root.T
    basis = first_basis(factor)
    assert (basis.gather(0, basis.abs().argmax(0, keepdim=True)) > 0).all()
    values = (basis.T @ factor @ basis).diagonal()
    assert torch.equal(values, values.sort(descending=True).values)
    assert falling_order(factor, basis.flip(1)).tolist() == list(range(9))[::-1]
    flipped = basis * torch.tensor([1.0, -1.0] * 4 + [1.0])
    found, other = next_basis(factor, basis), next_basis(factor, flipped)
    assert ((found.T @ factor @ basis).diagonal() > 0).all()
    assert ((other.T @ factor @ flipped).diagonal() > 0).all()
    torch.testing.assert_close(found.T @ found, torch.eye(9))


def test_a_gradient_that_is_no_number_makes_the_matrix_none_and_raises_on_no_owner() -> None:
    def body(rank: ThreadRank) -> bool:
        model = Shapes()
        WAYS["two"].apply(model)
        optimizer = SOAP(groups_of(model, "soap"), precondition_frequency=1)
        for step in range(3):
            whole = gradients(step)
            whole["square"][0, 0] = math.nan
            give(model, whole, WAYS["two"])
            optimizer.step()
        values = full_values(model)
        return bool(values["square"].isnan().all() and values["tall"].isfinite().all())

    assert run_program_on_threads(body, 2) == [True, True]


# -- where it is kept, and what travels -----------------------------------------------------------


def _kept_bytes() -> int:
    """Of two averages, two factors and two bases for each matrix, in fp32."""
    shapes = [shape[-2:] for shape in MATRICES.values() for _ in range(math.prod(shape[:-2]))]
    shapes += [(6, 6)] * 3  # of the fused projection
    return sum(8 * (r * c + r * r + c * c) for r, c in shapes)


@pytest.mark.parametrize("way", ["four", "hybrid", "tensor parallel", "copies"])
def test_preconditioners_are_owned_once_over_all_ranks(way: str) -> None:
    def body(rank: ThreadRank) -> int:
        model = Shapes()
        WAYS[way].apply(model)
        optimizer = SOAP(groups_of(model, "soap"))
        give(model, gradients(0), WAYS[way])
        optimizer.step()
        states = [optimizer.state[model.get_parameter(name)] for name in MATRICES]
        assert all(each.is_meta for state in states for each in state.values() if each.ndim)
        return optimizer.owned_bytes

    kept = run_program_on_threads(body, WAYS[way].world_size)
    assert sum(kept) == _kept_bytes()
    assert max(kept) < sum(kept)


@distributed(2)
def test_each_element_costs_8_bytes_for_half_of_the_ranks() -> None:
    model = nn.Module()
    for name, shape in {"a": (8, 8), "b": (16, 4)}.items():
        model.register_parameter(name, nn.Parameter(torch.ones(shape)))
    WAYS["two"].apply(model)
    give(model, {"a": torch.ones(8, 8), "b": torch.ones(16, 4)}, WAYS["two"])
    optimizer, log = SOAP(model.parameters()), EventLog()
    for _ in range(2):
        with observe(log):
            optimizer.step()
    # in each of two steps, of 128 elements, each rank sends 32 to the owner of the one matrix, and
    # the 32 of its own that the other holds back
    assert [event.nbytes for event in log.of(EventKind.ALL_TO_ALL)] == [4 * 32] * 4


def test_parameters_that_have_no_gradient_for_a_while_keep_their_state() -> None:
    def body(way: Way | None) -> Result:
        model = Shapes()
        if way is not None:
            way.apply(model)
        optimizer = SOAP(groups_of(model, "soap"), **SOAP_OPTIONS)
        for step in range(SOAP_STEPS.count):
            give(model, gradients(step), way)
            if step in (1, 3):
                model.get_parameter("tall").grad = model.get_parameter("few").grad = None
            optimizer.step()
        return full_values(model), full_state(model, optimizer)

    expected = run_on_threads(lambda rank: body(None), 1)[0]
    for values, state in run_program_on_threads(lambda rank: body(WAYS["three"]), 3):
        assert_same(values, expected[0])
        assert_same(state, expected[1])
    assert expected[1]["tall"]["step"] == 2 and expected[1]["wide"]["step"] == 4
