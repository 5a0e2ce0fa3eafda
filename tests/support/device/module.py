"""The module ``torch.asynccpu``: the names that ``torch.cuda`` has, as far as tests use them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from support.device.building import extension

_TYPE = "asynccpu"
_MODES = ("default", "warn", "error")
_Where = torch.device | int | str | None


def _index(where: _Where = None) -> int:
    if isinstance(where, int):
        return where
    index = None if where is None else torch.device(where).index
    return current_device() if index is None else index


class Stream(torch.Stream):
    def __new__(cls, device: _Where = None, priority: int = 0) -> Stream:
        return super().__new__(cls, torch.device(_TYPE, _index(device)), priority=priority)


def Event(enable_timing: bool = False, blocking: bool = False) -> torch.Event:
    # No subclass: torch compares the time of its own class only.
    return torch.Event(_TYPE, enable_timing=enable_timing, blocking=blocking)


# -- devices --------------------------------------------------------------------------------------


def init() -> None:
    """Do nothing: there is nothing to initialise."""


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return int(extension().DEVICES)


def current_device() -> int:
    return int(extension().current_device())


def set_device(device: _Where) -> None:
    extension().set_current_device(_index(device))


@contextlib.contextmanager
def device(device: _Where) -> Iterator[None]:
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def get_device_name(device: _Where = None) -> str:
    return "asynchronous CPU"


def is_bf16_supported() -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


# -- streams --------------------------------------------------------------------------------------


def current_stream(device: _Where = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: _Where = None) -> torch.Stream:
    kind: Any = torch._C._autograd.DeviceType.PrivateUse1
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=int(kind))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream | None) -> Any:
    return contextlib.nullcontext() if stream is None else stream


def synchronize(device: _Where = None) -> None:
    torch.accelerator.synchronize(_index(device))


def _sleep(cycles: int) -> None:
    extension().stall(current_device())


def set_sync_debug_mode(mode: str | int) -> None:
    extension().set_sync_debug(mode if isinstance(mode, int) else _MODES.index(mode))


def get_sync_debug_mode() -> int:
    return int(extension().sync_debug())


# -- memory ---------------------------------------------------------------------------------------


def memory_stats(device: _Where = None) -> dict[str, Any]:
    return torch.accelerator.memory_stats(_index(device))


def memory_allocated(device: _Where = None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: _Where = None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device: _Where = None) -> int:
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_reserved(device: _Where = None) -> int:
    return torch.accelerator.max_memory_reserved(_index(device))


def reset_peak_memory_stats(device: _Where = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def mem_get_info(device: _Where = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(_index(device))


def empty_cache() -> None:
    torch.accelerator.empty_cache()


# -- random numbers -------------------------------------------------------------------------------


def _generator(device: _Where) -> torch.Generator:
    generator: torch.Generator = extension().default_generator(_index(device))
    return generator


def manual_seed(seed: int) -> None:
    _generator(None).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _generator(index).manual_seed(seed)


def initial_seed() -> int:
    return _generator(None).initial_seed()


def get_rng_state(device: _Where = None) -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: _Where = None) -> None:
    _generator(device).set_state(new_state)
