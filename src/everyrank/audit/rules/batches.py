"""Finds batches that a loader yields and the training loop skips."""

from __future__ import annotations

from everyrank.audit.events import Forward, LoaderBatch, LoaderEpoch
from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings

__all__ = ["check_batches"]


def check_batches(evidence: Evidence, findings: Findings) -> None:
    """Find ranks that skip the batches of other ranks, although their loaders already yield different samples.

    With n ranks, each rank then trains on every n-th batch, as if all ranks read the same batches. No two ranks train
    on batches with the same number.
    """
    batches_by_rank = [_first_epoch_batches(evidence, rank) for rank in evidence.ranks]
    num_ranks = len(batches_by_rank)
    remainders = [
        {number % num_ranks for number, (_, is_used) in batches.items() if is_used} for batches in batches_by_rank
    ]
    num_common = min(map(len, batches_by_rank))
    divides_by_number = (
        all(len(rank_remainders) == 1 for rank_remainders in remainders)
        and len(set[int]().union(*remainders)) == num_ranks
    )
    if num_ranks < 2 or num_common < 2 * num_ranks or not divides_by_number:
        return
    rows = [[set(batches[number][0]) for number in sorted(batches)[:num_common]] for batches in batches_by_rank[:2]]
    if any(first_rows & second_rows or not first_rows for first_rows, second_rows in zip(*rows, strict=True)):
        return  # all ranks read the same batches, so they are divided once
    loader = evidence.of(evidence.ranks[0], LoaderEpoch)[0]
    ordinal = {2: "2nd", 3: "3rd"}.get(num_ranks, f"{num_ranks}th")
    findings.add(
        "FAIL",
        "data.skipped",
        loader.line,
        f"each rank trains on every {ordinal} batch of its loader, as if all ranks read the same batches. The loaders "
        "give each rank different samples, so no rank trains on the skipped ones",
        "divide the samples only once: in the dataset or sampler, or in the training loop",
        (loader.used_at,),
    )


def _first_epoch_batches(evidence: Evidence, rank: int) -> dict[int, tuple[list[str], bool]]:
    """The batches of the first training epoch, by number: their samples, and whether a forward followed."""
    batches: dict[int, tuple[list[str], bool]] = {}
    first_epoch, batch_number = next((key for key, kind in evidence.epochs[rank].items() if kind == "train"), None), 0
    for event in evidence.events[rank]:
        if isinstance(event, LoaderBatch):
            batch_number = event.number if (event.loader, event.epoch) == first_epoch else 0
            if batch_number and not event.is_after_skip:
                batches[batch_number] = event.row_checksums, False
        elif isinstance(event, Forward) and event.is_grad and batch_number in batches:
            batches[batch_number] = batches[batch_number][0], True
    return batches
