"""The helper that prints equivalent calls: run on the unwrapped model, they train bit for bit."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.wrappers import equivalent_calls
from support.fsdp1_fronts import OURS, equal, full_state, hybrid_mesh, train
from support.ranks import distributed
from support.surface.model import build


def _by_calls(wrapped: Any, net: nn.Module | None = None, **names: Any) -> tuple[Any, Any]:
    """The text of the calls, and the unwrapped model after they ran."""
    net = build() if net is None else net
    text = equivalent_calls(wrapped)
    exec(text, {"model": net, **names})
    return text, net


def _trains_alike(wrapped: Any, net: Any) -> None:
    losses = train(wrapped)
    equal(losses, train(net))
    expected = full_state(OURS, wrapped)
    found = {}
    for name, param in net.named_parameters():
        found[name] = param.detach()
        if isinstance(param, DTensor):
            found[name] = found[name].full_tensor()
    equal(found, expected)


ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"sharding_strategy": "SHARD_GRAD_OP", "forward_prefetch": True, "backward_prefetch": None},
    {"sharding_strategy": "NO_SHARD"},
    {"mixed_precision": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}},
    {"mixed_precision": {"param_dtype": torch.bfloat16, "cast_forward_inputs": True}},
    {"cpu_offload": {"offload_params": True}, "backward_prefetch": "BACKWARD_POST"},
]


@pytest.mark.parametrize("index", range(len(ARGUMENTS)))
@distributed(2, 4, matrix=[4])
def test_the_calls_shard_as_the_wrappers_do(index: int) -> None:
    wrapped = OURS.wrapped(**ARGUMENTS[index])
    text, net = _by_calls(wrapped)
    function = "replicate(" if index == 2 else "fully_shard("
    calls = [line for line in text.splitlines() if line.startswith(function)]
    heads = [line.partition(")")[0].partition(",")[0] for line in calls]
    assert heads == [
        f"{function}{what}" for what in ("model.blocks[0]", "model.blocks[1]", "model")
    ]
    _trains_alike(wrapped, net)


@distributed(2, 4, matrix=[4])
def test_what_is_ignored_and_an_overridden_strategy_are_said() -> None:
    net = build()
    policy = OURS.wrap.CustomPolicy(
        lambda m: (
            {"sharding_strategy": OURS.ShardingStrategy.SHARD_GRAD_OP}
            if m is net.blocks[1].fc1
            else False
        )
    )
    wrapped = OURS.wrapped(net, auto_wrap_policy=policy, ignored_states=[net.blocks[0].scale])
    text, other = _by_calls(wrapped)
    assert "ignored_params={model.get_parameter('blocks.0.scale')}" in text
    assert "fully_shard(model.blocks[1].fc1, reshard_after_forward=False" in text
    assert type(other.blocks[0].scale) is nn.Parameter
    losses = train(wrapped, 1), train(other, 1)
    equal(*losses)


@distributed(2, 4, matrix=[2])
def test_meshes_are_made_as_they_were() -> None:
    mesh = hybrid_mesh()
    hybrid: dict[str, Any] = {"sharding_strategy": "HYBRID_SHARD"}
    with patch.dict("os.environ", LOCAL_WORLD_SIZE="2"):
        nodes = OURS.wrapped(**hybrid)
    text, net = _by_calls(nodes)
    assert text.count("init_device_mesh(") == 1
    _trains_alike(nodes, net)
    pair = (mesh.get_group("shard"), mesh.get_group("replicate"))
    wrapped = OURS.wrapped(**hybrid, process_group=pair)
    _trains_alike(wrapped, _by_calls(wrapped, process_group=pair)[1])
    wrapped = OURS.wrapped(process_group=pair[0])
    _trains_alike(wrapped, _by_calls(wrapped, process_group=pair[0])[1])
    wrapped = OURS.wrapped(device_mesh=mesh["shard"])
    _trains_alike(wrapped, _by_calls(wrapped, device_mesh=mesh["shard"])[1])


@distributed(2, 4, matrix=[4])
def test_what_no_call_says_is_a_comment_and_an_unwrapped_model_is_refused() -> None:
    wrapped = OURS.wrapped(
        mixed_precision={"buffer_dtype": torch.bfloat16, "keep_low_precision_grads": True}
    )
    wrapped.register_comm_hook(None, print)
    notes = [line for line in equivalent_calls(wrapped).splitlines() if line.startswith("# ")]
    assert len(notes) == 3 and "torch.bfloat16" in notes[0]
    with pytest.raises(ValueError, match="Linear holds no FullyShardedDataParallel"):
        equivalent_calls(nn.Linear(1, 1))
