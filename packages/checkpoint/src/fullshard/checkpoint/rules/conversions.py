"""Convert between the parameters of transformers 5 models and the tensors of their files.

``Conversions`` reads transformers' own mapping (``transformers.conversion_mapping``), which names,
stacks, fuses and splits tensors as ``from_pretrained`` loads them and ``save_pretrained`` saves
them. ``Conversions`` converts this mapping to pieces, so that ranks read byte ranges. transformers
is not imported here: a model of it has imported it.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.files.headers import WeightsError
from fullshard.checkpoint.names import clean_name
from fullshard.checkpoint.rules.pieces import Piece, in_stack, same
from fullshard.checkpoint.rules.rule import Rule, Shapes
from fullshard.sharding import FSDPModule

__all__ = ["Conversions", "advice_on", "conversions_of"]

_Table = dict[str, list[Piece] | WeightsError]
"""The pieces of each parameter, or why there are none."""


def conversions_of(model: nn.Module) -> Conversions | None:
    """Return the mapping of a model of transformers; None if it is none, or older than 5."""
    library = sys.modules.get("transformers")
    kind = getattr(library, "PreTrainedModel", None)
    if kind is None:
        return None
    found = (
        module
        for name, module in model.named_modules()
        if isinstance(module, kind) and not clean_name(name)
    )
    root = next(found, None)
    if root is None:
        return None
    try:
        mapping = importlib.import_module("transformers.conversion_mapping")
        loading = importlib.import_module("transformers.core_model_loading")
    except ImportError:
        return None
    return Conversions(root, kind, mapping, loading)


def advice_on(path: Path) -> str:
    """Return what to do about files of transformers that do not fit a model of another library.

    Args:
        path: of the files, or their folder; an empty text is returned if there is no config.json
            with more information.
    """
    folder = path if path.is_dir() else path.parent
    try:
        config = json.loads((folder / "config.json").read_bytes())
        kind, version = config["model_type"], config["transformers_version"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return (
        f". The files are of a {kind} of transformers {version}, which may rename, stack and fuse "
        "tensors as it loads them. For a model built by transformers 5 or later this is done "
        "without rules: install it, and build the model with it. For your own model, write a Rule "
        "for each name that differs; docs/how-to/weights.md has a table of them"
    )


class _Outline:
    """A model as transformers' functions see it: its own classes, with clean names.

    ``fully_shard`` gives modules another class, and transformers looks mappings up by its name.
    """

    def __init__(self, root: Any, kind: type) -> None:
        self.config = root.config
        self.base_model_prefix: str = root.base_model_prefix
        self.params: dict[str, torch.Tensor] = {}
        self._modules = [
            (clean_name(name), _bare(module))
            for name, module in root.named_modules()
            if isinstance(module, kind)
        ]
        used = getattr(root, "_weight_conversions", None)  # by from_pretrained
        if used is not None:
            self._weight_conversions = used

    def named_modules(self) -> list[tuple[str, Any]]:
        """Return its sub-models."""
        return self._modules

    def get_parameter(self, name: str) -> torch.Tensor:
        """Return what has the shape of a parameter."""
        return self.params[name]


def _bare(module: Any) -> Any:
    """Return an object of the module's class before ``fully_shard``, which knows its config."""
    classes = (each for each in type(module).__mro__ if issubclass(each, nn.Module))
    original = next(each for each in classes if not issubclass(each, FSDPModule))
    bare = original.__new__(original)
    bare.__dict__["config"] = module.config
    return bare


class Conversions:
    """The mapping of one model, for loading and saving."""

    def __init__(self, root: Any, kind: type, mapping: ModuleType, loading: ModuleType) -> None:
        """Take what is transformers': the model, the class of its models, and two modules."""
        self._outline = _Outline(root, kind)
        self._mapping: Any = mapping
        self._loading: Any = loading
        self._loaded: tuple[Shapes, _Table] | None = None
        self._saved: _Table | None = None

    def pieces(self, name: str, params: Shapes, stored: Shapes | None) -> list[Piece]:
        """Return the pieces of the parameter ``name``.

        Args:
            name: one of the model's.
            params: all of the model's shapes.
            stored: the shapes in the files; None where files are made.

        Raises:
            WeightsError: if transformers does something that cannot be done by byte ranges, or
                files do not have all parts of the parameter.
        """
        found = None if stored is None else self._table_of(params, stored).get(name)
        if found is None:
            found = self._saving_table(params).get(name) or [same(name, params[name])]
        if isinstance(found, WeightsError):
            raise found
        return found

    def ignores(self, name: str) -> bool:
        """Tell whether the files' tensor ``name`` is left alone: none is."""
        return False

    def _table_of(self, params: Shapes, stored: Shapes) -> _Table:
        if self._loaded is None or self._loaded[0] is not stored:
            self._loaded = (stored, self._table(stored, params, stored))
        return self._loaded[1]

    # -- loading ----------------------------------------------------------------------------------

    def _table(self, files: Iterable[str], params: Shapes, stored: Shapes | None) -> _Table:
        """Return the pieces of all parameters for which there is one of ``files``."""
        library, prefix = self._loading, self._outline.base_model_prefix
        transforms = self._mapping.get_model_conversion_mapping(self._outline)
        renamings = [each for each in transforms if isinstance(each, library.WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, library.WeightConverter)]
        by_pattern = {p: each for each in converters for p in each.source_patterns}
        table: _Table = {}
        parts: dict[str, tuple[Any, dict[str, list[str]]]] = {}
        for file in sorted(files, key=library.dot_natural_key):
            target, pattern = library.rename_source_key(file, renamings, converters, prefix, params)
            if target not in params and file in params:  # it has the model's own name already
                target, pattern = file, None
            if target not in params:
                continue
            if pattern is None:
                table.setdefault(target, [same(file, params[target])])
            else:
                converter = by_pattern[pattern]
                _, found = parts.setdefault(target, (converter, {}))
                found.setdefault(pattern, []).append(file)
        for target, (converter, found) in parts.items():
            for name, pieces in self._converted(target, converter, found, params, stored).items():
                table.setdefault(name, pieces)
        return table

    def _converted(
        self,
        target: str,
        converter: Any,
        found: Mapping[str, list[str]],
        params: Shapes,
        stored: Shapes | None,
    ) -> _Table:
        """Return the pieces of the parameters that ``converter`` makes of files.

        Args:
            target: the first of these parameters.
            converter: transformers'.
            found: the files of each of its patterns.
            params: all of the model's shapes.
            stored: the shapes in the files; None where files are made.
        """
        patterns = converter.target_patterns
        before, _, after = target.partition(patterns[0])
        targets = [f"{before}{pattern}{after}" for pattern in patterns]
        missing = [name for name in targets if name not in params]
        if missing:
            reason = f"{', '.join(missing)} is not in the model, and is made of the same tensor"
            return dict.fromkeys(targets, WeightsError(f"{target}: {reason}"))
        try:
            files = [found[pattern] for pattern in converter.source_patterns]
        except KeyError as error:
            reason = f"{target} is made of several tensors, and the files have none like {error}"
            return dict.fromkeys(targets, WeightsError(reason))
        try:
            return self._by_operations(targets, converter.operations, files, params, stored)
        except WeightsError as error:
            return dict.fromkeys(targets, error)

    def _by_operations(
        self,
        targets: list[str],
        operations: list[Any],
        files: list[list[str]],
        params: Shapes,
        stored: Shapes | None,
    ) -> _Table:
        library, name = self._loading, targets[0]
        kinds = [type(each) for each in operations]
        first, last = operations[0], operations[-1]
        in_turn = [file for several in files for file in several]
        if len(targets) == 1 and kinds == [library.Transpose]:
            turned = _is_turned(first, params[name], None if stored is None else stored[in_turn[0]])
            rule = Rule(name, name, transpose=(first.dim0, first.dim1) if turned else None)
            return {name: rule.side_by_side(name, in_turn, params[name], stored)}
        if len(targets) == 1 and kinds == [library.Concatenate]:
            rule = Rule(name, in_turn, dim=first.dim)
            return {name: rule.side_by_side(name, in_turn, params[name], stored)}
        if kinds in ([library.Chunk], [library.Split]) and len(in_turn) == 1:
            rule = Rule(targets, in_turn[0], dim=first.dim)
            parts = range(len(targets))
            return {targets[i]: rule.split(i, targets, in_turn[0], params) for i in parts}
        stacks = kinds == [library.MergeModulelist]
        fuses = kinds == [library.MergeModulelist, library.Concatenate] and last.dim != 0
        if len(targets) == 1 and (stacks or fuses) and first.dim == 0:
            dim = last.dim - (last.dim > 0)  # the dim of one stacked tensor
            return {name: _stacked(name, files, params[name], dim, stored)}
        raise WeightsError(
            f"{name} is made of {in_turn[0]} by {operations} of transformers, which cannot be done "
            "by byte ranges; load it with from_pretrained and load_full_state_dict, or pass "
            "rename= rules"
        )

    # -- saving -----------------------------------------------------------------------------------

    def _saving_table(self, params: Shapes) -> _Table:
        """Return what ``save_pretrained`` would write; the model's own names if that is unknown.

        transformers decides which tensors it would write. How they are made of parameters is known
        from the way back. Parameters that cannot be converted this way are saved under the model's
        own names, which ``from_pretrained`` reads, too.
        """
        if self._saved is None:
            self._outline.params = {
                name: torch.empty(shape, device="meta") for name, shape in params.items()
            }
            state = dict(self._outline.params)
            made = self._loading.revert_weight_conversion(self._outline, state)
            table = self._table(made, params, None)
            whole = all(
                isinstance(pieces := table.get(name), list)
                and all(tuple(made[each.file].shape) == each.shape for each in pieces)
                for name in params
            )
            self._saved = table if whole else {}
        return self._saved


def _is_turned(transpose: Any, shape: tuple[int, ...], stored: tuple[int, ...] | None) -> bool:
    """Tell whether transformers transposes a tensor; some it transposes only if it has to."""
    return not transpose.check_dims or (stored is not None and stored != shape)


def _stacked(
    name: str, files: list[list[str]], shape: tuple[int, ...], dim: int, stored: Shapes | None
) -> list[Piece]:
    """Return the pieces of a parameter whose first dim counts through files.

    Args:
        name: the parameter.
        files: for each part in ``dim``, a file for each index of the first dim.
        shape: of the parameter.
        dim: the dim in which the parts of an index are concatenated.
        stored: the shapes in the files; None where files are made.
    """
    counts = {len(each) for each in files}
    if counts != {shape[0]}:
        raise WeightsError(
            f"{name} has {shape[0]} indices along its first dim, and the files have "
            f"{', '.join(map(str, sorted(counts)))} tensors like {files[0][0]}"
        )
    rule = Rule(name, [each[0] for each in files], dim=dim)
    return [
        in_stack(piece, index)
        for index, parts in enumerate(zip(*files, strict=True))
        for piece in rule.side_by_side(name, parts, shape[1:], stored)
    ]
