"""Whatever happens to the files of a checkpoint is found before anything is read, or makes no difference."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorProperties

import zoo
from checkpointing import Going, everything_in, same, sum_again
from everyrank.checkpoint.storage import contents_of
from everyrank.cli import main
from everyrank.errors import UsageError
from everyrank.runs import (
    Checkpoint,
    CheckpointMetadata,
    all_of,
    checkpoint_named,
    find_checkpoint,
    require_whole,
    write_metadata,
)
from everyrank.world import World
from processes import refused

COUNT = 600


def saves(world: World, run: Path) -> None:
    """Two checkpoints of two ranks, with a metric."""
    going = Going(world, zoo.workload("augmented", "sgd"), "fsdp")
    for step in (2, 4):
        going.updates(step - 2, step)
        going.saver(run).save(step, {"eval_loss": 0.125 * step})


@pytest.fixture
def run(ranks: Any, tmp_path: Path) -> Path:
    ranks(2, saves, tmp_path / "run")
    return tmp_path / "run"


def contents(run: Path) -> dict[Path, bytes | str]:
    """Every file of a run, and where its links lead."""
    paths = sorted(path for path in run.rglob("*") if path.is_symlink() or path.is_file())
    return {path: str(path.readlink()) if path.is_symlink() else path.read_bytes() for path in paths}


def put_back(run: Path, saved: dict[Path, bytes | str]) -> None:
    shutil.rmtree(run)
    for path, content in saved.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.symlink_to(content)
        else:
            path.write_bytes(content)


# --- what may happen to a file


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def replace(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(draw.randrange(1, 9)):
        content[draw.randrange(len(content))] = draw.randrange(256)
    path.write_bytes(content)


def cut(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content))])


def zero(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    begin = draw.randrange(len(content))
    end = min(len(content), begin + draw.randrange(1, 4096))
    content[begin:end] = bytes(end - begin)
    path.write_bytes(content)


def lengthen(path: Path, draw: random.Random) -> None:
    with path.open("ab") as file:
        file.write(draw.randbytes(draw.randrange(1, 64)))


def remove(path: Path, draw: random.Random) -> None:
    path.unlink()


def rename(path: Path, draw: random.Random) -> None:
    path.rename(path.with_name(draw.choice(["about.json", "__2_0.distcp", path.name + ".1", path.name[:-1]])))


def swap(path: Path, draw: random.Random) -> None:
    """With a file beside it, or the one of its name in the other checkpoint."""
    run = path.parent.parent
    others = sorted([*path.parent.iterdir(), *(folder / path.name for folder in run.glob("step-*"))])
    other = draw.choice([other for other in others if other != path])
    kept = path.with_name("kept")
    path.rename(kept)
    other.rename(path)
    kept.rename(other)


def rename_folder(path: Path, draw: random.Random) -> None:
    path.parent.rename(path.parent.with_name(f"step-{draw.randrange(5, 100):08d}"))


def change_digit(path: Path, draw: random.Random) -> None:
    """Of about.json: a step, a metric, a sum, anything that stays JSON."""
    about = path.with_name("about.json")
    text = about.read_text()
    place = draw.choice(list(re.finditer("[0-9]", text))).start()
    about.write_text(text[:place] + draw.choice("0123456789") + text[place + 1 :])


MUTATIONS: list[Callable[[Path, random.Random], None]] = [
    *(flip, flip, flip, replace, cut, zero, lengthen, remove, rename, swap, rename_folder),
    *(change_digit, change_digit, change_digit),
]


def refusal(run: Path) -> str | None:
    """What going on from any of its checkpoints, or looking at them, finds wrong."""
    for path, _ in all_of(run):
        try:
            require_whole(checkpoint_named(path), deep=True)
        except UsageError as error:
            return str(error)
    return None


def test_six_hundred_mutations_are_found_or_make_no_difference(run: Path) -> None:
    """Bits, bytes, lengths, names, digits of about.json: refused by name, or all that is loaded is the same bits."""
    saved = contents(run)
    before = [(one.metadata, *everything_in(one)) for _, one in all_of(run) if one is not None]
    assert len(before) == 2
    draw = random.Random(20261121)
    files = [path for path in saved if not path.is_symlink()]
    found, without_effect = 0, 0
    for number in range(COUNT):
        change = draw.choice(MUTATIONS)
        change(draw.choice(files), draw)
        what = refusal(run)
        if number % 20 == 0:
            assert (main(["checkpoint", "inspect", str(run)]) != 0) == (what is not None)
        if what is not None:
            assert str(run) in what
            found += 1
        else:
            after = [(one.metadata, *everything_in(one)) for _, one in all_of(run) if one is not None]
            for (about, tensors, values), (about_then, tensors_then, values_then) in zip(before, after, strict=True):
                assert about == about_then, (number, change.__name__)
                same(tensors, tensors_then)
                assert values == values_then
            without_effect += 1
        put_back(run, saved)
    assert found + without_effect == COUNT
    assert found > 550, "hardly any of these changes nothing"


def an_about() -> CheckpointMetadata:
    where = {"workload": "digits", "settings": {"width": 4}, "layout": "ddp", "world_size": 2, "samples": 1437}
    how = {"seed": 1, "global_batch": 64, "clip_norm": 0.5, "data_checksum": "sha256 0", "updates_per_epoch": 23}
    said = {"best_by": "top1", "versions": {"torch": "2.13.0"}, "time": "now", "metrics": {"top1": 0.9}}
    return CheckpointMetadata(step=69, files={"training.pt": (10, 77)}, **where, **how, **said)  # type: ignore[arg-type]


class OfANewerTorch:
    """Pickled as tensor properties with more fields than any torch knows: 2.15 writes one more than 2.14 can read."""

    def __reduce__(self) -> Any:
        return TensorProperties, (), tuple(range(9))


@pytest.mark.parametrize("version", ["2.13.0", "99.1.0+cpu"])
def test_a_checkpoint_of_a_newer_torch_says_so(tmp_path: Path, version: str) -> None:
    """The error names both versions and the fix; where this torch is the newer one, the table is only damaged."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps(OfANewerTorch()))
    about = dataclasses.replace(an_about(), versions={"torch": version})
    with pytest.raises(UsageError, match="not a table of contents of a checkpoint") as caught:
        contents_of(Checkpoint(tmp_path, about))
    text = f"torch {version} wrote it, and this is torch {torch.__version__}"
    assert (text in str(caught.value)) == (version != "2.13.0")
    assert str(caught.value).endswith("pip install 'torch>=99.1'") == (version != "2.13.0")


def test_single_bits_of_what_it_says_of_itself(tmp_path: Path) -> None:
    """A step, a score, a sum, a blank between two: about.json is what was saved, or refused."""
    write_metadata(tmp_path, an_about())
    about = tmp_path / "about.json"
    content = about.read_bytes()
    assert checkpoint_named(tmp_path).metadata == an_about()
    for place in range(0, 8 * len(content), 3):
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        about.write_bytes(changed)
        with pytest.raises(UsageError, match=r"about\.json"):
            checkpoint_named(tmp_path)


@pytest.mark.parametrize("name", ["step-00000079", "step-00000079.old"])
def test_a_folder_with_the_name_of_another_step(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    write_metadata(tmp_path / name, an_about())
    with pytest.raises(UsageError, match=r"step 69, .* step 79"):
        checkpoint_named(tmp_path / name)


def test_a_checkpoint_from_before_there_was_a_sum(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It can be read, and a plain word says what is not known of it; a newer one cannot lose its sum."""
    for path, one in all_of(run):
        assert one is not None
        (path / "about.json").write_text(json.dumps(dataclasses.asdict(one.metadata) | {"schema": 1}, indent=1))
    assert main(["checkpoint", "inspect", str(run)]) == 0
    assert capsys.readouterr().out.count("has no checksum") == 2
    newest = find_checkpoint(run)
    require_whole(newest, deep=True)
    (newest.path / "about.json").write_text(json.dumps(dataclasses.asdict(newest.metadata) | {"schema": 2}, indent=1))
    assert "its CRC differs" in refused(capsys, "checkpoint", "export", newest.path, run / "model.pt")


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_folder(path: Path) -> None:
    path.mkdir()


def a_terabyte(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize("name", ["about.json", "training.pt", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("put", [a_pipe, a_device, a_folder, a_terabyte], ids=lambda put: put.__name__)
def test_what_is_no_file_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], name: str, put: Callable[[Path], None]
) -> None:
    """A pipe would wait for its writer for ever, and some devices never end."""
    newest = find_checkpoint(run).path
    (newest / name).unlink()
    put(newest / name)
    assert main(["checkpoint", "inspect", str(run)]) == 1
    assert "DAMAGED" in capsys.readouterr().out
    assert name in refused(capsys, "checkpoint", "export", newest, run / "model.pt")


def changed(**fields: Any) -> Callable[[Any], None]:
    """A table whose first tensor of the model has these fields; `dtype` is one of its properties."""

    def change(table: Any) -> None:
        entry = table.state_dict_metadata[next(name for name in table.state_dict_metadata if name.startswith("model/"))]
        for name, value in fields.items():
            setattr(entry.properties if name == "dtype" else entry, name, value)

    change.__name__ = repr(fields)
    return change


def enormous(table: Any) -> None:
    """Everything in it says so."""
    entry = next(iter(table.state_dict_metadata.values()))
    entry.size = torch.Size([1 << 40])
    entry.chunks = [dataclasses.replace(entry.chunks[0], offsets=torch.Size([0]), sizes=entry.size)]


def coloured(table: Any) -> None:
    table.state_dict_metadata["model/\x1b[31mred"] = next(iter(table.state_dict_metadata.values()))


def numbered(table: Any) -> None:
    table.state_dict_metadata[3] = next(iter(table.state_dict_metadata.values()))


def listed(table: Any) -> None:
    table.state_dict_metadata = [1]


TABLES = [
    *(changed(chunks=[]), changed(chunks=None), changed(chunks=[1]), changed(properties=None)),
    *(changed(size=torch.Size([1 << 40, 1 << 10])), changed(size=[3, 4]), changed(size=torch.Size([-1]))),
    *(changed(dtype=torch.complex64), changed(dtype=torch.quint8), changed(dtype=None)),
    *(enormous, coloured, numbered, listed),
]


@pytest.mark.parametrize("change", TABLES, ids=lambda change: change.__name__)
def test_a_crafted_table_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Any], None]
) -> None:
    """All sums are right: one line, status 2, and no file; whoever shows the line to a terminal is not spoken to."""
    place = find_checkpoint(run).path
    table = pickle.loads((place / ".metadata").read_bytes())
    change(table)
    (place / ".metadata").write_bytes(pickle.dumps(table))
    sum_again(place, ".metadata")
    assert str(place) in refused(capsys, "checkpoint", "export", place, run / "model.safetensors")
    assert not (run / "model.safetensors").exists()
