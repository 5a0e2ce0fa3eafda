"""Names and ids of parameters in an optimizer's state dict.

Owns the clean name of each parameter of a model, which parameters an optimizer holds in which
groups, and the way between state dicts that speak of ids and those that speak of names. It reads no
tensor.

[Note: clean names] A wrapper puts a segment of its own into the names of what it wraps. Without
those segments a name is the unwrapped model's, so a state saved from one wrapping fits any other. A
tied parameter goes by its first name; it is found by any. A parameter that is unsharded now, or
that ``fully_shard`` replaced, stands for the sharded one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from fullshard.sharding.params.owner import owner_of

__all__ = [
    "OptimInput",
    "OptimLayout",
    "ParamNames",
    "by_key",
    "by_name",
    "clean_name",
    "layout_of",
]

_SEGMENTS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})

OptimInput = Iterable[Any] | None
"""What an optimizer was built with: parameters, or groups of them."""


def clean_name(name: str) -> str:
    """Returns ``name`` without the segments of wrappers; see [Note: clean names]."""
    return ".".join(part for part in name.split(".") if part not in _SEGMENTS)


class ParamNames:
    """The parameters of a model by their clean names.

    Attributes:
        params: each name, aliases of tied parameters too, and the parameter as an optimizer holds
            it.
        names: each parameter's first name.
    """

    def __init__(self, model: nn.Module) -> None:
        """Walks over the model; an override of ``named_parameters`` is not asked."""
        self.params: dict[str, torch.Tensor] = {}
        self.names: dict[torch.Tensor, str] = {}
        for name, param in nn.Module.named_parameters(model, remove_duplicate=False):
            held = _held(param)
            clean = clean_name(name)
            self.params[clean] = held
            self.names.setdefault(held, clean)

    def name_of(self, param: torch.Tensor, where: str) -> str:
        """Returns the first name of ``param``.

        Raises:
            ValueError: if it is not the model's, saying ``where`` it was found.
        """
        name = self.names.get(_held(param))
        if name is None:
            raise ValueError(
                f"{where} is a parameter of shape {tuple(param.shape)} that the model does not "
                "have; pass the model whose parameters the optimizer was built with"
            )
        return name

    def first_name(self, name: str) -> str | None:
        """Returns the first name of the parameter that is called ``name``; None if none is."""
        param = self.params.get(clean_name(name))
        return None if param is None else self.names[param]


def _held(param: torch.Tensor) -> torch.Tensor:
    owner = owner_of(param)
    return param if owner is None else owner.param.sharded


@dataclass(frozen=True)
class OptimLayout:
    """Which parameters are in which group.

    Attributes:
        groups: the names in each group; the position of a name in all of them is its id.
        grouped: whether these are the optimizer's own groups, or only the order of its ids.
        outside: parameters that are not sharded, of a model of which others are; a state dict may
            lack them, as they may be somebody else's affair.
    """

    groups: tuple[tuple[str, ...], ...]
    grouped: bool
    outside: frozenset[str] = frozenset()

    @property
    def order(self) -> tuple[str, ...]:
        """All names by id."""
        return tuple(name for group in self.groups for name in group)


def layout_of(
    names: ParamNames, optim: Optimizer | None, optim_input: OptimInput = None
) -> OptimLayout:
    """Returns the layout of what an optimizer was built with, of ``optim``, or of all parameters.

    In this order: the first that came counts.

    Raises:
        TypeError: if ``optim_input`` holds neither parameters nor groups.
        ValueError: if ``optim_input`` is empty, or a parameter is not the model's.
    """
    if optim is not None and optim_input is None:
        return _layout(names, [group["params"] for group in optim.param_groups], "the optimizer")
    if optim_input is None:
        return OptimLayout((tuple(names.names.values()),), grouped=False)
    if not isinstance(optim_input, Iterable):
        raise TypeError(
            f"optim_input is a {type(optim_input).__name__}; pass what the optimizer was built "
            "with: parameters or a list of groups"
        )
    given = list(optim_input)
    if not given:
        raise ValueError("optim_input is empty; pass what the optimizer was built with")
    if all(isinstance(each, torch.Tensor) for each in given):
        return _layout(names, [given], "optim_input")
    if not all(isinstance(each, dict) and "params" in each for each in given):
        raise TypeError(
            "optim_input mixes parameters and groups, or a group lacks 'params'; pass what the "
            "optimizer was built with: parameters or a list of groups"
        )
    groups = [each["params"] for each in given]
    return _layout(
        names, [[g] if isinstance(g, torch.Tensor) else g for g in groups], "optim_input"
    )


def _layout(names: ParamNames, groups: Sequence[Iterable[Any]], what: str) -> OptimLayout:
    sharded = {name for param, name in names.names.items() if owner_of(param) is not None}
    return OptimLayout(
        tuple(
            tuple(names.name_of(param, f"in group {index} of {what} there") for param in group)
            for index, group in enumerate(groups)
        ),
        grouped=True,
        outside=frozenset(names.names.values()) - sharded if sharded else frozenset(),
    )


# -- from ids to names ----------------------------------------------------------------------------


def by_name(
    state_dict: Mapping[str, Any], names: ParamNames, layout: OptimLayout
) -> dict[str, Any]:
    """Returns ``state_dict`` with first clean names as keys; the states are the same objects.

    Keys that stand for no parameter stay: they are the user's.

    Raises:
        TypeError: if it is no optimizer's state dict.
        ValueError: if it has an id that the layout lacks.
    """
    if not isinstance(state_dict, Mapping) or "state" not in state_dict:
        raise TypeError(
            f"the optimizer's state dict is a {type(state_dict).__name__} without 'state'; pass "
            "what optim.state_dict() or optim_state_dict() gave"
        )
    table = _Table(names, layout)
    named = {**state_dict, "state": {table.of(k): v for k, v in state_dict["state"].items()}}
    if "param_groups" in state_dict:
        named["param_groups"] = [
            _renamed(group, [table.of(key) for key in group["params"]])
            for group in state_dict["param_groups"]
        ]
    return named


class _Table:
    def __init__(self, names: ParamNames, layout: OptimLayout) -> None:
        self._names, self._order = names, layout.order

    def of(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._names.first_name(key) or key
        if not isinstance(key, int):
            return key
        if not 0 <= key < len(self._order):
            raise ValueError(
                f"the optimizer's state dict has id {key}, and the optimizer has "
                f"{len(self._order)} parameters; pass the optimizer whose state it is, or a state "
                "dict with names for keys"
            )
        return self._order[key]


def _renamed(group: Mapping[str, Any], params: list[Any]) -> dict[str, Any]:
    renamed = {**group, "params": params}
    if "param_names" in group:
        renamed["param_names"] = [clean_name(str(name)) for name in group["param_names"]]
    return renamed


# -- from names to ids ----------------------------------------------------------------------------


def by_key(
    named: Mapping[str, Any], layout: OptimLayout, keys: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns ``named`` as the optimizer of ``layout`` loads it.

    Args:
        named: with first clean names as keys.
        layout: the optimizer's.
        keys: by what the optimizer calls each name: an id, or a name.

    Raises:
        ValueError: if ``named`` has parameters that the optimizer lacks, lacks some of its that are
            not outside, or has different options for parameters that are in one group.
    """
    state = named["state"]
    keyed = {**named, "state": {keys.get(name, name): value for name, value in state.items()}}
    if "param_groups" not in named:
        return keyed
    saved = named["param_groups"]
    unknown = [name for group in saved for name in group["params"] if name not in keys]
    if unknown:
        raise ValueError(
            f"the state dict has {_some(unknown)}, which the optimizer lacks; load it into an "
            "optimizer over the same parameters"
        )
    if layout.grouped:
        keyed["param_groups"] = _regrouped(saved, layout, keys)
    else:
        keyed["param_groups"] = [_in_order(group, keys) for group in saved]
    return keyed


def _in_order(group: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group with keys for names, in the order of an optimizer's."""
    order = sorted(range(len(group["params"])), key=lambda at: keys[group["params"][at]])
    ordered = {**group, "params": [keys[group["params"][at]] for at in order]}
    if "param_names" in group:
        ordered["param_names"] = [group["param_names"][at] for at in order]
    return ordered


def _regrouped(
    saved: Sequence[Mapping[str, Any]], layout: OptimLayout, keys: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Returns the optimizer's groups, with the options that their parameters were saved with.

    So groups may come in another order, and be split or joined. Of parameters outside that were not
    saved the ids are left out, as torch does: whoever manages them adds their state.
    """
    home = {name: group for group in saved for name in group["params"]}
    left_out = {name for name in layout.outside if name not in home}
    missing = [name for name in layout.order if name not in home and name not in left_out]
    if missing:
        raise ValueError(
            f"the optimizer has {_some(missing)}, which the state dict lacks; load a state dict of "
            "an optimizer over the same parameters"
        )
    groups = []
    for index, all_members in enumerate(layout.groups):
        members = [name for name in all_members if name not in left_out]
        if all_members and not members:
            continue
        found = [home[name] for name in members] or list(saved[index : index + 1])
        options = [_options(group) for group in found]
        if any(each != options[0] for each in options):
            raise ValueError(
                f"group {index} of the optimizer holds {_some(members)}, which were saved with "
                "different options; build the optimizer with groups that keep those apart"
            )
        groups.append({**(options[0] if options else {}), "params": [keys[n] for n in members]})
    return groups


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
