"""Records: JSON in and out, to the last bit, and refusing what is none."""

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


def plain() -> Record:
    return Record("digits", "ddp", "spawn", "gloo", "cpu", 2)


def full() -> Record:
    """Every field is set, to a value that is not its default."""
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


def test_full_record_is_full() -> None:
    """A field added later has to join the round trip below."""
    record = full()
    for field in dataclasses.fields(Record):
        if field.name == "schema":
            continue
        if field.default is not dataclasses.MISSING:
            assert getattr(record, field.name) != field.default, field.name
        if field.default_factory is not dataclasses.MISSING:
            assert getattr(record, field.name) != field.default_factory(), field.name


def test_round_trip_is_exact(tmp_path: Path) -> None:
    """Losses are compared to 1e-10: a digit lost in the file would be a difference that never was."""
    path = tmp_path / "deep" / "er" / "records.json"
    write_records([full(), plain()], path)
    back = read_records(path)
    assert back == [full(), plain()]
    assert [value.hex() for value in back[0].loss] == [value.hex() for value in AWKWARD]
    write_records(back, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_a_path_may_be_text(tmp_path: Path) -> None:
    """As a notebook has it."""
    write_records([full()], f"{tmp_path}/records.json")
    assert read_records(f"{tmp_path}/records.json") == [full()]


def test_types_come_back(tmp_path: Path) -> None:
    """Nested nouns come back as nouns, not as dicts."""
    path = tmp_path / "records.json"
    write_records([full()], path)
    [back] = read_records(path)
    assert isinstance(back.parity, Parity)
    assert isinstance(back.throughput_samples_per_second, Interval)
    assert isinstance(back.breakdown_seconds, Breakdown)
    assert isinstance(back.collectives[0], Collective)


def test_the_file_is_a_list_that_says_its_schema(tmp_path: Path) -> None:
    """What outside programs read: a list of objects with these names."""
    path = tmp_path / "records.json"
    write_records([full()], path)
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


def test_what_was_not_measured_is_null(tmp_path: Path) -> None:
    """A zero would be read as a measurement."""
    path = tmp_path / "records.json"
    write_records([plain()], path)
    [row] = json.loads(path.read_text(encoding="utf-8"))
    for name in ("throughput_samples_per_second", "step_seconds", "peak_memory_bytes", "startup_seconds"):
        assert row[name] is None
    assert row["parity"]["status"] == "not_verified"
    assert row["parity"]["reason"]


def test_nan_is_written_as_null(tmp_path: Path) -> None:
    """NaN and Infinity are not JSON: other programs refuse the whole file."""
    path = tmp_path / "records.json"
    record = dataclasses.replace(
        plain(),
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
    [back] = read_records(path)
    assert back.loss[0] == 1.0
    assert all(math.isnan(value) for value in back.loss[1:])
    assert back.epoch_seconds is None


def test_a_metric_that_was_nan_stays_a_number(tmp_path: Path) -> None:
    """`metrics` is dict[str, float]: a null that comes back as None breaks whoever formats it."""
    path = tmp_path / "records.json"
    write_records([dataclasses.replace(plain(), metrics={"top1": math.nan, "top5": 0.5})], path)
    [back] = read_records(path)
    assert back.metrics.get("top5") == 0.5
    assert "top1" not in back.metrics or math.isnan(back.metrics["top1"])


def row_with(**values: object) -> dict[str, object]:
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


def test_the_least_a_record_can_be_is_read(tmp_path: Path) -> None:
    """The base of the refusals below is itself a Record, so each is refused for the reason it names."""
    path = tmp_path / "records.json"
    path.write_text(json.dumps([row_with()]))
    assert read_records(path) == [Record("w", "ddp", "spawn", "gloo", "cpu", 2)]


@pytest.mark.parametrize("schema", [None, 0, 2, "1", [1]])
def test_another_schema_is_refused(tmp_path: Path, schema: object) -> None:
    """A newer file read as an older one gives numbers under the wrong names."""
    path = tmp_path / "records.json"
    path.write_text(json.dumps([row_with(schema=schema)]))
    with pytest.raises(UsageError, match="schema") as caught:
        read_records(path)
    assert repr(schema) in str(caught.value)
    assert str(SCHEMA) in str(caught.value)


def test_no_schema_is_refused(tmp_path: Path) -> None:
    """A foreign file that happens to be a list of objects."""
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
def test_an_unknown_field_is_refused(tmp_path: Path, values: dict[str, object], name: str) -> None:
    """A misspelt field that is silently dropped is a measurement lost."""
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
def test_a_foreign_or_broken_file_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    """Whoever gives the wrong file reads which file and why, not a traceback of ours."""
    path = tmp_path / "foreign.json"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_records(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("what", ["missing", "directory"])
def test_no_file_is_refused_in_one_line(tmp_path: Path, what: str) -> None:
    """The same for a path that cannot be read."""
    path = tmp_path / "there.json"
    if what == "directory":
        path.mkdir()
    with pytest.raises(UsageError) as caught:
        read_records(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
