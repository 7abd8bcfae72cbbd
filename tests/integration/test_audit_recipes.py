"""Recipes by the command in their header, with the audit before the script: no FAIL, no WARN.

The audit and its ranks are forked. One test of torchrun, and those of MPICH, Slurm, Ray and Horovod, start a new
Python.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from forkserver import ForkServer
from integration.conftest import needs_horovod
from integration.test_recipe_commands import mpirun
from processes import free_port
from recipes import test_recipes
from recipes.test_recipes import RECIPES, beside, images, typed
from recipes.test_rpc import RPC

__all__ = ["images"]


def audited(folder: Path, name: str, status: int = 0, more: str = "", **variables: str) -> str:
    """What the lines of its header print, with `-m everyrank audit` before the script, `more` after the program."""
    beside(folder, name)
    commands = re.findall(r"^Run: (.*)$", (RECIPES / f"{name}.py").read_text(), re.MULTILINE)
    lines = [re.sub(rf"\b{name}\.py", f"-m everyrank audit {name}.py", command) for command in commands]
    program, _, rest = "\n".join(lines).partition(" ")
    done = typed(folder, f"{program} {more} {rest}", status, **variables)
    return done.stdout + done.stderr


def check(said: str, num_ranks: int = 2) -> None:
    assert " FAIL" not in said
    assert " WARN" not in said
    assert said.count(f"updates on {num_ranks} ranks") == 1, said


@pytest.fixture
def forked_programs(python: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork `python` and `torchrun` of the typed commands, and the ranks that torchrun starts."""
    monkeypatch.setattr(test_recipes, "PROGRAMS", python.programs)
    monkeypatch.setitem(test_recipes.OURS, "PYTHON_EXEC", str(python.programs / "python"))


def test_ddp_torchrun(tmp_path: Path) -> None:
    check(audited(tmp_path, "ddp_torchrun"))


@pytest.mark.parametrize("name", ["ddp_spawn", "elastic_torchrun"])
@pytest.mark.usefixtures("forked_programs")
def test_by_its_own_command(tmp_path: Path, name: str) -> None:
    check(audited(tmp_path, name))


@pytest.mark.parametrize("name", [*RPC, "parameter_server_async", "parameter_server_rpc"])
@pytest.mark.usefixtures("forked_programs")
def test_recipes_over_rpc(tmp_path: Path, name: str) -> None:
    """The audit records the training of each worker, and reports that it did not check the calls."""
    said = audited(tmp_path, name)
    assert " FAIL" not in said
    assert " WARN" not in said
    assert "not checked: RPC" in said
    assert "communication between ranks" not in said
    assert len(re.findall(r"updates on [123] ranks?\b", said)) == 1, said


@pytest.mark.parametrize("way", ["file", "tcp"])
@pytest.mark.usefixtures("forked_programs")
def test_ranks_by_their_arguments(tmp_path: Path, way: str) -> None:
    """Started by us, all ranks would be rank 0: audit says how they are started."""
    name, meeting = "ddp_by_hand", tmp_path / "meeting"
    beside(tmp_path, name)
    where = meeting.as_uri() if way == "file" else f"tcp://127.0.0.1:{free_port()}"
    line = "python -m everyrank audit {name}.py --rank {rank} --world-size 2 --init {where}"
    refused = typed(tmp_path, line.format(name=name, rank=0, where=where), 2).stderr
    assert "RANK=0 WORLD_SIZE=N everyrank audit" in refused
    lines = [f"RANK={rank} WORLD_SIZE=2 {line}".format(name=name, rank=rank, where=where) for rank in range(2)]
    check(typed(tmp_path, " &\n".join(lines)).stdout)


@pytest.mark.usefixtures("forked_programs")
def test_several_hosts(tmp_path: Path) -> None:
    """Two nodes of torchrun cannot be looked at: both say so."""
    said = audited(tmp_path, "multi_node", 1)
    assert (
        2 <= said.count("on one host") <= 4
    )  # each node, and the ranks that torchrun has not ended before they print it


def test_slurm(tmp_path: Path, slurm: dict[str, str]) -> None:
    check(audited(tmp_path, "slurm", **slurm))


@pytest.mark.parametrize("program", ["Open MPI", "MPICH"])
def test_mpi(python: ForkServer, tmp_path: Path, program: str) -> None:
    """Over an address: the file that its ranks meet over by themselves is named after their parent, the audit.

    Open MPI's ranks are forked; MPICH's are told of their place by a file that is open when they start.
    """
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables = mpirun(tmp_path, program)
    if program == "Open MPI":
        variables["PATH"] = os.pathsep.join([str(tmp_path / "bin"), str(python.programs), variables["PATH"]])
    words = "-x MASTER_ADDR -x MASTER_PORT" if program == "Open MPI" else ""
    check(audited(tmp_path, "mpi", more=words, **variables, **meeting))


def test_horovod(tmp_path: Path) -> None:
    """Under horovodrun each rank has a parent of its own. What Horovod sends is not seen: nothing is said of it."""
    needs_horovod()
    said = audited(tmp_path, "horovod_ddp")
    assert " FAIL" not in said
    assert " WARN" not in said
    assert "nothing wrong found" in said


def test_ray(tmp_path: Path) -> None:
    """The actors are watched, wherever Ray starts them on this host."""
    if find_spec("ray") is None:
        pytest.skip("not verified here: needs Ray")
    check(audited(tmp_path, "ray_actors"))


@pytest.mark.usefixtures("forked_programs")
def test_imagenet(tmp_path: Path, images: Path) -> None:
    """SyncBatchNorm on pretended devices, batches by a list of indices, a checkpoint through an open file."""
    (tmp_path / "images").symlink_to(images)
    words = "--batch 16 --size 32 --width 8 --workers 1 --epochs 2"
    beside(tmp_path, "imagenet_ddp")
    line = "torchrun --standalone --nproc-per-node 2 -m everyrank audit imagenet_ddp.py images"
    said = typed(tmp_path, f"{line} {words}").stdout
    check(said)
    assert "not checked: checkpoints" not in said
    assert not list(tmp_path.glob("*.pt")), "checkpoints go elsewhere"
