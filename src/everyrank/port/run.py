"""Observes a script, edits it, checks the result, and tries another choice where the source leaves one open."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import tokenize
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from everyrank.errors import CannotRunError, UsageError
from everyrank.port.check import FLOAT32_TOLERANCE, FLOAT64_TOLERANCE, PortComparison, compare_port
from everyrank.port.edits import edit_script
from everyrank.port.facts import Fact, read_facts
from everyrank.port.plan import Choice
from everyrank.port.source import Edit, NotPortedError
from everyrank.rerun import Imposed, ScriptHost, ScriptRecording

__all__ = ["Attempt", "PortResult", "port_script", "with_siblings"]

UPDATES = 12
_OBSERVED_UPDATES = 24
_PASS_BATCHES = 4
_MOST_ELEMENTS = 4096


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One way to port the script, and how it compares.

    text          the whole ported script
    without_dropout  whether it was equal only with all dropout left out
    """

    choice: Choice
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
    words: Sequence[str], ranks: Sequence[int], timeout_seconds: float, say: Callable[[str], None] = lambda _: None
) -> PortResult:
    """Port `words`, a script and its arguments, and check it on these numbers of ranks.

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
        original, float64 = _original(host)
        if not original.ranks[0].updates:
            line = next(fact.line for fact in facts if fact.kind == "backward")
            raise NotPortedError(
                line,
                "no optimizer of torch.optim steps after this backward, so the check has nothing to compare: use one",
            )
        tried: list[Attempt] = []
        for choice in choices:
            if _is_settled(choice, tried):
                continue
            plan = edit_script(text, facts, choice)
            ported = plan.source.edited()
            if any(attempt.text == ported for attempt in tried):
                continue
            say(f"checking the port on {' and '.join(map(str, ranks))} ranks")
            comparisons = _check(host, words, ported, original, ranks, float64)
            tried.append(Attempt(choice, ported, plan.source.edits, sorted(plan.notes), comparisons))
            if tried[-1].is_equal and not tried[-1].differing_lines:
                break
        equal = [attempt for attempt in tried if attempt.is_equal]
        if not equal:
            tried = _without_dropout(host, words, tried, ranks, float64, say)
            equal = [attempt for attempt in tried if attempt.is_equal]
    best = min(equal, key=lambda attempt: len(attempt.differing_lines)) if equal else tried[0]
    return PortResult(text, best, tried, float64)


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
    return any(
        attempt.choice.loss != choice.loss
        if attempt.is_equal
        else attempt.has_failed and attempt.choice.evaluation == choice.evaluation
        for attempt in tried
    )


def _imposed(*, without_dropout: bool = False) -> Imposed:
    return Imposed(
        order=True,
        rows=True,
        seed=1234,
        norms_over_ranks=True,
        pass_batches=_PASS_BATCHES,
        most_elements=_MOST_ELEMENTS,
        without_dropout=without_dropout,
    )


def _original(host: ScriptHost, *, without_dropout: bool = False) -> tuple[ScriptRecording, bool]:
    """The original on one rank, in float64 if it runs there."""
    trouble = ""
    for float64 in (True, False):
        recording = host.run(
            1, updates=UPDATES, detailed=UPDATES, float64=float64, imposed=_imposed(without_dropout=without_dropout)
        )
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
    *,
    without_dropout: bool = False,
) -> list[PortComparison]:
    """Compare on each number of ranks, until one differs."""
    tolerance = FLOAT64_TOLERANCE if float64 else FLOAT32_TOLERANCE
    comparisons: list[PortComparison] = []
    with with_siblings(Path(words[0]), ported, f"{Path(words[0]).stem}_ddp.py") as candidate:
        for count in ranks:
            recording = host.run(
                count,
                words=[str(candidate), *words[1:]],
                updates=UPDATES,
                detailed=UPDATES,
                float64=float64,
                imposed=_imposed(without_dropout=without_dropout),
            )
            comparisons.append(compare_port(original, recording, tolerance))
            if not comparisons[-1].is_equal:
                break
    return comparisons


def _without_dropout(
    host: ScriptHost,
    words: Sequence[str],
    tried: list[Attempt],
    ranks: Sequence[int],
    float64: bool,
    say: Callable[[str], None],
) -> list[Attempt]:
    """Compare again with all dropout left out: some masks cannot be imposed, and then nothing can be told with them."""
    say("comparing without dropout")
    original, float64 = _original(host, without_dropout=True)
    again: list[Attempt] = []
    for attempt in tried:
        found = _check(host, words, attempt.text, original, ranks, float64, without_dropout=True)
        again.append(dataclasses.replace(attempt, comparisons=found, without_dropout=True))
        if again[-1].is_equal:
            return again
    return tried


@contextlib.contextmanager
def with_siblings(script: Path, text: str, name: str) -> Generator[Path]:
    """A text in a folder of its own, with links to all that stands beside the script, which it may import or read."""
    with tempfile.TemporaryDirectory(prefix="everyrank-port-") as folder:
        path = Path(folder) / name
        for sibling in script.absolute().parent.iterdir():
            if sibling.name != path.name:
                (path.parent / sibling.name).symlink_to(sibling)
        path.write_bytes(text.encode())
        yield path
