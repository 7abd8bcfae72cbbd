"""Checkpoints of local SGD: replicas are saved where they are equal, and a resumed run has the same losses."""

from __future__ import annotations

from pathlib import Path

from everyrank import read_records
from processes import Cli

LAYOUT = ("train", "digits", "--layout", "local_sgd:every=4", "--set", "epochs=2")


def test_local_sgd_saves_and_resumes_after_an_average(cli: Cli, tmp_path: Path) -> None:
    """A checkpoint that is due between two averages is saved after the next average."""
    uninterrupted = cli.on_ranks(tmp_path, *LAYOUT, "--save-every", "6", "--out", "whole", size=2)
    assert uninterrupted.status == 0, uninterrupted.err
    checkpoint_names = sorted(path.name for path in (tmp_path / "whole" / "checkpoints").glob("step-*"))
    assert checkpoint_names == ["step-00000036", "step-00000044", "step-00000046"]  # older checkpoints are deleted
    interrupted = cli.on_ranks(tmp_path, *LAYOUT, "--steps", "24", "--out", "parts", size=2)
    assert interrupted.status == 0, interrupted.err
    resumed = cli.on_ranks(tmp_path, *LAYOUT, "--out", "parts", "--resume", size=2)
    assert resumed.status == 0, resumed.err
    losses = [read_records(tmp_path / name / "record.json")[0].loss for name in ("whole", "parts")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 46
