"""Environments of each launcher: which variables a rank reads, and mistakes with Slurm."""

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
    rank_info,
    rank_info_from_environment,
    slurm,
)
from everyrank.launch.slurm import check_allocation, first_host, tasks_per_node
from everyrank.layout import Layout, parse_layout
from launching import HOROVODRUN, MPICH, OPEN_MPI, SLURM_JOB, SRUN
from processes import Cli, rank_environment

TORCHRUN = {**rank_environment(1, "29500"), "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}

STARTED_BY_HAND = rank_environment(0, "29501", 3)


def launch_from_args(*args: str, layout: Layout | None = None) -> Launch:
    """Return the `Launch` of these arguments in the current environment."""
    parser = argparse.ArgumentParser()
    add_launching(parser)
    parser.set_defaults(workers=0)
    return launch_of(parser.parse_args(args), layout=layout)


def path_of_file_url(url: str) -> Path:
    """Return the path of a file:// URL."""
    assert urlparse(url).scheme == "file", url
    return Path(urlparse(url).path)


# --- which launcher started this rank

RANK_ENVIRONMENTS: dict[str, tuple[dict[str, str], tuple[str, int, int, int, int]]] = {
    # environment, (started by, rank, size, local rank, local size)
    "torchrun": (TORCHRUN, ("torchrun", 1, 2, 1, 2)),
    "by hand": (STARTED_BY_HAND, ("env", 0, 3, 0, 3)),
    "Open MPI": (OPEN_MPI, ("mpi", 2, 4, 2, 4)),
    "MPICH": (MPICH, ("mpi", 3, 5, 3, 5)),
    "srun": (SRUN, ("slurm", 4, 6, 1, 3)),
    "horovodrun": (HOROVODRUN, ("horovodrun", 1, 4, 1, 2)),
    # only the four variables of torch, with all ranks on one host
    "four variables, by hand": ({k: v for k, v in STARTED_BY_HAND.items() if "LOCAL" not in k}, ("env", 0, 3, 0, 3)),
    "four variables, one rank": (
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"},
        ("env", 0, 1, 0, 1),
    ),
    "four variables, by hand in srun": (
        {**SRUN, "RANK": "4", "WORLD_SIZE": "6", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
        ("slurm", 4, 6, 1, 3),
    ),
    # nested launchers
    "torchrun in srun": ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1(x2)", **TORCHRUN}, ("torchrun", 1, 2, 1, 2)),
    "torchrun in mpirun": ({**OPEN_MPI, **TORCHRUN}, ("torchrun", 1, 2, 1, 2)),
    "torchrun in horovodrun": ({**HOROVODRUN, **TORCHRUN}, ("torchrun", 1, 2, 1, 2)),
    "horovodrun in mpirun": ({**OPEN_MPI, **HOROVODRUN}, ("horovodrun", 1, 4, 1, 2)),
    "by hand in srun": ({**SRUN, **STARTED_BY_HAND}, ("env", 0, 3, 0, 3)),
    "by hand in mpirun": ({**MPICH, **STARTED_BY_HAND}, ("env", 0, 3, 0, 3)),
    "mpirun in srun": ({**SRUN, **OPEN_MPI}, ("mpi", 2, 4, 2, 4)),
    "mpirun of MPICH in srun": ({**SRUN, **MPICH}, ("mpi", 3, 5, 3, 5)),
    "all of them": (
        {**SRUN, **MPICH, **OPEN_MPI, **TORCHRUN, "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
        ("torchrun", 1, 2, 1, 2),
    ),
    # srun --mpi=pmi2 sets two of MPICH's four variables, without mpirun
    "srun --mpi=pmi2": ({**SRUN, "PMI_RANK": "4", "PMI_SIZE": "6"}, ("slurm", 4, 6, 1, 3)),
    "srun, uneven": (
        {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4,2", "SLURM_PROCID": "5"},
        ("slurm", 5, 6, 1, 2),
    ),
    "same RANK and WORLD_SIZE as srun": ({**SRUN, "RANK": "4", "WORLD_SIZE": "6"}, ("slurm", 4, 6, 1, 3)),
}


@pytest.mark.parametrize("case", RANK_ENVIRONMENTS)
def test_rank_info_comes_from_the_innermost_launcher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str
) -> None:
    """The full set of one launcher is read, and no variable of another launcher."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(slurm, "addresses_of", lambda _: ["10.0.0.1"])
    environment, expected = RANK_ENVIRONMENTS[case]
    info = rank_info_from_environment(environment)
    assert info is not None
    assert (info.started_by, info.rank, info.size, info.local_rank, info.local_size) == expected


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"LOCAL_RANK": "0"},
        {"MASTER_ADDR": "n0", "MASTER_PORT": "29500"},
        SLURM_JOB,  # a batch script or a shell of salloc is not a rank
        {**SLURM_JOB, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
    ],
    ids=str,
)
def test_leftover_variables_do_not_make_a_rank(environment: dict[str, str]) -> None:
    """Some variables of a launcher or of a batch script are not enough: this process is not a rank."""
    assert rank_info_from_environment(environment) is None


def test_shell_of_salloc_is_not_a_rank() -> None:
    """With use_interactive_step, salloc's shell is a step of one task with the id 4294967290.

    SLURM_NTASKS is still that of the allocation. If this shell were a rank, it would wait for ranks that do not exist.
    """
    environment = {
        **SLURM_JOB,
        "SLURM_STEP_ID": "4294967290",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        "SLURM_STEP_NODELIST": "n01",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
    }
    assert rank_info_from_environment({**environment, "MASTER_ADDR": "n01"}) is None


def test_rendezvous_of_horovodrun_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is horovodrun's server, unless MASTER_ADDR and MASTER_PORT are set."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with_master_address = {**HOROVODRUN, "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}
    infos = {
        url: rank_info_from_environment(variables)
        for url, variables in (("http", HOROVODRUN), ("tcp", with_master_address))
    }
    assert {info.rendezvous_url for info in infos.values() if info} == {"http://10.0.0.1:4321", "tcp://n0:29500"}


WRONG_ENVIRONMENTS: dict[str, tuple[dict[str, str], list[str]]] = {
    # an incomplete set
    "only RANK": ({"RANK": "0"}, ["RANK", "WORLD_SIZE", "MASTER_PORT", "torchrun", "unset RANK"]),
    "only WORLD_SIZE": ({"WORLD_SIZE": "4"}, ["WORLD_SIZE", "RANK", "unset WORLD_SIZE"]),
    "no port": ({k: v for k, v in STARTED_BY_HAND.items() if k != "MASTER_PORT"}, ["MASTER_PORT", "torchrun"]),
    "empty": ({**STARTED_BY_HAND, "LOCAL_RANK": ""}, ["not LOCAL_RANK"]),
    "part of Open MPI's": ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, ["OMPI_COMM_WORLD_LOCAL_RANK"]),
    "part of MPICH's": ({"PMI_RANK": "1", "PMI_SIZE": "4"}, ["MPI_LOCALRANKID"]),
    "part of horovodrun's": (
        {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4"},
        ["HOROVOD_LOCAL_RANK", "start with horovodrun"],
    ),
    # elastic training is unsupported
    "elastic horovodrun": ({**HOROVODRUN, "HOROVOD_ELASTIC": "1"}, ["HOROVOD_ELASTIC=1", "without --min-np"]),
    # values that are not numbers
    "RANK is no number": ({**STARTED_BY_HAND, "RANK": "first"}, ["RANK=first", "whole number"]),
    "WORLD_SIZE is no whole number": ({**TORCHRUN, "WORLD_SIZE": "1.5"}, ["WORLD_SIZE=1.5", "whole number"]),
    "MASTER_PORT is no number": ({**STARTED_BY_HAND, "MASTER_PORT": "http"}, ["MASTER_PORT=http", "whole number"]),
    "TORCHELASTIC_RESTART_COUNT is no number": (
        {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "x"},
        ["TORCHELASTIC_RESTART_COUNT=x"],
    ),
    "Open MPI: size is no number": ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "many"}, ["OMPI_COMM_WORLD_SIZE=many"]),
    "horovodrun: size is no number": ({**HOROVODRUN, "HOROVOD_SIZE": "all"}, ["HOROVOD_SIZE=all"]),
    "srun: size is no number": ({**SRUN, "SLURM_NTASKS": "2-4"}, ["SLURM_NTASKS=2-4"]),
    "srun: malformed tasks per node": (
        {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3(x2"},
        ["SLURM_STEP_TASKS_PER_NODE=3(x2", "2(x3),1"],
    ),
    # contradictions
    "too high a rank": ({**STARTED_BY_HAND, "RANK": "3"}, ["rank 3", "world size 3"]),
    "negative": ({**STARTED_BY_HAND, "RANK": "-1"}, ["rank -1"]),
    "local world size above world size": (
        {**STARTED_BY_HAND, "LOCAL_WORLD_SIZE": "4"},
        ["local world size 4", "world size 3"],
    ),
    "too high a local rank": ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "4"}, ["local rank 4"]),
    "too high a node": ({**SRUN, "SLURM_NODEID": "2"}, ["SLURM_NODEID=2", "2 nodes"]),
    "negative node": ({**SRUN, "SLURM_NODEID": "-1"}, ["SLURM_NODEID=-1"]),
    # a variable of the user that contradicts those of srun or mpirun
    "WORLD_SIZE differs from srun": (
        {**SRUN, "WORLD_SIZE": "8"},
        ["WORLD_SIZE=8", "srun set 6", "--ntasks=8", "unset WORLD_SIZE"],
    ),
    "WORLD_SIZE differs from mpirun": (
        {**OPEN_MPI, "WORLD_SIZE": "8"},
        ["mpirun set 4", "start 8 ranks (mpirun -np 8), or unset WORLD_SIZE"],
    ),
    "RANK differs from mpirun": ({**OPEN_MPI, "RANK": "0"}, ["RANK=0", "mpirun set 2", "unset RANK"]),
    "LOCAL_RANK differs from mpirun": ({**MPICH, "LOCAL_RANK": "0"}, ["LOCAL_RANK=0", "mpirun set 3"]),
    "LOCAL_WORLD_SIZE differs from srun": ({**SRUN, "LOCAL_WORLD_SIZE": "6"}, ["LOCAL_WORLD_SIZE=6", "srun set 3"]),
    # a common mistake of Slurm scripts for torchrun
    "a torchrun for each task": (
        {**SRUN, **TORCHRUN},
        ["srun started 3 tasks on a node", "SLURM_STEP_TASKS_PER_NODE=3(x2)", "--ntasks-per-node=1"],
    ),
}


@pytest.mark.parametrize("case", WRONG_ENVIRONMENTS)
def test_inconsistent_environment_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str) -> None:
    """Variables of two launchers are never mixed. The error is one line with the variable, the reason and the fix."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(slurm, "addresses_of", lambda _: ["10.0.0.1"])
    environment, fragments = WRONG_ENVIRONMENTS[case]
    with pytest.raises(UsageError) as error_info:
        rank_info_from_environment(environment)
    for fragment in fragments:
        assert fragment in str(error_info.value)
    assert "\n" not in str(error_info.value)


def test_train_refuses_an_incomplete_environment(run_main: Any) -> None:
    """It exits with status 2 and one line."""
    result = run_main("train digits", RANK="0")
    assert (result.status, result.out) == (2, "")
    assert "the environment has RANK but not" in result.line


def test_four_variables_of_torch_are_refused_across_hosts() -> None:
    """They do not tell which ranks share a host. The error names the variables to set."""
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}
    with pytest.raises(UsageError, match=r"but not LOCAL_RANK, LOCAL_WORLD_SIZE: .*set both"):
        rank_info_from_environment(environment)


def test_ranks_started_with_four_variables_of_torch_train_together(cli: Cli, tmp_path: Path) -> None:
    """Two ranks are started by hand on one host."""
    args = ("train", "digits", "--layout", "ddp", "--steps", 2, "--out", "out", "--save-every", 0)
    result = cli.on_ranks(tmp_path, *args, size=2, LOCAL_RANK="", LOCAL_WORLD_SIZE="", TORCHELASTIC_RUN_ID="")
    assert result.status == 0, result.err
    assert "2 on cpu" in result.out


def test_only_rank_0_reports_errors_under_each_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that all ranks have is printed once."""
    rank_variables = {
        "torchrun": "RANK",
        "Open MPI": "OMPI_COMM_WORLD_RANK",
        "MPICH": "PMI_RANK",
        "srun": "SLURM_PROCID",
    }
    rank_variables["horovodrun"] = "HOROVOD_RANK"
    for case, rank_variable in rank_variables.items():
        with monkeypatch.context() as environment_patch:
            for variable, value in RANK_ENVIRONMENTS[case][0].items():
                environment_patch.setenv(variable, value)
            are_reporting: list[bool] = []
            for rank in range(2):
                environment_patch.setenv(rank_variable, str(rank))
                are_reporting.append(is_reporting_rank())
            assert are_reporting == [True, False]


@pytest.mark.parametrize(
    ("num_torchruns", "tasks_and_ranks", "expected"),
    [
        # the c10d rendezvous of torchrun gives the lowest ranks to the node that comes first
        ("2", ((0, 2), (0, 3), (1, 0), (1, 1)), [False, False, True, False]),
        # each task of srun is a torchrun --standalone
        ("1", ((0, 0), (0, 1), (1, 0), (1, 1)), [True, False, False, False]),
    ],
)
def test_one_rank_of_torchrun_under_srun_reports(
    monkeypatch: pytest.MonkeyPatch, num_torchruns: str, tasks_and_ranks: Any, expected: list[bool]
) -> None:
    """It is rank 0 of torchrun, and of the first torchrun if each one is a job of its own."""
    for variable, value in {**SRUN, **TORCHRUN, "GROUP_WORLD_SIZE": num_torchruns}.items():
        monkeypatch.setenv(variable, value)
    are_reporting: list[bool] = []
    for task, rank in tasks_and_ranks:
        monkeypatch.setenv("SLURM_PROCID", str(task))
        monkeypatch.setenv("RANK", str(rank))
        are_reporting.append(is_reporting_rank())
    assert are_reporting == expected


def test_one_rank_reports_a_leftover_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """RANK=3, exported in a batch script, reaches every rank of srun. Exactly one rank reports it."""
    for variable, value in {**SRUN, "RANK": "3"}.items():
        monkeypatch.setenv(variable, value)
    are_reporting: list[bool] = []
    for rank in range(6):
        monkeypatch.setenv("SLURM_PROCID", str(rank))
        are_reporting.append(is_reporting_rank())
    assert sum(are_reporting) == 1


@pytest.mark.parametrize("environment", [{"RANK": "1"}, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}], ids=str)
def test_incomplete_set_is_reported_by_any_rank(
    run_main: Any, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    """A user starts rank 1 in a second terminal and forgets the port. No other rank can report it."""
    monkeypatch.setattr(cli, "_REPORT_SECONDS", 0.0)
    result = run_main("train digits", **environment)
    assert result.status == 2
    assert "MASTER_PORT" in result.line


def test_rendezvous_of_one_host_is_a_private_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """mpirun sets no address, so the ranks meet in a file and open no port.

    All ranks of one job share a file that no other job uses.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    infos = {
        str(rank): rank_info_from_environment({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": str(rank)}) for rank in range(4)
    }
    [path] = {path_of_file_url(info.rendezvous_url) for info in infos.values() if info is not None}
    assert path.parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(rank_info, "launcher_process", lambda _: "a later one")
    info_of_next_job = rank_info_from_environment(OPEN_MPI)
    assert info_of_next_job is not None
    assert path_of_file_url(info_of_next_job.rendezvous_url) != path


def test_starts_of_mpich_in_one_slurm_job_have_different_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A batch script or an interactive step may run mpirun several times. Tasks of srun are one start of their step."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def path_of(launcher: str, environment: dict[str, str]) -> Path:
        monkeypatch.setattr(rank_info, "launcher_process", lambda _: launcher)
        info = rank_info_from_environment(environment)
        assert info is not None
        return path_of_file_url(info.rendezvous_url)

    step = {**SRUN, "SLURM_NODEID": "0", "SLURM_PROCID": "1", "SLURM_STEP_TASKS_PER_NODE": "6"}
    for slurm_variables in (SLURM_JOB, step):
        environment = slurm_variables | MPICH
        assert path_of("1 10", environment) == path_of("1 10", environment) != path_of("2 20", environment)
    step |= {"SLURM_NTASKS": "6"}
    assert path_of("1 10", step) == path_of("2 20", step) != path_of("1 10", {**step, "SLURM_STEP_ID": "1"})


@pytest.mark.parametrize("address", ["127.0.0.1", "", "n01"])
def test_ranks_of_one_host_need_no_complete_master_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str
) -> None:
    """Without a port, MASTER_ADDR is not enough to meet, and not needed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    info = rank_info_from_environment(MPICH | {"MASTER_ADDR": address})
    assert info is not None
    assert path_of_file_url(info.rendezvous_url).parent.parent == tmp_path
    complete = rank_info_from_environment(MPICH | {"MASTER_ADDR": "n01", "MASTER_PORT": "29500"})
    assert complete is not None
    assert complete.rendezvous_url == "tcp://n01:29500"


def test_rendezvous_folder_that_others_may_control_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other users may also write into /tmp."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    folder = tmp_path / f"everyrank-{os.getuid()}"
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="this is a symlink; set TMPDIR"):
        rank_info_from_environment(OPEN_MPI)
    other_user = os.getuid() + 1
    (tmp_path / f"everyrank-{other_user}").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: other_user)
    with pytest.raises(UsageError, match="this is a folder of another user; set TMPDIR"):
        rank_info_from_environment(OPEN_MPI)


def test_rendezvous_of_several_hosts_is_the_first_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port depends on job and step.

    MASTER_ADDR and MASTER_PORT override host and port. mpirun names no host, so without them the URL is "".
    """
    monkeypatch.setattr(slurm, "addresses_of", lambda _: ["10.0.0.1"])

    def rendezvous_of(environment: dict[str, str]) -> str:
        info = rank_info_from_environment(environment)
        assert info is not None
        assert info.is_store_master == (info.rank == 0)
        return info.rendezvous_url

    default = rendezvous_of(SRUN)
    assert default.startswith("tcp://n01:")
    assert rendezvous_of({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}) == default
    assert rendezvous_of({**SRUN, "SLURM_STEP_ID": "1"}) != default
    assert rendezvous_of({**SRUN, "SLURM_JOB_ID": "8"}) != default
    assert rendezvous_of({**SRUN, "MASTER_ADDR": "n9", "MASTER_PORT": "1234"}) == "tcp://n9:1234"
    on_several_hosts = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
    assert rendezvous_of(on_several_hosts) == ""
    assert rendezvous_of({**on_several_hosts, "MASTER_ADDR": "n9", "MASTER_PORT": "1234"}) == "tcp://n9:1234"


def test_rank_0_of_torchrun_does_not_open_the_store() -> None:
    """The agent of torchrun has opened it, so its port is in use. The number of restarts is read too."""
    torchrun_info = rank_info_from_environment({**TORCHRUN, "RANK": "0", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert torchrun_info is not None
    assert (torchrun_info.is_store_master, torchrun_info.restart_count, torchrun_info.rendezvous_url) == (
        False,
        2,
        "tcp://127.0.0.1:29500",
    )
    info_started_by_hand = rank_info_from_environment(STARTED_BY_HAND)
    assert info_started_by_hand is not None
    assert info_started_by_hand.is_store_master


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
def test_first_host_of_a_slurm_node_list(nodes: str, first: str) -> None:
    """Leading zeros are part of the name."""
    assert first_host(nodes) == first


@pytest.mark.parametrize(("text", "counts"), [("2", [2]), ("2(x3),1", [2, 2, 2, 1]), ("4,2(x2)", [4, 2, 2])])
def test_tasks_per_node_are_parsed_from_slurm(text: str, counts: list[int]) -> None:
    """The result has one number for each node, in order."""
    assert tasks_per_node(text) == counts


# --- common mistakes with Slurm

NODE_GPUS = {"SLURM_GPUS_ON_NODE": "4"}

ONE_TASK_PER_NODE = {**SRUN, "SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1"}

ONE_TASK_PER_NODE |= {"SLURM_LOCALID": "0"}

LAUNCH_MISTAKES: dict[str, tuple[str, dict[str, str], list[str]]] = {
    "in an allocation without srun": ("", SLURM_JOB, ["Slurm job 7", "6 tasks on 2 nodes", "--launcher slurm", "srun"]),
    "in an allocation with one node, without srun": ("", {**SLURM_JOB, "SLURM_NNODES": "1"}, ["6 tasks on 1 node,"]),
    "one task a node, but more --processes": (
        "--processes 8",
        ONE_TASK_PER_NODE,
        ["--processes 8", "one task on each of 2 nodes", "srun --ntasks-per-node=4"],
    ),
    "GPUs that would be idle": (
        "",
        {**ONE_TASK_PER_NODE, **NODE_GPUS},
        ["1 task on a node with 4 GPUs", "3 would be idle", "srun --ntasks-per-node=4", "--processes 2"],
    ),
    "--processes differs from srun": (
        "--processes 4",
        SRUN,
        ["--processes 4", "slurm started 6", "leave --processes out"],
    ),
    "a launcher in a launcher": ("--launcher slurm", SRUN, ["--launcher slurm", "slurm has already started"]),
    "torchrun in torchrun": ("--launcher torchrun", TORCHRUN, ["--launcher torchrun", "torchrun has already started"]),
    "--nodes is no number": ("--launcher slurm --nodes two", SLURM_JOB, ["--nodes two", "a number"]),
    "SLURM_NNODES is no number": ("--launcher slurm", {**SLURM_JOB, "SLURM_NNODES": "two"}, ["SLURM_NNODES=two"]),
    "SLURM_NNODES is no number, in srun": ("", {**SRUN, "SLURM_NNODES": "two"}, ["SLURM_NNODES=two"]),
}


@pytest.mark.parametrize("case", LAUNCH_MISTAKES)
def test_mistake_is_refused_before_a_process_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str) -> None:
    """It is found before a process starts. The error is one line with the fix."""
    command_text, environment, fragments = LAUNCH_MISTAKES[case]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(slurm, "addresses_of", lambda _: ["10.0.0.1"])
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as error_info:
        launch_from_args(*command_text.split())
    for fragment in fragments:
        assert fragment in str(error_info.value)
    assert "\n" not in str(error_info.value)


@pytest.mark.parametrize(
    ("command_text", "layout"), [("--processes 2", None), ("--device cpu", None), ("", parse_layout("single"))]
)
def test_one_task_per_node_is_accepted_if_requested(
    monkeypatch: pytest.MonkeyPatch, command_text: str, layout: Layout | None
) -> None:
    """--processes, --device or the layout `single` requests it."""
    monkeypatch.setattr(slurm, "addresses_of", lambda _: ["10.0.0.1"])
    for name, value in {**ONE_TASK_PER_NODE, **NODE_GPUS}.items():
        monkeypatch.setenv(name, value)
    assert launch_from_args(*command_text.split(), layout=layout).processes == 2


WRONG_ALLOCATIONS: dict[str, tuple[Launch, dict[str, str], list[str]]] = {
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
    "--nodes differs from the allocation": (
        Launch("slurm", 4, nodes=4),
        {"SLURM_NNODES": "2", "SLURM_NTASKS": "4"},
        ["--nodes 4", "SLURM_NNODES=2", "leave --nodes out"],
    ),
}


@pytest.mark.parametrize("case", WRONG_ALLOCATIONS)
def test_allocation_that_does_not_fit_is_refused(case: str) -> None:
    """The error is one line with the options that fix it."""
    launch, environment, fragments = WRONG_ALLOCATIONS[case]
    with pytest.raises(UsageError) as error_info:
        check_allocation(launch, environment)
    for fragment in fragments:
        assert fragment in str(error_info.value)
    assert "\n" not in str(error_info.value).strip()


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
def test_matching_allocation_is_accepted(launch: Launch, environment: dict[str, str]) -> None:
    errors: list[str] = []
    try:
        check_allocation(launch, environment)
    except EveryrankError as error:
        errors.append(str(error))
    assert errors == []


def test_launcher_slurm_takes_nodes_and_tasks_of_the_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """--launcher spawn stays on this node."""
    for name, value in SLURM_JOB.items():
        monkeypatch.setenv(name, value)
    launch = launch_from_args("--launcher", "slurm")
    assert (launch.nodes, launch.processes) == (2, 6)
    launch = launch_from_args("--launcher", "spawn", "--device", "cpu")
    assert (launch.nodes, launch.processes) == (1, 2)


def test_node_task_execs_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one task for each node. torchrun gets the rank of this node and the address of the first one."""
    commands: list[list[str]] = []

    class ReplacedError(Exception):
        """Raised in place of exec, which never returns."""

    def fake_execv(_: str, command: list[str]) -> None:
        commands.append(command)
        raise ReplacedError

    monkeypatch.setattr(os, "execv", fake_execv)
    monkeypatch.setattr(slurm, "addresses_of", lambda _: ["10.0.0.1"])
    monkeypatch.setattr(sys, "argv", ["node", "torchrun", "4", "a folder"])
    for name, value in {**ONE_TASK_PER_NODE, "MASTER_PORT": "1234"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ReplacedError):
        node.main()
    [command] = commands
    torchrun_args = ["--nnodes=2", "--node-rank=1", "--master-addr=n01", "--master-port=1234", "--nproc-per-node=4"]
    torchrun_args += ["--log-dir=a folder"]
    python = [sys.executable, "-P", "-m"]
    assert command[:4] == [*python, "torch.distributed.run"]
    assert command[4:] == [*torchrun_args, "--no-python", *python, "everyrank.launch.worker", "a folder"]


@pytest.mark.parametrize(("codes", "status"), [([0, 0, 0], 0), ([0, 3, None], 3), ([None, -9, None], 137)])
def test_node_task_starts_its_ranks(monkeypatch: pytest.MonkeyPatch, codes: list[int | None], status: int) -> None:
    """If a rank fails, the task kills all and exits with the status of that rank.

    Rank = node x ranks per node + local rank.
    """
    commands: list[list[str]] = []
    killed_local_ranks: list[int] = []

    class Process:
        def __init__(self, command: list[str]) -> None:
            self.number = len(commands)
            self.returncode = codes[self.number]
            commands.append(command)

        def poll(self) -> int | None:
            return self.returncode

        def kill(self) -> None:
            killed_local_ranks.append(self.number)

    monkeypatch.setattr(node.subprocess, "Popen", Process)
    monkeypatch.setattr(node.time, "sleep", lambda _: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(slurm, "addresses_of", lambda _: ["10.0.0.1"])
    monkeypatch.setattr(sys, "argv", ["node", "spawn", "3", "JOB"])
    monkeypatch.setattr(sys, "platform", "darwin")  # without a fork server
    for name, value in ONE_TASK_PER_NODE.items():
        monkeypatch.setenv(name, value)
    assert node.main() == status
    assert [command[-3:] for command in commands] == [["3", "0", "3"], ["4", "1", "3"], ["5", "2", "3"]]
    assert killed_local_ranks == ([] if status == 0 else [0, 1, 2])
