"""everyrank in a notebook with a real kernel, with a workload that a cell defines."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

CELL = """
import torch
from torch.utils.data import TensorDataset
from everyrank import Launch, Layout, Workload, run, verify

def data():
    return TensorDataset(torch.arange(40.0).reshape(20, 2), torch.arange(20.0).reshape(20, 1))

def loss(output, target):
    return (output - target).square().sum(), len(target)

workload = Workload(
    name="cell", model=lambda: torch.nn.Linear(2, 1), train_data=data, loss=loss, global_batch=8,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-4),
)
"""


def test_notebook_cell_catches_errors_and_verifies_its_workload() -> None:
    """An error of a rank is raised in the cell, and the kernel continues. The ranks receive functions of the cell."""
    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell(CELL),
            nbformat.v4.new_code_cell(
                "import dataclasses, everyrank\n"
                "broken = dataclasses.replace(workload, loss=lambda output, target: 1 / 0)\n"
                "try:\n    run(broken, Layout('ddp'), Launch(processes=2), show=False)\n"
                "except everyrank.EveryrankError as error:\n    print(type(error).__name__, error)"
            ),
            nbformat.v4.new_code_cell(
                "[r.parity.status for r in verify(workload, [Layout('ddp')], Launch(processes=2), show=False)]"
            ),
        ]
    )
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    error, verified = (cell.outputs[-1] for cell in notebook.cells[1:])
    assert "WorkloadError" in error["text"]
    assert "ZeroDivisionError: division by zero" in error["text"]
    assert verified["data"]["text/plain"] == "['equal']"


def test_first_steps_notebook_prints_the_outputs_that_it_describes(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notebook of the documentation runs from top to bottom."""
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    notebook = nbformat.read(repository / "docs" / "examples" / "first_steps.ipynb", 4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    texts = ["".join(output.get("text", "") for output in cell.outputs) for cell in cells]
    curves, checks, mistake, audit = range(2, 6)
    assert any("image/png" in output.get("data", {}) for output in cells[curves].outputs)
    assert re.findall(r"^(\w+) +equal ", texts[checks], re.MULTILINE) == ["ddp", "zero1", "fsdp"]
    assert "different - update 0, count of loss terms" in texts[mistake]
    assert "data.epoch" in texts[audit]
