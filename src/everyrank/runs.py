"""The folder of a run: what is in it, which checkpoints are whole, the newest, the best. Imports no torch.

runs/digits-ddp-.../
    log.jsonl, log.csv, events.jsonl, epochs.csv, record.json, ranks/
    checkpoints/
        step-00000046/          a whole checkpoint: it got this name when it was complete
            about.json          what it is, and the size and CRC of every other file
            training.pt         schedule, loss scale, groups of the optimizer
            .metadata, *.distcp torch.distributed.checkpoint: tensors of model, optimizer and random generators
        step-00000069.tmp/      being written, or left by a crash; never read, removed by the next run
        best -> step-00000046
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everyrank.errors import UsageError

__all__ = [
    "About",
    "Checkpoint",
    "checkpoint_named",
    "checkpoints_of",
    "clear_unfinished",
    "commit",
    "crc_of",
    "damage",
    "find_checkpoint",
    "is_better",
    "last_good",
    "leave_behind",
    "mark_best",
    "new_folder",
    "prune",
    "require_whole",
    "write_about",
]

_FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d+)(\.old)?")  # .old: whole, and about to be replaced by one of the same step
_UNFINISHED = ".tmp"
_DAMAGED = ".damaged"
_ABOUT = "about.json"
_BEST = "best"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class About:
    """What a checkpoint says of itself, in about.json.

    step           updates done; training goes on with update number `step`
    workload, settings, seed, global_batch, clip_norm, samples, data_checksum
                   the mathematics, which a resumed run has to share
    layout, world_size
                   where it ran, which a resumed run may change
    metrics        of the held-out data at this step, where it was evaluated
    best_by        the metric that says which checkpoint is the best one
    aliases        name of a tied tensor -> the name under which it is kept
    files          name -> (bytes, CRC-32)
    """

    step: int
    workload: str
    settings: dict[str, Any]
    seed: int
    global_batch: int
    clip_norm: float | None
    samples: int
    data_checksum: str | None
    layout: str
    world_size: int
    updates_per_epoch: int
    best_by: str
    versions: dict[str, str]
    time: str
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    aliases: dict[str, str] = field(default_factory=dict[str, str])
    files: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    schema: int = 1


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: its folder, and what it says of itself."""

    path: Path
    about: About

    @property
    def score(self) -> float | None:
        """The metric by which the best is chosen; None where it was not evaluated, or is no number."""
        score = self.about.metrics.get(self.about.best_by)
        return score if score is not None and math.isfinite(score) else None

    @property
    def num_bytes(self) -> int:
        """Of all its files."""
        return sum(size for size, _ in self.about.files.values())


def new_folder(run: Path, step: int) -> Path:
    """Where a checkpoint is written before it is whole."""
    return run / _FOLDER / f"{_name(step)}{_UNFINISHED}"


def _name(step: int) -> str:
    return f"step-{step:08d}"


def clear_unfinished(run: Path) -> None:
    """Remove what a crash left half written, or half removed."""
    for path in (run / _FOLDER).glob(f"*{_UNFINISHED}"):
        shutil.rmtree(path, ignore_errors=True)


def write_about(folder: Path, about: About) -> None:
    """The last file of a checkpoint, on the disk when this returns."""
    with (folder / _ABOUT).open("w", encoding="utf-8") as file:
        json.dump(dataclasses.asdict(about), file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def commit(folder: Path) -> Path:
    """Give a checkpoint its name, now that it is whole; the step that a crash cannot tear."""
    final = folder.with_name(folder.name.removesuffix(_UNFINISHED))
    _sync(folder)
    old = final.with_name(final.name + ".old")
    if final.exists():  # the same step again: at no moment is there none
        final.rename(old)
    folder.rename(final)
    _sync(final.parent)
    if old.exists():
        _remove(old)
    return final


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


def prune(run: Path, keep: int, step: int) -> None:
    """Remove all but the last `keep` checkpoints up to this step, and the best one. Newer ones are not ours to judge."""
    there = checkpoints_of(run)
    best = _best(there)
    there = [one for one in there if one.about.step <= step]
    for old in there[:-keep]:
        if best is None or old.path != best.path:
            _remove(old.path)


def mark_best(run: Path) -> Checkpoint | None:
    """Point the link `best` at the best checkpoint; None where none was evaluated."""
    best = _best(checkpoints_of(run))
    if best is not None:
        link = run / _FOLDER / f"{_BEST}{_UNFINISHED}"
        with contextlib.suppress(OSError):  # a file system without links
            link.unlink(missing_ok=True)
            link.symlink_to(best.path.name)
            link.replace(run / _FOLDER / _BEST)
    return best


def _best(there: list[Checkpoint]) -> Checkpoint | None:
    best: Checkpoint | None = None
    for one in there:
        if one.score is not None and (best is None or is_better(one.score, best.score, one.about.best_by)):
            best = one
    return best


def is_better(score: float, than: float | None, name: str) -> bool:
    """Whether a metric has improved: a loss and a perplexity are better when lower, anything else when higher."""
    if than is None:
        return True
    return score < than if name in ("eval_loss", "perplexity") or name.endswith("loss") else score > than


def checkpoints_of(run: Path) -> list[Checkpoint]:
    """All checkpoints under their final names, oldest first; what cannot be read as one is left out."""
    found: list[Checkpoint] = []
    for path in _named_steps(run):
        with contextlib.suppress(UsageError):
            found.append(_read(path))
    return found


def _named_steps(run: Path) -> list[Path]:
    """Folders with the name of a whole checkpoint, oldest first, whatever is in them."""
    there = {path: match for path in (run / _FOLDER).glob("step-*") if (match := _NAME.fullmatch(path.name))}
    finals = {match[1] for match in there.values() if not match[2]}
    kept = [path for path, match in there.items() if path.is_dir() and not (match[2] and match[1] in finals)]
    return sorted(kept, key=lambda path: int(there[path][1]))


def find_checkpoint(place: Path) -> Checkpoint:
    """The newest checkpoint of a run's folder, or the checkpoint that `place` is.

    Raises `UsageError` without one, and for one that cannot be read, with the last good one.
    """
    if (place / _ABOUT).exists():
        return checkpoint_named(place.resolve())
    run = place.parent if place.name == _FOLDER else place
    there = _named_steps(run)
    if there:
        return checkpoint_named(there[-1].resolve())
    if place.is_file():
        raise UsageError(f"{place}: a file, not the folder of a run or a checkpoint; weights go to --pretrained")
    if not place.exists():
        raise UsageError(f"{place}: nothing is there; give the folder of a run, or one of its checkpoints")
    if _NAME.fullmatch(place.name) and place.parent.name == _FOLDER:
        return checkpoint_named(place.resolve())
    if (place / ".metadata").is_file():
        raise UsageError(f"{place}: a checkpoint of another program (no {_ABOUT}); only everyrank's own can go on")
    raise UsageError(f"{place}: no whole checkpoint there (step-*/{_ABOUT}); the run has saved none")


def checkpoint_named(path: Path) -> Checkpoint:
    """The checkpoint in this very folder. Raises `UsageError` where about.json is missing, cut off or foreign."""
    try:
        return _read(path)
    except UsageError as error:
        raise UsageError(f"{error}{_offer(path)}") from None


def _read(path: Path) -> Checkpoint:
    try:
        content: Any = json.loads((path / _ABOUT).read_text(encoding="utf-8"))
        names = {entry.name for entry in dataclasses.fields(About)}
        content["files"] = {name: (int(size), int(crc)) for name, (size, crc) in content["files"].items()}
        about = About(**{name: value for name, value in content.items() if name in names})
        _check_types(about)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        what = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise UsageError(f"{path}: no checkpoint that can be read ({_ABOUT}: {what})") from None
    return Checkpoint(path, about)


def _check_types(about: About) -> None:
    """Raise `TypeError` or `ValueError` for what `About` cannot hold: the file may be anybody's."""
    for entry in dataclasses.fields(About):
        value = getattr(about, entry.name)
        kinds = _KINDS[str(entry.type).partition("[")[0]]
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise TypeError(f"{entry.name} is {type(value).__name__}")
    for name in ("step", "world_size", "updates_per_epoch", "global_batch"):
        if getattr(about, name) < (name != "step"):
            raise ValueError(f"{name} is {getattr(about, name)}")
    if not all(isinstance(value, int | float) for value in about.metrics.values()):
        raise TypeError("a metric is no number")
    if not all(isinstance(value, str) for value in about.aliases.values()):
        raise TypeError("an alias is no name")
    for name in about.files:
        if Path(name).name != name:
            raise ValueError(f"a file named {name!r}")


_KINDS: dict[str, Any] = {
    "int": int,
    "str": str,
    "float | None": int | float | None,
    "str | None": str | None,
    "dict": dict,
}


def damage(checkpoint: Checkpoint, names: list[str] | None = None, deep: bool = True) -> str | None:
    """What is wrong with its files (all, or those of these names); None where nothing is.

    The sizes alone are compared unless `deep`, which reads everything.
    """
    for name in checkpoint.about.files if names is None else names:
        size, crc = checkpoint.about.files[name]
        path = checkpoint.path / name
        try:
            found = path.stat().st_size
            if found != size:
                return f"{name} has {found:,} of its {size:,} bytes"
            if deep and crc_of(path) != crc:
                return f"{name} is not what was saved (its CRC differs)"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return None


def crc_of(path: Path) -> int:
    """CRC-32 of a file."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


def leave_behind(checkpoint: Checkpoint) -> None:
    """Make this the newest checkpoint of its run, for a training that goes on from it: damaged newer ones are renamed.

    Raises `UsageError` where a newer one is whole: going on would leave two trainings in one folder.
    """
    run = checkpoint.path.parent.parent
    for path in _named_steps(run):
        match = _NAME.fullmatch(path.name)
        if match is None or int(match[1]) <= checkpoint.about.step:
            continue
        try:
            is_whole = damage(_read(path)) is None
        except UsageError:
            is_whole = False
        if is_whole:
            raise UsageError(
                f"{checkpoint.path}: {path.name} of the same run is newer, and whole; give another --out to go on "
                "from here beside it, or remove it"
            )
        shutil.rmtree(path.with_name(path.name + _DAMAGED), ignore_errors=True)
        path.rename(path.with_name(path.name + _DAMAGED))


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
    found = damage(checkpoint, deep=deep)
    if found is not None:
        raise UsageError(f"{checkpoint.path}: damaged: {found}{_offer(checkpoint.path)}")
