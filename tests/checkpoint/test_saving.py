"""Saving: in the background, pruning of old checkpoints, and processes that are killed while they save."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import everyrank.checkpoint.saver
import zoo
from checkpointing import TrainingSession, assert_equal_tensors, mixed_workload, read_checkpoint, save_with_scores
from everyrank import Workload
from everyrank.checkpoint import SaveError, Saver
from everyrank.checkpoint.contents import tensors_of, values_of
from everyrank.checkpoint.storage import check_values
from everyrank.errors import WorkloadError
from everyrank.runs import checkpoints_of, damage, find_checkpoint, is_better
from everyrank.strategies import Prepared
from everyrank.world import World
from forkserver import ForkServer

# --- saving in the background


def count_groups_after_each_save(world: World, folder: Path) -> list[int]:
    """Return the number of process groups after the first, second and third training has saved."""
    counts = []
    for run_index in range(3):
        session = TrainingSession(world, zoo.workload("tied"), "ddp")
        session.train(0, 1)
        session.make_saver(folder / str(run_index)).save(1, {})
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


def test_all_savers_share_one_process_group(ranks: Any, tmp_path: Path) -> None:
    """Each gloo group has threads that wake up a hundred times a second until the process ends."""
    for counts in ranks(2, count_groups_after_each_save, tmp_path):
        assert counts == [counts[0]] * 3


def background_saver_has_its_own_group(world: World, folder: Path) -> bool:
    """Return whether a background saver has a different group than a synchronous saver."""
    session = TrainingSession(world, zoo.workload("tied"), "ddp")
    return (
        session.make_saver(folder / "at once").group
        is not session.make_saver(folder / "later", in_background=True).group
    )


def test_background_saving_uses_its_own_process_group(ranks: Any, tmp_path: Path) -> None:
    """On a shared group, two threads of a rank would receive each other's messages and hang."""
    assert all(ranks(2, background_saver_has_its_own_group, tmp_path))


def adamw_with_tensor_learning_rate(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with a tensor as learning rate. torch changes it in place, as CUDA graphs require."""
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))


def save_synchronously_and_in_background(world: World, layout: str, workload: Workload, folder: Path) -> Any:
    """Save one checkpoint synchronously, and one in the background whose writing waits for later updates.

    Return whether it waited, the number of tensors changed since, and whether other values changed.
    """
    session = TrainingSession(world, workload, layout)
    session.train(0, 5)
    session.make_saver(folder / "at once").save(5, {"eval_loss": 0.5})
    gate = threading.Event()
    write = everyrank.checkpoint.saver.write

    def write_after_gate(*arguments: Any) -> Any:
        assert gate.wait(30)
        return write(*arguments)

    everyrank.checkpoint.saver.write = write_after_gate  # type: ignore[assignment]
    try:
        saver = session.make_saver(folder / "later", in_background=True)
        saver.save(5, {"eval_loss": 0.5})
        state_at_save = session.state()
        session.train(5, 9)
        later_state = session.state()
        was_waiting = not checkpoints_of(saver.run)
        gate.set()
        saver.finish()
    finally:
        gate.set()
        everyrank.checkpoint.saver.write = write
    changed = [name for name, tensor in state_at_save[0].items() if not torch.equal(tensor, later_state[0][name])]
    return was_waiting, len(changed), state_at_save[1] != later_state[1]


@pytest.mark.parametrize("optimizer", ["sgd", "rate in a tensor"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_background_checkpoint_has_the_state_of_the_save_call(
    ranks: Any, tmp_path: Path, layout: str, optimizer: str
) -> None:
    """The checkpoint is bitwise equal to a synchronous one, although the training has continued."""
    workload = mixed_workload()
    if optimizer != "sgd":
        workload = dataclasses.replace(workload, optimizer=adamw_with_tensor_learning_rate)
    for was_waiting, num_changed, values_changed in ranks(
        2, save_synchronously_and_in_background, layout, workload, tmp_path
    ):
        assert was_waiting
        assert num_changed > 5
        assert values_changed
    synchronous, in_background = (find_checkpoint(tmp_path / name) for name in ("at once", "later"))
    assert damage(synchronous) is None
    assert damage(in_background) is None
    (tensors, values), (tensors_later, values_later) = read_checkpoint(synchronous), read_checkpoint(in_background)
    assert_equal_tensors(tensors, tensors_later)
    assert values == values_later
    assert dataclasses.replace(synchronous.metadata, files={}) == dataclasses.replace(in_background.metadata, files={})


def fail_to_save_on_rank_1(world: World, run: Path) -> tuple[str, list[int], int]:
    """Let rank 1 fail to write step 2 in the background, then save step 3.

    Return the error, the intact steps after the failure, and the last step.
    """
    session = TrainingSession(world, mixed_workload(), "fsdp")
    session.train(0, 1)
    saver = session.make_saver(run, in_background=True)
    saver.save(1, {})
    saver.finish()
    error = ""
    with limit_file_size(3000) if world.rank == 1 else contextlib.nullcontext():
        saver.save(2, {})
        try:
            saver.finish()
        except SaveError as save_error:
            error = str(save_error)
    dist.barrier()
    intact_steps = [checkpoint.metadata.step for checkpoint in checkpoints_of(run) if damage(checkpoint) is None]
    dist.barrier()
    saver.save(3, {})
    saver.finish()
    dist.barrier()
    return error, intact_steps, find_checkpoint(run).metadata.step


@contextlib.contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    """Let writes of this process fail beyond `size` bytes. Python ignores SIGXFSZ, so they raise an OSError."""
    previous_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, previous_limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous_limits)


def test_background_save_fails_on_all_ranks_if_one_cannot_write(ranks: Any, tmp_path: Path) -> None:
    """The checkpoint before stays, no unfinished folder is left, and the next save succeeds."""
    for error, intact_steps, last_step in ranks(2, fail_to_save_on_rank_1, tmp_path):
        assert "File too large" in error
        assert "\n" not in error
        assert intact_steps == [1]
        assert last_step == 3
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000001", "step-00000003"]


# --- pruning


@pytest.mark.parametrize(
    ("name", "scores", "keep", "kept_steps", "best"),
    [
        ("eval_loss", [5.0, 3.0, 1.0, 4.0, 2.0, 6.0, 1.5], 2, [3, 6, 7], 3),
        ("top1", [0.5, 0.9, 0.1, 0.4, 0.2, 0.6, 0.3], 3, [2, 5, 6, 7], 2),
        ("top1", [0.1, 0.2, 0.3, 0.4], 2, [3, 4], 4),
        ("top1", [0.9, None, None, None], 1, [1, 4], 1),
        ("perplexity", [4.0, 9.0, 9.0, 9.0], 1, [1, 4], 1),
        ("eval_loss", [None] * 5, 2, [4, 5], None),
        ("top1", [0.4, 0.4, 0.4], 1, [1, 3], 1),
        ("eval_loss", [math.nan, 0.5, 0.7], 1, [2, 3], 2),
        ("wer", [0.5, 0.7, 0.9], 1, [1, 3], 1),
        ("points:min", [0.5, 0.7, 0.9], 1, [1, 3], 1),
        ("eval_loss:max", [0.5, 0.9, 0.7], 1, [2, 3], 2),
    ],
    ids=["loss", "top1", "the last", "once", "perplexity", "never", "a tie", "no number", "error", "min", "max"],
)
def test_pruning_keeps_the_last_and_the_best_checkpoint(
    ranks: Any,
    tmp_path: Path,
    name: str,
    scores: list[float | None],
    keep: int,
    kept_steps: list[int],
    best: int | None,
) -> None:
    """The last `keep` checkpoints and the best one stay. `best` links to the best one.

    A loss is better when lower, an accuracy when higher.
    """
    (names,) = ranks(1, save_with_scores, tmp_path, name, scores, keep)
    assert names == [*(["best"] if best else []), *(f"step-{step:08d}" for step in kept_steps)]
    for checkpoint in checkpoints_of(tmp_path):
        assert damage(checkpoint) is None
    if best:
        assert find_checkpoint(tmp_path / "checkpoints" / "best").metadata.step == best
    assert find_checkpoint(tmp_path).metadata.step == len(scores)


def test_is_better_compares_by_the_name_of_the_metric() -> None:
    """Lower is better for a loss or perplexity. Higher is better for an accuracy."""
    assert is_better(0.1, 0.2, "eval_loss")
    assert not is_better(0.2, 0.1, "eval_loss")
    assert is_better(0.1, 0.2, "my_loss")
    assert is_better(0.1, 0.2, "perplexity")
    assert is_better(0.2, 0.1, "top1")
    assert not is_better(0.1, 0.2, "top1")
    assert not is_better(0.1, 0.1, "top1")
    assert is_better(0.1, None, "top1")
    for error_name in ("wer", "test_wer", "valWER", "CER", "testCer", "wer.clean.cer", "logloss", "RMSE", "top1_err"):
        assert is_better(0.1, 0.2, error_name), error_name
    for score_name in ("answer", "exact_answer", "power", "dancer", "exactAnswer", "viewer2", "_"):
        assert is_better(0.2, 0.1, score_name), score_name


@pytest.mark.parametrize("value", [{1, 2}, b"x", 1j, {(1, 2): 3}], ids=["set", "bytes", "complex", "key"])
def test_setting_that_json_cannot_hold_is_refused_before_the_training(ranks: Any, tmp_path: Path, value: Any) -> None:
    (error_message,) = ranks(1, error_of_a_saver_with_a_setting, tmp_path, value)
    assert error_message.startswith(f"--set x={value}: checkpoints cannot hold this value")


class Rule:
    """An object that needs a pickle."""


@pytest.mark.parametrize("value", [lambda step: step, Rule(), threading.Lock()], ids=["lambda", "object", "lock"])
def test_schedule_with_an_object_is_refused(value: Any) -> None:
    """torch raises different errors: some when it saves the values, others when it loads them safely."""
    with pytest.raises(WorkloadError, match=r"object that cannot be saved safely .*--save-every 0"):
        check_values({"schedule": {"rule": value}})


class ScheduleWithLock(torch.optim.lr_scheduler.ConstantLR):
    """A schedule whose state cannot be copied."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.lock = threading.Lock()
        super().__init__(optimizer)


def test_schedule_that_cannot_be_copied_is_refused(ranks: Any) -> None:
    (message,) = ranks(1, error_of_a_schedule_with_a_lock)
    assert "object that cannot be saved safely (TypeError: cannot pickle" in message
    assert message.endswith("train with --save-every 0")


def error_of_a_schedule_with_a_lock(world: World) -> str:
    """Return the message for the values of a training whose schedule has a lock."""
    session = TrainingSession(world, zoo.workload("frozen", schedule=ScheduleWithLock), "single")
    with pytest.raises(WorkloadError) as caught:
        values_of(session.prepared.trainable)
    return str(caught.value)


def error_of_a_saver_with_a_setting(world: World, run: Path, value: Any) -> str:
    """Return the message of the `WorkloadError` that a saver raises for a setting."""
    session = TrainingSession(world, zoo.workload("frozen"), "single")
    metadata = dataclasses.replace(session.metadata(), settings={"x": value})
    with pytest.raises(WorkloadError) as caught:
        Saver(run, session.prepared, world, metadata, keep=3, in_background=False)
    return str(caught.value)


def test_checkpoint_after_resume_from_an_older_one_is_not_pruned(ranks: Any, tmp_path: Path) -> None:
    """The newest checkpoint is damaged and the run resumes from the one before. Its next checkpoint must stay."""
    ranks(1, save_with_scores, tmp_path, "top1", [None] * 6, 2)
    newest = find_checkpoint(tmp_path)
    (tensor_file,) = newest.path.glob("*.distcp")
    tensor_file.write_bytes(tensor_file.read_bytes()[:-10])
    (names,) = ranks(1, save_with_scores, tmp_path, "top1", [None], 1, 5)  # saves update 5 again; 6 is damaged
    assert "step-00000005" in names
    assert [checkpoint.metadata.step for checkpoint in checkpoints_of(tmp_path) if damage(checkpoint) is None] == [5]


# --- processes killed while they save


def kill_savers(run: Path, seed: int, count: int) -> None:
    """Kill `count` forked children while they save, and check the folder after each.

    Print how often an unfinished folder was left, and how many intact checkpoints the checks counted in total.
    """
    torch.set_num_threads(1)  # fork() must not happen while other threads run
    rng = random.Random(seed)
    num_unfinished, num_intact = 0, 0
    for kill_index in range(count):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save_until_killed(run, write_end, in_background=kill_index % 2 == 1)
            finally:
                os._exit(1)
        os.close(write_end)
        has_saved = os.read(read_end, 1) == b"x"
        os.close(read_end)
        time.sleep(rng.uniform(0.005, 0.08))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert has_saved, f"kill {kill_index} of seed {seed}: it never saved"
        assert os.WTERMSIG(status) == signal.SIGKILL, f"kill {kill_index} of seed {seed}: it ended by itself"
        num_unfinished += any((run / "checkpoints").glob("*.tmp"))
        try:
            num_intact += check_checkpoints(run)
        except Exception as error:
            raise AssertionError(f"kill {kill_index} of seed {seed}: {error}") from error
    print(f"{num_unfinished} {num_intact}")


def save_until_killed(run: Path, write_end: int, in_background: bool) -> None:
    """Save one step after another. All numbers of a checkpoint are its step number."""
    world = World(0, 1, 0, 1, torch.device("cpu"), "gloo", 1, 0, 60.0, None, None)  # type: ignore[arg-type]
    overrides = {"model": lambda: nn.Sequential(nn.Linear(5, 256), nn.Linear(256, 256), nn.Linear(256, 2))}
    session = TrainingSession(world, zoo.workload("frozen", blocks=None, **overrides), "single")
    session.train(0, 1)  # this creates the optimizer state
    checkpoints = checkpoints_of(run)
    # with three checkpoints the newest is written again, as after resume from an older one
    step = checkpoints[-1].metadata.step + (len(checkpoints) < 3) if checkpoints else 1
    saver = session.make_saver(run, keep=2, in_background=in_background)
    is_first = True
    while True:
        fill_state(session.prepared, world, step)
        saver.save(step, {"eval_loss": float(step * 7919 % 101)})
        fill_state(session.prepared, world, -1)
        if is_first:
            saver.finish()
            os.write(write_end, b"x")
            is_first = False
        step += 1


@torch.no_grad()
def fill_state(prepared: Prepared, world: World, value: int) -> None:
    """Set all tensors of the training state, and its learning rate, to `value`."""
    for name, tensor in tensors_of(prepared.trainable, world).items():
        if not name.startswith("generators/"):
            tensor.fill_(value)
    prepared.trainable.optimizer.param_groups[0]["lr"] = float(value)


def check_checkpoints(run: Path) -> int:
    """Check that each checkpoint with a final name is intact and holds its step. Return their number."""
    checkpoints = checkpoints_of(run)
    folder_names = sorted(path.name for path in (run / "checkpoints").glob("step-*") if not path.name.endswith(".tmp"))
    assert folder_names == [checkpoint.path.name for checkpoint in checkpoints], f"{folder_names} cannot all be read"
    assert checkpoints, "nothing is left"
    for checkpoint in checkpoints:
        assert damage(checkpoint) is None, f"{checkpoint.path.name}: {damage(checkpoint)}"
        tensors, values = read_checkpoint(checkpoint)
        assert sum(name.startswith("optimizer/") for name in tensors) == 6
        for name, tensor in tensors.items():
            distinct_values = tensor.unique().tolist()
            assert name.startswith("generators/") or distinct_values == [checkpoint.metadata.step], (
                f"{checkpoint.path.name}: {name} holds {distinct_values}"
            )
        assert values["groups"][0]["lr"] == checkpoint.metadata.step, f"{checkpoint.path.name}: another step's values"
    best = run / "checkpoints" / "best"
    assert not best.is_symlink() or best.resolve() in [checkpoint.path.resolve() for checkpoint in checkpoints], (
        "`best` leads nowhere"
    )
    assert find_checkpoint(run).path == checkpoints[-1].path
    return len(checkpoints)


@pytest.mark.integration
def test_checkpoints_are_intact_after_kills_while_saving(python: ForkServer, tmp_path: Path) -> None:
    """SIGKILL hits at random moments, also while saving in the background. Intact checkpoints remain."""
    with (tmp_path / "output").open("w") as output, (tmp_path / "errors").open("w") as errors:
        status = python.fork(kill_savers, tmp_path, 17, 50, streams=(None, output, errors)).wait(200)
    assert status == 0, (tmp_path / "errors").read_text()
    num_unfinished, num_intact = map(int, (tmp_path / "output").read_text().split())
    assert num_unfinished >= 10, "too few kills hit during a save"
    assert num_intact >= 100
