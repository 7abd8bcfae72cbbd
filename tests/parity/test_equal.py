"""Every exact strategy equals one device: all the traits of section 5 of the design, on 2, 3 and 4 ranks."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zoo
from everyrank import parse_layout
from everyrank.loop import open_data
from everyrank.parallel import ddp
from everyrank.parallel.ddp import check_unused_parameters
from everyrank.parity import check_layout, parity_case
from everyrank.record import Parity
from everyrank.world import World
from everyrank.world.barrier import do_all_ranks_agree

_COUNTER = iter(range(10**9))


def check_all(world: World, key: str, name: str, optimizer: str, layouts: list[str], changes: dict[str, Any]) -> Any:
    """Parity of each layout, in the ranks."""
    subject = zoo.case(world, name, optimizer, **changes)
    return [check_layout(subject, parse_layout(text), world, f"{key}/{text}")[0] for text in layouts]


def parities(ranks: Any, count: int, name: str, optimizer: str, layouts: list[str], **changes: Any) -> list[Parity]:
    """Parity of each layout; on more than two ranks in float64 only, unless the layout names its precision."""
    layouts = layouts if count <= 2 else in_float64(layouts)
    key = f"test/{next(_COUNTER)}"
    results = ranks(count, check_all, key, name, optimizer, layouts, changes)
    assert all([p.status for p in result] == [p.status for p in results[0]] for result in results)
    return results[0]


def assert_equal(layouts: list[str], found: list[Parity]) -> None:
    assert {text: parity.status for text, parity in zip(layouts, found, strict=True)} == dict.fromkeys(
        layouts, "equal"
    ), [
        (text, parity.first_divergence, parity.cause, parity.max_relative_difference)
        for text, parity in zip(layouts, found, strict=True)
        if parity.status != "equal"
    ]
    for parity in found:
        assert parity.max_relative_difference is not None
        assert parity.max_relative_difference <= 1e-10


def in_float64(layouts: list[str]) -> list[str]:
    """The layouts without a comparison in float32, which needs five runs of `single` more; a named precision stays."""
    return [
        text if "precision=" in text else f"{text}{',' if ':' in text else ':'}precision=float64" for text in layouts
    ]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", ["tied", "frozen", "norm", "augmented"])
def test_equal(ranks: Any, count: int, name: str, optimizer: str) -> None:
    """Ragged batches over two epochs, batches smaller than the world, masks, ties, frozen parameters, buffers, dicts.

    Tolerance: 1e-10 relative for each loss; the spike and these runs see 5e-16.
    """
    layouts = ["ddp", "zero1", "fsdp"]
    assert_equal(layouts, parities(ranks, count, name, optimizer, layouts))


def test_equal_in_float32_on_four_ranks(ranks: Any) -> None:
    """The others compare float32 on two ranks."""
    layouts = [f"{strategy}:precision=float32" for strategy in ("ddp", "zero1", "fsdp")]
    assert_equal(layouts, parities(ranks, 4, "tied", "adamw", layouts))


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", ["tied", "frozen", "norm"])
def test_equal_with_micro_batches(ranks: Any, count: int, name: str) -> None:
    """Ragged micro-batches, some of them smaller than the world, a last batch with fewer samples than those.

    Batch norm is compared with `single` at the same accumulate: its statistics are those of a micro-batch.
    """
    changes: dict[str, Any] = {
        "tied": {},
        "frozen": {"model": zoo.uncounted_model},
        "norm": {"global_batch": 12},  # micro-batches of one sample have no variance
    }[name]
    layouts = [f"{strategy}:accumulate=3" for strategy in ("ddp", "zero1", "fsdp")]
    assert_equal(layouts, parities(ranks, count, name, "sgd", layouts, **changes))


@pytest.mark.parametrize("name", ["tied", "norm"])
def test_equal_when_recomputing(ranks: Any, name: str) -> None:
    """Running statistics must not see a batch twice because its forward ran twice."""
    layouts = ["single:recompute", "ddp:recompute", "fsdp:recompute", "zero1:accumulate=2,recompute"]
    changes = {"global_batch": 8} if name == "norm" else {}
    assert_equal(layouts, parities(ranks, 2, name, "sgd", layouts, **changes))


@pytest.mark.parametrize("name", ["tied", "frozen", "norm"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_stays_in_the_band(ranks: Any, name: str, precision: str) -> None:
    """The float64 replay is exact, and the run itself is within the band of perturbed runs of single."""
    layouts = [f"{strategy}:precision={precision}" for strategy in ("ddp", "zero1", "fsdp")]
    assert_equal(layouts, parities(ranks, 2, name, "sgd", layouts))


def test_options_change_no_number(ranks: Any) -> None:
    """Buckets, static graphs, looking for unused parameters, keeping gathered blocks: only where and when."""
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


def test_unused_parameters(ranks: Any) -> None:
    """A parameter that takes no part in the loss is not decayed or moved, nor leaves others unreduced."""
    layouts = ["ddp:find_unused=true", "zero1:find_unused=true", "fsdp"]
    for optimizer in ("sgd", "adamw"):
        assert_equal(layouts, parities(ranks, 2, "unused", optimizer, layouts))


def test_unused_parameters_are_named(ranks: Any) -> None:
    """DDP itself leaves other gradients of the bucket unreduced. The layouts after it are still compared."""
    ddp, fsdp = parities(ranks, 2, "unused", "sgd", ["ddp", "fsdp"])
    assert (ddp.status, fsdp.status) == ("refused", "equal")
    assert ddp.reason is not None
    assert all(word in ddp.reason for word in ("layout ddp:", "unused.weight", "ddp:find_unused=true"))


def test_parameters_unused_on_one_rank(ranks: Any) -> None:
    """Ranks that go on would wait for each other's gradients, so the run ends."""
    with pytest.raises(AssertionError, match=r"errors\.WorkloadError: .*took no part .*find_unused=true"):
        ranks(2, losses_of_ranks_that_disagree)


def losses_of_ranks_that_disagree(world: World) -> None:
    """Rank 1 has a parameter without a gradient; rank 0 never comes to say so, too."""
    agree = functools.partial(do_all_ranks_agree, seconds=0.5)
    if world.rank == 1:
        with mock.patch.object(ddp, "do_all_ranks_agree", agree):
            check_unused_parameters({"head.weight": nn.Parameter(torch.zeros(1))}, parse_layout("ddp"), world)


def test_sparse_gradients(ranks: Any) -> None:
    """Embeddings with sparse gradients train where no gradient is reduced, and are named elsewhere."""
    layouts = ["single", "local_sgd", "ddp", "fsdp"]
    parity = dict(zip(layouts, parities(ranks, 2, "sparse", "sgd", layouts), strict=True))
    assert [parity[text].status for text in layouts] == ["equal", "equal", "refused", "refused"]
    assert "sparse=False" in str(parity["ddp"].reason)


@pytest.mark.parametrize("name", ["tied", "norm"])
def test_one_rank(ranks: Any, name: str) -> None:
    """A world of one has the same interface."""
    layouts = ["single", "ddp", "zero1", "fsdp", "fsdp:precision=bf16"]
    assert_equal(layouts, parities(ranks, 1, name, "adamw", layouts))


def test_compiled(ranks: Any) -> None:
    """torch.compile changes no mathematics, also around blocks that are sharded or synchronise their batch norm."""
    assert_equal(["ddp:compile"], parities(ranks, 2, "norm", "sgd", ["ddp:compile"], steps=2, epochs=None))


def test_loader_workers_change_no_sample(ranks: Any) -> None:
    """Augmentation is a function of (seed, epoch, sample), whatever process reads the sample."""
    found = ranks(2, losses_with_workers, 0), ranks(2, losses_with_workers, 2)
    assert found[0] == found[1]
    assert len(set(found[0][0])) == len(found[0][0])


def losses_with_workers(world: World, workers: int) -> list[float]:
    import dataclasses

    from everyrank.parity import trace

    world = dataclasses.replace(world, loader_workers=workers)
    workload = zoo.workload("augmented")
    subject = parity_case(workload, *open_data(workload, world), steps=8)
    return trace(subject, parse_layout("ddp"), world, subject.planned("float64")).losses
