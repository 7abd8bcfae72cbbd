"""The command line: a parser for the table of commands, errors as one line, the exit status.

Exit status: 0 success; 1 a check failed; 2 the call or the workload is wrong; 3 a requested feature is not available
here; 4 the run failed, or an unexpected error; 130 and 143 for Ctrl-C and SIGTERM. The last line on the screen is the
error message, never a traceback.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import io
import os
import signal
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from everyrank._version import __version__
from everyrank.commands import COMMANDS
from everyrank.commands.launching import dry_run_or_submit, is_reporting_rank
from everyrank.commands.shared import close_output
from everyrank.commands.suggestions import suggest_command, suggest_flag, suggest_order
from everyrank.errors import INTERRUPTED, TERMINATED, EveryrankError, UsageError, describe, printable, shortened
from everyrank.launch import rank_info_from_environment
from everyrank.layout import STRATEGIES
from everyrank.workload import BUILT_IN

__all__ = ["main"]

_WRONG_PATH = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EROFS)
_REPORT_SECONDS = 1.0  # lets the rank that reports an error print first


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    signal.signal(signal.SIGTERM, _terminate)
    _replace_closed()
    parsed = argparse.Namespace()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # print ? for letters that the terminal does not have
    try:
        parsed = _parse(list(sys.argv[1:] if arguments is None else arguments))
        dry_run_status = (
            _dry_run_or_submit(parsed) if hasattr(parsed, "workload") and hasattr(parsed, "launcher") else None
        )
        status = parsed.run(parsed) if dry_run_status is None else dry_run_status
    except EveryrankError as error:
        status = _print_error(str(error), error.log, error.exit_status)
    except KeyboardInterrupt:
        status = _print_end("interrupted", INTERRUPTED, parsed)
    except _TerminatedError:
        status = _print_end("terminated", TERMINATED, parsed)
    except BrokenPipeError:
        close_output()  # `everyrank new ddp_torchrun | head`
        status = 0
    except OSError as error:  # for example a full disk, or a folder that was removed
        # a path that can never be written is an error of the call
        kind = UsageError if error.filename is not None and error.errno in _WRONG_PATH else EveryrankError
        status = _print_error(
            f"{error.filename or 'a file or the output'}: {error.strerror or error}", None, kind.exit_status
        )
    except Exception as error:  # not status 1, which would mean that a check failed
        status = _print_error(describe(error), _write_traceback(error), EveryrankError.exit_status)
    if _is_a_rank():
        # Threads that wait for other ranks must not keep this rank alive, and a gloo thread that frees a tensor while
        # Python shuts down aborts the process.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # a workload may have replaced the streams
                stream.flush()
        if status == 0:
            atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]  (this finalises MPI)
        os._exit(status)
    return status


def _replace_closed() -> None:
    """Open /dev/null for closed standard streams (`>&-`), so that no opened file takes their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # uses the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _print_error(line: str, log: Path | None, status: int) -> int:
    """Print the path of the traceback and the error message as the last line; return the status."""
    with contextlib.suppress(OSError):  # `2>&1 | head`: the status still counts
        if log is not None:
            print(f"full traceback: {printable(str(log))}", file=sys.stderr)
        print(f"everyrank: {printable(shortened(line))}", file=sys.stderr)
    return status


def _print_end(word: str, status: int, parsed: argparse.Namespace) -> int:
    """Print that a signal ended the command. Under an external launcher only one rank prints it."""
    ranks = "; all ranks are ended" if getattr(parsed, "starts_ranks", False) else ""
    return _print_error(f"{word}{ranks}", None, status) if is_reporting_rank() else status


def _write_traceback(error: BaseException) -> Path | None:
    """Write the traceback of an unexpected error to a file; return its path, None if it cannot be written."""
    with contextlib.suppress(OSError):
        log = Path(tempfile.mkdtemp(prefix="everyrank-logs-")) / "error.log"
        log.write_text("".join(traceback.format_exception(error)), encoding="utf-8", errors="replace")
        return log
    return None


def _dry_run_or_submit(parsed: argparse.Namespace) -> int | None:
    try:
        return dry_run_or_submit(parsed, parsed.run)
    except UsageError as error:
        if is_reporting_rank():
            raise
        signal.signal(
            signal.SIGTERM, signal.SIG_DFL
        )  # the launcher sends it to all ranks when one has ended; end without a message
        time.sleep(_REPORT_SECONDS)
        return error.exit_status


def _is_a_rank() -> bool:
    """Whether an external launcher started this process as a rank."""
    try:
        return rank_info_from_environment(os.environ) is not None
    except (UsageError, OSError):
        return False


class _TerminatedError(BaseException):
    """SIGTERM arrived."""


def _terminate(*_: object) -> NoReturn:
    raise _TerminatedError


def _path(text: str) -> Path:
    """Parse a path. Refuses "", which comes from an unset shell variable and would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError('"" is not a path; give one, or leave the option out')
    return Path(text)


_IN_SHORT_HELP = ("launcher", "device", "backend", "nodes", "timeout", "dry_run")  # launching options that --help shows


class _Parser(argparse.ArgumentParser):
    """argparse with errors in one line, no abbreviated flags, and few launching options in --help."""

    shows_all = False

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.register("type", Path, _path)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse as argparse does, but the value of an ARGS option may begin with a dash: --resume-with "--resume"."""
        return super().parse_known_args(None if args is None else self._with_dashes(list(args)), namespace)

    def _with_dashes(self, argv: list[str]) -> list[str]:
        """Write each ARGS option as --option=value, up to the first positional argument."""
        known = self._option_string_actions
        joined: list[str] = []
        index = 0
        while index < len(argv) and argv[index].startswith("-"):
            word, following = argv[index], argv[index + 1 : index + 2]
            action = known.get(word)
            takes_value = action is not None and action.nargs is None
            is_of_arguments = action is not None and action.metavar == "ARGS"
            if is_of_arguments and following and following[0] not in known:
                joined.append(f"{word}={following[0]}")
            else:
                joined += [word, *(following if takes_value else [])]
            index += 1 + takes_value
        return [*joined, *argv[index:]]

    def format_help(self) -> str:
        """Return the help text, with rarely used launching options only for --help-all."""
        hidden = [] if self.shows_all else [action for action in self._launching() if action.dest not in _IN_SHORT_HELP]
        texts = [action.help for action in hidden]
        for action in hidden:
            action.help = argparse.SUPPRESS
        try:
            return super().format_help()
        finally:
            for action, text in zip(hidden, texts, strict=True):
                action.help = text

    def _launching(self) -> list[argparse.Action]:
        groups = [group for group in self._action_groups if group.title == "launching"]
        return [action for group in groups for action in group._group_actions]  # pyright: ignore[reportPrivateUsage]

    def make_readable(self, sentence: str, examples: Sequence[str]) -> None:
        """Set the description, a usage line that names only the required arguments, and the examples."""
        positionals = [a for a in self._actions if not a.option_strings and a.help != argparse.SUPPRESS]
        names = [str(a.metavar or a.dest) for a in positionals if not isinstance(a.metavar, tuple)]
        self.description = f"{sentence[0].upper()}{sentence[1:]}."
        takes_all = any(a.nargs == argparse.REMAINDER for a in positionals)  # options after it belong to the script
        self.usage = " ".join([self.prog, "[options]", *names] if takes_all else [self.prog, *names, "[options]"])
        lines = [f"  {example}" for example in examples]
        if self._launching():
            self.add_argument("--help-all", action=_HelpAll, help="show all launching options, too")
        self.epilog = "\n".join(["examples:", *lines])


class _HelpAll(argparse.Action):
    """--help-all: the help with every launching option."""

    def __init__(self, **options: Any) -> None:
        super().__init__(nargs=0, default=argparse.SUPPRESS, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, _Parser)
        parser.shows_all = True
        parser.print_help()
        parser.exit()


def _parse(argv: list[str]) -> argparse.Namespace:
    """Parse the arguments; keep them as `argv`, too. Raises `UsageError`; exits after printing help."""
    if not argv or argv == ["help"]:
        args = ["--help"]
    elif argv[0] == "help":
        args = [argv[1], "--help"]
    else:
        args = ["--version"] if argv == ["version"] else argv
    if not args[0].startswith("-") and args[0] not in COMMANDS:
        raise UsageError(suggest_command(args[0], COMMANDS))
    parsed, unknown = _parser().parse_known_args(args)
    if unknown:
        raise UsageError(suggest_flag(unknown, parsed.parser))
    note = suggest_order(argv, getattr(parsed, "script", None) or [], parsed.parser)
    if note is not None and is_reporting_rank():
        print(printable(note), file=sys.stderr)
    parsed.argv = argv
    return parsed


def _wrapped(title: str, names: Sequence[str]) -> str:
    """Return a title, and the names below it in lines that fit a terminal."""
    return textwrap.fill(", ".join(names), 78, initial_indent=f"{title}\n  ", subsequent_indent="  ")


def _parser() -> argparse.ArgumentParser:
    top = _Parser(
        prog="everyrank",
        description="PyTorch distributed training that checks its own numbers.",
        usage="everyrank COMMAND ...",
        epilog="\n".join(
            [
                _wrapped("workloads", [*BUILT_IN, "or a file: my_workload.py"]),
                _wrapped("layouts", [*STRATEGIES, "with options: fsdp:precision=bf16"]),
                "start with",
                "  everyrank audit your_script.py",
                "  everyrank train digits --layout ddp --processes 2",
            ]
        ),
    )
    top.add_argument("--version", action="version", version=f"everyrank {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND", prog="everyrank", parser_class=_Parser)
    for name, command in COMMANDS.items():
        parser = commands.add_parser(name, help=command.HELP)
        command.add_arguments(parser)
        parser.make_readable(command.HELP, command.EXAMPLES)
        parser.set_defaults(run=command.run, parser=parser)
    return top


if __name__ == "__main__":
    sys.exit(main())
