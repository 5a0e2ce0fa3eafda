"""Initial values of sharded parameters: materialised from meta, or broadcast from a rank.

Owns ``param_init_fn`` and ``sync_module_states``. This work is done before a module is sharded, so
that only one instance has whole parameters at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from fullshard.wrappers.fsdp1.mesh import Ranks
from fullshard.wrappers.ignored_states import Ignored, managed_modules

__all__ = ["materialise", "synchronise"]


def materialise(
    module: nn.Module,
    ignored: Ignored,
    param_init_fn: Callable[[nn.Module], None] | None,
    device: torch.device,
) -> None:
    """Give memory and values to what is on the meta device; do nothing if nothing is.

    Args:
        module: the module about to be wrapped.
        ignored: what is left alone.
        param_init_fn: called with ``module`` and each module below it that is in no other instance;
            None: each that holds parameters or buffers is moved with ``to_empty`` and initialised
            by its own ``reset_parameters()``. Parameters tied before stay tied.
        device: where values are made by default.

    Raises:
        TypeError: if ``param_init_fn`` cannot be called.
        ValueError: if a module has no ``reset_parameters()``, or ``param_init_fn`` left parameters
            on the meta device.
    """
    if param_init_fn is not None and not callable(param_init_fn):
        raise TypeError(
            f"param_init_fn is a {type(param_init_fn).__name__}; pass a function of a module"
        )
    modules = list(managed_modules(module, ignored.modules))
    if not _on_meta(modules, ignored):
        return
    if param_init_fn is not None:
        for _, each in modules:
            param_init_fn(each)
        if left := _on_meta(modules, ignored):
            raise ValueError(
                f"{', '.join(left)} are still on the meta device after param_init_fn; it is called "
                "with each module, and must move and initialise that module's own parameters"
            )
        return
    _reset(modules, device)


def _on_meta(modules: list[tuple[str, nn.Module]], ignored: Ignored) -> list[str]:
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in modules
        for name, param in module.named_parameters(recurse=False)
        if param.device.type == "meta" and param not in ignored.params
    ]


@torch.no_grad()
def _reset(modules: list[tuple[str, nn.Module]], device: torch.device) -> None:
    holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for _, module in modules:
        for name, param in module._parameters.items():
            if param is not None:
                holders.setdefault(param, []).append((module, name))
    for prefix, module in modules:
        if not (module._parameters or module._buffers):
            continue
        reset = getattr(module, "reset_parameters", None)
        if not callable(reset):
            raise ValueError(
                f"{prefix or 'the module'}, a {type(module).__name__}, is on the meta device and "
                "has no reset_parameters(); add one, or pass param_init_fn"
            )
        module.to_empty(device=device, recurse=False)
        reset()
    for places in holders.values():
        first, first_name = places[0]
        for module, name in places[1:]:
            module._parameters[name] = first._parameters[first_name]


@torch.no_grad()
def synchronise(module: nn.Module, ignored: Ignored, ranks: Ranks) -> None:
    """Broadcast the first rank's parameters and buffers, except ignored ones.

    Tensors are broadcast one by one, on the computing device. For a ``DTensor``, the ranks with the
    same place in its own mesh exchange their parts.
    """
    skipped = {id(param) for param in ignored.params}
    tensors: dict[int, torch.Tensor] = {}
    for _, each in managed_modules(module, ignored.modules):
        found = [*each.parameters(recurse=False), *each.buffers(recurse=False)]
        kept = [each for t in found if id(t) not in skipped for each in _inner(t)]
        tensors.update((id(t), t) for t in kept)
    for process_group in reversed(
        ranks.process_groups
    ):  # first within a column, then within each row
        source = dist.get_global_rank(process_group, 0)
        for tensor in tensors.values():
            sent = tensor.detach().to(ranks.device).contiguous()
            dist.broadcast(sent, src=source, group=process_group)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(sent)


def _inner(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that a tensor subclass is made of; ``tensor`` if it is plain."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    names, _ = flatten()
    parts = [getattr(tensor, name) for name in names]  # a mesh may be among them
    return [each for part in parts if isinstance(part, torch.Tensor) for each in _inner(part)]
