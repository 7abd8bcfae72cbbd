"""Observes a script, edits it, checks the result, and tries another choice where the source leaves one open."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import tokenize
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from everyrank.audit import AuditOptions, Finding, ScriptFailedError, audit_script
from everyrank.errors import CannotRunError, EveryrankError, UsageError
from everyrank.port.check import FLOAT32_TOLERANCE, FLOAT64_TOLERANCE, PortComparison, compare_port
from everyrank.port.edits import edit_script
from everyrank.port.facts import Fact, read_facts
from everyrank.port.plan import Choice
from everyrank.port.source import Edit
from everyrank.rerun import Imposed, ScriptHost, ScriptRecording

__all__ = ["Attempt", "PortResult", "audit_port", "check_ported", "port_script"]

UPDATES = 12
_OBSERVED_UPDATES = 24
_PASS_BATCHES = 4
_MOST_ELEMENTS = 4096


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One way to port the script, and how it compares.

    choice        None for a port that the user gave
    text          the whole ported script
    without_dropout  whether it was equal only with all dropout left out
    """

    choice: Choice | None
    text: str
    edits: list[Edit]
    notes: list[tuple[int, str]]
    comparisons: list[PortComparison]
    without_dropout: bool = False

    @property
    def is_equal(self) -> bool:
        """Whether it was equal on each number of ranks."""
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
    """What became of a script.

    original  its text
    best      the attempt that is equal, or the last one that is not
    tried     all attempts
    float64   whether they were compared in float64
    """

    original: str
    best: Attempt
    tried: list[Attempt]
    float64: bool


def port_script(
    words: Sequence[str],
    ranks: Sequence[int],
    timeout_seconds: float,
    say: Callable[[str], None] = lambda _: None,
    sampler: str = "batches",
) -> PortResult:
    """Port `words`, a script and its arguments, and check it on these numbers of ranks.

    sampler  "torch": an equal port is written with DistributedSampler, whose other order cannot be compared

    Raises `NotPortedError` for a script that is not ported, and `CannotRunError` if it does not run here.
    """
    script = Path(words[0])
    text = _read(script)
    with ScriptHost(words, timeout_seconds=timeout_seconds) as host:
        say("running the script")
        facts = _observe(host, script)
        # the same edits that the first choice needs, before anything is compared
        choices = _choices(facts)
        edit_script(text, facts, choices[0])
        say("running it in float64")
        imposed = dataclasses.replace(_IMPOSED, backward_is_update=not any(fact.kind == "step" for fact in facts))
        original, float64 = _original(host, imposed)
        tried: list[Attempt] = []
        for choice in choices:
            if _is_settled(choice, tried):
                continue
            plan = edit_script(text, facts, choice)
            ported = plan.source.edited()
            if any(attempt.text == ported for attempt in tried):
                continue
            say(f"checking the port on {' and '.join(map(str, ranks))} ranks")
            comparisons = _check(host, words, ported, original, ranks, float64, imposed)
            tried.append(Attempt(choice, ported, plan.source.edits, sorted(plan.notes), comparisons))
            if tried[-1].is_equal and not tried[-1].differing_lines:
                break
        equal = [attempt for attempt in tried if attempt.is_equal]
        if not equal:
            tried = _without_dropout(host, words, original, tried, ranks, float64, imposed, say)
            equal = [attempt for attempt in tried if attempt.is_equal]
    best = min(equal, key=lambda attempt: len(attempt.differing_lines)) if equal else tried[0]
    if best.is_equal and best.choice is not None and sampler != best.choice.sampler:
        choice = dataclasses.replace(best.choice, sampler=sampler)
        plan = edit_script(text, facts, choice)
        best = dataclasses.replace(
            best, choice=choice, text=plan.source.edited(), edits=plan.source.edits, notes=sorted(plan.notes)
        )
    return PortResult(text, best, tried, float64)


def check_ported(
    host: ScriptHost, port: Path, ranks: Sequence[int], say: Callable[[str], None] = lambda _: None
) -> PortResult:
    """Compare a port that the user has, perhaps edited by hand, with the script of `host` on these numbers of ranks.

    Raises `CannotRunError` if the original does not run here.
    """
    words, ported = host.words, _read(port)
    say("running the script in float64")
    imposed = _IMPOSED
    original, float64 = _original(host, imposed)
    if not original.ranks[0].updates:
        imposed = dataclasses.replace(_IMPOSED, backward_is_update=True)
        original, float64 = _original(host, imposed)
    if not original.ranks[0].updates:
        raise CannotRunError(f"{words[0]}: no backward was seen within the time of a run, so nothing is compared")
    say(f"checking the port on {' and '.join(map(str, ranks))} ranks")
    tried = [Attempt(None, ported, [], [], _check(host, words, ported, original, ranks, float64, imposed))]
    if not tried[0].is_equal:
        tried = _without_dropout(host, words, original, tried, ranks, float64, imposed, say)
    return PortResult(_read(Path(words[0])), tried[0], tried, float64)


def audit_port(words: Sequence[str], attempt: Attempt, timeout_seconds: float) -> list[Finding]:
    """FAIL and WARN findings of the audit of a port on 2 ranks that the original on one process does not have."""
    # an equal gradient is proof that no forward that counts is outside of the wrapper
    known = {"replicas.unwrapped"} if attempt.is_equal else set[str]()
    if "convert_sync_batchnorm" in attempt.text:  # it works on CUDA only, which the port's notes tell
        known.add("replicas.buffers")

    def worst(text: str, ranks: int) -> list[Finding]:
        findings = _audit(words, text, ranks, timeout_seconds)
        return [each for each in findings if each.level in ("FAIL", "WARN") and each.rule not in known]

    findings = worst(attempt.text, 2)
    if findings:
        known |= {each.rule for each in worst(_read(Path(words[0])), 1)}
    return [each for each in findings if each.rule not in known]


def _audit(words: Sequence[str], text: str, ranks: int, timeout_seconds: float) -> Sequence[Finding]:
    """The findings of the rules in a script; none if the script does not run to a verdict."""
    options = AuditOptions(processes=ranks, timeout_seconds=timeout_seconds, limit_seconds=timeout_seconds)
    with _with_siblings(Path(words[0]), text) as candidate:
        try:
            audit = audit_script([str(candidate), *words[1:]], options, is_open=False)
        except ScriptFailedError as error:
            audit = error.audit
        except EveryrankError:
            audit = None
    return audit.findings if audit is not None else ()


def _read(script: Path) -> str:
    try:
        with tokenize.open(script) as file:
            encoding = file.encoding
        if encoding.lower().replace("_", "-") not in ("utf-8", "utf-8-sig", "ascii"):
            raise UsageError(f"{script}: its encoding is {encoding}; save it as UTF-8")
        return script.read_bytes().decode("utf-8")
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise UsageError(f"{script}: {error}") from error


def _observe(host: ScriptHost, script: Path) -> list[Fact]:
    recording = host.run(
        1,
        updates=_OBSERVED_UPDATES,
        detailed=0,
        imposed=Imposed(order=True, pass_batches=_PASS_BATCHES),
        expressions=True,
    )
    if recording.trouble:
        raise CannotRunError(f"the script does not run on one process here: {_reason(recording.trouble)}")
    return read_facts(recording.ranks[0].facts.get("expressions", []), os.path.abspath(script))  # noqa: PTH100


def _reason(trouble: str) -> str:
    """Why a run on one rank failed, without the number of the rank."""
    return trouble.removeprefix("rank 0: ")


def _choices(facts: Sequence[Fact]) -> list[Choice]:
    """All choices, the one that the losses suggest first."""
    reductions = {fact.details["reduction"] for fact in facts if fact.kind == "loss"}
    losses = ["sum", "mean"] if reductions == {"sum"} else ["mean", "sum"]
    return [Choice(loss, evaluation) for evaluation in ("split", "whole") for loss in losses]


def _is_settled(choice: Choice, tried: Sequence[Attempt]) -> bool:
    """Whether an earlier attempt has shown that this choice is not the right one."""
    return any(_excludes(attempt, attempt.choice, choice) for attempt in tried if attempt.choice is not None)


def _excludes(attempt: Attempt, known: Choice, choice: Choice) -> bool:
    if attempt.has_failed:
        return known.evaluation == choice.evaluation
    if known.loss != choice.loss:  # the loss was right in the first update
        return attempt.is_equal or attempt.comparisons[-1].updates > 0
    # no evaluation comes before the first update
    return not attempt.is_equal and attempt.comparisons[-1].updates == 0


_IMPOSED = Imposed(
    order=True,
    rows=True,
    seed=1234,
    norms_over_ranks=True,
    pass_batches=_PASS_BATCHES,
    most_elements=_MOST_ELEMENTS,
)


def _original(host: ScriptHost, imposed: Imposed) -> tuple[ScriptRecording, bool]:
    """The original on one rank, in float64 if it runs there."""
    trouble = ""
    for float64 in (True, False):
        recording = host.run(1, updates=UPDATES, detailed=UPDATES, float64=float64, imposed=imposed)
        if not recording.trouble:
            return recording, float64
        trouble = recording.trouble
    raise CannotRunError(f"the script does not run with fixed random numbers: {_reason(trouble)}")


def _check(
    host: ScriptHost,
    words: Sequence[str],
    ported: str,
    original: ScriptRecording,
    ranks: Sequence[int],
    float64: bool,
    imposed: Imposed,
) -> list[PortComparison]:
    """Compare on each number of ranks, until one differs."""
    tolerance = FLOAT64_TOLERANCE if float64 else FLOAT32_TOLERANCE
    comparisons: list[PortComparison] = []
    with _with_siblings(Path(words[0]), ported) as candidate:
        for count in ranks:
            recording = host.run(
                count,
                words=[str(candidate), *words[1:]],
                updates=UPDATES,
                detailed=UPDATES,
                float64=float64,
                imposed=imposed,
            )
            comparisons.append(compare_port(original, recording, tolerance))
            if not comparisons[-1].is_equal:
                break
    return comparisons


def _without_dropout(
    host: ScriptHost,
    words: Sequence[str],
    with_dropout: ScriptRecording,
    tried: list[Attempt],
    ranks: Sequence[int],
    float64: bool,
    imposed: Imposed,
    say: Callable[[str], None],
) -> list[Attempt]:
    """Compare again with all dropout left out: some masks cannot be imposed, and then nothing can be told with them."""
    say("comparing without dropout")
    imposed = dataclasses.replace(imposed, without_dropout=True)
    original, float64 = _original(host, imposed)
    before, after = ([update.losses for update in each.ranks[0].updates] for each in (with_dropout, original))
    if before == after:  # there is no dropout
        return tried
    again: list[Attempt] = []
    for attempt in tried:
        found = _check(host, words, attempt.text, original, ranks, float64, imposed)
        again.append(dataclasses.replace(attempt, comparisons=found, without_dropout=True))
        if again[-1].is_equal:
            return again
    return tried


@contextlib.contextmanager
def _with_siblings(script: Path, text: str) -> Generator[Path]:
    """The port in a folder of its own, with links to all that stands beside the script, which it may import or read."""
    with tempfile.TemporaryDirectory(prefix="everyrank-port-") as folder:
        path = Path(folder) / f"{script.stem}_ddp.py"
        for sibling in script.absolute().parent.iterdir():
            if sibling.name != path.name:
                (path.parent / sibling.name).symlink_to(sibling)
        path.write_bytes(text.encode())
        yield path
