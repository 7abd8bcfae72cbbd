"""everyrank predict"""

from __future__ import annotations

import argparse
from pathlib import Path

from everyrank.commands.launching import launch_of
from everyrank.commands.shared import add_common, check_writable, source_of
from everyrank.layout import parse_layout
from everyrank.tasks.predictions import check_predictions_suffix

__all__ = ["HELP", "add", "run"]

HELP = "write what a trained model says of each sample"


def add(parser: argparse.ArgumentParser) -> None:
    """Its words."""
    add_common(parser, default_processes=1, records=False)
    parser.add_argument("--layout", default="single", metavar="L", help="default: single")
    parser.add_argument("--out", type=Path, required=True, metavar="F", help="a row for each sample: F.jsonl or F.npy")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="the run (its newest checkpoint), or a checkpoint")
    parser.add_argument("--pretrained", type=Path, metavar="F", help="weights: safetensors, or a state dict")
    parser.add_argument("--train-data", action="store_true", help="of the training data instead of the held-out")


def run(args: argparse.Namespace) -> int:
    """The exit status."""
    from everyrank import api

    check_predictions_suffix(args.out)
    layout = parse_layout(args.layout)
    launch = launch_of(args, layout=layout)
    check_writable(args.out)
    count = api.predict(
        source_of(args),
        layout,
        launch,
        out=args.out,
        resume=args.resume,
        pretrained=args.pretrained,
        training_data=args.train_data,
    )
    if count:
        print(f"wrote {args.out}: {count} predictions, in the order of the data")
    return 0
