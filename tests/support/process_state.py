"""What a process shares with all its code, so that a test can tell what was changed in it."""

from __future__ import annotations

import atexit
import copyreg
import gc
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree

_OF_PYTHON = (atexit, copyreg, gc, logging, os, random, signal, sys, threading, warnings)


def _settings() -> Iterator[tuple[str, object]]:
    """Yield settings and lists of the process by name, as values that compare by ``==``."""
    yield "atexit", cast(Any, atexit)._ncallbacks()
    yield "threads", sorted(thread.name for thread in threading.enumerate())
    yield "os.environ", dict(os.environ)
    yield "working directory", os.getcwd()
    yield "warnings.filters", list(map(repr, warnings.filters))
    yield "signal handlers", {each: signal.getsignal(each) for each in signal.valid_signals()}
    yield "sys.path", list(sys.path)
    yield "import hooks", [*map(id, sys.meta_path), *map(id, sys.path_hooks)]
    yield "tracing", (sys.gettrace(), sys.getprofile(), threading.gettrace())
    yield "limits of Python", (sys.getrecursionlimit(), sys.getswitchinterval())
    yield "garbage collection", (gc.isenabled(), gc.get_threshold(), list(map(id, gc.callbacks)))
    yield "logging", (logging.root.level, list(logging.root.handlers), logging.root.manager.disable)
    yield "copyreg", dict(copyreg.dispatch_table)
    yield "multiprocessing", multiprocessing.get_start_method(allow_none=True)
    yield "random", (random.getstate(), torch.get_rng_state().tolist())
    yield "torch's dtype", torch.get_default_dtype()
    yield "torch's threads", (torch.get_num_threads(), torch.get_num_interop_threads())
    yield "torch's determinism", torch.are_deterministic_algorithms_enabled()
    yield "torch's gradients", (torch.is_grad_enabled(), torch.is_anomaly_enabled())
    yield "torch's autocast", (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
    yield "torch's pytree", set(pytree.SUPPORTED_NODES)
    yield "torch's safe globals", set(torch.serialization.get_safe_globals())
    yield "torch's backends", list(dist.Backend.backend_list)
    for place in ("torch.nn.modules.module", "torch.optim.optimizer"):
        for name, value in vars(sys.modules[place]).items():
            if name.startswith("_global_") and isinstance(value, dict):
                yield f"{place}.{name}", list(value)


def _attributes() -> Iterator[tuple[str, object]]:
    """Yield the functions and classes of torch and Python by name, and those in the classes."""
    ours = [*_OF_PYTHON]
    ours += [each for name, each in sys.modules.items() if name.partition(".")[0] == "torch"]
    for module in ours:
        if not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if issubclass(type(value), type):  # isinstance reads an attribute, of which torch warns
                yield f"{module.__name__}.{name}", value
                if value.__module__.partition(".")[0] == "torch":
                    where = f"{value.__module__}.{value.__qualname__}"
                    yield from ((f"{where}.{key}", each) for key, each in vars(value).items())
            elif callable(value):
                yield f"{module.__name__}.{name}", value


class ProcessState:
    """The state of this process when it was made."""

    def __init__(self) -> None:
        """Look at everything."""
        self._settings = dict(_settings())
        self._attributes = {
            name: value
            for name, value in _attributes()
            if callable(value) or hasattr(type(value), "__get__")
        }

    def changed(self) -> set[str]:
        """Return the names of what differs now; new modules of torch do not count."""
        now = ProcessState()
        changed = {name for name, value in self._settings.items() if now._settings[name] != value}
        for name in self._attributes.keys() | now._attributes.keys():
            before, after = self._attributes.get(name), now._attributes.get(name)
            same = before is after or before == after  # bound methods are made when they are read
            if not same and (before is not None or name.rpartition(".")[0] in self._attributes):
                changed.add(name)
        return changed
