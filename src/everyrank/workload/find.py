"""Find a workload by name or path, and call its function with the settings of `--set`."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import numbers
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from everyrank.errors import EveryrankError, UsageError, WorkloadError, describe, shortened
from everyrank.workload.batch import with_batch
from everyrank.workload.scan import defines, workload_names
from everyrank.workload.workload import Source, Workload

__all__ = ["BUILT_IN", "HIDDEN_NAME", "check_place", "find_workload", "import_file", "load", "parse_settings"]

BUILT_IN: dict[str, str] = {
    "digits": "everyrank.builtin.digits:workload",
    "text": "everyrank.builtin.text:text",
    "text-medium": "everyrank.builtin.text:text_medium",
    "text-124m": "everyrank.builtin.text:text_124m",
    "causal-lm": "everyrank.builtin.causal_lm:workload",
    "mnist": "everyrank.builtin.mnist:workload",
    "cifar10": "everyrank.builtin.cifar:cifar10",
    "cifar100": "everyrank.builtin.cifar:cifar100",
    "imagenet": "everyrank.builtin.imagenet:workload",
}
"""Name on the command line -> module:function."""

HIDDEN_NAME = "_everyrank_workload_"
"""Prefix of the module name of a file that `import` would not find under its own name."""


def find_workload(place: str, **settings: Any) -> Workload:
    """Find a workload: a built-in name, or one in your own file.

    Args:
        place: A built-in name ("digits"), or `path/file.py[:name]`.
        **settings: Arguments of the function that builds the workload.

    Raises:
        UsageError: There is no such name, file or setting.
        WorkloadError: The file raises an error.

    Examples:
        >>> from everyrank import find_workload
        >>> find_workload("digits", lr=0.1).global_batch
        64
    """
    return load(Source(place, settings))


def load(workload_or_source: Source | Workload) -> Workload:
    """Import the `Workload` of a source in this process. A `Workload` is returned as it is."""
    if isinstance(workload_or_source, Workload):
        return workload_or_source
    source = workload_or_source
    parameters = _parameters(_find(source.place)[0])
    saved = {name: value for name, value in source.saved.items() if name in parameters}
    source = dataclasses.replace(source, settings={**saved, **source.settings}, saved={})
    requested = {"batch": source.batch, "epochs": source.epochs, "steps": source.steps}
    # a workload function that takes these arguments may build its schedule from them
    settings = {name: value for name, value in requested.items() if value is not None and name in parameters}
    workload = _build(dataclasses.replace(source, settings={**source.settings, **settings}))
    if source.batch is not None:
        old_batch = workload.global_batch
        if "batch" in parameters:
            old_batch = source.settings.get("batch", parameters["batch"])
        workload = _with_batch(workload, old_batch, source.batch, source.lr_rule)
    if source.epochs is not None or source.steps is not None:
        workload = dataclasses.replace(workload, epochs=source.epochs, steps=source.steps)
    workload = dataclasses.replace(workload)
    lengths = {name: value for name, value in settings.items() if name != "batch"}
    object.__setattr__(workload, "source", dataclasses.replace(source, settings={**source.settings, **lengths}))
    return workload


def _with_batch(workload: Workload, old_batch: object, batch: int, rule: str) -> Workload:
    """Return the workload with this global batch. `old_batch` may be no number: the default of a parameter `batch`."""
    if isinstance(old_batch, int) and not isinstance(old_batch, bool) and old_batch > 0:
        return with_batch(workload, old_batch, batch, rule)
    if rule != "none":
        raise UsageError(
            f"--lr-rule {rule}: the workload function has no default batch to scale from; give its parameter a number, "
            "such as batch=64, or leave out --lr-rule"
        )
    return dataclasses.replace(workload, global_batch=batch)


def _build(source: Source) -> Workload:
    """Find the workload of a source and apply its settings."""
    value, where = _find(source.place)
    if callable(value) and not isinstance(value, Workload):
        _check_settings(value, source, where)
        try:
            value = value(**source.settings)
        except EveryrankError:
            raise
        except (Exception, SystemExit) as error:
            raise WorkloadError(describe(error)) from error
    elif source.settings:
        raise UsageError(
            f"--set {' '.join(source.settings)}: {where} is a finished Workload; "
            "write `def workload(...) -> Workload` to take settings"
        )
    if not isinstance(value, Workload):
        raise WorkloadError(f"{where} is {type(value).__name__}: it must be, or return, an everyrank.Workload")
    return value


def _parameters(function: object) -> dict[str, Any]:
    """Return the parameters of a function with their defaults, or {} for anything else."""
    if isinstance(function, Workload) or not callable(function):
        return {}
    try:
        return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    except (ValueError, TypeError):  # a class written in C, which has no signature
        return {}


def _find(name_or_path: str) -> tuple[object, str]:
    """Return the object that a built-in name or `path/file.py[:name]` stands for, and its name for messages."""
    if name_or_path in BUILT_IN:
        module_name, _, attribute = BUILT_IN[name_or_path].partition(":")
        return getattr(importlib.import_module(module_name), attribute), f"workload {name_or_path}"
    path, name = _path_and_name(name_or_path)
    module = import_file(path)
    if not hasattr(module, name):
        workloads = [key for key, value in vars(module).items() if isinstance(value, Workload)]
        raise WorkloadError(_without_workload(path, name, workloads))
    return getattr(module, name), f"{path.name}:{name}"


def _without_workload(path: Path, name: str, workloads: Sequence[str]) -> str:
    """Return the message for a file that does not define `name`; `workloads` are those that it defines."""
    if not workloads and name != "workload" and defines(path, "workload"):
        workloads = ["workload"]
    if workloads:
        return f"{path.name} defines no `{name}`. It defines {', '.join(workloads)}: write {path.name}:{workloads[0]}"
    quoted_path = shlex.quote(os.path.relpath(path))
    return (
        f"{path.name} defines no `{name}`: it is a plain script. To check it as it is: everyrank audit {quoted_path}. "
        "To train it under a layout, describe it as a workload: everyrank new workload my_workload.py"
    )


def check_place(name_or_path: str) -> None:
    """Raise `UsageError` for a name or file that does not exist, without importing torch or the file."""
    if name_or_path not in BUILT_IN:
        _path_and_name(name_or_path)


def _path_and_name(text: str) -> tuple[Path, str]:
    """Split `path/file.py[:name]`.

    Raises `UsageError` for a missing file, `WorkloadError` for a file that does not define the name. Such a script is
    parsed, not run.
    """
    path_text, _, name = text.rpartition(":") if ".py:" in text else (text, "", "")
    if not path_text.endswith(".py"):
        close = difflib.get_close_matches(text, BUILT_IN, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UsageError(
            f"workload {text!r}: {hint}give one of {', '.join(BUILT_IN)}, or a file: path/to/file.py[:name]"
        )
    path = Path(path_text).absolute()
    try:
        is_file = path.is_file()
    except (OSError, ValueError):  # not a valid file name
        is_file = False
    if not is_file:
        raise UsageError(f"workload {shortened(repr(text))}: there is no file {shortened(str(path))}")
    name = name or "workload"
    if not defines(path, name):
        raise WorkloadError(_without_workload(path, name, workload_names(path)))
    return path, name


def import_file(path: Path) -> ModuleType:
    """Import a user's file, which may import modules next to it.

    Its folder is put first on sys.path unless it is there already.
    """
    # A file called torch.py would otherwise be found by its own `import torch`.
    for library in ("torch", "numpy"):
        importlib.import_module(library)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    # The file keeps its own name where `import name` finds it, so that data loader workers can import it again.
    name = path.stem if _finds(path.stem, path) else f"{HIDDEN_NAME}{path.stem}"
    if name in sys.modules and sys.modules[name].__file__ == str(path):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise WorkloadError(describe(error)) from error
    return module


def _finds(name: str, path: Path) -> bool:
    """Whether `import name` finds this file, not a different one (such as an installed `digits`)."""
    if not name.isidentifier():
        return False
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # an imported module without a spec, such as __main__
        return False
    return spec is not None and spec.origin == str(path)


def _check_settings(function: Callable[..., object], source: Source, where: str) -> None:
    """Raise `UsageError` for a setting that the function does not take or that has the wrong type."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # a class written in C, which has no signature
        return
    takes_any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    parameters = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    names = [parameter.name for parameter in parameters]
    for key in source.settings:
        if key not in names and not takes_any_name:
            hint = f"it takes {', '.join(names)}" if names else "it takes none"
            raise UsageError(f"--set {key}={source.settings[key]}: {where} has no such setting; {hint}")
    for parameter in parameters:
        if parameter.name in source.settings and not _fits(source.settings[parameter.name], parameter):
            value = source.settings[parameter.name]
            raise UsageError(f"--set {parameter.name}={value}: {where} needs {_type_name(parameter.annotation)} there")
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in source.settings]
    if missing:
        raise UsageError(f"{where} needs a value for {', '.join(missing)}: --set {missing[0]}=...")


_TYPES: dict[str, type] = {"float": numbers.Real, "int": numbers.Integral, "str": str, "bool": bool}
"""Annotations that are checked, by name -> the types of their values. A bool is a number only in Python."""


def _type_name(annotation: object) -> str:
    """Return the name of an annotation: a class, or text under `from __future__ import annotations`."""
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _fits(value: object, parameter: inspect.Parameter) -> bool:
    """Whether the value has the annotated type. True for annotations that are not checked, and for a default None."""
    name = _type_name(parameter.annotation)
    if name not in _TYPES or (value is None and parameter.default is None):
        return True
    return isinstance(value, _TYPES[name]) and (not isinstance(value, bool) or name == "bool")


def parse_settings(assignments: Sequence[str]) -> dict[str, Any]:
    """Parse `["lr=0.05", "norm=group"]` into `{"lr": 0.05, "norm": "group"}`. A value that is not a literal is text."""
    settings: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(f"--set {assignment}: write key=value, for example --set lr=0.05")
        try:
            settings[key] = ast.literal_eval(text)
        except (RecursionError, MemoryError):
            raise UsageError(
                f"--set {key}: {len(text):,} characters, nested too deeply for Python to read; give a plain value"
            ) from None
        except (ValueError, SyntaxError, TypeError):  # TypeError: a list as a key of a dict
            settings[key] = {"true": True, "false": False, "none": None}.get(text.lower(), text)
    return settings
