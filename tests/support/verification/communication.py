"""Faults of gathers, reductions and replicas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm import DefaultAllGather, DefaultReduceScatter
from fullshard.policies import MixedPrecisionPolicy
from fullshard.preflight import Phase
from fullshard.sharding import FSDPModule
from fullshard.wire import WirePolicy
from support.verification.fault import Fault, hybrid, shard

__all__ = ["FAULTS"]

DTYPE = "a policy's dtype"
ELSEWHERE = "gradients that are in another place"
GATHERED = "a gathered parameter that is not what the shards hold"
LEFT_OUT = "gradients that are left out"
REPLICAS = "replicas that are not the same"
SCALED = "gradients scaled by one factor"
UNALIKE = "gradients that do not count alike"
HALF = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)


# -- gathers --------------------------------------------------------------------------------------


class _Gather(DefaultAllGather):
    """Does something to what was gathered."""

    def __init__(self, spoil: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.calls = 0
        self.kept: torch.Tensor | None = None
        self._spoil = spoil

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        work = super().__call__(output_tensor, input_tensor, group, False)
        if work is not None:
            work.wait()
        self._spoil(self, output_tensor)
        self.calls += 1


def _floats(output: torch.Tensor) -> torch.Tensor:
    return output.view(-1).view(torch.float32)


def _one_element(gather: _Gather, output: torch.Tensor) -> None:
    _floats(output)[3] *= 1.01


def _one_element_on_rank_1(gather: _Gather, output: torch.Tensor) -> None:
    if dist.get_rank() == 1:
        _floats(output)[3] *= 1.01


def _first_copy(gather: _Gather, output: torch.Tensor) -> None:
    if gather.kept is None:
        gather.kept = output.clone()
    output.copy_(gather.kept)


def _exchanged(gather: _Gather, output: torch.Tensor) -> None:
    values = _floats(output)
    values[[0, 1]] = values[[1, 0]]


def _own_part_only(gather: _Gather, output: torch.Tensor) -> None:
    parts = output.view(-1).chunk(2)
    parts[1 - dist.get_rank()].zero_()


def _in_backward(gather: _Gather, output: torch.Tensor) -> None:
    if gather.calls % 2:
        _floats(output).mul_(1.1)


def _gathering(model: Any, spoil: Callable[[Any, torch.Tensor], None], name: str = "up") -> None:
    shard(model)
    model.get_submodule(name).set_custom_all_gather(_Gather(spoil))


# -- reductions -----------------------------------------------------------------------------------


class _Reduce(DefaultReduceScatter):
    """Does something to what is to be reduced, or to what came of it."""

    def __init__(
        self,
        before: Callable[[torch.Tensor], None] = lambda given: None,
        after: Callable[[torch.Tensor, torch.Tensor], None] = lambda output, given: None,
    ) -> None:
        super().__init__()
        self._before, self._after = before, after

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        given = input_tensor.clone()
        self._before(input_tensor)
        work = super().__call__(output_tensor, input_tensor, group, op, False)
        if work is not None:
            work.wait()
        self._after(output_tensor, given)


def _from_rank(rank: int, factor: float) -> Callable[[torch.Tensor], None]:
    def change(given: torch.Tensor) -> None:
        if dist.get_rank() == rank:
            given.mul_(factor)

    return change


def _own_part(output: torch.Tensor, given: torch.Tensor) -> None:
    output.copy_(given.chunk(dist.get_world_size())[dist.get_rank()])


def _turned(output: torch.Tensor, given: torch.Tensor) -> None:
    output.copy_(output.roll(1))


def _two_exchanged(output: torch.Tensor, given: torch.Tensor) -> None:
    output[[0, 1]] = output[[1, 0]]


def _one_gradient_element(output: torch.Tensor, given: torch.Tensor) -> None:
    if dist.get_rank() == 1:
        output[2] *= 1.1


def _reducing(model: Any, **hooks: Any) -> None:
    shard(model)
    model.up.set_custom_reduce_scatter(_Reduce(**hooks))


def _divided(model: Any, factor: float, modules: int = 3) -> None:
    shard(model)
    for module in [each for each in model.modules() if isinstance(each, FSDPModule)][:modules]:
        module.set_gradient_divide_factor(factor)


# -- replicas -------------------------------------------------------------------------------------


class _OnReplica1(torch.optim.AdamW):
    """Does something to gradients, parameters or state on ranks 2 and 3."""

    def __init__(self, params: Any, spoil: Callable[[Any], None]) -> None:
        super().__init__(params, lr=1e-2)
        self._spoil = spoil

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        if dist.get_rank() >= 2:
            self._spoil(self)
        return found


def _first_param(optimizer: Any) -> torch.Tensor:
    param: torch.Tensor = optimizer.param_groups[0]["params"][0]
    return param


def _spoil_param(optimizer: Any) -> None:
    with torch.no_grad():
        _first_param(optimizer).to_local().mul_(1.1)  # type: ignore[attr-defined]


def _spoil_state(optimizer: Any) -> None:
    optimizer.state[_first_param(optimizer)]["exp_avg"].to_local().mul_(2)


def _zeroed(model: Any) -> None:
    """A gradient is zero on the second replica only."""
    hybrid(model)

    def zero(param: torch.Tensor) -> None:
        if dist.get_rank() >= 2:
            param.grad.to_local().zero_()  # type: ignore[union-attr]

    model.up.weight.register_post_accumulate_grad_hook(zero)


def _unsynced(model: Any) -> None:
    """Each replica keeps its own gradients."""
    hybrid(model)
    model.up.set_all_reduce_hook(_own_replicas)


def _own_replicas(output: torch.Tensor) -> None:
    output.mul_(1.0 + 0.5 * (dist.get_rank() // 2))


FAULTS = [
    Fault(
        name="one gathered element off by 1 %",
        phase=Phase.LOSS,
        at="up",
        causes=(GATHERED,),
        program={"shard": partial(_gathering, spoil=_one_element)},
        by_layer=Phase.OUTPUT,
    ),
    Fault(
        name="one gathered element off on one rank",
        phase=Phase.LOSS,
        at="up",
        causes=(GATHERED,),
        program={"shard": partial(_gathering, spoil=_one_element_on_rank_1)},
        by_layer=Phase.OUTPUT,
    ),
    Fault(
        name="a stale gathered copy",
        phase=Phase.LOSS,
        at="up",
        causes=(GATHERED,),
        program={"shard": partial(_gathering, spoil=_first_copy)},
        by_layer=Phase.OUTPUT,
    ),
    Fault(
        name="gathered elements exchanged",
        phase=Phase.LOSS,
        at="up",
        causes=(GATHERED,),
        program={"shard": partial(_gathering, spoil=_exchanged)},
        by_layer=Phase.OUTPUT,
    ),
    Fault(
        name="a gather of the own part alone",
        phase=Phase.LOSS,
        at="up",
        causes=(GATHERED,),
        program={"shard": partial(_gathering, spoil=_own_part_only)},
        by_layer=Phase.OUTPUT,
    ),
    Fault(
        name="a gather that is wrong in backward",
        phase=Phase.GRADIENT,
        at="up.weight",
        causes=(GATHERED,),
        program={"shard": partial(_gathering, spoil=_in_backward, name="down")},
        by_layer=Phase.INPUT_GRADIENT,
    ),
    Fault(
        name="gathered in 16 bits",
        phase=Phase.LOSS,
        causes=(DTYPE,),
        program={
            "shard": lambda model: shard(model, wire_policy=WirePolicy(gathers=torch.bfloat16))
        },
        by_layer=Phase.OUTPUT,
    ),
    Fault(
        name="gradients that are summed",
        phase=Phase.GRADIENT,
        at="up.weight",
        causes=(SCALED,),
        program={"shard": lambda model: _divided(model, 1.0)},
    ),
    Fault(
        name="gradients divided twice",
        phase=Phase.GRADIENT,
        at="up.weight",
        causes=(SCALED,),
        program={"shard": lambda model: _divided(model, 4.0)},
    ),
    Fault(
        name="a wrong divisor of one group",
        phase=Phase.GRADIENT,
        at="up.weight",
        causes=(SCALED,),
        program={"shard": lambda model: _reducing(model, after=lambda out, given: out.mul_(0.75))},
    ),
    Fault(
        name="one group alone",
        phase=Phase.GRADIENT,
        at="up.weight",
        causes=(LEFT_OUT,),
        program={"shard": partial(_reducing, after=_own_part)},
    ),
    Fault(
        name="a reduction without rank 1",
        phase=Phase.GRADIENT,
        at="up.weight",
        causes=(LEFT_OUT,),
        program={"shard": partial(_reducing, before=_from_rank(1, 0.0))},
    ),
    Fault(
        name="rank 0 twice in a reduction",
        phase=Phase.GRADIENT,
        at="up.weight",
        causes=(UNALIKE,),
        program={"shard": partial(_reducing, before=_from_rank(0, 2.0))},
    ),
    Fault(
        name="a reduced shard turned",
        phase=Phase.GRADIENT,
        at="up.weight",
        program={"shard": partial(_reducing, after=_turned)},
    ),
    Fault(
        name="reduced elements exchanged",
        phase=Phase.GRADIENT,
        at="up.weight",
        causes=(ELSEWHERE,),
        program={"shard": partial(_reducing, after=_two_exchanged)},
    ),
    Fault(
        name="one reduced element off",
        phase=Phase.GRADIENT,
        at="up.weight",
        program={"shard": partial(_reducing, after=_one_gradient_element)},
    ),
    Fault(
        name="reduced in 16 bits",
        phase=Phase.GRADIENT,
        at="up.weight",
        causes=(DTYPE,),
        program={"shard": lambda model: shard(model, mp_policy=HALF)},
    ),
    Fault(
        name="gradients that travel in 16 bits",
        phase=Phase.GRADIENT,
        at="up.weight",
        causes=(DTYPE,),
        program={
            "shard": lambda model: shard(model, wire_policy=WirePolicy(reductions=torch.bfloat16))
        },
        fits=True,
    ),
    Fault(
        name="a gradient zeroed on one replica",
        phase=Phase.GRADIENT,
        at="up.weight",
        causes=(REPLICAS,),
        program={"shard": _zeroed},
        ranks=4,
    ),
    Fault(
        name="reduced gradients scaled on one replica",
        phase=Phase.GRADIENT,
        at="up.weight",
        causes=(REPLICAS,),
        program={"shard": _unsynced},
        ranks=4,
    ),
    Fault(
        name="a parameter changed on one replica",
        phase=Phase.UPDATE,
        at="up.weight",
        causes=(REPLICAS,),
        program={"shard": hybrid, "optimizer": partial(_OnReplica1, spoil=_spoil_param)},
        ranks=4,
    ),
    Fault(
        name="optimizer state changed on one replica",
        phase=Phase.STATE,
        at="exp_avg of up.weight",
        causes=(REPLICAS,),
        program={"shard": hybrid, "optimizer": partial(_OnReplica1, spoil=_spoil_state)},
        ranks=4,
    ),
]
