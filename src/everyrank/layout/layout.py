"""A layout and its text form.

A layout is written `name[:key=value,...]`: `single`, `ddp`, `ddp:accumulate=4,precision=bf16`, `fsdp:shard=2`; a custom
one as `path/file.py[:function][:axis=size,...]`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from everyrank.errors import LayoutError
from everyrank.layout.options import BuildOptions, ParameterServerOptions
from everyrank.layout.table import AXES, SAMPLE_AXES, STRATEGIES, Kind, Strategy, find_strategy, problem_with

__all__ = ["PRECISIONS", "Layout", "check_reference", "parse_layout"]

_CUSTOM = re.compile(r"(?P<path>.*?\.py)(?P<name>:[A-Za-z_]\w*)?(?::(?P<rest>.*))?", re.DOTALL)
PRECISIONS = ("float64", "float32", "bf16", "fp16")
_APEX_LEVELS = {
    "O0": "O0 computed all in float32: leave precision out, or give precision=float32",
    "O1": (
        "O1 kept weights in float32 and ran a list of operators in fp16, with a loss scale: give precision=fp16, or "
        "bf16, which needs no loss scale"
    ),
    "O2": (
        "O2 computed in fp16 except for batch norm, from float32 master weights, with a loss scale: give "
        "precision=fp16 or bf16, whose weights are in float32"
    ),
    "O3": (
        "O3 kept weights in fp16 without master weights or loss scale, which rounds small updates away, and is not "
        "supported: give precision=fp16 or bf16"
    ),
}
"""Messages for values of opt_level of apex.amp.initialize (deprecated); see docs/mixed_precision.md."""

_TYPES: dict[str, type] = {
    "strategy": str,
    "degrees": Mapping,
    "accumulate": int,
    "precision": str,
    "recompute": bool,
    "compile": bool,
    "options": Mapping,
    "simulated": int,
}
_WANTED: dict[type, str] = {str: "text", int: "a whole number", bool: "True or False", Mapping: "a dict"}

T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """Where a workload runs: a strategy with its options. Same as `--layout` on the command line.

    Attributes:
        strategy: A key of `STRATEGIES` ("ddp"), or the `path/file.py[:function]` of a custom parallelize function.
        degrees: Number of ranks along a mesh axis. The strategy's own axis takes the remaining ranks by default.
        accumulate: Number of micro-batches of an update.
        precision: float64, float32, bf16 or fp16 (fp16 with loss scaling).
        recompute: Activation checkpointing of `Workload.blocks`.
        compile: Use torch.compile.
        options: Options of the strategy. For example `{"compress": "fp16"}` for ddp.
        simulated: 0: run on the ranks of the launch. N: one process simulates N ranks. Layouts that are different
            algorithms, such as local_sgd, are compared with this simulation.

    Raises:
        LayoutError: The strategy has no such value or option.

    Examples:
        >>> from everyrank import Layout
        >>> layout = Layout("fsdp", degrees={"tensor": 2}, precision="bf16")
        >>> str(layout)
        'fsdp:tensor=2,precision=bf16'
        >>> layout.mesh(8)
        {'shard': 4, 'tensor': 2}
    """

    strategy: str
    degrees: Mapping[str, int] = field(default_factory=dict[str, int], hash=False)
    accumulate: int = 1
    precision: str = "float32"
    recompute: bool = False
    compile: bool = False
    options: Mapping[str, object] = field(default_factory=dict[str, object], hash=False)
    simulated: int = 0

    def __post_init__(self) -> None:
        self._check_types()
        strategy = find_strategy(self.strategy)
        if strategy is None:
            raise LayoutError(f"layout {self.strategy!r}: {_suggest_strategy(self.strategy, STRATEGIES)}")
        if self.accumulate < 1:
            raise LayoutError(f"layout {self}: accumulate={self.accumulate}: give at least 1 micro-batch")
        if self.precision not in PRECISIONS:
            meant = _APEX_LEVELS.get(self.precision.upper())
            fix = f"Apex's {meant}" if meant else f"give one of {', '.join(PRECISIONS)}"
            raise LayoutError(f"layout {self}: precision={self.precision}: {fix}")
        for axis, degree in self.degrees.items():
            if axis != strategy.axis and axis not in strategy.also_axes and not strategy.any_axes:
                raise LayoutError(f"layout {self}: {self.strategy} has no mesh axis {axis}; {_keys_of(self.strategy)}")
            if degree < 1:
                raise LayoutError(f"layout {self}: {axis}={degree}: give at least 1 rank")
        self._check_options(strategy)

    def _check_types(self) -> None:
        """Raise `LayoutError` for a value that the text of a layout cannot have: Python callers may give anything."""
        values = {name: (getattr(self, name), kind) for name, kind in _TYPES.items()}
        if isinstance(self.degrees, Mapping):
            values |= {str(axis): (degree, int) for axis, degree in self.degrees.items()}
        for name, (value, kind) in values.items():
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise LayoutError(f"layout {self.strategy!r}: {name}={value!r}: give {_WANTED[kind]}")

    def _check_options(self, strategy: Strategy) -> None:
        kinds = strategy.kinds()
        for key, value in self.options.items():
            if key not in kinds:
                raise LayoutError(f"layout {self}: {self.strategy} has no key {key}; {_keys_of(self.strategy)}")
            problem = problem_with(value, kinds[key])
            if problem:
                raise LayoutError(f"layout {self}: {key}={_text(value)}: {problem}")
        for options in strategy.options:
            problem = self.read(options).conflict(self)
            if problem:
                raise LayoutError(f"layout {self}: {problem}")
        if self.simulated < 0 or (self.simulated and self.is_exact):
            raise LayoutError(
                f"layout {self}: simulated={self.simulated}: give at least 1 rank, and only for a layout that is not "
                "equivalent to one device; for others use single"
            )

    def read(self, kind: type[T]) -> T:
        """Return the options of one kind (a dataclass of options.py), with defaults for missing keys."""
        names = {option.name for option in dataclasses.fields(kind)}  # pyright: ignore[reportArgumentType]
        return kind(**{key: value for key, value in self.options.items() if key in names})

    def __str__(self) -> str:
        """Return the layout as the user types it, without defaults; `parse_layout` reads it back."""
        parts = [f"{axis}={degree}" for axis, degree in self.degrees.items()]
        if self.accumulate != 1:
            parts.append(f"accumulate={self.accumulate}")
        if self.precision != "float32":
            parts.append(f"precision={self.precision}")
        parts += [key for key in ("recompute", "compile") if getattr(self, key)]
        parts += [f"{key}={_text(value)}" for key, value in self.options.items()]
        parts += [f"simulated={self.simulated}"] if self.simulated else []
        return self.strategy + (":" + ",".join(parts) if parts else "")

    @property
    def row(self) -> Strategy:
        """The row of its strategy in the table."""
        row = find_strategy(self.strategy)
        assert row is not None, "no layout is made without one"
        return row

    @property
    def axis(self) -> str | None:
        """The strategy's own mesh axis; None for a strategy of one process."""
        return None if self.simulated else self.row.axis

    @property
    def is_exact(self) -> bool:
        """Whether training is equivalent to one device; otherwise it is compared with `simulation`."""
        return all(self.read(options).is_exact() for options in self.row.options)

    def simulation(self, world_size: int) -> Layout:
        """Return the layout that simulates this one on so many ranks, or devices of dataparallel, in one process."""
        sizes = self.mesh(world_size)
        if self.axis is None:
            ranks = self.simulated or world_size
        else:
            ranks = math.prod(size for axis, size in sizes.items() if axis in SAMPLE_AXES)
        return dataclasses.replace(self.repeatable(), degrees={}, simulated=ranks)

    @property
    def servers(self) -> int:
        """The number of parameter servers: ranks outside the mesh, before its first rank, that read no data."""
        has_servers = ParameterServerOptions in self.row.options and not self.simulated
        return self.read(ParameterServerOptions).servers if has_servers else 0

    def repeatable(self) -> Layout:
        """Return the layout with all timing-dependent choices drawn from the seed."""
        choices_of_options = [self.read(options).repeatable() for options in self.row.options]
        changes = {key: value for choices in choices_of_options for key, value in choices.items()}
        return dataclasses.replace(self, options={**self.options, **changes})

    def mesh(self, world_size: int) -> dict[str, int]:
        """Return the ranks along each mesh axis, outermost first, for a world of this size; {} for one process.

        For a custom function, only axes with a size are returned; its contract has the others. Raises `LayoutError`
        if the degrees do not multiply to the world size.
        """
        axis = self.axis
        if axis is None:
            return {}
        if self.row.any_axes:
            return self._fixed(world_size)
        if world_size <= self.servers:
            raise LayoutError(
                f"layout {self}: servers={self.servers} of {world_size} process{'es' * (world_size > 1)} leaves no "
                f"trainer; give --processes {self.servers + 1} or more"
            )
        world_size -= self.servers
        degrees = dict(self.degrees)
        fixed = math.prod(degree for key, degree in degrees.items() if key != axis)
        degrees.setdefault(axis, max(1, world_size // fixed))
        product = math.prod(degrees.values())
        if product != world_size:
            shown = " x ".join(f"{key} {degrees[key]}" for key in AXES if key in degrees)
            available = f"{world_size} processes" if not self.servers else f"{world_size} without the servers"
            raise LayoutError(
                f"layout {self}: {shown} = {product}, but there are {available}; "
                f"give --processes {product + self.servers}, or leave out {axis}= to use all of them"
            )
        return {key: degrees[key] for key in AXES if key in degrees}

    def check_processes(self, processes: int) -> None:
        """Raise `LayoutError` if a training with this layout cannot run on this number of ranks."""
        self.mesh(processes)
        if self.axis is None and processes > 1:
            raise LayoutError(f"layout {self} runs in one process, not in {processes}; use --processes 1")

    def _fixed(self, world_size: int) -> dict[str, int]:
        product = math.prod(self.degrees.values())
        if world_size % product:
            shown = " x ".join(f"{axis} {degree}" for axis, degree in self.degrees.items())
            raise LayoutError(
                f"layout {self}: {shown} = {product}, but there are {world_size} processes; "
                f"give --processes {product}, or a multiple of it"
            )
        return dict(self.degrees)


def parse_layout(text: str) -> Layout:
    """Parse a layout as you type it: `name[:key=value,...]`. A key without a value means true.

    Args:
        text: For example "ddp:accumulate=4,precision=bf16" or "my_parallel.py:tensor=2".

    Raises:
        LayoutError: The text is no layout, or its file is missing.

    Examples:
        >>> from everyrank import parse_layout
        >>> parse_layout("ddp:accumulate=4").accumulate
        4
        >>> parse_layout("dpp")
        Traceback (most recent call last):
        everyrank.errors.LayoutError: layout 'dpp': did you mean ddp? give one of ...
    """
    strategy, colon, options_text = _name_and_keys(text)
    row = find_strategy(strategy)
    if row is None:
        raise LayoutError(f"layout {text!r}: {_suggest_strategy(strategy, STRATEGIES)}")
    assignments = options_text.split(",") if colon else []
    pairs: dict[str, str] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not key or (equals and not value):
            raise LayoutError(f"layout {text!r}: {assignment!r} is not key=value; for example {strategy}:accumulate=4")
        if key in pairs:
            raise LayoutError(f"layout {text!r}: {key} is given twice")
        pairs[key] = value if equals else "true"
    options = row.kinds()
    common: dict[str, type] = {
        "accumulate": int,
        "precision": str,
        "recompute": bool,
        "compile": bool,
        "simulated": int,
    }
    values: dict[str, dict[str, object]] = {"degrees": {}, "common": {}, "options": {}}
    for key, value in pairs.items():
        if key in AXES or (row.any_axes and key not in common and key.isidentifier()):
            values["degrees"][key] = _read(text, key, value, int)
        elif key in common:
            values["common"][key] = _read(text, key, value, common[key])
        elif key in options:
            values["options"][key] = _read(text, key, value, options[key])
        else:
            known = [*common, *AXES, *options]
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise LayoutError(f"layout {text!r}: no key {key!r}; {hint}{_keys_of(strategy)}")
    return Layout(
        strategy,
        degrees=values["degrees"],  # type: ignore[arg-type]
        options=values["options"],
        **values["common"],  # type: ignore[arg-type]
    )


def _name_and_keys(text: str) -> tuple[str, str, str]:
    """Return (strategy, ":" or "", the options text). Raises `LayoutError` for a missing file."""
    match = _CUSTOM.fullmatch(text)
    if match is None:
        return text.partition(":")
    if not Path(match["path"]).is_file():
        raise LayoutError(f"layout {text!r}: there is no file {Path(match['path']).absolute()}")
    options_text = match["rest"]
    return match["path"] + (match["name"] or ""), ":" if options_text is not None else "", options_text or ""


def _read(text: str, key: str, value: str, kind: Kind) -> object:
    if isinstance(kind, tuple):
        return value  # `Layout` checks the value
    booleans = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if kind is bool:
        if value.lower() not in booleans:
            raise LayoutError(f"layout {text!r}: {key}={value}: give true or false")
        return booleans[value.lower()]
    try:
        return kind(value)
    except ValueError:
        kind_text = "a whole number" if kind is int else "a number"
        raise LayoutError(f"layout {text!r}: {key}={value}: give {kind_text}") from None


def _text(value: object) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _keys_of(strategy: str) -> str:
    entry = find_strategy(strategy)
    assert entry is not None
    keys = [*([entry.axis] if entry.axis else []), *entry.also_axes, *entry.kinds()]
    return f"{strategy} takes accumulate, precision, recompute, compile{''.join(', ' + key for key in keys)}"


def _suggest_strategy(name: str, table: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, table, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}give one of {', '.join(table)}"


# --- a layout as the reference, if the model does not fit on one device (`verify --reference`)


def check_reference(layout: Layout, reference: Layout, world_size: int) -> None:
    """Raise `LayoutError` if `reference` cannot replace one device, or is the same layout.

    Layouts that differ only in precision or meta count as the same.
    """
    if reference.row.any_axes:
        raise LayoutError(
            f"--reference {reference}: a custom parallelize function cannot be the reference; give a built-in layout"
        )
    if not reference.is_exact or reference.servers or reference.simulated:
        raise LayoutError(
            f"--reference {reference}: not equivalent to one device, or with servers; give fsdp, tensor or pipeline"
        )
    if _result_key(layout, world_size) == _result_key(reference, world_size):
        raise LayoutError(f"layout {layout}: it is the same as --reference {reference}; give a different reference")


def _result_key(layout: Layout, world_size: int) -> tuple[object, ...]:
    """Return what determines the result of a layout: strategy, mesh and options."""
    options = tuple(layout.read(kind) for kind in layout.row.options if kind is not BuildOptions)
    common = dataclasses.replace(layout, degrees={}, options={}, precision="float32")
    return common, tuple(layout.mesh(world_size).items()), options
