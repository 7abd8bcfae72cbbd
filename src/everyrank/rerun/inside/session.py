"""The state that all hooks of a rank share."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, NoReturn

import torch

from everyrank.audit.watch.source_location import user_line
from everyrank.rerun.recording import load_rank

__all__ = ["Session"]

_WAIT_SECONDS = 10.0
_MAX_OCCURRENCES = 10**6  # occurrences of a line


class Session:
    """The recordings of a rank so far, and the recordings that are imposed on it.

    imposed   the recordings of the ranks that this rank merges; empty if nothing is imposed
    rows      number of samples of the last batch on each of these ranks
    passes    number of passes over each dataset, by its id
    copies    parameters of copies of a trained module, such as averages, by their memory address
    items     [value, line, update, whether it is a term of this rank's loss] of each tensor converted to a number
    is_split  whether the current loader gives each rank its part of every batch
    """

    def __init__(self, settings: dict[str, Any], rank: int) -> None:
        self.settings, self.rank, self.ranks = settings, rank, int(settings["ranks"])
        self.folder = Path(settings["folder"])
        self.pid = os.getpid()
        self.start: float | None = None  # time of the second update, because the first one imports modules
        self.update = 0
        self.in_backward = False
        self.is_training = False
        self.has_started = False  # a loader was read, or a model called
        self.muted = 0
        self.updates: list[dict[str, Any]] = []
        self.printed: list[dict[str, Any]] = []
        self.values: list[Any] = []
        self.draws: list[Any] = []
        self.inputs: list[Any] = []
        self.batches: list[Any] = []
        self.facts: dict[str, Any] = {"refused": []}
        self.counts: dict[tuple[Any, ...], int] = {}
        self.rows: list[int] = []
        self.batch_size = 0
        self.passes: dict[int, int] = {}
        self.is_split = False
        self.loader = -1  # of the last batch
        self.num_backwards = 0  # since the last step
        self.num_all_backwards = 0
        self.num_permutations = 0  # drawn by the script, or by its samplers
        self.num_calls = 0  # of models, and collectives
        self.in_source = False  # inside a function whose result is imposed
        self.in_model = False
        self.in_loader = False
        self.reads: list[Any] = []  # rows that the script takes out of its tensors
        self.sources: list[Any] = []
        self.items: list[list[Any]] = []
        self.copies: dict[int, str] = {}
        self.imposed = [
            load_rank(Path(settings["imposed"]) / f"rank{each}.pt")
            for each in ([rank] if settings["by_rows"] else settings["imposed_ranks"])
        ]
        for each in self.imposed:
            each["sources"] = {tuple(key): value for key, value in each["sources"]}
            each["reads"] = {tuple(key): value for key, value in each["reads"]}
        self.num_batches = 0
        self.parameters = [
            load_rank(Path(settings["imposed"]) / f"rank{each}.pt")["updates"]
            for each in range(settings["num_recorded"] if settings["impose_parameters"] else 0)
        ]
        self.before_write: Any = lambda: None
        self.on_save: Any = lambda: None

    @property
    def compares(self) -> bool:
        """Whether this run is for a comparison with one rank, and not for a port or for learning rates."""
        return not self.settings["order"] and not self.settings["only_rates"]

    @property
    def is_active(self) -> bool:
        """Whether hooks record and impose: not inside another hook, and not in a loader worker."""
        return not self.muted and os.getpid() == self.pid

    @contextlib.contextmanager
    def quiet(self) -> Generator[None]:
        """Disable hooks within the block."""
        self.muted += 1
        try:
            yield
        finally:
            self.muted -= 1

    @contextlib.contextmanager
    def script_draws(self) -> Generator[None]:
        """Do not record or impose random numbers within the block."""
        was_in_source, self.in_source = self.in_source, True
        try:
            yield
        finally:
            self.in_source = was_in_source

    def key(self, operation: str, location: str = "") -> tuple[str, str, int]:
        """(line, operation, number of its earlier occurrences)."""
        location = location or user_line()
        count = self.counts.get((location, operation), 0)
        self.counts[location, operation] = count + 1
        return location, operation, count

    def key_of_update(self, operation: str) -> tuple[str, str, int]:
        """(line, operation, occurrence), counted from 0 in each update, and separately in evaluations.

        So numbers that all ranks draw have the same keys even if only rank 0 has evaluated before.
        """
        location = user_line()
        operation = operation if torch.is_grad_enabled() else f"{operation} without grad"
        _, _, count = self.key(f"{operation} of update {self.update}", location)
        return location, operation, self.update * _MAX_OCCURRENCES + count

    def report_not_imposed(self, reason: str) -> None:
        """Record why a value could not be imposed. The run continues, but is not compared from this update on."""
        if reason not in [reported for reported, _ in self.facts["refused"]]:
            self.facts["refused"].append([reason, self.update])

    def write(self) -> None:
        """Write the recording, atomically."""
        with self.quiet():
            with contextlib.suppress(Exception):
                self.before_write()
            self.facts["items"] = self.items
            self.facts["backwards"] = self.num_all_backwards
            content = {
                "updates": self.updates,
                "printed": self.printed,
                "values": self.values,
                "draws": self.draws,
                "inputs": self.inputs,
                "batches": self.batches,
                "sources": self.sources,
                "reads": self.reads,
                "facts": self.facts,
            }
            # in one file, so that tensors that share memory are stored once
            partial = self.folder / f".rank{self.rank}.pt"
            torch.save(content, partial)
            os.replace(partial, self.folder / f"rank{self.rank}.pt")  # noqa: PTH105

    def is_last(self) -> bool:
        """Whether the run ends after this update. At the time limit, rank 0 sets the end two updates later."""
        if self.update >= self.settings["updates"]:
            return True
        if self.imposed:  # end with the recorded ranks, unless their script reached its end
            was_ended = not self.imposed[0]["facts"].get("came_to_end", False)
            return was_ended and self.update >= max(len(each["updates"]) for each in self.imposed)
        if self.start is None:
            self.start = time.monotonic()
        path = self.folder / "last.json"
        if path.exists():
            with contextlib.suppress(ValueError):
                return self.update >= json.loads(path.read_text())
        elif self.rank == 0 and time.monotonic() > self.start + self.settings["seconds"]:
            path.write_text(str(self.update + 2))
        return False

    def finish(self) -> NoReturn:
        """End this process when the other ranks get here too, because they may need it in a collective."""
        self.write()
        (self.folder / f"done{self.rank}").touch()
        deadline = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < deadline and len(list(self.folder.glob("done*"))) < self.ranks:
            time.sleep(0.02)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(0)
