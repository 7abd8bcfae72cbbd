"""Download a dataset, check its checksum, unpack it. Imports no torch.

everyrank train mnist --data DIR --download
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tarfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from everyrank.errors import EveryrankError, UsageError

__all__ = ["FILES", "File", "download"]

_TIMEOUT_SECONDS = 30.0
_CHUNK = 1 << 18


@dataclass(frozen=True)
class File:
    """A file to download, and the MD5 that its source publishes. An archive is unpacked next to it."""

    url: str
    md5: str

    @property
    def name(self) -> str:
        """The local file name."""
        return self.url.rpartition("/")[2]


_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_CIFAR = "https://www.cs.toronto.edu/~kriz/"
FILES: dict[str, list[File]] = {
    "mnist": [
        File(_MNIST + "train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        File(_MNIST + "train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
        File(_MNIST + "t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
        File(_MNIST + "t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
    ],
    "cifar10": [File(_CIFAR + "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530")],
    "cifar100": [File(_CIFAR + "cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8")],
}
"""By workload. ImageNet is missing: its source requires an account."""


def download(workload: str, folder: Path | None, files: dict[str, list[File]] = FILES) -> None:
    """Download the data of a built-in workload into `folder`.

    Raises `UsageError` for a workload whose data cannot be downloaded, and `EveryrankError` for network errors and
    wrong checksums. Incorrect files are removed.
    """
    if workload not in files:
        raise UsageError(f"--download: {workload} cannot be downloaded; only {', '.join(files)} can")
    if folder is None:
        raise UsageError("--download: no folder to download to; add --data DIR")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in files[workload]:
            path = folder / file.name
            if not path.is_file() or _md5(path) != file.md5:
                _fetch(file, path)
            if tarfile.is_tarfile(path):  # also one that the user has downloaded, or that was unpacked only in part
                with tarfile.open(path) as archive:
                    _unpack(archive, folder)
    except (OSError, tarfile.TarError) as error:
        raise UsageError(f"--download: {folder}: {error}") from error


def _unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Unpack an archive. Raises `TarError` if it would write outside the folder."""
    if hasattr(tarfile, "data_filter"):
        archive.extractall(folder, filter="data")
        return
    for member in archive.getmembers():  # Python 3.11.0 to 3.11.3 have no filters
        is_inside = (folder / member.name).resolve().is_relative_to(folder.resolve())
        if not is_inside or not (member.isfile() or member.isdir()):
            raise tarfile.TarError(f"{member.name!r} is a link, or would be written outside the folder")
    archive.extractall(folder)  # noqa: S202  (checked above)


def _fetch(file: File, path: Path) -> None:
    """Download to a temporary file next to the target first, so that a file under the final name is complete."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    try:
        with (
            urllib.request.urlopen(file.url, timeout=_TIMEOUT_SECONDS) as answer,  # noqa: S310  (URLs of ours, above)
            partial.open("wb") as out,
            Progress(*columns, transient=True) as bar,
        ):
            total = answer.headers.get("Content-Length")
            task = bar.add_task(file.name, total=int(total) if total else None)
            while chunk := answer.read(_CHUNK):
                out.write(chunk)
                bar.update(task, advance=len(chunk))
        checksum = _md5(partial)
        if checksum != file.md5:
            raise EveryrankError(f"--download: {file.url}: its MD5 is {checksum}, not {file.md5}; the file was deleted")
        shutil.move(partial, path)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or repr(error)
        raise EveryrankError(f"--download: {file.url}: {reason}; download it yourself into {path.parent}") from error
    finally:
        partial.unlink(missing_ok=True)


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
