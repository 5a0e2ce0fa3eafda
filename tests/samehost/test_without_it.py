"""Where `fullshard.samehost` is not installed, the process group moves the bytes."""

from __future__ import annotations

from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from fullshard.comm import installed
from fullshard.comm.transports import default
from fullshard.samehost import AutomaticTransport, shared_memory_statistics
from fullshard.sharding import fully_shard
from support.ranks import distributed, world


@distributed(2)
def test_a_step_is_the_same_by_the_process_group() -> None:
    found, buffers = [], list[int]()
    for transports in (default.DEFAULTS, [default.DefaultTransport()]):
        with patch.object(default, "DEFAULTS", transports):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
            for layer in [*model, model]:
                fully_shard(layer)
            shared = shared_memory_statistics(world()).buffers
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for step in range(3):
                generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
                model(torch.randn(4, 6, generator=generator)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            buffers.append(shared_memory_statistics(world()).buffers - shared)
            found.append([param.full_tensor() for param in model.parameters()])  # type: ignore[attr-defined]  # a DTensor
    assert buffers == [2, 0], "groups in shared memory"
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other)


def test_a_package_that_is_not_installed_is_passed_over() -> None:
    installed.import_installed(("fullshard.is_not_there",))
    assert [default.DefaultTransport(), AutomaticTransport()] == default.DEFAULTS
