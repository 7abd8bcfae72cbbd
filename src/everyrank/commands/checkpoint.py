"""everyrank checkpoint inspect | export"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from everyrank.commands.shared import check_writable
from everyrank.errors import CHECK_FAILED
from everyrank.runs import Checkpoint, checkpoints_of, damage, find_checkpoint

__all__ = ["HELP", "add", "run"]

HELP = "look into checkpoints, or take a model out of one"


def add(parser: argparse.ArgumentParser) -> None:
    """Its words."""
    kinds = parser.add_subparsers(required=True, metavar="inspect|export", dest="kind", parser_class=type(parser))
    inspect = kinds.add_parser("inspect", help="what there is, and whether it is whole")
    inspect.add_argument("place", type=Path, metavar="DIR", help="a run, or a checkpoint")
    inspect.add_argument("--json", type=Path, metavar="F", help="write what each says of itself")
    export = kinds.add_parser("export", help="the model alone, as a file that needs no everyrank")
    export.add_argument("place", type=Path, metavar="DIR", help="a run (its newest checkpoint), or a checkpoint")
    export.add_argument("out", type=Path, metavar="F", help="F.safetensors, or F.pt: a plain state dict")


def run(args: argparse.Namespace) -> int:
    """The exit status."""
    found = find_checkpoint(args.place)
    if args.kind == "export":
        from everyrank.checkpoint import export

        state = export(found, args.out)
        print(f"wrote {args.out}: {len(state)} tensors after update {found.about.step}, from {found.path}")
        return 0
    is_one = found.path == args.place.resolve()
    there = [found] if is_one else checkpoints_of(args.place)
    return _inspect(there, args.json)


def _inspect(there: list[Checkpoint], json_file: Path | None) -> int:
    """A row for each; 1 when one is damaged."""
    from everyrank.report import print_table
    from everyrank.report.table import Table

    rows: list[list[str]] = []
    states = [damage(one) for one in there]
    best = (there[0].path.parent / "best").resolve()
    for one, found in zip(there, states, strict=True):
        about = one.about
        rows.append(
            [
                one.path.name + (" (best)" if one.path.resolve() == best else ""),
                str(about.step),
                f"{about.step / about.updates_per_epoch:.2f}",
                f"{about.layout} on {about.world_size}",
                f"{one.num_bytes / 2**20:.2f}",
                ", ".join(f"{name} {value:.4f}" for name, value in about.metrics.items()),
                "whole" if found is None else f"DAMAGED: {found}",
            ]
        )
    if json_file is not None:
        check_writable(json_file)
        about_all = [{"path": str(one.path), **dataclasses.asdict(one.about)} for one in there]
        json_file.write_text(json.dumps(about_all, indent=1), encoding="utf-8")
    last = there[-1].about
    title = f"{last.workload} · seed {last.seed} · global batch {last.global_batch} · {last.samples:,} samples"
    header = ["checkpoint", "update", "epoch", "layout", "MiB", "metrics", "state"]
    print_table(
        title, Table(header, rows), [f"everyrank {last.versions.get('everyrank')}, torch {last.versions.get('torch')}"]
    )
    return CHECK_FAILED if any(states) else 0
