"""Derivatives of sharded modules: what ``torch.func`` and double backward give unsharded.

Each program is run by the unsharded model, by ours and, where torch's own can, by torch's own; as
the first use of the model, and after an ordinary step. Outputs, gradients, and the gradients of an
ordinary step after it are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwad
import torch.autograd.functional as autograd_functional
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils.checkpoint import checkpoint

from fullshard.sharding import fully_shard
from support.modules import Assembled
from support.ranks import distributed

# forward-mode differentiation makes torch compile its own decompositions with it
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning"),
]

Tensors = list[torch.Tensor]
Program = Callable[[nn.Module], Tensors]

TORCH_TRANSFORMS = torch.__version__ >= "2.13"  # 2.11's own fully_shard fails in every program

PROGRAMS: dict[str, Program] = {}
OURS_ONLY: dict[str, Program] = {}


def program(into: dict[str, Program]) -> Callable[[Program], Program]:
    def register(function: Program) -> Program:
        into[function.__name__] = function
        return function

    return register


def rows() -> torch.Tensor:
    return torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)


def backward_of(*outputs: torch.Tensor) -> Tensors:
    """Runs backward through all of ``outputs`` together, and returns them."""
    total = torch.ones((), dtype=torch.float64)
    for output in outputs:
        total = total * output.square().mean()
    total.backward()
    return list(outputs)


def push(function: Callable[..., Any], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The value of ``function`` and its tangent along ones."""
    pushed: Any = jvp(function, (x,), (torch.ones_like(x),))
    return pushed  # a third value comes only with has_aux


def pullback(model: nn.Module) -> tuple[torch.Tensor, Callable[[torch.Tensor], Tensors]]:
    """The value of the model and what takes gradients of it back to its input."""
    found: Any = vjp(model, rows())
    return found  # a third value comes only with has_aux


def energy(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: model(x).square().sum()


# -- what torch's own can do, too -----------------------------------------------------------------


@program(PROGRAMS)
def jvp_of_the_model(model: nn.Module) -> Tensors:
    u, du = push(model, rows())
    (u - (1 - du).detach()).square().mean().backward()
    return [u, du]


@program(PROGRAMS)
def jvp_of_which_the_tangent_is_trained(model: nn.Module) -> Tensors:
    return backward_of(push(model, rows())[1])


@program(PROGRAMS)
def jvp_of_which_both_are_trained_beside_a_forward(model: nn.Module) -> Tensors:
    y = model(rows())
    return backward_of(y, *push(model, 2 * rows()))


@program(PROGRAMS)
def jvp_of_jvp(model: nn.Module) -> Tensors:
    def tangent(x: torch.Tensor) -> torch.Tensor:
        return push(model, x)[1]

    return backward_of(*push(tangent, rows()))


@program(PROGRAMS)
def vjp_of_the_model(model: nn.Module) -> Tensors:
    u, pull = pullback(model)
    return [u, *pull(torch.ones_like(u))]


@program(PROGRAMS)
def vmap_over_rows(model: nn.Module) -> Tensors:
    return backward_of(vmap(model)(rows()))


@program(PROGRAMS)
def grad_of_an_energy(model: nn.Module) -> Tensors:
    return [grad(energy(model))(rows())]


@program(PROGRAMS)
def jacrev_of_the_model(model: nn.Module) -> Tensors:
    return [jacrev(model)(rows())]


@program(PROGRAMS)
def jacfwd_which_is_trained(model: nn.Module) -> Tensors:
    return backward_of(jacfwd(model)(rows()))


@program(PROGRAMS)
def hessian_of_an_energy(model: nn.Module) -> Tensors:
    return [hessian(energy(model))(rows())]


@program(PROGRAMS)
def jvp_without_gradients(model: nn.Module) -> Tensors:
    with torch.no_grad():
        return [*push(model, rows())]


@program(PROGRAMS)
def jvp_inside_a_checkpoint(model: nn.Module) -> Tensors:
    def both(x: torch.Tensor) -> Any:
        return push(model, x)

    return backward_of(*checkpoint(both, rows(), use_reentrant=False))


@program(PROGRAMS)
def jvp_of_a_call_with_its_own_parameters(model: nn.Module) -> Tensors:
    own: dict[str, torch.Tensor] = dict(model.named_parameters())
    return backward_of(*push(lambda x: functional_call(model, own, (x,)), rows()))


@program(PROGRAMS)
def a_block_under_vmap(model: nn.Module) -> Tensors:

    block = model._modules["1"]
    assert block is not None
    model._modules["1"] = Assembled(lambda m, x: vmap(m.block)(x), block=block)
    outputs = backward_of(model(rows()))
    model._modules["1"] = block
    return outputs


# -- gradients of gradients, and what else torch's own refuses ------------------------------------


@program(OURS_ONLY)
def vjp_which_is_trained(model: nn.Module) -> Tensors:
    u, pull = pullback(model)
    return backward_of(u, *pull(torch.ones_like(u)))


@program(OURS_ONLY)
def jacrev_which_is_trained(model: nn.Module) -> Tensors:
    return backward_of(jacrev(model)(rows()))


@program(OURS_ONLY)
def grad_per_row_which_is_trained(model: nn.Module) -> Tensors:
    return backward_of(vmap(grad(energy(model)))(rows()))


@program(OURS_ONLY)
def hessian_per_row_which_is_trained(model: nn.Module) -> Tensors:
    return backward_of(vmap(hessian(energy(model)))(rows()))


@program(OURS_ONLY)
def grad_of_grad_which_is_trained(model: nn.Module) -> Tensors:
    return backward_of(grad(lambda x: grad(energy(model))(x).square().sum())(rows()))


@program(OURS_ONLY)
def dual_numbers_by_hand(model: nn.Module) -> Tensors:
    with fwad.dual_level():
        u, du = fwad.unpack_dual(model(fwad.make_dual(rows(), torch.ones_like(rows()))))
    assert du is not None
    return backward_of(u, du)


@program(OURS_ONLY)
def double_backward(model: nn.Module) -> Tensors:
    x = rows().requires_grad_()
    (force,) = torch.autograd.grad(energy(model)(x), x, create_graph=True)
    return backward_of(force)


@program(OURS_ONLY)
def triple_backward_beside_a_forward(model: nn.Module) -> Tensors:
    x = rows().requires_grad_()
    y = model(x)
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return backward_of(y, first, second)


@program(OURS_ONLY)
def backward_that_makes_a_graph(model: nn.Module) -> Tensors:
    x = rows().requires_grad_()
    energy(model)(x).backward(create_graph=True)
    assert x.grad is not None
    return [x.grad]


@program(OURS_ONLY)
def hessian_vector_product_of_autograd(model: nn.Module) -> Tensors:
    return backward_of(
        *autograd_functional.hvp(energy(model), rows(), torch.ones_like(rows()), create_graph=True)
    )


@program(OURS_ONLY)
def a_change_in_place_of_an_output(model: nn.Module) -> Tensors:
    return backward_of(*push(lambda x: torch.sigmoid_(model(x)), rows()))


# -- the comparison -------------------------------------------------------------------------------


def make(shard: Callable[..., Any] | None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Tanh(), nn.Linear(5, 5), nn.Tanh())
    model = nn.Sequential(
        nn.Linear(3, 5), block, nn.Sequential(nn.Linear(5, 4), nn.Tanh()), nn.Linear(4, 2)
    ).double()
    if shard is not None:
        for each in [*list(model)[1:], model]:
            shard(each, **options)
    return model


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    found = [param.grad for param in model.parameters()]
    model.zero_grad()
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in found]


def run(model: nn.Module, each: Program, *, warm: bool) -> list[list[torch.Tensor | None]]:
    """Returns the outputs of a program, its gradients, and those of an ordinary step after it."""
    if warm:
        energy(model)(rows()).backward()
        model.zero_grad()
    outputs: list[torch.Tensor | None] = [output.detach().clone() for output in each(model)]
    after_program = gradients(model)
    energy(model)(rows()).backward()
    return [outputs, after_program, gradients(model)]


FIRST = {
    "vmap_over_rows",
    "grad_of_an_energy",
    "vjp_which_is_trained",
    "dual_numbers_by_hand",
    "double_backward",
}
ALL = [
    pytest.param(name, marks=[] if name in FIRST else pytest.mark.matrix)
    for name in [*PROGRAMS, *OURS_ONLY]
]


@pytest.mark.parametrize(
    "name",
    ALL,
)
@distributed(2)
def test_derivatives_are_those_of_the_unsharded_model(name: str) -> None:
    each = (PROGRAMS | OURS_ONLY)[name]
    for warm in (False, True):
        expected = run(make(None), each, warm=warm)
        torch.testing.assert_close(run(make(fully_shard), each, warm=warm), expected)
        if name in PROGRAMS and TORCH_TRANSFORMS:
            theirs = make(torch_fsdp.fully_shard)
            torch.testing.assert_close(run(theirs, each, warm=warm), expected)
    kept = make(fully_shard, reshard_after_forward=False)
    torch.testing.assert_close(run(kept, each, warm=True), expected)


# -- what cannot work says so ---------------------------------------------------------------------


@distributed(2)
def test_other_parameters_in_place_of_sharded_ones_are_an_error_and_not_ignored() -> None:
    model = make(fully_shard)
    model(rows())
    other = {"3.weight": torch.ones(2, 4, dtype=torch.float64)}
    with pytest.raises(ValueError, match=r"3\.weight was replaced by a Tensor.*functional_call"):
        functional_call(model, other, (rows(),))
    with torch.no_grad():
        model(rows())  # the root stays unsharded
    with pytest.raises(ValueError, match=r"0\.bias was replaced by a Tensor.*functional_call"):
        functional_call(model, {"0.bias": torch.ones(5).double()}, (rows(),))
    each = PROGRAMS["jvp_of_the_model"]
    torch.testing.assert_close(run(model, each, warm=True), run(make(None), each, warm=True))


@distributed(2)
def test_a_traced_graph_that_would_keep_freed_parameters_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"\(root\) was called while torch.func.linearize"):
        linearize(make(fully_shard), rows())


@distributed(2)
def test_a_vectorised_jacobian_that_hides_its_graph_is_an_error() -> None:
    model: Any = make(fully_shard)
    with pytest.raises(RuntimeError, match="vectorize=True hides"):
        autograd_functional.jacobian(model, rows(), vectorize=True, create_graph=True)
    model.reset_iter_state()
    found: Any = autograd_functional.jacobian(model, rows(), vectorize=True)
    torch.testing.assert_close(found, autograd_functional.jacobian(make(None), rows()))
