"""What each launcher tells its ranks: who started us, and the mistakes people make with Slurm."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest

from everyrank import cli
from everyrank.commands.launching import add_launching, is_reporting_rank, launch_of
from everyrank.errors import EveryrankError, UsageError
from everyrank.launch import (
    Launch,
    node,
    rank_info_from_environment,
    slurm,
)
from everyrank.launch.slurm import check_allocation, first_host, tasks_per_node
from everyrank.layout import Layout, parse_layout
from launching import HOROVODRUN, JOB, MPICH, OPEN_MPI, SRUN
from processes import Cli, by_hand

TORCHRUN = {**by_hand(1, "29500"), "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}

PERSON = by_hand(0, "29501", 3)


def launched(*words: str, layout: Layout | None = None) -> Launch:
    """What these words come to, in this environment."""
    parser = argparse.ArgumentParser()
    add_launching(parser)
    parser.set_defaults(workers=0)
    return launch_of(parser.parse_args(words), layout=layout)


def as_path(method: str) -> Path:
    assert urlparse(method).scheme == "file", method
    return Path(urlparse(method).path)


# --- who started us

FACTS: dict[str, tuple[dict[str, str], tuple[str, int, int, int, int]]] = {
    # environment; started by, rank, size, local rank, local size
    "torchrun": (TORCHRUN, ("torchrun", 1, 2, 1, 2)),
    "a person": (PERSON, ("env", 0, 3, 0, 3)),
    "Open MPI": (OPEN_MPI, ("mpi", 2, 4, 2, 4)),
    "MPICH": (MPICH, ("mpi", 3, 5, 3, 5)),
    "srun": (SRUN, ("slurm", 4, 6, 1, 3)),
    "horovodrun": (HOROVODRUN, ("horovodrun", 1, 4, 1, 2)),
    # torch's own four, where all ranks are on one host
    "four of a person": ({k: v for k, v in PERSON.items() if "LOCAL" not in k}, ("env", 0, 3, 0, 3)),
    "four of the only rank": (
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"},
        ("env", 0, 1, 0, 1),
    ),
    "four of a person in srun": (
        {**SRUN, "RANK": "4", "WORLD_SIZE": "6", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
        ("slurm", 4, 6, 1, 3),
    ),
    # nested: the written order
    "torchrun in srun": ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1(x2)", **TORCHRUN}, ("torchrun", 1, 2, 1, 2)),
    "torchrun in mpirun": ({**OPEN_MPI, **TORCHRUN}, ("torchrun", 1, 2, 1, 2)),
    "torchrun in horovodrun": ({**HOROVODRUN, **TORCHRUN}, ("torchrun", 1, 2, 1, 2)),
    "horovodrun in mpirun": ({**OPEN_MPI, **HOROVODRUN}, ("horovodrun", 1, 4, 1, 2)),
    "a person in srun": ({**SRUN, **PERSON}, ("env", 0, 3, 0, 3)),
    "a person in mpirun": ({**MPICH, **PERSON}, ("env", 0, 3, 0, 3)),
    "mpirun in srun": ({**SRUN, **OPEN_MPI}, ("mpi", 2, 4, 2, 4)),
    "mpirun of MPICH in srun": ({**SRUN, **MPICH}, ("mpi", 3, 5, 3, 5)),
    "all of them": (
        {**SRUN, **MPICH, **OPEN_MPI, **TORCHRUN, "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
        ("torchrun", 1, 2, 1, 2),
    ),
    # srun --mpi=pmi2 sets two of MPICH's four: that is no mpirun
    "srun that speaks PMI": ({**SRUN, "PMI_RANK": "4", "PMI_SIZE": "6"}, ("slurm", 4, 6, 1, 3)),
    "srun, uneven": (
        {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4,2", "SLURM_PROCID": "5"},
        ("slurm", 5, 6, 1, 2),
    ),
    "a person who agrees with srun": ({**SRUN, "RANK": "4", "WORLD_SIZE": "6"}, ("slurm", 4, 6, 1, 3)),
}


@pytest.mark.parametrize("case", FACTS)
def test_who_started_us(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str) -> None:
    """One full set is read, that of the innermost launcher, and nothing of another."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(slurm, "addresses_of", lambda _: ["10.0.0.1"])
    environment, expected = FACTS[case]
    info = rank_info_from_environment(environment)
    assert info is not None
    assert (info.started_by, info.rank, info.size, info.local_rank, info.local_size) == expected


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"LOCAL_RANK": "0"},
        {"MASTER_ADDR": "n0", "MASTER_PORT": "29500"},
        JOB,  # a batch script, or a shell of salloc: no rank
        {**JOB, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
    ],
    ids=str,
)
def test_nobody_started_us(environment: dict[str, str]) -> None:
    """What is left over of others does not make a rank."""
    assert rank_info_from_environment(environment) is None


def test_the_shell_of_salloc_is_no_rank() -> None:
    """Where Slurm is set to use_interactive_step, salloc's shell is a step of one task, numbered 4294967290.

    SLURM_NTASKS is still that of the allocation, so this would wait for ranks that nobody starts.
    """
    environment = {
        **JOB,
        "SLURM_STEP_ID": "4294967290",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        "SLURM_STEP_NODELIST": "n01",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
    }
    assert rank_info_from_environment({**environment, "MASTER_ADDR": "n01"}) is None


def test_where_ranks_of_horovodrun_meet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By its server, unless somebody names a place, or it has none (one rank by hand)."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    named = {**HOROVODRUN, "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}
    found = {url: rank_info_from_environment(variables) for url, variables in (("http", HOROVODRUN), ("tcp", named))}
    assert {info.rendezvous_url for info in found.values() if info} == {"http://10.0.0.1:4321", "tcp://n0:29500"}


WRONG_ENVIRONMENTS: dict[str, tuple[dict[str, str], list[str]]] = {
    # not a full set
    "rank alone": ({"RANK": "0"}, ["RANK", "WORLD_SIZE", "MASTER_PORT", "torchrun", "unset RANK"]),
    "size alone": ({"WORLD_SIZE": "4"}, ["WORLD_SIZE", "RANK", "unset WORLD_SIZE"]),
    "no port": ({k: v for k, v in PERSON.items() if k != "MASTER_PORT"}, ["MASTER_PORT", "torchrun"]),
    "empty": ({**PERSON, "LOCAL_RANK": ""}, ["not LOCAL_RANK"]),
    "part of Open MPI's": ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, ["OMPI_COMM_WORLD_LOCAL_RANK"]),
    "part of MPICH's": ({"PMI_RANK": "1", "PMI_SIZE": "4"}, ["MPI_LOCALRANKID"]),
    "part of horovodrun's": (
        {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4"},
        ["HOROVOD_LOCAL_RANK", "start with horovodrun"],
    ),
    # what may not change
    "elastic horovodrun": ({**HOROVODRUN, "HOROVOD_ELASTIC": "1"}, ["HOROVOD_ELASTIC=1", "without --min-np"]),
    # no numbers
    "rank": ({**PERSON, "RANK": "first"}, ["RANK=first", "whole number"]),
    "size": ({**TORCHRUN, "WORLD_SIZE": "1.5"}, ["WORLD_SIZE=1.5", "whole number"]),
    "port": ({**PERSON, "MASTER_PORT": "http"}, ["MASTER_PORT=http", "whole number"]),
    "restarts": ({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "x"}, ["TORCHELASTIC_RESTART_COUNT=x"]),
    "of Open MPI": ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "many"}, ["OMPI_COMM_WORLD_SIZE=many"]),
    "of horovodrun": ({**HOROVODRUN, "HOROVOD_SIZE": "all"}, ["HOROVOD_SIZE=all"]),
    "of srun": ({**SRUN, "SLURM_NTASKS": "2-4"}, ["SLURM_NTASKS=2-4"]),
    "tasks": ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3(x2"}, ["SLURM_STEP_TASKS_PER_NODE=3(x2", "2(x3),1"]),
    # contradictions
    "too high a rank": ({**PERSON, "RANK": "3"}, ["rank 3", "world size 3"]),
    "negative": ({**PERSON, "RANK": "-1"}, ["rank -1"]),
    "local above world": ({**PERSON, "LOCAL_WORLD_SIZE": "4"}, ["local world size 4", "world size 3"]),
    "too high a local rank": ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "4"}, ["local rank 4"]),
    "too high a node": ({**SRUN, "SLURM_NODEID": "2"}, ["SLURM_NODEID=2", "2 nodes"]),
    "negative node": ({**SRUN, "SLURM_NODEID": "-1"}, ["SLURM_NODEID=-1"]),
    # a person's variable beside srun's or mpirun's set
    "another size": ({**SRUN, "WORLD_SIZE": "8"}, ["WORLD_SIZE=8", "srun set 6", "--ntasks=8", "unset WORLD_SIZE"]),
    "another rank": ({**OPEN_MPI, "RANK": "0"}, ["RANK=0", "mpirun set 2", "unset RANK"]),
    "another local rank": ({**MPICH, "LOCAL_RANK": "0"}, ["LOCAL_RANK=0", "mpirun set 3"]),
    "another local size": ({**SRUN, "LOCAL_WORLD_SIZE": "6"}, ["LOCAL_WORLD_SIZE=6", "srun set 3"]),
    # the mistake of Slurm scripts for torchrun
    "a torchrun for each task": (
        {**SRUN, **TORCHRUN},
        ["srun started 3 tasks on a node", "SLURM_STEP_TASKS_PER_NODE=3(x2)", "--ntasks-per-node=1"],
    ),
}


@pytest.mark.parametrize("case", WRONG_ENVIRONMENTS)
def test_an_environment_that_cannot_be_meant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str) -> None:
    """Never half of one launcher and half of another: one line with the variable, what is wrong, and the fix."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(slurm, "addresses_of", lambda _: ["10.0.0.1"])
    environment, fragments = WRONG_ENVIRONMENTS[case]
    with pytest.raises(UsageError) as caught:
        rank_info_from_environment(environment)
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_environment_at_the_command_line(typed: Any) -> None:
    """Status 2 and that line."""
    shown = typed("train digits", RANK="0")
    assert (shown.status, shown.out) == (2, "")
    assert "the environment has RANK but not" in shown.line


def test_four_variables_between_hosts() -> None:
    """They do not say which ranks share a host: refused, with what to set."""
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}
    with pytest.raises(UsageError, match=r"but not LOCAL_RANK, LOCAL_WORLD_SIZE: .*set both"):
        rank_info_from_environment(environment)


def test_four_variables_at_the_command_line(cli: Cli, tmp_path: Path) -> None:
    """Two ranks that are started by hand with torch's own four train together."""
    words = ("train", "digits", "--layout", "ddp", "--steps", 2, "--out", "out", "--save-every", 0)
    done = cli.on_ranks(tmp_path, *words, size=2, LOCAL_RANK="", LOCAL_WORLD_SIZE="", TORCHELASTIC_RUN_ID="")
    assert done.status == 0, done.err
    assert "2 on cpu" in done.out


def test_one_rank_speaks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is wrong on every rank is told once, under every launcher."""
    names = {"torchrun": "RANK", "Open MPI": "OMPI_COMM_WORLD_RANK", "MPICH": "PMI_RANK", "srun": "SLURM_PROCID"}
    names["horovodrun"] = "HOROVOD_RANK"
    for case, name in names.items():
        with monkeypatch.context() as patch:
            for variable, value in FACTS[case][0].items():
                patch.setenv(variable, value)
            said: list[bool] = []
            for rank in range(2):
                patch.setenv(name, str(rank))
                said.append(is_reporting_rank())
            assert said == [True, False]


def test_somebody_speaks_of_a_variable_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """RANK=3, exported in a batch script, is there on every rank of srun: one of them has to say it."""
    for variable, value in {**SRUN, "RANK": "3"}.items():
        monkeypatch.setenv(variable, value)
    said: list[bool] = []
    for rank in range(6):
        monkeypatch.setenv("SLURM_PROCID", str(rank))
        said.append(is_reporting_rank())
    assert sum(said) == 1


@pytest.mark.parametrize("environment", [{"RANK": "1"}, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}], ids=str)
def test_half_a_set_is_told_whatever_its_rank(
    typed: Any, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    """Somebody types this on a second terminal and forgets the port: nobody else can tell them."""
    monkeypatch.setattr(cli, "_REPORT_SECONDS", 0.0)
    shown = typed("train digits", **environment)
    assert shown.status == 2
    assert "MASTER_PORT" in shown.line


def test_ranks_of_one_host_meet_over_a_file_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the launcher says nothing: no port is opened; the same file for all ranks of one start, nobody else's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = {
        str(rank): rank_info_from_environment({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": str(rank)}) for rank in range(4)
    }
    [path] = {as_path(info.rendezvous_url) for info in found.values() if info is not None}
    assert path.parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getppid", lambda: os.getpid())
    other = rank_info_from_environment(OPEN_MPI)
    assert other is not None
    assert as_path(other.rendezvous_url) != path


def test_a_folder_of_somebody_else_is_not_trusted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Others may write into /tmp too."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"everyrank-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="set TMPDIR"):
        rank_info_from_environment(OPEN_MPI)


def test_ranks_of_several_hosts_meet_at_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a port of the job and step; MASTER_ADDR and MASTER_PORT change it; mpirun does not say which host is first."""
    monkeypatch.setattr(slurm, "addresses_of", lambda _: ["10.0.0.1"])

    def where(environment: dict[str, str]) -> str:
        info = rank_info_from_environment(environment)
        assert info is not None
        assert info.is_store_master == (info.rank == 0)
        return info.rendezvous_url

    default = where(SRUN)
    assert default.startswith("tcp://n01:")
    assert where({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}) == default
    assert where({**SRUN, "SLURM_STEP_ID": "1"}) != default
    assert where({**SRUN, "SLURM_JOB_ID": "8"}) != default
    assert where({**SRUN, "MASTER_ADDR": "n9", "MASTER_PORT": "1234"}) == "tcp://n9:1234"
    across = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
    assert where(across) == ""
    assert where({**across, "MASTER_ADDR": "n9", "MASTER_PORT": "1234"}) == "tcp://n9:1234"


def test_torchruns_agent_has_the_store_open() -> None:
    """A rank 0 that opened it again would find the port in use; and a restart is counted."""
    first = rank_info_from_environment({**TORCHRUN, "RANK": "0", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert first is not None
    assert (first.is_store_master, first.restart_count, first.rendezvous_url) == (False, 2, "tcp://127.0.0.1:29500")
    person = rank_info_from_environment(PERSON)
    assert person is not None
    assert person.is_store_master


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[07-09,12],login1", "n07"),
        ("n[1]", "n1"),
        ("gpu-a,gpu-b", "gpu-a"),
        ("n[3,5]-ib", "n3-ib"),
        ("rack1n[01-04],rack2n[01-04]", "rack1n01"),
        ("", ""),
    ],
)
def test_the_first_of_slurms_hosts(nodes: str, first: str) -> None:
    """Zeros in front are part of the name."""
    assert first_host(nodes) == first


@pytest.mark.parametrize(("text", "counts"), [("2", [2]), ("2(x3),1", [2, 2, 2, 1]), ("4,2(x2)", [4, 2, 2])])
def test_the_tasks_of_slurms_nodes(text: str, counts: list[int]) -> None:
    """One number for each node, in order."""
    assert tasks_per_node(text) == counts


# --- the mistakes people make with Slurm

GPUS = {"SLURM_GPUS_ON_NODE": "4"}

ONE_TASK_A_NODE = {**SRUN, "SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1"}

ONE_TASK_A_NODE |= {"SLURM_LOCALID": "0"}

MISTAKES: dict[str, tuple[str, dict[str, str], list[str]]] = {
    "in an allocation without srun": ("", JOB, ["Slurm job 7", "6 tasks on 2 nodes", "--launcher slurm", "srun"]),
    "in one of several tasks on one node": ("", {**JOB, "SLURM_NNODES": "1"}, ["6 tasks on 1 node,"]),
    "one task a node, ranks counted for each GPU": (
        "--processes 8",
        ONE_TASK_A_NODE,
        ["--processes 8", "one task on each of 2 nodes", "srun --ntasks-per-node=4"],
    ),
    "GPUs that would be idle": (
        "",
        {**ONE_TASK_A_NODE, **GPUS},
        ["1 task on a node with 4 GPUs", "3 would be idle", "srun --ntasks-per-node=4", "--processes 2"],
    ),
    "another number than srun's": (
        "--processes 4",
        SRUN,
        ["--processes 4", "slurm started 6", "leave --processes out"],
    ),
    "a launcher in a launcher": ("--launcher slurm", SRUN, ["--launcher slurm", "slurm has already started"]),
    "torchrun in torchrun": ("--launcher torchrun", TORCHRUN, ["--launcher torchrun", "torchrun has already started"]),
    "nodes": ("--launcher slurm --nodes two", JOB, ["--nodes two", "a number"]),
    "no number of nodes": ("--launcher slurm", {**JOB, "SLURM_NNODES": "two"}, ["SLURM_NNODES=two"]),
    "no number of nodes in srun": ("", {**SRUN, "SLURM_NNODES": "two"}, ["SLURM_NNODES=two"]),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_with_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str) -> None:
    """Recognised before anything starts, with one line and the fix."""
    words, environment, fragments = MISTAKES[case]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(slurm, "addresses_of", lambda _: ["10.0.0.1"])
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as caught:
        launched(*words.split())
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "layout"), [("--processes 2", None), ("--device cpu", None), ("", parse_layout("single"))]
)
def test_one_task_on_a_node_may_be_meant(monkeypatch: pytest.MonkeyPatch, words: str, layout: Layout | None) -> None:
    """Who says so is not refused."""
    monkeypatch.setattr(slurm, "addresses_of", lambda _: ["10.0.0.1"])
    for name, value in {**ONE_TASK_A_NODE, **GPUS}.items():
        monkeypatch.setenv(name, value)
    assert launched(*words.split(), layout=layout).processes == 2


ALLOCATIONS: dict[str, tuple[Launch, dict[str, str], list[str]]] = {
    "more ranks than tasks": (
        Launch("slurm", 8, nodes=2),
        {"SLURM_NNODES": "2", "SLURM_NTASKS": "4"},
        ["--processes 8", "SLURM_NTASKS=4", "--processes 4", "--ntasks=8"],
    ),
    "one task a node": (
        Launch("slurm", 8, nodes=2),
        {"SLURM_NNODES": "2", "SLURM_NTASKS": "2"},
        ["one task on each of its 2 nodes", "8 ranks", "--ntasks-per-node=4", "--per-node spawn"],
    ),
    "other nodes": (
        Launch("slurm", 4, nodes=4),
        {"SLURM_NNODES": "2", "SLURM_NTASKS": "4"},
        ["--nodes 4", "SLURM_NNODES=2", "leave --nodes out"],
    ),
}


@pytest.mark.parametrize("case", ALLOCATIONS)
def test_an_allocation_of_other_tasks_than_asked_for(case: str) -> None:
    """One line and both ways out."""
    launch, environment, fragments = ALLOCATIONS[case]
    with pytest.raises(UsageError) as caught:
        check_allocation(launch, environment)
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("launch", "environment"),
    [
        (Launch("slurm", 4, nodes=2), {"SLURM_NNODES": "2", "SLURM_NTASKS": "4"}),
        (
            Launch("slurm", 8, nodes=2, options=slurm.SlurmOptions("torchrun")),
            {"SLURM_NNODES": "2", "SLURM_NTASKS": "2"},
        ),
        (Launch("slurm", 8, nodes=2), {"SLURM_NNODES": "2"}),  # allocated by GPUs: srun may start any number
        (Launch("slurm", 1), {}),
    ],
)
def test_an_allocation_that_fits(launch: Launch, environment: dict[str, str]) -> None:
    """Nothing is said against it."""
    said: list[str] = []
    try:
        check_allocation(launch, environment)
    except EveryrankError as error:
        said.append(str(error))
    assert said == []


def test_the_allocation_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """--launcher slurm alone takes its nodes and tasks; --launcher spawn stays on this node."""
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    launch = launched("--launcher", "slurm")
    assert (launch.nodes, launch.processes) == (2, 6)
    launch = launched("--launcher", "spawn", "--device", "cpu")
    assert (launch.nodes, launch.processes) == (1, 2)


def test_a_node_task_becomes_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one task for each node: torchrun knows which node this is, and where the first one is."""
    called: list[list[str]] = []

    class ReplacedError(Exception):
        """exec never returns."""

    def replace(_: str, command: list[str]) -> None:
        called.append(command)
        raise ReplacedError

    monkeypatch.setattr(os, "execv", replace)
    monkeypatch.setattr(slurm, "addresses_of", lambda _: ["10.0.0.1"])
    monkeypatch.setattr(sys, "argv", ["node", "torchrun", "4", "a folder"])
    for name, value in {**ONE_TASK_A_NODE, "MASTER_PORT": "1234"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ReplacedError):
        node.main()
    [command] = called
    words = ["--nnodes=2", "--node-rank=1", "--master-addr=n01", "--master-port=1234", "--nproc-per-node=4"]
    words += ["--log-dir=a folder"]
    python = [sys.executable, "-P", "-m"]
    assert command[:4] == [*python, "torch.distributed.run"]
    assert command[4:] == [*words, "--no-python", *python, "everyrank.launch.worker", "a folder"]


@pytest.mark.parametrize(("codes", "status"), [([0, 0, 0], 0), ([0, 3, None], 3), ([None, -9, None], 137)])
def test_a_node_task_starts_its_ranks(monkeypatch: pytest.MonkeyPatch, codes: list[int | None], status: int) -> None:
    """rank = node x processes + local rank; a rank that fails ends the others, and its status is the task's."""
    started: list[list[str]] = []
    killed: list[int] = []

    class Process:
        def __init__(self, command: list[str]) -> None:
            self.number = len(started)
            self.returncode = codes[self.number]
            started.append(command)

        def poll(self) -> int | None:
            return self.returncode

        def kill(self) -> None:
            killed.append(self.number)

    monkeypatch.setattr(node.subprocess, "Popen", Process)
    monkeypatch.setattr(node.time, "sleep", lambda _: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(slurm, "addresses_of", lambda _: ["10.0.0.1"])
    monkeypatch.setattr(sys, "argv", ["node", "spawn", "3", "JOB"])
    monkeypatch.setattr(sys, "platform", "darwin")  # without a fork server
    for name, value in ONE_TASK_A_NODE.items():
        monkeypatch.setenv(name, value)
    assert node.main() == status
    assert [command[-3:] for command in started] == [["3", "0", "3"], ["4", "1", "3"], ["5", "2", "3"]]
    assert killed == ([] if status == 0 else [0, 1, 2])
