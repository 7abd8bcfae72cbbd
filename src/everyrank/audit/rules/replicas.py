"""Checks that all ranks have the same parameters and buffers, and that all parameters are trained."""

from __future__ import annotations

from collections import defaultdict

from everyrank.audit.events import (
    BufferModule,
    CollectiveCall,
    EvalForward,
    Forward,
    FrozenModule,
    Opaque,
    OptimizerMade,
    OptimizerStep,
    SeedSet,
    Uninitialised,
    Wrap,
)
from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings

__all__ = ["check_replicas"]


def check_replicas(evidence: Evidence, findings: Findings) -> None:
    """Compare parameters before each update, and parameters and buffers at each evaluation."""
    _check_wrapper(evidence, findings)
    for event in evidence.all_of(Opaque):
        findings.add_unchecked(event.message)
    if evidence.world_size > 1:
        if not evidence.is_opaque:
            _check_parameters(evidence, findings)
        _check_rates(evidence, findings)
        _check_evaluations(evidence, findings)
        _check_outside_buffers(evidence, findings)
        if not evidence.is_split:
            _check_frozen(evidence, findings)
            _check_averaged(evidence, findings)
    for event in evidence.of(evidence.ranks[0], Uninitialised):
        findings.add(
            "FAIL",
            "weights.uninitialised",
            event.line,
            f"{event.num} parameters get no value after to_empty: {', '.join(event.names[:3])}",
            "call reset_parameters() on each module, or load a checkpoint, before the first forward",
        )
    _check_not_stepped(evidence, findings)


def _check_wrapper(evidence: Evidence, findings: Findings) -> None:
    for event in evidence.all_of(Forward):
        if event.bypasses_wrapper and event.is_grad:
            findings.add(
                "FAIL",
                "replicas.unwrapped",
                event.line,
                "a forward with gradients bypasses the DistributedDataParallel wrapper, so no gradient is averaged",
                "call the wrapper, not the wrapped model (model.module)",
            )
    is_parallel = any(evidence.all_of(Wrap)) or any(step.is_sharded for step in evidence.all_of(OptimizerStep))
    never_communicates = evidence.sees_functions and not evidence.all_of(CollectiveCall) and not evidence.calls_by_rpc
    # replicas that are equal at the end use communication that is not recorded (Horovod, MPI), or equal data
    last_steps = list(evidence.steps.values())[-1:]
    differ = any(len({tuple(step.checksums.values()) for step in steps.values()}) > 1 for steps in last_steps)
    if evidence.world_size > 1 and not is_parallel and never_communicates and differ:
        steps = evidence.all_of(OptimizerStep)
        findings.add(
            "FAIL",
            "replicas.alone",
            steps[0].line if steps else "",
            f"{evidence.world_size} processes train without communication, so each trains a separate model",
            "open a process group and wrap the model: DistributedDataParallel(model)",
        )


def _check_parameters(evidence: Evidence, findings: Findings) -> None:
    for update, steps in evidence.steps.items():
        first = steps[evidence.ranks[0]]
        # if the shapes differ, the ranks have different shards of the model
        if not first.checksums or len({step.shapes for step in steps.values()}) > 1:
            continue
        # in order, because a rank that steps before its first forward does not know the names
        checksums = zip(*(step.checksums.values() for step in steps.values()), strict=False)
        names = [name for name, of_ranks in zip(first.checksums, checksums, strict=False) if len(set(of_ranks)) > 1]
        if names and not findings.has("replicas.alone"):
            start = f"after update {update - 1}" if update > min(evidence.steps) else "before the first update"
            differing_ranks = [
                rank for rank, step in steps.items() if [*step.checksums.values()] != [*first.checksums.values()]
            ]
            seed, reason = _differing_seeds(evidence) if update == min(evidence.steps) else ("", "")
            findings.add(
                "NOTE" if evidence.is_split or evidence.averages_parameters else "FAIL",
                "replicas.drift",
                seed or first.line,
                f"{len(names)} of {len(first.checksums)} parameters differ between the ranks {start}: "
                f"{', '.join(names[:4])} (rank 0 and rank {', '.join(map(str, differing_ranks))}){reason}",
                "start with the weights of rank 0 on all ranks, and average every gradient",
                (first.line, *(_broadcasts(evidence) if update == min(evidence.steps) else ())),
            )
            return


def _differing_seeds(evidence: Evidence) -> tuple[str, str]:
    """The line that gives each rank a different seed before the optimizer is constructed, and a note; "" if none."""
    seeds_by_rank: list[list[SeedSet]] = []
    for rank in evidence.ranks:
        made_time = next((event.time for event in evidence.of(rank, OptimizerMade)), 0.0)
        seeds = [event for event in evidence.of(rank, SeedSet) if event.library == "torch"]
        seeds_by_rank.append([event for event in seeds if event.time < made_time])
    for events in zip(*seeds_by_rank, strict=False):
        if len({event.seed for event in events}) > 1:
            return events[0].line, f"; seeds here: {', '.join(str(event.seed) for event in events)}"
    return "", "" if any(seeds_by_rank) else "; no torch.manual_seed before the optimizer was made"


def _broadcasts(evidence: Evidence) -> tuple[str, ...]:
    """Lines that broadcast before the first update, which may be wrong: gloo sends a view in memory order."""
    events = [event for event in evidence.of(evidence.ranks[0], CollectiveCall) if event.op == "broadcast_"]
    return tuple(dict.fromkeys(line for event in events if not event.update for line in event.lines[:1]))


def _check_rates(evidence: Evidence, findings: Findings) -> None:
    """Find ranks that use different learning rates in the same update."""
    for update, steps in evidence.steps.items():
        rates = {rank: tuple(step.rates) for rank, step in steps.items()}
        if len(set(rates.values())) > 1 and not evidence.is_split:
            # the parameter group that differs, unless the ranks have different numbers of groups
            groups = list(zip(*rates.values(), strict=False))
            group = next((index for index, of_ranks in enumerate(groups) if len(set(of_ranks)) > 1), 0)
            shown_rates = ", ".join(
                f"{rank_rates[group]:.3g} on rank {rank}" for rank, rank_rates in rates.items() if rank_rates
            )
            findings.add(
                "FAIL",
                "replicas.rate",
                steps[evidence.ranks[0]].line,
                f"the ranks step with different learning rates since update {update}: {shown_rates}",
                "compute the learning rate from the same number on all ranks: all-reduce it, or broadcast rank 0's",
            )
            return


def _check_evaluations(evidence: Evidence, findings: Findings) -> None:
    if evidence.is_split:
        return
    for is_first, events in _eval_forwards_by_model(evidence):
        line = events[0].line
        has_other_parameters = len({event.parameters for event in events}) > 1 and not evidence.is_opaque
        if has_other_parameters and not is_first:
            text = "the ranks evaluate a second model, such as a moving average, with different parameters"
            findings.add("WARN", "replicas.drift", line, text, "update it on all ranks, or evaluate it only on rank 0")
            return
        if has_other_parameters:
            text = "parameters differ between the ranks when they evaluate"
            findings.add("FAIL", "replicas.drift", line, text, "average every gradient, or evaluate rank 0's model")
            return
        if len({event.buffers for event in events}) > 1:
            findings.add(
                "WARN",
                "replicas.buffers",
                line,
                "buffers (the statistics of batch norm) differ between the ranks when they evaluate",
                "use SyncBatchNorm, or broadcast rank 0's buffers before the evaluation",
                (events[0].mode_at, *(event.line for event in evidence.of(evidence.ranks[0], Wrap)[:1])),
            )
            return


def _check_outside_buffers(evidence: Evidence, findings: Findings) -> None:
    """Find drifting buffers of modules outside the wrapped model, which DistributedDataParallel does not broadcast."""
    calls = {rank: _buffer_calls(evidence, rank) for rank in evidence.ranks}
    first = calls[evidence.ranks[0]]
    reported: set[str] = set()
    for key in sorted(set(first).intersection(*calls.values())):
        event = first[key]
        for name in event.buffers:
            checksums = {rank_calls[key].buffers.get(name) for rank_calls in calls.values()}
            changes = (
                len({other_call.buffers.get(name) for other_call in first.values() if other_call.line == event.line})
                > 1
            )
            label = f"{event.name}.{name}"
            if len(checksums) > 1 and None not in checksums and changes and label not in reported:
                reported.add(label)
                findings.add(
                    "WARN",
                    "replicas.buffers",
                    event.line,
                    f"buffer {label} differs between the ranks since update {event.update}: "
                    "the module is not part of the wrapped model, so its buffers are not synchronised",
                    "all-reduce its inputs, for example dist.all_reduce(mean); mean /= dist.get_world_size()",
                )


def _check_frozen(evidence: Evidence, findings: Findings) -> None:
    """Find modules that are never trained, such as a random projection, and have other weights on each rank."""
    by_rank = [evidence.of(rank, FrozenModule) for rank in evidence.ranks]
    for events in zip(*([event for event in of_rank if not event.update] for of_rank in by_rank), strict=False):
        first = events[0]
        if any((event.line, event.name) != (first.line, first.name) for event in events):
            return  # the ranks call different modules
        names = [name for name in first.tensors if len({event.tensors.get(name) for event in events}) > 1]
        if names:
            findings.add(
                "WARN",
                "replicas.frozen",
                first.line,
                f"{first.name} is never trained, and {len(names)} of its {len(first.tensors)} tensors differ between "
                f"the ranks: {', '.join(names[:3])}",
                "construct it with the same seed on all ranks, or broadcast its tensors from rank 0",
            )


def _check_averaged(evidence: Evidence, findings: Findings) -> None:
    """Find a module such as a moving average that all ranks evaluate, but that not all of them update."""
    if findings.has("replicas.") or evidence.is_opaque:
        return
    by_rank = [evidence.of(rank, FrozenModule) for rank in evidence.ranks]
    later: list[dict[tuple[str, str], FrozenModule]] = [{} for _ in by_rank]
    for calls, events in zip(later, by_rank, strict=True):
        for event in events:  # a module comes before the modules in it
            if event.update:
                calls.setdefault((event.line, event.name), event)
    for key, first in later[0].items():
        events = [of_rank[key] for of_rank in later if key in of_rank]
        is_on_all = len(events) == len(later) and len({event.update for event in events}) == 1
        if is_on_all and any(event.tensors != first.tensors for event in events):
            findings.add(
                "WARN",
                "replicas.drift",
                first.line,
                f"the ranks evaluate {first.name}, which no optimizer trains, with different parameters",
                "update it on all ranks, or evaluate it only on rank 0",
            )
            return


def _buffer_calls(evidence: Evidence, rank: int) -> dict[tuple[int, str, int], BufferModule]:
    """The calls by (update, line, number of the call from that line in the update)."""
    calls: dict[tuple[int, str, int], BufferModule] = {}
    for event in evidence.of(rank, BufferModule):
        number = sum(update == event.update and line == event.line for update, line, _ in calls)
        calls[event.update, event.line, number] = event
    return calls


def _eval_forwards_by_model(evidence: Evidence) -> list[tuple[bool, list[EvalForward]]]:
    """The first forward of each model in each evaluation: whether the model is its first, and the forward on each rank.

    Only the first model is returned if the ranks evaluate different numbers of models: rank 0 may have another one.
    Later forwards of a model are left out, because ranks have different numbers of batches.
    """
    by_rank: list[dict[int, list[EvalForward]]] = []
    for rank in evidence.ranks:
        models: dict[tuple[int, str, int], EvalForward] = {}
        for event in evidence.evaluation_forwards(rank):
            models.setdefault((event.update, event.line, event.parameters), event)
        by_update: dict[int, list[EvalForward]] = defaultdict(list)
        for event in models.values():
            by_update[event.update].append(event)
        by_rank.append(by_update)
    forwards: list[tuple[bool, list[EvalForward]]] = []
    for update in sorted(set[int](by_rank[0]).intersection(*by_rank)):
        num_models = {len(of_rank[update]) for of_rank in by_rank}
        count = num_models.pop() if len(num_models) == 1 else 1
        forwards += [(not index, [of_rank[update][index] for of_rank in by_rank]) for index in range(count)]
    # at different lines they may be forwards of different models
    return [(is_first, events) for is_first, events in forwards if len({event.line for event in events}) == 1]


def _check_not_stepped(evidence: Evidence, findings: Findings) -> None:
    """Find parameters that have a gradient and belong to no optimizer."""
    steps = evidence.of(evidence.ranks[0], OptimizerStep)
    if not steps:
        return
    never_stepped = set(steps[0].not_stepped).intersection(*(step.not_stepped for step in steps))
    if never_stepped:
        findings.add(
            "FAIL",
            "weights.not-stepped",
            next((event.line for event in evidence.of(evidence.ranks[0], OptimizerMade)), steps[0].line),
            f"{len(never_stepped)} parameters get gradients, but no optimizer has them: "
            f"{', '.join(sorted(never_stepped)[:3])}",
            "construct the optimizer after fully_shard, and after any other code that replaces parameters",
        )
