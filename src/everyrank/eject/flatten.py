"""Collects the definitions of everyrank that a workload uses, with their dependencies, in one standalone file.

A definition is a top-level statement of a module. Names in it are resolved in that module: other definitions and
imports are included, and names from other modules of everyrank are followed.
"""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path

from everyrank.eject.imports import ImportLine, import_lines, render_imports
from everyrank.errors import UsageError

__all__ = ["Flattened", "gather_definitions"]

_PACKAGES = ("everyrank.builtin", "everyrank.datasets", "everyrank.workload", "everyrank.errors", "everyrank.data")
"""Packages whose definitions can be part of a workload."""


@dataclass
class Flattened:
    """The parts of one file.

    imports         import lines of the file
    texts           definitions, each after those it needs
    names           defined name -> its module
    needs_workload  whether the file needs the class Workload
    """

    imports: set[ImportLine] = field(default_factory=set[ImportLine])
    texts: list[str] = field(default_factory=list[str])
    names: dict[str, str] = field(default_factory=dict[str, str])
    needs_workload: bool = False

    def render(self, header: str, workload_class: str) -> str:
        """Return the whole file."""
        imports = set(self.imports)
        texts = list(self.texts)
        if self.needs_workload:
            texts.insert(0, workload_class)
            imports |= import_lines(workload_class)
            texts[0] = workload_class[workload_class.index("@dataclass") :].rstrip()
        imports = {line for line in imports if line.module != "__future__"}
        top = [f'"""{header}"""', "from __future__ import annotations"]
        return "\n\n".join([*top, render_imports(imports)]) + "\n\n\n" + "\n\n\n".join(texts) + "\n"


def gather_definitions(names_by_module: dict[str, list[str]]) -> Flattened:
    """Collect the definitions of these names, by module. Raises `UsageError` for a definition that needs everyrank."""
    flattened = Flattened()
    for module, names in names_by_module.items():
        for name in names:
            _add(flattened, module, name)
    return flattened


def _add(flattened: Flattened, module: str, name: str) -> None:
    """Add the definition of `name`, after everything it depends on."""
    module, name = _defining_module(module, name)
    if (module, name) == ("everyrank.workload.workload", "Workload"):
        flattened.needs_workload = True
        return
    if flattened.names.get(name) == module:
        return
    if not module.startswith(_PACKAGES):
        raise UsageError(f"eject: {module}.{name} cannot be part of a workload; remove it from the file")
    if name in flattened.names:
        raise UsageError(
            f"eject: {name} is defined in {flattened.names[name]} and in {module}; one file cannot have both"
        )
    flattened.names[name] = module
    if module == "everyrank.errors":
        flattened.texts.append(f'class {name}(ValueError):\n    """A setting or data is wrong."""')
        return
    source, tree = _parsed(module)
    statement = _definition(tree, name)
    if statement is None:
        raise UsageError(f"eject: {module} does not define {name}")
    flattened.names.update(dict.fromkeys(_defined(statement), module))  # one statement may define several names
    _add_dependencies(flattened, module, tree, statement)
    flattened.texts.append(_text(source, tree, statement))


def _add_dependencies(flattened: Flattened, module: str, tree: ast.Module, statement: ast.stmt) -> None:
    """Add the definitions and imports that a statement of a module uses."""
    if any(line.module.partition(".")[0] == "everyrank" for line in import_lines(ast.unparse(statement))):
        raise UsageError(f"eject: line {statement.lineno} of {module} imports everyrank, which a project does not have")
    imported = {line.bound: line for line in _top_imports(tree)}
    for used_name in _names_in(statement):
        line = imported.get(used_name)
        if line is None:
            if used_name not in _defined(statement) and _definition(tree, used_name) is not None:
                _add(flattened, module, used_name)
        elif line.module.partition(".")[0] == "everyrank":
            if line.name is None:
                raise UsageError(f"eject: {module} imports the module {line.module}; import names from it")
            _add(flattened, line.module, line.name)
        else:
            flattened.imports.add(line)


def _top_imports(tree: ast.Module) -> set[ImportLine]:
    """Return the top-level imports of a module, including those for type checkers."""
    type_checking_bodies = [
        node.body for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    nodes = [*tree.body, *(node for body in type_checking_bodies for node in body)]
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    return import_lines(ast.unparse(ast.Module(body=[*imports], type_ignores=[])))


def _defining_module(module: str, name: str) -> tuple[str, str]:
    """Return the module that defines a name, and the name, also if an `__init__` re-exports it."""
    source, tree = _parsed(module)
    if _definition(tree, name) is None:
        for line in import_lines(source):
            if line.bound == name and line.name is not None and line.module.startswith("everyrank"):
                return _defining_module(line.module, line.name)
    return module, name


def _parsed(module: str) -> tuple[str, ast.Module]:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise UsageError(f"eject: there is no module {module}")
    source = Path(spec.origin).read_text(encoding="utf-8")
    return source, ast.parse(source)


def _definition(tree: ast.Module, name: str) -> ast.stmt | None:
    """Return the top-level statement of a module that defines a name."""
    return next((statement for statement in tree.body if name in _defined(statement)), None)


def _defined(statement: ast.stmt) -> list[str]:
    """Return the names that a top-level statement defines, without imports."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]


def _names_in(statement: ast.stmt) -> list[str]:
    """Return all names in a statement, in order, without those in strings such as quoted annotations."""
    return list(dict.fromkeys(node.id for node in ast.walk(statement) if isinstance(node, ast.Name)))


def _text(source: str, tree: ast.Module, statement: ast.stmt) -> str:
    """Return the source of a statement with decorators, comments before it, and the docstring of a constant."""
    lines = source.splitlines()
    decorators = getattr(statement, "decorator_list", [])
    first_line = min([statement.lineno, *(decorator.lineno for decorator in decorators)]) - 1
    while first_line and lines[first_line - 1].startswith("#"):
        first_line -= 1
    next_statement = next((other for other in tree.body if other.lineno > statement.lineno), None)
    is_docstring = isinstance(next_statement, ast.Expr) and isinstance(next_statement.value, ast.Constant)
    last_line = next_statement.end_lineno if is_docstring and next_statement is not None else statement.end_lineno
    return "\n".join(lines[first_line:last_line])
