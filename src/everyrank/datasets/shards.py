"""Files of many samples each: lines of text, JSONL, tar files in the WebDataset layout.

Each dataset scans its files once for the start of each sample, without decoding any. It can then read samples in any
order, so it supports both values of `Workload.order`. With "global", any rank may read any sample. With "shard", each
rank reads only some of the files; `shard_sizes` is the number of samples in each file.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import json
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from everyrank.errors import EveryrankError, WorkloadError

__all__ = ["JsonLines", "TarShards", "TextLines", "checksum_of_names_and_sizes", "files_in"]


def files_in(path: Path, suffixes: Sequence[str]) -> list[Path]:
    """List `path` if it is a file, or the files with one of these suffixes in the folder `path`, sorted.

    Subfolders are included, hidden files and folders are not. Without suffixes, files of any suffix are listed.

    Raises `WorkloadError` if there are none.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise WorkloadError(f"{path}: no such file or folder")
    paths = sorted(
        file
        for file in path.rglob("*")
        if file.is_file()
        and not any(component.startswith(".") for component in file.relative_to(path).parts)
        and (not suffixes or file.suffix.lower() in suffixes)
    )
    if not paths:
        kinds = ", ".join(f"*{suffix}" for suffix in suffixes) or "files"
        raise WorkloadError(f"{path}: no {kinds} there")
    return paths


def checksum_of_names_and_sizes(files: Sequence[Path]) -> str:
    """The SHA-256 checksum of the names and sizes of files, as text."""
    names_and_sizes = "\n".join(f"{path.name} {path.stat().st_size}" for path in files)
    content = names_and_sizes.encode("utf-8", "surrogateescape")
    return f"sha256 of names and sizes: {hashlib.sha256(content).hexdigest()}"


_CHUNK = 1 << 24
_TAR_BLOCK = 512
_SHORT_LINE = 8  # bytes: a longer line of nothing but blanks is taken for text
_BZIP2 = tuple(b"BZh%d1AY&SY" % level for level in range(1, 10))  # a text may begin with BZh
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", *_BZIP2)  # gzip, zstd, xz, bzip2


class _Files(Dataset[Any]):
    """A dataset whose indices run over the samples of all files. `shard_sizes` is the number of samples in each.

    random  whether `to_sample` draws random numbers
    """

    def __init__(self, files: Sequence[Path], sizes: Sequence[int], random: bool) -> None:
        self.files = list(files)
        self.shard_sizes = list(sizes)
        self.starts = np.concatenate([[0], np.cumsum(self.shard_sizes)]).astype(np.int64)
        self.deterministic = not random

    @functools.cached_property
    def checksum(self) -> str:
        """The checksum of the names and sizes of all files, computed at first use. Only rank 0 needs it."""
        return checksum_of_names_and_sizes(self.files)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def file_position(self, index: int) -> tuple[int, int]:
        """Return the number of the file that contains a sample, and the number of the sample in this file."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        file = int(np.searchsorted(self.starts, index, side="right")) - 1
        return file, index - int(self.starts[file])


class _Lines(_Files):
    """Lines that are not blank. A blank line of more than `_SHORT_LINE` bytes counts as text."""

    def __init__(self, files: Sequence[Path], random: bool) -> None:
        self.borders = [_line_borders(path) for path in files]
        super().__init__(files, [len(borders) for borders in self.borders], random)

    def line(self, index: int) -> tuple[Path, int, bytes]:
        """(file, number of the sample in it, bytes of the line)."""
        file, inside = self.file_position(index)
        start, end = self.borders[file][inside].tolist()
        with self.files[file].open("rb") as opened:
            opened.seek(start)
            return self.files[file], inside, opened.read(end - start).removesuffix(b"\r")


def _line_borders(path: Path) -> Any:
    """Return where each line that is not blank starts and ends, without its newline, as an array (lines, 2)."""
    begins: list[Any] = []
    offset = 0
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                if offset == 0 and chunk.startswith(_COMPRESSED):
                    raise WorkloadError(f"{path}: compressed, so single lines cannot be read; decompress the file")
                begins.append(np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n")) + (offset + 1))
                offset += len(chunk)
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read ({error.strerror})") from error
    starts = np.concatenate([np.zeros(1, dtype=np.int64), *begins])
    ends = np.append(starts[1:] - 1, size)
    borders = np.stack([starts, ends], axis=1)
    return borders[_has_content(path, borders)]


def _has_content(path: Path, borders: Any) -> Any:
    """Whether each line has more than whitespace. Only short lines are read; longer ones count as text."""
    lengths = borders[:, 1] - borders[:, 0]
    is_filled = lengths > 0
    with path.open("rb") as file:
        for line in np.flatnonzero(is_filled & (lengths <= _SHORT_LINE)):
            file.seek(int(borders[line, 0]))
            is_filled[line] = bool(file.read(int(lengths[line])).removeprefix(codecs.BOM_UTF8).strip())
    return is_filled


class TextLines(_Lines):
    """`to_sample(line)` for each line of UTF-8 text that is not blank.

    Raises `WorkloadError` with the file and the sample number for a line that is not UTF-8.
    """

    def __init__(self, files: Sequence[Path], to_sample: Callable[[str], Any], random: bool = False) -> None:
        super().__init__(files, random)
        self.to_sample = to_sample

    def __getitem__(self, index: int) -> Any:
        path, number, content = self.line(index)
        try:
            text = content.decode("utf-8-sig" if number == 0 else "utf-8")  # a byte order mark
        except UnicodeDecodeError as error:
            raise WorkloadError(f"{path}: sample {number} is not UTF-8 ({error.reason})") from error
        return self.to_sample(text)


class JsonLines(_Lines):
    """`to_sample(value)` for each line of JSON. Raises `WorkloadError` with file and sample number for invalid JSON."""

    def __init__(self, files: Sequence[Path], to_sample: Callable[[Any], Any], random: bool = False) -> None:
        super().__init__(files, random)
        self.to_sample = to_sample

    def __getitem__(self, index: int) -> Any:
        path, number, content = self.line(index)
        try:
            value = json.loads(content)
        except ValueError as error:
            raise WorkloadError(f"{path}: sample {number} is not JSON ({error})") from error
        return self.to_sample(value)


class TarShards(_Files):
    """`to_sample({"__key__": "0001", "jpg": bytes, "cls": bytes})` for each sample of tar files.

    Files whose names are equal up to the first dot are one sample (WebDataset's layout). Compressed archives are
    not supported: single files in them cannot be read.
    """

    def __init__(self, files: Sequence[Path], to_sample: Callable[[dict[str, Any]], Any], random: bool = False) -> None:
        self.index = [_tar_index(path) for path in files]
        self.to_sample = to_sample
        super().__init__(files, [len(samples) for samples in self.index], random)

    def __getitem__(self, index: int) -> Any:
        file, inside = self.file_position(index)
        key, members = self.index[file][inside]
        sample: dict[str, Any] = {"__key__": key}
        with self.files[file].open("rb") as opened:
            for extension, (start, size) in members.items():
                opened.seek(start)
                sample[extension] = opened.read(size)
        try:
            return self.to_sample(sample)
        except EveryrankError as error:
            raise WorkloadError(f"{self.files[file]}: sample {key}: {error}") from error


_Sample = tuple[str, dict[str, tuple[int, int]]]


def _tar_index(path: Path) -> list[_Sample]:
    """Return (key, {extension: (offset, size)}) of each sample, in the order of the archive."""
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    try:
        for name, start, size in _tar_members(path):
            folder, _, base = name.rpartition("/")
            key, _, extension = base.partition(".")
            extension = extension.lower()
            if not key or not extension:
                continue
            members = samples.setdefault(f"{folder}/{key}" if folder else key, {})
            if extension in members:
                raise WorkloadError(f"{path}: the archive contains {name} twice (.JPG and .jpg are the same)")
            members[extension] = (start, size)
    except (tarfile.TarError, OSError) as error:
        raise WorkloadError(f"{path}: cannot be read as an uncompressed tar file ({error})") from error
    return list(samples.items())


def _tar_members(path: Path) -> Iterator[tuple[str, int, int]]:
    """(name, offset, size) of each file in a tar. Raises an error for damage at which `tarfile` silently stops."""
    size = path.stat().st_size
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            if member.issparse() or member.islnk() or member.issym():
                raise WorkloadError(f"{path}: {member.name} is a link or a sparse file; pack plain files")
            if member.isfile():
                if member.offset_data + member.size > size:
                    raise WorkloadError(f"{path}: cut off inside {member.name}; copy the file again")
                yield member.name, member.offset_data, member.size
        end = int(archive.offset)  # pyright: ignore[reportAttributeAccessIssue]  (documented nowhere, there since 2.3)
    with path.open("rb") as file:
        file.seek(end)
        remaining = 0
        while chunk := file.read(_CHUNK):
            remaining += len(chunk)
            if chunk.count(0) != len(chunk):
                raise WorkloadError(f"{path}: damaged, or two archives in one file, from byte {end:,} on")
    if remaining < _TAR_BLOCK:
        raise WorkloadError(f"{path}: cut off at byte {end:,}: the end of the archive is missing")
