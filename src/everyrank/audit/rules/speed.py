"""Finds unnecessary communication and waiting, which change no result, and batch norms over local samples."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter

from everyrank.audit.events import (
    CollectiveCall,
    Forward,
    GroupOpened,
    LoaderBatch,
    LoaderEpoch,
    OptimizerStep,
    ProcessStart,
    Wrap,
)
from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings

__all__ = ["check_speed"]

_SMALL_BYTES, _BUCKET_BYTES = 2**18, 25 * 2**20  # an all-reduce that is mostly latency; DDP's default bucket
_MIN_STEPS, _MIN_WAIT_SECONDS = 6, 0.02  # fewer steps or shorter waits are not judged
_MIN_WAIT_SHARE = 0.8  # of a step


def check_speed(evidence: Evidence, findings: Findings) -> None:
    """Find unnecessary all-reduces, waits for the device, and options that cost time and have no effect."""
    _check_syncs(evidence, findings)
    _check_waits(evidence, findings)
    _check_wrapping(evidence, findings)
    _check_buckets(evidence, findings)
    _check_loader(evidence, findings)


def _check_syncs(evidence: Evidence, findings: Findings) -> None:
    rank = evidence.ranks[0]
    for update in evidence.steps:
        forwards = [
            event
            for event in evidence.of(rank, Forward)
            if event.update == update
            and event.is_grad
            and event.wrapper == "DistributedDataParallel"
            # each evaluation of a line search needs the gradient of all ranks
            and not event.is_in_closure
        ]
        micros = {event.micro for event in forwards}
        num_needless = len({event.micro for event in forwards if event.syncs}) - 1
        if len(micros) > 1 and num_needless > 0:
            size = sum(event.numel for event in evidence.of(rank, Wrap))
            findings.add(
                "PERF",
                "sync.needless",
                forwards[0].line,
                f"{num_needless + 1} all-reduces of all gradients for an update of {len(micros)} backwards: "
                f"{num_needless} are unnecessary, of {size:,} numbers each",
                "use model.no_sync() around forward and backward of all but the last micro-batch",
            )
            return


def _check_waits(evidence: Evidence, findings: Findings) -> None:
    """Find `.item()` and similar calls in each update. They wait for the GPU, real or emulated by the audit."""
    steps = list(evidence.steps.items())[1:]
    is_cuda = any(event.devices for event in evidence.all_of(ProcessStart)) or any(
        event.backend == "nccl" for event in evidence.all_of(GroupOpened)
    )
    if not is_cuda or not steps:
        return
    counts: Counter[tuple[str, str]] = Counter()
    num_updates: Counter[tuple[str, str]] = Counter()
    for _, ranks in steps:
        for function, line, count in ranks[evidence.ranks[0]].waits:
            counts[function, line] += count
            num_updates[function, line] += 1
    # a line of an evaluation waits in few updates
    in_each_update = Counter({key: count for key, count in counts.items() if num_updates[key] == len(steps)})
    for (function, line), count in in_each_update.most_common(6):
        if line:
            text = f".{function}() waits for the device {count / len(steps):.3g} times an update"
            fix = "keep the value on the device (detach, sum), and read it only every hundred updates"
            findings.add("PERF", "sync.item", line, text, fix)


def _check_wrapping(evidence: Evidence, findings: Findings) -> None:
    rank = evidence.ranks[0]
    steps = [ranks[rank] for ranks in evidence.steps.values()]
    for event in evidence.of(rank, Wrap):
        if event.finds_unused and steps and _are_all_used(evidence):
            text = "find_unused_parameters=True traverses the graph at each update, but every parameter gets a gradient"
            findings.add("PERF", "ddp.find-unused", event.line, text, "remove it")
        if event.num_batch_norms and evidence.world_size > 1:
            size = next((forward.num_samples for forward in evidence.of(rank, Forward) if forward.is_grad), "?")
            num_layers = event.num_batch_norms
            layers, verb, possessive = ("layer", "uses", "its") if num_layers == 1 else ("layers", "use", "their")
            text = f"{num_layers} BatchNorm {layers} {verb} only the {size} local samples of {possessive} rank"
            fix = "SyncBatchNorm.convert_sync_batchnorm(model) uses the samples of all ranks"
            findings.add("NOTE", "ddp.batchnorm", event.line, text, fix)


def _are_all_used(evidence: Evidence) -> bool:
    """Whether each backward of each rank computes a gradient of every parameter.

    `.grad` does not show it, because DDP also fills it with the gradients of other ranks.
    """
    for update, steps in evidence.steps.items():
        if any(step.without_gradient for step in steps.values()):
            return False
        for samples in (evidence.gradient_samples(rank, update) for rank in evidence.ranks):
            names = set(samples.steps) if samples is not None else set[str]()
            if samples is not None and any(names - set(gradients) for gradients in samples.backwards.values()):
                return False
    return True


def _check_buckets(evidence: Evidence, findings: Findings) -> None:
    """Find a bucket_cap_mb so small that a backward sends many more all-reduces, each with its latency."""
    rank = evidence.ranks[0]
    wraps = [event for event in evidence.of(rank, Wrap) if event.bucket_mb is not None]
    all_reduces = [
        event
        for event in evidence.of(rank, CollectiveCall)
        if event.op.startswith("allreduce") and event.phase.startswith("backward") and event.update > 0
    ]
    if len(wraps) != 1 or not all_reduces:
        return
    num_all_reduces = statistics.median(Counter((event.update, event.micro) for event in all_reduces).values())
    size = statistics.mean(event.num_bytes for event in all_reduces)
    num_needed = 2 + int(num_all_reduces * size) // _BUCKET_BYTES  # DDP's first bucket is smaller than the others
    if size < _SMALL_BYTES and num_all_reduces >= 2 * num_needed:
        findings.add(
            "PERF",
            "ddp.buckets",
            wraps[0].line,
            f"bucket_cap_mb={wraps[0].bucket_mb:g}: a backward sends {num_all_reduces:g} all-reduces instead of "
            f"{num_needed}, of {size:,.0f} bytes each",
            "remove bucket_cap_mb (the default is 25)",
        )


def _check_loader(evidence: Evidence, findings: Findings) -> None:
    """Find steps that mostly wait for a loader without workers.

    The audit's hooks lengthen the wait for the loader as well as the rest of a step, because the dataset also calls
    torch and opens files.
    """
    rank = evidence.ranks[0]
    batches: dict[int, list[LoaderBatch]] = {}
    for event in evidence.of(rank, LoaderBatch):
        batches.setdefault(event.update, []).append(event)
    wait_shares, wait_seconds, loaders = list[float](), list[float](), list[int]()
    for before, after in itertools.pairwise(evidence.of(rank, OptimizerStep)):
        step_batches = batches.get(after.update, [])
        if step_batches and after.update == before.update + 1 and all(batch.number > 1 for batch in step_batches):
            loaders.append(step_batches[0].loader)
            wait_seconds.append(sum(batch.seconds for batch in step_batches))
            wait_shares.append(wait_seconds[-1] / max(after.time - before.time, 1e-9))
    if (
        len(wait_seconds) < _MIN_STEPS
        or statistics.median(wait_seconds) < _MIN_WAIT_SECONDS
        or statistics.median(wait_shares) < _MIN_WAIT_SHARE
    ):
        return
    number = statistics.mode(loaders)
    loader = next((event for event in evidence.of(rank, LoaderEpoch) if event.loader == number), None)
    if loader is not None and loader.workers == 0:
        text = (
            f"{statistics.median(wait_shares):.0%} of a step waits for the loader, which has no workers "
            f"({statistics.median(wait_seconds) * 1000:.0f} ms, median of {len(wait_seconds)})"
        )
        findings.add("NOTE", "loader.starves", loader.line, text, "use DataLoader(..., num_workers=4)")
