"""The base class of launchers, and the table of them. A launcher is a way to start rank processes."""

from __future__ import annotations

import difflib
import importlib
import shlex
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everyrank.errors import CannotRunError, UsageError
from everyrank.launch.rank_info import RankInfo, rank_info_of_task, whole_numbers

if TYPE_CHECKING:
    from everyrank.launch.job import Launch

__all__ = [
    "DEFAULT_LAUNCHER",
    "LAUNCHERS",
    "BatchLauncher",
    "Launcher",
    "LauncherOptions",
    "find_launcher",
    "launcher_named",
    "launchers",
    "run_program",
]

LAUNCHERS = (
    "spawn",
    "torchrun",
    "slurm",
    "mpi",
    "ray",
    "horovodrun",
)
"""Each name is a file in this folder that defines `LAUNCHER`, an instance of its subclass of `Launcher`."""
DEFAULT_LAUNCHER = "spawn"
_ANSWER_SECONDS = 120.0


@dataclass(frozen=True)
class LauncherOptions:
    """The options of a launcher, and what everyrank derives from them. The base class has none.

    A subclass is a frozen dataclass. Each field annotated with an `Argument` becomes a flag of the command line:

        restarts: Annotated[int, Argument("start all ranks again up to K times", "K")] = 0

    min_nodes, min_processes  fields of launchers that can run with fewer nodes or ranks; None: the number is fixed
    """

    # Without annotations these are not dataclass fields, so a subclass declares the one that it supports.
    min_nodes = None
    min_processes = None

    @property
    def restarts_ranks(self) -> bool:
        """Whether the launcher starts all ranks again after a failure."""
        return False

    @property
    def is_elastic(self) -> bool:
        """Whether ranks may join a running job, so that the launcher limits the wait for them, not everyrank."""
        return False

    @property
    def assigns_node_ranks(self) -> bool:
        """Whether the launcher numbers the nodes, so that `--node-rank` is not needed."""
        return False

    @property
    def rank_launcher(self) -> str | None:
        """The name of a second launcher that starts the ranks on each node; None: this launcher starts them."""
        return None

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables to set for the launcher's own process."""
        return {}


class Launcher(ABC):
    """A way to start rank processes. A subclass has a `name`, overrides `commands`, and changes what differs.

    name                    as typed after --launcher, and as stored in Records
    options                 the dataclass of its options (`Launch.options`)
    program                 the program that starts the ranks, for messages and `everyrank doctor`: mpirun, srun
    package                 the Python package it needs, for `everyrank doctor`
    install_hint            how to install that program or package; "": `everyrank doctor` does not look for it
    accepts_arguments       --launcher-args are passed to it (`Launch.arguments`)
    supports_nodes          it can start ranks on several hosts (--nodes)
    launch_per_node         the command is typed on each node and starts the ranks of that node only
    needs_shared_folder     ranks on other hosts read the job's folder, which therefore is below the home directory
    graceful_shutdown       it needs SIGTERM to end its ranks; after SIGKILL some would stay
    terminates_on_failure   it sends SIGTERM to the other ranks when one fails, so SIGTERM is not a request to save
    provides_rendezvous     it gives its ranks the address of the rendezvous
    line_prefix             regular expression of what it prints before each line of rank 0; None: nothing
    default_for_backend     the backend that only its ranks can use; with that backend it is the default launcher
    starts_horovod          ranks of Horovod find each other under it

    node_variables          environment variables for the number of this host, and of hosts. Without them, hosts are
                            taken to have the same number of ranks, in order

    How a process recognizes that this launcher has started it (`rank_info`):

    rank_variables    environment variables for rank, local rank, world size and local world size; one tuple for each
                      version of the launcher, the rank first. Empty: its ranks find their numbers in their command
    nesting_level     launchers may be nested, and the innermost counts: slurm 1, mpi 2, horovodrun 3, variables set
                      by the user 4, torchrun 5
    marker_variable   variable that tells its ranks from those that a user starts with the same variables; a launcher
                      with a marker also sets OMP_NUM_THREADS=1
    """

    name: str
    options: type[LauncherOptions] = LauncherOptions
    program: str = ""
    package: str = ""
    install_hint: str = ""
    accepts_arguments: bool = False
    supports_nodes: bool = False
    launch_per_node: bool = False
    needs_shared_folder: bool = False
    graceful_shutdown: bool = False
    terminates_on_failure: bool = False
    provides_rendezvous: bool = False
    line_prefix: bytes | None = None
    default_for_backend: str | None = None
    starts_horovod: bool = False
    node_variables: tuple[str, str] | None = None
    rank_variables: Sequence[tuple[str, ...]] = ()
    nesting_level: int = 0
    marker_variable: str | None = None

    @abstractmethod
    def commands(self, launch: Launch, job_folder: Path) -> list[list[str]]:
        """Return the commands to start on this host.

        Each ends with `[*WORKER, str(job_folder)]`, followed by `RANK LOCAL_RANK LOCAL_WORLD_SIZE` if the launcher sets
        no variables with these numbers.
        """

    def find(self) -> str:
        """Return where the launcher is on this machine. Raises `CannotRunError` if it is not installed."""
        if not self.program:
            return "starts in this Python"
        path = shutil.which(self.program)
        if path is None:
            hint = f"; {self.install_hint}" if self.install_hint else ""
            raise CannotRunError(f"--launcher {self.name}: {self.program} was not found on PATH{hint}")
        return path

    def check(self, launch: Launch) -> None:  # noqa: B027  (most launchers support every `Launch`)
        """Raise `UsageError` for a `Launch` that this launcher does not support."""

    def rank_info(self, environment: Mapping[str, str]) -> RankInfo | None:
        """Return the rank of a process started by this launcher; None if its variables are missing or incomplete."""
        for names in self.rank_variables:
            if all(environment.get(name) for name in names):
                rank, local_rank, size, local_size = whole_numbers(environment, names)
                return rank_info_of_task(self.name, environment, (rank, local_rank, size, local_size))
        return None

    def explain(self, last_line: str, launch: Launch) -> str:
        """Return what the last line of the launcher's log means to the user; by default the line itself."""
        del launch
        return last_line

    def allow_loopback(self, host: str) -> bool:
        """Whether ranks may meet at this address without a check that other hosts can reach it."""
        del host
        return False


class BatchLauncher(Launcher):
    """A launcher with a batch queue. Inside an allocation it starts ranks; outside, the command is submitted.

    batch_options   dataclass of the options of a batch job, as flags of the command line
    shell_hint      end of error messages in a process that may be an interactive shell of the scheduler
    """

    batch_options: type[Any]
    shell_hint: str = ""

    @abstractmethod
    def allocated_nodes(self, environment: Mapping[str, str]) -> int | None:
        """Return the number of nodes of the allocation; None outside of one."""

    @abstractmethod
    def allocated_processes(self, environment: Mapping[str, str], options: Any) -> int | None:
        """Return the number of ranks for which the allocation was made; None if unknown."""

    @abstractmethod
    def check_unused(self, environment: Mapping[str, str]) -> None:
        """Raise `UsageError` in an allocation of several tasks if no launcher was given."""

    @abstractmethod
    def check_allocation(self, launch: Launch, environment: Mapping[str, str]) -> None:
        """Raise `UsageError` if there is no allocation or it does not match `launch`."""

    @abstractmethod
    def check_nested(self, environment: Mapping[str, str], inner: Launcher) -> None:
        """Raise `UsageError` if its tasks do not fit a launcher that runs inside of them."""

    @abstractmethod
    def check_tasks(
        self, environment: Mapping[str, str], info: RankInfo, processes: int | None, uses_devices: bool
    ) -> None:
        """Raise `UsageError` if fewer tasks were started than `processes`, or than a node has GPUs."""

    @abstractmethod
    def batch_script(self, launch: Launch, batch: Any, command: Sequence[str], folder: Path, name: str) -> str:
        """The script of a batch job called `name`, which runs `command` in `folder`. `batch`: its `batch_options`."""

    @abstractmethod
    def submit(self, script: str, path: Path) -> tuple[str, str]:
        """Write the script to `path` and submit it; (job number, name of its output file)."""


def launcher_named(name: str) -> Launcher:
    """Return the launcher of this name. Raises `UsageError` for an unknown one."""
    if name not in LAUNCHERS:
        close = difflib.get_close_matches(name, LAUNCHERS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UsageError(f"--launcher {name}: unknown launcher; {hint}give one of {', '.join(LAUNCHERS)}")
    launcher: Launcher = importlib.import_module(f"everyrank.launch.{name}").LAUNCHER
    return launcher


def find_launcher(name: str) -> Launcher | None:
    """Return the launcher that started a rank (`RankInfo.started_by`); None if the user set the variables."""
    return launcher_named(name) if name in LAUNCHERS else None


def launchers() -> list[Launcher]:
    """Return all launchers, in the order of the table."""
    return [launcher_named(name) for name in LAUNCHERS]


def run_program(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a program of a launcher, such as sbatch, and return its output.

    Raises `CannotRunError` if it cannot be started or does not end.
    """
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        reason = f"it did not end within {_ANSWER_SECONDS:g} s"
    except OSError as error:
        reason = error.strerror or str(error)
    raise CannotRunError(f"{shlex.join(command)}: {reason}; check that this command works here")
