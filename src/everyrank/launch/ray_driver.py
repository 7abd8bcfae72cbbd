"""The Ray driver: creates one actor for each rank, and each actor starts its rank as a process on its host.

`python -P -m everyrank.launch.ray_driver JOB_FOLDER COUNT cpu|gpu|any ADDRESS|local [RESTARTS]`

    any        GPUs if the cluster has enough
    RESTARTS   how often all ranks are placed and started again after one was lost
    COUNT      N or MIN:MAX, as many as the cluster has room for

The actors copy files between the job folder here and a folder on their host, so no shared storage is needed.

With fewer ranks than MAX, one more is requested from Ray. When Ray grants it, the ranks are asked to stop, which saves
a checkpoint, and all are placed again. A lost node does not count as a restart.
"""

from __future__ import annotations

import contextlib
import importlib
import math
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
from everyrank.launch.signals import is_end_requested
from everyrank.launch.supervisor import end_with_parent

__all__ = ["main"]

ray: Any = importlib.import_module("ray")  # optional, so the type checker may not find it
placement: Any = importlib.import_module("ray.util")
_POLL_SECONDS = 0.1
_PLACEMENT_SECONDS = 120.0
_SAVE_SECONDS = 120.0  # for ranks that stop because new ones are added
_END_SECONDS = 10.0
_GRACE_SECONDS = 3.0  # after the first failure, so that other ranks can report theirs


@ray.remote
class RankActor:
    """Starts one rank on the host where Ray places this actor."""

    def __init__(self) -> None:
        import tempfile

        self.folder = Path(tempfile.mkdtemp(prefix="everyrank-ray-"))
        self.process: Any = None
        self.sent: set[str] = set()
        self.kept_version = (0, 0)  # (inode, time) of the preliminary result that was sent last
        self.num_read: dict[str, int] = {}  # bytes already read of a growing file

    def host(self) -> tuple[str, list[str]]:
        """Return (Ray node of this actor, numbers of the GPUs that Ray assigned to it)."""
        return ray.get_runtime_context().get_node_id(), [str(number) for number in ray.get_gpu_ids()]

    def start(
        self,
        job: bytes,
        cwd: str,
        numbers: tuple[int, int, int, int],
        nodes: tuple[int, int],
        devices: str,
    ) -> None:
        """Start the rank. `job` is pickled by the driver and sent by Ray; `devices` are all GPUs used on this node.

        numbers   rank, world size, local rank, local world size
        nodes     the number of this node, and of nodes

        The rank runs in the working folder of the driver if this host has it, else in that of Ray.
        """
        import dataclasses
        import subprocess

        from everyrank.launch.host_info import pid_namespace
        from everyrank.launch.ray import NODE_VARIABLES, visible_devices

        rank, size, local_rank, local_size = numbers
        driver_job: Job = pickle.loads(job)  # noqa: S301  (sent by the driver)
        local_job = dataclasses.replace(
            driver_job,
            processes=size,
            rendezvous_url="meet://" + (self.folder / "address").as_uri().removeprefix("file://"),
            pid_namespace=pid_namespace(),
            sys_path=[*driver_job.sys_path, *sys.path],
            parent_pid=os.getpid(),
            logs=self.folder,
        )
        (self.folder / "job.pickle").write_bytes(pickle.dumps(local_job))
        command = [*WORKER, str(self.folder), str(rank), str(local_rank), str(local_size)]
        with (self.folder / "screen").open("wb") as screen:  # only rank 0 writes here; the others write to their logs
            # A rank chooses its GPU by its local rank, so it must see the GPUs of all ranks on the node.
            environment = {**os.environ, **visible_devices(devices, os.environ)}
            environment.update(zip(NODE_VARIABLES, map(str, nodes), strict=True))
            self.process = subprocess.Popen(
                command,
                stdout=screen,
                stderr=screen,
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd=cwd if Path(cwd).is_dir() else None,
            )

    def give(self, name: str, content: bytes) -> None:
        """Write a file for the rank: the address of the store of rank 0, or the request to stop."""
        partial = self.folder / f"{name}.partial"
        partial.write_bytes(content)
        partial.replace(self.folder / name)

    def take(self) -> tuple[dict[str, bytes], int | None]:
        """Return (new files of the rank, exit status of its process or None)."""
        status = self.process.poll()
        files: dict[str, bytes] = {}
        for path in self.folder.glob("*"):
            if path.name == "screen" or path.suffix == ".log":
                with path.open("rb") as file:
                    file.seek(self.num_read.get(path.name, 0))
                    files[path.name] = file.read()
                    self.num_read[path.name] = file.tell()
            elif path.name not in self.sent and (
                path.name.endswith("address") or path.suffix in (".pid", ".result", ".error", ".exit")
            ):
                self.sent.add(path.name)
                files[path.name] = path.read_bytes()
            elif path.suffix == ".kept":  # the rank replaces it
                version = (path.stat().st_ino, path.stat().st_mtime_ns)
                if version != self.kept_version:
                    self.kept_version, files[path.name] = version, path.read_bytes()
        return files, status

    def end(self) -> None:
        """End the rank with its data loader workers, and delete the folder. New ranks may be started at once."""
        import psutil

        if self.process is not None and self.process.poll() is None:
            supervisor = psutil.Process(self.process.pid)
            processes = [*supervisor.children(recursive=True), supervisor]
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(processes, timeout=_END_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)


class Ended(NamedTuple):
    """How an attempt ended: the first exit status that is not 0; whether ranks failed, or only their number changes."""

    status: int
    is_failure: bool


def main() -> int:
    """Run all ranks. Returns 0 if all succeeded, else the exit status of the first that failed."""
    directory, devices, address = Path(sys.argv[1]), sys.argv[3], sys.argv[4]
    min_ranks, max_ranks = (int(number) for number in (sys.argv[2].partition(":")[0], sys.argv[2].rpartition(":")[2]))
    restarts_left = int(sys.argv[5]) if len(sys.argv) > 5 else 0
    parent_pid = os.getppid()
    signal.signal(signal.SIGTERM, _exit_on_signal)
    end_with_parent(parent_pid, lambda: os.kill(os.getpid(), signal.SIGTERM))
    content = (directory / "job.pickle").read_bytes()
    job: Job = pickle.loads(content)  # noqa: S301  (written by the parent)
    cluster_options: dict[str, Any] = {}
    if address == "local":  # a cluster on this machine, unreachable from others
        cluster_options = {"num_cpus": max(max_ranks, os.cpu_count() or 1), "include_dashboard": False}
        cluster_options["_node_ip_address"] = "127.0.0.1"
    ray.init(address=address, log_to_driver=False, logging_level="ERROR", **cluster_options)
    try:
        has_devices = devices == "any" and ray.cluster_resources().get("GPU", 0) >= min_ranks
        request = Request(
            min_ranks, max_ranks, {"CPU": 1.0, **({"GPU": 1.0} if devices == "gpu" or has_devices else {})}
        )
        while True:
            status, is_failure = _attempt(request, content, directory, job)
            if status == 0 or (is_failure and restarts_left == 0) or is_end_requested(directory):
                return status
            restarts_left -= is_failure
            for kind in ("result", "error", "exit", "pid", "kept"):
                for path in directory.glob(f"rank*.{kind}"):
                    path.unlink(missing_ok=True)
    finally:
        ray.shutdown()
        if os.getppid() != parent_pid:  # the parent can no longer delete them
            for folder in (directory, *([] if job.keeps_logs else [job.logs])):
                shutil.rmtree(folder, ignore_errors=True)


def _attempt(request: Request, content: bytes, directory: Path, job: Job) -> Ended:
    """Place as many ranks as there is room for, start them, and follow them. A lost actor is a failed rank."""
    group, actors, hosts = _place_actors(request)
    extra_group = reserve(request, 1) if len(actors) < request.max_ranks else None
    try:
        _start(actors, hosts, content)
        ended = _follow(actors, extra_group, directory, job)
    except ray.exceptions.RayActorError as error:
        print(f"Ray has lost an actor: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        ended = Ended(1, is_failure=True)
    finally:
        for actor in actors:
            with contextlib.suppress(ray.exceptions.RayError):  # for the lost actor
                ray.get(actor.end.remote(), timeout=2 * _END_SECONDS)
        for actor in actors:
            ray.kill(actor)
        for reservation in (group, extra_group):
            if reservation is not None:
                release(reservation)
    if ended.is_failure and request.min_ranks < request.max_ranks and has_lost_node({node for node, _ in hosts}):
        return Ended(ended.status, is_failure=False)
    return ended


def _exit_on_signal(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _place_actors(request: Request) -> tuple[Any, list[Any], list[tuple[str, list[str]]]]:
    """Return (placement group, an actor for each rank, (node, GPUs) of each actor).

    Actors of one node are adjacent, so that local ranks count from 0.
    """
    count = request.max_ranks if request.min_ranks == request.max_ranks else num_ranks_that_fit(request)
    group = reserve(request, count)
    while not group.wait(_PLACEMENT_SECONDS if count == request.min_ranks else SETTLE_SECONDS):
        if count == request.min_ranks:
            free = ray.available_resources()
            free_text = ", ".join(f"{free.get(name, 0):g} {name}" for name in request.resources)
            print(
                f"Ray has no free resources for {count} ranks after {_PLACEMENT_SECONDS:g} s; free: {free_text}",
                file=sys.stderr,
            )
            raise SystemExit(1)
        release(group)  # another job took the room
        count -= 1
        group = reserve(request, count)
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    place_in: Any = strategies.PlacementGroupSchedulingStrategy
    strategies_by_rank = [place_in(group, placement_group_bundle_index=index) for index in range(count)]
    options = {"num_cpus": 1, "num_gpus": request.resources.get("GPU", 0)}
    actor_class: Any = RankActor
    actors = [actor_class.options(scheduling_strategy=strategy, **options).remote() for strategy in strategies_by_rank]
    hosts: list[tuple[str, list[str]]] = ray.get([actor.host.remote() for actor in actors])
    nodes = [node for node, _ in hosts]
    order = sorted(range(count), key=lambda index: (nodes.index(nodes[index]), index))
    return group, [actors[index] for index in order], [hosts[index] for index in order]


def _start(actors: list[Any], hosts: list[tuple[str, list[str]]], content: bytes) -> None:
    """Start all ranks. `hosts` has (node, GPUs) of each actor."""
    nodes = [node for node, _ in hosts]
    local_sizes, local_ranks, node_names = Counter(nodes), Counter[str](), list(dict.fromkeys(nodes))
    starts: list[Any] = []
    for rank, (actor, node) in enumerate(zip(actors, nodes, strict=True)):
        devices = ",".join(device for other_node, gpus in hosts if other_node == node for device in gpus)
        numbers = (rank, len(actors), local_ranks[node], local_sizes[node])
        node_numbers = (node_names.index(node), len(node_names))
        starts.append(actor.start.remote(content, str(Path.cwd()), numbers, node_numbers, devices))
        local_ranks[node] += 1
    ray.get(starts)


def _follow(actors: list[Any], extra_group: Any, directory: Path, job: Job) -> Ended:
    """Copy the files of the ranks until they have ended, or have saved because there is room for `extra_group`."""
    grows_until, ends_at, first_failure = 0.0, math.inf, 0
    # ranks that are started again get no SIGUSR1 that was passed on to the earlier start
    request = None if is_end_requested(directory) else _stop_request(directory)
    held_files: list[tuple[str, bytes]] = []  # errors and exits of ranks that were stopped to add ranks
    while True:
        time.sleep(_POLL_SECONDS)
        is_stopping = is_end_requested(directory)
        if not grows_until and not is_stopping and extra_group is not None and is_granted(extra_group):
            grows_until = time.monotonic() + _SAVE_SECONDS
        new_request = b"" if grows_until and not is_stopping else _stop_request(directory)
        if new_request != request:  # each signal replaces the one before
            request = new_request
            ray.get([actor.give.remote("stop", request) for actor in actors])
        results = ray.get([actor.take.remote() for actor in actors])
        statuses = [status for _, status in results]
        for files, _ in results:
            for name, text in files.items():
                if grows_until and Path(name).suffix in (".error", ".exit"):
                    held_files.append((name, text))
                else:
                    _copy_file(name, text, directory, job, actors)
        failed = [status for status in statuses if status]
        if failed and not first_failure:
            first_failure = abs(failed[0])
            # ranks that were asked to stop may end in any way
            ends_at = math.inf if is_stopping else time.monotonic() + _GRACE_SECONDS
        has_ended = all(status is not None for status in statuses)
        is_growing = grows_until and not is_stopping
        if is_growing and (failed or not has_ended):  # else the training ended before the request arrived
            if has_ended or time.monotonic() > grows_until:
                return Ended(1, is_failure=False)
        elif has_ended or time.monotonic() > ends_at:
            for name, text in held_files:
                _copy_file(name, text, directory, job, actors)
            return Ended(first_failure, is_failure=first_failure > 0)


def _stop_request(directory: Path) -> bytes | None:
    """Return the request to stop that the monitor has written; None without one."""
    with contextlib.suppress(OSError):
        return (directory / "stop").read_bytes()
    return None


def _copy_file(name: str, text: bytes, directory: Path, job: Job, actors: list[Any]) -> None:
    if name == "screen":
        sys.stdout.buffer.write(text)
        sys.stdout.flush()
    elif name.endswith("address"):  # of everyrank's store; address.address: of the store of a script
        ray.get([actor.give.remote(name, text) for actor in actors[1:]])
    elif name.endswith(".log"):
        with (job.logs / name).open("ab") as log:
            log.write(text)
    else:
        # a process of another host cannot be signalled from here
        partial = directory / f"{name}.partial"
        partial.write_bytes(b"" if name.endswith(".pid") else text)
        partial.replace(directory / name)


# --- free resources of the cluster, reservations, lost nodes

SETTLE_SECONDS = 10.0  # until Ray has noticed freed resources and lost nodes


@dataclass(frozen=True)
class Request:
    """The number of ranks, and the resources that each needs."""

    min_ranks: int
    max_ranks: int
    resources: dict[str, float]

    def room_in(self, resources: dict[str, float]) -> int:
        """Return the number of ranks that fit into these resources."""
        return int(min(resources.get(name, 0.0) // amount for name, amount in self.resources.items()))


def reserve(request: Request, count: int) -> Any:
    """Request a placement group for this number of ranks. Ray may grant it later."""
    return placement.placement_group([request.resources] * count, strategy="PACK")


def release(group: Any) -> None:
    """Remove a placement group."""
    placement.remove_placement_group(group)


def is_granted(group: Any) -> bool:
    """Whether Ray has granted a placement group."""
    return placement.placement_group_table(group)["state"] == "CREATED"


def has_lost_node(nodes: set[str]) -> bool:
    """Whether one of these nodes is lost. Ray may notice it later than the loss of its actors."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline:
        if nodes - {node["NodeID"] for node in ray.nodes() if node["Alive"]}:
            return True
        time.sleep(_POLL_SECONDS)
    return False


def num_ranks_that_fit(request: Request) -> int:
    """The number of ranks that the cluster has room for. Resources of the previous attempt become free with a delay."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        total = sum(request.room_in(node["Resources"]) for node in ray.nodes() if node["Alive"])
        free = min(total, request.room_in(ray.available_resources()), request.max_ranks)
        if free == min(total, request.max_ranks) or time.monotonic() > deadline:
            return max(free, request.min_ranks)
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
