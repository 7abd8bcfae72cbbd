"""How processes start: function in, results by rank out. Nothing here knows strategies, models or collectives.

    facts.py       who am I: the rank facts of one process, from whoever started it
    spawn.py       render: one command per rank
    torchrun.py    render: one command that starts them all
    processes.py   start, watch, end; the first error of any rank is raised in the caller
    worker.py      what runs inside each started process

Imports no torch: the process of the person who typed the command only waits.
"""

from everyrank.launch.facts import RankFacts, facts_from_environment, num_accelerators
from everyrank.launch.processes import Launch, Named, run

__all__ = ["Launch", "Named", "RankFacts", "facts_from_environment", "num_accelerators", "run"]
