"""`everyrank launch` and `everyrank watch` run a user's script: exit codes, failures, hangs and signals."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everyrank.errors import RankFailedError
from everyrank.launch import Launch, RankInfo
from everyrank.script import rank, read_command, start, variables, watching
from everyrank.script.command import can_preload_torch, imports_horovod
from everyrank.script.variables import rank_variables
from processes import Cli, refusal_message

SCRIPT = """
import atexit, json, os, signal, sys, time
import torch
import torch.distributed as dist

def step(rank, mode):
    if mode == "raise" and rank == 1:
        raise ValueError("a broken image")  # raise
    if mode == "exit" and rank == 1:
        sys.exit(3)  # exit
    if mode == "exit now" and rank == 1:
        os._exit(5)  # exit now
    if mode == "segfault" and rank == 1:
        import ctypes
        ctypes.string_at(0)  # segfault
    if mode == "hang" and rank == 1:
        while True:
            time.sleep(0.05)  # hang
    if mode == "cleanup" and rank == 1:
        try:
            raise ValueError("a broken image")  # cleanup
        finally:
            dist.destroy_process_group()  # the others notice it first
            time.sleep(1.0)
    if mode == "once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == 1:
        raise ValueError("a broken image")  # once
    dist.all_reduce(torch.ones(3))  # waits

if __name__ == "__main__":
    mode = sys.argv[1]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    atexit.register(lambda: open(f"ended{rank}", "w").close())
    print(f"rank {rank} of {dist.get_world_size()}, {sys.argv[1:]}", flush=True)
    if mode == "signal":
        def save(number, _):
            open(f"saved{rank}", "w").write(str(number))
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        open(f"ready{rank}", "w").close()
        time.sleep(60)
    step(rank, mode)
    dist.destroy_process_group()
"""


def line_of(mark: str) -> str:
    """Return file, line number and function of the line of SCRIPT that ends with this comment."""
    lines = SCRIPT.splitlines()
    return f"train.py:{next(number for number, line in enumerate(lines, 1) if line.endswith(f'# {mark}'))} in step"


@pytest.fixture
def train(tmp_path: Path) -> Path:
    """The path of a train.py with SCRIPT."""
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def test_launch_runs_a_torchrun_script(cli: Cli, tmp_path: Path, train: Path) -> None:
    """Rank 0 prints to the terminal, other ranks to files. Arguments after the script are passed to it."""
    running = cli.start(
        tmp_path, "launch", "--processes", 2, "--logs", "logs", "train.py", "fine", "--processes", "9", "--help"
    )
    status, out, err = running.end()
    assert (status, out) == (0, "rank 0 of 2, ['fine', '--processes', '9', '--help']\n")
    note_line, last_line = err.splitlines()
    assert note_line.startswith("note: train.py gets --processes")
    assert last_line.endswith("logs/rank*.log")
    log_lines = (train.parent / "logs" / "rank1.log").read_text().splitlines()
    assert log_lines[1:] == ["rank 1 of 2, ['fine', '--processes', '9', '--help']"]
    assert (train.parent / "logs" / "resources.csv").read_text().startswith("time,host")
    assert running.remaining_processes() == {}


@pytest.mark.parametrize(
    ("mode", "cause"),
    [
        ("raise", "ValueError: a broken image"),
        ("exit", "exited with status 3"),
        ("exit now", "exited with status 5"),
        ("segfault", "ended by SIGSEGV"),
        ("cleanup", "ValueError: a broken image"),
    ],
)
@pytest.mark.usefixtures("train")
def test_launch_names_the_rank_and_line_that_failed_first(cli: Cli, tmp_path: Path, mode: str, cause: str) -> None:
    """The error names the failed rank and its line, not a rank that lost its peer. No process is left.

    Exit functions of the script run as under Python.
    """
    running = cli.start(tmp_path, "launch", "--processes", 2, "train.py", mode)
    status, _, err = running.end()
    assert status == 4
    last_line = err.splitlines()[-1]
    assert "everyrank: rank 1 of 2 on " in last_line, err
    assert cause in last_line
    assert line_of(mode) in last_line
    assert (tmp_path / "ended1").exists() is (mode not in ("exit now", "segfault"))
    assert running.remaining_processes() == {}


def test_launch_warns_about_horovod_under_other_launchers(cli: Cli, tmp_path: Path) -> None:
    """Without horovodrun, each process would train by itself, without an error."""
    (tmp_path / "train.py").write_text("if False:\n    import horovod.torch as hvd\n")
    status, _, err = cli.start(tmp_path, "launch", "--processes", 2, "train.py").end()
    assert status == 0
    assert "--launcher horovodrun" in err
    (tmp_path / "train.py").write_text("import torch\n")
    assert "horovod" not in cli.start(tmp_path, "launch", "--processes", 2, "train.py").end()[2]


@pytest.mark.usefixtures("train")
def test_launch_restarts_failed_ranks(cli: Cli, tmp_path: Path) -> None:
    """With the spawn launcher, everyrank restarts all ranks and sets TORCHELASTIC_RESTART_COUNT as torchrun does."""
    running = cli.start(tmp_path, "launch", "--processes", 2, "--restarts", 1, "train.py", "once")
    status, out, err = running.end()
    assert (status, out.count("rank 0 of 2")) == (0, 2)
    assert f"{line_of('once')}: ValueError: a broken image" in err
    assert "(1 of 1)" in err


def test_launch_forwards_sigterm(cli: Cli, tmp_path: Path, train: Path) -> None:
    """SIGTERM reaches the script's handler on each rank."""
    running = cli.start(tmp_path, "launch", "--processes", 2, "train.py", "signal")
    running.wait_for(lambda: all((train.parent / f"ready{rank}").exists() for rank in range(2)))
    os.kill(running.process.pid, signal.SIGTERM)
    assert running.end()[0] == 143
    assert [(train.parent / f"saved{rank}").read_text() for rank in range(2)] == ["15", "15"]
    assert running.remaining_processes() == {}


def explains_hang(text: str) -> bool:
    """Return whether the text names rank 1, the collective that it never reached, and its current line."""
    one_line = " ".join(text.split())
    return "rank 1 never reached all_reduce" in one_line and f"is at {line_of('hang')}" in one_line


@pytest.mark.usefixtures("train")
def test_launch_explains_a_hang(cli: Cli, tmp_path: Path) -> None:
    """`launch` explains the hang once, after --timeout. `autopsy` explains it for a process id or a log directory."""
    running = cli.start(tmp_path, "launch", "--processes", 2, "--timeout", 2, "--logs", "logs", "train.py", "hang")
    running.wait_for(lambda: "(--timeout)" in running.output_so_far()[1])
    assert explains_hang(running.output_so_far()[1])
    assert f"rank 0 waits in it, at {line_of('waits')}" in running.output_so_far()[1]
    pid = json.loads((tmp_path / "logs" / "autopsy" / "rank0.state").read_text())["pid"]
    for target in (pid, "logs"):
        status, out, err = cli(tmp_path, "autopsy", target)
        assert status == 0, err
        assert explains_hang(out)
    assert running.process.poll() is None
    os.kill(running.process.pid, signal.SIGINT)
    assert running.end()[0] == 130
    assert running.output_so_far()[1].count("(--timeout)") == 1
    assert running.remaining_processes() == {}


@pytest.mark.parametrize("how", ["watch", pytest.param("import", marks=pytest.mark.integration)])
def test_hang_is_explained_under_torchrun(cli: Cli, train: Path, tmp_path: Path, how: str) -> None:
    """`everyrank watch` and `import everyrank.watch` work under torchrun. SIGUSR2 also prints the explanation."""
    if how == "watch":
        args: list[Any] = ["-m", "everyrank", "watch", "--timeout", "2", "train.py", "hang"]
    else:
        # the import goes to the empty first line, so that line numbers do not change
        train.write_text("import everyrank.watch" + SCRIPT)
        args = ["train.py", "hang"]
    command = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    running = cli.start(tmp_path, *args, command=command, TMPDIR=str(tmp_path))
    if how == "watch":
        running.wait_for(lambda: "(--timeout)" in running.output_so_far()[1])
    else:
        seen_files = running.wait_for(
            lambda: [path for path in tmp_path.rglob("rank0.seen") if "step" in path.read_text()]
        )
        os.kill(json.loads(seen_files[0].with_name("rank0.state").read_text())["pid"], signal.SIGUSR2)
        running.wait_for(lambda: "everyrank: autopsy:" in running.output_so_far()[1])
    assert explains_hang(running.output_so_far()[1])
    assert running.process.poll() is None


def test_watch_that_cannot_write_does_not_end_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank of Ray, whose folder below the temporary one belongs to somebody else, runs without the watch."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "256")  # the watch would set it
    (tmp_path / f"everyrank-{os.getuid()}").symlink_to(tmp_path)
    watching.watch(RankInfo(0, 0, 1, 1, "ray", ""), 300.0)
    err = capsys.readouterr().err
    assert "everyrank: not watched: " in err
    assert "belongs to another user; set TMPDIR to your own folder" in err


def test_watch_deletes_only_folders_without_recent_files(tmp_path: Path) -> None:
    """A rank that runs for weeks writes to its files, which does not change the time of their folder."""
    for name in ("running", "ended", "empty"):
        (tmp_path / name).mkdir()
    for name in ("running", "ended"):
        (tmp_path / name / "rank0.seen").touch()
    eight_days_ago = time.time() - 8 * 86_400
    for path in (tmp_path / "ended" / "rank0.seen", *tmp_path.iterdir()):
        os.utime(path, (eight_days_ago, eight_days_ago))
    watching._delete_old_folders(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["running"]


LOCAL = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
TORCHRUN = LOCAL | {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, False),  # concurrent starts of torchrun, with ports of their own
        (LOCAL | {"LOCAL_WORLD_SIZE": "2"}, True),  # ranks from two terminals
        (LOCAL, True),
        ({"WORLD_SIZE": "2", "LOCAL_SIZE": "2"}, False),
    ],
)
def test_watched_ranks_of_one_host_have_the_same_folder(
    environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent process distinguishes the starts of a launcher, but not ranks that a user starts one by one."""
    parents = map(str, itertools.count())
    monkeypatch.setattr(watching, "launcher_process", lambda _: next(parents))
    ranks = [watching._run_from_environment({**environment, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    runs = [run for run in ranks if run is not None]
    assert [(run.rank, run.size, run.is_one_host) for run in runs] == [(0, 2, True), (1, 2, True)]
    assert (runs[0].key == runs[1].key) is expected
    assert runs[0].is_unique is not expected


def test_watched_ranks_of_mpich_on_several_hosts_have_a_folder_for_each_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPICH sets no variable that differs between starts; the process of mpiexec on each host knows its address."""

    def run_of(port: int, proxy: int) -> Any:
        command = ["/usr/bin/hydra_pmi_proxy", "--control-port", f"n0:{port}", "--proxy-id", str(proxy)]
        parents = [SimpleNamespace(cmdline=list), SimpleNamespace(cmdline=lambda: command)]
        monkeypatch.setattr(watching.psutil, "Process", lambda: SimpleNamespace(parents=lambda: parents))
        numbers = {"PMI_RANK": str(2 * proxy), "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
        return watching._run_from_environment(numbers | LOCAL | {"WORLD_SIZE": "4"})

    assert run_of(4000, 0).key == run_of(4000, 1).key != run_of(4001, 0).key
    assert not run_of(4000, 0).is_one_host


@dataclasses.dataclass
class Store:
    """The attributes of torch's `TCPStore`, in a `PrefixStore`."""

    host: str = ""
    port: int = 0

    def group(self, rank: int) -> Any:
        """Return the functions of `torch.distributed` after `init_process_group(init_method=...)`."""
        prefix = SimpleNamespace(underlying_store=SimpleNamespace(underlying_store=self))
        world = SimpleNamespace(_get_default_store=lambda: prefix)
        return SimpleNamespace(get_rank=lambda: rank, get_world_size=lambda: 2, distributed_c10d=world)


@pytest.mark.parametrize(
    ("store", "is_one_host", "has_address"),
    [(Store("n0", 29500), False, True), (Store("localhost", 29500), True, True), (Store(), True, False)],
)
def test_watched_ranks_without_launcher_find_each_other_by_their_store(
    store: Store, is_one_host: bool, has_address: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that call `init_process_group(init_method="tcp://...")` have different parents, or different hosts."""
    parents = map(str, itertools.count())
    monkeypatch.setattr(watching, "launcher_process", lambda _: next(parents))
    runs = [watching._run_of_group(store.group(rank)) for rank in range(2)]
    assert (runs[0].key == runs[1].key) is has_address
    assert (runs[0].is_one_host, runs[0].is_unique) == (is_one_host, not has_address)
    if has_address:
        other = dataclasses.replace(store, port=29501)
        assert watching._run_of_group(other.group(0)).key != runs[0].key


def test_watch_keeps_traceback_and_exit_code(cli: Cli, tmp_path: Path) -> None:
    """A failing script has the same traceback and exit code as without `watch`."""
    (tmp_path / "fail.py").write_text("import sys\nprint(sys.argv, __name__)\nraise KeyError('lr')\n")
    running = cli.start(tmp_path, "watch", "fail.py", "--lr", "1", is_forked=False)
    status, out, err = running.end()
    assert (status, out) == (1, "['fail.py', '--lr', '1'] __main__\n")
    assert err.splitlines()[0] == "Traceback (most recent call last):"
    assert err.splitlines()[-1] == "KeyError: 'lr'"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no script was given"),
        (["missing.py"], "missing.py: there is no such file"),
        (["train"], "train: there is no such file"),
        (["."], ".: it is a folder"),
        (["broken.py"], "broken.py:1: SyntaxError"),
        (["null.py"], "null.py"),
        (["-m", "no_such_module"], "-m no_such_module: "),
        (["--grace", "-1", "train.py"], "--grace -1: give 0 or more"),
        (["--restarts", "-1", "train.py"], "--restarts -1: give 0 or more"),
        (["--launcher", "nope", "train.py"], "--launcher nope: unknown launcher"),
        (["--timeout", "0", "train.py"], "--timeout 0"),
        (["--processes", "3", "--nodes", "2", "train.py"], "--processes 3 --nodes 2"),
    ],
)
def test_launch_refuses_wrong_arguments(
    train: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    """The error is one line, and no process is started."""
    monkeypatch.chdir(train.parent)
    Path("broken.py").write_text("def:\n")
    Path("null.py").write_bytes(b"a = 1\0\n")
    assert message in refusal_message(capsys, "launch", *words)


def test_dry_run_prints_the_command_or_batch_script(
    train: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--dry-run prints the launcher's command. Outside a Slurm allocation, it prints a batch script."""
    from everyrank.cli import main

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(train.parent)
    assert main(["launch", "--dry-run", "--launcher", "torchrun", "--processes", "4", "train.py", "fine"]) == 0
    assert "--nproc-per-node=4" in capsys.readouterr().out
    args = ["launch", "--dry-run", "--launcher", "slurm", "--nodes", "2", "--processes", "4", "train.py", "--dry-run"]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "#SBATCH --job-name=everyrank-train" in out
    assert "everyrank launch --launcher slurm --nodes 2 --processes 4 train.py --dry-run\n" in out
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch", True),
        ("import sys\nfrom torch import nn\nimport os\nos.environ['A'] = '1'", True),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch", False),
        ("import os\nif True:\n    os.putenv('A', '1')\nimport torch", False),
        ("from dotenv import load_dotenv\nload_dotenv()\nimport torch", False),
        ("print('no torch at all')", False),
    ],
)
def test_torch_is_not_preloaded_if_the_script_sets_variables_first(tmp_path: Path, source: str, expected: bool) -> None:
    """If a script sets environment variables before it imports torch, its process must not have imported torch."""
    (tmp_path / "script.py").write_text(source)
    assert can_preload_torch(read_command([str(tmp_path / "script.py")])) is expected


LIKE_PYTHON = """
import dataclasses, sys
import neighbour

@dataclasses.dataclass
class Config:
    rate: float = 0.1

print(__file__, sys.path[0], sys.argv, [field.type for field in dataclasses.fields(Config)])
"""


def test_script_runs_as_under_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script that is a symlink imports its neighbours. `__file__` is absolute, and annotations are not strings."""
    for name in ("real", "links"):
        (tmp_path / name).mkdir()
    (tmp_path / "real" / "neighbour.py").touch()
    (tmp_path / "real" / "train.py").write_text(LIKE_PYTHON)
    (tmp_path / "links" / "train.py").symlink_to(tmp_path / "real" / "train.py")
    monkeypatch.chdir(tmp_path / "links")
    expected = subprocess.run([sys.executable, "train.py", "-x"], capture_output=True, text=True, check=True).stdout
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    read_command(["train.py", "-x"]).run()
    sys.modules.pop("neighbour")
    assert capsys.readouterr().out == expected
    assert f"{tmp_path}/links/train.py {tmp_path}/real " in expected


def test_script_is_checked_without_its_warnings(tmp_path: Path) -> None:
    """Each rank shows the warnings of the script. The checks before it would repeat them, without a file name."""
    (tmp_path / "script.py").write_text("import re\nre.compile('\\d')\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        command = read_command([str(tmp_path / "script.py")])
        assert not imports_horovod(command)
        assert not can_preload_torch(command)


def test_exit_functions_that_wait_do_not_hide_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may wait for other ranks, which wait for this one."""
    is_reported, errors = threading.Event(), list[BaseException]()

    def fail(error: BaseException) -> None:
        errors.append(error)
        is_reported.set()

    monkeypatch.setattr(rank, "_EXIT_SECONDS", 0.01)
    monkeypatch.setattr(rank, "atexit", SimpleNamespace(_run_exitfuncs=lambda: is_reported.wait(60.0)))
    cause = ValueError("a broken image")
    rank._run_exit_functions(RankInfo(0, 0, 2, 2, "spawn", "", fail=fail), cause)
    assert errors == [cause]


@pytest.mark.parametrize(
    ("code", "status"), [(None, 0), (False, 0), (256, 0), (3, 3), (True, 1), (-1, 255), ("no data", 1), (0.0, 1)]
)
def test_status_of_sys_exit_is_that_of_python(code: Any, status: int) -> None:
    """`sys.exit` takes numbers, of which the parent process gets eight bits, and texts."""
    if status == 0:
        rank._check_status(SystemExit(code))
        return
    with pytest.raises(RankFailedError, match=f"exited with status {status}(: {code})?$"):
        rank._check_status(SystemExit(code))


@pytest.mark.parametrize(
    ("launch", "module"),
    [
        (Launch(processes=2), "preloaded"),
        (Launch(processes=1), "rank"),
        (Launch(processes=2, nodes=2, node_rank=0, rendezvous="n0:29500"), "rank"),
        (Launch("mpi", processes=2), "rank"),  # has no fork server, and may start one rank on each host
    ],
)
def test_only_rank_of_a_host_imports_torch_with_all_threads(tmp_path: Path, launch: Launch, module: str) -> None:
    """Under everyrank's OMP_NUM_THREADS=1, torch would compute with one thread. torchrun leaves the cores to it."""
    (tmp_path / "script.py").write_text("import torch\n")
    assert start._module_of_ranks(launch, read_command([str(tmp_path / "script.py")])) == module


def test_rank_variables_for_file_and_tcp_rendezvous(tmp_path: Path) -> None:
    """With a file rendezvous, rank 0 reserves a port and the other ranks read it. A launcher's TCP address is kept."""
    url = (tmp_path / "rendezvous").as_uri()
    infos = [RankInfo(rank, rank, 2, 2, "spawn", url) for rank in range(2)]
    rank_0, rank_1 = (rank_variables(info, 5.0) for info in infos)
    assert rank_0["MASTER_PORT"] == rank_1["MASTER_PORT"]
    assert (rank_0["RANK"], rank_1["RANK"], rank_1["WORLD_SIZE"]) == ("0", "1", "2")
    assert rank_1["MASTER_ADDR"] == "127.0.0.1"
    tcp = rank_variables(RankInfo(3, 1, 4, 2, "slurm", "tcp://n1:29501"), 5.0)
    assert (tcp["MASTER_ADDR"], tcp["MASTER_PORT"], tcp["GROUP_RANK"]) == ("n1", "29501", "1")
    (tmp_path / "other").mkdir()
    with pytest.raises(RankFailedError, match=r"rank 0 .* within 0\.1 s"):
        rank_variables(RankInfo(1, 1, 2, 2, "spawn", (tmp_path / "other" / "rendezvous").as_uri()), 0.1)


def test_ranks_do_not_read_the_address_of_an_earlier_start(tmp_path: Path) -> None:
    """All starts of mpirun and srun on a host have one folder. In one start, several scripts may run in turn."""

    def port_of(rank: int, start: str, timeout_seconds: float = 0.1) -> str:
        url = (tmp_path / f"meeting-{start}").as_uri()
        return rank_variables(RankInfo(rank, rank, 2, 2, "mpi", url), timeout_seconds)["MASTER_PORT"]

    first = port_of(0, "first")
    with pytest.raises(RankFailedError, match="did not publish its address"):
        port_of(1, "second")
    assert port_of(1, "first") == first
    with pytest.raises(RankFailedError, match="did not publish its address"):
        port_of(1, "first")
    second_script = port_of(0, "first")
    assert port_of(1, "first") == second_script
    for path in tmp_path.iterdir():
        os.utime(path, (time.time() - 2 * 86_400,) * 2)
    port_of(0, "third")
    assert [path.name for path in tmp_path.iterdir()] == ["meeting-third.address"]


@pytest.mark.parametrize("is_same_host", [True, False])
def test_host_of_rank_0_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_same_host: bool) -> None:
    """In a container that has only a loopback interface, the ranks of several simulated nodes meet there."""
    monkeypatch.setattr(variables, "usable_interfaces", lambda: {"lo": "127.0.0.1"})
    url = "meet://" + str(tmp_path / "address")
    assert rank_variables(RankInfo(0, 0, 2, 1, "ray", url), 5.0)["MASTER_ADDR"] == "127.0.0.1"
    if is_same_host:
        assert rank_variables(RankInfo(1, 0, 2, 1, "ray", url), 5.0)["MASTER_ADDR"] == "127.0.0.1"
    else:
        monkeypatch.setattr(variables, "boot_id", lambda: "a different host")
        with pytest.raises(RankFailedError, match="the host of rank 0 has no network interface"):
            rank_variables(RankInfo(1, 0, 2, 1, "ray", url), 5.0)


def test_launch_runs_a_module(cli: Cli, tmp_path: Path) -> None:
    """`-m` runs a module, as it does for Python."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "run.py").write_text(
        "import os, sys\nprint(os.environ['WORLD_SIZE'], sys.argv[1:], __name__)\n"
    )
    running = cli.start(tmp_path, "launch", "--processes", 2, "-m", "pkg.run", "-x")
    status, out, err = running.end()
    assert (status, out) == (0, "2 ['-x'] __main__\n"), err
