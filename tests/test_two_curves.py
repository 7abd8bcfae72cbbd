"""`everyrank report compare` tells rounding and seed noise from real differences, and refuses unusable files."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from everyrank.cli import main
from everyrank.record import Record, write_records
from everyrank.report.curves import read_curves
from everyrank.report.two_curves import _t_probability


def losses(seed: int, change: str = "") -> list[float]:
    """Return the losses of a small training run with this change."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(64, 5, generator=generator), torch.randn(64, generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
        learning_rate = 0.03 if change == "rate" else 0.01
        decay = 0.1 if change == "decay" else 0.0
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=decay)
        rows: list[float] = []
        for _ in range(40):
            batch = torch.randperm(64)[:16]
            batch = batch.flip(0) if change == "order of sums" else batch
            loss = (model(inputs[batch]).squeeze(1) - targets[batch]).square().mean()
            loss = loss / 2 if change == "scale" else loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rows.append(loss.item())
    return rows


def write_csv(path: Path, values: list[float], step: Callable[[int], int] = int, digits: int | None = None) -> Path:
    """Write losses to a CSV file, with this number of digits or exactly."""
    path.parent.mkdir(exist_ok=True)
    texts = [repr(value) if digits is None else f"{value:.{digits}f}" for value in values]
    path.write_text("step,train_loss\n" + "".join(f"{step(index)},{text}\n" for index, text in enumerate(texts)))
    return path


def compare_curves(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    """Run `everyrank report compare`, and return the exit code, the result and the output."""
    status = main(["report", "compare", *map(str, args)])
    out = capsys.readouterr().out
    return status, out.partition(":")[0], out


@pytest.mark.parametrize(
    ("change", "status", "result"),
    [
        ("", 0, "equal"),
        ("order of sums", 0, "rounding"),
        ("scale", 1, "different"),
        ("decay", 1, "different"),
        ("rate", 1, "different"),
        ("seed", 1, "undecided"),
    ],
)
def test_result_for_one_run_of_each_version(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, change: str, status: int, result: str
) -> None:
    before = write_csv(tmp_path / "a.csv", losses(0))
    after = write_csv(tmp_path / "b.csv", losses(1) if change == "seed" else losses(0, change))
    assert compare_curves(capsys, before, after)[:2] == (status, result)


def test_several_seeds_separate_noise_from_differences(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Different seeds are noise, and scaled losses are not. The smallest detectable difference is printed."""
    for seed in range(4):
        write_csv(tmp_path / "a" / f"{seed}.csv", losses(seed))
        write_csv(tmp_path / "b" / f"{seed}.csv", losses(seed + 10))
        write_csv(tmp_path / "slow" / f"{seed}.csv", [3 * value for value in losses(seed + 10)])
    status, result, out = compare_curves(capsys, tmp_path / "a", tmp_path / "b")
    assert (status, result) == (0, "noise of seeds")
    assert "would not be seen" in out
    assert "differ only in their seeds" in out
    assert compare_curves(capsys, tmp_path / "a", tmp_path / "slow")[:2] == (1, "different")
    assert compare_curves(capsys, tmp_path / "a", tmp_path / "b" / "0.csv")[:2] == (0, "noise of seeds")


def test_rounded_losses_and_different_steps(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Losses with two digits are compared to two digits. Only steps that all files have are compared."""
    values = losses(0)
    before = write_csv(tmp_path / "a.csv", values)
    rounded = write_csv(tmp_path / "b.csv", values, digits=2)
    status, result, out = compare_curves(capsys, before, rounded)
    assert (status, result) == (0, "rounding")
    assert "printed to 1e-02" in out
    every_second = write_csv(tmp_path / "c.csv", values[::2], step=lambda index: 2 * index)
    _, result, out = compare_curves(capsys, before, every_second)
    assert result == "equal"
    assert "the 20 steps that all" in out
    jumping = write_csv(tmp_path / "d.csv", [value + 0.5 * (index > 30) for index, value in enumerate(values)])
    assert "jumps at step 31" in compare_curves(capsys, before, jumping)[2]
    nan = write_csv(tmp_path / "e.csv", [math.nan if index > 7 else value for index, value in enumerate(values)])
    assert "first at step 8" in compare_curves(capsys, before, nan)[2]


def test_records_are_compared_by_layout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def record(layout: str, loss: list[float]) -> Record:
        return Record("mine", layout, "spawn", "gloo", "cpu", 2, loss=loss)

    write_records([record("ddp", [2.0, 1.0, 0.5]), record("fsdp", [2.0, 1.0, 0.5])], tmp_path / "a.json")
    write_records([record("ddp", [2.0, 1.0, 0.5]), record("fsdp", [1.0, 0.5, 0.25])], tmp_path / "b.json")
    status, _, out = compare_curves(capsys, tmp_path / "a.json", tmp_path / "b.json")
    assert status == 1
    ddp, result, fsdp = out.splitlines()[:3]
    assert (ddp, fsdp) == ("mine · ddp · 2 ranks", "mine · fsdp · 2 ranks")
    assert result.startswith("equal: all 3 losses")
    assert "B is 0.5 times A" in out
    write_records([record("ddp", [2.0, 1.0, 0.5]), record("zero1", [2.0, 1.0, 0.5])], tmp_path / "c.json")
    status, _, out = compare_curves(capsys, tmp_path / "a.json", tmp_path / "c.json")
    assert status == 0
    assert out.splitlines()[0] == "mine · ddp · 2 ranks"
    assert out.endswith("not compared: mine · fsdp · 2 ranks (only in A), mine · zero1 · 2 ranks (only in B)\n")


def test_tensorboard_logs_are_compared(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    for name, change in (("a", ""), ("b", "order of sums")):
        with SummaryWriter(str(tmp_path / name)) as writer:
            for step, value in enumerate(losses(0, change)):
                writer.add_scalar("loss/train", value, step)
                writer.add_scalar("accuracy", 0.5, step)
    assert compare_curves(capsys, tmp_path / "a", tmp_path / "b")[:2] == (0, "rounding")
    assert main(["report", "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--column", "acuracy"]) == 2
    assert "did you mean accuracy?" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", None)
    assert main(["report", "compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 3
    assert "pip install 'everyrank[tensorboard]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file is empty"),
        ("step,accuracy\n0,1\n", "step, accuracy; add --column"),
        ("step,loss\n0,\n1,\n", "the column loss has no values"),
        ("step,loss\n0,high\n", "loss of row 1 is 'high'"),
        ("step,loss\nfirst,1\n", "step of row 1 is 'first'"),
        ("step,loss\n1000,1\n2000,1\n", "0 steps in common, and 2 are needed"),
        ("step,loss\n0,1\n", "1 step in common, and 2 are needed"),
        ("step,loss\n0,nan\n1,1\n", ""),
        ("a\0b", "not a text file"),
    ],
)
def test_unusable_files_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, message: str
) -> None:
    """The error is one line, and the exit code is 2. NaN is a valid loss."""
    valid_path = write_csv(tmp_path / "a.csv", [2.0, 1.5, 1.0])
    (tmp_path / "b.csv").write_text(content)
    status = main(["report", "compare", str(valid_path), str(tmp_path / "b.csv")])
    captured = capsys.readouterr()
    assert status == (2 if message else 1)
    if message:
        assert message in captured.err
        assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare", "a.csv"], "A and B"),
        (["compare", "a.csv", "missing.csv"], "missing.csv: there is no such file"),
        (["compare", "a.csv", "empty"], "empty: "),
        (["compare", "a.csv", "twice"], "0.csv and 1.csv"),
        (["compare", "a.csv", "a.csv", "--column", "train_los"], "did you mean train_loss?"),
        (["compare", "a.csv", "a.csv", "--precision", "fp8"], "--precision fp8: give one of float64"),
        (["compare", "a.csv", "a.csv", "--html", "p.html"], "leave --html and --markdown out"),
        (["compare", "a.csv", "bad.json"], "not JSON"),
        (["compare", "a.csv", "bad.jsonl"], "bad.jsonl:1: not a JSON object"),
        (["records.json", "--same-seed"], "--same-seed: only for everyrank report compare"),
    ],
)
def test_compare_refuses_wrong_arguments(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "a.csv", [2.0, 1.5, 1.0])
    (tmp_path / "empty").mkdir()
    for name in ("0", "1"):
        write_csv(tmp_path / "twice" / f"{name}.csv", [2.0, 1.0, 1.5])
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "bad.jsonl").write_text("[1]\n")
    assert main(["report", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_losses_without_a_ratio_are_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Losses of 0, and so different ones that their ratio is infinite."""
    for before, after in (([0.0, 0.0], [1.0, 1.0]), ([1e-300, 1.0], [1e300, 1.0])):
        paths = write_csv(tmp_path / "a.csv", before), write_csv(tmp_path / "b.csv", after)
        assert compare_curves(capsys, *paths)[1] == "undecided"


def test_rows_are_counted_if_steps_begin_again_in_each_epoch(tmp_path: Path) -> None:
    """Rows of one epoch do not replace those of another. A resumed training writes some steps twice."""
    path = tmp_path / "a.csv"
    path.write_text("epoch,batch,loss\n0,0,4\n0,1,3\n1,0,\n1,0,2\n1,1,1\n")
    assert read_curves(path)[0].losses == {0: 4.0, 1: 3.0, 2: 2.0, 3: 1.0}
    path.write_text("epoch,step,loss\n0,0,4\n0,1,3\n1,2,9\n1,2,2\n1,3,1\n")
    assert read_curves(path)[0].losses == {0: 4.0, 1: 3.0, 2: 2.0, 3: 1.0}


def test_training_log_is_read(tmp_path: Path) -> None:
    rows = [{"step": index, "loss": 1.0 / (index + 1), "lr": 0.1} for index in range(3)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (curve,) = read_curves(tmp_path)
    assert curve.losses == {0: 1.0, 1: 0.5, 2: 1 / 3}


def test_student_t_quantiles() -> None:
    """The values are from a printed table."""
    for value, freedom in ((12.706, 1), (4.3027, 2), (3.1824, 3), (2.2281, 10), (2.0423, 30)):
        assert _t_probability(value, freedom) == pytest.approx(0.975, abs=2e-5)


def test_small_late_loss_makes_no_scale(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Four digits of a late loss are few, but the factor is that of the first losses, which have more."""
    before = write_csv(tmp_path / "a.csv", [2.3, 1.0, 0.0005], digits=4)
    now = write_csv(tmp_path / "b.csv", [6.1, 3.0, 0.001], digits=4)
    _, result, out = compare_curves(capsys, before, now)
    assert result == "undecided"
    assert "scale" not in out


def test_shortest_run_is_named_if_few_steps_are_in_common(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_csv(tmp_path / "a" / "a1.csv", [2.0] * 9)
    write_csv(tmp_path / "a" / "a2.csv", [2.0])
    other = write_csv(tmp_path / "b.csv", [2.0] * 9)
    assert main(["report", "compare", str(tmp_path / "a"), str(other)]) == 2
    assert "a2.csv has 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("digits", "second", "result"), [(1, 3.6, "undecided"), (1, 12.4, "undecided"), (2, 4.6, "different")]
)
def test_scale_needs_enough_digits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, digits: int, second: float, result: str
) -> None:
    """With one digit, 12.4 / 2.3 = 5.39 is not distinguished from 5, and could be 5.2 or 5.6."""
    before = write_csv(tmp_path / "a.csv", [2.3, 2.2, 2.1], digits=digits)
    now = write_csv(tmp_path / "b.csv", [second, second, second], digits=digits)
    _, actual_result, out = compare_curves(capsys, before, now)
    assert actual_result == result
    assert ("multiplied by a constant" in out) is (result == "different")


def test_coarsest_precision_of_both_sides_is_assumed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Layouts do not name float32, which is the default."""
    for name, layout, factor in (("a", "single:precision=float64", 1.0), ("b", "single", 1 + 1e-7)):
        record = Record("mine", layout, "spawn", "gloo", "cpu", 1, loss=[2.0 * factor, 1.0 * factor])
        write_records([record], tmp_path / f"{name}.json")
    for sides in (("a.json", "b.json"), ("b.json", "a.json")):
        assert compare_curves(capsys, *(tmp_path / side for side in sides))[1] == "rounding"


def test_side_without_layouts_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    records = [Record("mine", layout, "spawn", "gloo", "cpu", 2, loss=[2.0, 1.0]) for layout in ("ddp", "fsdp")]
    write_records(records, tmp_path / "b.json")
    args = [write_csv(tmp_path / "a.csv", [2.0, 1.0]), tmp_path / "b.json"]
    assert main(["report", "compare", *map(str, args)]) == 2
    assert "A has no layout" in capsys.readouterr().err


def test_huge_loss_of_one_seed_is_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name, last in (("a/0", 1e200), ("a/1", 0.9), ("b/0", 0.8), ("b/1", 0.7)):
        write_csv(tmp_path / f"{name}.csv", [1.0, last])
    assert compare_curves(capsys, tmp_path / "a", tmp_path / "b")[1] == "noise of seeds"
