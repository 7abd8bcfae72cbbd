"""Runs a training as `everyrank train` does, in a separate process that can be killed.

    python -m everyrank.chaos.trainer_process CALL.json [NODE]

It writes its exit status and message to ended.json next to CALL.json, unless it is killed or has an unexpected error.
NODE is the number of this host, if there are several. Only host 0 writes ended.json and record.json.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from everyrank import api
from everyrank.chaos.inject import Injection, Injections
from everyrank.chaos.trainer_run import TrainCall
from everyrank.errors import EveryrankError
from everyrank.launch import Launch
from everyrank.launch.launcher import launcher_named
from everyrank.layout import parse_layout
from everyrank.options import TrainOptions
from everyrank.record import write_records
from everyrank.workload import Source

__all__: list[str] = []


def train(call: TrainCall, node: int | None) -> int:
    """Run the training of `call`; return the exit status."""
    injections = tuple(dataclasses.replace(Injection(**fields), launcher=os.getpid()) for fields in call.injections)
    out = Path(call.run)
    options = TrainOptions(
        out=out,
        steps=call.steps,
        save_every=call.save_every,
        keep=9,
        guard="stop",
        guard_every=call.guard_every,
        resume=Path(call.resume) if call.resume else None,
        before_update=Injections(injections) if injections else None,
    )
    launch = _launch(call.launch | {"node_rank": node, "logs": out / "ranks"})
    records = api.run(Source(**call.source), parse_layout(call.layout), launch, options=options)
    if not node:
        (out / "record.json").unlink(missing_ok=True)
        write_records(records, out / "record.json")
    return 0


def _launch(fields: dict[str, Any]) -> Launch:
    """Return the Launch from its JSON fields."""
    options = launcher_named(fields["launcher"]).options(**fields["options"])
    launch_fields: dict[str, Any] = {**fields, "arguments": tuple(fields["arguments"]), "options": options}
    return Launch(**launch_fields)


def main() -> None:
    """Train, and write ended.json."""
    call_path, node = Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else None
    call = TrainCall(**json.loads(call_path.read_text(encoding="utf-8")))
    try:
        message, status = "", train(call, node)
    except EveryrankError as error:
        message, status = str(error), error.exit_status
    finally:
        if call.kept and Path(call.run).exists():  # it may have failed before it made the folder
            shutil.copytree(call.run, call.kept, symlinks=True)
    if not node:
        call_path.with_name("ended.json").write_text(
            json.dumps({"message": message, "status": status}), encoding="utf-8"
        )
    sys.exit(status)


if __name__ == "__main__":
    main()
