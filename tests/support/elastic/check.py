"""Compares what the ranks of a run recorded with a replay of it, by one process.

The replay follows the recorded memberships and nothing else: which groups contributed, with how
many ranks, to which batches. It is the definition that a run has to equal, to the bit. Steps that
no group went on from are replayed, too.
"""

from __future__ import annotations

from pathlib import Path

import torch

from support.elastic.model import Net, loss_of, make_model, make_optimizer, make_scheduler
from support.elastic.records import Record, digest_of, lineage_of, read_records

__all__ = ["check_against_replay"]


class Replay:
    """The unsharded model in the state of a run after each of its steps.

    Args:
        model: in the state before the first step.
        ranks: of each group.
        between: see ``ElasticOptions``.
    """

    def __init__(
        self, model: Net, ranks: dict[str, int], between: torch.dtype | None = None
    ) -> None:
        torch.set_num_threads(1)
        self.model = model
        self.optimizer = make_optimizer(model)
        self.scheduler = make_scheduler(self.optimizer)
        self._ranks = ranks
        self._between = between
        self._batches = 0

    def step(self, contributors: list[str]) -> dict[tuple[str, int], str]:
        losses: dict[tuple[str, int], str] = {}
        total: list[torch.Tensor] | None = None
        for place, name in enumerate(contributors):
            gradients: list[torch.Tensor] | None = None
            for rank in range(self._ranks[name]):
                self.model.zero_grad()
                loss = loss_of(self.model, self._batches + place, rank, self._ranks[name])
                loss.backward()
                losses[name, rank] = float(loss.detach()).hex()
                mine = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
                gradients = _sum(gradients, mine)
            assert gradients is not None, "each group has a rank"
            gradients = [each * (1 / self._ranks[name]) for each in gradients]
            if self._between is not None:
                gradients = [each.to(self._between).float() for each in gradients]
            total = _sum(total, gradients)
        assert total is not None, "each step has a contributor"
        for param, gradient in zip(self.model.parameters(), total, strict=True):
            param.grad = gradient * (1 / len(contributors))
        self.optimizer.step()
        self.scheduler.step()
        self._batches += len(contributors)
        return losses

    def digest(self, record: Record) -> str:
        """The digest of what the rank of ``record`` has to hold now."""
        found: list[torch.Tensor] = []
        for param in self.model.parameters():
            state = self.optimizer.state[param]
            found += [_shard(each, record) for each in (param, state["exp_avg"])]
            found += [_shard(state["exp_avg_sq"], record), state["step"]]
        return digest_of([*found, *self.model.buffers()])


def _sum(total: list[torch.Tensor] | None, more: list[torch.Tensor]) -> list[torch.Tensor]:
    return more if total is None else [a + b for a, b in zip(total, more, strict=True)]


def _shard(whole: torch.Tensor, record: Record) -> torch.Tensor:
    parts = whole.detach().chunk(record.ranks)
    return parts[record.rank] if record.rank < len(parts) else whole.new_empty(0)


def check_against_replay(
    folder: Path, ranks: dict[str, int], between: torch.dtype | None = None
) -> int:
    """Compare all records with a replay; return how many steps led to the last state.

    Raises:
        AssertionError: naming the first step, group and rank that differ.
    """
    records = read_records(folder)
    last = {(each.group, each.rank): each.after for each in records}
    assert len(set(last.values())) == 1, "all groups end with one state"
    ends = {each.after for each in records} - {each.before for each in records}
    steps = {end: lineage_of(records, end) for end in ends}
    for found in steps.values():
        _check_lineage(folder, found, ranks, between)
    assert {each.after for lineage in steps.values() for found in lineage for each in found} == {
        each.after for each in records
    }, "each record is of a step that was replayed"
    return len(steps[next(iter(last.values()))])


def _check_lineage(
    folder: Path, steps: list[list[Record]], ranks: dict[str, int], between: torch.dtype | None
) -> None:
    assert [found[0].step for found in steps] == list(range(len(steps)))
    # The state before the first step is that of the first contributor, as it was initialised.
    assert len(steps[0][0].contributors) == 1
    seed = int((folder / f"{steps[0][0].before}.seed").read_text())
    replay = Replay(make_model(seed), ranks, between)
    for found in steps:
        losses = replay.step(found[0].contributors)
        for record in found:
            at = (record.step, record.group, record.rank)
            assert record.joined or record.loss == losses[record.group, record.rank], at
            assert record.digest == replay.digest(record), at
