"""What must not be lost, whatever goes wrong beside the updates."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import pytest
import torch

from everyrank.runs import checkpoints_of, damage, find_checkpoint, write_metadata
from processes import Cli, one_line
from resuming import WIDTH, WORKLOAD, spoilt, words_for

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="looking for left processes needs Linux's /proc"
)

# --- what must not be lost

LATE = """
import torch
from everyrank import Workload
from everyrank.errors import WorkloadError

class Late(torch.optim.SGD):
    done = 0
    def step(self, *_):
        self.done += 1
        if self.done == 9:
            raise WorkloadError("update 9 is one too many")
        return super().step()

workload = Workload(
    name="late", model=lambda: torch.nn.Linear(1, 1), train_data=lambda: [(torch.ones(1), torch.ones(1))] * 8,
    loss=lambda output, target: (((output - target) ** 2).sum(), len(target)),
    optimizer=lambda model: Late(model.parameters(), lr=0.1), global_batch=2, epochs=4)
"""


def test_a_run_that_fails_late_keeps_its_folder(cli: Cli, tmp_path: Path) -> None:
    """Nobody asked for it by --out, but two epochs of work and their checkpoints are in it."""
    (tmp_path / "late.py").write_text(LATE)
    done = cli.on_ranks(tmp_path, "train", "late.py")
    assert done.status == 2, done
    assert "update 9 is one too many" in done.err
    (run,) = (tmp_path / "runs").iterdir()
    assert [one.metadata.step for one in checkpoints_of(run)] == [4, 8]


def test_a_finished_run_is_not_begun_again(cli: Cli, tmp_path: Path) -> None:
    """It has no checkpoint to go on from, and its log and Record would be overwritten."""
    words = ("train", "digits", *WIDTH, "--steps", "2", "--save-every", "0", "--out", "run")
    assert cli.on_ranks(tmp_path, *words).status == 0
    log = (tmp_path / "run" / "log.jsonl").read_text()
    done = cli.on_ranks(tmp_path, *words, "--resume")
    assert done.status == 2
    assert "--resume" in done.err
    assert (tmp_path / "run" / "log.jsonl").read_text() == log


def test_the_best_of_a_run_is_known_after_going_on(cli: Cli, tmp_path: Path) -> None:
    """The newest checkpoint is not the best; what is worse than that one does not take its place."""
    words = ("train", "digits", *WIDTH, "--save-every", "3", "--evaluate-every", "3", "--keep", "1", "--out", "run")
    assert cli.on_ranks(tmp_path, *words, "--steps", "6").status == 0
    run = tmp_path / "run"
    newest = find_checkpoint(run)
    metrics = newest.metadata.metrics | {"top1": 2.0}  # nothing can be better
    write_metadata(newest.path, dataclasses.replace(newest.metadata, metrics=metrics))
    assert cli.on_ranks(tmp_path, *words, "--steps", "12", "--resume").status == 0
    assert [one.metadata.step for one in checkpoints_of(run)] == [6, 12]
    assert (run / "checkpoints" / "best").resolve() == newest.path


def test_predictions_of_unequal_rows_are_refused(cli: Cli, tmp_path: Path) -> None:
    """Two ranks whose rows have other shapes cannot be put into one file; they must not be put in wrongly."""
    (tmp_path / "mine.py").write_text(
        WORKLOAD
        + "\nimport dataclasses\n"
        "workload = dataclasses.replace(workload, predict=lambda output: torch.zeros(len(output), 2 + RANK))\n".replace(
            "RANK", "int(__import__('os').environ['RANK'])"
        )
    )
    assert cli.on_ranks(tmp_path, *words_for("ddp", "--steps", "5"), size=2).status == 0
    done = cli.on_ranks(tmp_path, "predict", "mine.py", "--layout", "ddp", "--resume", "run", "--out", "p.npy", size=2)
    assert done.status == 2, done
    assert "rows of shape" in done.err
    assert not (tmp_path / "p.npy").exists()
    assert not list(tmp_path.glob("*.partial"))


def test_a_request_is_noted_and_a_second_sigterm_is_not() -> None:
    """SIGUSR1 as often as it comes; a SIGTERM after a request does what it did before."""
    from everyrank.launch import catch_signals

    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with catch_signals(signal.SIGTERM, signal.SIGUSR1) as stop:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.asked is signal.SIGUSR1
            assert seen == []
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


# --- an output that cannot be written

UNSEEN = """\
import os
import sys

from everyrank.cli import main

if sys.argv[1] == "pipe":
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 1)
else:
    os.dup2(os.open(sys.argv[1], os.O_WRONLY), 1)
sys.stdout = open(1, "w", closefd=False)
main(sys.argv[2:])
"""


@pytest.mark.parametrize(
    ("where", "said"), [("/dev/full", "No space left on device"), ("pipe", "the reader of the pipe has gone")]
)
def test_a_training_that_nobody_can_see_comes_to_its_end(cli: Cli, tmp_path: Path, where: str, said: str) -> None:
    """`train ... | head -1` and a full disk behind `> file`: the checkpoints are there, and the status is 0."""
    (tmp_path / "unseen.py").write_text(UNSEEN)
    words = ("train", "digits", *WIDTH, "--save-every", "3", "--steps", "6", "--out", "run")
    done = cli.on_ranks(tmp_path, where, *words, script="unseen.py")
    assert done.status == 0, done
    assert done.err == f"standard output cannot be written ({said}); the training continues\n"
    assert [one.metadata.step for one in checkpoints_of(tmp_path / "run")] == [3, 6]
    assert (tmp_path / "run" / "record.json").exists()


# --- what goes wrong beside the updates


@pytest.mark.parametrize("more", ['metrics={"bad": rises}', 'derived={"bad": derives}'])
@pytest.mark.parametrize("words", [(), ("--save-async",)], ids=["at once", "async"])
def test_an_evaluation_that_raises_loses_no_epoch(cli: Cli, tmp_path: Path, more: str, words: tuple[str, ...]) -> None:
    done = cli.on_ranks(tmp_path, "train", spoilt(tmp_path, more=more), *words, "--out", "run", "--device", "cpu")
    assert done.status in (2, 4), done
    assert "spoilt.py" in done.err.splitlines()[-1]
    (one,) = checkpoints_of(tmp_path / "run")
    assert (one.metadata.step, one.metadata.metrics, damage(one)) == (4, {}, None)


@pytest.mark.parametrize("words", [(), ("--save-async",)], ids=["at once", "async"])
def test_a_checkpoint_learns_how_good_it_is(cli: Cli, tmp_path: Path, words: tuple[str, ...]) -> None:
    """It was saved before it was evaluated."""
    done = cli.on_ranks(tmp_path, "train", spoilt(tmp_path), *words, "--out", "run", "--device", "cpu")
    assert done.status == 0, done
    there = checkpoints_of(tmp_path / "run")
    assert [(one.metadata.step, list(one.metadata.metrics), damage(one)) for one in there] == [
        (4, ["eval_loss"], None),
        (8, ["eval_loss"], None),
    ]
    assert (tmp_path / "run" / "checkpoints" / "best").resolve() == there[-1].path.resolve()


AS_ON_CUDA = """
import torch
from everyrank.parallel import trainable
from everyrank import Workload

trainable.check_total = lambda *_: None  # reading the loss would be a wait in every update

class Counted(torch.optim.SGD):
    done = 0
    def step(self, *_):
        Counted.done += 1
        return super().step()

def loss(output, target):
    return ((output - target) ** 2).sum() * (float("nan") if Counted.done == 12 else 1.0), len(target)

workload = Workload(
    name="nan", model=lambda: torch.nn.Linear(1, 1), train_data=lambda: [(torch.ones(1), torch.ones(1))] * 200,
    loss=loss, optimizer=lambda model: Counted(model.parameters(), lr=0.1), global_batch=2)
"""


@pytest.mark.parametrize("words", [(), ("--save-async",)], ids=["at once", "async"])
def test_nan_that_is_seen_late_is_named_and_not_saved(cli: Cli, tmp_path: Path, words: tuple[str, ...]) -> None:
    """On CUDA losses are looked at some updates later: the one that began it is named, what is saved is from before."""
    (tmp_path / "nan.py").write_text(AS_ON_CUDA)
    more = ("--layout", "ddp", "--steps", "60", "--save-every", "5", "--out", "run", "--device", "cpu")
    done = cli.on_ranks(tmp_path, "train", "nan.py", *more, *words, size=2)
    assert done.status == 4, done
    assert "update 12: the loss is nan" in done.err
    there = checkpoints_of(tmp_path / "run")
    assert [(one.metadata.step, damage(one)) for one in there] == [(5, None), (10, None)]
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 12, "the good losses before it"


@pytest.mark.parametrize("words", [(), ("--evaluate-every", "1")], ids=["at the end", "within"])
def test_what_the_last_update_spoils_is_not_saved(cli: Cli, tmp_path: Path, words: tuple[str, ...]) -> None:
    """No loss shows it any more: the parameters do."""
    workload = spoilt(tmp_path, rate="1e999")
    done = cli.on_ranks(tmp_path, "train", workload, "--steps", "1", *words, "--out", "run", "--device", "cpu")
    assert done.status == 4, done
    assert "update 0: parameter weight became infinite" in done.err
    assert not checkpoints_of(tmp_path / "run")
    assert not (tmp_path / "run" / "record.json").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight": torch.ones(2, 3, dtype=torch.complex64)}, "weight is torch.complex64, the model's torch.float32"),
        ({"weight": torch.ones(2, 3, dtype=torch.int64)}, "weight is torch.int64, the model's torch.float32"),
        ({"bias": torch.ones(2, dtype=torch.bool)}, "bias is torch.bool, the model's torch.float32"),
        ({"bias": torch.tensor([1.0, float("nan")])}, "bias has numbers that are NaN"),
    ],
    ids=["complex", "whole", "bool", "nan"],
)
def test_weights_of_other_numbers_are_refused(
    cli: Cli, tmp_path: Path, change: dict[str, torch.Tensor], said: str
) -> None:
    """A cast would drop what they mean; the file is named, and no update blamed."""
    torch.save({"weight": torch.ones(2, 3), "bias": torch.zeros(2)} | change, tmp_path / "w.pt")
    done = cli.on_ranks(tmp_path, "train", spoilt(tmp_path), "--pretrained", "w.pt", "--out", "run", "--device", "cpu")
    assert done.status == 2, done
    assert f"w.pt: {said}" in one_line(done.err)
    torch.save({"weight": torch.ones(2, 3).half(), "bias": torch.zeros(2).double()}, tmp_path / "w.pt")
    words = ("--pretrained", "w.pt", "--out", "again", "--device", "cpu")
    assert cli.on_ranks(tmp_path, "train", spoilt(tmp_path), *words).status == 0


COMPLEX = """
def first_model():
    model = nn.Linear(3, 2)
    model.register_PART("turns", MADE)
    return model
"""


@pytest.mark.parametrize(
    ("part", "made"),
    [("parameter", "nn.Parameter(torch.ones(2, dtype=torch.complex64))"), ("buffer", "torch.ones(2) * 1j")],
)
def test_a_model_of_complex_numbers_is_refused(cli: Cli, tmp_path: Path, part: str, made: str) -> None:
    """They were made real without a word."""
    workload = Path(spoilt(tmp_path))
    model = COMPLEX.replace("PART", part).replace("MADE", made)
    workload.write_text(workload.read_text().replace("\nworkload =", model + "\nworkload ="))
    done = cli.on_ranks(tmp_path, "train", workload, "--device", "cpu")
    assert done.status == 2, done
    assert "turns of the model is torch.complex64" in one_line(done.err)


def test_a_model_that_is_no_number_from_the_start(cli: Cli, tmp_path: Path) -> None:
    """No update before the first one is blamed."""
    workload = Path(spoilt(tmp_path, more="clip_norm=1.0,"))
    model = "    model = nn.Linear(3, 2)\n    nn.init.constant_(model.weight, float('nan'))\n    return model"
    workload.write_text(workload.read_text().replace("    return nn.Linear(3, 2)", model))
    done = cli.on_ranks(tmp_path, "train", workload, "--device", "cpu")
    assert done.status == 4, done
    assert "parameter weight" in done.err
    assert "update before" not in done.err
