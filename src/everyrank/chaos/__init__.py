"""Faults put into a real training on purpose: who notices, how soon, and whether the run afterwards is the same run.

faults.py    the faults there are: what each does, and what has to come of it
inject.py    inside a rank: a fault at one update, through `TrainOptions.before_update`
person.py    a process that trains as `everyrank train` does, with a fault in it
two_hosts.py the same call on two hosts of this machine, with a link between them
attempt.py   starts that process, watches it, and sees what is left of it
run_campaign.py   a training that nothing happens to, then each fault: strike, recover, compare

Nothing here is imported by a training: the loop knows a hook before each update, and no fault.
"""

from everyrank.chaos.campaign import run_campaign
from everyrank.chaos.faults import FAULTS, Fault

__all__ = ["FAULTS", "Fault", "run_campaign"]
