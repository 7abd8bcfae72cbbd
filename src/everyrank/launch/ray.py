"""ray: Ray places one actor for each rank, and each actor starts its rank on its own host.

A separate process (ray_driver.py) creates the actors, so that this module does not import Ray.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from everyrank.errors import CannotRunError, UsageError
from everyrank.launch.job import PYTHON, Launch
from everyrank.launch.launcher import Launcher, LauncherOptions
from everyrank.options import Argument

__all__ = ["LAUNCHER", "NODE_VARIABLES", "RayOptions", "visible_devices"]


NODE_VARIABLES = ("EVERYRANK_NODE", "EVERYRANK_NODES")
"""Variables that the driver sets for each rank."""


@dataclass(frozen=True)
class RayOptions(LauncherOptions):
    """Options of Ray.

    address         of the cluster; None: start a cluster on this machine for the run
    restarts        how often all ranks are placed and started again after a rank, its actor or its node was lost
    min_processes   start with at least this many ranks where the cluster has no room for more, continue with them
                    when a node is lost, and add ranks when there is room again; None: the number is fixed
    """

    address: Annotated[str | None, Argument("ray: address of the cluster (default: one on this machine)", "A")] = None
    restarts: Annotated[int, Argument("torchrun, ray: start all ranks again up to K times", "K")] = 0
    min_processes: Annotated[
        int | None, Argument("ray: continue with at least N ranks, and add ranks when there is room", "N")
    ] = None

    @property
    def restarts_ranks(self) -> bool:
        """After a failure, or when their number changes."""
        return self.restarts > 0 or self.is_elastic

    @property
    def is_elastic(self) -> bool:
        """Whether the number of ranks may change."""
        return self.min_processes is not None


class Ray(Launcher):
    """One driver, which asks the cluster for an actor for each rank."""

    name = "ray"
    options = RayOptions
    package = "ray"
    install_hint = "pip install 'everyrank[ray]'"
    graceful_shutdown = True
    node_variables = NODE_VARIABLES

    def commands(self, launch: Launch, job_folder: Path) -> list[list[str]]:
        """Return the command of the driver."""
        devices = {"cuda": "gpu", "cpu": "cpu"}.get(launch.device or "", "any")
        options: RayOptions = launch.options
        count = f"{launch.processes}"
        if options.min_processes is not None:
            count = f"{options.min_processes}:{launch.processes}"
        command = [*PYTHON, "-m", "everyrank.launch.ray_driver", str(job_folder), count, devices]
        restarts = [str(options.restarts)] if options.restarts else []
        return [[*command, options.address or "local", *restarts]]

    def find(self) -> str:
        """Whether Ray is installed."""
        if importlib.util.find_spec("ray") is None:
            raise CannotRunError("--launcher ray: Ray is not installed; pip install 'everyrank[ray]'")
        return super().find()

    def check(self, launch: Launch) -> None:
        """Check the options."""
        options: RayOptions = launch.options
        if options.restarts < 0:
            raise UsageError(f"--restarts {options.restarts}: give 0 or more")
        if options.min_processes is not None and not 1 <= options.min_processes <= launch.processes:
            raise UsageError(f"--min-processes {options.min_processes}: give 1 to {launch.processes} (--processes)")


def visible_devices(devices: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that make these GPUs visible to a rank ("0,1"); {} for "". Ray shows an actor only its own GPU.

    ROCm reads HIP_VISIBLE_DEVICES, which Ray sets there, and CUDA_VISIBLE_DEVICES where that is not set.
    """
    names = ["CUDA_VISIBLE_DEVICES"]
    if "HIP_VISIBLE_DEVICES" in environment:
        names.append("HIP_VISIBLE_DEVICES")
    return dict.fromkeys(names, devices) if devices else {}


LAUNCHER = Ray()
