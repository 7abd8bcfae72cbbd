"""Hostile use of `everyrank audit`: terminals that close, ranks typed by hand, crashes, links, limits, odd scripts.

The findings are numbers 2, 3, 4, 5, 9 and 12 of the second round of hostile use.
"""

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

from auditing import SCRIPTS, lines_with
from everyrank.audit.external_launch import external_rank, shared_folder
from everyrank.errors import EveryrankError
from processes import Cli, Running, free_port, left_of

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in Linux's /proc")

LEFT_SECONDS = 8.0  # in which what is left over has to end


def left(running: Running) -> dict[int, str]:
    return left_of(running.mark, LEFT_SECONDS)


def last_line(stderr: str) -> str:
    assert "Traceback" not in stderr
    return stderr.strip().splitlines()[-1]


# --- finding 2: nothing stays, however the audit ends

# each script runs `touch`, because what it writes itself once torch is imported is put aside

WAITS = "import subprocess, time\nsubprocess.run(['touch', {reached!r}])\ntime.sleep(1000)\n"
WITH_TORCH = "import torch\n" + WAITS
COMPUTES = "import subprocess, torch\nsubprocess.run(['touch', {reached!r}])\nwhile True:\n    torch.ones(10).sum()\n"
OTHER_SESSION = (
    "import subprocess, time\n"
    "subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
    "subprocess.run(['touch', {reached!r}])\n"
    "time.sleep(1000)\n"
)
DAEMON = (  # its parent has ended, and its session is its own
    "import subprocess, time\n"
    "subprocess.run(['setsid', '--fork', 'sleep', '1000'])\n"
    "subprocess.run(['touch', {reached!r}])\n"
    "time.sleep(1000)\n"
)
STARTS_PYTHON = (
    "import subprocess, sys, time\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'], start_new_session=True)\n"
    "subprocess.run(['touch', {reached!r}])\n"
    "time.sleep(1000)\n"
)
SHELL = (
    "import subprocess\n"
    "subprocess.run(['touch', {reached!r}])\n"
    "subprocess.run('trap \"\" HUP TERM; sleep 1000; sleep 1000', shell=True)\n"
)
IGNORES = (
    "import signal, subprocess, time\n"
    "for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):\n"
    "    signal.signal(number, signal.SIG_IGN)\n"
    "subprocess.run(['touch', {reached!r}])\n"
    "while True:\n"
    "    time.sleep(1)\n"
)
SCRIPT_KINDS = {
    "waits": WAITS,
    "waits with torch": WITH_TORCH,
    "computes": COMPUTES,
    "a child in another session": OTHER_SESSION,
    "a daemon": DAEMON,
    "python in another session": STARTS_PYTHON,
    "a shell": SHELL,
    "ignores signals": IGNORES,
}
QUICK = ("waits", "a child in another session")


def start_audit(cli: Cli, folder: Path, text: str, *words: object) -> Running:
    """An audit of one process whose script has come to its mark."""
    reached = folder / "reached"
    (folder / "train.py").write_text(text.format(reached=str(reached)))
    running = cli.start(folder, "audit", *words, "train.py", is_forked=False)
    deadline = time.monotonic() + 60
    while not reached.exists():
        assert time.monotonic() < deadline, running.said()
        time.sleep(0.02)
    return running


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.integration) for kind in SCRIPT_KINDS],
)
def test_nothing_stays_when_the_audit_is_ended(kind: str, number: signal.Signals, cli: Cli, tmp_path: Path) -> None:
    """SIGHUP is what the audit gets when its terminal is closed."""
    running = start_audit(cli, tmp_path, SCRIPT_KINDS[kind])
    os.kill(running.process.pid, number)
    running.end(timeout=30)
    assert left(running) == {}


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_stays_of_two_ranks(number: signal.Signals, cli: Cli, tmp_path: Path) -> None:
    running = start_audit(cli, tmp_path, OTHER_SESSION, "--processes", 2)
    os.kill(running.process.pid, number)
    running.end(timeout=30)
    assert left(running) == {}


def test_a_closed_terminal_ends_the_whole_group(cli: Cli, tmp_path: Path) -> None:
    """The system signals every process of the foreground at once."""
    running = start_audit(cli, tmp_path, OTHER_SESSION)
    os.killpg(os.getpgid(running.process.pid), signal.SIGHUP)
    running.end(timeout=30)
    assert left(running) == {}


def test_a_script_that_kills_its_parent(cli: Cli, tmp_path: Path) -> None:
    text = "import os, signal, time\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(1000)\n"
    (tmp_path / "train.py").write_text(text)
    running = cli.start(tmp_path, "audit", "--timeout", 10, "train.py", is_forked=False)
    running.end(timeout=60)
    assert left(running) == {}


@pytest.mark.parametrize("kind", ["a child in another session", "a daemon", "python in another session"])
def test_nothing_stays_of_a_script_that_ends(kind: str, cli: Cli, tmp_path: Path) -> None:
    """What it started is ended with the audit, also in another session."""
    running = start_audit(cli, tmp_path, SCRIPT_KINDS[kind].removesuffix("time.sleep(1000)\n"))
    running.end(timeout=60)
    assert left(running) == {}


def test_nothing_stays_after_a_timeout(cli: Cli, tmp_path: Path) -> None:
    running = start_audit(cli, tmp_path, OTHER_SESSION, "--timeout", 2)
    status, _, err = running.end(timeout=60)
    assert status == 4, err
    assert left(running) == {}


@pytest.mark.integration
def test_a_real_terminal_that_is_closed(cli: Cli, tmp_path: Path) -> None:
    """`script` gives it a terminal; when that is killed, the system closes it."""
    reached = tmp_path / "reached"
    (tmp_path / "train.py").write_text(OTHER_SESSION.format(reached=str(reached)))
    code = "import pty, sys; pty.spawn(sys.argv[1:])"
    words = ("-c", code, sys.executable, "-m", "everyrank", "audit", "train.py")
    running = cli.start(tmp_path, command=words, is_forked=False)
    running.wait_for(reached.exists)
    running.process.kill()
    running.end(timeout=30)
    assert left(running) == {}


def test_no_folder_stays(cli: Cli, tmp_path: Path) -> None:
    """Of an audit that its terminal has ended; one that was killed may leave its folder."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    reached = tmp_path / "reached"
    (tmp_path / "train.py").write_text(WAITS.format(reached=str(reached)))
    running = cli.start(tmp_path, "audit", "train.py", is_forked=False, TMPDIR=str(temporary))
    running.wait_for(reached.exists)
    os.kill(running.process.pid, signal.SIGHUP)
    running.end(timeout=30)
    assert left(running) == {}
    assert [path.name for path in temporary.iterdir() if path.name.startswith("everyrank-audit")] == []


# --- finding 3: ranks that are typed in two terminals

MISTAKE = ("        sampler.set_epoch(epoch)\n", "")
SHELLS = {
    "shells": ("sh", "-c", '"$@"; exit $?', "sh"),  # each is the parent of its audit
    "timeout": ("timeout", "300"),
}


@contextlib.contextmanager
def typed_ranks(cli: Cli, folder: Path, before: tuple[str, ...], size: int = 2) -> Iterator[list[Running]]:
    """The command of docs/audit.md, typed once for each rank."""
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    port = free_port()
    ranks: list[Running] = []
    for number in range(size):
        variables = {"RANK": str(number), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        own = {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks.append(cli.start(folder, "audit", "train.py", before=before, is_forked=False, **variables, **own))
    yield ranks
    cli.close(*ranks)


@pytest.mark.integration
@pytest.mark.parametrize("kind", SHELLS)
def test_ranks_of_two_terminals_meet(kind: str, cli: Cli, tmp_path: Path) -> None:
    """Twice on the same port in one of the cases: the files of the first audit are not taken for the second one's."""
    (tmp_path / "train.py").write_text((SCRIPTS / "classifier.py").read_text().replace(*MISTAKE))
    for _ in range(2 if kind == "shells" else 1):
        with typed_ranks(cli, tmp_path, SHELLS[kind]) as ranks:
            status, out, err = ranks[0].end(timeout=80)
            status_1, out_1, err_1 = ranks[1].end(timeout=80)
            assert status == 1, err
            assert "data.epoch" in out
            assert "updates on 2 ranks" in out
            assert status_1 == 0, err_1
            assert "data.epoch" not in out_1
            assert [left_of(rank.mark, LEFT_SECONDS) for rank in ranks] == [{}, {}]
    left = [path.name for path in (tmp_path / "temporary").iterdir() if path.name.startswith("everyrank-audit")]
    assert left == []


# --- finding 4: whose error is shown

CRASHES = """\
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


@pytest.mark.parametrize(("size", "crashing"), [(2, 1), (3, 2), (2, 0)])
def test_the_error_of_the_rank_that_crashed(size: int, crashing: int, cli: Cli, tmp_path: Path) -> None:
    """The others only lose their connection to it."""
    text = CRASHES.replace("CRASH", f"if dist.get_rank() == {crashing}:\n    raise ValueError('boom')")
    (tmp_path / "train.py").write_text(text)
    done = cli(tmp_path, "audit", "--processes", size, "train.py")
    assert done.status == 4, done.err
    [line] = list(lines_with(text, "raise ValueError"))
    said = last_line(done.err)
    own_error = rf"rank {crashing}: train\.py:{line} in <module>: (\[rank{crashing}\]: ?)?ValueError: boom"
    assert re.search(own_error, said), said
    assert "onnection" not in said


@pytest.mark.parametrize("crash", ["raise SystemExit(3)", "import os; os._exit(3)"])
def test_the_status_of_the_rank_that_ended(crash: str, cli: Cli, tmp_path: Path) -> None:
    """It says nothing; its number and its status are what is known."""
    (tmp_path / "train.py").write_text(CRASHES.replace("CRASH", f"if dist.get_rank() == 1:\n    {crash}"))
    done = cli(tmp_path, "audit", "train.py")
    assert done.status == 4, done.err
    assert "rank 1" in last_line(done.err)
    assert "status 3" in last_line(done.err)


# --- finding 5: a folder that somebody else has made first


def test_a_link_in_the_place_of_the_shared_folder_is_not_followed(cli: Cli, tmp_path: Path) -> None:
    """The name that a first audit uses is a link when the second one, started in the same way, comes."""
    (tmp_path / "train.py").write_text("import torch\nx = torch.ones(2, requires_grad=True)\nx.sum().backward()\n")
    temporary, victim = tmp_path / "temporary", tmp_path / "victim"
    temporary.mkdir()
    victim.mkdir()
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    variables |= {"TMPDIR": str(temporary), "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}

    def run_rank(seconds: float) -> set[str]:
        """Names in the temporary folder while it runs, and a second after the first of them; rank 0 never starts."""
        seen = set[str]()
        rank = cli.start(tmp_path, "audit", "train.py", is_forked=False, **variables)  # TMPDIR is read at the start
        deadline = time.monotonic() + seconds
        while rank.process.poll() is None and time.monotonic() < deadline:
            names = {path.name for path in temporary.iterdir() if path.name.startswith("everyrank")}
            if names - seen:
                deadline = min(deadline, time.monotonic() + 1.0)
            seen |= names
            time.sleep(0.02)
        cli.close(rank)
        return seen

    start = time.monotonic()
    names = run_rank(30)
    assert names
    took = time.monotonic() - start
    for name in names:
        path = temporary / name
        if path.is_dir():
            for inner in sorted(path.rglob("*"), reverse=True):
                inner.rmdir() if inner.is_dir() else inner.unlink()
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        path.symlink_to(victim)
    run_rank(took + 1)
    assert [path.name for path in victim.rglob("*")] == []


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], Path | None]:
    """The folder of the ranks of one start, asked for by each of them; None where that is refused by its name."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    info = external_rank(environment)
    assert info is not None

    def ask() -> Path | None:
        with contextlib.suppress(EveryrankError):
            return shared_folder(info, environment)
        return None

    return ask


def test_a_link_made_first_is_refused(shared: Callable[[], Path | None], tmp_path: Path) -> None:
    """Or another folder is taken."""
    folder, victim = shared(), tmp_path / "victim"
    assert folder is not None
    victim.mkdir()
    folder.rmdir()
    folder.symlink_to(victim)
    again = shared()
    assert again is None or again.resolve() != victim.resolve()


def test_a_folder_that_others_may_write_is_refused(shared: Callable[[], Path | None]) -> None:
    """`--replay` unpickles what lies in it."""
    folder = shared()
    assert folder is not None
    folder.chmod(0o777)
    again = shared()
    assert again is None or again.stat().st_mode & 0o022 == 0


# --- finding 9: an audit that --limit has stopped

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
SILENT = ENDLESS.replace("time.sleep(0.2)", "while True: torch.ones(10).sum()")


def cut_off(cli: Cli, folder: Path, text: str, *words: str) -> Any:
    """An audit that --limit has ended after some updates; on a slow machine torch alone may take longer to import."""
    (folder / "train.py").write_text(text)
    for limit in (3, 12, 96):
        done = cli(folder, "audit", "--limit", limit, "--updates", 500, *words, "train.py")
        if "no update within" not in done.err:
            break
    return done


@pytest.mark.parametrize("text", [ENDLESS, SILENT], ids=["it goes on", "it computes"])
def test_an_audit_that_was_cut_off_names_the_limit(text: str, cli: Cli, tmp_path: Path) -> None:
    """On the screen and in JSON."""
    done = cut_off(cli, tmp_path, text, "--json", "found.json")
    printed = done.out + done.err
    assert "Traceback" not in printed
    assert "nothing wrong found" not in printed
    assert "--limit" in printed
    assert "--limit" in (tmp_path / "found.json").read_text()


def test_an_audit_that_came_to_its_end_says_nothing_of_it(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ENDLESS.replace("1_000_000", "3"))
    done = cli(tmp_path, "audit", "train.py")
    assert done.status == 0, done.err
    assert "nothing wrong found" in done.out
    assert "--limit" not in done.out


# --- finding 12: scripts that are none


@pytest.mark.parametrize("content", [b"import torch\0\n", b"\0", b"\x7fELF\0\0\0", b"x = 1\n\0\n"])
def test_a_script_with_null_bytes_is_named(content: bytes, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes(content)
    done = cli(tmp_path, "audit", "train.py")
    assert done.status == 2
    assert "train.py" in last_line(done.err)
    assert "ast.py" not in done.err
    assert "null byte" in last_line(done.err).lower()


@pytest.mark.parametrize("content", [b"# coding: nonsense\n", b"\xff\xfe\n", b"(" * 5000 + b"\n"])
def test_a_script_that_cannot_be_read_is_named(content: bytes, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes(content)
    done = cli(tmp_path, "audit", "train.py")
    assert done.status == 2
    assert "train.py" in last_line(done.err)
    assert "ast.py" not in done.err


@pytest.mark.parametrize("place", ["/proc/self/mem", "/dev/null", "/dev/zero"])
def test_a_file_that_is_no_script_is_named(place: str, cli: Cli, tmp_path: Path) -> None:
    running = cli.start(tmp_path, "audit", place)
    status, _, err = running.end(timeout=30)
    assert status in (2, 4)
    assert place in last_line(err)


def test_a_fifo_is_no_script(cli: Cli, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.py")
    running = cli.start(tmp_path, "audit", "train.py")
    status, _, err = running.end(timeout=15)
    assert status == 2
    assert "train.py" in last_line(err)


def test_a_backward_that_does_nothing(cli: Cli, tmp_path: Path) -> None:
    """Nothing is trained, so nothing can have been found right."""
    nothing = "torch.Tensor.backward = lambda *_, **__: None"
    text = ENDLESS.replace("1_000_000", "5").replace("torch.manual_seed(0)", nothing)
    (tmp_path / "train.py").write_text(text)
    done = cli(tmp_path, "audit", "train.py")
    assert "Traceback" not in done.err
    assert "nothing wrong found" not in done.out
