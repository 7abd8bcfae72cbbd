"""What the strategies do around the mathematics: refusals, loss scaling, ties, owners, state."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zoo
from everyrank import parse_layout
from everyrank.data import all_updates
from everyrank.errors import CannotRunError, WorkloadError
from everyrank.loop import open_data, run_updates
from everyrank.parallel.fsdp import fsdp_units
from everyrank.parallel.pipeline.run import PipelineRun
from everyrank.parallel.precision import LossScaler
from everyrank.parallel.zero1 import assign_owners
from everyrank.parity import check_layout, parity_case
from everyrank.strategies import prepare
from everyrank.world import World


def test_dataparallel_says_what_it_needs(ranks: Any) -> None:
    """Never a pass because hardware is missing."""
    assert ranks(1, try_dataparallel) == ["needs 2 CUDA devices"]


def try_dataparallel(world: World) -> str:
    try:
        prepare(zoo.workload("frozen"), parse_layout("dataparallel"), world)
    except CannotRunError as error:
        return str(error)
    return ""


def test_loss_scale() -> None:
    """Halved after an overflow, doubled after many good steps, never below one."""
    scale = LossScaler(scale=4.0, growth_interval=2)
    scale.update(finite=True)
    assert scale.scale == 4.0
    scale.update(finite=True)
    assert scale.scale == 8.0
    scale.update(finite=True)
    for _ in range(5):
        scale.update(finite=False)
    assert scale.scale == 1.0
    assert scale.good_steps == 0


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_overflow_skips_on_every_rank(ranks: Any, strategy: str) -> None:
    """An overflow on one rank alone skips the update on all: one skipped and one stepped is how training dies."""
    for before, after, scale, rate in ranks(2, overflow, strategy):
        assert before == after
        assert scale == 32768.0
        assert rate == pytest.approx(0.05 * 0.5), "the schedule advances all the same"


def overflow(world: World, strategy: str) -> Any:
    def loss(output: Any, target: Any) -> Any:
        total, count = zoo.squared(output, target)
        # the gradient of this one rank does not fit into fp16, its loss does
        return total * (1e4 if world.rank == 1 else 1.0), count

    workload = zoo.workload(
        "frozen",
        loss=loss,
        clip_norm=None,
        schedule=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    )
    layout = parse_layout(f"{strategy}:precision=fp16")
    train_data, _ = open_data(workload, world)
    prepared = prepare(workload, layout, world)
    before = fingerprint(prepared)
    next(run_updates(prepared, train_data, all_updates(1, 4)))
    assert prepared.trainable.scaler is not None
    return (
        before,
        fingerprint(prepared),
        prepared.trainable.scaler.scale,
        prepared.trainable.optimizer.param_groups[0]["lr"],
    )


def fingerprint(prepared: Any) -> list[float]:
    return [float(tensor.double().sum()) for tensor in prepared.trainable.snapshot()["tensors"][:-1]]


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero1", "fsdp"])
def test_restore_puts_everything_back(ranks: Any, strategy: str) -> None:
    """Trained twice from a snapshot: the same losses to the last bit, momentum and schedule included."""
    for first, second in ranks(1 if strategy == "single" else 2, train_twice, strategy):
        assert first == second


def train_twice(world: World, strategy: str) -> Any:
    workload = zoo.workload("tied", "adamw")
    layout = parse_layout(strategy)
    train_data, _ = open_data(workload, world)
    prepared = prepare(workload, layout, world)
    # DDP rebuilds its buckets after the first update, which moves last bits on more than two ranks
    saved = prepared.trainable.snapshot()
    runs = []
    for _ in range(2):
        prepared.trainable.restore(saved)
        shares = run_updates(prepared, train_data, all_updates(5, 4))
        runs.append([share.tolist() for share in shares])
    return runs


def test_owners_share_the_load() -> None:
    """Each rank owns about as many elements; every parameter has one owner."""
    sizes = [100, 1, 60, 40, 3, 99]
    owners = assign_owners([nn.Parameter(torch.zeros(size)) for size in sizes], 3)
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(3)]
    assert max(loads) <= 1.1 * sum(sizes) / 3
    assert assign_owners([], 3) == []


def test_tied_blocks_are_one_unit() -> None:
    """Blocks that share a weight are sharded together; one that shares with the rest stays with the rest."""
    blocks = [nn.Linear(2, 2) for _ in range(5)]
    blocks[3].weight = blocks[1].weight
    model = nn.ModuleDict({"blocks": nn.ModuleList(blocks), "head": nn.Linear(2, 2)})
    blocks[4].weight = model["head"].weight
    units = fsdp_units(model, list(blocks))
    assert [[blocks.index(member) for member in unit] for unit in units] == [[0], [2], [1, 3]]


def test_tied_across_blocks_is_exact(ranks: Any) -> None:
    """The layout that older torch trained silently wrong, and 2.13 refuses."""
    assert ranks(2, tied_across_blocks) == [True, True]


class TiedBlocks(nn.Module):
    """Two blocks with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)])
        self.blocks[1].weight = self.blocks[0].weight

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            values = block(values)
        return values


def tied_across_blocks(world: World) -> bool:
    from everyrank.parity import check_layout, parity_case

    workload = zoo.workload("frozen", model=TiedBlocks, blocks="blocks")
    subject = parity_case(workload, *open_data(workload, world), steps=6)
    parity, _ = check_layout(subject, parse_layout("fsdp"), world, "test/tied-blocks")
    return parity.status == "equal"


def test_wrong_blocks_are_named(ranks: Any) -> None:
    """The model's own lists are offered."""
    [text] = ranks(1, wrong_blocks)
    assert text.startswith("blocks='layer': ")
    assert text.endswith(" layers")


def wrong_blocks(world: World) -> str:
    try:
        prepare(zoo.workload("frozen", blocks="layer"), parse_layout("fsdp"), world)
    except WorkloadError as error:
        return str(error)
    return ""


def test_state_is_whole_on_rank_0(ranks: Any) -> None:
    """Full parameters and buffers on rank 0, nothing elsewhere, equal for every layout."""
    found = ranks(2, states)
    assert [list(state) for state in found[1]] == [[], [], []]
    for state in found[0]:
        assert list(state) == list(found[0][0])
        for name, tensor in state.items():
            assert torch.equal(tensor, found[0][0][name])


def states(world: World) -> Any:
    workload = zoo.workload("norm")
    return [prepare(workload, parse_layout(text), world).full_state() for text in ("ddp", "zero1", "fsdp")]


def test_a_pipeline_computes_each_phase_under_its_name(ranks: Any) -> None:
    """Forwards between backwards are forward, for whoever takes a step apart; nothing but these computes in blocks."""
    for forward, backward in ranks(2, phases_of_blocks, "pipeline:microbatches=4"):
        assert set(forward) == {"forward"}
        assert set(backward) == {"backward"}
        assert len(forward) == len(backward) == 4


def phases_of_blocks(world: World, layout: str) -> tuple[list[str], list[str]]:
    """In which phase the stages of this rank went forward and backward, in one update."""
    workload = zoo.workload("decoder", global_batch=8)
    data, _ = open_data(workload, world)
    prepared = prepare(workload, parse_layout(layout), world)
    updates = run_updates(prepared, data, all_updates(2, 2))
    next(updates)
    phase = [""]
    forwards: list[str] = []
    backwards: list[str] = []
    run = PipelineRun.run

    def watched(pipe: PipelineRun, batches: Any, forward: Any, backward: Any) -> None:
        def forward_seen(*arguments: Any) -> Any:
            forwards.append(phase[0])
            return forward(*arguments)

        def backward_seen(*arguments: Any) -> Any:
            backwards.append(phase[0])
            return backward(*arguments)

        run(pipe, batches, forward_seen, backward_seen)

    prepared.trainable.phase_observers.append(lambda entered: phase.__setitem__(0, entered))
    with mock.patch.object(PipelineRun, "run", watched):
        next(updates)
    return forwards, backwards


class ScaledModel(nn.Module):
    """Returns a parameter of its own, expanded: a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)), nn.Parameter(torch.ones(2))

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layers(values), self.scale.expand(len(values), 2)


def evaluated_view(world: World, layout: str) -> list[str]:
    def loss(output: Any, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        return ((output[0] - target) * output[1]).square().sum(), target.numel()

    workload = zoo.workload("frozen", model=ScaledModel, loss=loss, metrics={}, blocks="layers")
    case = parity_case(workload, *open_data(workload, world), 2, is_quick=True)
    parity, _ = check_layout(case, parse_layout(layout), world, f"views/{layout}")
    return [parity.status]


def test_a_model_may_return_a_view_of_a_parameter(ranks: Any) -> None:
    """Under fsdp the gathered parameter is let go after an evaluation, and its view still holds its numbers."""
    assert ranks(2, evaluated_view, "fsdp") == [["equal"], ["equal"]]
