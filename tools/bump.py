"""Give every member of the workspace a new version: ``python tools/bump.py 0.2.0``.

Owns the four places where a version is written: a member's own ``version``, its ``==`` pins of
siblings, the ``__version__`` of its package, and CITATION.cff. Nothing is written unless all of it
can be.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

__all__ = ["BumpError", "bump", "current_version"]

# Each number without leading zeros, as PEP 440 would write it.
_VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)", re.ASCII)

_VARIABLE = re.compile(r'(?m)^(__version__ = ")[^"]*')


class BumpError(ValueError):
    """A version that cannot be given, or a workspace that has no one version."""


def bump(root: Path, version: str) -> list[Path]:
    """Returns the files in which the version was changed to ``version``.

    Args:
        root: the workspace.
        version: three numbers, X.Y.Z, newer than the present version.

    Raises:
        BumpError: if ``version`` is malformed or not newer, or the members disagree; nothing was
            written.
    """
    wanted = _numbers(version)
    members = _members(root)
    present = current_version(root)
    if wanted <= _numbers(present):
        raise BumpError(f"{version} is not newer than {present}; give a greater X.Y.Z")
    names = {str(_project(text)["name"]) for text in members.values()}
    changed = {path: _rewrite(text, names, version) for path, text in members.items()}
    for path, text in changed.items():
        _check(path, text, names, version)
    changed |= {path: _VARIABLE.sub(rf"\g<1>{version}", text) for path, text in _packages(root)}
    citation = root / "CITATION.cff"
    if citation.is_file():
        told = citation.read_text(encoding="utf-8")
        changed[citation] = re.sub(r"(?m)^version: .*$", f"version: {version}", told)
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")
    return list(changed)


def current_version(root: Path) -> str:
    """Returns the one version that all members of the workspace carry.

    Raises:
        BumpError: if they carry several.
    """
    versions = {str(_project(text)["version"]) for text in _members(root).values()}
    if len(versions) != 1:
        raise BumpError(f"members carry several versions, {sorted(versions)}; make them one")
    return versions.pop()


def _numbers(version: str) -> tuple[int, ...]:
    match = _VERSION.fullmatch(version)
    if match is None:
        raise BumpError(f"{version!r} is not a version; give three numbers, such as 0.2.0")
    return tuple(int(number) for number in match.groups())


def _members(root: Path) -> dict[Path, str]:
    """The text of each member's pyproject.toml, by path."""
    workspace = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    folders = workspace["tool"]["hatch"]["envs"]["default"]["workspace"]["members"]
    paths = [root / folder / "pyproject.toml" for folder in folders]
    return {path: path.read_text(encoding="utf-8") for path in paths}


def _packages(root: Path) -> list[tuple[Path, str]]:
    """The modules with a ``__version__``, and their text."""
    found = []
    for member in _members(root):
        for path in sorted(member.parent.glob("src/**/__init__.py")):
            text = path.read_text(encoding="utf-8")
            if _VARIABLE.search(text):
                found.append((path, text))
    return found


def _project(text: str) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads(text)["project"]
    return project


def _rewrite(text: str, names: set[str], version: str) -> str:
    text = re.sub(r'(?m)^version = "[^"]*"$', f'version = "{version}"', text, count=1)
    # A pin may carry extras or a marker; only what stands behind == changes.
    siblings = "|".join(sorted(map(re.escape, names)))
    return re.sub(rf'(["\'](?:{siblings})(?:\[[^\]]*\])?==)[^"\';\s]+', rf"\g<1>{version}", text)


def _check(path: Path, text: str, names: set[str], version: str) -> None:
    """Raises if a version or a pin was written in a way that ``_rewrite`` does not know."""
    project = _project(text)
    lists = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    wrong = [] if project["version"] == version else [f"version = {project['version']!r}"]
    for requirement in (each for requirements in lists for each in requirements):
        match = re.match(r"([\w.-]+)(?:\[[^\]]*\])?\s*([^;]*)", requirement)
        if match and match[1] in names and match[2].strip() != f"=={version}":
            wrong.append(requirement)
    if wrong:
        raise BumpError(
            f'{path} would keep {", ".join(wrong)}; write it as version = "..." or '
            '"sibling==..." first'
        )


def main(arguments: list[str]) -> int:
    """Bumps the workspace around this file; returns the exit code, 2 where it was refused."""
    root = Path(__file__).resolve().parents[1]
    if len(arguments) != 1:
        print("bump: give one version, X.Y.Z: nox -s bump -- 0.2.0", file=sys.stderr)
        return 2
    try:
        before = current_version(root)
        changed = bump(root, arguments[0])
    except BumpError as error:
        print(f"bump: {error}", file=sys.stderr)
        return 2
    print(f"{before} -> {arguments[0]}")
    for path in changed:
        print(f"  {path.relative_to(root)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
