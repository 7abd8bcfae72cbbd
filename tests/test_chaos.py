"""`everyrank chaos`: inject faults into real processes, and check detection, recovery and the resumed training."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import everyrank
from everyrank.chaos import FAULTS, campaign, inject, trainer_process
from everyrank.chaos.campaign import _status, compare_runs
from everyrank.chaos.faults import TWO_HOSTS, why_unnoticed
from everyrank.chaos.trainer_run import TrainCall, TrainerRun
from everyrank.cli import main
from everyrank.errors import EveryrankError
from everyrank.launch import Launch
from everyrank.layout import parse_layout
from everyrank.options import ChaosOptions
from everyrank.record import Parity, Record, read_records, write_records
from everyrank.report.chaos import has_held, print_chaos
from everyrank.train.guard import _ranks_that_differ
from everyrank.workload import Source
from processes import Cli, only_error_line, refusal_message
from resuming import WORKLOAD

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="remaining processes are read from /proc, which needs Linux"
)

SHORT = ("--steps", "14", "--save-every", "3", "--guard-every", "3")


def run_chaos(cli: Cli, folder: Path, layout: str, *faults: str, size: int = 2, timeout: int = 60) -> list[Record]:
    """Run `everyrank chaos` with these faults, and return their Records."""
    (folder / "mine.py").write_text(WORKLOAD)
    arguments = ("chaos", "mine.py", "--layout", *layout.split(), "--processes", size, "--timeout", timeout, *SHORT)
    ended = cli(folder, *arguments, "--fault", *faults, "--json", "chaos.json")
    records = read_records(folder / "chaos.json")
    assert ended.status == (0 if all(map(has_held, records)) else 1), ended.err
    for fault in faults:
        assert fault in ended.out
    return records


def result_of(record: Record) -> dict[str, Any]:
    return record.provenance["chaos"]


def test_flipped_bit_is_located_and_training_resumes_bitwise(cli: Cli, tmp_path: Path) -> None:
    """The error names the ranks that differ. The training resumes from a checkpoint without the flipped bit."""
    [record] = run_chaos(cli, tmp_path, "ddp", "flipped-bit")
    assert (result_of(record)["status"], record.parity.status, record.parity.bitwise) == ("held", "equal", True), record
    assert "between rank 0 and rank 1" in result_of(record)["said"]
    assert result_of(record)["resumed_at"] == result_of(record)["newest_whole"] <= result_of(record)["update"]
    assert result_of(record)["left"] == 0


def test_truncated_checkpoint_is_refused_and_training_resumes_from_the_previous_one(cli: Cli, tmp_path: Path) -> None:
    """All ranks are killed and the checkpoint is truncated. The error names the checkpoint to resume from."""
    [record] = run_chaos(cli, tmp_path, "fsdp", "cut-checkpoint")
    assert result_of(record)["status"] == "held", record
    assert "damaged: " in result_of(record)["said"]
    assert result_of(record)["left"] == 0
    assert "the last good one: --resume " in result_of(record)["said"]
    assert result_of(record)["update"] - 6 <= result_of(record)["resumed_at"] <= result_of(record)["update"] - 3
    assert record.parity.bitwise


@pytest.mark.integration
def test_dropped_and_slow_network_link_between_two_hosts(cli: Cli, tmp_path: Path) -> None:
    """Two network namespaces act as two hosts.

    If the link drops, the ranks of one host report it. If the link is slow, the training continues.
    """
    dropped, delayed = run_chaos(cli, tmp_path, "fsdp", "link-dropped", "link-delayed", timeout=15)
    if result_of(dropped)["status"] == "not run here":
        pytest.skip(f"not verified here: {result_of(dropped)['reason']}")
    assert (result_of(dropped)["status"], result_of(delayed)["status"]) == ("held", "held"), (dropped, delayed)
    assert (dropped.backend, dropped.parity.bitwise, delayed.parity.bitwise) == ("gloo", True, True)
    assert re.search(r"no sign for \d+ s: .* link .* down", result_of(dropped)["said"])
    assert result_of(dropped)["resumed_at"] == result_of(dropped)["newest_whole"]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("layout", "left_out"),
    # stopping, slowing and ending processes does not depend on the layout
    [("ddp", ()), ("fsdp", ("kill-all", "kill-launcher", "stop-rank", "pause-rank", "slow-rank", "out-of-memory"))],
)
def test_every_fault_is_detected_and_recovered(
    cli: Cli, tmp_path: Path, layout: str, left_out: tuple[str, ...]
) -> None:
    """Each fault is detected in time and no process remains. The recovered training is bitwise equal."""
    faults = [name for name, fault in FAULTS.items() if fault.needs != TWO_HOSTS and name not in left_out]
    for record in run_chaos(cli, tmp_path, layout, *faults, timeout=15):
        result = result_of(record)
        if result["fault"] == "flipped-bit" and layout == "fsdp":
            assert result["status"] == "unseen"
            assert "on one rank only" in result["reason"]
        elif result["status"] != "not run here":
            assert result["status"] == "held", record
            assert result["left"] == 0
            assert record.parity.bitwise


# --- comparison with the baseline run


@pytest.fixture
def baseline(cli: Cli, tmp_path: Path) -> Path:
    """The folder of a training run without faults."""
    (tmp_path / "mine.py").write_text(WORKLOAD)
    arguments = ("train", "mine.py", "--steps", "6", "--out", "run", "--save-every", "3")
    assert cli(tmp_path, *arguments).status == 0
    return tmp_path / "run"


def test_comparison_finds_each_difference(baseline: Path, tmp_path: Path) -> None:
    """The runs differ in a loss, a logged update, a metric or a checkpoint."""
    run = Path(shutil.copytree(baseline, tmp_path / "copy", symlinks=True))
    parity = compare_runs(baseline, run, 6)
    assert parity == Parity("equal", True, 0.0, 1e-12, parity.scope)
    assert "6 updates" in parity.scope
    log_path, original_log = run / "log.jsonl", (run / "log.jsonl").read_text()
    rows = [json.loads(line) for line in original_log.splitlines()]
    for change, status in ((1e-15, "equal"), (1e-6, "different"), (float("nan"), "different")):
        rows[2]["loss"] = json.loads(original_log.splitlines()[2])["loss"] * (1 + change)
        log_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        changed = compare_runs(baseline, run, 6)
        assert (changed.status, changed.bitwise, changed.first_divergence) == (status, False, "update 2"), change
    log_path.write_text("".join(line + "\n" for line in original_log.splitlines()[:3] + original_log.splitlines()[4:]))
    assert compare_runs(baseline, run, 6).first_divergence == "5 of 6 updates are logged"
    log_path.write_text(original_log)
    original_record = (run / "record.json").read_text()
    (run / "record.json").write_text(original_record.replace('"eval_loss": ', '"eval_loss": 1'))
    changed = compare_runs(baseline, run, 6)
    assert (changed.status, changed.bitwise, changed.first_divergence) == ("different", False, "the metrics at the end")
    (run / "record.json").write_text(original_record.replace('"eval_loss"', '"other_loss"'))
    assert compare_runs(baseline, run, 6).status == "different"
    (run / "record.json").write_text(original_record)
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    changed = compare_runs(baseline, run, 6)  # step 3 is the last checkpoint now
    assert (changed.status, changed.bitwise) == ("different", False)


@pytest.mark.parametrize(
    ("metrics", "baseline_metrics", "difference"),
    [
        ({"loss": 2.0}, {"loss": 2.0}, 0.0),
        ({"loss": 2.0, "accuracy": 0.5}, {"loss": 4.0, "accuracy": 0.5}, 0.5),
        ({"loss": 2.0}, {"error": 2.0}, float("inf")),
        ({"loss": float("nan")}, {"loss": float("nan")}, 0.0),
        ({"loss": float("nan")}, {"loss": 2.0}, float("inf")),
        ({"loss": float("inf")}, {"loss": float("inf")}, 0.0),
        ({"loss": 2.0}, {"loss": float("inf")}, float("inf")),
    ],
)
def test_difference_of_metrics(
    monkeypatch: pytest.MonkeyPatch, metrics: dict[str, float], baseline_metrics: dict[str, float], difference: float
) -> None:
    metrics_of_runs = {"run": metrics, "baseline": baseline_metrics}
    monkeypatch.setattr(
        campaign, "read_records", lambda path: [SimpleNamespace(metrics=metrics_of_runs[path.parent.name])]
    )
    assert campaign._metrics_difference(Path("run"), Path("baseline")) == difference


@pytest.mark.parametrize("kind", ["linear", "frozen first", "lstm first"])
def test_nan_gradient_is_injected_once_into_a_trained_module(kind: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.LSTM(4, 4) if kind == "lstm first" else nn.Linear(4, 4)
            self.first.requires_grad_(kind != "frozen first")
            self.last = nn.Linear(4, 1)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            output = self.first(inputs)
            return self.last(output[0] if isinstance(output, tuple) else output)

    model = Model()
    inject._nan_gradient(inject.Injection("nan-gradient", 0, 0, ""), SimpleNamespace(model=model))
    with torch.no_grad():
        model(torch.ones(3, 4))  # an evaluation has no gradients
    for is_expected in (True, False):
        model.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert any(bool(gradient.isnan().any()) for gradient in gradients) is is_expected


def test_slow_baseline_is_reported_with_the_flag_for_a_longer_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits: list[float] = []

    def run_trainer(_call: object, _folder: Path, limit: float) -> TrainerRun:
        limits.append(limit)
        return TrainerRun(status=None, message="KeyboardInterrupt")

    monkeypatch.setattr(campaign, "run_trainer", run_trainer)
    launch = Launch(processes=2, start_timeout_seconds=600.0)
    with pytest.raises(EveryrankError, match=r"did not end within \d+ s; .* a longer --start-timeout") as error:
        campaign.train_baseline(Source("digits"), parse_layout("ddp"), launch, ChaosOptions(), tmp_path)
    assert "KeyboardInterrupt" not in str(error.value)
    assert limits[0] > 600


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--processes 4 --layout ddp fsdp:shard=3", "fsdp:shard=3"),
        ("--layout ddp single", "layout single runs in one process"),
        ("--layout ddp --launcher slurm", "the allocation has several: --launcher spawn"),
    ],
)
def test_wrong_call_is_refused_before_any_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, named: str
) -> None:
    monkeypatch.setattr(campaign, "train_baseline", pytest.fail)
    if "slurm" in arguments:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_NNODES", "2")
        monkeypatch.setenv("SLURM_NTASKS", "2")
    message = refusal_message(capsys, "chaos", "digits", *arguments.split())
    assert named in message
    assert "None" not in message


def test_other_systems_than_linux_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(campaign, "train_baseline", pytest.fail)
    monkeypatch.setattr(campaign.sys, "platform", "darwin")
    assert main(["chaos", "digits", "--layout", "ddp"]) == 3
    assert "Linux" in capsys.readouterr().err


RECOVERED = {"left": 0, "is_noticed": True, "notice_seconds": 1.0, "bound_seconds": 45.0, "updates_lost": 5}


@pytest.mark.parametrize(
    ("changes", "parity", "expected"),
    [
        ({}, "equal", "held"),
        ({"left": 1}, "equal", "processes left"),
        ({"is_noticed": False}, "equal", "not noticed"),
        ({"notice_seconds": 46.0}, "equal", "noticed late"),
        ({"recovery_failed": "why"}, "different", "not recovered"),
        ({}, "different", "another training"),
        ({"updates_lost": 6}, "equal", "too much lost"),
        ({"is_noticed": False, "reason": "no replica"}, "different", "unseen"),
        ({"left": 1, "reason": "no replica"}, "different", "processes left"),
    ],
)
def test_status_names_the_failed_expectation(changes: dict[str, Any], parity: str, expected: str) -> None:
    assert _status(FAULTS["kill-rank"], RECOVERED | changes, Parity(parity), ChaosOptions(save_every=5)) == expected


def test_table_shows_a_fault_that_no_process_detected(capsys: pytest.CaptureFixture[str]) -> None:
    """The table shows the message that was printed instead, without its terminal control characters.

    A name with brackets is no markup.
    """
    row = {"fault": "kill-rank", "update": 7, "rank": 1, "seen_by": "its supervisor", "status": "not \x1bnoticed"}
    row |= {"is_noticed": False, "notice_seconds": None, "said": "something \x1b[31melse"}
    parity = Parity("different", max_relative_difference=0.5, first_divergence="update 9")
    record = Record("runs[/2]", "ddp", "spawn", "shm", "cpu", 2, parity=parity, provenance={"chaos": row})
    assert not has_held(record)
    print_chaos([record])
    out = capsys.readouterr().out
    for text in (
        "NO PROCESS",
        "differs: update 9 (5e-01)",
        "not  noticed",
        "runs[/2]",
        "kill-rank: something  [31melse",
    ):
        assert text in out
    assert "\x1b" not in out


def test_report_prints_the_table_of_saved_chaos_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Record whose chaos fields have wrong types is shown like a Record of any other command."""
    row = {"fault": "kill-rank", "update": 7, "rank": 1, "seen_by": "its supervisor", "status": "held", "said": ""}
    row |= {"is_noticed": True, "notice_seconds": 0.25, "recover_seconds": None, "updates_lost": 2}
    not_run = {"fault": "link-dropped", "update": 7, "rank": 1, "status": "not run here", "reason": "one host"}
    for invalid_fields in ({}, {"update": "7"}, {"notice_seconds": []}, {"is_noticed": None}):
        records = [
            Record("mine", "ddp", "spawn", "shm", "cpu", 2, parity=Parity("equal", True), provenance={"chaos": result})
            for result in (row | invalid_fields, not_run)
        ]
        write_records(records, tmp_path / "chaos.json")
        assert main(["report", str(tmp_path / "chaos.json")]) == 0
        assert ("link-dropped: one host" in capsys.readouterr().out) == (not invalid_fields)


def test_flipped_bits_that_cannot_be_detected() -> None:
    """They are in layouts without replicas, or in layouts that broadcast all parameters in each update."""
    layouts = {
        **dict.fromkeys(("ddp", "fsdp:replicate=2,shard=2", "pipeline:pipeline=2,replicate=2", "context"), True),
        "ddp:tensor=2,replicate=2": True,
        **dict.fromkeys(
            ("fsdp", "zero1", "local_sgd", "pipeline", "tensor", "expert", "single", "ddp:tensor=4"), False
        ),
    }
    for layout, is_detected in layouts.items():
        assert (why_unnoticed("flipped-bit", parse_layout(layout), 4) == "") is is_detected, layout
        assert not any(why_unnoticed(name, parse_layout(layout), 4) for name in FAULTS if name != "flipped-bit")


@pytest.mark.parametrize(
    ("groups", "reported_ranks"),
    [
        ([[0], [1]], [0, 1]),  # either may be right
        ([[0, 1], [2, 3]], [0, 1, 2, 3]),
        ([[0, 1, 3], [2]], [2]),
        ([[0], [1, 2, 3, 4]], [0]),
        ([[1], [2], [0, 3, 4]], [1, 2]),
        ([[12], [0, 1, 2]], [12]),
    ],
)
def test_flipped_bit_is_reported_in_the_words_of_the_guard(groups: list[list[int]], reported_ranks: list[int]) -> None:
    line = f"after update 12: {_ranks_that_differ('model/0.weight', groups)}; all replicas were equal after update 4"
    fault = FAULTS["flipped-bit"]
    assert [rank for rank in range(13) if fault.is_reported_in(line, rank)] == reported_ranks


# --- invalid arguments, failing runs, and imports


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--layout", "ddp", "--fault", "fire"), "--fault fire: give some of kill-rank"),
        ((), "the following arguments are required: --layout"),
        (("--layout", "ddp", "--steps", "12", "--save-every", "6"), "--steps 20 or more"),
        (("--layout", "ddp", "--steps", "3"), "--steps 3: give at least 12"),
        (
            ("--layout", "ddp", "--processes", "2", "--nodes", "2", "--rendezvous", "h:1", "--node-rank", "0"),
            "--nodes 2",
        ),
    ],
)
def test_invalid_arguments_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], error: str
) -> None:
    assert error in refusal_message(capsys, "chaos", "digits", *arguments)


def test_link_fault_is_skipped_if_ranks_cannot_be_split_over_two_hosts(cli: Cli, tmp_path: Path) -> None:
    """The Record gives the reason."""
    [record] = run_chaos(cli, tmp_path, "single", "link-dropped", size=1)
    assert result_of(record)["status"] == "not run here"
    assert "two hosts" in result_of(record)["reason"]


def test_failing_baseline_run_ends_the_campaign(cli: Cli, tmp_path: Path) -> None:
    """The command prints one line with the error, and injects no fault."""
    (tmp_path / "mine.py").write_text(WORKLOAD.replace("def squared(output, target):", "def squared(output):"))
    ended = cli(tmp_path, "chaos", "mine.py", "--layout", "ddp", "--processes", 2, *SHORT)
    assert ended.status == 4, ended
    assert "the baseline run failed" in only_error_line(ended.err)


def test_only_the_chaos_command_imports_fault_injection() -> None:
    """The training loop has a hook for faults, but does not import them."""
    package = Path(everyrank.__file__).parent
    importing_modules = {
        path.relative_to(package).as_posix() for path in package.rglob("*.py") if "everyrank.chaos" in path.read_text()
    }
    assert {name for name in importing_modules if not name.startswith("chaos/")} == {"commands/chaos.py"}


def test_trainer_that_fails_before_it_makes_its_folder_reports_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run on a separate disk is copied when it ends. Without a folder to copy, ended.json has the error."""

    def fail(*_: object) -> int:
        raise EveryrankError("no such workload")

    call = TrainCall({}, "ddp", {}, str(tmp_path / "run"), 1, 0, 0, kept=str(tmp_path / "kept"))
    (tmp_path / "call.json").write_text(json.dumps(dataclasses.asdict(call)))
    monkeypatch.setattr(trainer_process, "train", fail)
    monkeypatch.setattr(sys, "argv", ["trainer_process", str(tmp_path / "call.json")])
    with pytest.raises(SystemExit) as ended:
        trainer_process.main()
    status = EveryrankError.exit_status
    assert ended.value.code == status
    assert json.loads((tmp_path / "ended.json").read_text()) == {"message": "no such workload", "status": status}
    assert not (tmp_path / "kept").exists()
