"""Tensors whose numbers lie in a file instead of memory: for models that are larger than the memory of a rank.

A file that is mapped into a process is read and written like memory; the kernel keeps of it what there is room for,
and the rest is on the disk. It counts against no limit of private memory (RLIMIT_DATA), and what of it a control group
holds, the kernel writes out and takes back before anything is killed. The file has no name any more once it is mapped:
it goes with the tensor, or with the process. It lies where Python's `tempfile` puts files (TMPDIR says where).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from everyrank.errors import CannotRunError

__all__ = ["built_in_files", "file_backed", "put_into_file"]

_SMALLEST = 1 << 16  # bytes: a process may have some 65,000 mappings, and what is smaller is hardly felt


def file_backed(tensor: Tensor) -> Tensor:
    """A copy on CPU, in a file of its own where it takes 64 KiB or more. Raises `CannotRunError` for a full disk."""
    source = tensor.detach()
    if source.nbytes < _SMALLEST:
        return source.cpu().clone()
    try:
        with tempfile.NamedTemporaryFile(prefix="everyrank-") as file:
            _make_room(file.fileno(), source.nbytes)
            mapped = torch.from_file(file.name, shared=True, size=source.numel(), dtype=source.dtype)
    except OSError as error:
        raise CannotRunError(
            f"{tempfile.gettempdir()}: no room for {source.nbytes >> 20} MiB of a model that is kept in files "
            f"({error.strerror}); let TMPDIR name a folder on a disk that has as much as the model takes"
        ) from error
    return mapped.view(source.shape).copy_(source)


def _make_room(file: int, num_bytes: int) -> None:
    """Take the room now: a mapped file that finds none later ends the process with SIGBUS."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, num_bytes)
    else:
        os.truncate(file, num_bytes)


@contextlib.contextmanager
def built_in_files() -> Generator[None]:
    """Modules that are built in the block have their large parameters and buffers in files, from registration on.

    The numbers are those that they would have in memory: initialisation writes into the file.
    """

    def registered(_: nn.Module, __: str, tensor: Any) -> None:
        if isinstance(tensor, Tensor) and tensor.device.type == "cpu" and not _has_alias(tensor):
            put_into_file(tensor)

    handles = [
        register_module_parameter_registration_hook(registered),
        register_module_buffer_registration_hook(registered),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def put_into_file(tensor: Tensor, dtype: torch.dtype | None = None) -> None:
    """Let a tensor have its numbers in a file, as `dtype` (None: its own); one that is small stays in memory."""
    value = tensor.data.to(dtype) if dtype is not None else tensor.data
    if value.nbytes >= _SMALLEST and (value is not tensor.data or value.untyped_storage().filename is None):
        value = file_backed(value)
    tensor.data = value


def _has_alias(tensor: Tensor) -> bool:
    """Whether another tensor has the same memory, by which the model may initialise this one after it is registered."""
    storage = tensor.untyped_storage()  # the second that holds it
    return torch._C._storage_Use_Count(storage._cdata) > 2  # pyright: ignore[reportPrivateUsage]
