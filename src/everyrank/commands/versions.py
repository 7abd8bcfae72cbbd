"""`everyrank verify --save`, `--against` and `--between`: compares two versions of a workload."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

from everyrank.commands.arguments import options_of
from everyrank.commands.shared import check_writable, say, source_of
from everyrank.errors import CHECK_FAILED, CannotRunError, EveryrankError, UsageError, printable
from everyrank.launch import stop_before_ranks
from everyrank.options import VerifyOptions
from everyrank.record import write_text

__all__ = ["arguments_in_worktree", "compare_versions", "read_trace"]

_MAX_BYTES = 1 << 30


def compare_versions(args: argparse.Namespace) -> int:
    """Save or compare traces of the workload; exit status 1 if they differ by more than rounding."""
    if args.layout or args.samples or args.reference:
        raise UsageError(
            "--save, --against and --between run one process; leave --layout, --samples and --reference out"
        )
    check_writable(args.save)
    if args.between:
        if args.save or args.against:
            raise UsageError("--between A B: leave --save and --against out")
        before, now = _traces_of_commits(args)
    else:
        before = read_trace(args.against) if args.against is not None else None
        from everyrank import api

        now = api.keep_trace(source_of(args), options=options_of(args, VerifyOptions))
        if args.save is not None:
            write_text(args.save, json.dumps(now) + "\n")
            say(f"wrote {printable(str(args.save))}: {len(now['losses'])} updates of {now['experiment']['workload']}")
        if before is None:
            return 0
    from everyrank.parity.kept import compare_kept

    result = compare_kept(before, now)
    for line in result.lines():
        say(line)
    return 0 if result.status == "equal" else CHECK_FAILED


def read_trace(path: Path, writer: str = "everyrank verify --save") -> dict[str, Any]:
    """Return the trace in a file that --save wrote. Raises `UsageError` for any other file."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError("too large")
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != "everyrank trace 1":
            raise ValueError(f"format {content['format']!r}")
        _check_fields(content)
    except OSError as error:
        raise UsageError(f"--against {path}: {error.strerror}; {writer} writes one") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"--against {path}: it was not written by {writer} ({type(error).__name__}: {error})"
        ) from None
    return content


def _check_fields(content: dict[str, Any]) -> None:
    """Raise `ValueError` or `TypeError` for a field of a wrong type: the file may not be from everyrank."""
    numbers = ("losses", "counts", "loss_tolerances")
    for name in numbers:
        if not all(type(value) in (int, float) for value in content[name]):
            raise ValueError(f"{name} has a value that is not a number")
    if len({len(content[name]) for name in numbers}) != 1:
        raise ValueError("losses, counts and loss_tolerances differ in length")
    for name in ("initial", "gradients", "final"):
        for tensor, values in content[name].items():
            if not isinstance(tensor, str) or not all(type(value) in (int, float) for value in values):
                raise ValueError(f"{name} has a value that is not a number")
    for name in ("experiment", "versions", "final_tolerances", "evaluation"):
        if not isinstance(content[name], dict):
            raise ValueError(f"{name} is not an object")
    for total, count in content["evaluation"].values():
        if type(total) not in (int, float) or type(count) not in (int, float):
            raise ValueError("evaluation has a value that is not a number")


# --- two commits


def _traces_of_commits(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the traces of two commits, each run in a separate worktree."""
    workload_path = Path(args.workload.partition(":")[0])
    if not workload_path.is_file():
        raise UsageError(f"--between: {args.workload} is not a file; give a workload file in a git repository")
    repository = Path(_git(workload_path.absolute().parent, "rev-parse", "--show-toplevel"))
    cwd = Path.cwd().resolve()
    cwd_in_repository = cwd.relative_to(repository) if cwd.is_relative_to(repository) else Path()
    if not workload_path.resolve().is_relative_to(repository):
        raise UsageError(f"--between: {workload_path} is outside the repository {repository}")
    commits = [
        _git(repository, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", commit_name=name)
        for name in args.between
    ]
    stop_before_ranks()
    traces: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="everyrank-versions-") as folder:
        for index, (name, commit) in enumerate(zip(args.between, commits, strict=True)):
            with _worktree(repository, Path(folder) / f"version{index}", commit) as worktree:
                traces.append(
                    _trace_of_commit(
                        args,
                        name,
                        worktree / cwd_in_repository,
                        worktree,
                        repository,
                        workload_path,
                        Path(folder) / f"{index}.json",
                    )
                )
    return traces


def _trace_of_commit(
    args: argparse.Namespace,
    name: str,
    folder: Path,
    worktree: Path,
    repository: Path,
    workload_path: Path,
    output: Path,
) -> dict[str, Any]:
    """Run `everyrank verify --save` in a worktree and return the trace."""
    path_in_worktree = worktree / workload_path.resolve().relative_to(repository)
    if not path_in_worktree.is_file():
        raise UsageError(f"--between {name}: {workload_path} does not exist in that commit")
    cwd_in_worktree = folder if folder.is_dir() else worktree
    arguments = arguments_in_worktree(args, path_in_worktree, cwd_in_worktree)
    paths = [str(Path(entry).resolve()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    paths = [
        entry.replace(str(repository), str(worktree), 1) if Path(entry).is_relative_to(repository) else entry
        for entry in paths
    ]
    command = [sys.executable, "-P", "-m", "everyrank", *arguments, "--fresh", "--save", str(output)]
    completed = subprocess.run(
        command,
        cwd=cwd_in_worktree,
        env={**os.environ, **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if completed.returncode or not output.exists():
        last = completed.stderr.strip().splitlines()[-1:] or ["no message"]
        raise EveryrankError(f"--between {name}: {last[0].removeprefix('everyrank: ')}")
    return read_trace(output)


def arguments_in_worktree(args: argparse.Namespace, workload_file: Path, cwd_in_worktree: Path) -> list[str]:
    """Return the arguments of everyrank without --between, for the workload file of a worktree.

    A relative --data that the commit does not have is the folder of the user, because data are seldom in git.
    """
    arguments = list(args.argv)
    index = arguments.index("--between")
    del arguments[index : index + 3]
    _, colon, name = args.workload.partition(":")
    arguments = [f"{workload_file}{colon}{name}" if each == args.workload else each for each in arguments]
    if args.data is not None and not (cwd_in_worktree / args.data).exists():
        arguments += ["--data", str(args.data.absolute())]  # the last --data counts
    return arguments


@contextlib.contextmanager
def _worktree(repository: Path, folder: Path, commit: str) -> Generator[Path]:
    """Create a worktree of a commit, and remove it at the end."""
    _git(repository, "worktree", "add", "--detach", "--quiet", str(folder), commit)
    try:
        yield folder
    finally:
        subprocess.run(
            ["git", "worktree", "remove", "--force", str(folder)], cwd=repository, capture_output=True, check=False
        )


def _git(folder: Path, *arguments: str, commit_name: str | None = None) -> str:
    """Return the output of git. Raises `CannotRunError` without git, `UsageError` if it fails."""
    try:
        completed = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise CannotRunError("--between: git was not found") from None
    if completed.returncode:
        reason = (
            f"{commit_name}: no such commit in this repository"
            if commit_name
            else (completed.stderr.strip().splitlines() or ["git failed"])[-1]
        )
        raise UsageError(f"--between: {reason}")
    return completed.stdout.strip()
