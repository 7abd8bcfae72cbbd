"""Modified checkpoint files are refused before anything is loaded, or the loaded values are unchanged."""

from __future__ import annotations

import contextlib
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
from checkpointing import TrainingSession, assert_equal_tensors, read_checkpoint, update_checksums
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
from processes import closed_pipe, refusal_message

NUM_MUTATIONS = 600


def save_two_checkpoints(world: World, run: Path) -> None:
    """Save two checkpoints with a metric from these ranks."""
    training = TrainingSession(world, zoo.workload("augmented", "sgd"), "fsdp")
    for step in (2, 4):
        training.train(step - 2, step)
        training.make_saver(run).save(step, {"eval_loss": 0.125 * step})


@pytest.fixture
def run(ranks: Any, tmp_path: Path) -> Path:
    """The folder of a run with two checkpoints, written by two ranks."""
    ranks(2, save_two_checkpoints, tmp_path / "run")
    return tmp_path / "run"


def files_of(run: Path) -> dict[Path, bytes | str]:
    """The bytes of every file of a run, and the target of every symbolic link."""
    paths = sorted(path for path in run.rglob("*") if path.is_symlink() or path.is_file())
    return {path: str(path.readlink()) if path.is_symlink() else path.read_bytes() for path in paths}


def restore(run: Path, saved: dict[Path, bytes | str]) -> None:
    shutil.rmtree(run)
    for path, content in saved.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.symlink_to(content)
        else:
            path.write_bytes(content)


# --- mutations of a file


def flip_bit(path: Path, generator: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    path.write_bytes(content)


def replace_bytes(path: Path, generator: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(generator.randrange(1, 9)):
        content[generator.randrange(len(content))] = generator.randrange(256)
    path.write_bytes(content)


def truncate(path: Path, generator: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: generator.randrange(len(content))])


def zero(path: Path, generator: random.Random) -> None:
    content = bytearray(path.read_bytes())
    start = generator.randrange(len(content))
    end = min(len(content), start + generator.randrange(1, 4096))
    content[start:end] = bytes(end - start)
    path.write_bytes(content)


def append(path: Path, generator: random.Random) -> None:
    with path.open("ab") as file:
        file.write(generator.randbytes(generator.randrange(1, 64)))


def remove(path: Path, generator: random.Random) -> None:
    path.unlink()


def rename(path: Path, generator: random.Random) -> None:
    path.rename(path.with_name(generator.choice(["about.json", "__2_0.distcp", path.name + ".1", path.name[:-1]])))


def swap(path: Path, generator: random.Random) -> None:
    """Swap a file with another file of its folder, or with the file of the same name in the other checkpoint."""
    run = path.parent.parent
    others = sorted([*path.parent.iterdir(), *(folder / path.name for folder in run.glob("step-*"))])
    other = generator.choice([other for other in others if other != path])
    temporary_path = path.with_name("kept")
    path.rename(temporary_path)
    other.rename(path)
    temporary_path.rename(other)


def rename_folder(path: Path, generator: random.Random) -> None:
    path.parent.rename(path.parent.with_name(f"step-{generator.randrange(5, 100):08d}"))


def change_digit(path: Path, generator: random.Random) -> None:
    """Change a digit of about.json: for example of a step, a metric or a checksum. It stays valid JSON."""
    metadata_path = path.with_name("about.json")
    text = metadata_path.read_text()
    position = generator.choice(list(re.finditer("[0-9]", text))).start()
    metadata_path.write_text(text[:position] + generator.choice("0123456789") + text[position + 1 :])


MUTATIONS: list[Callable[[Path, random.Random], None]] = [
    *(flip_bit, flip_bit, flip_bit, replace_bytes, truncate, zero, append, remove, rename, swap, rename_folder),
    *(change_digit, change_digit, change_digit),
]


def first_error(run: Path) -> str | None:
    """The error of the first checkpoint that cannot be resumed from; None if all are intact."""
    for path, _ in all_of(run):
        try:
            require_whole(checkpoint_named(path), deep=True)
        except UsageError as error:
            return str(error)
    return None


def test_six_hundred_mutations_are_refused_or_load_the_same_values(run: Path) -> None:
    """Each mutation is refused with the path of the run, or the loaded metadata, tensors and values are equal."""
    original_files = files_of(run)
    originals = [
        (checkpoint.metadata, *read_checkpoint(checkpoint)) for _, checkpoint in all_of(run) if checkpoint is not None
    ]
    assert len(originals) == 2
    generator = random.Random(20261121)
    files = [path for path in original_files if not path.is_symlink()]
    num_refused, num_without_effect = 0, 0
    for number in range(NUM_MUTATIONS):
        mutate = generator.choice(MUTATIONS)
        mutate(generator.choice(files), generator)
        error = first_error(run)
        if number % 20 == 0:
            assert (main(["checkpoint", "inspect", str(run)]) != 0) == (error is not None)
        if error is not None:
            assert str(run) in error
            num_refused += 1
        else:
            loaded = [
                (checkpoint.metadata, *read_checkpoint(checkpoint))
                for _, checkpoint in all_of(run)
                if checkpoint is not None
            ]
            for original, (loaded_metadata, loaded_tensors, loaded_values) in zip(originals, loaded, strict=True):
                metadata, tensors, values = original
                assert metadata == loaded_metadata, (number, mutate.__name__)
                assert_equal_tensors(tensors, loaded_tensors)
                assert values == loaded_values
            num_without_effect += 1
        restore(run, original_files)
    assert num_refused + num_without_effect == NUM_MUTATIONS
    assert num_refused > 550, "almost every mutation changes something"


def example_metadata() -> CheckpointMetadata:
    origin = {"workload": "digits", "settings": {"width": 4}, "layout": "ddp", "world_size": 2, "samples": 1437}
    training = {"seed": 1, "global_batch": 64, "clip_norm": 0.5, "data_checksum": "sha256 0", "updates_per_epoch": 23}
    other = {"best_by": "top1", "versions": {"torch": "2.13.0"}, "time": "now", "metrics": {"top1": 0.9}}
    files = {"training.pt": (10, 77)}
    return CheckpointMetadata(step=69, files=files, **origin, **training, **other)  # type: ignore[arg-type]


class NewerTensorProperties:
    """Pickled as tensor properties with unknown fields: torch 2.15 writes one field that 2.14 cannot read."""

    def __reduce__(self) -> Any:
        return TensorProperties, (), tuple(range(9))


@pytest.mark.parametrize("version", ["2.13.0", "99.1.0+cpu"])
def test_error_names_the_newer_torch_that_wrote_the_checkpoint(tmp_path: Path, version: str) -> None:
    """The error names both versions and the fix. A table written by an older torch is reported only as damaged."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps(NewerTensorProperties()))
    metadata = dataclasses.replace(example_metadata(), versions={"torch": version})
    with pytest.raises(UsageError, match="not a table of contents of a checkpoint") as error:
        contents_of(Checkpoint(tmp_path, metadata))
    text = f"torch {version} wrote it, and this is torch {torch.__version__}"
    assert (text in str(error.value)) == (version != "2.13.0")
    assert str(error.value).endswith("pip install 'torch>=99.1'") == (version != "2.13.0")


def test_every_third_bit_flipped_in_about_json_is_refused(tmp_path: Path) -> None:
    """The checksum in about.json covers every field, and the spaces between them."""
    write_metadata(tmp_path, example_metadata())
    metadata_path = tmp_path / "about.json"
    content = metadata_path.read_bytes()
    assert checkpoint_named(tmp_path).metadata == example_metadata()
    for bit in range(0, 8 * len(content), 3):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        metadata_path.write_bytes(flipped)
        with pytest.raises(UsageError, match=r"about\.json"):
            checkpoint_named(tmp_path)


@pytest.mark.parametrize("name", ["step-00000079", "step-00000079.old"])
def test_folder_named_after_a_different_step_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    write_metadata(tmp_path / name, example_metadata())
    with pytest.raises(UsageError, match=r"step 69, .* step 79"):
        checkpoint_named(tmp_path / name)


def test_checkpoint_of_schema_1_without_checksum_can_be_read(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`checkpoint inspect` prints that it has no checksum. A checkpoint of schema 2 without checksum is refused."""
    for path, checkpoint in all_of(run):
        assert checkpoint is not None
        (path / "about.json").write_text(json.dumps(dataclasses.asdict(checkpoint.metadata) | {"schema": 1}, indent=1))
    assert main(["checkpoint", "inspect", str(run)]) == 0
    assert capsys.readouterr().out.count("has no checksum") == 2
    newest = find_checkpoint(run)
    require_whole(newest, deep=True)
    (newest.path / "about.json").write_text(json.dumps(dataclasses.asdict(newest.metadata) | {"schema": 2}, indent=1))
    assert "its CRC differs" in refusal_message(capsys, "checkpoint", "export", newest.path, run / "model.pt")


def test_closed_pipe_does_not_look_like_damage(run: Path) -> None:
    """`checkpoint inspect run | head -1` ends with the status of the checkpoints."""
    with closed_pipe() as stream, contextlib.redirect_stdout(stream):
        assert main(["checkpoint", "inspect", str(run)]) == 0


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
def test_pipe_device_folder_or_huge_file_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], name: str, put: Callable[[Path], None]
) -> None:
    """Opening a pipe would wait forever for its writer, and some devices never end."""
    folder = find_checkpoint(run).path
    (folder / name).unlink()
    put(folder / name)
    assert main(["checkpoint", "inspect", str(run)]) == 1
    assert "DAMAGED" in capsys.readouterr().out
    assert name in refusal_message(capsys, "checkpoint", "export", folder, run / "model.pt")


def with_fields(**fields: Any) -> Callable[[Any], None]:
    """Return a function that sets these fields of the first model tensor in a table.

    `dtype` is set on the properties of the tensor.
    """

    def change(table: Any) -> None:
        entry = table.state_dict_metadata[next(name for name in table.state_dict_metadata if name.startswith("model/"))]
        for name, value in fields.items():
            setattr(entry.properties if name == "dtype" else entry, name, value)

    change.__name__ = repr(fields)
    return change


def enormous(table: Any) -> None:
    """The size and the chunk of the first tensor agree on 2**40 elements."""
    entry = next(iter(table.state_dict_metadata.values()))
    entry.size = torch.Size([1 << 40])
    entry.chunks = [dataclasses.replace(entry.chunks[0], offsets=torch.Size([0]), sizes=entry.size)]


def coloured(table: Any) -> None:
    table.state_dict_metadata["model/\x1b[31mred"] = next(iter(table.state_dict_metadata.values()))


def numbered(table: Any) -> None:
    table.state_dict_metadata[3] = next(iter(table.state_dict_metadata.values()))


def listed(table: Any) -> None:
    table.state_dict_metadata = [1]


TABLE_CHANGES = [
    *(with_fields(chunks=[]), with_fields(chunks=None), with_fields(chunks=[1]), with_fields(properties=None)),
    *(with_fields(size=torch.Size([1 << 40, 1 << 10])), with_fields(size=[3, 4]), with_fields(size=torch.Size([-1]))),
    *(with_fields(dtype=torch.complex64), with_fields(dtype=torch.quint8), with_fields(dtype=None)),
    *(enormous, coloured, numbered, listed),
]


@pytest.mark.parametrize("change", TABLE_CHANGES, ids=lambda change: change.__name__)
def test_crafted_table_of_contents_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Any], None]
) -> None:
    """All checksums match. The command prints one printable line, exits with 2 and writes no file."""
    folder = find_checkpoint(run).path
    table = pickle.loads((folder / ".metadata").read_bytes())
    change(table)
    (folder / ".metadata").write_bytes(pickle.dumps(table))
    update_checksums(folder, ".metadata")
    assert str(folder) in refusal_message(capsys, "checkpoint", "export", folder, run / "model.safetensors")
    assert not (run / "model.safetensors").exists()
