"""`everyrank comm`: correct results of every operation, detection of wrong elements, and refused arguments."""

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
from everyrank.collectives.stride_check import MEMORY_LAYOUTS, check_strides
from everyrank.collectives.sweep import refusal, sweep
from everyrank.commands.launching import _backend
from everyrank.errors import UsageError
from everyrank.measure.memory import free_memory_bytes
from processes import Cli, RunningCommand, only_error_line, refusal_message

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]


def test_command_line_names_equal_the_keys_of_the_tables() -> None:
    """options.py repeats the names, because the command line must not import torch."""
    assert tuple(OPERATIONS) == OPERATION_NAMES
    assert tuple(ALGORITHMS) == ALGORITHM_NAMES


@pytest.mark.parametrize("memory", ["contiguous", *MEMORY_LAYOUTS])
def test_expected_values_of_a_case(memory: str) -> None:
    """Ranks have different patterns (except for product), and neighbouring elements differ."""
    for reduction, combine in (
        ("sum", sum),
        ("max", max),
        ("avg", lambda elements: sum(elements) / 3),
        ("product", np.prod),
    ):
        case = Case(0, 3, None, 10, torch.float64, reduction=reduction, memory=memory)
        ranks = [case.values(rank) for rank in range(3)]
        for rank_index, values in enumerate(ranks):
            assert values.is_contiguous() == (memory == "contiguous")
            assert not any(torch.equal(values, other) for other in ranks[:rank_index]) or reduction == "product"
            assert (values[1:] != values[:-1]).all()
        expected = [
            combine([float(value) for value in elements])
            for elements in zip(*(tensor.flatten() for tensor in ranks), strict=True)
        ]
        assert case.reduced().flatten().tolist() == expected


def failed_combinations(world: Any, backend: str, size: int, length: int) -> list[str]:
    """Run every operation, dtype and reduction, blocking and asynchronous. Return those with a wrong element."""
    members = [list(range(first, first + size)) for first in range(0, world.size, size)]
    group = dist.new_subgroups_by_enumeration(members, backend=backend)[0]
    failures = []
    for name, operation in OPERATIONS.items():
        if name == "monitored_barrier" and backend != "gloo":
            continue  # torch has it only for gloo
        for dtype in DTYPES if operation.has_size else DTYPES[:1]:
            for reduction in reductions_of(name, dtype):
                for is_async in {False, operation.has_async}:
                    step = operation.multiple(size)
                    case = Case(world.rank % size, size, group, -(-length // step) * step, dtype)
                    case = Case(**{**vars(case), "reduction": reduction, "is_async": is_async})
                    call = operation.make(case)
                    call.reset()
                    call.run()
                    if call.wrong():
                        failures.append(f"{name} {dtype} {reduction} {is_async}")
    return failures


def reductions_of(name: str, dtype: torch.dtype) -> list[str]:
    """Return the reductions that an operation supports for a dtype."""
    if name not in REDUCING:
        return ["sum"]
    return ["sum", "product", "min", "max", *(["avg"] if dtype.is_floating_point else ["band", "bor", "bxor"])]


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize(("count", "size"), [(2, 2), (3, 3), (4, 2)])
def test_every_operation_is_correct(ranks: Any, backend: str, count: int, size: int) -> None:
    """All dtypes and reductions are tested with odd lengths, and also in two groups at the same time."""
    for length in (1, 1001):
        assert ranks(count, failed_combinations, backend, size, length) == [[]] * count


def wrong_counts_before_the_call(world: Any) -> dict[str, int]:
    """Return the number of wrong elements of each operation's output before the operation has run."""
    wrong_counts = {}
    for name, operation in OPERATIONS.items():
        if not operation.has_size or "object" in name:
            continue
        step = operation.multiple(2)
        case = Case(world.rank, 2, world.group, -(-8 // step) * step)
        call = operation.make(case)
        call.reset()  # fills the output with values that are wrong before the call
        wrong_counts[name] = call.wrong()
    return wrong_counts


def test_output_of_an_operation_that_did_not_run_is_wrong(ranks: Any) -> None:
    """Rank 1 counts wrong elements for all operations but reduce and gather, whose results only rank 0 has."""
    first, second = ranks(2, wrong_counts_before_the_call)
    assert all(second[name] > 0 for name in second if name not in ("reduce", "gather"))
    assert all(first[name] > 0 for name in ("reduce", "gather", "all_reduce", "all_gather", "isend"))


def test_comm_writes_rows_and_fitted_costs(cli: Cli, tmp_path: Path) -> None:
    """The bandwidths follow from bytes and times, and the exit status is 0."""
    args = ["--op", "all_reduce", "barrier", "--sizes", "4:1KiB", "--seconds", "0.01", "--json", "c.json"]
    result = cli(tmp_path, "comm", *args)
    assert result.status == 0, result.err
    assert "all results correct" in result.out
    report = json.loads((tmp_path / "c.json").read_text())
    *sizes, barrier = report["rows"]
    assert [row["num_bytes"] for row in sizes] == [4, 16, 64, 256, 1024]
    for row in sizes:
        assert row["algorithm_bandwidth"] == pytest.approx(row["num_bytes"] / row["mean_seconds"])
        assert row["bus_bandwidth"] == pytest.approx(row["algorithm_bandwidth"])  # 2 (N - 1) / N is 1 for two ranks
        assert 0 < row["p50_seconds"] <= row["p99_seconds"]
    assert (barrier["num_bytes"], barrier["bus_bandwidth"]) == (0, None)
    assert [cost["operation"] for cost in report["costs"]] == ["all_reduce"]


BROKEN_ALL_REDUCE_SCRIPT = """
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


def test_comm_exits_with_status_1_on_a_wrong_element(cli: Cli, tmp_path: Path) -> None:
    """Every all-reduce has one wrong element on each of two ranks. It is checked twice: before and after timing."""
    (tmp_path / "broken.py").write_text(BROKEN_ALL_REDUCE_SCRIPT)
    result = cli.on_ranks(tmp_path, "comm", "--op", "all_reduce", "--sizes", "20B", size=2, script="broken.py")
    assert result.statuses[0] == 1, result
    assert "4 wrong elements" in result.out


def test_comm_prints_traffic_of_an_algorithm(cli: Cli, tmp_path: Path) -> None:
    """The output has the steps and bytes of the rank with most traffic."""
    result = cli(
        tmp_path,
        "comm", "--op", "all_reduce", "--algorithm", "ring", "--sizes", "1KiB", "--processes", "3", "--seconds", "0.01",
    )  # fmt: skip
    assert result.status == 0, result.err
    assert "1368 B in 4 steps" in result.out
    assert "by" in result.out
    assert "shm ring" in result.out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_over_many_ranks_are_exact(dtype: torch.dtype) -> None:
    """A backend may add in any order, and in the dtype. bfloat16 has all integers only up to 256."""
    for size in (36, 37, 300):
        cases = [Case(rank, size, None, 500, dtype) for rank in range(size)]
        rows = [case.values(case.rank) for case in cases]
        expected = cases[0].reduced()
        assert all(row.any() for row in rows)
        for order in (rows, rows[::-1]):
            total = torch.zeros_like(expected)
            for row in order:
                total += row
            assert torch.equal(total, expected)


def refused_operation(world: Any) -> str:
    """Return the error of `--op send` in a group of one rank."""
    groups = {"gloo": dist.new_subgroups_by_enumeration([[0], [1]])[0]}
    with pytest.raises(UsageError) as refused:
        sweep(world, groups, CommOptions(operations=("send",), sizes=(4,), group_size=1))
    return str(refused.value)


def test_operation_that_needs_more_ranks_is_refused(ranks: Any) -> None:
    """Without it, the table would be empty."""
    assert ranks(2, refused_operation) == ["--op send: needs 2 ranks in a group; give --processes 2, or more"] * 2


def test_rank_255_has_an_object() -> None:
    """Its value is that of a byte."""
    call = OPERATIONS["all_gather_object"].make(Case(255, 256, None, 1))
    assert call.wrong() == 256  # nothing was received yet


@pytest.mark.parametrize(
    ("command_text", "fragment"),
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
        ("--seconds nan", "--seconds nan: give more than 0"),
        ("--seconds inf", "--seconds inf: give more than 0"),
    ],
)
def test_comm_refuses_invalid_arguments(capsys: pytest.CaptureFixture[str], command_text: str, fragment: str) -> None:
    """The error is one line with status 2, and no process is started."""
    assert fragment in refusal_message(capsys, "comm", *command_text.split())


def test_parse_sizes_and_size_text() -> None:
    """A range increases by factors of four. `size_text` uses the largest unit that gives a whole number."""
    assert parse_sizes(["4:1KiB"]) == (4, 16, 64, 256, 1024)
    assert parse_sizes(["1MB", "3", "3"]) == (10**6, 3)
    assert [size_text(count) for count in (3, 1024, 1025, 2**26)] == ["3 B", "1 KiB", "1025 B", "64 MiB"]


def test_fit_cost_recovers_latency_and_bandwidth() -> None:
    """Neither value is negative, and the largest error is reported."""
    size = np.array([4.0, 1e3, 1e5, 1e7])
    cost = fit_cost(size.tolist(), (1e-4 + size / 2e9).tolist())
    assert cost.latency_seconds == pytest.approx(1e-4)
    assert cost.bytes_per_second == pytest.approx(2e9)
    assert cost.largest_error < 1e-9
    assert cost.seconds(2e9) == pytest.approx(1 + 1e-4)
    decreasing_times = fit_cost(size.tolist(), [4e-4, 3e-4, 2e-4, 1e-4])
    assert decreasing_times.bytes_per_second == float("inf")
    assert 1e-4 < decreasing_times.latency_seconds < 4e-4
    assert decreasing_times.largest_error > 0.1
    through_zero = fit_cost([1e6, 1e7, 1e8], [1e-4, 1.1e-2, 1.1e-1])
    assert through_zero.latency_seconds == 0.0


def sweep_two_backends(world: Any, options: CommOptions) -> tuple[list[Any], list[Any], list[str]]:
    """Return the rows, the stride checks, and the group of each all-reduce in order."""
    gloo, other_group = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
    groups = {"gloo": gloo, "other": other_group}
    group_names: list[str] = []
    original_all_reduce = dist.all_reduce

    def all_reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        group_names.append("gloo" if kwargs["group"] is gloo else "other")
        return original_all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        rows = sweep(world, groups, options)
    finally:
        dist.all_reduce = original_all_reduce
    # gloo under the name of shm must fail, because shm has to support strided tensors; the real shm must not
    strides = [check_strides(world, {name: group}, CommOptions()) for name, group in (("gloo", gloo), ("shm", gloo))]
    register_backend("shm")
    strides.append(check_strides(world, {"shm": dist.new_group(backend="shm")}, CommOptions()))
    return rows, strides, group_names


def test_backends_are_measured_in_turns(ranks: Any) -> None:
    """Each turn has a few calls, and the order of backends alternates.

    Rows have speedups relative to the first backend.
    """
    options = CommOptions(operations=("all_reduce",), sizes=(4, 64), seconds=1e9)
    (rows, (strides, gloo_as_shm, shm), group_names), (rows_of_rank_1, _, _) = ranks(2, sweep_two_backends, options)
    assert [(row.num_bytes, row.backend) for row in rows] == [(4, "gloo"), (4, "other"), (64, "gloo"), (64, "other")]
    assert rows == rows_of_rank_1  # every rank has the measurements of all ranks
    turns = [(name, len(list(calls))) for name, calls in itertools.groupby(group_names[: len(group_names) // 2][2:])]
    # A turn is 6 calls, and the first is not timed. After a round for an estimate, the order alternates, so "other" has
    # two turns in a row.
    assert turns[:4] == [("gloo", 6), ("other", 6), ("gloo", 6), ("other", 12)]
    assert len(group_names) == 2 * (2 + 2 * 40 * 6)  # 2 sizes, each with one trial call and 40 turns on 2 backends
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        assert (first.calls, first.mean_speedup, first.p50_speedup, second.calls) == (200, None, None, 200)
        assert second.mean_speedup == pytest.approx(first.mean_seconds / second.mean_seconds)
        assert second.p50_speedup == pytest.approx(first.p50_seconds / second.p50_seconds)
    stride_checks = {(row.operation, row.memory): row for row in strides}
    with_tensors = [name for name, operation in OPERATIONS.items() if operation.has_tensors]
    assert set(stride_checks) == {(name, memory) for name in with_tensors for memory in MEMORY_LAYOUTS}
    assert "contiguous" in stride_checks["send", "strided"].refused
    assert stride_checks["all_reduce", "strided"].num_wrong > 0  # gloo also sums the memory between the elements
    assert stride_checks["all_gather", "strided"].num_wrong == 0
    assert not any(row.is_failure for row in strides)  # gloo does not promise to support strided tensors
    assert not any(row.is_failure or row.refused or row.num_wrong for row in shm)
    assert {row.operation for row in gloo_as_shm if row.is_failure and row.memory == "strided"} == {
        row.operation for row in strides if row.memory == "strided" and (row.refused or row.num_wrong)
    }


def test_comm_compares_several_backends(cli: Cli, tmp_path: Path) -> None:
    """The rows are in the order of `--backend`. The report has the costs of both backends, and the page has a chart."""
    args = [
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
    result = cli(tmp_path, "comm", *args, "--json", "c.json", "--html", "c.html")
    assert result.status == 0, result.err
    assert "gloo, shm, 2 ranks on cpu" in result.out
    assert "shm monitored_barrier: not supported" in result.out
    report = json.loads((tmp_path / "c.json").read_text())
    assert [(row["num_bytes"], row["backend"]) for row in report["rows"][:4]] == [
        (4, "gloo"), (4, "shm"), (16, "gloo"), (16, "shm"),
    ]  # fmt: skip
    assert [cost["backend"] for cost in report["costs"]] == report["world"]["backends"] == ["gloo", "shm"]
    assert report["machine"]["cores"] >= 1
    assert {row["memory"] for row in report["strides"]} == set(MEMORY_LAYOUTS)
    assert "<svg" in (tmp_path / "c.html").read_text()


@pytest.mark.parametrize(
    ("backends", "backend"),
    [
        (None, None),
        ("gloo", "gloo"),
        (["nccl", "gloo"], "nccl"),
        (["gloo", "shm"], "shm"),
        (["gloo", "shm", "mpi"], "mpi"),
    ],
)
def test_launch_prefers_mpi_then_shm_then_the_first_backend(backends: Any, backend: str | None) -> None:
    """mpi and shm decide how ranks start. Without them, the first backend of --backend is used."""
    assert _backend(argparse.Namespace(backend=backends)) == backend


def refusal_by_rank_1(world: Any) -> str | None:
    """Return the refusal of an operation that fails only on rank 1."""

    def run() -> None:
        if world.rank == 1:
            raise ValueError("not with these\nand more")

    return refusal(world, Call(run, lambda: None, lambda: 0))


def test_all_ranks_receive_a_refusal_of_one_rank(ranks: Any) -> None:
    """Otherwise the other ranks would time the operation and hang."""
    assert ranks(2, refusal_by_rank_1) == ["not with these"] * 2


def test_comm_refuses_sizes_that_do_not_fit_in_memory(cli: Cli, tmp_path: Path) -> None:
    """It fails before it allocates a tensor, with one line and status 3."""
    result = cli(tmp_path, "comm", "--op", "all_reduce", "--sizes", "1KiB", "9999999GiB")
    assert result.status == 3, result.err
    assert "--sizes 9999999GiB: " in only_error_line(result.err)


def test_needed_and_free_memory(tmp_path: Path) -> None:
    """Several backends and object collectives need more memory.

    A container's limit counts if it is below the host's.
    """
    num_bytes = needed_bytes(CommOptions(operations=("all_reduce",)), 100, 4)
    assert num_bytes == 500
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


def count_shm_processes(running: RunningCommand) -> int:
    """Return how many processes of the command have mapped the shared memory of their group."""
    count = 0
    for process in running.processes():
        with contextlib.suppress(OSError):
            count += "/memfd:everyrank" in Path(f"/proc/{process}/maps").read_text()
    return count


def test_comm_interrupted_by_ctrl_c_leaves_no_process(cli: Cli, tmp_path: Path) -> None:
    """It prints one line and exits with status 130."""
    running = cli.start(
        tmp_path, "comm", "--op", "all_reduce", "--sizes", "64MiB", "--seconds", "1e9", "--json", "c.json"
    )
    running.wait_for(lambda: count_shm_processes(running) >= 2)
    os.killpg(running.process.pid, signal.SIGINT)
    status, _, stderr = running.end()
    assert (status, only_error_line(stderr)) == (130, "everyrank: interrupted; all ranks are ended")
    assert running.remaining_processes() == {}
    assert not (tmp_path / "c.json").exists()
