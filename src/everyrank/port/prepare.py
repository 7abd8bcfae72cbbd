"""Makes the edits of a port to Accelerate or Fabric, whose object wraps models and optimizers, runs backward and clips.

The library does not wrap the loaders: Accelerate would read a batch of the script's size on each rank, Fabric's
DistributedSampler would change the order, and both repeat samples if the ranks do not divide their number.
"""

from __future__ import annotations

import ast
import dataclasses
import re

from everyrank.audit.script import mentions_cuda
from everyrank.port.helpers import silencing_lines
from everyrank.port.idioms import installed_module
from everyrank.port.plan import Plan
from everyrank.port.source import Edit, NotPortedError, end_of, start_of

__all__ = ["PREPARES", "edit_prepared", "import_of", "keeps_wrapper", "put_in_block", "start_lines"]

PREPARES = "averages the gradients over the ranks"
# attributes with the same meaning on the wrapper
_SAME_ON_WRAPPER = {
    "train",
    "eval",
    "parameters",
    "zero_grad",
    "to",
    "cuda",
    "cpu",
    "modules",
    "requires_grad_",
    "training",
}
_CLIPS = {"clip_grad_norm_": {"max_norm", "norm_type"}, "clip_grad_value_": {"clip_value"}}


def edit_prepared(plan: Plan, starts_in_main: bool) -> None:
    """Make all edits for the object of a library, after those of the losses, loaders and files."""
    _prepare(plan)
    _unwrap_uses(plan)
    _edit_backwards(plan)
    _edit_clips(plan)
    _edit_devices(plan, starts_in_main)
    _note_differences(plan)


# --- the object


def import_of(plan: Plan) -> str:
    """Return the line that imports the library."""
    idiom = plan.idiom
    assert idiom is not None
    if idiom.object == "fabric":
        return f"from {installed_module(idiom) or idiom.modules[0]} import Fabric"
    names = "Accelerator, DistributedDataParallelKwargs" if plan.finds_unused else "Accelerator"
    return f"from accelerate import {names}"


def start_lines(plan: Plan, has_logging: bool) -> list[str]:
    """Return the lines that create the object and silence the other ranks."""
    idiom, name = plan.idiom, plan.object_name
    assert idiom is not None
    uses_gpu = mentions_cuda(plan.source.text)
    if idiom.object == "fabric":
        options = [
            *([] if uses_gpu else ['    accelerator="cpu",']),
            *(['    strategy="ddp_find_unused_parameters_true",'] if plan.finds_unused else []),
            '    devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),',
            '    num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),',
        ]
        lines = [f"{name} = Fabric(", *options, ")", f"{name}.launch()"]
    else:
        on_cpu = "not torch.accelerator.is_available()" if uses_gpu else "True"
        find_unused = ", kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]"
        unused_option = find_unused if plan.finds_unused else ""
        lines = [f'{name} = Accelerator(cpu={on_cpu}, mixed_precision="no"{unused_option})']
    silence = [
        'sys.stdout = open(os.devnull, "w")  # only rank 0 prints',
        *silencing_lines(has_logging, plan.has_wandb),
    ]
    return [*lines, f"if {plan.in_idiom('dist.get_rank() != 0')}:", *(f"    {line}" for line in silence)]


# --- models and optimizers


@dataclasses.dataclass(frozen=True)
class _Optimizer:
    """An optimizer that the script assigns to a name."""

    name: str
    call: ast.Call
    statement: ast.stmt


def _optimizers(plan: Plan) -> list[_Optimizer]:
    """Return the optimizers that the script assigns to a name, unless it uses the result of their step.

    The step of Accelerate's wrapper returns nothing.
    """
    source, optimizers = plan.source, list[_Optimizer]()
    used = {
        step.details["id"]
        for step in plan.of("step")
        if (call := source.at(step.span)) is not None and not isinstance(source.parents[call], ast.Expr)
    }
    for fact in plan.of("optimizer"):
        call = source.at(fact.span)
        if not fact.is_inner or not isinstance(call, ast.Call) or fact.details["id"] in used:
            continue
        statement = source.statement(call)
        is_simple = isinstance(statement, ast.Assign) and statement.value is call and len(statement.targets) == 1
        if is_simple and isinstance(statement.targets[0], ast.Name | ast.Attribute) and plan.once(call, "optimizer"):  # type: ignore[union-attr]
            optimizers.append(_Optimizer(source.code(statement.targets[0]), call, statement))  # type: ignore[union-attr]
    return optimizers


def _prepare(plan: Plan) -> None:
    """Pass each model and its optimizers to the library after both are ready."""
    source, idiom, name = plan.source, plan.idiom, plan.object_name
    assert idiom is not None
    unassigned, groups = _optimizers(plan), list[tuple[ast.stmt, list[str]]]()
    for _, model, last_preparation in plan.prepared:
        model_optimizers = [
            optimizer
            for optimizer in unassigned
            if _is_ready(plan, optimizer.statement, last_preparation)
            and (len(plan.prepared) == 1 or _models_of(source.code(optimizer.call)) == [model])
        ]
        unassigned = [optimizer for optimizer in unassigned if optimizer not in model_optimizers]
        groups.append((last_preparation, [model, *dict.fromkeys(optimizer.name for optimizer in model_optimizers)]))
    for optimizer in unassigned:  # first, because a model may be prepared after the block that ends with this statement
        call = idiom.prepare_optimizer.replace("{x}", name)
        source.insert_after(
            optimizer.statement, f"{optimizer.name} = {call}({optimizer.name})", f"an optimizer of {idiom.title}"
        )
    for last_preparation, names in groups:
        if (
            idiom.object == "accelerator"
            and _is_made_again(plan, last_preparation)
            and plan.once(last_preparation, "free")
        ):
            source.insert_after(
                last_preparation, f"{name}.free_memory()", "Accelerate keeps the models of earlier trainings"
            )
        lines = [f"sync_batch_norms({names[0]})"] if "sync_batch_norms" in plan.helpers else []
        lines.append(f"{', '.join(names)} = {idiom.prepare.replace('{x}', name)}({', '.join(names)})")
        source.insert_after(last_preparation, "\n".join(lines), PREPARES)


def _is_ready(plan: Plan, statement: ast.stmt, last: ast.stmt) -> bool:
    """Whether a statement, perhaps in a branch of an `if`, has been executed after `last`."""
    block = plan.source.block(last)
    for node in plan.source.ancestors(statement):
        if node in block:
            return node.lineno <= last.lineno  # type: ignore[attr-defined]
        if node is not statement and not isinstance(node, ast.If):
            return False
    return False


def _is_made_again(plan: Plan, last: ast.stmt) -> bool:
    """Whether a model is created several times, as in a cross validation."""
    spans: dict[tuple[int, int, int, int], set[int]] = {}
    for fact in plan.of("optimizer"):
        spans.setdefault(fact.span, set()).add(fact.details["id"])
    return bool(plan.source.loops(last)) or any(len(ids) > 1 for ids in spans.values())


def _models_of(call: str) -> list[str]:
    """Return the models whose parameters are passed to an optimizer."""
    return re.findall(r"([\w.]+)\.parameters\(\)", call)


def _unwrap_uses(plan: Plan) -> None:
    """Let evaluation, saving and other methods use the model in the wrapper."""
    source = plan.source
    for owner, name, last_preparation in plan.prepared:
        root = source.around(owner, ast.ClassDef) if "." in name else owner
        for node in ast.walk(root or source.tree):
            is_loaded = isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
            if not is_loaded or source.code(node) != name or node in plan.training_uses:
                continue
            is_before = (
                source.scope(node) is source.scope(last_preparation) and node.lineno <= end_of(last_preparation)[0]  # type: ignore[attr-defined]
            )
            if is_before or _is_other(plan, node, name, owner) or keeps_wrapper(plan, node):
                continue
            if plan.once(node, "module"):
                source.replace(node, plan.unwrapped(name), "the model itself, without communication")


def _is_other(plan: Plan, node: ast.AST, name: str, owner: ast.AST) -> bool:
    """Whether a function around the node has a local variable with this name."""
    first = name.partition(".")[0]
    for scope in plan.source.ancestors(node):
        if scope is owner or not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        arguments = {argument.arg for argument in ast.walk(scope.args) if isinstance(argument, ast.arg)}
        is_local = isinstance(scope, ast.FunctionDef) and any(
            plan.source.scope(each) is scope for each in plan.source.stores(name, scope)
        )
        if "." not in name and (first in arguments or is_local):
            return True
    return False


def keeps_wrapper(plan: Plan, node: ast.AST) -> bool:
    """Whether the wrapper can be used for this name of a model.

    It can if an attribute means the same, or for a call in a branch of the training that was not run.
    """
    source, parent = plan.source, plan.source.parents[node]
    same = _SAME_ON_WRAPPER | (plan.idiom.passed_on if plan.idiom is not None else set[str]())
    if isinstance(parent, ast.Attribute):
        return parent.attr in same
    if not isinstance(parent, ast.Call) or parent.func is not node:
        return False
    was_run = any(source.at(fact.span) is parent for fact in plan.of("forward"))
    trains = {source.scope(call) for fact in plan.training_forwards if (call := source.at(fact.span)) is not None}
    return not was_run and source.scope(node) in trains


# --- backward, clipping, devices


def _edit_backwards(plan: Plan) -> None:
    """Replace `loss.backward()` by `accelerator.backward(loss)`."""
    source, name = plan.source, plan.object_name
    for fact in plan.of("backward"):
        call = source.at(fact.span)
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        if not plan.once(call, "object"):
            continue
        if call.args:
            raise NotPortedError(call.lineno, "this backward has positional options: write retain_graph=...")
        (line, column), start = end_of(call.func.value), start_of(call)
        has_brackets = source.is_in_brackets(call.func.value) and start_of(call.func.value) == (start[0], start[1] + 1)
        func_line, func_column = end_of(call.func)
        opening = source.lines[func_line - 1].find(b"(", func_column)
        _put_before(plan, start, (start[0], start[1] + has_brackets), f"{name}.backward(")
        if not has_brackets:  # keep outer brackets
            between = source.lines[line - 1][column : None if line != func_line else func_column]
            column += between.find(b".") if b"." in between else 0
        source.edit((line, column), (func_line, opening + 1), ", " if call.keywords else "", "")


def _put_before(plan: Plan, start: tuple[int, int], end: tuple[int, int], text: str) -> None:
    """Put text before an expression and the text that already wraps it, and after inserted lines before it."""
    edits = plan.source.edits
    positions = [number for number, edit in enumerate(edits) if edit.start == start and not edit.text.endswith("\n")]
    reason = f"{plan.idiom.title} runs the backward" if plan.idiom is not None else ""
    edits.insert(positions[0] if positions else len(edits), Edit(start, end, text, reason))


def _edit_clips(plan: Plan) -> None:
    """Clip gradients through the object, if its function means the same."""
    source, idiom = plan.source, plan.idiom
    assert idiom is not None
    for node in ast.walk(source.tree):
        kind = source.code(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        if not isinstance(node, ast.Call) or kind not in _CLIPS or not node.args:
            continue
        keywords = {keyword.arg: source.code(keyword.value) for keyword in node.keywords}
        if not keywords.keys() <= _CLIPS[kind] or len(node.args) + len(keywords) < 2:
            continue
        reason = f"{idiom.title} clips the gradients"
        if idiom.object == "accelerator":
            source.replace(node.func, f"{plan.object_name}.{kind}", reason)
        elif kind == "clip_grad_norm_" and (names := _clipped(plan, node)):
            limit = keywords.pop("max_norm", source.code(node.args[1]) if len(node.args) > 1 else "")
            other_options = "".join(f", {keyword}={value}" for keyword, value in keywords.items())
            call_text = (
                f"{plan.object_name}.clip_gradients({names}, max_norm={limit}{other_options}, error_if_nonfinite=False)"
            )
            source.replace(node, call_text, reason)


def _clipped(plan: Plan, node: ast.Call) -> str:
    """Return "model, optimizer" if the call clips all parameters of the only model and optimizer; else ""."""
    source, argument = plan.source, node.args[0]
    calls = {source.at(fact.span): fact for fact in plan.of("optimizer") if fact.is_inner}
    is_all = (
        isinstance(argument, ast.Call)
        and isinstance(argument.func, ast.Attribute)
        and argument.func.attr == "parameters"
    )
    if not is_all or len(calls) != 1 or len(plan.prepared) != 1 or len(node.args) > 2:
        return ""
    optimizer_call = next(iter(calls))
    model = source.code(argument.func.value)  # type: ignore[union-attr]
    is_wrapper = model == plan.prepared[0][1] or model in [name for _, name, _ in plan.passed_models]
    for fact in plan.of("step"):
        step = source.at(fact.span)
        if not isinstance(step, ast.Call) or source.scope(step) is not source.scope(node):
            continue
        is_scaled = (
            bool(step.args) and isinstance(step.func, ast.Attribute) and "scaler" in source.code(step.func.value)
        )
        stepped = step.args[0] if is_scaled else step.func.value if isinstance(step.func, ast.Attribute) else None
        if (
            stepped is not None
            and is_wrapper
            and optimizer_call is not None
            and len(_models_of(source.code(optimizer_call))) == 1
        ):
            return f"{model}, {source.code(stepped)}"
    return ""


def _edit_devices(plan: Plan, starts_in_main: bool) -> None:
    """Replace `device = torch.device(...)` by the device of the object, if the object exists before it."""
    source = plan.source
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1 or not mentions_cuda(source.code(node)):
            continue
        target, value = source.code(node.targets[0]), source.code(node.value)
        is_device = target.rpartition(".")[2].endswith("device") and value.startswith(
            ("torch.device(", "torch.accelerator.current_accelerator(")
        )
        is_too_early = starts_in_main and source.scope(node) is source.tree
        if not is_device or is_too_early:
            continue
        for inner in ast.walk(scope := source.scope(node)):  # also the CPU device in its `else`
            is_same_target = isinstance(inner, ast.Assign) and source.code(inner.targets[0]) == target
            if (
                isinstance(inner, ast.Assign)
                and is_same_target
                and source.scope(inner) is scope
                and plan.once(inner, "device")
            ):
                source.edits = [edit for edit in source.edits if not _is_within(edit, inner.value)]
                source.replace(inner.value, f"{plan.object_name}.device", "each rank has its own device")


def _is_within(edit: Edit, node: ast.AST) -> bool:
    return start_of(node) <= edit.start and edit.end <= end_of(node)


def _note_differences(plan: Plan) -> None:
    """Note what the library would do differently and the port leaves to the script."""
    source, idiom = plan.source, plan.idiom
    assert idiom is not None
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        kind = source.code(node.func).rpartition(".")[2]
        if kind == "GradScaler":
            plan.note(
                node.lineno,
                f"your GradScaler and autocast are kept; the mixed precision of {idiom.title} would be added to them",
            )
        if idiom.object == "accelerator" and (kind.endswith(("LR", "LROnPlateau")) or "schedule" in kind):
            plan.note(node.lineno, "this schedule is not prepared: Accelerate would step it once for each rank")


# --- accumulation


def put_in_block(plan: Plan, statements: list[ast.stmt], header: str, reason: str) -> bool:
    """Put statements, with the lines inserted between them, under `header`; False if they cannot be moved."""
    source = plan.source
    first, last_line = statements[0], end_of(statements[-1])[0]
    moved_lines = range(first.lineno, last_line + 1)
    has_long_text = any(
        isinstance(node, ast.Constant | ast.JoinedStr) and node.lineno != node.end_lineno
        for statement in statements
        for node in ast.walk(statement)
    )
    is_moved = any(edit.text == source.unit and edit.start[0] in moved_lines for edit in source.edits)
    if has_long_text or is_moved or any(source.shares_line(each) for each in statements):
        return False
    source.edits = [
        dataclasses.replace(edit, text=_indented(edit.text, source.unit))
        if edit.start == edit.end
        and edit.start[1] == 0
        and edit.text.endswith("\n")
        and first.lineno < edit.start[0] <= last_line
        else edit
        for edit in source.edits
    ]
    source.insert_before(first, header, reason)
    source.edits += [
        Edit((line, 0), (line, 0), source.unit, "") for line in moved_lines if source.lines[line - 1].strip()
    ]
    return True


def _indented(text: str, unit: str) -> str:
    return "".join(unit + line if line.strip() else line for line in text.splitlines(keepends=True))
