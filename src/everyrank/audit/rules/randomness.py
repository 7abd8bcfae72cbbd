"""Whose random numbers: the same dropout masks or augmentation on all ranks, or in all workers."""

from __future__ import annotations

from collections import defaultdict

from everyrank.audit.evidence import Event, Evidence
from everyrank.audit.finding import Findings

__all__ = ["check_randomness"]

_GENERATORS = ("torch", "random", "numpy")


def check_randomness(evidence: Evidence, findings: Findings) -> None:
    """The state from which each forward and each worker draws, held against the other ranks'."""
    if evidence.world_size > 1:
        _check_dropout(evidence, findings)
        _check_augmentation(evidence, findings)
    _check_workers(evidence, findings)


def _check_dropout(evidence: Evidence, findings: Findings) -> None:
    own, other = evidence.ranks[:2]
    forwards = evidence.training_forwards
    drawn = {(event["update"], event["micro"]): event["dropouts"] for event in evidence.of(own, "forward_end")}
    common = [key for key in forwards[own] if key in forwards[other] and drawn.get(key)]
    same = [key for key in common if forwards[own][key]["generator"] == forwards[other][key]["generator"]]
    if not common and evidence.sees_functions:
        findings.not_checked("dropout masks: the model draws none")
    elif common and 2 * len(same) >= len(common) and not evidence.is_split:
        findings.add(
            "WARN",
            "random.dropout",
            forwards[own][same[0]]["line"],
            f"dropout draws the same masks on all ranks: {len(same)} of {len(common)} forwards begin with one state",
            "after the model has been built: torch.manual_seed(seed + rank)",
        )


def _drawn_alike(own: Event, other: Event) -> str:
    """The generators from which both have drawn, and which then stand at one state.

    That before does not say it: a stream may seed its generators when it begins, after we have looked.
    """
    states = zip(_GENERATORS, own["before"], own["after"], other["before"], other["after"], strict=True)
    return ", ".join(name for name, a, after, b, others in states if after == others and after not in (a, b))


def _check_augmentation(evidence: Evidence, findings: Findings) -> None:
    own, other = (_fetches(evidence, rank) for rank in evidence.ranks[:2])
    for key in own:
        hits = [_drawn_alike(*pair) for pair in zip(own[key], other.get(key, ()), strict=False)]
        hit = next(filter(None, hits), "")
        if hit:
            findings.add(
                "WARN",
                "random.augment",
                _line_of(evidence, key[2]),
                f"the dataset draws the same random numbers ({hit}) on all ranks: their augmentation is the same",
                "seed with the rank: torch.manual_seed(seed + rank), a generator=, or a worker_init_fn",
            )


def _fetches(evidence: Evidence, rank: int) -> dict[tuple[int, int, str], list[Event]]:
    """By worker, number and dataset; each time that a loader began."""
    found: dict[tuple[int, int, str], list[Event]] = defaultdict(list)
    for event in evidence.of(rank, "fetch"):
        found[event["worker"], event["number"], event["dataset"]].append(event)
    return found


def _check_workers(evidence: Evidence, findings: Findings) -> None:
    """Workers of one loader that draw alike: numpy's generator is copied into each of them where torch is old."""
    found = {(event["worker"], event["dataset"]): event for event in evidence.of(evidence.ranks[0], "fetch")[::-1]}
    for (worker, dataset), event in found.items():
        first = found.get((0, dataset))
        if worker > 0 and first is not None and event["number"] == first["number"]:
            hit = _drawn_alike(first, event)
            if hit:
                findings.add(
                    "FAIL",
                    "random.workers",
                    _line_of(evidence, dataset),
                    f"workers 0 and {worker} of the loader draw the same random numbers ({hit})",
                    "leave the seeds that torch gives its workers, or use a worker_init_fn that adds the worker's id",
                )


def _line_of(evidence: Evidence, dataset: str) -> str:
    loaders = [event for event in evidence.of(evidence.ranks[0], "loader") if event["dataset"] == dataset]
    return loaders[0]["line"] if loaders else ""
