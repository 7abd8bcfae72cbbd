"""Strategies: unsupported layouts, loss scaling, tied weights, ZeRO-1 owners, snapshots and full state."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zoo
from everyrank import parse_layout
from everyrank.data import all_updates
from everyrank.errors import CannotRunError, UnsupportedLayoutError, WorkloadError
from everyrank.loop import open_data, run_updates
from everyrank.parallel.fsdp import fsdp_units
from everyrank.parallel.parallelize import call_model, find_blocks, find_called_blocks
from everyrank.parallel.pipeline.run import PipelineRun
from everyrank.parallel.precision import LossScaler
from everyrank.parallel.tensor.plan import resolve
from everyrank.parallel.zero1 import assign_owners
from everyrank.parity import check_layout, parity_case
from everyrank.strategies import prepare
from everyrank.world import World


def test_dataparallel_without_gpus_names_what_it_needs(ranks: Any) -> None:
    """If hardware is missing, the layout is skipped with the reason. It never passes."""
    assert ranks(1, reason_for_skipped_dataparallel) == ["needs 2 CUDA devices"]


def reason_for_skipped_dataparallel(world: World) -> str:
    try:
        prepare(zoo.workload("frozen"), parse_layout("dataparallel"), world)
    except CannotRunError as cannot_run:
        return str(cannot_run)
    return ""


def test_loss_scaler_grows_and_backs_off() -> None:
    """The scale is halved after an overflow, and doubled after `growth_interval` finite steps. It is at least 1."""
    scaler = LossScaler(scale=4.0, growth_interval=2)
    scaler.update(finite=True)
    assert scaler.scale == 4.0
    scaler.update(finite=True)
    assert scaler.scale == 8.0
    scaler.update(finite=True)
    for _ in range(5):
        scaler.update(finite=False)
    assert scaler.scale == 1.0
    assert scaler.good_steps == 0


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_overflow_on_one_rank_skips_the_update_on_all(ranks: Any, strategy: str) -> None:
    """An overflow on one rank skips the update on all ranks. Otherwise, the replicas would differ."""
    for before, after, scale, rate in ranks(2, overflow, strategy):
        assert before == after
        assert scale == 32768.0
        assert rate == pytest.approx(0.05 * 0.5), "the schedule advances all the same"


def overflow(world: World, strategy: str) -> Any:
    def loss(output: Any, target: Any) -> Any:
        total, count = zoo.squared_error(output, target)
        # on rank 1 the gradient overflows in fp16, but the loss does not
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
    """Return the sum of each tensor in a snapshot except the last."""
    return [float(tensor.double().sum()) for tensor in prepared.trainable.snapshot()["tensors"][:-1]]


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero1", "fsdp"])
def test_restored_snapshot_trains_identically(ranks: Any, strategy: str) -> None:
    """Two trainings from one snapshot have bitwise equal losses, so momentum and schedule are restored too."""
    for first, second in ranks(1 if strategy == "single" else 2, train_twice, strategy):
        assert first == second


def train_twice(world: World, strategy: str) -> Any:
    workload = zoo.workload("tied", "adamw")
    layout = parse_layout(strategy)
    train_data, _ = open_data(workload, world)
    prepared = prepare(workload, layout, world)
    # DDP rebuilds its buckets after the first update. On more than 2 ranks, this changes rounding.
    snapshot = prepared.trainable.snapshot()
    runs = []
    for _ in range(2):
        prepared.trainable.restore(snapshot)
        local_losses = run_updates(prepared, train_data, all_updates(5, 4))
        runs.append([local_loss.tolist() for local_loss in local_losses])
    return runs


def test_zero1_owners_are_balanced() -> None:
    """Each parameter has one owner, and all ranks own about the same number of elements."""
    sizes = [100, 1, 60, 40, 3, 99]
    owners = assign_owners([nn.Parameter(torch.zeros(size)) for size in sizes], 3)
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(3)]
    assert max(loads) <= 1.1 * sum(sizes) / 3
    assert assign_owners([], 3) == []


def test_tied_blocks_are_one_fsdp_unit() -> None:
    """Blocks that share a weight form one FSDP unit. A block tied to a module outside the blocks is no unit."""
    blocks = [nn.Linear(2, 2) for _ in range(5)]
    blocks[3].weight = blocks[1].weight
    model = nn.ModuleDict({"blocks": nn.ModuleList(blocks), "head": nn.Linear(2, 2)})
    blocks[4].weight = model["head"].weight
    units = fsdp_units(model, list(blocks))
    assert [[blocks.index(member) for member in unit] for unit in units] == [[0], [2], [1, 3]]


def test_a_module_of_a_block_and_of_the_model_is_in_no_unit_of_a_block() -> None:
    """The model runs it after the block has freed its parameters."""
    shared = nn.LayerNorm(2)
    blocks = [nn.Sequential(shared, nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))]
    model = nn.ModuleDict({"blocks": nn.ModuleList(blocks), "norm": shared})
    assert fsdp_units(model, list(blocks)) == [[blocks[1]]]


class TransposedModel(nn.Module):
    """A model whose parameters are not contiguous: a transposed one, and those of a convolution in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5).t())
        self.layers = nn.Sequential(nn.Conv2d(2, 2, (2, 2)).to(memory_format=torch.channels_last))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        image = (values @ self.weight).view(-1, 1, 2, 2).repeat(1, 2, 1, 1)
        return self.layers(image).flatten(1)


def parity_of_transposed_parameters(world: World) -> str:
    workload = zoo.workload("frozen", model=TransposedModel)
    case = parity_case(workload, *open_data(workload, world), steps=2)
    return check_layout(case, parse_layout("fsdp:precision=float64"), world, "transposed")[0].status


def test_fsdp_shards_parameters_that_are_not_contiguous(ranks: Any) -> None:
    assert ranks(2, parity_of_transposed_parameters) == ["equal", "equal"]


class EmptyModel(nn.Module):
    """A model with empty parameters, a parameter of integers and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 2))
        self.empty, self.no_features = nn.Parameter(torch.empty(0)), nn.Linear(5, 0)
        self.factors = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        zero = self.empty.sum() + self.no_features(values).sum()
        return self.layers(values) * self.factors + zero


def parity_of_empty_parameters(world: World) -> list[str]:
    workload = zoo.workload("frozen", model=EmptyModel, ema_decay=0.5)
    case = parity_case(workload, *open_data(workload, world), steps=2)
    layouts = [f"{text}precision=float64" for text in ("fsdp:", "ddp:compress=powersgd,")]
    return [check_layout(case, parse_layout(text), world, f"empty/{text}")[0].status for text in layouts]


def test_empty_parameters_and_integers_are_equal(ranks: Any) -> None:
    """They cannot be sharded, compressed or averaged."""
    assert ranks(2, parity_of_empty_parameters) == [["equal", "equal"]] * 2


class LayerwiseSGD(torch.optim.Optimizer):
    """SGD whose step is scaled by the norms of parameter and gradient (LARS), read as numbers of Python."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                norms = parameter.norm().item(), float(parameter.grad.norm())
                parameter.add_(parameter.grad, alpha=-0.1 * norms[0] / (norms[1] + 1e-3))


def layerwise_parities(world: World) -> list[str]:
    plan = {"0": "colwise", "2": "rowwise"}
    workload = zoo.workload(
        "frozen",
        model=lambda: nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False)),
        blocks=None,
        clip_norm=None,
        tensor_plan=plan,
    )
    workload = dataclasses.replace(workload, optimizer=lambda model: LayerwiseSGD(model.parameters()))
    case = parity_case(workload, *open_data(workload, world), steps=3)
    layouts = [f"{strategy}:precision=float64" for strategy in ("fsdp", "tensor")]
    return [check_layout(case, parse_layout(text), world, f"layerwise/{text}")[0].status for text in layouts]


def test_optimizer_reads_norms_of_whole_parameters(ranks: Any) -> None:
    """torch returns the norm of this rank's part as a number."""
    assert ranks(2, layerwise_parities) == [["equal", "equal"]] * 2


def test_a_tensor_plan_may_use_any_name_of_a_module() -> None:
    """A module that the model has twice is returned under its first name."""
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"encoder": nn.Sequential(shared), "decoder": nn.Sequential(shared)})
    assert resolve(model, {"decoder.*": "colwise"}) == {"encoder.0": "colwise"}


def test_fsdp_with_weights_tied_across_blocks_is_equal(ranks: Any) -> None:
    """everyrank trains this layout correctly. FSDP of older torch trained it wrong, and torch 2.13 refuses it."""
    assert ranks(2, tied_across_blocks) == [True, True]


class TiedBlocks(nn.Module):
    """A model with three blocks, of which two share a weight."""

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
    case = parity_case(workload, *open_data(workload, world), steps=6)
    parity, _ = check_layout(case, parse_layout("fsdp"), world, "test/tied-blocks")
    return parity.status == "equal"


def test_wrong_blocks_path_suggests_existing_lists(ranks: Any) -> None:
    """The error lists the module lists of the model."""
    [text] = ranks(1, error_for_wrong_blocks)
    assert text.startswith("blocks='layer': ")
    assert text.endswith(" layers")


def error_for_wrong_blocks(world: World) -> str:
    try:
        prepare(zoo.workload("frozen", blocks="layer"), parse_layout("fsdp"), world)
    except WorkloadError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("layout", ["fsdp", "pipeline", "single:recompute", "ddp:compile"])
def test_blocks_that_the_model_does_not_call_are_refused(layout: str) -> None:
    """Recomputation and compilation had no effect on lists of layers, fsdp and pipeline failed."""
    lists = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)])])
    workload = zoo.workload("frozen", blocks="layers")
    with pytest.raises(UnsupportedLayoutError, match=r"blocks='layers' contains a ModuleList, which has no forward"):
        find_called_blocks(workload, parse_layout(layout), nn.ModuleDict({"layers": lists}))
    assert find_blocks(workload, nn.ModuleDict({"layers": lists})) == list(lists)


def test_wrong_blocks_path_in_a_sequential_model() -> None:
    """The model itself is a list of modules, but has no path."""
    nested = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    for model, ending in ((nested, "no such module; it has 0"), (nn.Sequential(nn.Linear(2, 2)), "no such module")):
        with pytest.raises(WorkloadError) as error_info:
            find_blocks(zoo.workload("frozen", blocks="layer"), model)
        assert str(error_info.value).endswith(ending)


class _Positional(nn.Module):
    def forward(self, x: Any, y: Any = None) -> Any:
        return x, y


class _WithKeywords(nn.Module):
    def forward(self, x: Any, *, scale: float = 1.0, **kwargs: Any) -> Any:
        return x, {"scale": scale} | kwargs


class _AnyNumber(nn.Module):
    def forward(self, *args: Any) -> Any:
        return args


@pytest.mark.parametrize(
    ("model", "value", "expected"),
    [
        (_Positional(), 1, (1, None)),
        (_Positional(), (1, 2), (1, 2)),
        (_Positional(), [1, 2], (1, 2)),
        (_Positional(), (1, 2, 3), ((1, 2, 3), None)),
        (_Positional(), {"x": 1, "y": 2}, (1, 2)),
        (_Positional(), UserDict({"x": 1, "y": 2}), (1, 2)),
        (_Positional(), {"x": 1, "z": 2}, ({"x": 1, "z": 2}, None)),
        (_WithKeywords(), (1, 2), ((1, 2), {"scale": 1.0})),
        (_WithKeywords(), {"x": 1, "z": 2}, (1, {"scale": 1.0, "z": 2})),
        (_AnyNumber(), (1, 2, 3), (1, 2, 3)),
    ],
)
def test_input_is_passed_as_forward_takes_it(model: nn.Module, value: Any, expected: Any) -> None:
    """A tuple is split only if `forward` has a positional parameter for each item; `**kwargs` does not count."""
    assert call_model(model, value) == expected


def test_full_state_is_on_rank_0_only(ranks: Any) -> None:
    """Rank 0 has all parameters and buffers, equal for every layout. Other ranks have none."""
    states_by_rank = ranks(2, states)
    assert [list(state) for state in states_by_rank[1]] == [[], [], []]
    for state in states_by_rank[0]:
        assert list(state) == list(states_by_rank[0][0])
        for name, tensor in state.items():
            assert torch.equal(tensor, states_by_rank[0][0][name])


def states(world: World) -> Any:
    workload = zoo.workload("norm")
    return [prepare(workload, parse_layout(text), world).full_state() for text in ("ddp", "zero1", "fsdp")]


def test_pipeline_reports_the_current_phase(ranks: Any) -> None:
    """Interleaved forward and backward passes are each reported as their phase, for the profile of a step."""
    for forward, backward in ranks(2, phases_of_blocks, "pipeline:microbatches=4"):
        assert set(forward) == {"forward"}
        assert set(backward) == {"backward"}
        assert len(forward) == len(backward) == 4


def phases_of_blocks(world: World, layout: str) -> tuple[list[str], list[str]]:
    """Return the reported phase of each forward pass and of each backward pass of this rank in one update."""
    workload = zoo.workload("decoder", global_batch=8, train_data=lambda: zoo.SentencesWithPositions(16))
    data, _ = open_data(workload, world)
    prepared = prepare(workload, parse_layout(layout), world)
    updates = run_updates(prepared, data, all_updates(2, 2))
    next(updates)
    phase = [""]
    forwards: list[str] = []
    backwards: list[str] = []
    original_run = PipelineRun.run

    def observed_run(pipeline: PipelineRun, batches: Any, forward: Any, backward: Any) -> None:
        def recorded_forward(*arguments: Any) -> Any:
            forwards.append(phase[0])
            return forward(*arguments)

        def recorded_backward(*arguments: Any) -> Any:
            backwards.append(phase[0])
            return backward(*arguments)

        original_run(pipeline, batches, recorded_forward, recorded_backward)

    prepared.trainable.phase_observers.append(lambda entered: phase.__setitem__(0, entered))
    with mock.patch.object(PipelineRun, "run", observed_run):
        next(updates)
    return forwards, backwards


class ScaledModel(nn.Module):
    """A model that returns an expanded view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)), nn.Parameter(torch.ones(2))

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layers(values), self.scale.expand(len(values), 2)


def parity_of_scaled_model(world: World, layout: str) -> list[str]:
    def loss(output: Any, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        return ((output[0] - target) * output[1]).square().sum(), target.numel()

    workload = zoo.workload("frozen", model=ScaledModel, loss=loss, metrics={}, blocks="layers")
    case = parity_case(workload, *open_data(workload, world), 2, is_quick=True)
    parity, _ = check_layout(case, parse_layout(layout), world, f"views/{layout}")
    return [parity.status]


def test_model_may_return_a_view_of_a_parameter(ranks: Any) -> None:
    """FSDP frees the gathered parameter after an evaluation. The view of it must keep its values."""
    assert ranks(2, parity_of_scaled_model, "fsdp") == [["equal"], ["equal"]]


class ScaledFeedForward(nn.Module):
    """A feed-forward layer with a scale of its own on the hidden features, which tensor parallelism splits."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(values)) * self.scale)


def parity_with_replicate_sum_around_split_layers(world: World) -> list[str]:
    plan = {"0": "replicate_sum", "0.up": "colwise", "0.down": "rowwise"}
    workload = zoo.workload("frozen", model=lambda: nn.Sequential(ScaledFeedForward()), blocks=None, tensor_plan=plan)
    case = parity_case(workload, *open_data(workload, world), steps=2)
    return [check_layout(case, parse_layout("tensor:precision=float64"), world, "replicate_sum")[0].status]


def test_replicate_sum_leaves_layers_with_a_word_of_their_own(ranks: Any) -> None:
    """The gradients of the split layers inside are not summed over the ranks, only that of the scale."""
    assert ranks(2, parity_with_replicate_sum_around_split_layers) == [["equal"], ["equal"]]
