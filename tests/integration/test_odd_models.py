"""Models of a person's own under tensor, context and pipeline layouts: equal to one device, or refused in one line.

What must never happen is the third: a training that runs and is another one.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from everyrank import Workload, parse_layout
from everyrank.errors import EveryrankError
from everyrank.loop import open_data
from everyrank.parity import check_layout, parity_case
from everyrank.record import read_records
from everyrank.world import World
from processes import Cli

_COUNTER = itertools.count()

WIDTH, HEAD = 16, 4


# --- a language model with everything in it that a person may write differently


class Attention(nn.Module):
    """Causal attention with biases; what a subclass changes is how features are cut into heads."""

    def __init__(self, heads: int = 4, kv_heads: int = 4) -> None:
        super().__init__()
        self.shares = heads != kv_heads
        self.query = nn.Linear(WIDTH, heads * HEAD)
        self.key = nn.Linear(WIDTH, kv_heads * HEAD)
        self.value = nn.Linear(WIDTH, kv_heads * HEAD)
        self.output = nn.Linear(heads * HEAD, WIDTH)

    def cut(self, features: Tensor) -> Tensor:
        return features.unflatten(-1, (-1, HEAD))

    def norm(self, heads: Tensor) -> Tensor:
        return heads

    def parts(self, stream: Tensor) -> list[Tensor]:
        query, key, value = (self.cut(layer(stream)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return [self.norm(query), self.norm(key), value]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.shares)

    def forward(self, stream: Tensor) -> Tensor:
        return self.output(self.attend(*self.parts(stream)).transpose(1, 2).flatten(-2))


class Feed(nn.Module):
    def __init__(self, hidden: int = 24) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, stream: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(stream)))


class Block(nn.Module):
    def __init__(self, attention: nn.Module, feed: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.feed = attention, feed

    def forward(self, stream: Tensor, *extra: Tensor) -> Tensor:
        for value in extra:
            stream = stream + value
        stream = stream + self.attention(self.first(stream))
        return stream + self.feed(self.second(stream))


class Language(nn.Module):
    """Learned positions, looked up by the positions of the input: (B, T), (B, T) -> (B, T, 12)."""

    def __init__(
        self, attention: Callable[[], nn.Module] = Attention, feed: Callable[[], nn.Module] = Feed, num_blocks: int = 4
    ) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(12, WIDTH), nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList(Block(attention(), feed()) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12)

    def begin(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.embedding(tokens) + self.places(positions)

    def through(self, stream: Tensor) -> Tensor:
        for block in self.blocks:
            stream = block(stream)
        return stream

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.head(self.norm(self.through(self.begin(tokens, positions))))


PLAN = {
    "embedding": "vocabulary",
    "places": "vocabulary",
    "blocks.*.first": "sequence",
    "blocks.*.attention": "gather",
    "blocks.*.attention.query": "colwise",
    "blocks.*.attention.key": "colwise",
    "blocks.*.attention.value": "colwise",
    "blocks.*.attention.output": "rowwise",
    "blocks.*.second": "sequence",
    "blocks.*.feed": "gather",
    "blocks.*.feed.up": "colwise",
    "blocks.*.feed.down": "rowwise",
    "norm": "sequence",
    "head": "colwise_gather",
}


def language(model: Callable[[], nn.Module] = Language, optimizer: str = "sgd", **changes: Any) -> Workload:
    return zoo.workload("decoder", optimizer, **{"model": model, "tensor_plan": PLAN, **changes})


def outcomes(ranks: Any, count: int, *cases: tuple[Workload, str]) -> list[str]:
    """For each case `equal`, `different: ...`, or the line of the refusal, which all ranks have to give alike."""
    rows = ranks(count, _outcomes, f"odd/{next(_COUNTER)}", cases)
    assert all(row == rows[0] for row in rows), rows
    return rows[0]


def _outcomes(world: World, key: str, cases: list[tuple[Workload, str]]) -> list[str]:
    return [_outcome(world, f"{key}/{index}", *case) for index, case in enumerate(cases)]


def _outcome(world: World, key: str, workload: Workload, layout: str) -> str:
    separator = "," if ":" in layout else ":"
    precision = "" if "precision" in layout else f"{separator}precision=float64"
    try:
        subject = parity_case(workload, *open_data(workload, world), steps=4)
        parity, _ = check_layout(subject, parse_layout(layout + precision), world, key)
    except EveryrankError as error:
        is_right = error.exit_status == 2 and "\n" not in str(error)
        return f"{'refused' if is_right else f'ended with {error.exit_status}'}: {error}"
    if parity.status == "refused":
        return f"refused: {parity.reason}"
    if parity.status == "equal":
        assert parity.max_relative_difference is not None
        assert parity.max_relative_difference <= 1e-10
        return "equal"
    return f"different: {parity.first_divergence} {parity.max_relative_difference} {parity.cause}"


def refused(ranks: Any, count: int, workload: Workload, layout: str, *fragments: str) -> None:
    """The layout is refused, in one line with the value, the rule and the fix."""
    [found] = outcomes(ranks, count, (workload, layout))
    assert found.startswith("refused: "), found
    for fragment in fragments:
        assert fragment in found


# --- tensor: what is done with split features


def planned(drop: tuple[str, ...] = (), **add: str) -> dict[str, str]:
    """PLAN without some names and with others; `__` stands for a dot, `_0_` for a star."""
    kept = {name: word for name, word in PLAN.items() if name not in drop}
    return kept | {name.replace("__", ".").replace("._0.", ".*."): word for name, word in add.items()}


def small(
    attention: Callable[[], nn.Module] = Attention, feed: Callable[[], nn.Module] = Feed, **changes: Any
) -> Workload:
    return language(lambda: Language(attention, feed, num_blocks=2), **changes)


class FourHeads(Attention):
    def cut(self, features: Tensor) -> Tensor:
        return features.view(*features.shape[:2], 4, -1)


class FourHeadsUnflatten(Attention):
    def cut(self, features: Tensor) -> Tensor:
        return features.unflatten(-1, (4, -1))


class FourHeadsOfScaled(Attention):
    def cut(self, features: Tensor) -> Tensor:
        return (features * 0.5).view(*features.shape[:2], 4, -1)


class Fused(nn.Module):
    """Query, key and value from one layer, taken apart in one way or another."""

    def __init__(self, take_apart: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.take_apart = take_apart
        self.fused, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, stream: Tensor) -> Tensor:
        query, key, value = self.take_apart(self.fused(stream))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(-2))


def _heads(*parts: Tensor) -> list[Tensor]:
    return [part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in parts]


def by_chunk(fused: Tensor) -> list[Tensor]:
    return _heads(*fused.chunk(3, -1))


def by_slices(fused: Tensor) -> list[Tensor]:
    third = fused.shape[-1] // 3
    return _heads(fused[..., :third], fused[..., third : 2 * third], fused[..., 2 * third :])


def three_first(fused: Tensor) -> Any:
    return fused.unflatten(-1, (3, -1, HEAD)).transpose(1, 3).unbind(2)


def heads_first(fused: Tensor) -> Any:
    """The order that survives a split by columns: all three of a head lie together."""
    return fused.unflatten(-1, (-1, 3, HEAD)).transpose(1, 2).unbind(3)


FUSED_PLAN = planned(
    ("blocks.*.attention.query", "blocks.*.attention.key", "blocks.*.attention.value"),
    **{"blocks__*__attention__fused": "colwise"},
)


def fused(take_apart: Callable[[Tensor], Any]) -> Workload:
    return small(lambda: Fused(take_apart), tensor_plan=FUSED_PLAN)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(24, WIDTH)

    def forward(self, stream: Tensor) -> Tensor:
        return self.down(F.glu(self.up(stream)))


class NormedHeads(Attention):
    """A norm inside each head, with a weight that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.RMSNorm(HEAD)

    def norm(self, heads: Tensor) -> Tensor:
        return self.scale(heads)


class NormedFromZero(NormedHeads):
    """The output layer starts at zero, as many do: in the first update the norm's gradient is zero everywhere."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)


class NormedFeatures(Attention):
    """A norm over all features, of which a rank has a part."""

    def parts(self, stream: Tensor) -> list[Tensor]:
        query, key, value = (layer(stream) for layer in (self.query, self.key, self.value))
        return _heads(F.rms_norm(query, query.shape[-1:]), F.rms_norm(key, key.shape[-1:]), value)


NORMED_PLAN = PLAN | {"blocks.*.attention.scale": "replicate_sum"}


class Perceptron(nn.Module):
    """Residual blocks of two linear layers with biases: (B, 5) -> (B, 2)."""

    def __init__(self, hidden: int = 8, num_blocks: int = 4) -> None:
        super().__init__()
        self.begin, self.end = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 2)
        self.layers = nn.ModuleList(Feed(hidden) for _ in range(num_blocks))

    def forward(self, values: Tensor) -> Tensor:
        stream = self.begin(values)
        for layer in self.layers:
            stream = stream + layer(stream)
        return self.end(stream)


class Residual(Feed):
    def forward(self, stream: Tensor) -> Tensor:
        return stream + super().forward(stream)


class Perceptrons(Perceptron):
    """The same, whose blocks add to the stream themselves."""

    def __init__(self, hidden: int = 8, num_blocks: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual(hidden) for _ in range(num_blocks))

    def forward(self, values: Tensor) -> Tensor:
        stream = self.begin(values)
        for layer in self.layers:
            stream = layer(stream)
        return self.end(stream)


PERCEPTRON_PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


def perceptron(model: Callable[[], nn.Module] = Perceptrons, optimizer: str = "sgd", **changes: Any) -> Workload:
    own = {"model": model, "blocks": "layers", "tensor_plan": PERCEPTRON_PLAN}
    return zoo.workload("frozen", optimizer, **{**own, **changes})


class Traits(Language):
    """Frozen and unused parameters, a parameter without dimensions, a buffer."""

    def __init__(self) -> None:
        super().__init__(num_blocks=2)
        self.places.requires_grad_(False)
        self.blocks[0].first.requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("offset", torch.full((12,), 0.25))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return super().forward(tokens, positions) * self.temperature + self.offset


def equal(ranks: Any, count: int, *cases: tuple[Workload, str]) -> None:
    found = outcomes(ranks, count, *cases)
    assert found == ["equal"] * len(cases), [
        (case[1], how) for case, how in zip(cases, found, strict=True) if how != "equal"
    ]


def test_tensor_is_exact(ranks: Any) -> None:
    """Biases, grouped queries, learned positions, norms inside heads, plans with and without `gather`, odd traits."""
    without_gather = planned(("blocks.*.attention", "blocks.*.feed"))
    equal(
        ranks,
        2,
        (language(), "tensor:sequence=true,recompute,accumulate=2"),
        (small(lambda: Attention(4, 2)), "tensor"),
        (small(tensor_plan=without_gather), "tensor:sequence=true"),
        (fused(heads_first), "tensor"),
        (small(NormedHeads, tensor_plan=NORMED_PLAN), "tensor:sequence=true"),
        (small(NormedFromZero, tensor_plan=NORMED_PLAN), "fsdp:tensor=2"),
        (language(Traits, "adamw"), "tensor"),
        (perceptron(Perceptron, "adamw"), "tensor"),
        (perceptron(tensor_plan={"begin": "colwise_gather", "end": "colwise_gather"}), "tensor"),
        (zoo.workload("norm", tensor_plan={"head": "colwise_gather"}), "tensor"),
    )


def test_shards_of_parts_of_uneven_size(ranks: Any) -> None:
    """Five rows on two shards, three features on two; replicas of them; a batch norm over the readers alone."""
    equal(
        ranks,
        4,
        (perceptron(lambda: Perceptrons(10), "adamw"), "fsdp:tensor=2"),
        (small(NormedHeads, lambda: Feed(10), tensor_plan=NORMED_PLAN), "fsdp:tensor=2,sequence=true"),
        (perceptron(lambda: Perceptrons(7)), "fsdp:replicate=2"),
        (perceptron(lambda: Perceptrons(7)), "pipeline:shard=2"),
        (language(Traits, "adamw"), "pipeline:shard=2"),
        (language(Traits, "adamw"), "fsdp:tensor=2"),
        (zoo.workload("norm", tensor_plan={"head": "colwise_gather"}, global_batch=8), "ddp:tensor=2"),
    )


MISFITS = {
    "view(B, T, 4, -1)": (small(FourHeads), ["query", "8 of its 16 features", "-1"]),
    "unflatten(-1, (4, -1))": (small(FourHeadsUnflatten), ["query", "8 of its 16 features", "-1"]),
    "a view of scaled features": (small(FourHeadsOfScaled), ["in parts", "-1"]),
    "chunk": (fused(by_chunk), ["fused", "colwise", "chunk"]),
    "slices": (fused(by_slices), ["fused", "colwise"]),
    "view(B, T, 3, -1, W)": (fused(three_first), ["fused", "colwise"]),
    "glu": (small(feed=Gated), ["up", "colwise"]),
    "one head of keys": (small(lambda: Attention(4, 1)), ["key", "2 of its 4 features"]),
    "norm of a head": (small(NormedHeads), ["blocks.0.attention.scale", "replicate_sum"]),
    "norm of a head, zero at first": (small(NormedFromZero), ["attention.scale", "replicate_sum"]),
    "norm of all features": (small(NormedFeatures), ["colwise"]),
    "hidden of 9": (perceptron(lambda: Perceptrons(9)), ["layers.0.up", "9 output features", "tensor=2"]),
    "unknown word": (perceptron(tensor_plan={"layers.*.up": "columnwise"}), ["'columnwise'", "did you mean colwise"]),
    "no such module": (perceptron(tensor_plan={"layer.*.up": "colwise"}), ["'layer.*.up'", "did you mean 'layers.*"]),
    "no linear layer": (perceptron(tensor_plan={"layers.*": "colwise"}), ["layers.0", "nn.Linear", "Residual"]),
    "no plan": (perceptron(tensor_plan=None), ["tensor_plan", "for example"]),
    "empty plan": (perceptron(tensor_plan={}), ["tensor_plan", "for example"]),
    "tied, one split": (
        zoo.workload("decoder", tensor_plan={**zoo.DECODER_PLAN, "embedding": "replicate"}),
        ["embedding and head share a weight", "vocabulary and colwise_gather or colwise_loss"],
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_plan_that_does_not_fit(ranks: Any, case: str) -> None:
    workload, fragments = MISFITS[case]
    refused(ranks, 2, workload, "tensor", *fragments)


def test_more_ranks_than_heads(ranks: Any) -> None:
    refused(ranks, 4, small(lambda: Attention(2, 2)), "tensor", "query", "2 of its 8 features")


def test_a_plan_that_does_not_fit_and_is_compiled(ranks: Any) -> None:
    """The compiler must not hide what is done with split features."""
    one_block = language(lambda: Language(FourHeads, num_blocks=1), steps=2, epochs=None)
    refused(ranks, 2, one_block, "tensor:compile", "number of heads -1")


# --- context: whatever looks from one position at another


class Placed(Language):
    """Positions that the model counts itself, in one way or another; those of the input have no weight."""

    def __init__(self, count: Callable[[Placed, Tensor], Tensor]) -> None:
        super().__init__(num_blocks=2)
        self.count = count
        generator = torch.Generator().manual_seed(5)
        self.register_buffer("table", torch.randn(1, 16, WIDTH, generator=generator))
        self.learned = nn.Parameter(torch.randn(16, WIDTH, generator=generator))

    def begin(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.embedding(tokens) + self.count(self, tokens) + 0.0 * (self.places(positions) + self.learned.sum())


def waves(positions: Tensor) -> Tensor:
    return torch.outer(positions, torch.linspace(-1.0, 1.0, WIDTH, dtype=positions.dtype))


COUNTED: dict[str, Callable[[Placed, Tensor], Tensor]] = {
    "arange": lambda model, tokens: model.places(torch.arange(tokens.shape[1])),
    "arange from 1": lambda model, tokens: model.learned[torch.arange(1, tokens.shape[1] + 1)],
    "real arange": lambda model, tokens: waves(torch.arange(tokens.shape[1], dtype=model.table.dtype)),
    "long arange, cut": lambda model, tokens: model.places(torch.arange(16)[: tokens.shape[1]]),
    "cumsum": lambda model, tokens: model.places(torch.ones_like(tokens).cumsum(1) - 1),
    "buffer": lambda model, tokens: model.table[:, : tokens.shape[1]],
    "buffer, narrow": lambda model, tokens: model.table.narrow(1, 0, tokens.shape[1]),
    "parameter": lambda model, tokens: model.learned[: tokens.shape[1]],
    "mean over positions": lambda model, tokens: model.embedding(tokens).mean(1, keepdim=True),
    "the token before": lambda model, tokens: F.pad(model.embedding(tokens)[:, :-1], (0, 0, 1, 0)),
    "convolution": lambda model, tokens: F.conv1d(
        model.embedding(tokens).transpose(1, 2),
        model.table[0, :WIDTH, None, :3].expand(WIDTH, 1, 3),
        None,
        1,
        1,
        1,
        WIDTH,
    ).transpose(1, 2),
}


def placed(how: str) -> Workload:
    return language(lambda: Placed(COUNTED[how]))


@pytest.mark.parametrize("layout", ["context", "fsdp:context=2"])
@pytest.mark.parametrize("how", COUNTED)
def test_a_model_that_counts_positions_itself(ranks: Any, how: str, layout: str) -> None:
    """A rank sees a part of the sequence, and would count from the beginning of that."""
    refused(ranks, 2, placed(how), layout, "position")


class OneHead(Attention):
    """Attention without a dimension for heads: (B, T, W)."""

    def __init__(self) -> None:
        super().__init__(1, 1)

    def forward(self, stream: Tensor) -> Tensor:
        parts = self.query(stream), self.key(stream), self.value(stream)
        return self.output(F.scaled_dot_product_attention(*parts, is_causal=True))


class Everywhere(Attention):
    """No mask at all, and a scale of its own."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key=key, value=value, scale=0.3)


class Masked(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen = torch.ones(query.shape[-2], query.shape[-2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(query, key, value, seen)


class Dropping(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=0.1, is_causal=True)


class ByHand(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.transpose(-1, -2)).softmax(-1) @ value


class Torchs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, stream: Tensor) -> Tensor:
        return self.attention(stream, stream, stream, need_weights=False)[0]


def test_context_is_exact(ranks: Any) -> None:
    """Grouped queries, no heads, no mask, odd traits; both ways round; in blocks that run again."""
    equal(
        ranks,
        2,
        (language(), "context:method=ulysses,recompute,accumulate=2"),
        (small(lambda: Attention(4, 2)), "context"),
        (small(lambda: Attention(4, 2)), "context:method=ulysses"),
        (small(lambda: Attention(4, 1)), "context"),
        (small(OneHead), "context"),
        (small(Everywhere), "context:recompute"),
        (small(Everywhere), "context:method=ulysses"),
        (language(Traits, "adamw"), "fsdp:context=2"),
        (language(Traits, "adamw"), "ddp:find_unused=true,context=2"),
    )


def test_unused_parameters_under_context(ranks: Any) -> None:
    """They are right, or what the line offers is."""
    [found] = outcomes(ranks, 2, (language(Traits, "adamw"), "context"))
    if found != "equal":
        assert "--layout context:find_unused=true" in found
        equal(ranks, 2, (language(Traits, "adamw"), "context:find_unused=true"))


def per_sample(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(output.mean(1), target, reduction="sum"), len(target)


def shifted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The target is the input, and the loss looks one position ahead."""
    return zoo.masked_loss(output[:, :-1], target[:, 1:])


class Classified(zoo.Passages):
    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        return super().__getitem__(index)[0], self.tokens[index, 8]


PER_SAMPLE = {
    "train_data": lambda: Classified(23),
    "eval_data": lambda: Classified(13),
    "loss": per_sample,
    "metrics": {},
}

UNFIT = {
    "mask": (small(Masked), "context", ["mask", "is_causal=True"]),
    "dropout": (small(Dropping), "context", ["dropout 0.1", "set it to 0"]),
    "by hand": (small(ByHand), "context", ["scaled_dot_product_attention"]),
    "nn.MultiheadAttention": (small(Torchs), "context", ["MultiheadAttention", "scaled_dot_product_attention"]),
    "loss of a sample": (small(**PER_SAMPLE), "context", ["target", "each position"]),
    "loss that looks ahead": (small(loss=shifted, metrics={}), "context", ["loss", "position"]),
    "no sequence_dim": (small(sequence_dim=None), "context", ["sequence_dim", "it is 1"]),
    "no such dimension": (small(sequence_dim=2), "context", ["sequence_dim=2"]),
    "odd heads": (small(lambda: Attention(4, 1)), "context:method=ulysses", ["1 heads", "context=2", "method=ring"]),
    "no heads": (small(OneHead), "context:method=ulysses", ["heads", "method=ring"]),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_model_that_context_cannot_split(ranks: Any, case: str) -> None:
    workload, layout, fragments = UNFIT[case]
    refused(ranks, 2, workload, layout, *fragments)


def test_a_sequence_that_the_ranks_do_not_divide(ranks: Any) -> None:
    """Eight positions are no six chunks."""
    for layout in ("context", "context:method=ulysses"):
        refused(ranks, 3, small(), layout, "sequence of 8", "6 chunks", "context=3")
    refused(ranks, 3, small(lambda: Attention(3, 3)), "tensor:sequence=true", "3")


# --- pipeline: what goes from block to block, and what does not


class FromStart(Language):
    """What went into the first block is added behind the last one."""

    def through(self, stream: Tensor) -> Tensor:
        return super().through(stream) + stream


class Prelude(Language):
    """A bias made of the embedding, that all blocks use: gradients come from several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.prelude = nn.Linear(WIDTH, WIDTH)

    def through(self, stream: Tensor) -> Tensor:
        bias = self.prelude(stream)
        for block in self.blocks:
            stream = block(stream, bias)
        return stream


class EachItsOwn(Language):
    """An argument for each block, from outside of it; given by keyword, with the stream first."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Parameter(torch.linspace(-1.0, 1.0, 4 * WIDTH).view(4, WIDTH))

    def through(self, stream: Tensor) -> Tensor:
        for block, own in zip(self.blocks, self.each, strict=True):
            stream = block(stream, own)
        return stream


class Shrinking(nn.Module):
    """Convolutions whose blocks change the shape of the activation: (B, 1, 6, 6) -> (B, 2)."""

    def __init__(self) -> None:
        super().__init__()
        widths = [1, 4, 6, 6, 8]
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(before, after, 3, stride, 1), nn.GroupNorm(2, after), nn.ReLU())
                for before, after, stride in zip(widths, widths[1:], (1, 2, 1, 2), strict=False)
            )
        )
        self.classes = nn.Linear(8, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.classes(self.blocks(images).mean((2, 3)))


class Images(zoo.Points):
    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.inputs = torch.randn(length, 1, 6, 6, generator=torch.Generator().manual_seed(2))


def shrinking() -> Workload:
    return perceptron(Shrinking, blocks="blocks", train_data=lambda: Images(23), eval_data=lambda: Images(13))


SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero-bubble"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("count", [2, 4])
def test_schedules_are_exact(ranks: Any, count: int, schedule: str) -> None:
    """Even and odd numbers of micro-batches, fewer than stages and more than samples, several times an update."""
    blocks = count if schedule != "interleaved" else 2 * count
    workload = perceptron(lambda: Perceptrons(6, max(blocks, 4)), "adamw")
    layouts = [f"pipeline:schedule={schedule},microbatches={number}" for number in (1, 3, 4, 5, 7, 8)]
    layouts.append(f"pipeline:schedule={schedule},microbatches=3,accumulate=2")
    layouts.append(f"pipeline:schedule={schedule},recompute")
    equal(ranks, count, *((workload, layout) for layout in layouts))


def test_pipeline_is_exact(ranks: Any) -> None:
    """Skips from the embedding, a prelude, arguments of each block's own, shapes that change, three chunks, traits."""
    equal(
        ranks,
        2,
        (language(FromStart), "pipeline:schedule=interleaved,recompute"),
        (language(Prelude), "pipeline:schedule=zero-bubble,recompute"),
        (language(Prelude, "adamw"), "pipeline:schedule=interleaved"),
        (language(EachItsOwn), "pipeline:schedule=zero-bubble"),
        (shrinking(), "pipeline:schedule=interleaved,microbatches=3"),
        (shrinking(), "pipeline:schedule=zero-bubble"),
        (perceptron(lambda: Perceptrons(8, 7)), "pipeline:schedule=interleaved,chunks=3"),
        (small(Torchs), "pipeline:schedule=zero-bubble"),
        (language(Traits, "adamw"), "pipeline"),
    )


class AllHidden(Language):
    """The head sees what every block returns, not only the last."""

    def through(self, stream: Tensor) -> Tensor:
        hidden: list[Tensor] = []
        for block in self.blocks:
            stream = block(stream)
            hidden.append(stream)
        return torch.stack(hidden).mean(0)


class FirstHidden(Language):
    """What the first block returns goes into all later ones."""

    def through(self, stream: Tensor) -> Tensor:
        first = stream = self.blocks[0](stream)
        for block in self.blocks[1:]:
            stream = block(stream, first)
        return stream


class Looped(Language):
    """The blocks twice in a row."""

    def through(self, stream: Tensor) -> Tensor:
        return super().through(super().through(stream))


class Speaking(Block):
    """Leaves a loss of its own in an attribute."""

    def __init__(self) -> None:
        super().__init__(Attention(), Feed())
        self.aside = torch.zeros(())

    def forward(self, stream: Tensor, *extra: Tensor) -> Tensor:
        output = super().forward(stream, *extra)
        self.aside = output.square().mean()
        return output


class Listening(Language):
    """Reads the attributes of all blocks, as for the balance of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Speaking() for _ in range(4))

    def through(self, stream: Tensor) -> Tensor:
        return super().through(stream) * (1.0 + sum(block.aside for block in self.blocks))


class Decayed(Language):
    """Uses the weights of all blocks outside of them."""

    def through(self, stream: Tensor) -> Tensor:
        return super().through(stream) * (1.0 + sum(weight.square().sum() for weight in self.blocks.parameters()))


class Between(Language):
    def through(self, stream: Tensor) -> Tensor:
        for block in self.blocks:
            stream = block(stream) * 0.9
        return stream


class InPlaceBetween(Language):
    def through(self, stream: Tensor) -> Tensor:
        for block in self.blocks:
            stream = block(stream).mul_(0.9)
        return stream


class SameBlock(Language):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[3] = self.blocks[0]


class TiedBlocks(Language):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].feed.up.weight = self.blocks[0].feed.up.weight


class TiedOutside(Language):
    def __init__(self) -> None:
        super().__init__()
        self.norm.weight = self.blocks[0].first.weight


UNCUT = {
    "all hidden states": (language(AllHidden), "pipeline", ["block"]),
    "the first hidden state": (language(FirstHidden), "pipeline", ["block"]),
    "blocks twice": (language(Looped), "pipeline", ["block"]),
    "attributes of blocks": (language(Listening), "pipeline", ["block"]),
    "weights of blocks": (language(Decayed), "pipeline", ["block"]),
    "computes between": (language(Between), "pipeline", ["between block 0 and block 1", "into a block"]),
    "computes in place": (language(InPlaceBetween), "pipeline", ["between block 0 and block 1"]),
    "one block twice": (language(SameBlock), "pipeline", ["blocks", "used again"]),
    "blocks share a weight": (language(TiedBlocks), "pipeline", ["blocks.0 and blocks.3", "untie them"]),
    "a weight outside": (language(TiedOutside), "pipeline", ["blocks.0", "outside blocks", "untie them"]),
    "batch norm": (zoo.workload("norm", global_batch=16), "pipeline", ["batch norm"]),
    "too few blocks": (small(), "pipeline:schedule=interleaved", ["4 stages", "2 blocks", "at most 2"]),
    "no blocks": (small(blocks=None), "pipeline", ['set blocks="layers"']),
    "wrong blocks": (small(blocks="layers"), "pipeline", ["blocks='layers'", "it has blocks"]),
}


@pytest.mark.parametrize("case", UNCUT)
def test_a_model_that_cannot_be_cut(ranks: Any, case: str) -> None:
    workload, layout, fragments = UNCUT[case]
    refused(ranks, 2, workload, layout, *fragments)


# --- on the command line: status 2 and one line, from all ranks, also where only one of them sees what is wrong


class Pair(Block):
    def forward(self, stream: Tensor, *extra: Tensor) -> Any:
        return super().forward(stream), None


class Pairs(Language):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair(Attention(), Feed()) for _ in range(4))

    def through(self, stream: Tensor) -> Tensor:
        for block in self.blocks:
            stream, _ = block(stream)
        return stream


class EverySecond(Language):
    def through(self, stream: Tensor) -> Tensor:
        for block in self.blocks[::2]:
            stream = block(stream)
        return stream


class LateEverySecond(EverySecond):
    """Rank 0 comes to the check when a rank that had failed it alone would have ended the run."""

    def through(self, stream: Tensor) -> Tensor:
        if dist.get_rank() == 0:
            time.sleep(5.0)
        return super().through(stream)


class NamedBlock(Block):
    def forward(self, extra: Tensor, stream: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(stream, extra)


class Named(Language):
    """The stream is not the first of the keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NamedBlock(Attention(), Feed()) for _ in range(4))

    def through(self, stream: Tensor) -> Tensor:
        extra = stream * 0.5
        for block in self.blocks:
            stream = block(extra=extra, stream=stream)
        return stream


def rowwise_alone() -> Workload:
    return perceptron(tensor_plan={"layers.*.down": "rowwise"})


def colwise_alone() -> Workload:
    return perceptron(tensor_plan={"layers.*.up": "colwise"})


def split_output() -> Workload:
    return perceptron(tensor_plan={"end": "colwise_loss"})


ON_ONE_RANK = {
    "tuples": ("language(Pairs)", "pipeline", ["block"]),
    "every second block": ("language(EverySecond)", "pipeline", ["through the blocks"]),
    "keywords": ("language(Named)", "pipeline", ["first argument"]),
    "rowwise alone": ("rowwise_alone()", "tensor", ["have to be colwise"]),
    "colwise alone": ("colwise_alone()", "tensor", ["RuntimeError"]),
    "a loss that takes no parts": ("split_output()", "tensor", ["RuntimeError"]),
}


def write(folder: Path, made: str) -> str:
    (folder / "mine.py").write_text(f"from integration.test_odd_models import *\nworkload = {made}\n")
    return "mine.py"


@pytest.mark.parametrize("case", ON_ONE_RANK)
def test_refused_on_the_command_line(cli: Cli, tmp_path: Path, case: str) -> None:
    """Every rank that sees it says one line and ends with status 2; nobody waits for the timeout; no traceback.

    A rank whose connection to one that has seen it breaks first ends with status 4, as no launcher is there to tell.
    """
    made, layout, fragments = ON_ONE_RANK[case]
    begin = time.monotonic()
    done = cli.on_ranks(tmp_path, "train", write(tmp_path, made), "--layout", layout, "--timeout", "40", size=2)
    assert time.monotonic() - begin < 35.0
    assert set(done.statuses) in ({2}, {2, 4}), done
    said = [(tmp_path / f"rank{rank}.err").read_text() for rank in range(2)]
    own = [[line for line in text.splitlines() if not line.startswith("full traceback: ")] for text in said]
    assert all(len(lines) == 1 for lines in own), said
    saw_it = [lines[0] for lines, status in zip(own, done.statuses, strict=True) if status == 2]
    assert any(all(fragment in line for fragment in fragments) for line in saw_it), said


def test_refused_from_the_launcher(tmp_path: Path) -> None:
    """What would be wrong on one stage alone is no failure of the run: all ranks see it, status 2, one line."""
    _, layout, fragments = ON_ONE_RANK["every second block"]
    words = [
        "train",
        write(tmp_path, "language(LateEverySecond)"),
        "--layout",
        layout,
        "--processes",
        "2",
        "--timeout",
        "40",
    ]
    path = {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "everyrank", *words]
    ran = subprocess.run(command, cwd=tmp_path, env=os.environ | path, capture_output=True, text=True, timeout=60)
    lines = [line for line in ran.stderr.splitlines() if not line.startswith("full traceback: ")]
    assert len(lines) == 1, ran.stderr
    assert fragments[0] in lines[0]
    assert ran.returncode == 2, ran.stderr


DECODER = 'zoo.workload("decoder", "adamw", predict=lambda output: output.argmax(-1))'


def test_trained_evaluated_predicted(cli: Cli, tmp_path: Path) -> None:
    """The same losses, metrics and rows as from one process, whichever layout trains and whichever predicts."""
    mine = write(tmp_path, DECODER)
    found: dict[str, tuple[list[float], dict[str, float], str]] = {}
    layouts = {"single": 1, "fsdp:tensor=2": 4, "context": 2, "pipeline:shard=2": 4, "pipeline:schedule=interleaved": 2}
    for layout, size in layouts.items():
        words = ("--layout", layout, "--json", "r.json", "--out", "run")
        done = cli.on_ranks(tmp_path, "train", mine, *words, "--steps", 4, size=size)
        assert done.status == 0, done
        [record] = read_records(tmp_path / "r.json")
        shutil.rmtree(tmp_path / "again", ignore_errors=True)
        (tmp_path / "run").rename(tmp_path / "again")
        done = cli.on_ranks(
            tmp_path, "predict", mine, "--layout", layout, "--resume", "again", "--out", "p.jsonl", size=size
        )
        assert done.status == 0, done
        rows = (tmp_path / "p.jsonl").read_text()
        assert len(rows.splitlines()) == 13
        found[layout] = record.loss, record.metrics, rows
        words = ("--evaluate", "--resume", "again", "--json", "e.json")
        assert cli.on_ranks(tmp_path, "train", mine, "--layout", layout, *words, size=size).status == 0
        [evaluated] = read_records(tmp_path / "e.json")
        assert evaluated.metrics == pytest.approx(record.metrics, rel=1e-5)
    losses, metrics, rows = found.pop("single")
    for layout, (other_losses, other_metrics, other_rows) in found.items():
        assert other_losses == pytest.approx(losses, rel=1e-5), layout
        assert other_metrics["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-5), layout
        assert other_metrics["guessed"] == metrics["guessed"], layout
        assert other_rows == rows, layout


def test_the_built_in_text_on_four_ranks(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("to be, or not to be: that is the question\n" * 500)  # its tenth is evaluated
    words = ("--data", "few.txt", "--steps", 4, "--set", "batch=4", "--layout", "fsdp:tensor=2", "--json", "r.json")
    done = cli.on_ranks(tmp_path, "train", "text", *words, "--evaluate-every", 0, size=4)
    assert done.status == 0, done
    [record] = read_records(tmp_path / "r.json")
    assert len(record.loss) == 4
    assert record.world_size == 4


@pytest.mark.parametrize(
    ("size", "layouts"),
    [
        (2, ["tensor", "context", "pipeline"]),
        (4, ["ddp:tensor=2", "fsdp:context=2", "pipeline:replicate=2", "fsdp:replicate=2"]),
    ],
)
def test_verify_audits_the_samples(cli: Cli, tmp_path: Path, size: int, layouts: list[str]) -> None:
    """Ranks that compute on the same samples all read them; those that do not read each once."""
    words = ("--layout", *layouts, "--steps", 3, "--quick", "--samples", "--json", "v.json")
    done = cli.on_ranks(tmp_path, "verify", write(tmp_path, DECODER), *words, size=size)
    assert done.status == 0, done
    for record in read_records(tmp_path / "v.json"):
        assert record.parity.status == "equal"
        assert any("23 samples, each read once" in check for check in record.parity.checks), record.parity.checks


@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_optimizers_of_many_tensors_at_once(ranks: Any, how: str) -> None:
    """Split and whole parameters lie in one group of the optimizer, which torch's kernels for many would refuse."""
    workload = dataclasses.replace(
        zoo.workload("decoder"),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, **{how: True}),
    )
    layouts = ("tensor", "fsdp:tensor=2", "pipeline")
    assert outcomes(ranks, 2, *((workload, text) for text in layouts)) == ["equal"] * len(layouts)
