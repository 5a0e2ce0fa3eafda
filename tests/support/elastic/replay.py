"""A run over replica groups once more, by one process on the unsharded model.

Follows the recorded memberships and nothing else: which groups contributed, with how many ranks, to
which batches. This is the definition that a run has to equal, to the bit.
"""

from __future__ import annotations

import torch

from support.elastic.model import Net, loss_of, make_optimizer, make_scheduler
from support.elastic.records import Record, digest_of

__all__ = ["Replay"]


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
        """Do a step; return the loss of each contributing rank."""
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
