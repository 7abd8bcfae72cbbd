"""Losses over the whole batch are equal to one device with `everyrank.gather`, and different without it."""

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


def check_all(world: World, key: str, layouts: list[str], changes: dict[str, Any], mutation: str = "") -> list[Parity]:
    """Return the parity of each layout. Layouts that do not support the workload are not verified."""
    case = zoo.cached_parity_case(world, "contrastive", "adamw", steps=8, **changes)
    if mutation:
        for text in layouts:
            ensure_references(case, parse_layout(text), world, f"{key}/{text}/single")  # they run unpatched
    with MUTATIONS[mutation]():
        return [check_layout(case, parse_layout(text), world, f"{key}/{text}", explicit=False)[0] for text in layouts]


def parities(ranks: Any, count: int, layouts: list[str], mutation: str = "", **changes: Any) -> list[Parity]:
    """Return the parity of each layout on rank 0."""
    layouts = layouts if count <= 2 else in_float64(layouts)
    return ranks(count, check_all, f"contrastive/{next(_COUNTER)}", layouts, changes, mutation)[0]


def _patch_collectives(**functions: Any) -> Any:
    """Replace collectives in batch_gather.py only. The strategies still use those of torch."""
    return mock.patch.object(batch_gather, "dist", SimpleNamespace(**{**vars(torch.distributed), **functions}))


def _gradients_not_summed() -> Any:
    """Backward keeps only the gradient of the loss on this rank."""
    return _patch_collectives(all_reduce=lambda tensor, group: None)


def _rows_in_reverse_order() -> Any:
    """The rows of the ranks are in reverse order."""
    gather = torch.distributed.all_gather
    return _patch_collectives(
        all_gather=lambda outputs, local_rows, group: gather(outputs[::-1], local_rows, group=group)
    )


def _empty_rank_has_a_row() -> Any:
    """Every rank has at least one row, also a rank without samples."""
    original = batch_gather._sizes
    return mock.patch.object(
        batch_gather, "_sizes", lambda total, count: tuple(max(1, n) for n in original(total, count))
    )


MUTATIONS: dict[str, Any] = {
    "": contextlib.nullcontext,
    "not summed": _gradients_not_summed,
    "not in order": _rows_in_reverse_order,
    "borrowed counts": _empty_rank_has_a_row,
}


@pytest.mark.parametrize("count", [2, 3])
def test_equal(ranks: Any, count: int) -> None:
    """23 samples are in batches of 7, so slices are uneven. In the last batch of 2, the third rank has no sample."""
    for parity in parities(ranks, count, ["single", "ddp", "zero1", "fsdp"]):
        assert parity.status == "equal", parity
        assert parity.max_relative_difference is not None
        assert parity.max_relative_difference <= 1e-10


def test_equal_on_meshes(ranks: Any) -> None:
    """Tensor ranks have the same samples. The batch is gathered only over the other axes of the mesh."""
    layouts = ["tensor", "fsdp:replicate=2", "fsdp:tensor=2", "fsdp:precision=bf16"]
    for layout, parity in zip(layouts, parities(ranks, 4, layouts), strict=True):
        assert parity.status == "equal", (layout, parity)


@pytest.mark.parametrize(("mutation", "count"), [("not summed", 2), ("not in order", 3), ("borrowed counts", 3)])
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_mutation_of_gather_is_detected(ranks: Any, mutation: str, count: int, layout: str) -> None:
    assert parities(ranks, count, [layout], mutation)[0].status == "different"


def test_loss_without_gather_is_different(ranks: Any) -> None:
    assert parities(ranks, 2, ["ddp"], loss=zoo.local_contrastive_loss, metrics={})[0].status == "different"


def test_gather_is_refused_where_the_loss_sees_a_part_of_the_batch(ranks: Any) -> None:
    """All ranks refuse, so the next layout can run. A pipeline computes the loss only on its last stage."""
    layouts = ["ddp:accumulate=2", "pipeline", "single:accumulate=2", "ddp"]
    results = parities(ranks, 2, layouts)
    assert [parity.status for parity in results] == [*["not_verified"] * 3, "equal"]
    assert results[0].reason is not None
    assert "gather: a loss over the whole batch" in results[0].reason
    assert results[1].reason is not None
    assert "with accumulate=1" in results[1].reason


def test_gather_is_refused_with_context_or_shard_order_or_wrong_rows(ranks: Any) -> None:
    assert ranks(2, refusal_texts)[0] == [
        "under context a rank has parts",
        "order='shard' gives each rank",
        "one row for",
    ]


def refusal_texts(world: World) -> list[str]:
    """Return the expected text of each refusal, in order."""
    batch = Batch(None, None, 2, 2 * world.rank, 4)
    matches: list[str] = []
    for layout, order, size, error_type in (
        ("context", "global", 2, UnsupportedLayoutError),
        ("ddp", "shard", 2, UnsupportedLayoutError),
        ("ddp", "global", 3, WorkloadError),
    ):
        with loss_scope(batch, open_mesh(Layout(layout), world), order), pytest.raises(error_type) as caught:
            everyrank.gather(torch.zeros(size, 3))
        texts = ("under context a rank has parts", "order='shard' gives each rank", "one row for")
        matches += [text for text in texts if text in str(caught.value)]
    return matches


def test_gather_of_each_dtype(ranks: Any) -> None:
    """Labels, masks, low precision and complex numbers can be gathered, also if a rank has no row.

    Outside of a loss, `gather` returns its argument.
    """
    local_rows = torch.arange(3)
    assert everyrank.gather(local_rows) is local_rows
    assert everyrank.first_row() == 0
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
    for start_row, gathered_rows in ranks(3, gather_each_dtype, dtypes):
        assert start_row in (0, 1)
        assert gathered_rows == [[[1, 0], [0, 1]]] * len(dtypes)


def gather_each_dtype(world: World, dtypes: list[torch.dtype]) -> tuple[int, list[Any]]:
    """Return (index of the first row, gathered rows of each dtype). The three ranks have two samples."""
    local_rows = torch.tensor([[[1, 0]], [[0, 1]], [[1, 1]]])[world.rank]
    gathered_rows: list[Any] = []
    with loss_scope(Batch(None, None, int(world.rank < 2), world.rank, 2), open_mesh(Layout("ddp"), world)):
        for dtype in dtypes:
            local_rows = local_rows.to(dtype)
            if dtype.is_floating_point or dtype.is_complex:
                local_rows.requires_grad_()
            rows = everyrank.gather(local_rows)
            assert rows.dtype is dtype
            if dtype.is_floating_point:
                (rows * (world.rank + 1)).sum().backward()
                assert local_rows.grad is not None
                assert local_rows.grad.tolist() == [[6.0, 6.0] if world.rank < 2 else [0.0, 0.0]]
                local_rows = local_rows.detach()
            if dtype.is_complex:
                rows.imag.sum().backward()
                assert local_rows.grad is not None
                assert local_rows.grad.tolist() == [[3j, 3j] if world.rank < 2 else [0j, 0j]]
                local_rows, rows = local_rows.detach().real, rows.detach().real
            gathered_rows.append(rows.to(torch.int64).tolist())
        return everyrank.first_row(), gathered_rows
