"""Benchmarks while they run: progress lines, preliminary Records, and the output after an interruption."""

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
from simulated_gpu import simulated_gpus, to_simulated_gpu


@pytest.fixture(scope="module")
def bench_result(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[Record]], list[Record], list[str]]:
    """The preliminary Records after each part of a benchmark on one rank, its final Records, and the printed lines."""
    kept: list[list[Record]] = []
    rendezvous_url = (tmp_path_factory.mktemp("bench") / "rendezvous").as_uri()
    info = RankInfo(0, 0, 1, 1, "spawn", rendezvous_url, threads=1, keep=kept.append)
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        records = run_bench(["single", "dataparallel", "ddp"], info)
    assert records is not None
    return kept, records, stdout.getvalue().splitlines()


def run_bench(layouts: Sequence[str], info: RankInfo) -> list[Record] | None:
    """Run a short benchmark on this rank and return its Records."""
    options = BenchOptions(command=["x"], trials=2, steps=2, verify_steps=2, load_before=3.5)
    workload = zoo.workload("frozen", model=PrintingModel, metrics={"_hits": zoo.sign_accuracy}, derived={"miss": miss})
    threads = torch.get_num_threads()
    try:
        return bench_rank(info, workload, [parse_layout(text) for text in layouts], Launch(device="cpu"), options)
    finally:
        torch.set_num_threads(threads)


def miss(means: Any) -> float:
    return 1.0 - means["_hits"]


class PrintingModel(zoo.FrozenModel):
    """A model that prints its number of parameters whenever it is built."""

    def __init__(self) -> None:
        super().__init__()
        print("number of parameters: 93")


def num_trials(record: Record) -> int:
    return record.throughput_samples_per_second.trials if record.throughput_samples_per_second is not None else 0


def test_results_are_printed_as_they_come_in(bench_result: Any) -> None:
    _, _, lines = bench_result
    assert lines.pop(0) == "number of parameters: 93"  # printed once, although the model is built several times
    assert lines[0] == "single: equal (2 updates)"
    assert lines[1].startswith("dataparallel: not verified here: ")
    assert lines[2] == "ddp: equal (2 updates)"
    expected = [f"{layout}: trial {trial} of 2, " for trial in (1, 2) for layout in ("single", "ddp")]
    assert [line.startswith(prefix) for line, prefix in zip(lines[3:], expected, strict=True)] == [True] * 4


def test_records_are_kept_after_each_part(bench_result: Any) -> None:
    """Each layout has a Record at any time. A layout that was not reached yet is `not_verified`, with the reason."""
    kept, records, _ = bench_result
    # 3 verifications, then for each of 2 candidates: a profile, a training run and 2 trials
    assert len(kept) == 3 + 2 * 4
    assert [record.layout for records in kept for record in records] == ["single", "dataparallel", "ddp"] * len(kept)
    assert [record.parity.status for record in kept[0]] == ["equal", "not_verified", "not_verified"]
    assert "stopped before it was checked" in kept[0][2].parity.reason
    assert [tuple(map(num_trials, records)) for records in kept[-4:]] == [(1, 0, 0), (1, 0, 1), (2, 0, 1), (2, 0, 2)]
    assert kept[-2][2].ratio_to_single is not None  # the ratio uses only trials that both layouts have finished
    assert kept[-2][2].ratio_to_single.trials == 1
    assert all(record.provenance["trials_asked"] == 2 for record in kept[0])
    without_measurements = [dataclasses.replace(record, resources=None, provenance={}) for record in records]
    assert [dataclasses.replace(record, resources=None, provenance={}) for record in kept[-1]] == without_measurements


def test_waiting_candidates_free_device_memory(tmp_path: Path) -> None:
    """A candidate that waits for its turn has no gradients, and its initial state is in host memory."""
    candidates: list[Prepared] = []

    def prepare_and_record(*arguments: Any) -> Prepared:
        candidates.append(prepare(*arguments))
        return candidates[-1]

    with mock.patch.object(everyrank.benchmark.rank, "prepare", prepare_and_record):
        run_bench(["single", "ddp"], RankInfo(0, 0, 1, 1, "spawn", (tmp_path / "rendezvous").as_uri(), threads=1))
    assert len(candidates) == 2
    for candidate in candidates:
        assert all(parameter.grad is None for parameter in candidate.trainable.parameters)
    with simulated_gpus():
        state = {"tensors": [to_simulated_gpu(torch.ones(2))], "ema": [to_simulated_gpu(torch.zeros(2))], "scaler": 1}
        saved = _on_host(state)
    assert [tensor.device.type for tensor in (*saved["tensors"], *saved["ema"])] == ["cpu"] * 2
    assert torch.equal(saved["tensors"][0], torch.ones(2))
    assert saved["scaler"] == 1


def test_cpu_load_and_the_reason_for_the_thread_count_are_recorded(bench_result: Any) -> None:
    _, [single, *_], _ = bench_result
    assert single.provenance["load"]["before"] == 3.5
    assert set(single.provenance["load"]) == {"before", "others_cores"}
    assert single.provenance["threads_per_rank"] == 1
    assert "set in the environment" in single.provenance["choices"]["threads"]


def test_a_metric_that_only_derived_metrics_use_is_not_shown(bench_result: Any) -> None:
    _, records, _ = bench_result
    assert set(records[0].metrics) == {"eval_loss", "miss"}


@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyboardInterrupt(), 130), (_TerminatedError(), 143), (RankFailedError("rank 1 died"), 4)],
)
def test_interrupted_bench_prints_and_saves_partial_results(
    bench_result: Any, error: BaseException, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints the table and writes the Records measured so far."""
    partial = bench_result[0][-2]

    def interrupted_bench(*_: Any, kept: list[Record], **__: Any) -> list[Record]:
        kept[:] = partial
        raise error

    path, before = tmp_path / "r.json", signal.getsignal(signal.SIGTERM)
    try:
        with mock.patch.object(api, "bench", interrupted_bench):
            assert main(["bench", "digits", "--layout", "single", "ddp", "--json", str(path)]) == status
    finally:
        signal.signal(signal.SIGTERM, before)
    captured = capsys.readouterr()
    assert "ddp has 1 of 2 trials" in captured.out
    assert [num_trials(record) for record in read_records(path)] == [2, 0, 1]
    assert len(captured.err.splitlines()) == 1


def test_interrupted_bench_without_results_prints_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    not_verified = Record("digits", "ddp", "spawn", "gloo", "cpu", 2, parity=Parity("not_verified", reason="stopped"))

    def interrupted_bench(*_: Any, kept: list[Record], **__: Any) -> list[Record]:
        kept.append(not_verified)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGTERM)
    try:
        with mock.patch.object(api, "bench", interrupted_bench):
            assert main(["bench", "digits"]) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().out == ""


def test_interrupted_scaling_keeps_completed_world_sizes(bench_result: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """It also gives the scaling efficiency of the interrupted world size, from its finished trials."""
    records_on_1_rank = [record for record in bench_result[1] if record.layout == "ddp"]
    records_on_2_ranks = [dataclasses.replace(record, world_size=2) for record in records_on_1_rank]

    completes = iter([True, False])

    def bench(*_: Any, kept: list[Record], **__: Any) -> list[Record]:
        if next(completes):
            return records_on_1_rank
        kept[:] = records_on_2_ranks
        raise KeyboardInterrupt

    kept: list[Record] = []
    with mock.patch.object(api, "bench", bench), pytest.raises(KeyboardInterrupt):
        api.bench_scaling(zoo.workload("frozen"), [parse_layout("ddp")], Launch(), [1, 2], kept=kept)
    assert [record.world_size for record in kept] == [1, 2]
    assert kept[1].scaling is not None
    assert capsys.readouterr().out == "1 rank:\n2 ranks, strong scaling:\n"  # one heading for each world size


def test_caller_gets_last_preliminary_value_of_a_rank() -> None:
    """The caller gets the last value that a rank passes to `info.keep`, even if the rank fails."""

    def keep_two_values(info: RankInfo, fails: bool) -> str:
        for value in (1, 2):
            assert info.keep is not None
            info.keep((info.rank, value))
        if fails:
            raise UsageError("the rank failed")
        return "done"

    kept: dict[int, Any] = {}
    assert run_ranks(Launch(processes=1), keep_two_values, False, kept=kept) == {0: "done"}
    assert kept == {0: (0, 2)}
    kept.clear()
    with pytest.raises(UsageError, match="the rank failed"):
        run_ranks(Launch(processes=1), keep_two_values, True, kept=kept)
    assert kept == {0: (0, 2)}
