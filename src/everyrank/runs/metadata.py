"""CheckpointMetadata: reads, checks and writes about.json of a checkpoint, and finds damaged files."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from everyrank.errors import UsageError

__all__ = [
    "LENGTHS",
    "METADATA_FILE",
    "NAME",
    "Checkpoint",
    "CheckpointMetadata",
    "changed_lengths",
    "check_metadata",
    "crc_of",
    "damage",
    "fields_of",
    "json_form",
    "open_file",
    "read_metadata",
    "with_sum",
    "write_metadata",
]

METADATA_FILE = "about.json"
LENGTHS = ("epochs", "steps")
"""Settings for the length of a training: a resumed run may change them."""
NAME = re.compile(r"step-([0-9]{1,18})(\.old)?")  # .old: complete, while a new one of the same step replaces it
_CRC_KEY = ',\n "crc": '
_MAX_BYTES = 1 << 26  # largest about.json in bytes; with a thousand ranks it has about 1e5
_CHUNK = 1 << 20


@dataclass(frozen=True)
class CheckpointMetadata:
    """The metadata of a checkpoint, in about.json.

    step           updates done; a resumed training starts with update number `step`
    workload, settings, seed, global_batch, clip_norm, samples, data_checksum
                   what is trained; must be equal in a resumed run, except the settings `LENGTHS` and `data`
    layout, world_size
                   where it ran; may differ in a resumed run
    updates_per_epoch   0: unknown
    place          for streams of unknown length: the epoch, and the updates done in it
    metrics        validation metrics at this step, if it was evaluated
    best_by        the metric that selects the best checkpoint
    aliases        other name of a tied tensor -> its name in the checkpoint
    files          name -> (bytes, CRC-32)
    schema         2: the file ends with its own CRC-32; 1: an older file without it
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
    schema: int = 2
    place: dict[str, int] = field(default_factory=dict[str, int])


def json_form(value: Any) -> Any:
    """Return a value as about.json gives it back: for example, a tuple becomes a list.

    Raises `TypeError` or `ValueError` for a value that JSON cannot hold.
    """
    return json.loads(json.dumps(value))


def changed_lengths(saved: CheckpointMetadata, now: CheckpointMetadata) -> dict[str, tuple[Any, Any]]:
    """Return the lengths (`LENGTHS`) that a resumed run has changed: name -> (saved, now), None where not set."""
    pairs = {name: (saved.settings.get(name), now.settings.get(name)) for name in LENGTHS}
    return {
        name: (saved_value, new_value) for name, (saved_value, new_value) in pairs.items() if saved_value != new_value
    }


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder and metadata."""

    path: Path
    metadata: CheckpointMetadata

    @property
    def num_bytes(self) -> int:
        """Return the size of all its files in bytes."""
        return sum(size for size, _ in self.metadata.files.values())


def write_metadata(folder: Path, metadata: CheckpointMetadata, name: str = METADATA_FILE) -> None:
    """Write about.json, the last file of a checkpoint, and sync it to disk."""
    with (folder / name).open("w", encoding="utf-8") as file:
        file.write(with_sum(fields_of(metadata)))
        file.flush()
        os.fsync(file.fileno())


def fields_of(metadata: CheckpointMetadata) -> dict[str, Any]:
    """Return the fields for JSON, without an empty `place`."""
    fields = dataclasses.asdict(metadata)
    if not metadata.place:
        del fields["place"]
    return fields


def with_sum(content: Mapping[str, Any]) -> str:
    """Return JSON whose last line is the CRC-32 of the text before it."""
    body = json.dumps(content, indent=1).removesuffix("\n}")
    return body + _CRC_KEY + _crc_end(body.encode()).decode()


def _crc_end(body: bytes) -> bytes:
    return b"%d\n}" % zlib.crc32(body)


def read_metadata(path: Path) -> Checkpoint:
    """Read the checkpoint in this folder. Raises `UsageError` if about.json is missing, changed or foreign."""
    try:
        with open_file(path / METADATA_FILE) as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise ValueError(f"it is longer than {_MAX_BYTES:,} bytes")
        content: Any = json.loads(text)
        names = {entry.name for entry in dataclasses.fields(CheckpointMetadata)}
        content["files"] = {name: (int(size), int(crc)) for name, (size, crc) in content["files"].items()}
        metadata = CheckpointMetadata(**{name: value for name, value in content.items() if name in names})
        check_metadata(metadata)
        _check_sum(text, metadata.schema)
        _check_name(path, metadata.step)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise UsageError(f"{path}: not a readable checkpoint ({METADATA_FILE}: {reason})") from None
    return Checkpoint(path, metadata)


def open_file(path: Path) -> IO[bytes]:
    """Open a regular file. Raises `OSError` for a pipe or a device, which may block."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(number, "rb")


def _check_sum(text: bytes, schema: int) -> None:
    """Raise `ValueError` if the file does not match its CRC-32."""
    body, mark, end = text.rpartition(_CRC_KEY.encode())
    if schema == 1 and not mark:
        return
    if end != _crc_end(body):
        raise ValueError("it was changed after it was saved (its CRC differs)")


def _check_name(path: Path, step: int) -> None:
    """Raise `ValueError` if the folder has the name of a different step."""
    match = NAME.fullmatch(path.name)
    if match is not None and int(match[1]) != step:
        raise ValueError(f"it is of step {step}, but the name of the folder is that of step {int(match[1])}")


def check_metadata(metadata: CheckpointMetadata) -> None:
    """Raise `TypeError`, `ValueError` or `OverflowError` for invalid values, because the file may be foreign."""
    for entry in dataclasses.fields(CheckpointMetadata):
        value = getattr(metadata, entry.name)
        kinds = _KINDS[str(entry.type).partition("[")[0]]
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise TypeError(f"{entry.name} is {type(value).__name__}")
    for name, minimum in (("step", 0), ("world_size", 1), ("updates_per_epoch", 0), ("global_batch", 1)):
        if not minimum <= getattr(metadata, name) < 1 << 63:
            raise ValueError(f"{name} is {getattr(metadata, name)}")
    if metadata.place and (
        metadata.place.keys() != {"epoch", "index"} or not all(map(_is_count, metadata.place.values()))
    ):
        raise ValueError(f"place is {metadata.place}")
    _check_metrics(metadata.metrics)
    if not all(isinstance(value, str) for value in (*metadata.aliases.values(), *metadata.versions.values())):
        raise TypeError("an alias or a version is not text")
    # printed text must not contain control sequences
    texts = [metadata.workload, metadata.layout, metadata.best_by, metadata.time, metadata.data_checksum or ""]
    texts += [text for pair in (metadata.aliases | metadata.versions).items() for text in pair]
    for text in (*texts, *metadata.metrics, *metadata.files, *metadata.settings):
        if not text.isprintable():
            raise ValueError(f"{text!r} has control characters")
    for name in metadata.files:
        if Path(name).name != name:
            raise ValueError(f"a file named {name!r}")


def _check_metrics(metrics: dict[str, float]) -> None:
    if not all(isinstance(value, int | float) for value in metrics.values()):
        raise TypeError("a metric is not a number")
    for value in metrics.values():
        float(value)  # raises OverflowError for an integer that is too large


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_KINDS: dict[str, Any] = {
    "int": int,
    "str": str,
    "float | None": int | float | None,
    "str | None": str | None,
    "dict": dict,
}


def damage(checkpoint: Checkpoint, names: list[str] | None = None, deep: bool = True) -> str | None:
    """Return a description of the first damaged file (of all, or of these names), or None.

    Compares only sizes; with `deep` also the CRC-32 of every file.
    """
    for name in checkpoint.metadata.files if names is None else names:
        size, crc = checkpoint.metadata.files[name]
        path = checkpoint.path / name
        try:
            with open_file(path) as file:
                num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes != size:
                return f"{name} has {num_bytes:,} of its {size:,} bytes"
            if deep and crc_of(path) != crc:
                return f"{name} was changed after it was saved (its CRC differs)"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return None


def crc_of(path: Path) -> int:
    """Return the CRC-32 of a file."""
    crc = 0
    with open_file(path) as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc
