"""Lines of a source that decide about another line."""

from __future__ import annotations

from pathlib import Path

import pytest

from everyrank.audit.source_lines import argument_of, definitions_of, guards_of, returns_of

SOURCE = """\
import torch


def evaluate(model, data):
    total = 0.0
    for x in data:
        total += model(x)
    if not data:
        return None
    return total / len(data)


accum = 4
for i in range(8):
    last = (i + 1) % accum == 0
    loss = torch.ones(()) / accum
    loss.backward()
    if last:
        optimizer.step()

        def later():
            return optimizer
"""


@pytest.fixture
def place(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SOURCE)
    return f"{path}:"


def lines(places: tuple[str, ...]) -> list[int]:
    return [int(each.rpartition(":")[2]) for each in places]


def test_the_condition_of_a_line_and_its_names(place: str) -> None:
    assert lines(guards_of(f"{place}19")) == [18, 15]
    assert guards_of(f"{place}17") == ()


def test_what_a_line_uses(place: str) -> None:
    assert lines(definitions_of(f"{place}17")) == [16, 13]
    assert lines(definitions_of(f"{place}10")) == [7, 5, 6]


def test_what_a_function_returns(place: str) -> None:
    assert lines(returns_of(f"{place}7")) == [9, 10]
    assert returns_of(f"{place}19") == ()


def test_the_line_of_an_argument(tmp_path: Path) -> None:
    path = tmp_path / "loader.py"
    path.write_text("loader = DataLoader(\n    data,\n    num_workers=2,\n    persistent_workers=True,\n)\n")
    assert lines(argument_of(f"{path}:1", "persistent_workers")) == [4]
    assert argument_of(f"{path}:1", "sampler") == ()


@pytest.mark.parametrize("wrong", ["", "?", "/nowhere/train.py:3", "train.py"])
def test_a_line_that_cannot_be_read(wrong: str) -> None:
    assert guards_of(wrong) == definitions_of(wrong) == returns_of(wrong) == ()
