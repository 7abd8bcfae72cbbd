"""Streams of unknown lengths, each read by one rank: no hang, each sample once, and equal weights of all samples."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset, get_worker_info

from everyrank import Workload, parse_layout
from everyrank.data import OpenUpdates, Slice, epoch_of
from everyrank.data.uneven import UnevenKeys, UnevenReader, UnevenStreams
from everyrank.errors import WorkloadError
from everyrank.loop import open_data, run_updates
from everyrank.parity import check_layout, parity_case
from everyrank.parity.samples import check_samples
from everyrank.strategies import prepare
from everyrank.world import World, single_process_world
from processes import Cli

LENGTHS = [10, 17, 3]  # 5, 9 and 2 batches of two samples; in two streams, the last batch has one sample
BATCH = 6
UPDATES = 9  # in an epoch
COUNTS = [6, 5, 4, 4, 4, 2, 2, 2, 1]  # samples in each update of an epoch


class Points(IterableDataset[Any]):
    """Noisy points in an order that depends on the epoch. Like many streams, it splits itself by loader worker."""

    def __init__(self, number: int, length: int) -> None:
        self.number, self.length, self.epoch = number, length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(100 * self.epoch + self.number)
        info = get_worker_info()
        for index in torch.randperm(self.length, generator=generator).tolist():
            if info is None or index % info.num_workers == info.id:
                clean = torch.randn(4, generator=torch.Generator().manual_seed(1000 * self.number + index))
                yield clean + 0.1 * torch.rand(4), clean[:1] + self.number


class Streams:
    """Training data with one stream of each of these lengths."""

    def __init__(self, *lengths: int) -> None:
        self.streams = [Points(number, length) for number, length in enumerate(lengths)]


class Frames:
    """An endless stream of numbers, which `decode` turns into samples."""

    endless = True

    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[int]:
        frame = 0
        while True:
            yield (frame := frame + 1)

    def decode(self, frame: int) -> Any:
        return torch.full((4,), frame + 0.1 * self.number).cos() + torch.rand(4), torch.zeros(1)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def build_dropping() -> nn.Module:
    """Build a model with dropout. The masks depend on the sample's position in the streams, not on its rank."""
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)).double()


def build_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()


def squares(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return ((output - target) ** 2).sum(), len(target)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def workload_of(*lengths: int, **changes: Any) -> Workload:
    data = Streams(*(lengths or LENGTHS))
    workload = Workload("uneven", build, lambda: data, squares, momentum, BATCH, epochs=2, order="shard")
    return dataclasses.replace(workload, **changes)


def trained(world: World, layout_text: str, workers: int, changes: dict[str, Any]) -> Any:
    """Train, and return the global loss of each update, its sample count, and the last update of each epoch."""
    layout = parse_layout(layout_text + ":precision=float64" if ":" not in layout_text else layout_text)
    train_world = dataclasses.replace(
        single_process_world(world) if layout.axis is None else world, loader_workers=workers
    )
    workload = workload_of(**changes)
    data, _ = open_data(workload, train_world, counts_uneven=False)
    assert data.lengths is None
    prepared = prepare(workload, layout, train_world)
    updates = OpenUpdates(workload.epochs, workload.steps, workload.drop_last)
    local_losses: list[Tensor] = []
    last_updates: list[int] = []
    for local_loss, update in zip(run_updates(prepared, data, updates), updates, strict=True):
        local_losses.append(local_loss)
        assert update.step == len(local_losses) - 1
        last_updates += [update.step] * updates.ends_epoch(len(local_losses))
    totals = torch.stack(local_losses)
    if train_world.group is not None:
        dist.all_reduce(totals, group=train_world.group)
    assert updates.samples_before(updates.step) == totals[:, 1].sum()
    return (totals[:, 0] / totals[:, 1]).tolist(), totals[:, 1].tolist(), last_updates


@pytest.mark.parametrize(
    ("layout", "count", "workers"),
    [("ddp", 3, 0), ("zero1", 3, 0), ("fsdp", 3, 0), ("ddp", 2, 2), ("ddp:accumulate=2,precision=float64", 3, 0)],
)
def test_losses_do_not_depend_on_layout_ranks_and_workers(ranks: Any, layout: str, count: int, workers: int) -> None:
    """Ranks whose streams have ended add no samples. Incomplete batches are weighted by their number of samples."""
    [(losses, counts, last_updates)] = ranks(1, trained, "single", 0, {})
    assert counts == COUNTS * 2
    assert last_updates == [UPDATES - 1, 2 * UPDATES - 1]
    assert len(set(losses)) == 2 * UPDATES
    for rank_result in ranks(count, trained, layout, workers, {}):
        assert rank_result[0] == pytest.approx(losses, rel=1e-12)
        assert rank_result[1:] == (counts, last_updates)


@pytest.mark.parametrize(
    ("changes", "counts", "ends"),
    [
        ({"drop_last": True}, [6, 6], [0, 1]),
        ({"epochs": None, "steps": 11}, [*COUNTS, 6, 5], [8]),
        ({"epochs": None, "steps": UPDATES}, COUNTS, [8]),
    ],
)
def test_end_of_epochs_and_training(ranks: Any, changes: dict[str, Any], counts: list[int], ends: list[int]) -> None:
    """With drop_last, an epoch ends before the first incomplete batch. `steps` can end training within an epoch."""
    for rank_result in ranks(2, trained, "ddp", 0, changes):
        assert rank_result[1:] == (counts, ends)


def endless(world: World) -> Any:
    frames = Streams()
    frames.streams = [Frames(number) for number in range(3)]  # type: ignore[misc]
    return trained(
        world, "ddp" if world.size > 1 else "single", 0, {"train_data": lambda: frames, "steps": 5, "epochs": None}
    )


def test_endless_streams_are_read_for_the_given_number_of_steps(ranks: Any) -> None:
    """Random numbers drawn in `decode` depend on the sample, not on the rank that reads it."""
    [expected] = ranks(1, endless)
    assert expected[1:] == ([6.0] * 5, [])
    for rank_result in ranks(2, endless):
        assert rank_result[0] == pytest.approx(expected[0], rel=1e-12)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD without momentum over all parameters except `count`."""
    return torch.optim.SGD([parameter for name, parameter in model.named_parameters() if name != "count"], lr=0.05)


def with_join(world: World) -> list[Tensor]:
    """Train an epoch with DDP and torch's Join. The sample count is a parameter, so DDP all-reduces it too."""
    workload = workload_of(optimizer=plain_sgd)
    initial = prepare(workload, parse_layout("single:precision=float64"), world).full_state()
    model = build()
    model.load_state_dict(initial)
    count = nn.Parameter(torch.zeros((), dtype=torch.float64))
    model.register_parameter("count", count)
    ddp = DistributedDataParallel(model, process_group=world.group)
    optimizer = plain_sgd(model)
    reader = UnevenReader(UnevenStreams(None, Streams(*LENGTHS).streams, None, True), workload, Slice(world.rank, 3), 1)
    with Join([ddp]):
        for index in range(-(-LENGTHS[world.rank] // 2)):
            size, samples, _ = reader.__getitems__(UnevenKeys(0, index, 0))
            points, targets = (torch.stack(part).double() for part in zip(*samples, strict=True))
            ddp.zero_grad()
            (squares(ddp(points), targets)[0] + size * count).backward()
            # DDP divided both by the number of ranks, and ranks that have ended added zeros to both
            for name, parameter in model.named_parameters():
                if name != "count":
                    parameter.grad = parameter.grad / count.grad
            optimizer.step()
    return [parameter.detach().clone() for name, parameter in model.named_parameters() if name != "count"]


def without_join(world: World) -> list[Tensor]:
    """Train the same epoch with everyrank."""
    data, _ = open_data(workload_of(), world, counts_uneven=False)
    prepared = prepare(workload_of(optimizer=plain_sgd), parse_layout("ddp:precision=float64"), world)
    list(run_updates(prepared, data, OpenUpdates(1, None, drop_last=False)))
    return [parameter.detach().clone() for parameter in prepared.model.parameters()]


def test_parameters_match_those_of_torch_join(ranks: Any) -> None:
    """Torch's Join is the reference, with gradients divided by the reduced sample count."""
    for expected, actual in zip(ranks(3, with_join), ranks(3, without_join), strict=True):
        for expected_parameter, parameter in zip(expected, actual, strict=True):
            torch.testing.assert_close(expected_parameter, parameter, rtol=1e-12, atol=1e-14)


def ended_are_counted(world: World) -> Any:
    """Mutation: a rank whose stream has ended counts its last sample again."""
    import everyrank.data.uneven as module

    original = module.UnevenReader.__getitems__

    def getitems(reader: UnevenReader, keys: UnevenKeys) -> Any:
        size, samples, positions = original(reader, keys)
        return (size if len(reader.readers) == len(LENGTHS) else len(samples)), samples, positions

    return mock.patch.object(module.UnevenReader, "__getitems__", getitems)


def mean_over_ranks(world: World) -> Any:
    """Mutation: the gradient is the mean of the ranks' means, as plain DDP computes it."""
    import everyrank.strategies.step as module

    original = module.compute_loss

    def compute_loss(workload: Any, output: Any, batch: Any, mesh: Any, *rest: Any) -> Any:
        total, sums = original(workload, output, batch, mesh, *rest)
        size = max(batch.size, 1)
        return (total / size, torch.stack([sums[0] / size, sums[1] / size])) if world.size > 1 else (total, sums)

    return mock.patch.object(module, "compute_loss", compute_loss)


def last_batches_dropped(world: World) -> Any:
    """Mutation: an epoch ends on all ranks as soon as one stream ends."""
    import everyrank.data.uneven_updates as module

    is_over = property(lambda agreed: any(0 in sizes for sizes in agreed.sizes))
    return mock.patch.object(module.Agreed, "is_over", is_over)


def streams_shifted(world: World) -> Any:
    """Mutation: rank 2 reads the stream of rank 1."""
    import everyrank.data.uneven as module

    original = module.cut
    streams = lambda total, part: original(total, Slice(1, part.count) if part.count == world.size else part)  # noqa: E731
    return mock.patch.object(module, "cut", streams) if world.rank == 2 else contextlib.nullcontext()


def verified(world: World, mutation: str, layout_text: str = "ddp") -> tuple[str, list[str]]:
    """Return the parity status and the problems of the samples, with a mutation that does not change `single`."""
    workload = workload_of(model=build_dropping)
    data, _ = open_data(workload, world)
    assert (data.lengths, epoch_of(workload, data).updates) == (LENGTHS, UPDATES)
    case = parity_case(workload, data, None, 20, is_quick=True)
    layout = parse_layout(layout_text)
    with globals()[mutation](world) if mutation else contextlib.nullcontext():
        try:
            parity, _ = check_layout(case, layout, world, f"uneven/{mutation}/{layout}")
            problems, _ = check_samples(workload, data, None, layout, prepare(workload, layout, world).mesh)
        except WorkloadError as error:
            return "error", [str(error)]
    return parity.status, problems


def test_verify_covers_the_ends_of_streams(ranks: Any) -> None:
    """The compared updates include the last one of an epoch, which only one stream reaches."""
    for layout in ("ddp", "fsdp", "zero1:accumulate=2", "local_sgd:every=3", "ddp:compress=bf16"):
        assert ranks(3, verified, "", layout) == [("equal", [])] * 3


@pytest.mark.parametrize(
    ("mutation", "expected"),
    [
        ("ended_are_counted", "different"),
        ("mean_over_ranks", "different"),
        ("last_batches_dropped", "error"),
        ("streams_shifted", "different"),
    ],
)
def test_mutations_are_detected(ranks: Any, mutation: str, expected: str) -> None:
    """These are common mistakes if streams end at different times."""
    for status, problems in ranks(3, verified, mutation):
        assert status == expected
        if mutation in ("last_batches_dropped", "streams_shifted"):
            assert problems


def parity_with_batch_norm(world: World, layout_text: str) -> str:
    workload = workload_of(model=build_norm, train_data=lambda: Streams(10, 18, 4))
    data, _ = open_data(workload, world)
    case = parity_case(workload, data, None, 20, is_quick=True)
    return check_layout(case, parse_layout(layout_text), world, f"norms/{layout_text}")[0].status


def test_batch_norm_ignores_ranks_that_have_ended(ranks: Any) -> None:
    """Batch norm uses only the samples of the streams that continue, also with more streams than ranks."""
    assert ranks(3, parity_with_batch_norm, "ddp") == ["equal"] * 3
    assert ranks(2, parity_with_batch_norm, "fsdp") == ["equal"] * 2


def error_for_data(world: World, data: Any, changes: dict[str, Any]) -> str:
    workload = workload_of(train_data=lambda: data, **changes)
    try:
        train_data, _ = open_data(workload, world, counts_uneven=False)
        prepared = prepare(workload, parse_layout("ddp"), world)
        list(run_updates(prepared, train_data, OpenUpdates(1, None, workload.drop_last)))
    except WorkloadError as error:
        return str(error)
    return ""


class Holder:
    """Training data with these streams."""

    def __init__(self, streams: Any) -> None:
        self.streams = streams


@pytest.mark.parametrize(
    ("streams", "changes", "message"),
    [
        ([Points(0, 3)], {}, "has 1 streams; use --processes 1"),
        ([Points(0, 3), Points(1, 0)], {}, "streams [1] gave no sample"),
        ([Points(0, 0), Points(1, 0)], {}, "streams [0] gave no sample"),
        ([Points(0, 9), Points(1, 2)], {"drop_last": True}, "epoch 0 has no update"),
        ([Points(n, 3) for n in range(7)], {}, "some of the 7 streams"),
        (Points(0, 3), {}, "give a list of datasets"),
        ([3, 4], {}, "streams[0] (int): give an object"),
        ([], {}, "give a list of datasets"),
    ],
)
def test_unusable_streams_are_refused(ranks: Any, streams: Any, changes: dict[str, Any], message: str) -> None:
    """The error names the stream or the number of streams, and says what to change."""
    for text in ranks(2, error_for_data, Holder(streams), changes):
        assert message in text


def test_micro_batches_have_even_sizes() -> None:
    """Each sample is in one micro-batch, and the sizes of micro-batches differ by at most one."""
    workload = workload_of(model=build, global_batch=14)
    data = UnevenStreams(None, [range(100)] * 4, None, True)
    reader = UnevenReader(data, workload, Slice(0, 1), 4)
    cuts = [[reader._positions(number, UnevenKeys(2, 1, part)) for part in range(4)] for number in range(4)]
    for number, row in enumerate(cuts):
        assert flat(row) == list(range(data.takes(14)[number], 2 * data.takes(14)[number]))
    sizes = [sum(len(row[part]) for row in cuts) for part in range(4)]
    assert max(sizes) - min(sizes) <= 1


def test_stream_that_gives_no_sample_to_the_first_micro_batch_is_not_empty() -> None:
    """The dummy sample is then the first one of the stream, which a later micro-batch still reads."""
    workload = workload_of(model=build, global_batch=4)
    data = UnevenStreams(None, [Points(number, 8) for number in range(3)], None, True)
    for first_epoch in (0, 1):  # a training may begin or resume in any epoch
        reader = UnevenReader(data, workload, Slice(1, 2), 2)
        keys = [UnevenKeys(first_epoch, update, part) for update in range(8) for part in range(2)]
        read = [reader.__getitems__(key) for key in keys]
        assert [size for size, _, _ in read] == [0, 1] * 8
        assert all(len(samples) == 1 for _, samples, _ in read)
        assert torch.equal(read[0][1][0][0], read[1][1][0][0])
        assert len({float(samples[0][0][0]) for size, samples, _ in read if size}) == 8
    whole = UnevenReader(data, workload, Slice(2, 3), 1)
    expected = [whole.__getitems__(UnevenKeys(1, update, 0))[1][0][0] for update in range(8)]
    assert torch.equal(torch.stack([samples[0][0] for size, samples, _ in read if size]), torch.stack(expected))


def flat(row: list[range]) -> list[int]:
    return [position for part in row for position in part]


WORKLOAD = """
import torch
from test_uneven import Streams, build_dropping, momentum, squares
from everyrank import Workload

data = Streams(10, 17, 3)
workload = Workload("uneven", build_dropping, lambda: data, squares, momentum, 6,
                    eval_data=lambda: data.streams[2], epochs=2, order="shard")
"""


def logged_losses(folder: Path) -> list[tuple[str, ...]]:
    """Return the epoch, the number of terms and the loss of each row of log.csv."""
    rows = [line.split(",") for line in (folder / "log.csv").read_text().splitlines()[1:]]
    return [(epoch, terms, f"{float(loss):.9f}") for _, epoch, loss, _, terms, *_ in rows]


def test_resume_in_the_middle_of_streams(cli: Cli, tmp_path: Path) -> None:
    """A run resumes with a different layout and number of ranks. Its log equals that of an uninterrupted run."""
    (tmp_path / "w.py").write_text(WORKLOAD)
    args = ("train", "w.py", "--device", "cpu")
    uninterrupted = cli(tmp_path, *args, "--layout", "ddp:precision=float64", "--processes", 3, "--out", "whole")
    assert uninterrupted.status == 0, uninterrupted
    assert "18 updates" in uninterrupted.out
    first_part = cli(
        tmp_path, *args, "--layout", "ddp:precision=float64", "--processes", 3, "--steps", 5, "--out", "part"
    )
    assert first_part.status == 0, first_part
    inspected = cli(tmp_path, "checkpoint", "inspect", "part")
    assert "0 + 5 updates" in inspected.out
    resumed = cli(tmp_path, *args, "--layout", "fsdp:precision=float64", "--processes", 2, "--out", "part", "--resume")
    assert resumed.status == 0, resumed
    assert "resuming after update 5, from" in resumed.out
    assert logged_losses(tmp_path / "part") == logged_losses(tmp_path / "whole")
    assert [row[1] for row in logged_losses(tmp_path / "whole")] == [str(float(count)) for count in COUNTS * 2]
    fewer_epochs = cli(tmp_path, *args, "--epochs", 1, "--out", "part", "--resume")
    assert fewer_epochs.status == 2, fewer_epochs
    assert "2 epochs and 0 updates are done" in fewer_epochs.err
