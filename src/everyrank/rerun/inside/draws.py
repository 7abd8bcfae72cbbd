"""Records and imposes random numbers, and records the tensors that each line computes in the first update."""

# sys._getframe is private.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from everyrank.audit.watch.place import chain, is_own_file, where
from everyrank.rerun.inside.reads import RowReads
from everyrank.rerun.inside.session import Session

__all__ = ["install_draws"]

_NEW = {
    *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "multinomial"),
    *("poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "randperm", "native_dropout"),
}
_IN_PLACE = {"normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_", "geometric_", "cauchy_"}
_ROWS = {
    "rand": "uniform",
    "randn": "normal",
    "rand_like": "uniform",
    "randn_like": "normal",
    "normal_": "normal",
    "uniform_": "uniform",
    "bernoulli_": "bernoulli",
    "bernoulli": "bernoulli",
    "randint": "integers",
    "randint_like": "integers",
}
_MOST_ELEMENTS = 200_000
_MOST_VALUES = 4000
_MADE = {"arange", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "eye", "scalar_tensor"}
_FEW = 4  # numbers: not one for each sample
_VIEWS = {
    *("detach", "clone", "alias", "view", "_unsafe_view", "t", "transpose", "lift_fresh", "_to_copy", "expand"),
    *("split", "split_with_sizes", "unbind", "narrow", "slice", "select", "as_strided"),
}


def install_draws(session: Session, pretend: Any) -> contextlib.ExitStack:
    """Enter the modes in which the script runs, and return them as one context."""
    stack = contextlib.ExitStack()
    if pretend is not None:
        stack.enter_context(_OnCpu(pretend))
    stack.enter_context(_Draws(session))
    if session.compares:
        stack.enter_context(RowReads(session))
    return stack


class _OnCpu(TorchFunctionMode):
    """Lets CUDA calls run on the CPU."""

    def __init__(self, pretend: Any) -> None:
        super().__init__()
        self.pretend = pretend

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, args, kwargs = self.pretend.rewrite(func, args, kwargs or {})
        return result if result is not None else func(*args, **kwargs)


class _Draws(TorchDispatchMode):
    """Records or replaces random numbers, and records values, at every operation of torch."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.recorded = [{tuple(key): value for key, value in each["draws"]} for each in session.imposed]
        self.differing = _differing_lines(self.recorded)
        self.num_row_draws = 0
        self.sent_tensors: Any = WeakTensorKeyDictionary()  # given to a collective
        self.queues: dict[tuple[str, str], list[Any]] = {}  # recorded rows of a line, and how many of them were used

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        session = self.session
        if (
            not session.is_active
            or session.settings["only_rates"]
            or (session.settings["order"] and not session.settings["rows"])
        ):
            return out
        name = func._schema.name.rpartition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional"):
            session.num_calls += 1
            self.note_sending_line()
            for tensor in _tensors(args):
                self.sent_tensors[tensor] = True
        if name == "_local_scalar_dense" and len(session.items) < _MOST_VALUES:
            is_local = args[0].requires_grad and args[0] not in self.sent_tensors
            session.items.append([float(out), where(), session.update, is_local])
        if session.copies and name.endswith("_"):
            with session.quiet():
                self.note_averaged_copy(args[0])
        if session.in_source and name not in _NEW and name not in _IN_PLACE:
            return out
        if name in _NEW or name in _IN_PLACE:
            with session.quiet():
                return self.record_or_replace(name, args, kwargs or {}, out)
        if session.settings["order"]:
            return out
        if (
            session.has_begun
            and session.update == 0
            and not session.in_backward
            and name not in _VIEWS
            and "empty" not in name
        ):
            with session.quiet():
                self.record_values(name, out)
        return out

    def note_sending_line(self) -> None:
        """Note the lines at which the script itself sends something in the first update, before its backward."""
        session = self.session
        if session.has_begun and session.update == 0 and not session.num_backwards and not session.in_backward:
            lines, place = session.facts.setdefault("sent_at", []), _sending_line()
            if place and place not in lines:
                lines.append(place)

    def note_averaged_copy(self, changed: Any) -> None:
        """Note a change of an averaged copy, with the number of backwards since the last step."""
        session = self.session
        first: Any = changed[0] if isinstance(changed, list | tuple) and changed else changed
        if type(first) in (torch.Tensor, nn.Parameter) and first.data_ptr() in session.copies:
            noted = session.facts.setdefault("copies_moved", [])
            place, *callers = [*chain(), ""][:2]
            entry = [session.update, session.num_backwards, place, session.copies[first.data_ptr()], *callers]
            if not noted or noted[-1][:3] != entry[:3]:
                noted.append(entry)

    # --- draws

    def record_or_replace(self, name: str, args: Any, kwargs: Any, out: Any) -> Any:
        """Record the numbers of a draw, or replace them."""
        session = self.session
        drawn = out[1] if name == "native_dropout" else out
        if type(drawn) is not torch.Tensor and not isinstance(drawn, nn.Parameter):
            return out
        session.num_permutations += name == "randperm" and drawn.numel() > 1
        if session.settings["by_rows"]:
            return out if session.in_source else self.replace_by_recorded_rows(name, args, drawn, out)
        if session.settings["rows"]:
            return self.replace_by_global_rows(name, args, kwargs, out)
        key = session.key_of_update(name)
        if session.in_source:
            return out  # what the function returns is imposed
        if not self.recorded:
            if drawn.numel() <= 10 * _MOST_ELEMENTS:
                session.draws.append((key, (drawn.detach().clone(), session.is_training)))
            return out
        recorded = [each[key][0] for each in self.recorded if key in each]
        if not recorded:
            if session.is_training:
                session.refuse(f"the ranks did not draw at {key[0]} ({name})")
            return out
        is_common = (*key[:2], recorded[0].shape) not in self.differing
        if session.settings["larger"] and recorded[0].shape == drawn.shape:
            is_common = True  # not a draw for the samples, which would be as large as the batch
        if session.is_training and len(recorded) > 1 and is_common and _is_repeated(recorded, drawn, name):
            session.facts["repeated"] = [*session.facts.get("repeated", []), [*key[:2], list(recorded[0].shape)]]
        return self.imposed(name, args, key, drawn, out, recorded, is_common)

    def imposed(
        self,
        name: str,
        args: Any,
        key: tuple[str, str, int],
        drawn: Any,
        out: Any,
        recorded: list[Any],
        is_common: bool,
    ) -> Any:
        """The draw with the numbers of all ranks."""
        session = self.session
        is_weight = _in_constructor()
        if session.has_begun and len(recorded) > 1 and not torch.is_grad_enabled():
            session.facts.setdefault("drawn_without_grad", []).append(session.update)
        new = _merge_draws(recorded, drawn, name, is_weight, is_common)
        is_of_all = session.settings["larger"] and (drawn.numel() >= _FEW or not drawn.is_floating_point())
        if (
            session.has_begun
            and not (is_weight or is_of_all)
            and name != "randperm"
            and self.is_for_batch(recorded, drawn)
        ):
            session.refuse(f"the ranks draw different random numbers for a whole batch at {key[0]} ({name})")
        if new is None:
            session.refuse(f"random numbers of {key[0]} ({name}) have another shape on one rank")
            return out
        if new.shape == drawn.shape:
            return _fill(name, args, drawn, out, new)
        session.facts["widened"] = [*session.facts.get("widened", []), key[0]]
        session.rows = [len(part) for part in recorded]
        return new.to(drawn.dtype)

    def is_for_batch(self, recorded: list[Any], drawn: Any) -> bool:
        """Whether ranks drew different numbers that one rank draws once: for all samples of a batch, or for weights."""
        first = recorded[0]
        if first.shape != drawn.shape or all(torch.equal(part, first) for part in recorded[1:]):
            return False
        rows = self.session.rows[0] if self.session.rows else 0
        is_for_gradient = bool(self.session.num_backwards and rows) and len(first) % rows > 0 if first.dim() else True
        return is_for_gradient or first.numel() < _FEW < rows

    def replace_by_recorded_rows(self, name: str, args: Any, drawn: Any, out: Any) -> Any:
        """Replace a draw by as many rows of the recorded ones of this line as it has, in their order."""
        session, place = self.session, where()
        queue = self.queues.get((place, name))
        if queue is None:
            parts = [
                value[0] for key, value in self.recorded[0].items() if key[0] == place and key[1].split()[0] == name
            ]
            fitting = [part for part in parts if part.dim() == drawn.dim() and part.shape[1:] == drawn.shape[1:]]
            combine = torch.cat if drawn.dim() else torch.stack
            queue = self.queues[place, name] = [combine(fitting) if fitting else None, 0]
        (rows, start), count = queue, len(drawn) if drawn.dim() else 1
        if session.has_begun and (not drawn.dim() or not session.batch_size or count % session.batch_size):
            session.refuse(f"{place} ({name}) draws random numbers for a whole batch")
        if rows is None or rows.shape[1:] != drawn.shape[1:] or start + count > len(rows):
            return out  # as for more updates than were recorded
        queue[1] += count
        return _fill(name, args, drawn, out, rows[start : start + count].view(drawn.shape))

    def replace_by_global_rows(self, name: str, args: Any, kwargs: Any, out: Any) -> Any:
        """Row g of a draw with a row for each sample: the same numbers whichever rank has the sample."""
        session = self.session
        kind = _ROWS.get(name)
        # a generator of its own has one seed on all ranks, as that of a sampler
        if (
            kind is None
            or kwargs.get("generator") is not None
            or not session.batch_size
            or not out.dim()
            or len(out) != session.batch_size
        ):
            return out
        generator = np.random.Generator(np.random.PCG64(self.num_row_draws))
        self.num_row_draws += 1
        rank, ranks = (session.rank, session.ranks) if session.is_split else (0, 1)
        numbers = _global_numbers(generator, kind, name, (len(out) * ranks, *out.shape[1:]), args)[rank::ranks]
        if kind == "bernoulli":
            given = args[0] if name == "bernoulli" and len(args) == 1 else args[1] if len(args) > 1 else 0.5
            numbers = numbers < (given.double().cpu().numpy() if isinstance(given, torch.Tensor) else given)
        with torch.no_grad():
            out.copy_(torch.from_numpy(np.ascontiguousarray(numbers)))
        return out

    # --- values

    def record_values(self, name: str, out: Any) -> None:
        """Record what a line of the script computes."""
        session = self.session
        if len(session.values) >= _MOST_VALUES:
            return
        for index, value in enumerate(out if isinstance(out, tuple | list) else (out,)):
            if type(value) is not torch.Tensor or not 0 < value.numel() <= _MOST_ELEMENTS or value.is_complex():
                continue
            if not value.is_floating_point() and (not value.dim() or name in _MADE):
                continue
            place = _direct_line()
            if place:
                key = session.key(f"{name}.{index}" if index else name, place)
                session.values.append((key, (value.detach().clone(), not session.num_backwards)))


def _differing_lines(recorded: list[dict[tuple[str, str, int], Any]]) -> set[tuple[str, str, Any]]:
    """(line, operation, shape) of the draws that differ between ranks: few integers may be equal by chance."""
    lines: set[tuple[str, str, Any]] = set()
    for key, (first, _) in recorded[0].items() if len(recorded) > 1 else ():
        others = [each[key][0] for each in recorded[1:] if key in each]
        if any(other.shape != first.shape or not torch.equal(other, first) for other in others):
            lines.add((key[0], key[1], first.shape))
    return lines


def _global_numbers(generator: np.random.Generator, kind: str, name: str, shape: tuple[int, ...], args: Any) -> Any:
    """Draw the numbers of the global batch; for "bernoulli" the uniform numbers that a probability is compared with."""
    if kind == "normal":
        numbers = generator.standard_normal(shape)
        if name == "normal_":
            mean, deviation = [*args[1:], *[0.0, 1.0][len(args) - 1 :]][:2]
            numbers = numbers * deviation + mean
        return numbers
    numbers = generator.random(shape)
    if name == "uniform_":
        low, high = [*args[1:], *[0.0, 1.0][len(args) - 1 :]][:2]
        numbers = numbers * (high - low) + low
    elif kind == "integers":
        bounds = [each for each in args if isinstance(each, int)]  # high, or low and high
        low, high = [0, *bounds][-2:]
        numbers = low + np.floor(numbers * (high - low))
    return numbers


def _fill(name: str, args: Any, drawn: Any, out: Any, new: Any) -> Any:
    """Write other numbers into the result of a draw, and return it."""
    with torch.no_grad():
        drawn.copy_(new)
        if name == "native_dropout":
            out[0].copy_(args[0] * new / (1 - args[1]))
    return out


def _is_repeated(recorded: list[Any], drawn: Any, name: str) -> bool:
    """Whether ranks drew the same numbers for samples of their own, where one rank draws different ones."""
    first = recorded[0]
    are_of_local_samples = (
        name != "randperm"
        and first.dim() > 0
        and first.shape[1:] == drawn.shape[1:]
        and len(first) * len(recorded) == len(drawn)
    )
    return (
        are_of_local_samples
        and first.numel() > 1
        and first.unique().numel() > 1
        and all(torch.equal(each, first) for each in recorded)
    )


def _direct_line() -> str:
    """Return the user's innermost line, or "" inside optimizers and wrappers of torch.distributed."""
    frame: Any = sys._getframe(1)
    while frame is not None and not is_own_file(frame.f_code.co_filename):
        if "/torch/distributed/" in frame.f_code.co_filename or "/torch/optim/" in frame.f_code.co_filename:
            return ""
        frame = frame.f_back
    return f"{os.path.abspath(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""  # noqa: PTH100


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _tensors(each)]
    return [value] if isinstance(value, torch.Tensor) else []


def _sending_line() -> str:
    """Return the user's innermost line, or "" inside DistributedDataParallel and FSDP."""
    frame: Any = sys._getframe(1)
    while frame is not None and not is_own_file(frame.f_code.co_filename):
        if "/torch/nn/parallel/" in frame.f_code.co_filename or "/fsdp/" in frame.f_code.co_filename:
            return ""
        frame = frame.f_back
    return f"{os.path.abspath(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""  # noqa: PTH100


def _merge_draws(recorded: list[Any], drawn: Any, name: str, is_weight: bool, is_common: bool) -> Any:
    """Return the draws of all ranks as one draw, or None if the shapes do not allow it.

    A draw that fills a tensor that exists, such as a weight, keeps its shape: rank 0's numbers are those that
    DistributedDataParallel broadcasts.
    """
    first = recorded[0]
    keeps_shape = is_weight or name in _IN_PLACE or name == "randperm"
    if name == "randperm" and sum(len(part) for part in recorded) == len(drawn):
        starts = [sum(len(part) for part in recorded[:number]) for number in range(len(recorded))]
        return torch.cat([part + start for part, start in zip(recorded, starts, strict=True)])
    for dim in range(first.dim()):
        others = [part.shape[:dim] + part.shape[dim + 1 :] for part in recorded]
        is_sum = all(other == others[0] for other in others) and sum(part.shape[dim] for part in recorded) == (
            drawn.shape[dim] if drawn.dim() > dim else -1
        )
        if is_sum and drawn.shape[:dim] + drawn.shape[dim + 1 :] == others[0]:
            return torch.cat(recorded, dim)
    if first.shape != drawn.shape:
        return None
    if keeps_shape or not first.dim() or is_common:
        return first
    return torch.cat(recorded)


def _in_constructor() -> bool:
    """Whether a module is being made: its weights have one shape on any number of ranks."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in ("__init__", "reset_parameters") and isinstance(
            frame.f_locals.get("self"), nn.Module
        ):
            return True
        if frame.f_code.co_name == "<module>" and is_own_file(frame.f_code.co_filename):
            return False
        frame = frame.f_back
    return False
