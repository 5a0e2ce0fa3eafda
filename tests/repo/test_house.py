"""How the house is laid out: small folders, and imports that never run in a circle."""

from __future__ import annotations

import graphlib
from collections import Counter

import pytest

from support.members import LIBRARIES, MEMBERS, Member

MAX_FILES = 14

each_library = pytest.mark.parametrize("member", LIBRARIES, ids=lambda member: member.name)


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
def test_a_folder_has_few_enough_files_to_be_taken_in_at_once(member: Member) -> None:
    files = Counter(module.path.parent for module in member.modules())
    assert {str(folder): n for folder, n in files.items() if n > MAX_FILES} == {}


@each_library
def test_no_module_imports_itself_by_way_of_others(member: Member) -> None:
    # A package's __init__ gathers public names and is no link of a circle. Imports for types alone
    # and imports inside functions count: a reader follows them just the same.
    known = {each.name for each in member.modules() if each.path.name != "__init__.py"}
    graph = {
        each.name: {
            target
            for source, name in each.imports()
            for target in (source, f"{source}.{name}")
            if target in known and target != each.name
        }
        for each in member.modules()
        if each.name in known
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which lists the modules
