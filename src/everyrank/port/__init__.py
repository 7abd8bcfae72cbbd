"""Turns a script for one device into one for several processes, and checks that it trains the same.

run.py         observes the script, edits it, checks the result, tries another choice
files.py       the script, and another file that is edited with it
facts.py       what was seen of a run: expressions with their places
source.py      the script's text, edited in place
idioms.py      the words of Accelerate and Fabric
plan.py        a port in the making, which the edits share
edits.py       the order of all edits; loaders and batches
states.py      hidden states that are carried from batch to batch
model.py       the wrapper of each model
shards.py      FSDP in place of the wrapper
prepare.py     Accelerate or Fabric in place of the wrapper
loss.py        the loss of each backward
accumulation.py  one all-reduce for each update of several backwards
evaluation.py  counts of the training loop, and evaluations
outputs.py     files, folders, progress bars
frame.py       imports, helper functions, start and end, random numbers
helpers.py     the functions in plain PyTorch that a port brings along
check.py       the comparison of a port with the original
to_workload/   the script as the file of a workload, compared with the script
"""

from everyrank.port.files import ScriptFiles
from everyrank.port.idioms import IDIOMS, check_installed
from everyrank.port.run import Attempt, PortResult, audit_port, check_ported, port_script
from everyrank.port.source import NotPortedError
from everyrank.port.to_workload import WorkloadResult, port_to_workload

__all__ = [
    "IDIOMS",
    "Attempt",
    "NotPortedError",
    "PortResult",
    "ScriptFiles",
    "WorkloadResult",
    "audit_port",
    "check_installed",
    "check_ported",
    "port_script",
    "port_to_workload",
]
