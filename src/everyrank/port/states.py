"""Splits hidden states that a training loop passes from batch to batch: each rank keeps those of its sequences."""

from __future__ import annotations

import ast

from everyrank.port.facts import Fact
from everyrank.port.plan import Plan
from everyrank.port.source import NotPortedError

__all__ = ["edit_states"]


def edit_states(plan: Plan) -> bool:
    """Split the first states over the ranks; without a loader, also the tensor whose slices are the batches.

    A sequence must stay on the rank that has its state. Returns whether the batches are split here.
    """
    source, is_split = plan.source, False
    for forward in plan.training_forwards:
        call = source.at(forward.span)
        carried = _carried(plan, call) if isinstance(call, ast.Call) else {}
        for name, index in carried.items():
            assert isinstance(call, ast.Call)
            shape = (forward.details["shapes"] + [[]] * (index + 1))[index]
            if not shape:
                continue
            dim = 1 if len(shape) == 3 else 0  # (layers, batch, features)
            first_stores = _stores_before(plan, name, call)
            if not first_stores:
                raise NotPortedError(
                    call.lineno,
                    f"the first assignment of {name} was not found: split its sequences by hand",
                )
            for statement in first_stores:
                if plan.once(statement, "state"):
                    source.insert_after(
                        statement, f"{name} = own_sequences({name}, {dim})", "each rank has the states of its sequences"
                    )
            plan.helpers.add("own_sequences")
            if not plan.training_loaders:
                is_split |= _split_source(plan, forward, call, shape[dim])
    return is_split


def _carried(plan: Plan, call: ast.Call) -> dict[str, int]:
    """Return the arguments of a forward that its statement also assigns: name -> index of the argument."""
    source = plan.source
    statement = source.statement(call)
    if not source.loops(call):
        return {}
    names = [node.id if isinstance(node, ast.Name) else "" for node in call.args]
    return {name: index for index, name in enumerate(names) if index and name and source.stores(name, statement)}


def _stores_before(plan: Plan, name: str, call: ast.Call) -> list[ast.stmt]:
    """Return the statements that assign a name before the innermost loop around a call."""
    source, scope, loop = plan.source, plan.source.scope(call), plan.source.loops(call)[0]
    inside = set(ast.walk(loop))
    stores = [node for node in source.stores(name, scope) if source.scope(node) is scope and node not in inside]
    return [source.statement(node) for node in stores if node.lineno < loop.lineno]  # type: ignore[attr-defined]


def _split_source(plan: Plan, forward: Fact, call: ast.Call, num_sequences: int) -> bool:
    """Split the tensor whose slices are the batches, after its assignment."""
    source, scope = plan.source, plan.source.scope(call)
    inside = set(ast.walk(source.loops(call)[0]))
    for name, shape in forward.details["sources"]:
        stores = [node for node in source.stores(name, scope) if source.scope(node) is scope]
        stores = stores or [node for node in source.stores(name, source.tree) if source.scope(node) is source.tree]
        dims = [dim for dim in (forward.details["batch_dim"], 0, 1) if shape[dim : dim + 1] == [num_sequences]]
        if not stores or not dims or any(node in inside for node in stores):
            continue
        statement = source.statement(stores[-1])
        if plan.once(statement, "sequences"):
            source.insert_after(
                statement,
                f"{name} = own_sequences({name}, {dims[0]})",
                "each rank has the same sequences in all batches",
            )
        return True
    raise NotPortedError(
        call.lineno,
        "a state is passed from batch to batch, and the tensor whose slices are the batches was not found: "
        "let each rank read its own sequences of it",
    )
