"""Calls that cannot be launched: one line each, and no process is started to find out."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from everyrank.commands import doctor as doctor_command
from everyrank.launch import host_info
from launching import DDP, JOB
from processes import Cli

SLURM = DDP + "--launcher slurm --processes 2 --dry-run "

RAY = DDP + "--launcher ray "
ELASTIC = DDP + "--launcher torchrun --rendezvous-kind c10d --rendezvous 127.0.0.1:29500 --restarts 3 "
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
    (DDP + "--nodes 2 --processes 3 --node-rank 0 --rendezvous n0:1", ["--processes 3", "--nodes 2", "the total"]),
    (DDP + "--nodes 2 --node-rank 2 --rendezvous n0:1", ["--node-rank 2", "0 to 1"]),
    (DDP + "--nodes 2 --node-rank -1 --rendezvous n0:1", ["--node-rank -1", "0 to 1"]),
    (DDP + "--node-rank first", ["--node-rank", "'first'"]),
    # where they meet
    *((DDP + f"--rendezvous {text}", [f"--rendezvous {text}", "HOST:PORT"]) for text in ("n0", "n0:", ":1", "n0:0")),
    (DDP + "--rendezvous n0:65536", ["--rendezvous n0:65536", "1 to 65535"]),
    (DDP + "--rendezvous n0:http", ["--rendezvous n0:http", "1 to 65535"]),
    (DDP + f"--rendezvous n0:{'9' * 5000}", ["1 to 65535"]),
    (DDP + "--rendezvous-kind etcd", ["--rendezvous-kind etcd", "--launcher torchrun"]),
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
    (DDP + "--processes 8194 --nodes 2 --node-rank 0 --rendezvous n0:1", ["4,097 ranks", "at most 4,096"]),
    # words of one launcher
    (DDP + "--launcher torchrun --rendezvous-kind etcd", ["--rendezvous-kind etcd", "static or c10d"]),
    (DDP + "--restarts 1", ["--restarts 1", "--launcher torchrun"]),
    (DDP + "--restarts -1 --launcher torchrun", ["--restarts -1", "0 or more"]),
    # hosts that may become fewer
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
    (DDP + "--nodes 3:4 --processes 4 --out o", ["--nodes MIN:MAX", "--launcher torchrun --rendezvous-kind c10d"]),
    (SLURM + "--nodes 3:2", ["--nodes 3:2", "MIN:MAX"]),
    (DDP + "--launcher mpi --nodes 1:2 --processes 2", ["--nodes MIN:MAX", "--launcher slurm"]),
    (DDP + "--per-node spawn", ["--per-node spawn", "--launcher slurm"]),
    (SLURM + "--per-node mpi", ["--per-node mpi", "spawn or torchrun"]),
    (DDP + "--address n0:1", ["--address n0:1", "--launcher ray"]),
    (DDP + "--min-processes 1 --processes 2", ["--min-processes 1", "--launcher ray"]),
    (RAY + "--min-processes 3 --processes 2 --out o", ["--min-processes 3", "1 to 2"]),
    (RAY + "--min-processes 0 --processes 2 --out o", ["--min-processes 0", "1 to 2"]),
    (RAY + "--min-processes 2 --processes 4", ["--min-processes 2", "give --out DIR"]),
    (RAY + "--min-processes 2 --processes 4 --layout fsdp:tensor=2 --out o", ["with 3 ranks left", "tensor 2"]),
    (DDP + "--launcher-args=-v", ["--launcher-args -v", "--launcher spawn"]),
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
def test_what_to_type_on_each_host(typed: Any, launcher: str, tmp_path: Path) -> None:
    """Of several hosts and no node rank: the line for each of them, with the words as they were typed."""
    (tmp_path / "my net.py").write_text("workload = None\n")
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
    monkeypatch.setattr(host_info, "addresses_of", lambda _: ["127.0.1.1"])  # so that nothing is started
    words = "train digits --layout ddp --nodes 3 --rendezvous n0:29500"
    shown = typed(words + " --node-rank 0")
    assert [line.partition(":")[0] for line in shown.out.splitlines()] == ["on host 1", "on host 2"]
    assert shown.out.splitlines()[1].endswith(f"everyrank {words} --node-rank 2")
    assert typed(words + " --node-rank 1").out == ""


def test_a_rendezvous_that_is_loopback_is_not_tried(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian gives a host's own name 127.0.1.1: the other hosts would wait for a timeout."""
    monkeypatch.setattr(host_info, "addresses_of", lambda _: ["127.0.1.1"])
    monkeypatch.setattr(host_info, "usable_interfaces", lambda: {"lo": "127.0.0.1", "eth0": "10.0.0.5"})
    shown = typed(DDP + "--nodes 2 --node-rank 0 --rendezvous n0:29500")
    assert shown.status == 2
    for fragment in ("--rendezvous n0", "127.0.1.1", "loopback", "10.0.0.5"):
        assert fragment in shown.line


def test_a_dry_run_inside_a_launcher_says_so(cli: Cli, tmp_path: Path) -> None:
    """Torchrun has started this rank: nothing else would be started, and no worker is rendered."""
    done = cli.on_ranks(tmp_path, "train", "digits", "--layout", "ddp", "--dry-run")
    assert done.status == 0
    assert "everyrank.launch.worker" not in done.out


@pytest.mark.parametrize("words", ["doctor", "doctor --json f.json"])
def test_doctor_looks_at_an_allocation_that_lacks_srun(typed: Any, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """It starts no ranks of that allocation; whoever asks why things do not work is not refused."""
    monkeypatch.setattr(doctor_command, "run", lambda _: 0)
    assert typed(words, **JOB).status == 0


@pytest.mark.parametrize("words", ["doctor --launch --launcher slurm", "doctor --launch --launcher slurm --dry-run"])
def test_doctor_of_slurm_without_an_allocation(typed: Any, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """A job is not submitted to look at it: one line, or findings; never a traceback."""
    monkeypatch.setattr(doctor_command, "run", lambda _: 0)
    assert typed(words).status in (0, 2)
