"""Cache the runs of `single` on disk. The name of a file is a hash of the inputs listed below.

The hash covers the code of everyrank, every imported .py file of the user, the versions of the installed packages, the
machine, the settings, the initial weights, the optimizer, and every batch. It does not cover other inputs of a loss,
such as an environment variable or a file of class weights. Therefore `verify` runs `single` again before it reports
a difference from a cached run. `verify --fresh` ignores the cache.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from everyrank.data import Slice, Update, batches_for_evaluation, batches_for_updates
from everyrank.errors import is_user_code
from everyrank.layout import Layout
from everyrank.loop import wrap_user_errors
from everyrank.parallel.full_state import state_tensors
from everyrank.parallel.init_model import on_cpu, seed_everything
from everyrank.parity.case import ParityCase, Segments
from everyrank.parity.rows import leaves
from everyrank.parity.trace import Trace
from everyrank.world import World

__all__ = ["cache_name", "decode_segments", "encode_segments", "load_reference", "save_reference"]

_MAX_FILE_BYTES = 1 << 29  # a larger run is not cached
_MAX_TOTAL_BYTES = 1 << 31  # above this total, the least recently used files are removed
_PACKAGE = Path(__file__).parents[1]


def cache_folder() -> Path | None:
    """Return the folder of cached runs, or None if XDG_CACHE_HOME is relative or the home folder is unknown."""
    base = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"))  # noqa: PTH111  (Path.expanduser may raise)
    return base / "everyrank" / "references" if base.is_absolute() else None


def cache_name(case: ParityCase, single: Layout, world: World) -> str | None:
    """Return the file's name, or None for a workload without a source: the code of its functions cannot be hashed."""
    workload = case.workload
    if workload.source is None:
        return None
    hasher = hashlib.sha256()

    def add(*values: object) -> None:
        hasher.update(repr(values).encode() + b"\n")

    add(
        _package_hash(),
        _packages(),
        torch.__version__,
        platform.python_version(),
        platform.processor(),
        platform.machine(),
    )
    add(torch.__config__.show(), torch.get_num_threads(), str(world.device), _device_name(world.device))
    add(
        workload.source,
        str(single),
        workload.seed,
        workload.global_batch,
        workload.clip_norm,
        workload.order,
        workload.dropout,
    )
    for path in sorted(_user_files()):
        hasher.update(path.encode() + hashlib.sha256(Path(path).read_bytes()).digest())
    with wrap_user_errors():
        seed_everything(workload.seed)
        model = on_cpu(workload)
        optimizer = workload.optimizer(model)
        schedule = workload.schedule(optimizer) if workload.schedule else None
    add([getattr(module, "p", None) for module in model.modules()])  # dropout probabilities
    for name, tensor in state_tensors(model).items():
        add(name, tensor.dtype, tuple(tensor.shape))
        hasher.update(_tensor_bytes(tensor))
    add(type(optimizer), [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups])
    add(type(schedule), [group.get("lr") for group in optimizer.param_groups])
    for batch in _batches(case, single, world):
        for leaf in leaves(batch):
            add(leaf.dtype, tuple(leaf.shape))
            hasher.update(_tensor_bytes(leaf))
    return f"{hasher.hexdigest()[:40]}.safetensors"


def _batches(case: ParityCase, single: Layout, world: World) -> Iterator[Any]:
    whole = Slice(0, 1)
    for updates in case.planned(single.precision):
        arguments = (case.workload, case.train_data, updates, whole, single.accumulate, world, torch.float64)
        for batches in batches_for_updates(*arguments):
            yield from ((batch.input, batch.target) for batch in batches)
    if case.eval_ends is not None:
        for batch in batches_for_evaluation(case.workload, case.eval_ends, whole, world, torch.float64):
            yield batch.input, batch.target


@functools.cache
def _package_hash() -> str:
    hasher = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        hasher.update(str(path.relative_to(_PACKAGE)).encode() + path.read_bytes())
    return hasher.hexdigest()


@functools.cache
def _packages() -> list[tuple[str, str]]:
    """List all installed packages with versions: any of them may define the model."""
    # a folder without METADATA, which an interrupted installation leaves, has neither name nor version
    return sorted({(str(package.name), str(package.version)) for package in importlib.metadata.distributions()})


def _user_files() -> set[str]:
    """Return the files of imported modules that belong to the user, not to everyrank, Python or a package."""
    paths = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return {file for file in paths if file and file.endswith(".py") and is_user_code(file) and Path(file).is_file()}


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def _tensor_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def load_reference(name: str) -> tuple[Trace, dict[str, Any]] | None:
    """Return (the run, the other fields of its `Reference`), or None if there is no readable file."""
    folder = cache_folder()
    if folder is None:
        return None
    try:
        with safe_open(folder / name, framework="pt") as file:
            metadata = json.loads(file.metadata()["fields"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (`file` is not a dict)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
    with contextlib.suppress(OSError):
        os.utime(folder / name)  # mark it as used: `_prune` removes the least recently used files first
    finals: list[dict[str, Tensor]] = [{} for _ in metadata["segments"]]
    zero_gradient_masks: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        kind, _, rest = key.partition("/")
        if kind == "zero_gradient_mask":
            zero_gradient_masks[rest] = tensor
        else:
            number, _, tensor_name = rest.partition("/")
            finals[int(number)][tensor_name] = tensor
    evaluation = {key: (total, count) for key, (total, count) in metadata["evaluation"].items()}
    run = Trace(metadata["losses"], metadata["counts"], evaluation, finals, True, moved=metadata["moved"])
    fields = {
        key: metadata[key]
        for key in (
            "loss_floors",
            "floors",
            "is_truncated",
            "reversed_differences",
            "evaluation_floors",
            "loss_scale",
        )
    }
    return run, {
        **fields,
        "segments": decode_segments(metadata["segments"]),
        "zero_gradient_masks": zero_gradient_masks,
    }


def save_reference(name: str, run: Trace, fields: dict[str, Any]) -> None:
    """Write a run to the cache. Errors of a full or read-only disk are ignored. The next call then runs again."""
    folder = cache_folder()
    if folder is None:
        return
    tensors = {f"final/{n}/{key}": value for n, final in enumerate(run.finals) for key, value in final.items()}
    tensors |= {f"zero_gradient_mask/{key}": value for key, value in fields["zero_gradient_masks"].items()}
    if sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) > _MAX_FILE_BYTES:
        return
    metadata = {
        "losses": run.losses,
        "counts": run.counts,
        "evaluation": run.evaluation,
        "moved": run.moved,
        "loss_floors": fields["loss_floors"],
        "floors": fields["floors"],
        "is_truncated": fields["is_truncated"],
        "reversed_differences": fields["reversed_differences"],
        "evaluation_floors": fields["evaluation_floors"],
        "loss_scale": fields["loss_scale"],
        "segments": encode_segments(fields["segments"]),
    }
    path = folder / name
    partial = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError, SafetensorError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        save_file(
            {key: value.contiguous() for key, value in tensors.items()}, partial, {"fields": json.dumps(metadata)}
        )
        partial.replace(path)
        _prune(folder)
    with contextlib.suppress(OSError):
        partial.unlink(missing_ok=True)


def _prune(folder: Path) -> None:
    """Remove the least recently used files until the others have at most `_MAX_TOTAL_BYTES`."""
    files = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    total = 0
    for path in files:
        total += path.stat().st_size
        if total > _MAX_TOTAL_BYTES:
            path.unlink(missing_ok=True)


def encode_segments(segments: Segments) -> list[list[list[int]]]:
    """Convert segments to lists that JSON can hold."""
    return [[[update.step, update.epoch, update.index] for update in segment] for segment in segments]


def decode_segments(rows: list[list[list[int]]]) -> Segments:
    """Convert the result of `encode_segments` back."""
    return [[Update(*row) for row in segment] for segment in rows]
