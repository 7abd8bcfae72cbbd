"""Hostile use of `everyrank audit`: closed terminals, ranks typed by hand, crashes, links, limits, odd scripts."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from auditing import SCRIPTS, line_numbers_with
from everyrank.audit import examine
from everyrank.audit.events import Stopped
from everyrank.audit.evidence import Evidence
from everyrank.audit.external_launch import external_rank, shared_folder
from everyrank.audit.start import ScriptRun
from everyrank.errors import EveryrankError, UsageError
from processes import Cli, RunningCommand, free_port, wait_for_marked_processes

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in Linux's /proc")

LEFT_SECONDS = 8.0  # time for remaining processes to end


def remaining_processes(running: RunningCommand) -> dict[int, str]:
    """Return the processes of a command that have not ended in time."""
    return wait_for_marked_processes(running.mark, LEFT_SECONDS)


def last_line(stderr: str) -> str:
    """Return the last line of stderr, which must have no traceback."""
    assert "Traceback" not in stderr
    return stderr.strip().splitlines()[-1]


# --- no process is left, however the audit ends

# each script runs `touch`, because the audit redirects files that the script writes after it imports torch

WAIT = "import subprocess, time\nsubprocess.run(['touch', {reached!r}])\ntime.sleep(1000)\n"
WAIT_WITH_TORCH = "import torch\n" + WAIT
COMPUTE = "import subprocess, torch\nsubprocess.run(['touch', {reached!r}])\nwhile True:\n    torch.ones(10).sum()\n"
CHILD_IN_OTHER_SESSION = (
    "import subprocess, time\n"
    "subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
    "subprocess.run(['touch', {reached!r}])\n"
    "time.sleep(1000)\n"
)
DAEMON = (  # its parent has ended, and it has its own session
    "import subprocess, time\n"
    "subprocess.run(['setsid', '--fork', 'sleep', '1000'])\n"
    "subprocess.run(['touch', {reached!r}])\n"
    "time.sleep(1000)\n"
)
PYTHON_IN_OTHER_SESSION = (
    "import subprocess, sys, time\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'], start_new_session=True)\n"
    "subprocess.run(['touch', {reached!r}])\n"
    "time.sleep(1000)\n"
)
SHELL_IGNORING_SIGNALS = (
    "import subprocess\n"
    "subprocess.run(['touch', {reached!r}])\n"
    "subprocess.run('trap \"\" HUP TERM; sleep 1000; sleep 1000', shell=True)\n"
)
IGNORE_SIGNALS = (
    "import signal, subprocess, time\n"
    "for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):\n"
    "    signal.signal(number, signal.SIG_IGN)\n"
    "subprocess.run(['touch', {reached!r}])\n"
    "while True:\n"
    "    time.sleep(1)\n"
)
SCRIPT_KINDS = {
    "waits": WAIT,
    "waits with torch": WAIT_WITH_TORCH,
    "computes": COMPUTE,
    "a child in another session": CHILD_IN_OTHER_SESSION,
    "a daemon": DAEMON,
    "python in another session": PYTHON_IN_OTHER_SESSION,
    "a shell": SHELL_IGNORING_SIGNALS,
    "ignores signals": IGNORE_SIGNALS,
}
QUICK = ("waits", "a child in another session")


def start_audit(cli: Cli, folder: Path, text: str, *args: object) -> RunningCommand:
    """Start an audit of one process, and wait until its script has created a file."""
    reached = folder / "reached"
    (folder / "train.py").write_text(text.format(reached=str(reached)))
    running = cli.start(folder, "audit", *args, "train.py", is_forked=False)
    deadline = time.monotonic() + 60
    while not reached.exists():
        assert time.monotonic() < deadline, running.output_so_far()
        time.sleep(0.02)
    return running


@pytest.mark.parametrize(
    "signal_number", [signal.SIGHUP, signal.SIGKILL, signal.SIGTERM], ids=lambda signal_number: signal_number.name
)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.integration) for kind in SCRIPT_KINDS],
)
def test_no_process_is_left_after_a_signal(kind: str, signal_number: signal.Signals, cli: Cli, tmp_path: Path) -> None:
    """The audit gets SIGHUP when its terminal is closed."""
    running = start_audit(cli, tmp_path, SCRIPT_KINDS[kind])
    os.kill(running.process.pid, signal_number)
    running.end(timeout=30)
    assert remaining_processes(running) == {}


@pytest.mark.parametrize("signal_number", [signal.SIGHUP, signal.SIGKILL], ids=lambda signal_number: signal_number.name)
def test_no_process_of_two_ranks_is_left_after_a_signal(
    signal_number: signal.Signals, cli: Cli, tmp_path: Path
) -> None:
    running = start_audit(cli, tmp_path, CHILD_IN_OTHER_SESSION, "--processes", 2)
    os.kill(running.process.pid, signal_number)
    running.end(timeout=30)
    assert remaining_processes(running) == {}


def test_sighup_of_the_process_group_leaves_no_process(cli: Cli, tmp_path: Path) -> None:
    """The system signals all processes in the foreground at once."""
    running = start_audit(cli, tmp_path, CHILD_IN_OTHER_SESSION)
    os.killpg(os.getpgid(running.process.pid), signal.SIGHUP)
    running.end(timeout=30)
    assert remaining_processes(running) == {}


def test_script_that_kills_its_parent_leaves_no_process(cli: Cli, tmp_path: Path) -> None:
    text = "import os, signal, time\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(1000)\n"
    (tmp_path / "train.py").write_text(text)
    running = cli.start(tmp_path, "audit", "--timeout", 10, "train.py", is_forked=False)
    running.end(timeout=60)
    assert remaining_processes(running) == {}


@pytest.mark.parametrize("kind", ["a child in another session", "a daemon", "python in another session"])
def test_processes_of_a_finished_script_are_ended(kind: str, cli: Cli, tmp_path: Path) -> None:
    """Processes that the script has started end with the audit, also in another session."""
    running = start_audit(cli, tmp_path, SCRIPT_KINDS[kind].removesuffix("time.sleep(1000)\n"))
    running.end(timeout=60)
    assert remaining_processes(running) == {}


def test_no_process_is_left_after_a_timeout(cli: Cli, tmp_path: Path) -> None:
    running = start_audit(cli, tmp_path, CHILD_IN_OTHER_SESSION, "--timeout", 2)
    status, _, err = running.end(timeout=60)
    assert status == 4, err
    assert remaining_processes(running) == {}


@pytest.mark.integration
def test_no_process_is_left_after_a_real_terminal_closes(cli: Cli, tmp_path: Path) -> None:
    """A process creates a pseudo-terminal for the audit. The system closes it when that process is killed."""
    reached = tmp_path / "reached"
    (tmp_path / "train.py").write_text(CHILD_IN_OTHER_SESSION.format(reached=str(reached)))
    code = "import pty, sys; pty.spawn(sys.argv[1:])"
    command = ("-c", code, sys.executable, "-m", "everyrank", "audit", "train.py")
    running = cli.start(tmp_path, command=command, is_forked=False)
    running.wait_for(reached.exists)
    running.process.kill()
    running.end(timeout=30)
    assert remaining_processes(running) == {}


def test_no_temporary_folder_is_left_after_sighup(cli: Cli, tmp_path: Path) -> None:
    """An audit that was killed may leave its folder."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    reached = tmp_path / "reached"
    (tmp_path / "train.py").write_text(WAIT.format(reached=str(reached)))
    running = cli.start(tmp_path, "audit", "train.py", is_forked=False, TMPDIR=str(temporary))
    running.wait_for(reached.exists)
    os.kill(running.process.pid, signal.SIGHUP)
    running.end(timeout=30)
    assert remaining_processes(running) == {}
    assert [path.name for path in temporary.iterdir() if path.name.startswith("everyrank-audit")] == []


# --- ranks started in two terminals

MISTAKE = ("        sampler.set_epoch(epoch)\n", "")
COMMAND_PREFIXES = {
    "shells": ("sh", "-c", '"$@"; exit $?', "sh"),  # each shell is the parent of its audit
    "timeout": ("timeout", "300"),
}


@contextlib.contextmanager
def ranks_started_by_hand(
    cli: Cli, folder: Path, before: tuple[str, ...], size: int = 2
) -> Iterator[list[RunningCommand]]:
    """Start the command of docs/audit.md once for each rank."""
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    port = free_port()
    ranks: list[RunningCommand] = []
    for rank in range(size):
        variables = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        more_variables = {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks.append(
            cli.start(folder, "audit", "train.py", wrapper=before, is_forked=False, **variables, **more_variables)
        )
    yield ranks
    cli.close(*ranks)


@pytest.mark.integration
@pytest.mark.parametrize("kind", COMMAND_PREFIXES)
def test_ranks_started_in_two_terminals_are_audited_together(kind: str, cli: Cli, tmp_path: Path) -> None:
    """One case runs twice on the same port. The second audit must not read files of the first."""
    (tmp_path / "train.py").write_text((SCRIPTS / "classifier.py").read_text().replace(*MISTAKE))
    for _ in range(2 if kind == "shells" else 1):
        with ranks_started_by_hand(cli, tmp_path, COMMAND_PREFIXES[kind]) as ranks:
            status, out, err = ranks[0].end(timeout=80)
            status_1, out_1, err_1 = ranks[1].end(timeout=80)
            assert status == 1, err
            assert "data.epoch" in out
            assert "updates on 2 ranks" in out
            assert status_1 == 0, err_1
            assert "data.epoch" not in out_1
            assert [wait_for_marked_processes(rank.mark, LEFT_SECONDS) for rank in ranks] == [{}, {}]
    remaining_folders = [
        path.name for path in (tmp_path / "temporary").iterdir() if path.name.startswith("everyrank-audit")
    ]
    assert remaining_folders == []


# --- the error of the rank that crashed

CRASH_SCRIPT = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
CRASH
for update in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("size", "crashed_rank"), [(2, 1), (3, 2), (2, 0)])
def test_error_of_the_crashed_rank_is_printed(size: int, crashed_rank: int, cli: Cli, tmp_path: Path) -> None:
    """The other ranks only lose their connection to it."""
    text = CRASH_SCRIPT.replace("CRASH", f"if dist.get_rank() == {crashed_rank}:\n    raise ValueError('boom')")
    (tmp_path / "train.py").write_text(text)
    result = cli(tmp_path, "audit", "--processes", size, "train.py")
    assert result.status == 4, result.err
    [line] = list(line_numbers_with(text, "raise ValueError"))
    error_line = last_line(result.err)
    expected_error = rf"rank {crashed_rank}: train\.py:{line} in <module>: (\[rank{crashed_rank}\]: ?)?ValueError: boom"
    assert re.search(expected_error, error_line), error_line
    assert "onnection" not in error_line


@pytest.mark.parametrize("crash", ["raise SystemExit(3)", "import os; os._exit(3)"])
def test_exit_status_of_the_ended_rank_is_printed(crash: str, cli: Cli, tmp_path: Path) -> None:
    """The rank prints nothing, so the error has only its number and status."""
    (tmp_path / "train.py").write_text(CRASH_SCRIPT.replace("CRASH", f"if dist.get_rank() == 1:\n    {crash}"))
    result = cli(tmp_path, "audit", "train.py")
    assert result.status == 4, result.err
    assert "rank 1" in last_line(result.err)
    assert "status 3" in last_line(result.err)


GLOO_ERROR = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"
TRACKER_ERROR = "ConnectionRefusedError: [Errno 111] Connection refused"
TRACEBACK = "Traceback (most recent call last):\n  File 'x', line 1\n"


@pytest.mark.parametrize(
    ("codes", "outputs", "expected"),
    [
        ((None, -9), ("loss 0.4", "loss 0.3"), r"rank 1: .*SIGKILL .*loss 0\.3"),
        ((1, -11), (f"{TRACEBACK}{GLOO_ERROR}", ""), "rank 1: .*SIGSEGV"),
        ((1, 1), (f"{TRACEBACK}{GLOO_ERROR}", f"{TRACEBACK}{TRACKER_ERROR}"), "rank 1: ConnectionRefusedError"),
        ((1, 1), (f"{TRACEBACK}{TRACKER_ERROR}", f"{TRACEBACK}{GLOO_ERROR}"), "rank 0: ConnectionRefusedError"),
        (
            (1,),
            (f"{TRACEBACK}KeyError: 'lr'\n\nanother exception\n\n{TRACEBACK}Stop: why\n[W1] a log",),
            "rank 0: Stop: why",
        ),
        ((3,), ("epoch 2 loss 0.4",), "rank 0: .* exit status 3; its last line: epoch 2 loss"),
    ],
)
def test_error_names_the_rank_and_the_cause(
    codes: tuple[int | None, ...], outputs: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    """A lost connection to another rank is only a consequence, unlike one to another server."""
    error = examine._script_error(ScriptRun(tmp_path, len(codes), "failed", codes, outputs, 1.0))
    assert re.match(expected, str(error)), error


@pytest.mark.parametrize(
    ("output", "is_over"),
    [
        (f"{TRACEBACK}{GLOO_ERROR}\nTraining failed", True),
        (f"{TRACKER_ERROR}, retrying\n{TRACEBACK}ValueError: boom", False),
    ],
)
def test_rank_that_fails_after_the_end_of_the_others(output: str, is_over: bool, tmp_path: Path) -> None:
    """The audit has ended rank 0. The error of rank 1 is ignored only if it has lost rank 0."""
    run = ScriptRun(tmp_path, 2, "failed", (0, 1), ("", output), 1.0)
    evidence = Evidence(run, [0, 1], {0: [Stopped(rank=0)], 1: []})
    assert examine._has_seen_enough(run, evidence) is is_over


@pytest.mark.parametrize("variables", [{"RANK": "x"}, {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"}])
def test_wrong_rank_in_the_environment_is_refused(variables: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        external_rank(variables)
    assert external_rank({"RANK": ""}) is None


# --- a shared folder created by another user


def test_symlink_in_place_of_the_shared_folder_is_not_followed(cli: Cli, tmp_path: Path) -> None:
    """After a first audit, its folder name is replaced by a symlink. A second audit is started in the same way."""
    (tmp_path / "train.py").write_text("import torch\nx = torch.ones(2, requires_grad=True)\nx.sum().backward()\n")
    temporary, victim = tmp_path / "temporary", tmp_path / "victim"
    temporary.mkdir()
    victim.mkdir()
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    variables |= {"TMPDIR": str(temporary), "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}

    def run_rank(seconds: float) -> set[str]:
        """Return names in the temporary folder, until a second after the first one appears. Rank 0 never starts."""
        seen_names = set[str]()
        rank = cli.start(tmp_path, "audit", "train.py", is_forked=False, **variables)  # TMPDIR is read at the start
        deadline = time.monotonic() + seconds
        while rank.process.poll() is None and time.monotonic() < deadline:
            names = {path.name for path in temporary.iterdir() if path.name.startswith("everyrank")}
            if names - seen_names:
                deadline = min(deadline, time.monotonic() + 1.0)
            seen_names |= names
            time.sleep(0.02)
        cli.close(rank)
        return seen_names

    start_time = time.monotonic()
    names = run_rank(30)
    assert names
    duration = time.monotonic() - start_time
    for name in names:
        path = temporary / name
        if path.is_dir():
            for inner in sorted(path.rglob("*"), reverse=True):
                inner.rmdir() if inner.is_dir() else inner.unlink()
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        path.symlink_to(victim)
    run_rank(duration + 1)
    assert [path.name for path in victim.rglob("*")] == []


@pytest.fixture
def get_shared_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], Path | None]:
    """Return a function that returns the shared folder of a start, or None if its name is refused."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    info = external_rank(environment)
    assert info is not None

    def get_folder() -> Path | None:
        with contextlib.suppress(EveryrankError):
            return shared_folder(info, environment)
        return None

    return get_folder


def test_symlink_as_shared_folder_is_refused(get_shared_folder: Callable[[], Path | None], tmp_path: Path) -> None:
    """A different folder is also allowed."""
    folder, victim = get_shared_folder(), tmp_path / "victim"
    assert folder is not None
    victim.mkdir()
    folder.rmdir()
    folder.symlink_to(victim)
    second_folder = get_shared_folder()
    assert second_folder is None or second_folder.resolve() != victim.resolve()


def test_world_writable_shared_folder_is_refused(get_shared_folder: Callable[[], Path | None]) -> None:
    """`--replay` unpickles files of this folder."""
    folder = get_shared_folder()
    assert folder is not None
    folder.chmod(0o777)
    second_folder = get_shared_folder()
    assert second_folder is None or second_folder.stat().st_mode & 0o022 == 0


# --- an audit stopped by --limit

ENDLESS = """\
import time

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for update in range(1_000_000):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    if update >= 3:
        time.sleep(0.2)
"""
ENDLESS_UPDATE = ENDLESS.replace("time.sleep(0.2)", "while True: torch.ones(10).sum()")


def audit_until_limit(cli: Cli, folder: Path, text: str, *args: str) -> Any:
    """Run an audit that --limit stops after some updates. A slow machine needs a higher limit to import torch."""
    (folder / "train.py").write_text(text)
    for limit in (3, 12, 96):
        result = cli(folder, "audit", "--limit", limit, "--updates", 500, *args, "train.py")
        if "no update within" not in result.err:
            break
    return result


@pytest.mark.parametrize("text", [ENDLESS, ENDLESS_UPDATE], ids=["it goes on", "it computes"])
def test_stopped_audit_names_the_limit(text: str, cli: Cli, tmp_path: Path) -> None:
    """The limit is in the output and in the JSON report."""
    result = audit_until_limit(cli, tmp_path, text, "--json", "found.json")
    output = result.out + result.err
    assert "Traceback" not in output
    assert "nothing wrong found" not in output
    assert "--limit" in output
    assert "--limit" in (tmp_path / "found.json").read_text()


def test_finished_audit_does_not_name_the_limit(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ENDLESS.replace("1_000_000", "3"))
    result = cli(tmp_path, "audit", "train.py")
    assert result.status == 0, result.err
    assert "nothing wrong found" in result.out
    assert "--limit" not in result.out


# --- files that are not scripts


@pytest.mark.parametrize("content", [b"import torch\0\n", b"\0", b"\x7fELF\0\0\0", b"x = 1\n\0\n"])
def test_script_with_null_bytes_is_refused(content: bytes, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes(content)
    result = cli(tmp_path, "audit", "train.py")
    assert result.status == 2
    assert "train.py" in last_line(result.err)
    assert "ast.py" not in result.err
    assert "null byte" in last_line(result.err).lower()


@pytest.mark.parametrize("content", [b"# coding: nonsense\n", b"\xff\xfe\n", b"(" * 5000 + b"\n"])
def test_unreadable_script_is_refused(content: bytes, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes(content)
    result = cli(tmp_path, "audit", "train.py")
    assert result.status == 2
    assert "train.py" in last_line(result.err)
    assert "ast.py" not in result.err


@pytest.mark.parametrize("path", ["/proc/self/mem", "/dev/null", "/dev/zero"])
def test_device_file_as_script_is_refused(path: str, cli: Cli, tmp_path: Path) -> None:
    running = cli.start(tmp_path, "audit", path)
    status, _, err = running.end(timeout=30)
    assert status == 2
    assert path in last_line(err)


def test_fifo_as_script_is_refused(cli: Cli, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.py")
    running = cli.start(tmp_path, "audit", "train.py")
    status, _, err = running.end(timeout=15)
    assert status == 2
    assert "train.py" in last_line(err)


def test_script_without_a_working_backward_is_not_reported_as_correct(cli: Cli, tmp_path: Path) -> None:
    """The script trains nothing, so the audit cannot report that nothing is wrong."""
    replaced_backward = "torch.Tensor.backward = lambda *_, **__: None"
    text = ENDLESS.replace("1_000_000", "5").replace("torch.manual_seed(0)", replaced_backward)
    (tmp_path / "train.py").write_text(text)
    result = cli(tmp_path, "audit", "train.py")
    assert "Traceback" not in result.err
    assert "nothing wrong found" not in result.out
