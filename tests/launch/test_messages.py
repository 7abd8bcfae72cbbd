"""Autopsies of ranks that wait for a message, job names, and ranks without a result."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everyrank.errors import RankFailedError, WorkloadError
from everyrank.launch import Launch, reports
from everyrank.launch.autopsy.rank_state import forget_hang, hang_report, report_hang
from everyrank.launch.autopsy.rank_views import RankView
from everyrank.launch.autopsy.verdict import verdict
from everyrank.launch.job import job_name
from everyrank.launch.monitor import ProcessMonitor
from everyrank.launch.signals import Stop, is_end_requested
from everyrank.launch.stalled_ranks import concerns_others, is_a_wait, lost_another
from everyrank.launch.torchrun import TorchrunOptions
from everyrank.world.calls import _operation


def view(rank: int, line: int, *calls: list[Any]) -> RankView:
    """Return the state of a rank at a line of train.py with these calls."""
    frames = [("/work/train.py", line, "step")]
    return RankView(rank, 3, "n1", 100 + rank, frames=frames, calls={"groups": {"0": [0, 1, 2]}, "calls": list(calls)})


def pending_message(operation: str) -> list[Any]:
    """Return a pending send or receive."""
    return ["", 0, operation, 4, "float32", False, True, 1, None]


def collective(number: int, is_done: bool) -> list[Any]:
    """Return an all-reduce with this number."""
    return ["0", number, "all_reduce", 2, "float32", is_done, False, number, None]


def test_verdict_names_the_rank_that_never_sent_or_received() -> None:
    text = verdict([view(0, 10, pending_message("recv from 2")), view(1, 20), view(2, 30)])
    assert re.match(r"rank 2 never sent .* rank 0 waits for at train\.py:10", text)
    assert "it is at train.py:30 in step" in text
    text = verdict([view(0, 10), view(1, 20, pending_message("send to 0")), view(2, 30)])
    assert re.match(r"rank 0 never received .* rank 1 sends at train\.py:20", text)


def test_verdict_names_ranks_that_receive_from_each_other() -> None:
    text = verdict(
        [view(0, 10, pending_message("recv from 1")), view(1, 20, pending_message("recv from 0")), view(2, 30)]
    )
    assert re.match(r"ranks 0 and 1 both receive .* rank 0 at train\.py:10 .* rank 1 at train\.py:20", text)


def test_verdict_names_the_collective_first() -> None:
    """Rank 0 waits for a message, so it never reaches the collective in which the others wait."""
    calls = [collective(1, True), collective(2, False)]
    text = verdict(
        [view(0, 10, collective(1, True), pending_message("recv from 1")), view(1, 20, *calls), view(2, 20, *calls)]
    )
    assert text.startswith("rank 0 never reached all_reduce")
    assert re.search(r"waits for a message of 4 elements .* from rank 1", text)


@pytest.mark.parametrize(
    ("message", "is_wait", "is_lost", "is_concerned"),
    [
        ("a.py:3 in f: RuntimeError: [/gloo/unbound_buffer.cc:81] Timed out waiting 9ms for recv", True, False, True),
        ("shm all_reduce timed out after 8 s (--timeout): rank 1 did not come", True, False, True),
        ("a.py:3 in f: DistBackendError: Watchdog caught timeout: WorkNCCL(Timeout(ms)=9)", True, False, True),
        ("a.py:3 in f: RuntimeError: [/gloo/pair.cc:5] Connection closed by peer [::1]:7", False, True, True),
        ("a.py:3 in f: DistNetworkError: Connection reset by peer", False, True, True),
        ("a.py:3 in f: RuntimeError: [enforce fail at /gloo/pair.cc:4] 8 vs 4", False, False, True),
        # errors of the user's own code
        ("a.py:3 in f: TimeoutError: the compile server timed out", False, False, False),
        ("compile.py:3 in f: TimeoutError: the server timed out", False, False, False),
        ("update 1: nccl.py:3 in shm: TimeoutError: the server timed out", False, False, False),
        ("update 1: my gloo test.py:3 in f: TimeoutError: the server timed out", False, False, False),
        ("gloo.py:3 in f: ConnectionResetError: [Errno 104] Connection reset by peer", False, False, False),
        ("a.py:3 in f: RuntimeError: [enforce fail at alloc_cpu.cpp:127] can't allocate memory", False, False, False),
        ("a.py:3 in f: RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos", False, False, False),
    ],
)
def test_only_errors_of_a_backend_are_caused_by_another_rank(
    message: str, is_wait: bool, is_lost: bool, is_concerned: bool
) -> None:
    assert (is_a_wait(message), lost_another(message), concerns_others(message)) == (is_wait, is_lost, is_concerned)


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:127] can't allocate memory", "rank 1 never reached .* raised"),
        ("RuntimeError: [/gloo/pair.cc:5] Connection closed by peer", "rank 1 was ended by an error of another rank"),
        ("RuntimeError: [/gloo/buffer.cc:5] Timed out waiting 9ms", "rank 1 timed out at"),
    ],
)
def test_verdict_about_a_rank_that_raised(raised: str, text: str) -> None:
    waiting = [view(rank, 10, collective(4, True), collective(5, False)) for rank in (0, 2)]
    failed = dataclasses.replace(view(1, 20, collective(4, True), collective(5, True)), raised=raised)
    if "raised" in text:
        failed.calls["calls"] = failed.calls["calls"][:1]
    assert re.search(text, verdict([waiting[0], failed, waiting[1]]))


def test_peer_of_a_recorded_nccl_operation() -> None:
    """NCCL's recorder puts the peer into the name. An unknown form is not changed."""
    assert _operation("recv 0<-1", True, (0, 1)) == "recv from 1"
    assert _operation("send 0->3", True, (1, 3, 5, 7)) == "send to 7"
    assert _operation("all_reduce", False, (0, 1)) == "all_reduce"
    assert _operation("recvAnySource", True, (0, 1)) == "recvAnySource"


def test_error_of_a_missing_result_names_the_rank_and_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_FILES_SECONDS", 0.0)
    (tmp_path / "rank0.result").write_bytes(pickle.dumps(None))
    (tmp_path / "rank1.log").write_text("the last words")
    with pytest.raises(RankFailedError, match=r"rank 1 of 2 returned no result") as error_info:
        reports.Reports(tmp_path, tmp_path, 2, range(2), Launch(processes=2)).results(needs_all=True)
    assert error_info.value.log == tmp_path / "rank1.log"


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (-9, "ended by SIGKILL (often out of memory)"),
        (-41, "ended by signal 41"),  # a real-time signal, such as that for stacks
        (3, "exited with status 3 before its work was done"),
    ],
)
def test_end_of_a_rank_without_an_error_is_named(tmp_path: Path, code: int, cause: str) -> None:
    row = reports.exit_row(1, code)
    error = reports_of_two_ranks(tmp_path).root_cause([row])
    assert str(error) == f"rank 1 of 2 on {row['host']}: {cause}"


def reports_of_two_ranks(folder: Path) -> reports.Reports:
    """Return the reports of a job with two ranks."""
    return reports.Reports(folder, folder, 2, range(2), Launch(processes=2))


@pytest.mark.parametrize(
    ("messages", "kind"),
    [
        (["w.py:12 in loss: ValueError: expected 3"] * 2, WorkloadError),
        ([f"w.py:12 in loss: ValueError: sample {rank}: bad" for rank in range(2)], WorkloadError),
        ([f"update 1: w.py:12 in <lambda>: KeyError: 'a{rank}: b'" for rank in range(2)], WorkloadError),
        ([f"w.py:12 in loss: AssertionError{': odd' * rank}" for rank in range(2)], WorkloadError),
        ([f"sample {rank} has no label" for rank in range(2)], WorkloadError),
        ([f"w.py:{12 + rank} in loss: ValueError: expected 3" for rank in range(2)], RankFailedError),
        (["w.py:12 in loss: ValueError: a", "w.py:12 in loss: KeyError: a"], RankFailedError),
        (["there is no data", "the loss is no tensor"], RankFailedError),
    ],
)
def test_error_of_all_ranks_is_a_wrong_workload(
    tmp_path: Path, messages: list[str], kind: type[RankFailedError | WorkloadError]
) -> None:
    """Ranks have the same error if its line and type are the same: its text may name their samples."""
    for rank, message in enumerate(messages):
        row = reports.exit_row(rank, 0) | {"kind": "WorkloadError", "message": message, "has_frames": False}
        (tmp_path / f"rank{rank}.error").write_text(json.dumps(row))
    assert type(reports_of_two_ranks(tmp_path).root_cause([])) is kind


def test_process_file_that_a_restarted_rank_deletes_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "rank0.pid").write_text("17 16")
    (tmp_path / "rank1.pid").symlink_to("deleted")
    assert reports_of_two_ranks(tmp_path).processes() == [(17, 16)]


def test_job_name_is_equal_on_all_hosts(tmp_path: Path) -> None:
    """Each host has its own job folder. The shared name tells that ranks belong to the same job."""
    launch = Launch(processes=2, nodes=2, node_rank=0, rendezvous="10.0.0.1:29500")
    assert job_name(launch, tmp_path / "a") == job_name(dataclasses.replace(launch, node_rank=1), tmp_path / "b")
    assert job_name(Launch(processes=2), tmp_path / "a") == "a"


def test_report_of_an_earlier_hang_is_deleted(tmp_path: Path) -> None:
    """A job that reuses a name does not show the hang of the earlier job, and can report its own."""
    assert report_hang(tmp_path, "job", lambda: "rank 1 never came") == "rank 1 never came"
    assert report_hang(tmp_path, "job", lambda: "again") is None
    forget_hang(tmp_path, "job")
    assert hang_report(tmp_path, "job") == ""


@pytest.mark.parametrize(
    ("stop", "ends"),
    [
        (Stop(), False),
        (Stop(signal.SIGUSR1), True),  # ranks of `train` save and end
        (Stop(signal.SIGUSR1, grace_seconds=30.0, count=1), False),  # it is passed on to a script
        (Stop(signal.SIGTERM, grace_seconds=30.0, count=2), True),
    ],
)
def test_torchrun_restarts_ranks_after_sigusr1_was_passed_on(tmp_path: Path, stop: Stop, ends: bool) -> None:
    """A signal that asks the ranks to end makes the next failure final. Other processes read it from a file."""
    assert not is_end_requested(tmp_path)
    if stop.asked is not None:
        (tmp_path / "stop").write_text(stop.request)
    assert (is_end_requested(tmp_path), stop.ends_ranks) == (ends, ends)
    statuses = [None, 0]
    launch = Launch("torchrun", options=TorchrunOptions(restarts=1))
    monitor = ProcessMonitor(launch, tmp_path, tmp_path, stop)
    process: Any = SimpleNamespace(poll=lambda: statuses.pop(0) if len(statuses) > 1 else statuses[0])
    monitor.processes = [process]
    (tmp_path / "rank0.pid").write_text("")
    row = reports.exit_row(0, 1) | {"kind": "", "message": "first start", "has_frames": False}
    (tmp_path / "rank0.error").write_text(json.dumps(row))
    with pytest.raises(RankFailedError, match="first start") if ends else contextlib.nullcontext():
        monitor._wait(Stop())


def test_ranks_that_their_launcher_ended_are_reported_with_its_last_line(tmp_path: Path) -> None:
    """The cause is then the launcher's: SIGTERM only says that it has ended its ranks."""
    monitor = ProcessMonitor(Launch(processes=2, launcher="torchrun"), tmp_path, tmp_path)
    (tmp_path / "torchrun.log").write_text("Traceback\nRuntimeError: the store {0} is lost\n")
    for rank in range(2):
        (tmp_path / f"rank{rank}.exit").write_text(json.dumps(reports.exit_row(rank, -signal.SIGTERM)))
    with (tmp_path / "torchrun.log").open("ab") as monitor.launcher_log:
        monitor.processes = [subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])]
        monitor.processes[0].wait()
        with pytest.raises(RankFailedError, match=r"RuntimeError: the store \{0\} is lost; rank 0 of 2") as error:
            monitor._raise_first_failure()
    assert error.value.log == tmp_path / "torchrun.log"


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("RendezvousTimeoutError", "fewer than 3 hosts joined within 80 s (--timeout)"),
        ("RendezvousClosedError", "the other hosts ended the job"),
        ("RendezvousConnectionError: The connection to the C10d store has failed.", "no answer from 10.0.0.1:29500"),
    ],
)
def test_errors_of_torchrun_about_hosts_are_explained(name: str, meaning: str) -> None:
    options = TorchrunOptions(rendezvous_kind="c10d", min_nodes=3)
    launch = Launch(
        processes=4, nodes=4, launcher="torchrun", rendezvous="10.0.0.1:29500", timeout_seconds=60, options=options
    )
    assert meaning in launch.row.explain(f"torch.distributed.elastic.rendezvous.api.{name}", launch)


@pytest.mark.parametrize(("launcher", "is_named"), [("torchrun", True), ("spawn", False)])
def test_host_that_has_not_joined_is_named_if_the_launcher_waits_for_it(
    tmp_path: Path, launcher: str, is_named: bool
) -> None:
    launch = Launch(
        processes=2, nodes=2, node_rank=0, launcher=launcher, rendezvous="10.0.0.1:29500", timeout_seconds=0.01
    )
    monitor = ProcessMonitor(launch, tmp_path, tmp_path)
    with subprocess.Popen(["sleep", "60"]) as process:
        monitor.processes = [process]
        with pytest.raises(RankFailedError, match="rank 0 of 2 never started") as error:
            monitor.wait()
        process.kill()
    assert ("all 2 hosts have joined" in str(error.value)) == is_named
