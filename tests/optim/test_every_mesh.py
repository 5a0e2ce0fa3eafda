"""Optimizers of whole matrices do on every mesh, bit for bit, what they do to the whole model."""

from __future__ import annotations

import pytest
import torch

from support.optim.given import GivenSteps
from support.optim.matrices import MUON_STEPS, SOAP_STEPS
from support.optim.ways import WAYS
from support.products import few

both = pytest.mark.parametrize("steps", [MUON_STEPS, SOAP_STEPS], ids=["Muon", "SOAP"])


@pytest.mark.parametrize("way", few(WAYS, "hybrid", "tensor parallel", "columns", "three"))
@both
def test_parameters_and_state_are_those_of_the_unsharded_model(steps: GivenSteps, way: str) -> None:
    steps.assert_the_same(WAYS[way])


@pytest.mark.cross
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("way", ["three", "tensor parallel"])
@both
def test_other_dtypes_are_stepped_alike(steps: GivenSteps, way: str, dtype: torch.dtype) -> None:
    steps.assert_the_same(WAYS[way], dtype)
