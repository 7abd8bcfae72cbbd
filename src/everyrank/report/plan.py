"""The results of `everyrank plan` on the terminal. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from everyrank.errors import printable
from everyrank.plan.candidates import TIE
from everyrank.plan.machine import Machine
from everyrank.plan.memory import CATEGORIES
from everyrank.report.table import Table
from everyrank.report.terminal import print_table

__all__ = ["plan_notes", "plan_tables", "plan_title", "print_machine", "print_plan", "print_validation"]

_GIB = 2**30
_Answer = Mapping[str, Any]


def _gib(size: float) -> str:
    return f"{size / _GIB:.1f}" if size < 1000 * _GIB else f"{size / _GIB:,.0f}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{_digits(value * 1e3)} ms"


def _share(value: float) -> str:
    return f"{100 * value:.1f}%"


def _count(value: float) -> str:
    for size, name in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{_digits(value / size)}{name}"
    return _digits(value)


def _digits(value: float) -> str:
    """Return a number with three digits, and no exponent for a large one."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def plan_title(answer: _Answer) -> str:
    """Return the model, the cluster and the batch in a line."""
    cluster, model, batch = answer["cluster"], answer["model"], answer["batch"]
    parameters = f"{_count(model['parameters'])} parameters; " if "parameters" in model else ""
    tokens = f", {_count(batch['tokens'])} tokens" if "tokens" in batch else ""
    across = f", {cluster['across']} between nodes" if cluster["gpus"] > cluster["per_node"] else ""
    return (
        f"{model['name']}: {parameters}{cluster['gpus']} x {cluster['gpu']} with {_gib(cluster['memory_bytes'])} GiB, "
        f"{cluster['per_node']} in a node{across}; an update of {batch['samples']} samples{tokens}"
    )


def plan_tables(answer: _Answer) -> list[tuple[str, Table]]:
    """Return (heading, table) of the memory by layout."""
    if "shortlist" in answer:
        return [("Memory of the fullest rank, GiB", _memory_table(answer["layouts"]))]
    return [("Memory of the fullest rank", _traced_table(answer["layouts"]))]


def plan_notes(answer: _Answer) -> list[str]:
    """Return the lines below the table.

    They are the smallest change that makes each layout fit, the fastest layouts with their commands, and a forecast of
    the whole training.
    """
    lines = list(_changes(answer["layouts"]))
    if "shortlist" in answer:
        lines += _shortlist(answer)
        return lines + list(_run(answer["whole_run"]) if "whole_run" in answer else ())
    for row in answer["layouts"]:
        if "step_seconds" in row:
            parts = ", ".join(f"{name} {_seconds(value)}" for name, value in row["parts"].items() if value)
            interval = ""
            if "low_seconds" in row:
                interval = f"; 90% interval {_seconds(row['low_seconds'])} to {_seconds(row['high_seconds'])}"
            lines.append(
                f"{row['layout']}: {_seconds(row['step_seconds'])} an update ({parts}{interval}), "
                "without the data loader"
            )
    lines.append("Commands of layouts that fit:" if answer["commands"] else "No layout is certain to fit.")
    return [
        *lines,
        *(f"  {command}" for command in answer["commands"]),
        "The memory was traced on CPU. `at most` includes an estimate of the temporary memory of CUDA kernels. Use "
        "everyrank bench to choose between layouts that fit. Not verified on several GPUs.",
    ]


def print_plan(answer: _Answer) -> None:
    """Print the title, the table of memory and the lines below it."""
    _say(plan_title(answer))
    for heading, table in plan_tables(answer):
        print_table(heading, table)
    for line in plan_notes(answer):
        _say(line)


def _traced_table(rows: Sequence[_Answer]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row.get("categories", ())))
    table = Table(["layout", "", *names, "building", "allocated", "reserved", "device", "at most"], [])
    for row in rows:
        sums = [f"{name}_bytes" for name in ("building", "allocated", "reserved", "device", "most")]
        sizes = [row.get("categories", {}).get(name, 0.0) for name in names] + [row.get(name, 0.0) for name in sums]
        table.rows.append([row["layout"], row["verdict"], *[_size(size) for size in sizes]])
        table.footnotes.append(f"{row['layout']}: {row.get('note') or row['reason']}")
    table.footnotes.append("building: the peak while the model is built and in the first update")
    return table


def _size(size: float) -> str:
    return f"{size / _GIB:.1f} GiB" if size >= _GIB else f"{size / 2**20:.1f} MiB" if size else "0"


def _changes(rows: Sequence[_Answer]) -> Iterator[str]:
    """Yield the smallest change for each layout that does not fit."""
    for row in rows:
        if "change" in row:
            change = row["change"]
            target = f": {change['layout']}" if "layout" in change else ""
            yield (f"{row['layout']} {row['verdict']}. Smallest change: {change['what']}{target}")
            if "command" in change:
                yield (f"  {change['command']}")


def _memory_table(rows: Sequence[_Answer]) -> Table:
    names = CATEGORIES
    table = Table(["layout", "", *names, "allocated", "reserved", "device", "at most"], [])
    for row in rows:
        if "categories" not in row:
            table.rows.append([row["layout"], row["verdict"], *[""] * (len(names) + 4)])
            table.footnotes.append(f"{row['layout']}: {row['reason']}")
            continue
        sizes = [_gib(row["categories"][name]) for name in names]
        sums = [_gib(row[f"{name}_bytes"]) for name in ("allocated", "reserved", "device", "most")]
        table.rows.append([row["layout"], row["verdict"], *sizes, *sums])
    table.footnotes.append(
        "fits: the device total fits even at its upper estimate (at most). Not included: other programs on the GPU, "
        "and buffers that a library allocates without torch"
    )
    return table


def _shortlist(answer: _Answer) -> Iterator[str]:
    shortlist, calibration = answer["shortlist"], answer["calibration"]
    if not shortlist:
        yield (f"no layout is certain to fit ({answer['looked_at']} considered), so there is no ranking")
        return
    yield ("")
    yield (f"{answer['fitting']} of {answer['looked_at']} layouts fit.")
    if not answer["is_ranked"]:
        count = f"The {len(shortlist)} fastest by prediction, in alphabetical order"
        yield (
            f"{count if len(shortlist) > 1 else 'The fastest by prediction'}. Not ranked, because no measurement "
            f"covers {'; '.join(answer['outside'])}:"
        )
    elif len(shortlist) > 1:
        seconds = [choice["step_seconds"] for choice in shortlist]
        is_tie = max(seconds) <= min(seconds) * (1 + TIE)
        yield (
            f"A tie of {len(shortlist)}: the predictions are within {TIE:.0%} of each other. Use bench to choose:"
            if is_tie
            else f"The {len(shortlist)} fastest, by prediction:"
        )
    for choice in shortlist:
        low, high = _seconds(choice["low_seconds"]), _seconds(choice["high_seconds"])
        yield (
            f"{choice['layout']}: {_seconds(choice['step_seconds'])} a step ({low} to {high}), "
            f"{_count(choice['tokens_per_second'])} tokens/s, {_share(choice['share_of_peak'])} of peak, "
            f"{_gib(choice['device_bytes'])} GiB; bound by {_bound(choice)}"
        )
        yield (f"  {choice['commands']['train']}")
        yield (f"  {choice['commands']['bench']}")
    yield (
        f"The {calibration['interval']:.0%} interval is from the predicted time / {calibration['factor']:.2f} to "
        f"x {calibration['factor']:.2f} (measured: {calibration['case']}). Times do not include the data loader, "
        "stragglers and checkpoints. Not verified on several GPUs."
    )


def _bound(choice: _Answer) -> str:
    total = choice["step_seconds"]
    largest = sorted(choice["parts"].items(), key=lambda phase: -phase[1])[:3]
    return ", ".join(f"{name} {_share(seconds / total)}" for name, seconds in largest if seconds > 0.02 * total)


def _run(run: _Answer) -> Iterator[str]:
    money = f", {run['money']:,.0f} for GPUs" if run["money"] is not None else ""
    yield ("")
    yield (
        f"{_count(run['tokens'])} tokens: {_count(run['updates'])} updates, {run['hours']:,.1f} hours "
        f"({_count(run['gpu_hours'])} GPU hours{money}, {_count(run['energy_kwh'])} kWh), "
        f"goodput {_share(run['goodput'])}"
    )
    if run["save_every_seconds"] is not None:
        minutes = f"{run['save_every_seconds'] / 60:.0f}"
        yield (f"  save a checkpoint every {minutes} minutes: least time is lost to saving and to failures")
    for assumption in run["assumptions"]:
        yield (f"  assumed: {assumption}")


def print_machine(machine: Machine) -> None:
    """Print the rates of a machine that was just measured."""
    size, seconds = machine.kernels["product"][-1]
    _say(
        f"{machine.ranks} ranks on {machine.device}, {machine.threads} threads each: "
        f"matrix products {size / seconds:.3g} flop/s"
    )
    size, seconds = machine.kernels["other"][-1]
    _say(f"  other kernels {_count(size / seconds)}B/s")
    for backend, curves in machine.links.items():
        for kind, points in curves.items():
            (_, first), (size, last) = points[0], points[-1]
            _say(f"  {backend} {kind}: {_seconds(first)} for few bytes, {_count(size / last)}B/s for {_count(size)}B")
        texts = [
            f"{name} {_seconds(of_step)} and {_seconds(each)}"
            for name, (of_step, each) in machine.overhead[backend].items()
        ]
        _say(f"  {backend}, overhead of a step and of an operator: {', '.join(texts)}")
        factors = ", ".join(f"{name} {factor:.2f}" for name, factor in machine.factors.get(backend, {}).items())
        _say(f"  {backend}, measured time of an update / sum of its measured parts: {factors}")


def print_validation(result: _Answer) -> None:
    """Print the table of errors that `plan --validate` has measured."""
    _say(
        f"{result['read']} of {result['rows']} rows read; {result['left_out_of_fit']} are also in the calibration, and "
        "are predicted by fits without them"
    )
    if result["in_sample"]:
        _say(
            f"  {result['in_sample']} rows are in-sample: this calibration was fitted to them, and errors on new rows "
            "are larger. Add --calibration with the file of these rows to predict each row by a fit without it."
        )
    for entry in result["unreadable"]:
        _say(f"  {entry['count']} rows not read: {entry['reason']}")
    for entry in result["assumed"]:
        _say(f"  {entry['count']} rows do not give {entry['what']}, which is assumed")
    if result["time"]:
        print_table("Time of a step", _time_table(result))
    if result["memory"]:
        print_table("Memory", _error_table(result["memory"], ("source", "kind"), ("above_upper_end",)))
    verdicts = result["verdicts"]
    _say(
        f"Runs that succeeded, by verdict: {verdicts['ran_fits']} fits, {verdicts['ran_may_not_fit']} may not fit, "
        f"{verdicts['false_does_not_fit']} does not fit (wrong)"
    )
    _say(
        f"Runs out of memory, by verdict: {verdicts['ran_out_does_not_fit']} does not fit, "
        f"{verdicts['ran_out_may_not_fit']} may not fit, {verdicts['false_fits']} fits (wrong)"
    )
    if result["choice"]:
        table = Table(
            ["source", "models", "rows", "time lost by the first choice", "by the best of three", "rank correlation"],
            [],
        )
        for row in result["choice"]:
            regrets = [_share(row["regret_of_favourite"]), _share(row["regret_of_best_of_three"])]
            table.rows.append(
                [row["source"], str(row["models"]), str(row["rows"]), *regrets, f"{row['rank_correlation']:.2f}"]
            )
        print_table("Choice among the rows of one model", table)
    if result["leave_one_source_out"]:
        heading = "Each source, predicted from all others"
        print_table(heading, _error_table(result["leave_one_source_out"], ("source",), ()))
    draws = result["resamplings"]
    if draws:
        error = draws["mean_error"]
        _say(
            f"{draws['draws']} calibrations with a random half of the rows, each tested on the other half: mean error "
            f"{_share(error['median'])} (median calibration), {_share(error['worst'])} (worst)"
        )
        for row in draws["by_source"]:
            error = row["mean_error"]
            _say(f"  {row['source']}: {_share(error['median'])}, worst {_share(error['worst'])}")
        for row in draws["matmul"]:
            _say(f"  matrix products of {row['case']}: {row['least']:.2f} to {row['most']:.2f} of peak")


def _time_table(result: _Answer) -> Table:
    errors = ["mean", "median", "largest", "within 10%", "coverage of 90%", "factor"]
    table = Table(["source", "rows", *errors, "one share of peak", "that of the calibration"], [])
    for row in result["time"]:
        other = row["calibration_share_error"]
        table.rows.append([
            row["source"], str(row["rows"]), _share(row["mean_error"]), _share(row["median_error"]),
            _share(row["largest_error"]), _share(row["within_10_percent"]), _share(row["coverage"]),
            f"{row['median_factor']:.2f}", _share(row["own_share_error"]["mean_error"]),
            _share(other["mean_error"]) if other else "",
        ])  # fmt: skip
        in_sample = f"; {row['in_sample']} of {row['rows']} rows in-sample" if row["in_sample"] else ""
        table.footnotes.append(f"{row['source']}: {', '.join(row['cases'])}{in_sample}")
    for row in result["time_by_case"]:
        table.footnotes.append(
            f"{row['case']}: {row['rows']} rows, mean {_share(row['mean_error'])}, coverage {_share(row['coverage'])}"
        )
    table.footnotes.append(
        "The last two columns are baselines: the mean error if all rows of a source run at one share of peak. This is "
        "the median share of its own rows, or of the calibration rows."
    )
    return table


def _error_table(rows: Sequence[_Answer], keys: Sequence[str], counts: Sequence[str]) -> Table:
    table = Table(
        [
            *keys,
            "rows",
            "mean",
            "median",
            "largest",
            "bias",
            "within 10%",
            *[name.replace("_", " ") for name in counts],
        ],
        [],
    )
    for row in rows:
        errors = [
            _share(row[name]) for name in ("mean_error", "median_error", "largest_error", "bias", "within_10_percent")
        ]
        table.rows.append(
            [*[row[key] for key in keys], str(row["rows"]), *errors, *[str(row[name]) for name in counts]]
        )
    return table


def _say(line: str) -> None:
    sys.stdout.write(printable(line) + "\n")
