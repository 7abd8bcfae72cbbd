"""Commands and batch scripts of every launcher, compared with files in tests/golden/.

`UPDATE_GOLDEN=1 pytest tests/launch/test_render.py` writes the files again. No test needs Slurm, MPI or Ray.
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
def compare_with_golden(tmp_path: Path) -> Callable[[str, str], None]:
    """Return a function that compares a text with tests/golden/<case>.txt. Paths of this machine are replaced."""

    def compare(case: str, text: str) -> None:
        normalized = text.replace(str(tmp_path), "DIR").replace(sys.executable, "PYTHON")
        path = GOLDEN / f"{case}.txt"
        if os.environ.get("UPDATE_GOLDEN"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(normalized, encoding="utf-8")
        assert path.exists(), f"{path}: not there; UPDATE_GOLDEN=1 makes it"
        assert normalized == path.read_text(encoding="utf-8"), f"not as in {path}; UPDATE_GOLDEN=1 where that is meant"

    return compare


# --- imports from the current folder


@pytest.fixture
def create_trap_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return a function that creates modules in the current folder, and returns the names of imported ones."""
    monkeypatch.chdir(tmp_path)

    def call(*names: str) -> list[str]:
        for name in names:
            marker = tmp_path / f"{name}.imported"
            (tmp_path / f"{name}.py").write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\n")
        return sorted(path.name for path in tmp_path.glob("*.imported"))

    return call


def test_rank_imports_nothing_from_the_current_folder(create_trap_modules: Any) -> None:
    """A folder such as /tmp may contain code of other users."""
    create_trap_modules("json", "psutil", "random")
    with contextlib.suppress(RankFailedError):
        run_ranks(Launch(processes=1, timeout_seconds=60), lambda info: info.size)
    assert create_trap_modules() == []


def test_command_line_imports_no_dependencies_from_the_current_folder(create_trap_modules: Any) -> None:
    """This covers `python -m everyrank`. The package itself is found first."""
    create_trap_modules("rich", "torch")
    command = [sys.executable, "-m", "everyrank", "doctor", "--timeout", "-1"]
    subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert create_trap_modules() == []


# --- dry runs

DRY_RUN = "train digits --layout ddp --dry-run "

TWO_NODES_ARGS = "--nodes 2 --rendezvous n0:29500 "

ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NTASKS": "4"}

DRY_RUNS: dict[str, tuple[str, dict[str, str]]] = {
    "spawn": ("--processes 2", {}),
    "spawn_node_1_of_2": ("--processes 4 --node-rank 1 " + TWO_NODES_ARGS, {}),
    "spawn_two_nodes": ("--processes 4 " + TWO_NODES_ARGS, {}),
    "torchrun_two_nodes": ("--launcher torchrun --processes 4 " + TWO_NODES_ARGS, {}),
    "torchrun_standalone": ("--launcher torchrun --processes 2", {}),
    "torchrun_static": ("--launcher torchrun --processes 4 --node-rank 1 " + TWO_NODES_ARGS, {}),
    "torchrun_c10d": ("--launcher torchrun --processes 4 --rendezvous-kind c10d " + TWO_NODES_ARGS, {}),
    "torchrun_elastic": (
        "--launcher torchrun --processes 4 --rendezvous-kind c10d --nodes 1:2 --rendezvous n0:29500 --restarts 3 "
        "--launcher-args '--log-dir \"my logs\"' --out o",
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
    "sbatch_elastic": ("--launcher slurm --processes 8 --nodes 2:4 --requeue --out o", {}),
    "sbatch_per_node": ("--launcher slurm --processes 8 --nodes 2 --per-node torchrun", {}),
}


@pytest.mark.parametrize("case", DRY_RUNS)
def test_dry_run_prints_the_exact_commands(
    run_main: Any, compare_with_golden: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str
) -> None:
    """None of the launchers is installed. No process starts and no file is written."""
    monkeypatch.setattr(torchrun, "local_address_towards", lambda _: "10.0.0.2")
    monkeypatch.setattr(torchrun, "addresses_of", lambda _: ["10.0.0.1"])
    args, variables = DRY_RUNS[case]
    result = run_main(DRY_RUN + args, **variables)
    assert (result.status, result.err) == (0, "")
    assert not list(tmp_path.iterdir())
    compare_with_golden(case, result.out)


@pytest.mark.parametrize("is_open_mpi", [True, False], ids=["Open MPI", "MPICH"])
def test_open_mpi_and_mpich_get_different_arguments(
    run_main: Any, compare_with_golden: Any, monkeypatch: pytest.MonkeyPatch, is_open_mpi: bool
) -> None:
    """MPICH's mpirun refuses Open MPI's --bind-to none --oversubscribe."""
    monkeypatch.setattr(mpi, "find_mpirun", lambda: "/opt/my mpi/bin/mpirun")
    monkeypatch.setattr(mpi, "_is_open_mpi", lambda _: is_open_mpi)
    result = run_main(DRY_RUN + "--launcher mpi --processes 4 --nodes 2")
    assert result.status == 0
    compare_with_golden("mpirun_open_mpi_found" if is_open_mpi else "mpirun_mpich", result.out)


def test_mpirun_gets_allow_run_as_root_only_as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """As root, for example in a container, Open MPI refuses to start without it."""
    monkeypatch.setattr(mpi, "find_mpirun", lambda: None)
    for user_id, is_allowed in ((0, True), (1000, False)):
        monkeypatch.setattr(os, "geteuid", lambda user_id=user_id: user_id)
        assert ("--allow-run-as-root" in mpi.LAUNCHER.commands(Launch("mpi", 2), Path("JOB"))[0]) == is_allowed


@pytest.mark.parametrize(("local_address", "is_host"), [("10.0.0.1", "1"), ("10.0.0.2", "0"), (None, "0")])
def test_torchrun_gets_is_host_and_the_local_address(
    monkeypatch: pytest.MonkeyPatch, local_address: str | None, is_host: str
) -> None:
    """torchrun itself would compare host names, which is unreliable."""
    monkeypatch.setattr(torchrun, "local_address_towards", lambda _: local_address)
    monkeypatch.setattr(torchrun, "addresses_of", lambda _: ["10.0.0.1"])
    launch = Launch("torchrun", 4, nodes=2, rendezvous="n0:29500", options=torchrun.TorchrunOptions("c10d"))
    [command] = torchrun.LAUNCHER.commands(launch, Path("JOB"))
    [rendezvous_config] = [argument for argument in command if argument.startswith("--rdzv-conf=")]
    assert f"is_host={is_host}" in rendezvous_config
    assert [argument for argument in command if argument.startswith("--local-addr")] == (
        [f"--local-addr={local_address}"] if local_address else []
    )


@pytest.mark.parametrize("platform", ["linux", "darwin"])
@pytest.mark.parametrize("count", [1, 2])
def test_spawn_starts_each_rank_once(monkeypatch: pytest.MonkeyPatch, platform: str, count: int) -> None:
    """A rank is node rank x ranks of a node + local rank. A fork server numbers its ranks itself."""
    monkeypatch.setattr(sys, "platform", platform)
    rank_assignments: list[tuple[int, ...]] = []
    for node_rank in range(3):
        launch = Launch(processes=3 * count, nodes=3, node_rank=node_rank, rendezvous="n0:29500")
        for command in spawn.LAUNCHER.commands(launch, Path("JOB")):
            if tuple(command[:-3]) == FORK_SERVER:
                first, local_size = map(int, command[-2:])
                rank_assignments += [(first + local_rank, local_rank, local_size) for local_rank in range(local_size)]
            else:
                assert tuple(command[:-4]) == WORKER
                rank_assignments.append(tuple(map(int, command[-3:])))
        assert (tuple(command[:-3]) == FORK_SERVER) == (platform == "linux" and count > 1)
    assert rank_assignments == [(rank, rank % count, count) for rank in range(3 * count)]


ODD_ARGUMENTS = [
    "a b",
    'c"d',
    "$(touch pwned)",
    "`touch pwned`",
    "e'f",
    "g;touch pwned",
    "h\\i",
    "*",
    "~",
    "#j",
    "",
    "ü",
]


@pytest.mark.parametrize("launcher", ["torchrun", "slurm", "mpi", "horovodrun"])
def test_rendered_command_is_safe_to_paste_into_bash(
    run_main: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launcher: str
) -> None:
    """Each word of --launcher-args arrives unchanged, and none of it is run."""
    launch = Launch(launcher, 2, arguments=tuple(ODD_ARGUMENTS))
    expected = launch.row.commands(launch, Path("JOB"))[0]
    args = ["train", "digits", "--layout", "ddp", "--processes", "2", "--launcher", launcher, "--dry-run"]
    allocation = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"} if launcher == "slurm" else {}
    result = run_main(*args, f"--launcher-args={shlex.join(ODD_ARGUMENTS)}", **allocation)
    assert result.err == ""
    monkeypatch.undo()
    output = subprocess.run(
        ["bash", "-c", "printf '%s\\0' " + result.out], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert output.stdout.split("\0")[:-1] == expected
    assert not list(tmp_path.iterdir())


# --- batch scripts


def parse_sbatch_line(line: str) -> tuple[str, str]:
    """Return key and value of an `#SBATCH` line, parsed as sbatch does: with quotes, backslashes and # comments."""
    text, tokens, quote, index = line.removeprefix("#SBATCH "), [""], "", 0
    while index < len(text):
        character = text[index]
        if character == "\\" and index + 1 < len(text):
            index += 1
            tokens[-1] += text[index]
        elif quote:
            quote = "" if character == quote else quote
            tokens[-1] += character if quote else ""
        elif character in "\"'":
            quote = character
        elif character.isspace():
            tokens.append("")
        elif character == "#":
            break
        else:
            tokens[-1] += character
        index += 1
    assert not quote, line
    [token] = [token for token in tokens if token]
    key, _, value = token.partition("=")
    return key, value


def write_script(path: Path, text: str) -> Path:
    """Write an executable bash script."""
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


def test_batch_script_quotes_odd_names(
    run_main: Any, compare_with_golden: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The script is valid bash. It calls the interpreter with the original arguments in the original folder.

    sbatch reads the original values of the options. No part of a name is run by a shell.
    """
    folder = tmp_path / ODD_FOLDER
    folder.mkdir()
    (folder / ODD_WORKLOAD).write_text("workload = None\n")
    python = write_script(tmp_path / "an `interpreter`" / "python 3", 'printf \'%s\\0\' "$PWD" "${FROM_PROLOGUE}" "$@"')
    prologue = tmp_path / "my $(touch pwned)\nprologue"
    prologue.write_text("# loads what is needed\nexport FROM_PROLOGUE='from the prologue'\n")
    args = ["train", ODD_WORKLOAD, "--layout", "ddp", "--processes", "2", "--launcher", "slurm", "--set", "x=$HOME"]
    args += ["--prologue", str(prologue), "--requeue", "--sbatch", *(f"{k}={v}" for k, v in ODD_OPTIONS.items())]
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "executable", str(python))
    result = run_main(*args, "--dry-run")
    assert (result.status, result.err) == (0, "")
    monkeypatch.undo()
    compare_with_golden("sbatch_odd", result.out)

    text = result.out.partition("# in the allocation:")[0]
    (tmp_path / "job.sbatch").write_text(text)
    subprocess.run(["bash", "-n", "job.sbatch"], cwd=tmp_path, check=True)
    output = subprocess.run(["bash", "job.sbatch"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert output.stdout.split("\0")[:-1] == [str(folder), "from the prologue", "-P", "-m", "everyrank", *args]
    assert output.stderr == ""
    assert not list(tmp_path.rglob("pwned"))

    options = dict(parse_sbatch_line(line) for line in text.splitlines() if line.startswith("#SBATCH"))
    expected_options = {f"--{key}": value for key, value in ODD_OPTIONS.items()}
    assert {key: options[key] for key in expected_options} == expected_options
    assert options["--job-name"] == "everyrank-" + ODD_WORKLOAD.removesuffix(".py")
    assert options["--output"] == str(folder / "slurm-%j.out")
    assert options["--signal"].startswith("B:USR1@")
    assert "--requeue" in options


def test_sbatch_option_of_the_user_replaces_the_default(tmp_path: Path) -> None:
    """Each option is in the script once."""
    batch = BatchOptions(("job-name=mine", "output=o.txt"))
    text = slurm.LAUNCHER.batch_script(Launch("slurm", 4, nodes=2), batch, ["x"], tmp_path, "name")
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --job-name=mine" in lines
    assert "#SBATCH --output=o.txt" in lines
    assert len({line.partition("=")[0] for line in lines}) == len(lines)


@pytest.mark.parametrize("per_node", [None, "spawn", "torchrun"])
def test_batch_job_has_a_task_for_each_rank_or_each_node(tmp_path: Path, per_node: str | None) -> None:
    """The script has ntasks-per-node=1 if spawn or torchrun starts the ranks of a node."""
    launch = Launch("slurm", 8, nodes=2, options=slurm.SlurmOptions(per_node))
    text = slurm.LAUNCHER.batch_script(launch, BatchOptions(), ["x"], tmp_path, "name")
    tasks = 8 if per_node is None else 2
    assert f"#SBATCH --ntasks={tasks}\n" in text
    assert f"#SBATCH --ntasks-per-node={tasks // 2}\n" in text
    assert "#SBATCH --nodes=2\n" in text
    assert "--requeue" not in text


def test_prologue_may_use_unset_variables(tmp_path: Path) -> None:
    """`module load` and `conda activate` do that."""
    (tmp_path / "prologue").write_text('if [ -z "$NOT_SET_ANYWHERE" ]; then WAS=empty; fi\n')
    text = slurm.LAUNCHER.batch_script(
        Launch("slurm"), BatchOptions((), tmp_path / "prologue"), ["echo", "ran"], tmp_path, "name"
    )
    output = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
    assert output.stdout == "ran\n", output.stderr


def test_percent_sign_in_a_folder_is_escaped_for_slurm(tmp_path: Path) -> None:
    """In --output, Slurm replaces `%u` with the user's name, and `%%` is a percent sign."""
    text = slurm.LAUNCHER.batch_script(Launch("slurm"), BatchOptions(), ["x"], tmp_path / "100%users", "name")
    assert f"--output={tmp_path}/100%%users/slurm-%j.out\n" in text


@pytest.mark.parametrize("refused", [False, True])
def test_batch_script_is_submitted_to_sbatch(
    run_main: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refused: bool
) -> None:
    """sbatch gets the script of the dry run.

    The output has the job number, or one line with the reason of the refusal.
    """
    ending = "echo 'sbatch: error: first' >&2; echo 'sbatch: error: no such partition' >&2; exit 1"
    sbatch = 'printf "%s\\n" "$@" > arguments.txt\n' + (ending if refused else "echo '4711;cluster'")
    args = "train digits --layout ddp --processes 2 --launcher slurm --sbatch partition=gpu"
    dry_run = run_main(args + " --dry-run")
    expected_script = dry_run.out.partition("\n# in the allocation:")[0]
    write_script(tmp_path / "bin" / "sbatch", sbatch)
    monkeypatch.undo()  # processes may start from here on
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    result = run_main(args)
    flag, path = (tmp_path / "arguments.txt").read_text().splitlines()
    assert flag == "--parsable"
    assert Path(path).read_text() == expected_script
    if refused:
        assert result.status == 2
        assert result.out == ""
        assert "sbatch refused" in result.line
        assert result.line.endswith("no such partition")
    else:
        assert (result.status, result.err) == (0, "")
        assert "4711" in result.out
        assert "cluster" not in result.out
        assert path in result.out


# --- golden files


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_every_golden_file_is_valid_bash() -> None:
    golden_files = sorted(GOLDEN.glob("*.txt"))
    assert {path.stem for path in golden_files} >= {*DRY_RUNS, "mpirun_mpich", "sbatch_odd"}
    for path in golden_files:
        subprocess.run(["bash", "-n", str(path)], check=True)
