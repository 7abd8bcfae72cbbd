"""Files that the script writes are written by rank 0 alone; progress bars are shown by it."""

from __future__ import annotations

import ast

from everyrank.port.plan import Plan
from everyrank.port.source import Edit, NotPortedError

__all__ = ["edit_writes"]

_IS_FIRST = "dist.get_rank() == 0"
# what a short run may not come to: functions that write a file, by their whole name or its last part
_WRITERS = {"torch.save", "os.mkdir", "plt.savefig"}
_WRITING_METHODS = {"save_pretrained", "save_image", "savefig", "to_csv", "imsave"}
_LOGGERS = {"SummaryWriter", "wandb.init", "mlflow.start_run"}
_BARS = {"tqdm", "trange"}


def edit_writes(plan: Plan) -> None:
    """Put each statement that writes under `if dist.get_rank() == 0:`."""
    source, done = plan.source, set[ast.AST]()
    nodes = [source.at(fact.span, (ast.Call, ast.With)) for fact in plan.of("write")]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            name = source.code(node.func)
            if name in _WRITERS or name.rpartition(".")[2] in _WRITING_METHODS:
                nodes.append(node)
            if name in _LOGGERS or name.rpartition(".")[2] == "SummaryWriter":
                plan.note(node.lineno, f"every rank logs with {name}: let only rank 0 make it")
            if name.rpartition(".")[2] in _BARS and not any(word.arg in (None, "disable") for word in node.keywords):
                _hide_bar(plan, node)
    for node in nodes:
        if node is None:
            continue
        statement = source.statement(node)
        with_file = [
            each
            for each in source.ancestors(node)
            if isinstance(each, ast.With) and "open(" in source.code(each.items[0].context_expr)
        ]
        statement = with_file[-1] if with_file else statement
        if any(each in done for each in source.ancestors(statement)):
            continue
        done.add(statement)
        _guard(plan, statement)


def _guard(plan: Plan, statement: ast.stmt) -> None:
    source = plan.source
    text = source.code(statement)
    if "exist_ok=True" in text or isinstance(source.parents.get(statement), ast.Try):
        return  # several ranks may do it
    if not isinstance(statement, ast.Expr | ast.With):
        _let_rank_0_go_first(plan, statement)
        return
    try:
        source.put_under(statement, _IS_FIRST, "written once")
    except NotPortedError as error:
        plan.note(error.line, f"every rank writes here; {error.reason}")


def _let_rank_0_go_first(plan: Plan, statement: ast.stmt) -> None:
    """A statement that writes and returns something, such as a download: the other ranks find the files afterwards."""
    if plan.source.loops(statement) or not isinstance(statement, ast.Assign | ast.AnnAssign):
        plan.note(statement.lineno, "every rank writes here, and uses the result: run it once before")
        return
    source = plan.source
    source.insert_before(
        statement, "if dist.get_rank() != 0:\n" + source.unit + "dist.barrier()", "rank 0 downloads first"
    )
    source.insert_after(
        statement, "if dist.get_rank() == 0:\n" + source.unit + "dist.barrier()", "now the others find the files"
    )


def _hide_bar(plan: Plan, call: ast.Call) -> None:
    """Progress bars of the other ranks are not shown: they write to stderr."""
    position = (call.end_lineno or call.lineno, (call.end_col_offset or 1) - 1)
    before = plan.source.code(call)[:-1].rstrip()
    comma = "" if before.endswith((",", "(")) else ", "
    plan.source.edits.append(Edit(position, position, f"{comma}disable=dist.get_rank() != 0", "one progress bar"))
