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
from support.products import few
from support.ranks import distributed

# forward-mode differentiation makes torch compile its own decompositions with it
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning"),
]

Tensors = list[torch.Tensor]
Program = Callable[[nn.Module], Tensors]

TORCH_TRANSFORMS = torch.__version__ >= "2.13"  # 2.11's own fully_shard fails in every program


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


def jvp_beside_its_loss(model: nn.Module) -> Tensors:
    u, du = push(model, rows())
    (u - (1 - du).detach()).square().mean().backward()
    return [u, du]


def jvp_without_gradients(model: nn.Module) -> Tensors:
    with torch.no_grad():
        return [*push(model, rows())]


def jvp_of_a_call_with_its_own_parameters(model: nn.Module) -> Tensors:
    own: dict[str, torch.Tensor] = dict(model.named_parameters())
    return backward_of(*push(lambda x: functional_call(model, own, (x,)), rows()))


def a_block_under_vmap(model: nn.Module) -> Tensors:
    block = model._modules["1"]
    assert block is not None
    model._modules["1"] = Assembled(lambda m, x: vmap(m.block)(x), block=block)
    outputs = backward_of(model(rows()))
    model._modules["1"] = block
    return outputs


def vjp_of_the_model(model: nn.Module) -> Tensors:
    u, pull = pullback(model)
    return [u, *pull(torch.ones_like(u))]


def dual_numbers_by_hand(model: nn.Module) -> Tensors:
    with fwad.dual_level():
        u, du = fwad.unpack_dual(model(fwad.make_dual(rows(), torch.ones_like(rows()))))
    assert du is not None
    return backward_of(u, du)


def double_backward(model: nn.Module) -> Tensors:
    x = rows().requires_grad_()
    (force,) = torch.autograd.grad(energy(model)(x), x, create_graph=True)
    return backward_of(force)


def triple_backward_beside_a_forward(model: nn.Module) -> Tensors:
    x = rows().requires_grad_()
    y = model(x)
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return backward_of(y, first, second)


def backward_that_makes_a_graph(model: nn.Module) -> Tensors:
    x = rows().requires_grad_()
    energy(model)(x).backward(create_graph=True)
    assert x.grad is not None
    return [x.grad]


def hessian_vector_product_of_autograd(model: nn.Module) -> Tensors:
    ones = torch.ones_like(rows())
    return backward_of(*autograd_functional.hvp(energy(model), rows(), ones, create_graph=True))


PROGRAMS: dict[str, Program] = {
    "jvp": jvp_beside_its_loss,
    "jvp, whose tangent is trained": lambda m: backward_of(push(m, rows())[1]),
    "jvp, trained beside a forward": lambda m: backward_of(m(rows()), *push(m, 2 * rows())),
    "jvp of jvp": lambda m: backward_of(*push(lambda x: push(m, x)[1], rows())),
    "jvp without gradients": jvp_without_gradients,
    "jvp inside a checkpoint": lambda m: backward_of(
        *checkpoint(lambda x: push(m, x), rows(), use_reentrant=False)
    ),
    "jvp of a call with its own parameters": jvp_of_a_call_with_its_own_parameters,
    "vjp": vjp_of_the_model,
    "vmap over rows": lambda m: backward_of(vmap(m)(rows())),
    "a block under vmap": a_block_under_vmap,
    "grad of an energy": lambda m: [grad(energy(m))(rows())],
    "jacrev": lambda m: [jacrev(m)(rows())],
    "jacfwd, trained": lambda m: backward_of(jacfwd(m)(rows())),
    "hessian of an energy": lambda m: [hessian(energy(m))(rows())],
}
# Gradients of gradients, and what else torch's own refuses.
OURS_ONLY: dict[str, Program] = {
    "vjp, trained": lambda m: backward_of(*vjp_of_the_model(m)),
    "jacrev, trained": lambda m: backward_of(jacrev(m)(rows())),
    "grad per row, trained": lambda m: backward_of(vmap(grad(energy(m)))(rows())),
    "hessian per row, trained": lambda m: backward_of(vmap(hessian(energy(m)))(rows())),
    "grad of grad, trained": lambda m: backward_of(
        grad(lambda x: grad(energy(m))(x).square().sum())(rows())
    ),
    "dual numbers by hand": dual_numbers_by_hand,
    "double backward": double_backward,
    "triple backward beside a forward": triple_backward_beside_a_forward,
    "backward that makes a graph": backward_that_makes_a_graph,
    "hessian-vector product of autograd": hessian_vector_product_of_autograd,
    "a change in place of an output": lambda m: backward_of(
        *push(lambda x: torch.sigmoid_(m(x)), rows())
    ),
}


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


@pytest.mark.parametrize(
    "name",
    few(
        PROGRAMS | OURS_ONLY,
        "vmap over rows",
        "grad of an energy",
        "vjp, trained",
        "dual numbers by hand",
        "double backward",
    ),
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
    each = PROGRAMS["jvp"]
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
