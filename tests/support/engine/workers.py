"""Workers of the engine: processes that take requests in the order of vLLM's protocol.

A worker has the weights of its last finished update. It refuses a request in the wrong order, as
its table of transitions says.
"""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection
from typing import Any

import torch
import torch.distributed as dist

from fullshard.checkpoint import SliceReceiver, connect_engine

# (where it is, request): where it is then
TRANSITIONS = {
    ("new", "init"): "ready",
    ("ready", "start"): "started",
    ("started", "update"): "updated",
    ("updated", "update"): "updated",
    ("updated", "finish"): "ready",
}


@dataclass
class Worker:
    """One worker, and what it has."""

    number: int
    at: str = "new"
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    version: str | None = None
    received: int = 0
    _coming: dict[str, torch.Tensor] = field(default_factory=dict)
    _init: dict[str, Any] = field(default_factory=dict)
    _link: dist.ProcessGroup | None = None

    def handle(self, request: str, payload: Any) -> None:
        if (self.at, request) not in TRANSITIONS:
            raise RuntimeError(f"worker {self.number} got {request!r} while it is {self.at!r}")
        getattr(self, request)(payload)
        self.at = TRANSITIONS[self.at, request]

    def init(self, payload: dict[str, Any]) -> None:
        self._init = payload
        rank = payload["trainers"] + self.number
        self._link = connect_engine(
            "127.0.0.1", payload["port"], rank=rank, size=payload["size"], timeout=60
        )

    def start(self, _: Any) -> None:
        self._coming, self.received = {}, 0

    def update(self, payload: dict[str, Any]) -> None:
        """Receive weights: this worker's slices, or all of what rank 0 broadcasts."""
        assert self._link is not None
        if "slices" in self._init:
            receiver = SliceReceiver(self._init["slices"], self._link)
            for name, value in receiver:
                if payload.get("stop") == [self.number, name]:
                    raise ZeroDivisionError("the worker has no room")
                if payload.get("die") == [self.number, name]:
                    os.kill(os.getpid(), signal.SIGKILL)
                self._coming[name] = value
            self.received = receiver.received
            return
        for name, dtype, shape in zip(
            payload["names"], payload["dtype_names"], payload["shapes"], strict=True
        ):
            value = torch.empty(shape, dtype=getattr(torch, dtype))
            options = dist.BroadcastOptions()
            options.rootRank = 0
            self._link.broadcast([value], options).wait()
            self._coming[name] = value
            self.received += value.nbytes

    def finish(self, version: str | None) -> None:
        self.weights, self.version, self._coming = self._coming, version, {}


def work(address: str, number: int) -> None:
    """Serve the client at ``address``, until it closes."""
    worker = Worker(number)
    with Client(address) as connection:
        connection.send(number)
        while serve(worker, connection):
            pass


def serve(worker: Worker, connection: Connection[Any, Any]) -> bool:
    """Answer one request; return whether more may come."""
    try:
        request, payload = connection.recv()
    except EOFError:
        return False
    if request == "state":
        state = worker.weights, worker.version, worker.received
        connection.send(pickle.dumps(state))  # by value: torch would share memory
        return True
    try:
        worker.handle(request, payload)
        connection.send("")
    except BaseException as error:
        connection.send("".join(traceback.format_exception_only(error)).strip())
    return True


if __name__ == "__main__":
    import sys

    work(sys.argv[1], int(sys.argv[2]))
