"""Rank info from the environment, devices, backends, threads, collectives, rendezvous and shutdown of a World."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import everyrank
from everyrank.errors import CannotRunError, RankFailedError, UsageError
from everyrank.launch import Launch, RankInfo, num_cores, rank_info_from_environment, run_ranks, threads_asked
from everyrank.world import (
    SameValue,
    World,
    choose_backend,
    choose_device,
    choose_threads,
    from_rank_0,
    on_rank_0,
    open_world,
    single_process_world,
    store_barrier,
)
from everyrank.world.collectives import (
    all_equal,
    all_gather,
    all_gather_json,
    broadcast_value,
    fingerprint,
    sum_over_ranks,
)
from processes import free_port

_VALUES = (("", ""), ("", ""), ("a", "a"), ("a", "a"), ("b", "a"))
"""The values of two ranks in some updates. In the last one only rank 0 changes its value."""


def differences_between_ranks(world: World) -> list[Any]:
    """Return the differences that this rank finds in each update."""
    compared = SameValue(dataclasses.replace(world, timeout_seconds=1.0))
    return [compared.differences(values[world.rank]) for values in _VALUES]


def test_rank_whose_value_changes_finds_the_difference(ranks: Any) -> None:
    """Only the other rank, which has not changed its value, does not know."""
    equal = [({}, True)] * 4
    assert ranks(2, differences_between_ranks) == [[*equal, ({0: "b", 1: "a"}, False)], [*equal, ({}, True)]]


def first_difference(world: World) -> Any:
    return SameValue(world).differences(str(world.rank))


def test_all_ranks_find_a_difference_of_their_first_values(ranks: Any) -> None:
    assert ranks(2, first_difference) == [({0: "0", 1: "1"}, True)] * 2


TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29501",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "3",
}


def test_rank_info_from_torchrun() -> None:
    """The store belongs to torchrun's agent, so each restart uses different keys."""
    info = rank_info_from_environment(TORCHRUN)
    expected = RankInfo(1, 1, 2, 2, "torchrun", "tcp://127.0.0.1:29501", restart_count=3, store_round=3)
    assert info == expected


def test_new_store_needs_no_restart_count() -> None:
    """Each host of an elastic job counts its own restarts. With a new store, the count is not part of the keys."""
    counts = []
    for count in "01":
        changed = {"TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_RESTART_COUNT": count, "RANK": count}
        info = rank_info_from_environment({**TORCHRUN, **changed})
        assert info is not None
        assert info.is_store_master == (count == "0")
        counts.append((info.restart_count, info.store_round))
    assert counts == [(0, 0), (1, 0)]


def test_unrelated_variables_give_no_rank_info() -> None:
    """Variables of another program, for example Slurm, do not make this process a rank."""
    assert rank_info_from_environment({"SLURM_PROCID": "1", "MASTER_PORT": "1"}) is None


@pytest.mark.parametrize("name", [name for name in TORCHRUN if "TORCHELASTIC" not in name])
def test_incomplete_rank_variables_are_refused(name: str) -> None:
    """Variables from two sources are never mixed. The error names the missing variable."""
    environment = {key: value for key, value in TORCHRUN.items() if key != name}
    with pytest.raises(UsageError, match=f"not {name}"):
        rank_info_from_environment(environment)


@pytest.mark.parametrize(
    "change", [{"RANK": "2"}, {"RANK": "-1"}, {"LOCAL_RANK": "2"}, {"LOCAL_WORLD_SIZE": "3"}, {"WORLD_SIZE": "two"}]
)
def test_contradicting_rank_variables_are_refused(change: dict[str, str]) -> None:
    """A rank beyond the world size would wait forever for a rank that was not started."""
    with pytest.raises(UsageError):
        rank_info_from_environment({**TORCHRUN, **change})


def test_choice_of_device_and_backend() -> None:
    """`choose_backend` also returns the reason."""
    assert choose_device(None, 0) == "cpu"
    assert choose_device(None, 2) == "cuda"
    assert choose_device("cpu", 2) == "cpu"
    with pytest.raises(CannotRunError, match="no CUDA device"):
        choose_device("cuda", 0)
    assert choose_backend(None, "cpu", 2, 0)[0] == "shm"
    assert choose_backend("gloo", "cpu", 2, 0) == ("gloo", "requested")
    assert choose_backend(None, "cuda", 2, 2)[0] == "nccl"
    backend, reason = choose_backend(None, "cuda", 2, 1)
    assert backend == "gloo"
    assert "2 ranks share 1 CUDA device" in reason
    with pytest.raises(UsageError, match="nccl"):
        choose_backend("nccl", "cpu", 2, 0)
    backend, reason = choose_backend("nccl", "cuda", 2, 1)
    assert backend == "nccl"
    assert "which is slow" in reason


def test_world_describes_each_rank(ranks: Any) -> None:
    """Each rank has its number, the world size, the device and its share of the cores as threads."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    for rank, (own_rank, size, device, threads) in enumerate(ranks(3, describe_world)):
        assert (own_rank, size, device) == (rank, 3, "cpu")
        assert threads == max(1, (cores or 1) // 3)


def describe_world(world: World) -> Any:
    return world.rank, world.size, world.device.type, world.threads


def count_threads(info: RankInfo) -> tuple[int, int, int]:
    with open_world(info, Launch(processes=2, device="cpu")) as world:
        before = torch.get_num_threads()
        on_rank_0(world, "test/threads", lambda: None)
        inside = from_rank_0(world, "test/inside", torch.get_num_threads)
        return before, inside, torch.get_num_threads()


def test_ranks_share_cores_and_rank_0_uses_all_while_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks share the cores of the host. While only rank 0 computes, it uses all of them."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shared = max(1, cores // 2)
    for thread_counts in run_ranks(Launch(processes=2), count_threads).values():
        assert thread_counts == (shared, cores, shared)


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({}, None),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "4,2"}, 4),
        ({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "2"}, 2),  # torch uses MKL_NUM_THREADS
        ({"OMP_NUM_THREADS": "0"}, None),
        ({"OMP_NUM_THREADS": "abc", "MKL_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "9" * 5000}, None),
        ({"TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "3"}, 3),
    ],
)
def test_requested_number_of_threads(environment: dict[str, str], threads: int | None) -> None:
    assert threads_asked(environment) == threads


@pytest.mark.parametrize(("before", "threads"), [("", "None"), ("OMP_NUM_THREADS=1", "1")])
def test_default_thread_of_torchrun_is_not_a_request(before: str, threads: str) -> None:
    """torchrun sets OMP_NUM_THREADS=1 by default. Its own environment shows whether the user set the variable."""
    code = "import os; from everyrank.launch import threads_asked; print(threads_asked(os.environ))"
    rank = f"TORCHELASTIC_RUN_ID=x OMP_NUM_THREADS=1 {sys.executable} -c '{code}'"
    command = f'env -u OMP_NUM_THREADS -u MKL_NUM_THREADS {before} sh -c "{rank}; true"'
    process = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert process.stdout.strip() == threads


def test_choice_of_threads() -> None:
    assert choose_threads(None, 8, 2)[:2] == (4, 8)
    assert "8 cores // 2 ranks" in choose_threads(None, 8, 2)[2]
    assert choose_threads(None, 1, 2)[:2] == (1, 1)
    assert choose_threads(None, 8, 1) == (8, 8, "8: as many as cores")
    assert choose_threads(1, 8, 2)[:2] == (1, 1)
    assert choose_threads(64, 8, 2)[:2] == (8, 8)  # no more threads than cores


def test_container_quota_limits_the_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a thread for each core of the host, the quota would throttle the container."""
    monkeypatch.setattr("everyrank.launch.host_info.cgroup_quota", lambda folder: None)
    host_cores = num_cores()
    for quota, cores in ((0.5, 1), (1.5, 1), (host_cores, host_cores), (host_cores + 7.5, host_cores)):
        monkeypatch.setattr("everyrank.launch.host_info.cgroup_quota", lambda folder, quota=quota: quota)
        assert num_cores() == cores


@pytest.mark.usefixtures("python")
def test_requested_threads_reach_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a rank is not enough, because everyrank may have set OMP_NUM_THREADS itself."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)

    def threads(info: RankInfo) -> tuple[int | None, str]:
        return info.threads, os.environ["OMP_NUM_THREADS"]

    assert run_ranks(Launch(processes=1), threads) == {0: (None, "1")}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert run_ranks(Launch(processes=1), threads) == {0: (3, "3")}


def test_single_uses_the_requested_threads(tmp_path: Path) -> None:
    """Otherwise, `single` would use all cores, and its speed could not be compared with ranks of one thread."""
    before = torch.get_num_threads()
    try:
        for requested, threads in ((1, 1), (None, num_cores())):
            info = RankInfo(0, 0, 1, 1, "spawn", (tmp_path / str(requested)).as_uri(), threads=requested)
            with open_world(info, Launch(device="cpu")) as world:
                inside = on_rank_0(world, "test/inside", torch.get_num_threads)
                assert (world.threads, single_process_world(world).threads, inside) == (threads, threads, threads)
                assert world.choices["threads"].startswith(str(threads))
    finally:
        torch.set_num_threads(before)


def test_collective_helpers(ranks: Any) -> None:
    """Sums are in float64, gathers accept unequal lengths, and comparisons are bitwise."""
    for total, rows, same, other, swapped in ranks(3, collect):
        assert total == [6.0, 3e-20 + 1]
        assert rows == [[], [1], [2, 2]]
        assert (same, other, swapped) == (True, False, False)


def test_messages_between_ranks_use_no_pickle(ranks: Any) -> None:
    """Messages are JSON of any length. Only objects.py uses torch's object collectives, to measure them."""
    assert ranks(2, tell_all) == [[None, {"on": [1, "ü"]}], [None, {"on": [1, "ü"]}]]
    sources = [path for path in Path(everyrank.__file__).parent.rglob("*.py") if path.parent.name != "recipes"]
    object_collective = re.compile(r"dist\.\w+_object")
    assert [path.name for path in sources if object_collective.search(path.read_text())] == ["objects.py"]


def tell_all(world: World) -> Any:
    return all_gather_json(None if world.rank == 0 else {"on": [1, "ü"]}, world.group)


def test_broadcast_of_tensors_and_values(ranks: Any) -> None:
    """Tensors of any dtype, shape and stride, and other values, are broadcast without a pickle."""
    for received in ranks(2, hand_out):
        assert received["words"] == ("a", [None, 3])
        assert torch.equal(received["wide"], torch.arange(6).reshape(2, 3).T)
        assert (received["flag"].dtype, received["flag"].item()) == (torch.bool, True)
        assert (received["none"].dtype, received["none"].shape) == (torch.bfloat16, (0, 2))


def hand_out(world: World) -> Any:
    values = {
        "wide": torch.arange(6).reshape(2, 3).T,
        "flag": torch.tensor(True),
        "none": torch.zeros(0, 2, dtype=torch.bfloat16),
        "words": ("a", [None, 3]),
    }
    return broadcast_value(1, values if world.rank == 1 else None, world)


def collect(world: World) -> Any:
    total = sum_over_ranks(torch.tensor([world.rank + 1.0, 1e-20 + (world.rank == 0)], dtype=torch.float64), world)
    rows = [row.tolist() for row in all_gather(torch.tensor([world.rank] * world.rank, dtype=torch.int64), world)]
    values = torch.tensor([1.0, 2.0])
    bumped = values.clone()
    if world.rank == 2:
        bumped[1] = torch.nextafter(bumped[1], torch.tensor(3.0))
    swapped = values.flip(0) if world.rank == 1 else values
    return (
        total.tolist(),
        rows,
        all_equal([values], world),
        all_equal([bumped], world),
        all_equal([swapped], world),
    )


def test_work_on_rank_0_only(ranks: Any) -> None:
    """Rank 0 works while the others wait. Its results and exceptions reach all ranks."""
    results = ranks(2, work_alone)
    assert [result[0] for result in results] == [1, None]
    assert [result[1] for result in results] == [[1, "two"]] * 2
    assert [result[2] for result in results] == ["LayoutError: wrong"] * 2


def work_alone(world: World) -> Any:
    from everyrank.errors import LayoutError

    def fail() -> None:
        raise LayoutError("wrong")

    try:
        on_rank_0(world, "test/fail", fail)
        raised = ""
    except LayoutError as error:
        raised = f"{type(error).__name__}: {error}"
    return (
        on_rank_0(world, "test/alone", lambda: single_process_world(world).size),
        from_rank_0(world, "test/from", lambda: [1, "two"]),
        raised,
    )


def test_barrier_names_the_missing_rank(ranks: Any) -> None:
    """After the timeout, the error names the rank that did not reach the barrier."""
    assert re.match(r"rank 1 did not reach .* \(--timeout\)", ranks(3, miss)[0])


def miss(world: World) -> str | None:
    import dataclasses

    if world.rank == 1:
        return None
    try:
        store_barrier(dataclasses.replace(world, timeout_seconds=1.0), "corner")
    except RankFailedError as error:
        return str(error)
    return None


def test_rendezvous_names_the_missing_rank(tmp_path: Path) -> None:
    """The rendezvous has the timeout too."""
    info = RankInfo(0, 0, 2, 2, "spawn", (tmp_path / "meeting").as_uri())
    launch = Launch(processes=2, device="cpu", timeout_seconds=1.0)
    with pytest.raises(RankFailedError, match=r"rank 1 .* start .* within 1 s"), open_world(info, launch):
        pass


def leave_late(info: RankInfo, folder: Path) -> None:
    (folder / str(info.rank)).touch()
    while len(list(folder.iterdir())) < info.size:  # the imports of a rank may take longer than the timeout
        time.sleep(0.01)
    with open_world(info, Launch(processes=2, device="cpu", timeout_seconds=4.0)):
        if info.rank == 1:
            time.sleep(60)


@pytest.mark.usefixtures("python")
@pytest.mark.integration
def test_shutdown_names_the_missing_rank(tmp_path: Path) -> None:
    """A rank that has finished waits for the other ranks only until the timeout."""
    with pytest.raises(RankFailedError, match=r"rank 1 .* end .* within 4 s"):
        run_ranks(Launch(processes=2), leave_late, tmp_path)


def listening_addresses(info: RankInfo, launch: Launch) -> list[str]:
    """Return the addresses on which this rank listening_addresses."""
    import psutil

    with open_world(info, launch) as world:
        torch.distributed.barrier(group=world.group)
        connections = psutil.Process().net_connections(kind="inet")
        return [connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN]


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize("method", [None, "tcp"])
def test_nothing_listens_beyond_loopback(method: str | None) -> None:
    """Ranks of one host communicate over loopback, and rank 0's store listens only there."""
    method = f"tcp://127.0.0.1:{free_port()}" if method else None
    launch = Launch(processes=2, backend="gloo", init_method=method)
    addresses = run_ranks(launch, listening_addresses, launch)
    assert all(address.endswith(("127.0.0.1", "::1")) for rank in (0, 1) for address in addresses[rank]), addresses
    assert len(addresses[0]) > 0


def hold_a_ddp(info: RankInfo) -> int:
    from torch.nn.parallel import DistributedDataParallel

    with open_world(info, Launch(processes=2, device="cpu")):
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        return os.getpid()


@pytest.mark.parametrize("launcher", ["spawn", pytest.param("torchrun", marks=pytest.mark.integration)])
def test_ranks_end_cleanly(launcher: str) -> None:
    """The ranks return results and end without an abort, and no process is left. A local function is sent by value."""
    results = run_ranks(Launch(launcher=launcher, processes=2), lambda info: (info.rank, hold_a_ddp(info)))
    assert [results[rank][0] for rank in (0, 1)] == [0, 1]
    for _, pid in results.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_script_without_main_guard(tmp_path: Path) -> None:
    """A script that calls `run_ranks` at its top level is not run again by its own ranks."""
    script = tmp_path / "script.py"
    script.write_text(
        "print('top')\n"
        "from everyrank.launch import Launch, run_ranks\n"
        "def f(info):\n    return info.rank * 10\n"
        "print(run_ranks(Launch(processes=2), f))\n"
    )
    process = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=True)
    assert process.stdout == "top\n{0: 0, 1: 10}\n"


@pytest.mark.parametrize("length", [0, 1, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, 3 << 18])
def test_fingerprint_is_a_weighted_sum_for_any_length(length: int) -> None:
    """The sum does not depend on the chunks in which it is computed. A changed or moved element changes it."""
    values = torch.randn(length)
    octets = values.view(torch.uint8).to(torch.int64)
    weights = torch.arange(1, len(octets) + 1) * 2654435761 % 4294967291
    original = fingerprint(values)
    assert original == (octets * weights).sum()
    if length > 1:
        assert fingerprint(values.roll(1)) != original
        values[-1] += 1
        assert fingerprint(values) != original
