"""Checkpoints and logs are kept, and invalid parameters are not saved, when something fails around the updates."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

import zoo
from checkpointing import assert_equal_tensors
from everyrank.checkpoint import with_pretrained
from everyrank.errors import UsageError
from everyrank.runs import checkpoints_of, damage, find_checkpoint, write_metadata
from processes import Cli, only_error_line
from resuming import WIDTH_ARGS, WORKLOAD, train_args, write_linear_workload

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="looking for left processes needs Linux's /proc"
)

# --- runs and checkpoints that are kept

FAILS_AT_UPDATE_9 = """
import torch
from everyrank import Workload
from everyrank.errors import WorkloadError

class Late(torch.optim.SGD):
    done = 0
    def step(self, *_):
        self.done += 1
        if self.done == 9:
            raise WorkloadError("update 9 is one too many")
        return super().step()

workload = Workload(
    name="late", model=lambda: torch.nn.Linear(1, 1), train_data=lambda: [(torch.ones(1), torch.ones(1))] * 8,
    loss=lambda output, target: (((output - target) ** 2).sum(), len(target)),
    optimizer=lambda model: Late(model.parameters(), lr=0.1), global_batch=2, epochs=4)
"""


def test_run_that_fails_late_keeps_its_folder(cli: Cli, tmp_path: Path) -> None:
    """The folder was not requested with --out, but it has the checkpoints of two epochs."""
    (tmp_path / "late.py").write_text(FAILS_AT_UPDATE_9)
    result = cli.on_ranks(tmp_path, "train", "late.py")
    assert result.status == 2, result
    assert "update 9 is one too many" in result.err
    (run,) = (tmp_path / "runs").iterdir()
    assert [checkpoint.metadata.step for checkpoint in checkpoints_of(run)] == [4, 8]


def test_finished_run_without_checkpoints_is_not_restarted(cli: Cli, tmp_path: Path) -> None:
    """The run has no checkpoint to resume from. A new start would overwrite its log and Record."""
    args = ("train", "digits", *WIDTH_ARGS, "--steps", "2", "--save-every", "0", "--out", "run")
    assert cli.on_ranks(tmp_path, *args).status == 0
    log = (tmp_path / "run" / "log.jsonl").read_text()
    result = cli.on_ranks(tmp_path, *args, "--resume")
    assert result.status == 2
    assert "--resume" in result.err
    assert (tmp_path / "run" / "log.jsonl").read_text() == log


def test_best_checkpoint_is_kept_after_resume(cli: Cli, tmp_path: Path) -> None:
    """The best checkpoint is older than the newest. A worse checkpoint does not replace it."""
    args = ("train", "digits", *WIDTH_ARGS, "--save-every", "3", "--evaluate-every", "3", "--keep", "1", "--out", "run")
    assert cli.on_ranks(tmp_path, *args, "--steps", "6").status == 0
    run = tmp_path / "run"
    best = find_checkpoint(run)
    metrics = best.metadata.metrics | {"top1": 2.0}  # above any real accuracy
    write_metadata(best.path, dataclasses.replace(best.metadata, metrics=metrics))
    assert cli.on_ranks(tmp_path, *args, "--steps", "12", "--resume").status == 0
    assert [checkpoint.metadata.step for checkpoint in checkpoints_of(run)] == [6, 12]
    assert (run / "checkpoints" / "best").resolve() == best.path


def test_predictions_of_different_shapes_are_refused(cli: Cli, tmp_path: Path) -> None:
    """The rows of the two ranks have different shapes, so they cannot be written to one file."""
    (tmp_path / "mine.py").write_text(
        WORKLOAD
        + "\nimport dataclasses\n"
        "workload = dataclasses.replace(workload, predict=lambda output: torch.zeros(len(output), 2 + RANK))\n".replace(
            "RANK", "int(__import__('os').environ['RANK'])"
        )
    )
    assert cli.on_ranks(tmp_path, *train_args("ddp", "--steps", "5"), size=2).status == 0
    result = cli.on_ranks(
        tmp_path, "predict", "mine.py", "--layout", "ddp", "--resume", "run", "--out", "p.npy", size=2
    )
    assert result.status == 2, result
    assert "rows of shape" in result.err
    assert not (tmp_path / "p.npy").exists()
    assert not list(tmp_path.glob("*.partial"))


def test_sigterm_after_a_stop_request_calls_the_previous_handler() -> None:
    """Every SIGUSR1 is caught. A SIGTERM after a request calls the previous handler."""
    from everyrank.launch import catch_signals

    previous_handler_calls: list[int] = []
    previous_handler = signal.signal(signal.SIGTERM, lambda number, _: previous_handler_calls.append(number))
    try:
        with catch_signals(signal.SIGTERM, signal.SIGUSR1) as stop:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.asked is signal.SIGUSR1
            assert previous_handler_calls == []
            os.kill(os.getpid(), signal.SIGTERM)
            assert previous_handler_calls == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


# --- an output that cannot be written

WITH_BROKEN_STDOUT = """\
import os
import sys

from everyrank.cli import main

if sys.argv[1] == "pipe":
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 1)
else:
    os.dup2(os.open(sys.argv[1], os.O_WRONLY), 1)
sys.stdout = open(1, "w", closefd=False)
main(sys.argv[2:])
"""


@pytest.mark.parametrize(
    ("output", "reason"), [("/dev/full", "No space left on device"), ("pipe", "the reader of the pipe has gone")]
)
def test_training_continues_if_standard_output_cannot_be_written(
    cli: Cli, tmp_path: Path, output: str, reason: str
) -> None:
    """The pipe of `train ... | head -1` is closed, or the disk behind `> file` is full. The exit code is 0."""
    (tmp_path / "unseen.py").write_text(WITH_BROKEN_STDOUT)
    args = ("train", "digits", *WIDTH_ARGS, "--save-every", "3", "--steps", "6", "--out", "run")
    result = cli.on_ranks(tmp_path, output, *args, script="unseen.py")
    assert result.status == 0, result
    assert result.err == f"standard output cannot be written ({reason}); the training continues\n"
    assert [checkpoint.metadata.step for checkpoint in checkpoints_of(tmp_path / "run")] == [3, 6]
    assert (tmp_path / "run" / "record.json").exists()


# --- failures in evaluation, losses and weights


@pytest.mark.parametrize(("workload_field", "status"), [('metrics={"bad": rises}', 4), ('derived={"bad": derives}', 2)])
@pytest.mark.parametrize("args", [(), ("--save-async",)], ids=["at once", "async"])
def test_epoch_is_saved_before_an_evaluation_that_raises(
    cli: Cli, tmp_path: Path, workload_field: str, status: int, args: tuple[str, ...]
) -> None:
    """The epoch before the evaluation is saved."""
    result = cli.on_ranks(
        tmp_path,
        "train",
        write_linear_workload(tmp_path, more_fields=workload_field),
        *args,
        "--out",
        "run",
        "--device",
        "cpu",
    )
    assert result.status == status, result
    assert "spoilt.py" in result.err.splitlines()[-1]
    (checkpoint,) = checkpoints_of(tmp_path / "run")
    assert (checkpoint.metadata.step, checkpoint.metadata.metrics, damage(checkpoint)) == (4, {}, None)


@pytest.mark.parametrize("args", [(), ("--save-async",)], ids=["at once", "async"])
def test_checkpoint_gets_its_metrics_after_evaluation(cli: Cli, tmp_path: Path, args: tuple[str, ...]) -> None:
    """The checkpoint is saved before the evaluation, and its metrics are added afterwards."""
    result = cli.on_ranks(tmp_path, "train", write_linear_workload(tmp_path), *args, "--out", "run", "--device", "cpu")
    assert result.status == 0, result
    checkpoints = checkpoints_of(tmp_path / "run")
    assert [
        (checkpoint.metadata.step, list(checkpoint.metadata.metrics), damage(checkpoint)) for checkpoint in checkpoints
    ] == [
        (4, ["eval_loss"], None),
        (8, ["eval_loss"], None),
    ]
    assert (tmp_path / "run" / "checkpoints" / "best").resolve() == checkpoints[-1].path.resolve()


AS_ON_CUDA = """
import torch
from everyrank.parallel import trainable
from everyrank import Workload

trainable.check_total = lambda *_: None  # reading the loss would be a wait in every update

class Counted(torch.optim.SGD):
    done = 0
    def step(self, *_):
        Counted.done += 1
        return super().step()

def loss(output, target):
    return ((output - target) ** 2).sum() * (float("nan") if Counted.done == 12 else 1.0), len(target)

workload = Workload(
    name="nan", model=lambda: torch.nn.Linear(1, 1), train_data=lambda: [(torch.ones(1), torch.ones(1))] * 200,
    loss=loss, optimizer=lambda model: Counted(model.parameters(), lr=0.1), global_batch=2)
"""


@pytest.mark.parametrize("args", [(), ("--save-async",)], ids=["at once", "async"])
def test_nan_that_is_detected_late_is_reported_and_not_saved(cli: Cli, tmp_path: Path, args: tuple[str, ...]) -> None:
    """On CUDA losses are checked some updates later. The error names the first bad update.

    Only earlier updates are saved.
    """
    (tmp_path / "nan.py").write_text(AS_ON_CUDA)
    options = ("--layout", "ddp", "--steps", "60", "--save-every", "5", "--out", "run", "--device", "cpu")
    result = cli.on_ranks(tmp_path, "train", "nan.py", *options, *args, size=2)
    assert result.status == 4, result
    assert "update 12: the loss is nan" in result.err
    checkpoints = checkpoints_of(tmp_path / "run")
    assert [(checkpoint.metadata.step, damage(checkpoint)) for checkpoint in checkpoints] == [(5, None), (10, None)]
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 12, "the good losses before it"


@pytest.mark.parametrize("args", [(), ("--evaluate-every", "1")], ids=["at the end", "within"])
def test_infinite_parameters_after_the_last_update_are_not_saved(
    cli: Cli, tmp_path: Path, args: tuple[str, ...]
) -> None:
    """No later loss shows it, so the parameters are checked."""
    workload = write_linear_workload(tmp_path, learning_rate="1e999")
    result = cli.on_ranks(tmp_path, "train", workload, "--steps", "1", *args, "--out", "run", "--device", "cpu")
    assert result.status == 4, result
    assert "update 0: parameter weight became infinite" in result.err
    assert not checkpoints_of(tmp_path / "run")
    assert not (tmp_path / "run" / "record.json").exists()


@pytest.mark.parametrize(
    ("replaced_weights", "expected_text"),
    [
        ({"weight": torch.ones(2, 3, dtype=torch.complex64)}, "weight is torch.complex64, the model's torch.float32"),
        ({"weight": torch.ones(2, 3, dtype=torch.int64)}, "weight is torch.int64, the model's torch.float32"),
        ({"bias": torch.ones(2, dtype=torch.bool)}, "bias is torch.bool, the model's torch.float32"),
        ({"bias": torch.tensor([1.0, float("nan")])}, "bias has numbers that are NaN"),
    ],
    ids=["complex", "whole", "bool", "nan"],
)
def test_weights_with_invalid_dtype_or_nan_are_refused(
    cli: Cli, tmp_path: Path, replaced_weights: dict[str, torch.Tensor], expected_text: str
) -> None:
    """A cast would lose information. The error names the file, and no update."""
    torch.save({"weight": torch.ones(2, 3), "bias": torch.zeros(2)} | replaced_weights, tmp_path / "w.pt")
    result = cli.on_ranks(
        tmp_path, "train", write_linear_workload(tmp_path), "--pretrained", "w.pt", "--out", "run", "--device", "cpu"
    )
    assert result.status == 2, result
    assert f"w.pt: {expected_text}" in only_error_line(result.err)
    torch.save({"weight": torch.ones(2, 3).half(), "bias": torch.zeros(2).double()}, tmp_path / "w.pt")
    args = ("--pretrained", "w.pt", "--out", "again", "--device", "cpu")
    assert cli.on_ranks(tmp_path, "train", write_linear_workload(tmp_path), *args).status == 0


# --- weights that fit


def load_weights(path: Path, model: Callable[[], nn.Module]) -> nn.Module:
    """Return the model with the weights in a file, as `--pretrained` loads them."""
    return with_pretrained(zoo.workload("frozen", model=model), path).model()


class Wrapper(nn.Module):
    """A model that has another one as its attribute `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 2)


@pytest.mark.parametrize("build", [lambda: nn.Linear(3, 2), Wrapper, lambda: AveragedModel(nn.Linear(3, 2))])
@pytest.mark.parametrize("prefix", ["", "module."], ids=["plain", "ddp"])
def test_prefix_of_ddp_is_removed_only_if_the_model_has_other_names(
    tmp_path: Path, build: Callable[[], nn.Module], prefix: str
) -> None:
    """Names of the model itself may begin with `module.`, such as those of an AveragedModel."""
    state = build().state_dict()
    torch.save({prefix + name: tensor for name, tensor in state.items()}, tmp_path / "w.pt")
    assert_equal_tensors(load_weights(tmp_path / "w.pt", build).state_dict(), state)


class TiedLayers(nn.Module):
    """A model with one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.last.weight = self.first.weight


@pytest.mark.parametrize("name", ["first.weight", "last.weight", "module.last.weight"])
def test_weights_may_have_one_name_of_a_tied_tensor(tmp_path: Path, name: str) -> None:
    """Files of Hugging Face leave out the other name."""
    state = {name: torch.arange(9.0).reshape(3, 3)}
    save_file(state, tmp_path / "w.safetensors")
    model = load_weights(tmp_path / "w.safetensors", TiedLayers)
    assert torch.equal(model.get_parameter("first.weight"), state[name])
    assert model.get_parameter("first.weight") is model.get_parameter("last.weight")


class Counter(nn.Linear):
    """A model with a tensor as extra state."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.calls = torch.zeros(0)

    def get_extra_state(self) -> torch.Tensor:
        """Return a copy."""
        return self.calls.clone()

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Replace the calls."""
        self.calls = state


def test_weights_have_extra_state(tmp_path: Path) -> None:
    """It is loaded by `set_extra_state`, and may have another shape than that of a new model."""
    torch.save({**Counter().state_dict(), "_extra_state": torch.tensor([1.0, 7.0])}, tmp_path / "w.pt")
    assert cast("Counter", load_weights(tmp_path / "w.pt", Counter)).calls.tolist() == [1.0, 7.0]


FLOATS_OF_8_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


@pytest.mark.parametrize("dtype", FLOATS_OF_8_BITS, ids=str)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_weights_of_8_bits_are_loaded_and_checked(tmp_path: Path, dtype: torch.dtype, suffix: str) -> None:
    save: Any = torch.save if suffix == ".pt" else save_file
    path = tmp_path / f"w{suffix}"
    save({"weight": torch.full((2, 3), 2.0).to(dtype), "bias": torch.ones(2)}, path)
    assert load_weights(path, lambda: nn.Linear(3, 2)).state_dict()["weight"].tolist() == [[2.0] * 3] * 2
    save({"weight": torch.full((2, 3), math.nan).to(dtype), "bias": torch.ones(2)}, path)
    with pytest.raises(UsageError, match="weight has numbers that are NaN"):
        load_weights(path, lambda: nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("content", "expected_text"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid",
            "file of torch.save, because it begins with 'version https://git-lfs",
        ),
        (b"<!DOCTYPE html>\n<html>", "file of torch.save, because it begins with '<!DOCTYPE html>'"),
        ({"weight": torch.ones(1), "number": 3}, "state dict of tensors: 'number' is int"),
        ({"epoch": 1, "net": {"weight": torch.ones(1)}}, "state dict of tensors: 'epoch' is int"),
        ([1], "state dict of tensors, but list"),
    ],
    ids=["lfs", "html", "number", "nested", "list"],
)
def test_error_names_what_a_file_without_weights_has(tmp_path: Path, content: Any, expected_text: str) -> None:
    path = tmp_path / "w.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(UsageError) as caught:
        with_pretrained(zoo.workload("frozen"), path)
    assert f"w.pt: not a {expected_text}" in str(caught.value)
    assert "could run code" not in str(caught.value)


COMPLEX = """
def first_model():
    model = nn.Linear(3, 2)
    model.register_PART("turns", MADE)
    return model
"""


@pytest.mark.parametrize(
    ("kind", "value"),
    [("parameter", "nn.Parameter(torch.ones(2, dtype=torch.complex64))"), ("buffer", "torch.ones(2) * 1j")],
)
def test_model_with_complex_numbers_is_refused(cli: Cli, tmp_path: Path, kind: str, value: str) -> None:
    """A cast to real numbers would lose the imaginary part."""
    workload = Path(write_linear_workload(tmp_path))
    model_source = COMPLEX.replace("PART", kind).replace("MADE", value)
    workload.write_text(workload.read_text().replace("\nworkload =", model_source + "\nworkload ="))
    result = cli.on_ranks(tmp_path, "train", workload, "--device", "cpu")
    assert result.status == 2, result
    assert "turns of the model is torch.complex64" in only_error_line(result.err)


def test_model_with_nan_at_initialization_is_reported(cli: Cli, tmp_path: Path) -> None:
    """The error names the parameter, and no update."""
    workload = Path(write_linear_workload(tmp_path, more_fields="clip_norm=1.0,"))
    model_source = "    model = nn.Linear(3, 2)\n    nn.init.constant_(model.weight, float('nan'))\n    return model"
    workload.write_text(workload.read_text().replace("    return nn.Linear(3, 2)", model_source))
    result = cli.on_ranks(tmp_path, "train", workload, "--device", "cpu")
    assert result.status == 4, result
    assert "parameter weight" in result.err
    assert "update before" not in result.err
