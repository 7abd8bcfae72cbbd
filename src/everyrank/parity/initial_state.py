"""Find changes by a custom `parallelize` before the first update: weights, requires_grad, dtypes, buffers, copies.

The model is built once more, and every tensor is compared bit by bit before and after the call. If the function froze
or reinitialised a layer, the report names this cause and not its consequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from everyrank.layout import CustomParallelize, Layout, find_custom_parallelize
from everyrank.parallel.custom import (
    call_parallelize,
    clean_name,
    custom_device_mesh,
    gatherable_tensors,
    gathered_state,
    replicated_axes,
    unwrapped,
)
from everyrank.parallel.full_state import state_tensors, without_advice
from everyrank.parallel.init_model import init_model
from everyrank.parallel.mesh import full_tensor, local_tensor
from everyrank.parallel.parallelize import broadcast_from_rank_0
from everyrank.parity.case import ParityCase
from everyrank.world import World
from everyrank.world.collectives import all_gather, fingerprints_by_rank

__all__ = ["StateChanges", "changes_by_parallelize", "name_list"]


@dataclass
class StateChanges:
    """Changes made by `parallelize`. Names are those of the model as built.

    weights   parameter -> how its values differ from those it was built with
    copies    tensor -> the axis along which ranks hold different copies of it
    frozen    parameters that were trainable in the model as built, and are not now; `unfrozen` is the opposite
    dtypes    tensor -> (dtype as built, dtype now)
    buffers   buffers whose values have changed
    """

    path: str
    weights: dict[str, str] = field(default_factory=dict[str, str])
    copies: dict[str, str] = field(default_factory=dict[str, str])
    frozen: list[str] = field(default_factory=list[str])
    unfrozen: list[str] = field(default_factory=list[str])
    dtypes: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    buffers: list[str] = field(default_factory=list[str])

    def weight_cause(self) -> str:
        """Describe weights that were reinitialised, or differ between ranks that should be replicas; "" for none."""
        causes: list[str] = []
        if self.weights:
            names = list(self.weights)
            change = self.weights[names[0]]
            causes.append(
                f"{self.path} changes the values of {name_list(names)}: {change}"
                + (
                    ". If the new order is intended, let the contract's gather restore the old one"
                    if "different order" in change
                    else "; keep the values, or build them in model()"
                )
            )
        for axis in dict.fromkeys(self.copies.values()):
            names = [name for name, along in self.copies.items() if along == axis]
            causes.append(f"the ranks along {axis} start with different copies of {name_list(names)}")
        return "; ".join(causes)

    def requires_grad_cause(self, names: Sequence[str]) -> str:
        """Describe which of these parameters have a different requires_grad than as built; "" for none."""
        frozen, unfrozen = ([name for name in changed if name in names] for changed in (self.frozen, self.unfrozen))
        parts: list[str] = []
        if frozen:
            parts.append(
                f"{name_list(frozen)}: trainable in the model as built, but frozen (requires_grad=False) after "
                f"{self.path}"
            )
        if unfrozen:
            parts.append(
                f"{name_list(unfrozen)}: frozen in the model as built, but trainable (requires_grad=True) after "
                f"{self.path}: a new nn.Parameter is trainable unless you pass requires_grad=False"
            )
        return "; ".join(parts)

    def dtype_and_buffer_cause(self) -> str:
        """Describe changed dtypes and buffers; "" for none."""
        parts: list[str] = []
        if self.dtypes:
            before, after = next(iter(self.dtypes.values()))
            parts.append(
                f"{name_list(list(self.dtypes))}: {before} in the model as built, but {after} after {self.path}"
            )
        if self.buffers:
            parts.append(f"{self.path} changes the buffer {name_list(self.buffers)}")
        return "; ".join(parts)


def name_list(names: Sequence[str]) -> str:
    """Return `norm.weight`, or `norm.weight and 3 more tensors`."""
    if len(names) < 3:
        return " and ".join(names)
    return f"{names[0]} and {len(names) - 1} more tensors"


@dataclass
class _Built:
    """The model before the call: its tensors, which of them are buffers, and which parameters are trained."""

    tensors: dict[str, Tensor]
    trained: dict[str, bool]
    buffers: set[str]


def changes_by_parallelize(case: ParityCase, layout: Layout, world: World) -> StateChanges:
    """Build the model, call `parallelize`, and compare every tensor before and after. A collective."""
    code = find_custom_parallelize(layout, world.size)
    model, _ = init_model(case.workload, dataclasses.replace(layout, precision="float64"), world)
    broadcast_from_rank_0(model, world)
    built = _Built(
        {name: tensor.detach().clone() for name, tensor in state_tensors(model).items()},
        {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)},
        {name for name, _ in model.named_buffers(remove_duplicate=False)},
    )
    mesh = custom_device_mesh(code, world)
    wrapped = call_parallelize(code, model, mesh, world)
    shapes = {name: tensor.shape for name, tensor in built.tensors.items()}
    gathered = gathered_state(code, wrapped, mesh, shapes)
    parallel_model = unwrapped(wrapped)
    gatherable = gatherable_tensors(parallel_model, shapes)
    changes = StateChanges(code.path)
    _compare_training(changes, built, parallel_model, world)
    _compare_values(changes, built, gatherable, gathered, world)
    _compare_copies(changes, {name: tensor for name, tensor in gatherable.items() if name not in gathered}, code, world)
    return changes


def _compare_training(changes: StateChanges, built: _Built, model: nn.Module, world: World) -> None:
    names = {clean_name(name): name for name in built.trained}
    requires_grad_now = {
        names.get(clean_name(name), ""): parameter.requires_grad for name, parameter in model.named_parameters()
    }
    flags = [int(requires_grad_now[name]) if name in requires_grad_now else -1 for name in built.trained]
    rows = torch.stack(all_gather(torch.tensor(flags, dtype=torch.int64), world)) if flags else torch.zeros(1, 0)
    for index, (name, was_trained) in enumerate(built.trained.items()):
        column = rows[:, index].tolist()
        if was_trained and 0 in column:
            changes.frozen.append(name)
        elif not was_trained and 1 in column:
            changes.unfrozen.append(name)


def _compare_values(
    changes: StateChanges, built: _Built, known: Mapping[str, Tensor], gathered: Mapping[str, Tensor], world: World
) -> None:
    names = [name for name in built.tensors if name in known or name in gathered]
    flags: list[int] = []
    descriptions: dict[str, str] = {}
    for name in names:
        with without_advice():
            value: Any = gathered[name] if name in gathered else full_tensor(known[name].detach())
        value_as_built = built.tensors[name]
        if value.dtype != value_as_built.dtype:
            changes.dtypes[name] = (_text(value_as_built.dtype), _text(value.dtype))
            value_as_built = value_as_built.to(value.dtype)
        flags.append(int(not torch.equal(torch.nan_to_num(value), torch.nan_to_num(value_as_built))))
        descriptions[name] = _difference(value_as_built, value) if flags[-1] else ""
    if not flags:
        return
    rows = all_gather(torch.tensor(flags, dtype=torch.int64), world)
    for index, name in enumerate(names):
        ranks = [rank for rank, row in enumerate(rows) if int(row[index])]
        if not ranks:
            continue
        if name in built.buffers:
            changes.buffers.append(name)
        else:
            on_ranks = "" if len(ranks) == world.size else f" on rank {', '.join(map(str, ranks))}"
            changes.weights[name] = (descriptions[name] or "they differ") + on_ranks


def _difference(before: Tensor, after: Tensor) -> str:
    """Describe how the values of a tensor changed: scaled, permuted or different."""
    if not before.is_floating_point():
        return "different values"
    old, new = before.double(), after.double()
    square = float(old.square().sum())
    ratio = float((old * new).sum()) / square if square else 0.0
    if ratio and float((new - ratio * old).abs().max()) <= 1e-9 * abs(ratio) * float(old.abs().max()):
        return f"they are multiplied by {ratio:.4g}"
    for dim in range(min(old.dim(), 2)):
        rows = [tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1) for tensor in (old, new)]
        if torch.equal(rows[0].sort(0).values, rows[1].sort(0).values):
            return f"the same {'rows' if dim == 0 else 'columns'} in a different order"
    deviations = [float(tensor.std()) for tensor in (old, new)] if old.numel() > 1 else [0.0, 0.0]
    if deviations[0] and deviations[1]:
        return f"different numbers, with a standard deviation of {deviations[1]:.3g} (before: {deviations[0]:.3g})"
    return "different numbers"


def _compare_copies(changes: StateChanges, known: Mapping[str, Tensor], code: CustomParallelize, world: World) -> None:
    """Record tensors whose replicas differ between ranks. A collective."""
    if not known:
        return
    rows = torch.stack(fingerprints_by_rank(map(local_tensor, known.values()), world))
    rows = rows.reshape(*code.axes.values(), len(known))
    for index, (name, tensor) in enumerate(known.items()):
        for dim, axis in enumerate(code.axes):
            column = rows[..., index]
            is_copy = axis in replicated_axes(tensor, code.axes)
            if is_copy and not bool((column == column.narrow(dim, 0, 1)).all()) and _is_known(tensor, code):
                changes.copies.setdefault(name, axis)


def _is_known(tensor: Tensor, code: CustomParallelize) -> bool:
    """Whether the mesh of a DTensor uses the axis names of the contract; a plain tensor is whole on every rank."""
    return not isinstance(tensor, DTensor) or set(tensor.device_mesh.mesh_dim_names or ()) <= set(code.axes)


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
