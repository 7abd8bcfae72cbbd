"""The folder of a run: which checkpoints there are, the newest, the best; names that only whole ones have."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
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
    "score_of",
    "set_aside_newer",
]

_FOLDER = "checkpoints"
_UNFINISHED = ".tmp"
_DAMAGED = ".damaged"
_BEST = "best"


def new_folder(run: Path, step: int) -> Path:
    """Where a checkpoint is written before it is whole."""
    return run / _FOLDER / f"{_name(step)}{_UNFINISHED}"


def _name(step: int) -> str:
    return f"step-{step:08d}"


def clear_unfinished(run: Path) -> None:
    """Remove what a crash left half written, or half removed."""
    for path in (run / _FOLDER).glob(f"*{_UNFINISHED}"):
        discard(path)
    for path in (run / _FOLDER).glob("*.old"):
        if path.with_suffix("").exists():
            _remove(path)


def discard(folder: Path) -> None:
    """Remove an unfinished checkpoint; of a link that stands there the link, and nothing that it leads to."""
    with contextlib.suppress(OSError):
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def commit(folder: Path) -> Path:
    """Give a checkpoint its name, now that it is whole; the step that a crash cannot tear."""
    final = folder.with_name(folder.name.removesuffix(_UNFINISHED))
    _sync(folder)
    old = final.with_name(final.name + ".old")
    if final.exists():  # the same step again: at no moment is there none
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    folder.rename(final)
    _sync(final.parent)
    if old.exists():
        _remove(old)
    return final


def add_metrics(run: Path, step: int, metrics: dict[str, float]) -> None:
    """Say in a whole checkpoint how good it is. Raises `OSError`, and `UsageError` where there is none of this step."""
    path = run / _FOLDER / _name(step)
    beside = path / f"{METADATA_FILE}{_UNFINISHED}"
    write_metadata(path, dataclasses.replace(read_metadata(path).metadata, metrics=metrics), beside.name)
    beside.replace(path / METADATA_FILE)
    _sync(path)


def _sync(folder: Path) -> None:
    """The names in a folder, onto the disk."""
    with contextlib.suppress(OSError):  # some file systems cannot
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def _remove(folder: Path) -> None:
    """Take its name away first: a crash in the middle must not leave half of it under a name that says whole."""
    gone = folder.with_name(folder.name + _UNFINISHED)
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def remove_old_checkpoints(run: Path, keep: int, step: int, best_by: str) -> None:
    """Remove all but the last `keep` checkpoints up to this step, and the best one; newer ones are not touched."""
    checkpoints = checkpoints_of(run)
    best = best_of(checkpoints, best_by)
    checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.metadata.step <= step]
    for old in checkpoints[:-keep]:
        if best is None or old.path != best.path:
            _remove(old.path)


def mark_best(run: Path, best_by: str) -> None:
    """Point the link `best` at the best checkpoint, where one was evaluated."""
    best = best_of(checkpoints_of(run), best_by)
    if best is not None:
        link = run / _FOLDER / f"{_BEST}{_UNFINISHED}"
        with contextlib.suppress(OSError):  # a file system without links
            link.unlink(missing_ok=True)
            link.symlink_to(best.path.name)
            link.replace(run / _FOLDER / _BEST)


def best_of(checkpoints: list[Checkpoint], best_by: str) -> Checkpoint | None:
    """The best of these by one metric; None where it was not evaluated."""
    best: Checkpoint | None = None
    for checkpoint in checkpoints:
        if is_better(score_of(checkpoint, best_by), score_of(best, best_by) if best else None, best_by):
            best = checkpoint
    return best


def score_of(checkpoint: Checkpoint, best_by: str) -> float | None:
    """The metric called `NAME` or `NAME:min` or `NAME:max`; None where it was not evaluated."""
    return checkpoint.metadata.metrics.get(best_by.partition(":")[0])


def is_better(score: float | None, than: float | None, best_by: str) -> bool:
    """Whether a metric has improved. Without a direction, an error (by its name) is better when lower."""
    if score is None or not math.isfinite(score):
        return False
    name, _, direction = best_by.partition(":")
    lower = direction == "min" if direction else name.lower().endswith(_ERRORS)
    return than is None or not math.isfinite(than) or (score < than if lower else score > than)


_ERRORS = ("loss", "perplexity", "error", "err", "mae", "mse", "rmse", "wer", "cer")


def checkpoints_of(run: Path) -> list[Checkpoint]:
    """All checkpoints under their final names, oldest first; what cannot be read as one is left out."""
    checkpoints: list[Checkpoint] = []
    for path in _named_steps(run):
        with contextlib.suppress(UsageError):
            checkpoints.append(read_metadata(path))
    return checkpoints


def _named_steps(run: Path) -> list[Path]:
    """Folders with the name of a whole checkpoint, oldest first, whatever is in them."""
    names = {path: match for path in (run / _FOLDER).glob("step-*") if (match := NAME.fullmatch(path.name))}
    finals = {match[1] for match in names.values() if not match[2]}
    folders = [path for path, match in names.items() if path.is_dir() and not (match[2] and match[1] in finals)]
    return sorted(folders, key=lambda path: int(names[path][1]))


def find_checkpoint(path: Path) -> Checkpoint:
    """The newest checkpoint of a run's folder, or the checkpoint that `place` is.

    Raises `UsageError` without one, and for one that cannot be read, with the last good one.
    """
    if (path / METADATA_FILE).exists():
        return checkpoint_named(_by_its_name(path))
    run = path.parent if path.name == _FOLDER else path
    folders = _named_steps(run)
    if folders:
        return checkpoint_named(_by_its_name(folders[-1]))
    if path.is_file():
        raise UsageError(f"{path}: a file, not the folder of a run or a checkpoint; weights go to --pretrained")
    if not path.exists():
        raise UsageError(f"{path}: nothing is there; give the folder of a run, or one of its checkpoints")
    if NAME.fullmatch(path.name) and path.parent.name == _FOLDER:
        return checkpoint_named(_by_its_name(path))
    if (path / ".metadata").is_file():
        raise UsageError(
            f"{path}: a checkpoint of another program (no {METADATA_FILE}); only everyrank's own can go on"
        )
    raise UsageError(f"{path}: no whole checkpoint there (step-*/{METADATA_FILE}); the run has saved none")


def newest_whole(run: Path) -> Checkpoint | None:
    """The newest checkpoint whose files have their sizes, for a run that goes on by itself; None without one."""
    return next(
        (checkpoint for checkpoint in reversed(checkpoints_of(run)) if damage(checkpoint, deep=False) is None), None
    )


def _by_its_name(path: Path) -> Path:
    """What `best` stands for. The folder of a run's checkpoints may itself be a link, to a disk with more room."""
    if path.name in ("", "..") or path.absolute().parent.name == "..":
        return path.resolve()
    target = path.resolve()
    parent = path.absolute().parent
    return parent / target.name if target.parent == parent.resolve() else target


def checkpoint_named(path: Path) -> Checkpoint:
    """The checkpoint in this very folder. Raises `UsageError` where about.json is missing, cut off or foreign."""
    try:
        return read_metadata(path)
    except UsageError as error:
        raise UsageError(f"{error}{_offer(path)}") from None


def set_aside_newer(checkpoint: Checkpoint) -> None:
    """Make this the newest checkpoint of its run, for a training that goes on from it: damaged newer ones are renamed.

    Raises `UsageError` where a newer one is whole: going on would leave two trainings in one folder.
    """
    run = checkpoint.path.parent.parent
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
                f"{checkpoint.path}: {path.name} of the same run is newer, and whole; give another --out to go on "
                "from here beside it, or remove it"
            )
        shutil.rmtree(path.with_name(path.name + _DAMAGED), ignore_errors=True)
        path.rename(path.with_name(path.name + _DAMAGED))


def all_of(run: Path) -> list[tuple[Path, Checkpoint | None]]:
    """Every folder with the name of a checkpoint, oldest first; None where it cannot be read as one."""
    folders: list[tuple[Path, Checkpoint | None]] = []
    for path in _named_steps(run):
        try:
            folders.append((path, read_metadata(path)))
        except UsageError:
            folders.append((path, None))
    return folders


def last_good(damaged: Path) -> Checkpoint | None:
    """The newest undamaged checkpoint beside this one, all of it read."""
    for other in reversed(checkpoints_of(damaged.parent.parent)):
        if other.path != damaged and damage(other) is None:
            return other
    return None


def _offer(damaged: Path) -> str:
    if damaged.parent.name != _FOLDER:
        return ""
    good = last_good(damaged)
    return f"; the last good one: --resume {good.path}" if good else "; no other checkpoint of this run is whole"


def require_whole(checkpoint: Checkpoint, deep: bool = False) -> None:
    """Raise `UsageError` for a damaged checkpoint, offering the last good one."""
    reason = damage(checkpoint, deep=deep)
    if reason is not None:
        refuse_damaged(checkpoint, reason)


def refuse_damaged(checkpoint: Checkpoint, reason: str) -> NoReturn:
    """Raise `UsageError` for a checkpoint in which `found` is wrong, offering the last good one."""
    raise UsageError(f"{checkpoint.path}: damaged: {reason}{_offer(checkpoint.path)}")
