"""What an FSDP1 instance shows in the place of the flat parameter that it does not have.

Owns the few attributes of torch's ``FlatParameter`` that Accelerate reads and sets to keep trained
parameters in float32 where the model came in less. Everything else is in ``parameters()``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fullshard.wrappers.fsdp1.instance import Instance

__all__ = ["FlatParameter", "FlatParameterHandle"]


@dataclass
class FlatParameterHandle:
    """What is known of a flat parameter elsewhere: setting it changes nothing."""

    _orig_param_dtype: torch.dtype


@dataclass(frozen=True)
class _Values:
    """The values of all parameters, as a dtype that they have or are to get."""

    dtype: torch.dtype

    def to(self, dtype: torch.dtype) -> _Values:
        """Returns them cast; setting them as ``data`` does it."""
        return _Values(dtype)


class FlatParameter:
    """All parameters of one instance."""

    def __init__(self, instance: Instance) -> None:
        """Looks at them whenever it is asked."""
        self._instance = instance

    @property
    def _fqns(self) -> list[str]:
        """Their names, from the instance on."""
        return [name for name, _ in self._instance.own_parameters()]

    @property
    def dtype(self) -> torch.dtype:
        """Their dtype; that of the fewest bytes, if they differ."""
        dtypes = [param.dtype for _, param in self._instance.own_parameters()]
        return min(dtypes, key=lambda dtype: dtype.itemsize)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return next(param.device for _, param in self._instance.own_parameters())

    @property
    def requires_grad(self) -> bool:
        """Whether any is trained."""
        return any(param.requires_grad for _, param in self._instance.own_parameters())

    @property
    def data(self) -> _Values:
        """Their values, which can only be cast."""
        return _Values(self.dtype)

    @data.setter
    def data(self, values: _Values) -> None:
        """Casts them to the dtype of ``values``."""
        self._instance.cast_parameters(values.dtype)
