"""Writes the log of a run: a row for every update in log.jsonl and log.csv, for every epoch in epochs.csv, and for
every evaluation, epoch and checkpoint in events.jsonl. `--tracker` also sends the values to trackers.

A resumed run first removes the rows after its checkpoint, so that the log holds one trajectory.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from everyrank.options import TrainOptions
from everyrank.runs import open_file
from everyrank.strategies import Prepared
from everyrank.train.display import Display
from everyrank.train.memberships import Memberships
from everyrank.train.trackers import Tracker, open_tracker

__all__ = ["Log", "open_log"]

_FILES = ("log.jsonl", "events.jsonl", "log.csv", "epochs.csv")
_UPDATE = ("step", "epoch", "loss", "lr", "terms", "time")
_EPOCH = ("epoch", "step", "seconds", "loss")


def _kept_rows(run: Path, end_step: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of both .jsonl files from before update `end_step`, and the names of damaged files.

    A file is damaged if more than its last line, which a killed run may have cut off, cannot be read.
    """
    earlier_rows: list[dict[str, Any]] = []
    damaged: list[str] = []
    for name in ("log.jsonl", "events.jsonl"):
        lines: list[str] = []
        with contextlib.suppress(OSError), open_file(run / name) as file:
            lines = file.read().decode(errors="replace").splitlines()
        rows = [_parse_row(line) for line in lines]
        if None in rows[:-1]:
            damaged.append(name)
        earlier_rows += [row for row in rows if row and _is_before(row, end_step)]
    return earlier_rows, damaged


def _parse_row(line: str) -> dict[str, Any] | None:
    """Return the row in a line: {} for a row that is neither an update nor an event, None if it cannot be read."""
    try:
        row: Any = json.loads(line)
        if not isinstance(row, dict):
            return None
        if "final" in row and "step" not in row:
            return {}
        numbers = {"loss": ("step", "epoch", "loss", "terms"), "epoch_seconds": ("step", "epoch", "epoch_seconds")}
        required_numbers = next((names for kind, names in numbers.items() if kind in row), ("step",))
        is_valid = all(isinstance(row[name], int | float) and math.isfinite(row[name]) for name in required_numbers)
        is_valid = is_valid and isinstance(row["step"], int) and isinstance(row.get("evaluation", {}), dict)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return row if is_valid else None


def _is_before(row: Mapping[str, Any], end_step: int) -> bool:
    """Return whether a row is from before update `end_step`. Updates count from 0, events by the updates done."""
    return row["step"] < end_step if "loss" in row else row["step"] <= end_step


class Log:
    """The log files of one run, on rank 0 only.

    memberships   the starts of this training
    write_error   why a file cannot be written; the training continues
    gone          at the end: files that were removed from the folder during the training
    """

    def __init__(
        self,
        run: Path,
        rows: Sequence[Mapping[str, Any]],
        metrics: Sequence[str],
        trackers: Sequence[Tracker],
        memberships: Memberships,
    ) -> None:
        run.mkdir(parents=True, exist_ok=True)
        self.memberships = memberships
        self.trackers = list(trackers)
        self.run = run
        self.write_error = ""
        self.gone: list[str] = []
        self.files = [_open_replacement(run / name) for name in _FILES]
        self.lines, self.events, self.updates, self.epochs = self.files
        self.update_table = csv.writer(self.updates, lineterminator="\n")
        columns = list(dict.fromkeys([*_EPOCH, *metrics]))  # a metric may have the name of a column
        self.epoch_table = csv.DictWriter(self.epochs, columns, extrasaction="ignore", lineterminator="\n")
        self.update_table.writerow(_UPDATE)
        self.epoch_table.writeheader()
        for row in rows:
            self._write(row)
        for file in self.files:
            file.flush()
        for name in _FILES:
            (run / f"{name}.partial").replace(run / name)

    def update(self, row: Mapping[str, Any]) -> None:
        """Write the row of one update."""
        with self._keeping_write_errors():
            self._write(row)
        self.memberships.first_update(row["time"])
        self._track(row["step"] + 1, {"loss": row["loss"], "lr": row["lr"]})

    def event(self, row: Mapping[str, Any]) -> None:
        """Write an evaluation, the end of an epoch or a checkpoint; `step` is the number of updates done."""
        with self._keeping_write_errors():
            self._write(row)
        values = {
            **row.get("evaluation", {}),
            **{key: row[key] for key in ("epoch_seconds", "stall_seconds") if key in row},
        }
        if values:
            self._track(row["step"], values)

    def final(self, metrics: Mapping[str, float]) -> None:
        """Write the final metrics."""
        with self._keeping_write_errors():
            self.lines.write(json.dumps({"final": dict(metrics)}) + "\n")

    def _write(self, row: Mapping[str, Any]) -> None:
        file = self.lines if "loss" in row else self.events
        file.write(json.dumps(row) + "\n")
        if "loss" in row:
            self.update_table.writerow([row.get(name) for name in _UPDATE])
        elif "epoch_seconds" in row:
            values = (row["epoch"], row["step"], row["epoch_seconds"], row.get("mean_loss"))
            self.epoch_table.writerow({**row.get("evaluation", {}), **dict(zip(_EPOCH, values, strict=True))})

    def flush(self) -> None:
        """Flush all files, so that other programs can read the rows."""
        for file in self.files:
            with self._keeping_write_errors():
                file.flush()

    def close(self) -> None:
        """Close the files and the trackers."""
        for file, name in zip(self.files, _FILES, strict=True):
            if not _is_in_folder(file, self.run / name):
                self.gone.append(name)
            with self._keeping_write_errors():
                file.close()
        for tracker in self.trackers:
            try:
                tracker.close()
            except Exception as error:  # a tracker's failure must not lose the result of the training
                self.write_error = f"{type(tracker).__name__.strip('_')}: {error}"

    def _track(self, step: int, values: Mapping[str, float]) -> None:
        """Send values to the trackers. A tracker that fails is dropped and the training continues."""
        for tracker in list(self.trackers):
            try:
                tracker.log(step, values)
            except Exception as error:
                self.write_error = f"{type(tracker).__name__.strip('_')}: {error}"
                self.trackers.remove(tracker)

    @contextlib.contextmanager
    def _keeping_write_errors(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            self.write_error = error.strerror or str(error)


def _open_replacement(path: Path) -> IO[str]:
    """Open a new file next to `path`, which replaces it when the old rows have been copied.

    An existing file of this name is removed first, because in a foreign folder it may be a link to another file.
    """
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    return partial.open("x", encoding="utf-8", newline="")


def _is_in_folder(file: IO[str], path: Path) -> bool:
    """Return whether `path` still names the open file."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def open_log(
    prepared: Prepared, options: TrainOptions, start_step: int, display: Display
) -> tuple[list[dict[str, Any]], Log | None]:
    """Return the rows of a resumed run from before `start_step`, and the log, which is None except on rank 0."""
    if prepared.world.rank != 0 or options.out is None:
        return [], None
    workload = prepared.workload
    earlier_rows: list[dict[str, Any]] = []
    if options.resume is not None:
        earlier_run = options.resume.parent.parent
        earlier_rows, damaged = _kept_rows(earlier_run, start_step)
        for name in damaged:
            line = f"{earlier_run / name}: some of its lines cannot be read; the others are kept"
            if earlier_run.resolve() == options.out.resolve():
                (earlier_run / name).replace(earlier_run / f"{name}.damaged")
                line += f"; the original is now {name}.damaged"
            display.line(line)
    settings = {
        "workload": workload.name,
        "layout": str(prepared.layout),
        "world_size": prepared.world.size,
        "global_batch": workload.global_batch,
        "seed": workload.seed,
        **(workload.source.settings if workload.source else {}),
    }
    trackers = [open_tracker(name, options.out, settings, start_step) for name in options.trackers]
    metric_names = [name for name in ("eval_loss", *workload.metrics, *workload.derived) if not name.startswith("_")]
    starts = Memberships(
        options.out, prepared.world, start_step, display.line
    )  # reads the log of earlier starts before it is truncated
    return earlier_rows, Log(options.out, earlier_rows, metric_names, trackers, starts)
