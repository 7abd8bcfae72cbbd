"""Replicas that differ between two means: checkpoints are saved where they are equal, and lead on as if never left."""

from __future__ import annotations

from pathlib import Path

from everyrank import read_records
from processes import Cli

LAYOUT = ("train", "digits", "--layout", "local_sgd:every=4", "--set", "epochs=2")


def test_going_on_from_a_mean(cli: Cli, tmp_path: Path) -> None:
    """A checkpoint that was due after updates 6, 12, ... is that of the next mean; the losses after it are the same."""
    whole = cli.on_ranks(tmp_path, *LAYOUT, "--save-every", "6", "--out", "whole", size=2)
    assert whole.status == 0, whole.err
    saved = sorted(path.name for path in (tmp_path / "whole" / "checkpoints").glob("step-*"))
    assert saved == ["step-00000036", "step-00000044", "step-00000046"]  # the oldest are let go of
    first = cli.on_ranks(tmp_path, *LAYOUT, "--steps", "24", "--out", "parts", size=2)
    assert first.status == 0, first.err
    rest = cli.on_ranks(tmp_path, *LAYOUT, "--out", "parts", "--resume", size=2)
    assert rest.status == 0, rest.err
    losses = [read_records(tmp_path / name / "record.json")[0].loss for name in ("whole", "parts")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 46
