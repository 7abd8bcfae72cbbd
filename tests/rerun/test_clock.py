"""The clock of a script that runs again counts its reads and its sleep, not the time of the machine."""

from __future__ import annotations

import time

import pytest

from everyrank.rerun.inside.clock import install_clock


def test_script_that_waits_for_a_clock_comes_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read is a millisecond, so a loop that sleeps would otherwise take many times as long."""
    for name in ("time", "perf_counter", "monotonic", "process_time", "sleep"):
        monkeypatch.setattr(time, name, getattr(time, name))
    install_clock()
    start, start_of_process = time.monotonic(), time.process_time()
    time.sleep(0.01)
    assert time.monotonic() - start == pytest.approx(0.011)
    assert time.process_time() - start_of_process == pytest.approx(0.001)
