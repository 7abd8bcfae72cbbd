"""Observes a script, edits it, checks the result, and tries another choice if the port differs."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import os
import tempfile
import tokenize
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from everyrank.audit import AuditOptions, Finding, ScriptFailedError, audit_script
from everyrank.audit.script import enough_gpus
from everyrank.errors import CannotRunError, EveryrankError, UsageError
from everyrank.port.check import FLOAT32_TOLERANCE, FLOAT64_TOLERANCE, PortComparison, compare_port
from everyrank.port.edits import edit_script
from everyrank.port.facts import Fact, read_facts
from everyrank.port.files import ScriptFiles
from everyrank.port.idioms import IDIOMS, installed_module
from everyrank.port.plan import Choice
from everyrank.port.source import Edit, NotPortedError
from everyrank.rerun import Imposed, ScriptHost, ScriptRecording

__all__ = ["Attempt", "PortResult", "audit_port", "check_ported", "port_script", "read_script", "with_siblings"]

UPDATES = 12
SEED = 1234
_OBSERVED_UPDATES = 24
PASS_BATCHES = 4
_MOST_ELEMENTS = 4096
_ON_CPU = {name: value for idiom in IDIOMS.values() for name, value in idiom.on_cpu.items()}


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One port of the script, and its comparisons.

    choice        None for the user's port
    text          the whole ported script
    other_text    the other ported file; "" if there is none
    without_dropout  whether it was equal only with all dropout left out
    """

    choice: Choice | None
    text: str
    edits: list[Edit]
    notes: list[tuple[int, str]]
    comparisons: list[PortComparison]
    other_text: str = ""
    without_dropout: bool = False

    @property
    def is_equal(self) -> bool:
        """Whether the port was equal on each number of ranks."""
        return bool(self.comparisons) and all(comparison.is_equal for comparison in self.comparisons)

    @property
    def has_failed(self) -> bool:
        """Whether the port raised an error or did not end."""
        return bool(self.comparisons) and self.comparisons[-1].has_failed

    @property
    def differing_lines(self) -> list[tuple[str, str]]:
        """Printed lines that differ on the most ranks."""
        return self.comparisons[-1].printed if self.comparisons else []

    @property
    def doubts(self) -> list[str]:
        """What each rank prints or writes, and checkpoints that differ, on the most ranks."""
        return self.comparisons[-1].doubts if self.comparisons else []


@dataclasses.dataclass(frozen=True)
class PortResult:
    """The result of porting a script.

    files     the script, and the other file that is ported with it
    best      the equal attempt, or the first attempt if none is equal
    tried     all attempts
    float64   whether they were compared in float64
    """

    files: ScriptFiles
    best: Attempt
    tried: list[Attempt]
    float64: bool

    @property
    def original(self) -> str:
        """The text of the script."""
        return self.files.text


def port_script(
    python_args: Sequence[str],
    ranks: Sequence[int],
    timeout_seconds: float,
    say: Callable[[str], None] = lambda _: None,
    sampler: str = "batches",
    other: Path | None = None,
    target: str = "ddp",
) -> PortResult:
    """Port `python_args`, a script and its arguments, and check it on these numbers of ranks.

    other    a file below the folder of the script that is edited with it
    target   "ddp", "fsdp" for fully_shard over the blocks of the model, "accelerate" or "fabric"
    sampler  "torch": an equal port is written with DistributedSampler, whose other order cannot be compared

    Raises `NotPortedError` for a script that cannot be ported, and `CannotRunError` if it does not run here.
    """
    script = Path(python_args[0])
    files = ScriptFiles(
        script, read_script(script), other, read_script(other) if other is not None else "", target=target
    )
    modules = [installed_module(IDIOMS[target])] if target in IDIOMS else []
    with ScriptHost(python_args, timeout_seconds, max_ranks=max(ranks), modules=modules) as host:
        say("running the script")
        facts = _observe(host, files)
        # fails here if the script cannot be edited, before anything is compared
        choices = _choices(facts, target)
        _edit(files, facts, dataclasses.replace(choices[0], sampler=sampler))
        say("running it in float64")
        imposed = dataclasses.replace(
            _IMPOSED,
            backward_is_update=not any(fact.kind == "step" for fact in facts),
            max_elements=0 if target == "fsdp" else _MOST_ELEMENTS,  # 0: whole tensors, to join the shards
        )
        original, float64 = _original(host, imposed)
        tried: list[Attempt] = []
        for choice in choices:
            if _is_settled(choice, tried):
                continue
            attempt = _edit(files, facts, choice)
            if any((each.text, each.other_text) == (attempt.text, attempt.other_text) for each in tried):
                continue
            say(f"checking the port on {' and '.join(map(str, ranks))} ranks")
            comparisons = _check(host, files, attempt, original, ranks, float64, imposed)
            tried.append(dataclasses.replace(attempt, comparisons=comparisons))
            if tried[-1].is_equal and not tried[-1].differing_lines:
                break
        equal = [attempt for attempt in tried if attempt.is_equal]
        if not equal:
            _refuse_coupled(files, facts)
            tried = _without_dropout(host, files, original, tried, ranks, float64, imposed, say)
            equal = [attempt for attempt in tried if attempt.is_equal]
    best = min(equal, key=lambda attempt: len(attempt.differing_lines)) if equal else tried[0]
    if best.is_equal and best.choice is not None and sampler != best.choice.sampler:
        other_order = _edit(files, facts, dataclasses.replace(best.choice, sampler=sampler))
        best = dataclasses.replace(other_order, comparisons=best.comparisons, without_dropout=best.without_dropout)
    return PortResult(files, best, tried, float64)


def _refuse_coupled(files: ScriptFiles, facts: Sequence[Fact]) -> None:
    """Raise `NotPortedError` for a loss that compares samples of a batch, because it is not a mean over samples."""
    for number, backward in enumerate(facts):
        if backward.kind == "backward" and backward.details["couples"]:
            earlier_facts = [fact for fact in facts[:number] if fact.kind in ("loss", "forward") and fact.is_inner]
            line = earlier_facts[-1].line if earlier_facts and earlier_facts[-1].kind == "loss" else backward.line
            raise NotPortedError(
                line,
                "this loss compares samples of a batch with each other, so it is not a mean over samples: gather the "
                "outputs of all ranks before it, with torch.distributed.nn.functional.all_gather",
                files.place(line),
            )


def _edit(files: ScriptFiles, facts: Sequence[Fact], choice: Choice) -> Attempt:
    """Return the attempt for a choice, not yet compared. Raises `NotPortedError` with the file and the line."""
    try:
        plan = edit_script(files, facts, choice)
        text, other_text = files.parts(plan.source.edited())
    except NotPortedError as error:
        raise NotPortedError(error.line, error.reason, files.place(error.line)) from None
    return Attempt(choice, text, plan.source.edits, sorted(plan.notes), [], other_text)


def check_ported(
    host: ScriptHost, port: Path, ranks: Sequence[int], say: Callable[[str], None] = lambda _: None
) -> PortResult:
    """Compare the user's port, perhaps edited by hand, with the script of `host` on these numbers of ranks.

    Raises `CannotRunError` if the original does not run here.
    """
    files = ScriptFiles(Path(host.python_args[0]), read_script(Path(host.python_args[0])), port_name=port.name)
    say("running the script in float64")
    imposed = _IMPOSED
    original, float64 = _original(host, imposed)
    if not original.ranks[0].updates:
        imposed = dataclasses.replace(_IMPOSED, backward_is_update=True)
        original, float64 = _original(host, imposed)
    if not original.ranks[0].updates:
        raise CannotRunError(f"{files.script}: no backward was called within the time limit, so nothing is compared")
    say(f"checking the port on {' and '.join(map(str, ranks))} ranks")
    attempt = Attempt(None, read_script(port), [], [], [])
    tried = [dataclasses.replace(attempt, comparisons=_check(host, files, attempt, original, ranks, float64, imposed))]
    if not tried[0].is_equal:
        tried = _without_dropout(host, files, original, tried, ranks, float64, imposed, say)
    return PortResult(files, tried[0], tried, float64)


def audit_port(
    python_args: Sequence[str], files: ScriptFiles, attempt: Attempt, timeout_seconds: float
) -> list[Finding]:
    """Return the FAIL and WARN findings of a port on 2 ranks that the original on one rank does not have."""
    # equal gradients prove that all terms have the same weight, and that each forward goes through the wrapper
    disproved = ("replicas.unwrapped", "gradient.") if attempt.is_equal else ()
    ignored_rules = set[str]()
    if "convert_sync_batchnorm" in attempt.text:  # works on CUDA only, as the port's notes say
        ignored_rules.add("replicas.buffers")

    def failures_and_warnings(text: str, other_text: str, ranks: int) -> list[Finding]:
        findings = _audit(python_args, files.written(text, other_text), ranks, timeout_seconds)
        return [finding for finding in findings if _counts(finding, ignored_rules, disproved)]

    findings = failures_and_warnings(attempt.text, attempt.other_text, 2)
    if findings:
        ignored_rules |= {finding.rule for finding in failures_and_warnings(files.text, files.other_text, 1)}
    return [finding for finding in findings if finding.rule not in ignored_rules]


def _counts(finding: Finding, ignored_rules: set[str], disproved: tuple[str, ...]) -> bool:
    return (
        finding.level in ("FAIL", "WARN")
        and finding.rule not in ignored_rules
        and not finding.rule.startswith(disproved)
    )


def _audit(python_args: Sequence[str], files: dict[str, str], ranks: int, timeout_seconds: float) -> Sequence[Finding]:
    """Return the findings of the audit of a script; none if the audit fails."""
    options = AuditOptions(processes=ranks, timeout_seconds=timeout_seconds, limit_seconds=timeout_seconds)
    with with_siblings(Path(python_args[0]), files) as candidate:
        try:
            audit = audit_script([str(candidate), *python_args[1:]], options, may_change_ranks=False)
        except ScriptFailedError as error:
            audit = error.audit
        except EveryrankError:
            audit = None
    return audit.findings if audit is not None else ()


def read_script(script: Path) -> str:
    """Return the text of a script. Raises `UsageError` if it cannot be read, is not UTF-8 or is not valid Python."""
    try:
        with tokenize.open(script) as file:
            encoding = file.encoding
        if encoding.lower().replace("_", "-") not in ("utf-8", "utf-8-sig", "ascii"):
            raise UsageError(f"{script}: its encoding is {encoding}; save it as UTF-8")
        text = script.read_bytes().decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise UsageError(f"{script}: {error}") from error
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise UsageError(f"{script}: line {error.lineno} is not valid Python ({error.msg})") from error
    return text


def observe(host: ScriptHost, seed: int | None = None, values: bool = False) -> ScriptRecording:
    """Run the script on one rank, with its expressions; `values` as in `ScriptHost.run`.

    Raises `CannotRunError` if the script does not run here.
    """
    recording = _observed(host, seed, values, no_workers=True)  # in a worker, the draws of a dataset are not recorded
    if recording.failure and not _hangs(recording):
        recording = _observed(host, seed, values, no_workers=False)
    has_stepped = any(expression["kind"] == "step" for expression in recording.ranks[0].facts.get("expressions", []))
    if recording.failure and (not has_stepped or _hangs(recording)):
        raise CannotRunError(f"the script does not run on one process here: {_reason(recording.failure)}")
    return recording


def _observe(host: ScriptHost, files: ScriptFiles) -> list[Fact]:
    recording = observe(host)
    offsets = {str(files.script.absolute()): 0}
    if files.other is not None:
        offsets[str(files.other.absolute())] = files.num_lines
    offsets = {os.path.normpath(path): offset for path, offset in offsets.items()}
    return read_facts(recording.ranks[0].facts.get("expressions", []), offsets)


def _observed(host: ScriptHost, seed: int | None, values: bool, no_workers: bool) -> ScriptRecording:
    return host.run(
        1,
        updates=_OBSERVED_UPDATES,
        num_detailed=0,
        imposed=Imposed(order=True, pass_batches=PASS_BATCHES, no_workers=no_workers, seed=seed),
        expressions=True,
        values=values,
    )


def _reason(failure: str) -> str:
    """Return why a run on one rank failed, without the rank."""
    return failure.removeprefix("rank 0: ")


def _choices(facts: Sequence[Fact], target: str) -> list[Choice]:
    """Return all choices; the first one follows the reductions of the losses."""
    reductions = {fact.details["reduction"] for fact in facts if fact.kind == "loss"}
    losses = ["sum", "mean"] if reductions == {"sum"} else ["mean", "sum"]
    # the ranks of FSDP evaluate the same number of batches, because each forward is a collective
    evaluations = ("whole",) if target == "fsdp" else ("split", "whole")
    return [Choice(loss, evaluation, target=target) for evaluation in evaluations for loss in losses]


def _is_settled(choice: Choice, tried: Sequence[Attempt]) -> bool:
    """Whether an earlier attempt rules out this choice."""
    return any(_excludes(attempt, attempt.choice, choice) for attempt in tried if attempt.choice is not None)


def _excludes(attempt: Attempt, tried_choice: Choice, choice: Choice) -> bool:
    if attempt.has_failed:
        return tried_choice.evaluation == choice.evaluation
    if tried_choice.loss != choice.loss:  # the loss was right in the first update
        return attempt.is_equal or attempt.comparisons[-1].updates > 0
    # no evaluation comes before the first update
    return not attempt.is_equal and attempt.comparisons[-1].updates == 0


_IMPOSED = Imposed(
    order=True,
    rows=True,
    seed=SEED,
    norms_over_ranks=True,
    pass_batches=PASS_BATCHES,
    max_elements=_MOST_ELEMENTS,
)


def _original(host: ScriptHost, imposed: Imposed) -> tuple[ScriptRecording, bool]:
    """Return the recording of the original on one rank, and whether it is in float64."""
    runs: list[ScriptRecording] = []
    for float64 in (True, False):
        runs.append(host.run(1, updates=UPDATES, num_detailed=UPDATES, float64=float64, imposed=imposed))
        if not runs[-1].failure:
            return runs[-1], float64
    float64_run, float32_run = runs
    # shortened epochs may cause the error: compare the updates before it
    if not float32_run.ranks[0].updates or _hangs(float32_run):
        raise CannotRunError(f"the script does not run with fixed random numbers: {_reason(float32_run.failure)}")
    float64 = len(float64_run.ranks[0].updates) == len(float32_run.ranks[0].updates)
    return (float64_run if float64 else float32_run), float64


def _hangs(recording: ScriptRecording) -> bool:
    return not recording.traceback


def _check(
    host: ScriptHost,
    files: ScriptFiles,
    attempt: Attempt,
    original: ScriptRecording,
    ranks: Sequence[int],
    float64: bool,
    imposed: Imposed,
) -> list[PortComparison]:
    """Compare on each number of ranks, until one differs."""
    tolerance = FLOAT64_TOLERANCE if float64 else FLOAT32_TOLERANCE
    comparisons: list[PortComparison] = []
    with with_siblings(files.script, files.written(attempt.text, attempt.other_text)) as candidate:
        for count in ranks:
            recording = host.run(
                count,
                python_args=[str(candidate), *host.python_args[1:]],
                updates=UPDATES,
                num_detailed=UPDATES,
                float64=float64,
                imposed=imposed,
                # Accelerate and Fabric search for GPUs themselves
                environment={} if enough_gpus(host.max_ranks) else _ON_CPU,
            )
            comparisons.append(compare_port(original, recording, tolerance))
            if not comparisons[-1].is_equal:
                break
    return comparisons


def _without_dropout(
    host: ScriptHost,
    files: ScriptFiles,
    with_dropout: ScriptRecording,
    tried: list[Attempt],
    ranks: Sequence[int],
    float64: bool,
    imposed: Imposed,
    say: Callable[[str], None],
) -> list[Attempt]:
    """Compare again without dropout, because some masks cannot be imposed."""
    say("comparing without dropout")
    imposed = dataclasses.replace(imposed, without_dropout=True)
    original, float64 = _original(host, imposed)
    losses_with_dropout, losses_without = (
        [update.losses for update in recording.ranks[0].updates] for recording in (with_dropout, original)
    )
    if losses_with_dropout == losses_without:  # there is no dropout
        return tried
    compared: list[Attempt] = []
    for attempt in tried:
        outcome = _check(host, files, attempt, original, ranks, float64, imposed)
        compared.append(dataclasses.replace(attempt, comparisons=outcome, without_dropout=True))
        if compared[-1].is_equal:
            return compared
    return tried


@contextlib.contextmanager
def with_siblings(script: Path, files: dict[str, str]) -> Generator[Path]:
    """Yield the path of the port in a temporary folder with links to all other files of the script's folder."""
    with tempfile.TemporaryDirectory(prefix="everyrank-port-") as folder:
        for name, text in files.items():
            _link_folder(script.absolute().parent, Path(folder), Path(name))
            (Path(folder) / name).unlink(missing_ok=True)  # never write through a link to the user's file
            (Path(folder) / name).write_bytes(text.encode())
        yield Path(folder) / next(iter(files))


def _link_folder(original: Path, folder: Path, name: Path) -> None:
    """Link to all entries of a folder except the file `name`, whose parent folders are created."""
    if folder.is_symlink():
        folder.unlink()
    folder.mkdir(exist_ok=True)
    for sibling in original.iterdir():
        link = folder / sibling.name
        if sibling.name != name.parts[0] and not os.path.lexists(link):
            link.symlink_to(sibling)
    if len(name.parts) > 1:
        _link_folder(original / name.parts[0], folder / name.parts[0], Path(*name.parts[1:]))
