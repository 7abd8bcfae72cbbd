"""Notes on the results: the answer in a sentence, the method of measurement, and possible problems."""

from __future__ import annotations

from collections.abc import Sequence

from everyrank.record import Record
from everyrank.report.rows import is_checked, label

__all__ = ["answer", "notes", "why_slower"]

_BUSY = 0.1  # fraction of the cores; a note is added if other programs use more


def answer(records: Sequence[Record]) -> str:
    """Return which layout is fastest, and whether every layout is equal to one device."""
    checked = [record for record in records if is_checked(record)]
    ran = [record for record in records if record.parity.status != "not_verified"]
    different_layouts = list(dict.fromkeys(record.layout for record in ran if not is_checked(record)))
    if not ran:
        return "Nothing was verified here."
    subject = {1: "It is", 2: "Both layouts that ran are"}.get(len(ran), f"All {len(ran)} layouts that ran are")
    equal_text = f"{subject} equal to one device."
    if different_layouts:
        differ = "differ" if len(different_layouts) > 1 else "differs"
        equal_text = (
            f"{', '.join(different_layouts)} {differ} from one device, {len(checked)} of {len(ran)} are equal to it."
        )
    timed = [record for record in checked if record.throughput_samples_per_second is not None]
    return f"{_fastest(timed)} {equal_text}" if timed else equal_text


def _fastest(timed: Sequence[Record]) -> str:
    speeds = [(record.throughput_samples_per_second, label(record)) for record in timed]
    speeds_and_names = sorted(
        ((speed, name) for speed, name in speeds if speed), key=lambda pair: pair[0].median, reverse=True
    )
    (first, name), *others = speeds_and_names
    text = f"{name} is fastest here: {first.median:,.0f} samples/s"
    maybe_as_fast = [other for speed, other in others if speed.high >= first.low]
    if maybe_as_fast:
        text += f" ({', '.join(maybe_as_fast)} may be as fast: the intervals overlap)"
    elif others and others[0][0].median > 0:
        text += f", {first.median / others[0][0].median:.2f} times {others[0][1]}, the next"
    return f"{text}."


def notes(records: Sequence[Record]) -> list[str]:
    """Return the notes on the results."""
    texts = _machine_notes(records)
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
            "Efficiency is throughput / ranks / throughput of the same layout on one rank. Each number of ranks "
            "was a separate launch; the interval is the widest that both intervals allow."
        )
    for record in records:
        if record.bubble is not None and is_checked(record):
            texts.append(
                f"{record.layout}: a rank waits {record.bubble.measured:.0%} of the time (pipeline bubble); "
                f"the schedule predicts {record.bubble.theory:.0%}."
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


def _machine_notes(records: Sequence[Record]) -> list[str]:
    """Return notes on an interrupted benchmark, and on other programs that used the machine."""
    texts: list[str] = []
    incomplete: list[str] = []
    for record in records:
        requested: object = record.provenance.get("trials_asked")
        done = record.throughput_samples_per_second.trials if record.throughput_samples_per_second is not None else 0
        if is_checked(record) and isinstance(requested, int) and done < requested:
            incomplete.append(f"{label(record)} has {done} of {requested} trials")
    if incomplete:
        texts.append(f"Stopped before the end: {', '.join(incomplete)}.")
    busy = [record for record in records if is_checked(record) and _is_busy(record)]
    if busy:
        busiest = max(busy, key=_others)
        load: object = busiest.provenance.get("load")
        before: object = load.get("before") if isinstance(load, dict) else None
        texts.append(
            f"Other programs used {_others(busiest):.1f} of {busiest.provenance.get('cores')} cores "
            f"while {busiest.layout} ran"
            + (f" (load average before: {before:.1f})" if isinstance(before, int | float) else "")
            + ": layouts with more threads or ranks lose more speed by that. Rerun on an idle machine."
        )
    return texts


def why_slower(record: Record) -> str:
    """Return the likely reason why the baseline of one process was slower than expected."""
    threads = record.provenance.get("threads_per_rank")
    name = "single" if record.layout == "single" else "the one rank"
    reason = "its data do not fit in the cache, while the part of one rank does"
    if _is_busy(record):
        reason = (
            f"other programs used {_others(record):.1f} of {record.provenance.get('cores')} cores; "
            "rerun on an idle machine"
        )
    elif record.device == "cpu" and isinstance(threads, int) and threads > 1:
        reason = (
            f"its {threads} threads wait for each other or for memory in such short steps; "
            "set OMP_NUM_THREADS=1 to use one thread in every process"
        )
    return f"{name} was slower than it should be, likely because {reason}"


def _others(record: Record) -> float:
    """Return the cores that other programs used while this layout or the whole call ran; 0 if unknown."""
    used = record.resources.others_percent if record.resources is not None else []
    if used:
        return sum(used) / len(used) / 100
    load: object = record.provenance.get("load")
    cores: object = load.get("others_cores") if isinstance(load, dict) else None
    return float(cores) if isinstance(cores, int | float) else 0.0


def _is_busy(record: Record) -> bool:
    cores: object = record.provenance.get("cores")
    return isinstance(cores, int) and _others(record) > _BUSY * cores
