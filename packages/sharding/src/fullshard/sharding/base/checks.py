"""Checks of single arguments: the given value and the allowed values."""

from __future__ import annotations

import math

import torch

__all__ = ["require_bool", "require_cap", "require_count", "require_divide_factor"]


def require_bool(name: str, value: object) -> None:
    """Return if ``value`` is a bool.

    Raises:
        TypeError: naming the argument and what came.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; pass True or False")


def require_cap(name: str, value: object) -> None:
    """Raise unless ``value`` is a finite number, 0 or more.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is negative or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; pass a number of MiB")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value}; pass a finite number of MiB, 0 for none")


def require_count(name: str, value: object) -> None:
    """Return if ``value`` is an int of at least 1.

    Raises:
        TypeError: if it is not an int.
        ValueError: if it is less than 1.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; pass a positive int")
    if value < 1:
        raise ValueError(f"{name} is {value}; pass a positive int")


def require_divide_factor(factor: object, device: torch.device) -> None:
    """Return if ``factor`` can divide gradients on ``device``.

    Raises:
        TypeError: if it is neither a number nor a tensor of one.
        ValueError: if a number is not finite and positive, or a tensor not 0-d or elsewhere.
    """
    if isinstance(factor, torch.Tensor):
        if factor.dtype.is_complex or factor.dtype is torch.bool:
            raise TypeError(f"factor is a tensor of {factor.dtype}; pass one of a real number")
        if factor.ndim != 0 or factor.device != device:
            raise ValueError(
                f"factor is a tensor of shape {tuple(factor.shape)} on {factor.device}; pass a 0-d "
                f"tensor on {device}"
            )
    elif isinstance(factor, bool) or not isinstance(factor, (int, float)):
        raise TypeError(
            f"factor is a {type(factor).__name__}; pass a positive number or a 0-d tensor"
        )
    elif not 0 < factor < float("inf"):
        raise ValueError(f"factor is {factor}; pass a finite, positive number")
