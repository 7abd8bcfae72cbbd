"""Turns a script for one device into one for several processes, and checks that it trains the same.

run.py         observes the script, edits it, checks the result, tries another choice
files.py       the script, and another file that is edited with it
facts.py       the expressions that a run evaluated, with their positions
source.py      the script's text, and edits of it
idioms.py      the calls of Accelerate and Fabric
plan.py        the state that the edits of one port share
edits.py       the order of all edits; loaders and batches
states.py      hidden states that a loop passes from batch to batch
model.py       the wrapper of each model
shards.py      FSDP in place of the wrapper
prepare.py     Accelerate or Fabric in place of the wrapper
loss.py        the loss of each backward
accumulation.py  one all-reduce for each update of several backwards
evaluation.py  counts of the training loop, and evaluations
outputs.py     files, folders, progress bars
frame.py       imports, helper functions, start and end, random numbers
names.py       other names for added functions whose names the script uses
helpers.py     the functions in plain PyTorch that are added to a port
check.py       the comparison of a port with the original
to_workload/   turns the script into the file of a workload, and compares the two
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
