"""Records rows that the script takes from its tensors, and tensors that it builds from samples, and merges them.

A script without a DataLoader cuts its own batches: `data[order[start:stop]]`, `data[rank::world]`, `torch.stack`. One
rank gets the rows of all ranks instead: those of rank 0, then those of rank 1.
"""

# sys._getframe is private.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from everyrank.audit.watch.source_location import is_user_file
from everyrank.rerun.inside.batches import is_equal
from everyrank.rerun.inside.session import Session

__all__ = ["RowReads"]

_ROWS = {torch.Tensor.__getitem__: "rows", torch.Tensor.index_select: "rows", torch.index_select: "rows"}
_MADE = {torch.stack: "stack", torch.tensor: "tensor", torch.as_tensor: "tensor", torch.from_numpy: "tensor"}
_HOOKS = str(Path(__file__).parent)
_MOST_BYTES = 2e8
_MOST_READS = 20_000


class RowReads(TorchFunctionMode):
    """Records what the script's own lines read from tensors outside of its models, or replaces it."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.num_bytes = 0
        self.is_recording = not session.imposed
        self.recorded = [each["reads"] for each in session.imposed] if session.settings["reads"] else []
        self.differing = _differing_lines(self.recorded)
        ends = [each["facts"]["reads_until"] for each in session.imposed if "reads_until" in each["facts"]]
        self.end = min(ends, default=None)
        inputs = [value for each in session.imposed for given in each["inputs"] for value in given]
        self.batch_sizes = {len(value) for value in inputs if value.dim()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        session, num_values = self.session, len(self.session.values)
        result = func(*args, **(kwargs or {}))
        operation = _ROWS.get(func) or _MADE.get(func)
        if (
            operation is None
            or not (self.is_recording or self.recorded)
            or not session.is_active
            or session.in_source
            or session.in_loader
            or session.in_model
            or session.in_backward
            or not torch.is_grad_enabled()  # an evaluation may read sample by sample
            or not _is_called_by_script()
            or not _is_data(result)
            or (operation == "rows" and not _takes_rows(args))
        ):
            return result
        with session.quiet():
            key = session.key_of_update(f"read {operation}")
            if not self.recorded:
                return self.record(key, result)
            replaced = self.replace(key, result)
            if replaced is not result:
                del session.values[num_values:]  # those of the rows that were not used
            return replaced

    def record(self, key: tuple[str, str, int], result: Any) -> Any:
        """Record the rows, until there are too many."""
        self.num_bytes += result.numel() * result.element_size()
        if self.num_bytes > _MOST_BYTES or len(self.session.reads) >= _MOST_READS:
            self.is_recording = False
            self.session.facts["reads_until"] = self.session.update
        else:
            self.session.reads.append((key, (result.detach().clone(), self.session.update)))
        return result

    def replace(self, key: tuple[str, str, int], result: Any) -> Any:
        """The rows of all ranks, if the ranks have read different ones."""
        if self.end is not None and self.session.update >= self.end:
            self.session.report_not_imposed("the script takes too many rows out of its tensors to record them")
        rows_by_rank = [recorded[key][0] for recorded in self.recorded if key in recorded]
        if len(rows_by_rank) < len(self.recorded) or key[:2] not in self.differing:
            return result
        if any(rank_rows.shape[1:] != result.shape[1:] for rank_rows in rows_by_rank):
            return result
        is_batch = all(len(rank_rows) in self.batch_sizes for rank_rows in rows_by_rank)
        if key[1].startswith("read tensor") and not is_batch:
            return result  # such as the sum and the count of a metric
        self.session.rows = [len(rank_rows) for rank_rows in rows_by_rank]
        self.session.batch_size = sum(self.session.rows)
        return torch.cat(rows_by_rank).to(result.dtype)


def _differing_lines(recorded: list[dict[tuple[str, str, int], Any]]) -> set[tuple[str, str]]:
    """(line, operation) of the rows that differ between ranks in any update: few numbers may be equal by chance."""
    first, *others = recorded or [{}]
    return {
        key[:2]
        for key, (rows, _) in first.items()
        if any(key in each and not is_equal(each[key][0], rows) for each in others)
    }


def _is_called_by_script() -> bool:
    """Whether a line of the script calls a function of torch, perhaps through a wrapper of ours."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith(_HOOKS) and frame.f_back is not None:
        frame = frame.f_back
    return is_user_file(frame.f_code.co_filename)


def _is_data(result: Any) -> bool:
    return type(result) is torch.Tensor and result.dim() > 0 and not result.requires_grad


def _takes_rows(args: tuple[Any, ...]) -> bool:
    """Whether an index selects along the first dimension: not `x[3]`, `x[:, 2:]` or `x[..., 0]`."""
    index = args[1] if len(args) == 2 else None
    first = index[0] if isinstance(index, tuple) and index else index
    if isinstance(first, slice):
        return first != slice(None)
    return index is None or isinstance(first, list) or (isinstance(first, torch.Tensor) and first.dim() > 0)
