"""Hostile use of the command line: crafted folders, FIFOs, links, full disks, names that steer a terminal, signals.

The findings are numbers 6, 8, 10, 11, 13 and 16 of the second round of hostile use.
"""

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
from processes import Cli, Running, one_line

needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux's /proc")


@pytest.fixture
def called(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The command line in this process: `called("new", "--list")` -> (status, stdout, stderr)."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def call(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(word) for word in words])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    yield call
    for number, handler in before.items():
        signal.signal(number, handler)


def write_record(path: Path) -> Path:
    write_records([Record("mine", "ddp", "spawn", "gloo", "cpu", 2)], path)
    return path


# --- finding 6: variables that a shell of an allocation has left


LEFT_BEHIND = [
    {"PMI_RANK": "x"},
    {"PMI_RANK": "x", "PMI_SIZE": "2"},
    {"PMIX_RANK": "x"},
    {"OMPI_COMM_WORLD_RANK": "x", "OMPI_COMM_WORLD_SIZE": "y"},
    {"SLURM_PROCID": "x", "SLURM_NTASKS": "y", "SLURM_JOB_ID": "1"},
    {"SLURM_PROCID": "x", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0"},
    {"HOROVOD_RANK": "x", "HOROVOD_SIZE": "2"},
]


@pytest.mark.parametrize("command", ["train", "verify"])
@pytest.mark.parametrize("variables", LEFT_BEHIND, ids=lambda variables: "-".join(variables))
def test_a_variable_that_is_no_number_is_named(
    command: str, variables: dict[str, str], cli: Cli, tmp_path: Path
) -> None:
    """One line, with the variable; or the command runs, because the variable is not its business."""
    words = ["--layout", "single", "--quick"] if command == "verify" else ["--out", "out"]
    done = cli(tmp_path, command, "digits", *words, "--steps", "1", "--device", "cpu", **variables)
    if done.status == 0:
        assert done.out
        return
    assert done.status == 2, done.err
    line = one_line(done.err)
    assert any(f"{name}={value}" in line for name, value in variables.items())


# --- finding 8: folders that nobody's ranks have written


def state(rank: int, pid: int, began: float, size: int = 2) -> dict[str, Any]:
    return {
        "job": "x",
        "rank": rank,
        "size": size,
        "host": "h",
        "space": pid_namespace(),
        "pid": pid,
        "began": began,
        "main": 1,
    }


def gone() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    return ended.pid


@needs_proc
def test_a_fifo_instead_of_the_stacks_of_a_rank_that_is_gone(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "rank0.state").write_text(json.dumps(state(0, gone(), 1.0, size=1)))
    os.mkfifo(tmp_path / "rank0.stacks")
    running = cli.start(tmp_path, "autopsy", tmp_path)
    status, out, err = running.end(timeout=15)
    assert status == 0, err
    assert "rank 0" in out


@needs_proc
def test_a_fifo_instead_of_the_stacks_of_a_rank_that_lives(cli: Cli, tmp_path: Path) -> None:
    """Its process answers the signal, so the file is read."""
    assert STACKS_SIGNAL is not None
    code = f"import signal, time; signal.signal({STACKS_SIGNAL}, lambda *_: None); print(flush=True); time.sleep(100)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as alive:
        try:
            assert alive.stdout is not None
            alive.stdout.readline()
            began = psutil.Process(alive.pid).create_time()
            (tmp_path / "rank0.state").write_text(json.dumps(state(0, alive.pid, began, size=1)))
            os.mkfifo(tmp_path / "rank0.stacks")
            running = cli.start(tmp_path, "autopsy", tmp_path)
            status, out, err = running.end(timeout=15)
            assert status == 0, err
            assert "rank 0" in out
        finally:
            alive.kill()


@needs_proc
@pytest.mark.parametrize("name", ["rank0.answer", "rank0.seen", "request", "rank1.state"])
def test_a_fifo_instead_of_another_file(cli: Cli, tmp_path: Path, name: str) -> None:
    (tmp_path / "rank0.state").write_text(json.dumps(state(0, gone(), 1.0, size=1)))
    os.mkfifo(tmp_path / name)
    running = cli.start(tmp_path, "autopsy", tmp_path)
    status, out, err = running.end(timeout=15)
    assert status == 0, err
    assert "rank 0" in out


def crafted() -> dict[str, Any]:
    """The files of two ranks that are gone: rank 0 waited in a collective, and rank 1 had not come to it."""
    groups = {"0": [0, 1], "1": [0, 1]}

    def call(group: str, number: int, is_done: bool) -> list[Any]:
        return [group, number, "all_reduce", 8, "float32", is_done, False, 0, ["/home/me/train.py", 7, "main"]]

    calls = [call("0", 1, True), call("1", 1, True), call("0", 2, False)]
    files: dict[str, Any] = {}
    for rank in (0, 1):
        frames = [["/home/me/train.py", 10 + rank, "main"], ["/home/me/train.py", 90, "<module>"]]
        known = {"groups": groups, "calls": calls[: 3 - rank]}
        files[f"rank{rank}.state"] = state(rank, 999_999_99, 1.0)
        files[f"rank{rank}.seen"] = {"time": 2.0, "frames": frames, "calls": known}
        files[f"rank{rank}.answer"] = {"question": "q", "time": 3.0, "frames": frames, "calls": known}
    files["rank1.answer"] |= {"raised": "RuntimeError: Connection closed by peer"}
    return files


ODD = [
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


def mutated(choose: random.Random) -> dict[str, Any]:
    """One to three places of the files replaced, doubled, or left out."""
    files = copy.deepcopy(crafted())
    for _ in range(choose.randint(1, 3)):
        node: Any = files[choose.choice(list(files))]
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = choose.choice(keys)
            if isinstance(node[key], dict | list) and node[key] and choose.random() < 0.8:
                node = node[key]
                continue
            kind = choose.random()
            if kind < 0.7:
                node[key] = copy.deepcopy(choose.choice(ODD))
            elif kind < 0.85 and isinstance(node, list):
                node.insert(key, copy.deepcopy(node[key]))
            else:
                del node[key]
            break
    return files


class Wrong(NamedTuple):
    number: int
    error: str
    files: dict[str, Any]


NUM_MUTATED = 320


@needs_proc
def test_files_that_are_nearly_right(tmp_path: Path) -> None:
    """Whatever they hold: a paragraph or none, soon, and no error of Python."""
    wrong: list[Wrong] = []
    numbers = iter(range(NUM_MUTATED))
    lock = threading.Lock()

    def look() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            files = mutated(random.Random(number))
            folder = tmp_path / str(number)
            folder.mkdir()
            for name, row in files.items():
                (folder / name).write_text(json.dumps(row))
            try:
                text = hang_autopsy(folder, timeout_seconds=0.1)
                if text is not None and not text.isprintable():
                    raise ValueError(f"it would steer a terminal: {text!r}")
            except Exception as error:
                wrong.append(Wrong(number, f"{type(error).__name__}: {error}", files))

    threads = [threading.Thread(target=look, daemon=True) for _ in range(32)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 120
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), "an autopsy does not end"
    assert not wrong, f"{len(wrong)} of {NUM_MUTATED}: " + "; ".join(f"{one.number}: {one.error}" for one in wrong[:5])


@needs_proc
def test_files_that_are_right_are_read(tmp_path: Path) -> None:
    """What the mutations above begin with says who never came."""
    for name, row in crafted().items():
        (tmp_path / name).write_text(json.dumps(row))
    text = hang_autopsy(tmp_path, timeout_seconds=0.1)
    assert text is not None
    assert "rank 0" in text
    assert "train.py" in text


ROWS: list[Any] = [
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
@pytest.mark.parametrize("row", ROWS, ids=map(str, range(len(ROWS))))
def test_a_call_that_no_rank_writes(row: Any, tmp_path: Path, called: Any) -> None:
    files = crafted()
    files["rank0.answer"]["calls"]["calls"] = [row]
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    status, _, err = called("autopsy", tmp_path)
    assert status in (0, 2), err
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
def test_groups_that_no_rank_writes(calls: Any, tmp_path: Path, called: Any) -> None:
    files = crafted()
    files["rank0.answer"]["calls"] = calls
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    status, _, err = called("autopsy", tmp_path)
    assert status in (0, 2), err
    assert "Error" not in err


def test_a_fifo_instead_of_records(cli: Cli, tmp_path: Path) -> None:
    """Nobody writes into it: opening it would wait for ever."""
    os.mkfifo(tmp_path / "records.json")
    running = cli.start(tmp_path, "report", "records.json")
    status, _, err = running.end(timeout=15)
    assert status == 2
    assert "records.json" in one_line(err)


def test_a_fifo_instead_of_a_checkpoint(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "about.json")
    running = cli.start(tmp_path, "checkpoint", "inspect", "run")
    status, _, err = running.end(timeout=15)
    assert status in (1, 2), err


# --- finding 10: a broadcast whose ranks do not agree on the root


def broadcast_of_two_roots(world: Any, roots: list[int]) -> str:
    """The error of this rank; empty where it got none."""
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
def test_a_broadcast_from_two_roots_is_an_error(ranks: Any, roots: list[int]) -> None:
    """On one rank at least, when the next collective comes: a root waits for nobody. It is named, as a size is."""
    errors = [error for error in ranks(len(roots), broadcast_of_two_roots, roots) if error]
    assert errors, "no rank has noticed"
    assert any("broadcast" in error and "root" in error for error in errors), errors


# --- finding 11: names that steer a terminal

ESCAPE = "a\x1b[31mb"
NEWLINE = "a\nb"


def harmless(text: str) -> bool:
    return all(letter.isprintable() or letter == "\n" for letter in text)


def in_one_line(text: str, *parts: str) -> bool:
    """Whether some line has all these parts."""
    return any(all(part in line for part in parts) for line in text.splitlines())


@pytest.fixture(scope="module")
def trained(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with `run`, a training of one update, and what was printed when it came to be: --out and --profile."""
    folder = tmp_path_factory.mktemp("steers")
    words = ["--out", f"run{ESCAPE}", "--profile", f"profile{ESCAPE}.json", "--steps", "1", "--device", "cpu"]
    done = cli(folder, "train", "digits", *words)
    assert done.status == 0, done.err
    (folder / f"run{ESCAPE}").rename(folder / "run")
    return folder, done


def test_train_prints_no_escape(trained: Any) -> None:
    folder, done = trained
    assert (folder / f"profile{ESCAPE}.json").exists()
    assert harmless(done.out)
    assert harmless(done.err)
    assert in_one_line(done.out, "wrote", "profile", ".json")


def test_train_keeps_a_name_with_a_newline_in_one_line(cli: Cli, tmp_path: Path) -> None:
    out = f"run{NEWLINE}"
    done = cli(tmp_path, "train", "digits", "--out", out, "--steps", "1", "--device", "cpu")
    assert done.status == 0, done.err
    assert (tmp_path / out / "record.json").exists()
    assert in_one_line(done.out, "wrote", "runa", "b/log.jsonl")


@pytest.mark.parametrize("name", [ESCAPE, NEWLINE])
def test_checkpoint_export_prints_no_escape(name: str, trained: Any, called: Any, tmp_path: Path) -> None:
    status, out, err = called("checkpoint", "export", trained[0] / "run", tmp_path / f"{name}.safetensors")
    assert status == 0, err
    assert harmless(out + err)
    assert in_one_line(out, "wrote", "b.safetensors", "tensors")


@pytest.mark.parametrize("name", [ESCAPE, NEWLINE])
def test_checkpoint_export_of_a_run_with_such_a_name(name: str, trained: Any, called: Any, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to(trained[0] / "run")
    status, out, err = called("checkpoint", "export", tmp_path / name, tmp_path / "model.safetensors")
    assert status == 0, err
    assert harmless(out + err)
    assert len(out.splitlines()) == 1
    for words in (("inspect", tmp_path / name), ("inspect", trained[0] / "run", "--json", tmp_path / f"{name}.json")):
        status, out, err = called("checkpoint", *words)
        assert status == 0, err
        assert harmless(out + err)


@pytest.mark.parametrize("name", [ESCAPE, NEWLINE])
def test_predict_prints_no_escape(name: str, trained: Any, cli: Cli) -> None:
    done = cli(trained[0], "predict", "digits", "--resume", "run", "--out", f"{name}.jsonl", "--device", "cpu")
    assert done.status == 0, done.err
    assert harmless(done.out + done.err)
    assert in_one_line(done.out, "wrote", "b.jsonl", "predictions")


@pytest.mark.parametrize("name", [ESCAPE, NEWLINE])
def test_new_prints_no_escape(name: str, called: Any, tmp_path: Path) -> None:
    status, out, err = called("new", "ddp_spawn", tmp_path / f"{name}.py")
    assert status == 0, err
    assert harmless(out + err)
    assert len(out.splitlines()) == 1
    assert (tmp_path / f"{name}.py").exists()


@pytest.mark.parametrize("name", [ESCAPE, NEWLINE])
def test_eject_prints_no_escape(name: str, called: Any, tmp_path: Path) -> None:
    status, out, err = called("eject", "digits", tmp_path / name)
    assert status == 0, err
    assert harmless(out + err)
    assert in_one_line(out, "wrote", "b;")


@pytest.mark.parametrize("name", [ESCAPE, NEWLINE])
def test_report_prints_no_escape(name: str, called: Any, tmp_path: Path) -> None:
    """Two Records, so that their names are a heading."""
    one, two = write_record(tmp_path / f"{name}.json"), write_record(tmp_path / "two.json")
    status, out, err = called("report", one, two, "--markdown", tmp_path / f"{name}.md")
    assert status == 0, err
    assert harmless(out + err)
    assert in_one_line(out, "wrote", "b.md")


# --- finding 13: links without a target, full disks, signals


@pytest.fixture
def dangling(tmp_path: Path) -> Path:
    """A link to a file in a folder that is not there."""
    link = tmp_path / "link.html"
    link.symlink_to(tmp_path / "absent" / "x.html")
    return link


@pytest.mark.parametrize("flag", ["--html", "--markdown"])
def test_report_onto_a_dangling_link(flag: str, dangling: Path, called: Any, tmp_path: Path) -> None:
    status, _, err = called("report", write_record(tmp_path / "r.json"), flag, dangling)
    assert status == 2, err
    assert dangling.name in one_line(err)


def test_new_onto_a_dangling_link(dangling: Path, called: Any) -> None:
    status, _, err = called("new", "ddp_spawn", dangling)
    assert status == 2, err
    assert dangling.name in one_line(err)
    assert not dangling.exists()


def test_export_onto_a_dangling_link(dangling: Path, trained: Any, called: Any) -> None:
    link = dangling.with_suffix(".safetensors")
    dangling.rename(link)
    status, _, err = called("checkpoint", "export", trained[0] / "run", link)
    if status != 0:  # a new file in the place of the link is right, too
        assert status == 2, err
        assert link.name in one_line(err)


def test_train_json_onto_a_dangling_link(dangling: Path, cli: Cli, tmp_path: Path) -> None:
    """It is refused before the work, not after it."""
    done = cli(tmp_path, "train", "digits", "--steps", "1", "--out", "out", "--json", dangling.name)
    assert done.status == 2, done.err
    assert dangling.name in done.err.splitlines()[-1]
    assert not (tmp_path / "out" / "record.json").exists()


def test_a_link_loop(tmp_path: Path, called: Any) -> None:
    (tmp_path / "loop.html").symlink_to(tmp_path / "loop.html")
    status, _, err = called("report", write_record(tmp_path / "r.json"), "--html", tmp_path / "loop.html")
    assert status == 2, err
    assert "loop.html" in one_line(err)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("flag", ["--html", "--markdown"])
def test_a_full_disk_is_named(flag: str, called: Any, tmp_path: Path) -> None:
    (tmp_path / "full.out").symlink_to("/dev/full")
    status, _, err = called("report", write_record(tmp_path / "r.json"), flag, tmp_path / "full.out")
    assert status in (2, 4), err
    assert "full.out" in one_line(err)
    assert "No space left on device" in err


def limited_files(cli: Cli, folder: Path, num_bytes: int, *words: object) -> Running:
    """A command none of whose files may become larger: what a disk does that is full."""
    return cli.start(
        folder, *words, command=("-m", "everyrank"), before=("prlimit", f"--fsize={num_bytes}"), is_forked=False
    )


@pytest.mark.integration
def test_new_onto_a_full_disk_is_named(cli: Cli, tmp_path: Path) -> None:
    running = limited_files(cli, tmp_path, 100, "new", "ddp_spawn", "script.py")
    status, _, err = running.end(timeout=110)
    assert status in (2, 4)
    assert "script.py" in one_line(err)


@pytest.mark.integration
def test_checkpoint_export_onto_a_full_disk_ends(cli: Cli, tmp_path: Path, trained: Any) -> None:
    running = limited_files(cli, tmp_path, 20_000, "checkpoint", "export", trained[0] / "run", "model.safetensors")
    status, _, err = running.end(timeout=110)
    assert status in (2, 4)
    assert "model.safetensors" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert not (tmp_path / "model.safetensors").exists()
    assert running.left() == {}


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_report_that_is_ended_speaks_of_no_ranks(
    number: int, expected: int, called: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has started none."""

    def is_ended(path: Path) -> list[Record]:
        os.kill(os.getpid(), number)
        time.sleep(5)
        return read_records(path)

    monkeypatch.setattr(report, "read_records", is_ended)
    status, _, err = called("report", write_record(tmp_path / "r.json"))
    assert status == expected
    assert "ranks" not in one_line(err)


@needs_proc
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_autopsy_that_is_ended_speaks_of_no_ranks(number: int, expected: int, cli: Cli, tmp_path: Path) -> None:
    """It waits some seconds for the answer of a process that gives none; no rank is ended with it."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) as alive:
        try:
            began = psutil.Process(alive.pid).create_time()
            (tmp_path / "rank0.state").write_text(json.dumps(state(0, alive.pid, began, size=1)))
            running = cli.start(tmp_path, "autopsy", tmp_path)
            running.wait_for((tmp_path / "request").exists)
            os.kill(running.process.pid, number)
            status, _, err = running.end(timeout=15)
            assert status == expected
            assert "ranks are ended" not in one_line(err)
            assert alive.poll() is None
        finally:
            alive.kill()


def test_train_that_is_ended_still_says_so(cli: Cli, tmp_path: Path) -> None:
    """Of a command that starts ranks the line stays as it is."""
    running = cli.start(
        tmp_path, "train", "digits", "--processes", "2", "--layout", "ddp", "--epochs", "1000", "--out", "out"
    )
    running.wait_for(lambda: (tmp_path / "out" / "log.jsonl").exists())
    os.kill(running.process.pid, signal.SIGINT)
    status, _, err = running.end()
    assert status == 130
    assert "all ranks are ended" in err.splitlines()[-1]
    assert running.left() == {}


# --- finding 16: files may not become large enough for shared memory


@pytest.mark.integration
def test_a_limit_on_files_is_no_failure(cli: Cli, tmp_path: Path) -> None:
    """`ulimit -f 100`: shm does not work there, and gloo does."""
    limit = 100 * 1024
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] in (resource.RLIM_INFINITY, -1)
    words = ["verify", "digits", "--layout", "ddp", "--processes", "2", "--quick", "--steps", "1", "--device", "cpu"]
    running = limited_files(cli, tmp_path, limit, *words)
    status, out, err = running.end(timeout=110)
    assert status == 0, err
    assert "equal" in out
    assert running.left() == {}


@pytest.mark.integration
def test_a_limit_on_files_is_named_where_shm_was_asked_for(cli: Cli, tmp_path: Path) -> None:
    words = ["verify", "digits", "--layout", "ddp", "--processes", "2", "--quick", "--steps", "1", "--device", "cpu"]
    running = limited_files(cli, tmp_path, 100 * 1024, *words, "--backend", "shm")
    status, _, err = running.end(timeout=110)
    assert status in (2, 3, 4)
    line = err.splitlines()[-1]
    assert "shm" in line
    assert "segment.py" not in line
    assert running.left() == {}
