"""Why a job hangs: each way of `hangs.py` named with file and line; what is asked from outside; longer starts."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import everyrank
import hangs
from everyrank.cli import main
from everyrank.errors import RankFailedError
from everyrank.launch import Launch, RankInfo, run_ranks
from everyrank.launch.autopsy import hang_autopsy
from everyrank.launch.autopsy.rank_views import RankView
from everyrank.launch.autopsy.verdict import verdict
from everyrank.launch.host_info import pid_namespace, start_time
from everyrank.world import calls as recorder
from everyrank.world import open_world
from processes import Cli, free_port

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="stacks from outside need Linux's /proc"
)

QUICK = [("shm", "different_order"), ("shm", "deadlock_in_the_loader")]
ALL = "the group of all 2 ranks"


def expected(name: str, backend: str) -> list[str]:
    """What the paragraph has to say: the cause with its line, and where the other rank waits."""
    way, three = hangs.WAYS[name], "all_reduce of 3 elements of float32"

    def at(function: Any, mark: str) -> str:
        return f"hangs.py:{hangs.line_of(function, mark)} in {function.__name__}"

    def never_came(call: str, number: int, place: str) -> list[str]:
        return [
            f"rank 1 never reached {call}, collective {number} of {ALL}: it is at {place}",
            f"rank 0 waits in it, at {at(way, 'waits')}",
        ]

    def mismatch(what: str, own: str, other: str) -> list[str]:
        return [
            f"mismatch ({what}): collective 2 of {ALL} is {own} on rank 0, at {at(way, 'waits')}, and {other} on rank 1"
            f", at {at(way, 'cause')}"
        ]

    other_operation, eight = "different operation or order", "all_reduce of 8 elements of"
    at_the_end = f"{at(hangs.hang, 'end')} (it waits for the others at a barrier of everyrank"
    if name == "another_dtype" and backend == "gloo":  # which aborts the process that gets too much
        return [
            f"rank 0 was aborted by a C library: it was last seen at {at(way, 'waits')}; gloo aborts if another",
            f"rank 1 waits in {eight} float64, collective 2 of {ALL}, at {at(way, 'cause')}",
        ]
    return {
        "rank_0_only_collective": lambda: never_came(three, 2, at(way, "cause") + " (it waits, process "),
        "uneven_loop": lambda: never_came(three, 5, at_the_end),
        "different_order": lambda: mismatch(other_operation, three, "broadcast of 3 elements of float32"),
        "another_shape": lambda: mismatch("different size", f"{eight} float32", "all_reduce of 6 elements of float32"),
        "another_dtype": lambda: mismatch("different dtype", f"{eight} float32", f"{eight} float64"),
        "exception_on_one_rank": lambda: never_came(three, 2, at(way, "cause") + " (it waits for a thread or a lock"),
        "deadlock_in_the_loader": lambda: [
            *never_came(three, 2, at(way, "cause") + " (it waits for its data loader"),
            f"; its worker, process {{}}, at {at(hangs.Locked.__getitem__, 'worker')})",
        ],
        "forgotten_join": lambda: never_came(f"{eight} float32", 9, at_the_end),
        "wrong_group": lambda: [
            f"mismatch (groups in different order): rank 1 waits in {three}, collective 2 of {ALL}, to which rank 0 "
            f"never came, at {at(way, 'cause')}; rank 0 waits in {three}, collective 1 of {ALL}, to which rank 1 "
            f"never came, at {at(way, 'waits')}"
        ],
        "barrier_in_one_branch": lambda: never_came("barrier", 2, at(hangs._compute, "cause") + " (it computes"),
        "stopped": lambda: [
            "rank 1 is stopped by a signal (kill -CONT ",
            f"at hangs.py:{hangs.line_of(way, 'cause') - 1} in stopped",
            f"rank 0 waits in {three}, collective 2 of {ALL}, at {at(way, 'waits')}",
        ],
        "save_on_rank_0_under_fsdp": lambda: mismatch(
            other_operation, "all_gather of 3 elements of float32", "barrier"
        ),
    }[name]()


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize(
    ("backend", "name"),
    [
        pytest.param(backend, name, marks=() if (backend, name) in QUICK else pytest.mark.integration)
        for backend in ("shm", "gloo")
        for name in hangs.WAYS
    ],
)
def test_each_way_is_named(backend: str, name: str) -> None:
    """Whoever waits in vain says why, before any rank is ended."""
    launch = Launch(processes=2, device="cpu", backend=backend, timeout_seconds=3, start_timeout_seconds=200)
    with pytest.raises(RankFailedError) as caught:
        run_ranks(launch, hangs.hang, name, launch)
    line = str(caught.value)
    assert "\n" not in line
    paragraph = line.partition("; autopsy: ")[2]
    for text in expected(name, backend):
        for part in text.split("{}"):
            assert part in paragraph, line


def holds_the_interpreter(info: RankInfo, launch: Launch) -> None:
    """C code that never lets go of it: no thread of Python's answers."""
    with open_world(info, launch) as world:
        hangs.one_step(world)
        if world.rank == 1:
            ctypes.PyDLL(None).sleep(500)  # held
        dist.all_reduce(torch.ones(3))


@pytest.mark.integration
@pytest.mark.usefixtures("python")
def test_a_rank_whose_interpreter_does_not_run() -> None:
    """Its stack is written from C, on a signal."""
    launch = Launch(processes=2, device="cpu", timeout_seconds=2, start_timeout_seconds=200)
    with pytest.raises(RankFailedError, match="rank 1 never reached all_reduce") as caught:
        run_ranks(launch, holds_the_interpreter, launch)
    first = holds_the_interpreter.__code__.co_firstlineno
    assert f"it is at test_autopsy.py:{first + 5} in holds_the_interpreter (it waits, process " in str(caught.value)


WORKLOAD = """\
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from everyrank import Workload

calls = 0


def loss(output, target):
    global calls
    calls += 1
    if calls == 3 and dist.get_rank() == 1:
        (Path(__file__).parent / "reached").touch()
        while True:
            time.sleep(0.05)  # here
    return ((output - target) ** 2).sum(), target.numel()


workload = Workload(
    name="mine",
    model=lambda: nn.Linear(3, 2),
    train_data=lambda: TensorDataset(torch.ones(16, 3), torch.ones(16, 2)),
    loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    global_batch=4,
    steps=100,
)
"""


def test_asked_while_it_hangs(cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the folder of the run, and by a signal to the command; the training goes on hanging."""
    path = tmp_path / "mine.py"
    path.write_text(WORKLOAD)
    line = next(n for n, text in enumerate(WORKLOAD.splitlines(), 1) if text.endswith("# here"))
    running = cli.start(tmp_path, "train", path.name, "--layout", "ddp", "--processes", "2", "--out", "out")
    running.wait_for((tmp_path / "reached").exists)
    seen = f"it is at mine.py:{line} in loss (it waits, process "

    def is_named() -> bool:  # rank 0 may still be on its way into the collective
        assert main(["autopsy", str(tmp_path / "out")]) == 0
        return seen in capsys.readouterr().out

    running.wait_for(is_named)
    os.kill(running.process.pid, signal.SIGUSR2)
    running.wait_for(lambda: "autopsy: rank 1 never reached" in running.said()[1])
    # a busy core may show a process that has just been woken as one that computes
    assert seen.partition("(it waits")[0] in running.said()[1]
    os.kill(running.process.pid, signal.SIGINT)
    assert running.end()[0] == 130
    assert running.left() == {}
    assert main(["autopsy", str(tmp_path / "out")]) == 0
    assert "rank 0 ended without" in capsys.readouterr().out


@pytest.mark.integration
def test_ranks_that_torchrun_has_started_from_outside(
    cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No launcher of ours stands over them: they keep their state all the same, and say themselves why they hang."""
    (tmp_path / "mine.py").write_text(WORKLOAD)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port())
    words = "train mine.py --layout ddp --out out --timeout 10 --start-timeout 200"
    running = cli.start(tmp_path, "-m", "everyrank", *words.split(), command=torchrun, is_forked=False)
    running.wait_for((tmp_path / "reached").exists)

    def is_named() -> bool:
        assert main(["autopsy", str(tmp_path / "out")]) == 0
        return "it is at mine.py:20 in loss" in capsys.readouterr().out

    running.wait_for(is_named)
    assert running.end(200)[0] != 0
    assert "rank 1 never reached all_reduce" in running.said()[1]


@pytest.mark.parametrize("content", ["", "{", "[]", "7", '{"job": 3}', '{"time": 1, "frames": [[1]]}', "[" * 100_000])
def test_a_folder_from_elsewhere(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Files that no rank has written are no ranks; and a FIFO is not waited for."""
    folder = tmp_path / "ranks" / "autopsy"
    folder.mkdir(parents=True)
    (folder / "rank0.state").write_text(content)
    os.mkfifo(folder / "rank1.state")
    assert main(["autopsy", str(tmp_path)]) == 2
    assert "no rank has written its state" in capsys.readouterr().err


def test_a_process_that_is_somebody_elses(tmp_path: Path) -> None:
    """A file may name any process: one that does not expect the signal gets none."""
    me: dict[str, Any] = {"job": "x", "rank": 0, "size": 1, "host": "h", "main": 1}
    child = os.fork()
    if child == 0:
        time.sleep(100)
        os._exit(0)
    try:
        began = start_time(child)
        row = me | {"space": pid_namespace(), "pid": child, "began": began}
        (tmp_path / "rank0.state").write_text(json.dumps(row))
        (tmp_path / "rank0.stacks").touch()
        text = hang_autopsy(tmp_path, timeout_seconds=0.1)
        assert text is not None
        assert "an unknown location" in text
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_rank_that_a_library_has_ended_on_another_host(tmp_path: Path) -> None:
    """Its process is unknown here, but the stack that it wrote at its end is in the folder."""
    me = {"job": "x", "rank": 0, "size": 1, "host": "far", "space": "another", "pid": 4, "began": 1.0, "main": 17}
    (tmp_path / "rank0.state").write_text(json.dumps(me))
    seen = {"time": time.time() - 5.0, "frames": [["/home/me/model.py", 187, "forward"]]}
    (tmp_path / "rank0.seen").write_text(json.dumps(seen))
    assert "was last seen, 5 s ago, at model.py:187" in str(hang_autopsy(tmp_path, timeout_seconds=0.1))
    frames = '  File "/home/me/train.py", line 265 in main\n'
    (tmp_path / "rank0.stacks").write_text(
        f"Fatal Python error: Aborted\n\nThread 0x{17:x} (most recent call first):\n{frames}"
    )
    assert re.search(r"rank 0 was aborted by a C library: .* train\.py:265", str(hang_autopsy(tmp_path, 0.1)))


TIMED_OUT = "RankFailedError: shm all_reduce timed out after 8 s (--timeout): rank 1 did not come"
BARRIER = str(Path(everyrank.__file__).parent / "world" / "barrier.py")
FRAMES = [("/home/me/train.py", 11, "main")]


def view(rank: int, calls: list[list[Any]] | None = None, size: int = 3, **more: Any) -> RankView:
    known = {"groups": {"0": list(range(size))}, "calls": calls} if calls is not None else {}
    frames = [("/home/me/train.py", 10 + rank % 2, "main")]
    return RankView(rank, size, "host", 100 + rank, **{"state": "sleeping", "frames": frames, "calls": known} | more)


def call(number: int, is_done: bool = True, operation: str = "all_reduce", count: int = 8) -> list[Any]:
    return ["0", number, operation, count, "float32", is_done, False, 0, None]


def entry(backend: str, time_ns: int) -> dict[str, Any]:
    """A call as a Flight Recorder writes it down."""
    return {
        "process_group": ["0", "default_pg"],
        "collective_seq_id": 1,
        "p2p_seq_id": 0,
        "profiling_name": f"{backend}:all_reduce",
        "input_sizes": [[2, 4]],
        "input_dtypes": ["Float"],
        "retired": False,
        "state": "scheduled",
        "is_p2p": False,
        "time_created_ns": time_ns,
    }


@pytest.mark.parametrize("with_locations", [False, True])
def test_calls_come_from_every_flight_recorder(monkeypatch: pytest.MonkeyPatch, with_locations: bool) -> None:
    """gloo's, that of nccl2 (`nccl` from torch 2.15 on) and that of the older nccl; no torch has to have all."""
    ending, dump = ("", pickle.dumps) if with_locations else ("_json", json.dumps)

    def hooked(*_: bool, backend: str = "gloo") -> Any:
        return dump({"entries": [entry(backend, 1 if backend == "gloo" else 2)]})

    def older(*_: bool) -> Any:
        return dump({"entries": [entry("gloo", 1)]})

    def legacy(*_: bool) -> Any:
        return dump({"version": "2.10"} if with_locations else {"entries": [entry("nccl", 3)]})

    names = {f"_dump_fr_trace{ending}": hooked, f"_dump_nccl_trace{ending}": legacy, "FlightRecorderHook": object}
    for changed, times in (
        ({}, [1, 2] if with_locations else [1, 2, 3]),
        ({"FlightRecorderHook": None}, [1] if with_locations else [1, 3]),  # torch 2.13 for CUDA
        ({f"_dump_fr_trace{ending}": older}, [1] if with_locations else [1, 3]),  # a hook without recorders of its own
        ({"FlightRecorderHook": None, f"_dump_nccl_trace{ending}": None}, [1]),  # torch 2.13 for CPU
        (dict.fromkeys(names), []),
    ):
        present = {name: value for name, value in (names | changed).items() if value is not None}
        monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace(**present))
        rows = recorder._flight_recorder(with_locations)
        assert [row[7] for row in rows] == times
        assert all(row[:7] == ["0", 1, "all_reduce", 8, "float32", False, False] for row in rows)


@pytest.mark.parametrize(
    ("views", "text"),
    [
        (
            [view(0, [call(1), call(2, False)]), view(1, [call(1)]), view(2, [call(1), call(2, False)])],
            "rank 1 never reached all_reduce .* collective 2 .* train.py:11 .* process 101.* ranks 0 and 2 wait",
        ),
        (
            [view(0, [call(1, False)]), view(1, state="gone"), view(2, [call(1, False)])],
            "rank 1 .*process 101 was killed.* train.py:11 .*ranks 0 and 2 wait",
        ),
        (
            [view(0, [call(1, False)]), view(1, [call(1, False)]), view(2, [call(1, False)])],
            "all ranks have reached .* collective 1 ",
        ),
        (
            [view(0, [call(1, False)]), view(1, [], ended=True, frames=[]), view(2, [call(1, False)])],
            "rank 1 never reached all_reduce .* collective 1 .* ended its work",
        ),
        (
            [view(0, [call(1)]), view(1, [call(1)], busy=0.9), view(2, [call(1)])],
            "no rank .* train.py:10 .*it waits, process 100.* train.py:11 .*it computes, process 101",
        ),
        (  # of a gather each hands in what it has
            [view(0, [call(1, False, "gather", 3)]), view(1, [call(1, False, "gather", 5)]), view(2, [])],
            "rank 2 never reached gather",
        ),
        (  # rank 0 waits for rank 1, and that for rank 2 in another group: the end of the chain is told
            [
                view(0, [call(2, False)]),
                view(1, [["1", 7, "broadcast", 4, "float32", False, False, 0, None]]),
                view(2, []),
            ],
            "rank 2 never reached",
        ),
        (  # rank 1 waits at a barrier, and is told the error of rank 0 there: it is in no collective
            [
                view(0, [call(1), call(2, False)], 2, raised=TIMED_OUT),
                view(1, [call(1)], 2, raised=TIMED_OUT, frames=[(BARRIER, 95, "on_each_rank"), *FRAMES]),
            ],
            "rank 1 never reached all_reduce .* collective 2 .* barrier .* train.py:11 .* rank 0 waits in it",
        ),
    ],
    ids=["never came", "gone", "all came", "ended", "none waits", "gather", "a chain", "at a barrier"],
)
def test_what_follows(views: list[RankView], text: str) -> None:
    """The paragraph as a function of what is known."""
    if views[1].calls.get("calls") and views[1].calls["calls"][0][0] == "1":
        views[1].calls["groups"]["1"] = [1, 2]
    assert re.search(text, verdict(views))


def slow_view(rank: int, late_rank: int, waited: float = 0.05, **more: Any) -> RankView:
    """A rank after ten collectives, a tenth of a second each; for all of that time the others wait for `late_rank`."""
    end = time.time() - waited
    rows = [call(number) for number in range(1, 11)]
    for row in rows:
        row[7] = int(1e9 * (end - 0.1 * (11 - row[1]) + 0.08 * (rank == late_rank)))
    if rank != late_rank:
        rows.append([*call(11, False)[:7], int(1e9 * end), None])
    slow = [("/home/me/data.py", 12, "load")]
    places = [[9, slow], [1, FRAMES]] if rank == late_rank else [[10, FRAMES]]
    return view(rank, rows, looks=10, places=[(count, frames) for count, frames in places], **more)


def test_a_slow_rank_is_no_hang() -> None:
    """While all ranks move, the one that the others wait for is named, and where it spends its time."""
    text = verdict([slow_view(rank, 1) for rank in range(3)])
    assert re.search(r"no rank is stuck, but rank 1 is slower .* \d\d% of the last 1\.0 s .* 0\.080 s each time", text)
    assert "rank 1 was at data.py:12 in load in 90% of the 10 looks" in text
    assert "the others in 0%" in text


def test_a_host_that_has_gone_on() -> None:
    """NCCL does not block the host: rank 0 stands where it needs the result, not where it called the collective."""
    pending = [*call(2, False)[:8], ["/home/me/train.py", 31, "step"]]
    text = verdict([view(0, [call(1), pending], 2), view(1, [call(1)], 2)])
    assert text.startswith("rank 1 never reached all_reduce")
    assert text.endswith("rank 0 waits in it, at train.py:10 in main (called at train.py:31 in step)")


def test_the_call_before_the_one_that_gloo_ended() -> None:
    """Its sizes may be what differed: rank 1 was ended, while rank 0 has gone on to the next collective."""
    calls = [call(1), call(2, operation="all_gather", count=5), call(3, False, "all_gather", 1)]
    text = verdict([view(0, calls, 2), view(1, size=2, state="gone", aborted=True)])
    assert re.search(r"rank 1 was aborted by a C library.* rank 0 waits in all_gather of 1 element", text)
    assert text.endswith("before it, rank 0 called all_gather of 5 elements of float32, collective 2")


@pytest.mark.parametrize("how", ["a long wait", "two hosts", "no rank is late"])
def test_what_is_no_slow_rank(how: str) -> None:
    """A wait that is much longer than the earlier ones is a hang; the clocks of two hosts are not compared."""
    views = [
        slow_view(rank, 5 if how == "no rank is late" else 1, 5.0 if how == "a long wait" else 0.05)
        for rank in range(3)
    ]
    if how == "two hosts":
        views[2].host = "other"
    text = verdict(views)
    assert "slower" not in text
    assert how == "no rank is late" or "rank 1 never reached" in text


def short_waits(info: RankInfo, launch: Launch, is_first: bool) -> float:
    """Seconds that rank 0 waits for rank 1, in the first step or after it."""
    with open_world(info, launch) as world:
        if not is_first:
            hangs.one_step(world)
        begun = time.monotonic()
        if world.rank == 1:
            time.sleep(1.5)
        dist.all_reduce(torch.ones(3))
        return time.monotonic() - begun


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.integration)])
def test_a_longer_timeout_until_the_first_update_is_done(backend: str) -> None:
    """What takes a second and a half is no reason to end a start, and is one to end a step."""
    launch = Launch(processes=2, device="cpu", backend=backend, timeout_seconds=0.5, start_timeout_seconds=200)
    assert run_ranks(launch, short_waits, launch, True)[0] > 0.5
    with pytest.raises(RankFailedError, match="imed out"):
        run_ranks(launch, short_waits, launch, False)
