"""What happens when a process dies, hangs or is told to stop: the status, the line, and that nothing is left behind."""

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everyrank.errors import RankFailedError
from everyrank.launch import Launch, RankInfo, catch_signals, run_ranks, spawn
from everyrank.launch.job import WORKER
from forkserver import MARK
from processes import Cli, Running, by_hand, free_port, left_of

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="looking for left processes needs Linux's /proc"
)

SOON = 100.0  # seconds, on a machine however busy: far less than --timeout, and than this training takes

WORKLOAD = """\
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from everyrank import Workload

FOLDER = Path(__file__).parent
calls = 0


def train_data():
    return TensorDataset(torch.linspace(0, 1, 48).reshape(16, 3), torch.linspace(1, 0, 32).reshape(16, 2))


def loss(output, target):
    global calls
    calls += 1
    time.sleep(0.01)
    if calls == 4 and (dist.get_rank() == 1 or dist.get_world_size() == 1):
        (FOLDER / "reached").touch()
        HAPPENS
    return ((output - target) ** 2).sum(), target.numel()


workload = Workload(
    name="mine",
    model=lambda: nn.Linear(3, 2),
    train_data=train_data,
    loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    global_batch=4,
    steps=100_000,
)
"""


def write_workload(folder: Path, happens: str = "pass") -> Path:
    path = folder / "my_workload.py"
    path.write_text(WORKLOAD.replace("HAPPENS", happens + "  # here"), encoding="utf-8")
    return path


def here(path: Path) -> int:
    lines = path.read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith("# here"))


def update_3(running: Running) -> Callable[[], bool]:
    """Whether the training has come there."""
    return (running.folder / "reached").exists


def the_line(stderr: str) -> str:
    """The last line on stderr; before it there is at most the path of the log."""
    lines = stderr.splitlines()
    assert len(lines) in (1, 2), stderr
    assert len(lines) == 1 or lines[0].startswith("full traceback: "), stderr
    assert lines[-1].startswith("everyrank: ")
    return lines[-1].removeprefix("everyrank: ")


TWO_RANKS = ("--layout", "ddp", "--processes", "2")


@pytest.mark.parametrize("launcher", ["spawn", pytest.param("torchrun", marks=pytest.mark.integration)])
def test_a_rank_that_raises(cli: Cli, tmp_path: Path, launcher: str) -> None:
    """Rank 1 alone raises at update 3: status 4, the line says who, where and what, and the others do not hang."""
    path = write_workload(tmp_path, "raise RuntimeError('boom\\n\\nand more')")
    running = cli.start(tmp_path, "train", path.name, *TWO_RANKS, "--launcher", launcher, is_forked=launcher == "spawn")
    status, _, stderr = running.end(SOON)
    assert status == 4, stderr
    line = the_line(stderr)
    assert line.startswith("rank 1")
    assert f"my_workload.py:{here(path)} in loss: RuntimeError: boom" in line
    log = tmp_path / stderr.splitlines()[0].removeprefix("full traceback: ")
    assert "and more" in log.read_text()
    assert update_3(running)()
    assert running.left() == {}


@pytest.mark.parametrize("launcher", ["spawn", pytest.param("torchrun", marks=pytest.mark.integration)])
def test_a_rank_that_is_killed(cli: Cli, tmp_path: Path, launcher: str) -> None:
    """As the out-of-memory killer does it: no exception, no last words. Its loader process must not outlive it."""
    path = write_workload(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    running = cli.start(
        tmp_path,
        "train",
        path.name,
        *TWO_RANKS,
        "--launcher",
        launcher,
        "--workers",
        "1",
        is_forked=launcher != "spawn",
    )
    status, _, stderr = running.end(SOON)
    assert status == 4, stderr
    line = the_line(stderr)
    assert "rank 1" in line
    assert "rank 0" not in line
    assert "SIGKILL" in line
    assert update_3(running)()
    assert running.left() == {}


@pytest.mark.parametrize("layout", ["parameter_server", "parameter_server:updates=async"])
@pytest.mark.parametrize(("who", "name"), [(0, "server"), (2, "trainer")], ids=["server", "trainer"])
def test_one_server_and_three_trainers(cli: Cli, tmp_path: Path, layout: str, who: int, name: str) -> None:
    """As the strategy's header says: whoever is killed, the others end in time, and the line says who it was."""
    path = write_workload(tmp_path, f"os.kill(int((FOLDER / 'pid{who}').read_text()), signal.SIGKILL)")
    told = "    (FOLDER / f'pid{dist.get_rank()}').write_text(str(os.getpid()))\n    return TensorDataset"
    path.write_text(path.read_text().replace("    return TensorDataset", told))
    running = cli.start(tmp_path, "train", path.name, "--layout", layout, "--processes", "4")
    status, _, stderr = running.end(SOON)
    assert status == 4, stderr
    assert f"rank {who}" in the_line(stderr), name
    assert "SIGKILL" in the_line(stderr)
    assert update_3(running)()
    assert running.left() == {}


@pytest.mark.parametrize("words", [(), TWO_RANKS], ids=["alone", "one of two"])
def test_a_rank_that_is_gone_without_a_word(cli: Cli, tmp_path: Path, words: tuple[str, ...]) -> None:
    """A library that ends the process with status 0 is no good end of a training, and no result was left."""
    path = write_workload(tmp_path, "os._exit(0)")
    running = cli.start(tmp_path, "train", path.name, *words)
    status, _, stderr = running.end()
    assert status == 4, stderr
    assert ("rank 1" if words else "rank 0") in the_line(stderr)
    assert running.left() == {}


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_person_who_stops_it(cli: Cli, tmp_path: Path, number: signal.Signals, expected: int) -> None:
    """Ctrl-C reaches the whole foreground group, SIGTERM the one process; all ranks and their loaders end."""
    path = write_workload(tmp_path)
    running = cli.start(tmp_path, "train", path.name, *TWO_RANKS, "--workers", "1")
    running.wait_for(update_3(running))
    assert len(running.processes()) >= 5  # itself, two ranks, and a loader process of each
    if number is signal.SIGINT:
        os.killpg(running.process.pid, number)
    else:
        os.kill(running.process.pid, number)
    status, _, stderr = running.end(SOON)
    assert status == expected
    the_line(stderr)
    assert "Traceback" not in stderr
    assert running.left() == {}


def test_a_person_who_stops_it_at_once(cli: Cli, tmp_path: Path) -> None:
    """Ctrl-C while the ranks are still being started."""
    path = write_workload(tmp_path)
    running = cli.start(tmp_path, "train", path.name, *TWO_RANKS, is_forked=False)
    running.wait_for(lambda: len(running.processes()) >= 2)
    os.killpg(running.process.pid, signal.SIGINT)
    status, _, stderr = running.end(SOON)
    assert status == 130
    the_line(stderr)
    assert running.left() == {}


def test_a_bench_that_is_stopped(cli: Cli, tmp_path: Path) -> None:
    """The process that samples what the ranks use goes with them."""
    running = cli.start(tmp_path, "bench", "digits", "--layout", "ddp", *TWO_RANKS, is_forked=False)
    running.wait_for(lambda: any("measure.resources" in line for line in running.processes().values()))
    os.killpg(running.process.pid, signal.SIGINT)
    status, _, stderr = running.end(SOON)
    assert status == 130
    the_line(stderr)
    assert "Traceback" not in stderr
    assert running.left() == {}


@pytest.mark.integration
def test_torchrun_is_stopped_too(cli: Cli, tmp_path: Path) -> None:
    """torchrun stands between us and the ranks, and has ended its ranks when it is gone."""
    path = write_workload(tmp_path)
    running = cli.start(tmp_path, "train", path.name, *TWO_RANKS, "--launcher", "torchrun")
    running.wait_for(update_3(running))
    os.killpg(running.process.pid, signal.SIGINT)
    status, _, stderr = running.end(SOON)
    assert status == 130
    the_line(stderr)
    assert running.left() == {}


def test_ranks_do_not_outlive_their_parent(cli: Cli, tmp_path: Path) -> None:
    """SIGKILL to the command line leaves it no time to end anybody: the ranks notice by themselves."""
    path = write_workload(tmp_path)
    running = cli.start(tmp_path, "train", path.name, *TWO_RANKS)
    running.wait_for(update_3(running))
    running.process.kill()
    assert running.left() == {}


def waits(_: object) -> None:
    time.sleep(60)


def hangs(info: RankInfo, how: str) -> None:
    if info.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP) if how == "stopped" else time.sleep(60)
    time.sleep(0.5)
    # as gloo says it
    raise RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 9000ms for recv to complete")


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize(
    ("how", "state"), [("stopped", "a signal has stopped it (kill -CONT "), ("asleep", "it waits")]
)
def test_a_rank_that_hangs(how: str, state: str) -> None:
    """Who waited says so first; the line names who did not come."""
    with pytest.raises(RankFailedError) as caught:
        run_ranks(Launch(processes=2, timeout_seconds=9), hangs, how)
    line = str(caught.value)
    assert line.startswith("rank 1 of 2 did not arrive within 9 s")
    assert state in line
    assert "; rank 0 waited in test_faults.py:" in line


@pytest.mark.usefixtures("python")
def test_a_rank_that_fails_while_another_computes() -> None:
    """An error that is no wait is the one to read, whatever the others do."""

    def fails(info: RankInfo) -> None:
        if info.rank == 1:
            time.sleep(60)
        raise RuntimeError("connection timed out")

    with pytest.raises(RankFailedError, match=r"^rank 0 of 2 .*: connection timed out$"):
        run_ranks(Launch(processes=2, timeout_seconds=9), fails)


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize("dies", [False, True])
def test_a_supervisor_that_is_stopped(dies: bool) -> None:
    """Somebody stopped it, and its rank has ended: the parent resumes it."""

    def stops_its_supervisor(info: RankInfo) -> int:
        os.kill(os.getppid(), signal.SIGSTOP)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return info.size

    if dies:
        with pytest.raises(RankFailedError, match=r"rank 0 .*SIGKILL"):
            run_ranks(Launch(processes=1), stops_its_supervisor)
    else:
        assert run_ranks(Launch(processes=1), stops_its_supervisor) == {0: 1}


@pytest.mark.usefixtures("python")
def test_what_a_workload_has_started_ends_with_it() -> None:
    """A process that it has forgotten would hold its ports and its memory."""

    def forgets(_: RankInfo) -> int:
        return subprocess.Popen(["sleep", "100"]).pid

    [pid] = run_ranks(Launch(processes=1), forgets).values()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_nothing_is_left_in_the_temporary_folder(cli: Cli, tmp_path: Path) -> None:
    """Of a parent that was killed: whoever is left tidies up."""
    places = tmp_path / "tmp"
    places.mkdir()
    script = tmp_path / "waits.py"
    waits = "lambda info: print('there', flush=True) or time.sleep(999)"
    script.write_text(
        f"import time\nfrom everyrank.launch import Launch, run_ranks\nrun_ranks(Launch(processes=2), {waits})\n"
    )
    running = cli.start(tmp_path, script, command=(), TMPDIR=str(places))
    running.wait_for(lambda: running.said()[0])
    running.process.kill()
    assert running.left() == {}
    assert sorted(places.iterdir()) == []


@pytest.mark.usefixtures("python")
def test_a_rank_that_never_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait has an end, and its message says who was missing. The rank that did come is ended too."""
    commands = []

    def without_rank_1(_: Launch, directory: Path) -> list[list[str]]:
        commands.extend([[*WORKER, str(directory), "0", "0", "2"], ["sleep", "100"]])
        return commands

    monkeypatch.setattr(spawn.LAUNCHER, "commands", without_rank_1)
    monkeypatch.setenv(MARK, mark := uuid.uuid4().hex)
    with pytest.raises(RankFailedError, match=r"rank 1\b") as caught:
        run_ranks(Launch(processes=2, timeout_seconds=3), waits)
    assert "rank 0" not in str(caught.value)
    assert "3 s" in str(caught.value)
    assert commands
    monkeypatch.delenv(MARK)
    assert left_of(mark) == {}


def test_a_start_that_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between the start of rank 0 and that of rank 1: rank 0 is ended all the same."""

    def interrupted(launch: Launch, directory: Path) -> Iterator[list[str]]:
        yield ["sleep", "100"]
        raise KeyboardInterrupt

    monkeypatch.setattr(spawn.LAUNCHER, "commands", interrupted)
    monkeypatch.setenv(MARK, mark := uuid.uuid4().hex)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(Launch(processes=2), waits)
    monkeypatch.delenv(MARK)
    found = left_of(mark)
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    assert found == {}


@pytest.mark.integration
def test_started_by_torchrun_from_outside(cli: Cli, tmp_path: Path) -> None:
    """As one starts it on a cluster: only rank 0 speaks and writes."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port())
    words = "train digits --layout ddp --steps 5 --set width=4 --out out --json records.json"
    running = cli.start(tmp_path, "-m", "everyrank", *words.split(), command=torchrun, is_forked=False)
    status, stdout, stderr = running.end()
    assert status == 0, stderr
    assert stdout.count("5 updates") == 1
    assert stdout.count("wrote out/log.jsonl") == 1
    assert len((tmp_path / "out" / "log.jsonl").read_text().splitlines()) >= 5
    assert (tmp_path / "out" / "record.json").exists()
    assert '"world_size": 2' in (tmp_path / "records.json").read_text()
    assert running.left() == {}


def test_one_of_two_ranks_started_by_hand(cli: Cli, tmp_path: Path) -> None:
    """The other was forgotten: the wait has an end, and the line says who is missing."""
    path = write_workload(tmp_path)
    running = cli.start(tmp_path, "train", path.name, "--layout", "ddp", "--timeout", "3", **by_hand(0, free_port()))
    status, _, stderr = running.end()
    assert status == 4, stderr
    line = the_line(stderr)
    assert "rank 1" in line
    assert "Traceback" not in stderr
    assert running.left() == {}


@pytest.mark.parametrize(
    ("variables", "fragments"),
    [
        ({"RANK": "0"}, ["RANK", "WORLD_SIZE", "MASTER_ADDR", "torchrun"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE", "RANK", "torchrun"]),
        ({**by_hand(0, "29500"), "WORLD_SIZE": "two"}, ["WORLD_SIZE=two", "whole number"]),
        ({**by_hand(0, "29500"), "RANK": "2"}, ["rank 2", "2"]),
        ({**by_hand(0, "29500"), "LOCAL_RANK": "3"}, ["3", "2"]),
        ({**by_hand(0, "29500"), "TORCHELASTIC_RESTART_COUNT": "x"}, ["TORCHELASTIC_RESTART_COUNT"]),
    ],
    ids=["RANK alone", "WORLD_SIZE alone", "no number", "rank too large", "local rank too large", "no count"],
)
def test_an_environment_that_cannot_be_meant(
    cli: Cli, tmp_path: Path, variables: dict[str, str], fragments: list[str]
) -> None:
    """Facts from two sources are never mixed or guessed: status 2, and what is missing is named."""
    running = cli.start(tmp_path, "train", "digits", "--layout", "ddp", **variables)
    status, _, stderr = running.end()
    assert status == 2, stderr
    line = the_line(stderr)
    assert "Traceback" not in stderr
    for fragment in fragments:
        assert fragment in line


def test_a_wrong_call_in_an_incomplete_environment(cli: Cli, tmp_path: Path) -> None:
    """RANK may stand in the environment for reasons of its own: another mistake is still told in one line."""
    running = cli.start(tmp_path, "train", "digits", "--layout", "dpd", RANK="0")
    status, _, stderr = running.end()
    assert status == 2, stderr
    assert "did you mean ddp" in the_line(stderr)


def test_words_that_contradict_the_environment(cli: Cli, tmp_path: Path) -> None:
    """torchrun has started this rank: another number of processes cannot be meant."""
    running = cli.start(tmp_path, "train", "digits", "--layout", "ddp", "--processes", "3", **by_hand(0, "29500"))
    status, _, stderr = running.end()
    assert status == 2, stderr
    assert "--processes 3" in the_line(stderr)


def test_one_request_may_come_twice() -> None:
    """A scheduler sends SIGTERM to a rank and to its supervisor, which passes it on; a person's second comes later."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with catch_signals(signal.SIGTERM, same_seconds=0.5) as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.asked == signal.SIGTERM
            time.sleep(0.6)
            with pytest.raises(SystemExit, match="143"):
                signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
