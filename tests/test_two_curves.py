"""`everyrank report compare`: rounding, noise of seeds, or a difference; and files that have no curve."""

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
    """A small training, with one change."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(64, 5, generator=generator), torch.randn(64, generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
        rate = 0.03 if change == "rate" else 0.01
        decay = 0.1 if change == "decay" else 0.0
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)
        rows: list[float] = []
        for _ in range(40):
            chosen = torch.randperm(64)[:16]
            chosen = chosen.flip(0) if change == "order of sums" else chosen
            loss = (model(inputs[chosen]).squeeze(1) - targets[chosen]).square().mean()
            loss = loss / 2 if change == "scale" else loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rows.append(loss.item())
    return rows


def write_csv(path: Path, values: list[float], step: Callable[[int], int] = int, digits: int | None = None) -> Path:
    path.parent.mkdir(exist_ok=True)
    texts = [repr(value) if digits is None else f"{value:.{digits}f}" for value in values]
    path.write_text("step,train_loss\n" + "".join(f"{step(index)},{text}\n" for index, text in enumerate(texts)))
    return path


def judged(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    status = main(["report", "compare", *map(str, words)])
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
def test_one_run_of_each(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, change: str, status: int, result: str
) -> None:
    before = write_csv(tmp_path / "a.csv", losses(0))
    now = write_csv(tmp_path / "b.csv", losses(1) if change == "seed" else losses(0, change))
    assert judged(capsys, before, now)[:2] == (status, result)


def test_seeds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Other seeds are noise, another learning rate is not; the smallest difference that would be seen is printed."""
    for seed in range(4):
        write_csv(tmp_path / "a" / f"{seed}.csv", losses(seed))
        write_csv(tmp_path / "b" / f"{seed}.csv", losses(seed + 10))
        write_csv(tmp_path / "slow" / f"{seed}.csv", [3 * value for value in losses(seed + 10)])
    status, result, out = judged(capsys, tmp_path / "a", tmp_path / "b")
    assert (status, result) == (0, "noise of seeds")
    assert "would not be seen" in out
    assert "differ only in their seeds" in out
    assert judged(capsys, tmp_path / "a", tmp_path / "slow")[:2] == (1, "different")
    assert judged(capsys, tmp_path / "a", tmp_path / "b" / "0.csv")[:2] == (0, "noise of seeds")


def test_few_digits_and_other_steps(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What is printed with two digits is compared with two digits; only steps in common count."""
    values = losses(0)
    before = write_csv(tmp_path / "a.csv", values)
    rounded = write_csv(tmp_path / "b.csv", values, digits=2)
    status, result, out = judged(capsys, before, rounded)
    assert (status, result) == (0, "rounding")
    assert "printed to 1e-02" in out
    every_second = write_csv(tmp_path / "c.csv", values[::2], step=lambda index: 2 * index)
    _, result, out = judged(capsys, before, every_second)
    assert result == "equal"
    assert "the 20 steps that all" in out
    jumping = write_csv(tmp_path / "d.csv", [value + 0.5 * (index > 30) for index, value in enumerate(values)])
    assert "agree before step 31" in judged(capsys, before, jumping)[2]
    nan = write_csv(tmp_path / "e.csv", [math.nan if index > 7 else value for index, value in enumerate(values)])
    assert "from step 8 on" in judged(capsys, before, nan)[2]


def test_records_layout_by_layout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def record(layout: str, loss: list[float]) -> Record:
        return Record("mine", layout, "spawn", "gloo", "cpu", 2, loss=loss)

    write_records([record("ddp", [2.0, 1.0, 0.5]), record("fsdp", [2.0, 1.0, 0.5])], tmp_path / "a.json")
    write_records([record("ddp", [2.0, 1.0, 0.5]), record("fsdp", [1.0, 0.5, 0.25])], tmp_path / "b.json")
    status, _, out = judged(capsys, tmp_path / "a.json", tmp_path / "b.json")
    assert status == 1
    ddp, result, fsdp = out.splitlines()[:3]
    assert (ddp, fsdp) == ("mine · ddp · 2 ranks", "mine · fsdp · 2 ranks")
    assert result.startswith("equal: all 3 losses")
    assert "B is 0.5 times A" in out


def test_tensorboard(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    for name, change in (("a", ""), ("b", "order of sums")):
        with SummaryWriter(str(tmp_path / name)) as writer:
            for step, value in enumerate(losses(0, change)):
                writer.add_scalar("loss/train", value, step)
                writer.add_scalar("accuracy", 0.5, step)
    assert judged(capsys, tmp_path / "a", tmp_path / "b")[:2] == (0, "rounding")
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
def test_hostile_files(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, message: str) -> None:
    """One line and status 2; NaN in one of them is a result."""
    fine = write_csv(tmp_path / "a.csv", [2.0, 1.5, 1.0])
    (tmp_path / "b.csv").write_text(content)
    status = main(["report", "compare", str(fine), str(tmp_path / "b.csv")])
    shown = capsys.readouterr()
    assert status == (2 if message else 1)
    if message:
        assert message in shown.err
        assert len(shown.err.splitlines()) == 1


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
def test_wrong_calls(
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


def test_log_of_a_training(tmp_path: Path) -> None:
    rows = [{"step": index, "loss": 1.0 / (index + 1), "lr": 0.1} for index in range(3)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (curve,) = read_curves(tmp_path)
    assert curve.losses == {0: 1.0, 1: 0.5, 2: 1 / 3}


def test_student_t() -> None:
    """Values of a printed table."""
    for value, freedom in ((12.706, 1), (4.3027, 2), (3.1824, 3), (2.2281, 10), (2.0423, 30)):
        assert _t_probability(value, freedom) == pytest.approx(0.975, abs=2e-5)
