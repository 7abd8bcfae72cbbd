"""Tensors in memory-mapped files, for models that do not fit into the memory of a rank.

A mapped file is read and written like memory. The kernel keeps in RAM what fits. It does not count against limits of
private memory (RLIMIT_DATA), and under a memory cgroup the kernel writes pages out before it kills a process. The file
is unlinked after mapping, so it disappears with the tensor or the process. It is created in Python's `tempfile` folder
(set TMPDIR to change it).
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

_SMALLEST = 1 << 16  # bytes: a process may have about 65,000 mappings, and smaller tensors need little memory


def file_backed(tensor: Tensor) -> Tensor:
    """Copy a tensor to CPU, in a file if it takes 64 KiB or more. Raises `CannotRunError` for a full disk."""
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
            f"({error.strerror}); set TMPDIR to a folder on a disk with enough space for the model"
        ) from error
    return mapped.view(source.shape).copy_(source)


def _make_room(file: int, num_bytes: int) -> None:
    """Reserve the disk space now: a mapped file on a full disk ends the process with SIGBUS."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, num_bytes)
    else:
        os.truncate(file, num_bytes)


@contextlib.contextmanager
def built_in_files() -> Generator[None]:
    """Put large parameters and buffers of modules built in the block into files.

    The values are the same as in memory, because initialisation writes into the file.
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
    """Move a tensor's storage to a file, as `dtype` (None: its own); small tensors stay in memory."""
    value = tensor.data.to(dtype) if dtype is not None else tensor.data
    if value.nbytes >= _SMALLEST and (value is not tensor.data or value.untyped_storage().filename is None):
        value = file_backed(value)
    tensor.data = value


def _has_alias(tensor: Tensor) -> bool:
    """Whether a second tensor shares the storage, so that the model may still initialise it through that tensor."""
    storage = tensor.untyped_storage()  # this variable is a second reference to it
    return torch._C._storage_Use_Count(storage._cdata) > 2  # pyright: ignore[reportPrivateUsage]
