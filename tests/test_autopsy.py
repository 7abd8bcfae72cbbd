"""`everyrank autopsy` and hang diagnosis: each hang in `hangs.py` is named with its file and line.

The autopsy can be requested from outside, and the first update has a longer timeout.
"""

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
from everyrank.launch.autopsy.rank_views import RankView, last_frames, read_rank_views
from everyrank.launch.autopsy.verdict import verdict
from everyrank.launch.host_info import pid_namespace, start_time
from everyrank.world import calls as recorder
from everyrank.world import open_world
from processes import Cli, free_port

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="reading stacks of other processes needs /proc, which needs Linux"
)

QUICK = [("shm", "different_order"), ("shm", "deadlock_in_the_loader")]
ALL = "the group of all 2 ranks"


def expected(name: str, backend: str) -> list[str]:
    """Texts that the paragraph must contain: the cause with its line, and where the other rank waits."""
    hang, reduce_3 = hangs.HANGS[name], "all_reduce of 3 elements of float32"

    def at(function: Any, mark: str) -> str:
        return f"hangs.py:{hangs.line_of(function, mark)} in {function.__name__}"

    def never_came(call: str, number: int, location: str) -> list[str]:
        return [
            f"rank 1 never reached {call}, collective {number} of {ALL}: it is at {location}",
            f"rank 0 waits in it, at {at(hang, 'waits')}",
        ]

    def mismatch(kind: str, call_of_rank_0: str, call_of_rank_1: str) -> list[str]:
        return [
            f"mismatch ({kind}): collective 2 of {ALL} is {call_of_rank_0} on rank 0, at {at(hang, 'waits')}, "
            f"and {call_of_rank_1} on rank 1, at {at(hang, 'cause')}"
        ]

    other_operation, reduce_8 = "different operation or order", "all_reduce of 8 elements of"
    at_the_end = f"{at(hangs.run_hang, 'end')} (it waits for the others at a barrier of everyrank"
    if name == "another_dtype" and backend == "gloo":  # gloo aborts the process that receives too many bytes
        return [
            f"rank 0 was aborted by a C library: it was last seen at {at(hang, 'waits')}; gloo aborts if another",
            f"rank 1 waits in {reduce_8} float64, collective 2 of {ALL}, at {at(hang, 'cause')}",
        ]
    return {
        "rank_0_only_collective": lambda: never_came(reduce_3, 2, at(hang, "cause") + " (it waits, process "),
        "uneven_loop": lambda: never_came(reduce_3, 5, at_the_end),
        "different_order": lambda: mismatch(other_operation, reduce_3, "broadcast of 3 elements of float32"),
        "another_shape": lambda: mismatch(
            "different size", f"{reduce_8} float32", "all_reduce of 6 elements of float32"
        ),
        "another_dtype": lambda: mismatch("different dtype", f"{reduce_8} float32", f"{reduce_8} float64"),
        "exception_on_one_rank": lambda: never_came(
            reduce_3, 2, at(hang, "cause") + " (it waits for a thread or a lock"
        ),
        "deadlock_in_the_loader": lambda: [
            *never_came(reduce_3, 2, at(hang, "cause") + " (it waits for its data loader"),
            f"; its worker, process {{}}, at {at(hangs.LockingDataset.__getitem__, 'worker')})",
        ],
        "forgotten_join": lambda: never_came(f"{reduce_8} float32", 9, at_the_end),
        "wrong_group": lambda: [
            f"mismatch (groups in different order): rank 1 waits in {reduce_3}, collective 2 of {ALL}, to which rank 0 "
            f"never came, at {at(hang, 'cause')}; rank 0 waits in {reduce_3}, collective 1 of {ALL}, to which rank 1 "
            f"never came, at {at(hang, 'waits')}"
        ],
        "barrier_in_one_branch": lambda: never_came("barrier", 2, at(hangs._compute, "cause") + " (it computes"),
        "stopped": lambda: [
            "rank 1 is stopped by a signal (kill -CONT ",
            f"at hangs.py:{hangs.line_of(hang, 'cause') - 1} in stopped",
            f"rank 0 waits in {reduce_3}, collective 2 of {ALL}, at {at(hang, 'waits')}",
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
        for name in hangs.HANGS
    ],
)
def test_each_hang_is_diagnosed(backend: str, name: str) -> None:
    """The rank whose collective times out prints the diagnosis before any rank is ended."""
    launch = Launch(processes=2, device="cpu", backend=backend, timeout_seconds=3, start_timeout_seconds=200)
    with pytest.raises(RankFailedError) as error:
        run_ranks(launch, hangs.run_hang, name, launch)
    line = str(error.value)
    assert "\n" not in line
    paragraph = line.partition("; autopsy: ")[2]
    for text in expected(name, backend):
        for part in text.split("{}"):
            assert part in paragraph, line


def holds_the_interpreter(info: RankInfo, launch: Launch) -> None:
    """C code that never releases the GIL, so no Python thread runs."""
    with open_world(info, launch) as world:
        hangs.run_first_collective(world)
        if world.rank == 1:
            ctypes.PyDLL(None).sleep(500)  # held
        dist.all_reduce(torch.ones(3))


@pytest.mark.integration
@pytest.mark.usefixtures("python")
def test_stack_of_a_rank_that_never_releases_the_gil() -> None:
    """A signal handler in C writes its stack."""
    launch = Launch(processes=2, device="cpu", timeout_seconds=2, start_timeout_seconds=200)
    with pytest.raises(RankFailedError, match="rank 1 never reached all_reduce") as error:
        run_ranks(launch, holds_the_interpreter, launch)
    first_line = holds_the_interpreter.__code__.co_firstlineno
    assert f"it is at test_autopsy.py:{first_line + 5} in holds_the_interpreter (it waits, process " in str(error.value)


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


def test_autopsy_of_a_run_that_is_still_hanging(cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The autopsy is requested with the folder of the run, and with SIGUSR2. It does not end the run."""
    path = tmp_path / "mine.py"
    path.write_text(WORKLOAD)
    line = next(n for n, text in enumerate(WORKLOAD.splitlines(), 1) if text.endswith("# here"))
    running = cli.start(tmp_path, "train", path.name, "--layout", "ddp", "--processes", "2", "--out", "out")
    running.wait_for((tmp_path / "reached").exists)
    location_text = f"it is at mine.py:{line} in loss (it waits, process "

    def is_diagnosed() -> bool:  # rank 0 may not have called the collective yet
        assert main(["autopsy", str(tmp_path / "out")]) == 0
        return location_text in capsys.readouterr().out

    running.wait_for(is_diagnosed)
    os.kill(running.process.pid, signal.SIGUSR2)
    running.wait_for(lambda: "autopsy: rank 1 never reached" in running.output_so_far()[1])
    # on a busy core, a process that was just woken may look like one that computes
    assert location_text.partition("(it waits")[0] in running.output_so_far()[1]
    os.kill(running.process.pid, signal.SIGINT)
    assert running.end()[0] == 130
    assert running.remaining_processes() == {}
    assert main(["autopsy", str(tmp_path / "out")]) == 0
    assert "rank 0 ended without" in capsys.readouterr().out


@pytest.mark.integration
def test_hang_of_ranks_started_by_torchrun(cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a launcher of everyrank, the ranks still write their state and diagnose the hang themselves."""
    (tmp_path / "mine.py").write_text(WORKLOAD)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port())
    arguments = "train mine.py --layout ddp --out out --timeout 10 --start-timeout 200"
    running = cli.start(tmp_path, "-m", "everyrank", *arguments.split(), command=torchrun, is_forked=False)
    running.wait_for((tmp_path / "reached").exists)

    def is_diagnosed() -> bool:
        assert main(["autopsy", str(tmp_path / "out")]) == 0
        return "it is at mine.py:20 in loss" in capsys.readouterr().out

    running.wait_for(is_diagnosed)
    assert running.end(200)[0] != 0
    assert "rank 1 never reached all_reduce" in running.output_so_far()[1]


@pytest.mark.parametrize("content", ["", "{", "[]", "7", '{"job": 3}', '{"time": 1, "frames": [[1]]}', "[" * 100_000])
def test_invalid_state_files_are_ignored(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Files that no rank wrote are skipped. Reading does not block on a FIFO."""
    folder = tmp_path / "ranks" / "autopsy"
    folder.mkdir(parents=True)
    (folder / "rank0.state").write_text(content)
    os.mkfifo(folder / "rank1.state")
    assert main(["autopsy", str(tmp_path)]) == 2
    assert "no rank has written its state" in capsys.readouterr().err


def test_autopsy_signals_no_process_without_a_handler(tmp_path: Path) -> None:
    """A state file may name any process. A process that does not handle the signal is not signalled."""
    rank_state: dict[str, Any] = {"job": "x", "rank": 0, "size": 1, "host": "h", "main": 1}
    child = os.fork()
    if child == 0:
        time.sleep(100)
        os._exit(0)
    try:
        start = start_time(child)
        state = rank_state | {"space": pid_namespace(), "pid": child, "began": start}
        (tmp_path / "rank0.state").write_text(json.dumps(state))
        (tmp_path / "rank0.stacks").touch()
        text = hang_autopsy(tmp_path, timeout_seconds=0.1)
        assert text is not None
        assert "an unknown location" in text
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("seconds", [3.0, 60.0])
@pytest.mark.parametrize("is_unique", [True, False])
def test_ranks_of_an_earlier_start_are_left_out(tmp_path: Path, seconds: float, is_unique: bool) -> None:
    """Two starts of `torchrun --nnodes 2` have the same variables. Files of the first one do not explain the second."""
    state = {"job": "x", "size": 2, "host": "far", "space": "another", "pid": 4, "main": 17, "is_unique": is_unique}
    for rank in range(2):
        (tmp_path / f"rank{rank}.state").write_text(json.dumps(state | {"rank": rank, "began": 9.0 - rank}))
        (tmp_path / f"rank{rank}.seen").write_text(json.dumps({"time": 1.0, "frames": []}))
    (tmp_path / "rank1.answer").write_text(json.dumps({"time": 1.0, "frames": [], "ended": True}))
    earlier = time.time() - seconds
    for path in tmp_path.glob("rank1.*"):
        os.utime(path, (earlier, earlier))
    text = str(hang_autopsy(tmp_path, timeout_seconds=0.1))
    assert ("rank 1 has ended its work" in text) is (is_unique or seconds < 10)


def test_newest_job_is_that_of_the_newest_files(tmp_path: Path) -> None:
    """A host that has been up for longer has larger start times, also for an older job."""
    for rank, job, began in ((0, "new", 100.0), (1, "old", 5000.0)):
        state = {"job": job, "rank": rank, "size": 2, "host": "far", "space": "another", "pid": 4, "main": 17}
        (tmp_path / f"rank{rank}.state").write_text(json.dumps(state | {"began": began}))
    os.utime(tmp_path / "rank1.state", (1e9, 1e9))
    assert [view.rank for view in read_rank_views(tmp_path, 0.1)] == [0]


def test_abort_of_a_rank_on_another_host(tmp_path: Path) -> None:
    """Its process cannot be read from here. The folder has the stack that it wrote when it was aborted."""
    state = {"job": "x", "rank": 0, "size": 1, "host": "far", "space": "another", "pid": 4, "began": 1.0, "main": 17}
    (tmp_path / "rank0.state").write_text(json.dumps(state))
    last_seen = {"time": time.time() - 5.0, "frames": [["/home/me/model.py", 187, "forward"]]}
    (tmp_path / "rank0.seen").write_text(json.dumps(last_seen))
    assert "was last seen, 5 s ago, at model.py:187" in str(hang_autopsy(tmp_path, timeout_seconds=0.1))
    frames = '  File "/home/me/train.py", line 265 in main\n'
    (tmp_path / "rank0.stacks").write_text(
        f"Fatal Python error: Aborted\n\nThread 0x{17:x} (most recent call first):\n{frames}"
    )
    assert re.search(r"rank 0 was aborted by a C library: .* train\.py:265", str(hang_autopsy(tmp_path, 0.1)))


def test_abort_of_a_data_loader_worker_is_not_that_of_its_rank(tmp_path: Path) -> None:
    """The worker, a fork, writes to the file of its rank. The rank continued, and was killed later."""
    state = {"job": "x", "rank": 0, "size": 1, "host": "far", "space": "another", "pid": 4, "began": 1.0, "main": 17}
    (tmp_path / "rank0.state").write_text(json.dumps(state))
    frames = '  File "/home/me/data.py", line 3 in load\n'
    (tmp_path / "rank0.stacks").write_text(f"Fatal Python error: Segmentation fault\n\nThread 0x{17:x} (most\n{frames}")
    (tmp_path / "rank0.seen").write_text(
        json.dumps({"time": time.time(), "frames": [["/home/me/train.py", 9, "main"]]})
    )
    assert last_frames(tmp_path, 0)[0] == [("/home/me/data.py", 3, "load")]
    earlier = time.time() - 60.0
    os.utime(tmp_path / "rank0.stacks", (earlier, earlier))
    assert last_frames(tmp_path, 0)[0] == [("/home/me/train.py", 9, "main")]
    assert "aborted" not in str(hang_autopsy(tmp_path, timeout_seconds=0.1))


TIMED_OUT = "RankFailedError: shm all_reduce timed out after 8 s (--timeout): rank 1 did not come"
BARRIER = str(Path(everyrank.__file__).parent / "world" / "barrier.py")
FRAMES = [("/home/me/train.py", 11, "main")]


def view(rank: int, calls: list[list[Any]] | None = None, size: int = 3, **more: Any) -> RankView:
    recorded = {"groups": {"0": list(range(size))}, "calls": calls} if calls is not None else {}
    frames = [("/home/me/train.py", 10 + rank % 2, "main")]
    return RankView(rank, size, "host", 100 + rank, **{"state": "sleeping", "frames": frames, "calls": recorded} | more)


def call(number: int, is_done: bool = True, operation: str = "all_reduce", count: int = 8) -> list[Any]:
    return ["0", number, operation, count, "float32", is_done, False, 0, None]


def entry(backend: str, time_ns: int) -> dict[str, Any]:
    """A collective as a Flight Recorder dumps it."""
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


@pytest.mark.parametrize(
    ("name", "operation"),
    [("nccl:recv 0<-1", "recv from 2"), ("nccl:send 0->2", "send to 7"), ("nccl:coalesced", "coalesced")],
)
def test_message_of_nccl_names_the_global_rank_of_its_peer(name: str, operation: str) -> None:
    """nccl records ranks of the group, here `new_group([5, 2, 7])`."""
    message = entry("nccl", 1) | {"profiling_name": name, "is_p2p": True, "process_group": ["3", "mine"]}
    assert recorder._row(message, {"3": [5, 2, 7]})[2] == operation


@pytest.mark.parametrize("with_locations", [False, True])
def test_calls_come_from_every_flight_recorder(monkeypatch: pytest.MonkeyPatch, with_locations: bool) -> None:
    """The recorders are those of gloo, of nccl2 (`nccl` from torch 2.15 on) and of the older nccl.

    No torch version needs to have all three.
    """
    suffix, dump = ("", pickle.dumps) if with_locations else ("_json", json.dumps)

    def dump_of_hook(*_: bool, backend: str = "gloo") -> Any:
        return dump({"entries": [entry(backend, 1 if backend == "gloo" else 2)]})

    def hook_without_nccl(*_: bool) -> Any:
        return dump({"entries": [entry("gloo", 1)]})

    def dump_of_older_nccl(*_: bool) -> Any:
        return dump({"version": "2.10"} if with_locations else {"entries": [entry("nccl", 3)]})

    functions = {
        f"_dump_fr_trace{suffix}": dump_of_hook,
        f"_dump_nccl_trace{suffix}": dump_of_older_nccl,
        "FlightRecorderHook": object,
    }
    for changed, expected_times in (
        ({}, [1, 2] if with_locations else [1, 2, 3]),
        ({"FlightRecorderHook": None}, [1] if with_locations else [1, 3]),  # torch 2.13 for CUDA
        # the hook dumps only the recorder of gloo
        ({f"_dump_fr_trace{suffix}": hook_without_nccl}, [1] if with_locations else [1, 3]),
        ({"FlightRecorderHook": None, f"_dump_nccl_trace{suffix}": None}, [1]),  # torch 2.13 for CPU
        (dict.fromkeys(functions), []),
    ):
        present = {name: value for name, value in (functions | changed).items() if value is not None}
        monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace(**present))
        rows = recorder._flight_recorder(with_locations, {})
        assert [row[7] for row in rows] == expected_times
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
        (  # ranks may give different numbers of elements to a gather
            [view(0, [call(1, False, "gather", 3)]), view(1, [call(1, False, "gather", 5)]), view(2, [])],
            "rank 2 never reached gather",
        ),
        (  # rank 0 waits for rank 1, which waits for rank 2 in a different group: the last one is the cause
            [
                view(0, [call(2, False)]),
                view(1, [["1", 7, "broadcast", 4, "float32", False, False, 0, None]]),
                view(2, []),
            ],
            "rank 2 never reached",
        ),
        (  # rank 1 waits at a barrier and receives the error of rank 0 there: it is in no collective
            [
                view(0, [call(1), call(2, False)], 2, raised=TIMED_OUT),
                view(1, [call(1)], 2, raised=TIMED_OUT, frames=[(BARRIER, 95, "on_each_rank"), *FRAMES]),
            ],
            "rank 1 never reached all_reduce .* collective 2 .* barrier .* train.py:11 .* rank 0 waits in it",
        ),
    ],
    ids=["never came", "gone", "all came", "ended", "none waits", "gather", "a chain", "at a barrier"],
)
def test_verdict_for_recorded_states_of_three_ranks(views: list[RankView], text: str) -> None:
    """The paragraph depends only on the recorded states."""
    if views[1].calls.get("calls") and views[1].calls["calls"][0][0] == "1":
        views[1].calls["groups"]["1"] = [1, 2]
    assert re.search(text, verdict(views))


def slow_view(rank: int, late_rank: int, wait_seconds: float = 0.05, **more: Any) -> RankView:
    """The state of a rank after ten collectives, each 0.1 s after the one before.

    In these ten, the other ranks wait for `late_rank`.
    """
    end = time.time() - wait_seconds
    rows = [call(number) for number in range(1, 11)]
    for row in rows:
        row[7] = int(1e9 * (end - 0.1 * (11 - row[1]) + 0.08 * (rank == late_rank)))
    if rank != late_rank:
        rows.append([*call(11, False)[:7], int(1e9 * end), None])
    slow_frames = [("/home/me/data.py", 12, "load")]
    frame_counts = [[9, slow_frames], [1, FRAMES]] if rank == late_rank else [[10, FRAMES]]
    return view(rank, rows, num_samples=10, locations=[(count, frames) for count, frames in frame_counts], **more)


def test_slow_rank_is_reported_instead_of_a_hang() -> None:
    """While all ranks advance, the text names the rank that the others wait for, and where it spends its time."""
    text = verdict([slow_view(rank, 1) for rank in range(3)])
    assert re.search(r"no rank is stuck, but rank 1 is slower .* \d\d% of the last 1\.0 s .* 0\.080 s each time", text)
    assert "rank 1 was at data.py:12 in load in 90% of the 10 stack samples" in text
    assert "the others in 0%" in text


def test_verdict_names_where_the_host_waits_and_where_it_called_the_collective() -> None:
    """NCCL does not block the host. Rank 0 waits where it needs the result, not where it called the collective."""
    pending = [*call(2, False)[:8], ["/home/me/train.py", 31, "step"]]
    text = verdict([view(0, [call(1), pending], 2), view(1, [call(1)], 2)])
    assert text.startswith("rank 1 never reached all_reduce")
    assert text.endswith("rank 0 waits in it, at train.py:10 in main (called at train.py:31 in step)")


def test_verdict_after_a_gloo_abort_names_the_previous_collective() -> None:
    """Its sizes may have differed. Rank 1 was aborted, while rank 0 continued to the next collective."""
    calls = [call(1), call(2, operation="all_gather", count=5), call(3, False, "all_gather", 1)]
    text = verdict([view(0, calls, 2), view(1, size=2, state="gone", aborted=True)])
    assert re.search(r"rank 1 was aborted by a C library.* rank 0 waits in all_gather of 1 element", text)
    assert text.endswith("before it, rank 0 called all_gather of 5 elements of float32, collective 2")


@pytest.mark.parametrize("how", ["a long wait", "two hosts", "no rank is late"])
def test_no_slow_rank_is_reported(how: str) -> None:
    """A wait much longer than the earlier ones is a hang. Clocks of two hosts are not compared."""
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
    """Return the seconds that a rank spends in a step where rank 1 is late: the first step or the second."""
    with open_world(info, launch) as world:
        if not is_first:
            hangs.run_first_collective(world)
        start = time.monotonic()
        if world.rank == 1:
            time.sleep(1.5)
        dist.all_reduce(torch.ones(3))
        return time.monotonic() - start


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.integration)])
def test_first_update_has_a_longer_timeout(backend: str) -> None:
    """A delay of 1.5 s does not end the first step, but ends the second."""
    launch = Launch(processes=2, device="cpu", backend=backend, timeout_seconds=0.5, start_timeout_seconds=200)
    assert run_ranks(launch, short_waits, launch, True)[0] > 0.5
    with pytest.raises(RankFailedError, match="imed out"):
        run_ranks(launch, short_waits, launch, False)
