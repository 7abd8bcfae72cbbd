"""Records the expressions of the script that construct a loader, call the model, run backward, step, save, draw.

Each record has the exact span of the expression, which Python knows for a running frame (`co_positions`), and the spans
of the calls that led there. `everyrank port` needs both to edit the script.
"""

# The hooks replace parts of torch that are private.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import builtins
import contextlib
import functools
import os
import random
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, IterableDataset

from everyrank.audit.watch.source_location import user_frames
from everyrank.rerun.inside.batches import rows_of_batch
from everyrank.rerun.inside.session import Session
from everyrank.rerun.inside.setup import ScriptValues, watch_setup

__all__ = ["install_expressions"]

_LOSSES = [
    "nll_loss",
    "cross_entropy",
    "mse_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "l1_loss",
    "smooth_l1_loss",
    "kl_div",
    "huber_loss",
    "triplet_margin_loss",
    "ctc_loss",
]
_DRAWS = ("randn", "rand", "randn_like", "rand_like", "randint", "randperm", "normal", "bernoulli", "multinomial")
_MAX_RECORDS = 5000
_TORCH: Any = torch._C  # has no stub for _functorch


def install_expressions(session: Session) -> None:
    """Install all hooks. The records are in `facts["expressions"]`, in the order in which the expressions ran."""
    watcher = _Watcher(session)
    session.facts["expressions"] = watcher.records
    watcher.watch_loaders()
    watcher.watch_modules()
    watcher.watch_losses()
    watcher.watch_optimizers()
    watcher.watch_writes()
    watcher.watch_draws()
    if session.settings["values"]:
        watch_setup(watcher)


class _Watcher:
    """The records, and the state that connects them: the loader of the last batch, the depth of module calls.

    data_draws  number of libraries from which datasets draw random numbers, so far
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.records: list[dict[str, Any]] = []
        self.kept_alive: list[Any] = []  # so that no id is reused
        self.loader = 0
        self.rows = 0
        self.depth = 0
        self.data_draws = 0
        self.outputs: list[Any] = []  # of models since the last backward, if they are not inputs of other models
        self.values = ScriptValues()

    def add_record(self, kind: str, **details: Any) -> dict[str, Any] | None:
        """Add a record of the running expression, and return it; None if no line of the user's code is running."""
        if not self.session.is_active or len(self.records) >= _MAX_RECORDS:
            return None
        with self.session.quiet():
            chain = [
                [os.path.abspath(frame.f_code.co_filename), *_span(frame), frame.f_code.co_name]  # noqa: PTH100
                for frame in user_frames()
            ]
        if not chain:
            return None
        record = {"kind": kind, "chain": chain, **details}
        if self.session.settings["values"]:
            with self.session.quiet():
                self.values.add(record)
        self.records.append(record)
        return record

    def before_call(self, namespace: Any, name: str, add_record: Callable[..., Any]) -> None:
        """Hook a function: call `add_record` with the arguments before each call."""
        original = getattr(namespace, name)

        @functools.wraps(original)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            add_record(*args, **kwargs)
            return original(*args, **kwargs)

        setattr(namespace, name, hooked)

    def watch_loaders(self) -> None:
        """Record each loader that is constructed, and each pass over a loader."""
        loader_class: Any = DataLoader
        init, iterate = loader_class.__init__, loader_class.__iter__

        @functools.wraps(init)
        def init_and_record(loader: Any, *args: Any, **kwargs: Any) -> None:
            init(loader, *args, **kwargs)
            self.kept_alive.append(loader)
            self.add_record(
                "loader",
                id=id(loader),
                is_stream=isinstance(loader.dataset, IterableDataset),
                has_batches=loader.batch_sampler is not None,
                sampler=type(loader.sampler).__name__,
                drop_last=bool(loader.drop_last),
            )

        @functools.wraps(iterate)
        def iterate_and_record(loader: Any) -> Any:
            self.add_record("pass", id=id(loader), trains=torch.is_grad_enabled())
            return _Pass(self, loader, iterate(loader))

        loader_class.__init__, loader_class.__iter__ = init_and_record, iterate_and_record

    def watch_modules(self) -> None:
        """Record calls of modules by the script, and whether a backward reaches their outputs."""
        module_class: Any = torch.nn.Module
        call = module_class.__call__

        @functools.wraps(call)
        def call_and_record(module: Any, *args: Any, **kwargs: Any) -> Any:
            record = None
            if not self.depth and any(p.requires_grad for p in module.parameters()):
                self.kept_alive.append(module)
                record = self.add_record(
                    "forward",
                    id=id(module),
                    module=type(module).__name__,
                    trains=torch.is_grad_enabled() and module.training,
                    reached=False,
                    shapes=[_shape(next(iter(_tensors(each)), torch.empty(0))) for each in args],
                    are_mappings=[isinstance(each, Mapping) for each in args],
                    blocks=_blocks(module),
                    batch_dim=_batch_dim(module),
                    sources=_sources(next(user_frames(), None), _tensors(args)),
                    rows=rows_of_batch([*args, *kwargs.values()]),
                    has_batch_norm=any(isinstance(m, _BatchNorm) for m in module.modules()),
                    has_dropout=any("Dropout" in type(m).__name__ and getattr(m, "p", 0) for m in module.modules())
                    or any(getattr(m, "dropout", 0) for m in module.modules() if isinstance(m, torch.nn.RNNBase)),
                )
            self.depth += 1
            try:
                output = call(module, *args, **kwargs)
            finally:
                self.depth -= 1
            if record is not None:
                outputs = [tensor for tensor in _tensors(output) if tensor.requires_grad and tensor.dim()]
                # a loss may be a module, too: its output is one number, and the outputs of the model stay
                if outputs and any(tensor.requires_grad for tensor in _tensors([*args, *kwargs.values()])):
                    self.outputs = []
                self.outputs += outputs
                for tensor in _tensors(output):
                    if tensor.requires_grad:
                        tensor.register_hook(lambda _gradient, record=record: record.update(reached=True))
            return output

        module_class.__call__ = call_and_record

    def watch_losses(self) -> None:
        """Record losses of torch.nn.functional with their reduction, and each backward."""
        for name in _LOSSES:
            original = getattr(F, name)

            @functools.wraps(original)
            def loss(*args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
                output = _original(*args, **kwargs)
                target = args[1] if len(args) > 1 else kwargs.get("target")
                if torch.is_grad_enabled() and isinstance(target, torch.Tensor):
                    ignored = kwargs.get("ignore_index", -100)
                    is_masked = not target.is_floating_point() and bool((target == ignored).any())
                    weight = args[2] if len(args) > 2 else kwargs.get("weight")
                    has_class_weights = _name in ("cross_entropy", "nll_loss") and not target.is_floating_point()
                    self.add_record(
                        "loss",
                        name=_name,
                        reduction=kwargs.get("reduction", "mean"),
                        ignored=ignored if is_masked else None,
                        is_weighted=has_class_weights and weight is not None,
                        rows=self.rows,
                    )
                return output

            setattr(F, name, loss)
        tensor_class: Any = torch.Tensor
        backward = tensor_class.backward

        @functools.wraps(backward)
        def run_backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            couples = self.couples(tensor)
            self.add_record(
                "backward", loader=self.loader, rows=self.rows, is_scalar=tensor.numel() == 1, couples=couples
            )
            return backward(tensor, *args, **kwargs)

        tensor_class.backward = run_backward
        self.before_call(torch.autograd, "grad", lambda *_args, **_kwargs: self.add_record("autograd.grad"))

    def couples(self, loss: Any) -> bool:
        """Whether the gradient at one half of the outputs' rows depends on the other half, as in contrastive losses."""
        outputs, self.outputs = [each for each in self.outputs if len(each) > 1], []
        if not self.session.is_active or loss.numel() != 1 or not outputs:
            return False
        # some operations have no second derivative
        with self.session.quiet(), contextlib.suppress(RuntimeError, NotImplementedError), torch.enable_grad():
            gradients = torch.autograd.grad(loss, outputs, create_graph=True, allow_unused=True)
            halves = [each[: len(each) // 2] for each in gradients if each is not None and each.requires_grad]
            if not halves:
                return False
            # the weights differ, because a plain sum of the gradients of a softmax is 0
            weights = [(torch.arange(each.numel()) % 7 + 1.0).view_as(each).to(each) for each in halves]
            weighted_sum = torch.stack(
                [(half * weight).sum() for half, weight in zip(halves, weights, strict=True)]
            ).sum()
            second_derivatives = torch.autograd.grad(weighted_sum, outputs, retain_graph=True, allow_unused=True)
            largest = [
                (each.abs().max(), each[len(each) // 2 :].abs().max())
                for each in second_derivatives
                if each is not None
            ]
            return any(float(second_half) > 1e-6 * float(first_half) for first_half, second_half in largest)
        return False

    def watch_optimizers(self) -> None:
        """Record optimizers that are constructed, and each step with the number of parameters without a gradient."""
        optimizer_classes: set[Any] = {each for each in vars(torch.optim).values() if isinstance(each, type)}
        for optimizer_class in optimizer_classes:
            if torch.optim.Optimizer in optimizer_class.__mro__[1:]:
                init: Any = optimizer_class.__init__

                @functools.wraps(init)
                def init_and_record(optimizer: Any, *args: Any, _init: Any = init, **kwargs: Any) -> None:
                    _init(optimizer, *args, **kwargs)
                    self.kept_alive.append(optimizer)
                    self.add_record("optimizer", id=id(optimizer), name=type(optimizer).__name__)

                optimizer_class.__init__ = init_and_record

        def record_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            self.add_record("step", id=id(optimizer), unused=sum(p.grad is None for p in parameters))

        register_optimizer_step_post_hook(record_step)

    def watch_writes(self) -> None:
        """Record files and folders that the script writes."""
        saved: set[str] = set()

        def record_save(obj: Any = None, f: Any = None, *_args: Any, **_kwargs: Any) -> None:  # noqa: ARG001
            self.add_record("write", name="save")
            saved.add(_path(f))

        def record_load(f: Any = None, *_args: Any, **_kwargs: Any) -> None:
            if _path(f) in saved:
                self.add_record("read")

        self.before_call(torch, "save", record_save)
        self.before_call(torch, "load", record_load)
        for name in ("mkdir", "makedirs"):
            self.before_call(
                os,
                name,
                lambda *args, _name=name, **kwargs: (
                    _is_user_path(args[0] if args else kwargs.get("path", kwargs.get("name")))
                    and self.add_record("write", name=_name)
                ),
            )
        original = builtins.open

        @functools.wraps(original)
        def opened(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            if isinstance(mode, str) and set(mode) & set("wax+") and _is_user_path(file):
                self.add_record("write", name="open")
            return original(file, mode, *args, **kwargs)

        builtins.open = opened

    def watch_draws(self) -> None:
        """Record seeds, and random numbers of torch, numpy and random."""
        self.before_call(torch, "manual_seed", lambda *_args, **_kwargs: self.add_record("seed", library="torch"))
        for library, module, names in (
            ("random", random, ("randint", "random", "shuffle", "sample", "choice", "uniform", "gauss")),
            ("numpy", np.random, ("permutation", "rand", "randn", "shuffle", "choice", "randint", "uniform", "normal")),
        ):
            self.before_call(
                module, "seed", lambda *_args, _library=library, **_kwargs: self.add_record("seed", library=_library)
            )
            for name in names:
                self.before_call(module, name, lambda *_args, _library=library, **_kwargs: self.record_draw(_library))
        for name in _DRAWS:
            # a separate generator, such as that of a sampler, has the same seed on all ranks
            self.before_call(torch, name, lambda *_args, **kwargs: kwargs.get("generator") or self.record_draw("torch"))

    def record_draw(self, library: str) -> None:
        self.add_record("draw", library=library, in_loop=bool(self.loader), in_data=False)

    def record_data_draws(self) -> None:
        """Record that a dataset has drawn random numbers, at the line that reads from its loader."""
        libraries = self.session.facts.get("data_draws", [])
        for library in libraries[self.data_draws :]:
            self.add_record("draw", library=library, in_loop=True, in_data=True)
        self.data_draws = len(libraries)


class _Pass:
    """The iterator of a loader, which remembers the loader of the last batch."""

    def __init__(self, watcher: _Watcher, loader: Any, iterator: Any) -> None:
        self._watcher, self._loader, self._iterator = watcher, loader, iterator

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        batch = next(self._iterator)
        self._watcher.record_data_draws()
        self._watcher.loader, self._watcher.rows = id(self._loader), rows_of_batch(batch)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def _blocks(module: Any) -> list[str]:
    """The paths of lists of layers of one class, such as "transformer.h", without lists inside such a layer."""
    paths: list[str] = []
    for path, each in module.named_modules():
        is_list = isinstance(each, torch.nn.ModuleList) and len(each) > 1 and len({type(layer) for layer in each}) == 1
        if is_list and path and not any(path.startswith(f"{outer}.") for outer in paths):
            paths.append(path)
    return paths


def _batch_dim(module: Any) -> int:
    """The dimension of the samples in a model's input: 1 for a recurrent network with batch_first=False, else 0."""
    recurrent = [each for each in module.modules() if isinstance(each, torch.nn.RNNBase)]
    return int(bool(recurrent) and not recurrent[0].batch_first)


def _sources(frame: Any, inputs: list[Any]) -> list[tuple[str, list[int]]]:
    """(name, shape) of the script's tensors of which a model's inputs are views."""
    if frame is None:
        return []
    memory = {each.untyped_storage().data_ptr() for each in inputs if _has_memory(each) and not each.requires_grad}
    return [
        (name, list(value.shape))
        for name, value in {**frame.f_globals, **frame.f_locals}.items()
        if type(value) is torch.Tensor
        and _has_memory(value)
        and not any(value is each for each in inputs)
        and value.untyped_storage().data_ptr() in memory
    ]


def _shape(tensor: Any) -> list[int]:
    """The shape of a tensor, with -1 for the ragged dimension of a nested tensor."""
    return [size if isinstance(size, int) else -1 for size in tensor.shape]


def _has_memory(tensor: Any) -> bool:
    """Whether a tensor has a storage, which a sparse one, and one inside torch.func.grad and vmap, does not."""
    return tensor.layout is torch.strided and not _TORCH._functorch.is_functorch_wrapped_tensor(tensor)


def _path(file: Any) -> str:
    """The absolute path of a path or an open file; "" for other objects."""
    path = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
    return os.path.realpath(path) if isinstance(path, str | os.PathLike) else ""


def _is_user_path(path: Any) -> bool:
    """Whether a path is the user's, and not temporary, like those of torch's compiler."""
    if not isinstance(path, str | os.PathLike) or str(path) == os.devnull:
        return False
    absolute, working_folder = os.path.realpath(path), os.path.realpath(os.getcwd())  # noqa: PTH109
    return absolute.startswith(working_folder + os.sep) or not absolute.startswith(
        os.path.realpath(tempfile.gettempdir()) + os.sep
    )


def _span(frame: Any) -> list[int]:
    """[first line, column in bytes, last line, column] of the expression that a frame is running."""
    line, last_line, column, last_column = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    if None in (line, last_line, column, last_column):
        return [frame.f_lineno, 0, frame.f_lineno, 0]
    return [line, column, last_line, last_column]


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    if hasattr(value, "values") and hasattr(value, "keys") and not isinstance(value, type):
        return [tensor for each in value.values() for tensor in _tensors(each)]
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, list | tuple) else []
