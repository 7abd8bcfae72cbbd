"""`everyrank audit --save` and `--against`: compares two versions of a script."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from everyrank.commands.shared import check_not_script, check_writable, say
from everyrank.commands.versions import read_trace
from everyrank.errors import CHECK_FAILED, UsageError, printable
from everyrank.record import write_text

if TYPE_CHECKING:
    from everyrank.audit import AuditOptions

__all__ = ["compare_script_versions"]

_UNSUPPORTED = (
    *("watch", "replay", "compare", "only_compare", "resume_with", "stop_with", "same", "fix", "patch"),
    *("shim", "html", "sarif", "json"),
)
"""Options of `everyrank audit`, which trains the script several times and judges it by rules."""


def compare_script_versions(args: argparse.Namespace, command: Sequence[str], options: AuditOptions) -> int:
    """Save or compare traces of a script; exit status 1 if they differ by more than rounding."""
    for name in _UNSUPPORTED:
        if getattr(args, name):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag}: not supported with --save or --against; leave {flag} out")
    check_writable(args.save)
    check_not_script(command[0] if command else "", [args.save])
    saved_trace = read_trace(args.against, "everyrank audit --save") if args.against is not None else None
    from everyrank.audit.script import find_script
    from everyrank.parity.kept import compare_kept
    from everyrank.relations import why_not_compared
    from everyrank.relations.kept_script import script_trace

    if find_script(command) is None:
        raise UsageError(f"{' '.join(command)}: no such module; give the path of a script")
    reason = why_not_compared(command, options, os.environ)
    if reason:
        raise UsageError(f"--save and --against: {reason}")
    saved_ranks = saved_trace["experiment"].get("ranks") if saved_trace is not None else None
    processes = options.processes or (saved_ranks if isinstance(saved_ranks, int) and 0 < saved_ranks <= 64 else 2)
    trace = script_trace(command, processes, options.updates, options.limit_seconds, options.pretend_cuda)
    if args.save is not None:
        write_text(args.save, json.dumps(trace) + "\n")
        say(f"wrote {printable(str(args.save))}: {len(trace['losses'])} updates of {trace['experiment']['script']}")
    if saved_trace is None:
        return 0
    result = compare_kept(saved_trace, trace)
    for line in result.lines():
        say(printable(line))
    return 0 if result.status == "equal" else CHECK_FAILED
