"""A bench while it goes on: what is said, what is left behind, what is shown when it is stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import everyrank.benchmark.rank
import zoo
from everyrank import Launch, api, parse_layout, read_records
from everyrank.benchmark.rank import _on_host, bench_rank
from everyrank.cli import _TerminatedError, main
from everyrank.errors import RankFailedError, UsageError
from everyrank.launch import RankInfo, run_ranks
from everyrank.options import BenchOptions
from everyrank.record import Parity, Record
from everyrank.strategies import Prepared, prepare
from pretended_card import moved_to_card, pretended_cards


@pytest.fixture(scope="module")
def benched(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[Record]], list[Record], list[str]]:
    """What a bench on one rank left behind after each of its parts, what it handed back, and what it said."""
    kept: list[list[Record]] = []
    place = (tmp_path_factory.mktemp("bench") / "rendezvous").as_uri()
    info = RankInfo(0, 0, 1, 1, "spawn", place, threads=1, keep=kept.append)
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen):
        records = run_bench(["single", "dataparallel", "ddp"], info)
    assert records is not None
    return kept, records, screen.getvalue().splitlines()


def run_bench(layouts: Sequence[str], info: RankInfo) -> list[Record] | None:
    """A short one on this rank."""
    options = BenchOptions(command=["x"], trials=2, steps=2, verify_steps=2, load_before=3.5)
    workload = zoo.workload("frozen", model=Chatty, metrics={"_hits": zoo.half_top}, derived={"miss": miss})
    threads = torch.get_num_threads()
    try:
        return bench_rank(info, workload, [parse_layout(text) for text in layouts], Launch(device="cpu"), options)
    finally:
        torch.set_num_threads(threads)


def miss(means: Any) -> float:
    return 1.0 - means["_hits"]


class Chatty(zoo.FrozenModel):
    """Says its size whenever it is built."""

    def __init__(self) -> None:
        super().__init__()
        print("number of parameters: 93")


def trials_of(record: Record) -> int:
    return record.throughput_samples_per_second.trials if record.throughput_samples_per_second is not None else 0


def test_rows_are_said_as_they_are_known(benched: Any) -> None:
    _, _, said = benched
    assert said.pop(0) == "number of parameters: 93"  # once, however often the model is built
    assert said[0] == "single: equal (2 updates)"
    assert said[1].startswith("dataparallel: not verified here: ")
    assert said[2] == "ddp: equal (2 updates)"
    expected = [f"{layout}: trial {trial} of 2, " for trial in (1, 2) for layout in ("single", "ddp")]
    assert [line.startswith(begin) for line, begin in zip(said[3:], expected, strict=True)] == [True] * 4


def test_what_is_known_is_left_behind_after_each_part(benched: Any) -> None:
    """At any time there is a Record for each layout; who was not come to yet says so."""
    kept, records, _ = benched
    # three checks, then two candidates each looked into, trained once, and timed twice
    assert len(kept) == 3 + 2 * 4
    assert [record.layout for records in kept for record in records] == ["single", "dataparallel", "ddp"] * len(kept)
    assert [record.parity.status for record in kept[0]] == ["equal", "not_verified", "not_verified"]
    assert "stopped before it was checked" in kept[0][2].parity.reason
    assert [tuple(map(trials_of, records)) for records in kept[-4:]] == [(1, 0, 0), (1, 0, 1), (2, 0, 1), (2, 0, 2)]
    assert kept[-2][2].ratio_to_single is not None  # of the trials that both have
    assert kept[-2][2].ratio_to_single.trials == 1
    assert all(record.provenance["trials_asked"] == 2 for record in kept[0])
    timeless = [dataclasses.replace(record, resources=None, provenance={}) for record in records]
    assert [dataclasses.replace(record, resources=None, provenance={}) for record in kept[-1]] == timeless


def test_arms_leave_the_device_to_each_other(tmp_path: Path) -> None:
    """Between its turns an candidate has no gradients, and its initial state is in the host's memory."""
    candidates: list[Prepared] = []

    def kept(*arguments: Any) -> Prepared:
        candidates.append(prepare(*arguments))
        return candidates[-1]

    with mock.patch.object(everyrank.benchmark.rank, "prepare", kept):
        run_bench(["single", "ddp"], RankInfo(0, 0, 1, 1, "spawn", (tmp_path / "rendezvous").as_uri(), threads=1))
    assert len(candidates) == 2
    for candidate in candidates:
        assert all(parameter.grad is None for parameter in candidate.trainable.parameters)
    with pretended_cards():
        there = {"tensors": [moved_to_card(torch.ones(2))], "ema": [moved_to_card(torch.zeros(2))], "scaler": 1}
        saved = _on_host(there)
    assert [tensor.device.type for tensor in (*saved["tensors"], *saved["ema"])] == ["cpu"] * 2
    assert torch.equal(saved["tensors"][0], torch.ones(2))
    assert saved["scaler"] == 1


def test_load_and_threads_are_recorded_with_why(benched: Any) -> None:
    _, [single, *_], _ = benched
    assert single.provenance["load"]["before"] == 3.5
    assert set(single.provenance["load"]) == {"before", "others_cores"}
    assert single.provenance["threads_per_rank"] == 1
    assert "set in the environment" in single.provenance["choices"]["threads"]


def test_a_metric_that_only_feeds_derived_is_not_shown(benched: Any) -> None:
    _, records, _ = benched
    assert set(records[0].metrics) == {"eval_loss", "miss"}


@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyboardInterrupt(), 130), (_TerminatedError(), 143), (RankFailedError("rank 1 died"), 4)],
)
def test_a_bench_that_ends_too_soon_shows_what_it_has(
    benched: Any, error: BaseException, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It had printed nothing after all its minutes, and written no file."""
    partial = benched[0][-2]

    def stopped(*_: Any, kept: list[Record], **__: Any) -> list[Record]:
        kept[:] = partial
        raise error

    path, before = tmp_path / "r.json", signal.getsignal(signal.SIGTERM)
    try:
        with mock.patch.object(api, "bench", stopped):
            assert main(["bench", "digits", "--layout", "single", "ddp", "--json", str(path)]) == status
    finally:
        signal.signal(signal.SIGTERM, before)
    shown = capsys.readouterr()
    assert "ddp has 1 of 2 trials" in shown.out
    assert [trials_of(record) for record in read_records(path)] == [2, 0, 1]
    assert len(shown.err.splitlines()) == 1


def test_nothing_is_shown_where_nothing_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unknown = Record("digits", "ddp", "spawn", "gloo", "cpu", 2, parity=Parity("not_verified", reason="stopped"))

    def stopped(*_: Any, kept: list[Record], **__: Any) -> list[Record]:
        kept.append(unknown)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGTERM)
    try:
        with mock.patch.object(api, "bench", stopped):
            assert main(["bench", "digits"]) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().out == ""


def test_scaling_that_is_stopped_keeps_the_smaller_sizes(benched: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """And the efficiency of what the larger one had come to."""
    done = [record for record in benched[1] if record.layout == "ddp"]
    two = [dataclasses.replace(record, world_size=2) for record in done]

    def bench(*_: Any, kept: list[Record], **__: Any) -> list[Record]:
        if bench.calls.pop():
            return done
        kept[:] = two
        raise KeyboardInterrupt

    bench.calls = [False, True]
    kept: list[Record] = []
    with mock.patch.object(api, "bench", bench), pytest.raises(KeyboardInterrupt):
        api.bench_scaling(zoo.workload("frozen"), [parse_layout("ddp")], Launch(), [1, 2], kept=kept)
    assert [record.world_size for record in kept] == [1, 2]
    assert kept[1].scaling is not None
    assert capsys.readouterr().out == "1 rank:\n2 ranks, strong scaling:\n"  # to tell the lines of one from the other


def test_what_a_rank_keeps_outlives_it() -> None:
    """The last it has kept, also where it ends with an error."""

    def keeps(info: RankInfo, fails: bool) -> str:
        for value in (1, 2):
            assert info.keep is not None
            info.keep((info.rank, value))
        if fails:
            raise UsageError("no further")
        return "done"

    kept: dict[int, Any] = {}
    assert run_ranks(Launch(processes=1), keeps, False, kept=kept) == {0: "done"}
    assert kept == {0: (0, 2)}
    kept.clear()
    with pytest.raises(UsageError, match="no further"):
        run_ranks(Launch(processes=1), keeps, True, kept=kept)
    assert kept == {0: (0, 2)}
