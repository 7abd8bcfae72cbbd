"""The table of faults that can be injected into a training, and how each must be reported. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from everyrank.errors import UsageError
from everyrank.layout import Layout

__all__ = ["FAULTS", "OWN_DISK", "TWO_HOSTS", "Fault", "select_faults", "why_unnoticed"]

OWN_DISK, TWO_HOSTS = "a separate disk", "two hosts"


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    description      a few words
    message_pattern  regular expression of the error message, {rank} for the faulty rank; "" if no message is required
    noticed_by       the process that notices the fault
    ends             whether the fault ends the training; otherwise the training continues without help
    all_ranks        whether it affects all ranks, not one
    corrupts         corruption of the newest checkpoint after the training has ended: "", "cut" or "flip"
    needs            requirement: "", `OWN_DISK` (mount namespaces, tmpfs), or `TWO_HOSTS` (network namespaces)
    """

    description: str
    message_pattern: str
    noticed_by: str
    ends: bool = True
    all_ranks: bool = False
    corrupts: str = ""
    needs: str = ""

    def is_reported_in(self, text: str, rank: int) -> bool:
        """Whether a line of the output reports this fault on this rank."""
        return (
            bool(self.message_pattern)
            and re.search(self.message_pattern.replace("{rank}", str(rank)), text) is not None
        )


FAULTS: dict[str, Fault] = {
    "kill-rank": Fault("SIGKILL of one rank", r"rank {rank}\b.*ended by SIGKILL", "its supervisor"),
    "kill-all": Fault("SIGKILL of all ranks", r"ended by SIGKILL", "their supervisors", all_ranks=True),
    "kill-launcher": Fault("SIGKILL of the everyrank command", "", "the ranks, which end by themselves"),
    "stop-rank": Fault(
        "SIGSTOP of one rank, without SIGCONT", r"rank {rank}\b", "the others, which wait for it (--timeout)"
    ),
    "pause-rank": Fault("SIGSTOP of one rank, SIGCONT after 2 s", "", "not required", ends=False),
    "slow-rank": Fault("one rank 0.2 s slower in five updates", "", "not required", ends=False),
    "full-disk": Fault(
        "the disk is full at the next checkpoint, then has space again",
        r"could not be saved: .*No space left",
        "rank 0, which continues without the checkpoint",
        ends=False,
        needs=OWN_DISK,
    ),
    "cut-checkpoint": Fault(
        "SIGKILL of all ranks, and the newest checkpoint is truncated",
        r"damaged: ",
        "--resume, which suggests the previous checkpoint",
        all_ranks=True,
        corrupts="cut",
    ),
    "flipped-checkpoint": Fault(
        "SIGKILL of all ranks, and a bit of the newest checkpoint flips",
        r"damaged: ",
        "--resume, which suggests the previous checkpoint",
        all_ranks=True,
        corrupts="flip",
    ),
    "nan-gradient": Fault("NaN in one rank's gradient", r"(?i)\bnan\b|infinite", "the check of the next loss"),
    "flipped-bit": Fault(
        "a bit of one rank's parameters flips",
        r"of ranks? [\d, ]*\b{rank}\b[\d, ]* differs from|differs between [a-z\d, ]*\b{rank}\b",
        "--guard stop",
    ),
    "mismatched-collective": Fault("one rank calls a collective that the others do not call", r"rank", "the backend"),
    "out-of-memory": Fault(
        "one rank allocates more than its memory limit (rlimit)", r"(?i)rank {rank}\b.*memory", "the rank itself"
    ),
    "link-dropped": Fault(
        "the link between two hosts is down",
        r"the link to it is down",
        "the ranks, which wait for those of the other host (--timeout)",
        needs=TWO_HOSTS,
    ),
    "link-delayed": Fault(
        "the link between two hosts carries 1 Mbit/s in five updates", "", "not required", ends=False, needs=TWO_HOSTS
    ),
}
"""Faults by name, in the order in which `everyrank chaos` runs them."""


def select_faults(names: list[str]) -> list[str]:
    """Return `names` without duplicates, or all faults if it is empty. Raises `UsageError` for an unknown name."""
    for name in names:
        if name not in FAULTS:
            raise UsageError(f"--fault {name}: give some of {', '.join(FAULTS)}")
    return list(dict.fromkeys(names)) or list(FAULTS)


def why_unnoticed(name: str, layout: Layout, size: int) -> str:
    """Return why this fault cannot be noticed with this layout; "" if it must be noticed."""
    if name != "flipped-bit":
        return ""
    if layout.strategy == "zero1":
        return "after each update the owners broadcast all parameters, so replicas are equal at the next comparison"
    if layout.strategy == "local_sgd":
        return "the ranks average all parameters before each comparison, so replicas are equal"
    if layout.strategy == "parameter_server":
        return "the servers broadcast all parameters in each update, so replicas are always equal"
    if layout.strategy == "single":
        return "each parameter is on one rank only, so there is no replica to compare it with"
    if layout.row.any_axes or layout.mesh(size).get("replicate", 1) > 1:
        return ""
    if layout.strategy in ("fsdp", "pipeline"):
        return "each parameter is on one rank only, so there is no replica to compare it with"
    if any(layout.mesh(size).get(axis, 1) > 1 for axis in ("tensor", "expert")):
        return "matrices that are split, and experts, are on one rank only, so there is no replica to compare them with"
    return ""
