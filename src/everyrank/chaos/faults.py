"""The faults that can be put into a training, and what has to come of each. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from everyrank.errors import UsageError
from everyrank.layout import Layout

__all__ = ["FAULTS", "OWN_DISK", "TWO_HOSTS", "Fault", "faults_named", "why_unseen"]

OWN_DISK, TWO_HOSTS = "a disk of its own", "two hosts"


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    what       what happens, in a few words
    says       what whoever notices it says: a regular expression, {rank} is the one struck; "" where nobody has to
    seen_by    who notices
    ends       whether the training ends by it; else it goes on by itself, and nobody has to do anything
    all_ranks  whether it strikes every rank, not one
    corrupts     what is done to the newest checkpoint after the training has ended: "", "cut" or "flip"
    needs      what this machine has to allow: "", `OWN_DISK` (mount namespaces, tmpfs), or `TWO_HOSTS` (of networks)
    """

    what: str
    says: str
    seen_by: str
    ends: bool = True
    all_ranks: bool = False
    corrupts: str = ""
    needs: str = ""

    def is_said_in(self, text: str, rank: int) -> bool:
        """Whether a line says that this fault has struck this rank."""
        return bool(self.says) and re.search(self.says.replace("{rank}", str(rank)), text) is not None


FAULTS: dict[str, Fault] = {
    "kill-rank": Fault("SIGKILL of one rank", r"rank {rank}\b.*ended by SIGKILL", "its supervisor"),
    "kill-all": Fault("SIGKILL of all ranks", r"ended by SIGKILL", "their supervisors", all_ranks=True),
    "kill-launcher": Fault("SIGKILL of the command that was typed", "", "the ranks, which end by themselves"),
    "stop-rank": Fault("SIGSTOP of one rank, for good", r"rank {rank}\b", "the others, which wait for it (--timeout)"),
    "pause-rank": Fault("SIGSTOP of one rank, SIGCONT after 2 s", "", "nobody has to", ends=False),
    "slow-rank": Fault("one rank 0.2 s slower in five updates", "", "nobody has to", ends=False),
    "full-disk": Fault(
        "no room for the next checkpoint, then room again",
        r"could not be saved: .*No space left",
        "rank 0, which goes on without",
        ends=False,
        needs=OWN_DISK,
    ),
    "cut-checkpoint": Fault(
        "SIGKILL of all ranks, and the newest checkpoint loses its end",
        r"damaged: ",
        "--resume, which offers the one before",
        all_ranks=True,
        corrupts="cut",
    ),
    "flipped-checkpoint": Fault(
        "SIGKILL of all ranks, and a bit of the newest checkpoint flips",
        r"damaged: ",
        "--resume, which offers the one before",
        all_ranks=True,
        corrupts="flip",
    ),
    "nan-gradient": Fault("NaN in one rank's gradient", r"(?i)\bnan\b|infinite", "the check of the next loss"),
    "flipped-bit": Fault(
        "a bit of one rank's parameters flips",
        r"rank {rank} holds another|differs between .*\brank {rank}\b",
        "--guard stop",
    ),
    "mismatched-collective": Fault("one rank calls a collective that no other calls", r"rank", "the backend"),
    "out-of-memory": Fault(
        "one rank allocates more than it may (rlimit)", r"(?i)rank {rank}\b.*memory", "the rank itself"
    ),
    "link-dropped": Fault(
        "the link between two hosts is gone",
        r"the link to it is down",
        "the ranks, which wait for those of the other host (--timeout)",
        needs=TWO_HOSTS,
    ),
    "link-delayed": Fault(
        "the link between two hosts carries 1 Mbit/s in five updates", "", "nobody has to", ends=False, needs=TWO_HOSTS
    ),
}
"""By the names that `everyrank chaos --fault` takes, in the order of its table."""


def faults_named(names: list[str]) -> list[str]:
    """The names, all of them where none is given. Raises `UsageError` for one that is none."""
    for name in names:
        if name not in FAULTS:
            raise UsageError(f"--fault {name}: give some of {', '.join(FAULTS)}")
    return list(dict.fromkeys(names)) or list(FAULTS)


def why_unseen(name: str, layout: Layout, size: int) -> str:
    """Why this fault cannot be noticed under this layout; "" where it has to be."""
    if name != "flipped-bit":
        return ""
    if layout.strategy == "zero1":
        return "after each update the owners send out all parameters again: replicas are equal by the next comparison"
    if layout.strategy == "parameter_server":
        return "servers hold parts, and send out all parameters again: there is nothing to compare"
    if layout.strategy == "single" or (layout.strategy == "fsdp" and layout.mesh(size).get("replicate", 1) == 1):
        return "each parameter is on one rank alone: there is nothing to compare it with"
    return ""
