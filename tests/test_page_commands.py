"""Every command block of README and docs: `everyrank` lines are read and, where they start ranks, run with --dry-run.

What is no command of everyrank stands in NEEDS, with what it needs: those are run by `make`, by hand, or by the tests
of integration. So a flag, a layout, a recipe or a workload that is renamed turns its page red.
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
    "torchrun": "torch's own launcher: what it starts is read",
    "srun": "an allocation of Slurm: what it starts is read",
    "mpirun": "an MPI: what it starts is read",
    "horovodrun": "Horovod: what it starts is read",
    "tar": "what pip has fetched",
    ".": "the virtual environment of the line before",
    "cd": "the folder of the line before",
    "sed": "the file of the block before",
    "HOROVOD_WITH_PYTORCH=1": "a compiler and minutes: tests/integration/install_horovod",
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
        pytest.skip("a source distribution has no such pages")
    return repository


def command_lines(text: str) -> Iterator[str]:
    """Lines of the blocks that begin with a command: without the words that explain them, continuations joined."""
    for language, block in FENCE.findall(text):
        lines = block.replace("\\\n", " ").splitlines()
        first = lines[0].split() if lines else []
        if language not in ("", "bash", "sh") or not first or first[0] not in {"$", "everyrank", *NEEDS}:
            continue
        for line in lines:
            if not line.strip() or line.startswith("#") or (first[0] == "$" and not line.startswith("$ ")):
                continue  # in a block that begins with $ all else is what is printed
            told = re.split(r"\s+# | {4,}| {2,}(?=[^\x00-\x7f])", line.removeprefix("$ ").strip())[0]
            yield from (part.strip() for part in told.split(" && "))


def everyrank_words(line: str) -> list[str]:
    """What follows `everyrank` in a line, whoever starts it; [] where nothing does."""
    words = shlex.split(line.replace("my_parallel.py", "docs/examples/tied_weights.py"))  # own code has to be there
    for index, word in enumerate(words):
        if word == "everyrank":
            return words[index + 1 :]
    return []


def pages(root: Path) -> Iterator[Path]:
    yield from (root / "README.md", root / "README.zh.md")
    yield from (page for page in sorted((root / "docs").rglob("*.md")) if "decisions" not in page.parts)


@functools.cache
def parser() -> argparse.ArgumentParser:
    """The parser of everyrank, which takes longer to build than a line to read."""
    return _parser()


def read(words: list[str]) -> argparse.Namespace:
    """The call as everyrank reads it, with a workload that is there in place of a person's own. Raises UsageError."""
    parsed = parser().parse_args(words)
    layouts = getattr(parsed, "layout", None) or []
    for layout in [layouts] if isinstance(layouts, str) else layouts:
        parse_layout(str(layout))
    recipe = getattr(parsed, "recipe", None)
    if recipe not in (None, "workload") and not Path(recipes).with_name(f"{recipe}.py").exists():
        raise UsageError(f"no recipe {parsed.recipe}")
    if hasattr(parsed, "workload") and parsed.workload not in (*BUILT_IN, words[0]):  # comm is its own
        if parsed.workload not in PLACEHOLDERS and not Path(parsed.workload.partition(":")[0]).exists():
            raise UsageError(f"no workload {parsed.workload}")
        parsed.workload = "digits"
    return parsed


@functools.cache  # the pages of both languages have the same commands
def complaint(line: str, started_here: bool) -> str:
    """What is wrong with a line that calls everyrank; "" where nothing is."""
    try:
        parsed = read(everyrank_words(line))
        if started_here and hasattr(parsed, "workload") and hasattr(parsed, "launcher"):
            parsed.dry_run, parsed.argv, parsed.data, parsed.download = True, ["--dry-run"], None, False
            dry_run_or_submit(parsed)
    except CannotRunError:
        return ""  # what this machine lacks
    except EveryrankError as error:
        return str(error)
    return ""


def test_commands_of_the_pages(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(root)
    wrong: list[str] = []
    number = 0
    for page in pages(root):
        for line in command_lines(page.read_text(encoding="utf-8")):
            first = line.split()[0]
            if everyrank_words(line):
                why = complaint(line, started_here=first == "everyrank")
                number += 1
            elif first == "make":
                why = (
                    ""
                    if re.search(rf"^{line.split()[1]}:", (root / "Makefile").read_text(), re.MULTILINE)
                    else "no such target"
                )
            elif first == "python" and line.split()[1].endswith(".py"):
                why = "" if (root / line.split()[1]).exists() or "rank" in line or "train" in line else "no such file"
            else:
                why = "" if first in NEEDS else "say in NEEDS what this needs"
            if why:
                wrong.append(f"{page.relative_to(root)}: {line}: {why}")
    assert not wrong, "\n".join(["", *wrong])
    assert number > 80


def test_examples_of_the_help(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command ends its --help with examples of itself, which can be typed."""
    monkeypatch.chdir(root)
    for name, command in COMMANDS.items():
        assert 1 <= len(command.EXAMPLES) <= 3
        for line in command.EXAMPLES:
            assert everyrank_words(line)[0] == name
            assert complaint(line, started_here=False) == "", line


def test_help_shows_rare_launching_options_only_for_all() -> None:
    """--help-all has every option; --help has the common ones, and its usage line is short."""
    train = _parser().parse_args(["train", "digits"]).parser
    short = train.format_help()
    train.shows_all = True
    whole = train.format_help()
    assert short.splitlines()[0] == "usage: everyrank train WORKLOAD [options]"
    assert all(flag in short for flag in ("--launcher X", "--nodes N", "--dry-run", "--help-all"))
    assert [flag in short for flag in ("--requeue", "--rendezvous-kind")] == [False, False]
    assert all(flag in whole for flag in ("--requeue", "--rendezvous-kind"))


def test_commands_within_the_text(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of tables and sentences, where they are whole."""
    monkeypatch.chdir(root)
    wrong: list[str] = []
    number = 0
    for page in pages(root):
        for line in INLINE.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
            if "..." in line or re.search(r"\b[A-Z]{2,}[_A-Z]*\b(?<!DIR)(?<!RUN)", line.partition("everyrank")[2]):
                continue  # RECIPE, FILE, "...": not a whole one
            number += 1
            if why := complaint(line, started_here=False):
                wrong.append(f"{page.relative_to(root)}: {line}: {why}")
    assert not wrong, "\n".join(["", *wrong])
    assert number > 60


@pytest.mark.parametrize(
    ("line", "why"),
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
def test_a_wrong_command_is_found(line: str, why: str) -> None:
    said = complaint(line, started_here=True)
    assert why in said
    assert bool(said) == bool(why)
