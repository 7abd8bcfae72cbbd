"""Starts the process that imports torch once, and sends it the runs to make."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from everyrank.audit.guardian import end_script_processes, guarded
from everyrank.audit.script import enough_gpus, find_script, mentions_cuda, user_source, without_gpus
from everyrank.audit.watch.recorder import ENVIRONMENT
from everyrank.errors import CannotRunError
from everyrank.rerun.recording import Imposed, ScriptRecording, read_recording

__all__ = ["ScriptHost"]


class ScriptHost:
    """Runs a script on one or several ranks, any number of times, without changing the user's files.

    python_args      a script and its arguments, or -m, a module and its arguments
    timeout_seconds  time limit of each run
    pretend_cuda     run CUDA calls on the CPU even if the script does not mention CUDA
    max_ranks        largest number of ranks of a run; with fewer GPUs, all runs use the CPU, to compute equally
    modules          slow imports of the script, which all runs share
    num_runs         number of runs that have begun

    Example:
        with ScriptHost(["train.py", "--epochs", "2"]) as host:
            two = host.run(ranks=2, float64=True)
            one = host.run(ranks=1, float64=True, imposed=Imposed(recording=two))

    Raises `CannotRunError` if the process does not start. Errors of the script are in `ScriptRecording.failure`.

    """

    def __init__(
        self,
        python_args: Sequence[str],
        timeout_seconds: float = 120.0,
        pretend_cuda: bool = False,
        max_ranks: int = 3,
        modules: Sequence[str] = (),
    ) -> None:
        self.python_args, self.timeout_seconds, self.pretend_cuda = list(python_args), timeout_seconds, pretend_cuda
        self.max_ranks, self.modules = max_ranks, list(modules)
        self._process: Any = None
        self.num_runs = 0

    def __enter__(self) -> Self:
        script = find_script(self.python_args)
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="everyrank-rerun-"))
        except OSError as error:
            raise CannotRunError(
                f"cannot create a temporary folder: {error}; set TMPDIR to a writable folder"
            ) from error
        self._cleanup = contextlib.ExitStack()
        self._cleanup.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self._cleanup.enter_context(guarded(self.folder))
        main = str(script.absolute()) if script else ""
        environment = {
            **os.environ,
            **without_gpus(self.max_ranks),
            # only for the guardian, to find all processes of the script; without the inject folder it installs no hooks
            ENVIRONMENT: json.dumps({"folder": str(self.folder)}),
            "OMP_NUM_THREADS": "1",
            "WANDB_MODE": "disabled",
        }
        self._process = subprocess.Popen(  # noqa: S603  (our own module)
            [sys.executable, "-P", "-m", "everyrank.rerun.process", str(self.folder), main, *self.modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._cleanup.callback(self._end)
        return self

    def __exit__(self, *_error: object) -> None:
        self._cleanup.close()

    def _end(self) -> None:
        self._process.kill()
        end_script_processes(self.folder)  # the ranks, which also hold the pipes open
        self._process.communicate()

    def run(
        self,
        ranks: int = 1,
        *,
        python_args: Sequence[str] | None = None,
        imposed: Imposed | None = None,
        float64: bool = False,
        updates: int = 12,
        num_detailed: int = 6,
        seconds: float = 30.0,
        environment: Mapping[str, str] | None = None,
        expressions: bool = False,
        values: bool = False,
        only_rates: bool = False,
        files: ScriptRecording | None = None,
    ) -> ScriptRecording:
        """Run the script on `ranks` ranks.

        updates       number of updates after which the script is ended
        num_detailed  number of first updates whose gradients, parameters and states are recorded
        expressions   also record which expressions of the script construct loaders, call the model, save, ... (facts)
        values        with expressions: also record the values of variables, schedules and clipping
        only_rates    record learning rates, and no batches, random numbers or values
        files         start with the files that this earlier run has written
        seconds       time after which the ranks agree on a last update, unless a recording is imposed
        """
        imposed = imposed or Imposed()
        python_args = self.python_args if python_args is None else list(python_args)
        script = find_script(python_args)
        uses_gpu = self.pretend_cuda or mentions_cuda(
            f"{user_source(script) if script else ''} {' '.join(python_args)}"
        )
        self.num_runs += 1
        folder = self.folder / f"run{self.num_runs}"
        folder.mkdir()
        if files is not None and (files.folder / "files").is_dir():
            shutil.copytree(files.folder / "files", folder / "files", symlinks=True)
        recording = imposed.recording
        settings = {
            "folder": str(folder),
            "python_args": python_args,
            "main": str(script.absolute()) if script else "",
            "ranks": ranks,
            "devices": 0 if enough_gpus(self.max_ranks) or not uses_gpu else ranks,
            "float64": float64,
            "updates": updates,
            "num_detailed": num_detailed,
            "seconds": seconds,
            "timeout": self.timeout_seconds,
            "environment": dict(environment or {}),
            "imposed": str(recording.folder) if recording is not None else "",
            "imposed_ranks": _imposed_ranks(imposed),
            "by_rows": imposed.by_rows,
            "num_recorded": len(recording.ranks) if recording is not None else 0,
            "impose_parameters": imposed.parameters,
            "evaluation_rank": imposed.evaluation_rank,
            "no_workers": imposed.no_workers,
            "order": imposed.order,
            "rows": imposed.rows,
            "seed": imposed.seed,
            "without_checkpointing": imposed.without_checkpointing,
            "without_dropout": imposed.without_dropout,
            "backward_is_update": imposed.backward_is_update,
            "norms_over_ranks": imposed.norms_over_ranks,
            "pass_batches": imposed.pass_batches,
            "max_elements": imposed.max_elements,
            "reads": imposed.reads,
            "larger": imposed.larger,
            "expressions": expressions,
            "values": values,
            "only_rates": only_rates,
        }
        start = time.monotonic()
        reply = self._request_run(settings)
        return read_recording(folder, ranks, reply["failure"], reply["traceback"], time.monotonic() - start, float64)

    def run_in_float64(
        self,
        ranks: int,
        *,
        python_args: Sequence[str],
        updates: int,
        seconds: float,
        imposed: Imposed | None = None,
    ) -> ScriptRecording:
        """Run the script in float64, or in its own precision if it fails in float64. All updates are detailed.

        A script that does not end within the time limit is not run again.
        """
        for float64 in (True, False):
            recording = self.run(
                ranks,
                python_args=python_args,
                imposed=imposed,
                float64=float64,
                updates=updates,
                num_detailed=updates,
                seconds=seconds,
            )
            if not recording.failure or recording.failure.startswith("no end"):
                break
        return recording

    def _request_run(self, settings: dict[str, Any]) -> dict[str, str]:
        try:
            self._process.stdin.write(json.dumps(settings) + "\n")
            self._process.stdin.flush()
            limit = self.timeout_seconds + 60.0  # torch is imported first
            if not select.select([self._process.stdout], [], [], limit)[0]:
                self._process.kill()  # its late answer would be taken for that to the next request
                self._process.wait()
                end_script_processes(self.folder)
                return {"failure": f"no answer within {limit:g} s", "traceback": ""}
            line = self._process.stdout.readline()
        except OSError as error:
            raise CannotRunError(f"the process that runs the script has ended: {error}") from error
        if not line:
            raise CannotRunError(f"the process that runs the script has ended: {self._process.stderr.read()[-500:]}")
        return json.loads(line)


def _imposed_ranks(imposed: Imposed) -> list[int]:
    """The ranks whose batches and random numbers are merged."""
    if imposed.recording is None:
        return []
    return list(range(len(imposed.recording.ranks))) if imposed.only_rank is None else [imposed.only_rank]
