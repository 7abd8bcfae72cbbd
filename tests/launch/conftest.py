"""Fixtures of the tests in this folder."""

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
from launching import OF_LAUNCHERS, Typed


@pytest.fixture(autouse=True)
def _nobody_started_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests may run in somebody's allocation."""
    for name in [name for name in os.environ if name.startswith(OF_LAUNCHERS)]:
        monkeypatch.delenv(name)


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """`typed("train digits", SLURM_JOB_ID="7")` in an empty folder, where there is no Slurm, no MPI and no Ray.

    Whoever starts a process fails the test.
    """

    def start(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    def call(*words: str, **variables: str) -> Typed:
        if len(words) == 1:
            words = tuple(shlex.split(words[0]))
        monkeypatch.setattr(sys, "argv", ["everyrank", *words])
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        status = main(words)
        return Typed(status, *capsys.readouterr())

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(mpi, "find_mpirun", lambda: None)
    monkeypatch.setattr(horovodrun, "find_horovodrun", lambda: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(ray_launcher, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda _: None)))
    yield call
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def busy() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]
