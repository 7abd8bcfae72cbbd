"""Starts the process that imports torch once, and asks it for runs."""

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

from everyrank.audit.guardian import guarded
from everyrank.audit.script import enough_gpus, find_script, names_cuda, own_text, without_gpus
from everyrank.audit.watch.recorder import ENVIRONMENT
from everyrank.errors import CannotRunError
from everyrank.rerun.recording import Imposed, ScriptRecording, read_recording

__all__ = ["ScriptHost"]


class ScriptHost:
    """Runs a script on one or several ranks, any number of times, without touching the user's files.

    words            a script and its arguments, or -m, a module and its arguments
    timeout_seconds  for each run
    pretend_cuda     run CUDA calls on the CPU even if the script does not name CUDA
    most_ranks       of a run; with fewer GPUs than that, all runs compute on the CPU, so that they compute alike
    modules          what the script imports and takes long: all runs share one import

    Example:
        with ScriptHost(["train.py", "--epochs", "2"]) as host:
            two = host.run(ranks=2, float64=True)
            one = host.run(ranks=1, float64=True, imposed=Imposed(recording=two))

    Raises `CannotRunError` if the process does not start. What the script does wrong is in `ScriptRecording.trouble`.

    """

    def __init__(
        self,
        words: Sequence[str],
        timeout_seconds: float = 120.0,
        pretend_cuda: bool = False,
        most_ranks: int = 3,
        modules: Sequence[str] = (),
    ) -> None:
        self.words, self.timeout_seconds, self.pretend_cuda = list(words), timeout_seconds, pretend_cuda
        self.most_ranks, self.modules = most_ranks, list(modules)
        self._process: Any = None
        self._runs = 0

    def __enter__(self) -> Self:
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="everyrank-rerun-"))
        except OSError as error:
            raise CannotRunError(f"no folder for temporary files: {error}; set TMPDIR to one") from error
        self._cleanup = contextlib.ExitStack()
        self._cleanup.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self._cleanup.enter_context(guarded(self.folder))
        script = find_script(self.words)
        main = str(script.absolute()) if script else ""
        environment = {
            **os.environ,
            **without_gpus(self.most_ranks),
            # the guardian finds every process of the script by it, and the inject folder is not on the path
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
        self._process.communicate()

    def run(
        self,
        ranks: int = 1,
        *,
        words: Sequence[str] | None = None,
        imposed: Imposed | None = None,
        float64: bool = False,
        updates: int = 12,
        detailed: int = 6,
        seconds: float = 30.0,
        environment: Mapping[str, str] | None = None,
        expressions: bool = False,
        values: bool = False,
        only_rates: bool = False,
        files: ScriptRecording | None = None,
    ) -> ScriptRecording:
        """Run the script on `ranks` ranks.

        updates   optimizer steps after which the script is ended
        detailed  first updates whose gradients, parameters and states are recorded
        expressions  also record which expressions of the script make loaders, call the model, save, ... (facts)
        values    with expressions: also record the values that names have there, schedules and clipping
        only_rates  record learning rates, and no batches, draws or values
        files     begin with the files that this earlier run has written
        seconds   after which the ranks agree on a last update, unless a recording is imposed
        """
        imposed = imposed or Imposed()
        words = self.words if words is None else list(words)
        script = find_script(words)
        names_gpu = self.pretend_cuda or names_cuda(f"{own_text(script) if script else ''} {' '.join(words)}")
        self._runs += 1
        folder = self.folder / f"run{self._runs}"
        folder.mkdir()
        if files is not None and (files.folder / "files").is_dir():
            shutil.copytree(files.folder / "files", folder / "files", symlinks=True)
        recording = imposed.recording
        settings = {
            "folder": str(folder),
            "words": words,
            "main": str(script.absolute()) if script else "",
            "ranks": ranks,
            "devices": 0 if enough_gpus(self.most_ranks) or not names_gpu else ranks,
            "float64": float64,
            "updates": updates,
            "detailed": detailed,
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
            "most_elements": imposed.most_elements,
            "reads": imposed.reads,
            "larger": imposed.larger,
            "expressions": expressions,
            "values": values,
            "only_rates": only_rates,
        }
        start = time.monotonic()
        answer = self._ask(settings)
        return read_recording(folder, ranks, answer["trouble"], answer["traceback"], time.monotonic() - start, float64)

    def run_in_float64(
        self,
        ranks: int,
        *,
        words: Sequence[str],
        updates: int,
        seconds: float,
        imposed: Imposed | None = None,
    ) -> ScriptRecording:
        """Run the script in float64, and in its own precision if it fails in float64; all updates are detailed.

        A script that does not end within the timeout is not run again.
        """
        for float64 in (True, False):
            recording = self.run(
                ranks,
                words=words,
                imposed=imposed,
                float64=float64,
                updates=updates,
                detailed=updates,
                seconds=seconds,
            )
            if not recording.trouble or recording.trouble.startswith("no end"):
                break
        return recording

    def _ask(self, settings: dict[str, Any]) -> dict[str, str]:
        try:
            self._process.stdin.write(json.dumps(settings) + "\n")
            self._process.stdin.flush()
            limit = self.timeout_seconds + 60.0  # torch is imported first
            if not select.select([self._process.stdout], [], [], limit)[0]:
                return {"trouble": f"no answer within {limit:g} s", "traceback": ""}
            line = self._process.stdout.readline()
        except OSError as error:
            raise CannotRunError(f"the process that runs the script has ended: {error}") from error
        if not line:
            raise CannotRunError(f"the process that runs the script has ended: {self._process.stderr.read()[-500:]}")
        return json.loads(line)


def _imposed_ranks(imposed: Imposed) -> list[int]:
    """The ranks whose batches and draws are put together."""
    if imposed.recording is None:
        return []
    return list(range(len(imposed.recording.ranks))) if imposed.only_rank is None else [imposed.only_rank]
