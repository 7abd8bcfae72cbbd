"""Installs all hooks after torch has been imported, and ends the run after enough updates."""

# The hooks replace parts of torch that are private.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.distributed import rpc
from torch.jit._builtins import _find_builtin, _register_builtin
from torch.utils._python_dispatch import _disable_current_modes

from everyrank.audit.events import (
    Altered,
    ProcessEnd,
    ProcessStart,
    RpcStarted,
    SeedSet,
    Shuffle,
    SourceFiles,
    Stopped,
    Unchecked,
)
from everyrank.audit.replay.recording import ReplayRecorder, install_replay_recording
from everyrank.audit.replay.run import run_replay
from everyrank.audit.watch.collectives import CollectiveMode, install_process_group
from everyrank.audit.watch.compilation import skip_compilation
from everyrank.audit.watch.deepspeed import install_deepspeed
from everyrank.audit.watch.frameworks import install_frameworks
from everyrank.audit.watch.gradients import Gradients
from everyrank.audit.watch.loaders import Loaders, install_loaders, random_states
from everyrank.audit.watch.local_tensors import install_local_tensors
from everyrank.audit.watch.losses import FunctionMode, Losses
from everyrank.audit.watch.modules import install_modules
from everyrank.audit.watch.overlay import Overlay, install_overlay
from everyrank.audit.watch.pretend_cuda import PretendCuda
from everyrank.audit.watch.recorder import ENVIRONMENT, Recorder, Settings
from everyrank.audit.watch.saving import install_saving
from everyrank.audit.watch.source_location import caller_is_user_code, is_user_file, user_line, user_lines
from everyrank.audit.watch.steps import install_sharding, install_steps

__all__ = ["install"]

_UPDATES_WITHOUT_COMMUNICATION = 20  # multiple of --updates after which a rank that never communicated stops
_MAX_SHUFFLES = 64
_MAX_CALLERS = 3  # user lines to record for a seed
_WAIT_SECONDS = 15.0  # for the other ranks to reach the end, too


def install() -> None:
    """Install all hooks. inject/sitecustomize.py calls this right after torch has been imported."""
    settings = Settings.read(os.environ[ENVIRONMENT])
    recorder = Recorder(settings)
    stack_path = recorder.folder / f"stack{os.getpid()}"
    faulthandler.register(signal.SIGUSR1, file=stack_path.open("w"), all_threads=False, chain=False)
    end = RunEnd(recorder)
    losses = Losses()
    gradients = Gradients(recorder, losses)
    loaders = Loaders(recorder, end.finish)
    install_frameworks(recorder)
    pretend = PretendCuda(settings.devices) if settings.devices else None
    if pretend is not None:
        pretend.install()
    install_process_group(recorder, losses, pretend is not None)
    if not install_sharding(gradients):
        message = "gradients under fully_shard: this version of torch stores them in a different way"
        recorder.write(Unchecked(message=message))
    install_modules(recorder, losses, gradients)
    install_steps(recorder, losses, gradients, loaders.backward, end.after_step)
    install_deepspeed(recorder, gradients)
    install_local_tensors(recorder)
    install_loaders(recorder, loaders)
    skip_compilation(lambda: recorder.write(Altered(message=f"torch.compile at {user_line()} was skipped")))
    _disable_hooks_in_traces(recorder)
    _watch_seeds(recorder)
    _watch_shuffles(recorder)
    _watch_rpc(recorder)
    if not settings.keep_files:
        overlay = install_overlay(settings.folder, settings.main)
        install_saving(recorder, overlay)
        end.overlay = overlay
    if settings.records_functions:
        FunctionMode(recorder, losses, pretend).__enter__()
        CollectiveMode(recorder, gradients).__enter__()
    if settings.replay:
        replay_recorder = ReplayRecorder(recorder, losses, gradients)
        install_replay_recording(replay_recorder)
        end.replay = functools.partial(run_replay, replay_recorder)
    counts = {"devices": settings.devices, "replay": settings.replay}
    recorder.write(ProcessStart(pid=os.getpid(), sees_functions=settings.records_functions, **counts))
    end.at_exit()


class RunEnd:
    """Stops the script on all ranks after enough updates or epochs, except with --watch."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.replay: Callable[[], None] = lambda: None  # runs when all ranks have ended
        self.overlay: Overlay | None = None

    def after_step(self) -> None:
        """Stop after twice the number of recorded updates, so that a second epoch begins if epochs are short.

        Ranks that have not communicated yet get more updates, because each rank may train something separately first.
        """
        recorder = self.recorder
        if recorder.update == 1:
            files = [_file_of(module) for module in list(sys.modules.values())]
            recorder.write(SourceFiles(files=[file for file in files if file and is_user_file(file)]))
        if not recorder.settings.records_functions:
            return
        never_communicated = recorder.num_collectives == 0 and recorder.world_size > 1
        if recorder.update >= (_UPDATES_WITHOUT_COMMUNICATION if never_communicated else 2) * recorder.settings.updates:
            self.finish()

    def finish(self) -> None:
        """End this process when the other ranks get here too, because they may need it in a collective."""
        recorder = self.recorder
        if recorder.is_done:
            return
        recorder.is_done = True
        self._report_commands()
        recorder.write(Stopped())
        (recorder.folder / f"done{recorder.rank}").touch()
        start = time.monotonic()
        while time.monotonic() < start + _WAIT_SECONDS and self._num_done() < recorder.world_size:
            time.sleep(0.05)
        self.replay()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        # otherwise other RPC workers wait in rpc.shutdown(); after an exit status other than 0 their parent ends them
        os._exit(int(recorder.calls_by_rpc))

    def _report_commands(self) -> None:
        """Report programs that the script starts, because their files are not redirected."""
        if self.overlay is not None and "wandb" in sys.modules:
            self.recorder.write(Altered(message="Weights & Biases records nothing (WANDB_MODE=disabled)"))
        if self.overlay is not None and self.overlay.commands:
            names = ", ".join(sorted(self.overlay.commands))
            message = f"the script starts {names}: files that these programs write are not redirected"
            self.recorder.write(Altered(message=message))

    def _num_done(self) -> int:
        return len(list(self.recorder.folder.glob("done*")))

    def at_exit(self) -> None:
        pid = os.getpid()

        def ended() -> None:
            if os.getpid() == pid and not self.recorder.is_done:
                self.recorder.is_done = True
                self._report_commands()
                self.recorder.write(ProcessEnd())
                (self.recorder.folder / f"done{self.recorder.rank}").touch()
                if not hasattr(sys, "last_type"):  # the script has not raised
                    self.replay()

        atexit.register(ended)


def _file_of(module: Any) -> str:
    """The file of an entry of sys.modules, or "". An entry may be any object, whose attributes may raise any error."""
    with contextlib.suppress(Exception):
        return module.__file__ if isinstance(module.__file__, str) else ""
    return ""


def _replace_function(module: Any, name: str, function: Any) -> None:
    """Replace a function of a module, so that the new one can be pickled, and called in a TorchScript function."""
    builtin = _find_builtin(getattr(module, name))
    if builtin is not None:
        _register_builtin(function, builtin)
    function.__module__, function.__qualname__ = module.__name__, name
    setattr(module, name, function)


def _watch_seeds(recorder: Recorder) -> None:
    """Record the seeds that the script sets for torch, numpy and Python."""

    def with_record(library: str, set_seed: Any) -> Any:
        @functools.wraps(set_seed)
        def seed_and_record(*args: Any, **kwargs: Any) -> Any:
            if caller_is_user_code():
                with contextlib.suppress(Exception):  # a seed may be an array, or text
                    seed: Any = args[0] if args else kwargs.get("seed", kwargs.get("a"))  # random.seed(a=0)
                    recorder.write(SeedSet(library=library, lines=user_lines()[:_MAX_CALLERS], seed=int(seed)))
            return set_seed(*args, **kwargs)

        return seed_and_record

    for library, module, name in (
        ("torch", torch, "manual_seed"),
        ("numpy", np.random, "seed"),
        ("random", random, "seed"),
    ):
        _replace_function(module, name, with_record(library, getattr(module, name)))


def _watch_shuffles(recorder: Recorder) -> None:
    """Record where the script shuffles or chooses with global generators before the first update."""
    count = 0

    def with_record(number: int, choose: Any) -> Any:
        @functools.wraps(choose)
        def choose_and_record(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if recorder.update == 0 and count < _MAX_SHUFFLES and not recorder.is_muted and caller_is_user_code():
                count += 1
                with contextlib.suppress(Exception):
                    recorder.write(Shuffle(line=user_line(), state=random_states()[number]))
            return choose(*args, **kwargs)

        return choose_and_record

    for number, module, function_names in (  # as in random_states
        (0, torch, ("randperm",)),
        (1, random, ("shuffle", "sample", "choices")),
        (2, np.random, ("shuffle", "permutation", "choice")),
    ):
        for name in function_names:
            _replace_function(module, name, with_record(number, getattr(module, name)))


def _watch_rpc(recorder: Recorder) -> None:
    """Record that the script uses RPC. Its calls are not recorded, but the training of each worker is."""
    if not rpc.is_available():
        return
    init_rpc = rpc.init_rpc

    @functools.wraps(init_rpc)
    def init(*args: Any, **kwargs: Any) -> Any:
        recorder.calls_by_rpc = True
        recorder.write(RpcStarted())
        return init_rpc(*args, **kwargs)

    rpc.init_rpc = init


def _disable_hooks_in_traces(recorder: Recorder) -> None:
    """Run torch.jit.trace without hooks, because it would record them as a part of the model."""
    for name in ("trace", "trace_module"):
        trace = getattr(torch.jit, name)

        @functools.wraps(trace)
        def traced(*args: Any, _trace: Any = trace, **kwargs: Any) -> Any:
            with recorder.muted(), torch._C.DisableTorchFunction(), _disable_current_modes():
                return _trace(*args, **kwargs)

        setattr(torch.jit, name, traced)
