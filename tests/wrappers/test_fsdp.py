"""The one import line: ``fullshard.wrappers.fsdp`` against ``torch.distributed.fsdp``."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp

import fullshard.comm
import fullshard.policies
import fullshard.sharding
from fullshard.wrappers import fsdp
from support.members import ROOT
from support.products import few
from support.ranks import distributed
from support.surface.model import build, train
from support.surface.ranks import assert_equal_state, full_parameters

# torch's own list of what belongs to fully_shard (FSDP2); the rest of its __all__ is FSDP1.
TORCH_FSDP2: list[str] = importlib.import_module("torch.distributed.fsdp._fully_shard").__all__

# What a newer torch gained and fullshard has not: methods of FSDPModule, names, fields of policies.
# What appears there makes a test fail, and is then added here or, better, to fullshard;
# docs/features.md names it.
NOT_YET: set[str] = set()
NAMES_NOT_YET: set[str] = set()
FIELDS_NOT_YET: set[str] = set()

# What fullshard adds, beyond torch's.
OURS = {
    "parameters_changed",
    "set_placements",
    "set_schedule",
}

# What torch gained after 2.11, the oldest that fullshard supports: there it is ours for the time.
AFTER_2_11 = {
    "finalize_backward",
    "reset_iter_state",
    "set_keep_unsharded_storage",
    "set_manual_backward_finalization",
    "set_reduce_scatter_max_input_buffers",
    "set_reduce_scatter_unused_params",
    "set_separate_reduce_scatter_group",
    "set_symm_mem_for_comm",
}
NAMES_AFTER_2_11 = {"DataParallelMeshDims", "GradientReductionHandle"}
FIELDS_AFTER_2_11 = {"param_dtype_override_fn"}


def _methods(kind: type) -> dict[str, Any]:
    found = inspect.getmembers(kind, inspect.isfunction)
    return {
        name: method
        for name, method in found
        if not name.startswith("_") and not hasattr(torch.nn.Module, name)
    }


THEIRS = _methods(torch_fsdp.FSDPModule)


def test_the_names_are_torchs_and_the_two_collectives() -> None:
    theirs = {*TORCH_FSDP2, *NAMES_AFTER_2_11} - NAMES_NOT_YET
    assert fsdp.__all__ == sorted({*theirs, "AllGather", "ReduceScatter"})
    assert set(TORCH_FSDP2) <= set(torch_fsdp.__all__)


@pytest.mark.parametrize("name", fsdp.__all__)
def test_each_name_is_the_one_of_the_layer_that_defines_it(name: str) -> None:
    layers = (fullshard.comm, fullshard.sharding, fullshard.policies)
    owners = [layer for layer in layers if name in layer.__all__]
    assert len(owners) == 1
    assert getattr(fsdp, name) is getattr(owners[0], name)
    assert getattr(fsdp, name) is not getattr(torch_fsdp, name, None)


def test_every_public_method_of_torchs_is_there_or_known_to_be_missing() -> None:
    ours = _methods(fsdp.FSDPModule)
    assert THEIRS.keys() - ours.keys() == NOT_YET & THEIRS.keys()
    assert NOT_YET.isdisjoint(ours)


def test_the_page_of_features_names_what_is_known_to_be_missing() -> None:
    first = (ROOT / "docs" / "features.md").read_text().partition("\n## ")[0]
    missing = NOT_YET | NAMES_NOT_YET | FIELDS_NOT_YET
    assert {name for name in missing if f"{name}`" in first} == missing


def test_what_is_there_beyond_torchs_is_known() -> None:
    added = _methods(fsdp.FSDPModule).keys() - THEIRS.keys()
    assert OURS <= added <= OURS | AFTER_2_11


def _parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [
        (parameter.name, parameter.kind, parameter.default)
        for parameter in inspect.signature(function).parameters.values()
    ]


def _assert_same_arguments(ours: Any, theirs: Any) -> None:
    mine, expected = _parameters(ours), _parameters(theirs)
    for one, other in zip(mine, expected, strict=False):
        assert one[:2] == other[:2]
        assert repr(one[2]) == repr(other[2])
    assert len(mine) >= len(expected)
    for name, kind, default in mine[len(expected) :]:
        assert kind is inspect.Parameter.KEYWORD_ONLY, name
        assert default is not inspect.Parameter.empty, name


@pytest.mark.parametrize("name", sorted(THEIRS.keys() - NOT_YET))
def test_a_method_has_torchs_arguments_kinds_and_defaults(name: str) -> None:
    _assert_same_arguments(getattr(fsdp.FSDPModule, name), THEIRS[name])


@pytest.mark.parametrize("name", ["register_fsdp_forward_method", "share_comm_ctx"])
def test_a_function_has_torchs_arguments_kinds_and_defaults(name: str) -> None:
    _assert_same_arguments(getattr(fsdp, name), getattr(torch_fsdp, name))


def test_fully_shard_has_torchs_arguments_in_its_order_with_equivalent_defaults() -> None:
    mine, theirs = _parameters(fsdp.fully_shard), _parameters(torch_fsdp.fully_shard)
    assert [entry[:2] for entry in mine[: len(theirs)]] == [entry[:2] for entry in theirs]
    policies = {"mp_policy", "offload_policy"}
    for (name, _, default), (_, _, expected) in zip(mine, theirs, strict=False):
        if name not in policies:
            assert default is expected, name
    added = mine[len(theirs) :]
    names = [name for name, _, _ in added]
    ours = ["prefetch_policy", "wire_policy", "placements"]
    assert names in (ours, ["dp_mesh_dims", *ours])  # the latter on 2.11
    assert all(kind is inspect.Parameter.KEYWORD_ONLY for _, kind, _ in added)


def test_the_classes_construct_with_torchs_arguments() -> None:
    for name in ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"):
        theirs = [
            each for each in _parameters(getattr(torch_fsdp, name)) if each[0] not in FIELDS_NOT_YET
        ]
        ours = [
            each
            for each in _parameters(getattr(fsdp, name))
            if each in theirs or each[0] not in FIELDS_AFTER_2_11
        ]
        assert ours[: len(theirs)] == theirs
        added = ours[len(theirs) :]  # torch's meaning without them
        assert all(kind is inspect.Parameter.KEYWORD_ONLY for _, kind, _ in added)
        assert all(default is not inspect.Parameter.empty for _, _, default in added)
    if hasattr(torch_fsdp, "DataParallelMeshDims"):
        dims = inspect.signature(torch_fsdp.DataParallelMeshDims).parameters
        assert list(inspect.signature(fsdp.DataParallelMeshDims).parameters) == list(dims)
    for name in ("UnshardHandle", "GradientReductionHandle"):
        if hasattr(torch_fsdp, name):
            mine, torchs = (getattr(each, name).wait for each in (fsdp, torch_fsdp))
            assert inspect.signature(mine) == inspect.signature(torchs)


def _train_with(front: Any, reshard: bool | None, dtype: torch.dtype | None) -> Any:
    """Code written for torch, with its import line as an argument."""
    net = build()
    policy = front.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in net.blocks:
        front.fully_shard(block, reshard_after_forward=reshard, mp_policy=policy)
    front.fully_shard(net, reshard_after_forward=reshard, mp_policy=policy)
    assert isinstance(net, front.FSDPModule)
    net.set_requires_gradient_sync(True)
    losses = train(net, torch.optim.AdamW(net.parameters(), lr=0.05), range(5))
    return losses, net


@pytest.mark.cross
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("reshard", few([True, False, None], True, False))
@distributed(2, 4, matrix=[4])
def test_code_written_for_torch_gives_the_same_numbers_with_one_import_line_changed(
    reshard: bool | None, dtype: torch.dtype | None
) -> None:
    ours, our_net = _train_with(fsdp, reshard, dtype)
    theirs, their_net = _train_with(torch_fsdp, reshard, dtype)
    assert ours == theirs
    for net in (our_net, their_net):
        for module in net.modules():
            if isinstance(module, fsdp.FSDPModule | torch_fsdp.FSDPModule):
                module.reshard()
    assert_equal_state(full_parameters(our_net), full_parameters(their_net))
