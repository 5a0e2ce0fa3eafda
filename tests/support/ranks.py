"""Test functions that run on every rank of a real process group.

Owns one pool of rank processes per world size and pytest run, started at its first use: a job costs
milliseconds. ``@distributed(2, 4)`` turns a test's body into such a job, ``run_on_ranks`` is the
same as a plain call. A pool in which a rank failed is replaced.
"""

from __future__ import annotations

import atexit
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from support import device
from support.chosen import chosen
from support.pool.ranks import RankPool, RanksFailed
from support.pool.starting import end_servers

__all__ = [
    "RanksFailed",
    "cpu_mesh",
    "distributed",
    "new_group",
    "ranks_at_pace",
    "run_on_ranks",
    "shutdown_pools",
    "world",
]

JOB_TIMEOUT = 60.0  # seconds for one job

# gloo loses a first connection between processes of a busy machine now and then: once more, then
_LOST_CONNECTION = "Gloo connectFullMesh failed with"

_pools: dict[int, RankPool] = {}
_paces: list[int] = []  # of the asynchronous device, if the ranks have one; see `ranks_at_pace`


def _pool(world_size: int) -> RankPool:
    pool = _pools.get(world_size)
    if pool is None or pool.closed:
        pool = _pools[world_size] = RankPool(world_size)
    return pool


def shutdown_pools() -> None:
    """End all rank processes; the next job starts new ones."""
    while _pools:
        _, pool = _pools.popitem()
        if not pool.closed:
            pool.kill()
    end_servers()


atexit.register(shutdown_pools)


def _dispatch(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    timeout: float,
    fresh: bool,
) -> list[Any]:
    __tracebackhide__ = True
    if _paces:
        fn = functools.wraps(fn)(functools.partial(_at_pace, _paces[-1], fn))

    def run() -> list[Any]:
        if fresh:
            with RankPool(world_size) as pool:
                return pool.run(fn, args, kwargs, timeout)
        return _pool(world_size).run(fn, args, kwargs, timeout)

    try:
        return run()
    except RanksFailed as failed:
        if _LOST_CONNECTION not in str(failed):
            raise
        return run()


@contextmanager
def ranks_at_pace(number: int) -> Iterator[None]:
    """Let the ranks' asynchronous device run work as late as a number says, inside the block."""
    _paces.append(number)
    try:
        yield
    finally:
        _paces.pop()


def _at_pace(number: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from support.device.pace import pace_of, paced  # needs the device, which few runs have

    with paced(pace_of(number)):
        return fn(*args, **kwargs)


def run_on_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    job_timeout: float = JOB_TIMEOUT,
    fresh: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """What ``fn(*args, **kwargs)`` returned on each of ``world_size`` ranks, in rank order.

    Everything travels by value. ``fresh`` runs in processes started for this job and ended after
    it, for functions that kill ranks or change what cannot be put back. Raises `RanksFailed`, with
    each rank's traceback or stack, when a rank raises, dies or is not done after ``job_timeout``
    seconds.
    """
    return _dispatch(fn, world_size, args, kwargs, timeout=job_timeout, fresh=fresh)


def distributed(
    *world_sizes: int,
    world_size: int | None = None,
    timeout: float = JOB_TIMEOUT,
    fresh: bool = False,
    matrix: Collection[int] = (),
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """A decorator that runs a test function's body on every rank, once per world size.

    In the body ``torch.distributed`` is initialised over gloo. Parametrised values and fixtures
    arrive as keyword arguments and must be picklable; a ``world_size`` parameter, if it has one, is
    filled in. World sizes that are also in ``matrix`` run in ``nox -s matrix`` only.
    """
    worlds = world_sizes if world_size is None else (*world_sizes, world_size)
    if not worlds:
        raise ValueError("distributed() needs at least one world size, as in @distributed(2, 4)")

    def decorate(fn: Callable[..., Any]) -> Callable[..., None]:
        signature = inspect.signature(fn)
        takes_world = "world_size" in signature.parameters

        @functools.wraps(fn)
        def test(*args: Any, world_size: int, **kwargs: Any) -> None:
            __tracebackhide__ = True  # the report of the ranks says it all
            if takes_world:
                kwargs["world_size"] = world_size
            _dispatch(fn, world_size, args, kwargs, timeout=timeout, fresh=fresh)

        # The marks stay on the wrapper that pytest sees; the body need not carry them to the ranks.
        fn.__dict__.pop("pytestmark", None)
        if not takes_world:
            world = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
            parameters = [*signature.parameters.values(), world]
            signature = signature.replace(parameters=parameters)
        test.__signature__ = signature  # type: ignore[attr-defined]  # read by inspect, not declared
        values = [
            pytest.param(
                world, id=f"{world}ranks", marks=[pytest.mark.matrix] if world in matrix else []
            )
            for world in worlds
        ]
        return pytest.mark.parametrize("world_size", values)(test)

    return decorate


@functools.cache
def cpu_mesh(
    shape: tuple[int, ...] | None = None, names: tuple[str, ...] | None = None
) -> DeviceMesh:
    """A mesh over all ranks, one per shape and process; one axis unless told otherwise.

    The device is the CPU, or the asynchronous device if ``pytest --device async`` chose it. Call it
    on a rank, by all ranks in the same order.
    """
    device_type = device.NAME if chosen() else "cpu"
    return init_device_mesh(device_type, shape or (dist.get_world_size(),), mesh_dim_names=names)


def world() -> dist.ProcessGroup:
    """The process group of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group


def new_group(
    ranks: list[int] | None = None, *, timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """A process group of its own of all ranks, or of ``ranks``, which alone call it then."""
    group = dist.new_group(ranks, timeout, use_local_synchronization=ranks is not None)
    assert isinstance(group, dist.ProcessGroup)
    return group
