"""Lets only rank 0 write files and show progress bars; other ranks read the files afterwards."""

from __future__ import annotations

import ast

from everyrank.port.plan import Plan
from everyrank.port.source import NotPortedError, ScriptSource, end_of, start_of

__all__ = ["edit_writes"]

_IS_RANK_0 = "dist.get_rank() == 0"
# functions that write a file, by their full name or its last part, for calls that a short run does not reach
_WRITERS = {
    *("torch.save", "plt.savefig", "np.save", "np.savez", "np.savez_compressed", "np.savetxt"),
    *("os.mkdir", "os.makedirs", "os.remove", "os.rename", "os.replace"),
    *("shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copytree", "shutil.move", "shutil.rmtree"),
}
_FOLDER_MAKERS = {"mkdir", "makedirs"}
_WRITING_METHODS = {
    "mkdir",
    "copyfile",
    "copytree",
    "rmtree",
    "save_pretrained",
    "save_image",
    "savefig",
    "to_csv",
    "imsave",
    "write_text",
    "write_bytes",
}
_WRITING_MODES = {"w", "wt", "wb", "a", "at", "ab"}
_LOGGERS = {"SummaryWriter", "mlflow.start_run"}
_EXISTENCE = ("exists", "isfile", "is_file")
_BARS = {"tqdm", "trange"}


def edit_writes(plan: Plan) -> None:
    """Put each statement that writes under `if dist.get_rank() == 0:`, and let ranks wait before they read it."""
    source, edited, loggers = plan.source, set[ast.AST](), set[ast.AST]()
    nodes = [
        source.at(fact.span, (ast.Call, ast.With))
        for fact in plan.of("write")
        if not (fact.details["name"] == "save" and plan.choice.target == "fsdp")  # all ranks must call it
    ]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            name = source.code(node.func)
            if _writes(plan, node, name):
                nodes.append(node)
            if name in _LOGGERS or name.rpartition(".")[2] == "SummaryWriter":
                plan.helpers.add("Silent")
                loggers.add(node)
                source.wrap(node, "(", f" if {_IS_RANK_0} else Silent())", "only rank 0 logs")
            plan.has_wandb |= name == "wandb.init"
            if name.rpartition(".")[2] in _BARS and not any(word.arg in (None, "disable") for word in node.keywords):
                _hide_bar(plan, node)
    for node in nodes:
        if node is None or node in loggers:
            continue
        statement = source.statement(node)
        with_statements = [
            node_around
            for node_around in source.ancestors(node)
            if isinstance(node_around, ast.With) and "open(" in source.code(node_around.items[0].context_expr)
        ]
        statement = with_statements[-1] if with_statements else statement
        if any(node_around in edited for node_around in source.ancestors(statement)):
            continue
        opened = _opened(plan, with_statements[-1].items[0].context_expr if with_statements else node)
        if opened is not None and _stays_on_all_ranks(plan, statement):
            edited.add(statement)
            path_text = source.code(opened)
            source.replace(opened, f"{path_text} if {_IS_RANK_0} else os.devnull", "the file is written once")
        elif _is_all_of(node, statement, source):
            edited.add(statement)
            _guard(plan, statement, node)
        elif plan.once(node, "rank 0 first") and isinstance(node, ast.Call):
            plan.helpers.add("rank_0_first")
            source.wrap(node, "rank_0_first(lambda: ", ")", "rank 0 downloads or creates it, then the others find it")
    _edit_reads(plan, edited)


def _edit_reads(plan: Plan, guarded: set[ast.AST]) -> None:
    """Let all ranks wait for rank 0 before they load a file that it saves in the same run."""
    source = plan.source
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call)]
    saved = {source.code(_file_of(plan, each, 1)) for each in calls if source.code(each.func) == "torch.save"} - {""}
    loads = [each for each in calls if source.code(each.func) == "torch.load"]
    nodes = [source.at(fact.span) for fact in plan.of("read")]
    nodes += [each for each in loads if source.code(_file_of(plan, each, 0)) in saved]
    for node in nodes:
        if node is None or any(each in guarded for each in source.ancestors(node)):
            continue
        with_statement = source.around(node, ast.With)
        is_opened = isinstance(with_statement, ast.With) and "open(" in source.code(
            with_statement.items[0].context_expr
        )
        statement = with_statement if is_opened and isinstance(with_statement, ast.stmt) else source.statement(node)
        if not plan.once(statement, "read"):
            continue
        tests = [source.code(each.test) for each in source.ancestors(node) if isinstance(each, ast.If)]
        if any(word in test for test in tests for word in _EXISTENCE):
            # a rank that finds the file would wait for ranks that skip this code
            plan.note(
                statement.lineno, "a rank may read this file while rank 0 writes it: write it before the training"
            )
        else:
            source.insert_before(statement, "dist.barrier()", "rank 0 has written the file before the others read it")


def _file_of(plan: Plan, call: ast.Call, index: int) -> ast.AST:
    """Return the file argument of a torch.save or torch.load; for an open file, the path of the `open` around it."""
    if index >= len(call.args):
        return ast.Module([], [])
    file, with_statement = call.args[index], plan.source.around(call, ast.With)
    if isinstance(with_statement, ast.With) and isinstance(file, ast.Name):
        for item in with_statement.items:
            is_file = item.optional_vars is not None and plan.source.code(item.optional_vars) == file.id
            if is_file and isinstance(item.context_expr, ast.Call) and item.context_expr.args:
                return item.context_expr.args[0]
    return file


def _writes(plan: Plan, call: ast.Call, name: str) -> bool:
    """Whether a call writes or downloads a file, which only rank 0 should do."""
    if name == "torch.save" and plan.choice.target == "fsdp":
        return False  # all ranks must call it
    downloads = any(word.arg == "download" and plan.source.code(word.value) != "False" for word in call.keywords)
    is_file = _opened(plan, call) is not None
    return downloads or is_file or name in _WRITERS or name.rpartition(".")[2] in _WRITING_METHODS


def _opened(plan: Plan, node: ast.AST) -> ast.expr | None:
    """Return the path of an `open(path, "w")`; None for other expressions."""
    if not isinstance(node, ast.Call) or plan.source.code(node.func) != "open" or not node.args:
        return None
    modes = [*node.args[1:2], *(word.value for word in node.keywords if word.arg == "mode")]
    is_simple = isinstance(node.args[0], ast.Constant | ast.Name | ast.Attribute | ast.Call | ast.JoinedStr | ast.BinOp)
    writes = any(isinstance(mode, ast.Constant) and mode.value in _WRITING_MODES for mode in modes)
    return node.args[0] if is_simple and writes else None


def _stays_on_all_ranks(plan: Plan, statement: ast.stmt) -> bool:
    """Whether all ranks execute a statement that opens a file, because it does more than one write."""
    if isinstance(statement, ast.With):
        saves_whole = plan.choice.target == "fsdp"  # all ranks must call it
        is_one_write = len(statement.body) == 1 and isinstance(statement.body[0], ast.Expr)
        return len(statement.items) == 1 and (saves_whole or not is_one_write or _trains(plan, statement))
    return isinstance(statement, ast.Assign)


def _trains(plan: Plan, statement: ast.stmt) -> bool:
    """Whether a statement runs the training, perhaps in functions that it calls, so all ranks have to execute it."""
    return any(
        start_of(statement) <= call.span[:2] and call.span[2:] <= end_of(statement)
        for fact in plan.of("backward")
        for call in fact.chain
    )


def _is_all_of(node: ast.AST, statement: ast.stmt, source: ScriptSource) -> bool:
    """Whether a statement only writes: it is the call, a `with open`, or a call with an open file."""
    if isinstance(statement, ast.With):
        return True
    is_open = isinstance(node, ast.Call) and source.code(node.func) == "open"
    return isinstance(statement, ast.Expr) and (statement.value is node or is_open)


def _guard(plan: Plan, statement: ast.stmt, node: ast.AST) -> None:
    source = plan.source
    name = source.code(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
    is_in_try = isinstance(source.parents.get(statement), ast.Try)
    if "exist_ok=True" in source.code(statement) or (is_in_try and name in _FOLDER_MAKERS):
        return  # a folder may be made by several ranks
    if _trains(plan, statement):
        plan.note(statement.lineno, "every rank writes here, because the training runs in the same block")
        return
    _note_part(plan, statement)
    try:
        source.put_under(statement, _IS_RANK_0, "written once")
    except NotPortedError as error:
        plan.note(error.line, f"every rank writes here; {error.reason}")


def _note_part(plan: Plan, statement: ast.stmt) -> None:
    """Leave a note where samples of a training batch are written: rank 0 has its part of them."""
    source = plan.source
    scopes = {source.scope(call) for fact in plan.training_forwards if (call := source.at(fact.span)) is not None}
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    if source.scope(statement) in scopes and (samples := [name for name in plan.data_names if name in names]):
        plan.note(statement.lineno, f"the output has only rank 0's part of {', '.join(samples)}")


def _hide_bar(plan: Plan, call: ast.Call) -> None:
    """Disable a progress bar on the other ranks, because it writes to stderr."""
    source, end = plan.source, end_of(call)
    disable, reason = "disable=dist.get_rank() != 0", "one progress bar"
    position = end[0], end[1] - 1
    before = source.code(call)[:-1].rstrip()
    arguments = [*call.args, *call.keywords]
    if arguments and end_of(arguments[-1]) == end:  # a generator that shares its brackets with the call
        source.edit(start_of(arguments[-1]), start_of(arguments[-1]), "(", reason)
        source.edit(position, position, f"), {disable}", "")
        return
    if arguments:
        line, column = max(end_of(argument) for argument in arguments)
        rest = source.lines[line - 1][column:].partition(b"#")[0].rstrip()
        if line < end[0] and any(
            b"#" in each for each in [source.lines[line - 1][column:], *source.lines[line : end[0]]]
        ):
            position, before = (line, column + len(rest)), rest.decode()  # before the comment
    comma = " " if before.endswith(",") else "" if before.endswith("(") else ", "
    source.edit(position, position, f"{comma}{disable}", reason)
