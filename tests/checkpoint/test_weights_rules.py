"""Rules of renaming, fusing, splitting, stacking and transposing, against torch's own operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fullshard.checkpoint import (
    LoadOptions,
    MismatchError,
    Rule,
    SaveOptions,
    WeightsError,
    load_safetensors,
    save_safetensors,
)
from fullshard.checkpoint.rules.templates import fields_of, filled, matched
from fullshard.sharding import fully_shard
from support.modules import Held
from support.threads.ranks import ThreadRank
from support.threads.world import run_program_on_threads
from support.weights import files_of, saved, values_of

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A rule; the shapes of the model's parameters; and what files hold of them, by torch."""

    rules: Sequence[Rule]
    shapes: dict[str, tuple[int, ...]]
    files: Callable[[State], State]


def _qkv_apart(state: State) -> State:
    q, k, v = state["qkv"].split([8, 2, 2])
    return {"q": q.clone(), "k": k.clone(), "v": v.clone()}


def _qkv_in_heads(state: State) -> State:
    """Two groups of two query heads, a key head and a value head, of two rows each."""
    parts = state["qkv"].view(2, 4, 2, 5)
    names = {"q": parts[:, :2], "k": parts[:, 2:3], "v": parts[:, 3:]}
    return {name: part.reshape(-1, 5).clone() for name, part in names.items()}


def _split_in_heads(state: State) -> State:
    """Query, key and value of each of 3 heads of 2 rows side by side in one tensor."""
    heads = [state[name].view(3, 2, 5) for name in ("q", "k", "v")]
    return {"qkv": torch.stack(heads, 1).reshape(18, 5)}


def _experts_apart(state: State) -> State:
    """Stacked gate and up, transposed, from tensors of single experts."""
    found = {}
    for expert, matrix in enumerate(state["experts"]):
        gate, up = matrix.chunk(2, dim=1)
        found[f"e.{expert}.gate"] = gate.T.contiguous()
        found[f"e.{expert}.up"] = up.T.contiguous()
    return found


def _experts_stacked(state: State) -> State:
    pairs = [torch.cat([state[f"e.{i}.gate"], state[f"e.{i}.up"]]).T for i in range(3)]
    return {"experts": torch.stack(pairs)}


CASES = {
    "rename": Case(
        [Rule("{*name}", "model.{*name}")],
        {"a": (5, 3), "b": ()},
        lambda state: {f"model.{name}": value for name, value in state.items()},
    ),
    "transpose": Case(
        [Rule("w", "w", transpose=(0, 1))],
        {"w": (7, 5)},
        lambda state: {"w": state["w"].T.contiguous()},
    ),
    "fuse with parts": Case(
        [Rule("qkv", ("q", "k", "v"), parts=(4, 1, 1))], {"qkv": (12, 5)}, _qkv_apart
    ),
    "fuse along columns": Case(
        [Rule("up", ("gate", "up"), dim=1)],
        {"up": (5, 6)},
        lambda state: dict(
            zip(("gate", "up"), (x.contiguous() for x in state["up"].chunk(2, 1)), strict=True)
        ),
    ),
    "fuse in groups": Case(
        [Rule("qkv", ("q", "k", "v"), parts=(2, 1, 1), groups=2)], {"qkv": (16, 5)}, _qkv_in_heads
    ),
    "split": Case(
        [Rule(("q", "k", "v"), "qkv")],
        {"q": (6, 5), "k": (3, 5), "v": (3, 5)},
        lambda state: {"qkv": torch.cat([state["q"], state["k"], state["v"]])},
    ),
    "split transposed": Case(
        [Rule(("q", "k", "v"), "qkv", transpose=(0, 1))],
        {"q": (5, 4), "k": (5, 4), "v": (5, 4)},
        lambda state: {"qkv": torch.cat([state["q"], state["k"], state["v"]]).T.contiguous()},
    ),
    "split in groups": Case(
        [Rule(("q", "k", "v"), "qkv", groups=3)],
        {"q": (6, 5), "k": (6, 5), "v": (6, 5)},
        _split_in_heads,
    ),
    "stack experts": Case(
        [Rule("experts", ("e.{i}.gate", "e.{i}.up"), dim=1, transpose=(0, 1))],
        {"experts": (3, 4, 6)},
        _experts_apart,
    ),
    "unstack experts": Case(
        [Rule(("e.{i}.gate", "e.{i}.up"), "experts", transpose=(0, 1))],
        {f"e.{i}.{name}": (3, 5) for i in range(3) for name in ("gate", "up")},
        _experts_stacked,
    ),
    "stack vectors": Case(
        [Rule("bias", "b.{i}")],
        {"bias": (5, 3)},
        lambda state: {f"b.{i}": row.clone() for i, row in enumerate(state["bias"])},
    ),
    "unstack scalars": Case(
        [Rule("s.{i}", "scales")],
        {f"s.{i}": () for i in range(4)},
        lambda state: {"scales": torch.stack(list(state.values()))},
    ),
}


def bag(shapes: dict[str, tuple[int, ...]]) -> Held:
    return Held({name: torch.randn(shape) for name, shape in shapes.items()})


@pytest.mark.cross
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("mesh", [(2, 2), (3,), (1,)])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_rule_loads_what_torchs_operators_make_and_saves_it_back(
    case: Case, mesh: tuple[int, ...], dim: int, tmp_path: Path
) -> None:
    state = {name: torch.randn(shape) for name, shape in case.shapes.items()}
    files = case.files(state)
    saved(tmp_path / "in", files)

    def body(rank: ThreadRank) -> None:
        model = bag(case.shapes)
        fully_shard(
            model,
            mesh=init_device_mesh("cpu", mesh),
            shard_placement_fn=lambda param: (
                Shard(dim if param.ndim > dim else 0) if param.ndim else None
            ),
        )
        load_safetensors(
            model, tmp_path / "in", rename=case.rules, options=LoadOptions(buffer_bytes=1024)
        )
        for name, value in values_of(model).items():
            assert torch.equal(value, state[name]), name
        options = SaveOptions(buffer_bytes=1024)
        save_safetensors(model, tmp_path / "out", rename=case.rules, options=options)

    run_program_on_threads(body, torch.Size(mesh).numel())
    out = files_of(tmp_path / "out")
    assert out.keys() == files.keys()
    for name, value in files.items():
        assert torch.equal(out[name], value), name


def test_parts_that_are_not_given_are_those_of_the_files(tmp_path: Path) -> None:
    for transpose in (None, (0, 1)):
        parts = {name: torch.randn(rows, 5) for name, rows in (("q", 7), ("k", 2), ("v", 1))}
        turned = {n: p.T.contiguous() if transpose else p for n, p in parts.items()}
        model = bag({"qkv": (10, 5)})
        rule = Rule("qkv", ("q", "k", "v"), transpose=transpose)
        load_safetensors(model, saved(tmp_path / str(transpose), turned), rename=rule)
        assert torch.equal(values_of(model)["qkv"], torch.cat(list(parts.values())))


def test_only_the_rows_of_a_shard_are_requested_where_a_split_falls_inside_it(
    tmp_path: Path,
) -> None:
    files = {name: torch.randn(rows, 8) for name, rows in (("q", 6), ("k", 2), ("v", 4))}
    saved(tmp_path, files)

    def body(rank: ThreadRank) -> None:
        model = bag({"qkv": (12, 8)})
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        report = load_safetensors(model, tmp_path, rename=Rule("qkv", ("q", "k", "v")))
        assert report.bytes_requested == 6 * 8 * 4
        assert torch.equal(values_of(model)["qkv"], torch.cat(list(files.values())))

    run_program_on_threads(body, 2)


def test_a_lora_model_takes_its_base_and_saves_its_adapters(tmp_path: Path) -> None:
    base = {"layers.0.q.weight": torch.randn(4, 3)}
    saved(tmp_path / "base", base)
    model = bag(
        {
            "m.layers.0.q.base_layer.weight": (4, 3),
            "m.layers.0.q.lora_A.default.weight": (2, 3),
            "m.layers.0.q.lora_B.default.weight": (4, 2),
        }
    )
    load_safetensors(
        model,
        tmp_path / "base",
        rename=[Rule("m.{*m}.base_layer.weight", "{*m}.weight"), Rule("{*m}.lora_{*ab}", None)],
    )
    value = values_of(model)
    assert torch.equal(value["m.layers.0.q.base_layer.weight"], base["layers.0.q.weight"])
    adapters = [
        Rule("{*m}.base_layer.weight", None),
        Rule("{*m}.lora_{ab}.default.weight", "{*m}.lora_{ab}.weight"),
    ]
    report = save_safetensors(
        model, tmp_path / "out", rename=adapters, options=SaveOptions(stem="adapter_model")
    )
    assert [path.name for path in report.files] == ["adapter_model.safetensors"]
    found = files_of(tmp_path / "out")
    assert sorted(found) == ["m.layers.0.q.lora_A.weight", "m.layers.0.q.lora_B.weight"]
    load_safetensors(model, tmp_path / "out", rename=adapters)


@pytest.mark.parametrize(
    ("rules", "shapes", "files", "words"),
    [
        (Rule("{i}", "w"), {"a": (2,), "b": (2,)}, {"w": (2, 2)}, "counts from 0"),
        (
            [Rule("a", "w"), Rule("b", "w")],
            {"a": (2,), "b": (2,)},
            {"w": (2,)},
            "produced twice: w by a and b",
        ),
        (Rule(("a", "b"), "w"), {"a": (2,)}, {"w": (4,)}, "b is not in the model"),
        (Rule("a", ("x", "y")), {"a": (5,)}, {"x": (2,), "y": (2,)}, "5 indices along dim 0"),
        (Rule("a", ("x", "y"), dim=2), {"a": (4, 4)}, {"x": (2, 4), "y": (2, 4)}, "cuts dim 2"),
        (Rule("a", "x", transpose=(0, 2)), {"a": (4, 4)}, {"x": (4, 4)}, "swaps"),
        (Rule("a", "x.{i}"), {"a": ()}, {"x.0": ()}, "no dim to stack"),
        (Rule(("a", "b"), "w"), {"a": (2, 3), "b": (2, 4)}, {"w": (4, 3)}, "cannot be one tensor"),
    ],
)
def test_rules_that_do_not_fit_are_reported_before_anything_is_written(
    rules: Rule | list[Rule],
    shapes: dict[str, tuple[int, ...]],
    files: dict[str, tuple[int, ...]],
    words: str,
    tmp_path: Path,
) -> None:
    model = bag(shapes)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    saved(tmp_path, {name: torch.zeros(shape) for name, shape in files.items()})
    with pytest.raises(MismatchError, match=words):
        load_safetensors(model, tmp_path, rename=rules)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_tensor_of_which_a_part_is_missing_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="b is not in the model"):
        save_safetensors(bag({"a": (2,)}), tmp_path, rename=Rule(("a", "b"), "w"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Rule(("a", "b"), ("c", "d")), "several names on both sides"),
        (lambda: Rule("a", None, parts=(1, 2)), "has 2 parts"),
        (lambda: Rule(None, None), "names nothing"),
        (lambda: Rule("{a}.{b}", "{c}"), "on one side only"),
        (lambda: Rule("a", ("x.{i}", "y")), "must have the same fields"),
        (lambda: Rule("a", ("x", "y"), parts=(0, 1)), "below 1"),
        (lambda: Rule("a", ("x", "y"), groups=0), "below 1"),
    ],
)
def test_a_rule_that_cannot_be_is_refused_where_it_is_built(
    make: Callable[[], Rule], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_what_is_no_rule_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, {"a": torch.zeros(2)})
    for wrong in ("model.", [("a", "b")], 3):
        with pytest.raises(TypeError):
            load_safetensors(bag({"a": (2,)}), tmp_path, rename=wrong)  # type: ignore[arg-type]  # meant
    with pytest.raises(TypeError, match="gave 3 for a"):
        load_safetensors(bag({"a": (2,)}), tmp_path, rename=lambda name: 3)  # type: ignore[arg-type, return-value]  # meant
    with pytest.raises(TypeError, match="no text"):
        Rule(3, "a")  # type: ignore[arg-type]  # meant


def test_templates_match_what_they_make() -> None:
    assert matched("layers.{i}.{*rest}", "layers.3.mlp.up") == {"i": "3", "rest": "mlp.up"}
    assert matched("layers.{i}.w", "layers.3.x.w") is None
    assert matched("a.{i}.{i}", "a.1.2") is None
    assert matched("a(1).{x}", "a(1).b") == {"x": "b"}
    assert filled("m.{*rest}.{i}", {"i": "3", "rest": "a.b"}) == "m.a.b.3"
    assert fields_of("{a}.{*b}") == {"a", "b"}
