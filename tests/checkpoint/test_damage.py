"""What is damaged, foreign, or of another training is named in one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import zoo
from checkpointing import DIGITS, Going, Mixed, begins, change_about, step, training, try_digits
from everyrank.checkpoint import resume
from everyrank.cli import main
from everyrank.errors import UsageError
from everyrank.runs import checkpoint_named, find_checkpoint, newest_whole
from everyrank.world import World
from processes import Cli, one_line, refused

# --- what is damaged, foreign or hostile


def cut_tensors(folder: Path) -> None:
    path = folder / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])


def lose_tensors(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()


def lose_values(folder: Path) -> None:
    (folder / "training.pt").unlink()


def lose_table(folder: Path) -> None:
    (folder / ".metadata").unlink()


def cut_about(folder: Path) -> None:
    path = folder / "about.json"
    path.write_bytes(path.read_bytes()[:200])


def empty_about(folder: Path) -> None:
    (folder / "about.json").write_bytes(b"")


def list_about(folder: Path) -> None:
    (folder / "about.json").write_text("[1, 2]")


def binary_about(folder: Path) -> None:
    (folder / "about.json").write_bytes(bytes(range(128, 256)))


def deep_about(folder: Path) -> None:
    (folder / "about.json").write_text("[" * 100_000)


def wrong(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        change_about(folder, **changes)

    change.__name__ = repr(changes)
    return change


SIZES = [cut_tensors, lose_tensors, lose_values, lose_table]

ABOUTS = [cut_about, empty_about, list_about, binary_about, deep_about]

TYPES = [
    wrong(step="6"),
    wrong(step=-1),
    wrong(step=None),
    wrong(metrics=[0.5]),
    wrong(metrics={"top1": "high"}),
    wrong(best_by=["top1"]),
    wrong(files=[1]),
    wrong(files={"training.pt": 3}),
    wrong(files={"../training.pt": [3, 4]}),
    wrong(settings=3),
    wrong(aliases=3),
    wrong(updates_per_epoch="x"),
]


@pytest.mark.parametrize("spoil", [*SIZES, *ABOUTS, *TYPES], ids=lambda spoil: spoil.__name__)
def test_a_damaged_checkpoint_is_named_and_the_last_good_one_offered(
    run_folder: Path, spoil: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the run or the checkpoint is named: status 2, one line, and what to go on from."""
    spoil(step(run_folder, 6))
    for place in ((), (step(run_folder, 6),)):
        line = refused(capsys, *DIGITS, "--out", run_folder, "--resume", *place)
        assert str(step(run_folder, 6)) in line
        assert f"--resume {step(run_folder, 4)}" in line


@pytest.mark.parametrize("spoil", [cut_tensors, cut_about], ids=lambda spoil: spoil.__name__)
def test_a_training_that_goes_on_by_itself_takes_the_newest_whole_one(
    run_folder: Path, spoil: Callable[[Path], None]
) -> None:
    """Nobody is there to read what is offered."""
    found = newest_whole(run_folder)
    assert found is not None
    assert found.path == step(run_folder, 6)
    for number in (6, 4):
        spoil(step(run_folder, number))
    found = newest_whole(run_folder)
    assert found is not None
    assert found.path == step(run_folder, 2)
    spoil(step(run_folder, 2))
    assert newest_whole(run_folder) is None


@pytest.mark.parametrize("spoil", [cut_tensors, cut_about], ids=lambda spoil: spoil.__name__)
def test_where_all_are_damaged_nothing_is_offered(
    run_folder: Path, spoil: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (2, 4, 6):
        spoil(step(run_folder, number))
    for place in ((), (step(run_folder, 6),), (run_folder,)):
        line = refused(capsys, *DIGITS, "--out", run_folder, "--resume", *place)
        assert "--resume" not in line
        assert str(run_folder) in line


@pytest.mark.parametrize(
    ("place", "said"), [(".", "no complete checkpoint"), ("./", "no complete checkpoint"), ("", "is not a folder")]
)
def test_the_folder_where_we_are_is_a_place_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str, said: str
) -> None:
    """It is not the --resume without a place, which may begin anew."""
    monkeypatch.chdir(tmp_path)
    line = refused(capsys, *DIGITS, "--out", tmp_path / "run", "--resume", place)
    assert said in line
    assert not (tmp_path / "run").exists()


def test_the_one_that_is_offered_is_whole(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint whose bytes differ, with its size as it was, is not offered."""
    cut_tensors(step(run_folder, 6))
    flip(step(run_folder, 4) / "__0_0.distcp")
    line = refused(capsys, *DIGITS, "--out", run_folder, "--resume")
    assert f"--resume {step(run_folder, 2)}" in line


def test_inspect_says_which_are_damaged(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1, and every checkpoint has its row."""
    assert main(["checkpoint", "inspect", str(run_folder)]) == 0
    assert "DAMAGED" not in capsys.readouterr().out
    flip(step(run_folder, 4) / "__0_0.distcp")
    assert main(["checkpoint", "inspect", str(run_folder)]) == 1
    printed = capsys.readouterr().out
    assert printed.count("DAMAGED") == 1
    assert printed.count("step-0000000") == 3


def places(folder: Path) -> dict[str, Path]:
    """What is no run of ours."""
    (folder / "empty").mkdir()
    (folder / "file").write_text("no folder")
    (folder / "weights.pt").write_bytes(b"no folder either")
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=folder / "foreign", no_dist=True)
    return {name: folder / name for name in ("empty", "file", "weights.pt", "foreign", "missing", "missing/step-3")}


def test_what_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A foreign checkpoint, a file, an empty folder, nothing at all: status 2, one line; nothing is left behind."""
    for name, place in places(tmp_path).items():
        line = refused(capsys, *DIGITS, "--out", tmp_path / "out", "--resume", place)
        assert str(place) in line, name
        line = refused(capsys, "predict", "digits", "--resume", place, "--out", tmp_path / "p.npy")
        assert str(place) in line, name
        for kind in (["inspect", place], ["export", place, tmp_path / "w.pt"]):
            assert str(place) in refused(capsys, "checkpoint", *kind), name
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "p.npy").exists()
    assert not (tmp_path / "w.pt").exists()
    assert "another program" in refused(capsys, *DIGITS, "--resume", tmp_path / "foreign")


def flip(path: Path) -> None:
    """One bit of one byte in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))


def test_one_flipped_bit_is_found_in_any_file(ranks: Any, run_folder: Path) -> None:
    """By every rank alike, whichever read that file; and the last good one is offered."""
    place = step(run_folder, 6)
    assert ranks(2, try_digits, "ddp", place) == ["", ""]
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp", "training.pt"):
        flip(place / name)
        one, other = ranks(2, try_digits, "ddp", place)
        assert one == other
        assert "\n" not in one
        assert f"{name} was changed after it was saved" in one
        assert f"--resume {step(run_folder, 4)}" in one
        flip(place / name)


def test_one_flipped_bit_on_the_command_line(cli: Cli, run_folder: Path, tmp_path: Path) -> None:
    flip(step(run_folder, 6) / "__1_0.distcp")
    words = ("--layout", "ddp", "--processes", "2", "--out", run_folder, "--resume")
    done = cli(tmp_path, *DIGITS, *words)
    assert done.status == 2, done.err
    line = one_line(done.err)
    assert "__1_0.distcp" in line
    assert f"--resume {step(run_folder, 4)}" in line


# --- another training


def try_other(world: World, place: Path, changes: dict[str, Any]) -> str:
    """Going on with a training that is another one."""
    going = Going(world, dataclasses.replace(training(), **changes), "single:precision=float64")
    try:
        resume(going.prepared, world, checkpoint_named(place), going.about())
    except UsageError as error:
        return str(error)
    return ""


class Wider(Mixed):
    """Another model."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 2, bias=False)


class Other(Mixed):
    """The same names, another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros(1, 2))


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    return torch.optim.SGD([{"params": [first]}, {"params": others}], lr=0.05, momentum=0.9)


def test_another_training_is_refused(ranks: Any, tmp_path: Path) -> None:
    """In one line that names what differs; the model is not touched by half."""
    ranks(1, begins, "single", "sgd", tmp_path)
    place = find_checkpoint(tmp_path).path
    expected: list[tuple[dict[str, Any], str]] = [
        ({"seed": 1}, "seed"),
        ({"global_batch": 8}, "global_batch"),
        ({"clip_norm": 0.25}, "clip_norm"),
        ({"name": "another"}, "workload"),
        ({"train_data": lambda: zoo.Augmented(24)}, "samples"),
        ({"model": Wider}, "head.bias"),
        ({"model": Other}, "offset"),
        ({"optimizer": two_groups}, "groups"),
        ({"schedule": None}, "SGD and NoneType"),
        ({"optimizer": lambda model: torch.optim.Adagrad(model.parameters())}, "Adagrad"),
    ]
    for changes, word in expected:
        (line,) = ranks(1, try_other, place, changes)
        assert word in line, changes
        assert "\n" not in line
