"""everyrank new"""

from __future__ import annotations

import argparse
import importlib.resources
import shlex
from pathlib import Path

from everyrank.commands.shared import check_writable
from everyrank.errors import UsageError

__all__ = ["HELP", "add", "run"]

HELP = "print or write a standalone script: plain PyTorch, yours"


def add(parser: argparse.ArgumentParser) -> None:
    """Its words."""
    parser.add_argument("recipe", nargs="?", metavar="RECIPE")
    parser.add_argument(
        "path", nargs="?", type=Path, metavar="PATH", help="write it there, with what it needs beside it"
    )
    parser.add_argument("--list", action="store_true", help="what there is")


def run(args: argparse.Namespace) -> int:
    """The exit status."""
    folder = importlib.resources.files("everyrank.recipes")
    recipes = {
        Path(entry.name).stem: entry.read_text(encoding="utf-8")
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".py") and not entry.name.startswith("_")
    }
    if args.list or args.recipe is None:
        width = max(map(len, recipes))
        for name, text in recipes.items():
            summary = text.lstrip('"').partition("\n")[0].rstrip('"')
            print(f"{name:{width}}  {summary}")
        return 0
    if args.recipe not in recipes:
        raise UsageError(f"recipe {args.recipe!r}: give one of {', '.join(recipes)}")
    if args.path is None:
        print(recipes[args.recipe], end="")
        return 0
    texts = {args.path: recipes[args.recipe]}
    batch = folder / f"{args.recipe}.sbatch"
    if batch.is_file():  # a batch script that starts this one, by the name it is written under
        script, text = _beside(args.path), batch.read_text(encoding="utf-8")
        for name, path in ((f"{args.recipe}.py", args.path), (batch.name, script)):
            text = text.replace(name, shlex.quote(path.name))
        texts[script] = text
    for path in texts:
        if path.exists():
            raise UsageError(f"{path}: it exists already; give another path, or remove it")
        check_writable(path)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    written = list(map(str, texts))
    data = args.path.with_name("digits.csv.gz")
    if data.name in recipes[args.recipe]:
        if not data.exists():
            data.write_bytes((importlib.resources.files("everyrank.builtin") / "digits.csv.gz").read_bytes())
        written.append(str(data))
    print(f"wrote {' and '.join(written)}")
    return 0


def _beside(path: Path) -> Path:
    if path.suffix == ".sbatch":
        raise UsageError(f"{path}: the script itself comes here, its batch script beside it; give a name like train.py")
    return path.with_suffix(".sbatch")
