"""Arguments that cannot be launched: the error is one line, and no process is started."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import Any

import pytest

from everyrank.commands import doctor as doctor_command
from everyrank.launch import host_info
from launching import SLURM_JOB, TRAIN_DDP
from processes import Cli

ON_SLURM = " --launcher slurm --processes 2 --dry-run "
SLURM = TRAIN_DDP + ON_SLURM

RAY = TRAIN_DDP + "--launcher ray "
ELASTIC = TRAIN_DDP + "--launcher torchrun --rendezvous-kind c10d --rendezvous 127.0.0.1:29500 --restarts 3 "
WRONG_CALLS = [
    # nodes
    (TRAIN_DDP + "--nodes 2", ["--nodes 2", "--rendezvous HOST:PORT"]),
    (TRAIN_DDP + "--launcher torchrun --nodes 2", ["--nodes 2", "--rendezvous HOST:PORT"]),
    (TRAIN_DDP + "--nodes two", ["--nodes two", "MIN:MAX"]),
    (TRAIN_DDP + "--nodes 0", ["--nodes 0", "at least 1"]),
    (TRAIN_DDP + "--nodes 0 --dry-run", ["--nodes 0", "at least 1"]),
    (TRAIN_DDP + "--nodes 0 --processes 4", ["--nodes 0", "at least 1"]),
    (TRAIN_DDP + "--nodes -1", ["--nodes -1"]),
    (TRAIN_DDP + "--nodes 1:", ["--nodes 1:", "MIN:MAX"]),
    (TRAIN_DDP + "--nodes :2", ["--nodes :2", "MIN:MAX"]),
    (TRAIN_DDP + "--nodes 1:2 --node-rank 0 --rendezvous n0:1", ["--nodes MIN:MAX", "torchrun", "c10d"]),
    (
        TRAIN_DDP + "--nodes 3:2 --launcher torchrun --rendezvous-kind c10d --rendezvous n0:1 --processes 2",
        ["--nodes 3:2"],
    ),
    (
        TRAIN_DDP + "--nodes 0:2 --launcher torchrun --rendezvous-kind c10d --rendezvous n0:1 --processes 2",
        ["--nodes 0:2"],
    ),
    (
        TRAIN_DDP + "--nodes 2 --processes 3 --node-rank 0 --rendezvous n0:1",
        ["--processes 3", "--nodes 2", "the total"],
    ),
    (TRAIN_DDP + "--nodes 2 --node-rank 2 --rendezvous n0:1", ["--node-rank 2", "0 to 1"]),
    (TRAIN_DDP + "--nodes 2 --node-rank -1 --rendezvous n0:1", ["--node-rank -1", "0 to 1"]),
    (TRAIN_DDP + "--node-rank first", ["--node-rank", "'first'"]),
    # rendezvous
    *(
        (TRAIN_DDP + f"--rendezvous {text}", [f"--rendezvous {text}", "HOST:PORT"])
        for text in ("n0", "n0:", ":1", "n0:0")
    ),
    (TRAIN_DDP + "--rendezvous n0:65536", ["--rendezvous n0:65536", "1 to 65535"]),
    (TRAIN_DDP + "--rendezvous n0:http", ["--rendezvous n0:http", "1 to 65535"]),
    (TRAIN_DDP + f"--rendezvous n0:{'9' * 5000}", ["1 to 65535"]),
    (TRAIN_DDP + "--rendezvous-kind etcd", ["--rendezvous-kind etcd", "--launcher torchrun"]),
    *(
        (TRAIN_DDP + f"--init-method {text}", [f"--init-method {text}", "give env, tcp://HOST:PORT or file:///PATH"])
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
    (TRAIN_DDP + "--init-method tcp://n0", ["--init-method tcp:// n0", "HOST:PORT"]),
    (TRAIN_DDP + "--init-method tcp://n0:0", ["n0:0", "1 to 65535"]),
    (TRAIN_DDP + "--init-method 'tcp://[::1:29500'", ["[::1:29500"]),
    (TRAIN_DDP + "--init-method tcp://256.1.1.1:80", ["--init-method 256.1.1.1", "has no address here"]),
    # too many ranks
    (TRAIN_DDP + f"--processes {'9' * 23} --dry-run", ["--processes 999", "at most 1,000,000"]),
    (TRAIN_DDP + "--processes 8194 --nodes 2 --node-rank 0 --rendezvous n0:1", ["4,097 ranks", "at most 4,096"]),
    # arguments of one launcher
    (TRAIN_DDP + "--launcher torchrun --rendezvous-kind etcd", ["--rendezvous-kind etcd", "static or c10d"]),
    (TRAIN_DDP + "--restarts 1", ["--restarts 1", "--launcher torchrun"]),
    (TRAIN_DDP + "--restarts -1 --launcher torchrun", ["--restarts -1", "0 or more"]),
    # elastic numbers of hosts
    (ELASTIC + "--nodes 4:3 --processes 3", ["--nodes 4:3", "MIN:MAX"]),
    (ELASTIC + "--nodes 0:3 --processes 3", ["--nodes 0:3", "1 <= MIN"]),
    (ELASTIC + "--nodes :3 --processes 3", ["--nodes :3", "a number, or MIN:MAX"]),
    (ELASTIC + "--nodes 3:4 --processes 1", ["--processes 1 --nodes 4", "give --processes 4"]),
    (ELASTIC + "--nodes 3:4 --processes 4", ["--nodes 3:4", "give --out DIR", "all hosts share"]),
    (ELASTIC + "--nodes 3:4 --processes 4 --rendezvous-kind static --out o", ["--nodes MIN:MAX", "c10d"]),
    (
        ELASTIC + "--nodes 3:4 --processes 4 --layout fsdp:tensor=2 --out o",
        ["--nodes 3:4, with 3 ranks left", "tensor 2"],
    ),
    (
        TRAIN_DDP + "--nodes 3:4 --processes 4 --out o",
        ["--nodes MIN:MAX", "--launcher torchrun --rendezvous-kind c10d"],
    ),
    (SLURM + "--nodes 3:2", ["--nodes 3:2", "MIN:MAX"]),
    (TRAIN_DDP + "--launcher mpi --nodes 1:2 --processes 2", ["--nodes MIN:MAX", "--launcher slurm"]),
    (TRAIN_DDP + "--per-node spawn", ["--per-node spawn", "--launcher slurm"]),
    (SLURM + "--per-node mpi", ["--per-node mpi", "spawn or torchrun"]),
    (TRAIN_DDP + "--address n0:1", ["--address n0:1", "--launcher ray"]),
    (TRAIN_DDP + "--min-processes 1 --processes 2", ["--min-processes 1", "--launcher ray"]),
    (RAY + "--min-processes 3 --processes 2 --out o", ["--min-processes 3", "1 to 2"]),
    (RAY + "--min-processes 0 --processes 2 --out o", ["--min-processes 0", "1 to 2"]),
    (RAY + "--min-processes 2 --processes 4", ["--min-processes 2", "give --out DIR"]),
    (RAY + "--min-processes 2 --processes 4 --layout fsdp:tensor=2 --out o", ["with 3 ranks left", "tensor 2"]),
    (TRAIN_DDP + "--launcher-args=-v", ["--launcher-args -v", "--launcher spawn"]),
    (TRAIN_DDP + "--requeue", ["--requeue", "--launcher slurm"]),
    (TRAIN_DDP + "--requeue --dry-run", ["--requeue", "--launcher slurm"]),
    (TRAIN_DDP + "--sbatch partition=gpu", ["--sbatch", "--launcher slurm"]),
    (TRAIN_DDP + "--prologue nosuch", ["--prologue nosuch"]),
    (TRAIN_DDP + "--launcher mpi --launcher-args '-x \"A'", ["--launcher-args"]),
    # batch scripts
    (SLURM + "--prologue nosuch", ["--prologue nosuch", "No such file"]),
    (SLURM + "--prologue .", ["--prologue .", "Is a directory"]),
    (SLURM + "--sbatch gpu@4=x", ["--sbatch gpu@4", "partition=gpu"]),
    (SLURM + "--sbatch =x", ["--sbatch", "partition=gpu"]),
    (SLURM + "--sbatch 'comment=a\n#SBATCH --uid=0'", ["--sbatch comment=", "one line"]),
    (SLURM + "--sbatch 'comment\nrm=x'", ["--sbatch comment"]),
    # mistakes that have nothing to do with the launch: a job would report them when it starts
    ("train digitz" + ON_SLURM, ["did you mean digits"]),
    ("train missing.py" + ON_SLURM, ["missing.py", "no file"]),
    ("train digits --layout ddp:tensor=3" + ON_SLURM, ["tensor=3", "2 processes"]),
    ("train digits --epochs 1 --steps 3" + ON_SLURM, ["--epochs 1 --steps 3"]),
    ("train digits --save-every -3" + ON_SLURM, ["--save-every -3"]),
    ("train digits --batch 0" + ON_SLURM, ["--batch 0"]),
    ("train digits --lr-rule linear" + ON_SLURM, ["--lr-rule linear", "--batch"]),
    ("train digits --resume missing" + ON_SLURM, ["missing"]),
    ("train digits --json /dev/null/x" + ON_SLURM, ["/dev/null/x"]),
    ("verify digits --layout ddpp" + ON_SLURM, ["did you mean ddp"]),
    ("verify digits --reference ddpp" + ON_SLURM, ["did you mean ddp"]),
    ("verify digits --between HEAD HEAD" + ON_SLURM, ["--between"]),
    ("bench digits --trials 0" + ON_SLURM, ["--trials 0"]),
    ("predict digits --out x.npy" + ON_SLURM, ["--resume", "--pretrained"]),
    ("comm --op all_reduces" + ON_SLURM, ["--op all_reduces"]),
    ("comm --group-size 3" + ON_SLURM, ["--group-size 3"]),
    ("chaos digits --layout ddp --fault none" + ON_SLURM, ["--fault none"]),
]


@pytest.mark.parametrize(
    ("command_text", "fragments"), WRONG_CALLS, ids=[command_text[:80] for command_text, _ in WRONG_CALLS]
)
def test_invalid_arguments_are_refused(run_main: Any, command_text: str, fragments: list[str]) -> None:
    """The status is 2. The error is one line with the value, the rule and the fix."""
    result = run_main(command_text)
    assert (result.status, result.out) == (2, ""), result
    for fragment in fragments:
        assert fragment in result.line


@pytest.mark.parametrize(
    "command_text",
    [
        "train digits --layout ddp --out new/run --json more/x.json --download",
        "train digits --layout ddp --out new/run --resume",
        "bench digits --processes 1 4 --html more/x.html",
        "comm --json more/x.json",
    ],
)
def test_dry_run_checks_the_call_and_leaves_nothing(
    run_main: Any, command_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the commands are printed. No folder is created, and no data are downloaded."""
    monkeypatch.chdir(tmp_path)
    result = run_main(command_text + " --dry-run")
    assert result.status == 0, result.line
    assert len(result.out.splitlines()) == 1
    assert not list(tmp_path.iterdir())


MISSING_LAUNCHERS = {
    "mpi": ("--launcher mpi", ["--launcher mpi", "mpirun", "module"]),
    "ray": ("--launcher ray", ["--launcher ray", "pip install"]),
    "sbatch": ("--launcher slurm", ["--launcher slurm", "sbatch", "login node"]),
}


@pytest.mark.parametrize("case", MISSING_LAUNCHERS)
def test_missing_launcher_exits_with_status_3(run_main: Any, case: str) -> None:
    """The error names the missing program or package."""
    args, fragments = MISSING_LAUNCHERS[case]
    result = run_main(TRAIN_DDP + "--processes 2 " + args)
    assert (result.status, result.out) == (3, "")
    for fragment in fragments:
        assert fragment in result.line


def test_missing_srun_exits_with_status_3(run_main: Any) -> None:
    """The command runs in an allocation, but in a container without Slurm's programs."""
    result = run_main(TRAIN_DDP + "--processes 2 --launcher slurm", SLURM_JOB_ID="7", SLURM_NTASKS="2")
    assert result.status == 3
    assert "srun" in result.line


@pytest.mark.parametrize("launcher", ["spawn", "torchrun"])
def test_command_without_node_rank_prints_the_command_of_each_host(
    run_main: Any, launcher: str, tmp_path: Path
) -> None:
    """The printed commands repeat the given arguments with --node-rank."""
    (tmp_path / "my net.py").write_text("workload = None\n")
    args = [
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
    result = run_main(*args)
    assert result.status == 2
    assert "--nodes 2" in result.line
    assert result.out.splitlines() == [
        f"on host {number}:  everyrank {shlex.join(args)} --node-rank {number}" for number in (0, 1)
    ]


@pytest.mark.parametrize("separator", [(), ("--",)], ids=["", "--"])
def test_commands_of_hosts_have_the_node_rank_before_the_script(
    run_main: Any, separator: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the script it would be an argument of the script, as the --node-rank that the user typed there is."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "train.py").write_text("")
    args = ["launch", "--nodes", "2", "--rendezvous", "n0:29500"]
    script = [*separator, "train.py", "--node-rank", "7"]
    result = run_main(*args, *script)
    assert result.out.splitlines() == [
        f"on host {number}:  everyrank {shlex.join([*args, '--node-rank', str(number), *script])}" for number in (0, 1)
    ]
    assert not list(tmp_path.glob("everyrank-logs-*"))


def test_first_host_prints_the_commands_of_the_others(run_main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It prints them once, before it waits for the other hosts."""
    monkeypatch.setattr(host_info, "addresses_of", lambda _: ["127.0.1.1"])  # loopback, so the start is refused
    command_text = "train digits --layout ddp --nodes 3 --rendezvous n0:29500"
    result = run_main(command_text + " --node-rank 0")
    assert [line.partition(":")[0] for line in result.out.splitlines()] == ["on host 1", "on host 2"]
    assert result.out.splitlines()[1].endswith(f"everyrank {command_text} --node-rank 2")
    assert run_main(command_text + " --node-rank 1").out == ""


def test_loopback_rendezvous_is_refused_for_several_hosts(run_main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian maps a host's own name to 127.0.1.1. Other hosts would wait until the timeout."""
    monkeypatch.setattr(host_info, "addresses_of", lambda _: ["127.0.1.1"])
    monkeypatch.setattr(host_info, "usable_interfaces", lambda: {"lo": "127.0.0.1", "eth0": "10.0.0.5"})
    result = run_main(TRAIN_DDP + "--nodes 2 --node-rank 0 --rendezvous n0:29500")
    assert result.status == 2
    for fragment in ("--rendezvous n0", "127.0.1.1", "loopback", "10.0.0.5"):
        assert fragment in result.line


def test_dry_run_of_a_started_rank_prints_no_worker_command(cli: Cli, tmp_path: Path) -> None:
    """torchrun has started this rank, so a run would start no other process."""
    result = cli.on_ranks(tmp_path, "train", "digits", "--layout", "ddp", "--dry-run")
    assert result.status == 0
    assert "everyrank.launch.worker" not in result.out


@pytest.mark.parametrize("command_text", ["doctor", "doctor --json f.json"])
def test_doctor_runs_in_an_allocation_without_srun(
    run_main: Any, monkeypatch: pytest.MonkeyPatch, command_text: str
) -> None:
    """doctor starts no ranks of the allocation, so it is not refused."""
    monkeypatch.setattr(doctor_command, "run", lambda _: 0)
    assert run_main(command_text, **SLURM_JOB).status == 0


@pytest.mark.parametrize(
    "command_text", ["doctor --launch --launcher slurm", "doctor --launch --launcher slurm --dry-run"]
)
def test_doctor_of_launcher_slurm_runs_without_an_allocation(
    run_main: Any, monkeypatch: pytest.MonkeyPatch, command_text: str
) -> None:
    """doctor submits no job, so it is not refused either."""
    monkeypatch.setattr(doctor_command, "run", lambda _: 0)
    assert run_main(command_text).status == 0
