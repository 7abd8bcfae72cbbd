"""The options of each call, defined once for the command line and for `run`, `verify` and `bench`.

The command line makes flags from the fields that have an `Argument` (`commands/arguments.py`); `run`, `verify` and
`bench` accept the same fields by name. The options are sent to the ranks. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from everyrank.errors import UsageError

__all__ = [
    "AUTO",
    "GUARDS",
    "Argument",
    "BenchOptions",
    "ChaosOptions",
    "PredictOptions",
    "TrainOptions",
    "VerifyOptions",
    "arguments_of",
    "check_minimums",
]

_Type = TypeVar("_Type", bound=type)


@dataclass(frozen=True)
class Argument:
    """Describes the command line flag of a field, in addition to its name, type and default.

    `keep: Annotated[int, Argument("the last K checkpoints stay", "K", minimum=1)] = 3`

    help      text of `--help`, in which `%(default)s` is the default
    metavar   name of the value in `--help`
    minimum   smallest accepted number
    flag      the flag; "": made from the name of the field
    """

    help: str
    metavar: str | None = None
    minimum: int | None = None
    flag: str = ""


def arguments_of(options: type[Any]) -> dict[str, tuple[Any, Argument]]:
    """Return (type, Argument with its flag) by field name, for fields that have an `Argument`."""
    result: dict[str, tuple[Any, Argument]] = {}
    for name, hint in get_type_hints(options, include_extras=True).items():
        if hasattr(hint, "__metadata__"):
            kind, argument = get_args(hint)
            result[name] = kind, dataclasses.replace(argument, flag=argument.flag or f"--{name.replace('_', '-')}")
    return result


def check_minimums(options: object) -> None:
    """Raise `UsageError` for a number below the option's minimum."""
    for name, (_, argument) in arguments_of(type(options)).items():
        value = getattr(options, name)
        if isinstance(value, int | float) and argument.minimum is not None and value < argument.minimum:
            raise UsageError(f"{argument.flag} {value}: give at least {argument.minimum}")


def _with_helps(options: _Type) -> _Type:
    """Return the class. The last section of its docstring, the attributes, continues with the texts of `--help`."""
    helps = {
        name: argument.help % {"default": getattr(options, name, "")}
        for name, (_, argument) in arguments_of(options).items()
    }
    lines = [f"    {name}: {text[0].upper()}{text[1:]}." for name, text in helps.items()]
    options.__doc__ = "\n".join([inspect.cleandoc(f"{options.__doc__}"), *lines])
    return options


@dataclass(frozen=True, kw_only=True)
class _Call:
    """Fields of every call.

    show               print progress and results
    command, started   the command line, and the time of the call in seconds since 1970; set by the called function
    """

    show: bool = True
    command: list[str] = field(default_factory=list[str])
    started: float = 0.0


GUARDS = ("stop", "warn")
AUTO = "auto"  # as --save-every
_EVALUATE_EVERY = "updates between two evaluations (default: an epoch, 0: only at the end)"
_SAVE_EVERY = (
    "updates between two checkpoints (default: an epoch, 0: never, auto: chosen from the saving time and --mtbf)"
)
_GUARD = "compare replicas bit by bit. If they differ, end the training (stop) or print a warning (warn)"
_GUARD_EVERY = "updates between two comparisons (default %(default)s). Each checkpoint is preceded by one"


@_with_helps
@dataclass(frozen=True, kw_only=True)
class TrainOptions(_Call):
    """The options of `everyrank train` and `run`.

    In Python, no file is written if `out` is None, and `resume` is always a folder.

    Examples:
        >>> from everyrank import TrainOptions
        >>> TrainOptions(epochs=3, keep=1).save_async
        False

    Attributes:
        show: Print progress and results.
        before_update: `(prepared, number) -> None`, called in every rank before each update. `everyrank chaos` uses it
            to put a fault into a real run. It is sent to the ranks by pickle.
    """

    epochs: Annotated[int | None, Argument("number of epochs, instead of the workload's", "E", minimum=1)] = None
    steps: Annotated[int | None, Argument("total number of updates, instead of the workload's", "K", minimum=1)] = None
    out: Annotated[
        Path | None,
        Argument(
            "folder for logs (log.jsonl, log.csv, events.jsonl, epochs.csv, resources.csv), checkpoints and "
            "record.json (default: runs/...)",
            "DIR",
        ),
    ] = None
    resume: Annotated[
        Path | None,
        Argument(
            "resume from the newest checkpoint of a run, or from a checkpoint, with any layout; without DIR: from "
            "--out, or from the beginning if it has no checkpoint",
            "DIR",
        ),
    ] = None
    pretrained: Annotated[Path | None, Argument("start from these weights: safetensors or a state dict", "F")] = None
    evaluate: Annotated[bool, Argument("evaluate the model of --resume or --pretrained, without training")] = False
    evaluate_every: Annotated[int | None, Argument(_EVALUATE_EVERY, "K", minimum=0)] = None
    save_every: Annotated[int | str | None, Argument(_SAVE_EVERY, "K", minimum=0)] = None
    mtbf: Annotated[
        float,
        Argument("mean hours between failures of this job, for --save-every auto (default %(default)s)", "HOURS"),
    ] = 24.0
    save_async: Annotated[bool, Argument("write checkpoints while training continues")] = False
    keep: Annotated[int, Argument("keep the last K checkpoints (default %(default)s)", "K", minimum=1)] = 3
    best_by: Annotated[
        str | None,
        Argument(
            "metric that selects the best checkpoint, which is kept, too: NAME, NAME:min or NAME:max "
            "(default: the first of the workload)",
            "METRIC",
            flag="--best",
        ),
    ] = None
    trackers: Annotated[tuple[str, ...], Argument("also log to tensorboard, wandb", "T", flag="--tracker")] = ()
    profile: Annotated[Path | None, Argument("write a trace of one step of all ranks (Perfetto)", "F")] = None
    guard: Annotated[str | None, Argument(_GUARD)] = None
    guard_every: Annotated[int, Argument(_GUARD_EVERY, "K", minimum=1)] = 50
    before_update: Callable[[Any, int], None] | None = None
    cudnn_benchmark: Annotated[
        bool, Argument("let cuDNN choose the fastest kernel for each input shape, which changes the last digits")
    ] = False
    deterministic: Annotated[bool, Argument("use deterministic kernels (slower), and fail if torch has none")] = False


@_with_helps
@dataclass(frozen=True, kw_only=True)
class PredictOptions(_Call):
    """The options of `everyrank predict`. Give `resume` or `pretrained`.

    Attributes:
        show: Print progress and results.
    """

    out: Annotated[Path, Argument("output with a row for each sample: F.jsonl or F.npy", "F")]
    resume: Annotated[Path | None, Argument("the run (its newest checkpoint), or a checkpoint", "DIR")] = None
    pretrained: Annotated[Path | None, Argument("weights: safetensors, or a state dict", "F")] = None
    training_data: Annotated[
        bool, Argument("predict the training data instead of the evaluation data", flag="--train-data")
    ] = False


@_with_helps
@dataclass(frozen=True, kw_only=True)
class VerifyOptions(_Call):
    """The options of `everyrank verify` and `verify`.

    Examples:
        >>> from everyrank import VerifyOptions
        >>> VerifyOptions(quick=True).steps
        20

    Attributes:
        show: Print progress and results.
        explicit: The user named these layouts. A layout that the workload does not support is then refused. Otherwise
            it is not verified, with the reason.
    """

    steps: Annotated[int, Argument("updates to compare (default %(default)s)", "K", minimum=1)] = 20
    quick: Annotated[bool, Argument("compare only six updates in float64; prints the checks that it leaves out")] = (
        False
    )
    fresh: Annotated[bool, Argument("run single again, without the cached result of an earlier call")] = False
    samples: Annotated[bool, Argument("check that each sample is trained on once and evaluated once")] = False
    reference: Annotated[
        str | None, Argument("compare with this layout, if the model does not fit on one device", "L")
    ] = None
    explicit: bool = True


@_with_helps
@dataclass(frozen=True, kw_only=True)
class BenchOptions(_Call):
    """The options of `everyrank bench` and `bench`. `steps` is the length of each timed and untimed run.

    Examples:
        >>> from everyrank import BenchOptions
        >>> BenchOptions(trials=3).verify_steps
        20

    Attributes:
        show: Print progress and results.
        explicit: As for `VerifyOptions`.
        batch_factor: Multiplies the global batch. In weak scaling it grows with the number of ranks.
        verify_steps: Updates to compare.
        load_before: Load average of this machine at the start. `bench` fills it in; None if the system has none.
    """

    trials: Annotated[int, Argument("timed runs of each layout (default %(default)s)", "T", minimum=1)] = 5
    steps: Annotated[int | None, Argument("updates of each run (default: at most 60)", "K", minimum=1)] = None
    explicit: bool = True
    batch_factor: int = 1
    verify_steps: int = 20
    load_before: float | None = None


@_with_helps
@dataclass(frozen=True, kw_only=True)
class ChaosOptions(_Call):
    """The options of `everyrank chaos`: a training of `steps` updates, and where in it faults strike.

    Attributes:
        show: Print progress and results.
    """

    faults: Annotated[tuple[str, ...], Argument("faults to inject (default: all)", "NAME", flag="--fault")] = ()
    seed: Annotated[int, Argument("seed that selects update and rank of each fault (default %(default)s)", "S", 0)] = 0
    steps: Annotated[int, Argument("updates of each training (default %(default)s)", "K", minimum=12)] = 30
    save_every: Annotated[int, Argument("updates between two checkpoints (default %(default)s)", "K", minimum=1)] = 5
    guard_every: Annotated[
        int, Argument("updates between two comparisons of replicas (default %(default)s)", "K", minimum=1)
    ] = 5
