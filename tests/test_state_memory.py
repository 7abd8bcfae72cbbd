"""Trainings whose parameters, gradients and optimizer state exceed the memory are refused before the first update."""

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
from checkpointing import Going
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
    """Ten layers: parameters count, activations do not."""
    layers = [nn.Linear(256, 256) for _ in range(8)]
    return nn.Sequential(nn.Linear(5, 256), nn.Tanh(), *layers, nn.Linear(256, 2))


def workload(optimizer: Any = "adamw") -> Any:
    return zoo.workload("frozen", optimizer, model=wide, blocks=None)


def held_in_an_update(world: World, layout: str, optimizer: str) -> tuple[int, int]:
    """(bytes that the check counts, bytes of parameters, gradients and tensors of optimizer state after an update)."""
    going = Going(world, workload(optimizer), layout)
    counted = state_bytes(going.prepared.trainable)
    going.updates(0, 1)
    trainable = going.prepared.trainable
    states = [v for state in trainable.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    gradients = [p.grad for p in trainable.parameters if p.grad is not None]
    held = local_tensors([*trainable.parameters, *gradients, *(state for state in states if state.dim())])
    return counted, sum(tensor.nbytes for tensor in held)


@pytest.mark.parametrize(
    ("layout", "optimizer"), [("ddp", "sgd"), ("ddp", "adamw"), ("zero1", "adamw"), ("fsdp", "adamw")]
)
def test_the_state_is_counted_to_the_byte(ranks: Any, layout: str, optimizer: str) -> None:
    for counted, held in ranks(2, held_in_an_update, layout, optimizer):
        assert counted == held


def prepared_with(world: World, layout: str, host_bytes: int) -> tuple[str, str]:
    """(the error, standard error) of a training on a host with so much memory."""
    printed = io.StringIO()
    with (
        mock.patch.object(state_memory, "host_memory_bytes", return_value=host_bytes),
        contextlib.redirect_stderr(printed),
    ):
        try:
            prepare(workload(), parse_layout(layout), world)
        except CannotRunError as error:
            return str(error), printed.getvalue()
    return "", printed.getvalue()


def test_what_cannot_fit_is_refused_on_every_rank(ranks: Any) -> None:
    """Two ranks hold four times the parameters each; fsdp half of that. Between 0.9 and 1 of the memory it warns."""
    needed = 2 * 4 * PARAMETERS
    for error, _ in ranks(2, prepared_with, "ddp", needed - 1):
        assert error.startswith("layout ddp: does not fit: parameters, gradients and optimizer state take")
        assert "2 ranks of a host" in error
        assert "fsdp:meta=true" in error
    (error, warning), (other_error, other_warning) = ranks(2, prepared_with, "ddp", needed)
    assert not error
    assert not other_error
    assert "layout ddp may not fit" in warning
    assert not other_warning, "one rank warns"
    assert ranks(2, prepared_with, "ddp", 2 * needed) == [("", "")] * 2
    assert [error for error, _ in ranks(2, prepared_with, "fsdp", needed * 2 // 3)] == ["", ""]


def test_a_model_is_refused_while_it_is_built(ranks: Any) -> None:
    """Before the rest of it is made, and on both ranks."""
    for error, _ in ranks(2, prepared_with, "ddp", PARAMETERS):
        assert "the model has more than" in error
        assert "up to weight" in error


def _replacing() -> nn.Module:
    """Ten layers, of which one is kept."""
    model = nn.Sequential(nn.Linear(256, 256))
    for _ in range(10):
        model[0] = nn.Linear(256, 256)
    return model


def _tied() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(2)))
    for _ in range(10):
        model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize("build", [_replacing, _tied])
def test_layers_that_are_replaced_or_shared_count_once(build: Callable[[], nn.Module]) -> None:
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


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    folder = tmp_path / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    whole = host_memory_bytes(tmp_path)
    (folder / "memory.max").write_text("max\n")
    assert host_memory_bytes(tmp_path) == whole
    (folder / "memory.max").write_text("1048576\n")
    assert host_memory_bytes(tmp_path) <= whole - 2**20


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
def test_commands_that_train_advise_on_memory(
    command: str, function: str, error: type[EveryrankError], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The one line of the error ends with what plan found."""

    def advised(error: EveryrankError) -> EveryrankError:
        return type(error)(f"{error}. Smallest change: recompute")

    words = [*command.split(), *(["--out", str(tmp_path / "run")] if function == "run" else [])]
    with (
        mock.patch.object(api, function, side_effect=error("rank 1: out of memory in an update")),
        mock.patch.object(oom_advice, "with_smallest_change", advised),
    ):
        assert cli.main(words) == error("").exit_status
    assert capsys.readouterr().err.rstrip().endswith("out of memory in an update. Smallest change: recompute")


@pytest.mark.integration
def test_a_run_out_of_memory_ends_with_the_smallest_change(capsys: pytest.CaptureFixture[str]) -> None:
    """Found by plan in a process of its own; without a command of plan, or in time, the error stays."""
    words = "everyrank plan text --set batch=4096 --gpus 2xt4 --memory 4GiB --layout ddp"
    advised = with_smallest_change(
        OutOfMemoryError(f"layout ddp: out of memory in an update. Find the smallest change that fits: {words}")
    )
    assert isinstance(advised, OutOfMemoryError)
    assert "Smallest change: bf16: everyrank train text" in str(advised) or "--layout ddp:" in str(advised)
    assert "--layout" in str(advised).partition("Smallest change")[2]
    for text in ("out of memory in an update", "out of memory: everyrank plan nothing.py --gpus 2xt4"):
        assert str(with_smallest_change(OutOfMemoryError(text))) == text
    capsys.readouterr()
