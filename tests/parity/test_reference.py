"""Layouts compared with another layout than `single`, where one device cannot hold the model."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import zoo
from everyrank import Launch, parse_layout, verify
from everyrank.errors import LayoutError, OutOfMemoryError
from everyrank.loop import open_data
from everyrank.parallel import file_backed
from everyrank.parity import check_layout, parity_case
from everyrank.parity.case import single_like
from everyrank.parity.reference import ensure_references
from everyrank.record import Parity
from everyrank.workload import Source
from everyrank.world import World
from parity.test_mutations import same_slice, sum_for_mean

pytestmark = pytest.mark.integration

_MUTATIONS: dict[str, Any] = {"sum for mean": sum_for_mean, "same slice": same_slice}


def check(world: World, reference: str, texts: list[str], mutation: str = "") -> list[Parity]:
    # under a mutation without what hides a gradient of the wrong scale
    workload = zoo.workload("decoder", "sgd", clip_norm=None) if mutation else zoo.workload("decoder", "adamw")
    stands_in = parse_layout(reference)
    case = parity_case(workload, *open_data(workload, world), steps=6, is_quick=True, reference=stands_in)
    found: list[Parity] = []
    for text in texts:
        layout = parse_layout(text)
        key = f"{reference}/{text}/{mutation}"
        with mock.patch.object(file_backed, "_SMALLEST", 1):
            ensure_references(case, dataclasses.replace(layout, precision="float64"), world, f"{key}/before")
            patch = _MUTATIONS[mutation](layout.strategy, world) if mutation else contextlib.nullcontext()
            with patch:
                found.append(check_layout(case, layout, world, key)[0])
    return found


@pytest.mark.parametrize(
    ("reference", "texts"),
    [
        ("fsdp:meta=true", ["tensor:meta=true", "pipeline:meta=true", "ddp", "single"]),
        ("tensor:meta=true", ["fsdp:meta=true"]),
        ("pipeline:meta=true", ["fsdp:meta=true"]),
        ("single:accumulate=3", ["zero1"]),
    ],
)
def test_equal_beside_a_layout(ranks: Any, reference: str, texts: list[str]) -> None:
    """Tensors, losses and evaluations; and the row says beside what."""
    for found in ranks(2, check, reference, texts):
        for parity in found:
            assert parity.status == "equal", parity
            assert parity.max_relative_difference is not None
            assert parity.max_relative_difference <= 1e-10
            assert parity.reference == reference
            assert parity.scope is not None
            assert parity.scope.endswith(f"beside {reference}")


@pytest.mark.parametrize(
    ("text", "mutation", "words"),
    [("ddp", "sum for mean", "2 times that of one device"), ("ddp", "same slice", "were read by no rank")],
)
def test_mutation_is_red(ranks: Any, text: str, mutation: str, words: str) -> None:
    """A mistake is found and its cause named, without one device to ask."""
    parity = ranks(2, check, "tensor:meta=true", [text], mutation)[0][0]
    assert parity.status == "different"
    assert parity.first_divergence
    assert words in (parity.cause or ""), parity
    assert parity.reference == "tensor:meta=true"


OWN = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

def parallelize(model, mesh):
    return fully_shard(model, mesh=mesh["data"])

def without_mean(model, mesh):
    return fully_shard(model, mesh=mesh["data"]).set_gradient_divide_factor(1.0) or model
"""


def test_own_parallel_code(ranks: Any, tmp_path: Path) -> None:
    """Its gradients first; what is wrong with them is told from how many ranks there are, without one device to ask."""
    path = tmp_path / "own.py"
    path.write_text(OWN)
    right, wrong = ranks(2, check, "tensor:meta=true", [f"{path}:data=2", f"{path}:without_mean:data=2"])[0]
    assert right.status == "equal", right
    assert right.reference == wrong.reference == "tensor:meta=true"
    assert any(check.startswith("gradients, float64") for check in right.checks)
    assert wrong.status == "different"
    assert "2 times that of one device" in (wrong.cause or ""), wrong


def same_masks(world: World) -> list[Any]:
    """What `single` measures of its tensors, and what a layout of parts does."""
    workload = zoo.workload("tied", "sgd")  # it has gradients that are zero but for rounding
    found: list[Any] = []
    for reference in (None, parse_layout("fsdp"), parse_layout("fsdp:meta=true")):
        case = parity_case(workload, *open_data(workload, world), steps=4, reference=reference)
        ensure_references(case, parse_layout("ddp:precision=float64"), world, f"zero_gradient_masks/{reference}")
        for one in case.references.values():
            zero_gradient_masks = {name: mask.sum().item() for name, mask in one.zero_gradient_masks.items()}
            found.append((zero_gradient_masks, one.trace.gradients, [sorted(moved) for moved in one.trace.moved]))
    return found


def test_a_layout_measures_what_single_does(ranks: Any) -> None:
    """Gradients that lie in parts are put together: which are zero but for rounding is known."""
    single, *others = ranks(2, same_masks)[0]
    assert single[0]
    for zero_gradient_masks, gradients, moved in others:
        assert zero_gradient_masks == single[0]
        assert moved == single[2]
        assert gradients.keys() == single[1].keys()
        for name, gradient in gradients.items():
            assert torch.allclose(gradient, single[1][name], atol=1e-14), name


@pytest.mark.parametrize(
    ("layout", "reference", "words"),
    [
        ("fsdp", "fsdp:meta=true", "different reference"),
        ("fsdp", "fsdp:shard=2,precision=float64", "different reference"),
        ("fsdp", "local_sgd:every=2", "give fsdp, tensor or pipeline"),
        ("fsdp", "parameter_server", "give fsdp, tensor or pipeline"),
    ],
)
def test_refused(ranks: Any, layout: str, reference: str, words: str) -> None:
    """In one line, on every rank, and before anything has run."""

    for found in ranks(2, refusal, layout, reference):
        assert words in found
        assert "\n" not in found


def test_refused_before_ranks_start() -> None:
    """`everyrank verify --reference`, and `verify(..., reference=...)` with a layout as text or as one."""
    source, launch = Source("digits"), Launch(processes=2)
    for reference in ("fsdp:meta=true", parse_layout("fsdp")):
        with pytest.raises(LayoutError, match="different reference"):
            verify(source, [parse_layout("fsdp")], launch, reference=reference)
    with pytest.raises(LayoutError, match="give one of single"):
        verify(source, [parse_layout("fsdp")], launch, reference="nothing")


def refusal(world: World, layout: str, reference: str) -> str:
    workload = zoo.workload("tied")
    case = parity_case(workload, *open_data(workload, world), steps=4, reference=parse_layout(reference))
    with pytest.raises(LayoutError) as error:
        check_layout(case, parse_layout(layout), world, f"refused/{reference}")
    left_out = check_layout(case, parse_layout(layout), world, f"left out/{reference}", explicit=False)[0]
    assert left_out.status == "not_verified"
    return str(error.value)


def little_room(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """A loss for which three samples are as many as there is memory for."""
    if len(output) > 3:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")
    return zoo.squared(output, target)


def check_with_little_room(world: World, name: str, texts: list[str]) -> list[Any]:
    workload = zoo.workload(name, loss=little_room, metrics={}, eval_batch=3, model=zoo.uncounted_model)
    if name == "norm":
        workload = zoo.workload(name, loss=little_room, metrics={}, eval_batch=3)
    case = parity_case(workload, *open_data(workload, world), steps=4)
    found = [(check_layout(case, parse_layout(t), world, f"room/{t}")[0], sorted(case.segments)) for t in texts]
    # three ranks would have the three parts of single themselves
    assert case.has_batch_norm or single_like(case, parse_layout("ddp"), "float64", 3).accumulate == 4
    return found


def test_the_reference_accumulates_where_its_batch_does_not_fit(ranks: Any) -> None:
    """Into other parts than the layout's, of which a loss that is a mean would be the same."""
    texts = ["ddp:accumulate=2,precision=float64", "ddp:accumulate=3,precision=float64"]
    (first, kinds), (second, all_kinds) = ranks(2, check_with_little_room, "frozen", texts)[0]
    assert first.status == second.status == "equal", (first, second)
    assert any("did not fit" in check for check in first.checks)
    assert kinds == ["single:accumulate=3,precision=float64"]  # not 2: seven samples in two parts do not fit
    assert all_kinds == kinds  # the six parts of ddp:accumulate=3 are others
    [(refused, _)] = ranks(2, check_with_little_room, "norm", ["ddp"])[0]
    assert refused.status == "not_verified"  # over parts of the batch its statistics are others
    assert OutOfMemoryError.exit_status == 3
    assert re.search(r"out of memory .* \(could not allocate 4096 bytes\)\. The parameters take 0 MiB", refused.reason)
