"""Finds the source files of a workload, and redirects their imports of everyrank to a file next to them."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
from collections.abc import Set
from pathlib import Path
from typing import Any, NamedTuple

from everyrank.eject.flatten import gather_definitions
from everyrank.eject.imports import import_lines
from everyrank.errors import UsageError
from everyrank.workload import BUILT_IN, Source, Workload
from everyrank.workload.find import import_file

__all__ = ["OwnSources", "own_sources"]

_LARGEST_BYTES = 64 << 20
_PUBLIC_NAMES = {"Workload": "everyrank.workload.workload"}
"""Names that a workload may import from `everyrank` itself, and the modules that define them."""

_TYPES = {
    "name": ("str", "shown in tables and file names"),
    "model": ("Callable[[], Any]", "() -> the model, called after seeding"),
    "train_data": ("Callable[[], Any]", "() -> dataset of (input, target)"),
    "loss": ("Callable[[Any, Any], tuple[Any, Any]]", "(output, target) -> (sum over its terms, how many terms)"),
    "optimizer": ("Callable[[Any], Any]", "(model) -> optimizer"),
    "global_batch": ("int", "samples of an update over all ranks"),
    "metrics": ("Mapping[str, Callable[..., Any]]", "name -> (output, target) -> (sum, count)"),
    "derived": ("Mapping[str, Callable[..., float]]", "name -> (means) -> number"),
    "schedule": ("Callable[[Any], Any] | None", "(optimizer) -> learning-rate schedule"),
    "epochs": ("int | None", "how long; or steps, the number of updates"),
    "steps": ("int | None", ""),
    "seed": ("int", "of initial weights and of the order of the samples"),
    "clip_norm": ("float | None", "largest norm of the gradients"),
    "eval_data": ("Callable[[], Any] | None", "() -> dataset to evaluate on"),
}


class ProjectNames(NamedTuple):
    """Names of the written modules, without `.py`; they differ from those of the user's files."""

    script: str = "train"
    task: str = "task"
    batch_norm: str = "batch_norm"


_USUAL_NAMES = ProjectNames()
_OTHER_NAMES = ProjectNames("train_distributed", "training_task", "synced_batch_norm")


def _free_names(taken: Set[str]) -> ProjectNames:
    """Choose names for the modules of the project that are not in `taken`."""
    chosen: list[str] = []
    for name, other_name in zip(_USUAL_NAMES, _OTHER_NAMES, strict=True):
        candidates = itertools.chain([name, other_name], (f"{other_name}_{number}" for number in itertools.count(2)))
        chosen.append(next(candidate for candidate in candidates if candidate not in taken))
    return ProjectNames(*chosen)


@dataclasses.dataclass
class OwnSources:
    """The files of a workload.

    module, attribute   module and name of the workload
    is_called           whether the workload is a function, called with the settings
    takes               names of its parameters
    files               name -> text
    data                files that are copied unchanged
    left_out            data files that are too large to be copied
    names               names of the modules that eject adds
    third_party         top-level modules that are imported
    """

    module: str
    attribute: str
    is_called: bool
    takes: frozenset[str]
    files: dict[str, str]
    data: list[Path]
    left_out: list[Path]
    names: ProjectNames = _USUAL_NAMES

    @property
    def third_party(self) -> set[str]:
        """Top-level names of all modules that are imported."""
        return {line.module.partition(".")[0] for text in self.files.values() for line in import_lines(text)}


def own_sources(source: Source) -> OwnSources:
    """Return the sources of a workload without everyrank. Raises `UsageError` if they need everyrank."""
    if source.place in BUILT_IN:
        return _built_in(source.place)
    text, _, name = source.place.rpartition(":") if ".py:" in source.place else (source.place, "", "")
    path, name = Path(text).absolute(), name or "workload"
    own_files = _imported_files(path)
    names = _free_names({file.relative_to(path.parent).parts[0].removesuffix(".py") for file in own_files})
    files: dict[str, str] = {}
    names_by_module: dict[str, list[str]] = {}
    for file in own_files:
        files[str(file.relative_to(path.parent))] = _redirect_imports(file, names_by_module, names.task)
    helper = gather_definitions(names_by_module)
    if helper.needs_workload or helper.texts:
        text = helper.render("What a training is made of.", workload_class([*files.values(), *helper.texts]))
        files[f"{names.task}.py"] = text
    attribute = getattr(import_file(path), name)
    is_called = not isinstance(attribute, Workload)
    data, left_out = _data_beside(own_files)
    return OwnSources(
        path.stem, name, is_called, _parameters(attribute) if is_called else frozenset(), files, data, left_out, names
    )


def _parameters(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _built_in(path: str) -> OwnSources:
    """Return the sources of a built-in workload in one file."""
    module, _, attribute = BUILT_IN[path].partition(":")
    flattened = gather_definitions({module: [attribute]})
    flattened.needs_workload = True
    name = f"{path.replace('-', '_')}_workload"
    text = flattened.render(f"The workload {path}: model, data, loss, optimizer.", workload_class(flattened.texts))
    imported = importlib.import_module(module)
    folder = Path(str(imported.__file__)).parent
    data = [file for file in sorted(folder.glob("*.gz")) if f'"{file.name}"' in text]
    licence = [folder / "DIGITS.md"] if any(file.name == "digits.csv.gz" for file in data) else []
    return OwnSources(
        name, attribute, True, _parameters(getattr(imported, attribute)), {f"{name}.py": text}, [*data, *licence], []
    )


def _imported_files(path: Path) -> list[Path]:
    """Return a file and all files next to it that it imports, recursively."""
    remaining, paths = [path], list[Path]()
    while remaining:
        file = remaining.pop()
        if file in paths:
            continue
        paths.append(file)
        for line in import_lines(file.read_text(encoding="utf-8-sig")):
            parts = line.module.split(".")
            for components in (parts, [*parts, line.name or ""]):
                path_without_suffix = path.parent.joinpath(*components)
                inits = [path_without_suffix.parent / "__init__.py", path_without_suffix / "__init__.py"]
                candidates = [
                    path_without_suffix.with_suffix(".py"),
                    *(init for init in inits if init.parent != path.parent),
                ]
                remaining += [candidate for candidate in candidates if candidate.is_file()] if components[-1] else []
    return sorted(paths)


def _redirect_imports(file: Path, names_by_module: dict[str, list[str]], task: str) -> str:
    """Redirect the imports of everyrank in a user's file to `task`, and record them in `wanted`."""
    text = file.read_text(encoding="utf-8-sig")
    tree = ast.parse(text)
    changes: list[tuple[ast.stmt, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "everyrank" for alias in node.names):
            names = _used_attributes(file, tree, node)
            names_by_module.setdefault(_PUBLIC_NAMES["Workload"], []).extend(names)
            changes.append((node, f"from {task} import {', '.join(names)}"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "everyrank":
            imported_names = [alias.name + (f" as {alias.asname}" if alias.asname else "") for alias in node.names]
            for alias in node.names:
                module = node.module or ""
                if module == "everyrank":
                    module = _PUBLIC_NAMES.get(alias.name, "")
                if not module:
                    raise _unsupported_name(file, node.lineno, alias.name)
                names_by_module.setdefault(module, []).append(alias.name)
            changes.append((node, f"from {task} import {', '.join(imported_names)}"))
    text = _replace_statements(text, changes)
    return text.replace("everyrank.Workload", "Workload") if changes else text


def _replace_statements(text: str, changes: list[tuple[ast.stmt, str]]) -> str:
    """Replace statements; what else is in their lines stays. The text ends with a newline."""
    lines = [line.encode() for line in text.removesuffix("\n").split("\n")]  # ast counts columns in bytes
    for node, replacement in sorted(changes, key=lambda change: (change[0].lineno, change[0].col_offset), reverse=True):
        last_line = node.end_lineno or node.lineno
        before, after = lines[node.lineno - 1][: node.col_offset], lines[last_line - 1][node.end_col_offset :]
        lines[node.lineno - 1 : last_line] = [before + replacement.encode() + after]
    return b"\n".join(lines).decode() + "\n"


def _used_attributes(file: Path, tree: ast.Module, node: ast.Import) -> list[str]:
    """Return the attributes that a file uses of `import everyrank`. Raises `UsageError` for more than Workload."""
    if any(alias.name != "everyrank" or alias.asname for alias in node.names):
        raise UsageError(
            f"{file.name}, line {node.lineno}: write `from everyrank import Workload`, which eject can replace"
        )
    attribute_lines = {
        other.attr: other.lineno
        for other in ast.walk(tree)
        if isinstance(other, ast.Attribute) and isinstance(other.value, ast.Name) and other.value.id == "everyrank"
    }
    for name, line in attribute_lines.items():
        if name not in _PUBLIC_NAMES:
            raise _unsupported_name(file, line, name)
    return sorted(attribute_lines) or ["Workload"]


def _unsupported_name(file: Path, line: int, name: str) -> UsageError:
    reason = (
        "is a loss over the whole batch: use the recipe contrastive"
        if name in ("gather", "first_row")
        else ("has no counterpart in plain PyTorch: move it into another file")
    )
    return UsageError(f"{file.name}, line {line}: everyrank.{name} {reason}")


def _data_beside(files: list[Path]) -> tuple[list[Path], list[Path]]:
    """Return (data files to copy, files that are too large) whose names are constants in the sources."""
    data_files: dict[Path, None] = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8-sig"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and 0 < len(node.value) < 200:
                path = file.parent / node.value
                if "\n" not in node.value and path.parent == file.parent and path.is_file() and path not in files:
                    data_files[path] = None
    return (
        [file for file in data_files if file.stat().st_size <= _LARGEST_BYTES],
        [file for file in data_files if file.stat().st_size > _LARGEST_BYTES],
    )


def workload_class(texts: list[str]) -> str:
    """Return the source of class Workload: a dataclass with the fields that these texts use."""
    all_fields = {field.name: field for field in dataclasses.fields(Workload)}
    calls = [node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    used_fields = {keyword.arg for call in calls for keyword in call.keywords}
    for call in calls:  # fields that are given by position, and those before them
        if ast.unparse(call.func).rpartition(".")[2] == "Workload":
            has_star = any(isinstance(argument, ast.Starred) for argument in call.args)
            used_fields |= set(all_fields if has_star else list(all_fields)[: len(call.args)])
    required = [name for name, field in all_fields.items() if _is_required(field)]
    lines = [
        "from collections.abc import Callable, Mapping",
        "from dataclasses import dataclass, field",
        "from typing import Any",
        "",
        "",
        "@dataclass(frozen=True)",
        "class Workload:",
        '    """The model, data and loss; train.py has the training loop."""',
        "",
    ]
    for name, value in all_fields.items():
        if name not in required and name not in used_fields and name not in ("metrics", "epochs", "steps", "seed"):
            continue
        kind, comment = _TYPES.get(name, ("Any", ""))
        default = "" if name in required else f" = {value.default!r}".replace("'", '"')
        if value.default_factory is not dataclasses.MISSING:
            default = " = field(default_factory=dict)"
        lines.append(f"    {name}: {kind}{default}" + (f"  # {comment}" if comment else ""))
    return "\n".join(lines) + "\n"


def _is_required(field: dataclasses.Field[object]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
