"""How processes start: function in, results by rank out. Nothing here knows strategies, models or collectives.

    hosts.py          names, addresses and interfaces of this host among others
    facts.py          the place of one process among all
    environments.py   who started us: the variables of each launcher, read as one full set
    stop.py           a request to stop after the update in progress
    job.py            what is started, and how
    spawn.py, torchrun.py, slurm.py, mpi.py, ray.py
                      render: the commands of each launcher
    node.py           one task on each node, which starts the ranks there
    guard.py          what stands over each rank, and writes down how it ended
    ranks.py          start, watch, end; the root cause when a rank fails
    silence.py        ranks that say nothing
    processes.py      function in, results by rank out
    worker.py         what runs inside each started process
    ray_driver.py     asks a Ray cluster for a place for each rank

Imports no torch: the process of the person who typed the command only waits.
"""

from everyrank.launch.environments import facts_from_environment, threads_asked
from everyrank.launch.facts import RankFacts, cgroup_quota, num_accelerators, num_cores
from everyrank.launch.job import LAUNCHERS, Launch, Named
from everyrank.launch.processes import run
from everyrank.launch.ranks import RENDER
from everyrank.launch.stop import Stop, listen

__all__ = [
    "LAUNCHERS",
    "RENDER",
    "Launch",
    "Named",
    "RankFacts",
    "Stop",
    "cgroup_quota",
    "facts_from_environment",
    "listen",
    "num_accelerators",
    "num_cores",
    "run",
    "threads_asked",
]
