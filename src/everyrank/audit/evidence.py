"""What the watched processes have written down, by rank. Imports no torch."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everyrank.audit.start import ScriptRun
from everyrank.audit.watch.recorder import BY_RPC

_NUMBERS = 256  # bytes: an all-reduce of no more is of losses and counts, not of parameters
_DIRECT = 3  # library functions between a line and the collective that it calls

__all__ = ["Event", "Evidence", "Samples", "are_cut_off", "read_evidence"]

Event = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Samples:
    """Of one update on one rank: the gradients, as samples of at most 2,048 elements each, by name.

    pieces    what each backward gave, by its number
    steps     what stood in .grad when the optimizer stepped
    clipped   what stood there before it was clipped; {} where nothing was
    carried   what stood there before the first backward
    """

    pieces: dict[int, dict[str, NDArray[np.float64]]]
    steps: dict[str, NDArray[np.float64]]
    clipped: dict[str, NDArray[np.float64]]
    carried: dict[str, NDArray[np.float64]]


@dataclasses.dataclass
class Evidence:
    """All events of a run; the rules ask it.

    ranks    those that were seen
    events   of each rank, in order
    """

    run: ScriptRun
    ranks: list[int]
    events: dict[int, list[Event]]

    @property
    def world_size(self) -> int:
        """How many ranks were seen."""
        return len(self.ranks)

    @functools.cached_property
    def by_kind(self) -> dict[int, dict[str, list[Event]]]:
        """Of each rank, by kind."""
        found: dict[int, dict[str, list[Event]]] = {rank: defaultdict(list) for rank in self.ranks}
        for rank in self.ranks:
            for event in self.events[rank]:
                found[rank][event["kind"]].append(event)
        return found

    def of(self, rank: int, kind: str) -> list[Event]:
        """The events of this kind on that rank."""
        return self.by_kind[rank][kind]

    def all_of(self, kind: str) -> list[Event]:
        """The events of this kind on all ranks, rank by rank."""
        return [event for rank in self.ranks for event in self.of(rank, kind)]

    @functools.cached_property
    def sees_functions(self) -> bool:
        """Whether torch functions and collectives were looked at: not under --watch."""
        return all(event["modes"] for event in self.all_of("start"))

    @functools.cached_property
    def steps(self) -> dict[int, dict[int, Event]]:
        """By update: the step of each rank, where all have come to it."""
        own = {rank: {event["update"]: event for event in self.of(rank, "step")} for rank in self.ranks}
        common = sorted(set.intersection(*(set(steps) for steps in own.values()))) if own else []
        return {update: {rank: own[rank][update] for rank in self.ranks} for update in common}

    @functools.cached_property
    def epochs(self) -> dict[int, dict[tuple[int, int], str]]:
        """Of each rank, by loader and epoch: "train" where a backward followed its batches, else "eval"."""
        found: dict[int, dict[tuple[int, int], str]] = {}
        for rank in self.ranks:
            kinds: dict[tuple[int, int], str] = {}
            last: tuple[int, int] | None = None
            for event in self.events[rank]:
                if event["kind"] == "batch":
                    last = (event["loader"], event["epoch"])
                    kinds.setdefault(last, "")
                elif event["kind"] == "backward" and last is not None:
                    kinds[last] = "train"
                elif event["kind"] == "forward" and last is not None and not event["is_grad"]:
                    kinds[last] = kinds[last] or "eval"
            found[rank] = kinds
        return found

    def loaders(self, rank: int) -> dict[tuple[int, int], Event]:
        """The loaders of a rank, by number and epoch."""
        return {(event["loader"], event["epoch"]): event for event in self.of(rank, "loader")}

    @functools.cached_property
    def training_forwards(self) -> dict[int, dict[tuple[int, int], Event]]:
        """Of each rank the first forward of each update and backward."""
        found: dict[int, dict[tuple[int, int], Event]] = {}
        for rank in self.ranks:
            own = found[rank] = {}
            for event in self.of(rank, "forward"):
                if event["is_grad"] and event["is_training"]:
                    own.setdefault((event["update"], event["micro"]), event)
        return found

    def samples(self, rank: int, update: int) -> Samples | None:
        """None where that rank has written none for that update."""
        path = self.run.folder / f"rank{rank}.update{update}.npz"
        if not path.exists():
            return None
        found = Samples({}, {}, {}, {})
        parts = {"step": found.steps, "clip": found.clipped, "carried": found.carried}
        with np.load(path, allow_pickle=False) as arrays:
            for key in arrays.files:
                kind, _, name = key.replace("|", "/").partition(" ")
                if kind == "piece":
                    micro, _, name = name.partition(" ")
                    found.pieces.setdefault(int(micro), {})[name] = arrays[key]
                else:
                    parts[kind][name] = arrays[key]
        return found

    def replayed(self, update: int) -> dict[str, dict[str, NDArray[np.float64]]]:
        """Of an update that was run once more: samples of its gradients by kind and name, see `watch.replay`."""
        found: dict[str, dict[str, NDArray[np.float64]]] = defaultdict(dict)
        with np.load(self.run.folder / f"replay{update}.npz", allow_pickle=False) as arrays:
            for key in arrays.files:
                kind, _, name = key.replace("|", "/").partition(" ")
                found[kind][name] = arrays[key]
        return found

    def scaling_lines(self, update: int) -> tuple[str, ...]:
        """Where rank 0 calls backward in this update, multiplies or divides its loss, and sends something itself."""
        found: list[str] = []
        has_begun = update > 0  # before the first one weights are sent, too
        for event in self.events[self.ranks[0]]:
            kind, is_own = event["kind"], event["update"] == update
            has_begun |= is_own and kind == "forward" and event["is_grad"]
            if is_own and kind == "backward":
                found.append(event["line"])
            elif is_own and kind == "backward_end":
                found += event["scalings"]
            elif is_own and kind == "collective" and has_begun and event["phase"] == "script":
                found += event["lines"][:1]
        return tuple(dict.fromkeys(found))

    @functools.cached_property
    def after_jumps(self) -> set[int]:
        """Updates with the last batch of an epoch that was shortened: a script may know its place in the epoch."""
        return {event["update"] for event in self.all_of("batch") if event["is_after_jump"]}

    @functools.cached_property
    def incomplete_updates(self) -> set[int]:
        """Updates that one of our hooks could not look at: their gradients are not judged."""
        return {event["update"] + later for event in self.all_of("hook_failed") for later in (0, 1)}

    @functools.cached_property
    def is_opaque(self) -> bool:
        """Whether gradients and parameters are kept where they cannot be looked at: FSDP1, DeepSpeed, hooks of DDP."""
        return any(self.all_of("opaque"))

    @functools.cached_property
    def groups(self) -> set[str]:
        """The names of the process groups that something was sent over."""
        return {event["group"] for event in self.all_of("collective")}

    @functools.cached_property
    def sends_activations(self) -> bool:
        """Whether the person's own model sends something in its forward."""
        return any(_is_of_the_model(event) for event in self.all_of("collective"))

    @functools.cached_property
    def is_split(self) -> bool:
        """Whether the ranks hold parts of layers: tensor, pipeline or expert parallelism, also by hand."""
        if self.is_opaque:
            return False
        if any(event["is_split"] for event in self.all_of("step")):
            return True
        if any(event["op"].startswith(("send", "recv")) and event["update"] for event in self.all_of("collective")):
            return True
        if (not self.sees_functions or self.sends_activations) and self._differs_from_the_start:
            return True
        shapes = [{event["shapes"] for event in self.of(rank, "step")} for rank in self.ranks]
        are_sharded = any(event["is_sharded"] for event in self.all_of("step"))
        return not are_sharded and any(own != shapes[0] for own in shapes)

    @functools.cached_property
    def averages_parameters(self) -> bool:
        """Whether ranks that differ are equal again later: local SGD, which averages parameters now and then."""
        return False in self._are_equal and any(self._are_equal[self._are_equal.index(False) :])

    @functools.cached_property
    def averages_each_update(self) -> bool:
        """Whether all ranks begin each update with equal parameters, which they add up after each step themselves."""
        reduced = {
            (event["update"], event["bytes"])
            for event in self.of(self.ranks[0], "collective")
            if event["op"] == "allreduce_" and event["phase"] == "script"
        }
        sizes = [size for _, size in reduced]
        is_each = any(sizes.count(size) >= len(self.steps) - 1 for size in set(sizes) if size > _NUMBERS)
        return len(self.steps) > 1 and all(self._are_equal) and is_each

    @functools.cached_property
    def _are_equal(self) -> list[bool]:
        """Of each update: whether all ranks begin it with equal parameters."""
        return [
            all(step["checksums"] == steps[self.ranks[0]]["checksums"] for step in steps.values())
            for steps in self.steps.values()
        ]

    @property
    def _differs_from_the_start(self) -> bool:
        """Whether the ranks hold other weights under the same names before their first update."""
        first = next(iter(self.steps.values()), {})
        return any(step["checksums"] != first[self.ranks[0]]["checksums"] for step in first.values())

    @functools.cached_property
    def calls_by_rpc(self) -> bool:
        """Whether processes also send each other what is not seen: then which updates belong together is open."""
        return any(event["what"].startswith(BY_RPC) for event in self.all_of("unchecked"))


def are_cut_off(loaders: Iterable[Event]) -> bool:
    """Whether of the epoch of one of these loaders only the first samples were written down."""
    return any(len(loader["indices"]) < loader["num_indices"] for loader in loaders)


def _is_of_the_model(event: Event) -> bool:
    """A collective that the person's own model calls in its forward: activations, of layers that are split by hand.

    What DistributedDataParallel, fully_shard and SyncBatchNorm send comes through functions of theirs.
    """
    if not event["phase"].startswith("forward at ") or not event["lines"]:
        return False
    return event["lines"][0] != event["phase"].removeprefix("forward at ") and len(event["through"]) <= _DIRECT


def read_evidence(run: ScriptRun) -> Evidence:
    """Read the files that the watched processes have written; a line that was cut off is left out."""
    events: dict[int, list[Event]] = defaultdict(list)
    for path in sorted(run.folder.glob("pid*.jsonl")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            events[event["rank"]].append({**event, "file": path.name})
    for found in events.values():
        found.sort(key=lambda event: (event["time"], event["count"]))
    if -1 in events and len(events) == 1:  # no process group: one process alone
        events[0] = [{**event, "rank": 0} for event in events.pop(-1)]
    elif -1 in events:  # what ranks did before they knew that they are ranks
        owners = {event["file"]: rank for rank in events if rank >= 0 for event in events[rank]}
        for event in events.pop(-1):
            if event["file"] in owners:
                rank = owners[event["file"]]
                events[rank].insert(0, {**event, "rank": rank})
            elif event["kind"] == "finish":  # a server of these ranks, called by RPC, which has ended them
                rank = min(owners.values())
                events[rank].append({**event, "rank": rank})
    ranks = sorted(rank for rank in events if rank >= 0)
    return Evidence(run, ranks, dict(events))
