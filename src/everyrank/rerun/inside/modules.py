"""Names of parameters and states that are the same in every run, from the order in which modules are constructed."""

# torch names its base class _BatchNorm.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import functools
import itertools
import os
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from everyrank.audit.watch.flat_shards import WRAPPERS, name_in_model
from everyrank.audit.watch.source_location import user_frames
from everyrank.rerun.inside.session import Session

__all__ = ["ModuleNames", "install_module_names"]

_TORCH: Any = torch._C  # has no stub for _functorch


class ModuleNames:
    """All existing modules, in the order of their construction."""

    def __init__(self) -> None:
        self.modules: list[Any] = []
        self.constructed_at: dict[int, list[str]] = {}  # by the identity of a module

    def add(self, module: Any) -> None:
        """Remember a module that is being constructed, and the line that constructs it."""
        self.modules.append(weakref.ref(module))
        self.constructed_at[id(module)] = _constructed_at(module)

    def num_batch_norms(self) -> int:
        """The number of batch norms in all existing modules."""
        alive = {id(inner): inner for _, root in self.roots() for inner in root.modules()}
        return sum(isinstance(module, _BatchNorm) for module in alive.values())

    def lines(self) -> dict[str, list[str]]:
        """The lines that construct each root module, and its wrapper."""
        return {
            name: [line for each in (module, _unwrapped(module)) for line in self.constructed_at.get(id(each), [])]
            for name, module in self.roots()
        }

    def roots(self) -> list[tuple[str, Any]]:
        """(name, module) of the modules that are in no other module, such as "Net", "Net (2)", without wrappers.

        A module keeps its number when it is wrapped, even if a copy of it was made before.
        """
        alive = [module for module in (ref() for ref in self.modules) if module is not None]
        alive = [module for module in alive if "_modules" in vars(module)]
        children = {id(child) for module in alive for child in module.children()}
        positions = {id(module): position for position, module in reversed(list(enumerate(alive)))}
        outermost = dict.fromkeys(module for module in alive if id(module) not in children)
        roots: list[tuple[str, Any]] = []
        counts: dict[str, int] = {}
        for module in sorted(outermost, key=lambda module: positions.get(id(_unwrapped(module)), len(alive))):
            class_name = type(_unwrapped(module)).__name__.removeprefix("FSDP")  # fully_shard makes FSDPNet of Net
            counts[class_name] = counts.get(class_name, 0) + 1
            roots.append((class_name if counts[class_name] == 1 else f"{class_name} ({counts[class_name]})", module))
        return roots

    def parameters(self) -> dict[int, str]:
        """The name of each parameter, by its id."""
        names: dict[int, str] = {}
        for root, module in self.roots():
            for name, parameter in module.named_parameters():
                names.setdefault(id(parameter), f"{root}: {name_in_model(name)}")
        return names

    def copies(self, stepped: set[int]) -> dict[int, str]:
        """Untrained parameters of modules with the same shapes as a trained module, by memory address."""
        named_parameters = [(root, list(module.named_parameters())) for root, module in self.roots()]
        trained = {_shapes(named) for _, named in named_parameters if any(id(p) in stepped for _, p in named)}
        return {
            parameter.data_ptr(): f"{root}: {name_in_model(name)}"
            for root, named in named_parameters
            if named and _shapes(named) in trained and not any(id(p) in stepped or p.grad is not None for _, p in named)
            for name, parameter in named
            if not hasattr(parameter, "to_local")
        }

    def unstepped(self, stepped: set[int]) -> list[str]:
        """The names of parameters that have a gradient and that no optimizer updates."""
        return [
            f"{root}: {name_in_model(name)}"
            for root, module in self.roots()
            for name, parameter in module.named_parameters()
            if parameter.grad is not None and id(parameter) not in stepped
        ]

    def states(self, stepped: set[int]) -> dict[str, Any]:
        """Buffers of all modules, and parameters of modules that no optimizer updates."""
        named: dict[str, Any] = {}
        for root, module in self.roots():
            parameters = list(module.parameters())
            if not any(id(parameter) in stepped for parameter in parameters) and all(
                p.grad is None for p in parameters
            ):
                named |= {f"{root}: {name_in_model(name)}": p for name, p in module.named_parameters()}
            named |= {f"{root}: {name_in_model(name)}": buffer for name, buffer in module.named_buffers()}
        return named


def _constructed_at(module: Any) -> list[str]:
    """The user's line that constructs a module, outside of the module's constructors, and its caller."""
    outside = (
        frame
        for frame in user_frames()
        if frame.f_code.co_name != "__init__" or frame.f_locals.get("self") is not module
    )
    return [
        f"{os.path.abspath(frame.f_code.co_filename)}:{frame.f_lineno}"  # noqa: PTH100
        for frame in itertools.islice(outside, 2)
    ]


def _shapes(named: list[tuple[str, Any]]) -> tuple[Any, ...]:
    return tuple(parameter.shape for _, parameter in named)


def _unwrapped(module: Any) -> Any:
    while True:
        inner = next((module._modules[name] for name in WRAPPERS if module._modules.get(name) is not None), None)
        if inner is None or module._modules.keys() - WRAPPERS:
            return module
        module = inner


def install_module_names(session: Session) -> ModuleNames:
    """Record each module that is constructed or copied, and the inputs of the outermost module while training."""
    modules = ModuleNames()
    init, restore, call = nn.Module.__init__, nn.Module.__setstate__, nn.Module.__call__
    depth = 0

    @functools.wraps(init)
    def init_and_record(self: Any, *args: Any, **kwargs: Any) -> None:
        modules.add(self)
        init(self, *args, **kwargs)

    @functools.wraps(restore)
    def copy_and_record(self: Any, state: Any) -> None:
        modules.add(self)
        restore(self, state)

    @functools.wraps(call)
    def call_and_record(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if depth == 0 and session.compares and session.is_active and _is_training(session, self):
            inputs = [value.detach() for value in [*args, *kwargs.values()] if _is_plain(value)]
            with session.quiet():
                sums = session.facts.setdefault("input_sums", {}).setdefault(session.update, [])
                sums += [float(value.double().sum()) for value in inputs if not value.is_complex()]
        if depth == 0 and session.is_active and session.update == 0 and _is_training(session, self):
            inputs = [value.detach().clone() for value in [*args, *kwargs.values()] if _is_plain(value)]
            if len(session.inputs) < 64 and any(parameter.requires_grad for parameter in self.parameters()):
                session.inputs.append(inputs)
                texts = [value for value in [*args, *kwargs.values()] if isinstance(value, str)]
                session.facts.setdefault("texts_given", []).append(texts)
        session.has_started = True
        session.num_calls += 1
        depth += 1
        session.in_model = True
        try:
            return call(self, *args, **kwargs)
        finally:
            depth -= 1
            session.in_model = depth > 0

    nn.Module.__init__, nn.Module.__setstate__, nn.Module.__call__ = init_and_record, copy_and_record, call_and_record
    return modules


def _is_training(session: Session, module: Any) -> bool:
    """Whether this is a training forward, and not the second forward of activation checkpointing.

    Forwards inside torch.func.grad and vmap do not count: their tensors have no memory, so they cannot be recorded.
    """
    is_transformed = _TORCH._functorch.peek_interpreter_stack() is not None
    return torch.is_grad_enabled() and module.training and not session.in_backward and not is_transformed


def _is_plain(value: Any) -> bool:
    return type(value) is torch.Tensor and value.numel() < 1e7
