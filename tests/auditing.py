"""Audits whose processes are forked: hooks, records and rules are the real ones, the start of Python is not."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from everyrank.audit.examine import Audit, AuditOptions, judge_run
from everyrank.audit.start import ScriptRun, _request_stacks, rank_environments
from everyrank.audit.watch.recorder import ENVIRONMENT, Settings
from forkserver import Forked, ForkServer, run_python

SCRIPTS = Path(__file__).parent / "audit" / "scripts"


def run_watched(words: list[str]) -> None:
    """In a forked process: what inject/sitecustomize.py does at the import of torch, then the script."""
    from everyrank.audit.watch.install import install

    install()
    run_python(words)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What the watched processes of a script have written down; judged without them, as often as wanted."""

    words: list[str]
    run: ScriptRun
    settings: Settings

    def judge(self) -> Audit:
        return judge_run(self.words, self.run, AuditOptions(self.run.world_size), self.settings)

    def write_times(self, step_seconds: float, wait_seconds: float) -> None:
        """Write times into the events in place of those of this machine: of each step, and of each wait for a batch."""
        for path in self.run.folder.glob("pid*.jsonl"):
            events = [json.loads(line) for line in path.read_text().splitlines()]
            for number, event in enumerate(events):
                event["time"] = event["update"] * step_seconds + number * 1e-7
                if event["kind"] == "LoaderBatch":
                    event["seconds"] = wait_seconds
            path.write_text("".join(json.dumps(event) + "\n" for event in events))


def record_forked(
    server: ForkServer, folder: Path, script: Path, *words: str, processes: int = 2, **settings: Any
) -> Recorded:
    """Run a script that ends by itself, watched."""
    records = folder / "records"
    records.mkdir()
    chosen = dataclasses.replace(Settings(str(records), main=str(script)), **settings)
    outputs = [folder / f"rank{rank}.txt" for rank in range(processes)]
    ranks = []
    for output, variables in zip(outputs, rank_environments(processes), strict=True):
        environment = {**os.environ, **variables, ENVIRONMENT: chosen.to_json(), "GLOO_SOCKET_IFNAME": "lo"}
        with output.open("wb") as stream:
            streams = (None, stream, stream)
            ranks.append(
                server.fork(run_watched, [str(script), *words], folder=folder, environment=environment, streams=streams)
            )
    begin = time.monotonic()
    try:
        hangs = _wait(ranks, records)
        codes = tuple(rank.poll() for rank in ranks)
    finally:
        for rank in ranks:
            rank.close()
    texts = tuple(output.read_text() for output in outputs)
    status = "hangs" if hangs else "failed" if any(codes) else "finished"
    return Recorded(
        [str(script)], ScriptRun(records, processes, status, codes, texts, time.monotonic() - begin), chosen
    )


def _wait(ranks: list[Forked], records: Path) -> bool:
    """Until all have ended, or all have written a file `hangs0`, `hangs1`, ..., or wait for the one with `hangs`."""
    deadline = time.monotonic() + 120
    while any(rank.poll() is None for rank in ranks):
        assert time.monotonic() < deadline
        hanging = [path.name for path in (records / "files").rglob("hangs*")]
        sent = {path.read_text().count('"kind": "CollectiveCall"') for path in records.glob("pid*.jsonl")}
        if len(hanging) == len(ranks) or ("hangs" in hanging and len(sent) > 1):
            _request_stacks(records)
            return True
        time.sleep(0.05)
    return False


def audit_forked(server: ForkServer, folder: Path, script: Path, *words: str, **how: Any) -> Audit:
    """As `audit_script`, on a script that ends by itself."""
    return record_forked(server, folder, script, *words, **how).judge()


def lines_with(text: str, part: str) -> Iterator[int]:
    """The numbers of the lines that contain it."""
    return (number for number, line in enumerate(text.splitlines(), 1) if part in line)
