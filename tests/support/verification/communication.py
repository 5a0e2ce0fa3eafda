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


def _three_quarters(output: torch.Tensor, given: torch.Tensor) -> None:
    output.mul_(0.75)


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


def _gathered(name: str, spoil: Callable[[Any, torch.Tensor], None]) -> Fault:
    shard = partial(_gathering, spoil=spoil)
    return Fault(name, Phase.LOSS, "up", GATHERED, shard=shard, by_layer=Phase.OUTPUT)


def _reduced(name: str, cause: str, shard: Callable[[Any], object], **more: Any) -> Fault:
    return Fault(name, Phase.GRADIENT, "up.weight", cause, shard=shard, **more)


def _replica(name: str, phase: Phase, at: str, **program: Any) -> Fault:
    return Fault(name, phase, at, REPLICAS, ranks=4, **program)


def _travelling(**options: Any) -> Callable[[Any], object]:
    return lambda model: shard(model, wire_policy=WirePolicy(**options))


FAULTS = [
    _gathered("one gathered element off by 1 %", _one_element),
    _gathered("one gathered element off on one rank", _one_element_on_rank_1),
    _gathered("a stale gathered copy", _first_copy),
    _gathered("gathered elements exchanged", _exchanged),
    _gathered("a gather of the own part alone", _own_part_only),
    Fault(
        "a gather that is wrong in backward",
        Phase.GRADIENT,
        "up.weight",
        GATHERED,
        shard=partial(_gathering, spoil=_in_backward, name="down"),
        by_layer=Phase.INPUT_GRADIENT,
    ),
    Fault(
        "gathered in 16 bits",
        Phase.LOSS,
        cause=DTYPE,
        shard=_travelling(gathers=torch.bfloat16),
        by_layer=Phase.OUTPUT,
    ),
    _reduced("gradients that are summed", SCALED, partial(_divided, factor=1.0)),
    _reduced("gradients divided twice", SCALED, partial(_divided, factor=4.0)),
    _reduced("a wrong divisor of one group", SCALED, partial(_reducing, after=_three_quarters)),
    _reduced("one group alone", LEFT_OUT, partial(_reducing, after=_own_part)),
    _reduced("a reduction without rank 1", LEFT_OUT, partial(_reducing, before=_from_rank(1, 0.0))),
    _reduced("rank 0 twice in a reduction", UNALIKE, partial(_reducing, before=_from_rank(0, 2.0))),
    _reduced("a reduced shard turned", "", partial(_reducing, after=_turned)),
    _reduced("reduced elements exchanged", ELSEWHERE, partial(_reducing, after=_two_exchanged)),
    _reduced("one reduced element off", "", partial(_reducing, after=_one_gradient_element)),
    _reduced("reduced in 16 bits", DTYPE, lambda model: shard(model, mp_policy=HALF)),
    _reduced(
        "gradients that travel in 16 bits",
        DTYPE,
        _travelling(reductions=torch.bfloat16),
        fits=True,
    ),
    _replica("a gradient zeroed on one replica", Phase.GRADIENT, "up.weight", shard=_zeroed),
    _replica(
        "reduced gradients scaled on one replica", Phase.GRADIENT, "up.weight", shard=_unsynced
    ),
    _replica(
        "a parameter changed on one replica",
        Phase.UPDATE,
        "up.weight",
        shard=hybrid,
        optimizer=partial(_OnReplica1, spoil=_spoil_param),
    ),
    _replica(
        "optimizer state changed on one replica",
        Phase.STATE,
        "exp_avg of up.weight",
        shard=hybrid,
        optimizer=partial(_OnReplica1, spoil=_spoil_state),
    ),
]
