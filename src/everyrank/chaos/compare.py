"""A disturbed run beside one that nothing happened to: the same training, or what differs first."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from everyrank.record import Parity, read_records
from everyrank.runs import Checkpoint, find_checkpoint

__all__ = ["compare_runs", "logged_updates"]


def logged_updates(run: Path) -> list[dict[str, Any]]:
    """The updates in the log of a run, in its order; a line that is cut off is none."""
    path, rows = run / "log.jsonl", list[dict[str, Any]]()
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if "step" in row:
            rows.append(row)
    return rows


def compare_runs(undisturbed: Path, run: Path, steps: int) -> Parity:
    """A run beside the one that nothing happened to: losses, metrics, and all tensors of the last checkpoint."""
    ours, theirs = ({row["step"]: row["loss"] for row in logged_updates(place)} for place in (run, undisturbed))
    if ours.keys() != theirs.keys() or len(logged_updates(run)) != steps or not (run / "record.json").exists():
        return Parity("different", first_divergence=f"{len(ours)} of {steps} updates are logged")
    apart = {step: abs(ours[step] - loss) / max(abs(loss), 1e-300) for step, loss in theirs.items()}
    far = max(apart.values(), key=lambda distance: (math.isnan(distance), distance))
    first = next((f"update {step}" for step, distance in apart.items() if distance != 0.0), None)
    metrics = read_records(run / "record.json")[0].metrics
    exact = first is None
    if exact and metrics != read_records(undisturbed / "record.json")[0].metrics:
        first = "the metrics at the end"
    scope = f"{steps} updates, and all tensors of the last checkpoint"
    if first is None or far <= _TOLERANCE:
        other = _other_tensor(find_checkpoint(run), find_checkpoint(undisturbed), exact)
        if other is None:
            return Parity("equal", exact, far, _TOLERANCE, scope, first_divergence=first)
        first = first or other
    return Parity("different", False, far, _TOLERANCE, scope, first_divergence=first)


_TOLERANCE = 1e-12  # of the losses, where a restart changes the order of additions
_TENSOR_TOLERANCE = 1e-9  # of weights and optimizer state then: small ones are differences of large ones


def _other_tensor(one: Checkpoint, other: Checkpoint, exact: bool) -> str | None:
    """The first tensor that is not the same in both checkpoints: the same bits, or as near as that."""
    import torch

    from everyrank.checkpoint.storage import contents_of, read

    both: list[dict[str, Any]] = []
    for checkpoint in (one, other):
        kept = contents_of(checkpoint)
        tensors = {name: torch.zeros(about.size, dtype=about.properties.dtype) for name, about in kept.items()}
        read(tensors, checkpoint)
        both.append(tensors)
    names = sorted(both[0].keys() | both[1].keys())
    return next((name for name in names if not _same(both[0].get(name), both[1].get(name), exact)), None)


def _same(one: Any, other: Any, exact: bool) -> bool:
    import torch

    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    if exact or not one.is_floating_point():  # bits: a state of a generator may hold NaN
        return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    return torch.allclose(one, other, rtol=_TENSOR_TOLERANCE, atol=_TENSOR_TOLERANCE, equal_nan=True)
