"""Text of a report: a summary in one or two sentences, the measurement method, and warnings."""

from __future__ import annotations

from collections.abc import Sequence

from everyrank.record import Record
from everyrank.report.rows import is_checked, label

__all__ = ["answer", "notes", "slow_baseline_reason"]

_BUSY_FRACTION = 0.1  # of the cores: a note is added if other programs use more


def answer(records: Sequence[Record]) -> str:
    """Return which layout is fastest, and whether every layout that was verified equals one device."""
    equal = [record for record in records if is_checked(record)]
    different = [record for record in records if record.parity.status == "different"]
    verified_layouts = list(dict.fromkeys(record.layout for record in (*equal, *different)))
    different_layouts = list(dict.fromkeys(record.layout for record in different))
    timed = [record for record in equal if record.throughput_samples_per_second is not None]
    if not verified_layouts:
        return "No layout was verified here."
    if different_layouts:
        differ = "differ" if len(different_layouts) > 1 else "differs"
        num_equal, num_verified = len(verified_layouts) - len(different_layouts), len(verified_layouts)
        equal_text = (
            f"{', '.join(different_layouts)} {differ} from one device; {num_equal} of {num_verified} layouts "
            f"{'is' if num_equal == 1 else 'are'} equal to it."
        )
    elif len(verified_layouts) == 1:
        equal_text = f"{'It' if timed else verified_layouts[0]} is equal to one device."
    else:
        count = "Both" if len(verified_layouts) == 2 else f"All {len(verified_layouts)}"
        equal_text = f"{count} layouts that ran are equal to one device."
    return f"{_fastest(timed)} {equal_text}" if timed else equal_text


def _fastest(timed: Sequence[Record]) -> str:
    speeds = [(speed, label(record)) for record in timed if (speed := record.throughput_samples_per_second)]
    (fastest, name), *slower = sorted(speeds, key=lambda pair: pair[0].median, reverse=True)
    text = f"{name} is fastest here: {fastest.median:,.0f} samples/s"
    maybe_as_fast = [slower_name for speed, slower_name in slower if speed.high >= fastest.low]
    if maybe_as_fast:
        text += f" ({', '.join(maybe_as_fast)} may be as fast: the intervals overlap)"
    elif slower and slower[0][0].median > 0:
        text += f", {fastest.median / slower[0][0].median:.2f} times as fast as {slower[0][1]}, the second"
    return f"{text}."


def notes(records: Sequence[Record]) -> list[str]:
    """Return the measurement method, and warnings about the results."""
    texts = _machine_notes(records)
    timed = [record for record in records if record.throughput_samples_per_second is not None]
    if timed:
        texts.append(str(timed[0].provenance.get("method", "")))
        cores = timed[0].provenance.get("cores")
        if timed[0].device == "cpu" and any(record.world_size > 1 for record in timed):
            texts.append(f"All ranks share the {cores} cores of one machine: do not read the speeds as a ranking.")
    if any(record.scaling is not None and is_checked(record) for record in records):
        texts.append(
            "Efficiency is the throughput divided by that of the same number of separate ranks. Each number of ranks "
            "was a separate launch; the interval combines the ends of both intervals."
        )
    for record in records:
        if record.bubble is not None and is_checked(record):
            texts.append(
                f"{record.layout}: a rank waits {record.bubble.measured:.0%} of the time (pipeline bubble); "
                f"the schedule predicts {record.bubble.theory:.0%}."
            )
        if record.device == "cpu" and "devices=" in record.layout:
            texts.append(
                f"{record.layout}: the whole model was on the CPU. Not verified here: placement on CUDA devices."
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
        speed = record.throughput_samples_per_second
        num_trials = speed.trials if speed is not None else 0
        if is_checked(record) and isinstance(requested, int) and num_trials < requested:
            incomplete.append(f"{label(record)} has {num_trials} of {requested} trials")
    if incomplete:
        texts.append(f"The benchmark was interrupted: {', '.join(incomplete)}.")
    busy = [record for record in records if is_checked(record) and _is_busy(record)]
    if busy:
        busiest = max(busy, key=_other_cores)
        load: object = busiest.provenance.get("load")
        before: object = load.get("before") if isinstance(load, dict) else None
        texts.append(
            f"Other programs used {_other_cores(busiest):.1f} of {busiest.provenance.get('cores')} cores "
            f"while {busiest.layout} ran"
            + (f" (load average before: {before:.1f})" if isinstance(before, int | float) else "")
            + ": this slows layouts with more threads or ranks most. Rerun on an idle machine."
        )
    return texts


def slow_baseline_reason(record: Record) -> str:
    """Return the likely reason why the run on one process was slower than expected."""
    threads = record.provenance.get("threads_per_rank")
    name = "single" if record.layout == "single" else "the run on one rank"
    reason = "its batch does not fit in the CPU cache, and the part of one rank does"
    if _is_busy(record):
        reason = (
            f"other programs used {_other_cores(record):.1f} of {record.provenance.get('cores')} cores; "
            "rerun on an idle machine"
        )
    elif record.device == "cpu" and isinstance(threads, int) and threads > 1:
        reason = (
            f"in such short steps, its {threads} threads wait for each other and for memory; "
            "set OMP_NUM_THREADS=1 to use one thread in every process"
        )
    return f"{name} was slower than expected, likely because {reason}"


def _other_cores(record: Record) -> float:
    """Return the average number of cores that other programs used during this layout, or else during the whole call.

    0 if unknown.
    """
    percents = record.resources.others_percent if record.resources is not None else []
    if percents:
        return sum(percents) / len(percents) / 100
    load: object = record.provenance.get("load")
    cores: object = load.get("others_cores") if isinstance(load, dict) else None
    return float(cores) if isinstance(cores, int | float) else 0.0


def _is_busy(record: Record) -> bool:
    cores: object = record.provenance.get("cores")
    return isinstance(cores, int) and _other_cores(record) > _BUSY_FRACTION * cores
