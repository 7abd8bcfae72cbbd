"""The masks of exact dropout: their bits, their distribution, and the models that are refused."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from everyrank.audit.watch.losses import DROPOUTS
from everyrank.data import Batch
from everyrank.errors import EveryrankError, UnsupportedLayoutError, WorkloadError
from everyrank.layout import parse_layout
from everyrank.parallel.dropout.apply import FunctionalDropout, apply_exact_dropout
from everyrank.parallel.dropout.exact import ExactDropout
from everyrank.parallel.dropout.masks import DimPart, dropped_share, keep_mask, row_keys, sample_keys, whole_dim
from everyrank.parallel.mesh import Mesh
from everyrank.workload import Workload
from everyrank.world import World
from zoo import workload

CPU = torch.device("cpu")
SAMPLES, ROWS, FEATURES = 64, 48, 96
NUMBER = SAMPLES * ROWS * FEATURES


def mask(seed: int = 1, samples: int = SAMPLES, rows: int = ROWS, features: int = FEATURES, p: float = 0.1) -> Tensor:
    """Return a mask of shape (samples, rows, features)."""
    keys = row_keys(sample_keys(seed, range(samples), CPU), [whole_dim(rows)])
    return keep_mask(keys, whole_dim(features), p)


def test_bits() -> None:
    """The masks equal those of the same arithmetic in Python, so that a resumed training keeps its masks."""

    def mixed(state: int) -> int:
        state %= 1 << 64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
        state = (state ^ state >> 27) * 0x94D049BB133111EB % (1 << 64)
        return state ^ state >> 31

    def is_kept(sample: int, row: int, feature: int) -> bool:
        key = mixed(mixed(sample * golden + 7) + (row + 1) * golden)
        bits = mixed(key + (feature // 4 + 1) * golden) >> 16 * (feature % 4) & 0xFFFF
        return (bits ^ 0x8000) >= round(0.3 * (1 << 16))  # compared as a signed number

    golden = 0x9E3779B97F4A7C15
    found = mask(seed=7, samples=3, rows=2, features=10, p=0.3)
    assert found.flatten().tolist() == [is_kept(*place) for place in itertools.product(range(3), range(2), range(10))]


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_share(p: float) -> None:
    """The fraction of dropped elements is p, with the variance of independent draws."""
    dropped = ~mask(p=p)
    share = dropped_share(p)
    assert abs(share - p) <= 2**-17
    assert_normal(float(dropped.double().mean() - share) / math.sqrt(share * (1 - share) / NUMBER))
    per_row = dropped.double().sum(-1).flatten()  # binomial: mean n p, variance n p (1 - p)
    variance = FEATURES * share * (1 - share)
    assert_normal(float(per_row.var() / variance - 1) * math.sqrt(len(per_row) / 2))


def assert_normal(deviations: float) -> None:
    """The seed is fixed, so this cannot fail by chance. A good mask would exceed 3 deviations once in 400 seeds."""
    assert abs(deviations) < 4


def correlation(one: Tensor, other: Tensor, p: float = 0.1) -> float:
    """Return the correlation of two masks, in standard deviations of independent masks."""
    product = (one.double() - (1 - dropped_share(p))) * (other.double() - (1 - dropped_share(p)))
    return float(product.mean()) / (dropped_share(p) * (1 - dropped_share(p))) * math.sqrt(one.numel())


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 5, 8, 16, 32])
def test_neighbours_are_independent(lag: int) -> None:
    """Features, rows and samples at distance `lag` are uncorrelated."""
    own = mask()
    assert_normal(correlation(own[..., lag:], own[..., :-lag]))
    assert_normal(correlation(own[:, lag:], own[:, :-lag]))
    assert_normal(correlation(own[lag:], own[:-lag]))


def test_updates_and_calls_are_independent() -> None:
    """Masks of neighbouring seeds are uncorrelated, also if one is shifted by a row or a sample."""
    masks = [mask(seed) for seed in range(4)]
    for one, other in itertools.combinations(masks, 2):
        assert_normal(correlation(one, other))
        assert_normal(correlation(one[1:], other[:-1]))
        assert_normal(correlation(one[:, 1:], other[:, :-1]))


def test_patterns_are_as_frequent_as_they_should_be() -> None:
    """All 256 patterns of eight adjacent elements are equally frequent: chi squared with 255 degrees of freedom."""
    octets = mask(p=0.5).view(-1, 8).long() @ (1 << torch.arange(8))
    counts = octets.bincount(minlength=256).double()
    expected = len(octets) / 256
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert_normal((chi_squared - 255) / math.sqrt(2 * 255))


@pytest.mark.parametrize("features", [1, 5, 96])
def test_parts_of_a_mask(features: int) -> None:
    """The mask of a part equals that part of the whole mask, for every way to split a tensor."""
    whole = mask(samples=6, rows=8, features=features)
    keys = sample_keys(1, [5, 0, 3], CPU)
    rows = DimPart((range(1, 3), range(6, 8)), 8)
    columns = DimPart((range(features // 2), range(features // 2 + 1, features)), features)
    found = keep_mask(row_keys(keys, [rows]), columns, 0.1)
    chosen = [index for index in range(features) if index != features // 2]
    assert torch.equal(found, whole[[5, 0, 3]][:, [1, 2, 6, 7]][..., chosen])


# models


def exact_of(model: nn.Module, text: str = "single", **changes: Any) -> ExactDropout | None:
    """Make the dropouts of the model exact, in one process, and start a micro-batch of four samples."""
    axes = ("pipeline", "replicate", "shard", "context", "expert", "tensor")
    world: World = World.__new__(World)
    object.__setattr__(world, "device", CPU)
    mesh = Mesh(world, dict.fromkeys(axes, 1), dict.fromkeys(axes, 0))
    subject: Workload = workload("frozen", model=lambda: model, **changes)
    exact = apply_exact_dropout(model, subject, parse_layout(text), mesh, list)
    if exact is not None:
        exact.begin(Batch(torch.zeros(4, 3), None, 4, 0, 4))
    return exact


def test_modules() -> None:
    """Every kind of dropout module drops what it should, and scales what is left."""
    values = torch.ones(4, 8, 6, 6)
    for kind in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d):
        model = nn.Sequential(kind(0.5))
        assert exact_of(model) is not None
        dropped = model(values)
        assert set(dropped.unique().tolist()) == {0.0, 2.0}
        is_whole = bool((dropped == dropped[:, :, :1, :1]).all())
        assert is_whole == (kind is not nn.Dropout)
        assert torch.equal(model.eval()(values), values)
    model = nn.Sequential(nn.AlphaDropout(0.2))
    exact_of(model)
    dropped = model(torch.randn(4, 100, 100, generator=torch.Generator().manual_seed(0)))
    assert abs(float(dropped.mean())) < 0.02
    assert abs(float(dropped.std()) - 1) < 0.02


def test_a_module_in_two_places_has_two_masks() -> None:
    """Two calls of one module have different masks, too."""
    shared = nn.Dropout(0.5)
    model = nn.ModuleList([shared, nn.Sequential(shared)])
    exact = exact_of(model)
    assert exact is not None
    masks = [model[0](torch.ones(4, 50)), model[0](torch.ones(4, 50)), model[1](torch.ones(4, 50))]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(masks, 2))
    exact.begin(Batch(None, None, 4, 0, 4))
    assert torch.equal(model[0](torch.ones(4, 50)), masks[0])
    exact.begin(Batch(None, None, 2, 2, 4))
    assert torch.equal(model[0](torch.ones(2, 50)), masks[0][2:])


class Functions(nn.Module):
    """A module that calls the dropout functions of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)

    def forward(self, values: Tensor, need_weights: bool = False) -> Tensor:
        mixed = self.attention(values, values, values, need_weights=need_weights)[0]
        mixed = F.scaled_dot_product_attention(mixed, mixed, mixed, is_causal=True, dropout_p=0.2)
        return F.dropout(mixed, 0.1, self.training)


@pytest.mark.parametrize("need_weights", [False, True])
def test_functions(need_weights: bool) -> None:
    """Dropout functions and attention give half of the samples the same result, and draw no numbers from torch."""
    model = Functions()
    exact = exact_of(model)
    assert exact is not None
    assert exact.is_watching
    values = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))
    before = torch.get_rng_state()
    with FunctionalDropout(exact):
        whole = model(values, need_weights)
        exact.begin(Batch(None, None, 2, 2, 4))
        half = model(values[2:], need_weights)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.allclose(whole[2:], half, atol=1e-6)
    assert not torch.allclose(whole, model.eval()(values), atol=1e-2)


def test_the_audit_has_nothing_to_say() -> None:
    """The audit counts torch's functions that draw masks, and exact dropout calls none of them."""
    seen: list[Any] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    model = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5))
    exact_of(model)
    with Watch():
        model(torch.ones(4, 5))
    assert seen
    assert not DROPOUTS.intersection(seen)


def test_attention_without_dropping_is_torchs() -> None:
    """The attention weights equal those of torch's kernel, with masks, scales, grouped heads and empty rows."""
    from everyrank.parallel.dropout.attention import attention_with_dropout

    exact = exact_of(nn.Dropout(0.1))
    assert exact is not None
    query, key = torch.randn(4, 6, 5, 8), torch.randn(4, 2, 5, 8)
    seen = torch.rand(5, 5) > 0.4
    seen[2] = False
    for options in ({"is_causal": True}, {"attn_mask": seen}, {"attn_mask": torch.randn(5, 5), "scale": 0.3}):
        found = attention_with_dropout(exact, query, key, key, dropout_p=0.0, enable_gqa=True, **options)
        assert torch.allclose(
            found, F.scaled_dot_product_attention(query, key, key, enable_gqa=True, **options), atol=1e-6
        )


def test_left_alone() -> None:
    """A model without dropout, and one with Workload.dropout="torch", are not changed."""
    assert exact_of(nn.Linear(3, 3)) is None
    assert exact_of(nn.Dropout(0.5), dropout="torch") is None
    with pytest.raises(WorkloadError, match=r"dropout='both': give exact or torch"):
        workload("frozen", dropout="both")


def test_refused() -> None:
    """Dropout inside an operator of torch is refused, and a tensor whose shape does not show the samples."""
    with pytest.raises(WorkloadError, match=r"LSTM\(dropout=0.2\) draws inside an operator.*Workload.dropout='torch'"):
        exact_of(nn.LSTM(3, 3, num_layers=2, dropout=0.2))
    with pytest.raises(UnsupportedLayoutError, match=r"experts has dropout inside"):
        exact_of(nn.ModuleDict({"experts": nn.Dropout(0.1)}), experts="experts")
    model = nn.Dropout(0.5)
    exact_of(model)
    with pytest.raises(WorkloadError, match=r"shape \(7, 3\): .* the 4 samples"):
        model(torch.ones(7, 3))
    for shape in ((4,), (4, 3), (8, 3), (5, 4, 3), (1, 3)):  # samples; flattened; sequences first; one for all
        assert model(torch.ones(shape)).shape == shape
    assert issubclass(WorkloadError, EveryrankError)
