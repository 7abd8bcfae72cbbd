"""Read loss curves: Records, CSV, log.jsonl of a training, event files of TensorBoard. No code of a file runs."""

from __future__ import annotations

import csv
import difflib
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from everyrank.errors import CannotRunError, UsageError
from everyrank.record import read_records

__all__ = ["Curve", "read_curves"]

_MAX_BYTES = 1 << 30
_STEP_NAMES = ("step", "update", "global_step", "iteration", "iter", "steps", "_step", "batch", "epoch")
_LOSS_NAMES = ("loss", "train_loss", "train/loss", "training_loss", "loss/train", "lm loss", "value")
_SUFFIXES = (".csv", ".tsv", ".json", ".jsonl")


@dataclass(frozen=True)
class Curve:
    """The losses of one run.

    name        name of the file, as typed by the user
    losses      step -> loss, in order of steps
    resolution  half of the last printed digit; 0 if all digits were kept
    precision   precision of the run of a Record: "bf16"; None for other files
    """

    name: str
    losses: Mapping[int, float]
    resolution: float = 0.0
    precision: str | None = None
    label: str = ""


def read_curves(path: Path, column: str | None = None) -> list[Curve]:
    """Return the curves of a file, or of each file in a folder: runs of one experiment with different seeds.

    column   of a CSV file, or tag of TensorBoard; None: the one that is named like a loss

    Raises `UsageError` for a file without a curve, `CannotRunError` for event files without tensorboard.
    """
    if not path.exists():
        raise UsageError(f"{path}: there is no such file; give Records, a CSV file, log.jsonl, or a TensorBoard folder")
    if path.is_dir():
        return _read_folder(path, column)
    if not path.is_file():
        raise UsageError(f"{path}: neither a file nor a folder; give Records, a CSV file, or a TensorBoard folder")
    return _read_file(path, column)


def _read_folder(folder: Path, column: str | None) -> list[Curve]:
    event_folders = sorted({path.parent for path in folder.rglob("*tfevents*") if path.is_file()})
    if event_folders:
        return [_read_events(event_folder, column) for event_folder in event_folders]
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in _SUFFIXES)
    if {"log.csv", "log.jsonl"} <= {path.name for path in files}:  # both files are of the same run
        files = [folder / "log.jsonl"]
    if not files:
        files = sorted(folder.glob("*/log.jsonl"))
    if not files:
        raise UsageError(f"{folder}: the folder has no CSV, JSON or event files; give the runs of one experiment")
    return [curve for file in files for curve in _read_file(file, column)]


def _read_file(path: Path, column: str | None) -> list[Curve]:
    if "tfevents" in path.name:
        return [_read_events(path, column)]
    if path.stat().st_size > _MAX_BYTES:
        raise UsageError(f"{path}: larger than 1 GiB; give a file with only the loss")
    if path.suffix == ".json":
        return _curves_of_records(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not a text file; give Records, a CSV file, or a TensorBoard folder") from None
    if path.suffix == ".jsonl":
        return [_curve_of_rows(path, _json_rows(path, text), column)]
    return [_curve_of_rows(path, _csv_rows(path, text), column)]


# --- Records


def _curves_of_records(path: Path) -> list[Curve]:
    curves: list[Curve] = []
    for record in read_records(path):
        if record.loss:
            settings = record.layout.partition(":")[2].split(",")
            precisions = [setting.partition("=")[2] for setting in settings if setting.startswith("precision=")]
            label = f"{record.workload} · {record.layout} · {record.world_size} ranks"
            losses = dict(enumerate(record.loss))
            precision = precisions[0] if precisions else "float32"  # the default, which the layout does not name
            curves.append(Curve(path.name, losses, precision=precision, label=label))
    if not curves:
        raise UsageError(f"{path}: no Record has losses; everyrank train, run or bench with --json F writes them")
    return curves


# --- rows of text


def _csv_rows(path: Path, text: str) -> list[dict[str, str]]:
    if not text.strip():
        raise UsageError(f"{path}: the file is empty")
    if "\0" in text:
        raise UsageError(f"{path}: not a text file; give Records, a CSV file, or a TensorBoard folder")
    first = text.lstrip().splitlines()[0]
    delimiter = max(",;\t", key=first.count)
    try:
        rows = list(csv.reader(io.StringIO(text), delimiter=delimiter))
    except csv.Error as error:
        raise UsageError(f"{path}: not CSV ({error})") from None
    rows = [row for row in rows if row]
    header = [word.strip() for word in rows[0]]
    if all(_number(word) is not None for word in header):  # no header: the last column is the loss
        names = ["step", "loss"] if len(header) == 2 else ["loss"] if len(header) == 1 else []
        if not names:
            raise UsageError(
                f"{path}: the first line has no column names; start the file with a line such as step,loss"
            )
        return [dict(zip(names, row, strict=False)) for row in rows]
    return [dict(zip(header, row, strict=False)) for row in rows[1:]]


def _json_rows(path: Path, text: str) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except (ValueError, RecursionError):
            raise UsageError(f"{path}:{number}: not JSON; give a file with one JSON object in each line") from None
        if not isinstance(row, dict):
            raise UsageError(f"{path}:{number}: not a JSON object; give a file with one JSON object in each line")
        rows.append({str(key): "" if value is None else str(value) for key, value in row.items()})
    if not rows:
        raise UsageError(f"{path}: the file is empty")
    return rows


def _curve_of_rows(path: Path, rows: Sequence[Mapping[str, str]], column: str | None) -> Curve:
    names = list(dict.fromkeys(name for row in rows for name in row))
    loss = _find_column(str(path), names, column)
    lower = {name.lower(): name for name in reversed(names)}
    step = next((lower[name] for name in _STEP_NAMES if name in lower and lower[name] != loss), None)
    with_loss = [row for row in rows if row.get(loss, "").strip()]
    if step is not None and _begins_again_in_epochs(with_loss, step, lower.get("epoch", step)):
        step = None  # the rows are counted instead
    losses: dict[int, float] = {}
    texts: list[str] = []
    for index, row in enumerate(rows):
        text = row.get(loss, "").strip()
        if not text:  # a row for another metric
            continue
        value = _number(text)
        if value is None:
            raise UsageError(f"{path}: {loss} of row {index + 1} is {text[:40]!r}, which is not a number")
        step_number = _number(row.get(step, "")) if step else float(len(losses))
        if step_number is None or not math.isfinite(step_number) or step_number != int(step_number):
            raise UsageError(f"{path}: {step} of row {index + 1} is {row.get(step or '', '')[:40]!r}, not an integer")
        losses.pop(int(step_number), None)  # a training that was resumed wrote this step twice
        losses[int(step_number)] = value
        texts.append(text)
    if not losses:
        raise UsageError(f"{path}: the column {loss} has no values")
    return Curve(path.name, dict(sorted(losses.items())), _resolution(texts))


def _begins_again_in_epochs(rows: Sequence[Mapping[str, str]], step: str, epoch: str) -> bool:
    """Whether the steps are counted from the start again in a later epoch. After a resume the epoch is not later."""
    numbers = [(_number(row.get(epoch, "")), _number(row.get(step, ""))) for row in rows]
    known = [(row_epoch, row_step) for row_epoch, row_step in numbers if row_epoch is not None and row_step is not None]
    return any(next_epoch > epoch and next_step <= step for (epoch, step), (next_epoch, next_step) in pairwise(known))


def _find_column(path: str, names: Sequence[str], column: str | None) -> str:
    if column is not None:
        if column in names:
            return column
        near = difflib.get_close_matches(column, names, 1)
        hint = f"did you mean {near[0]}?" if near else f"it has {_names_text(names)}"
        raise UsageError(f"{path}: there is no column {column}; {hint}")
    lower = {name.lower().strip(): name for name in reversed(names)}
    loss_name = next((lower[name] for name in _LOSS_NAMES if name in lower), None)
    if loss_name is None:
        candidates = [name for name in names if "loss" in name.lower()]
        if len(candidates) != 1:
            raise UsageError(f"{path}: no column is named like a loss; it has {_names_text(names)}; add --column NAME")
        loss_name = candidates[0]
    return loss_name


def _names_text(names: Sequence[str]) -> str:
    shown = ", ".join(name[:40] for name in names[:8])
    return f"{shown}{', ...' if len(names) > 8 else ''}" if names else "no columns"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _resolution(texts: Iterable[str]) -> float:
    """Return half of the last printed digit, by the value with the most digits; 0 for 12 digits or more."""
    decimals, digits = 0, 0
    for text in texts:
        mantissa, _, exponent = text.lower().partition("e")
        fraction = mantissa.partition(".")[2]
        with_exponent = len(fraction) - int(exponent) if exponent.lstrip("+-").isdigit() else len(fraction)
        decimals = max(decimals, with_exponent)
        digits = max(digits, sum(letter.isdigit() for letter in mantissa.lstrip("-+0.")))
    return 0.0 if digits >= 12 else 0.5 * 10.0**-decimals


# --- TensorBoard


def _read_events(path: Path, column: str | None) -> Curve:
    """Return the curve of an event file, or of a folder of them."""
    try:
        import logging

        logging.getLogger("tensorboard").setLevel(logging.ERROR)  # tensorboard warns about each purged event
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.util import tensor_util
    except ImportError:
        raise CannotRunError(
            f"{path}: reading TensorBoard's event files needs tensorboard; pip install 'everyrank[tensorboard]'"
        ) from None
    try:
        events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
        events.Reload()
        tags: dict[str, Any] = events.Tags()
        tag = _find_column(str(path), [*tags["scalars"], *tags["tensors"]], column)
        if tag in tags["scalars"]:
            losses = {event.step: float(event.value) for event in events.Scalars(tag)}
        else:
            arrays = {event.step: tensor_util.make_ndarray(event.tensor_proto) for event in events.Tensors(tag)}
            losses = {step: float(array) for step, array in arrays.items() if array.size == 1}
    except UsageError:
        raise
    except Exception as error:  # a damaged file may raise any exception
        raise UsageError(f"{path}: TensorBoard cannot read it ({type(error).__name__}: {str(error)[:100]})") from None
    if not losses:
        raise UsageError(f"{path}: {tag} has no values")
    return Curve(path.name, dict(sorted(losses.items())), label=tag)
