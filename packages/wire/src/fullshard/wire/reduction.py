"""Reductions whose parts travel narrow and are added wide.

Owns: the positions of narrow parts or codes and of the used-parameter mask, the all-to-all that
carries both, and their addition in rank order. The result equals a sum of rounded parts in the
layout's dtype; it is never rounded to what travelled. Operation and mask are computed here, so they
are the same for every backend. Refuses: choosing what travels (see ``policy``).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from fullshard.comm import (
    DefaultReduceScatter,
    Layout,
    ReduceConfig,
    ReduceOp,
    ReduceScaling,
    TensorSpec,
)
from fullshard.comm.spi import (
    Buffer,
    ReducePlan,
    Route,
    SeveralWorks,
    all_to_all,
    op_name,
    pack_gradients,
    rank_major,
    shard_views,
    traits_of,
)
from fullshard.wire.blocks import BlockSpec

__all__ = ["WidenedReducePlan", "add_widened", "sum_widened"]

_BLOCK = 1 << 18  # numbers that are widened and added at once: see ``_TILE`` of ``blocks``


class WidenedReducePlan(ReducePlan):
    """Reductions whose gradients travel in forms of their own; used as a ``ReducePlan``.

    ``launch(gradients).wait()`` gives this rank's shards of the sum, in the dtype of ``layout``.

    Attributes:
        sent: the layout of the parts on the wire.
    """

    def __init__(self, layout: Layout, forms: Sequence[TensorSpec], config: ReduceConfig) -> None:
        """Compute all positions.

        Args:
            layout: of the result, as for ``foreach_reduce``.
            forms: per tensor of it what travels: the same shape and dim in another dtype, or its
                code.
            config: ranks, streams, scaling; the collective gives the buffers.

        Raises:
            ValueError: if the layout cannot be reduced or does not fit the process group, a form
                has another shape or dim, the operation is no sum or average, or the user set the
                collective.
        """
        super().__init__(layout, config)
        _check(layout, forms, config)
        world = layout.world_size
        # The mask is one more tensor, with a row for each rank, in the dtype of the sum.
        mask = TensorSpec(shape=(world, layout.mask_numel), dtype=layout.buffer.dtype)
        # Layouts are cached: residuals must not live as long.
        laid = [replace(f, residual=None) if isinstance(f, BlockSpec) else f for f in forms]
        self.sent = rank_major((*laid, mask) if layout.mask_numel else tuple(laid), world)
        self._coded = {
            place: form for place, form in enumerate(forms) if isinstance(form, BlockSpec)
        }

    def _find_route(self) -> Route:
        """Return the all-to-all, without a reference to this plan, which would keep residuals."""
        return Route(partial(type(self)._exchange, weakref.proxy(self)))

    def _pack(
        self, packed: Buffer, gradients: Sequence[torch.Tensor | None], scaling: ReduceScaling
    ) -> None:
        """Fill what is sent: narrow parts and the mask, and codes."""
        pack_gradients(packed, [*gradients, *self._used(gradients)], scaling, self._coded)
        for place, form in self._coded.items():
            gradient = gradients[place]
            if gradient is None:  # zeros, which are the code of zeros
                continue
            given = gradient * scaling.pre if scaling.scales_before else gradient
            for codes in packed.pieces[place]:
                form.encode_gradient(given, codes, self._rank, scaling.pre)

    def _used(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Return the mask to send: a row for each rank, all alike; nothing without a mask."""
        if not self.layout.mask_numel:
            return []
        rows, used = self.layout.world_size, self.config.scaling.used
        mask = torch.full((rows, len(gradients)), used, device=self.config.device)
        for index, gradient in enumerate(gradients):
            if gradient is None:
                mask[:, index] = 0.0
        return [mask]

    def _exchange(
        self,
        output: torch.Tensor,
        sent: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool,
    ) -> dist.Work | None:
        """Every rank's parts for this one, in flight; they are added once they are waited for."""
        config = self.config
        arrived = config.source.take(config.collective, self.sent, self._rank, config.device)
        work = all_to_all(arrived.tensor, sent, group, async_op)

        def finish() -> None:
            with torch.no_grad(), torch.inference_mode(output.is_inference()):
                self._add(arrived.all_slices, output)
            config.source.release(arrived, config.streams, config.streams.reduce)

        if work is not None:
            return SeveralWorks((work,), finish)
        finish()
        return None

    def _add(self, arrived: Sequence[torch.Tensor], output: torch.Tensor) -> None:
        """Fill ``output`` with the sum, or average, of the slices that came from each rank."""
        by_rank = [shard_views(part, self.sent, self._rank) for part in arrived]
        targets = list(self.shards_in(output).shards)
        if self.layout.mask_numel:
            targets.append(output[self.mask])
        for place, (target, *parts) in enumerate(zip(targets, *by_rank, strict=True)):
            flat = [part.view(-1) for part in parts]
            if place in self._coded:
                self._coded[place].add(flat, target, self._rank)
            else:
                add_widened(flat, target.view(-1))
        if op_name(self.config.scaling.op) == "avg":
            output.div_(len(arrived))


@torch.no_grad()
def sum_widened(output: torch.Tensor, sent: torch.Tensor, process_group: dist.ProcessGroup) -> None:
    """Fill ``output`` (``[n]``) with the sum over ranks of this rank's part of ``sent``.

    Args:
        output: in whose dtype parts are added, in rank order.
        sent: ``[world * n]``, in the dtype that travels.
        process_group: the ranks.

    Raises:
        ValueError: if the sizes do not fit.
    """
    if sent.numel() != process_group.size() * output.numel():
        raise ValueError(
            f"got {sent.numel()} elements to send and an output of {output.numel()} for "
            f"{process_group.size()} ranks; send the output times the ranks"
        )
    arrived = torch.empty_like(sent)
    all_to_all(arrived, sent, process_group, False)
    add_widened(arrived.view(process_group.size(), -1).unbind(), output)


def add_widened(parts: Sequence[torch.Tensor], output: torch.Tensor) -> None:
    """Fill ``output`` (``[n]``) with the sum of ``parts``, each ``[n]``, widened to its dtype.

    In the order of ``parts``: the result depends only on that order.
    """
    numel = output.numel()
    size = numel if traits_of(output.device).queued else min(numel, _BLOCK)
    wide = torch.empty(size, dtype=output.dtype, device=output.device)
    for start in range(0, numel, max(size, 1)):
        length = min(size, numel - start)
        total = output.narrow(0, start, length)
        total.copy_(parts[0].narrow(0, start, length))
        for part in parts[1:]:
            total.add_(wide.narrow(0, 0, length).copy_(part.narrow(0, start, length)))


def _check(layout: Layout, forms: Sequence[TensorSpec], config: ReduceConfig) -> None:
    name = f"{config.name}: " if config.name else ""
    wanted = [(spec.shape, spec.dim) for spec in layout.specs]
    if [(form.arrives_as.shape, form.arrives_as.dim) for form in forms] != wanted:
        raise ValueError(
            f"{name}got forms {list(forms)} for tensors of shapes and dims {wanted}; pass one for "
            "each, of the same shape and dim: dataclasses.replace(spec, dtype=...)"
        )
    if op_name(config.scaling.op) not in ("sum", "avg"):
        raise ValueError(
            f"{name}got the reduction {op_name(config.scaling.op)}; what travels narrow is summed "
            "or averaged: use ReduceOp.SUM"
        )
    if not isinstance(config.comm, DefaultReduceScatter):
        raise ValueError(
            f"{name}gradients are to travel as {forms[0].form} and to be added here, but "
            f"{type(config.comm).__name__} is a reduce-scatter of your own, which moves and adds "
            "them; leave one of the two away"
        )
