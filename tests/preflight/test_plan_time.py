"""A plan's time: what kernels and collectives cost, and how launches overlap."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional

from fullshard.preflight import (
    DEVICES,
    Choice,
    Device,
    Efficiency,
    Link,
    Plan,
    PlanError,
    plan,
)
from fullshard.preflight.compat import DispatchMode
from fullshard.preflight.costs.collectives import Axis, Collective, collective_seconds, traffic_of
from fullshard.preflight.costs.kernels import Kernel, kernel_of, kernel_seconds
from fullshard.preflight.planning.choices import blocks_of
from fullshard.preflight.planning.memory.places import Place
from fullshard.preflight.planning.recorder import HostWait, Launch
from fullshard.preflight.planning.timeline import Timeline, replay
from support.modules import Stack

ROUND = Device(  # figures with which one can calculate by hand
    name="round",
    flops={torch.float32: 1e12},
    memory=1e9,
    bandwidth=1e9,
    per_host=4,
    inside=Link(
        name="inside", bandwidth=1e9, latency=1e-3, short_latency=1e-4,
        tree_latency=2e-3, short_tree_latency=2e-4,
    ),
    between=Link(
        name="between", bandwidth=1e8, latency=1e-2, short_latency=1e-3,
        tree_latency=2e-2, short_tree_latency=2e-3,
    ),
    attention="none",
    launch=1e-6,
    shortest=1e-6,
    start=0.0,
    efficiency=Efficiency(matmul=1.0, attention=1.0, memory=1.0, link=1.0),
)  # fmt: skip
MANY = 10**9


def _seconds(name: str, nbytes: int, axis: Axis) -> float:
    return collective_seconds(Collective(name, nbytes, axis), ROUND)


def test_a_ring_sends_a_part_in_each_of_its_steps() -> None:
    assert _seconds("_allgather_base_", MANY, Axis(4)) == pytest.approx(3 * 1e-3 + 3 / 4)
    assert _seconds("_reduce_scatter_base_", MANY, Axis(4)) == pytest.approx(3 * 1e-3 + 3 / 4)
    assert _seconds("allreduce_", MANY, Axis(4)) == pytest.approx(2 * (3 * 1e-3 + 3 / 4))
    over_hosts = 6 * 1e-3 + 1e-2 + 7 / 8 * MANY / 4e8  # four devices, so four links to the next
    assert _seconds("_allgather_base_", MANY, Axis(8)) == pytest.approx(over_hosts)


def test_short_messages_and_trees_are_taken_where_they_are_quicker() -> None:
    inside, over_hosts = _seconds("_allgather_base_", 4000, Axis(4)), Axis(8)
    assert inside == pytest.approx(3 * 1e-4 + 3 / 4 * 4000 / (1e9 / 3))
    across = _seconds("_allgather_base_", 4000, over_hosts)
    assert across == pytest.approx(6 * 1e-4 + 1e-3 + 7 / 8 * 4000 / (4e8 / 4))
    many = Axis(4096, stride=4)  # a host has one of them: a tree of 12 levels, up and down
    assert _seconds("allreduce_", MANY, many) == pytest.approx(2 * (12 * 2e-2 + MANY / 1e8))
    assert _seconds("allreduce_", 1000, many) == pytest.approx(2 * (12 * 2e-3 + 1000 * 3.8 / 1e8))
    few = Axis(3, stride=4)
    ring = 2 * (2 * 1e-2 + 2 / 3 * MANY / 1e8)
    assert _seconds("allreduce_", MANY, few) == pytest.approx(ring)


def test_an_axis_knows_which_of_its_ranks_share_a_host() -> None:
    assert Axis(8).hosts(ROUND) == 2
    assert Axis(8, stride=2).per_host(ROUND) == 2
    assert Axis(8, stride=64).hosts(ROUND) == 8
    assert traffic_of(Collective("_allgather_base_", 800, Axis(8)), ROUND).nbytes == 700
    assert traffic_of(Collective("allreduce_", 800, Axis(8)), ROUND).messages == 14
    assert traffic_of(Collective("allreduce_", 800, Axis(2)), ROUND).link == "inside"


class Kernels(DispatchMode):
    """Keeps what each operation costs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Kernel | None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        kernel = kernel_of(func, args, kwargs or {}, result)
        self.found[func._schema.name.removeprefix("aten::")] = kernel
        return result


def test_a_kernel_has_the_flops_and_the_bytes_of_its_operands() -> None:
    a, b, query = torch.ones(8, 16), torch.ones(16, 4), torch.ones(2, 3, 32, 16)
    with Kernels() as seen:
        product = a @ b
        product.add_(1.0)
        product.t()
        torch.empty(100)
        torch.ops.aten._unsafe_view(product, [32])
        torch.zeros(10)
        a.expand(5, 8, 16) + 1
        functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert seen.found["mm"] == Kernel(
        "aten::mm", 2 * 8 * 16 * 4, 4 * (8 * 16 + 16 * 4 + 8 * 4), torch.float32
    )
    inplace = seen.found["add_"]
    assert inplace is not None
    assert (inplace.flops, inplace.nbytes) == (0, 2 * 8 * 4 * 4)
    assert seen.found["t"] is seen.found["empty"] is seen.found["_unsafe_view"] is None
    added = seen.found["add"]
    assert added is not None
    assert added.nbytes == 4 * (8 * 16 + 5 * 8 * 16)
    (attention,) = (each for each in seen.found.values() if each and each.is_attention)
    assert attention.flops == 2 * (2 * 2 * 3 * 32 * 32 * 16) // 2, "two products, half masked"


def test_what_is_overwritten_is_not_read_and_of_a_table_only_what_is_picked() -> None:
    a, b, table = torch.ones(8, 4), torch.ones(8, 4), torch.ones(1000, 4)
    with Kernels() as seen:
        a.copy_(b)
        a.normal_()
        torch.mul(a, 2.0, out=b)
        torch._foreach_copy_([a, b], [b, a])
        table[torch.tensor([3, 5])]
        functional.embedding(torch.tensor([3, 5, 7]), table)
    bytes_of = {name: kernel.nbytes for name, kernel in seen.found.items() if kernel}
    assert bytes_of["copy_"] == bytes_of["mul"] == 2 * 128
    assert bytes_of["normal_"] == 128
    assert bytes_of["_foreach_copy_"] == 4 * 128
    assert bytes_of["index"] == 2 * 2 * 16 + 2 * 8
    assert bytes_of["embedding"] == 2 * 3 * 16 + 3 * 8


def test_a_kernel_takes_as_long_as_its_flops_or_its_bytes() -> None:
    computes = Kernel("aten::mm", 10**12, 8, torch.float32)
    assert kernel_seconds(computes, ROUND) == pytest.approx(1.0)
    assert kernel_seconds(replace(computes, nbytes=2 * 10**9), ROUND) == pytest.approx(2.0)
    assert kernel_seconds(replace(computes, flops=0), ROUND) == ROUND.shortest


PLACE = Place("forward")
SECOND = Kernel("aten::mm", 10**12, 8, torch.float32)
GATHER = Collective("_allgather_base_", MANY * 4 // 3, Axis(4))  # 1 s and three steps of 1 ms


def _launch(stream: int, number: int, work: Kernel | Collective, **after: int) -> Launch:
    clock = {int(name[1:]): time for name, time in after.items()}
    return Launch(stream, number, clock, PLACE, work, again=False)


def test_what_overlaps_is_hidden_and_what_is_waited_for_is_exposed() -> None:
    records = [
        _launch(2, 1, GATHER),
        _launch(1, 1, SECOND),
        _launch(2, 2, GATHER),
        _launch(1, 2, SECOND, s2=2),
    ]
    timeline = replay(records, {1: "default", 2: "gather"}, ROUND)
    assert timeline.step_time == pytest.approx(2 * 1.003 + 1, abs=1e-4)
    assert timeline.exposed == pytest.approx(2 * 1.003 - 1, abs=1e-4)
    assert timeline.host_bound < 1e-4
    assert timeline.flops == 2 * 10**12


def test_a_host_that_waits_launches_later() -> None:
    records: list[Launch | HostWait] = [
        _launch(2, 1, GATHER), HostWait({2: 1}), _launch(1, 1, SECOND),
    ]  # fmt: skip
    timeline = replay(records, {1: "default", 2: "gather"}, ROUND)
    assert timeline.spans[1].start == pytest.approx(1.003, abs=1e-4)
    late = replay(records[:1] + records[2:], {1: "default", 2: "g"}, ROUND)
    assert late.spans[1].start < 1e-4
    waiting = replace(ROUND, synchronous=True)
    after = replay([records[2], _launch(2, 1, GATHER)], {1: "d", 2: "g"}, waiting)
    assert after.spans[1].start >= 1.0, "a CPU computes before it launches what follows"


LAYERS = 3


def stack() -> Stack:
    return Stack(nn.Sequential(nn.Linear(256, 256, bias=False), nn.ReLU()) for _ in range(LAYERS))


def _planned(choice: Choice = Choice(), mesh: Any = 8, **options: Any) -> tuple[Plan, Timeline]:  # noqa: B008  # frozen
    found = plan(
        stack, torch.empty(512, 256), lambda model, x: model(x).sum(),
        mesh=mesh, shard=partial(choice.shard, blocks_of), **{"device": "h100", **options},
    )  # fmt: skip
    assert found.time is not None
    return found, found.time


@cache
def _usual() -> tuple[Plan, Timeline]:
    return _planned()


def test_a_step_is_computing_waiting_for_collectives_and_waiting_for_the_host() -> None:
    found, time = _usual()
    computing = sum(
        s.end - s.start for s in time.spans if time.streams[s.launch.stream] == "default"
    )
    assert time.step_time == pytest.approx(computing + time.exposed + time.host_bound)
    names = {time.streams[each.launch.stream] for each in time.spans}
    assert {"default", "copy_in", "gather", "reduce"} <= names
    products = LAYERS * 3 - 1  # two of each layer's backward, but the first needs no gradient of x
    assert time.flops == products * 2 * 512 * 256 * 256
    assert 0 < time.utilisation < 1
    (sent,) = time.traffic.values()
    weights = LAYERS * 256 * 256 * 4
    masks = sent.nbytes - 3 * weights * 7 / 8  # gathered twice, reduced once
    assert 0 <= masks < 0.01 * sent.nbytes
    assert "wait for collectives" in str(found)
    assert "fitted to published training runs on H100: matrix products reach 47%" in str(found)
    assert not time.by_bytes_alone
    assert "bytes alone" not in str(found)


def test_choices_cost_time_as_they_save_memory() -> None:
    slow = replace(
        DEVICES["h100"], per_host=1, launch=0.0,
        between=replace(DEVICES["h100"].between, bandwidth=1e9, latency=1e-6),
    )  # fmt: skip
    _, default = _planned(device=slow)
    _, kept = _planned(Choice(reshard=False), device=slow)
    _, again = _planned(Choice(recompute=True), device=slow)
    _, alone = _planned(Choice(prefetch=0), device=slow)
    assert kept.step_time < default.step_time
    assert any(each.launch.again for each in again.spans)
    assert not any(each.launch.again for each in default.spans)
    assert again.flops == default.flops, "what is computed again is no progress"
    assert alone.exposed >= default.exposed
    (less,), (more,) = kept.traffic.values(), default.traffic.values()
    assert less.nbytes < more.nbytes


def test_replicas_send_over_their_own_axis() -> None:
    _, time = _planned(mesh=(4, 8))
    assert {(axis.name, axis.size) for axis in time.traffic} == {("replicate", 4), ("shard", 8)}
    assert {sent.link for sent in time.traffic.values()} == {"NVLink 4", "400 Gbit/s network"}


def test_a_timeline_is_a_chrome_trace_with_a_row_for_each_stream(tmp_path: Path) -> None:
    _, time = _usual()
    time.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {each["tid"]: each["args"]["name"] for each in events if each["ph"] == "M"}
    spans = [each for each in events if each["ph"] == "X"]
    assert set(rows) == {each["tid"] for each in spans}
    for row in rows:
        ends = 0.0
        for each in (span for span in spans if span["tid"] == row):
            assert each["ts"] >= ends - 1e-6
            ends = each["ts"] + each["dur"]
    assert {"kernel", "collective"} == {each["cat"] for each in spans}


def test_a_plan_is_a_picture_with_its_streams_if_it_has_a_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found, _ = _usual()
    found.draw(tmp_path / "timed.svg", budget=2**30)
    replace(found, time=None).draw(tmp_path / "untimed.svg")
    timed, untimed = ((tmp_path / f"{name}.svg").read_text() for name in ("timed", "untimed"))
    for word in ("budget", "most memory at each place of a step", "activations", "the peak, in"):
        assert f"<!-- {word}" in timed, "matplotlib leaves texts as comments"
    for word in ("gather", "reduce", "collectives", "milliseconds"):
        assert f"<!-- {word}" in timed
        assert f"<!-- {word}" not in untimed


def test_a_picture_without_matplotlib_is_refused(tmp_path: Path) -> None:
    found, _ = _usual()
    with (
        patch.dict(sys.modules, {"matplotlib.figure": None}),
        pytest.raises(RuntimeError, match="pip install matplotlib"),
    ):
        found.draw(tmp_path / "picture.png")


@torch.library.custom_op("plan_time::cubed", mutates_args=())
def _cubed(x: torch.Tensor) -> torch.Tensor:
    return x**3


_cubed.register_fake(torch.empty_like)
_cubed.register_autograd(lambda ctx, gradient: gradient)


def test_operators_whose_work_is_not_known_are_named() -> None:
    found = plan(
        stack, torch.empty(512, 256), lambda model, x: torch.fft.fft(_cubed(model(x))).real.sum(),
        mesh=8, device="h100",
    )  # fmt: skip
    assert found.time is not None
    assert found.time.by_bytes_alone == ("aten::_fft_c2c", "aten::_fft_r2c", "plan_time::cubed")
    assert "since their FLOPs are not known: aten::_fft_c2c" in str(found)


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ("c10d", "without device= needs no time"),
        ("_c10d_functional", "use one of all_gather_into_tensor"),
    ],
)
def test_a_collective_that_is_not_known_has_no_time(space: str, said: str) -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        getattr(torch.ops, space).plan_unknown(x)
        return model(x).sum()

    with torch.library._scoped_library(space, "FRAGMENT") as library:
        library.define("plan_unknown(Tensor x) -> ()")
        library.impl("plan_unknown", lambda x: None, "Meta")
        library.impl("plan_unknown", lambda x: None, "CPU")
        with pytest.raises(PlanError, match=f"plan_unknown .* {said}"):
            plan(stack, torch.empty(512, 256), loss, mesh=8, device="h100")
        assert plan(stack, torch.empty(512, 256), loss, mesh=8).time is None


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES.keys())
def test_each_description_says_where_its_figures_are_from(device: Device) -> None:
    said = " ".join(device.sources)
    for figure in ("FLOP/s", "memory", "network", "latencies", "launch"):
        assert figure in said, "found somewhere, or not checked"
    assert device.inside.name.split()[0] in said
    assert device.peak(torch.bfloat16) > device.peak(torch.float32)
    assert device.inside.bandwidth > device.between.bandwidth
