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

__all__ = [
    "add_up_over_ranks",
    "dropout_by_mode",
    "evaluate_in_eval_mode",
    "evaluate_without_padding",
    "keep_last_batch",
    "train_in_train_mode",
]


def add_up_over_ranks(script: EditedScript, finding: Finding) -> None:
    """The sums of an evaluation's loop are those of all ranks."""
    lines = [line_of_finding(finding), *(int(each.rpartition(":")[2]) for each in finding.also)]
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
        script.helpers.add("add_over_ranks")
        together = ", ".join(names)
        statement: ast.stmt = loop
        parent = script.source.parents[loop]
        if isinstance(parent, ast.With):  # with torch.no_grad(): for ...
            statement = parent
        script.source.insert_after(statement, f"{together} = add_over_ranks({together})", "the sums of all ranks")
        return
    raise CannotRepairError("no loop that adds up sums and counts was found")


def evaluate_without_padding(script: EditedScript, finding: Finding) -> None:
    """Subset(data, range(rank, len(data), world_size)) in place of a sampler that pads the ranks."""
    call = script.call_at(line_of_finding(finding), "DataLoader")
    sampler = script.keyword(call, "sampler")
    if sampler is None or not call.args:
        raise CannotRepairError("the loader has no sampler")
    name, data = name_of_loader(script, call), script.source.code(call.args[0])
    if re.search(rf"\b{re.escape(name or '?')}\.(dataset|sampler)\b", script.source.text):
        raise CannotRepairError(f"the script uses {name}.dataset or {name}.sampler, which would change")
    subset = script.imported("torch.utils.data", "Subset")
    dist = script.dist
    script.source.replace(
        call.args[0],
        f"{subset}({data}, range({dist}.get_rank(), len({data}), {dist}.get_world_size()))",
        "each sample is evaluated once: a sampler repeats some, so that all ranks have equally many",
    )
    script.remove_argument(call, sampler, "")


def keep_last_batch(script: EditedScript, finding: Finding) -> None:
    """Remove drop_last=True."""
    call = script.call_at(line_of_finding(finding), "DataLoader")
    word = script.keyword(call, "drop_last")
    if word is None:
        raise CannotRepairError("the loader has no drop_last")
    script.remove_argument(call, word, "all samples are evaluated")


def evaluate_in_eval_mode(script: EditedScript, finding: Finding) -> None:
    """model.eval() before the evaluation, model.train() after it."""
    model = _model_at(script, line_of_finding(finding))
    statement: ast.stmt = script.loop_around(line_of_finding(finding))
    while isinstance(parent := script.source.parents[statement], ast.With):
        statement = parent
    script.source.insert_before(statement, f"{model}.eval()", "no dropout, and batch norm by its running statistics")
    script.source.insert_after(statement, f"{model}.train()", "training goes on in train mode")


def _model_at(script: EditedScript, line: int) -> str:
    """The name of the model that is called in a line. Raises `CannotRepairError` if none looks like one."""
    for call in script.calls_at(line):
        name = script.source.code(call.func).removesuffix(".module")
        if re.fullmatch(r"[\w.]+", name) and re.search(r"model|net|module|ddp|encoder|^self\.", name.lower()):
            return name
    raise CannotRepairError("the model has no name here")


def train_in_train_mode(script: EditedScript, finding: Finding) -> None:
    """model.train() before the training loop."""
    script.source.insert_before(
        script.loop_around(line_of_finding(finding)),
        f"{_model_at(script, line_of_finding(finding))}.train()",
        "the evaluation has left the model in eval mode",
    )


def dropout_by_mode(script: EditedScript, _: Finding) -> None:
    """F.dropout(x, p) -> F.dropout(x, p, training=self.training), and dropout_p of attention likewise."""
    edits = len(script.source.edits)
    reason = "no dropout in eval mode"
    for call in script.calls_of("dropout", "scaled_dot_product_attention"):
        scope = script.source.scope(call)
        has_self = isinstance(scope, ast.FunctionDef) and "self" in [each.arg for each in scope.args.args]
        probability = script.keyword(call, "dropout_p")
        if not has_self or script.source.code(call.func).startswith("self."):
            continue
        if probability is not None and "self.training" not in script.source.code(probability):
            text = script.source.code(probability.value)
            text = text if isinstance(probability.value, ast.Name | ast.Constant | ast.Attribute) else f"({text})"
            script.source.replace(probability.value, f"{text} if self.training else 0.0", reason)
        elif script.last_name(call) == "dropout" and not script.keyword(call, "training") and len(call.args) < 3:
            last = max([*call.args, *call.keywords], key=end_of)
            script.source.wrap(last, "", ", training=self.training", reason)
    if len(script.source.edits) == edits:
        raise CannotRepairError("no dropout that ignores the mode was found in a method")
