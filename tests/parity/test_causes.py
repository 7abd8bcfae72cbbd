"""Parity names the cause of a difference between ranks and one device. Correct code causes no false alarm."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from everyrank import parse_layout
from everyrank.loop import open_data
from everyrank.parallel.mesh import open_mesh
from everyrank.parity import ParityCase, cache, check_layout, parity_case
from everyrank.parity.cache import load_reference, save_reference
from everyrank.parity.samples import check_samples, spread_indices
from everyrank.parity.trace import Trace, trace
from everyrank.record import Parity
from everyrank.workload import Source
from everyrank.workload.find import load
from everyrank.world import World

_COUNTER = itertools.count()


def check(world: World, key: str, workload: Any, layouts: Sequence[str], steps: int, **options: Any) -> list[Parity]:
    """Return the parity of each layout. It runs in the ranks."""
    case = parity_case(workload, *open_data(workload, world), steps, **options)
    return [check_layout(case, parse_layout(text), world, f"{key}/{text}")[0] for text in layouts]


def parity_of(ranks: Any, workload: Any, layout: str = "ddp", steps: int = 8, count: int = 2, **options: Any) -> Parity:
    """Return the parity of rank 0. Its status is the same on all ranks."""
    args = f"causes/{next(_COUNTER)}", workload, [layout], steps
    rank_results = ranks(count, lambda world: check(world, *args, **options))
    assert all(result[0].status == rank_results[0][0].status for result in rank_results)
    return rank_results[0][0]


def contrastive(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Contrast each sample with all others of the batch, as SimCLR does."""
    embedding, noisy_embedding = F.normalize(output, dim=1), F.normalize(output + 0.1 * target, dim=1)
    labels = torch.arange(len(embedding))
    return F.cross_entropy(embedding @ noisy_embedding.T / 0.5, labels, reduction="sum"), len(embedding)


def mean_times_one(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Return a mean with the number of its terms. For two half batches, the total is twice as large."""
    return (output - target).square().mean(), target.numel()


def less_the_mean(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Use the mean over the batch inside of a sum over samples."""
    return (output - output.mean(0) - target).square().sum(), target.numel()


@pytest.mark.parametrize(
    ("loss", "expected_cause"),
    [
        (contrastive, "depends on the whole batch"),
        (mean_times_one, "mean over its batch"),
        (less_the_mean, "depends on the whole batch"),
    ],
)
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_loss_that_depends_on_the_batch_is_named(ranks: Any, loss: Any, expected_cause: str, layout: str) -> None:
    """The cause is the loss. It is not that ranks do not read samples, because they read them all."""
    parity = parity_of(ranks, zoo.workload("frozen", loss=loss), layout)
    assert parity.status == "different"
    assert expected_cause in (parity.cause or "")
    assert "do not read" not in (parity.cause or "")


class CentredModel(zoo.FrozenModel):
    """A model that subtracts the mean of its batch. everyrank cannot synchronize this custom batch norm."""

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values - values.mean(0))


def test_model_that_depends_on_the_batch_is_named(ranks: Any) -> None:
    parity = parity_of(ranks, zoo.workload("frozen", model=CentredModel))
    assert parity.status == "different"
    assert "depends on the rest of its batch" in (parity.cause or "")


def pad_to_longest(samples: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Cut the samples to different lengths, and pad them to the longest of the batch."""
    inputs = [sample[0][: 2 + int(abs(sample[0][0]) * 10) % 4] for sample in samples]
    padded = nn.utils.rnn.pad_sequence(inputs, batch_first=True, padding_value=1.0)
    return padded, torch.stack([sample[1] for sample in samples])


class OfAnyLength(nn.Module):
    """A model that takes the mean over a sequence, including its padding."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 2)

    def forward(self, values: Tensor) -> Tensor:
        return self.head(values.mean(1, keepdim=True))


def mix(samples: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Apply mixup to the samples that are in one batch."""
    inputs, targets = torch.stack([sample[0] for sample in samples]), torch.stack([sample[1] for sample in samples])
    return 0.7 * inputs + 0.3 * inputs.roll(1, 0), 0.7 * targets + 0.3 * targets.roll(1, 0)


def mix_at_random(samples: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Apply mixup with a random weight for each call."""
    weight = torch.rand(())
    inputs, targets = torch.stack([sample[0] for sample in samples]), torch.stack([sample[1] for sample in samples])
    return weight * inputs + (1 - weight) * inputs.flip(0), weight * targets + (1 - weight) * targets.flip(0)


@pytest.mark.parametrize(
    ("collate", "model", "expected_cause"),
    [
        (pad_to_longest, OfAnyLength, "collate pads"),
        (mix, zoo.FrozenModel, "collate mixes samples"),
        (mix_at_random, zoo.FrozenModel, "collate"),
    ],
)
def test_collate_that_depends_on_the_batch_is_named(ranks: Any, collate: Any, model: Any, expected_cause: str) -> None:
    """The cause is collate. It is neither the model nor the samples that the ranks read."""
    parity = parity_of(ranks, zoo.workload("frozen", collate=collate, model=model, blocks=None), "ddp")
    assert parity.status == "different"
    assert expected_cause in (parity.cause or ""), parity
    assert "do not read" not in (parity.cause or "")


def pad_in_validation(samples: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Pad only validation samples, which have different lengths. Training samples have one length."""
    if samples[0][2]:
        return pad_to_longest(samples)
    return torch.stack([sample[0] for sample in samples]), torch.stack([sample[1] for sample in samples])


class MarkedPoints(zoo.Points):
    """Points with a flag for validation samples."""

    def __init__(self, length: int, is_validation: bool) -> None:
        super().__init__(length)
        self.is_validation = is_validation

    def __getitem__(self, index: int) -> Any:
        return *super().__getitem__(index), self.is_validation


def test_cause_does_not_contradict_the_sample_check(ranks: Any) -> None:
    """The sample check finds that each sample is counted once. The cause does not deny that."""
    workload = zoo.workload(
        "frozen",
        model=OfAnyLength,
        blocks=None,
        collate=pad_in_validation,
        train_data=lambda: MarkedPoints(23, is_validation=False),
        eval_data=lambda: MarkedPoints(21, is_validation=True),
    )
    parity = parity_of(ranks, workload)
    assert parity.status == "different"
    assert "evaluation" in (parity.first_divergence or "")
    assert "collate pads" in (parity.cause or "")
    problems, text = ranks(2, run_sample_check, workload)[0]
    assert not problems
    assert "each counted once" in text


def test_compared_samples_include_the_last_one_of_a_large_dataset() -> None:
    """In float32, the last index of 33,554,436 samples is rounded up, and no sample has it."""
    assert spread_indices(2**25 + 4, 64)[-1] == 2**25 + 3
    assert spread_indices(3, 64) == [0, 1, 2]
    assert spread_indices(1, 64) == [0]
    assert spread_indices(0, 64) == []


def run_sample_check(world: World, workload: Any) -> tuple[list[str], str]:
    """Return the problems of the sample check and its text."""
    layout = parse_layout("ddp")
    return check_samples(workload, *open_data(workload, world), layout, open_mesh(layout, world))


def warmup_from_zero(optimizer: torch.optim.Optimizer) -> Any:
    """Return a schedule whose first learning rate is 0."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))


def test_gradients_are_compared_if_no_parameter_moves(ranks: Any) -> None:
    """A learning rate of 0 hides any gradient. Parity then compares gradients, and detects a wrong one."""
    workload = zoo.workload("frozen", "adamw", schedule=warmup_from_zero)
    parity = parity_of(ranks, workload, steps=1)
    assert parity.status == "equal"
    assert parity.scope == "only the gradients"
    unreduced = ranks(2, check_without_reduction, f"causes/{next(_COUNTER)}", workload, 1)[0]
    assert unreduced.status == "different"
    assert "tensor" in unreduced.first_divergence


def check_without_reduction(world: World, key: str, workload: Any, steps: int) -> Parity:
    """Return the parity of ddp whose ranks do not all-reduce their gradients."""
    from test_mutations import no_all_reduce

    case = parity_case(workload, *open_data(workload, world), steps)
    with no_all_reduce("ddp", world):
        return check_layout(case, parse_layout("ddp:precision=float64"), world, key)[0]


class ChaoticModel(nn.Module):
    """Nested sine functions. A rounding error in an update grows to a full-size error a few updates later."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)])

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = torch.sin(6 * layer(values))
        return values


def chaotic_workload() -> Any:
    """Return a workload in which rounding errors grow fast."""
    workload = zoo.workload("frozen", model=ChaoticModel, clip_norm=None, epochs=6)
    return dataclasses.replace(workload, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.02))


def test_growing_rounding_error_is_not_a_difference(ranks: Any) -> None:
    """The scope reports how many updates were compared.

    Mutations are still detected, also one that starts in the second epoch.
    """
    parity = parity_of(ranks, chaotic_workload(), steps=20, layout="ddp:precision=float64")
    assert parity.status == "equal", parity
    assert "rounding grows beyond" in (parity.scope or ""), parity
    for mutation in ("no_all_reduce", "epoch_not_set"):
        mutated = ranks(2, check_chaotic_with_mutation, mutation, f"causes/{next(_COUNTER)}")[0]
        assert mutated.status == "different", mutation


def check_chaotic_with_mutation(world: World, mutation: str, key: str) -> Parity:
    """Return the parity of the chaotic workload under this mutation."""
    import test_mutations

    workload = chaotic_workload()
    case = parity_case(workload, *open_data(workload, world), 20)
    with getattr(test_mutations, mutation)("ddp", world):
        return check_layout(case, parse_layout("ddp:precision=float64"), world, key)[0]


def test_layouts_after_a_refused_one_are_compared(ranks: Any) -> None:
    """If one layout is refused, the layouts after it are still compared."""
    parities = ranks(2, check, f"causes/{next(_COUNTER)}", zoo.workload("frozen"), ["context", "ddp"], 4)[0]
    assert [parity.status for parity in parities] == ["refused", "equal"]
    assert "sequence_dim" in (parities[0].reason or "")


def test_quick_check_reports_what_it_leaves_out(ranks: Any) -> None:
    """A quick check compares fewer updates, leaves out float32, and lists what it leaves out."""
    parity = parity_of(ranks, zoo.workload("frozen"), is_quick=True, steps=20)
    assert parity.scope == "6 updates"
    assert any("left out" in text for text in parity.checks)
    assert not any("float32" in text for text in parity.checks)


def check_with_cache(
    world: World, key: str, folder: str, lr: float, truncate_files: bool, loss_factor: str = "1"
) -> tuple[int, str]:
    """Return (number of runs of `single`, parity status) for a workload file with cached references."""
    import os
    from unittest import mock

    from everyrank.parity import reference
    from everyrank.workload import Source, load

    path = Path(folder, "workload.py")
    if world.rank == 0 and not path.exists():
        path.write_text(
            "import dataclasses, os, zoo, torch\n"
            "def workload(lr=0.1):\n"
            "    optimizer = lambda model: torch.optim.SGD(model.parameters(), lr=lr)\n"
            "    def loss(output, target):\n"
            "        total, count = zoo.squared_error(output, target)\n"
            "        return total * float(os.environ.get('FACTOR', 1)), count\n"
            "    return dataclasses.replace(zoo.workload('frozen'), optimizer=optimizer, loss=loss)\n"
        )
    torch.distributed.barrier(group=world.group)
    workload = load(Source(str(path), {"lr": lr}))
    runs: list[Any] = []
    original_trace = reference.trace

    def counted_trace(*args: Any, **options: Any) -> Any:
        runs.append(1)
        return original_trace(*args, **options)

    with (
        mock.patch.dict(os.environ, {"XDG_CACHE_HOME": folder, "FACTOR": loss_factor}),
        mock.patch.object(reference, "trace", counted_trace),
    ):
        if truncate_files and world.rank == 0:
            for file in Path(folder).rglob("*.safetensors"):
                file.write_bytes(file.read_bytes()[:-20])
        parity = check(world, key, workload, ["ddp"], 6, is_cached=True)[0]
    return len(runs), parity.status


def test_cache_without_an_absolute_folder_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a relative XDG_CACHE_HOME, nothing is read from the current folder, and nothing is written there."""
    names = ("loss_floors", "floors", "is_truncated", "reversed_differences", "evaluation_floors", "loss_scale")
    fields: dict[str, Any] = {**dict.fromkeys(names), "segments": [[]], "zero_gradient_masks": {}}
    run = Trace([1.0], [1.0], {}, [{"weight": torch.ones(2)}], True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save_reference("run.safetensors", run, fields)
    loaded = load_reference("run.safetensors")
    assert loaded is not None
    assert torch.equal(loaded[0].finals[0]["weight"], torch.ones(2))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", ".")
    assert load_reference("run.safetensors") is None
    save_reference("other.safetensors", run, fields)
    assert [path.name for path in tmp_path.rglob("*.safetensors")] == ["run.safetensors"]


def test_half_removed_package_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted installation leaves a folder without METADATA. The cache works all the same."""
    distributions = [SimpleNamespace(name=name, version=version) for name, version in ((None, None), ("a", "1"))]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: distributions)
    assert cache._packages.__wrapped__() == [("None", "None"), ("a", "1")]


def test_runs_of_single_are_cached(ranks: Any, tmp_path: Path) -> None:
    """The ranks share the runs of `single`, and the second check reads them from the cache.

    Another learning rate or a truncated file causes new runs.
    """
    num_runs: list[int] = []
    for lr, truncate_files in ((0.1, False), (0.1, False), (0.2, False), (0.1, True)):
        rank_results = ranks(2, check_with_cache, f"causes/{next(_COUNTER)}", str(tmp_path), lr, truncate_files)
        assert [status for _, status in rank_results] == ["equal", "equal"]
        num_runs.append(sum(runs for runs, _ in rank_results))
        if num_runs[-1]:
            # the two ranks share the eight runs, but not always equally
            assert min(runs for runs, _ in rank_results) >= 3
    assert num_runs == [8, 0, 8, 8]


def test_stale_cached_run_causes_no_difference(ranks: Any, tmp_path: Path) -> None:
    """The loss reads an environment variable, which is not part of the cache key.

    Parity runs `single` again before it calls a layout different.
    """
    checks = [
        ranks(2, check_with_cache, f"causes/{next(_COUNTER)}", str(tmp_path), 0.1, False, loss_factor)
        for loss_factor in ("1", "2", "2")
    ]
    assert [[status for _, status in rank_results] for rank_results in checks] == [["equal", "equal"]] * 3
    assert [bool(sum(runs for runs, _ in rank_results)) for rank_results in checks] == [True, True, False]


def test_replicas_that_diverge_in_an_earlier_segment_are_detected(ranks: Any) -> None:
    """Each segment restarts from the initial state of the rank. So replicas must be compared at the end of each one."""
    assert ranks(2, replicas_stay_equal) == [False, False]


def replicas_stay_equal(world: World) -> bool:
    """Return whether the replicas are equal. Rank 1 changes an unused buffer in the first of two segments."""
    from unittest import mock

    trace_module: Any = importlib.import_module("everyrank.parity.trace")
    workload = zoo.workload("frozen")
    case = parity_case(workload, *open_data(workload, world), 4)
    original = trace_module.run_updates
    calls: list[int] = []

    def updates_with_divergence(prepared: Any, *rest: Any) -> Any:
        calls.append(1)
        for loss_and_count in original(prepared, *rest):
            if len(calls) == 1 and prepared.world.rank == 1:
                prepared.model.get_buffer("offset").add_(1e-9)
            yield loss_and_count

    segments = [[update] for update in case.planned("float64")[0][:2]]
    with mock.patch.object(trace_module, "run_updates", updates_with_divergence):
        return trace_module.trace(case, parse_layout("ddp:precision=float64"), world, segments).replicas_equal


def test_case_evaluates_both_ends_of_the_validation_data() -> None:
    """The case evaluates the first and the last samples of the validation data."""
    workload = zoo.workload("frozen", eval_data=lambda: zoo.Points(102))
    assert workload.eval_data is not None
    case: ParityCase = parity_case(
        dataclasses.replace(workload, global_batch=4), workload.train_data(), workload.eval_data(), 4
    )
    assert case.eval_ends.samples == [*range(32), *range(72, 102)]


class AttentionWithDropout(zoo.FrozenModel):
    """A model that passes a probability to a dropout function, as attention in transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_dropout, self.scale = 0.1, 0.5
        self.layers.append(nn.Dropout(0.2))

    def forward(self, values: Tensor) -> Tensor:
        return F.dropout(super().forward(values), self.attention_dropout, self.training) * self.scale


def test_dropout_of_torch_is_set_to_0_in_functions_too() -> None:
    """Other numbers of a module stay."""
    workload = zoo.workload("frozen", model=AttentionWithDropout, dropout="torch")
    assert workload.eval_data is not None
    case = parity_case(workload, workload.train_data(), workload.eval_data(), 4)
    model: Any = case.workload.model()
    assert (model.attention_dropout, model.layers[3].p, model.scale) == (0.0, 0.0, 0.5)
    assert case.notes == ["dropout set to 0 in 2 modules"]


class Codebook(nn.Module):
    """Vector quantization. Forward moves the code vectors in a buffer to the means of their nearest inputs.

    The means are those of this rank, or of all ranks if `over_all`.
    """

    def __init__(self, over_all: bool) -> None:
        super().__init__()
        self.enter, self.leave, self.over_all = nn.Linear(5, 3), nn.Linear(3, 2), over_all
        self.register_buffer("codes", torch.randn(4, 3))

    def forward(self, values: Tensor) -> Tensor:
        encoded = self.enter(values)
        nearest = torch.cdist(encoded, self.codes).argmin(1)
        quantised = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                rows = F.one_hot(nearest, 4).to(encoded.dtype)
                counts, totals = rows.sum(0), rows.T @ encoded
                if self.over_all and dist.is_initialized():
                    dist.all_reduce(counts)
                    dist.all_reduce(totals)
                means = totals / counts.clamp(min=1.0)[:, None]
                self.codes.copy_(torch.where(counts[:, None] > 0, 0.9 * self.codes + 0.1 * means, self.codes))
        return self.leave(encoded + (quantised - encoded).detach())


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_buffer_that_forward_writes_is_named(ranks: Any, layout: str) -> None:
    """A buffer that each rank writes from its own samples is named.

    A buffer that is reduced over all ranks is equal, and the run of `single` does not hang.
    """
    points = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
    samples = torch.utils.data.TensorDataset(points, points[:, :2].clone())
    changes = {
        "train_data": lambda: samples,
        "eval_data": None,
        "metrics": {},
        "blocks": None,
        "global_batch": 8,
        "loss": zoo.squared_error,
    }
    local_workload = zoo.workload("frozen", model=lambda: Codebook(False), **changes)
    parity = parity_of(ranks, local_workload, layout)
    assert parity.status == "different"
    assert parity.first_divergence == "update 0, tensor codes (float64)"
    assert "Codebook writes codes in forward" in parity.cause
    reduced_workload = zoo.workload("frozen", model=lambda: Codebook(True), **changes)
    assert parity_of(ranks, reduced_workload, layout).status == "equal"


def test_bf16_rounding_is_not_taken_for_a_zero_learning_rate(ranks: Any) -> None:
    """Rounding in bf16 exceeds the movement of a few updates. The float64 run tells whether parameters move.

    This also holds for layouts that are compared after the bf16 layout.
    """
    workload = load(Source("digits", {}, None))
    for parity in ranks(2, lambda world: check(world, "bf16", workload, ["ddp:precision=bf16", "zero1"], 6))[0]:
        assert (parity.status, parity.scope) == ("equal", "6 updates")


class CachingModel(zoo.FrozenModel):
    """A model whose forward assigns a buffer that was None, and one whose shape depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", None)
        self.register_buffer("table", torch.zeros(1))

    def forward(self, values: Tensor) -> Tensor:
        self.positions, self.table = torch.arange(5), torch.ones(5)
        return super().forward(values)


def test_buffer_that_forward_creates_is_compared(ranks: Any) -> None:
    """A buffer that is new, or has a new shape, has no initial value to compare with. The ranks do not fail."""
    workload = zoo.workload("frozen", model=CachingModel)
    for layout in ("ddp", "fsdp"):
        assert parity_of(ranks, workload, layout, steps=3).status == "equal", layout
    first_loss, loss_of_next_segment = ranks(2, losses_of_two_segments, workload)[0]
    assert first_loss == loss_of_next_segment


def losses_of_two_segments(world: World, workload: Any) -> list[float]:
    """Return the losses of the first update, run twice from the initial state."""
    case = parity_case(workload, *open_data(workload, world), 3)
    [[update, *_]] = case.planned("float64")
    return trace(case, parse_layout("ddp:precision=float64"), world, [[update], [update]]).losses


class CountsOnRank1(zoo.FrozenModel):
    """A model that changes a buffer on rank 1 only."""

    def forward(self, values: Tensor) -> Tensor:
        if self.training and dist.is_initialized() and dist.get_rank() == 1:
            self.calls += 1
        return super().forward(values)


def test_replica_that_differs_on_another_rank_is_named(ranks: Any) -> None:
    """Rank 0 equals one device, so neither the loss nor a tensor of rank 0 is the cause."""
    parity = parity_of(ranks, zoo.workload("frozen", model=CountsOnRank1), steps=3, is_quick=True)
    assert parity.first_divergence == "the replicas of calls, bit by bit (float64)"
    assert "buffers are not (calls): CountsOnRank1 writes calls in forward" in (parity.cause or "")


class InfiniteInParts(zoo.FrozenModel):
    """A model whose output is infinite for the part of a batch that a rank reads."""

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values) / (1.0 if len(values) in (7, 13) else 0.0)


def test_infinite_loss_of_a_layout_is_a_difference(ranks: Any) -> None:
    """The loss of one device is finite. The check does not end, so layouts after this one are compared, too."""
    workload = zoo.workload("frozen", model=InfiniteInParts)
    parities = ranks(2, check, f"causes/{next(_COUNTER)}", workload, ["ddp", "single"], 2)[0]
    assert [parity.status for parity in parities] == ["different", "equal"]
    assert parities[0].first_divergence == "update 0, loss (float64)"
    assert "first bad tensor: output of the model (InfiniteInParts); in one process" in (parities[0].cause or "")


class NoisyModel(zoo.FrozenModel):
    """A model that draws random numbers in forward."""

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values + torch.randn_like(values))


def list_of_targets(samples: Sequence[Any]) -> tuple[Tensor, list[Tensor]]:
    """Return the targets as a list with a tensor for each sample, as for boxes in images."""
    return torch.stack([sample[0] for sample in samples]), [sample[1] for sample in samples]


def squared_error_of_list(output: Tensor, target: list[Tensor]) -> tuple[Tensor, int]:
    """Return the squared error over a list of targets."""
    return torch.stack([(row - other).square().sum() for row, other in zip(output, target, strict=True)]).sum(), len(
        target
    )


def test_cause_is_found_for_a_list_of_targets(ranks: Any) -> None:
    """A part of a batch has fewer tensors than the batch."""
    workload = zoo.workload(
        "frozen", model=NoisyModel, collate=list_of_targets, loss=squared_error_of_list, eval_data=None, metrics={}
    )
    parity = parity_of(ranks, workload, steps=2, is_quick=True)
    assert "the model draws random numbers" in (parity.cause or ""), parity


class PointsWithNoise(zoo.Points):
    """Points that draw noise from a generator without a seed, which everyrank does not know."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.generator = np.random.default_rng()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        values, target = super().__getitem__(index)
        return values + float(self.generator.normal()), target


_calls_of_loss = itertools.count(1)


def growing_loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Weight the loss with the number of calls."""
    return (output - target).square().sum() * next(_calls_of_loss), target.numel()


@pytest.mark.parametrize(
    ("changes", "expected_cause"),
    [
        ({"train_data": lambda: PointsWithNoise(23)}, "the dataset gives a sample other values when it is read again"),
        ({"loss": growing_loss}, "keeps state from one call to the next"),
    ],
)
def test_state_outside_of_the_model_is_named(ranks: Any, changes: dict[str, Any], expected_cause: str) -> None:
    """Neither collate nor a loss over the whole batch is the cause."""
    parity = parity_of(ranks, zoo.workload("frozen", **changes), steps=2, is_quick=True)
    assert expected_cause in (parity.cause or ""), parity


class ScaledOnRank1(zoo.FrozenModel):
    """A model whose output depends on the rank."""

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values) * (2.0 if dist.is_initialized() and dist.get_rank() else 1.0)


def test_loss_that_differs_before_tensors_is_the_first_divergence(ranks: Any) -> None:
    """The tensors of that update differ, too, as a consequence."""
    parity = parity_of(ranks, zoo.workload("frozen", model=ScaledOnRank1), steps=2, is_quick=True)
    assert parity.first_divergence == "update 0, loss (float64)"
    assert "the loss differs before any weight does" in (parity.cause or "")
