"""Edits of evaluations."""

from __future__ import annotations

import ast
import re

from everyrank.audit import Finding
from everyrank.port.source import end_of
from everyrank.repair.edited_script import (
    CannotRepairError,
    EditedScript,
    line_of_finding,
    loader_of_loop,
    name_of_loader,
)
from everyrank.repair.gradient_edits import number_of_terms

__all__ = [
    "add_up_over_ranks",
    "dropout_by_mode",
    "evaluate_in_eval_mode",
    "evaluate_without_padding",
    "keep_last_batch",
    "train_in_train_mode",
    "weigh_means_by_terms",
]


def add_up_over_ranks(script: EditedScript, finding: Finding) -> None:
    """Add up the sums of an evaluation's loop over the ranks."""
    path = finding.location.rpartition(":")[0]
    others = [each.rpartition(":")[2] for each in finding.other_lines if each.rpartition(":")[0] == path]
    lines = [line_of_finding(finding), *map(int, others)]
    for line in lines:
        try:
            loop = script.loop_around(line)
        except CannotRepairError:
            continue
        sums = [node for node in ast.walk(loop) if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add)]
        names = list(dict.fromkeys(script.source.code(node.target) for node in sums))
        scope = script.source.scope(loop)
        if not names or any(f"len({loader_of_loop(script, loop)})" in script.source.code(node) for node in scope.body):
            continue
        if not all(_is_number(script, node.target, scope) for node in sums):
            continue
        _add_over_ranks(script, loop, names)
        return
    raise CannotRepairError("no loop that adds up sums and counts was found")


def _is_number(script: EditedScript, target: ast.expr, scope: ast.AST) -> bool:
    """Whether a target of `+=` may be a number: not a list that collects predictions, or one element of many."""
    collections = (ast.List, ast.ListComp, ast.Tuple, ast.Dict, ast.JoinedStr)
    values = script.assigned_values(script.source.code(target), scope)
    return isinstance(target, ast.Name | ast.Attribute) and not any(
        isinstance(value, collections)
        or (isinstance(value, ast.Constant) and isinstance(value.value, str))
        or script.source.code(value) == "list()"
        for value in values
    )


def _add_over_ranks(script: EditedScript, loop: ast.For, names: list[str]) -> None:
    """Add up these variables over the ranks after a loop."""
    script.helpers.add("add_over_ranks")
    joined_names = ", ".join(names)
    code = f"{joined_names} = add_over_ranks({joined_names})"
    script.source.insert_after(_outermost(script, loop), code, "the sums of all ranks")


def _outermost(script: EditedScript, loop: ast.For) -> ast.stmt:
    """Return a loop, or the `with torch.no_grad():` around it."""
    parent = script.source.parents[loop]
    return parent if isinstance(parent, ast.With) else loop


_MEAN = "each mean counts by the number of its terms"


def weigh_means_by_terms(script: EditedScript, finding: Finding) -> None:
    """Replace a sum of means by `total += loss * len(labels)`, and a list of means by their weighted mean."""
    line = line_of_finding(finding)
    loop, terms = script.loop_around(line), _terms_of_mean(script, finding)
    statement = script.statement_at(line)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}

    def holds_mean(node: ast.AST) -> bool:
        is_named = any(isinstance(each, ast.Name) and each.id in names for each in ast.walk(node))
        return is_named or (not names and script.source.statement(node) is statement)

    sums = [node for node in ast.walk(loop) if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add)]
    sums_of_means = [node for node in sums if holds_mean(node.value)]
    appends = [call for call in script.calls_of("append", within=loop) if call.args and holds_mean(call.args[0])]
    if sums_of_means:
        _weigh_sums(script, loop, sums_of_means, sums, terms)
    elif appends:
        _weigh_list(script, loop, appends[0], terms)
    else:
        raise CannotRepairError("no sum or list of the means of batches was found")


def _terms_of_mean(script: EditedScript, finding: Finding) -> str:
    """Return an expression for the number of terms of the mean that a line computes."""
    for call in script.calls_at(line_of_finding(finding), "mean"):
        if isinstance(call.func, ast.Attribute) and not call.args:
            return f"{script.source.code(call.func.value)}.numel()"
    return number_of_terms(script, finding)


def _weigh_sums(
    script: EditedScript, loop: ast.For, sums_of_means: list[ast.AugAssign], sums: list[ast.AugAssign], terms: str
) -> None:
    """Multiply each added mean by its number of terms, and divide the sum by the number of all terms."""
    counters = [node for node in sums if isinstance(node.value, ast.Constant) and node.value.value == 1]
    conditions = [node.test for node in ast.walk(loop) if isinstance(node, ast.If | ast.IfExp)]
    read_in_conditions = {script.source.code(node) for test in conditions for node in ast.walk(test)}
    for node in counters:
        if script.source.code(node.target) in read_in_conditions:
            name = script.source.code(node.target)
            raise CannotRepairError(f"a condition in the loop reads {name}, which has to count batches there")
    for node in sums_of_means:
        is_simple = isinstance(node.value, ast.Name | ast.Attribute | ast.Call)
        script.source.wrap(node.value, *(("", f" * {terms}") if is_simple else ("(", f") * {terms}")), _MEAN)
    for node in counters:
        script.source.replace(node.value, terms, "the number of terms, not of batches")
    names = list(dict.fromkeys(script.source.code(node.target) for node in (*sums_of_means, *counters)))
    divisor = f"len({loader_of_loop(script, loop)})"
    scope = script.source.scope(loop)
    divisions = [
        node.right if isinstance(node, ast.BinOp) else node.value
        for node in ast.walk(scope)
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div)
    ]
    divisors = [node for node in divisions if script.source.code(node) == divisor]
    if divisors and not counters:
        count = script.free_name("num_terms")
        script.source.insert_before(_outermost(script, loop), f"{count} = 0", "")
        script.source.insert_after(script.source.statement(sums_of_means[-1]), f"{count} += {terms}", "")
        for node in divisors:
            script.source.replace(node, count, "the number of terms, not of batches")
        names.append(count)
    _add_over_ranks(script, loop, names)


def _weigh_list(script: EditedScript, loop: ast.For, append: ast.Call, terms: str) -> None:
    """Replace the elements of a list of means by one: the mean over all terms of all ranks."""
    assert isinstance(append.func, ast.Attribute)
    means, counts = script.source.code(append.func.value), script.free_name("num_terms")
    script.source.insert_before(_outermost(script, loop), f"{counts} = []", "")
    script.source.insert_after(script.source.statement(append), f"{counts}.append({terms})", "")
    script.helpers.add("add_over_ranks")
    total = script.free_name("total")
    sums = f"sum(mean * count for mean, count in zip({means}, {counts})), sum({counts})"
    code = f"{total}, {counts} = add_over_ranks({sums})\n{means} = [{total} / {counts}]"
    script.source.insert_after(_outermost(script, loop), code, _MEAN)


def evaluate_without_padding(script: EditedScript, finding: Finding) -> None:
    """Replace a sampler that pads the ranks by Subset(data, range(rank, len(data), world_size))."""
    call = script.call_at(line_of_finding(finding), "DataLoader")
    sampler, dataset = script.keyword(call, "sampler"), script.dataset_of(call)
    if sampler is None:
        raise CannotRepairError("the loader has no argument sampler")
    name, data = name_of_loader(script, call), script.source.code(dataset)
    if re.search(rf"\b{re.escape(name or '?')}\.(dataset|sampler)\b", script.source.text):
        raise CannotRepairError(f"the script uses {name}.dataset or {name}.sampler, which would change")
    subset = script.imported("torch.utils.data", "Subset")
    dist = script.dist
    script.source.replace(
        dataset,
        f"{subset}({data}, range({dist}.get_rank(), len({data}), {dist}.get_world_size()))",
        "each sample is evaluated once: a sampler repeats some, so that all ranks have equally many",
    )
    script.remove_argument(call, sampler, "")


def keep_last_batch(script: EditedScript, finding: Finding) -> None:
    """Remove drop_last=True."""
    call = script.call_at(line_of_finding(finding), "DataLoader")
    argument = script.keyword(call, "drop_last")
    if argument is None:
        raise CannotRepairError("the loader has no drop_last")
    script.remove_argument(call, argument, "all samples are evaluated")


def evaluate_in_eval_mode(script: EditedScript, finding: Finding) -> None:
    """Insert model.eval() before the evaluation and model.train() after it."""
    model = _model_at(script, line_of_finding(finding))
    statement: ast.stmt = script.loop_around(line_of_finding(finding))
    while isinstance(parent := script.source.parents[statement], ast.With):
        statement = parent
    script.source.insert_before(statement, f"{model}.eval()", "no dropout, and batch norm by its running statistics")
    script.source.insert_after(statement, f"{model}.train()", "training goes on in train mode")


def _model_at(script: EditedScript, line: int) -> str:
    """Return the name of the model that a line calls. Raises `CannotRepairError` if no name looks like a model."""
    for call in script.calls_at(line):
        name = script.source.code(call.func).removesuffix(".module")
        if re.fullmatch(r"[\w.]+", name) and re.search(r"model|net|module|ddp|encoder|^self\.", name.lower()):
            return name
    raise CannotRepairError("no name of a model was found in this line")


def train_in_train_mode(script: EditedScript, finding: Finding) -> None:
    """Insert model.train() before the training loop."""
    script.source.insert_before(
        script.loop_around(line_of_finding(finding)),
        f"{_model_at(script, line_of_finding(finding))}.train()",
        "the evaluation has left the model in eval mode",
    )


def dropout_by_mode(script: EditedScript, _: Finding) -> None:
    """F.dropout(x, p) -> F.dropout(x, p, training=self.training), also dropout_p of attention."""
    num_edits, functional_names = len(script.source.edits), _functional_names(script)
    reason = "no dropout in eval mode"
    for call in script.calls_of("dropout", "scaled_dot_product_attention"):
        scope = script.source.scope(call)
        has_self = isinstance(scope, ast.FunctionDef) and "self" in [parameter.arg for parameter in scope.args.args]
        probability = script.keyword(call, "dropout_p")
        owner = script.source.code(call.func).rpartition(".")[0]
        is_module = script.last_name(call) == "dropout" and owner not in functional_names  # its call knows the mode
        if not has_self or is_module or owner.startswith("self"):
            continue
        if probability is not None and "self.training" not in script.source.code(probability):
            text = script.source.code(probability.value)
            text = text if isinstance(probability.value, ast.Name | ast.Constant | ast.Attribute) else f"({text})"
            script.source.replace(probability.value, f"{text} if self.training else 0.0", reason)
        elif script.last_name(call) == "dropout" and not script.keyword(call, "training") and len(call.args) < 3:
            last_argument = max([*call.args, *call.keywords], key=end_of)
            script.source.wrap(last_argument, "", ", training=self.training", reason)
    if len(script.source.edits) == num_edits:
        raise CannotRepairError("no dropout that ignores the mode was found in a method")


def _functional_names(script: EditedScript) -> set[str]:
    """Return the names of torch.nn.functional in a script, and "" for functions that are imported from it."""
    names = {"", "F", "torch.nn.functional", "nn.functional", "functional"}
    imports = [node for node in ast.walk(script.source.tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in imports:
        package = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        names |= {alias.asname or "" for alias in node.names if f"{package}{alias.name}" == "torch.nn.functional"}
    return names
