"""How ranks start: what each launcher is told, what it tells us, where the ranks meet, and the mistakes people make.

The commands and scripts of every launcher are kept in tests/golden/; `UPDATE_GOLDEN=1 pytest tests/test_launch.py`
makes them again. Nothing here needs Slurm, MPI or Ray, and almost nothing starts a process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import urlparse

import pytest
import torch
import torch.distributed as dist

from everyrank import cli
from everyrank.cli import main
from everyrank.commands import doctor as doctor_command
from everyrank.commands.launching import add_launching, is_reporting_rank, launch_of
from everyrank.doctor import launching as doctor
from everyrank.errors import CannotRunError, EveryrankError, RankFailedError, UsageError, WorkloadError
from everyrank.launch import (
    Launch,
    RankInfo,
    hosts,
    mpi,
    node,
    rank_info_from_environment,
    run_ranks,
    slurm,
    spawn,
    torchrun,
)
from everyrank.launch import ray as ray_launcher
from everyrank.launch.hosts import LOOPBACK, check_reachable, choose_interface, local_address_towards, split_endpoint
from everyrank.launch.slurm import BatchScript, check_allocation, first_host, script, tasks_per_node
from everyrank.layout import Layout, parse_layout
from everyrank.world import heartbeat
from everyrank.world.heartbeat import Peer, register_rank, route_to_peers, wait_for_peers
from everyrank.world.rendezvous import open_store
from processes import Forge, by_hand, free_port

GOLDEN = Path(__file__).parent / "golden"
_OF_LAUNCHERS = ("SLURM", "OMPI_", "PMI_", "PMIX_", "MPI_", "MASTER_", "TORCHELASTIC_", "GLOO_", "NCCL_")

TORCHRUN = {**by_hand(1, "29500"), "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
PERSON = by_hand(0, "29501", 3)
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "3", "MPI_LOCALRANKID": "3", "PMI_SIZE": "5", "MPI_LOCALNRANKS": "5"}
JOB = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NTASKS": "6", "SLURM_JOB_NODELIST": "n[01-02]"}
SRUN = {
    **JOB,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[01-02]",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2)",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


class Typed(NamedTuple):
    """How a command ended, and what was said."""

    status: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The only line on stderr."""
        assert "Traceback" not in self.err
        assert self.err.count("\n") == 1, self.err
        assert self.err.startswith("everyrank: ")
        return self.err.removeprefix("everyrank: ").strip()


@pytest.fixture(autouse=True)
def _nobody_started_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests may run in somebody's allocation."""
    for name in [name for name in os.environ if name.startswith(_OF_LAUNCHERS)]:
        monkeypatch.delenv(name)


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """`typed("train digits", SLURM_JOB_ID="7")` in an empty folder, where there is no Slurm, no MPI and no Ray.

    Whoever starts a process fails the test.
    """

    def start(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    def call(*words: str, **variables: str) -> Typed:
        if len(words) == 1:
            words = tuple(shlex.split(words[0]))
        monkeypatch.setattr(sys, "argv", ["everyrank", *words])
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        status = main(words)
        return Typed(status, *capsys.readouterr())

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(mpi, "program", lambda: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(ray_launcher, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda _: None)))
    yield call
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def golden(tmp_path: Path) -> Callable[[str, str], None]:
    """`golden(case, text)`: the text is what tests/golden/<case>.txt says, but for where things are."""

    def compare(case: str, text: str) -> None:
        said = text.replace(str(tmp_path), "DIR").replace(sys.executable, "PYTHON")
        path = GOLDEN / f"{case}.txt"
        if os.environ.get("UPDATE_GOLDEN"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(said, encoding="utf-8")
        assert path.exists(), f"{path}: not there; UPDATE_GOLDEN=1 makes it"
        assert said == path.read_text(encoding="utf-8"), f"not as in {path}; UPDATE_GOLDEN=1 where that is meant"

    return compare


def launched(*words: str, layout: Layout | None = None) -> Launch:
    """What these words come to, in this environment."""
    parser = argparse.ArgumentParser()
    add_launching(parser, default_processes=2)
    parser.set_defaults(workers=0)
    return launch_of(parser.parse_args(words), layout=layout)


def as_path(method: str) -> Path:
    assert urlparse(method).scheme == "file", method
    return Path(urlparse(method).path)


@pytest.fixture
def busy() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


# --- what is imported


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """`trap(*names)`: somebody has left modules of such names in the current folder; `trap()`: those imported since."""
    monkeypatch.chdir(tmp_path)

    def call(*names: str) -> list[str]:
        for name in names:
            mark = tmp_path / f"{name}.imported"
            (tmp_path / f"{name}.py").write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\n")
        return sorted(path.name for path in tmp_path.glob("*.imported"))

    return call


def test_a_rank_imports_nothing_from_the_current_folder(trap: Any) -> None:
    """In /tmp that would be somebody else's code."""
    trap("json", "psutil", "random")
    with contextlib.suppress(RankFailedError):
        run_ranks(Launch(processes=1, timeout_seconds=60), lambda info: info.size)
    assert trap() == []


def test_the_command_line_imports_nothing_more_from_the_current_folder(trap: Any) -> None:
    """`python -m everyrank`, and what torchrun makes of `-m everyrank`: what comes after the package itself."""
    trap("rich", "torch")
    command = [sys.executable, "-m", "everyrank", "doctor", "--timeout", "-1"]
    subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert trap() == []


# --- what would run

TRAIN = "train digits --layout ddp --dry-run "
TWO_NODES = "--nodes 2 --rendezvous n0:29500 "
ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NTASKS": "4"}
DRY_RUNS: dict[str, tuple[str, dict[str, str]]] = {
    "spawn": ("--processes 2", {}),
    "spawn_node_1_of_2": ("--processes 4 --node-rank 1 " + TWO_NODES, {}),
    "spawn_two_nodes": ("--processes 4 " + TWO_NODES, {}),
    "torchrun_two_nodes": ("--launcher torchrun --processes 4 " + TWO_NODES, {}),
    "torchrun_standalone": ("--launcher torchrun --processes 2", {}),
    "torchrun_static": ("--launcher torchrun --processes 4 --node-rank 1 " + TWO_NODES, {}),
    "torchrun_c10d": ("--launcher torchrun --processes 4 --rendezvous-kind c10d " + TWO_NODES, {}),
    "torchrun_elastic": (
        "--launcher torchrun --processes 4 --rendezvous-kind c10d --nodes 1:2 --rendezvous n0:29500 --restarts 3 "
        "--launcher-args '--log-dir \"my logs\"'",
        {},
    ),
    "srun": ("--launcher slurm", ALLOCATION),
    "srun_per_node_spawn": ("--launcher slurm --processes 8 --per-node spawn", ALLOCATION),
    "srun_per_node_torchrun": ("--launcher slurm --processes 8 --per-node torchrun --launcher-args=-v", ALLOCATION),
    "mpirun": ("--launcher mpi --processes 2 --launcher-args '--host n0'", {}),
    "mpirun_two_nodes": ("--launcher mpi --processes 4 --nodes 2 --launcher-args '--host n0:2,n1:2'", {}),
    "ray": ("--launcher ray --processes 2 --device cpu", {}),
    "ray_cluster": ("--launcher ray --processes 2 --device cuda --address 10.0.0.1:6379", {}),
    "sbatch": ("--launcher slurm --processes 4 --nodes 2", {}),
    "sbatch_per_node": ("--launcher slurm --processes 8 --nodes 2 --per-node torchrun", {}),
}


@pytest.mark.parametrize("case", DRY_RUNS)
def test_a_dry_run_prints_what_would_run(
    typed: Any, golden: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str
) -> None:
    """Exactly, for every launcher, on a machine that has none of them; nothing is started and no file is written."""
    monkeypatch.setattr(torchrun, "local_address_towards", lambda _: "10.0.0.2")
    monkeypatch.setattr(torchrun, "addresses_of", lambda _: ["10.0.0.1"])
    words, variables = DRY_RUNS[case]
    shown = typed(TRAIN + words, **variables)
    assert (shown.status, shown.err) == (0, "")
    assert not list(tmp_path.iterdir())
    golden(case, shown.out)


@pytest.mark.parametrize("is_open_mpi", [True, False], ids=["Open MPI", "MPICH"])
def test_the_two_kinds_of_mpirun_have_words_of_their_own(
    typed: Any, golden: Any, monkeypatch: pytest.MonkeyPatch, is_open_mpi: bool
) -> None:
    """MPICH's would stop at Open MPI's --bind-to none --oversubscribe."""
    monkeypatch.setattr(mpi, "program", lambda: "/opt/my mpi/bin/mpirun")
    monkeypatch.setattr(mpi, "_is_open_mpi", lambda _: is_open_mpi)
    shown = typed(TRAIN + "--launcher mpi --processes 4 --nodes 2")
    assert shown.status == 0
    golden("mpirun_open_mpi_found" if is_open_mpi else "mpirun_mpich", shown.out)


def test_mpirun_is_told_that_it_runs_as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container Open MPI refuses to start otherwise; and nobody else says so."""
    monkeypatch.setattr(mpi, "program", lambda: None)
    for user, said in ((0, True), (1000, False)):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert ("--allow-run-as-root" in mpi.render(Launch("mpi", 2), Path("JOB"))[0]) == said


@pytest.mark.parametrize(("towards", "is_host"), [("10.0.0.1", "1"), ("10.0.0.2", "0"), (None, "0")])
def test_torchrun_is_told_which_host_opens_the_store(
    monkeypatch: pytest.MonkeyPatch, towards: str | None, is_host: str
) -> None:
    """It would compare host names, and err."""
    monkeypatch.setattr(torchrun, "local_address_towards", lambda _: towards)
    monkeypatch.setattr(torchrun, "addresses_of", lambda _: ["10.0.0.1"])
    launch = Launch("torchrun", 4, nodes=2, rendezvous="n0:29500", options=torchrun.TorchrunOptions("c10d"))
    [command] = torchrun.render(launch, Path("JOB"))
    [told] = [word for word in command if word.startswith("--rdzv-conf=")]
    assert f"is_host={is_host}" in told
    assert [word for word in command if word.startswith("--local-addr")] == (
        [f"--local-addr={towards}"] if towards else []
    )


def test_spawn_gives_each_rank_its_place() -> None:
    """rank = node rank x ranks of a node + local rank, and each rank exactly once."""
    ranks: list[int] = []
    for node_rank in range(3):
        launch = Launch(processes=6, nodes=3, node_rank=node_rank, rendezvous="n0:29500")
        for local, command in enumerate(spawn.render(launch, Path("JOB"))):
            rank, local_rank, local_size = map(int, command[-3:])
            assert (local_rank, local_size) == (local, 2)
            ranks.append(rank)
    assert ranks == list(range(6))


ODD = ["a b", 'c"d', "$(touch pwned)", "`touch pwned`", "e'f", "g;touch pwned", "h\\i", "*", "~", "#j", "", "ü"]


@pytest.mark.parametrize("launcher", ["torchrun", "slurm", "mpi"])
def test_a_rendered_command_is_inert_in_a_shell(
    typed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launcher: str
) -> None:
    """Whatever --launcher-args has in it: pasted into bash, each word arrives as it was, and nothing is run."""
    launch = Launch(launcher, 2, arguments=tuple(ODD))
    expected = launch.row.render(launch, Path("JOB"))[0]
    words = ["train", "digits", "--layout", "ddp", "--processes", "2", "--launcher", launcher, "--dry-run"]
    allocation = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"} if launcher == "slurm" else {}
    shown = typed(*words, f"--launcher-args={shlex.join(ODD)}", **allocation)
    assert shown.err == ""
    monkeypatch.undo()
    said = subprocess.run(
        ["bash", "-c", "printf '%s\\0' " + shown.out], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert said.stdout.split("\0")[:-1] == expected
    assert not list(tmp_path.iterdir())


# --- batch scripts


def read_by_sbatch(line: str) -> tuple[str, str]:
    """One `#SBATCH` line as sbatch reads it: quotes and backslashes, # begins a comment, and no shell."""
    text, words, quote, at = line.removeprefix("#SBATCH "), [""], "", 0
    while at < len(text):
        letter = text[at]
        if letter == "\\" and at + 1 < len(text):
            at += 1
            words[-1] += text[at]
        elif quote:
            quote = "" if letter == quote else quote
            words[-1] += letter if quote else ""
        elif letter in "\"'":
            quote = letter
        elif letter.isspace():
            words.append("")
        elif letter == "#":
            break
        else:
            words[-1] += letter
        at += 1
    assert not quote, line
    [word] = [word for word in words if word]
    key, _, value = word.partition("=")
    return key, value


def fake(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/bash\n" + text + "\n", encoding="utf-8")
    path.chmod(0o755)
    return path


ODD_FOLDER = "my $(touch pwned) 'runs' \"here\""
ODD_WORKLOAD = 'it\'s a $(touch pwned) "net" #1.py'
ODD_OPTIONS = {
    "partition": "gpu",
    "time": "1:00:00",
    "gres": "gpu:2",
    "exclusive": "",
    "comment": 'say "hi" #1 $(touch pwned)',
    "mail-user": "o'hara@x",
    "constraint": "a\\b",
}


def test_odd_names_come_through_a_batch_script(
    typed: Any, golden: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bash finds nothing wrong; run, it calls the interpreter with the words that were typed, in the folder.

    What Slurm reads comes to the values that were meant. Nothing of it is run by a shell.
    """
    folder = tmp_path / ODD_FOLDER
    folder.mkdir()
    python = fake(tmp_path / "an `interpreter`" / "python 3", 'printf \'%s\\0\' "$PWD" "${FROM_PROLOGUE}" "$@"')
    prologue = tmp_path / "my $(touch pwned)\nprologue"
    prologue.write_text("# loads what is needed\nexport FROM_PROLOGUE='from the prologue'\n")
    words = ["train", ODD_WORKLOAD, "--layout", "ddp", "--processes", "2", "--launcher", "slurm", "--set", "x=$HOME"]
    words += ["--prologue", str(prologue), "--requeue", "--sbatch", *(f"{k}={v}" for k, v in ODD_OPTIONS.items())]
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "executable", str(python))
    shown = typed(*words, "--dry-run")
    assert (shown.status, shown.err) == (0, "")
    monkeypatch.undo()
    golden("sbatch_odd", shown.out)

    text = shown.out.partition("# in the allocation:")[0]
    (tmp_path / "job.sbatch").write_text(text)
    subprocess.run(["bash", "-n", "job.sbatch"], cwd=tmp_path, check=True)
    said = subprocess.run(["bash", "job.sbatch"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert said.stdout.split("\0")[:-1] == [str(folder), "from the prologue", "-P", "-m", "everyrank", *words]
    assert said.stderr == ""
    assert not list(tmp_path.rglob("pwned"))

    options = dict(read_by_sbatch(line) for line in text.splitlines() if line.startswith("#SBATCH"))
    asked = {f"--{key}": value for key, value in ODD_OPTIONS.items()}
    assert {key: options[key] for key in asked} == asked
    assert options["--job-name"] == "everyrank-" + ODD_WORKLOAD.removesuffix(".py")
    assert options["--output"] == str(folder / "slurm-%j.out")
    assert options["--signal"].startswith("B:USR1@")
    assert "--requeue" in options


def test_a_named_option_replaces_ours(tmp_path: Path) -> None:
    """Whoever passes an option of sbatch's own knows why; it is there once."""
    text = script(
        Launch("slurm", 4, nodes=2), BatchScript({"job-name": "mine", "output": "o.txt"}), ["x"], tmp_path, "name"
    )
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --job-name=mine" in lines
    assert "#SBATCH --output=o.txt" in lines
    assert len({line.partition("=")[0] for line in lines}) == len(lines)


@pytest.mark.parametrize("per_node", [None, "spawn", "torchrun"])
def test_a_batch_job_has_a_task_for_each_rank_or_one_a_node(tmp_path: Path, per_node: str | None) -> None:
    """ntasks-per-node=1 where spawn or torchrun starts the ranks of the node."""
    text = script(
        Launch("slurm", 8, nodes=2, options=slurm.SlurmOptions(per_node)), BatchScript({}), ["x"], tmp_path, "name"
    )
    tasks = 8 if per_node is None else 2
    assert f"#SBATCH --ntasks={tasks}\n" in text
    assert f"#SBATCH --ntasks-per-node={tasks // 2}\n" in text
    assert "#SBATCH --nodes=2\n" in text
    assert "--requeue" not in text


def test_a_prologue_may_use_variables_that_are_not_set(tmp_path: Path) -> None:
    """`module load` and `conda activate` do."""
    (tmp_path / "prologue").write_text('if [ -z "$NOT_SET_ANYWHERE" ]; then WAS=empty; fi\n')
    text = script(Launch("slurm"), BatchScript({}, tmp_path / "prologue"), ["echo", "ran"], tmp_path, "name")
    said = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
    assert said.stdout == "ran\n", said.stderr


def test_a_percent_in_a_folder_is_no_pattern_of_slurms(tmp_path: Path) -> None:
    """`%u` in --output is the user's name to Slurm; %% is a percent."""
    text = script(Launch("slurm"), BatchScript({}), ["x"], tmp_path / "100%users", "name")
    assert f"--output={tmp_path}/100%%users/slurm-%j.out\n" in text


@pytest.mark.parametrize("refused", [False, True])
def test_a_batch_script_is_submitted(
    typed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refused: bool
) -> None:
    """sbatch is given the script that a dry run shows; its number is told, or in one line why not."""
    end = "echo 'sbatch: error: first' >&2; echo 'sbatch: error: no such partition' >&2; exit 1"
    sbatch = 'printf "%s\\n" "$@" > asked.txt\n' + (end if refused else "echo '4711;cluster'")
    words = "train digits --layout ddp --processes 2 --launcher slurm --sbatch partition=gpu"
    shown = typed(words + " --dry-run")
    dry = shown.out.partition("\n# in the allocation:")[0]
    fake(tmp_path / "bin" / "sbatch", sbatch)
    monkeypatch.undo()  # now something may start
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    done = typed(words)
    flag, path = (tmp_path / "asked.txt").read_text().splitlines()
    assert flag == "--parsable"
    assert Path(path).read_text() == dry
    if refused:
        assert done.status == 2
        assert done.out == ""
        assert "sbatch refused" in done.line
        assert done.line.endswith("no such partition")
    else:
        assert (done.status, done.err) == (0, "")
        assert "4711" in done.out
        assert "cluster" not in done.out
        assert path in done.out


# --- who started us

FACTS: dict[str, tuple[dict[str, str], tuple[str, int, int, int, int]]] = {
    # environment; started by, rank, size, local rank, local size
    "torchrun": (TORCHRUN, ("torchrun", 1, 2, 1, 2)),
    "a person": (PERSON, ("env", 0, 3, 0, 3)),
    "Open MPI": (OPEN_MPI, ("mpi", 2, 4, 2, 4)),
    "MPICH": (MPICH, ("mpi", 3, 5, 3, 5)),
    "srun": (SRUN, ("slurm", 4, 6, 1, 3)),
    # nested: the written order
    "torchrun in srun": ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1(x2)", **TORCHRUN}, ("torchrun", 1, 2, 1, 2)),
    "torchrun in mpirun": ({**OPEN_MPI, **TORCHRUN}, ("torchrun", 1, 2, 1, 2)),
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


WRONG_ENVIRONMENTS: dict[str, tuple[dict[str, str], list[str]]] = {
    # not a full set
    "rank alone": ({"RANK": "0"}, ["RANK", "WORLD_SIZE", "MASTER_PORT", "torchrun", "unset RANK"]),
    "size alone": ({"WORLD_SIZE": "4"}, ["WORLD_SIZE", "RANK", "unset WORLD_SIZE"]),
    "no port": ({k: v for k, v in PERSON.items() if k != "MASTER_PORT"}, ["MASTER_PORT", "torchrun"]),
    "empty": ({**PERSON, "LOCAL_RANK": ""}, ["not LOCAL_RANK"]),
    "part of Open MPI's": ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, ["OMPI_COMM_WORLD_LOCAL_RANK"]),
    "part of MPICH's": ({"PMI_RANK": "1", "PMI_SIZE": "4"}, ["MPI_LOCALRANKID"]),
    # no numbers
    "rank": ({**PERSON, "RANK": "first"}, ["RANK=first", "whole number"]),
    "size": ({**TORCHRUN, "WORLD_SIZE": "1.5"}, ["WORLD_SIZE=1.5", "whole number"]),
    "port": ({**PERSON, "MASTER_PORT": "http"}, ["MASTER_PORT=http", "whole number"]),
    "restarts": ({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "x"}, ["TORCHELASTIC_RESTART_COUNT=x"]),
    "of Open MPI": ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "many"}, ["OMPI_COMM_WORLD_SIZE=many"]),
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
    "another size": ({**SRUN, "WORLD_SIZE": "8"}, ["WORLD_SIZE=8", "srun says 6", "--ntasks=8", "unset WORLD_SIZE"]),
    "another rank": ({**OPEN_MPI, "RANK": "0"}, ["RANK=0", "mpirun says 2", "unset RANK"]),
    "another local rank": ({**MPICH, "LOCAL_RANK": "0"}, ["LOCAL_RANK=0", "mpirun says 3"]),
    "another local size": ({**SRUN, "LOCAL_WORLD_SIZE": "6"}, ["LOCAL_WORLD_SIZE=6", "srun says 3"]),
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


def test_one_rank_speaks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is wrong on every rank is told once, under every launcher."""
    names = {"torchrun": "RANK", "Open MPI": "OMPI_COMM_WORLD_RANK", "MPICH": "PMI_RANK", "srun": "SLURM_PROCID"}
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
    monkeypatch.setattr(cli, "_SPEAK_SECONDS", 0.0)
    shown = typed("train digits", **environment)
    assert shown.status == 2
    assert "MASTER_PORT" in shown.line


def test_ranks_of_one_host_meet_over_a_file_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the launcher says nothing: no port is opened; the same file for all ranks of one start, nobody else's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = {
        str(rank): rank_info_from_environment({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": str(rank)}) for rank in range(4)
    }
    [path] = {as_path(info.rendezvous) for info in found.values() if info is not None}
    assert path.parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getppid", lambda: os.getpid())
    other = rank_info_from_environment(OPEN_MPI)
    assert other is not None
    assert as_path(other.rendezvous) != path


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
        return info.rendezvous

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
    assert (first.is_store_master, first.restart_count, first.rendezvous) == (False, 2, "tcp://127.0.0.1:29500")
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
    "another number than srun's": ("--processes 4", SRUN, ["--processes 4", "slurm started 6", "leave it out"]),
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
    for name, value in ONE_TASK_A_NODE.items():
        monkeypatch.setenv(name, value)
    assert node.main() == status
    assert [command[-3:] for command in started] == [["3", "0", "3"], ["4", "1", "3"], ["5", "2", "3"]]
    assert killed == ([] if status == 0 else [0, 1, 2])


# --- wrong calls

DDP = "train digits --layout ddp "
SLURM = DDP + "--launcher slurm --processes 2 --dry-run "
WRONG_CALLS = [
    # nodes
    (DDP + "--nodes 2", ["--nodes 2", "--rendezvous HOST:PORT"]),
    (DDP + "--launcher torchrun --nodes 2", ["--nodes 2", "--rendezvous HOST:PORT"]),
    (DDP + "--nodes two", ["--nodes two", "MIN:MAX"]),
    (DDP + "--nodes 0", ["--nodes 0", "at least 1"]),
    (DDP + "--nodes 0 --dry-run", ["--nodes 0", "at least 1"]),
    (DDP + "--nodes -1", ["--nodes -1"]),
    (DDP + "--nodes 1:", ["--nodes 1:", "MIN:MAX"]),
    (DDP + "--nodes :2", ["--nodes :2", "MIN:MAX"]),
    (DDP + "--nodes 1:2 --node-rank 0 --rendezvous n0:1", ["--nodes MIN:MAX", "torchrun", "c10d"]),
    (DDP + "--nodes 3:2 --launcher torchrun --rendezvous-kind c10d --rendezvous n0:1 --processes 2", ["--nodes 3:2"]),
    (DDP + "--nodes 0:2 --launcher torchrun --rendezvous-kind c10d --rendezvous n0:1 --processes 2", ["--nodes 0:2"]),
    (DDP + "--nodes 2 --processes 3 --node-rank 0 --rendezvous n0:1", ["--processes 3", "--nodes 2", "as many"]),
    (DDP + "--nodes 2 --node-rank 2 --rendezvous n0:1", ["--node-rank 2", "0 to 1"]),
    (DDP + "--nodes 2 --node-rank -1 --rendezvous n0:1", ["--node-rank -1", "0 to 1"]),
    (DDP + "--node-rank first", ["--node-rank", "'first'"]),
    # where they meet
    *((DDP + f"--rendezvous {text}", [f"--rendezvous {text}", "HOST:PORT"]) for text in ("n0", "n0:", ":1", "n0:0")),
    (DDP + "--rendezvous n0:65536", ["--rendezvous n0:65536", "1 to 65535"]),
    (DDP + "--rendezvous n0:http", ["--rendezvous n0:http", "1 to 65535"]),
    (DDP + f"--rendezvous n0:{'9' * 5000}", ["1 to 65535"]),
    (DDP + "--rendezvous-kind etcd", ["--rendezvous-kind etcd", "static or c10d"]),
    *(
        (DDP + f"--init-method {text}", [f"--init-method {text}", "give env, tcp://HOST:PORT or file:///PATH"])
        for text in (
            "nccl",
            "udp://n0:1",
            "file://relative",
            "file:///folder/",
            "file:///",
            "file:/x",
            "/x",
            "meet:///x",
        )
    ),
    (DDP + "--init-method tcp://n0", ["--init-method tcp:// n0", "HOST:PORT"]),
    (DDP + "--init-method tcp://n0:0", ["n0:0", "1 to 65535"]),
    (DDP + "--init-method 'tcp://[::1:29500'", ["[::1:29500"]),
    (DDP + "--init-method tcp://256.1.1.1:80", ["--init-method 256.1.1.1", "has no address here"]),
    # more than there can be
    (DDP + f"--processes {'9' * 23} --dry-run", ["--processes 999", "at most 1,000,000"]),
    (DDP + "--processes 8194 --nodes 2 --node-rank 0 --rendezvous n0:1", ["4,097 ranks on a host", "at most 4,096"]),
    # words of one launcher
    (DDP + "--restarts 1", ["--restarts 1", "--launcher torchrun"]),
    (DDP + "--restarts -1 --launcher torchrun", ["--restarts -1", "0 or more"]),
    (DDP + "--per-node spawn", ["--per-node spawn", "--launcher slurm"]),
    (SLURM + "--per-node mpi", ["--per-node mpi", "spawn or torchrun"]),
    (DDP + "--address n0:1", ["--address n0:1", "--launcher ray"]),
    (DDP + "--launcher-args=-v", ["--launcher-args -v", "spawn takes none"]),
    (DDP + "--requeue", ["--requeue", "--launcher slurm"]),
    (DDP + "--requeue --dry-run", ["--requeue", "--launcher slurm"]),
    (DDP + "--sbatch partition=gpu", ["--sbatch", "--launcher slurm"]),
    (DDP + "--prologue nosuch", ["--prologue nosuch"]),
    (DDP + "--launcher mpi --launcher-args '-x \"A'", ["--launcher-args"]),
    # batch scripts
    (SLURM + "--prologue nosuch", ["--prologue nosuch", "No such file"]),
    (SLURM + "--prologue .", ["--prologue .", "Is a directory"]),
    (SLURM + "--sbatch gpu@4=x", ["--sbatch gpu@4", "partition=gpu"]),
    (SLURM + "--sbatch =x", ["--sbatch", "partition=gpu"]),
    (SLURM + "--sbatch 'comment=a\n#SBATCH --uid=0'", ["--sbatch comment=", "one line"]),
    (SLURM + "--sbatch 'comment\nrm=x'", ["--sbatch comment"]),
]


@pytest.mark.parametrize(("words", "fragments"), WRONG_CALLS, ids=[words[:80] for words, _ in WRONG_CALLS])
def test_a_wrong_call(typed: Any, words: str, fragments: list[str]) -> None:
    """Status 2, and one line with the value, the rule and the fix; nothing is started to find it."""
    shown = typed(words)
    assert (shown.status, shown.out) == (2, ""), shown
    for fragment in fragments:
        assert fragment in shown.line


MISSING = {
    "mpi": ("--launcher mpi", ["--launcher mpi", "mpirun", "module"]),
    "ray": ("--launcher ray", ["--launcher ray", "pip install"]),
    "sbatch": ("--launcher slurm", ["--launcher slurm", "sbatch", "login node"]),
}


@pytest.mark.parametrize("case", MISSING)
def test_a_launcher_that_is_not_here(typed: Any, case: str) -> None:
    """Status 3, and what it needs."""
    words, fragments = MISSING[case]
    shown = typed(DDP + "--processes 2 " + words)
    assert (shown.status, shown.out) == (3, "")
    for fragment in fragments:
        assert fragment in shown.line


def test_srun_that_is_not_here(typed: Any) -> None:
    """In an allocation, inside a container without Slurm's programs."""
    shown = typed(DDP + "--processes 2 --launcher slurm", SLURM_JOB_ID="7", SLURM_NTASKS="2")
    assert shown.status == 3
    assert "srun" in shown.line


@pytest.mark.parametrize("launcher", ["spawn", "torchrun"])
def test_what_to_type_on_each_host(typed: Any, launcher: str) -> None:
    """Of several hosts and no node rank: the line for each of them, with the words as they were typed."""
    words = [
        "train",
        "my net.py",
        "--layout",
        "ddp",
        "--launcher",
        launcher,
        "--nodes",
        "2",
        "--rendezvous",
        "n0:29500",
    ]
    shown = typed(*words)
    assert shown.status == 2
    assert "--nodes 2" in shown.line
    assert shown.out.splitlines() == [
        f"on host {number}:  everyrank {shlex.join(words)} --node-rank {number}" for number in (0, 1)
    ]


def test_the_first_host_says_what_to_type_on_the_others(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, before it waits for them."""
    monkeypatch.setattr(hosts, "addresses_of", lambda _: ["127.0.1.1"])  # so that nothing is started
    words = "train digits --layout ddp --nodes 3 --rendezvous n0:29500"
    shown = typed(words + " --node-rank 0")
    assert [line.partition(":")[0] for line in shown.out.splitlines()] == ["on host 1", "on host 2"]
    assert shown.out.splitlines()[1].endswith(f"everyrank {words} --node-rank 2")
    assert typed(words + " --node-rank 1").out == ""


def test_a_rendezvous_that_is_loopback_is_not_tried(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian gives a host's own name 127.0.1.1: the other hosts would wait for a timeout."""
    monkeypatch.setattr(hosts, "addresses_of", lambda _: ["127.0.1.1"])
    monkeypatch.setattr(hosts, "usable_interfaces", lambda: {"lo": "127.0.0.1", "eth0": "10.0.0.5"})
    shown = typed(DDP + "--nodes 2 --node-rank 0 --rendezvous n0:29500")
    assert shown.status == 2
    for fragment in ("--rendezvous n0", "127.0.1.1", "loopback", "10.0.0.5"):
        assert fragment in shown.line


def test_a_dry_run_inside_a_launcher_says_so(forge: Forge, tmp_path: Path) -> None:
    """Torchrun has started this rank: nothing else would be started, and no worker is rendered."""
    done = forge(tmp_path, "train", "digits", "--layout", "ddp", "--dry-run")
    assert done.status == 0
    assert "everyrank.launch.worker" not in done.out


@pytest.mark.parametrize("words", ["doctor", "doctor --json f.json"])
def test_doctor_looks_at_an_allocation_that_lacks_srun(typed: Any, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """It starts no ranks of that allocation; whoever asks why things do not work is not refused."""
    monkeypatch.setattr(doctor_command, "run_ranks", lambda _: 0)
    assert typed(words, **JOB).status == 0


@pytest.mark.parametrize("words", ["doctor --launch --launcher slurm", "doctor --launch --launcher slurm --dry-run"])
def test_doctor_of_slurm_without_an_allocation(typed: Any, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """A job is not submitted to look at it: one line, or findings; never a traceback."""
    monkeypatch.setattr(doctor_command, "run_ranks", lambda _: 0)
    assert typed(words).status in (0, 2)


# --- hosts and interfaces


@pytest.mark.parametrize(
    ("text", "expected"),
    [("n0:29500", ("n0", 29500)), ("[fd00::1]:29500", ("fd00::1", 29500)), ("10.0.0.1:1", ("10.0.0.1", 1))],
)
def test_an_endpoint_is_split(text: str, expected: tuple[str, int]) -> None:
    """IPv6 addresses come in brackets."""
    assert split_endpoint(text, "--rendezvous") == expected


def test_a_host_that_others_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unknown names and loopback alone are refused; a name with one address outside is not."""
    known = {"n0": ["10.0.0.1"], "both": ["127.0.1.1", "10.0.0.1"], "here": ["127.0.1.1", "::1"]}
    monkeypatch.setattr(hosts, "addresses_of", lambda name: known.get(name, []))
    check_reachable("n0", "--rendezvous")
    check_reachable("both", "--rendezvous")
    with pytest.raises(UsageError, match=r"--rendezvous here: that is 127\.0\.1\.1 here, loopback"):
        check_reachable("here", "--rendezvous")
    with pytest.raises(UsageError, match="--rendezvous nosuch: the name has no address here"):
        check_reachable("nosuch", "--rendezvous")


@pytest.mark.parametrize("name", ["a..b", "x" * 64 + ".org", "nosuch.invalid", ""])
def test_a_name_that_no_host_can_have_has_no_way(name: str) -> None:
    """None, as for every other name without an address."""
    assert local_address_towards(name) in (None, "127.0.0.1", "0.0.0.0")


THERE = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": "192.168.7.5"}


@pytest.mark.parametrize(
    ("asked", "variable", "is_one_machine", "own_address", "expected"),
    [
        ("ib0", None, False, "10.0.0.5", "ib0"),
        ("ib0", "eth0", True, None, "ib0"),  # --interface is nearer than a variable
        (None, "eth0", True, None, None),  # the backend reads it
        (None, None, True, "10.0.0.5", LOOPBACK),
        (None, None, False, "10.0.0.5", "eth0"),
        (None, None, False, "192.168.7.5", "ib0"),
        (None, None, False, None, None),
        (None, None, False, "203.0.113.9", None),
    ],
)
def test_the_interface_is_chosen(
    asked: str | None, variable: str | None, is_one_machine: bool, own_address: str | None, expected: str | None
) -> None:
    """The one that was named, else the one that leads to the others."""
    name, why = choose_interface(asked, variable, is_one_machine, own_address, THERE)
    assert name == expected
    assert why


def test_a_port_is_looked_at_before_the_start(typed: Any, busy: int) -> None:
    """No rank has to come up to find out that it is taken."""
    shown = typed(DDP + f"--processes 2 --init-method tcp://127.0.0.1:{busy}")
    assert (shown.status, shown.out) == (2, "")
    assert f"port {busy} at 127.0.0.1: Address already in use" in shown.line
    assert "another port" in shown.line


def test_a_port_of_another_host_is_not_judged(monkeypatch: pytest.MonkeyPatch, busy: int) -> None:
    """What is taken here may be free there."""
    monkeypatch.setattr(hosts, "addresses_of", lambda _: ["192.0.2.77"])
    said: list[str] = []
    try:
        hosts.check_port("n1", busy)
    except EveryrankError as error:
        said.append(str(error))
    assert said == []


def test_an_interface_that_is_not_there() -> None:
    """Those that are there are named."""
    with pytest.raises(UsageError, match=r"--interface eth9: .*lo \(127\.0\.0\.1\), eth0 \(10\.0\.0\.5\)"):
        choose_interface("eth9", None, True, None, THERE)


HERE = Peer("n0", "boot A", None)
BESIDE = Peer("n0", "boot A", None)
AWAY = Peer("n1", "boot B", "10.0.0.7")
SILENT = Peer("n2", "boot C", None)


@pytest.mark.parametrize(
    ("others", "rank", "address", "expected"),
    [
        ([HERE, BESIDE], 0, None, (True, None)),
        # Slurm calls one machine several nodes: their machine tells
        ([HERE, Peer("n9", "boot A", "127.0.0.1")], 0, None, (True, None)),
        ([HERE, AWAY], 1, "10.0.0.7", (False, "10.0.0.7")),
        ([HERE, BESIDE, AWAY], 0, None, (False, "towards 10.0.0.7")),
        ([HERE, BESIDE, AWAY], 1, None, (False, "towards 10.0.0.7")),
        ([HERE, SILENT, AWAY], 0, None, (False, "towards 10.0.0.7")),
        ([HERE, SILENT], 0, None, (False, None)),
    ],
)
def test_the_way_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
    others: list[Peer],
    rank: int,
    address: str | None,
    expected: tuple[bool, str | None],
) -> None:
    """A rank that came from elsewhere knows its own address on that way; rank 0 takes the way back to one."""
    monkeypatch.setattr(heartbeat, "local_address_towards", lambda address: f"towards {address}")
    assert route_to_peers(others, rank, address) == expected


# --- where they meet


def alone(rank: int = 0, size: int = 1, rendezvous: str = "", **fields: Any) -> RankInfo:
    return RankInfo(rank, rank, size, size, "env", rendezvous, is_store_master=rank == 0, **fields)


def test_a_port_in_use_is_named(busy: int) -> None:
    """By every method that has one, and with the fix."""
    for launch, rendezvous in (
        (Launch(init_method=f"tcp://127.0.0.1:{busy}"), ""),
        (Launch(), f"tcp://127.0.0.1:{busy}"),
    ):
        with pytest.raises(UsageError) as caught:
            open_store(alone(rendezvous=rendezvous), launch)
        assert f"port {busy} at 127.0.0.1: Address already in use" in str(caught.value)
        assert "another port" in str(caught.value)


@pytest.mark.parametrize("method", ["env", "tcp", "file", "launcher", "python"])
def test_ranks_meet_by_each_method(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str) -> None:
    """What rank 0 writes, rank 1 reads."""
    port, path = free_port(), tmp_path / "odd '$(x)' folder" / "a file"
    store = dist.HashStore()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    methods: dict[str, Any] = {
        "env": "env",
        "tcp": f"tcp://127.0.0.1:{port}",
        "file": f"file://{path}",
        "launcher": None,
        "python": lambda _rank, _size: store,
    }
    launch = Launch(init_method=methods[method], timeout_seconds=5)
    met_by = [open_store(alone(rank, 2, f"tcp://127.0.0.1:{port}"), launch) for rank in (0, 1)]
    met_by[0].store.set("key", "value")
    assert met_by[1].store.get("key") == b"value"
    assert [meeting.is_host for meeting in met_by] == [True, False]
    assert path.exists() == (method == "file")
    if method == "file":
        assert met_by[0].file == path


def test_env_takes_the_store_that_torchrun_has_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """--init-method env inside torchrun: its agent listens there already."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    info = RankInfo(0, 0, 1, 1, "torchrun", f"tcp://127.0.0.1:{agent.port}", is_store_master=False)
    meeting = open_store(info, Launch(init_method="env", timeout_seconds=5))
    agent.set("key", "value")
    assert meeting.store.get("key") == b"value"
    assert not meeting.is_host


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_env_without_a_variable(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Its name, and what to write before the command."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"--init-method env: {missing} is not set; MASTER_ADDR="):
        open_store(alone(), Launch(init_method="env"))


def test_mpirun_over_several_hosts_does_not_say_where() -> None:
    """One line instead of a wait: how to say it."""
    with pytest.raises(UsageError, match=r"mpi started 4 ranks on several hosts .*--init-method tcp://HOST:PORT"):
        open_store(RankInfo(0, 0, 4, 2, "mpi", "", is_store_master=True), Launch())


def test_a_tcp_address_that_is_loopback_for_ranks_of_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a person's MASTER_ADDR says it; a small Slurm of several nodes on one machine means it."""
    monkeypatch.setattr(hosts, "addresses_of", lambda _: ["127.0.1.1"])
    info = RankInfo(0, 0, 4, 2, "env", "tcp://n0:29500", is_store_master=True)
    with pytest.raises(UsageError, match=r"the rendezvous at n0: that is 127\.0\.1\.1 here, loopback"):
        open_store(info, Launch())
    port = free_port()
    own = RankInfo(0, 0, 4, 2, "slurm", f"tcp://127.0.0.1:{port}", is_store_master=True)
    assert open_store(own, Launch(timeout_seconds=5)).is_host


def test_a_store_that_nobody_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """--timeout ends the wait, and the line says where."""
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    port = free_port()
    with pytest.raises(RankFailedError, match=f"cannot reach the store of rank 0 at 127.0.0.1:{port}"):
        open_store(alone(1, 2, f"tcp://127.0.0.1:{port}"), Launch(timeout_seconds=1))


def test_an_address_in_a_file_that_never_comes(tmp_path: Path) -> None:
    """--timeout ends that wait too."""
    with pytest.raises(RankFailedError, match=r"rank 0 did not say where to meet within 0\.1 s \(--timeout\)"):
        open_store(alone(1, 2, f"meet://{tmp_path}/address"), Launch(timeout_seconds=0.1))


def left_behind(path: Path) -> None:
    """What a run that was killed leaves."""
    store = dist.FileStore(str(path), 2)
    register_rank(dist.PrefixStore("everyrank/0/0", store), 0, None)
    # the last to leave a FileStore removes its file; a killed rank removes nothing
    content = path.read_bytes()
    del store
    path.write_bytes(content)


FILES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "of an old run": (
        lambda path: (left_behind(path), os.utime(path, (time.time() - 999,) * 2)),
        ["999 s ago", "remove it, or give another name"],
    ),
    "of something else": (lambda path: path.write_text("my thesis"), ["holds something else", "a name that is free"]),
    "a folder": (lambda path: path.mkdir(), ["store"]),
    "that cannot be made": (lambda path: path.symlink_to(path / ".." / "nosuch" / "store"), ["give another place"]),
    "below a file": (lambda path: path.parent.rmdir() or path.parent.write_text("x"), ["cannot be written"]),
}


def test_too_few_files_for_loader_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They and their rank would wait for each other for ever."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (32, 4096))
    with pytest.raises(UsageError, match=r"--workers 1: a process may open 32 files here, .* ulimit -n 1024"):
        run_ranks(Launch(loader_workers=1), len)


def test_a_name_without_an_address_is_not_listened_at() -> None:
    """By rank 0, while the others ask at that name in vain."""
    with pytest.raises(UsageError, match=r"256\.1\.1\.1: the name has no address here"):
        open_store(alone(size=2), Launch(init_method="tcp://256.1.1.1:65000", timeout_seconds=2))


@pytest.mark.parametrize("case", FILES)
def test_a_file_where_ranks_cannot_meet(tmp_path: Path, case: str) -> None:
    """Explained, and not hung on; what somebody wrote is left as it is."""
    make, fragments = FILES[case]
    (tmp_path / "below").mkdir()
    path = tmp_path / "below" / "store"
    make(path)
    before = path.read_bytes() if path.is_file() else None
    begun = time.monotonic()
    with pytest.raises(UsageError) as caught:
        open_store(alone(size=2), Launch(init_method=f"file://{path}", timeout_seconds=2))
    assert time.monotonic() < begun + 1.5
    for fragment in (f"file://{path}", *fragments):
        assert fragment in str(caught.value)
    assert (path.read_bytes() if path.is_file() else None) == before


def test_a_file_of_a_run_that_was_just_killed(tmp_path: Path) -> None:
    """Too young to be told by its age: the place of this rank in it is taken."""
    path = tmp_path / "store"
    left_behind(path)
    meeting = open_store(alone(size=2), Launch(init_method=f"file://{path}", timeout_seconds=5))
    with pytest.raises(UsageError, match="rank 0 is there already: a run that was killed left this meeting place"):
        register_rank(dist.PrefixStore("everyrank/0/0", meeting.store), 0, None)


@pytest.mark.parametrize("name", ["a b", "50%", "a#b", "a?b", "it's"])
def test_a_file_is_the_one_that_was_named(tmp_path: Path, name: str) -> None:
    """No letter of a path means anything else."""
    meeting = open_store(alone(), Launch(init_method=f"file://{tmp_path}/{name}", timeout_seconds=5))
    assert meeting.file == tmp_path / name


def fails(_rank: int, _size: int) -> dist.Store:
    raise OSError("no route")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda _rank, _size: None, "init_method returned NoneType; return a torch.distributed.Store"),
        (fails, "no route"),
    ],
)
def test_a_store_from_python_that_is_none(function: Any, message: str) -> None:
    """It is the person's function that is wrong."""
    with pytest.raises(WorkloadError, match=message):
        open_store(alone(), Launch(init_method=function))


def test_two_processes_of_the_same_rank() -> None:
    """The second one is told, in one line, and both reasons."""
    store = dist.HashStore()
    register_rank(store, 0, None)
    register_rank(store, 1, None)
    with pytest.raises(UsageError, match=r"rank 1 is there already: .* two processes have the same rank"):
        register_rank(store, 1, None)


@pytest.mark.parametrize("name", ["torch", "everyrank", "Python"])
def test_versions_that_differ(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """At every start, on every rank: whose, on which host, and what to do."""
    store = dist.HashStore()
    register_rank(store, 0, None)
    if name == "Python":
        monkeypatch.setattr(heartbeat.platform, "python_version_tuple", lambda: ("3", "9", "1"))
    else:
        monkeypatch.setattr(torch if name == "torch" else heartbeat, "__version__", "0.1")
    monkeypatch.setattr(heartbeat, "host_name", lambda: "n1")
    register_rank(store, 1, "10.0.0.7")
    with pytest.raises(CannotRunError) as caught:
        wait_for_peers(store, 2)
    shown = "3.9" if name == "Python" else "0.1"
    assert f"rank 1 on n1 has {name} {shown}, and rank 0 on" in str(caught.value)
    assert "install the same on all hosts" in str(caught.value)


def test_builds_of_one_version_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """One host may have the build for CPU."""
    store = dist.HashStore()
    for rank, build in enumerate(["2.9.0+cpu", "2.9.0+cu128"]):
        monkeypatch.setattr(torch, "__version__", build)
        register_rank(store, rank, f"10.0.0.{rank}")
    assert [other.address for other in wait_for_peers(store, 2)] == ["10.0.0.0", "10.0.0.1"]


STARTS = {
    # words after the training's, fragments of the line
    "a port in use": ("--init-method tcp://127.0.0.1:BUSY", ["port BUSY at 127.0.0.1", "another port"]),
    "an old file": ("--init-method file://DIR/old", ["file://DIR/old", "remove it"]),
    "an interface": ("--interface eth9", ["--interface eth9", "not up here"]),
}


@pytest.mark.parametrize("case", STARTS)
def test_a_meeting_that_fails_is_one_line_of_the_command(forge: Forge, tmp_path: Path, busy: int, case: str) -> None:
    """Status 2, though it is a rank that finds out."""
    left_behind(tmp_path / "old")
    os.utime(tmp_path / "old", (time.time() - 999,) * 2)
    words, fragments = STARTS[case]

    def here(text: str) -> str:
        return text.replace("BUSY", str(busy)).replace("DIR", str(tmp_path))

    done = forge(tmp_path, "train", "digits", "--steps", 1, *here(words).split())
    shown = Typed(done.status, done.out, done.err)
    assert shown.status == 2
    for fragment in fragments:
        assert here(fragment) in shown.line


def test_two_ranks_train_over_a_file(forge: Forge, tmp_path: Path) -> None:
    """Inside another launcher, too; the file is gone afterwards, so the next run finds none."""
    words = ["train", "digits", "--layout", "ddp", "--steps", 1, "--init-method", f"file://{tmp_path}/a file"]
    for _ in range(2):
        done = forge(tmp_path, *words, size=2)
        assert (done.status, done.err) == (0, "")
        assert not (tmp_path / "a file").exists()


# --- doctor --launch


@pytest.mark.parametrize(
    ("environment", "status", "fragments"),
    [
        ({}, None, []),
        (SRUN, None, []),
        (JOB, "ok", ["job 7: 6 tasks on 2 nodes", "--launcher slurm"]),
        ({**SRUN, "SLURM_NTASKS_PER_NODE": "3"}, None, []),
        (
            {**SRUN, "SLURM_NTASKS_PER_NODE": "4"},
            "problem",
            ["SLURM_NTASKS=6", "SLURM_NTASKS_PER_NODE=4 on 2 nodes", "--ntasks=8"],
        ),
        ({**SRUN, **OPEN_MPI}, "problem", ["SLURM_NTASKS=6", "mpirun started 4", "mpirun -n 6"]),
        ({**SRUN, **MPICH}, "problem", ["SLURM_NTASKS=6", "mpirun started 5"]),
        ({**SRUN, "SLURM_NTASKS": "x", "SLURM_NTASKS_PER_NODE": "4"}, "problem", ["SLURM_NTASKS=x"]),
        ({**SRUN, "SLURM_NNODES": "x", "SLURM_NTASKS_PER_NODE": "3"}, "problem", ["SLURM_NNODES=x"]),
    ],
)
def test_doctor_sees_variables_that_contradict_each_other(
    environment: dict[str, str], status: str | None, fragments: list[str]
) -> None:
    """Slurm's among themselves, and with mpirun's."""
    found = doctor.check_slurm(environment)
    assert [finding.status for finding in found] == ([status] if status else [])
    for fragment in fragments:
        assert fragment in found[0].line


def test_doctor_sees_a_port_in_use(busy: int) -> None:
    """And one that is free; for a rendezvous, and for a tcp:// method."""
    for launch in (
        Launch(rendezvous=f"127.0.0.1:{busy}"),
        Launch(init_method=f"tcp://127.0.0.1:{busy}"),
    ):
        finding = doctor.check_rendezvous(launch)[0]
        assert finding.status == "problem"
        assert f"port {busy} at 127.0.0.1: Address already in use" in finding.line
        assert "another port" in finding.line
    free = doctor.check_rendezvous(Launch(rendezvous=f"127.0.0.1:{free_port()}"))[0]
    assert free.status == "ok"


def test_doctor_takes_an_address_of_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a host whose interface has no other."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    monkeypatch.setattr(doctor, "usable_interfaces", lambda: {"lo": "::1"})
    finding = doctor.check_rendezvous(Launch(rendezvous=f"[::1]:{free_port()}"))[0]
    assert finding.status == "ok", finding


@pytest.mark.parametrize(
    ("error", "status", "fragment"),
    [
        (None, "ok", "answers"),
        (ConnectionRefusedError(), "warning", "start node 0 first"),
        (TimeoutError("timed out"), "problem", "firewall"),
        (OSError(113, "No route to host"), "problem", "No route to host"),
    ],
)
def test_doctor_asks_at_another_host(
    monkeypatch: pytest.MonkeyPatch, busy: int, error: OSError | None, status: str, fragment: str
) -> None:
    """It answers, nobody listens yet, or something is between."""

    def connect(*_: object, **__: object) -> socket.socket:
        if error is not None:
            raise error
        return socket.socket()

    monkeypatch.setattr(doctor.socket, "create_connection", connect)
    monkeypatch.setattr(doctor, "addresses_of", lambda _: ["10.0.0.1"])
    monkeypatch.setattr(hosts, "addresses_of", lambda _: ["10.0.0.1"])
    launch = Launch(processes=2, nodes=2, node_rank=1, rendezvous=f"10.0.0.1:{busy}")
    finding = doctor.check_rendezvous(launch)[0]
    assert (finding.status, finding.private) == (status, True)
    assert fragment in finding.line


def test_doctor_sees_a_host_name_that_is_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """For several hosts; on one it is fine."""
    monkeypatch.setattr(hosts, "addresses_of", lambda _: ["127.0.1.1"])
    launch = Launch(processes=2, nodes=2, node_rank=0, rendezvous="localhost:29500")
    finding = doctor.check_rendezvous(launch)[0]
    assert finding.status == "problem"
    assert "loopback" in finding.line


@pytest.mark.parametrize(("asked", "status"), [(LOOPBACK, "ok"), ("eth9", "problem"), (None, "ok")])
def test_doctor_sees_the_interface(asked: str | None, status: str) -> None:
    """The one that would be used, or that it is not there."""
    finding = doctor.check_rendezvous(Launch(interface=asked))[-1]
    assert (finding.what, finding.status) == ("interface", status)


@pytest.mark.parametrize("name", ["a..b", "nosuch.invalid"])
def test_doctor_survives_a_name_that_no_host_has(name: str) -> None:
    """A finding, whatever was typed."""
    finding = doctor.check_rendezvous(Launch(init_method=f"tcp://{name}:29500"))[0]
    assert finding.status == "problem"


def row(rank: int, **changes: Any) -> dict[str, Any]:
    place = {"rank": rank, "host": f"n{rank}", "pid": 7, "local_rank": 0, "local_size": 1, "device": "cpu"}
    versions = {"torch": "2.9", "python": "3.11", "everyrank": "0.1"}
    return {
        **place,
        **versions,
        "choices": {"interface": "eth0: the way", "backend": "gloo: cpu"},
        "skew_seconds": 0.0,
        **changes,
    }


@pytest.mark.parametrize(("skew", "status"), [(0.2, "ok"), (-0.2, "ok"), (90.0, "warning"), (-90.0, "warning")])
def test_doctor_sees_clocks_that_differ(monkeypatch: pytest.MonkeyPatch, skew: float, status: str) -> None:
    """In either direction, and whose."""
    monkeypatch.setattr(doctor, "run_ranks", lambda *_: {0: [row(0), row(1, skew_seconds=skew)]})
    found = {finding.what: finding for finding in doctor.check_start(Launch(processes=2))}
    assert found["clocks"].status == status
    assert status == "ok" or "n1" in found["clocks"].line
    assert "on n1, process 7" in found["rank 1"].line
    assert "torch 2.9" in found["versions"].line


def test_doctor_sees_a_start_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one of versions that differ: the line of the start is the finding's."""

    def start(*_: object) -> None:
        raise CannotRunError("rank 1 on n1 has torch 2.8, and rank 0 on n0 has 2.9: install the same on all hosts")

    monkeypatch.setattr(doctor, "run_ranks", start)
    [finding] = doctor.check_start(Launch(processes=2))
    assert finding.status == "problem"
    assert "rank 1 on n1 has torch 2.8" in finding.line


def test_doctor_starts_nothing_after_a_problem(monkeypatch: pytest.MonkeyPatch, busy: int) -> None:
    """A start that would hang is not tried, and it says so."""

    def start(*_: object) -> None:
        raise AssertionError("a start was tried")

    monkeypatch.setattr(doctor, "run_ranks", start)
    sections = doctor.examine_launch(Launch(rendezvous=f"127.0.0.1:{busy}"))
    [finding] = sections["start"]
    assert finding.status == "absent"
    assert "rendezvous" in finding.line


@pytest.mark.parametrize(("launcher", "fragment"), [("mpi", "no mpirun"), ("slurm", "no srun")])
def test_doctor_sees_a_launcher_that_is_not_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launcher: str, fragment: str
) -> None:
    """Before it tries to start by it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(mpi, "program", lambda: None)
    finding = doctor.check_program(Launch(launcher))
    assert finding.status == "problem"
    assert fragment in finding.line


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_every_golden_script_is_one_for_bash() -> None:
    """`bash -n` finds nothing wrong with any of them."""
    found = sorted(GOLDEN.glob("*.txt"))
    assert {path.stem for path in found} >= {*DRY_RUNS, "mpirun_mpich", "sbatch_odd"}
    for path in found:
        subprocess.run(["bash", "-n", str(path)], check=True)
