"""Make the dropouts of a model exact: modules by replacing forward, functions by intercepting their calls.

A dropout module keeps its class, its p and its modes, but gets a different forward. Calls of functions (F.dropout,
attention with dropout_p, nn.MultiheadAttention) are intercepted, which costs each torch call a microsecond or two. So
this is done only for models that may call one. A model without dropout is not changed.
"""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from everyrank.errors import UnsupportedLayoutError, WorkloadError, is_user_code
from everyrank.layout import Layout
from everyrank.layout.options import TensorOptions
from everyrank.parallel.dropout.attention import attention_with_dropout, multi_head_attention_with
from everyrank.parallel.dropout.exact import DropoutSite, ExactDropout
from everyrank.parallel.expert import expert_pattern
from everyrank.parallel.mesh import Mesh
from everyrank.parallel.tensor.plan import resolve
from everyrank.workload import Workload

__all__ = ["FunctionalDropout", "apply_exact_dropout", "count_dropouts"]

_MODULES: dict[Any, tuple[bool, bool]] = {  # forward -> (whole channels, alpha dropout)
    nn.Dropout.forward: (False, False),
    nn.Dropout1d.forward: (True, False),
    nn.Dropout2d.forward: (True, False),
    nn.Dropout3d.forward: (True, False),
    nn.AlphaDropout.forward: (False, True),
    nn.FeatureAlphaDropout.forward: (True, True),
}
_FUNCTIONS: dict[Any, tuple[bool, bool]] = {
    F.dropout: (False, False),
    F.dropout1d: (True, False),
    F.dropout2d: (True, False),
    F.dropout3d: (True, False),
    F.alpha_dropout: (False, True),
    F.feature_alpha_dropout: (True, True),
    torch.dropout: (False, False),
    torch.dropout_: (False, False),
}
_NAMES = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "dropout_"}


def count_dropouts(model: nn.Module) -> int:
    """Return the number of modules that use dropout, or may call a dropout function."""
    return sum(
        (type(module).forward in _MODULES and module.p > 0) or _calls_functions(module)  # type: ignore[operator]
        for module in model.modules()
    )


def apply_exact_dropout(
    model: nn.Module,
    workload: Workload,
    layout: Layout,
    mesh: Mesh,
    blocks: Callable[[], Sequence[nn.Module]],
) -> ExactDropout | None:
    """Make the dropouts of `model` exact, in place. Returns the state of exact dropout; None without dropout.

    `blocks` returns the repeated blocks, in which functions are intercepted.

    Raises `WorkloadError` for dropout inside an operator of torch, `UnsupportedLayoutError` for one inside experts.
    """
    modules = list(model.named_modules(remove_duplicate=False))
    if workload.dropout != "exact" or not any(
        type(module).forward in _MODULES or _calls_functions(module) or isinstance(module, nn.RNNBase)
        for _, module in modules
    ):
        return None
    _refuse(model, workload)
    exact = ExactDropout(workload.seed, mesh, workload.sequence_dim, layout.recompute)
    _replace_modules(model, modules, exact)
    exact.is_watching = any(_calls_functions(module) for _, module in modules)
    if exact.is_watching:
        names = {module: name for name, module in model.named_modules()}
        for block in blocks():
            site = DropoutSite(f"functions of {names[block]}", exact.device)
            exact.sites.append(site)
            block.forward = functools.partial(_in_scope, exact, site, block.forward)
    if mesh.size("tensor") > 1 and workload.tensor_plan:
        _follow_plan(model, exact, resolve(model, workload.tensor_plan), layout.read(TensorOptions).sequence)
    return exact


def _refuse(model: nn.Module, workload: Workload) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase) and module.dropout > 0 and module.num_layers > 1:
            raise WorkloadError(
                f"{name or 'the model'}: {type(module).__name__}(dropout={module.dropout:g}) draws inside an operator, "
                "by rank; put nn.Dropout between layers of their own, or set Workload.dropout='torch'"
            )
    if workload.experts is None:
        return
    pattern = expert_pattern(workload.experts)
    for name, module in model.named_modules():
        if pattern.fullmatch(name) and count_dropouts(module):
            raise UnsupportedLayoutError(
                f"{name} has dropout inside: which sample a token is of is not known among experts; drop what goes in "
                "or comes out, or set Workload.dropout='torch'"
            )


def _replace_modules(model: nn.Module, modules: list[tuple[str, nn.Module]], exact: ExactDropout) -> None:
    """Give each path its own module, because a shared module would count its calls over all paths."""
    seen: set[int] = set()
    for name, module in modules:
        kind = _MODULES.get(type(module).forward)
        if kind is None:
            continue
        if id(module) in seen:
            parent, _, last = name.rpartition(".")
            module = copy.copy(module)
            setattr(model.get_submodule(parent), last, module)
        seen.add(id(module))
        site = DropoutSite(name, exact.device)
        exact.sites.append(site)
        exact.modules.append(module)
        module.forward = functools.partial(_drop_module, exact, site, module, *kind)


def _drop_module(
    exact: ExactDropout,
    site: DropoutSite,
    module: Any,
    is_channels: bool,
    is_alpha: bool,
    input: Tensor,  # noqa: A002  (torch's name, by which a model may pass it)
) -> Tensor:
    if not module.training or not module.p:
        return input
    dropped = exact.drop(input, module.p, exact.module_key(site), is_channels, is_alpha)
    return input.copy_(dropped) if module.inplace else dropped


def _in_scope(exact: ExactDropout, site: DropoutSite, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the forward of a block, in which calls of functions are counted from zero."""
    outside = exact.scope, exact.function_calls
    site.num_calls += 1
    exact.scope, exact.function_calls = site, 0
    try:
        return forward(*args, **kwargs)
    finally:
        exact.scope, exact.function_calls = outside


class FunctionalDropout(TorchFunctionMode):
    """Exact dropout in place of torch's functions that draw a mask."""

    def __init__(self, exact: ExactDropout) -> None:
        super().__init__()
        self.exact = exact

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FUNCTIONS:
            return self._dropout(func, *args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is F.multi_head_attention_forward and _drops(*args, **kwargs):
            return multi_head_attention_with(functools.partial(self._dropout, F.dropout), self._attention)(
                *args, **kwargs
            )
        return func(*args, **kwargs)

    def _dropout(
        self,
        func: Any,
        input: Tensor,  # noqa: A002
        p: float = 0.5,
        training: bool | None = None,
        inplace: bool = False,
        train: bool | None = None,  # the name in torch.dropout
    ) -> Tensor:
        default = func not in (F.alpha_dropout, F.feature_alpha_dropout)
        is_training = next((given for given in (training, train) if given is not None), default)
        if not is_training or not p:
            return input
        if not 0 < p <= 1:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        dropped = self.exact.drop(input, p, self.exact.function_key(), *_FUNCTIONS[func])
        return input.copy_(dropped) if inplace or func is torch.dropout_ else dropped

    def _attention(self, *args: Any, **kwargs: Any) -> Tensor:
        p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        if not p:
            return F.scaled_dot_product_attention(*args, **kwargs)
        return attention_with_dropout(self.exact, *args, **kwargs)


_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


def _drops(*args: Any, **kwargs: Any) -> bool:
    given = _MULTI_HEAD.bind(*args, **kwargs).arguments
    return given["dropout_p"] > 0 and given.get("training", True)


def _calls_functions(module: nn.Module) -> bool:
    """Whether a module may call a dropout function: it or its config has a dropout probability, or its code a call.

    For installed packages only the probability counts, because their code also handles a dropout of 0.
    """
    if type(module).forward in _MODULES or isinstance(module, nn.RNNBase):
        return False
    config = getattr(module, "config", None)  # as in transformers
    fields = {**vars(module), **(vars(config) if hasattr(config, "__dict__") else {})}
    if any("drop" in name and isinstance(value, float) and value > 0 for name, value in fields.items()):
        return True
    values = [getattr(value, "func", value) for value in vars(module).values()]  # also of a functools.partial
    if any(inspect.isroutine(value) and value in _FUNCTIONS for value in values):
        return True
    seen: set[Any] = set()
    kinds = [kind for kind in type(module).__mro__ if kind not in (nn.Module, object)]
    functions = [function for kind in kinds for function in _functions_of(kind)]
    return any(name in _NAMES for function in functions for name in _names_in(function, seen))


def _functions_of(kind: type) -> list[Any]:
    """Return the functions in the body of a class that its forward may call: also properties, and decorated ones."""
    values = [value for name, value in vars(kind).items() if name != "__init__"]
    members: list[Any] = [getattr(value, "__func__", getattr(value, "fget", value)) for value in values]
    layers = [layer for member in members if callable(member) for layer in (member, inspect.unwrap(member))]
    return [layer for layer in layers if inspect.isfunction(layer)]


def _names_in(function: Any, seen: set[Any]) -> set[str]:
    """Return the names used by a user's function, by functions inside it, and by those of the user that it calls.

    `self.dropout` is left out: it is a module.
    """
    if function in seen or not is_user_code(function.__code__.co_filename):
        return set()
    seen.add(function)
    codes, names, self_names = [function.__code__], set[str](), function.__code__.co_varnames[:1]
    while codes:
        code = codes.pop()
        names.update(_names_in_code(code, self_names))
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
    known = [function.__globals__.get(name) for name in names]
    modules = [value for value in known if inspect.ismodule(value)]
    others = [*known, *(vars(module).get(name) for module in modules for name in names)]
    return names.union(*(_names_in(other, seen) for other in others if inspect.isfunction(other)))


def _names_in_code(code: types.CodeType, self_names: tuple[str, ...]) -> Iterator[str]:
    """Yield the names that some code loads, without attributes of the variables `self_names`."""
    before: Any = None  # the variable that the last instruction has loaded
    for instruction in dis.get_instructions(code):
        is_attribute = instruction.opname.startswith(("LOAD_ATTR", "LOAD_METHOD"))
        is_of_self = is_attribute and before in self_names
        is_load = instruction.opname.startswith(("LOAD_", "IMPORT_"))
        if is_load and not is_of_self and instruction.argval in code.co_names:
            yield instruction.argval
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        before = None if is_attribute else names[-1]  # an instruction of newer Python loads two variables


def _follow_plan(model: nn.Module, exact: ExactDropout, plan: Mapping[str, str], by_sequence: bool) -> None:
    """Record after each layer of a tensor plan how its output is split over the tensor ranks."""
    between = "sequence" if by_sequence else ""
    behind = {"colwise": "features", "rowwise": between, "vocabulary": between, "sequence": between}

    def set_split(split: str, *_: Any) -> None:
        exact.split = split

    for name, word in plan.items():
        module = model.get_submodule(name)
        if word == "gather":
            module.register_forward_pre_hook(functools.partial(set_split, ""))
        else:
            module.register_forward_hook(functools.partial(set_split, behind.get(word, "")))
