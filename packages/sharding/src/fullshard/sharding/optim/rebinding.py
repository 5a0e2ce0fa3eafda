"""Gives an optimizer that was built before ``fully_shard`` the sharded parameters, before it steps.

State for a full parameter is not converted for a shard.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fullshard.sharding.optim.live_groups import params_in
from fullshard.sharding.params.lookup import owner_of, sharded_of
from fullshard.sharding.params.param import FSDPParam

__all__ = ["rebind_optimizer"]


def rebind_optimizer(optimizer: Optimizer) -> None:
    """Replace parameters in ``optimizer`` by the sharded parameters of ``fully_shard``.

    The first step does it by itself; call it where an optimizer that was built before
    ``fully_shard`` must be right earlier, as for a checkpoint. Parameters that were unsharded when
    the optimizer was built are replaced, too. Groups keep their options and the order of their
    parameters.

    Raises:
        RuntimeError: if the optimizer has state for a replaced parameter: the state of a full
            parameter does not fit its shard. The optimizer then stays unchanged.
    """
    groups = vars(optimizer).get("param_groups", ())
    replaced: dict[nn.Parameter, FSDPParam] = {}
    for param in params_in(groups):
        owner = owner_of(param)
        if owner is not None and owner.sharded is not param:
            replaced[param] = owner
    for param, owner in replaced.items():
        _require_no_state(optimizer, param, owner)
    for group in groups if replaced else ():
        # in place: LBFGS keeps the list
        group["params"][:] = map(sharded_of, group["params"])
    for param in replaced:
        state = optimizer.state.pop(param, None)
        if state:
            optimizer.state[sharded_of(param)] = state


def _require_no_state(optimizer: Optimizer, param: nn.Parameter, owner: FSDPParam) -> None:
    if not optimizer.state.get(param):
        return
    if isinstance(param, DTensor) and param.placements == owner.spec.placements:
        return  # an equally cut shard replaced this shard: its state fits
    raise RuntimeError(
        f"{type(optimizer).__name__} has state for {owner.name}, which fully_shard has "
        "replaced by its shard since, and that state does not fit; build the optimizer after "
        "fully_shard, then load its state with "
        "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which shards it"
    )
