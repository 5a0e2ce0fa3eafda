"""Properties of loading and saving over drawn shapes, meshes, cuts, dtypes and buffers."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from fullshard.checkpoint import (
    LoadOptions,
    SaveOptions,
    load_safetensors,
    save_safetensors,
)
from fullshard.checkpoint.boxes import Box, box_of
from fullshard.checkpoint.files.runs import divided, run_starts, runs_of, span_of
from support.threads.ranks import ThreadRank
from support.threads.world import run_program_on_threads
from support.weights import files_of, saved

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn)


@dataclass(frozen=True)
class Layout:
    """A mesh; and tensors: shape, placements, dtypes of the parameter and of the file."""

    mesh: tuple[int, ...]
    tensors: list[tuple[tuple[int, ...], tuple[Placement, ...], torch.dtype, torch.dtype]]
    buffer_bytes: int
    together: bool
    replicas_read: bool
    max_shard_size: int
    writers: int


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    mesh = draw(st.sampled_from([(1,), (2,), (3,), (2, 2), (3, 2), (2, 1, 2)]))
    tensors = []
    for _ in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        placements = tuple(draw(st.sampled_from(kinds)) for _ in mesh)
        dtypes = (draw(st.sampled_from(DTYPES[:3])), draw(st.sampled_from(DTYPES)))
        tensors.append((shape, placements, *dtypes))
    return Layout(
        mesh=mesh,
        tensors=tensors,
        buffer_bytes=draw(st.sampled_from([1024, 1500, 10_000])),
        together=draw(st.booleans()),
        replicas_read=draw(st.booleans()),
        max_shard_size=draw(st.sampled_from([1, 200, 10**9])),
        writers=draw(st.integers(1, 3)),
    )


@given(layouts())
@settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)
def test_any_layout_loads_what_is_in_the_files_and_saves_it_again(layout: Layout) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {
        f"t{i}": torch.randn(shape, generator=generator).to(stored)
        for i, (shape, _, _, stored) in enumerate(layout.tensors)
    }
    own = {f"t{i}": each[2] for i, each in enumerate(layout.tensors)}
    with tempfile.TemporaryDirectory() as folder:
        saved(Path(folder, "in"), state)

        def body(rank: ThreadRank) -> int:
            mesh = init_device_mesh("cpu", layout.mesh)
            model = nn.Module()
            for i, (shape, placements, dtype, _) in enumerate(layout.tensors):
                zeros = torch.zeros(shape, dtype=dtype)
                cut = distribute_tensor(zeros, mesh, placements, src_data_rank=None)
                model.register_parameter(f"t{i}", nn.Parameter(cut))
            options = LoadOptions(
                buffer_bytes=layout.buffer_bytes,
                read_together=layout.together,
                replicas_read=layout.replicas_read,
            )
            report = load_safetensors(model, Path(folder, "in"), options=options)
            for i, (_, placements, dtype, _) in enumerate(layout.tensors):
                wanted = distribute_tensor(
                    state[f"t{i}"].to(dtype), mesh, placements, src_data_rank=None
                )
                found = cast(DTensor, model.get_parameter(f"t{i}"))
                assert torch.equal(found.to_local(), wanted.to_local())
            save_safetensors(
                model,
                Path(folder, "out"),
                max_shard_size=layout.max_shard_size,
                options=SaveOptions(
                    buffer_bytes=layout.buffer_bytes, writers_per_file=layout.writers
                ),
            )
            return report.bytes_requested

        run_program_on_threads(body, torch.Size(layout.mesh).numel())
        found = files_of(Path(folder, "out"))
        for name, value in state.items():
            assert torch.equal(found[name], value.to(own[name])), name


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(1, size - start)) for size, start in zip(shape, starts, strict=True)]
    return shape, Box(tuple(starts), tuple(sizes))


@given(boxes(), st.integers(1, 40))
@settings(derandomize=True, deadline=None, database=None)
def test_runs_spans_and_parts_are_the_elements_of_a_box(
    drawn: tuple[tuple[int, ...], Box], limit: int
) -> None:
    shape, box = drawn
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    inside = box.of(numbers).flatten().tolist()
    count, length = runs_of(box, shape)
    starts = list(run_starts(box, shape))
    assert len(starts) == count
    assert [first + i for first in starts for i in range(length)] == inside
    assert span_of(box, shape) == (inside[0], inside[-1] - inside[0] + 1)
    parts = list(divided(box, lambda part: part.numel, limit))
    assert [n for part in parts for n in part.of(numbers).flatten().tolist()] == inside
    assert all(part.numel <= limit for part in parts)
    assert all(part.of(box.of(numbers), box).equal(part.of(numbers)) for part in parts)


def test_a_plain_tensor_is_all_of_itself() -> None:
    assert box_of(torch.zeros(3, 2)) == Box((0, 0), (3, 2))
    assert box_of(torch.zeros(())).numel == 1
