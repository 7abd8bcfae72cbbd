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
    from everyrank.audit.script import find_script
    from everyrank.parity.kept import compare_kept
    from everyrank.relations import why_not_compared
    from everyrank.relations.kept_script import script_trace

    if find_script(words) is None:
        raise UsageError(f"{' '.join(words)}: there is no such module; give the path of a script")
    why_not = why_not_compared(words, options, os.environ)
    if why_not:
        raise UsageError(f"--save and --against: {why_not}")
    kept = before["experiment"].get("ranks") if before is not None else None
    processes = options.processes or (kept if isinstance(kept, int) and 0 < kept <= 64 else 2)
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
