"""Edits of the loss, of backward and of clipping."""

from __future__ import annotations

import ast
import re

from everyrank.audit import Finding
from everyrank.port.source import end_of, start_of
from everyrank.repair.edited_script import CannotRepairError, EditedScript, line_of_finding

__all__ = [
    "clear_gradients",
    "clear_once_an_update",
    "clip_before_step",
    "divide_by_micro_batches",
    "divide_by_ranks",
    "do_not_divide_by_ranks",
    "do_not_divide_twice",
    "do_not_multiply_by_ranks",
    "multiply_by_ranks",
    "number_of_terms",
    "step_of_all_micro_batches",
    "unscale_before_clipping",
    "weigh_by_terms",
]


def _optimizer_of(script: EditedScript, step: ast.Call) -> str:
    """Return `optimizer` for `optimizer.step()` and `scaler.step(optimizer)`."""
    if step.args and isinstance(step.args[0], ast.Name | ast.Attribute):
        return script.source.code(step.args[0])
    assert isinstance(step.func, ast.Attribute)
    return script.source.code(step.func.value)


def clear_gradients(script: EditedScript, finding: Finding) -> None:
    """Insert optimizer.zero_grad() after optimizer.step()."""
    step = script.call_at(line_of_finding(finding), "step")
    script.source.insert_after(
        script.source.statement(step), f"{_optimizer_of(script, step)}.zero_grad()", "the next update starts from zero"
    )


def clear_once_an_update(script: EditedScript, finding: Finding) -> None:
    """Move zero_grad() from each micro-batch behind the step."""
    statement = script.statement_at(line_of_finding(finding))
    clear = script.call_at(line_of_finding(finding), "zero_grad")
    owner = script.source.code(clear.func).rpartition(".")[0]
    steps = [call for call in script.calls_of("step") if _optimizer_of(script, call) == owner]
    scope = script.source.scope(clear)
    steps = [call for call in steps if script.source.scope(call) is scope]
    if not steps:
        raise CannotRepairError(f"no {owner}.step() in the same function")
    parent = script.source.parents[statement]
    if isinstance(parent, ast.If) and parent.body == [statement] and not parent.orelse:
        statement = parent  # remove the condition, too
    script.remove_statement(statement, "this cleared the gradients of the other micro-batches")
    script.source.insert_after(
        script.source.statement(steps[-1]), f"{owner}.zero_grad()", "cleared once, after the update"
    )


def _backwards_for(script: EditedScript, finding: Finding) -> list[ast.Call]:
    """Return the calls of backward in the function of a finding; if it has none, in the whole script."""
    scope = script.source.scope(script.statement_at(line_of_finding(finding)))
    calls = [call for call in script.calls_of("backward") if isinstance(call.func, ast.Attribute)]
    calls_in_function = [call for call in calls if script.source.scope(call) is scope]
    if not (calls_in_function or calls):
        raise CannotRepairError("no loss.backward() in the script")
    return calls_in_function or calls


def _loss_of(call: ast.Call) -> ast.expr:
    """Return the expression whose backward is called, without the scale of a GradScaler."""
    assert isinstance(call.func, ast.Attribute)
    node = call.func.value
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        if node.func.attr != "scale":
            break
        node = node.args[0]
    return node


def _scale_loss(script: EditedScript, finding: Finding, factor: str, reason: str) -> None:
    """Multiply or divide the loss of each backward: `factor` is "* n" or "/ n"."""
    for call in _backwards_for(script, finding):
        loss = _loss_of(call)
        is_argument = loss is not call.func.value  # type: ignore[attr-defined]
        is_simple = isinstance(loss, ast.Name | ast.Attribute | ast.Call)
        in_brackets = script.source.is_in_brackets(loss)
        text = f" {factor}"
        is_product = isinstance(loss, ast.BinOp) and isinstance(loss.op, ast.Mult | ast.Div)
        if (is_argument and is_simple) or (is_product and (in_brackets or is_argument)):
            script.source.wrap(loss, "", text, reason)
        elif is_argument or in_brackets:
            script.source.wrap(loss, "(", f"){text}", reason)
        else:
            script.source.wrap(loss, "(", f"{text})", reason)


def _remove_factor(
    script: EditedScript, finding: Finding, operator: type[ast.operator], reason: str, names: str = ""
) -> None:
    """Remove a factor or divisor of the loss, from its backward or its assignment."""
    pattern = re.compile(names or ".")
    scope = script.source.scope(script.statement_at(line_of_finding(finding)))
    candidates: list[ast.BinOp] = []
    for call in _backwards_for(script, finding):
        loss = _loss_of(call)
        candidates += [node for node in ast.walk(loss) if isinstance(node, ast.BinOp)]
        name = script.source.code(loss)
        for store in script.source.stores(name, scope):
            statement = script.source.statement(store)
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.AugAssign) and isinstance(statement.op, operator):
                if pattern.search(script.source.code(statement.value)):
                    script.remove_statement(statement, reason)
                    return
            elif isinstance(value, ast.BinOp):
                candidates.append(value)
    for node in candidates:
        if isinstance(node.op, operator) and pattern.search(script.source.code(node.right)):
            left = script.source.code(node.left)
            is_simple = isinstance(node.left, ast.Name | ast.Attribute | ast.Call)
            if is_simple and script.source.is_in_brackets(node):
                start, end = start_of(node), end_of(node)
                script.source.edit((start[0], start[1] - 1), (end[0], end[1] + 1), left, reason)
            else:
                in_product = isinstance(node.left, ast.BinOp) and isinstance(script.source.parents[node], ast.BinOp)
                script.source.replace(node, f"({left})" if in_product else left, reason)
            return
    raise CannotRepairError("no such factor of the loss was found")


_RANKS = r"world|rank|replica|n_?gpu|num_?proc|get_world_size|\bsize\b"


def do_not_divide_by_ranks(script: EditedScript, finding: Finding) -> None:
    """(loss / world_size).backward() -> (loss).backward()."""
    _remove_factor(script, finding, ast.Div, "DistributedDataParallel averages already", _RANKS)


def do_not_multiply_by_ranks(script: EditedScript, finding: Finding) -> None:
    """(loss * world_size).backward() -> (loss).backward()."""
    _remove_factor(script, finding, ast.Mult, "the gradient is averaged over the ranks, not summed", _RANKS)


def multiply_by_ranks(script: EditedScript, finding: Finding) -> None:
    """(loss * dist.get_world_size()).backward()."""
    _scale_loss(
        script, finding, f"* {script.dist}.get_world_size()", "the gradient is averaged over the ranks, not summed"
    )


def divide_by_ranks(script: EditedScript, finding: Finding) -> None:
    """(loss / dist.get_world_size()).backward()."""
    _scale_loss(script, finding, f"/ {script.dist}.get_world_size()", "the gradient is summed over the ranks")


def divide_by_micro_batches(script: EditedScript, finding: Finding) -> None:
    """(loss / ACCUMULATE).backward(), with the script's name for the number of micro-batches, else the number."""
    match = re.search(r"divided by the (\d+) backwards", finding.text)
    number = match[1] if match else ""
    for step in script.calls_of("step"):
        if re.search(r"sched|(\b|_)lr", script.source.code(step.func)):
            continue
        condition = script.source.around(step, ast.If)
        for node in ast.walk(condition.test) if isinstance(condition, ast.If) else ():
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
                number = script.source.code(node.right)
    if not number:
        raise CannotRepairError("the number of micro-batches of an update was not found")
    _scale_loss(script, finding, f"/ {number}", "the mean over the micro-batches of an update")


def do_not_divide_twice(script: EditedScript, finding: Finding) -> None:
    """Remove a division by the number of micro-batches."""
    _remove_factor(script, finding, ast.Div, "the loss is divided by the number of micro-batches already")


def weigh_by_terms(script: EditedScript, finding: Finding) -> None:
    """Replace the loss by mean_over_ranks(loss, len(labels)), which weighs each rank by its number of terms."""
    terms = number_of_terms(script, finding)
    script.helpers.add("mean_over_ranks")
    reason = "the mean over the terms of all ranks"
    for backward in _backwards_for(script, finding):
        scope = script.source.scope(backward)
        names = {node.id for node in ast.walk(ast.parse(terms)) if isinstance(node, ast.Name)} - {"len"}
        if any(not _is_known(script, name, scope) for name in names):
            raise CannotRepairError(f"the number of terms ({terms}) cannot be read by the function that calls backward")
        script.source.wrap(_loss_of(backward), "mean_over_ranks(", f", {terms})", reason)


def _is_known(script: EditedScript, name: str, scope: ast.AST) -> bool:
    """Whether a function can read a name: its own variable, one of the module, or an import."""
    owners = {script.source.scope(store) for store in script.source.stores(name, script.source.tree)}
    for node in ast.walk(script.source.tree):
        if isinstance(node, ast.FunctionDef) and name in [each.arg for each in node.args.args]:
            owners.add(node)
    return not owners or bool(owners & {scope, script.source.tree})


def number_of_terms(script: EditedScript, finding: Finding) -> str:
    """Return an expression for the number of terms that the loss of a line averages."""
    value = getattr(script.statement_at(line_of_finding(finding)), "value", None)
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div):  # losses.sum() / mask.sum()
        return script.source.code(value.right)
    call = next(
        (candidate for candidate in script.calls_at(line_of_finding(finding)) if len(candidate.args) >= 2), None
    )
    if call is None or not isinstance(call.args[1], ast.Name | ast.Attribute | ast.Call | ast.Subscript):
        raise CannotRepairError("the number of terms of the loss was not found")
    target, ignored = script.source.code(call.args[1]), script.keyword(call, "ignore_index")
    return f"({target} != {script.source.code(ignored.value)}).sum()" if ignored else f"len({target})"


def step_of_all_micro_batches(script: EditedScript, _: Finding) -> None:
    """Remove no_sync(): each backward averages the gradients."""
    for node in ast.walk(script.source.tree):
        if isinstance(node, ast.IfExp) and "no_sync" in script.source.code(node):
            context = node.body if "no_sync" not in script.source.code(node.body) else node.orelse
            script.source.replace(node, script.source.code(context), "each backward averages the gradients")
            return
    for call in script.calls_of("no_sync"):
        script.source.replace(
            call, f"{script.imported('contextlib', 'nullcontext')}()", "each backward averages the gradients"
        )
        return
    raise CannotRepairError("the script does not call no_sync()")


def unscale_before_clipping(script: EditedScript, finding: Finding) -> None:
    """Insert scaler.unscale_(optimizer) before clip_grad_norm_."""
    statement = script.statement_at(line_of_finding(finding))
    scope = script.source.scope(statement)
    for step in script.calls_of("step", within=scope):
        if step.args and isinstance(step.func, ast.Attribute) and isinstance(step.args[0], ast.Name | ast.Attribute):
            scaler, optimizer = script.source.code(step.func.value), script.source.code(step.args[0])
            script.source.insert_before(
                statement,
                f"{scaler}.unscale_({optimizer})",
                "the norm is that of the unscaled gradients",
            )
            return
    raise CannotRepairError("no scaler.step(optimizer) in the same function")


def clip_before_step(script: EditedScript, finding: Finding) -> None:
    """Move clip_grad_norm_ to the line before the step."""
    statement = script.statement_at(line_of_finding(finding))
    scope = script.source.scope(statement)
    steps = [call for call in script.calls_of("step", within=scope) if call.lineno > statement.lineno]
    if not steps:
        raise CannotRepairError("no optimizer.step() after this line in the same function")
    text = script.source.code(statement)
    if "\n" in text:
        raise CannotRepairError("the statement has several lines")
    script.remove_statement(statement, "moved to after the last backward, which averages the gradients")
    next_step = min(steps, key=lambda call: call.lineno)
    script.source.insert_before(script.source.statement(next_step), text, "the ranks clip by the same norm")
