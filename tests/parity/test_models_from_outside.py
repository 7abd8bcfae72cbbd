"""Models and losses that are written otherwise than those of the zoo: equal, or refused in words, never hanging."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zoo
from everyrank import first_row, gather, parse_layout
from everyrank.errors import EveryrankError
from everyrank.loop import open_data
from everyrank.parallel.dropout.masks import keep_mask, row_keys, sample_keys, whole_dim
from everyrank.parity import check_layout, parity_case
from everyrank.workload import changed
from everyrank.world import World

KEYS = map(str, itertools.count())


def outcome(world: World, workload: Any, layout: str, key: str) -> str:
    try:
        case = parity_case(workload, *open_data(workload, world), steps=5)
        parity, _ = check_layout(case, parse_layout(layout), world, f"outside/{workload.name}/{key}")
    except EveryrankError as error:
        return f"ended: {error}"
    return f"{parity.status}: {parity.reason or parity.cause}"


class Normal(nn.Module):
    """Its output is an object in which torch looks for no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(5, 3)

    def forward(self, value: Tensor) -> torch.distributions.Normal:
        return torch.distributions.Normal(self.mean(value), 1.0)


def nll(output: Any, target: Tensor) -> tuple[Tensor, int]:
    values = output.log_prob(target)
    return -values.sum(), values.numel()


def of_points(**changes: Any) -> Any:
    """Outputs of 3 features for inputs of 5, whatever the points of the zoo are."""

    def collate(samples: list[Any]) -> tuple[Tensor, Tensor]:
        rows = torch.stack([torch.cat([leaf.flatten() for leaf in sample[:1]]) for sample in samples])
        rows = torch.cat([rows] * 5, dim=1)[:, :5]
        return rows, rows[:, :3] * 2

    found = changed(zoo.workload("tied"), name="outside", **changes)
    return changed(found, train_data=lambda: zoo.Points(23), eval_data=lambda: zoo.Points(13), collate=collate)


def test_an_output_that_fully_shard_cannot_hook(ranks: Any) -> None:
    """Its gradients would never be reduced, without a word; ddp computes them."""
    workload = of_points(model=Normal, loss=nll, blocks=None)
    assert ranks(2, outcome, workload, "ddp", next(KEYS))[0].startswith("equal")
    said = ranks(2, outcome, workload, "fsdp", next(KEYS))[0]
    assert said.startswith("refused"), said
    assert "Normal" in said


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, value: Tensor) -> Tensor:
        value = self.first(value)
        for block in self.blocks:
            value = checkpoint(block, value, use_reentrant=False)  # type: ignore[assignment]
        return self.head(value)


def squares(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output - target).square().sum(), output.numel()


def test_a_pipeline_of_blocks_in_a_checkpoint_of_the_model(ranks: Any) -> None:
    workload = of_points(model=Checkpointed, loss=squares, blocks="blocks")
    said = ranks(2, outcome, workload, "pipeline", next(KEYS))[0]
    assert said.startswith("refused"), said
    assert "recompute=true" in said
    assert ranks(2, outcome, workload, "fsdp", next(KEYS))[0].startswith("equal")


def contrastive(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    rows = gather(output)
    own = first_row() + torch.arange(len(output))
    return nn.functional.cross_entropy(output @ rows.T, own, reduction="sum"), len(output)


@pytest.mark.parametrize("layout", ["local_sgd", "ddp:batch_norm=local"])
def test_gather_where_one_process_stands_for_several(ranks: Any, layout: str) -> None:
    """The rows of the other ranks are not there; under local_sgd they would be those of other models."""
    workload = of_points(model=lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    workload = changed(workload, loss=contrastive, blocks=None, global_batch=8)
    said = ranks(2, outcome, workload, layout, next(KEYS))[0]
    assert said.startswith("refused"), said
    assert "gather" in said


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.NAdam])
def test_optimizers_that_count_in_tensors_under_local_sgd(ranks: Any, optimizer: Any) -> None:
    """Their numbers are no mean of anything; the counts of loss terms are not whole."""

    def weighted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        weights = 0.3 + target.abs().sum(1) / 7
        return ((output - target).square().mean(1) * weights).sum(), weights.sum()

    workload = of_points(
        model=lambda: nn.Linear(5, 3),
        loss=weighted,
        optimizer=lambda m: optimizer(m.parameters(), lr=0.01),
        blocks=None,
    )
    workload = changed(workload, clip_norm=None)
    for layout in ("local_sgd", "local_sgd:every=2"):
        said = ranks(2, outcome, workload, layout, next(KEYS))[0]
        assert said.startswith("equal"), said


def test_masks_of_rows_do_not_depend_on_padding() -> None:
    """Dropout of attention weights (heads, queries, keys): a batch that is padded further has the same masks."""
    keys = sample_keys(5, range(3), torch.device("cpu"))

    def mask(length: int) -> Tensor:
        return keep_mask(row_keys(keys, [whole_dim(4), whole_dim(length)]), whole_dim(length), 0.3)

    assert torch.equal(mask(8)[:, :, :7, :7], mask(7))
    assert not torch.equal(mask(7)[:, 0], mask(7)[:, 1])


class LocalNorm(torch.optim.Optimizer):
    """Normalised gradient descent. It takes the norm of a shard for the norm of the whole gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for parameter in self.param_groups[0]["params"]:
            weight, gradient = (getattr(t, "to_local", lambda t=t: t)() for t in (parameter, parameter.grad))
            weight.sub_(gradient / (gradient.norm() + 1e-6), alpha=0.01)


def test_an_optimizer_that_takes_a_shard_for_the_whole(ranks: Any) -> None:
    """The gradients are right, so the cause is in the optimizer."""
    workload = of_points(
        model=lambda: nn.Linear(5, 3),
        loss=squares,
        blocks=None,
        optimizer=lambda model: LocalNorm(model.parameters()),
        metrics={},
    )
    result = ranks(2, outcome, workload, "fsdp", next(KEYS))[0]
    assert result.startswith("different: ")
    assert "optimizer" in result
