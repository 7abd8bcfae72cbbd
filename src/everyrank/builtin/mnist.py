"""mnist: a network of two convolutions with batch norm, trained on 60,000 handwritten digits of 28 x 28 pixels.

    everyrank train mnist --data DIR

DIR holds the four idx files (gzip or not) or is an .npz as Keras has it. Nothing of it is shipped.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor, nn

from everyrank.builtin.classify import classify, data_folder
from everyrank.datasets import Images, read_mnist
from everyrank.datasets.transforms import normalise
from everyrank.workload import Workload

__all__ = ["TwoConvolutions", "workload"]

MNIST_EXPECTED = (
    "train-images-idx3-ubyte, train-labels-idx1-ubyte and the two of t10k (.gz or not), from "
    "https://ossci-datasets.s3.amazonaws.com/mnist/, or mnist.npz"
)


class TwoConvolutions(nn.Module):
    """(B, 1, 28, 28) -> (B, 10): twice a 5 x 5 convolution, batch norm, ReLU and pooling, then one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(before, after, 5, padding=2, bias=False), nn.BatchNorm2d(after), nn.ReLU(), nn.AvgPool2d(2)
            )
            for before, after in ((1, 16), (16, 32))
        )
        self.classes = nn.Linear(32 * 7 * 7, 10)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 1, 28, 28) -> (B, 10)."""
        features = images
        for block in self.blocks:
            features = block(features)
        return self.classes(features.flatten(1))


def _ready(pixels: Tensor) -> Tensor:
    return normalise(pixels, (0.1307,), (0.3081,))


def workload(
    data: str | None = None,
    lr: float = 0.05,
    batch: int = 128,
    epochs: int = 5,
    schedule: str = "cosine",
    warmup: float = 0.0,
    milestones: Sequence[float] | None = None,
    seed: int = 0,
) -> Workload:
    """Return the workload; `--data` and `--set` change its arguments; `warmup` and `milestones` are in epochs."""
    path = data_folder(data, "mnist", MNIST_EXPECTED)
    return classify(
        "mnist",
        TwoConvolutions,
        functools.cache(lambda: Images(*read_mnist(path, is_validation=False), _ready)),
        functools.cache(lambda: Images(*read_mnist(path, is_validation=True), _ready)),
        lr=lr,
        batch=batch,
        epochs=epochs,
        seed=seed,
        schedule=schedule,
        warmup=warmup,
        milestones=milestones,
        weight_decay=1e-4,
    )
