"""What the operations of a step allocate, counted as they are dispatched."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.preflight.tensors import local_tensors

_TORCH = str(Path(torch.__file__).parent)
_COMPUTES = tuple(f"{_TORCH}/{part}" for part in ("nn/", "optim/", "autograd/"))
_HERE = str(Path(__file__))
_OURS = "/fullshard/"


class Mode(TorchDispatchMode):
    """Looks at each operation, after it ran."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its local operations come back here
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.look(func, args, kwargs, result)
        return result

    def look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        raise NotImplementedError


class StorageCounter(Mode):
    """Counts the bytes of the storages that operations called by ``fullshard`` make.

    An operation is called by whom the innermost frame belongs to, torch's own helpers passed over;
    one of a module of torch, an optimizer or autograd is the model's.

    Attributes:
        made: bytes, by file and function that asked for them, and operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[str] = Counter()

    def look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        given = {_storage(each) for each in local_tensors((args, list(kwargs.values())))}
        new = {
            _storage(each): each.untyped_storage().nbytes()
            for each in local_tensors(result)
            if _storage(each) not in given
        }
        nbytes = sum(new.values())
        caller = _caller(sys._getframe(1)) if nbytes else None
        if caller is not None:
            self.made[f"{caller}: {func.overloadpacket.__name__}"] += nbytes

    @property
    def nbytes(self) -> int:
        return sum(self.made.values())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _caller(frame: FrameType | None) -> str | None:
    """File and function of ours that called what runs in ``frame``, or None."""
    while frame is not None:
        path = frame.f_code.co_filename
        if _OURS in path and "/tests/" not in path.rpartition(_OURS)[2]:
            return f"{Path(path).stem}.{frame.f_code.co_name}"
        if path != _HERE and (path.startswith(_COMPUTES) or not path.startswith(_TORCH)):
            return None
        frame = frame.f_back
    return None
