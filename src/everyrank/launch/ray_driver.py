"""Ask a Ray cluster for a place for each rank: one actor a rank, which starts it as a process of its own there.

`python -P -m everyrank.launch.ray_driver DIRECTORY COUNT cpu|gpu|any ADDRESS|local [RESTARTS]`; any: GPUs where there
are enough; RESTARTS: how often all are placed and started again after one was lost. The actors carry bytes between the
job's folder here and one like it on their host, so no storage has to be shared: the job there, results and errors back.

COUNT is N or MIN:MAX: as many as there is room for. Where that is fewer than MAX, one more stays asked for; once Ray
has it, the ranks are asked to stop, which saves, and all are placed anew. A node that is lost takes no restart.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from everyrank.launch.job import WORKER, Job
from everyrank.launch.supervisor import end_with_parent

__all__ = ["main"]

ray: Any = importlib.import_module("ray")  # an extra, which the type checker need not have
placement: Any = importlib.import_module("ray.util")
_LOOK_SECONDS = 0.1
_PLACE_SECONDS = 120.0
_SAVE_SECONDS = 120.0  # for ranks that were asked to stop, where new ones are taken in
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

    def start(self, job: bytes, cwd: str, rank: int, size: int, local_rank: int, local_size: int, devices: str) -> None:
        """Start the rank. `job` comes from the driver, over Ray's own connections; `devices` are those of the node.

        The rank runs in the folder of the driver, where this host has it too; else in that of Ray.
        """
        import dataclasses
        import subprocess

        from everyrank.launch.host_info import pid_namespace
        from everyrank.launch.ray import visible_devices

        here: Job = pickle.loads(job)  # noqa: S301  (the driver's own)
        own = dataclasses.replace(
            here,
            processes=size,
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
                command,
                stdout=screen,
                stderr=screen,
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd=cwd if Path(cwd).is_dir() else None,
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
        import psutil

        if self.process is not None and self.process.poll() is None:
            supervisor = psutil.Process(self.process.pid)
            ending = [*supervisor.children(recursive=True), supervisor]
            for process in ending:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(ending, timeout=_END_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)


class Ended(NamedTuple):
    """How an attempt ended: the first status that is not 0; whether ranks failed, or only their number changes."""

    status: int
    is_failure: bool


def main() -> int:
    """0 when all ranks ended well, else the status of the first that did not."""
    directory, devices, address = Path(sys.argv[1]), sys.argv[3], sys.argv[4]
    least, most = (int(number) for number in (sys.argv[2].partition(":")[0], sys.argv[2].rpartition(":")[2]))
    left = int(sys.argv[5]) if len(sys.argv) > 5 else 0
    starter = os.getppid()
    signal.signal(signal.SIGTERM, _terminated)
    end_with_parent(starter, lambda: os.kill(os.getpid(), signal.SIGTERM))
    content = (directory / "job.pickle").read_bytes()
    job: Job = pickle.loads(content)  # noqa: S301  (our own parent wrote it)
    local: dict[str, Any] = {}
    if address == "local":  # one of this machine, which nothing else has to reach
        local = {"num_cpus": max(most, os.cpu_count() or 1), "include_dashboard": False}
        local["_node_ip_address"] = "127.0.0.1"
    ray.init(address=address, log_to_driver=False, logging_level="ERROR", **local)
    try:
        has_devices = devices == "any" and ray.cluster_resources().get("GPU", 0) >= least
        wanted = Wanted(least, most, {"CPU": 1.0, **({"GPU": 1.0} if devices == "gpu" or has_devices else {})})
        while True:
            status, is_failure = _attempt(wanted, content, directory, job)
            if status == 0 or (is_failure and left == 0) or (directory / "stop").exists():
                return status
            left -= is_failure
            for kind in ("result", "error", "exit", "pid"):
                for path in directory.glob(f"rank*.{kind}"):
                    path.unlink(missing_ok=True)
    finally:
        ray.shutdown()
        if os.getppid() != starter:  # nobody else is left to tidy up
            for folder in (directory, *([] if job.keeps_logs else [job.logs])):
                shutil.rmtree(folder, ignore_errors=True)


def _attempt(wanted: Wanted, content: bytes, directory: Path, job: Job) -> Ended:
    """Place as many as there is room for, start all, and follow them. An actor that dies is a rank that failed."""
    group, places, hosts = _places(wanted)
    more = reserve(wanted, 1) if len(places) < wanted.most else None
    try:
        _start(places, hosts, content)
        ended = _follow(places, more, directory, job)
    except ray.exceptions.RayActorError as error:
        print(f"Ray has lost an actor: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        ended = Ended(1, is_failure=True)
    finally:
        for place in places:
            with contextlib.suppress(ray.exceptions.RayError):  # of the lost one
                ray.get(place.end.remote(), timeout=2 * _END_SECONDS)
        for place in places:
            ray.kill(place)
        for one in (group, more):
            if one is not None:
                release(one)
    if ended.is_failure and wanted.least < wanted.most and has_lost_one_of({node for node, _ in hosts}):
        return Ended(ended.status, is_failure=False)
    return ended


def _terminated(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _places(wanted: Wanted) -> tuple[Any, list[Any], list[tuple[str, list[str]]]]:
    """(Ray's reservation, an actor for each rank, the node of each and its GPUs).

    Those of one node are beside each other, so local ranks count from 0.
    """
    count = wanted.most if wanted.least == wanted.most else num_places(wanted)
    group = reserve(wanted, count)
    while not group.wait(_PLACE_SECONDS if count == wanted.least else SETTLE_SECONDS):
        if count == wanted.least:
            there = ray.available_resources()
            has = ", ".join(f"{there.get(name, 0):g} {name}" for name in wanted.each)
            print(
                f"Ray found no place for {count} ranks within {_PLACE_SECONDS:g} s; it has {has} free", file=sys.stderr
            )
            raise SystemExit(1)
        release(group)  # somebody else was faster
        count -= 1
        group = reserve(wanted, count)
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    place_in: Any = strategies.PlacementGroupSchedulingStrategy
    strategy = [place_in(group, placement_group_bundle_index=index) for index in range(count)]
    options = {"num_cpus": 1, "num_gpus": wanted.each.get("GPU", 0)}
    actor: Any = Place
    places = [actor.options(scheduling_strategy=one, **options).remote() for one in strategy]
    hosts: list[tuple[str, list[str]]] = ray.get([place.host.remote() for place in places])
    nodes = [node for node, _ in hosts]
    order = sorted(range(count), key=lambda index: (nodes.index(nodes[index]), index))
    return group, [places[index] for index in order], [hosts[index] for index in order]


def _start(places: list[Any], hosts: list[tuple[str, list[str]]], content: bytes) -> None:
    """Start all ranks; `hosts` are the node of each and its GPUs."""
    nodes = [node for node, _ in hosts]
    sizes, seen = Counter(nodes), Counter[str]()
    starts: list[Any] = []
    for rank, (place, node) in enumerate(zip(places, nodes, strict=True)):
        devices = ",".join(device for other, own in hosts if other == node for device in own)
        starts.append(place.start.remote(content, str(Path.cwd()), rank, len(places), seen[node], sizes[node], devices))
        seen[node] += 1
    ray.get(starts)


def _follow(places: list[Any], more: Any, directory: Path, job: Job) -> Ended:
    """Carry what the ranks leave until they have ended, or until there is room for `more` and they have saved."""
    is_stopping, grows_until = False, 0.0
    held: list[tuple[str, bytes]] = []  # how ranks ended that were asked to, for more of them
    while True:
        time.sleep(_LOOK_SECONDS)
        is_asked = (directory / "stop").exists()
        if not grows_until and not is_asked and more is not None and is_there(more):
            grows_until = time.monotonic() + _SAVE_SECONDS
        if (is_asked or grows_until) and not is_stopping:
            is_stopping = True
            ray.get([place.give.remote("stop", b"") for place in places])
        taken = ray.get([place.take.remote() for place in places])
        statuses = [status for _, status in taken]
        for files, _ in taken:
            for name, text in files.items():
                if grows_until and Path(name).suffix in (".error", ".exit"):
                    held.append((name, text))
                else:
                    _carry(name, text, directory, job, places)
        failed = [status for status in statuses if status]
        has_ended = all(status is not None for status in statuses)
        is_growing = grows_until and not is_asked
        if is_growing and (failed or not has_ended):  # else the training was over before they heard it
            if has_ended or time.monotonic() > grows_until:
                return Ended(1, is_failure=False)
        elif failed or has_ended:
            for name, text in held:
                _carry(name, text, directory, job, places)
            return Ended(abs(failed[0]) if failed else 0, is_failure=bool(failed))


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


# --- room in the cluster: how much there is, what is reserved, which nodes are lost

SETTLE_SECONDS = 10.0  # until Ray has noticed what is free again, and what is gone


@dataclass(frozen=True)
class Wanted:
    """How many ranks, and what of the cluster each takes."""

    least: int
    most: int
    each: dict[str, float]

    def room_in(self, resources: dict[str, float]) -> int:
        """How many ranks these suffice for."""
        return int(min(resources.get(name, 0.0) // amount for name, amount in self.each.items()))


def reserve(wanted: Wanted, count: int) -> Any:
    """Ray's reservation for so many ranks, which it may not have yet."""
    return placement.placement_group([wanted.each] * count, strategy="PACK")


def release(group: Any) -> None:
    """Give a reservation back."""
    placement.remove_placement_group(group)


def is_there(group: Any) -> bool:
    """Whether Ray has found room for a reservation."""
    return placement.placement_group_table(group)["state"] == "CREATED"


def has_lost_one_of(nodes: set[str]) -> bool:
    """Whether one of these nodes is gone, of which Ray may hear later than of the actors on it."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline:
        if nodes - {node["NodeID"] for node in ray.nodes() if node["Alive"]}:
            return True
        time.sleep(_LOOK_SECONDS)
    return False


def num_places(wanted: Wanted) -> int:
    """For how many ranks there is room. What an attempt before this one had is free a moment later."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        in_all = sum(wanted.room_in(node["Resources"]) for node in ray.nodes() if node["Alive"])
        free = min(in_all, wanted.room_in(ray.available_resources()), wanted.most)
        if free == min(in_all, wanted.most) or time.monotonic() > deadline:
            return max(free, wanted.least)
        time.sleep(_LOOK_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
