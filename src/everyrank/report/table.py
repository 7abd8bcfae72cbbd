"""Tables of Records as plain text; each kind of output escapes the text itself.

No table shows numbers of a layout that failed its equivalence check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from everyrank.record import Breakdown, Interval, Parity, Record
from everyrank.report.notes import slow_baseline_reason
from everyrank.report.rows import is_checked, label

__all__ = [
    "PARTS",
    "Table",
    "bench_table",
    "cost_table",
    "markdown",
    "parity_text",
    "scaling_table",
    "split_table",
    "tables",
    "verify_table",
]

# the parts of a step in order; exposed communication occurs within the others
PARTS = ("data", "forward", "backward", "optimizer", "exposed_communication")


_SIGNS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Table:
    """A header and rows of equal length. A number in superscript at the end of a cell refers to a footnote."""

    header: list[str]
    rows: list[list[str]]
    footnotes: list[str] = field(default_factory=list[str])

    def noted(self, cell: str, text: str) -> str:
        """Add a footnote, or reuse an equal one, and return the cell with its number."""
        texts = [note.partition(" ")[2] for note in self.footnotes]
        number = texts.index(text) + 1 if text in texts else len(texts) + 1
        superscript = str(number).translate(_SIGNS)
        if number > len(texts):
            self.footnotes.append(f"{superscript} {text}")
        return f"{cell} {superscript}"


def parity_text(parity: Parity, table: Table) -> str:
    """Return `equal`, `DIFFERENT`, or `refused` with the reason in a footnote of the table."""
    if parity.status == "refused":
        return table.noted("refused", f"refused: {parity.reason}")
    return parity.status if parity.status == "equal" else parity.status.upper()


def verify_table(records: Sequence[Record]) -> Table:
    """Return a table of the equivalence checks: largest difference, tolerance, and the compared updates."""
    table = Table(["layout", "ranks", "parity", "difference", "tolerance", "compared"], [])
    for record in _verified(records):
        parity = record.parity
        difference, tolerance = parity.max_relative_difference, parity.tolerance
        table.rows.append(
            [
                record.layout,
                str(record.world_size),
                parity_text(parity, table),
                f"{difference:.1e}" if difference is not None else "",
                f"{tolerance:.0e}" if tolerance is not None else "",
                parity.scope or "",
            ]
        )
    table.footnotes.extend(_not_verified(records))
    return table


def _verified(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.parity.status != "not_verified"]


def _not_verified(records: Sequence[Record]) -> list[str]:
    """Return a line for each reason why layouts were not verified. They have no row, because it would be empty."""
    layouts: dict[str, list[str]] = {}
    for record in records:
        if record.parity.status == "not_verified":
            layouts.setdefault(record.parity.reason or "", []).append(label(record))
    return [f"{', '.join(names)}: not verified here: {reason}" for reason, names in layouts.items()]


def bench_table(records: Sequence[Record]) -> Table:
    """Return a table of speed and metrics, with a row for each layout that was verified or refused."""
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
    table = Table(header, [])
    checked = [record for record in records if is_checked(record)]
    single = next((record for record in checked if record.layout == "single"), None)
    for record in _verified(records):
        row = [label(record), str(record.world_size), parity_text(record.parity, table)]
        throughput, step = record.throughput_samples_per_second, record.step_seconds
        if is_checked(record) and throughput is not None and step is not None:
            row += [
                _with_interval(throughput),
                _times(record, single, table),
                f"{step.median * 1e3:.2f}",
                f"{record.epoch_seconds:.2f}" if record.epoch_seconds is not None else "",
                *[f"{record.metrics[name]:.4f}" if name in record.metrics else "" for name in metrics],
                f"{record.metrics['eval_loss']:.4f}" if "eval_loss" in record.metrics else "",
            ]
        table.rows.append(row + [""] * (len(header) - len(row)))
    table.footnotes.extend(_not_verified(records))
    return table


def split_table(records: Sequence[Record]) -> Table | None:
    """Return a table of the step-time breakdown; None if it was not measured."""
    shown = [record for record in records if is_checked(record) and record.breakdown_seconds]
    if not shown:
        return None
    header = ["layout", *(f"{phase.replace('_', ' ')} ms" for phase in PARTS), "sum ms", "± ms", "exposed"]
    return Table(header, [[label(record), *_parts(record.breakdown_seconds)] for record in shown])


def cost_table(records: Sequence[Record]) -> Table | None:
    """Return a table of memory, communication and start-up time; None if they were not measured."""
    shown = [record for record in records if is_checked(record) and record.peak_memory_bytes is not None]
    if not shown:
        return None
    header = ["layout", "memory MiB", "sent KiB an update", "in how many collectives", "start s", "first step ms"]
    rows: list[list[str]] = []
    for record in shown:
        memory, start, first_step = record.peak_memory_bytes, record.startup_seconds, record.first_step_seconds
        is_known = bool(record.collectives) or record.breakdown_seconds is not None  # measured in the same run
        sent = sum(collective.bytes_per_update for collective in record.collectives)
        counts = [collective.text for collective in record.collectives]
        rows.append(
            [
                label(record),
                f"{memory / 2**20:.1f}" if memory is not None else "",
                f"{sent / 2**10:,.1f}" if sent else ("0" if is_known else ""),
                ", ".join(counts) or ("none" if is_known else ""),
                f"{start:.1f}" if start is not None else "",
                f"{first_step * 1e3:.0f}" if first_step is not None else "",
            ]
        )
    return Table(header, rows)


def _parts(breakdown: Breakdown | None) -> list[str]:
    if breakdown is None:
        return [""] * (len(PARTS) + 3)
    parts = [getattr(breakdown, name) for name in PARTS]
    error = f"{breakdown.error * 1e3:.2f}" if breakdown.error is not None else ""
    share = f"{breakdown.exposed_communication / sum(parts):.0%}" if sum(parts) else ""
    return [*(f"{seconds * 1e3:.2f}" for seconds in parts), f"{sum(parts) * 1e3:.2f}", error, share]


def scaling_table(records: Sequence[Record]) -> Table | None:
    """Return a table of scaling efficiencies relative to one rank; None if scaling was not measured."""
    by_layout: dict[tuple[str, int], dict[str, Record]] = {}
    for record in records:
        if record.scaling is not None and is_checked(record):
            by_layout.setdefault((record.layout, record.world_size), {})[record.scaling.kind] = record
    if not by_layout:
        return None
    table = Table(["layout", "ranks", "strong: same global batch", "weak: same batch a rank"], [])
    for (layout, size), kinds in by_layout.items():
        baseline = next((record for record in records if record.layout == layout and record.scaling is None), None)
        cells = [_efficiency(kinds.get(kind), baseline, table) for kind in ("strong", "weak")]
        table.rows.append([layout, str(size), *cells])
    return table


def _times(record: Record, single: Record | None, table: Table) -> str:
    """Return the speed-up relative to single: of paired trials, or of the medians without them."""
    rate = record.throughput_samples_per_second
    single_rate = single.throughput_samples_per_second if single is not None else None
    if single is None or rate is None or single_rate is None or not single_rate.median or record.scaling is not None:
        return ""  # a ratio to a different launch, and maybe a different batch, would be meaningless
    paired = record.ratio_to_single
    ratio = low = rate.median / single_rate.median
    text = f"{ratio:.2f}"
    if paired is not None and paired.trials > 1:
        low, text = paired.low, f"{paired.median:.2f} ({paired.low:.2f} to {paired.high:.2f})"
    # if all ranks do the same arithmetic as single, the speed-up is at most the number of ranks
    is_different_arithmetic = any(word in record.layout for word in ("single", "dataparallel", "precision=", "compile"))
    if low <= record.world_size or is_different_arithmetic:
        return text
    return table.noted(
        text, f"speed-up above {record.world_size} with {record.world_size} ranks: {slow_baseline_reason(single)}"
    )


def _efficiency(record: Record | None, baseline: Record | None, table: Table) -> str:
    if record is None or record.scaling is None:
        return ""
    value = record.scaling.efficiency
    text = f"{value.median:.2f} ({value.low:.2f} to {value.high:.2f})"
    if not value.low > 1 or baseline is None:
        return text
    return table.noted(text, f"efficiency above 1: {slow_baseline_reason(baseline)}")


def tables(records: Sequence[Record]) -> list[tuple[str, Table]]:
    """Return (heading, table) for a group of Records. The first is the main table, without a heading."""
    if not any(record.throughput_samples_per_second for record in records):
        return [("", verify_table(records))]
    result = [("", bench_table(records))]
    for heading, table in (
        ("Scaling: efficiency relative to one rank", scaling_table(records)),
        ("Step-time breakdown, on the rank that waits least", split_table(records)),
        (
            "Memory and communication: peak tensor memory of the largest rank, bytes that a rank passes to collectives",
            cost_table(records),
        ),
    ):
        if table is not None:
            result.append((heading, table))
    return result


def _with_interval(value: Interval) -> str:
    if value.trials == 1:  # one measurement has no interval
        return f"{value.median:,.0f}"
    return f"{value.median:,.0f} ({value.low:,.0f} to {value.high:,.0f})"


def markdown(heading: str, table: Table, notes: Sequence[str] = ()) -> str:
    """Return heading, table, footnotes and notes as Markdown, with Markdown and HTML characters escaped."""
    lines = [f"### {_escape(heading)}", ""]
    lines += [_row(table.header), _row(["---"] * len(table.header), escape=False), *map(_row, table.rows), ""]
    lines += [line for note in (*table.footnotes, *notes) for line in (_escape(note), "")]
    return "\n".join(lines)


def _row(cells: Sequence[str], escape: bool = True) -> str:
    return "| " + " | ".join(_escape(cell) if escape else cell for cell in cells) + " |"


def _escape(text: str) -> str:
    for letter in "\\`*_[]|#":
        text = text.replace(letter, "\\" + letter)
    text = " ".join(text.split())  # a line break would end the row
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
