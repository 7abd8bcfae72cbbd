"""Edits of the wrapper, of seeds and of what one rank writes."""

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
]


def call_the_wrapper(script: EditedScript, finding: Finding) -> None:
    """model.module(x) -> model(x)."""
    for call in script.calls_at(line_of_finding(finding)):
        func = call.func
        if isinstance(func, ast.Attribute) and func.attr == "module":
            script.source.replace(
                func, script.source.code(func.value), "the wrapper averages the gradients, its module does not"
            )
            return
    raise CannotRepairError("the model in the wrapper has a name of its own")


def _wrap_statement(script: EditedScript) -> ast.stmt:
    for name in ("DistributedDataParallel", "DDP", "fully_shard", "FSDP", "FullyShardedDataParallel"):
        for call in script.calls_of(name):
            return script.source.statement(call)
    raise CannotRepairError("where the model is wrapped was not found")


def seed_by_rank(script: EditedScript, _: Finding) -> None:
    """torch.manual_seed(seed + rank) once the model is wrapped."""
    wrap = _wrap_statement(script)
    reason = "each rank draws its own dropout masks and noise"
    seeds = [call for call in script.calls_of("manual_seed") if script.source.code(call.func) == "torch.manual_seed"]
    after = [call for call in seeds if call.lineno > wrap.lineno and call.args]
    if after:
        script.source.wrap(after[-1].args[0], "", f" + {script.dist}.get_rank()", reason)
        return
    seed = next((script.source.code(call.args[0]) for call in reversed(seeds) if call.args), "torch.initial_seed()")
    script.source.insert_after(wrap, f"torch.manual_seed({seed} + {script.dist}.get_rank())", reason)


def seed_generator_by_rank(script: EditedScript, _: Finding) -> None:
    """torch.Generator().manual_seed(seed + rank)."""
    seeds = [call for call in script.calls_of("manual_seed") if script.source.code(call.func) != "torch.manual_seed"]
    for call in seeds:
        if call.args:
            script.source.wrap(
                call.args[0], "", f" + {script.dist}.get_rank()", "each rank draws its own random numbers"
            )
            return
    raise CannotRepairError("no generator has a seed")


def same_rate_everywhere(script: EditedScript, finding: Finding) -> None:
    """schedule.step(metric): the metric is the mean over the ranks."""
    step = script.call_at(line_of_finding(finding), "step")
    if len(step.args) != 1:
        raise CannotRepairError("step is given no metric")
    script.helpers.add("add_over_ranks")
    script.source.wrap(
        step.args[0],
        "add_over_ranks(float(",
        f")) / {script.dist}.get_world_size()",
        "all ranks see the same number, and lower their rates together",
    )


def save_on_rank_0(script: EditedScript, finding: Finding) -> None:
    """If dist.get_rank() == 0: torch.save(...)."""
    statement = script.statement_at(line_of_finding(finding))
    script.source.put_under(statement, f"{script.dist}.get_rank() == 0", "one rank writes the file")


def remove_wrapper_option(script: EditedScript, finding: Finding) -> None:
    """Remove find_unused_parameters or bucket_cap_mb."""
    option = "find_unused_parameters" if finding.rule == "ddp.find-unused" else "bucket_cap_mb"
    for call in script.calls_at(line_of_finding(finding)):
        word = script.keyword(call, option)
        if word is not None:
            script.remove_argument(call, word, "the default is faster here")
            return
    raise CannotRepairError(f"{option} is not given in this line")
