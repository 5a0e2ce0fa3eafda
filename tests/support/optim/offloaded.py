"""Programs that train with any optimizer, for tests of state, and of steps, somewhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.comm.spi import can_pin
from fullshard.optim import HostTier, OffloadedOptimizer, clip_grad_norm_
from fullshard.policies import CPUOffloadPolicy, FileOffloadPolicy, MixedPrecisionPolicy
from support.surface.model import batch

Maker = Callable[[nn.Module], Optimizer]


def adamw(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.1, **options})


def groups_of_parameters(model: nn.Module) -> Optimizer:
    params = list(model.parameters())
    return torch.optim.AdamW(
        [{"params": params[::2], "lr": 0.1}, {"params": params[1::2], "lr": 0.01, "amsgrad": True}]
    )


@dataclass(frozen=True)
class Program:
    """One way to train.

    Attributes:
        make: the optimizer.
        arguments: for ``fully_shard``.
        micro_batches: backwards per step.
        clip: the largest norm of all gradients; 0: any.
        closure: whether the step gets a closure.
        set_to_none: whether gradients are freed after a step, or filled with zeros.
    """

    make: Maker = adamw
    arguments: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    clip: float = 0.0
    closure: bool = False
    set_to_none: bool = True

    def run(self, model: nn.Module, optimizer: Optimizer, steps: range) -> None:
        """Train for some steps, with a learning rate that falls."""
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in steps:

            def backward(step: int = step) -> torch.Tensor:
                optimizer.zero_grad(set_to_none=self.set_to_none)
                for each in range(self.micro_batches):
                    loss = model(batch(10 * step + each)).square().mean()
                    loss.backward()
                if self.clip:
                    clip_grad_norm_(model, self.clip)
                return loss

            if self.closure:
                optimizer.step(backward)  # type: ignore[arg-type] # torch's closures return floats
            else:
                backward()
                optimizer.step()
            scheduler.step()


PROGRAMS = {
    "adamw": Program(),
    "fused": Program(lambda model: adamw(model, fused=True)),
    "for each parameter": Program(lambda model: adamw(model, foreach=False)),
    "groups of parameters": Program(groups_of_parameters),
    "momentum": Program(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)),
    "no state": Program(lambda m: torch.optim.SGD(m.parameters(), lr=0.1)),
    "nadam": Program(lambda m: torch.optim.NAdam(m.parameters(), lr=0.1)),
    "rprop": Program(lambda m: torch.optim.Rprop(m.parameters(), lr=0.1)),
    "accumulation and clipping": Program(micro_batches=3, clip=0.1),
    "closure": Program(closure=True),
    "bf16": Program(arguments={"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}),
    "offload": Program(arguments={"offload_policy": CPUOffloadPolicy()}),
}


def run_both(program: Program, mine: nn.Module, theirs: nn.Module) -> None:
    """Train both models for three steps; they end with the same bits."""
    one, other = program.make(mine), program.make(theirs)
    program.run(mine, one, range(3))
    program.run(theirs, other, range(3))
    assert_equal_runs(mine, one, theirs, other)


def in_file(folder: Path, **options: Any) -> FileOffloadPolicy:
    """A policy with all shards in the file, and one or two of the small ones in memory."""
    options = {"resident_mb": 0.01, "read_ahead_mb": 0.005, "min_bytes": 1, **options}
    return FileOffloadPolicy(folder, **options)


def are_in_file(tensors: Iterable[Any], policy: FileOffloadPolicy) -> bool:
    """Whether this rank's part of each, if it has one, is in the file; some rank has one."""
    parts = [each for each in map(part, tensors) if each.numel()]
    return bool(parts) and all(policy._file.find(each) is not None for each in parts)


def on_host(optimizer: Optimizer, *_: object) -> OffloadedOptimizer:
    """``optimizer`` with all tensors of its state on the host, and one parameter per bucket."""
    return OffloadedOptimizer(optimizer, HostTier(bucket_mb=1e-4, min_bytes=1))


def assert_on_host(optimizer: OffloadedOptimizer) -> None:
    """Every tensor of state with more than one element is on the host, page-locked if it can be."""
    for state in optimizer.state.values():
        for value in state.values():
            local = value.to_local() if isinstance(value, DTensor) else value
            if local.numel() > 1:
                assert local.device.type == "cpu"
                assert local.is_pinned() == can_pin(local.device)


def part(value: Any) -> torch.Tensor:
    """This rank's part of a parameter or of a value of the state, on the CPU."""
    local = value.to_local() if isinstance(value, DTensor) else torch.as_tensor(value)
    return local.detach().cpu()


def assert_equal_runs(mine: nn.Module, one: Optimizer, theirs: nn.Module, other: Optimizer) -> None:
    """Both models have the same parameters, and both optimizers the same state, to the bit."""
    expected = dict(theirs.named_parameters())
    for name, param in mine.named_parameters():
        assert torch.equal(part(param), part(expected[name])), name
    for state, wanted in zip(one.state.values(), other.state.values(), strict=True):
        assert state.keys() == wanted.keys()
        assert all(torch.equal(part(state[key]), part(wanted[key])) for key in wanted)
