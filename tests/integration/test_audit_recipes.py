"""The audit of each recipe, run with the command in its header, reports no FAIL and no WARN.

The fork server starts the audit and its ranks. One test of torchrun, and those of MPICH, Slurm, Ray and Horovod, start
a new Python.
"""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from forkserver import ForkServer
from integration.conftest import path_with, skip_without_horovod
from integration.test_recipe_commands import mpirun_environment
from processes import free_port
from recipes import test_recipes
from recipes.test_recipes import RECIPES_FOLDER, images, run_commands, write_recipe
from recipes.test_rpc import RPC_RECIPES

__all__ = ["images"]


def audited(folder: Path, name: str, status: int = 0, more: str = "", **variables: str) -> str:
    """Run the commands in the header under `everyrank audit`, with `more` after the program. Return their output."""
    write_recipe(folder, name)
    commands = re.findall(r"^Run: (.*)$", (RECIPES_FOLDER / f"{name}.py").read_text(), re.MULTILINE)
    lines = [re.sub(rf"\b{name}\.py", f"-m everyrank audit {name}.py", command) for command in commands]
    program, _, rest = "\n".join(lines).partition(" ")
    done = run_commands(folder, f"{program} {more} {rest}", status, **variables)
    return done.stdout + done.stderr


def check(said: str, num_ranks: int = 2) -> None:
    assert " FAIL" not in said
    assert " WARN" not in said
    assert said.count(f"updates on {num_ranks} ranks") == 1, said


@pytest.fixture
def forked_programs(python: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start `python`, `torchrun` and the ranks of torchrun through the fork server."""
    monkeypatch.setattr(test_recipes, "PROGRAM_FOLDER", python.programs)
    monkeypatch.setitem(test_recipes.COMMAND_ENVIRONMENT, "PYTHON_EXEC", str(python.programs / "python"))


def test_audit_of_ddp_torchrun_passes(tmp_path: Path) -> None:
    check(audited(tmp_path, "ddp_torchrun"))


@pytest.mark.parametrize("name", ["ddp_spawn", "elastic_torchrun"])
@pytest.mark.usefixtures("forked_programs")
def test_audit_passes_with_the_command_in_the_header(tmp_path: Path, name: str) -> None:
    check(audited(tmp_path, name))


@pytest.mark.parametrize("name", [*RPC_RECIPES, "parameter_server_async", "parameter_server_rpc"])
@pytest.mark.usefixtures("forked_programs")
def test_audit_of_rpc_recipes_passes(tmp_path: Path, name: str) -> None:
    """The audit records the training of each worker, and reports that it did not check the calls."""
    said = audited(tmp_path, name)
    assert " FAIL" not in said
    assert " WARN" not in said
    assert "not checked: RPC" in said
    assert "communication between ranks" not in said
    assert len(re.findall(r"updates on [123] ranks?\b", said)) == 1, said


@pytest.mark.parametrize("way", ["file", "tcp"])
@pytest.mark.usefixtures("forked_programs")
def test_audit_names_the_command_for_ranks_that_are_started_by_hand(tmp_path: Path, way: str) -> None:
    """If the audit started the ranks, all would be rank 0. Its error names the command for each rank."""
    name, meeting = "ddp_by_hand", tmp_path / "meeting"
    write_recipe(tmp_path, name)
    where = meeting.as_uri() if way == "file" else f"tcp://127.0.0.1:{free_port()}"
    line = "python -m everyrank audit {name}.py --rank {rank} --world-size 2 --init {where}"
    refused = run_commands(tmp_path, line.format(name=name, rank=0, where=where), 2).stderr
    assert "RANK=0 WORLD_SIZE=N everyrank audit" in refused
    lines = [f"RANK={rank} WORLD_SIZE=2 {line}".format(name=name, rank=rank, where=where) for rank in range(2)]
    check(run_commands(tmp_path, " &\n".join(lines)).stdout)


@pytest.mark.usefixtures("forked_programs")
def test_audit_refuses_several_hosts(tmp_path: Path) -> None:
    """The audit supports only one host, so each of the two torchrun nodes reports an error."""
    said = audited(tmp_path, "multi_node", 1)
    assert (
        2 <= said.count("on one host") <= 4
    )  # each node, and the ranks that torchrun has not ended before they print it


def test_audit_under_slurm_passes(tmp_path: Path, slurm: dict[str, str]) -> None:
    check(audited(tmp_path, "slurm", **slurm))


@pytest.mark.parametrize("program", ["Open MPI", "MPICH"])
def test_audit_under_mpi_passes(python: ForkServer, tmp_path: Path, program: str) -> None:
    """Ranks rendezvous at an address, because the name of the default file depends on the parent process.

    The fork server starts Open MPI's ranks. MPICH's ranks inherit an open file, so they start without it.
    """
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables = mpirun_environment(tmp_path, program)
    if program == "Open MPI":
        variables["PATH"] = os.pathsep.join([str(tmp_path / "bin"), str(python.programs), variables["PATH"]])
    words = "-x MASTER_ADDR -x MASTER_PORT" if program == "Open MPI" else ""
    check(audited(tmp_path, "mpi", more=words, **variables, **meeting))


def test_audit_under_horovodrun_passes(python: ForkServer, tmp_path: Path) -> None:
    """Under horovodrun each rank has a different parent. The audit does not record what Horovod sends."""
    skip_without_horovod()
    said = audited(tmp_path, "horovod_ddp", **path_with(python.programs, Path(sys.executable).parent))
    assert " FAIL" not in said
    assert " WARN" not in said
    assert "nothing wrong found" in said


def test_ray_actors_pass_the_audit(tmp_path: Path) -> None:
    """The audit records the actors, which Ray starts in its own processes."""
    if find_spec("ray") is None:
        pytest.skip("not verified here: needs Ray")
    check(audited(tmp_path, "ray_actors"))


@pytest.mark.usefixtures("forked_programs")
def test_audit_of_imagenet_ddp_passes(tmp_path: Path, images: Path) -> None:
    """The recipe has SyncBatchNorm on pretended devices, batches by indices, and a checkpoint in an open file."""
    (tmp_path / "images").symlink_to(images)
    words = "--batch 16 --size 32 --width 8 --workers 1 --epochs 2"
    write_recipe(tmp_path, "imagenet_ddp")
    line = "torchrun --standalone --nproc-per-node 2 -m everyrank audit imagenet_ddp.py images"
    said = run_commands(tmp_path, f"{line} {words}").stdout
    check(said)
    assert "not checked: checkpoints" not in said
    assert not list(tmp_path.glob("*.pt")), "checkpoints go elsewhere"
