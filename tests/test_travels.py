"""What each strategy's header says of its communication, against what the backend is asked in one step."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

import zoo
from everyrank import parse_layout
from everyrank.backends import PythonGroup, observed_calls
from everyrank.data import all_updates
from everyrank.layout import STRATEGIES
from everyrank.loop import open_data, run_updates
from everyrank.strategies import prepare
from everyrank.world import World

TRAINED = 7 * 3 + 3 + 3 * 2 + 2 + 1  # two linear layers and a scalar; the first layer is frozen


def traffic(world: World, text: str, changes: dict[str, Any]) -> dict[str, list[int]]:
    """Elements of each collective of the sixth update, by operation. (DDP rebuilds its buckets in the second.)"""
    workload = zoo.workload("frozen", **{"clip_norm": None, **changes})
    layout = parse_layout(text)
    train_data, _ = open_data(workload, world)
    prepared = prepare(workload, layout, world)
    shares = run_updates(prepared, train_data, all_updates(6, 4))
    for _ in range(5):
        next(shares)
    found: dict[str, list[int]] = defaultdict(list)

    def observe(operation: str, _: str, handed_in: Sequence[Tensor]) -> None:
        found[operation].append(sum(tensor.numel() for tensor in handed_in))

    assert isinstance(world.group, PythonGroup)  # what it is asked is what torch asks of any backend
    with observed_calls(observe):
        next(shares)
    return dict(found)


def test_single(ranks: Any) -> None:
    """Nothing travels."""
    assert ranks(1, traffic, "single", {}) == [{}]


def test_ddp(ranks: Any) -> None:
    """One all-reduce of the trained parameters, and the count in it."""
    assert ranks(2, traffic, "ddp", {}) == [{"all_reduce": [TRAINED + 2]}] * 2


def test_ddp_accumulate(ranks: Any) -> None:
    """Only the last micro-batch sends gradients."""
    found = ranks(2, traffic, "ddp:accumulate=3", {})
    assert found == [{"all_reduce": [TRAINED + 2]}] * 2


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_compressed_to_16_bits(ranks: Any, dtype: str) -> None:
    """As many elements of half the size: to each rank its slice, and the sums back; the count as it is."""
    padded = -(-TRAINED // 3) * 3
    expected = {"all_to_all": [padded], "all_gather": [padded // 3], "all_reduce": [2]}
    assert ranks(3, traffic, f"ddp:compress={dtype}", {}) == [expected] * 3


def test_powersgd(ranks: Any) -> None:
    """Of a matrix (n, m) the n of all, then the m; the rest, and the count, as they are."""
    expected = {"all_reduce": sorted([3 + 2, 7 + 3, TRAINED - 7 * 3 - 3 * 2 + 2])}
    for found in ranks(2, traffic, "ddp:compress=powersgd", {}):
        assert {key: sorted(value) for key, value in found.items()} == expected


@pytest.mark.parametrize(("every", "sent"), [(1, True), (2, True), (3, True), (4, False), (8, False)])
def test_local_sgd(ranks: Any, every: int, sent: bool) -> None:
    """The trained parameters, their momentum, a buffer of two, and the number of terms; in between nothing."""
    expected = {"all_reduce": [TRAINED + TRAINED + 2 + 1], "broadcast": [1]} if sent else {}
    assert ranks(2, traffic, f"local_sgd:every={every}", {}) == [expected] * 2


def test_zero1(ranks: Any) -> None:
    """The same, and each owner's parameters once; frozen ones stay at home."""
    for found in ranks(2, traffic, "zero1", {}):
        assert found["all_reduce"] == [TRAINED + 2]
        assert len(found["broadcast"]) == 2
        assert sum(found["broadcast"]) == TRAINED
        assert set(found) == {"all_reduce", "broadcast"}


@pytest.mark.parametrize("reshard", ["true", "false"])
def test_fsdp(ranks: Any, reshard: str) -> None:
    """Gathers of blocks in forward and (unless kept) in backward, of the rest once; scatters of trained units."""
    for found in ranks(2, traffic, f"fsdp:reshard_after_forward={reshard}", {}):
        # units: two linear layers, a tanh without parameters, and the root with the frozen layer
        assert len(found["all_gather"]) == (5 if reshard == "true" else 3)
        assert len(found["reduce_scatter"]) == 2
        assert sorted(found["all_reduce"]) == [1, 2]  # the scalar, and the count


HEAD = 3 + 5  # and a flag for each trained tensor


@pytest.mark.parametrize("trainers", [1, 2, 3])
def test_parameter_server(ranks: Any, trainers: int) -> None:
    """Parameters one way, gradients and a head the other, the total back: at the server once for each trainer."""
    server, *others = ranks(1 + trainers, traffic, "parameter_server", {})
    assert sorted(server["send"]) == sorted([TRAINED, 2] * trainers)
    assert sorted(server["recv"]) == sorted([HEAD, TRAINED] * trainers)
    for found in others:
        assert found == {"recv": [TRAINED, 2], "send": [HEAD, TRAINED]}


def test_two_parameter_servers(ranks: Any) -> None:
    """Each holds about half: at a trainer the same and a second head, at a server half; a number for the norm."""
    *servers, one, other = ranks(4, traffic, "parameter_server:servers=2", {"clip_norm": 0.5})
    assert sorted(one) == sorted(other) == ["recv", "send"]
    parts = [server["recv"][1] for server in servers]
    assert sum(parts) == TRAINED
    assert max(parts) - min(parts) <= 9  # the largest tensor has 21 elements, all others 12
    for found in (one, other):
        assert found["recv"] == [*parts, 2]
        assert sum(found["send"]) == 2 * 3 + 5 + TRAINED  # two heads
    for server, part in zip(servers, parts, strict=True):
        is_first = server is servers[0]
        assert sorted(server["send"]) == sorted([part, part, 1, *([2, 2] if is_first else [])])
        heads = [size for size in server["recv"] if size != part]
        assert len(server["recv"]) == 5
        assert heads == [heads[0], heads[0], 1]
        assert sum(size for size in one["send"] if size not in parts) == 2 * 3 + 5


@pytest.mark.parametrize("order", ["arrival", "seeded"])
def test_asynchronous_parameter_server(ranks: Any, order: str) -> None:
    """The same, and a head that asks; no total comes back. In the sixth update every part has samples."""
    text = f"parameter_server:updates=async,order={order}"
    server, *others = ranks(3, traffic, text, {})
    if order == "seeded":  # else a trainer may be in another update than the server
        assert sum(server["send"]) == 2 * TRAINED
        assert sum(server["recv"]) == 2 * (2 * HEAD + TRAINED)
    for found in others:
        assert found == {"send": [HEAD, HEAD, TRAINED], "recv": [TRAINED]}


def test_every_header_is_complete() -> None:
    """Memory, Communication, Use when, Exact, Source: in that order, in each strategy."""
    for strategy in STRATEGIES.values():
        text = importlib.import_module(strategy.header or strategy.module).__doc__ or ""
        places = [text.find(f"\n{word} ") for word in ("Memory", "Communication", "Use when", "Exact", "Source")]
        assert -1 not in places, strategy.module
        assert places == sorted(places), strategy.module
