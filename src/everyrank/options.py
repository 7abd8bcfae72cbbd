"""The options of a call, each described once: for the command line, and for `run`, `verify` and `bench`.

The command line makes its arguments from the fields that have an `Argument` (`commands/shared.py`); `run`, `verify` and
`bench` take the same fields by name. The options travel to the ranks; nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
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
    """What the command line has to know of a field, beside its name, type and default.

    `keep: Annotated[int, Argument("the last K checkpoints stay", "K", minimum=1)] = 3`

    help      what `--help` says; `%(default)s` stands for the default
    metavar   what stands for the value there
    minimum   the smallest number that is taken
    flag      the argument; "": that of the field's name
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
            kind, about = get_args(hint)
            result[name] = kind, dataclasses.replace(about, flag=about.flag or f"--{name.replace('_', '-')}")
    return result


def check_minimums(options: object) -> None:
    """Raise `UsageError` for a number below the option's minimum."""
    for name, (_, about) in arguments_of(type(options)).items():
        value = getattr(options, name)
        if isinstance(value, int | float) and about.minimum is not None and value < about.minimum:
            fix = f"at least {about.minimum}" if about.minimum else "a number of updates, or 0"
            raise UsageError(f"{about.flag} {value}: give {fix}")


def _with_helps(options: _Type) -> _Type:
    """The class; its docstring ends with what `--help` says of each field."""
    helps = {
        name: about.help % {"default": getattr(options, name, "")} for name, (_, about) in arguments_of(options).items()
    }
    lines = [f"    {name:14}   {text}" for name, text in helps.items()]
    options.__doc__ = "\n".join([f"{options.__doc__}".rstrip(), "", *lines])
    return options


@dataclass(frozen=True, kw_only=True)
class _Call:
    """What every call has.

    show               print progress and results
    command, started   what was typed, and when, in seconds since 1970; the function that is called fills them in
    """

    show: bool = True
    command: list[str] = field(default_factory=list[str])
    started: float = 0.0


GUARDS = ("stop", "warn")
AUTO = "auto"  # as --save-every
_EVALUATE_EVERY = "updates between two evaluations; default: an epoch; 0: at the end alone"
_SAVE_EVERY = (
    "updates between two checkpoints; default: an epoch; 0: none; auto: from how long saving takes, and --mtbf"
)
_GUARD = "compare what ranks hold alike, to the last bit; a difference ends the training (stop), or is said (warn)"
_GUARD_EVERY = "updates between two comparisons (default %(default)s); there is one before each checkpoint, too"


@_with_helps
@dataclass(frozen=True, kw_only=True)
class TrainOptions(_Call):
    """For `everyrank train` and `run`.

    In Python, nothing is written where `out` is None, and `resume` is always a folder.

    before_update    (prepared, number) -> None, called in every rank before each update; with it `everyrank chaos`
                     puts a fault into a real run. It travels to the ranks by pickle
    """

    epochs: Annotated[int | None, Argument("instead of the workload's own length", "E", minimum=1)] = None
    steps: Annotated[int | None, Argument("updates in all, instead of the workload's own length", "K", minimum=1)] = (
        None
    )
    out: Annotated[
        Path | None,
        Argument(
            "for logs (log.jsonl, log.csv, events.jsonl, epochs.csv, resources.csv), checkpoints and record.json; "
            "default: runs/...",
            "DIR",
        ),
    ] = None
    resume: Annotated[
        Path | None,
        Argument(
            "go on from a run's newest checkpoint, or from a checkpoint, under any layout; without DIR: from --out, "
            "or begin where that holds none",
            "DIR",
        ),
    ] = None
    pretrained: Annotated[Path | None, Argument("begin from weights: safetensors or a state dict", "F")] = None
    evaluate: Annotated[bool, Argument("evaluate what --resume or --pretrained gives, and do not train")] = False
    evaluate_every: Annotated[int | None, Argument(_EVALUATE_EVERY, "K", minimum=0)] = None
    save_every: Annotated[int | str | None, Argument(_SAVE_EVERY, "K", minimum=0)] = None
    mtbf: Annotated[
        float,
        Argument("hours between two failures of this job, for --save-every auto (default %(default)s)", "HOURS"),
    ] = 24.0
    save_async: Annotated[bool, Argument("write checkpoints while the training goes on")] = False
    keep: Annotated[int, Argument("the last K checkpoints stay (default %(default)s)", "K", minimum=1)] = 3
    best_by: Annotated[
        str | None,
        Argument(
            "which metric says the best, which stays too (NAME, NAME:min or NAME:max); default: the workload's first",
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
        bool, Argument("let cuDNN try its kernels for each shape of input and take the fastest: other last digits")
    ] = False
    deterministic: Annotated[
        bool, Argument("kernels that repeat to the last bit, or an error where torch has none: slower")
    ] = False


@_with_helps
@dataclass(frozen=True, kw_only=True)
class PredictOptions(_Call):
    """For `everyrank predict`. Either `resume` or `pretrained` has to be given."""

    out: Annotated[Path, Argument("a row for each sample: F.jsonl or F.npy", "F")]
    resume: Annotated[Path | None, Argument("the run (its newest checkpoint), or a checkpoint", "DIR")] = None
    pretrained: Annotated[Path | None, Argument("weights: safetensors, or a state dict", "F")] = None
    training_data: Annotated[bool, Argument("of the training data instead of the held-out", flag="--train-data")] = (
        False
    )


@_with_helps
@dataclass(frozen=True, kw_only=True)
class VerifyOptions(_Call):
    """For `everyrank verify` and `verify`.

    explicit   somebody asked for these layouts, they are not simply all there are: one that the workload cannot have is
              refused; else it is not verified, with the reason
    """

    steps: Annotated[int, Argument("updates to compare (default %(default)s)", "K", minimum=1)] = 20
    quick: Annotated[bool, Argument("float64 alone, six updates; says what it leaves out")] = False
    fresh: Annotated[bool, Argument("run single anew, not as an earlier call has kept it")] = False
    samples: Annotated[bool, Argument("check that each sample is read once and evaluated once")] = False
    reference: Annotated[
        str | None, Argument("compare with this layout, where one device cannot hold the model", "L")
    ] = None
    explicit: bool = True


@_with_helps
@dataclass(frozen=True, kw_only=True)
class BenchOptions(_Call):
    """For `everyrank bench` and `bench`. `steps` is the length of the timed and of the untimed run.

    explicit        as for `VerifyOptions`
    batch_factor   multiplies the global batch: in weak scaling it grows with the number of ranks
    verify_steps   updates to compare
    load_before    the load average of this machine at the call, which fills it in; None where the system has none
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
    """For `everyrank chaos`: a training of `steps` updates, and where in it faults strike."""

    faults: Annotated[tuple[str, ...], Argument("some of them; default: all", "NAME", flag="--fault")] = ()
    seed: Annotated[
        int, Argument("which update and which rank each fault strikes follows from it (default %(default)s)", "S", 0)
    ] = 0
    steps: Annotated[int, Argument("updates of each training (default %(default)s)", "K", minimum=12)] = 30
    save_every: Annotated[int, Argument("updates between two checkpoints (default %(default)s)", "K", minimum=1)] = 5
    guard_every: Annotated[
        int, Argument("updates between two comparisons of replicas (default %(default)s)", "K", minimum=1)
    ] = 5
