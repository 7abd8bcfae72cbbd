"""Renames what is added to a port where its script uses the same name: `split` becomes `split_`."""

from __future__ import annotations

import ast
import dataclasses
import re

from everyrank.port.helpers import HELPERS
from everyrank.port.plan import Plan

__all__ = ["new_names", "rename_helpers"]

_HELPERS = (*HELPERS, "RankBatches", "EpochSampler", "whole")
_DIST_FUNCTIONS = (
    "get_rank|get_world_size|barrier|all_reduce|broadcast|init_process_group|destroy_process_group|HashStore"
)
# patterns of their uses in a port
_MODULES = {
    "dist": rf"(?<![\w.])dist(?=\.(?:{_DIST_FUNCTIONS})\()|(?<=^import torch\.distributed as )dist$",
    "random": r"(?<![\w.])random(?=\.seed\()",
}


def rename_helpers(plan: Plan) -> None:
    """Rename helper functions, and the modules `dist` and `random`, in all edits of the script."""
    for name, new_name in new_names(plan).items():
        pattern = _MODULES.get(name, rf"(?<![\w.]){name}(?=\()|(?<=^class ){name}(?=:)")
        plan.source.edits = [
            dataclasses.replace(edit, text=_renamed(edit.text, pattern, name, new_name)) for edit in plan.source.edits
        ]


def _renamed(text: str, pattern: str, name: str, new_name: str) -> str:
    text = re.sub(rf"^import {name}$", f"import {name} as {new_name}", text, flags=re.MULTILINE)
    return re.sub(pattern, new_name, text, flags=re.MULTILINE)


def new_names(plan: Plan) -> dict[str, str]:
    """Return another name for each helper function or module of the port whose name the script uses."""
    used = _used_names(plan)
    result: dict[str, str] = {}
    for name in (*_HELPERS, *_MODULES):
        if name in used:
            result[name] = f"{name}_"
            while result[name] in used:
                result[name] += "_"
    return result


def _used_names(plan: Plan) -> set[str]:
    """Return all names of the script, without the modules that the port imports by the same name."""
    names: set[str] = set()
    for node in ast.walk(plan.source.tree):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {(alias.asname or alias.name).partition(".")[0] for alias in aliases}
            case _:
                pass
    for node in ast.walk(plan.source.tree):
        match node:
            case ast.Import(names=aliases):
                names -= {"random"} if any(alias.name == "random" and not alias.asname for alias in aliases) else set()
                names -= {"dist"} if any(alias.name == "torch.distributed" for alias in aliases) else set()
            case ast.ImportFrom(module="torch", names=aliases):
                names -= {"dist"} if any(alias.name == "distributed" for alias in aliases) else set()
            case _:
                pass
    return names
