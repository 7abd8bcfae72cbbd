"""Training is refused before the first update if parameters, gradients and optimizer state exceed the memory."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zoo
from checkpointing import TrainingSession
from everyrank import api, cli, parse_layout
from everyrank.commands import oom_advice
from everyrank.commands.oom_advice import with_smallest_change
from everyrank.errors import CannotRunError, EveryrankError, OutOfMemoryError, RankFailedError
from everyrank.launch.host_info import host_memory_bytes
from everyrank.parallel import state_memory
from everyrank.parallel.mesh import local_tensors
from everyrank.parallel.state_memory import refuse_too_large, state_bytes
from everyrank.strategies import prepare
from everyrank.world import World

PARAMETERS = 4 * (5 * 256 + 256 + 8 * (256 * 256 + 256) + 256 * 2 + 2)  # bytes of `wide`


def wide() -> nn.Module:
    """Return a model with ten layers, whose parameters need far more memory than its activations."""
    layers = [nn.Linear(256, 256) for _ in range(8)]
    return nn.Sequential(nn.Linear(5, 256), nn.Tanh(), *layers, nn.Linear(256, 2))


def workload(optimizer: Any = "adamw") -> Any:
    return zoo.workload("frozen", optimizer, model=wide, blocks=None)


def counted_and_real_bytes(world: World, layout: str, optimizer: str) -> tuple[int, int]:
    """Return the bytes that the check counts, and the real bytes of the training state after an update."""
    session = TrainingSession(world, workload(optimizer), layout)
    counted = state_bytes(session.prepared.trainable)
    session.train(0, 1)
    trainable = session.prepared.trainable
    states = [v for state in trainable.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    gradients = [p.grad for p in trainable.parameters if p.grad is not None]
    state_tensors = local_tensors([*trainable.parameters, *gradients, *(state for state in states if state.dim())])
    return counted, sum(tensor.nbytes for tensor in state_tensors)


@pytest.mark.parametrize(
    ("layout", "optimizer"), [("ddp", "sgd"), ("ddp", "adamw"), ("zero1", "adamw"), ("fsdp", "adamw")]
)
def test_state_bytes_are_exact(ranks: Any, layout: str, optimizer: str) -> None:
    for counted, real in ranks(2, counted_and_real_bytes, layout, optimizer):
        assert counted == real


def prepare_on_host(world: World, layout: str, host_bytes: int) -> tuple[str, str]:
    """Return the error and stderr of `prepare` on a host with this much memory."""
    stderr = io.StringIO()
    with (
        mock.patch.object(state_memory, "host_memory_bytes", return_value=host_bytes),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            prepare(workload(), parse_layout(layout), world)
        except CannotRunError as error:
            return str(error), stderr.getvalue()
    return "", stderr.getvalue()


def test_state_that_does_not_fit_is_refused_on_every_rank(ranks: Any) -> None:
    """With ddp, each rank needs 4 times the parameter bytes, and half of that with fsdp. Above 90% it warns."""
    needed = 2 * 4 * PARAMETERS
    for error, _ in ranks(2, prepare_on_host, "ddp", needed - 1):
        assert error.startswith("layout ddp: does not fit: parameters, gradients and optimizer state take")
        assert "2 ranks of a host" in error
        assert "fsdp:meta=true" in error
    (error, warning), (other_error, other_warning) = ranks(2, prepare_on_host, "ddp", needed)
    assert not error
    assert not other_error
    assert "layout ddp may not fit" in warning
    assert not other_warning, "one rank warns"
    assert ranks(2, prepare_on_host, "ddp", 2 * needed) == [("", "")] * 2
    assert [error for error, _ in ranks(2, prepare_on_host, "fsdp", needed * 2 // 3)] == ["", ""]


def test_too_large_model_is_refused_while_it_is_built(ranks: Any) -> None:
    """Both ranks raise the error before the rest of the model is built."""
    for error, _ in ranks(2, prepare_on_host, "ddp", PARAMETERS):
        assert "the model has more than" in error
        assert "up to weight" in error


def _replacing() -> nn.Module:
    """Return a model with one layer, which was replaced ten times."""
    model = nn.Sequential(nn.Linear(256, 256))
    for _ in range(10):
        model[0] = nn.Linear(256, 256)
    return model


def _tied() -> nn.Module:
    """Return a model with two layers that share a weight."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(2)))
    for _ in range(10):
        model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize("build", [_replacing, _tied])
def test_replaced_and_tied_layers_count_once(build: Callable[[], nn.Module]) -> None:
    world = mock.Mock(backend="gloo", device=torch.device("cpu"), local_size=1)
    size = sum(parameter.nbytes for parameter in build().parameters())
    with mock.patch.object(state_memory, "host_memory_bytes", return_value=size + 4 * 256 * 257):
        with refuse_too_large(parse_layout("ddp"), world, torch.float32):
            build()
        with (
            pytest.raises(CannotRunError, match="does not fit"),
            refuse_too_large(parse_layout("ddp"), world, torch.float32),
        ):
            nn.Sequential(*(nn.Linear(256, 256) for _ in range(9)))


def test_memory_limit_of_a_container_is_used(tmp_path: Path) -> None:
    """A cgroup limit reduces the host memory. The value `max` means no limit."""
    folder = tmp_path / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    without_limit = host_memory_bytes(tmp_path)
    (folder / "memory.max").write_text("max\n")
    assert host_memory_bytes(tmp_path) == without_limit
    (folder / "memory.max").write_text("1048576\n")
    assert host_memory_bytes(tmp_path) <= without_limit - 2**20


@pytest.mark.parametrize(
    ("limits", "gibibytes"),
    [
        ({"memory.max": 2}, 2 + 8),
        ({"memory.max": 2, "memory.swap.max": 0}, 2),
        ({"memory.max": 2, "memory.swap.max": 3}, 2 + 3),
        ({"memory/memory.limit_in_bytes": 2, "memory/memory.memsw.limit_in_bytes": 4}, 4),
        ({"memory/memory.limit_in_bytes": 2, "memory/memory.memsw.limit_in_bytes": 2**30}, 2 + 8),
        ({}, 16 + 8),
    ],
    ids=str,
)
def test_swap_limit_of_a_container_is_used(tmp_path: Path, limits: dict[str, int], gibibytes: int) -> None:
    """A container may have no swap on a host that has some; then the kernel kills at the limit of the memory."""
    (tmp_path / "sys/fs/cgroup/memory").mkdir(parents=True)
    for name, limit in limits.items():
        (tmp_path / "sys/fs/cgroup" / name).write_text(f"{limit * 2**30}\n")
    with (
        mock.patch("psutil.virtual_memory", return_value=mock.Mock(total=16 * 2**30)),
        mock.patch("psutil.swap_memory", return_value=mock.Mock(total=8 * 2**30)),
    ):
        assert host_memory_bytes(tmp_path) == gibibytes * 2**30


@pytest.mark.parametrize(
    ("command", "function", "error"),
    [
        ("train digits", "run", RankFailedError),
        ("bench digits", "bench", RankFailedError),
        ("bench digits", "bench", OutOfMemoryError),
        ("bench digits --processes 1 2", "bench_scaling", RankFailedError),
        ("verify digits", "verify", RankFailedError),
    ],
)
def test_out_of_memory_error_includes_the_smallest_change(
    command: str, function: str, error: type[EveryrankError], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The error of each command ends with the smallest change that `plan` found."""

    def error_with_change(error: EveryrankError) -> EveryrankError:
        return type(error)(f"{error}. Smallest change: recompute")

    args = [*command.split(), *(["--out", str(tmp_path / "run")] if function == "run" else [])]
    with (
        mock.patch.object(api, function, side_effect=error("rank 1: out of memory in an update")),
        mock.patch.object(oom_advice, "with_smallest_change", error_with_change),
    ):
        assert cli.main(args) == error("").exit_status
    assert capsys.readouterr().err.rstrip().endswith("out of memory in an update. Smallest change: recompute")


@pytest.mark.integration
def test_plan_finds_the_smallest_change_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """A `plan` process finds the change. Without a valid `plan` command, the error stays unchanged."""
    plan_command = "everyrank plan text --set batch=4096 --gpus 2xt4 --memory 4GiB --layout ddp"
    error_with_change = with_smallest_change(
        OutOfMemoryError(f"layout ddp: out of memory in an update. Find the smallest change that fits: {plan_command}")
    )
    assert isinstance(error_with_change, OutOfMemoryError)
    text = str(error_with_change)
    assert "Smallest change: bf16: everyrank train text" in text or "--layout ddp:" in text
    assert "--layout" in text.partition("Smallest change")[2]
    for unchanged in ("out of memory in an update", "out of memory: everyrank plan nothing.py --gpus 2xt4"):
        assert str(with_smallest_change(OutOfMemoryError(unchanged))) == unchanged
    capsys.readouterr()
