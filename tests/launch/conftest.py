"""Fixtures for the launch tests."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everyrank.cli import main
from everyrank.launch import (
    horovodrun,
    mpi,
)
from everyrank.launch import ray as ray_launcher
from launching import LAUNCHER_PREFIXES, CommandResult


@pytest.fixture(autouse=True)
def _no_launcher_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove variables of launchers, because these tests may run in an allocation."""
    for name in [name for name in os.environ if name.startswith(LAUNCHER_PREFIXES)]:
        monkeypatch.delenv(name)


@pytest.fixture
def run_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Return a function that runs a command in an empty folder without Slurm, MPI and Ray.

    For example, `run_main("train digits", SLURM_JOB_ID="7")`. A command that starts a process fails the test.
    """

    def fail_on_start(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    def call(*args: str, **variables: str) -> CommandResult:
        if len(args) == 1:
            args = tuple(shlex.split(args[0]))
        monkeypatch.setattr(sys, "argv", ["everyrank", *args])
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        status = main(args)
        return CommandResult(status, *capsys.readouterr())

    previous_handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", fail_on_start)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(mpi, "find_mpirun", lambda: None)
    monkeypatch.setattr(horovodrun, "find_horovodrun", lambda: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(ray_launcher, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda _: None)))
    yield call
    signal.signal(signal.SIGTERM, previous_handler)


@pytest.fixture
def busy_port() -> Iterator[int]:
    """Yield a port on which a socket listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]
