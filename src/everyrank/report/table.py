"""What the columns are and what stands in them. Plain text: each kind of output does its own escaping.

A row whose parity did not pass has no number in any table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from everyrank.record import Breakdown, Interval, Parity, Record

__all__ = [
    "PARTS",
    "Table",
    "bench_table",
    "cost_table",
    "groups",
    "is_checked",
    "label",
    "notes",
    "parity_text",
    "scaling_table",
    "split_table",
    "tables",
    "title",
    "verify_table",
]

# the parts of a step, in the order in which they happen; the last one happens inside the others
PARTS = ("data", "forward", "backward", "optimizer", "exposed_communication")


@dataclass(frozen=True)
class Table:
    """Header and rows of equal length, all text."""

    header: list[str]
    rows: list[list[str]]


def groups(records: Sequence[Record]) -> list[list[Record]]:
    """Records of one call on one machine belong into one table; ratios across machines would mean nothing."""
    found: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        source = record.provenance
        batch = None if record.scaling is not None else source.get("global_batch")
        place = str(source.get("command")), str(source.get("processor")), str(source.get("torch"))
        key = (record.workload, record.device, *place, str(batch))
        if record.scaling is not None:  # weak scaling changes the batch: it belongs to the one it is measured against
            key = next((other for other in found if other[:-1] == key[:-1]), key)
        found.setdefault(key, []).append(record)
    return list(found.values())


def is_checked(record: Record) -> bool:
    """Whether its numbers may be shown."""
    return record.parity.status == "equal"


def parity_text(parity: Parity) -> str:
    """`equal`, `DIFFERENT`, `refused: why` or `not verified here: why`."""
    if parity.status == "not_verified":
        return f"not verified here: {parity.reason}"
    if parity.status == "refused":
        return f"refused: {parity.reason}"
    return parity.status if parity.status == "equal" else parity.status.upper()


def title(record: Record) -> str:
    """What stands over a table of Records of one workload."""
    cores = record.provenance.get("cores")
    parts = [record.workload, f"global batch {record.provenance.get('global_batch', '?')}", record.device]
    parts += [f"{cores} cores"] if cores and record.device == "cpu" else []
    parts += [f"torch {record.provenance.get('torch', '?')}"]
    return " · ".join(parts)


def label(record: Record) -> str:
    """A layout with what tells its Records apart where it was measured on several numbers of ranks."""
    if record.scaling is None:
        return record.layout
    return f"{record.layout} · {record.world_size} ranks, {record.scaling.kind}"


def verify_table(records: Sequence[Record]) -> Table:
    """Layout, parity, the difference that decided, what it was held against, and over which updates."""
    rows: list[list[str]] = []
    for record in records:
        parity = record.parity
        difference, tolerance = parity.max_relative_difference, parity.tolerance
        rows.append(
            [
                record.layout,
                str(record.world_size),
                parity_text(parity),
                f"{difference:.1e}" if difference is not None else "",
                f"{tolerance:.0e}" if tolerance is not None else "",
                parity.scope or "",
            ]
        )
    return Table(["layout", "ranks", "parity", "difference", "tolerance", "compared"], rows)


def bench_table(records: Sequence[Record]) -> Table:
    """A row for each layout; one whose parity did not pass has no number."""
    metrics = list(dict.fromkeys(name for record in records for name in record.metrics if name != "eval_loss"))
    header = [
        "layout",
        "ranks",
        "parity",
        "samples/s (95%)",
        "x single",
        "step ms",
        "epoch s",
        *metrics,
        "eval loss",
    ]
    checked = [record for record in records if is_checked(record)]
    single = next((r.throughput_samples_per_second for r in checked if r.layout == "single"), None)
    rows: list[list[str]] = []
    for record in records:
        row = [label(record), str(record.world_size), parity_text(record.parity)]
        throughput, step = record.throughput_samples_per_second, record.step_seconds
        if is_checked(record) and throughput is not None and step is not None:
            row += [
                _spread(throughput),
                _times(record, throughput, single),
                f"{step.median * 1e3:.2f}",
                f"{record.epoch_seconds:.2f}" if record.epoch_seconds is not None else "",
                *[f"{record.metrics[name]:.4f}" if name in record.metrics else "" for name in metrics],
                f"{record.metrics['eval_loss']:.4f}" if "eval_loss" in record.metrics else "",
            ]
        rows.append(row + [""] * (len(header) - len(row)))
    return Table(header, rows)


def split_table(records: Sequence[Record]) -> Table | None:
    """Where a step goes; None where no step was taken apart."""
    shown = [record for record in records if is_checked(record) and record.breakdown_seconds]
    if not shown:
        return None
    header = ["layout", *(f"{part.replace('_', ' ')} ms" for part in PARTS), "sum ms", "± ms", "exposed"]
    return Table(header, [[label(record), *_parts(record.breakdown_seconds)] for record in shown])


def cost_table(records: Sequence[Record]) -> Table | None:
    """What a layout holds, what it sends and how it starts; None where nothing of that was measured."""
    shown = [record for record in records if is_checked(record) and record.peak_memory_bytes is not None]
    if not shown:
        return None
    header = ["layout", "memory MiB", "sent KiB an update", "in how many collectives", "start s", "first step ms"]
    rows: list[list[str]] = []
    for record in shown:
        memory, start, first = record.peak_memory_bytes, record.startup_seconds, record.first_step_seconds
        is_known = bool(record.collectives) or record.breakdown_seconds is not None  # measured in the same run
        sent = sum(collective.bytes for collective in record.collectives)
        counts = [f"{collective.count} {collective.op.replace('_', '-')}" for collective in record.collectives]
        rows.append(
            [
                label(record),
                f"{memory / 2**20:.1f}" if memory is not None else "",
                f"{sent / 2**10:,.1f}" if sent else ("0" if is_known else ""),
                ", ".join(counts) or ("none" if is_known else ""),
                f"{start:.1f}" if start is not None else "",
                f"{first * 1e3:.0f}" if first is not None else "",
            ]
        )
    return Table(header, rows)


def _parts(breakdown: Breakdown | None) -> list[str]:
    if breakdown is None:
        return [""] * (len(PARTS) + 3)
    parts = [getattr(breakdown, part) for part in PARTS]
    error = f"{breakdown.error * 1e3:.2f}" if breakdown.error is not None else ""
    share = f"{breakdown.exposed_communication / sum(parts):.0%}" if sum(parts) else ""
    return [*(f"{part * 1e3:.2f}" for part in parts), f"{sum(parts) * 1e3:.2f}", error, share]


def scaling_table(records: Sequence[Record]) -> Table | None:
    """Efficiency beside one rank: a row for each layout and number of ranks; None where nothing was scaled."""
    found: dict[tuple[str, int], dict[str, Interval]] = {}
    for record in records:
        if record.scaling is not None and is_checked(record):
            found.setdefault((record.layout, record.world_size), {})[record.scaling.kind] = record.scaling.efficiency
    if not found:
        return None
    rows = [
        [layout, str(size), *(_efficiency(kinds.get(kind)) for kind in ("strong", "weak"))]
        for (layout, size), kinds in found.items()
    ]
    return Table(["layout", "ranks", "strong: same global batch", "weak: same batch a rank"], rows)


def _times(record: Record, own: Interval, single: Interval | None) -> str:
    """How many times as fast as single: over paired trials, or of the medians where there are none."""
    if single is None or not single.median or record.scaling is not None:
        return ""  # beside another launch, and perhaps another batch, it would mean nothing
    paired = record.ratio_to_single
    if paired is None or paired.trials == 1:
        return f"{own.median / single.median:.2f}"
    return f"{paired.median:.2f} ({paired.low:.2f} to {paired.high:.2f})"


def _efficiency(value: Interval | None) -> str:
    return f"{value.median:.2f} ({value.low:.2f} to {value.high:.2f})" if value else ""


def tables(records: Sequence[Record]) -> list[tuple[str, Table]]:
    """(heading, table) of a group of Records: first the one to read, under no heading of its own."""
    if not any(record.throughput_samples_per_second for record in records):
        return [("", verify_table(records))]
    found = [("", bench_table(records))]
    for heading, table in (
        ("Scaling: efficiency beside one rank", scaling_table(records)),
        ("Where a step goes, on the rank that waits least", split_table(records)),
        ("What it holds and sends: tensors of the fullest rank, what a rank hands to collectives", cost_table(records)),
    ):
        if table is not None:
            found.append((heading, table))
    return found


def _spread(value: Interval) -> str:
    return f"{value.median:,.0f} ({value.low:,.0f} to {value.high:,.0f})"


def notes(records: Sequence[Record]) -> list[str]:
    """What a reader must know to read the numbers."""
    found: list[str] = []
    timed = [record for record in records if record.throughput_samples_per_second is not None]
    if timed:
        found.append(str(timed[0].provenance.get("method", "")))
        cores = timed[0].provenance.get("cores")
        if timed[0].device == "cpu" and any(record.world_size > 1 for record in timed):
            found.append(
                f"All ranks share the {cores} cores of one machine: this checks layouts, it does not rank them."
            )
    if any(record.scaling is not None and is_checked(record) for record in records):
        found.append(
            "Efficiency is throughput / ranks / throughput of the same layout on one rank. Each number of ranks was a "
            "launch of its own; the interval is the widest that both intervals allow."
        )
    for record in records:
        if record.bubble is not None and is_checked(record):
            found.append(
                f"{record.layout}: of the time that micro-batches take, a rank waits {record.bubble.measured:.0%}; "
                f"{record.bubble.theory:.0%} by the schedule alone."
            )
        if record.device == "cpu" and "devices=" in record.layout:
            found.append(
                f"{record.layout}: all parts of the model were on the CPU; not verified here: needs CUDA devices."
            )
        if record.parity.status == "different":
            found.append(f"{record.layout} differs from single. First: {record.parity.first_divergence}.")
            if record.parity.cause:
                found.append(f"{record.layout}: likely cause: {record.parity.cause}.")
    return [note for note in found if note]
