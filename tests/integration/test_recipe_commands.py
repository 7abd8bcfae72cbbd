"""Each recipe runs with the command in its header and gives the losses of the library.

One recipe of each launcher starts a new Python. The others fork `python` and `torchrun` from a process that has
imported only torch, so a missing import in a script is detected.
"""

from __future__ import annotations

import gzip
import math
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from everyrank.cli import main
from forkserver import ForkServer
from integration.conftest import needs_horovod, run_batch_job
from processes import Cli, free_port
from recipes import test_recipes
from recipes.test_recipes import (
    ALL,
    ALONE,
    COMPRESSED,
    DIGITS,
    MUTATIONS,
    NAMES,
    NEEDS,
    NUM_ROWS,
    OPERATIONS,
    OURS,
    PROGRAMS,
    RECIPES,
    REPLAYED,
    Printed,
    alone,
    beside,
    distance,
    gap,
    in_float64,
    library,
    read,
    typed,
    write_digits,
)
from recipes.test_rpc import WORKLOADS, episodes_in_one_process
from recipes.test_rpc import library as of_its_own

FROM_PYTHON_ON = ("single", "ddp_by_hand", "ddp_spawn", "ddp_torchrun", "ddp_rpc")
MPIRUN = Path(sys.executable).with_name("mpirun")  # Open MPI's, as a wheel brings it


@pytest.fixture(autouse=True)
def _starts(request: pytest.FixtureRequest, python: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the commands of a recipe through the fork server, unless it is in FROM_PYTHON_ON."""
    parameters = getattr(request.node, "callspec", None)
    name = parameters.params.get("name") if parameters is not None else None
    if name is not None and name not in FROM_PYTHON_ON:
        programs = python.torch_programs
        monkeypatch.setattr(test_recipes, "PROGRAMS", programs)
        monkeypatch.setitem(test_recipes.OURS, "PYTHON_EXEC", str(programs / "python"))  # of torchrun, for its ranks


def by_its_command(folder: Path, name: str, more: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the commands in the header in one shell, with the arguments `more` after the program."""
    beside(folder, name)
    text = (folder / f"{name}.py").read_text()
    commands = "\n".join(in_float64(text))
    program, _, rest = commands.partition(" ")
    return typed(folder, f"{program} {more} {rest}" if more else commands, **variables)


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_equal_to_the_library(cli: Cli, tmp_path: Path, name: str) -> None:
    """Losses are equal to 1e-12. The validation accuracy is exactly equal."""
    done = by_its_command(tmp_path, name)
    assert distance(read(done.stdout), library(cli, name)) <= 1e-12
    if name == "elastic_torchrun":
        assert done.stderr.count("of 2 resumes from update 20") == 2  # once by each rank: there was one restart
    if name == "multi_node":
        places = re.findall(r"^rank (\d) of 2: host \S+, local rank 0, address 127.0.0.1$", done.stdout, re.MULTILINE)
        assert sorted(places) == ["0", "1"]


@pytest.mark.parametrize("name", ALONE)
def test_losses_are_equal_to_one_process(tmp_path: Path, name: str) -> None:
    """These recipes have their own network, and are compared with the script without parallelism."""
    assert gap(read(by_its_command(tmp_path, name).stdout), alone(ALONE[name])) <= 1e-12


ON_THEIR_OWN = ["ddp_uneven", *COMPRESSED, *REPLAYED]  # what their losses equal is in tests/recipes


@pytest.mark.parametrize("name", sorted(ON_THEIR_OWN))
def test_losses_are_finite_and_decrease(tmp_path: Path, name: str) -> None:
    """The validation accuracy is above 0. tests/recipes compares the losses."""
    found = read(by_its_command(tmp_path, name).stdout)
    assert len(found.losses) >= 12
    assert math.isfinite(sum(found.losses))
    assert min(found.losses) < found.losses[0]
    assert 0 < found.numbers["top1"] <= 1


def test_forked_interpreter_has_the_modules_of_a_new_one_with_torch(python: ForkServer) -> None:
    """The modules of torch are those of a new interpreter that has imported torch and what an optimizer imports."""
    code = "import sys, torch, torch._dynamo; print(*sorted(name for name in sys.modules if name[:5] == 'torch'))"
    words = ["-c", code]
    forked, started = (
        subprocess.run([python, *words], capture_output=True, text=True, check=True).stdout
        for python in (python.torch_programs / "python", sys.executable)
    )
    assert forked == started


def test_every_recipe_is_tested() -> None:
    """This file runs all recipes except imagenet_ddp, which reads images. test_audit_recipes.py runs it."""
    typed_here = {*NAMES, *NEEDS, *OPERATIONS, *WORKLOADS, "rpc_reinforcement", *ALONE, *ON_THEIR_OWN}
    assert {*typed_here, "imagenet_ddp"} == set(ALL)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_operations_recipes_report_correct_results(tmp_path: Path, name: str) -> None:
    beside(tmp_path, name)
    (command,) = re.findall(r"^Run: (.*)$", (tmp_path / f"{name}.py").read_text(), re.MULTILINE)
    assert re.search(r"^ *\d\d results on \d ranks, all correct$", typed(tmp_path, command).stdout, re.MULTILINE)


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_rpc_recipes_are_equal_to_their_reference(cli: Cli, tmp_path: Path, name: str) -> None:
    assert distance(read(by_its_command(tmp_path, name).stdout), of_its_own(cli, name)) <= 1e-12


@pytest.mark.parametrize("name", ["rpc_reinforcement"])
def test_reinforcement_recipe_is_equal_to_one_process_and_learns(tmp_path: Path, name: str) -> None:
    """The rewards and losses of all updates have the same digits as with one process, and the reward increases."""
    said = by_its_command(tmp_path, name).stdout
    assert said == episodes_in_one_process()
    rewards = [float(reward) for reward in re.findall(r"^update \d+ reward (\S+)$", said, re.MULTILINE)]
    assert len(rewards) == 40
    assert sum(rewards[:4]) / 4 < 0.3 < 0.6 < sum(rewards[-10:]) / 10


# --- those with a launcher that has to be there


def mutated(folder: Path, name: str) -> None:
    """Put the mistake into the copy of the recipe in this folder."""
    before, after = MUTATIONS[name]
    text = (folder / f"{name}.py").read_text()
    assert text.count(before) == 1, f"{name} has changed; its mutation no longer fits"
    (folder / f"{name}.py").write_text(text.replace(before, after))


def check(cli: Cli, name: str, right: Printed, wrong: Printed) -> None:
    """Check that the recipe is equal to the library to 1e-12, and that it is not with the mistake."""
    assert distance(right, library(cli, name)) <= 1e-12
    assert distance(wrong, library(cli, name)) > 1e-9


def path_of(programs: Path) -> dict[str, str]:
    """Return the PATH with the `python` of the fork server, for all starts of a recipe but the first."""
    return {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}


def test_slurm_recipe_on_one_and_two_nodes(cli: Cli, python: ForkServer, tmp_path: Path, slurm: dict[str, str]) -> None:
    """The recipe runs by the command in its header, and on two nodes. Both have one address, so MASTER_ADDR is set."""
    right = read(by_its_command(tmp_path, "slurm", **slurm).stdout)
    slurm = slurm | path_of(python.programs)
    two_nodes = "srun --nodes 2 --ntasks-per-node 1 --cpu-bind=none python slurm.py --float64"
    on_two = read(typed(tmp_path, two_nodes, **slurm, MASTER_ADDR="127.0.0.1").stdout)
    mutated(tmp_path, "slurm")
    check(cli, "slurm", right, read(typed(tmp_path, two_nodes, **slurm, MASTER_ADDR="127.0.0.1").stdout))
    assert distance(on_two, library(cli, "slurm")) <= 1e-12


def test_slurm_recipe_without_srun_prints_the_srun_command(tmp_path: Path, slurm: dict[str, str]) -> None:
    """A batch script without srun starts the recipe only once. The error names the srun command."""
    beside(tmp_path, "slurm")
    wrapped = f"sbatch --ntasks=2 --output={tmp_path}/out --wrap '{sys.executable} slurm.py'"
    assert run_batch_job(tmp_path, wrapped, slurm) == 2
    (line,) = (tmp_path / "out").read_text().splitlines()
    assert "srun --ntasks 2 --cpu-bind=none python slurm.py" in line


def test_slurm_batch_script_of_everyrank_new(cli: Cli, tmp_path: Path, slurm: dict[str, str]) -> None:
    """The files that `everyrank new slurm` writes are submitted unchanged. Only MASTER_ADDR is set."""
    assert main(["new", "slurm", str(tmp_path / "train.py")]) == 0
    assert gzip.decompress((tmp_path / "digits.csv.gz").read_bytes()) == b"".join(DIGITS)
    write_digits(tmp_path, NUM_ROWS)
    variables = slurm | OURS | {"MASTER_ADDR": "127.0.0.1"}
    assert run_batch_job(tmp_path, "sbatch --output=out train.sbatch --float64", variables | path_of(PROGRAMS)) == 0
    assert distance(read((tmp_path / "out").read_text()), library(cli, "slurm")) <= 1e-12


def mpirun(folder: Path, program: str) -> dict[str, str]:
    """Return the environment variables with which the command in the header finds this `mpirun`."""
    found = shutil.which("mpirun.mpich") if program == "MPICH" else shutil.which(str(MPIRUN))
    if found is None:
        pytest.skip(f"not verified here: needs {program}")
    (folder / "bin").mkdir()
    (folder / "tmp").mkdir()
    root = " --allow-run-as-root --oversubscribe" if program == "Open MPI" else ""
    (folder / "bin" / "mpirun").write_text(f'#!/bin/sh\nexec "{found}"{root} "$@"\n')
    (folder / "bin" / "mpirun").chmod(0o755)
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {"PATH": path, "TMPDIR": str(folder / "tmp")}


@pytest.mark.parametrize("program", ["Open MPI", "MPICH"])
def test_mpi_recipe_with_a_file_and_an_address(cli: Cli, python: ForkServer, tmp_path: Path, program: str) -> None:
    """The ranks rendezvous over a file, and over an address, which several hosts would need."""
    variables = mpirun(tmp_path, program)
    right = read(by_its_command(tmp_path, "mpi", **variables).stdout)
    assert not list((tmp_path / "tmp").glob("mpi-*/*"))  # the file they met over is gone
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    words = "-x MASTER_ADDR -x MASTER_PORT" if program == "Open MPI" else ""
    variables["PATH"] = os.pathsep.join([str(tmp_path / "bin"), str(python.programs), variables["PATH"]])
    by_address = read(by_its_command(tmp_path, "mpi", words, **variables, **meeting).stdout)
    assert distance(by_address, library(cli, "mpi")) <= 1e-12
    mutated(tmp_path, "mpi")
    check(cli, "mpi", right, read(typed(tmp_path, "mpirun -n 2 python mpi.py --float64", **variables).stdout))


def spoken(done: subprocess.CompletedProcess[str]) -> str:
    """Return the output of the ranks, without the prefix that horovodrun adds to each line."""
    return re.sub(r"^\[\d+\]<stdout>:", "", done.stdout, flags=re.MULTILINE)


def test_horovod_recipe_in_float64_and_fp16(cli: Cli, tmp_path: Path) -> None:
    """Losses are equal in float64, close with fp16 gradients, and different with a mistake."""
    needs_horovod()
    right = read(spoken(by_its_command(tmp_path, "horovod_ddp")))
    close = read(spoken(typed(tmp_path, "horovodrun -np 2 --gloo python horovod_ddp.py --float64 --fp16")))
    assert 1e-9 < distance(Printed(close.losses, right.numbers), library(cli, "horovod_ddp")) < 0.1
    mutated(tmp_path, "horovod_ddp")
    wrong = typed(tmp_path, "horovodrun -np 2 --gloo python horovod_ddp.py --float64")
    check(cli, "horovod_ddp", right, read(spoken(wrong)))


def test_ray_recipe_and_an_exception_in_an_actor(cli: Cli, tmp_path: Path) -> None:
    """The recipe starts Ray itself. An exception of an actor ends the script with its message."""
    if find_spec("ray") is None:
        pytest.skip("not verified here: needs Ray")
    right = read(by_its_command(tmp_path, "ray_actors").stdout)
    mutated(tmp_path, "ray_actors")
    check(cli, "ray_actors", right, read(typed(tmp_path, "python ray_actors.py --ranks 2 --float64").stdout))
    text = (RECIPES / "ray_actors.py").read_text()
    failing = text.replace("        all_losses = []\n", "        all_losses = [] if rank == 0 else 1 / 0\n")
    assert failing != text
    (tmp_path / "ray_actors.py").write_text(failing)
    done = typed(tmp_path, "python ray_actors.py --ranks 2", 1)
    assert "ZeroDivisionError" in done.stderr
    assert not done.stdout
