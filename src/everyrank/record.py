"""Record: the results of one run (numbers with intervals, parity, provenance), as JSON. Imports no torch.

The schema is public. A field that was not measured is null, never zero.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everyrank.errors import UsageError

__all__ = [
    "SCHEMA",
    "Breakdown",
    "Bubble",
    "Collective",
    "Interval",
    "Membership",
    "Parity",
    "Record",
    "Resources",
    "Scaling",
    "read_records",
    "write_records",
    "write_text",
]

SCHEMA = 1
_MAX_INTEGER = 2**63  # larger integers cannot be displayed


@dataclass(frozen=True)
class Interval:
    """A median over trials, with the 95% bootstrap interval of that median."""

    median: float
    low: float
    high: float
    trials: int = 1


@dataclass(frozen=True)
class Parity:
    """Whether the run was compared with one device, and how that ended.

    status                    equal, different, refused (this layout does not support the workload) or not_verified
    bitwise                   every loss was equal to the last bit
    max_relative_difference   of the first divergence, or else of the loss closest to its tolerance
    tolerance                 the tolerance of that difference
    scope                     what was compared: "20 updates", "to update 5, rounding grows beyond"
    first_divergence          "update 3, tensor layers.0.weight"
    cause                     the likely cause of a difference
    reason                    why it was not verified
    checks                    each comparison with its result
    reference                 the layout that replaced `single` as the reference; None: `single` itself
    not_compared              tensors that could not be put together from the ranks (a custom parallelize function), and
                              values in the model's state that are no tensors
    """

    status: str
    bitwise: bool | None = None
    max_relative_difference: float | None = None
    tolerance: float | None = None
    scope: str | None = None
    first_divergence: str | None = None
    cause: str | None = None
    reason: str | None = None
    checks: list[str] = field(default_factory=list[str])
    reference: str | None = None
    not_compared: list[str] = field(default_factory=list[str])

    @property
    def outcome(self) -> str:
        """Return a line: `equal`, `DIFFERENT: update 3, ...`, `refused: why` or `not verified here: why`."""
        if self.status == "refused":
            return f"refused: {self.reason}"
        if self.status == "not_verified":
            return f"not verified here: {self.reason}"
        if self.status == "equal":
            return f"equal ({self.scope})" if self.scope else "equal"
        return "DIFFERENT" + (f": {self.first_divergence}" if self.first_divergence else "")


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one step by phase, on the rank that waits least for the others.

    `error` is how far the sum may be from the timed step: the 95% bound of the difference over paired runs.
    """

    data: float
    forward: float
    backward: float
    exposed_communication: float
    optimizer: float
    error: float | None = None


@dataclass(frozen=True)
class Collective:
    """One kind of communication in an update: how often, and how many bytes one rank contributes.

    If the ranks communicate only every N updates, both are totals of `updates` updates.
    """

    op: str
    group: str
    count: int
    bytes: int
    updates: int = 1

    @property
    def bytes_per_update(self) -> float:
        """Return the average over those updates."""
        return self.bytes / self.updates

    @property
    def text(self) -> str:
        """`1 all-reduce`, `1 all-reduce in 8 updates`."""
        return f"{self.count} {self.op.replace('_', '-')}" + (f" in {self.updates} updates" * (self.updates > 1))


@dataclass(frozen=True)
class Resources:
    """Samples of the resource use of this host while a layout ran; each list has one entry per sample.

    seconds            time since the call
    cpu_percent        of all ranks and their loader workers, in percent of one core
    memory_bytes       resident memory of these processes (shared pages count in each)
    gpu_percent, gpu_memory_bytes   sum over all GPUs, of all programs; empty without nvidia-smi
    others_percent     CPU use of other programs on the same cores, in percent of one core
    """

    interval_seconds: float
    seconds: list[float] = field(default_factory=list[float])
    cpu_percent: list[float] = field(default_factory=list[float])
    memory_bytes: list[int] = field(default_factory=list[int])
    gpu_percent: list[float] = field(default_factory=list[float])
    gpu_memory_bytes: list[int] = field(default_factory=list[int])
    others_percent: list[float] = field(default_factory=list[float])


@dataclass(frozen=True)
class Bubble:
    """The pipeline bubble: the fraction of micro-batch time in which ranks are idle.

    theory     from the schedule, if a backward takes twice a forward, stages are equal and sending takes no time
    measured   time of waiting for messages: the mean over ranks, relative to the time of the slowest rank. Only on CPU;
               on CUDA the device waits, not the program
    """

    theory: float
    measured: float


@dataclass(frozen=True)
class Scaling:
    """Scaling efficiency: throughput relative to one rank, divided by the number of ranks.

    kind   strong: the same global batch; weak: the same batch for each rank
    """

    kind: str
    efficiency: Interval


@dataclass(frozen=True)
class Membership:
    """The ranks and hosts of one start of a training, and the time lost before it.

    started            by the clock of rank 0's host, in seconds since 1970
    first_update       updates done at the checkpoint that it resumed from
    repeated_updates   updates of the previous start after its last checkpoint
    lost_seconds       from the last update of the previous start to the first of this one; None if nothing was lost
                       (the first start, or after a finished training), or if there was no update
    """

    started: float
    world_size: int
    hosts: list[str]
    first_update: int
    repeated_updates: int = 0
    lost_seconds: float | None = None


@dataclass(frozen=True)
class Record:
    """All results of one run. docs/records.md describes the fields. A value that was not measured is None.

    Examples:
        >>> from everyrank import Record
        >>> record = Record("digits", "ddp", launcher="spawn", backend="gloo", device="cpu", world_size=2)
        >>> record.parity.outcome
        'not verified here: no check was requested'
        >>> print(record.step_seconds)
        None
    """

    workload: str
    layout: str
    launcher: str
    backend: str
    device: str
    world_size: int
    schema: int = SCHEMA
    parity: Parity = field(default_factory=lambda: Parity("not_verified", reason="no check was requested"))
    throughput_samples_per_second: Interval | None = None
    ratio_to_single: Interval | None = None
    step_seconds: Interval | None = None
    epoch_seconds: float | None = None
    breakdown_seconds: Breakdown | None = None
    peak_memory_bytes: int | None = None
    collectives: list[Collective] = field(default_factory=list[Collective])
    startup_seconds: float | None = None
    first_step_seconds: float | None = None
    checkpoint_stall_seconds: Interval | None = None
    scaling: Scaling | None = None
    bubble: Bubble | None = None
    resources: Resources | None = None
    memberships: list[Membership] = field(default_factory=list[Membership])
    loss: list[float] = field(default_factory=list[float])
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    provenance: dict[str, Any] = field(default_factory=dict[str, Any])


def write_records(records: Sequence[Record], path: str | Path) -> None:
    """Write a list of Records as JSON. Numbers keep all their digits; NaN is written as null.

    Args:
        records: The results of `run`, `verify` or `bench`.
        path: The file. Missing folders are created.

    Examples:
        >>> from everyrank import Record, read_records, write_records
        >>> write_records([Record("digits", "ddp", "spawn", "gloo", "cpu", 2)], "records.json")
        >>> [record.layout for record in read_records("records.json")]
        ['ddp']
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([_plain(dataclasses.asdict(record)) for record in records], indent=1, allow_nan=False)
    write_text(path, text + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file. Adds its name to an `OSError`, because Python leaves it out for a full disk."""
    try:
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _plain(value: Any) -> Any:
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def read_records(path: str | Path) -> list[Record]:
    """Read the Records that `write_records` or `--json` wrote.

    Args:
        path: The file.

    Raises:
        UsageError: The file is not a list of Records.

    Examples:
        >>> from everyrank import read_records
        >>> for record in read_records("records.json"):
        ...     print(record.layout, record.parity.status)
        ddp not_verified
    """
    path = Path(path)
    if path.is_fifo() and path.absolute().parts[1:2] not in (
        ("dev",),
        ("proc",),
    ):  # a shell makes pipes there for <(...)
        raise UsageError(f"{path}: a named pipe; give a file that --json wrote")
    try:
        text = path.read_text(encoding="utf-8")
        rows = json.loads(text)
        if "\\ud" in text.lower():  # an unpaired surrogate, which JSON allows but files and fonts do not
            rows = json.loads(json.dumps(rows, ensure_ascii=False).encode("utf-8", "replace"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON ({error}); give a file that --json wrote") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{path}: not a list of Records; give a file that --json wrote")
    return [_record(path, row) for row in rows]


def _record(path: Path, row: dict[str, Any]) -> Record:
    schema = row.get("schema")
    if schema != SCHEMA:
        raise UsageError(f"{path}: schema {schema!r}, this everyrank reads schema {SCHEMA}")
    try:
        return _build(Record, row)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UsageError(f"{path}: not a Record: {error}") from error


def _build(kind: Any, value: Any) -> Any:
    """Convert parsed JSON to the annotated type. Raises ValueError that names the wrong field."""
    origin = typing.get_origin(kind)
    if kind is Any:
        return value
    if kind is float and value is None:
        return math.nan  # NaN is written as null
    if origin in (types.UnionType, typing.Union):
        options = [option for option in typing.get_args(kind) if option is not type(None)]
        return None if value is None else _build(options[0], value)
    if origin is list and isinstance(value, list):
        (item,) = typing.get_args(kind)
        return [_build(item, entry) for entry in value]
    if origin is dict and isinstance(value, dict):
        _, item = typing.get_args(kind)
        return {key: _build(item, entry) for key, entry in value.items()}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        hints = typing.get_type_hints(kind)
        unknown = set(value) - set(hints)
        if unknown:
            raise ValueError(f"unknown field {min(unknown)!r}")
        return kind(**{key: _build(hints[key], item) for key, item in value.items()})
    if kind is int and isinstance(value, int) and abs(value) >= _MAX_INTEGER:
        raise ValueError(f"a number of {len(str(value))} digits is too large for a Record")
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and isinstance(value, kind):
        return value
    raise ValueError(f"{value!r} is not {getattr(kind, '__name__', kind)}")
