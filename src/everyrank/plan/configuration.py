"""Training configurations as numpy columns: the decoder, ranks along each axis, the batch, and the training stack."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from everyrank.plan.decoder import DecoderSizes

__all__ = ["STACKS", "Configurations", "Stack", "make_configurations"]


@dataclass(frozen=True)
class Stack:
    """The memory and kernels of a training stack, for each parameter and token. Bytes are for one element.

    parameters, gradients, optimizer  for each parameter
    size           bytes of the numbers in matrix products
    residual       bytes of the residual stream between blocks (4 under autocast, which keeps it in float32)
    weight_copies  bytes kept for each parameter from forward to backward, besides `parameters` (autocast's cache)
    logits         bytes for each logit, at the loss: logits, softmax, and the gradients of both
    mlp_saved      tensors of the MLP's inner width that a block keeps, gated and not gated
    flash          attention keeps no scores
    caches         1: Transformer Engine's dummy weight gradients, one for each weight shape, are never freed
    ends_everywhere  1: every pipeline stage has embedding and head (as in everyrank)
    fused_optimizer  0: the optimizer's step needs a temporary of float32 for each parameter
    fsdp_root      1: embedding and head are one unit that stays gathered from forward to the end of backward
    overlaps       data-parallel gradients are sent during the last backward
    compiled       kernels are fused by a compiler
    fused_softmax  unfused attention has Megatron's fused softmax kernel
    scores         bytes kept for each attention score, where attention is not flash
    selective_is_per_op  selective recomputation keeps every second product (torchtitan), else all but the scores
    attention      rate of its flash attention over FlashAttention-2's: 0.62 for version 1 (Dao 2023)
    logit_traffic  bytes moved for each logit at the loss: 24 fused, 40 to 60 eager, 120 in Megatron of 2021
    optimizer_traffic  bytes moved for each parameter in the optimizer's step: 28 fused, 40 not
    tf32           float32 products run as TF32 (torch's default is that they do not)
    extra          additional bytes that a block keeps for each token and element of the width: eager norms keep float32
                   copies of their input. From traces of our decoder on CPU; fused norms keep less
    gathered_inputs  inputs of products that a block keeps whole, although activations are split along the sequence
    holds_gradients  gradients of the last update are in buffers while the loss is computed (else they are freed)
    uncertainty    fraction by which the memory may be wrong: from validated rows; 0.15 without any
    """

    name: str
    parameters: float = 4
    gradients: float = 4
    optimizer: float = 8
    size: float = 2
    residual: float = 2
    weight_copies: float = 0
    logits: float = 14
    mlp_saved: tuple[float, float] = (4, 2)
    flash: bool = True
    caches: bool = False
    ends_everywhere: bool = False
    fused_optimizer: bool = False
    fsdp_root: bool = False
    overlaps: bool = True
    compiled: bool = False
    fused_softmax: bool = False
    scores: float = 0
    selective_is_per_op: bool = False
    extra: float = 0
    gathered_inputs: float = 0
    holds_gradients: bool = True
    uncertainty: float = 0.15
    attention: float = 1
    logit_traffic: float = 50
    optimizer_traffic: float = 40
    tf32: bool = True


_OWN_OPTIMIZER = replace(Stack("megatron", 2, 4, 12), fused_optimizer=True, optimizer_traffic=28)
_MEGATRON = replace(_OWN_OPTIMIZER, logits=4, mlp_saved=(3, 2), logit_traffic=24)
_UNFUSED = replace(_MEGATRON, flash=False, scores=5, fused_softmax=True, overlaps=False)
_MEGATRON_2021 = replace(_UNFUSED, logits=14, uncertainty=0.4, optimizer_traffic=40)

STACKS = {
    stack.name: stack
    for stack in (
        # ours: parameters in float32; FSDP casts to bf16, the others compute under autocast
        Stack("everyrank-fsdp", fsdp_root=True, extra=18, gathered_inputs=2, holds_gradients=False),
        # autocast makes a copy for each product
        Stack("everyrank-autocast", residual=4, weight_copies=2, ends_everywhere=True, extra=18, gathered_inputs=5),
        Stack("everyrank-float32", size=4, residual=4, logits=16, fsdp_root=True, extra=18, gathered_inputs=2,
              holds_gradients=False, tf32=False),
        Stack("torchtitan", selective_is_per_op=True, fused_optimizer=True, uncertainty=0.08),
        Stack("llm-foundry", logits=8, mlp_saved=(3, 2), fsdp_root=True, attention=0.62, logit_traffic=24),
        _MEGATRON,
        replace(_MEGATRON, name="megatron-te", caches=True, uncertainty=0.05),
        replace(_MEGATRON_2021, name="megatron-deepspeed", logit_traffic=50),
        replace(_MEGATRON_2021, name="megatron-2022", logit_traffic=120),
        replace(_MEGATRON_2021, name="float32", parameters=4, gradients=4, optimizer=8, size=4, residual=4, logits=16,
                mlp_saved=(4, 2), fused_optimizer=False, fused_softmax=False, logit_traffic=50),
    )
}  # fmt: skip
"""By name. Sources: MixedPrecisionPolicy and autocast of torch; Korthikanti et al. 2022 (activations); Megatron-LM's
distributed optimizer (parameters bf16, gradients float32, 12 bytes of optimizer); counted from the modules."""


@dataclass
class Configurations:
    """Columns of the same length, or plain numbers, which numpy broadcasts. Degrees are ranks along an axis.

    tensor, pipeline, replicate, shard, context   ranks
    micro           samples of a micro-batch on one rank
    accumulate      micro-batches of an update (for a pipeline: all micro-batches of one replica)
    chunks          stages of a pipeline on each rank (interleaved schedule)
    zero            0: replicas; 1: the optimizer is sharded; 2: gradients, too; 3: parameters, too
    recompute       0: none; 1: every block; 2: selective
    sequence        1: activations between the matrices are split over the tensor axis
    schedule        0: 1f1b or interleaved; 1: gpipe; 2: zero-bubble
    per_node        GPUs of a node
    fp8             1: products of 8-bit floats
    whole_first     bytes for each parameter of the whole model, which a rank holds before it is split (0: meta=true)
    keeps_gathered  1: gathered parameters stay until backward (reshard_after_forward=false)
    averaging       local SGD: updates between two averages of parameters and optimizer state; 0: none
    """

    layers: Any
    hidden: Any
    heads: Any
    kv: Any
    ffn: Any
    vocab: Any
    seq: Any
    gated: Any
    head_dim: Any
    tied: Any
    tensor: Any = 1
    pipeline: Any = 1
    replicate: Any = 1
    shard: Any = 1
    context: Any = 1
    micro: Any = 1
    accumulate: Any = 1
    chunks: Any = 1
    zero: Any = 0
    recompute: Any = 0
    sequence: Any = 0
    schedule: Any = 0
    per_node: Any = 8
    parameters: Any = 4
    gradients: Any = 4
    optimizer: Any = 8
    size: Any = 2
    residual: Any = 2
    weight_copies: Any = 0
    logits: Any = 14
    mlp_saved: Any = 4
    flash: Any = 1
    caches: Any = 0
    ends_everywhere: Any = 0
    fused_optimizer: Any = 0
    fsdp_root: Any = 0
    overlaps: Any = 1
    compiled: Any = 0
    fused_softmax: Any = 0
    scores: Any = 0
    selective_is_per_op: Any = 0
    extra: Any = 0
    gathered_inputs: Any = 0
    holds_gradients: Any = 1
    uncertainty: Any = 0.15
    attention: Any = 1
    logit_traffic: Any = 50
    optimizer_traffic: Any = 40
    tf32: Any = 1
    fp8: Any = 0
    whole_first: Any = 0
    keeps_gathered: Any = 0
    averaging: Any = 0

    @property
    def ranks(self) -> Any:
        """Ranks of the whole mesh."""
        return self.tensor * self.pipeline * self.replicate * self.shard * self.context

    @property
    def data(self) -> Any:
        """Ranks that read different samples."""
        return self.replicate * self.shard

    @property
    def samples(self) -> Any:
        """Samples of an update over all ranks."""
        return self.data * self.micro * self.accumulate

    @property
    def tokens(self) -> Any:
        """Tokens of a micro-batch that one rank computes on."""
        return self.micro * self.seq / self.context

    @property
    def block(self) -> Any:
        """Parameters of one block, all ranks of the tensor axis together."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv)
        return attention + (2 + self.gated) * self.hidden * self.ffn + 2 * self.hidden

    def __len__(self) -> int:
        return max(np.size(getattr(self, field.name)) for field in dataclasses.fields(self))

    def take(self, index: Any) -> Configurations:
        """Return the rows at `index`; plain numbers stay."""
        columns = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            columns[field.name] = value[index] if np.ndim(value) else value
        return Configurations(**columns)


def make_configurations(
    sizes: DecoderSizes | Sequence[DecoderSizes], stack: Stack | Sequence[Stack], rows: Mapping[str, Any]
) -> Configurations:
    """Return configurations of one decoder (or one for each row) under one stack (or one for each row).

    `rows` maps names of `Configurations` (degrees, batch) to numbers or columns.
    """

    def column(values: list[Any]) -> Any:
        return np.array(values, dtype=float) if len(values) > 1 else float(values[0])

    sizes_list = [sizes] if isinstance(sizes, DecoderSizes) else list(sizes)
    stacks = [stack] if isinstance(stack, Stack) else list(stack)
    names = ("layers", "hidden", "heads", "kv", "ffn", "vocab", "seq", "gated", "head_dim", "tied")
    columns = {name: column([getattr(item, name) for item in sizes_list]) for name in names}
    for field in dataclasses.fields(Stack):
        if field.name == "mlp_saved":
            gated = np.asarray(columns["gated"])
            saved = [column([item.mlp_saved[index] for item in stacks]) for index in (0, 1)]
            columns["mlp_saved"] = np.where(gated, saved[0], saved[1])
        elif field.name != "name":
            columns[field.name] = column([getattr(item, field.name) for item in stacks])
    columns |= {
        name: np.asarray(value, dtype=float) if np.ndim(value) else float(value) for name, value in rows.items()
    }
    return Configurations(**columns)
