"""Runs the script again for each relation, and collects what differs."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence

from everyrank.audit import Audit, AuditOptions
from everyrank.audit.external_launch import external_rank
from everyrank.audit.finding import LEVELS, Finding, Findings, short_place
from everyrank.audit.script import find_script, own_text, starts_ranks_itself
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
from everyrank.relations.samples import judge_equal_columns, judge_samples, judge_skipped_batches, judge_uneven_passes
from everyrank.relations.schedule import has_schedule, judge_horizon
from everyrank.relations.updates import judge_updates
from everyrank.relations.workers import is_suspicious, judge_workers
from everyrank.rerun import Imposed, ScriptHost, ScriptRecording
from everyrank.rerun.batch_sizes import BATCH_SIZES, sizes_that_divide

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

_OF_GRADIENTS = ("gradient.", "loss.", "clip.", "replicas.", "random.", "weights.", "ddp.", "collective.", "data.")
_EXPLAINED_BY = {
    "ranks.gradient": _OF_GRADIENTS,
    "ranks.parameters": _OF_GRADIENTS,
    "ranks.own-gradient": _OF_GRADIENTS,
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
"""Kinds of rules that can be the cause of each difference."""

_COMPLETE_SECONDS = 15.0  # for a complete run, which only the end of a schedule needs
_PASS_BATCHES = 4  # of shortened epochs, where the whole ones are too long to reach an evaluation
_SHORT_UPDATES, _SHORT_SECONDS = 12, 6.0
_MOST_UPDATES = 20_000
_MOST_SIZES = 4  # names of integers that may be the batch size


@dataclasses.dataclass(frozen=True)
class RelationResults:
    """What the relations found.

    findings   differences
    unchecked  relations that could not be tested, with the reason
    seconds    of all runs
    num_equal  updates in which the ranks compute the same as one rank, up to rounding
    refuted    rules of audit whose findings are no mistake, as the comparison has shown
    """

    findings: tuple[Finding, ...]
    unchecked: tuple[str, ...]
    seconds: float
    num_equal: int = 0
    refuted: frozenset[str] = frozenset()


def compare_script(
    words: Sequence[str],
    processes: int,
    *,
    updates: int = 48,
    seconds: float = 8.0,
    timeout_seconds: float = 120.0,
    pretend_cuda: bool = False,
) -> RelationResults:
    """Run a script on `processes` ranks and on one, with the same batches, and compare.

    updates   optimizer steps to compare
    seconds   after which the run on several ranks is ended

    Never raises for what the script does: a relation that cannot be tested is in `unchecked`.

    Example:
        comparison = compare_script(["train.py", "--epochs", "2"], processes=2)

    """
    start, findings, num_equal = time.monotonic(), Findings(), 0
    try:
        with ScriptHost(words, timeout_seconds, pretend_cuda, processes) as host:
            num_equal = judge_script(host, words, processes, findings, updates, seconds)
    except EveryrankError as error:
        findings.not_checked(f"comparison with one rank: not compared, because {error}")
    except Exception as error:  # the audit never ends by it
        findings.not_checked(
            f"comparison with one rank: not compared, because it failed ({type(error).__name__}: {error})"
        )
    spent = time.monotonic() - start
    results = tuple(findings.worst_first()), tuple(findings.unchecked), spent, num_equal
    return RelationResults(*results, refuted=frozenset(findings.refuted))


def judge_script(
    host: ScriptHost,
    words: Sequence[str],
    processes: int,
    findings: Findings,
    updates: int = 48,
    seconds: float = 8.0,
) -> int:
    """Test all relations of a script, in a host that may run others, too.

    Returns the number of updates in which the ranks compute the same as one rank.
    """
    many = host.run_in_float64(processes, words=words, updates=updates, seconds=seconds)
    if many.trouble:
        findings.not_checked(f"{processes} ranks against one: not compared, because {many.trouble}")
        return 0
    judge_rounded_updates(many.ranks[0], findings)
    judge_samples(many, findings)
    judge_equal_columns(many, findings)
    judge_updates(many.ranks[0], findings)
    judge_skipped_batches(many.ranks[0], findings)
    judge_uneven_passes(many, findings)
    judge_counters(many.ranks[0], findings)
    if many.ranks[0].facts.get("with_workers") and is_suspicious(many):
        without = host.run(
            processes,
            words=words,
            imposed=Imposed(no_workers=True),
            float64=many.float64,
            updates=updates,
            seconds=seconds,
        )
        judge_workers(many, without, findings)

    def alone(imposed: Imposed) -> ScriptRecording:
        return host.run(1, words=words, imposed=imposed, float64=many.float64, updates=updates, detailed=updates)

    one, num_equal = alone(Imposed(recording=many)), 0
    if processes > 1:
        script = find_script(words)
        text = own_text(script) if script else ""
        rank_0, is_cut = None, False
        if script is not None and not num_comparable(many, one)[1]:
            one, is_cut = _as_script_cuts_batches(many, one, script.read_text(), alone)
        if is_cut and many.ranks[0].printed:
            findings.not_checked("printed numbers: the script cuts its batches itself, and may print those of others")
        elif not one.trouble and many.ranks[0].printed:
            rank_0 = alone(Imposed(recording=many, only_rank=0, parameters=True))
        num_equal = judge_ranks(many, one, rank_0, alone, findings)
        judge_statistics(many, findings)
        if num_equal and not findings.has("ranks.") and misses_evaluation(many, text):
            _judge_short_epochs(host, words, processes, many.float64, findings)
        if has_schedule(many.ranks[0]) or "lr_scheduler" in text:  # another optimizer may train something first
            _judge_complete_runs(host, words, processes, findings)
    lines = one.ranks[0].facts.get("checkpointing", [])
    if lines and not one.trouble:
        kept = host.run(
            1,
            words=words,
            imposed=Imposed(recording=many, without_checkpointing=True),
            float64=many.float64,
            updates=2,  # states are known when the second begins
            detailed=2,
        )
        if kept.trouble:
            findings.not_checked(f"activation checkpointing at {short_place(lines[0])}: {kept.trouble}")
        else:
            judge_recomputation(one.ranks[0], kept.ranks[0], findings)
    return num_equal


def _as_script_cuts_batches(
    many: ScriptRecording, one: ScriptRecording, text: str, alone: Callable[[Imposed], ScriptRecording]
) -> tuple[ScriptRecording, bool]:
    """(run on one rank that can be compared, whether one was found) of a script that cuts its batches itself.

    Sizes of batches may stand in the script, and it may choose rows by its rank: each of both is tried. The given run
    is returned if none can be compared.
    """
    best, most = one, num_comparable(many, one)[0]
    if one.trouble.startswith("no end"):
        return one, False  # each attempt would wait as long
    inputs = many.ranks[0].inputs
    rows = len(inputs[0][0]) if inputs and inputs[0] and inputs[0][0].dim() else 1
    sizes = sizes_that_divide(text, rows)[:_MOST_SIZES]
    for larger, reads in ((BATCH_SIZES, False), (BATCH_SIZES, True), ("", True), *((size, False) for size in sizes)):
        attempt = alone(Imposed(recording=many, larger=larger, reads=reads))
        attempt = _with_same_inputs(many, attempt)
        count, is_complete = num_comparable(many, attempt)
        if count > most:
            best, most = attempt, count
        if is_complete:
            break
    return best, best is not one


def _with_same_inputs(many: ScriptRecording, one: ScriptRecording) -> ScriptRecording:
    """The run up to the first update in which its model gets other samples than those of the ranks."""
    count = num_with_same_inputs(many, one)
    if count >= min(len(rank.updates) for rank in (*many.ranks, one.ranks[0])):
        return one
    reason = "the batches that the script cuts could be put together for these only"
    facts = one.ranks[0].facts
    facts = {**facts, "refused": [*facts.get("refused", []), [reason, count]]}
    return dataclasses.replace(one, ranks=(dataclasses.replace(one.ranks[0], facts=facts),))


def _judge_short_epochs(
    host: ScriptHost, words: Sequence[str], processes: int, float64: bool, findings: Findings
) -> None:
    """Compare the numbers that an evaluation prints, in a second run whose epochs are shortened to reach one."""

    def run(ranks: int, imposed: Imposed) -> ScriptRecording:
        return host.run(
            ranks,
            words=words,
            imposed=dataclasses.replace(imposed, pass_batches=_PASS_BATCHES),
            float64=float64,
            updates=_SHORT_UPDATES,
            detailed=_SHORT_UPDATES,
            seconds=_SHORT_SECONDS,
        )

    many = run(processes, Imposed())
    if many.trouble or misses_evaluation(many, ".eval()"):
        why = f"the script fails with shortened epochs ({many.trouble})" if many.trouble else "none was reached"
        findings.not_checked(f"numbers of evaluations against one rank: {why}")
        return
    one, rank_0 = (run(1, Imposed(recording=many, only_rank=rank, parameters=rank == 0)) for rank in (None, 0))
    judge_evaluations(many, one, rank_0, lambda imposed: run(1, imposed), findings)


def _judge_complete_runs(host: ScriptHost, words: Sequence[str], processes: int, findings: Findings) -> None:
    """Compare the learning rates up to the end of the script, if it comes to its end soon."""
    runs: list[ScriptRecording] = []
    for ranks in (processes, 1):
        run = host.run(
            ranks, words=words, updates=_MOST_UPDATES, seconds=_COMPLETE_SECONDS, detailed=0, only_rates=True
        )
        if run.trouble or not run.ranks[0].facts.get("came_to_end"):
            return
        runs.append(run)
    judge_horizon(runs[0], runs[1], findings)


def joined_findings(by_rules: Sequence[Finding], by_relations: Sequence[Finding]) -> list[Finding]:
    """One finding for one mistake: a rule that explains a difference gets it as a consequence.

    A rule that only sees that something is wrong (`gradient.unexplained`) becomes the consequence of a difference whose
    line is known. A difference that no rule explains stays a finding of its own.
    """
    joined, kept = list(by_rules), list[Finding]()
    for finding in by_relations:
        kinds = _EXPLAINED_BY.get(finding.rule, ())
        causes = [each for each in joined if each.level in ("FAIL", "WARN") and each.rule.startswith(kinds or ("-",))]
        if not causes:
            kept.append(finding)
            continue
        cause = next((each for each in causes if each.place == finding.place), causes[0])
        index = joined.index(cause)
        if cause.rule.endswith(".unexplained") and finding.place != cause.place:
            also = tuple(dict.fromkeys((*finding.also, cause.place, *cause.also)))
            text = f"{finding.text}. Rule {cause.rule}: {cause.text}"
            joined[index] = dataclasses.replace(finding, text=text, also=also)
        else:
            also = tuple(dict.fromkeys((*cause.also, finding.place, *finding.also)))
            text = f"{cause.text}. Comparison with one rank: {finding.text}"
            joined[index] = dataclasses.replace(cause, text=text, also=also)
    return sorted([*joined, *kept], key=lambda finding: LEVELS.index(finding.level))


def why_not_compared(words: Sequence[str], options: AuditOptions, environment: Mapping[str, str]) -> str:
    """Why a script cannot run again on ranks that everyrank starts; "" if it can."""
    script = find_script(words)
    if external_rank(environment) is not None:
        return "an external launcher has started the ranks; run `everyrank audit` without it"
    if options.processes is None and script is not None and starts_ranks_itself(own_text(script)):
        return "the script starts its ranks itself; if a launcher can start them, add --processes N"
    return ""


def with_comparison(audit: Audit, options: AuditOptions) -> Audit:
    """The audit, with the findings of the relations and the seconds that they took."""
    comparison = compare_script(
        audit.python_args, audit.world_size, timeout_seconds=options.timeout_seconds, pretend_cuda=options.pretend_cuda
    )
    are_equal = comparison.num_equal > 0 and not any(each.rule.startswith("ranks.") for each in comparison.findings)
    kept = [
        finding
        for finding in audit.findings
        if finding.rule not in comparison.refuted and not (are_equal and finding.about_ranks)
    ]
    result = "the script ran again, to be compared with one rank"
    if are_equal:
        result = f"{audit.world_size} ranks compute the same as one in {comparison.num_equal} updates, up to rounding"
    return dataclasses.replace(
        audit,
        findings=tuple(joined_findings(kept, comparison.findings)),
        unchecked=tuple(dict.fromkeys((*audit.unchecked, *comparison.unchecked))),
        altered=(*audit.altered, f"{result} ({comparison.seconds:.0f} s)"),
        seconds=audit.seconds + comparison.seconds,
    )


def with_resume(audit: Audit, options: AuditOptions, command: ResumeCommand) -> Audit:
    """The audit, with what a resumed training does differently from one in one go."""

    def judge(host: ScriptHost, findings: Findings) -> None:
        judge_resume(host, audit.python_args, audit.world_size, command, findings)

    return _with_more_runs(audit, options, "resume", "three times more, to be resumed", judge)


def with_settings(audit: Audit, options: AuditOptions, more: Sequence[str]) -> Audit:
    """The audit, with what these other arguments change of a training that should stay the same."""

    def judge(host: ScriptHost, findings: Findings) -> None:
        judge_settings(host, audit.python_args, audit.world_size, more, findings)

    return _with_more_runs(audit, options, "--same", "twice more, to compare settings", judge)


def _with_more_runs(
    audit: Audit, options: AuditOptions, name: str, runs: str, judge: Callable[[ScriptHost, Findings], None]
) -> Audit:
    start, findings = time.monotonic(), Findings()
    why_not = why_not_compared(audit.python_args, options, os.environ)
    if why_not:
        return dataclasses.replace(audit, unchecked=(*audit.unchecked, f"{name}: {why_not}"))
    try:
        with ScriptHost(audit.python_args, options.timeout_seconds, options.pretend_cuda, audit.world_size) as host:
            judge(host, findings)
    except EveryrankError as error:
        findings.not_checked(f"{name}: {error}")
    except Exception as error:  # the audit never ends by it
        findings.not_checked(f"{name}: the comparison failed ({type(error).__name__}: {error})")
    seconds = time.monotonic() - start
    return dataclasses.replace(
        audit,
        findings=tuple(sorted((*audit.findings, *findings), key=lambda finding: LEVELS.index(finding.level))),
        unchecked=tuple(dict.fromkeys((*audit.unchecked, *findings.unchecked))),
        altered=(*audit.altered, f"the script ran {runs} ({seconds:.0f} s)"),
        seconds=audit.seconds + seconds,
    )


def audit_by_relations(words: Sequence[str], options: AuditOptions) -> Audit:
    """An audit without any rule, which shows what the relations find by themselves."""
    processes = options.processes or 2
    comparison = compare_script(words, processes, timeout_seconds=options.timeout_seconds)
    return Audit(
        tuple(words), processes, options.updates, comparison.seconds, comparison.findings, (), comparison.unchecked
    )
