"""A process that dies, hangs or gets a signal: the exit status, the error line, and no leftover processes or files."""

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
from processes import Cli, RunningCommand, free_port, rank_environment, wait_for_marked_processes

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="looking for leftover processes needs Linux's /proc"
)

# This many seconds are enough on a busy machine. They are far less than --timeout, and than the training takes.
SOON = 100.0

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


def write_workload(folder: Path, statement: str = "pass") -> Path:
    """Write a workload that runs `statement` at update 3, and return its path."""
    path = folder / "my_workload.py"
    path.write_text(WORKLOAD.replace("HAPPENS", statement + "  # here"), encoding="utf-8")
    return path


def marked_line(path: Path) -> int:
    """Return the number of the line that ends in `# here`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith("# here"))


def update_3(running: RunningCommand) -> Callable[[], bool]:
    """Return a function that tells whether the training has reached update 3."""
    return (running.folder / "reached").exists


def the_line(stderr: str) -> str:
    """Return the last line of stderr, which may follow only the path of the log."""
    lines = stderr.splitlines()
    assert len(lines) in (1, 2), stderr
    assert len(lines) == 1 or lines[0].startswith("full traceback: "), stderr
    assert lines[-1].startswith("everyrank: ")
    return lines[-1].removeprefix("everyrank: ")


TWO_RANKS = ("--layout", "ddp", "--processes", "2")


@pytest.mark.parametrize("launcher", ["spawn", pytest.param("torchrun", marks=pytest.mark.integration)])
def test_error_in_one_rank_is_located_and_ends_all_ranks(cli: Cli, tmp_path: Path, launcher: str) -> None:
    """Only rank 1 raises, at update 3. The status is 4, and the error line has the rank, location and message."""
    path = write_workload(tmp_path, "raise RuntimeError('boom\\n\\nand more')")
    running = cli.start(tmp_path, "train", path.name, *TWO_RANKS, "--launcher", launcher, is_forked=launcher == "spawn")
    status, _, stderr = running.end(SOON)
    assert status == 4, stderr
    line = the_line(stderr)
    assert line.startswith("rank 1")
    assert f"my_workload.py:{marked_line(path)} in loss: RuntimeError: boom" in line
    log = tmp_path / stderr.splitlines()[0].removeprefix("full traceback: ")
    assert "and more" in log.read_text()
    assert update_3(running)()
    assert running.remaining_processes() == {}


@pytest.mark.parametrize("launcher", ["spawn", pytest.param("torchrun", marks=pytest.mark.integration)])
def test_killed_rank_is_named_and_ends_all_ranks(cli: Cli, tmp_path: Path, launcher: str) -> None:
    """SIGKILL, as from the out-of-memory killer, leaves no exception. The loader worker must not outlive its rank."""
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
    assert running.remaining_processes() == {}


@pytest.mark.parametrize("layout", ["parameter_server", "parameter_server:updates=async"])
@pytest.mark.parametrize(("killed_rank", "role"), [(0, "server"), (2, "trainer")], ids=["server", "trainer"])
def test_killed_server_or_trainer_is_named_and_ends_all_ranks(
    cli: Cli, tmp_path: Path, layout: str, killed_rank: int, role: str
) -> None:
    """After the server or a trainer is killed, all other ranks end in time. The error line names the killed rank."""
    path = write_workload(tmp_path, f"os.kill(int((FOLDER / 'pid{killed_rank}').read_text()), signal.SIGKILL)")
    write_pid = "    (FOLDER / f'pid{dist.get_rank()}').write_text(str(os.getpid()))\n    return TensorDataset"
    path.write_text(path.read_text().replace("    return TensorDataset", write_pid))
    running = cli.start(tmp_path, "train", path.name, "--layout", layout, "--processes", "4")
    status, _, stderr = running.end(SOON)
    assert status == 4, stderr
    assert f"rank {killed_rank}" in the_line(stderr), role
    assert "SIGKILL" in the_line(stderr)
    assert update_3(running)()
    assert running.remaining_processes() == {}


@pytest.mark.parametrize("layout_args", [(), TWO_RANKS], ids=["alone", "one of two"])
def test_rank_that_exits_with_status_0_before_the_end_is_an_error(
    cli: Cli, tmp_path: Path, layout_args: tuple[str, ...]
) -> None:
    """A library may end the process with status 0. The training has no result then, so the exit status is 4."""
    path = write_workload(tmp_path, "os._exit(0)")
    running = cli.start(tmp_path, "train", path.name, *layout_args)
    status, _, stderr = running.end()
    assert status == 4, stderr
    assert ("rank 1" if layout_args else "rank 0") in the_line(stderr)
    assert running.remaining_processes() == {}


@pytest.mark.parametrize(
    ("signal_number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_signal_ends_all_ranks_and_loader_workers(
    cli: Cli, tmp_path: Path, signal_number: signal.Signals, expected: int
) -> None:
    """Ctrl-C reaches the whole foreground process group. SIGTERM reaches only the main process."""
    path = write_workload(tmp_path)
    running = cli.start(tmp_path, "train", path.name, *TWO_RANKS, "--workers", "1")
    running.wait_for(update_3(running))
    assert len(running.processes()) >= 5  # these are the main process, two ranks, and a loader worker of each
    if signal_number is signal.SIGINT:
        os.killpg(running.process.pid, signal_number)
    else:
        os.kill(running.process.pid, signal_number)
    status, _, stderr = running.end(SOON)
    assert status == expected
    the_line(stderr)
    assert "Traceback" not in stderr
    assert running.remaining_processes() == {}


def test_ctrl_c_during_startup_ends_all_processes(cli: Cli, tmp_path: Path) -> None:
    """Ctrl-C while the ranks are starting: the exit status is 130 and no process is left."""
    path = write_workload(tmp_path)
    running = cli.start(tmp_path, "train", path.name, *TWO_RANKS, is_forked=False)
    running.wait_for(lambda: len(running.processes()) >= 2)
    os.killpg(running.process.pid, signal.SIGINT)
    status, _, stderr = running.end(SOON)
    assert status == 130
    the_line(stderr)
    assert running.remaining_processes() == {}


def test_interrupted_bench_ends_its_resource_sampler(cli: Cli, tmp_path: Path) -> None:
    """Ctrl-C during a benchmark also ends the process that samples the resources of the ranks."""
    running = cli.start(tmp_path, "bench", "digits", "--layout", "ddp", *TWO_RANKS, is_forked=False)
    running.wait_for(lambda: any("measure.resources" in line for line in running.processes().values()))
    os.killpg(running.process.pid, signal.SIGINT)
    status, _, stderr = running.end(SOON)
    assert status == 130
    the_line(stderr)
    assert "Traceback" not in stderr
    assert running.remaining_processes() == {}


@pytest.mark.integration
def test_ctrl_c_ends_torchrun_and_its_ranks(cli: Cli, tmp_path: Path) -> None:
    """With `--launcher torchrun` the ranks are children of torchrun, which ends them before it exits."""
    path = write_workload(tmp_path)
    running = cli.start(tmp_path, "train", path.name, *TWO_RANKS, "--launcher", "torchrun")
    running.wait_for(update_3(running))
    os.killpg(running.process.pid, signal.SIGINT)
    status, _, stderr = running.end(SOON)
    assert status == 130
    the_line(stderr)
    assert running.remaining_processes() == {}


def test_ranks_end_after_their_parent_is_killed(cli: Cli, tmp_path: Path) -> None:
    """SIGKILL leaves the parent no time to end its ranks. They notice its death and exit by themselves."""
    path = write_workload(tmp_path)
    running = cli.start(tmp_path, "train", path.name, *TWO_RANKS)
    running.wait_for(update_3(running))
    running.process.kill()
    assert running.remaining_processes() == {}


def sleep_60_seconds(_: object) -> None:
    time.sleep(60)


def rank_1_hangs(info: RankInfo, how: str) -> None:
    """Rank 1 is suspended or sleeps. Rank 0 raises gloo's error after a timeout."""
    if info.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP) if how == "stopped" else time.sleep(60)
    time.sleep(0.5)
    # This is the message of gloo.
    raise RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 9000ms for recv to complete")


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize(
    ("how", "state"), [("stopped", "a signal has stopped it (kill -CONT "), ("asleep", "it waits")]
)
def test_hanging_rank_is_named_in_the_timeout_error(how: str, state: str) -> None:
    """The waiting rank fails first, but the error names the rank that did not arrive."""
    with pytest.raises(RankFailedError) as caught:
        run_ranks(Launch(processes=2, timeout_seconds=9), rank_1_hangs, how)
    line = str(caught.value)
    assert line.startswith("rank 1 of 2 did not arrive within 9 s")
    assert state in line
    assert "; rank 0 waited in test_faults.py:" in line


@pytest.mark.usefixtures("python")
def test_first_error_is_reported_while_another_rank_computes() -> None:
    """The error of rank 0 is not a collective's timeout, so it is reported although rank 1 is still busy."""

    def rank_0_fails(info: RankInfo) -> None:
        if info.rank == 1:
            time.sleep(60)
        raise RuntimeError("connection timed out")

    with pytest.raises(RankFailedError, match=r"^rank 0 of 2 .*: connection timed out$"):
        run_ranks(Launch(processes=2, timeout_seconds=9), rank_0_fails)


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize("dies", [False, True])
def test_stopped_supervisor_is_resumed_after_its_rank_ends(dies: bool) -> None:
    """The rank stops its supervisor and ends. The parent resumes the supervisor and gets the result or the error."""

    def stop_supervisor(info: RankInfo) -> int:
        os.kill(os.getppid(), signal.SIGSTOP)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return info.size

    if dies:
        with pytest.raises(RankFailedError, match=r"rank 0 .*SIGKILL"):
            run_ranks(Launch(processes=1), stop_supervisor)
    else:
        assert run_ranks(Launch(processes=1), stop_supervisor) == {0: 1}


@pytest.mark.usefixtures("python")
def test_child_processes_of_a_rank_end_with_it() -> None:
    """A leftover child process would keep its ports and memory."""

    def start_child(_: RankInfo) -> int:
        return subprocess.Popen(["sleep", "100"]).pid

    [pid] = run_ranks(Launch(processes=1), start_child).values()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_temporary_folder_is_empty_after_the_parent_is_killed(cli: Cli, tmp_path: Path) -> None:
    """The ranks delete the job folder, because the killed parent cannot."""
    temporary_folder = tmp_path / "tmp"
    temporary_folder.mkdir()
    script = tmp_path / "waits.py"
    function = "lambda info: print('there', flush=True) or time.sleep(999)"
    script.write_text(
        f"import time\nfrom everyrank.launch import Launch, run_ranks\nrun_ranks(Launch(processes=2), {function})\n"
    )
    running = cli.start(tmp_path, script, command=(), TMPDIR=str(temporary_folder))
    running.wait_for(lambda: running.output_so_far()[0])
    running.process.kill()
    assert running.remaining_processes() == {}
    assert sorted(temporary_folder.iterdir()) == []


@pytest.mark.usefixtures("python")
def test_missing_rank_is_named_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start fails after the timeout and the error names rank 1. The process started for rank 0 is ended too."""
    commands = []

    def without_rank_1(_: Launch, directory: Path) -> list[list[str]]:
        commands.extend([[*WORKER, str(directory), "0", "0", "2"], ["sleep", "100"]])
        return commands

    monkeypatch.setattr(spawn.LAUNCHER, "commands", without_rank_1)
    monkeypatch.setenv(MARK, mark := uuid.uuid4().hex)
    with pytest.raises(RankFailedError, match=r"rank 1\b") as caught:
        run_ranks(Launch(processes=2, timeout_seconds=3), sleep_60_seconds)
    assert "rank 0" not in str(caught.value)
    assert "3 s" in str(caught.value)
    assert commands
    monkeypatch.delenv(MARK)
    assert wait_for_marked_processes(mark) == {}


def test_ctrl_c_between_two_rank_starts_ends_the_started_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """KeyboardInterrupt arrives after rank 0 was started and before rank 1. Rank 0 is ended."""

    def interrupted_commands(launch: Launch, directory: Path) -> Iterator[list[str]]:
        yield ["sleep", "100"]
        raise KeyboardInterrupt

    monkeypatch.setattr(spawn.LAUNCHER, "commands", interrupted_commands)
    monkeypatch.setenv(MARK, mark := uuid.uuid4().hex)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(Launch(processes=2), sleep_60_seconds)
    monkeypatch.delenv(MARK)
    leftover_processes = wait_for_marked_processes(mark)
    for pid in leftover_processes:
        os.kill(pid, signal.SIGKILL)
    assert leftover_processes == {}


@pytest.mark.integration
def test_under_external_torchrun_only_rank_0_prints_and_writes(cli: Cli, tmp_path: Path) -> None:
    """The user starts torchrun, as on a cluster. Each line is printed once, and the run folder is complete."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port())
    command_line = "train digits --layout ddp --steps 5 --set width=4 --out out --json records.json"
    running = cli.start(tmp_path, "-m", "everyrank", *command_line.split(), command=torchrun, is_forked=False)
    status, stdout, stderr = running.end()
    assert status == 0, stderr
    assert stdout.count("5 updates") == 1
    assert stdout.count("wrote out/log.jsonl") == 1
    assert len((tmp_path / "out" / "log.jsonl").read_text().splitlines()) >= 5
    assert (tmp_path / "out" / "record.json").exists()
    assert '"world_size": 2' in (tmp_path / "records.json").read_text()
    assert running.remaining_processes() == {}


def test_rank_started_by_hand_names_the_missing_rank(cli: Cli, tmp_path: Path) -> None:
    """Only one of two ranks was started. It fails after the timeout, and the error line names rank 1."""
    path = write_workload(tmp_path)
    running = cli.start(
        tmp_path, "train", path.name, "--layout", "ddp", "--timeout", "3", **rank_environment(0, free_port())
    )
    status, _, stderr = running.end()
    assert status == 4, stderr
    line = the_line(stderr)
    assert "rank 1" in line
    assert "Traceback" not in stderr
    assert running.remaining_processes() == {}


@pytest.mark.parametrize(
    ("variables", "fragments"),
    [
        ({"RANK": "0"}, ["RANK", "WORLD_SIZE", "MASTER_ADDR", "torchrun"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE", "RANK", "torchrun"]),
        ({**rank_environment(0, "29500"), "WORLD_SIZE": "two"}, ["WORLD_SIZE=two", "whole number"]),
        ({**rank_environment(0, "29500"), "RANK": "2"}, ["rank 2", "2"]),
        ({**rank_environment(0, "29500"), "LOCAL_RANK": "3"}, ["3", "2"]),
        ({**rank_environment(0, "29500"), "TORCHELASTIC_RESTART_COUNT": "x"}, ["TORCHELASTIC_RESTART_COUNT"]),
    ],
    ids=["RANK alone", "WORLD_SIZE alone", "no number", "rank too large", "local rank too large", "no count"],
)
def test_invalid_launch_variables_are_refused(
    cli: Cli, tmp_path: Path, variables: dict[str, str], fragments: list[str]
) -> None:
    """Missing or invalid variables are never guessed. The exit status is 2, and the error names the variable."""
    running = cli.start(tmp_path, "train", "digits", "--layout", "ddp", **variables)
    status, _, stderr = running.end()
    assert status == 2, stderr
    line = the_line(stderr)
    assert "Traceback" not in stderr
    for fragment in fragments:
        assert fragment in line


def test_other_usage_errors_are_reported_despite_a_lone_rank_variable(cli: Cli, tmp_path: Path) -> None:
    """RANK may be set for an unrelated reason. A misspelt layout is still reported in one line."""
    running = cli.start(tmp_path, "train", "digits", "--layout", "dpd", RANK="0")
    status, _, stderr = running.end()
    assert status == 2, stderr
    assert "did you mean ddp" in the_line(stderr)


def test_processes_flag_that_contradicts_the_environment_is_refused(cli: Cli, tmp_path: Path) -> None:
    """A launcher has set WORLD_SIZE=2, so `--processes 3` is refused."""
    running = cli.start(
        tmp_path, "train", "digits", "--layout", "ddp", "--processes", "3", **rank_environment(0, "29500")
    )
    status, _, stderr = running.end()
    assert status == 2, stderr
    assert "--processes 3" in the_line(stderr)


def test_repeated_sigterm_within_the_debounce_time_is_one_request() -> None:
    """A rank may get SIGTERM from the scheduler and from its supervisor. A later second signal ends the process."""
    previous_handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with catch_signals(signal.SIGTERM, same_seconds=0.5) as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.asked == signal.SIGTERM
            time.sleep(0.6)
            with pytest.raises(SystemExit, match="143"):
                signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
