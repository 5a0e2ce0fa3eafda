"""Numbers of quorums, which a lighthouse that is started again counts from 1."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from fullshard.elastic import ElasticOptions
from fullshard.elastic.coordinator import TorchftCoordinator
from support.ranks import distributed


class Torchft:
    """Answers of a lighthouse: its number of a quorum, the groups, and the largest step."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        self.answers = list(answers)

    def ManagerServer(self, **_: Any) -> Any:  # a name of torchft
        return SimpleNamespace(address=str, shutdown=lambda: None)

    def ManagerClient(self, address: str, **_: Any) -> Any:  # a name of torchft
        return SimpleNamespace(_quorum=self._quorum)

    def _quorum(self, *, step: int, **_: Any) -> Any:
        number, groups = self.answers.pop(0)
        return SimpleNamespace(
            quorum_id=number,
            replica_ids=list(groups),
            replica_rank=0,
            store_address="host:1",
            max_step=step,
        )


@distributed(1)
def test_no_quorum_has_the_key_of_an_old_one_when_the_lighthouse_was_started_again() -> None:
    first = [(1, "ab"), (1, "ab"), (2, "abc")]
    again = [(1, "ab"), (1, "ab"), (2, "ab"), (3, "abc")]
    torchft = Torchft(*first, *again)
    options = ElasticOptions(lighthouse="http://127.0.0.1:1", group="a", host="127.0.0.1")
    with patch("fullshard.elastic.coordinator.coordination", lambda: torchft):
        coordinator = TorchftCoordinator(options)
    failures = [0, 0, 0, 0, 0, 1, 0]
    keys = [coordinator.quorum(step, failed).key for step, failed in enumerate(failures)]
    coordinator.close()
    assert keys[0] == keys[1] and keys[3] == keys[4]  # connections are used again
    assert len(set(keys)) == 5
