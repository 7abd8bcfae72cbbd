"""The autopsy of ranks that wait for a message; the names of jobs, and the message for a rank without a result."""

from __future__ import annotations

import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from everyrank.errors import RankFailedError
from everyrank.launch import Launch, reports
from everyrank.launch.autopsy.rank_state import forget_hang, hang_report, report_hang
from everyrank.launch.autopsy.rank_views import RankView
from everyrank.launch.autopsy.verdict import verdict
from everyrank.launch.job import job_name
from everyrank.world.calls import _operation


def view(rank: int, line: int, *calls: list[Any]) -> RankView:
    frames = [("/work/train.py", line, "step")]
    return RankView(rank, 3, "n1", 100 + rank, frames=frames, calls={"groups": {"0": [0, 1, 2]}, "calls": list(calls)})


def message(text: str) -> list[Any]:
    return ["", 0, text, 4, "float32", False, True, 1, None]


def collective(number: int, is_done: bool) -> list[Any]:
    return ["0", number, "all_reduce", 2, "float32", is_done, False, number, None]


def test_never_sent() -> None:
    text = verdict([view(0, 10, message("recv from 2")), view(1, 20), view(2, 30)])
    assert re.match(r"rank 2 never sent .* rank 0 waits for at train\.py:10", text)
    assert "it is at train.py:30 in step" in text
    text = verdict([view(0, 10), view(1, 20, message("send to 0")), view(2, 30)])
    assert re.match(r"rank 0 never received .* rank 1 sends at train\.py:20", text)


def test_from_each_other() -> None:
    text = verdict([view(0, 10, message("recv from 1")), view(1, 20, message("recv from 0")), view(2, 30)])
    assert re.match(r"ranks 0 and 1 both receive .* rank 0 at train\.py:10 .* rank 1 at train\.py:20", text)


def test_a_collective_is_the_cause_before_a_message() -> None:
    """Rank 0 waits for a message, so it never comes to the collective in which the others wait."""
    waiting = [collective(1, True), collective(2, False)]
    text = verdict(
        [view(0, 10, collective(1, True), message("recv from 1")), view(1, 20, *waiting), view(2, 20, *waiting)]
    )
    assert text.startswith("rank 0 never reached all_reduce")
    assert re.search(r"waits for a message of 4 elements .* from rank 1", text)


def test_peer_in_a_recorded_name() -> None:
    """NCCL's recorder names the peer; an unknown form stays as it is."""
    assert _operation("recv 0<-1", is_message=True) == "recv from 1"
    assert _operation("send 0->3", is_message=True) == "send to 3"
    assert _operation("all_reduce", is_message=False) == "all_reduce"
    assert _operation("recvAnySource", is_message=True) == "recvAnySource"


def test_ranks_without_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the rank and its log."""
    monkeypatch.setattr(reports, "_FILES_SECONDS", 0.0)
    (tmp_path / "rank0.result").write_bytes(pickle.dumps(None))
    (tmp_path / "rank1.log").write_text("the last words")
    with pytest.raises(RankFailedError, match=r"rank 1 of 2 returned no result") as caught:
        reports.Reports(tmp_path, tmp_path, 2, range(2), Launch(processes=2)).results(needs_all=True)
    assert caught.value.log == tmp_path / "rank1.log"


def test_name_of_a_job(tmp_path: Path) -> None:
    """Hosts that each have a folder of the job share the name, so that the ranks of other hosts are not strangers."""
    host = Launch(processes=2, nodes=2, node_rank=0, rendezvous="10.0.0.1:29500")
    assert job_name(host, tmp_path / "a") == job_name(dataclasses.replace(host, node_rank=1), tmp_path / "b")
    assert job_name(Launch(processes=2), tmp_path / "a") == "a"


def test_an_old_hang_is_forgotten(tmp_path: Path) -> None:
    """A start with the same name as an earlier one does not show the earlier one's hang, and can report its own."""
    assert report_hang(tmp_path, "job", lambda: "rank 1 never came") == "rank 1 never came"
    assert report_hang(tmp_path, "job", lambda: "again") is None
    forget_hang(tmp_path, "job")
    assert hang_report(tmp_path, "job") == ""
