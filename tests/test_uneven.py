"""Streams of lengths that nobody knows, each read by one rank: no hang, each sample once, and all weigh the same."""

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

LENGTHS = [10, 17, 3]  # 5, 9 and 2 batches of two, of which two end in a batch of one
BATCH = 6
UPDATES = 9
COUNTS = [6, 5, 4, 4, 4, 2, 2, 2, 1]


class Points(IterableDataset[Any]):
    """Points in an order of each epoch, with noise: a stream that divides itself by loader worker, as many do."""

    def __init__(self, number: int, length: int) -> None:
        self.number, self.length, self.epoch = number, length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(100 * self.epoch + self.number)
        info = get_worker_info()
        for place in torch.randperm(self.length, generator=generator).tolist():
            if info is None or place % info.num_workers == info.id:
                clean = torch.randn(4, generator=torch.Generator().manual_seed(1000 * self.number + place))
                yield clean + 0.1 * torch.rand(4), clean[:1] + self.number


class Streams:
    def __init__(self, *lengths: int) -> None:
        self.streams = [Points(number, length) for number, length in enumerate(lengths)]


class Frames:
    """An endless stream, which is decoded."""

    endless = True

    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[int]:
        place = 0
        while True:
            yield (place := place + 1)

    def decode(self, place: int) -> Any:
        return torch.full((4,), place + 0.1 * self.number).cos() + torch.rand(4), torch.zeros(1)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def build_dropping() -> nn.Module:
    """By its place in the streams a sample is known to dropout, whichever rank and micro-batch read it."""
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
    """(loss of each update, its count, updates at which an epoch ended, whether replicas are equal) of a training."""
    layout = parse_layout(layout_text + ":precision=float64" if ":" not in layout_text else layout_text)
    here = dataclasses.replace(single_process_world(world) if layout.axis is None else world, loader_workers=workers)
    workload = workload_of(**changes)
    data, _ = open_data(workload, here, counts_uneven=False)
    assert data.lengths is None
    prepared = prepare(workload, layout, here)
    updates = OpenUpdates(workload.epochs, workload.steps, workload.drop_last)
    shares: list[Tensor] = []
    ends: list[int] = []
    for share, update in zip(run_updates(prepared, data, updates), updates, strict=True):
        shares.append(share)
        assert update.step == len(shares) - 1
        ends += [update.step] * updates.ends_epoch(len(shares))
    totals = torch.stack(shares)
    if here.group is not None:
        dist.all_reduce(totals, group=here.group)
    assert updates.samples_before(updates.step) == totals[:, 1].sum()
    return (totals[:, 0] / totals[:, 1]).tolist(), totals[:, 1].tolist(), ends


@pytest.mark.parametrize(
    ("layout", "count", "workers"),
    [("ddp", 3, 0), ("zero1", 3, 0), ("fsdp", 3, 0), ("ddp", 2, 2), ("ddp:accumulate=2,precision=float64", 3, 0)],
)
def test_streams_of_five_nine_and_two_batches(ranks: Any, layout: str, count: int, workers: int) -> None:
    """No rank waits for another, none is counted that has ended, and the last batches of each weigh what they hold."""
    [(losses, counts, ends)] = ranks(1, trained, "single", 0, {})
    assert counts == COUNTS * 2
    assert ends == [UPDATES - 1, 2 * UPDATES - 1]
    assert len(set(losses)) == 2 * UPDATES
    for found in ranks(count, trained, layout, workers, {}):
        assert found[0] == pytest.approx(losses, rel=1e-12)
        assert found[1:] == (counts, ends)


@pytest.mark.parametrize(
    ("changes", "counts", "ends"),
    [
        ({"drop_last": True}, [6, 6], [0, 1]),
        ({"epochs": None, "steps": 11}, [*COUNTS, 6, 5], [8]),
        ({"epochs": None, "steps": UPDATES}, COUNTS, [8]),
    ],
)
def test_where_epochs_and_trainings_end(
    ranks: Any, changes: dict[str, Any], counts: list[int], ends: list[int]
) -> None:
    """drop_last ends an epoch before the first batch that is not full; a number of updates ends it anywhere."""
    for found in ranks(2, trained, "ddp", 0, changes):
        assert found[1:] == (counts, ends)


def endless(world: World) -> Any:
    frames = Streams()
    frames.streams = [Frames(number) for number in range(3)]  # type: ignore[misc]
    return trained(
        world, "ddp" if world.size > 1 else "single", 0, {"train_data": lambda: frames, "steps": 5, "epochs": None}
    )


def test_endless_streams_are_read_as_long_as_is_asked(ranks: Any) -> None:
    """Decoding draws what belongs to the sample, whichever rank has its stream."""
    [expected] = ranks(1, endless)
    assert expected[1:] == ([6.0] * 5, [])
    for found in ranks(2, endless):
        assert found[0] == pytest.approx(expected[0], rel=1e-12)


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for name, one in model.named_parameters() if name != "count"], lr=0.05)


def with_join(world: World) -> list[Tensor]:
    """An epoch by torch's own Join around DDP: the count in DDP's bucket, gradients divided by it."""
    workload = workload_of(optimizer=plain)
    initial = prepare(workload, parse_layout("single:precision=float64"), world).full_state()
    model = build()
    model.load_state_dict(initial)
    count = nn.Parameter(torch.zeros((), dtype=torch.float64))
    model.register_parameter("count", count)
    ddp = DistributedDataParallel(model, process_group=world.group)
    optimizer = plain(model)
    reader = UnevenReader(UnevenStreams(None, Streams(*LENGTHS).streams, None, True), workload, Slice(world.rank, 3), 1)
    with Join([ddp]):
        for index in range(-(-LENGTHS[world.rank] // 2)):
            size, samples, _ = reader.__getitems__(UnevenKeys(0, index, 0))
            points, targets = (torch.stack(part).double() for part in zip(*samples, strict=True))
            ddp.zero_grad()
            (squares(ddp(points), targets)[0] + size * count).backward()
            # both were divided by the number of ranks, and zeros of those that have ended were added to both
            for name, parameter in model.named_parameters():
                if name != "count":
                    parameter.grad = parameter.grad / count.grad
            optimizer.step()
    return [parameter.detach().clone() for name, parameter in model.named_parameters() if name != "count"]


def without_join(world: World) -> list[Tensor]:
    data, _ = open_data(workload_of(), world, counts_uneven=False)
    prepared = prepare(workload_of(optimizer=plain), parse_layout("ddp:precision=float64"), world)
    list(run_updates(prepared, data, OpenUpdates(1, None, drop_last=False)))
    return [parameter.detach().clone() for parameter in prepared.model.parameters()]


def test_torchs_join_comes_to_the_same(ranks: Any) -> None:
    """The oracle: where its gradients are divided by the count that came with them."""
    for joined, own in zip(ranks(3, with_join), ranks(3, without_join), strict=True):
        for one, other in zip(joined, own, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def ended_are_counted(world: World) -> Any:
    """A rank that has ended goes on with its last sample as if it were one."""
    import everyrank.data.uneven as module

    original = module.UnevenReader.__getitems__

    def getitems(reader: UnevenReader, keys: UnevenKeys) -> Any:
        size, samples, places = original(reader, keys)
        return (size if len(reader.readers) == len(LENGTHS) else len(samples)), samples, places

    return mock.patch.object(module.UnevenReader, "__getitems__", getitems)


def mean_over_ranks(world: World) -> Any:
    """The gradient is the mean of the means that the ranks have, as DDP leaves it."""
    import everyrank.strategies.step as module

    original = module.compute_loss

    def compute_loss(workload: Any, output: Any, batch: Any, mesh: Any, *rest: Any) -> Any:
        total, share = original(workload, output, batch, mesh, *rest)
        size = max(batch.size, 1)
        return (total / size, torch.stack([share[0] / size, share[1] / size])) if world.size > 1 else (total, share)

    return mock.patch.object(module, "compute_loss", compute_loss)


def last_batches_dropped(world: World) -> Any:
    """An epoch ends for all with the first stream that does."""
    import everyrank.data.uneven_updates as module

    is_over = property(lambda agreed: any(0 in sizes for sizes in agreed.sizes))
    return mock.patch.object(module.Agreed, "is_over", is_over)


def streams_shifted(world: World) -> Any:
    """Rank 2 reads the stream of rank 1."""
    import everyrank.data.uneven as module

    original = module.cut
    streams = lambda total, part: original(total, Slice(1, part.count) if part.count == world.size else part)  # noqa: E731
    return mock.patch.object(module, "cut", streams) if world.rank == 2 else contextlib.nullcontext()


def verified(world: World, mutation: str, layout_text: str = "ddp") -> tuple[str, list[str]]:
    """(parity, what the check of the samples says) with a mistake in the ranks that `single` does not make."""
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


def test_verify_compares_the_ends_of_streams(ranks: Any) -> None:
    """Counted for this: the last update of an epoch, which one stream alone reaches; also beside a simulation."""
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
def test_mistakes_are_seen(ranks: Any, mutation: str, expected: str) -> None:
    """What people do when ranks do not end together."""
    for status, problems in ranks(3, verified, mutation):
        assert status == expected
        if mutation in ("last_batches_dropped", "streams_shifted"):
            assert problems


def norms(world: World, layout_text: str) -> str:
    workload = workload_of(model=build_norm, train_data=lambda: Streams(10, 18, 4))
    data, _ = open_data(workload, world)
    case = parity_case(workload, data, None, 20, is_quick=True)
    return check_layout(case, parse_layout(layout_text), world, f"norms/{layout_text}")[0].status


def test_statistics_leave_out_the_ranks_that_have_ended(ranks: Any) -> None:
    """Batch norm spans the samples there are, also where the streams are cut into micro-batches."""
    assert ranks(3, norms, "ddp") == ["equal"] * 3
    assert ranks(2, norms, "fsdp") == ["equal"] * 2


def refused(world: World, data: Any, changes: dict[str, Any]) -> str:
    workload = workload_of(train_data=lambda: data, **changes)
    try:
        found, _ = open_data(workload, world, counts_uneven=False)
        prepared = prepare(workload, parse_layout("ddp"), world)
        list(run_updates(prepared, found, OpenUpdates(1, None, workload.drop_last)))
    except WorkloadError as error:
        return str(error)
    return ""


class Holder:
    def __init__(self, streams: Any) -> None:
        self.streams = streams


@pytest.mark.parametrize(
    ("streams", "changes", "words"),
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
def test_streams_that_cannot_be_read(ranks: Any, streams: Any, changes: dict[str, Any], words: str) -> None:
    """A line that says which, and what helps."""
    for text in ranks(2, refused, Holder(streams), changes):
        assert words in text


def test_cuts_of_streams_are_even() -> None:
    """Odd samples go round among the micro-batches; every sample is in one of them."""
    workload = workload_of(model=build, global_batch=14)
    data = UnevenStreams(None, [range(100)] * 4, None, True)
    reader = UnevenReader(data, workload, Slice(0, 1), 4)
    cuts = [[reader._positions(number, UnevenKeys(2, 1, part)) for part in range(4)] for number in range(4)]
    assert [len(numbers) for numbers in zip(*[flat(row) for row in cuts], strict=False)]
    for number, row in enumerate(cuts):
        assert flat(row) == list(range(data.takes(14)[number], 2 * data.takes(14)[number]))
    sizes = [sum(len(row[part]) for row in cuts) for part in range(4)]
    assert max(sizes) - min(sizes) <= 1


def flat(row: list[range]) -> list[int]:
    return [place for part in row for place in part]


WORKLOAD = """
import torch
from test_uneven import Streams, build_dropping, momentum, squares
from everyrank import Workload

data = Streams(10, 17, 3)
workload = Workload("uneven", build_dropping, lambda: data, squares, momentum, 6,
                    eval_data=lambda: data.streams[2], epochs=2, order="shard")
"""


def losses_of(folder: Path) -> list[tuple[str, ...]]:
    rows = [line.split(",") for line in (folder / "log.csv").read_text().splitlines()[1:]]
    return [(epoch, terms, f"{float(loss):.9f}") for _, epoch, loss, _, terms, *_ in rows]


def test_a_training_goes_on_in_the_middle_of_streams(cli: Cli, tmp_path: Path) -> None:
    """On another number of ranks; the log, the epochs and the checkpoints know where they are."""
    (tmp_path / "w.py").write_text(WORKLOAD)
    words = ("train", "w.py", "--device", "cpu")
    whole = cli(tmp_path, *words, "--layout", "ddp:precision=float64", "--processes", 3, "--out", "whole")
    assert whole.status == 0, whole
    assert "18 updates" in whole.out
    part = cli(tmp_path, *words, "--layout", "ddp:precision=float64", "--processes", 3, "--steps", 5, "--out", "part")
    assert part.status == 0, part
    seen = cli(tmp_path, "checkpoint", "inspect", "part")
    assert "0 + 5 updates" in seen.out
    rest = cli(tmp_path, *words, "--layout", "fsdp:precision=float64", "--processes", 2, "--out", "part", "--resume")
    assert rest.status == 0, rest
    assert "resuming after update 5, from" in rest.out
    assert losses_of(tmp_path / "part") == losses_of(tmp_path / "whole")
    assert [row[1] for row in losses_of(tmp_path / "whole")] == [str(float(count)) for count in COUNTS * 2]
    again = cli(tmp_path, *words, "--epochs", 1, "--out", "part", "--resume")
    assert again.status == 2, again
    assert "2 epochs and 0 updates are done" in again.err
