"""Hostile use of the command line: crafted folders, FIFOs, links, full disks, escape sequences in names, signals."""

from __future__ import annotations

import copy
import datetime
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
import torch.distributed as dist

from everyrank.backends import register_backend
from everyrank.cli import main
from everyrank.commands import report
from everyrank.launch.autopsy import hang_autopsy
from everyrank.launch.autopsy.rank_state import STACKS_SIGNAL
from everyrank.launch.host_info import pid_namespace
from everyrank.record import Record, read_records, write_records
from processes import Cli, RunningCommand, only_error_line

needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux's /proc")


@pytest.fixture
def run_main(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that runs a command in this process: `run_main("new", "--list")` -> (status, stdout, stderr)."""
    previous_handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def call(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    yield call
    for number, handler in previous_handlers.items():
        signal.signal(number, handler)


def write_record(path: Path) -> Path:
    write_records([Record("mine", "ddp", "spawn", "gloo", "cpu", 2)], path)
    return path


# --- launch variables left over from a shell in an allocation


INVALID_VARIABLES = [
    {"PMI_RANK": "x"},
    {"PMI_RANK": "x", "PMI_SIZE": "2"},
    {"PMIX_RANK": "x"},
    {"OMPI_COMM_WORLD_RANK": "x", "OMPI_COMM_WORLD_SIZE": "y"},
    {"SLURM_PROCID": "x", "SLURM_NTASKS": "y", "SLURM_JOB_ID": "1"},
    {"SLURM_PROCID": "x", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0"},
    {"HOROVOD_RANK": "x", "HOROVOD_SIZE": "2"},
]


@pytest.mark.parametrize("command", ["train", "verify"])
@pytest.mark.parametrize("variables", INVALID_VARIABLES, ids=lambda variables: "-".join(variables))
def test_launch_variable_that_is_not_a_number_is_named(
    command: str, variables: dict[str, str], cli: Cli, tmp_path: Path
) -> None:
    """The error is one line with the variable. The command may also run, because it does not read the variable."""
    args = ["--layout", "single", "--quick"] if command == "verify" else ["--out", "out"]
    result = cli(tmp_path, command, "digits", *args, "--steps", "1", "--device", "cpu", **variables)
    if result.status == 0:
        assert result.out
        return
    assert result.status == 2, result.err
    line = only_error_line(result.err)
    assert any(f"{name}={value}" in line for name, value in variables.items())


# --- crafted autopsy folders and FIFOs


def state(rank: int, pid: int, start_time: float, size: int = 2) -> dict[str, Any]:
    """Return the content of a rank's state file."""
    return {
        "job": "x",
        "rank": rank,
        "size": size,
        "host": "h",
        "space": pid_namespace(),
        "pid": pid,
        "began": start_time,
        "main": 1,
    }


def ended_pid() -> int:
    """Return the id of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


@needs_proc
def test_autopsy_of_ended_rank_does_not_wait_for_a_fifo_as_stacks(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "rank0.state").write_text(json.dumps(state(0, ended_pid(), 1.0, size=1)))
    os.mkfifo(tmp_path / "rank0.stacks")
    running = cli.start(tmp_path, "autopsy", tmp_path)
    status, out, err = running.end(timeout=15)
    assert status == 0, err
    assert "rank 0" in out


@needs_proc
def test_autopsy_of_running_rank_does_not_wait_for_a_fifo_as_stacks(cli: Cli, tmp_path: Path) -> None:
    """The process of rank 0 handles the signal, so autopsy reads the file."""
    assert STACKS_SIGNAL is not None
    code = f"import signal, time; signal.signal({STACKS_SIGNAL}, lambda *_: None); print(flush=True); time.sleep(100)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            start_time = psutil.Process(process.pid).create_time()
            (tmp_path / "rank0.state").write_text(json.dumps(state(0, process.pid, start_time, size=1)))
            os.mkfifo(tmp_path / "rank0.stacks")
            running = cli.start(tmp_path, "autopsy", tmp_path)
            status, out, err = running.end(timeout=15)
            assert status == 0, err
            assert "rank 0" in out
        finally:
            process.kill()


@needs_proc
@pytest.mark.parametrize("name", ["rank0.answer", "rank0.seen", "request", "rank1.state"])
def test_autopsy_does_not_wait_for_a_fifo_in_its_folder(cli: Cli, tmp_path: Path, name: str) -> None:
    (tmp_path / "rank0.state").write_text(json.dumps(state(0, ended_pid(), 1.0, size=1)))
    os.mkfifo(tmp_path / name)
    running = cli.start(tmp_path, "autopsy", tmp_path)
    status, out, err = running.end(timeout=15)
    assert status == 0, err
    assert "rank 0" in out


def hang_files() -> dict[str, Any]:
    """Return the files of two ended ranks. Rank 0 waited in a collective that rank 1 had not reached."""
    groups = {"0": [0, 1], "1": [0, 1]}

    def call(group: str, number: int, is_done: bool) -> list[Any]:
        return [group, number, "all_reduce", 8, "float32", is_done, False, 0, ["/home/me/train.py", 7, "main"]]

    calls = [call("0", 1, True), call("1", 1, True), call("0", 2, False)]
    files: dict[str, Any] = {}
    for rank in (0, 1):
        frames = [["/home/me/train.py", 10 + rank, "main"], ["/home/me/train.py", 90, "<module>"]]
        collectives = {"groups": groups, "calls": calls[: 3 - rank]}
        files[f"rank{rank}.state"] = state(rank, 999_999_99, 1.0)
        files[f"rank{rank}.seen"] = {"time": 2.0, "frames": frames, "calls": collectives}
        files[f"rank{rank}.answer"] = {"question": "q", "time": 3.0, "frames": frames, "calls": collectives}
    files["rank1.answer"] |= {"raised": "RuntimeError: [/gloo/pair.cc:547] Connection closed by peer"}
    return files


ODD_VALUES = [
    None,
    True,
    -1,
    0,
    10**30,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\x1b[31m\n",
    "0" * 3000,
    [],
    {},
    [[]],
    [{}],
]


def mutated_hang_files(rng: random.Random) -> dict[str, Any]:
    """Return `hang_files()` with one to three values replaced, duplicated or deleted."""
    files = copy.deepcopy(hang_files())
    for _ in range(rng.randint(1, 3)):
        node: Any = files[rng.choice(list(files))]
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.8:
                node = node[key]
                continue
            mutation = rng.random()
            if mutation < 0.7:
                node[key] = copy.deepcopy(rng.choice(ODD_VALUES))
            elif mutation < 0.85 and isinstance(node, list):
                node.insert(key, copy.deepcopy(node[key]))
            else:
                del node[key]
            break
    return files


class Failure(NamedTuple):
    """An exception of the autopsy of the mutated files with this seed."""

    seed: int
    error: str
    files: dict[str, Any]


NUM_MUTATED = 320


@needs_proc
def test_autopsy_of_mutated_files_ends_without_an_exception(tmp_path: Path) -> None:
    """The autopsy ends in time. It returns printable text or None."""
    failures: list[Failure] = []
    seeds = iter(range(NUM_MUTATED))
    lock = threading.Lock()

    def run_autopsies() -> None:
        while True:
            with lock:
                seed = next(seeds, None)
            if seed is None:
                return
            files = mutated_hang_files(random.Random(seed))
            folder = tmp_path / str(seed)
            folder.mkdir()
            for name, row in files.items():
                (folder / name).write_text(json.dumps(row))
            try:
                text = hang_autopsy(folder, timeout_seconds=0.1)
                if text is not None and not text.isprintable():
                    raise ValueError(f"it would steer a terminal: {text!r}")
            except Exception as error:
                failures.append(Failure(seed, f"{type(error).__name__}: {error}", files))

    threads = [threading.Thread(target=run_autopsies, daemon=True) for _ in range(32)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 120
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), "an autopsy does not end"
    assert not failures, f"{len(failures)} of {NUM_MUTATED}: " + "; ".join(
        f"{failure.seed}: {failure.error}" for failure in failures[:5]
    )


@needs_proc
def test_autopsy_of_valid_files_names_rank_and_file(tmp_path: Path) -> None:
    """The unmutated files give an autopsy that names rank 0 and its source file."""
    for name, row in hang_files().items():
        (tmp_path / name).write_text(json.dumps(row))
    text = hang_autopsy(tmp_path, timeout_seconds=0.1)
    assert text is not None
    assert "rank 0" in text
    assert "train.py" in text


INVALID_CALLS: list[Any] = [
    7,
    [],
    ["0"],
    ["0", "1", "all_reduce", 8, "float32", True, False, 0, None],
    ["0", 1, "all_reduce", "8", "float32", False, False, 0, None],
    ["0", 1, "all_reduce", None, "float32", False, False, 0, None],
    ["0", 1, "all_reduce", 8, "float32", False, False, 0, 5],
    ["0", 1, "all_reduce", 8, "float32", False, False, 0, ["x"]],
    ["0", None, "all_reduce", 8, "float32", False, False, 0, None],
    [["0"], 1, "all_reduce", 8, "float32", False, False, 0, None],
    ["0", 1, "all_reduce", 8, "float32", False, False, 0, None, "one more"],
]


@needs_proc
@pytest.mark.parametrize("row", INVALID_CALLS, ids=map(str, range(len(INVALID_CALLS))))
def test_autopsy_ignores_an_invalid_call(row: Any, tmp_path: Path, run_main: Any) -> None:
    files = hang_files()
    files["rank0.answer"]["calls"]["calls"] = [row]
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    status, _, err = run_main("autopsy", tmp_path)
    assert status == 0, err
    assert "Error" not in err


@needs_proc
@pytest.mark.parametrize(
    "calls",
    [
        {"groups": []},
        {"groups": {"0": 3}},
        {"groups": {"0": ["x"]}},
        {"groups": {"0": [None]}},
        {"groups": {"0": [0, 1, 2, 3]}, "calls": 7},
        {"groups": None, "calls": None},
    ],
)
def test_autopsy_ignores_invalid_groups(calls: Any, tmp_path: Path, run_main: Any) -> None:
    files = hang_files()
    files["rank0.answer"]["calls"] = calls
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    status, _, err = run_main("autopsy", tmp_path)
    assert status == 0, err
    assert "Error" not in err


def test_report_refuses_a_fifo_as_records(cli: Cli, tmp_path: Path) -> None:
    """No process writes into the FIFO, so opening it would wait forever."""
    os.mkfifo(tmp_path / "records.json")
    running = cli.start(tmp_path, "report", "records.json")
    status, _, err = running.end(timeout=15)
    assert status == 2
    assert "records.json" in only_error_line(err)


def test_checkpoint_inspect_does_not_wait_for_a_fifo(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "about.json")
    running = cli.start(tmp_path, "checkpoint", "inspect", "run")
    status, _, err = running.end(timeout=15)
    assert status == 2, err
    assert "about.json: not a regular file" in only_error_line(err)


# --- a broadcast whose ranks do not agree on the root


def broadcast_with_root_per_rank(world: Any, roots: list[int]) -> str:
    """Return the error message of this rank, or an empty string."""
    register_backend("shm")
    group = dist.new_group(backend="shm", timeout=datetime.timedelta(seconds=10))
    values = torch.full((5,), float(world.rank))
    try:
        dist.broadcast(values, group_src=roots[world.rank], group=group)
        dist.all_reduce(values, group=group)
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("roots", [[0, 1], [0, 1, 1], [0, 1, 0], [2, 2, 0]], ids=str)
def test_broadcast_with_different_roots_is_an_error(ranks: Any, roots: list[int]) -> None:
    """At least one rank raises at the next collective, because a root does not wait. The error names the root."""
    errors = [error for error in ranks(len(roots), broadcast_with_root_per_rank, roots) if error]
    assert errors, "no rank has noticed"
    assert any("broadcast" in error and "root" in error for error in errors), errors


# --- control characters in names

ESCAPE = "a\x1b[31mb"
NEWLINE = "a\nb"


def is_printable(text: str) -> bool:
    """Tell whether the text has no control characters except newlines."""
    return all(character.isprintable() or character == "\n" for character in text)


def has_line_with(text: str, *parts: str) -> bool:
    """Tell whether some line has all these parts."""
    return any(all(part in line for part in parts) for line in text.splitlines())


@pytest.fixture(scope="module")
def trained(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with `run`, a training of one update, and the result of the command that made it."""
    folder = tmp_path_factory.mktemp("steers")
    args = ["--out", f"run{ESCAPE}", "--profile", f"profile{ESCAPE}.json", "--steps", "1", "--device", "cpu"]
    result = cli(folder, "train", "digits", *args)
    assert result.status == 0, result.err
    (folder / f"run{ESCAPE}").rename(folder / "run")
    return folder, result


def test_train_prints_no_control_characters(trained: Any) -> None:
    folder, result = trained
    assert (folder / f"profile{ESCAPE}.json").exists()
    assert is_printable(result.out)
    assert is_printable(result.err)
    assert has_line_with(result.out, "wrote", "profile", ".json")


def test_train_prints_a_name_with_a_newline_in_one_line(cli: Cli, tmp_path: Path) -> None:
    run_name = f"run{NEWLINE}"
    result = cli(tmp_path, "train", "digits", "--out", run_name, "--steps", "1", "--device", "cpu")
    assert result.status == 0, result.err
    assert (tmp_path / run_name / "record.json").exists()
    assert has_line_with(result.out, "wrote", "runa", "b/log.jsonl")


@pytest.mark.parametrize("name", [ESCAPE, NEWLINE])
def test_checkpoint_export_prints_no_control_characters(name: str, trained: Any, run_main: Any, tmp_path: Path) -> None:
    status, out, err = run_main("checkpoint", "export", trained[0] / "run", tmp_path / f"{name}.safetensors")
    assert status == 0, err
    assert is_printable(out + err)
    assert has_line_with(out, "wrote", "b.safetensors", "tensors")


@pytest.mark.parametrize("name", [ESCAPE, NEWLINE])
def test_checkpoint_commands_print_no_control_characters_of_a_run_name(
    name: str, trained: Any, run_main: Any, tmp_path: Path
) -> None:
    (tmp_path / name).symlink_to(trained[0] / "run")
    status, out, err = run_main("checkpoint", "export", tmp_path / name, tmp_path / "model.safetensors")
    assert status == 0, err
    assert is_printable(out + err)
    assert len(out.splitlines()) == 1
    for args in (("inspect", tmp_path / name), ("inspect", trained[0] / "run", "--json", tmp_path / f"{name}.json")):
        status, out, err = run_main("checkpoint", *args)
        assert status == 0, err
        assert is_printable(out + err)


@pytest.mark.parametrize("name", [ESCAPE, NEWLINE])
def test_predict_prints_no_control_characters(name: str, trained: Any, cli: Cli) -> None:
    result = cli(trained[0], "predict", "digits", "--resume", "run", "--out", f"{name}.jsonl", "--device", "cpu")
    assert result.status == 0, result.err
    assert is_printable(result.out + result.err)
    assert has_line_with(result.out, "wrote", "b.jsonl", "predictions")


@pytest.mark.parametrize("name", [ESCAPE, NEWLINE])
def test_new_prints_no_control_characters(name: str, run_main: Any, tmp_path: Path) -> None:
    status, out, err = run_main("new", "ddp_spawn", tmp_path / f"{name}.py")
    assert status == 0, err
    assert is_printable(out + err)
    assert len(out.splitlines()) == 1
    assert (tmp_path / f"{name}.py").exists()


@pytest.mark.parametrize("name", [ESCAPE, NEWLINE])
def test_eject_prints_no_control_characters(name: str, run_main: Any, tmp_path: Path) -> None:
    status, out, err = run_main("eject", "digits", tmp_path / name)
    assert status == 0, err
    assert is_printable(out + err)
    assert has_line_with(out, "wrote", "b;")


@pytest.mark.parametrize("name", [ESCAPE, NEWLINE])
def test_report_prints_no_control_characters(name: str, run_main: Any, tmp_path: Path) -> None:
    """With two files of Records the report prints the file names as headings."""
    first_path, second_path = write_record(tmp_path / f"{name}.json"), write_record(tmp_path / "two.json")
    status, out, err = run_main("report", first_path, second_path, "--markdown", tmp_path / f"{name}.md")
    assert status == 0, err
    assert is_printable(out + err)
    assert has_line_with(out, "wrote", "b.md")


# --- links without a target, full disks, signals


@pytest.fixture
def dangling_link(tmp_path: Path) -> Path:
    """A link to a file in a folder that does not exist."""
    link = tmp_path / "link.html"
    link.symlink_to(tmp_path / "absent" / "x.html")
    return link


@pytest.mark.parametrize("flag", ["--html", "--markdown"])
def test_report_refuses_a_dangling_link_as_output(
    flag: str, dangling_link: Path, run_main: Any, tmp_path: Path
) -> None:
    status, _, err = run_main("report", write_record(tmp_path / "r.json"), flag, dangling_link)
    assert status == 2, err
    assert dangling_link.name in only_error_line(err)


def test_new_refuses_a_dangling_link_as_output(dangling_link: Path, run_main: Any) -> None:
    status, _, err = run_main("new", "ddp_spawn", dangling_link)
    assert status == 2, err
    assert dangling_link.name in only_error_line(err)
    assert not dangling_link.exists()


def test_export_refuses_a_dangling_link(dangling_link: Path, trained: Any, run_main: Any) -> None:
    link = dangling_link.with_suffix(".safetensors")
    dangling_link.rename(link)
    status, _, err = run_main("checkpoint", "export", trained[0] / "run", link)
    assert status == 2, err
    assert link.name in only_error_line(err)


def test_train_refuses_a_dangling_json_link_before_training(dangling_link: Path, cli: Cli, tmp_path: Path) -> None:
    """The command fails before it trains, so it writes no Record."""
    result = cli(tmp_path, "train", "digits", "--steps", "1", "--out", "out", "--json", dangling_link.name)
    assert result.status == 2, result.err
    assert dangling_link.name in result.err.splitlines()[-1]
    assert not (tmp_path / "out" / "record.json").exists()


def test_report_refuses_a_link_loop_as_output(tmp_path: Path, run_main: Any) -> None:
    (tmp_path / "loop.html").symlink_to(tmp_path / "loop.html")
    status, _, err = run_main("report", write_record(tmp_path / "r.json"), "--html", tmp_path / "loop.html")
    assert status == 2, err
    assert "loop.html" in only_error_line(err)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("flag", ["--html", "--markdown"])
def test_report_names_the_file_on_a_full_disk(flag: str, run_main: Any, tmp_path: Path) -> None:
    (tmp_path / "full.out").symlink_to("/dev/full")
    status, _, err = run_main("report", write_record(tmp_path / "r.json"), flag, tmp_path / "full.out")
    assert status in (2, 4), err
    assert "full.out" in only_error_line(err)
    assert "No space left on device" in err


def start_with_file_limit(cli: Cli, folder: Path, num_bytes: int, *args: object) -> RunningCommand:
    """Start a command that cannot write files above this size, which simulates a full disk."""
    return cli.start(
        folder, *args, command=("-m", "everyrank"), wrapper=("prlimit", f"--fsize={num_bytes}"), is_forked=False
    )


@pytest.mark.integration
def test_new_names_the_file_on_a_full_disk(cli: Cli, tmp_path: Path) -> None:
    running = start_with_file_limit(cli, tmp_path, 100, "new", "ddp_spawn", "script.py")
    status, _, err = running.end(timeout=110)
    assert status in (2, 4)
    assert "script.py" in only_error_line(err)


@pytest.mark.integration
def test_checkpoint_export_leaves_no_file_on_a_full_disk(cli: Cli, tmp_path: Path, trained: Any) -> None:
    running = start_with_file_limit(
        cli, tmp_path, 20_000, "checkpoint", "export", trained[0] / "run", "model.safetensors"
    )
    status, _, err = running.end(timeout=110)
    assert status in (2, 4)
    assert "model.safetensors" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert not (tmp_path / "model.safetensors").exists()
    assert running.remaining_processes() == {}


@pytest.mark.parametrize(("signal_number", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_interrupted_report_does_not_mention_ranks(
    signal_number: int, expected: int, run_main: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command `report` has started no ranks."""

    def interrupted_read(path: Path) -> list[Record]:
        os.kill(os.getpid(), signal_number)
        time.sleep(5)
        return read_records(path)

    monkeypatch.setattr(report, "read_records", interrupted_read)
    status, _, err = run_main("report", write_record(tmp_path / "r.json"))
    assert status == expected
    assert "ranks" not in only_error_line(err)


@needs_proc
@pytest.mark.parametrize(("signal_number", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_interrupted_autopsy_does_not_claim_to_end_ranks(
    signal_number: int, expected: int, cli: Cli, tmp_path: Path
) -> None:
    """Autopsy is interrupted while it waits for a process that does not answer. That process stays alive."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) as process:
        try:
            start_time = psutil.Process(process.pid).create_time()
            (tmp_path / "rank0.state").write_text(json.dumps(state(0, process.pid, start_time, size=1)))
            running = cli.start(tmp_path, "autopsy", tmp_path)
            running.wait_for((tmp_path / "request").exists)
            os.kill(running.process.pid, signal_number)
            status, _, err = running.end(timeout=15)
            assert status == expected
            assert "ranks are ended" not in only_error_line(err)
            assert process.poll() is None
        finally:
            process.kill()


def test_interrupted_train_reports_that_all_ranks_are_ended(cli: Cli, tmp_path: Path) -> None:
    """The command `train` starts ranks, so its last line says that they are ended."""
    running = cli.start(
        tmp_path, "train", "digits", "--processes", "2", "--layout", "ddp", "--epochs", "1000", "--out", "out"
    )
    running.wait_for(lambda: (tmp_path / "out" / "log.jsonl").exists())
    os.kill(running.process.pid, signal.SIGINT)
    status, _, err = running.end()
    assert status == 130
    assert "all ranks are ended" in err.splitlines()[-1]
    assert running.remaining_processes() == {}


# --- a file size limit too small for shared memory


@pytest.mark.integration
def test_file_size_limit_falls_back_to_gloo(cli: Cli, tmp_path: Path) -> None:
    """Under `ulimit -f 100` the shm backend does not work, and gloo does."""
    limit_bytes = 100 * 1024
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] in (resource.RLIM_INFINITY, -1)
    args = ["verify", "digits", "--layout", "ddp", "--processes", "2", "--quick", "--steps", "1", "--device", "cpu"]
    running = start_with_file_limit(cli, tmp_path, limit_bytes, *args)
    status, out, err = running.end(timeout=110)
    assert status == 0, err
    assert "equal" in out
    assert running.remaining_processes() == {}


@pytest.mark.integration
def test_file_size_limit_is_an_error_with_requested_shm(cli: Cli, tmp_path: Path) -> None:
    args = ["verify", "digits", "--layout", "ddp", "--processes", "2", "--quick", "--steps", "1", "--device", "cpu"]
    running = start_with_file_limit(cli, tmp_path, 100 * 1024, *args, "--backend", "shm")
    status, _, err = running.end(timeout=110)
    assert status in (2, 3, 4)
    last_line = err.splitlines()[-1]
    assert "shm" in last_line
    assert "segment.py" not in last_line
    assert running.remaining_processes() == {}
