"""The trainer's task `hf` against plain transformers and peft: one process, whole batches.

Run by ``nox -s clients``. Tiny models of random weights; nothing is downloaded.
"""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from fullshard_train.cli import main
from fullshard_train.errors import TrainError
from fullshard_train.hf.documents import is_held_out, read_documents
from fullshard_train.hf.model import Causal
from fullshard_train.hf.saving import save_pretrained
from fullshard_train.settings.config import Config
from fullshard_train.training.measures import CountsFlops
from support.hf import documents, make_folder, make_tokenizer, settings_of, write_documents
from support.ranks import distributed, run_on_ranks
from support.trainer.hf_beside import compare, reference
from support.trainer.jobs import (
    TOLERANCE,
    Ran,
    losses,
    run,
    settings,
    small_config,
    small_task,
    small_trainer,
)
from support.trainer.launchers import run_forked

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),  # what libraries say of their own parts
]

LORA: Any = {"method": "lora", "lora_rank": 3, "lora_targets": "all-linear"}


def _config(folder: Path, *, steps: int = 4, accumulate: int = 2, **hf: Any) -> Config:
    sections = settings_of(folder, folder.parent / "data.jsonl", **hf)
    train = {"steps": steps, "accumulate": accumulate}
    return small_config(**sections, train=train)


def _model(tmp_path: Path, kind: str = "llama", **options: Any) -> Path:
    write_documents(tmp_path / "data.jsonl")
    return make_folder(tmp_path / "base", kind, **options)


@pytest.mark.parametrize("packing", ["documents", "none"])
@pytest.mark.parametrize("kind", ["llama", "gpt2, tied", "qwen2, tied", "mistral, window"])
def test_one_rank_trains_bit_for_bit_as_plain_transformers(
    tmp_path: Path, kind: str, packing: str
) -> None:
    config = _config(_model(tmp_path, kind), accumulate=1, packing=packing)
    expected = reference(config)
    (ran,) = run_on_ranks(run, 1, config, tmp_path / "run")
    compare(ran, expected, exact=True)


@pytest.mark.parametrize("kind", ["llama", "gpt2, tied", "qwen2, tied", "mistral, window"])
def test_ranks_and_micro_batches_with_rows_of_very_different_lengths_train_as_one(
    tmp_path: Path, kind: str
) -> None:
    config = _config(_model(tmp_path, kind), packing="none")
    expected = reference(config)
    ran: list[Ran] = run_on_ranks(run, 2, config, tmp_path / "run")
    compare(ran[0], expected, exact=False)


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    # In bfloat16, activations of other batch shapes are rounded differently.
    [(1, torch.bfloat16), (1, torch.float32), (2, torch.float32)],
)
@pytest.mark.parametrize("kind", ["llama", "gpt2, tied"])
def test_adapters_train_as_those_of_plain_peft_over_a_base_as_it_is_stored(
    tmp_path: Path, kind: str, world_size: int, dtype: torch.dtype
) -> None:
    folder = _model(tmp_path, kind, dtype=dtype)
    config = _config(folder, accumulate=1 if world_size == 1 else 2, **LORA)
    expected = reference(config)
    ran: list[Ran] = run_on_ranks(run, world_size, config, tmp_path / "run")
    assert ran[0].weights["inner.base_model.model." + _layer(kind)].dtype is dtype
    compare(ran[0], expected, exact=world_size == 1)


WHOLE: Any = {"lora_dora": True, "lora_modules_to_save": "lm_head,embed_tokens"}


@pytest.mark.parametrize(
    ("kind", "world_size", "dtype", "options"),
    [
        ("llama", 1, torch.float32, {"lora_dora": True}),
        ("llama", 1, torch.bfloat16, WHOLE),
        ("llama", 2, torch.float32, WHOLE),
        ("gpt2, tied", 1, torch.float32, {"lora_dora": True}),
        ("gpt2, tied", 2, torch.float32, {"lora_dora": True, "lora_modules_to_save": "ln_f"}),
    ],
)
def test_dora_and_modules_trained_whole_train_as_those_of_plain_peft(
    tmp_path: Path, kind: str, world_size: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    config = _config(
        _model(tmp_path, kind, dtype=dtype), accumulate=world_size, **{**LORA, **options}
    )
    expected = reference(config)
    trained = {name.rpartition("lora_")[2].partition(".")[0] for name in expected.trained}
    assert "magnitude_vector" in trained
    ran: list[Ran] = run_on_ranks(run, world_size, config, tmp_path / "run")
    compare(ran[0], expected, exact=world_size == 1)


@pytest.mark.parametrize("weights", ["folder", "random"])
def test_saved_dora_and_modules_trained_whole_are_what_peft_reads(
    tmp_path: Path, weights: str
) -> None:
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM

    base = _model(tmp_path)
    config = _config(base, weights=weights, **LORA, **WHOLE)
    ran: list[Ran] = run_on_ranks(_run_and_save, 2, config, tmp_path)
    half = tmp_path / "run" / "checkpoints" / "step-00000002"
    again: list[Ran] = run_on_ranks(_run_and_save, 1, config, tmp_path / "again", half)
    for name, value in ran[0].weights.items():
        torch.testing.assert_close(again[0].weights[name], value, **TOLERANCE)
    if weights == "random":
        whole = "inner.base_model.model.lm_head."
        begun = ran[0].weights[whole + "original_module.weight"]
        assert not torch.equal(begun, ran[0].weights[whole + "modules_to_save.default.weight"])
        return
    plain: Any = AutoModelForCausalLM.from_pretrained(base)
    for model in (
        PeftModel.from_pretrained(plain, tmp_path / "saved"),
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "saved"),
    ):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, ran[0].weights[f"inner.{name}"]), name


def _layer(kind: str) -> str:
    gpt2 = "transformer.h.0.attn.c_attn.base_layer.weight"
    return gpt2 if "gpt2" in kind else "model.layers.0.self_attn.q_proj.base_layer.weight"


def _run_on_hosts(config: Config, folder: Path) -> tuple[Ran, list[str]]:
    """A run on two hosts of two ranks each, as far as the mesh can tell."""
    from support.trainer import jobs

    world = jobs.this_world()
    hosts = type(world)(rank=world.rank, size=world.size, local_rank=world.rank % 2, local_size=2)
    with mock.patch.object(jobs, "this_world", lambda: hosts):
        trainer = small_trainer(config)
        parameters: Any = trainer.model.parameters()
        axes = {str(each.placements) for each in parameters}
        return run(config, folder), sorted(axes)


def test_a_base_kept_on_each_host_once_trains_as_plain_peft(tmp_path: Path) -> None:
    config = _config(_model(tmp_path), shard_over="host", **LORA)
    expected = reference(config)
    ran, axes = run_on_ranks(_run_on_hosts, 4, config, tmp_path / "run")[0]
    assert axes == ["(Replicate(), Shard(dim=0))"]
    compare(ran, expected, exact=False)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_activation_checkpointing_changes_no_bit(tmp_path: Path, method: str) -> None:
    folder = _model(tmp_path)
    usual = _config(folder, method=method)
    table = usual.to_table()
    table["train"]["activation_checkpointing"] = True
    found: list[Ran] = run_on_ranks(run, 2, Config.from_table(table), tmp_path / "less")
    expected: list[Ran] = run_on_ranks(run, 2, usual, tmp_path / "usual")
    assert losses(found[0].records) == losses(expected[0].records)


def test_mixed_precision_is_near_full_precision(tmp_path: Path) -> None:
    usual = _config(_model(tmp_path))
    table = usual.to_table()
    table["parallel"]["param_dtype"] = "bfloat16"
    found = losses(run_on_ranks(run, 2, Config.from_table(table), tmp_path / "half")[0].records)
    expected = reference(usual).losses
    assert found == pytest.approx(expected, rel=2**-7)
    assert found != pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3 moe"])
def test_experts_that_files_have_apart_are_stacked_and_saved_apart(
    tmp_path: Path, kind: str
) -> None:
    config = _config(_model(tmp_path, kind), accumulate=1, packing="none", attention="eager")
    expected = reference(config).losses
    ran: Ran = run_on_ranks(_run_and_save, 1, config, tmp_path)[0]
    assert losses(ran.records) == pytest.approx(expected, rel=1e-5)
    _loads_in_transformers(tmp_path, ran)


def _run_and_save(config: Config, folder: Path, resume: Path | None = None) -> Ran:
    from fullshard_train.checkpoints.checkpoint import read_position
    from support.trainer.jobs import fit, full_weights, untimed

    trainer = small_trainer(config)
    if resume is not None:
        trainer.resume(resume, read_position(resume))
    fit(trainer, folder / "run")
    assert isinstance(trainer.model, Causal)
    save_pretrained(trainer.model, folder / "saved", config)
    records = untimed(folder / "run" / "metrics.jsonl")
    return Ran(records=records, weights=full_weights(trainer))


def _loads_in_transformers(folder: Path, ran: Ran, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    loaded, said = AutoModelForCausalLM.from_pretrained(
        folder / "saved", dtype="auto", output_loading_info=True
    )
    assert not said["missing_keys"] and not said["unexpected_keys"], said
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype is dtype
        assert torch.equal(parameter, ran.weights[f"inner.{name}"].to(dtype)), name
    return loaded


@pytest.mark.parametrize("kind", ["llama", "qwen2, tied"])
def test_the_saved_folder_is_what_transformers_reads_tokenizer_and_all(
    tmp_path: Path, kind: str
) -> None:
    from transformers import AutoTokenizer

    base = _model(tmp_path, kind, dtype=torch.bfloat16)
    make_tokenizer(base)
    config = _config(base, max_shard_size="20KB")
    ran, _ = run_on_ranks(_run_and_save, 2, config, tmp_path)
    loaded = _loads_in_transformers(tmp_path, ran, torch.bfloat16)
    assert loaded.generation_config.max_new_tokens == 7
    assert loaded.config.architectures == [type(loaded).__name__]
    saved = tmp_path / "saved"
    assert (saved / "model.safetensors.index.json").exists()
    ours, theirs = AutoTokenizer.from_pretrained(saved), AutoTokenizer.from_pretrained(base)
    assert ours("12+12=24.")["input_ids"] == theirs("12+12=24.")["input_ids"]
    assert ours.chat_template == theirs.chat_template == "{{ messages }}"
    prompt = ours("1+1", return_tensors="pt")["input_ids"]
    assert loaded.generate(prompt, do_sample=False).shape[1] <= prompt.shape[1] + 7


def test_saved_adapters_are_what_peft_reads_and_merges(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = _model(tmp_path)
    make_tokenizer(base)
    config = _config(base, **LORA)
    ran, _ = run_on_ranks(_run_and_save, 2, config, tmp_path)
    saved = tmp_path / "saved"
    plain = AutoModelForCausalLM.from_pretrained(base)
    model: Any = PeftModel.from_pretrained(plain, saved)
    table = json.loads((saved / "adapter_config.json").read_text())
    assert Path(table["base_model_name_or_path"]) == base.resolve()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, ran.weights[f"inner.{name}"]), name
    tokens = torch.arange(20)[None]
    expected = model(tokens).logits
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(tokens).logits, expected, rtol=1e-4, atol=1e-5)
    assert AutoTokenizer.from_pretrained(saved)("1")["input_ids"]


def _without_prefix(folder: Path) -> None:
    """Rewrites files as those of a bare GPT-2 are, with the masks that old ones have."""
    for path in folder.glob("*.safetensors*"):
        if path.suffix == ".json":
            path.unlink()
            continue
        values = load_file(path)
        path.unlink()
        bare = {name.removeprefix("transformer."): value for name, value in values.items()}
        mask = torch.ones(1, 1, 128, 128, dtype=torch.bool).tril()
        save_file({**bare, "h.0.attn.bias": mask}, folder / "model.safetensors")


@pytest.mark.parametrize("method", ["full", "lora"])
def test_files_of_a_bare_model_with_stale_buffers_are_read(tmp_path: Path, method: str) -> None:
    folder = _model(tmp_path, "gpt2, tied", shard_size="5GB")
    _without_prefix(folder)
    config = _config(folder, accumulate=1, method=method)
    (ran,) = run_on_ranks(run, 1, config, tmp_path / "run")
    compare(ran, reference(config), exact=True)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_run_continues_on_another_number_of_ranks(tmp_path: Path, method: str) -> None:
    config = _config(_model(tmp_path), method=method)
    whole: list[Ran] = run_on_ranks(run, 2, config, tmp_path / "whole")
    half = tmp_path / "whole" / "checkpoints" / "step-00000002"
    for world_size, name in ((1, "one"), (2, "two")):
        ran: list[Ran] = run_on_ranks(run, world_size, config, tmp_path / name, resume=half)
        found = losses(ran[0].records)
        expected = {step: loss for step, loss in losses(whole[0].records).items() if step > 2}
        assert found == (expected if world_size == 2 else pytest.approx(expected, rel=1e-5))
        for key, value in whole[0].weights.items():
            torch.testing.assert_close(ran[0].weights[key], value, **TOLERANCE)


def test_a_checkpoint_of_adapters_leaves_the_base_out(tmp_path: Path) -> None:
    config = _config(_model(tmp_path), **LORA)
    run_on_ranks(run, 1, config, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "step-00000004"
    kept = FileSystemReader(folder).read_metadata().state_dict_metadata
    names = [name for name in kept if name.startswith("model.")]
    assert len(names) == 2 * 2 * 7  # A and B of seven linear layers in each of two layers
    assert all("lora_" in name for name in names)


def _random_weights(config: Config) -> dict[str, torch.Tensor]:
    from support.trainer.jobs import full_weights

    return full_weights(small_trainer(config))


@pytest.mark.parametrize("kind", ["llama", "gpt2, tied"])
def test_random_weights_are_drawn_as_the_architecture_says_whatever_the_ranks(
    tmp_path: Path, kind: str
) -> None:
    folder = _model(tmp_path, kind)
    config = _config(folder / "config.json", weights="random")
    sections = settings_of(folder / "config.json", tmp_path / "data.jsonl", weights="random")
    config = small_config(**sections)
    one: dict[str, torch.Tensor] = run_on_ranks(_random_weights, 1, config)[0]
    two: dict[str, torch.Tensor] = run_on_ranks(_random_weights, 2, config)[0]
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(value, two[name]), name
        if name.endswith("norm.weight") or (".ln_" in name and name.endswith("weight")):
            assert bool((value == 1).all()), name
        elif name.endswith(".bias"):
            assert not value.any(), name
        else:
            scaled = "gpt2" in kind and name.endswith("c_proj.weight")
            deviation = 0.02 / 2 if scaled else 0.02  # two layers: 1 / sqrt(2 * 2)
            assert abs(float(value.std()) / deviation - 1) < 0.1, name


@distributed(2)
def test_a_host_without_the_folder_raises_on_every_rank(tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        _model(tmp_path)
    dist.barrier()
    there = mock.patch("fullshard_train.hf.task.open_folder", side_effect=TrainError("not here"))
    host = there if dist.get_rank() == 1 else nullcontext()
    with host, pytest.raises(TrainError, match="not here"):
        small_task(_config(tmp_path / "base"))


@distributed(2)
def test_documents_that_a_model_cannot_keep_apart_are_refused(tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        _model(tmp_path, "mamba")
    dist.barrier()
    config = _config(tmp_path / "base")
    with pytest.raises(TrainError, match=r"hf\.packing = 'documents': in a packed row, a Mamba"):
        small_trainer(config)


def _data_is(config: Config) -> tuple[str, list[int]]:
    task = small_task(config)
    batch = task.evaluation_rows(range(task.held_out_rows))
    ends = (batch.inputs[..., 0] == 256) & (batch.inputs[..., 1] > 0)
    return task.data_is, ends.sum(dim=1).tolist()


def test_every_document_is_learned_or_judged(tmp_path: Path) -> None:
    config = _config(_model(tmp_path), packing="none")
    told, ends = run_on_ranks(_data_is, 1, config)[0]
    texts = read_documents(config.data.source, key="text")
    assert texts == documents()
    judged = sum(is_held_out(number, 8) for number in range(len(texts)))
    assert f"{len(texts) - judged} documents of " in told
    assert f"{judged} held out" in told
    assert len(ends) == judged
    assert min(ends) >= 1  # each ends with the end token


def _on(targets: str) -> dict[str, Any]:
    return {"method": "lora", "lora_targets": targets}


def _words(folder: Path, **hf: Any) -> list[str]:
    sections = settings_of(folder, folder.parent / "data.jsonl", **hf)
    return settings(**sections)


@pytest.mark.parametrize(("method", "kind"), [("full", "llama"), ("lora", "qwen2, tied")])
def test_the_command_line_verifies_plans_trains_samples_and_exports(
    tmp_path: Path,
    method: str,
    kind: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = _words(_model(tmp_path, kind), method=method, long_documents="error")
    assert main([*words, "--verify", "--plan", "--out", "run"]) == 0
    printed = capfd.readouterr().out
    assert "verified   equal over 3 steps" in printed
    assert "planned    ZeRO-3, train.accumulate 2" in printed
    found = re.search(r"peak .* MiB measured, .* planned \((.*) %\)", printed)
    assert found is not None and abs(float(found[1])) < 20, printed
    assert "unigram entropy" in printed
    name = "adapter_model.safetensors" if method == "lora" else "model.safetensors"
    assert (tmp_path / "run" / "model" / name).is_file()
    assert main(["sample", "run"]) == 0
    said = (tmp_path / "run" / "sample.txt").read_text()
    assert capfd.readouterr().out.rstrip("\n") == said.rstrip("\n")
    told = run_forked(2, ["sample", str(tmp_path / "run")], tmp_path / "told.txt")
    assert told.rstrip("\n").endswith(said.rstrip("\n"))
    assert main(["export", "run", "again"]) == 0
    assert (tmp_path / "again" / name).read_bytes() == (
        tmp_path / "run" / "model" / name
    ).read_bytes()


@pytest.mark.parametrize(
    ("hf", "said"),
    [
        (
            _on("q_proj,w_proj"),
            "no module of the model is called w_proj",
        ),
        (_on("w_proj"), "this model has .*q_proj.*give all-linear"),
        (
            {"method": "lora", "lora_modules_to_save": "head"},
            "modules_to_save = 'head': no module of the model is called head; it has .*lm_head",
        ),
        ({"block": 200}, r"hf\.block = 200: the model has 128 positions; give at most"),
        ({"block": 8}, r"document 2 of 68 has 15 bytes, more than hf\.block = 8"),
        ({"attention": "none"}, r"hf\.attention = 'none'"),
    ],
)
def test_what_does_not_fit_is_said_before_training_begins(
    tmp_path: Path, hf: dict[str, Any], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run_folder = tmp_path / "run"
    words = _words(_model(tmp_path), **{"long_documents": "error", **hf})
    assert main([*words, "--out", str(run_folder)]) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert re.search(said, error), error
    assert not run_folder.exists()


def test_a_tied_module_is_not_trained_whole_beside_its_frozen_twin(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = _model(tmp_path, "qwen2, tied")
    words = _words(base, method="lora", lora_modules_to_save="lm_head")
    assert main([*words, "--out", str(tmp_path / "run")]) == 2
    error = capfd.readouterr().err
    assert "lm_head shares its weight with model.embed_tokens.weight, which stays frozen" in error


def test_a_tokenizer_with_more_tokens_than_the_embedding_has_rows_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = _model(tmp_path)
    make_tokenizer(base, size=320)
    assert main([*_words(base), "--out", str(tmp_path / "run")]) == 2
    assert "but the model's embedding has 300 rows" in capfd.readouterr().err


def test_weights_that_are_not_the_models_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = _model(tmp_path)
    table = json.loads((base / "config.json").read_text())
    for change, said in (
        ({"num_hidden_layers": 3}, "has no tensor for inner.model.layers.2"),
        ({"hidden_size": 64}, "has shape"),
        ({"model_type": "martian"}, "martian"),
    ):
        (base / "config.json").write_text(json.dumps({**table, **change}))
        assert main([*_words(base), "--out", str(tmp_path / "run")]) == 2
        assert said in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_another_base_is_refused_when_a_run_is_resumed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = _model(tmp_path)
    out = str(tmp_path / "run")
    assert main([*_words(base, method="lora"), "--out", out]) == 0
    make_folder(base, "llama", shard_size="30KB")
    assert main(["--resume", out, "--steps", "6"]) == 2
    assert "it was trained on other data" in capfd.readouterr().err


def _flops(config: Config) -> float:
    task = small_task(config)
    assert isinstance(task, CountsFlops)
    with torch.device("meta"):
        return task.flops_per_item(task.build_model())


def test_a_token_costs_what_the_formula_says_frozen_parameters_and_experts_less(
    tmp_path: Path,
) -> None:
    attention = 12 * 2 * 32 * 64  # of two layers, over a row of 64 tokens
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    linear, norms, head = 2 * layer, 5 * 32, 300 * 32
    folder = _model(tmp_path)
    (full,) = run_on_ranks(_flops, 1, _config(folder))
    assert full == 6 * (linear + norms + head) + attention
    (lora,) = run_on_ranks(_flops, 1, _config(folder, **LORA))
    ends = 3 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))  # A and B of seven layers, rank 3
    assert lora == 4 * (linear + norms + head) + 6 * 2 * ends + attention
    folder = make_folder(tmp_path / "experts", "mixtral")
    (mixture,) = run_on_ranks(_flops, 1, _config(folder))
    # Two of four experts, and a router of four outputs in each layer.
    assert mixture == full + 6 * 2 * (3 * 32 * 48 + 4 * 32)
