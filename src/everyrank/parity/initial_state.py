"""What a custom `parallelize` has changed before the first update: weights, requires_grad, dtypes, buffers, copies.

The model is built once more, and every tensor of it compared to the last bit before and after the call. A training that
differs because a layer came back frozen, or filled again, is then named by that, and not by what follows from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from everyrank.layout import Layout, OwnCode, find_own_code
from everyrank.parallel.full_state import without_advice
from everyrank.parallel.init_model import init_model
from everyrank.parallel.mesh import full_tensor, local_tensor
from everyrank.parallel.own import (
    apply_own_code,
    clean_name,
    gathered_state,
    lying,
    own_device_mesh,
    replicated_axes,
    unwrapped,
)
from everyrank.parallel.parallelize import broadcast_from_rank_0
from everyrank.parity.case import ParityCase
from everyrank.world import World
from everyrank.world.collectives import all_gather, fingerprint

__all__ = ["StateChanges", "changes_by_parallelize", "listed"]


@dataclass
class StateChanges:
    """What `parallelize` has changed; names are those of the model as it was built.

    weights   parameter -> how its values differ from those it was built with
    copies    tensor -> the axis along which ranks hold different copies of it
    frozen    parameters that were trained as the model was built, and are not now; `unfrozen` the other way round
    dtypes    tensor -> (dtype as built, dtype now)
    buffers   buffers with other values than they were built with
    """

    place: str
    weights: dict[str, str] = field(default_factory=dict[str, str])
    copies: dict[str, str] = field(default_factory=dict[str, str])
    frozen: list[str] = field(default_factory=list[str])
    unfrozen: list[str] = field(default_factory=list[str])
    dtypes: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    buffers: list[str] = field(default_factory=list[str])

    def of_weights(self) -> str:
        """Weights that are filled again, or differ between ranks that should hold the same; "" where none do."""
        parts: list[str] = []
        if self.weights:
            names = list(self.weights)
            how = self.weights[names[0]]
            parts.append(
                f"{self.place} leaves {listed(names)} with other values than the model was built with: {how}"
                + (
                    ". If they are to lie in another order, the contract's gather can put them back"
                    if "another order" in how
                    else "; keep the values, or build them in model()"
                )
            )
        for axis in dict.fromkeys(self.copies.values()):
            names = [name for name, along in self.copies.items() if along == axis]
            parts.append(f"the ranks along {axis} start with different copies of {listed(names)}")
        return "; ".join(parts)

    def of_training(self, names: Sequence[str]) -> str:
        """Which of these parameters have another requires_grad than they were built with; "" where none has."""
        frozen, unfrozen = ([one for one in own if one in names] for own in (self.frozen, self.unfrozen))
        parts: list[str] = []
        if frozen:
            parts.append(
                f"{listed(frozen)}: trained as the model was built, and frozen (requires_grad=False) as {self.place} "
                "leaves it"
            )
        if unfrozen:
            parts.append(
                f"{listed(unfrozen)}: frozen as the model was built, and trained (requires_grad=True) as "
                f"{self.place} leaves it: a new nn.Parameter is trained unless it is told not to be"
            )
        return "; ".join(parts)

    def of_others(self) -> str:
        """Dtypes and buffers that were changed; "" where none were."""
        parts: list[str] = []
        if self.dtypes:
            before, after = next(iter(self.dtypes.values()))
            parts.append(f"{listed(list(self.dtypes))}: {before} as built, and {after} as {self.place} leaves it")
        if self.buffers:
            parts.append(f"{self.place} changes the buffer {listed(self.buffers)}")
        return "; ".join(parts)


def listed(names: Sequence[str]) -> str:
    """`norm.weight`, or `norm.weight and 3 more tensors`."""
    if len(names) < 3:
        return " and ".join(names)
    return f"{names[0]} and {len(names) - 1} more tensors"


@dataclass
class _Built:
    """The model before the call: its tensors, which are parameters, and which of those are trained."""

    tensors: dict[str, Tensor]
    trained: dict[str, bool]
    buffers: set[str]


def changes_by_parallelize(case: ParityCase, layout: Layout, world: World) -> StateChanges:
    """Build the model, call `parallelize`, and compare every tensor before and after. A collective."""
    code = find_own_code(layout, world.size)
    model, _ = init_model(case.workload, dataclasses.replace(layout, precision="float64"), world)
    broadcast_from_rank_0(model, world)
    built = _Built(
        {name: tensor.detach().clone() for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)},
        {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)},
        {name for name, _ in model.named_buffers(remove_duplicate=False)},
    )
    mesh = own_device_mesh(code, world)
    wrapped = apply_own_code(code, model, mesh, world)
    shapes = {name: tensor.shape for name, tensor in built.tensors.items()}
    gathered = gathered_state(code, wrapped, mesh, shapes)
    made = unwrapped(wrapped)
    known = lying(made, shapes)
    found = StateChanges(code.place)
    _compare_training(found, built, made, world)
    _compare_values(found, built, known, gathered, world)
    _compare_copies(found, {name: one for name, one in known.items() if name not in gathered}, code, world)
    return found


def _compare_training(found: StateChanges, built: _Built, model: nn.Module, world: World) -> None:
    names = {clean_name(name): name for name in built.trained}
    now = {names.get(clean_name(name), ""): one.requires_grad for name, one in model.named_parameters()}
    flags = [int(now[name]) if name in now else -1 for name in built.trained]
    rows = torch.stack(all_gather(torch.tensor(flags, dtype=torch.int64), world)) if flags else torch.zeros(1, 0)
    for index, (name, was_trained) in enumerate(built.trained.items()):
        column = rows[:, index].tolist()
        if was_trained and 0 in column:
            found.frozen.append(name)
        elif not was_trained and 1 in column:
            found.unfrozen.append(name)


def _compare_values(
    found: StateChanges, built: _Built, known: Mapping[str, Tensor], gathered: Mapping[str, Tensor], world: World
) -> None:
    names = [name for name in built.tensors if name in known or name in gathered]
    flags: list[int] = []
    how: dict[str, str] = {}
    for name in names:
        with without_advice():
            whole: Any = gathered[name] if name in gathered else full_tensor(known[name].detach())
        before = built.tensors[name]
        if whole.dtype != before.dtype:
            found.dtypes[name] = (_text(before.dtype), _text(whole.dtype))
            before = before.to(whole.dtype)
        flags.append(int(not torch.equal(torch.nan_to_num(whole), torch.nan_to_num(before))))
        how[name] = _difference(before, whole) if flags[-1] else ""
    if not flags:
        return
    rows = all_gather(torch.tensor(flags, dtype=torch.int64), world)
    for index, name in enumerate(names):
        ranks = [rank for rank, row in enumerate(rows) if int(row[index])]
        if not ranks:
            continue
        if name in built.buffers:
            found.buffers.append(name)
        else:
            where = "" if len(ranks) == world.size else f" on rank {', '.join(map(str, ranks))}"
            found.weights[name] = (how[name] or "they are not the same") + where


def _difference(before: Tensor, after: Tensor) -> str:
    """How the values of a tensor have changed, as far as that can be told."""
    if not before.is_floating_point():
        return "other values"
    one, other = before.double(), after.double()
    square = float(one.square().sum())
    ratio = float((one * other).sum()) / square if square else 0.0
    if ratio and float((other - ratio * one).abs().max()) <= 1e-9 * abs(ratio) * float(one.abs().max()):
        return f"they are {ratio:.4g} times those"
    for dim in range(min(one.dim(), 2)):
        rows = [tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1) for tensor in (one, other)]
        if torch.equal(rows[0].sort(0).values, rows[1].sort(0).values):
            return f"the same {'rows' if dim == 0 else 'columns'} in another order"
    spread = [float(tensor.std()) for tensor in (one, other)] if one.numel() > 1 else [0.0, 0.0]
    if spread[0] and spread[1]:
        return f"other numbers, whose standard deviation is {spread[1]:.3g} (it was {spread[0]:.3g})"
    return "other numbers"


def _compare_copies(found: StateChanges, known: Mapping[str, Tensor], code: OwnCode, world: World) -> None:
    """Whether ranks that should hold the same part of a tensor do."""
    if not known:
        return
    own = torch.stack([fingerprint(local_tensor(one)) for one in known.values()])
    rows = torch.stack(all_gather(own, world)).reshape(*code.axes.values(), len(known))
    for index, (name, tensor) in enumerate(known.items()):
        for place, axis in enumerate(code.axes):
            column = rows[..., index]
            is_copy = axis in replicated_axes(tensor, code.axes)
            if is_copy and not bool((column == column.narrow(place, 0, 1)).all()) and _is_known(tensor, code):
                found.copies.setdefault(name, axis)


def _is_known(tensor: Tensor, code: OwnCode) -> bool:
    """Whether the mesh of a DTensor has the names of these axes; a plain tensor is whole on every rank."""
    return not isinstance(tensor, DTensor) or set(tensor.device_mesh.mesh_dim_names or ()) <= set(code.axes)


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
