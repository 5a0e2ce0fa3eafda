"""Correct programs of many kinds, none of which ``verify`` may report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss, scaled_dot_product_attention
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from fullshard.optim import AdamW8bit, Muon, clip_grad_norm_
from fullshard.policies import CPUOffloadPolicy, MixedPrecisionPolicy
from fullshard.sharding import FSDPModule, fully_shard
from support.modules import Assembled, Stack, in_turn

WIDTH, ROWS, LENGTH = 8, 4, 5


def shard(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    inputs, targets = torch.randn(2, ROWS, LENGTH, WIDTH, generator=generator).unbind()
    return inputs, targets


def loss(model: nn.Module, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The sum of squares of a position, the mean over positions."""
    inputs, targets = given
    return WIDTH * mse_loss(model(inputs).to(targets.dtype), targets)  # torch 2.11 casts nothing


@dataclass(frozen=True, kw_only=True)
class Correct:
    """A correct program; what is not given is the net above, sharded block by block.

    Attributes:
        program: what differs.
        ranks: how many it needs.
    """

    program: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2


# -- models ---------------------------------------------------------------------------------------


class _Attention(nn.Module):
    """A block of whose bias a third, that of the keys, has a gradient of 0: softmax cancels it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.heads = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: ``[rows, length, width]``, in and out."""
        heads = self.heads(self.norm(x)).chunk(3, dim=-1)
        out: torch.Tensor = x + self.out(scaled_dot_product_attention(*heads))
        return out


def net(depth: int = 2) -> Any:
    return Stack([_Attention() for _ in range(depth)], head=nn.Linear(WIDTH, WIDTH))


def _dead() -> Any:
    """A layer whose units are mostly off: their gradients are exactly zero on some ranks."""
    model = net(1)
    model.head = in_turn(up=nn.Linear(WIDTH, 64), relu=nn.ReLU(), down=nn.Linear(64, WIDTH))
    nn.init.uniform_(model.head.up.bias, -3.0, -1.0)
    return model


def _normed() -> Any:
    """A bias before a norm, which takes it out again; a scale of a symmetric pair."""
    return Stack(
        [
            in_turn(up=nn.Linear(WIDTH, WIDTH), norm=nn.LayerNorm(WIDTH)),
            in_turn(norm=nn.LayerNorm(WIDTH), up=nn.Linear(WIDTH, WIDTH)),
        ],
        head=nn.Linear(WIDTH, WIDTH),
    )


def _softmaxed() -> Any:
    """The bias of a softmax's input along the other axis, which cancels."""
    return Stack(
        [Assembled(lambda m, x: x + m.up(x).softmax(1), up=nn.Linear(WIDTH, WIDTH))],
        head=nn.Linear(WIDTH, WIDTH),
    )


def _statistics() -> Any:
    model = net(1)
    model.head = in_turn(
        flat=nn.Flatten(0, 1), norm=nn.BatchNorm1d(WIDTH), out=nn.Linear(WIDTH, WIDTH)
    )
    return model


def _moving(make: Callable[[], nn.Module]) -> Callable[[], Any]:
    """A model with a block that changes more than parameters in each forward."""
    return lambda: Stack([_Attention(), make()], head=nn.Linear(WIDTH, WIDTH))


class _Counting(nn.Linear):
    """Counts its forwards in a buffer and in a number, and computes with both."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.forwards: torch.Tensor = nn.Buffer(torch.zeros((), dtype=torch.long))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: ``[..., width]``, in and out."""
        self.calls += 1
        self.forwards = self.forwards + 1
        out: torch.Tensor = super().forward(x) / (self.calls + self.forwards)
        return out


def _repeated() -> Any:
    """A block that runs as often as the batch asks."""

    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(1 + int(x[0, 0, 0])):
            x = model.blocks[0](x)
        out: torch.Tensor = model.head(x)
        return out

    return Assembled(run, blocks=nn.ModuleList([_Attention()]), head=nn.Linear(WIDTH, WIDTH))


class _Told(Stack):
    """Takes keywords, and returns a dict with the loss in it."""

    def forward(self, x: torch.Tensor, target: Any = None, scale: float = 1.0) -> Any:
        """Shape: ``[rows, length, width]``, both tensors."""
        out = super().forward(x)
        return {"outputs": (out, [x]), "loss": scale * mse_loss(out, target)}


class _Recomputed(Stack):
    """Its blocks run again in backward."""

    def forward(self, x: torch.Tensor) -> Any:
        """Shape: ``[rows, length, width]``, in and out."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def _dropping() -> nn.Module:
    return in_turn(up=nn.Linear(WIDTH, WIDTH), drop=nn.Dropout(0.2))


def _tied() -> Any:
    """Two layers with one weight, outside of the blocks."""
    model: Any = Assembled(
        lambda m, x: m.tail(m.head(m.blocks[0](x))),
        blocks=nn.ModuleList([_Attention()]),
        head=nn.Linear(WIDTH, WIDTH),
        tail=nn.Linear(WIDTH, WIDTH),
    )
    model.tail.weight = model.head.weight
    return model


def _asking(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch that asks for more on the second rank."""
    inputs, targets = batch(step)
    inputs[0, 0, 0] = dist.get_rank()
    return inputs, targets


# -- shards ---------------------------------------------------------------------------------------


def _hybrid(model: Any, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return shard(model, mesh=mesh, **options)


def _torchs(model: Any, hybrid: bool = False) -> Any:
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names) if hybrid else None
    for module in (*model.blocks, model):
        torch_fully_shard(module, mesh=mesh)


def _fsdp1(model: Any) -> nn.Module:
    from fullshard.wrappers.fsdp1 import FullyShardedDataParallel

    return FullyShardedDataParallel(model)


# -- losses ---------------------------------------------------------------------------------------


def _accumulated(
    model: Any, given: Any, parts: int = 2, sync: Callable[[Any, bool], Any] | None = None
) -> torch.Tensor:
    """The mean over micro-batches; all but the last have their backward here."""
    inputs, targets = (each.chunk(parts) for each in given)
    for number in range(parts):
        if isinstance(model, FSDPModule) and sync is not None:
            sync(model, number == parts - 1)
        found = loss(model, (inputs[number], targets[number])) / parts
        if number < parts - 1:
            found.backward()
    return found


def _gradient_sync(model: Any, last: bool) -> None:
    model.set_requires_gradient_sync(last)


def _all_reduce_sync(model: Any, last: bool) -> None:
    model.set_requires_all_reduce(last)


def _evaluated(model: Any, given: Any) -> torch.Tensor:
    return mse_loss(model.eval()(given[0]), given[1].flatten(0, 1))


# -- optimizers -----------------------------------------------------------------------------------


def _of(kind: Any, **options: Any) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    def make(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = kind(list(params), **options)
        return optimizer

    return make


class Clipped(torch.optim.AdamW):
    """Clips by the norm of all gradients before each step."""

    def step(self, closure: Any = None) -> Any:
        clip_grad_norm_([each for group in self.param_groups for each in group["params"]], 0.01)
        return super().step(closure)


class _Scheduled(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 2
        return found


def _grouped(params: Any) -> torch.optim.Optimizer:
    groups: dict[bool, list[Any]] = {True: [], False: []}
    for param in params:
        groups[param.dim() > 1].append(param)
    decayed: dict[str, Any] = {"params": groups[True], "weight_decay": 0.1}
    return torch.optim.AdamW([decayed, {"params": groups[False]}], lr=1e-2)


def _muon(params: Any) -> torch.optim.Optimizer:
    groups: dict[bool, list[Any]] = {True: [], False: []}
    for param in params:
        groups[param.dim() == 2].append(param)
    others: dict[str, Any] = {"params": groups[False], "algorithm": "adamw"}
    return Muon([{"params": groups[True]}, others], lr=1e-2)


_BFLOAT16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
_ADAM = _of(torch.optim.Adam, lr=1e-2)

CORRECT: dict[str, Correct] = {
    "plain": Correct(),
    "accumulation inside the loss": Correct(
        program={"loss": partial(_accumulated, sync=_gradient_sync), "optimizer": _ADAM}
    ),
    "accumulation with a reduction each": Correct(
        program={"loss": partial(_accumulated, parts=4), "optimizer": _ADAM}
    ),
    "hybrid": Correct(program={"shard": _hybrid, "optimizer": _ADAM}, ranks=4),
    "hybrid with accumulation": Correct(
        program={
            "shard": _hybrid,
            "loss": partial(_accumulated, sync=_all_reduce_sync),
            "optimizer": _ADAM,
        },
        ranks=4,
    ),
    "torch's hybrid": Correct(
        program={"shard": partial(_torchs, hybrid=True), "optimizer": _ADAM}, ranks=4
    ),
    "torch's": Correct(program={"shard": _torchs}),
    "four ranks": Correct(program={"optimizer": _ADAM}, ranks=4),
    "FSDP1": Correct(program={"shard": _fsdp1}),
    "kept after forward": Correct(program={"shard": partial(shard, reshard_after_forward=False)}),
    "kept, and run as often as the batch asks": Correct(
        program={
            "build_model": _repeated,
            "shard": partial(shard, reshard_after_forward=False),
            "batch": _asking,
        }
    ),
    "a post-forward mesh": Correct(
        program={"shard": partial(shard, reshard_after_forward=2)}, ranks=4
    ),
    "offloaded": Correct(program={"shard": partial(shard, offload_policy=CPUOffloadPolicy())}),
    "bfloat16": Correct(program={"shard": partial(shard, mp_policy=_BFLOAT16)}),
    "parameters in bfloat16": Correct(
        program={
            "build_model": lambda: net().bfloat16(),
            "batch": lambda step: tuple(each.bfloat16() for each in batch(step)),
        }
    ),
    "float64": Correct(
        program={
            "build_model": lambda: net().double(),
            "batch": lambda step: tuple(each.double() for each in batch(step)),
        }
    ),
    "ten steps": Correct(program={"steps": 10, "optimizer": _ADAM}),
    "dead units": Correct(program={"build_model": _dead, "optimizer": _ADAM}),
    "a bias before a norm": Correct(program={"build_model": _normed, "optimizer": _ADAM}),
    "a bias that softmax cancels": Correct(program={"build_model": _softmaxed, "optimizer": _ADAM}),
    "dicts and keywords": Correct(
        program={
            "build_model": lambda: _Told([_Attention()], head=nn.Linear(WIDTH, WIDTH)),
            "batch": lambda step: dict(zip("xy", batch(step), strict=True)),
            "loss": lambda model, given: model(given["x"], target=given["y"], scale=2.0)["loss"],
        }
    ),
    "checkpoints with dropout": Correct(
        program={
            "build_model": lambda: _Recomputed(
                [_dropping(), _dropping()], head=nn.Linear(WIDTH, WIDTH)
            ),
            "aligned_seeds": True,
        }
    ),
    "tied weights": Correct(program={"build_model": _tied}),
    "batch statistics in eval mode": Correct(
        program={"build_model": _statistics, "loss": _evaluated}
    ),
    "spectral norm": Correct(
        program={"build_model": _moving(lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)))}
    ),
    "a count of forwards": Correct(program={"build_model": _moving(_Counting)}),
    "SGD with momentum": Correct(
        program={"optimizer": _of(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)}
    ),
    "Adagrad": Correct(program={"optimizer": _of(torch.optim.Adagrad, lr=1e-2)}),
    "AMSGrad": Correct(program={"optimizer": _of(torch.optim.AdamW, lr=1e-2, amsgrad=True)}),
    "Rprop": Correct(program={"optimizer": _of(torch.optim.Rprop, lr=1e-2)}),
    "AdamW of 8 bits": Correct(program={"optimizer": _of(AdamW8bit, lr=1e-2)}),
    "Muon": Correct(program={"optimizer": _muon}),
    "groups of parameters": Correct(program={"optimizer": _grouped}),
    "clipped": Correct(program={"optimizer": _of(Clipped, lr=1e-2)}),
    "a schedule in the optimizer": Correct(program={"optimizer": _of(_Scheduled, lr=1e-3)}),
}
"""By name; ``test_verify_correct`` runs each as a whole and layer by layer."""
