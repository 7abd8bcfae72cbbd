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

from everyrank.audit.watch.place import where

__all__ = ["Session"]

_WAIT_SECONDS = 10.0
_MOST_OF_UPDATE = 10**6  # occurrences of a line


class Session:
    """What a rank has recorded so far, and what is imposed on it.

    imposed   the recordings of the ranks that this one puts together, by rank; empty if none
    rows      number of samples of the last batch that each of them read
    passes    passes over each dataset, by its identity
    copies    parameters of copies of a trained module, such as averaged ones, by the address of their memory
    items     [value, line, update, whether it is a term of this rank's loss] of each tensor that became a number
    is_split  whether the loader in use gives each rank its part of every batch
    """

    def __init__(self, settings: dict[str, Any], rank: int) -> None:
        self.settings, self.rank, self.ranks = settings, rank, int(settings["ranks"])
        self.folder = Path(settings["folder"])
        self.pid = os.getpid()
        self.start: float | None = None  # of the second update: the first imports much
        self.update = 0
        self.in_backward = False
        self.is_training = False
        self.has_begun = False  # a loader was read, or a model called
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
        self.loader = -1  # that gave the last batch
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
            torch.load(Path(settings["imposed"]) / f"rank{each}.pt", weights_only=True)
            for each in ([rank] if settings["by_rows"] else settings["imposed_ranks"])
        ]
        for each in self.imposed:
            each["sources"] = {tuple(key): value for key, value in each["sources"]}
            each["reads"] = {tuple(key): value for key, value in each["reads"]}
        self.num_batches = 0
        self.parameters = [
            torch.load(Path(settings["imposed"]) / f"rank{each}.pt", weights_only=True)["updates"]
            for each in range(settings["num_recorded"] if settings["impose_parameters"] else 0)
        ]
        self.before_write: Any = lambda: None
        self.on_save: Any = lambda: None

    @property
    def compares(self) -> bool:
        """Whether the run is for the comparison with one rank, not for a port or for learning rates only."""
        return not self.settings["order"] and not self.settings["only_rates"]

    @property
    def is_active(self) -> bool:
        """Whether hooks act: not inside another hook, nor in a worker of a loader."""
        return not self.muted and os.getpid() == self.pid

    @contextlib.contextmanager
    def quiet(self) -> Generator[None]:
        """Hooks do nothing within the block."""
        self.muted += 1
        try:
            yield
        finally:
            self.muted -= 1

    @contextlib.contextmanager
    def natural(self) -> Generator[None]:
        """Random numbers drawn within the block are the script's own."""
        before, self.in_source = self.in_source, True
        try:
            yield
        finally:
            self.in_source = before

    def key(self, operation: str, place: str = "") -> tuple[str, str, int]:
        """(line, operation, how often it was met before)."""
        place = place or where()
        count = self.counts.get((place, operation), 0)
        self.counts[place, operation] = count + 1
        return place, operation, count

    def key_of_update(self, operation: str) -> tuple[str, str, int]:
        """(line, operation, how often it was met before), counted anew in each update, apart for evaluations.

        Rank 0 may evaluate alone: the numbers that all ranks draw afterwards have the same keys.
        """
        place = where()
        operation = operation if torch.is_grad_enabled() else f"{operation} without grad"
        _, _, count = self.key(f"{operation} of update {self.update}", place)
        return place, operation, self.update * _MOST_OF_UPDATE + count

    def refuse(self, why: str) -> None:
        """Note that something could not be imposed. The run goes on, and is not compared from this update on."""
        if why not in [known for known, _ in self.facts["refused"]]:
            self.facts["refused"].append([why, self.update])

    def write(self) -> None:
        """Write the recording, completely or not at all."""
        with self.quiet():
            with contextlib.suppress(Exception):
                self.before_write()
            self.facts["items"] = self.items
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
            # one file, so that the memory of equal tensors is shared
            partial = self.folder / f".rank{self.rank}.pt"
            torch.save(content, partial)
            os.replace(partial, self.folder / f"rank{self.rank}.pt")  # noqa: PTH105

    def is_last(self) -> bool:
        """Whether the run ends after this update; rank 0 chooses it two updates ahead when time is up."""
        if self.update >= self.settings["updates"]:
            return True
        if self.imposed:  # as the recorded ranks, unless their script came to its end
            is_cut = not self.imposed[0]["facts"].get("came_to_end", False)
            return is_cut and self.update >= max(len(each["updates"]) for each in self.imposed)
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
        """End this process when the other ranks get here too, because they may wait for it in a collective."""
        self.write()
        (self.folder / f"done{self.rank}").touch()
        end = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < end and len(list(self.folder.glob("done*"))) < self.ranks:
            time.sleep(0.02)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(0)
