"""Makes the CPU an accelerator to programs: torch's device-neutral calls reach a simulated machine.

Owns what is put in the place of torch's own while a machine is in use, which is what
``torch.get_device_module("cpu")`` and ``torch.accelerator`` offer. The engine, and any code that
asks for streams by device-neutral calls, runs unchanged. Computing stays the CPU's, with values.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest.mock import patch

import torch

from fullshard.comm import CommStreams
from fullshard.comm.spi import DeviceTraits, simulated
from fullshard.preflight.simulation.streams import Machine, SimulatedEvent, SimulatedStream

__all__ = ["accelerated"]

_TRAITS = DeviceTraits(numbered=False)  # CPU tensors have no index


@contextmanager
def accelerated(machine: Machine) -> Iterator[None]:
    """Inside the ``with`` block the CPU is taken for an accelerator, which is ``machine``.

    A module that was sharded inside the block cannot communicate after it.
    """
    made: list[weakref.ref[CommStreams]] = []
    with ExitStack() as stack:
        stack.callback(_end, made)
        stack.enter_context(simulated("cpu", _TRAITS))
        for place, names in _replaced(machine, made).items():
            for name, value in names.items():
                stack.enter_context(patch.object(place, name, value))
        yield


def _end(made: list[weakref.ref[CommStreams]]) -> None:
    for reference in made:
        streams = reference()
        if streams is not None:
            vars(streams)["record"] = _ended  # is called before each launch


def _ended(stream: object = None) -> NoReturn:
    raise RuntimeError(
        "this model was sharded on a simulated accelerator, whose streams ended with the block in "
        "which it was in use; build the model anew and call fully_shard again"
    )


def _replaced(machine: Machine, made: list[weakref.ref[CommStreams]]) -> dict[Any, dict[str, Any]]:
    """Return the replacements, by object and name."""

    def new_stream(device: object = None, priority: int = 0, **options: object) -> SimulatedStream:
        return machine.stream()

    class NewEvent(SimulatedEvent):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(machine)

    def current_stream(device: object = None) -> SimulatedStream:
        return machine.current()

    def synchronize(device: object = None) -> None:
        for stream in machine.streams:
            machine.host_waits(stream.clock)

    ours: dict[str, Any] = {
        "Stream": new_stream,
        "Event": NewEvent,
        "stream": machine.using,
        "current_stream": current_stream,
        "synchronize": synchronize,
    }
    shared = {name: ours[name] for name in ("current_stream", "synchronize")}
    return {
        torch.cpu: ours,
        torch.accelerator: shared,
        torch: {"Event": NewEvent},
        CommStreams: {
            "__init__": _naming(CommStreams.__init__, made),
            "shared": functools.cache(CommStreams),  # the cached streams from outside stay apart
        },
    }


def _naming(init: Any, made: list[weakref.ref[CommStreams]]) -> Any:
    """Wrap ``CommStreams.__init__``, which then names its streams and adds itself to ``made``."""

    def __init__(streams: CommStreams, device: torch.device) -> None:
        init(streams, device)
        made.append(weakref.ref(streams))
        for name, value in vars(streams).items():
            if isinstance(value, SimulatedStream):
                value.name = name

    return __init__
