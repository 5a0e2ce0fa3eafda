"""Functional collectives as work on streams: they return tensors, as tensor parallelism needs.

Owns what ``torch.ops._c10d_functional`` launches, and the wait that each of its results is handed
to. As with NCCL one runs on a stream of the process group's own, which waits for the current one.
"""

from __future__ import annotations

from typing import Any

import torch

from fullshard.preflight.compat import process_group_of, schema_of, storage_address
from fullshard.preflight.races.collectives import Collectives, Launched, UnknownCollectiveError
from fullshard.preflight.simulation.streams import Machine, SimulatedEvent
from fullshard.preflight.tensors import local_tensors

__all__ = ["FunctionalCollectives"]

_KNOWN = {
    "all_gather_into_tensor": "all_gather_into_tensor",
    "all_reduce": "allreduce",
    "all_to_all_single": "all_to_all_single",
    "broadcast": "broadcast",
    "reduce_scatter_tensor": "reduce_scatter_tensor",
}
_ENDINGS = ("_coalesced", "_out", "_")


class FunctionalCollectives:
    """The functional collectives of a machine, whose process groups have ``collectives``."""

    def __init__(self, machine: Machine, collectives: Collectives) -> None:
        self._machine = machine
        self._collectives = collectives
        self._landing: dict[int, SimulatedEvent] = {}

    @staticmethod
    def are(func: Any) -> bool:
        """Return whether ``func`` is a functional collective, or its wait."""
        namespace: str = func.namespace
        return namespace.startswith("_c10d_functional")

    def launched(self, func: Any, args: Any, kwargs: Any, result: Any) -> Launched | None:
        """Return the collective that an operation launched; None if it was a wait.

        Raises:
            UnknownCollectiveError: if it is not known what it does.
        """
        schema = schema_of(func)
        name = schema.name.partition("::")[2]
        if name == "wait_tensor":
            self._wait(args[0])
            return None
        values = dict(zip((each.name for each in schema.arguments), args, strict=False)) | kwargs
        group = process_group_of(values["group_name"]) if "group_name" in values else None
        if _plain(name) not in _KNOWN or group is None:
            raise UnknownCollectiveError(
                f"{schema.name} was called, and what this collective takes is not known; use one of"
                f" {', '.join(sorted(_KNOWN))}"
            )
        stream = self._collectives.stream_of(group)
        stream.wait_stream(self._machine.current())
        read = tuple(local_tensors([values.get("input"), values.get("inputs")]))
        return Launched(_KNOWN[_plain(name)], stream, tuple(local_tensors([result])), read, group)

    def landing(self, launched: Launched) -> None:
        """Note that the collective is on its stream now; its results can be waited for."""
        for tensor in launched.written:
            self._landing[storage_address(tensor.untyped_storage())] = event = SimulatedEvent(
                self._machine
            )
            event.record(launched.stream)

    def _wait(self, tensor: torch.Tensor) -> None:
        event = self._landing.pop(storage_address(tensor.untyped_storage()), None)
        if event is not None:
            event.wait()


def _plain(name: str) -> str:
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    return name
