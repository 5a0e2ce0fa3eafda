"""A replica group in a run whose groups leave and join: its steps, from quorum to commit.

Owns the order of a step: quorum, connections, transfer of state, the caller's forward and backward,
the vote, loading of state, the commit. The main class is
``ReplicaGroups``. Parts of it are in ``exchanger`` (sums), ``recovery`` (state) and ``links``.

[Note: a step] A step is committed by all ranks of a group or by none: torchft's manager collects
their votes. A rank votes for a step if all its messages arrived, and if its partners in other
groups vote for the step. Therefore all groups drop a step together. The exception is a group that
is lost during the vote. Some groups may then commit the step, and send their state to the groups
without it.

[Note: position] Steps, batches and lineage describe the state of this group. Only ``commit``
changes them, after a received state was loaded. A group that receives a state has its old position
until then, so it receives again if the step is dropped. If loading fails, the state is that of no
step: the group raises, now and at each later call.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fullshard.comm import waiting
from fullshard.elastic.coordinator import TorchftCoordinator
from fullshard.elastic.errors import ReplicaGroupError
from fullshard.elastic.exchanger import Exchanger
from fullshard.elastic.links import Links, meet
from fullshard.elastic.membership import Coordinator, Member, Quorum, next_lineage
from fullshard.elastic.options import ElasticOptions
from fullshard.elastic.recovery import Received, Recovery
from fullshard.elastic.reduction import ReplicaWire
from fullshard.elastic.state import ReplicaState, Stateful
from fullshard.sharding import FSDPModule, FullWidth, WireForms
from fullshard.sharding.spi import groups_of

__all__ = ["ElasticStep", "ReplicaGroups"]

_log = logging.getLogger("fullshard.elastic")
_WAIT = "replica groups"


@dataclass(frozen=True, kw_only=True)
class ElasticStep:
    """A step that was begun, as all groups see it.

    Attributes:
        number: how many steps were committed before.
        quorum: the number of the quorum.
        contributors: the groups whose gradients are added, in the order of the sum.
        ranks: how many ranks each of them has.
        joining: the groups that receive the state of the run during the step.
        index: the place of this group in ``contributors``; None if this group joins: its
            forward and backward run, but contribute nothing.
        batch: the number of the batch for this group, if groups take batches in turn: no batch is
            left out or used twice, whichever groups come and go.
    """

    number: int
    quorum: int
    contributors: tuple[str, ...]
    ranks: tuple[int, ...]
    joining: tuple[str, ...]
    index: int | None
    batch: int


class ReplicaGroups:
    """This replica group's part in a run of several; a collective call of its ranks.

    Args:
        options: names the run and this group.
        process_group: the ranks of this group; None: the default one.
        coordinator: who decides which groups are there; None: torchft.

    Raises:
        ModuleNotFoundError: if torchft is needed and not installed.
        ReplicaGroupError: if the lighthouse cannot be reached.
    """

    def __init__(
        self,
        options: ElasticOptions,
        *,
        process_group: dist.ProcessGroup | None = None,
        coordinator: Coordinator | None = None,
    ) -> None:
        self._options = options
        self._process_group = process_group
        self._rank = dist.get_rank(process_group)
        self._ranks = dist.get_world_size(process_group)
        made = TorchftCoordinator(options, process_group) if coordinator is None else coordinator
        self._coordinator = made
        self._exchanger = Exchanger(average=options.average, between=options.between)
        self._recovery = Recovery(self._rank, options.timeout)
        self._state: ReplicaState | None = None
        self._links: Links | None = None
        self._receiving: Future[Received] | None = None
        self._step: ElasticStep | None = None
        self._steps = self._batches = self._dropped = 0
        self._committed = self._loading = False
        first = [uuid.uuid4().hex]
        dist.broadcast_object_list(first, group=process_group, group_src=0)
        self._lineage: str = first[0]

    # -- before training ---------------------------------------------------------------------------

    def wire(self, inner: WireForms | None = None) -> ReplicaWire:
        """Return the ``wire_policy`` for each ``fully_shard`` of the model.

        Args:
            inner: in what form shards and gradients travel inside this group, such as a
                ``WirePolicy``; None: as they are.
        """
        return ReplicaWire(FullWidth() if inner is None else inner, self._exchanger)

    def carry(self, model: nn.Module, optimizer: Optimizer, **others: Stateful) -> None:
        """Name what a group receives when it joins: call it before the first step.

        Parameters and buffers of ``model``, the state of ``optimizer``, the state of random numbers
        and of ``others`` (a learning-rate scheduler, a data loader). The all-reduce hook of
        ``model`` is taken.

        Args:
            model: sharded with the policy of ``wire``.
            optimizer: of its parameters.
            others: objects by name, with ``state_dict`` and ``load_state_dict``.

        Raises:
            ValueError: if a sharded module has another wire policy, or the model has none.
        """
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        if not sharded:
            raise ValueError(
                f"got a {type(model).__name__} without sharded modules; call fully_shard(..., "
                "wire_policy=groups.wire()) on it first"
            )
        for module in sharded:
            for group in groups_of(module):
                wire = group.policies.wire
                if not (isinstance(wire, ReplicaWire) and wire.exchange is self._exchanger):
                    raise ValueError(
                        f"{group.name or 'the root'} has wire policy {wire!r}, so its gradients "
                        "stay in this replica group; pass wire_policy=groups.wire() to each "
                        "fully_shard"
                    )
            # All groups reduce the same buffers in one order, whatever their number of ranks.
            module.set_all_reduce_hook(_unchanged)
        self._state = ReplicaState(model, optimizer, others)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the run, for a checkpoint of it.

        Raises:
            ReplicaGroupError: if a received state was not loaded to its end.
        """
        self._require_whole()
        return {"steps": self._steps, "batches": self._batches, "lineage": self._lineage}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a position: groups that loaded one checkpoint need no state of each other."""
        self._steps = int(state_dict["steps"])
        self._batches = int(state_dict["batches"])
        self._lineage = str(state_dict["lineage"])

    # -- a step ------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """How many steps were committed."""
        return self._steps

    def begin(self) -> ElasticStep:
        """Return the next step, once there is a quorum; on all ranks of the group.

        Raises:
            ReplicaGroupError: if there is none in time, a rank of this group is lost, this group
                differs from the others or has the name of another one, or the step before was
                not ended.
        """
        state = self._ready()
        with waiting(_WAIT):
            links = self._connected(state)
        roster, position = links.roster, links.roster.state
        self._exchanger.open(links)
        names = roster.names(roster.contributors)
        index = roster.contributors.index(roster.own) if roster.own in roster.contributors else None
        self._step = ElasticStep(
            number=position.step,
            quorum=roster.quorum.number,
            contributors=names,
            ranks=tuple([roster.members[at].ranks for at in roster.contributors]),
            joining=roster.names(tuple(sorted(roster.sources))),
            index=index,
            batch=position.batches + (index or 0),
        )
        return self._step

    def _ready(self) -> ReplicaState:
        if self._state is None:
            raise ReplicaGroupError("begin() came before carry(model, optimizer); call that first")
        if self._step is not None:
            raise ReplicaGroupError(
                f"begin() came twice for step {self._step.number}; call commit() after each "
                "backward"
            )
        self._require_whole()
        return self._state

    def _require_whole(self) -> None:
        if self._loading:
            raise ReplicaGroupError(
                f"replica group {self._options.group}, rank {self._rank}: a received state was not "
                "loaded to its end, so parameters are of different steps; let the launcher start "
                "the group again"
            )

    def _connected(self, state: ReplicaState) -> Links:
        """Return the connections to the groups of the next quorum that all ranks can connect to."""
        while True:
            quorum = self._coordinator.quorum(self._steps, self._dropped)
            links = self._links
            if links is not None and links.roster.quorum.key == quorum.key and not self._dropped:
                return links
            self._close_links()
            error = self._connect(quorum, state)
            if self._coordinator.agree(self._steps, not error):
                assert self._links is not None, "connected"
                return self._links
            self._close_links()  # at once: a group that is connected must not wait for messages
            self._count_dropped(error or "another rank of this group could not connect")

    def _connect(self, quorum: Quorum, state: ReplicaState) -> str:
        """Connect to the groups of a new quorum; return what went wrong, or an empty string.

        Raises:
            ReplicaGroupError: if this group differs from the others, or has the name of another.
        """
        self._receiving = None  # of a quorum that this group could not connect to
        own = Member(
            name=self._options.group,
            ranks=self._ranks,
            step=self._steps,
            batches=self._batches,
            lineage=self._lineage,
            model=state.digest(),
            mesh=state.mesh(self._process_group),
            sums=self._exchanger.way,
            committed=self._committed,
        )
        try:
            roster, store = meet(quorum, own, self._rank, self._options.timeout)
            roster = roster.alike()
            self._links = Links(roster, store, self._rank, self._options.timeout)
        except ReplicaGroupError:
            self._coordinator.close()  # the others must not wait for this group
            raise
        except Exception as error:  # a group was lost again
            return f"{type(error).__name__}: {error}"
        if self._rank == 0:
            _log.info("%s", roster.summary)
        if roster.own in roster.sources:
            self._receiving = self._recovery.receive(roster, store, state)
        elif roster.own in roster.sources.values():
            self._recovery.send(roster, store, state.export())
        return ""

    def from_first(self, values: torch.Tensor) -> torch.Tensor:
        """Return the ``values`` of the first contributing group.

        For numbers that decide something in all groups and may be rounded otherwise where a group
        has another number of ranks, such as the norm of gradients. Between backward and commit, on
        all ranks of all groups; the values must be equal on the ranks of a group.

        Raises:
            ReplicaGroupError: outside of a step, or if the groups call different things.
        """
        return self._from_contributors("from_first", values)[0]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``values`` over contributing groups, such as a loss or a token count.

        Called as ``from_first``.

        Raises:
            ReplicaGroupError: as ``from_first``.
        """
        found = self._from_contributors("sum", values)
        return torch.stack(found).sum(0)

    def _from_contributors(self, call: str, values: torch.Tensor) -> list[torch.Tensor]:
        if self._step is None:
            raise ReplicaGroupError(f"{call}() was called outside of a step; call begin() first")
        with waiting(_WAIT):
            return self._exchanger.from_contributors(values)

    def commit(self) -> bool:
        """Return whether to step the optimizer; call it after backward, on all ranks of the group.

        If not, drop the gradients and repeat the step: a group was lost, or came late. A group that
        joins has the state of the run when this returns True, and the gradients of the others.

        Raises:
            ReplicaGroupError: outside of a step, if a rank of this group is lost, if groups reduced
                different gradients, if a received state does not fit, or after
                ``options.max_dropped`` dropped steps in a row.
        """
        step, links = self._step, self._links
        if step is None or links is None:
            raise ReplicaGroupError("commit() was called outside of a step; call begin() first")
        self._step = None
        with waiting(_WAIT):
            received = self._received()
            ok = self._exchanger.vote() and len(step.contributors) >= self._options.min_groups
            self._exchanger.end()
            agreed = self._coordinator.agree(self._steps, ok)
        if not agreed:
            reason = self._exchanger.error or "a rank or another group voted against it"
            self._count_dropped(reason, joins=step.index is None)
            return False
        if received is not None:
            self._load(received)
        position = links.roster.state
        self._dropped, self._committed = 0, True
        self._lineage = next_lineage(links.roster)
        self._steps = position.step + 1
        self._batches = position.batches + len(step.contributors)
        links.roster = links.roster.settled(self._steps, self._batches, self._lineage)
        return True

    def _received(self) -> Received | None:
        """Return the state that this group was to receive; the step is dropped if it did not."""
        receiving, self._receiving = self._receiving, None
        if receiving is None:
            return None
        try:
            return receiving.result()
        except ReplicaGroupError as error:  # it will not fit the next time
            self._exchanger.fail(str(error))
            raise
        except Exception as error:
            self._exchanger.fail(f"no state arrived ({type(error).__name__}: {error})")
            return None

    def _load(self, received: Received) -> None:
        """Load a received state; see [Note: position]."""
        assert self._state is not None, "carry() came before"
        self._loading = True
        try:
            self._state.load(received.structure, received.parts)
        except Exception as error:
            raise ReplicaGroupError(
                f"replica group {self._options.group}, rank {self._rank}: the state of the run "
                f"cannot be loaded ({type(error).__name__}: {error}); build model, optimizer and "
                "the objects of carry() alike in all groups"
            ) from error
        self._loading = False

    def _count_dropped(self, reason: str, *, joins: bool = False) -> None:
        self._dropped += 1
        allowed = self._options.max_dropped // (2 if joins else 1)
        _log.warning(
            "replica group %s, rank %d: step %d dropped: %s",
            self._options.group,
            self._rank,
            self._steps,
            reason,
        )
        if self._dropped > allowed:
            raise ReplicaGroupError(
                f"replica group {self._options.group}, rank {self._rank}: {self._dropped} steps in "
                f"a row were dropped, the last one because {reason}"
            )

    def _close_links(self) -> None:
        self._recovery.end()
        links, self._links = self._links, None
        if links is not None:
            links.close()

    def close(self) -> None:
        """Leave the run; the other groups go on."""
        self._close_links()
        self._coordinator.close()
        self._exchanger.close()
        self._recovery.close()


def _unchanged(buffer: torch.Tensor) -> None:
    """Do nothing: a hook keeps the engine from using gradients that were not reduced."""
