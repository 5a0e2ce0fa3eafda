"""Muon: what its options mean on shards; on single matrices and fused ones it is torch's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.optim import Muon
from support.optim.given import assert_same
from support.optim.matrices import MUON_OPTIONS, MUON_STEPS
from support.optim.shapes import FUSED, MATRICES, Shapes, gradients
from support.optim.ways import WAYS, give


@pytest.mark.parametrize(
    "options",
    [
        {"nesterov": False},
        {"adjust_lr_fn": "match_rms_adamw"},
        {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "momentum": 0.5},
    ],
    ids=str,
)
def test_every_option_means_the_same_on_shards(options: dict[str, Any]) -> None:
    values, _ = MUON_STEPS.assert_the_same(WAYS["three"], **options)
    assert not torch.equal(values["square"], MUON_STEPS.whole()[0]["square"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False},
        {"adjust_lr_fn": "match_rms_adamw"},
        {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "momentum": 0.5, "eps": 1e-3},
    ],
    ids=str,
)
def test_on_plain_matrices_it_is_torchs_own_bit_for_bit(options: dict[str, Any]) -> None:
    names = [name for name, shape in MATRICES.items() if len(shape) == 2]
    ours, torchs = Shapes(), Shapes()
    optimizers = [
        kind([model.get_parameter(name) for name in names], lr=0.02, **options)
        for kind, model in ((Muon, ours), (torch.optim.Muon, torchs))
    ]
    for step in range(3):
        for model, optimizer in zip((ours, torchs), optimizers, strict=True):
            give(model, gradients(step), None)
            optimizer.step()
    for name in names:
        assert torch.equal(ours.get_parameter(name), torchs.get_parameter(name)), name


def test_experts_and_fused_projections_are_each_torchs_own_on_the_matrix_alone() -> None:
    whole = replace(MUON_STEPS, count=1).whole()[0]
    start, gradient = Shapes(), gradients(0)
    pieces: dict[str, list[Any]] = {
        "experts": list(range(5)),
        "fused": [slice(0, 6), slice(6, 12), slice(12, 18)],
    }
    for name, indices in pieces.items():
        for index in indices:
            alone = nn.Parameter(start.get_parameter(name).detach()[index].clone())
            alone.grad = gradient[name][index].clone()
            torch.optim.Muon([alone], **MUON_OPTIONS).step()
            assert torch.equal(whole[name][index], alone), (name, index)


def test_sizes_that_differ_split_a_fused_projection_along_its_columns() -> None:
    (shape,) = FUSED.values()
    weight = nn.Parameter(Shapes().get_parameter("fused").detach().mT.contiguous())
    weight.grad = gradients(0)["fused"].mT.contiguous()
    expected = []
    for part in (slice(0, 10), slice(10, 14), slice(14, 18)):
        alone = nn.Parameter(weight.detach()[:, part].clone())
        alone.grad = weight.grad[:, part].clone()
        torch.optim.Muon([alone], lr=0.1).step()
        expected.append(alone.detach())
    Muon([weight], lr=0.1, split=(10, 4, 4), split_dim=1).step()
    assert weight.shape == shape[::-1]
    assert torch.equal(weight, torch.cat(expected, dim=1))


def test_what_is_no_matrix_is_stepped_as_by_adamw() -> None:
    values, state = MUON_STEPS.whole()
    model = Shapes()
    names = ["bias", "embedding", "one", "kernel"]
    params = [model.get_parameter(name) for name in names]
    optimizer = torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, foreach=False)
    for step in range(3):
        give(model, gradients(step), None)
        optimizer.step()
    for name in names:
        param = model.get_parameter(name)
        assert torch.equal(values[name], param), name
        assert_same(state[name], optimizer.state[param])
