"""`everyrank chaos`: faults in real processes, who notices, and that the training afterwards is the one it was."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import everyrank
from everyrank.chaos import FAULTS
from everyrank.chaos.campaign import _status, compare_runs
from everyrank.chaos.faults import TWO_HOSTS, why_unnoticed
from everyrank.cli import main
from everyrank.layout import parse_layout
from everyrank.record import Parity, Record, read_records, write_records
from everyrank.report.chaos import has_held, print_chaos
from processes import Cli, one_line, refused
from resuming import WORKLOAD

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="which processes are left is read from Linux's /proc")

SHORT = ("--steps", "14", "--save-every", "3", "--guard-every", "3")


def struck(cli: Cli, folder: Path, layout: str, *faults: str, size: int = 2, timeout: int = 60) -> list[Record]:
    """The Records of these faults."""
    (folder / "mine.py").write_text(WORKLOAD)
    words = ("chaos", "mine.py", "--layout", *layout.split(), "--processes", size, "--timeout", timeout, *SHORT)
    done = cli(folder, *words, "--fault", *faults, "--json", "chaos.json")
    records = read_records(folder / "chaos.json")
    assert done.status == (0 if all(map(has_held, records)) else 1), done.err
    for fault in faults:
        assert fault in done.out
    return records


def outcome(record: Record) -> dict[str, Any]:
    return record.provenance["chaos"]


def test_a_flipped_bit(cli: Cli, tmp_path: Path) -> None:
    """It is noticed by rank and parameter, and the training goes on to the last bit from a checkpoint without it."""
    [record] = struck(cli, tmp_path, "ddp", "flipped-bit")
    assert (outcome(record)["status"], record.parity.status, record.parity.bitwise) == ("held", "equal", True), record
    assert "between rank 0 and rank 1" in outcome(record)["said"]
    assert outcome(record)["resumed_at"] == outcome(record)["newest_whole"] <= outcome(record)["update"]
    assert outcome(record)["left"] == 0


def test_a_spoilt_checkpoint_is_refused_and_the_one_before_taken(cli: Cli, tmp_path: Path) -> None:
    """Cut short, after all ranks were killed: --resume names it, and the training goes on from the one it offers."""
    [record] = struck(cli, tmp_path, "fsdp", "cut-checkpoint")
    assert outcome(record)["status"] == "held", record
    assert "damaged: " in outcome(record)["said"]
    assert outcome(record)["left"] == 0
    assert "the last good one: --resume " in outcome(record)["said"]
    assert outcome(record)["update"] - 6 <= outcome(record)["resumed_at"] <= outcome(record)["update"] - 3
    assert record.parity.bitwise


@pytest.mark.integration
def test_a_link_between_two_hosts(cli: Cli, tmp_path: Path) -> None:
    """Two network namespaces and a link of their own: gone, the ranks of one say so; slow, the training goes on."""
    dropped, delayed = struck(cli, tmp_path, "fsdp", "link-dropped", "link-delayed", timeout=15)
    if outcome(dropped)["status"] == "not run here":
        pytest.skip(f"not verified here: {outcome(dropped)['reason']}")
    assert (outcome(dropped)["status"], outcome(delayed)["status"]) == ("held", "held"), (dropped, delayed)
    assert (dropped.backend, dropped.parity.bitwise, delayed.parity.bitwise) == ("gloo", True, True)
    assert re.search(r"no sign for \d+ s: .* link .* down", outcome(dropped)["said"])
    assert outcome(dropped)["resumed_at"] == outcome(dropped)["newest_whole"]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("layout", "left_out"),
    # how processes are stopped, slowed and ended does not depend on the layout
    [("ddp", ()), ("fsdp", ("kill-all", "kill-launcher", "stop-rank", "pause-rank", "slow-rank", "out-of-memory"))],
)
def test_every_fault_is_held(cli: Cli, tmp_path: Path, layout: str, left_out: tuple[str, ...]) -> None:
    """All of the table, on two ranks: noticed in time, recovered, nothing left, the same training."""
    faults = [name for name, fault in FAULTS.items() if fault.needs != TWO_HOSTS and name not in left_out]
    for record in struck(cli, tmp_path, layout, *faults, timeout=15):
        found = outcome(record)
        if found["fault"] == "flipped-bit" and layout == "fsdp":
            assert found["status"] == "unseen"
            assert "on one rank only" in found["reason"]
        elif found["status"] != "not run here":
            assert found["status"] == "held", record
            assert found["left"] == 0
            assert record.parity.bitwise


# --- what it is held against


@pytest.fixture
def baseline(cli: Cli, tmp_path: Path) -> Path:
    """A training that nothing happened to."""
    (tmp_path / "mine.py").write_text(WORKLOAD)
    words = ("train", "mine.py", "--steps", "6", "--out", "run", "--save-every", "3")
    assert cli(tmp_path, *words).status == 0
    return tmp_path / "run"


def test_another_training_is_seen(baseline: Path, tmp_path: Path) -> None:
    """One loss in its last bit, one update that is not there, one metric, one tensor of the last checkpoint."""
    run = Path(shutil.copytree(baseline, tmp_path / "copy", symlinks=True))
    parity = compare_runs(baseline, run, 6)
    assert parity == Parity("equal", True, 0.0, 1e-12, parity.scope)
    assert "6 updates" in parity.scope
    log, before = run / "log.jsonl", (run / "log.jsonl").read_text()
    rows = [json.loads(line) for line in before.splitlines()]
    for change, status in ((1e-15, "equal"), (1e-6, "different"), (float("nan"), "different")):
        rows[2]["loss"] = json.loads(before.splitlines()[2])["loss"] * (1 + change)
        log.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = compare_runs(baseline, run, 6)
        assert (found.status, found.bitwise, found.first_divergence) == (status, False, "update 2"), change
    log.write_text("".join(line + "\n" for line in before.splitlines()[:3] + before.splitlines()[4:]))
    assert compare_runs(baseline, run, 6).first_divergence == "5 of 6 updates are logged"
    log.write_text(before)
    text = (run / "record.json").read_text()
    (run / "record.json").write_text(text.replace('"eval_loss": ', '"eval_loss": 1'))
    assert compare_runs(baseline, run, 6).first_divergence == "the metrics at the end"
    (run / "record.json").write_text(text)
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    found = compare_runs(baseline, run, 6)  # the one before is the last one now
    assert (found.status, found.bitwise) == ("different", False)


HELD = {"left": 0, "is_noticed": True, "notice_seconds": 1.0, "bound_seconds": 45.0, "updates_lost": 5}


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
def test_what_did_not_hold_is_named(changes: dict[str, Any], parity: str, expected: str) -> None:
    from everyrank.options import ChaosOptions

    assert _status(FAULTS["kill-rank"], HELD | changes, Parity(parity), ChaosOptions(save_every=5)) == expected


def test_a_fault_that_does_not_hold_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """NO PROCESS noticed, and what was said in its place; a name from elsewhere steers no terminal."""
    row = {"fault": "kill-rank", "update": 7, "rank": 1, "seen_by": "its supervisor", "status": "not noticed"}
    row |= {"is_noticed": False, "notice_seconds": None, "said": "something \x1b[31melse"}
    parity = Parity("different", max_relative_difference=0.5, first_divergence="update 9")
    record = Record("mine", "ddp", "spawn", "shm", "cpu", 2, parity=parity, provenance={"chaos": row})
    assert not has_held(record)
    print_chaos([record])
    out = capsys.readouterr().out
    for text in ("NO PROCESS", "differs: update 9 (5e-01)", "not noticed", "kill-rank: something  [31melse"):
        assert text in out
    assert "\x1b" not in out


def test_records_of_faults_can_be_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the same table; a Record whose fields are not of their kinds is shown as any other."""
    row = {"fault": "kill-rank", "update": 7, "rank": 1, "seen_by": "its supervisor", "status": "held", "said": ""}
    row |= {"is_noticed": True, "notice_seconds": 0.25, "recover_seconds": None, "updates_lost": 2}
    not_run = {"fault": "link-dropped", "update": 7, "rank": 1, "status": "not run here", "reason": "one host"}
    for broken in ({}, {"update": "7"}, {"notice_seconds": []}, {"is_noticed": None}):
        records = [
            Record("mine", "ddp", "spawn", "shm", "cpu", 2, parity=Parity("equal", True), provenance={"chaos": outcome})
            for outcome in (row | broken, not_run)
        ]
        write_records(records, tmp_path / "chaos.json")
        assert main(["report", str(tmp_path / "chaos.json")]) == 0
        assert ("link-dropped: one host" in capsys.readouterr().out) == (not broken)


def test_which_flips_nobody_can_see() -> None:
    """Only of layouts without replicas, or that send out all parameters again; no other fault has an excuse."""
    for layout, is_seen in (("ddp", True), ("fsdp:replicate=2,shard=2", True), ("fsdp", False), ("zero1", False)):
        assert (why_unnoticed("flipped-bit", parse_layout(layout), 4) == "") is is_seen, layout
        assert not any(why_unnoticed(name, parse_layout(layout), 4) for name in FAULTS if name != "flipped-bit")


# --- calls that cannot be, and what a training knows of all this


@pytest.mark.parametrize(
    ("words", "line"),
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
def test_calls_that_cannot_be(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], line: str) -> None:
    assert line in refused(capsys, "chaos", "digits", *words)


def test_ranks_that_do_not_divide_over_two_hosts(cli: Cli, tmp_path: Path) -> None:
    """It is said; what needs no hosts is not in the way of that."""
    [record] = struck(cli, tmp_path, "single", "link-dropped", size=1)
    assert outcome(record)["status"] == "not run here"
    assert "two hosts" in outcome(record)["reason"]


def test_a_training_that_fails_without_a_fault(cli: Cli, tmp_path: Path) -> None:
    """It is said, with its own line; nothing is struck."""
    (tmp_path / "mine.py").write_text(WORKLOAD.replace("def squared(output, target):", "def squared(output):"))
    done = cli(tmp_path, "chaos", "mine.py", "--layout", "ddp", "--processes", 2, *SHORT)
    assert done.status == 4, done
    assert "the baseline run failed" in one_line(done.err)


def test_a_training_imports_no_fault() -> None:
    """The loop knows a hook, and no fault: nothing but the command imports this room."""
    package = Path(everyrank.__file__).parent
    names = {
        path.relative_to(package).as_posix() for path in package.rglob("*.py") if "everyrank.chaos" in path.read_text()
    }
    assert {name for name in names if not name.startswith("chaos/")} == {"commands/chaos.py"}
