"""Batch jobs of Slurm: the script, handing it to sbatch, and putting a job into the queue again."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from everyrank.errors import CannotRunError, UsageError
from everyrank.launch.job import Launch

__all__ = ["BatchScript", "requeue", "require", "script", "submit"]

WARNING_SECONDS = 120  # between the signal that the time is up, and the end


@dataclass(frozen=True)
class BatchScript:
    """What a batch job is asked for with.

    options    of sbatch, by their long names: {"partition": "gpu", "time": "1:00:00", "exclusive": ""}
    prologue   a file of shell commands that come before (module load ...)
    requeue    when preempted, or at the end of its time: save, and wait in the queue again; also when a rank is lost
    """

    options: Mapping[str, str]
    prologue: Path | None = None
    requeue: bool = False


def script(launch: Launch, batch: BatchScript, command: Sequence[str], folder: Path, name: str) -> str:
    """The batch script. `command` is run in `folder`, and in the allocation it finds srun. Raises `UsageError`."""
    per_node = 1 if launch.options.per_node else launch.processes_per_node
    options = {
        "job-name": name,
        "nodes": str(launch.nodes),
        "ntasks": str(launch.nodes * per_node),
        "ntasks-per-node": str(per_node),
        "output": str(folder).replace("%", "%%") + "/slurm-%j.out",
    }
    if launch.min_nodes not in (None, launch.nodes):
        # tasks are counted when the job first begins, and one that is put back would then wait for as many nodes: so
        # none are asked for but processors, which srun gives to the tasks
        options["nodes"] = f"{launch.min_nodes}-{launch.nodes}"
        options["mincpus"] = str(launch.processes_per_node)
        del options["ntasks"], options["ntasks-per-node"]
    if batch.requeue:
        # the batch shell alone gets the signal (B:); `exec` below makes it everyrank, which asks the ranks to stop
        options |= {"requeue": "", "open-mode": "append", "signal": f"B:USR1@{WARNING_SECONDS}"}
    lines = ["#!/bin/bash"]
    for key, value in (options | dict(batch.options)).items():
        lines.append(f"#SBATCH --{_word(key)}" + (f"={_quoted(key, value)}" if value else ""))
    lines.append(f"cd -- {shlex.quote(str(folder))} || exit 2")
    if batch.prologue is not None:  # before any `set`: module and conda read variables that are not set
        lines += [f"# --- {_comment(str(batch.prologue))}", _text_of(batch.prologue), "# ---"]
    return "\n".join([*lines, f"exec {shlex.join(command)}", ""])


def _word(key: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9-]+", key):
        raise UsageError(f"--sbatch {_comment(key)}: give long names of sbatch's options, like partition=gpu")
    return key


def _quoted(key: str, value: str) -> str:
    """Sbatch reads its lines itself: spaces need quotes, and no shell sees `$()`."""
    if any(not letter.isprintable() for letter in value):
        raise UsageError(f"--sbatch {key}={value!r}: it must be printable, and on one line")
    plain = value.replace("\\", "\\\\").replace('"', '\\"')
    return value if value == plain and not set(value) & set(" '#") else f'"{plain}"'


def _comment(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prologue {path}: {getattr(error, 'strerror', None) or error}") from error


def submit(text: str, path: Path) -> str:
    """Write the script and give it to sbatch: the number of the job. Raises `CannotRunError` without a sbatch."""
    require("sbatch")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no reason given"]
        raise UsageError(f"sbatch refused {path}: {said[-1]}")
    return done.stdout.strip().partition(";")[0]


def require(program: str) -> None:
    """Raises `CannotRunError` where a program of Slurm's is not there."""
    if shutil.which(program) is None:
        raise CannotRunError(f"--launcher slurm: there is no {program} here; type this on a login node of your cluster")


def requeue(job: str) -> None:
    """Put this job into the queue again. Raises `CannotRunError` with what Slurm said against it."""
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise CannotRunError(f"job {job} could not be put into the queue again: {done.stderr.strip()}")
