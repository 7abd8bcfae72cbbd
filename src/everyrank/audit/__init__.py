"""Runs a user's script unchanged, records how it trains, and reports silent mistakes with file and line.

examine.py       the call from start to end
command_line.py  the script in a command line of torchrun, accelerate, deepspeed or python
script.py        what can be read from a script before it runs
start.py         starts its processes, waits for them and ends them
guardian.py      ends processes that the script has started, even if the audit is killed
outside.py       the audit inside ranks that torchrun has started
watch/           hooks of torch in the script's processes, which record events
replay/          --replay: runs the first updates again, in one process and float64
events.py        one class for each kind of event
evidence.py      the recorded events, by rank
rules/           one kind of mistake a file
finding.py       what a rule reports
likely_lines.py  the lines to look at for a finding, most likely first
data_flow.py     which lines of a file lead to a line

Only watch/ and replay/ import torch. Nothing here knows workloads, layouts or strategies.
"""

from everyrank.audit.examine import Audit, AuditOptions, ScriptFailedError, audit_script
from everyrank.audit.finding import LEVELS, Finding, short_place

__all__ = ["LEVELS", "Audit", "AuditOptions", "Finding", "ScriptFailedError", "audit_script", "short_place"]
