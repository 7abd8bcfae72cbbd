"""User models and losses with unusual structure are equal or refused with a message. They never hang."""

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
    """Return the status of the parity with its reason or cause, or the error."""
    try:
        case = parity_case(workload, *open_data(workload, world), steps=5)
        parity, _ = check_layout(case, parse_layout(layout), world, f"outside/{workload.name}/{key}")
    except EveryrankError as error:
        return f"ended: {error}"
    return f"{parity.status}: {parity.reason or parity.cause}"


class Normal(nn.Module):
    """A model whose output is an object. torch does not search this object for tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(5, 3)

    def forward(self, value: Tensor) -> torch.distributions.Normal:
        return torch.distributions.Normal(self.mean(value), 1.0)


def nll(output: Any, target: Tensor) -> tuple[Tensor, int]:
    """Return the negative log-likelihood and its number of terms."""
    values = output.log_prob(target)
    return -values.sum(), values.numel()


def points_workload(**changes: Any) -> Any:
    """Return a workload with inputs of 5 features and outputs of 3 features, for any points of the zoo."""

    def collate(samples: list[Any]) -> tuple[Tensor, Tensor]:
        rows = torch.stack([torch.cat([tensor.flatten() for tensor in sample[:1]]) for sample in samples])
        rows = torch.cat([rows] * 5, dim=1)[:, :5]
        return rows, rows[:, :3] * 2

    tied_workload = changed(zoo.workload("tied"), name="outside", **changes)
    return changed(tied_workload, train_data=lambda: zoo.Points(23), eval_data=lambda: zoo.Points(13), collate=collate)


def test_output_that_fully_shard_cannot_hook_is_refused(ranks: Any) -> None:
    """fully_shard would never reduce the gradients of such an output, without an error. ddp reduces them."""
    workload = points_workload(model=Normal, loss=nll, blocks=None)
    assert ranks(2, outcome, workload, "ddp", next(KEYS))[0].startswith("equal")
    result = ranks(2, outcome, workload, "fsdp", next(KEYS))[0]
    assert result.startswith("refused"), result
    assert "Normal" in result


class Checkpointed(nn.Module):
    """A model that checkpoints its own blocks."""

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
    """Return the sum of the squared errors and its number of terms."""
    return (output - target).square().sum(), output.numel()


def test_pipeline_of_blocks_that_the_model_checkpoints_is_refused(ranks: Any) -> None:
    """The message recommends recompute=true. fsdp supports the model."""
    workload = points_workload(model=Checkpointed, loss=squares, blocks="blocks")
    result = ranks(2, outcome, workload, "pipeline", next(KEYS))[0]
    assert result.startswith("refused"), result
    assert "recompute=true" in result
    assert ranks(2, outcome, workload, "fsdp", next(KEYS))[0].startswith("equal")


def contrastive(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Contrast each output with those of all ranks."""
    all_outputs = gather(output)
    labels = first_row() + torch.arange(len(output))
    return nn.functional.cross_entropy(output @ all_outputs.T, labels, reduction="sum"), len(output)


@pytest.mark.parametrize("layout", ["local_sgd", "ddp:batch_norm=local"])
def test_gather_is_refused_where_one_process_simulates_several_ranks(ranks: Any, layout: str) -> None:
    """One process does not have the rows of the other ranks. Under local_sgd they come from other models."""
    workload = points_workload(model=lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    workload = changed(workload, loss=contrastive, blocks=None, global_batch=8)
    result = ranks(2, outcome, workload, layout, next(KEYS))[0]
    assert result.startswith("refused"), result
    assert "gather" in result


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.NAdam])
def test_optimizers_with_step_tensors_are_equal_under_local_sgd(ranks: Any, optimizer: Any) -> None:
    """Step counts in tensors must not be averaged. The counts of loss terms are not whole numbers."""

    def weighted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        weights = 0.3 + target.abs().sum(1) / 7
        return ((output - target).square().mean(1) * weights).sum(), weights.sum()

    workload = points_workload(
        model=lambda: nn.Linear(5, 3),
        loss=weighted,
        optimizer=lambda model: optimizer(model.parameters(), lr=0.01),
        blocks=None,
    )
    workload = changed(workload, clip_norm=None)
    for layout in ("local_sgd", "local_sgd:every=2"):
        result = ranks(2, outcome, workload, layout, next(KEYS))[0]
        assert result.startswith("equal"), result


class RoutedModel(nn.Module):
    """Two mixtures that call an expert only if a sample has chosen it, (B, 5) -> (B, 2)."""

    def __init__(self, has_scales: bool = False) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 6), nn.Linear(6, 2)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.scales = nn.ParameterList(nn.Parameter(torch.tensor(1.0)) for _ in range(3)) if has_scales else None

    def forward(self, values: Tensor) -> Tensor:
        stream = self.first(values)
        choices = (stream.detach().sum(1) * 7).floor().long() % 3
        for index, expert in enumerate(self.experts):
            rows = (choices == index).nonzero()[:, 0]
            if len(rows):
                part = stream[rows] * self.scales[index] if self.scales is not None else expert(stream[rows])
                stream = stream.index_add(0, rows, part)
        return self.head(stream)


def routed_workload(optimizer: str, **changes: Any) -> Any:
    """Return a workload whose two ranks call different experts, one each, in the first update."""
    fields: dict[str, Any] = {"model": RoutedModel, "blocks": None, "clip_norm": None, "global_batch": 2, "seed": 5}
    return zoo.workload("frozen", optimizer, **(fields | changes))


@pytest.mark.parametrize(
    ("layout", "optimizer", "changes"),
    [
        ("fsdp", "sgd", {}),
        ("fsdp:accumulate=2", "sgd", {"global_batch": 4}),
        ("fsdp", "sgd", {"model": lambda: RoutedModel(has_scales=True)}),
        ("local_sgd", "adamw", {}),
        ("local_sgd:every=2", "adamw", {}),
    ],
)
def test_gradients_of_different_parameters_are_not_added_up(
    ranks: Any, layout: str, optimizer: str, changes: dict[str, Any]
) -> None:
    """The gradient of one expert has the size of that of another one. The message names the parameter and a rank."""
    workload = routed_workload(optimizer, **changes)
    [result, _] = ranks(2, outcome, workload, layout, next(KEYS))
    assert result.startswith("refused: "), result
    assert any(name in result for name in ("experts.", "scales."))
    assert "ddp:find_unused=true" in result


def test_experts_that_some_ranks_do_not_call_are_equal_under_ddp(ranks: Any) -> None:
    """This is the layout that the message recommends. Plain SGD of local_sgd has no state to average."""
    momentum = routed_workload("sgd")
    plain = changed(momentum, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05))
    for layout, workload in (("ddp:find_unused=true", momentum), ("local_sgd", plain)):
        [result, _] = ranks(2, outcome, workload, layout, next(KEYS))
        assert result.startswith("equal"), result


def test_masks_of_rows_do_not_depend_on_padding() -> None:
    """Attention dropout has shape (heads, queries, keys). A batch with more padding has the same masks."""
    keys = sample_keys(5, range(3), torch.device("cpu"))

    def mask(length: int) -> Tensor:
        return keep_mask(row_keys(keys, [whole_dim(4), whole_dim(length)]), whole_dim(length), 0.3)

    assert torch.equal(mask(8)[:, :, :7, :7], mask(7))
    assert not torch.equal(mask(7)[:, 0], mask(7)[:, 1])


class LocalNormSGD(torch.optim.Optimizer):
    """Normalized gradient descent. It takes the norm of a shard for the norm of the whole gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for parameter in self.param_groups[0]["params"]:
            weight, gradient = (
                getattr(tensor, "to_local", lambda tensor=tensor: tensor)() for tensor in (parameter, parameter.grad)
            )
            weight.sub_(gradient / (gradient.norm() + 1e-6), alpha=0.01)


def test_optimizer_that_takes_the_norm_of_a_shard_is_named(ranks: Any) -> None:
    """The gradients are right, so the cause is the optimizer."""
    workload = points_workload(
        model=lambda: nn.Linear(5, 3),
        loss=squares,
        blocks=None,
        optimizer=lambda model: LocalNormSGD(model.parameters()),
        metrics={},
    )
    result = ranks(2, outcome, workload, "fsdp", next(KEYS))[0]
    assert result.startswith("different: ")
    assert "optimizer" in result
