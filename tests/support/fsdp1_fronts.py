"""FSDP1 twice, torch's and ours, on the same model and the same batches.

Owns the two fronts, which differ in their import line only, and training that records what a user
sees. All of it is called on every rank.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from support.surface_model import WIDTH, Block, build

__all__ = [
    "OURS",
    "TORCH",
    "Front",
    "close",
    "equal",
    "full_state",
    "rows",
    "sgd",
    "steps_of",
    "train",
    "unsharded_steps",
]


class Front:
    """FSDP1 by one import line."""

    def __init__(self, name: str, fsdp: str, wrap: str) -> None:
        """Takes the name of its constant here, and its two modules."""
        self.name = name
        self.fsdp = importlib.import_module(fsdp)
        self.wrap: Any = importlib.import_module(wrap)

    def __reduce__(self) -> str:
        """Travels to ranks by name."""
        return self.name

    def __getattr__(self, name: str) -> Any:
        """A name of the module."""
        return getattr(self.fsdp, name)

    @property
    def module(self) -> Any:
        """The class."""
        return self.FullyShardedDataParallel

    def wrapped(self, net: nn.Module | None = None, **arguments: Any) -> Any:
        """The model, each block an instance, unless told otherwise.

        Enums are given by name, dataclasses by a dict of their fields.
        """
        arguments.setdefault("auto_wrap_policy", self.wrap.ModuleWrapPolicy({Block}))
        for name, kind in (
            ("sharding_strategy", self.ShardingStrategy),
            ("backward_prefetch", self.BackwardPrefetch),
        ):
            if isinstance(arguments.get(name), str):
                arguments[name] = getattr(kind, arguments[name])
        for name, kind in (
            ("mixed_precision", self.MixedPrecision),
            ("cpu_offload", self.CPUOffload),
        ):
            if isinstance(arguments.get(name), dict):
                arguments[name] = kind(**arguments[name])
        arguments = {
            "device_id": torch.device("cpu"),
            "use_orig_params": True,
            **arguments,
        }
        with quiet(self.name == "TORCH"):
            return self.module(build() if net is None else net, **arguments)


OURS = Front("OURS", "fullshard.wrappers.fsdp1", "fullshard.wrappers.wrap")
TORCH = Front("TORCH", "torch.distributed.fsdp", "torch.distributed.fsdp.wrap")


@contextmanager
def quiet(enable: bool = True) -> Iterator[None]:
    """No warnings: torch deprecates FSDP1 piece by piece."""
    with warnings.catch_warnings():
        if enable:
            warnings.simplefilter("ignore")
        yield


def rows(step: int, rank: int | None = None) -> torch.Tensor:
    """This rank's rows of a batch, or another's."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH, generator=generator)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """A loss whose mean over ranks is that of the whole batch."""
    return output.float().square().mean()


Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


def train(
    model: Any, count: int = 3, *, optimizer: Optimizer = sgd, after_backward: Any = None
) -> list[Any]:
    """The loss of each step on this rank, and what ``after_backward(model)`` gives."""
    optim = optimizer(model)
    found: list[Any] = []
    for step in range(count):
        with quiet():
            loss = loss_of(model(rows(step)))
            loss.backward()
            found.append(loss.detach())
            if after_backward is not None:
                found.append(after_backward(model))
            optim.step()
            optim.zero_grad()
    return found


def unsharded_steps(
    net: nn.Module | None = None, count: int = 3, *, optimizer: Optimizer = sgd
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """This rank's losses and the parameters of the unsharded model, trained on all ranks' rows."""
    net = build() if net is None else net
    optim = optimizer(net)
    losses = []
    for step in range(count):
        each = [loss_of(net(rows(step, rank))) for rank in range(dist.get_world_size())]
        torch.stack(each).mean().backward()
        losses.append(each[dist.get_rank()].detach())
        optim.step()
        optim.zero_grad()
    return losses, {name: param.detach().clone() for name, param in net.named_parameters()}


def full_state(front: Front, model: Any) -> dict[str, torch.Tensor]:
    """Whole parameters under clean names, as ``summon_full_params`` gives them."""
    with quiet(), front.module.summon_full_params(model, writeback=False):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def steps_of(
    front: Front, model: Any, count: int = 3, **options: Any
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """What training recorded, and the parameters after it."""
    return train(model, count, **options), full_state(front, model)


def equal(left: Any, right: Any) -> None:
    """Both are bit for bit the same: tensors, and lists and dicts of them in the same order."""
    torch.testing.assert_close(left, right, rtol=0, atol=0)
    if isinstance(left, dict):
        assert list(left) == list(right)


def close(left: Any, right: Any) -> None:
    """Both are the same up to the order of additions."""
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
    if isinstance(left, dict):
        assert list(left) == list(right)
