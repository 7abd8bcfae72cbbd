"""Layouts are compared with a reference layout other than `single`. One device may not have memory for the model."""

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
    """Return the parity of each layout relative to the reference layout."""
    # AdamW and clipping would hide a gradient of the wrong scale, so a mutation runs without them
    workload = zoo.workload("decoder", "sgd", clip_norm=None) if mutation else zoo.workload("decoder", "adamw")
    reference_layout = parse_layout(reference)
    case = parity_case(workload, *open_data(workload, world), steps=6, is_quick=True, reference=reference_layout)
    parities: list[Parity] = []
    for text in texts:
        layout = parse_layout(text)
        key = f"{reference}/{text}/{mutation}"
        with mock.patch.object(file_backed, "_SMALLEST", 1):
            ensure_references(case, dataclasses.replace(layout, precision="float64"), world, f"{key}/before")
            patch = _MUTATIONS[mutation](layout.strategy, world) if mutation else contextlib.nullcontext()
            with patch:
                parities.append(check_layout(case, layout, world, key)[0])
    return parities


@pytest.mark.parametrize(
    ("reference", "texts"),
    [
        ("fsdp:meta=true", ["tensor:meta=true", "pipeline:meta=true", "ddp", "single"]),
        ("tensor:meta=true", ["fsdp:meta=true"]),
        ("pipeline:meta=true", ["fsdp:meta=true"]),
        ("single:accumulate=3", ["zero1"]),
    ],
)
def test_equal_to_a_reference_layout(ranks: Any, reference: str, texts: list[str]) -> None:
    """Tensors, losses and validation sums are equal. The scope names the reference layout."""
    for parities in ranks(2, check, reference, texts):
        for parity in parities:
            assert parity.status == "equal", parity
            assert parity.max_relative_difference is not None
            assert parity.max_relative_difference <= 1e-10
            assert parity.reference == reference
            assert parity.scope is not None
            assert parity.scope.endswith(f"compared with {reference}")


@pytest.mark.parametrize(
    ("text", "mutation", "expected_cause"),
    [("ddp", "sum for mean", "2 times that of one device"), ("ddp", "same slice", "were read by no rank")],
)
def test_mutation_is_detected_without_single(ranks: Any, text: str, mutation: str, expected_cause: str) -> None:
    """The mistake and its cause are found without a run on one device."""
    parity = ranks(2, check, "tensor:meta=true", [text], mutation)[0][0]
    assert parity.status == "different"
    assert parity.first_divergence
    assert expected_cause in (parity.cause or ""), parity
    assert parity.reference == "tensor:meta=true"


CUSTOM_PARALLELIZE = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

def parallelize(model, mesh):
    return fully_shard(model, mesh=mesh["data"])

def without_mean(model, mesh):
    return fully_shard(model, mesh=mesh["data"]).set_gradient_divide_factor(1.0) or model
"""


def test_custom_parallelize_is_compared_with_a_reference_layout(ranks: Any, tmp_path: Path) -> None:
    """Gradients are compared first. The number of ranks reveals the cause without a run on one device."""
    path = tmp_path / "own.py"
    path.write_text(CUSTOM_PARALLELIZE)
    correct, wrong = ranks(2, check, "tensor:meta=true", [f"{path}:data=2", f"{path}:without_mean:data=2"])[0]
    assert correct.status == "equal", correct
    assert correct.reference == wrong.reference == "tensor:meta=true"
    assert any(check.startswith("gradients, float64") for check in correct.checks)
    assert wrong.status == "different"
    assert "2 times that of one device" in (wrong.cause or ""), wrong


def measure_references(world: World) -> list[Any]:
    """Return zero-gradient masks, gradients and moved tensors of `single` and of sharded references."""
    workload = zoo.workload("tied", "sgd")  # some of its gradients are zero except for rounding
    measurements: list[Any] = []
    for reference in (None, parse_layout("fsdp"), parse_layout("fsdp:meta=true")):
        case = parity_case(workload, *open_data(workload, world), steps=4, reference=reference)
        ensure_references(case, parse_layout("ddp:precision=float64"), world, f"zero_gradient_masks/{reference}")
        for measured in case.references.values():
            zero_gradient_masks = {name: mask.sum().item() for name, mask in measured.zero_gradient_masks.items()}
            moved_names = [sorted(moved) for moved in measured.trace.moved]
            measurements.append((zero_gradient_masks, measured.trace.gradients, moved_names))
    return measurements


def test_sharded_reference_measures_the_same_as_single(ranks: Any) -> None:
    """Sharded gradients are gathered. So gradients that are zero except for rounding are known."""
    single, *others = ranks(2, measure_references)[0]
    assert single[0]
    for zero_gradient_masks, gradients, moved in others:
        assert zero_gradient_masks == single[0]
        assert moved == single[2]
        assert gradients.keys() == single[1].keys()
        for name, gradient in gradients.items():
            assert torch.allclose(gradient, single[1][name], atol=1e-14), name


@pytest.mark.parametrize(
    ("layout", "reference", "expected_text"),
    [
        ("fsdp", "fsdp:meta=true", "different reference"),
        ("fsdp", "fsdp:shard=2,precision=float64", "different reference"),
        ("fsdp", "local_sgd:every=2", "give fsdp, tensor or pipeline"),
        ("fsdp", "parameter_server", "give fsdp, tensor or pipeline"),
    ],
)
def test_unsupported_reference_is_refused(ranks: Any, layout: str, reference: str, expected_text: str) -> None:
    """Every rank refuses with one line, before any run."""
    for message in ranks(2, refusal, layout, reference):
        assert expected_text in message
        assert "\n" not in message


def test_verify_refuses_a_reference_before_ranks_start() -> None:
    """This holds for `verify(..., reference=...)` with a layout as text or as an object."""
    source, launch = Source("digits"), Launch(processes=2)
    for reference in ("fsdp:meta=true", parse_layout("fsdp")):
        with pytest.raises(LayoutError, match="different reference"):
            verify(source, [parse_layout("fsdp")], launch, reference=reference)
    with pytest.raises(LayoutError, match="give one of single"):
        verify(source, [parse_layout("fsdp")], launch, reference="nothing")


def refusal(world: World, layout: str, reference: str) -> str:
    """Return the message of the refusal. A layout that is not explicit is skipped."""
    workload = zoo.workload("tied")
    case = parity_case(workload, *open_data(workload, world), steps=4, reference=parse_layout(reference))
    with pytest.raises(LayoutError) as error:
        check_layout(case, parse_layout(layout), world, f"refused/{reference}")
    skipped = check_layout(case, parse_layout(layout), world, f"left out/{reference}", explicit=False)[0]
    assert skipped.status == "not_verified"
    return str(error.value)


def loss_with_memory_for_three_samples(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Return the squared loss. It raises an out-of-memory error for more than three samples."""
    if len(output) > 3:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")
    return zoo.squared_error(output, target)


def check_with_little_memory(world: World, name: str, texts: list[str]) -> list[Any]:
    """Return (parity, references that have run so far) of each layout."""
    workload = zoo.workload(
        name, loss=loss_with_memory_for_three_samples, metrics={}, eval_batch=3, model=zoo.model_without_counter
    )
    if name == "norm":
        workload = zoo.workload(name, loss=loss_with_memory_for_three_samples, metrics={}, eval_batch=3)
    case = parity_case(workload, *open_data(workload, world), steps=4)
    results = [
        (check_layout(case, parse_layout(text), world, f"room/{text}")[0], sorted(case.segments)) for text in texts
    ]
    # `ddp` on three ranks has three parts, so the reference uses four micro-batches
    assert case.has_batch_norm or single_like(case, parse_layout("ddp"), "float64", 3).accumulate == 4
    return results


def test_reference_accumulates_if_its_batch_does_not_fit(ranks: Any) -> None:
    """Its micro-batches are different from those of the layout, so a loss that is a mean would be detected."""
    texts = ["ddp:accumulate=2,precision=float64", "ddp:accumulate=3,precision=float64"]
    (first, first_references), (second, all_references) = ranks(2, check_with_little_memory, "frozen", texts)[0]
    assert first.status == second.status == "equal", (first, second)
    assert any("did not fit" in check for check in first.checks)
    # accumulate=2 does not fit: one of the two micro-batches has four samples
    assert first_references == ["single:accumulate=3,precision=float64"]
    assert all_references == first_references  # ddp:accumulate=3 has six micro-batches, so the reference can stay
    [(refused, _)] = ranks(2, check_with_little_memory, "norm", ["ddp"])[0]
    assert refused.status == "not_verified"  # batch norm over micro-batches has different statistics
    assert OutOfMemoryError.exit_status == 3
    assert re.search(r"out of memory .* \(could not allocate 4096 bytes\)\. The parameters take 0 MiB", refused.reason)
