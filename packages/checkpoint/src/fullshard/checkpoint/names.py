"""Names and ids of parameters in an optimizer's state dict.

Owns the clean name of each parameter of a model, which parameters an optimizer holds in which
groups, and the way between state dicts that speak of ids and those that speak of names. This module
reads no tensor.

[Note: clean names] A wrapper puts its own segment into the names of the modules that it wraps.
Without those segments a name is the unwrapped model's, so a state saved from one wrapping fits any
other. A tied parameter goes by its first name; it is found by any. A parameter that is unsharded
now, or that ``fully_shard`` replaced, stands for the sharded one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from fullshard.sharding import rebind_optimizer
from fullshard.sharding.spi import owner_of, sharded_of

__all__ = ["OptimInput", "ParamNames", "StateDict", "clean_name"]

_SEGMENTS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
_NAMES = ("params", "param_names")  # keys of a state dict's group that describe its parameters

StateDict = dict[str, Any]

OptimInput = Iterable[Any] | None
"""What an optimizer was built with: parameters, or groups of them."""


def clean_name(name: str) -> str:
    """Return ``name`` without the segments of wrappers; see [Note: clean names]."""
    return ".".join(part for part in name.split(".") if part not in _SEGMENTS)


class ParamNames:
    """The parameters of a model by their clean names, and the optimizer that has them.

    Attributes:
        params: each parameter, as an optimizer holds it, by its first name.
        optim: the optimizer, where there is one.
    """

    def __init__(
        self, model: nn.Module, optim: Optimizer | None, optim_input: OptimInput = None
    ) -> None:
        """Walks over the model; an override of ``named_parameters`` is not asked."""
        self.optim = optim
        self._input = optim_input
        self._first: dict[torch.Tensor, str] = {}
        self._first_of: dict[str, str] = {}  # tied parameters have several names
        for name, param in nn.Module.named_parameters(model, remove_duplicate=False):
            first = self._first.setdefault(sharded_of(param), clean_name(name))
            self._first_of[clean_name(name)] = first
        self.params = {name: param for param, name in self._first.items()}

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...] | None:
        """The names in each group of the optimizer; None if it is not known.

        The names come from the constructor's arguments or from the optimizer: the first that came
        counts. The optimizer lets go of replaced parameters.

        Raises:
            TypeError: if the constructor's arguments contain an object that is not a parameter.
            ValueError: if that is empty, or a parameter is not the model's.
        """
        if self.optim is not None:
            rebind_optimizer(self.optim)
        optim, what = self.optim, "the optimizer"
        if self._input is not None:  # an optimizer of torch knows how to read it
            optim, what = torch.optim.SGD(_copied(self._input)), "optim_input"
        if optim is None:
            return None
        for index, group in enumerate(optim.param_groups):
            for param in group["params"]:
                if sharded_of(param) not in self._first:
                    raise ValueError(
                        f"in group {index} of {what} there is a parameter of shape "
                        f"{tuple(param.shape)} that the model does not have; pass the model whose "
                        "parameters the optimizer was built with"
                    )
        held = [map(sharded_of, group["params"]) for group in optim.param_groups]
        return tuple(tuple(self._first[param] for param in params) for params in held)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Return all names by id: those of the groups, or of the model."""
        return tuple(self.params if self.groups is None else itertools.chain(*self.groups))

    def by_name(self, state_dict: Mapping[str, Any]) -> StateDict:
        """Return ``state_dict`` with first clean names as keys; the states are the same objects.

        Keys that stand for no parameter stay: they are the user's.

        Raises:
            TypeError: if it is no optimizer's state dict.
            ValueError: if it has an id that the optimizer lacks.
        """
        if not isinstance(state_dict, Mapping) or "state" not in state_dict:
            raise TypeError(
                f"the optimizer's state dict is a {type(state_dict).__name__} without 'state'; "
                "pass what optim.state_dict() or optim_state_dict() gave"
            )
        return _renamed(state_dict, self._name)

    def _name(self, key: Any) -> Any:
        if isinstance(key, str):  # the user's own, if no parameter is called that
            return self._first_of.get(clean_name(key), key)
        if not isinstance(key, int):
            return key
        if not 0 <= key < len(self.order):
            raise ValueError(
                f"the optimizer's state dict has id {key}, and the optimizer has "
                f"{len(self.order)} parameters; pass the optimizer whose state it is, or a state "
                "dict with names for keys"
            )
        return self.order[key]

    def by_key(self, named: StateDict, own: Mapping[str, Any] | None = None) -> StateDict:
        """Return ``named`` as the optimizer loads it.

        Args:
            named: with first clean names as keys.
            own: the optimizer's own state dict, whose keys are used; None: ids.

        Raises:
            ValueError: if ``named`` has parameters that the optimizer lacks, or lacks parameters of
                the optimizer other than those outside, or has different options in a group.
        """
        ids = (
            [range(len(self.order))] if own is None else [g["params"] for g in own["param_groups"]]
        )
        keys = {self._name(key): key for key in itertools.chain(*ids)}
        saved = named.get("param_groups", ())
        said = [name for name in named["state"] if name in self.params]
        said += [name for group in saved for name in group["params"]]
        unknown = [name for name in dict.fromkeys(said) if name not in keys]
        _require_none(unknown, "the state dict has state for {}, which the optimizer lacks")
        if "param_groups" in named:
            named = {**named, "param_groups": [*self._regrouped(saved)]}
        return _renamed(named, lambda name: keys.get(name, name))

    def _regrouped(self, saved: Sequence[Mapping[str, Any]]) -> Iterator[StateDict]:
        """Yield the optimizer's groups, with the options that their parameters were saved with.

        So groups may come in another order, and be split or joined. Where others are sharded,
        parameters that are not, and were not saved, are left out, as torch does: the code that
        manages them adds their state. If the optimizer is not known, groups are those that were
        saved.
        """
        home = {name: group for group in saved for name in group["params"]}
        groups = self.groups
        if groups is None:
            groups = tuple(tuple(n for n in self.order if home.get(n) is each) for each in saved)
        sharded = {name for name, param in self.params.items() if owner_of(param) is not None}
        needed = [name for group in groups for name in group if name in sharded or not sharded]
        missing = [name for name in needed if name not in home]
        _require_none(missing, "the optimizer has {}, which the state dict lacks")
        for index, group in enumerate(groups):
            members = [name for name in group if name in home]
            if group and not members:
                continue
            found = [_options(home[name]) for name in members]
            if any(each != found[0] for each in found):
                raise ValueError(
                    f"group {index} of the optimizer holds {_some(members)}, which were saved "
                    "with different options; build the optimizer with groups that keep those apart"
                )
            found += map(_options, saved[index : index + 1])  # of a group without parameters
            yield {**(found[0] if found else {}), "params": members}


def _copied(groups: Iterable[Any]) -> Iterable[Any]:
    """Copy the dicts of ``groups``, since an optimizer adds its options to them."""
    if isinstance(groups, torch.Tensor):
        return groups  # which the optimizer refuses
    return [dict(each) if isinstance(each, dict) else each for each in groups]


def _renamed(state_dict: Mapping[str, Any], rename: Callable[[Any], Any]) -> StateDict:
    renamed = {**state_dict, "state": {rename(k): v for k, v in state_dict["state"].items()}}
    if "param_groups" in state_dict:
        renamed["param_groups"] = [
            {k: [*map(rename, v)] if k in _NAMES else v for k, v in group.items()}
            for group in state_dict["param_groups"]
        ]
    return renamed


def _options(group: Mapping[str, Any]) -> StateDict:
    return {key: value for key, value in group.items() if key not in _NAMES}


def _require_none(names: Sequence[str], said: str) -> None:
    if names:
        same = "save and load with optimizers over the same parameters"
        raise ValueError(f"{said.format(_some(names))}; {same}")


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
