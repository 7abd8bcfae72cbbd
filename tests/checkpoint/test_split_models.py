"""Resume with layouts that split the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import zoo
from checkpointing import (
    END_STEP,
    SAVE_STEP,
    TrainingSession,
    assert_equal_tensors,
    global_losses,
    schedule,
    train_and_resume,
)
from everyrank import Workload
from everyrank.checkpoint import resume
from everyrank.runs import find_checkpoint
from everyrank.world import World

pytestmark = pytest.mark.integration


def decoder_workload(optimizer: str) -> Workload:
    """Return a tied decoder with 4 blocks that every layout can split."""
    return zoo.workload("decoder", optimizer, schedule=schedule)


def in_float64(layout: str) -> str:
    return f"{layout}{',' if ':' in layout else ':'}precision=float64"


def train_decoder(
    world: World, layout: str, optimizer: str, run: Path, saves: bool
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train and save in the middle, or resume from that checkpoint.

    Return the local losses after the checkpoint and the full state.
    """
    session = TrainingSession(world, decoder_workload(optimizer), in_float64(layout))
    if saves:
        session.train(0, SAVE_STEP)
        session.make_saver(run).save(SAVE_STEP, {})
        start_step = SAVE_STEP
    else:
        session.train(0, 2)  # resume has to replace every value of this trained model
        start_step = resume(session.prepared, world, find_checkpoint(run), session.metadata())
    return session.train(start_step, END_STEP), session.prepared.full_state()


@pytest.fixture(scope="session")
def decoder_results() -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    """Cache results of uninterrupted runs by optimizer."""
    return {}


LAYOUT_CHANGES = [
    (("fsdp:tensor=2", 4), [("pipeline:shard=2", 4), ("ddp", 2), ("single", 1)]),
    (("pipeline:schedule=interleaved", 2), [("ddp", 2), ("tensor", 2), ("pipeline:schedule=zero-bubble", 4)]),
    (("context", 2), [("pipeline:tensor=2", 4)]),
    (("pipeline:shard=2", 4), [("fsdp:replicate=2", 4), ("fsdp:context=2", 2)]),
    (("single", 1), [("pipeline:tensor=2,schedule=gpipe", 4), ("fsdp:tensor=2,sequence=true", 4)]),
]


@pytest.mark.parametrize("optimizer", ["adamw"])
@pytest.mark.parametrize(("saved", "resumed_by"), LAYOUT_CHANGES, ids=[saved[0] for saved, _ in LAYOUT_CHANGES])
def test_resume_a_split_model_with_a_different_layout(
    ranks: Any,
    tmp_path: Path,
    decoder_results: dict[str, Any],
    optimizer: str,
    saved: tuple[str, int],
    resumed_by: list[tuple[str, int]],
) -> None:
    """Parameters and optimizer state are split again. Losses equal those of one uninterrupted device."""
    if optimizer not in decoder_results:
        uninterrupted = ranks(1, train_decoder, "single", optimizer, tmp_path / "whole", True)
        decoder_results[optimizer] = global_losses(uninterrupted), uninterrupted[0][1]
    losses, state = decoder_results[optimizer]
    for saves, (layout, size) in [(True, saved), *((False, resuming) for resuming in resumed_by)]:
        rows = ranks(size, train_decoder, layout, optimizer, tmp_path / "run", saves)
        assert global_losses(rows) == pytest.approx(losses, rel=1e-10, abs=0.0), (layout, size)
        assert_equal_tensors(rows[0][1], state, tolerance=1e-9)
        assert not any(row[1] for row in rows[1:]), "only rank 0 returns the full state"


def interrupt_decoder(world: World, layout: str, run: Path) -> Any:
    """Run the uninterrupted and the resumed training of the decoder."""
    return train_and_resume(world, in_float64(layout), decoder_workload("adamw"), 0, run)


def train_experts(
    world: World, layout: str, optimizer: str, run: Path, saves: bool
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Do what `train_decoder` does with a mixture of experts."""
    with mock.patch(
        f"{__name__}.decoder_workload",
        lambda optimizer_name: zoo.workload("experts", optimizer_name, schedule=schedule),
    ):
        return train_decoder(world, layout, optimizer, run, saves)


EXPERT_LAYOUTS = [("expert", 2), ("fsdp:expert=2", 2), ("ddp", 2), ("single", 1)]
EXPERT_LAYOUTS_ON_4_RANKS = [("fsdp:expert=2", 4), ("ddp:expert=2", 4), ("fsdp:expert=2,tensor=2", 4), ("fsdp", 2)]


@pytest.mark.parametrize("layouts", [EXPERT_LAYOUTS, EXPERT_LAYOUTS_ON_4_RANKS], ids=["2", "4"])
def test_resume_experts_with_a_different_layout(ranks: Any, tmp_path: Path, layouts: list[tuple[str, int]]) -> None:
    """The first layout saves experts and their optimizer state, and each other layout resumes."""
    uninterrupted = ranks(1, train_experts, "single", "adamw", tmp_path / "whole", True)
    for index, (layout, size) in enumerate([*layouts, layouts[0]]):
        is_first = index % len(layouts) == 0
        # the first layout saves and the others resume; then the last, which does not split experts, saves for the first
        saver, run = (layouts[0], tmp_path / "run") if index < len(layouts) else (layouts[-1], tmp_path / "back")
        if is_first:
            ranks(saver[1], train_experts, saver[0], "adamw", run, True)
        rows = ranks(size, train_experts, layout, "adamw", run, False)
        assert global_losses(rows) == pytest.approx(global_losses(uninterrupted), rel=1e-10, abs=0.0), (layout, size)
        assert_equal_tensors(rows[0][1], uninterrupted[0][1], tolerance=1e-9)


@pytest.mark.parametrize("layout", ["tensor", "context", "pipeline:schedule=interleaved"])
def test_resume_a_split_model_is_bitwise_equal(ranks: Any, tmp_path: Path, layout: str) -> None:
    """With the same layout, resume restores the complete state of each rank."""
    for row in ranks(2, interrupt_decoder, layout, tmp_path):
        assert row["begun"] == SAVE_STEP
        (saved_state, saved_values), (resumed_state, resumed_values) = row["at_save"]
        assert_equal_tensors(saved_state, resumed_state)
        assert saved_values == resumed_values
        for expected_loss, resumed_loss in zip(row["whole"][0], row["again"][0], strict=True):
            assert torch.equal(expected_loss, resumed_loss)
        assert_equal_tensors(row["whole"][1], row["again"][1])
