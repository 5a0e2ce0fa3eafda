"""Draws the overview: what one rank of 64 holds, and when, in a training step of a 7 B model.

``python tools/overview.py`` writes ``docs/assets/who-holds-what.svg``. Owns the picture. Figures
are those of the layouts that a collective of each group has, over the benchmark's ``gpt-7b``; a
test compares them with what ``fullshard.preflight.plan`` finds in a step of the engine, and the
file with what this script draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fullshard.comm import Layout, TensorSpec
from fullshard_bench.models.registry import make_workload
from fullshard_bench.models.workload import Shape

__all__ = ["MODEL", "RANKS", "Figures", "draw", "figures"]

MODEL, RANKS = "gpt-7b", 64
PICTURE = Path(__file__).parents[1] / "docs" / "assets" / "who-holds-what.svg"

_COLUMNS = (
    "embedding", "block 0", "block 1", "...", "block 31", "head, loss",
    "block 31", "block 30", "...", "block 0", "embedding", "AdamW",
)  # fmt: skip
_PHASES = (("forward", 0, 6), ("backward", 6, 11), ("optimizer", 11, 12))
_LEFT, _STEP, _TOP, _LANE = 232, 64, 96, 46


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a rank holds, in bytes.

    Attributes:
        parameters: its shards of all parameters, float32.
        optimizer: AdamW's two averages of them.
        root: full parameters of what is in no block, bfloat16.
        block: full parameters of a block, bfloat16.
        reduction: full gradients of a block as they are reduced, float32.
        gradient: a block's shards of gradients, float32.
    """

    parameters: int
    optimizer: int
    root: int
    block: int
    reduction: int
    gradient: int


def figures() -> Figures:
    """Those of the model over the ranks, from the layouts of its groups."""
    workload = make_workload(MODEL, Shape(rows=1, tokens=2048))
    with torch.device("meta"):
        model = workload.build()
    blocks = list(workload.units(model))
    inside = {param for block in blocks for param in block.parameters()}
    root = [param for param in model.parameters() if param not in inside]
    shards = [_shard_bytes(list(block.parameters())) for block in blocks]
    parameters = sum(shards) + _shard_bytes(root)
    block = list(blocks[0].parameters())
    return Figures(
        parameters=parameters,
        optimizer=2 * parameters,
        root=_full_bytes(root, torch.bfloat16),
        block=_full_bytes(block, torch.bfloat16),
        reduction=_full_bytes(block, torch.float32),
        gradient=shards[0],
    )


def _specs(params: list[nn.Parameter], dtype: torch.dtype) -> list[TensorSpec]:
    return [TensorSpec(shape=tuple(param.shape), dtype=dtype) for param in params]


def _full_bytes(params: list[nn.Parameter], dtype: torch.dtype) -> int:
    """All slices of a collective, with their padding."""
    return RANKS * Layout(_specs(params, dtype), RANKS).buffer.slice_nbytes


def _shard_bytes(params: list[nn.Parameter]) -> int:
    """The elements of rank 0, whose shards are the largest."""
    specs = _specs(params, torch.float32)
    return sum(4 * torch.Size(spec.shard_shape(0, RANKS)).numel() for spec in specs)


def draw(found: Figures) -> str:
    """The picture as SVG."""
    width, height = _LEFT + _STEP * len(_COLUMNS) + 16, _TOP + 6 * _LANE + 44
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        ' font-family="system-ui, sans-serif" font-size="13">',
        f"<title>What one of {RANKS} ranks holds in a step of a 7 B model</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(16, 24, f"One of {RANKS} ranks in a step of {MODEL}; sizes in MiB", weight="bold"),
        *_head(height),
        *_lanes(found),
        _text(
            16,
            height - 14,
            "The other ranks hold other rows, at the same times. Activations come on top.",
        ),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _head(height: int) -> Iterator[str]:
    for name, first, last in _PHASES:
        left, right = _x(first), _x(last)
        yield f'<line x1="{left + 3}" x2="{right - 3}" y1="58" y2="58" stroke="#3f51b5"/>'
        yield _text((left + right) // 2, 52, name, anchor="middle", colour="#3f51b5")
    for number, name in enumerate(_COLUMNS):
        yield _text(_x(number) + _STEP // 2, 78, name, anchor="middle", size=11)
        yield (
            f'<line x1="{_x(number)}" x2="{_x(number)}" y1="66" y2="{height - 36}"'
            ' stroke="#e0e0e0"/>'
        )


def _lanes(found: Figures) -> Iterator[str]:
    """The six lanes, from what is held always to what is held for a moment."""
    yield from _lane(0, "parameter shards, fp32", "1/64 of every parameter")
    yield _bar(0, 0, 12, found.parameters, "#3f51b5")
    yield from _lane(1, "optimizer state, fp32", "AdamW: two averages")
    yield _bar(1, 0, 12, found.optimizer, "#5c6bc0")
    yield from _lane(2, "embedding and head, gathered", "bf16; kept until backward")
    yield _bar(2, 0, 11, found.root, "#00897b")
    yield from _lane(3, "a block, gathered", "bf16; the next one's gather beside it")
    for number, column in enumerate((1, 2, 4, 6, 7, 9)):
        yield _bar(3, column - 0.4, column + 0.95, found.block, "#26a69a", half=number % 2)
    yield from _lane(4, "a block's gradients, reduced", "fp32; 1/64 stays on each rank")
    for number, column in enumerate((6, 7, 9)):
        yield _bar(4, column + 0.4, column + 1.5, found.reduction, "#ef6c00", half=number % 2)
    yield from _lane(5, "gradient shards, fp32", f"{_mib(found.gradient)} more with each block")
    top, bottom = _y(5) + 4, _y(5) + _LANE - 10
    yield (
        f'<polygon points="{_x(7)},{bottom} {_x(11)},{top} {_x(12)},{top} {_x(12)},{bottom}"'
        ' fill="#fb8c00"/>'
    )
    middle = (top + bottom) // 2 + 5
    yield _text(
        _x(11) + _STEP // 2, middle, _mib(found.parameters), anchor="middle", colour="#ffffff"
    )


def _lane(number: int, what: str, note: str) -> Iterator[str]:
    yield _text(16, _y(number) + 16, what)
    yield _text(16, _y(number) + 31, note, size=11, colour="#616161")


def _bar(
    lane: int, first: float, last: float, size: int, colour: str, half: int | None = None
) -> str:
    """A size that is held from one column to another; in the upper or lower half of its lane."""
    top, height = _y(lane) + 4, _LANE - 14
    if half is not None:
        height = height // 2
        top += half * (height + 1)
    left, right = _x(first) + 2, _x(last) - 2
    return (
        f'<rect x="{left:g}" y="{top}" width="{right - left:g}" height="{height}" rx="2"'
        f' fill="{colour}"/>'
        + _text(
            (left + right) / 2, top + height / 2 + 5, _mib(size), anchor="middle", colour="#ffffff"
        )
    )


def _text(
    x: float, y: float, words: str, *, anchor: str = "start", size: int = 13,
    colour: str = "#212121", weight: str = "normal",
) -> str:  # fmt: skip
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
        f' font-weight="{weight}">{words}</text>'
    )


def _x(column: float) -> float:
    return _LEFT + _STEP * column


def _y(lane: int) -> int:
    return _TOP + _LANE * lane


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f}"


if __name__ == "__main__":
    PICTURE.write_text(draw(figures()))
    print(PICTURE, figures())
