"""Compiles the C++ extension of the asynchronous device, and keeps it for the next run.

The result lies outside the repository, in a folder named by the sources and versions.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

_NAME = "async_cpu_extension"
_SOURCES = Path(__file__).parent / "csrc"
# Torch's headers warn of the size of a cache line, which may differ between compilers.
_FLAGS = ("-O1", "-g0", "-Wno-interference-size", "-Wno-attributes")


def missing_tools() -> str:
    """Return which program is missing for the build, or an empty string."""
    if _library().exists():
        return ""
    with patch.dict(os.environ, PATH=_path()):
        for program, package in (("g++", "g++"), ("ninja", "ninja-build")):
            if shutil.which(program) is None:
                return f"{program} is missing; install it, on Debian by: apt install {package}"
    return ""


@functools.cache
def extension() -> Any:
    """Return the extension module; build it first if no process has done so.

    Raises:
        RuntimeError: if the build fails.
    """
    library = _library()
    library.parent.mkdir(parents=True, exist_ok=True)
    with open(library.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _build(library)
    return _imported(library)


def _path() -> str:
    """Return PATH with the folder of this Python's programs, where pip puts ninja."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))


def _library() -> Path:
    """Return where the built extension of these sources and versions lies."""
    digest = hashlib.sha256()
    for part in (torch.__version__, sys.version, str(torch._C._GLIBCXX_USE_CXX11_ABI), *_FLAGS):
        digest.update(part.encode())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return cache / "fullshard" / f"async_cpu-{digest.hexdigest()[:16]}" / f"{_NAME}{suffix}"


def _build(library: Path) -> None:
    from torch.utils import cpp_extension

    folder = library.parent / "build"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    environment = {"PATH": _path(), "MAX_JOBS": str(os.cpu_count() or 1), "CXX": "g++"}
    with patch.dict(os.environ, environment), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's about compilers that it was not tested with
        cpp_extension.load(
            _NAME,
            [str(path) for path in sorted(_SOURCES.glob("*.cpp"))],
            extra_cflags=list(_FLAGS),
            build_directory=str(folder),
            is_python_module=False,  # this would load it; see `_imported`
            with_cuda=False,
        )
    (folder / f"{_NAME}.so").rename(library)
    shutil.rmtree(folder)


def _imported(library: Path) -> Any:
    spec = importlib.util.spec_from_file_location(_NAME, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
