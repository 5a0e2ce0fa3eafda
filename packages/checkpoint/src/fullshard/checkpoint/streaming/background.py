"""Threads that send weights during training: their process group, order and preconditions.

Owns the agreement on the process group, over the meshes of the model, and that works on one process
group run one after another.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.agreement import format_error, settle
from fullshard.checkpoint.process_groups import own_group
from fullshard.sharding.spi import Comparison, device_of_mesh, group_of, in_block

__all__ = ["check_params", "group_for", "start_after"]

_last: weakref.WeakKeyDictionary[dist.ProcessGroup, threading.Thread] = weakref.WeakKeyDictionary()


def start_after(
    run: Callable[[], None],
    process_group: dist.ProcessGroup | None,
    end: Callable[[BaseException | None], None],
) -> threading.Thread:
    """Run ``run`` in a thread, after the previous work on the same process group.

    Args:
        run: the work.
        process_group: on which it communicates; None: it does not.
        end: called in the thread after ``run``, with the error that it raised, or None.
    """
    before = None if process_group is None else _last.get(process_group)

    def body() -> None:
        error: BaseException | None = None
        try:
            if before is not None:
                before.join()
            run()
        except BaseException as caught:
            error = caught
        end(error)

    thread = threading.Thread(target=body, name="fullshard weights")
    if process_group is not None:
        _last[process_group] = thread
    thread.start()
    return thread


def check_params(params: Mapping[str, torch.Tensor], call: str) -> None:
    """Return if the values of ``params`` can be copied from shards.

    Raises:
        RuntimeError: in an ``unsharded`` block, saying so of ``call``.
        ValueError: if a parameter is on the meta device or has ``Partial`` placements.
    """
    for name, param in params.items():
        if param.is_meta:
            raise ValueError(f"{name} is on the meta device; give it values before {call}")
        if isinstance(param, DTensor) and any(each.is_partial() for each in param.placements):
            raise ValueError(
                f"{name} has placements {param.placements}: ranks hold addends of it, which are no "
                f"parts of a stream; redistribute() it to Shard or Replicate before {call}"
            )
        group = group_of(param)
        if group is not None and in_block(group):
            raise RuntimeError(
                f"{call} was called inside an unsharded() block that holds {name}, whose "
                "changes are not in the shards yet; call it outside of the block"
            )


def group_for(
    comparison: Comparison,
    purpose: str,
    group: dist.ProcessGroup | None,
    params: Mapping[str, torch.Tensor],
    ranks: set[int],
) -> dist.ProcessGroup:
    """Return the process group for work in threads, once all ranks of the model have the same one.

    Args:
        comparison: words the errors.
        purpose: a name for the new process group if ``group`` is None.
        group: the user's.
        params: the model's, whose meshes connect the ranks.
        ranks: all global ranks of the model.
    """
    error = _wrong(group, ranks)
    said = "group=None"
    if group is not None:
        said = f"group {group.group_name} of ranks {dist.get_process_group_ranks(group)}"
    verdict = format_error(error)
    for mesh in {each.device_mesh: None for each in params.values() if isinstance(each, DTensor)}:
        for axis in mesh.get_all_groups():
            found = comparison.verdict([(said, said)], verdict, axis, device_of_mesh(mesh))
            verdict = found or verdict
    settle(error, verdict)
    return own_group(purpose) if group is None else group


def _wrong(group: dist.ProcessGroup | None, ranks: set[int]) -> ValueError | None:
    if group is None:
        if ranks == {*range(dist.get_world_size())}:
            return None
        return ValueError(
            f"the model is on ranks {sorted(ranks)} of {dist.get_world_size()}; pass as group a "
            "gloo process group of those, which nothing else uses"
        )
    found = {*dist.get_process_group_ranks(group)}
    if found == ranks:
        return None
    return ValueError(
        f"group has ranks {sorted(found)}, and the model is on ranks {sorted(ranks)}; pass a gloo "
        "process group of the ranks of the model"
    )
