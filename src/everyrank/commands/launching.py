"""Words that say how ranks start, for the commands that start some; and what is done instead of starting them."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from everyrank.api import check_fewer_ranks
from everyrank.errors import UsageError
from everyrank.launch import (
    CPU_PROCESSES,
    LAUNCHERS,
    Launch,
    Launcher,
    RankInfo,
    launchers,
    num_accelerators,
    rank_info_from_environment,
)
from everyrank.launch.environments import environment_of, is_rank_0_of_all
from everyrank.launch.job import BACKEND_NAMES
from everyrank.launch.launcher import DEFAULT_LAUNCHER, Scheduler, launcher_named
from everyrank.layout import Layout, parse_layout

__all__ = ["add_launching", "dry_run_or_submit", "is_reporting_rank", "launch_of", "quiet_launch_of"]


def add_launching(parser: argparse.ArgumentParser, several_sizes: bool = False, several_backends: bool = False) -> None:
    """--processes, --launcher and what belongs to them."""
    parser.set_defaults(starts_ranks=True)
    ranks = (
        "number of processes over all nodes; default: the visible GPUs, or on CPU "
        f"{CPU_PROCESSES}; 1 for a layout of one device"
    )
    if several_sizes:
        parser.add_argument(
            "--processes", type=int, nargs="+", metavar="N", help=f"{ranks}. Several (1 2 4): how each layout scales"
        )
    else:
        parser.add_argument("--processes", type=int, metavar="N", help=ranks)
    words = parser.add_argument_group("launching", "where and how the ranks start")
    words.add_argument(
        "--launcher", metavar="X", help=f"{', '.join(LAUNCHERS)} (default: {DEFAULT_LAUNCHER}; mpi with --backend mpi)"
    )
    words.add_argument("--device", metavar="D", help="cpu or cuda; default: cuda where there is one")
    backends = "shm, gloo, nccl or mpi; default: shm on CPU, nccl on CUDA"
    if several_backends:
        words.add_argument("--backend", nargs="+", metavar="B", help=f"{backends}; or horovod. Several take turns")
    else:
        words.add_argument("--backend", metavar="B", help=backends)
    words.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="longest wait for another rank, in seconds"
    )
    words.add_argument(
        "--start-timeout", type=float, metavar="S", help="the same until the first update is done; default: --timeout"
    )
    words.add_argument("--dry-run", action="store_true", help="print what would run, and run nothing")
    words.add_argument("--nodes", metavar="N", help="hosts; MIN:MAX for torchrun, or a batch job of Slurm")
    words.add_argument("--node-rank", type=int, metavar="K", help="which of them this is, where each is typed on")
    words.add_argument("--rendezvous", metavar="HOST:PORT", help="where they meet: HOST is node 0")
    words.add_argument("--interface", metavar="I", help="network interface between hosts; default: the way to HOST")
    words.add_argument(
        "--init-method", metavar="M", help="env, tcp://HOST:PORT or file:///PATH; default: what suits the launcher"
    )
    for row in launchers():
        row.add_arguments(words)
    words.add_argument("--launcher-args", default="", metavar="'...'", help="further words for mpirun, srun, torchrun")


_MIN_NODES = (
    "--nodes MIN:MAX: --launcher torchrun --rendezvous-kind c10d goes on with fewer hosts, and --launcher slurm begins "
    "with fewer; no other"
)


def launch_of(args: argparse.Namespace, logs: Path | None = None, layout: Layout | None = None) -> Launch:
    """How to start, from the words and from who started this process. Raises `UsageError` where the two disagree.

    A `layout` of one process has one, unless another number was asked for.
    """
    info = rank_info_from_environment(os.environ)
    if info is not None:
        _check_started(args, info, os.environ, layout)
    elif args.launcher is None:
        _check_forgotten(os.environ)
    row = _launcher(args)
    nodes, args.min_nodes = _nodes(args, info, os.environ)
    options = _own_options(args, row)
    if args.min_nodes is not None and row.min_nodes(options) is None:
        raise UsageError(_MIN_NODES)
    if args.restarts and not row.restarts_ranks(options):
        raise UsageError(f"--restarts {args.restarts}: give 0 or more, with --launcher torchrun or ray")
    if info is None and row.one_command_per_host and args.rendezvous is not None:
        _tell_other_hosts(args, nodes, is_told=row.assigns_node_ranks(options))
    return Launch(
        launcher=row.name,
        processes=_processes(args, info, os.environ, layout, nodes, options),
        device=args.device,
        backend=_backend(args),
        loader_workers=args.workers,
        timeout_seconds=args.timeout,
        start_timeout_seconds=args.start_timeout,
        logs=logs,
        nodes=nodes,
        node_rank=args.node_rank,
        rendezvous=args.rendezvous,
        init_method=args.init_method,
        interface=args.interface,
        arguments=_split(args.launcher_args),
        options=options,
    )


def quiet_launch_of(args: argparse.Namespace, layout: Layout | None = None) -> Launch:
    """The same, of this host or the first, before anything is printed for the others. Raises `UsageError`."""
    quiet = argparse.Namespace(**{**vars(args), "dry_run": True, "node_rank": args.node_rank or 0})
    return launch_of(quiet, layout=layout)


def _own_options(args: argparse.Namespace, launcher: Launcher) -> Any:
    """The launcher's own options. Raises `UsageError` for those of another one, too."""
    return {row.name: row.read_options(args, row.name == launcher.name) for row in launchers()}[launcher.name]


def _launcher(args: argparse.Namespace) -> Launcher:
    """The row of the launcher that was asked for, or that a backend needs. Raises `UsageError` for an unknown name."""
    if args.launcher is not None:
        return launcher_named(args.launcher)
    asked = [args.backend] if isinstance(args.backend, str) else args.backend or []
    return next((row for row in launchers() if row.own_backend in asked), launcher_named(DEFAULT_LAUNCHER))


def _split(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--launcher-args {text!r}: {error}; close the quotes") from error


def _tell_other_hosts(args: argparse.Namespace, nodes: int, is_told: bool) -> None:
    """Print what to type on which host. Raises `UsageError` where this one does not know which it is."""
    if nodes == 1 or args.dry_run:
        return
    if args.node_rank in (None, 0):
        others = range(nodes) if args.node_rank is None else range(1, nodes)
        print("\n".join(typed_on(args.words, None if is_told else node, node) for node in others), flush=True)
    if args.node_rank is None and not is_told:
        raise UsageError(f"--nodes {args.nodes}: which of them is this? type the line above of each host there")


def _check_started(
    args: argparse.Namespace, info: RankInfo, environment: Mapping[str, str], layout: Layout | None
) -> None:
    """Raises `UsageError` for words that contradict whoever has started this rank."""
    outside = environment_of(info)
    hint = outside.shell_hint if outside is not None and info.size == 1 else ""
    if args.launcher is not None:
        raise UsageError(
            f"--launcher {args.launcher}: {info.started_by} has already started this rank; leave it out{hint}"
        )
    asked = _asked(args)
    if outside is not None:
        uses_devices = args.device != "cpu" and (layout is None or layout.axis is not None)
        outside.check_started(environment, info, asked, uses_devices)
    if asked not in (None, info.size):
        raise UsageError(f"--processes {asked}: {info.started_by} started {info.size}; leave it out{hint}")


def _check_forgotten(environment: Mapping[str, str]) -> None:
    for row in launchers():
        if row.scheduler is not None:
            row.scheduler.check_forgotten(environment)


def _nodes(args: argparse.Namespace, info: RankInfo | None, environment: Mapping[str, str]) -> tuple[int, int | None]:
    """(nodes, at least so many); those of the allocation where nothing was said, or where it was to choose."""
    if info is not None:
        return 1, None
    scheduler = _launcher(args).scheduler
    allocated = scheduler.allocated_nodes(environment) if scheduler is not None else None
    if args.nodes is None:
        return (1 if allocated is None else allocated), None
    least, colon, most = args.nodes.rpartition(":")
    if not most.isdecimal() or (colon and not least.isdecimal()):
        raise UsageError(f"--nodes {args.nodes}: give a number, or MIN:MAX")
    if not colon or allocated is None:
        return int(most), int(least) if colon else None
    if not int(least) <= allocated <= int(most):
        raise UsageError(f"--nodes {args.nodes}, but the allocation has {allocated}: leave --nodes out")
    return allocated, int(least)


def _processes(
    args: argparse.Namespace,
    info: RankInfo | None,
    environment: Mapping[str, str],
    layout: Layout | None,
    nodes: int,
    options: Any,
) -> int:
    if info is not None:
        return info.size
    asked = _asked(args)
    if asked is not None:
        return asked * nodes // _most_nodes(args, nodes)
    if layout is not None and layout.axis is None:
        return 1
    scheduler = _launcher(args).scheduler
    tasks = scheduler.allocated_processes(environment, options) if scheduler is not None else None
    if tasks is not None:
        return tasks
    here = 0 if args.device == "cpu" else num_accelerators()
    return here * nodes or max(CPU_PROCESSES, nodes)


def _most_nodes(args: argparse.Namespace, nodes: int) -> int:
    """The nodes that --processes counts on: of MIN:MAX the most, whatever the allocation has."""
    return int(args.nodes.rpartition(":")[2]) or nodes if args.nodes is not None and ":" in args.nodes else nodes


def _asked(args: argparse.Namespace) -> int | None:
    """--processes; of several, the most."""
    asked: int | list[int] | None = args.processes
    return max(asked) if isinstance(asked, list) else asked


def _backend(args: argparse.Namespace) -> str | None:
    """--backend; of several the one that asks most of the ranks: to be started by MPI, or to share memory."""
    asked: str | list[str] | None = args.backend
    if not isinstance(asked, list):
        return asked
    known = (*BACKEND_NAMES, "horovod")
    for name in asked:
        if name not in known:
            raise UsageError(f"--backend {name}: give {', '.join(known)}")
    asked = [name for name in asked if name != "horovod"]  # which starts beside any of them
    return next((name for name in ("mpi", "shm") if name in asked), asked[0] if asked else None)


def dry_run_or_submit(args: argparse.Namespace) -> int | None:
    """What is done instead of starting ranks from here: a dry run, or a batch job. None where neither was asked for.

    The exit status otherwise. Raises `UsageError` for words and an environment that no start can come of: all ranks
    of a launcher outside see the same, so one of them is to say it (`is_reporting_rank`).
    """
    layout = getattr(args, "layout", None)
    one = parse_layout(layout) if isinstance(layout, str) else None
    row = _launcher(args)
    scheduler = row.scheduler
    is_queued = scheduler is not None and not scheduler.has_allocation(os.environ)
    info = rank_info_from_environment(os.environ)
    if info is None:
        for other in launchers():
            if other.scheduler is not None and other is not row:
                other.scheduler.check_options(args)
    if args.dry_run and info is not None:
        if info.rank == 0:
            print(f"nothing is left to start: {info.started_by} has started rank 0 of {info.size}")
        return 0
    if args.dry_run and args.node_rank is None and row.one_command_per_host:
        _print_for_each_host(args, row, one)
        return 0
    if not args.dry_run and not is_queued:
        # the words are looked at before a rank is waited for; the command itself prints what others have to type
        quiet_launch_of(args, one)
        return None
    launch = launch_of(args, layout=one)
    if scheduler is None or not is_queued:
        print(commands_text(launch))
        return 0
    return _submit(args, launch, scheduler, one)


def _print_for_each_host(args: argparse.Namespace, row: Launcher, layout: Layout | None) -> None:
    """What would run, on each host where the command is typed on each."""
    nodes, args.min_nodes = _nodes(args, None, os.environ)
    if row.assigns_node_ranks(_own_options(args, row)):
        nodes = 1  # the command is the same on each host but for what it finds out there
    for args.node_rank in range(max(1, nodes)):
        print(f"# on host {args.node_rank}\n" * (nodes > 1) + commands_text(launch_of(args, layout=layout)))


def _submit(args: argparse.Namespace, launch: Launch, scheduler: Scheduler, layout: Layout | None) -> int:
    """Hand the command to the scheduler's queue, or print what would be handed to it."""
    folder = Path.cwd()
    name = f"everyrank-{Path(args.workload.partition(':')[0]).stem}"
    command = [sys.executable, "-P", "-m", "everyrank", *(word for word in args.words if word != "--dry-run")]
    text = scheduler.script(launch, args, command, folder, name)
    if args.dry_run:
        print(f"{text}\n# in the allocation:\n{commands_text(launch)}")
        return 0
    if layout is not None and getattr(args, "evaluate", None) is False:
        check_fewer_ranks(layout, launch, args.out)
    path = folder / "runs" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.sbatch"
    job = scheduler.submit(text, path)
    print(f"submitted job {job}: {path}; what it prints: {folder / scheduler.output(job)}")
    return 0


def is_reporting_rank() -> bool:
    """Whether this process is the one that reports an error for all that a launcher outside has started with it."""
    return is_rank_0_of_all(os.environ)


# --- commands as text: what runs, ready to be read, and what to type on other hosts


def commands_text(launch: Launch) -> str:
    """Every command, ready to be read; JOB is a folder made for each run."""
    row = launch.row
    variables = [f"{name}={value}" for name, value in row.variables(launch.options).items()]
    before = ["env", *variables] if variables else []
    return "\n".join(shlex.join([*before, *command]) for command in row.render(launch, Path("JOB")))


def typed_on(typed: Sequence[str], node_rank: int | None, host: int) -> str:
    """What was typed, for another host; there it may have to be told which one it is."""
    words = ["everyrank", *typed]
    if "--node-rank" in words:
        place = words.index("--node-rank")
        del words[place : place + 2]
    words += ["--node-rank", str(node_rank)] if node_rank is not None else []
    return f"on host {host}:  {shlex.join(words)}"
