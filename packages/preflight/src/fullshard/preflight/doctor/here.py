"""Checks of one process and its machine: versions, devices, memory, limits, disk.

``facts_here`` collects what other ranks compare; ``check_here`` returns findings. Nothing is sent.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from fullshard.comm.spi import can_pin, traits_of
from fullshard.preflight.doctor.findings import Finding, fail, fine, warn
from fullshard.preflight.machine import usable_cores, usable_device
from fullshard.preflight.wording import size_text

__all__ = ["LEAST_SHARED", "Facts", "check_disk", "check_here", "facts_here"]

LEAST_SHARED = 1 << 30
"""Bytes of free shared memory below which the doctor warns."""

_LEAST_FILES = 4096  # every rank has a connection to each other rank, and files of its own
_COMPARED = ("torch", "numpy", "safetensors", "transformers", "accelerate")
_TORCH = ((2, 11), (2, 15))  # the oldest and the newest that the tests run on
_SHARED = Path("/dev/shm")
_WRITTEN = 64 << 20  # bytes that the check of a disk writes and reads


@dataclass(frozen=True)
class Facts:
    """What ranks compare.

    Attributes:
        host: the name of the machine.
        versions: the versions of Python and of libraries, by name.
        device: the kind and name of the device.
        cores: cores that this process may use.
        threads: threads of torch in this process.
        loopback: whether the name of the host is an address that other hosts cannot reach.
    """

    host: str
    versions: Mapping[str, str]
    device: str
    cores: int
    threads: int
    loopback: bool


def facts_here() -> Facts:
    """Return the facts of this process."""
    versions = {"Python": platform.python_version()}
    for each in importlib.metadata.distributions():
        name = each.name or ""  # what is left of an installation has none
        if name in _COMPARED or name.startswith("fullshard-"):
            versions.setdefault(name, each.version)  # the first on the path is imported
    versions["torch"] = torch.__version__  # with the build, which decides what is supported
    return Facts(
        host=socket.gethostname(),
        versions=versions,
        device=_device_name(),
        cores=usable_cores(),
        threads=torch.get_num_threads(),
        loopback=_is_loopback(),
    )


def check_here(facts: Facts) -> list[Finding]:
    """Return the findings of this process about its machine."""
    return [
        *_check_versions(facts),
        _check_device(facts),
        _check_backends(),
        *_check_shared_memory(),
        _check_files(),
        *_check_pinned(),
    ]


def check_disk(folder: Path) -> Finding:
    """Return the speed of the disk of ``folder``, for checkpoints and state in files."""
    data = os.urandom(1 << 20) * (_WRITTEN >> 20)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            start = time.perf_counter()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - start
    except OSError as error:
        return fail("disk", f"{folder}: {error.strerror}", "choose a folder that can be written")
    free = shutil.disk_usage(folder).free
    return fine(
        "disk", f"{folder}: writes {_WRITTEN / seconds / 1e6:.0f} MB/s, {size_text(free)} free"
    )


def _check_versions(facts: Facts) -> list[Finding]:
    versions = facts.versions
    text = ", ".join(f"{name} {versions[name]}" for name in ("Python", "torch"))
    found = [fine("versions", f"{text} on {platform.system()} {platform.machine()}")]
    series = tuple(int(part) for part in torch.__version__.split(".")[:2])
    oldest, newest = _TORCH
    if series < oldest:
        needed = ".".join(map(str, oldest))
        found = [fail("versions", f"torch {torch.__version__}", f"install torch {needed} or newer")]
    elif series > newest:
        tested = ".".join(map(str, newest))
        advice = f"tests ran up to {tested}; run `nox -s tests` with this version first"
        found = [warn("versions", f"torch {torch.__version__}", advice)]
    layers = {name: v for name, v in versions.items() if name.startswith("fullshard-")}
    if len(set(layers.values())) > 1:
        text = ", ".join(f"{name} {version}" for name, version in layers.items())
        found.append(fail("layers", text, "install one version of all fullshard packages"))
    return found


def _check_device(facts: Facts) -> Finding:
    if facts.device == "cpu" and shutil.which("nvidia-smi") is not None:
        return warn(
            "device",
            "nvidia-smi is there, but torch sees no GPU",
            "install a torch build for the driver's CUDA version, or check CUDA_VISIBLE_DEVICES",
        )
    return fine("device", facts.device)


def _check_backends() -> Finding:
    backends = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    there = [name for name, available in backends.items() if available]
    if torch.cuda.is_available() and "nccl" not in there:
        return fail("backends", ", ".join(there), "install a torch build with NCCL for GPUs")
    return fine("backends", ", ".join(there))


def _check_shared_memory() -> list[Finding]:
    """Return the memory that ranks of this host can share; gathers of CPU ranks use the memory."""
    if not traits_of(torch.device("cpu")).shared_memory or not _SHARED.is_dir():
        return []
    usage = shutil.disk_usage(_SHARED)
    text = f"{size_text(usage.free)} of {size_text(usage.total)} free in {_SHARED}"
    if not os.access(_SHARED, os.W_OK):
        return [warn("shared memory", f"{_SHARED} cannot be written", "ranks use sockets instead")]
    if usage.free < LEAST_SHARED:
        advice = "give the container more (docker run --shm-size=8g), or remove what was left there"
        return [warn("shared memory", text, advice)]
    return [fine("shared memory", text)]


def _check_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _LEAST_FILES:
        most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        return warn("open files", f"at most {soft}", f"`ulimit -n {_LEAST_FILES}` (hard: {most})")
    return fine("open files", "unlimited" if soft == resource.RLIM_INFINITY else f"at most {soft}")


def _check_pinned() -> list[Finding]:
    if not torch.accelerator.is_available():
        return []
    if can_pin(torch.device("cpu")):
        return [fine("pinned memory", "works")]
    return [warn("pinned memory", "none", "offload copies block the host; `ulimit -l unlimited`")]


def _device_name() -> str:
    device = usable_device()
    if device.type == "cpu":
        return "cpu"
    module = torch.get_device_module(device)
    count = torch.accelerator.device_count()
    named = getattr(module, "get_device_name", None)  # some device modules lack the name
    name = named(torch.accelerator.current_device_index()) if callable(named) else ""
    return f"{count} x {device.type} {name}".rstrip()


def _is_loopback() -> bool:
    if any(os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")):
        return False
    try:
        return socket.gethostbyname(socket.gethostname()).startswith("127.")
    except OSError:
        return False
