"""Checkpoints of layouts that split the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import zoo
from checkpointing import END, SAVED, Going, interrupted, losses_of, same, schedule
from everyrank import Workload
from everyrank.checkpoint import resume
from everyrank.runs import find_checkpoint
from everyrank.world import World

pytestmark = pytest.mark.integration


def decoding(optimizer: str) -> Workload:
    """A tied decoder that every layout can split; 4 blocks, two of them a stage or one."""
    return zoo.workload("decoder", optimizer, schedule=schedule)


def in_float64(layout: str) -> str:
    return f"{layout}{',' if ':' in layout else ':'}precision=float64"


def decodes(
    world: World, layout: str, optimizer: str, run: Path, saves: bool
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train, and save in the middle; or go on from there. The shares after that, and the model at the end."""
    going = Going(world, decoding(optimizer), in_float64(layout))
    if saves:
        going.updates(0, SAVED)
        going.saver(run).save(SAVED, {})
        begun = SAVED
    else:
        going.updates(0, 2)  # a model that is not fresh at all: everything has to be put back
        begun = resume(going.prepared, world, find_checkpoint(run), going.about())
    return going.updates(begun, END), going.prepared.full_state()


@pytest.fixture(scope="session")
def decoded() -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    return {}


SPLIT = [
    (("fsdp:tensor=2", 4), [("pipeline:shard=2", 4), ("ddp", 2), ("single", 1)]),
    (("pipeline:schedule=interleaved", 2), [("ddp", 2), ("tensor", 2), ("pipeline:schedule=zero-bubble", 4)]),
    (("context", 2), [("fsdp:tensor=2", 4), ("pipeline:tensor=2", 4)]),
    (("pipeline:shard=2", 4), [("fsdp:replicate=2", 4), ("fsdp:context=2", 2)]),
    (("single", 1), [("pipeline:tensor=2,schedule=gpipe", 4), ("fsdp:tensor=2,sequence=true", 4)]),
]


@pytest.mark.parametrize("optimizer", ["adamw"])
@pytest.mark.parametrize(("saved", "then"), SPLIT, ids=[saved[0] for saved, _ in SPLIT])
def test_a_split_model_goes_on_in_other_parts(
    ranks: Any,
    tmp_path: Path,
    decoded: dict[str, Any],
    optimizer: str,
    saved: tuple[str, int],
    then: list[tuple[str, int]],
) -> None:
    """Matrices, stages, shards and the optimizer's state of them: losses are those of one device that never stopped."""
    if optimizer not in decoded:
        whole = ranks(1, decodes, "single", optimizer, tmp_path / "whole", True)
        decoded[optimizer] = losses_of(whole), whole[0][1]
    losses, state = decoded[optimizer]
    for saves, (layout, size) in [(True, saved), *((False, other) for other in then)]:
        rows = ranks(size, decodes, layout, optimizer, tmp_path / "run", saves)
        assert losses_of(rows) == pytest.approx(losses, rel=1e-10, abs=0.0), (layout, size)
        same(rows[0][1], state, relative=1e-9)
        assert not any(row[1] for row in rows[1:]), "the state is on rank 0 alone"


def saves_and_goes_on(world: World, layout: str, run: Path) -> Any:
    return interrupted(world, in_float64(layout), decoding("adamw"), 0, run)


def mixes(world: World, layout: str, optimizer: str, run: Path, saves: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The same of a mixture of experts."""
    with mock.patch(f"{__name__}.decoding", lambda chosen: zoo.workload("experts", chosen, schedule=schedule)):
        return decodes(world, layout, optimizer, run, saves)


MIXED = [("expert", 2), ("fsdp:expert=2", 2), ("ddp", 2), ("single", 1)]
MORE_MIXED = [("fsdp:expert=2", 4), ("ddp:expert=2", 4), ("fsdp:expert=2,tensor=2", 4), ("fsdp", 2)]


@pytest.mark.parametrize("layouts", [MIXED, MORE_MIXED], ids=["2", "4"])
def test_experts_go_on_elsewhere(ranks: Any, tmp_path: Path, layouts: list[tuple[str, int]]) -> None:
    """Saved by one layout, experts and their optimizer state go on under each of the others."""
    whole = ranks(1, mixes, "single", "adamw", tmp_path / "whole", True)
    for number, (layout, size) in enumerate([*layouts, layouts[0]]):
        is_first = number % len(layouts) == 0
        # saved by the first, taken up by the others; then saved by the one that keeps them whole, for the first
        saver, run = (layouts[0], tmp_path / "run") if number < len(layouts) else (layouts[-1], tmp_path / "back")
        if is_first:
            ranks(saver[1], mixes, saver[0], "adamw", run, True)
        rows = ranks(size, mixes, layout, "adamw", run, False)
        assert losses_of(rows) == pytest.approx(losses_of(whole), rel=1e-10, abs=0.0), (layout, size)
        same(rows[0][1], whole[0][1], relative=1e-9)


@pytest.mark.parametrize("layout", ["tensor", "context", "pipeline:schedule=interleaved"])
def test_a_split_model_goes_on_to_the_last_bit(ranks: Any, tmp_path: Path, layout: str) -> None:
    """In the same layout nothing is lost: all that a rank has, optimizer and schedule included."""
    for row in ranks(2, saves_and_goes_on, layout, tmp_path):
        assert row["begun"] == SAVED
        (then, values_then), (now, values_now) = row["at_save"]
        same(then, now)
        assert values_then == values_now
        for one, other in zip(row["whole"][0], row["again"][0], strict=True):
            assert torch.equal(one, other)
        same(row["whole"][1], row["again"][1])
