"""Measurements of bench: bytes of collectives equal theory, times belong to the right phase, peak memory."""

from __future__ import annotations

import csv
import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

import zoo
from everyrank import Workload, find_workload, parse_layout
from everyrank.benchmark.comm_counter import CommCounter
from everyrank.benchmark.instrumented import Instrumented, run_instrumented
from everyrank.data import all_updates
from everyrank.launch import Launch, run_ranks
from everyrank.loop import open_data, run_updates
from everyrank.measure.memory import peak_memory
from everyrank.measure.resources import Sampler, sampling
from everyrank.measure.split import PHASES, _fractions_in_profile, breakdown, exposed_fractions, phases
from everyrank.parallel.parallelize import find_blocks
from everyrank.strategies import prepare
from everyrank.train.throughput import ThroughputMeter
from everyrank.workload import load
from everyrank.world import World, single_process_world

# --- bytes of collectives


def measure_instrumented(world: World, name: str, layout: str) -> Instrumented:
    source: Any = find_workload(name) if name == "text" else zoo.workload(name)
    workload = load(source)
    train_data, _ = open_data(workload, world)
    with mock.patch("everyrank.benchmark.instrumented._PROFILED_UPDATES", 1):  # the tests ignore exposed fractions
        return run_instrumented(workload, train_data, parse_layout(layout), world)


@pytest.fixture(scope="module")
def text_results() -> dict[tuple[int, str], list[Instrumented]]:
    """Cached results of `text` by number of ranks and layout, because a measurement takes seconds."""
    return {}


def measure_text(
    ranks: Any, text_results: dict[tuple[int, str], list[Instrumented]], count: int, layout: str
) -> list[Instrumented]:
    if (count, layout) not in text_results:
        text_results[count, layout] = ranks(count, measure_instrumented, "text", layout)
    return text_results[count, layout]


def traffic_by_op(instrumented: Instrumented) -> dict[str, tuple[int, int]]:
    """Return {operation: (number of calls, bytes)}."""
    return {collective.op: (collective.count, collective.bytes) for collective in instrumented.collectives}


def parameters_of_text() -> tuple[list[list[Tensor]], list[Tensor]]:
    """Return the parameters of each block, and the other parameters."""
    workload = load(find_workload("text"))
    model = workload.model()
    blocks = [list(block.parameters()) for block in find_blocks(workload, model)]
    inside_blocks = {parameter for block in blocks for parameter in block}
    return blocks, [parameter for parameter in model.parameters() if parameter not in inside_blocks]


def count_elements(parameters: list[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def test_single_has_no_collectives(ranks: Any) -> None:
    [instrumented] = ranks(1, measure_instrumented, "frozen", "single")
    assert instrumented.collectives == []


def test_bytes_of_ddp_equal_theory(ranks: Any, text_results: Any) -> None:
    """ddp all-reduces every gradient once, and the sum and count of the loss, in float32."""
    blocks, rest = parameters_of_text()
    num_elements = sum(map(count_elements, blocks)) + count_elements(rest)
    for instrumented in measure_text(ranks, text_results, 2, "ddp"):
        assert {op: num_bytes for op, (_, num_bytes) in traffic_by_op(instrumented).items()} == {
            "all_reduce": 4 * (num_elements + 2)
        }
        assert {collective.group for collective in instrumented.collectives} == {"replicate"}


def test_bytes_of_zero1_equal_theory(ranks: Any, text_results: Any) -> None:
    """zero1 all-reduces like ddp, and then each owner broadcasts its parameters."""
    blocks, rest = parameters_of_text()
    num_elements = sum(map(count_elements, blocks)) + count_elements(rest)
    for instrumented in measure_text(ranks, text_results, 2, "zero1"):
        assert traffic_by_op(instrumented)["all_reduce"][1] == 4 * (num_elements + 2)
        assert traffic_by_op(instrumented)["broadcast"] == (2, 4 * num_elements)
        assert len(instrumented.collectives) == 2


def test_bytes_of_a_parameter_server_equal_theory(ranks: Any, text_results: Any) -> None:
    """The server sends all parameters and the total loss to each trainer, and receives a header and all gradients."""
    blocks, rest = parameters_of_text()
    parameter_bytes = 4 * (sum(map(count_elements, blocks)) + count_elements(rest))
    header_bytes = 8 * (3 + sum(map(len, blocks)) + len(rest))
    server, *trainers = measure_text(ranks, text_results, 3, "parameter_server")
    assert traffic_by_op(server) == {
        "send": (4, 2 * (parameter_bytes + 16)),
        "recv": (4, 2 * (header_bytes + parameter_bytes)),
    }
    for trainer in trainers:
        assert traffic_by_op(trainer) == {
            "send": (2, header_bytes + parameter_bytes),
            "recv": (2, parameter_bytes + 16),
        }


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.integration
def test_bytes_of_fsdp_equal_theory(ranks: Any, text_results: Any, count: int) -> None:
    """fsdp gathers blocks in forward and backward, and other parameters once. It reduce-scatters all gradients.

    If the number of ranks does not divide a dimension, it is padded. Sum and count of the loss are two float64 numbers,
    and the norm for clipping is one.
    """

    def padded_elements(parameters: list[Tensor]) -> int:
        return sum(
            -(-len(parameter) // count) * count * (parameter.numel() // len(parameter)) for parameter in parameters
        )

    blocks, rest = parameters_of_text()
    block_elements, rest_elements = sum(map(padded_elements, blocks)), padded_elements(rest)
    for instrumented in measure_text(ranks, text_results, count, "fsdp"):
        assert traffic_by_op(instrumented) == {
            "all_gather": (2 * len(blocks) + 1, 4 * (2 * block_elements + rest_elements) // count),
            "reduce_scatter": (len(blocks) + 1, 4 * (block_elements + rest_elements)),
            "all_reduce": (2, 2 * 8 + 8),
        }
        assert {collective.group for collective in instrumented.collectives} == {"shard"}


def collectives_of_an_update(world: World, has_extra_calls: bool) -> list[Any]:
    """Return the traffic of an update of ddp, optionally with an extra all-reduce and an extra message."""
    workload = zoo.workload("frozen")
    train_data, _ = open_data(workload, world)
    layout = parse_layout("ddp")
    prepared = prepare(workload, layout, world)
    updates = run_updates(prepared, train_data, all_updates(6, 4))
    for _ in range(4):
        next(updates)
    with CommCounter({}) as traffic:
        next(updates)
        if has_extra_calls:
            dist.all_reduce(torch.zeros(5, dtype=torch.float64))
            dist.send(torch.zeros(3), (world.rank + 1) % 2) if world.rank == 0 else dist.recv(torch.zeros(3), 0)
    return traffic.collectives()


def test_extra_collectives_are_counted(ranks: Any) -> None:
    """An extra all-reduce is counted, and an extra message, which CommDebugMode would miss."""
    normal, with_extra_calls = ranks(2, collectives_of_an_update, False), ranks(2, collectives_of_an_update, True)
    for rank, (normal_traffic, extra_traffic) in enumerate(zip(normal, with_extra_calls, strict=True)):
        [normal_all_reduce], [all_reduce, message] = normal_traffic, extra_traffic
        assert (all_reduce.count, all_reduce.bytes) == (normal_all_reduce.count + 1, normal_all_reduce.bytes + 5 * 8)
        assert (message.op, message.count, message.bytes) == (("send", "recv")[rank], 1, 12)


# --- time


class SlowForward(nn.Module):
    """A linear layer whose forward pass sleeps on one rank."""

    def __init__(self, slow_rank: int | None, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, width)
        self.slow_rank = slow_rank

    def forward(self, value: Tensor) -> Tensor:
        if self.slow_rank is not None and dist.get_rank() == self.slow_rank:
            time.sleep(SLEEP_SECONDS)
        return self.layer(value).sum(1)


class SlowDataset(Dataset[tuple[Tensor, Tensor]]):
    """Samples that optionally sleep when they are read."""

    deterministic = True

    def __init__(self, is_slow: bool) -> None:
        self.is_slow = is_slow

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.is_slow:
            time.sleep(SLEEP_SECONDS / 4)
        return torch.full((4,), float(index % 7)), torch.tensor(1.0)


SLEEP_SECONDS = 0.02


def slow_workload(slow_part: str) -> Workload:
    """Return a workload with a slow part: "data", "forward" (on rank 1), "gradient" (a large one) or "none"."""
    return Workload(
        name=slow_part,
        model=lambda: SlowForward(1 if slow_part == "forward" else None, 2_000_000 if slow_part == "gradient" else 3),
        train_data=lambda: SlowDataset(slow_part == "data"),
        loss=lambda output, target: ((output * 1e-6 - target).square().sum(), len(target)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
        global_batch=8,
        epochs=2,
    )


def measure_phases(world: World, slow_part: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return this rank's median seconds of each phase, and the fraction of exposed communication in each."""
    workload, layout = slow_workload(slow_part), parse_layout("ddp")
    data, _ = open_data(workload, world)
    prepared = prepare(workload, layout, world)
    updates = run_updates(prepared, data, all_updates(14, 10))
    for _ in range(3):
        next(updates)
    fractions = exposed_fractions(prepared.trainable, updates, 5, world.device)
    rows = phases(prepared.trainable, updates, world.device)
    assert len(rows) == 6
    return {phase: sorted(row[phase] for row in rows)[3] for phase in PHASES}, fractions


def test_slow_dataset_counts_as_data_phase(ranks: Any) -> None:
    """Each rank reads four samples per update, and each sample sleeps for a quarter of SLEEP_SECONDS."""
    for seconds, fractions in ranks(2, measure_phases, "data"):
        assert seconds["data"] >= SLEEP_SECONDS
        assert seconds["data"] == max(seconds.values())
        assert fractions["data"] < 0.1


def test_slow_forward_of_one_rank_is_exposed_communication_of_the_other(ranks: Any) -> None:
    """The fast rank waits in backward, in the all-reduce of the gradients."""
    (fast_seconds, fast_fractions), (slow_seconds, slow_fractions) = ranks(2, measure_phases, "forward")
    assert slow_seconds["forward"] >= SLEEP_SECONDS
    assert slow_fractions["forward"] < 0.01
    assert fast_seconds["forward"] < SLEEP_SECONDS
    exposed_seconds = fast_seconds["backward"] * fast_fractions["backward"]
    assert exposed_seconds > SLEEP_SECONDS / 2
    assert slow_seconds["backward"] * slow_fractions["backward"] < exposed_seconds


def test_a_large_gradient_is_exposed_communication(ranks: Any) -> None:
    """The all-reduce of 40 MB takes longer than the little computation, so backward waits for it."""
    for seconds, fractions in ranks(2, measure_phases, "gradient"):
        assert seconds["backward"] > seconds["forward"]
        assert fractions["backward"] > 0.02


def test_phases_add_up_to_the_time_of_the_updates(ranks: Any) -> None:
    """The time between two readings of the clock belongs to one phase, so no time is lost."""

    def total_and_phase_seconds(world: World) -> tuple[float, float]:
        workload, layout = slow_workload("none"), parse_layout("single")
        data, _ = open_data(workload, world)
        prepared = prepare(workload, layout, single_process_world(world))
        updates = run_updates(prepared, data, all_updates(20, 10))
        start = time.perf_counter()
        rows = phases(prepared.trainable, updates, world.device)
        return time.perf_counter() - start, sum(sum(row.values()) for row in rows)

    [(total_seconds, phase_seconds)] = ranks(1, total_and_phase_seconds)
    assert phase_seconds <= total_seconds
    assert phase_seconds > 0.5 * total_seconds


def test_order_of_phases_with_gradient_accumulation(ranks: Any) -> None:
    """The optimizer phase begins after each backward, also between micro-batches."""

    def entered_phases(world: World, accumulate: int) -> list[str]:
        workload, layout = slow_workload("none"), parse_layout(f"single:accumulate={accumulate}")
        data, _ = open_data(workload, world)
        prepared = prepare(workload, layout, single_process_world(world))
        entered: list[str] = []

        updates = run_updates(prepared, data, all_updates(1, 10))
        prepared.trainable.phase_observers.append(entered.append)
        phases(prepared.trainable, updates, world.device)
        return [phase for index, phase in enumerate(entered) if index == 0 or entered[index - 1] != phase]

    phases_of_one, phases_of_two = ["forward", "backward", "optimizer"], ["forward", "backward", "optimizer"] * 2
    assert ranks(1, entered_phases, 1) == [phases_of_one]
    assert ranks(1, entered_phases, 2) == [phases_of_two]


def event(name: str, start: float, end: float, category: str) -> dict[str, Any]:
    """Return an event of a profile."""
    return {"name": name, "cat": category, "ts": start, "dur": end - start, "tid": 1}


def test_exposed_fractions_are_nan_without_kernels() -> None:
    """In a container that may not record kernels, they would be 0. On CPU no kernels are needed."""
    phase_events = [
        event(f"everyrank:{phase}", 10 * i, 10 * i + 10, "user_annotation") for i, phase in enumerate(PHASES)
    ]
    cpu_events = [*phase_events, event("aten::mm", 11, 15, "cpu_op")]
    assert all(math.isnan(fraction) for fraction in _fractions_in_profile(cpu_events, "cuda").values())
    kernel_events = [event("gemm", 11, 14, "kernel"), event("ncclDevKernel_AllReduce", 20, 25, "kernel")]
    fractions = _fractions_in_profile([*cpu_events, *kernel_events], "cuda")
    assert fractions == {"data": 0.0, "forward": 0.0, "backward": 0.5, "optimizer": 0.0}
    assert _fractions_in_profile(cpu_events, "cpu") == dict.fromkeys(PHASES, 0.0)
    nan_fractions, known_fractions = [math.nan] * len(PHASES), list(fractions.values())
    assert breakdown([[[1.0] * 4, [1.0] * 4]], [known_fractions, nan_fractions], [4.0]) is None


# --- memory


def test_peak_memory_counts_tensors_alive_at_the_same_time() -> None:
    live_tensors: list[Tensor] = []
    with peak_memory(torch.device("cpu")) as memory:
        live_tensors.append(torch.zeros(1 << 18))  # 1 MiB
        for _ in range(3):
            torch.zeros(1 << 19)  # 2 MiB, freed at once
        live_tensors.append(torch.zeros(1 << 18))
    assert memory.bytes == 3 << 20
    with peak_memory(torch.device("cpu")) as memory:
        live_tensors.clear()  # freeing tensors from before the block does not lower the peak
        torch.zeros(1 << 18)
    assert memory.bytes == 1 << 20


def test_peak_memory_includes_optimizer_state(ranks: Any) -> None:
    """Adam has two numbers of state for each parameter, and SGD without momentum has none."""

    def peak_bytes(world: World, name: str) -> int:
        workload = dataclasses.replace(
            slow_workload("none"),
            model=lambda: SlowForward(None, 100_000),
            optimizer=(lambda model: torch.optim.SGD(model.parameters(), lr=1e-3))
            if name == "sgd"
            else (lambda model: torch.optim.Adam(model.parameters(), foreach=False)),
        )
        data, _ = open_data(workload, world)
        return run_instrumented(workload, data, parse_layout("single"), single_process_world(world)).peak_memory_bytes

    [sgd_bytes], [adam_bytes] = ranks(1, peak_bytes, "sgd"), ranks(1, peak_bytes, "adam")
    parameter_bytes = 500_000 * 4
    assert sgd_bytes >= 2 * parameter_bytes  # parameters and gradients
    assert adam_bytes >= sgd_bytes + parameter_bytes


def test_peak_memory_of_fsdp_is_less_than_of_ddp(ranks: Any, text_results: Any) -> None:
    """With fsdp, a rank has only a shard of the parameters, gradients and optimizer state."""
    ddp_bytes = [rank_result.peak_memory_bytes for rank_result in measure_text(ranks, text_results, 2, "ddp")]
    fsdp_bytes = [rank_result.peak_memory_bytes for rank_result in measure_text(ranks, text_results, 2, "fsdp")]
    assert max(fsdp_bytes) < min(ddp_bytes)


# --- resources


def test_sample_belongs_to_the_layout_that_ran_in_its_whole_interval() -> None:
    """A sample covers half a second. It belongs to no layout if two layouts ran in this time."""
    sampler = Sampler(started=100.0)
    sampler.turns = [(101.0, "check"), (102.0, "0"), (104.0, "1"), (104.2, "0"), (106.0, "end")]

    def row(sample_time: float, percent: float, gpu: float | None = None) -> dict[str, Any]:
        return {
            "time": sample_time,
            "cpu_percent": percent,
            "others_percent": 10 * percent,
            "memory_bytes": 7,
            "gpu_percent": gpu,
            "gpu_memory_bytes": None if gpu is None else 9,
        }

    sampler.rows = [row(101.6, 1), row(102.3, 2), row(102.6, 3), row(104.1, 4), row(104.4, 5), row(104.8, 6, 50.0)]
    resources = sampler.of("0")
    assert resources is not None
    assert (resources.seconds, resources.cpu_percent, resources.memory_bytes) == ([2.6, 4.8], [3, 6], [7, 7])
    assert resources.others_percent == [30, 60]
    assert sampler.others_cores == 0.35
    assert resources.gpu_percent == []  # one of the two samples has no value
    assert sampler.of("1") is None
    sampler.rows = [row(105.0, 1, 30.0)]
    resources = sampler.of("0")
    assert resources is not None
    assert (resources.gpu_percent, resources.gpu_memory_bytes) == ([30.0], [9])


def test_samples_separate_the_ranks_of_this_host_from_other_programs(tmp_path: Path) -> None:
    """Each rank has a supervisor as its parent, so the relatives of rank 0 do not include the other ranks."""

    def sample_in_rank_0(info: Any, folder: Path) -> Any:  # pickled by value, so these ranks do not import torch
        """Allocate 200 MiB on rank 1 while rank 0 samples. Return the samples of rank 0."""
        ballast = b"x" * (200 << 20 if info.rank else 1)
        ready_file, done_file = folder / "there", folder / "done"
        if info.rank:
            ready_file.write_bytes(ballast[:1])
            while not done_file.exists():
                time.sleep(0.05)
            return None
        while not ready_file.exists():
            time.sleep(0.05)
        with sampling(time.monotonic(), active=True) as sampler:
            sampler.now_running("us")
            while len(sampler.rows) < 4:
                time.sleep(0.1)
                sampler.update()
        done_file.touch()
        return sampler.of("us")

    program = f"import time\nend = time.monotonic() + 120\nwhile time.monotonic() < end: pass  # {tmp_path}"
    orphan = subprocess.run(  # starts a process that belongs to no rank and prints its id
        ["sh", "-c", '"$1" -c "$2" >/dev/null 2>&1 & echo $!', "sh", sys.executable, program],
        capture_output=True,
        text=True,
        check=True,
    )
    try:
        resources = run_ranks(Launch(processes=2), sample_in_rank_0, tmp_path)[0]
    finally:
        os.kill(int(orphan.stdout), signal.SIGKILL)
    assert max(resources.memory_bytes) > 200 << 20
    assert max(resources.others_percent) > 5.0


def test_sampling_ends_with_its_block() -> None:
    """The sampling process ends with the block, and its samples can be read."""
    with sampling(time.monotonic(), active=True) as sampler:
        sampler.now_running("us")
        time.sleep(2.5)
        children = psutil.Process().children()
        sampler_processes = [child for child in children if "everyrank.measure.resources" in " ".join(child.cmdline())]
        assert len(sampler_processes) == 1
    assert not sampler_processes[0].is_running() or sampler_processes[0].status() == psutil.STATUS_ZOMBIE
    resources = sampler.of("us")
    assert resources is not None
    assert len(resources.seconds) >= 1
    with sampling(time.monotonic(), active=False) as sampler:
        pass
    assert sampler.rows == []


def test_resource_log_of_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has rows for cpu, others and each GPU by UUID. A resumed training appends. A link is not followed."""
    from everyrank.measure.resource_log import COLUMNS, resource_log

    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho GPU-7a, 00000000:3B:00.0, 45, 1024\nexec sleep 100\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    path = tmp_path / "resources.csv"

    def rows() -> list[dict[str, str]]:
        return list(csv.DictReader(path.read_text().splitlines()))

    for is_resumed in (False, True):
        num_previous = len(rows()) if is_resumed else 0
        with resource_log(path, "here", is_resumed, delay_seconds=0.0):
            deadline = time.monotonic() + 120
            while len(rows()) < num_previous + 4 and time.monotonic() < deadline:
                time.sleep(0.05)
        assert len(rows()) >= num_previous + 4
    logged_rows = rows()
    assert path.read_text().count(",".join(COLUMNS)) == 1
    assert {(row["host"], row["device"]) for row in logged_rows} == {
        ("here", "cpu"),
        ("here", "others"),
        ("here", "GPU-7a"),
    }
    gpu = next(row for row in logged_rows if row["device"] == "GPU-7a")
    assert (float(gpu["percent"]), int(gpu["memory_bytes"])) == (45.0, 1024 * 2**20)
    assert all(float(row["percent"]) >= 0 for row in logged_rows)
    link = tmp_path / "link.csv"
    link.symlink_to(tmp_path / "mine.csv")
    with resource_log(link, "here", is_resumed=False, delay_seconds=100.0):
        pass
    assert not (tmp_path / "mine.csv").exists()


def test_pause_at_the_end_of_an_epoch_counts_for_no_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch ends during a pause between two updates. The pause counts neither for it nor for the next epoch."""
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    meter = ThroughputMeter(0, lambda step: 10 * step)
    epoch_seconds = []
    for seconds in (3.0, 0.5):
        now += seconds  # time of updates
        with meter.pause():
            now += 7.0  # time of validation
            epoch_seconds.append(meter.epoch())
            now += 2.0  # time of saving a checkpoint
    assert epoch_seconds == [3.0, 0.5]
    assert meter.paused == 18.0
