"""Stopping changes nothing: a training in one go, and one that is ended, started again and resumed, are the same."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any

from everyrank.audit.finding import Findings, short_place
from everyrank.errors import UsageError
from everyrank.relations.numbers import relative_difference
from everyrank.relations.samples import samples_of_batch
from everyrank.rerun import Imposed, RankRecording, RecordedUpdate, ScriptHost, ScriptRecording

__all__ = ["ResumeCommand", "judge_resume", "judge_resumed", "resume_command"]

_SEED = Imposed(seed=0)  # a script that sets no seed would differ anyway


@dataclasses.dataclass(frozen=True)
class ResumeCommand:
    """Arguments that are added to those of the script.

    resume  they continue a training, such as ["--resume", "out/last.pt"]
    stop    they save and end it, where it does not save by itself in the first updates
    """

    resume: list[str]
    stop: list[str]


def resume_command(resume: str, stop: str = "") -> ResumeCommand:
    """Split the arguments as a shell does.

    Raises `UsageError` for a quote that is not closed.

    Example:
        resume_command("--resume out/last.pt").resume == ["--resume", "out/last.pt"]

    """
    try:
        return ResumeCommand(shlex.split(resume), shlex.split(stop))
    except ValueError as error:
        raise UsageError(f"--resume-with {resume!r}: {error}; close the quote") from error


def judge_resume(
    host: ScriptHost,
    words: Sequence[str],
    processes: int,
    command: ResumeCommand,
    findings: Findings,
    updates: int = 48,
) -> None:
    """Run the script in one go; until it has saved; then again with the arguments that resume. Compare what follows."""

    def run(more: Sequence[str], last: int, files: ScriptRecording | None = None) -> ScriptRecording:
        return host.run(
            processes,
            words=[*words, *more],
            imposed=_SEED,
            float64=False,
            updates=last,
            detailed=last,
            seconds=20.0,
            files=files,
        )

    whole = run([], updates)
    saves = whole.ranks[0].facts.get("saved_after", [])
    early = next((update for _, update, _ in saves if 0 < update < len(whole.ranks[0].updates) - 1), 0)
    stopped = whole
    if command.stop:
        stopped = run(command.stop, updates)
    elif early:
        stopped = run([], early + 1)
    saved = [save for save in stopped.ranks[0].facts.get("saved_after", []) if save[1]]
    for recording in (whole, stopped):
        if recording.trouble:
            findings.not_checked(f"resume: the script fails ({recording.trouble})")
            return
    if not saved or saved[-1][1] >= len(whole.ranks[0].updates):
        findings.not_checked(
            f"resume: no checkpoint was saved within {len(whole.ranks[0].updates)} updates; add arguments that save "
            f"and end earlier with --stop-with"
        )
        return
    start = saved[-1][1]
    resumed = run(command.resume, min(6, len(whole.ranks[0].updates) - start), files=stopped)
    if resumed.trouble:
        findings.not_checked(f"resume: the script does not start with these arguments ({resumed.trouble})")
        return
    judge_resumed(whole.ranks[0], resumed.ranks[0], start, saved[-1][2], findings)


def judge_resumed(whole: RankRecording, resumed: RankRecording, start: int, save: str, findings: Findings) -> None:
    """Compare the updates after a resume with those of a training in one go.

    start  updates before the checkpoint that was loaded
    save   the line that wrote it
    """
    if not resumed.updates:
        findings.not_checked("resume: no update followed")
        return
    for number, update in enumerate(resumed.updates):
        if start + number >= len(whole.updates):
            return
        other = whole.updates[start + number]
        difference = _first_difference(whole, resumed, start + number, number, other, update)
        if difference:
            findings.add(
                "WARN",
                "resume.differs",
                resumed.facts.get("loads", [save])[0],
                f"update {start + number}, {_ordinal(number)} after a resume from the checkpoint of "
                f"{short_place(save)}: {difference}",
                "save everything that the training goes on from, and load it before the first batch is read",
                also=(save,),
            )
            return


def _ordinal(number: int) -> str:
    return "the first" if not number else f"{number + 1} updates"


def _first_difference(
    whole: RankRecording, resumed: RankRecording, index: int, number: int, one: RecordedUpdate, other: RecordedUpdate
) -> str:
    """What differs first, in the order in which one difference leads to the next; "" if all is equal."""
    for kind, values, others in (
        ("weights", one.before, other.before),
        ("states", _before(whole, index), _before(resumed, number) if number else {}),
    ):
        name = _differing(values, others)
        if name:
            return f"the {kind} differ from those of a training in one go, for example {name}"
    if len(one.rates) == len(other.rates) and any(
        abs(a - b) > 1e-6 * max(abs(a), abs(b)) for a, b in zip(one.rates, other.rates, strict=True)
    ):
        return (
            f"the learning rate is {other.rates[0]:.6g}, and {one.rates[0]:.6g} in one go: the schedule is not resumed"
        )
    read = _batches(whole, index)
    again = _batches(resumed, number)[-len(read) :] if read else []
    if read and read != again:
        return "other samples are read than in one go: the position or the order of the data is not resumed"
    name = _differing(one.gradients, other.gradients)
    if name:
        return (
            f"the gradient of {name} differs although weights and samples are equal: random numbers, such as dropout "
            f"masks, or a state of the model are not resumed"
        )
    name = _differing(one.after, other.after)
    if name:
        return f"the step moves {name} differently although the gradient is equal: the optimizer's state is not resumed"
    return ""


def _before(rank: RankRecording, update: int) -> dict[str, Any]:
    return rank.updates[update - 1].states if update else {}


def _differing(values: dict[str, Any], others: dict[str, Any]) -> str:
    for name, value in values.items():
        other = others.get(name)
        is_comparable = value is not None and other is not None and value.shape == other.shape and value.numel()
        if is_comparable and relative_difference(value, other) > 1e-4:
            return name
    return ""


def _batches(rank: RankRecording, update: int) -> list[list[int]]:
    return [samples_of_batch(batch) for _, batch, before in rank.batches if before == update]
