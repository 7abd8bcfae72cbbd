"""Sums the counts of the training loop and of evaluations over the ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from everyrank.port.facts import Fact
from everyrank.port.loss import count_of_terms
from everyrank.port.plan import Plan
from everyrank.port.source import NotPortedError, end_of, start_of

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
    """Sum the counts, and average the means, of the training loop over the ranks, without evaluations inside of it."""
    source = plan.source
    for backward in plan.of("backward"):
        node = source.at(backward.span)
        for loop in source.loops(node)[:1] if node else []:
            if not plan.once(loop, "counts"):
                continue
            _split_shared(plan, loop)
            for each in _training_nodes(plan, loop):
                addition = _addition(plan, each)
                if addition is not None:
                    _add_up(plan, addition[1], is_shared=_is_conditional(plan, node, loop))
                elif isinstance(each, ast.Call) and source.code(each.func) in ("print", "tqdm.write"):
                    for inner in ast.walk(each):
                        if _is_length(plan, inner) and plan.once(inner, "count"):
                            _wrap(plan, inner)
                if isinstance(each, ast.Call) and _is_mean(plan, each) and plan.once(each, "mean"):
                    _average(plan, each)


def _split_shared(plan: Plan, loop: ast.AST) -> None:
    """Split the other loaders that a training loop reads, because its counts are summed over the ranks."""
    source = plan.source
    ids = {fact.details["id"] for fact in plan.of("pass") if source.at(fact.span, ast.For) is loop}
    for loader in plan.of("loader"):
        call = source.at(loader.span)
        is_split = loader.details["id"] in plan.training_loaders or loader.details["is_stream"]
        if loader.details["id"] in ids and loader.is_inner and not is_split and call is not None and plan.once(call):
            plan.split_loader(call, "each rank evaluates its part of every batch")


def _training_nodes(plan: Plan, loop: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a training loop, without the loops inside of it in which every rank evaluates all samples."""
    for child in ast.iter_child_nodes(loop):
        if not (isinstance(child, ast.For | ast.While) and _evaluates(plan, child)):
            yield child
            yield from _training_nodes(plan, child)


def _evaluates(plan: Plan, loop: ast.For | ast.While) -> bool:
    """Whether a loop inside of the training loop reads another loader, or uses the model."""
    source = plan.source
    for fact in plan.of("pass"):
        if source.at(fact.span, ast.For) is loop and fact.details["id"] not in plan.training_loaders:
            return True
    calls = [source.at(fact.span) for fact in plan.training_forwards]
    models = {source.code(call.func) for call in calls if isinstance(call, ast.Call)}
    nodes = set(ast.walk(loop))
    uses_model = any(isinstance(each, ast.Name | ast.Attribute) and source.code(each) in models for each in nodes)
    return uses_model and not any(call in nodes for call in calls)


def _is_conditional(plan: Plan, node: ast.AST | None, loop: ast.AST) -> bool:
    """Whether a backward is under an `if` of its loop, as in one loop for training and validation."""
    for each in plan.source.ancestors(node):
        if each is loop:
            return False
        if isinstance(each, ast.If):
            return True
    return False


def _addition(plan: Plan, node: ast.AST) -> tuple[ast.expr, ast.expr] | None:
    """Return what a statement such as `seen += n` or `seen = seen + n` adds to, and what it adds; None for others."""
    code = plan.source.code
    match node:
        case ast.AugAssign(target=target, op=ast.Add(), value=value):
            return target, value
        case ast.Assign(targets=[target], value=ast.BinOp(left=left, op=ast.Add(), right=right)):
            if code(left) == code(target):
                return target, right
            return (target, left) if code(right) == code(target) else None
        case _:
            return None


def _is_mean(plan: Plan, node: ast.Call) -> bool:
    """Whether an expression is a mean as a number: `x.mean().item()`, or an accuracy: `(a == b).float().mean()`."""
    if node.keywords:
        return False
    is_method = isinstance(node.func, ast.Attribute) and node.func.attr == "mean" and not node.args
    parent = plan.source.parents[node]
    if is_method and isinstance(parent, ast.Attribute) and parent.attr == "item":
        return True
    averaged = node.func if is_method else node.args[0] if plan.source.code(node.func) == "torch.mean" else None
    while isinstance(averaged, ast.Attribute | ast.Call) and not _is_comparison(averaged):
        averaged = averaged.func if isinstance(averaged, ast.Call) else averaged.value
    return averaged is not None and _is_comparison(averaged)


def _is_comparison(node: ast.AST) -> bool:
    """Whether an expression is `a == b`, `a.eq(b)` or `torch.eq(a, b)`."""
    match node:
        case ast.Compare(ops=[ast.Eq()]):
            return True
        case ast.Call(func=ast.Attribute(attr="eq")):
            return True
        case _:
            return False


def _average(plan: Plan, node: ast.Call) -> None:
    """Average a printed mean over all ranks."""
    try:
        count = count_of_terms(plan, plan.source.statement(node))
    except NotPortedError:
        plan.note(node.lineno, "this mean is that of rank 0's samples")
        return
    plan.helpers.add("mean_over_ranks")
    plan.source.wrap(node, "mean_over_ranks(", f", {count})", "the mean over the samples of all ranks")


def _add_up(plan: Plan, value: ast.expr, *, is_shared: bool) -> None:
    """Edit what is added: `(...).sum().item()`, `len(x)`, `loss.item() * len(x)`.

    In a loop that validation shares (`is_shared`), the loss may be that of a rank's samples, so its product is summed.
    """
    lengths = [inner for inner in ast.walk(value) if _is_length(plan, inner)]
    is_product = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult) and bool(lengths)
    if _is_count(plan, value) or (is_shared and is_product and plan.choice.loss == "mean"):
        lengths = [value]
    for inner in lengths:
        if plan.once(inner, "count"):
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
    is_loss = "loss" in plan.source.code(node).lower()
    compares = any(_is_comparison(each) for each in ast.walk(node))
    return _is_length(plan, node) or (compares and not is_loss and _has_sum(plan, node))


def _has_sum(plan: Plan, node: ast.AST) -> bool:
    """Whether an expression is a sum of all elements: `x.sum()`, `torch.sum(x)`, `np.sum(x)`."""
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and not each.keywords:
            name = plan.source.code(each.func)
            if name in ("sum", "torch.sum", "np.sum", "numpy.sum", "torch.count_nonzero", "np.count_nonzero"):
                if len(each.args) == 1:
                    return True
            elif name.endswith((".sum", ".count_nonzero")) and not each.args:
                return True
    return False


@dataclass
class _Evaluation:
    """The loops that read a loader to evaluate.

    loops        the `for` loops
    reads_other  whether the loader is also read otherwise, for example by `next(iter(loader))`
    """

    loader: Fact
    loops: list[ast.For] = field(default_factory=list[ast.For])
    reads_other: bool = False


def edit_evaluations(plan: Plan) -> None:
    """Split an evaluation over the ranks if it only keeps sums; else every rank evaluates all samples.

    A loader is split for all loops that read it. A loop reads only split loaders, or only whole ones.
    """
    evaluations = _evaluations(plan)
    split = {call for call, each in evaluations.items() if _can_be_split(plan, call, each)}
    while True:
        whole_loops = {loop for call, each in evaluations.items() if call not in split for loop in each.loops}
        still_split = {call for call in split if whole_loops.isdisjoint(evaluations[call].loops)}
        if still_split == split:
            break
        split = still_split
    for call, evaluation in evaluations.items():
        if call in split and plan.once(call):
            plan.split_loader(call, "each rank evaluates its part", evaluates=True)
        for loop in evaluation.loops:
            if not plan.once(loop):
                continue
            if call not in split:
                plan.note(loop.lineno, "every rank evaluates the whole set: correct, but not faster")
                continue
            plan.helpers.add("add_over_ranks")
            names = dict.fromkeys(plan.source.code(target) for target, _ in _additions(plan, loop))
            joined_names = ", ".join(names)
            plan.source.insert_after(loop, f"{joined_names} = add_over_ranks({joined_names})", "the sums of all ranks")


def _evaluations(plan: Plan) -> dict[ast.AST, _Evaluation]:
    """Return the evaluations of the run, by the call that makes their loader."""
    source = plan.source
    evaluations: dict[ast.AST, _Evaluation] = {}
    for fact in plan.of("pass"):
        if fact.details["id"] in plan.training_loaders or fact.details["trains"]:
            continue
        loop = _loop_over(plan, fact)
        loader = next((each for each in plan.of("loader") if each.details["id"] == fact.details["id"]), None)
        call = source.at(loader.span) if loader else None
        if loader is None or call is None:
            continue
        evaluation = evaluations.setdefault(call, _Evaluation(loader))
        if loop is None:
            evaluation.reads_other = True
        elif loop not in evaluation.loops:
            evaluation.loops.append(loop)
    return evaluations


def _loop_over(plan: Plan, fact: Fact) -> ast.For | None:
    """Return the `for` loop over the loader of a pass; None if it is read otherwise."""
    loop = plan.source.at(fact.span, ast.For)
    line, column, last_line, last_column = fact.span
    if not isinstance(loop, ast.For):
        return None
    is_whole = start_of(loop) == (line, column) and end_of(loop) == (last_line, last_column)  # before Python 3.12
    is_in_iter = start_of(loop.iter) <= (line, column) and (last_line, last_column) <= end_of(loop.iter)
    return loop if is_whole or is_in_iter else None


def _can_be_split(plan: Plan, call: ast.AST, evaluation: _Evaluation) -> bool:
    """Whether all loops over a loader keep only sums, also those that the run has not reached."""
    loader = evaluation.loader
    return (
        plan.choice.evaluation == "split"
        and loader.is_inner
        and not loader.details["is_stream"]
        and loader.details["has_batches"]
        and not (plan.choice.sampler == "torch" and plan.custom_sampler(loader))
        and not evaluation.reads_other
        and all(_keeps_sums(plan, loop) for loop in evaluation.loops)
        and not _may_be_read_elsewhere(plan, call, evaluation.loops)
    )


def _may_be_read_elsewhere(plan: Plan, call: ast.AST, loops: Sequence[ast.For]) -> bool:
    """Whether a loop that the run has not reached may read the same loader, which has the same name there."""
    source = plan.source
    statement = source.statement(call)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = {_last_name(node) for target in targets for node in ast.walk(target)}
    names |= {_last_name(node) for loop in loops for node in ast.walk(loop.iter)}
    names -= {"", "self", "enumerate", "tqdm"}
    reached = {_loop_over(plan, fact) for fact in plan.of("pass")}
    return any(
        isinstance(loop, ast.For) and loop not in reached and names & {_last_name(node) for node in ast.walk(loop.iter)}
        for loop in ast.walk(source.tree)
    )


def _last_name(node: ast.AST) -> str:
    """Return `loader` of `loader` and `self.loader`, and "" of other nodes."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _additions(plan: Plan, loop: ast.For) -> list[tuple[ast.expr, ast.expr]]:
    """Return each variable that a loop adds to, and what it adds."""
    return [addition for node in ast.walk(loop) if (addition := _addition(plan, node)) is not None]


def _keeps_sums(plan: Plan, loop: ast.For) -> bool:
    """Whether a loop does nothing with its batches but add to sums over samples."""
    additions = _additions(plan, loop)
    needs_all = any(
        isinstance(node, ast.Call) and plan.source.code(node.func).rpartition(".")[2] in _KEEPS_WHOLE
        for node in ast.walk(loop)
    )
    are_sums = all(isinstance(target, ast.Name) and _is_sum(plan, added, loop) for target, added in additions)
    return bool(additions) and are_sums and not needs_all


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
    return _has_sum(plan, node) and "loss" not in text.lower() and "criterion" not in text
