"""Tensor subclasses with hooks around their gather, as users of ``fully_shard`` write them.

Owns one that travels as 16-bit numbers, one that travels as small integers and a scale, hooks in
both signatures for torch's ``TwoTensor``, whose unsharded tensor is made of what was gathered, and
a log of the calls. None knows which engine calls it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor

CALLS: list[tuple[Any, ...]] = []


def calls_of_hooks() -> list[tuple[Any, ...]]:
    """Every call of a hook of ``BFloat16Travel`` in this process since this was last asked for."""
    calls = list(CALLS)
    CALLS.clear()
    return calls


class Wrapped(torch.Tensor):
    """A tensor that wraps a plain one and behaves like it, in its own class."""

    _data: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Wrapped:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), dtype=data.dtype, device=data.device
        )
        made._data = data
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks the function
        cls, func: Any, types: Any, args: Any, kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(cls, lambda each: each._data, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, cls, func(*args, **kwargs))

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes an argument of its own
        return f"{type(self).__name__}({self._data})"


class BFloat16Travel(Wrapped):
    """Gathered in bfloat16, used in the dtype of the parameter."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        CALLS.append(("pre", mesh.size(), mesh.ndim, outer_size, outer_stride, type(module)))
        rows = -(-outer_size[0] // mesh.size())  # as torch asks: the size that all ranks have
        padded = self._data.new_zeros(rows, *outer_size[1:], dtype=torch.bfloat16)
        padded[: self._data.size(0)] = self._data
        return (padded,), "said before"

    @torch.no_grad()
    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        shapes = [(each.shape, each.dtype) for each in outputs]
        CALLS.append(("post", shapes, metadata, param_dtype, out is not None))
        (gathered,) = outputs
        if out is not None:
            filled = out._local_tensor if isinstance(out, DTensor) else out
            with _unsafe_preserve_version_counter(filled):
                filled.copy_(gathered[: filled.size(0)])
            return None
        used = gathered.to(param_dtype)
        return used, (gathered, used)


class Int8Travel(Wrapped):
    """Gathered as whole numbers and one scale per rank: two tensors of other dtypes and shapes."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        scale = self._data.abs().amax().reshape(1) / 127
        whole = (self._data / scale).round().to(torch.int8)
        return (whole, scale), whole.size(0)

    @torch.no_grad()
    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        whole, scales = outputs
        used = (whole.view(len(scales), metadata, -1) * scales.view(-1, 1, 1)).to(param_dtype)
        used = used.view(whole.shape)
        if out is not None:
            with _unsafe_preserve_version_counter(out):
                out.copy_(used)
            return None
        return used, (used,)


# -- torch's TwoTensor ----------------------------------------------------------------------------


def _pre_mesh_only(self: Any, mesh: Any) -> Any:
    return (self.a, self.b), None


def _pre_all(
    self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
) -> Any:
    return (self.a, self.b), None


def _post(
    self: Any, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
) -> Any:
    a, b = outputs
    if out is None:
        return TwoTensor(a, b).to(param_dtype), (a, b)
    if a.dtype == param_dtype:  # it is made of what was gathered
        assert a.untyped_storage().data_ptr() == out.a.untyped_storage().data_ptr()
        assert b.untyped_storage().data_ptr() == out.b.untyped_storage().data_ptr()
    else:
        out.a.copy_(a)
        out.b.copy_(b)
    return None


@contextmanager
def two_tensors_hooked(*, mesh_only: bool = False) -> Iterator[None]:
    """While it lasts, every ``TwoTensor`` has hooks, of the short signature or the long one."""
    before = _pre_mesh_only if mesh_only else _pre_all
    with (
        mock.patch.object(TwoTensor, "fsdp_pre_all_gather", before, create=True),
        mock.patch.object(TwoTensor, "fsdp_post_all_gather", _post, create=True),
    ):
        yield


def two_tensors(tensor: torch.Tensor) -> TwoTensor:
    """The tensor, and beside it one that is twice as large."""
    made: TwoTensor = TwoTensor(tensor.detach().clone(), tensor.detach() * 2)
    return made
