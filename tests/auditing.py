"""Audits whose processes are forked: hooks, records and rules are the real ones, the start of Python is not."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from everyrank.audit.examine import Audit, AuditOptions, judge_run
from everyrank.audit.start import ScriptRun, rank_environments
from everyrank.audit.watch.recorder import ENVIRONMENT, Settings
from forkserver import ForkServer, run_python

SCRIPTS = Path(__file__).parent / "audit" / "scripts"


def run_watched(words: list[str]) -> None:
    """In a forked process: what inject/sitecustomize.py does at the import of torch, then the script."""
    from everyrank.audit.watch.install import install

    install()
    run_python(words)


def audit_forked(
    server: ForkServer, folder: Path, script: Path, *words: str, processes: int = 2, **settings: Any
) -> Audit:
    """As `audit_script`, on a script that ends by itself."""
    records = folder / "records"
    records.mkdir()
    chosen = dataclasses.replace(Settings(str(records), main=str(script)), **settings)
    outputs = [folder / f"rank{rank}.txt" for rank in range(processes)]
    ranks = []
    for output, variables in zip(outputs, rank_environments(processes), strict=True):
        environment = {**os.environ, **variables, ENVIRONMENT: chosen.written(), "GLOO_SOCKET_IFNAME": "lo"}
        with output.open("wb") as stream:
            streams = (None, stream, stream)
            ranks.append(
                server.start(
                    run_watched, [str(script), *words], folder=folder, environment=environment, streams=streams
                )
            )
    begin = time.monotonic()
    try:
        codes = tuple(rank.wait(120) for rank in ranks)
    finally:
        for rank in ranks:
            rank.close()
    texts = tuple(output.read_text() for output in outputs)
    status = "failed" if any(codes) else "finished"
    run = ScriptRun(records, processes, status, codes, texts, time.monotonic() - begin)
    return judge_run([str(script)], run, AuditOptions(processes), chosen)


def lines_with(text: str, part: str) -> Iterator[int]:
    """The numbers of the lines that contain it."""
    return (number for number, line in enumerate(text.splitlines(), 1) if part in line)
