"""everyrank plan"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everyrank.commands.shared import check_html, check_writable, printing_results, repeated_arguments
from everyrank.errors import UsageError, printable
from everyrank.record import write_text
from everyrank.workload import Source, check_place, parse_settings

if TYPE_CHECKING:
    from everyrank.plan.calibration import Calibration
    from everyrank.plan.hardware import Cluster, Link
    from everyrank.plan.machine import Machine

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "predict what fits, how long a step takes and which layouts to try, without a GPU"
EXAMPLES = (
    "everyrank plan --decoder 8b --gpus 64xh100",
    "everyrank plan text --gpus 2xa100 --layout fsdp:precision=bf16",
    "everyrank plan --decoder 8b --gpus 8xa100 --layout fsdp:precision=bf16 --json plan.json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the cluster, the layouts, the whole run, and calibration and validation."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a workload (a built-in name or path/file.py[:name]), or a Hugging Face config.json",
    )
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="K=V", help="settings of the workload")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="folder of the data, if the workload does not include it"
    )
    parser.add_argument(
        "--decoder", metavar="D", help="a decoder instead of MODEL: 8b, 70b, ..., or layers=32,hidden=4096,heads=32,..."
    )
    parser.add_argument("--gpus", metavar="NxKIND", help="number and kind, for example 64xh100")
    parser.add_argument("--per-node", type=int, metavar="N", help="GPUs of a node (default 8)")
    parser.add_argument(
        "--link", metavar="L", help="bandwidth between nodes for each GPU: 400Gb, or a file that comm --json wrote"
    )
    parser.add_argument("--memory", metavar="M", help="memory of a GPU, for example 80GiB (default: that of its kind)")
    parser.add_argument(
        "--layout", nargs="+", action="extend", metavar="L", help="predict only these layouts (default: all)"
    )
    parser.add_argument("--batch", type=int, metavar="N", help="samples of an update over all GPUs (default: 2 a GPU)")
    parser.add_argument("--seq", type=int, metavar="T", help="tokens of a sample, instead of the model's")
    parser.add_argument(
        "--tokens", metavar="N", help="tokens of the whole run, for example 1T: adds hours, money and energy"
    )
    parser.add_argument("--price", type=float, metavar="P", help="price of one GPU for an hour")
    parser.add_argument("--mtbf", type=float, metavar="H", help="hours between failures of the job: adds goodput")
    parser.add_argument("--calibration", type=Path, metavar="F", help="measured rows, or a written calibration")
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="F",
        help="measure this machine in about a minute and write F, for --calibration",
    )
    parser.add_argument(
        "--backend", dest="link_backend", metavar="B", help="with a measured machine: shm (default) or gloo"
    )
    parser.add_argument("--validate", type=Path, metavar="F", help="compare predictions with the measured rows in F")
    parser.add_argument(
        "--write-calibration", type=Path, metavar="F", help="write the fitted numbers and the intervals"
    )
    parser.add_argument("--json", type=Path, metavar="F", help="write the whole answer")
    parser.add_argument(
        "--html", type=Path, metavar="F", help="write a self-contained page with memory and time by part"
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan or the table of errors; exit status 0."""
    check_writable(args.json)
    check_html(args)
    if args.html is not None and args.validate is not None:
        raise UsageError(f"--html {args.html}: for a plan only; use --json with --validate")
    check_writable(args.write_calibration)
    if args.calibrate is not None:
        return _calibrate(args)
    for path in (args.calibration, args.validate):
        if path is not None and not path.is_file():
            raise UsageError(f"{path}: no such file; give a table of measured rows")
    from everyrank.plan.calibration import write_calibration
    from everyrank.report.plan import print_plan, print_validation

    machine = _machine(args)
    if args.validate is not None:
        answer, calibration = _validation(args)
        answer["provenance"] = _provenance()
        print_answer = print_validation
    elif machine is not None:
        answer, calibration = _plan_on_machine(args, machine), None
        print_answer = print_plan
    else:
        calibration = _calibration(args)
        answer = _plan(args, calibration)
        print_answer = print_plan
    written = [path for path in (args.json, args.html, args.write_calibration) if path is not None]
    if args.json is not None:
        write_text(args.json, json.dumps(answer, indent=1, allow_nan=False, default=str) + "\n")
    if args.html is not None:
        from everyrank.report.plan_page import plan_page

        write_text(args.html, plan_page(answer, args.argv))
    if args.write_calibration is not None and calibration is not None:
        write_text(args.write_calibration, write_calibration(calibration))
    with printing_results():
        print_answer(answer)
        for path in written:
            print(f"wrote {printable(str(path))}")
    return 0


def _calibrate(args: argparse.Namespace) -> int:
    """Measure this machine and write the file; exit status 0."""
    check_writable(args.calibrate)
    from everyrank.plan.calibrate import calibrate
    from everyrank.plan.machine import write_machine
    from everyrank.report.plan import print_machine

    machine = calibrate(backends=[args.link_backend] if args.link_backend else None)
    write_text(args.calibrate, write_machine(machine))
    with printing_results():
        print_machine(machine)
        print(f"wrote {printable(str(args.calibrate))}")
    return 0


def _machine(args: argparse.Namespace) -> Machine | None:
    """Return the measured machine in --calibration, or None. Raises `UsageError` for --backend without one."""
    from everyrank.plan.machine import read_machine

    machine = None
    if args.calibration is not None and args.validate is None:
        machine = read_machine(args.calibration)
    if args.link_backend is not None and machine is None:
        raise UsageError(f"--backend {args.link_backend}: only with --calibrate, or with a --calibration that it wrote")
    return machine


def _calibration(args: argparse.Namespace) -> Calibration:
    from everyrank.plan.calibration import read_calibration, shipped_calibration

    return read_calibration(args.calibration) if args.calibration is not None else shipped_calibration()


def _provenance() -> dict[str, Any]:
    """Return where and when the validation was made."""
    return {
        "torch": importlib.metadata.version("torch"),
        "cores": os.cpu_count(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }


def _validation(args: argparse.Namespace) -> tuple[dict[str, Any], Calibration]:
    """Return the table of errors, and the calibration whose errors it shows."""
    from everyrank.plan.rows import read_rows
    from everyrank.plan.validate import validate_rows

    rows, unreadable = read_rows(args.validate)
    calibration = _calibration(args)
    fitted_rows = []
    if args.calibration is not None and _is_table(args.calibration):
        fitted_rows, _ = read_rows(args.calibration)
    return validate_rows(rows, unreadable, calibration, fitted_rows), calibration


def _is_table(path: Path) -> bool:
    """Whether the file has measured rows, not a written calibration."""
    try:
        return not (isinstance(read := json.loads(path.read_text(encoding="utf-8")), dict) and "calibration" in read)
    except ValueError:
        return True  # JSON lines


def _plan(args: argparse.Namespace, calibration: Calibration) -> dict[str, Any]:
    from dataclasses import replace

    from everyrank.plan.answer import PlanRequest, answer_plan
    from everyrank.plan.decoder import decoder_from_config, parse_decoder
    from everyrank.plan.hardware import parse_bytes, parse_cluster

    if args.gpus is None:
        raise UsageError("plan needs a cluster: add --gpus, for example --gpus 64xh100")
    memory = parse_bytes(args.memory, "--memory") if args.memory is not None else None
    link = _link(args.link) if args.link is not None else None
    cluster = parse_cluster(args.gpus, args.per_node, link, memory)
    if args.seq is not None and args.seq < 1:
        raise UsageError(f"--seq {args.seq}: give at least 1 token")
    workload = "my_workload.py"
    if args.decoder is not None and args.model is not None:
        raise UsageError(f"{args.model} and --decoder {args.decoder}: give one of the two")
    is_workload = args.decoder is None and args.model is not None and not args.model.endswith(".json")
    if not is_workload and (args.set or args.data is not None):
        flag = "--set" if args.set else "--data"
        raise UsageError(f"{flag}: for a workload only; leave it out with --decoder or a config.json")
    if args.decoder is not None:
        sizes, name = parse_decoder(args.decoder), f"decoder {args.decoder}"
        sizes = replace(sizes, seq=args.seq) if args.seq is not None else sizes
    elif args.model is not None:
        if not args.model.endswith(".json"):
            return _plan_workload(args, cluster)
        if not Path(args.model).is_file():
            raise UsageError(f"{args.model}: no such file; give a config.json of Hugging Face, or --decoder 8b")
        sizes, name = decoder_from_config(Path(args.model), args.seq), args.model
    else:
        raise UsageError("plan needs a model: give a workload, a config.json, or --decoder 8b")
    request = PlanRequest(
        sizes=sizes,
        name=name,
        workload=shlex.quote(workload),
        cluster=cluster,
        batch=args.batch,
        layouts=args.layout or (),
        tokens=_number(args.tokens, "--tokens"),
        price=_positive(args.price, "--price"),
        mtbf_hours=_positive(args.mtbf, "--mtbf"),
    )
    return answer_plan(request, calibration)


def _plan_workload(
    args: argparse.Namespace, cluster: Cluster, measured: tuple[Machine, str] | None = None
) -> dict[str, Any]:
    """Return the plan of a workload, from a trace of its step."""
    for flag, value in (("--tokens", args.tokens), ("--seq", args.seq), ("--price", args.price), ("--mtbf", args.mtbf)):
        if value is not None:
            raise UsageError(f"{flag}: for a decoder only (--decoder, config.json)")
    args.workload, args.lr_rule = args.model, "none"
    check_place(args.model)
    settings = parse_settings(args.set)
    if args.data is not None:
        settings["data"] = str(args.data.absolute())
    from everyrank.plan.traced import answer_workload
    from everyrank.workload.find import load

    workload = load(Source(args.model, settings, args.batch))
    return answer_workload(workload, args.model, repeated_arguments(args), cluster, args.layout or (), measured)


def _plan_on_machine(args: argparse.Namespace, machine: Machine) -> dict[str, Any]:
    """Return the plan of a workload on a measured machine."""
    if args.model is None or args.decoder is not None or args.model.endswith(".json"):
        raise UsageError(
            f"--calibration {args.calibration}: a measured machine needs a workload; give a built-in name or FILE.py"
        )
    for flag in ("--gpus", "--per-node", "--link", "--write-calibration"):
        if getattr(args, flag[2:].replace("-", "_")) is not None:
            raise UsageError(
                f"{flag}: {args.calibration} is for {machine.ranks} ranks of {machine.device}; leave {flag} out"
            )
    from everyrank.plan.hardware import host_cluster, parse_bytes

    memory = parse_bytes(args.memory, "--memory") if args.memory is not None else None
    backend = args.link_backend or next(iter(machine.links))
    return _plan_workload(args, host_cluster(machine.device, machine.ranks, memory), (machine, backend))


def _positive(value: float | None, flag: str) -> float | None:
    if value is not None and not 0 < value < 1e12:
        raise UsageError(f"{flag} {value}: give a number above 0")
    return value


def _number(text: str | None, flag: str) -> float | None:
    """Return the number of `1T`, `300B`, `10M` or `5000`."""
    if text is None:
        return None
    factor = {"T": 1e12, "B": 1e9, "G": 1e9, "M": 1e6, "K": 1e3}.get(text[-1:].upper(), 1.0)
    try:
        value = float(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        value = 0.0
    if not 0 < value < 1e20:
        raise UsageError(f"{flag} {text}: give a number above 0, such as 1T or 300B")
    return value


def _link(text: str) -> Link:
    """Return the link between nodes: a bandwidth, or the measured all_reduce in a file of `comm --json`."""
    from everyrank.plan.hardware import Link, parse_link

    path = Path(text)
    if not text.endswith(".json"):
        return parse_link(text)
    if not path.is_file():
        raise UsageError(f"--link {text}: no such file; write it with everyrank comm --op all_reduce --json {text}")
    try:
        costs = [
            cost for cost in json.loads(path.read_text(encoding="utf-8"))["costs"] if cost["operation"] == "all_reduce"
        ]
        cost = next(cost for cost in costs if cost["bytes_per_second"])
        ranks = int(cost["ranks"])
        bus_bytes_per_second = float(cost["bytes_per_second"]) * 2 * (ranks - 1) / ranks
        return Link(
            float(cost["latency_seconds"]) / max(2 * (ranks - 1), 1),
            bus_bytes_per_second,
            f"{bus_bytes_per_second / 1e9:.3g} GB/s measured",
        )
    except (ValueError, KeyError, TypeError, StopIteration, ZeroDivisionError) as error:
        raise UsageError(
            f"--link {text}: it has no measured all_reduce; write it with everyrank comm --op all_reduce --json {text}"
        ) from error
