"""`everyrank plan --calibrate`: measures this machine in a minute, for the time of traced steps.

On a CPU, two ranks compute at the same time, as they do in a training, and each backend is measured. On a GPU, one rank
measures kernels, and there are no links. Each number is the median of several repetitions, of the slowest rank.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from everyrank.builtin import Decoder, DecoderShape, decoder_plan
from everyrank.builtin.text import next_token_loss
from everyrank.errors import EveryrankError
from everyrank.launch import Launch, RankInfo, run_ranks
from everyrank.layout import parse_layout
from everyrank.measure.provenance import machine as provenance_of
from everyrank.plan.machine import Machine, Point
from everyrank.plan.pretend import first_sample, micro_batches_of, trace_step
from everyrank.strategies import prepare
from everyrank.workload import Workload
from everyrank.world import World, open_world

__all__ = ["CALIBRATED", "calibrate", "decoder_workload", "pipeline_bubble"]

CALIBRATED = ("ddp", "zero1", "fsdp", "tensor", "pipeline")
"""The strategies whose overhead is measured."""
_REPETITIONS = 5
_TINY_STEPS = 15
_LENGTH = 8


class _ZeroTokens(Dataset[Any]):
    def __init__(self, samples: int, length: int) -> None:
        self.samples, self.length = samples, length

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        tokens = torch.zeros(self.length, dtype=torch.long)
        return {"tokens": tokens, "positions": torch.arange(self.length)}, tokens


def decoder_workload(shape: DecoderShape, samples: int, length: int, name: str = "decoder", **fields: Any) -> Workload:
    """Return a workload of a decoder and AdamW on zeros, to measure memory and overhead, which values do not change.

    samples  of the dataset
    length   tokens of a sample
    fields   further fields of the workload, such as `global_batch`

    Example:
        decoder_workload(DecoderShape(num_blocks=2), samples=8, length=16, global_batch=8)

    """
    return Workload(
        name=name,
        model=lambda: Decoder(shape),
        train_data=lambda: _ZeroTokens(samples, length),
        loss=next_token_loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        blocks="blocks",
        tensor_plan=decoder_plan(shape),
        **fields,
    )


def _tiny() -> Workload:
    """A decoder so small that a step is overhead only."""
    shape = DecoderShape(num_blocks=2, num_heads=2, width=16, hidden=32, vocabulary=64)
    return decoder_workload(shape, 8, _LENGTH, name="tiny", global_batch=8, clip_norm=1.0, steps=1)


def calibrate(device: str | None = None, backends: Sequence[str] | None = None) -> Machine:
    """Return this machine, measured. Raises `UsageError` where no rank can start.

    On a CPU `backends` are shm and gloo by default; a GPU is measured alone, without links.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    ranks = 2 if device == "cpu" else 1
    names = list(backends or (("shm", "gloo") if device == "cpu" else ("nccl",)))
    results = {name: run_ranks(_launch(ranks, device, name), _on_rank, name) for name in names}
    first = results[names[0]]
    kernels = _slowest([first[rank]["kernels"] for rank in sorted(first)])
    links = {name: _slowest([of_rank[rank]["links"] for rank in sorted(of_rank)]) for name, of_rank in results.items()}
    about = dict(first[0]["about"]) | {"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}"}
    threads = int(first[0]["threads"])
    empty: dict[str, dict[str, float]] = {name: {} for name in names}
    bare = Machine(str(first[0]["device"]), ranks, threads, kernels, links, empty, about)
    overhead = {
        name: {
            strategy: _overhead(strategy, max(of_rank[rank]["tiny"][strategy] for rank in of_rank), bare, name, ranks)
            for strategy in of_rank[0]["tiny"]
        }
        for name, of_rank in results.items()
    }
    return Machine(bare.device, ranks, threads, kernels, links, overhead, about)


def _launch(ranks: int, device: str, backend: str) -> Launch:
    return Launch(processes=ranks, device=device, backend=backend, timeout_seconds=120.0)


def pipeline_bubble(ranks: int, micro_batches: int) -> float:
    """Return the idle share of a step of our default schedule."""
    return (ranks - 1) / (micro_batches + ranks - 1)


def _overhead(strategy: str, seconds: float, machine: Machine, backend: str, ranks: int) -> float:
    """Seconds for each operator, of a step that is overhead only."""
    layout = parse_layout("single" if ranks == 1 else strategy)
    traced = trace_step(_tiny(), layout, ranks)
    known = machine.kernel_seconds(traced.operators)
    known += machine.link_seconds(traced.operators, backend) if ranks > 1 else 0.0
    idle = pipeline_bubble(ranks, 2 * ranks) if strategy == "pipeline" else 0.0
    return max((seconds * (1 - idle) - known) / len(traced.operators), 1e-7)


def _slowest(curves: Sequence[dict[str, list[Point]]]) -> dict[str, list[Point]]:
    """The slowest rank at each point."""
    return {
        kind: [max(points, key=lambda point: point[1]) for points in zip(*(one[kind] for one in curves), strict=True)]
        for kind in curves[0]
    }


def _on_rank(info: RankInfo, backend: str) -> dict[str, Any]:
    """Measure on one rank, at the same time as the others."""
    device = None if info.size == 1 and torch.cuda.is_available() else "cpu"
    launch = Launch(processes=info.size, device=device, backend=backend, timeout_seconds=120.0)
    with open_world(info, launch) as world:
        return {
            "kernels": _kernels(world),
            "links": _quiet_links(world) if world.size > 1 else {},
            "tiny": _tiny_steps(world),
            "about": provenance_of(world),
            "device": torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
        }


def _time(world: World, run: Callable[[], Any], least: float = 0.02) -> float:
    """Median seconds of a call, while the other ranks do the same."""

    def wait() -> None:
        if world.device.type == "cuda":
            torch.cuda.synchronize()

    run()
    wait()
    started = time.perf_counter()
    run()
    wait()
    count = torch.tensor([max(1, min(200, round(least / (time.perf_counter() - started + 1e-7))))])
    if world.size > 1:
        dist.all_reduce(count, dist.ReduceOp.MIN)  # a collective needs the same number on all ranks
    times: list[float] = []
    for _ in range(_REPETITIONS):
        started = time.perf_counter()
        for _ in range(int(count)):
            run()
        wait()
        times.append((time.perf_counter() - started) / int(count))
    return statistics.median(times)


@torch.no_grad()
def _kernels(world: World) -> dict[str, list[Point]]:
    """Curves of products, convolutions, attention and other kernels."""
    device, is_gpu = world.device, world.device.type == "cuda"
    curves: dict[str, list[Point]] = {"product": [], "other": []}
    for size in (16, 48, 128, 256, 512, *((2048, 8192) if is_gpu else ())):
        left, right = (torch.randn(size, size, device=device) for _ in range(2))
        curves["product"].append((2.0 * size**3, _time(world, lambda a=left, b=right: a @ b)))
    for elements in (2**6, 2**10, 2**13, 2**16, 2**19, 2**22, *((2**26,) if is_gpu else ())):
        left, right = (torch.randn(elements, device=device) for _ in range(2))
        curves["other"].append((12.0 * elements, _time(world, lambda a=left, b=right: a + b)))
    return curves | _convolutions(world) | _attention(world)


def _convolutions(world: World) -> dict[str, list[Point]]:
    curves: dict[str, list[Point]] = {"convolution": [], "convolution_backward": []}
    for batch, width, size in ((4, 8, 8), (16, 16, 8), (32, 32, 8), (32, 64, 16)):
        value = torch.randn(batch, width, size, size, device=world.device)
        weight = torch.randn(width, width, 3, 3, device=world.device)
        flops = 2.0 * batch * width * width * 9 * size * size
        options: Any = ([0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)

        def backward(x: Tensor = value, w: Tensor = weight, options: Any = options) -> Any:
            return torch.ops.aten.convolution_backward(x, x, w, *options, [True, True, False])

        seconds = _time(world, lambda x=value, w=weight: torch.nn.functional.conv2d(x, w, padding=1))
        curves["convolution"].append((flops, seconds))
        curves["convolution_backward"].append((2 * flops, _time(world, backward)))
    return curves


def _attention(world: World) -> dict[str, list[Point]]:
    curves: dict[str, list[Point]] = {"attention": [], "attention_backward": []}
    attend: Any = torch.nn.functional.scaled_dot_product_attention
    for batch, length, width in ((2, 16, 16), (8, 64, 24), (8, 128, 64), (8, 512, 64)):
        with torch.enable_grad():
            parts = [torch.randn(batch, 4, length, width, device=world.device, requires_grad=True) for _ in range(3)]
            output = attend(*parts, is_causal=True)
            flops = 4.0 * batch * 4 * length * length * width

            def backward(output: Tensor = output, parts: Any = parts) -> Any:
                return torch.autograd.grad(output, parts, output, retain_graph=True)

            curves["attention_backward"].append((2.5 * flops, _time(world, backward)))
        curves["attention"].append((flops, _time(world, lambda parts=parts: attend(*parts, is_causal=True))))
    return curves


def _quiet_links(world: World) -> dict[str, list[Point]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames two collectives that older ones have
        return _links(world)


def _links(world: World) -> dict[str, list[Point]]:
    """Curves of collectives, by the bytes of the largest tensor."""
    curves: dict[str, list[Point]] = {}
    other, size = 1 - world.rank, world.size
    named: Any = dist  # by the names that torch 2.12 has, too
    for elements in (2**4, 2**10, 2**14, 2**18, 2**21):
        whole = torch.zeros(elements, device=world.device)
        part = torch.zeros(elements // size, device=world.device)

        def pass_on(tensor: Tensor = whole) -> None:
            if world.rank == 0:
                dist.send(tensor, other)
                dist.recv(tensor, other)
            else:
                dist.recv(tensor, other)
                dist.send(tensor, other)

        calls: dict[str, tuple[Callable[[], Any], int]] = {
            "all_reduce": (lambda whole=whole: dist.all_reduce(whole), 1),
            "all_gather": (lambda whole=whole, part=part: named.all_gather_into_tensor(whole, part), 1),
            "reduce_scatter": (lambda whole=whole, part=part: named.reduce_scatter_tensor(part, whole), 1),
            "broadcast": (lambda whole=whole: dist.broadcast(whole, 0), 1),
            "send": (pass_on, 2),
        }
        for kind, (call, hops) in calls.items():
            curves.setdefault(kind, []).append((4.0 * elements, _time(world, call) / hops))
    return curves


def _tiny_steps(world: World) -> dict[str, float]:
    """Median seconds of a step of the tiny decoder, by strategy."""
    result: dict[str, float] = {}
    for strategy in CALIBRATED if world.size > 1 else ("single",):
        workload = _tiny()
        try:
            prepared = prepare(workload, parse_layout(strategy), world)
        except EveryrankError:
            continue
        sample = first_sample(workload)
        times: list[float] = []
        for _ in range(_TINY_STEPS):
            batches = micro_batches_of(prepared, sample, torch.zeros)
            if world.size > 1:
                dist.barrier()
            started = time.perf_counter()
            prepared.step(batches)
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        result[strategy] = statistics.median(times[4:])
    return result
