"""Words that say how ranks start, for the commands that start some; and what is done instead of starting them."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from everyrank.errors import UsageError
from everyrank.launch import LAUNCHERS, RENDER, Launch, RankFacts, facts_from_environment, num_accelerators, slurm
from everyrank.launch.environments import whole_number
from everyrank.launch.job import RENDEZVOUS
from everyrank.layout import Layout, parse_layout

__all__ = ["add_launching", "instead", "is_reporting_rank", "launch_of"]


def add_launching(parser: argparse.ArgumentParser, default_processes: int, several_sizes: bool = False) -> None:
    """--processes, --launcher and what belongs to them. `default_processes`: where there is no accelerator."""
    parser.set_defaults(default_processes=default_processes)
    ranks = "ranks in all, on all nodes; default: the visible accelerators"
    if several_sizes:
        parser.add_argument(
            "--processes", type=int, nargs="+", metavar="N", help=f"{ranks}. Several (1 2 4): how each layout scales"
        )
    else:
        parser.add_argument("--processes", type=int, metavar="N", help=ranks)
    words = parser.add_argument_group("launching", "where and how the ranks start")
    words.add_argument("--launcher", metavar="X", help=f"{', '.join(LAUNCHERS)} (default: spawn)")
    words.add_argument("--device", metavar="D", help="cpu or cuda; default: cuda where there is one")
    words.add_argument("--backend", metavar="B", help="gloo or nccl; default: nccl with a CUDA device for each rank")
    words.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="longest wait for another rank, in seconds"
    )
    words.add_argument("--dry-run", action="store_true", help="print what would run, and run nothing")
    words.add_argument("--nodes", metavar="N", help="hosts; MIN:MAX for torchrun that goes on with fewer")
    words.add_argument("--node-rank", type=int, metavar="K", help="which of them this is, where each is typed on")
    words.add_argument("--rendezvous", metavar="HOST:PORT", help="where they meet: HOST is node 0")
    words.add_argument(
        "--rendezvous-kind", default="static", metavar="R", help=f"torchrun's: {' or '.join(RENDEZVOUS)}"
    )
    words.add_argument("--interface", metavar="I", help="network interface between hosts; default: the way to HOST")
    words.add_argument(
        "--init-method", metavar="M", help="env, tcp://HOST:PORT or file:///PATH; default: what suits the launcher"
    )
    words.add_argument("--restarts", type=int, default=0, metavar="K", help="torchrun: start all ranks again so often")
    words.add_argument("--per-node", metavar="P", help="slurm: one task a node, and in it spawn or torchrun")
    words.add_argument(
        "--sbatch", nargs="+", action="extend", default=[], metavar="K=V", help="slurm: any options of sbatch"
    )
    words.add_argument("--prologue", type=Path, metavar="F", help="slurm: a file of commands that come before")
    words.add_argument("--requeue", action="store_true", help="slurm: preempted or out of time: save, and queue again")
    words.add_argument("--address", metavar="A", help="ray: of the cluster; default: one on this machine")
    words.add_argument("--launcher-args", default="", metavar="'...'", help="further words for mpirun, srun, torchrun")


def launch_of(args: argparse.Namespace, logs: Path | None = None, layout: Layout | None = None) -> Launch:
    """How to start, from the words and from who started this process. Raises `UsageError` where the two disagree.

    A `layout` of one process has one, unless another number was asked for.
    """
    facts = facts_from_environment(os.environ)
    if facts is not None:
        _check_started(args, facts, os.environ, layout)
    elif args.launcher is None:
        _check_forgotten_srun(os.environ)
    launcher = args.launcher or "spawn"
    nodes, min_nodes = _nodes(args, facts, os.environ)
    if facts is None and launcher in ("spawn", "torchrun") and args.rendezvous is not None:
        _tell_other_hosts(args, nodes, is_told=launcher == "torchrun" and args.rendezvous_kind == "c10d")
    return Launch(
        launcher=launcher,
        processes=_processes(args, facts, os.environ, layout, nodes),
        device=args.device,
        backend=args.backend,
        loader_workers=args.workers,
        timeout_seconds=args.timeout,
        logs=logs,
        nodes=nodes,
        min_nodes=min_nodes,
        node_rank=args.node_rank,
        rendezvous=args.rendezvous,
        rendezvous_kind=args.rendezvous_kind,
        restarts=args.restarts,
        per_node=args.per_node,
        init_method=args.init_method,
        interface=args.interface,
        address=args.address,
        arguments=_split(args.launcher_args),
    )


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
        print("\n".join(_typed_on(args.words, None if is_told else node, node) for node in others), flush=True)
    if args.node_rank is None and not is_told:
        raise UsageError(f"--nodes {args.nodes}: which of them is this? type the line above of each host there")


def _check_started(
    args: argparse.Namespace, facts: RankFacts, environment: Mapping[str, str], layout: Layout | None
) -> None:
    """Words that contradict whoever has started this rank."""
    is_shell = facts.started_by == "slurm" and facts.size == 1
    hint = " (in a shell that srun has started: unset SLURM_STEP_ID)" if is_shell else ""
    if args.launcher is not None:
        raise UsageError(
            f"--launcher {args.launcher}: {facts.started_by} has already started this rank; leave it out{hint}"
        )
    nodes = whole_number(environment, "SLURM_NNODES", "1") if facts.started_by == "slurm" else 1
    asked = _asked(args)
    if asked not in (None, facts.size):
        if facts.started_by == "slurm" and facts.size == nodes and asked % nodes == 0:
            raise UsageError(
                f"--processes {asked}, but srun started one task on each of {nodes} nodes: "
                f"srun --ntasks-per-node={asked // nodes}"
            )
        raise UsageError(f"--processes {asked}: {facts.started_by} started {facts.size}; leave it out{hint}")
    cards = environment.get("SLURM_GPUS_ON_NODE", "")
    idle = int(cards) - facts.local_size if cards.isdecimal() and facts.started_by == "slurm" else 0
    if idle > 0 and args.processes is None and args.device != "cpu" and (layout is None or layout.axis is not None):
        tasks = f"{facts.local_size} task{'s' * (facts.local_size > 1)}"
        raise UsageError(
            f"srun started {tasks} on a node with {cards} GPUs, of which {idle} would be idle: "
            f"srun --ntasks-per-node={cards} (or --processes {facts.size} if that is meant)"
        )


def _check_forgotten_srun(environment: Mapping[str, str]) -> None:
    """In an allocation of several tasks, without srun: the ranks would all start on this node."""
    job, nodes = environment.get("SLURM_JOB_ID"), environment.get("SLURM_NNODES", "1")
    tasks = environment.get("SLURM_NTASKS", "1")
    if job is not None and (nodes, tasks) != ("1", "1"):
        raise UsageError(
            f"this is Slurm job {job} of {tasks} tasks on {nodes} node{'s' * (nodes != '1')}, and nobody said how to "
            "use them: --launcher slurm (or srun before the command), or --launcher spawn for this node alone"
        )


def _nodes(args: argparse.Namespace, facts: RankFacts | None, environment: Mapping[str, str]) -> tuple[int, int | None]:
    """(nodes, at least so many); those of the allocation where nothing was said."""
    if facts is not None:
        return 1, None
    if args.nodes is None:
        is_in_allocation = args.launcher == "slurm" and "SLURM_JOB_ID" in environment
        return (whole_number(environment, "SLURM_NNODES", "1") if is_in_allocation else 1), None
    least, colon, most = args.nodes.rpartition(":")
    if not most.isdecimal() or (colon and not least.isdecimal()):
        raise UsageError(f"--nodes {args.nodes}: give a number, or MIN:MAX")
    return int(most), int(least) if colon else None


def _processes(
    args: argparse.Namespace,
    facts: RankFacts | None,
    environment: Mapping[str, str],
    layout: Layout | None,
    nodes: int,
) -> int:
    if facts is not None:
        return facts.size
    asked = _asked(args)
    if asked is not None:
        return asked
    if layout is not None and layout.axis is None:
        return 1
    tasks = environment.get("SLURM_NTASKS", "")
    if args.launcher == "slurm" and tasks.isdecimal() and args.per_node is None:
        return int(tasks)
    here = 0 if args.device == "cpu" else num_accelerators()
    return here * nodes or max(args.default_processes, nodes)


def _asked(args: argparse.Namespace) -> int | None:
    """--processes; of several, the most."""
    asked: int | list[int] | None = args.processes
    return max(asked) if isinstance(asked, list) else asked


def instead(args: argparse.Namespace) -> int | None:
    """What is done instead of starting ranks from here: a dry run, or a batch job. None where neither was asked for.

    The exit status otherwise. Raises `UsageError` for words and an environment that no start can come of: all ranks
    of a launcher outside see the same, so one of them is to say it (`is_reporting_rank`).
    """
    layout = getattr(args, "layout", None)
    one = parse_layout(layout) if isinstance(layout, str) else None
    is_queued = args.launcher == "slurm" and "SLURM_JOB_ID" not in os.environ
    facts = facts_from_environment(os.environ)
    words = {"--sbatch": args.sbatch, "--prologue": args.prologue, "--requeue": args.requeue}
    for flag, value in words.items():
        if value and args.launcher != "slurm" and facts is None:
            shown = "" if value is True else f" {value if isinstance(value, Path) else ' '.join(value)}"
            raise UsageError(f"{flag}{shown}: it is Slurm that has batch jobs; give --launcher slurm too")
    if args.dry_run and facts is not None:
        if facts.rank == 0:
            print(f"nothing is left to start: {facts.started_by} has started rank 0 of {facts.size}")
        return 0
    if args.dry_run and args.node_rank is None and args.launcher in (None, "spawn", "torchrun"):
        # with c10d, hosts find their places: the command is the same on each but for what it finds out there
        nodes = _nodes(args, None, os.environ)[0] if args.rendezvous_kind == "static" else 1
        for args.node_rank in range(max(1, nodes)):
            print(f"# on host {args.node_rank}\n" * (nodes > 1) + _rendered(launch_of(args, layout=one)))
        return 0
    if not args.dry_run and not is_queued:
        # the words are looked at before a rank is waited for; the command itself prints what others have to type
        launch_of(argparse.Namespace(**{**vars(args), "dry_run": True, "node_rank": args.node_rank or 0}), layout=one)
        return None
    launch = launch_of(args, layout=one)
    if not is_queued:
        print(_rendered(launch))
        return 0
    folder = Path.cwd()
    name = f"everyrank-{Path(args.workload.partition(':')[0]).stem}"
    batch = slurm.Batch(_options(args.sbatch), args.prologue, args.requeue)
    command = [sys.executable, "-P", "-m", "everyrank", *(word for word in args.words if word != "--dry-run")]
    text = slurm.script(launch, batch, command, folder, name)
    if args.dry_run:
        print(f"{text}\n# in the allocation:\n{_rendered(launch)}")
        return 0
    path = folder / "runs" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.sbatch"
    job = slurm.submit(text, path)
    print(f"submitted job {job}: {path}; what it prints: {folder / f'slurm-{job}.out'}")
    return 0


def is_reporting_rank() -> bool:
    """Whether this process is the one that reports an error for all that a launcher outside has started with it."""
    names = ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"]
    names += ["RANK"] if "TORCHELASTIC_RUN_ID" in os.environ else []  # a person may have started this one alone
    return all(os.environ.get(name, "0") == "0" for name in names)


def _options(words: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        key, _, value = word.partition("=")
        found[key.lstrip("-")] = value
    return found


def _rendered(launch: Launch) -> str:
    """Every command, ready to be read; JOB is a folder made for each run."""
    return "\n".join(shlex.join(command) for command in RENDER[launch.launcher](launch, Path("JOB")))


def _typed_on(typed: Sequence[str], node_rank: int | None, host: int) -> str:
    """What was typed, for another host; there it may have to be told which one it is."""
    words = ["everyrank", *typed]
    if "--node-rank" in words:
        place = words.index("--node-rank")
        del words[place : place + 2]
    words += ["--node-rank", str(node_rank)] if node_rank is not None else []
    return f"on host {host}:  {shlex.join(words)}"
