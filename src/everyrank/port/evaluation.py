"""Counts of the training loop, and evaluations: each rank has a part, and the sums are those of all ranks."""

from __future__ import annotations

import ast

from everyrank.port.loss import count_of_terms
from everyrank.port.plan import Plan
from everyrank.port.source import NotPortedError

__all__ = ["edit_counts", "edit_evaluations"]

# calls in an evaluation's loop that need all samples in order, or write something for each batch
_KEEPS_WHOLE = {
    "append",
    "extend",
    "print",
    "save",
    "save_image",
    "add_scalar",
    "add_image",
    "imshow",
    "savefig",
    "write",
}


def edit_counts(plan: Plan) -> None:
    """Numbers of samples that the training loop adds up or prints are those of all ranks."""
    source = plan.source
    for backward in plan.of("backward"):
        node = source.at(backward.span)
        for loop in source.loops(node)[:1] if node else []:
            if not plan.once(loop, "counts"):
                continue
            for each in ast.walk(loop):
                if isinstance(each, ast.AugAssign) and isinstance(each.op, ast.Add):
                    _add_up(plan, each)
                elif isinstance(each, ast.Call) and source.code(each.func) in ("print", "tqdm.write"):
                    for inner in ast.walk(each):
                        if _is_length(plan, inner) and plan.once(inner, "count"):
                            _wrap(plan, inner)
                if _is_mean(plan, each) and plan.once(each, "mean"):
                    _average(plan, each)


def _is_mean(plan: Plan, node: ast.AST) -> bool:
    """Whether an expression is a mean over the samples that is only shown: `output.mean().item()`, not a loss."""
    source = plan.source
    if not (isinstance(node, ast.Attribute) and node.attr == "item" and isinstance(source.parents[node], ast.Call)):
        return False
    if not isinstance(node.value, ast.Call) or not isinstance(node.value.func, ast.Attribute):
        return False
    return node.value.func.attr == "mean" and not node.value.args and not node.value.keywords


def _average(plan: Plan, node: ast.AST) -> None:
    """Make a mean that is shown the mean over all ranks."""
    assert isinstance(node, ast.Attribute)
    try:
        count = count_of_terms(plan, plan.source.statement(node))
    except NotPortedError:
        plan.note(node.lineno, "this mean is that of rank 0's samples")
        return
    plan.helpers.add("mean_over_ranks")
    plan.source.wrap(node.value, "mean_over_ranks(", f", {count})", "the mean over the samples of all ranks")


def _add_up(plan: Plan, statement: ast.AugAssign) -> None:
    """`correct += (...).sum().item()` and `seen += len(x)`, also as a factor: `total += loss.item() * len(x)`."""
    if _is_count(plan, statement.value):
        if plan.once(statement.value, "count"):
            _wrap(plan, statement.value)
        return
    for inner in ast.walk(statement.value):
        if _is_length(plan, inner) and plan.once(inner, "count"):
            _wrap(plan, inner)


def _wrap(plan: Plan, node: ast.AST) -> None:
    plan.helpers.add("add_over_ranks")
    plan.source.wrap(node, "add_over_ranks(", ")", "counted over all ranks")


def _is_length(plan: Plan, node: ast.AST) -> bool:
    """Whether an expression is the number of samples of a batch."""
    source, names = plan.source, plan.data_names
    if isinstance(node, ast.Call) and source.code(node.func) == "len" and node.args:
        return source.code(node.args[0]) in names
    if isinstance(node, ast.Call | ast.Subscript):
        return source.code(node) in {f"{name}{end}" for name in names for end in (".size(0)", ".shape[0]")}
    return False


def _is_count(plan: Plan, node: ast.AST) -> bool:
    """Whether an expression counts samples: a length, or the sum of a comparison."""
    text = plan.source.code(node)
    return _is_length(plan, node) or (
        ".sum()" in text and "loss" not in text.lower() and ("==" in text or "eq(" in text)
    )


def edit_evaluations(plan: Plan) -> None:
    """Split an evaluation over the ranks where all that it keeps are sums; else every rank evaluates everything."""
    source = plan.source
    for fact in plan.of("pass"):
        if fact.details["id"] in plan.training_loaders or fact.details["trains"]:
            continue
        loop = source.at(fact.span, ast.For)
        loader = next((each for each in plan.of("loader") if each.details["id"] == fact.details["id"]), None)
        made = source.at(loader.span) if loader else None
        if not isinstance(loop, ast.For) or loader is None or made is None or not plan.once(loop):
            continue
        sums = [each for each in ast.walk(loop) if isinstance(each, ast.AugAssign) and isinstance(each.op, ast.Add)]
        names = list(dict.fromkeys(source.code(each.target) for each in sums))
        keeps_whole = any(
            isinstance(each, ast.Call) and source.code(each.func).rpartition(".")[2] in _KEEPS_WHOLE
            for each in ast.walk(loop)
        )
        are_sums = (
            bool(sums)
            and all(isinstance(each.target, ast.Name) and _is_sum(plan, each.value, loop) for each in sums)
            and not keeps_whole
            and loader.is_inner
            and not loader.details["is_stream"]
            and loader.details["has_batches"]
        )
        if plan.choice.evaluation == "split" and are_sums:
            plan.helpers.add("add_over_ranks")
            if plan.once(made):
                plan.split_loader(made, "each rank evaluates its part", evaluates=True)
            together = ", ".join(names)
            source.insert_after(loop, f"{together} = add_over_ranks({together})", "the sums of all ranks")
        else:
            plan.note(loop.lineno, "every rank evaluates the whole set: right, but not faster")


def _is_sum(plan: Plan, node: ast.AST, loop: ast.For) -> bool:
    """Whether an expression adds up over samples, so that the sum over ranks is that over all samples."""
    text, names = plan.source.code(node), plan.batch_names(loop)
    lengths = {f"{name}{end}" for name in names for end in (".size(0)", ".shape[0]")} | {
        f"len({name})" for name in names
    }
    if text in lengths or "reduction='sum'" in text or 'reduction="sum"' in text:
        return True
    if "*" in text and any(length in text for length in lengths):
        return True
    return ".sum()" in text and "loss" not in text.lower() and "criterion" not in text
