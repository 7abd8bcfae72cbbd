"""Whether gradients are clipped when they are whole: averaged, and no longer multiplied by the loss scale."""

from __future__ import annotations

import math

from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings

__all__ = ["check_clipping"]

_SAME_NORM = 1e-4  # relative


def check_clipping(evidence: Evidence, findings: Findings) -> None:
    """The scale at each clip, and the norms that the ranks found."""
    for event in evidence.all_of("clip"):
        if event["scale"] != 1.0:
            findings.add(
                "FAIL",
                "clip.scaled",
                event["line"],
                f"clips gradients that are still multiplied by the loss scale {event['scale']:g}",
                "scaler.unscale_(optimizer) before clip_grad_norm_",
            )
    if evidence.is_split:
        return
    for events in zip(*(evidence.of(rank, "clip") for rank in evidence.ranks), strict=False):
        norms = [event["norm"] for event in events if event["norm"] is not None and math.isfinite(event["norm"])]
        if len(norms) == len(events) > 1 and max(norms) - min(norms) > _SAME_NORM * max(norms):
            findings.add(
                "FAIL",
                "clip.local",
                events[0]["line"],
                f"the ranks clip by different norms ({', '.join(f'{norm:.4g}' for norm in norms)}): before the "
                "gradients are averaged, or of a shard alone",
                "clip after the last backward of an update, which averages",
            )
