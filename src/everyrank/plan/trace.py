"""Records every storage, operator and collective of one rank in a training step, on fake tensors.

`StorageTrace` is a dispatch mode around the building of a model and around steps. Nothing is allocated or computed:
the sizes are those that the real run would have. A storage belongs to a category: what it was claimed as, or the phase
in which it was made. FSDP2 frees and allocates gathered parameters by `UntypedStorage.resize_`, which passes the
dispatcher by and is replaced while the mode is entered.

Memory that a kernel takes for itself and gives back before it returns is not seen.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from everyrank.plan.even_counts import EvenCounts

__all__ = ["Operator", "StorageTrace"]

_NO_WORK = {"detach", "view", "_unsafe_view", "empty", "zeros", "alias", "promote_types", "empty_like", "new_empty"}
_NO_KERNELS = {"prim", "profiler"}
_GATHERS = {"embedding", "_embedding_bag", "index_select", "gather", "index"}


@dataclass(frozen=True)
class Operator:
    """An operator or a collective of one rank.

    flops   operations of a product or of attention (the full square, causal or not); 0 for others
    bytes   bytes of its inputs and outputs; for a collective, of its largest tensor
    group   for a collective: the name of its process group
    tensors     number of tensors that it makes or changes (foreach operators)
    is_strided  an input is not contiguous along its last dimension
    is_half     its first input has 16-bit elements
    is_causal   causal attention, of which a GPU computes only half
    """

    name: str
    phase: str
    flops: int
    bytes: int
    group: str = ""
    tensors: int = 1
    is_strided: bool = False
    is_half: bool = False
    is_causal: bool = False


class StorageTrace(TorchDispatchMode):
    """The storages that are alive, their peak, and the operators.

    live        bytes alive now; peak: the largest since `reset`; at_peak: by category
    events      (change in bytes, key, stream) of every change of a storage, in order, for a replay of the allocator
    operators   operators since `reset`
    is_paused   storages and operators are not counted
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "other"
        self.live = self.peak = 0
        self.at_peak: dict[str, int] = {}
        self.operators: list[Operator] = []
        self.events: list[tuple[int, int, int]] = []
        self._streams: dict[Any, int] = {}
        self._keys: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._never: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._sizes: dict[int, int] = {}
        self._categories: dict[int, str] = {}
        self._by_category: Counter[str] = Counter()
        self._next = 0
        self._counts = EvenCounts()
        self._resize: Any = None
        self.is_paused = False

    def __enter__(self) -> StorageTrace:
        """Start to record, including storages that are resized."""
        trace, original = self, torch.UntypedStorage.resize_
        self._resize = original

        def resize_(storage: Any, size: int) -> Any:
            result = original(storage, size)
            if storage in trace._keys:
                trace._change(trace._keys[storage], storage.nbytes())
            else:
                trace._register(storage, "gathered")
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop recording."""
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def claim(self, tensors: Iterable[Tensor], category: str) -> None:
        """Count the storages of `tensors` as `category` from now on."""
        for tensor in tensors:
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # pyright: ignore[reportPrivateUsage]
            storage = local.untyped_storage()
            self._register(storage, category)
            key = self._keys[storage]
            self._by_category[self._categories[key]] -= self._sizes[key]
            self._by_category[category] += self._sizes[key]
            self._categories[key] = category

    def reset(self) -> None:
        """Forget operators and peak. Live storages and events are kept."""
        self.peak, self.at_peak = self.live, dict(self._by_category)
        self.operators.clear()

    def _change(self, key: int, size: int) -> None:
        change = size - self._sizes.get(key, 0)
        if not change:
            return
        self._sizes[key] = size
        self.live += change
        self._by_category[self._categories[key]] += change
        # CPU streams have no effect, but FSDP2 allocates on them as on those of a GPU
        stream = self._streams.setdefault(torch.cpu.current_stream(), len(self._streams))
        self.events.append((change, key, stream))
        if self.live > self.peak:
            self.peak, self.at_peak = self.live, dict(self._by_category)

    def _register(self, storage: Any, category: str) -> None:
        if storage in self._keys or storage in self._never:
            return
        if self.is_paused:
            self._never[storage] = True
            return
        key = self._next
        self._next += 1
        self._keys[storage], self._categories[key], self._sizes[key] = key, category, 0
        self._change(key, storage.nbytes())
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self._change(key, 0)
        self._sizes.pop(key, None)
        self._categories.pop(key, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and record its outputs."""
        kwargs = kwargs or {}
        if any(kind is DTensor for kind in types):
            return NotImplemented  # its operators on local tensors are dispatched here one by one
        if (
            func is torch.ops.aten._local_scalar_dense.default
        ):  # item(): values are unknown, and assumed to be finite and true
            if args[0].dtype.is_floating_point:
                return 2.0  # above 1, because code may count values
            return True if args[0].dtype is torch.bool else self._counts.of_scalar(args[0])
        if func is torch.ops.aten.bincount.default and (
            kinds := kwargs.get("minlength", args[2] if len(args) > 2 else 0)
        ):
            result = args[0].new_zeros(kinds)  # the number of kinds is known
        else:
            result = func(*args, **kwargs)
        self._counts.note(func, args, result)
        inputs = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        outputs = [value for value in tree_flatten(result)[0] if isinstance(value, Tensor)]
        for tensor in outputs:
            self._register(tensor.untyped_storage(), self.phase)
        if not self.is_paused:
            self._note(func, args, kwargs, result, inputs, outputs)
        return result

    def _note(
        self, func: Any, args: Any, kwargs: Any, result: Any, inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        space, name = func._schema.name.split("::")
        if space in ("c10d", "_c10d_functional"):
            size = max((tensor.nbytes for tensor in (*inputs, *outputs)), default=0)
            self.operators.append(Operator(name, self.phase, 0, size, _group_name(tree_flatten((args, kwargs))[0])))
        elif space not in _NO_KERNELS and not func.is_view and name not in _NO_WORK:
            size = sum(tensor.nbytes for tensor in (*inputs, *outputs))
            if name in _GATHERS:  # a few rows of the first input
                size = 2 * sum(tensor.nbytes for tensor in outputs)
            count = max(len(args[0]), 1) if name.startswith("_foreach") and isinstance(args[0], list | tuple) else 1
            strided = any(tensor.dim() and tensor.shape[-1] > 1 < tensor.stride(-1) for tensor in inputs)
            flops = _flops(func, args, kwargs, result)
            half = bool(inputs) and inputs[0].element_size() == 2
            causal = "scaled_dot" in name and _is_causal(func, args, kwargs)
            self.operators.append(Operator(name, self.phase, flops, size, "", count, strided, half, causal))


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the operations of a product, a convolution or attention; 0 for others."""
    packet, name = func._overloadpacket, func._schema.name
    if name == "aten::_scaled_dot_product_flash_attention_for_cpu":
        return sdpa_flop_count(*(tensor.shape for tensor in args[:3]))
    if name == "aten::_scaled_dot_product_flash_attention_for_cpu_backward":
        return sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4]))
    if name in ("aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward"):  # an LSTM: each step takes both matrices
        steps = args[0].numel() // args[0].shape[-1]
        return (4 if name.endswith("backward") else 2) * steps * (args[1].numel() + args[2].numel())
    return int(flop_registry[packet](*args, **kwargs, out_val=result)) if packet in flop_registry else 0


def _is_causal(func: Any, args: Any, kwargs: Any) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    index = names.index("is_causal") if "is_causal" in names else len(args)
    return bool(kwargs.get("is_causal", args[index] if index < len(args) else False))


def _group_name(values: list[Any]) -> str:
    """Return the name of the process group among the arguments of a collective."""
    for value in values:
        if isinstance(value, torch.ScriptObject):
            with contextlib.suppress(RuntimeError):  # a reduction is also a ScriptObject
                return dist.ProcessGroup.unbox(value).group_name
    names = [value for value in values if isinstance(value, str)]
    return names[-1] if names else "world"
