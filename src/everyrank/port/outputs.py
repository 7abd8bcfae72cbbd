"""Files that the script writes are written by rank 0 alone; progress bars are shown by it."""

from __future__ import annotations

import ast

from everyrank.port.plan import Plan
from everyrank.port.source import Edit, NotPortedError, ScriptSource

__all__ = ["edit_writes"]

_IS_FIRST = "dist.get_rank() == 0"
# what a short run may not come to: functions that write a file, by their whole name or its last part
_WRITERS = {"torch.save", "os.mkdir", "plt.savefig"}
_WRITING_METHODS = {"save_pretrained", "save_image", "savefig", "to_csv", "imsave"}
_LOGGERS = {"SummaryWriter", "mlflow.start_run"}
_BARS = {"tqdm", "trange"}


def edit_writes(plan: Plan) -> None:
    """Put each statement that writes under `if dist.get_rank() == 0:`."""
    source, done, loggers = plan.source, set[ast.AST](), set[ast.AST]()
    nodes = [
        source.at(fact.span, (ast.Call, ast.With))
        for fact in plan.of("write")
        if not (fact.details["name"] == "save" and plan.choice.target == "fsdp")  # all ranks take part
    ]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            name = source.code(node.func)
            if _writes(plan, node, name):
                nodes.append(node)
            if name in _LOGGERS or name.rpartition(".")[2] == "SummaryWriter":
                plan.helpers.add("Silent")
                loggers.add(node)
                source.wrap(node, "(", f" if {_IS_FIRST} else Silent())", "only rank 0 logs")
            plan.has_wandb |= name == "wandb.init"
            if name.rpartition(".")[2] in _BARS and not any(word.arg in (None, "disable") for word in node.keywords):
                _hide_bar(plan, node)
    for node in nodes:
        if node is None or node in loggers:
            continue
        statement = source.statement(node)
        files = [
            each
            for each in source.ancestors(node)
            if isinstance(each, ast.With) and "open(" in source.code(each.items[0].context_expr)
        ]
        statement = files[-1] if files else statement
        if any(each in done for each in source.ancestors(statement)):
            continue
        if _is_all_of(node, statement, source):
            done.add(statement)
            _guard(plan, statement)
        elif plan.once(node, "rank 0 first") and isinstance(node, ast.Call):
            plan.helpers.add("rank_0_first")
            source.wrap(node, "rank_0_first(lambda: ", ")", "rank 0 downloads or creates it, then the others find it")


def _writes(plan: Plan, call: ast.Call, name: str) -> bool:
    """Whether a call writes or downloads a file, which only rank 0 should do."""
    if name == "torch.save" and plan.choice.target == "fsdp":
        return False  # all ranks take part
    downloads = any(word.arg == "download" and plan.source.code(word.value) != "False" for word in call.keywords)
    return downloads or name in _WRITERS or name.rpartition(".")[2] in _WRITING_METHODS


def _is_all_of(node: ast.AST, statement: ast.stmt, source: ScriptSource) -> bool:
    """Whether a statement only writes: it is the call, a `with open`, or a call that is given an open file."""
    if isinstance(statement, ast.With):
        return True
    is_open = isinstance(node, ast.Call) and source.code(node.func) == "open"
    return isinstance(statement, ast.Expr) and (statement.value is node or is_open)


def _guard(plan: Plan, statement: ast.stmt) -> None:
    source = plan.source
    if "exist_ok=True" in source.code(statement) or isinstance(source.parents.get(statement), ast.Try):
        return  # several ranks may do it
    try:
        source.put_under(statement, _IS_FIRST, "written once")
    except NotPortedError as error:
        plan.note(error.line, f"every rank writes here; {error.reason}")


def _hide_bar(plan: Plan, call: ast.Call) -> None:
    """Progress bars of the other ranks are not shown: they write to stderr."""
    position = (call.end_lineno or call.lineno, (call.end_col_offset or 1) - 1)
    before = plan.source.code(call)[:-1].rstrip()
    comma = "" if before.endswith((",", "(")) else ", "
    plan.source.edits.append(Edit(position, position, f"{comma}disable=dist.get_rank() != 0", "one progress bar"))
