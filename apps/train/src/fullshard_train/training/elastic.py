"""The training loop in a run of several replica groups, which may leave and join.

Owns what differs from `Trainer`: an update is a step of all groups, repeated until they commit it.
The batch of a step is the same whichever groups are there; its rows are shared out over all their
ranks. `fullshard.elastic` adds the gradients and carries the state.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard.comm import waiting
from fullshard.elastic import ElasticStep, ReplicaGroups
from fullshard_train.errors import TrainError
from fullshard_train.ranks.distributed import Share, World, sum_over_ranks
from fullshard_train.settings.config import Config
from fullshard_train.task import Task
from fullshard_train.training.trainer import Trainer, Update

__all__ = ["ElasticTrainer"]


class ElasticTrainer(Trainer):
    """A trainer of one replica group; its arguments are those of `Trainer`.

    Args:
        config: what to do; equal in all groups.
        world: the ranks of this group.
        mesh: what the model is sharded over: ranks of this group.
        device: where this rank computes.
        task: what is learned.
        groups: this group's part in the run, which adds gradients.
    """

    def __init__(
        self,
        config: Config,
        *,
        world: World,
        mesh: DeviceMesh,
        device: torch.device,
        task: Task,
        groups: ReplicaGroups,
    ) -> None:
        super().__init__(config, world=world, mesh=mesh, device=device, task=task, groups=groups)
        self._groups = groups
        self._part = world.share
        groups.carry(self.model, self.optimizer)
        self.at_end.append(groups.close)

    @property
    def share(self) -> Share:
        """This rank's part of the batch, out of those of all contributing groups."""
        return self._part

    def _update(self) -> Update:
        if self._groups.steps != self.step:  # resumed from files
            self._groups.load_state_dict({**self._groups.state_dict(), "steps": self.step})
        while True:
            step = self._groups.begin()
            self.step = step.number
            self._part = self._share_in(step)
            self._seed_step()
            loss = sum_over_ranks(self._accumulate_gradients()) / self.world.size
            loss = self._groups.sum(loss)
            parameters = list(self.model.parameters())
            gradients = [each.grad for each in parameters if each.grad is not None]
            with waiting("gradient norm"):
                norm = nn.utils.get_total_norm(gradients)
                if isinstance(norm, DTensor):
                    norm = norm.full_tensor()
            norm = self._groups.from_first(norm)
            if self._groups.commit():
                rate = self._set_rate()  # a state that was received brought an earlier one
                nn.utils.clip_grads_with_norm_(parameters, self.config.optim.clip_norm, norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
                return Update(step=self.step, loss=loss, gradient_norm=norm, learning_rate=rate)
            self.optimizer.zero_grad()

    def _share_in(self, step: ElasticStep) -> Share:
        """Return this rank's rows; a group that joins takes those of the first one.

        Raises:
            TrainError: if a micro-batch has fewer rows than there are ranks.
        """
        first = [0, *itertools.accumulate(step.ranks)]
        train, count = self.config.train, first[-1]
        if train.batch < count * train.accumulate:
            raise TrainError(
                f"config train.batch = {train.batch}: {len(step.ranks)} replica groups with {count}"
                f" ranks need {count * train.accumulate} rows, one each; give a larger batch, or"
                " start fewer groups"
            )
        index = 0 if step.index is None else first[step.index]
        return Share(index=(index + self.world.rank) % count, count=count)
