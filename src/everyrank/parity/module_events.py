"""What goes into each module and comes out of it, in the order of a forward pass: values, gradients, and the graph.

The same pass is recorded on a rank and in one process. What a rank has of a tensor may be some of the samples, of the
positions or of the features, also in another order: a part of the whole is looked for. What it has may also be a part
of a sum that a function adds up later. Such a difference is repaired: a tensor computed from it is right again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from everyrank.parallel.own import clean_name
from everyrank.parity.by_rank import ROUNDING
from everyrank.parity.rows import leaves

__all__ = ["Key", "ModuleEvent", "Recording", "ancestors", "is_part", "local_part", "of_rows", "parts_of", "shown"]


class Key(NamedTuple):
    """The input or output (`role`) of the `call`-th call of the module `name`; "" is the model itself."""

    name: str
    call: int
    role: str


@dataclass
class ModuleEvent:
    """The floating-point tensors that a module gets, or gives, in one call.

    kind        the module's type
    parent      the call that the module is called in; None for the model itself
    values      this rank's own parts; None for a DTensor that waits to be added up
    nodes       where each stands in autograd's graph; None outside of it
    gradients   the gradients that reach them in backward, in place of None once they have come
    bias        of an output: the module's bias, where it is a plain tensor
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
    """The events of one forward pass, in order, for the `rows` of a batch of `total`; in backward, those that got one.

    is_on   whether forward passes are recorded now: blocks that run again in backward are not
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
        """Whether these are all samples of the batch."""
        return len(self.rows) == self.total

    def watch(self, model: nn.Module) -> list[Any]:
        """Hooks on every module; to be removed afterwards. Of a module and its wrappers only the outermost."""
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
                self._note(module, Key(name, call, "input"), (args, kwargs))
                self.stack.append(Key(name, call, "output"))

        return enter

    def _leave(self, name: str) -> Any:
        def leave(module: nn.Module, _: Any, output: Any) -> None:
            if self.is_on and self.stack and self.stack[-1].name == name:
                event = self._note(module, self.stack.pop(), output)
                bias = getattr(module, "bias", None)
                if isinstance(bias, Tensor) and not isinstance(bias, DTensor):
                    event.bias = bias.detach().clone()

        return leave

    def _note(self, module: nn.Module, key: Key, value: Any) -> ModuleEvent:
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
                    tensor.register_hook(self._catch(event, index))
        return event

    def _catch(self, event: ModuleEvent, index: int) -> Any:
        def catch(gradient: Tensor) -> None:
            event.gradients[index] = local_part(gradient)
            if event.key not in self.backward:
                self.backward.append(event.key)

        return catch

    def has_same_calls(self, other: Recording, name: str) -> bool:
        """Whether both have called this module as often: else nothing tells which call is which."""
        return self.calls.get(name) == other.calls.get(name)


def shown(key: Key, kind: str) -> str:
    """`blocks.0.norm (LayerNorm)`, `the model (Decoder)`."""
    return f"{key.name or 'the model'} ({kind})"


def ancestors(nodes: Iterable[Any]) -> set[Any]:
    """Everything that these nodes of autograd's graph are computed from; they themselves are not among it."""
    found: set[Any] = set()
    left = [following for node in nodes if node is not None for following, _ in node.next_functions]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [following for following, _ in node.next_functions]
    return found


def local_part(tensor: Tensor) -> Tensor | None:
    """The rank's own part; None of one that waits to be added up over ranks."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    if any(placement.is_partial() for placement in tensor.placements):
        return None
    return tensor.to_local().detach().clone()


def is_part(
    own: Sequence[Tensor | None],
    expected: Sequence[Tensor | None],
    rows: range,
    is_whole: bool = False,
    in_order: bool = False,
) -> bool | None:
    """Whether each tensor is a part of what one device has for the same samples; None where that cannot be told.

    is_whole   these are all samples, at all positions: a single number, a loss, is the same
    in_order   rows in another order are no part
    """
    if len(own) != len(expected):
        return None
    known = False
    for part, whole in zip(own, expected, strict=True):
        if part is None or whole is None or part.dim() != whole.dim() or not (part.dim() or is_whole):
            continue
        whole = of_rows(part, whole, rows)
        is_cut = not any(large % small for small, large in zip(part.shape, whole.shape, strict=True) if small)
        is_right = is_cut and any(_is_near(part, one, whole) for _, one in parts_of(whole, part.shape) if one.numel())
        is_right = is_right or (not in_order and _has_rows_of(part, whole))
        if is_cut and not is_right:
            return False
        known = known or is_right
    return True if known else None


def of_rows(part: Tensor, whole: Tensor, rows: range) -> Tensor:
    """The samples of one device's tensor that this rank has."""
    if part.dim() and len(part) == len(rows) < len(whole):
        return whole[rows.start : rows.stop]
    return whole


def _is_near(part: Tensor, one: Tensor, whole: Tensor) -> bool:
    return float((part - one).abs().max()) <= ROUNDING * max(float(whole.abs().max()), 1e-300)


def parts_of(whole: Tensor, shape: torch.Size) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """All parts of this shape that equal cuts along its dimensions give, and where each begins."""
    places = [range(0, large, small) if small else range(1) for small, large in zip(shape, whole.shape, strict=True)]
    for starts in itertools.product(*places):
        yield starts, whole[tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))]


def _has_rows_of(part: Tensor, whole: Tensor) -> bool:
    """Whether each row (along the last dimension) of `part` is one of `whole`: positions or tokens in another order."""
    if part.dim() < 2 or part.shape[-1] != whole.shape[-1] or part.shape[-1] < 2 or not part.numel():
        return False
    own, rows = part.reshape(-1, part.shape[-1]).double(), whole.reshape(-1, whole.shape[-1]).double()
    allowed = ROUNDING * max(float(rows.abs().max()), 1e-300)
    weights = torch.cos(torch.arange(own.shape[-1], dtype=torch.float64, device=own.device) * 1.7 + 0.3)
    order = (rows @ weights).argsort()
    values = (rows @ weights)[order]
    found = torch.searchsorted(values, own @ weights)
    is_found = torch.zeros(len(own), dtype=torch.bool, device=own.device)
    for shift in (-2, -1, 0, 1):
        candidates = rows[order[(found + shift).clamp(0, len(rows) - 1)]]
        is_found |= (candidates - own).abs().amax(-1) <= allowed
    return bool(is_found.all())
