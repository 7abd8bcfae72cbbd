"""Losses over the whole batch: with `everyrank.gather` equal to one device, without it another training."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import everyrank
import zoo
from everyrank import Layout, parse_layout
from everyrank.data import Batch
from everyrank.errors import UnsupportedLayoutError, WorkloadError
from everyrank.parallel import batch_gather
from everyrank.parallel.batch_gather import loss_scope
from everyrank.parallel.mesh import open_mesh
from everyrank.parity import check_layout
from everyrank.parity.reference import ensure_references
from everyrank.record import Parity
from everyrank.world import World
from parity.test_equal import in_float64

pytestmark = pytest.mark.integration

_COUNTER = iter(range(10**9))


def check_all(world: World, key: str, layouts: list[str], changes: dict[str, Any], broken: str = "") -> list[Parity]:
    """Parity of each layout, in the ranks; those that the workload cannot have are not verified."""
    subject = zoo.case(world, "contrastive", "adamw", steps=8, **changes)
    if broken:
        for text in layouts:
            ensure_references(subject, parse_layout(text), world, f"{key}/{text}/single")  # before anything is patched
    with MUTATIONS[broken]():
        return [
            check_layout(subject, parse_layout(text), world, f"{key}/{text}", explicit=False)[0] for text in layouts
        ]


def parities(ranks: Any, count: int, layouts: list[str], broken: str = "", **changes: Any) -> list[Parity]:
    layouts = layouts if count <= 2 else in_float64(layouts)
    return ranks(count, check_all, f"contrastive/{next(_COUNTER)}", layouts, changes, broken)[0]


def _with(**functions: Any) -> Any:
    """Other collectives in rows.py alone: the strategies go on with torch's."""
    return mock.patch.object(batch_gather, "dist", SimpleNamespace(**{**vars(torch.distributed), **functions}))


def _not_summed() -> Any:
    """Backward keeps what this rank's own loss says of its rows."""
    return _with(all_reduce=lambda tensor, group: None)


def _not_in_order() -> Any:
    """The rows of the ranks the wrong way round."""
    gather = torch.distributed.all_gather
    return _with(all_gather=lambda found, own, group: gather(found[::-1], own, group=group))


def _borrowed_counts() -> Any:
    """Every rank has a row, one without samples too."""
    original = batch_gather._sizes
    return mock.patch.object(
        batch_gather, "_sizes", lambda total, count: tuple(max(1, n) for n in original(total, count))
    )


MUTATIONS: dict[str, Any] = {
    "": contextlib.nullcontext,
    "not summed": _not_summed,
    "not in order": _not_in_order,
    "borrowed counts": _borrowed_counts,
}


@pytest.mark.parametrize("count", [2, 3])
def test_equal(ranks: Any, count: int) -> None:
    """23 samples in batches of 7: ragged slices, and a last batch of 2, of which the third rank has none."""
    for parity in parities(ranks, count, ["single", "ddp", "zero1", "fsdp"]):
        assert parity.status == "equal", parity
        assert parity.max_relative_difference is not None
        assert parity.max_relative_difference <= 1e-10


def test_equal_on_meshes(ranks: Any) -> None:
    """Ranks that split a matrix have the same samples: the rows of the batch are those along the other axes."""
    layouts = ["tensor", "fsdp:replicate=2", "fsdp:tensor=2", "fsdp:precision=bf16"]
    for layout, parity in zip(layouts, parities(ranks, 4, layouts), strict=True):
        assert parity.status == "equal", (layout, parity)


@pytest.mark.parametrize(("broken", "count"), [("not summed", 2), ("not in order", 3), ("borrowed counts", 3)])
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_mutations(ranks: Any, broken: str, count: int, layout: str) -> None:
    assert parities(ranks, count, [layout], broken)[0].status == "different"


def test_without_it_another_training(ranks: Any) -> None:
    assert parities(ranks, 2, ["ddp"], loss=zoo.contrastive_in_parts, metrics={})[0].status == "different"


def test_refused_where_the_loss_sees_less_than_a_batch(ranks: Any) -> None:
    """On all ranks alike, so that the rest of a call runs: a pipeline takes the loss on its last stage alone."""
    layouts = ["ddp:accumulate=2", "pipeline", "single:accumulate=2", "ddp"]
    found = parities(ranks, 2, layouts)
    assert [parity.status for parity in found] == [*["not_verified"] * 3, "equal"]
    assert found[0].reason is not None
    assert "gather: a loss over the whole batch" in found[0].reason
    assert found[1].reason is not None
    assert "with accumulate=1" in found[1].reason


def test_refused_under_context_and_in_shard_order(ranks: Any) -> None:
    assert ranks(2, refusals)[0] == ["under context a rank has parts", "order='shard' gives each rank", "one row for"]


def refusals(world: World) -> list[str]:
    batch = Batch(None, None, 2, 2 * world.rank, 4)
    found: list[str] = []
    for layout, order, size, kind in (
        ("context", "global", 2, UnsupportedLayoutError),
        ("ddp", "shard", 2, UnsupportedLayoutError),
        ("ddp", "global", 3, WorkloadError),
    ):
        with loss_scope(batch, open_mesh(Layout(layout), world), order), pytest.raises(kind) as caught:
            everyrank.gather(torch.zeros(size, 3))
        texts = ("under context a rank has parts", "order='shard' gives each rank", "one row for")
        found += [text for text in texts if text in str(caught.value)]
    return found


def test_rows_of_any_kind(ranks: Any) -> None:
    """Labels and masks, low precision, and none at all on a rank; where nobody takes a loss it is the identity."""
    own = torch.arange(3)
    assert everyrank.gather(own) is own
    assert everyrank.first_row() == 0
    kinds = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool]
    for first, found in ranks(3, gathered, kinds):
        assert first in (0, 1)
        assert found == [[[1, 0], [0, 1]]] * len(kinds)


def gathered(world: World, kinds: list[torch.dtype]) -> tuple[int, list[Any]]:
    """Two samples on three ranks."""
    own = torch.tensor([[[1, 0]], [[0, 1]], [[1, 1]]])[world.rank]
    found: list[Any] = []
    with loss_scope(Batch(None, None, int(world.rank < 2), world.rank, 2), open_mesh(Layout("ddp"), world)):
        for kind in kinds:
            own = own.to(kind)
            if kind.is_floating_point:
                own.requires_grad_()
            rows_ = everyrank.gather(own)
            assert rows_.dtype is kind
            if kind.is_floating_point:
                (rows_ * (world.rank + 1)).sum().backward()
                assert own.grad is not None
                assert own.grad.tolist() == [[6.0, 6.0] if world.rank < 2 else [0.0, 0.0]]
                own = own.detach()
            found.append(rows_.to(torch.int64).tolist())
        return everyrank.first_row(), found
