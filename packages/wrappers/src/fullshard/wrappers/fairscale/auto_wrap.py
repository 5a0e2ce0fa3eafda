"""FairScale's ways to wrap parts of a model: ``enable_wrap``, ``wrap`` and ``auto_wrap``.

Owns the walk that wraps children before their parents, and the policies that it may ask: by size,
and by the ``wrapper_config`` that a user put on a module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from fullshard.wrappers.enabled import Enabled, enabled, enabling
from fullshard.wrappers.fairscale.fully_sharded_data_parallel import FullyShardedDataParallel

__all__ = [
    "auto_wrap",
    "auto_wrap_bn",
    "config_auto_wrap_policy",
    "default_auto_wrap_policy",
    "enable_wrap",
    "wrap",
]

Policy = Callable[..., bool]


_CONFIG = "wrapper_config"  # the attribute of a module, by FairScale's name


def default_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    module_is_root: bool = False,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
    skip_params_check_for_root: bool = False,
) -> bool:
    """Return whether ``module`` is large enough to be wrapped, or to look below it.

    Its attributes ``FORCE_LEAF_MODULES`` and ``EXCLUDE_WRAP_MODULES`` are the defaults of two
    arguments; change them for all calls.

    Args:
        module: the module in question.
        recurse: whether it is about looking below it.
        unwrapped_params: elements of its parameters that are in no wrapper yet.
        module_is_root: whether it is what ``auto_wrap`` was given.
        min_num_params: that many make a wrapper.
        force_leaf_modules: classes not to look below; None: ``nn.MultiheadAttention``.
        exclude_wrap_modules: classes not to wrap; None: the containers without a forward.
        skip_params_check_for_root: wrap the root whatever its size.
    """
    said = default_auto_wrap_policy
    is_large = unwrapped_params >= min_num_params
    if recurse:
        kept = said.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules  # type: ignore[attr-defined]
        return is_large and not isinstance(module, tuple(kept))
    kept = said.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules  # type: ignore[attr-defined]
    is_large = is_large or (module_is_root and skip_params_check_for_root)
    return is_large and not isinstance(module, tuple(kept))


# FairScale's users add their classes to these
default_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]
default_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]


def config_auto_wrap_policy(
    module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool = False
) -> bool:
    """Return whether ``module`` has a ``wrapper_config``; always True for looking below it."""
    return recurse or hasattr(module, _CONFIG)


@contextmanager
def enable_wrap(
    auto_wrap_policy: Policy | None = None,
    *,
    wrapper_cls: Callable[..., nn.Module] = FullyShardedDataParallel,
    **wrapper_kwargs: Any,
) -> Iterator[None]:
    """Make ``wrap`` and ``auto_wrap`` wrap inside a ``with`` block.

    Blocks may be nested; the innermost counts.

    Args:
        auto_wrap_policy: what ``auto_wrap`` asks; None: ``default_auto_wrap_policy``.
        wrapper_cls: the class to wrap in.
        **wrapper_kwargs: its arguments.
    """
    given = Enabled(wrapper_cls=wrapper_cls, arguments=wrapper_kwargs, policy=auto_wrap_policy)
    with enabling(given):
        yield


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap ``module`` with the arguments of ``enable_wrap``; outside of it, return ``module``.

    Args:
        module: the module; arguments in its ``wrapper_config`` override those of ``enable_wrap``.
        **wrap_overrides: arguments that override both.
    """
    given = enabled()
    if given is None:
        return module
    own = getattr(module, _CONFIG, {})
    return given.wrapper_cls(module, **{**given.arguments, **own, **wrap_overrides})


def auto_wrap(
    module: nn.Module, auto_wrap_policy: Policy | None = None, **kwargs: Any
) -> nn.Module:
    """Return ``module`` after wrapping what a policy chooses of it, perhaps itself.

    Outside of ``enable_wrap`` the module is returned as it is.

    Args:
        module: the module; children are replaced in it.
        auto_wrap_policy: a function of ``module``, ``recurse``, ``unwrapped_params`` and
            ``module_is_root``; None: that of ``enable_wrap``, or ``default_auto_wrap_policy``.
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
    return _auto_wrap(module, policy, kwargs, is_root=True)[0]


def _auto_wrap(
    module: nn.Module, policy: Policy, overrides: dict[str, Any], *, is_root: bool
) -> tuple[nn.Module, int]:
    """Return ``module``, wrapped or not, and how many elements are in wrappers now."""
    numel = sum(param.numel() for param in module.parameters())
    if not policy(module=module, recurse=True, unwrapped_params=numel, module_is_root=is_root):
        return module, 0
    wrapped = 0
    for name, child in list(module.named_children()):
        replaced, below = _auto_wrap(child, policy, overrides, is_root=False)
        setattr(module, name, replaced)
        wrapped += below
    left = numel - wrapped
    if policy(module=module, recurse=False, unwrapped_params=left, module_is_root=is_root):
        return wrap(module, **overrides), numel
    return module, wrapped


def auto_wrap_bn(
    module: nn.Module,
    single_rank_pg: bool = False,
    process_group: dist.ProcessGroup | None = None,
    fsdp_config: dict[str, Any] | None = None,
    wrap_it: bool = True,
    assert_on_collision: bool = True,
) -> nn.Module:
    """Return ``module`` with each batch norm in a wrapper of its own, in full precision.

    Every rank calls it.

    Args:
        module: the module; children are replaced in it.
        single_rank_pg: shard them over no other rank; their gradients are then each rank's own.
        process_group: the ranks that shard them; None: all.
        fsdp_config: the wrappers' arguments; None: full precision, kept after forward, no bucket.
        wrap_it: False: only put their ``wrapper_config`` on them, for ``config_auto_wrap_policy``.
        assert_on_collision: refuse batch norms that have one.

    Raises:
        ValueError: if one has a ``wrapper_config`` already.
    """
    if single_rank_pg:
        process_group, _ = dist.new_subgroups(1)
    config = {
        "process_group": process_group,
        "mixed_precision": False,
        "flatten_parameters": False,
        "reshard_after_forward": False,
        "bucket_cap_mb": 0,
        "force_input_to_fp32": False,
    }
    for name, each in module.named_modules():
        if isinstance(each, nn.modules.batchnorm._BatchNorm):
            if assert_on_collision and hasattr(each, _CONFIG):
                raise ValueError(
                    f"{name or 'the module'} has a wrapper_config; tag a module once, or pass "
                    "assert_on_collision=False"
                )
            setattr(each, _CONFIG, config if fsdp_config is None else fsdp_config)
    if not wrap_it:
        return auto_wrap(module)
    with enable_wrap(config_auto_wrap_policy):
        return auto_wrap(module)
