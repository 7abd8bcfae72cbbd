"""Who computes what when in a pipeline: pure arithmetic, no torch.

A schedule is made by playing it through: every rank, whenever it is free, takes the best of what it may do. So no
schedule can wait for itself, whatever the numbers of stages and micro-batches, and the same play says how long the
ranks stand idle.

    gpipe         all forwards, then all backwards; keeps all micro-batches               Huang et al. 2019
    1f1b          a backward as soon as there is one; keeps as many as stages follow      Narayanan et al. 2019
    interleaved   1f1b with several stages on each rank: smaller bubbles, more sending    Narayanan et al. 2021
    zero-bubble   1f1b whose weight gradients wait for an idle moment (ZB-H1)             Qi et al. 2024
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Action", "bubble", "make_schedule"]


class Action(NamedTuple):
    """F: forward; B: backward; I, W: backward to the input alone, and to the weights.

    `stage` counts through all stages of the model; stage s is on rank s % ranks.
    """

    kind: str
    stage: int
    micro: int


_COST = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
Timed = tuple[float, float, Action]


def make_schedule(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> list[list[Action]]:
    """What each rank does, in order. `chunks` is the number of stages on each rank."""
    return [[action for _, _, action in row] for row in _play(name, ranks, micro_batches, chunks)]


def bubble(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> float:
    """The part of the time that ranks stand idle, where a backward takes twice a forward and sending takes none.

    gpipe and 1f1b: (S-1)/(M+S-1) for S stages and M micro-batches.
    """
    rows = _play(name, ranks, micro_batches, chunks)
    end = max(done for row in rows for _, done, _ in row)
    busy = sum(done - begin for row in rows for begin, done, _ in row)
    return 1 - busy / (end * ranks)


def _play(name: str, ranks: int, micro_batches: int, chunks: int) -> list[list[Timed]]:
    """(begin, end, action) of everything, by rank."""
    splits = name == "zero-bubble"
    last = ranks * chunks - 1
    forward, backward = _orders(ranks, micro_batches, chunks)
    done: dict[Action, float] = {}
    rows: list[list[Timed]] = [[] for _ in range(ranks)]
    left = ranks * chunks * micro_batches * (3 if splits else 2)
    counts = [dict.fromkeys("FBIW", 0) for _ in range(ranks)]
    turn = "I" if splits else "B"

    def next_of(kind: str, rank: int) -> tuple[Action, float] | None:
        """The rank's next action of this kind, and when it can begin at the earliest; None if nobody can say yet."""
        count = counts[rank][kind]
        if count == micro_batches * chunks:
            return None
        chunk, micro = (forward if kind == "F" else backward)[count]
        stage = chunk * ranks + rank
        needs = {
            "F": Action("F", stage - 1, micro) if stage else None,
            turn: Action(turn, stage + 1, micro) if stage < last else Action("F", stage, micro),
            "W": Action("I", stage, micro),
        }[kind]
        if (needs is not None and needs not in done) or (kind == turn and Action("F", stage, micro) not in done):
            return None
        free = rows[rank][-1][1] if rows[rank] else 0.0
        return Action(kind, stage, micro), max(free, done[needs] if needs is not None else 0.0)

    while left:
        best: tuple[float, int, int, Action] | None = None
        for rank in range(ranks):
            for place, kind in enumerate(_preferences(name, rank, counts[rank], micro_batches, ranks, chunks)):
                found = next_of(kind, rank)
                if found is not None:
                    begin = found[1]
                    if best is None or (begin, place, rank) < best[:3]:
                        best = begin, place, rank, found[0]
        assert best is not None, f"{name}: {ranks} ranks wait for each other"
        begin, _, rank, action = best
        end = begin + _COST[action.kind] / chunks
        rows[rank].append((begin, end, action))
        done[action] = end
        counts[rank][action.kind] += 1
        left -= 1
    return rows


def _preferences(
    name: str, rank: int, counts: dict[str, int], micro_batches: int, ranks: int, chunks: int
) -> Sequence[str]:
    """What a rank may do now, the best first."""
    if name == "gpipe":
        return "F" if counts["F"] < micro_batches * chunks else "B"
    if name == "zero-bubble":
        if counts["I"] - counts["W"] > rank:  # the memory of 1f1b's first rank is all that a rank may hold
            return "WI"
        return "FIW" if counts["F"] - counts["I"] < ranks - rank else "IW"
    limit = ranks - rank if chunks == 1 else 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1
    return "FB" if counts["F"] - counts["B"] < limit else "B"


def _orders(ranks: int, micro_batches: int, chunks: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(chunk, micro-batch) of all forwards, and of all backwards, in the order in which every rank takes them.

    With several chunks as many micro-batches as there are ranks go through one, then through the next.
    """
    groups = [range(first, min(first + ranks, micro_batches)) for first in range(0, micro_batches, ranks)]
    if chunks == 1:
        groups = [range(micro_batches)]
    forward = [(chunk, micro) for group in groups for chunk in range(chunks) for micro in group]
    backward = [(chunk, micro) for group in groups for chunk in reversed(range(chunks)) for micro in group]
    return forward, backward
