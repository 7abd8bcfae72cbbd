"""Finds random numbers that are equal on several ranks or in several workers: dropout, noise, augmentation."""

from __future__ import annotations

from collections import defaultdict

from everyrank.audit.events import Fetch, ForwardEnd, LoaderEpoch, SeedSet
from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings

__all__ = ["check_randomness"]

_GENERATORS = ("torch", "random", "numpy")
_MIN_STEPS = 4  # fewer steps with equal draws may be a coincidence
_MAX_GROUPS = 2  # with more process groups, some ranks may share samples; a second group is often only for barriers


def check_randomness(evidence: Evidence, findings: Findings) -> None:
    """Report random numbers that are equal on several ranks or in several workers, but should differ."""
    if evidence.world_size > 1:
        _check_dropout(evidence, findings)
        _check_noise(evidence, findings)
        if not evidence.is_split:  # ranks that split layers need the same samples
            _check_augmentation(evidence, findings)
    _check_workers(evidence, findings)


def _check_dropout(evidence: Evidence, findings: Findings) -> None:
    first, second = evidence.ranks[:2]
    forwards = evidence.training_forwards
    with_dropout = {(event.update, event.micro) for event in evidence.of(first, ForwardEnd) if event.num_dropouts}
    common_steps = [key for key in forwards[first] if key in forwards[second] and key in with_dropout]
    equal_steps = [key for key in common_steps if forwards[first][key].generator == forwards[second][key].generator]
    if common_steps and 2 * len(equal_steps) >= len(common_steps) and not evidence.is_split:
        findings.add(
            "WARN",
            "random.dropout",
            forwards[first][equal_steps[0]].line,
            f"dropout masks are equal on {_first_ranks(evidence)}: {len(equal_steps)} of {len(common_steps)} "
            "forwards begin with the same generator state",
            "call torch.manual_seed(seed + rank) after the model has been built",
            evidence.equal_seeds(("torch",)),
        )


def _check_noise(evidence: Evidence, findings: Findings) -> None:
    """Find noise that is equal on ranks with different samples.

    With several process groups some ranks may share samples, and have to draw the same noise.
    """
    if (
        evidence.is_split
        or len(evidence.groups) > _MAX_GROUPS
        or findings.has("data.rows", "data.same", "random.dropout")
    ):
        return
    first, second = (_draws_by_step(evidence, rank) for rank in evidence.ranks[:2])
    lines = sorted({line for step_draws in first.values() for line in step_draws})
    equal_steps = {line: _steps_with_equal_draws(evidence, line, first, second) for line in lines}
    equal_lines = [line for line in lines if equal_steps[line]]
    if equal_lines:
        step_keys = equal_steps[equal_lines[0]]
        seeds = {seed for key in step_keys for _, seed in first[key][equal_lines[0]]}
        findings.add(
            "WARN",
            "random.noise",
            equal_lines[0],
            f"the random numbers that a step draws for its samples are equal on {_first_ranks(evidence)} in "
            f"{len(step_keys)} of {sum(equal_lines[0] in step_draws for step_draws in first.values())} steps, but the "
            "samples differ" + (f"; seed {next(iter(seeds))} on each rank" if len(seeds) == 1 else ""),
            "use a seed that depends on the rank: torch.Generator().manual_seed(seed + rank)",
            (
                *equal_lines[1:],
                evidence.training_forwards[evidence.ranks[0]][step_keys[0]].line,
                *evidence.equal_seeds(("torch",)),
            ),
        )


def _first_ranks(evidence: Evidence) -> str:
    """The two ranks that are compared."""
    first, second = evidence.ranks[:2]
    return f"ranks {first} and {second}"


_DrawsByStep = dict[tuple[int, int], dict[str, list[tuple[int, int]]]]
"""The random draws of each step, by line: (checksum, seed)."""


def _draws_by_step(evidence: Evidence, rank: int) -> _DrawsByStep:
    """Return for each step and line the draws that are inputs of its first forward, and those inside its forwards."""
    draws: _DrawsByStep = defaultdict(lambda: defaultdict(list))
    forwards = evidence.training_forwards[rank]
    for event in [*forwards.values(), *evidence.of(rank, ForwardEnd)]:
        for line, checksum, seed in event.noise if (event.update, event.micro) in forwards else ():
            draws[event.update, event.micro][line].append((checksum, seed))
    return draws


def _steps_with_equal_draws(
    evidence: Evidence, line: str, first: _DrawsByStep, second: _DrawsByStep
) -> list[tuple[int, int]]:
    """Return the steps in which a line draws equal noise on both ranks.

    [] if they are fewer than `_MIN_STEPS`, or than half of the steps in which this line draws. Also [] if the noise
    repeats, or if the ranks share samples.
    """
    keys = [key for key in first if line in first[key]]
    equal_keys = [key for key in keys if first[key][line] == second.get(key, {}).get(line)]
    is_new_each_time = len({tuple(first[key][line]) for key in equal_keys}) == len(equal_keys)
    is_usual = len(equal_keys) >= _MIN_STEPS and 2 * len(equal_keys) >= len(keys)
    return (
        equal_keys if is_usual and is_new_each_time and all(_inputs_differ(evidence, key) for key in equal_keys) else []
    )


def _inputs_differ(evidence: Evidence, key: tuple[int, int]) -> bool:
    """Whether the inputs of the first two ranks have no row in common; without rows, whether they differ."""
    first, second = (evidence.training_forwards[rank][key] for rank in evidence.ranks[:2])
    if not first.row_checksums or not second.row_checksums:
        return first.other_inputs != second.other_inputs
    return not set(first.row_checksums) & set(second.row_checksums)


def _equal_generators(first: Fetch, second: Fetch) -> str:
    """The names of the generators from which both have drawn, and whose states are equal afterwards.

    The ranks may have different states before the fetch: an IterableDataset may seed its generators after they were
    recorded.
    """
    states = zip(_GENERATORS, first.before, first.after, second.before, second.after, strict=True)
    return ", ".join(
        name
        for name, first_before, first_after, second_before, second_after in states
        if first_after == second_after and first_after not in (first_before, second_before)
    )


def _check_augmentation(evidence: Evidence, findings: Findings) -> None:
    first, second = (_fetches_by_worker(evidence, rank) for rank in evidence.ranks[:2])
    for key in first:
        equal = [_equal_generators(*pair) for pair in zip(first[key], second.get(key, ()), strict=False)]
        names = next(filter(None, equal), "")
        if names:
            findings.add(
                "WARN",
                "random.augment",
                _loader_line(evidence, key[2]),
                f"the dataset draws equal random numbers ({names}) on {_first_ranks(evidence)}, so their augmentations "
                "are equal",
                "seed by rank: torch.manual_seed(seed + rank), a generator=, or a worker_init_fn",
                evidence.equal_seeds(names.split(", ")),
            )


def _fetches_by_worker(evidence: Evidence, rank: int) -> dict[tuple[int, int, str], list[Fetch]]:
    """The fetches by (worker, number, dataset), with one fetch for each epoch of a loader."""
    fetches: dict[tuple[int, int, str], list[Fetch]] = defaultdict(list)
    for event in evidence.of(rank, Fetch):
        fetches[event.worker, event.number, event.dataset].append(event)
    return fetches


def _check_workers(evidence: Evidence, findings: Findings) -> None:
    """Find DataLoader workers that draw equal random numbers.

    For example, old versions of torch gave all workers the same numpy seed.
    """
    fetches = {(event.worker, event.dataset): event for event in evidence.of(evidence.ranks[0], Fetch)[::-1]}
    for (worker, dataset), event in fetches.items():
        first = fetches.get((0, dataset))
        if worker > 0 and first is not None and event.number == first.number:
            names = _equal_generators(first, event)
            if names:
                findings.add(
                    "FAIL",
                    "random.workers",
                    _loader_line(evidence, dataset),
                    f"workers 0 and {worker} of the loader draw equal random numbers ({names})",
                    "keep the seeds that torch gives its workers, or add the worker's id in a worker_init_fn",
                    _last_seed_lines(evidence, names.split(", ")),
                )


def _last_seed_lines(evidence: Evidence, libraries: list[str]) -> tuple[str, ...]:
    """The user's lines on the stack of the last call on rank 0 that seeds one of these generators."""
    events = [event for event in evidence.of(evidence.ranks[0], SeedSet) if event.library in libraries]
    return tuple(dict.fromkeys(line for event in events[-1:] for line in event.lines))


def _loader_line(evidence: Evidence, dataset: str) -> str:
    loaders = [event for event in evidence.of(evidence.ranks[0], LoaderEpoch) if event.dataset == dataset]
    return loaders[0].line if loaders else ""
