"""The base of all optimizers here: checked options, and a step on which all ranks agree.

Owns the order of a step: closure, gradients and their checks, agreement, and then the rule, which
is the class's own. Knows no rule. [Note: agreement] A step compares one digest per mesh, also where
its rule sends nothing: a rank that alone lacks a gradient would leave its part of the parameter
behind, and no later step would show that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fullshard.optim.base.agreement import require_agreement
from fullshard.optim.base.loading import Shapes, require_own_state
from fullshard.optim.base.stepped import Stepped, label_of, stepped_in
from fullshard.sharding.spi import spec_of, untraced

__all__ = ["ShardedOptimizer"]


class ShardedOptimizer(Optimizer):
    """An optimizer with equal results on a sharded and an unsharded model.

    A class of its own gives the methods that raise ``NotImplementedError`` here.
    """

    # -- the methods of each subclass -------------------------------------------------------------

    def _require_group(self, group: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` unless all options and parameters of ``group`` are allowed."""
        raise NotImplementedError

    def _shapes_of(self, group: Mapping[str, Any], param: torch.Tensor) -> Shapes:
        """Return the keys of a parameter's state, and the whole shapes; None: a number."""
        raise NotImplementedError

    def _described(self, each: Stepped) -> str:
        """Return, in words, what ranks must agree on for a sharded parameter."""
        assert each.spec is not None, "it is sharded"
        placed = tuple(each.spec.placements)
        return f"{label_of(each.param)} of shape {tuple(each.param.shape)} placed as {placed}"

    def _require_fits(self, each: Stepped) -> None:
        """Raise ``RuntimeError`` unless there is no state yet, or one that fits the parameter."""
        raise NotImplementedError

    def _change(self, found: Sequence[Sequence[Stepped]]) -> None:
        """Step parameters, by group; all was checked, and all ranks have the same."""
        raise NotImplementedError

    def _loaded(
        self, group: Mapping[str, Any], param: torch.Tensor, state: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return what becomes of the saved ``state`` of ``param``: as torch cast it, by itself."""
        cast: dict[str, Any] = self.state[param]
        return cast

    # -- what all of them do ----------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; options that it lacks are the optimizer's.

        Raises:
            ValueError: if an option is out of its range, or a parameter does not fit it.
        """
        super().add_param_group(param_group)
        try:
            self._require_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict()``; a state of a parameter's shape must be cut as the parameter.

        Raises:
            ValueError: if it is of another optimizer, or cut otherwise. In that case no state
                changes.
        """
        require_own_state(self, state_dict, self._shapes_of)
        super().load_state_dict(state_dict)
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for key, param in zip(saved["params"], group["params"], strict=True):
                state = state_dict["state"].get(key)
                if state:
                    self.state[param] = self._loaded(group, param, state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient; every rank of their meshes calls it.

        Args:
            closure: computes the loss and its gradients again.

        Returns:
            The result of the closure, or None.

        Raises:
            RuntimeError: before anything is sent or changed, if a gradient or a state is cut
                otherwise than its parameter, or a state is of other options.
            RankMismatchError: on every rank, before anything is sent, if ranks have gradients of
                different parameters, or any rank found an error.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._change(self._found())
        return loss

    @untraced
    def _found(self) -> list[list[Stepped]]:
        """Return the parameters that have a gradient, by group, once all ranks agree on them."""
        found: list[list[Stepped]] = []
        error: RuntimeError | None = None
        first = 0
        try:
            for group in self.param_groups:
                found.append(stepped_in(self, group, first))
                first += len(group["params"])
                for each in found[-1]:
                    self._require_fits(each)
        except RuntimeError as raised:
            error = raised
        meshes = {
            spec_of(param).mesh: None
            for group in self.param_groups
            for param in group["params"]
            if isinstance(param, DTensor)
        }
        lines: dict[DeviceMesh, list[str]] = {}
        for each in (each for stepped in found for each in stepped):
            if each.spec is not None:
                lines.setdefault(each.spec.mesh, []).append(self._described(each))
        require_agreement(meshes, lines, "" if error is None else str(error))
        if error is not None:
            raise error
        return found
