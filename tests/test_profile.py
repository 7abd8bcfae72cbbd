"""`train --profile`: one step of all ranks in one trace."""

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


def phases_of(events: list[dict[str, Any]]) -> Counter[str]:
    """How often each phase was entered."""
    return Counter(row["name"] for row in events if row["name"] in PHASES and row.get("cat") == "user_annotation")


def spans_of(events: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """When each phase first began and ended."""
    rows = sorted((row for row in events if row["name"] in PHASES), key=lambda row: -row["ts"])
    return {row["name"]: (row["ts"], row["ts"] + row["dur"]) for row in rows}


def test_the_same_process_number_on_two_hosts_is_two_processes() -> None:
    events = merge([trace(event()), trace(event())], ["a", "b"])["traceEvents"]
    assert len({row["pid"] for row in events}) == 2
    assert len(events) == 2


def test_a_process_keeps_its_own_events_together() -> None:
    first = trace(event(), event("other"), event(pid=8))
    events = merge([first, trace(event())], ["a", "a"])["traceEvents"]
    pids = [row["pid"] for row in events]
    assert pids[0] == pids[1]
    assert len(set(pids)) == 3


def test_the_largest_process_number_of_one_rank_is_not_the_smallest_of_the_next() -> None:
    """Linux counts to 4194304; a device counts from 0."""
    traces = [trace(event(pid=0), event(pid=4_194_304)) for _ in range(2)]
    assert len({row["pid"] for row in merge(traces, ["a", "b"])["traceEvents"]}) == 4


def test_a_process_with_a_name_for_a_number_is_kept_apart_too() -> None:
    events = merge([trace(event(pid="Spans")), trace(event(pid="Spans"))], ["a", "a"])["traceEvents"]
    pids = [row["pid"] for row in events]
    assert len(set(pids)) == 2
    assert all("Spans" in pid for pid in pids)
    assert "1" in pids[1]


def test_flows_of_different_ranks_are_kept_apart() -> None:
    flow = [event("fwdbwd", ph="s", id=3), event("fwdbwd", ph="f", id=3, bp="e")]
    events = merge([trace(*flow), trace(*flow)], ["a", "a"])["traceEvents"]
    ids = [row["id"] for row in events]
    assert ids[0] == ids[1]
    assert ids[2] == ids[3]
    assert ids[0] != ids[2]


def test_the_number_of_a_flow_is_one_that_perfetto_reads() -> None:
    """Perfetto takes a number, or a text of hexadecimal digits; it drops the arrows of any other."""
    flow = [event("fwdbwd", ph="s", id=3), event("fwdbwd", ph="f", id=3, bp="e")]
    for row in merge([trace(*flow), trace(*flow)], ["a", "a"])["traceEvents"]:
        assert row["id"] >= 0 if isinstance(row["id"], int) else int(row["id"], 16) >= 0


def test_times_are_counted_from_the_same_moment() -> None:
    late = trace(event(ts=5.0), base=1_700_000_000_002_000_000)
    early = trace(event(ts=5.0), base=1_700_000_000_000_000_000)
    events = merge([late, early], ["a", "a"])["traceEvents"]
    assert [row["ts"] for row in events] == pytest.approx([2005.0, 5.0], abs=0.3)
    assert [row["dur"] for row in events] == [2.0, 2.0]


def test_a_microsecond_between_two_ranks_is_a_microsecond() -> None:
    """Nanoseconds since 1970 have more digits than a float."""
    traces = [trace(event(), base=1_700_000_000_000_000_000), trace(event(), base=1_700_000_000_000_001_000)]
    events = merge(traces, ["a", "a"])["traceEvents"]
    assert events[1]["ts"] - events[0]["ts"] == pytest.approx(1.0, abs=1e-3)


def test_a_trace_without_its_moment_is_left_where_it_is() -> None:
    bare = {"traceEvents": [event(ts=5.0)]}
    events = merge([bare, bare], ["a", "a"])["traceEvents"]
    assert [row["ts"] for row in events] == [5.0, 5.0]


def test_every_process_says_its_rank_and_its_host() -> None:
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


def test_an_event_named_like_a_label_is_none() -> None:
    events = merge([trace(event("process_name", args={"x": 1}))], ["a"])["traceEvents"]
    assert events[0]["args"] == {"x": 1}


def test_the_traces_that_go_in_stay_as_they_are() -> None:
    given = trace(event(id=3), event("process_name", ph="M", args={"name": "python"}), base=5)
    before = json.dumps(given)
    merge([given, given], ["a", "b"])
    assert json.dumps(given) == before


def test_as_many_hosts_as_traces() -> None:
    with pytest.raises(ValueError, match="zip"):
        merge([trace(event())], [])


@pytest.fixture(scope="module")
def profiled(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One real run, what it printed, its trace and its Record."""
    folder = tmp_path_factory.mktemp("profiled")
    words = ("--layout", "ddp", "--processes", "2", "--steps", "12", "--device", "cpu", "--backend", "gloo")
    done = cli(folder, "train", "digits", *words, "--profile", "new/F.json.gz", "--out", "run")
    assert done.status == 0, done.err
    text = gzip.decompress((folder / "new" / "F.json.gz").read_bytes()).decode()
    events = json.loads(text)["traceEvents"]
    labels = {row["pid"]: row["args"]["name"] for row in events if row["ph"] == "M" and row["name"] == "process_name"}
    by_rank = [
        [row for row in events if row["ph"] == "X" and labels.get(row["pid"], "").startswith(f"rank {rank} ")]
        for rank in range(2)
    ]
    (record,) = read_records(folder / "run" / "record.json")
    steps = len((folder / "run" / "log.jsonl").read_text().splitlines()) - 1
    return {"by_rank": by_rank, "record": record, "out": done.out, "steps": steps, "labels": labels}


def test_a_real_trace_holds_one_step_of_both_ranks(profiled: dict[str, Any]) -> None:
    for events in profiled["by_rank"]:
        counts = phases_of(events)
        assert counts["everyrank:forward"] >= 1
        assert counts["everyrank:backward"] == counts["everyrank:optimizer"] == 1
        assert any(row["name"].startswith("aten::") for row in events)


def test_a_step_of_one_micro_batch_has_one_forward(profiled: dict[str, Any]) -> None:
    """Who reads the trace looks for what was computed forward a second time."""
    assert [phases_of(events)["everyrank:forward"] for events in profiled["by_rank"]] == [1, 1]


def test_a_real_trace_holds_the_collectives_of_both_ranks(profiled: dict[str, Any]) -> None:
    for events in profiled["by_rank"]:
        assert any(row["name"].startswith("gloo:") for row in events), {row["name"] for row in events}


def test_the_phases_of_a_real_trace_follow_each_other(profiled: dict[str, Any]) -> None:
    for events in profiled["by_rank"]:
        spans = spans_of(events)
        moments = [moment for name in PHASES for moment in spans[name]]
        assert moments == sorted(moments)


def test_ranks_of_one_host_share_the_clock_of_a_real_trace(profiled: dict[str, Any]) -> None:
    """No rank's backward, which waits for the other's gradients, ends before the other's has begun."""
    one, other = (spans_of(events)["everyrank:backward"] for events in profiled["by_rank"])
    assert one[1] > other[0]
    assert other[1] > one[0]


def test_a_profiled_run_has_no_speed(cli: Cli, profiled: dict[str, Any], tmp_path: Path) -> None:
    """The profiler slowed it. The same run without it has one."""
    record = profiled["record"]
    assert record.throughput_samples_per_second is None
    assert record.step_seconds is None
    assert record.epoch_seconds is None
    assert len(record.loss) == profiled["steps"] == 12
    assert "samples/s" not in profiled["out"]
    assert "F.json.gz" in profiled["out"]
    done = cli(tmp_path, "train", "digits", "--layout", "single", "--steps", "12", "--device", "cpu", "--out", "run")
    assert done.status == 0, done.err
    (plain,) = read_records(tmp_path / "run" / "record.json")
    assert plain.throughput_samples_per_second is not None


def test_a_run_of_one_step_has_a_trace_too(cli: Cli, tmp_path: Path) -> None:
    """And a file that does not end in .gz is plain JSON."""
    words = ("--layout", "single", "--steps", "1", "--device", "cpu", "--profile", "F.json", "--out", "run")
    done = cli(tmp_path, "train", "digits", *words)
    assert done.status == 0, done.err
    events = json.loads((tmp_path / "F.json").read_text(encoding="utf-8"))["traceEvents"]
    assert phases_of(events)["everyrank:backward"] == phases_of(events)["everyrank:optimizer"] == 1


def test_a_place_for_the_trace_that_cannot_be_written_is_refused(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "F.json"):
        done = cli(tmp_path, "train", "digits", "--steps", "1", "--profile", path, "--out", "run")
        assert done.status == 2
        assert "Traceback" not in done.err
        (line,) = done.err.splitlines()
        assert line.startswith("everyrank: ")
        assert str(path) in line
        assert not (tmp_path / "run" / "log.jsonl").exists()
