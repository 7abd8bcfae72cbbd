"""The autopsy of ranks that wait for a message of each other, or for one that is never sent."""

from __future__ import annotations

import re
from typing import Any

from everyrank.launch.autopsy.rank_views import RankView
from everyrank.launch.autopsy.verdict import verdict
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
    assert "it stands at train.py:30 in step" in text
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
    assert text.startswith("rank 0 never came to all_reduce")
    assert re.search(r"waits for a message of 4 elements .* from rank 1", text)


def test_peer_in_a_recorded_name() -> None:
    """NCCL's recorder names the peer; an unknown form stays as it is."""
    assert _operation("recv 0<-1", is_message=True) == "recv from 1"
    assert _operation("send 0->3", is_message=True) == "send to 3"
    assert _operation("all_reduce", is_message=False) == "all_reduce"
    assert _operation("recvAnySource", is_message=True) == "recvAnySource"
