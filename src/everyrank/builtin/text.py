"""text: a decoder transformer reads Python's language reference, byte by byte; or any files: --data FILE or DIR.

The text is one that every Python carries: `pydoc_data.topics`, what `help("assert")` shows. It differs a little from
one version of Python to the next, so its checksum is in every Record. The last tenth is held out.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from everyrank.builtin import DECODER_EXPERTS, Decoder, DecoderShape, decoder_plan
from everyrank.builtin.classify import check_dropout
from everyrank.datasets import TextWindows, files_in
from everyrank.errors import WorkloadError
from everyrank.workload import Workload

__all__ = ["Bytes", "text", "text_124m", "text_medium"]


class Bytes(Dataset[tuple[dict[str, Tensor], Tensor]]):
    """Windows of `length` bytes that do not overlap: ({"tokens": (T,), "positions": (T,)}, next bytes (T,))."""

    deterministic = True

    def __init__(self, length: int, is_validation: bool) -> None:
        content = "\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()
        self.checksum = "sha256:" + hashlib.sha256(content).hexdigest()
        border = len(content) * 9 // 10
        own_content = content[border:] if is_validation else content[:border]
        self.bytes = torch.from_numpy(np.frombuffer(own_content, dtype=np.uint8).astype(np.int64))
        self.positions = torch.arange(length)
        self.length = length

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.length
        window = self.bytes[start : start + self.length + 1]
        return {"tokens": window[:-1], "positions": self.positions}, window[1:]


def next_token_loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Return (cross entropy summed over the bytes, number of bytes): (B, T, V), (B, T)."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


def count_correct_tokens(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Return (correctly predicted bytes, bytes): (B, T, V), (B, T)."""
    return (output.argmax(-1) == target).sum(), target.numel()


def perplexity(means: Mapping[str, float]) -> float:
    """Return the exponential of the mean loss per byte."""
    return math.exp(min(means["eval_loss"], 700.0))


def _workload(
    name: str,
    shape: DecoderShape,
    length: int,
    lr: float,
    batch: int,
    steps: int,
    seed: int,
    warmup: int,
    data: str | None,
    order: str,
    fused: bool,
) -> Workload:
    if data is None and order == "shard":
        raise WorkloadError(
            "--set order=shard: the text that is shipped is one piece; give files of your own: --data DIR"
        )

    check_dropout(shape.dropout)
    if shape.experts < 0:
        raise WorkloadError(f"--set experts={shape.experts}: give at least 1, or leave it out")
    if shape.experts and not 1 <= shape.top_k <= shape.experts:
        raise WorkloadError(
            f"--set experts={shape.experts} top_k={shape.top_k}: give a top_k from 1 to {shape.experts}"
        )

    @functools.cache
    def windows(is_validation: bool) -> Any:
        if data is None:
            return Bytes(length, is_validation)
        return TextWindows(files_in(Path(data), ()), length, is_validation)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
        vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        # One kernel for all parameters, in its own order of operations: on a CPU only where --set fused=true asks for
        # it, because losses differ from those of before in the last digits.
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused or matrices[0].is_cuda)

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))

    return Workload(
        name=name,
        model=lambda: Decoder(shape),
        train_data=lambda: windows(is_validation=False),
        eval_data=lambda: windows(is_validation=True),
        loss=next_token_loss,
        metrics={"top1": count_correct_tokens},
        derived={"perplexity": perplexity},
        predict=lambda output: output.argmax(-1),
        order=order,
        optimizer=optimizer,
        schedule=schedule,
        global_batch=batch,
        steps=steps,
        seed=seed,
        clip_norm=1.0,
        blocks="blocks",
        tensor_plan=decoder_plan(shape),
        experts=DECODER_EXPERTS if shape.experts else None,
        sequence_dim=1,
    )


def text(
    lr: float = 2e-3,
    batch: int = 32,
    steps: int = 350,
    tied: bool = False,
    seed: int = 0,
    data: str | None = None,
    order: str = "global",
    fused: bool = False,
    experts: int = 0,
    top_k: int = 2,
    dropout: float = 0.0,
) -> Workload:
    """8 blocks, 4 heads, 64 tokens, 0.9 million parameters: about a minute on two cores.

    With `experts` each block has so many SwiGLU layers, of which a byte goes through the `top_k` most likely ones;
    `dropout` is of the embedding and of what each layer adds.
    """
    shape = DecoderShape(
        num_blocks=8, num_heads=4, width=96, hidden=256, tied=tied, experts=experts, top_k=top_k, dropout=dropout
    )
    return _workload("text", shape, 64, lr, batch, steps, seed, 20, data, order, fused)


def text_medium(
    lr: float = 1e-3,
    batch: int = 32,
    steps: int = 2000,
    tied: bool = False,
    seed: int = 0,
    data: str | None = None,
    order: str = "global",
    fused: bool = False,
    experts: int = 0,
    top_k: int = 2,
    dropout: float = 0.0,
) -> Workload:
    """12 blocks, 8 heads, 256 tokens, 38 million parameters: for one small GPU."""
    shape = DecoderShape(
        num_blocks=12, num_heads=8, width=512, hidden=1376, tied=tied, experts=experts, top_k=top_k, dropout=dropout
    )
    return _workload("text-medium", shape, 256, lr, batch, steps, seed, 100, data, order, fused)


def text_124m(
    lr: float = 6e-4,
    batch: int = 32,
    steps: int = 2000,
    tied: bool = False,
    seed: int = 0,
    data: str | None = None,
    order: str = "global",
    fused: bool = False,
    experts: int = 0,
    top_k: int = 2,
    dropout: float = 0.0,
) -> Workload:
    """16 blocks, 12 heads, 1024 tokens, 124 million parameters: the size of the small GPT-2."""
    shape = DecoderShape(
        num_blocks=16, num_heads=12, width=768, hidden=2336, tied=tied, experts=experts, top_k=top_k, dropout=dropout
    )
    return _workload("text-124m", shape, 1024, lr, batch, steps, seed, 100, data, order, fused)
