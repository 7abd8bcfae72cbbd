"""The events that the hooked processes have written, by rank. Does not import torch."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from everyrank.audit.events import (
    Backward,
    BackwardEnd,
    Clip,
    CollectiveCall,
    EvalForward,
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
from everyrank.audit.watch.source_location import is_user_file

_STACK_FRAME = re.compile(r'File "([^"]+)", line (\d+) in \S+')  # as faulthandler writes it
_MIN_PARAMETER_BYTES = 256  # a smaller all-reduce sends losses and counts, not parameters
_MAX_SIZES_BYTES = 64  # a smaller gather only sends sizes
_MAX_LIBRARY_CALLS = 3  # between a line of the user and the collective, if that line calls it directly

__all__ = ["EpochKey", "Evidence", "GradientSamples", "are_cut_off", "read_evidence"]

EpochKey = tuple[int, int]
"""The number of a loader, and the number of an epoch."""

_E = TypeVar("_E", bound=Event)


@dataclasses.dataclass(frozen=True)
class GradientSamples:
    """Gradients of one update on one rank: at most 2,048 elements of each parameter, by its name.

    backwards  of each backward, by its number
    steps      .grad at the optimizer step
    clipped    .grad before clipping; {} if nothing was clipped
    carried    .grad before the first backward, carried over from the previous update
    """

    backwards: dict[int, dict[str, NDArray[np.float64]]]
    steps: dict[str, NDArray[np.float64]]
    clipped: dict[str, NDArray[np.float64]]
    carried: dict[str, NDArray[np.float64]]


@dataclasses.dataclass
class Evidence:
    """All events of a run, for the rules.

    ranks    the ranks that have written events
    events   the events of each rank, in order
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
        """The optimizer step of each rank, by update. Contains only updates that all ranks have reached."""
        by_rank = {rank: {step.update: step for step in self.of(rank, OptimizerStep)} for rank in self.ranks}
        common_updates = sorted(set.intersection(*(set(steps) for steps in by_rank.values()))) if by_rank else []
        return {update: {rank: by_rank[rank][update] for rank in self.ranks} for update in common_updates}

    @functools.cached_property
    def epochs(self) -> dict[int, dict[EpochKey, str]]:
        """By rank and epoch: "train" if a backward followed its batches, "eval" if only forwards without gradients."""
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

    def evaluation_forwards(self, rank: int) -> list[EvalForward]:
        """The forwards without gradients that evaluate a model.

        Forwards in train mode of a training step are left out, such as those of a generator before the discriminator's
        backward. So are forwards in train mode on batches of a training loader, such as those of `update_bn`.
        """
        trained_loaders = {loader for (loader, _), kind in self.epochs[rank].items() if kind == "train"}
        forwards: list[EvalForward] = []
        before_backward: list[EvalForward] = []  # in train mode, since the last batch of a training epoch
        last_epoch: EpochKey | None = None
        for event in self.events[rank]:
            if isinstance(event, LoaderBatch):
                forwards += before_backward
                before_backward, last_epoch = [], (event.loader, event.epoch)
            elif isinstance(event, Backward):
                before_backward = []
            elif isinstance(event, EvalForward):
                if not event.is_training or last_epoch is None or last_epoch[0] not in trained_loaders:
                    forwards.append(event)
                elif self.epochs[rank][last_epoch] == "train":
                    before_backward.append(event)
        return [*forwards, *before_backward]

    def loaders(self, rank: int) -> dict[EpochKey, LoaderEpoch]:
        """The epochs of all loaders of a rank."""
        return {(event.loader, event.epoch): event for event in self.of(rank, LoaderEpoch)}

    def pass_numbers(self, rank: int) -> dict[EpochKey, int]:
        """The number of each pass over a loader, without passes in which the rank evaluates or looks at one batch.

        All ranks give a training pass the same number. Their epoch numbers differ if only rank 0 evaluates the training
        loader.
        """
        num_read = Counter((event.loader, event.epoch) for event in self.of(rank, LoaderBatch))
        numbers: dict[EpochKey, int] = {}
        counts: dict[int, int] = defaultdict(int)
        for key, epoch in self.loaders(rank).items():
            kind = self.epochs[rank].get(key)
            is_look = not kind and num_read[key] == 1 and epoch.num_batches != 1  # for example, to print shapes
            if kind != "eval" and not is_look:
                numbers[key] = counts[key[0]]
                counts[key[0]] += 1
        return numbers

    @functools.cached_property
    def training_forwards(self) -> dict[int, dict[tuple[int, int], Forward]]:
        """The first forward in train mode of each update and backward, by rank."""
        by_rank: dict[int, dict[tuple[int, int], Forward]] = {}
        for rank in self.ranks:
            forwards = by_rank[rank] = {}
            for event in self.of(rank, Forward):
                if event.is_grad and event.is_training:
                    forwards.setdefault((event.update, event.micro), event)
        return by_rank

    def gradient_samples(self, rank: int, update: int) -> GradientSamples | None:
        """The gradients of an update on a rank; None if the rank has not written them.

        Also None if gradients were clipped both before the first backward of the update and after it, because the hooks
        keep only the gradients before the first clipping. For example, a closure may clip in each of its calls.
        """
        path = self.run.folder / f"rank{rank}.update{update}.npz"
        if not path.exists():
            return None
        samples = GradientSamples({}, {}, {}, {})
        by_kind = {"step": samples.steps, "clip": samples.clipped, "carried": samples.carried}
        with np.load(path, allow_pickle=False) as arrays:
            for key in arrays.files:
                kind, _, name = key.replace("|", "/").partition(" ")
                if kind == "backward":
                    micro, _, name = name.partition(" ")
                    samples.backwards.setdefault(int(micro), {})[name] = arrays[key]
                else:
                    by_kind[kind][name] = arrays[key]
        # Without a backward, the step uses gradients of an earlier update, and a clipping before the step counts.
        has_backward = any(backward.update == update for backward in self.of(rank, Backward))
        clips = [clip.micro for clip in self.of(rank, Clip) if clip.update == update]
        first_backward = min(samples.backwards, default=-1)
        if has_backward and clips and min(clips) <= first_backward:
            if max(clips) > first_backward:
                return None
            samples.clipped.clear()
        return samples

    @functools.cached_property
    def late_clips(self) -> list[Clip]:
        """The clippings between an optimizer step and the next backward, so that no step uses what they change."""
        late_clips: list[Clip] = []
        for rank in self.ranks:
            after_step: list[Clip] = []  # since the last step, if there was no backward since then
            for event in self.events[rank]:
                if isinstance(event, Clip) and not event.micro and event.update:
                    after_step.append(event)
                elif isinstance(event, OptimizerStep):
                    after_step = []  # a second optimizer uses these gradients
                elif isinstance(event, Backward):
                    late_clips += after_step
                    after_step = []
        return late_clips

    def replayed(self, update: int) -> dict[str, dict[str, NDArray[np.float64]]]:
        """The gradients of a replayed update, by kind (see `replay.run`) and name."""
        gradients: dict[str, dict[str, NDArray[np.float64]]] = defaultdict(dict)
        with np.load(self.run.folder / f"replay{update}.npz", allow_pickle=False) as arrays:
            for key in arrays.files:
                kind, _, name = key.replace("|", "/").partition(" ")
                gradients[kind][name] = arrays[key]
        return gradients

    def scaling_lines(self, update: int) -> tuple[str, ...]:
        """Lines of rank 0 in this update that call backward, scale the loss, or call a collective."""
        lines: list[str] = []
        has_trained = update > 0  # before the first forward the ranks also send weights
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
        """The user's line that a rank was in when the run was ended; "" if the rank has not written its stack."""
        for event in self.of(rank, ProcessStart):
            path = self.run.folder / f"stack{event.pid}"
            if path.exists():
                for filename, line in _STACK_FRAME.findall(path.read_text(errors="replace")):
                    if is_user_file(filename):
                        return f"{filename}:{line}"
        return ""

    @functools.cached_property
    def updates_after_skip(self) -> set[int]:
        """Updates on the last batch of an epoch that the audit shortened.

        Their results depend on the audit if the script reads its position in the epoch, as in `i + 1 == len(loader)`.
        """
        return {event.update for event in self.all_of(LoaderBatch) if event.is_after_skip}

    @functools.cached_property
    def incomplete_updates(self) -> set[int]:
        """Updates in which a hook raised an exception, and the update after each. Their gradients are not judged."""
        return {event.update + offset for event in self.all_of(HookFailed) for offset in (0, 1)}

    @functools.cached_property
    def is_opaque(self) -> bool:
        """Whether gradients and parameters cannot be read, as under DeepSpeed or with communication hooks of DDP."""
        return any(self.all_of(Opaque))

    @functools.cached_property
    def groups(self) -> set[str]:
        """The names of the process groups that the script uses."""
        return {event.group for event in self.all_of(CollectiveCall)}

    @functools.cached_property
    def sends_activations(self) -> bool:
        """Whether the user's own model calls a collective in its forward."""
        return any(_is_in_user_model(event) for event in self.all_of(CollectiveCall))

    def equal_seeds(self, libraries: Iterable[str]) -> tuple[str, ...]:
        """Lines that set the same seed of these libraries on ranks 0 and 1, the last one for each library."""
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
        """Whether the script sends outputs between forward and backward, so that one loss has those of all ranks."""
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
        """Whether layers are split over the ranks by tensor, pipeline or expert parallelism, also by hand."""
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
        """Whether parameters differ between ranks in some update and are equal again later, as in local SGD."""
        starts_equal = self._starts_equal_by_update
        return False in starts_equal and any(starts_equal[starts_equal.index(False) :])

    @functools.cached_property
    def has_separate_models(self) -> bool:
        """Whether each rank seems to train a separate model, as in an ensemble, and sends nothing between updates.

        Also, the ranks have different seeds, or exchange something after the training. Otherwise it could be a script
        that forgets to average gradients.
        """
        last_update = max(self.steps, default=0)
        sent_in = [event.update for event in self.of(self.ranks[0], CollectiveCall) if event.update]
        seeds_by_rank = [
            [event.seed for event in self.of(rank, SeedSet) if event.library == "torch"] for rank in self.ranks
        ]
        has_different_seeds = any(len(set(seeds)) > 1 for seeds in zip(*seeds_by_rank, strict=False))
        return (
            min(sent_in, default=last_update) >= last_update
            and (has_different_seeds or bool(sent_in))
            and not any(self._starts_equal_by_update[1:])
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
        return len(self.steps) > 1 and all(self._starts_equal_by_update) and is_in_each_update

    @functools.cached_property
    def _starts_equal_by_update(self) -> list[bool]:
        """For each update, whether all ranks begin it with equal parameters."""
        return [
            all(_checksums(step) == _checksums(steps[self.ranks[0]]) for step in steps.values())
            for steps in self.steps.values()
        ]

    @property
    def _starts_unequal(self) -> bool:
        """Whether the ranks have different weights before their first update."""
        first_steps = next(iter(self.steps.values()), {})
        return any(_checksums(step) != _checksums(first_steps[self.ranks[0]]) for step in first_steps.values())

    @functools.cached_property
    def calls_by_rpc(self) -> bool:
        """Whether the script uses RPC. Its calls are not recorded, so it is unknown which updates belong together."""
        return any(self.all_of(RpcStarted))


def _checksums(step: OptimizerStep) -> list[int]:
    """The checksums of an optimizer's parameters, in order. A rank that steps before a forward has no names yet."""
    return list(step.checksums.values())


def are_cut_off(loaders: Iterable[LoaderEpoch]) -> bool:
    """Whether one of these epochs has more indices than were written."""
    return any(len(loader.indices) < loader.num_indices for loader in loaders)


def _is_in_user_model(event: CollectiveCall) -> bool:
    """Whether the user's own model calls this collective in its forward, to send activations of split layers.

    DistributedDataParallel, fully_shard and SyncBatchNorm call collectives through several library functions.
    """
    if not event.phase.startswith("forward at ") or not event.lines:
        return False
    return event.line != event.phase.removeprefix("forward at ") and len(event.library_calls) <= _MAX_LIBRARY_CALLS


def read_evidence(run: ScriptRun) -> Evidence:
    """Read the events that the hooked processes have written. Incomplete lines are skipped."""
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
    if not rows:  # a single process without a process group
        rows[0] = unranked
    else:  # events from before the process group was open
        file_ranks = {row["file"]: rank for rank, rank_rows in rows.items() for row in rank_rows}
        for row in reversed(unranked):
            if row["file"] in file_ranks:
                rows[file_ranks[row["file"]]].insert(0, row)
            elif row["kind"] == Stopped.__name__:  # written by an RPC server that has ended these ranks
                rows[min(file_ranks.values())].append(row)
    events = {
        rank: [
            event_from({**{key: value for key, value in row.items() if key != "file"}, "rank": rank})
            for row in rank_rows
        ]
        for rank, rank_rows in rows.items()
    }
    return Evidence(run, sorted(rank for rank in events if events[rank]), events)
