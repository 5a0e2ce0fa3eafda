"""The parity core between ranks that do not share memory, as between hosts.

Each rank is on a host of its own, or two are on each of two hosts, which then talk once: ranks of a
host share memory, those of different hosts send messages. Training equals the unsharded model on
the whole batch, within what the order of additions costs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.policies import CPUOffloadPolicy, DepthPrefetch, MixedPrecisionPolicy
from fullshard.samehost import automatic, group, peers
from fullshard.wire import Quantised, WirePolicy
from support.apart import private_memory
from support.parity.compare import EXACT, assert_equal, full, gradients_of, rounding
from support.parity.engines import shard
from support.parity.models import CASES, build
from support.parity.reference import accumulate, compare, my_rows, rows_of, train, whole_batch
from support.products import few
from support.ranks import cpu_mesh, distributed

# torch warns of outputs that are views, such as those of a linear layer given three dimensions.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

# BatchNorm sees the rows of its rank, many-dtypes adds in bf16: no whole batch to compare with.
MODELS = sorted(CASES.keys() - {"batch-norm", "many-dtypes"})
BY_HOSTS = WirePolicy(hosts=2)


@contextmanager
def two_hosts() -> Iterator[None]:
    """A context in which ranks 0 and 1 are on one host, 2 and 3 on another; forgotten after it."""
    with (
        patch.object(peers, "host_identity", lambda: f"host {dist.get_rank() // 2}"),
        patch.object(group, "GROUPS", WeakKeyDictionary()),
        patch.object(automatic, "_choices", WeakKeyDictionary()),
    ):
        yield


@dataclass(frozen=True)
class Hosts:
    """Where four ranks are.

    Attributes:
        there: a context in which they are there.
        core: the models that always run.
        options: what ``fully_shard`` is told.
    """

    there: Callable[[], AbstractContextManager[None]]
    core: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)


HOSTS = {
    "each rank on its own": Hosts(
        private_memory, ("transformer", "tied-across-groups", "uneven", "partly-used")
    ),
    "talk once": Hosts(two_hosts, ("transformer", "uneven"), {"wire_policy": BY_HOSTS}),
}


@pytest.mark.parametrize(
    ("hosts", "name"),
    few(
        itertools.product(HOSTS, MODELS),
        *((hosts, name) for hosts in HOSTS for name in HOSTS[hosts].core),
        together=True,
    ),
)
@distributed(4)
def test_training_equals_the_whole_batch(hosts: str, name: str, world_size: int) -> None:
    case, way = CASES[name], HOSTS[hosts]
    with way.there():
        got = train(shard(case, **way.options), case, my_rows(), steps=4)
    compare(got, train(build(case), case, whole_batch, steps=4), rounding(world_size))


@pytest.mark.parametrize("hosts", HOSTS)
@distributed(4)
def test_accumulating_over_batches_equals_one_large_one(hosts: str, world_size: int) -> None:
    case, way, found = CASES["transformer"], HOSTS[hosts], []
    for sharded in (True, False):
        with way.there():
            model = shard(case, **way.options) if sharded else build(case)
            rows = my_rows() if sharded else whole_batch
            found.append(accumulate(model, case, rows, steps=4))
    for got, want in zip(*found, strict=True):
        assert_equal(got, want, rounding(world_size, steps=4), "after accumulation")


# -- each rank on a host of its own ---------------------------------------------------------------


@distributed(4)
def test_a_hybrid_mesh_equals_the_whole_batch(world_size: int) -> None:
    case = CASES["transformer"]
    with private_memory():
        mesh: DeviceMesh = cpu_mesh((2, 2), ("replicate", "shard"))
        got = train(shard(case, mesh=mesh), case, my_rows(), steps=3)
    compare(got, train(build(case), case, whole_batch, steps=3), rounding(world_size))


# -- two hosts that talk once ---------------------------------------------------------------------

TALKING: dict[str, dict[str, Any]] = {
    "kept": {"reshard_after_forward": False},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "ahead": {"prefetch_policy": DepthPrefetch(forward=2, backward=2)},
    "inside a host in backward": {"reshard_after_forward": 2},
}


@pytest.mark.parametrize("setting", few(sorted(TALKING), "offload", "inside a host in backward"))
@distributed(4)
def test_with_these_settings_hosts_that_talk_once_do_too(setting: str, world_size: int) -> None:
    case = CASES["transformer"]
    with two_hosts():
        model = shard(case, wire_policy=BY_HOSTS, **TALKING[setting])
        got = train(model, case, my_rows(), steps=3)
    compare(got, train(build(case), case, whole_batch, steps=3), rounding(world_size))


@distributed(4)
def test_gathered_parameters_and_state_dicts_are_as_without_it_to_the_last_bit() -> None:
    case = CASES["many-dtypes"]
    with two_hosts():
        model, plain = shard(case, dtype=None, wire_policy=BY_HOSTS), build(case, None)
        inputs, _ = rows_of(case.batch(0, torch.float32), my_rows())
        assert torch.equal(model(inputs), plain(inputs))
        state = {name: full(value) for name, value in model.state_dict().items()}
    assert_equal(state, plain.state_dict(), EXACT, "state dict")


@distributed(4)
def test_groups_of_mixed_dtypes_are_reduced_by_hosts(world_size: int) -> None:
    case = CASES["transformer"]

    def model(**options: Any) -> nn.Module:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return shard(case, mp_policy=policy, **options)

    with two_hosts():
        got = train(model(wire_policy=BY_HOSTS), case, my_rows(), steps=2)
    want = train(model(), case, my_rows(), steps=2)
    compare(got, want, rounding(world_size, dtype=torch.bfloat16), average=False)


@distributed(4)
def test_on_a_hybrid_mesh_that_shards_inside_hosts_nothing_changes(world_size: int) -> None:
    case, mesh = CASES["transformer"], cpu_mesh((2, 2), ("replicate", "shard"))
    found = []
    for policy in (BY_HOSTS, WirePolicy()):
        model = shard(case, mesh=mesh, wire_policy=policy)
        found.append(train(model, case, my_rows(), steps=2))
    compare(found[0], found[1], EXACT, average=False)


@pytest.mark.parametrize("form", [torch.bfloat16, torch.float16, Quantised(torch.int8, 64)])
@distributed(4)
def test_between_hosts_gradients_travel_in_the_form_that_is_asked_for(
    form: Any, world_size: int
) -> None:
    """It is not exact, and off by less than a few steps of the form; the mask is not rounded."""
    case = CASES["partly-used"]
    found = []
    for policy in (BY_HOSTS, WirePolicy(hosts=2, reductions=form)):
        with two_hosts():
            model = shard(case, wire_policy=policy)
            inputs, targets = rows_of(case.batch(0, torch.float32), my_rows())
            case.loss(model(inputs), targets).backward()
            found.append(gradients_of(model))
    exact, narrow = found
    assert {name for name, each in exact.items() if each is None} == {
        name for name, each in narrow.items() if each is None
    }
    differs = False
    for name, gradient in exact.items():
        got = narrow[name]
        if gradient is not None and got is not None:
            differs = differs or not torch.equal(got, gradient)
            assert (got - gradient).abs().max() <= gradient.abs().max() / 50
    assert differs
