"""Read CIFAR-10 and CIFAR-100 from the binary or the pickled files.

Unpickling can run any program. These pickles need only four names (an array, its type, its reconstruction and a text
encoding), so the reader accepts these and stops at any other.

Source: A. Krizhevsky 2009, www.cs.toronto.edu/~kriz/cifar.html
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everyrank.errors import WorkloadError

__all__ = ["read_cifar"]

_PIXELS = 3 * 32 * 32
# number of classes -> held out -> (pickled files, binary files)
_FILES: Mapping[int, Mapping[bool, tuple[list[str], list[str]]]] = {
    10: {
        False: ([f"data_batch_{i}" for i in range(1, 6)], [f"data_batch_{i}.bin" for i in range(1, 6)]),
        True: (["test_batch"], ["test_batch.bin"]),
    },
    100: {False: (["train"], ["train.bin"]), True: (["test"], ["test.bin"])},
}
_FOLDERS = {10: ("cifar-10-batches-py", "cifar-10-batches-bin"), 100: ("cifar-100-python", "cifar-100-binary")}


def read_cifar(folder: Path, classes: int, is_validation: bool) -> tuple[Tensor, Tensor]:
    """Images (N, 3, 32, 32) uint8 and labels (N,) int64, of 10 classes or of 100 (the fine labels).

    `folder` holds the files, or the folder that the archive unpacks to. Raises `WorkloadError` with what is expected.
    """
    pickled, binary = _FILES[classes][is_validation]
    for path in (folder, *(folder / name for name in _FOLDERS[classes])):
        if all((path / name).is_file() for name in pickled):
            parts = [_read_pickled(path / name, classes) for name in pickled]
            break
        if all((path / name).is_file() for name in binary):
            parts = [_read_binary(path / name, classes) for name in binary]
            break
    else:
        raise WorkloadError(
            f"{folder}: neither {', '.join(pickled)} nor {', '.join(binary)} there; "
            f"unpack cifar-{classes}-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html"
        )
    pixels = np.concatenate([images for images, _ in parts]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([images for _, images in parts])
    if not labels.size or labels.min() < 0 or labels.max() >= classes:
        raise WorkloadError(f"{folder}: labels that are not from 0 to {classes - 1}")
    return torch.from_numpy(pixels.copy()), torch.from_numpy(labels)


def _read_binary(path: Path, classes: int) -> tuple[Any, Any]:
    before = 1 if classes == 10 else 2  # CIFAR-100 has the coarse label first
    content = np.fromfile(path, dtype=np.uint8)
    if len(content) == 0 or len(content) % (_PIXELS + before):
        raise WorkloadError(f"{path}: {len(content)} bytes are no whole number of rows of {_PIXELS + before}")
    rows = content.reshape(-1, _PIXELS + before)
    return rows[:, before:], rows[:, before - 1].astype(np.int64)


def _read_pickled(path: Path, classes: int) -> tuple[Any, Any]:
    try:
        with path.open("rb") as file:
            loaded: Any = _ArraysAlone(file, encoding="bytes").load()
    except WorkloadError as error:
        raise WorkloadError(f"{path}: {error}") from error
    except Exception as error:  # a broken pickle raises anything
        raise WorkloadError(f"{path}: no pickle of CIFAR ({type(error).__name__}: {error})") from error
    key = b"labels" if classes == 10 else b"fine_labels"
    data, labels = (loaded.get(b"data"), loaded.get(key)) if isinstance(loaded, dict) else (None, None)
    if not isinstance(data, _Array) or not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise WorkloadError(f"{path}: no pickle of CIFAR-{classes}: it lacks data or {key.decode()}")
    if data.values.dtype != np.uint8 or data.values.shape != (len(labels), _PIXELS):
        raise WorkloadError(f"{path}: data of shape {data.values.shape} for {len(labels)} labels")
    return data.values, np.asarray(labels, dtype=np.int64)


class _ArraysAlone(pickle.Unpickler):
    """An unpickler that builds arrays of bytes and nothing else, without running code of numpy."""

    def find_class(self, module: str, name: str) -> Any:
        known: dict[tuple[str, str], Any] = {
            ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
            ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(),
            ("numpy", "ndarray"): _Array,
            ("numpy", "dtype"): _Type,
            ("_codecs", "encode"): _encode,
        }
        if (module, name) not in known:
            raise WorkloadError(
                f"a pickle that asks for {module}.{name}: CIFAR needs no such thing, and opening it could run a program"
            )
        return known[module, name]


class _Type:
    """Substitutes numpy's dtype."""

    def __init__(self, code: Any = "", *_: Any) -> None:
        self.code = code.decode("latin1") if isinstance(code, bytes) else code

    def __setstate__(self, state: Any) -> None:
        """Ignore byte order and flags, which do not matter for bytes."""


class _Array:
    """Substitutes numpy's array, for bytes."""

    values: Any = np.zeros(0)

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise WorkloadError("a pickle with an array of another kind than CIFAR's")
        _, shape, kind, is_fortran, content = state
        if not isinstance(kind, _Type) or kind.code != "u1" or is_fortran or not isinstance(content, bytes):
            raise WorkloadError("a pickle with an array that is not one of bytes, row by row")
        self.values = np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """Encode text the way Python 3 writes bytes for Python 2."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise WorkloadError("a pickle with text in an encoding that CIFAR does not use")
    return text.encode("latin1")
