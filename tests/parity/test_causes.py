"""What a workload does that is no sum over samples is named as what it is; what is right raises no alarm."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from everyrank import parse_layout
from everyrank.loop import open_data
from everyrank.parallel.mesh import open_mesh
from everyrank.parity import ParityCase, check_layout, parity_case
from everyrank.parity.samples import check_samples
from everyrank.record import Parity
from everyrank.workload import Source
from everyrank.workload.find import load
from everyrank.world import World

_COUNTER = itertools.count()


def check(world: World, key: str, workload: Any, layouts: Sequence[str], steps: int, **options: Any) -> list[Parity]:
    subject = parity_case(workload, *open_data(workload, world), steps, **options)
    return [check_layout(subject, parse_layout(text), world, f"{key}/{text}")[0] for text in layouts]


def parity_of(ranks: Any, workload: Any, layout: str = "ddp", steps: int = 8, count: int = 2, **options: Any) -> Parity:
    """The parity, which is the same on all ranks."""
    calls = f"causes/{next(_COUNTER)}", workload, [layout], steps
    found = ranks(count, lambda world: check(world, *calls, **options))
    assert all(result[0].status == found[0][0].status for result in found)
    return found[0][0]


def contrastive(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Each sample against all others of the batch, as SimCLR does it."""
    one, other = F.normalize(output, dim=1), F.normalize(output + 0.1 * target, dim=1)
    return F.cross_entropy(one @ other.T / 0.5, torch.arange(len(one)), reduction="sum"), len(one)


def mean_times_one(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """A mean, and how many terms went into it: twice as much in two halves."""
    return (output - target).square().mean(), target.numel()


def less_the_mean(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """A statistic over the batch inside of a sum."""
    return (output - output.mean(0) - target).square().sum(), target.numel()


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (contrastive, "depends on the whole batch"),
        (mean_times_one, "mean over its batch"),
        (less_the_mean, "depends on the whole batch"),
    ],
)
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_losses_over_the_batch_are_named(ranks: Any, loss: Any, words: str, layout: str) -> None:
    """No word of samples that ranks do not read: they read them."""
    parity = parity_of(ranks, zoo.workload("frozen", loss=loss), layout)
    assert parity.status == "different"
    assert words in (parity.cause or "")
    assert "do not read" not in (parity.cause or "")


class Centred(zoo.FrozenModel):
    """A batch norm that is written by hand, which nobody synchronises."""

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values - values.mean(0))


def test_a_model_over_the_batch_is_named(ranks: Any) -> None:
    parity = parity_of(ranks, zoo.workload("frozen", model=Centred))
    assert parity.status == "different"
    assert "depends on the rest of its batch" in (parity.cause or "")


def pad_to_longest(samples: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Samples of their own length, which the padding makes longer."""
    inputs = [sample[0][: 2 + int(abs(sample[0][0]) * 10) % 4] for sample in samples]
    padded = nn.utils.rnn.pad_sequence(inputs, batch_first=True, padding_value=1.0)
    return padded, torch.stack([sample[1] for sample in samples])


class OfAnyLength(nn.Module):
    """The mean over a sequence, padding included."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 2)

    def forward(self, values: Tensor) -> Tensor:
        return self.head(values.mean(1, keepdim=True))


def mix(samples: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Mixup within the batch that happens to be read together."""
    inputs, targets = torch.stack([s[0] for s in samples]), torch.stack([s[1] for s in samples])
    return 0.7 * inputs + 0.3 * inputs.roll(1, 0), 0.7 * targets + 0.3 * targets.roll(1, 0)


def mix_at_random(samples: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Mixup with a share that is drawn anew in each call."""
    part = torch.rand(())
    inputs, targets = torch.stack([s[0] for s in samples]), torch.stack([s[1] for s in samples])
    return part * inputs + (1 - part) * inputs.flip(0), part * targets + (1 - part) * targets.flip(0)


@pytest.mark.parametrize(
    ("collate", "model", "words"),
    [
        (pad_to_longest, OfAnyLength, "collate pads"),
        (mix, zoo.FrozenModel, "collate mixes samples"),
        (mix_at_random, zoo.FrozenModel, "collate"),
    ],
)
def test_collate_is_named(ranks: Any, collate: Any, model: Any, words: str) -> None:
    """Not the model, and not the samples that ranks read."""
    parity = parity_of(ranks, zoo.workload("frozen", collate=collate, model=model, blocks=None), "ddp")
    assert parity.status == "different"
    assert words in (parity.cause or ""), parity
    assert "do not read" not in (parity.cause or "")


def pads_when_evaluated(samples: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Of one length in training, where the first number says so; of their own in the evaluation."""
    if samples[0][2]:
        return pad_to_longest(samples)
    return torch.stack([sample[0] for sample in samples]), torch.stack([sample[1] for sample in samples])


class Marked(zoo.Points):
    """Points that know whether they are held out."""

    def __init__(self, length: int, held_out: bool) -> None:
        super().__init__(length)
        self.held_out = held_out

    def __getitem__(self, index: int) -> Any:
        return *super().__getitem__(index), self.held_out


def test_the_cause_does_not_contradict_the_audit(ranks: Any) -> None:
    """The audit says that each sample was counted once; the sentence under it must not say that it was not."""
    workload = zoo.workload(
        "frozen",
        model=OfAnyLength,
        blocks=None,
        collate=pads_when_evaluated,
        train_data=lambda: Marked(23, held_out=False),
        eval_data=lambda: Marked(21, held_out=True),
    )
    parity = parity_of(ranks, workload)
    assert parity.status == "different"
    assert "evaluation" in (parity.first_divergence or "")
    assert "collate pads" in (parity.cause or "")
    problems, text = ranks(2, audited, workload)[0]
    assert not problems
    assert "each counted once" in text


def audited(world: World, workload: Any) -> tuple[list[str], str]:
    layout = parse_layout("ddp")
    return check_samples(workload, *open_data(workload, world), layout, open_mesh(layout, world))


def from_zero(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))


def test_nothing_moved_is_not_equal(ranks: Any) -> None:
    """A learning rate of 0 hides any gradient: the gradients are compared then, and a wrong one is seen."""
    workload = zoo.workload("frozen", "adamw", schedule=from_zero)
    parity = parity_of(ranks, workload, steps=1)
    assert parity.status == "equal"
    assert parity.scope == "only the gradients"
    wrong = ranks(2, without_reduction, f"causes/{next(_COUNTER)}", workload, 1)[0]
    assert wrong.status == "different"
    assert "tensor" in wrong.first_divergence


def without_reduction(world: World, key: str, workload: Any, steps: int) -> Parity:
    from test_mutations import no_all_reduce

    subject = parity_case(workload, *open_data(workload, world), steps)
    with no_all_reduce("ddp", world):
        return check_layout(subject, parse_layout("ddp:precision=float64"), world, key)[0]


class Folding(nn.Module):
    """Waves of waves: the last bit of an update is all of it a few updates later."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)])

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = torch.sin(6 * layer(values))
        return values


def chaotic() -> Any:
    workload = zoo.workload("frozen", model=Folding, clip_norm=None, epochs=6)
    return dataclasses.replace(workload, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.02))


def test_rounding_that_grows_is_no_difference(ranks: Any) -> None:
    """The row says how far it was compared; a mistake is still found, also one that begins with the second epoch."""
    parity = parity_of(ranks, chaotic(), steps=20, layout="ddp:precision=float64")
    assert parity.status == "equal", parity
    assert "rounding grows beyond" in (parity.scope or ""), parity
    for mutation in ("no_all_reduce", "epoch_not_set"):
        found = ranks(2, check_mutated, mutation, f"causes/{next(_COUNTER)}")[0]
        assert found.status == "different", mutation


def check_mutated(world: World, mutation: str, key: str) -> Parity:
    import test_mutations

    workload = chaotic()
    subject = parity_case(workload, *open_data(workload, world), 20)
    with getattr(test_mutations, mutation)("ddp", world):
        return check_layout(subject, parse_layout("ddp:precision=float64"), world, key)[0]


def test_a_layout_that_is_refused_keeps_the_others(ranks: Any) -> None:
    found = ranks(2, check, f"causes/{next(_COUNTER)}", zoo.workload("frozen"), ["context", "ddp"], 4)[0]
    assert [parity.status for parity in found] == ["refused", "equal"]
    assert "sequence_dim" in (found[0].reason or "")


def test_quick_says_what_it_leaves_out(ranks: Any) -> None:
    parity = parity_of(ranks, zoo.workload("frozen"), is_quick=True, steps=20)
    assert parity.scope == "6 updates"
    assert any("left out" in text for text in parity.checks)
    assert not any("float32" in text for text in parity.checks)


def kept(world: World, key: str, folder: str, lr: float, spoil: bool, factor: str = "1") -> tuple[int, str]:
    """(how many runs of `single` were made, the status): a file of the person's, whose references are kept."""
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
            "        total, count = zoo.squared(output, target)\n"
            "        return total * float(os.environ.get('FACTOR', 1)), count\n"
            "    return dataclasses.replace(zoo.workload('frozen'), optimizer=optimizer, loss=loss)\n"
        )
    torch.distributed.barrier(group=world.group)
    workload = load(Source(str(path), {"lr": lr}))
    runs: list[Any] = []
    original = reference.trace

    def counted(*arguments: Any, **options: Any) -> Any:
        runs.append(1)
        return original(*arguments, **options)

    with (
        mock.patch.dict(os.environ, {"XDG_CACHE_HOME": folder, "FACTOR": factor}),
        mock.patch.object(reference, "trace", counted),
    ):
        if spoil and world.rank == 0:
            for file in Path(folder).rglob("*.safetensors"):
                file.write_bytes(file.read_bytes()[:-20])
        found = check(world, key, workload, ["ddp"], 6, is_cached=True)[0]
    return len(runs), found.status


def test_runs_of_single_are_kept(ranks: Any, tmp_path: Path) -> None:
    """Spread over the ranks the first time, read the second, made anew for another learning rate or a broken file."""
    made: list[int] = []
    for lr, spoil in ((0.1, False), (0.1, False), (0.2, False), (0.1, True)):
        found = ranks(2, kept, f"causes/{next(_COUNTER)}", str(tmp_path), lr, spoil)
        assert [status for _, status in found] == ["equal", "equal"]
        made.append(sum(runs for runs, _ in found))
        if made[-1]:
            assert min(runs for runs, _ in found) >= 3  # of eight: no rank waits for another to do them all
    assert made == [8, 0, 8, 8]


def test_a_kept_run_does_not_convict(ranks: Any, tmp_path: Path) -> None:
    """A loss that depends on what no hash sees: single is run anew before a row is called different."""
    found = [
        ranks(2, kept, f"causes/{next(_COUNTER)}", str(tmp_path), 0.1, False, factor) for factor in ("1", "2", "2")
    ]
    assert [[status for _, status in each] for each in found] == [["equal", "equal"]] * 3
    assert [bool(sum(runs for runs, _ in each)) for each in found] == [True, True, False]


def test_replicas_that_part_before_a_restart_are_seen(ranks: Any) -> None:
    """Each segment begins with what a rank had at first: what parted in the one before has to be looked at before."""
    assert ranks(2, parted) == [False, False]


def parted(world: World) -> bool:
    """A buffer that nothing depends on becomes another on rank 1, in the first of two segments."""
    from unittest import mock

    module: Any = importlib.import_module("everyrank.parity.trace")
    workload = zoo.workload("frozen")
    subject = parity_case(workload, *open_data(workload, world), 4)
    original = module.run_updates
    calls: list[int] = []

    def updates(prepared: Any, *rest: Any) -> Any:
        calls.append(1)
        for share in original(prepared, *rest):
            if len(calls) == 1 and prepared.world.rank == 1:
                prepared.model.get_buffer("offset").add_(1e-9)
            yield share

    segments = [[update] for update in subject.planned("float64")[0][:2]]
    with mock.patch.object(module, "run_updates", updates):
        return module.trace(subject, parse_layout("ddp:precision=float64"), world, segments).replicas_equal


def test_subject_keeps_both_ends_of_the_evaluation() -> None:
    workload = zoo.workload("frozen", eval_data=lambda: zoo.Points(102))
    assert workload.eval_data is not None
    subject: ParityCase = parity_case(
        dataclasses.replace(workload, global_batch=4), workload.train_data(), workload.eval_data(), 4
    )
    assert subject.eval_ends.samples == [*range(32), *range(72, 102)]


class Codebook(nn.Module):
    """Vectors in a buffer that follow what is nearest to them, written in forward: of this rank, or of all ranks."""

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
def test_a_buffer_that_forward_writes(ranks: Any, layout: str) -> None:
    """Each rank from its own samples: the buffer is named. Over all ranks it is right, and `single` does not hang."""
    points = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
    samples = torch.utils.data.TensorDataset(points, points[:, :2].clone())
    changes = {
        "train_data": lambda: samples,
        "eval_data": None,
        "metrics": {},
        "blocks": None,
        "global_batch": 8,
        "loss": zoo.squared,
    }
    alone = zoo.workload("frozen", model=lambda: Codebook(False), **changes)
    parity = parity_of(ranks, alone, layout)
    assert parity.status == "different"
    assert parity.first_divergence == "update 0, tensor codes (float64)"
    assert "Codebook writes codes in forward" in parity.cause
    together = zoo.workload("frozen", model=lambda: Codebook(True), **changes)
    assert parity_of(ranks, together, layout).status == "equal"


def test_rounding_of_bf16_is_no_learning_rate_of_zero(ranks: Any) -> None:
    """It exceeds what a few updates move; float64 tells whether anything moves, also for the layouts after it."""
    workload = load(Source("digits", {}, None))
    for parity in ranks(2, lambda world: check(world, "bf16", workload, ["ddp:precision=bf16", "zero1"], 6))[0]:
        assert (parity.status, parity.scope) == ("equal", "6 updates")
