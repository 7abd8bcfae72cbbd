"""A simulation of CUDA without a GPU: updates of a strategy on fake CUDA tensors and a fake process group.

Nothing is computed. The simulation counts operators on the device, copies between host and device, and lines where the
host would wait for the device. It runs in a separate process, because fake CUDA tensors need a device guard
(fake_cuda.cpp) that stays installed.
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

# --- the device guard


def build_guard() -> Path:
    """Return the library with the device guard. Compile it unless it is cached for this torch and this source."""
    torch_folder = Path(torch.__file__).parent
    digest = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {torch_folder}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "everyrank-tests"
    library = cache / f"fake_cuda-{digest}.so"
    if not library.exists():
        compiler = shutil.which("g++") or shutil.which("c++")
        assert compiler, "fake CUDA needs a C++ compiler, g++ or c++"
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as build_folder:
            new_library, torch_lib = Path(build_folder, library.name), torch_folder / "lib"
            command = [compiler, "-O0", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder}/include", str(SOURCE)]
            command += ["-o", str(new_library), f"-L{torch_lib}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_lib}"]
            subprocess.run(command, check=True, timeout=300)
            new_library.replace(library)  # this is atomic, because another process may build it at the same time
    return library


# Without a CUDA kernel, torch decomposes these operators. The CPU wheel would count more operators than a CUDA build.
_ONE_KERNEL_ON_CUDA = ("silu_backward", "_fused_rms_norm", "_fused_rms_norm_backward")
_KERNELS = torch.library.Library("aten", "IMPL", "CUDA")


def install_guard() -> None:
    """Allow fake CUDA tensors in this process, until it ends."""
    ctypes.CDLL(str(build_guard())).install()
    for name in _ONE_KERNEL_ON_CUDA:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            _KERNELS.impl(name, _fail_kernel)


def _fail_kernel(*_: object) -> None:
    """Fail, because fake tensors need no kernel."""
    raise AssertionError("fake tensors call no kernel")


# --- operators, copies and waits of an update


@dataclasses.dataclass
class OperatorCounts:
    """The counts of one update.

    waits      line of everyrank's code -> number of times that the host waited there for the device
    copies     line of everyrank's code -> number of copies between host and device
    operators  "line operator" -> number of calls on CUDA tensors
    """

    waits: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter[str])
    copies: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter[str])
    operators: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter[str])


# operators that read a value of the device on the host, and operators whose output shape depends on such a value
_VALUE_READS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::item")
_DYNAMIC_SHAPES = ("aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::_unique2", "aten::bincount")

# prefixes of operators that launch no kernel
_NO_KERNEL = ("prim::", "aten::empty", "aten::new_empty", "aten::detach", "aten::_unsafe_view", "aten::alias")


class CountOperators(TorchDispatchMode):
    """A mode that counts operators on CUDA tensors. A value that the host reads is False, 1 or 1.0.

    `num_sorted` is the number of elements of the tensor that was sorted last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts = OperatorCounts()
        self.num_sorted = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().partition(".")[0]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        cuda_tensors = [tensor for tensor in tensors if tensor.device.type == "cuda"]
        target_device = kwargs.get("device")
        is_kernel = not func.is_view and not name.startswith(_NO_KERNEL)
        if name.startswith("aten::_foreach") and _is_one_kernel_per_tensor(args):
            self.counts.operators[f"{_line_of_everyrank()} {name}"] += len(args[0]) - 1
        if is_kernel and (cuda_tensors or (target_device is not None and torch.device(target_device).type == "cuda")):
            self.counts.operators[f"{_line_of_everyrank()} {name}"] += 1
        is_blocking = not (kwargs.get("non_blocking", False) or (name == "aten::copy_" and len(args) > 2 and args[2]))
        if self._is_host_device_copy(name, tensors, target_device):
            self.counts.copies[_line_of_everyrank()] += 1
            self.counts.waits[_line_of_everyrank()] += is_blocking or tensors[-1].device.type == "cuda"
        elif (cuda_tensors and name in (*_VALUE_READS, *_DYNAMIC_SHAPES)) or (
            cuda_tensors and name == "aten::repeat_interleave" and kwargs.get("output_size") is None
        ):
            self.counts.waits[_line_of_everyrank()] += 1
        if name == "aten::_local_scalar_dense":
            return _value_read_from(tensors[0])
        if name == "aten::bincount":
            return tensors[0].new_empty(args[2] if len(args) > 2 else kwargs["minlength"])
        if name == "aten::sort":
            self.num_sorted = tensors[0].numel()
        return func(*args, **kwargs)

    @staticmethod
    def _is_host_device_copy(name: str, tensors: list[Tensor], target_device: Any) -> bool:
        """Return whether the operator copies between host and device."""
        if name == "aten::_to_copy":
            return target_device is not None and torch.device(target_device).type != tensors[0].device.type
        return name == "aten::copy_" and tensors[0].device.type != tensors[1].device.type


@contextlib.contextmanager
def _patched_tolist(counting: CountOperators, pipeline_header: list[int]) -> Iterator[None]:
    """Count `tolist` as one copy, as on CUDA. For a fake tensor, torch would read each element.

    A tensor with the length of `pipeline_header` is the header of a pipeline's message. Any other one has the number of
    tokens of each expert: the first expert gets all tokens of the latest sort.
    """
    original_tolist = FakeTensor.tolist

    def tolist(tensor: FakeTensor) -> Any:
        if tensor.device.type != "cuda":
            return original_tolist(tensor)
        counting.counts.waits[_line_of_everyrank()] += 1
        counting.counts.copies[_line_of_everyrank()] += 1
        if tensor.shape == (len(pipeline_header),):
            return pipeline_header
        row = [counting.num_sorted, *[0] * (tensor.shape[-1] - 1)]
        return row if tensor.dim() == 1 else [row] * len(tensor)

    with mock.patch.object(FakeTensor, "tolist", tolist):
        yield


def _is_one_kernel_per_tensor(args: Any) -> bool:
    """Return whether torch launches one kernel for each tensor of the list `args[0]`.

    It does if the factor `args[1]` is a tensor of a different dtype.
    """
    if len(args) < 2 or not isinstance(args[1], Tensor):
        return False
    if any(args[1].device != tensor.device for tensor in args[0]):
        raise RuntimeError(
            f"a factor on {args[1].device} for a tensor on a different device, which CUDA does not support"
        )
    return any(args[1].dtype != tensor.dtype for tensor in args[0])


def _value_read_from(tensor: Tensor) -> Any:
    """Return the value that the host gets when it reads an element of a fake tensor."""
    if tensor.dtype is torch.bool:
        return False
    return 1.0 if tensor.is_floating_point() else 1


def _line_of_everyrank() -> str:
    """Return the innermost line of everyrank on the stack, for example `parallel/loss.py:53 compute_loss`."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        _, separator, path = frame.f_code.co_filename.rpartition("/src/everyrank/")
        if separator:
            return f"{path}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "autograd, or torch"


# --- a simulated world


class FakeDDP(nn.Module):
    """A replacement for DistributedDataParallel, which needs real memory.

    DistributedDataParallel adds one all-reduce after backward, or the communication hook. Neither waits on CUDA. The
    operators of a hook are counted.
    """

    def __init__(self, module: nn.Module, **_: object) -> None:
        super().__init__()
        self.module = module
        self.hook: Callable[..., object] | None = None
        self.is_syncing = True

    _set_params_and_buffers_to_ignore_for_model = staticmethod(lambda *_: None)

    def register_comm_hook(self, _: object, hook: Callable[..., object]) -> None:
        self.hook = hook

    def forward(self, *values: Any) -> Any:
        output, carrier = self.module(*values)
        if carrier.requires_grad and self.hook is not None and self.is_syncing:
            queue: Any = torch.autograd.Variable._execution_engine.queue_callback
            carrier.register_hook(lambda _: queue(self._call_hook))
        return output, carrier

    def _call_hook(self) -> None:
        """Call the hook with one bucket of all gradients."""
        trained = [parameter for parameter in self.module.parameters() if parameter.grad is not None]
        bucket = mock.Mock()
        bucket.parameters.return_value, bucket.gradients.return_value = trained, [p.grad for p in trained]
        assert self.hook is not None
        self.hook(None, bucket)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.is_syncing = False
        try:
            yield
        finally:
            self.is_syncing = True


class _Event:
    """A CUDA event that is always complete."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def record(self, *_: object) -> None: ...
    def wait(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class _Stream(_Event):
    """A CUDA stream whose work is always complete."""

    stream_id, device_index, device_type = 0, 0, 1

    def wait_event(self, *_: object) -> None: ...
    def wait_stream(self, *_: object) -> None: ...
    def record_event(self, *_: object) -> _Event:
        return _Event()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


@contextlib.contextmanager
def simulated_cuda(num_devices: int = 2) -> Iterator[None]:
    """Patch torch.cuda as on a machine with `num_devices` GPUs, and torch functions that need real memory."""
    stream = _Stream()
    stubs: dict[str, Any] = {
        "device_count": lambda: num_devices,
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
        stack.enter_context(
            mock.patch.object(strategies, "check_state_fits")
        )  # it gathers values, and fake tensors have none
        # A deep copy of a fake tensor would copy its mode and its references to storages. Torch would free these twice.
        stack.enter_context(mock.patch.object(FakeTensorMode, "__deepcopy__", lambda mode, _: mode, create=True))
        yield


@contextlib.contextmanager
def fake_world(rank: int, size: int) -> Iterator[World]:
    """Yield the world of one rank. Its collectives return at once and exchange nothing."""
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
def _models_on_cuda() -> Iterator[None]:
    """Build models on CUDA from the start, because torch cannot move a fake model to another device."""
    original_build = init_model._called

    def build_on_cuda(*args: Any) -> nn.Module:
        with CUDA:
            return original_build(*args)

    def without_fake_mode(function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs on real tensors: the ranks of a mesh are real."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                return function(*args, **kwargs)

        return call

    def stay_on_device(module: nn.Module, *_: object, **__: object) -> nn.Module:
        return module

    with (
        mock.patch.object(init_model, "_called", build_on_cuda),
        mock.patch.object(mesh, "init_device_mesh", without_fake_mode(mesh.init_device_mesh)),
        mock.patch.object(DeviceMesh, "__init__", without_fake_mode(DeviceMesh.__init__)),
        mock.patch.object(nn.Module, "to", stay_on_device),
    ):
        yield


def _batches(workload: Workload, prepared: Prepared) -> list[Batch]:
    """Return the micro-batches of one update on the device, with the shapes of the workload's samples."""
    with unset_fake_temporarily():
        dataset = workload.train_data()
        sample = dataset[0]
    batches: list[Batch] = []
    for data_slice in prepared.data_slices:
        num_samples = len(cut(workload.global_batch // prepared.num_micro_batches, data_slice))

        def zeros_on_cuda(value: Any, batch_size: int = num_samples) -> Any:
            value = torch.as_tensor(value)
            dtype = prepared.dtype if value.is_floating_point() else value.dtype
            return torch.zeros(batch_size, *value.shape, dtype=dtype, device=CUDA)

        inputs, target = map_tensors(sample[0], zeros_on_cuda), zeros_on_cuda(sample[1])
        batches += [Batch(inputs, target, num_samples, 0, workload.global_batch)] * prepared.num_micro_batches
    return batches


def count_update(workload: Workload, layout: str, rank: int, size: int) -> OperatorCounts:
    """Return the counts of the second update of a layout on one rank. The first creates the optimizer state."""
    with fake_world(rank, size) as world, simulated_cuda(max(2, size)), FakeTensorMode(allow_non_fake_inputs=True):
        with _models_on_cuda():
            prepared = prepare(workload, parse_layout(layout), world)
        prepared.parallel.is_first_call_done = True  # the checks of the first update would read values
        if prepared.parallel.tensor_parallel is not None:
            prepared.parallel.tensor_parallel.unseen.clear()
        for _ in range(2):
            batches = _batches(workload, prepared)
            with CountOperators() as counting, _patched_tolist(counting, _header(prepared, batches[0])):
                prepared.step(batches)
                if prepared.trainable.ema is not None:
                    prepared.trainable.ema.update()
    return counting.counts


def _header(prepared: Prepared, batch: Batch) -> list[int]:
    """Return the header that a pipeline stage sends before its output: dtype number, dimensions, shape, padding.

    It is empty without a pipeline. The output has the shape (samples, positions, width).
    """
    if prepared.idle is None:
        return []
    width = next(parameter.shape[-1] for parameter in prepared.model.parameters() if parameter.dim() == 2)
    header = [0, 3, *batch.target.shape[:2], width]
    return header + [0] * (10 - len(header))


@functools.cache
def small_workload(name: str) -> Workload:
    """Return a small built-in workload.

    "text", "average" (with an EMA) and "experts" are a decoder with two blocks. "digits" has batch norm.
    """
    if name == "digits":
        return load(Source("digits", {}))
    experts = 4 if name == "experts" else 0
    shape = DecoderShape(num_blocks=2, num_heads=2, width=16, hidden=32, experts=experts)
    workload = load(Source("text", {"experts": experts, "batch": 16}))
    return dataclasses.replace(workload, model=lambda: Decoder(shape), ema_decay=0.9 if name == "average" else None)


def write_report(cases: Sequence[tuple[str, str, int, int]], path: Path) -> None:
    """Write the counts or the traceback of each case (workload, layout, rank, size) to a JSON file.

    Call it in a separate process, because the device guard stays installed.
    """
    install_guard()
    rows: list[Any] = []
    for name, layout, rank, size in cases:
        try:
            rows.append(vars(count_update(small_workload(name), layout, rank, size)))
        except Exception:
            rows.append({"error": traceback.format_exc()})
    path.write_text(
        json.dumps({"rows": rows, "seen": _counts_of_known_operations(), "two devices": _error_on_two_devices()})
    )


def _error_on_two_devices() -> str:
    """Return the error of an optimizer step for a model on two devices, or "".

    The loss and its number of terms are on the first device.
    """
    workload = small_workload("text")
    with fake_world(0, 1) as world, simulated_cuda(), FakeTensorMode(allow_non_fake_inputs=True):
        model = nn.ParameterList([nn.Parameter(torch.ones(3, device=f"cuda:{index}")) for index in range(2)])
        sgd_workload = dataclasses.replace(
            workload, optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1), schedule=None
        )
        trainable = make_trainable(sgd_workload, parse_layout("single"), model)
        for parameter in trainable.parameters:
            parameter.grad = torch.ones_like(parameter)
        assert world.device == CUDA
        try:
            with CountOperators():  # it raises for tensors on different devices, which fake tensors would allow
                trainable.optimizer_step(torch.ones(2, dtype=torch.float64, device=CUDA))
        except RuntimeError as error:
            return str(error)
    return ""


def _counts_of_known_operations() -> dict[str, list[int]]:
    """Return [waits, copies] of operations for which the correct counts are known."""
    counts_by_operation: dict[str, list[int]] = {}
    with simulated_cuda(), FakeTensorMode(allow_non_fake_inputs=True):
        values, integers = torch.zeros(4, device=CUDA), torch.zeros(4, dtype=torch.int64, device=CUDA)
        calls: dict[str, Callable[[], object]] = {
            "float": lambda: float(values[0]),
            "bool": lambda: bool(values.isfinite().all()),
            "tolist": lambda: integers.tolist(),
            "tensor": lambda: torch.tensor([1.0], device=CUDA),
            "tensor of the host into an element": lambda: operator.setitem(values, 0, torch.tensor(1.0)),
            "cpu": lambda: values.cpu(),
            "to the device": lambda: torch.zeros(4).to(CUDA),
            "to the device, not blocking": lambda: torch.zeros(4).to(CUDA, non_blocking=True),
            "bincount": lambda: integers.bincount(minlength=4),
            "fill": lambda: values.fill_(1.0),
            "full": lambda: torch.full((2,), 1.0, device=CUDA),
        }
        for name, call in calls.items():
            with CountOperators() as counting, _patched_tolist(counting, []):
                call()
            counts_by_operation[name] = [counting.counts.waits.total(), counting.counts.copies.total()]
    return counts_by_operation
