"""Loading a hostile checkpoint runs none of its code."""

from __future__ import annotations

import copy
import copyreg
import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkpointing import DIGITS_ARGS, resume_digits, step_folder, update_checksums
from everyrank.checkpoint import export
from everyrank.errors import UsageError
from everyrank.runs import checkpoint_named
from processes import Cli, only_error_line


class MaliciousPickle:
    """An object whose pickle calls a function when it is loaded."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


def malicious_tables(folder: Path, marker: Path) -> dict[str, bytes]:
    """Return tables of contents that run code, or that refer to data of a wrong type or place."""
    table = pickle.loads((folder / ".metadata").read_bytes())
    bytes_entry = copy.deepcopy(table)
    name = next(iter(table.state_dict_metadata))
    bytes_entry.state_dict_metadata[name] = dcp.metadata.BytesStorageMetadata()
    outside_folder = copy.deepcopy(table)
    for info in outside_folder.storage_data.values():
        info.relative_path = f"../{folder.name}/{info.relative_path}"
    call_in_planner_data = copy.deepcopy(table)
    call_in_planner_data.planner_data = MaliciousPickle(os.system, f"touch {marker}")
    return {
        "a call": pickle.dumps(MaliciousPickle(os.system, f"touch {marker}")),
        "a call within": pickle.dumps(call_in_planner_data),
        "eval": pickle.dumps(MaliciousPickle(eval, f"open({str(marker)!r}, 'w')")),
        "getattr": pickle.dumps(MaliciousPickle(getattr, "a", "upper")),
        "getattr of a class": pickle.dumps(MaliciousPickle(getattr, dcp.metadata.Metadata, "__init__")),
        "getattr of an enum": pickle.dumps(MaliciousPickle(getattr, dcp.metadata._MEM_FORMAT_ENCODING, "__init__")),
        "a file": pickle.dumps(MaliciousPickle(open, str(marker), "w")),
        "another object": pickle.dumps({"weight": 3}),
        "bytes": pickle.dumps(bytes_entry),
        "outside": pickle.dumps(outside_folder),
        "cut off": (folder / ".metadata").read_bytes()[:-20],
        "nothing": b"",
    }


def test_malicious_table_of_contents_runs_no_code(ranks: Any, run_folder: Path, tmp_path: Path) -> None:
    """Size and checksum of the table are correct. Resume and export fail with one line."""
    checkpoint_folder, marker = step_folder(run_folder, 6), tmp_path / "it-ran"
    for name, content in malicious_tables(checkpoint_folder, marker).items():
        (checkpoint_folder / ".metadata").write_bytes(content)
        update_checksums(checkpoint_folder, ".metadata")
        for line in ranks(2, resume_digits, "ddp", checkpoint_folder):
            assert line, name
            assert "\n" not in line, name
            assert str(checkpoint_folder) in line, name
        with pytest.raises(UsageError) as error_info:
            export(checkpoint_named(checkpoint_folder), tmp_path / "w.pt")
        assert "\n" not in str(error_info.value), name
        assert not marker.exists(), name
        assert not (tmp_path / "w.pt").exists(), name


def test_table_with_enum_members_by_name_is_read(run_folder: Path, tmp_path: Path) -> None:
    """Python 3.11.2 pickles a member of an enum as `getattr(class, name)`, and newer releases as `class(value)`."""
    checkpoint_folder = step_folder(run_folder, 6)
    table_path = checkpoint_folder / ".metadata"
    content = io.BytesIO()
    pickler = pickle.Pickler(content)
    by_name = {dcp.metadata._MEM_FORMAT_ENCODING: lambda member: (getattr, (type(member), member.name))}
    pickler.dispatch_table = copyreg.dispatch_table | by_name
    pickler.dump(pickle.loads(table_path.read_bytes()))
    assert b"getattr" in content.getvalue()
    table_path.write_bytes(content.getvalue())
    update_checksums(checkpoint_folder, ".metadata")
    assert export(checkpoint_named(checkpoint_folder), tmp_path / "w.pt")
    assert torch.load(tmp_path / "w.pt", weights_only=True)


def malicious_values(marker: Path) -> dict[str, Any]:
    """Return contents of training.pt that run code if they are unpickled."""
    call = MaliciousPickle(os.system, f"touch {marker}")
    return {
        "a call": call,
        "within": {"groups": [{"lr": call}], "schedule": None, "scale": None},
        "within a list": [call],
    }


@pytest.mark.parametrize("zipped", [True, False])
def test_malicious_training_values_run_no_code(ranks: Any, run_folder: Path, tmp_path: Path, zipped: bool) -> None:
    """Size and checksum of training.pt are correct. Resume fails with one line."""
    checkpoint_folder, marker = step_folder(run_folder, 6), tmp_path / "it-ran"
    for name, values in malicious_values(marker).items():
        torch.save(values, checkpoint_folder / "training.pt", _use_new_zipfile_serialization=zipped)
        update_checksums(checkpoint_folder, "training.pt")
        for line in ranks(2, resume_digits, "ddp", checkpoint_folder):
            assert line, name
            assert "\n" not in line, name
            assert "training.pt" in line, name
        assert not marker.exists(), name
    (checkpoint_folder / "training.pt").write_bytes(pickle.dumps(MaliciousPickle(os.system, f"touch {marker}")))
    update_checksums(checkpoint_folder, "training.pt")
    assert all("training.pt" in line for line in ranks(2, resume_digits, "ddp", checkpoint_folder))
    assert not marker.exists()


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
def test_resume_refuses_training_values_of_a_wrong_type(ranks: Any, run_folder: Path, values: Any) -> None:
    """Size and checksum of training.pt are correct. The error is one line that names the file."""
    checkpoint_folder = step_folder(run_folder, 6)
    torch.save(values, checkpoint_folder / "training.pt")
    update_checksums(checkpoint_folder, "training.pt")
    (line,) = ranks(1, resume_digits, "single", checkpoint_folder)
    assert "training.pt" in line
    assert "\n" not in line


def test_train_refuses_a_malicious_table_of_contents(cli: Cli, run_folder: Path, tmp_path: Path) -> None:
    checkpoint_folder, marker = step_folder(run_folder, 6), tmp_path / "it-ran"
    (checkpoint_folder / ".metadata").write_bytes(pickle.dumps(MaliciousPickle(os.system, f"touch {marker}")))
    update_checksums(checkpoint_folder, ".metadata")
    result = cli(tmp_path, *DIGITS_ARGS, "--layout", "ddp", "--processes", "2", "--resume", checkpoint_folder)
    assert result.status == 2, result.err
    assert ".metadata" in only_error_line(result.err)
    assert not marker.exists()
    assert not list(tmp_path.glob("runs/*/log.jsonl"))
