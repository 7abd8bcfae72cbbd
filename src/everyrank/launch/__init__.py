"""How processes start: function in, results by rank out. Nothing here knows strategies, models or collectives.

The processes of a run:

    rank process   runs the function as one rank of the world (worker.py)
    supervisor     the parent of one rank process: forks it, passes signals on, and writes down how it ended
    launcher       what starts the supervisors of a host: a fork server (spawn), torchrun, srun, mpirun, Ray
    fork server    a process that has imported torch, and forks the supervisors of a host from itself
    monitor        the part of the caller's process that starts the launcher, watches what the ranks leave in the job's
                   folder, and tells the root cause when one fails

A host is one machine; a node is a host as launchers count them (--nodes).

    hosts.py          names, addresses and interfaces of this host among others
    rank_info.py      the place of one rank process among all; cores and devices of its host
    signals.py        a request to stop after the update in progress
    launcher.py       the table of launchers, and what a row says
    variables.py      the place of a process out of environment variables
    job.py            what is started, and how
    spawn.py          launcher: a fork server on this host
    torchrun.py       launcher: torchrun, also on several hosts
    slurm.py          launcher: srun in an allocation, and batch scripts for sbatch
    mpi.py            launcher: mpirun
    ray.py            launcher: an actor of Ray for each rank
    horovodrun.py     launcher: horovodrun
    environments.py   who started us: the variables of each launcher, read as one full set
    node.py           one task on each node, which starts the ranks there
    supervisor.py     how a rank process ended, whoever started it
    silence.py        ranks that say nothing
    autopsy/          why a job hangs, in one paragraph: what each rank leaves while it runs, and what follows from it
    reports.py        what rank processes and supervisors leave in the job's folder; the root cause of a failure
    monitor.py        start, watch, end
    processes.py      function in, results by rank out
    worker.py         what a rank process runs
    fork_server.py    one import of torch for all ranks of a host
    ray_driver.py     asks a Ray cluster for a place for each rank

Imports no torch: the process of the person who typed the command only waits.
"""

from everyrank.launch.environments import rank_info_from_environment, threads_asked
from everyrank.launch.job import Launch
from everyrank.launch.launcher import LAUNCHERS, Launcher, find_launcher, launchers
from everyrank.launch.processes import run_ranks
from everyrank.launch.rank_info import CPU_PROCESSES, RankInfo, cgroup_quota, num_accelerators, num_cores
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
    "launchers",
    "num_accelerators",
    "num_cores",
    "rank_info_from_environment",
    "run_ranks",
    "threads_asked",
]
