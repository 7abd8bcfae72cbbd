"""The command line. What each command does is in `commands/`.

Exit status: 0 all held; 1 a check failed; 2 the call or the workload is wrong; 3 what was asked for by name cannot run
here; 4 the run failed; 130 and 143 for Ctrl-C and SIGTERM. The last line on the screen is the one to read.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from everyrank import __version__
from everyrank.commands import COMMANDS
from everyrank.commands.launching import instead, speaks
from everyrank.commands.shared import close_output
from everyrank.errors import INTERRUPTED, TERMINATED, EveryrankError, UsageError
from everyrank.launch import facts_from_environment
from everyrank.layout import STRATEGIES
from everyrank.workload import BUILT_IN

__all__ = ["main"]

_SPEAK_SECONDS = 1.0  # for the rank that says what is wrong for all


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    signal.signal(signal.SIGTERM, _terminate)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without a letter shows ? rather than a traceback
    try:
        parsed = _parser().parse_args(arguments)
        parsed.words = list(sys.argv[1:] if arguments is None else arguments)
        done = _instead(parsed) if hasattr(parsed, "workload") and hasattr(parsed, "launcher") else None
        status = parsed.run(parsed) if done is None else done
    except EveryrankError as error:
        if error.log is not None:
            print(f"full traceback: {error.log}", file=sys.stderr)
        print(f"everyrank: {error}", file=sys.stderr)
        status = error.exit_status
    except KeyboardInterrupt:
        print("everyrank: interrupted; all ranks are ended", file=sys.stderr)
        status = INTERRUPTED
    except _TerminatedError:
        print("everyrank: terminated; all ranks are ended", file=sys.stderr)
        status = TERMINATED
    except BrokenPipeError:
        close_output()  # `everyrank new ddp_torchrun | head`
        status = 0
    except OSError as error:  # a disk that is full, a folder that was taken away
        print(f"everyrank: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        status = EveryrankError.exit_status
    if _is_a_rank():
        # Threads that wait for other ranks must not keep this one alive, and one of gloo's that lets go of a tensor
        # while Python says goodbye aborts the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _instead(parsed: argparse.Namespace) -> int | None:
    try:
        return instead(parsed)
    except UsageError as error:
        if speaks():
            raise
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # with which a launcher ends all when one has ended: no word more
        time.sleep(_SPEAK_SECONDS)
        return error.exit_status


def _is_a_rank() -> bool:
    """Whether somebody else's launcher started this process as a rank."""
    try:
        return facts_from_environment(os.environ) is not None
    except UsageError:
        return False


class _TerminatedError(BaseException):
    """SIGTERM arrived."""


def _terminate(*_: object) -> NoReturn:
    raise _TerminatedError


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are one line, like all others."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    top = _Parser(
        prog="everyrank",
        description="PyTorch distributed training that checks its own numbers.",
        epilog=f"Workloads: {', '.join(BUILT_IN)}, or a file. Layouts: {', '.join(STRATEGIES)}, with [:key=value,...].",
    )
    top.add_argument("--version", action="version", version=f"everyrank {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    for name, command in COMMANDS.items():
        parser = commands.add_parser(name, help=command.HELP)
        command.add(parser)
        parser.set_defaults(run=command.run)
    return top


if __name__ == "__main__":
    sys.exit(main())
