"""Reads the import statements of a source, and renders them in isort's order."""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection
from typing import NamedTuple

__all__ = ["ImportLine", "import_lines", "prune_imports", "render_imports"]


class ImportLine(NamedTuple):
    """One name that an import binds: `from module import name as bound`; `import module as bound` without a name."""

    module: str
    name: str | None
    bound: str


def import_lines(source: str) -> set[ImportLine]:
    """Return the names that the imports of a source bind, including those for type checkers."""
    result: set[ImportLine] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                result.add(ImportLine(alias.name, None, alias.asname or alias.name.partition(".")[0]))
        elif isinstance(node, ast.ImportFrom):
            result |= {ImportLine(node.module or "", alias.name, alias.asname or alias.name) for alias in node.names}
    return result


def prune_imports(imports: Collection[ImportLine], source: str) -> set[ImportLine]:
    """Return the imports whose names occur in a source without imports."""
    used = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    return {line for line in imports if line.bound in used}


def render_imports(imports: Collection[ImportLine], own_modules: Collection[str] = ()) -> str:
    """Render import statements in three groups: standard library, third party, and the modules in `own_modules`."""
    groups: list[list[str]] = [[], [], []]
    for is_from in (False, True):
        modules = sorted({line.module for line in imports if (line.name is not None) == is_from})
        for module in modules:
            top_package = module.partition(".")[0]
            group = groups[2 if module in own_modules else 0 if top_package in sys.stdlib_module_names else 1]
            lines = sorted(line for line in imports if line.module == module and (line.name is not None) == is_from)
            if not is_from:
                group += [
                    f"import {module}" if _is_plain(line) else f"import {module} as {line.bound}" for line in lines
                ]
            else:
                group.append(_from(module, lines))
    return "\n\n".join("\n".join(group) for group in groups if group)


def _is_plain(line: ImportLine) -> bool:
    return line.bound == line.module.partition(".")[0]


def _from(module: str, lines: list[ImportLine]) -> str:
    names = [f"{line.name} as {line.bound}" if line.name != line.bound else f"{line.name}" for line in lines]
    # isort's order: CONSTANTS, Classes, functions
    names.sort(key=lambda name: (not name.isupper(), not name[0].isupper(), name.lower()))
    text = f"from {module} import {', '.join(names)}"
    return text if len(text) <= 120 else f"from {module} import (\n    " + ",\n    ".join(names) + ",\n)"
