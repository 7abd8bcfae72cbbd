"""Redirects files that libraries write in C, C++ or Rust, and records the files that torch saves.

See `overlay.py` for Python's own functions.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch

from everyrank.audit.events import Save
from everyrank.audit.watch.imports import after_import
from everyrank.audit.watch.overlay import Overlay
from everyrank.audit.watch.recorder import Recorder
from everyrank.audit.watch.source_location import user_line

__all__ = ["install_saving"]

_WRITERS = (
    ("tokenizers", "Tokenizer.save", "path"),
    ("cv2", "imwrite", 0),
    ("cv2", "VideoWriter", 0),
    ("pyarrow", "OSFile", 0),
    ("pyarrow.parquet", "write_table", "where"),
    ("soundfile", "write", "file"),
    ("torchaudio", "save", "uri"),
    ("torch.jit", "save", "f"),
    ("torchvision.io", "write_png", "filename"),
    ("torchvision.io", "write_jpeg", "filename"),
    ("torchvision.io", "write_video", "filename"),
)
"""(module, function, parameter of the path: its name, or its position in a function that is written in C)"""

_OPENERS = (("sqlite3", "connect", 0), ("lmdb", "open", 0))
"""The same for functions that open a file for reading and writing, so that its old content is copied first."""


def install_saving(recorder: Recorder, overlay: Overlay) -> None:
    """Redirect the libraries, including those that are imported later."""
    _redirect_torch(recorder, overlay)
    after_import("safetensors", functools.partial(_redirect_safetensors, recorder, overlay))
    after_import("h5py", functools.partial(_redirect_h5py, overlay))
    for module, name, path_parameter in _WRITERS:
        after_import(module, functools.partial(_redirect, name, path_parameter, overlay.path_to_write))
    for module, name, path_parameter in _OPENERS:
        after_import(module, functools.partial(_redirect_opener, overlay, name, path_parameter))


def _redirect_torch(recorder: Recorder, overlay: Overlay) -> None:
    save, load = torch.save, torch.load

    @functools.wraps(save)
    def save_and_record(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        name = f if isinstance(f, str | os.PathLike) else getattr(f, "name", None)  # an open file
        if isinstance(name, str | os.PathLike):
            keys = sorted(map(str, obj)) if isinstance(obj, dict) else []
            path = overlay.as_script_sees(os.path.abspath(os.fspath(name)))
            recorder.write(Save(path=path, line=user_line(), keys=keys[:100]))
            f = overlay.path_to_write(f) if name is f else f
        with recorder.muted():
            save(obj, f, *args, **kwargs)

    @functools.wraps(load)
    def redirected_load(f: Any, *args: Any, **kwargs: Any) -> Any:
        return load(overlay.path_to_read(f) if isinstance(f, str | os.PathLike) else f, *args, **kwargs)

    torch.save, torch.load = save_and_record, redirected_load


def _redirect_safetensors(recorder: Recorder, overlay: Overlay, module: Any) -> None:
    serialize_file, safe_open = module.serialize_file, module.safe_open

    @functools.wraps(serialize_file)
    def saved(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
        recorder.write(Save(path=os.path.abspath(os.fspath(filename)), line=user_line(), keys=[]))
        serialize_file(tensors, overlay.path_to_write(filename), *args, **kwargs)

    @functools.wraps(safe_open)
    def redirected_open(filename: Any, *args: Any, **kwargs: Any) -> Any:
        return safe_open(overlay.path_to_read(filename), *args, **kwargs)

    def replace(inner: Any) -> None:
        inner.__dict__.update(serialize_file=saved, safe_open=redirected_open)

    replace(module)
    after_import("safetensors.torch", replace)


def _redirect_h5py(overlay: Overlay, module: Any) -> None:
    """Redirect h5py. A file that is only read is not copied, because it may be a large dataset."""
    init = module.File.__init__

    @functools.wraps(init)
    def redirected_open(self: Any, name: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:
        if isinstance(name, str | bytes | os.PathLike):
            keeps = mode in ("r+", "a")
            name = overlay.path_to_read(name) if mode == "r" else overlay.path_to_write(name, keeps_content=keeps)
        init(self, name, mode, *args, **kwargs)

    module.File.__init__ = redirected_open


def _find_holder(module: Any, name: str) -> tuple[Any, str]:
    """The module or class that has the function, and the function's name in it."""
    *outer, last = name.split(".")
    for attribute in outer:
        module = getattr(module, attribute)
    return module, last


def _redirect(name: str, path_parameter: str | int, redirected: Callable[..., Any], module: Any) -> None:
    """Redirect the path argument of a function, if this version of the library has the function."""
    try:
        holder, name_in_holder = _find_holder(module, name)
        function = getattr(holder, name_in_holder)
    except AttributeError:
        return

    def redirected_call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _with_path(function, path_parameter, redirected, args, kwargs)
        return function(*args, **kwargs)

    functools.update_wrapper(redirected_call, function)
    setattr(holder, name_in_holder, redirected_call)


def _redirect_opener(overlay: Overlay, name: str, path_parameter: str | int, module: Any) -> None:
    def redirected(database: Any) -> Any:
        if not isinstance(database, str | bytes | os.PathLike) or str(database).startswith((":memory:", "file:")):
            return database
        return overlay.path_to_write(database, keeps_content=True)

    _redirect(name, path_parameter, redirected, module)
    if name == "connect":  # sqlite3.connect is also in sqlite3.dbapi2
        module.dbapi2.connect = module.connect


def _with_path(function: Any, path_parameter: str | int, redirected: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The arguments of a call with the redirected path."""
    if isinstance(path_parameter, str) and path_parameter in kwargs:
        return args, {**kwargs, path_parameter: redirected(kwargs[path_parameter])}
    index = (
        path_parameter
        if isinstance(path_parameter, int)
        else list(inspect.signature(function).parameters).index(path_parameter)
    )
    if index < len(args):
        return (*args[:index], redirected(args[index]), *args[index + 1 :]), kwargs
    return args, kwargs
