"""Batches that a loader gives, and that the loop leaves out."""

from __future__ import annotations

from everyrank.audit.events import Batch, Forward, LoaderEpoch
from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings

__all__ = ["check_batches"]


def check_batches(evidence: Evidence, findings: Findings) -> None:
    """Whether each rank leaves out the batches of the others, though its loader gives it samples of its own.

    Rank r trains on every n-th batch, and no two ranks on those of one number: so one divides batches that all read.
    """
    own = [_used(evidence, rank) for rank in evidence.ranks]
    num = len(own)
    places = [{number % num for number, (_, is_used) in batches.items() if is_used} for batches in own]
    most = min(map(len, own))
    is_by_number = all(len(one) == 1 for one in places) and len(set[int]().union(*places)) == num
    if num < 2 or most < 2 * num or not is_by_number:
        return
    rows = [[set(batches[number][0]) for number in sorted(batches)[:most]] for batches in own[:2]]
    if any(a & b or not a for a, b in zip(*rows, strict=True)):
        return  # all read the same batches: one division
    loader = evidence.of(evidence.ranks[0], LoaderEpoch)[0]
    nth = {2: "2nd", 3: "3rd"}.get(num, f"{num}th")
    findings.add(
        "FAIL",
        "data.skipped",
        loader.line,
        f"each rank trains on every {nth} batch of its loader, as if all read the same ones, and the loaders give each "
        "rank samples of its own: the others are read by nobody",
        "divide the samples once: in the dataset (or sampler), or in the loop",
        (loader.used_at,),
    )


def _used(evidence: Evidence, rank: int) -> dict[int, tuple[list[str], bool]]:
    """Of the first epoch of the loader that is trained from: the samples of each batch, and whether a forward came."""
    found: dict[int, tuple[list[str], bool]] = {}
    first, last = next((key for key, kind in evidence.epochs[rank].items() if kind == "train"), None), 0
    for event in evidence.events[rank]:
        if isinstance(event, Batch):
            last = event.number if (event.loader, event.epoch) == first else 0
            if last and not event.is_after_jump:
                found[last] = event.row_checksums, False
        elif isinstance(event, Forward) and event.is_grad and last in found:
            found[last] = found[last][0], True
    return found
