"""Whose random numbers: the same dropout masks or augmentation on all ranks, or in all workers."""

from __future__ import annotations

from collections import defaultdict

from everyrank.audit.events import Fetch, ForwardEnd, LoaderEpoch
from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings

__all__ = ["check_randomness"]

_GENERATORS = ("torch", "random", "numpy")
_FEW, _GROUPS = 4, 2  # steps; groups, of which one may be that of a barrier


def check_randomness(evidence: Evidence, findings: Findings) -> None:
    """The state from which each forward and each worker draws, held against the other ranks'."""
    if evidence.world_size > 1:
        _check_dropout(evidence, findings)
        _check_noise(evidence, findings)
        _check_augmentation(evidence, findings)
    _check_workers(evidence, findings)


def _check_dropout(evidence: Evidence, findings: Findings) -> None:
    own, other = evidence.ranks[:2]
    forwards = evidence.training_forwards
    drawn = {(event.update, event.micro): event.num_dropouts for event in evidence.of(own, ForwardEnd)}
    common = [key for key in forwards[own] if key in forwards[other] and drawn.get(key)]
    same = [key for key in common if forwards[own][key].generator == forwards[other][key].generator]
    if common and 2 * len(same) >= len(common) and not evidence.is_split:
        findings.add(
            "WARN",
            "random.dropout",
            forwards[own][same[0]].line,
            f"dropout draws the same masks on all ranks: {len(same)} of {len(common)} forwards begin with one state",
            "after the model has been built: torch.manual_seed(seed + rank)",
        )


def _check_noise(evidence: Evidence, findings: Findings) -> None:
    """What each step draws for its samples: other samples, the same numbers.

    In groups of ranks some may have to draw alike: those that share samples.
    """
    if evidence.is_split or len(evidence.groups) > _GROUPS or findings.has("data.rows", "data.same", "random.dropout"):
        return
    own, other = (_noise(evidence, rank) for rank in evidence.ranks[:2])
    lines = sorted({line for drawn in own.values() for line in drawn})
    steps = {line: _same_noise(evidence, line, own, other) for line in lines}
    same = [line for line in lines if steps[line]]
    if same:
        keys = steps[same[0]]
        seeds = {seed for key in keys for _, seed in own[key][same[0]]}
        findings.add(
            "WARN",
            "random.noise",
            same[0],
            f"the random numbers that a step draws for its samples are the same on all ranks, in {len(keys)} of "
            f"{sum(same[0] in drawn for drawn in own.values())} steps, and the samples are others"
            + (f"; seed {next(iter(seeds))} on each rank" if len(seeds) == 1 else ""),
            "a seed that contains the rank: torch.Generator().manual_seed(seed + rank)",
            (*same[1:], evidence.training_forwards[evidence.ranks[0]][keys[0]].line),
        )


_Noise = dict[tuple[int, int], dict[str, list[tuple[int, int]]]]
"""What each step has drawn, by line: checksums, and seeds."""


def _noise(evidence: Evidence, rank: int) -> _Noise:
    """Before the first forward of each backward, and inside of it."""
    found: _Noise = defaultdict(lambda: defaultdict(list))
    forwards = evidence.training_forwards[rank]
    for event in [*forwards.values(), *evidence.of(rank, ForwardEnd)]:
        for line, drawn, seed in event.noise if (event.update, event.micro) in forwards else ():
            found[event.update, event.micro][line].append((drawn, seed))
    return found


def _same_noise(evidence: Evidence, line: str, own: _Noise, other: _Noise) -> list[tuple[int, int]]:
    """The steps in which this line draws the same on both ranks; [] where they are few, or where that may be meant."""
    keys = [key for key in own if line in own[key]]
    same = [key for key in keys if own[key][line] == other.get(key, {}).get(line)]
    is_drawn_anew = len({tuple(own[key][line]) for key in same}) == len(same)
    is_usual = len(same) >= _FEW and 2 * len(same) >= len(keys)
    return same if is_usual and is_drawn_anew and all(_are_disjoint(evidence, key) for key in same) else []


def _are_disjoint(evidence: Evidence, key: tuple[int, int]) -> bool:
    """Whether two ranks feed the model other rows in this step; other inputs, where these have no rows to compare."""
    own, other = (evidence.training_forwards[rank][key] for rank in evidence.ranks[:2])
    if not own.row_checksums or not other.row_checksums:
        return own.other_inputs != other.other_inputs
    return not set(own.row_checksums) & set(other.row_checksums)


def _drawn_alike(own: Fetch, other: Fetch) -> str:
    """The generators from which both have drawn, and which then stand at one state.

    That before does not say it: a stream may seed its generators when it begins, after we have looked.
    """
    states = zip(_GENERATORS, own.before, own.after, other.before, other.after, strict=True)
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


def _fetches(evidence: Evidence, rank: int) -> dict[tuple[int, int, str], list[Fetch]]:
    """By worker, number and dataset; each time that a loader began."""
    found: dict[tuple[int, int, str], list[Fetch]] = defaultdict(list)
    for event in evidence.of(rank, Fetch):
        found[event.worker, event.number, event.dataset].append(event)
    return found


def _check_workers(evidence: Evidence, findings: Findings) -> None:
    """Workers of one loader that draw alike: numpy's generator is copied into each of them where torch is old."""
    found = {(event.worker, event.dataset): event for event in evidence.of(evidence.ranks[0], Fetch)[::-1]}
    for (worker, dataset), event in found.items():
        first = found.get((0, dataset))
        if worker > 0 and first is not None and event.number == first.number:
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
    loaders = [event for event in evidence.of(evidence.ranks[0], LoaderEpoch) if event.dataset == dataset]
    return loaders[0].line if loaders else ""
