"""A model in training as the weight source of an inference engine, in the form of vLLM's interface.

Owns ``ModelSource``: metadata, full tensors, this rank's pieces, and the moment of the values.
``iter_full`` and ``iter_local`` copy values to the CPU when they are called. ``pin`` does so before
them, for an engine that iterates in a thread of its own.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.engines.metadata import ParamMeta, classes
from fullshard.checkpoint.engines.tensors import EngineTensors
from fullshard.checkpoint.streaming.background import check_params
from fullshard.checkpoint.streaming.shards import memory
from fullshard.checkpoint.streaming.stream import checked_targets, stream_of
from fullshard.checkpoint.weights.layout import FileTensor
from fullshard.checkpoint.weights.matching import Rename
from fullshard.sharding.spi import device_of_mesh, require_count

__all__ = ["ModelSource", "weight_source"]

_Named = Iterator[tuple[str, torch.Tensor]]


class ModelSource:
    """The weights of a model, for an engine on its ranks that sends them on.

    ``weight_source`` makes this object. The object has the methods of vLLM's ``WeightSource``; with
    vLLM installed, its class is a subclass of ``WeightSource``.
    """

    def __init__(
        self,
        tensors: EngineTensors,
        *,
        bucket_bytes: int,
        to: Sequence[int] | None,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Take checked arguments of ``weight_source``."""
        self._tensors = tensors
        self._bucket_bytes = bucket_bytes
        self._to = to
        self._device = device
        self._group = group
        self._lock = threading.Lock()
        self._pinned: dict[bool, _Named] = {}

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        """Every tensor of the engine, equal on all ranks; nothing is sent or gathered."""
        return [self._meta(tensor) for tensor in self._tensors.made]

    def owned_names(self, rank: int) -> list[str]:
        """Return what rank ``rank`` gets or has of the tensors, in the order of ``metadata``."""
        return [each.name for each in self.metadata if each.owners is None or rank in each.owners]

    def implements_iter_full(self) -> bool:
        """Return whether ``iter_full`` gives the tensors of ``metadata``: always."""
        return True

    def implements_iter_local(self) -> bool:
        """Return whether ``iter_local`` gives them: not where ``to`` names the owners."""
        return self._to is None

    def iter_full(self) -> _Named:
        """Return an iterator over names and whole tensors, as they are now or were at ``pin()``.

        Call it on every rank. On ranks outside ``to`` it is empty.

        Raises:
            RankMismatchError: if ranks disagree or a rank failed.
            RuntimeError: inside an ``unsharded`` block, or if a rank was lost.
            ValueError: if parameters have no values yet, or are not those of the metadata.
        """
        return self._take(local=False)

    def iter_local(self) -> _Named:
        """Return an iterator over names and this rank's pieces, as now or at ``pin(local=True)``.

        Call it on every rank. A tensor whose layout is not chunks of chunks in the order of axes,
        or that renaming puts together, is whole: its parts travel as in ``iter_full``.

        Raises:
            RankMismatchError: if ranks disagree or a rank failed.
            RuntimeError: inside an ``unsharded`` block, or if a rank was lost.
            ValueError: if parameters have no values yet, or are not those of the metadata, or the
                source was made with ``to``.
        """
        return self._take(local=True)

    def pin(self, *, local: bool = False) -> None:
        """Fix the values of the next ``iter_full`` to those of now; training may go on.

        Call it on every rank, between steps. The next iteration may then begin in any thread. A
        second ``pin`` before that takes the place of the first.

        Args:
            local: fix those of the next ``iter_local`` instead.
        """
        found = self._local() if local else self._full()
        with self._lock:
            self._pinned[local] = found

    def _take(self, *, local: bool) -> _Named:
        with self._lock:
            pinned = self._pinned.pop(local, None)
        if pinned is not None:
            return pinned
        return self._local() if local else self._full()

    # -- metadata ---------------------------------------------------------------------------------

    def _meta(self, tensor: FileTensor) -> ParamMeta:
        kinds, everyone = classes(), self._tensors.everyone
        given: dict[str, Any] = {}
        param = self._tensors.unchanged(tensor)
        layout = None if param is None else self._tensors.layouts[param.name]
        if self._to is not None:
            given = {"owners": tuple(self._to), "mesh_shape": (len(self._to),)}
        elif layout is not None and layout.owners is not None:
            given = {"owners": layout.owners, "mesh_shape": layout.mesh_shape}
            if layout.dims is not None:
                given["placements"] = kinds.placements(layout.dims)
        elif everyone is not None:
            given = {"owners": everyone, "mesh_shape": (len(everyone),)}
        meta: ParamMeta = kinds.meta(tensor.name, tensor.dtype, tensor.shape, **given)
        return meta

    # -- values -----------------------------------------------------------------------------------

    def _full(self) -> _Named:
        self._tensors.refresh()
        return self._placed(self._streamed(self._tensors.made))

    def _local(self) -> _Named:
        if self._to is not None:
            raise ValueError(
                f"the source was made with to={list(self._to)}, so other ranks own nothing; make "
                "one without to for iter_local()"
            )
        self._tensors.refresh()
        check_params(self._tensors.params, "iter_local()")
        kept: dict[str, torch.Tensor] = {}
        for tensor in self._tensors.made:
            param = self._tensors.unchanged(tensor)
            if param is not None and self._tensors.layouts[param.name].dims is not None:
                local = param.local
                kept[tensor.name] = memory(local.shape, tensor.dtype).copy_(local)
        whole = [tensor for tensor in self._tensors.made if tensor.name not in kept]
        gathered = self._streamed(whole) if whole else iter(())
        return self._placed(self._merged(kept, gathered))

    def _merged(self, kept: dict[str, torch.Tensor], gathered: _Named) -> _Named:
        for tensor in self._tensors.made:
            yield ((tensor.name, kept.pop(tensor.name)) if tensor.name in kept else next(gathered))

    def _streamed(self, made: Sequence[FileTensor]) -> _Named:
        """Start a stream of what ``made`` is made of, and return ``made`` as it comes."""
        alone = not self._tensors.on_meshes  # this rank has all
        if alone and self._to is not None and self._tensors.rank not in self._to:
            return iter(())
        used = {position for tensor in made for position, _ in tensor.sources}
        stream = stream_of(
            self._tensors.params,
            [self._tensors.param(position).name for position in sorted(used)],
            bucket_bytes=self._bucket_bytes,
            dtype=self._tensors.dtype,
            to=None if alone else self._to,
            group=self._group,
        )
        return self._tensors.assembled(stream, made)

    def _placed(self, named: Iterable[tuple[str, torch.Tensor]]) -> _Named:
        for name, tensor in named:
            yield name, tensor.to(self._device)


@functools.cache
def _source_class() -> type[ModelSource]:
    """Return ``ModelSource``, as a subclass of vLLM's ``WeightSource`` where that is installed."""
    theirs = classes().source
    if theirs is None:
        return ModelSource
    found: type[ModelSource] = type(ModelSource.__name__, (ModelSource, theirs), {})
    return found


def weight_source(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    rename: Rename = None,
    to: Sequence[int] | None = None,
    bucket_bytes: int = 64 * 2**20,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> ModelSource:
    """Return a weight source for the trainer engines of vLLM, or for those with its interface.

    Call this function on every rank, after the model is sharded. The ranks communicate in ``pin``,
    ``iter_full`` and ``iter_local`` only.

    Args:
        model: in any sharding, or none. Frozen parameters are sent, buffers are not, and a tied
            parameter is sent once, by its first name.
        dtype: in which floating tensors travel; None: that in which they are stored.
        rename: maps the model's names to the engine's names, as in ``save_safetensors``. None: a
            model of transformers has the names and shapes of ``save_pretrained``; any other model
            keeps its own names.
        to: the global ranks on which ``iter_full`` gives tensors; None: all ranks of the model. The
            NCCL engine of vLLM sends from rank 0 alone: ``[0]``.
        bucket_bytes: as for ``iter_full``.
        device: where an engine takes tensors from; None: the device of the model's mesh, or of a
            plain parameter.
        group: as for ``iter_full``.

    Returns:
        An object with ``metadata``, ``owned_names``, ``iter_full`` and ``iter_local`` as vLLM's
        ``WeightSource`` defines them. Where vLLM is installed, it is one, and metadata are vLLM's.

    Raises:
        TypeError: if an argument is of the wrong type.
        ValueError: if the layout of a parameter is not known on all ranks, or ranks in ``to`` have
            no part of the model.
        WeightsError: if rules do not fit the model, or placements are sums.
    """
    require_count("bucket_bytes", bucket_bytes)
    tensors = EngineTensors(model, dtype, rename, group)
    owners = None if to is None else checked_targets(to, {*tensors.ranks})
    return _source_class()(
        tensors,
        bucket_bytes=bucket_bytes,
        to=owners,
        device=_device_of(tensors) if device is None else torch.device(device),
        group=group,
    )


def _device_of(tensors: EngineTensors) -> torch.device:
    for param in tensors.params.values():
        return device_of_mesh(param.device_mesh) if isinstance(param, DTensor) else param.device
    return torch.device("cpu")
