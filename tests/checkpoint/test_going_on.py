"""A training that was saved goes on as if it had never stopped, under any layout and number of ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zoo
from checkpointing import END, SAVED, Going, begins, interrupted, losses_of, same, training
from everyrank.checkpoint import resume
from everyrank.runs import find_checkpoint
from everyrank.world import World

# --- a fresh process goes on where another one was


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
def test_two_ranks_go_on_to_the_last_bit(
    ranks: Any, tmp_path: Path, strategy: str, optimizer: str, workers: int
) -> None:
    """Losses and final state after a checkpoint in mid-epoch are those of the run that was not interrupted."""
    rows = ranks(2, interrupted, f"{strategy}:precision=float64", training(optimizer), workers, tmp_path)
    for row in rows:
        assert row["begun"] == SAVED
        assert len(row["again"][0]) == END - SAVED
        (then, values_then), (now, values_now) = row["at_save"]
        same(then, now)
        assert values_then == values_now
        for one, other in zip(row["whole"][0], row["again"][0], strict=True):
            assert torch.equal(one, other)
        same(row["whole"][1], row["again"][1])
        assert row["whole"][2] == row["again"][2]
    # a server runs no model, and hears of the buffers when it saves
    expected = [SAVED, END] if strategy == "parameter_server" else [END, END]
    assert [int(row["again"][1]["model/calls"]) for row in rows] == expected


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "parameter_server:servers=2"])
@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks_go_on_alike(ranks: Any, tmp_path: Path, strategy: str, size: int) -> None:
    """On three and four ranks, where the last batch of an epoch has fewer samples than ranks, to 1e-12."""
    optimizer = "adamw" if size == 3 else "sgd"
    layout = f"{strategy}{',' if ':' in strategy else ':'}precision=float64"
    for row in ranks(size, interrupted, layout, training(optimizer), 0, tmp_path):
        torch.testing.assert_close(row["whole"][0], row["again"][0], rtol=1e-12, atol=1e-13)
        same(row["whole"][1], row["again"][1], relative=1e-12)
        assert row["whole"][2] == row["again"][2]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_the_loss_scale_goes_on(ranks: Any, tmp_path: Path, strategy: str) -> None:
    """fp16: after overflows the scale has moved, and a fresh run begins with that scale and its count of good steps."""
    rows = ranks(2, scaled, strategy, tmp_path)
    for before, after, whole, again in rows:
        assert before == after
        assert before[0] < 65536.0, "the workload was meant to overflow"
        assert before[1] > 0, "and then to have good steps"
        for one, other in zip(whole[0], again[0], strict=True):
            assert torch.equal(one, other)
        same(whole[1], again[1])
        assert whole[2] == again[2]


def scaled(world: World, strategy: str, run: Path) -> Any:
    def loss(output: Any, target: Any) -> Any:
        total, count = zoo.squared(output, target)
        return total * 3.0, count  # its gradient does not fit into fp16 at the first scale

    workload = zoo.workload("frozen", loss=loss)
    whole = Going(world, workload, f"{strategy}:precision=fp16")
    whole.updates(0, SAVED)
    whole.saver(run).save(SAVED, {})
    scale = whole.prepared.trainable.scaler
    assert scale is not None
    before = (scale.scale, scale.good_steps)
    expected = (whole.updates(SAVED, END), *whole.state())
    again = Going(world, workload, f"{strategy}:precision=fp16")
    resume(again.prepared, world, find_checkpoint(run), again.about())
    scale = again.prepared.trainable.scaler
    assert scale is not None
    after = (scale.scale, scale.good_steps)
    return before, after, expected, (again.updates(SAVED, END), *again.state())


def drawing(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """A loss that draws from generators nobody reseeds; another stream on every rank, and normal numbers in pairs."""
    for _ in range(dist.get_rank()):
        random.random()
        np.random.rand()
    total, count = zoo.squared(output, target)
    return total * (1.0 + 0.1 * random.gauss(0.0, 1.0) + 0.1 * float(np.random.standard_normal())), count


@pytest.mark.parametrize("saved", [5, 6])  # the second number of a pair is, or is not, still to be given out
def test_generators_of_python_and_numpy_go_on(ranks: Any, tmp_path: Path, saved: int) -> None:
    """A model of a person's own that draws from them goes on to the last bit, each rank with its own stream."""
    workload = zoo.workload("frozen", loss=drawing)
    rows = ranks(2, interrupted, "ddp:precision=float64", workload, 0, tmp_path, saved)
    for row in rows:
        for one, other in zip(row["whole"][0], row["again"][0], strict=True):
            assert torch.equal(one, other)
        same(row["whole"][1], row["again"][1])
    own = [row["whole"][1][f"generators/{rank}"] for rank, row in enumerate(rows)]
    assert not torch.equal(*own), "the ranks were meant to draw differently"


# --- another layout on another number of ranks


def goes_on(world: World, layout: str, optimizer: str, run: Path) -> tuple[list[Tensor], dict[str, Tensor]]:
    going = Going(world, training(optimizer), f"{layout}:precision=float64")
    begun = resume(going.prepared, world, find_checkpoint(run), going.about())
    return going.updates(begun, END), going.prepared.full_state()


NO_GRADIENT = ("blocks.0.0.bias", "blocks.1.0.bias")  # before batch norm: AdamW steps by what rounding leaves of it


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("saved", "then"),
    [
        (("fsdp", 4), [("ddp", 2), ("zero1", 3), ("single", 1)]),
        (("single", 1), [("fsdp", 3)]),
        (("zero1", 3), [("ddp", 2), ("fsdp", 4)]),
        (("parameter_server", 3), [("ddp", 2), ("single", 1)]),
        (("ddp", 2), [("parameter_server", 4)]),
    ],
    ids=["from fsdp", "from single", "from zero1", "from servers", "to servers"],
)
def test_another_layout_goes_on(
    ranks: Any, tmp_path: Path, optimizer: str, saved: tuple[str, int], then: list[tuple[str, int]]
) -> None:
    """The state of the optimizer too is cut anew: losses and model are those of the run that was not interrupted."""
    whole = ranks(saved[1], begins, saved[0], optimizer, tmp_path)
    expected = losses_of(whole)
    for layout, size in then:
        rows = ranks(size, goes_on, layout, optimizer, tmp_path)
        assert losses_of(rows) == pytest.approx(expected, rel=1e-10, abs=0.0), (layout, size)
        found, right = (
            {name: row[1][name] for name in row[1] if name not in NO_GRADIENT} for row in (rows[0], whole[0])
        )
        same(found, right, relative=1e-10)
