"""Commands in README and docs: `everyrank` lines are parsed, and those that start ranks are run with --dry-run.

If a flag, layout, recipe or workload is renamed, a test here fails and names the page and the line. Other programs are
listed in NEEDS and are not run here, but by targets of `make`, by integration tests or by hand.
"""

from __future__ import annotations

import argparse
import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from everyrank import parse_layout
from everyrank.cli import _parser
from everyrank.commands import COMMANDS
from everyrank.commands.launching import dry_run_or_submit
from everyrank.errors import CannotRunError, EveryrankError, UsageError
from everyrank.recipes import __file__ as recipes
from everyrank.workload import BUILT_IN

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:CUDA_VISIBLE_DEVICES=\S+ )?everyrank \w+ [^`]+)`")
NEEDS = {
    "git": "a clone, or a checkout to compare with",
    "make": "a target of the Makefile",
    "python": "a file of the repository, or one that the block has written",
    "python3": "a Python to make a virtual environment with",
    "pip": "a package index",
    "torchrun": "torch's launcher; the everyrank command after it is parsed",
    "srun": "an allocation of Slurm; the everyrank command after it is parsed",
    "mpirun": "an MPI; the everyrank command after it is parsed",
    "horovodrun": "Horovod; the everyrank command after it is parsed",
    "tar": "an archive that pip has downloaded",
    ".": "the virtual environment of the line before",
    "cd": "the folder of the line before",
    "sed": "the file of the block before",
    "HOROVOD_WITH_PYTORCH=1": "a compiler and a build of some minutes, as in tests/integration/install_horovod",
    "RANK=0": "other ranks, started by hand",
    "kill": "the process of a run that hangs",
    "patch": "the file that the line before has written",
}
PLACEHOLDERS = {
    "W",
    "WORKLOAD",
    "my_workload.py",
    "my_model.py",
    "before.json",
    "wrong.py",
    "model.py",
    "train.py",
    "main_workload.py",
}


@pytest.fixture
def root(repository: Path) -> Path:
    if not (repository / "CONTRIBUTING.md").exists():
        pytest.skip("needs a checkout: a source distribution has no README.zh.md and no CONTRIBUTING.md")
    return repository


def command_lines(text: str) -> Iterator[str]:
    """Yield the command lines of code blocks, with continuations joined and comments removed."""
    for language, block in FENCE.findall(text):
        lines = block.replace("\\\n", " ").splitlines()
        first = lines[0].split() if lines else []
        if language not in ("", "bash", "sh") or not first or first[0] not in {"$", "everyrank", *NEEDS}:
            continue
        for line in lines:
            if not line.strip() or line.startswith("#") or (first[0] == "$" and not line.startswith("$ ")):
                continue  # in a block that begins with $, other lines are output
            command = re.split(r"\s+# | {4,}| {2,}(?=[^\x00-\x7f])", line.removeprefix("$ ").strip())[0]
            yield from (part.strip() for part in command.split(" && "))


def everyrank_args(line: str) -> list[str]:
    """Return the arguments after `everyrank` in a line, under any launcher, or [] if the line does not call it."""
    # a layout is parsed only if its file exists, so a file that exists replaces that of the user
    tokens = shlex.split(line.replace("my_parallel.py", "docs/examples/tied_weights.py"))
    for index, token in enumerate(tokens):
        if token == "everyrank":
            return tokens[index + 1 :]
    return []


def pages(root: Path) -> Iterator[Path]:
    """Yield the README files and all pages below docs, except decisions."""
    yield from (root / "README.md", root / "README.zh.md")
    yield from (page for page in sorted((root / "docs").rglob("*.md")) if "decisions" not in page.parts)


@functools.cache
def parser() -> argparse.ArgumentParser:
    """Return everyrank's parser. It is cached, because building it is slow."""
    return _parser()


def read(args: list[str]) -> argparse.Namespace:
    """Parse the arguments, check layouts and recipe, and replace the user's workload by "digits". Raises UsageError."""
    parsed = parser().parse_args(args)
    layouts = getattr(parsed, "layout", None) or []
    for layout in [layouts] if isinstance(layouts, str) else layouts:
        parse_layout(str(layout))
    recipe = getattr(parsed, "recipe", None)
    if recipe not in (None, "workload") and not Path(recipes).with_name(f"{recipe}.py").exists():
        raise UsageError(f"no recipe {parsed.recipe}")
    # comm has no workload: its parser sets workload="comm", the name of a batch job
    if hasattr(parsed, "workload") and parsed.workload not in (*BUILT_IN, args[0]):
        if parsed.workload not in PLACEHOLDERS and not Path(parsed.workload.partition(":")[0]).exists():
            raise UsageError(f"no workload {parsed.workload}")
        parsed.workload = "digits"
    return parsed


@functools.cache  # the pages of both languages have the same commands
def command_error(line: str, runs_locally: bool) -> str:
    """Return the error of a line that calls everyrank, or "" if it is correct."""
    try:
        parsed = read(everyrank_args(line))
        if runs_locally and hasattr(parsed, "workload") and hasattr(parsed, "launcher"):
            parsed.dry_run, parsed.argv, parsed.data, parsed.download = True, ["--dry-run"], None, False
            dry_run_or_submit(parsed)
    except CannotRunError:
        return ""  # this machine lacks something
    except EveryrankError as error:
        return str(error)
    return ""


def test_commands_of_the_pages(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(root)
    wrong: list[str] = []
    num_commands = 0
    for page in pages(root):
        for line in command_lines(page.read_text(encoding="utf-8")):
            first = line.split()[0]
            if everyrank_args(line):
                problem = command_error(line, runs_locally=first == "everyrank")
                num_commands += 1
            elif first == "make":
                problem = (
                    ""
                    if re.search(rf"^{line.split()[1]}:", (root / "Makefile").read_text(), re.MULTILINE)
                    else "no such target"
                )
            elif first == "python" and line.split()[1].endswith(".py"):
                problem = (
                    "" if (root / line.split()[1]).exists() or "rank" in line or "train" in line else "no such file"
                )
            else:
                problem = "" if first in NEEDS else "say in NEEDS what this needs"
            if problem:
                wrong.append(f"{page.relative_to(root)}: {line}: {problem}")
    assert not wrong, "\n".join(["", *wrong])
    assert num_commands > 80


def test_examples_of_the_help(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples in the --help of each command call this command and are valid."""
    monkeypatch.chdir(root)
    for name, command in COMMANDS.items():
        assert 1 <= len(command.EXAMPLES) <= 3
        for line in command.EXAMPLES:
            assert everyrank_args(line)[0] == name
            assert command_error(line, runs_locally=False) == "", line


def test_only_help_all_shows_rare_launching_options() -> None:
    """--help-all has every option; --help has the common ones, and its usage line is short."""
    train = _parser().parse_args(["train", "digits"]).parser
    common_help = train.format_help()
    train.shows_all = True
    full_help = train.format_help()
    assert common_help.splitlines()[0] == "usage: everyrank train WORKLOAD [options]"
    assert all(flag in common_help for flag in ("--launcher X", "--nodes N", "--dry-run", "--help-all"))
    assert [flag in common_help for flag in ("--requeue", "--rendezvous-kind")] == [False, False]
    assert all(flag in full_help for flag in ("--requeue", "--rendezvous-kind"))


def test_commands_in_sentences_and_tables(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete commands in sentences and tables are valid."""
    monkeypatch.chdir(root)
    wrong: list[str] = []
    num_commands = 0
    for page in pages(root):
        for line in INLINE.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
            if "..." in line or re.search(r"\b[A-Z]{2,}[_A-Z]*\b(?<!DIR)(?<!RUN)", line.partition("everyrank")[2]):
                continue  # a placeholder such as RECIPE, FILE or "..."
            num_commands += 1
            if problem := command_error(line, runs_locally=False):
                wrong.append(f"{page.relative_to(root)}: {line}: {problem}")
    assert not wrong, "\n".join(["", *wrong])
    assert num_commands > 60


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("everyrank train digits --layout ddp --processes 2", ""),
        ("everyrank train digits --launcher slurm --processes 2", ""),
        ("everyrank train digits --layuot ddp", "unrecognized"),
        ("everyrank train digits --layout dpd", "dpd"),
        ("everyrank new ddp_torchrum t.py", "no recipe"),
        ("everyrank verify mine.py", "no workload"),
        ("everyrank train digits --nodes 0", "nodes"),
    ],
)
def test_wrong_commands_are_detected(line: str, message: str) -> None:
    error = command_error(line, runs_locally=True)
    assert message in error
    assert bool(error) == bool(message)
