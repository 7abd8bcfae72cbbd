"""A workload changed by `dataclasses.replace` is used with its changes. It is not loaded from its file again."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from everyrank import Launch, Layout, find_workload, run, verify
from everyrank.errors import WorkloadError

TEXT = """
import torch
from everyrank import Workload

def loss(output, target):
    return (output - target).square().sum(), target.numel()

workload = Workload(
    name="line", model=lambda: torch.nn.Linear(3, 1), loss=loss, global_batch=4, steps=2,
    train_data=lambda: [(torch.ones(3) * n, torch.ones(1)) for n in range(8)],
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
)
"""


def raising_loss(output: Any, target: Any) -> Any:
    raise RuntimeError("this loss was asked for")


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize("name", ["line.py", "two-lines.py"])  # no rank can import the second one by its name
def test_run_and_verify_use_a_replaced_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A scaled loss gives a scaled result, and a loss that raises gives its error."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / name).write_text(TEXT)
    loaded = find_workload(str(tmp_path / name))
    assert loaded.source is not None
    replaced = dataclasses.replace(loaded, name="other", loss=lambda out, target: (loaded.loss(out, target)[0] * 3, 4))
    assert replaced.source is None
    launch = Launch(processes=1, device="cpu")
    (loaded_record,) = run(loaded, Layout("single"), launch)
    (replaced_record,) = run(replaced, Layout("single"), launch)
    assert replaced_record.workload == "other"
    assert replaced_record.loss[0] == pytest.approx(3 * loaded_record.loss[0])
    for call in (
        lambda workload: run(workload, Layout("single"), launch),
        lambda workload: verify(workload, [Layout("ddp")], Launch(processes=2, device="cpu"), quick=True),
    ):
        with pytest.raises(WorkloadError, match="this loss was asked for"):
            call(dataclasses.replace(loaded, loss=raising_loss))


def test_copy_without_changes_has_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "line.py").write_text(TEXT)
    loaded = find_workload(str(tmp_path / "line.py"))
    assert loaded.source is not None
    assert dataclasses.replace(loaded).source is None
