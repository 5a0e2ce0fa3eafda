"""The commands of "Fine-tune a Hugging Face model" run, in order, over a tiny model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.hf import make_folder, make_tokenizer, write_documents
from support.members import ROOT
from support.python import environment

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

PAGE = ROOT / "docs" / "how-to" / "fine-tune-hf.md"
SMALL = "--set hf.block=64 --set sample.length=3 --set train.held_out_rows=8 --device cpu"


def _commands() -> list[str]:
    """The page's shell commands but those that install, with fewer steps of smaller rows."""
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert "pip install" in blocks[0] and "hf download" in blocks[0]
    found = []
    for block in blocks[1:]:
        for steps, fewer in (("--steps 200", f"--steps 2 {SMALL}"), ("--steps 300", "--steps 3")):
            block = block.replace(steps, fewer)
        found.append(block)
    return found


def _run(command: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", command],
        cwd=folder,
        env={**environment(), "PATH": path},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout


def test_the_commands_of_the_page_run_and_leave_what_it_says(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "SmolLM2-135M", "llama", dtype=torch.bfloat16)
    make_tokenizer(base)
    (tmp_path / "notes").mkdir()
    write_documents(tmp_path / "notes" / "a.jsonl")
    whole, generated, sums, adapters, merged, rest = _commands()
    assert "held out" in _run(whole, tmp_path)
    assert "The " in _run(generated, tmp_path)
    assert (tmp_path / "runs/notes/model/tokenizer.json").is_file()
    assert " of them in prompts) to learn from" in _run(sums, tmp_path)
    _run(adapters, tmp_path)
    _run(merged, tmp_path)
    assert (tmp_path / "merged/model.safetensors").is_file()
    assert "after 2 steps" in _run(rest, tmp_path)
    exported = load_file(tmp_path / "exported-adapters/adapter_model.safetensors")
    saved = load_file(tmp_path / "runs/adapters/model/adapter_model.safetensors")
    assert exported.keys() == saved.keys()
    for name, value in saved.items():
        assert torch.equal(exported[name], value), name
    assert (tmp_path / "runs/anew/model/model.safetensors").is_file()
