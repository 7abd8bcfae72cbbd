"""The recipe on uneven streams. Its losses equal the library on one device.

The mistakes that its header describes change the losses.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from everyrank import Record
from processes import Cli
from recipes import test_recipes as recipes

pytestmark = pytest.mark.integration

WORKLOAD = """
from pathlib import Path
import torch
from everyrank.builtin import digits
import dataclasses

digits.DATA = Path(__file__).with_name("digits.csv.gz")
SIZE = {size}


class LocalStream:
    def __init__(self, data, start, stop):
        self.data, self.start, self.stop, self.epoch = data, start, stop, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        for index in torch.randperm(self.stop - self.start, generator=generator).tolist():
            yield self.data[self.start + index]


class Streams:
    def __init__(self, data):
        bounds = [len(data) * rank * (rank + 1) // (SIZE * (SIZE + 1)) for rank in range(SIZE + 1)]
        self.streams = [LocalStream(data, *bounds[rank:rank + 2]) for rank in range(SIZE)]


digits_workload = digits.workload(norm="group", epochs=2)
workload = dataclasses.replace(
    digits_workload, train_data=lambda: Streams(digits_workload.train_data()), order="shard", name="uneven"
)
"""


@pytest.fixture(scope="module")
def library_record(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Return the record of the same training by the library on one device."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "workload.py").write_text(WORKLOAD.format(size=2))
    recipes.write_digits(folder, recipes.NUM_ROWS)
    return recipes.train_workload(cli, folder, "single:precision=float64", size=1)


def test_losses_equal_one_device(cli: Cli, tmp_path: Path, library_record: Record) -> None:
    """Every loss is equal to 1e-12. An epoch has 8 updates, and only one rank has samples for the last four."""
    text = recipes.recipe_text("ddp_uneven")
    assert len(library_record.loss) == 16
    assert (
        recipes.difference_from_record(recipes.run_recipe(cli, tmp_path, "ddp_uneven", text), library_record) <= 1e-12
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "parameter.grad /= count",
            "parameter.grad /= BATCH / world_size",
        ),  # divides by a full batch, as with a DataLoader
        ("                    parameter.grad /= count", "                    parameter.grad /= len(labels)"),
        (
            'dist.broadcast(self.optimizer.state[parameter]["momentum_buffer"], self.source_rank)',
            "pass",
        ),  # replicas diverge in the second epoch
    ],
)
def test_mutation_differs(cli: Cli, tmp_path: Path, library_record: Record, before: str, after: str) -> None:
    text = recipes.recipe_text("ddp_uneven")
    assert text.count(before) == 1
    assert (
        recipes.difference_from_record(
            recipes.run_recipe(cli, tmp_path, "ddp_uneven", text.replace(before, after)), library_record
        )
        > 1e-9
    )


def test_divide_by_initial_world_size_does_not_change_the_losses(
    cli: Cli, tmp_path: Path, library_record: Record
) -> None:
    """Join divides by all ranks or by those that still have samples. The count in the recipe cancels it."""
    text = recipes.recipe_text("ddp_uneven").replace(
        "momentum_hook])", "momentum_hook], divide_by_initial_world_size=False)"
    )
    assert "divide_by_initial_world_size=False):" in text
    assert (
        recipes.difference_from_record(recipes.run_recipe(cli, tmp_path, "ddp_uneven", text), library_record) <= 1e-12
    )
