"""Optimizers of whole matrices do on every mesh, bit for bit, what they do to the whole model.

What they do to experts and fused projections is what they do to each matrix alone, and what they do
to the rest is AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.optim import SOAP, Muon
from support.optim.given import GivenSteps, assert_same
from support.optim.matrices import MUON_OPTIONS, MUON_STEPS, SOAP_OPTIONS, SOAP_STEPS
from support.optim.shapes import FUSED, Shapes, gradients
from support.optim.ways import WAYS, give
from support.products import few


@dataclass(frozen=True, kw_only=True)
class Kind:
    """An optimizer of whole matrices.

    Attributes:
        steps: steps of it.
        make: makes one of parameters, with the options of ``steps``.
        moved: a matrix that each option changes.
        narrow: options with which a side of some matrix is left out.
        adamw: options of AdamW for the rest.
    """

    steps: GivenSteps
    make: Callable[..., torch.optim.Optimizer]
    moved: str
    narrow: dict[str, Any] = field(default_factory=dict)
    adamw: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "Muon": Kind(steps=MUON_STEPS, make=partial(Muon, **MUON_OPTIONS), moved="square"),
    "SOAP": Kind(
        steps=SOAP_STEPS,
        make=partial(SOAP, **SOAP_OPTIONS),
        moved="tall",
        narrow={"max_precond_dim": 8},
        adamw={"betas": (0.95, 0.95)},
    ),
}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("Muon", {"nesterov": False}),
    ("Muon", {"adjust_lr_fn": "match_rms_adamw"}),
    ("Muon", {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "momentum": 0.5}),
    ("SOAP", {"max_precond_dim": 7}),
    ("SOAP", {"precondition_frequency": 3}),
    ("SOAP", {"shampoo_beta": 0.5}),
    ("SOAP", {"betas": (0.5, 0.7), "eps": 1e-2}),
]
each_kind = pytest.mark.parametrize("name", KINDS)


@pytest.mark.parametrize("way", few(WAYS, "hybrid", "tensor parallel", "columns", "three"))
@each_kind
def test_parameters_and_state_are_those_of_the_unsharded_model(name: str, way: str) -> None:
    KINDS[name].steps.assert_the_same(WAYS[way])


@pytest.mark.cross
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("way", ["three", "tensor parallel"])
@each_kind
def test_other_dtypes_are_stepped_alike(name: str, way: str, dtype: torch.dtype) -> None:
    KINDS[name].steps.assert_the_same(WAYS[way], dtype)


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_every_option_means_the_same_on_shards(name: str, options: dict[str, Any]) -> None:
    kind = KINDS[name]
    values, _ = kind.steps.assert_the_same(WAYS["three"], **options)
    assert not torch.equal(values[kind.moved], kind.steps.whole()[0][kind.moved])


@each_kind
def test_experts_and_fused_projections_are_each_what_the_matrix_alone_would_be(name: str) -> None:
    kind, start = KINDS[name], Shapes()
    whole = kind.steps.whole()[0]
    pieces: dict[str, list[Any]] = {
        "experts": list(range(5)),
        "fused": [slice(0, 6), slice(6, 12), slice(12, 18)],
    }
    for param, indices in pieces.items():
        for index in indices:
            alone = nn.Parameter(start.get_parameter(param).detach()[index].clone())
            optimizer = kind.make([alone])
            for step in range(kind.steps.count):
                alone.grad = gradients(step)[param][index].clone()
                optimizer.step()
            assert torch.equal(whole[param][index], alone), (param, index)


@each_kind
def test_sizes_that_differ_split_a_fused_projection_along_its_columns(name: str) -> None:
    kind, (shape,) = KINDS[name], FUSED.values()
    weight = nn.Parameter(Shapes().get_parameter("fused").detach().mT.contiguous())
    fused = kind.make([weight], **kind.narrow, split=(10, 4, 4), split_dim=1)
    parts = [slice(0, 10), slice(10, 14), slice(14, 18)]
    alone = [nn.Parameter(weight.detach()[:, part].clone()) for part in parts]
    others = kind.make(alone, **kind.narrow)
    for step in range(kind.steps.count):
        weight.grad = gradients(step)["fused"].mT.contiguous()
        for part, each in zip(parts, alone, strict=True):
            each.grad = weight.grad[:, part].clone()
        fused.step()
        others.step()
    assert weight.shape == shape[::-1]
    assert torch.equal(weight, torch.cat([each.detach() for each in alone], dim=1))
    basis = fused.state_dict()["state"][0].get("column_basis")
    assert basis is None or basis.shape == (4 * 4 + 4 * 4,), "ten columns are too many"


@each_kind
def test_what_is_no_matrix_is_stepped_as_by_adamw(name: str) -> None:
    kind, model = KINDS[name], Shapes()
    values, state = kind.steps.whole()
    names = ["bias", "embedding", "one", "kernel"]
    params = [model.get_parameter(each) for each in names]
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, **kind.adamw}
    optimizer = torch.optim.AdamW(params, **options, foreach=False)
    for step in range(kind.steps.count):
        give(model, gradients(step), None)
        optimizer.step()
    for each, param in zip(names, params, strict=True):
        assert torch.equal(values[each], param), each
        assert_same(state[each], optimizer.state[param])
