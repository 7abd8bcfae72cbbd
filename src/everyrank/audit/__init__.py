"""Runs a user's script unchanged, records how it trains, and reports silent mistakes with file and line.

examine.py       `audit_script`: starts the script, reads its events, and runs the rules
command_line.py  the script in a command line of torchrun, accelerate, deepspeed or python
script.py        reads the source of a script before it runs: whether it can run, and how to start it
start.py         starts the script's processes, waits for them and ends them
guardian.py      ends the script's processes even if the audit is killed
external_launch.py  audits ranks that torchrun or another launcher has started
watch/           hooks of torch in the script's processes, which record events
replay/          --replay: runs the first updates again, in one process and float64
events.py        one class for each kind of event
evidence.py      the recorded events, by rank
rules/           find mistakes in the events: one kind of mistake in each file
finding.py       a mistake that a rule reports
likely_lines.py  the lines to look at for a finding, most likely first
data_flow.py     the lines of a file that a line depends on

Only watch/ and replay/ import torch. The audit does not use workloads, layouts or strategies.
"""

from everyrank.audit.examine import Audit, AuditOptions, ScriptFailedError, audit_script
from everyrank.audit.finding import LEVELS, Finding, short_location

__all__ = ["LEVELS", "Audit", "AuditOptions", "Finding", "ScriptFailedError", "audit_script", "short_location"]
