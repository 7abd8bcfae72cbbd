"""Complete runs of `everyrank bench`, as a user types them."""

from __future__ import annotations

import dataclasses
import math
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

from everyrank import parse_layout, read_records
from everyrank.layout import STRATEGIES
from processes import Cli


def test_bench_of_all_layouts_writes_records_and_html(cli: Cli, tmp_path: Path) -> None:
    """All layouts have a row, and only layouts that are equal have numbers.

    The rows of unsupported layouts that the user did not request by name give the reason.
    """
    words = ("--steps", "6", "--trials", "2", "--json", "r.json", "--html", "r.html")
    done = cli(tmp_path, "bench", "digits", "--processes", "2", *words)
    assert done.status == 0, done.err
    records = read_records(tmp_path / "r.json")
    trained = ["single", "ddp", "zero1", "fsdp", "horovod", "parameter_server", "local_sgd"]
    reasons = {"dataparallel": "2 CUDA", "tensor": "tensor_plan", "context": "sequence_dim", "pipeline": "batch norm"}
    reasons |= {"expert": "no experts"}
    if find_spec("horovod") is None:
        trained.remove("horovod")
        reasons["horovod"] = "Horovod"
    assert [record.layout for record in records] == list(STRATEGIES)
    assert set(STRATEGIES) == {*trained, *reasons}
    for record in records:
        is_here = record.layout in trained
        assert reasons.get(record.layout, "") in (record.parity.reason or "")
        assert record.parity.status == ("equal" if is_here else "not_verified")
        assert (record.throughput_samples_per_second is not None) == is_here
        assert len(record.loss) == (6 if is_here else 0)
        if record.throughput_samples_per_second is not None:
            assert record.throughput_samples_per_second.trials == 2
            assert record.step_seconds is not None
            # the fastest trial is that of the shortest step, however far the two trials of a busy machine are apart
            assert record.throughput_samples_per_second.high * record.step_seconds.low == pytest.approx(64, rel=0.02)
            assert record.ratio_to_single is not None
            assert record.ratio_to_single.trials == 2
            assert record.breakdown_seconds is not None
            assert record.breakdown_seconds.error is not None
            parts = dataclasses.astuple(record.breakdown_seconds)[:5]
            assert min(parts) >= 0
            assert abs(sum(parts) - record.step_seconds.median) <= record.breakdown_seconds.error * (1 + 1e-9)
            assert (record.breakdown_seconds.exposed_communication > 0) == (record.world_size > 1)
            assert bool(record.collectives) == (record.world_size > 1)
            assert record.peak_memory_bytes is not None
            assert record.peak_memory_bytes > 3 * 4 * 25_978  # parameters, gradients and momentum in float32
            assert record.startup_seconds is not None
            assert record.first_step_seconds is not None
    assert all(record.resources is None or max(record.resources.memory_bytes) > 2**27 for record in records)
    for heading in ("Step-time breakdown", "Memory and communication"):
        assert heading in done.out
    assert "not verified here: needs 2 CUDA devices" in done.out
    for record in (record for record in records if record.layout in trained and parse_layout(record.layout).is_exact):
        assert all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(records[0].loss, record.loss, strict=True))
    page = (tmp_path / "r.html").read_text()
    assert page.count("<svg") >= 5  # and that of the resources, where a layout ran for half a second
    assert "everyrank bench digits --processes 2 --steps 6 --trials 2" in page


def test_interrupted_bench_shows_and_saves_its_results(cli: Cli, tmp_path: Path) -> None:
    """Results are printed as soon as they are known. After Ctrl-C, bench shows all results and writes the files.

    tests/test_faults.py sends other signals to a training run.
    """
    words = ["bench", "digits", "--set", "width=4", "--layout", "single", "ddp", "--trials", "1000", "--steps", "2"]
    files = ["--json", "r.json", "--html", "r.html"]
    running = cli.start(tmp_path, *words, "--processes", "2", *files)
    running.wait_for(lambda: "ddp: trial 2 of 1000, " in running.output_so_far()[0])
    running.process.send_signal(signal.SIGINT)
    found, out, err = running.end()
    assert out.startswith("single: equal (20 updates)\nddp: equal (20 updates)\n")
    assert found == 130, err
    assert "all ranks are ended" in err.splitlines()[-1]
    assert running.remaining_processes() == {}
    records = read_records(tmp_path / "r.json")
    assert [record.layout for record in records] == ["single", "ddp"]
    for record in records:
        assert record.throughput_samples_per_second is not None
        assert 2 <= record.throughput_samples_per_second.trials < 1000
    assert "The benchmark was interrupted: single has" in out
    assert "The benchmark was interrupted" in (tmp_path / "r.html").read_text()


def test_bench_measures_strong_and_weak_scaling(cli: Cli, tmp_path: Path) -> None:
    """One rank is measured first. The efficiencies are relative to it."""
    words = ("--processes", "1", "2", "--steps", "3", "--trials", "1", "--json", "r")
    done = cli(tmp_path, "bench", "digits", "--layout", "ddp", *words)
    assert done.status == 0, done.err
    one, strong, weak = read_records(tmp_path / "r")
    assert [one.world_size, strong.world_size, weak.world_size] == [1, 2, 2]
    assert [record.provenance["global_batch"] for record in (one, strong, weak)] == [64, 64, 128]
    assert one.scaling is None
    assert one.throughput_samples_per_second is not None
    for record, kind in ((strong, "strong"), (weak, "weak")):
        assert record.scaling is not None
        assert record.scaling.kind == kind
        assert record.throughput_samples_per_second is not None
        ratio = record.throughput_samples_per_second.median / one.throughput_samples_per_second.median
        assert record.scaling.efficiency.median == pytest.approx(ratio / 2)
    assert "efficiency relative to one rank" in done.out
