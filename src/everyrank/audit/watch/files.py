"""What the script writes goes into a folder of the audit's: nothing of the person's is changed.

Python's own ways to files are redirected: open, os.open, mkdir, rename, remove, and the questions that go with them;
and `torch.save`, safetensors and tokenizers, which open files in C++ and Rust. What was written is found again under
the name that the script gave. Temporary folders, caches and devices are left alone, as is what other C++ code writes.
"""

# pyright: basic
from __future__ import annotations

import builtins
import functools
import io
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

from everyrank.audit.watch.place import where
from everyrank.audit.watch.recorder import Recorder

__all__ = ["install_files"]

_WRITES = set("wax+")


class Overlay:
    """A second tree of folders: what is written lies there, what is read is looked for there first."""

    def __init__(self, recorder: Recorder, folder: Path) -> None:
        self.recorder = recorder
        self.folder = str(folder)
        self.started = os.path.realpath(os.getcwd())  # noqa: PTH109
        main = os.path.dirname(recorder.settings.main)  # noqa: PTH120
        self.main = os.path.realpath(main) if main else ""
        self.inside = threading.local()  # what we ask ourselves is not redirected
        left = [tempfile.gettempdir(), "/dev", "/proc", "/sys", os.path.expanduser("~/.cache"), str(recorder.folder)]  # noqa: PTH111
        left += [os.environ[name] for name in ("TORCH_HOME", "HF_HOME", "XDG_CACHE_HOME") if os.environ.get(name)]
        self.left = tuple(os.path.realpath(place) + os.sep for place in left)

    def is_left(self, path: str) -> bool:
        """Whether it is written where the script says."""
        if "__pycache__" in path:
            return True
        return (os.path.realpath(path) + os.sep).startswith(self.left) and not self.is_of_the_project(path)

    def is_of_the_project(self, path: str) -> bool:
        """A project may itself lie in a temporary folder: where the script is, or where it was started."""
        real = os.path.realpath(path)
        if os.path.dirname(real) == self.started:  # noqa: PTH120
            return True
        folders = [folder for folder in (self.started, self.main) if folder and folder + os.sep not in self.left]
        return any(real.startswith(folder + os.sep) for folder in folders)

    def exists(self, path: Any) -> bool:
        """Whether there is such a file, as it was before anything was redirected."""
        try:
            _lstat(path)
        except (OSError, ValueError):
            return False
        return True

    def copy(self, path: Any) -> str | None:
        """Where a path of the script's lies in the second tree; None for what is left alone."""
        if getattr(self.inside, "is_busy", False) or self.recorder.is_muted:
            return None
        self.inside.is_busy = True
        try:
            if not isinstance(path, str | bytes | os.PathLike):
                return None  # a descriptor
            whole = os.path.abspath(os.fsdecode(path))  # noqa: PTH100
            return None if whole.startswith(self.folder) or self.is_left(whole) else self.folder + whole
        finally:
            self.inside.is_busy = False

    def found(self, path: Any) -> Any:
        """The copy, where there is one."""
        copied = self.copy(path)
        return copied if copied is not None and self.exists(copied) else path

    def written(self, path: Any) -> Any:
        """Where it is to be written."""
        copied = self.copy(path)
        if copied is None:
            return path
        folder = os.path.dirname(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100, PTH120
        if not (self.exists(folder) or self.exists(self.folder + folder)):
            return path  # the script is told that there is no such folder
        _makedirs(os.path.dirname(copied), exist_ok=True)  # noqa: PTH120
        return copied


_makedirs, _lstat = os.makedirs, os.lstat


def install_files(recorder: Recorder, folder: Path) -> None:
    """Redirect what is written, unless the settings say that it is to stay."""
    overlay = Overlay(recorder, folder)
    _redirect_open(overlay)
    _redirect_saving(overlay)
    _redirect_folders(overlay)


def _redirect_open(overlay: Overlay) -> None:
    real_open, os_open = builtins.open, os.open

    @functools.wraps(real_open)
    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, int):
            return real_open(file, mode, *args, **kwargs)
        if _WRITES.intersection(mode):
            place = overlay.written(file)
            if place is not file and ("a" in mode or "r" in mode) and not overlay.exists(place):
                _copy_content(real_open, file, place)
            return real_open(place, mode, *args, **kwargs)
        return real_open(overlay.found(file), mode, *args, **kwargs)

    @functools.wraps(os_open)
    def opened_low(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and kwargs.get("dir_fd") is None:
            return os_open(overlay.written(path), flags, *args, **kwargs)
        return os_open(overlay.found(path), flags, *args, **kwargs)

    builtins.open = io.open = opened
    os.open = opened_low


def _copy_content(real_open: Any, source: Any, target: str) -> None:
    """What is added to, or changed within, begins as it was."""
    if os.path.isfile(source):  # noqa: PTH113
        with real_open(source, "rb") as before, real_open(target, "wb") as after:
            after.write(before.read())


def _redirect_saving(overlay: Overlay) -> None:
    save, load = torch.save, torch.load

    @functools.wraps(save)
    def saved(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        recorder = overlay.recorder
        name = f if isinstance(f, str | os.PathLike) else getattr(f, "name", None)  # a file that is open already
        if isinstance(name, str | os.PathLike) and not recorder.is_muted:
            content = sorted(map(str, obj)) if isinstance(obj, dict) else []
            path = os.path.abspath(os.fspath(name)).removeprefix(overlay.folder)  # noqa: PTH100
            recorder.event("save", path=path, line=where(), content=content[:100])
            f = overlay.written(f) if name is f else f
        with recorder.muted():
            save(obj, f, *args, **kwargs)

    @functools.wraps(load)
    def loaded(f: Any, *args: Any, **kwargs: Any) -> Any:
        return load(overlay.found(f) if isinstance(f, str | os.PathLike) else f, *args, **kwargs)

    torch.save, torch.load = saved, loaded
    _redirect_safetensors(overlay)
    _redirect_tokenizers(overlay)


def _redirect_safetensors(overlay: Overlay) -> None:
    """It writes and reads in Rust; where it is installed."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        return
    serialize_file, safe_open = safetensors.serialize_file, safetensors.safe_open

    @functools.wraps(serialize_file)
    def saved(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
        overlay.recorder.event("save", path=os.path.abspath(os.fspath(filename)), line=where(), content=[])  # noqa: PTH100
        serialize_file(tensors, overlay.written(filename), *args, **kwargs)

    @functools.wraps(safe_open)
    def opened(filename: Any, *args: Any, **kwargs: Any) -> Any:
        return safe_open(overlay.found(filename), *args, **kwargs)

    for module in (safetensors, safetensors.torch):
        module.__dict__.update(serialize_file=saved, safe_open=opened)


def _redirect_tokenizers(overlay: Overlay) -> None:
    """It writes in Rust, too."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return
    save = Tokenizer.save

    @functools.wraps(save)
    def saved(self: Any, path: str, *args: Any, **kwargs: Any) -> None:
        save(self, str(overlay.written(path)), *args, **kwargs)

    Tokenizer.save = saved


def _redirect_folders(overlay: Overlay) -> None:
    """Mkdir and its like change the second tree alone; questions look there first."""
    for name in ("stat", "lstat", "access", "listdir", "scandir", "chdir"):
        setattr(os, name, _asking(getattr(os, name), overlay))
    os.path.exists = _exists(overlay)
    mkdir, remove, rmdir = os.mkdir, os.remove, os.rmdir

    @functools.wraps(mkdir)
    def made(path: Any, *args: Any, **kwargs: Any) -> None:
        copied = overlay.copy(path) if kwargs.get("dir_fd") is None else None
        if copied is None or overlay.exists(path):
            mkdir(path, *args, **kwargs)  # where it is there already: the error that the script expects
            return
        parent = os.path.dirname(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100, PTH120
        if overlay.exists(parent):
            with overlay.recorder.muted():
                _makedirs(os.path.dirname(copied), exist_ok=True)  # noqa: PTH120
        mkdir(copied, *args, **kwargs)

    def _removing(function: Any) -> Any:
        @functools.wraps(function)
        def removed(path: Any, *args: Any, **kwargs: Any) -> None:
            copied = overlay.copy(path) if kwargs.get("dir_fd") is None else None
            if copied is None:
                function(path, *args, **kwargs)
            elif overlay.exists(copied):
                function(copied, *args, **kwargs)
            elif not overlay.exists(path):
                raise FileNotFoundError(2, "No such file or directory", str(path))

        return removed

    os.mkdir = made
    os.remove = os.unlink = _removing(remove)
    os.rmdir = _removing(rmdir)
    os.chmod, os.utime = _changing(os.chmod, overlay), _changing(os.utime, overlay)
    os.rename, os.replace = _renaming(os.rename, overlay), _renaming(os.replace, overlay)


def _changing(function: Any, overlay: Overlay) -> Any:
    """Rights and times of a copy; those of the person's files stay."""

    @functools.wraps(function)
    def changed(path: Any, *args: Any, **kwargs: Any) -> None:
        copied = overlay.copy(path) if kwargs.get("dir_fd") is None else None
        if copied is None or not (overlay.exists(copied) or overlay.exists(path)):
            function(path, *args, **kwargs)
        elif overlay.exists(copied):
            function(copied, *args, **kwargs)

    return changed


def _asking(function: Any, overlay: Overlay) -> Any:
    @functools.wraps(function)
    def asked(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        return function(overlay.found(path) if kwargs.get("dir_fd") is None else path, *args, **kwargs)

    return asked


def _exists(overlay: Overlay) -> Any:
    exists = os.path.exists

    @functools.wraps(exists)
    def asked(path: Any) -> bool:
        return exists(overlay.found(path))

    return asked


def _renaming(function: Any, overlay: Overlay) -> Any:
    @functools.wraps(function)
    def renamed(source: Any, target: Any, **kwargs: Any) -> None:
        copied = overlay.copy(target)
        if copied is None:
            function(overlay.found(source), target, **kwargs)
            return
        place = overlay.written(target)
        if overlay.found(source) is source:  # of the person's: it stays
            _copy_content(open, source, place)
        else:
            function(overlay.found(source), place, **kwargs)

    return renamed
