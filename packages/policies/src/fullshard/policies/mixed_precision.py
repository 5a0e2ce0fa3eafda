"""Mixed precision: in what dtypes a module computes, reduces and talks.

Owns the answers to sharding's two questions of precision. The gather casts parameters: the gather
does, on the way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fullshard.policies.dtype_rules import DTypeRules, checked_dtype, checked_rules, first_match
from fullshard.sharding import FieldPrecision

__all__ = ["MixedPrecisionPolicy"]


@dataclass(frozen=True)
class MixedPrecisionPolicy(FieldPrecision):
    """Mixed precision for one sharded module, with torch's fields, defaults and meaning.

    The sharded parameters keep their own dtype, so the optimizer works on full-precision copies
    that are there anyway. Only floating-point tensors are ever cast.

    ``param_dtypes`` and ``reduce_dtypes``, which torch does not have, are rules for single
    parameters of the module: a dict (or pairs) from a pattern such as ``"*norm*"``, or a function
    of a parameter's full name and dtype, to a dtype, or to None: its own, as above. The first rule
    that matches counts; where none does, ``param_dtype`` and ``reduce_dtype``. A full name begins
    at the root, as in ``named_parameters()``, and in a pattern ``*`` matches dots as well.
    ``param_dtype_override_fn``, which torch has since 2.15, chooses by the parameter itself.

    Attributes:
        param_dtype: dtype in which parameters are gathered and the module computes; None: their
            own.
        reduce_dtype: dtype in which gradients are reduced, and accumulated without communication;
            None: the dtype of the computation.
        output_dtype: dtype to which the module's outputs are cast; None: as they come.
        cast_forward_inputs: cast the module's inputs to ``param_dtype``.
        param_dtype_override_fn: a function of a parameter, called once when ``fully_shard`` takes
            it. The parameter keeps its dtype if the function returns that dtype. ``param_dtype``
            and None mean ``param_dtype``; other dtypes raise. ``reduce_dtype`` None follows the
            answer; inputs are cast to ``param_dtype``.
        param_dtypes: rules that override both for single parameters.
        reduce_dtypes: rules that override ``reduce_dtype``.
    """

    param_dtypes: DTypeRules = field(default=(), kw_only=True)
    reduce_dtypes: DTypeRules = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        """Check the fields, and keep rules as pairs.

        Raises:
            TypeError: if a dtype is not a floating-point ``torch.dtype`` or None, a flag not a
                bool, ``param_dtype_override_fn`` not a function, or a rule not of a pattern or a
                function and a dtype.
            ValueError: if a pattern is empty.
        """
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            checked_dtype(name, getattr(self, name))
        if not isinstance(self.cast_forward_inputs, bool):
            raise TypeError(
                f"cast_forward_inputs is {self.cast_forward_inputs!r}; pass True or False"
            )
        override = self.param_dtype_override_fn
        if override is not None and not callable(override):
            raise TypeError(
                f"param_dtype_override_fn is {override!r}; pass a function from a parameter to a "
                "torch.dtype or None"
            )
        for name in ("param_dtypes", "reduce_dtypes"):
            object.__setattr__(self, name, checked_rules(name, getattr(self, name)))

    def gathered_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return what the rules say for a floating-point parameter, or ``param_dtype``."""
        if not dtype.is_floating_point:
            return dtype
        return first_match(self.param_dtypes, name, dtype, self.param_dtype) or dtype

    def reduced_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return what the rules say, or ``reduce_dtype``, or the dtype of the computation."""
        if not dtype.is_floating_point:
            return dtype
        chosen = first_match(self.reduce_dtypes, name, dtype, self.reduce_dtype)
        return chosen or self.gathered_dtype(name, dtype)
