"""The request for a project, and the checks that refuse unsupported options with a reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from everyrank.errors import UsageError
from everyrank.layout import Layout
from everyrank.layout.options import BatchNormOptions
from everyrank.workload import Source, Workload

__all__ = [
    "EJECTED_LAUNCHERS",
    "EJECTED_STRATEGIES",
    "EjectRequest",
    "launcher_of",
    "refuse_layout",
    "refuse_workload",
]

EJECTED_STRATEGIES = ("ddp", "zero1", "fsdp", "tensor", "pipeline", "horovod", "dataparallel")
EJECTED_LAUNCHERS = ("spawn", "torchrun", "slurm", "mpi")
_OWN_LAUNCHERS = {"dataparallel": "python", "horovod": "horovodrun"}
"""The only launcher of the projects of these layouts."""

_OPTIONS: dict[str, dict[str, tuple[object, ...]]] = {
    "ddp": {"bucket_mb": (), "static_graph": (), "find_unused": (), "batch_norm": (), "compress": ("none",)},
    "zero1": {"bucket_mb": (), "static_graph": (), "find_unused": (), "batch_norm": ("sync",)},
    "fsdp": {"reshard_after_forward": (), "batch_norm": ("sync",)},
    "tensor": {"sequence": (False,)},
    "pipeline": {"schedule": ("1f1b",), "microbatches": ()},
    "horovod": {"batch_norm": (), "compress": ()},
    "dataparallel": {"batch_norm": ()},
}
"""The options of each strategy that can be ejected, and their allowed values; (): all."""

_FIELDS = {
    "ema_decay": "torch.optim.swa_utils.AveragedModel in plain PyTorch averages with different arithmetic",
    "on_epoch": "it is called with a function that predicts under every layout",
}
"""Fields of a workload that cannot be ejected, and why."""


@dataclass(frozen=True)
class EjectRequest:
    """The arguments of `everyrank eject`.

    source      the source of the workload, with its settings
    layout      the layout of the training
    launcher    one of `EJECTED_LAUNCHERS`, or `launcher_of(layout)`
    processes   number of ranks in the commands; only a pipeline needs exactly this number
    command     the command line, for the README
    """

    source: Source
    layout: Layout
    launcher: str
    processes: int
    command: str

    @property
    def kind(self) -> str:
        """The layout's short name: that of its strategy, or hsdp."""
        return "hsdp" if self.replicas > 1 else self.layout.strategy

    @property
    def replicas(self) -> int:
        """The number of copies of a sharded model; 1 for all other layouts."""
        return self.layout.degrees.get("replicate", 1) if self.layout.strategy == "fsdp" else 1

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of a batch."""
        if self.kind != "pipeline":
            return self.layout.accumulate
        requested: Any = self.layout.options.get("microbatches")
        return int(requested or 2 * self.processes)

    @property
    def has_local_norm(self) -> bool:
        """Whether batch norm takes its statistics from the samples of one rank or device."""
        return self.layout.read(BatchNormOptions).batch_norm == "local"


def launcher_of(layout: Layout) -> str:
    """Return the default launcher of a project."""
    return _OWN_LAUNCHERS.get(layout.strategy, "torchrun")


def refuse_layout(request: EjectRequest) -> None:
    """Raise `UsageError` for a layout or launcher that cannot be ejected."""
    layout = request.layout
    _refuse_launcher(request)
    if layout.strategy not in EJECTED_STRATEGIES:
        raise UsageError(
            f"--layout {layout}: eject supports {', '.join(EJECTED_STRATEGIES)} and fsdp:replicate=N; "
            "`everyrank new --list` has a script for most others"
        )
    for axis in layout.degrees:
        if axis != layout.axis and not (layout.strategy == "fsdp" and axis == "replicate"):
            raise UsageError(f"--layout {layout}: {axis}= is a second axis, which eject does not support; leave it out")
    layout.mesh(request.processes)  # raises if the degrees do not fit
    for key, value in layout.options.items():
        allowed = _OPTIONS[layout.strategy].get(key)
        if allowed is None or (allowed and value not in allowed):
            raise UsageError(f"--layout {layout}: eject does not support {key}={str(value).lower()}; leave it out")
    for key in ("recompute", "compile"):
        if getattr(layout, key):
            raise UsageError(f"--layout {layout}: eject does not support {key}; leave it out, and add it to train.py")
    _refuse_precision(request)
    if request.kind == "pipeline" and layout.accumulate > 1:
        raise UsageError(f"--layout {layout}: a pipeline already accumulates; use microbatches= instead of accumulate")


def _refuse_launcher(request: EjectRequest) -> None:
    strategy = request.layout.strategy
    only_launcher = _OWN_LAUNCHERS.get(strategy)
    if only_launcher is not None and request.launcher != only_launcher:
        raise UsageError(
            f"--launcher {request.launcher}: a project of {strategy} is started by {only_launcher}; leave it out"
        )
    if only_launcher is None and request.launcher not in EJECTED_LAUNCHERS:
        raise UsageError(
            f"--launcher {request.launcher}: eject writes projects for {', '.join(EJECTED_LAUNCHERS)}; "
            "`everyrank new --list` has scripts for others"
        )


def _refuse_precision(request: EjectRequest) -> None:
    layout = request.layout
    if layout.precision == "fp16" and layout.strategy not in ("ddp", "dataparallel", "horovod"):
        raise UsageError(
            f"--layout {layout}: torch's GradScaler only checks the gradients of its rank for overflow, and here "
            "gradients differ between ranks; use precision=bf16, or ddp"
        )
    if layout.precision == "bf16" and layout.strategy == "dataparallel":
        raise UsageError(
            f"--layout {layout}: nn.DataParallel does not pass the dtype of autocast on to its threads, which then "
            "compute in fp16; use precision=fp16, or ddp"
        )
    if request.kind == "pipeline" and layout.precision == "bf16":
        raise UsageError(
            f"--layout {layout}: eject supports pipelines in float32 and float64 only; leave precision=bf16 out"
        )


def refuse_workload(workload: Workload, request: EjectRequest) -> None:
    """Raise `UsageError` for a workload with features that cannot be ejected."""
    for name, why in _FIELDS.items():
        if getattr(workload, name) is not None:
            raise UsageError(f"workload {workload.name}: eject does not support {name}: {why}; leave it out")
    if workload.order != "global":
        raise UsageError(
            f"workload {workload.name}: eject does not support order={workload.order!r}; use order='global'"
        )
    if workload.num_devices > 1:
        raise UsageError(
            f"workload {workload.name}: num_devices={workload.num_devices}: eject supports one device per rank"
        )
    if request.kind == "pipeline" and workload.blocks is None:
        raise UsageError(
            f"workload {workload.name} has no blocks, which a pipeline splits: "
            'set blocks="layers", the path of the repeated layers in the model'
        )
    if request.kind == "tensor" and not workload.tensor_plan:
        raise UsageError(f"workload {workload.name} has no tensor_plan, which says how its matrices are split")
