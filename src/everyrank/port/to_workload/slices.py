"""Extracts the statements of a script that an expression depends on, to copy them to another file.

A variable with a plain number or text is replaced by its recorded value. If such values determine a condition, only
the branch taken is copied. Moves to a device are removed, because everyrank moves tensors itself.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from everyrank.port.facts import CallSite, Fact
from everyrank.port.source import NotPortedError, Scope, ScriptSource, end_of, parameter_names, start_of

__all__ = [
    "Frames",
    "Script",
    "ScriptSlice",
    "ScriptStatement",
    "bound_names",
    "loaded_names",
    "mutated_names",
    "nodes_in",
    "object_changed_by",
    "read_names",
    "root_name",
    "taken_statements",
]

_MOVES = {"to", "cuda", "cpu", "xpu", "mps"}
_HARMLESS = {"train", "eval", "zero_grad", "share_memory", "requires_grad", "parameters", "named_parameters", "summary"}
_CHANGES_ARGUMENT = re.compile(r"init|load|reset|freeze|requires_grad|_$|prune|tie|update|apply")
_TESTS = (
    *(ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.Compare, ast.Name),
    *(ast.Attribute, ast.Constant, ast.Load, ast.Tuple, ast.List, ast.cmpop, ast.BinOp, ast.operator),
)


@dataclasses.dataclass(frozen=True)
class ScriptStatement:
    """A statement as text for the generated file.

    order     sort key: depth of the call, the outermost first, then line and column
    is_heavy  whether it binds data or a module: such statements are not run when the file is imported
    """

    order: tuple[int, int, int]
    text: str
    names: frozenset[str]
    line: int
    is_heavy: bool


class Script:
    """A script and the state that all its slices share.

    constants    name -> text of a plain value, such as "0.1"
    namespaces   name -> attribute -> text, of parsed arguments
    definitions  names of module-level functions, classes and imports that are needed
    """

    def __init__(self, source: ScriptSource) -> None:
        self.source = source
        self.constants: dict[str, str] = {}
        self.namespaces: dict[str, dict[str, str]] = {}
        self.definitions: set[str] = set()
        self.devices: set[str] = set()
        self.module_values: dict[str, list[Any]] = {}

    def rendered(self, node: ast.AST, replaced: dict[ast.AST, str] | None = None) -> str:
        """Return the text of a node without moves to a device, with `replaced` texts for some inner nodes."""
        source, edits = self.source, list[tuple[tuple[int, int], tuple[int, int], str]]()
        replaced = replaced or {}

        def visit(each: ast.AST) -> None:
            if each in replaced:
                edits.append((start_of(each), end_of(each), replaced[each]))
                return
            kept = self._without_move(each)
            if kept is not None:
                inner, suffix = kept
                edits.append((start_of(each), start_of(inner), ""))
                edits.append((end_of(inner), end_of(each), suffix))
                visit(inner)
                return
            if isinstance(each, ast.Constant) and each.value == "cuda:0":
                edits.append((start_of(each), end_of(each), '"cuda"'))
            for child in ast.iter_child_nodes(each):
                visit(child)

        visit(node)
        return _dedented(_spliced(source, node, edits), getattr(node, "col_offset", 0))

    def _without_move(self, node: ast.AST) -> tuple[ast.expr, str] | None:
        """Return (x, "") for `x.to(device)`, `x.cuda()`, `DataParallel(x)`; (x, ".to(dtype=d)") if it sets a dtype."""
        if not isinstance(node, ast.Call):
            return None
        if self.source.code(node.func).rpartition(".")[2] == "DataParallel" and node.args:
            return node.args[0], ""
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in _MOVES:
            return None
        if node.func.attr != "to":
            return node.func.value, ""
        kept = [self.source.code(arg) for arg in node.args if not self._is_device(arg)]
        left_out = {"device", "non_blocking"}
        kept += [
            f"{keyword.arg}={self.source.code(keyword.value)}"
            for keyword in node.keywords
            if keyword.arg and keyword.arg not in left_out
        ]
        if len(kept) == len(node.args) + len(node.keywords):
            return None
        return node.func.value, f".to({', '.join(kept)})" if kept else ""

    def _is_device(self, node: ast.expr) -> bool:
        code = self.source.code(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value.partition(":")[0] in ("cuda", "cpu", "mps", "xpu")
        return code in self.devices or code.rpartition(".")[2] in ("device", "dev") or code.startswith("torch.device(")


def _spliced(source: ScriptSource, node: ast.AST, edits: list[tuple[tuple[int, int], tuple[int, int], str]]) -> str:
    """Return the text of a node with edits applied."""
    (first, column), (last_line, end_column) = start_of(node), end_of(node)
    decorators = getattr(node, "decorator_list", [])
    if decorators:
        first, column = min(each.lineno for each in decorators), getattr(node, "col_offset", 0)
    lines = source.lines[first - 1 : last_line]
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    raw = b"".join(lines)

    def offset(position: tuple[int, int]) -> int:
        return starts[position[0] - first] + position[1]

    chunks, done_bytes = list[bytes](), offset((first, column))
    for start, stop, text in sorted(edits, key=lambda each: (each[0], each[1])):
        if offset(start) < done_bytes or offset(stop) > offset((last_line, end_column)):
            continue
        chunks += [raw[done_bytes : offset(start)], text.encode()]
        done_bytes = offset(stop)
    chunks.append(raw[done_bytes : offset((last_line, end_column))])
    return b"".join(chunks).decode().replace("\r\n", "\n")


def _dedented(text: str, column: int) -> str:
    """Return the text of a statement without its indentation of `column` characters; keep it if a line has less."""
    first_line, *other_lines = text.split("\n")
    if column and other_lines and all(not line.strip() or not line[:column].strip() for line in other_lines):
        other_lines = [line[column:] for line in other_lines]
    return "\n".join([first_line, *other_lines])


# --- names


def loaded_names(tree: ast.AST) -> set[str]:
    """Return the names that code reads, without those that its comprehensions, lambdas, functions and classes bind."""
    inner_names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.comprehension):
            inner_names |= {each.id for each in ast.walk(node.target) if isinstance(each, ast.Name)}
        elif isinstance(node, ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            all_arguments = [
                *arguments.args,
                *arguments.kwonlyargs,
                *arguments.posonlyargs,
                arguments.vararg,
                arguments.kwarg,
            ]
            inner_names |= {each.arg for each in all_arguments if each is not None}
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner_names |= _bound_within(node)
    loads = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
    return loads - inner_names


def nodes_in(nodes: Sequence[ast.AST]) -> list[ast.AST]:
    """Return all nodes in several nodes."""
    return [each for node in nodes for each in ast.walk(node)]


def read_names(statements: Iterable[ast.stmt], bound: Iterable[str] = ()) -> set[str]:
    """Return the names that statements read before binding them."""
    names, bound_names_so_far = set[str](), set(bound)
    for each in statements:
        if isinstance(each, ast.For | ast.While | ast.If | ast.With | ast.Try):
            head = [getattr(each, name, None) for name in ("iter", "test")]
            head += [item.context_expr for item in getattr(each, "items", [])]
            names |= {name for node in head if node is not None for name in loaded_names(node)} - bound_names_so_far
            targets = [each.target] if isinstance(each, ast.For) else []
            targets += [item.optional_vars for item in getattr(each, "items", []) if item.optional_vars is not None]
            inner = bound_names_so_far | {
                node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)
            }
            handlers = [node for handler in getattr(each, "handlers", []) for node in handler.body]
            for block in (each.body, getattr(each, "orelse", []), handlers, getattr(each, "finalbody", [])):
                names |= read_names(block, inner)
        else:
            names |= loaded_names(each) - bound_names_so_far
            bound_names_so_far |= bound_names(each) if not isinstance(each, ast.AugAssign) else set()
    return names


def _bound_within(definition: ast.AST) -> set[str]:
    """Return the names that the body of a function or class binds, except globals."""
    names = set[str]()
    outer = {name for node in ast.walk(definition) if isinstance(node, ast.Global) for name in node.names}
    for node in ast.walk(definition):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
        elif node is not definition and isinstance(
            node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef
        ):
            names |= bound_names(node)
    return names - outer


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def bound_names(statement: ast.AST) -> set[str]:
    """Return the names that a statement binds in its own scope."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
    names = set[str]()
    for node in _own_nodes(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom) and node is not statement:
            names |= bound_names(node)
    return names


def _own_nodes(statement: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a statement, without the bodies of functions, lambdas and comprehensions in it."""
    yield statement
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child
        elif not isinstance(child, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            yield from _own_nodes(child)


def mutated_names(statement: ast.AST) -> set[str]:
    """Return the names whose objects a statement changes: `x.a = 1`, `x[0] = 1`, `x.append(1)`, `init(x)`.

    A loop that changes the parts of x changes x.
    """
    names = set[str]()
    for node in _own_nodes(statement):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            names.add(root_name(node))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call = node.value
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if isinstance(call.func, ast.Attribute) and name not in _MOVES | _HARMLESS:
                names.add(root_name(call.func))
            if _CHANGES_ARGUMENT.search(name):
                names |= {root_name(arg) for arg in call.args}
    return _with_iterated(statement, names - {""})


def _with_iterated(statement: ast.AST, changed: set[str]) -> set[str]:
    """Return `changed` with x if a loop over the parts of x changes them: `for p in x.parameters(): p.a = 1`."""
    loops = [node for node in _own_nodes(statement) if isinstance(node, ast.For)]
    for loop in reversed(loops):  # the inner loops first
        if bound_names(loop.target) & changed:
            functions = {node.func for node in ast.walk(loop.iter) if isinstance(node, ast.Call)}
            iterated = {node.id for node in ast.walk(loop.iter) if isinstance(node, ast.Name) and node not in functions}
            changed = changed | iterated
    return changed


def object_changed_by(statement: ast.stmt) -> set[tuple[str, str]]:
    """Return (name, attribute) of the objects that a statement changes; "" for a method or an item of the object."""
    changed = set[tuple[str, str]]()
    nodes = [
        node
        for node in _own_nodes(statement)
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store)
    ]
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        method = statement.value.func
        if isinstance(method, ast.Attribute) and method.attr not in _MOVES | _HARMLESS | {"set_epoch"}:
            nodes.append(method)
    for node in nodes:
        owner: ast.expr = node
        attribute = ""
        while isinstance(owner, ast.Attribute | ast.Subscript):
            attribute = owner.attr if isinstance(owner, ast.Attribute) and isinstance(node.ctx, ast.Store) else ""
            owner = owner.value
        if isinstance(owner, ast.Name):
            changed.add((owner.id, attribute))
    return changed


def root_name(node: ast.AST) -> str:
    """Return x for `x.a`, `x[0]` and `x.f().b`; "" for other expressions."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


# --- branches


def decided(test: ast.expr, values: dict[str, list[Any]]) -> bool | None:
    """Evaluate a condition from recorded values; None if they do not determine it."""
    if isinstance(test, ast.BoolOp):  # one false part of `and` is enough, and one true part of `or`
        deciding = isinstance(test.op, ast.Or)
        parts = [decided(part, values) for part in test.values]
        return deciding if deciding in parts else None if None in parts else not deciding
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        is_true = decided(test.operand, values)
        return None if is_true is None else not is_true
    if not all(isinstance(node, _TESTS) for node in ast.walk(test)):
        return None
    env: dict[str, Any] = {"__name__": "__main__"}
    for name in {each.id for each in ast.walk(test) if isinstance(each, ast.Name)} - {"__name__"}:
        recorded = values.get(name)
        if recorded is None or recorded[0] == "device":
            return None
        if recorded[0] == "literal":
            env[name] = ast.literal_eval(recorded[1]) if "inf" not in recorded[1] and "nan" not in recorded[1] else 0
            continue
        inner = {
            key.partition(".")[2]: ast.literal_eval(value[1])
            for key, value in values.items()
            if key.startswith(f"{name}.") and value[0] == "literal" and value[1] not in ("inf", "-inf", "nan")
        }
        env[name] = SimpleNamespace(**inner) if inner else object()
        is_compared = any(
            isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot) for node in ast.walk(test)
        )
        if not inner and not is_compared:
            return None
    try:
        return bool(eval(compile(ast.Expression(test), "", "eval"), {"__builtins__": {}}, env))  # noqa: S307  (no calls)
    except Exception:
        return None


def taken_statements(statements: Iterable[ast.stmt], values: dict[str, list[Any]]) -> Iterator[ast.stmt]:
    """Yield the statements; a decided `if` and a `with` block are replaced by the statements in them."""
    for statement in statements:
        if isinstance(statement, ast.If):
            is_taken = decided(statement.test, values)
            if is_taken is not None:
                yield from taken_statements(statement.body if is_taken else statement.orelse, values)
                continue
        if isinstance(statement, ast.With):
            if any(item.optional_vars is not None for item in statement.items):
                yield statement
            else:
                yield from taken_statements(statement.body, values)
            continue
        yield statement


class ScriptSlice:
    """The statements that expressions need.

    given  parameters of the new function, which need no statements
    """

    def __init__(self, script: Script, given: Iterable[str] = ()) -> None:
        self.script, self.given = script, set(given)
        self.statements: dict[tuple[int, int, int], ScriptStatement] = {}
        self._done: set[tuple[Any, ...]] = set()

    def needs(self, code: ast.AST, event: Fact, depth: int = 0, before: tuple[int, int] | None = None) -> None:
        """Add the statements that `code` needs, which runs at site `depth` of an event's chain of calls."""
        frames = Frames(self.script, event.chain)
        for name in sorted(read_names(code.body) if isinstance(code, ast.Module) else loaded_names(code)):
            self._need(name, frames, depth, before or frames.position(depth))
        self._attributes(code, frames, depth)

    def _attributes(self, code: ast.AST, frames: Frames, depth: int) -> None:
        """Record which attributes of parsed arguments are read."""
        values = {**frames.globals, **frames.values(depth)}
        read = [node for node in ast.walk(code) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
        owners = [node.value for node in read]
        for node in read:
            assert isinstance(node.value, ast.Name)
            owner, value = node.value.id, values.get(f"{node.value.id}.{node.attr}")
            if values.get(owner, [""])[0] == "namespace" and value is not None:
                self.script.namespaces.setdefault(owner, {})[node.attr] = value[1]
        for node in ast.walk(code):
            if isinstance(node, ast.Name) and node not in owners and values.get(node.id, [""])[0] == "namespace":
                for name, value in values.items():
                    if name.startswith(f"{node.id}.") and value[0] in ("literal", "device"):
                        self.script.namespaces.setdefault(node.id, {})[name.partition(".")[2]] = value[1]

    def _need(self, name: str, frames: Frames, depth: int, before: tuple[int, int]) -> None:
        if name in self.given or (name, depth, before) in self._done:
            return
        self._done.add((name, depth, before))
        value = frames.values(depth).get(name)
        units = frames.units(depth, before)
        is_in_scope = (
            frames.is_module(depth)
            or any(name in bound_names(unit) for unit in units)
            or (name in frames.parameters(depth))
        )
        if value is not None and is_in_scope and self._is_constant(name, value, units):
            return
        if value is not None and value[1] == "builtins.module" and frames.is_module(depth):
            self.script.definitions.add(name)
            return
        changing = [unit for unit in units if name in bound_names(unit) | mutated_names(unit)]
        bindings = [number for number, unit in enumerate(changing) if _is_full_binding(unit, name)]
        if bindings:
            changing = changing[bindings[-1] :]
        is_bound = any(name in bound_names(unit) for unit in changing)
        if is_bound or (changing and frames.is_module(depth)):
            for unit in changing:
                self._add(unit, name, frames, depth)
            if is_bound:
                return
        if name in frames.parameters(depth):
            self._need_argument(name, frames, depth)
        elif not frames.is_module(depth):
            module_depth = frames.depth_of_module
            if module_depth is not None:
                self._need(name, frames, module_depth, frames.position(module_depth))
        elif not hasattr(builtins, name) and name != "__name__":
            self.script.definitions.add(name)

    def _is_constant(self, name: str, value: list[Any], units: Sequence[ast.stmt]) -> bool:
        """Whether a name can be a constant of the file; if so, add the constant."""
        kind, text = value[0], value[1]
        if kind == "device":
            self.script.devices.add(name)
            self.script.constants[name] = '"cuda" if torch.cuda.is_available() else "cpu"'
            self.script.definitions.add("torch")
            return True
        if kind == "namespace":
            self.script.namespaces.setdefault(name, {})
            return True
        if kind != "literal":
            return False
        last_binding = next((unit for unit in reversed(units) if name in bound_names(unit)), None)
        if (
            isinstance(last_binding, ast.Assign)
            and isinstance(last_binding.targets[0], ast.Name)
            and _is_equal_literal(last_binding.value, text)
        ):
            text = self.script.source.code(last_binding.value)
        known_text = self.script.constants.get(name)
        if known_text is not None and not _same_value(known_text, text):
            line = last_binding.lineno if last_binding is not None else 1
            raise NotPortedError(line, f"`{name}` has several values: use a different variable for each")
        self.script.constants.setdefault(name, text)
        return True

    def _need_argument(self, name: str, frames: Frames, depth: int) -> None:
        """Add the argument for a parameter, and the statements that it needs."""
        argument, call = frames.argument(name, depth)
        if argument is None or call is None:
            raise NotPortedError(
                frames.position(depth)[0], f"cannot trace where `{name}` comes from: assign its value here"
            )
        text = self.script.rendered(argument)
        position = start_of(self.script.source.statement(call))
        if text != name:
            order = (frames.level(depth + 1), call.lineno, 1000 + len(self.statements))
            is_heavy = frames.is_heavy(name, depth)
            self.statements[order] = ScriptStatement(
                order, f"{name} = {text}", frozenset({name}), call.lineno, is_heavy
            )
        frames_code = ast.parse(text, mode="eval")
        for each in sorted(loaded_names(frames_code)):
            self._need(each, frames, depth + 1, position)
        self._attributes(frames_code, frames, depth + 1)

    def _add(self, unit: ast.stmt, name: str, frames: Frames, depth: int) -> None:
        if frames.is_module(depth) and isinstance(
            unit, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef
        ):
            self.script.definitions.add(name)
            return
        text = self.script.rendered(unit)
        code = ast.parse(text)
        if isinstance(unit, ast.If) and _only_moves(code, name):
            return
        order = (frames.level(depth), unit.lineno, unit.col_offset)
        if order not in self.statements and not _binds_to_itself(code):
            names = frozenset(bound_names(unit) | mutated_names(unit))
            is_heavy = any(frames.is_heavy(each, depth) for each in names)
            self.statements[order] = ScriptStatement(order, text, names, unit.lineno, is_heavy)
        before = start_of(unit)
        for each in sorted(read_names(code.body) | (mutated_names(unit) - bound_names(unit))):
            self._need(each, frames, depth, before)
        self._attributes(code, frames, depth)

    @property
    def ordered(self) -> list[ScriptStatement]:
        """The statements in the order in which they ran."""
        return [self.statements[key] for key in sorted(self.statements)]


class Frames:
    """The running functions of the script, with the values of their variables."""

    def __init__(self, script: Script, sites: Sequence[CallSite]) -> None:
        self.script, self.sites = script, sites
        source = script.source
        self.calls = [source.at(site.span, ast.Call) or source.at(site.span, (ast.expr, ast.stmt)) for site in sites]
        self.scopes: list[Scope] = [source.scope(call) if call is not None else source.tree for call in self.calls]

    @property
    def depth_of_module(self) -> int | None:
        """The depth of the module in the chain of calls."""
        return next((depth for depth, scope in enumerate(self.scopes) if isinstance(scope, ast.Module)), None)

    @property
    def globals(self) -> dict[str, list[Any]]:
        """The values of the variables of the module."""
        depth = self.depth_of_module
        return {**self.script.module_values, **(self.sites[depth].values if depth is not None else {})}

    def level(self, depth: int) -> int:
        """Return the number of calls outside of a scope, which is the same for all chains of calls."""
        return max(0, len(self.sites) - 1 - depth)

    def is_module(self, depth: int) -> bool:
        """Whether a scope is the module, not a function."""
        return depth >= len(self.scopes) or isinstance(self.scopes[depth], ast.Module)

    def values(self, depth: int) -> dict[str, list[Any]]:
        """Return the values of the variables of a scope."""
        return self.globals if self.is_module(depth) else self.sites[depth].values

    def is_heavy(self, name: str, depth: int) -> bool:
        """Whether a name holds data or a module, not a transform or a loss function."""
        value = self.values(depth).get(name)
        return (
            value is not None and value[0] == "object" and (value[3] or "Tensor" in value[1] or "ndarray" in value[1])
        )

    def position(self, depth: int) -> tuple[int, int]:
        """Return the position of the running statement of a scope."""
        call = self.calls[min(depth, len(self.calls) - 1)]
        if call is None:
            return self.sites[min(depth, len(self.sites) - 1)].span[:2]
        return start_of(self.script.source.statement(call))

    def parameters(self, depth: int) -> list[str]:
        """Return the names of the parameters of a scope; none for the module."""
        return parameter_names(self.scopes[depth] if depth < len(self.scopes) else self.script.source.tree)

    def argument(self, name: str, depth: int) -> tuple[ast.expr | None, ast.Call | None]:
        """Return the argument for a parameter of a function, and the call."""
        call = self.calls[depth + 1] if depth + 1 < len(self.calls) else None
        if not isinstance(call, ast.Call):
            return None, None
        for word in call.keywords:
            if word.arg == name:
                return word.value, call
        names = self.parameters(depth)
        if names[:1] == ["self"]:
            names = names[1:]
        index = names.index(name) if name in names else len(names)
        is_plain = index < len(call.args) and not any(isinstance(arg, ast.Starred) for arg in call.args[: index + 1])
        return (call.args[index], call) if is_plain else (None, None)

    def units(self, depth: int, before: tuple[int, int]) -> list[ast.stmt]:
        """Return the statements of a scope before a position, with decided branches replaced by their statements."""
        scope = self.scopes[depth] if depth < len(self.scopes) else self.script.source.tree
        return list(self._before(taken_statements(scope.body, self.values(depth)), before, self.values(depth)))

    def _before(
        self, statements: Iterable[ast.stmt], before: tuple[int, int], values: dict[str, list[Any]]
    ) -> Iterator[ast.stmt]:
        for statement in statements:
            if start_of(statement) >= before:
                continue
            if end_of(statement) > before:  # a loop, branch or block around the position
                if isinstance(statement, ast.For | ast.While | ast.With | ast.If | ast.Try):
                    for block in ("body", "orelse", "handlers", "finalbody"):
                        inner = [each for each in getattr(statement, block, []) if isinstance(each, ast.stmt)]
                        if inner and start_of(inner[0]) <= before <= end_of(inner[-1]):
                            yield from self._before(taken_statements(inner, values), before, values)
                continue
            yield statement


def _is_full_binding(statement: ast.stmt, name: str) -> bool:
    """Whether a statement always assigns a name."""
    targets = (
        statement.targets
        if isinstance(statement, ast.Assign)
        else [statement.target]
        if isinstance(statement, ast.AnnAssign)
        else []
    )
    return any(
        _is_stored(node) and node.id == name
        for each in targets
        for node in ast.walk(each)
        if isinstance(node, ast.Name)
    ) or (
        isinstance(statement, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef)
        and name in bound_names(statement)
    )


def _binds_to_itself(code: ast.Module) -> bool:
    """Whether a statement has no effect: `model = model`, or `model` alone."""
    statement = code.body[0] if len(code.body) == 1 else None
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Name):
        return True
    return isinstance(statement, ast.Assign) and all(
        ast.unparse(target) == ast.unparse(statement.value) for target in statement.targets
    )


def _only_moves(code: ast.Module, name: str) -> bool:
    """Whether a branch only moved the object of a name to a device, which has been removed."""
    changing = [
        node
        for node in ast.walk(code)
        if isinstance(node, ast.stmt)
        and not isinstance(node, ast.If | ast.With | ast.Try)
        and name in bound_names(node) | mutated_names(node)
    ]
    return all(_binds_to_itself(ast.Module([node], [])) for node in changing)


def _is_equal_literal(node: ast.expr, text: str) -> bool:
    try:
        return ast.literal_eval(node) == ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):
        return False


def _same_value(text: str, other_text: str) -> bool:
    try:
        return ast.literal_eval(text) == ast.literal_eval(other_text)
    except (ValueError, SyntaxError):
        return text == other_text
