"""Charts for the page, as inline SVG in the text colour of the page (light or dark).

Each chart is narrow enough for a phone; a wide page shows two next to each other. A layout has the same colour in all
charts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from everyrank.record import Interval, Record
from everyrank.report.beside import Sets, matching
from everyrank.report.drawing import (
    COLOURS,
    TEXT_COLOUR,
    bars,
    colours_of,
    draw,
    error_bars,
    legend_above,
    legend_height,
    short,
)
from everyrank.report.rows import is_checked, label
from everyrank.report.table import BREAKDOWN_FIELDS

__all__ = ["CHARTS", "beside", "curves", "memory", "resources", "scaling", "split", "throughput", "traffic"]

_BREAKDOWN_COLOURS = dict(zip(BREAKDOWN_FIELDS, ("#7a7a7a", "#56b4e9", "#0072b2", "#009e73", "#d55e00"), strict=True))


def throughput(records: Sequence[Record]) -> str:
    """Draw samples per second with 95% intervals."""
    shown = [record for record in records if is_checked(record) and record.throughput_samples_per_second]
    colours = colours_of(records)

    def paint(axes: Any, row: int, record: Record) -> None:
        value = record.throughput_samples_per_second
        assert value is not None
        axes.barh(row, value.median, color=colours[record.layout], alpha=0.85)
        if value.trials > 1:
            axes.errorbar(value.median, row, xerr=error_bars(value), color=TEXT_COLOUR, capsize=3, linewidth=1)

    return bars(shown, "samples/s, median and 95% interval", paint)


def split(records: Sequence[Record]) -> str:
    """Draw the parts of a step as stacked bars, and the timed step as a line."""
    shown = [record for record in records if is_checked(record) and record.breakdown_seconds]

    def paint(axes: Any, row: int, record: Record) -> None:
        left = 0.0
        for phase, colour in _BREAKDOWN_COLOURS.items():
            value = getattr(record.breakdown_seconds, phase) * 1e3
            axes.barh(row, value, left=left, color=colour, label=phase.replace("_", " "))
            left += value
        if record.step_seconds is not None:
            step = record.step_seconds.median * 1e3
            axes.plot([step, step], [row - 0.4, row + 0.4], color=TEXT_COLOUR, linewidth=1.5)

    return bars(
        shown,
        "ms of a step; the line is the timed step",
        paint,
        [phase.replace("_", " ") for phase in BREAKDOWN_FIELDS],
    )


def memory(records: Sequence[Record]) -> str:
    """Draw the peak memory of tensors on the rank with the most."""
    shown = [record for record in records if is_checked(record) and record.peak_memory_bytes is not None]
    colours = colours_of(records)

    def paint(axes: Any, row: int, record: Record) -> None:
        axes.barh(row, (record.peak_memory_bytes or 0) / 2**20, color=colours[record.layout], alpha=0.85)

    return bars(shown, "peak MiB of tensors, on the rank with the most", paint)


def traffic(records: Sequence[Record]) -> str:
    """Draw the bytes that a rank passes to each kind of collective in an update."""
    shown = [record for record in records if is_checked(record) and record.collectives]
    operations = list(dict.fromkeys(collective.op for record in shown for collective in record.collectives))

    def paint(axes: Any, row: int, record: Record) -> None:
        left = 0.0
        for index, operation in enumerate(operations):
            value = sum(c.bytes_per_update for c in record.collectives if c.op == operation) / 2**10
            colour = COLOURS[index % len(COLOURS)]
            axes.barh(row, value, left=left, color=colour, label=operation.replace("_", "-"))
            left += value

    return bars(shown, "KiB that a rank passes to collectives in an update", paint, operations)


def curves(records: Sequence[Record]) -> str:
    """Draw the losses of all layouts and, if `single` is among them, their relative differences from it."""
    shown = [record for record in records if len(record.loss) > 1]
    if not shown:
        return ""
    colours = colours_of(records)
    single = next((record for record in shown if record.layout == "single"), None)
    has_differences = single is not None and len(shown) > 1

    def paint(figure: Any) -> None:
        if has_differences:
            upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        else:
            upper, lower = figure.subplots(), None
        for index, record in enumerate(shown):
            # each line is thinner than the one below it, so that equal curves stay visible
            width = 1.2 + min(1.6, 8.0 / len(shown)) * (len(shown) - 1 - index)
            colour = colours[record.layout]
            upper.plot(record.loss, linewidth=width, color=colour, label=short(label(record)))
            if lower is not None and single is not None and record is not single and _same_batch(record, single):
                pairs = zip(single.loss, record.loss, strict=False)
                gaps = [abs(a - b) / abs(a) if a and a != b else math.nan for a, b in pairs]  # a log axis has no zero
                lower.plot(gaps, marker=".", markersize=3, linewidth=width / 2, color=colour)
        upper.set_ylabel("loss")
        upper.legend(frameon=False)
        (lower or upper).set_xlabel("update")
        (lower or upper).locator_params(axis="x", integer=True)
        if lower is not None:
            lower.set_yscale("log")
            lower.set_ylabel("relative difference\nfrom single")

    return draw(4.4 if has_differences else 3.2, paint)


def _same_batch(record: Record, other: Record) -> bool:
    return record.provenance.get("global_batch") == other.provenance.get("global_batch")


def scaling(records: Sequence[Record]) -> str:
    """Draw efficiency over the number of ranks: solid lines for strong scaling, dashed lines for weak scaling."""
    shown = [record for record in records if is_checked(record) and record.scaling is not None]
    if not shown:
        return ""
    layouts = list(dict.fromkeys(record.layout for record in shown))
    colours = colours_of(records)

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        for layout in layouts:
            for kind, line_style in (("strong", "o-"), ("weak", "o--")):
                points = {1: Interval(1.0, 1.0, 1.0)}
                for record in shown:
                    if record.layout == layout and record.scaling is not None and record.scaling.kind == kind:
                        points[record.world_size] = record.scaling.efficiency
                if len(points) == 1:
                    continue
                sizes, values = zip(*sorted(points.items()), strict=True)
                medians, name = [value.median for value in values], short(f"{layout}, {kind}")
                axes.errorbar(
                    sizes, medians, error_bars(*values), fmt=line_style, color=colours[layout], capsize=3, label=name
                )
        axes.set_xticks(sorted({1, *(record.world_size for record in shown)}))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("ranks")
        axes.set_ylabel("efficiency relative to one rank")
        axes.legend(frameon=False, fontsize=9)

    return draw(3.2, paint)


def resources(records: Sequence[Record]) -> str:
    """Draw CPU, memory and GPU use of the ranks over the time of the call, for each layout."""
    shown = [
        record
        for record in records
        if is_checked(record)
        and record.resources is not None
        and len(record.resources.seconds) > 0
        # a Record from an untrusted file may have lists of different lengths
        and len(record.resources.cpu_percent) == len(record.resources.seconds) == len(record.resources.memory_bytes)
    ]
    if not shown:
        return ""
    names, colours = [short(label(record)) for record in shown], colours_of(records)
    rows: list[tuple[str, Callable[[Any], Sequence[float]], float]] = [
        ("CPU, % of a core", lambda used: used.cpu_percent, 1.0),
        ("memory, GiB", lambda used: used.memory_bytes, 2.0**30),
    ]
    if any(record.resources is not None and record.resources.gpu_percent for record in shown):
        rows.append(("GPU, %", lambda used: used.gpu_percent, 1.0))
        rows.append(("GPU memory, GiB", lambda used: used.gpu_memory_bytes, 2.0**30))

    def paint(figure: Any) -> None:
        all_axes = figure.subplots(len(rows), 1, sharex=True)
        for axes, (heading, values_of, unit) in zip(all_axes, rows, strict=True):
            for record, name in zip(shown, names, strict=True):
                used = record.resources
                assert used is not None
                values = [value / unit for value in values_of(used)]
                if len(values) == len(used.seconds):
                    # clip_on would cut dots on the upper edge in half
                    axes.plot(
                        used.seconds, values, ".", markersize=6, color=colours[record.layout], label=name, clip_on=False
                    )
            axes.set_ylim(bottom=0)
            axes.set_ylabel(heading)
        all_axes[-1].set_xlabel("seconds since the start; layouts take turns")
        legend_above(all_axes[0], names)

    return draw(0.6 + 1.4 * len(rows) + legend_height(names), paint)


def beside(sets: Sets) -> str:
    """Draw the throughput of each layout in each set, one bar per set."""
    pairs = matching(sets)
    if not pairs:
        return ""
    height = 0.8 / len(sets)
    names = [short(name) for name in sets]

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        for row_index, (_, row) in enumerate(pairs):
            for index, (name, record) in enumerate(zip(sets, row, strict=True)):
                value = record.throughput_samples_per_second if record is not None else None
                if value is not None:
                    position = row_index + (index - (len(sets) - 1) / 2) * height
                    colour = COLOURS[index % len(COLOURS)]
                    axes.barh(position, value.median, height * 0.9, color=colour, label=short(name))
                    axes.errorbar(
                        value.median, position, xerr=error_bars(value), color=TEXT_COLOUR, capsize=2, linewidth=1
                    )
        axes.set_yticks(range(len(pairs)), [short(name) for name, _ in pairs])
        axes.invert_yaxis()
        axes.set_xlabel("samples/s, median and 95% interval")
        legend_above(axes, names)

    return draw(0.9 + 0.5 * len(pairs) + legend_height(names), paint)


CHARTS: tuple[tuple[str, str, Callable[[Sequence[Record]], str]], ...] = (
    ("throughput", "Throughput", throughput),
    ("split", "Step-time breakdown", split),
    ("memory", "Memory", memory),
    ("traffic", "Communication", traffic),
    ("scaling", "Scaling", scaling),
    ("losses", "Losses of all layouts", curves),
    ("resources", "Resource use", resources),
)
"""(name, heading, function) in the order of the page. A function returns "" if its values were not measured."""
