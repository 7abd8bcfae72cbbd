"""Small workloads for the tests. Together they have every property that can break distributed training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

import everyrank
from everyrank import Workload
from everyrank.builtin import DECODER_EXPERTS, DECODER_PLAN, Decoder, DecoderShape
from everyrank.loop import open_data
from everyrank.parity import ParityCase, parity_case
from everyrank.world import World

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01),
}


class Sentences(Dataset[tuple[dict[str, Tensor], Tensor]]):
    """Sentences of 6 tokens and different lengths: ({"tokens": (6,), "shift": ()}, next tokens (6,)).

    Targets of -100 do not count.
    """

    deterministic = True

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, 11, (length, 7), generator=generator)
        self.lengths = torch.randint(0, 7, (length,), generator=generator)  # some sentences have no loss term
        self.lengths[0] = 6

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        target = self.tokens[index, 1:].clone()
        target[self.lengths[index] :] = -100
        return {"tokens": self.tokens[index, :6], "shift": torch.tensor(0.1 * (index % 3))}, target


class TiedModel(nn.Module):
    """A model with tied embedding and head, blocks, and a key bias whose true gradient is zero.

    The inputs are passed as keywords.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, shift: Tensor) -> Tensor:
        stream = self.embedding(tokens) + shift[:, None, None]
        for block in self.blocks:
            stream = stream + block(stream, stream, stream, need_weights=False)[0]
        return self.head(stream)


def masked_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the cross-entropy over the targets that count, and their number."""
    return (
        F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum", ignore_index=-100),
        (target != -100).sum(),
    )


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Samples with 5 real inputs and 2 real targets."""

    deterministic = True

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(2)
        self.inputs = torch.randn(length, 5, generator=generator)
        self.targets = torch.randn(length, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class FrozenModel(nn.Module):
    """A model with a frozen layer, buffers, a scalar parameter, and shards of uneven size.

    One of the buffers counts the forward passes.
    """

    def __init__(self, counts_calls: bool = True) -> None:
        super().__init__()
        self.counts_calls = counts_calls
        self.frozen = nn.Linear(5, 7)
        self.frozen.requires_grad_(False)
        self.layers = nn.Sequential(nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 2))
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("offset", torch.full((2,), 0.25))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, values: Tensor) -> Tensor:
        if self.training and self.counts_calls:
            self.calls += 1
        return self.layers(self.frozen(values)) * self.temperature + self.offset


class UnusedModel(FrozenModel):
    """A FrozenModel with a layer that its forward pass does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(4, 4)


class SparseModel(nn.Module):
    """An embedding with a sparse gradient, and a dense head. Plain SGD supports sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, sparse=True)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor, shift: Tensor) -> Tensor:
        return self.head(self.embedding(tokens) + shift[:, None, None])


class SentencesWithPositions(Sentences):
    """Sentences of 8 tokens and their positions: ({"tokens": (8,), "positions": (8,)}, next tokens (8,))."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(0, 12, (length, 9), generator=generator)
        self.lengths = torch.randint(0, 9, (length,), generator=generator)
        self.lengths[0] = 8

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        target = self.tokens[index, 1:].clone()
        target[self.lengths[index] :] = -100
        return {"tokens": self.tokens[index, :8], "positions": torch.arange(8)}, target


def decoder(num_blocks: int = 4, tied: bool = True, heads: int = 4) -> Decoder:
    """Return a decoder transformer with 16 features."""
    return Decoder(DecoderShape(num_blocks, heads, width=16, hidden=24, vocabulary=12, tied=tied))


def decoder_with_dropout(num_blocks: int = 4) -> Decoder:
    """Return a decoder with dropout."""
    return Decoder(DecoderShape(num_blocks, 4, width=16, hidden=24, vocabulary=12, tied=True, dropout=0.1))


class DropoutSwiGLU(nn.Module):
    """A SwiGLU layer with dropout where its features are split: down(dropout(silu(gate(x)) * up(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False)
        self.down = nn.Linear(24, 16, bias=False)
        self.inner_dropout = nn.Dropout(0.2)

    def forward(self, stream: Tensor) -> Tensor:
        return self.down(self.inner_dropout(F.silu(self.gate(stream)) * self.up(stream)))


class DropoutAttention(nn.Module):
    """Causal attention with dropout of its weights and with functional dropout: (B, T, 16) -> (B, T, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, stream: Tensor, positions: Tensor) -> Tensor:
        query, key, value = (
            layer(stream).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        dropout_p = 0.2 if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout_p)
        attended = F.dropout(attended, dropout_p, self.training)
        return F.dropout(self.output(attended.transpose(1, 2).flatten(-2)), 0.1, self.training)


class DropoutNorm(nn.RMSNorm):
    """A norm with dropout of its output, which is a DTensor if the sequence is split."""

    def __init__(self) -> None:
        super().__init__(16, eps=1e-5)
        self.dropout = nn.Dropout(0.1)

    def forward(self, stream: Tensor) -> Tensor:
        return self.dropout(super().forward(stream))


def decoder_with_dropout_everywhere() -> Decoder:
    """Return a decoder with dropout of the embedding and attention weights, in layers, by modules and by functions."""
    model = decoder_with_dropout()
    for block in model.blocks:
        block.attention, block.feed, block.feed_norm = DropoutAttention(), DropoutSwiGLU(), DropoutNorm()
    return model


class DropoutModel(nn.Module):
    """A model with dropout in its blocks and before its head: (B, 5) -> (B, 2).

    With `checkpoints`, it applies activation checkpointing to its blocks itself.
    """

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.embedding = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3)) for _ in range(2))
        self.head_dropout = nn.Dropout(0.2)
        self.head = nn.Linear(8, 2)

    def forward(self, values: Tensor) -> Tensor:
        values = self.embedding(values)
        for block in self.blocks:
            values = checkpoint(block, values, use_reentrant=False) if self.checkpoints else block(values)
        return self.head(self.head_dropout(values))


def expert_decoder(count: int = 4, top_k: int = 2, num_blocks: int = 2) -> Decoder:
    """Return a decoder whose blocks are mixtures of experts.

    Its router weights are large, so that some experts get few tokens.
    """
    model = Decoder(
        DecoderShape(num_blocks, 4, width=16, hidden=24, vocabulary=12, tied=True, experts=count, top_k=top_k)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("router.weight"):
                parameter *= 20
    return model


def eight_experts_top_1() -> Decoder:
    """Return a decoder whose tokens choose one of eight experts. With few tokens, some experts get none."""
    return expert_decoder(8, 1)


def three_experts() -> Decoder:
    """Return a decoder with three experts in each block."""
    return expert_decoder(3)


def one_expert() -> Decoder:
    """Return a decoder with one expert in each block."""
    return expert_decoder(1, 1)


def all_tokens_to_one_expert() -> Decoder:
    """Return a decoder whose tokens all choose the first of four experts. The second of two ranks gets no tokens."""
    model = expert_decoder(4, 1)
    for block in model.blocks:
        router = nn.Linear(16, 4)
        with torch.no_grad():
            router.bias[0] += 50.0
        block.feed.router = router  # type: ignore[union-attr]
    return model


def next_token_accuracy(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of correctly predicted next tokens, and the number of targets. This is a metric."""
    return ((output.argmax(-1) == target) & (target != -100)).sum(), (target != -100).sum()


def squared_error(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Return the sum of the squared errors, and the number of samples."""
    return (output - target).square().sum(), len(target)


class NormModel(nn.Module):
    """A model with batch norm in its blocks. The second batch norm averages all batches equally (momentum=None)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh()),
                nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None), nn.Tanh()),
            ]
        )
        self.head = nn.Linear(6, 2)

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = block(values)
        return self.head(values)


class AugmentedPoints(Points):
    """Points with noise from the three global generators of torch, random and numpy."""

    deterministic = False

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        import random

        import numpy as np

        value, target = super().__getitem__(index)
        noise = 0.1 * torch.randn(5) + 0.01 * random.random() + 0.01 * float(np.random.rand())
        return value + noise, target


class PointViews(Points):
    """Two views of each point, (2, 5). The target is not used."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        value, target = super().__getitem__(index)
        return torch.stack([value, value + 0.1 * torch.roll(value, 1)]), target


class ViewModel(nn.Module):
    """A model of two views: (B, 2, 5) -> (B, 2, 4). Its blocks can be sharded, split, or divided into stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, values: Tensor) -> Tensor:
        values = self.embedding(values.flatten(0, 1))
        for block in self.blocks:
            values = block(values)
        values = self.head(values)
        return torch.stack([values[0::2], values[1::2]], dim=1)


def nt_xent_loss(local_views: Tensor, all_views: Tensor, first_row: int) -> tuple[Tensor, int]:
    """Return the sum of the NT-Xent losses of the local views, and their number.

    Each local view (b, 2, d) is classified: which of all views (B, 2, d) is the other view of its sample?
    `first_row` is the row of the first local sample in the batch.
    """
    rows = first_row + torch.arange(len(local_views))
    total = local_views.new_zeros(())
    for view in (0, 1):
        logits = local_views[:, view] @ torch.cat([all_views[:, 1 - view], all_views[:, view]]).T / 0.5
        logits = logits.scatter(1, (len(all_views) + rows)[:, None], float("-inf"))  # excludes the view itself
        total = total + F.cross_entropy(logits, rows, reduction="sum")
    return total, 2 * len(local_views)


def contrastive_loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Return a contrastive loss over the whole batch."""
    local_views = F.normalize(output, dim=-1)
    return nt_xent_loss(local_views, everyrank.gather(local_views), everyrank.first_row())


def local_contrastive_loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Return a contrastive loss over the local samples only, which is a common mistake."""
    local_views = F.normalize(output, dim=-1)
    return nt_xent_loss(local_views, local_views, 0)


def sign_accuracy(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Return the number of outputs with the sign of their target, and the number of targets. This is a metric."""
    return ((output > 0) == (target > 0)).sum(), target.numel()


def workload(name: str, optimizer: str = "sgd", **changes: Any) -> Workload:
    """Return a workload by its name.

    It has 23 samples in batches of 7. Decoders, whose updates take longer, have 9 samples. The last batch of an epoch
    has 2 samples, fewer than 3 or 4 ranks.
    """
    common: dict[str, Any] = {
        "name": name,
        "optimizer": OPTIMIZERS[optimizer],
        "global_batch": 7,
        "epochs": 2,
        "eval_data": lambda: Points(13),
        "train_data": lambda: Points(23),
        "loss": squared_error,
        "metrics": {"side": sign_accuracy},
    }
    settings_by_name: dict[str, dict[str, Any]] = {
        "tied": {
            "model": TiedModel,
            "train_data": lambda: Sentences(23),
            "eval_data": lambda: Sentences(13),
            "loss": masked_loss,
            "metrics": {},
            "blocks": "blocks",
            "clip_norm": 0.5,
        },
        "decoder": {
            "model": decoder,
            "train_data": lambda: SentencesWithPositions(9),
            "eval_data": lambda: SentencesWithPositions(9),
            "loss": masked_loss,
            "metrics": {"guessed": next_token_accuracy},
            "blocks": "blocks",
            "tensor_plan": DECODER_PLAN,
            "sequence_dim": 1,
            "clip_norm": 0.5,
        },
        "experts": {
            "model": expert_decoder,
            "train_data": lambda: SentencesWithPositions(9),
            "eval_data": lambda: SentencesWithPositions(9),
            "loss": masked_loss,
            "metrics": {"guessed": next_token_accuracy},
            "blocks": "blocks",
            "tensor_plan": {key: style for key, style in DECODER_PLAN.items() if ".feed" not in key},
            "experts": DECODER_EXPERTS,
            "sequence_dim": 1,
            "clip_norm": 0.5,
        },
        "sparse": {
            "model": SparseModel,
            "train_data": lambda: Sentences(23),
            "eval_data": lambda: Sentences(13),
            "loss": masked_loss,
            "metrics": {},
            "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
        },
        "frozen": {"model": FrozenModel, "blocks": "layers", "clip_norm": 1.0},
        "unused": {"model": UnusedModel, "blocks": "layers"},
        "norm": {"model": NormModel, "blocks": "blocks"},
        "contrastive": {
            "model": ViewModel,
            "train_data": lambda: PointViews(23),
            "eval_data": lambda: PointViews(13),
            "loss": contrastive_loss,
            "metrics": {"again": contrastive_loss},
            "blocks": "blocks",
            "tensor_plan": {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"},
        },
        "augmented": {"model": FrozenModel, "train_data": lambda: AugmentedPoints(23)},
    }
    return Workload(**{**common, **settings_by_name[name], **changes})


_cached_cases: dict[str, ParityCase] = {}  # the cache of this process


def cached_parity_case(world: World, name: str, optimizer: str = "sgd", steps: int = 20, **changes: Any) -> ParityCase:
    """Return the parity case of a workload.

    The case keeps its runs of `single`. The next call with the same arguments in these ranks returns the same case.
    """
    change_names = {
        key: f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else value
        for key, value in changes.items()
    }
    key = repr((name, optimizer, steps, sorted(change_names.items())))
    # a function that a test defines locally may be a different one at every call
    is_cacheable = not any(text in key for text in ("<lambda>", "<locals>", " at 0x"))
    if is_cacheable and key in _cached_cases:
        return _cached_cases[key]
    case_workload = workload(name, optimizer, **changes)
    case = parity_case(case_workload, *open_data(case_workload, world), steps=steps)
    if is_cacheable:
        _cached_cases[key] = case
    return case


def model_without_counter() -> nn.Module:
    """Return a FrozenModel that does not count its forward passes, because micro-batches need more of them."""
    return FrozenModel(counts_calls=False)
