"""Where memory does not suffice: one line that says how much the parameters take, and which layouts split them."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Generator

import torch

from everyrank.errors import CannotRunError, EveryrankError, NoRoomError, RankFailedError
from everyrank.layout import Layout
from everyrank.layout.options import BuildOptions
from everyrank.parallel.init_model import on_meta
from everyrank.parallel.precision import param_dtype
from everyrank.workload import Workload
from everyrank.world import World

__all__ = ["building", "predicting", "updating"]


def building(workload: Workload, layout: Layout, world: World) -> contextlib.AbstractContextManager[None]:
    """While the model is built and laid out. Raises `CannotRunError` where the memory does not suffice.

    That of one rank among several is a `RankFailedError`: the others wait for it.
    """
    return _in_memory(workload, layout, world, CannotRunError, "to build the model", "")


def updating(workload: Workload, layout: Layout, world: World) -> contextlib.AbstractContextManager[None]:
    """While an update is done. Raises `NoRoomError` where the memory does not suffice.

    That of one rank among several is a `RankFailedError`: the others wait for it.
    """
    return _in_memory(
        workload, layout, world, NoRoomError, "for an update", "give accumulate=N for fewer samples at once, or "
    )


def predicting(workload: Workload, layout: Layout, world: World) -> contextlib.AbstractContextManager[None]:
    """While an output is computed. Raises as `updating` does."""
    return _in_memory(workload, layout, world, NoRoomError, "to predict", "give fewer samples at once, or ")


@contextlib.contextmanager
def _in_memory(
    workload: Workload, layout: Layout, world: World, alone: type[EveryrankError], purpose: str, less: str
) -> Generator[None]:
    """Turn what Python and torch raise for want of memory into one line: an `alone`, where no other rank waits."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_for_memory(error):
            raise
        kind = alone if _is_alone(layout, world) else RankFailedError
        what = f"no memory here {purpose}{_about(error, workload, layout)}"
        raise kind(f"layout {layout}: {what}; {less}{_split(layout)}") from None


def _is_alone(layout: Layout, world: World) -> bool:
    return layout.axis is None or world.size == 1


def _is_for_memory(error: BaseException) -> bool:
    """Whether Python, torch's allocator on CPU or that on CUDA has found no memory."""
    words = ("can't allocate memory", "cannot allocate memory", "not enough memory")
    is_by_name = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return not isinstance(error, EveryrankError) and (is_by_name or any(word in str(error).lower() for word in words))


def _about(error: BaseException, workload: Workload, layout: Layout) -> str:
    """` (asked for 2097152 bytes): its parameters alone take 304 MiB in float64`, as far as that is known."""
    traceback.clear_frames(error.__traceback__)  # which hold what was built so far
    asked = re.search(r"allocate ([\d.]+ \w+)", str(error))
    text = f" (asked for {asked[1]})" if asked is not None else ""
    with contextlib.suppress(Exception):  # a person's model may not be built without numbers
        count = sum(parameter.numel() for parameter in on_meta(workload).parameters())
        dtype = param_dtype(layout)
        num_bytes = count * torch.empty((), dtype=dtype).element_size()
        text += f": its parameters alone take {num_bytes / 2**20:,.0f} MiB in {str(dtype).removeprefix('torch.')}"
    return text


def _split(layout: Layout) -> str:
    if layout.read(BuildOptions).meta:
        return "give more ranks"
    return (
        "give a layout that splits the model: fsdp:meta=true, tensor:meta=true or pipeline:meta=true (verify takes one "
        "as --reference)"
    )
