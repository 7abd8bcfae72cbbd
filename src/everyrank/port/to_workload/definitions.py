"""Finds the functions, classes and imports of a script that the file of a workload needs."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import re
from collections.abc import Callable, Sequence

from everyrank.port.facts import Fact
from everyrank.port.source import ScriptSource, start_of
from everyrank.port.to_workload.importable import READS_INPUT
from everyrank.port.to_workload.slices import (
    Script,
    ScriptSlice,
    ScriptStatement,
    bound_names,
    loaded_names,
    nodes_in,
    taken_statements,
)

__all__ = ["Definitions", "find_definitions"]


@dataclasses.dataclass
class Definitions:
    """The definitions that a script's code needs, also indirectly.

    imports     position -> text of the imports, and of the statements that have to run between them
    copies      line -> text of the functions and classes to copy
    imported    names to import from the script, if it can be imported
    statements  the statements of the module that the copies need
    """

    script: Script
    imports: dict[tuple[int, int], str] = dataclasses.field(default_factory=dict[tuple[int, int], str])
    copies: dict[int, str] = dataclasses.field(default_factory=dict[int, str])
    imported: list[str] = dataclasses.field(default_factory=list[str])
    statements: dict[tuple[int, int, int], ScriptStatement] = dataclasses.field(
        default_factory=dict[tuple[int, int, int], ScriptStatement]
    )


def find_definitions(script: Script, backward: Fact, imports_from: str) -> Definitions:
    """Return the definitions behind the names in `script.definitions`, to which it adds those that they need.

    imports_from  the module that functions and classes are imported from; "" to copy them
    """
    definitions = Definitions(script)
    module = dataclasses.replace(backward, chain=backward.chain[-1:])
    _add_path_changes(definitions)
    resolved, unknown = set[str](), set[str]()
    while unresolved := sorted(script.definitions - resolved):
        for name in unresolved:
            resolved.add(name)
            nodes = [node for node in _module_statements(definitions) if name in bound_names(node)]
            definition = next((node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)), None)
            if definition is None:
                for node in nodes:
                    if isinstance(node, ast.Import | ast.ImportFrom):
                        _add_import(definitions, node, name)
                    elif isinstance(node, ast.If | ast.Try):
                        definitions.imports[start_of(node)] = script.rendered(node)
                        script.definitions |= (loaded_names(node) - bound_names(node)) & _imported_names(definitions)
                unknown |= set() if nodes or hasattr(builtins, name) else {name}
            elif imports_from and definition in script.source.tree.body:
                definitions.imported.append(name)
            else:
                definitions.copies[definition.lineno] = _with_comments(script.source, definition)
                _add_imports(definitions, lambda node: node.module == "__future__")  # annotations of the copy
                needed = ScriptSlice(script)
                needed.needs(definition, module, before=(10**9, 0))
                definitions.statements |= needed.statements
    if unknown:
        _add_imports(definitions, lambda node: node.names[0].name == "*")
    return definitions


def _add_path_changes(definitions: Definitions) -> None:
    """Copy the statements that change sys.path, with the imports and assignments that they need, among the imports."""
    script, source = definitions.script, definitions.script.source
    needed = set[str]()
    for node in reversed(list(taken_statements(source.tree.body, script.module_values))):
        is_needed = (
            isinstance(node, ast.Assign | ast.AnnAssign)
            and bool(bound_names(node) & needed)
            and not READS_INPUT.search(source.code(node))
        )
        if is_needed or _changes_path(node):
            definitions.imports[start_of(node)] = script.rendered(node)
            needed |= loaded_names(node)
    script.definitions |= needed & _imported_names(definitions)


def _changes_path(node: ast.stmt) -> bool:
    """Whether a statement only changes sys.path: `sys.path.insert(0, x)`, `sys.path += [x]`, also under an `if`."""
    if isinstance(node, ast.If):
        return all(_changes_path(each) for each in [*node.body, *node.orelse])
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        return isinstance(function, ast.Attribute) and ast.unparse(function.value) == "sys.path"
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return any(target is not None and re.match(r"sys\.path(\[|$)", ast.unparse(target)) for target in targets)


def _add_imports(definitions: Definitions, is_wanted: Callable[[ast.ImportFrom], bool]) -> None:
    """Add the `from x import y` of the script that are wanted, whole."""
    for node in definitions.script.source.tree.body:
        if isinstance(node, ast.ImportFrom) and is_wanted(node):
            definitions.imports[start_of(node)] = definitions.script.source.code(node)


def _module_statements(definitions: Definitions) -> list[ast.stmt]:
    """Return the statements of the module, also those in its branches and blocks.

    Blocks that choose between imports stay whole: `try: import a as x`, `except ImportError: import b as x`.
    """

    def flat(statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        flat_statements: list[ast.stmt] = []
        for node in taken_statements(statements, definitions.script.module_values):
            if not isinstance(node, ast.If | ast.Try | ast.With) or _chooses_imports(node):
                flat_statements.append(node)
                continue
            for block in ("body", "orelse", "handlers"):
                for each in getattr(node, block, []):
                    flat_statements += flat(each.body if isinstance(each, ast.ExceptHandler) else [each])
        return flat_statements

    return flat(definitions.script.source.tree.body)


def _chooses_imports(block: ast.stmt) -> bool:
    """Whether an `if` or `try` has imports, and else only plain assignments, and anything in its `except`."""
    if not isinstance(block, ast.If | ast.Try):
        return False
    handlers = block.handlers if isinstance(block, ast.Try) else []
    statements = [*block.body, *block.orelse, *getattr(block, "finalbody", [])]
    imports = [each for each in nodes_in([*statements, *handlers]) if isinstance(each, ast.Import | ast.ImportFrom)]
    return bool(imports) and all(_chooses_imports(each) or _is_import_or_plain(each) for each in statements)


def _is_import_or_plain(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        return not any(isinstance(each, ast.Call) for each in ast.walk(statement))
    return isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass | ast.Raise)


def _imported_names(definitions: Definitions) -> set[str]:
    """Return the names that the module's own imports bind."""
    imports = [node for node in _module_statements(definitions) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {name for node in imports for name in bound_names(node)}


def _with_comments(source: ScriptSource, node: ast.FunctionDef | ast.ClassDef) -> str:
    """Return the text of a definition, with its decorators and the comment lines above it."""
    first_line = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    start_line = first_line
    while (
        start_line > 1
        and source.lines[start_line - 2].startswith(b"#")
        and b"!" not in source.lines[start_line - 2][:2]
    ):
        start_line -= 1
    text = b"".join(source.lines[start_line - 1 : node.end_lineno]).decode().replace("\r\n", "\n").rstrip("\n")
    if node.col_offset:
        text = "\n".join(line[node.col_offset :] for line in text.split("\n"))
    return text


def _add_import(definitions: Definitions, node: ast.Import | ast.ImportFrom, name: str) -> None:
    """Add the import of a name, without the other names of its line."""
    aliases = [each for each in node.names if (each.asname or each.name).partition(".")[0] == name]
    texts = [each.name + (f" as {each.asname}" if each.asname else "") for each in aliases]
    known_import = definitions.imports.get(start_of(node), "")
    if known_import:
        line = f"{known_import}, {', '.join(texts)}"
    elif isinstance(node, ast.Import):
        line = f"import {', '.join(texts)}"
    else:
        line = f"from {'.' * node.level}{node.module or ''} import {', '.join(texts)}"
    definitions.imports[start_of(node)] = line
