"""Code written for torch, with types: mypy accepts it with only its import line changed.

``nox -s types`` has mypy read both programs; here they are compared.
"""

from __future__ import annotations

from pathlib import Path

SCRIPTS = Path(__file__).with_name("scripts")


def test_mypy_reads_a_program_for_torch_with_its_import_changed() -> None:
    theirs = (SCRIPTS / "typed_for_torch.py").read_text()
    ours = (SCRIPTS / "typed_for_fullshard.py").read_text()
    line = "from torch.distributed.fsdp import"
    assert theirs.count(line) == 1
    changed = theirs.replace(f"\n{line}", "\n\nfrom fullshard.wrappers.fsdp import")
    program, mistakes = ours[: len(changed)], ours[len(changed) :]
    assert program == changed
    assert mistakes.count("# type: ignore[") == 2
