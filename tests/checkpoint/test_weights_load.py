"""Weights loaded by byte ranges, against what the safetensors library reads."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from checkpoint.saved import saved_for_all
from fullshard.checkpoint import LoadOptions, LoadReport, MismatchError, Rule, load_safetensors
from fullshard.checkpoint.weights import load
from fullshard.policies import OffloadPolicy
from fullshard.sharding import FSDPModule, fully_shard, replicate
from support.modules import Held, in_turn
from support.ranks import cpu_mesh, distributed
from support.threads.ranks import ThreadRank
from support.threads.world import run_program_on_threads
from support.weights import Assorted, saved, shard_assorted, untied, values_of

SMALL = LoadOptions(buffer_bytes=1024)


def _assert_same(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    found = values_of(model)
    for name, value in state.items():
        assert torch.equal(found[name], value), name


@pytest.mark.cross
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(2,), (1,), (4,), (2, 2), (3, 1)])
@pytest.mark.parametrize("files", [1, 3])
def test_every_rank_has_its_shards_and_the_model_computes_as_the_plain_one(
    files: int, shape: tuple[int, ...], dim: int, tmp_path: Path
) -> None:
    plain = Assorted()
    state = untied(plain)
    saved(tmp_path, state, files)
    tokens = torch.arange(11)[None]
    expected = plain(tokens).detach()

    def body(rank: ThreadRank) -> None:
        for meta in (False, True):
            with torch.device("meta" if meta else "cpu"):
                model = Assorted()
            if meta:
                model.cache = torch.zeros(2)
            shard_assorted(model, init_device_mesh("cpu", shape), dim)
            report = load_safetensors(model, tmp_path, options=SMALL)
            _assert_same(model, state)
            assert model.head.weight is model.embedding.weight
            assert report.ties == {"head.weight": "embedding.weight"}
            assert torch.allclose(model(tokens), expected)

    run_program_on_threads(body, torch.Size(shape).numel())


def test_a_plain_model_is_loaded_without_ranks_and_counts_all_bytes(tmp_path: Path) -> None:
    state = untied(Assorted())
    saved(tmp_path, state)
    model = Assorted()
    report = load_safetensors(model, tmp_path / "model.safetensors")
    _assert_same(model, state)
    assert report.bytes_requested == report.bytes_needed == sum(t.nbytes for t in state.values())
    with (tmp_path / "model.safetensors").open("rb") as file:
        assert report.header_bytes == 8 + int.from_bytes(file.read(8), "little")
    assert sorted(report.loaded) == sorted(state)
    assert report.bytes_from_device is None or report.bytes_from_device >= 0


def _reports(
    folder: Path,
    mesh: tuple[int, ...],
    matrix: tuple[int, int],
    dim: int | None = 0,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> list[LoadReport]:
    """Loads a matrix, on threads that cut it along ``dim`` or copy it; the reports of the ranks."""

    def body(rank: ThreadRank) -> LoadReport:
        model = Held({"weight": torch.randn(matrix)})
        if dim is None:
            replicate(model, mesh=init_device_mesh("cpu", mesh))
        else:
            fully_shard(
                model, mesh=init_device_mesh("cpu", mesh), shard_placement_fn=lambda _: Shard(dim)
            )
        report = load_safetensors(model, folder, options=LoadOptions(**options))
        _assert_same(model, {"weight": weight.float()})
        return report

    weight = torch.randn(matrix).to(dtype)
    saved(folder, {"weight": weight})
    return run_program_on_threads(body, torch.Size(mesh).numel())


@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_requests_its_share_in_the_dtype_of_the_file_whichever_dim_is_cut(
    dim: int, tmp_path: Path
) -> None:
    for report in _reports(tmp_path, (4,), (64, 32), dim, torch.bfloat16, buffer_bytes=1024):
        assert report.bytes_requested == report.bytes_needed == 64 * 32 * 2 // 4


def test_alone_a_rank_requests_the_gaps_between_short_runs_too(tmp_path: Path) -> None:
    options: dict[str, Any] = {"buffer_bytes": 1024, "read_together": False}
    for report in _reports(tmp_path, (4,), (64, 32), 1, torch.bfloat16, **options):
        assert report.bytes_needed == 64 * 32 * 2 // 4
        assert report.bytes_needed < report.bytes_requested <= 64 * 32 * 2


def test_long_runs_are_requested_one_by_one_by_the_rank_that_needs_them(tmp_path: Path) -> None:
    for report in _reports(tmp_path, (2,), (3, 2 * 4096), 1, buffer_bytes=40_000):
        assert report.bytes_requested == 3 * 4096 * 4


@pytest.mark.parametrize("replicas_read", [False, True])
def test_one_replica_reads_and_sends_or_all_read(replicas_read: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"buffer_bytes": 4096, "replicas_read": replicas_read}
    reports = _reports(tmp_path, (2, 2), (256, 64), **options)
    half = 256 * 64 * 4 // 2
    expected = [half] * 4 if replicas_read else [half, half, 0, 0]
    assert [report.bytes_requested for report in reports] == expected


@pytest.mark.parametrize("dim", [0, 1])
def test_replicas_agree_on_who_reads_where_the_last_shard_is_small(
    dim: int, tmp_path: Path
) -> None:
    # shards of 3 and 2 rows: one above 16 KiB, all so
    _reports(tmp_path, (2, 3), (5, 4000), dim, buffer_bytes=2048)


@pytest.mark.parametrize("world", [2, 4])
def test_parameters_of_replicate_are_read_by_one_rank(world: int, tmp_path: Path) -> None:
    reports = _reports(tmp_path, (world,), (256, 64), dim=None)
    expected = [256 * 64 * 4] + [0] * (world - 1)
    assert [report.bytes_requested for report in reports] == expected


def pair() -> Any:
    return in_turn(up=nn.Linear(8, 12), relu=nn.ReLU(), down=nn.Linear(12, 8))


@pytest.mark.parametrize("dim", [0, 1])
@distributed(4)
def test_tensor_parallel_parameters_cut_a_second_time(dim: int, tmp_path: Path) -> None:
    torch.manual_seed(3)
    plain = pair()
    saved_for_all(tmp_path, dict(plain.state_dict()))
    mesh = cpu_mesh((2, 2), ("dp", "tp"))
    model = pair()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(
        model, mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(dim if p.ndim > 1 else 0)
    )
    report = load_safetensors(model, tmp_path, options=SMALL)
    _assert_same(model, plain.state_dict())
    assert report.bytes_requested < sum(each.nbytes for each in plain.state_dict().values())
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(model(x), plain(x), atol=1e-6)


@distributed(2)
def test_training_goes_on_as_the_plain_models_with_an_optimizer_built_before(
    tmp_path: Path,
) -> None:
    torch.manual_seed(1)
    plain, start = Assorted(), Assorted()
    saved_for_all(tmp_path, untied(plain), 2)
    model = shard_assorted(start, cpu_mesh())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, plain)]
    tokens = torch.arange(11)[None]
    model(tokens).sum().backward()  # full parameters may be kept
    model.zero_grad()
    load_safetensors(model, tmp_path)
    for _ in range(3):
        losses = []
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            loss = each(tokens).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@distributed(2)
def test_an_optimizer_built_on_the_meta_device_steps_what_was_loaded(tmp_path: Path) -> None:
    saved_for_all(tmp_path, {"weight": torch.ones(4, 3), "bias": torch.ones(4)})
    with torch.device("meta"):
        model = fully_shard(nn.Linear(3, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    load_safetensors(model, tmp_path)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(values_of(model)["weight"], torch.zeros(4, 3))


@distributed(2)
def test_parameters_left_full_after_forward_are_not_used_with_old_values(tmp_path: Path) -> None:
    saved_for_all(tmp_path, {"weight": torch.ones(4, 3), "bias": torch.zeros(4)})
    model: Any = fully_shard(nn.Linear(3, 4), reshard_after_forward=False)
    x = torch.ones(1, 3)
    with torch.no_grad():
        model(x)
        load_safetensors(model, tmp_path)
        assert torch.equal(model(x), torch.full((1, 4), 3.0))
    model.unshard()
    load_safetensors(model, tmp_path)
    assert isinstance(model.weight, DTensor)


@distributed(2)
def test_offloaded_shards_are_given_memory_on_the_cpu(tmp_path: Path) -> None:
    saved_for_all(tmp_path, {"weight": torch.ones(4, 3), "bias": torch.zeros(4)})
    with torch.device("meta"):
        model = nn.Linear(3, 4)
    fully_shard(model, offload_policy=OffloadPolicy())
    load_safetensors(model, tmp_path)
    assert isinstance(model, FSDPModule)
    assert model(torch.ones(1, 3)).tolist() == [[3.0] * 4]


@distributed(2)
def test_from_the_meta_device_in_a_dtype_of_its_own(tmp_path: Path) -> None:
    value = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    saved_for_all(tmp_path, {"weight": value, "bias": torch.zeros(4)})
    with torch.device("meta"):
        model = nn.Linear(3, 4)
    fully_shard(model)
    load_safetensors(model, tmp_path, dtype=torch.bfloat16)
    assert torch.equal(values_of(model)["weight"], value.bfloat16())
    assert model(torch.ones(1, 3, dtype=torch.bfloat16)).dtype is torch.bfloat16
    with pytest.raises(ValueError, match="has memory in"):
        load_safetensors(model, tmp_path, dtype=torch.float32)


def test_strict_lists_all_that_does_not_fit_and_writes_nothing(tmp_path: Path) -> None:
    model = Assorted()
    state = untied(model)
    del state["up.weight"]
    state["down.weight"] = torch.zeros(6, 9)
    state["extra"] = torch.zeros(1)
    state["steps"] = torch.tensor(3.0)
    saved(tmp_path, state)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(MismatchError) as raised:
        load_safetensors(model, tmp_path)
    report = raised.value.report
    assert report.missing == ["up.weight"] and report.unexpected == ["extra"]
    assert [each.split(" ")[0] for each in report.mismatched] == ["steps", "down.weight"]
    for part in ("up.weight", "extra", "(6, 9)", "it must be (6, 10)", "F32", "torch.int64"):
        assert part in str(raised.value)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_not_strict_loads_what_fits_and_reports_the_rest(tmp_path: Path) -> None:
    model = Assorted()
    other = untied(Assorted())
    before = model.up.weight.detach().clone()
    del other["up.weight"]
    saved(tmp_path, {**other, "extra": torch.zeros(1)})
    report = load_safetensors(model, tmp_path, strict=False)
    assert (report.missing, report.unexpected) == (["up.weight"], ["extra"])
    assert torch.equal(model.up.weight, before)
    assert torch.equal(model.down.weight, other["down.weight"])


def test_ties_are_found_by_any_name_and_the_first_counts(tmp_path: Path) -> None:
    model = Assorted()
    state = untied(model)
    one, other = torch.randn(11, 6), torch.randn(11, 6)
    del state["embedding.weight"]
    load_safetensors(model, saved(tmp_path / "a", {**state, "head.weight": other}))
    assert torch.equal(model.embedding.weight, other)
    both = {**state, "head.weight": other, "embedding.weight": one}
    load_safetensors(model, saved(tmp_path / "b", both))
    assert torch.equal(model.head.weight, one) and model.head.weight is model.embedding.weight


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"model.{name}",
        {"weight": "model.weight", "bias": "model.bias"},
        [Rule("{*name}", "model.{*name}")],
        Rule("{name}", "model.{name}"),
    ],
)
def test_names_are_given_by_a_function_a_table_or_rules(rename: Any, tmp_path: Path) -> None:
    value = torch.randn(4, 3)
    saved(tmp_path, {"model.weight": value, "model.bias": torch.zeros(4)})
    model = nn.Linear(3, 4)
    load_safetensors(model, tmp_path, rename=rename)
    assert torch.equal(model.weight, value)


def test_names_that_are_left_alone_on_either_side(tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    before = model.bias.detach().clone()
    saved(tmp_path, {"weight": torch.ones(4, 3), "rotary.inv_freq": torch.ones(2)})
    rules = [Rule("bias", None), Rule(None, "{*any}.inv_freq")]
    report = load_safetensors(model, tmp_path, rename=rules)
    assert report.loaded == ["weight"] and torch.equal(model.bias, before)


def test_buffers_without_values_on_the_meta_device_are_named(tmp_path: Path) -> None:
    state = untied(Assorted())
    saved(tmp_path, state)
    with torch.device("meta"):
        model = Assorted()
    with pytest.warns(UserWarning, match="cache are on the meta device"):
        report = load_safetensors(model, tmp_path)
    assert report.on_meta == ["cache"] and not model.mean.is_meta
    _assert_same(model, state)
    assert not model.up.bias.requires_grad


def test_host_memory_beyond_the_shards_is_one_buffer(tmp_path: Path) -> None:
    save_file({"weight": torch.randn(512, 1024)}, tmp_path / "model.safetensors")  # 2 MiB
    for dim in (0, 1):

        def body(rank: ThreadRank, dim: int = dim) -> None:
            model = Held({"weight": torch.randn(512, 1024)})
            mesh = init_device_mesh("cpu", (2,))
            fully_shard(model, mesh=mesh, shard_placement_fn=lambda param: Shard(dim))
            load_safetensors(model, tmp_path, options=LoadOptions(buffer_bytes=64 * 1024))

        with _Allocations() as seen:
            run_program_on_threads(body, 2)
        buffers = 2 * 64 * 1024
        assert seen.python < buffers + 500_000, dim
        # what a launch sends and gets, where the transport of threads copies it
        assert max(seen.tensors_after_sharding) <= 64 * 1024, dim


class _Watch(TorchDispatchMode):
    """Notes the sizes of new storages."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._sizes = sizes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [each for each in args if isinstance(each, torch.Tensor) and not each.is_meta]
        known = {each.untyped_storage().data_ptr() for each in given}
        if isinstance(out, torch.Tensor) and not out.is_meta:
            storage = out.untyped_storage()
            if storage.data_ptr() not in known:
                self._sizes.append(storage.nbytes())
        return out


class _Allocations:
    """Python's own memory at its peak, and the sizes of tensors that are allocated."""

    def __init__(self) -> None:
        self.python = 0
        self.tensors_after_sharding: list[int] = [0]

    def __enter__(self) -> _Allocations:
        sizes, original = self.tensors_after_sharding, load._read

        def watched(*args: Any) -> Any:
            with _Watch(sizes):
                return original(*args)

        self._patch = patch.object(load, "_read", watched)
        self._patch.start()
        tracemalloc.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.python = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        self._patch.stop()
