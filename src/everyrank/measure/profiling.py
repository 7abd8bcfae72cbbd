"""torch.profiler as all instruments here use it."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["profiler", "trace_of"]


def profiler(device: torch.device, memory: bool = False) -> profile:
    """The profiler for the CPU and this rank's device; `memory` records allocations as well."""
    # its own log would stand between our lines; it looks at this when it first starts
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    return profile(activities=activities, profile_memory=memory)


def trace_of(finished: profile) -> dict[str, Any]:
    """The Chrome trace of a profiler that has ended: what it would write to a file."""
    with tempfile.TemporaryDirectory(prefix="everyrank-") as folder:
        path = Path(folder) / "trace.json"
        finished.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8", errors="replace"))
