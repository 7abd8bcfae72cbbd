"""everyrank new"""

from __future__ import annotations

import argparse
import importlib.resources
import shlex
import sys
from pathlib import Path

from everyrank.commands.shared import check_writable, say_next
from everyrank.commands.suggestions import suggest_recipe
from everyrank.errors import UsageError, printable
from everyrank.record import write_text

__all__ = ["HELP", "add_arguments", "run"]

HELP = "write a standalone script in plain PyTorch, or the template of a workload"

_WORKLOAD = "workload"  # the one name that is no recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RECIPE, where to write it, --list."""
    parser.add_argument("recipe", nargs="?", metavar="RECIPE")
    parser.add_argument(
        "path",
        nargs="?",
        type=Path,
        metavar="PATH",
        help="write it there, with what it needs beside it; without PATH, or with -: print it",
    )
    parser.add_argument("--list", action="store_true", help="what there is")


def run(args: argparse.Namespace) -> int:
    """Print the list of recipes or one of them, or write it with what it needs; 0."""
    recipes = _recipes()
    if args.list or args.recipe is None:
        width = max(map(len, recipes))
        for name, text in recipes.items():
            summary = text.lstrip('"').partition("\n")[0].rstrip('"')
            print(f"{name:{width}}  {summary}")
    elif args.recipe not in recipes:
        raise UsageError(suggest_recipe(args.recipe, recipes))
    elif args.path in (None, Path("-")):
        print(recipes[args.recipe], end="")
    else:
        written = _write(args.recipe, recipes[args.recipe], args.path)
        print(f"wrote {printable(' and '.join(map(str, written)))}")
        if args.recipe == _WORKLOAD:
            say_next(f"everyrank verify {shlex.quote(str(args.path))} --layout ddp --processes 2 --quick")
    sys.stdout.flush()  # a reader that has gone is met here, where it is no error, and not when Python ends
    return 0


def _recipes() -> dict[str, str]:
    """The text of each recipe by its name, in alphabetical order, and of the template of a workload."""
    folder = importlib.resources.files("everyrank.recipes")
    recipes = {
        Path(entry.name).stem: entry.read_text(encoding="utf-8")
        for entry in folder.iterdir()
        if entry.name.endswith(".py") and not entry.name.startswith("_")
    }
    recipes[_WORKLOAD] = (importlib.resources.files("everyrank.builtin") / "template.py.txt").read_text(
        encoding="utf-8"
    )
    return dict(sorted(recipes.items()))


def _write(name: str, recipe: str, target: Path) -> list[Path]:
    """Write the recipe, the batch script that starts it and the data it reads; what was written.

    Raises `UsageError` where one of the scripts is there already, or cannot be written.
    """
    texts = {target: recipe}
    batch = importlib.resources.files("everyrank.recipes") / f"{name}.sbatch"
    if batch.is_file():  # a batch script that starts this one, by the name it is written under
        script, text = _beside(target), batch.read_text(encoding="utf-8")
        for old, path in ((f"{name}.py", target), (batch.name, script)):
            text = text.replace(old, shlex.quote(path.name))
        texts[script] = text
    for path in texts:
        if path.exists():
            raise UsageError(f"{path}: it exists already; give another path, or remove it")
        check_writable(path)
    for path, text in texts.items():
        write_text(path, text)
    written = list(texts)
    data = target.with_name("digits.csv.gz")
    if data.name in recipe:
        if not data.exists():
            data.write_bytes((importlib.resources.files("everyrank.builtin") / "digits.csv.gz").read_bytes())
        written.append(data)
    return written


def _beside(path: Path) -> Path:
    """Where the batch script of a recipe comes that is written to `path`."""
    if path.suffix == ".sbatch":
        raise UsageError(f"{path}: the script itself comes here, its batch script beside it; give a name like train.py")
    return path.with_suffix(".sbatch")
