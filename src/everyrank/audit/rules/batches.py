"""Finds batches that a loader yields and the training loop skips."""

from __future__ import annotations

from everyrank.audit.events import Forward, LoaderBatch
from everyrank.audit.evidence import EpochKey, Evidence
from everyrank.audit.finding import Findings

__all__ = ["check_batches"]


def check_batches(evidence: Evidence, findings: Findings) -> None:
    """Find ranks that skip the batches of other ranks, although their loaders already yield different samples.

    With n ranks, each rank then trains on every n-th batch, as if all ranks read the same batches. No two ranks train
    on batches with the same number.
    """
    batches_by_rank = [_training_batches(evidence, rank) for rank in evidence.ranks]
    num_ranks = len(batches_by_rank)
    remainders = [
        {number % num_ranks for (_, number), (_, is_used) in batches.items() if is_used} for batches in batches_by_rank
    ]
    divides_by_number = (
        all(len(rank_remainders) == 1 for rank_remainders in remainders)
        and len(set[int]().union(*remainders)) == num_ranks
    )
    common = sorted(set(batches_by_rank[0]).intersection(*batches_by_rank))
    if num_ranks < 2 or len(common) < 2 * num_ranks or not divides_by_number:
        return
    rows = [[set(batches[key][0]) for key in common] for batches in batches_by_rank[:2]]
    if any(first_rows & second_rows or not first_rows for first_rows, second_rows in zip(*rows, strict=True)):
        return  # all ranks read the same batches, so they are divided once
    first_rank = evidence.ranks[0]
    training_epoch = _first_training_epoch(evidence, first_rank)
    loader = next(each for key, each in evidence.loaders(first_rank).items() if key == training_epoch)
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


def _training_batches(evidence: Evidence, rank: int) -> dict[tuple[int, int], tuple[list[str], bool]]:
    """The batches of the first training loader, by pass and number: their samples, and whether a forward followed.

    The audit shortens epochs, so that one epoch may have too few batches.
    """
    batches: dict[tuple[int, int], tuple[list[str], bool]] = {}
    first_epoch, key = _first_training_epoch(evidence, rank), (0, 0)
    pass_numbers, kinds = evidence.pass_numbers(rank), evidence.epochs[rank]
    for event in evidence.events[rank]:
        if isinstance(event, LoaderBatch):
            epoch = (event.loader, event.epoch)
            is_trained = first_epoch is not None and event.loader == first_epoch[0] and kinds[epoch] != "eval"
            # a pass without a number, such as one that was ended after a batch, is counted by its epoch
            key = (pass_numbers.get(epoch, event.epoch), event.number if is_trained and not event.is_after_skip else 0)
            if key[1]:
                batches[key] = event.row_checksums, False
        elif isinstance(event, Forward) and event.is_grad and key in batches:
            batches[key] = batches[key][0], True
    return batches


def _first_training_epoch(evidence: Evidence, rank: int) -> EpochKey | None:
    return next((key for key, kind in evidence.epochs[rank].items() if kind == "train"), None)
