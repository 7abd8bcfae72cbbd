"""Ask a Ray cluster for a place for each rank: one actor a rank, which starts it as a process of its own there.

`python -P -m everyrank.launch.ray_driver DIRECTORY COUNT cpu|gpu|any ADDRESS|local [RESTARTS]`; any: GPUs where there
are enough; RESTARTS: how often all are placed and started again after one was lost. The actors carry bytes between the
job's folder here and one like it on their host, so no storage has to be shared: the job there, results and errors back.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from everyrank.launch.job import Job
from everyrank.launch.spawn import WORKER

__all__ = ["main"]

ray: Any = importlib.import_module("ray")  # an extra, which the type checker need not have
_LOOK_SECONDS = 0.1
_PLACE_SECONDS = 120.0
_END_SECONDS = 10.0


@ray.remote
class Place:
    """One rank's place in the cluster."""

    def __init__(self) -> None:
        import tempfile

        self.folder = Path(tempfile.mkdtemp(prefix="everyrank-ray-"))
        self.process: Any = None
        self.sent: set[str] = set()
        self.read: dict[str, int] = {}  # bytes of a file that grows

    def host(self) -> tuple[str, list[str]]:
        """Which of Ray's nodes this is on, and the GPUs that Ray has given to it."""
        return ray.get_runtime_context().get_node_id(), [str(number) for number in ray.get_gpu_ids()]

    def start(self, job: bytes, rank: int, local_rank: int, local_size: int, devices: str) -> None:
        """Start the rank. `job` comes from the driver, over Ray's own connections; `devices` are those of the node."""
        import dataclasses
        import subprocess

        from everyrank.launch.hosts import pid_namespace
        from everyrank.launch.ray import visible_devices

        here: Job = pickle.loads(job)  # noqa: S301  (the driver's own)
        own = dataclasses.replace(
            here,
            rendezvous_url="meet://" + (self.folder / "address").as_uri().removeprefix("file://"),
            pid_namespace=pid_namespace(),
            sys_path=[*here.sys_path, *sys.path],
            parent_pid=os.getpid(),
            logs=self.folder,
        )
        (self.folder / "job.pickle").write_bytes(pickle.dumps(own))
        words = [str(self.folder), str(rank), str(local_rank), str(local_size)]
        with (self.folder / "screen").open("wb") as screen:  # of rank 0; the others write to their logs
            command = [*WORKER, *words]
            # a rank picks its device by its local rank, so it sees those of all ranks of the node
            environment = {**os.environ, **visible_devices(devices, os.environ)}
            self.process = subprocess.Popen(
                command, stdout=screen, stderr=screen, stdin=subprocess.DEVNULL, env=environment
            )

    def give(self, name: str, content: bytes) -> None:
        """A file for the rank: where rank 0 has opened the store, or the request to stop."""
        partial = self.folder / f"{name}.partial"
        partial.write_bytes(content)
        partial.replace(self.folder / name)

    def take(self) -> tuple[dict[str, bytes], int | None]:
        """Files of the rank that are new, and the status of its process when it has ended."""
        status = self.process.poll()
        new: dict[str, bytes] = {}
        for path in self.folder.glob("*"):
            if path.name == "screen" or path.suffix == ".log":
                with path.open("rb") as file:
                    file.seek(self.read.get(path.name, 0))
                    new[path.name] = file.read()
                    self.read[path.name] = file.tell()
            elif path.name not in self.sent and (
                path.name == "address" or path.suffix in (".pid", ".result", ".error", ".exit")
            ):
                self.sent.add(path.name)
                new[path.name] = path.read_bytes()
        return new, status

    def end(self) -> None:
        """End the rank, with its data loader workers, and take the folder away: ranks may be started anew at once."""
        import shutil

        import psutil

        if self.process is not None and self.process.poll() is None:
            supervisor = psutil.Process(self.process.pid)
            ending = [*supervisor.children(recursive=True), supervisor]
            for process in ending:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(ending, timeout=_END_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)


def main() -> int:
    """0 when all ranks ended well, else the status of the first that did not."""
    directory, count, devices, address = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    restarts = int(sys.argv[5]) if len(sys.argv) > 5 else 0
    signal.signal(signal.SIGTERM, _terminated)
    content = (directory / "job.pickle").read_bytes()
    job: Job = pickle.loads(content)  # noqa: S301  (our own parent wrote it)
    local: dict[str, Any] = {}
    if address == "local":  # one of this machine, which nothing else has to reach
        local = {"num_cpus": max(count, os.cpu_count() or 1), "include_dashboard": False}
        local["_node_ip_address"] = "127.0.0.1"
    ray.init(address=address, log_to_driver=False, logging_level="ERROR", **local)
    try:
        for left in range(restarts, -1, -1):
            status = _attempt(count, devices, content, directory, job)
            if status == 0 or left == 0 or (directory / "stop").exists():
                return status
            for kind in ("result", "error", "exit", "pid"):
                for path in directory.glob(f"rank*.{kind}"):
                    path.unlink(missing_ok=True)
        raise AssertionError("one attempt is made")
    finally:
        ray.shutdown()


def _attempt(count: int, devices: str, content: bytes, directory: Path, job: Job) -> int:
    """Place all, start all, and follow them; how that ended. An actor that dies is a rank that failed."""
    group, places = _places(count, devices)
    try:
        return _follow(places, content, directory, job)
    except ray.exceptions.RayActorError as error:
        print(f"Ray has lost an actor: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        return 1
    finally:
        for place in places:
            with contextlib.suppress(ray.exceptions.RayError):  # of the lost one
                ray.get(place.end.remote(), timeout=2 * _END_SECONDS)
        for place in places:
            ray.kill(place)
        importlib.import_module("ray.util").remove_placement_group(group)


def _terminated(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _places(count: int, devices: str) -> tuple[Any, list[Any]]:
    """(Ray's reservation, an actor for each rank): those of one node beside each other, so local ranks count from 0."""
    groups, strategies = importlib.import_module("ray.util"), importlib.import_module("ray.util.scheduling_strategies")
    has_devices = devices == "any" and ray.cluster_resources().get("GPU", 0) >= count
    wanted = {"CPU": 1.0, **({"GPU": 1.0} if devices == "gpu" or has_devices else {})}
    group = groups.placement_group([wanted] * count, strategy="PACK")
    if not group.wait(_PLACE_SECONDS):
        there = ray.available_resources()
        has = ", ".join(f"{there.get(name, 0):g} {name}" for name in wanted)
        print(f"Ray found no place for {count} ranks within {_PLACE_SECONDS:g} s; it has {has} free", file=sys.stderr)
        raise SystemExit(1)
    place_in: Any = strategies.PlacementGroupSchedulingStrategy
    strategy = [place_in(group, placement_group_bundle_index=index) for index in range(count)]
    options = {"num_cpus": 1, "num_gpus": wanted.get("GPU", 0)}
    actor: Any = Place
    places = [actor.options(scheduling_strategy=one, **options).remote() for one in strategy]
    nodes = [node for node, _ in ray.get([place.host.remote() for place in places])]
    order = sorted(range(count), key=lambda index: (nodes.index(nodes[index]), index))
    return group, [places[index] for index in order]


def _follow(places: list[Any], content: bytes, directory: Path, job: Job) -> int:
    """Start all, and carry what they leave until they have ended."""
    hosts: list[tuple[str, list[str]]] = ray.get([place.host.remote() for place in places])
    nodes = [node for node, _ in hosts]
    sizes, seen = Counter(nodes), Counter[str]()
    starts: list[Any] = []
    for rank, (place, node) in enumerate(zip(places, nodes, strict=True)):
        devices = ",".join(device for other, own in hosts if other == node for device in own)
        starts.append(place.start.remote(content, rank, seen[node], sizes[node], devices))
        seen[node] += 1
    ray.get(starts)
    is_stopping = False
    while True:
        time.sleep(_LOOK_SECONDS)
        taken = ray.get([place.take.remote() for place in places])
        for files, _ in taken:
            for name, text in files.items():
                _carry(name, text, directory, job, places)
        if not is_stopping and (directory / "stop").exists():
            is_stopping = True
            ray.get([place.give.remote("stop", b"") for place in places])
        statuses = [status for _, status in taken]
        failed = [status for status in statuses if status]
        if failed or all(status == 0 for status in statuses):
            return abs(failed[0]) if failed else 0


def _carry(name: str, text: bytes, directory: Path, job: Job, places: list[Any]) -> None:
    if name == "screen":
        sys.stdout.buffer.write(text)
        sys.stdout.flush()
    elif name == "address":
        ray.get([place.give.remote(name, text) for place in places[1:]])
    elif name.endswith(".log"):
        with (job.logs / name).open("ab") as log:
            log.write(text)
    else:
        # a process of another host is nothing that can be signalled here
        partial = directory / f"{name}.partial"
        partial.write_bytes(b"" if name.endswith(".pid") else text)
        partial.replace(directory / name)


if __name__ == "__main__":
    sys.exit(main())
