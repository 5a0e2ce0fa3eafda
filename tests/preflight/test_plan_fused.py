"""A plan charges operators as the card has them: RMSNorm, dropout and casts are one kernel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from fullshard.policies import MixedPrecisionPolicy
from fullshard.preflight import Plan, plan
from fullshard.preflight.simulation.fused import fused_as_on_accelerators
from fullshard.sharding import fully_shard

ROWS, WIDTH = 1024, 512
INPUT = ROWS * WIDTH * 2  # bytes, in bfloat16


class Stack(nn.Module):
    """Equal modules, one after the other, on an input in bfloat16."""

    def __init__(self, make: Callable[[], nn.Module], count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.bfloat16().requires_grad_()
        for block in self.blocks:
            x = block(x)
        return x


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.view(1, -1, 8, 64).transpose(1, 2)
        out = functional.scaled_dot_product_attention(q, q, q, None, self.dropout, is_causal=True)
        return out.transpose(1, 2).reshape(x.shape)


class Softmax(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.softmax(x, -1, dtype=torch.float32).bfloat16()


def _planned(make: Callable[[], nn.Module], count: int) -> Plan:
    def build() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(Stack(make, count), nn.Linear(WIDTH, 1))

    def shard(model: nn.Module, mesh: DeviceMesh) -> None:
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))

    def loss(model: nn.Module, x: torch.Tensor) -> Any:
        return model(x).sum()

    batch = lambda: torch.empty(ROWS, WIDTH)  # noqa: E731  # as a user writes it
    return plan(build, batch, loss, mesh=8, shard=shard, device="h100")


def _kept(make: Callable[[], nn.Module]) -> float:
    """What one more module keeps for backward, as parts of its input's bytes."""
    few, many = (_planned(make, count).peak for count in (2, 6))
    return (many - few) / 4 / INPUT


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: nn.RMSNorm(WIDTH), 1.0),  # the input
        (lambda: nn.LayerNorm(WIDTH), 1.0),
        (lambda: nn.Dropout(0.1), 0.5),  # a mask in bool
        (lambda: Attention(0.1), 1.0),  # no matrix of ROWS * ROWS
        (Softmax, 2.0),  # the result in float32; the cast of it keeps nothing
    ],
    ids=["RMSNorm", "LayerNorm", "Dropout", "Attention", "Softmax"],
)
def test_what_a_module_keeps_is_what_the_kernel_of_the_card_saves(
    make: Callable[[], nn.Module], parts: float
) -> None:
    assert _kept(make) == pytest.approx(parts, abs=0.05)


def test_an_rms_norm_takes_no_longer_than_a_layer_norm() -> None:
    rms, layer = (_planned(make, 6).step_time for make in (_rms, _layer))
    assert rms is not None
    assert layer is not None
    assert rms <= layer


def _rms() -> nn.Module:
    return nn.RMSNorm(WIDTH)


def _layer() -> nn.Module:
    return nn.LayerNorm(WIDTH)


X, W = (3, 5, 16), (16,)
WIDE, HALF = torch.float32, torch.bfloat16
OPERATORS: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]], torch.dtype]] = {
    "rms_norm": (lambda x, w: functional.rms_norm(x, W, w, 1e-5), [X, W], WIDE),
    "rms_norm in bf16": (lambda x, w: functional.rms_norm(x, W, w), [X, W], HALF),
    "rms_norm of two dims": (lambda x: functional.rms_norm(x, X[1:]), [X], WIDE),
    "softmax": (lambda x: functional.softmax(x, 1, dtype=WIDE), [X], HALF),
    "log_softmax": (lambda x: functional.log_softmax(x, -1, dtype=WIDE), [X], HALF),
    "a softmax in its own dtype": (lambda x: functional.softmax(x, -1), [X], WIDE),
    "no dropout": (lambda x: functional.dropout(x, 0.5, training=False), [X], WIDE),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_the_operators_compute_what_torch_computes(name: str) -> None:
    call, shapes, dtype = OPERATORS[name]
    torch.manual_seed(0)
    given = [torch.randn(shape).to(dtype) for shape in shapes]
    results: list[list[torch.Tensor | None]] = []
    for context in (nullcontext(), fused_as_on_accelerators()):
        inputs = [each.clone().requires_grad_() for each in given]
        with context:
            out = call(*inputs)
            (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        results.append([out, *(each.grad for each in inputs)])
    for own, torchs in zip(*results, strict=True):
        torch.testing.assert_close(own, torchs)


@pytest.mark.parametrize("name", ["rms_norm", "softmax", "log_softmax"])
def test_a_penalty_on_their_gradients_is_torchs(name: str) -> None:
    """Its backward goes through theirs."""
    call, shapes, dtype = OPERATORS[name]
    torch.manual_seed(0)
    given = [torch.randn(shape).to(dtype) for shape in shapes]
    results = []
    for context in (nullcontext(), fused_as_on_accelerators()):
        inputs = [each.clone().requires_grad_() for each in given]
        with context:
            (found,) = torch.autograd.grad(
                call(*inputs).square().sum(), inputs[0], create_graph=True
            )
            found.float().square().sum().backward()
        results.append(inputs[0].grad)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", OPERATORS)
def test_transforms_see_torchs_own_operators(name: str) -> None:
    call, shapes, dtype = OPERATORS[name]
    torch.manual_seed(0)
    x, *others = [torch.randn(shape).to(dtype) for shape in shapes]

    def loss(x: torch.Tensor) -> torch.Tensor:
        return call(x, *others).float().square().sum()

    own = torch.func.grad(loss)(x)
    with fused_as_on_accelerators():
        torch.testing.assert_close(torch.func.grad(loss)(x), own)
        batches = torch.stack([x, x])
        torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(batches)[1], own)


def test_afterwards_torch_has_its_own_operators() -> None:
    x = torch.randn(4, 16, requires_grad=True)
    with fused_as_on_accelerators():
        assert "RMSNorm" in type(functional.rms_norm(x, (16,)).grad_fn).__name__
    assert "RMSNorm" not in type(functional.rms_norm(x, (16,)).grad_fn).__name__
