"""What costs time for nothing. None of it changes a number."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter

from everyrank.audit.events import (
    Batch,
    Collective,
    Forward,
    GroupOpened,
    LoaderEpoch,
    OptimizerStep,
    ProcessStart,
    Wrap,
)
from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings

__all__ = ["check_speed"]

_SMALL_BYTES, _BUCKET_BYTES = 2**18, 25 * 2**20  # of an all-reduce that is mostly latency; of DDP's own buckets
_FEW_STEPS, _SHORT_SECONDS, _MOST = 6, 0.02, 0.8  # too few, or too short, to say what a step waits for


def check_speed(evidence: Evidence, findings: Findings) -> None:
    """Needless all-reduces, waits for the device, options that are paid for and not used."""
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
                "with model.no_sync(): around forward and backward of all micro-batches but the last",
            )
            return


def _check_waits(evidence: Evidence, findings: Findings) -> None:
    """`.item()` and its like at each update: only where it is a GPU, or pretended to be one, does it wait."""
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
            fix = "keep it on the device (detach, add up), and ask every hundred updates"
            findings.add("PERF", "sync.item", line, text, fix)


def _check_wrapping(evidence: Evidence, findings: Findings) -> None:
    rank = evidence.ranks[0]
    steps = [ranks[rank] for ranks in evidence.steps.values()]
    for event in evidence.of(rank, Wrap):
        if event.finds_unused and steps and not any(step.without_gradient for step in steps):
            text = "find_unused_parameters=True walks the graph at each update, and every parameter got a gradient"
            findings.add("PERF", "ddp.find-unused", event.line, text, "leave it out")
        if event.num_batch_norms and evidence.world_size > 1:
            size = next((one.num_samples for one in evidence.of(rank, Forward) if one.is_grad), "?")
            text = f"{event.num_batch_norms} batch-norm layers normalise over the {size} samples of one rank"
            fix = "SyncBatchNorm.convert_sync_batchnorm(model) normalises over those of all ranks"
            findings.add("NOTE", "ddp.batchnorm", event.line, text, fix)


def _check_buckets(evidence: Evidence, findings: Findings) -> None:
    """Buckets that the script has made so small that many times the all-reduces travel: each costs its latency."""
    rank = evidence.ranks[0]
    wraps = [event for event in evidence.of(rank, Wrap) if event.bucket_mb is not None]
    sent = [
        event
        for event in evidence.of(rank, Collective)
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
            f"bucket_cap_mb={wraps[0].bucket_mb:g}: {count:g} all-reduces of {size:,.0f} bytes a backward, where "
            f"{needed} would do",
            "leave bucket_cap_mb out (25)",
        )


def _check_loader(evidence: Evidence, findings: Findings) -> None:
    """Steps that mostly wait for a loader without workers. Our hooks make the rest of a step longer, not this."""
    rank = evidence.ranks[0]
    batches: dict[int, list[Batch]] = {}
    for event in evidence.of(rank, Batch):
        batches.setdefault(event.update, []).append(event)
    shares, waits = list[float](), list[float]()
    for before, after in itertools.pairwise(evidence.of(rank, OptimizerStep)):
        own = batches.get(after.update, [])
        if own and after.update == before.update + 1 and all(event.number > 1 for event in own):
            waits.append(sum(event.seconds for event in own))
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
