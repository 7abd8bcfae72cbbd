"""An ejected project in a real Slurm job, and under the real Horovod."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forkserver import ForkServer
from integration.conftest import path_with, run_batch_job, skip_without_horovod
from processes import Cli
from test_eject import RICH, eject, losses_of_train, outside, said

__all__ = ["outside"]


def program_path(python: ForkServer, is_forked: bool) -> dict[str, str]:
    """Return PATH with the programs of this environment, behind the `python` of the fork server if `is_forked`.

    That `python` has only torch imported.
    """
    return path_with(*([python.torch_programs] if is_forked else []), Path(sys.executable).parent)


@pytest.mark.parametrize("words", [(), ("--layout", "fsdp")], ids=["ddp", "fsdp"])
def test_slurm_runs_an_ejected_project(
    words: tuple[str, ...],
    outside: Path,
    tmp_path: Path,
    cli: Cli,
    python: ForkServer,
    slurm: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command in its README submits the job. Its losses are bitwise equal to those of `everyrank train`.

    The project with ddp starts a new Python. That with fsdp starts the `python` of the fork server.
    """
    project = eject(cli, outside / "points.py", tmp_path / "project", "--launcher", "slurm", *words)
    ours = cli.on_ranks(
        tmp_path, "train", outside / "points.py", *(words or ("--layout", "ddp")), "--out", "run", size=2
    )
    assert ours.status == 0, ours.err
    assert "\nsbatch train.sbatch\n" in (project / "README.md").read_text()
    # both nodes are this machine, whose name may have no address
    own = {"MASTER_ADDR": "127.0.0.1", **program_path(python, is_forked=bool(words))}
    monkeypatch.delenv("PYTHONPATH", raising=False)
    status = run_batch_job(project, "sbatch --output=out train.sbatch", slurm | own)
    shown = (project / "out").read_text()
    assert status == 0, shown
    losses = said(shown)[0]
    assert losses == losses_of_train(tmp_path / "run")
    assert len(losses) == 6
    assert (project / "weights.pt").exists()


@pytest.mark.parametrize("keys", ["", ",accumulate=2", ",precision=fp16", ",compress=fp16"])
def test_horovod_runs_an_ejected_project(keys: str, tmp_path: Path, cli: Cli, python: ForkServer) -> None:
    """The losses of the command in its README are bitwise equal to those of `everyrank train`.

    One project starts a new Python. The others start the `python` of the fork server.
    """
    skip_without_horovod()
    (tmp_path / "rich.py").write_text(RICH)
    layout = f"horovod:batch_norm=local{keys}"
    project = eject(cli, tmp_path / "rich.py", tmp_path / "project", "--layout", layout)
    words = ["train", tmp_path / "rich.py", "--layout", layout, "--processes", 2, "--out", "run", "--save-every", 0]
    ours = cli(tmp_path, *words)
    assert ours.status == 0, ours.err
    command = (project / "README.md").read_text().split("requirements.txt\n")[1].splitlines()[0].split()
    assert command[:4] == ["horovodrun", "-np", "2", "--gloo"]
    environment = {**os.environ, **program_path(python, is_forked=bool(keys))}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, capture_output=True, text=True, cwd=project, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    losses = said(done.stdout.replace("[0]<stdout>:", ""))[0]
    assert losses == losses_of_train(tmp_path / "run")
    assert len(losses) == 13
