"""Runs a script that uses CUDA on the CPU with gloo if there is no GPU, without changing the script.

`torch.cuda.is_available()` is true only in the user's own code, so that libraries use the CPU. Only devices, the
backend, the AVG reduction (which gloo lacks), and the devices of autocast and the gradient scaler change. The report
mentions it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import time
import types
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from everyrank.audit.watch.source_location import caller_is_user_code
from everyrank.audit.watch.sync_batch_norm import install_sync_batch_norm

__all__ = ["PretendCuda"]


def _on_cpu(device: Any, numbers: bool = False) -> Any:
    """The CPU for a CUDA device; other devices unchanged. With `numbers`, an int is a CUDA device."""
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    if isinstance(device, str) and device.startswith("cuda"):
        return "cpu"
    if numbers and type(device) is int:
        return "cpu"
    return device


_UNCHANGED = {torch.Tensor.cuda, torch.Tensor.pin_memory}  # they return their tensor
_DO_NOTHING = (
    *("set_device", "set_stream", "synchronize", "init", "ipc_collect", "check_error", "set_sync_debug_mode"),
    *(
        "manual_seed",
        "manual_seed_all",
        "seed",
        "seed_all",
        "set_rng_state_all",
    ),  # the CPU's generator has its own seed
    *("empty_cache", "set_per_process_memory_fraction", "reset_peak_memory_stats", "reset_accumulated_memory_stats"),
    *("reset_max_memory_allocated", "reset_max_memory_cached"),
)
_ZEROS = (
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "device_memory_used"),
    *("utilization", "memory_usage", "temperature", "power_draw", "clock_rate"),
    *("initial_seed", "get_sync_debug_mode", "current_blas_handle"),
)
_MEMORY_RECORDINGS = ("_record_memory_history", "_dump_snapshot")


class PretendCuda:
    """Pretends that the CPU is `num_devices` CUDA devices."""

    def __init__(self, num_devices: int) -> None:
        self.num_devices = num_devices

    def rewrite(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """(result, args, kwargs) of a torch function: a result that replaces the call, or None with new arguments."""
        if func in _UNCHANGED:
            return args[0], args, kwargs
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _on_cpu(kwargs["device"], numbers=True)}
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], _on_cpu(args[1], numbers=True), *args[2:])
        elif func is torch.Tensor.type and len(args) > 1 and isinstance(args[1], str):
            args = (args[0], args[1].replace("torch.cuda.", "torch."), *args[2:])
        return None, args, kwargs

    def install(self) -> None:
        """Patch torch in this process."""
        self._devices()
        self._tensor_types()
        self._meshes()
        self._groups()
        self._modules()
        self._precision()
        install_sync_batch_norm()

    def _devices(self) -> None:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        cuda, accelerator = torch.cuda, torch.accelerator
        for module, name, answer in (
            (cuda, "is_available", True),
            (cuda, "device_count", self.num_devices),
            (cuda, "is_bf16_supported", True),
            (accelerator, "is_available", True),
            (accelerator, "device_count", self.num_devices),
            (accelerator, "current_accelerator", torch.device("cuda")),
        ):
            setattr(module, name, _for_user(answer, getattr(module, name)))
        answers = {**dict.fromkeys(_DO_NOTHING), **dict.fromkeys(_ZEROS, 0)}
        answers |= {
            "get_device_properties": _PROPERTIES,
            "get_device_capability": (8, 0),
            "mem_get_info": (2**36, 2**36),
            "memory_stats": defaultdict(int),
            "memory_summary": "",
            "memory_snapshot": [],
            "cudart": _Runtime(),
        }
        answers |= {"current_device": local_rank, "get_device_name": "the CPU", "is_initialized": True}
        answers |= {"can_device_access_peer": True, "is_current_stream_capturing": False}
        answers |= dict.fromkeys(("current_stream", "default_stream"), _Stream())
        for name, value in answers.items():
            setattr(cuda, name, _constant(value))
        for name in ("set_device_index", "set_device_idx", "synchronize"):
            setattr(accelerator, name, _constant(None))
        for name in ("mark", "range_push", "range_pop", "range_start", "range_end"):
            setattr(cuda.nvtx, name, _constant(0))
        for module, names in ((cuda.profiler, ("start", "stop")), (cuda.memory, _MEMORY_RECORDINGS)):
            for name in names:
                setattr(module, name, _constant(None))
        replaced = {"Event": _Event, "Stream": _Stream, "get_rng_state": _rng_state, "set_rng_state": _set_rng_state}
        for name, value in {**replaced, **dict.fromkeys(("stream", "device", "device_of"), _Block)}.items():
            setattr(cuda, name, value)
        torch.Generator = _Generator
        torch.Tensor.record_stream = _constant(None)
        set_default_device = torch.set_default_device

        @functools.wraps(set_default_device)
        def set_default_to_cpu(device: Any) -> None:
            set_default_device(_on_cpu(device, numbers=True))

        torch.set_default_device = set_default_to_cpu

    def _tensor_types(self) -> None:
        """Define `torch.cuda.FloatTensor` and similar names, which old scripts use."""
        for name in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool"):
            setattr(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))

    def _meshes(self) -> None:
        """Put device meshes of the script and of fully_shard on the CPU."""
        from torch.distributed.device_mesh import DeviceMesh

        init = DeviceMesh.__init__

        @functools.wraps(init)
        def on_cpu(self: Any, device_type: Any, *args: Any, **kwargs: Any) -> None:
            init(self, _on_cpu(device_type), *args, **kwargs)

        DeviceMesh.__init__ = on_cpu

    def _groups(self) -> None:
        """Use gloo instead of nccl in process groups, and no devices in DistributedDataParallel."""
        c10d: Any = dist.distributed_c10d
        init, wrap = c10d.init_process_group, DistributedDataParallel.__init__

        @functools.wraps(init)
        def init_on_gloo(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
            kwargs.pop("device_id", None)
            return init("gloo" if backend is None or "nccl" in str(backend) else backend, *args, **kwargs)

        @functools.wraps(wrap)
        def wrap_on_cpu(
            self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
        ) -> None:
            del device_ids, output_device
            wrap(self, module, None, None, *args, **kwargs)

        c10d.init_process_group = dist.init_process_group = init_on_gloo
        DistributedDataParallel.__init__ = wrap_on_cpu
        _groups_of_gloo(c10d)
        _average_on_gloo(c10d)

    def _modules(self) -> None:
        module_to, load = torch.nn.Module.to, torch.load

        @functools.wraps(module_to)
        def to(self: Any, *args: Any, **kwargs: Any) -> Any:
            if args:
                args = (_on_cpu(args[0], numbers=True), *args[1:])
            if "device" in kwargs:
                kwargs["device"] = _on_cpu(kwargs["device"], numbers=True)
            return module_to(self, *args, **kwargs)

        @functools.wraps(load)
        def load_on_cpu(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            # without a location, the file of a run on a GPU would be loaded there
            location = "cpu" if map_location is None or isinstance(map_location, dict) else _on_cpu(map_location)
            return load(f, location, *args, **kwargs)

        torch.nn.Module.to = to
        torch.nn.Module.cuda = _stays
        torch.UntypedStorage.cuda = torch.TypedStorage.cuda = _stays  # in a function as map_location
        torch.load = load_on_cpu

    def _precision(self) -> None:
        autocast, scaler = torch.amp.autocast_mode.autocast, torch.amp.GradScaler
        autocast_init, scaler_init = autocast.__init__, scaler.__init__

        @functools.wraps(autocast_init)
        def init_on_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
            autocast_init(self, _on_cpu(device_type), *args, **kwargs)

        @functools.wraps(scaler_init)
        def scale(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
            scaler_init(self, _on_cpu(device), *args, **kwargs)

        autocast.__init__, scaler.__init__ = init_on_cpu, scale


class _GeneratorType(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _REAL_GENERATOR)


_REAL_GENERATOR = torch.Generator


class _Generator(metaclass=_GeneratorType):
    """Returns a CPU generator for `torch.Generator(device="cuda")`."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _REAL_GENERATOR(_on_cpu(device, numbers=True))


class _Stream:
    """A CUDA stream whose work is always finished."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.cuda_stream = self.stream_id = self.device_index = 0

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else _Event()

    def _nothing(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    synchronize = wait_stream = wait_event = wait = _nothing


class _Event(_Stream):
    """A CUDA event that records the time of the CPU."""

    seconds = 0.0

    def record(self, *_args: Any) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, other: Any) -> float:
        return (other.seconds - self.seconds) * 1e3


class _Block(contextlib.nullcontext[None]):
    """Context manager without effect, for `torch.cuda.stream(...)` and `torch.cuda.device(...)`."""


class _Runtime:
    """The result of `torch.cuda.cudart()`, whose functions do nothing and succeed."""

    def __getattr__(self, name: str) -> Any:
        return _constant(0)


_PROPERTIES = types.SimpleNamespace(
    name="the CPU",
    total_memory=2**36,
    major=8,
    minor=0,
    multi_processor_count=1,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    L2_cache_size=2**22,
    shared_memory_per_block=49152,
    shared_memory_per_multiprocessor=102400,
    is_integrated=0,
    is_multi_gpu_board=0,
)


def _rng_state(*_args: Any) -> Any:
    return torch.get_rng_state()


def _set_rng_state(*_args: Any) -> None:
    pass


def _stays(self: Any, *_args: Any, **_kwargs: Any) -> Any:
    return self


def _for_user(answer_for_user: Any, function: Any) -> Any:
    """A function that returns `answer_for_user` only to the user's own code, and is unchanged for other callers."""

    @functools.wraps(function)
    def answer(*args: Any, **kwargs: Any) -> Any:
        return answer_for_user if caller_is_user_code() else function(*args, **kwargs)

    return answer


def _constant(value: Any) -> Any:
    """A new function that returns this value. Dynamo allows only one torch name for each function."""

    def answer(*_args: Any, **_kwargs: Any) -> Any:
        return value

    return answer


def _groups_of_gloo(c10d: Any) -> None:
    """Use gloo, without a device, for process groups that the script creates with nccl."""
    new_group = c10d.new_group
    signature = inspect.signature(new_group)

    @functools.wraps(new_group)
    def made(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments.pop("device_id", None)
        if "nccl" in str(bound.arguments.get("backend")):
            bound.arguments["backend"] = "gloo"
        return new_group(*bound.args, **bound.kwargs)

    c10d.new_group = dist.new_group = made


def _average_on_gloo(c10d: Any) -> None:
    """Replace AVG, which gloo lacks, by a sum that is divided by the number of ranks."""
    for name, output in _AVERAGED.items():
        function = getattr(c10d, name)
        setattr(c10d, name, _as_sum(function, output))
        setattr(dist, name, getattr(c10d, name))


_AVERAGED = {"all_reduce": "tensor", "reduce": "tensor", "reduce_scatter": "output", "reduce_scatter_tensor": "output"}


def _has_result(arguments: dict[str, Any]) -> bool:
    """Whether this rank gets the result of a collective, as all ranks do except in `reduce`."""
    if arguments.get("group_dst") is not None:
        return dist.get_rank(arguments.get("group")) == arguments["group_dst"]
    return arguments.get("dst") in (None, dist.get_rank())


def _as_sum(function: Any, output: str) -> Any:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def averaged(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        if bound.arguments.get("op") != dist.ReduceOp.AVG or bound.arguments.get("async_op"):
            return function(*args, **kwargs)
        bound.arguments["op"] = dist.ReduceOp.SUM
        function(*bound.args, **bound.kwargs)
        if _has_result(bound.arguments):
            bound.arguments[output].div_(dist.get_world_size(bound.arguments.get("group")))
        return None

    return averaged
