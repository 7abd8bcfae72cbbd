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
_PRINTED_TOLERANCE = 2e-4
_OWN_LOSS = "it is the loss of a rank's own samples, not the mean over those of all ranks"
# lines with a time or a speed differ in each run
_IS_TIMED = re.compile(
    r"\d\d:\d\d|\d\s*(ms|s|sec|secs|seconds|it/s|samples/s|mins?)\b|time|elapsed|eta|speed|throughput", re.IGNORECASE
)
_NUMBER = re.compile(r"-?\d+\.?\d*(?:[eE][-+]?\d+)?")


@dataclasses.dataclass(frozen=True)
class PortComparison:
    """How a port on `ranks` ranks compares with the original.

    updates     optimizer steps that were compared
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
    if port.trouble and _error(port) != _error(original):
        reason = f"on {ranks} ranks the port fails: {port.trouble}{_hint(port.trouble)}"
        return PortComparison(ranks, 0, largest, reason, [], has_failed=True)
    one, many = original.ranks[0].updates, port.ranks[0].updates
    for number, expected in enumerate(one[: len(many)]):
        whole, is_sharded = _whole(
            expected, [each.updates[number] for each in port.ranks if number < len(each.updates)]
        )
        ranks_to_compare = port.ranks[:1] if is_sharded else port.ranks
        difference = _compare_update(number, expected, whole, ranks_to_compare, largest, tolerance)
        if difference:
            return PortComparison(ranks, number, largest, f"on {ranks} ranks {difference}", [])
    if not one:
        return PortComparison(ranks, 0, largest, f"on {ranks} ranks no update was compared", [])
    cut = _ends_early(original, port)
    if len(one) != len(many) and not cut:
        reason = f"on {ranks} ranks the port has {len(many)} updates, the original {len(one)}"
        return PortComparison(ranks, min(len(one), len(many)), largest, reason, [])
    printed = _differing_lines(original.ranks[0], port.ranks[0], cut)
    doubts = _doubts(original.ranks[0], port.ranks, cut)
    return PortComparison(ranks, min(len(one), len(many)), largest, "", printed, doubts)


def _whole(expected: RecordedUpdate, parts: list[RecordedUpdate]) -> tuple[RecordedUpdate, bool]:
    """Return the update of rank 0 with whole tensors in place of shards, which FSDP cuts along the first dimension."""
    import torch

    whole, is_sharded = parts[0], False
    for kind in ("gradients", "after"):
        tensors = dict(getattr(whole, kind))
        for name, reference in getattr(expected, kind).items():
            shards = [getattr(part, kind).get(name) for part in parts]
            kept = [shard for shard in shards if shard is not None and shard.numel()]
            if reference is None or not kept or all(shard.shape == reference.shape for shard in kept):
                continue
            if reference.dim() and sum(len(shard) for shard in kept) == len(reference):
                tensors[name], is_sharded = torch.cat(kept), True
        whole = dataclasses.replace(whole, **{kind: tensors})
    return whole, is_sharded


def _ends_early(original: ScriptRecording, port: ScriptRecording) -> bool:
    """Whether the run with fewer updates was ended when its time was up: the updates before it are compared."""
    shorter = min(original, port, key=lambda recording: len(recording.ranks[0].updates))
    same = len(original.ranks[0].updates) == len(port.ranks[0].updates)
    return not same and not shorter.trouble and not shorter.ranks[0].facts.get("came_to_end", False)


def _error(recording: ScriptRecording) -> str:
    """Return the error that a run ended with, whichever rank had it."""
    return re.sub(r"^rank \d+: ", "", recording.trouble)


def _hint(trouble: str) -> str:
    """What an error that only smaller batches give may mean."""
    if "size" in trouble or "shape" in trouble or "dimension" in trouble or "more than 1 value" in trouble:
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
    """One sentence if an update differs."""
    where = f"update {number} ({actual.step.rpartition('/')[2]})"
    if len(expected.losses) != len(actual.losses):
        return f"{where} has {len(actual.losses)} backward passes, the original {len(expected.losses)}"
    for one, other in zip(expected.losses, actual.losses, strict=True):
        gap = abs(one - other) / max(abs(one), 1e-8)
        largest["losses"] = max(largest["losses"], gap)
        if not gap <= tolerance:
            own = [each.updates[number].losses for each in ranks if number < len(each.updates)]
            cause = "" if all(each == own[0] for each in own) else f"; likely cause: {_OWN_LOSS}"
            return f"{where}: the loss is {other:.6g}, in the original {one:.6g} ({_ratio(other, one)}){cause}"
    has_same_rates = len(expected.rates) == len(actual.rates) and all(
        abs(one - other) <= 1e-9 * abs(one) for one, other in zip(expected.rates, actual.rates, strict=True)
    )
    for kind, a, b in (
        ("gradients", expected.gradients, actual.gradients),
        ("weights", expected.after, actual.after),
    ):
        if kind == "weights" and not has_same_rates:
            return f"{where}: the learning rates are {actual.rates}, in the original {expected.rates}"
        gap, ratio = _distance(a, b)
        # Adam divides by the root of second moments, so the rounding of a tiny gradient may move a weight
        allowed = tolerance if kind == "gradients" else max(tolerance, _WEIGHTS_TOLERANCE)
        if gap is None:
            return f"{where}: {kind} of other parameters or shapes ({ratio})"
        largest[kind] = max(largest[kind], gap)
        if not gap <= allowed:
            return (
                f"{where}: the {kind} differ by {gap:.1e} of their norm; they are {ratio} times the original's"
                f"{_cause(kind, float(ratio), ranks, number)}"
            )
    buffers = {name: state for name, state in expected.states.items() if state.is_floating_point()}
    # they are reported, and decide nothing: a forward of one batch on all ranks has another unbiased variance
    gap, _ = _distance(buffers, {name: actual.states[name] for name in buffers if name in actual.states})
    largest["buffers"] = max(largest["buffers"], math.inf if gap is None else gap)
    for rank, recording in enumerate(ranks[1:], 1):
        if number < len(recording.updates):
            gap, ratio = _distance(actual.after, recording.updates[number].after)
            if gap is None or not gap <= tolerance:
                return f"{where}: rank {rank} has other weights than rank 0"
    return ""


def _cause(kind: str, ratio: float, ranks: tuple[RankRecording, ...], number: int) -> str:
    """Return a likely cause of gradients that differ."""
    own = [each.updates[number].gradients for each in ranks if number < len(each.updates)]
    if kind != "gradients":
        return ""
    if any((gap := _distance(own[0], each)[0]) is None or gap > FLOAT32_TOLERANCE for each in own[1:]):
        return "; likely cause: they are not averaged, because the forward does not go through the wrapper"
    if abs(ratio * len(ranks) - 1) < 1e-3:
        return "; likely cause: the loss is a sum, and DistributedDataParallel averages"
    if abs(ratio / len(ranks) - 1) < 1e-3:
        return "; likely cause: the gradient is multiplied by the number of ranks"
    return ""


def _ratio(value: float, reference: float) -> str:
    return f"{value / reference:.4g} times" if reference else "not 0"


def _distance(expected: dict[str, Any], actual: dict[str, Any]) -> tuple[float | None, str]:
    """Return the norm of the difference over that of the reference, and the best factor between them."""
    named = {name: tensor for name, tensor in expected.items() if tensor is not None}
    others = {name: tensor for name, tensor in actual.items() if tensor is not None}
    if named.keys() != others.keys():
        odd = sorted(named.keys() ^ others.keys())
        # a parameter without a gradient may have one of zeros in the wrapper
        both = {**others, **named}
        if any(float(both[name].abs().max()) for name in odd):
            return None, ", ".join(odd[:3])
    squares = product = gap = 0.0
    for name in named.keys() & others.keys():
        a, b = named[name].double(), others[name].double()
        if a.shape != b.shape:
            return None, name
        squares += float(a.square().sum())
        product += float((a * b).sum())
        gap += float((a - b).square().sum())
    norm = max(squares, 1e-300) ** 0.5
    return gap**0.5 / norm, f"{product / max(squares, 1e-300):.4g}"


def _differing_lines(original: RankRecording, port: RankRecording, cut: bool) -> list[tuple[str, str]]:
    """Printed lines that differ by more than rounding; lines with times are left out, and the rest of a longer run."""
    one, many = _lines(original.printed), _lines(port.printed)
    differing = [(a, b) for a, b in zip(one, many, strict=False) if not _is_same(a, b)]
    if cut:
        return differing
    longer, shorter = (one, many) if len(one) > len(many) else (many, one)
    rest = longer[len(shorter) :]
    return differing + [(line, "") if longer is one else ("", line) for line in rest]


def _lines(printed: list[Printed]) -> list[str]:
    return [each.text.strip() for each in printed if each.stream == "stdout" and not _IS_TIMED.search(each.text)]


def _is_same(one: str, other: str) -> bool:
    if _NUMBER.sub("#", one) != _NUMBER.sub("#", other):
        return False
    pairs = zip(map(float, _NUMBER.findall(one)), map(float, _NUMBER.findall(other)), strict=True)
    return all(abs(a - b) <= _PRINTED_TOLERANCE * max(1.0, abs(a)) for a, b in pairs)


# --- what each rank does, and checkpoints


def _doubts(original: RankRecording, ranks: tuple[RankRecording, ...], cut: bool) -> list[str]:
    """Sentences about lines that several ranks print, files that they write, and checkpoints that differ."""
    doubts: dict[str, str] = {}
    for rank in ranks[1:]:
        for line in rank.printed:
            if line.stream == "stdout":
                doubts.setdefault(line.place, f"{_short(line.place)} prints on each rank: {line.text.strip()[:60]}")
        others = dict(_writes(ranks[0]))
        for path, place in _writes(rank):
            if path in others:
                doubts.setdefault(path, f"{_short(place)} writes {Path(path).name} on each rank")
    expected, actual = _saved(original), _saved(ranks[0])
    others = [name for name in actual if name not in expected]
    for name, keys in expected.items():
        if cut and name not in actual:
            continue
        # a name with the time of the run is another one in each run
        again = next((each for each in others if _NUMBER.sub("#", each) == _NUMBER.sub("#", name)), None)
        if name not in actual and again is not None:
            others.remove(again)
            actual[name] = actual[again]
        if name not in actual:
            doubts[name] = f"the port does not save {name}, which the original does"
        elif keys != actual[name]:
            odd = sorted(set(keys) ^ set(actual[name]))[:2]
            doubts[name] = f"the checkpoint {name} has other keys than the original's: {', '.join(odd)}"
    return list(doubts.values())


def _writes(recording: RankRecording) -> list[tuple[str, str]]:
    saved = [(path, place) for path, place, _ in recording.facts.get("saved", [])]
    return saved + [(path, place) for path, place in recording.facts.get("written", [])]


def _saved(recording: RankRecording) -> dict[str, list[str]]:
    """Return the keys of each saved file, by its name."""
    return {Path(path).name: keys for path, _, keys in recording.facts.get("saved", [])}


def _short(place: str) -> str:
    return place.rpartition("/")[2]
