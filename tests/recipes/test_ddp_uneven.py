"""The recipe on uneven streams: the losses of the library on one device, and the mistakes that its header tells of."""

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
def library(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Record:
    folder = tmp_path_factory.mktemp("library")
    (folder / "workload.py").write_text(WORKLOAD.format(size=2))
    recipes.write_digits(folder, recipes.NUM_ROWS)
    return recipes.train_workload(cli, folder, "single:precision=float64", size=1)


def test_recipe_equals_one_device(cli: Cli, tmp_path: Path, library: Record) -> None:
    """Every loss to 1e-12: 8 updates an epoch, of which one rank alone makes the last four."""
    text = recipes.text_of("ddp_uneven")
    assert len(library.loss) == 16
    assert recipes.distance(recipes.printed(cli, tmp_path, "ddp_uneven", text), library) <= 1e-12


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("parameter.grad /= count", "parameter.grad /= BATCH / world_size"),  # by a full batch, as a loader would
        ("                    parameter.grad /= count", "                    parameter.grad /= len(labels)"),
        (
            'dist.broadcast(self.optimizer.state[parameter]["momentum_buffer"], self.source_rank)',
            "pass",
        ),  # replicas part in the second epoch
    ],
)
def test_mutation_differs(cli: Cli, tmp_path: Path, library: Record, before: str, after: str) -> None:
    text = recipes.text_of("ddp_uneven")
    assert text.count(before) == 1
    assert recipes.distance(recipes.printed(cli, tmp_path, "ddp_uneven", text.replace(before, after)), library) > 1e-9


def test_either_divisor_comes_to_the_same(cli: Cli, tmp_path: Path, library: Record) -> None:
    """By all ranks or by those that are left: it goes out again with the count."""
    text = recipes.text_of("ddp_uneven").replace(
        "momentum_hook])", "momentum_hook], divide_by_initial_world_size=False)"
    )
    assert "divide_by_initial_world_size=False):" in text
    assert recipes.distance(recipes.printed(cli, tmp_path, "ddp_uneven", text), library) <= 1e-12
