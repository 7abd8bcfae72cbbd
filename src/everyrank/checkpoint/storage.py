"""Writes tensors to files and reads them, by torch.distributed.checkpoint (DCP).

DCP stores its table of contents as a pickle, and values that are not tensors as pickles too. Opening a pickle can run
any code. So the table is read by an unpickler that allows only DCP's own classes, and everyrank's checkpoints contain
only tensors; the reader refuses anything else.
"""

from __future__ import annotations

import datetime
import enum
import errno
import io
import os
import pathlib
import pickle
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from everyrank.checkpoint.contents import unsaveable
from everyrank.errors import EveryrankError, UsageError
from everyrank.parallel.mesh import local_tensors
from everyrank.runs import Checkpoint, crc_of, open_file
from everyrank.strategies import Prepared
from everyrank.world import World
from everyrank.world.collectives import all_gather_json

__all__ = [
    "SaveError",
    "check_values",
    "contents_of",
    "group_for_saving",
    "read",
    "read_values",
    "text_of_rank_0",
    "write",
    "write_values",
]

_VALUES = "training.pt"
_WHOLE_NUMBERS = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
)
_OTHER_FILES_BYTES = 1 << 20  # room for about.json, training.pt and the table of contents


class SaveError(EveryrankError):
    """A checkpoint could not be written; earlier checkpoints are unchanged."""


def group_for_saving(prepared: Prepared, world: World, in_background: bool = False) -> dist.ProcessGroup | None:
    """Return a separate CPU group, because collectives of a background save must not mix with others.

    A world has one for saving and reading and one for background saves. They are cached, because each has threads that
    wake up a hundred times per second. None for a layout of one process.
    """
    if world.group is None or prepared.world.size == 1:
        return None
    groups = world.group_cache.saving
    if in_background not in groups:
        timeout = datetime.timedelta(seconds=world.timeout_seconds)
        groups[in_background] = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timeout))
    return groups[in_background]


def write(
    tensors: Mapping[str, Tensor], folder: Path, rank: int, group: dist.ProcessGroup | None
) -> dict[str, tuple[int, int]]:
    """Write the tensors of every rank; return (bytes, CRC-32) of every file, on all ranks. A collective.

    Raises `SaveError` on every rank if one could not write.
    """
    try:
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder), process_group=group)
    except CheckpointException as error:
        needed = sum(tensor.nbytes for tensor in local_tensors(list(tensors.values())))
        # the message of rank 0 on all ranks: after rank 0 has removed the files, a late rank would find free space
        raise SaveError(text_of_rank_0(_disk_full_text(folder, needed) + _first_cause(error), group)) from error
    try:
        # DCP puts the rank into the names of its files; the table of contents is rank 0's
        local_files = [path for path in folder.iterdir() if path.name.startswith(f"__{rank}_")]
        local_files += [folder / ".metadata"] if rank == 0 else []
        sums: Any = {path.name: (path.stat().st_size, crc_of(path)) for path in local_files}
    except OSError as error:
        sums = f"{error.filename}: {error.strerror}"
    rows = all_gather_json(sums, group)
    for row in rows:
        if isinstance(row, str):
            raise SaveError(row)
    return {name: (size, crc) for row in rows for name, (size, crc) in row.items()}


def text_of_rank_0(text: str, group: dist.ProcessGroup | None) -> str:
    """Rank 0's `text`, on all ranks. A collective."""
    return all_gather_json(text, group)[0]


def check_values(values: Mapping[str, Any]) -> bytes:
    """Return the values as bytes for the file. Raises `WorkloadError` for a value that needs a pickle."""
    content = io.BytesIO()
    try:
        torch.save(dict(values), content)
        torch.load(io.BytesIO(content.getvalue()), weights_only=True)
    except Exception as error:
        raise unsaveable(error) from error
    return content.getvalue()


def write_values(values: Mapping[str, Any], folder: Path) -> dict[str, tuple[int, int]]:
    """Write plain values; return {file name: (bytes, CRC-32)}. Raises `OSError`."""
    path = folder / _VALUES
    with path.open("wb") as file:
        file.write(check_values(values))
        file.flush()
        os.fsync(file.fileno())
    return {_VALUES: (path.stat().st_size, crc_of(path))}


def read_values(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read the values of `write_values`, without running code in the file."""
    try:
        return torch.load(checkpoint.path / _VALUES, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UsageError(f"{checkpoint.path / _VALUES}: cannot be read ({_line(error)})") from error


def contents_of(checkpoint: Checkpoint) -> dict[str, TensorStorageMetadata]:
    """Return name -> size and dtype of each tensor. Raises `UsageError` for a table with other entries."""
    entries: dict[str, TensorStorageMetadata] = {}
    needed = 0
    for name, entry in _Reader(checkpoint).read_metadata().state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise UsageError(
                f"{checkpoint.path}: {name!r} is not a tensor; checkpoints of everyrank contain only tensors"
            )
        try:
            needed += _bytes_of(name, entry)
        except (TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"{checkpoint.path}: {name!r} cannot be read ({error})") from error
        entries[name] = entry
    if needed > checkpoint.num_bytes:
        raise UsageError(
            f"{checkpoint.path}: its table lists {needed:,} bytes of tensors, its files have {checkpoint.num_bytes:,}"
        )
    return entries


def _bytes_of(name: Any, entry: TensorStorageMetadata) -> int:
    """Return the bytes of a tensor. Raises `TypeError` or `ValueError` for an invalid or incomplete entry."""
    if not isinstance(name, str) or not name.isprintable():
        raise ValueError("not a valid name")
    size, dtype = entry.size, entry.properties.dtype
    if not isinstance(size, torch.Size) or any(number < 0 for number in size):
        raise ValueError(f"its size is {size!r}")
    if not isinstance(dtype, torch.dtype) or not (dtype.is_floating_point or dtype in _WHOLE_NUMBERS):
        raise ValueError(f"its numbers are {dtype}")
    num_saved = sum(chunk.sizes.numel() for chunk in entry.chunks)
    if num_saved != size.numel():
        raise ValueError(f"{num_saved:,} of its {size.numel():,} numbers are saved")
    return num_saved * dtype.itemsize


def read(tensors: dict[str, Tensor], checkpoint: Checkpoint, group: dist.ProcessGroup | None = None) -> None:
    """Fill `tensors`, sharded as they are here, from a checkpoint of any layout. A collective over `group`.

    Raises `UsageError` for files that cannot be read.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # intended here
            dcp.load(tensors, storage_reader=_Reader(checkpoint), process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise UsageError(f"{checkpoint.path}: cannot be read ({_first_cause(error)})") from error


def _first_cause(error: CheckpointException) -> str:
    """Return the cause in one line: the OSError behind the error, because torch's writer hides a full disk."""
    failures = sorted(error.failures.items())
    cause: BaseException | None = failures[0][1][0] if failures else error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return _line(cause)
        cause = cause.__cause__ or cause.__context__
    return _line(failures[0][1][0] if failures else error)


def _disk_full_text(folder: Path, needed: int) -> str:
    """Return `No space left on device: FOLDER; ` if the disk is full, because torch's writer does not report it."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    return f"{os.strerror(errno.ENOSPC)}: {folder}; " if free < needed + _OTHER_FILES_BYTES else ""


def _line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _newer_torch(written_by: str) -> str:
    """Return why this torch cannot read the table, and the fix, if a newer torch has written it; else ""."""
    version = re.match(r"(\d+)\.(\d+)", written_by)
    this_version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if (
        version is None
        or this_version is None
        or tuple(map(int, version.groups())) <= tuple(map(int, this_version.groups()))
    ):
        return ""
    return (
        f". torch {written_by} wrote it, and this is torch {torch.__version__}: an older torch cannot always read what "
        f"a newer one wrote. Resume with torch {version[0]} or newer: pip install 'torch>={version[0]}'"
    )


class _Reader(dcp.FileSystemReader):
    """The reader of DCP, with `_Table` as the unpickler of the table of contents."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.path)
        self.written_by = checkpoint.metadata.versions.get("torch", "")

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with open_file(path) as file:
                metadata: object = _Table(file).load()
        except UsageError as error:
            raise UsageError(f"{path}: {error}{_newer_torch(self.written_by)}") from error
        except Exception as error:  # a broken pickle may raise any exception
            newer = _newer_torch(self.written_by)
            raise UsageError(f"{path}: not a table of contents of a checkpoint ({_line(error)}){newer}") from error
        if not isinstance(metadata, Metadata):
            raise UsageError(f"{path}: not a table of contents of a checkpoint, but {type(metadata).__name__}")
        try:
            storage: Any = metadata.storage_data
            outside = [
                info.relative_path for info in storage.values() if Path(info.relative_path).name != info.relative_path
            ]
            meta: Any = metadata.storage_meta
            if meta is not None:
                meta.load_id = self.load_id
        except (AttributeError, TypeError) as error:
            raise UsageError(f"{path}: not a table of contents of a checkpoint ({_line(error)})") from error
        if outside:
            raise UsageError(f"{path}: it points outside its folder, at {outside[0]!r}")
        if not isinstance(metadata.state_dict_metadata, dict):
            raise UsageError(
                f"{path}: not a table of contents of a checkpoint ({type(metadata.state_dict_metadata).__name__})"
            )
        return metadata


def _enum_member(enum_class: Any, name: Any) -> Any:
    """Return a member of an enum class by its name. `_Table` has it in place of `getattr`, which returns any method."""
    if isinstance(enum_class, enum.EnumMeta) and isinstance(name, str) and name in enum_class.__members__:
        return enum_class[name]
    raise UsageError("it needs 'builtins.getattr' on more than an enum: opening it could run code")


class _Table(pickle.Unpickler):
    """An unpickler that creates only the classes with which DCP describes tensors."""

    _DCP = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    _CLASSES = (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
        "_StorageInfo",
    )

    def find_class(self, module: str, name: str) -> Any:
        if module in self._DCP and name in self._CLASSES:
            return super().find_class(module, name)
        if (module, name) in (("torch", "Size"), ("torch.serialization", "_get_layout")):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member  # Python 3.11.2 (Debian 12) pickles a member of an enum as getattr(class, name)
        if module in ("pathlib", "pathlib._local") and name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath"):
            return pathlib.PurePath
        raise UsageError(f"it needs {f'{module}.{name}'!r}, which no checkpoint needs: opening it could run code")
