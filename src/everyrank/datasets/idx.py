"""idx, the format of MNIST: two zero bytes, the type, the number of dimensions, their sizes, the numbers.

Source: Y. LeCun, C. Cortes, C. Burges, yann.lecun.com/exdb/mnist. Only unsigned bytes are read, which is what MNIST and
its successors hold. Also Keras's mnist.npz.
"""

from __future__ import annotations

import gzip
import math
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from everyrank.errors import WorkloadError

__all__ = ["read_idx", "read_mnist"]

_UNSIGNED_BYTE = 0x08
_NAMES = {False: ("train-images", "train-labels"), True: ("t10k-images", "t10k-labels")}


def read_idx(path: Path) -> Tensor:
    """The numbers of an idx file, gzip or not, in its shape; uint8. Raises `WorkloadError` for anything else."""
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise WorkloadError(f"{path}: cannot be read ({error})") from error
    if len(content) < 4 or content[:2] != b"\0\0":
        raise WorkloadError(f"{path}: no idx file (it begins with {content[:4].hex()}, not with 0000)")
    kind, dims = content[2], content[3]
    if kind != _UNSIGNED_BYTE:
        raise WorkloadError(f"{path}: idx of type {kind:#04x}; only unsigned bytes (0x08) are read")
    offset = 4 + 4 * dims
    if len(content) < offset:
        raise WorkloadError(f"{path}: ends within its header")
    shape = struct.unpack(f">{dims}I", content[4:offset])
    if len(content) - offset != math.prod(shape):
        raise WorkloadError(
            f"{path}: {len(content) - offset} bytes of data where the header {shape} asks for {math.prod(shape)}"
        )
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=offset).reshape(shape).copy())


def read_mnist(folder: Path, is_validation: bool) -> tuple[Tensor, Tensor]:
    """Images (N, 1, H, W) uint8 and labels (N,) int64: out of a folder of idx files, or an .npz as Keras has it.

    Raises `WorkloadError` with the files that are expected where they are not there.
    """
    if folder.suffix == ".npz":
        pixels, labels = _read_npz(folder, "test" if is_validation else "train")
    else:
        pixels, labels = (read_idx(_find(folder, name)) for name in _NAMES[is_validation])
    if pixels.dim() != 3 or labels.dim() != 1 or len(pixels) != len(labels):
        raise WorkloadError(f"{folder}: images of shape {tuple(pixels.shape)}, labels of shape {tuple(labels.shape)}")
    return pixels.unsqueeze(1), labels.long()


def _find(folder: Path, name: str) -> Path:
    """The file of that name, however its copies spell the rest: -idx3-ubyte, .idx3-ubyte, .gz; also in MNIST/raw.

    An archive may also have a folder of that name, and an interrupted download leaves a part of a file.
    """
    for candidate in (folder, folder / "raw", folder / "MNIST" / "raw"):
        paths = [path for path in candidate.glob(f"{name}*ubyte*") if path.is_file() and path.suffix != ".partial"]
        paths.sort(key=lambda path: (path.suffix == ".gz", path.name))
        if paths:
            return paths[0]
    raise WorkloadError(
        f"{folder}: no {name}-idx?-ubyte[.gz] there; MNIST is four files, {', '.join(sum(_NAMES.values(), ()))}: "
        "get them from https://ossci-datasets.s3.amazonaws.com/mnist/"
    )


def _read_npz(path: Path, split: str) -> tuple[Tensor, Tensor]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            pixels, labels = arrays[f"x_{split}"], arrays[f"y_{split}"]
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise WorkloadError(f"{path}: no arrays x_{split} and y_{split} in it ({error})") from error
    if pixels.dtype != np.uint8 or labels.dtype.kind not in "iu":
        raise WorkloadError(
            f"{path}: x_{split} is {pixels.dtype}, y_{split} {labels.dtype}, not uint8 and whole numbers"
        )
    return torch.from_numpy(pixels), torch.from_numpy(labels.astype(np.int64))
