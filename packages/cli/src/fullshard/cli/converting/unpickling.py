"""A pickle module for ``torch.load`` that builds only tensors and plain values.

DeepSpeed's files name classes of DeepSpeed. Objects of these classes become ``Unknown``, so reading
needs no DeepSpeed and runs no code of the file. Any other class is refused.
"""

from __future__ import annotations

import pickle
from typing import Any

__all__ = ["Unknown", "Unpickler", "load"]

_STUBBED = ("deepspeed.", "argparse.", "megatron.", "types.")
_PLAIN = {
    "builtins": {
        "set",
        "frozenset",
        "slice",
        "complex",
        "bytearray",
        "int",
        "float",
        "bool",
        "str",
    },
    "collections": {"OrderedDict", "defaultdict", "Counter"},
    "numpy": {"dtype", "ndarray"},
    "numpy.core.multiarray": {"scalar", "_reconstruct"},
    "numpy._core.multiarray": {"scalar", "_reconstruct"},
    "torch": {"Size", "device", "Tensor", "BFloat16Storage", "BoolStorage", "ByteStorage"}
    | {"DoubleStorage", "FloatStorage", "HalfStorage", "IntStorage", "LongStorage", "Generator"}
    | {"bfloat16", "float16", "float32", "float64", "int32", "int64"},
    "torch._utils": {"_rebuild_tensor_v2", "_rebuild_parameter", "_rebuild_tensor"},
    "torch.nn.parameter": {"Parameter"},
    "torch.storage": {"UntypedStorage", "TypedStorage"},
    "torch.serialization": {"_get_layout"},
}


class Unknown:
    """An object of a class that is not loaded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take any arguments, and ignore them."""

    def __setstate__(self, state: Any) -> None:
        """Ignore the state."""

    def __call__(self, *args: Any, **kwargs: Any) -> Unknown:
        """Return an unknown object."""
        return self


class Unpickler(pickle.Unpickler):
    """Finds the classes of tensors and plain values; see the module."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that is allowed, or ``Unknown``.

        Raises:
            UnpicklingError: if the class is neither allowed nor one of DeepSpeed.
        """
        if name in _PLAIN.get(module, ()):
            return super().find_class(module, name)
        if f"{module}.".startswith(_STUBBED):
            return Unknown
        raise pickle.UnpicklingError(f"the file names {module}.{name}, which is not loaded")


def load(file: Any, **options: Any) -> Any:
    """Return the object in ``file``."""
    return Unpickler(file, **options).load()
