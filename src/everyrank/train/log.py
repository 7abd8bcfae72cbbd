"""The log of a run: a row for every update in log.jsonl and log.csv, for every epoch in epochs.csv, and for every
evaluation, epoch and checkpoint in events.jsonl; in trackers too where asked.

A run that goes on from a checkpoint first takes out what an earlier attempt logged after it: the log is one
trajectory.
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


def _kept_rows(run: Path, before: int) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of both .jsonl in a run's folder that a training begun at update `before` does not write again.

    And the names of those in which more than the last line, which a killed run may have cut off, cannot be read.
    """
    kept: list[dict[str, Any]] = []
    damaged: list[str] = []
    for name in ("log.jsonl", "events.jsonl"):
        lines: list[str] = []
        with contextlib.suppress(OSError), open_file(run / name) as file:
            lines = file.read().decode(errors="replace").splitlines()
        rows = [_row(line) for line in lines]
        if None in rows[:-1]:
            damaged.append(name)
        kept += [row for row in rows if row and _belongs(row, before)]
    return kept, damaged


def _row(line: str) -> dict[str, Any] | None:
    """What a line says: {} where that is not of an update or of what follows one; None where it cannot be read."""
    try:
        row: Any = json.loads(line)
        if not isinstance(row, dict):
            return None
        if "final" in row and "step" not in row:
            return {}
        numbers = {"loss": ("step", "epoch", "loss", "terms"), "epoch_seconds": ("step", "epoch", "epoch_seconds")}
        needed = next((names for kind, names in numbers.items() if kind in row), ("step",))
        is_one = all(isinstance(row[name], int | float) and math.isfinite(row[name]) for name in needed)
        is_one = is_one and isinstance(row["step"], int) and isinstance(row.get("evaluation", {}), dict)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return row if is_one else None


def _belongs(row: Mapping[str, Any], before: int) -> bool:
    """An update is numbered from 0; an evaluation or a checkpoint by the updates done."""
    return row["step"] < before if "loss" in row else row["step"] <= before


class Log:
    """Files of one run; rank 0 alone has one.

    memberships   who takes part, and what the starts of this training have cost
    trouble   why they cannot be written: no reason to stop training
    gone      at the end: what was taken away from the folder while the training ran
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
        self.trouble = ""
        self.gone: list[str] = []
        self.files = [_beside(run / name) for name in _FILES]
        self.lines, self.events, self.updates, self.epochs = self.files
        self.update_table = csv.writer(self.updates, lineterminator="\n")
        self.epoch_table = csv.DictWriter(
            self.epochs, ["epoch", "step", "seconds", "loss", *metrics], extrasaction="ignore", lineterminator="\n"
        )
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
        with self._noted():
            self._write(row)
        self.memberships.first_update(row["time"])
        self._track(row["step"] + 1, {"loss": row["loss"], "lr": row["lr"]})

    def event(self, row: Mapping[str, Any]) -> None:
        """An evaluation, the end of an epoch, a checkpoint: anything with the number of updates done as `step`."""
        with self._noted():
            self._write(row)
        values = {
            **row.get("evaluation", {}),
            **{key: row[key] for key in ("epoch_seconds", "stall_seconds") if key in row},
        }
        if values:
            self._track(row["step"], values)

    def final(self, metrics: Mapping[str, float]) -> None:
        """The last row of the updates."""
        with self._noted():
            self.lines.write(json.dumps({"final": dict(metrics)}) + "\n")

    def _write(self, row: Mapping[str, Any]) -> None:
        file = self.lines if "loss" in row else self.events
        file.write(json.dumps(row) + "\n")
        if "loss" in row:
            self.update_table.writerow([row.get(name) for name in _UPDATE])
        elif "epoch_seconds" in row:
            values = {"epoch": row["epoch"], "step": row["step"], "seconds": row["epoch_seconds"]}
            self.epoch_table.writerow({**values, "loss": row.get("mean_loss"), **row.get("evaluation", {})})

    def flush(self) -> None:
        """What is written can be read by others."""
        for file in self.files:
            with self._noted():
                file.flush()

    def close(self) -> None:
        """Write what is left, and close the files."""
        for file, name in zip(self.files, _FILES, strict=True):
            if not _is_here(file, self.run / name):
                self.gone.append(name)
            with self._noted():
                file.close()
        for tracker in self.trackers:
            try:
                tracker.close()
            except Exception as error:  # what the training came to must not be lost for it
                self.trouble = f"{type(tracker).__name__.strip('_')}: {error}"

    def _track(self, step: int, values: Mapping[str, float]) -> None:
        """A tracker that fails is let go; it has many ways to, and none is a reason to stop training."""
        for tracker in list(self.trackers):
            try:
                tracker.log(step, values)
            except Exception as error:
                self.trouble = f"{type(tracker).__name__.strip('_')}: {error}"
                self.trackers.remove(tracker)

    @contextlib.contextmanager
    def _noted(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            self.trouble = error.strerror or str(error)


def _beside(path: Path) -> IO[str]:
    """A new file, which takes the place of the old one once that one's rows are in it.

    What stands there is removed first: in a folder from elsewhere it may be a link to a file of the person's own.
    """
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    return partial.open("x", encoding="utf-8", newline="")


def _is_here(file: IO[str], path: Path) -> bool:
    """Whether the open file is still the one of this name."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def open_log(
    prepared: Prepared, options: TrainOptions, begin: int, display: Display
) -> tuple[list[dict[str, Any]], Log | None]:
    """The rows logged before update `begin`, where a run goes on, and the log of this one; rank 0 alone has one."""
    if prepared.world.rank != 0 or options.out is None:
        return [], None
    workload = prepared.workload
    earlier: list[dict[str, Any]] = []
    if options.resume is not None:
        before = options.resume.parent.parent
        earlier, damaged = _kept_rows(before, begin)
        for name in damaged:
            line = f"{before / name}: not all of its lines can be read; the others go on"
            if before.resolve() == options.out.resolve():
                (before / name).replace(before / f"{name}.damaged")
                line += f", and it is kept as {name}.damaged"
            display.line(line)
    about = {
        "workload": workload.name,
        "layout": str(prepared.layout),
        "world_size": prepared.world.size,
        "global_batch": workload.global_batch,
        "seed": workload.seed,
        **(workload.source.settings if workload.source else {}),
    }
    trackers = [open_tracker(name, options.out, about, begin) for name in options.trackers]
    shown = [name for name in ("eval_loss", *workload.metrics, *workload.derived) if not name.startswith("_")]
    starts = Memberships(options.out, prepared.world, begin, display.line)  # before the log of earlier ones is cut
    return earlier, Log(options.out, earlier, shown, trackers, starts)
