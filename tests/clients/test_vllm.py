"""The weight source against vLLM's own classes, and vLLM's own trainer engine on it, on CPU ranks.

Needs vLLM, or an unpacked wheel of it that ``FULLSHARD_VLLM`` names; see ``support.engine.vllm``.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torchs_fully_shard

from fullshard.checkpoint import connect_engine, weight_source
from fullshard.checkpoint.engines import metadata
from fullshard.sharding import fully_shard
from support import tp_model
from support.engine.client import free_port
from support.engine.model import build
from support.engine.vllm import folder, weight_transfer
from support.ranks import cpu_mesh, distributed
from support.surface.ranks import assert_equal_state, everyone, full_parameters

VLLM = folder()
pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(VLLM is None, reason="no vLLM, and FULLSHARD_VLLM names no unpacked wheel"),
]
WHERE = VLLM or ""


def _sharded(net: Any, shard: Any, mesh: Any) -> Any:
    for block in net.blocks:
        shard(block, mesh=mesh)
    shard(net, mesh=mesh)
    return net


@pytest.mark.parametrize("axes", [("shards",), ("replicas", "shards")], ids="-".join)
@distributed(4)
def test_metadata_are_those_of_vllms_own_source_for_a_model_sharded_by_torch(
    axes: tuple[str, ...],
) -> None:
    mesh = cpu_mesh((4,) if len(axes) == 1 else (2, 2), axes)
    with weight_transfer(WHERE, "base") as (base,):
        theirs = base.ModuleSource(_sharded(build(), torchs_fully_shard, mesh))
        ours = weight_source(_sharded(build(), fully_shard, mesh))
        on_torchs = weight_source(_sharded(build(), torchs_fully_shard, mesh))
        assert ours.metadata == on_torchs.metadata == theirs.metadata
        assert {type(meta) for meta in ours.metadata} == {base.ParamMeta}
        assert isinstance(ours, base.WeightSource)
        assert (ours.implements_iter_full(), ours.implements_iter_local()) == (True, True)
        for rank in range(4):
            assert ours.owned_names(rank) == theirs.owned_names(rank)
        assert_equal_state(dict(ours.iter_local()), dict(theirs.iter_local()))
        assert_equal_state(dict(ours.iter_full()), dict(theirs.iter_full()))


@distributed(4)
def test_with_tensor_parallelism_vllms_own_source_differs_on_ranks_and_ours_does_not() -> None:
    mesh = cpu_mesh((2, 2), ("dp", "tp"))
    model = tp_model.parallelize(tp_model.build(8), mesh["tp"])
    tp_model.shard(model, fully_shard, mesh=mesh["dp"])
    with weight_transfer(WHERE, "base") as (base,):
        theirs = {meta.name: meta for meta in base.ModuleSource(model).metadata}
        ours = {meta.name: meta for meta in weight_source(model).metadata}
        told = [dataclasses.astuple(meta) for meta in ours.values()]
        assert everyone(told) == [told] * 4
        assert len({*everyone(theirs["head.weight"].owners)}) == 2
        for name in theirs:
            if theirs[name].owners == (0, 1, 2, 3):  # on both axes
                assert ours[name] == theirs[name]


def test_our_classes_have_the_fields_of_vllms() -> None:
    with weight_transfer(WHERE, "base") as (base,):
        for name in ("ParamMeta", "Shard", "Replicate"):
            mine, theirs = (
                [(each.name, each.kw_only) for each in dataclasses.fields(getattr(module, name))]
                for module in (metadata, base)
            )
            assert mine == theirs


@distributed(2)
def test_layouts_are_those_that_vllms_resharding_engine_plans_with() -> None:
    torch.manual_seed(0)
    net = fully_shard(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)))
    with weight_transfer(WHERE, "base", "m2n_common") as (_, m2n):
        source = weight_source(net)
        pieces = dict(source.iter_local())
        for meta in source.metadata:
            planned = m2n.m2n_param_meta(meta, 2)
            assert m2n.expected_local_shape(planned) == tuple(pieces[meta.name].shape)
            assert pieces[meta.name].shape != meta.shape


class _Broadcast:
    """In the place of NCCL: a process group of rank 0 and the workers."""

    def __init__(self, link: dist.ProcessGroup) -> None:
        self._link = link

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = src
        self._link.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        """Nothing to do."""


class _Worker:
    """A client with a worker in this process, which receives what the engine announces."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.weights: dict[str, torch.Tensor] = {}
        self._link: dist.ProcessGroup | None = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append("init")
        self._link = connect_engine("127.0.0.1", init_info["master_port"], rank=1, size=2)

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append("update")
        assert self._link is not None
        for name, dtype, shape in zip(*update_info.values(), strict=True):
            self.weights[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            _Broadcast(self._link).broadcast(self.weights[name], 0)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")


@distributed(2)
def test_vllms_own_trainer_engine_sends_the_values_of_the_moment_while_training_goes_on() -> None:
    rank, port, client = dist.get_rank(), everyone(free_port())[0], _Worker()
    net = _sharded(build(), fully_shard, cpu_mesh())
    moment = {name: value.bfloat16() for name, value in full_parameters(net).items()}
    with weight_transfer(WHERE, "nccl_engine") as (nccl,):

        def connect(engine: Any, _: Any) -> None:
            engine.model_update_group = _Broadcast(
                connect_engine("127.0.0.1", port, rank=0, size=2)
            )

        source = weight_source(net, dtype=torch.bfloat16, to=[0])
        info = nccl.NCCLTrainerInitInfo("127.0.0.1", port, 2, packed=False, rank=rank)
        kind = nccl.NCCLTrainerWeightTransferEngine
        with (
            patch.object(kind, "_open_trainer_endpoint", connect),
            patch("torch.cuda.current_stream", return_value=None),
            ThreadPoolExecutor(1) as thread,
        ):
            engine = kind.trainer_init(info, client=client, source=source)
            source.pin()
            sending = thread.submit(engine.send_weights)
            with torch.no_grad():
                for param in net.parameters():
                    param.add_(1)
            sending.result()
    if rank == 0:
        assert client.calls == ["init", "start", "update", "finish"]
        assert_equal_state(client.weights, moment)
    else:
        assert client.calls == []
