"""vLLM's weight transfer without vLLM: its modules from an unpacked wheel, the rest stands in.

vLLM needs a GPU build and hundreds of packages; its weight transfer needs torch and a few names.
``FULLSHARD_VLLM`` names a folder with an unpacked wheel (``pip download --no-deps vllm``).
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from fullshard.checkpoint.engines import metadata, source

PACKAGE = "vllm.distributed.weight_transfer"


def folder() -> str | None:
    """Where an unpacked wheel is; empty if vLLM itself is installed; None if there is neither."""
    if importlib.util.find_spec("vllm") is not None:
        return ""
    found = os.environ.get("FULLSHARD_VLLM")
    return found if found and Path(found, *PACKAGE.split("."), "base.py").exists() else None


def _stand_ins(where: Path) -> dict[str, ModuleType]:
    """Empty modules for what the weight transfer imports, with the names that it needs."""
    names: dict[str, dict[str, Any]] = {
        "vllm": {"__path__": []},
        "vllm.config": {"__path__": []},
        "vllm.config.parallel": {"ParallelConfig": object},
        "vllm.config.weight_transfer": {"WeightTransferConfig": object},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.utils": {"__path__": []},
        "vllm.utils.nccl": {"unpinned_nccl_env": None},
        "vllm.distributed": {"__path__": []},
        "vllm.distributed.device_communicators": {"__path__": []},
        "vllm.distributed.device_communicators.pynccl_wrapper": {
            "NCCL_UNIQUE_ID_BYTES": 128,
        },
        PACKAGE: {"__path__": [str(Path(where, *PACKAGE.split(".")))]},
        "pybase64": vars(base64),
    }
    made = {}
    for name, contents in names.items():
        made[name] = ModuleType(name)
        vars(made[name]).update({k: v for k, v in contents.items() if k != "__name__"})
    return made


@contextmanager
def weight_transfer(where: str, *names: str) -> Iterator[list[Any]]:
    """Modules of vLLM's weight transfer, which fullshard finds, too, inside the block.

    Args:
        where: as ``folder`` found it.
        names: of the modules: ``base``, ``nccl_engine``.
    """
    kept = {name: module for name, module in sys.modules.items() if name.startswith("vllm")}
    kept |= {"pybase64": sys.modules["pybase64"]} if "pybase64" in sys.modules else {}
    caches: list[Any] = [metadata.classes, source._source_class]
    if where:
        sys.modules.update(_stand_ins(Path(where)))
    for cache in caches:
        cache.cache_clear()
    try:
        yield [importlib.import_module(f"{PACKAGE}.{name}") for name in names]
    finally:
        for cache in caches:
            cache.cache_clear()
        for name in [name for name in sys.modules if name.startswith("vllm")]:
            del sys.modules[name]
        sys.modules.pop("pybase64", None)
        sys.modules.update(kept)
