"""A MkDocs hook: a public name that is not documented, or not on a page, is a warning of the build.

``mkdocs build --strict`` turns warnings into a failure. Owns what counts as public: every name in
the ``__all__`` of a library package, and the public methods and properties that its classes define.
A plain attribute without a description is only mentioned: the class's docstring may speak of all of
them together. Docstrings are read from the sources, as mkdocstrings does: nothing is imported, so
the documentation needs no torch.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import griffe

__all__ = ["PACKAGES", "bare_attributes", "missing_from_pages", "on_pre_build", "undocumented"]

PACKAGES = (
    "fullshard.comm",
    "fullshard.samehost",
    "fullshard.wire",
    "fullshard.sharding",
    "fullshard.policies",
    "fullshard.insight",
    "fullshard.checkpoint",
    "fullshard.optim",
    "fullshard.preflight",
    "fullshard.elastic",
    "fullshard.wrappers.fsdp",
)

_DIRECTIVE = re.compile(r"(?m)^::: (\S+)")
_log = logging.getLogger("mkdocs.hooks.reference")


def on_pre_build(config: Any) -> None:
    """Warns of each name that a reader would look for in vain; called by MkDocs."""
    root = Path(config["config_file_path"]).parent
    pages = sorted(Path(config["docs_dir"], "reference").glob("*.md"))
    for package in PACKAGES:
        module = _load(root, package)
        for name in undocumented(module):
            _log.warning("%s has no docstring", name)
        for name in bare_attributes(module):
            _log.info("%s is described nowhere by its name", name)
        for name in missing_from_pages(module, "\n".join(page.read_text() for page in pages)):
            _log.warning("%s is public and on no page under docs/reference", name)


def undocumented(module: griffe.Module) -> Iterator[str]:
    """Yields the full name of each public thing in ``module`` that says nothing about itself."""
    if not module.has_docstring:
        yield module.path
    for name, found in _public(module):
        if not found.has_docstring:
            yield f"{module.path}.{name}"
        for member in _bare_members(found):
            if not member.is_attribute or "property" in member.labels:
                yield f"{module.path}.{name}.{member.name}"


def bare_attributes(module: griffe.Module) -> Iterator[str]:
    """Yields the full name of each public attribute that no docstring names."""
    for name, found in _public(module):
        described = set().union(*map(_described, _with_bases(found)))
        for member in _bare_members(found):
            is_plain = member.is_attribute and "property" not in member.labels
            if is_plain and member.name not in described:
                yield f"{module.path}.{name}.{member.name}"


def missing_from_pages(module: griffe.Module, pages: str) -> Iterator[str]:
    """Yields the full name of each public thing in ``module`` that ``pages`` do not show."""
    shown = set(_DIRECTIVE.findall(pages))
    for name, found in _public(module):
        if not shown & {f"{module.path}.{name}", found.canonical_path, *_public_paths(found)}:
            yield f"{module.path}.{name}"


def _load(root: Path, package: str) -> griffe.Module:
    module = _all_packages(root)[package]
    assert isinstance(module, griffe.Module)
    return module


@cache
def _all_packages(root: Path) -> griffe.ModulesCollection:
    """Every package, so that a name re-exported from a lower layer is found; parsed once."""
    loader = griffe.GriffeLoader(search_paths=sorted(root.glob("packages/*/src")))
    for each in PACKAGES:
        loader.load(each)
    loader.resolve_aliases()
    return loader.modules_collection


def _public(module: griffe.Module) -> Iterator[tuple[str, griffe.Object | griffe.Alias]]:
    """Yields each name in ``__all__`` and its meaning: a function, not the module of its name."""
    for name in map(str, module.exports or []):
        found = module[name]
        yield name, found[name] if found.is_module and name in found.members else found


def _public_paths(found: griffe.Object | griffe.Alias) -> Iterator[str]:
    """The names under which packages offer ``found``, wherever it is defined."""
    for package in PACKAGES:
        if found.canonical_path.startswith(f"{package}."):
            yield f"{package}.{found.name}"


def _bare_members(found: griffe.Object | griffe.Alias) -> Iterator[griffe.Object | griffe.Alias]:
    """Yields the public members of a class, its own and inherited, that have no docstring."""
    target = found.final_target if isinstance(found, griffe.Alias) else found
    for name, member in target.all_members.items() if target.is_class else ():
        if not (name.startswith("_") or member.has_docstring):
            yield member


def _with_bases(found: griffe.Object | griffe.Alias) -> Iterator[griffe.Object | griffe.Alias]:
    """Yields ``found`` and the classes that it inherits from."""
    target = found.final_target if isinstance(found, griffe.Alias) else found
    yield target
    yield from target.mro() if isinstance(target, griffe.Class) else ()


def _described(found: griffe.Object | griffe.Alias) -> set[str]:
    """The names that a docstring describes, in a section or in its text."""
    if found.docstring is None:
        return set()
    names = set(re.findall(r"``(\w+)``", found.docstring.value))
    for section in found.docstring.parse("google"):
        if section.kind.value in ("attributes", "parameters"):
            names |= {item.name for item in section.value}
    return names
