"""`everyrank plan --calibrate`: measures this machine in a minute, for the time of traced steps.

On a CPU, two ranks compute at the same time, as they do in a training, and each backend is measured. On a GPU, one rank
measures kernels, and there are no links. Each number is the median of several repetitions, of the slowest rank. Then
two reference models are trained, because a step takes longer than the sum of its parts, by a factor for each strategy.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from everyrank.builtin import Decoder, DecoderShape, decoder_plan
from everyrank.builtin.text import next_token_loss
from everyrank.errors import EveryrankError
from everyrank.launch import Launch, RankInfo, run_ranks
from everyrank.layout import parse_layout
from everyrank.measure.provenance import machine as provenance_of
from everyrank.plan.kernels import measure_kernels, time_call
from everyrank.plan.machine import Machine, Point, traced_seconds
from everyrank.plan.pretend import TracedStep, first_sample, micro_batches_of, trace_step
from everyrank.plan.traced import time_layout
from everyrank.strategies import Prepared, prepare
from everyrank.workload import Workload
from everyrank.world import World, open_world

__all__ = ["CALIBRATED", "calibrate", "decoder_workload"]

CALIBRATED = ("ddp", "zero1", "fsdp", "tensor", "pipeline")
"""The strategies whose overhead is measured."""
_WIDTH = 512
_BLOCKS = (2, 6)  # blocks of two decoders that are so small that a step is only overhead
_WARM_UP_STEPS, _STEPS, _REFERENCE_STEPS, _ROUNDS = 4, 10, 4, 3
_LENGTH = 8
_COMPUTE_SECONDS = 5e-4  # between two collectives that are measured
# search for the overhead of an operator: iterations, and tolerances in seconds
_MAX_ITERATIONS, _EXACT, _SMALL = 6, 1e-9, 1e-7
_POOL_BYTES = 2**26


class _Repeated(Dataset[Any]):
    """A dataset that repeats one sample."""

    def __init__(self, sample: Any, samples: int) -> None:
        self.sample, self.samples = sample, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return self.sample


def decoder_workload(shape: DecoderShape, samples: int, length: int, name: str = "decoder", **fields: Any) -> Workload:
    """Return a workload of a decoder and AdamW on zeros, to measure memory and overhead, which values do not change.

    samples  number of samples of the dataset
    length   tokens of a sample
    fields   further fields of the workload, such as `global_batch`

    Example:
        decoder_workload(DecoderShape(num_blocks=2), samples=8, length=16, global_batch=8)

    """
    tokens = torch.zeros(length, dtype=torch.long)
    sample = {"tokens": tokens, "positions": torch.arange(length)}, tokens
    return Workload(
        name=name,
        model=lambda: Decoder(shape),
        train_data=lambda: _Repeated(sample, samples),
        loss=next_token_loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        blocks="blocks",
        tensor_plan=decoder_plan(shape),
        **fields,
    )


def _tiny(num_blocks: int) -> Workload:
    shape = DecoderShape(num_blocks=num_blocks, num_heads=2, width=16, hidden=32, vocabulary=64)
    return decoder_workload(shape, 8, _LENGTH, name="tiny", global_batch=8, clip_norm=1.0, steps=1)


def _references() -> tuple[Workload, Workload]:
    """Return a decoder and a network of wide layers, whose steps are mostly kernels."""
    shape = DecoderShape(num_blocks=4, num_heads=4, width=128, hidden=352, vocabulary=512)
    decoder = decoder_workload(shape, 16, 64, name="reference decoder", global_batch=16, clip_norm=1.0, steps=1)
    wide = Workload(
        name="reference of wide layers",
        model=_WideLayers,
        train_data=lambda: _Repeated((torch.zeros(_WIDTH), 0), 64),
        loss=lambda output, target: (F.cross_entropy(output, target, reduction="sum"), len(target)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        global_batch=64,
        blocks="blocks",
        tensor_plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
        steps=1,
    )
    return decoder, wide


class _WideBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.down(F.gelu(self.up(self.norm(value))))


class _WideLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_WideBlock() for _ in range(4))
        self.head = nn.Linear(_WIDTH, 100)

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = block(value)
        return self.head(value)


def calibrate(device: str | None = None, backends: Sequence[str] | None = None) -> Machine:
    """Return this machine, measured. Raises `UsageError` if no rank can start.

    On a CPU `backends` are shm and gloo by default; a single GPU is measured, without links.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    ranks = 2 if device == "cpu" else 1
    names = list(backends or (("shm", "gloo") if device == "cpu" else ("nccl",)))
    results = {name: run_ranks(_launch(ranks, device, name), _on_rank, name, name == names[0]) for name in names}
    first_results = results[names[0]]
    hot, cold = (_mean([first_results[rank]["kernels"][index] for rank in sorted(first_results)]) for index in (0, 1))
    links = {
        name: _mean([results_by_rank[rank]["links"] for rank in sorted(results_by_rank)])
        for name, results_by_rank in results.items()
    }
    provenance = dict(first_results[0]["about"]) | {"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}"}
    cache = _last_cache() if device == "cpu" else float(torch.cuda.get_device_properties(0).L2_cache_size)
    threads = int(first_results[0]["threads"])
    without_overhead = Machine(str(first_results[0]["device"]), ranks, threads, cache, hot, cold, links, {}, provenance)
    overhead = {
        name: {
            strategy: _overhead(strategy, seconds, without_overhead, name)
            for strategy, seconds in _slowest(results_by_rank, "tiny").items()
        }
        for name, results_by_rank in results.items()
    }
    with_overhead = replace(without_overhead, overhead=overhead)
    factors = {
        name: {
            strategy: _factor(strategy, seconds, with_overhead, name)
            for strategy, seconds in _slowest(results_by_rank, "reference").items()
        }
        for name, results_by_rank in results.items()
    }
    return replace(with_overhead, factors=factors)


def _slowest(results_by_rank: Mapping[int, dict[str, Any]], workload_kind: str) -> dict[str, list[float]]:
    """Return strategy -> seconds of each workload, of the slowest rank."""
    return {
        strategy: [
            max(values)
            for values in zip(
                *(results_by_rank[rank][workload_kind][strategy] for rank in results_by_rank), strict=True
            )
        ]
        for strategy in results_by_rank[0][workload_kind]
    }


def _factor(strategy: str, seconds: Sequence[float], machine: Machine, backend: str) -> float:
    """Return the geometric mean of measured over predicted seconds of the reference models."""
    layout = parse_layout("single" if machine.ranks == 1 else strategy)
    predicted = [
        sum(time_layout(workload, layout, machine.ranks, first_sample(workload), machine, backend).values())
        for workload in _references()
    ]
    return statistics.geometric_mean(m / p for m, p in zip(seconds, predicted, strict=True))


def _launch(ranks: int, device: str, backend: str) -> Launch:
    return Launch(processes=ranks, device=device, backend=backend, timeout_seconds=120.0)


def _last_cache() -> float:
    """Return the bytes of the last cache of the first core; 32 MiB if unknown."""
    texts = [path.read_text() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    sizes = [float(text.strip().rstrip("K")) * 1024 for text in texts if text.strip().rstrip("K").isdecimal()]
    return max(sizes, default=2.0**25)


def _overhead(strategy: str, seconds: Sequence[float], machine: Machine, backend: str) -> tuple[float, float]:
    """Return the overhead of a step and of an operator in seconds, from the steps of two tiny decoders."""
    layout = parse_layout("single" if machine.ranks == 1 else strategy)
    ranks = range(machine.ranks if strategy == "pipeline" else 1)
    traced = [
        [trace_step(_tiny(num_blocks), layout, machine.ranks, rank, on_gpu=machine.device != "cpu") for rank in ranks]
        for num_blocks in _BLOCKS
    ]

    def predicted(steps: Sequence[TracedStep], of_operator: float) -> float:
        """Return the predicted seconds of a step without its own overhead; a GPU is faster than the host here."""
        operators = [step.operators for step in steps]
        if machine.device != "cpu":
            return of_operator * len(operators[0])
        timed = replace(machine, overhead={backend: {strategy: (0.0, of_operator)}})
        return sum(traced_seconds(operators, strategy, timed, backend).values())

    def unexplained(of_operator: float) -> float:
        """Return the seconds by which six blocks take longer than two, minus the prediction."""
        return seconds[1] - seconds[0] - (predicted(traced[1], of_operator) - predicted(traced[0], of_operator))

    of_operator = 0.0
    for _ in range(_MAX_ITERATIONS):  # one iteration is enough, except for a pipeline, whose stages wait for each other
        remaining = unexplained(of_operator)
        if abs(remaining) < _EXACT:
            break
        slope = (remaining - unexplained(of_operator + _SMALL)) / _SMALL
        of_operator = max(of_operator + remaining / slope, 0.0)
    return max(seconds[0] - predicted(traced[0], of_operator), 0.0), of_operator


def _mean(curves: Sequence[dict[str, list[Point]]]) -> dict[str, list[Point]]:
    """Return the mean over the ranks of each point of the curves."""
    return {
        kind: [
            (points[0][0], statistics.fmean(seconds for _, seconds in points))
            for points in zip(*(curves_of_rank[kind] for curves_of_rank in curves), strict=True)
        ]
        for kind in curves[0]
    }


def _on_rank(info: RankInfo, backend: str, has_kernels: bool) -> dict[str, Any]:
    """Measure on one rank, at the same time as the others."""
    device = None if info.size == 1 and torch.cuda.is_available() else "cpu"
    launch = Launch(processes=info.size, device=device, backend=backend, timeout_seconds=120.0)
    with open_world(info, launch) as world:
        return {
            "kernels": measure_kernels(world) if has_kernels else (),
            "links": _quiet_links(world) if world.size > 1 else {},
            "tiny": _steps_of(world, [_tiny(num_blocks) for num_blocks in _BLOCKS], _STEPS),
            "reference": _steps_of(world, _references(), _REFERENCE_STEPS),
            "about": provenance_of(world),
            "device": torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
        }


def _quiet_links(world: World) -> dict[str, list[Point]]:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # torch 2.13 renamed two collectives and warns about the old names
        return _links(world)


def _links(world: World) -> dict[str, list[Point]]:
    """Return the curves of collectives, by the bytes of the largest tensor.

    As in a training, ranks compute before each collective, so that they arrive at different times and the caches are
    filled with other data, and each call has a different buffer. The time of the computation is measured in turns.
    """
    curves: dict[str, list[Point]] = {}
    other, size = 1 - world.rank, world.size
    pools = [torch.zeros(_POOL_BYTES // 4, device=world.device) for _ in range(2)]
    compute = _computation(world)
    named: Any = dist  # by names that torch 2.12 also has
    for elements in (2**4, 2**10, 2**14, 2**18, 2**21, 2**23):
        starts = itertools.cycle(range(0, _POOL_BYTES // 4 - elements + 1, max(elements, 2**16)))

        def buffers(starts: Any = starts, elements: int = elements) -> tuple[Tensor, Tensor]:
            start = next(starts)
            return pools[0][start : start + elements], pools[1][start : start + elements // size]

        def pass_on(buffers: Any = buffers) -> None:
            tensor = buffers()[0]
            if world.rank == 0:
                dist.send(tensor, other)
                dist.recv(tensor, other)
            else:
                dist.recv(tensor, other)
                dist.send(tensor, other)

        calls: dict[str, tuple[Callable[[], Any], int]] = {
            "all_reduce": (lambda buffers=buffers: dist.all_reduce(buffers()[0]), 1),
            "all_gather": (lambda buffers=buffers: named.all_gather_into_tensor(*buffers()), 1),
            "reduce_scatter": (lambda buffers=buffers: named.reduce_scatter_tensor(*reversed(buffers())), 1),
            "broadcast": (lambda buffers=buffers: dist.broadcast(buffers()[0], 0), 1),
            "send": (pass_on, 2),
        }
        for kind, (call, hops) in calls.items():
            seconds = _time_beside(world, compute, call) / hops
            curves.setdefault(kind, []).append((4.0 * elements, seconds))
    return curves


def _computation(world: World) -> Callable[[], None]:
    """Return a function of about half a millisecond: small kernels over more memory than the inner caches have."""
    pool = torch.ones(2**22, device=world.device)
    parts = itertools.cycle(pool.split(2**14))

    def run(count: int) -> None:
        for _ in range(count):
            next(parts).add_(1.0)

    count = max(1, round(_COMPUTE_SECONDS / (time_call(world, lambda: run(20)) / 20)))
    return lambda: run(count)


def _time_beside(world: World, compute: Callable[[], None], call: Callable[[], Any]) -> float:
    """Return the seconds that a call adds to a computation, as a mean. It includes the wait for the other ranks."""

    def both() -> None:
        compute()
        call()

    count = torch.tensor([max(3, min(40, round(0.03 / time_call(world, both, blocks=1))))])
    dist.all_reduce(count, dist.ReduceOp.MIN)
    added: list[float] = []
    for _ in range(5):
        compute_seconds, both_seconds = (_block(world, run, int(count)) for run in (compute, both))
        added.append(both_seconds - compute_seconds)
    return max(statistics.median(added), 1e-6)


def _block(world: World, run: Callable[[], Any], count: int) -> float:
    dist.barrier()
    started = time.perf_counter()
    for _ in range(count):
        run()
    del world
    return (time.perf_counter() - started) / count


def _steps_of(world: World, workloads: Sequence[Workload], steps: int) -> dict[str, tuple[float, ...]]:
    """Return the seconds of a step of each workload, by strategy: the median of a few runs."""
    result: dict[str, tuple[float, ...]] = {}
    for strategy in CALIBRATED if world.size > 1 else ("single",):
        seconds: list[float] = []
        try:
            for workload in workloads:
                prepared = prepare(workload, parse_layout(strategy), world)
                sample = first_sample(workload)
                seconds.append(_step_seconds(world, prepared, sample, steps))
        except EveryrankError:
            continue
        result[strategy] = tuple(seconds)
    return result


def _step_seconds(world: World, prepared: Prepared, sample: Any, steps: int) -> float:
    batches = micro_batches_of(prepared, sample, functools.partial(torch.zeros, device=world.device))
    for _ in range(_WARM_UP_STEPS):
        prepared.step(batches)
    rounds: list[float] = []
    for _ in range(_ROUNDS):
        if world.size > 1:
            dist.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            prepared.step(batches)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        rounds.append((time.perf_counter() - started) / steps)
    return statistics.median(rounds)
