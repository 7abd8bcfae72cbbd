"""`everyrank verify --save`, `--against` and `--between`: one workload at two times."""

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
from everyrank.options import VerifyOptions
from everyrank.record import write_text

__all__ = ["compare_versions", "read_trace"]

_MAX_BYTES = 1 << 30


def compare_versions(args: argparse.Namespace) -> int:
    """Keep the trace of the workload, and compare it; exit status 1 if it differs by more than rounding."""
    if args.layout or args.samples or args.reference:
        raise UsageError(
            "--save, --against and --between run one process; leave --layout, --samples and --reference out"
        )
    check_writable(args.save)
    if args.between:
        if args.save or args.against:
            raise UsageError("--between A B: leave --save and --against out")
        before, now = _of_commits(args)
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
    """A file that --save has written. Raises `UsageError` for any other."""
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
    """Raises `ValueError` or `TypeError` for a field of a wrong type: the file may come from elsewhere."""
    numbers = ("losses", "counts", "loss_tolerances")
    for name in numbers:
        if not all(type(value) in (int, float) for value in content[name]):
            raise ValueError(f"{name} has a value that is no number")
    if len({len(content[name]) for name in numbers}) != 1:
        raise ValueError("losses, counts and tolerances are not as many")
    for name in ("initial", "gradients", "final"):
        for tensor, values in content[name].items():
            if not isinstance(tensor, str) or not all(type(value) in (int, float) for value in values):
                raise ValueError(f"{name} has a value that is no number")
    for name in ("experiment", "versions", "final_tolerances", "evaluation"):
        if not isinstance(content[name], dict):
            raise ValueError(f"{name} is no table")
    for total, count in content["evaluation"].values():
        if type(total) not in (int, float) or type(count) not in (int, float):
            raise ValueError("evaluation has a value that is no number")


# --- two commits


def _of_commits(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The traces of two commits, each run in a worktree of its own."""
    path = Path(args.workload.partition(":")[0])
    if not path.is_file():
        raise UsageError(f"--between: {args.workload} is no file; a built-in workload is part of everyrank, not of git")
    top = Path(_git(path.absolute().parent, "rev-parse", "--show-toplevel"))
    relative = Path.cwd().resolve()
    inside = relative.relative_to(top) if relative.is_relative_to(top) else Path()
    if not path.resolve().is_relative_to(top):
        raise UsageError(f"--between: {path} is outside of the repository {top}")
    commits = [_git(top, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", asked=name) for name in args.between]
    traces: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="everyrank-versions-") as folder:
        for index, (name, commit) in enumerate(zip(args.between, commits, strict=True)):
            with _worktree(top, Path(folder) / f"version{index}", commit) as worktree:
                traces.append(_run(args, name, worktree / inside, worktree, top, path, Path(folder) / f"{index}.json"))
    return traces


def _run(
    args: argparse.Namespace, name: str, folder: Path, worktree: Path, top: Path, path: Path, output: Path
) -> dict[str, Any]:
    """Run `everyrank verify --save` in a worktree."""
    file = worktree / path.resolve().relative_to(top)
    if not file.is_file():
        raise UsageError(f"--between {name}: {path} does not exist in that commit")
    arguments = list(args.words)
    at = arguments.index("--between")
    del arguments[at : at + 3]
    moved = args.workload.replace(str(path), str(file), 1)
    arguments = [moved if argument == args.workload else argument for argument in arguments]
    paths = [str(Path(entry).resolve()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    paths = [entry.replace(str(top), str(worktree), 1) if Path(entry).is_relative_to(top) else entry for entry in paths]
    command = [sys.executable, "-P", "-m", "everyrank", *arguments, "--fresh", "--save", str(output)]
    done = subprocess.run(
        command,
        cwd=folder if folder.is_dir() else worktree,
        env={**os.environ, **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or not output.exists():
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise EveryrankError(f"--between {name}: {last[0].removeprefix('everyrank: ')}")
    return read_trace(output)


@contextlib.contextmanager
def _worktree(top: Path, folder: Path, commit: str) -> Generator[Path]:
    """A worktree of this commit, removed at the end."""
    _git(top, "worktree", "add", "--detach", "--quiet", str(folder), commit)
    try:
        yield folder
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(folder)], cwd=top, capture_output=True, check=False)


def _git(folder: Path, *words: str, asked: str | None = None) -> str:
    """The output of git. Raises `CannotRunError` without git, `UsageError` if it fails."""
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise CannotRunError("--between: git was not found") from None
    if done.returncode:
        why = (
            f"{asked}: git knows no such commit" if asked else (done.stderr.strip().splitlines() or ["git failed"])[-1]
        )
        raise UsageError(f"--between: {why}")
    return done.stdout.strip()
