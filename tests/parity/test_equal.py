"""Every equivalent strategy is equal to one device on 2, 3 and 4 ranks, with different workloads of the zoo."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zoo
from everyrank import parse_layout
from everyrank.data import all_updates
from everyrank.errors import UnsupportedLayoutError, WorkloadError
from everyrank.loop import open_data, run_updates
from everyrank.parallel import ddp
from everyrank.parallel.ddp import check_unused_parameters
from everyrank.parity import check_layout, parity_case
from everyrank.record import Parity
from everyrank.strategies import prepare
from everyrank.world import World
from everyrank.world.barrier import do_all_ranks_agree

_COUNTER = iter(range(10**9))
# For layouts that torch compiles, in minutes on busy cores: two updates of one size, because each size is compiled.
COMPILED: dict[str, Any] = {"steps": 2, "epochs": None, "global_batch": 4, "eval_data": None, "timeout": 400.0}


def check_all(world: World, key: str, name: str, optimizer: str, layouts: list[str], changes: dict[str, Any]) -> Any:
    """Return the parity of each layout. It runs in the ranks."""
    case = zoo.cached_parity_case(world, name, optimizer, **changes)
    return [check_layout(case, parse_layout(text), world, f"{key}/{text}")[0] for text in layouts]


def parities(
    ranks: Any, count: int, name: str, optimizer: str, layouts: list[str], timeout: float = 200.0, **changes: Any
) -> list[Parity]:
    """Return the parity of each layout.

    On more than two ranks, it is in float64 only, unless the layout names its precision.
    """
    layouts = layouts if count <= 2 else in_float64(layouts)
    key = f"test/{next(_COUNTER)}"
    all_parities = ranks(count, check_all, key, name, optimizer, layouts, changes, timeout=timeout)
    assert all(
        [parity.status for parity in rank_parities] == [parity.status for parity in all_parities[0]]
        for rank_parities in all_parities
    )
    return all_parities[0]


def assert_equal(layouts: list[str], results: list[Parity]) -> None:
    """Assert that each layout has the status equal, and that its losses differ by at most 1e-10."""
    assert {text: parity.status for text, parity in zip(layouts, results, strict=True)} == dict.fromkeys(
        layouts, "equal"
    ), [
        (text, parity.first_divergence, parity.cause, parity.max_relative_difference)
        for text, parity in zip(layouts, results, strict=True)
        if parity.status != "equal"
    ]
    for parity in results:
        assert parity.max_relative_difference is not None
        assert parity.max_relative_difference <= 1e-10


def in_float64(layouts: list[str]) -> list[str]:
    """Return the layouts with precision=float64, unless they name a precision.

    A comparison in float32 would need five more runs of `single`.
    """
    return [
        text if "precision=" in text else f"{text}{',' if ':' in text else ':'}precision=float64" for text in layouts
    ]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", ["tied", "frozen", "norm", "augmented"])
def test_equal(ranks: Any, count: int, name: str, optimizer: str) -> None:
    """Batches are uneven over two epochs, and some are smaller than the world.

    The workloads have masks, tied and frozen parameters, buffers and dicts.
    The tolerance is 1e-10 relative for each loss. Typical differences are 5e-16.
    """
    layouts = ["ddp", "zero1", "fsdp"]
    assert_equal(layouts, parities(ranks, count, name, optimizer, layouts))


def test_equal_in_float32_on_four_ranks(ranks: Any) -> None:
    """The other tests compare float32 only on two ranks."""
    layouts = [f"{strategy}:precision=float32" for strategy in ("ddp", "zero1", "fsdp")]
    assert_equal(layouts, parities(ranks, 4, "tied", "adamw", layouts))


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", ["tied", "frozen", "norm"])
def test_equal_with_micro_batches(ranks: Any, count: int, name: str) -> None:
    """Micro-batches are uneven, and some are smaller than the world.
    The last batch has fewer samples than there are micro-batches.

    Batch norm is compared with `single` with the same `accumulate`, because it uses the statistics of a micro-batch.
    """
    changes: dict[str, Any] = {
        "tied": {},
        "frozen": {"model": zoo.model_without_counter},
        "norm": {"global_batch": 12},  # micro-batches of one sample have no variance
    }[name]
    layouts = [f"{strategy}:accumulate=3" for strategy in ("ddp", "zero1", "fsdp")]
    assert_equal(layouts, parities(ranks, count, name, "sgd", layouts, **changes))


@pytest.mark.parametrize("name", ["tied", "norm"])
def test_equal_with_recomputation(ranks: Any, name: str) -> None:
    """Forward runs twice. The running statistics must be updated only once for each batch."""
    layouts = ["single:recompute", "ddp:recompute", "fsdp:recompute", "zero1:accumulate=2,recompute"]
    changes = {"global_batch": 8} if name == "norm" else {}
    assert_equal(layouts, parities(ranks, 2, name, "sgd", layouts, **changes))


@pytest.mark.parametrize("name", ["tied", "frozen", "norm"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_is_within_the_tolerance_band(ranks: Any, name: str, precision: str) -> None:
    """The float64 rerun is exact. The run itself is within the band of perturbed runs of `single`."""
    layouts = [f"{strategy}:precision={precision}" for strategy in ("ddp", "zero1", "fsdp")]
    assert_equal(layouts, parities(ranks, 2, name, "sgd", layouts))


def test_equal_with_other_options(ranks: Any) -> None:
    """Bucket sizes, static graphs, the search for unused parameters and resharding do not change results."""
    layouts = [
        "ddp:bucket_mb=0.0001",
        "ddp:static_graph=true",
        "ddp:find_unused=true",
        "zero1:bucket_mb=0.0001,static_graph=true",
        "fsdp:reshard_after_forward=false",
        "fsdp:shard=2",
        "ddp:replicate=2",
    ]
    assert_equal(layouts, parities(ranks, 2, "tied", "adamw", layouts))


def test_equal_with_unused_parameters(ranks: Any) -> None:
    """A parameter without a gradient is not decayed or moved. The other parameters are still reduced."""
    layouts = ["ddp:find_unused=true", "zero1:find_unused=true", "fsdp"]
    for optimizer in ("sgd", "adamw"):
        assert_equal(layouts, parities(ranks, 2, "unused", optimizer, layouts))


def test_ddp_names_unused_parameters(ranks: Any) -> None:
    """DDP itself would leave other gradients of the bucket unreduced. Layouts after ddp are still compared."""
    ddp, fsdp = parities(ranks, 2, "unused", "sgd", ["ddp", "fsdp"])
    assert (ddp.status, fsdp.status) == ("refused", "equal")
    assert ddp.reason is not None
    assert all(word in ddp.reason for word in ("layout ddp:", "unused.weight", "ddp:find_unused=true"))


def test_parameter_unused_on_one_rank_ends_the_run(ranks: Any) -> None:
    """If ranks continued, they would wait for each other's gradients. So the run ends."""
    with pytest.raises(AssertionError, match=r"errors\.WorkloadError: .*took no part .*find_unused=true"):
        ranks(2, check_unused_on_one_rank)


def check_unused_on_one_rank(world: World) -> None:
    """Rank 1 has a parameter without a gradient. Rank 0 never joins the check."""
    agree_with_short_timeout = functools.partial(do_all_ranks_agree, seconds=0.5)
    if world.rank == 1:
        with mock.patch.object(ddp, "do_all_ranks_agree", agree_with_short_timeout):
            check_unused_parameters({"head.weight": nn.Parameter(torch.zeros(1))}, parse_layout("ddp"), world)


class LayerOfSomeMicroBatches(zoo.FrozenModel):
    """A FrozenModel with a layer that only the first micro-batch of each update uses."""

    def __init__(self) -> None:
        super().__init__(counts_calls=False)
        self.extra, self.num_calls = nn.Linear(5, 2), 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        output = super().forward(values)
        return output + self.extra(values) if self.num_calls % 2 else output


def error_of_unfinished_reduction(world: World, layout: str) -> str:
    workload = zoo.workload("frozen", model=LayerOfSomeMicroBatches, blocks=None)
    try:
        next(iter(run_updates(prepare(workload, parse_layout(layout), world), zoo.Points(23), all_updates(1, 1))))
    except WorkloadError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_parameter_of_an_earlier_micro_batch_is_refused(ranks: Any, strategy: str) -> None:
    """DDP would not average the gradients of the first update, and fail in the second."""
    for text in ranks(2, error_of_unfinished_reduction, f"{strategy}:accumulate=2"):
        assert "not in the last" in text
        assert f"{strategy}:find_unused=true" in text
    layout = f"{strategy}:accumulate=2,find_unused=true"
    assert ranks(2, error_of_unfinished_reduction, layout) == ["no error"] * 2


class ExpertOfEachRank(nn.Module):
    """A block with two experts of equal size. Each rank uses one of them, or all ranks both in turn."""

    def __init__(self, is_by_rank: bool) -> None:
        super().__init__()
        self.experts, self.is_by_rank, self.num_calls = nn.ModuleList(nn.Linear(5, 5) for _ in range(2)), is_by_rank, 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        expert = self.experts[dist.get_rank() % 2 if self.is_by_rank else self.num_calls % 2]
        return values + expert(values)


class ExpertsModel(nn.Module):
    def __init__(self, is_by_rank: bool) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(ExpertOfEachRank(is_by_rank) for _ in range(2)), nn.Linear(5, 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = layer(values)
        return self.head(values)


def error_of_experts(world: World, layout: str, is_by_rank: bool) -> str:
    """Make two updates, and return the error."""
    workload = zoo.workload("frozen", "adamw", model=functools.partial(ExpertsModel, is_by_rank), global_batch=8)
    try:
        list(run_updates(prepare(workload, parse_layout(layout), world), zoo.Points(23), all_updates(2, 2)))
    except UnsupportedLayoutError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("layout", "count", "expected_text"),
    [
        ("fsdp", 2, "has a gradient on rank"),
        ("pipeline:replicate=2", 4, "has a gradient on rank"),
        ("local_sgd", 2, "does not exist on rank"),
    ],
)
def test_gradients_of_different_parameters_are_not_added_up(
    ranks: Any, layout: str, count: int, expected_text: str
) -> None:
    """The collectives would have equal sizes. Parameters that no rank uses in an update are no error.

    `local_sgd` would average the state that the optimizer has for different parameters.
    """
    assert ranks(count, error_of_experts, layout, False) == ["no error"] * count
    for text in ranks(count, error_of_experts, layout, True):
        assert "experts" in text
        assert expected_text in text


class HasExtraState(zoo.FrozenModel):
    """A FrozenModel with a value in its state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 3}


def test_values_that_are_no_tensors_are_not_compared(ranks: Any) -> None:
    layouts = ["ddp", "zero1", "fsdp", "local_sgd"]
    results = parities(ranks, 2, "frozen", "sgd", layouts, model=HasExtraState)
    assert_equal(layouts, results)
    assert [parity.not_compared for parity in results] == [["_extra_state"]] * len(layouts)


def test_sparse_gradients_are_equal_or_refused(ranks: Any) -> None:
    """Layouts that do not reduce gradients train sparse embeddings. Other layouts refuse and name the fix."""
    layouts = ["single", "local_sgd", "ddp", "fsdp"]
    parity_by_layout = dict(zip(layouts, parities(ranks, 2, "sparse", "sgd", layouts), strict=True))
    assert [parity_by_layout[text].status for text in layouts] == ["equal", "equal", "refused", "refused"]
    assert "sparse=False" in str(parity_by_layout["ddp"].reason)


@pytest.mark.parametrize("name", ["tied", "norm"])
def test_equal_on_one_rank(ranks: Any, name: str) -> None:
    """A world of one rank has the same interface."""
    layouts = ["single", "ddp", "zero1", "fsdp", "fsdp:precision=bf16"]
    assert_equal(layouts, parities(ranks, 1, name, "adamw", layouts))


def test_equal_with_compile(ranks: Any) -> None:
    """torch.compile does not change results, also not around sharded blocks or synchronized batch norm."""
    assert_equal(["ddp:compile"], parities(ranks, 2, "norm", "sgd", ["ddp:compile"], steps=2, epochs=None))


class LayerOfSomeSamples(zoo.FrozenModel):
    """A FrozenModel with a layer that some batches do not use."""

    def __init__(self) -> None:
        super().__init__(counts_calls=False)
        self.extra = nn.Linear(5, 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        output, uses_extra = super().forward(values), values[:, :1] > 0.8
        return output + self.extra(values) * uses_extra if uses_extra.any() else output


def loss_of_some_samples(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return a constant if no sample counts, as losses with an early return do."""
    counts = target[:, 0] > -1.0
    if not counts.any():
        return torch.zeros(()), 0
    return (output - target)[counts].square().sum(), int(counts.sum())


def test_loss_may_be_a_constant_on_a_rank_without_terms(ranks: Any) -> None:
    """The whole batch has terms, so `single` never gets this constant."""
    layouts = ["ddp", "fsdp"]
    changes: dict[str, Any] = {"loss": loss_of_some_samples, "metrics": {}, "steps": 6}
    assert_equal(layouts, parities(ranks, 4, "frozen", "sgd", layouts, **changes))


def check_example_strategy(world: World, key: str) -> Parity:
    """Return the parity of the strategy in CONTRIBUTING.md, in the place of ddp."""
    from everyrank.parallel.full_state import replicated_state_dict
    from everyrank.parallel.gradients import average_replicated_grads, total_and_missing_grads
    from everyrank.strategies import ddp as ddp_strategy

    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    code = page.partition("## A new strategy")[2].partition("```python\n")[2].partition("```")[0]
    functions = (replicated_state_dict, average_replicated_grads, total_and_missing_grads)
    namespace = {**vars(ddp_strategy), **{function.__name__: function for function in functions}}
    exec(compile("from __future__ import annotations\n" + code, "CONTRIBUTING.md", "exec"), namespace)
    case = zoo.cached_parity_case(world, "frozen", "sgd", model=LayerOfSomeSamples)
    with mock.patch.object(ddp_strategy, "prepare", namespace["prepare"]):
        return check_layout(case, parse_layout("ddp:precision=float64"), world, key)[0]


def test_example_strategy_in_contributing_md_is_equal(ranks: Any) -> None:
    """Some ranks have no gradient for a parameter in some updates."""
    parity = ranks(2, check_example_strategy, f"test/{next(_COUNTER)}")[0]
    assert_equal(["example"], [parity])


def test_loader_workers_do_not_change_samples(ranks: Any) -> None:
    """Augmentation depends on (seed, epoch, sample). It does not depend on the process that reads the sample."""
    without_workers, with_workers = ranks(2, losses_with_workers, 0), ranks(2, losses_with_workers, 2)
    assert without_workers == with_workers
    assert len(set(without_workers[0])) == len(without_workers[0])


def losses_with_workers(world: World, num_workers: int) -> list[float]:
    """Return the losses of 8 updates of ddp with this number of loader workers."""
    import dataclasses

    from everyrank.parity import trace

    world = dataclasses.replace(world, loader_workers=num_workers)
    workload = zoo.workload("augmented")
    case = parity_case(workload, *open_data(workload, world), steps=8)
    return trace(case, parse_layout("ddp"), world, case.planned("float64")).losses
