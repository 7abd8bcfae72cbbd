"""imagenet: a residual network for images of 224 x 224 pixels out of folders of classes.

    everyrank train imagenet --data DIR --layout ddp --workers 8 --set depth=50

DIR holds train/<class>/*.jpg and val/<class>/*.jpg; any images in such folders will do. Or train/*.tar and val/*.tar in
the WebDataset layout (0001.jpg, 0001.cls), of `--set classes=N` classes. Nothing of it is shipped.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from everyrank.builtin import ResNet
from everyrank.builtin.classify import check_at_least_one, check_depth, classify, data_folder
from everyrank.datasets import ImageFolder, TarShards
from everyrank.datasets.folder import read_image
from everyrank.datasets.transforms import (
    flip,
    normalise,
    random_resized_crop,
    resize_and_centre_crop,
    to_pixels,
)
from everyrank.errors import WorkloadError
from everyrank.workload import Workload

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["workload"]

IMAGENET_EXPECTED = (
    "train/<class>/*.jpg and val/<class>/*.jpg (ILSVRC 2012 from https://image-net.org, its validation images sorted "
    "into folders of classes, or images of your own); or train/*.tar and val/*.tar in the WebDataset layout"
)
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def workload(
    data: str | None = None,
    depth: int = 18,
    size: int = 224,
    width: int = 64,
    lr: float = 0.1,
    batch: int = 256,
    epochs: int = 90,
    schedule: str = "step",
    warmup: float = 0.0,
    milestones: Sequence[float] | None = None,
    broken: str = "error",
    classes: int = 0,
    order: str = "global",
    seed: int = 0,
) -> Workload:
    """The workload, with what `--data` and `--set` may change.

    `warmup` and `milestones` are in epochs; `broken` is error or skip; `classes` and `order` are for tar files.
    """
    check_depth(depth)
    check_at_least_one(size=size, width=width)
    path = data_folder(data, "imagenet", IMAGENET_EXPECTED)

    def augmented(image: Image) -> Tensor:
        return normalise(flip(to_pixels(random_resized_crop(image, size))), _MEAN, _DEVIATION)

    def plain(image: Image) -> Tensor:
        return normalise(to_pixels(resize_and_centre_crop(image, size)), _MEAN, _DEVIATION)

    kinds = {name: bool(_tar_files(path / name)) for name in ("train", "val")}
    if kinds["train"] != kinds["val"]:
        raise WorkloadError(f"{path}: train and val have to be both folders of classes, or both *.tar")
    if kinds["train"] and broken == "skip":
        raise WorkloadError("--set broken=skip: images in tar files cannot be left out; take them out of the archive")

    @functools.cache
    def train_data() -> ImageFolder | TarShards:
        if shards := _tar_files(path / "train"):
            return TarShards(shards, functools.partial(_from_tar, change=augmented, classes=num_classes), random=True)
        return ImageFolder(path / "train", augmented, random=True, broken=broken)

    @functools.cache
    def eval_data() -> ImageFolder | TarShards:
        if shards := _tar_files(path / "val"):
            return TarShards(shards, functools.partial(_from_tar, change=plain, classes=num_classes))
        trained = train_data()
        return ImageFolder(
            path / "val", plain, classes=trained.classes if isinstance(trained, ImageFolder) else None, broken=broken
        )

    @functools.cache
    def num_classes() -> int:
        trained = train_data()
        folders = len(trained.classes) if isinstance(trained, ImageFolder) else 0
        if classes < 0 or 0 < classes < folders:
            folder_text = f"{path / 'train'} has {folders} folders of classes; " if folders else ""
            raise WorkloadError(
                f"--set classes={classes}: {folder_text}give at least {max(folders, 1)}, or leave it out"
            )
        return classes or folders or 1000

    return classify(
        "imagenet",
        lambda: ResNet(depth, num_classes(), width=width),
        train_data,
        eval_data,
        lr=lr,
        batch=batch,
        epochs=epochs,
        seed=seed,
        schedule=schedule,
        warmup=warmup,
        milestones=milestones,
        weight_decay=1e-4,
        order=order,
    )


def _tar_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.tar") if path.name[0] != ".") if folder.is_dir() else []


def _from_tar(
    sample: dict[str, Any], change: Callable[[Image], Tensor], classes: Callable[[], int]
) -> tuple[Tensor, int]:
    """A sample in the WebDataset layout: one image, and the number of its class in .cls."""
    for extension in ("jpg", "jpeg", "png", "webp"):
        if extension in sample:
            image = read_image(io.BytesIO(sample[extension]), f"its .{extension}")
            break
    else:
        raise WorkloadError("no .jpg, .jpeg, .png or .webp in it")
    try:
        number = int(sample["cls"])
    except (KeyError, ValueError):
        raise WorkloadError("no .cls with the number of its class in it") from None
    if not 0 <= number < classes():
        raise WorkloadError(f"its class {number} is not below {classes()}; say how many there are: --set classes=N")
    return change(image), number
