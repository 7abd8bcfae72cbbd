"""The table of launchers, and what a row of it says."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everyrank.errors import UsageError
from everyrank.launch.rank_info import RankInfo

if TYPE_CHECKING:
    from everyrank.launch.job import Launch

__all__ = [
    "DEFAULT_LAUNCHER",
    "LAUNCHERS",
    "Environment",
    "Launcher",
    "Scheduler",
    "find_launcher",
    "launcher_named",
    "launchers",
]

LAUNCHERS = (
    "spawn",
    "torchrun",
    "slurm",
    "mpi",
    "ray",
    "horovodrun",
)
"""Each is a file of this folder that holds its row as `LAUNCHER`. Adding a launcher is adding its file and its name."""
DEFAULT_LAUNCHER = "spawn"

Variables = Mapping[str, str]


def address_file(directory: Path) -> str:
    """Rank 0 opens a store on a port that the system chooses, and writes down where in the job's folder."""
    return "meet://" + (directory / "address").absolute().as_uri().removeprefix("file://")


@dataclass(frozen=True)
class Launcher:
    """One way of starting rank processes: a row of the table, defined in the launcher's own file.

    name                  as --launcher takes it, and as Records have it
    render                (launch, the job's folder) -> the argv of each process to start on this host. Each ends in
                          [*WORKER, str(folder)]; without an `environment` RANK LOCAL_RANK LOCAL_SIZE follow (worker.py)
                          or [*FORK_SERVER, str(folder), FIRST, COUNT], which starts them all (fork_server.py)
    find                  where it is on this machine, in words; raises `CannotRunError` where it is not
    check                 raises `UsageError` for a `Launch` that it cannot start
    check_start           raises `UsageError` where it cannot start one from this environment
    default_rendezvous    (the job's folder) -> where its ranks meet, unless somebody names a place
    render_on_node        (the node's task, ranks of the node, the job's folder) -> the argv of each process that a task
                          of node.py starts; None where it starts no ranks of one node

    options               the dataclass of its own options (`Launch.options`); None: it has none
    add_arguments         adds its own flags to a group of argparse
    read_options          (the parsed words, whether it is the launcher) -> its options; raises `UsageError`, also for
                          options of its own beside another launcher
    takes_arguments       whether further words (--launcher-args) can be handed on to it
    rank_launcher         (its options) -> the name of the launcher that starts the rank processes, where that is
                          another one; None: itself

    one_command_per_host  the command is typed on each host, and starts the ranks of that host
    assigns_node_ranks    (its options) -> whether a host need not be told which one it is
    restarts_ranks        (its options) -> whether it starts all ranks again after a failure
    min_nodes             (its options) -> it goes on with so few hosts, and takes new ones in; None: the number stays
    min_processes         (its options) -> the same for ranks, where it chooses the hosts itself
    limits_start          (its options) -> whether it has a limit of its own for the wait until its ranks start
    variables             (its options) -> what it wants in its environment
    starts_supervisors    what is started here are the supervisors themselves, one for each rank, or a fork server over
                          them; else a program of the launcher's stands between, whose messages go to a log
    reads_job_folder      its ranks may be on other hosts, which read the job's folder: it is on shared storage
    rank_0_is_here        rank 0 runs on the host on which the command is typed
    needs_sigterm         it ends its ranks in order when it gets SIGTERM; without one they may stay
    terminates_ranks      it sends SIGTERM to ranks when another has failed: there that is no request to save
    has_own_rendezvous    it tells its ranks where they meet
    output_mark           a regular expression of what it puts before each line that rank 0 prints; None: nothing
    trusts_address        (a host's address) -> whether one that other hosts may not reach (loopback) is meant

    own_backend           the backend that ranks of no other launcher can have: with it this launcher is the default

    environment           what its processes find in their environment; None: nothing of its own
    scheduler             for a launcher with a batch queue
    needs_program         (a program that has to be here, how to get it), for `everyrank doctor`
    needs_package         the same of a Python package
    """

    name: str
    render: Callable[[Launch, Path], list[list[str]]]
    find: Callable[[], str]
    check: Callable[[Launch], None] = lambda _: None
    check_start: Callable[[Launch, Variables], None] = lambda _, __: None
    default_rendezvous: Callable[[Path], str] = address_file
    render_on_node: Callable[[RankInfo, int, str], list[list[str]]] | None = None
    options: type[Any] | None = None
    add_arguments: Callable[[Any], None] = lambda _: None
    read_options: Callable[[argparse.Namespace, bool], Any] = lambda _, __: None
    takes_arguments: bool = True
    rank_launcher: Callable[[Any], str | None] = lambda _: None
    one_command_per_host: bool = False
    assigns_node_ranks: Callable[[Any], bool] = lambda _: False
    restarts_ranks: Callable[[Any], bool] = lambda _: False
    min_nodes: Callable[[Any], int | None] = lambda _: None
    min_processes: Callable[[Any], int | None] = lambda _: None
    limits_start: Callable[[Any], bool] = lambda _: False
    variables: Callable[[Any], Mapping[str, str]] = lambda _: {}
    starts_supervisors: bool = False
    reads_job_folder: bool = False
    rank_0_is_here: bool = True
    needs_sigterm: bool = False
    terminates_ranks: bool = False
    has_own_rendezvous: bool = False
    output_mark: bytes | None = None
    trusts_address: Callable[[str], bool] = lambda _: False
    own_backend: str | None = None
    environment: Environment | None = None
    scheduler: Scheduler | None = None
    needs_program: tuple[str, str] | None = None
    needs_package: tuple[str, str] | None = None


@dataclass(frozen=True)
class Environment:
    """What the processes that a launcher has started find in their environment.

    program         what starts them: mpirun, srun
    depth           launchers are nested (torchrun in mpirun in srun), and the innermost started this process: of
                    several full sets that of the greatest depth counts: slurm 1, mpi 2, horovodrun 3, the six of
                    a person 4, torchrun 5
    rank_variables  the variable that holds the rank, in each version of the launcher
    sets_threads    it sets OMP_NUM_THREADS=1 where nobody has: the number counts that stood there before
    marker          a variable without which these are not the launcher's own; None: they always are
    read            (variables) -> the ranks they give this process; None where the set is not complete
    missing         (variables) -> (names that are there, names that are not) of an incomplete set that has the rank;
                    ([], []) for any other
    check_nested    (variables, the launcher inside) raises `UsageError` where it should have been started otherwise
    check_started   (variables, the ranks they give, the ranks that were asked for, whether it would use all
                    devices) raises `UsageError` where other tasks were started than were meant
    shell_hint      ends an error of a single rank: it may be a shell that was started by the launcher
    """

    program: str
    depth: int
    rank_variables: Sequence[str]
    read: Callable[[Variables], RankInfo | None]
    marker: str | None = None
    sets_threads: bool = False
    missing: Callable[[Variables], tuple[list[str], list[str]]] = lambda _: ([], [])
    check_nested: Callable[[Variables, Launcher], None] = lambda _, __: None
    check_started: Callable[[Variables, RankInfo, int | None, bool], None] = lambda *_: None
    shell_hint: str = ""


@dataclass(frozen=True)
class Scheduler:
    """What a batch scheduler adds to a launcher.

    has_allocation       whether this process is inside a job; outside of one the command is submitted
    allocated_nodes      of the job; None outside of one
    allocated_processes  (variables, options) -> tasks of the job, where each is a rank; None where it does not say
    check_forgotten      raises `UsageError` in a job of several tasks when nobody has said how to use them
    check_options        raises `UsageError` for options of a batch job beside another launcher
    script               (launch, the parsed words, the command to run, its folder, the job's name) -> the batch script
    submit               (script, the file to write it to) -> the number of the job; raises `CannotRunError`
    output               (the number of the job) -> the name of the file in which it prints
    """

    has_allocation: Callable[[Variables], bool]
    allocated_nodes: Callable[[Variables], int | None]
    allocated_processes: Callable[[Variables, Any], int | None]
    check_forgotten: Callable[[Variables], None]
    check_options: Callable[[argparse.Namespace], None]
    script: Callable[[Launch, argparse.Namespace, Sequence[str], Path, str], str]
    submit: Callable[[str, Path], str]
    output: Callable[[str], str]


def launcher_named(name: str) -> Launcher:
    """The row of a launcher. Raises `UsageError` for a name that none has."""
    if name not in LAUNCHERS:
        raise UsageError(f"--launcher {name}: give one of {', '.join(LAUNCHERS)}")
    row: Launcher = importlib.import_module(f"everyrank.launch.{name}").LAUNCHER
    return row


def find_launcher(name: str) -> Launcher | None:
    """The row of whatever has started a rank (`RankInfo.started_by`); None where that was a person."""
    return launcher_named(name) if name in LAUNCHERS else None


def launchers() -> list[Launcher]:
    """All rows, in the order of the table."""
    return [launcher_named(name) for name in LAUNCHERS]
