"""FSDP1 twice, torch's and ours, on the same model and the same batches."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from support.parity.compare import full
from support.ranks import cpu_mesh
from support.surface.model import WIDTH, Block, build


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
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH, generator=generator)


def hybrid_mesh(*, replicas: int = 2) -> DeviceMesh:
    """All ranks, as so many replicas of equal shards: (replicate, shard)."""
    shape = (replicas, dist.get_world_size() // replicas)
    return cpu_mesh(shape, ("replicate", "shard"))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """A loss whose mean over ranks is that of the whole batch."""
    return output.float().square().mean()


Loss = Callable[[torch.Tensor], torch.Tensor]
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


def mean_gradients(net: nn.Module, step: int = 0, loss: Loss = loss_of) -> torch.Tensor:
    """Adds the mean over all ranks of their gradients to ``grad``; returns this rank's loss.

    The definition of data parallel training, down to the bits where nothing was accumulated before
    and the world size is a power of two: ranks are added in their order, then divided.
    """
    before = {name: param.grad for name, param in net.named_parameters()}
    net.zero_grad()
    losses = [loss(net(rows(step, rank))) for rank in range(dist.get_world_size())]
    for each in losses:
        each.backward()
    for name, param in net.named_parameters():
        if param.grad is not None:
            param.grad.div_(len(losses))
            earlier = before[name]
            param.grad = param.grad if earlier is None else earlier + param.grad
        else:
            param.grad = before[name]
    return losses[dist.get_rank()].detach()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def unsharded_steps(
    net: nn.Module | None = None, count: int = 3, *, optimizer: Optimizer = sgd
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """This rank's losses and the parameters of the unsharded model, trained on all ranks' rows."""
    net = build() if net is None else net
    optim = optimizer(net)
    losses = []
    for step in range(count):
        losses.append(mean_gradients(net, step))
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


def up_to_order(left: Any, right: Any, dtype: torch.dtype = torch.float32) -> None:
    """Both are bit for bit the same on two ranks, and rounded alike on more.

    For runs that add ranks in different orders: torch's FSDP1 and our NO_SHARD, whose sums are
    gloo's, and all else here, which adds in rank order. A sum of two numbers has one value; a sum
    of W has one for each order, each off by at most W - 1 roundings of half an eps of the largest
    addend. So W eps of the largest element of its neighbours, of one list or dict, are allowed
    to each tensor: rounding stays inside that, a wrong factor or a missing rank does not. The eps
    is that of ``dtype``, in which gradients were added: less than float32 for gradients alone, as
    it would hide both in parameters after few steps; for those there is `in_rank_order`.
    """
    world = dist.get_world_size()
    if world == 2:
        equal(left, right)
    else:
        _rounded_alike(left, right, world * torch.finfo(dtype).eps)


def _rounded_alike(left: Any, right: Any, share: float) -> None:
    if isinstance(left, dict):
        assert list(left) == list(right)
        left, right = list(left.values()), list(right.values())
    assert len(left) == len(right)
    tensors = [each for each in right if isinstance(each, torch.Tensor) and each.numel()]
    allowed = share * max((each.abs().max().item() for each in tensors), default=0.0)
    for one, other in zip(left, right, strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=allowed)
        else:
            _rounded_alike(one, other, share)


def in_rank_order(model: Any) -> Any:
    """An instance of either front that on more than two ranks adds gradients in rank order.

    By a communication hook, which both have. So bits can be compared where gradients are reduced in
    less than float32, where a tolerance for every order of additions would hide a wrong sum.
    """
    if dist.get_world_size() > 2:
        with quiet():
            model.register_comm_hook(None, _reduce_in_rank_order)
    return model


def _reduce_in_rank_order(
    state: None, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    world = dist.get_world_size()
    parts = [torch.empty_like(grad) for _ in range(world)]
    dist.all_gather(parts, grad)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    mean = (total / world).to(grad.dtype)
    if output is None:
        grad.copy_(mean)
    else:
        output.copy_(mean.chunk(world)[dist.get_rank()])
