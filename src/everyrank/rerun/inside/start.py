"""Installs the hooks in a forked rank, and runs the script there."""

from __future__ import annotations

import builtins
import functools
import os
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from everyrank.audit.watch.compilation import skip_compilation
from everyrank.audit.watch.overlay import Overlay
from everyrank.audit.watch.pretend_cuda import PretendCuda
from everyrank.audit.watch.saving import install_saving
from everyrank.audit.watch.source_location import user_line
from everyrank.rerun.batch_sizes import with_larger_batches_in_args
from everyrank.rerun.inside.batches import install_batches
from everyrank.rerun.inside.clock import install_clock
from everyrank.rerun.inside.draws import install_draws
from everyrank.rerun.inside.expressions import install_expressions
from everyrank.rerun.inside.modules import install_module_names
from everyrank.rerun.inside.norms import install_norms
from everyrank.rerun.inside.numbers import install_number_draws
from everyrank.rerun.inside.precision import install_float64
from everyrank.rerun.inside.printed import install_printed
from everyrank.rerun.inside.session import Session
from everyrank.rerun.inside.setup import saved_rng
from everyrank.rerun.inside.sources import run_with_sources
from everyrank.rerun.inside.steps import install_step_hooks

__all__ = ["run_as_rank"]

_MAX_WRITES = 1000


def run_as_rank(settings: dict[str, Any], rank: int, overlay: Overlay) -> None:
    """Run the script like `python script.py ...`, with all hooks, and write the recording at its end."""
    session = Session(settings, rank)
    if settings["seed"] is not None:
        for set_seed in (torch.manual_seed, np.random.seed, random.seed):
            set_seed(settings["seed"] + rank)
    pretend = PretendCuda(settings["devices"]) if settings["devices"] else None
    if pretend is not None:
        pretend.install()
    skip_compilation(lambda: None)
    if settings["float64"]:
        install_float64()
    if settings["without_checkpointing"]:
        _disable_checkpointing()
    else:
        _record_checkpointing(session)
    install_saving(_SaveRecorder(session), overlay)  # type: ignore[arg-type]
    _record_loads(session)
    _record_comm_hooks(session)
    _keep_process_groups()
    _reject_absent_ranks()
    modules = install_module_names(session)
    install_norms(session)
    install_batches(session)
    install_printed(session)
    install_clock()
    _record_writes(session)
    if settings["expressions"]:
        install_expressions(session)
    if settings["without_dropout"]:
        _disable_dropout()
    install_step_hooks(session, modules)
    if session.compares:
        install_number_draws(session)
    modes = install_draws(session, pretend)
    session.facts["rng"] = saved_rng
    try:
        with modes:
            _run_script(session)
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):  # sys.exit(main()) is the end of a script
            session.write()
            raise
    session.facts["came_to_end"] = True
    session.finish()


def _run_script(session: Session) -> None:
    settings = session.settings
    python_args = list(settings["python_args"])
    if settings["larger"]:
        python_args = with_larger_batches_in_args(python_args, len(session.imposed))
    if python_args[0] == "-m":
        sys.argv = python_args[1:]
        sys.path[0:0] = [str(Path.cwd())]
        runpy.run_module(python_args[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = python_args
    path = Path(python_args[0]).absolute()  # Python also makes `__file__` absolute
    sys.path[0:0] = [str((path.resolve() if path.is_symlink() else path).parent)]
    if settings["order"] or settings["expressions"] or settings["only_rates"]:
        runpy.run_path(str(path), run_name="__main__")
    else:
        run_with_sources(session, str(path))


def _record_checkpointing(session: Session) -> None:
    """Record the lines that use activation checkpointing."""
    import torch.utils.checkpoint as module

    for name in ("checkpoint", "checkpoint_sequential"):
        original = getattr(module, name)

        def recorded_call(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            lines, line = session.facts.setdefault("checkpointing", []), user_line()
            if line not in lines:
                lines.append(line)
            return _original(*args, **kwargs)

        setattr(module, name, functools.wraps(original)(recorded_call))


def _keep_process_groups() -> None:
    """Keep process groups until the rank ends, because freeing one may deadlock: its threads may wait for the GIL."""
    destroy, kept_groups = dist.destroy_process_group, list[Any]()

    @functools.wraps(destroy)
    def destroy_and_keep(*args: Any, **kwargs: Any) -> None:
        if dist.is_initialized():
            kept_groups.append(dist.group.WORLD)
        destroy(*args, **kwargs)

    dist.destroy_process_group = destroy_and_keep


def _reject_absent_ranks() -> None:
    """Raise an error for a message to or from a rank that does not exist, because gloo would wait for it."""
    for name in ("send", "recv", "isend", "irecv"):
        original = getattr(dist, name)

        def checked(tensor: Any, peer: Any = None, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            peer_rank = kwargs.get("dst", kwargs.get("src", peer))
            if isinstance(peer_rank, int) and peer_rank >= dist.get_world_size():
                ranks = dist.get_world_size()
                raise ValueError(
                    f"a message to or from rank {peer_rank}, which does not exist in a run with WORLD_SIZE={ranks}"
                )
            return _original(tensor, *(() if peer is None else (peer,)), *args, **kwargs)

        wrapper = functools.wraps(original)(checked)
        setattr(dist, name, wrapper)
        setattr(dist.distributed_c10d, name, wrapper)  # P2POp compares its operation with the functions there


def _record_loads(session: Session) -> None:
    """Record the lines that load a file."""
    load = torch.load

    @functools.wraps(load)
    def record_and_load(*args: Any, **kwargs: Any) -> Any:
        session.facts.setdefault("loads", []).append(user_line())
        return load(*args, **kwargs)

    torch.load = record_and_load


def _record_comm_hooks(session: Session) -> None:
    """Record the line that registers a communication hook of DistributedDataParallel."""
    wrapper: Any = torch.nn.parallel.DistributedDataParallel
    register = wrapper.register_comm_hook

    @functools.wraps(register)
    def record_and_register(*args: Any, **kwargs: Any) -> None:
        session.facts.setdefault("comm_hook", user_line())
        register(*args, **kwargs)

    wrapper.register_comm_hook = record_and_register


def _disable_checkpointing() -> None:
    """Replace activation checkpointing by a direct call of the function, which must not change a gradient."""
    import torch.utils.checkpoint as module

    checkpoint_options = {
        "use_reentrant",
        "context_fn",
        "determinism_check",
        "debug",
        "preserve_rng_state",
        "early_stop",
    }

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **{name: value for name, value in kwargs.items() if name not in checkpoint_options})

    def call_in_sequence(functions: Any, segments: Any, input: Any, **_kwargs: Any) -> Any:  # noqa: A002  (torch's name)
        del segments
        for function in functions:  # of a list, or of nn.Sequential
            input = function(input)  # noqa: A001
        return input

    module.checkpoint = call
    module.checkpoint_sequential = call_in_sequence


def _disable_dropout() -> None:
    """Replace all kinds of dropout by functions that return their input."""
    functional: Any = torch.nn.functional
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        setattr(functional, name, lambda input, *_args, **_kwargs: input)  # noqa: A006  (torch's name)
    attention = functional.scaled_dot_product_attention

    @functools.wraps(attention)
    def attention_without_dropout(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
    ) -> Any:
        del dropout_p
        return attention(query, key, value, attn_mask, 0.0, *args, **kwargs)

    functional.scaled_dot_product_attention = attention_without_dropout
    init = torch.nn.RNNBase.__init__

    def init_without_dropout(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.dropout = 0.0

    torch.nn.RNNBase.__init__ = init_without_dropout


def _record_writes(session: Session) -> None:
    """Record the files that this rank writes, and the lines that write them."""
    written: list[list[str]] = session.facts.setdefault("written", [])
    original = builtins.open

    @functools.wraps(original)
    def record_and_open(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
        if session.is_active and isinstance(mode, str) and set(mode) & set("wax") and isinstance(file, str | Path):
            entry = [os.path.abspath(file), user_line()]  # noqa: PTH100
            if entry[0] != os.devnull and entry[1] and entry not in written and len(written) < _MAX_WRITES:
                written.append(entry)
        return original(file, mode, *args, **kwargs)

    builtins.open = record_and_open


class _SaveRecorder:
    """Records what torch saves. Has the methods of the audit's recorder that redirected libraries need."""

    def __init__(self, session: Session) -> None:
        self.session, self.muted, self.saved = session, session.quiet, session.facts.setdefault("saved", [])

    def write(self, event: Any) -> None:
        """Record a save, and the number of updates before it."""
        if not self.session.is_active:
            return  # the recording itself
        self.session.on_save()
        if len(self.saved) < _MAX_WRITES:
            self.saved.append([event.path, event.line, event.keys])
            self.session.facts.setdefault("saved_after", []).append([event.path, self.session.update, event.line])
