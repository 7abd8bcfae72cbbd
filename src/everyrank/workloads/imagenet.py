"""imagenet: a residual network for images of 224 x 224 pixels out of folders of classes.

    everyrank train imagenet --data DIR --layout ddp --workers 8 --set depth=50

DIR holds train/<class>/*.jpg and val/<class>/*.jpg; any images in such folders will do. Nothing of it is shipped.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from torch import Tensor

from everyrank.models import ResNet
from everyrank.sources import ImageFolder
from everyrank.sources.transforms import (
    flip,
    normalise,
    random_resized_crop,
    resize_and_centre_crop,
    to_pixels,
)
from everyrank.workload import Workload
from everyrank.workloads.classify import check_depth, classify, place_of

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["workload"]

EXPECTED = (
    "train/<class>/*.jpg and val/<class>/*.jpg (ILSVRC 2012 from https://image-net.org, its validation images sorted "
    "into folders of classes, or images of your own)"
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
    broken: str = "error",
    seed: int = 0,
) -> Workload:
    """The workload, with what `--data` and `--set` may change; `warmup` is in epochs, `broken` is error or skip."""
    check_depth(depth)
    place = place_of(data, "imagenet", EXPECTED)

    def augmented(image: Image) -> Tensor:
        return normalise(flip(to_pixels(random_resized_crop(image, size))), _MEAN, _DEVIATION)

    def plain(image: Image) -> Tensor:
        return normalise(to_pixels(resize_and_centre_crop(image, size)), _MEAN, _DEVIATION)

    @functools.cache
    def train_data() -> ImageFolder:
        return ImageFolder(place / "train", augmented, random=True, broken=broken)

    @functools.cache
    def eval_data() -> ImageFolder:
        return ImageFolder(place / "val", plain, classes=train_data().classes, broken=broken)

    return classify(
        "imagenet",
        lambda: ResNet(depth, len(train_data().classes), width=width),
        train_data,
        eval_data,
        lr=lr,
        batch=batch,
        epochs=epochs,
        seed=seed,
        schedule=schedule,
        warmup=warmup,
        weight_decay=1e-4,
    )
