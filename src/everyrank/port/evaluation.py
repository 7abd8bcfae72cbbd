"""Sums the counts of the training loop and of evaluations over the ranks."""

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
    """Count samples that the training loop adds up or prints over all ranks."""
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
    """Whether an expression is a mean over the samples that is only printed: `output.mean().item()`."""
    source = plan.source
    if not (isinstance(node, ast.Attribute) and node.attr == "item" and isinstance(source.parents[node], ast.Call)):
        return False
    if not isinstance(node.value, ast.Call) or not isinstance(node.value.func, ast.Attribute):
        return False
    return node.value.func.attr == "mean" and not node.value.args and not node.value.keywords


def _average(plan: Plan, node: ast.AST) -> None:
    """Average a printed mean over all ranks."""
    assert isinstance(node, ast.Attribute)
    try:
        count = count_of_terms(plan, plan.source.statement(node))
    except NotPortedError:
        plan.note(node.lineno, "this mean is that of rank 0's samples")
        return
    plan.helpers.add("mean_over_ranks")
    plan.source.wrap(node.value, "mean_over_ranks(", f", {count})", "the mean over the samples of all ranks")


def _add_up(plan: Plan, statement: ast.AugAssign) -> None:
    """Edit `correct += (...).sum().item()`, `seen += len(x)` and `total += loss.item() * len(x)`."""
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
    """Split an evaluation over the ranks if it only keeps sums; else every rank evaluates all samples."""
    source = plan.source
    for fact in plan.of("pass"):
        if fact.details["id"] in plan.training_loaders or fact.details["trains"]:
            continue
        loop = source.at(fact.span, ast.For)
        loader = next((inner for inner in plan.of("loader") if inner.details["id"] == fact.details["id"]), None)
        loader_call = source.at(loader.span) if loader else None
        if not isinstance(loop, ast.For) or loader is None or loader_call is None or not plan.once(loop):
            continue
        sums = [inner for inner in ast.walk(loop) if isinstance(inner, ast.AugAssign) and isinstance(inner.op, ast.Add)]
        names = list(dict.fromkeys(source.code(inner.target) for inner in sums))
        keeps_whole = any(
            isinstance(inner, ast.Call) and source.code(inner.func).rpartition(".")[2] in _KEEPS_WHOLE
            for inner in ast.walk(loop)
        )
        are_sums = (
            bool(sums)
            and all(isinstance(inner.target, ast.Name) and _is_sum(plan, inner.value, loop) for inner in sums)
            and not keeps_whole
            and loader.is_inner
            and not loader.details["is_stream"]
            and loader.details["has_batches"]
        )
        if plan.choice.evaluation == "split" and are_sums:
            plan.helpers.add("add_over_ranks")
            if plan.once(loader_call):
                plan.split_loader(loader_call, "each rank evaluates its part", evaluates=True)
            joined_names = ", ".join(names)
            source.insert_after(loop, f"{joined_names} = add_over_ranks({joined_names})", "the sums of all ranks")
        else:
            plan.note(loop.lineno, "every rank evaluates the whole set: correct, but not faster")


def _is_sum(plan: Plan, node: ast.AST, loop: ast.For) -> bool:
    """Whether an expression is a sum over samples, so that its sum over the ranks is the sum over all samples."""
    text, names = plan.source.code(node), plan.batch_names(loop)
    lengths = {f"{name}{end}" for name in names for end in (".size(0)", ".shape[0]")} | {
        f"len({name})" for name in names
    }
    if text in lengths or "reduction='sum'" in text or 'reduction="sum"' in text:
        return True
    if "*" in text and any(length in text for length in lengths):
        return True
    return ".sum()" in text and "loss" not in text.lower() and "criterion" not in text
