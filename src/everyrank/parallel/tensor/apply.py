"""Split the matrices of a model over ranks (DTensor), as its plan says (plan.py).

Source: Shoeybi et al. 2019 (Megatron-LM).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from everyrank.errors import UnsupportedLayoutError
from everyrank.layout import Layout
from everyrank.layout.options import TensorOptions
from everyrank.parallel.init_model import shared_parameters
from everyrank.parallel.mesh import Mesh, local_tensor
from everyrank.parallel.tensor.plan import check_module, resolve
from everyrank.parallel.tensor.view_check import ViewCheck
from everyrank.workload import Workload
from everyrank.world.collectives import fingerprint

__all__ = ["TensorParallel", "apply_tensor_parallel", "is_split"]

_MAX_CHECKS = 20  # updates in which gradients that were zero so far are checked again


class TensorParallel:
    """What a training step needs for a model with split matrices.

    context                entered around forward, loss and backward
    reduce_partial_grads   called after the last backward of an update: sums partial gradients of parameters that are
                           not split
    """

    def __init__(self, model: nn.Module, mesh: Mesh, plan: Mapping[str, str], checks_views: bool) -> None:
        self.model, self.mesh = model, mesh
        self.loss_is_split = "colwise_loss" in plan.values()
        self.to_sum = _modules_to_sum(model, plan)
        self.unseen = {name for name, _ in model.named_parameters()}
        self.num_checks = 0
        colwise = {name: model.get_submodule(name) for name, word in plan.items() if word == "colwise"}
        self.view_check = ViewCheck(colwise, mesh.size("tensor")) if checks_views else None

    @contextlib.contextmanager
    def context(self) -> Generator[None]:
        """Return torch's context for the loss on split logits, which backward needs too."""
        with contextlib.ExitStack() as stack:
            if self.loss_is_split:
                stack.enter_context(loss_parallel())
            if self.view_check is not None:
                stack.enter_context(self.view_check)
            yield

    @torch.no_grad()
    def reduce_partial_grads(self) -> None:
        """All-reduce partial gradients; in the first update, check that the others are identical.

        Raises `UnsupportedLayoutError` for a parameter that is used on split features without the plan saying so.
        """
        parameters = [parameter for module in self.to_sum for parameter in module.parameters(recurse=False)]
        for parameter in dict.fromkeys(parameters):  # a shared one once
            if parameter.grad is not None:
                dist.all_reduce(local_tensor(parameter.grad), group=self.mesh.group("tensor"))
        for parameter in self.model.parameters():
            gradient = parameter.grad
            if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
                continue
            if gradient.placements != parameter.placements:  # each rank has the gradient of a part of the sequence
                parameter.grad = gradient.redistribute(placements=parameter.placements)
        if self.view_check is not None:
            self.view_check.end()
            self.view_check = None
        if self.unseen and self.num_checks < _MAX_CHECKS:
            self.num_checks += 1
            self._check_identical()

    def _check_identical(self) -> None:
        """Check that parameters that are not split have identical gradients on all ranks of this axis.

        A gradient of zeros is checked again in the next update.
        """
        whole = {
            name: p
            for name, p in self.model.named_parameters()
            if name in self.unseen and not is_split(p) and p.grad is not None
        }
        if not whole:
            return
        local_fingerprints = torch.stack(
            [fingerprint(local_tensor(p.grad)) for p in whole.values() if p.grad is not None]
        )
        rows = [torch.empty_like(local_fingerprints) for _ in range(self.mesh.size("tensor"))]
        dist.all_gather(rows, local_fingerprints, group=self.mesh.group("tensor"))
        for index, name in enumerate(whole):
            if any(row[index] != rows[0][index] for row in rows):
                module = name.rpartition(".")[0]
                raise UnsupportedLayoutError(
                    f"tensor_plan: the gradient of {name} is not the same on all tensor ranks: it is used on split "
                    f"features; add {module!r}: 'replicate_sum' (or, along a split sequence, 'sequence')"
                )
            if rows[0][index] != 0:
                self.unseen.discard(name)
        self.unseen -= {name for name, p in self.model.named_parameters() if is_split(p) or not p.requires_grad}


def apply_tensor_parallel(model: nn.Module, workload: Workload, layout: Layout, mesh: Mesh) -> TensorParallel | None:
    """Split the model in place over the tensor axis. Returns None if the axis has one rank.

    Raises `UnsupportedLayoutError` for a plan that is missing, matches nothing, or splits what does not divide.
    """
    if mesh.size("tensor") == 1:
        return None
    if not workload.tensor_plan:
        raise UnsupportedLayoutError(
            f"workload {workload.name} has no tensor_plan, which says how its matrices are split; "
            "for example {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}"
        )
    plan = resolve(model, workload.tensor_plan)
    degree = mesh.size("tensor")
    ties = shared_parameters(model)
    for name, word in plan.items():
        check_module(name, model.get_submodule(name), word, degree)
    by_sequence = layout.read(TensorOptions).sequence
    dim = workload.sequence_dim if workload.sequence_dim is not None else 1
    devices = mesh.device_mesh("tensor")
    if by_sequence:
        _cut_sequence_evenly(model, degree, dim)
    gathering = [name for name, word in plan.items() if word == "gather"]
    for name, word in plan.items():
        module = model.get_submodule(name)
        # after a gather the input is already whole; otherwise torch would sum its gradient twice
        is_gathered = any(name.startswith(f"{other}.") for other in gathering)
        style = _style(word, by_sequence, dim, is_gathered)
        if word == "rowwise":
            module.register_forward_pre_hook(functools.partial(_check_part, name, degree))
        if style is not None:
            parallelize_module(module, devices, style)
            if layout.compile and word == "vocabulary":
                # its sum may still be in progress, which the compiler does not support
                module.register_forward_hook(lambda _, __, output: output.clone())
        elif word == "gather":
            module.register_forward_pre_hook(_gathering(devices, by_sequence, dim), with_kwargs=True)
    _tie(model, ties, plan)
    return TensorParallel(model, mesh, plan, checks_views=not layout.compile)


def _modules_to_sum(model: nn.Module, plan: Mapping[str, str]) -> list[nn.Module]:
    """Return the modules whose own parameters `replicate_sum` is for: not those inside that have a word themselves."""
    result: list[nn.Module] = []
    for name, module in model.named_modules():
        while name and name not in plan:
            name = name.rpartition(".")[0]
        if plan.get(name) == "replicate_sum":
            result.append(module)
    return result


def _style(word: str, by_sequence: bool, dim: int, is_gathered: bool) -> ParallelStyle | None:
    """Return torch's ParallelStyle for an entry of the plan."""
    between = Shard(dim) if by_sequence else Replicate()  # placement of activations between split modules
    styles: dict[str, Callable[[], ParallelStyle]] = {
        "colwise": lambda: ColwiseParallel(input_layouts=Replicate() if is_gathered else between),
        "rowwise": lambda: RowwiseParallel(output_layouts=between),
        "colwise_gather": lambda: ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
        "colwise_loss": lambda: ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        ),
        "vocabulary": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
    }
    if word == "sequence" and by_sequence:
        return SequenceParallel(sequence_dim=dim)
    return styles[word]() if word in styles else None


def _check_part(name: str, degree: int, module: nn.Module, args: tuple[Any, ...]) -> None:
    """Check that the input of a rowwise layer is already split."""
    whole = module.get_parameter("weight").shape[1]  # a DTensor has the global shape
    if args and not isinstance(args[0], DTensor) and args[0].shape[-1] * degree != whole:
        raise UnsupportedLayoutError(
            f"tensor_plan: {name} is rowwise and takes {whole // degree} of {whole} features on each rank, but gets "
            f"{args[0].shape[-1]}: the layers before it have to be colwise"
        )


def _gathering(devices: DeviceMesh, by_sequence: bool, dim: int) -> Callable[..., Any]:
    """Return a hook that marks a module's first argument as replicated, so that its gradient is all-reduced once."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (_whole(args[0]), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: _whole(kwargs[first])}

    def _whole(value: Tensor) -> Tensor:
        if not isinstance(value, DTensor):
            placement = Shard(dim) if by_sequence else Replicate()
            value = DTensor.from_local(value, devices, [placement], run_check=False)
        return value.redistribute(placements=[Replicate()]) if by_sequence else value

    return hook


def _cut_sequence_evenly(model: nn.Module, degree: int, dim: int) -> None:
    """Refuse a sequence length that does not divide, because torch would assume equal parts."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.dim() > dim and value.shape[dim] % degree:
                raise UnsupportedLayoutError(
                    f"sequence=true: a sequence of {value.shape[dim]} does not divide by tensor={degree}; "
                    "take another length, or leave out sequence"
                )

    model.register_forward_pre_hook(hook, with_kwargs=True)


def _tie(model: nn.Module, ties: list[list[tuple[str, str]]], plan: Mapping[str, str]) -> None:
    """Tie shared weights again after `parallelize_module` has silently untied them."""
    for first, *others in ties:
        shared = model.get_submodule(first[0]).get_parameter(first[1])
        for module_name, name in others:
            other = model.get_submodule(module_name).get_parameter(name)
            if getattr(other, "placements", None) != getattr(shared, "placements", None):
                raise UnsupportedLayoutError(
                    f"tensor_plan: {first[0]} and {module_name} share a weight, but are split differently "
                    f"({plan.get(first[0], 'replicate')} and {plan.get(module_name, 'replicate')}); "
                    "split both along the same dimension: vocabulary and colwise_gather or colwise_loss"
                )
            setattr(model.get_submodule(module_name), name, shared)


def is_split(parameter: Tensor) -> bool:
    """Whether each tensor rank has a different part of this tensor."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(name == "tensor" and not p.is_replicate() for name, p in zip(names, parameter.placements, strict=True))
