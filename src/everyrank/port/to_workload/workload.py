"""Turns a script for one device into the file of a workload, and compares it with the script."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from everyrank.errors import CannotRunError
from everyrank.port.check import FLOAT32_TOLERANCE, FLOAT64_TOLERANCE, PortComparison, compare_port
from everyrank.port.edits import refuse_distributed
from everyrank.port.facts import Fact, read_facts
from everyrank.port.files import ScriptFiles
from everyrank.port.plan import Choice, Plan
from everyrank.port.run import PASS_BATCHES, SEED, UPDATES, observe, read_script, with_siblings
from everyrank.port.source import NotPortedError, ScriptSource
from everyrank.port.to_workload.importable import is_importable
from everyrank.port.to_workload.training_parts import TrainingParts, find_training
from everyrank.port.to_workload.workload_file import WorkloadChoice, workload_text
from everyrank.rerun import Imposed, ScriptHost, ScriptRecording

__all__ = ["WorkloadResult", "port_to_workload"]

_DRIVER = "everyrank_single_training.py"
_DRIVER_TEXT = """\
import sys

from everyrank.port.to_workload.single_training import train_single

train_single(sys.argv[1])
"""
_TENSOR_FUNCTIONS = {
    f"torch.{name}" for name in ("zeros", "ones", "full", "eye", "linspace", "tensor", "rand", "randn")
}
_PROBE = '__import__("everyrank.rerun.inside.setup", fromlist=["save_rng"]).save_rng()'


@dataclasses.dataclass(frozen=True)
class WorkloadResult:
    """The result of porting a script to a workload.

    text         the file of the workload
    comparison   the comparison of its training on one device with the script's
    without_dropout  whether it was equal only without dropout
    verified     "" if `verify` found it equal on 2 ranks, else the reason
    notes        what is left to the user: (line, sentence)
    """

    text: str
    choice: WorkloadChoice
    comparison: PortComparison
    float64: bool
    without_dropout: bool
    verified: str
    notes: list[tuple[int, str]]

    @property
    def is_equal(self) -> bool:
        """Whether the workload equals the script on one device, and also on two ranks."""
        return self.comparison.is_equal and not self.verified

    @property
    def difference(self) -> str:
        """The first difference; "" if there is none."""
        return self.comparison.difference or self.verified


def port_to_workload(
    python_args: Sequence[str],
    target: Path,
    timeout_seconds: float,
    verify: Callable[[Path], str],
    say: Callable[[str], None] = lambda _: None,
) -> WorkloadResult:
    """Write the training of `python_args`, a script and its arguments, as a workload, and compare it with the script.

    target   path of the file, in the script's folder
    verify   returns "" if the file at a path is equal on two ranks, else the reason

    Raises `NotPortedError` for what a workload cannot express, and `CannotRunError` if the script does not run here.
    """
    script = Path(python_args[0])
    source = ScriptSource(read_script(script))
    refuse_distributed(Plan(ScriptFiles(script, source.text), [], Choice("mean", "whole")))
    with ScriptHost(python_args, timeout_seconds, max_ranks=1) as host:
        say("running the script")
        events, backwards = _observe(host, script)
        training = find_training(source, events, backwards)
        backward = next(event for event in events if event.kind == "backward")
        module = script.stem if is_importable(source, script, events) else ""
        check = _Check(host, script, python_args, training, target)

        def text_of(choice: WorkloadChoice, pass_batches: int = 0) -> str:
            try:
                return workload_text(_copy_of(training), choice, source, backward, python_args, module, pass_batches)
            except SyntaxError as error:
                raise NotPortedError(
                    training.lines["loss"], f"its statements cannot be copied ({error.msg})"
                ) from error

        results = _compared(check, text_of, say)
    if not results[0].comparison.is_equal:
        return results[0]
    say("verifying it on 2 ranks")
    return _verified(check, results, text_of, verify)


def _copy_of(training: TrainingParts) -> TrainingParts:
    """Return the training with a copy of the script's state, which writing a file extends."""
    script = training.script
    copy = type(script)(script.source)
    copy.__dict__.update({name: type(value)(value) for name, value in vars(script).items() if name != "source"})
    return dataclasses.replace(training, script=copy)


def _observe(host: ScriptHost, script: Path) -> tuple[list[Fact], int]:
    """Return the facts of a run, and the most frequent number of backward passes per update."""
    recorded = observe(host, seed=SEED, values=True).ranks[0]
    counts = [len(update.losses) for update in recorded.updates]
    path = os.path.abspath(script)  # noqa: PTH100  (no links are followed)
    return read_facts(recorded.facts.get("expressions", []), {path: 0}), max(counts, key=counts.count, default=1) or 1


@dataclasses.dataclass
class _Check:
    """The comparison of the file with the script."""

    host: ScriptHost
    script: Path
    python_args: Sequence[str]
    training: TrainingParts
    target: Path

    def original(self, without_dropout: bool) -> tuple[ScriptRecording, bool]:
        """Return the script's run on one rank, with the random states before its data, and whether it is in float64."""
        text = _script_with_probe(self.training)
        imposed = _imposed(without_dropout)
        with with_siblings(self.script, {f"{self.script.stem}_everyrank_probed.py": text}) as candidate:
            runs: list[ScriptRecording] = []
            for float64 in (True, False):
                python_args = [str(candidate), *self.python_args[1:]]
                runs.append(self._run(python_args, float64, imposed))
                if not runs[-1].failure and runs[-1].ranks[0].updates:
                    return runs[-1], float64
        float64_run, float32_run = runs
        if not float32_run.ranks[0].updates:
            raise CannotRunError(f"the script does not run with fixed random numbers: {float32_run.failure}")
        float64 = len(float64_run.ranks[0].updates) == len(float32_run.ranks[0].updates)
        return (float64_run if float64 else float32_run), float64

    def compared(self, text: str, original: ScriptRecording, float64: bool, without_dropout: bool) -> PortComparison:
        """Train the file on one device, and compare it with the script's run."""
        with with_siblings(self.script, {self.target.name: text, _DRIVER: _DRIVER_TEXT}) as file:
            settings = {
                "file": str(file),
                "recording": str(original.folder / "rank0.pt"),
                "loader": self.training.loader,
                "backwards": self.training.backwards,
                "early_passes": self.training.early_passes,
            }
            path = self.host.folder / "single_training.json"
            path.write_text(json.dumps(settings))
            python_args = [str(file.with_name(_DRIVER)), str(path)]
            recording = self._run(python_args, float64, _imposed(without_dropout), len(original.ranks[0].updates))
        comparison = compare_port(original, recording, FLOAT64_TOLERANCE if float64 else FLOAT32_TOLERANCE)
        return dataclasses.replace(
            comparison, difference=self._with_likely_cause(comparison.difference), printed=[], doubts=[]
        )

    def _run(
        self, python_args: Sequence[str], float64: bool, imposed: Imposed, updates: int = UPDATES
    ) -> ScriptRecording:
        return self.host.run(
            1, python_args=python_args, updates=updates, num_detailed=updates, float64=float64, imposed=imposed
        )

    def _with_likely_cause(self, difference: str) -> str:
        """Return the difference with the line of the script that is its likely cause."""
        lines = self.training.lines
        text = re.sub(r"^on 1 ranks ", "", difference)
        text = re.sub(r"the port fails: rank 0: ", "the workload fails: ", text)
        text = re.sub(r" \([^()]*\.py:\d+\)", "", text, count=1)
        if "learning rates" in text:
            schedule = self.training.schedule.line if self.training.schedule is not None else 0
            by_hand = next((line for line, note in self.training.notes if "by hand" in note), 0)
            cause = f"the schedule of line {schedule}" if schedule else f"line {by_hand}, which sets them by hand"
            return f"{text}; likely cause: {cause if schedule or by_hand else 'they are set by hand'}"
        if "the loss is" in text:
            return f"{text}; likely cause: the data of line {lines['data']}, or the loss of line {lines['loss']}"
        if "the weights differ" in text:
            return f"{text}; likely cause: the optimizer of line {lines['optimizer']}"
        return text


def _imposed(without_dropout: bool) -> Imposed:
    return Imposed(order=True, rows=True, seed=SEED, pass_batches=PASS_BATCHES, without_dropout=without_dropout)


def _script_with_probe(training: TrainingParts) -> str:
    """Return the script with a line before its first data statement that records the random states."""
    codes = [training.train_data, *([training.eval_data] if training.eval_data else [])]
    statements = sorted(
        (statement for code in codes for statement in code.statements), key=lambda statement: statement.order
    )
    source_text = training.script.source.text
    if not statements:
        return source_text
    probed = ScriptSource(source_text)
    position = (statements[0].order[1], statements[0].order[2])
    statement = next(
        (
            node
            for node in ast.walk(probed.tree)
            if isinstance(node, ast.stmt) and (node.lineno, node.col_offset) == position
        ),
        None,
    )
    if statement is None:
        statement = next(
            node for node in ast.walk(probed.tree) if isinstance(node, ast.stmt) and node.lineno == position[0]
        )
    probed.insert_before(statement, _PROBE, "")
    return probed.edited()


def _compared(check: _Check, text_of: Callable[..., str], say: Callable[[str], None]) -> list[WorkloadResult]:
    """Return the results of all reductions that are equal on one device; if none is, the first result."""
    training = check.training
    choices = [WorkloadChoice(each) for each in training.reductions]
    if training.ignored is not None:
        choices[0] = WorkloadChoice("masked")
    results: list[WorkloadResult] = []
    previous_losses: list[list[float]] = []
    for without_dropout in (False, True):
        say("comparing without dropout" if without_dropout else "running it in float64")
        original, float64 = check.original(without_dropout)
        losses = [update.losses for update in original.ranks[0].updates]
        if losses == previous_losses:  # there is no dropout
            break
        previous_losses = losses
        say("comparing the workload with it on one device")
        for choice in choices:
            # epochs are shortened in the comparison
            comparison = check.compared(text_of(choice, PASS_BATCHES), original, float64, without_dropout)
            notes = sorted(training.notes)
            results.append(WorkloadResult(text_of(choice), choice, comparison, float64, without_dropout, "", notes))
            if comparison.has_failed or comparison.updates == 0:
                break  # another reduction cannot help
        equal = [result for result in results if result.comparison.is_equal]
        if equal:
            return equal
    return results[:1]


def _verified(
    check: _Check,
    results: Sequence[WorkloadResult],
    text_of: Callable[..., str],
    verify: Callable[[Path], str],
) -> WorkloadResult:
    """Return the first result that `verify` finds equal on two ranks, without evaluation if only that fails."""

    def outcome(text: str) -> str:
        with with_siblings(check.script, {check.target.name: text}) as file:
            return verify(file)

    reasons: list[str] = []
    for result in results:
        reasons.append(outcome(result.text))
        if not reasons[-1]:
            return result
        if "same dtype" in reasons[-1]:
            _refuse_default_type(check.training)
        is_of_updates = "update" in reasons[-1].partition(";")[0]
        if check.training.eval_data is not None and not is_of_updates:
            choice = dataclasses.replace(result.choice, evaluates=False)
            text = text_of(choice)
            if not outcome(text):
                sentence = f"the evaluation is left out because it fails: {reasons[-1]}"
                notes = sorted([*result.notes, (check.training.eval_data.line, sentence)])
                return dataclasses.replace(result, text=text, choice=choice, notes=notes)
        if not is_of_updates:
            break  # another reduction cannot help
    return dataclasses.replace(results[0], verified=f"everyrank verify on 2 ranks under ddp: {reasons[0]}")


def _refuse_default_type(training: TrainingParts) -> None:
    """Raise `NotPortedError` if a forward creates a tensor of torch's default dtype."""
    source = training.script.source
    for function in ast.walk(source.tree):
        if isinstance(function, ast.FunctionDef) and function.name.startswith("forward"):
            for node in ast.walk(function):
                is_creation = isinstance(node, ast.Call) and source.code(node.func) in _TENSOR_FUNCTIONS
                if (
                    is_creation
                    and isinstance(node, ast.Call)
                    and not any(keyword.arg == "dtype" for keyword in node.keywords)
                ):
                    raise NotPortedError(
                        node.lineno,
                        f"{source.code(node.func)} in a forward has torch's default dtype, but verify uses float64: "
                        "pass dtype=x.dtype of an input",
                    )
