"""Comparison of a resumed run with an uninterrupted run. No rule of audit runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from everyrank.audit.finding import Findings
from everyrank.errors import UsageError
from everyrank.relations.resume import judge_resume, judge_updates_after_resume, resume_command
from everyrank.rerun import RankRecording, RecordedUpdate, ScriptHost
from everyrank.rerun.recording import EVALUATION_PASSES

SCRIPT = """
import argparse, os
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--resume")
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(64, 6)
data = TensorDataset(x, x[:, :3].argmax(1))
net = nn.Linear(6, 3)
optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
start = 0
if args.resume:
    state = torch.load(args.resume, weights_only=True)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    start = state["epoch"]
model = nn.parallel.DistributedDataParallel(net)
sampler = DistributedSampler(data)
for epoch in range(start, 4):
    sampler.set_epoch(epoch)
    for xb, yb in DataLoader(data, 8, sampler=sampler):
        optimizer.zero_grad()
        F.cross_entropy(model(xb), yb).backward()
        optimizer.step()
        schedule.step()
    if dist.get_rank() == 0:
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
        torch.save({**state, "schedule": schedule.state_dict()}, "last.pt")
        if epoch == 0:
            torch.save(net.state_dict(), "best.pt")  # the script never loads it
    with torch.no_grad():
        print(sum(F.cross_entropy(model(xb), yb).item() for xb, yb in DataLoader(data, 16)))
    dist.barrier()
"""


def update(weight: float, learning_rate: float, weight_after: float, gradient: float = 1.0) -> RecordedUpdate:
    """Return one update of a model with one parameter."""
    tensors = [{"weight": torch.tensor([value])} for value in (gradient, weight, weight_after)]
    return RecordedUpdate([1.0], ["train.py:9"], "train.py:10", *tensors, [learning_rate], 1, {})


def recording(updates: list[RecordedUpdate], first_sample: int, facts: dict[str, Any] | None = None) -> RankRecording:
    """Return the recording of a rank that reads one sample in each update, with consecutive values."""
    batches = [([0, 0], torch.full((1, 2), float(first_sample + index)), index) for index in range(len(updates))]
    return RankRecording(updates, [], "", {}, {}, [], batches, facts or {})


UNINTERRUPTED = [update(0.0, 0.1, 1.0), update(1.0, 0.1, 2.0), update(2.0, 0.05, 3.0)]


@pytest.mark.parametrize(
    ("resumed", "first_sample", "expected"),
    [
        (UNINTERRUPTED[1:], 1, ""),
        ([update(0.5, 0.1, 2.0)], 1, "weights"),
        ([update(1.0, 0.2, 2.0)], 1, "schedule is not resumed"),
        ([update(1.0, 0.1, 2.0)], 0, "different samples"),
        ([update(1.0, 0.1, 2.0, 3.0)], 1, "random numbers"),
        ([update(1.0, 0.1, 1.5)], 1, "optimizer's state is not resumed"),
        ([UNINTERRUPTED[1], update(2.0, 0.1, 3.0)], 1, "number 2 after a resume"),
    ],
)
def test_first_difference_after_resume_is_reported(
    resumed: list[RecordedUpdate], first_sample: int, expected: str
) -> None:
    """Weights, learning rate, samples, random numbers and optimizer state are checked in the order of importance."""
    findings = Findings()
    facts = {"loads": ["train.py:3"]}
    judge_updates_after_resume(
        recording(UNINTERRUPTED, 0), recording(resumed, first_sample, facts), 1, "train.py:12", findings
    )
    if not expected:
        assert findings == []
        return
    (finding,) = findings
    assert expected in finding.text
    assert (finding.rule, finding.location, finding.other_lines) == ("resume.differs", "train.py:3", ("train.py:12",))


def test_samples_of_single_numbers_are_compared_after_resume() -> None:
    """Such a batch is a list of tensors with one number for each sample, for example users and products."""
    runs = [recording(UNINTERRUPTED, 0), recording([update(1.0, 0.1, 2.0, 3.0)], 5, {"loads": ["train.py:3"]})]
    for run in runs:
        run.batches[:] = [(key, [torch.arange(2), rows[0]], before) for key, rows, before in run.batches]
    findings = Findings()
    judge_updates_after_resume(runs[0], runs[1], 1, "train.py:12", findings)
    assert "different samples are read" in findings[0].text


def test_batches_of_a_validation_are_not_compared() -> None:
    """The uninterrupted run validates after the update that saves: with gradients, and on the training loader."""
    facts = {"training_loaders": [0], "loads": ["train.py:3"]}
    uninterrupted, findings = recording(UNINTERRUPTED, 0, facts), Findings()
    validation = [([7, 0], torch.zeros(3, 2), 1)] * 2 + [([0, EVALUATION_PASSES], torch.ones(3, 2), 1)]
    uninterrupted.batches[1:1] = validation
    judge_updates_after_resume(uninterrupted, recording(UNINTERRUPTED[1:], 1, facts), 1, "train.py:12", findings)
    assert findings == []


def test_each_of_two_zipped_loaders_is_compared() -> None:
    """`zip(labeled, unlabeled)` trains on both, and a backward follows only the batches of the second."""
    runs = [recording(UNINTERRUPTED, 0), recording([update(1.0, 0.1, 2.0, 3.0)], 1)]
    for run, first_sample in zip(runs, (0, 7), strict=True):
        run.facts.update(training_loaders=[0], loads=["train.py:3"])
        labeled = [
            ([5, 0], torch.full((1, 2), float(first_sample + index)), index) for index in range(len(run.updates))
        ]
        run.batches[:] = [batch for pair in zip(labeled, run.batches, strict=True) for batch in pair]
    findings = Findings()
    judge_updates_after_resume(runs[0], runs[1], 1, "train.py:12", findings)
    assert "different samples are read" in findings[0].text


def test_samples_are_not_compared_if_a_batch_is_not_recorded() -> None:
    """An update reads two batches, and the uninterrupted run has recorded only the first."""
    facts = {"loads": ["train.py:3"]}
    uninterrupted = recording(UNINTERRUPTED, 0, {"update_without_batches": 1})
    resumed, findings = recording(UNINTERRUPTED[1:], 1, facts), Findings()
    resumed.batches.insert(1, ([0, 0], torch.full((1, 2), 9.0), 0))
    judge_updates_after_resume(uninterrupted, resumed, 1, "train.py:12", findings)
    assert findings == []
    resumed = recording([update(1.0, 0.1, 2.0, 3.0)], 1, facts)
    judge_updates_after_resume(uninterrupted, resumed, 1, "train.py:12", findings)
    assert "samples are not recorded" in findings[0].text


def test_learning_rate_of_the_group_that_differs_is_shown() -> None:
    """Other parameter groups may have equal learning rates."""
    expected, resumed = (dataclasses.replace(update(1.0, 0.1, 2.0), rates=[0.1, rate]) for rate in (0.001, 0.01))
    findings = Findings()
    facts = {"loads": ["train.py:3"]}
    judge_updates_after_resume(recording([expected] * 2, 0), recording([resumed], 1, facts), 1, "train.py:12", findings)
    assert "the learning rate is 0.01 instead of 0.001" in findings[0].text


def test_resume_arguments_are_split_like_in_a_shell() -> None:
    """An unclosed quote is refused."""
    assert resume_command("--resume 'my file.pt'").resume == ["--resume", "my file.pt"]
    with pytest.raises(UsageError, match=r"--resume-with .*close the quote"):
        resume_command("--resume 'x")
    with pytest.raises(UsageError, match=r"--stop-with .*close the quote"):
        resume_command("--resume x", "--epochs 'y")


@pytest.mark.parametrize("argument", ["--resume best_model.pt", "--resume=out/best_model.pt"])
def test_only_saves_of_the_named_file_are_resumed(argument: str) -> None:
    """The name of another file, model.pt, is a part of the name best_model.pt."""
    saves = [("out/model.pt", 1, "train.py:12"), ("out/best_model.pt", 2, "train.py:13")]
    all_updates, calls = [*UNINTERRUPTED, update(3.0, 0.05, 4.0)], list[int]()

    def run(_: int, updates: int, **__: object) -> SimpleNamespace:
        facts = {"saved_after": [save for save in saves if save[1] < updates], "loads": ["train.py:3"]}
        calls.append(updates)
        updates_of_rank = all_updates[:updates] if len(calls) < 3 else [update(0.5, 0.05, 2.0)]
        return SimpleNamespace(failure="", ranks=[recording(updates_of_rank, 2 * (len(calls) == 3), facts)])

    findings = Findings()
    fake_host: Any = SimpleNamespace(run=run)
    judge_resume(fake_host, ["train.py"], 2, resume_command(argument), findings, updates=4)
    assert calls == [4, 3, 2]  # uninterrupted, until the save, and the updates after it
    assert findings[0].other_lines == ("train.py:13",)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptHost, Path]]:
    """Yield a running script host and the path of the script that it runs."""
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text("")
    with ScriptHost([str(path)]) as script_host:
        yield script_host, path


@pytest.mark.integration
@pytest.mark.parametrize(
    ("removed_line", "expected"),
    [
        ("", ""),
        ('    start = state["epoch"]\n', "different samples"),
        ('    schedule.load_state_dict(state["schedule"])\n', "schedule is not resumed"),
        ('    net.load_state_dict(state["net"])\n', "weights"),
    ],
)
def test_state_that_a_script_does_not_load_is_reported(
    host: tuple[ScriptHost, Path], removed_line: str, expected: str
) -> None:
    """The script is stopped after a checkpoint and resumed from it."""
    script_host, path = host
    assert removed_line in SCRIPT
    path.write_text(SCRIPT.replace(removed_line, ""))
    findings = Findings()
    judge_resume(script_host, [str(path)], 2, resume_command("--resume last.pt"), findings, updates=12)
    assert findings.unchecked == []
    assert [expected in finding.text for finding in findings] == ([True] if expected else [])
