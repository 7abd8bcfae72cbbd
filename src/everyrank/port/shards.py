"""Shards the model with FSDP, block by block, before its optimizer is created."""

from __future__ import annotations

import ast

from everyrank.port.facts import Fact
from everyrank.port.plan import Plan
from everyrank.port.source import NotPortedError

__all__ = ["shard_model", "whole_states"]

_PREPARING = {"to", "cuda", "apply", "load_state_dict", "half", "float", "double"}
_READS_PARAMETERS = {"parameters", "named_parameters"}


def shard_model(plan: Plan, name: str, store: ast.stmt, last: ast.stmt, forward: Fact) -> None:
    """Insert the call that shards a model, after it is moved and loaded and before its parameters are read.

    store  the statement that assigns the model
    last   the last statement that prepares the model, perhaps that of its optimizer
    """
    source, statement = plan.source, store
    block = source.block(last)
    while statement not in block:
        outer = source.outer_statement(statement)
        if outer is None:
            raise NotPortedError(
                store.lineno,
                f"no statement was found after which {name} can be sharded: assign it in the block that prepares it",
            )
        statement = outer
    optimizers = {fact.span[:2] for fact in plan.of("optimizer")}
    for following in block[block.index(statement) + 1 : block.index(last) + 1]:
        nodes = list(ast.walk(following))
        called = {node.attr for node in nodes if isinstance(node, ast.Attribute) and source.code(node.value) == name}
        is_optimizer = any(
            isinstance(node, ast.Call) and (node.lineno, node.col_offset) in optimizers for node in nodes
        )
        if is_optimizer or called & _READS_PARAMETERS:
            break
        if called & _PREPARING:
            statement = following
    blocks = "".join(f", *{name}.{path}" for path in forward.details["blocks"])
    source.insert_after(statement, f"shard({name}{blocks})", "parameters and optimizer states are split over the ranks")
    plan.helpers.add("shard")


def whole_states(plan: Plan) -> None:
    """Save whole tensors: all ranks collect them, and rank 0 writes."""
    source = plan.source
    sharded = {source.code(node_of_model) for node_of_model in plan.sharded}
    for node in ast.walk(source.tree):
        if not (isinstance(node, ast.Call) and source.code(node.func) == "torch.save" and node.args):
            continue
        if source.code(node.args[0]) in sharded:
            raise NotPortedError(node.lineno, "a sharded model is saved whole: save its state_dict() instead")
        plan.helpers |= {"save_whole"}
        source.replace(node.func, "save_whole", "rank 0 writes what all ranks have collected")
