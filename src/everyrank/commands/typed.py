"""The words of commands: what runs, ready to be read, and what to type on other hosts."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from everyrank.launch import Launch

__all__ = ["commands_text", "typed_on"]


def commands_text(launch: Launch) -> str:
    """Every command, ready to be read; JOB is a folder made for each run."""
    row = launch.row
    variables = [f"{name}={value}" for name, value in row.variables(launch.options).items()]
    before = ["env", *variables] if variables else []
    return "\n".join(shlex.join([*before, *command]) for command in row.render(launch, Path("JOB")))


def typed_on(typed: Sequence[str], node_rank: int | None, host: int) -> str:
    """What was typed, for another host; there it may have to be told which one it is."""
    words = ["everyrank", *typed]
    if "--node-rank" in words:
        place = words.index("--node-rank")
        del words[place : place + 2]
    words += ["--node-rank", str(node_rank)] if node_rank is not None else []
    return f"on host {host}:  {shlex.join(words)}"
