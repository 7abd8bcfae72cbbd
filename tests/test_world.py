"""Rank info, devices, backends, meeting and parting."""

from __future__ import annotations

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


def test_facts_of_torchrun() -> None:
    """torchrun's agent has the store open; restarts meet under another name."""
    info = rank_info_from_environment(TORCHRUN)
    expected = RankInfo(1, 1, 2, 2, "torchrun", "tcp://127.0.0.1:29501", restart_count=3, store_round=3)
    assert info == expected


def test_a_store_of_one_start_has_one_name() -> None:
    """Each host of an elastic job counts restarts for itself: where the store is new, the count names nothing."""
    counts = []
    for count in "01":
        changed = {"TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_RESTART_COUNT": count, "RANK": count}
        info = rank_info_from_environment({**TORCHRUN, **changed})
        assert info is not None
        assert info.is_store_master == (count == "0")
        counts.append((info.restart_count, info.store_round))
    assert counts == [(0, 0), (1, 0)]


def test_facts_of_nobody() -> None:
    """A variable of somebody else (Slurm's, say) makes no rank of us."""
    assert rank_info_from_environment({"SLURM_PROCID": "1", "MASTER_PORT": "1"}) is None


@pytest.mark.parametrize("name", [name for name in TORCHRUN if "TORCHELASTIC" not in name])
def test_incomplete_facts_are_refused(name: str) -> None:
    """Facts from two sources are never mixed: one missing variable is an error that names it."""
    environment = {key: value for key, value in TORCHRUN.items() if key != name}
    if name in ("RANK", "WORLD_SIZE"):
        other = {"RANK", "WORLD_SIZE"} - {name}
        assert other <= set(environment)
    with pytest.raises(UsageError, match=f"not {name}"):
        rank_info_from_environment(environment)


@pytest.mark.parametrize(
    "change", [{"RANK": "2"}, {"RANK": "-1"}, {"LOCAL_RANK": "2"}, {"LOCAL_WORLD_SIZE": "3"}, {"WORLD_SIZE": "two"}]
)
def test_contradicting_facts_are_refused(change: dict[str, str]) -> None:
    """A rank beyond the world size would wait for ever for a rank that nobody started."""
    with pytest.raises(UsageError):
        rank_info_from_environment({**TORCHRUN, **change})


def test_device_and_backend() -> None:
    """One pure function chooses each, and says why."""
    assert choose_device(None, 0) == "cpu"
    assert choose_device(None, 2) == "cuda"
    assert choose_device("cpu", 2) == "cpu"
    with pytest.raises(CannotRunError, match="no CUDA device"):
        choose_device("cuda", 0)
    assert choose_backend(None, "cpu", 2, 0)[0] == "shm"
    assert choose_backend("gloo", "cpu", 2, 0) == ("gloo", "requested")
    assert choose_backend(None, "cuda", 2, 2)[0] == "nccl"
    backend, why = choose_backend(None, "cuda", 2, 1)
    assert backend == "gloo"
    assert "2 ranks share 1 CUDA device" in why
    with pytest.raises(UsageError, match="nccl"):
        choose_backend("nccl", "cpu", 2, 0)
    backend, why = choose_backend("nccl", "cuda", 2, 1)
    assert backend == "nccl"
    assert "which is slow" in why


def test_world_in_ranks(ranks: Any) -> None:
    """Ranks, device and threads are what they should be."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    for rank, (own, size, device, threads) in enumerate(ranks(3, describe_world)):
        assert (own, size, device) == (rank, 3, "cpu")
        assert threads == max(1, (cores or 1) // 3)


def describe_world(world: World) -> Any:
    return world.rank, world.size, world.device.type, world.threads


def count_threads(info: RankInfo) -> tuple[int, int, int]:
    with open_world(info, Launch(processes=2, device="cpu")) as world:
        own = torch.get_num_threads()
        on_rank_0(world, "test/threads", lambda: None)
        inside = from_rank_0(world, "test/inside", torch.get_num_threads)
        return own, inside, torch.get_num_threads()


def test_threads_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks share the cores of the host; whoever works alone has them all, and gives them back."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    own = max(1, cores // 2)
    for found in run_ranks(Launch(processes=2), count_threads).values():
        assert found == (own, cores, own)


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({}, None),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "4,2"}, 4),
        ({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "2"}, 2),  # as torch takes them
        ({"OMP_NUM_THREADS": "0"}, None),
        ({"OMP_NUM_THREADS": "abc", "MKL_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "9" * 5000}, None),
        ({"TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "3"}, 3),
    ],
)
def test_threads_that_a_person_asks_for(environment: dict[str, str], threads: int | None) -> None:
    assert threads_asked(environment) == threads


@pytest.mark.parametrize(("before", "threads"), [("", "None"), ("OMP_NUM_THREADS=1", "1")])
def test_the_one_thread_of_torchrun_is_not_the_persons(before: str, threads: str) -> None:
    """torchrun sets OMP_NUM_THREADS=1 where the person has not; the environment it was started in tells."""
    code = "import os; from everyrank.launch import threads_asked; print(threads_asked(os.environ))"
    rank = f"TORCHELASTIC_RUN_ID=x OMP_NUM_THREADS=1 {sys.executable} -c '{code}'"
    command = f'env -u OMP_NUM_THREADS -u MKL_NUM_THREADS {before} sh -c "{rank}; true"'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == threads


def test_threads_are_chosen_by_one_function_that_says_why() -> None:
    assert choose_threads(None, 8, 2)[:2] == (4, 8)
    assert "8 cores // 2 ranks" in choose_threads(None, 8, 2)[2]
    assert choose_threads(None, 1, 2)[:2] == (1, 1)
    assert choose_threads(None, 8, 1) == (8, 8, "8: as many as cores")
    assert choose_threads(1, 8, 2)[:2] == (1, 1)
    assert choose_threads(64, 8, 2)[:2] == (8, 8)  # torch takes no more than there are


def test_a_container_that_may_use_fewer_cores_than_it_sees_has_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread for each core of the host would be held up by its quota."""
    monkeypatch.setattr("everyrank.launch.host_info.cgroup_quota", lambda folder: None)
    seen = num_cores()
    for quota, cores in ((0.5, 1), (1.5, 1), (seen, seen), (seen + 7.5, seen)):
        monkeypatch.setattr("everyrank.launch.host_info.cgroup_quota", lambda folder, quota=quota: quota)
        assert num_cores() == cores


@pytest.mark.usefixtures("python")
def test_what_the_person_asks_for_reaches_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ranks' own environment says may be ours."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)

    def threads(info: RankInfo) -> tuple[int | None, str]:
        return info.threads, os.environ["OMP_NUM_THREADS"]

    assert run_ranks(Launch(processes=1), threads) == {0: (None, "1")}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert run_ranks(Launch(processes=1), threads) == {0: (3, "3")}


def test_single_too_computes_with_the_threads_that_were_asked_for(tmp_path: Path) -> None:
    """It had those of all cores, beside ranks of one thread each: nobody's numbers meant what they said."""
    before = torch.get_num_threads()
    try:
        for asked, threads in ((1, 1), (None, num_cores())):
            info = RankInfo(0, 0, 1, 1, "spawn", (tmp_path / str(asked)).as_uri(), threads=asked)
            with open_world(info, Launch(device="cpu")) as world:
                inside = on_rank_0(world, "test/inside", torch.get_num_threads)
                assert (world.threads, single_process_world(world).threads, inside) == (threads, threads, threads)
                assert world.choices["threads"].startswith(str(threads))
    finally:
        torch.set_num_threads(before)


def test_collectives(ranks: Any) -> None:
    """Sums in float64, gathers of unequal length, equality to the last bit."""
    for total, rows, same, other, swapped in ranks(3, collect):
        assert total == [6.0, 3e-20 + 1]
        assert rows == [[], [1], [2, 2]]
        assert (same, other, swapped) == (True, False, False)


def test_what_ranks_tell_each_other_is_no_pickle(ranks: Any) -> None:
    """Of any length, nothing included; and no module of ours asks torch to send an object, but to measure that."""
    assert ranks(2, tell_all) == [[None, {"on": [1, "ü"]}], [None, {"on": [1, "ü"]}]]
    sources = [path for path in Path(everyrank.__file__).parent.rglob("*.py") if path.parent.name != "recipes"]
    asks = re.compile(r"dist\.\w+_object")
    assert [path.name for path in sources if asks.search(path.read_text())] == ["objects.py"]


def tell_all(world: World) -> Any:
    return all_gather_json(None if world.rank == 0 else {"on": [1, "ü"]}, world.group)


def test_one_rank_hands_out_what_it_has(ranks: Any) -> None:
    """Tensors of every kind, shape and place, without a pickle."""
    for found in ranks(2, hand_out):
        assert found["words"] == ("a", [None, 3])
        assert torch.equal(found["wide"], torch.arange(6).reshape(2, 3).T)
        assert (found["flag"].dtype, found["flag"].item()) == (torch.bool, True)
        assert (found["none"].dtype, found["none"].shape) == (torch.bfloat16, (0, 2))


def hand_out(world: World) -> Any:
    given = {
        "wide": torch.arange(6).reshape(2, 3).T,
        "flag": torch.tensor(True),
        "none": torch.zeros(0, 2, dtype=torch.bfloat16),
        "words": ("a", [None, 3]),
    }
    return broadcast_value(1, given if world.rank == 1 else None, world)


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


def test_rank_0_alone(ranks: Any) -> None:
    """Rank 0 works with all threads while the others wait; what it raises is raised everywhere."""
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


def test_missing_rank_is_named(ranks: Any) -> None:
    """Every wait says who was missing."""
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


def test_nobody_comes_to_the_start(tmp_path: Path) -> None:
    """The first wait of all has the timeout, too."""
    info = RankInfo(0, 0, 2, 2, "spawn", (tmp_path / "meeting").as_uri())
    launch = Launch(processes=2, device="cpu", timeout_seconds=1.0)
    with pytest.raises(RankFailedError, match=r"rank 1 .* start .* within 1 s"), open_world(info, launch):
        pass


def leave_late(info: RankInfo, folder: Path) -> None:
    (folder / str(info.rank)).touch()
    while len(list(folder.iterdir())) < info.size:  # the imports of one may take longer than the timeout
        time.sleep(0.01)
    with open_world(info, Launch(processes=2, device="cpu", timeout_seconds=4.0)):
        if info.rank == 1:
            time.sleep(60)


@pytest.mark.usefixtures("python")
@pytest.mark.integration
def test_nobody_comes_to_the_end(tmp_path: Path) -> None:
    """A rank that is done does not wait for ever for one that is not."""
    with pytest.raises(RankFailedError, match=r"rank 1 .* end .* within 4 s"):
        run_ranks(Launch(processes=2), leave_late, tmp_path)


def listens(info: RankInfo, launch: Launch) -> list[str]:
    import psutil

    with open_world(info, launch) as world:
        torch.distributed.barrier(group=world.group)
        connections = psutil.Process().net_connections(kind="inet")
        return [row.laddr.ip for row in connections if row.status == psutil.CONN_LISTEN]


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize("method", [None, "tcp"])
def test_nothing_listens_beyond_loopback(method: str | None) -> None:
    """Ranks of one host talk over loopback, and so does the store that rank 0 opens."""
    method = f"tcp://127.0.0.1:{free_port()}" if method else None
    launch = Launch(processes=2, backend="gloo", init_method=method)
    found = run_ranks(launch, listens, launch)
    assert all(address.endswith(("127.0.0.1", "::1")) for rank in (0, 1) for address in found[rank]), found
    assert len(found[0]) > 0


def hold_a_ddp(info: RankInfo) -> int:
    from torch.nn.parallel import DistributedDataParallel

    with open_world(info, Launch(processes=2, device="cpu")):
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        return os.getpid()


@pytest.mark.parametrize("launcher", ["spawn", pytest.param("torchrun", marks=pytest.mark.integration)])
def test_clean_end(launcher: str) -> None:
    """No abort at exit, results by rank, no process left. A local function is sent by value."""
    results = run_ranks(Launch(launcher=launcher, processes=2), lambda info: (info.rank, hold_a_ddp(info)))
    assert [results[rank][0] for rank in (0, 1)] == [0, 1]
    for _, pid in results.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_script_without_a_guard(tmp_path: Path) -> None:
    """A script that calls `run_ranks` at its top level is not run again by its own ranks."""
    script = tmp_path / "script.py"
    script.write_text(
        "print('top')\n"
        "from everyrank.launch import Launch, run_ranks\n"
        "def f(info):\n    return info.rank * 10\n"
        "print(run_ranks(Launch(processes=2), f))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "top\n{0: 0, 1: 10}\n"


@pytest.mark.parametrize("length", [0, 1, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, 3 << 18])
def test_fingerprint_is_one_sum_however_long_the_tensor(length: int) -> None:
    """Over the pieces in which it is taken; any bit changes it, and any exchange of two elements."""
    values = torch.randn(length)
    octets = values.view(torch.uint8).to(torch.int64)
    weights = torch.arange(1, len(octets) + 1) * 2654435761 % 4294967291
    own = fingerprint(values)
    assert own == (octets * weights).sum()
    if length > 1:
        assert fingerprint(values.roll(1)) != own
        values[-1] += 1
        assert fingerprint(values) != own
