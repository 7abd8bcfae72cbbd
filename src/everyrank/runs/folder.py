"""The folder of a run: finds the checkpoints, the newest and the best. Only complete ones have final names."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import shutil
from pathlib import Path
from typing import NoReturn

from everyrank.errors import UsageError
from everyrank.runs.metadata import METADATA_FILE, NAME, Checkpoint, damage, read_metadata, write_metadata

__all__ = [
    "add_metrics",
    "all_of",
    "best_of",
    "checkpoint_named",
    "checkpoints_of",
    "clear_unfinished",
    "commit",
    "discard",
    "find_checkpoint",
    "is_better",
    "last_good",
    "mark_best",
    "new_folder",
    "newest_whole",
    "refuse_damaged",
    "remove_old_checkpoints",
    "require_whole",
    "run_of",
    "score_of",
    "set_aside_newer",
]

_FOLDER = "checkpoints"
_UNFINISHED = ".tmp"
_DAMAGED = ".damaged"
_BEST = "best"
_RESUME = "--resume"  # precedes the last good checkpoint in a message


def new_folder(run: Path, step: int) -> Path:
    """Return the folder in which a checkpoint is written before it is complete."""
    return run / _FOLDER / f"{_name(step)}{_UNFINISHED}"


def _name(step: int) -> str:
    return f"step-{step:08d}"


def clear_unfinished(run: Path) -> None:
    """Remove checkpoints that a crash left incomplete."""
    for path in (run / _FOLDER).glob(f"*{_UNFINISHED}"):
        discard(path)
    for path in (run / _FOLDER).glob("*.old"):
        if path.with_suffix("").exists():
            _remove(path)


def discard(folder: Path) -> None:
    """Remove an unfinished checkpoint. If it is a symbolic link, remove only the link."""
    with contextlib.suppress(OSError):
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def commit(folder: Path) -> Path:
    """Rename a complete checkpoint to its final name, which is atomic."""
    final = folder.with_name(folder.name.removesuffix(_UNFINISHED))
    _sync(folder)
    old = final.with_name(final.name + ".old")
    if final.exists():  # saved again at the same step: keep the old one until the new one is in place
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    folder.rename(final)
    _sync(final.parent)
    if old.exists():
        _remove(old)
    return final


def add_metrics(run: Path, step: int, metrics: dict[str, float]) -> None:
    """Add metrics to a checkpoint. Raises `OSError`, and `UsageError` if there is no checkpoint of this step."""
    path = run / _FOLDER / _name(step)
    temporary = path / f"{METADATA_FILE}{_UNFINISHED}"
    write_metadata(path, dataclasses.replace(read_metadata(path).metadata, metrics=metrics), temporary.name)
    temporary.replace(path / METADATA_FILE)
    _sync(path)


def _sync(folder: Path) -> None:
    """Flush the directory entries of a folder to the disk."""
    with contextlib.suppress(OSError):  # not supported by some file systems
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def _remove(folder: Path) -> None:
    """Rename a checkpoint, then remove it, so that a crash does not leave half of it under its final name."""
    renamed = folder.with_name(folder.name + _UNFINISHED)
    shutil.rmtree(renamed, ignore_errors=True)
    folder.rename(renamed)
    shutil.rmtree(renamed, ignore_errors=True)


def remove_old_checkpoints(run: Path, keep: int, step: int, best_by: str) -> None:
    """Remove all but the last `keep` checkpoints up to this step, and the best one; newer ones are not touched."""
    checkpoints = checkpoints_of(run)
    best = best_of(checkpoints, best_by)
    checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.metadata.step <= step]
    for old in checkpoints[:-keep]:
        if best is None or old.path != best.path:
            _remove(old.path)


def mark_best(run: Path, best_by: str) -> None:
    """Point the link `best` at the best checkpoint, if any was evaluated."""
    best = best_of(checkpoints_of(run), best_by)
    if best is not None:
        link = run / _FOLDER / f"{_BEST}{_UNFINISHED}"
        with contextlib.suppress(OSError):  # a file system without links
            link.unlink(missing_ok=True)
            link.symlink_to(best.path.name)
            link.replace(run / _FOLDER / _BEST)


def best_of(checkpoints: list[Checkpoint], best_by: str) -> Checkpoint | None:
    """Return the best checkpoint by a metric; None if none was evaluated."""
    best: Checkpoint | None = None
    for checkpoint in checkpoints:
        if is_better(score_of(checkpoint, best_by), score_of(best, best_by) if best else None, best_by):
            best = checkpoint
    return best


def score_of(checkpoint: Checkpoint, best_by: str) -> float | None:
    """Return the metric `NAME`, `NAME:min` or `NAME:max` of a checkpoint; None if it was not evaluated."""
    return checkpoint.metadata.metrics.get(best_by.partition(":")[0])


def is_better(score: float | None, best_score: float | None, best_by: str) -> bool:
    """Whether a metric has improved. Without a direction, an error (by its name) is better when lower.

    For example `eval_loss`, `RMSE` and `test_wer` are errors, and `exact_answer` is not.
    """
    if score is None or not math.isfinite(score):
        return False
    name, _, direction = best_by.partition(":")
    is_error = direction == "min" if direction else _is_error(name)
    return (
        best_score is None or not math.isfinite(best_score) or (score < best_score if is_error else score > best_score)
    )


def _is_error(name: str) -> bool:
    last_word = _WORDS.findall(name)[-1:]
    return name.lower().endswith(_ERROR_ENDINGS) or (bool(last_word) and last_word[0].lower() in _ERROR_WORDS)


_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_ERROR_ENDINGS = ("loss", "perplexity", "error", "err", "mae", "mse")
_ERROR_WORDS = ("wer", "cer")  # only as whole words, because `answer` and `power` end in these letters


def checkpoints_of(run: Path) -> list[Checkpoint]:
    """Return all checkpoints with final names, oldest first, without unreadable ones."""
    checkpoints: list[Checkpoint] = []
    for path in _named_steps(run):
        with contextlib.suppress(UsageError):
            checkpoints.append(read_metadata(path))
    return checkpoints


def _named_steps(run: Path) -> list[Path]:
    """Return folders with the name of a checkpoint, oldest first, without reading them."""
    names = {path: match for path in (run / _FOLDER).glob("step-*") if (match := NAME.fullmatch(path.name))}
    finals = {match[1] for match in names.values() if not match[2]}
    folders = [path for path, match in names.items() if path.is_dir() and not (match[2] and match[1] in finals)]
    return sorted(folders, key=lambda path: int(names[path][1]))


def run_of(path: Path) -> Path:
    """Return the folder of the run whose folder, or folder of checkpoints, is at `path`.

    A run's own folder may be called `checkpoints`, too.
    """
    full_path = path.resolve() if path.name in ("", "..") else path  # `.` has no name
    return full_path.parent if full_path.name == _FOLDER and not _named_steps(path) else path


def find_checkpoint(path: Path, command: str = _RESUME) -> Checkpoint:
    """Return the newest checkpoint of a run's folder, or the checkpoint at `path`.

    Raises `UsageError` if there is none, or if it cannot be read; then the message has the last good one, after
    `command`.
    """
    if (path / METADATA_FILE).exists():
        return checkpoint_named(_by_its_name(path), command)
    folders = _named_steps(run_of(path))
    if folders:
        return checkpoint_named(_by_its_name(folders[-1]), command)
    if path.is_file():
        raise UsageError(f"{path}: a file, not the folder of a run or a checkpoint; weights go to --pretrained")
    if not path.exists():
        raise UsageError(f"{path}: no such folder; give the folder of a run, or one of its checkpoints")
    if NAME.fullmatch(path.name) and path.parent.name == _FOLDER:
        return checkpoint_named(_by_its_name(path), command)
    if (path / ".metadata").is_file():
        raise UsageError(
            f"{path}: a checkpoint of another program (no {METADATA_FILE}); everyrank resumes only its own checkpoints"
        )
    raise UsageError(f"{path}: no complete checkpoint (step-*/{METADATA_FILE}); the run has not saved any")


def newest_whole(run: Path) -> Checkpoint | None:
    """Return the newest checkpoint whose files have the right sizes, for an automatic restart; None without one."""
    return next(
        (checkpoint for checkpoint in reversed(checkpoints_of(run)) if damage(checkpoint, deep=False) is None), None
    )


def _by_its_name(path: Path) -> Path:
    """Resolve the link `best`, but not the folder of the checkpoints, which may be a link to a larger disk."""
    if path.name in ("", "..") or path.absolute().parent.name == "..":
        return path.resolve()
    target = path.resolve()
    parent = path.absolute().parent
    return parent / target.name if target.parent == parent.resolve() else target


def checkpoint_named(path: Path, command: str = _RESUME) -> Checkpoint:
    """Return the checkpoint in exactly this folder. Raises `UsageError` for a missing or invalid about.json."""
    try:
        return read_metadata(path)
    except UsageError as error:
        raise UsageError(f"{error}{_suggest_last_good(path, command)}") from None


def set_aside_newer(checkpoint: Checkpoint) -> None:
    """Rename newer, damaged checkpoints of the run, because a training resumes from this one.

    Raises `UsageError` if a newer one is undamaged: resuming would mix two trainings in one folder.
    """
    run = checkpoint.path.parent.parent
    damaged_paths: list[Path] = []
    for path in _named_steps(run):
        match = NAME.fullmatch(path.name)
        if match is None or int(match[1]) <= checkpoint.metadata.step:
            continue
        try:
            is_whole = damage(read_metadata(path)) is None
        except UsageError:
            is_whole = False
        if is_whole:
            raise UsageError(
                f"{checkpoint.path}: {path.name} of the same run is newer and undamaged; resume with another --out, "
                "or remove the newer one"
            )
        damaged_paths.append(path)
    for path in damaged_paths:  # after all checks, so that a refused run stays as it is
        shutil.rmtree(path.with_name(path.name + _DAMAGED), ignore_errors=True)
        path.rename(path.with_name(path.name + _DAMAGED))
    best = run / _FOLDER / _BEST
    if best.is_symlink() and not best.exists():  # it pointed at one of them
        with contextlib.suppress(OSError):
            best.unlink()
        mark_best(run, checkpoint.metadata.best_by)


def all_of(run: Path) -> list[tuple[Path, Checkpoint | None]]:
    """Return every folder with the name of a checkpoint, oldest first, with the checkpoint or None if unreadable."""
    folders: list[tuple[Path, Checkpoint | None]] = []
    for path in _named_steps(run):
        try:
            folders.append((path, read_metadata(path)))
        except UsageError:
            folders.append((path, None))
    return folders


def last_good(damaged: Path) -> Checkpoint | None:
    """Return the newest other checkpoint of the run that is undamaged. Reads all files."""
    for other in reversed(checkpoints_of(damaged.parent.parent)):
        if other.path != damaged and damage(other) is None:
            return other
    return None


def _suggest_last_good(damaged: Path, command: str) -> str:
    if damaged.parent.name != _FOLDER:
        return ""
    good = last_good(damaged)
    return f"; the last good one: {command} {good.path}" if good else "; no other checkpoint of this run is undamaged"


def require_whole(checkpoint: Checkpoint, deep: bool = False, command: str = _RESUME) -> None:
    """Raise `UsageError` for a damaged checkpoint, offering the last good one after `command`."""
    reason = damage(checkpoint, deep=deep)
    if reason is not None:
        refuse_damaged(checkpoint, reason, command)


def refuse_damaged(checkpoint: Checkpoint, reason: str, command: str = _RESUME) -> NoReturn:
    """Raise `UsageError` for a damaged checkpoint; the message suggests the last good one."""
    raise UsageError(f"{checkpoint.path}: damaged: {reason}{_suggest_last_good(checkpoint.path, command)}")
