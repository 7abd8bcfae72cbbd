"""Data files in common formats, written from the shipped digits, are read correctly or refused with their name."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import zoo
from everyrank import find_workload, read_records
from everyrank.builtin import ResNet
from everyrank.builtin.digits import Digits
from everyrank.builtin.schedules import make_lr_schedule
from everyrank.data import Slice, all_updates, batches_for_updates
from everyrank.datasets import ImageFolder, read_cifar, read_idx, read_mnist
from everyrank.datasets.transforms import (
    crop_with_padding,
    flip,
    normalise,
    random_resized_crop,
    resize_and_centre_crop,
    to_pixels,
)
from everyrank.errors import UsageError, WorkloadError
from everyrank.workload import BUILT_IN, Source, load
from everyrank.world import World
from processes import Cli


def digits(count: int, size: int) -> tuple[Any, Any]:
    """Return the first digits, enlarged to (N, size, size) uint8, and their labels (N,)."""
    data = Digits(is_validation=False)
    images = [(image[0] * 255).byte().numpy() for image, _ in (data[index] for index in range(count))]
    large = [np.array(Image.fromarray(image).resize((size, size))) for image in images]
    return np.stack(large), np.array([int(data[index][1]) for index in range(count)])


def idx(array: Any) -> bytes:
    """Return an array in the idx format of MNIST."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


@pytest.fixture(scope="module")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with MNIST files, both plain and gzip."""
    folder = tmp_path_factory.mktemp("mnist")
    pixels, labels = digits(80, 28)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(pixels[:60]), mtime=0))
    (folder / "train-labels-idx1-ubyte").write_bytes(idx(labels[:60]))
    (folder / "t10k-images-idx3-ubyte").write_bytes(idx(pixels[60:]))
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels[60:]), mtime=0))
    return folder


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the unpacked files of all four CIFAR archives."""
    folder = tmp_path_factory.mktemp("cifar")
    pixels, labels = digits(60, 32)
    rows = np.repeat(pixels.reshape(60, 1, 32 * 32), 3, axis=1).reshape(60, -1)
    rows[:, :1024] //= 2  # red differs from the other channels
    parts = {f"data_batch_{index + 1}": slice(10 * index, 10 * index + 10) for index in range(5)}
    parts["test_batch"] = slice(50, 60)
    for name in ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar-100-python", "cifar-100-binary"):
        (folder / name).mkdir()
    for name, part in parts.items():
        write_pickle(folder / "cifar-10-batches-py" / name, {b"data": rows[part], b"labels": labels[part].tolist()})
        content = np.concatenate([labels[part, None].astype(np.uint8), rows[part]], axis=1)
        (folder / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(content.tobytes())
    for name, part in (("train", slice(0, 50)), ("test", slice(50, 60))):
        fine = labels[part] * 9
        write_pickle(folder / "cifar-100-python" / name, {b"data": rows[part], b"fine_labels": fine.tolist()})
        both = np.stack([labels[part], fine], axis=1).astype(np.uint8)
        (folder / "cifar-100-binary" / f"{name}.bin").write_bytes(np.concatenate([both, rows[part]], axis=1).tobytes())
    return folder


def write_pickle(path: Path, content: Any) -> None:
    path.write_bytes(pickle.dumps(content, protocol=2))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`train` and `val` with a directory for each class, and JPEG, PNG and WebP images of several sizes."""
    folder = tmp_path_factory.mktemp("images")
    pixels, labels = digits(60, 40)
    for index, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        class_folder = folder / ("train" if index < 45 else "val") / f"digit {label}"
        class_folder.mkdir(parents=True, exist_ok=True)
        suffix = ("jpg", "png", "webp", "JPEG")[index % 4]
        Image.fromarray(image).resize((40 + index, 40)).convert("L" if index % 3 else "RGB").save(
            class_folder / f"{index}.{suffix}"
        )
    return folder


# --- idx


def test_mnist_is_read(mnist: Path) -> None:
    """Training and validation data are read from plain and gzip files."""
    pixels, labels = digits(80, 28)
    for is_validation, part in ((False, slice(0, 60)), (True, slice(60, 80))):
        read_pixels, targets = read_mnist(mnist, is_validation)
        assert read_pixels.shape == (part.stop - part.start, 1, 28, 28)
        assert np.array_equal(read_pixels[:, 0].numpy(), pixels[part])
        assert np.array_equal(targets.numpy(), labels[part])


def test_mnist_beside_folders_and_parts_of_files_is_read(mnist: Path, tmp_path: Path) -> None:
    """An archive of Kaggle has folders of these names, and a download that was killed leaves a part of a file."""
    shutil.copytree(mnist, tmp_path, dirs_exist_ok=True)
    for name in ("t10k-images", "t10k-labels"):
        [path] = tmp_path.glob(f"{name}-*ubyte*")
        path.rename(path.with_name(path.name.replace(f"{name}-", f"{name}.")))
        (tmp_path / f"{name}-idx-ubyte").mkdir()
        (tmp_path / f"{name}-idx-ubyte.gz.12.partial").write_bytes(b"\x1f\x8b")
    assert len(read_mnist(tmp_path, is_validation=True)[0]) == 20


def test_mnist_as_npz_is_read(tmp_path: Path) -> None:
    pixels, labels = digits(20, 28)
    path = tmp_path / "mnist.npz"
    np.savez(path, x_train=pixels[:15], y_train=labels[:15], x_test=pixels[15:], y_test=labels[15:])
    read_pixels, targets = read_mnist(path, is_validation=True)
    assert np.array_equal(read_pixels[:, 0].numpy(), pixels[15:])
    assert targets.tolist() == labels[15:].tolist()
    np.savez(path, x_train=pixels.astype(object), y_train=labels)
    with pytest.raises(WorkloadError, match=r"mnist\.npz"):
        read_mnist(path, is_validation=False)  # arrays of objects contain pickles


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no idx file"),
        (b"PK\3\4", "no idx file"),
        (b"\0\0\x0d\1\0\0\0\1\0\0\0\0", "type 0x0d"),
        (b"\0\0\x08\3\0\0", "within its header"),
        (idx(np.zeros((2, 3)))[:-1], r"5 bytes .* \(2, 3\) asks for 6"),
        (gzip.compress(idx(np.zeros((2, 3))), mtime=0)[:-9], "cannot be read"),
    ],
)
def test_broken_idx_file_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(WorkloadError, match=f"{path}: .*{words}") as caught:
        read_idx(path)
    assert "\n" not in str(caught.value)


# --- CIFAR


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("is_validation", [False, True])
def test_pickle_and_binary_cifar_are_equal(cifar: Path, classes: int, is_validation: bool) -> None:
    names = {10: ("cifar-10-batches-py", "cifar-10-batches-bin"), 100: ("cifar-100-python", "cifar-100-binary")}[
        classes
    ]
    (pixels, labels), (binary_pixels, binary_labels) = (
        read_cifar(cifar / name, classes, is_validation) for name in names
    )
    assert torch.equal(pixels, binary_pixels)
    assert torch.equal(labels, binary_labels)
    original, numbers = digits(60, 32)
    part = slice(50, 60) if is_validation else slice(0, 50)
    assert np.array_equal(pixels[:, 2].numpy(), original[part])
    assert np.array_equal(pixels[:, 0].numpy(), original[part] // 2)
    assert labels.tolist() == (numbers[part] * (1 if classes == 10 else 9)).tolist()
    assert torch.equal(read_cifar(cifar, classes, is_validation)[0], pixels)  # the parent directory works too


class Hostile:
    """An object whose pickle calls a function when it is loaded."""

    def __init__(self, *what: Any) -> None:
        self.what = what

    def __reduce__(self) -> Any:
        return self.what[0], self.what[1:]


@pytest.mark.parametrize(
    "make",
    [
        lambda mark: Hostile(os.system, f"touch {mark}"),
        lambda mark: {b"data": Hostile(os.system, f"touch {mark}"), b"labels": [1]},
        lambda mark: Hostile(eval, f"open({str(mark)!r}, 'w')"),
        lambda mark: {b"data": np.array([Hostile(os.system, f"touch {mark}")], dtype=object), b"labels": [1]},
        lambda mark: Hostile(getattr, "a", "upper"),
    ],
)
def test_a_hostile_pickle_runs_nothing(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    """The error names the file, and the function in the pickle is not called."""
    mark = tmp_path / "it-ran"
    write_pickle(tmp_path / "test_batch", make(mark))
    with pytest.raises(WorkloadError, match="test_batch: a pickle"):
        read_cifar(tmp_path, 10, is_validation=True)
    assert not mark.exists()


@pytest.mark.parametrize(
    "content",
    [
        {},
        [],
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]},
        {b"data": np.zeros((1, 5), np.uint8), b"labels": [1]},
        {b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]},
        {b"data": np.zeros((1, 3072), np.uint8), b"labels": ["1"]},
        {b"data": np.zeros((1, 3072), np.float32), b"labels": [1]},
        {b"data": np.asfortranarray(np.zeros((2, 3072), np.uint8)), b"labels": [1, 1]},
    ],
)
def test_pickle_with_wrong_content_is_refused(tmp_path: Path, content: Any) -> None:
    write_pickle(tmp_path / "test_batch", content)
    with pytest.raises(WorkloadError) as caught:
        read_cifar(tmp_path, 10, is_validation=True)
    assert "\n" not in str(caught.value)


def test_truncated_cifar_file_is_named(cifar: Path, tmp_path: Path) -> None:
    for name, source in (
        ("test_batch", cifar / "cifar-10-batches-py" / "test_batch"),
        ("test_batch.bin", cifar / "cifar-10-batches-bin" / "test_batch.bin"),
    ):
        folder = tmp_path / f"of {name}"
        folder.mkdir()
        (folder / name).write_bytes(source.read_bytes()[:-7])
        with pytest.raises(WorkloadError, match=f"{name}: "):
            read_cifar(folder, 10, is_validation=True)
    with pytest.raises(WorkloadError, match=r"neither data_batch_1.*unpack cifar-10-python\.tar\.gz"):
        read_cifar(tmp_path, 10, is_validation=False)


# --- folders of images


def test_image_folder_is_read(images: Path) -> None:
    """Classes are sorted by name, samples by class, and all images are RGB."""
    data = ImageFolder(images / "train", to_pixels)
    assert data.classes == sorted(entry.name for entry in (images / "train").iterdir())
    assert len(data) == 45
    assert [number for _, number in data.samples] == sorted(number for _, number in data.samples)
    for index in range(len(data)):
        pixels, label = data[index]
        path = data.samples[index][0]
        assert path.parent.name == data.classes[label]
        assert pixels.shape == (3, 40, 40 + int(path.stem))
        assert pixels.dtype == torch.uint8


def test_broken_image_is_an_error_unless_broken_is_skip(images: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    whole = min((images / "train").rglob("*.jpg")).read_bytes()
    (folder / "whole.jpg").write_bytes(whole)
    (folder / "cut.jpg").write_bytes(whole[: len(whole) * 2 // 3])
    (folder / "text.png").write_text("no image")
    data = ImageFolder(tmp_path, to_pixels)
    assert len(data) == 3
    with pytest.raises(WorkloadError, match=r"cut\.jpg: .*[Tt]runcated.*broken=skip"):
        data[0]
    with pytest.raises(WorkloadError, match=r"text\.png: cannot be read"):
        data[1]
    kept = ImageFolder(tmp_path, to_pixels, broken="skip")
    assert [path.name for path, _ in kept.samples] == ["whole.jpg"]
    assert sorted(path.name for path in kept.skipped) == ["cut.jpg", "text.png"]
    with pytest.raises(WorkloadError, match="broken=no: give error or skip"):
        ImageFolder(tmp_path, to_pixels, broken="no")


def test_unusable_image_folders_are_refused(images: Path, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="no such folder"):
        ImageFolder(tmp_path / "nothing", to_pixels)
    (tmp_path / "empty").mkdir()
    with pytest.raises(WorkloadError, match="no images"):
        ImageFolder(tmp_path, to_pixels)
    with pytest.raises(WorkloadError, match="no such class"):
        ImageFolder(images / "val", to_pixels, classes=["digit 0"])


# --- augmentation


def test_augmentation_depends_only_on_seed_epoch_and_sample(images: Path) -> None:
    """Images do not depend on the number of ranks and loader workers. They differ in the next epoch."""

    def augment(image: Any) -> torch.Tensor:
        return normalise(crop_with_padding(flip(to_pixels(random_resized_crop(image, 24))), 2), (0.5,) * 3, (0.2,) * 3)

    data = ImageFolder(images / "train", augment, random=True)
    workload = zoo.workload("frozen", global_batch=9)

    def fetch_inputs(rank: int, size: int, workers: int) -> list[torch.Tensor]:
        world = World(rank, size, 0, 1, torch.device("cpu"), "gloo", 1, workers, 60.0, None, None)  # type: ignore[arg-type]
        updates = all_updates(6, 5)
        batches = batches_for_updates(workload, data, updates, Slice(rank, size), 1, world, torch.float32)
        return [parts[0].input for parts in batches]

    on_1_rank = fetch_inputs(0, 1, 0)
    for size, workers in ((1, 2), (2, 0), (3, 1)):
        parts = [fetch_inputs(rank, size, workers) for rank in range(size)]
        for update, expected in enumerate(on_1_rank):
            assert torch.equal(torch.cat([part[update] for part in parts]), expected)
    assert not torch.equal(on_1_rank[0], on_1_rank[5])  # the first update of the next epoch


def test_crops_have_the_requested_size(images: Path) -> None:
    torch.manual_seed(0)
    for shape in ((40, 40), (300, 7), (7, 300), (1, 1)):
        image = Image.new("RGB", shape)
        for crop in (random_resized_crop, resize_and_centre_crop):
            assert to_pixels(crop(image, 16)).shape == (3, 16, 16)


def test_centre_crop_keeps_the_centre() -> None:
    """A white square in the middle of a wide black image stays in the middle, and the sides are cropped."""
    pixels = np.zeros((64, 128, 3), np.uint8)
    pixels[24:40, 56:72] = 255
    cropped = to_pixels(resize_and_centre_crop(Image.fromarray(pixels), 56))[0]
    rows, columns = (cropped > 127).any(1).nonzero()[:, 0], (cropped > 127).any(0).nonzero()[:, 0]
    assert (int(rows[0]) + int(rows[-1])) // 2 == (int(columns[0]) + int(columns[-1])) // 2 == 27
    assert abs(len(rows) - 16) <= 1  # 56 pixels show 64 * 224 / 256 = 56 of the image


def test_crop_and_flip_only_move_pixels() -> None:
    torch.manual_seed(1)
    pixels = torch.arange(3 * 8 * 8, dtype=torch.uint8).reshape(3, 8, 8) + 1
    shifted_values, corner_values = set(), set()
    for _ in range(200):
        crop = crop_with_padding(pixels, 1)
        assert crop.shape == pixels.shape
        shifted_values.add(int(crop[0, 4, 4]))
        corner_values.add(int(flip(pixels)[0, 0, 0]))
    assert shifted_values == {int(pixels[0, 4 + down, 4 + right]) for down in (-1, 0, 1) for right in (-1, 0, 1)}
    assert corner_values == {int(pixels[0, 0, 0]), int(pixels[0, 0, 7])}


# --- models and schedules


@pytest.mark.parametrize(
    ("depth", "classes", "small", "parameters"),
    [(18, 1000, False, 11_689_512), (50, 1000, False, 25_557_032), (18, 10, True, 11_173_962)],
)
def test_resnets_have_the_parameter_counts_of_the_papers(
    depth: int, classes: int, small: bool, parameters: int
) -> None:
    model = ResNet(depth, classes, small_images=small)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    size = 32 if small else 64
    assert model.eval()(torch.zeros(1, 3, size, size)).shape == (1, classes)


def rates(kind: str, updates: int, warmup: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make_lr_schedule(kind, updates, warmup)(optimizer)
    values: list[float] = []
    for _ in range(updates):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return values


def test_learning_rate_schedules() -> None:
    assert rates("constant", 5, 0) == [1.0] * 5
    assert rates("step", 90, 0) == pytest.approx([1.0] * 30 + [0.1] * 30 + [0.01] * 30)
    assert rates("multistep", 90, 0) == pytest.approx([1.0] * 30 + [0.1] * 30 + [0.01] * 20 + [0.001] * 10)
    assert rates("linear", 4, 0) == pytest.approx([1.0, 0.75, 0.5, 0.25])
    cosine = rates("cosine", 100, 0)
    assert cosine[0] == 1.0
    assert cosine[50] == pytest.approx(0.5)
    assert cosine[99] < 0.001
    with_warmup = rates("step", 90, 5)
    assert with_warmup[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert with_warmup[29:31] == pytest.approx([1.0, 0.1])  # warm-up does not move the steps
    for invalid in (("nosuch", 10, 0), ("step", 10, 10), ("step", 10, -1)):
        with pytest.raises(WorkloadError):
            make_lr_schedule(*invalid)


# --- the workloads


SMALL = ("--layout", "ddp", "--processes", "2", "--steps", "3", "--json", "r.json")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mnist", ["batch=16"]),
        ("cifar100", ["batch=10", "width=4"]),
        ("imagenet", ["batch=12", "width=4", "size=32", "epochs=2"]),
    ],
)
def test_built_in_workloads_train_on_files(
    cli: Cli, tmp_path: Path, mnist: Path, cifar: Path, images: Path, name: str, settings: list[str]
) -> None:
    """Two ranks train for three updates and evaluate."""
    data = {"mnist": mnist, "cifar100": cifar, "imagenet": images}[name]
    process = cli.on_ranks(tmp_path, "train", name, "--data", data, *SMALL, "--set", *settings, size=2)
    assert process.status == 0, process
    (record,) = read_records(tmp_path / "r.json")
    assert len(record.loss) == 3
    assert set(record.metrics) == {"top1", "top5", "eval_loss"}
    assert record.provenance["data_checksum"].startswith("sha256")


def test_verify_imagenet_on_two_ranks(cli: Cli, tmp_path: Path, images: Path) -> None:
    """ddp and fsdp equal one device with augmentation, batch norm and an incomplete batch. Each sample is read once."""
    args = ["--data", images, "--layout", "ddp", "fsdp", "--steps", "4", "--samples"]
    settings = ["--set", "batch=12", "width=4", "size=24", "epochs=2"]
    process = cli.on_ranks(tmp_path, "verify", "imagenet", *args, *settings, size=2)
    assert process.status == 0, process
    assert "each read once" in process.out


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("mnist", {}, ["--data", "train-images-idx3-ubyte", "https://"]),
        ("cifar10", {"data": "nothing-here"}, ["nothing-here", "cifar-10-python.tar.gz"]),
        ("imagenet", {"data": "."}, ["train", "no such folder"]),
        ("cifar10", {"data": ".", "depth": 19}, ["depth=19", "18, 34, 50, 101"]),
        ("cifar100", {"data": ".", "schedule": "no"}, ["neither train nor train.bin"]),
        ("digits", {"data": "."}, ["data"]),
        ("digits", {"norm": "group", "width": 6}, ["norm=group width=6", "multiple of 4"]),
        ("digits", {"width": 0}, ["width=0: give at least 1"]),
        ("cifar10", {"data": ".", "width": 0}, ["width=0: give at least 1"]),
        ("imagenet", {"data": ".", "size": 0}, ["size=0: give at least 1"]),
        ("imagenet", {"data": ".", "batch": 0}, ["batch=0: give at least 1"]),
        ("imagenet", {"data": ".", "epochs": 0}, ["epochs=0: give at least 1"]),
        ("imagenet", {"data": ".", "warmup": -1.0}, ["warmup=-1: give a number of epochs from 0 to below 90"]),
        ("imagenet", {"data": ".", "milestones": (30, 60)}, ["schedule=step", "only schedule=multistep"]),
        (
            "imagenet",
            {"data": ".", "schedule": "multistep", "milestones": (30, 100)},
            ["--set milestones=30,100: give epochs between 0 and 90"],
        ),
    ],
)
def test_missing_data_or_wrong_setting_is_explained_in_one_line(
    name: str, settings: dict[str, Any], expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        load(find_workload(name, **settings))
    assert "\n" not in str(caught.value)
    for fragment in expected:
        assert fragment in str(caught.value)


def test_fewer_classes_than_folders_are_refused(images: Path) -> None:
    settings = {"data": str(images), "size": 16, "width": 4, "batch": 5, "epochs": 1}
    with pytest.raises(WorkloadError, match=r"classes=3: .*train has 10 folders of classes; give at least 10"):
        load(find_workload("imagenet", **settings, classes=3)).model()
    assert load(find_workload("imagenet", **settings, classes=12)).model().classes.out_features == 12


def test_train_without_data_suggests_the_option(cli: Cli, tmp_path: Path) -> None:
    process = cli(tmp_path, "train", "mnist")
    assert process.status == 2, process.err
    assert "--data DIR" in process.err.strip().splitlines()[-1]
    assert "Traceback" not in process.err


def test_train_names_a_truncated_image(cli: Cli, tmp_path: Path, images: Path) -> None:
    """The loader worker's error is the text of a traceback, but `train` prints only the cause."""
    for part in ("train", "val"):
        (tmp_path / part / "a").mkdir(parents=True)
        for index in range(4):
            content = sorted((images / "train").rglob("*.jpg"))[index].read_bytes()
            is_complete = part == "val" or index != 2
            (tmp_path / part / "a" / f"{index}.jpg").write_bytes(content if is_complete else content[:-60])
    args = ["train", "imagenet", "--data", ".", "--workers", "1", "--set"]
    process = cli(tmp_path, *args, "batch=2", "width=4", "size=64", "epochs=1")
    assert process.status == 2
    assert "Traceback" not in process.err
    assert "2.jpg: cannot be read" in process.err.strip().splitlines()[-1]


def test_training_data_is_read_only_once(images: Path) -> None:
    """Later calls of `train_data` return the same dataset."""
    workload = load(find_workload("imagenet", data=str(images), size=16, width=4, batch=5, epochs=1))
    assert len(workload.train_data()) == 45
    assert workload.train_data() is workload.train_data()


SETTINGS = {
    "digits": ["--set", "width=4", "lr=0.07", "batch=512"],
    "text": ["--set", "lr=0.003", "batch=16", "steps=3"],
    "causal-lm": ["--set", "lr=0.003", "batch=8", "steps=3", "num_blocks=2", "width=32"],
    "mnist": ["--set", "lr=0.07", "batch=20"],
    "cifar10": ["--set", "width=4", "lr=0.07", "schedule=linear", "batch=20"],
    "cifar100": ["--set", "width=4", "lr=0.07", "warmup=0", "batch=20"],
    "imagenet": ["--set", "width=4", "size=16", "lr=0.07", "batch=20"],
}
"""Settings that make each built-in workload small; text-medium and text-124m are text in other sizes."""
SLOW = ("text", "causal-lm")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.integration] if name in SLOW else []) for name in SETTINGS]
)
def test_resume_of_built_in_workload_needs_no_settings(
    cli: Cli, mnist: Path, cifar: Path, images: Path, tmp_path: Path, name: str
) -> None:
    """For evaluation and longer training, settings and data path are read from the checkpoint."""
    assert {*SETTINGS, "text-medium", "text-124m"} == set(BUILT_IN)
    data_paths = {"mnist": mnist, "cifar10": cifar, "cifar100": cifar, "imagenet": images}
    data = ["--data", str(data_paths[name])] if name in data_paths else []
    length, longer = ("steps", 5) if "text" in name or name == "causal-lm" else ("epochs", 2)
    first_length = [f"--{length}", "1"] if length == "epochs" else []
    process = cli.on_ranks(tmp_path, "train", name, *data, *SETTINGS[name], *first_length, "--out", "run")
    assert process.status == 0, process.err
    (record,) = read_records(tmp_path / "run" / "record.json")
    process = cli.on_ranks(tmp_path, "train", name, "--resume", "run", "--evaluate", "--json", "evaluated.json")
    assert process.status == 0, process.err
    (evaluated,) = read_records(tmp_path / "evaluated.json")
    assert evaluated.metrics == record.metrics
    process = cli.on_ranks(tmp_path, "train", name, "--resume", "run", f"--{length}", str(longer))
    assert process.status == 0, process.err
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    learning_rates = [row["lr"] for row in rows if "lr" in row]
    settings = {
        key: value for key, value in json.loads(newest_metadata(tmp_path / "run"))["settings"].items() if key != length
    }
    workload = load(Source(name, settings, **{length: longer}))
    model = torch.nn.Linear(1, 1)
    optimizer = workload.optimizer(model)
    schedule = workload.schedule(optimizer) if workload.schedule else None
    expected: list[float] = []
    for _ in learning_rates:
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if schedule is not None:
            schedule.step()
    num_first_updates = len(record.loss)
    assert len(learning_rates) > num_first_updates
    assert learning_rates[num_first_updates:] == pytest.approx(expected[num_first_updates:]), (
        "the rates of the longer training"
    )


def newest_metadata(run: Path) -> str:
    """Return about.json of the newest checkpoint."""
    newest = max((run / "checkpoints").glob("step-*[0-9]"))
    return (newest / "about.json").read_text()
