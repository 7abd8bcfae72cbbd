"""Where the mathematics runs: the strategy, the degree of each mesh axis, and what is common to all layouts.

A layout is written `name[:key=value,...]`: `single`, `ddp`, `ddp:accumulate=4,precision=bf16`, `fsdp:shard=2`.
This module imports no torch: a mistyped layout costs no seconds.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from everyrank.errors import LayoutError

__all__ = ["AXES", "PRECISIONS", "STRATEGIES", "Layout", "Strategy", "parse_layout"]

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""Mesh axes, outermost first: ranks that are neighbours on the last axis are neighbours in number, too.

(An expert axis would stand between context and tensor.)
"""

PRECISIONS = ("float64", "float32", "bf16", "fp16")


Option = type | tuple[str, ...]


@dataclass(frozen=True)
class Strategy:
    """One line of the table below.

    module      where its `prepare` is
    axis        the mesh axis that takes the ranks; None: it runs in one process, whatever the world
    options     keys of its own, with the type of their value, or the words it may be
    others      further mesh axes that it goes with
    """

    module: str
    axis: str | None
    options: Mapping[str, Option] = field(default_factory=dict[str, Option])
    others: tuple[str, ...] = ()


_DDP: dict[str, Option] = {"bucket_mb": float, "static_graph": bool, "find_unused": bool}
_TENSOR: dict[str, Option] = {"sequence": bool}
_CONTEXT: dict[str, Option] = {"method": ("ring", "ulysses")}
_PIPELINE: dict[str, Option] = {
    "schedule": ("1f1b", "gpipe", "interleaved", "zero-bubble"),
    "microbatches": int,
    "chunks": int,
}

STRATEGIES: dict[str, Strategy] = {
    "single": Strategy("everyrank.strategies.single", None, {"devices": int}),
    "dataparallel": Strategy("everyrank.strategies.dataparallel", None),
    "ddp": Strategy(
        "everyrank.strategies.ddp", "replicate", _DDP | _CONTEXT | _TENSOR | {"devices": int}, ("context", "tensor")
    ),
    "zero1": Strategy("everyrank.strategies.zero1", "replicate", _DDP),
    "fsdp": Strategy(
        "everyrank.strategies.fsdp",
        "shard",
        {"reshard_after_forward": bool, "meta": bool} | _CONTEXT | _TENSOR,
        ("replicate", "context", "tensor"),
    ),
    "tensor": Strategy("everyrank.strategies.tensor", "tensor", _TENSOR),
    "context": Strategy("everyrank.strategies.context", "context", _CONTEXT | {"find_unused": bool}),
    "pipeline": Strategy("everyrank.strategies.pipeline", "pipeline", _PIPELINE, ("replicate", "shard", "tensor")),
}
"""Deleting a strategy is removing its file and its line here."""


@dataclass(frozen=True)
class Layout:
    """Where the mathematics runs.

    strategy    a key of `STRATEGIES`
    degrees     ranks along a mesh axis, where they are fixed; the strategy's own axis takes what is left
    accumulate  micro-batches that each update is cut into, before it is cut over ranks
    precision   float64, float32, bf16 or fp16 (the last with loss scaling)
    recompute   activation checkpointing of `Workload.blocks`
    compile     torch.compile
    options     keys of the strategy's own

    Raises `LayoutError` for a value that the strategy does not know.
    """

    strategy: str
    degrees: Mapping[str, int] = field(default_factory=dict[str, int], hash=False)
    accumulate: int = 1
    precision: str = "float32"
    recompute: bool = False
    compile: bool = False
    options: Mapping[str, object] = field(default_factory=dict[str, object], hash=False)

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise LayoutError(f"layout {self.strategy!r}: {_known(self.strategy, STRATEGIES)}")
        strategy = STRATEGIES[self.strategy]
        if self.accumulate < 1:
            raise LayoutError(f"layout {self}: accumulate={self.accumulate}: give at least 1 micro-batch")
        if self.precision not in PRECISIONS:
            raise LayoutError(f"layout {self}: precision={self.precision}: give one of {', '.join(PRECISIONS)}")
        for axis, degree in self.degrees.items():
            if axis != strategy.axis and axis not in strategy.others:
                raise LayoutError(f"layout {self}: {self.strategy} has no mesh axis {axis}; {_keys_of(self.strategy)}")
            if degree < 1:
                raise LayoutError(f"layout {self}: {axis}={degree}: give at least 1 rank")
        for key, value in self.options.items():
            if key not in strategy.options:
                raise LayoutError(f"layout {self}: {self.strategy} has no key {key}; {_keys_of(self.strategy)}")
            problem = _problem_with(key, value, strategy.options[key])
            if problem:
                raise LayoutError(f"layout {self}: {key}={_text(value)}: {problem}")
        problem = self._do_not_go_together()
        if problem:
            raise LayoutError(f"layout {self}: {problem}")

    def _do_not_go_together(self) -> str:
        """What is wrong with the keys beside each other; nothing: an empty text."""
        if self.strategy == "dataparallel" and self.recompute:
            return "its copies of the model do not survive recompute; use ddp"
        if self.strategy == "dataparallel" and self.compile:
            return (
                "what is compiled keeps the weights of the first device, and each copy of the model would answer with "
                "them; leave out compile, or use ddp:compile"
            )
        if self.options.get("static_graph") and self.accumulate > 1:
            return (
                "torch learns a static graph while it sends gradients, and the first backward of several micro-batches "
                "sends none; leave out static_graph or accumulate"
            )
        is_zero_bubble = self.options.get("schedule") == "zero-bubble"
        split = [axis for axis in ("shard", "tensor") if self.degrees.get(axis, 1) > 1]
        if is_zero_bubble and split:
            return f"gradients of weights that lie in parts ({split[0]}) cannot wait; use schedule=1f1b"
        if is_zero_bubble and self.compile:
            return "the compiler does not know of weight gradients that wait; leave out compile, or use schedule=1f1b"
        if "chunks" in self.options and self.options.get("schedule") != "interleaved":
            return "chunks is for schedule=interleaved"
        for key, axis in (("sequence", "tensor"), ("method", "context")):
            if key in self.options and self.axis != axis and self.degrees.get(axis, 1) == 1:
                return f"{key} is for an axis that this layout has not; give {axis}=2, say"
        return ""

    def __str__(self) -> str:
        """The layout as one types it, defaults left out; `parse_layout` reads it back."""
        parts = [f"{axis}={degree}" for axis, degree in self.degrees.items()]
        if self.accumulate != 1:
            parts.append(f"accumulate={self.accumulate}")
        if self.precision != "float32":
            parts.append(f"precision={self.precision}")
        parts += [key for key in ("recompute", "compile") if getattr(self, key)]
        parts += [f"{key}={_text(value)}" for key, value in self.options.items()]
        return self.strategy + (":" + ",".join(parts) if parts else "")

    @property
    def axis(self) -> str | None:
        """The strategy's own mesh axis; None for a strategy of one process."""
        return STRATEGIES[self.strategy].axis

    def mesh(self, world_size: int) -> dict[str, int]:
        """Ranks along each mesh axis, outermost first, for a world of this size; {} for one process.

        Raises `LayoutError`, with the product, when the degrees do not multiply to the world size.
        """
        axis = self.axis
        if axis is None:
            return {}
        degrees = dict(self.degrees)
        fixed = math.prod(degree for key, degree in degrees.items() if key != axis)
        degrees.setdefault(axis, max(1, world_size // fixed))
        product = math.prod(degrees.values())
        if product != world_size:
            shown = " x ".join(f"{key} {degrees[key]}" for key in AXES if key in degrees)
            raise LayoutError(
                f"layout {self}: {shown} = {product}, but there are {world_size} processes; "
                f"give --processes {product}, or leave out {axis}= to take all of them"
            )
        return {key: degrees[key] for key in AXES if key in degrees}


def parse_layout(text: str) -> Layout:
    """Read `name[:key=value,...]`; a key without a value means true. Raises `LayoutError`."""
    strategy, colon, rest = text.partition(":")
    if strategy not in STRATEGIES:
        raise LayoutError(f"layout {text!r}: {_known(strategy, STRATEGIES)}")
    words = rest.split(",") if colon else []
    pairs: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not key or (equals and not value):
            raise LayoutError(f"layout {text!r}: {word!r} is not key=value; for example {strategy}:accumulate=4")
        if key in pairs:
            raise LayoutError(f"layout {text!r}: {key} is given twice")
        pairs[key] = value if equals else "true"
    options = STRATEGIES[strategy].options
    common: dict[str, type] = {"accumulate": int, "precision": str, "recompute": bool, "compile": bool}
    found: dict[str, dict[str, object]] = {"degrees": {}, "common": {}, "options": {}}
    for key, value in pairs.items():
        if key in AXES:
            found["degrees"][key] = _read(text, key, value, int)
        elif key in common:
            found["common"][key] = _read(text, key, value, common[key])
        elif key in options:
            found["options"][key] = _read(text, key, value, options[key])
        else:
            known = [*common, *AXES, *options]
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise LayoutError(f"layout {text!r}: no key {key!r}; {hint}{_keys_of(strategy)}")
    return Layout(
        strategy,
        degrees=found["degrees"],  # type: ignore[arg-type]
        options=found["options"],
        **found["common"],  # type: ignore[arg-type]
    )


def _read(text: str, key: str, value: str, kind: Option) -> object:
    if isinstance(kind, tuple):
        return value  # `Layout` knows which words may be
    truths = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if kind is bool:
        if value.lower() not in truths:
            raise LayoutError(f"layout {text!r}: {key}={value}: give true or false")
        return truths[value.lower()]
    try:
        return kind(value)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise LayoutError(f"layout {text!r}: {key}={value}: give {wanted}") from None


def _problem_with(key: str, value: object, kind: Option) -> str:
    """What is wrong with the value of a strategy's key; nothing: an empty text."""
    if isinstance(kind, tuple):
        return "" if value in kind else f"give one of {', '.join(kind)}"
    if kind is int and not (isinstance(value, int) and value >= 1):
        return "give at least 1"
    if key == "bucket_mb" and not (isinstance(value, int | float) and 0 < value < math.inf):
        return "give a size above 0 MiB"
    return ""


def _text(value: object) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _keys_of(strategy: str) -> str:
    entry = STRATEGIES[strategy]
    own = [*([entry.axis] if entry.axis else []), *entry.others, *entry.options]
    return f"{strategy} takes accumulate, precision, recompute, compile{''.join(', ' + key for key in own)}"


def _known(name: str, table: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, table, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}give one of {', '.join(table)}"
