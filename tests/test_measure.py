"""The instruments: bytes equal theory, what takes time is found where it is, memory is what tensors take."""

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

# --- bytes


def inside(world: World, name: str, layout: str) -> Instrumented:
    source: Any = find_workload(name) if name == "text" else zoo.workload(name)
    workload = load(source)
    train_data, _ = open_data(workload, world)
    with mock.patch("everyrank.benchmark.instrumented._PROFILED_UPDATES", 1):  # what is exposed is no matter here
        return run_instrumented(workload, train_data, parse_layout(layout), world)


@pytest.fixture(scope="module")
def seen() -> dict[tuple[int, str], list[Instrumented]]:
    """Looking into `text` takes seconds: once for each layout and number of ranks."""
    return {}


def inside_text(
    ranks: Any, seen: dict[tuple[int, str], list[Instrumented]], count: int, layout: str
) -> list[Instrumented]:
    if (count, layout) not in seen:
        seen[count, layout] = ranks(count, inside, "text", layout)
    return seen[count, layout]


def sent(found: Instrumented) -> dict[str, tuple[int, int]]:
    """Operation -> (how often, bytes)."""
    return {collective.op: (collective.count, collective.bytes) for collective in found.collectives}


def parameters_of_text() -> tuple[list[list[Tensor]], list[Tensor]]:
    """Those of each block, and the rest."""
    workload = load(find_workload("text"))
    model = workload.model()
    blocks = [list(block.parameters()) for block in find_blocks(workload, model)]
    inside_blocks = {parameter for block in blocks for parameter in block}
    return blocks, [parameter for parameter in model.parameters() if parameter not in inside_blocks]


def elements(parameters: list[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def test_single_sends_nothing(ranks: Any) -> None:
    [found] = ranks(1, inside, "frozen", "single")
    assert found.collectives == []


def test_bytes_of_ddp_equal_theory(ranks: Any, seen: Any) -> None:
    """Every gradient once, and the sum and count of the loss, in float32."""
    blocks, rest = parameters_of_text()
    total = sum(map(elements, blocks)) + elements(rest)
    for found in inside_text(ranks, seen, 2, "ddp"):
        assert {op: sum_ for op, (_, sum_) in sent(found).items()} == {"all_reduce": 4 * (total + 2)}
        assert {collective.group for collective in found.collectives} == {"replicate"}


def test_bytes_of_zero1_equal_theory(ranks: Any, seen: Any) -> None:
    """As ddp, and every parameter once from its owner."""
    blocks, rest = parameters_of_text()
    total = sum(map(elements, blocks)) + elements(rest)
    for found in inside_text(ranks, seen, 2, "zero1"):
        assert sent(found)["all_reduce"][1] == 4 * (total + 2)
        assert sent(found)["broadcast"] == (2, 4 * total)
        assert len(found.collectives) == 2


def test_bytes_of_a_parameter_server_equal_theory(ranks: Any, seen: Any) -> None:
    """For each trainer all parameters out, all gradients in, a head before these, and the total after them."""
    blocks, rest = parameters_of_text()
    parameters = 4 * (sum(map(elements, blocks)) + elements(rest))
    head = 8 * (3 + sum(map(len, blocks)) + len(rest))
    server, *trainers = inside_text(ranks, seen, 3, "parameter_server")
    assert sent(server) == {"send": (4, 2 * (parameters + 16)), "recv": (4, 2 * (head + parameters))}
    for found in trainers:
        assert sent(found) == {"send": (2, head + parameters), "recv": (2, parameters + 16)}


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.integration
def test_bytes_of_fsdp_equal_theory(ranks: Any, seen: Any, count: int) -> None:
    """Own parts of blocks gathered in forward and backward, of the rest once; all gradients scattered.

    A dimension that the ranks do not divide is padded. The count of the loss is two float64, the norm to clip by one.
    """

    def padded(parameters: list[Tensor]) -> int:
        return sum(-(-len(p) // count) * count * (p.numel() // len(p)) for p in parameters)

    blocks, rest = parameters_of_text()
    in_blocks, outside = sum(map(padded, blocks)), padded(rest)
    for found in inside_text(ranks, seen, count, "fsdp"):
        assert sent(found) == {
            "all_gather": (2 * len(blocks) + 1, 4 * (2 * in_blocks + outside) // count),
            "reduce_scatter": (len(blocks) + 1, 4 * (in_blocks + outside)),
            "all_reduce": (2, 2 * 8 + 8),
        }
        assert {collective.group for collective in found.collectives} == {"shard"}


def counted(world: World, extra: bool) -> list[Any]:
    """The traffic of a step of ddp, into which somebody may have put an all-reduce too many."""
    workload = zoo.workload("frozen")
    train_data, _ = open_data(workload, world)
    layout = parse_layout("ddp")
    prepared = prepare(workload, layout, world)
    updates = run_updates(prepared, train_data, all_updates(6, 4))
    for _ in range(4):
        next(updates)
    with CommCounter({}) as traffic:
        next(updates)
        if extra:
            dist.all_reduce(torch.zeros(5, dtype=torch.float64))
            dist.send(torch.zeros(3), (world.rank + 1) % 2) if world.rank == 0 else dist.recv(torch.zeros(3), 0)
    return traffic.collectives()


def test_what_is_too_much_is_counted(ranks: Any) -> None:
    """The mutation of the tests above: one all-reduce more, and a message that CommDebugMode would miss."""
    for rank, (right, wrong) in enumerate(zip(ranks(2, counted, False), ranks(2, counted, True), strict=True)):
        [one], [more, message] = right, wrong
        assert (more.count, more.bytes) == (one.count + 1, one.bytes + 5 * 8)
        assert (message.op, message.count, message.bytes) == (("send", "recv")[rank], 1, 12)


# --- time


class Sleepy(nn.Module):
    """A linear layer; on one rank its forward pass takes a nap."""

    def __init__(self, naps_on: int | None, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, width)
        self.naps_on = naps_on

    def forward(self, value: Tensor) -> Tensor:
        if self.naps_on is not None and dist.get_rank() == self.naps_on:
            time.sleep(NAP_SECONDS)
        return self.layer(value).sum(1)


class Slow(Dataset[tuple[Tensor, Tensor]]):
    """Points, each of which may take a short nap to read."""

    deterministic = True

    def __init__(self, naps: bool) -> None:
        self.naps = naps

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.naps:
            time.sleep(NAP_SECONDS / 4)
        return torch.full((4,), float(index % 7)), torch.tensor(1.0)


NAP_SECONDS = 0.02


def sleepy(what: str) -> Workload:
    return Workload(
        name=what,
        model=lambda: Sleepy(1 if what == "forward" else None, 2_000_000 if what == "gradient" else 3),
        train_data=lambda: Slow(what == "data"),
        loss=lambda output, target: ((output * 1e-6 - target).square().sum(), len(target)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
        global_batch=8,
        epochs=2,
    )


def taken_apart(world: World, what: str) -> tuple[dict[str, float], dict[str, float]]:
    """This rank's median seconds of each phase, and the share of exposed communication in each."""
    workload, layout = sleepy(what), parse_layout("ddp")
    data, _ = open_data(workload, world)
    prepared = prepare(workload, layout, world)
    updates = run_updates(prepared, data, all_updates(14, 10))
    for _ in range(3):
        next(updates)
    shares = exposed_fractions(prepared.trainable, updates, 5, world.device)
    rows = phases(prepared.trainable, updates, world.device)
    assert len(rows) == 6
    return {phase: sorted(row[phase] for row in rows)[3] for phase in PHASES}, shares


def test_a_nap_in_the_dataset_is_data(ranks: Any) -> None:
    """Four samples a rank, a quarter of a nap each."""
    for seconds, shares in ranks(2, taken_apart, "data"):
        assert seconds["data"] >= NAP_SECONDS
        assert seconds["data"] == max(seconds.values())
        assert shares["data"] < 0.1


def test_a_nap_in_forward_on_one_rank_is_forward_there_and_waiting_on_the_other(ranks: Any) -> None:
    (waits, waits_shares), (naps, naps_shares) = ranks(2, taken_apart, "forward")
    assert naps["forward"] >= NAP_SECONDS
    assert naps_shares["forward"] < 0.01
    assert waits["forward"] < NAP_SECONDS
    exposed = waits["backward"] * waits_shares["backward"]
    assert exposed > NAP_SECONDS / 2
    assert naps["backward"] * naps_shares["backward"] < exposed


def test_a_large_gradient_is_exposed_communication(ranks: Any) -> None:
    """40 MB for a handful of arithmetic: backward waits for them."""
    for seconds, shares in ranks(2, taken_apart, "gradient"):
        assert seconds["backward"] > seconds["forward"]
        assert shares["backward"] > 0.02


def test_the_parts_are_the_whole(ranks: Any) -> None:
    """What lies between two readings of the clock belongs to one phase: nothing is lost."""

    def run_ranks(world: World) -> tuple[float, float]:
        workload, layout = sleepy("none"), parse_layout("single")
        data, _ = open_data(workload, world)
        prepared = prepare(workload, layout, single_process_world(world))
        updates = run_updates(prepared, data, all_updates(20, 10))
        begin = time.perf_counter()
        rows = phases(prepared.trainable, updates, world.device)
        return time.perf_counter() - begin, sum(sum(row.values()) for row in rows)

    [(whole, parts)] = ranks(1, run_ranks)
    assert parts <= whole
    assert parts > 0.5 * whole


def test_no_phase_is_told_twice(ranks: Any) -> None:
    """Accumulating, the forward pass of each micro-batch is forward, and normalising at the end is optimizer."""

    def run_ranks(world: World, accumulate: int) -> list[str]:
        workload, layout = sleepy("none"), parse_layout(f"single:accumulate={accumulate}")
        data, _ = open_data(workload, world)
        prepared = prepare(workload, layout, single_process_world(world))
        seen: list[str] = []

        updates = run_updates(prepared, data, all_updates(1, 10))
        prepared.trainable.phase_observers.append(seen.append)
        phases(prepared.trainable, updates, world.device)
        return [phase for index, phase in enumerate(seen) if index == 0 or seen[index - 1] != phase]

    one, two = ["forward", "backward", "optimizer"], ["forward", "backward", "optimizer"] * 2
    assert ranks(1, run_ranks, 1) == [one]
    assert ranks(1, run_ranks, 2) == [two]


def event(name: str, begin: float, end: float, kind: str) -> dict[str, Any]:
    return {"name": name, "cat": kind, "ts": begin, "dur": end - begin, "tid": 1}


def test_a_profile_without_kernels_says_nothing_of_a_device() -> None:
    """A container that may not count kernels would have had no exposed communication at all."""
    marks = [event(f"everyrank:{phase}", 10 * i, 10 * i + 10, "user_annotation") for i, phase in enumerate(PHASES)]
    called = [*marks, event("aten::mm", 11, 15, "cpu_op")]
    assert all(math.isnan(share) for share in _fractions_in_profile(called, "cuda").values())
    kernels = [event("gemm", 11, 14, "kernel"), event("ncclDevKernel_AllReduce", 20, 25, "kernel")]
    shares = _fractions_in_profile([*called, *kernels], "cuda")
    assert shares == {"data": 0.0, "forward": 0.0, "backward": 0.5, "optimizer": 0.0}
    assert _fractions_in_profile(called, "cpu") == dict.fromkeys(PHASES, 0.0)
    unknown, known = [math.nan] * len(PHASES), list(shares.values())
    assert breakdown([[[1.0] * 4, [1.0] * 4]], [known, unknown], [4.0]) is None


# --- memory


def test_peak_memory_is_what_was_alive_at_once() -> None:
    kept: list[Tensor] = []
    with peak_memory(torch.device("cpu")) as found:
        kept.append(torch.zeros(1 << 18))  # a MiB
        for _ in range(3):
            torch.zeros(1 << 19)  # two MiB, one after the other
        kept.append(torch.zeros(1 << 18))
    assert found.bytes == 3 << 20
    with peak_memory(torch.device("cpu")) as found:
        kept.clear()  # freeing what was there before is no less than nothing
        torch.zeros(1 << 18)
    assert found.bytes == 1 << 20


def test_an_optimizer_with_state_takes_more(ranks: Any) -> None:
    """Adam keeps two numbers for each parameter, momentum one; both are counted."""

    def run_ranks(world: World, name: str) -> int:
        workload = dataclasses.replace(
            sleepy("none"),
            model=lambda: Sleepy(None, 100_000),
            optimizer=(lambda model: torch.optim.SGD(model.parameters(), lr=1e-3))
            if name == "sgd"
            else (lambda model: torch.optim.Adam(model.parameters(), foreach=False)),
        )
        data, _ = open_data(workload, world)
        return run_instrumented(workload, data, parse_layout("single"), single_process_world(world)).peak_memory_bytes

    [sgd], [adam] = ranks(1, run_ranks, "sgd"), ranks(1, run_ranks, "adam")
    parameters = 500_000 * 4
    assert sgd >= 2 * parameters  # with their gradients
    assert adam >= sgd + parameters


def test_a_sharded_model_takes_less(ranks: Any, seen: Any) -> None:
    """fsdp holds a part of what ddp holds whole."""
    ddp = [found.peak_memory_bytes for found in inside_text(ranks, seen, 2, "ddp")]
    fsdp = [found.peak_memory_bytes for found in inside_text(ranks, seen, 2, "fsdp")]
    assert max(fsdp) < min(ddp)


# --- resources


def test_a_sample_belongs_to_who_ran_all_of_its_half_second() -> None:
    sampler = Sampler(started=100.0)
    sampler.turns = [(101.0, "check"), (102.0, "0"), (104.0, "1"), (104.2, "0"), (106.0, "end")]

    def row(time: float, percent: float, gpu: float | None = None) -> dict[str, Any]:
        return {
            "time": time,
            "cpu_percent": percent,
            "others_percent": 10 * percent,
            "memory_bytes": 7,
            "gpu_percent": gpu,
            "gpu_memory_bytes": None if gpu is None else 9,
        }

    sampler.rows = [row(101.6, 1), row(102.3, 2), row(102.6, 3), row(104.1, 4), row(104.4, 5), row(104.8, 6, 50.0)]
    used = sampler.of("0")
    assert used is not None
    assert (used.seconds, used.cpu_percent, used.memory_bytes) == ([2.6, 4.8], [3, 6], [7, 7])
    assert used.others_percent == [30, 60]
    assert sampler.others_cores == 0.35
    assert used.gpu_percent == []  # one of the two did not tell
    assert sampler.of("1") is None
    sampler.rows = [row(105.0, 1, 30.0)]
    used = sampler.of("0")
    assert used is not None
    assert (used.gpu_percent, used.gpu_memory_bytes) == ([30.0], [9])


def test_samples_tell_the_ranks_of_this_host_from_other_programs(tmp_path: Path) -> None:
    """Between a rank and who started it stands its supervisor: rank 0's own family is not all of the ranks."""

    def sampled(info: Any, folder: Path) -> Any:  # sent by value: these ranks import no torch
        """Rank 1 holds 200 MiB while rank 0 samples; what rank 0 saw of the ranks and of others."""
        ballast = b"x" * (200 << 20 if info.rank else 1)
        there, done = folder / "there", folder / "done"
        if info.rank:
            there.write_bytes(ballast[:1])
            while not done.exists():
                time.sleep(0.05)
            return None
        while not there.exists():
            time.sleep(0.05)
        with sampling(time.monotonic(), active=True) as sampler:
            sampler.now_running("us")
            while len(sampler.rows) < 4:
                time.sleep(0.1)
                sampler.update()
        done.touch()
        return sampler.of("us")

    program = f"import time\nend = time.monotonic() + 120\nwhile time.monotonic() < end: pass  # {tmp_path}"
    orphan = subprocess.run(  # of nobody here
        ["sh", "-c", '"$1" -c "$2" >/dev/null 2>&1 & echo $!', "sh", sys.executable, program],
        capture_output=True,
        text=True,
        check=True,
    )
    try:
        used = run_ranks(Launch(processes=2), sampled, tmp_path)[0]
    finally:
        os.kill(int(orphan.stdout), signal.SIGKILL)
    assert max(used.memory_bytes) > 200 << 20
    assert max(used.others_percent) > 5.0


def test_sampling_ends_with_its_block() -> None:
    """The process that samples goes when asked to, and what it saw is there."""
    with sampling(time.monotonic(), active=True) as sampler:
        sampler.now_running("us")
        time.sleep(2.5)
        children = psutil.Process().children()
        own = [child for child in children if "everyrank.measure.resources" in " ".join(child.cmdline())]
        assert len(own) == 1
    assert not own[0].is_running() or own[0].status() == psutil.STATUS_ZOMBIE
    used = sampler.of("us")
    assert used is not None
    assert len(used.seconds) >= 1
    with sampling(time.monotonic(), active=False) as sampler:
        pass
    assert sampler.rows == []


def test_resource_log_of_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of cpu, others and each GPU by its UUID; a training that goes on adds to them; a link is not followed."""
    from everyrank.measure.resource_log import COLUMNS, resource_log

    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho GPU-7a, 00000000:3B:00.0, 45, 1024\nexec sleep 100\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    path = tmp_path / "resources.csv"

    def rows() -> list[dict[str, str]]:
        return list(csv.DictReader(path.read_text().splitlines()))

    for goes_on in (False, True):
        before = len(rows()) if goes_on else 0
        with resource_log(path, "here", goes_on, delay_seconds=0.0):
            deadline = time.monotonic() + 120
            while len(rows()) < before + 4 and time.monotonic() < deadline:
                time.sleep(0.05)
        assert len(rows()) >= before + 4
    found = rows()
    assert path.read_text().count(",".join(COLUMNS)) == 1
    assert {(row["host"], row["device"]) for row in found} == {("here", "cpu"), ("here", "others"), ("here", "GPU-7a")}
    gpu = next(row for row in found if row["device"] == "GPU-7a")
    assert (float(gpu["percent"]), int(gpu["memory_bytes"])) == (45.0, 1024 * 2**20)
    assert all(float(row["percent"]) >= 0 for row in found)
    link = tmp_path / "link.csv"
    link.symlink_to(tmp_path / "mine.csv")
    with resource_log(link, "here", is_resumed=False, delay_seconds=100.0):
        pass
    assert not (tmp_path / "mine.csv").exists()


def test_an_evaluation_at_the_end_of_an_epoch_belongs_to_no_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch ends in the middle of what stands between two updates: neither it nor the next one has these seconds."""
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    meter = ThroughputMeter(0, lambda step: 10 * step)
    epochs = []
    for seconds in (3.0, 0.5):
        now += seconds  # of updates
        with meter.pause():
            now += 7.0  # of evaluating
            epochs.append(meter.epoch())
            now += 2.0  # of saving
    assert epochs == [3.0, 0.5]
    assert meter.paused == 18.0
