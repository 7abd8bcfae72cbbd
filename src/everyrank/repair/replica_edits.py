"""Edits of the wrapper, of seeds, of schedules and of saving."""

from __future__ import annotations

import ast

from everyrank.audit import Finding
from everyrank.repair.edited_script import CannotRepairError, EditedScript, line_of_finding

__all__ = [
    "call_the_wrapper",
    "remove_wrapper_option",
    "same_rate_everywhere",
    "save_on_rank_0",
    "seed_by_rank",
    "seed_generator_by_rank",
    "start_with_rank_0",
    "step_schedule_once",
]

_WRAPPERS = ("DistributedDataParallel", "DDP", "fully_shard", "FSDP", "FullyShardedDataParallel")


def call_the_wrapper(script: EditedScript, finding: Finding) -> None:
    """model.module(x) -> model(x), also if the model in the wrapper has its own name."""
    reason = "the wrapper averages the gradients, its module does not"
    wrapped = {script.source.code(call.args[0]): call for call in script.calls_of(*_WRAPPERS) if call.args}
    for call in script.calls_at(line_of_finding(finding)):
        func, name = call.func, script.source.code(call.func)
        if isinstance(func, ast.Attribute) and func.attr == "module":
            script.source.replace(func, script.source.code(func.value), reason)
            return
        for store in script.source.stores(name, script.source.tree):  # name = model.module
            value = getattr(script.source.statement(store), "value", None)
            for node in ast.walk(value) if value is not None else ():
                if isinstance(node, ast.Attribute) and node.attr == "module":
                    script.source.replace(node, script.source.code(node.value), reason)
                    return
        statement = script.source.statement(wrapped[name]) if name in wrapped else None
        if isinstance(statement, ast.Assign) and script.source.code(statement.targets[0]) != name:
            script.source.replace(func, script.source.code(statement.targets[0]), reason)
            return
    raise CannotRepairError("no assignment of the model in the wrapper was found")


def seed_by_rank(script: EditedScript, _: Finding) -> None:
    """Insert torch.manual_seed(seed + rank) after the model is wrapped."""
    wraps = script.calls_of(*_WRAPPERS)
    if not wraps:
        raise CannotRepairError("no call that wraps the model was found")
    wrap = script.source.statement(wraps[0])
    block, reason = script.source.block(wrap), "each rank draws its own dropout masks and noise"
    seeds = [call for call in script.calls_of("manual_seed") if script.source.code(call.func) == "torch.manual_seed"]
    seeds = [call for call in seeds if call.args]
    later_seeds = [call for call in seeds if call.lineno > wrap.lineno and script.source.statement(call) in block]
    if later_seeds:
        _add_rank(script, later_seeds[-1].args[0], reason)
        return
    earlier_seeds = [call.args[0] for call in seeds if call.lineno < wrap.lineno]
    before, after = _brackets(earlier_seeds[-1]) if earlier_seeds else ("", "")
    seed = script.source.code(earlier_seeds[-1]) if earlier_seeds else "torch.initial_seed()"
    script.source.insert_after(wrap, f"torch.manual_seed({before}{seed}{after} + {script.dist}.get_rank())", reason)


def _add_rank(script: EditedScript, seed: ast.expr, reason: str) -> None:
    """Add the rank to a seed: seed + dist.get_rank()."""
    before, after = _brackets(seed)
    script.source.wrap(seed, before, f"{after} + {script.dist}.get_rank()", reason)


def _brackets(term: ast.expr) -> tuple[str, str]:
    """Return the brackets that an expression needs as a term of a sum: `(a or b) + rank`."""
    binds_less = isinstance(term, ast.BoolOp | ast.IfExp | ast.Compare | ast.Lambda | ast.NamedExpr) or (
        isinstance(term, ast.BinOp)
        and isinstance(term.op, ast.LShift | ast.RShift | ast.BitAnd | ast.BitOr | ast.BitXor)
    )
    return ("(", ")") if binds_less else ("", "")


def start_with_rank_0(script: EditedScript, _: Finding) -> None:
    """Broadcast the weights of rank 0 before the optimizer is created."""
    for call in (node for node in ast.walk(script.source.tree) if isinstance(node, ast.Call)):
        name = script.source.code(call.args[0]) if call.args else ""
        if name.endswith(".parameters()") and script.last_name(call)[:1].isupper():
            model = name.removesuffix(".parameters()")
            script.source.insert_before(
                script.source.statement(call),
                f"for tensor in {model}.state_dict().values():\n    {script.dist}.broadcast(tensor, 0)",
                "all ranks start with the weights of rank 0",
            )
            return
    raise CannotRepairError("the optimizer of model.parameters() was not found")


def seed_generator_by_rank(script: EditedScript, _: Finding) -> None:
    """Add the rank to the seed of a generator: torch.Generator().manual_seed(seed + rank)."""
    seeds = [call for call in script.calls_of("manual_seed") if script.source.code(call.func) != "torch.manual_seed"]
    for call in seeds:
        if call.args:
            _add_rank(script, call.args[0], "each rank draws its own random numbers")
            return
    raise CannotRepairError("no generator has a seed")


def step_schedule_once(script: EditedScript, finding: Finding) -> None:
    """Move schedule.step() out of a loop over the ranks."""
    statement = script.statement_at(line_of_finding(finding))
    loop = script.source.parents[statement]
    if not isinstance(loop, ast.For) or loop.body != [statement] or loop.orelse:
        raise CannotRepairError("the step of the schedule is not alone in a loop")
    script.source.replace(loop, script.source.code(statement), "one step of the schedule for each update")


def same_rate_everywhere(script: EditedScript, finding: Finding) -> None:
    """Average the metric of schedule.step(metric) over the ranks."""
    step = script.call_at(line_of_finding(finding), "step")
    if len(step.args) != 1:
        raise CannotRepairError("the step of the schedule has no metric")
    script.helpers.add("add_over_ranks")
    script.source.wrap(
        step.args[0],
        "add_over_ranks(float(",
        f")) / {script.dist}.get_world_size()",
        "all ranks see the same number, and lower their rates together",
    )


def save_on_rank_0(script: EditedScript, finding: Finding) -> None:
    """Put torch.save(...) under `if dist.get_rank() == 0:`."""
    statement = script.statement_at(line_of_finding(finding))
    script.source.put_under(statement, f"{script.dist}.get_rank() == 0", "one rank writes the file")


def remove_wrapper_option(script: EditedScript, finding: Finding) -> None:
    """Remove find_unused_parameters or bucket_cap_mb."""
    option = "find_unused_parameters" if finding.rule == "ddp.find-unused" else "bucket_cap_mb"
    for call in script.calls_at(line_of_finding(finding)):
        argument = script.keyword(call, option)
        if argument is not None:
            script.remove_argument(call, argument, "the default is faster here")
            return
    raise CannotRepairError(f"this line does not set {option}")
