"""Batches that a loader gives and the loop skips."""

from __future__ import annotations

from everyrank.audit.events import Forward, LoaderBatch, LoaderEpoch
from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings

__all__ = ["check_batches"]


def check_batches(evidence: Evidence, findings: Findings) -> None:
    """Find ranks that skip the batches of the others although their loaders already give them different samples.

    Rank r then trains on every n-th batch, and no two ranks on batches of the same number, as if all ranks read the
    same batches.
    """
    by_rank = [_used(evidence, rank) for rank in evidence.ranks]
    num = len(by_rank)
    remainders = [{number % num for number, (_, is_used) in batches.items() if is_used} for batches in by_rank]
    num_common = min(map(len, by_rank))
    is_by_number = all(len(of_rank) == 1 for of_rank in remainders) and len(set[int]().union(*remainders)) == num
    if num < 2 or num_common < 2 * num or not is_by_number:
        return
    rows = [[set(batches[number][0]) for number in sorted(batches)[:num_common]] for batches in by_rank[:2]]
    if any(a & b or not a for a, b in zip(*rows, strict=True)):
        return  # all ranks read the same batches, so they are divided once
    loader = evidence.of(evidence.ranks[0], LoaderEpoch)[0]
    nth = {2: "2nd", 3: "3rd"}.get(num, f"{num}th")
    findings.add(
        "FAIL",
        "data.skipped",
        loader.line,
        f"each rank trains on every {nth} batch of its loader, as if all ranks read the same batches. The loaders give "
        "each rank different samples, so no rank trains on the skipped ones",
        "divide the samples once: in the dataset or sampler, or in the loop",
        (loader.used_at,),
    )


def _used(evidence: Evidence, rank: int) -> dict[int, tuple[list[str], bool]]:
    """The batches of the first training epoch, by number: their samples, and whether a forward followed."""
    batches: dict[int, tuple[list[str], bool]] = {}
    first, last = next((key for key, kind in evidence.epochs[rank].items() if kind == "train"), None), 0
    for event in evidence.events[rank]:
        if isinstance(event, LoaderBatch):
            last = event.number if (event.loader, event.epoch) == first else 0
            if last and not event.is_after_jump:
                batches[last] = event.row_checksums, False
        elif isinstance(event, Forward) and event.is_grad and last in batches:
            batches[last] = batches[last][0], True
    return batches
