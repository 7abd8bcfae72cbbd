"""Tables of Records as plain text. Each output format escapes the text itself.

No table shows measurements of a layout that failed its equivalence check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from everyrank.record import Breakdown, Interval, Parity, Record
from everyrank.report.notes import slow_baseline_reason
from everyrank.report.rows import is_checked, label

__all__ = [
    "BREAKDOWN_FIELDS",
    "Table",
    "bench_table",
    "breakdown_table",
    "cost_table",
    "markdown",
    "parity_text",
    "scaling_table",
    "tables",
    "verify_table",
]

# The phases of a step are in order. Exposed communication is last, because it is taken out of all of them.
BREAKDOWN_FIELDS = ("data", "forward", "backward", "optimizer", "exposed_communication")

_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Table:
    """A header and rows of equal length. A superscript number at the end of a cell refers to a footnote."""

    header: list[str]
    rows: list[list[str]]
    footnotes: list[str] = field(default_factory=list[str])

    def with_footnote(self, cell: str, text: str) -> str:
        """Return the cell with the number of a footnote. Adds the footnote unless the table has the same text."""
        texts = [note.partition(" ")[2] for note in self.footnotes]
        number = texts.index(text) + 1 if text in texts else len(texts) + 1
        superscript = str(number).translate(_SUPERSCRIPTS)
        if number > len(texts):
            self.footnotes.append(f"{superscript} {text}")
        return f"{cell} {superscript}"


def parity_text(parity: Parity, table: Table) -> str:
    """Return `equal`, `DIFFERENT`, or `refused` with the reason in a footnote of the table."""
    if parity.status == "refused":
        return table.with_footnote("refused", f"refused: {parity.reason}")
    return parity.status if parity.status == "equal" else parity.status.upper()


def verify_table(records: Sequence[Record]) -> Table:
    """Return a table of the equivalence checks: largest difference, tolerance, and the compared updates."""
    table = Table(["layout", "ranks", "parity", "difference", "tolerance", "compared"], [])
    for record in _verified_or_refused(records):
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
    table.footnotes.extend(_not_verified_footnotes(records))
    return table


def _verified_or_refused(records: Sequence[Record]) -> list[Record]:
    """Return the Records that have a row in the tables of verify and bench."""
    return [record for record in records if record.parity.status != "not_verified"]


def _not_verified_footnotes(records: Sequence[Record]) -> list[str]:
    """Return a line for each reason why layouts were not verified. Their rows would be empty, so tables omit them."""
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
    for record in _verified_or_refused(records):
        row = [label(record), str(record.world_size), parity_text(record.parity, table)]
        throughput, step = record.throughput_samples_per_second, record.step_seconds
        if is_checked(record) and throughput is not None and step is not None:
            row += [
                _with_interval(throughput),
                _speedup_cell(record, single, table),
                f"{step.median * 1e3:.2f}",
                f"{record.epoch_seconds:.2f}" if record.epoch_seconds is not None else "",
                *[f"{record.metrics[name]:.4f}" if name in record.metrics else "" for name in metrics],
                f"{record.metrics['eval_loss']:.4f}" if "eval_loss" in record.metrics else "",
            ]
        table.rows.append(row + [""] * (len(header) - len(row)))
    table.footnotes.extend(_not_verified_footnotes(records))
    return table


def breakdown_table(records: Sequence[Record]) -> Table | None:
    """Return a table of the step-time breakdown; None if it was not measured."""
    shown = [record for record in records if is_checked(record) and record.breakdown_seconds]
    if not shown:
        return None
    header = ["layout", *(f"{phase.replace('_', ' ')} ms" for phase in BREAKDOWN_FIELDS), "sum ms", "± ms", "exposed"]
    return Table(header, [[label(record), *_breakdown_cells(record.breakdown_seconds)] for record in shown])


def cost_table(records: Sequence[Record]) -> Table | None:
    """Return a table of memory, communication and start-up time; None if they were not measured."""
    shown = [record for record in records if is_checked(record) and record.peak_memory_bytes is not None]
    if not shown:
        return None
    header = ["layout", "memory MiB", "sent KiB an update", "in how many collectives", "start s", "first step ms"]
    rows: list[list[str]] = []
    for record in shown:
        memory, start, first_step = record.peak_memory_bytes, record.startup_seconds, record.first_step_seconds
        # the run that measures the breakdown counts collectives, too, so an empty list then means none
        was_counted = bool(record.collectives) or record.breakdown_seconds is not None
        sent_bytes = sum(collective.bytes_per_update for collective in record.collectives)
        counts = [collective.text for collective in record.collectives]
        rows.append(
            [
                label(record),
                f"{memory / 2**20:.1f}" if memory is not None else "",
                f"{sent_bytes / 2**10:,.1f}" if sent_bytes else ("0" if was_counted else ""),
                ", ".join(counts) or ("none" if was_counted else ""),
                f"{start:.1f}" if start is not None else "",
                f"{first_step * 1e3:.0f}" if first_step is not None else "",
            ]
        )
    return Table(header, rows)


def _breakdown_cells(breakdown: Breakdown | None) -> list[str]:
    """Return the cells of `breakdown_table` after the layout: milliseconds, their sum and error, and the percentage."""
    if breakdown is None:
        return [""] * (len(BREAKDOWN_FIELDS) + 3)
    seconds = [getattr(breakdown, name) for name in BREAKDOWN_FIELDS]
    total = sum(seconds)
    error = f"{breakdown.error * 1e3:.2f}" if breakdown.error is not None else ""
    exposed_percentage = f"{breakdown.exposed_communication / total:.0%}" if total else ""
    return [*(f"{value * 1e3:.2f}" for value in seconds), f"{total * 1e3:.2f}", error, exposed_percentage]


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
        cells = [_efficiency_cell(kinds.get(kind), baseline, table) for kind in ("strong", "weak")]
        table.rows.append([layout, str(size), *cells])
    return table


def _speedup_cell(record: Record, single: Record | None, table: Table) -> str:
    """Return the speed-up relative to `single`, or "" if it was not measured in the same launch.

    It is the median over paired trials with its interval. Without paired trials it is the ratio of the medians.
    """
    rate = record.throughput_samples_per_second
    single_rate = single.throughput_samples_per_second if single is not None else None
    if single is None or rate is None or single_rate is None or not single_rate.median or record.scaling is not None:
        return ""  # a Record with `scaling` is from a different launch, maybe with a different batch
    paired_ratio = record.ratio_to_single
    ratio = low = rate.median / single_rate.median
    text = f"{ratio:.2f}"
    if paired_ratio is not None and paired_ratio.trials > 1:
        low = paired_ratio.low
        text = f"{paired_ratio.median:.2f} ({paired_ratio.low:.2f} to {paired_ratio.high:.2f})"
    # If all ranks do the same arithmetic as `single`, the speed-up cannot exceed the number of ranks. A larger value
    # means that `single` was slowed down.
    is_different_arithmetic = any(word in record.layout for word in ("single", "dataparallel", "precision=", "compile"))
    if low <= record.world_size or is_different_arithmetic:
        return text
    return table.with_footnote(
        text, f"speed-up above {record.world_size} with {record.world_size} ranks: {slow_baseline_reason(single)}"
    )


def _efficiency_cell(record: Record | None, baseline: Record | None, table: Table) -> str:
    """Return the scaling efficiency with its interval, and a footnote if it is above 1."""
    if record is None or record.scaling is None:
        return ""
    value = record.scaling.efficiency
    text = f"{value.median:.2f} ({value.low:.2f} to {value.high:.2f})"
    if not value.low > 1 or baseline is None:
        return text
    return table.with_footnote(text, f"efficiency above 1: {slow_baseline_reason(baseline)}")


def tables(records: Sequence[Record]) -> list[tuple[str, Table]]:
    """Return (heading, table) pairs for a group of Records. The first is the main table and has no heading."""
    if not any(record.throughput_samples_per_second for record in records):
        return [("", verify_table(records))]
    result = [("", bench_table(records))]
    for heading, table in (
        ("Scaling: efficiency relative to one rank", scaling_table(records)),
        ("Step-time breakdown, on the rank that waits least", breakdown_table(records)),
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
