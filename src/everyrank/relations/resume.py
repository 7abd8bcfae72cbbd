"""Checks that a training that is stopped and resumed equals an uninterrupted one."""

from __future__ import annotations

import dataclasses
import itertools
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from everyrank.audit.finding import Findings, short_location
from everyrank.errors import UsageError
from everyrank.relations.numbers import first_different_rates, relative_difference
from everyrank.relations.samples import checksums_of_tensors, samples_of_batch
from everyrank.rerun import Imposed, RankRecording, RecordedUpdate, ScriptHost, ScriptRecording
from everyrank.rerun.recording import EVALUATION_PASSES

__all__ = ["ResumeCommand", "judge_resume", "judge_updates_after_resume", "resume_command"]

_SEED = Imposed(seed=0)  # otherwise two runs of a script that sets no seed would differ


@dataclasses.dataclass(frozen=True)
class ResumeCommand:
    """Arguments to add to those of the script.

    resume  resume a training, for example ["--resume", "out/last.pt"]
    stop    make the script save and end; needed if it does not save in its first updates
    """

    resume: list[str]
    stop: list[str]


def resume_command(resume: str, stop: str = "") -> ResumeCommand:
    """Split the arguments as a shell does.

    Raises `UsageError` for a quote that is not closed.

    Example:
        resume_command("--resume out/last.pt").resume == ["--resume", "out/last.pt"]

    """
    return ResumeCommand(_split("--resume-with", resume), _split("--stop-with", stop))


def _split(option: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: {error}; close the quote") from error


def judge_resume(
    host: ScriptHost,
    python_args: Sequence[str],
    processes: int,
    command: ResumeCommand,
    findings: Findings,
    updates: int = 48,
) -> None:
    """Run the script uninterrupted, then until it saves, then resumed from there. Compare the updates that follow."""

    def run(more_args: Sequence[str], num_updates: int, files: ScriptRecording | None = None) -> ScriptRecording:
        return host.run(
            processes,
            python_args=[*python_args, *more_args],
            imposed=_SEED,
            float64=False,
            updates=num_updates,
            num_detailed=num_updates,
            seconds=20.0,
            files=files,
        )

    uninterrupted = run([], updates)
    saves = _checkpoint_saves(uninterrupted.ranks[0], command)
    first_save = next((update for _, update, _ in saves if 0 < update < len(uninterrupted.ranks[0].updates) - 1), 0)
    stopped = uninterrupted
    if command.stop:
        stopped = run(command.stop, updates)
    elif first_save:
        stopped = run([], first_save + 1)
    saved = [save for save in _checkpoint_saves(stopped.ranks[0], command) if save[1]]
    for recording in (uninterrupted, stopped):
        if recording.failure:
            findings.add_unchecked(f"resume: the script fails ({recording.failure})")
            return
    if not saved or saved[-1][1] >= len(uninterrupted.ranks[0].updates):
        findings.add_unchecked(
            f"resume: no checkpoint was saved before the last of {len(uninterrupted.ranks[0].updates)} updates; use "
            "--stop-with to "
            "add arguments that save and end earlier"
        )
        return
    start = saved[-1][1]
    resumed = run(command.resume, min(6, len(uninterrupted.ranks[0].updates) - start), files=stopped)
    if resumed.failure:
        arguments = shlex.join(command.resume)
        findings.add_unchecked(f"resume: the script fails with --resume-with {arguments!r} ({resumed.failure})")
        return
    judge_updates_after_resume(uninterrupted.ranks[0], resumed.ranks[0], start, saved[-1][2], findings)


def _checkpoint_saves(rank: RankRecording, command: ResumeCommand) -> list[tuple[str, int, str]]:
    """The saves of the file that the resume arguments name, or all saves if they name none.

    A save has a path, the number of updates before it, and its line. A script may also save files that it never loads.
    """
    saves = rank.facts.get("saved_after", [])
    file_names = {Path(value).name for argument in command.resume for value in argument.split("=")}
    return [save for save in saves if Path(save[0]).name in file_names] or saves


def judge_updates_after_resume(
    uninterrupted: RankRecording, resumed: RankRecording, start: int, save_line: str, findings: Findings
) -> None:
    """Compare the updates after a resume with those of an uninterrupted training.

    start      number of updates before the loaded checkpoint
    save_line  the line that wrote the checkpoint
    """
    if not resumed.updates:
        findings.add_unchecked("resume: the resumed run made no update")
        return
    for index, resumed_update in enumerate(resumed.updates):
        if start + index >= len(uninterrupted.updates):
            return
        expected = uninterrupted.updates[start + index]
        difference = _first_difference(uninterrupted, resumed, start + index, index, expected, resumed_update)
        if difference:
            findings.add(
                "WARN",
                "resume.differs",
                resumed.facts.get("loads", [save_line])[0],
                f"update {start + index}, {_ordinal(index)} after a resume from the checkpoint that "
                f"{short_location(save_line)} wrote: {difference}",
                "save all state that the training needs, and load it before the first batch is read",
                other_lines=(save_line,),
            )
            return


def _ordinal(index: int) -> str:
    return "the first" if not index else f"number {index + 1}"


def _first_difference(
    uninterrupted: RankRecording,
    resumed: RankRecording,
    uninterrupted_index: int,
    resumed_index: int,
    expected: RecordedUpdate,
    resumed_update: RecordedUpdate,
) -> str:
    """Return the first difference; "" if all is equal.

    The order is weights, buffers, learning rates, samples, gradients, step: each may cause those after it.
    """
    for kind, values, others in (
        ("weights", expected.before, resumed_update.before),
        (
            "buffers or untrained parameters",
            _states_before(uninterrupted, uninterrupted_index),
            _states_before(resumed, resumed_index) if resumed_index else {},
        ),
    ):
        name = _differing(values, others)
        if name:
            return f"the {kind} differ from those of an uninterrupted training, for example {name}"
    if len(expected.rates) == len(resumed_update.rates):
        rates = first_different_rates([expected.rates, resumed_update.rates])
        if rates is not None:
            return f"the learning rate is {rates[1]:.6g} instead of {rates[0]:.6g}: the schedule is not resumed"
    expected_batches = _checksums_of_batches(uninterrupted, uninterrupted_index)
    resumed_batches = _checksums_of_batches(resumed, resumed_index)
    if expected_batches and resumed_batches and expected_batches != resumed_batches[-len(expected_batches) :]:
        return "different samples are read: the position or the order of the data is not resumed"
    name = _differing(expected.gradients, resumed_update.gradients)
    if name and not (expected_batches and resumed_batches):
        return (
            f"the gradient of {name} differs although the weights are equal. The samples are not recorded: the order "
            "of the data, random numbers, or a state of the model is not resumed"
        )
    if name:
        return (
            f"the gradient of {name} differs although weights and samples are equal: random numbers, such as dropout "
            f"masks, or a state of the model are not resumed"
        )
    name = _differing(expected.after, resumed_update.after)
    if name:
        return (
            f"the step changes {name} differently although the gradient is equal: the optimizer's state is not resumed"
        )
    return ""


def _states_before(rank: RankRecording, update: int) -> dict[str, Any]:
    return rank.updates[update - 1].states if update else {}


def _differing(values: dict[str, Any], others: dict[str, Any]) -> str:
    for name, value in values.items():
        other = others.get(name)
        is_comparable = value is not None and other is not None and value.shape == other.shape and value.numel()
        if is_comparable and relative_difference(value, other) > 1e-4:
            return name
    return ""


def _checksums_of_batches(rank: RankRecording, update: int) -> list[list[int]]:
    """Return checksums of the samples of each training batch of an update, or of its tensors if samples are numbers.

    Empty if not all batches up to this update are recorded, for example because they are too large.
    """
    if update >= rank.facts.get("update_without_batches", math.inf):
        return []
    batches = [
        batch
        for (loader, number), batch, before in rank.batches
        if before == update and number < EVALUATION_PASSES and not _only_validates(rank, loader)
    ]
    return [samples_of_batch(batch) or checksums_of_tensors(batch) for batch in batches]


def _only_validates(rank: RankRecording, loader: int) -> bool:
    """Whether no backward follows a loader's batches, and two are read without a batch of a training loader between.

    With `zip(labeled, unlabeled)`, only the loader of the last batch before a backward is in "training_loaders".
    """
    training_loaders = rank.facts.get("training_loaders")
    if training_loaders is None or loader in training_loaders:
        return False
    loaders = [number for (number, count), _, _ in rank.batches if count < EVALUATION_PASSES]
    order = [number for number in loaders if number == loader or number in training_loaders]
    return any(first == second == loader for first, second in itertools.pairwise(order))
