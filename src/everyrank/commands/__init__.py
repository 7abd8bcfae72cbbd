"""The commands, one per file: `add_arguments` declares the arguments, `run` returns the exit status.

A command only reads its arguments, calls `api`, and shows the result. Imports no torch.
"""

from __future__ import annotations

from types import ModuleType

from everyrank.commands import (
    audit,
    autopsy,
    bench,
    chaos,
    checkpoint,
    comm,
    doctor,
    eject,
    launch,
    new,
    plan,
    port,
    predict,
    report,
    train,
    verify,
    watch,
)

__all__ = ["COMMANDS"]

COMMANDS: dict[str, ModuleType] = {
    "train": train,
    "plan": plan,
    "verify": verify,
    "audit": audit,
    "port": port,
    "launch": launch,
    "bench": bench,
    "chaos": chaos,
    "predict": predict,
    "checkpoint": checkpoint,
    "report": report,
    "comm": comm,
    "watch": watch,
    "autopsy": autopsy,
    "doctor": doctor,
    "new": new,
    "eject": eject,
}
"""In the order in which `--help` shows them."""
