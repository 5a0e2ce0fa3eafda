"""Muon on single matrices is torch's own; tests/optim/test_every_mesh has the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fullshard.optim import Muon
from support.optim.shapes import MATRICES, Shapes, gradients
from support.optim.ways import give


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
