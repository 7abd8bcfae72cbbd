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

from everyrank.audit.watch.overlay import Overlay
from everyrank.audit.watch.place import where
from everyrank.audit.watch.pretend_cuda import PretendCuda
from everyrank.audit.watch.saving import install_saving
from everyrank.rerun.batch_sizes import with_larger_batches_in_words
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
from everyrank.rerun.inside.setup import kept_rng
from everyrank.rerun.inside.sources import run_with_sources
from everyrank.rerun.inside.steps import install_step_hooks

__all__ = ["run_as_rank"]

_MOST_WRITES = 1000


def run_as_rank(settings: dict[str, Any], rank: int, overlay: Overlay) -> None:
    """Run the script as `python script.py ...` would, under all hooks, and write the recording at its end."""
    session = Session(settings, rank)
    if settings["seed"] is not None:
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(settings["seed"] + rank)
    pretend = PretendCuda(settings["devices"]) if settings["devices"] else None
    if pretend is not None:
        pretend.install()
    torch.compile = lambda model=None, *_args, **_kwargs: model if model is not None else (lambda function: function)
    torch.nn.Module.compile = lambda *_args, **_kwargs: None
    if settings["float64"]:
        install_float64()
    if settings["without_checkpointing"]:
        _keep_activations()
    else:
        _note_checkpointing(session)
    install_saving(_Saves(session), overlay)  # type: ignore[arg-type]
    _note_loads(session)
    _note_hooks(session)
    _keep_groups()
    _refuse_absent_ranks()
    modules = install_module_names(session)
    install_norms(session)
    install_batches(session)
    install_printed(session)
    install_clock()
    _note_writes(session)
    if settings["expressions"]:
        install_expressions(session)
    if settings["without_dropout"]:
        _leave_out_dropout()
    install_step_hooks(session, modules)
    if session.compares:
        install_number_draws(session)
    modes = install_draws(session, pretend)
    session.facts["rng"] = kept_rng
    try:
        with modes:
            _run_script(session)
    except BaseException:
        session.write()
        raise
    session.facts["came_to_end"] = True
    session.finish()


def _run_script(session: Session) -> None:
    settings = session.settings
    words = list(settings["words"])
    if settings["larger"]:
        words = with_larger_batches_in_words(words, len(session.imposed))
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0:0] = [str(Path.cwd())]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = words
    sys.path[0:0] = [str(Path(words[0]).absolute().parent)]
    if settings["order"] or settings["expressions"] or settings["only_rates"]:
        runpy.run_path(words[0], run_name="__main__")
    else:
        run_with_sources(session, words[0])


def _note_checkpointing(session: Session) -> None:
    """Note the lines that use activation checkpointing."""
    import torch.utils.checkpoint as module

    for name in ("checkpoint", "checkpoint_sequential"):
        original = getattr(module, name)

        def noted(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            lines, place = session.facts.setdefault("checkpointing", []), where()
            if place not in lines:
                lines.append(place)
            return _original(*args, **kwargs)

        setattr(module, name, functools.wraps(original)(noted))


def _keep_groups() -> None:
    """Keep process groups until the rank ends: freeing one waits for its threads, which may wait for Python's lock."""
    destroy, kept = dist.destroy_process_group, list[Any]()

    @functools.wraps(destroy)
    def destroyed(*args: Any, **kwargs: Any) -> None:
        if dist.is_initialized():
            kept.append(dist.group.WORLD)
        destroy(*args, **kwargs)

    dist.destroy_process_group = destroyed


def _refuse_absent_ranks() -> None:
    """Let a message to or from a rank that does not exist fail: gloo would wait for it."""
    for name in ("send", "recv", "isend", "irecv"):
        original = getattr(dist, name)

        def checked(tensor: Any, peer: Any = None, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            number = kwargs.get("dst", kwargs.get("src", peer))
            if isinstance(number, int) and number >= dist.get_world_size():
                raise ValueError(f"a message to or from rank {number}, which one rank alone does not have")
            return _original(tensor, *(() if peer is None else (peer,)), *args, **kwargs)

        setattr(dist, name, functools.wraps(original)(checked))


def _note_loads(session: Session) -> None:
    """Note the lines that load a file."""
    load = torch.load

    @functools.wraps(load)
    def loaded(*args: Any, **kwargs: Any) -> Any:
        session.facts.setdefault("loads", []).append(where())
        return load(*args, **kwargs)

    torch.load = loaded


def _note_hooks(session: Session) -> None:
    """Note the line that registers a communication hook of DistributedDataParallel."""
    wrapper: Any = torch.nn.parallel.DistributedDataParallel
    register = wrapper.register_comm_hook

    @functools.wraps(register)
    def registered(*args: Any, **kwargs: Any) -> None:
        session.facts.setdefault("comm_hook", where())
        register(*args, **kwargs)

    wrapper.register_comm_hook = registered


def _keep_activations() -> None:
    """Let activation checkpointing call its function directly, which must not change a gradient."""
    import torch.utils.checkpoint as module

    own = {"use_reentrant", "context_fn", "determinism_check", "debug", "preserve_rng_state", "early_stop"}

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **{name: value for name, value in kwargs.items() if name not in own})

    module.checkpoint = call
    module.checkpoint_sequential = lambda functions, _segments, value, **_kwargs: (
        torch.nn.Sequential(*functions)(value) if isinstance(functions, list | tuple) else functions(value)
    )


def _leave_out_dropout() -> None:
    """Let every kind of dropout return its input."""
    functional: Any = torch.nn.functional
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        setattr(functional, name, lambda input, *_args, **_kwargs: input)  # noqa: A006  (torch's name)
    attention = functional.scaled_dot_product_attention

    @functools.wraps(attention)
    def without(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **kwargs: Any) -> Any:
        del dropout_p
        return attention(query, key, value, attn_mask=attn_mask, dropout_p=0.0, **kwargs)

    functional.scaled_dot_product_attention = without
    init = torch.nn.RNNBase.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.dropout = 0.0

    torch.nn.RNNBase.__init__ = made


def _note_writes(session: Session) -> None:
    """Note which files of the user this rank writes, and where."""
    written: list[list[str]] = session.facts.setdefault("written", [])
    original = builtins.open

    @functools.wraps(original)
    def opened(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
        if session.is_active and isinstance(mode, str) and set(mode) & set("wax") and isinstance(file, str | Path):
            entry = [os.path.abspath(file), where()]  # noqa: PTH100
            if entry[0] != os.devnull and entry[1] and entry not in written and len(written) < _MOST_WRITES:
                written.append(entry)
        return original(file, mode, *args, **kwargs)

    builtins.open = opened


class _Saves:
    """The part of a recorder that redirected libraries need. It notes what torch saves, with its keys."""

    def __init__(self, session: Session) -> None:
        self.session, self.muted, self.saved = session, session.quiet, session.facts.setdefault("saved", [])

    def write(self, event: Any) -> None:
        """Note a save, and the updates before it."""
        if not self.session.is_active:
            return  # the recording itself
        self.session.on_save()
        if len(self.saved) < _MOST_WRITES:
            self.saved.append([event.path, event.line, event.keys])
            self.session.facts.setdefault("saved_after", []).append([event.path, self.session.update, event.line])
