"""everyrank checkpoint inspect | export"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from everyrank.commands.shared import check_writable, printing_results
from everyrank.errors import CHECK_FAILED, printable
from everyrank.record import write_text
from everyrank.runs import Checkpoint, CheckpointMetadata, all_of, damage, fields_of, find_checkpoint, run_of

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

_WITHOUT_CHECKSUM = "no damage found; about.json of an older everyrank has no checksum"

HELP = "inspect checkpoints, or export a model from one"
EXAMPLES = (
    "everyrank checkpoint inspect runs/first",
    "everyrank checkpoint export runs/first model.safetensors",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands inspect and export."""
    subparsers = parser.add_subparsers(required=True, metavar="inspect|export", dest="kind", parser_class=type(parser))
    inspect = subparsers.add_parser("inspect", help="list the checkpoints of a run and check them for damage")
    inspect.add_argument("folder", type=Path, metavar="DIR", help="a run, or a checkpoint")
    inspect.add_argument("--json", type=Path, metavar="F", help="write the metadata of each")
    export = subparsers.add_parser("export", help="write only the model, as a file that needs no everyrank")
    export.add_argument("folder", type=Path, metavar="DIR", help="a run (its newest checkpoint), or a checkpoint")
    export.add_argument("out", type=Path, metavar="F", help="F.safetensors, or F.pt: a plain state dict")


def run(args: argparse.Namespace) -> int:
    """Show the checkpoints of a run (exit status 1 if one is damaged), or export the model of one."""
    if args.kind == "export":
        from everyrank.checkpoint import export

        checkpoint = find_checkpoint(args.folder, "everyrank checkpoint export")
        check_writable(args.out)
        state = export(checkpoint, args.out)
        summary = f"{args.out}: {len(state)} tensors after update {checkpoint.metadata.step}, from {checkpoint.path}"
        print(f"wrote {printable(summary)}")
        return 0
    checkpoints = all_of(run_of(args.folder))
    if not any(checkpoint_or_none for _, checkpoint_or_none in checkpoints):
        # a single checkpoint, or an error that lists what the folder has
        checkpoint = find_checkpoint(args.folder, "everyrank checkpoint inspect")
        checkpoints = [(checkpoint.path, checkpoint)]
    return _inspect(checkpoints, args.json)


def _inspect(checkpoints: Sequence[tuple[Path, Checkpoint | None]], json_file: Path | None) -> int:
    """Print a row per checkpoint; 1 if one is damaged."""
    from everyrank.report import print_table
    from everyrank.report.table import Table

    rows: list[list[str]] = []
    best_path = (checkpoints[0][0].parent / "best").resolve()
    for path, checkpoint in checkpoints:
        name = path.name + (" (best)" if path.resolve() == best_path else "")
        if checkpoint is None:
            rows.append([name, "", "", "", "", "", "DAMAGED: about.json cannot be read"])
            continue
        metadata, errors = checkpoint.metadata, damage(checkpoint)
        rows.append(
            [
                name,
                str(metadata.step),
                _epochs(metadata),
                f"{metadata.layout} on {metadata.world_size}",
                f"{checkpoint.num_bytes / 2**20:.2f}",
                ", ".join(f"{name} {value:.4f}" for name, value in metadata.metrics.items()),
                f"DAMAGED: {errors}" if errors is not None else "whole" if metadata.schema > 1 else _WITHOUT_CHECKSUM,
            ]
        )
    readable = [checkpoint for _, checkpoint in checkpoints if checkpoint is not None]
    if json_file is not None:
        check_writable(json_file)
        metadata_all = [{"path": str(checkpoint.path), **fields_of(checkpoint.metadata)} for checkpoint in readable]
        write_text(json_file, json.dumps(metadata_all, indent=1))
    last = readable[-1].metadata
    title = f"{last.workload} · seed {last.seed} · global batch {last.global_batch} · {last.samples:,} samples"
    header = ["checkpoint", "update", "epoch", "layout", "MiB", "metrics", "state"]
    versions = ", ".join(f"{name} {version}" for name, version in last.versions.items())
    with printing_results():
        print_table(title, Table(header, rows), [versions])
    return CHECK_FAILED if any(row[-1].startswith("DAMAGED") for row in rows) else 0


def _epochs(metadata: CheckpointMetadata) -> str:
    """Describe the completed epochs; for streams of unknown length also the updates of the current epoch."""
    if metadata.updates_per_epoch:
        return f"{metadata.step / metadata.updates_per_epoch:.2f}"
    epoch, index = metadata.place.get("epoch", 0), metadata.place.get("index", 0)
    return f"{epoch} + {index} updates" if index else str(epoch)
