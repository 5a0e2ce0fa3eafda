"""A process group whose ranks are threads of one process: collectives by shared memory.

Owns: the meeting of the ranks at each collective, sums in rank order, and what happens when a rank
does not come. Refuses point-to-point messages, and overlap: a result reaches a rank's output in
that rank's own ``wait()``, never earlier, so that code which forgets to wait reads what was there
before. Nothing here is faster than it must be; a collective of 128 ranks costs milliseconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = 60.0  # seconds for which a rank waits for the others

Tensors = Sequence[torch.Tensor]


class RanksDivergedError(RuntimeError):
    """Ranks called different collectives, or the same one for different sizes."""


class RankLeftError(RuntimeError):
    """A collective cannot happen: a rank raised, or ended without it."""


class _Collective:
    """One collective: what each rank handed in, and the result that all of them share."""

    def __init__(self, world_size: int, call: str, first: int) -> None:
        self.call = call
        self.first = first
        self.inputs: list[Tensors | None] = [None] * world_size
        self.missing = world_size
        self.result: Any = None
        self.failure: BaseException | None = None
        self._done = threading.Event()

    def finish(self, combine: Callable[[list[Tensors]], Any]) -> None:
        """Compute the result, once every rank handed in its part."""
        try:
            with torch.no_grad():
                self.result = combine([part for part in self.inputs if part is not None])
        except BaseException as error:
            self.failure = error
        self.inputs = []
        self._done.set()

    def fail(self, failure: BaseException) -> None:
        """Let every rank that waits raise."""
        self.failure = failure
        self._done.set()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        """Return once the result is there; raise what it failed with if it never will be."""
        if not self._done.wait(PATIENCE):
            absent = [rank for rank, part in enumerate(self.inputs) if part is None]
            raise RankLeftError(f"{self.call}: no sign of ranks {absent} for {PATIENCE:g} s")
        if self.failure is not None:
            raise _again(self.failure)


def _again(failure: BaseException) -> BaseException:
    """The same error as a new object: threads that raise one object mix up its traceback."""
    return type(failure)(*failure.args)


class Meeting:
    """Where the ranks of one group meet: the n-th collective of each rank is the same one."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._lock = threading.Lock()
        self._counts = [0] * world_size
        self._open: dict[int, _Collective] = {}
        self._left: set[int] = set()
        self._failure: BaseException | None = None

    def post(
        self, rank: int, call: str, inputs: Tensors, combine: Callable[[list[Tensors]], Any]
    ) -> _Collective:
        """Hand in one rank's part; the last rank to come computes the result for all."""
        _synchronise(inputs)  # another thread, on another stream, is going to read them
        with self._lock:
            if self._failure is not None:
                raise _again(self._failure)
            number = self._counts[rank]
            self._counts[rank] += 1
            collective = self._open.setdefault(number, _Collective(self.world_size, call, rank))
            if collective.call != call:
                self._fail(
                    RanksDivergedError(
                        f"collective {number} of this group is {collective.call} on rank "
                        f"{collective.first}, {call} on rank {rank}"
                    )
                )
                return collective
            collective.inputs[rank] = inputs
            collective.missing -= 1
            last = collective.missing == 0
            if last:
                del self._open[number]
            self._fail_if_impossible()
        if last:
            collective.finish(combine)
        return collective

    def leave(self, rank: int) -> None:
        with self._lock:
            self._left.add(rank)
            self._fail_if_impossible()

    def abort(self, failure: BaseException) -> None:
        """Let every rank that waits here, or comes later, raise ``failure``."""
        with self._lock:
            self._fail(failure)

    def _fail_if_impossible(self) -> None:
        for number, collective in self._open.items():
            gone = [rank for rank in sorted(self._left) if self._counts[rank] <= number]
            if gone:
                waiting = [r for r, part in enumerate(collective.inputs) if part is not None]
                self._fail(
                    RankLeftError(
                        f"ranks {waiting} wait in {collective.call}, but ranks {gone} ended "
                        "without it"
                    )
                )
                return

    def _fail(self, failure: BaseException) -> None:
        self._failure = self._failure or failure
        for collective in self._open.values():
            collective.fail(self._failure)


class _Work(dist.Work):
    """A collective that was called and not waited for; the first ``wait()`` fills the output."""

    def __init__(self, collective: _Collective, deliver: Callable[[Any], None]) -> None:
        super().__init__()
        self._collective = collective
        self._deliver: Callable[[Any], None] | None = deliver

    def is_completed(self) -> bool:
        return self._collective.done

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._deliver is not None:
            self._collective.wait()
            deliver, self._deliver = self._deliver, None
            with torch.no_grad():
                deliver(self._collective.result)
        return True


# torch declares overloads that nothing calls, so that no override of its methods fits them all.
_ProcessGroup: Any = dist.ProcessGroup


class ThreadGroup(_ProcessGroup):  # type: ignore[misc]  # Any: see above
    """One rank's end of a group of threads. Every rank makes its own, on the same meeting.

    The names of the methods are torch's: those of 2.13 first, then those of 2.11.
    """

    def __init__(self, meeting: Meeting, rank: int, name: str = "threads") -> None:
        super().__init__(rank, meeting.world_size)
        self.meeting = meeting
        self._name = name

    @property
    def group_name(self) -> str:
        """The name under which torch looks it up; the constructor for Python's groups sets none."""
        return self._name

    def getBackendName(self) -> str:
        return "threaded"

    def _post(
        self,
        call: str,
        inputs: Tensors,
        combine: Callable[[list[Tensors]], Any],
        deliver: Callable[[Any], None],
    ) -> dist.Work:
        call = f"{call}({', '.join(f'{each.dtype}[{each.numel()}]' for each in inputs)})"
        return _Work(self.meeting.post(self.rank(), call, inputs, combine), deliver)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._post("barrier", (), lambda parts: None, lambda result: None)

    # -- gathers ----------------------------------------------------------------------------------

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        return self._post("all_gather", inputs, _concatenate, lambda result: _fill(outputs, result))

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input])

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        def deliver(result: Tensors) -> None:
            for ours, gathered in zip(outputs, result, strict=True):
                _fill(ours, gathered.split([each.numel() for each in ours]))

        return self._post("all_gather", inputs, _concatenate, deliver)

    # -- reductions -------------------------------------------------------------------------------

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        op = _name_of(opts)
        return self._post(
            f"reduce_scatter[{op}]",
            inputs,
            lambda parts: _reduce(parts, op),
            lambda result: _fill(
                outputs, [each.chunk(self.size())[self.rank()] for each in result]
            ),
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None
    ) -> dist.Work:
        joined = [torch.cat([part.reshape(-1) for part in parts]) for parts in inputs]
        return self.reduce_scatter_single_coalesced(outputs, joined, opts)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        op = _name_of(opts)
        return self._post(
            f"all_reduce[{op}]",
            tensors,
            lambda parts: _reduce(parts, op),
            lambda result: _fill(tensors, result),
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Only the root's tensors hold the result; the others' are spoilt, as they may be."""
        op, root = _name_of(opts), opts.rootRank

        def deliver(result: Tensors) -> None:
            _fill(tensors, result if self.rank() == root else [-each - 1 for each in result])

        return self._post(
            f"reduce[{op} to {root}]", tensors, lambda parts: _reduce(parts, op), deliver
        )

    # -- others -----------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        root = opts.rootRank
        return self._post(
            f"broadcast[from {root}]",
            tensors,
            lambda parts: [each.clone() for each in parts[root]],
            lambda result: _fill(tensors, result),
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        world_size, rank = self.size(), self.rank()
        parts = list(input.split(list(input_sizes)) if input_sizes else input.chunk(world_size))
        received = output.split(list(output_sizes)) if output_sizes else output.chunk(world_size)

        def combine(sent: list[Tensors]) -> list[list[torch.Tensor]]:
            return [[mine[to].clone() for mine in sent] for to in range(world_size)]

        collective = self.meeting.post(rank, f"all_to_all({input.dtype})", parts, combine)
        return _Work(collective, lambda result: _fill(received, result[rank]))

    # The same under the names of torch 2.11.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _allgather_base = all_gather_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def _concatenate(parts: list[Tensors]) -> list[torch.Tensor]:
    """Per tensor, what all ranks handed in, flat and in rank order."""
    result = [
        torch.cat([each.reshape(-1) for each in column]) for column in zip(*parts, strict=True)
    ]
    _synchronise(result)
    return result


def _reduce(parts: list[Tensors], op: str) -> list[torch.Tensor]:
    """Per tensor, rank 0's combined with rank 1's, then with rank 2's: in its own dtype, flat."""
    result = []
    for column in zip(*parts, strict=True):
        total = column[0].reshape(-1).clone()
        for each in column[1:]:
            _STEPS[op](total, each.reshape(-1))
        if op == "AVG":
            total /= len(parts)
        result.append(total)
    _synchronise(result)
    return result


def _maximum(total: torch.Tensor, each: torch.Tensor) -> object:
    return torch.maximum(total, each, out=total)


def _minimum(total: torch.Tensor, each: torch.Tensor) -> object:
    return torch.minimum(total, each, out=total)


_STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "SUM": torch.Tensor.add_,
    "AVG": torch.Tensor.add_,
    "PRODUCT": torch.Tensor.mul_,
    "MAX": _maximum,
    "MIN": _minimum,
}


def _name_of(opts: Any) -> str:
    """The name of the reduction in torch's options; the sum where there are none."""
    if opts is None:
        return "SUM"
    for name in _STEPS:
        if opts.reduceOp == getattr(dist.ReduceOp, name):
            return name
    raise NotImplementedError(f"a group of threads does not reduce with {opts.reduceOp}")


def _fill(outputs: Tensors, flat: Tensors) -> None:
    for output, source in zip(outputs, flat, strict=True):
        output.detach().copy_(source.view(output.shape))  # autograd sees no collective change it
    _synchronise(outputs)


def _synchronise(tensors: Tensors) -> None:
    """Wait for the device: ranks have streams of their own, and meet on the host."""
    for device in {each.device for each in tensors if each.device.type != "cpu"}:
        torch.get_device_module(device).current_stream(device).synchronize()
