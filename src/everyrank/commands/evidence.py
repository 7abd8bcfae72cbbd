"""`everyrank audit --save` and `--against`: one script at two times."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from everyrank.commands.shared import check_writable, say
from everyrank.commands.versions import read_trace
from everyrank.errors import CHECK_FAILED, UsageError, printable
from everyrank.record import write_text

if TYPE_CHECKING:
    from everyrank.audit import AuditOptions

__all__ = ["compare_script_versions"]


def compare_script_versions(args: argparse.Namespace, words: Sequence[str], options: AuditOptions) -> int:
    """Keep what the script computes, and compare it; exit status 1 if it differs by more than rounding."""
    for flag in ("watch", "replay", "compare", "html", "sarif", "json"):
        if getattr(args, flag):
            raise UsageError(f"--{flag}: not with --save or --against, which only compare two versions of the script")
    check_writable(args.save)
    before = read_trace(args.against, "everyrank audit --save") if args.against is not None else None
    from everyrank.audit.outside import rank_from_outside
    from everyrank.audit.script import find_script, own_text, starts_ranks_itself
    from everyrank.parity.kept import compare_kept
    from everyrank.relations.kept_script import script_trace

    script = find_script(words)
    if script is None:
        raise UsageError(f"{' '.join(words)}: there is no such module; give the path of a script")
    if rank_from_outside(os.environ) is not None:
        raise UsageError(
            "--save and --against start the ranks themselves; leave the launcher out and add --processes N"
        )
    if options.processes is None and starts_ranks_itself(own_text(script)):
        raise UsageError(
            f"{script}: the script starts its ranks itself; --save and --against need one that a launcher starts"
        )
    processes = before["experiment"].get("ranks") if before is not None and options.processes is None else None
    processes = options.processes or (processes if isinstance(processes, int) and 0 < processes <= 64 else 2)
    now = script_trace(words, processes, options.updates, options.limit_seconds, options.pretend_cuda)
    if args.save is not None:
        write_text(args.save, json.dumps(now) + "\n")
        say(f"wrote {printable(str(args.save))}: {len(now['losses'])} updates of {now['experiment']['script']}")
    if before is None:
        return 0
    result = compare_kept(before, now)
    for line in result.lines():
        say(printable(line))
    return 0 if result.status == "equal" else CHECK_FAILED
