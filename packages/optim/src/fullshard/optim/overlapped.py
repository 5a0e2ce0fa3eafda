"""An optimizer that steps on the CPU beside backward, a group at a time.

``OverlappedStep`` wraps an elementwise optimizer. In a backward under ``overlap()`` a group is
stepped by a thread as soon as its gradients are reduced; ``step()`` waits for the thread and steps
the rest. torch offers the same for one process as hooks after accumulation, without clipping,
accumulation or errors on all ranks. ``early_gradients`` puts gradients in place.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fullshard.optim import clip_grad_norm_, grad_norm
from fullshard.optim.base.parts import Part, SteppedGradients, scale_gradients
from fullshard.optim.base.stepped import label_of
from fullshard.optim.base.wrapping import (
    WrappingOptimizer,
    error_of_any_rank,
    params_of,
    part_of,
    take_over,
)
from fullshard.optim.early_gradients import early_gradients
from fullshard.optim.steps.rules import steps_on_plain
from fullshard.sharding import rebind_optimizer
from fullshard.sharding.spi import (
    Comparison,
    sharded_of,
    untraced,
)

__all__ = ["OverlappedStep", "OverlappedStepError"]

_MOST_KEPT = 4096  # parts
_EPSILON = 1e-6  # as in clip_grad_norm_

_WORDS = Comparison(
    what="steps beside backward",
    error="a step beside backward failed: ",
    mismatch="a step beside backward failed: ",
    advice="",
)
_RELOAD = "part of the parameters were stepped; load the last checkpoint"


class OverlappedStepError(RuntimeError):
    """A step beside backward failed on some rank; raised on every rank of the model."""


@dataclass(eq=False)
class _InFlight:
    """The steps of one backward, until ``step()``.

    Attributes:
        scale: the factor of the gradients; None: they stay as they are.
        arrived: parameters whose gradients are in place and that are not stepped yet.
        stepped: the parameters of all parts.
        gradients: those of the parts that are stepped.
        parts: what was stepped.
        steps: the steps on the thread, in order.
        raised: whether the backward raised.
    """

    scale: torch.Tensor | None
    arrived: list[torch.Tensor] = field(default_factory=list)
    stepped: set[torch.Tensor] = field(default_factory=set)
    gradients: list[SteppedGradients] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    steps: list[Future[None]] = field(default_factory=list)
    raised: bool = False


class OverlappedStep(WrappingOptimizer):
    """An optimizer that steps each group on the CPU when its gradients are reduced.

    Run the last backward of a step inside ``with optimizer.overlap():``, then call ``step()``. The
    parameters are on the CPU: those of CPU ranks, or under ``CPUOffloadPolicy()``. The result
    equals that of ``optimizer`` to the bit. Without ``overlap()`` a step is an ordinary one.

    Attributes:
        optimizer: the wrapped optimizer.
        total_norm: the norm of all gradients before clipping, of the last step; None without
            ``max_norm``. State dicts do not have it: to go on to the bit with ``norm="previous"``,
            save it too, and assign it after ``load_state_dict``.

    Args:
        optimizer: an elementwise optimizer of ``torch.optim``, such as AdamW or SGD.
        model: the model whose parameters ``optimizer`` has, all or a part.
        max_norm: clip the gradients of ``model`` to this norm. Do not clip them yourself: they may
            be stepped before backward ends. If other optimizers step parameters of ``model``, step
            them after this one.
        norm: with ``max_norm``, whose norm decides. ``"exact"``: that of these gradients, as
            ``clip_grad_norm_`` does, so that steps wait for the end of backward. ``"previous"``:
            that of the last step's gradients, so that steps begin in backward. The first step, and
            a step after a norm that is zero or not finite, use the exact norm.

    Raises:
        TypeError: if the optimizer is not elementwise, or another argument is of the wrong type.
        ValueError: if ``max_norm`` is not positive or ``norm`` is neither word.
    """

    _no_copy = "its steps belong to a thread of this process"

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        max_norm: float | None = None,
        norm: Literal["exact", "previous"] = "exact",
    ) -> None:
        """Wrap ``optimizer``."""
        _require_elementwise(optimizer)
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"model is a {type(model).__name__}; pass the nn.Module that is trained"
            )
        _require_norm(max_norm, norm)
        super().__init__(optimizer)
        self.total_norm: torch.Tensor | None = None
        self._model = model
        self._max_norm = max_norm
        self._norm = norm
        self._in_flight: _InFlight | None = None
        self._kept: dict[tuple[int, ...], Part] = {}
        self._thread: ThreadPoolExecutor | None = None

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:  # type: ignore[override] # an attribute
        """The state of the wrapped optimizer. Waits for steps on the thread."""
        self._wait()
        return self.optimizer.state

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the wrapped optimizer."""
        self._wait()
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict()`` of the wrapped optimizer; the next step uses its exact norm."""
        self._wait()
        self.optimizer.load_state_dict(state_dict)
        self._in_flight = self.total_norm = None
        self._kept.clear()

    # -- backward ---------------------------------------------------------------------------------

    @contextmanager
    def overlap(self) -> Iterator[None]:
        """Step groups beside the backward that runs in the block: the last one before ``step()``.

        Between the block and ``step()`` part of the parameters are stepped: evaluate or save the
        model after ``step()``. Gradients or options that change in between are an error of
        ``step()``. A backward that raises leaves some groups stepped: then ``step()`` raises until
        a state dict is loaded. The graph must not be used for a second backward.

        Raises:
            RuntimeError: if ``step()`` was not called since the last block, or raised.
            ValueError: if parameters of the model are not on the CPU.
        """
        if self._in_flight is not None:
            raise RuntimeError(
                "overlap() was entered twice for one step; put the last backward of a step in the "
                "block, and call step() after it. After an error of the block or of step(), load "
                "the last checkpoint"
            )
        if self._waits_for_norm():
            yield
            return
        rebind_optimizer(self.optimizer)
        _require_elementwise(self.optimizer)
        begun = self._in_flight = _InFlight(self._scale())
        try:
            with early_gradients(self._model, self._submit), self._watch(begun):
                yield
            self._submit()
        except BaseException:
            begun.raised = bool(begun.steps)
            self._in_flight = begun if begun.raised else None
            raise
        finally:
            self._wait()  # what follows may read and change gradients

    def _waits_for_norm(self) -> bool:
        """Return whether the next step needs the norm of its own gradients."""
        if self._max_norm is None:
            return False
        if self._norm == "exact" or self.total_norm is None:
            return True
        known = self.total_norm.item()
        # torch's get_state_dict steps with gradients of zeros, to make the state
        return known == 0 or not math.isfinite(known)

    def _scale(self) -> torch.Tensor | None:
        if self._max_norm is None or self.total_norm is None:
            return None
        return (self._max_norm / (self.total_norm + _EPSILON)).clamp(max=1.0)

    @contextmanager
    def _watch(self, begun: _InFlight) -> Iterator[None]:
        """Note the parameters whose gradients arrive in the block."""
        params = [param for group in self.param_groups for param in group["params"]]
        hooks = [
            param.register_post_accumulate_grad_hook(begun.arrived.append)
            for param in params
            if isinstance(param, DTensor) and param.requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _submit(self) -> None:
        """Step the parameters whose gradients arrived, on the thread."""
        begun = self._in_flight
        assert begun is not None, "gradients are watched in the block only"
        if not begun.arrived:
            return
        arrived, begun.arrived[:] = list(begun.arrived), []
        again = [label_of(param) for param in arrived if param in begun.stepped]
        if again:
            raise RuntimeError(
                f"{', '.join(again)} got a gradient after its step; run the backward without "
                "overlap() where a group is reduced twice"
            )
        part = self._part_with(arrived)
        begun.parts.append(part)
        begun.stepped.update(arrived)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="fullshard-step")
            weakref.finalize(self, self._thread.shutdown, wait=False)
        begun.steps.append(self._thread.submit(self._step_part, part, begun))

    def _part_with(self, params: Sequence[torch.Tensor]) -> Part:
        """Return what steps ``params``, with the options and the state of now."""
        key = tuple(map(id, params))
        wanted = set(key)
        bucket = {
            index: found
            for index, group in enumerate(self.param_groups)
            if (found := [each for each in group["params"] if id(each) in wanted])
        }
        part = self._kept.get(key)
        if part is None:
            if len(self._kept) == _MOST_KEPT:  # of batches that differ in each step
                self._kept.clear()
            part = self._kept[key] = Part(bucket, part_of(self.optimizer, bucket))
        part.refresh(self.optimizer, bucket)
        return part

    @torch.no_grad()
    @untraced
    def _step_part(self, part: Part, begun: _InFlight) -> None:
        """Step some parameters beside backward."""
        part.step(begun.scale)
        begun.gradients.append(SteppedGradients(params_of(part.bucket)))

    def _wait(self) -> None:
        """Wait for the steps on the thread, whatever they raise."""
        for step in () if self._in_flight is None else self._in_flight.steps:
            step.exception()

    # -- the step ---------------------------------------------------------------------------------

    @Optimizer.profile_hook_step
    @torch.no_grad()
    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the steps beside backward, and step all other parameters.

        Args:
            closure: computes the loss and its gradients; called once, before the step.

        Returns:
            The result of the closure, or None.

        Raises:
            OverlappedStepError: on every rank of the model, if a step beside backward failed on
                some rank.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        begun = self._in_flight
        overlapped = begun is not None
        if begun is None:
            begun = self._begin_without_overlap()
        error, cause = self._finish(begun)
        if overlapped:
            error = error_of_any_rank(error, self.param_groups, _WORDS)
        if error:
            raise OverlappedStepError(error) from cause
        self._in_flight = None
        if begun.scale is not None:
            mine = {param for group in self.param_groups for param in group["params"]}
            params = map(sharded_of, self._model.parameters())
            others = (param for param in params if param not in mine)
            scale_gradients(others, begun.scale)
            self.total_norm = grad_norm(self._model).cpu() / begun.scale
        return loss

    def _begin_without_overlap(self) -> _InFlight:
        """Return a step of all parameters at once; their gradients are clipped, or are to be."""
        if not self._waits_for_norm():
            return _InFlight(self._scale())
        assert self._max_norm is not None, "only clipping waits for a norm"
        self.total_norm = clip_grad_norm_(self._model, self._max_norm).cpu()
        return _InFlight(None)

    def _finish(self, begun: _InFlight) -> tuple[str, BaseException | None]:
        """Step what is left, and return the error of this rank with its cause."""
        errors = [error for each in begun.steps if (error := each.exception()) is not None]
        if begun.raised:
            return f"the backward in overlap() raised, and {_RELOAD}", None
        if errors:
            return f"{type(errors[0]).__name__}: {errors[0]}; {_RELOAD}", errors[0]
        changed = ", ".join(filter(None, (each.changed() for each in begun.gradients)))
        if changed:
            text = f"the gradients of {changed} changed after they were stepped"
            advice = "do not clip or unscale them, pass max_norm to OverlappedStep"
            return f"{text}; {advice}; {_RELOAD}", None
        options = set().union(*(each.changed_options(self.optimizer) for each in begun.parts))
        if options:
            text = f"the options {', '.join(sorted(options))} changed after they were stepped with"
            return f"{text}; change them before the block, or after step(); {_RELOAD}", None
        params = [param for group in self.param_groups for param in group["params"]]
        rest = [each for each in params if each.grad is not None and each not in begun.stepped]
        if rest:
            begun.parts.append(self._part_with(rest))
            begun.parts[-1].step(begun.scale)
        found: dict[torch.Tensor, Any] = {}
        for part in begun.parts:
            take_over(self.optimizer, part.bucket, part.optimizer)
            found.update(part.optimizer.state)
        for param in params:  # in this order, as by the wrapped optimizer
            if param in found:
                self.optimizer.state[param] = found[param]
        return "", None


def _require_elementwise(optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; pass a torch.optim.Optimizer")
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not steps_on_plain(type(optimizer), params):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; steps beside backward need an elementwise "
            "optimizer of torch.optim itself, such as AdamW or SGD"
        )


def _require_norm(max_norm: object, norm: object) -> None:
    number = isinstance(max_norm, (int, float)) and not isinstance(max_norm, bool)
    if max_norm is not None and not number:
        raise TypeError(f"max_norm is {max_norm!r}; pass a number, or None")
    if max_norm is not None and not max_norm > 0:  # type: ignore[operator] # a number
        raise ValueError(f"max_norm is {max_norm}; pass a positive number, or None")
    if norm not in ("exact", "previous"):
        raise ValueError(f'norm is {norm!r}; pass "exact" or "previous"')
