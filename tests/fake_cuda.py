"""CUDA that is pretended: an update of a strategy on fake CUDA tensors and a fake process group, without a card.

Nothing is computed. What is looked at is what the host asks the device: how many operators, what it copies from one to
the other, and where it would wait for the device. All of it runs in a process of its own, because the device guard that
fake CUDA tensors need (fake_cuda.cpp) stays installed.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import json
import operator
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from everyrank import strategies
from everyrank.builtin.decoder import Decoder, DecoderShape
from everyrank.data import Batch, cut
from everyrank.data.loader import map_tensors
from everyrank.layout import parse_layout
from everyrank.parallel import ddp, init_model, mesh
from everyrank.parallel.trainable import make_trainable
from everyrank.strategies import Prepared, prepare
from everyrank.workload import Source, Workload, load
from everyrank.world import World
from everyrank.world.world import GroupCache

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SOURCE = Path(__file__).with_suffix(".cpp")

# --- the guard


def build_guard() -> Path:
    """The compiled guard, from the cache where this torch and this source have one already."""
    folder = Path(torch.__file__).parent
    about = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {folder}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "everyrank-tests"
    library = cache / f"fake_cuda-{about}.so"
    if not library.exists():
        compiler = shutil.which("g++") or shutil.which("c++")
        assert compiler, "fake CUDA needs a C++ compiler, g++ or c++"
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as partial:
            made = Path(partial, library.name)
            words = [compiler, "-O0", "-std=c++20", "-shared", "-fPIC", f"-I{folder}/include", str(SOURCE)]
            words += ["-o", str(made), f"-L{folder}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{folder}/lib"]
            subprocess.run(words, check=True, timeout=300)
            made.replace(library)  # whole or not there: another process may build it at the same time
    return library


# Without a CUDA kernel torch replaces these by several operators: the CPU wheel would count more than a CUDA build.
_ONE_KERNEL_ON_CUDA = ("silu_backward", "_fused_rms_norm", "_fused_rms_norm_backward")
_KERNELS = torch.library.Library("aten", "IMPL", "CUDA")


def install_guard() -> None:
    """Let this process take fake CUDA tensors, until it ends."""
    ctypes.CDLL(str(build_guard())).install()
    for name in _ONE_KERNEL_ON_CUDA:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            _KERNELS.impl(name, _never_called)


def _never_called(*_: object) -> None:
    raise AssertionError("fake tensors call no kernel")


# --- what an update asks


@dataclasses.dataclass
class Asked:
    """What one update asked of the device.

    waits      place in the code -> how often the host waited there for what the device computes
    copies     place in the code -> copies between host and device
    operators  on CUDA tensors
    """

    waits: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter[str])
    copies: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter[str])
    operators: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter[str])


_READS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::item")
_COUNTS = ("aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::_unique2", "aten::bincount")

_NO_KERNEL = ("prim::", "aten::empty", "aten::new_empty", "aten::detach", "aten::_unsafe_view", "aten::alias")


class Watch(TorchDispatchMode):
    """Counts operators on CUDA tensors, and says what reading one gives: False, 1 or 1.0."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = Asked()
        self.num_sorted = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().partition(".")[0]
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_cuda = [tensor for tensor in given if tensor.device.type == "cuda"]
        target = kwargs.get("device")
        is_kernel = not func.is_view and not name.startswith(_NO_KERNEL)
        if name.startswith("aten::_foreach") and _is_one_by_one(args):
            self.asked.operators[f"{_place()} {name}"] += len(args[0]) - 1
        if is_kernel and (on_cuda or (target is not None and torch.device(target).type == "cuda")):
            self.asked.operators[f"{_place()} {name}"] += 1
        is_blocking = not (kwargs.get("non_blocking", False) or (name == "aten::copy_" and len(args) > 2 and args[2]))
        if self._crosses(name, given, target):
            self.asked.copies[_place()] += 1
            self.asked.waits[_place()] += is_blocking or given[-1].device.type == "cuda"
        elif (on_cuda and name in (*_READS, *_COUNTS)) or (
            on_cuda and name == "aten::repeat_interleave" and kwargs.get("output_size") is None
        ):
            self.asked.waits[_place()] += 1
        if name == "aten::_local_scalar_dense":
            return _read(given[0])
        if name == "aten::bincount":
            return given[0].new_empty(args[2] if len(args) > 2 else kwargs["minlength"])
        if name == "aten::sort":
            self.num_sorted = given[0].numel()
        return func(*args, **kwargs)

    @staticmethod
    def _crosses(name: str, given: list[Tensor], target: Any) -> bool:
        """Whether the operator copies between host and device."""
        if name == "aten::_to_copy":
            return target is not None and torch.device(target).type != given[0].device.type
        return name == "aten::copy_" and given[0].device.type != given[1].device.type


@contextlib.contextmanager
def _lists_read_at_once(watch: Watch, header: list[int]) -> Iterator[None]:
    """`tolist` is one copy on CUDA; of a fake tensor torch would read element by element.

    Lists are counts of what was sorted last, and all of it is of the first kind; but `header` is that of a pipeline's
    messages.
    """
    read = FakeTensor.tolist

    def tolist(tensor: FakeTensor) -> Any:
        if tensor.device.type != "cuda":
            return read(tensor)
        watch.asked.waits[_place()] += 1
        watch.asked.copies[_place()] += 1
        if tensor.shape == (len(header),):
            return header
        row = [watch.num_sorted, *[0] * (tensor.shape[-1] - 1)]
        return row if tensor.dim() == 1 else [row] * len(tensor)

    with mock.patch.object(FakeTensor, "tolist", tolist):
        yield


def _is_one_by_one(args: Any) -> bool:
    """Whether torch takes the tensors of a list one by one: a factor on the device is of another dtype."""
    if len(args) < 2 or not isinstance(args[1], Tensor):
        return False
    if any(args[1].device != one.device for one in args[0]):
        raise RuntimeError(f"a factor on {args[1].device} for a tensor on another device, which CUDA refuses")
    return any(args[1].dtype != one.dtype for one in args[0])


def _read(tensor: Tensor) -> Any:
    if tensor.dtype is torch.bool:
        return False
    return 1.0 if tensor.is_floating_point() else 1


def _place() -> str:
    """The place in our code that asked: `parallel/loss.py:53 compute_loss`."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        _, found, name = frame.f_code.co_filename.rpartition("/src/everyrank/")
        if found:
            return f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "autograd, or torch"


# --- a world that is pretended


class FakeDDP(nn.Module):
    """DistributedDataParallel needs memory. What it adds is known: after backward one all-reduce, or the person's hook.

    Neither waits on CUDA; what a hook asks is counted.
    """

    def __init__(self, module: nn.Module, **_: object) -> None:
        super().__init__()
        self.module = module
        self.hook: Callable[..., object] | None = None
        self.sends = True

    _set_params_and_buffers_to_ignore_for_model = staticmethod(lambda *_: None)

    def register_comm_hook(self, _: object, hook: Callable[..., object]) -> None:
        self.hook = hook

    def forward(self, *values: Any) -> Any:
        output, carrier = self.module(*values)
        if carrier.requires_grad and self.hook is not None and self.sends:
            queue: Any = torch.autograd.Variable._execution_engine.queue_callback
            carrier.register_hook(lambda _: queue(self._send))
        return output, carrier

    def _send(self) -> None:
        trained = [parameter for parameter in self.module.parameters() if parameter.grad is not None]
        bucket = mock.Mock()
        bucket.parameters.return_value, bucket.gradients.return_value = trained, [p.grad for p in trained]
        assert self.hook is not None
        self.hook(None, bucket)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.sends = False
        try:
            yield
        finally:
            self.sends = True


class _Event:
    def __init__(self, *_: object, **__: object) -> None: ...
    def record(self, *_: object) -> None: ...
    def wait(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class _Stream(_Event):
    stream_id, device_index, device_type = 0, 0, 1

    def wait_event(self, *_: object) -> None: ...
    def wait_stream(self, *_: object) -> None: ...
    def record_event(self, *_: object) -> _Event:
        return _Event()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


@contextlib.contextmanager
def pretended_cuda(count: int = 2) -> Iterator[None]:
    """torch.cuda as on a machine with so many devices; DistributedDataParallel without memory."""
    stream = _Stream()
    stubs: dict[str, Any] = {
        "device_count": lambda: count,
        "is_initialized": lambda: True,
        "set_device": lambda _: None,
        "current_device": lambda: 0,
        "manual_seed": lambda _: None,
        "synchronize": lambda *_: None,
        "is_bf16_supported": lambda *_, **__: True,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: types.SimpleNamespace(total_memory=80 * 2**30),
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda *_: stream,
        "stream": lambda _: stream,
    }
    with contextlib.ExitStack() as stack:
        for name, stub in stubs.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stub))
        stack.enter_context(mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False))
        stack.enter_context(mock.patch.object(Tensor, "record_stream"))
        stack.enter_context(mock.patch.object(ddp, "DistributedDataParallel", FakeDDP))
        stack.enter_context(mock.patch.object(dist.ProcessGroup, "set_timeout"))
        stack.enter_context(mock.patch.object(mesh, "store_barrier"))
        stack.enter_context(mock.patch.object(strategies, "check_state_fits"))  # gathers values, which fakes have not
        # A copy of a fake tensor would copy its mode, with references to storages that torch then releases twice.
        stack.enter_context(mock.patch.object(FakeTensorMode, "__deepcopy__", lambda mode, _: mode, create=True))
        yield


@contextlib.contextmanager
def fake_world(rank: int, size: int) -> Iterator[World]:
    """The world of one rank, whose collectives end at once and bring nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    cache = GroupCache()
    try:
        yield World(
            rank=rank,
            size=size,
            local_rank=rank,
            local_size=size,
            device=CUDA,
            backend="nccl",
            threads=1,
            loader_workers=0,
            timeout_seconds=300.0,
            store=dist.HashStore(),
            group=dist.group.WORLD if size > 1 else None,
            hosts=("a",) * size,
            group_cache=cache,
        )
    finally:
        cache.clear()
        dist.destroy_process_group()


@contextlib.contextmanager
def _built_on_cuda() -> Iterator[None]:
    """Models are fake and on CUDA from the start: torch cannot move the memory of a fake one."""
    build = init_model._called

    def called(*values: Any) -> nn.Module:
        with CUDA:
            return build(*values)

    def real(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*values: Any, **named: Any) -> Any:
            with unset_fake_temporarily():
                return function(*values, **named)

        return called

    def stays(module: nn.Module, *_: object, **__: object) -> nn.Module:
        return module

    with (
        mock.patch.object(init_model, "_called", called),
        mock.patch.object(mesh, "init_device_mesh", real(mesh.init_device_mesh)),
        mock.patch.object(DeviceMesh, "__init__", real(DeviceMesh.__init__)),
        mock.patch.object(nn.Module, "to", stays),
    ):
        yield


def _batches(workload: Workload, prepared: Prepared) -> list[Batch]:
    """Micro-batches of one update, of samples of the workload, on the device."""
    with unset_fake_temporarily():
        samples = workload.train_data()
        sample = samples[0]
    made: list[Batch] = []
    for one in prepared.data_slices:
        num_samples = len(cut(workload.global_batch // prepared.num_micro_batches, one))

        def on_device(value: Any, count: int = num_samples) -> Any:
            value = torch.as_tensor(value)
            dtype = prepared.dtype if value.is_floating_point() else value.dtype
            return torch.zeros(count, *value.shape, dtype=dtype, device=CUDA)

        inputs, target = map_tensors(sample[0], on_device), on_device(sample[1])
        made += [Batch(inputs, target, num_samples, 0, workload.global_batch)] * prepared.num_micro_batches
    return made


def asked_by_update(workload: Workload, layout: str, rank: int, size: int) -> Asked:
    """What the second update of a layout asks of the device on one rank; the first makes the optimizer's state."""
    with fake_world(rank, size) as world, pretended_cuda(max(2, size)), FakeTensorMode(allow_non_fake_inputs=True):
        with _built_on_cuda():
            prepared = prepare(workload, parse_layout(layout), world)
        prepared.parallel.is_checked = True  # what is compared before the first update, and in it, is read
        if prepared.parallel.tensor is not None:
            prepared.parallel.tensor.unseen.clear()
        for _ in range(2):
            batches = _batches(workload, prepared)
            with Watch() as watch, _lists_read_at_once(watch, _header(prepared, batches[0])):
                prepared.step(batches)
                if prepared.trainable.ema is not None:
                    prepared.trainable.ema.update()
    return watch.asked


def _header(prepared: Prepared, batch: Batch) -> list[int]:
    """What one stage says to the next of its output (samples, positions, width): number of its dtype, shape."""
    if prepared.idle is None:
        return []
    width = next(parameter.shape[-1] for parameter in prepared.model.parameters() if parameter.dim() == 2)
    found = [0, 3, *batch.target.shape[:2], width]
    return found + [0] * (10 - len(found))


@functools.cache
def small_workload(name: str) -> Workload:
    """A workload of ours, small: a decoder of two blocks (text, experts), digits with its batch norm."""
    if name == "digits":
        return load(Source("digits", {}))
    experts = 4 if name == "experts" else 0
    shape = DecoderShape(num_blocks=2, num_heads=2, width=16, hidden=32, experts=experts)
    workload = load(Source("text", {"experts": experts, "batch": 16}))
    return dataclasses.replace(workload, model=lambda: Decoder(shape), ema_decay=0.9 if name == "average" else None)


def write_report(cases: Sequence[tuple[str, str, int, int]], path: Path) -> None:
    """For each (workload, layout, rank, size) what its update asks, or what went wrong; as JSON. Ends the process."""
    install_guard()
    rows: list[Any] = []
    for name, layout, rank, size in cases:
        try:
            rows.append(vars(asked_by_update(small_workload(name), layout, rank, size)))
        except Exception:
            rows.append({"error": traceback.format_exc()})
    path.write_text(json.dumps({"rows": rows, "seen": _seen_by_watch(), "two devices": _two_devices()}))


def _two_devices() -> str:
    """What goes wrong with an update of a model on two devices, the count of loss terms on the first; "": nothing."""
    workload = small_workload("text")
    with fake_world(0, 1) as world, pretended_cuda(), FakeTensorMode(allow_non_fake_inputs=True):
        model = nn.ParameterList([nn.Parameter(torch.ones(3, device=f"cuda:{index}")) for index in range(2)])
        own = dataclasses.replace(
            workload, optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1), schedule=None
        )
        trainable = make_trainable(own, parse_layout("single"), model)
        for parameter in trainable.parameters:
            parameter.grad = torch.ones_like(parameter)
        assert world.device == CUDA
        try:
            with Watch():  # fake tensors do not mind
                trainable.optimizer_step(torch.ones(2, dtype=torch.float64, device=CUDA))
        except RuntimeError as error:
            return str(error)
    return ""


def _seen_by_watch() -> dict[str, list[int]]:
    """What is known to make the host wait, or not to -> [waits, copies] that the watch has seen of it."""
    found: dict[str, list[int]] = {}
    with pretended_cuda(), FakeTensorMode(allow_non_fake_inputs=True):
        values, counts = torch.zeros(4, device=CUDA), torch.zeros(4, dtype=torch.int64, device=CUDA)
        calls: dict[str, Callable[[], object]] = {
            "float": lambda: float(values[0]),
            "bool": lambda: bool(values.isfinite().all()),
            "tolist": lambda: counts.tolist(),
            "tensor": lambda: torch.tensor([1.0], device=CUDA),
            "tensor of the host into an element": lambda: operator.setitem(values, 0, torch.tensor(1.0)),
            "cpu": lambda: values.cpu(),
            "to the device": lambda: torch.zeros(4).to(CUDA),
            "to the device, not blocking": lambda: torch.zeros(4).to(CUDA, non_blocking=True),
            "bincount": lambda: counts.bincount(minlength=4),
            "fill": lambda: values.fill_(1.0),
            "full": lambda: torch.full((2,), 1.0, device=CUDA),
        }
        for name, call in calls.items():
            with Watch() as watch, _lists_read_at_once(watch, []):
                call()
            found[name] = [watch.asked.waits.total(), watch.asked.copies.total()]
    return found
