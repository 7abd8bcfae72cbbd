"""Hangs of a plain script are diagnosed by `everyrank launch`, and by `python -m everyrank watch` under torchrun.

The diagnosis names the rank at fault and its line of the script. `watch` does not end the script.
"""

from __future__ import annotations

import queue
import re
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest

from integration.conftest import Hosts, free_port
from processes import Cli

SCRIPT = Path(__file__).parent.parent / "scripts" / "hang.py"
# way: the ranks at fault, and what else the paragraph says; {waits}: the line where the others wait
WAYS = {
    "skipped_collective": (1, "rank 1 never reached all_reduce of 3 elements of float32"),
    "barrier_while_saving": (0, "it waits for a process that it has started"),
    "sleeping": (1, "rank 1 never reached all_reduce"),
    "locked": (1, "rank 1 never reached all_reduce"),
    "loader_worker": (1, "it waits for its data loader"),
    "order_of_groups": (1, "mismatch (groups in different order)"),
    "state_dict_on_rank_0": (1, "rank 0"),
    "fsdp_forward_on_rank_0": (1, "rank 1 never reached "),
    "object_collective": (1, "mismatch"),
    "receive_without_send": (1, "rank 1 never sent the message of 3 elements of float32 that rank 0 waits for"),
    "receive_from_each_other": (1, "ranks 0 and 1 both receive from each other"),
    "stopped": (1, "rank 1 is stopped by a signal"),
    "group_on_one_rank": (1, "rank 0"),
    "thread_in_collective": (1, "it waits for a thread or a lock"),
    "before_the_group": (1, "it waits for the others"),
}


def place_of(way: str, mark: str) -> str:
    """Return the line with this mark, such as `hang.py:31 in sleeping`; "" without one.

    The marks of `before_the_group` are in main.
    """
    lines = SCRIPT.read_text().splitlines()
    name = "main" if way == "before_the_group" else way
    first = lines.index(next(line for line in lines if line.startswith(f"def {name}(")))
    for number, line in enumerate(lines[first + 1 :], first + 2):
        if line.startswith(("def ", "class ")):
            return ""
        if line.endswith(f"# {mark}"):
            return f"hang.py:{number} in {name}"
    return ""


def check(text: str, way: str) -> None:
    """Check that the diagnosis names the rank and the lines."""
    rank, phrase = WAYS[way]
    line = next(line for line in text.splitlines() if "(--timeout)" in line)
    assert phrase in line
    assert re.search(rf"\brank {rank}\b", line)
    for mark in ("cause", "waits"):
        assert place_of(way, mark) in line, mark


# the watch reads the same state of the ranks: a collective, a message, and a rank that is in neither
WATCHED = ("skipped_collective", "receive_without_send", "before_the_group")


@pytest.mark.parametrize(("way", "how"), [*((way, "launch") for way in WAYS), *((way, "watch") for way in WATCHED)])
def test_hang_is_diagnosed_with_rank_and_line(cli: Cli, tmp_path: Path, way: str, how: str) -> None:
    if how == "launch":
        running = cli.start(tmp_path, "launch", "--processes", 2, "--timeout", 2, "--grace", 0, SCRIPT, way)
    else:
        command = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
        words = ("-m", "everyrank", "watch", "--timeout", 2, SCRIPT, way)
        running = cli.start(tmp_path, *words, command=command, TMPDIR=str(tmp_path))
    running.wait_for(lambda: re.search(r"\(--timeout\).*\n", running.output_so_far()[1]))
    assert running.process.poll() is None
    check(running.output_so_far()[1], way)
    assert running.output_so_far()[1].count("(--timeout)") == 1


@pytest.mark.parametrize(
    ("way", "how", "phrase"),
    [
        ("unequal_batches", "launch", "rank 1 was aborted"),  # torchrun would end rank 0 before it speaks
        ("left_early", "launch", "rank 1 never reached all_reduce"),
        ("left_early", "watch", "rank 1 never reached all_reduce"),
    ],
)
def test_failed_collective_of_gloo_is_diagnosed_with_both_lines(
    cli: Cli, tmp_path: Path, way: str, how: str, phrase: str
) -> None:
    """One rank has another batch, or ends early. Gloo fails on the other rank, and the diagnosis names both lines."""
    if how == "launch":
        running = cli.start(tmp_path, "launch", "--processes", 2, SCRIPT, way)
    else:
        command = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
        running = cli.start(tmp_path, "-m", "everyrank", "watch", SCRIPT, way, command=command, TMPDIR=str(tmp_path))
    status, _, err = running.end()
    assert status != 0
    assert phrase in err
    assert place_of(way, "waits") in err
    assert way == "left_early" or place_of(way, "cause") in err


def test_hang_on_several_hosts_is_diagnosed(three_hosts: Hosts, tmp_path: Path) -> None:
    """Two hosts share a folder. The diagnosis names the rank on the other host and its line."""
    shutil.copy(SCRIPT, tmp_path / "hang.py")
    port = str(free_port())
    started = [
        three_hosts.start(
            index,
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
                *(f"--node-rank={index}", f"--master-addr={three_hosts.addresses[0]}", f"--master-port={port}"),
                *("-m", "everyrank", "watch", "--timeout", "3", "--folder", "shared", "hang.py", "sleeping"),
            ],
            tmp_path,
            GLOO_SOCKET_IFNAME="eth0",
            PYTHONPATH="",
        )
        for index in range(2)
    ]
    lines: queue.Queue[str] = queue.Queue()
    for process in started:
        threading.Thread(target=lambda errors: [lines.put(line) for line in errors], args=(process.stderr,)).start()
    try:
        deadline, text = time.monotonic() + 120, ""
        while "(--timeout)" not in text:
            text += lines.get(timeout=max(0.1, deadline - time.monotonic()))
        check(text, "sleeping")
        assert all(process.poll() is None for process in started)
    finally:
        for name in three_hosts.names:
            three_hosts.kill(name)
