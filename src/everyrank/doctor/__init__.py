"""`everyrank doctor`: checks what this machine can run, and how to fix the rest. Imports no torch.

results.py    CheckResult: one line, and a fix
machine.py    cores, threads, memory, files, shared memory
network.py    interfaces, host name, ports, the environment of launchers
software.py   versions, known-bad combinations, optional frameworks
selftest.py   runs in ranks, with torch: devices, backends, and collectives with known results
launching.py  checks a launch: launcher, rendezvous, and a real start
memory.py     whether a workload fits here, with torch: as `everyrank plan` traces it
checks.py     runs all checks in order

Each check is a function of its inputs, so that a test can pass the values of a broken machine.
"""

from everyrank.doctor.checks import DoctorReport, paste, run_checks
from everyrank.doctor.launching import check_launch
from everyrank.doctor.memory import check_memory
from everyrank.doctor.results import CheckResult

__all__ = ["CheckResult", "DoctorReport", "check_launch", "check_memory", "paste", "run_checks"]
