"""Seconds of a training step in closed form: roofline, launches, links, overlap, pipeline. Works on columns.

A product (m,k)x(k,n) takes 4 us and the larger of its operations (over peak x `matmul`; its last wave of tiles and a
short k count against it) and its bytes (over HBM x `stream`). The time of other kernels depends on their bytes. A block
takes at least the time in which the CPU launches its kernels. Collectives are rings: latency for each hop, and bytes
over the bus bandwidth of the slower link that the group crosses. FSDP's gathers and scatters overlap with the
neighbouring block, DDP's reductions with the last backward. A pipeline adds (stages - 1) / chunks times a stage.

Sources: Williams et al. 2009 (roofline); NVIDIA's guide to matrix multiplication (wave quantisation); nccl-tests,
doc/PERFORMANCE.md (bus bandwidth); Dao 2023 (attention's backward is 2.5 times its forward); Narayanan et al. 2021
(pipeline bubble); Qi et al. 2023 (zero bubble). Kernel counts are counted from the modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from everyrank.plan.configuration import Configurations
from everyrank.plan.hardware import Gpu, Link

__all__ = ["PRIOR", "STEP_PARTS", "Fitted", "StepTime", "collective_seconds", "predict_step"]

_RAMP = 4e-6  # seconds in which a product fills and drains the chip
_TILES = ((256, 128, 1.0), (128, 128, 0.92), (64, 64, 0.6))  # rows, columns, share of the peak
STEP_PARTS = (
    "matrix products",
    "bandwidth",
    "launches",
    "tensor link",
    "context link",
    "data link",
    "bubble",
    "optimizer",
)
"""The parts of a step; their sum is the step."""


@dataclass(frozen=True)
class Fitted:
    """The three numbers that are fitted to measured rows, for a GPU kind and a stack.

    matmul   share of the data sheet's operations that a large product reaches
    stream   share of the data sheet's memory bandwidth that kernels reach
    launch   seconds of CPU time for each kernel
    """

    matmul: float = 0.70
    stream: float = 0.75
    launch: float = 12e-6


PRIOR = Fitted()
"""Without rows: typical values over several kinds of GPUs."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of an update as a column, and by part."""

    total: Any
    parts: dict[str, Any]


def _products(m: Any, k: Any, n: Any, peak: Any, gpu: Gpu, fitted: Fitted, size: Any, batch: Any = 1) -> Any:
    """Return the seconds of `batch` products (m,k)x(k,n) at `peak` operations a second."""
    share = 0.0
    rows = m * batch  # tiles of all products of a batch fill the chip together
    for height, width, rate in _TILES:
        tiles = np.ceil(rows / height) * np.ceil(n / width)
        share = np.maximum(share, rate * rows * n / (np.ceil(tiles / gpu.units) * gpu.units * height * width))
    compute = 2 * m * k * n * batch / (peak * fitted.matmul * share * k / (k + 64))
    return _RAMP + np.maximum(compute, size * batch * (m * k + k * n + m * n) / (gpu.hbm * fitted.stream))


_FACTORS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}


def collective_seconds(kind: str, size: Any, ranks: Any, in_node: Any, inside: Link, across: Link) -> Any:
    """Return the seconds of a collective of `size` bytes (whole tensor) over `ranks`, `in_node` of them in a node."""
    ranks = np.maximum(ranks, 1)
    local = np.clip(in_node, 1, ranks)
    nodes = np.ceil(ranks / local)
    hops = 2 * np.log2(np.maximum(nodes, 2)) if kind == "all_reduce" else nodes - 1  # NCCL gathers along rings only
    inner_hops = np.minimum(local - 1, 2 * np.log2(np.maximum(local, 2)))
    within = (local - 1) / local * size / inside.group_bandwidth(local) + inner_hops * inside.latency
    # each GPU of a node has its own network card, up to the bandwidth of the links inside
    rate = np.minimum(across.bandwidth * local, np.where(local > 1, inside.group_bandwidth(local), inside.bandwidth))
    between = (ranks - 1) / ranks * size / rate + hops * across.latency
    seconds = _FACTORS[kind] * np.where(nodes > 1, np.maximum(within, between), within)
    return np.where(ranks > 1, seconds + np.where(nodes > 1, across.start, inside.start), 0.0)


def _peak(c: Configurations, gpu: Gpu) -> Any:
    """Return the operations a second of 16-bit or 32-bit products."""
    return np.where(c.size < 4, gpu.flops, np.where(c.tf32, gpu.flops_tf32, gpu.flops_fp32))


def _block(c: Configurations, gpu: Gpu, fitted: Fitted, peak: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Return for one block the seconds of products, attention, other kernels forward and backward, and the kernels."""
    tokens, width, size = c.tokens, c.hidden, c.size
    stream = gpu.hbm * fitted.stream
    low_peak = _peak(c, gpu)
    heads = c.heads / c.tensor
    kv_heads = np.maximum(c.kv / c.tensor, 1)

    def product(k: Any, n: Any) -> Any:
        return _products(tokens, k, n, peak, gpu, fitted, size)

    products = product(width, (heads + 2 * kv_heads) * c.head_dim) + product(heads * c.head_dim, width)
    products = products + product(width, (1 + c.gated) * c.ffn / c.tensor) + product(c.ffn / c.tensor, width)
    # causal flash attention computes half of the square, at a lower rate with narrow heads
    rate = gpu.attention_efficiency * c.attention * np.where(c.head_dim >= 128, 1, 0.8)
    square = c.seq * c.seq / c.context
    flash = _RAMP + 2 * c.micro * heads * square * c.head_dim / (low_peak * rate)
    batch = c.micro * heads
    scores = size * batch * square
    rows = c.seq / c.context
    unfused = _products(rows, c.head_dim, c.seq, low_peak, gpu, fitted, size, batch)
    unfused = unfused + _products(rows, c.seq, c.head_dim, low_peak, gpu, fitted, size, batch) + 7 * scores / stream
    # Megatron's fused softmax needs a multiple of 4 rows of heads
    is_slow = (c.flash == 0) & (c.fused_softmax == 1) & ((c.micro * heads) % 4 != 0)
    unfused = unfused + np.where(is_slow, 14 * scores / stream, 0)
    attention = np.where(c.flash, flash, unfused)
    split = np.where(c.sequence, c.tensor, 1)
    inner = c.ffn / width / c.tensor
    rotary = np.where(c.gated, 6, 0) / c.tensor
    forward = 10 / split + 3 / c.tensor + np.where(c.gated, 5, 2) * inner + rotary
    backward = 14 / split + 3 / c.tensor + np.where(c.gated, 8, 3) * inner + rotary
    row_seconds = tokens * width * size * np.where(c.compiled, 0.6, 1.0) / stream
    # 8-bit products read 16 bits of each input and write it twice, one of them transposed
    rows_in = tokens * (2 * width + (heads * c.head_dim + c.ffn / c.tensor))
    rows_out = tokens * (2 * width + (heads + 2 * kv_heads) * c.head_dim + (1 + c.gated) * c.ffn / c.tensor)
    casts = np.where(c.fp8, 4 / stream, 0)
    kernels = np.where(c.flash, 22, 28) * np.where(c.compiled, 0.45, 1.0) + np.where(c.tensor > 1, 6, 0)
    kernels = kernels + np.where(is_slow, 8, 0) + np.where(c.fp8, 8, 0)
    elementwise = forward * row_seconds + casts * (rows_in + c.block / c.tensor)
    return products, attention, elementwise, backward * row_seconds + casts * rows_out, kernels


def predict_step(c: Configurations, gpu: Gpu, inside: Link, across: Link, fitted: Fitted = PRIOR) -> StepTime:
    """Return the seconds of an update of each configuration, on GPUs of one kind.

    Not included: the data loader, stragglers, checkpoints, and lower clocks at high temperature.
    """
    peak = np.where((c.size < 4) & (c.fp8 == 1), gpu.flops_fp8 or gpu.flops, _peak(c, gpu))
    products, attention, elementwise, elementwise_backward, kernels = _block(c, gpu, fitted, peak)
    stream = gpu.hbm * fitted.stream
    is_full_recompute = c.recompute == 1
    forward = products + attention + elementwise
    attention_backward = np.where(c.flash, 2.5, 2.0) * attention
    backward = 2 * products + attention_backward + elementwise_backward
    selective_recompute = np.where(
        c.selective_is_per_op, 0.5 * products + 0.5 * elementwise, np.where(c.flash, 0, attention)
    )
    recompute = np.where(is_full_recompute, forward, np.where(c.recompute == 2, selective_recompute, 0))
    matrix_seconds = 3 * products + attention + attention_backward
    matrix_seconds = matrix_seconds + np.where(
        is_full_recompute, products + attention, np.where(c.recompute == 2, selective_recompute, 0)
    )
    compute = forward + backward + recompute

    row_bytes = c.tokens * c.hidden * c.size
    one_reduce = collective_seconds("all_reduce", row_bytes, c.tensor, c.per_node, inside, across)
    tensor_link = (4 + 2 * is_full_recompute) * one_reduce
    beyond_tensor = np.maximum(c.per_node / c.tensor, 1)
    keys_bytes = 2 * c.micro * c.seq * np.maximum(c.kv / c.tensor, 1) * c.head_dim * c.size
    one_gather = collective_seconds("all_gather", keys_bytes, c.context, beyond_tensor, inside, across)
    context_link = (3 + is_full_recompute) * one_gather
    # while a GPU waits for launches, its products and collectives are already done
    launches = np.maximum(kernels * fitted.launch - forward - 2 * one_reduce - one_gather, 0)
    busy_backward_compute = (
        backward + recompute + (2 + 2 * is_full_recompute) * one_reduce + (2 + is_full_recompute) * one_gather
    )
    launches = launches + np.maximum((2 + is_full_recompute) * kernels * fitted.launch - busy_backward_compute, 0)

    # fully sharded: a gather in forward and backward, a scatter in backward, each overlapping with the neighbouring
    # block
    block = c.block / c.tensor
    units = c.shard * c.context
    gather = collective_seconds("all_gather", block * c.size, units, beyond_tensor, inside, across)
    scatter = collective_seconds("reduce_scatter", block * 4, units, beyond_tensor, inside, across)
    sharded = c.zero >= 3
    busy_forward = np.maximum(forward + tensor_link / 3, kernels * fitted.launch)
    busy_backward = np.maximum(
        backward + recompute + tensor_link * 2 / 3, (2 + is_full_recompute) * kernels * fitted.launch
    )
    second_gather = np.where(c.keeps_gathered, 0, gather)
    gather_link = np.maximum(gather - busy_forward, 0) + np.maximum(second_gather + scatter - busy_backward, 0)
    gather_link = np.where(sharded, gather_link, 0)

    # head and loss, on the last stage
    table = c.vocab * c.hidden / c.tensor
    low_peak = _peak(c, gpu)  # under fp8 the head stays in 16 bits
    head = 3 * _products(c.tokens, c.hidden, c.vocab / c.tensor, low_peak, gpu, fitted, c.size)
    loss = (c.logit_traffic * c.tokens * c.vocab / c.tensor + 24 * table) / stream
    blocks = np.ceil(c.layers / c.pipeline)
    per_block = compute + launches + tensor_link + context_link + gather_link
    # if blocks do not divide evenly, the stages of embedding and head have fewer
    saved_seconds = np.where(blocks * c.pipeline > c.layers, per_block, 0)
    hidden_head = np.minimum(head + loss, saved_seconds) / (head + loss)
    head, loss = head * (1 - hidden_head), loss * (1 - hidden_head)
    stage = blocks * per_block
    inner = c.tensor * c.context * c.shard * c.replicate  # ranks between neighbouring stages
    stage_rate = np.where(inner * c.pipeline <= c.per_node, inside.bandwidth, across.bandwidth)
    sends = np.where(c.pipeline > 1, 4 * across.latency + 2 * row_bytes / stage_rate, 0)
    idle = np.where(c.schedule == 2, 1 / 3, 1.0) / c.chunks
    bubble = (c.pipeline - 1) * idle * (stage + sends) + c.accumulate * sends

    # gradients of replicas, once an update, overlapping with the last backward
    local_parameters = blocks * block + table * np.where(c.pipeline > 1, 1 + c.ends_everywhere, np.where(c.tied, 1, 2))
    in_node = np.maximum(c.per_node / (c.tensor * np.where(sharded, units, 1)), 1)
    copies = np.where(sharded, c.replicate, c.replicate * c.shard * c.context)
    gradient_bytes = local_parameters * c.gradients / np.where(sharded, units, 1)
    reduce = collective_seconds("all_reduce", gradient_bytes, copies, in_node, inside, across)
    scatter_all = collective_seconds("reduce_scatter", gradient_bytes, copies, in_node, inside, across)
    gather_all = collective_seconds("all_gather", local_parameters * c.size, copies, in_node, inside, across)
    replicas = np.where((c.zero >= 1) & ~sharded, scatter_all + gather_all, reduce)
    overlap = np.where(c.overlaps, 0.8 * blocks * (backward + recompute), 0)
    replicas = np.maximum(replicas - overlap, 0)
    state_bytes = local_parameters * (c.parameters + c.optimizer)
    averages = collective_seconds("all_reduce", state_bytes, copies, in_node, inside, across) / np.maximum(
        c.averaging, 1
    )
    replicas = np.where(c.averaging, averages, replicas)
    ends_link = np.where(
        (c.ends_everywhere == 1) & (c.pipeline > 1),
        collective_seconds("all_reduce", 2 * table * c.gradients, c.pipeline, 1, inside, across),
        0,
    )
    of_optimizer = np.where(sharded, units, np.where(c.zero >= 1, copies, 1))
    optimizer = c.optimizer_traffic * local_parameters / of_optimizer / stream + 2 * blocks * fitted.launch
    # each micro-batch reads its gradients, and reads and writes their sum
    adding = (c.size + 2 * c.gradients) * local_parameters / np.where(sharded, units, 1) / stream

    num_blocks = c.accumulate * blocks
    parts = {
        "matrix products": num_blocks * matrix_seconds + c.accumulate * head,
        "bandwidth": num_blocks * (compute - matrix_seconds) + c.accumulate * (loss + adding),
        "launches": num_blocks * launches,
        "tensor link": num_blocks * tensor_link,
        "context link": num_blocks * context_link,
        "data link": num_blocks * gather_link + replicas + ends_link,
        "bubble": bubble,
        "optimizer": optimizer,
    }
    return StepTime(sum(parts.values()), parts)
