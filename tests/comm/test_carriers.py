"""The device on which a process group moves data: its backends decide."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fullshard.comm.runtime.carriers import carrier_of, host_carrier_of
from support.ranks import distributed

CPU, META = torch.device("cpu"), torch.device("meta")


@distributed(2)
def test_a_device_without_a_backend_is_carried_by_the_cpu() -> None:
    both = dist.new_group(backend="gloo")
    assert (carrier_of(both, META), host_carrier_of(both, META)) == (CPU, CPU)
    assert (carrier_of(both, CPU), host_carrier_of(both, CPU)) == (CPU, CPU)


@distributed(2)
def test_without_a_backend_for_the_cpu_only_its_own_device_is_served() -> None:
    cuda = torch.device("cuda", 0)
    other = dist.new_group(backend="cuda:gloo")
    assert (carrier_of(other, cuda), host_carrier_of(other, cuda)) == (cuda, cuda)
    assert (carrier_of(other, META), host_carrier_of(other, META)) == (META, None)


@distributed(2)
def test_a_group_that_is_written_in_python_is_asked_to_move_any_device() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    written = dist.ProcessGroup(rank, size)  # type: ignore[call-arg]  # the stub has one of two
    assert (carrier_of(written, META), host_carrier_of(written, META)) == (META, META)
