"""Start rank processes: `run_ranks` calls a function on every rank and returns the results by rank.

The processes of a run:

    rank process   runs the function as one rank (worker.py)
    supervisor     the parent of one rank process: forks it, forwards signals, and records how it ended
    launcher       starts the supervisors of a host: a fork server (spawn), torchrun, srun, mpirun, Ray
    fork server    a process that has imported torch and forks the supervisors of a host
    monitor        the part of the caller's process that starts the launcher, watches the files that ranks write to the
                   job's folder, and reports the root cause of a failure

A host is one machine. A node is a host as launchers count them (--nodes).

    launcher.py       the base class of launchers, and the table of them
    spawn.py          launcher: a fork server on this host
    torchrun.py       launcher: torchrun, also on several hosts
    slurm.py          launcher: srun in an allocation, and batch scripts for sbatch
    mpi.py            launcher: mpirun
    ray.py            launcher: a Ray actor for each rank
    ray_driver.py     asks a Ray cluster for the actors
    horovodrun.py     launcher: horovodrun
    job.py            how ranks start (`Launch`), and what they run (`Job`)
    processes.py      run_ranks
    monitor.py        starts, watches and ends the processes of a job
    reports.py        the files of ranks and supervisors in the job's folder; the root cause of a failure
    stalled_ranks.py  diagnoses ranks that do not respond
    autopsy/          explains in one paragraph why a job hangs
    worker.py         runs in each rank process
    supervisor.py     records how a rank process ended
    fork_server.py    imports torch once for all ranks of a host
    zygote.py         a fork server for many jobs of a test suite
    node.py           one task on each node, which starts the ranks there
    rank_info.py      the numbers of one rank among all
    environments.py   which launcher started this process, from its environment variables
    host_info.py      name, addresses, interfaces, cores and GPUs of this host
    signals.py        a request to stop after the current update

The folder imports no torch, because the process in which the user typed the command only waits.
"""

from everyrank.launch.environments import rank_info_from_environment, threads_asked
from everyrank.launch.host_info import CPU_PROCESSES, cgroup_quota, host_memory_bytes, num_accelerators, num_cores
from everyrank.launch.job import Launch
from everyrank.launch.launcher import LAUNCHERS, Launcher, find_launcher, launchers
from everyrank.launch.processes import run_ranks, starts_no_ranks, stop_before_ranks, stopping_before_ranks
from everyrank.launch.rank_info import RankInfo
from everyrank.launch.signals import Stop, catch_signals

__all__ = [
    "CPU_PROCESSES",
    "LAUNCHERS",
    "Launch",
    "Launcher",
    "RankInfo",
    "Stop",
    "catch_signals",
    "cgroup_quota",
    "find_launcher",
    "host_memory_bytes",
    "launchers",
    "num_accelerators",
    "num_cores",
    "rank_info_from_environment",
    "run_ranks",
    "starts_no_ranks",
    "stop_before_ranks",
    "stopping_before_ranks",
    "threads_asked",
]
