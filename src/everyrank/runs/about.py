"""What a checkpoint says of itself, and whether its files are what was saved."""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everyrank.errors import UsageError

__all__ = ["ABOUT", "About", "Checkpoint", "crc_of", "damage", "read_about", "write_about"]

ABOUT = "about.json"
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
    def num_bytes(self) -> int:
        """Of all its files."""
        return sum(size for size, _ in self.about.files.values())


def write_about(folder: Path, about: About) -> None:
    """The last file of a checkpoint, on the disk when this returns."""
    with (folder / ABOUT).open("w", encoding="utf-8") as file:
        json.dump(dataclasses.asdict(about), file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_about(path: Path) -> Checkpoint:
    """The checkpoint in this folder. Raises `UsageError` where about.json is missing, cut off or foreign."""
    try:
        content: Any = json.loads((path / ABOUT).read_text(encoding="utf-8"))
        names = {entry.name for entry in dataclasses.fields(About)}
        content["files"] = {name: (int(size), int(crc)) for name, (size, crc) in content["files"].items()}
        about = About(**{name: value for name, value in content.items() if name in names})
        _check_types(about)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        what = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise UsageError(f"{path}: no checkpoint that can be read ({ABOUT}: {what})") from None
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
