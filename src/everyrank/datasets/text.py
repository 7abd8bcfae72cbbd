"""Windows of bytes from UTF-8 files. The windows do not overlap, and the files are mapped into memory."""

from __future__ import annotations

import codecs
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from everyrank.errors import WorkloadError

__all__ = ["TextWindows"]

_CHUNK = 1 << 22


class TextWindows(Dataset[tuple[dict[str, Tensor], Tensor]]):
    """Windows of `length` bytes within each file: ({"tokens": (T,), "positions": (T,)}, next bytes (T,)).

    files          UTF-8, checked once
    is_validation  True: the last tenth of all windows; False: the windows before it

    Raises `WorkloadError` naming the file and byte that is not UTF-8, and for fewer than two windows in all files.
    """

    deterministic = True

    def __init__(self, files: Sequence[Path], length: int, is_validation: bool) -> None:
        self.contents = [_content(path) for path in files]
        self.length = length
        sizes = np.asarray([max(0, len(content) - 1) // length for content in self.contents], dtype=np.int64)
        self.starts = np.concatenate([[0], np.cumsum(sizes)])
        total = int(self.starts[-1])
        border = total * 9 // 10
        if border < 1 or border == total:
            names = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
            raise WorkloadError(f"{names}: 2 windows of {length} bytes are needed, and the text has {total}")
        self.begin, self.end = (border, total) if is_validation else (0, border)
        clipped_starts = np.clip(self.starts, self.begin, self.end)
        self.shard_sizes: list[int] = np.diff(clipped_starts).tolist()
        self.positions = torch.arange(length)

    @functools.cached_property
    def checksum(self) -> str:
        """The checksum of all the text, computed at first use. Only rank 0 needs it."""
        checksum = hashlib.sha256()
        for content in self.contents:
            checksum.update(content)
        return f"sha256:{checksum.hexdigest()}"

    def __len__(self) -> int:
        return self.end - self.begin

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = self.begin + index
        file = int(np.searchsorted(self.starts, number, side="right")) - 1
        start = (number - int(self.starts[file])) * self.length
        window = torch.from_numpy(self.contents[file][start : start + self.length + 1].astype(np.int64))
        return {"tokens": window[:-1], "positions": self.positions}, window[1:]


@functools.cache
def _content(path: Path) -> Any:
    """Return the bytes of a UTF-8 file, mapped into memory. Training and validation share the check of the encoding."""
    try:
        if path.stat().st_size == 0:
            return np.zeros(0, dtype=np.uint8)
        content = np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read ({error.strerror})") from error
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(content), _CHUNK):
        chunk = content[start : start + _CHUNK].tobytes()
        try:
            decoder.decode(chunk, final=start + _CHUNK >= len(content))
        except UnicodeDecodeError as error:
            raise WorkloadError(
                f"{path}: not UTF-8 text ({error.reason} near byte {start + error.start:,}); "
                "move this file out of the folder, or give one file: --data FILE"
            ) from error
    return content
