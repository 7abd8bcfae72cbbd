"""The collectives of each strategy in one update match the communication that its docstring describes."""

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

TRAINED = 7 * 3 + 3 + 3 * 2 + 2 + 1  # trained elements: two linear layers and a scalar; the first layer is frozen


def traffic(world: World, text: str, changes: dict[str, Any]) -> dict[str, list[int]]:
    """Return the elements of each collective in the sixth update. DDP rebuilds its buckets in the second."""
    workload = zoo.workload("frozen", **{"clip_norm": None, **changes})
    layout = parse_layout(text)
    train_data, _ = open_data(workload, world)
    prepared = prepare(workload, layout, world)
    updates = run_updates(prepared, train_data, all_updates(6, 4))
    for _ in range(5):
        next(updates)
    elements: dict[str, list[int]] = defaultdict(list)

    def observe(operation: str, _: str, tensors: Sequence[Tensor]) -> None:
        elements[operation].append(sum(tensor.numel() for tensor in tensors))

    assert isinstance(world.group, PythonGroup)  # torch makes the same calls to every backend
    with observed_calls(observe):
        next(updates)
    return dict(elements)


def test_single_has_no_traffic(ranks: Any) -> None:
    """`single` communicates nothing."""
    assert ranks(1, traffic, "single", {}) == [{}]


def test_ddp_traffic(ranks: Any) -> None:
    """DDP makes one all-reduce, of all gradients and the sample count."""
    assert ranks(2, traffic, "ddp", {}) == [{"all_reduce": [TRAINED + 2]}] * 2


def test_ddp_accumulate_traffic(ranks: Any) -> None:
    """Gradients are all-reduced only after the last micro-batch."""
    by_rank = ranks(2, traffic, "ddp:accumulate=3", {})
    assert by_rank == [{"all_reduce": [TRAINED + 2]}] * 2


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_16_bit_compression_traffic(ranks: Any, dtype: str) -> None:
    """All-to-all sends each rank its slice, and all-gather returns the sums. The count is all-reduced uncompressed."""
    padded = -(-TRAINED // 3) * 3
    expected = {"all_to_all": [padded], "all_gather": [padded // 3], "all_reduce": [2]}
    assert ranks(3, traffic, f"ddp:compress={dtype}", {}) == [expected] * 3


def test_powersgd_traffic(ranks: Any) -> None:
    """For (n, m) matrices, all-reduces have n and then m elements. All else is sent uncompressed."""
    expected = {"all_reduce": sorted([3 + 2, 7 + 3, TRAINED - 7 * 3 - 3 * 2 + 2])}
    for elements in ranks(2, traffic, "ddp:compress=powersgd", {}):
        assert {key: sorted(value) for key, value in elements.items()} == expected


@pytest.mark.parametrize(("every", "synchronises"), [(1, True), (2, True), (3, True), (4, False), (8, False)])
def test_local_sgd_traffic(ranks: Any, every: int, synchronises: bool) -> None:
    """A synchronisation averages parameters, momentum and buffers. Other updates communicate nothing."""
    expected = {"all_reduce": [TRAINED + TRAINED + 2 + 1], "broadcast": [1]} if synchronises else {}
    assert ranks(2, traffic, f"local_sgd:every={every}", {}) == [expected] * 2


def test_zero1_traffic(ranks: Any) -> None:
    """ZeRO-1 adds to DDP one broadcast of each owner's parameters. Frozen parameters are not sent."""
    for elements in ranks(2, traffic, "zero1", {}):
        assert elements["all_reduce"] == [TRAINED + 2]
        assert len(elements["broadcast"]) == 2
        assert sum(elements["broadcast"]) == TRAINED
        assert set(elements) == {"all_reduce", "broadcast"}


@pytest.mark.parametrize("reshard", ["true", "false"])
def test_fsdp_traffic(ranks: Any, reshard: str) -> None:
    """Blocks are gathered in forward, and again in backward if resharded. Trained units are reduce-scattered."""
    for elements in ranks(2, traffic, f"fsdp:reshard_after_forward={reshard}", {}):
        # units: two linear layers, a tanh without parameters, and the root with the frozen layer
        assert len(elements["all_gather"]) == (5 if reshard == "true" else 3)
        assert len(elements["reduce_scatter"]) == 2
        assert sorted(elements["all_reduce"]) == [1, 2]  # the scalar parameter, and the loss sum with its count


HEAD = 3 + 5  # a header has 3 numbers, and a flag for each trained tensor


@pytest.mark.parametrize("trainers", [1, 2, 3])
def test_parameter_server_traffic(ranks: Any, trainers: int) -> None:
    """The server sends parameters and totals to each trainer. Each trainer sends a header and its gradients."""
    server, *trainer_calls = ranks(1 + trainers, traffic, "parameter_server", {})
    assert sorted(server["send"]) == sorted([TRAINED, 2] * trainers)
    assert sorted(server["recv"]) == sorted([HEAD, TRAINED] * trainers)
    for elements in trainer_calls:
        assert elements == {"recv": [TRAINED, 2], "send": [HEAD, TRAINED]}


def test_two_parameter_servers_traffic(ranks: Any) -> None:
    """Each server has about half of the parameters. Trainers send a header to both, and servers exchange a norm."""
    *servers, trainer, other_trainer = ranks(4, traffic, "parameter_server:servers=2", {"clip_norm": 0.5})
    assert sorted(trainer) == sorted(other_trainer) == ["recv", "send"]
    part_sizes = [server["recv"][1] for server in servers]
    assert sum(part_sizes) == TRAINED
    assert max(part_sizes) - min(part_sizes) <= 9  # the largest tensor has 21 elements, all others 12
    for elements in (trainer, other_trainer):
        assert elements["recv"] == [*part_sizes, 2]
        assert sum(elements["send"]) == 2 * 3 + 5 + TRAINED  # two headers
    for server, part_size in zip(servers, part_sizes, strict=True):
        is_first = server is servers[0]
        assert sorted(server["send"]) == sorted([part_size, part_size, 1, *([2, 2] if is_first else [])])
        small_sizes = [size for size in server["recv"] if size != part_size]
        assert len(server["recv"]) == 5
        assert small_sizes == [small_sizes[0], small_sizes[0], 1]  # two headers and a norm
        assert sum(size for size in trainer["send"] if size not in part_sizes) == 2 * 3 + 5


@pytest.mark.parametrize("order", ["arrival", "seeded"])
def test_asynchronous_parameter_server_traffic(ranks: Any, order: str) -> None:
    """Trainers also send a header as a request, and get no totals. In the sixth update every trainer has samples."""
    text = f"parameter_server:updates=async,order={order}"
    server, *trainer_calls = ranks(3, traffic, text, {})
    if order == "seeded":  # otherwise, a trainer and the server may be in different updates
        assert sum(server["send"]) == 2 * TRAINED
        assert sum(server["recv"]) == 2 * (2 * HEAD + TRAINED)
    for elements in trainer_calls:
        assert elements == {"send": [HEAD, HEAD, TRAINED], "recv": [TRAINED]}


def test_every_strategy_docstring_has_all_sections() -> None:
    """The docstring of each strategy has Memory, Communication, Use when, Exact and Source, in this order."""
    for strategy in STRATEGIES.values():
        text = importlib.import_module(strategy.header or strategy.module).__doc__ or ""
        positions = [
            text.find(f"\n{section} ") for section in ("Memory", "Communication", "Use when", "Exact", "Source")
        ]
        assert -1 not in positions, strategy.module
        assert positions == sorted(positions), strategy.module
