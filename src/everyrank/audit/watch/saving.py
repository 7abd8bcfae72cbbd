"""Redirects files that libraries write in C, C++ or Rust, and records the files that torch saves.

See `overlay.py` for Python's own functions.
"""

from __future__ import annotations

import functools
import os
import urllib.parse
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
    ("tokenizers", "Tokenizer.save", 1, "path"),
    ("cv2", "imwrite", 0, "filename"),
    ("cv2", "VideoWriter", 0, "filename"),
    ("pyarrow", "output_stream", 0, "source"),
    ("pyarrow.csv", "write_csv", 1, "output_file"),
    ("pyarrow.csv", "CSVWriter", 0, "sink"),
    ("pyarrow.feather", "write_feather", 1, "dest"),
    ("pyarrow.ipc", "new_file", 0, "sink"),
    ("pyarrow.ipc", "new_stream", 0, "sink"),
    ("pyarrow.parquet", "write_table", 1, "where"),
    ("pyarrow.parquet", "ParquetWriter.__init__", 1, "where"),
    ("soundfile", "write", 0, "file"),
    ("torchaudio", "save", 0, "uri"),
    ("torch.autograd.profiler", "profile.export_chrome_trace", 1, "path"),
    ("torch.export", "save", 1, "f"),
    ("torch.jit", "save", 1, "f"),
    ("torch.jit", "RecursiveScriptModule.save", 1, "f"),
    ("torch.jit", "ScriptModule.save", 1, "f"),  # of traced modules
    ("torch.jit", "ScriptFunction.save", 1, "filename"),
    ("torch.package", "PackageExporter.__init__", 1, "f"),
    ("torchvision.io", "write_png", 1, "filename"),
    ("torchvision.io", "write_jpeg", 1, "filename"),
    ("torchvision.io", "write_video", 0, "filename"),
)
"""(module, function, position of the path, name of the path). Functions in C may have no signature."""

_FOLDER_WRITERS = (
    ("tokenizers.models", "Model.save", 1, "folder"),
    ("pyarrow.dataset", "write_dataset", 1, "base_dir"),
)
"""The same for functions that write several files into a folder."""

_READERS = (
    ("tokenizers", "Tokenizer.from_file", 0, "path"),
    ("cv2", "imread", 0, "filename"),
    ("cv2", "VideoCapture", 0, "filename"),
    ("pyarrow", "input_stream", 0, "source"),
    ("pyarrow.csv", "read_csv", 0, "input_file"),
    ("pyarrow.csv", "open_csv", 0, "input_file"),
    ("pyarrow.dataset", "dataset", 0, "source"),
    ("pyarrow.feather", "read_feather", 0, "source"),
    ("pyarrow.feather", "read_table", 0, "source"),
    ("pyarrow.ipc", "open_file", 0, "source"),
    ("pyarrow.ipc", "open_stream", 0, "source"),
    ("pyarrow.json", "read_json", 0, "input_file"),
    ("pyarrow.parquet", "read_table", 0, "source"),
    ("pyarrow.parquet", "ParquetFile.__init__", 1, "source"),
    ("pyarrow.parquet", "ParquetDataset.__init__", 1, "path_or_paths"),
    ("soundfile", "read", 0, "file"),
    ("soundfile", "info", 0, "file"),
    ("torchaudio", "load", 0, "uri"),
    ("torch.export", "load", 0, "f"),
    ("torch.jit", "load", 0, "f"),
    ("torch.package", "PackageImporter.__init__", 1, "file_or_buffer"),
    ("torchvision.io", "read_file", 0, "path"),
    ("torchvision.io", "read_image", 0, "path"),
    ("torchvision.io", "decode_image", 0, "input"),
    ("torchvision.io", "read_video", 0, "filename"),
)
"""The same for functions that read a file, which the script may have written."""

_OPENERS_BY_MODE = (("pyarrow", "OSFile", 0, "path"), ("pyarrow", "memory_map", 0, "path"))
"""The same for functions that read or write, which their argument `mode` tells."""


def install_saving(recorder: Recorder, overlay: Overlay) -> None:
    """Redirect the libraries, including those that are imported later."""
    _redirect_torch(recorder, overlay)
    after_import("safetensors", functools.partial(_redirect_safetensors, recorder, overlay))
    after_import("h5py", functools.partial(_redirect_h5py, overlay))
    for functions, redirect in (
        (_WRITERS, lambda path, _args, _kwargs: overlay.path_to_write(path)),
        (_FOLDER_WRITERS, lambda path, _args, _kwargs: overlay.folder_to_write(path)),
        (_READERS, lambda path, _args, _kwargs: overlay.path_to_read(path)),
        (_OPENERS_BY_MODE, functools.partial(_path_by_mode, overlay)),
        ((("sqlite3", "connect", 0, "database"),), lambda path, _args, _kwargs: _database_path(overlay, path)),
        ((("lmdb", "open", 0, "path"),), functools.partial(_lmdb_path, overlay)),
    ):
        for module, name, position, parameter in functions:
            after_import(module, functools.partial(_redirect, name, position, parameter, redirect))
    after_import("sqlite3", lambda sqlite3: setattr(sqlite3.dbapi2, "connect", sqlite3.connect))  # it has two names


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


def _redirect(name: str, position: int, parameter: str, redirect: Callable[..., Any], module: Any) -> None:
    """Redirect the path argument of a function, if this version of the library has the function.

    `redirect(path, args, kwargs)` returns the new path.
    """
    try:
        holder, name_in_holder = _find_holder(module, name)
        function = getattr(holder, name_in_holder)
    except AttributeError:
        return

    def redirected_call(*args: Any, **kwargs: Any) -> Any:
        if parameter in kwargs:
            kwargs = {**kwargs, parameter: redirect(kwargs[parameter], args, kwargs)}
        elif position < len(args):
            args = (*args[:position], redirect(args[position], args, kwargs), *args[position + 1 :])
        return function(*args, **kwargs)

    functools.update_wrapper(redirected_call, function)
    is_static = isinstance(vars(holder).get(name_in_holder), staticmethod)
    setattr(holder, name_in_holder, staticmethod(redirected_call) if is_static else redirected_call)


def _path_by_mode(overlay: Overlay, path: Any, args: Any, kwargs: Any) -> Any:
    """The path for a function whose second argument is a mode such as "rb"."""
    mode = kwargs.get("mode", args[1] if len(args) > 1 else "r")
    return overlay.path_to_read(path) if mode in ("r", "rb") else overlay.path_to_write(path, keeps_content=True)


def _database_path(overlay: Overlay, database: Any) -> Any:
    """The path or URI of a database of SQLite. Its old content is copied first, unless it is opened read-only."""
    if not isinstance(database, str | bytes | os.PathLike):
        return database
    text = os.fsdecode(database)
    if not text.startswith("file:"):
        is_on_disk = text and not text.startswith(":memory:")
        return overlay.path_to_write(database, keeps_content=True) if is_on_disk else database
    path, mark, query = text.removeprefix("file:").partition("?")
    if path.startswith("//"):  # a URI with a host, which is empty or localhost
        path = "/" + path[2:].partition("/")[2]
    if not path or path.startswith(":memory:") or "mode=memory" in query:
        return database
    is_read_only = "mode=ro" in query or "immutable=1" in query
    path = urllib.parse.unquote(path)
    new_path = overlay.path_to_read(path) if is_read_only else overlay.path_to_write(path, keeps_content=True)
    return f"file:{urllib.parse.quote(new_path)}{mark}{query}"


def _lmdb_path(overlay: Overlay, path: Any, args: Any, kwargs: Any) -> Any:
    """The path for `lmdb.open`. A database that is only read may be large, and is not copied."""
    is_read_only = kwargs.get("readonly", args[3] if len(args) > 3 else False)
    return overlay.path_to_read(path) if is_read_only else overlay.path_to_write(path, keeps_content=True)
