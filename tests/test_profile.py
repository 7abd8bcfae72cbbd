"""`train --profile` merges the traces of one step of all ranks into one file."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from everyrank import read_records
from everyrank.measure.timeline import merge
from processes import Cli

PHASES = ("everyrank:forward", "everyrank:backward", "everyrank:optimizer")


def event(name: str = "op", **fields: Any) -> dict[str, Any]:
    return {"name": name, "ph": "X", "pid": 7, "tid": 7, "ts": 1.0, "dur": 2.0, **fields}


def trace(*events: dict[str, Any], base: int = 0) -> dict[str, Any]:
    return {"schemaVersion": 1, "baseTimeNanoseconds": base, "traceEvents": list(events)}


def count_phases(events: list[dict[str, Any]]) -> Counter[str]:
    """Return the number of times that each phase was entered."""
    return Counter(row["name"] for row in events if row["name"] in PHASES and row.get("cat") == "user_annotation")


def spans_of(events: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return the first start and end time of each phase."""
    rows = sorted((row for row in events if row["name"] in PHASES), key=lambda row: -row["ts"])
    return {row["name"]: (row["ts"], row["ts"] + row["dur"]) for row in rows}


def test_equal_pids_on_two_hosts_are_two_processes() -> None:
    events = merge([trace(event()), trace(event())], ["a", "b"])["traceEvents"]
    assert len({row["pid"] for row in events}) == 2
    assert len(events) == 2


def test_events_of_one_process_keep_one_pid() -> None:
    first = trace(event(), event("other"), event(pid=8))
    events = merge([first, trace(event())], ["a", "a"])["traceEvents"]
    pids = [row["pid"] for row in events]
    assert pids[0] == pids[1]
    assert len(set(pids)) == 3


def test_pids_of_different_ranks_never_collide() -> None:
    """On Linux, the largest pid is 4194304. Devices are numbered from 0."""
    traces = [trace(event(pid=0), event(pid=4_194_304)) for _ in range(2)]
    assert len({row["pid"] for row in merge(traces, ["a", "b"])["traceEvents"]}) == 4


def test_named_processes_of_different_ranks_are_separate() -> None:
    events = merge([trace(event(pid="Spans")), trace(event(pid="Spans"))], ["a", "a"])["traceEvents"]
    pids = [row["pid"] for row in events]
    assert len(set(pids)) == 2
    assert all("Spans" in pid for pid in pids)
    assert "1" in pids[1]


def test_flows_of_different_ranks_are_separate() -> None:
    flow = [event("fwdbwd", ph="s", id=3), event("fwdbwd", ph="f", id=3, bp="e")]
    events = merge([trace(*flow), trace(*flow)], ["a", "a"])["traceEvents"]
    ids = [row["id"] for row in events]
    assert ids[0] == ids[1]
    assert ids[2] == ids[3]
    assert ids[0] != ids[2]


def test_flow_ids_are_valid_for_perfetto() -> None:
    """Perfetto accepts a number or hexadecimal digits. It ignores flows with other ids."""
    flow = [event("fwdbwd", ph="s", id=3), event("fwdbwd", ph="f", id=3, bp="e")]
    for row in merge([trace(*flow), trace(*flow)], ["a", "a"])["traceEvents"]:
        assert row["id"] >= 0 if isinstance(row["id"], int) else int(row["id"], 16) >= 0


def test_times_of_all_ranks_have_the_same_origin() -> None:
    late = trace(event(ts=5.0), base=1_700_000_000_002_000_000)
    early = trace(event(ts=5.0), base=1_700_000_000_000_000_000)
    events = merge([late, early], ["a", "a"])["traceEvents"]
    assert [row["ts"] for row in events] == pytest.approx([2005.0, 5.0], abs=0.3)
    assert [row["dur"] for row in events] == [2.0, 2.0]


def test_times_keep_microsecond_precision() -> None:
    """Nanoseconds since 1970 have more digits than a float can hold."""
    traces = [trace(event(), base=1_700_000_000_000_000_000), trace(event(), base=1_700_000_000_000_001_000)]
    events = merge(traces, ["a", "a"])["traceEvents"]
    assert events[1]["ts"] - events[0]["ts"] == pytest.approx(1.0, abs=1e-3)


def test_trace_without_base_time_keeps_its_times() -> None:
    without_base_time = {"traceEvents": [event(ts=5.0)]}
    events = merge([without_base_time, without_base_time], ["a", "a"])["traceEvents"]
    assert [row["ts"] for row in events] == [5.0, 5.0]


def test_process_names_contain_rank_and_host() -> None:
    name = event("process_name", ph="M", args={"name": "python"})
    sort = event("process_sort_index", ph="M", args={"sort_index": 536870912})
    events = merge([trace(name, sort), trace(name, sort)], ["left", "right"])["traceEvents"]
    labels = [row["args"]["name"] for row in events if row["name"] == "process_name"]
    assert [label.startswith(f"rank {rank}") for rank, label in enumerate(labels)] == [True, True]
    assert "left" in labels[0]
    assert "right" in labels[1]
    assert all("python" in label for label in labels)
    order = [row["args"]["sort_index"] for row in events if row["name"] == "process_sort_index"]
    assert order[0] < order[1]


def test_event_named_like_a_label_is_unchanged() -> None:
    events = merge([trace(event("process_name", args={"x": 1}))], ["a"])["traceEvents"]
    assert events[0]["args"] == {"x": 1}


def test_merge_does_not_change_its_inputs() -> None:
    input_trace = trace(event(id=3), event("process_name", ph="M", args={"name": "python"}), base=5)
    before = json.dumps(input_trace)
    merge([input_trace, input_trace], ["a", "b"])
    assert json.dumps(input_trace) == before


def test_merge_needs_one_host_for_each_trace() -> None:
    with pytest.raises(ValueError, match="zip"):
        merge([trace(event())], [])


@pytest.fixture(scope="module")
def profiled(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run with --profile: its events by rank, Record, output, number of steps and process names."""
    folder = tmp_path_factory.mktemp("profiled")
    args = ("--layout", "ddp", "--processes", "2", "--steps", "12", "--device", "cpu", "--backend", "gloo")
    process = cli(folder, "train", "digits", *args, "--profile", "new/F.json.gz", "--out", "run")
    assert process.status == 0, process.err
    text = gzip.decompress((folder / "new" / "F.json.gz").read_bytes()).decode()
    events = json.loads(text)["traceEvents"]
    labels = {row["pid"]: row["args"]["name"] for row in events if row["ph"] == "M" and row["name"] == "process_name"}
    by_rank = [
        [row for row in events if row["ph"] == "X" and labels.get(row["pid"], "").startswith(f"rank {rank} ")]
        for rank in range(2)
    ]
    (record,) = read_records(folder / "run" / "record.json")
    steps = len((folder / "run" / "log.jsonl").read_text().splitlines()) - 1
    return {"by_rank": by_rank, "record": record, "out": process.out, "steps": steps, "labels": labels}


def test_trace_has_one_step_of_both_ranks(profiled: dict[str, Any]) -> None:
    for events in profiled["by_rank"]:
        counts = count_phases(events)
        assert counts["everyrank:forward"] >= 1
        assert counts["everyrank:backward"] == counts["everyrank:optimizer"] == 1
        assert any(row["name"].startswith("aten::") for row in events)


def test_step_with_one_micro_batch_has_one_forward(profiled: dict[str, Any]) -> None:
    """A second forward pass in a trace would look like recomputation."""
    assert [count_phases(events)["everyrank:forward"] for events in profiled["by_rank"]] == [1, 1]


def test_trace_has_the_collectives_of_both_ranks(profiled: dict[str, Any]) -> None:
    for events in profiled["by_rank"]:
        assert any(row["name"].startswith("gloo:") for row in events), {row["name"] for row in events}


def test_phases_do_not_overlap(profiled: dict[str, Any]) -> None:
    for events in profiled["by_rank"]:
        spans = spans_of(events)
        times = [time for name in PHASES for time in spans[name]]
        assert times == sorted(times)


def test_ranks_of_one_host_share_a_clock(profiled: dict[str, Any]) -> None:
    """A backward pass waits for the other rank's gradients, so it cannot end before the other one starts."""
    rank_0, rank_1 = (spans_of(events)["everyrank:backward"] for events in profiled["by_rank"])
    assert rank_0[1] > rank_1[0]
    assert rank_1[1] > rank_0[0]


def test_profiled_run_reports_no_speed(cli: Cli, profiled: dict[str, Any], tmp_path: Path) -> None:
    """The profiler slows down the run. A run without it reports its speed."""
    record = profiled["record"]
    assert record.throughput_samples_per_second is None
    assert record.step_seconds is None
    assert record.epoch_seconds is None
    assert len(record.loss) == profiled["steps"] == 12
    assert "samples/s" not in profiled["out"]
    assert "F.json.gz" in profiled["out"]
    process = cli(tmp_path, "train", "digits", "--layout", "single", "--steps", "12", "--device", "cpu", "--out", "run")
    assert process.status == 0, process.err
    (unprofiled,) = read_records(tmp_path / "run" / "record.json")
    assert unprofiled.throughput_samples_per_second is not None


def test_run_of_one_step_has_a_trace(cli: Cli, tmp_path: Path) -> None:
    """A file name without .gz gives an uncompressed JSON file."""
    args = ("--layout", "single", "--steps", "1", "--device", "cpu", "--profile", "F.json", "--out", "run")
    process = cli(tmp_path, "train", "digits", *args)
    assert process.status == 0, process.err
    events = json.loads((tmp_path / "F.json").read_text(encoding="utf-8"))["traceEvents"]
    assert count_phases(events)["everyrank:backward"] == count_phases(events)["everyrank:optimizer"] == 1


def test_unwritable_trace_path_is_refused(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "F.json"):
        process = cli(tmp_path, "train", "digits", "--steps", "1", "--profile", path, "--out", "run")
        assert process.status == 2
        assert "Traceback" not in process.err
        (line,) = process.err.splitlines()
        assert line.startswith("everyrank: ")
        assert str(path) in line
        assert not (tmp_path / "run" / "log.jsonl").exists()
