"""Memory of the fullest rank in closed form: bytes by category, as allocated, reserved, and device total.

Activations of a block for each token, in bytes (b is `size`) (Korthikanti et al. 2022, section 4, with flash attention
and a gated MLP; s is the tensor axis where activations are split along the sequence, else 1):

    norms and residuals   (2 (residual + b) + extra) hidden / s + b gathered_inputs hidden (1 - 1 / s)
    attention             b (heads + 2 kv) head_dim / tensor + b heads head_dim / tensor + 4 heads / tensor
    scores, if not flash  scores heads seq / tensor
    MLP                   b mlp_saved ffn / tensor

A stage keeps them for each of its blocks and each micro-batch in flight: pipeline - stage under 1F1B, all under GPipe.
Under GPipe the last stage also keeps logits and softmax of all micro-batches. The peak is the largest of four moments:
the loss, the backward of a block, the reduction of the last gradients, and the optimizer's step. Transformer Engine
keeps a dummy gradient of bf16 for each shape of a weight. Local SGD averages parameters and optimizer state in a flat
copy, and concatenates it once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from everyrank.plan.configuration import Configurations
from everyrank.plan.hardware import GIB

__all__ = ["CATEGORIES", "Memory", "device_bytes", "predict_memory", "reserved_bytes", "saved_for_block"]

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "gathered",
    "logits",
    "temporary",
    "caches",
    "building",
)
"""The categories of allocated memory. Reserved and device totals add the allocator's and CUDA's memory."""

_EXPECTED_FRAGMENTATION, _MAX_FRAGMENTATION = 1.10, 1.15
"""Reserved over allocated. torchtitan's Llama 3 8B reserves 1.08 to 1.14 times what our trace
allocates (82.4 and 67.0 GiB over 72.3 and 61.8)."""
_KEPT_LOGITS = 8
"""Bytes for each logit of a micro-batch that waits for its backward: logits and softmax."""
_CONTEXT = 0.6 * GIB
"""Memory of CUDA and its loaded kernels, outside torch's allocator."""
_COMMUNICATION = 0.35 * GIB
"""Memory of NCCL, for each mesh axis with more than one rank."""
_COMMUNICATION_HIGH = 1.2 * GIB


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank, as columns.

    categories   allocated bytes by category
    allocated    their sum: torch.cuda.max_memory_allocated
    reserved     with the caching allocator's unused parts: max_memory_reserved
    device       with CUDA's context and NCCL: what nvidia-smi shows
    high         the upper estimate of the device total; a layout fits if this fits
    low          the lower estimate of allocated bytes; a layout does not fit if this does not fit
    stage        the fullest stage of the pipeline
    """

    categories: dict[str, Any]
    allocated: Any
    reserved: Any
    device: Any
    high: Any
    low: Any
    stage: Any


def saved_for_block(c: Configurations) -> Any:
    """Return the bytes that a block keeps for backward, for each token, without recomputation."""
    split = np.where(c.sequence, c.tensor, 1)
    norms = (2 * (c.residual + c.size) + c.extra) * c.hidden / split
    norms = norms + c.size * c.gathered_inputs * c.hidden * (1 - 1 / split)
    attention = c.size * (2 * c.heads + 2 * c.kv) * c.head_dim / c.tensor
    attention = attention + np.where(c.flash, 4 * c.heads, c.scores * c.heads * c.seq) / c.tensor
    return norms + attention + c.size * c.mlp_saved * c.ffn / c.tensor


def _kept_for_block(c: Configurations) -> Any:
    """Return the bytes that a block keeps for each token under its recomputation."""
    saved = saved_for_block(c)
    split = np.where(c.sequence, c.tensor, 1)
    only_input = c.residual * c.hidden / split
    # torchtitan's policy keeps attention's output and every second product of a block: key, output, and up
    per_op = only_input + c.size * (c.heads * c.head_dim + c.kv * c.head_dim + c.hidden + c.ffn) / c.tensor
    scores = np.where(c.flash, 0, c.scores * c.heads * c.seq) / c.tensor
    selective = np.where(c.selective_is_per_op, per_op, saved - scores)
    return np.where(c.recompute == 1, only_input, np.where(c.recompute == 2, selective, saved))


def predict_memory(c: Configurations) -> Memory:
    """Return the memory of the fullest rank of each configuration.

    Example: `predict_memory(make_configurations(DECODERS["8b"], STACKS["everyrank-fsdp"], {"zero": 3, "shard": 64}))`.
    """
    first, last = _on_stage(c, first=True), _on_stage(c, first=False)
    sums = [sum(categories.values()) for categories in (first, last)]
    is_last = np.asarray(sums[1] > sums[0]) & np.asarray(c.pipeline > 1)
    categories = {name: np.where(is_last, last[name], first[name]) for name in CATEGORIES}
    allocated = np.where(is_last, sums[1], sums[0])
    # a model that is not built on the meta device is whole on each rank before it is split
    building = np.maximum(c.whole_first * _all_parameters(c) - allocated, 0)
    categories["building"] = building
    allocated = allocated + building
    reserved = reserved_bytes(allocated)
    return Memory(
        categories,
        allocated,
        reserved,
        device_bytes(c, reserved),
        device_bytes(c, (1 + c.uncertainty) * allocated * _MAX_FRAGMENTATION, _COMMUNICATION_HIGH),
        (1 - c.uncertainty) * allocated,
        np.where(is_last, c.pipeline - 1, 0),
    )


def reserved_bytes(allocated: Any) -> Any:
    """Return the expected reserved bytes of torch's caching allocator for these allocated bytes."""
    return allocated * _EXPECTED_FRAGMENTATION


def device_bytes(c: Configurations, reserved: Any, communication: float = _COMMUNICATION) -> Any:
    """Return the device total: reserved bytes with CUDA's context and NCCL's buffers."""
    axes = sum(np.asarray(degree > 1, float) for degree in (c.tensor, c.pipeline, c.replicate, c.shard, c.context))
    return reserved + _CONTEXT + communication * np.minimum(axes, 3)


def _on_stage(c: Configurations, first: bool) -> dict[str, Any]:
    """Return the bytes by category on the first or the last stage of a pipeline."""
    is_single_stage = np.asarray(c.pipeline == 1)
    table = c.vocab * c.hidden / c.tensor
    tables = table * np.where(c.tied, 1, 2)
    ends = np.where(is_single_stage | np.asarray(c.ends_everywhere == 1), tables, table)
    blocks = np.ceil(c.layers / c.pipeline)
    block = c.block / c.tensor
    count = blocks * block + ends
    data = c.replicate * c.shard * c.context
    units = c.shard * c.context
    of_parameters = np.where(c.zero >= 3, units, 1)
    of_gradients = np.where(c.zero >= 3, units, np.where(c.zero >= 2, data, 1))
    of_optimizer = np.where(c.zero >= 3, units, np.where(c.zero >= 1, data, 1))

    local_count = count / of_parameters
    kept = _kept_for_block(c) * c.tokens
    saved = saved_for_block(c) * c.tokens
    warm_up = np.where(c.schedule == 1, c.accumulate, np.minimum(c.pipeline, c.accumulate))
    in_flight = warm_up if first else np.where(c.schedule == 1, c.accumulate, 1)
    in_flight = np.where(
        is_single_stage, 1, in_flight * np.where(c.chunks > 1, 1 + (c.pipeline - 1) / (c.pipeline * c.chunks), 1)
    )
    activations = kept * blocks * in_flight + c.residual * c.hidden * c.tokens
    waiting = np.where((c.schedule == 1) & ~is_single_stage & (not first), c.accumulate - 1, 0)
    activations = activations + _KEPT_LOGITS * waiting * c.tokens * c.vocab / c.tensor

    # moments: at the loss; in the backward of a block; when the last gradients are reduced; in the optimizer's step
    has_head = is_single_stage | np.asarray(not first)
    logits = np.where(has_head, c.logits * c.tokens * c.vocab / c.tensor, 0)
    recomputed = np.where(c.recompute > 0, saved - kept, 0)
    backward = recomputed + c.tokens * (c.size * (1 + c.gated + 1) * c.ffn / c.tensor + 2 * c.residual * c.hidden)
    backward = backward + np.where(c.flash, 0, 2 * c.size * c.heads * c.seq / c.tensor) * c.tokens
    fsdp = np.asarray(c.zero >= 3)
    backward = backward + np.where(fsdp, (c.size + 4) * block, 0)
    last_unit = np.where(fsdp, (c.size + 4) * np.where(c.fsdp_root, ends, block), 0)
    step = np.where(c.fused_optimizer, 0, 4 * count / of_optimizer)
    step = np.where(c.averaging, 2 * (c.parameters + c.optimizer) * count, step)
    gradients = c.gradients * count / of_gradients
    # with one micro-batch the gradients of the last update are freed before the loss, unless they are in buffers
    freed = np.where((c.holds_gradients == 0) & (c.accumulate == 1), gradients, 0)
    moments = [activations + logits - freed, activations + backward, last_unit, step]
    peak = np.maximum(np.maximum(moments[0], moments[1]), np.maximum(moments[2], moments[3]))
    at_loss, in_backward = moments[0] >= peak, moments[1] >= peak
    is_busy = at_loss | in_backward

    units_gathered = np.where(c.keeps_gathered, count, 2 * block + np.where(c.fsdp_root, ends, table))
    gathered = np.where(fsdp, c.size * units_gathered, 0)
    gathered = gathered + np.where(fsdp, 0, c.weight_copies * count)
    shapes = c.hidden * c.head_dim * (2 * c.heads + 2 * c.kv) + (2 + c.gated) * c.hidden * c.ffn
    caches = np.where(c.caches, 2 * (shapes / c.tensor + np.where(has_head, table, 0)), 0)
    return {
        "parameters": c.parameters * local_count,
        "gradients": gradients - np.where(at_loss, freed, 0),
        "optimizer": c.optimizer * count / of_optimizer,
        "activations": np.where(is_busy, activations, 0),
        "gathered": gathered,
        "logits": np.where(at_loss, logits, 0),
        "temporary": np.where(at_loss, 0, np.where(is_busy, backward, peak)),
        "caches": caches,
        "building": 0.0 * caches,
    }


def _all_parameters(c: Configurations) -> Any:
    """Return the parameters of the whole model."""
    return c.layers * c.block + c.vocab * c.hidden * np.where(c.tied, 1, 2)
