"""A decoder larger than the memory of a rank is trained and verified if it is split, and refused otherwise."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import re
import resource
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from everyrank import Workload, parse_layout
from everyrank.builtin import Decoder, DecoderShape
from everyrank.data import all_updates
from everyrank.errors import CannotRunError
from everyrank.loop import open_data, run_updates
from everyrank.parity import check_layout, parity_case
from everyrank.strategies import prepare
from everyrank.world import World
from everyrank.world.collectives import sum_over_ranks

LAYOUTS = ["fsdp:meta=true", "tensor:meta=true", "pipeline:meta=true"]
MIB = 2**20
_M_MMAP_THRESHOLD = -3


def decoder(num_blocks: int) -> Decoder:
    """Return a decoder whose blocks take 4 MiB each in float32."""
    return Decoder(DecoderShape(num_blocks, num_heads=4, width=256, hidden=1024, vocabulary=12))


def parameters(num_blocks: int) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in decoder(num_blocks).parameters())


def large(num_blocks: int) -> Workload:
    """Return a workload with plain SGD, because an optimizer with state would take more memory."""
    changes: dict[str, Any] = {
        "model": lambda: decoder(num_blocks),
        "global_batch": 4,
        "clip_norm": None,
        "metrics": {},
    }
    made = zoo.workload("decoder", eval_data=None, **changes)
    return dataclasses.replace(made, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05))


@contextlib.contextmanager
def private_memory(num_bytes: int) -> Generator[None]:
    """Limit this process to `num_bytes` more private memory than it has (RLIMIT_DATA)."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)  # what was freed would be had without asking
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 18)  # what is larger goes back when it is freed: else glibc keeps it
    before = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def train(world: World, num_blocks: int, texts: list[str], limit: int) -> list[Any]:
    """Return the losses of two updates under each layout, or the error message."""
    workload = large(num_blocks)
    train_data, _ = open_data(workload, world)
    found: list[Any] = []
    for text in texts:
        prepare(zoo.workload("decoder"), parse_layout(text), world)  # groups and their threads are there
        with private_memory(limit) if limit else contextlib.nullcontext():
            try:
                prepared = prepare(workload, parse_layout(text), world)
                shares = torch.stack(list(run_updates(prepared, train_data, all_updates(2, 5))))
            except CannotRunError as error:
                found.append(str(error))
                continue
            totals = sum_over_ranks(shares, prepared.world)
            del prepared
        found.append((totals[:, 0] / totals[:, 1]).tolist())
    return found


def test_model_larger_than_memory_trains_only_if_it_is_split(ranks: Any) -> None:
    """The parameters take 96 MiB in float32. Each rank may use 92 MiB, including gradients and activations."""
    limit = 92 * MIB
    assert 4 * parameters(24) > limit
    refused, *losses = ranks(4, train, 24, ["single", *LAYOUTS], limit, is_new=True)[0]
    [single] = ranks(4, train, 24, ["single"], 0)[0]
    for text, found in zip(LAYOUTS, losses, strict=True):
        assert found == pytest.approx(single, rel=1e-5), text
    assert re.match(r"layout single: out of memory .* \(could not allocate \d+ bytes\)", refused)
    assert "\n" not in refused


def verify(world: World, num_blocks: int, reference: str, texts: list[str], limit: int) -> list[Any]:
    def check(workload: Workload, name: str) -> list[Any]:
        stands_in = parse_layout(reference)
        case = parity_case(workload, *open_data(workload, world), 2, is_quick=True, reference=stands_in)
        return [check_layout(case, parse_layout(text), world, f"{name}/{text}")[0] for text in texts]

    check(zoo.workload("decoder"), "small")  # groups and their threads are there, and all that is imported on the way
    with private_memory(limit):
        return check(large(num_blocks), "larger")


def test_model_larger_than_memory_is_verified_only_if_the_reference_splits_it(ranks: Any) -> None:
    """The parameters take 128 MiB in float64. Each rank may use 127 MiB for the reference and all layouts."""
    limit = 127 * MIB
    assert 8 * parameters(16) > limit
    refused, *found = ranks(4, verify, 16, "fsdp:meta=true", ["single", *LAYOUTS[1:]], limit, is_new=True)[0]
    for parity in found:
        assert parity.status == "equal", parity
        assert parity.scope == "2 updates, compared with fsdp:meta=true"
    assert refused.status == "not_verified"
    assert refused.reason.startswith("layout single")
    assert "out of memory" in refused.reason
