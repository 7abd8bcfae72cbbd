"""What costs time for nothing. None of it changes a number."""

from __future__ import annotations

from collections import Counter

from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings

__all__ = ["check_speed"]


def check_speed(evidence: Evidence, findings: Findings) -> None:
    """Needless all-reduces, waits for the device, options that are paid for and not used."""
    _check_syncs(evidence, findings)
    _check_waits(evidence, findings)
    _check_wrapping(evidence, findings)


def _check_syncs(evidence: Evidence, findings: Findings) -> None:
    rank = evidence.ranks[0]
    for update in evidence.steps:
        forwards = [
            event
            for event in evidence.of(rank, "forward")
            if event["update"] == update and event["is_grad"] and event["wrapper"] == "DistributedDataParallel"
        ]
        micros = {event["micro"] for event in forwards}
        needless = len({event["micro"] for event in forwards if event["syncs"]}) - 1
        if len(micros) > 1 and needless > 0:
            size = sum(event["numel"] for event in evidence.of(rank, "wrap"))
            findings.add(
                "PERF",
                "sync.needless",
                forwards[0]["line"],
                f"{needless + 1} all-reduces of all gradients for an update of {len(micros)} backwards: "
                f"{needless} needless, of {size:,} numbers each",
                "with model.no_sync(): around forward and backward of all micro-batches but the last",
            )
            return


def _check_waits(evidence: Evidence, findings: Findings) -> None:
    """`.item()` and its like at each update: only where it is a GPU, or pretended to be one, does it wait."""
    steps = list(evidence.steps.items())[1:]
    is_cuda = any(event["devices"] for event in evidence.all_of("start")) or any(
        event["backend"] == "nccl" for event in evidence.all_of("group")
    )
    if not is_cuda or not steps:
        return
    counts: Counter[tuple[str, str]] = Counter()
    for _, ranks in steps:
        for kind, line, count in ranks[evidence.ranks[0]]["waits"]:
            counts[kind, line] += count
    for (kind, line), count in counts.most_common(6):
        if line and count >= len(steps):
            text = f".{kind}() waits for the device {count / len(steps):.3g} times an update"
            fix = "keep it on the device (detach, add up), and ask every hundred updates"
            findings.add("PERF", "sync.item", line, text, fix)


def _check_wrapping(evidence: Evidence, findings: Findings) -> None:
    rank = evidence.ranks[0]
    steps = [ranks[rank] for ranks in evidence.steps.values()]
    for event in evidence.of(rank, "wrap"):
        if event["finds_unused"] and steps and not any(step["without_gradient"] for step in steps):
            text = "find_unused_parameters=True walks the graph at each update, and every parameter got a gradient"
            findings.add("PERF", "ddp.find-unused", event["line"], text, "leave it out")
        if event["num_batch_norms"] and evidence.world_size > 1:
            size = next((one["size"] for one in evidence.of(rank, "forward") if one["is_grad"]), "?")
            text = f"{event['num_batch_norms']} batch-norm layers normalise over the {size} samples of one rank"
            fix = "SyncBatchNorm.convert_sync_batchnorm(model) normalises over those of all ranks"
            findings.add("NOTE", "ddp.batchnorm", event["line"], text, fix)
