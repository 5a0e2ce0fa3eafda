"""An optimizer with its state in files: the steps of the wrapped one, and what users do with it."""

from __future__ import annotations

import copy
import errno
import gc
import itertools
import mmap
import os
import pickle
import re
import signal
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.optim import (
    AdamW8bit,
    FileTier,
    Muon,
    OffloadedOptimizer,
    OverlappedStep,
    StateOffloadError,
)
from fullshard.optim.tiers.staging import Staging
from fullshard.optim.tiers.state_file import StateFile
from fullshard.optim.tiers.stored import StoredState
from fullshard.sharding import fully_shard
from fullshard.sharding.spi import local_of
from support.optim.offloaded import (
    PROGRAMS,
    adamw,
    assert_equal_runs,
    assert_on_host,
    on_host,
    part,
)
from support.optim.wide import Wide
from support.parity.compare import full
from support.ranks import RanksFailed, cpu_mesh, distributed, run_on_ranks
from support.surface.model import batch, build, sharded, train
from support.surface.ranks import everyone

STEPS = 4


def in_files(optimizer: Optimizer, folder: Path, **options: Any) -> OffloadedOptimizer:
    """``optimizer`` with all tensors of its state in files, and about one parameter per bucket."""
    return OffloadedOptimizer(optimizer, FileTier(folder, bucket_mb=1e-4, min_bytes=1, **options))


def _file_of(optimizer: OffloadedOptimizer) -> StateFile:
    space = optimizer._ready().space
    assert isinstance(space, StateFile)
    return space


def assert_in_file(optimizer: OffloadedOptimizer) -> None:
    """Every tensor of state with more than one element is a view of the file."""
    memory = _file_of(optimizer).memory
    start, end = memory.data_ptr(), memory.data_ptr() + memory.numel()
    for state in optimizer.state.values():
        for value in state.values():
            local = value.to_local() if isinstance(value, DTensor) else value
            if local.numel() > 1:
                assert start <= local.data_ptr() < end


# -- the same steps -------------------------------------------------------------------------------


TIERS: dict[str, Callable[..., OffloadedOptimizer]] = {"files": in_files, "host": on_host}


@pytest.mark.device(paces=True)
@pytest.mark.parametrize(
    ("tier", "name"),
    [pair for pair in itertools.product(TIERS, PROGRAMS) if pair != ("host", "offload")],
)
@distributed(2)
def test_steps_equal_those_of_the_wrapped_optimizer_to_the_bit(
    tier: str, name: str, tmp_path: Path
) -> None:
    program = PROGRAMS[name]
    mine, theirs = (sharded(build(), **program.arguments) for _ in range(2))
    one, other = TIERS[tier](program.make(mine), tmp_path), program.make(theirs)
    program.run(mine, one, range(STEPS))
    program.run(theirs, other, range(STEPS))
    assert_equal_runs(mine, one, theirs, other)
    if tier == "files":
        assert_in_file(one)
    elif next(mine.parameters()).device.type == "cpu":
        assert one.statistics.bytes_read == one.statistics.bytes_written == 0
    else:
        assert_on_host(one)
        assert (one.statistics.bytes_written > 0) == any(one.state.values())


def test_a_model_that_is_not_sharded_steps_alike(tmp_path: Path) -> None:
    mine, theirs = build(), build()
    one, other = in_files(adamw(mine), tmp_path), adamw(theirs)
    train(mine, one, range(STEPS))
    train(theirs, other, range(STEPS))
    assert_equal_runs(mine, one, theirs, other)
    assert_in_file(one)


@distributed(2)
def test_codes_of_eight_bits_stay_equal(tmp_path: Path) -> None:
    models = [Wide(), Wide()]
    for model in models:
        fully_shard(model)
    optimizers = [AdamW8bit(model.parameters(), lr=0.02) for model in models]
    mine, other = in_files(optimizers[0], tmp_path), optimizers[1]
    for step in range(3):
        for model, optimizer in zip(models, (mine, other), strict=True):
            for param in model.parameters():
                param.grad = torch.sin(param.detach() * 100 + step)
            optimizer.step()
    assert_equal_runs(models[0], mine, models[1], other)
    assert_in_file(mine)


@distributed(2)
def test_an_optimizer_built_before_sharding_steps_the_shards(tmp_path: Path) -> None:
    mine, theirs = build(), build()
    one, other = in_files(adamw(mine), tmp_path), adamw(theirs)
    sharded(mine)
    sharded(theirs)
    train(mine, one, range(2))
    train(theirs, other, range(2))
    assert_equal_runs(mine, one, theirs, other)


@distributed(2)
def test_parameters_without_gradients_and_new_groups_are_as_with_the_wrapped(
    tmp_path: Path,
) -> None:
    mine, theirs = sharded(build()), sharded(build())
    runs = []
    for model in (mine, theirs):
        params = list(model.parameters())
        params[0].requires_grad_(False)
        made: Optimizer = torch.optim.AdamW(params[:5], lr=0.1)
        optimizer = made if model is theirs else in_files(made, tmp_path)
        train(model, optimizer, range(2))
        optimizer.add_param_group({"params": params[5:], "lr": 0.02})
        train(model, optimizer, range(2, 4))
        runs.append(optimizer)
    assert_equal_runs(mine, runs[0], theirs, runs[1])


# -- memory and traffic ---------------------------------------------------------------------------


@distributed(2)
def test_a_step_reads_and_writes_the_state_once_and_keeps_three_buckets(tmp_path: Path) -> None:
    model = sharded(build())
    optimizer = in_files(adamw(model), tmp_path)
    train(model, optimizer, range(1))
    extents = [entry.extent.nbytes for entry in optimizer._ready()._entries.values()]
    before = optimizer.statistics
    assert (before.bytes_read, before.bytes_written) == (0, sum(extents))
    train(model, optimizer, range(1, 3))
    after = optimizer.statistics
    assert after.bytes_read == 2 * sum(extents)
    assert after.bytes_written - before.bytes_written == 2 * sum(extents)
    buckets = [[p for each in bucket.values() for p in each] for bucket in optimizer._buckets()]
    sizes = [
        sum(
            entry.extent.nbytes
            for param in params
            for value in optimizer.state[param].values()
            if (entry := optimizer._ready().entry_of(value)) is not None
        )
        for params in buckets
    ]
    assert sum(sizes) == sum(extents) > 3 * max(sizes)
    assert after.buffer_bytes == 0  # between steps


def test_between_steps_buffers_take_no_memory_as_soon_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    optimizer = in_files(adamw(model), tmp_path)
    buffers: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
    at_once = []

    class Noted(mmap.mmap):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            buffers.add(self)
            at_once.append(len(buffers))

    monkeypatch.setattr(mmap, "mmap", Noted)
    train(model, optimizer, range(2))
    staging = optimizer._ready().staging
    assert isinstance(staging, Staging) and staging._written  # nothing waited for them
    wait([move for batch in staging._written for move in batch.moves])
    _file_of(optimizer)._pool.shutdown()  # a thread holds its buffer to the end of its write
    assert max(at_once) == 3
    assert len(buffers) == 0


@distributed(2)
def test_the_first_step_holds_the_new_state_of_one_bucket_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive = []
    store = StoredState.store

    def noted(self: StoredState, found: Any, **options: Any) -> None:
        alive.append(sum(each() is not None for each in made))
        new = [local_of(optimizer.optimizer.state[param][key]) for param, key in found]
        made.extend(weakref.ref(each) for each in new if each.numel() > 1)
        del new
        store(self, found, **options)

    model = sharded(build())
    optimizer = in_files(adamw(model), tmp_path)
    gc.disable()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(StoredState, "store", noted)
            train(model, optimizer, range(1))
    finally:
        gc.enable()
    assert len(alive) > 3 and len(made) > 3
    assert max(alive) == 0


def test_the_buffer_of_a_large_parameter_is_freed_after_use(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 16384), nn.Linear(16384, 64))
    optimizer = in_files(adamw(model), tmp_path)
    for _ in range(2):
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
    state = sum(v.nbytes for each in optimizer.state.values() for v in each.values())
    assert optimizer.statistics.bytes_written > 2 * state - 4096
    assert optimizer.statistics.buffer_bytes == 0
    assert state > 8 * 2**20


def test_files_have_no_name_and_no_space_is_lost_when_state_is_replaced(tmp_path: Path) -> None:
    model = build()
    optimizer = in_files(adamw(model), tmp_path)
    train(model, optimizer, range(1))
    assert list(tmp_path.iterdir()) == []
    end = _file_of(optimizer).space.nbytes
    for step in range(1, 4):
        optimizer.load_state_dict(optimizer.state_dict())
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].clone()
        train(model, optimizer, range(step, step + 1))
    assert _file_of(optimizer).space.nbytes <= 2 * end


# -- state dicts and a user's own changes ---------------------------------------------------------


@distributed(2)
def test_a_run_continues_from_a_checkpoint_on_another_mesh(tmp_path: Path) -> None:
    never_stopped = sharded(build())
    other = adamw(never_stopped)
    train(never_stopped, other, range(4))
    model = sharded(build())
    optimizer = in_files(adamw(model), tmp_path / "state")
    train(model, optimizer, range(2))
    whole = {name: full(param) for name, param in model.named_parameters()}
    saved = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=tmp_path / "checkpoint")

    again = build(seed=1)
    again.load_state_dict(whole, strict=False)
    sharded(again, mesh=cpu_mesh((1, 2), ("replicate", "shard")))
    continued = in_files(adamw(again), tmp_path / "state")
    loaded = {"optimizer": get_optimizer_state_dict(again, continued)}
    dcp.load(loaded, checkpoint_id=tmp_path / "checkpoint")
    set_optimizer_state_dict(again, continued, loaded["optimizer"])
    train(again, continued, range(2, 4))
    assert_equal_runs(again, continued, never_stopped, other)
    assert_in_file(continued)


@pytest.mark.parametrize("to_files", [True, False])
@distributed(2)
def test_a_state_dict_goes_between_files_and_memory(to_files: bool, tmp_path: Path) -> None:
    whole = sharded(build())
    expected = adamw(whole)
    train(whole, expected, range(4))
    model = sharded(build())
    first, second = adamw(model), adamw(model)
    given = first if to_files else in_files(first, tmp_path)
    taken = in_files(second, tmp_path) if to_files else second
    train(model, given, range(2))
    taken.load_state_dict(given.state_dict())
    train(model, taken, range(2, 4))
    assert_equal_runs(model, taken, whole, expected)


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "in place": lambda state: state["exp_avg"].mul_(2),
    "another tensor": lambda state: state.update(exp_avg=state["exp_avg"] * 2),
    "other memory": lambda state: torch.utils.swap_tensors(state["exp_avg"], state["exp_avg"] * 2),
    "cleared": lambda state: state.clear(),
}


@pytest.mark.parametrize(
    ("tier", "name"),
    [
        *(("files", name) for name in CHANGES),
        *(
            pytest.param("host", name, marks=pytest.mark.device(paces=True))
            for name in CHANGES
            if name != "other memory"
        ),
    ],
)
@distributed(2)
def test_what_a_user_changes_in_the_state_is_stepped(tier: str, name: str, tmp_path: Path) -> None:
    mine, theirs = sharded(build()), sharded(build())
    one, other = TIERS[tier](adamw(mine), tmp_path), adamw(theirs)
    for model, optimizer in ((mine, one), (theirs, other)):
        train(model, optimizer, range(1))
        for param, state in list(optimizer.state.items())[::2]:
            CHANGES[name](state)
            if (tier, name) == ("host", "another tensor"):  # made of state on the host
                state["exp_avg"] = state["exp_avg"].to(param.device)
        train(model, optimizer, range(1, 3))
    assert_equal_runs(mine, one, theirs, other)


@distributed(2)
def test_a_state_dict_is_copied_and_saved_without_the_rest_of_the_file(tmp_path: Path) -> None:
    model = sharded(build())
    optimizer = in_files(adamw(model), tmp_path)
    train(model, optimizer, range(1))
    copied = copy.deepcopy(optimizer.state_dict())["state"]
    for state, expected in zip(copied.values(), optimizer.state.values(), strict=True):
        assert all(torch.equal(part(state[key]), part(expected[key])) for key in expected)
        assert all(part(value).untyped_storage().nbytes() <= 4096 for value in expected.values())


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_copy_is_refused_with_what_to_do(
    copied: Callable[[object], object], tmp_path: Path
) -> None:
    optimizer = in_files(adamw(build()), tmp_path)
    with pytest.raises(TypeError, match=r"save its state_dict\(\), and load that"):
        copied(optimizer)


def test_an_error_of_the_optimizer_itself_is_not_taken_for_one_of_the_disk(tmp_path: Path) -> None:
    class Logs(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            raise ConnectionResetError("the log server is away")  # an OSError

    model = build()
    optimizer = in_files(Logs(model.parameters()), tmp_path)
    model(batch()).sum().backward()
    with pytest.raises(ConnectionResetError, match="log server"):
        optimizer.step()


def test_hooks_of_both_optimizers_are_called_once_per_step(tmp_path: Path) -> None:
    model = build()
    inner = adamw(model)
    called: list[str] = []
    inner.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer = in_files(inner, tmp_path)
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    train(model, optimizer, range(2))
    assert called == ["before", "after"] * 2


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_steps_it(fused: bool, tmp_path: Path) -> None:
    """A fused optimizer unscales in its step, if it is the one that the scaler steps."""
    mine, theirs = build(), build()
    one, other = in_files(adamw(mine, fused=fused), tmp_path), adamw(theirs, fused=fused)
    for model, optimizer in ((mine, one), (theirs, other)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(model(batch(step)).square().mean()).backward()
            if step == 1:
                next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr] # it has one
            scaler.step(optimizer)
            scaler.update()
    assert_equal_runs(mine, one, theirs, other)


def test_a_step_that_raises_leaves_buckets_usable(tmp_path: Path) -> None:
    class Fails(torch.optim.AdamW):
        fails = False

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            if type(self).fails and self.param_groups[0]["params"][0].ndim == 1:
                raise ArithmeticError("a step failed")
            return super().step(closure)

    model = build()
    optimizer = in_files(Fails(model.parameters()), tmp_path)
    train(model, optimizer, range(1))
    state = [{k: v.clone() for k, v in each.items()} for each in optimizer.state.values()]
    Fails.fails = True
    for _ in range(5):  # more often than there are buffers
        with pytest.raises(ArithmeticError, match="a step failed"):
            optimizer.step()
    Fails.fails = False
    optimizer.zero_grad()
    optimizer.step()
    assert [each.keys() for each in optimizer.state.values()] == [each.keys() for each in state]


# -- errors ---------------------------------------------------------------------------------------


def _fails(call: str, code: int) -> Callable[..., int]:
    def failing(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    return failing


FAULTS = {
    "full disk": ("posix_fallocate", errno.ENOSPC, "no space for .* stays in memory"),
    "write": ("pwritev", errno.EIO, "could not be written.*Input/output error.*stays in memory"),
}


@pytest.mark.parametrize("name", FAULTS)
@distributed(2)
def test_state_that_cannot_be_written_stays_in_memory_and_all_ranks_raise(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed write is noticed when its buffer is needed: in the same step or in the next."""
    call, code, text = FAULTS[name]
    mine, theirs = sharded(build()), sharded(build())
    one, other = in_files(adamw(mine), tmp_path), adamw(theirs)
    train(theirs, other, range(4))
    errors = []
    for step in range(4):
        mine(batch(step)).square().mean().backward()
        with monkeypatch.context() as patched:
            if step < 2 and dist.get_rank() == 1:
                patched.setattr(os, call, _fails(call, code))
            try:
                one.step()
            except StateOffloadError as error:
                errors.append(str(error))
            one.state  # noqa: B018 # waits for the writes
        one.zero_grad()
    assert errors and all(re.search(f"rank 1: .*{text}", each) for each in errors)
    assert everyone(errors) == [errors] * 2
    assert_equal_runs(mine, one, theirs, other)
    assert_in_file(one)


def test_a_read_waits_for_the_write_of_the_same_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer buckets than buffers nothing else waits for the writes of the last step.

    The writes are held until the step waits for them, or has begun to read without a wait.
    """
    model = build()
    optimizer = OffloadedOptimizer(adamw(model), FileTier(tmp_path, min_bytes=1))
    train(model, optimizer, range(1))
    optimizer.state  # noqa: B018 # waits for the writes
    goes_on, moves, over = threading.Event(), list[Any](), list[bool]()
    write_piece, write, read = os.pwritev, StateFile.write, StateFile.read
    finish = Staging._finish_write

    def held_piece(*arguments: Any) -> int:
        assert goes_on.wait(30)
        return write_piece(*arguments)

    def noted_write(self: StateFile, *arguments: Any) -> Any:
        begun = write(self, *arguments)
        moves.extend(begun)
        return begun

    def noted_read(self: StateFile, *arguments: Any) -> Any:
        over.append(all(each.done() for each in moves))
        goes_on.set()
        return read(self, *arguments)

    def noted_finish(self: Staging) -> None:
        goes_on.set()
        finish(self)

    model(batch(1)).square().mean().backward()
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", held_piece)
        patched.setattr(StateFile, "write", noted_write)
        optimizer.step()
        patched.setattr(StateFile, "read", noted_read)
        patched.setattr(Staging, "_finish_write", noted_finish)
        optimizer.step()
        optimizer.state  # noqa: B018 # waits for the writes
    assert moves and over == [True]


@distributed(2)
def test_state_that_cannot_be_read_names_the_parameters_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sharded(build())
    optimizer = in_files(adamw(model), tmp_path)
    train(model, optimizer, range(1))
    optimizer.zero_grad()
    model(batch(1)).square().mean().backward()
    before = [part(param).clone() for param in model.parameters()]
    text = r"rank 0: the state of .*stem.weight.* not stepped"
    with monkeypatch.context() as patched:
        if dist.get_rank() == 0:
            patched.setattr(os, "preadv", _fails("preadv", errno.EIO))
        with pytest.raises(StateOffloadError, match=text):
            optimizer.step()
    pairs = zip(model.parameters(), before, strict=True)
    is_stepped = [not torch.equal(part(param), old) for param, old in pairs if old.numel()]
    assert is_stepped == [dist.get_rank() == 1] * len(is_stepped)


@distributed(2)
def test_a_folder_that_cannot_be_made_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    model = sharded(build())
    folder = tmp_path
    if dist.get_rank() == 1:
        (tmp_path / "file").write_text("")
        folder = tmp_path / "file" / "below"
    with pytest.raises(StateOffloadError, match=r"rank 1: cannot open FileTier.*Not a directory"):
        in_files(adamw(model), folder)


def _overlapped(model: nn.Module) -> Optimizer:
    return OverlappedStep(adamw(model), model)


WRONG: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "no optimizer": (
        lambda path: OffloadedOptimizer(3, FileTier(path)),  # type: ignore[arg-type] # wrong
        TypeError,
        "optimizer is a int; pass a torch.optim.Optimizer",
    ),
    "no tier": (
        lambda path: OffloadedOptimizer(adamw(build()), path),  # type: ignore[arg-type] # wrong
        TypeError,
        r"pass FileTier\(folder\) or HostTier\(\)",
    ),
    "wrapped twice": (
        lambda path: OffloadedOptimizer(_overlapped(build()), FileTier(path)),
        TypeError,
        "OverlappedStep, which wraps another; pass that one",
    ),
    "lbfgs": (
        lambda path: OffloadedOptimizer(torch.optim.LBFGS(build().parameters()), FileTier(path)),
        TypeError,
        "LBFGS, which steps parameters together",
    ),
    "muon": (
        lambda path: OffloadedOptimizer(
            Muon(nn.Linear(4, 4, bias=False).parameters()), FileTier(path)
        ),
        TypeError,
        "Muon, which steps parameters together",
    ),
    "two buffers": (lambda path: FileTier(path, buffers=2), ValueError, "buffers is 2; pass 3"),
    "no threads": (lambda path: FileTier(path, threads=0), ValueError, "threads is 0"),
    "bucket": (lambda path: FileTier(path, bucket_mb=0), ValueError, "bucket_mb is 0"),
    "bucket of text": (lambda path: FileTier(path, bucket_mb="1"), TypeError, "bucket_mb is '1'"),  # type: ignore[arg-type] # wrong
    "direct": (lambda path: FileTier(path, direct=1), TypeError, "direct is 1"),  # type: ignore[arg-type] # wrong
    "folder": (lambda path: FileTier(3), TypeError, "folder is a int"),  # type: ignore[arg-type] # wrong
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name: str, tmp_path: Path) -> None:
    make, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        make(tmp_path)


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="which is a file; pass a folder"):
        FileTier(tmp_path / "file")


# -- the file -------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
def test_extents_keep_their_bytes_apart_and_join_for_one_call(direct: bool, tmp_path: Path) -> None:
    file = StateFile(tmp_path, 1 << 20, threads=2, direct=direct)
    extents = [file.reserve(nbytes) for nbytes in (1, 5000, 4096)]
    assert [extent.nbytes for extent in extents] == [4096, 8192, 4096]
    sent = torch.randint(0, 256, (3 * 4096 + 8192,), dtype=torch.uint8)[4096:]
    aligned_by = -sent.data_ptr() % 4096
    memory = torch.empty(16384 + 4096, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 4096 :][:16384]
    memory.copy_(torch.randint(0, 256, (16384,), dtype=torch.uint8))
    assert aligned_by >= 0
    for each in file.write([extents[2], extents[0], extents[1]], memory):
        each.result()
    assert torch.equal(file.memory[extents[2].offset :][:4096], memory[:4096])
    assert torch.equal(file.memory[extents[0].offset :][:12288], memory[4096:])
    back = torch.zeros(16384 + 4096, dtype=torch.uint8)
    back = back[-back.data_ptr() % 4096 :][:16384]
    for each in file.read([extents[2], extents[0], extents[1]], back):
        each.result()
    assert torch.equal(back, memory)
    file.give_back(extents[0])
    assert file.reserve(7) == extents[0]
    with pytest.raises(OSError, match="the file was made for"):
        file.reserve(2 << 20)


def test_a_read_in_progress_keeps_the_memory_of_a_buffer_that_was_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = StateFile(tmp_path, 1 << 20, threads=1, direct=False)
    begun, goes_on = threading.Event(), threading.Event()
    read = os.preadv

    def slow(*arguments: Any) -> int:
        begun.set()
        goes_on.wait()
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", slow)
    pages = mmap.mmap(-1, 4096)
    alive = weakref.ref(pages)
    moves = file.read([file.reserve(4096)], torch.frombuffer(pages, dtype=torch.uint8))
    del pages  # as after an error in the middle of a step
    begun.wait()
    kept = alive() is not None
    goes_on.set()
    assert kept
    assert [each.result() for each in moves] == [None]


def _killed_with_state(folder: Path) -> None:
    model = nn.Linear(64, 64)
    optimizer = OffloadedOptimizer(adamw(model), FileTier(folder))
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    assert optimizer.statistics.bytes_written > 0
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as ended:
        run_on_ranks(_killed_with_state, 1, tmp_path, fresh=True)
    assert ended.value.exit_codes == {0: -signal.SIGKILL}
    assert list(tmp_path.iterdir()) == []
