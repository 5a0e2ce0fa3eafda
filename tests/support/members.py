"""The workspace as data: its members, their metadata and their modules, read without importing."""

from __future__ import annotations

import ast
import dataclasses
import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
    """One Python file of a member: its dotted name, its path and its syntax tree."""

    name: str
    path: Path

    @property
    def is_public(self) -> bool:
        """Whether no part of its dotted name starts with an underscore."""
        return not any(part.startswith("_") for part in self.name.split("."))

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(), filename=str(self.path))

    def imports(self) -> Iterator[tuple[str, str | None]]:
        """Each imported ``(module, name)``; the name is None for a plain ``import module``."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, None) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                source = node.module or ""
                if node.level:
                    # In a package's __init__ one dot means the package, else the module's parent.
                    is_package = self.path.name == "__init__.py"
                    up = node.level - is_package
                    parents = self.name.split(".")[: -up or None]
                    source = ".".join([*parents, *filter(None, [node.module])])
                yield from ((source, alias.name) for alias in node.names)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """One member of the workspace; ``package`` is what it lets users import, "" if nothing."""

    folder: Path
    package: str
    metadata: dict[str, Any]

    @property
    def name(self) -> str:
        """The distribution's name."""
        return str(self.metadata["name"])

    @property
    def is_library(self) -> bool:
        """Whether it is a package of the namespace, rather than an app."""
        return self.folder.parent.name == "packages" and self.has_code

    @property
    def has_code(self) -> bool:
        """Whether it holds a package, rather than only the names of the others."""
        return bool(self.package)

    @property
    def source(self) -> Path:
        """The folder of the package itself."""
        return self.folder.joinpath("src", *self.package.split("."))

    def modules(self) -> list[Module]:
        """Every Python file under ``src``, wherever it lies."""
        source = self.folder / "src"
        found = []
        for path in sorted(source.rglob("*.py")):
            parts = path.relative_to(source).with_suffix("").parts
            if parts[-1] == "__init__":
                parts = parts[:-1]
            found.append(Module(name=".".join(parts), path=path))
        return found


def _read_members() -> tuple[Member, ...]:
    workspace = tomllib.loads((ROOT / "pyproject.toml").read_text())
    members = []
    for folder in workspace["tool"]["hatch"]["envs"]["default"]["workspace"]["members"]:
        metadata = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        kind, short = Path(folder).parts
        package = f"fullshard.{short}" if kind == "packages" else f"fullshard_{short}"
        package = package if Path(ROOT, folder, "src").is_dir() else ""
        members.append(Member(folder=ROOT / folder, package=package, metadata=metadata))
    return tuple(members)


MEMBERS = _read_members()

LIBRARIES = tuple(member for member in MEMBERS if member.is_library)
"""The packages of the namespace, without apps."""
