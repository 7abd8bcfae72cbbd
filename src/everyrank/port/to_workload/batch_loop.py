"""The loop over the batches: the statements from a batch to the loss, and the sums of an evaluation."""

from __future__ import annotations

import ast
import dataclasses
import re
from typing import Any

from everyrank.port.facts import Fact
from everyrank.port.source import NotPortedError, ScriptSource, end_of, start_of
from everyrank.port.to_workload.observed_run import ObservedRun
from everyrank.port.to_workload.slices import (
    Script,
    ScriptPiece,
    ScriptSlice,
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
    """What the loop over the batches does, from the batch to the loss.

    target       of the loop: "data, target"
    before       statements from the batch to what the model is given
    inputs       texts of the model's arguments; a "**batch" gives all of a dict
    words        names of those that are given by keyword
    output       the name of what the model returns
    after        statements from there to the loss
    value        the loss, an expression
    targets      names of what the loss needs of the batch
    rows         a name whose length is the number of samples
    setup        pieces that the loss needs from before the loop
    """

    target: str
    before: list[str]
    inputs: list[str]
    words: list[str]
    output: str
    after: list[str]
    value: str
    targets: list[str]
    rows: str
    setup: list[ScriptPiece]


@dataclasses.dataclass(frozen=True)
class Metric:
    """A sum of the evaluation, `correct += ...`, as a function of output and target."""

    name: str
    output: str
    after: list[str]
    value: str
    targets: list[str]
    setup: list[ScriptPiece]


def find_loss(observed: ObservedRun, script: Script, backward: Fact, forward: Fact) -> tuple[Loss, ast.Call]:
    """Return the loop's way from a batch to the loss, and the call of the model.

    Raises `NotPortedError` for what depends on other batches, or on the number of an update.
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
            "the training loop is a method of a class, whose attributes are not followed: move it into a function that "
            "is given model, loader and optimizer",
        )
    loop = _batch_loop(source, node)
    if source.scope(call) is not source.scope(node) or not (start_of(loop) < start_of(call) < end_of(loop)):
        raise NotPortedError(
            call.lineno,
            f"the model is called outside of the loop with the backward of line {node.lineno}: call it there",
        )
    values = {**script.module_values, **backward.chain[0].values}
    statement = source.statement(node)
    body = _body(loop, values, start_of(statement))
    value = _loss_expression(node)
    output, after, needed, call_index = _after(script, body, value, call)
    available = set(_target_names(source, loop)) | {name for each in body[:call_index] for name in bound_names(each)}
    targets = sorted(name for name in needed if name in available and name != output)
    _refuse_carried(source, loop, backward, needed - available - {output}, call)
    model = source.code(call.func)
    if model in needed:
        raise NotPortedError(
            node.lineno,
            f"the loss reads the model itself, `{model}`, and a workload's only has output and target",
        )
    inputs, words = _arguments(script, call)
    read = {name for text in inputs for name in loaded_names(ast.parse(text.lstrip("*"), mode="eval"))}
    before, free = _before(script, body[:call_index], {*targets, *read})
    target = set(_target_names(source, loop))
    _refuse_carried(source, loop, backward, free - target, call)
    slice_of_setup = ScriptSlice(script)
    text = script.rendered(value, {call: output})
    for each in [*after, *before, *inputs, text]:
        slice_of_setup.given |= available | {output} | {name for text in after for name in bound_names_of(text)}
        slice_of_setup.needs(ast.parse(each.lstrip("*")), backward)
    # what the model's arguments and the loss need of the batch
    rows = next((name for name in targets if _has_rows(backward, name)), "")
    if not rows:
        rows = next((name for name in sorted(read | set(_target_names(source, loop))) if _has_rows(backward, name)), "")
    described = backward.chain[0].values.get(output, ["", ""])
    if described[0] == "object" and described[1].startswith("transformers."):
        # layouts that collect outputs give them as a dict
        after = [re.sub(rf"\b{output}\.(\w+)", rf'{output}["\1"]', each) for each in after]
    if "Tensor" in described[1]:  # verify computes in float64, and a target has to follow the output
        after = [each.replace(".float()", f".to({output}.dtype)") for each in after]
        text = text.replace(".float()", f".to({output}.dtype)")
    return (
        Loss(
            _target_text(source, loop),
            before,
            inputs,
            words,
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
            node.lineno, "the backward is in no loop over a DataLoader: write `for batch in loader:` around it"
        )
    return loops[0]


def _target(source: ScriptSource, loop: ast.For) -> ast.expr:
    """What a loop calls a batch, without a counter."""
    is_counted = any(
        isinstance(each, ast.Call) and source.code(each.func) == "enumerate" for each in ast.walk(loop.iter)
    )
    target = loop.target
    return target.elts[1] if is_counted and isinstance(target, ast.Tuple) and len(target.elts) == 2 else target


def _target_names(source: ScriptSource, loop: ast.For) -> list[str]:
    return [node.id for node in ast.walk(_target(source, loop)) if isinstance(node, ast.Name)]


def _target_text(source: ScriptSource, loop: ast.For) -> str:
    """Return the text of it, without brackets around the whole."""
    text = source.code(_target(source, loop))
    return text[1:-1].strip() if text.startswith("(") and text.endswith(")") else text


def _body(loop: ast.For, values: dict[str, list[Any]], end: tuple[int, int]) -> list[ast.stmt]:
    """Return the statements of the loop before the backward, those of `with` and decided branches among them."""
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
    """The name of the model's output, the statements from there to the loss, and what these need of the batch."""
    needed = loaded_names(ast.parse(script.rendered(value, {call: "output"}), mode="eval")) - {"output"}
    number = next(
        (index for index, each in enumerate(body) if start_of(each) <= start_of(call) < end_of(each)), len(body)
    )
    after: list[str] = []
    for each in reversed(body[number + 1 :]):
        changed = bound_names(each) | mutated_names(each)
        if changed & needed and not isinstance(each, ast.Expr):
            text = script.rendered(each)
            after.insert(0, text)
            code = ast.parse(text)
            if isinstance(each, ast.Assign):
                needed -= bound_names(each)
            needed |= read_names(code.body)
    if number == len(body):  # model(x) in the statement with the backward itself
        return "output", after, needed, number
    statement = body[number]
    is_output = isinstance(statement, ast.Assign) and len(statement.targets) == 1
    target = statement.targets[0] if isinstance(statement, ast.Assign) and is_output else None
    if isinstance(target, ast.Name) and script.rendered(statement.value, {call: "output"}) == "output":  # type: ignore[attr-defined]
        return target.id, after, needed - {target.id}, number
    text = script.rendered(statement, {call: "output"})
    needed -= bound_names(statement) if isinstance(statement, ast.Assign) else set()
    needed |= read_names(ast.parse(text).body) - {"output"}
    return "output", [text, *after], needed, number


def _before(script: Script, body: list[ast.stmt], wanted: set[str]) -> tuple[list[str], set[str]]:
    """Return the statements from the batch to these names, and the names that they begin with."""
    needed, kept = set(wanted), list[str]()
    for each in reversed(body):
        if not (bound_names(each) | mutated_names(each)) & needed:
            continue
        text = script.rendered(each)
        code = ast.parse(text)
        statement = code.body[0]
        if isinstance(statement, ast.Assign) and all(
            ast.unparse(target) == ast.unparse(statement.value) for target in statement.targets
        ):
            continue
        kept.insert(0, text)
        if isinstance(each, ast.Assign):
            needed -= bound_names(each)
        needed |= read_names(code.body)
    return kept, needed


def _arguments(script: Script, call: ast.Call) -> tuple[list[str], list[str]]:
    """Return the texts of the model's arguments, and the names of those that are given by keyword."""
    inputs = [script.rendered(each) for each in call.args]
    if any(isinstance(each, ast.Starred) for each in call.args):
        raise NotPortedError(call.lineno, "the model is called with *arguments: write each of them")
    if len(call.keywords) == 1 and call.keywords[0].arg is None and not inputs:
        return [f"**{script.rendered(call.keywords[0].value)}"], []
    if any(word.arg is None for word in call.keywords) or (inputs and call.keywords):
        raise NotPortedError(call.lineno, "the model is called by position and by keyword: use one of the two")
    return inputs + [script.rendered(word.value) for word in call.keywords], [
        word.arg for word in call.keywords if word.arg
    ]


def _refuse_carried(source: ScriptSource, loop: ast.For, backward: Fact, names: set[str], call: ast.Call) -> None:
    """Raise `NotPortedError` for a name that loops change: its value depends on the update."""
    counters = {
        node.id
        for depth in range(len(backward.chain))
        for each in source.loops(source.at(backward.chain[depth].span, ast.Call) or source.tree)
        if isinstance(each, ast.For)
        for node in ast.walk(each.target)
        if isinstance(node, ast.Name)
    }
    inside = {name for each in loop.body for name in bound_names(each)}
    for name in sorted(names & (counters | inside)):
        kind = "the number of an epoch or batch" if name in counters else "carried from batch to batch"
        raise NotPortedError(
            call.lineno, f"`{name}` is {kind}, and a workload's loss and model see one batch only: train by hand"
        )


# --- metrics


def find_metrics(observed: ObservedRun, script: Script, loss: Loss) -> list[Metric]:
    """Sums of the evaluation loop that depend on the output: `correct += (output.argmax(1) == target).sum()`."""
    source = observed.source
    metrics: list[Metric] = []
    for event in observed.of("forward"):
        call = source.at(event.span, ast.Call)
        if event.details["reached"] or not event.is_inner or not isinstance(call, ast.Call):
            continue
        loops = [each for each in source.loops(call) if isinstance(each, ast.For)]
        if not loops or any(
            start_of(loops[0]) <= other.span[:2] < end_of(loops[0])
            for other in observed.of("backward")
            if other.is_inner
        ):
            continue
        values = {**script.module_values, **event.chain[0].values}
        body = _body(loops[0], values, end_of(loops[0]))
        names = _target_names(source, loops[0])
        for each in body:
            metric = _metric(source, script, event, each, body, call, names, loss)
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
    earlier = [each for each in body if start_of(each) < start_of(statement)]
    output, after, needed, _ = _after(script, earlier, statement.value, call)
    # the same names for the parts of a batch as in the training loop
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
