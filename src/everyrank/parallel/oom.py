"""Turn out-of-memory errors into one line: the memory of the parameters, and the layouts that split them."""

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

_MESSAGES: dict[Phase, tuple[type[EveryrankError], str, str]] = {
    "build": (CannotRunError, "to build the model", ""),
    "update": (OutOfMemoryError, "for an update", "give accumulate=N for fewer samples at once, or "),
    "predict": (OutOfMemoryError, "to predict", "give fewer samples at once, or "),
}


@contextlib.contextmanager
def oom_context(phase: Phase, workload: Workload, layout: Layout, world: World) -> Generator[None]:
    """Replace an out-of-memory error of Python or torch by one with advice.

    Raises `CannotRunError` in phase "build" and `OutOfMemoryError` in the others. With several ranks it raises
    `RankFailedError`, because the other ranks wait in a collective.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        kind, purpose, advice = _MESSAGES[phase]
        if layout.axis is not None and world.size > 1:
            kind = RankFailedError
        text = f"no memory here {purpose}{_memory_needed(error, workload, layout)}"
        plan = _plan_command(workload, layout, world)
        raise kind(f"layout {layout}: {text}; {advice}{layouts_that_split(layout)}{plan}") from None


def _plan_command(workload: Workload, layout: Layout, world: World) -> str:
    """Return the command that finds the smallest change that fits, for a GPU; "" on CPU."""
    if world.device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(world.device)
    kind = "-".join(properties.name.removeprefix("NVIDIA ").split())
    arguments = [
        f"{world.size}x{kind}",
        "--memory",
        f"{properties.total_memory / 2**30:.1f}GiB",
        "--layout",
        str(layout),
    ]
    return f". Find the smallest change that fits: everyrank plan {_words(workload)} --gpus {shlex.join(arguments)}"


def _words(workload: Workload) -> str:
    """Return the workload as it is typed for a command."""
    source = workload.source
    if source is None:
        return "my_workload.py"
    settings = [f"{name}={value}" for name, value in {**source.saved, **source.settings}.items()]
    batch = ["--batch", str(source.batch)] if source.batch is not None else []
    return shlex.join([source.place, *(["--set", *settings] if settings else []), *batch])


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, or torch's allocator on CPU or CUDA, is out of memory."""
    messages = ("can't allocate memory", "cannot allocate memory", "not enough memory")
    is_by_type = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return not isinstance(error, EveryrankError) and (
        is_by_type or any(message in str(error).lower() for message in messages)
    )


def _memory_needed(error: BaseException, workload: Workload, layout: Layout) -> str:
    """Return ` (asked for 2097152 bytes): its parameters alone take 304 MiB in float64`, as far as it is known."""
    traceback.clear_frames(error.__traceback__)  # the frames hold the tensors built so far
    match = re.search(r"allocate ([\d.]+ \w+)", str(error))
    text = f" (asked for {match[1]})" if match is not None else ""
    with contextlib.suppress(Exception):  # some user models cannot be built on the meta device
        count = sum(parameter.numel() for parameter in on_meta(workload).parameters())
        dtype = param_dtype(layout)
        num_bytes = count * torch.empty((), dtype=dtype).element_size()
        text += f": its parameters alone take {num_bytes / 2**20:,.0f} MiB in {str(dtype).removeprefix('torch.')}"
    return text
