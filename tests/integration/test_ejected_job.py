"""An ejected project in a real Slurm job."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from integration.conftest import batch_job
from processes import Cli
from test_eject import eject, losses_of_train, outside, said

__all__ = ["outside"]


@pytest.mark.parametrize("words", [(), ("--layout", "fsdp")], ids=["ddp", "fsdp"])
def test_slurm_runs_what_is_ejected(
    words: tuple[str, ...],
    outside: Path,
    tmp_path: Path,
    cli: Cli,
    slurm: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command in its README submits the job, which gets the losses of `everyrank train` to the last bit."""
    project = eject(cli, outside / "points.py", tmp_path / "project", "--launcher", "slurm", *words)
    ours = cli.on_ranks(
        tmp_path, "train", outside / "points.py", *(words or ("--layout", "ddp")), "--out", "run", size=2
    )
    assert ours.status == 0, ours.err
    assert "\nsbatch train.sbatch\n" in (project / "README.md").read_text()
    # both nodes are this machine, whose name may have no address
    own = {"MASTER_ADDR": "127.0.0.1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    monkeypatch.delenv("PYTHONPATH", raising=False)
    status = batch_job(project, "sbatch --output=out train.sbatch", slurm | own)
    shown = (project / "out").read_text()
    assert status == 0, shown
    losses = said(shown)[0]
    assert losses == losses_of_train(tmp_path / "run")
    assert len(losses) == 6
    assert (project / "weights.pt").exists()
