"""everyrank comm: every operation has the right answer, a wrong one is seen, and what cannot be asked is refused."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from everyrank.backends import register_backend
from everyrank.collectives.algorithms import ALGORITHMS
from everyrank.collectives.cost import fit_cost
from everyrank.collectives.operations import OPERATIONS, Call, Case
from everyrank.collectives.options import (
    ALGORITHM_NAMES,
    OPERATION_NAMES,
    REDUCING,
    CommOptions,
    parse_sizes,
    size_text,
)
from everyrank.collectives.rank import needed_bytes
from everyrank.collectives.stride_check import MEMORY, check_strides
from everyrank.collectives.sweep import refusal, sweep
from everyrank.commands.launching import _backend
from everyrank.measure.memory import free_memory_bytes
from processes import Cli, Running, one_line, refused

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]


def test_names_are_those_of_the_tables() -> None:
    """The words of the command line, which needs no torch, are the keys of what does."""
    assert tuple(OPERATIONS) == OPERATION_NAMES
    assert tuple(ALGORITHMS) == ALGORITHM_NAMES


@pytest.mark.parametrize("memory", ["contiguous", *MEMORY])
def test_right_answers(memory: str) -> None:
    """Each rank has another pattern, and no element that of its neighbour; reduced element by element."""
    for reduction, combine in (("sum", sum), ("max", max), ("avg", lambda row: sum(row) / 3), ("product", np.prod)):
        case = Case(0, 3, None, 10, torch.float64, reduction=reduction, memory=memory)
        ranks = [case.values(rank) for rank in range(3)]
        for number, values in enumerate(ranks):
            assert values.is_contiguous() == (memory == "contiguous")
            assert not any(torch.equal(values, other) for other in ranks[:number]) or reduction == "product"
            assert (values[1:] != values[:-1]).all()
        expected = [combine([float(one) for one in row]) for row in zip(*(r.flatten() for r in ranks), strict=True)]
        assert case.reduced().flatten().tolist() == expected


def tried(world: Any, backend: str, size: int, length: int) -> list[str]:
    """Every operation, dtype and reduction, blocking and asynchronous: those with a wrong element."""
    members = [list(range(first, first + size)) for first in range(0, world.size, size)]
    group = dist.new_subgroups_by_enumeration(members, backend=backend)[0]
    found = []
    for name, operation in OPERATIONS.items():
        if name == "monitored_barrier" and backend != "gloo":
            continue  # torch gives it to gloo alone
        for dtype in DTYPES if operation.has_size else DTYPES[:1]:
            for reduction in reductions(name, dtype):
                for is_async in {False, operation.has_async}:
                    step = operation.multiple(size)
                    case = Case(world.rank % size, size, group, -(-length // step) * step, dtype)
                    case = Case(**{**vars(case), "reduction": reduction, "is_async": is_async})
                    call = operation.make(case)
                    call.reset()
                    call.run()
                    if call.wrong():
                        found.append(f"{name} {dtype} {reduction} {is_async}")
    return found


def reductions(name: str, dtype: torch.dtype) -> list[str]:
    if name not in REDUCING:
        return ["sum"]
    return ["sum", "product", "min", "max", *(["avg"] if dtype.is_floating_point else ["band", "bor", "bxor"])]


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize(("count", "size"), [(2, 2), (3, 3), (4, 2)])
def test_every_operation_has_the_right_answer(ranks: Any, backend: str, count: int, size: int) -> None:
    """In all dtypes and reductions, of lengths that are no round number; also in two groups at the same time."""
    for length in (1, 1001):
        assert ranks(count, tried, backend, size, length) == [[]] * count


def spoilt(world: Any) -> dict[str, int]:
    """What `wrong` counts when one element of what each operation has written is another one."""
    found = {}
    for name, operation in OPERATIONS.items():
        if not operation.has_size or "object" in name:
            continue
        step = operation.multiple(2)
        case = Case(world.rank, 2, world.group, -(-8 // step) * step)
        call = operation.make(case)
        call.reset()  # what is there before a call is no right answer
        found[name] = call.wrong()
    return found


def test_an_answer_that_never_came_is_wrong(ranks: Any) -> None:
    """Rank 1 is told how many elements are wrong where the operation has not run; of send it is the one that gets."""
    first, second = ranks(2, spoilt)
    assert all(second[name] > 0 for name in second if name not in ("reduce", "gather"))
    assert all(first[name] > 0 for name in ("reduce", "gather", "all_reduce", "all_gather", "isend"))


def test_command(cli: Cli, tmp_path: Path) -> None:
    """Rows with times and bandwidths by their definitions, the costs, exit status 0."""
    words = ["--op", "all_reduce", "barrier", "--sizes", "4:1KiB", "--seconds", "0.01", "--json", "c.json"]
    done = cli(tmp_path, "comm", *words)
    assert done.status == 0, done.err
    assert "all results correct" in done.out
    found = json.loads((tmp_path / "c.json").read_text())
    *sizes, barrier = found["rows"]
    assert [row["num_bytes"] for row in sizes] == [4, 16, 64, 256, 1024]
    for row in sizes:
        assert row["algorithm_bandwidth"] == pytest.approx(row["num_bytes"] / row["mean_seconds"])
        assert row["bus_bandwidth"] == pytest.approx(row["algorithm_bandwidth"])  # 2 (N - 1) / N is 1 for two ranks
        assert 0 < row["p50_seconds"] <= row["p99_seconds"]
    assert (barrier["num_bytes"], barrier["bus_bandwidth"]) == (0, None)
    assert [cost["operation"] for cost in found["costs"]] == ["all_reduce"]


BROKEN = """
import torch.distributed as dist
right = dist.all_reduce
def all_reduce(tensor, *args, **kwargs):
    work = right(tensor, *args, **kwargs)
    if tensor.numel() == 5:
        tensor[3] += 1
    return work
dist.all_reduce = all_reduce
from everyrank.cli import main
raise SystemExit(main())
"""


def test_a_wrong_element_is_status_1(cli: Cli, tmp_path: Path) -> None:
    """A backend that gets one element wrong, on both ranks, before and after the timed calls."""
    (tmp_path / "broken.py").write_text(BROKEN)
    done = cli.on_ranks(tmp_path, "comm", "--op", "all_reduce", "--sizes", "20B", size=2, script="broken.py")
    assert done.statuses[0] == 1, done
    assert "4 wrong elements" in done.out


def test_algorithms_by_the_command(cli: Cli, tmp_path: Path) -> None:
    """With steps and bytes of the busiest rank."""
    done = cli(
        tmp_path,
        "comm", "--op", "all_reduce", "--algorithm", "ring", "--sizes", "1KiB", "--processes", "3", "--seconds", "0.01",
    )  # fmt: skip
    assert done.status == 0, done.err
    assert "1368 B in 4 steps" in done.out
    assert "by" in done.out
    assert "shm ring" in done.out


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        ("--op allreduce", "--op allreduce: give one of send"),
        ("--sizes 5KX", "--sizes 5KX: "),
        ("--sizes 0", "--sizes 0: give bytes"),
        ("--sizes 64KiB:4", "give the smaller size first"),
        ("--dtype int8", "--dtype int8: give one of float32"),
        ("--backend foo", "--backend foo"),
        ("--algorithm ring", "only all_reduce has algorithms"),
        ("--op all_reduce --algorithm star", "--algorithm star: give one of ring"),
        ("--op all_reduce --algorithm ring --reduction max", "only synchronous sums"),
        ("--op broadcast --algorithm ring", "--algorithm ring: "),
        ("--op all_reduce broadcast --algorithm all", "--algorithm all: "),
        ("--op all_reduce --algorithm ring all", "`all` without other names"),
        ("--op all_reduce --algorithm ring tree ring", "ring is repeated"),
        ("--backend gloo foo", "--backend foo: give shm"),
        ("--backend gloo gloo", "gloo is repeated"),
        ("--op all_reduce --reduction band", "use --dtype int64"),
        ("--op all_reduce --reduction avg --dtype int64", "use a floating-point --dtype"),
        ("--group-size 3 --processes 4", "give a divisor of 4"),
        ("--group-size 1 --backend gloo horovod", "--backend horovod: does not support --group-size"),
        ("--seconds 0", "give more than 0"),
    ],
)
def test_what_cannot_be_asked(capsys: pytest.CaptureFixture[str], words: str, fragment: str) -> None:
    """One line, status 2, and no process is started."""
    assert fragment in refused(capsys, "comm", *words.split())


def test_sizes() -> None:
    """Ranges go up by four, and are said as they were."""
    assert parse_sizes(["4:1KiB"]) == (4, 16, 64, 256, 1024)
    assert parse_sizes(["1MB", "3", "3"]) == (10**6, 3)
    assert [size_text(count) for count in (3, 1024, 1025, 2**26)] == ["3 B", "1 KiB", "1025 B", "64 MiB"]


def test_cost_of_known_times() -> None:
    """Latency and bandwidth come back to what the times were made of; neither is negative; the error is said."""
    size = np.array([4.0, 1e3, 1e5, 1e7])
    cost = fit_cost(size.tolist(), (1e-4 + size / 2e9).tolist())
    assert cost.latency_seconds == pytest.approx(1e-4)
    assert cost.bytes_per_second == pytest.approx(2e9)
    assert cost.largest_error < 1e-9
    assert cost.seconds(2e9) == pytest.approx(1 + 1e-4)
    falling = fit_cost(size.tolist(), [4e-4, 3e-4, 2e-4, 1e-4])
    assert falling.bytes_per_second == float("inf")
    assert 1e-4 < falling.latency_seconds < 4e-4
    assert falling.largest_error > 0.1
    through_zero = fit_cost([1e6, 1e7, 1e8], [1e-4, 1.1e-2, 1.1e-1])
    assert through_zero.latency_seconds == 0.0


def in_turns(world: Any, options: CommOptions) -> tuple[list[Any], list[Any], list[str]]:
    """Rows, how tensors that are not contiguous come out, and over which group each all-reduce went."""
    gloo, other = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
    groups = {"gloo": gloo, "other": other}
    called: list[str] = []
    right = dist.all_reduce

    def all_reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        called.append("gloo" if kwargs["group"] is gloo else "other")
        return right(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        rows = sweep(world, groups, options)
    finally:
        dist.all_reduce = right
    # gloo under the name of a backend that says it takes them, and that one itself
    strides = [check_strides(world, {name: group}, CommOptions()) for name, group in (("gloo", gloo), ("shm", gloo))]
    register_backend("shm")
    strides.append(check_strides(world, {"shm": dist.new_group(backend="shm")}, CommOptions()))
    return rows, strides, called


def test_backends_take_turns(ranks: Any) -> None:
    """A few calls each, another one first in each round; each row has the ratio of its times to those of the first."""
    options = CommOptions(operations=("all_reduce",), sizes=(4, 64), seconds=1e9)
    (rows, (strides, claimed, shm), called), (others, _, _) = ranks(2, in_turns, options)
    assert [(row.num_bytes, row.backend) for row in rows] == [(4, "gloo"), (4, "other"), (64, "gloo"), (64, "other")]
    assert rows == others  # every rank knows what all have measured
    turns = [(name, len(list(calls))) for name, calls in itertools.groupby(called[: len(called) // 2][2:])]
    # six calls each, the first not counted; a round to estimate from, then each second round begins the other way
    assert turns[:4] == [("gloo", 6), ("other", 6), ("gloo", 6), ("other", 12)]
    assert len(called) == 2 * (2 + 2 * 40 * 6)  # one before, to see whether it is offered
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        assert (first.calls, first.mean_speedup, first.p50_speedup, second.calls) == (200, None, None, 200)
        assert second.mean_speedup == pytest.approx(first.mean_seconds / second.mean_seconds)
        assert second.p50_speedup == pytest.approx(first.p50_seconds / second.p50_seconds)
    by = {(row.operation, row.memory): row for row in strides}
    with_tensors = [name for name, operation in OPERATIONS.items() if operation.has_tensors]
    assert set(by) == {(name, memory) for name in with_tensors for memory in MEMORY}
    assert "contiguous" in by["send", "strided"].refused
    assert by["all_reduce", "strided"].num_wrong > 0  # gloo adds up what lies between the elements
    assert by["all_gather", "strided"].num_wrong == 0
    assert not any(row.is_failure for row in strides)  # gloo has never said that it takes them
    assert not any(row.is_failure or row.refused or row.num_wrong for row in shm)
    assert {row.operation for row in claimed if row.is_failure and row.memory == "strided"} == {
        row.operation for row in strides if row.memory == "strided" and (row.refused or row.num_wrong)
    }


def test_several_backends_by_the_command(cli: Cli, tmp_path: Path) -> None:
    """In the order in which they were asked for, with the costs of both, and the page."""
    words = [
        "--op",
        "all_reduce",
        "monitored_barrier",
        "--sizes",
        "4:64",
        "--seconds",
        "0.01",
        "--backend",
        "gloo",
        "shm",
    ]
    done = cli(tmp_path, "comm", *words, "--json", "c.json", "--html", "c.html")
    assert done.status == 0, done.err
    assert "gloo, shm, 2 ranks on cpu" in done.out
    assert "shm monitored_barrier: not supported" in done.out
    found = json.loads((tmp_path / "c.json").read_text())
    assert [(row["num_bytes"], row["backend"]) for row in found["rows"][:4]] == [
        (4, "gloo"), (4, "shm"), (16, "gloo"), (16, "shm"),
    ]  # fmt: skip
    assert [cost["backend"] for cost in found["costs"]] == found["world"]["backends"] == ["gloo", "shm"]
    assert found["machine"]["cores"] >= 1
    assert {row["memory"] for row in found["strides"]} == set(MEMORY)
    assert "<svg" in (tmp_path / "c.html").read_text()


@pytest.mark.parametrize(
    ("asked", "backend"),
    [
        (None, None),
        ("gloo", "gloo"),
        (["nccl", "gloo"], "nccl"),
        (["gloo", "shm"], "shm"),
        (["gloo", "shm", "mpi"], "mpi"),
    ],
)
def test_ranks_start_as_the_most_demanding_backend_needs(asked: Any, backend: str | None) -> None:
    """So that `open_world` finds out, and says, what is not there for it."""
    assert _backend(argparse.Namespace(backend=asked)) == backend


def one_sided(world: Any) -> str | None:
    def run() -> None:
        if world.rank == 1:
            raise ValueError("not with these\nand more")

    return refusal(world, Call(run, lambda: None, lambda: 0))


def test_what_one_rank_is_refused_all_know(ranks: Any) -> None:
    """Else the others would go on to be timed, and wait for it."""
    assert ranks(2, one_sided) == ["not with these"] * 2


def test_sizes_that_do_not_fit(cli: Cli, tmp_path: Path) -> None:
    """Seen before a tensor is made: one line, status 3."""
    done = cli(tmp_path, "comm", "--op", "all_reduce", "--sizes", "1KiB", "9999999GiB")
    assert done.status == 3, done.err
    assert "--sizes 9999999GiB: " in one_line(done.err)


def test_needed_and_free_memory(tmp_path: Path) -> None:
    """More for several that take turns, and for objects; a container's limit counts where it is below the host's."""
    one = needed_bytes(CommOptions(operations=("all_reduce",)), 100, 4)
    assert one == 500
    assert needed_bytes(CommOptions(backends=("gloo", "shm"), operations=("all_reduce",)), 100, 4) == 800
    assert needed_bytes(CommOptions(operations=("all_gather_object",)), 100, 4) == 1200
    assert needed_bytes(CommOptions(operations=("all_gather_object",), group_size=2), 100, 4) == 800
    assert free_memory_bytes(tmp_path) is None
    for name, text in (
        ("proc/meminfo", "MemTotal: 9 kB\nMemAvailable:      8 kB\n"),
        ("sys/fs/cgroup/memory.max", "max\n"),
        ("sys/fs/cgroup/memory.current", "3000\n"),
        ("sys/fs/cgroup/memory.stat", "anon 5\ninactive_file 1000\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_memory_bytes(tmp_path) == 8 * 1024
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("6000\n")
    assert free_memory_bytes(tmp_path) == 4000


def sharing(running: Running) -> int:
    """How many of its processes have opened the shared memory of their group."""
    found = 0
    for process in running.processes():
        with contextlib.suppress(OSError):
            found += "/memfd:everyrank" in Path(f"/proc/{process}/maps").read_text()
    return found


def test_interrupted(cli: Cli, tmp_path: Path) -> None:
    """Ctrl-C in the middle: one line, status 130, no process left."""
    running = cli.start(
        tmp_path, "comm", "--op", "all_reduce", "--sizes", "64MiB", "--seconds", "1e9", "--json", "c.json"
    )
    running.wait_for(lambda: sharing(running) >= 2)
    os.killpg(running.process.pid, signal.SIGINT)
    status, _, stderr = running.end()
    assert (status, one_line(stderr)) == (130, "everyrank: interrupted; all ranks are ended")
    assert running.left() == {}
    assert not (tmp_path / "c.json").exists()
