"""A folder of classes of images, as ImageNet is unpacked: train/<class>/*.jpg, val/<class>/*.jpg."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from torch import Tensor
from torch.utils.data import Dataset

from everyrank.errors import CannotRunError, WorkloadError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ImageFolder", "read_image"]

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """(image changed by `transform`, number of its class), sorted by class and name.

    folder      holds a folder for each class
    transform   an RGB PIL image -> what the model takes
    classes     their names in the order of their numbers; default: the folders, sorted
    random      whether `transform` draws numbers: then they become a function of (seed, epoch, sample)
    broken      error: a file that cannot be read ends the training, by name; skip: every file is read once at the
                start, and those that cannot be are left out and listed in `skipped`

    Raises `WorkloadError` for a folder that is not like this, `CannotRunError` without Pillow.
    """

    def __init__(
        self,
        folder: Path,
        transform: Callable[[Image], Tensor],
        classes: Sequence[str] | None = None,
        random: bool = False,
        broken: str = "error",
    ) -> None:
        if broken not in ("error", "skip"):
            raise WorkloadError(f"broken={broken}: give error or skip")
        if not folder.is_dir():
            raise WorkloadError(f"{folder}: no such folder; it has to hold a folder of images for each class")
        subfolders = sorted(
            entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")
        )
        self.classes = list(classes) if classes is not None else subfolders
        unknown = sorted(set(subfolders) - set(self.classes))
        if unknown:
            raise WorkloadError(f"{folder / unknown[0]}: there is no such class in the training data")
        self.samples = [
            (path, number)
            for number, name in enumerate(self.classes)
            if name in subfolders
            for path in sorted((folder / name).rglob("*"))
            if path.suffix.lower() in _SUFFIXES and not path.name.startswith(".")
        ]
        self.skipped: list[Path] = []
        if broken == "skip":
            with ThreadPoolExecutor() as pool:
                good = list(pool.map(lambda sample: _can_be_read(sample[0]), self.samples))
            self.skipped = [path for (path, _), is_good in zip(self.samples, good, strict=True) if not is_good]
            self.samples = [sample for sample, is_good in zip(self.samples, good, strict=True) if is_good]
        if not self.samples:
            kinds = ", ".join(suffix.removeprefix(".") for suffix in _SUFFIXES)
            raise WorkloadError(f"{folder}: no images ({kinds}) in folders of classes there")
        self.transform = transform
        self.deterministic = not random
        self.folder = folder

    @functools.cached_property
    def checksum(self) -> str:
        """The checksum of the names of all files, computed at first use. Only rank 0 needs it."""
        names = "\n".join(f"{number} {path.relative_to(self.folder)}" for path, number in self.samples)
        return f"sha256 of names: {hashlib.sha256(names.encode('utf-8', 'surrogateescape')).hexdigest()}"

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, number = self.samples[index]
        return self.transform(read_image(path)), number


def read_image(source: Path | BinaryIO, name: str | None = None) -> Any:
    """An RGB PIL image out of a file, or of an open one called `name`.

    Raises `WorkloadError` with the path or the name where there is none, or it is cut off.
    """
    try:
        from PIL import Image
    except ImportError:
        raise CannotRunError("images need Pillow: pip install 'everyrank[images]'") from None
    try:
        with Image.open(source) as image:
            return image.convert("RGB")
    except Exception as error:  # each format has its own kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        hint = "" if name else "; mend it, or leave such files out: --set broken=skip"
        raise WorkloadError(f"{name or source}: cannot be read as an image ({reason}){hint}") from error


def _can_be_read(path: Path) -> bool:
    try:
        read_image(path)
    except WorkloadError:
        return False
    return True
