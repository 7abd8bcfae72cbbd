"""Compares a port on several ranks with the original on one: each update, and the lines that it prints."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

from everyrank.rerun import Printed, RankRecording, RecordedUpdate, ScriptRecording

__all__ = ["PortComparison", "compare_port"]

FLOAT64_TOLERANCE, FLOAT32_TOLERANCE = 1e-9, 2e-3
_WEIGHTS_TOLERANCE = 1e-7
_PRINTED_TOLERANCE = 2e-4  # relative
_PRINTED_ZERO = 1e-9
_LOCAL_LOSS = "it is the loss of one rank's samples, not the mean over the samples of all ranks"
# lines with a time or a speed differ in each run
_IS_TIMED = re.compile(
    r"\d\d:\d\d|\d\s*(ms|s|sec|secs|seconds|it/s|samples/s|mins?)\b"
    r"|(?<![a-z])((run|wall|date)?times?(stamp)?|elapsed|eta|speed|throughput)(?![a-z])",  # whole words: not "beta"
    re.IGNORECASE,
)
_NUMBER = re.compile(r"-?\d+\.?\d*(?:[eE][-+]?\d+)?")


@dataclasses.dataclass(frozen=True)
class PortComparison:
    """How a port on `ranks` ranks compares with the original.

    updates     number of optimizer steps that were compared
    largest     largest relative difference of "losses", "gradients", "weights" and "buffers"
    difference  "" or one sentence: the first update that differs, by how much
    printed     lines that differ: (the original's, the port's)
    doubts      sentences: what each rank prints or writes, and checkpoints that differ
    has_failed  whether the port raised an error or did not end
    """

    ranks: int
    updates: int
    largest: dict[str, float]
    difference: str
    printed: list[tuple[str, str]]
    doubts: list[str] = dataclasses.field(default_factory=list[str])
    has_failed: bool = False

    @property
    def is_equal(self) -> bool:
        """Whether no update differs."""
        return not self.difference


def compare_port(original: ScriptRecording, port: ScriptRecording, tolerance: float) -> PortComparison:
    """Compare rank 0 of the port with the original, and the other ranks with rank 0.

    Gradients and weights are compared by the norm of the whole update: a tensor whose gradient is rounding only, such
    as a bias before batch norm, has no relative difference of its own.
    """
    ranks = len(port.ranks)
    largest = {"losses": 0.0, "gradients": 0.0, "weights": 0.0, "buffers": 0.0}
    if port.failure and _error(port) != _error(original):
        reason = f"on {ranks} ranks the port fails: {port.failure}{_hint(port.failure)}"
        return PortComparison(ranks, 0, largest, reason, [], has_failed=True)
    expected_updates, port_updates = original.ranks[0].updates, port.ranks[0].updates
    for number, expected in enumerate(expected_updates[: len(port_updates)]):
        update, is_sharded = _gather_shards(
            expected, [recording.updates[number] for recording in port.ranks if number < len(recording.updates)]
        )
        ranks_to_compare = port.ranks[:1] if is_sharded else port.ranks
        difference = _compare_update(number, expected, update, ranks_to_compare, largest, tolerance)
        if difference:
            return PortComparison(ranks, number, largest, f"on {ranks} ranks {difference}", [])
    if not expected_updates:
        return PortComparison(ranks, 0, largest, f"on {ranks} ranks no update was compared", [])
    is_cut = _ends_early(original, port)
    if len(expected_updates) != len(port_updates) and not is_cut:
        reason = f"on {ranks} ranks the port has {len(port_updates)} updates, the original {len(expected_updates)}"
        return PortComparison(ranks, min(len(expected_updates), len(port_updates)), largest, reason, [])
    printed = _differing_lines(original.ranks[0], port.ranks[0], is_cut)
    doubts = _find_doubts(original.ranks[0], port.ranks, is_cut)
    return PortComparison(ranks, min(len(expected_updates), len(port_updates)), largest, "", printed, doubts)


def _gather_shards(expected: RecordedUpdate, rank_recordings: list[RecordedUpdate]) -> tuple[RecordedUpdate, bool]:
    """Return the update of rank 0, with whole tensors in place of FSDP's shards, and whether any was sharded."""
    import torch

    gathered, is_sharded = rank_recordings[0], False
    for kind in ("gradients", "after"):
        tensors = dict(getattr(gathered, kind))
        for name, reference in getattr(expected, kind).items():
            shards = [getattr(rank_recording, kind).get(name) for rank_recording in rank_recordings]
            nonempty = [shard for shard in shards if shard is not None and shard.numel()]
            if reference is None or not nonempty or all(shard.shape == reference.shape for shard in nonempty):
                continue
            if reference.dim() and sum(len(shard) for shard in nonempty) == len(reference):
                tensors[name], is_sharded = torch.cat(nonempty), True
        gathered = dataclasses.replace(gathered, **{kind: tensors})
    return gathered, is_sharded


def _ends_early(original: ScriptRecording, port: ScriptRecording) -> bool:
    """Whether the run with fewer updates was stopped by the time limit, so that only these updates are compared."""
    shorter = min(original, port, key=lambda recording: len(recording.ranks[0].updates))
    has_same_number = len(original.ranks[0].updates) == len(port.ranks[0].updates)
    return not has_same_number and not shorter.failure and not shorter.ranks[0].facts.get("came_to_end", False)


def _error(recording: ScriptRecording) -> str:
    """Return the error that a run ended with, whichever rank had it."""
    return re.sub(r"^rank \d+: ", "", recording.failure)


def _hint(failure: str) -> str:
    """Return a likely cause of an error that smaller batches can raise."""
    if "size" in failure or "shape" in failure or "dimension" in failure or "more than 1 value" in failure:
        return "; a rank has fewer samples than the batch: a size that the script writes down itself, or squeeze()?"
    return ""


def _compare_update(
    number: int,
    expected: RecordedUpdate,
    actual: RecordedUpdate,
    ranks: tuple[RankRecording, ...],
    largest: dict[str, float],
    tolerance: float,
) -> str:
    """Return one sentence if an update differs, else ""."""
    update_text = f"update {number} ({actual.step.rpartition('/')[2]})"
    if len(expected.losses) != len(actual.losses):
        return f"{update_text} has {len(actual.losses)} backward passes, the original {len(expected.losses)}"
    for expected_loss, loss in zip(expected.losses, actual.losses, strict=True):
        gap = abs(expected_loss - loss) / max(abs(expected_loss), 1e-8)
        largest["losses"] = max(largest["losses"], gap)
        if not gap <= tolerance:
            losses_by_rank = [
                rank_recording.updates[number].losses
                for rank_recording in ranks
                if number < len(rank_recording.updates)
            ]
            cause = (
                ""
                if all(rank_recording == losses_by_rank[0] for rank_recording in losses_by_rank)
                else f"; likely cause: {_LOCAL_LOSS}"
            )
            ratio = _ratio(loss, expected_loss)
            return f"{update_text}: the loss is {loss:.6g}, in the original {expected_loss:.6g} ({ratio}){cause}"
    has_same_rates = len(expected.rates) == len(actual.rates) and all(
        abs(expected_loss - loss) <= 1e-9 * abs(expected_loss)
        for expected_loss, loss in zip(expected.rates, actual.rates, strict=True)
    )
    for kind, expected_tensors, actual_tensors in (
        ("gradients", expected.gradients, actual.gradients),
        ("weights", expected.after, actual.after),
    ):
        if kind == "weights" and not has_same_rates:
            return f"{update_text}: the learning rates are {actual.rates}, in the original {expected.rates}"
        gap, ratio = _distance(expected_tensors, actual_tensors)
        # Adam divides by the root of second moments, so the rounding of a tiny gradient may move a weight
        allowed = tolerance if kind == "gradients" else max(tolerance, _WEIGHTS_TOLERANCE)
        if gap is None:
            return f"{update_text}: {kind} of other parameters or shapes ({ratio})"
        largest[kind] = max(largest[kind], gap)
        if not gap <= allowed:
            return (
                f"{update_text}: the {kind} differ by {gap:.1e} of their norm; they are {ratio} times the original's"
                f"{_cause(kind, float(ratio), ranks, number)}"
            )
    buffers = {name: state for name, state in expected.states.items() if state.is_floating_point()}
    # reported only: the unbiased variance of a batch depends on how many ranks compute it
    gap, _ = _distance(buffers, {name: actual.states[name] for name in buffers if name in actual.states})
    largest["buffers"] = max(largest["buffers"], math.inf if gap is None else gap)
    for rank, recording in enumerate(ranks[1:], 1):
        if number < len(recording.updates):
            gap, ratio = _distance(actual.after, recording.updates[number].after)
            if gap is None or not gap <= tolerance:
                return f"{update_text}: rank {rank} has other weights than rank 0"
    return ""


def _cause(kind: str, ratio: float, ranks: tuple[RankRecording, ...], number: int) -> str:
    """Return a likely cause of gradients that differ."""
    gradients_by_rank = [gradients.updates[number].gradients for gradients in ranks if number < len(gradients.updates)]
    if kind != "gradients":
        return ""
    if any(
        (gap := _distance(gradients_by_rank[0], gradients)[0]) is None or gap > FLOAT32_TOLERANCE
        for gradients in gradients_by_rank[1:]
    ):
        return "; likely cause: they are not averaged, because the forward does not go through the wrapper"
    if abs(ratio * len(ranks) - 1) < 1e-3:
        return "; likely cause: the loss is a sum, and DistributedDataParallel averages"
    if abs(ratio / len(ranks) - 1) < 1e-3:
        return "; likely cause: the gradient is multiplied by the number of ranks"
    return ""


def _ratio(value: float, reference: float) -> str:
    return f"{value / reference:.4g} times" if reference else "not 0"


def _distance(expected: dict[str, Any], actual: dict[str, Any]) -> tuple[float | None, str]:
    """Return the relative difference, by norm, and the factor that fits best; (None, names) if the names differ."""
    expected_tensors = {name: tensor for name, tensor in expected.items() if tensor is not None}
    actual_tensors = {name: tensor for name, tensor in actual.items() if tensor is not None}
    if expected_tensors.keys() != actual_tensors.keys():
        extra_names = sorted(expected_tensors.keys() ^ actual_tensors.keys())
        # the wrapper may give a gradient of zeros to a parameter without one
        all_tensors = {**actual_tensors, **expected_tensors}
        if any(float(all_tensors[name].abs().max()) for name in extra_names):
            return None, ", ".join(extra_names[:3])
    squares = product = gap = 0.0
    for name in expected_tensors.keys() & actual_tensors.keys():
        a, b = expected_tensors[name].double(), actual_tensors[name].double()
        if a.shape != b.shape:
            return None, name
        squares += float(a.square().sum())
        product += float((a * b).sum())
        gap += float((a - b).square().sum())
    norm = max(squares, 1e-300) ** 0.5
    return gap**0.5 / norm, f"{product / max(squares, 1e-300):.4g}"


def _differing_lines(original: RankRecording, port: RankRecording, is_cut: bool) -> list[tuple[str, str]]:
    """Return the printed lines whose numbers differ by more than rounding, without lines that look timed.

    If a run `is_cut`, only the lines that both printed are compared.
    """
    expected_lines, port_lines = _lines(original.printed), _lines(port.printed)
    differing = [(a, b) for a, b in zip(expected_lines, port_lines, strict=False) if not _is_same(a, b)]
    if is_cut:
        return differing
    longer, shorter = (
        (expected_lines, port_lines) if len(expected_lines) > len(port_lines) else (port_lines, expected_lines)
    )
    extra_lines = longer[len(shorter) :]
    return differing + [(line, "") if longer is expected_lines else ("", line) for line in extra_lines]


def _lines(printed: list[Printed]) -> list[str]:
    return [each.text.strip() for each in printed if each.stream == "stdout" and not _IS_TIMED.search(each.text)]


def _is_same(line: str, other_line: str) -> bool:
    if _NUMBER.sub("#", line) != _NUMBER.sub("#", other_line):
        return False
    return all(
        _is_close(text, other_text)
        for text, other_text in zip(_NUMBER.findall(line), _NUMBER.findall(other_line), strict=True)
    )


def _is_close(text: str, other_text: str) -> bool:
    """Whether two printed numbers are equal except for rounding, which may also change their last digit."""
    number, other_number = float(text), float(other_text)
    largest, gap = max(abs(number), abs(other_number)), abs(number - other_number)
    last_digit = max(_last_digit(text), _last_digit(other_text))
    # 0.0001 and 0.0002 differ in their only digit, so they are not close
    rounded = last_digit * 1.01 if last_digit <= min(_PRINTED_TOLERANCE, 0.01 * largest) else 0.0
    return gap <= max(_PRINTED_TOLERANCE * largest, rounded, _PRINTED_ZERO)


def _last_digit(text: str) -> float:
    """Return the value of one unit in the last digit of a printed number: 0.001 for "0.512", 1e-7 for "3.25e-05"."""
    digits, _, exponent = text.lower().partition("e")
    return 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))


# --- what each rank does, and checkpoints


def _find_doubts(original: RankRecording, ranks: tuple[RankRecording, ...], is_cut: bool) -> list[str]:
    """Return sentences about lines that several ranks print, files that they write, and checkpoints that differ."""
    doubts: dict[str, str] = {}
    for rank in ranks[1:]:
        for line in rank.printed:
            if line.stream == "stdout":
                doubts.setdefault(
                    line.place, f"{_short_location(line.place)} prints on each rank: {line.text.strip()[:60]}"
                )
        unmatched_names = dict(_writes(ranks[0]))
        for path, location in _writes(rank):
            if path in unmatched_names:
                doubts.setdefault(path, f"{_short_location(location)} writes {Path(path).name} on each rank")
    expected, actual = _saved(original), _saved(ranks[0])
    unmatched_names = [name for name in actual if name not in expected]
    for name, keys in expected.items():
        if is_cut and name not in actual:
            continue
        # a file name with the time differs in each run
        renamed = next(
            (other_name for other_name in unmatched_names if _NUMBER.sub("#", other_name) == _NUMBER.sub("#", name)),
            None,
        )
        if name not in actual and renamed is not None:
            unmatched_names.remove(renamed)
            actual[name] = actual[renamed]
        if name not in actual:
            doubts[name] = f"the port does not save {name}, which the original does"
        elif keys != actual[name]:
            differing_keys = sorted(set(keys) ^ set(actual[name]))[:2]
            doubts[name] = f"the checkpoint {name} has other keys than the original's: {', '.join(differing_keys)}"
    return list(doubts.values())


def _writes(recording: RankRecording) -> list[tuple[str, str]]:
    saved = [(path, location) for path, location, _ in recording.facts.get("saved", [])]
    return saved + [(path, location) for path, location in recording.facts.get("written", [])]


def _saved(recording: RankRecording) -> dict[str, list[str]]:
    """Return the keys of each saved file, by its name."""
    return {Path(path).name: keys for path, _, keys in recording.facts.get("saved", [])}


def _short_location(location: str) -> str:
    return location.rpartition("/")[2]
