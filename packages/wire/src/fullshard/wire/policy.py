"""Which parameters and gradients travel in which dtype, by their full names.

Owns the rules, their check and the lookup. ``WirePolicy`` implements ``WireForms`` of
``fullshard.sharding`` structurally. Refuses: forms that are not narrower than the sent values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import nn

from fullshard.comm import AllGather, Layout, ReduceConfig, TensorSpec, default_all_gather
from fullshard.comm.spi import ReducePlan
from fullshard.wire.blocks import in_blocks
from fullshard.wire.hosts import Hosts, check_hosts, levels_of
from fullshard.wire.hosts_reduction import plan_by_hosts
from fullshard.wire.hosts_transport import gather_by_hosts
from fullshard.wire.quantised import Quantised
from fullshard.wire.reduction import WidenedReducePlan

__all__ = ["WirePolicy"]

_NARROW = (torch.bfloat16, torch.float16)

Form = torch.dtype | Quantised | None
Rules = Mapping[str, Form] | Iterable[tuple[str, Form]]


@dataclass(frozen=True, kw_only=True)
class WirePolicy:
    """Parameters and gradients travel narrower than they are computed with.

    A form holds for every parameter that takes fewer bytes in it; others travel as they are.
    Without arguments nothing changes, to the last bit.

    Attributes:
        gathers: what parameters travel as when they are gathered: ``torch.bfloat16``,
            ``torch.float16``, ``Quantised``, or None: as they are. Every rank computes with the
            rounded values, its own shard's too. The shards, which the optimizer steps, stay exact.
        reductions: what gradients travel as when they are reduced. Gradients are added in the
            reduce dtype (``MixedPrecisionPolicy(reduce_dtype=...)``), in rank order; the sum is not
            rounded to this one. ``torch.float16`` turns values above 65504 into infinity, and
            values below 6e-8 into 0: scale the loss.
        exact: patterns of names of parameters that travel as they are, both ways, such as
            ``("*norm*", "*.bias", "*router*")``, as ``fnmatch`` understands them.
        gather_rules: forms by pattern, the first that matches, before ``gathers``: a mapping or
            pairs; None: as they are.
        reduction_rules: the same before ``reductions``.
        hosts: lets hosts talk once: gradients are summed inside a host before anything leaves it,
            and shards that arrive are shared inside it. How many ranks each host has, consecutive
            in the world, as ``int(os.environ["LOCAL_WORLD_SIZE"])``; or "names": by the hosts'
            names; None: all ranks are treated alike. Gradients are then added by hosts: in rank
            order inside each, the sums in the order of hosts. The form in ``reductions`` applies
            between hosts; inside a host gradients are exact.

    Warns:
        UserWarning: when a model's first forward begins, if a pattern matches none of its
            parameters and seems to be a spelling mistake; see ``unmatched``.

    Raises:
        TypeError: if a form, a pattern, the rules or ``hosts`` are of another type.
        ValueError: if a dtype is not supported, a pattern is empty, ``hosts`` is not a number of
            ranks, or error feedback is combined with ``hosts``.
    """

    gathers: Form = None
    reductions: Form = None
    exact: Sequence[str] = ()
    gather_rules: Rules = ()
    reduction_rules: Rules = ()
    hosts: Hosts | None = None

    def __post_init__(self) -> None:
        """Check and freeze the rules."""
        check_hosts(self.hosts)
        for field in ("gathers", "reductions"):
            _check_form(field, getattr(self, field))
        if isinstance(self.exact, str):
            raise TypeError(f"exact is {self.exact!r}; pass a tuple of patterns: ({self.exact!r},)")
        exact = tuple((pattern, None) for pattern in self.exact)
        object.__setattr__(self, "exact", tuple(pattern for pattern, _ in _checked("exact", exact)))
        for field in ("gather_rules", "reduction_rules"):
            object.__setattr__(self, field, _checked(field, getattr(self, field)))
        for form in _quantised(self.gathers, self.gather_rules):
            _check_gathered(form)
        for form in _quantised(self.reductions, self.reduction_rules):
            if form.feedback is not None and self.hosts is not None:
                raise ValueError(
                    f"gradients are to travel as {form} and by hosts={self.hosts!r}; what a rank "
                    "sends then is its host's sum, of which it keeps no residual: leave one of "
                    "the two away"
                )

    def unmatched(self, names: Sequence[str]) -> Sequence[str]:
        """Return the patterns that match none of ``names``, spelling mistakes most likely.

        ``exact`` may list parameters of several models. Its patterns count if none of them matches.
        A single pattern counts if one of its words is almost a word of the names.
        """
        rules = (*_pairs(self.gather_rules), *_pairs(self.reduction_rules))
        wrong = _matching_none(tuple(pattern for pattern, _ in rules), names)
        exact = _matching_none(self.exact, names)
        if len(exact) < len(self.exact):
            known = _words(" ".join(names))
            exact = [each for each in exact if any(_is_almost(w, known) for w in _words(each))]
        return [*dict.fromkeys((*exact, *wrong))]

    def gathered_as(
        self, name: str, spec: TensorSpec, ranks: int, device: torch.device
    ) -> TensorSpec:
        """Return what travels of parameter ``name``, which is used as ``spec``.

        Args:
            name: its full name.
            spec: of the whole parameter.
            ranks: how many share it.
            device: where it is packed.

        Raises:
            ValueError: if torch cannot cast to the form on ``device``.
        """
        form = self._first(name, self.gather_rules, self.gathers)
        return _narrowed(name, spec, form, ranks, device)

    def reduced_as(
        self, name: str, spec: TensorSpec, ranks: int, device: torch.device
    ) -> TensorSpec:
        """Return what travels of its gradient, whose sum arrives as ``spec``; as above."""
        form = self._first(name, self.reduction_rules, self.reductions)
        return _narrowed(name, spec, form, ranks, device)

    def all_gather(self, process_group: dist.ProcessGroup) -> AllGather:
        """Return what gathers shards among these ranks.

        Raises:
            ValueError: if ``hosts`` gives a number of ranks per host, and hosts of this group have
                different numbers.
        """
        if self.hosts is None:
            return default_all_gather(process_group)
        return gather_by_hosts(self.hosts, process_group)

    def reduction(
        self, layout: Layout, forms: Sequence[TensorSpec], config: ReduceConfig
    ) -> ReducePlan:
        """Return what reduces gradients of ``layout`` that travel in ``forms``, one for each.

        With ``hosts``, a collective call at a process group's first time.

        Raises:
            ValueError: if the config's collective is one of a user's own, which adds as it likes.
        """
        hosts, group = self.hosts, config.process_group
        if (
            hosts is not None
            and config.collective.is_automatic
            and levels_of(group, hosts) is not None
        ):
            return plan_by_hosts(layout, forms, config, hosts)
        if tuple(forms) == layout.specs:
            return ReducePlan(layout, config)
        return WidenedReducePlan(layout, forms, config)

    def feedback_nbytes(self, model: nn.Module, ranks: int) -> int:
        """Return the bytes that residuals of error feedback will take on each of ``ranks``.

        Ask it before training. Once an ``ErrorFeedback`` follows an optimizer it is twice as much.

        Args:
            model: before or after ``fully_shard``, perhaps on the meta device.
            ranks: how many share a parameter.
        """
        total = 0
        for name, param in model.named_parameters() if ranks > 1 else ():
            form = self._first(name, self.reduction_rules, self.reductions)
            if param.requires_grad and isinstance(form, Quantised) and form.feedback is not None:
                spec = TensorSpec(shape=tuple(param.shape), dtype=param.dtype)
                coded = in_blocks(spec, form, ranks)
                total += 0 if coded is spec else spec.numel * form.feedback.bytes_each
        return total

    def _first(self, name: str, rules: Rules, default: Form) -> Form:
        exact = [(pattern, None) for pattern in self.exact]
        for pattern, form in (*exact, *_pairs(rules)):
            if fnmatchcase(name, pattern):
                return form
        return default


def _narrowed(
    name: str, spec: TensorSpec, form: Form, ranks: int, device: torch.device
) -> TensorSpec:
    """Return ``spec`` in ``form``, if it is of floating-point numbers that take more bytes."""
    if form is None or not spec.dtype.is_floating_point:
        return spec
    if isinstance(form, torch.dtype):
        return replace(spec, dtype=form) if form.itemsize < spec.dtype.itemsize else spec
    code = in_blocks(spec, form, ranks, name)
    if code is not spec and not form.casts_on(device):
        raise ValueError(
            f"{name} is to travel as {form}, but torch {torch.__version__} cannot cast to "
            f"{form.dtype} on {device.type}; pass Quantised(torch.int8) or torch.bfloat16, or "
            "name the parameter in exact"
        )
    return code


def _matching_none(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    return [each for each in patterns if not any(fnmatchcase(name, each) for name in names)]


def _words(text: str) -> set[str]:
    return set(re.findall("[A-Za-z]+", text))


def _is_almost(word: str, known: set[str]) -> bool:
    return word not in known and bool(get_close_matches(word, known, n=1, cutoff=0.7))


def _pairs(rules: Rules) -> Iterable[tuple[str, Form]]:
    return rules.items() if isinstance(rules, Mapping) else rules


def _quantised(default: Form, rules: Rules) -> list[Quantised]:
    forms = (default, *(form for _, form in _pairs(rules)))
    return [form for form in forms if isinstance(form, Quantised)]


def _check_gathered(form: Quantised) -> None:
    if form.seed is not None:
        raise ValueError(
            f"parameters are to be gathered as {form}; leave the seed away: they are rounded to "
            "the nearest, so that forward and backward use the same"
        )
    if form.feedback is not None:
        raise ValueError(
            f"parameters are to be gathered as {form}; leave the feedback away: their shards stay "
            "exact, so nothing is lost for good. It is for reductions"
        )


def _checked(field: str, rules: object) -> tuple[tuple[str, Form], ...]:
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise TypeError(
            f"{field} is {rules!r}; pass a dict from patterns of parameter names, such as "
            "'*norm*', to what travels, or pairs of them"
        )
    pairs = tuple(rules.items() if isinstance(rules, Mapping) else rules)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(f"{field} holds {pair!r}; pass patterns of names, such as '*norm*'")
        if not pair[0]:
            raise ValueError(f"{field} holds an empty pattern, which matches no parameter")
        _check_form(f"{field}[{pair[0]!r}]", pair[1])
    return pairs


def _check_form(what: str, form: object) -> None:
    if form is None or isinstance(form, Quantised) or form in _NARROW:
        return
    kind = ValueError if isinstance(form, torch.dtype) else TypeError
    raise kind(
        f"{what} is {form!r}; pass torch.bfloat16, torch.float16, Quantised(torch.int8), or None: "
        "as they are"
    )
