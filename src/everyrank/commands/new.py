"""everyrank new"""

from __future__ import annotations

import argparse
import importlib.resources
from pathlib import Path

from everyrank.commands.shared import check_writable
from everyrank.errors import UsageError

__all__ = ["HELP", "add", "run"]

HELP = "print or write a standalone script: plain PyTorch, yours"


def add(parser: argparse.ArgumentParser) -> None:
    """Its words."""
    parser.add_argument("recipe", nargs="?", metavar="RECIPE")
    parser.add_argument("path", nargs="?", type=Path, metavar="PATH", help="write it there, with its data beside it")
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
    if args.path.exists():
        raise UsageError(f"{args.path}: it exists already; give another path, or remove it")
    check_writable(args.path)
    args.path.write_text(recipes[args.recipe], encoding="utf-8")
    data = args.path.with_name("digits.csv.gz")
    if data.name not in recipes[args.recipe]:
        print(f"wrote {args.path}")
        return 0
    if not data.exists():
        data.write_bytes((importlib.resources.files("everyrank.workloads") / "digits.csv.gz").read_bytes())
    print(f"wrote {args.path} and {data}")
    return 0
