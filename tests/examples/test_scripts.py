"""The examples do what they say; they run in the tests' pool of ranks."""

from __future__ import annotations

import ast
import math
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from support.members import ROOT
from support.ranks import distributed
from support.tools import load_example

EXAMPLES = ROOT / "examples"
SIZES = ["--layers=2", "--width=32", "--heads=2", "--context=16", "--rows=4", "--steps=6"]
SIZES += ["--evaluate-every=3"]


def test_the_readme_names_every_example_and_no_other() -> None:
    text = (EXAMPLES / "README.md").read_text()
    files = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.*")}
    files = {path for path in files if "__pycache__" not in path} - {"README.md"}
    assert [path for path in files if f"({path})" not in text] == []
    assert text.count("](") == len(files)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_uses_public_names_only(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fullshard"):
            assert not any(part.startswith("_") for part in node.module.split("."))  # type: ignore[union-attr]
            assert not any(alias.name.startswith("_") for alias in node.names)


@distributed(2)
def test_nanogpt_goes_on_after_a_stop_as_if_there_had_been_none(tmp_path: Path) -> None:
    script = load_example("nanogpt")
    data, out = tmp_path / "text.txt", tmp_path / "run"
    if dist.get_rank() == 0:
        data.write_bytes(Path(script.__file__ or "").read_bytes())
    dist.barrier()
    words = [*SIZES, "--data", str(data), "--out", str(out), "--dtype", "float32"]
    whole = script.main(words)
    assert len(whole) == 6 and whole[-1] < whole[0]
    if dist.get_rank() == 0:
        (out / "latest").write_text("3")
    dist.barrier()
    assert script.main([*words, "--resume"]) == whole[3:]


@distributed(2)
def test_nanogpt_begins_with_the_unsharded_models_loss_and_leaves_weights_for_plain_torch(
    tmp_path: Path,
) -> None:
    script = load_example("nanogpt")
    words = [*SIZES, "--data", script.__file__, "--out", str(tmp_path), "--accumulate", "1"]
    losses = script.main([*words, "--dtype", "float32"])
    config = script.Config(layers=2, width=32, heads=2, context=16, rows=4)
    torch.manual_seed(config.seed)
    plain = script.GPT(config)
    training, _ = script.read_bytes(script.__file__)
    inputs, targets = script.windows(training, config, (config.seed, dist.get_rank(), 0, 0))
    expected = cross_entropy(plain(inputs).flatten(0, 1), targets.flatten()).item()
    assert math.isclose(losses[0], expected, rel_tol=1e-5)
    dist.barrier()
    before = plain.token.weight.clone()
    plain.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert plain.out.weight is plain.token.weight
    assert not torch.equal(plain.token.weight, before)


@distributed(4)
def test_the_mixture_of_experts_trains_as_the_unsharded_one() -> None:
    script = load_example("mixture_of_experts")
    losses = script.main(["--steps", "8"])
    model = script.make_model(None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    expected = []
    for step in range(8):
        loss = script.loss_of(model, torch.cat([script.batch(step, rank) for rank in range(4)]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert losses[-1] < losses[0]


@distributed(4)
def test_an_expert_is_sharded_over_the_ranks_that_hold_it_and_the_rest_over_all() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    script = load_example("mixture_of_experts")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert_data", "expert"))
    model = script.shard(script.make_model(mesh.get_group("expert")), mesh)
    assert len(model[0].mixture.experts) == 2
    assert model[0].mixture.experts[0].up.weight.device_mesh == mesh["expert_data"]
    assert model[0].mixture.router.weight.device_mesh.size() == 4


@distributed(4)
def test_a_ring_trains_as_the_default_transport_and_sends_each_byte_once() -> None:
    script = load_example("own_transport")
    ours, default = script.main()
    torch.testing.assert_close(ours, default, rtol=1e-4, atol=1e-6)
    assert default[-1] < default[0]
    ring = script.RingTransport()
    whole = torch.empty(4 * 6)
    ring.all_gather(whole, torch.full((6,), float(dist.get_rank())), dist.group.WORLD, False)
    assert torch.equal(whole, torch.arange(4.0).repeat_interleave(6))
    assert ring.sent == 3 * 6 * 4  # N - 1 slices, as few as a gather can
    part = torch.empty(6)
    ring.reduce_scatter(part, torch.arange(24.0), dist.group.WORLD, dist.ReduceOp.SUM, False)
    first = 6 * dist.get_rank()
    assert torch.equal(part, 4 * torch.arange(first, first + 6.0))


@pytest.mark.clients
@pytest.mark.filterwarnings("ignore")
@distributed(2, timeout=180)
def test_adapters_over_a_transformers_model_are_saved_as_peft_reads_them(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from peft import PeftModel

    script = load_example("lora_transformers")
    losses = script.main(["--steps", "30", "--out", str(tmp_path / "adapters")])
    assert sum(losses[-5:]) < 0.97 * sum(losses[:5])  # the random base stays
    files = {path.name for path in (tmp_path / "adapters").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files
    base = script.make_base(None)
    loaded = PeftModel.from_pretrained(script.make_base(None), tmp_path / "adapters")
    rows = torch.tensor(list(Path(script.__file__ or "").read_bytes()[:64]))[None]
    with torch.no_grad():
        plain, adapted = (each(input_ids=rows, labels=rows).loss for each in (base, loaded))
    assert adapted < 0.97 * plain


@pytest.mark.clients
@pytest.mark.filterwarnings("ignore")
@distributed(2, timeout=180)
def test_a_script_without_accelerate_has_the_losses_that_it_had_with_it(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from fullshard.wrappers import install, uninstall
    from support.clients import shard_on_cpu

    os.environ["ACCELERATE_USE_CPU"] = "true"
    after = load_example("accelerate_after").main(str(tmp_path / "after"))
    shard_on_cpu(lambda: None)
    theirs = load_example("accelerate_before").main(str(tmp_path / "torch"))
    install()
    try:
        shard_on_cpu(lambda: None)
        ours = load_example("accelerate_before").main(str(tmp_path / "ours"))
    finally:
        uninstall()
    assert ours == theirs
    torch.testing.assert_close(after, theirs, rtol=0, atol=0)
    assert len(set(after)) == len(after) == 4
