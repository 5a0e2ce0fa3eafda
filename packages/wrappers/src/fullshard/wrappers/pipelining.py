"""Stages for the schedules of ``torch.distributed.pipelining``, with sharded modules in them.

``PipelineStage`` takes the place of torch's. torch's own looks for torch's ``FSDPModule``, and
takes a module of ours for an ordinary one. ``HeldStep`` does the work; schedules and
the exchange of activations stay torch's.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import pipelining

from fullshard.sharding.spi import sharded_of
from fullshard.wrappers.compat import defers_gradients
from fullshard.wrappers.held_step import HeldStep

__all__ = ["PipelineStage"]


class PipelineStage(pipelining.PipelineStage):
    """A pipeline stage whose module may be sharded by ``fully_shard``, in whole or in parts.

    Works with each schedule of torch, also with those that split backward. In a step each parameter
    group is gathered once and reduced once. Therefore the stage stays gathered from its first
    forward until its gradients are reduced. Actions of a schedule that unshard or reshard do
    nothing. ``set_requires_gradient_sync`` controls the reduction of gradients, and
    ``set_reshard_after_backward`` the resharding of the module.
    ``schedule.step(finalize_gradients=False)``, which torch has since 2.15, leaves the reduction to
    the next step. Arguments are those of torch's stage, which this is for a module without any
    sharded one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take the arguments of torch's stage."""
        super().__init__(*args, **kwargs)
        self._step: HeldStep | None = None
        self._is_sharded = self._is_deferred = False
        self._forwards = 0

    def clear_runtime_states(self) -> None:
        """Begin a step, or continue one that was deferred: schedules call this first."""
        super().clear_runtime_states()
        self._forwards = 0
        if self._is_deferred:  # an evaluation leaves it so
            self._is_deferred = not self.has_backward
            return
        if self._step is not None:  # the last one raised
            step, self._step = self._step, None
            step.abandon()
        step = HeldStep(self.submod, has_backward=self.has_backward)
        self._is_sharded = bool(step.groups)
        self._step = step

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a micro-batch; without backwards, the last one ends the step."""
        output = super().forward_one_chunk(*args, **kwargs)
        self._forwards += 1
        evaluated = not self.has_backward and self._forwards == len(self.args_recv_info)
        if evaluated and not self._is_deferred:
            self._release()
            self._land()
        return output

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce the gradients of all micro-batches, and divide them by ``grad_scale_factor``.

        A schedule may defer this to its next step. The parameters then stay gathered.
        """
        if self._is_sharded and self._has_gradients and defers_gradients():
            self._is_deferred = True
            return
        self._release()
        self._land()
        if self._has_gradients:
            super().perform_reduce_grad(grad_scale_factor)

    def start_gradient_reduction(self) -> None:
        """Launch the reductions; ``wait_for_gradient_reduction`` follows.

        torch's stage has both methods since 2.15. Its schedules call them for torch's own sharded
        modules only.
        """
        self._release()

    def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
        """Wait for the reductions, and divide the gradients by ``grad_scale_factor``."""
        self._land()
        if self._has_gradients:
            self.scale_grads(grad_scale_factor)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide the gradients, of sharded parameters those of the shards."""
        if grad_scale_factor == 1:
            return
        for param in self.submod.parameters():
            grad = sharded_of(param).grad
            if grad is not None:
                grad.div_(grad_scale_factor)

    @property
    def _has_gradients(self) -> bool:
        """Whether torch may scale gradients: an evaluation would scale the gradients of a step."""
        return bool(self.has_backward) or not self._is_sharded

    def _release(self) -> None:
        if self._step is not None:
            self._step.release()

    def _land(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.wait()
