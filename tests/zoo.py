"""Small workloads that between them have every trait that breaks distributed training."""

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
    """Tokens with ragged masks: ({"tokens": (6,), "shift": ()}, next tokens (6,) of which -100 do not count)."""

    deterministic = True

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, 11, (length, 7), generator=generator)
        self.lengths = torch.randint(0, 7, (length,), generator=generator)  # some sentences count no term at all
        self.lengths[0] = 6

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        target = self.tokens[index, 1:].clone()
        target[self.lengths[index] :] = -100
        return {"tokens": self.tokens[index, :6], "shift": torch.tensor(0.1 * (index % 3))}, target


class TiedModel(nn.Module):
    """Tied embedding and head, blocks, a key bias whose true gradient is zero; takes a dict by keyword."""

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
    return (
        F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum", ignore_index=-100),
        (target != -100).sum(),
    )


class Points(Dataset[tuple[Tensor, Tensor]]):
    """(5,) -> (2,), real numbers."""

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
    """A frozen layer, buffers (one of them counts forward passes), a scalar parameter, shards of uneven size."""

    def __init__(self, counts: bool = True) -> None:
        super().__init__()
        self.counts = counts
        self.frozen = nn.Linear(5, 7)
        self.frozen.requires_grad_(False)
        self.layers = nn.Sequential(nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 2))
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("offset", torch.full((2,), 0.25))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, values: Tensor) -> Tensor:
        if self.training and self.counts:
            self.calls += 1
        return self.layers(self.frozen(values)) * self.temperature + self.offset


class UnusedModel(FrozenModel):
    """A FrozenModel with a layer that takes no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(4, 4)


class SparseModel(nn.Module):
    """An embedding whose gradient is sparse, under a dense head. Plain SGD takes such gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, sparse=True)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor, shift: Tensor) -> Tensor:
        return self.head(self.embedding(tokens) + shift[:, None, None])


class Passages(Sentences):
    """Sentences of 8 tokens with their positions: ({"tokens": (8,), "positions": (8,)}, next tokens (8,))."""

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
    """A decoder transformer of 16 features."""
    return Decoder(DecoderShape(num_blocks, heads, width=16, hidden=24, vocabulary=12, tied=tied))


def dropping_decoder() -> Decoder:
    """A decoder with dropout."""
    return Decoder(DecoderShape(4, 4, width=16, hidden=24, vocabulary=12, tied=True, dropout=0.1))


class DroppingSwiGLU(nn.Module):
    """A SwiGLU layer that drops inside, where features are split: down(dropout(silu(gate(x)) * up(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False)
        self.down = nn.Linear(24, 16, bias=False)
        self.inner_dropout = nn.Dropout(0.2)

    def forward(self, stream: Tensor) -> Tensor:
        return self.down(self.inner_dropout(F.silu(self.gate(stream)) * self.up(stream)))


class DroppingAttention(nn.Module):
    """Causal attention that drops weights, then drops as a function: (B, T, 16) -> (B, T, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, stream: Tensor, positions: Tensor) -> Tensor:
        query, key, value = (
            layer(stream).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        p = 0.2 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=p)
        mixed = F.dropout(mixed, p, self.training)
        return F.dropout(self.output(mixed.transpose(1, 2).flatten(-2)), 0.1, self.training)


class DroppingNorm(nn.RMSNorm):
    """A norm that drops what it gives: along a split sequence, a DTensor."""

    def __init__(self) -> None:
        super().__init__(16, eps=1e-5)
        self.dropout = nn.Dropout(0.1)

    def forward(self, stream: Tensor) -> Tensor:
        return self.dropout(super().forward(stream))


def dropping_everywhere() -> Decoder:
    """A decoder that drops the embedding, attention weights, inside layers, by modules and by functions."""
    model = dropping_decoder()
    for block in model.blocks:
        block.attention, block.feed, block.feed_norm = DroppingAttention(), DroppingSwiGLU(), DroppingNorm()
    return model


class DroppingModel(nn.Module):
    """Blocks that drop, and a head that does: (B, 5) -> (B, 2). `checkpoints`: it runs its blocks again itself."""

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


def experts(count: int = 4, top_k: int = 2) -> Decoder:
    """The same of two blocks, each a mixture of experts. Its router is sharp, so that some experts get few tokens."""
    model = Decoder(DecoderShape(2, 4, width=16, hidden=24, vocabulary=12, tied=True, experts=count, top_k=top_k))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("router.weight"):
                parameter *= 20
    return model


def one_of_eight_experts() -> Decoder:
    """Each token chooses one of eight experts: with few tokens, some are chosen by none."""
    return experts(8, 1)


def three_experts() -> Decoder:
    return experts(3)


def one_expert() -> Decoder:
    return experts(1, 1)


def one_expert_for_all() -> Decoder:
    """Every token chooses the first of four experts: of two ranks the second gets none."""
    model = experts(4, 1)
    for block in model.blocks:
        router = nn.Linear(16, 4)
        with torch.no_grad():
            router.bias[0] += 50.0
        block.feed.router = router  # type: ignore[union-attr]
    return model


def guessed(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A metric: how many next tokens are guessed right."""
    return ((output.argmax(-1) == target) & (target != -100)).sum(), (target != -100).sum()


def squared(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output - target).square().sum(), len(target)


class NormModel(nn.Module):
    """Batch norm in blocks, one of them without running statistics of its own momentum."""

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


class Augmented(Points):
    """Points with noise drawn from all three global generators."""

    deterministic = False

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        import random

        import numpy as np

        value, target = super().__getitem__(index)
        noise = 0.1 * torch.randn(5) + 0.01 * random.random() + 0.01 * float(np.random.rand())
        return value + noise, target


class Views(Points):
    """Two views of a point, (2, 5); the target is not looked at."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        value, target = super().__getitem__(index)
        return torch.stack([value, value + 0.1 * torch.roll(value, 1)]), target


class ViewModel(nn.Module):
    """(B, 2, 5) -> (B, 2, 4); its blocks can be sharded, split and cut into stages."""

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


def contrast(own: Tensor, everyone: Tensor, first: int) -> tuple[Tensor, int]:
    """NT-Xent: each view (b, 2, d) is to find the other one of its sample among all views (B, 2, d) of the batch."""
    index = first + torch.arange(len(own))
    total = own.new_zeros(())
    for view in (0, 1):
        logits = own[:, view] @ torch.cat([everyone[:, 1 - view], everyone[:, view]]).T / 0.5
        logits = logits.scatter(1, (len(everyone) + index)[:, None], float("-inf"))  # not itself
        total = total + F.cross_entropy(logits, index, reduction="sum")
    return total, 2 * len(own)


def contrastive(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """A loss over the whole batch."""
    own = F.normalize(output, dim=-1)
    return contrast(own, everyrank.gather(own), everyrank.first_row())


def contrastive_in_parts(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """What people write: each rank contrasts what it has."""
    own = F.normalize(output, dim=-1)
    return contrast(own, own, 0)


def half_top(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """A metric: how many outputs are on the right side."""
    return ((output > 0) == (target > 0)).sum(), target.numel()


def workload(name: str, optimizer: str = "sgd", **changes: Any) -> Workload:
    """One of the zoo. 23 samples in batches of 7: ragged, and the last batch of 2 is fewer than 3 or 4 ranks."""
    common: dict[str, Any] = {
        "name": name,
        "optimizer": OPTIMIZERS[optimizer],
        "global_batch": 7,
        "epochs": 2,
        "eval_data": lambda: Points(13),
        "train_data": lambda: Points(23),
        "loss": squared,
        "metrics": {"side": half_top},
    }
    own: dict[str, dict[str, Any]] = {
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
            "train_data": lambda: Passages(23),
            "eval_data": lambda: Passages(13),
            "loss": masked_loss,
            "metrics": {"guessed": guessed},
            "blocks": "blocks",
            "tensor_plan": DECODER_PLAN,
            "sequence_dim": 1,
            "clip_norm": 0.5,
        },
        "experts": {
            "model": experts,
            "train_data": lambda: Passages(23),
            "eval_data": lambda: Passages(13),
            "loss": masked_loss,
            "metrics": {"guessed": guessed},
            "blocks": "blocks",
            "tensor_plan": {key: word for key, word in DECODER_PLAN.items() if ".feed" not in key},
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
            "train_data": lambda: Views(23),
            "eval_data": lambda: Views(13),
            "loss": contrastive,
            "metrics": {"again": contrastive},
            "blocks": "blocks",
            "tensor_plan": {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"},
        },
        "augmented": {"model": FrozenModel, "train_data": lambda: Augmented(23)},
    }
    return Workload(**{**common, **own[name], **changes})


_subjects: dict[str, ParityCase] = {}  # of this process


def case(world: World, name: str, optimizer: str = "sgd", steps: int = 20, **changes: Any) -> ParityCase:
    """One of the zoo to be checked. Its runs of `single` are kept for the next check of the same in these ranks."""
    named = {
        key: f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else value
        for key, value in changes.items()
    }
    key = repr((name, optimizer, steps, sorted(named.items())))
    # a function of the test's own may be another one at every call
    is_kept = not any(word in key for word in ("<lambda>", "<locals>", " at 0x"))
    if is_kept and key in _subjects:
        return _subjects[key]
    chosen = workload(name, optimizer, **changes)
    made = parity_case(chosen, *open_data(chosen, world), steps=steps)
    if is_kept:
        _subjects[key] = made
    return made


def uncounted_model() -> nn.Module:
    """Without the buffer that counts forward passes: with micro-batches there are more of them."""
    return FrozenModel(counts=False)
