"""Mixed precision: in what dtypes a module computes, reduces and talks.

Owns the answers to sharding's two questions of precision. It casts no parameter itself: the gather
does, on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fullshard.sharding import map_tensors

__all__ = ["MixedPrecisionPolicy"]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Mixed precision for one sharded module, with torch's fields, defaults and meaning.

    The sharded parameters keep their own dtype, so the optimizer works on full-precision copies
    that are there anyway. Only floating-point tensors are ever cast.

    Attributes:
        param_dtype: dtype in which parameters are gathered and the module computes; None: their
            own.
        reduce_dtype: dtype in which gradients are reduced, and accumulated without communication;
            None: the dtype of the computation.
        output_dtype: dtype to which the module's outputs are cast; None: as they come.
        cast_forward_inputs: cast the module's inputs to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
            TypeError: if a dtype is not a floating-point ``torch.dtype`` or None, or the flag not
                a bool.
        """
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            value = getattr(self, name)
            if value is not None and not (
                isinstance(value, torch.dtype) and value.is_floating_point
            ):
                raise TypeError(f"{name} is {value!r}; pass a floating-point torch.dtype or None")
        if not isinstance(self.cast_forward_inputs, bool):
            raise TypeError(
                f"cast_forward_inputs is {self.cast_forward_inputs!r}; pass True or False"
            )

    def gathered_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Returns ``param_dtype`` for a floating-point parameter, if it is set."""
        if self.param_dtype is None or not dtype.is_floating_point:
            return dtype
        return self.param_dtype

    def reduced_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Returns ``reduce_dtype``, or the dtype of the computation."""
        if self.reduce_dtype is None or not dtype.is_floating_point:
            return self.gathered_dtype(name, dtype)
        return self.reduce_dtype

    def cast_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the inputs with floating-point tensors in ``param_dtype``, if so asked."""
        if self.param_dtype is None or not self.cast_forward_inputs:
            return args, kwargs
        cast: tuple[tuple[Any, ...], dict[str, Any]] = _cast((args, kwargs), self.param_dtype)
        return cast

    def cast_output(self, output: Any) -> Any:
        """Returns the output with floating-point tensors in ``output_dtype``, if it is set."""
        return output if self.output_dtype is None else _cast(output, self.output_dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)
