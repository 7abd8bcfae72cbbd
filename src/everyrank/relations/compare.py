"""Runs the script again for each relation, and collects the differences."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from everyrank.audit import Audit, AuditOptions
from everyrank.audit.external_launch import external_rank
from everyrank.audit.finding import LEVELS, Finding, Findings, short_location
from everyrank.audit.script import find_script, starts_ranks_itself, user_source
from everyrank.errors import EveryrankError
from everyrank.relations.objects import judge_counters, judge_statistics
from everyrank.relations.precision import judge_rounded_updates
from everyrank.relations.ranks import (
    judge_evaluations,
    judge_ranks,
    misses_evaluation,
    num_comparable,
    num_with_same_inputs,
)
from everyrank.relations.recompute import judge_recomputation
from everyrank.relations.resume import ResumeCommand, judge_resume
from everyrank.relations.same import judge_settings
from everyrank.relations.samples import judge_equal_tensors, judge_samples, judge_skipped_batches, judge_uneven_passes
from everyrank.relations.schedule import has_schedule, judge_horizon
from everyrank.relations.updates import judge_updates
from everyrank.relations.workers import is_suspicious, judge_workers
from everyrank.rerun import Imposed, ScriptHost, ScriptRecording
from everyrank.rerun.batch_sizes import BATCH_SIZES, sizes_that_divide
from everyrank.rerun.recording import SHAPES_DIFFER

__all__ = [
    "RelationResults",
    "audit_by_relations",
    "compare_script",
    "joined_findings",
    "judge_script",
    "why_not_compared",
    "with_comparison",
    "with_resume",
    "with_settings",
]

_GRADIENT_RULES = ("gradient.", "loss.", "clip.", "replicas.", "random.", "weights.", "ddp.", "collective.", "data.")
_EXPLAINED_BY = {
    "ranks.gradient": _GRADIENT_RULES,
    "ranks.parameters": _GRADIENT_RULES,
    "ranks.own-gradient": _GRADIENT_RULES,
    "ranks.input": ("data.", "random."),
    "ranks.rate": ("schedule.", "replicas.rate"),
    "ranks.state": ("replicas.", "norm."),
    "ranks.draws": ("random.",),
    "ranks.printed": ("eval.",),
    "data.shared-samples": ("data.",),
    "data.frozen-workers": ("data.", "random."),
    "data.repeat": ("data.",),
    "data.untrained": ("data.",),
    "data.uneven-passes": ("data.",),
    "weights.not-stepped": ("weights.",),
    "recompute.state": ("replicas.buffers",),
    "schedule.horizon": ("schedule.",),
}
"""Rules, or kinds of rules, whose mistakes can cause each difference."""

_COMPLETE_RUN_SECONDS = 15.0  # only the end of a schedule needs a complete run
_PASS_BATCHES = 4  # batches of shortened epochs, if whole epochs are too long to reach an evaluation
_SHORT_UPDATES, _SHORT_SECONDS = 12, 6.0
_MAX_UPDATES = 20_000
_MAX_SIZES = 4  # names of integers to try as the batch size


@dataclasses.dataclass(frozen=True)
class RelationResults:
    """The results of all relations.

    findings   the differences
    unchecked  relations that could not be checked, with the reason
    seconds    total time of all runs
    num_equal  number of updates in which the ranks compute the same as one rank, up to rounding
    refuted    rules of the audit whose findings are no mistakes, as the comparison has shown
    num_runs   number of runs of the script
    """

    findings: tuple[Finding, ...]
    unchecked: tuple[str, ...]
    seconds: float
    num_equal: int = 0
    refuted: frozenset[str] = frozenset()
    num_runs: int = 0


def compare_script(
    python_args: Sequence[str],
    processes: int,
    *,
    updates: int = 48,
    seconds: float = 8.0,
    timeout_seconds: float = 120.0,
    pretend_cuda: bool = False,
) -> RelationResults:
    """Run a script on `processes` ranks and on one rank with the same batches, and compare.

    updates   number of updates to compare
    seconds   time after which the run on several ranks is ended

    Errors of the script are not raised: a relation that cannot be checked is in `unchecked`.

    Example:
        comparison = compare_script(["train.py", "--epochs", "2"], processes=2)

    """
    start, findings, num_equal = time.monotonic(), Findings(), 0
    host = ScriptHost(python_args, timeout_seconds, pretend_cuda, processes)
    try:
        with host:
            num_equal = judge_script(host, python_args, processes, findings, updates, seconds)
    except EveryrankError as error:
        findings.add_unchecked(f"comparison with one rank: not compared, because {error}")
    except Exception as error:  # an error in the comparison must not end the audit
        findings.add_unchecked(
            f"comparison with one rank: not compared, because it failed ({type(error).__name__}: {error})"
        )
    elapsed_seconds = time.monotonic() - start
    results = tuple(findings.worst_first()), tuple(findings.unchecked), elapsed_seconds, num_equal
    return RelationResults(*results, refuted=frozenset(findings.refuted), num_runs=host.num_runs)


def judge_script(
    host: ScriptHost,
    python_args: Sequence[str],
    processes: int,
    findings: Findings,
    updates: int = 48,
    seconds: float = 8.0,
) -> int:
    """Check all relations of a script in a host that may run other scripts, too.

    Returns the number of updates in which the ranks compute the same as one rank.
    """
    many = host.run_in_float64(processes, python_args=python_args, updates=updates, seconds=seconds)
    if many.failure:
        findings.add_unchecked(f"{processes} ranks against one: not compared, because {many.failure}")
        return 0
    judge_rounded_updates(many.ranks[0], findings)
    judge_samples(many, findings)
    judge_equal_tensors(many, findings)
    judge_updates(many.ranks[0], findings)
    judge_skipped_batches(many.ranks[0], findings)
    judge_uneven_passes(many, findings)
    judge_counters(many.ranks[0], findings)
    if many.ranks[0].facts.get("with_workers") and is_suspicious(many):
        without_workers = host.run(
            processes,
            python_args=python_args,
            imposed=Imposed(no_workers=True),
            float64=many.float64,
            updates=updates,
            seconds=seconds,
        )
        judge_workers(many, without_workers, findings)

    def run_alone(imposed: Imposed) -> ScriptRecording:
        return host.run(
            1, python_args=python_args, imposed=imposed, float64=many.float64, updates=updates, num_detailed=updates
        )

    single, imposed, num_equal = run_alone(Imposed(recording=many)), Imposed(recording=many), 0
    if processes > 1:
        script = find_script(python_args)
        source = user_source(script) if script else ""
        single, imposed, num_equal = _judge_against_one(many, single, script, run_alone, findings)
        judge_statistics(many, findings)
        if num_equal and not findings.has("ranks.") and misses_evaluation(many, source):
            _judge_short_epochs(host, python_args, processes, many.float64, findings)
        # the recorded updates may be those of a different optimizer, so the source is searched, too
        if has_schedule(many.ranks[0]) or "lr_scheduler" in source:
            _judge_complete_runs(host, python_args, processes, findings)
    lines = single.ranks[0].facts.get("checkpointing", [])
    if lines and not single.failure:
        without_checkpointing = host.run(
            1,
            python_args=python_args,
            imposed=dataclasses.replace(imposed, without_checkpointing=True),
            float64=many.float64,
            updates=2,  # the states of the first update are recorded when the second one begins
            num_detailed=2,
        )
        if without_checkpointing.failure:
            findings.add_unchecked(
                f"activation checkpointing at {short_location(lines[0])}: {without_checkpointing.failure}"
            )
        else:
            judge_recomputation(single.ranks[0], without_checkpointing.ranks[0], findings)
    return num_equal


def _judge_against_one(
    many: ScriptRecording,
    single: ScriptRecording,
    script: Path | None,
    run_alone: Callable[[Imposed], ScriptRecording],
    findings: Findings,
) -> tuple[ScriptRecording, Imposed, int]:
    """Compare the ranks with one rank. Returns the compared run, its settings, and how many updates are equal."""
    rank_0, imposed, cuts_batches = None, Imposed(recording=many), False
    if script is not None and not num_comparable(many, single)[1]:
        first_run = single
        single, imposed = _run_with_cut_batches(many, single, script.read_bytes(), run_alone)
        cuts_batches = single is not first_run
    if cuts_batches and many.ranks[0].printed:
        findings.add_unchecked(
            "printed numbers: the script cuts its batches itself, so it may print numbers of other batches"
        )
    elif not single.failure and many.ranks[0].printed:
        rank_0 = run_alone(Imposed(recording=many, only_rank=0, parameters=True))
    by_ranks = Findings()
    num_equal = judge_ranks(many, single, rank_0, run_alone, by_ranks)
    if by_ranks.has("ranks.gradient") and single.ranks[0].facts.get("widened") and not cuts_batches:
        # the batch size is a number in the script, which may use it elsewhere, too: for example to split the output
        larger_imposed, with_larger = Imposed(recording=many, larger=BATCH_SIZES), Findings()
        larger = _with_same_inputs(many, run_alone(larger_imposed))
        num_equal_larger = judge_ranks(many, larger, None, run_alone, with_larger)
        if num_equal_larger and not with_larger:
            single, imposed, num_equal, by_ranks = larger, larger_imposed, num_equal_larger, with_larger
    findings.extend(by_ranks)
    for reason in by_ranks.unchecked:
        findings.add_unchecked(reason)
    return single, imposed, num_equal


def _run_with_cut_batches(
    many: ScriptRecording, single: ScriptRecording, source: bytes, run_alone: Callable[[Imposed], ScriptRecording]
) -> tuple[ScriptRecording, Imposed]:
    """Return a run on one rank that can be compared, and its settings, for a script that cuts its own batches.

    The script may contain batch sizes, and may select rows by its rank. Both are tried. If no run can be compared, the
    given run is returned.
    """
    best_run, max_comparable = single, num_comparable(many, single)[0]
    best_imposed = Imposed(recording=many)
    if single.failure.startswith("no end"):
        return single, best_imposed  # each attempt would wait until the time limit, too
    refused = [reason for reason, update in single.ranks[0].facts.get("refused", []) if not update]
    if any(SHAPES_DIFFER in reason for reason in refused):
        # batches of the loader have different shapes on each rank, so no batch size in the script can help
        return single, best_imposed
    inputs = many.ranks[0].inputs
    num_rows = len(inputs[0][0]) if inputs and inputs[0] and inputs[0][0].dim() else 1
    sizes = sizes_that_divide(source, num_rows)[:_MAX_SIZES]
    for larger, reads in ((BATCH_SIZES, False), (BATCH_SIZES, True), ("", True), *((size, False) for size in sizes)):
        imposed = Imposed(recording=many, larger=larger, reads=reads)
        attempt = run_alone(imposed)
        attempt = _with_same_inputs(many, attempt)
        count, is_complete = num_comparable(many, attempt)
        if count > max_comparable:
            best_run, max_comparable, best_imposed = attempt, count, imposed
        if is_complete:
            break
    return best_run, best_imposed


def _with_same_inputs(many: ScriptRecording, single: ScriptRecording) -> ScriptRecording:
    """Return the run, marked as not comparable from the first update in which its samples differ from the ranks'."""
    count = num_with_same_inputs(many, single)
    if count >= min(len(rank.updates) for rank in (*many.ranks, single.ranks[0])):
        return single
    reason = "the batches that the script cuts could not be merged for later updates"
    facts = single.ranks[0].facts
    facts = {**facts, "refused": [*facts.get("refused", []), [reason, count]]}
    return dataclasses.replace(single, ranks=(dataclasses.replace(single.ranks[0], facts=facts),))


def _judge_short_epochs(
    host: ScriptHost, python_args: Sequence[str], processes: int, float64: bool, findings: Findings
) -> None:
    """Compare printed numbers of evaluations in a second run, whose epochs are shortened to reach an evaluation."""

    def run_short(ranks: int, imposed: Imposed) -> ScriptRecording:
        return host.run(
            ranks,
            python_args=python_args,
            imposed=dataclasses.replace(imposed, pass_batches=_PASS_BATCHES),
            float64=float64,
            updates=_SHORT_UPDATES,
            num_detailed=_SHORT_UPDATES,
            seconds=_SHORT_SECONDS,
        )

    many = run_short(processes, Imposed())
    if many.failure or misses_evaluation(many, ".eval()"):
        reason = "no evaluation was reached"
        if many.failure:
            reason = f"the script fails with shortened epochs ({many.failure})"
        findings.add_unchecked(f"numbers of evaluations against one rank: {reason}")
        return
    single, rank_0 = (run_short(1, Imposed(recording=many, only_rank=rank, parameters=rank == 0)) for rank in (None, 0))
    judge_evaluations(many, single, rank_0, lambda imposed: run_short(1, imposed), findings)


def _judge_complete_runs(host: ScriptHost, python_args: Sequence[str], processes: int, findings: Findings) -> None:
    """Compare the learning rates up to the end of the script, if it ends soon enough."""
    runs: list[ScriptRecording] = []
    seconds = _COMPLETE_RUN_SECONDS * _slowdown()
    for ranks in (processes, 1):
        run = host.run(
            ranks, python_args=python_args, updates=_MAX_UPDATES, seconds=seconds, num_detailed=0, only_rates=True
        )
        if run.failure or not run.ranks[0].facts.get("came_to_end"):
            reason = run.failure or f"the script does not end within {seconds:.0f} s"
            findings.add_unchecked(f"whether the schedule ends with the training: {reason}")
            return
        runs.append(run)
    judge_horizon(runs[0], runs[1], findings)


def _slowdown() -> float:
    """How many times longer a run takes than on an idle machine, estimated from the load; at most 3."""
    return min(3.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def joined_findings(by_rules: Sequence[Finding], by_relations: Sequence[Finding]) -> list[Finding]:
    """Join findings of the same mistake: a difference becomes a consequence of a rule's finding that explains it.

    A finding without a cause (`gradient.unexplained`) becomes the consequence of a difference on another line, if that
    is known. A difference that no rule explains stays a separate finding.
    """
    joined, unexplained = list(by_rules), list[Finding]()
    for finding in by_relations:
        causing_rules = _EXPLAINED_BY.get(finding.rule, ())
        causes = [
            each for each in joined if each.level in ("FAIL", "WARN") and each.rule.startswith(causing_rules or ("-",))
        ]
        if not causes:
            unexplained.append(finding)
            continue
        cause = next((each for each in causes if each.location == finding.location), causes[0])
        index = joined.index(cause)
        if cause.rule.endswith(".unexplained") and finding.location not in ("", cause.location):
            text = f"{finding.text}. Rule {cause.rule}: {cause.text}"
            joined[index] = _with_lines_of(finding, cause, text)
        else:
            text = f"{cause.text}. Comparison with one rank: {finding.text}"
            joined[index] = _with_lines_of(cause, finding, text)
    return sorted([*joined, *unexplained], key=lambda finding: LEVELS.index(finding.level))


def _with_lines_of(finding: Finding, other: Finding, text: str) -> Finding:
    """Return the finding with this text, and with the lines of the other finding that are known and not its own."""
    lines = dict.fromkeys((*finding.other_lines, other.location, *other.other_lines))
    other_lines = tuple(line for line in lines if line not in ("", finding.location))
    return dataclasses.replace(finding, text=text, other_lines=other_lines)


def why_not_compared(python_args: Sequence[str], options: AuditOptions, environment: Mapping[str, str]) -> str:
    """Why everyrank cannot start a script again to compare it; "" if it can."""
    script = find_script(python_args)
    if external_rank(environment) is not None:
        return "an external launcher has started the ranks; run `everyrank audit` without it"
    if options.processes is None and script is not None and starts_ranks_itself(user_source(script)):
        return "the script starts its ranks itself; if a launcher can start them, add --processes N"
    return ""


def with_comparison(audit: Audit, options: AuditOptions) -> Audit:
    """The audit with the findings and the time of the comparison with one rank."""
    comparison = compare_script(
        audit.python_args, audit.world_size, timeout_seconds=options.timeout_seconds, pretend_cuda=options.pretend_cuda
    )
    are_equal = comparison.num_equal > 0 and not any(each.rule.startswith("ranks.") for each in comparison.findings)
    remaining = [
        finding
        for finding in audit.findings
        if finding.rule not in comparison.refuted and not (are_equal and finding.refuted_if_equal_to_one_rank)
    ]
    result = "the script ran again for the comparison with one rank" if comparison.num_runs else ""
    if are_equal:
        result = f"{audit.world_size} ranks compute the same as one in {comparison.num_equal} updates, up to rounding"
    return dataclasses.replace(
        audit,
        findings=tuple(joined_findings(remaining, comparison.findings)),
        unchecked=tuple(dict.fromkeys((*audit.unchecked, *comparison.unchecked))),
        altered=(*audit.altered, *([f"{result} ({comparison.seconds:.0f} s)"] if result else [])),
        seconds=audit.seconds + comparison.seconds,
    )


def with_resume(audit: Audit, options: AuditOptions, command: ResumeCommand) -> Audit:
    """The audit with the differences between a resumed and an uninterrupted training."""

    def judge(host: ScriptHost, findings: Findings) -> None:
        judge_resume(host, audit.python_args, audit.world_size, command, findings)

    return _with_more_runs(audit, options, "resume", "to be resumed", judge)


def with_settings(audit: Audit, options: AuditOptions, more_args: Sequence[str]) -> Audit:
    """The audit with the differences that these arguments cause, although the training should stay the same."""

    def judge(host: ScriptHost, findings: Findings) -> None:
        judge_settings(host, audit.python_args, audit.world_size, more_args, findings)

    return _with_more_runs(audit, options, "--same", "to compare settings", judge)


def _with_more_runs(
    audit: Audit, options: AuditOptions, name: str, purpose: str, judge: Callable[[ScriptHost, Findings], None]
) -> Audit:
    start, findings = time.monotonic(), Findings()
    why_not = why_not_compared(audit.python_args, options, os.environ)
    if why_not:
        return dataclasses.replace(audit, unchecked=(*audit.unchecked, f"{name}: {why_not}"))
    host = ScriptHost(audit.python_args, options.timeout_seconds, options.pretend_cuda, audit.world_size)
    try:
        with host:
            judge(host, findings)
    except EveryrankError as error:
        findings.add_unchecked(f"{name}: {error}")
    except Exception as error:  # an error in the comparison must not end the audit
        findings.add_unchecked(f"{name}: the comparison failed ({type(error).__name__}: {error})")
    seconds = time.monotonic() - start
    times = {1: "once", 2: "twice"}.get(host.num_runs, f"{host.num_runs} times")
    return dataclasses.replace(
        audit,
        findings=tuple(sorted((*audit.findings, *findings), key=lambda finding: LEVELS.index(finding.level))),
        unchecked=tuple(dict.fromkeys((*audit.unchecked, *findings.unchecked))),
        altered=(
            *audit.altered,
            *([f"the script ran {times} more, {purpose} ({seconds:.0f} s)"] if host.num_runs else []),
        ),
        seconds=audit.seconds + seconds,
    )


def audit_by_relations(python_args: Sequence[str], options: AuditOptions) -> Audit:
    """An audit by relations only, without the rules."""
    processes = options.processes or 2
    comparison = compare_script(
        python_args, processes, timeout_seconds=options.timeout_seconds, pretend_cuda=options.pretend_cuda
    )
    return Audit(
        tuple(python_args),
        processes,
        options.updates,
        comparison.seconds,
        comparison.findings,
        (),
        comparison.unchecked,
    )
