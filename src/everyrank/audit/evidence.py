"""What the watched processes have written, by rank. Imports no torch."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from everyrank.audit.events import (
    Backward,
    BackwardEnd,
    CollectiveCall,
    Event,
    Forward,
    ForwardEnd,
    HookFailed,
    LoaderBatch,
    LoaderEpoch,
    Opaque,
    OptimizerStep,
    ProcessStart,
    RpcStarted,
    SeedSet,
    Shuffle,
    Stopped,
    event_from,
)
from everyrank.audit.start import ScriptRun
from everyrank.audit.watch.place import is_own_file

_STACK_FRAME = re.compile(r'File "([^"]+)", line (\d+) in \S+')  # of faulthandler
_MIN_PARAMETER_BYTES = 256  # a smaller all-reduce sends losses and counts, not parameters
_MAX_SIZES_BYTES = 64  # bytes: a smaller gather sends sizes
_MAX_LIBRARY_CALLS = 3  # library functions between a line and the collective that it calls

__all__ = ["EpochKey", "Evidence", "GradientSamples", "are_cut_off", "read_evidence"]

EpochKey = tuple[int, int]
"""The number of a loader, and that of an epoch."""

_E = TypeVar("_E", bound=Event)


@dataclasses.dataclass(frozen=True)
class GradientSamples:
    """Gradients of one update on one rank, as samples of at most 2,048 elements, by name of the parameter.

    pieces    from each backward, by its number
    steps     in .grad at the optimizer step
    clipped   in .grad before clipping; {} where nothing was clipped
    carried   in .grad before the first backward
    """

    backwards: dict[int, dict[str, NDArray[np.float64]]]
    steps: dict[str, NDArray[np.float64]]
    clipped: dict[str, NDArray[np.float64]]
    carried: dict[str, NDArray[np.float64]]


@dataclasses.dataclass
class Evidence:
    """All events of a run. The rules read it.

    ranks    that have written events
    events   of each rank, in order
    """

    run: ScriptRun
    ranks: list[int]
    events: dict[int, list[Event]]

    @property
    def world_size(self) -> int:
        """The number of ranks that have written events."""
        return len(self.ranks)

    @functools.cached_property
    def _by_kind(self) -> dict[int, dict[type[Event], list[Event]]]:
        by_kind: dict[int, dict[type[Event], list[Event]]] = {rank: defaultdict(list) for rank in self.ranks}
        for rank in self.ranks:
            for event in self.events[rank]:
                by_kind[rank][type(event)].append(event)
        return by_kind

    def of(self, rank: int, kind: type[_E]) -> list[_E]:
        """The events of this kind on that rank."""
        return cast("list[_E]", self._by_kind[rank][kind])

    def all_of(self, kind: type[_E]) -> list[_E]:
        """The events of this kind on all ranks, rank by rank."""
        return [event for rank in self.ranks for event in self.of(rank, kind)]

    @functools.cached_property
    def sees_functions(self) -> bool:
        """Whether torch functions and collectives were recorded; --watch records none."""
        return all(event.sees_functions for event in self.all_of(ProcessStart))

    @functools.cached_property
    def steps(self) -> dict[int, dict[int, OptimizerStep]]:
        """By update: the step of each rank. Only updates that all ranks have reached."""
        by_rank = {rank: {step.update: step for step in self.of(rank, OptimizerStep)} for rank in self.ranks}
        common_updates = sorted(set.intersection(*(set(steps) for steps in by_rank.values()))) if by_rank else []
        return {update: {rank: by_rank[rank][update] for rank in self.ranks} for update in common_updates}

    @functools.cached_property
    def epochs(self) -> dict[int, dict[EpochKey, str]]:
        """By rank and epoch: "train" where a backward followed its batches, "eval" where only forwards without grad."""
        kinds_by_rank: dict[int, dict[EpochKey, str]] = {}
        for rank in self.ranks:
            kinds: dict[EpochKey, str] = {}
            last_epoch: EpochKey | None = None
            for event in self.events[rank]:
                if isinstance(event, LoaderBatch):
                    last_epoch = (event.loader, event.epoch)
                    kinds.setdefault(last_epoch, "")
                elif isinstance(event, Backward) and last_epoch is not None:
                    kinds[last_epoch] = "train"
                elif isinstance(event, Forward) and last_epoch is not None and not event.is_grad:
                    kinds[last_epoch] = kinds[last_epoch] or "eval"
            kinds_by_rank[rank] = kinds
        return kinds_by_rank

    def loaders(self, rank: int) -> dict[EpochKey, LoaderEpoch]:
        """The epochs of all loaders of a rank."""
        return {(event.loader, event.epoch): event for event in self.of(rank, LoaderEpoch)}

    @functools.cached_property
    def training_forwards(self) -> dict[int, dict[tuple[int, int], Forward]]:
        """By rank: the first forward in train mode of each update and backward."""
        by_rank: dict[int, dict[tuple[int, int], Forward]] = {}
        for rank in self.ranks:
            forwards = by_rank[rank] = {}
            for event in self.of(rank, Forward):
                if event.is_grad and event.is_training:
                    forwards.setdefault((event.update, event.micro), event)
        return by_rank

    def samples(self, rank: int, update: int) -> GradientSamples | None:
        """The gradients of an update on a rank; None where it has written none."""
        path = self.run.folder / f"rank{rank}.update{update}.npz"
        if not path.exists():
            return None
        samples = GradientSamples({}, {}, {}, {})
        by_kind = {"step": samples.steps, "clip": samples.clipped, "carried": samples.carried}
        with np.load(path, allow_pickle=False) as arrays:
            for key in arrays.files:
                kind, _, name = key.replace("|", "/").partition(" ")
                if kind == "piece":
                    micro, _, name = name.partition(" ")
                    samples.backwards.setdefault(int(micro), {})[name] = arrays[key]
                else:
                    by_kind[kind][name] = arrays[key]
        return samples

    def replayed(self, update: int) -> dict[str, dict[str, NDArray[np.float64]]]:
        """Samples of the gradients of a replayed update, by kind (see `replay.run`) and name."""
        gradients: dict[str, dict[str, NDArray[np.float64]]] = defaultdict(dict)
        with np.load(self.run.folder / f"replay{update}.npz", allow_pickle=False) as arrays:
            for key in arrays.files:
                kind, _, name = key.replace("|", "/").partition(" ")
                gradients[kind][name] = arrays[key]
        return gradients

    def scaling_lines(self, update: int) -> tuple[str, ...]:
        """Lines of rank 0 in this update that call backward, scale the loss, or send something."""
        lines: list[str] = []
        has_trained = update > 0  # before the first one weights are sent, too
        for event in self.events[self.ranks[0]]:
            if event.update != update:
                continue
            has_trained |= isinstance(event, Forward) and event.is_grad
            if isinstance(event, Backward):
                lines.append(event.line)
            elif isinstance(event, BackwardEnd):
                lines += event.scaling_lines
            elif isinstance(event, CollectiveCall) and has_trained and event.phase == "script":
                lines += event.lines[:1]
        return tuple(dict.fromkeys(lines))

    def stopped_at(self, rank: int) -> str:
        """The user's line that a rank was in when the run was ended; "" where it has written no stack."""
        for event in self.of(rank, ProcessStart):
            path = self.run.folder / f"stack{event.pid}"
            if path.exists():
                for filename, line in _STACK_FRAME.findall(path.read_text(errors="replace")):
                    if is_own_file(filename):
                        return f"{filename}:{line}"
        return ""

    @functools.cached_property
    def updates_after_skip(self) -> set[int]:
        """Updates with the last batch of a shortened epoch: the script may depend on its position in the epoch."""
        return {event.update for event in self.all_of(LoaderBatch) if event.is_after_skip}

    @functools.cached_property
    def incomplete_updates(self) -> set[int]:
        """Updates in which a hook has raised: their gradients are not judged."""
        return {event.update + offset for event in self.all_of(HookFailed) for offset in (0, 1)}

    @functools.cached_property
    def is_opaque(self) -> bool:
        """Whether gradients and parameters cannot be read: DeepSpeed, communication hooks of DDP."""
        return any(self.all_of(Opaque))

    @functools.cached_property
    def groups(self) -> set[str]:
        """The names of the process groups that are used."""
        return {event.group for event in self.all_of(CollectiveCall)}

    @functools.cached_property
    def sends_activations(self) -> bool:
        """Whether the user's own model calls a collective in its forward."""
        return any(_is_in_user_model(event) for event in self.all_of(CollectiveCall))

    def equal_seeds(self, libraries: Iterable[str]) -> tuple[str, ...]:
        """Lines that give the generators of these libraries the same seed on two ranks, the last ones first."""
        first, second = ([*self.of(rank, SeedSet)] for rank in self.ranks[:2])
        second_seeds = {(event.library, event.line, event.seed) for event in second}
        equal_events = [event for event in first if (event.library, event.line, event.seed) in second_seeds]
        last_events = {event.library: event for event in equal_events if event.library in libraries}
        return tuple(dict.fromkeys(line for event in last_events.values() for line in event.lines))

    @functools.cached_property
    def unequal_shuffles(self) -> tuple[str, ...]:
        """Lines at which ranks 0 and 1 shuffle with generators in different states, before the first update."""
        states: list[dict[str, list[int]]] = []
        for rank in self.ranks[:2]:
            by_line: dict[str, list[int]] = defaultdict(list)
            for event in self.of(rank, Shuffle):
                by_line[event.line].append(event.state)
            states.append(by_line)
        return tuple(line for line in states[0] if states[1].get(line, states[0][line]) != states[0][line])

    @functools.cached_property
    def has_joint_loss(self) -> bool:
        """Whether the script sends what a forward gave, before its backward: a loss has the outputs of all ranks."""
        has_output = False
        for event in self.events[self.ranks[0]]:
            if isinstance(event, ForwardEnd):
                has_output = True
            elif isinstance(event, Backward):
                has_output = False
            elif isinstance(event, CollectiveCall) and has_output and event.phase == "script":
                is_gather = any(kind in event.op for kind in ("gather", "alltoall", "all_to_all"))
                if event.num_bytes > (_MAX_SIZES_BYTES if is_gather else _MIN_PARAMETER_BYTES) and (
                    is_gather or "reduce" in event.op
                ):
                    return True
        return False

    @functools.cached_property
    def is_split(self) -> bool:
        """Whether layers are split over the ranks: tensor, pipeline or expert parallelism, also written by hand."""
        if self.is_opaque:
            return False
        steps = self.all_of(OptimizerStep)
        if any(step.is_split for step in steps):
            return True
        if any(event.op.startswith(("send", "recv")) and event.update for event in self.all_of(CollectiveCall)):
            return True
        if (not self.sees_functions or self.sends_activations) and self._starts_unequal:
            return True
        shapes = [{step.shapes for step in self.of(rank, OptimizerStep)} for rank in self.ranks]
        return not any(step.is_sharded for step in steps) and any(rank_shapes != shapes[0] for rank_shapes in shapes)

    @functools.cached_property
    def averages_parameters(self) -> bool:
        """Whether ranks that differ are equal again later, as in local SGD."""
        return False in self._are_equal and any(self._are_equal[self._are_equal.index(False) :])

    @functools.cached_property
    def has_separate_models(self) -> bool:
        """Whether each rank seems to train a model of its own, as in an ensemble: they send nothing between updates.

        Each rank has a seed of its own, or the ranks exchange something after the training. Without these, a script
        that forgets to average looks the same.
        """
        last_update = max(self.steps, default=0)
        sent_in = [event.update for event in self.of(self.ranks[0], CollectiveCall) if event.update]
        seeds_by_rank = [
            [event.seed for event in self.of(rank, SeedSet) if event.library == "torch"] for rank in self.ranks
        ]
        is_seeded = any(len(set(seeds)) > 1 for seeds in zip(*seeds_by_rank, strict=False))
        return (
            min(sent_in, default=last_update) >= last_update
            and (is_seeded or bool(sent_in))
            and not any(self._are_equal[1:])
        )

    @functools.cached_property
    def averages_each_update(self) -> bool:
        """Whether all ranks begin each update with equal parameters because the script averages them."""
        all_reduces = {
            (event.update, event.num_bytes)
            for event in self.of(self.ranks[0], CollectiveCall)
            if event.op == "allreduce_" and event.phase == "script"
        }
        sizes = [size for _, size in all_reduces]
        is_in_each_update = any(
            sizes.count(size) >= len(self.steps) - 1 for size in set(sizes) if size > _MIN_PARAMETER_BYTES
        )
        return len(self.steps) > 1 and all(self._are_equal) and is_in_each_update

    @functools.cached_property
    def _are_equal(self) -> list[bool]:
        """For each update, whether all ranks begin it with equal parameters."""
        return [
            all(step.checksums == steps[self.ranks[0]].checksums for step in steps.values())
            for steps in self.steps.values()
        ]

    @property
    def _starts_unequal(self) -> bool:
        """Whether the ranks hold different weights under the same names before their first update."""
        first_steps = next(iter(self.steps.values()), {})
        return any(step.checksums != first_steps[self.ranks[0]].checksums for step in first_steps.values())

    @functools.cached_property
    def calls_by_rpc(self) -> bool:
        """Whether the script uses RPC, which is not recorded: then it is unknown which updates belong together."""
        return any(self.all_of(RpcStarted))


def are_cut_off(loaders: Iterable[LoaderEpoch]) -> bool:
    """Whether only the first indices of one of these epochs were written."""
    return any(len(loader.indices) < loader.num_indices for loader in loaders)


def _is_in_user_model(event: CollectiveCall) -> bool:
    """Whether the user's own model calls this collective in its forward: activations of layers split by hand.

    DistributedDataParallel, fully_shard and SyncBatchNorm send through functions of their own.
    """
    if not event.phase.startswith("forward at ") or not event.lines:
        return False
    return event.line != event.phase.removeprefix("forward at ") and len(event.library_calls) <= _MAX_LIBRARY_CALLS


def read_evidence(run: ScriptRun) -> Evidence:
    """Read the files that the watched processes have written. Incomplete lines are skipped."""
    rows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(run.folder.glob("pid*.jsonl")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            rows[row["rank"]].append({**row, "file": path.name})
    for rank_rows in rows.values():
        rank_rows.sort(key=lambda row: (row["time"], row["count"]))
    unranked = rows.pop(-1, [])
    if not rows:  # no process group: a single process
        rows[0] = unranked
    else:  # events from before the process group was open
        file_ranks = {row["file"]: rank for rank, rank_rows in rows.items() for row in rank_rows}
        for row in unranked:
            if row["file"] in file_ranks:
                rows[file_ranks[row["file"]]].insert(0, row)
            elif row["kind"] == Stopped.__name__:  # a server, called by RPC, that has ended these ranks
                rows[min(file_ranks.values())].append(row)
    events = {
        rank: [
            event_from({**{key: value for key, value in row.items() if key != "file"}, "rank": rank})
            for row in rank_rows
        ]
        for rank, rank_rows in rows.items()
    }
    return Evidence(run, sorted(rank for rank in events if events[rank]), events)
