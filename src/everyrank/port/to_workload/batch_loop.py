"""Finds the statements from a batch to the loss in the training loop, and the sums of the evaluation loop."""

from __future__ import annotations

import ast
import dataclasses
import re
from typing import Any

from everyrank.port.facts import Fact
from everyrank.port.source import NotPortedError, ScriptSource, end_of, start_of
from everyrank.port.to_workload.changing_names import changed_objects, loops_around
from everyrank.port.to_workload.observed_run import ObservedRun
from everyrank.port.to_workload.slices import (
    Frames,
    Script,
    ScriptSlice,
    ScriptStatement,
    bound_names,
    loaded_names,
    mutated_names,
    read_names,
    taken_statements,
)

__all__ = ["Loss", "Metric", "find_loss", "find_metrics"]

_COUNTS = {"correct": "accuracy", "n_correct": "accuracy", "num_correct": "accuracy", "right": "accuracy"}


@dataclasses.dataclass(frozen=True)
class Loss:
    """The code of the loop over the batches, from the batch to the loss.

    target       the loop variables: "data, target"
    before       statements from the batch to the model's arguments
    inputs       texts of the model's arguments; "**batch" passes all of a dict
    keywords     names of the keyword arguments
    output       the name of the model's output
    after        statements from the output to the loss
    value        the loss, an expression
    targets      names of the batch that the loss needs
    rows         the name of a tensor with one row per sample
    setup        statements before the loop that the loss needs
    """

    target: str
    before: list[str]
    inputs: list[str]
    keywords: list[str]
    output: str
    after: list[str]
    value: str
    targets: list[str]
    rows: str
    setup: list[ScriptStatement]


@dataclasses.dataclass(frozen=True)
class Metric:
    """A sum of the evaluation, `correct += ...`, as a function of output and target."""

    name: str
    output: str
    after: list[str]
    value: str
    targets: list[str]
    setup: list[ScriptStatement]


def find_loss(
    observed: ObservedRun, script: Script, backward: Fact, forward: Fact, changing: dict[str, int]
) -> tuple[Loss, ast.Call]:
    """Return the code from a batch to the loss, and the call of the model.

    changing  name -> line for the variables that the training changes

    Raises `NotPortedError` for code that reads one of them, or an object that the training changes.
    """
    source = observed.source
    node = source.at(backward.span, ast.Call)
    call = source.at(forward.span, ast.Call)
    assert isinstance(node, ast.Call)
    assert isinstance(call, ast.Call)
    scope = source.scope(node)
    if isinstance(scope, ast.FunctionDef) and scope.args.args[:1] and scope.args.args[0].arg == "self":
        raise NotPortedError(
            node.lineno,
            "the training loop is a method, and attributes of a class are not followed: move it into a function of "
            "model, loader and optimizer",
        )
    loop = _batch_loop(source, node)
    if source.scope(call) is not source.scope(node) or not (start_of(loop) < start_of(call) < end_of(loop)):
        raise NotPortedError(
            call.lineno,
            f"the model is called outside of the loop with the backward of line {node.lineno}: call it there",
        )
    values = {**script.module_values, **backward.chain[0].values}
    # a branch that depends on the epoch stays a branch
    values = {name: value for name, value in values.items() if name not in changing}
    statement = source.statement(node)
    body = _body(loop, values, start_of(statement))
    value = _loss_expression(node)
    output, after, needed, call_index = _after(script, body, value, call)
    available = set(_target_names(source, loop)) | {name for code in body[:call_index] for name in bound_names(code)}
    targets = sorted(name for name in needed if name in available and name != output)
    _refuse_carried(script, loop, backward, needed - available - {output}, changing, call)
    model = source.code(call.func)
    if model in needed:
        raise NotPortedError(
            node.lineno,
            f"the loss reads the model itself, `{model}`; the loss of a workload only gets output and target",
        )
    inputs, keyword_names = _arguments(script, call)
    input_names = {name for text in inputs for name in loaded_names(ast.parse(text.lstrip("*"), mode="eval"))}
    before, first_names = _before(script, body[:call_index], {*targets, *input_names})
    target = set(_target_names(source, loop))
    _refuse_carried(script, loop, backward, first_names - target, changing, call)
    slice_of_setup = ScriptSlice(script)
    text = script.rendered(value, {call: output})
    texts = [*after, *before, *inputs, text]
    in_loop = available | {output} | {name for each in loop.body for name in bound_names(each)}
    _refuse_changed_objects(script, backward, texts, in_loop, changing, call)
    for code in [*after, *before, *inputs, text]:
        slice_of_setup.given |= available | {output} | {name for text in after for name in bound_names_of(text)}
        slice_of_setup.needs(ast.parse(code.lstrip("*")), backward)
    # the names of the batch that the model's arguments and the loss need
    rows = next((name for name in targets if _has_rows(backward, name)), "")
    if not rows:
        rows = next(
            (name for name in sorted(input_names | set(_target_names(source, loop))) if _has_rows(backward, name)), ""
        )
    output_value = backward.chain[0].values.get(output, ["", ""])
    if output_value[0] == "object" and output_value[1].startswith("transformers."):
        # layouts that gather outputs return them as a dict
        after = [re.sub(rf"\b{output}\.(\w+)", rf'{output}["\1"]', code) for code in after]
    if "Tensor" in output_value[1]:  # verify computes in float64, so the target needs the dtype of the output
        after = [code.replace(".float()", f".to({output}.dtype)") for code in after]
        text = text.replace(".float()", f".to({output}.dtype)")
    return (
        Loss(
            _target_text(source, loop),
            before,
            inputs,
            keyword_names,
            output,
            after,
            text,
            targets,
            rows,
            slice_of_setup.ordered,
        ),
        call,
    )


def bound_names_of(text: str) -> set[str]:
    """Return the names that the statements of a text bind."""
    return {name for each in ast.parse(text).body for name in bound_names(each)}


def _has_rows(backward: Fact, name: str) -> bool:
    value = backward.chain[0].values.get(name)
    return value is not None and value[0] == "object" and "Tensor" in value[1]


def _batch_loop(source: ScriptSource, node: ast.Call) -> ast.For:
    loops = source.loops(node)
    if not loops or not isinstance(loops[0], ast.For):
        raise NotPortedError(
            node.lineno, "the backward is not in a loop over a DataLoader: write `for batch in loader:` around it"
        )
    return loops[0]


def _target(source: ScriptSource, loop: ast.For) -> ast.expr:
    """Return the loop variables of a batch, without a counter."""
    is_counted = any(
        isinstance(each, ast.Call) and source.code(each.func) == "enumerate" for each in ast.walk(loop.iter)
    )
    target = loop.target
    return target.elts[1] if is_counted and isinstance(target, ast.Tuple) and len(target.elts) == 2 else target


def _target_names(source: ScriptSource, loop: ast.For) -> list[str]:
    return [node.id for node in ast.walk(_target(source, loop)) if isinstance(node, ast.Name)]


def _target_text(source: ScriptSource, loop: ast.For) -> str:
    """Return the text of the loop variables, without outer brackets."""
    text = source.code(_target(source, loop))
    return text[1:-1].strip() if text.startswith("(") and text.endswith(")") else text


def _body(loop: ast.For, values: dict[str, list[Any]], end: tuple[int, int]) -> list[ast.stmt]:
    """Return the statements of the loop before the backward, also those in `with` and in taken branches."""
    statements = list[ast.stmt]()
    for each in taken_statements(loop.body, values):
        if start_of(each) >= end:
            break
        if isinstance(each, ast.With) and end_of(each) > end:
            statements += [inner for inner in taken_statements(each.body, values) if start_of(inner) < end]
            continue
        statements.append(each)
    return statements


def _loss_expression(node: ast.Call) -> ast.expr:
    """Return the loss in `loss.backward()`, `scaler.scale(loss).backward()` and `(loss / 4).backward()`."""
    if not isinstance(node.func, ast.Attribute):
        raise NotPortedError(node.lineno, "the loss has no name: write loss.backward()")
    value = node.func.value
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "scale":
        value = value.args[0]
    return value


def _after(
    script: Script, body: list[ast.stmt], value: ast.expr, call: ast.Call
) -> tuple[str, list[str], set[str], int]:
    """Return the name of the model's output, the statements from it to the loss, the names that they read, and the
    index of the model's call in `body`.
    """
    needed = loaded_names(ast.parse(script.rendered(value, {call: "output"}), mode="eval")) - {"output"}
    call_index = next(
        (
            index
            for index, body_statement in enumerate(body)
            if start_of(body_statement) <= start_of(call) < end_of(body_statement)
        ),
        len(body),
    )
    after: list[str] = []
    for body_statement in reversed(body[call_index + 1 :]):
        changed = bound_names(body_statement) | mutated_names(body_statement)
        if changed & needed and not isinstance(body_statement, ast.Expr):
            text = script.rendered(body_statement)
            after.insert(0, text)
            tree = ast.parse(text)
            if isinstance(body_statement, ast.Assign):
                needed -= bound_names(body_statement)
            needed |= read_names(tree.body)
    if call_index == len(body):  # model(x) is in the statement of the backward
        return "output", after, needed, call_index
    statement = body[call_index]
    is_output = isinstance(statement, ast.Assign) and len(statement.targets) == 1
    target = statement.targets[0] if isinstance(statement, ast.Assign) and is_output else None
    if isinstance(target, ast.Name) and script.rendered(statement.value, {call: "output"}) == "output":  # type: ignore[attr-defined]
        return target.id, after, needed - {target.id}, call_index
    text = script.rendered(statement, {call: "output"})
    needed -= bound_names(statement) if isinstance(statement, ast.Assign) else set()
    needed |= read_names(ast.parse(text).body) - {"output"}
    return "output", [text, *after], needed, call_index


def _before(script: Script, body: list[ast.stmt], wanted: set[str]) -> tuple[list[str], set[str]]:
    """Return the statements that compute these names, and the names that the statements read first."""
    needed, texts = set(wanted), list[str]()
    for body_statement in reversed(body):
        if not (bound_names(body_statement) | mutated_names(body_statement)) & needed:
            continue
        text = script.rendered(body_statement)
        tree = ast.parse(text)
        statement = tree.body[0]
        if isinstance(statement, ast.Assign) and all(
            ast.unparse(target) == ast.unparse(statement.value) for target in statement.targets
        ):
            continue
        texts.insert(0, text)
        if isinstance(body_statement, ast.Assign):
            needed -= bound_names(body_statement)
        needed |= read_names(tree.body)
    return texts, needed


def _arguments(script: Script, call: ast.Call) -> tuple[list[str], list[str]]:
    """Return the texts of the model's arguments, and the names of the keyword arguments."""
    inputs = [script.rendered(argument) for argument in call.args]
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        raise NotPortedError(call.lineno, "the model is called with *arguments: write each of them")
    if len(call.keywords) == 1 and call.keywords[0].arg is None and not inputs:
        return [f"**{script.rendered(call.keywords[0].value)}"], []
    if any(keyword.arg is None for keyword in call.keywords) or (inputs and call.keywords):
        raise NotPortedError(
            call.lineno, "the model is called with positional and keyword arguments: use only one kind"
        )
    return inputs + [script.rendered(keyword.value) for keyword in call.keywords], [
        keyword.arg for keyword in call.keywords if keyword.arg
    ]


def _refuse_carried(
    script: Script, loop: ast.For, backward: Fact, names: set[str], changing: dict[str, int], call: ast.Call
) -> None:
    """Raise `NotPortedError` for a name that the training changes, so that its value depends on the update."""
    frames = Frames(script, backward.chain)
    counters = {
        name: each.lineno
        for depth in range(len(frames.scopes))
        for each in loops_around(frames, depth)
        if isinstance(each, ast.For)
        for name in bound_names(each.target)
    }
    for name in sorted(names & (counters.keys() | changing.keys())):
        line = changing.get(name, backward.line)
        if name in counters:
            reason = "is the number of an epoch or batch"
        elif start_of(loop) < (line, 0) <= end_of(loop):
            reason = "is carried from batch to batch"
        else:
            reason = f"may change during the training, in line {line}"
        _refuse(call, f"`{name}` {reason}")


def _refuse_changed_objects(
    script: Script,
    backward: Fact,
    texts: list[str],
    in_loop: set[str],
    changing: dict[str, int],
    call: ast.Call,
) -> None:
    """Raise `NotPortedError` if these texts read an object that the training changes: `annealer.step()`.

    in_loop  names that the batch loop binds: their objects are of one batch
    """
    changed = changed_objects(script, backward, changing)
    values = {**script.module_values, **backward.chain[0].values}
    for text in texts:
        for node in ast.walk(ast.parse(text.lstrip("*"))):
            owner = node.value if isinstance(node, ast.Attribute) else node
            if not isinstance(owner, ast.Name) or owner.id in in_loop or owner.id not in values:
                continue
            key = values[owner.id][2], node.attr if isinstance(node, ast.Attribute) else ""
            line = changed.get(key, changed.get((key[0], ""), 0))
            if line:
                _refuse(call, f"`{ast.unparse(node)}` may change during the training, in line {line}")


def _refuse(call: ast.Call, reason: str) -> None:
    raise NotPortedError(
        call.lineno, f"{reason}, and the loss and model of a workload get one batch only: train by hand"
    )


# --- metrics


def find_metrics(observed: ObservedRun, script: Script, loss: Loss) -> list[Metric]:
    """Return the sums of the evaluation loop that depend on the output: `correct += (output == target).sum()`."""
    source = observed.source
    metrics: list[Metric] = []
    for event in observed.facts_of("forward"):
        call = source.at(event.span, ast.Call)
        if event.details["reached"] or not event.is_inner or not isinstance(call, ast.Call):
            continue
        loops = [statement for statement in source.loops(call) if isinstance(statement, ast.For)]
        if not loops or any(
            start_of(loops[0]) <= other.span[:2] < end_of(loops[0])
            for other in observed.facts_of("backward")
            if other.is_inner
        ):
            continue
        values = {**script.module_values, **event.chain[0].values}
        body = _body(loops[0], values, end_of(loops[0]))
        names = _target_names(source, loops[0])
        for statement in body:
            metric = _metric(source, script, event, statement, body, call, names, loss)
            if metric is not None and metric.name not in {other.name for other in metrics}:
                metrics.append(metric)
        if metrics:
            break
    return metrics


def _metric(
    source: ScriptSource,
    script: Script,
    event: Fact,
    statement: ast.stmt,
    body: list[ast.stmt],
    call: ast.Call,
    names: list[str],
    loss: Loss,
) -> Metric | None:
    is_sum = isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add)
    if not is_sum or not isinstance(statement, ast.AugAssign) or ".sum(" not in source.code(statement.value):
        return None
    if not isinstance(statement.target, ast.Name) or "loss" in statement.target.id:
        return None
    statements_before = [body_statement for body_statement in body if start_of(body_statement) < start_of(statement)]
    output, after, needed, _ = _after(script, statements_before, statement.value, call)
    # the names of the batch have to be those of the training loop
    targets = sorted(needed & set(names))
    if set(targets) - set(loss.targets) or output in needed:
        return None
    free = needed - set(targets) - {output}
    setup = ScriptSlice(script, {*targets, output, *(n for t in after for n in bound_names_of(t))})
    try:
        for text in [*after, script.rendered(statement.value, {call: output})]:
            setup.needs(ast.parse(text), event)
    except NotPortedError:
        return None
    del free
    name = _COUNTS.get(statement.target.id, statement.target.id)
    return Metric(name, output, after, script.rendered(statement.value, {call: output}), targets, setup.ordered)
