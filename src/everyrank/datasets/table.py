"""Tables: Parquet files, and the datasets of Hugging Face's `datasets` library.

Both are rows of named columns. `to_sample(row)` converts a row to (input, target).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from everyrank.datasets.shards import checksum_of_names_and_sizes
from everyrank.errors import CannotRunError, WorkloadError

__all__ = ["ParquetRows", "Rows"]


class Rows(Dataset[Any]):
    """`to_sample(row)` for each row of a map-style table, such as `datasets.load_dataset(...)` gives.

    rows     has a length, and returns a dict for each index
    random   whether `to_sample` draws numbers: then they become a function of (seed, epoch, sample)
    """

    def __init__(self, rows: Any, to_sample: Callable[[Mapping[str, Any]], Any], random: bool = False) -> None:
        self.rows, self.to_sample = rows, to_sample
        self.deterministic = not random

    @property
    def checksum(self) -> str | None:
        """The fingerprint of the `datasets` library; None if there is none."""
        fingerprint = getattr(self.rows, "_fingerprint", None)
        return f"datasets: {fingerprint}" if fingerprint else None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.to_sample(self.rows[index])


class ParquetRows(Dataset[Any]):
    """`to_sample(row)` for each row of Parquet files; `row` is a dict of Python values.

    files     in order. One group of rows is kept in memory, and each group is a shard. So order="shard" reads each
              group once in an epoch, but order="global" reads a group for nearly every sample
    columns   the columns to read; None: all

    Raises `WorkloadError` for files that are not Parquet or lack a column, `CannotRunError` without pyarrow.
    """

    def __init__(
        self,
        files: Sequence[Path],
        to_sample: Callable[[Mapping[str, Any]], Any],
        columns: Sequence[str] | None = None,
        random: bool = False,
    ) -> None:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise CannotRunError("Parquet needs pyarrow: pip install 'everyrank[parquet]'") from None
        self.files, self.to_sample, self.columns = list(files), to_sample, list(columns) if columns else None
        self.deterministic = not random
        self.groups: list[tuple[Path, int]] = []
        sizes: list[int] = []
        for path in self.files:
            try:
                file_metadata: Any = parquet.read_metadata(path)
            except (OSError, pyarrow.ArrowException) as error:
                raise WorkloadError(f"{path}: cannot be read as Parquet ({error})") from error
            names = set(file_metadata.schema.to_arrow_schema().names)
            for column in self.columns or []:
                if column not in names:
                    raise WorkloadError(f"{path}: no column {column}; it has {', '.join(sorted(names))}")
            row_counts = [file_metadata.row_group(group).num_rows for group in range(file_metadata.num_row_groups)]
            self.groups += [(path, group) for group in range(len(row_counts))]
            sizes += row_counts
        self.shard_sizes = sizes
        self.starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.kept: tuple[int, Any] | None = None

    @property
    def checksum(self) -> str:
        """A checksum of the names and sizes of all files."""
        return checksum_of_names_and_sizes(self.files)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        group = int(np.searchsorted(self.starts, index, side="right")) - 1
        table = self._group(group)
        row = index - int(self.starts[group])
        return self.to_sample({name: table.column(name)[row].as_py() for name in table.column_names})

    def _group(self, group: int) -> Any:
        if self.kept is None or self.kept[0] != group:
            import pyarrow
            from pyarrow import parquet

            path, number = self.groups[group]
            try:
                table: Any = parquet.ParquetFile(path).read_row_group(number, self.columns, use_threads=False)
            except (OSError, pyarrow.ArrowException) as error:
                raise WorkloadError(f"{path}: its group of rows {number} cannot be read ({error})") from error
            self.kept = (group, table)
        return self.kept[1]
