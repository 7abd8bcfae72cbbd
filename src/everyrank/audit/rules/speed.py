"""Needless communication and waiting. None of it changes a result."""

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
_FEW_STEPS, _SHORT_SECONDS, _MOST = 6, 0.02, 0.8  # fewer steps or shorter waits are not judged; share of a step


def check_speed(evidence: Evidence, findings: Findings) -> None:
    """Find needless all-reduces, waits for the device, and options that cost time and have no effect."""
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
            if event.update == update and event.is_grad and event.wrapper == "DistributedDataParallel"
        ]
        micros = {event.micro for event in forwards}
        needless = len({event.micro for event in forwards if event.syncs}) - 1
        if len(micros) > 1 and needless > 0:
            size = sum(event.numel for event in evidence.of(rank, Wrap))
            findings.add(
                "PERF",
                "sync.needless",
                forwards[0].line,
                f"{needless + 1} all-reduces of all gradients for an update of {len(micros)} backwards: "
                f"{needless} needless, of {size:,} numbers each",
                "with model.no_sync(): around forward and backward of all but the last micro-batch",
            )
            return


def _check_waits(evidence: Evidence, findings: Findings) -> None:
    """Find `.item()` and similar calls in each update, which wait for a GPU. Pretended GPUs count."""
    steps = list(evidence.steps.items())[1:]
    is_cuda = any(event.devices for event in evidence.all_of(ProcessStart)) or any(
        event.backend == "nccl" for event in evidence.all_of(GroupOpened)
    )
    if not is_cuda or not steps:
        return
    counts: Counter[tuple[str, str]] = Counter()
    for _, ranks in steps:
        for kind, line, count in ranks[evidence.ranks[0]].waits:
            counts[kind, line] += count
    for (kind, line), count in counts.most_common(6):
        if line and count >= len(steps):
            text = f".{kind}() waits for the device {count / len(steps):.3g} times an update"
            fix = "keep the value on the device (detach, sum), and read it every hundred updates"
            findings.add("PERF", "sync.item", line, text, fix)


def _check_wrapping(evidence: Evidence, findings: Findings) -> None:
    rank = evidence.ranks[0]
    steps = [ranks[rank] for ranks in evidence.steps.values()]
    for event in evidence.of(rank, Wrap):
        if event.finds_unused and steps and not any(step.without_gradient for step in steps):
            text = "find_unused_parameters=True traverses the graph at each update, but every parameter gets a gradient"
            findings.add("PERF", "ddp.find-unused", event.line, text, "remove it")
        if event.num_batch_norms and evidence.world_size > 1:
            size = next((forward.num_samples for forward in evidence.of(rank, Forward) if forward.is_grad), "?")
            num = event.num_batch_norms
            layers, use, their = ("layer", "uses", "its") if num == 1 else ("layers", "use", "their")
            text = f"{num} BatchNorm {layers} {use} only the {size} local samples of {their} rank"
            fix = "SyncBatchNorm.convert_sync_batchnorm(model) uses the samples of all ranks"
            findings.add("NOTE", "ddp.batchnorm", event.line, text, fix)


def _check_buckets(evidence: Evidence, findings: Findings) -> None:
    """Find a bucket_cap_mb so small that there are many more all-reduces, each with its latency."""
    rank = evidence.ranks[0]
    wraps = [event for event in evidence.of(rank, Wrap) if event.bucket_mb is not None]
    sent = [
        event
        for event in evidence.of(rank, CollectiveCall)
        if event.op.startswith("allreduce") and event.phase.startswith("backward") and event.update > 0
    ]
    if len(wraps) != 1 or not sent:
        return
    count = statistics.median(Counter((event.update, event.micro) for event in sent).values())
    size = statistics.mean(event.num_bytes for event in sent)
    needed = 2 + int(count * size) // _BUCKET_BYTES  # DDP's first bucket is smaller than the others
    if size < _SMALL_BYTES and count >= 2 * needed:
        findings.add(
            "PERF",
            "ddp.buckets",
            wraps[0].line,
            f"bucket_cap_mb={wraps[0].bucket_mb:g}: a backward sends {count:g} all-reduces of {size:,.0f} bytes "
            f"instead of {needed}",
            "remove bucket_cap_mb (the default is 25)",
        )


def _check_loader(evidence: Evidence, findings: Findings) -> None:
    """Find steps that mostly wait for a loader without workers. The hooks lengthen only the rest of a step."""
    rank = evidence.ranks[0]
    batches: dict[int, list[LoaderBatch]] = {}
    for event in evidence.of(rank, LoaderBatch):
        batches.setdefault(event.update, []).append(event)
    shares, waits = list[float](), list[float]()
    for before, after in itertools.pairwise(evidence.of(rank, OptimizerStep)):
        of_step = batches.get(after.update, [])
        if of_step and after.update == before.update + 1 and all(batch.number > 1 for batch in of_step):
            waits.append(sum(batch.seconds for batch in of_step))
            shares.append(waits[-1] / max(after.time - before.time, 1e-9))
    if len(waits) < _FEW_STEPS or statistics.median(waits) < _SHORT_SECONDS or statistics.median(shares) < _MOST:
        return
    number = next(iter(batches.values()))[0].loader
    loader = next((event for event in evidence.of(rank, LoaderEpoch) if event.loader == number), None)
    if loader is not None and loader.workers == 0:
        text = (
            f"{statistics.median(shares):.0%} of a step waits for the loader, which has no workers "
            f"({statistics.median(waits) * 1000:.0f} ms, median of {len(waits)})"
        )
        findings.add("NOTE", "loader.starves", loader.line, text, "DataLoader(..., num_workers=4)")
