"""cifar10 and cifar100: a residual network for images of 32 x 32 pixels, cropped at random and flipped.

    everyrank train cifar10 --data DIR --layout ddp --processes 2

DIR holds the binary files or the pickled ones. Nothing of it is shipped.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor

from everyrank.builtin import ResNet
from everyrank.builtin.classify import check_at_least_one, check_depth, classify, data_folder
from everyrank.datasets import Images, read_cifar
from everyrank.datasets.transforms import crop_with_padding, flip, normalise
from everyrank.workload import Workload

__all__ = ["cifar10", "cifar100"]

_MEAN, _DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def _augmented(pixels: Tensor) -> Tensor:
    return normalise(flip(crop_with_padding(pixels, 4)), _MEAN, _DEVIATION)


def _plain(pixels: Tensor) -> Tensor:
    return normalise(pixels, _MEAN, _DEVIATION)


def _workload(
    classes: int,
    data: str | None,
    depth: int,
    width: int,
    lr: float,
    batch: int,
    epochs: int,
    schedule: str,
    warmup: float,
    milestones: Sequence[float] | None,
    augment: bool,
    seed: int,
) -> Workload:
    name = f"cifar{classes}"
    check_depth(depth)
    check_at_least_one(width=width)
    expected = (
        f"the files of cifar-{classes}-python.tar.gz or cifar-{classes}-binary.tar.gz, unpacked, "
        "from https://www.cs.toronto.edu/~kriz/cifar.html"
    )
    path = data_folder(data, name, expected)
    change = _augmented if augment else _plain
    return classify(
        name,
        lambda: ResNet(depth, classes, small_images=True, width=width),
        functools.cache(lambda: Images(*read_cifar(path, classes, is_validation=False), change, random=augment)),
        functools.cache(lambda: Images(*read_cifar(path, classes, is_validation=True), _plain)),
        lr=lr,
        batch=batch,
        epochs=epochs,
        seed=seed,
        schedule=schedule,
        warmup=warmup,
        milestones=milestones,
        weight_decay=5e-4,
    )


def cifar10(
    data: str | None = None,
    depth: int = 18,
    width: int = 64,
    lr: float = 0.1,
    batch: int = 128,
    epochs: int = 200,
    schedule: str = "cosine",
    warmup: float = 0.0,
    milestones: Sequence[float] | None = None,
    augment: bool = True,
    seed: int = 0,
) -> Workload:
    """Ten classes, with what `--data` and `--set` may change; `warmup` and `milestones` are in epochs."""
    return _workload(10, data, depth, width, lr, batch, epochs, schedule, warmup, milestones, augment, seed)


def cifar100(
    data: str | None = None,
    depth: int = 18,
    width: int = 64,
    lr: float = 0.1,
    batch: int = 128,
    epochs: int = 200,
    schedule: str = "cosine",
    warmup: float = 1.0,
    milestones: Sequence[float] | None = None,
    augment: bool = True,
    seed: int = 0,
) -> Workload:
    """A hundred classes, with what `--data` and `--set` may change; `warmup` and `milestones` are in epochs."""
    return _workload(100, data, depth, width, lr, batch, epochs, schedule, warmup, milestones, augment, seed)
