"""Which modules of a model are wrapped on their own: the names of ``torch.distributed.fsdp.wrap``.

Owns the policies that an ``auto_wrap_policy`` may be, and ``wrap`` under ``enable_wrap``. The walk
over a model that asks a policy is ``auto_wrap``'s affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

from torch import nn

from fullshard.policies import ClassWrap
from fullshard.wrappers.enabled import Enabled, enabled, enabling

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Return True: every module that has a forward is wrapped."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """Return ``lambda_fn(module)``; always True if ``recurse``."""
    return True if recurse else lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: set[type[nn.Module]],
) -> bool:
    """Return whether ``module`` is of the classes; always True for whether to look below it."""
    return True if recurse else isinstance(module, tuple(transformer_layer_cls))


class _SizeBasedPolicy(Protocol):
    """``size_based_auto_wrap_policy``: a function with two attributes, its defaults.

    Attributes:
        FORCE_LEAF_MODULES: classes not to look below.
        EXCLUDE_WRAP_MODULES: classes not to wrap: the containers without a forward.
    """

    FORCE_LEAF_MODULES: set[type[nn.Module]]
    EXCLUDE_WRAP_MODULES: set[type[nn.Module]]

    def __call__(
        self,
        module: nn.Module,
        recurse: bool,
        nonwrapped_numel: int,
        min_num_params: int = ...,
        force_leaf_modules: set[type[nn.Module]] | None = None,
        exclude_wrap_modules: set[type[nn.Module]] | None = None,
    ) -> bool:
        """Return whether ``module`` is large enough."""
        ...


def _with_defaults(policy: Callable[..., bool]) -> _SizeBasedPolicy:
    """Give the function its attributes; who changes one changes the default."""
    made = cast(_SizeBasedPolicy, policy)
    made.FORCE_LEAF_MODULES = {nn.MultiheadAttention}
    made.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}
    return made


@_with_defaults
def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Return whether ``module`` is large enough to be wrapped, or to look below it.

    Args:
        module: the module in question.
        recurse: whether it is about looking below it.
        nonwrapped_numel: elements of its parameters that are in no instance yet.
        min_num_params: that many make an instance.
        force_leaf_modules: classes not to look below; None: those of the function's attribute
            ``FORCE_LEAF_MODULES``, at first ``nn.MultiheadAttention``.
        exclude_wrap_modules: classes not to wrap; None: those of its attribute
            ``EXCLUDE_WRAP_MODULES``, at first the containers without a forward.
    """
    defaults = size_based_auto_wrap_policy
    kept = force_leaf_modules if recurse else exclude_wrap_modules
    if kept is None:
        kept = defaults.FORCE_LEAF_MODULES if recurse else defaults.EXCLUDE_WRAP_MODULES
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(kept))


class ModuleWrapPolicy:
    """Wraps the modules of given classes, with the root's arguments."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        """Take the classes.

        Raises:
            TypeError: if one is not a module class.
            ValueError: if there is none.
        """
        self._choice = ClassWrap(tuple(module_classes))

    def overrides_for(self, module: nn.Module) -> dict[str, Any] | None:
        """Return the arguments that differ from the root's; None for a module not to wrap."""
        return {} if self._choice.selects("", module, 0) else None

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """Return whether to wrap ``module``, as a policy that is a function."""
        return recurse or self._choice.selects("", module, 0)

    def __repr__(self) -> str:
        """Show the classes."""
        return f"ModuleWrapPolicy({{{', '.join(each.__name__ for each in self._choice.classes)}}})"


class CustomPolicy:
    """Wraps the modules that a function chooses, with the arguments that the function returns."""

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        """Take the function.

        Args:
            lambda_fn: returns, for a module, False or an empty dict not to wrap it, True to wrap it
                with the root's arguments, or a dict of arguments that override those.
        """
        self._lambda_fn = lambda_fn

    def overrides_for(self, module: nn.Module) -> dict[str, Any] | None:
        """Return the arguments that differ from the root's; None for a module not to wrap.

        Raises:
            ValueError: if the function returned neither a bool nor a dict.
        """
        said = self._lambda_fn(module)
        if not isinstance(said, (bool, dict)):
            raise ValueError(
                f"the function of CustomPolicy returned {said!r} for {type(module).__name__}; "
                "return False, True or a dict of arguments"
            )
        if not said:
            return None
        return said if isinstance(said, dict) else {}


@contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """Make ``wrap`` wrap inside a ``with`` block.

    Blocks may be nested; the innermost counts.

    Args:
        wrapper_cls: the class to wrap in: ``FullyShardedDataParallel``.
        **wrapper_kwargs: its arguments.
    """
    with enabling(Enabled(wrapper_cls=wrapper_cls, arguments=wrapper_kwargs)):
        yield


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap ``module`` with the arguments of ``enable_wrap``; outside of it, return ``module``.

    Args:
        module: the module.
        **wrap_overrides: arguments that override those of ``enable_wrap``.
    """
    given = enabled()
    if given is None:
        return module
    return given.wrapper_cls(module, **{**given.arguments, **wrap_overrides})
