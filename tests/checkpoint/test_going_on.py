"""A resumed training equals the uninterrupted one, under any layout and any number of ranks."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zoo
from checkpointing import (
    END_STEP,
    SAVE_STEP,
    TrainingSession,
    assert_equal_tensors,
    global_losses,
    mixed_workload,
    train_and_resume,
    train_and_save,
)
from everyrank.checkpoint import Saver, resume
from everyrank.checkpoint.contents import model_tensors
from everyrank.errors import UsageError, WorkloadError
from everyrank.runs import find_checkpoint, json_form
from everyrank.world import World

# --- resume with the same layout


@pytest.mark.parametrize(
    ("strategy", "optimizer", "workers"),
    [
        *((strategy, optimizer, 0) for strategy in ("ddp", "zero1", "fsdp") for optimizer in ("sgd", "adamw")),
        ("ddp", "adamw", 2),
        ("zero1", "adamw", 2),
        ("fsdp", "sgd", 2),
        ("parameter_server", "adamw", 0),
    ],
)
def test_resume_on_two_ranks_is_bitwise_equal(
    ranks: Any, tmp_path: Path, strategy: str, optimizer: str, workers: int
) -> None:
    """The checkpoint is in mid-epoch. Losses and final state equal those of the uninterrupted run."""
    rows = ranks(2, train_and_resume, f"{strategy}:precision=float64", mixed_workload(optimizer), workers, tmp_path)
    for row in rows:
        assert row["begun"] == SAVE_STEP
        assert len(row["again"][0]) == END_STEP - SAVE_STEP
        (saved_state, saved_values), (resumed_state, resumed_values) = row["at_save"]
        assert_equal_tensors(saved_state, resumed_state)
        assert saved_values == resumed_values
        for expected_loss, resumed_loss in zip(row["whole"][0], row["again"][0], strict=True):
            assert torch.equal(expected_loss, resumed_loss)
        assert_equal_tensors(row["whole"][1], row["again"][1])
        assert row["whole"][2] == row["again"][2]
    # a server runs no model, and receives the buffers only when it saves
    expected = [SAVE_STEP, END_STEP] if strategy == "parameter_server" else [END_STEP, END_STEP]
    assert [int(row["again"][1]["model/calls"]) for row in rows] == expected


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "parameter_server:servers=2"])
@pytest.mark.parametrize("size", [3, 4])
def test_resume_on_more_ranks_is_equal_up_to_rounding(ranks: Any, tmp_path: Path, strategy: str, size: int) -> None:
    """On three and four ranks, the last batch of an epoch has fewer samples than ranks. The tolerance is 1e-12."""
    optimizer = "adamw" if size == 3 else "sgd"
    layout = f"{strategy}{',' if ':' in strategy else ':'}precision=float64"
    for row in ranks(size, train_and_resume, layout, mixed_workload(optimizer), 0, tmp_path):
        torch.testing.assert_close(row["whole"][0], row["again"][0], rtol=1e-12, atol=1e-13)
        assert_equal_tensors(row["whole"][1], row["again"][1], tolerance=1e-12)
        assert row["whole"][2] == row["again"][2]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_resume_restores_the_loss_scale(ranks: Any, tmp_path: Path, strategy: str) -> None:
    """Overflows in fp16 change the scale. The resumed run starts with that scale and its count of good steps."""
    rows = ranks(2, resume_in_fp16, strategy, tmp_path)
    for saved_scale, restored_scale, expected, resumed in rows:
        assert saved_scale == restored_scale
        assert saved_scale[0] < 65536.0, "the workload was meant to overflow"
        assert saved_scale[1] > 0, "and then to have good steps"
        for expected_loss, resumed_loss in zip(expected[0], resumed[0], strict=True):
            assert torch.equal(expected_loss, resumed_loss)
        assert_equal_tensors(expected[1], resumed[1])
        assert expected[2] == resumed[2]


def resume_in_fp16(world: World, strategy: str, run: Path) -> Any:
    """Return the loss scale at the checkpoint and after resuming, and the results of both runs."""

    def loss(output: Any, target: Any) -> Any:
        total, count = zoo.squared_error(output, target)
        return total * 3.0, count  # its gradient does not fit into fp16 at the first scale

    workload = zoo.workload("frozen", loss=loss)
    uninterrupted = TrainingSession(world, workload, f"{strategy}:precision=fp16")
    uninterrupted.train(0, SAVE_STEP)
    uninterrupted.make_saver(run).save(SAVE_STEP, {})
    scale = uninterrupted.prepared.trainable.scaler
    assert scale is not None
    saved_scale = (scale.scale, scale.good_steps)
    expected = (uninterrupted.train(SAVE_STEP, END_STEP), *uninterrupted.state())
    resumed = TrainingSession(world, workload, f"{strategy}:precision=fp16")
    resume(resumed.prepared, world, find_checkpoint(run), resumed.metadata())
    scale = resumed.prepared.trainable.scaler
    assert scale is not None
    restored_scale = (scale.scale, scale.good_steps)
    return saved_scale, restored_scale, expected, (resumed.train(SAVE_STEP, END_STEP), *resumed.state())


def loss_with_random_factor(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Return a loss that draws from Python's and NumPy's generators, which nothing reseeds.

    Each rank draws a different stream. Normal numbers are generated in pairs.
    """
    for _ in range(dist.get_rank()):
        random.random()
        np.random.rand()
    total, count = zoo.squared_error(output, target)
    return total * (1.0 + 0.1 * random.gauss(0.0, 1.0) + 0.1 * float(np.random.standard_normal())), count


@pytest.mark.parametrize("saved", [5, 6])  # the second number of a pair is pending, or is not
def test_resume_restores_the_generators_of_python_and_numpy(ranks: Any, tmp_path: Path, saved: int) -> None:
    """A user's loss draws from them. The resumed run is bitwise equal, and each rank has its own stream."""
    workload = zoo.workload("frozen", loss=loss_with_random_factor)
    rows = ranks(2, train_and_resume, "ddp:precision=float64", workload, 0, tmp_path, saved)
    for row in rows:
        for expected_loss, resumed_loss in zip(row["whole"][0], row["again"][0], strict=True):
            assert torch.equal(expected_loss, resumed_loss)
        assert_equal_tensors(row["whole"][1], row["again"][1])
    generator_states = [row["whole"][1][f"generators/{rank}"] for rank, row in enumerate(rows)]
    assert not torch.equal(*generator_states), "the ranks drew the same numbers"


class CountingModel(nn.Module):
    """A model whose output depends on the number of its calls, which is in its extra state.

    The extra state has a number for each call in the last epoch, so that its shape changes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)
        self.calls: list[float] = []

    def forward(self, values: Tensor) -> Tensor:
        if self.training:
            self.calls.append(len(self.calls) + 1.0)
        return self.layer(values) * (1.0 + 0.1 * sum(self.calls))

    def get_extra_state(self) -> Tensor:
        """Return a new tensor, as torch's documentation suggests."""
        return torch.tensor(self.calls, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Replace the calls."""
        self.calls = state.tolist()


class OddOptimizer(torch.optim.Optimizer):
    """An optimizer whose state has a mask, a counter that float32 cannot hold, and a moment of another precision."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Add to the counter, and update the parameters where the mask is set."""
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["mask"] = parameter > 0
                state["count"] = torch.tensor(2**24)
                state["moment"] = torch.zeros_like(parameter, dtype=torch.float64)
            state["count"] += 1
            state["moment"].mul_(0.9).add_(parameter.grad)
            change = state["moment"] * int(state["count"] - 2**24) * 0.01
            parameter[state["mask"]] -= change[state["mask"]].to(parameter.dtype)


@pytest.mark.parametrize(
    "changed_fields", [{"model": CountingModel}, {"optimizer": OddOptimizer}], ids=["extra state", "dtypes"]
)
def test_resume_restores_extra_state_and_the_dtypes_of_the_optimizer(
    ranks: Any, tmp_path: Path, changed_fields: dict[str, Any]
) -> None:
    """The extra state of a module is a copy. torch casts the state of an optimizer when it is loaded."""
    workload = dataclasses.replace(zoo.workload("frozen", blocks=None), **changed_fields)
    (row,) = ranks(1, train_and_resume, "single", workload, 0, tmp_path)
    assert_equal_tensors(row["at_save"][0][0], row["at_save"][1][0])
    assert torch.equal(torch.stack(row["whole"][0]), torch.stack(row["again"][0]))
    assert_equal_tensors(row["whole"][1], row["again"][1])


@pytest.mark.parametrize("value", [(3, 4), {1: 2}, [(1,), {"a": (2, 3)}]], ids=["tuple", "dict", "nested"])
def test_run_is_resumed_with_a_setting_that_json_changes(ranks: Any, tmp_path: Path, value: Any) -> None:
    """JSON has a list for a tuple, and text for the keys of a dict. A different value is still refused."""
    assert ranks(1, resume_with_setting, tmp_path, value) == [f"it was trained with --set dims={json_form(value)}"]


def resume_with_setting(world: World, run: Path, value: Any) -> str:
    """Save and resume with the same setting. Return the start of the error of a resume with a different one."""
    session = TrainingSession(world, zoo.workload("frozen"), "single")
    metadata = dataclasses.replace(session.metadata(), settings={"dims": value})
    Saver(run, session.prepared, world, metadata, keep=3, in_background=False).save(0, {})
    checkpoint = find_checkpoint(run)
    assert resume(session.prepared, world, checkpoint, metadata) == 0
    with pytest.raises(UsageError) as caught:
        resume(session.prepared, world, checkpoint, dataclasses.replace(metadata, settings={"dims": (5,)}))
    return str(caught.value).removeprefix(f"{checkpoint.path}: ").partition(", but")[0]


class CastingModel(nn.Linear):
    """A model whose state dict has a copy of its weight that nothing loads."""

    def __init__(self) -> None:
        super().__init__(5, 2)
        self._register_state_dict_hook(cast_weight)


def cast_weight(_module: nn.Module, state: dict[str, Tensor], _prefix: str, _metadata: Any) -> None:
    """Replace the weight in a state dict."""
    state["weight"] = state["weight"].half()


def test_state_that_could_not_be_loaded_is_refused_before_the_training() -> None:
    """A resumed training would start with other weights."""
    with pytest.raises(WorkloadError, match="weight in the model's state is a copy"):
        model_tensors(CastingModel())


# --- resume with a different layout and number of ranks


def resume_and_finish(world: World, layout: str, optimizer: str, run: Path) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Resume the run, and return the local losses after the checkpoint and the full state."""
    session = TrainingSession(world, mixed_workload(optimizer), f"{layout}:precision=float64")
    start_step = resume(session.prepared, world, find_checkpoint(run), session.metadata())
    return session.train(start_step, END_STEP), session.prepared.full_state()


# before batch norm: the gradient is only rounding error, which AdamW scales up
NO_GRADIENT = ("blocks.0.0.bias", "blocks.1.0.bias")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("saved", "resumed_by"),
    [
        (("fsdp", 4), [("ddp", 2), ("zero1", 3), ("single", 1)]),
        (("single", 1), [("fsdp", 3)]),
        (("zero1", 3), [("ddp", 2), ("fsdp", 4)]),
        (("parameter_server", 3), [("ddp", 2), ("single", 1)]),
        (("ddp", 2), [("parameter_server", 4)]),
    ],
    ids=["from fsdp", "from single", "from zero1", "from servers", "to servers"],
)
def test_resume_with_a_different_layout(
    ranks: Any, tmp_path: Path, optimizer: str, saved: tuple[str, int], resumed_by: list[tuple[str, int]]
) -> None:
    """The optimizer state is split again. Losses and model equal those of the uninterrupted run."""
    uninterrupted = ranks(saved[1], train_and_save, saved[0], optimizer, tmp_path)
    expected = global_losses(uninterrupted)
    for layout, size in resumed_by:
        rows = ranks(size, resume_and_finish, layout, optimizer, tmp_path)
        assert global_losses(rows) == pytest.approx(expected, rel=1e-10, abs=0.0), (layout, size)
        final_model, expected_model = (
            {name: row[1][name] for name in row[1] if name not in NO_GRADIENT} for row in (rows[0], uninterrupted[0])
        )
        assert_equal_tensors(final_model, expected_model, tolerance=1e-10)
