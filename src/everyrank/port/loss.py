"""Makes the loss of each backward the loss of the whole batch, so that averaged gradients equal one process's."""

from __future__ import annotations

import ast

from everyrank.port.facts import Fact
from everyrank.port.plan import Plan
from everyrank.port.source import NotPortedError, parameter_names

__all__ = ["edit_losses"]

_REASON = "the value is that of the whole batch, and so is the gradient once it is averaged"


def edit_losses(plan: Plan) -> None:
    """Put the loss of each backward through mean_over_ranks or sum_over_ranks."""
    source = plan.source
    for backward in plan.of("backward"):
        call = source.at(backward.span)
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            raise NotPortedError(backward.line, "this backward is not called on a loss: write loss.backward()")
        if not plan.once(call):
            continue
        if not backward.details["is_scalar"]:
            raise NotPortedError(
                backward.line, "this backward is given a gradient: only a loss of one number is ported"
            )
        root = _unscaled(call.func.value)
        statement, text = source.statement(call), source.code(root)
        function, count = f"{plan.choice.loss}_over_ranks", ""
        plan.helpers.add(function)
        if plan.choice.loss == "mean":
            count = f", {count_of_terms(plan, statement)}"
        if not isinstance(root, ast.Name | ast.Attribute):
            source.wrap(root, f"{function}(", f"{count})", _REASON)
            continue
        new_value = f"{function}({text}{count})"
        block = source.block(statement)
        assigned = [each for each in block[: block.index(statement)] if source.stores(text, each)]
        if assigned:
            source.insert_after(assigned[-1], f"{text} = {new_value}", _REASON)
        else:
            source.insert_before(statement, f"{text} = {new_value}", _REASON)


def _unscaled(node: ast.expr) -> ast.expr:
    """Return the loss without a division by a number of micro-batches, a factor or the scale of a GradScaler."""
    while True:
        match node:
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                factors = [factor for factor in (left, right) if not _is_number(factor)]
                losses = [factor for factor in factors if "loss" in ast.unparse(factor).lower()]
                if len(losses or factors) != 1:
                    return node  # which of them is the loss is unclear: the product is a mean, too
                node = (losses or factors)[0]
            case ast.BinOp(left=left, op=ast.Div()) if not _is_number(left):
                node = left
            case ast.Call(func=ast.Attribute(attr="scale"), args=[scaled, *_]):
                node = scaled
            case _:
                return node


def _is_number(node: ast.expr) -> bool:
    """Whether an expression has no names: 0.5, -1, 1 / 4."""
    return not any(isinstance(each, ast.Name) for each in ast.walk(node))


def count_of_terms(plan: Plan, statement: ast.stmt) -> str:
    """Return an expression for the number of terms that the loss of a backward averages on this rank."""
    source, scope = plan.source, plan.source.scope(statement)

    def calls(facts: list[Fact]) -> list[tuple[Fact, ast.Call]]:
        pairs = [(fact, source.at(fact.span)) for fact in facts if fact.is_inner and fact.line <= statement.lineno]
        return [(fact, call) for fact, call in pairs if isinstance(call, ast.Call) and source.scope(call) is scope]

    losses = sorted(calls(plan.of("loss")), key=lambda pair: -pair[0].line)
    names: list[str] = []
    if losses:
        fact, call = losses[0]
        if terms := _terms_with_weight(plan, fact, call):
            return terms
        names = [source.code(argument) for argument in reversed(call.args) if isinstance(argument, ast.Name)]
    forwards = calls(plan.training_forwards)
    masked = _masked_in_forward(plan, [call for _, call in forwards])
    if not losses and masked:
        return masked
    model_arguments = [
        source.code(argument) for _, call in forwards for argument in call.args if isinstance(argument, ast.Name)
    ]
    loops = [loop for loop in source.loops(statement) if isinstance(loop, ast.For)]
    batch_names = [name for loop in loops for name in plan.batch_names(loop)]
    names = (
        [name for name in names if name in model_arguments or name in batch_names]
        + [n for n in names if n not in model_arguments]
        + model_arguments
    )
    if names:
        is_mapping = any(names[0] in _mappings(fact, call) for fact, call in forwards)
        return f"len(next(iter({names[0]}.values())))" if is_mapping else f"len({names[0]})"
    for _, call in forwards:
        for keyword in call.keywords:
            if isinstance(keyword.value, ast.Name):
                return f"len({keyword.value.id})" if keyword.arg else f"len(next(iter({keyword.value.id}.values())))"
    for _, call in [*losses, *forwards]:  # a part of the batch: batch[:, 1:]
        for node in ast.walk(call):
            if isinstance(node, ast.Name) and node.id in batch_names:
                return f"len({node.id})"
    raise NotPortedError(
        statement.lineno,
        "the number of samples that this loss averages was not found. Call the model with a batch in this "
        "function; an episode of one environment has no samples to split: average the gradients of several by hand",
    )


def _terms_with_weight(plan: Plan, fact: Fact, call: ast.Call) -> str:
    """Return an expression for the divisor of a loss that ignores targets or weights classes; "" for other losses."""
    if len(call.args) < 2:
        return ""
    target, ignored = plan.code_of_part(call.args[1]), fact.details["ignored"]
    is_counted = f"{target} != {ignored}"
    if not fact.details.get("is_weighted"):
        return "" if ignored is None else f"({is_counted}).sum()"
    given = next((keyword.value for keyword in call.keywords if keyword.arg == "weight"), None)
    given = call.args[2] if len(call.args) > 2 else given
    weight = plan.source.code(given) if given is not None else f"{plan.source.code(call.func)}.weight"
    return f"{weight}[{target}].sum()" if ignored is None else f"{weight}[{target}[{is_counted}]].sum()"


def _mappings(fact: Fact, call: ast.Call) -> list[str]:
    """Return the names of the arguments of a forward that are mappings, such as a batch {"input": x, "label": y}."""
    arguments = zip(call.args, fact.details.get("are_mappings", []), strict=False)
    return [argument.id for argument, is_mapping in arguments if is_mapping and isinstance(argument, ast.Name)]


def _masked_in_forward(plan: Plan, forwards: list[ast.Call]) -> str:
    """Return an expression for the number of terms that a loss in the model's forward does not ignore.

    Returns "" if there is no such loss.
    """
    source = plan.source
    for fact in plan.of("loss"):
        call = source.at(fact.span)
        if not fact.is_inner or fact.details["ignored"] is None or not isinstance(call, ast.Call) or len(call.args) < 2:
            continue
        function = source.scope(call)
        parameters = parameter_names(function)
        names = [node.id for node in ast.walk(call.args[1]) if isinstance(node, ast.Name) and node.id in parameters]
        if parameters[:1] != ["self"] or len(names) != 1:
            continue
        index = parameters.index(names[0]) - 1
        for forward in forwards:
            argument = next((keyword.value for keyword in forward.keywords if keyword.arg == names[0]), None)
            argument = argument or (forward.args[index] if index < len(forward.args) else None)
            if argument is not None:
                return f"({plan.code_of_part(argument)} != {fact.details['ignored']}).sum()"
    return ""
