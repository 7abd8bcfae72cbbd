"""The flags for launching ranks, the `Launch` made from them, dry runs and batch jobs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from everyrank.commands.arguments import add_options, options_of
from everyrank.errors import UsageError
from everyrank.launch import (
    CPU_PROCESSES,
    LAUNCHERS,
    Launch,
    Launcher,
    RankInfo,
    find_launcher,
    launchers,
    num_accelerators,
    rank_info_from_environment,
    stopping_before_ranks,
)
from everyrank.launch.environments import is_rank_0_of_all
from everyrank.launch.job import BACKEND_NAMES
from everyrank.launch.launcher import DEFAULT_LAUNCHER, BatchLauncher, LauncherOptions, launcher_named
from everyrank.layout import Layout, parse_layout
from everyrank.options import arguments_of

__all__ = ["add_launching", "dry_run_or_submit", "is_reporting_rank", "launch_of", "quiet_launch_of"]


_WORKLOAD_FLAGS = ("device", "backend", "interface", "init_method")


def add_launching(
    parser: argparse.ArgumentParser,
    several_sizes: bool = False,
    several_backends: bool = False,
    for_scripts: bool = False,
) -> None:
    """Add --processes, --launcher, the flags that go with them, and those of each launcher.

    `for_scripts` leaves out the flags that a user's script decides itself, such as --backend.
    """
    parser.set_defaults(starts_ranks=True, **(dict.fromkeys(_WORKLOAD_FLAGS) if for_scripts else {}))
    processes = (
        "total number of processes over all nodes (default: the number of visible GPUs, on CPU "
        f"{CPU_PROCESSES}, and 1 for a layout of one device)"
    )
    if several_sizes:
        parser.add_argument(
            "--processes", type=int, nargs="+", metavar="N", help=f"{processes}. Several (1 2 4): measure scaling"
        )
    else:
        parser.add_argument("--processes", type=int, metavar="N", help=processes)
    group: Any = parser.add_argument_group("launching", "where and how ranks start")
    group.add_argument(
        "--launcher", metavar="X", help=f"{', '.join(LAUNCHERS)} (default: {DEFAULT_LAUNCHER}, with --backend mpi: mpi)"
    )
    if not for_scripts:
        _add_workload_flags(group, several_backends)
    group.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="after this wait for other ranks, print why (default 300)"
        if for_scripts
        else "longest wait for another rank, in seconds",
    )
    group.add_argument("--dry-run", action="store_true", help="print the commands without running them")
    group.add_argument("--nodes", metavar="N", help="number of hosts (MIN:MAX for torchrun, or a batch job of Slurm)")
    group.add_argument(
        "--node-rank", type=int, metavar="K", help="number of this host, if you start the command on each host"
    )
    group.add_argument("--rendezvous", metavar="HOST:PORT", help="address where the hosts connect: HOST is node 0")
    added_flags: set[str] = set()
    for launcher in launchers():
        for options in _option_classes(launcher):
            add_options(group, options, skip=added_flags)
            added_flags |= arguments_of(options).keys()  # torchrun and ray share --restarts
    group.add_argument(
        "--launcher-args", default="", metavar="'...'", help="additional arguments for mpirun, srun, torchrun"
    )


def _add_workload_flags(group: Any, several_backends: bool) -> None:
    group.add_argument("--device", metavar="D", help="cpu or cuda (default: cuda if there is a GPU)")
    default = "(default: shm on CPU, nccl on CUDA)"
    if several_backends:
        group.add_argument(
            "--backend", nargs="+", metavar="B", help=f"shm, gloo, nccl, mpi or horovod {default}. Several take turns"
        )
    else:
        group.add_argument("--backend", metavar="B", help=f"shm, gloo, nccl or mpi {default}")
    group.add_argument(
        "--start-timeout", type=float, metavar="S", help="timeout until the first update is done (default: --timeout)"
    )
    group.add_argument(
        "--interface", metavar="I", help="network interface between hosts (default: the one on the route to HOST)"
    )
    group.add_argument(
        "--init-method",
        metavar="M",
        help="env, tcp://HOST:PORT or file:///PATH (default: depends on the launcher)",
    )


def _option_classes(launcher: Launcher) -> list[type[Any]]:
    """Return the dataclasses whose fields are the flags of this launcher."""
    return [launcher.options, *([launcher.batch_options] if isinstance(launcher, BatchLauncher) else [])]


_MIN_NODES = (
    "--nodes MIN:MAX: not supported by --launcher {}; use --launcher torchrun --rendezvous-kind c10d to continue with "
    "fewer hosts, or --launcher slurm to start a batch job with fewer"
)


def launch_of(args: argparse.Namespace, logs: Path | None = None, layout: Layout | None = None) -> Launch:
    """Return the `Launch` for these arguments. Raises `UsageError` if they contradict the environment.

    A `layout` of one device gets one process, unless --processes was given.
    """
    info = rank_info_from_environment(os.environ)
    if info is not None:
        _check_rank(args, info, os.environ, layout)
    elif args.launcher is None:
        for launcher in launchers():
            if isinstance(launcher, BatchLauncher):
                launcher.check_unused(os.environ)
    launcher = _launcher(args)
    nodes, min_nodes = _nodes(args, info, os.environ)
    options = _launcher_options(args, launcher, min_nodes)
    if info is None and launcher.launch_per_node and args.rendezvous is not None:
        _print_commands_of_other_hosts(args, nodes, options.assigns_node_ranks)
    return Launch(
        launcher=launcher.name,
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
        arguments=_split_arguments(args.launcher_args),
        options=options,
    )


def quiet_launch_of(args: argparse.Namespace, layout: Layout | None = None) -> Launch:
    """Return the `Launch` of this host, or of the first, without printing the commands for other hosts."""
    return launch_of(_quiet(args), layout=layout)


def _quiet(args: argparse.Namespace) -> argparse.Namespace:
    """Return a copy of the arguments for a call that only checks them: no commands for other hosts, no downloads."""
    changes = {"dry_run": True, "download": False, "node_rank": args.node_rank or 0}
    return argparse.Namespace(**{**vars(args), **changes})


def _launcher_options(args: argparse.Namespace, launcher: Launcher, min_nodes: int | None) -> LauncherOptions:
    """Return the options of the launcher. Raises `UsageError` for flags of other launchers."""
    for other in launchers():
        _check_unsupported(args, other.options, launcher)
    if min_nodes is None:
        return options_of(args, launcher.options)
    if "min_nodes" not in {field.name for field in dataclasses.fields(launcher.options)}:
        raise UsageError(_MIN_NODES.format(launcher.name))
    return options_of(args, launcher.options, min_nodes=min_nodes)


def _check_unsupported(args: argparse.Namespace, options: type[Any], launcher: Launcher) -> None:
    """Raise `UsageError` if a flag of the class `options` was given that the launcher does not support."""
    supported = {name for options_class in _option_classes(launcher) for name in arguments_of(options_class)}
    for name, (_, argument) in arguments_of(options).items():
        value = getattr(args, name)
        if name in supported or not value or value == getattr(options, name):
            continue
        value_text = "" if value is True else f" {' '.join(value) if isinstance(value, list) else value}"
        names = [
            other.name
            for other in launchers()
            if any(name in arguments_of(options_class) for options_class in _option_classes(other))
        ]
        raise UsageError(
            f"{argument.flag}{value_text}: not supported by --launcher {launcher.name}; add --launcher "
            f"{' or --launcher '.join(names)}, or leave {argument.flag} out"
        )


def _launcher(args: argparse.Namespace) -> Launcher:
    """Return the launcher of --launcher, or the default for the backend. Raises `UsageError` for an unknown name."""
    if args.launcher is not None:
        return launcher_named(args.launcher)
    backends = [args.backend] if isinstance(args.backend, str) else args.backend or []
    defaults = (launcher for launcher in launchers() if launcher.default_for_backend in backends)
    return next(defaults, launcher_named(DEFAULT_LAUNCHER))


def _split_arguments(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--launcher-args {text!r}: {error}; close the quotes") from error


def _print_commands_of_other_hosts(args: argparse.Namespace, nodes: int, assigns_node_ranks: bool) -> None:
    """Print the command for each other host. Raises `UsageError` if --node-rank is needed and was not given."""
    if nodes == 1 or args.dry_run:
        return
    if args.node_rank in (None, 0):
        other_hosts = range(nodes) if args.node_rank is None else range(1, nodes)
        for node in other_hosts:
            print(_command_for_host(args, None if assigns_node_ranks else node, node), flush=True)
    if args.node_rank is None and not assigns_node_ranks:
        raise UsageError(f"--nodes {args.nodes}: add --node-rank; the lines above show the command for each host")


def _check_rank(
    args: argparse.Namespace, info: RankInfo, environment: Mapping[str, str], layout: Layout | None
) -> None:
    """Raise `UsageError` for arguments that contradict the external launcher of this rank."""
    launcher = find_launcher(info.started_by)
    processes = _largest_size(args)
    hint = launcher.shell_hint if isinstance(launcher, BatchLauncher) and info.size == 1 else ""
    if args.launcher is not None:
        raise UsageError(
            f"--launcher {args.launcher}: {info.started_by} has already started this rank; leave --launcher out{hint}"
        )
    if isinstance(launcher, BatchLauncher):
        uses_devices = args.device != "cpu" and (layout is None or layout.axis is not None)
        launcher.check_tasks(environment, info, processes, uses_devices)
    if processes not in (None, info.size):
        raise UsageError(f"--processes {processes}: {info.started_by} started {info.size}; leave --processes out{hint}")


def _nodes(args: argparse.Namespace, info: RankInfo | None, environment: Mapping[str, str]) -> tuple[int, int | None]:
    """Return the number of nodes (default: those of the allocation), and MIN of --nodes MIN:MAX or None."""
    if info is not None:
        return 1, None
    launcher = _launcher(args)
    allocated = launcher.allocated_nodes(environment) if isinstance(launcher, BatchLauncher) else None
    if args.nodes is None:
        return (1 if allocated is None else allocated), None
    minimum, colon, maximum = args.nodes.rpartition(":")
    if not maximum.isdecimal() or (colon and not minimum.isdecimal()):
        raise UsageError(f"--nodes {args.nodes}: give a number, or MIN:MAX")
    if not colon or allocated is None:
        return int(maximum), int(minimum) if colon else None
    if not int(minimum) <= allocated <= int(maximum):
        raise UsageError(f"--nodes {args.nodes}, but the allocation has {allocated}: leave --nodes out")
    return allocated, int(minimum)


def _processes(
    args: argparse.Namespace,
    info: RankInfo | None,
    environment: Mapping[str, str],
    layout: Layout | None,
    nodes: int,
    options: LauncherOptions,
) -> int:
    if info is not None:
        return info.size
    processes = _largest_size(args)
    if processes is not None:
        # with --nodes MIN:MAX, --processes is the number of ranks on MAX nodes
        max_nodes = int(args.nodes.rpartition(":")[2]) if args.nodes is not None and ":" in args.nodes else 0
        return processes * nodes // max_nodes if max_nodes else processes
    if layout is not None and layout.axis is None:
        return 1
    launcher = _launcher(args)
    if isinstance(launcher, BatchLauncher):
        allocated = launcher.allocated_processes(environment, options)
        if allocated is not None:
            return allocated
    num_gpus = 0 if args.device == "cpu" else num_accelerators()
    return num_gpus * nodes or max(CPU_PROCESSES, nodes)


def _largest_size(args: argparse.Namespace) -> int | None:
    """Return --processes, or the largest of several values."""
    sizes: int | list[int] | None = args.processes
    return max(sizes) if isinstance(sizes, list) else sizes


def _backend(args: argparse.Namespace) -> str | None:
    """Return --backend. Of several, mpi comes first, then shm, because they decide how ranks start."""
    backends: str | list[str] | None = args.backend
    if not isinstance(backends, list):
        return backends
    known = (*BACKEND_NAMES, "horovod")
    for name in backends:
        if name not in known:
            raise UsageError(f"--backend {name}: give {', '.join(known)}")
    backends = [name for name in backends if name != "horovod"]  # Horovod runs next to any backend
    return next((name for name in ("mpi", "shm") if name in backends), backends[0] if backends else None)


def dry_run_or_submit(args: argparse.Namespace, run: Callable[[argparse.Namespace], int] | None = None) -> int | None:
    """Print the commands (--dry-run) or submit a batch job, and return the exit status; None if ranks start here.

    Before that, `run`, the command, is called up to where it would start ranks. So a mistake in its other arguments is
    reported now, and not by a job that has waited in a queue.

    Raises `UsageError` for arguments that cannot start in this environment. All ranks of an external launcher raise
    the same error, so only one of them should print it (`is_reporting_rank`).
    """
    text = getattr(args, "layout", None)
    layout = parse_layout(text) if isinstance(text, str) else None
    launcher = _launcher(args)
    is_submitted = isinstance(launcher, BatchLauncher) and launcher.allocated_nodes(os.environ) is None
    info = rank_info_from_environment(os.environ)
    if info is None:
        for other in launchers():
            if isinstance(other, BatchLauncher):
                _check_unsupported(args, other.batch_options, launcher)
    if args.dry_run and info is not None:
        if info.rank == 0:
            print(f"nothing to start: {info.started_by} has already started {info.size} ranks")
        return 0
    if run is not None and (args.dry_run or is_submitted):
        with stopping_before_ranks(), contextlib.redirect_stdout(io.StringIO()):
            run(_quiet(args))
    if args.dry_run and args.node_rank is None and launcher.launch_per_node:
        _print_for_each_host(args, launcher, layout)
        return 0
    if not args.dry_run and not is_submitted:
        # Check the arguments before a rank waits for others. The command itself prints the commands of other hosts.
        quiet_launch_of(args, layout)
        return None
    launch = launch_of(args, layout=layout)
    if isinstance(launcher, BatchLauncher) and is_submitted:
        return _submit(args, launch, launcher)
    print(_commands_text(launch))
    return 0


def _print_for_each_host(args: argparse.Namespace, launcher: Launcher, layout: Layout | None) -> None:
    """Print the commands of each host, for launchers that are started on each host."""
    nodes, min_nodes = _nodes(args, None, os.environ)
    if _launcher_options(args, launcher, min_nodes).assigns_node_ranks:
        nodes = 1  # all hosts run the same command
    for args.node_rank in range(max(1, nodes)):
        print(f"# on host {args.node_rank}\n" * (nodes > 1) + _commands_text(launch_of(args, layout=layout)))


def _submit(args: argparse.Namespace, launch: Launch, launcher: BatchLauncher) -> int:
    """Submit the command to the batch queue, or print the script (--dry-run)."""
    folder = Path.cwd()
    job = args.command.stem if hasattr(args, "command") else Path(args.workload.partition(":")[0]).stem
    name = f"everyrank-{job}"
    # a --dry-run among the script's arguments belongs to the script
    everyrank_args, script_args = _split_command_line(args)
    arguments = [*(argument for argument in everyrank_args if argument != "--dry-run"), *script_args]
    command = [sys.executable, "-P", "-m", "everyrank", *arguments]
    script = launcher.batch_script(launch, options_of(args, launcher.batch_options), command, folder, name)
    if args.dry_run:
        print(f"{script}\n# in the allocation:\n{_commands_text(launch)}")
        return 0
    path = folder / "runs" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.sbatch"
    number, output = launcher.submit(script, path)
    print(f"submitted job {number}: {path}; its output: {folder / output}")
    return 0


def is_reporting_rank() -> bool:
    """Whether this process prints an error for all ranks of an external launcher."""
    return is_rank_0_of_all(os.environ)


# --- commands as text


def _commands_text(launch: Launch) -> str:
    """Return all commands, quoted for a shell. JOB is a placeholder for the folder of a run."""
    options: LauncherOptions = launch.options
    variables = [f"{name}={value}" for name, value in options.variables.items()]
    prefix = ["env", *variables] if variables else []
    return "\n".join(shlex.join([*prefix, *command]) for command in launch.row.commands(launch, Path("JOB")))


def _command_for_host(args: argparse.Namespace, node_rank: int | None, host: int) -> str:
    """Return the command line for another host, with its --node-rank if it needs one."""
    everyrank_args, script_args = _split_command_line(args)
    arguments = ["everyrank", *everyrank_args]
    if "--node-rank" in arguments:
        index = arguments.index("--node-rank")
        del arguments[index : index + 2]
    arguments += ["--node-rank", str(node_rank)] if node_rank is not None else []
    return f"on host {host}:  {shlex.join([*arguments, *script_args])}"


def _split_command_line(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the arguments of everyrank, and those from the user's script on, with a `--` before it."""
    num_script_args = len(args.command.python_args) if hasattr(args, "command") else 0
    start = len(args.argv) - num_script_args
    if num_script_args and args.argv[start - 1] == "--":
        start -= 1
    return args.argv[:start], args.argv[start:]
