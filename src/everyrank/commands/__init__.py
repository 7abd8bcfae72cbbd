"""The commands, one a file: the words it takes (`add`), and what it does with them (`run`, which returns the status).

Thin: a command reads words, calls `session`, and shows what comes back. Imports no torch.
"""

from __future__ import annotations

from types import ModuleType

from everyrank.commands import bench, checkpoint, doctor, new, predict, report, train, verify

__all__ = ["COMMANDS"]

COMMANDS: dict[str, ModuleType] = {
    "train": train,
    "verify": verify,
    "bench": bench,
    "predict": predict,
    "checkpoint": checkpoint,
    "report": report,
    "doctor": doctor,
    "new": new,
}
"""In the order in which `--help` shows them."""
