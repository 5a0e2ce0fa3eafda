"""Which parameters and gradients travel in which dtype, by their full names.

Owns the rules, their check and the lookup. It answers ``WireForms`` of ``fullshard.sharding``
structurally. Refuses: dtypes that are not narrower than what is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch

from fullshard.comm import Layout, ReduceConfig, TensorSpec
from fullshard.comm.collectives.reduce import ReducePlan
from fullshard.wire.reduction import WidenedReducePlan

__all__ = ["WirePolicy"]

_NARROW = (torch.bfloat16, torch.float16)

Rules = Mapping[str, torch.dtype | None] | Iterable[tuple[str, torch.dtype | None]]


@dataclass(frozen=True, kw_only=True)
class WirePolicy:
    """Parameters and gradients travel narrower than they are computed with.

    A dtype holds for every parameter whose own dtype is wider; others travel as they are. Without
    arguments nothing changes, to the last bit.

    Attributes:
        gathers: what parameters travel as when they are gathered: ``torch.bfloat16``,
            ``torch.float16``, or None: as they are. Every rank computes with the rounded values,
            its own shard's too. The shards, which the optimizer steps, stay exact.
        reductions: what gradients travel as when they are reduced. They are added in the reduce
            dtype (``MixedPrecisionPolicy(reduce_dtype=...)``), in rank order; the sum is not
            rounded to this one. In ``torch.float16`` what is beyond 65504 arrives as infinity, and
            what is below 6e-8 as 0: scale the loss.
        exact: patterns of names of parameters that travel as they are, both ways, such as
            ``("*norm*", "*router*")``, as ``fnmatch`` understands them.
        gather_rules: dtypes by pattern, the first that matches, before ``gathers``: a mapping or
            pairs; None: as they are.
        reduction_rules: the same before ``reductions``.

    Raises:
        TypeError: if a dtype, a pattern or the rules are of another type.
        ValueError: if a dtype is none of the two, or a pattern is empty.
    """

    gathers: torch.dtype | None = None
    reductions: torch.dtype | None = None
    exact: Sequence[str] = ()
    gather_rules: Rules = ()
    reduction_rules: Rules = ()

    def __post_init__(self) -> None:
        """Checks and freezes the rules."""
        for field in ("gathers", "reductions"):
            _check_dtype(field, getattr(self, field))
        if isinstance(self.exact, str):
            raise TypeError(f"exact is {self.exact!r}; pass a tuple of patterns: ({self.exact!r},)")
        exact = tuple((pattern, None) for pattern in self.exact)
        object.__setattr__(self, "exact", tuple(pattern for pattern, _ in _checked("exact", exact)))
        for field in ("gather_rules", "reduction_rules"):
            object.__setattr__(self, field, _checked(field, getattr(self, field)))

    def gathered_as(self, name: str, spec: TensorSpec) -> TensorSpec:
        """Returns what travels of parameter ``name``, which is used as ``spec``."""
        return _narrowed(spec, self._first(name, self.gather_rules, self.gathers))

    def reduced_as(self, name: str, spec: TensorSpec) -> TensorSpec:
        """Returns what travels of its gradient, whose sum arrives as ``spec``."""
        return _narrowed(spec, self._first(name, self.reduction_rules, self.reductions))

    def reduction(
        self, layout: Layout, forms: Sequence[TensorSpec], config: ReduceConfig
    ) -> ReducePlan:
        """Returns what reduces gradients of ``layout`` that travel in ``forms``, one for each.

        Raises:
            ValueError: if the config's collective is one of a user's own, which adds as it likes.
        """
        if tuple(forms) == layout.specs:
            return ReducePlan(layout, config)
        return WidenedReducePlan(layout, forms, config)

    def _first(self, name: str, rules: Rules, default: torch.dtype | None) -> torch.dtype | None:
        exact = [(pattern, None) for pattern in self.exact]
        for pattern, dtype in (*exact, *_pairs(rules)):
            if fnmatchcase(name, pattern):
                return dtype
        return default


def _narrowed(spec: TensorSpec, dtype: torch.dtype | None) -> TensorSpec:
    """Returns ``spec`` in ``dtype``, if it is of wider floating-point numbers."""
    if dtype is None or not spec.dtype.is_floating_point:
        return spec
    return replace(spec, dtype=dtype) if dtype.itemsize < spec.dtype.itemsize else spec


def _pairs(rules: Rules) -> Iterable[tuple[str, torch.dtype | None]]:
    return rules.items() if isinstance(rules, Mapping) else rules


def _checked(field: str, rules: object) -> tuple[tuple[str, torch.dtype | None], ...]:
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise TypeError(
            f"{field} is {rules!r}; pass a dict from patterns of parameter names, such as "
            "'*norm*', to dtypes, or pairs of them"
        )
    pairs = tuple(rules.items() if isinstance(rules, Mapping) else rules)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(f"{field} holds {pair!r}; pass patterns of names, such as '*norm*'")
        if not pair[0]:
            raise ValueError(f"{field} holds an empty pattern, which matches no parameter")
        _check_dtype(f"{field}[{pair[0]!r}]", pair[1])
    return pairs


def _check_dtype(what: str, dtype: object) -> None:
    if dtype is None or dtype in _NARROW:
        return
    kind = ValueError if isinstance(dtype, torch.dtype) else TypeError
    raise kind(f"{what} is {dtype!r}; pass torch.bfloat16, torch.float16, or None: as they are")
