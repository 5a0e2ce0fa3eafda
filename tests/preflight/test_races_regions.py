"""Which bytes a strided view covers, against counting them one by one."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.preflight.races.regions import region_of

BASE = 96


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from([torch.uint8, torch.float32]))
    base = torch.empty(BASE, dtype=torch.uint8).view(dtype)
    room = base.numel() - 1 - (offset := draw(st.integers(0, base.numel() - 1)))
    sizes, strides = [], []
    for _ in range(draw(st.integers(0, 3))):
        stride = draw(st.integers(0, 12))
        most = min(4, room // stride + 1 if stride else 4)
        sizes.append(draw(st.integers(1, most)))
        strides.append(stride)
        room -= (sizes[-1] - 1) * stride
    return base.as_strided(sizes, strides, offset)


def _bytes(view: torch.Tensor) -> set[int]:
    item = view.element_size()
    places = torch.arange(BASE).as_strided(view.size(), view.stride(), view.storage_offset())
    return {int(each) * item + more for each in places.flatten() for more in range(item)}


@given(views(), views())
@settings(derandomize=True, deadline=None, database=None, max_examples=150)
def test_two_views_overlap_if_they_have_a_byte_in_common(
    one: torch.Tensor, two: torch.Tensor
) -> None:
    assert region_of(one).overlaps(region_of(two)) == bool(_bytes(one) & _bytes(two))
    assert region_of(two).overlaps(region_of(one)) == bool(_bytes(one) & _bytes(two))


def test_columns_are_apart_however_many_rows_there_are() -> None:
    matrix = torch.empty(200_000, 3, 5, dtype=torch.uint8)
    left, right = region_of(matrix[:, 0]), region_of(matrix[:, 1])
    assert left.count == 200_000
    assert not left.overlaps(right) and left.overlaps(left)
