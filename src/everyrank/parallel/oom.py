"""Replace out-of-memory errors by one line that names the memory of the parameters and layouts that split them."""

from __future__ import annotations

import contextlib
import re
import shlex
import traceback
from collections.abc import Generator
from typing import Literal

import torch

from everyrank.errors import CannotRunError, EveryrankError, OutOfMemoryError, RankFailedError
from everyrank.layout import Layout
from everyrank.parallel.init_model import on_meta
from everyrank.parallel.precision import param_dtype
from everyrank.parallel.state_memory import layouts_that_split
from everyrank.workload import Workload
from everyrank.world import World

__all__ = ["oom_context"]

Phase = Literal["build", "update", "predict"]

# phase -> class of the error, when it occurred, and advice before the layouts that split the model
_MESSAGES: dict[Phase, tuple[type[EveryrankError], str, str]] = {
    "build": (CannotRunError, "while building the model", ""),
    "update": (OutOfMemoryError, "in an update", "give accumulate=N for fewer samples at once, or "),
    "predict": (OutOfMemoryError, "in a prediction", "give fewer samples at once, or "),
}


@contextlib.contextmanager
def oom_context(phase: Phase, workload: Workload, layout: Layout, world: World) -> Generator[None]:
    """Replace an out-of-memory error of Python or torch in the block by an error with advice.

    Raises `CannotRunError` in phase "build" and `OutOfMemoryError` in the other phases. With several ranks it raises
    `RankFailedError`, because the other ranks wait in a collective.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        error_class, moment, advice = _MESSAGES[phase]
        if layout.axis is not None and world.size > 1:
            error_class = RankFailedError
        sizes = _sizes_text(error, workload, layout)
        plan_advice = _plan_advice(workload, layout, world)
        raise error_class(
            f"layout {layout}: out of memory {moment}{sizes}. To use less memory, {advice}{layouts_that_split(layout)}"
            f"{plan_advice}"
        ) from None


def _plan_advice(workload: Workload, layout: Layout, world: World) -> str:
    """Return a sentence with the command that finds the smallest change that fits on this GPU; "" on CPU."""
    if world.device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(world.device)
    gpu = "-".join(properties.name.removeprefix("NVIDIA ").split())
    arguments = [
        f"{world.size}x{gpu}",
        "--memory",
        f"{properties.total_memory / 2**30:.1f}GiB",
        "--layout",
        str(layout),
    ]
    command = f"everyrank plan {_workload_arguments(workload)} --gpus {shlex.join(arguments)}"
    return f". Find the smallest change that fits: {command}"


def _workload_arguments(workload: Workload) -> str:
    """Return the command-line arguments that select this workload."""
    source = workload.source
    if source is None:
        return "my_workload.py"
    settings = [f"{name}={value}" for name, value in {**source.saved, **source.settings}.items()]
    batch = ["--batch", str(source.batch)] if source.batch is not None else []
    return shlex.join([source.place, *(["--set", *settings] if settings else []), *batch])


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error means that Python, or torch's allocator on CPU or CUDA, is out of memory."""
    messages = ("can't allocate memory", "cannot allocate memory", "not enough memory")
    has_type = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return not isinstance(error, EveryrankError) and (
        has_type or any(message in str(error).lower() for message in messages)
    )


def _sizes_text(error: BaseException, workload: Workload, layout: Layout) -> str:
    """Return the size of the failed allocation and the memory of the parameters, as far as they are known.

    For example: ` (could not allocate 2097152 bytes). The parameters take 304 MiB in float64`.
    """
    # the frames keep the tensors that were built so far alive
    traceback.clear_frames(error.__traceback__)
    match = re.search(r"allocate ([\d.]+ \w+)", str(error))
    text = f" (could not allocate {match[1]})" if match is not None else ""
    with contextlib.suppress(Exception):  # some user models cannot be built on the meta device
        count = sum(parameter.numel() for parameter in on_meta(workload).parameters())
        dtype = param_dtype(layout)
        num_bytes = count * torch.empty((), dtype=dtype).element_size()
        text += f". The parameters take {num_bytes / 2**20:,.0f} MiB in {str(dtype).removeprefix('torch.')}"
    return text
