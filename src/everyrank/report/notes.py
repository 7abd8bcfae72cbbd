"""What a reader must know to read the numbers: the answer in a sentence, how it was measured, what may be wrong."""

from __future__ import annotations

from collections.abc import Sequence

from everyrank.record import Record
from everyrank.report.rows import is_checked, label

__all__ = ["answer", "notes", "why_slower"]

_BUSY = 0.1  # of the cores: what others take beyond it is said


def answer(records: Sequence[Record]) -> str:
    """What a person looks for first: which layout is fastest, and whether every row is equal to one device."""
    checked = [record for record in records if is_checked(record)]
    ran = [record for record in records if record.parity.status != "not_verified"]
    different = list(dict.fromkeys(record.layout for record in ran if not is_checked(record)))
    if not ran:
        return "Nothing was verified here."
    equal = (
        f"All {len(ran)} layouts that ran are equal to one device." if len(ran) > 1 else "It is equal to one device."
    )
    if different:
        differ = "differ" if len(different) > 1 else "differs"
        equal = f"{', '.join(different)} {differ} from one device, {len(checked)} of {len(ran)} are equal to it."
    timed = [record for record in checked if record.throughput_samples_per_second is not None]
    return f"{_fastest(timed)} {equal}" if timed else equal


def _fastest(timed: Sequence[Record]) -> str:
    speeds = [(record.throughput_samples_per_second, label(record)) for record in timed]
    known = sorted(((speed, name) for speed, name in speeds if speed), key=lambda pair: pair[0].median, reverse=True)
    (first, name), *others = known
    text = f"{name} is fastest here: {first.median:,.0f} samples/s"
    near = [other for speed, other in others if speed.high >= first.low]
    if near:
        text += f" ({', '.join(near)} may be as fast: the intervals overlap)"
    elif others and others[0][0].median > 0:
        text += f", {first.median / others[0][0].median:.2f} times {others[0][1]}, the next"
    return f"{text}."


def notes(records: Sequence[Record]) -> list[str]:
    """What a reader must know to read the numbers."""
    texts = _of_the_machine(records)
    timed = [record for record in records if record.throughput_samples_per_second is not None]
    if timed:
        texts.append(str(timed[0].provenance.get("method", "")))
        cores = timed[0].provenance.get("cores")
        if timed[0].device == "cpu" and any(record.world_size > 1 for record in timed):
            texts.append(
                f"All ranks share the {cores} cores of one machine: this checks layouts, it does not rank them."
            )
    if any(record.scaling is not None and is_checked(record) for record in records):
        texts.append(
            "Efficiency is throughput / ranks / throughput of the same layout on one rank. Each number of ranks was a "
            "launch of its own; the interval is the widest that both intervals allow."
        )
    for record in records:
        if record.bubble is not None and is_checked(record):
            texts.append(
                f"{record.layout}: of the time that micro-batches take, a rank waits {record.bubble.measured:.0%}; "
                f"{record.bubble.theory:.0%} by the schedule alone."
            )
        if record.device == "cpu" and "devices=" in record.layout:
            texts.append(
                f"{record.layout}: all parts of the model were on the CPU; not verified here: needs CUDA devices."
            )
        if record.parity.status == "different":
            texts.append(f"{record.layout} differs from single. First: {record.parity.first_divergence}.")
            if record.parity.cause:
                texts.append(f"{record.layout}: likely cause: {record.parity.cause}.")
    return [note for note in texts if note]


def _of_the_machine(records: Sequence[Record]) -> list[str]:
    """Whether the bench came to its end, and who else used the machine meanwhile."""
    texts: list[str] = []
    short: list[str] = []
    for record in records:
        requested: object = record.provenance.get("trials_asked")
        done = record.throughput_samples_per_second.trials if record.throughput_samples_per_second is not None else 0
        if is_checked(record) and isinstance(requested, int) and done < requested:
            short.append(f"{label(record)} has {done} of {requested} trials")
    if short:
        texts.append(f"Stopped before the end: {', '.join(short)}.")
    busy = [record for record in records if is_checked(record) and _is_busy(record)]
    if busy:
        most = max(busy, key=_others)
        load: object = most.provenance.get("load")
        before: object = load.get("before") if isinstance(load, dict) else None
        texts.append(
            f"Other programs used {_others(most):.1f} of {most.provenance.get('cores')} cores while {most.layout} ran"
            + (f" (load average before: {before:.1f})" if isinstance(before, int | float) else "")
            + ": rows with more threads or ranks lose more by that; repeat it on a quiet machine."
        )
    return texts


def why_slower(record: Record) -> str:
    """The likely reason why one process, which others are held against, was slower than it should be."""
    threads = record.provenance.get("threads_per_rank")
    name = "single" if record.layout == "single" else "the one rank"
    why = "its work does not fit into a cache into which a rank's part fits"
    if _is_busy(record):
        why = (
            f"other programs used {_others(record):.1f} of {record.provenance.get('cores')} cores; "
            "repeat it when they do not"
        )
    elif record.device == "cpu" and isinstance(threads, int) and threads > 1:
        why = (
            f"its {threads} threads wait for each other or for memory in steps as small as these; "
            "OMP_NUM_THREADS=1 gives every process one"
        )
    return f"{name} was slower than it should be, likely because {why}"


def _others(record: Record) -> float:
    """Cores that other programs took while this layout ran, or during all of the call; 0 where nobody has looked."""
    used = record.resources.others_percent if record.resources is not None else []
    if used:
        return sum(used) / len(used) / 100
    load: object = record.provenance.get("load")
    cores: object = load.get("others_cores") if isinstance(load, dict) else None
    return float(cores) if isinstance(cores, int | float) else 0.0


def _is_busy(record: Record) -> bool:
    cores: object = record.provenance.get("cores")
    return isinstance(cores, int) and _others(record) > _BUSY * cores
