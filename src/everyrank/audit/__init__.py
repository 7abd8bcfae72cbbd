"""A person's script as it is, watched while it trains: its silent mistakes, with file and line.

examine.py    the call, start to end
command_line.py   the script in a command line of torchrun, accelerate, deepspeed or python
script.py     what can be said of a script before it runs
start.py      its processes: started, waited for, ended
guardian.py   ends what the script has started, also after the audit was killed
outside.py    where torchrun has started us
watch/        what looks on inside them: hooks of torch, which judge nothing
evidence.py   what they have written down, by rank
rules/        one kind of mistake a file
finding.py    what a rule says

Knows torch (watch/ alone) and the script's processes, nothing of workloads, layouts and strategies.
"""

from everyrank.audit.examine import Audit, AuditOptions, ScriptFailedError, audit_script
from everyrank.audit.finding import LEVELS, Finding, short_place

__all__ = ["LEVELS", "Audit", "AuditOptions", "Finding", "ScriptFailedError", "audit_script", "short_place"]
