"""How processes start: function in, results by rank out. Nothing here knows strategies, models or collectives.

    facts.py       who am I: the rank facts of one process, from whoever started it
    stop.py        a request to stop after the update in progress
    job.py         what is started, and how
    spawn.py       render: one command per rank
    torchrun.py    render: one command that starts them all
    ranks.py       start, watch, end; the root cause when a rank fails
    processes.py   function in, results by rank out
    worker.py      what runs inside each started process

Imports no torch: the process of the person who typed the command only waits.
"""

from everyrank.launch.facts import RankFacts, facts_from_environment, num_accelerators, num_cores
from everyrank.launch.job import LAUNCHERS, Launch, Named
from everyrank.launch.processes import run
from everyrank.launch.stop import Stop, listen

__all__ = [
    "LAUNCHERS",
    "Launch",
    "Named",
    "RankFacts",
    "Stop",
    "facts_from_environment",
    "listen",
    "num_accelerators",
    "num_cores",
    "run",
]
