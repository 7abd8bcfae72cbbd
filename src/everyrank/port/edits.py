"""Makes the edits that turn the script into a DistributedDataParallel script, from the facts of a run."""

from __future__ import annotations

import ast
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

from everyrank.port.accumulation import edit_accumulation
from everyrank.port.evaluation import edit_counts, edit_evaluations
from everyrank.port.facts import Fact
from everyrank.port.files import ScriptFiles
from everyrank.port.frame import add_frame, main_of
from everyrank.port.loss import edit_losses
from everyrank.port.model import edit_models
from everyrank.port.outputs import edit_writes
from everyrank.port.plan import Choice, Plan
from everyrank.port.prepare import edit_prepared
from everyrank.port.shards import whole_states
from everyrank.port.source import NotPortedError
from everyrank.port.states import edit_states

__all__ = ["edit_script", "refuse_distributed"]

# names that only a distributed script uses -> the library in the message
_DISTRIBUTED = {
    "init_process_group": "torch.distributed",
    "DistributedDataParallel": "DistributedDataParallel",
    "fully_shard": "FSDP",
    "Accelerator": "accelerate",
    "deepspeed": "DeepSpeed",
    "horovod": "Horovod",
    "LOCAL_RANK": "LOCAL_RANK",
    "lightning": "Lightning",
    "pytorch_lightning": "Lightning",
    "lightning_fabric": "Lightning",
}
_VISIBLE_DEVICES = {f"os.environ[{quote}CUDA_VISIBLE_DEVICES{quote}]" for quote in "\"'"}
# calls whose arguments are shown, or are weights of a mean
_SHOWING = {
    *("print", "write", "format", "debug", "info", "warning", "log", "add_scalar"),
    *("set_postfix", "set_postfix_str", "set_description", "update", "append"),
}
_NO_LAUNCHER = '"RANK" not in os.environ'
_DEVICE_REASON = "each rank has its own device"
_PART_REASON = "each rank takes its part of every batch"
_LOADERS = {
    "accelerate": "; accelerator.prepare would read a batch of this size on each rank, and repeat samples in the last",
    "fabric": "; Fabric's DistributedSampler would have another order, and repeat samples",
}


def edit_script(files: ScriptFiles, facts: Sequence[Fact], choice: Choice) -> Plan:
    """Edit the script for a choice; the result is in `Plan.source`. Raises `NotPortedError`."""
    plan = Plan(files, list(facts), choice)
    refuse_distributed(plan)
    backwards = plan.of("backward")
    if not backwards:
        raise NotPortedError(1, "no backward of this script was called in its first updates: nothing trains here")
    for gradient in plan.of("autograd.grad"):
        raise NotPortedError(
            gradient.line, "torch.autograd.grad bypasses DistributedDataParallel: average these gradients by hand"
        )
    if not backwards[0].is_inner:
        raise NotPortedError(
            backwards[0].line,
            f"the training loop is in {Path(backwards[0].file).name}, which the script imports: add "
            f"--with {os.path.relpath(backwards[0].file)}",
        )
    edit_loaders(plan)
    edit_models(plan)
    if choice.target == "fsdp":
        whole_states(plan)
    elif plan.idiom is None:
        edit_accumulation(plan)
    edit_losses(plan)
    edit_counts(plan)
    edit_evaluations(plan)
    edit_writes(plan)
    replace_leftovers(plan)
    if plan.idiom is not None:
        edit_prepared(plan, starts_in_main=main_of(plan) is not None)
        edit_accumulation(plan)  # last, because it moves all lines between a forward and its backward
    add_frame(plan)
    return plan


def refuse_distributed(plan: Plan) -> None:
    """Raise `NotPortedError` for a script that already uses several processes."""
    for node in ast.walk(plan.source.tree):
        names = []
        if isinstance(node, ast.Name):
            names = [node.id]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name.partition(".")[0] for alias in node.names]
            names += [(node.module or "").partition(".")[0]] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if name in _DISTRIBUTED:
                raise NotPortedError(
                    node.lineno,  # type: ignore[attr-defined]
                    f"the script already uses {_DISTRIBUTED[name]}: check it with everyrank audit",
                )


# --- data


def edit_loaders(plan: Plan) -> None:
    """Split the batches of the training loader over the ranks; without a loader, split the tensors of each batch."""
    source = plan.source
    training_ids = plan.training_loaders
    for loader in plan.of("loader"):
        if loader.details["id"] not in training_ids:
            continue
        if loader.details["is_stream"] or not loader.details["has_batches"]:
            raise NotPortedError(
                loader.line,
                "the samples come as a stream without indices: give each rank and each worker its own part in the "
                "dataset's __iter__",
            )
        if not loader.is_inner:
            raise NotPortedError(loader.line, f"the loader is made in {Path(loader.file).name}: make it in this script")
        call = source.at(loader.span)
        if call is None:
            raise NotPortedError(loader.line, "the call that makes the loader was not found")
        if plan.once(call):
            reason = f"each rank reads its part of every batch{_LOADERS.get(plan.choice.target, '')}"
            if plan.choice.sampler == "torch":
                if sampler := plan.custom_sampler(loader):
                    raise NotPortedError(
                        loader.line,
                        f"--sampler torch would read all samples of the dataset, in place of {sampler}: leave it out",
                    )
                reason = "DistributedSampler divides the samples over the ranks"
                plan.note(
                    loader.line,
                    "the order of DistributedSampler differs from one process, and it repeats samples if ranks do not "
                    "divide their number; the check compared a port with split batches",
                )
            plan.split_loader(call, reason)
            _replace_batch_size(plan, call)
    if not edit_states(plan) and not training_ids:
        _split_tensors(plan)


def _replace_batch_size(plan: Plan, call: ast.AST) -> None:
    """In the training loop, replace the batch size of the loader in sizes of tensors by this rank's number of samples.

    Sums and prints keep it: they count the samples of all ranks.
    """
    source = plan.source
    size = next(
        (source.code(keyword.value) for keyword in getattr(call, "keywords", []) if keyword.arg == "batch_size"), ""
    )
    if not size or size.isdigit():
        return
    for backward in plan.of("backward"):
        node = source.at(backward.span)
        loop = next((inner for inner in source.loops(node) if isinstance(inner, ast.For)), None) if node else None
        if loop is None or not plan.once(loop, "batch size"):
            continue
        batch = _one_tensor(plan, loop)
        for inner in ast.walk(loop):
            is_read = isinstance(inner, ast.Name | ast.Attribute) and isinstance(inner.ctx, ast.Load)
            if is_read and source.code(inner) == size and batch and not _counts_samples(plan, inner):
                source.replace(inner, f"len({batch})", "the number of samples of this rank")


def _one_tensor(plan: Plan, loop: ast.For) -> str:
    """Return an expression for a tensor of the batch: `x`, or `batch["image"]` of a dictionary; "" without a name."""
    names = plan.batch_names(loop)
    for node in ast.walk(loop):
        match node:
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str())) if names == [name]:
                return plan.source.code(node)
            case _:
                pass
    return names[0] if names else ""


def _counts_samples(plan: Plan, size: ast.AST) -> bool:
    """Whether a batch size is part of a sum or print: `total += loss.item() * size`, `i * size + len(x)`."""
    source, child = plan.source, size
    for node in itertools.islice(source.ancestors(size), 1, None):
        if isinstance(node, ast.Call) and child is not node.func:
            return source.code(node.func).rpartition(".")[2] in _SHOWING
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            other = node.right if child is node.left else node.left
            if not isinstance(other, ast.Constant) and not _is_in_call(plan, node):
                return True
        if isinstance(node, ast.stmt):
            return isinstance(node, ast.AugAssign)
        child = node
    return False


def _is_in_call(plan: Plan, node: ast.AST) -> bool:
    """Whether an expression is an argument of a call in its statement."""
    arguments = itertools.takewhile(lambda each: not isinstance(each, ast.stmt), plan.source.ancestors(node))
    return any(isinstance(each, ast.Call) for each in arguments)


def _split_tensors(plan: Plan) -> None:
    """Without a loader: split the arguments of the training forward and its loss, after their assignments."""
    source, forwards = plan.source, plan.training_forwards
    names: list[str] = []
    num_cut = 0
    for fact in [*forwards, *(loss for loss in plan.of("loss") if loss.is_inner)]:
        call = source.at(fact.span)
        if isinstance(call, ast.Call):
            names += [name for name in _row_names(plan, fact, call) if name not in names]
            num_cut += _split_cuts(plan, call)
    call = source.at(forwards[0].span)
    scope = source.scope(call) if call else source.tree
    names_by_statement: dict[ast.stmt, list[str]] = {}
    names_by_loop: dict[ast.For, list[str]] = {}
    for name in names:
        stores = [node for node in source.stores(name, scope) if source.scope(node) is scope]
        stores = stores or [node for node in source.stores(name, source.tree) if source.scope(node) is source.tree]
        if not stores:
            continue
        statement = source.statement(stores[-1])
        if plan.is_data(statement):
            names_by_statement.setdefault(_after_branches(plan, statement, call), []).append(name)
        elif isinstance(statement, ast.For) and name in plan.batch_names(statement) and not _counts(statement):
            names_by_loop.setdefault(statement, []).append(name)
    if not names_by_statement and not names_by_loop and not num_cut:
        raise NotPortedError(
            forwards[0].line,
            "the assignment of the batch was not found. If the model gets all data in each update, read it in "
            "batches first; of one graph, sample the neighbours of some nodes. Else split it: tensor[rank::world_size]",
        )
    plan.helpers.add("part")
    for loop, split_names in names_by_loop.items():
        joined_names = ", ".join(split_names)
        source.insert_before(loop.body[0], f"{joined_names} = part({joined_names})", _PART_REASON)
    blocks = {id(source.block(statement)) for statement in names_by_statement}
    if len(blocks) == 1:  # together, because one tensor may be computed from another
        last = max(names_by_statement, key=lambda statement: statement.lineno)
        names_by_statement = {last: [name for split_names in names_by_statement.values() for name in split_names]}
    for statement, split_names in names_by_statement.items():
        joined_names = ", ".join(split_names)
        source.insert_after(statement, f"{joined_names} = part({joined_names})", _PART_REASON)


def _row_names(plan: Plan, fact: Fact, call: ast.Call) -> list[str]:
    """Return the names in a call of a model or loss whose tensors have a row for each sample.

    They are `x` of `model(x)` and `index` of `model(data[index])`, but not `w` of `cross_entropy(output, y, weight=w)`.
    """
    rows, shapes = fact.details.get("rows", 0), fact.details.get("shapes", [])
    no_rows: set[ast.AST] = {call.func}
    for argument, shape in zip(call.args, shapes, strict=False):
        if isinstance(argument, ast.Name) and rows and shape and shape[0] != rows:  # for example, a mask of positions
            no_rows.add(argument)
    for node in ast.walk(call):
        match node:
            case ast.keyword(arg="pos_weight", value=weight):
                no_rows.update(ast.walk(weight))
            case ast.keyword(arg="weight", value=weight) if fact.details.get("name") in ("cross_entropy", "nll_loss"):
                no_rows.update(ast.walk(weight))
            case ast.Subscript(value=data, slice=ast.Name() | ast.Attribute() | ast.Call()):
                no_rows.update(ast.walk(data))
            case ast.Subscript() if _is_cut(plan, node):
                no_rows.update(ast.walk(node))
            case _:
                pass
    nodes = [node for node in ast.walk(call) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    return list(dict.fromkeys(node.id for node in nodes if node not in no_rows))


def _is_cut(plan: Plan, node: ast.Subscript) -> bool:
    """Whether an expression takes the rows of a batch by the counter of a loop: `data[i : i + 32]`, `batches[i]`.

    `batches[i]` in `batches[i][j]` does, and the whole does not.
    """
    if any(isinstance(inner, ast.Subscript) and _is_cut(plan, inner) for inner in ast.walk(node.value)):
        return False
    index = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) and node.slice.elts else node.slice
    counters: set[str] = set()
    for loop in plan.source.loops(node):
        if isinstance(loop, ast.For) and _counts(loop):
            counters |= {each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)}
        counters |= {plan.source.code(each.target) for each in ast.walk(loop) if isinstance(each, ast.AugAssign)}
    return any(isinstance(each, ast.Name) and each.id in counters for each in ast.walk(index))


def _counts(loop: ast.For) -> bool:
    """Whether a loop is over numbers, such as `for i in tqdm(range(0, 100, 32))`."""
    return any(isinstance(node, ast.Name) and node.id == "range" for node in ast.walk(loop.iter))


def _split_cuts(plan: Plan, call: ast.Call) -> int:
    """Split the batches that are cut in the arguments of a call, wherever the loop cuts the same; return how many."""
    source = plan.source
    texts = {source.code(node) for node in ast.walk(call) if isinstance(node, ast.Subscript) and _is_cut(plan, node)}
    plan.cuts |= texts
    loops = source.loops(call)
    for node in ast.walk(loops[0]) if texts and loops else ():
        if isinstance(node, ast.Subscript) and source.code(node) in texts and plan.once(node, "cut"):
            source.wrap(node, "part(", ")", _PART_REASON)
    return len(texts)


def _after_branches(plan: Plan, statement: ast.stmt, call: ast.AST | None) -> ast.stmt:
    """Return the statement, or the outermost `if` with an `else` around it that does not hold the training forward."""
    parent = plan.source.parents[statement]
    while isinstance(parent, ast.If) and parent.orelse and not any(node is call for node in ast.walk(parent)):
        statement, parent = parent, plan.source.parents[parent]
    return statement


def replace_leftovers(plan: Plan) -> None:
    """Remove DataParallel, and replace the devices "cuda:0", torch.device("cuda", 0), .cuda(0) and .to(0) by "cuda"."""
    source = plan.source
    numbered: list[tuple[ast.expr, str]] = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and node.args and source.code(node.func).rpartition(".")[2] == "DataParallel":
            source.replace(node, source.code(node.args[0]), "DistributedDataParallel takes its place")
        if isinstance(node, ast.expr) and _names_device(node):
            numbered.append((node, '"cuda"'))
        elif isinstance(node, ast.Call) and (replacement := _device_number(plan, node)) is not None:
            numbered.append(replacement)
        if isinstance(node, ast.Expr) and source.code(node.value).startswith("torch.cuda.set_device("):
            source.put_under(node, _NO_LAUNCHER, _DEVICE_REASON)
        if isinstance(node, ast.Assign) and source.code(node.targets[0]) in _VISIBLE_DEVICES:
            source.put_under(node, _NO_LAUNCHER, _DEVICE_REASON)
    names: dict[str, ast.expr] = {}
    for node, _ in numbered:
        if not isinstance(node, ast.Name | ast.Attribute):  # a variable has one value
            names.setdefault(_number_in(source.code(node)), node)
    if len(names) > 1:
        line = list(names.values())[1].lineno
        plan.note(line, "this script names several devices: each rank has one, so remove the others")
        return
    for node, text in numbered:
        source.replace(node, text, _DEVICE_REASON)


def _number_in(code: str) -> str:
    """Return the number in the text of a device, such as "0" of `"cuda:0"`, `torch.device("cuda", 0)` and `0`."""
    match = re.fullmatch(r"""["']cuda:(\d+)["']|.*["']cuda["'], *(\d+)\)""", code)
    return code if match is None else match[1] or match[2]


def _device_number(plan: Plan, call: ast.Call) -> tuple[ast.expr, str] | None:
    """Return the expression in a call that is the number of a GPU, and the text in its place; None if there is none."""
    name = plan.source.code(call.func)
    match call:
        case ast.Call(func=ast.Attribute(attr="cuda"), args=[ast.Name() | ast.Attribute() as device, *_]):
            return device, '"cuda"'
        case ast.Call(func=ast.Attribute(attr="cuda" | "to"), args=[ast.Constant(value=int() as number) as device, *_]):
            return None if isinstance(number, bool) else (device, '"cuda"')
        case ast.Call(args=[ast.Constant(value="cuda"), _]) if name in ("torch.device", "device"):
            return call, f'{name}("cuda")'
        case _:
            return None


def _names_device(node: ast.expr) -> bool:
    """Whether the expression is the name of a numbered GPU: "cuda:0", f"cuda:{gpu}", "cuda:" + gpu, "cuda:%d" % gpu."""
    match node:
        case ast.Constant(value=str(text)):
            return re.fullmatch(r"cuda:\d+", text) is not None
        case ast.JoinedStr(values=[ast.Constant(value="cuda:"), ast.FormattedValue()]):
            return True
        case ast.BinOp(left=ast.Constant(value="cuda:" | "cuda:%d" | "cuda:%s")):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Constant(value="cuda:{}"), attr="format")):
            return True
        case _:
            return False
