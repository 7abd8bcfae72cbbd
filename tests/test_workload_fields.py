"""What a workload can say about its batches, its samples and its schedule: alike under every layout, or refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import zoo
from everyrank import Layout, Workload
from everyrank.audit import audit
from everyrank.data import all_updates, samples_per_epoch
from everyrank.errors import WorkloadError
from everyrank.loop import open_data, planned_updates, run_updates
from everyrank.parallel.mesh import open_mesh
from everyrank.parity import subject_of, trace
from everyrank.strategies import prepare
from everyrank.world import World


def test_drop_last_leaves_out_a_ragged_batch(ranks: Any) -> None:
    """Whoever counts updates or samples counts alike: 23 samples in batches of 7 are three updates, and 21 samples."""
    workload = zoo.workload("frozen", drop_last=True)
    assert samples_per_epoch(workload, 23) == 21
    assert samples_per_epoch(zoo.workload("frozen"), 23) == 23
    assert planned_updates(workload, 23) == 6
    for read, problems, text in ranks(2, dropped):
        assert read == 21
        assert problems == []
        assert "each read once but 2 of a last batch (drop_last)" in text


def dropped(world: World) -> tuple[int, list[str], str]:
    workload = zoo.workload("frozen", drop_last=True)
    mesh = open_mesh(Layout("ddp"), world)
    subject = subject_of(workload, *open_data(workload, world), steps=20)
    counts = trace(subject, Layout("ddp"), world).counts
    return int(sum(counts[:3])), *audit(workload, zoo.Points(23), None, Layout("ddp"), mesh)


def test_drop_last_of_less_than_a_batch_is_refused(ranks: Any) -> None:
    with pytest.raises(
        AssertionError, match=r"drop_last=True: train_data has 5 samples, not one batch of 7; use a glo"
    ):
        ranks(2, refused, {"drop_last": True, "train_data": lambda: zoo.Points(5)})


def refused(world: World, changes: dict[str, Any]) -> None:
    open_data(zoo.workload("frozen", **changes), world)


def test_eval_batch_is_that_of_evaluation_alone(ranks: Any) -> None:
    """13 samples one by one: the same exact sums, and training goes on in batches of 7."""
    [(sizes, found)] = ranks(1, evaluations)
    assert sizes == [7, 6, *[1] * 13]
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def evaluations(world: World) -> tuple[list[int], list[Any]]:
    sizes: list[int] = []

    def counted(output: torch.Tensor, target: torch.Tensor) -> Any:
        sizes.append(len(target))
        return zoo.squared(output, target)

    found: list[Any] = []
    for eval_batch in (None, 1):
        workload = zoo.workload("frozen", eval_batch=eval_batch, steps=1, epochs=None, metrics={"own": counted})
        subject = subject_of(workload, *open_data(workload, world), steps=1)
        found.append(trace(subject, Layout("single", precision="float64"), world).evaluation["loss"])
    return sizes, found


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "single"])
def test_a_lone_sample_under_batch_norm_is_refused_before_the_first_update(ranks: Any, layout: str) -> None:
    """641 samples in batches of 64 ended after an epoch; here 22 in batches of 7. Nothing is refused with drop_last."""
    for text, done in ranks(2, lone, layout):
        assert text == (
            "update 0: batch norm over 1 value per channel: update 3 has 1 of 22 samples, so that one is left alone; "
            "set Workload.drop_last=True, or take another global_batch"
        )
        assert done == 3


def lone(world: World, layout: str) -> tuple[str, int]:
    workload = zoo.workload("norm", train_data=lambda: zoo.Points(22), epochs=1)
    with pytest.raises(WorkloadError) as caught:
        losses(workload, layout, world)
    return str(caught.value), len(losses(dataclasses.replace(workload, drop_last=True), layout, world))


def losses(workload: Workload, layout: str, world: World) -> list[torch.Tensor]:
    """What this rank's updates came to."""
    prepared = prepare(workload, Layout(layout), world)
    updates = all_updates(planned_updates(workload, 22), 4 - workload.drop_last)
    return list(run_updates(workload, zoo.Points(22), Layout(layout), world, prepared, updates))
