"""Records: exact round trips through JSON, and clear errors for files that hold no Records."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from everyrank.errors import UsageError
from everyrank.record import (
    SCHEMA,
    Breakdown,
    Bubble,
    Collective,
    Interval,
    Membership,
    Parity,
    Record,
    Resources,
    Scaling,
    read_records,
    write_records,
)

AWKWARD = [0.1 + 0.2, 1 / 3, 5e-324, 1.7976931348623157e308, 2.2250738585072014e-308, -0.0, 1e22, 123456789.12345679]


def minimal_record() -> Record:
    """Return a Record with only the required fields."""
    return Record("digits", "ddp", "spawn", "gloo", "cpu", 2)


def complete_record() -> Record:
    """Return a Record in which every field has a value other than its default."""
    return Record(
        workload="mine · größer <b>",
        layout="fsdp:shard=2",
        launcher="torchrun",
        backend="nccl",
        device="cuda",
        world_size=2,
        parity=Parity(
            "different",
            bitwise=False,
            max_relative_difference=0.1 + 0.2,
            tolerance=1e-10,
            first_divergence="update 3, tensor layers.0.weight",
            cause="sum where the mean is meant",
            reason="none",
            checks=["one", "two\nlines"],
        ),
        throughput_samples_per_second=Interval(1 / 3, 0.1, 0.7, trials=5),
        ratio_to_single=Interval(0.5, 0.4, 0.6, trials=5),
        step_seconds=Interval(0.1, 0.05, 0.2, trials=5),
        epoch_seconds=math.pi,
        breakdown_seconds=Breakdown(0.1, 0.2, 0.3, 0.4, 0.5, error=0.6),
        peak_memory_bytes=2**40 + 1,
        collectives=[Collective("all_reduce", "world", 3, 2**33), Collective("all_gather", "shard", 1, 4)],
        startup_seconds=1e-3,
        first_step_seconds=1e-9,
        checkpoint_stall_seconds=Interval(0.01, 0.001, 0.1, trials=7),
        bubble=Bubble(0.2, 0.25),
        scaling=Scaling("weak", Interval(0.9, 0.8, 1.1, trials=3)),
        memberships=[Membership(1.5, 4, ["h0"], 0), Membership(2.5, 3, ["h1"], 40, 6, 1 / 3)],
        resources=Resources(0.5, [0.1], [99.9], [2**40], [50.0], [2**41]),
        loss=list(AWKWARD),
        metrics={"top1": 2 / 3, "eval_loss": 1e-300},
        provenance={"torch": "2.13.0", "cores": 2, "settings": {"lr": 0.1}, "command": ["a", "b"], "commit": None},
    )


def test_complete_record_sets_every_field() -> None:
    """A field that is added later must be added here too, so that the round-trip test covers it."""
    record = complete_record()
    for field in dataclasses.fields(Record):
        if field.name == "schema":
            continue
        if field.default is not dataclasses.MISSING:
            assert getattr(record, field.name) != field.default, field.name
        if field.default_factory is not dataclasses.MISSING:
            assert getattr(record, field.name) != field.default_factory(), field.name


def test_round_trip_is_exact(tmp_path: Path) -> None:
    """Losses are compared to 1e-10. A digit lost in the file would look like a difference between layouts."""
    path = tmp_path / "deep" / "er" / "records.json"
    write_records([complete_record(), minimal_record()], path)
    records = read_records(path)
    assert records == [complete_record(), minimal_record()]
    assert [value.hex() for value in records[0].loss] == [value.hex() for value in AWKWARD]
    write_records(records, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_path_may_be_a_string(tmp_path: Path) -> None:
    """`write_records` and `read_records` accept a str in place of a Path."""
    write_records([complete_record()], f"{tmp_path}/records.json")
    assert read_records(f"{tmp_path}/records.json") == [complete_record()]


def test_nested_types_are_restored(tmp_path: Path) -> None:
    """Nested values are read as their dataclasses, not as dicts."""
    path = tmp_path / "records.json"
    write_records([complete_record()], path)
    [record] = read_records(path)
    assert isinstance(record.parity, Parity)
    assert isinstance(record.throughput_samples_per_second, Interval)
    assert isinstance(record.breakdown_seconds, Breakdown)
    assert isinstance(record.collectives[0], Collective)


def test_file_is_a_list_of_objects_with_a_schema(tmp_path: Path) -> None:
    """Other programs can rely on a list of objects with these field names."""
    path = tmp_path / "records.json"
    write_records([complete_record()], path)
    [row] = json.loads(path.read_text(encoding="utf-8"))
    assert row["schema"] == SCHEMA
    assert set(row) == {
        *("schema", "workload", "layout", "launcher", "backend", "device", "world_size", "parity"),
        *("throughput_samples_per_second", "step_seconds", "epoch_seconds", "breakdown_seconds"),
        *("peak_memory_bytes", "collectives", "startup_seconds", "first_step_seconds", "loss", "metrics"),
        *("scaling", "resources", "ratio_to_single", "checkpoint_stall_seconds", "bubble", "memberships"),
        "provenance",
    }
    assert set(row["parity"]) >= {
        *("status", "bitwise", "max_relative_difference", "tolerance", "first_divergence", "cause", "reason"),
    }
    assert set(row["throughput_samples_per_second"]) == {"median", "low", "high", "trials"}
    assert set(row["collectives"][0]) == {"op", "group", "count", "bytes", "updates"}


def test_missing_measurements_are_null(tmp_path: Path) -> None:
    """A zero would look like a measurement."""
    path = tmp_path / "records.json"
    write_records([minimal_record()], path)
    [row] = json.loads(path.read_text(encoding="utf-8"))
    for name in ("throughput_samples_per_second", "step_seconds", "peak_memory_bytes", "startup_seconds"):
        assert row[name] is None
    assert row["parity"]["status"] == "not_verified"
    assert row["parity"]["reason"]


def test_nan_is_written_as_null(tmp_path: Path) -> None:
    """NaN and Infinity are not valid JSON. Other programs would reject the whole file."""
    path = tmp_path / "records.json"
    record = dataclasses.replace(
        minimal_record(),
        loss=[1.0, math.nan, math.inf, -math.inf],
        metrics={"top1": math.nan},
        epoch_seconds=math.nan,
        provenance={"settings": {"clip": math.inf}},
    )
    write_records([record], path)

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    [row] = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert row["loss"] == [1.0, None, None, None]
    assert row["metrics"] == {"top1": None}
    assert row["epoch_seconds"] is None
    [read_back] = read_records(path)
    assert read_back.loss[0] == 1.0
    assert all(math.isnan(value) for value in read_back.loss[1:])
    assert read_back.epoch_seconds is None


def test_nan_metric_is_not_read_as_none(tmp_path: Path) -> None:
    """`metrics` is dict[str, float]. A None in it would break the code that formats metrics."""
    path = tmp_path / "records.json"
    write_records([dataclasses.replace(minimal_record(), metrics={"top1": math.nan, "top5": 0.5})], path)
    [record] = read_records(path)
    assert record.metrics.get("top5") == 0.5
    assert "top1" not in record.metrics or math.isnan(record.metrics["top1"])


def row_with(**values: object) -> dict[str, object]:
    """Return the JSON object of a minimal Record, with these fields added or replaced."""
    return {
        "schema": SCHEMA,
        "workload": "w",
        "layout": "ddp",
        "launcher": "spawn",
        "backend": "gloo",
        "device": "cpu",
        "world_size": 2,
        **values,
    }


def test_minimal_record_is_read(tmp_path: Path) -> None:
    """The row that the tests below break is valid, so each of them fails only for its own reason."""
    path = tmp_path / "records.json"
    path.write_text(json.dumps([row_with()]))
    assert read_records(path) == [Record("w", "ddp", "spawn", "gloo", "cpu", 2)]


@pytest.mark.parametrize("schema", [None, 0, 2, "1", [1]])
def test_unknown_schema_is_refused(tmp_path: Path, schema: object) -> None:
    """A newer file that is read as an older one would give numbers with wrong meanings."""
    path = tmp_path / "records.json"
    path.write_text(json.dumps([row_with(schema=schema)]))
    with pytest.raises(UsageError, match="schema") as caught:
        read_records(path)
    assert repr(schema) in str(caught.value)
    assert str(SCHEMA) in str(caught.value)


def test_missing_schema_is_refused(tmp_path: Path) -> None:
    """The file is a list of objects, but they are not Records."""
    path = tmp_path / "records.json"
    path.write_text('[{"name": "package", "version": 1}]')
    with pytest.raises(UsageError, match="schema"):
        read_records(path)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"colour": "red"}, "colour"),
        ({"parity": {"status": "equal", "surprise": 1}}, "surprise"),
        ({"step_seconds": {"median": 1, "low": 1, "high": 1, "trials": 1, "mean": 1}}, "mean"),
        ({"collectives": [{"op": "a", "group": "b", "count": 1, "bytes": 1, "when": 1}]}, "when"),
    ],
)
def test_unknown_field_is_refused(tmp_path: Path, values: dict[str, object], name: str) -> None:
    """A misspelt field that is silently ignored would lose a measurement."""
    path = tmp_path / "records.json"
    path.write_text(json.dumps([row_with(**values)]))
    with pytest.raises(UsageError, match=name):
        read_records(path)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"{", id="cut off"),
        pytest.param(b"\x89PNG\r\n\x1a\n\x00\xff", id="binary"),
        pytest.param(b"{}", id="object"),
        pytest.param(b"3", id="number"),
        pytest.param(b"null", id="null"),
        pytest.param(b"[1, 2]", id="list of numbers"),
        pytest.param(b"[[]]", id="list of lists"),
        pytest.param(b"[" * 200_000, id="nested too deep"),
        pytest.param(json.dumps([{"schema": SCHEMA}]).encode(), id="fields missing"),
        pytest.param(json.dumps([row_with(loss="0.1")]).encode(), id="text for a list"),
        pytest.param(json.dumps([row_with(loss=["0.1"])]).encode(), id="text for a number"),
        pytest.param(json.dumps([row_with(world_size="2")]).encode(), id="text for a whole number"),
        pytest.param(json.dumps([row_with(world_size=None)]).encode(), id="null for a whole number"),
        pytest.param(json.dumps([row_with(parity=None)]).encode(), id="null for parity"),
        pytest.param(json.dumps([row_with(parity={})]).encode(), id="parity without status"),
        pytest.param(json.dumps([row_with(metrics=[1])]).encode(), id="list for metrics"),
        pytest.param(json.dumps([row_with(metrics={"top1": "high"})]).encode(), id="text for a metric"),
        pytest.param(json.dumps([row_with(step_seconds={"median": None})]).encode(), id="half an interval"),
        pytest.param(json.dumps([row_with(epoch_seconds=10**400)]).encode(), id="no float is that large"),
    ],
)
def test_invalid_file_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    """The error names the file and the reason in one line, without a traceback."""
    path = tmp_path / "foreign.json"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_records(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["missing", "directory"])
def test_unreadable_path_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    """The error for a missing file or a directory names the path in one line."""
    path = tmp_path / "records.json"
    if kind == "directory":
        path.mkdir()
    with pytest.raises(UsageError) as caught:
        read_records(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
