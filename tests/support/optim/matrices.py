"""Steps of Muon and SOAP on given gradients, of parameters of every shape that they take."""

from __future__ import annotations

from typing import Any

from torch import nn

from fullshard.optim import SOAP, Muon
from support.optim.given import GivenSteps
from support.optim.shapes import Shapes, gradients, groups_of

MUON_OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
SOAP_OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "precondition_frequency": 2}


def _muon(model: nn.Module, **options: Any) -> Muon:
    return Muon(groups_of(model), **{**MUON_OPTIONS, **options})


def _soap(model: nn.Module, **options: Any) -> SOAP:
    return SOAP(groups_of(model, "soap"), **{**SOAP_OPTIONS, **options})


MUON_STEPS = GivenSteps(module=Shapes, gradients=gradients, make=_muon, count=3)
SOAP_STEPS = GivenSteps(module=Shapes, gradients=gradients, make=_soap, count=5)
"""One step that begins, and two new bases."""
