"""Runs of `single` on the disk, under a name that changes with whatever they depend on.

The name is a hash of everyrank's own code and of every file of the person's that is imported, of all that is installed
and the machine, of the settings, the weights and the optimizer as built, and of every batch that is read. A loss that
depends on something else (an environment variable, a file of class weights) is not seen: so a kept run never convicts,
`single` is run anew first; and `verify --fresh` reads none.
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
from everyrank.errors import is_own
from everyrank.layout import Layout
from everyrank.loop import wrap_user_errors
from everyrank.parallel.init_model import on_cpu, seed_everything
from everyrank.parity.case import ParityCase, Segments
from everyrank.parity.rows import leaves
from everyrank.parity.trace import Trace
from everyrank.world import World

__all__ = ["decode_segments", "encode_segments", "load_references", "name_of", "save"]

_LARGEST = 1 << 29  # bytes of one file; what is larger is run again
_TOTAL = 1 << 31  # of all files: the oldest go
_PACKAGE = Path(__file__).parents[1]


def folder() -> Path:
    """Where they are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    # without a home it stays as it is, and nothing is there and nothing can be kept
    return Path(os.path.expanduser(base)) / "everyrank" / "references"  # noqa: PTH111  (which raises then)


def name_of(case: ParityCase, single: Layout, world: World) -> str | None:
    """The file's name; None for a workload that came by value: what its functions do stands in no file."""
    workload = case.workload
    if workload.source is None:
        return None
    content = hashlib.sha256()

    def add(*what: object) -> None:
        content.update(repr(what).encode() + b"\n")

    add(
        _own_code(), _packages(), torch.__version__, platform.python_version(), platform.processor(), platform.machine()
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
    for path in sorted(_files_of_the_person()):
        content.update(path.encode() + hashlib.sha256(Path(path).read_bytes()).digest())
    with wrap_user_errors():
        seed_everything(workload.seed)
        model = on_cpu(workload)
        optimizer = workload.optimizer(model)
        schedule = workload.schedule(optimizer) if workload.schedule else None
    add([getattr(module, "p", None) for module in model.modules()])  # of dropout
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor):
            add(name, tensor.dtype, tuple(tensor.shape))
            content.update(_bytes(tensor))
    add(type(optimizer), [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups])
    add(type(schedule), [rate for group in optimizer.param_groups for rate in (group.get("lr"),)])
    for batch in _batches(case, single, world):
        for leaf in leaves(batch):
            add(leaf.dtype, tuple(leaf.shape))
            content.update(_bytes(leaf))
    return f"{content.hexdigest()[:40]}.safetensors"


def _batches(case: ParityCase, single: Layout, world: World) -> Iterator[Any]:
    whole = Slice(0, 1)
    for updates in case.planned(single.precision):
        data = (case.workload, case.train_data, updates, whole, single.accumulate, world, torch.float64)
        for parts in batches_for_updates(*data):
            yield from ((part.input, part.target) for part in parts)
    if case.eval_ends is not None:
        for part in batches_for_evaluation(case.workload, case.eval_ends, whole, world, torch.float64):
            yield part.input, part.target


@functools.cache
def _own_code() -> str:
    content = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        content.update(str(path.relative_to(_PACKAGE)).encode() + path.read_bytes())
    return content.hexdigest()


@functools.cache
def _packages() -> list[tuple[str, str]]:
    """All that is installed, with versions: a model may come out of any of it."""
    return sorted({(one.name, one.version) for one in importlib.metadata.distributions()})


def _files_of_the_person() -> set[str]:
    """Files of all modules that are imported and that neither we, nor Python, nor a package have brought."""
    found = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return {file for file in found if file and file.endswith(".py") and is_own(file) and Path(file).is_file()}


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def load_references(name: str) -> tuple[Trace, dict[str, Any]] | None:
    """(the run, the other fields of its `Reference`); None where there is none that can be read."""
    try:
        with safe_open(folder() / name, framework="pt") as file:
            about = json.loads(file.metadata()["about"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (no dict)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
    with contextlib.suppress(OSError):
        os.utime(folder() / name)  # the oldest go first
    finals: list[dict[str, Tensor]] = [{} for _ in about["segments"]]
    nulls: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        kind, _, rest = key.partition("/")
        if kind == "null":
            nulls[rest] = tensor
        else:
            number, _, tensor_name = rest.partition("/")
            finals[int(number)][tensor_name] = tensor
    evaluation = {key: (total, count) for key, (total, count) in about["evaluation"].items()}
    run = Trace(about["losses"], about["counts"], evaluation, finals, True, moved=about["moved"])
    rest = {key: about[key] for key in ("loss_floors", "floors", "is_cut", "reversed", "evaluation_floors")}
    return run, {**rest, "segments": decode_segments(about["segments"]), "nulls": nulls}


def save(name: str, run: Trace, rest: dict[str, Any]) -> None:
    """Keep a run; a disk that is full or read-only keeps nothing, and nothing is lost for it."""
    tensors = {f"final/{n}/{key}": value for n, final in enumerate(run.finals) for key, value in final.items()}
    tensors |= {f"null/{key}": value for key, value in rest["nulls"].items()}
    if sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) > _LARGEST:
        return
    about = {
        "losses": run.losses,
        "counts": run.counts,
        "evaluation": run.evaluation,
        "moved": run.moved,
        "loss_floors": rest["loss_floors"],
        "floors": rest["floors"],
        "is_cut": rest["is_cut"],
        "reversed": rest["reversed"],
        "evaluation_floors": rest["evaluation_floors"],
        "segments": encode_segments(rest["segments"]),
    }
    place = folder() / name
    partial = place.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError, SafetensorError):
        if not place.is_absolute():
            return
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        save_file({key: value.contiguous() for key, value in tensors.items()}, partial, {"about": json.dumps(about)})
        partial.replace(place)
        _prune()
    with contextlib.suppress(OSError):
        partial.unlink(missing_ok=True)


def _prune() -> None:
    files = sorted(folder().iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    total = 0
    for path in files:
        total += path.stat().st_size
        if total > _TOTAL:
            path.unlink(missing_ok=True)


def encode_segments(segments: Segments) -> list[list[list[int]]]:
    """As JSON has them."""
    return [[[update.step, update.epoch, update.index] for update in segment] for segment in segments]


def decode_segments(rows: list[list[list[int]]]) -> Segments:
    """What `encode_segments` made."""
    return [[Update(*row) for row in segment] for segment in rows]
