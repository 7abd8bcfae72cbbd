"""The table of strategies, one row each. Their options are in options.py."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from everyrank.layout.options import (
    BatchNormOptions,
    BuildOptions,
    CompressOptions,
    ContextOptions,
    CustomOptions,
    DataParallelOptions,
    DDPOptions,
    DeviceOptions,
    FSDPOptions,
    HorovodOptions,
    LocalSGDOptions,
    ParameterServerOptions,
    PipelineOptions,
    TensorOptions,
)

__all__ = ["AXES", "DATA_AXES", "SAMPLE_AXES", "STRATEGIES", "Strategy", "find_strategy", "problem_with"]

AXES = ("pipeline", "replicate", "shard", "context", "expert", "tensor")
"""Mesh axes, outermost first: neighbours on the last axis have consecutive ranks."""

SAMPLE_AXES = ("replicate", "shard", "expert")
"""Axes whose ranks read different samples."""

DATA_AXES = ("replicate", "shard", "context", "expert")
"""Axes whose ranks have different samples or positions: their losses and gradients are summed."""


Kind = type | tuple[str, ...]
"""The type of a value, or the allowed values."""


@dataclass(frozen=True)
class Strategy:
    """One row of the table below.

    module      where its `prepare` is
    header      the module whose docstring describes the strategy; "": the same
    instead     mesh axis -> the module that prepares the layout if that axis has several ranks
    axis        the mesh axis of the ranks; None: runs in one process
    options     the options of its mechanisms
    also_axes   other mesh axes that it can be combined with
    any_axes    its mesh axes have names chosen by the user
    simulation  the file of strategies/simulated/ that simulates the ranks in one process, for options that are not
                equivalent to one device
    """

    module: str
    axis: str | None
    options: tuple[type[Any], ...] = ()
    also_axes: tuple[str, ...] = ()
    any_axes: bool = False
    simulation: str = ""
    header: str = ""
    instead: Mapping[str, str] = field(default_factory=dict[str, str])

    def kinds(self) -> Mapping[str, Kind]:
        """Return key -> type of its value, for all options of the strategy."""
        return {key: kind for options in self.options for key, kind in _kinds_of(options).items()}


@functools.cache  # called for every Layout, and reading annotations is slow
def _kinds_of(options: type[Any]) -> Mapping[str, Kind]:
    hints = typing.get_type_hints(options)
    return {field.name: _kind(hints[field.name]) for field in dataclasses.fields(options)}


def _kind(annotation: Any) -> Kind:
    if typing.get_origin(annotation) is Literal:
        return typing.get_args(annotation)
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):  # X | None
        return typing.get_args(annotation)[0]
    return annotation


def problem_with(value: object, kind: Kind) -> str:
    """Return a message about a wrong value of a key, or ""."""
    if isinstance(kind, tuple):
        return "" if value in kind else f"give one of {', '.join(kind)}"
    if kind is bool and not isinstance(value, bool):
        return "give true or false"
    if kind is int and not (isinstance(value, int) and value >= 1):
        return "give at least 1"
    if kind is float and not (isinstance(value, int | float) and 0 < value < math.inf):
        return "give a number above 0"
    return ""


STRATEGIES: dict[str, Strategy] = {
    "single": Strategy("everyrank.strategies.single", None, (DeviceOptions,)),
    "dataparallel": Strategy(
        "everyrank.strategies.dataparallel", None, (DataParallelOptions, BatchNormOptions), simulation="replicas"
    ),
    "ddp": Strategy(
        "everyrank.strategies.ddp",
        "replicate",
        (DDPOptions, BatchNormOptions, CompressOptions, ContextOptions, TensorOptions, DeviceOptions, BuildOptions),
        ("context", "expert", "tensor"),
        simulation="replicas",
        # replicas of split matrices are replicas of shards, with one shard
        instead={"tensor": "everyrank.strategies.fsdp"},
    ),
    "zero1": Strategy("everyrank.strategies.zero1", "replicate", (DDPOptions, BatchNormOptions), simulation="replicas"),
    "horovod": Strategy(
        "everyrank.strategies.horovod", "replicate", (HorovodOptions, BatchNormOptions), simulation="horovod"
    ),
    "fsdp": Strategy(
        "everyrank.strategies.fsdp",
        "shard",
        (FSDPOptions, BuildOptions, BatchNormOptions, ContextOptions, TensorOptions),
        ("replicate", "context", "expert", "tensor"),
        simulation="replicas",
    ),
    "tensor": Strategy("everyrank.strategies.tensor", "tensor", (TensorOptions, BuildOptions)),
    # except for attention and experts, these are ddp on a mesh with another axis
    "context": Strategy(
        "everyrank.strategies.ddp", "context", (ContextOptions, DDPOptions), header="everyrank.parallel.context"
    ),
    "expert": Strategy("everyrank.strategies.ddp", "expert", (DDPOptions,), header="everyrank.parallel.expert"),
    "pipeline": Strategy(
        "everyrank.strategies.pipeline", "pipeline", (PipelineOptions, BuildOptions), ("replicate", "shard", "tensor")
    ),
    "local_sgd": Strategy("everyrank.strategies.local_sgd", "replicate", (LocalSGDOptions,), simulation="local_sgd"),
    "parameter_server": Strategy(
        "everyrank.strategies.parameter_server", "replicate", (ParameterServerOptions,), simulation="parameter_server"
    ),
}
"""To delete a strategy, remove its file, its row here, and options that no other row has."""

_CUSTOM = Strategy("everyrank.strategies.custom", "data", (CustomOptions,), any_axes=True)
"""The row of every `path/file.py[:name]`: the function there lays out the model (layout/contract.py)."""


def find_strategy(name: str) -> Strategy | None:
    """Return the row of a strategy: one of the table, or the row of custom functions for `path/file.py[:name]`."""
    return _CUSTOM if ".py" in name else STRATEGIES.get(name)
