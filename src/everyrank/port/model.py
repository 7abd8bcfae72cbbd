"""Wraps the models that train in DistributedDataParallel. Only training forwards call the wrapper.

Evaluation, saving and other methods use the model itself: no `.module`, no "module." in a checkpoint, and no
communication where ranks evaluate different numbers of batches.
"""

from __future__ import annotations

import ast
import itertools

from everyrank.port.facts import Fact
from everyrank.port.plan import Plan
from everyrank.port.prepare import PREPARES, keeps_wrapper
from everyrank.port.shards import shard_model
from everyrank.port.source import NotPortedError, holds_line, parameter_names

__all__ = ["edit_models"]

# methods of the model: the wrapper is made after their last call before the training
_PREPARING = {
    "to",
    "cuda",
    "apply",
    "load_state_dict",
    "requires_grad_",
    "half",
    "float",
    "double",
    "parameters",
    "compile",
}


def edit_models(plan: Plan) -> None:
    """Call a wrapper in each training forward, and create the wrapper after the model is ready."""
    source = plan.source
    for forward in plan.training_forwards:
        call = source.at(forward.span)
        if not forward.is_inner or not isinstance(call, ast.Call):
            raise NotPortedError(
                forward.line, f"{forward.details['module']} is called in another file: move the call into this script"
            )
        if not isinstance(call.func, ast.Name | ast.Attribute):
            raise NotPortedError(
                call.lineno, f"{source.code(call.func)} is called without a name: assign the model to a variable"
            )
        plan.has_batch_norm |= forward.details["has_batch_norm"]
        if forward.details["has_batch_norm"] and plan.idiom is not None:
            plan.helpers.add("sync_batch_norms")
        if forward.details["has_batch_norm"]:
            plan.note(
                call.lineno,
                "batch norm takes the samples of all ranks on CUDA, as checked; on the CPU torch cannot do that, "
                "and each rank normalizes its own samples",
            )
        _follow(plan, call.func, 0, forward)
    callers = {span for _, _, span in plan.passed_models}
    for scope, name in dict.fromkeys((scope, name) for scope, name, _ in plan.passed_models):
        if not _is_called_otherwise(plan, scope, callers):
            _use_module(plan, scope, name)
    if plan.choice.target != "fsdp":
        _note_unfrozen(plan)


def _note_unfrozen(plan: Plan) -> None:
    """Leave a note where the training unfreezes parameters: the wrapper has no hooks for those frozen before it."""
    source = plan.source
    statements = [source.at(call.span, ast.stmt) for fact in plan.of("backward") for call in fact.chain]
    loops = {loop for statement in set(statements) if statement is not None for loop in source.loops(statement)}
    training_nodes = {node for loop in loops for node in ast.walk(loop)}
    frozen, unfrozen = (_settings_of_requires_grad(plan, training_nodes, value=value) for value in (False, True))
    if not frozen - training_nodes:
        return  # a GAN, which freezes and unfreezes in each update
    for node in unfrozen & training_nodes:
        rewrap = "parallel(model)" if plan.idiom is None else "a call like the one that wraps it first"
        plan.note(
            source.statement(node).lineno,
            f"the gradients of parameters that are unfrozen here are not averaged: wrap the model again, by {rewrap}",
        )


def _settings_of_requires_grad(plan: Plan, training_nodes: set[ast.AST], *, value: bool) -> set[ast.AST]:
    """Return the nodes that set `requires_grad` to a value, or the calls of the function that does, as in freeze()."""
    nodes: set[ast.AST] = set()
    for node in ast.walk(plan.source.tree):
        match node:
            case ast.Assign(targets=[ast.Attribute(attr="requires_grad")], value=ast.Constant(value=bool(given))):
                pass
            case ast.Call(func=ast.Attribute(attr="requires_grad_"), args=[ast.Constant(value=bool(given))]):
                pass
            case ast.Call(func=ast.Attribute(attr="requires_grad_"), args=[], keywords=[]):
                given = True
            case _:
                continue
        if given is value:
            calls = [] if node in training_nodes else _calls_of(plan, plan.source.scope(node))
            nodes |= set(calls) or {node}
    return nodes


def _calls_of(plan: Plan, scope: ast.AST) -> list[ast.Call]:
    """Return the calls of a function in the script, by its name."""
    name = getattr(scope, "name", "")
    calls = [node for node in ast.walk(plan.source.tree) if isinstance(node, ast.Call)]
    return [call for call in calls if name and plan.source.code(call.func).rpartition(".")[2] == name]


def _is_called_otherwise(plan: Plan, scope: ast.FunctionDef, callers: set[tuple[int, int, int, int]]) -> bool:
    """Whether another call passes the model itself to a function, as an evaluation does."""
    return any(
        outer.span not in callers
        for fact in plan.of("forward")
        for inner, outer in itertools.pairwise(fact.chain)
        if inner.function == scope.name and scope.lineno <= inner.span[0] <= (scope.end_lineno or 0)
    )


def _use_module(plan: Plan, scope: ast.FunctionDef, name: str) -> None:
    """In a function whose parameter is the wrapper, let all code except training forwards use the model in it."""
    source = plan.source
    for node in ast.walk(scope):
        if not (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)):
            continue
        if node not in plan.training_uses and not keeps_wrapper(plan, node) and plan.once(node, "module"):
            source.replace(node, plan.unwrapped(name), "the model in the wrapper")


def _follow(plan: Plan, name_node: ast.expr, depth: int, forward: Fact) -> None:
    """Replace a name of the model by the name of its wrapper, here or in the call that passes it to this function."""
    source, name = plan.source, plan.source.code(name_node)
    scope = source.scope(name_node)
    if isinstance(scope, ast.FunctionDef) and name in parameter_names(scope):
        if source.stores(name, scope):
            raise NotPortedError(scope.lineno, f"{scope.name} reassigns {name}: use another name")
        if depth + 1 >= len(forward.chain):
            raise NotPortedError(scope.lineno, f"the call that passes {name} to {scope.name} was not recorded")
        _follow(plan, _argument(plan, scope, name, forward.chain[depth + 1].span), depth + 1, forward)
        if plan.choice.target == "fsdp":
            return  # fully_shard changes the model in place
        plan.training_uses.append(name_node)
        plan.passed_models.append((scope, name, forward.chain[depth + 1].span))
        return
    if not isinstance(name_node, ast.Name | ast.Attribute):
        raise NotPortedError(name_node.lineno, f"{name} is passed without a name: assign the model to a variable")
    if plan.choice.target == "fsdp":
        owner, store = _store(plan, name, name_node, forward)
        plan.sharded.append(name_node)
        if plan.once(owner, f"shard {name}"):
            shard_model(plan, name, store, _last_preparation(plan, name, store, forward), forward)
        return
    if plan.idiom is not None:
        owner, store = _store(plan, name, name_node, forward)
        plan.training_uses.append(name_node)
        if plan.once(owner, f"prepare {name}"):
            plan.prepared.append((owner, name, _last_preparation(plan, name, store, forward)))
        return
    wrapper = plan.wrapper_of(name_node)
    owner, store = _store(plan, name, name_node, forward)
    if plan.once(name_node, "wrapper"):
        source.replace(name_node, wrapper, "the training forward goes through the wrapper")
    if plan.once(owner, wrapper):
        plan.helpers.add("parallel")
        statement = _last_preparation(plan, name, store, forward)
        source.insert_after(statement, f"{wrapper} = parallel({name})", PREPARES)


def _argument(plan: Plan, function: ast.FunctionDef, name: str, span: tuple[int, int, int, int]) -> ast.expr:
    """Return the expression that a call passes for a parameter of a function."""
    call = plan.source.at(span)
    parameters = parameter_names(function)
    if isinstance(call, ast.Call):
        passed = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
        index = parameters.index(name) - (1 if parameters[:1] == ["self"] else 0)
        has_stars = any(isinstance(argument, ast.Starred) for argument in call.args[: index + 1])
        if passed is None and index < len(call.args) and not has_stars:
            passed = call.args[index]
        if passed is not None:
            return passed
    raise NotPortedError(span[0], f"this call passes {name} to {function.name} in a way that cannot be followed")


def _store(plan: Plan, name: str, node: ast.expr, forward: Fact) -> tuple[ast.AST, ast.stmt]:
    """Return the scope that the model belongs to, and the last statement that assigns it."""
    source, scope = plan.source, plan.source.scope(node)
    for owner in dict.fromkeys([scope, source.tree]):
        stores = [store for store in source.stores(name, owner) if source.scope(store) is owner]
        statements = [source.at(call.span, ast.stmt) for call in forward.chain]
        lines = [store.lineno for store in statements if isinstance(store, ast.stmt) and source.scope(store) is owner]
        # ignore a model that is loaded again after the training
        stores = [store for store in stores if not lines or source.statement(store).lineno < lines[0]] or stores
        if stores:
            return owner, source.statement(stores[-1])
    if "." in name:  # self.model, which another method assigns
        definition = source.around(scope, ast.ClassDef)
        stores = source.stores(name, definition) if definition else []
        is_module = isinstance(definition, ast.ClassDef) and any("Module" in source.code(b) for b in definition.bases)
        if is_module:
            raise NotPortedError(
                forward.line,
                f"a method other than forward of {definition.name} is called in training: call the model itself, "  # type: ignore[union-attr]
                "and let forward choose",
            )
        if stores:
            return source.scope(stores[-1]), source.statement(stores[-1])
    raise NotPortedError(forward.line, f"the assignment of {name} was not found")


def _last_preparation(plan: Plan, name: str, store: ast.stmt, forward: Fact) -> ast.stmt:
    """Return the last statement before the training that moves or loads the model, or creates its optimizer."""
    source, scope = plan.source, plan.source.scope(store)
    statements = [source.at(call.span, ast.stmt) for call in forward.chain]
    training_statements = [each for each in statements if isinstance(each, ast.stmt) and source.scope(each) is scope]
    statement: ast.stmt = store
    if training_statements:
        line = training_statements[0].lineno
        while not any(holds_line(each, line) for each in source.block(statement)):
            outer = source.outer_statement(statement)
            if outer is None:
                break
            statement = outer
    block = source.block(statement)
    end_index = len(block)
    if training_statements:
        end_index = next(
            (i for i, each in enumerate(block) if holds_line(each, training_statements[0].lineno)), end_index
        )
    optimizers = {fact.span[:2] for fact in plan.of("optimizer")}
    last_preparation = statement
    for each in block[block.index(statement) + 1 : end_index]:
        for node in ast.walk(each):
            is_optimizer = isinstance(node, ast.Call) and (node.lineno, node.col_offset) in optimizers
            is_prepared = (
                isinstance(node, ast.Attribute) and node.attr in _PREPARING and source.code(node.value) == name
            )
            if is_optimizer or is_prepared:
                last_preparation = each
    return last_preparation
