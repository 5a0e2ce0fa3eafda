"""Code written for torch, with types: mypy accepts it with only its import line changed."""

from __future__ import annotations

from pathlib import Path

from mypy import api

from support.members import ROOT

PROGRAM = Path(__file__).with_name("scripts") / "typed_for_torch.py"

MISTAKE = """
fully_shard(nn.Linear(2, 2)).set_requires_gradient_sync("no")
fully_shard(nn.Linear(2, 2), reshard_after_forwards=True)
"""


def test_mypy_accepts_a_program_for_torch_with_its_import_changed(tmp_path: Path) -> None:
    text = PROGRAM.read_text()
    changed = text.replace("torch.distributed.fsdp import", "fullshard.wrappers.fsdp import")
    assert changed != text
    (tmp_path / "changed.py").write_text(changed)
    (tmp_path / "mistaken.py").write_text(changed + MISTAKE)
    files = [str(PROGRAM), str(tmp_path / "changed.py"), str(tmp_path / "mistaken.py")]
    config = ["--config-file", str(ROOT / "pyproject.toml")]
    output, errors, _ = api.run([*config, "--cache-dir", str(ROOT / ".mypy_cache"), *files])
    found = [line.partition("py:")[::2] for line in output.splitlines() if ": error:" in line]
    lines = len(changed.splitlines())
    assert errors == ""
    assert {Path(f"{file}py").name for file, _ in found} == {"mistaken.py"}, output
    assert {int(rest.partition(":")[0]) - lines for _, rest in found} == {2, 3}, output
