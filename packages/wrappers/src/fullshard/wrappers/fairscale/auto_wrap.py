"""FairScale's ways to wrap parts of a model: ``enable_wrap``, ``wrap`` and ``auto_wrap``.

Owns the walk that wraps large children before their parents. ``wrap`` and the policy by size are
FSDP1's, too: ``fullshard.wrappers.wrap`` defines them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fullshard.wrappers.enabled import Enabled, enabled, enabling
from fullshard.wrappers.fairscale.fully_sharded_data_parallel import FullyShardedDataParallel
from fullshard.wrappers.wrap import size_based_auto_wrap_policy, wrap

__all__ = ["auto_wrap", "default_auto_wrap_policy", "enable_wrap", "wrap"]

Policy = Callable[..., bool]


def default_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Returns whether ``module`` is large enough to be wrapped, or to look below it.

    Args:
        module: the module in question.
        recurse: whether it is about looking below it.
        unwrapped_params: elements of its parameters that are in no wrapper yet.
        min_num_params: that many make a wrapper.
        force_leaf_modules: classes not to look below; None: ``nn.MultiheadAttention``.
        exclude_wrap_modules: classes not to wrap; None: the containers without a forward.
    """
    return size_based_auto_wrap_policy(
        module,
        recurse,
        unwrapped_params,
        min_num_params,
        force_leaf_modules,
        exclude_wrap_modules,
    )


@contextmanager
def enable_wrap(
    auto_wrap_policy: Policy | None = None,
    *,
    wrapper_cls: Callable[..., nn.Module] = FullyShardedDataParallel,
    **wrapper_kwargs: Any,
) -> Iterator[None]:
    """Makes ``wrap`` and ``auto_wrap`` wrap inside a ``with`` block.

    Blocks may be nested; the innermost counts.

    Args:
        auto_wrap_policy: what ``auto_wrap`` asks; None: ``default_auto_wrap_policy``.
        wrapper_cls: the class to wrap in.
        **wrapper_kwargs: its arguments.
    """
    given = Enabled(wrapper_cls=wrapper_cls, arguments=wrapper_kwargs, policy=auto_wrap_policy)
    with enabling(given):
        yield


def auto_wrap(
    module: nn.Module, auto_wrap_policy: Policy | None = None, **kwargs: Any
) -> nn.Module:
    """Returns ``module`` after wrapping what a policy chooses of it, perhaps itself.

    Outside of ``enable_wrap`` the module is returned as it is.

    Args:
        module: the module; children are replaced in it.
        auto_wrap_policy: a function of ``module``, ``recurse`` and ``unwrapped_params``; None: that
            of ``enable_wrap``, or ``default_auto_wrap_policy``.
        **kwargs: arguments that override those of ``enable_wrap``.

    Raises:
        ValueError: if a part of the module is wrapped already.
    """
    given = enabled()
    if given is None:
        return module
    for name, each in module.named_modules():
        if isinstance(each, FullyShardedDataParallel):
            raise ValueError(f"{name or 'the module'} is wrapped already; auto_wrap wraps it once")
    policy = auto_wrap_policy or given.policy or default_auto_wrap_policy
    return _auto_wrap(module, policy, kwargs)[0]


def _auto_wrap(
    module: nn.Module, policy: Policy, overrides: dict[str, Any]
) -> tuple[nn.Module, int]:
    """Returns ``module``, wrapped or not, and how many elements are in wrappers now."""
    numel = sum(param.numel() for param in module.parameters())
    if not policy(module=module, recurse=True, unwrapped_params=numel):
        return module, 0
    wrapped = 0
    for name, child in list(module.named_children()):
        replaced, below = _auto_wrap(child, policy, overrides)
        setattr(module, name, replaced)
        wrapped += below
    if policy(module=module, recurse=False, unwrapped_params=numel - wrapped):
        return wrap(module, **overrides), numel
    return module, wrapped
