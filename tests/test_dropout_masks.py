"""Masks of exact dropout: their bits and distribution, supported modules, and refused models."""

from __future__ import annotations

import functools
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


def test_mask_bits_equal_a_python_reference() -> None:
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
    result = mask(seed=7, samples=3, rows=2, features=10, p=0.3)
    assert result.flatten().tolist() == [is_kept(*index) for index in itertools.product(range(3), range(2), range(10))]


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_dropped_fraction_and_its_variance(p: float) -> None:
    """The fraction of dropped elements is p, with the variance of independent draws."""
    dropped = ~mask(p=p)
    expected_fraction = dropped_share(p)
    assert abs(expected_fraction - p) <= 2**-17
    standard_deviation = math.sqrt(expected_fraction * (1 - expected_fraction) / NUMBER)
    assert_normal(float(dropped.double().mean() - expected_fraction) / standard_deviation)
    per_row = dropped.double().sum(-1).flatten()  # binomial: mean n p, variance n p (1 - p)
    variance = FEATURES * expected_fraction * (1 - expected_fraction)
    assert_normal(float(per_row.var() / variance - 1) * math.sqrt(len(per_row) / 2))


def assert_normal(deviations: float) -> None:
    """The seed is fixed, so this cannot fail by chance. A good mask would exceed 3 deviations once in 400 seeds."""
    assert abs(deviations) < 4


def correlation(first: Tensor, second: Tensor, p: float = 0.1) -> float:
    """Return the correlation of two masks, in standard deviations of independent masks."""
    product = (first.double() - (1 - dropped_share(p))) * (second.double() - (1 - dropped_share(p)))
    return float(product.mean()) / (dropped_share(p) * (1 - dropped_share(p))) * math.sqrt(first.numel())


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 5, 8, 16, 32])
def test_neighboring_mask_elements_are_uncorrelated(lag: int) -> None:
    """Features, rows and samples at distance `lag` are uncorrelated."""
    elements = mask()
    assert_normal(correlation(elements[..., lag:], elements[..., :-lag]))
    assert_normal(correlation(elements[:, lag:], elements[:, :-lag]))
    assert_normal(correlation(elements[lag:], elements[:-lag]))


def test_masks_of_different_updates_and_calls_are_uncorrelated() -> None:
    """Masks of neighbouring seeds are uncorrelated, also if one is shifted by a row or a sample."""
    masks = [mask(seed) for seed in range(4)]
    for first, second in itertools.combinations(masks, 2):
        assert_normal(correlation(first, second))
        assert_normal(correlation(first[1:], second[:-1]))
        assert_normal(correlation(first[:, 1:], second[:, :-1]))


def test_patterns_of_eight_elements_are_equally_frequent() -> None:
    """All 256 patterns are equally frequent: chi-squared test with 255 degrees of freedom."""
    octets = mask(p=0.5).view(-1, 8).long() @ (1 << torch.arange(8))
    counts = octets.bincount(minlength=256).double()
    expected = len(octets) / 256
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert_normal((chi_squared - 255) / math.sqrt(2 * 255))


@pytest.mark.parametrize("features", [1, 5, 96])
def test_mask_of_a_slice_is_the_slice_of_the_mask(features: int) -> None:
    """A rank that holds only some samples, rows and features computes the same mask elements."""
    full_mask = mask(samples=6, rows=8, features=features)
    keys = sample_keys(1, [5, 0, 3], CPU)
    rows = DimPart((range(1, 3), range(6, 8)), 8)
    columns = DimPart((range(features // 2), range(features // 2 + 1, features)), features)
    sliced_mask = keep_mask(row_keys(keys, [rows]), columns, 0.1)
    feature_indices = [index for index in range(features) if index != features // 2]
    assert torch.equal(sliced_mask, full_mask[[5, 0, 3]][:, [1, 2, 6, 7]][..., feature_indices])


# models


def exact_of(model: nn.Module, text: str = "single", **changes: Any) -> ExactDropout | None:
    """Replace the dropouts of the model by exact dropout, in one process, and start a micro-batch of four samples."""
    axes = ("pipeline", "replicate", "shard", "context", "expert", "tensor")
    world: World = World.__new__(World)
    object.__setattr__(world, "device", CPU)
    mesh = Mesh(world, dict.fromkeys(axes, 1), dict.fromkeys(axes, 0))
    subject: Workload = workload("frozen", model=lambda: model, **changes)
    exact = apply_exact_dropout(model, subject, parse_layout(text), mesh, list)
    if exact is not None:
        exact.begin(Batch(torch.zeros(4, 3), None, 4, 0, 4))
    return exact


def test_dropout_modules_drop_and_scale() -> None:
    """Each kind of module drops elements or whole channels, scales the rest, and does nothing in eval mode."""
    values = torch.ones(4, 8, 6, 6)
    for kind in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d):
        model = nn.Sequential(kind(0.5))
        assert exact_of(model) is not None
        output = model(values)
        assert set(output.unique().tolist()) == {0.0, 2.0}
        is_whole = bool((output == output[:, :, :1, :1]).all())
        assert is_whole == (kind is not nn.Dropout)
        assert torch.equal(model.eval()(values), values)
    model = nn.Sequential(nn.AlphaDropout(0.2))
    exact_of(model)
    output = model(torch.randn(4, 100, 100, generator=torch.Generator().manual_seed(0)))
    assert abs(float(output.mean())) < 0.02
    assert abs(float(output.std()) - 1) < 0.02


def test_dropout_module_may_be_called_by_keyword() -> None:
    model = nn.Dropout(0.5)
    exact_of(model)
    assert set(model(input=torch.ones(4, 50)).unique().tolist()) == {0.0, 2.0}


def test_shared_module_has_a_different_mask_for_each_call() -> None:
    """A module is used in two places, and twice in one of them. All three masks are different."""
    shared = nn.Dropout(0.5)
    model = nn.ModuleList([shared, nn.Sequential(shared)])
    exact = exact_of(model)
    assert exact is not None
    masks = [model[0](torch.ones(4, 50)), model[0](torch.ones(4, 50)), model[1](torch.ones(4, 50))]
    assert not any(torch.equal(first, second) for first, second in itertools.combinations(masks, 2))
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
def test_dropout_functions_and_attention(need_weights: bool) -> None:
    """Running half of the samples gives the same result for them. torch's random state is not used."""
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


class NamedLikeTheFunction(nn.Module):
    """A module named `dropout`, of which forward uses only the probability."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, values: Tensor) -> Tensor:
        return F.dropout(values, self.dropout.p, self.training)


class OfItsOwnMethod(NamedLikeTheFunction):
    """The function is called in a static method, in a decorated one, or as an attribute."""

    def forward(self, values: Tensor) -> Tensor:
        return self.drop(self.dropout(values))

    @staticmethod
    def drop(values: Tensor) -> Tensor:
        return F.dropout(values, 0.3)


class Decorated(OfItsOwnMethod):
    @torch.compiler.disable
    def drop(self, values: Tensor) -> Tensor:  # type: ignore[override]
        return F.dropout(values, 0.3)


class AsAttribute(OfItsOwnMethod):
    def __init__(self) -> None:
        super().__init__()
        self.drop = functools.partial(F.dropout, p=0.3)  # type: ignore[assignment]


class OnlyModules(nn.Module):
    """No function is called: its torch calls need not be intercepted."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, values: Tensor) -> Tensor:
        return self.dropout(values)


@pytest.mark.parametrize("kind", [NamedLikeTheFunction, OfItsOwnMethod, Decorated, AsAttribute])
def test_dropout_functions_are_found_beside_modules_of_the_same_name(kind: type[nn.Module]) -> None:
    """Otherwise each rank would draw the masks of the function with its own random numbers."""
    exact = exact_of(nn.Sequential(kind()))
    assert exact is not None
    assert exact.is_watching


def test_models_with_modules_only_are_not_intercepted() -> None:
    exact = exact_of(nn.Sequential(OnlyModules()))
    assert exact is not None
    assert not exact.is_watching


def test_exact_dropout_calls_no_dropout_function_of_torch() -> None:
    """The audit reports calls of torch's dropout functions."""
    called_functions: list[Any] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called_functions.append(func)
            return func(*args, **(kwargs or {}))

    model = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5))
    exact_of(model)
    with Watch():
        model(torch.ones(4, 5))
    assert called_functions
    assert not DROPOUTS.intersection(called_functions)


def test_attention_with_dropout_0_equals_that_of_torch() -> None:
    """Tested with masks, scales, grouped-query heads and fully masked rows."""
    from everyrank.parallel.dropout.attention import attention_with_dropout

    exact = exact_of(nn.Dropout(0.1))
    assert exact is not None
    query, key = torch.randn(4, 6, 5, 8), torch.randn(4, 2, 5, 8)
    attention_mask = torch.rand(5, 5) > 0.4
    attention_mask[2] = False
    for options in ({"is_causal": True}, {"attn_mask": attention_mask}, {"attn_mask": torch.randn(5, 5), "scale": 0.3}):
        result = attention_with_dropout(exact, query, key, key, dropout_p=0.0, enable_gqa=True, **options)
        assert torch.allclose(
            result, F.scaled_dot_product_attention(query, key, key, enable_gqa=True, **options), atol=1e-6
        )


def test_models_that_are_not_changed() -> None:
    """They have no dropout, or Workload.dropout="torch". Other values of Workload.dropout are refused."""
    assert exact_of(nn.Linear(3, 3)) is None
    assert exact_of(nn.Dropout(0.5), dropout="torch") is None
    with pytest.raises(WorkloadError, match=r"dropout='both': give exact or torch"):
        workload("frozen", dropout="both")


def test_unsupported_dropout_is_refused() -> None:
    """Dropout inside an operator of torch is refused, and inputs whose shape does not show the samples."""
    with pytest.raises(WorkloadError, match=r"LSTM\(dropout=0.2\) draws inside an operator.*Workload.dropout='torch'"):
        exact_of(nn.LSTM(3, 3, num_layers=2, dropout=0.2))
    with pytest.raises(UnsupportedLayoutError, match=r"experts has dropout inside"):
        exact_of(nn.ModuleDict({"experts": nn.Dropout(0.1)}), experts="experts")
    model = nn.Dropout(0.5)
    exact_of(model)
    with pytest.raises(WorkloadError, match=r"shape \(7, 3\): .* the 4 samples"):
        model(torch.ones(7, 3))
    # the samples come first, are flattened with rows, come after the sequence, or are broadcast
    for shape in ((4,), (4, 3), (8, 3), (5, 4, 3), (1, 3)):
        assert model(torch.ones(shape)).shape == shape
    assert issubclass(WorkloadError, EveryrankError)
