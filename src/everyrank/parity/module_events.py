"""Record the inputs and outputs of each module in forward order: values, gradients and autograd nodes.

The same pass is recorded on a rank and in one process. The local tensor of a rank may hold some samples, positions or
features of the whole, perhaps in a different order, so `is_part` searches for it. It may also be one term of a sum that
is all-reduced later. A difference is repaired if a tensor computed from it is equal again.
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
    "equal_parts",
    "is_part",
    "local_part",
    "local_samples",
    "module_label",
]


class Key(NamedTuple):
    """The input or output (`role`) of the `call`-th call of the module `name`; "" is the model itself."""

    name: str
    call: int
    role: str


@dataclass
class ModuleEvent:
    """The floating-point tensors of the input or output of one module call.

    kind        the module's type
    parent      the call that the module is called in; None for the model itself
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
    """The events of one forward pass, in order, for samples `rows` of a batch of `total`; `backward` is the order of
    gradients.

    is_on   whether forward passes are recorded now; blocks that run again in backward are not recorded
    """

    rows: range
    total: int
    events: dict[Key, ModuleEvent] = field(default_factory=dict[Key, ModuleEvent])
    backward: list[Key] = field(default_factory=list[Key])
    is_on: bool = True
    keeps_gradients: bool = False
    stack: list[Key] = field(default_factory=list[Key])
    calls: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def has_all(self) -> bool:
        """Whether the rank has all samples of the batch."""
        return len(self.rows) == self.total

    def watch(self, model: nn.Module) -> list[Any]:
        """Register hooks on every module and return them for removal. A wrapper and its module count as one."""
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
                call = self.calls[name] = self.calls.get(name, -1) + 1
                self._record_event(module, Key(name, call, "input"), (args, kwargs))
                self.stack.append(Key(name, call, "output"))

        return enter

    def _leave(self, name: str) -> Any:
        def leave(module: nn.Module, _: Any, output: Any) -> None:
            if self.is_on and self.stack and self.stack[-1].name == name:
                event = self._record_event(module, self.stack.pop(), output)
                bias = getattr(module, "bias", None)
                if isinstance(bias, Tensor) and not isinstance(bias, DTensor):
                    event.bias = bias.detach().clone()

        return leave

    def _record_event(self, module: nn.Module, key: Key, value: Any) -> ModuleEvent:
        tensors = [leaf for leaf in leaves(value) if leaf.is_floating_point()]
        event = ModuleEvent(
            key,
            type(module).__name__.removeprefix("FSDP"),
            self.stack[-1] if self.stack else None,
            [local_part(tensor) for tensor in tensors],
            [tensor.grad_fn for tensor in tensors],
            [None] * len(tensors),
        )
        if key.role == "output" and self.stack and self.stack[-1] == key:
            event.parent = self.stack[-2] if len(self.stack) > 1 else None
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
        return self.calls.get(name) == other.calls.get(name)


def module_label(key: Key, kind: str) -> str:
    """Return `blocks.0.norm (LayerNorm)` or `the model (Decoder)`."""
    return f"{key.name or 'the model'} ({kind})"


def ancestors(nodes: Iterable[Any]) -> set[Any]:
    """Return all autograd nodes that these nodes are computed from, without the nodes themselves."""
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
    rows: range,
    is_whole: bool = False,
    in_order: bool = False,
) -> bool | None:
    """Whether each local tensor is a part of the one-device tensor for the same samples; None if it cannot be decided.

    is_whole   the rank has all samples and positions, so even a scalar such as a loss must be equal
    in_order   rows in a different order do not count as a part
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
        whole = local_samples(local_value, whole, rows)
        divides_evenly = not any(
            large % small for small, large in zip(local_value.shape, whole.shape, strict=True) if small
        )
        is_right = divides_evenly and any(
            _is_near(local_value, candidate, whole)
            for _, candidate in equal_parts(whole, local_value.shape)
            if candidate.numel()
        )
        is_right = is_right or (not in_order and _has_rows_of(local_value, whole))
        if divides_evenly and not is_right:
            return False
        is_decided = is_decided or is_right
    return True if is_decided else None


def local_samples(local: Tensor, whole: Tensor, rows: range) -> Tensor:
    """Select the samples of the one-device tensor that this rank has."""
    if local.dim() and len(local) == len(rows) < len(whole):
        return whole[rows.start : rows.stop]
    return whole


def _is_near(local: Tensor, expected: Tensor, whole: Tensor) -> bool:
    return float((local - expected).abs().max()) <= ROUNDING * max(float(whole.abs().max()), 1e-300)


def equal_parts(whole: Tensor, shape: torch.Size) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yield all parts of this shape from splitting `whole` equally along its dimensions, and their start indices."""
    starts_of_dims = [
        range(0, large, small) if small else range(1) for small, large in zip(shape, whole.shape, strict=True)
    ]
    for starts in itertools.product(*starts_of_dims):
        yield starts, whole[tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))]


def _has_rows_of(local: Tensor, whole: Tensor) -> bool:
    """Whether each row (last dimension) of `local` occurs in `whole`: positions or tokens in a different order."""
    if local.dim() < 2 or local.shape[-1] != whole.shape[-1] or local.shape[-1] < 2 or not local.numel():
        return False
    local_rows, rows = local.reshape(-1, local.shape[-1]).double(), whole.reshape(-1, whole.shape[-1]).double()
    allowed = ROUNDING * max(float(rows.abs().max()), 1e-300)
    weights = torch.cos(torch.arange(local_rows.shape[-1], dtype=torch.float64, device=local_rows.device) * 1.7 + 0.3)
    order = (rows @ weights).argsort()
    values = (rows @ weights)[order]
    positions = torch.searchsorted(values, local_rows @ weights)
    has_match = torch.zeros(len(local_rows), dtype=torch.bool, device=local_rows.device)
    for shift in (-2, -1, 0, 1):
        candidates = rows[order[(positions + shift).clamp(0, len(rows) - 1)]]
        has_match |= (candidates - local_rows).abs().amax(-1) <= allowed
    return bool(has_match.all())
