"""User models under tensor, context and pipeline layouts: equivalent to one device, or refused in one line.

A training that runs but is not equivalent would be a silent bug.
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


# --- a language model whose parts users write in different ways


class Attention(nn.Module):
    """Causal attention with biases. Subclasses change, for example, how features are split into heads."""

    def __init__(self, heads: int = 4, kv_heads: int = 4) -> None:
        super().__init__()
        self.is_grouped = heads != kv_heads
        self.query = nn.Linear(WIDTH, heads * HEAD)
        self.key = nn.Linear(WIDTH, kv_heads * HEAD)
        self.value = nn.Linear(WIDTH, kv_heads * HEAD)
        self.output = nn.Linear(heads * HEAD, WIDTH)

    def split_heads(self, features: Tensor) -> Tensor:
        return features.unflatten(-1, (-1, HEAD))

    def normalize(self, heads: Tensor) -> Tensor:
        return heads

    def project(self, stream: Tensor) -> list[Tensor]:
        query, key, value = (
            self.split_heads(layer(stream)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        return [self.normalize(query), self.normalize(key), value]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.is_grouped)

    def forward(self, stream: Tensor) -> Tensor:
        return self.output(self.attend(*self.project(stream)).transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, hidden: int = 24) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, stream: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(stream)))


class Block(nn.Module):
    def __init__(self, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.feed_forward = attention, feed_forward

    def forward(self, stream: Tensor, *extra: Tensor) -> Tensor:
        for value in extra:
            stream = stream + value
        stream = stream + self.attention(self.first(stream))
        return stream + self.feed_forward(self.second(stream))


class Language(nn.Module):
    """A decoder with learned positions, (B, T), (B, T) -> (B, T, 12). The input contains the positions."""

    def __init__(
        self,
        attention: Callable[[], nn.Module] = Attention,
        feed_forward: Callable[[], nn.Module] = FeedForward,
        num_blocks: int = 4,
    ) -> None:
        super().__init__()
        self.embedding, self.position_embedding = nn.Embedding(12, WIDTH), nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList(Block(attention(), feed_forward()) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.embedding(tokens) + self.position_embedding(positions)

    def run_blocks(self, stream: Tensor) -> Tensor:
        for block in self.blocks:
            stream = block(stream)
        return stream

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.head(self.norm(self.run_blocks(self.embed(tokens, positions))))


PLAN = {
    "embedding": "vocabulary",
    "position_embedding": "vocabulary",
    "blocks.*.first": "sequence",
    "blocks.*.attention": "gather",
    "blocks.*.attention.query": "colwise",
    "blocks.*.attention.key": "colwise",
    "blocks.*.attention.value": "colwise",
    "blocks.*.attention.output": "rowwise",
    "blocks.*.second": "sequence",
    "blocks.*.feed_forward": "gather",
    "blocks.*.feed_forward.up": "colwise",
    "blocks.*.feed_forward.down": "rowwise",
    "norm": "sequence",
    "head": "colwise_gather",
}


def language_workload(model: Callable[[], nn.Module] = Language, optimizer: str = "sgd", **changes: Any) -> Workload:
    return zoo.workload("decoder", optimizer, **{"model": model, "tensor_plan": PLAN, **changes})


def outcomes(ranks: Any, count: int, *cases: tuple[Workload, str]) -> list[str]:
    """Return `equal`, `different: ...` or `refused: ...` for each case. All ranks must have the same outcome."""
    rows = ranks(count, _outcomes, f"odd/{next(_COUNTER)}", cases)
    assert all(row == rows[0] for row in rows), rows
    return rows[0]


def _outcomes(world: World, key: str, cases: list[tuple[Workload, str]]) -> list[str]:
    return [_outcome(world, f"{key}/{index}", *case) for index, case in enumerate(cases)]


def _outcome(world: World, key: str, workload: Workload, layout: str) -> str:
    separator = "," if ":" in layout else ":"
    precision = "" if "precision" in layout else f"{separator}precision=float64"
    try:
        case = parity_case(workload, *open_data(workload, world), steps=4)
        parity, _ = check_layout(case, parse_layout(layout + precision), world, key)
    except EveryrankError as error:
        is_refusal = error.exit_status == 2 and "\n" not in str(error)
        return f"{'refused' if is_refusal else f'ended with {error.exit_status}'}: {error}"
    if parity.status == "refused":
        return f"refused: {parity.reason}"
    if parity.status == "equal":
        assert parity.max_relative_difference is not None
        assert parity.max_relative_difference <= 1e-10
        return "equal"
    return f"different: {parity.first_divergence} {parity.max_relative_difference} {parity.cause}"


def assert_refused(ranks: Any, count: int, workload: Workload, layout: str, *fragments: str) -> None:
    """Assert that the layout is refused in one line that contains the fragments: the value, the rule and the fix."""
    [outcome] = outcomes(ranks, count, (workload, layout))
    assert outcome.startswith("refused: "), outcome
    for fragment in fragments:
        assert fragment in outcome


# --- tensor: operations on split features


def plan_without(*modules: str) -> dict[str, str]:
    """Return PLAN without the entries of some modules."""
    return {module: style for module, style in PLAN.items() if module not in modules}


def small_language(
    attention: Callable[[], nn.Module] = Attention, feed_forward: Callable[[], nn.Module] = FeedForward, **changes: Any
) -> Workload:
    return language_workload(lambda: Language(attention, feed_forward, num_blocks=2), **changes)


class FourHeads(Attention):
    def split_heads(self, features: Tensor) -> Tensor:
        return features.view(*features.shape[:2], 4, -1)


class FourHeadsUnflatten(Attention):
    def split_heads(self, features: Tensor) -> Tensor:
        return features.unflatten(-1, (4, -1))


class FourHeadsOfScaled(Attention):
    def split_heads(self, features: Tensor) -> Tensor:
        return (features * 0.5).view(*features.shape[:2], 4, -1)


class Fused(nn.Module):
    """Attention with one layer for query, key and value, whose output `split_qkv` splits."""

    def __init__(self, split_qkv: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.split_qkv = split_qkv
        self.fused, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, stream: Tensor) -> Tensor:
        query, key, value = self.split_qkv(self.fused(stream))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(attended.transpose(1, 2).flatten(-2))


def _heads(*features: Tensor) -> list[Tensor]:
    return [tensor.unflatten(-1, (-1, HEAD)).transpose(1, 2) for tensor in features]


def by_chunk(fused: Tensor) -> list[Tensor]:
    return _heads(*fused.chunk(3, -1))


def by_slices(fused: Tensor) -> list[Tensor]:
    third = fused.shape[-1] // 3
    return _heads(fused[..., :third], fused[..., third : 2 * third], fused[..., 2 * third :])


def three_first(fused: Tensor) -> Any:
    return fused.unflatten(-1, (3, -1, HEAD)).transpose(1, 3).unbind(2)


def heads_first(fused: Tensor) -> Any:
    """Return query, key and value; those of a head are adjacent, so the layer can be split by columns."""
    return fused.unflatten(-1, (-1, 3, HEAD)).transpose(1, 2).unbind(3)


FUSED_PLAN = plan_without("blocks.*.attention.query", "blocks.*.attention.key", "blocks.*.attention.value") | {
    "blocks.*.attention.fused": "colwise"
}


def fused_workload(split_qkv: Callable[[Tensor], Any]) -> Workload:
    return small_language(lambda: Fused(split_qkv), tensor_plan=FUSED_PLAN)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(24, WIDTH)

    def forward(self, stream: Tensor) -> Tensor:
        return self.down(F.glu(self.up(stream)))


class NormedHeads(Attention):
    """Attention with a norm of each head. All heads share its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.RMSNorm(HEAD)

    def normalize(self, heads: Tensor) -> Tensor:
        return self.scale(heads)


class NormedFromZero(NormedHeads):
    """The same with an output layer that is zero at first, so the gradient of the norm is zero in the first update."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)


class NormedFeatures(Attention):
    """Attention with a norm over all features. A tensor rank has only some of them."""

    def project(self, stream: Tensor) -> list[Tensor]:
        query, key, value = (layer(stream) for layer in (self.query, self.key, self.value))
        return _heads(F.rms_norm(query, query.shape[-1:]), F.rms_norm(key, key.shape[-1:]), value)


NORMED_PLAN = PLAN | {"blocks.*.attention.scale": "replicate_sum"}


class Perceptron(nn.Module):
    """Residual blocks of two linear layers with biases, (B, 5) -> (B, 2)."""

    def __init__(self, hidden: int = 8, num_blocks: int = 4) -> None:
        super().__init__()
        self.begin, self.end = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 2)
        self.layers = nn.ModuleList(FeedForward(hidden) for _ in range(num_blocks))

    def forward(self, values: Tensor) -> Tensor:
        stream = self.begin(values)
        for layer in self.layers:
            stream = stream + layer(stream)
        return self.end(stream)


class Residual(FeedForward):
    def forward(self, stream: Tensor) -> Tensor:
        return stream + super().forward(stream)


class ResidualPerceptron(Perceptron):
    """The same, but the residual connection is inside of the blocks."""

    def __init__(self, hidden: int = 8, num_blocks: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual(hidden) for _ in range(num_blocks))

    def forward(self, values: Tensor) -> Tensor:
        stream = self.begin(values)
        for layer in self.layers:
            stream = layer(stream)
        return self.end(stream)


PERCEPTRON_PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


def perceptron_workload(
    model: Callable[[], nn.Module] = ResidualPerceptron, optimizer: str = "sgd", **changes: Any
) -> Workload:
    defaults = {"model": model, "blocks": "layers", "tensor_plan": PERCEPTRON_PLAN}
    return zoo.workload("frozen", optimizer, **{**defaults, **changes})


class UnusualParameters(Language):
    """A decoder with frozen parameters, unused parameters, a scalar parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__(num_blocks=2)
        self.position_embedding.requires_grad_(False)
        self.blocks[0].first.requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("offset", torch.full((12,), 0.25))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return super().forward(tokens, positions) * self.temperature + self.offset


def assert_equal(ranks: Any, count: int, *cases: tuple[Workload, str]) -> None:
    results = outcomes(ranks, count, *cases)
    assert results == ["equal"] * len(cases), [
        (layout, result) for (_, layout), result in zip(cases, results, strict=True) if result != "equal"
    ]


def test_tensor_layouts_are_equivalent(ranks: Any) -> None:
    """With biases, grouped queries, learned positions, norms of heads, and plans with and without `gather`."""
    without_gather = plan_without("blocks.*.attention", "blocks.*.feed_forward")
    assert_equal(
        ranks,
        2,
        (language_workload(), "tensor:sequence=true,recompute,accumulate=2"),
        (small_language(lambda: Attention(4, 2)), "tensor"),
        (small_language(tensor_plan=without_gather), "tensor:sequence=true"),
        (fused_workload(heads_first), "tensor"),
        (small_language(NormedHeads, tensor_plan=NORMED_PLAN), "tensor:sequence=true"),
        (small_language(NormedFromZero, tensor_plan=NORMED_PLAN), "fsdp:tensor=2"),
        (language_workload(UnusualParameters, "adamw"), "tensor"),
        (perceptron_workload(Perceptron, "adamw"), "tensor"),
        (perceptron_workload(tensor_plan={"begin": "colwise_gather", "end": "colwise_gather"}), "tensor"),
        (zoo.workload("norm", tensor_plan={"head": "colwise_gather"}), "tensor"),
    )


def test_uneven_shards_are_equivalent(ranks: Any) -> None:
    """Two shards have five rows or three features. Batch norm uses only the ranks with different samples."""
    assert_equal(
        ranks,
        4,
        (perceptron_workload(lambda: ResidualPerceptron(10), "adamw"), "fsdp:tensor=2"),
        (small_language(NormedHeads, lambda: FeedForward(10), tensor_plan=NORMED_PLAN), "fsdp:tensor=2,sequence=true"),
        (perceptron_workload(lambda: ResidualPerceptron(7)), "fsdp:replicate=2"),
        (perceptron_workload(lambda: ResidualPerceptron(7)), "pipeline:shard=2"),
        (language_workload(UnusualParameters, "adamw"), "pipeline:shard=2"),
        (language_workload(UnusualParameters, "adamw"), "fsdp:tensor=2"),
        (zoo.workload("norm", tensor_plan={"head": "colwise_gather"}, global_batch=8), "ddp:tensor=2"),
    )


UNFIT_PLANS = {
    "view(B, T, 4, -1)": (small_language(FourHeads), ["query", "8 of its 16 features", "-1"]),
    "unflatten(-1, (4, -1))": (small_language(FourHeadsUnflatten), ["query", "8 of its 16 features", "-1"]),
    "a view of scaled features": (small_language(FourHeadsOfScaled), ["in parts", "-1"]),
    "chunk": (fused_workload(by_chunk), ["fused", "colwise", "chunk"]),
    "slices": (fused_workload(by_slices), ["fused", "colwise"]),
    "view(B, T, 3, -1, W)": (fused_workload(three_first), ["fused", "colwise"]),
    "glu": (small_language(feed_forward=Gated), ["up", "colwise"]),
    "one head of keys": (small_language(lambda: Attention(4, 1)), ["key", "2 of its 4 features"]),
    "norm of a head": (small_language(NormedHeads), ["blocks.0.attention.scale", "replicate_sum"]),
    "norm of a head, zero at first": (small_language(NormedFromZero), ["attention.scale", "replicate_sum"]),
    "norm of all features": (small_language(NormedFeatures), ["colwise"]),
    "hidden of 9": (
        perceptron_workload(lambda: ResidualPerceptron(9)),
        ["layers.0.up", "9 output features", "tensor=2"],
    ),
    "unknown word": (
        perceptron_workload(tensor_plan={"layers.*.up": "columnwise"}),
        ["'columnwise'", "did you mean colwise"],
    ),
    "no such module": (
        perceptron_workload(tensor_plan={"layer.*.up": "colwise"}),
        ["'layer.*.up'", "did you mean 'layers.*"],
    ),
    "no linear layer": (
        perceptron_workload(tensor_plan={"layers.*": "colwise"}),
        ["layers.0", "nn.Linear", "Residual"],
    ),
    "no plan": (perceptron_workload(tensor_plan=None), ["tensor_plan", "for example"]),
    "empty plan": (perceptron_workload(tensor_plan={}), ["tensor_plan", "for example"]),
    "tied, one split": (
        zoo.workload("decoder", tensor_plan={**zoo.DECODER_PLAN, "embedding": "replicate"}),
        ["embedding and head share a weight", "vocabulary and colwise_gather or colwise_loss"],
    ),
}


@pytest.mark.parametrize("case", UNFIT_PLANS)
def test_refuses_a_tensor_plan_that_does_not_fit_the_model(ranks: Any, case: str) -> None:
    workload, fragments = UNFIT_PLANS[case]
    assert_refused(ranks, 2, workload, "tensor", *fragments)


def test_tensor_refuses_more_ranks_than_heads(ranks: Any) -> None:
    assert_refused(ranks, 4, small_language(lambda: Attention(2, 2)), "tensor", "query", "2 of its 8 features")


def test_refuses_a_tensor_plan_that_does_not_fit_a_compiled_model(ranks: Any) -> None:
    """The compiler must not hide the operations on split features."""
    one_block = language_workload(lambda: Language(FourHeads, num_blocks=1), steps=2, epochs=None)
    assert_refused(ranks, 2, one_block, "tensor:compile", "number of heads -1")


# --- context: operations that use several positions


class ComputedPositions(Language):
    """A decoder that computes positions with `count`. The positions of the input are multiplied by zero."""

    def __init__(self, count: Callable[[ComputedPositions, Tensor], Tensor]) -> None:
        super().__init__(num_blocks=2)
        self.count = count
        generator = torch.Generator().manual_seed(5)
        self.register_buffer("table", torch.randn(1, 16, WIDTH, generator=generator))
        self.learned = nn.Parameter(torch.randn(16, WIDTH, generator=generator))

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return (
            self.embedding(tokens)
            + self.count(self, tokens)
            + 0.0 * (self.position_embedding(positions) + self.learned.sum())
        )


def waves(positions: Tensor) -> Tensor:
    return torch.outer(positions, torch.linspace(-1.0, 1.0, WIDTH, dtype=positions.dtype))


POSITION_COUNTS: dict[str, Callable[[ComputedPositions, Tensor], Tensor]] = {
    "arange": lambda model, tokens: model.position_embedding(torch.arange(tokens.shape[1])),
    "arange from 1": lambda model, tokens: model.learned[torch.arange(1, tokens.shape[1] + 1)],
    "real arange": lambda model, tokens: waves(torch.arange(tokens.shape[1], dtype=model.table.dtype)),
    "long arange, cut": lambda model, tokens: model.position_embedding(torch.arange(16)[: tokens.shape[1]]),
    "cumsum": lambda model, tokens: model.position_embedding(torch.ones_like(tokens).cumsum(1) - 1),
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


@pytest.mark.parametrize("layout", ["context", "fsdp:context=2"])
@pytest.mark.parametrize("way", POSITION_COUNTS)
def test_context_refuses_a_model_that_computes_positions(ranks: Any, way: str, layout: str) -> None:
    """A rank has a chunk of the sequence, and would count from the start of the chunk."""
    assert_refused(ranks, 2, language_workload(lambda: ComputedPositions(POSITION_COUNTS[way])), layout, "position")


class OneHead(Attention):
    """Attention without a dimension for heads, (B, T, W)."""

    def __init__(self) -> None:
        super().__init__(1, 1)

    def forward(self, stream: Tensor) -> Tensor:
        query, key, value = self.query(stream), self.key(stream), self.value(stream)
        return self.output(F.scaled_dot_product_attention(query, key, value, is_causal=True))


class WithoutMask(Attention):
    """Attention without a mask and with a different scale."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key=key, value=value, scale=0.3)


class WithMask(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = torch.ones(query.shape[-2], query.shape[-2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(query, key, value, mask)


class WithDropout(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=0.1, is_causal=True)


class ByHand(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.transpose(-1, -2)).softmax(-1) @ value


class TorchAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, stream: Tensor) -> Tensor:
        return self.attention(stream, stream, stream, need_weights=False)[0]


def test_context_layouts_are_equivalent(ranks: Any) -> None:
    """With grouped queries, without heads or a mask, with both methods, and with activation checkpointing."""
    assert_equal(
        ranks,
        2,
        (language_workload(), "context:method=ulysses,recompute,accumulate=2"),
        (small_language(lambda: Attention(4, 2)), "context"),
        (small_language(lambda: Attention(4, 2)), "context:method=ulysses"),
        (small_language(lambda: Attention(4, 1)), "context"),
        (small_language(OneHead), "context"),
        (small_language(WithoutMask), "context:recompute"),
        (small_language(WithoutMask), "context:method=ulysses"),
        (language_workload(UnusualParameters, "adamw"), "fsdp:context=2"),
        (language_workload(UnusualParameters, "adamw"), "ddp:find_unused=true,context=2"),
    )


def test_unused_parameters_under_context(ranks: Any) -> None:
    """The layout is equivalent, or the layout that the error message suggests is."""
    [outcome] = outcomes(ranks, 2, (language_workload(UnusualParameters, "adamw"), "context"))
    if outcome != "equal":
        assert "--layout context:find_unused=true" in outcome
        assert_equal(ranks, 2, (language_workload(UnusualParameters, "adamw"), "context:find_unused=true"))


def per_sample(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(output.mean(1), target, reduction="sum"), len(target)


def shifted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return a loss that compares each output with the target of the next position."""
    return zoo.masked_loss(output[:, :-1], target[:, 1:])


class Classified(zoo.SentencesWithPositions):
    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        return super().__getitem__(index)[0], self.tokens[index, 8]


PER_SAMPLE = {
    "train_data": lambda: Classified(23),
    "eval_data": lambda: Classified(13),
    "loss": per_sample,
    "metrics": {},
}

CONTEXT_REFUSES = {
    "mask": (small_language(WithMask), "context", ["mask", "is_causal=True"]),
    "dropout": (small_language(WithDropout), "context", ["dropout 0.1", "set it to 0"]),
    "by hand": (small_language(ByHand), "context", ["scaled_dot_product_attention"]),
    "nn.MultiheadAttention": (
        small_language(TorchAttention),
        "context",
        ["MultiheadAttention", "scaled_dot_product_attention"],
    ),
    "loss of a sample": (small_language(**PER_SAMPLE), "context", ["target", "each position"]),
    "loss that looks ahead": (small_language(loss=shifted, metrics={}), "context", ["loss", "position"]),
    "no sequence_dim": (small_language(sequence_dim=None), "context", ["sequence_dim", "it is 1"]),
    "no such dimension": (small_language(sequence_dim=2), "context", ["sequence_dim=2"]),
    "odd heads": (
        small_language(lambda: Attention(4, 1)),
        "context:method=ulysses",
        ["1 heads", "context=2", "method=ring"],
    ),
    "no heads": (small_language(OneHead), "context:method=ulysses", ["heads", "method=ring"]),
}


@pytest.mark.parametrize("case", CONTEXT_REFUSES)
def test_context_refuses_a_model_that_it_cannot_split(ranks: Any, case: str) -> None:
    workload, layout, fragments = CONTEXT_REFUSES[case]
    assert_refused(ranks, 2, workload, layout, *fragments)


def test_refuses_a_sequence_length_that_the_ranks_do_not_divide(ranks: Any) -> None:
    """Eight positions cannot be split into six chunks."""
    for layout in ("context", "context:method=ulysses"):
        assert_refused(ranks, 3, small_language(), layout, "sequence of 8", "6 chunks", "context=3")
    assert_refused(ranks, 3, small_language(lambda: Attention(3, 3)), "tensor:sequence=true", "3")


# --- pipeline: values that are passed between blocks


class SkipConnection(Language):
    """A decoder that adds the input of the first block to the output of the last one."""

    def run_blocks(self, stream: Tensor) -> Tensor:
        return super().run_blocks(stream) + stream


class SharedBias(Language):
    """A decoder whose blocks share a bias computed from the embedding, so its gradients come from several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.shared_bias = nn.Linear(WIDTH, WIDTH)

    def run_blocks(self, stream: Tensor) -> Tensor:
        bias = self.shared_bias(stream)
        for block in self.blocks:
            stream = block(stream, bias)
        return stream


class BlockBiases(Language):
    """A decoder that passes a different parameter to each block."""

    def __init__(self) -> None:
        super().__init__()
        self.biases = nn.Parameter(torch.linspace(-1.0, 1.0, 4 * WIDTH).view(4, WIDTH))

    def run_blocks(self, stream: Tensor) -> Tensor:
        for block, bias in zip(self.blocks, self.biases, strict=True):
            stream = block(stream, bias)
        return stream


class ShrinkingConvolutions(nn.Module):
    """Convolutions whose blocks change the shape of the activation, (B, 1, 6, 6) -> (B, 2)."""

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


def convolution_workload() -> Workload:
    return perceptron_workload(
        ShrinkingConvolutions, blocks="blocks", train_data=lambda: Images(23), eval_data=lambda: Images(13)
    )


SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero-bubble"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("count", [2, 4])
def test_pipeline_schedules_are_equivalent(ranks: Any, count: int, schedule: str) -> None:
    """With fewer micro-batches than stages, with more than samples, and with gradient accumulation."""
    num_blocks = count if schedule != "interleaved" else 2 * count
    workload = perceptron_workload(lambda: ResidualPerceptron(6, max(num_blocks, 4)), "adamw")
    layouts = [f"pipeline:schedule={schedule},microbatches={number}" for number in (1, 3, 4, 5, 7, 8)]
    layouts.append(f"pipeline:schedule={schedule},microbatches=3,accumulate=2")
    layouts.append(f"pipeline:schedule={schedule},recompute")
    assert_equal(ranks, count, *((workload, layout) for layout in layouts))


def test_pipeline_layouts_are_equivalent(ranks: Any) -> None:
    """With a skip connection, arguments of blocks, activations of different shapes, and three chunks per rank."""
    assert_equal(
        ranks,
        2,
        (language_workload(SkipConnection), "pipeline:schedule=interleaved,recompute"),
        (language_workload(SharedBias), "pipeline:schedule=zero-bubble,recompute"),
        (language_workload(SharedBias, "adamw"), "pipeline:schedule=interleaved"),
        (language_workload(BlockBiases), "pipeline:schedule=zero-bubble"),
        (convolution_workload(), "pipeline:schedule=interleaved,microbatches=3"),
        (convolution_workload(), "pipeline:schedule=zero-bubble"),
        (perceptron_workload(lambda: ResidualPerceptron(8, 7)), "pipeline:schedule=interleaved,chunks=3"),
        (small_language(TorchAttention), "pipeline:schedule=zero-bubble"),
        (language_workload(UnusualParameters, "adamw"), "pipeline"),
    )


class AllHidden(Language):
    """A decoder whose head uses the outputs of all blocks."""

    def run_blocks(self, stream: Tensor) -> Tensor:
        hidden: list[Tensor] = []
        for block in self.blocks:
            stream = block(stream)
            hidden.append(stream)
        return torch.stack(hidden).mean(0)


class FirstHidden(Language):
    """A decoder that passes the output of the first block to all later blocks."""

    def run_blocks(self, stream: Tensor) -> Tensor:
        first = stream = self.blocks[0](stream)
        for block in self.blocks[1:]:
            stream = block(stream, first)
        return stream


class Looped(Language):
    """A decoder that runs its blocks twice."""

    def run_blocks(self, stream: Tensor) -> Tensor:
        return super().run_blocks(super().run_blocks(stream))


class AuxiliaryLossBlock(Block):
    """A block that stores an auxiliary loss in an attribute."""

    def __init__(self) -> None:
        super().__init__(Attention(), FeedForward())
        self.auxiliary_loss = torch.zeros(())

    def forward(self, stream: Tensor, *extra: Tensor) -> Tensor:
        output = super().forward(stream, *extra)
        self.auxiliary_loss = output.square().mean()
        return output


class AuxiliaryLoss(Language):
    """A decoder that reads the auxiliary losses of all blocks, as load balancing of experts does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AuxiliaryLossBlock() for _ in range(4))

    def run_blocks(self, stream: Tensor) -> Tensor:
        return super().run_blocks(stream) * (1.0 + sum(block.auxiliary_loss for block in self.blocks))


class UsesBlockWeights(Language):
    """A decoder that uses the weights of all blocks outside of them."""

    def run_blocks(self, stream: Tensor) -> Tensor:
        return super().run_blocks(stream) * (1.0 + sum(weight.square().sum() for weight in self.blocks.parameters()))


class ComputesBetween(Language):
    def run_blocks(self, stream: Tensor) -> Tensor:
        for block in self.blocks:
            stream = block(stream) * 0.9
        return stream


class ComputesInPlaceBetween(Language):
    def run_blocks(self, stream: Tensor) -> Tensor:
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
        self.blocks[3].feed_forward.up.weight = self.blocks[0].feed_forward.up.weight


class TiedOutside(Language):
    def __init__(self) -> None:
        super().__init__()
        self.norm.weight = self.blocks[0].first.weight


PIPELINE_REFUSES = {
    "all hidden states": (language_workload(AllHidden), "pipeline", ["block"]),
    "the first hidden state": (language_workload(FirstHidden), "pipeline", ["block"]),
    "blocks twice": (language_workload(Looped), "pipeline", ["block"]),
    "attributes of blocks": (language_workload(AuxiliaryLoss), "pipeline", ["block"]),
    "weights of blocks": (language_workload(UsesBlockWeights), "pipeline", ["block"]),
    "computes between": (
        language_workload(ComputesBetween),
        "pipeline",
        ["between block 0 and block 1", "into a block"],
    ),
    "computes in place": (language_workload(ComputesInPlaceBetween), "pipeline", ["between block 0 and block 1"]),
    "one block twice": (language_workload(SameBlock), "pipeline", ["blocks", "the same module"]),
    "blocks share a weight": (language_workload(TiedBlocks), "pipeline", ["blocks.0 and blocks.3", "Untie"]),
    "a weight outside": (language_workload(TiedOutside), "pipeline", ["blocks.0", "outside blocks", "Untie"]),
    "batch norm": (zoo.workload("norm", global_batch=16), "pipeline", ["batch norm"]),
    "too few blocks": (small_language(), "pipeline:schedule=interleaved", ["4 stages", "2 blocks", "at most 2"]),
    "no blocks": (small_language(blocks=None), "pipeline", ['blocks="layers"']),
    "wrong blocks": (small_language(blocks="layers"), "pipeline", ["blocks='layers'", "it has blocks"]),
}


@pytest.mark.parametrize("case", PIPELINE_REFUSES)
def test_pipeline_refuses_a_model_that_it_cannot_split(ranks: Any, case: str) -> None:
    workload, layout, fragments = PIPELINE_REFUSES[case]
    assert_refused(ranks, 2, workload, layout, *fragments)


# --- command line: all ranks print one line and exit with 2, even if only one of them detects the error


class TupleBlock(Block):
    def forward(self, stream: Tensor, *extra: Tensor) -> Any:
        return super().forward(stream), None


class TupleBlocks(Language):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TupleBlock(Attention(), FeedForward()) for _ in range(4))

    def run_blocks(self, stream: Tensor) -> Tensor:
        for block in self.blocks:
            stream, _ = block(stream)
        return stream


class EverySecond(Language):
    def run_blocks(self, stream: Tensor) -> Tensor:
        for block in self.blocks[::2]:
            stream = block(stream)
        return stream


class SlowEverySecond(EverySecond):
    """The same with a slow rank 0. A rank that fails alone would end the run before rank 0 reaches the check."""

    def run_blocks(self, stream: Tensor) -> Tensor:
        if dist.get_rank() == 0:
            time.sleep(5.0)
        return super().run_blocks(stream)


class KeywordBlock(Block):
    def forward(self, extra: Tensor, stream: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(stream, extra)


class KeywordStream(Language):
    """A decoder that passes the stream as the second keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KeywordBlock(Attention(), FeedForward()) for _ in range(4))

    def run_blocks(self, stream: Tensor) -> Tensor:
        extra = stream * 0.5
        for block in self.blocks:
            stream = block(extra=extra, stream=stream)
        return stream


def rowwise_alone() -> Workload:
    return perceptron_workload(tensor_plan={"layers.*.down": "rowwise"})


def colwise_alone() -> Workload:
    return perceptron_workload(tensor_plan={"layers.*.up": "colwise"})


def split_output() -> Workload:
    return perceptron_workload(tensor_plan={"end": "colwise_loss"})


ON_ONE_RANK = {
    "tuples": ("language_workload(TupleBlocks)", "pipeline", ["block"]),
    "every second block": ("language_workload(EverySecond)", "pipeline", ["through the blocks"]),
    "keywords": ("language_workload(KeywordStream)", "pipeline", ["first argument"]),
    "rowwise alone": ("rowwise_alone()", "tensor", ["have to be colwise"]),
    "colwise alone": ("colwise_alone()", "tensor", ["RuntimeError"]),
    "a loss that takes no parts": ("split_output()", "tensor", ["RuntimeError"]),
}


def write_workload(folder: Path, expression: str) -> str:
    """Write a workload file and return its name."""
    (folder / "mine.py").write_text(f"from integration.test_odd_models import *\nworkload = {expression}\n")
    return "mine.py"


@pytest.mark.parametrize("case", ON_ONE_RANK)
def test_each_rank_prints_one_line_and_exits_without_waiting(cli: Cli, tmp_path: Path, case: str) -> None:
    """A rank that detects the error exits with 2. No rank waits for the timeout, and none prints a traceback.

    No launcher ends the other rank here. It exits with 4 if it loses its connection before it detects the error.
    """
    expression, layout, fragments = ON_ONE_RANK[case]
    arguments = ["train", write_workload(tmp_path, expression), "--layout", layout, "--timeout", "40"]
    start = time.monotonic()
    ended = cli.on_ranks(tmp_path, *arguments, size=2)
    assert time.monotonic() - start < 35.0
    assert set(ended.statuses) in ({2}, {2, 4}), ended
    errors = [(tmp_path / f"rank{rank}.err").read_text() for rank in range(2)]
    lines_by_rank = [[line for line in text.splitlines() if not line.startswith("full traceback: ")] for text in errors]
    assert all(len(lines) == 1 for lines in lines_by_rank), errors
    messages = [lines[0] for lines, status in zip(lines_by_rank, ended.statuses, strict=True) if status == 2]
    assert any(all(fragment in message for fragment in fragments) for message in messages), errors


def test_an_error_of_one_stage_is_reported_once_by_the_launcher(tmp_path: Path) -> None:
    """All ranks detect the error, so the command prints one line and exits with 2, not with 4."""
    _, layout, fragments = ON_ONE_RANK["every second block"]
    arguments = [
        "train",
        write_workload(tmp_path, "language_workload(SlowEverySecond)"),
        "--layout",
        layout,
        "--processes",
        "2",
        "--timeout",
        "40",
    ]
    variables = {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "everyrank", *arguments]
    process = subprocess.run(
        command, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True, timeout=60
    )
    lines = [line for line in process.stderr.splitlines() if not line.startswith("full traceback: ")]
    assert len(lines) == 1, process.stderr
    assert fragments[0] in lines[0]
    assert process.returncode == 2, process.stderr


DECODER = 'zoo.workload("decoder", "adamw", predict=lambda output: output.argmax(-1))'


def test_layouts_train_evaluate_and_predict_as_one_process(cli: Cli, tmp_path: Path) -> None:
    """Each layout has the losses, metrics and predictions of one process."""
    path = write_workload(tmp_path, DECODER)
    results: dict[str, tuple[list[float], dict[str, float], str]] = {}
    layouts = {"single": 1, "fsdp:tensor=2": 4, "context": 2, "pipeline:shard=2": 4, "pipeline:schedule=interleaved": 2}
    for layout, size in layouts.items():
        options = ("--layout", layout, "--json", "r.json", "--out", "run")
        ended = cli.on_ranks(tmp_path, "train", path, *options, "--steps", 4, size=size)
        assert ended.status == 0, ended
        [record] = read_records(tmp_path / "r.json")
        shutil.rmtree(tmp_path / "again", ignore_errors=True)
        (tmp_path / "run").rename(tmp_path / "again")
        ended = cli.on_ranks(
            tmp_path, "predict", path, "--layout", layout, "--resume", "again", "--out", "p.jsonl", size=size
        )
        assert ended.status == 0, ended
        rows = (tmp_path / "p.jsonl").read_text()
        assert len(rows.splitlines()) == 9
        results[layout] = record.loss, record.metrics, rows
        options = ("--evaluate", "--resume", "again", "--json", "e.json")
        assert cli.on_ranks(tmp_path, "train", path, "--layout", layout, *options, size=size).status == 0
        [evaluated] = read_records(tmp_path / "e.json")
        assert evaluated.metrics == pytest.approx(record.metrics, rel=1e-5)
    losses, metrics, rows = results.pop("single")
    for layout, (other_losses, other_metrics, other_rows) in results.items():
        assert other_losses == pytest.approx(losses, rel=1e-5), layout
        assert other_metrics["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-5), layout
        assert other_metrics["guessed"] == metrics["guessed"], layout
        assert other_rows == rows, layout


def test_built_in_text_workload_trains_a_user_file_on_four_ranks(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text(
        "to be, or not to be: that is the question\n" * 500
    )  # a tenth of it is validation data
    options = ("--data", "few.txt", "--steps", 4, "--set", "batch=4", "--layout", "fsdp:tensor=2", "--json", "r.json")
    ended = cli.on_ranks(tmp_path, "train", "text", *options, "--evaluate-every", 0, size=4)
    assert ended.status == 0, ended
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
def test_verify_checks_that_each_sample_is_read_once(cli: Cli, tmp_path: Path, size: int, layouts: list[str]) -> None:
    """Ranks of one tensor, context or pipeline group read the same samples, which count once."""
    options = ("--layout", *layouts, "--steps", 3, "--quick", "--samples", "--json", "v.json")
    ended = cli.on_ranks(tmp_path, "verify", write_workload(tmp_path, DECODER), *options, size=size)
    assert ended.status == 0, ended
    for record in read_records(tmp_path / "v.json"):
        assert record.parity.status == "equal"
        assert any("9 samples, each read once" in check for check in record.parity.checks), record.parity.checks


@pytest.mark.parametrize("option", ["foreach", "fused"])
def test_foreach_and_fused_optimizers_are_equivalent(ranks: Any, option: str) -> None:
    """A parameter group has split and whole parameters, which the foreach and fused kernels of torch refuse."""
    workload = dataclasses.replace(
        zoo.workload("decoder"),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, **{option: True}),
    )
    layouts = ("tensor", "fsdp:tensor=2", "pipeline")
    assert outcomes(ranks, 2, *((workload, layout) for layout in layouts)) == ["equal"] * len(layouts)
