"""The recipe on uneven streams: losses of the library on one device, and mistakes that its header describes."""

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


class Own:
    def __init__(self, data, begin, end):
        self.data, self.begin, self.end, self.epoch = data, begin, end, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        for place in torch.randperm(self.end - self.begin, generator=generator).tolist():
            yield self.data[self.begin + place]


class Streams:
    def __init__(self, data):
        borders = [len(data) * place * (place + 1) // (SIZE * (SIZE + 1)) for place in range(SIZE + 1)]
        self.streams = [Own(data, *borders[place:place + 2]) for place in range(SIZE)]


whole = digits.workload(norm="group", epochs=2)
workload = dataclasses.replace(whole, train_data=lambda: Streams(whole.train_data()), order="shard", name="uneven")
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
    text = recipes.text_of("ddp_uneven")
    assert len(library_record.loss) == 16
    assert recipes.distance(recipes.printed(cli, tmp_path, "ddp_uneven", text), library_record) <= 1e-12


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "parameter.grad /= count",
            "parameter.grad /= BATCH / world_size",
        ),  # divided by a full batch, as with a DataLoader
        ("                    parameter.grad /= count", "                    parameter.grad /= len(labels)"),
        (
            'dist.broadcast(self.optimizer.state[parameter]["momentum_buffer"], self.source_rank)',
            "pass",
        ),  # replicas diverge in the second epoch
    ],
)
def test_mutation_differs(cli: Cli, tmp_path: Path, library_record: Record, before: str, after: str) -> None:
    text = recipes.text_of("ddp_uneven")
    assert text.count(before) == 1
    assert (
        recipes.distance(recipes.printed(cli, tmp_path, "ddp_uneven", text.replace(before, after)), library_record)
        > 1e-9
    )


def test_divide_by_initial_world_size_does_not_change_the_losses(
    cli: Cli, tmp_path: Path, library_record: Record
) -> None:
    """Join divides by all ranks or by those that still have samples. The count in the recipe cancels it."""
    text = recipes.text_of("ddp_uneven").replace(
        "momentum_hook])", "momentum_hook], divide_by_initial_world_size=False)"
    )
    assert "divide_by_initial_world_size=False):" in text
    assert recipes.distance(recipes.printed(cli, tmp_path, "ddp_uneven", text), library_record) <= 1e-12
