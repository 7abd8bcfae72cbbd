"""Audits of scripts that crash, hang, are cut off, or start what should not outlive them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

CRASH = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(3))
if dist.get_rank() == 1:
    raise ValueError("boom")
dist.all_reduce(torch.ones(3))
"""
ENDLESS = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(4, 2)).mean().backward()
optimizer.step()
while True:
    torch.ones(10).sum()
"""
OTHER_SESSION = """
import subprocess, time
subprocess.Popen(["sleep", "1033"], start_new_session=True)
open("/dev/shm/NAME", "w").close()
time.sleep(1000)
"""


def test_the_rank_that_crashed_is_named(everyrank: Any, tmp_path: Path) -> None:
    """Rank 0 only loses its peer."""
    (tmp_path / "train.py").write_text(CRASH)
    ran = everyrank(tmp_path, "audit", "train.py")
    assert ran.returncode == 4
    assert "rank 1" in ran.stderr
    assert "boom" in ran.stderr


def test_an_audit_that_was_cut_off(everyrank: Any, tmp_path: Path) -> None:
    """It does not say that nothing is wrong, and names the flag."""
    (tmp_path / "train.py").write_text(ENDLESS)
    ran = everyrank(tmp_path, "audit", "--limit", "6", "train.py")
    assert ran.returncode == 0, ran.stderr
    assert "nothing wrong found" not in ran.stdout
    assert "--limit" in ran.stdout.splitlines()[-1]


def test_a_script_with_a_null_byte_is_named(everyrank: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes(b"print(1)\0\n")
    ran = everyrank(tmp_path, "audit", "train.py")
    assert ran.returncode == 2
    assert ran.stderr.startswith("everyrank: train.py: ")


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a folder that is not redirected")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_nothing_outlives_the_audit(tmp_path: Path, number: signal.Signals) -> None:
    """Not even a program that the script has put into a session of its own."""
    ready = Path(f"/dev/shm/everyrank-test-{tmp_path.parent.name}-{number}")
    (tmp_path / "train.py").write_text(OTHER_SESSION.replace("NAME", ready.name))
    command = [sys.executable, "-m", "everyrank", "audit", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE) as audit:
        try:
            deadline = time.monotonic() + 60
            while not ready.exists():
                assert audit.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            started = psutil.Process(audit.pid).children(recursive=True)
            assert any("sleep" in process.name() for process in started)
            audit.send_signal(number)
            audit.wait(30)
            _, alive = psutil.wait_procs(started, timeout=10)
            assert not alive
        finally:
            audit.kill()
            ready.unlink(missing_ok=True)
