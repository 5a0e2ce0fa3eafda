"""A transport or allocator of one's own is checked when it is given and when it answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fullshard.comm import (
    DefaultAllGather,
    DefaultReduceScatter,
    ProcessGroupTransport,
    TensorSpec,
    all_gather_tensors,
    reduce_scatter_tensors,
)
from support.ranks import distributed, world


class _NoInPlace:
    def all_gather(self, output: Any, input: Any, process_group: Any, async_op: bool) -> None:
        return None

    def reduce_scatter(
        self, output: Any, input: Any, process_group: Any, op: Any, async_op: bool
    ) -> None:
        return None


class _Transport(_NoInPlace):
    in_place = True


class _NoReduction:
    in_place = True
    all_gather = _NoInPlace.all_gather


class _ShortGather(_Transport):
    def all_gather(self, output: Any, input: Any, process_group: Any) -> None:  # type: ignore[override]
        return None


class _PositionalAllocator:
    def empty(self, size: Any, dtype: Any) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)


@pytest.mark.parametrize("collective", [DefaultAllGather, DefaultReduceScatter])
@pytest.mark.parametrize(
    ("choice", "value", "message"),
    [
        ("transport", _NoInPlace(), r"_NoInPlace, which is no Transport: its in_place is None"),
        ("transport", _NoReduction(), r"no usable reduce_scatter\(output, input, process_group"),
        ("transport", _ShortGather(), r"no usable all_gather\(output, .*, async_op\)\. Add"),
        ("transport", _Transport, r"the class _Transport; Transport must be an instance"),
        ("allocator", _PositionalAllocator(), r"no Allocator: .* empty\(size, \*, dtype, device\)"),
    ],
)
def test_a_choice_that_lacks_a_member_is_refused_by_name(
    collective: Any, choice: str, value: object, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        collective(**{choice: value})


class _Doubles:
    def empty(self, size: Any, *, dtype: Any, device: Any) -> torch.Tensor:
        return torch.empty(2 * size[0], dtype=dtype, device=device)


class _Promises:
    def empty(self, size: Any, *, dtype: Any, device: Any) -> torch.Tensor:
        return None  # type: ignore[return-value]


class _SaysTrue(ProcessGroupTransport):
    """Does its work, and then answers what is no work handle."""

    def all_gather(self, *arguments: Any, **options: Any) -> Any:
        super().all_gather(*arguments, **options)
        return True

    def reduce_scatter(self, *arguments: Any, **options: Any) -> Any:
        super().reduce_scatter(*arguments, **options)
        return True


@distributed(2)
@pytest.mark.parametrize(
    ("choices", "error", "message"),
    [
        ({"allocator": _Doubles()}, ValueError, r"allocate \(its _Doubles\.empty\) gave \(\d+,\)"),
        ({"allocator": _Promises()}, TypeError, r"\(its _Promises\.empty\) gave a NoneType"),
        ({"transport": _SaysTrue()}, TypeError, r"_SaysTrue gave True; it must give None once"),
    ],
)
def test_a_choice_that_answers_wrongly_is_named_on_every_rank(
    choices: dict[str, Any], error: type[Exception], message: str
) -> None:
    group = world()
    spec = TensorSpec(shape=(8,), dtype=torch.float32)
    with pytest.raises(error, match=message):
        all_gather_tensors([torch.ones(4)], [spec], group, comm=DefaultAllGather(**choices))
    with pytest.raises(error, match=message):
        reduce_scatter_tensors([torch.ones(8)], [spec], group, comm=DefaultReduceScatter(**choices))


class _Parts:
    """A reducer without packing that answers what is no work handle."""

    def reduce_parts(self, *arguments: Any) -> Any:
        return "ok"


class _CapableButWrong(ProcessGroupTransport):
    """Offers more than a transport must, and answers wrongly there."""

    def parts_reducer(self, process_group: Any, device: Any, op: Any) -> Any:
        return _Parts()


@distributed(2)
def test_a_capability_that_answers_wrongly_is_named() -> None:
    spec = TensorSpec(shape=(8,), dtype=torch.float32)
    reduce = DefaultReduceScatter(transport=_CapableButWrong())
    with pytest.raises(TypeError, match=r"^_Parts gave 'ok'"):
        reduce_scatter_tensors([torch.ones(8)], [spec], world(), comm=reduce)


class _SaysOkay(DefaultAllGather):
    """As ``_SaysTrue``, by a method of its own; the transport is blameless."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        super().__call__(*arguments, **options)
        return "ok"


@distributed(2)
def test_a_subclass_that_answers_wrongly_is_named_and_not_its_transport() -> None:
    group, spec = world(), TensorSpec(shape=(8,), dtype=torch.float32)
    with pytest.raises(TypeError, match=r"^_SaysOkay gave 'ok'"):
        all_gather_tensors([torch.ones(4)], [spec], group, comm=_SaysOkay())


@distributed(2)
def test_lists_travel_through_the_collective_that_is_handed_in() -> None:
    group = world()
    spec = TensorSpec(shape=(3,), dtype=torch.float32)
    sent: list[str] = []

    class Recording(ProcessGroupTransport):
        def all_gather(self, *arguments: Any) -> Any:
            sent.append("gather")
            return super().all_gather(*arguments)

        def reduce_scatter(self, *arguments: Any) -> Any:
            sent.append("reduction")
            return super().reduce_scatter(*arguments)

    whole = torch.tensor([1.0, 2.0, 3.0])
    mine = whole.tensor_split(2)[group.rank()]
    gather, reduction = (
        DefaultAllGather(transport=Recording()),
        DefaultReduceScatter(transport=Recording()),
    )
    (gathered,) = all_gather_tensors([mine], [spec], group, comm=gather)
    (mean,) = reduce_scatter_tensors([whole], None, group, comm=reduction)
    assert torch.equal(gathered, whole)
    assert torch.equal(mean, mine)
    assert sent == ["gather", "reduction"]


def test_lists_refuse_what_is_no_collective() -> None:
    with pytest.raises(TypeError, match="no AllGather"):
        all_gather_tensors([], [], None, comm=DefaultReduceScatter())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no ReduceScatter"):
        reduce_scatter_tensors([], None, None, comm=DefaultAllGather())  # type: ignore[arg-type]
