"""Edits of loaders, samplers and splits."""

from __future__ import annotations

import ast

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
    "divide_by_sampler",
    "one_seed_for_the_sampler",
    "remove_rank_arguments",
    "set_epoch",
    "shuffle_by_the_sampler",
    "split_with_fixed_seed",
]


def divide_by_sampler(script: EditedScript, finding: Finding) -> None:
    """DataLoader(data, shuffle=True) -> DataLoader(data, sampler=DistributedSampler(data, shuffle=True))."""
    source, call = script.source, script.call_at(line_of_finding(finding), "DataLoader")
    data = source.code(script.dataset_of(call))
    if any(script.keyword(call, name) for name in ("sampler", "batch_sampler")) or len(call.args) > 3:
        raise CannotRepairError("the loader already has a sampler")
    sampler = script.imported("torch.utils.data.distributed", "DistributedSampler")
    reason = "the sampler gives each rank its own samples"
    shuffle = call.args[2] if len(call.args) > 2 else script.keyword(call, "shuffle")
    value = shuffle.value if isinstance(shuffle, ast.keyword) else shuffle
    shuffle_argument = f"shuffle={source.code(value)}" if value is not None else "shuffle=False"
    text = (
        f"sampler={sampler}({data})"
        if shuffle_argument == "shuffle=True"
        else f"sampler={sampler}({data}, {shuffle_argument})"
    )
    if shuffle:
        source.replace(shuffle, text, reason)
    else:
        last_argument = max([*call.args, *call.keywords], key=end_of)
        source.wrap(last_argument, "", f", {text}", reason)
    if shuffle_argument != "shuffle=False":
        _set_epoch_in_loops_over(script, name_of_loader(script, call))


def _set_epoch_in_loops_over(script: EditedScript, loader: str) -> None:
    for node in ast.walk(script.source.tree):
        if isinstance(node, ast.For) and loader and loader_of_loop(script, node) == loader:
            epoch = _find_or_name_epoch(script, node)
            if epoch:
                _insert_set_epoch(script, node, loader, epoch)


def _find_or_name_epoch(script: EditedScript, loop: ast.For) -> str:
    """Return the variable that counts the epochs around a loop; "" if there is none.

    It is the variable of the outer loop, which is renamed if it is `_`, or a parameter of the function.
    """
    outer_loops = [each for each in script.source.loops(loop) if each is not loop and isinstance(each, ast.For)]
    if outer_loops:
        target = outer_loops[0].target
        if isinstance(target, ast.Name):
            if target.id != "_":
                return target.id
            script.source.replace(target, "epoch", "the sampler needs the number of the epoch")
            return "epoch"
        return ""
    scope = script.source.scope(loop)
    names = [argument.arg for argument in scope.args.args] if isinstance(scope, ast.FunctionDef) else []
    return next((name for name in names if "epoch" in name.lower() and not name.lower().startswith("n")), "")


def _insert_set_epoch(script: EditedScript, loop: ast.For, loader: str, epoch: str) -> None:
    script.source.insert_before(loop, f"{loader}.sampler.set_epoch({epoch})", "each epoch has an order of its own")


def set_epoch(script: EditedScript, finding: Finding) -> None:
    """Insert loader.sampler.set_epoch(epoch) before the loop over the loader."""
    loop = script.loop_around(line_of_finding(finding))
    loader, epoch = loader_of_loop(script, loop), _find_or_name_epoch(script, loop)
    if not loader or not epoch:
        raise CannotRepairError("the loop has no named loader, or no variable that counts the epochs")
    _insert_set_epoch(script, loop, loader, epoch)


def shuffle_by_the_sampler(script: EditedScript, _: Finding) -> None:
    """DistributedSampler(data, shuffle=False) -> DistributedSampler(data), for the sampler of a training loader."""
    for call in script.calls_of("DistributedSampler"):
        argument = script.keyword(call, "shuffle")
        if argument is not None and script.source.code(argument.value) == "False" and "set_epoch" in script.source.text:
            script.remove_argument(call, argument, "the sampler shuffles, and set_epoch gives each epoch its own order")
            return
    raise CannotRepairError("no DistributedSampler with shuffle=False and set_epoch was found")


def one_seed_for_the_sampler(script: EditedScript, _: Finding) -> None:
    """DistributedSampler(data, seed=rank) -> DistributedSampler(data)."""
    samplers = script.calls_of("DistributedSampler")
    seeds = [(call, argument) for call in samplers if (argument := script.keyword(call, "seed")) is not None]
    if not seeds:
        raise CannotRepairError("no sampler has the argument seed")
    for call, argument in seeds:
        script.remove_argument(call, argument, "all ranks draw one order, and each reads its part of it")


def remove_rank_arguments(script: EditedScript, _: Finding) -> None:
    """DistributedSampler(data, 4, 0) -> DistributedSampler(data): world size and rank come from the process group."""
    for call in script.calls_of("DistributedSampler"):
        extra: list[ast.expr | ast.keyword] = [*call.args[1:3]]
        extra += [argument for argument in call.keywords if argument.arg in ("num_replicas", "rank")]
        if extra:
            kept = [script.source.code(call.args[0])] if call.args else []
            kept += [
                f"{name}={script.source.code(argument)}"
                for name, argument in zip(("shuffle", "seed", "drop_last"), call.args[3:], strict=False)
            ]
            kept += [
                script.source.code(argument)
                for argument in call.keywords
                if argument.arg not in ("num_replicas", "rank")
            ]
            name = script.source.code(call.func)
            script.source.replace(call, f"{name}({', '.join(kept)})", "world size and rank come from the process group")
            return
    raise CannotRepairError("no sampler has the arguments num_replicas or rank")


def split_with_fixed_seed(script: EditedScript, _: Finding) -> None:
    """Give random_split the generator torch.Generator().manual_seed(0)."""
    for call in script.calls_of("random_split"):
        generator_argument = script.keyword(call, "generator")
        generator = "torch.Generator().manual_seed(0)"
        reason = "all ranks split the dataset identically"
        if generator_argument is not None:
            script.source.replace(generator_argument.value, generator, reason)
        elif len(call.args) > 2:
            script.source.replace(call.args[2], generator, reason)
        else:
            last_argument = max([*call.args, *call.keywords], key=end_of)
            script.source.wrap(last_argument, "", f", generator={generator}", reason)
        return
    raise CannotRepairError("the script does not call random_split")
