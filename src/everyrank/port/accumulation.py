"""With gradient accumulation, the gradients are averaged over the ranks once for each update."""

from __future__ import annotations

import ast

from everyrank.port.plan import Plan
from everyrank.port.prepare import put_in_block

__all__ = ["edit_accumulation"]

_REASON = "gradients are averaged over the ranks once for each update"
_SLOWER = "gradients are averaged over the ranks at each backward: correct, but slower"


def edit_accumulation(plan: Plan) -> None:
    """If `if CONDITION: optimizer.step()` follows the backward in a loop, average under that condition only."""
    source = plan.source
    forwards = {source.at(fact.span) for fact in plan.training_forwards}
    for fact in plan.of("step"):
        step = source.at(fact.span)
        guard = source.around(step, ast.If)
        loop = source.parents.get(guard) if isinstance(guard, ast.If) else None
        if not isinstance(guard, ast.If) or not isinstance(loop, ast.For | ast.While) or guard not in loop.body:
            continue
        statements_before = loop.body[: loop.body.index(guard)]
        forwards_before = [
            (statement, node) for statement in statements_before for node in ast.walk(statement) if node in forwards
        ]
        if (
            len(forwards_before) != 1
            or not plan.once(guard, "accumulation")
            or not _is_fixed_before_forward(plan, guard, statements_before)
        ):
            continue
        if _has_other_step(plan, guard) or _uses_gradients(loop, guard):
            plan.note(guard.lineno, _SLOWER)
            continue
        statement, forward = forwards_before[0]
        assert isinstance(forward, ast.Call)
        if plan.idiom is not None:
            _in_block(plan, guard, statements_before[statements_before.index(statement) :], source.code(forward.func))
            continue
        source.insert_before(
            statement,
            f"{plan.wrapper_of(forward.func)}.require_backward_grad_sync = {source.code(guard.test)}",
            _REASON,
        )


def _in_block(plan: Plan, guard: ast.If, statements: list[ast.stmt], model: str) -> None:
    """Put a forward and its backward into a block in which the library averages only at the last micro-batch."""
    source, name = plan.source, plan.object_name
    backwards = {source.at(fact.span) for fact in plan.of("backward")}
    last_backward = max(
        (i for i, statement in enumerate(statements) if any(node in backwards for node in ast.walk(statement))),
        default=0,  # the backward is before the forward
    )
    test = source.code(guard.test)
    if plan.choice.target == "fabric":
        header = f"with {name}.no_backward_sync({model}, enabled=not ({test})):"
    else:
        header = f"with contextlib.nullcontext() if {test} else {name}.no_sync({model}):"
    if not put_in_block(plan, statements[: last_backward + 1], header, _REASON):
        plan.note(guard.lineno, _SLOWER)


def _has_other_step(plan: Plan, guard: ast.If) -> bool:
    """Whether the script also updates outside `guard`, for example after the loop with the last micro-batches.

    This update would use gradients that are not averaged. It is often not among the traced updates, so calls are also
    compared by their text.
    """
    inside = set(ast.walk(guard))
    steps = [(fact.details["id"], plan.source.at(fact.span) in inside) for fact in plan.of("step")]
    ids = {optimizer for optimizer, is_inside in steps if is_inside}
    if any(optimizer in ids and not is_inside for optimizer, is_inside in steps):
        return True
    stepped_objects = {name for node in inside for name in _objects_of_step(plan, node)}
    return any(
        not stepped_objects.isdisjoint(_objects_of_step(plan, node))
        for node in ast.walk(plan.source.tree)
        if node not in inside
    )


def _uses_gradients(loop: ast.For | ast.While, guard: ast.If) -> bool:
    """Whether the loop uses gradients outside `guard`, where they are not averaged yet. For example, it clips them."""
    names = {
        getattr(node, "attr", getattr(node, "id", ""))
        for statement in loop.body
        if statement is not guard
        for node in ast.walk(statement)
    }
    return any(name == "grad" or name.startswith("clip_grad") for name in names)


def _objects_of_step(plan: Plan, node: ast.AST) -> set[str]:
    """Return the object and the arguments of a call of `step`: {"scaler", "optimizer"} for `scaler.step(optimizer)`.

    Empty for other nodes.
    """
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "step":
        return set()
    return {plan.source.code(named) for named in (node.func.value, *node.args)}


def _is_fixed_before_forward(plan: Plan, guard: ast.If, statements_before: list[ast.stmt]) -> bool:
    """Whether a backward precedes `guard`, and its condition can be evaluated before the forward without a side effect.

    False for a condition on several lines, and for an `if` with an `else`.
    """
    source = plan.source
    nodes = list(ast.walk(guard.test))
    names = {source.code(node) for node in nodes if isinstance(node, ast.Name | ast.Attribute)}
    stored = {
        source.code(_without_index(node))
        for statement in statements_before
        for node in ast.walk(statement)
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store)
    }
    changed_names = stored | _changed_by_calls(plan, statements_before)
    has_assignment = any(isinstance(node, ast.NamedExpr) for node in nodes)
    only_lengths = all(source.code(node.func) == "len" for node in nodes if isinstance(node, ast.Call))
    has_backward = any(
        isinstance(node, ast.Call) and node in {source.at(fact.span) for fact in plan.of("backward")}
        for statement in statements_before
        for node in ast.walk(statement)
    )
    is_line = guard.test.lineno == guard.test.end_lineno
    is_constant = only_lengths and not has_assignment and not names & changed_names
    return has_backward and is_constant and is_line and not guard.orelse


def _changed_by_calls(plan: Plan, statements: list[ast.stmt]) -> set[str]:
    """Return the objects, attributes of `self` and global variables that calls in these statements may change.

    A method may change its object, for example `losses.append(...)`. If the script defines a method `f`, `self.f(...)`
    may change the attributes that any method but `__init__` sets. Otherwise `f` is an attribute, usually a module.
    """
    functions = [node for node in ast.walk(plan.source.tree) if isinstance(node, ast.FunctionDef)]
    names = {function.name for function in functions}
    attributes = {
        plan.source.code(node)
        for function in functions
        for node in (ast.walk(function) if function.name != "__init__" else ())
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    called, changed = set[str](), set[str]()
    for node in (node for statement in statements for node in ast.walk(statement)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called.add(node.func.attr)
            object_name = plan.source.code(node.func.value)
            if object_name != "self":
                changed.add(object_name)
            elif node.func.attr in names:
                changed |= attributes
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
    for function in functions:
        if function.name in called:
            declarations = (node for node in ast.walk(function) if isinstance(node, ast.Global | ast.Nonlocal))
            changed.update(name for node in declarations for name in node.names)
    return changed


def _without_index(node: ast.expr) -> ast.expr:
    """Return the expression without its subscripts, for example `a.b` for `a.b[0]["c"]`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node
