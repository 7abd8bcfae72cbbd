"""Audits whose processes are forked. Hooks, records and rules are the real ones, but Python is not started again."""

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


def run_with_hooks(args: list[str]) -> None:
    """Install the hooks as inject/sitecustomize.py does, then run the script. This runs in a forked process."""
    from everyrank.audit.watch.install import install

    install()
    run_python(args)


@dataclasses.dataclass(frozen=True)
class RecordedScript:
    """The event files of a script that has run with hooks. `judge` can be called several times.

    args           the script, as it is passed to Python
    run            how its processes ended
    hook_settings  the settings of the hooks
    """

    args: list[str]
    run: ScriptRun
    hook_settings: Settings

    def judge(self) -> Audit:
        """Return the audit of the recorded events."""
        return judge_run(self.args, self.run, AuditOptions(self.run.world_size), self.hook_settings)

    def write_times(self, step_seconds: float, wait_seconds: float) -> None:
        """Replace the measured times of the events: the time of each step, and of each wait for a batch."""
        for path in self.run.folder.glob("pid*.jsonl"):
            events = [json.loads(line) for line in path.read_text().splitlines()]
            for index, event in enumerate(events):
                event["time"] = event["update"] * step_seconds + index * 1e-7
                if event["kind"] == "LoaderBatch":
                    event["seconds"] = wait_seconds
            path.write_text("".join(json.dumps(event) + "\n" for event in events))


def record_forked_script(
    server: ForkServer, folder: Path, script: Path, *args: str, processes: int = 2, **settings: Any
) -> RecordedScript:
    """Run a script with hooks in forked processes, and return its records. The script must end by itself or hang."""
    records = folder / "records"
    records.mkdir()
    hook_settings = dataclasses.replace(Settings(str(records), main=str(script)), **settings)
    output_paths = [folder / f"rank{rank}.txt" for rank in range(processes)]
    ranks = []
    for output_path, variables in zip(output_paths, rank_environments(processes), strict=True):
        environment = {**os.environ, **variables, ENVIRONMENT: hook_settings.to_json(), "GLOO_SOCKET_IFNAME": "lo"}
        with output_path.open("wb") as stream:
            streams = (None, stream, stream)
            ranks.append(
                server.fork(
                    run_with_hooks, [str(script), *args], folder=folder, environment=environment, streams=streams
                )
            )
    start_time = time.monotonic()
    try:
        hangs = _wait_until_ended_or_hanging(ranks, records)
        codes = tuple(rank.poll() for rank in ranks)
    finally:
        for rank in ranks:
            rank.close()
    outputs = tuple(path.read_text() for path in output_paths)
    status = "hangs" if hangs else "failed" if any(codes) else "finished"
    return RecordedScript(
        [str(script)],
        ScriptRun(records, processes, status, codes, outputs, time.monotonic() - start_time),
        hook_settings,
    )


def _wait_until_ended_or_hanging(ranks: list[Forked], records: Path) -> bool:
    """Wait until all ranks have ended or the script hangs. Return whether it hangs.

    It hangs if each rank has written a file `hangs0`, `hangs1`, ... It also hangs if one rank has written `hangs`
    and the ranks have called different numbers of collectives.
    """
    deadline = time.monotonic() + 120
    while any(rank.poll() is None for rank in ranks):
        assert time.monotonic() < deadline
        hang_files = [path.name for path in (records / "files").rglob("hangs*")]
        collective_counts = {path.read_text().count('"kind": "CollectiveCall"') for path in records.glob("pid*.jsonl")}
        if len(hang_files) == len(ranks) or ("hangs" in hang_files and len(collective_counts) > 1):
            _request_stacks(records)
            return True
        time.sleep(0.05)
    return False


def audit_forked_script(server: ForkServer, folder: Path, script: Path, *args: str, **settings: Any) -> Audit:
    """Return the audit of a script in forked processes, as `audit_script` does. The script must end by itself."""
    return record_forked_script(server, folder, script, *args, **settings).judge()


def line_numbers_with(text: str, searched: str) -> Iterator[int]:
    """Yield the numbers of the lines that contain the searched text."""
    return (number for number, line in enumerate(text.splitlines(), 1) if searched in line)
