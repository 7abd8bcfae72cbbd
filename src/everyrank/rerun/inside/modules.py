"""Names for parameters and states that are the same in every run: the order in which modules are made."""

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
from everyrank.audit.watch.place import frames
from everyrank.rerun.inside.session import Session

__all__ = ["ModuleNames", "install_module_names"]


class ModuleNames:
    """All modules that live, in the order of their making."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.made_at: dict[int, list[str]] = {}  # by the identity of a module

    def add(self, module: Any) -> None:
        """Remember a module that is being made, and the line that makes it."""
        self.made.append(weakref.ref(module))
        self.made_at[id(module)] = _constructed_at(module)

    def num_batch_norms(self) -> int:
        """The batch norms of all modules that live."""
        alive = {id(inner): inner for _, root in self.roots() for inner in root.modules()}
        return sum(isinstance(module, _BatchNorm) for module in alive.values())

    def lines(self) -> dict[str, list[str]]:
        """The lines that made each module that is in no other, and its wrapper."""
        return {
            name: [line for each in (module, _unwrapped(module)) for line in self.made_at.get(id(each), [])]
            for name, module in self.roots()
        }

    def roots(self) -> list[tuple[str, Any]]:
        """(name, module) of those that are in no other: "Net", "Net (2)". Wrappers are looked through."""
        alive = [module for module in (ref() for ref in self.made) if module is not None]
        alive = [module for module in alive if "_modules" in vars(module)]
        inner = {id(child) for module in alive for child in module.children()}
        roots: list[tuple[str, Any]] = []
        counts: dict[str, int] = {}
        for module in alive:
            if id(module) in inner or any(module is known for _, known in roots):
                continue
            kind = type(_unwrapped(module)).__name__.removeprefix("FSDP")  # fully_shard makes FSDPNet of Net
            counts[kind] = counts.get(kind, 0) + 1
            roots.append((kind if counts[kind] == 1 else f"{kind} ({counts[kind]})", module))
        return roots

    def parameters(self) -> dict[int, str]:
        """The name of each parameter, by its identity."""
        names: dict[int, str] = {}
        for root, module in self.roots():
            for name, parameter in module.named_parameters():
                names.setdefault(id(parameter), f"{root}: {name_in_model(name)}")
        return names

    def copies(self, stepped: set[int]) -> dict[int, str]:
        """The parameters of modules that are not stepped and have the shapes of one that is, by memory address."""
        held = [(root, list(module.named_parameters())) for root, module in self.roots()]
        trained = {_shapes(named) for _, named in held if any(id(p) in stepped for _, p in named)}
        return {
            parameter.data_ptr(): f"{root}: {name_in_model(name)}"
            for root, named in held
            if named and _shapes(named) in trained and not any(id(p) in stepped or p.grad is not None for _, p in named)
            for name, parameter in named
            if not hasattr(parameter, "to_local")
        }

    def unstepped(self, stepped: set[int]) -> list[str]:
        """The parameters of living modules that have a gradient and that no optimizer steps."""
        return [
            f"{root}: {name_in_model(name)}"
            for root, module in self.roots()
            for name, parameter in module.named_parameters()
            if parameter.grad is not None and id(parameter) not in stepped
        ]

    def states(self, stepped: set[int]) -> dict[str, Any]:
        """Buffers of all modules, and parameters that no optimizer steps."""
        named: dict[str, Any] = {}
        for root, module in self.roots():
            held = list(module.parameters())
            if not any(id(parameter) in stepped for parameter in held) and all(p.grad is None for p in held):
                named |= {f"{root}: {name_in_model(name)}": p for name, p in module.named_parameters()}
            named |= {f"{root}: {name_in_model(name)}": buffer for name, buffer in module.named_buffers()}
        return named


def _constructed_at(module: Any) -> list[str]:
    """The user's line that constructs a module, outside of the constructors of its own classes, and its caller."""
    outside = (
        frame for frame in frames() if frame.f_code.co_name != "__init__" or frame.f_locals.get("self") is not module
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
    """Note each module as it is made or copied, and what the outermost one is given while training."""
    modules = ModuleNames()
    init, restore, call = nn.Module.__init__, nn.Module.__setstate__, nn.Module.__call__
    depth = 0

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        modules.add(self)
        init(self, *args, **kwargs)

    @functools.wraps(restore)
    def copied(self: Any, state: Any) -> None:
        modules.add(self)
        restore(self, state)

    @functools.wraps(call)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if depth == 0 and session.compares and session.is_active and _is_training(session, self):
            given = [value.detach() for value in [*args, *kwargs.values()] if _is_plain(value)]
            with session.quiet():
                sums = session.facts.setdefault("input_sums", {}).setdefault(session.update, [])
                sums += [float(value.double().sum()) for value in given if not value.is_complex()]
        if depth == 0 and session.is_active and session.update == 0 and _is_training(session, self):
            given = [value.detach().clone() for value in [*args, *kwargs.values()] if _is_plain(value)]
            if len(session.inputs) < 64 and any(parameter.requires_grad for parameter in self.parameters()):
                session.inputs.append(given)
                texts = [value for value in [*args, *kwargs.values()] if isinstance(value, str)]
                session.facts.setdefault("texts_given", []).append(texts)
        session.has_begun = True
        session.num_calls += 1
        depth += 1
        session.in_model = True
        try:
            return call(self, *args, **kwargs)
        finally:
            depth -= 1
            session.in_model = depth > 0

    nn.Module.__init__, nn.Module.__setstate__, nn.Module.__call__ = made, copied, called
    return modules


def _is_training(session: Session, module: Any) -> bool:
    """Whether this forward is one of the training, not a second one for activation checkpointing."""
    return torch.is_grad_enabled() and module.training and not session.in_backward


def _is_plain(value: Any) -> bool:
    return type(value) is torch.Tensor and value.numel() < 1e7
