"""Numbers as people read them."""

from __future__ import annotations

from fullshard_bench.records.statistics import Estimate

__all__ = ["as_bytes", "as_ms", "as_number", "as_ratio"]


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def as_bytes(count: int) -> str:
    """`1.5 MiB`; `-` for a negative count, which means that nothing was measured."""
    if count < 0:
        return "-"
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{count} B"


def as_ms(estimate: Estimate | None) -> str:
    """`12.3 (12.0 to 12.9)`: the median and its interval; `-` for None."""
    if estimate is None:
        return "-"
    digits = 1 if abs(estimate.value) >= 10 else 2
    value, low, high = (f"{each:.{digits}f}" for each in _parts(estimate))
    return f"{value} ({low} to {high})"


def as_ratio(estimate: Estimate | None) -> str:
    """`1.23 (1.20 to 1.27)`; `-` for None."""
    if estimate is None:
        return "-"
    value, low, high = (f"{each:.2f}" for each in _parts(estimate))
    return f"{value} ({low} to {high})"


def as_number(value: float | None, digits: int = 0) -> str:
    """A number with thousands separated; `-` for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def _parts(estimate: Estimate) -> tuple[float, ...]:
    return (estimate.value, estimate.low, estimate.high)
