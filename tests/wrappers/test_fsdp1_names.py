"""FSDP1's names, arguments, fields and defaults: ``fullshard.wrappers.fsdp1`` against torch."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
from typing import Any

import pytest
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp.wrap as torch_wrap
from torch.distributed.algorithms._comm_hooks import default_hooks as torch_hooks

import fullshard.wrappers
from fullshard.wrappers import comm_hooks, fsdp1, wrap

TORCH_FSDP2: list[str] = importlib.import_module("torch.distributed.fsdp._fully_shard").__all__
FSDP1 = sorted({*torch_fsdp.__all__} - {*TORCH_FSDP2, "DataParallelMeshDims"})
CLASS = "FullyShardedDataParallel"


def test_the_names_are_those_of_torch_that_are_not_fully_shards() -> None:
    assert fsdp1.__all__ == FSDP1
    assert sorted(wrap.__all__) == sorted(torch_wrap.__all__)


def test_the_package_has_the_class_and_its_companions() -> None:
    for name in {*fsdp1.__all__} - {"OptimStateKeyType"}:
        assert getattr(fullshard.wrappers, name) is getattr(fsdp1, name)
        assert getattr(fsdp1, name) is not getattr(torch_fsdp, name)


def _parameters(function: Any) -> list[tuple[str, Any, str]]:
    return [
        (each.name, each.kind, str(each.default).partition(".")[2] or str(each.default))
        for each in inspect.signature(function).parameters.values()
    ]


METHODS = [
    "__init__", "apply", "check_is_root", "clip_grad_norm_", "flatten_sharded_optim_state_dict",
    "fsdp_modules", "full_optim_state_dict", "get_state_dict_type", "no_sync", "optim_state_dict",
    "optim_state_dict_to_load", "register_comm_hook", "rekey_optim_state_dict",
    "scatter_full_optim_state_dict", "set_state_dict_type", "shard_full_optim_state_dict",
    "sharded_optim_state_dict", "state_dict_type", "summon_full_params",
]  # fmt: skip


def test_every_public_method_of_torchs_is_there() -> None:
    theirs = {name for name in dir(torch_fsdp.FullyShardedDataParallel) if name[0] != "_"}
    assert theirs <= set(dir(fsdp1.FullyShardedDataParallel))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_torchs_arguments_in_its_order_with_its_defaults(name: str) -> None:
    ours, theirs = getattr(fsdp1, CLASS), getattr(torch_fsdp, CLASS)
    assert _parameters(getattr(ours, name)) == _parameters(getattr(theirs, name))


@pytest.mark.parametrize("name", wrap.__all__)
def test_a_policy_has_torchs_arguments(name: str) -> None:
    ours, theirs = getattr(wrap, name), getattr(torch_wrap, name)
    if inspect.isclass(ours):
        ours, theirs = ours.__init__, theirs.__init__
    assert _parameters(ours) == _parameters(theirs)


@pytest.mark.parametrize(
    "name", [name for name in FSDP1 if dataclasses.is_dataclass(getattr(torch_fsdp, name))]
)
def test_a_dataclass_has_torchs_fields_and_defaults(name: str) -> None:
    def fields(kind: Any) -> list[tuple[str, Any]]:
        private = "_module_classes_to_ignore"  # theirs is a base class that is private to torch
        return [
            (each.name, each.default) for each in dataclasses.fields(kind) if each.name != private
        ]

    ours, theirs = getattr(fsdp1, name), getattr(torch_fsdp, name)
    assert fields(ours) == fields(theirs)
    if isinstance(ours, type):
        mine, its = inspect.getmro(ours), inspect.getmro(theirs)
        assert [base.__name__ for base in mine] == [base.__name__ for base in its]


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in FSDP1
        if inspect.isclass(getattr(torch_fsdp, name))
        and issubclass(getattr(torch_fsdp, name), enum.Enum)
    ],
)
def test_an_enum_has_torchs_members(name: str) -> None:
    ours, theirs = getattr(fsdp1, name), getattr(torch_fsdp, name)
    assert [each.name for each in ours] == [each.name for each in theirs]


def test_the_hooks_have_torchs_names_and_arguments() -> None:
    for name in comm_hooks.__all__:
        ours, theirs = getattr(comm_hooks, name), getattr(torch_hooks, name)
        mine = [each[0] for each in _parameters(ours)]
        assert mine == [each[0] for each in _parameters(theirs)]
