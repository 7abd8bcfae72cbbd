"""Finds the lines that a line depends on: assignments, conditions, returned values, arguments and attributes.

This is an approximate backward slice of one file. It does not run the code. Any call is assumed to change its
arguments, and attributes are matched only by their name.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import heapq
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

__all__ = ["SourceFile", "Statement", "called_name", "read_source"]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_CALL_METHODS = ("forward", "__call__")
_OBJECT_METHODS = {"__init__", "__iter__", "__next__", "__getitem__", "__len__", *_CALL_METHODS}
_MAX_DISTANCE = 9.0  # in steps
_MAX_SETTERS = 6  # statements that set an attribute; with more setters, its name is too common to follow
# distances: to an assignment, for each newer assignment in between, and the factor for a variable of a condition
_ASSIGNED, _NEWER_ASSIGNMENT, _CONDITION_FACTOR = 1.0, 0.15, 0.4
_CHANGED_LATER = 1.5  # to a later call that may change a variable
_CONDITION, _LOOP = 1.0, 1.5  # to the block around a line
_CALLED, _RETURNED, _IN_METHOD = 1.0, 1.4, 2.0  # to a caller, a return statement, a method of a new object
_BY_NAME, _OPTION = 2.0, 0.5  # to an attribute of another class, to an option of the command line


@dataclasses.dataclass(eq=False)
class Statement:
    """A statement; for a block, only its header.

    expressions  the expressions of the statement
    function     the innermost function around it; None at the top level of the file
    class_name   the class around it
    blocks       the statements around it in the same function, the outermost first
    """

    node: ast.stmt
    expressions: list[ast.AST]
    function: ast.AST | None
    class_name: str
    blocks: tuple[Statement, ...]

    @property
    def line(self) -> int:
        """The first line."""
        return self.node.lineno

    @property
    def end(self) -> int:
        """The last line; for a block, that of its header."""
        return max((getattr(each, "end_lineno", None) or self.line for each in self.expressions), default=self.line)

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """All syntax nodes of the statement's expressions."""
        return [node for expression in self.expressions for node in ast.walk(expression)]

    @functools.cached_property
    def calls(self) -> list[ast.Call]:
        """All calls in the statement."""
        return [node for node in self.nodes if isinstance(node, ast.Call)]


class SourceFile:
    """The statements of a file, as a graph of dependencies with distances."""

    def __init__(self, tree: ast.Module) -> None:
        self.statements: list[Statement] = []
        self.functions: dict[str, list[ast.AST]] = defaultdict(list)
        self.classes: dict[str, ast.ClassDef] = {}
        self._outer: dict[ast.AST, ast.AST | None] = {}
        self._add_block(tree.body, None, "", ())
        self._by_function: dict[ast.AST | None, list[Statement]] = defaultdict(list)
        self._defined: dict[tuple[ast.AST | None, str], list[Statement]] = defaultdict(list)
        self._attributes: dict[str, list[Statement]] = defaultdict(list)
        self._callers: dict[str, list[Statement]] = defaultdict(list)
        for statement in self.statements:
            self._by_function[statement.function].append(statement)
            for name in _defined_names(statement):
                self._defined[statement.function, name].append(statement)
            for name in _defined_attributes(statement):
                self._attributes[name].append(statement)
            for call in statement.calls:
                self._callers[called_name(call)].append(statement)
        # name of a variable or attribute -> classes of its objects
        self._classes_by_name: dict[str, set[str]] = defaultdict(set)
        for class_name in self.classes:
            for name in self._instances_of(class_name):
                self._classes_by_name[name].add(class_name)

    def _add_block(
        self, body: list[ast.stmt], function: ast.AST | None, class_name: str, blocks: tuple[Statement, ...]
    ) -> None:
        for node in body:
            statement = Statement(node, _header_expressions(node), function, class_name, blocks)
            self.statements.append(statement)
            if isinstance(node, _FUNCTIONS):
                self.functions[node.name].append(node)
                self._outer[node] = function
                self._add_block(node.body, node, class_name, ())
            elif isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
                self._add_block(node.body, function, node.name, ())
            else:
                for inner in _bodies(node):
                    self._add_block(inner, function, class_name, (*blocks, statement))

    def at(self, line: int) -> Statement | None:
        """The innermost statement at a line."""
        around = [each for each in self.statements if each.line <= line <= each.end]
        return max(around, key=lambda each: each.line, default=None)

    def leading_to(self, line: int, variables: Collection[str] = ()) -> dict[Statement, float]:
        """Return the statements that a line depends on, with their distance; the statement itself has 0.

        variables  variables of the line to follow; () for all
        """
        first = self.at(line)
        if first is None:
            return {}
        distances: dict[Statement, float] = {first: 0.0}
        queue = [(0.0, 0, first)]
        number = 0
        while queue:
            distance, _, statement = heapq.heappop(queue)
            if distance > distances[statement]:
                continue
            for other, edge in self._dependencies(statement, variables if statement is first else ()):
                total = distance + edge
                if total <= _MAX_DISTANCE and total < distances.get(other, _MAX_DISTANCE + 1):
                    distances[other] = total
                    number += 1
                    heapq.heappush(queue, (total, number, other))
        return distances

    def changes_of(self, attribute: str) -> list[Statement]:
        """The statements outside of constructors that set an attribute, or change it in place."""
        changes = self._attributes.get(attribute, [])
        return [each for each in changes if getattr(each.function, "name", "__init__") != "__init__"]

    def is_loss(self, statement: Statement) -> bool:
        """Whether a statement assigns a variable on which the same function calls `backward`."""
        names = {name for target in _targets(statement) for name in _base_names(target)}
        return any(
            _base_names(call.func.value) & names
            for each in self._callers.get("backward", [])
            if each.function is statement.function
            for call in each.calls
            if called_name(call) == "backward" and isinstance(call.func, ast.Attribute)
        )

    def uses_results_of_loop(self, statement: Statement) -> bool:
        """Whether a statement reads a variable that an earlier loop has collected or summed."""
        loops = [
            each
            for each in self.body_of(statement.function)
            if isinstance(each.node, ast.For) and each.line < statement.line and each not in statement.blocks
        ]
        read = _read_names(statement)
        return any(
            _defined_names(inner) & read
            for inner in (self.body_of(statement.function) if loops else ())
            if inner is not statement and any(loop in inner.blocks for loop in loops)
        )

    def body_of(self, function: ast.AST | None) -> list[Statement]:
        """The statements of a function, or at the top level for None, without those of functions inside it."""
        return self._by_function[function]

    def is_called(self, function: ast.AST | None) -> bool:
        """Whether a line of this file calls a function."""
        return getattr(function, "name", "") in self._callers

    def called_by(self, statement: Statement) -> list[ast.AST]:
        """The functions of this file that a statement calls, or passes as an argument."""
        names = [name for call in statement.calls if not (name := called_name(call)).startswith("__")]
        names += [node.id for node in statement.nodes if isinstance(node, ast.Name) and node.id in self.functions]
        functions = [each for name in dict.fromkeys(names) for each in self.functions.get(name, [])]
        for name in names:
            for class_name in self._classes_by_name.get(name, ()):
                functions += [
                    each for each in self.classes[class_name].body if getattr(each, "name", "") in _CALL_METHODS
                ]
        return functions

    def _dependencies(self, statement: Statement, variables: Collection[str]) -> Iterator[tuple[Statement, float]]:
        """Yield the direct dependencies of a statement, or only of these variables, with the distance of each."""
        for block in statement.blocks:
            yield block, _LOOP if isinstance(block.node, ast.For | ast.While) else _CONDITION
        is_condition = isinstance(statement.node, ast.If | ast.With | ast.While)
        for name in variables or _read_names(statement):
            for each, steps in self._definitions(statement, name):
                yield each, steps * _CONDITION_FACTOR if is_condition else steps
        for attribute in _read_attributes(statement):
            yield from self._assigned(statement, attribute)
        yield from self._inside_calls(statement)
        if isinstance(statement.node, _FUNCTIONS):
            for each in self._callers.get(statement.node.name, []):
                yield each, _CALLED

    def _assigned(self, statement: Statement, attribute: str) -> Iterator[tuple[Statement, float]]:
        """Yield where an attribute is set: in the same class, or else anywhere."""
        assigned = self._attributes.get(attribute, [])
        in_class = [each for each in assigned if each.class_name == statement.class_name and each.class_name]
        for each in in_class or (assigned if len(assigned) <= _MAX_SETTERS else []):
            is_option = any(called_name(call) == "add_argument" for call in each.calls)
            yield each, _OPTION if is_option else _ASSIGNED if in_class else _BY_NAME

    def _inside_calls(self, statement: Statement) -> Iterator[tuple[Statement, float]]:
        """Yield statements that return or change something, in the functions that a statement calls or instantiates."""
        for function in self.called_by(statement):
            for each in self.body_of(function):
                if _is_result(each):
                    yield each, _RETURNED
        for name in {called_name(call) for call in statement.calls} & self.classes.keys():
            for each in self.statements:
                if (
                    each.class_name == name
                    and getattr(each.function, "name", "") in _OBJECT_METHODS
                    and _is_result(each)
                ):
                    yield each, _IN_METHOD

    def _definitions(self, statement: Statement, name: str) -> Iterator[tuple[Statement, float]]:
        """Yield where a variable gets its value: in this function, from its callers, or outside it."""
        function = statement.function
        while True:
            definitions = [each for each in self._defined.get((function, name), []) if each is not statement]
            if function is statement.function:
                below = [each for each in definitions if each.line > statement.line and isinstance(each.node, ast.Expr)]
                yield from ((each, _CHANGED_LATER) for each in below)
                above = [each for each in definitions if each.line < statement.line]
                definitions = above or (definitions if statement.blocks else [])
            if definitions:
                for number, each in enumerate(reversed(definitions)):
                    yield each, _ASSIGNED + _NEWER_ASSIGNMENT * min(number, 6)
                if not isinstance(function, _FUNCTIONS) or name not in _parameters(function):
                    return
            if isinstance(function, _FUNCTIONS) and name in _parameters(function):
                for called in self._calling_names(function):
                    for each in self._callers.get(called, []):
                        yield each, _CALLED
                return
            if function is None:
                return
            function = self._outer.get(function)

    def _calling_names(self, function: ast.AST) -> set[str]:
        """Return the names that call a function: its class for `__init__`, its instances for `forward`."""
        name = getattr(function, "name", "")
        if name not in ("__init__", "forward", "__call__"):
            return {name}
        class_name = next((each.name for each in self.classes.values() if function in each.body), "")
        if name == "__init__":
            return {class_name}
        return self._instances_of(class_name)

    def _instances_of(self, class_name: str) -> set[str]:
        """The variables and attributes that hold an object of a class, perhaps in a wrapper."""
        constructions = [
            each for each in self._callers.get(class_name, []) if isinstance(each.node, ast.Assign | ast.AnnAssign)
        ]
        targets = [target for each in constructions for target in _targets(each)]
        names = {name for target in targets for name in _base_names(target) - {"self"}}
        return names | {target.attr for target in targets if isinstance(target, ast.Attribute)}


def read_source(path: str) -> SourceFile | None:
    """Return the statements of a file; None if it cannot be read."""
    try:
        return _parsed(Path(path).read_bytes())
    except (OSError, ValueError):
        return None


@functools.lru_cache(64)
def _parsed(content: bytes) -> SourceFile | None:
    try:
        return SourceFile(ast.parse(content))
    except (SyntaxError, ValueError, RecursionError):
        return None


def _bodies(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        yield getattr(node, name, [])
    for handler in getattr(node, "handlers", []):
        yield handler.body
    for case in getattr(node, "cases", []):
        yield case.body


def _header_expressions(node: ast.stmt) -> list[ast.AST]:
    """The expressions of a statement, without the statements in its body."""
    if isinstance(node, _FUNCTIONS):
        return [node.args, *node.decorator_list]
    if isinstance(node, ast.ClassDef):
        return [*node.bases, *node.decorator_list]
    return [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt | ast.ExceptHandler)]


_GRADIENT = "(gradients)"  # stands for a variable that backward defines and optimizer.step uses


def _read_names(statement: Statement) -> set[str]:
    names = {node.id for node in statement.nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    if isinstance(statement.node, ast.AugAssign):
        names |= {node.id for node in ast.walk(statement.node.target) if isinstance(node, ast.Name)}
    if any(called_name(call).startswith(("step", "unscale_", "clip_grad")) for call in statement.calls):
        names.add(_GRADIENT)
    return names


def _read_attributes(statement: Statement) -> set[str]:
    """The attributes that a statement reads, and its string keys, which may be entries of a configuration."""
    attributes = {
        node.attr for node in statement.nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    keys = {
        node.slice.value
        for node in statement.nodes
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, str)
        and isinstance(node.ctx, ast.Load)
    }
    return attributes | keys


def _base_names(node: ast.AST) -> set[str]:
    """`p` of `p.grad[0]`."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
        node = node.value
    if isinstance(node, ast.Tuple | ast.List):
        return {name for each in node.elts for name in _base_names(each)}
    if isinstance(node, ast.Call):
        return {name for each in (*node.args, node.func) for name in _base_names(each)}
    return {node.id} if isinstance(node, ast.Name) else set()


def _targets(statement: Statement) -> list[ast.AST]:
    node = statement.node
    targets: list[ast.AST] = []
    if isinstance(node, ast.Assign):
        targets += node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.AsyncFor):
        targets.append(node.target)
    elif isinstance(node, ast.With | ast.AsyncWith):
        targets += [item.optional_vars for item in node.items if item.optional_vars is not None]
    targets += [each.target for each in statement.nodes if isinstance(each, ast.NamedExpr)]
    return targets


def _changed(statement: Statement) -> list[ast.AST]:
    """The expressions that a statement changes in place: the object of a method, and the arguments of a call."""
    changed: list[ast.AST] = []
    for call in statement.calls:
        name = called_name(call)
        is_in_place = name.endswith("_") and not name.endswith("__")
        if isinstance(call.func, ast.Attribute) and (is_in_place or name in ("append", "extend", "update", "copy_")):
            changed.append(call.func.value)
        if _communicates(call) or isinstance(statement.node, ast.Expr):
            changed += [*call.args, *(word.value for word in call.keywords)]
            if isinstance(call.func, ast.Attribute):
                changed.append(call.func.value)
    return changed


def _defined_names(statement: Statement) -> set[str]:
    node = statement.node
    names = {name for each in (*_targets(statement), *_changed(statement)) for name in _base_names(each)}
    if any(called_name(call) == "backward" for call in statement.calls) or any(
        isinstance(node, ast.Attribute) and node.attr == "grad"
        for each in (*_targets(statement), *_changed(statement))
        for node in ast.walk(each)
    ):
        names.add(_GRADIENT)
    if isinstance(node, ast.Import | ast.ImportFrom):
        return set()
    return names


def _defined_attributes(statement: Statement) -> set[str]:
    """The attributes that a statement sets, including command-line options and entries of a configuration."""
    node = statement.node
    attributes: set[str] = set()
    for each in (*_targets(statement), *_changed(statement)):
        attributes |= {inner.attr for inner in ast.walk(each) if isinstance(inner, ast.Attribute)}
        if isinstance(each, ast.Tuple | ast.List):
            attributes |= {inner.attr for inner in each.elts if isinstance(inner, ast.Attribute)}
    if statement.function is None and statement.class_name and isinstance(node, ast.Assign | ast.AnnAssign):
        attributes |= {name for each in _targets(statement) for name in _base_names(each)}
    for call in statement.calls:
        if called_name(call) == "add_argument":
            texts = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            attributes |= {text.lstrip("-").replace("-", "_") for text in texts}
        elif called_name(call) in ("register_buffer", "setdefault"):
            attributes |= {
                each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)
            }
    attributes |= {
        key.value
        for each in statement.nodes
        if isinstance(each, ast.Dict)
        for key in each.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }
    return attributes


def called_name(call: ast.Call) -> str:
    """`step` of `optimizer.step()`."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


_COLLECTIVES = {
    "all_reduce",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "gather",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "broadcast",
    "broadcast_object_list",
    "all_to_all",
    "all_to_all_single",
    "scatter",
    "allreduce",
    "allgather",
    "synchronize_between_processes",
}


def _communicates(call: ast.Call) -> bool:
    """Whether a call is a collective."""
    return called_name(call) in _COLLECTIVES


def _is_result(statement: Statement) -> bool:
    """Whether a statement of a function has an effect outside it: it returns, yields, or changes something in place."""
    return isinstance(statement.node, ast.Return | ast.Expr | ast.AugAssign) or any(
        isinstance(node, ast.Yield | ast.YieldFrom)
        or (isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store))
        for node in statement.nodes
    )


def _parameters(function: ast.AST) -> set[str]:
    if not isinstance(function, _FUNCTIONS):
        return set()
    args = function.args
    all_args = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    return {each.arg for each in all_args if each is not None and each.arg not in ("self", "cls")}
