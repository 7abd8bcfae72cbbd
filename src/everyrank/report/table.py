"""What the columns are and what stands in them. Plain text: each kind of output does its own escaping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from everyrank.record import Interval, Parity, Record

__all__ = ["Table", "bench_table", "groups", "notes", "parity_text", "title", "verify_table"]


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
        key = (title(record), str(source.get("command")), str(source.get("processor")))
        found.setdefault(key, []).append(record)
    return list(found.values())


def parity_text(parity: Parity) -> str:
    """`equal`, `DIFFERENT`, or `not verified here: why`."""
    if parity.status == "not_verified":
        return f"not verified here: {parity.reason}"
    return parity.status if parity.status == "equal" else parity.status.upper()


def title(record: Record) -> str:
    """What stands over a table of Records of one workload."""
    cores = record.provenance.get("cores")
    parts = [record.workload, f"global batch {record.provenance.get('global_batch', '?')}", record.device]
    parts += [f"{cores} cores"] if cores and record.device == "cpu" else []
    parts += [f"torch {record.provenance.get('torch', '?')}"]
    return " · ".join(parts)


def verify_table(records: Sequence[Record]) -> Table:
    """Layout, parity, the largest difference in the loss and what it was held against."""
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
            ]
        )
    return Table(["layout", "ranks", "parity", "largest difference", "tolerance"], rows)


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
    checked = [record for record in records if record.parity.status == "equal"]
    single = next((r.throughput_samples_per_second for r in checked if r.layout == "single"), None)
    rows: list[list[str]] = []
    for record in records:
        row = [record.layout, str(record.world_size), parity_text(record.parity)]
        throughput, step = record.throughput_samples_per_second, record.step_seconds
        if record.parity.status == "equal" and throughput is not None and step is not None:
            row += [
                _spread(throughput),
                f"{throughput.median / single.median:.2f}" if single else "",
                f"{step.median * 1e3:.2f}",
                f"{record.epoch_seconds:.2f}" if record.epoch_seconds is not None else "",
                *[f"{record.metrics[name]:.4f}" if name in record.metrics else "" for name in metrics],
                f"{record.metrics['eval_loss']:.4f}" if "eval_loss" in record.metrics else "",
            ]
        rows.append(row + [""] * (len(header) - len(row)))
    return Table(header, rows)


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
    for record in records:
        if record.parity.status == "different":
            found.append(f"{record.layout} differs from single. First: {record.parity.first_divergence}.")
            if record.parity.cause:
                found.append(f"{record.layout}: likely cause: {record.parity.cause}.")
    return [note for note in found if note]
