"""everyrank predict"""

from __future__ import annotations

import argparse

from everyrank.commands.launching import launch_of
from everyrank.commands.shared import add_common, add_options, check_writable, options_of, source_of
from everyrank.errors import printable
from everyrank.layout import parse_layout
from everyrank.options import PredictOptions
from everyrank.prediction.files import check_predictions_suffix

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "write the predictions of a trained model"
EXAMPLES = (
    "everyrank predict digits --resume runs/first --out predictions.jsonl",
    "everyrank predict my_workload.py --pretrained model.safetensors --out predictions.npy --layout ddp --processes 2",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add WORKLOAD, the launch flags, --layout, and `PredictOptions`."""
    add_common(parser, records=False)
    parser.add_argument("--layout", default="single", metavar="L", help="default: single")
    add_options(parser, PredictOptions)


def run(args: argparse.Namespace) -> int:
    """Write the predictions of a trained model and print their number; exit status 0."""
    from everyrank import api

    check_predictions_suffix(args.out)
    layout = parse_layout(args.layout)
    launch = launch_of(args, layout=layout)
    check_writable(args.out)
    count = api.predict(source_of(args), layout, launch, options_of(args, PredictOptions))
    if count:
        print(f"wrote {printable(str(args.out))}: {count} predictions, in the order of the data")
    return 0
