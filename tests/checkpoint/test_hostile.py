"""Nothing of a hostile checkpoint is run."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkpointing import DIGITS, step, sum_again, try_digits
from everyrank.checkpoint import export
from everyrank.errors import UsageError
from everyrank.runs import checkpoint_named
from processes import Cli, one_line


class Hostile:
    """A pickle that calls a function when it is opened."""

    def __init__(self, *what: Any) -> None:
        self.what = what

    def __reduce__(self) -> Any:
        return self.what[0], self.what[1:]


def hostile_tables(folder: Path, mark: Path) -> dict[str, bytes]:
    """Tables of contents that run something, or would make the reader do so."""
    table = pickle.loads((folder / ".metadata").read_bytes())
    bytes_entry = copy.deepcopy(table)
    name = next(iter(table.state_dict_metadata))
    bytes_entry.state_dict_metadata[name] = dcp.metadata.BytesStorageMetadata()
    outside = copy.deepcopy(table)
    for info in outside.storage_data.values():
        info.relative_path = f"../{folder.name}/{info.relative_path}"
    planned = copy.deepcopy(table)
    planned.planner_data = Hostile(os.system, f"touch {mark}")
    return {
        "a call": pickle.dumps(Hostile(os.system, f"touch {mark}")),
        "a call within": pickle.dumps(planned),
        "eval": pickle.dumps(Hostile(eval, f"open({str(mark)!r}, 'w')")),
        "getattr": pickle.dumps(Hostile(getattr, "a", "upper")),
        "a file": pickle.dumps(Hostile(open, str(mark), "w")),
        "another object": pickle.dumps({"weight": 3}),
        "bytes": pickle.dumps(bytes_entry),
        "outside": pickle.dumps(outside),
        "cut off": (folder / ".metadata").read_bytes()[:-20],
        "nothing": b"",
    }


def test_a_hostile_table_runs_nothing(ranks: Any, run_folder: Path, tmp_path: Path) -> None:
    """Its size and sum are right; going on and exporting end with one line, and nothing of it happens."""
    place, mark = step(run_folder, 6), tmp_path / "it-ran"
    for name, content in hostile_tables(place, mark).items():
        (place / ".metadata").write_bytes(content)
        sum_again(place, ".metadata")
        for line in ranks(2, try_digits, "ddp", place):
            assert line, name
            assert "\n" not in line, name
            assert str(place) in line, name
        with pytest.raises(UsageError) as caught:
            export(checkpoint_named(place), tmp_path / "w.pt")
        assert "\n" not in str(caught.value), name
        assert not mark.exists(), name
        assert not (tmp_path / "w.pt").exists(), name


def hostile_values(mark: Path) -> dict[str, Any]:
    call = Hostile(os.system, f"touch {mark}")
    return {
        "a call": call,
        "within": {"groups": [{"lr": call}], "schedule": None, "scale": None},
        "within a list": [call],
    }


@pytest.mark.parametrize("zipped", [True, False])
def test_hostile_values_run_nothing(ranks: Any, run_folder: Path, tmp_path: Path, zipped: bool) -> None:
    """training.pt with right size and sum: one line, and nothing of it happens."""
    place, mark = step(run_folder, 6), tmp_path / "it-ran"
    for name, values in hostile_values(mark).items():
        torch.save(values, place / "training.pt", _use_new_zipfile_serialization=zipped)
        sum_again(place, "training.pt")
        for line in ranks(2, try_digits, "ddp", place):
            assert line, name
            assert "\n" not in line, name
            assert "training.pt" in line, name
        assert not mark.exists(), name
    (place / "training.pt").write_bytes(pickle.dumps(Hostile(os.system, f"touch {mark}")))
    sum_again(place, "training.pt")
    assert all("training.pt" in line for line in ranks(2, try_digits, "ddp", place))
    assert not mark.exists()


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"groups": 3, "schedule": None, "scale": None},
        {"groups": [3], "schedule": None, "scale": None},
        torch.ones(3),
    ],
    ids=["nothing", "no groups", "no group", "a tensor"],
)
def test_values_of_another_kind_are_refused(ranks: Any, run_folder: Path, values: Any) -> None:
    """Something else under the name of training.pt, size and sum being right: one line that names it."""
    place = step(run_folder, 6)
    torch.save(values, place / "training.pt")
    sum_again(place, "training.pt")
    (line,) = ranks(1, try_digits, "single", place)
    assert "training.pt" in line
    assert "\n" not in line


def test_a_hostile_table_on_the_command_line(cli: Cli, run_folder: Path, tmp_path: Path) -> None:
    place, mark = step(run_folder, 6), tmp_path / "it-ran"
    (place / ".metadata").write_bytes(pickle.dumps(Hostile(os.system, f"touch {mark}")))
    sum_again(place, ".metadata")
    done = cli(tmp_path, *DIGITS, "--layout", "ddp", "--processes", "2", "--resume", place)
    assert done.status == 2, done.err
    assert ".metadata" in one_line(done.err)
    assert not mark.exists()
    assert not list(tmp_path.glob("runs/*/log.jsonl"))
