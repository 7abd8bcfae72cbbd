"""`everyrank chaos`: injects faults into a real training, and checks detection, recovery and the resumed result.

faults.py           the table of faults, and how each must be reported
inject.py           injects a fault in a rank before one update, through `TrainOptions.before_update`
trainer_process.py  a process that trains like `everyrank train`, with an injected fault
two_hosts.py        runs such processes in two network namespaces with a link between them
trainer_run.py      starts trainer_process.py, watches it, and counts processes that do not end
campaign.py         trains a baseline, then for each fault: inject, resume, compare

A training does not import this package. The loop only calls a hook before each update.
"""

from everyrank.chaos.campaign import run_campaign
from everyrank.chaos.faults import FAULTS, Fault

__all__ = ["FAULTS", "Fault", "run_campaign"]
