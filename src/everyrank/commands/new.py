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

__all__ = ["GROUPS", "HELP", "add_arguments", "run"]

HELP = "write a standalone script in plain PyTorch, or a workload template"
EXAMPLES = (
    "everyrank new --list",
    "everyrank new ddp_torchrun train.py",
    "everyrank new workload my_workload.py",
)

_WORKLOAD = "workload"  # not a recipe: the template of a workload

GROUPS = {
    "Start here": ("single", "ddp_torchrun"),
    "Data parallel": (
        "ddp_amp",
        "ddp_accumulate",
        "ddp_syncbn",
        "distributed_evaluation",
        "iterable_sharding",
        "weighted_sampler",
        "ddp_uneven",
        "contrastive",
        "ddp_compressed",
        "local_sgd",
        "dataparallel",
    ),
    "Models that do not fit on one device": (
        "zero1",
        "fsdp",
        "hsdp",
        "tensor",
        "fsdp_tensor",
        "pipeline",
        "context",
        "expert",
        "model_parallel_two_devices",
    ),
    "A complete training script": ("imagenet_ddp", "checkpoint_resume", "elastic_torchrun"),
    "Starting the ranks": (
        "ddp_spawn",
        "ddp_by_hand",
        "multi_node",
        "slurm",
        "mpi",
        "ray_actors",
        "horovod_ddp",
    ),
    "Communication": ("collectives", "point_to_point", "process_groups", "ring_allreduce"),
    "Parameter servers and RPC": (
        "parameter_server",
        "parameter_server_rpc",
        "parameter_server_async",
        "rpc_autograd",
        "rpc_batched",
        "rpc_pipeline",
        "rpc_rnn",
        "ddp_rpc",
        "rpc_reinforcement",
    ),
    "Your own model and data, for everyrank": (_WORKLOAD,),
}
"""The recipes in reading order, by heading."""

_MERGED = {
    "ddp_tcp": ("ddp_by_hand", "with --init tcp://HOST:PORT"),
    "ddp_file": ("ddp_by_hand", "with --init file:///PATH"),
    "ddp_env": ("ddp_by_hand", "without --init"),
    "parameter_averaging": ("local_sgd", "with --every 1"),
}
"""Earlier name of a recipe -> the recipe that contains it, and how."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add RECIPE, PATH and --list."""
    parser.add_argument("recipe", nargs="?", metavar="RECIPE")
    parser.add_argument(
        "path",
        nargs="?",
        type=Path,
        metavar="PATH",
        help="write the recipe to PATH, and its modules and data next to it (without PATH, or with -: print it)",
    )
    parser.add_argument("--list", action="store_true", help="list the recipes")


def run(args: argparse.Namespace) -> int:
    """Print the list of recipes, or print or write one recipe; exit status 0."""
    recipes = _recipes()
    name = args.recipe
    if name in _MERGED:
        name, how = _MERGED[name]
        print(f"note: {args.recipe} is now {name}, {how}", file=sys.stderr)
    if args.list or name is None:
        _print_list(recipes)
    elif name not in recipes:
        raise UsageError(suggest_recipe(name, recipes))
    elif args.path in (None, Path("-")):
        print(recipes[name], end="")
    else:
        written = _write(name, recipes[name], args.path)
        *others, last = map(str, written)
        print(f"wrote {printable(' and '.join(filter(None, [', '.join(others), last])))}")
        if name == _WORKLOAD:
            say_next(f"everyrank verify {shlex.quote(str(args.path))} --layout ddp --processes 2 --quick")
    sys.stdout.flush()  # raises BrokenPipeError here, where it is handled, and not when Python ends
    return 0


def _print_list(recipes: dict[str, str]) -> None:
    """Print name and summary of each recipe, in reading order, with a heading for each group."""
    width = max(map(len, recipes))
    for number, (heading, names) in enumerate(GROUPS.items()):
        print(f"{'' if number == 0 else chr(10)}{heading}:")
        for name in names:
            summary = recipes[name].lstrip('"').partition("\n")[0].rstrip('"')
            print(f"  {name:{width}}  {summary}")


def _recipes() -> dict[str, str]:
    """Return the text of each recipe and of the workload template, by name, in alphabetical order."""
    folder = importlib.resources.files("everyrank.recipes")
    recipes = {
        Path(entry.name).stem: entry.read_text(encoding="utf-8")
        for entry in folder.iterdir()
        if entry.name.endswith(".py") and not entry.name.startswith("_")
    }
    recipes[_WORKLOAD] = (importlib.resources.files("everyrank") / "builtin" / "template.py.txt").read_text(
        encoding="utf-8"
    )
    return dict(sorted(recipes.items()))


def _write(name: str, recipe: str, target: Path) -> list[Path]:
    """Write the recipe and the files that it needs next to it; returns the paths.

    These are a batch script that starts it (Slurm), the modules that it imports and the data. A module or data file
    that exists is kept, because a user may have changed it. Raises `UsageError` if one of the scripts exists already,
    or cannot be written.
    """
    folder = importlib.resources.files("everyrank.recipes")
    texts = {target: recipe}
    batch = folder / f"{name}.sbatch"
    if batch.is_file():  # replace the name of the recipe by the name of the written file
        script, text = _batch_script_path(target), batch.read_text(encoding="utf-8")
        for old, path in ((f"{name}.py", target), (batch.name, script)):
            text = text.replace(old, shlex.quote(path.name))
        texts[script] = text
    imported = [name for name in ("digits.py", "transformer.py") if f"\nfrom {Path(name).stem} import " in recipe]
    if target.name in imported:
        raise UsageError(f"{target}: the script imports a module of this name; give a name like train.py")
    for path in texts:
        if path.exists():
            raise UsageError(f"{path}: this file exists already; give another path, or remove it")
        check_writable(path)
    for path, text in texts.items():
        write_text(path, text)
    written = list(texts)
    for module in map(target.with_name, imported):
        text = (folder / "shared" / module.name).read_text(encoding="utf-8")
        if not module.exists():
            write_text(module, text)
        elif module.read_bytes() != text.encode():
            print(
                f"note: kept {printable(str(module))}, which differs from the version that {name} needs",
                file=sys.stderr,
            )
        written.append(module)
    data = target.with_name("digits.csv.gz")
    if imported or data.name in recipe:
        if not data.exists():
            data.write_bytes((importlib.resources.files("everyrank") / "builtin" / data.name).read_bytes())
        written.append(data)
    return written


def _batch_script_path(path: Path) -> Path:
    """Return the path of the batch script for a recipe that is written to `path`."""
    if path.suffix == ".sbatch":
        raise UsageError(
            f"{path}: the batch script next to the recipe would have this name, too; give a name like train.py"
        )
    return path.with_suffix(".sbatch")
