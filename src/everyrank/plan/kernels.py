"""Curves of kernels on this machine: seconds against operations or bytes, by kind of kernel.

Each size is measured twice, with hot and with cold caches. Hot: each call has the same operands. Cold: one operand is a
different tensor in each call, and no recent call has read it. The cold case is like a large training step: one
operand is the output of the previous operator, and the other is no longer in the caches.

On a CPU the time of a matrix multiplication has two parts: the FLOPs, and reading and writing the matrices. With few
rows, most of the time is for reading a weight or writing its gradient. `split_matmul_time` computes both parts from
measurements of square matrices and of matrices with 8 rows.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from everyrank.plan.machine import Point, seconds_at
from everyrank.world import World

__all__ = ["measure_kernels", "split_matmul_time", "time_call"]

_BLOCK_SECONDS = 0.02
_ROWS = 8  # rows of the left matrix in a thin product
_MIN_SECONDS = 1e-8  # shortest time to read and write a matrix
_POOL_BYTES = 2**27  # larger than the last-level cache of most servers
_GPU_POOL_BYTES = 2**30
_CPU_BYTES = (2**8, 2**12, 2**15, 2**17, 2**19, 2**21, 2**24)
_GPU_BYTES = (*_CPU_BYTES, 2**28)


@dataclass(frozen=True)
class _Case:
    """A kernel of one size.

    `call` takes one operand of shape `shape`: always the same tensor if hot, a different one in each call if cold.

    amount   operations, or bytes of operands and results
    """

    kind: str
    amount: float
    shape: tuple[int, ...]
    call: Callable[[Tensor], Any]


def time_call(world: World, run: Callable[[], Any], blocks: int = 5) -> float:
    """Return the seconds of a call: the median over `blocks` blocks of calls. All ranks have to call this together."""

    def seconds_per_call(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            run()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - started) / count

    seconds_per_call(2)
    count = torch.tensor([max(1, min(200, round(_BLOCK_SECONDS / (seconds_per_call(2) + 1e-7))))])
    if world.size > 1:
        dist.all_reduce(count, dist.ReduceOp.MIN)  # `run` may be a collective, which all ranks call equally often
    return statistics.median(seconds_per_call(int(count)) for _ in range(blocks))


@torch.no_grad()
def measure_kernels(world: World) -> tuple[dict[str, list[Point]], dict[str, list[Point]]]:
    """Return the curves with hot and with cold caches, by kind.

    All ranks have to call this together, because they share caches and memory.
    """
    is_gpu = world.device.type == "cuda"
    pool = torch.ones((_GPU_POOL_BYTES if is_gpu else _POOL_BYTES) // 4, device=world.device)
    pool_half = pool[: len(pool) // 2].to(torch.bfloat16) if is_gpu else pool
    hot: dict[str, list[Point]] = {}
    cold: dict[str, list[Point]] = {}
    float32 = torch.float32
    cases = [*_products(world, float32), *_by_bytes(world), *_convolutions(world, float32), *_attention(world, float32)]
    if not is_gpu:
        cases += _thin_products()
    if is_gpu:
        bf16 = torch.bfloat16
        cases += [*_products(world, bf16), *_convolutions(world, bf16), *_attention(world, bf16)]
    for case in cases:
        count = 1
        for length in case.shape:
            count *= length
        values = pool_half if case.kind.endswith("_half") else pool
        cold_operands = itertools.cycle(
            [values[start : start + count].view(case.shape) for start in _starts(len(values), count)]
        )
        hot_operand = next(cold_operands)
        hot.setdefault(case.kind, []).append(
            (case.amount, time_call(world, lambda c=case, operand=hot_operand: c.call(operand)))
        )
        cold.setdefault(case.kind, []).append(
            (case.amount, time_call(world, lambda c=case, operands=cold_operands: c.call(next(operands))))
        )
    return (hot, cold) if is_gpu else (split_matmul_time(hot), split_matmul_time(cold))


def split_matmul_time(curves: dict[str, list[Point]]) -> dict[str, list[Point]]:
    """Return the curves with the time of matrix multiplications split into time for FLOPs and for matrix bytes.

    FLOPs take most of the time for square matrices, and bytes for matrices with few rows. The split is iterative: each
    part is what remains after the current estimate of the other is subtracted.
    """
    squares, thin = curves["product"], curves["thin product"]
    sizes = [round((operations / 2) ** (1 / 3)) for operations, _ in squares]
    widths = [round((operations / (2 * _ROWS)) ** 0.5) for operations, _ in thin]
    products = squares
    matrices: list[Point] = []
    for _ in range(6):
        matrices = [
            (4.0 * (width**2 + 2 * _ROWS * width), max(seconds - seconds_at(products, operations), _MIN_SECONDS))
            for width, (operations, seconds) in zip(widths, thin, strict=True)
        ]
        products = [
            (operations, max(seconds - seconds_at(matrices, 12.0 * size**2), seconds / 2))
            for size, (operations, seconds) in zip(sizes, squares, strict=True)
        ]
    others = {kind: points for kind, points in curves.items() if kind != "thin product"}
    return others | {"product": products, "matrix": matrices}


def _starts(length: int, count: int) -> range:
    return range(0, length - count + 1, max(count, length // 4096))


def _kind_for_dtype(kind: str, dtype: torch.dtype) -> str:
    return kind if dtype == torch.float32 else f"{kind}_half"


def _products(world: World, dtype: torch.dtype) -> Iterator[_Case]:
    for size in (16, 48, 128, 256, 512, *((1024, 2048, 4096, 8192) if world.device.type == "cuda" else ())):
        left = torch.randn(size, size, device=world.device, dtype=dtype)
        kind = _kind_for_dtype("product", dtype)
        yield _Case(kind, 2.0 * size**3, (size, size), lambda right, left=left: left @ right)


def _thin_products() -> Iterator[_Case]:
    for size in (64, 128, 256, 512, 1024, 2048):
        rows = torch.randn(_ROWS, size)
        yield _Case("thin product", 2.0 * _ROWS * size**2, (size, size), lambda matrix, rows=rows: rows @ matrix.t())


def _by_bytes(world: World) -> Iterator[_Case]:
    """Yield kernels whose time depends on bytes: elementwise, strided operands, exponentials, sums, batch norm."""
    device, is_gpu = world.device, world.device.type == "cuda"
    for size in _GPU_BYTES if is_gpu else _CPU_BYTES:
        count = size // 4
        other = torch.ones(count, device=device)
        yield _Case("other", 3.0 * size, (count,), lambda value, other=other: value + other)
        yield _Case("exponential", 2.0 * size, (count,), torch.nn.functional.silu)
        if size < 2**12:
            continue
        rows = count // 64
        yield _Case("sum", 1.0 * size, (rows, 64), lambda value: value.sum(-1))
        yield _Case("trigonometric", 2.0 * size, (count,), torch.cos)
        half = torch.ones(rows, 32, device=device)
        yield _Case("strided", 1.5 * size, (rows, 64), lambda value, half=half: value[:, ::2] + half)
        if size < 2**22:
            yield from _normalisation(world, rows)


def _normalisation(world: World, rows: int) -> Iterator[_Case]:
    """Yield forward and backward of BatchNorm, not SyncBatchNorm, for inputs of shape (samples, 16, 8, 8)."""
    shape = (max(rows // 16, 1), 16, 8, 8)
    size = 4.0 * shape[0] * 1024
    weight = torch.ones(16, device=world.device)
    mean, bias = (torch.zeros(16, device=world.device) for _ in range(2))
    variance = torch.ones(16, device=world.device)  # each call changes the running statistics
    normalise: Any = torch.ops.aten.native_batch_norm
    backward: Any = torch.ops.aten.native_batch_norm_backward
    yield _Case("normalisation", 2 * size, shape, lambda x: normalise(x, weight, bias, mean, variance, True, 0.1, 1e-5))
    value = torch.randn(shape, device=world.device)
    _, saved, inverse = normalise(value, weight, bias, mean, variance, True, 0.1, 1e-5)
    masks = [True, True, True]
    yield _Case(
        "normalisation_backward",
        3 * size,
        shape,
        lambda gradient: backward(gradient, value, weight, mean, variance, saved, inverse, True, 1e-5, masks),
    )


def _convolutions(world: World, dtype: torch.dtype) -> Iterator[_Case]:
    sizes = ((4, 8, 8), (16, 16, 8), (32, 32, 8), (32, 64, 16))
    for batch, channels, size in (*sizes, *(((64, 128, 28), (64, 256, 56)) if world.device.type == "cuda" else ())):
        shape = (batch, channels, size, size)
        value = torch.randn(shape, device=world.device, dtype=dtype)
        weight = torch.randn(channels, channels, 3, 3, device=world.device, dtype=dtype)
        flops = 2.0 * batch * channels * channels * 9 * size * size
        options: Any = ([0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)

        def forward(x: Tensor, weight: Tensor = weight) -> Tensor:
            return torch.nn.functional.conv2d(x, weight, padding=1)

        def backward(x: Tensor, value: Tensor = value, weight: Tensor = weight, options: Any = options) -> Any:
            return torch.ops.aten.convolution_backward(x, value, weight, *options, [True, True, False])

        yield _Case(_kind_for_dtype("convolution", dtype), flops, shape, forward)
        yield _Case(_kind_for_dtype("convolution_backward", dtype), 2 * flops, shape, backward)


def _attention(world: World, dtype: torch.dtype) -> Iterator[_Case]:
    attend: Any = torch.nn.functional.scaled_dot_product_attention
    sizes = ((2, 16, 16), (8, 64, 24), (8, 128, 64), (8, 512, 64))
    for batch, length, width in (*sizes, *(((16, 2048, 64),) if world.device.type == "cuda" else ())):
        shape = (batch, 4, length, width)
        flops = 4.0 * batch * 4 * length * length * width
        with torch.enable_grad():
            query_key_value = [
                torch.randn(shape, device=world.device, dtype=dtype, requires_grad=True) for _ in range(3)
            ]
            output = attend(*query_key_value, is_causal=True)

        def forward(query: Tensor, query_key_value: Any = query_key_value) -> Tensor:
            return attend(query, *query_key_value[1:], is_causal=True)

        def backward(gradient: Tensor, output: Tensor = output, query_key_value: Any = query_key_value) -> Any:
            with torch.enable_grad():
                return torch.autograd.grad(output, query_key_value, gradient, retain_graph=True)

        yield _Case(_kind_for_dtype("attention", dtype), flops, shape, forward)
        yield _Case(_kind_for_dtype("attention_backward", dtype), 2.5 * flops, shape, backward)
