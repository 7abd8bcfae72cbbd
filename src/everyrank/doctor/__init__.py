"""What this machine can run, why not the rest, and what to do about it. Imports no torch.

findings.py       what one look at something came to
machine.py        cores, threads, memory, files, shared memory
network.py        interfaces, host name, ports, the environment of launchers
software.py       versions, known-bad combinations, optional frameworks
selftest.py       in ranks of its own, with torch: devices, backends, and collectives with known answers
launching.py      why a start fails: who started us, where ranks meet, a real start and a look at each rank
report.py    all of it in order

Each check is a plain function of what it looks at, so that a machine that is ill can be made up in a test.
"""

from everyrank.doctor.checks import DoctorReport, paste, run_checks
from everyrank.doctor.launching import check_launch
from everyrank.doctor.results import CheckResult

__all__ = ["CheckResult", "DoctorReport", "check_launch", "paste", "run_checks"]
