"""Record the inputs and outputs of each module in forward order: values, gradients and autograd nodes.

The same pass is recorded on a rank and in one process. The local tensor of a rank may hold some samples, positions or
features of the whole, perhaps in a different order, so `is_part` searches for it. It may also be one term of a sum that
is all-reduced later. A wrong tensor is not reported if a later tensor that depends on it is correct.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from everyrank.parallel.custom import clean_name
from everyrank.parity.rank_comparison import ROUNDING
from everyrank.parity.rows import leaves

__all__ = [
    "Key",
    "ModuleEvent",
    "Recording",
    "ancestors",
    "equally_sized_parts",
    "is_part",
    "local_part",
    "local_samples",
    "module_label",
]


class Key(NamedTuple):
    """An input or output of a module call.

    name   the module's name, "" for the model itself
    call   the number of earlier calls of this module in the pass
    role   "input" or "output"
    """

    name: str
    call: int
    role: str


@dataclass
class ModuleEvent:
    """The floating-point tensors of the input or output of one module call.

    kind        the module's type
    parent      the output key of the enclosing module call; None for the model itself
    values      this rank's local tensors; None for a DTensor with a pending reduction
    nodes       the autograd node of each tensor; None without one
    gradients   the gradients of these tensors in backward; None until then
    bias        for an output: the module's bias, if it is a plain tensor
    """

    key: Key
    kind: str
    parent: Key | None
    values: list[Tensor | None]
    nodes: list[Any]
    gradients: list[Tensor | None]
    bias: Tensor | None = None


@dataclass
class Recording:
    """The module events of one forward pass, in order.

    samples           the indices of this rank's samples in the batch
    batch_size        the number of samples in the batch
    backward          the keys in the order in which their gradients arrive
    is_on             whether to record; False in backward, where activation checkpointing runs modules again
    keeps_gradients   whether to record the gradients of these tensors, too
    open_calls        the output keys of the calls that have not returned
    last_calls        the index of the latest call of each module
    """

    samples: range
    batch_size: int
    events: dict[Key, ModuleEvent] = field(default_factory=dict[Key, ModuleEvent])
    backward: list[Key] = field(default_factory=list[Key])
    is_on: bool = True
    keeps_gradients: bool = False
    open_calls: list[Key] = field(default_factory=list[Key])
    last_calls: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def has_all_samples(self) -> bool:
        """Whether the rank has all samples of the batch."""
        return len(self.samples) == self.batch_size

    def register_hooks(self, model: nn.Module) -> list[Any]:
        """Register hooks on all modules and return them. If a module is wrapped, only its wrapper gets hooks."""
        hooks: list[Any] = []
        seen: set[str] = set()
        for path, module in model.named_modules():
            name = clean_name(path)
            if name not in seen:
                seen.add(name)
                hooks.append(module.register_forward_pre_hook(self._enter(name), with_kwargs=True))
                hooks.append(module.register_forward_hook(self._leave(name)))
        return hooks

    def _enter(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self.is_on:
                call = self.last_calls[name] = self.last_calls.get(name, -1) + 1
                self._record_event(module, Key(name, call, "input"), (args, kwargs))
                self.open_calls.append(Key(name, call, "output"))

        return enter

    def _leave(self, name: str) -> Any:
        def leave(module: nn.Module, _: Any, output: Any) -> None:
            if self.is_on and self.open_calls and self.open_calls[-1].name == name:
                event = self._record_event(module, self.open_calls.pop(), output)
                bias = getattr(module, "bias", None)
                if isinstance(bias, Tensor) and not isinstance(bias, DTensor):
                    event.bias = bias.detach().clone()

        return leave

    def _record_event(self, module: nn.Module, key: Key, value: Any) -> ModuleEvent:
        tensors = [leaf for leaf in leaves(value) if leaf.is_floating_point()]
        event = ModuleEvent(
            key,
            type(module).__name__.removeprefix("FSDP"),
            self.open_calls[-1] if self.open_calls else None,
            [local_part(tensor) for tensor in tensors],
            [tensor.grad_fn for tensor in tensors],
            [None] * len(tensors),
        )
        self.events[key] = event
        if self.keeps_gradients:
            for index, tensor in enumerate(tensors):
                if tensor.requires_grad:
                    tensor.register_hook(self._keep_gradient(event, index))
        return event

    def _keep_gradient(self, event: ModuleEvent, index: int) -> Any:
        def catch(gradient: Tensor) -> None:
            event.gradients[index] = local_part(gradient)
            if event.key not in self.backward:
                self.backward.append(event.key)

        return catch

    def has_same_calls(self, other: Recording, name: str) -> bool:
        """Whether both recordings have the same number of calls of this module, so that calls can be matched."""
        return self.last_calls.get(name) == other.last_calls.get(name)


def module_label(key: Key, kind: str) -> str:
    """Return `blocks.0.norm (LayerNorm)` or `the model (Decoder)`."""
    return f"{key.name or 'the model'} ({kind})"


def ancestors(nodes: Iterable[Any]) -> set[Any]:
    """Return all autograd nodes that the given nodes depend on. A given node is included only if another needs it."""
    result: set[Any] = set()
    to_visit = [next_node for node in nodes if node is not None for next_node, _ in node.next_functions]
    while to_visit:
        node = to_visit.pop()
        if node is not None and node not in result:
            result.add(node)
            to_visit += [next_node for next_node, _ in node.next_functions]
    return result


def local_part(tensor: Tensor) -> Tensor | None:
    """Return the rank's local tensor; None for a DTensor with a pending reduction."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    if any(placement.is_partial() for placement in tensor.placements):
        return None
    return tensor.to_local().detach().clone()


def is_part(
    local: Sequence[Tensor | None],
    expected: Sequence[Tensor | None],
    samples: range,
    is_whole: bool = False,
    in_order: bool = False,
) -> bool | None:
    """Return whether the local tensors are parts of the one-device tensors for the same samples.

    Tensors that cannot be compared are skipped. Returns None if all are skipped.

    is_whole   the rank has all samples and positions, so even a scalar such as a loss must be equal
    in_order   vectors along the last dimension in a different order do not count as a part
    """
    if len(local) != len(expected):
        return None
    is_decided = False
    for local_value, whole in zip(local, expected, strict=True):
        if (
            local_value is None
            or whole is None
            or local_value.dim() != whole.dim()
            or not (local_value.dim() or is_whole)
        ):
            continue
        whole = local_samples(local_value, whole, samples)
        divides_evenly = not any(
            large % small for small, large in zip(local_value.shape, whole.shape, strict=True) if small
        )
        is_right = divides_evenly and any(
            _is_near(local_value, candidate, whole)
            for _, candidate in equally_sized_parts(whole, local_value.shape)
            if candidate.numel()
        )
        is_right = is_right or (not in_order and _has_vectors_of(local_value, whole))
        if divides_evenly and not is_right:
            return False
        is_decided = is_decided or is_right
    return True if is_decided else None


def local_samples(local: Tensor, whole: Tensor, samples: range) -> Tensor:
    """Return this rank's samples of the one-device tensor, or all of it if `local` is not split by samples."""
    if local.dim() and len(local) == len(samples) < len(whole):
        return whole[samples.start : samples.stop]
    return whole


def _is_near(local: Tensor, expected: Tensor, whole: Tensor) -> bool:
    return float((local - expected).abs().max()) <= ROUNDING * max(float(whole.abs().max()), 1e-300)


def equally_sized_parts(whole: Tensor, shape: torch.Size) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Split `whole` into a grid of parts of this shape. Yield (start indices, part) of each."""
    starts_of_dims = [
        range(0, large, small) if small else range(1) for small, large in zip(shape, whole.shape, strict=True)
    ]
    for starts in itertools.product(*starts_of_dims):
        yield starts, whole[tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))]


def _has_vectors_of(local: Tensor, whole: Tensor) -> bool:
    """Whether each vector along the last dimension of `local` occurs in `whole`, in any order (permuted tokens)."""
    if local.dim() < 2 or local.shape[-1] != whole.shape[-1] or local.shape[-1] < 2 or not local.numel():
        return False
    vectors, whole_vectors = (tensor.reshape(-1, tensor.shape[-1]).double() for tensor in (local, whole))
    tolerance = ROUNDING * max(float(whole_vectors.abs().max()), 1e-300)
    # each vector is looked up by a weighted sum of its elements, then compared with the vectors of the nearest sums
    weights = torch.cos(torch.arange(vectors.shape[-1], dtype=torch.float64, device=vectors.device) * 1.7 + 0.3)
    order = (whole_vectors @ weights).argsort()
    sorted_sums = (whole_vectors @ weights)[order]
    insertion_indices = torch.searchsorted(sorted_sums, vectors @ weights)
    has_match = torch.zeros(len(vectors), dtype=torch.bool, device=vectors.device)
    for shift in (-2, -1, 0, 1):
        candidates = whole_vectors[order[(insertion_indices + shift).clamp(0, len(whole_vectors) - 1)]]
        has_match |= (candidates - vectors).abs().amax(-1) <= tolerance
    return bool(has_match.all())
