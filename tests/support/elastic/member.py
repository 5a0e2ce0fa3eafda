"""One rank of a replica group, as a process that trains until it is told to stop, or struck."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fullshard.elastic import ElasticOptions, ReplicaGroups
from fullshard.sharding import fully_shard
from support.elastic.model import loss_of, make_model, make_optimizer, make_scheduler
from support.elastic.moments import stop_at_moments
from support.elastic.records import Record, digest_of

__all__ = ["Place", "train"]

PHASES = ("begin", "forward", "backward", "commit", "step")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which rank of which group a process is.

    Attributes:
        start: how often the group was started before; its ranks meet in a file of that number.
    """

    group: str
    rank: int
    ranks: int
    start: int
    lighthouse: str
    folder: Path
    timeout: float
    between: torch.dtype | None = None


def train(
    place: Place, told: Connection, until: Synchronized[int], armed: Synchronized[int]
) -> None:
    """Train until the first contributor sees that ``until`` is reached; tell each phase.

    Every start of a group has a model of its own. The rank stops at an armed moment of a join.
    """
    stop_at_moments(armed, lambda moment: told.send((moment, -1)))
    torch.set_num_threads(1)
    log = (place.folder / f"{place.group}{place.rank}.log").open("a")
    sys.stdout = sys.stderr = log
    patience = timedelta(seconds=4 * place.timeout)
    store = dist.FileStore(str(place.folder / f"{place.group}.{place.start}.store"), place.ranks)
    dist.init_process_group(
        "gloo", store=store, rank=place.rank, world_size=place.ranks, timeout=patience
    )
    options = ElasticOptions(
        lighthouse=place.lighthouse,
        group=place.group,
        timeout=place.timeout,
        host="127.0.0.1",
        between=place.between,
        max_dropped=50,
    )
    groups = ReplicaGroups(options)
    seed = sum(map(ord, place.group)) + place.start
    (place.folder / f"{groups.state_dict()['lineage']}.seed").write_text(str(seed))
    model = make_model(seed)
    for module in (model.inner, model.outer, model):
        fully_shard(module, wire_policy=groups.wire())
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer)
    groups.carry(model, optimizer, scheduler=scheduler)
    records = (place.folder / f"{place.group}{place.rank}.jsonl").open("a")
    stop = False
    while not stop:
        began = time.monotonic()
        told.send(("begin", groups.steps))
        step = groups.begin()
        assert groups._links is not None, "begin() returned"
        before = groups._links.roster.state.lineage
        told.send(("forward", step.number))
        loss = loss_of(model, step.batch, place.rank, place.ranks)
        told.send(("backward", step.number))
        loss.backward()
        told.send(("commit", step.number))
        wanted = groups.from_first(torch.tensor([step.number + 1 >= until.value]))
        if groups.commit():
            optimizer.step()
            scheduler.step()
            stop = bool(wanted)
            record = Record(
                group=place.group,
                rank=place.rank,
                ranks=place.ranks,
                step=step.number,
                contributors=list(step.contributors),
                joined=step.index is None,
                batch=step.batch,
                before=before,
                after=groups.state_dict()["lineage"],
                loss=float(loss.detach()).hex(),
                digest=digest_of(_state(model, optimizer)),
                seconds=time.monotonic() - began,
            )
            record.write(records)
            told.send(("step", step.number))
        optimizer.zero_grad()
    groups.close()
    dist.destroy_process_group()


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """This rank's shards of parameters and their averages, and the buffers."""
    found: list[torch.Tensor] = []
    for param in model.parameters():
        state = optimizer.state[param]
        found += [param, state["exp_avg"], state["exp_avg_sq"], state["step"]]
    return [e.to_local() if isinstance(e, DTensor) else e for e in (*found, *model.buffers())]
