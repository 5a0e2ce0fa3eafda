"""Error feedback: what quantising loses of a gradient is added to the next one.

Each rank stores the difference between its own gradients and the decoded values of these gradients
(F. Seide et al., "1-Bit Stochastic Gradient Descent", 2014; S. P. Karimireddy et al., arXiv
1901.09847), so that over the steps all of a gradient arrives. Owns these residuals, in which scale
they are, and what a skipped step, a loaded state dict or a ``GradScaler`` makes of them. Refuses:
quantising.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["ErrorFeedback", "Residual", "ResidualUpdate"]

_DTYPES = (torch.bfloat16, torch.float32)
_Factor = float | torch.Tensor  # a number, or a 0-d tensor, which the host does not wait for


@dataclass(frozen=True, slots=True)
class ResidualUpdate:
    """Source and target of an encoding.

    Attributes:
        before: the residual, ``[numel]``.
        after: where the next one goes; it may be the same tensor.
        factor: multiplies what is read, since gradients are in another scale now.
    """

    before: torch.Tensor
    after: torch.Tensor
    factor: _Factor


@dataclass(slots=True)
class _Copy:
    """A residual.

    Attributes:
        numbers: ``[numel]``.
        unit: what the gradients were multiplied by of which it was left.
        scale: the ``GradScaler``'s part of that.
    """

    numbers: torch.Tensor
    unit: _Factor
    scale: _Factor


class ErrorFeedback:
    """Rounding errors of quantised gradients, kept on each rank and added to the next gradients.

    ``Quantised(torch.int8, feedback=ErrorFeedback())``. Every rank needs memory for all gradients
    that it sends, in full size: for 7e9 parameters 14 GB in bf16 and 28 GB in fp32; twice that once
    it follows an optimizer. See ``WirePolicy.feedback_nbytes``. Use one object for all policies of
    a model.

    A parameter without a gradient on this rank keeps its residual, and so does a block that holds
    infinity or NaN. A new process begins without: residuals are no part of a checkpoint.

    Attributes:
        dtype: the dtype in which residuals are kept.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        """Start with nothing.

        Args:
            dtype: what residuals are kept in: ``torch.bfloat16``, which rounds what was lost by a
                512th, or ``torch.float32``.

        Raises:
            ValueError: if it is another.
        """
        if dtype not in _DTYPES:
            raise ValueError(
                f"ErrorFeedback got the dtype {dtype!r}; pass torch.bfloat16 or torch.float32"
            )
        self.dtype = dtype
        self._scaler: Any = None
        self._follows = False
        self._residuals: weakref.WeakSet[Residual] = weakref.WeakSet()

    def __str__(self) -> str:
        """A short description: ranks compare it."""
        return f"error feedback in {self.dtype}"

    def __reduce__(self) -> tuple[type[ErrorFeedback], tuple[torch.dtype]]:
        """A copy keeps nothing, and follows no optimizer."""
        return (type(self), (self.dtype,))

    @property
    def nbytes(self) -> int:
        """Bytes that its residuals take on this rank; known from the model's first forward on.

        The first backward allocates the residuals.
        """
        return sum(residual.numel for residual in self._residuals) * self.bytes_each

    @property
    def bytes_each(self) -> int:
        """Bytes for each number that is sent."""
        return self.dtype.itemsize * (2 if self._follows else 1)

    def follow(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any = None
    ) -> None:
        """Keep residuals in step with an optimizer, at the price of a second copy of them.

        Call it before the first backward, for each optimizer of the model. Residuals of an unused
        step can then be restored: by a ``GradScaler`` that skips it, or by ``restore()``. Residuals
        are multiplied as the scaler's scale grows and shrinks. Residuals are dropped when the
        optimizer or a module of ``model`` loads a state dict.

        Args:
            model: whose gradients they are of.
            optimizer: torch's own object, not one that wraps it.
            scaler: the ``GradScaler`` that scales its loss, if there is one.

        Raises:
            TypeError: if an argument has another type.
            RuntimeError: if a backward came before.
        """
        if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"follow got a {type(model).__name__} and a {type(optimizer).__name__}; pass the "
                "model, a torch.optim.Optimizer, and its GradScaler, if there is one"
            )
        if scaler is not None and not callable(getattr(scaler, "scale", None)):
            raise TypeError(f"follow got the scaler {scaler!r}; pass a GradScaler, or None")
        if not self._follows and any(residual.kept for residual in self._residuals):
            raise RuntimeError("follow an optimizer before the first backward, not after it")
        self._follows = True
        self._scaler = scaler or self._scaler
        optimizer.register_step_post_hook(self._stepped)
        optimizer.register_load_state_dict_post_hook(self._loaded)
        for module in model.modules():
            module.register_load_state_dict_post_hook(self._loaded)

    def restore(self) -> None:
        """Restore the residuals of the last step of the followed optimizer.

        For gradients that are not used: of a step that your own check skips, or a backward that
        raised. Where a ``GradScaler`` skips a step it happens by itself. All ranks call it.
        """
        for residual in self._residuals:
            residual.restore()

    def drop(self) -> None:
        """Forget all residuals, as loading a state dict does. All ranks call it."""
        for residual in self._residuals:
            residual.drop()

    def residual(self, numel: int) -> Residual:
        """Return the residual of one tensor of ``numel`` elements: nothing yet."""
        made = Residual(numel, self)
        self._residuals.add(made)
        return made

    def scale_on(self, device: torch.device) -> _Factor:
        """Return what the scaler multiplies losses by, on ``device``; without one it is 1."""
        if self._scaler is None:
            return 1.0
        scaled: torch.Tensor = self._scaler.scale(torch.ones((), device=device))
        return scaled

    @property
    def follows(self) -> bool:
        """Whether it follows an optimizer, so that steps can be taken back."""
        return self._follows

    def _loaded(self, *_: object) -> None:
        self.drop()

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # A fused optimizer is called, and skips the step itself: the scaler leaves it this.
        found = getattr(optimizer, "found_inf", None)
        skipped = found is not None and bool(found)
        for residual in self._residuals:
            residual.restore() if skipped else residual.commit()


class Residual:
    """The rounding error of one tensor's gradients on this rank.

    Attributes:
        numel: elements of the tensor.
        kept: as of the last step, or as it is now, if no optimizer is followed; None: zeros.
        changed: as reductions since that step left it; None: there were none.
    """

    def __init__(self, numel: int, feedback: ErrorFeedback) -> None:
        """Start as zeros, which take no memory."""
        self.numel = numel
        self.kept: _Copy | None = None
        self.changed: _Copy | None = None
        self._feedback = feedback
        self._spare: torch.Tensor | None = None  # memory of a copy that is out of date

    def exchange(self, device: torch.device, pre: _Factor) -> ResidualUpdate:
        """Return what the encoding of one gradient reads and writes.

        Args:
            device: of the gradient.
            pre: what the gradient is multiplied by before it is encoded.
        """
        scale = self._feedback.scale_on(device)
        unit = scale * pre
        if self.kept is None or self.kept.numbers.device != device:
            self.drop()
            zeros = torch.zeros(self.numel, dtype=self._feedback.dtype, device=device)
            self.kept = _Copy(zeros, unit, scale)
        if not self._feedback.follows:
            before, was = self.kept.numbers, self.kept.unit
            self.kept = _Copy(before, unit, scale)
            return ResidualUpdate(before, before, unit / was)
        if self.changed is None:
            before, was = self.kept.numbers, self.kept.unit
            after = torch.empty_like(before) if self._spare is None else self._spare
            self._spare = None
        else:
            was = self._without_skipped(self.kept, self.changed, scale)
            before = after = self.changed.numbers
        self.changed = _Copy(after, unit, scale)
        return ResidualUpdate(before, after, unit / was)

    def commit(self) -> None:
        """Note a step that used the sent gradients."""
        if self.changed is not None and self.kept is not None:
            self._spare, self.kept, self.changed = self.kept.numbers, self.changed, None

    def restore(self) -> None:
        """Drop the reductions since the last step."""
        if self.changed is not None:
            self._spare, self.changed = self.changed.numbers, None

    def drop(self) -> None:
        """Reset to zeros."""
        self.kept = self.changed = self._spare = None

    @staticmethod
    def _without_skipped(kept: _Copy, changed: _Copy, scale: _Factor) -> _Factor:
        """Set ``changed`` to ``kept`` if its step was skipped; return its unit.

        A scaler calls no optimizer then, and lowers its scale, whereas gradients that are
        accumulated have one scale. On a device the host does not wait to know which it was.
        """
        skipped = scale < changed.scale
        if not isinstance(skipped, torch.Tensor):
            return changed.unit
        changed.numbers.lerp_(kept.numbers, skipped.to(changed.numbers.dtype))
        return torch.where(skipped, kept.unit, changed.unit)
