"""Pipeline schedules: the order of actions of each rank. Imports no torch.

A schedule is the result of a simulation, in which every free rank takes the best possible action. So no schedule can
deadlock, for any numbers of stages and micro-batches, and the simulation shows how long ranks are idle.

    gpipe         all forwards, then all backwards; keeps all micro-batches               Huang et al. 2019
    1f1b          a backward as early as possible; keeps one per stage from its own on    Narayanan et al. 2019
    interleaved   1f1b with several stages on each rank: smaller bubbles, more sending    Narayanan et al. 2021
    zero-bubble   1f1b whose weight gradients wait for an idle moment (ZB-H1)             Qi et al. 2024
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Action", "bubble", "make_schedule"]


class Action(NamedTuple):
    """F: forward; B: backward; I: backward for the input only; W: backward for the weights only.

    `stage` counts through all stages of the model; stage s is on rank s % ranks.
    """

    kind: str
    stage: int
    micro: int


_COST = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
Timed = tuple[float, float, Action]


def make_schedule(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> list[list[Action]]:
    """Return the actions of each rank, in order. `chunks` is the number of stages on each rank."""
    return [[action for _, _, action in row] for row in _simulate(name, ranks, micro_batches, chunks)]


def bubble(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> float:
    """Return the idle fraction of the time, if a backward takes twice a forward and sending takes no time.

    gpipe and 1f1b: (S-1)/(M+S-1) for S stages and M micro-batches.
    """
    rows = _simulate(name, ranks, micro_batches, chunks)
    end = max(done for row in rows for _, done, _ in row)
    busy = sum(done - started for row in rows for started, done, _ in row)
    return 1 - busy / (end * ranks)


def _simulate(name: str, ranks: int, micro_batches: int, chunks: int) -> list[list[Timed]]:
    """Return (start, end, action) of each action, by rank."""
    simulation = _Simulation(name, ranks, micro_batches, chunks)
    for _ in range(ranks * chunks * micro_batches * (3 if name == "zero-bubble" else 2)):
        simulation.step()
    return simulation.rows


class _Simulation:
    """The state of the simulation.

    rows     (start, end, action) of the finished actions of each rank
    done     action -> its end
    counts   number of finished actions of each kind, for each rank
    """

    def __init__(self, name: str, ranks: int, micro_batches: int, chunks: int) -> None:
        self.name, self.ranks, self.micro_batches, self.chunks = name, ranks, micro_batches, chunks
        self.last_stage = ranks * chunks - 1
        self.backward_kind = "I" if name == "zero-bubble" else "B"
        self.forward_order, self.backward_order = _orders(ranks, micro_batches, chunks)
        self.rows: list[list[Timed]] = [[] for _ in range(ranks)]
        self.done: dict[Action, float] = {}
        self.counts = [dict.fromkeys("FBIW", 0) for _ in range(ranks)]

    def step(self) -> None:
        """Do the action that can start first; among equals, the one that its rank prefers."""
        best: tuple[float, int, int, Action] | None = None
        for rank in range(self.ranks):
            kinds = _preferences(self.name, rank, self.counts[rank], self.micro_batches, self.ranks, self.chunks)
            for preference, kind in enumerate(kinds):
                action = self._next(kind, rank)
                started = self._earliest(action, rank) if action is not None else None
                if (
                    action is not None
                    and started is not None
                    and (best is None or (started, preference, rank) < best[:3])
                ):
                    best = started, preference, rank, action
        assert best is not None, f"{self.name}: {self.ranks} ranks wait for each other"
        started, _, rank, action = best
        end = started + _COST[action.kind] / self.chunks
        self.rows[rank].append((started, end, action))
        self.done[action] = end
        self.counts[rank][action.kind] += 1

    def _next(self, kind: str, rank: int) -> Action | None:
        """Return the next action of this kind of a rank; None if all are done."""
        count = self.counts[rank][kind]
        if count == self.micro_batches * self.chunks:
            return None
        chunk, micro = (self.forward_order if kind == "F" else self.backward_order)[count]
        return Action(kind, chunk * self.ranks + rank, micro)

    def _earliest(self, action: Action, rank: int) -> float | None:
        """Return the earliest start of an action; None if it still depends on another action."""
        kind, stage, micro = action
        needs: list[Action] = []
        if kind == "F" and stage:
            needs = [Action("F", stage - 1, micro)]
        elif kind == self.backward_kind:
            needs = [Action("F", stage, micro)]
            needs += [Action(kind, stage + 1, micro)] if stage < self.last_stage else []
        elif kind == "W":
            needs = [Action("I", stage, micro)]
        if any(need not in self.done for need in needs):
            return None
        free = self.rows[rank][-1][1] if self.rows[rank] else 0.0
        return max([free, *(self.done[need] for need in needs)])


def _preferences(
    name: str, rank: int, counts: dict[str, int], micro_batches: int, ranks: int, chunks: int
) -> Sequence[str]:
    """Return the kinds of actions that a rank may do now, in order of preference."""
    if name == "gpipe":
        return "F" if counts["F"] < micro_batches * chunks else "B"
    if name == "zero-bubble":
        if counts["I"] - counts["W"] > rank:  # a rank may hold at most the memory of the first rank of 1f1b
            return "WI"
        return "FIW" if counts["F"] - counts["I"] < ranks - rank else "IW"
    limit = ranks - rank if chunks == 1 else 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1
    return "FB" if counts["F"] - counts["B"] < limit else "B"


def _orders(ranks: int, micro_batches: int, chunks: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return (chunk, micro-batch) of all forwards and of all backwards, in order; the order is the same on every rank.

    With several chunks, groups of as many micro-batches as ranks pass through one chunk, then through the next.
    """
    groups = [range(first, min(first + ranks, micro_batches)) for first in range(0, micro_batches, ranks)]
    if chunks == 1:
        groups = [range(micro_batches)]
    forward = [(chunk, micro) for group in groups for chunk in range(chunks) for micro in group]
    backward = [(chunk, micro) for group in groups for chunk in reversed(range(chunks)) for micro in group]
    return forward, backward
