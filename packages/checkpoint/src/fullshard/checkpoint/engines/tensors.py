"""The tensors of an engine: what each is made of, and its layout on the ranks of a model.

Owns the names in the engine, which are those that ``save_safetensors`` would write, and the way
from full parameters to tensors of these names. Buffers are no tensors of an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.boxes import Box
from fullshard.checkpoint.engines.layouts import Layout, layouts_of
from fullshard.checkpoint.names import ParamNames
from fullshard.checkpoint.process_groups import ranks_of
from fullshard.checkpoint.weights.layout import FileTensor, planned_tensors
from fullshard.checkpoint.weights.matching import Rename, naming_of
from fullshard.checkpoint.weights.report import listed
from fullshard.checkpoint.weights.tensors import ModelTensor, tensors_of

__all__ = ["EngineTensors", "ranks_of_model", "require_module"]


def require_module(model: object) -> None:
    """Return if ``model`` is a module.

    Raises:
        TypeError: if not.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; pass an nn.Module")


def ranks_of_model(
    params: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None
) -> list[int]:
    """Return all global ranks of a model, sorted: those of its meshes.

    Without a mesh they are the ranks of ``group``; without both, all ranks of the job.
    """
    if found := ranks_of(params):
        return sorted(found)
    if group is not None:
        return sorted(dist.get_process_group_ranks(group))
    initialised = dist.is_available() and dist.is_initialized()
    return [*range(dist.get_world_size())] if initialised else [0]


def _outline(param: torch.Tensor) -> object:
    """Return what of a parameter its layout depends on."""
    spread = isinstance(param, DTensor) and (param.device_mesh, tuple(param.placements))
    return param.shape, param.dtype, spread


class EngineTensors:
    """The parameters of a model under the names and in the shapes of an engine.

    Attributes:
        rank: this one's global number.
        ranks: all global ranks of the model, sorted.
        on_meshes: those that meshes name: none if no parameter is sharded or replicated by a mesh.
        dtype: in which floating tensors travel; None: their own.
        params: the model's parameters by their clean names, as an optimizer holds them.
        made: the tensors of the engine, each after the last parameter of which it is made.
        layouts: of each parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None,
        rename: Rename,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Plan; no value is read and nothing is sent.

        Args:
            model: in any sharding, or none.
            dtype: in which floating tensors travel; None: their own.
            rename: as for ``save_safetensors``.
            group: of all ranks of the model; None: those of its meshes, or all without a mesh.

        Raises:
            TypeError: if an argument is of the wrong type.
            ValueError: if the layout of a parameter is not known on all ranks.
            WeightsError: if rules do not fit the model, or placements are sums.
        """
        require_module(model)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dtype is {dtype!r}; pass a floating-point torch.dtype, or None")
        self.dtype = dtype
        self._model = model
        initialised = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if initialised else 0
        self._world = [*range(dist.get_world_size())] if initialised else [0]
        self.params = ParamNames(model, None).params
        self.on_meshes = sorted(ranks_of(self.params))
        self.ranks = ranks_of_model(self.params, group)
        self._tensors = self._found()
        made, _ = planned_tensors(self._tensors, naming_of(model, rename), dtype)
        made.sort(key=lambda tensor: max((at for at, _ in tensor.sources), default=0))
        self.made: Sequence[FileTensor] = made
        self.layouts: Mapping[str, Layout] = layouts_of(self.params, self.ranks)

    def _found(self) -> list[ModelTensor]:
        """Return the parameters in the order of ``params``; raise if one cannot be sent."""
        found = {each.name: each for each in tensors_of(self._model)}
        tensors = [found[name] for name in self.params]
        for each in tensors:
            each.check()
        return tensors

    def refresh(self) -> None:
        """Take the model's parameters of now, which may be other objects than before.

        Raises:
            ValueError: if the model has other parameters, or other layouts.
        """
        before = {name: _outline(param) for name, param in self.params.items()}
        params = ParamNames(self._model, None).params
        now = {name: _outline(param) for name, param in params.items()}
        if now != before or list(now) != list(before):
            changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
            raise ValueError(
                f"parameters of the model changed since the engine's tensors were planned: "
                f"{listed(changed or list(now))}; make a new weight source or SliceSender"
            )
        self.params = params
        self._tensors = self._found()

    @property
    def boxes(self) -> list[list[Box]]:
        """For each rank of the model, in order, its part of each parameter."""
        return [
            [self.layouts[each.name].boxes[rank] for each in self._tensors] for rank in self.ranks
        ]

    @property
    def sharded(self) -> list[bool]:
        """For each parameter, whether ranks share it."""
        return [each.sharded for each in self._tensors]

    @property
    def everyone(self) -> tuple[int, ...] | None:
        """The owners of what every rank of the model has; None: these are all ranks of the job."""
        return None if self.ranks == self._world else tuple(self.ranks)

    def param(self, position: int) -> ModelTensor:
        """Return a parameter by its position among the sources of tensors."""
        return self._tensors[position]

    def unchanged(self, tensor: FileTensor) -> ModelTensor | None:
        """Return the parameter that is ``tensor`` but for its name; None if there is none."""
        (position, piece), *others = tensor.sources
        param = self._tensors[position]
        whole = piece.in_param == piece.in_file == Box.whole(param.shape)
        same = whole and piece.dims == tuple(range(len(param.shape)))
        return param if same and not others else None

    def assembled(
        self, full: Iterable[tuple[str, torch.Tensor]], made: Sequence[FileTensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors ``made``, in order, out of full parameters, in order.

        A tensor that is one unchanged parameter is that parameter. Any other has its own memory.
        """
        position_of = {each.name: position for position, each in enumerate(self._tensors)}
        begun: dict[str, torch.Tensor] = {}
        last = [max((at for at, _ in each.sources), default=0) for each in made]
        done = 0
        users: dict[int, list[FileTensor]] = {}
        for tensor in made:
            for position in dict.fromkeys(position for position, _ in tensor.sources):
                users.setdefault(position, []).append(tensor)
        for name, value in full:
            here = position_of[name]
            for tensor in users.get(here, ()):
                if self.unchanged(tensor) is not None:
                    begun[tensor.name] = value
                    continue
                into = begun.setdefault(tensor.name, value.new_empty(tensor.shape))
                for position, piece in tensor.sources:
                    if position == here:
                        piece.in_file.of(into).copy_(piece.view(value, Box.whole(value.shape)))
            del value
            while done < len(made) and last[done] <= here:
                yield made[done].name, begun.pop(made[done].name)
                done += 1
