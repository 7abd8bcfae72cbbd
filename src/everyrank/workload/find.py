"""Finding a workload by name or path, and calling what is found with the settings of `--set`."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from everyrank.errors import EveryrankError, UsageError, WorkloadError, describe, shortened
from everyrank.workload.batch import with_batch
from everyrank.workload.scan import defines, names_of_workloads
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
"""How the module of a file is called that `import` would not find under the file's own name."""


def find_workload(place: str, **settings: Any) -> Workload:
    """The workload that `place` names: a built-in name, or `path/file.py[:name]`.

    `settings` go to the function found there: `find_workload("digits", lr=0.1)`. Raises `UsageError` when nothing
    is there, `WorkloadError` when the file raises.
    """
    return load(Source(place, settings))


def load(what: Source | Workload) -> Workload:
    """The `Workload` of a source, imported in this process; a `Workload` is returned as it is."""
    if isinstance(what, Workload):
        return what
    takes = _parameters(_find(what.place)[0])
    saved = {name: value for name, value in what.saved.items() if name in takes}
    what = dataclasses.replace(what, settings={**saved, **what.settings}, saved={})
    asked = {"batch": what.batch, "epochs": what.epochs, "steps": what.steps}
    # a function that takes them builds its schedule on them
    settings = {name: value for name, value in asked.items() if value is not None and name in takes}
    if what.batch is not None and what.batch < 1:
        raise UsageError(f"--batch {what.batch}: give at least 1 sample")
    if what.batch is None and what.lr_rule != "none":
        raise UsageError(f"--lr-rule {what.lr_rule}: it says how the learning rate follows --batch N; give that too")
    found = _made(dataclasses.replace(what, settings={**what.settings, **settings}))
    if what.batch is not None:
        before = what.settings.get("batch", takes["batch"]) if "batch" in takes else found.global_batch
        found = with_batch(found, before, what.batch, what.lr_rule)
    if what.epochs is not None or what.steps is not None:
        found = dataclasses.replace(found, epochs=what.epochs, steps=what.steps)
    found = dataclasses.replace(found)
    lengths = {name: value for name, value in settings.items() if name != "batch"}
    object.__setattr__(found, "source", dataclasses.replace(what, settings={**what.settings, **lengths}))
    return found


def _made(what: Source) -> Workload:
    """What stands at the place of a source, with its settings."""
    found, where = _find(what.place)
    if callable(found) and not isinstance(found, Workload):
        _check_settings(found, what, where)
        try:
            found = found(**what.settings)
        except EveryrankError:
            raise
        except (Exception, SystemExit) as error:
            raise WorkloadError(describe(error)) from error
    elif what.settings:
        raise UsageError(
            f"--set {' '.join(what.settings)}: {where} is a finished Workload; "
            "write `def workload(...) -> Workload` to take settings"
        )
    if not isinstance(found, Workload):
        raise WorkloadError(f"{where} is {type(found).__name__}: it must be, or return, an everyrank.Workload")
    return found


def _parameters(function: object) -> dict[str, Any]:
    """Names of the parameters of a function, with their defaults; {} for anything else."""
    if isinstance(function, Workload) or not callable(function):
        return {}
    try:
        return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    except (ValueError, TypeError):  # a class of C, which has no signature
        return {}


def _find(place: str) -> tuple[object, str]:
    """The object that `place` names, and how to call it in messages."""
    if place in BUILT_IN:
        module_name, _, attribute = BUILT_IN[place].partition(":")
        return getattr(importlib.import_module(module_name), attribute), f"workload {place}"
    path, name = _path_and_name(place)
    module = import_file(path)
    if not hasattr(module, name):
        workloads = [key for key, value in vars(module).items() if isinstance(value, Workload)]
        raise WorkloadError(_without_workload(path, name, workloads))
    return getattr(module, name), f"{path.name}:{name}"


def _without_workload(path: Path, name: str, workloads: Sequence[str]) -> str:
    """The message for a file that defines no `name`, and of workloads those in `workloads`."""
    if workloads:
        return f"{path.name} defines no `{name}`. It defines {', '.join(workloads)}: write {path.name}:{workloads[0]}"
    shown = shlex.quote(os.path.relpath(path))
    return (
        f"{path.name} defines no `{name}`: it is a plain script. To check it as it is: everyrank audit {shown}. "
        "To train it under a layout, describe it as a workload: everyrank new workload my_workload.py"
    )


def check_place(place: str) -> None:
    """Raise `UsageError` where no workload can be: cheap, so that a mistyped name costs no seconds."""
    if place not in BUILT_IN:
        _path_and_name(place)


def _path_and_name(place: str) -> tuple[Path, str]:
    """`path/file.py[:name]` taken apart.

    Raises `UsageError` where there is no such file, `WorkloadError` for a file that does not define the name: such a
    script is read, and not run.
    """
    path_text, _, name = place.rpartition(":") if ".py:" in place else (place, "", "")
    if not path_text.endswith(".py"):
        close = difflib.get_close_matches(place, BUILT_IN, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UsageError(
            f"workload {place!r}: {hint}give one of {', '.join(BUILT_IN)}, or a file: path/to/file.py[:name]"
        )
    path = Path(path_text).absolute()
    try:
        is_file = path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        is_file = False
    if not is_file:
        raise UsageError(f"workload {shortened(repr(place))}: there is no file {shortened(str(path))}")
    name = name or "workload"
    if not defines(path, name):
        raise WorkloadError(_without_workload(path, name, names_of_workloads(path)))
    return path, name


def import_file(path: Path) -> ModuleType:
    """Import a person's file; its folder goes on sys.path first, because it may import its neighbours."""
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
    """Whether `import name` finds this file, and not another one (a digits.py beside an installed digits)."""
    if not name.isidentifier():
        return False
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin == str(path)


def _check_settings(function: Callable[..., object], what: Source, where: str) -> None:
    """Name the setting that the function does not take, before Python does it less clearly."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # a class of C, which has no signature
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    names = [parameter.name for parameter in parameters]
    for key in what.settings:
        if key not in names:
            takes = f"it takes {', '.join(names)}" if names else "it takes none"
            raise UsageError(f"--set {key}={what.settings[key]}: {where} has no such setting; {takes}")
    for parameter in parameters:
        wanted = _TYPES.get(parameter.annotation)
        if wanted and parameter.name in what.settings and not isinstance(what.settings[parameter.name], wanted):
            value = what.settings[parameter.name]
            raise UsageError(f"--set {parameter.name}={value}: {where} takes {parameter.annotation} there")
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in what.settings]
    if missing:
        raise UsageError(f"{where} needs a value for {', '.join(missing)}: --set {missing[0]}=...")


# Annotations that can be checked, as `from __future__ import annotations` leaves them.
_TYPES: dict[object, tuple[type, ...]] = {"float": (int, float), "int": (int,), "str": (str,), "bool": (bool,)}


def parse_settings(words: Sequence[str]) -> dict[str, Any]:
    """`["lr=0.05", "norm=group"]` -> `{"lr": 0.05, "norm": "group"}`; Python literals where they read as such."""
    settings: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(f"--set {word}: write key=value, for example --set lr=0.05")
        try:
            settings[key] = ast.literal_eval(text)
        except (RecursionError, MemoryError):
            raise UsageError(
                f"--set {key}: {len(text):,} characters with more in each other than Python reads; give a plain value"
            ) from None
        except (ValueError, SyntaxError):
            settings[key] = {"true": True, "false": False, "none": None}.get(text.lower(), text)
    return settings
