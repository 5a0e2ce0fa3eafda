"""A sharded model from a task: built on meta, sharded, then filled rank by rank.

Owns the order of these three steps, which is what keeps a whole model from ever being in one rank's
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from fullshard.elastic import ReplicaGroups
from fullshard.policies import MixedPrecisionPolicy
from fullshard.sharding import FSDPModule, ShardingPlacements, WireForms, fully_shard
from fullshard.wire import ErrorFeedback, Quantised, WirePolicy
from fullshard_train.seeds import generator_for
from fullshard_train.settings.config import Config
from fullshard_train.settings.sections import ParallelConfig
from fullshard_train.task import Task

InitialValue: TypeAlias = Callable[[str, torch.Size, torch.Generator], torch.Tensor]
"""The CPU tensor that the parameter of a name and shape starts from."""

__all__ = [
    "InitialValue",
    "Layered",
    "announce",
    "build_sharded_model",
    "initialise",
    "mixed_precision",
    "shard_model",
    "wire_policy",
]


class Layered(Protocol):
    """A caller that knows the layers of a model; a `Task` does."""

    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        """The modules that are sharded one by one."""
        ...


def mixed_precision(
    config: ParallelConfig, device: torch.device, *, as_stored: bool = False
) -> MixedPrecisionPolicy:
    """The dtypes that parameters and gradients travel in; parameters are kept in float32.

    "auto" is bfloat16 on a GPU and float32 on a CPU, where float32 is the faster one for small
    models; or, with `as_stored`, the dtype that each parameter has.
    """
    name = config.param_dtype
    if name == "auto" and as_stored:
        return MixedPrecisionPolicy()
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    if name == config.reduce_dtype == "float32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=getattr(torch, name), reduce_dtype=getattr(torch, config.reduce_dtype)
    )


def wire_policy(config: ParallelConfig) -> WirePolicy:
    """What parameters and gradients travel in, where that is narrower than what computes.

    In 8 bits matrices travel in blocks, and their gradients in bf16 or in 8 bits, too. Norms and
    biases always travel as they are: they are few, and the weight of a norm, about 1, would not
    move in bf16 before its updates add up to 2 ** -9.
    """
    if config.wire_dtype == "as computed":
        return WirePolicy()
    exact = ("*norm*", "*.bias")
    if config.wire_dtype.startswith("int8"):
        gradients: dict[str, torch.dtype | Quantised] = {
            "int8": torch.bfloat16,
            "int8 both ways": Quantised(torch.int8),
            "int8 both ways with error feedback": Quantised(torch.int8, feedback=ErrorFeedback()),
        }
        return WirePolicy(
            gathers=Quantised(torch.int8),
            reductions=gradients[config.wire_dtype],
            exact=exact,
        )
    dtype = getattr(torch, config.wire_dtype)
    return WirePolicy(gathers=dtype, reductions=dtype, exact=exact)


def build_sharded_model(
    task: Task,
    config: Config,
    mesh: DeviceMesh,
    device: torch.device,
    groups: ReplicaGroups | None = None,
) -> nn.Module:
    """The task's model with its initial weights, each layer sharded alone, the rest as the root."""
    with torch.device("meta"):
        model = task.build_model()
    shard_model(model, task, config, mesh, device, groups)
    model.to_empty(device=device)
    task.fill(model, config.train.seed)
    return model


def shard_model(  # the model, what it is for, where it is, and with whom
    model: nn.Module,
    task: Layered,
    config: Config,
    mesh: DeviceMesh,
    device: torch.device,
    groups: ReplicaGroups | None = None,
) -> FSDPModule:
    """Shards each layer of `model` alone, and the rest as the root.

    With `groups`, gradients are added over replica groups, too.
    """
    adapters = config.run.task == "hf" and config.hf.method == "lora"
    policy = mixed_precision(config.parallel, device, as_stored=adapters)
    wire: WireForms = wire_policy(config.parallel)
    if groups is not None:
        wire = groups.wire(wire)
    reshard, stage = config.parallel.reshard_after_forward, config.parallel.zero
    shard = partial(
        fully_shard,
        mesh=mesh,
        mp_policy=policy,
        wire_policy=wire,
        # stage 3 is what the mesh says, which may replicate
        placements=ShardingPlacements.zero(stage) if stage < 3 else None,
    )
    for layer in task.layers(model):
        shard(layer, reshard_after_forward=reshard)
    shard(model)
    assert isinstance(model, FSDPModule)
    return model


def announce(model: FSDPModule, config: Config, *, last: bool) -> None:
    """Say whether the next backward is the last of a step.

    Gradients of other backwards wait unsharded. With `zero = 2` each backward reduces them.
    """
    if config.parallel.zero == 2:
        model.set_is_last_backward(last)
    else:
        model.set_requires_gradient_sync(last)


@torch.no_grad()
def initialise(model: nn.Module, initial_value: InitialValue, seed: int) -> None:
    """Fill every parameter with its value; of a sharded one, this rank's shard.

    Each parameter is drawn whole, from a generator of its own, and cut here; so the weights do not
    depend on the world size, no rank waits for another, and a rank holds one whole parameter at a
    time, never the model.
    """
    for name, parameter in model.named_parameters():
        value = initial_value(name, parameter.shape, generator_for(seed, "initial", name))
        if not isinstance(parameter, DTensor):
            parameter.copy_(value)
            continue
        # src_data_rank=None: cut the local value, which all ranks drew alike, instead of scattering
        # rank 0's.
        shard = distribute_tensor(
            value.to(parameter.device, parameter.dtype),
            parameter.device_mesh,
            parameter.placements,
            src_data_rank=None,
        )
        parameter.copy_(shard)
