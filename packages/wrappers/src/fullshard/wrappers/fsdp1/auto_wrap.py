"""The walk over a model that asks an ``auto_wrap_policy`` and wraps children before parents.

Defines the order, the modules to skip (ignored modules, wrapped modules, containers without a
forward), and the modules kept in full precision. A given function wraps each module.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import nn

from fullshard.sharding import FSDPModule, torchs_class
from fullshard.wrappers.compat import function_of_policy
from fullshard.wrappers.fsdp1.settings import FullPrecisionInside, MixedPrecision
from fullshard.wrappers.ignored_states import Ignored, is_wrapper
from fullshard.wrappers.wrap import CustomPolicy

__all__ = ["AutoWrap"]

_WHERE = ("process_group", "device_mesh")  # overriding one name removes the other


@runtime_checkable
class _Chooser(Protocol):
    """A policy that is asked once per module, and may give arguments."""

    def overrides_for(self, module: nn.Module) -> dict[str, Any] | None:
        """Return the arguments that differ from the root's; None for a module not to wrap."""
        ...


@dataclass(frozen=True, kw_only=True)
class AutoWrap:
    """A walk that wraps all modules that a policy chooses under a root.

    Attributes:
        policy: a function of ``module``, ``recurse`` and ``nonwrapped_numel``, or a policy object.
        wrapper: wraps a module, given arguments.
        arguments: the root's.
        ignored: what is left alone, and does not count.
    """

    policy: Any
    wrapper: Callable[..., nn.Module]
    arguments: dict[str, Any]
    ignored: Ignored
    _wrapped: dict[nn.Module, nn.Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Take torch's own ``CustomPolicy``, which only its own FSDP1 can ask, by its function."""
        if torchs_class(self.policy) == "CustomPolicy":
            object.__setattr__(self, "policy", CustomPolicy(function_of_policy(self.policy)))

    def run(self, root: nn.Module) -> None:
        """Replace the chosen modules under ``root`` by wrapped ones; not ``root`` itself.

        Raises:
            TypeError: if the policy cannot be called.
            ValueError: what the constructor raises.
        """
        if not isinstance(self.policy, _Chooser) and not callable(self.policy):
            raise TypeError(
                f"auto_wrap_policy is {self.policy!r}; pass a policy of fullshard.wrappers.wrap, "
                "or a function of module, recurse and nonwrapped_numel"
            )
        self._warn_of_full_precision(root)
        if isinstance(self.policy, _Chooser):
            self._choose_below(root, self.policy, {root})
        elif self._asks(root, recurse=True, numel=self._numel(root)):
            self._count_below(root)
        else:
            self._keep_precision_below(root, {root})

    # -- policies that are asked once per module --------------------------------------------------

    def _choose_below(self, parent: nn.Module, policy: _Chooser, seen: set[nn.Module]) -> None:
        for name, child in self._children(parent):
            if child in seen:
                self._replace(parent, name, child)
                continue
            seen.add(child)
            self._choose_below(child, policy, seen)
            overrides = policy.overrides_for(child)
            if overrides is not None or self._is_kept(child):
                self._wrap(parent, name, child, overrides or {})

    # -- policies that count elements -------------------------------------------------------------

    def _asks(self, module: nn.Module, *, recurse: bool, numel: int) -> bool:
        return bool(self.policy(module=module, recurse=recurse, nonwrapped_numel=numel))

    def _count_below(self, parent: nn.Module) -> int:
        """Wrap under ``parent``; return how many elements are wrapped."""
        return sum(self._count(parent, name, child) for name, child in self._children(parent))

    def _count(self, parent: nn.Module, name: str, child: nn.Module) -> int:
        numel = self._numel(child)
        if child in self._wrapped:
            self._replace(parent, name, child)
            return numel
        below = 0
        if self._asks(child, recurse=True, numel=numel):
            below = self._count_below(child)
            if self._asks(child, recurse=False, numel=numel - below):
                return numel if self._wrap(parent, name, child, {}) else below
        if self._is_kept(child):
            return numel if self._wrap(parent, name, child, {}) else below
        if not below:
            self._keep_precision_below(child, {child})
        return below

    def _keep_precision_below(self, parent: nn.Module, seen: set[nn.Module]) -> None:
        """Wrap what is kept in full precision where the policy does not look."""
        for name, child in self._children(parent):
            if child in seen:
                continue
            seen.add(child)
            self._keep_precision_below(child, seen)
            if self._is_kept(child):
                self._wrap(parent, name, child, {})

    def _numel(self, module: nn.Module) -> int:
        """Return how many elements under ``module`` are in no instance made before this walk."""
        skipped = {id(param) for param in self.ignored.params}
        for sub in module.modules():
            if isinstance(sub, FSDPModule):
                skipped.update(id(param) for param in sub.parameters())
        return sum(p.numel() for p in module.parameters() if id(p) not in skipped)

    # -- both -------------------------------------------------------------------------------------

    def _children(self, parent: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield the children that may be wrapped; a module held twice comes twice."""
        for name, child in list(parent._modules.items()):
            if child is None or child in self.ignored.modules:
                continue
            if isinstance(child, FSDPModule) and child not in self._wrapped:
                continue
            if not is_wrapper(child):
                yield name, child

    def _is_kept(self, module: nn.Module) -> bool:
        """Return whether a module stays in full precision, and so is always wrapped."""
        precision = self._precision
        return precision is not None and isinstance(module, precision.classes_to_ignore)

    @property
    def _precision(self) -> MixedPrecision | None:
        return self.arguments.get("mixed_precision")

    def _wrap(
        self, parent: nn.Module, name: str, child: nn.Module, overrides: dict[str, Any]
    ) -> bool:
        """Put a wrapped ``child`` into its place; False for a container without a forward."""
        if type(child).forward is nn.Module.forward:
            return False
        arguments = {**self.arguments, **overrides}
        if "process_group" in overrides or "device_mesh" in overrides:
            arguments.update({key: overrides.get(key) for key in _WHERE})
        if self._precision is not None and self._is_kept(child):
            around = self._precision.param_dtype
            arguments["mixed_precision"] = FullPrecisionInside(output_dtype=around)
        self._wrapped[child] = self.wrapper(child, **arguments)
        setattr(parent, name, self._wrapped[child])
        return True

    def _replace(self, parent: nn.Module, name: str, child: nn.Module) -> None:
        if child in self._wrapped:
            setattr(parent, name, self._wrapped[child])

    def _warn_of_full_precision(self, root: nn.Module) -> None:
        kept = {type(m).__name__ for m in root.modules() if m is not root and self._is_kept(m)}
        if kept:
            warnings.warn(
                f"mixed_precision and auto_wrap_policy are both given, and the model holds modules "
                f"of {', '.join(sorted(kept))}: each is wrapped on its own and computes in full "
                "precision; pass _module_classes_to_ignore=() to MixedPrecision to have them in "
                "low precision",
                UserWarning,
                stacklevel=4,
            )
