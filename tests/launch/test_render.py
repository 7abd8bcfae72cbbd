"""What would run: the commands and batch scripts of every launcher, kept in tests/golden/.

`UPDATE_GOLDEN=1 pytest tests/launch/test_render.py` makes them again. Nothing here needs Slurm, MPI or Ray.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everyrank.errors import RankFailedError
from everyrank.launch import (
    Launch,
    mpi,
    run_ranks,
    slurm,
    spawn,
    torchrun,
)
from everyrank.launch.job import FORK_SERVER, WORKER
from everyrank.launch.slurm import BatchOptions
from launching import GOLDEN


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
    "horovodrun": ("--launcher horovodrun --processes 2", {}),
    "horovodrun_two_nodes": (
        "--launcher horovodrun --processes 4 --nodes 2 --launcher-args '-H n0:2,n1:2 --network-interfaces eth0'",
        {},
    ),
    "ray": ("--launcher ray --processes 2 --device cpu", {}),
    "ray_elastic": ("--launcher ray --processes 4 --min-processes 2 --restarts 1 --device cpu --out o", {}),
    "ray_cluster": ("--launcher ray --processes 2 --device cuda --address 10.0.0.1:6379", {}),
    "sbatch": ("--launcher slurm --processes 4 --nodes 2", {}),
    "sbatch_elastic": ("--launcher slurm --processes 8 --nodes 2:4 --requeue", {}),
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
    monkeypatch.setattr(mpi, "find_mpirun", lambda: "/opt/my mpi/bin/mpirun")
    monkeypatch.setattr(mpi, "_is_open_mpi", lambda _: is_open_mpi)
    shown = typed(TRAIN + "--launcher mpi --processes 4 --nodes 2")
    assert shown.status == 0
    golden("mpirun_open_mpi_found" if is_open_mpi else "mpirun_mpich", shown.out)


def test_mpirun_is_told_that_it_runs_as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container Open MPI refuses to start otherwise; and nobody else says so."""
    monkeypatch.setattr(mpi, "find_mpirun", lambda: None)
    for user, said in ((0, True), (1000, False)):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert ("--allow-run-as-root" in mpi.LAUNCHER.commands(Launch("mpi", 2), Path("JOB"))[0]) == said


@pytest.mark.parametrize(("towards", "is_host"), [("10.0.0.1", "1"), ("10.0.0.2", "0"), (None, "0")])
def test_torchrun_is_told_which_host_opens_the_store(
    monkeypatch: pytest.MonkeyPatch, towards: str | None, is_host: str
) -> None:
    """It would compare host names, and err."""
    monkeypatch.setattr(torchrun, "local_address_towards", lambda _: towards)
    monkeypatch.setattr(torchrun, "addresses_of", lambda _: ["10.0.0.1"])
    launch = Launch("torchrun", 4, nodes=2, rendezvous="n0:29500", options=torchrun.TorchrunOptions("c10d"))
    [command] = torchrun.LAUNCHER.commands(launch, Path("JOB"))
    [told] = [word for word in command if word.startswith("--rdzv-conf=")]
    assert f"is_host={is_host}" in told
    assert [word for word in command if word.startswith("--local-addr")] == (
        [f"--local-addr={towards}"] if towards else []
    )


@pytest.mark.parametrize("platform", ["linux", "darwin"])
@pytest.mark.parametrize("count", [1, 2])
def test_spawn_gives_each_rank_its_place(monkeypatch: pytest.MonkeyPatch, platform: str, count: int) -> None:
    """rank = node rank x ranks of a node + local rank, and each rank exactly once; a fork server counts on itself."""
    monkeypatch.setattr(sys, "platform", platform)
    places: list[tuple[int, ...]] = []
    for node_rank in range(3):
        launch = Launch(processes=3 * count, nodes=3, node_rank=node_rank, rendezvous="n0:29500")
        for command in spawn.LAUNCHER.commands(launch, Path("JOB")):
            if tuple(command[:-3]) == FORK_SERVER:
                first, all_here = map(int, command[-2:])
                places += [(first + local, local, all_here) for local in range(all_here)]
            else:
                assert tuple(command[:-4]) == WORKER
                places.append(tuple(map(int, command[-3:])))
        assert (tuple(command[:-3]) == FORK_SERVER) == (platform == "linux" and count > 1)
    assert places == [(rank, rank % count, count) for rank in range(3 * count)]


ODD = ["a b", 'c"d', "$(touch pwned)", "`touch pwned`", "e'f", "g;touch pwned", "h\\i", "*", "~", "#j", "", "ü"]


@pytest.mark.parametrize("launcher", ["torchrun", "slurm", "mpi", "horovodrun"])
def test_a_rendered_command_is_inert_in_a_shell(
    typed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launcher: str
) -> None:
    """Whatever --launcher-args has in it: pasted into bash, each word arrives as it was, and nothing is run."""
    launch = Launch(launcher, 2, arguments=tuple(ODD))
    expected = launch.row.commands(launch, Path("JOB"))[0]
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
    batch = BatchOptions(("job-name=mine", "output=o.txt"))
    text = slurm.LAUNCHER.batch_script(Launch("slurm", 4, nodes=2), batch, ["x"], tmp_path, "name")
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --job-name=mine" in lines
    assert "#SBATCH --output=o.txt" in lines
    assert len({line.partition("=")[0] for line in lines}) == len(lines)


@pytest.mark.parametrize("per_node", [None, "spawn", "torchrun"])
def test_a_batch_job_has_a_task_for_each_rank_or_one_a_node(tmp_path: Path, per_node: str | None) -> None:
    """ntasks-per-node=1 where spawn or torchrun starts the ranks of the node."""
    launch = Launch("slurm", 8, nodes=2, options=slurm.SlurmOptions(per_node))
    text = slurm.LAUNCHER.batch_script(launch, BatchOptions(), ["x"], tmp_path, "name")
    tasks = 8 if per_node is None else 2
    assert f"#SBATCH --ntasks={tasks}\n" in text
    assert f"#SBATCH --ntasks-per-node={tasks // 2}\n" in text
    assert "#SBATCH --nodes=2\n" in text
    assert "--requeue" not in text


def test_a_prologue_may_use_variables_that_are_not_set(tmp_path: Path) -> None:
    """`module load` and `conda activate` do."""
    (tmp_path / "prologue").write_text('if [ -z "$NOT_SET_ANYWHERE" ]; then WAS=empty; fi\n')
    text = slurm.LAUNCHER.batch_script(
        Launch("slurm"), BatchOptions((), tmp_path / "prologue"), ["echo", "ran"], tmp_path, "name"
    )
    said = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
    assert said.stdout == "ran\n", said.stderr


def test_a_percent_in_a_folder_is_no_pattern_of_slurms(tmp_path: Path) -> None:
    """`%u` in --output is the user's name to Slurm; %% is a percent."""
    text = slurm.LAUNCHER.batch_script(Launch("slurm"), BatchOptions(), ["x"], tmp_path / "100%users", "name")
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


# --- golden


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_every_golden_script_is_one_for_bash() -> None:
    """`bash -n` finds nothing wrong with any of them."""
    found = sorted(GOLDEN.glob("*.txt"))
    assert {path.stem for path in found} >= {*DRY_RUNS, "mpirun_mpich", "sbatch_odd"}
    for path in found:
        subprocess.run(["bash", "-n", str(path)], check=True)
