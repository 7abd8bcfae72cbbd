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

from everyrank.audit.watch.source_location import is_user_file, user_line, user_lines
from everyrank.rerun.inside.reads import RowReads
from everyrank.rerun.inside.session import Session

__all__ = ["install_draws"]

_DRAWS = {
    *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "multinomial"),
    *("poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "randperm", "native_dropout"),
}
_IN_PLACE = {"normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_", "geometric_", "cauchy_"}
_DISTRIBUTIONS = {
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
_MAX_ELEMENTS = 200_000
_MAX_VALUES = 4000
_CONSTRUCTORS = {"arange", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "eye", "scalar_tensor"}
_MIN_PER_SAMPLE = 4  # numbers: not one for each sample
_VIEWS = {
    *("detach", "clone", "alias", "view", "_unsafe_view", "t", "transpose", "lift_fresh", "_to_copy", "expand"),
    *("split", "split_with_sizes", "unbind", "narrow", "slice", "select", "as_strided"),
}


def install_draws(session: Session, pretend: Any) -> contextlib.ExitStack:
    """Enter the torch modes in which the script runs, and return them as one context."""
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
    """Records or replaces random numbers, and records computed values, at every operation of torch."""

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
            self.record_sending_line()
            for tensor in _tensors(args):
                self.sent_tensors[tensor] = True
        if name == "_local_scalar_dense" and len(session.items) < _MAX_VALUES and not isinstance(out, complex):
            is_local = args[0].requires_grad and args[0] not in self.sent_tensors
            session.items.append([float(out), user_line(), session.update, is_local])
        if session.copies and name.endswith("_"):
            with session.quiet():
                self.record_copy_change(args[0])
        if session.in_source and name not in _DRAWS and name not in _IN_PLACE:
            return out
        if name in _DRAWS or name in _IN_PLACE:
            with session.quiet():
                return self.record_or_replace(name, args, kwargs or {}, out)
        if session.settings["order"]:
            return out
        if (
            session.has_started
            and session.update == 0
            and not session.in_backward
            and name not in _VIEWS
            and "empty" not in name
        ):
            with session.quiet():
                self.record_values(name, out)
        return out

    def record_sending_line(self) -> None:
        """Record the lines at which the script calls collectives in the first update, before its backward."""
        session = self.session
        if session.has_started and session.update == 0 and not session.num_backwards and not session.in_backward:
            lines, location = session.facts.setdefault("sent_at", []), _sending_line()
            if location and location not in lines:
                lines.append(location)

    def record_copy_change(self, changed: Any) -> None:
        """Record a change of an averaged copy, with the number of backwards since the last step."""
        session = self.session
        changed_tensor: Any = changed[0] if isinstance(changed, list | tuple) and changed else changed
        if type(changed_tensor) in (torch.Tensor, nn.Parameter) and changed_tensor.data_ptr() in session.copies:
            changes = session.facts.setdefault("copies_moved", [])
            location, *callers = [*user_lines(), ""][:2]
            entry = [
                session.update,
                session.num_backwards,
                location,
                session.copies[changed_tensor.data_ptr()],
                *callers,
            ]
            if not changes or changes[-1][:3] != entry[:3]:
                changes.append(entry)

    # --- draws

    def record_or_replace(self, name: str, args: Any, kwargs: Any, out: Any) -> Any:
        """Record the numbers of a draw, or replace them."""
        session = self.session
        draw = out[1] if name == "native_dropout" else out
        if (type(draw) is not torch.Tensor and not isinstance(draw, nn.Parameter)) or draw.is_meta:
            return out
        session.num_permutations += name == "randperm" and draw.numel() > 1
        if session.settings["by_rows"]:
            return out if session.in_source else self.replace_by_recorded_rows(name, args, draw, out)
        if session.settings["rows"]:
            return self.replace_by_global_rows(name, args, kwargs, out)
        key = session.key_of_update(name)
        if session.in_source:
            return out  # the result of the function is imposed instead
        if not self.recorded:
            if draw.numel() <= 10 * _MAX_ELEMENTS:
                session.draws.append((key, (draw.detach().clone(), session.is_training)))
            return out
        rank_draws = [each[key][0] for each in self.recorded if key in each]
        if not rank_draws:
            if session.is_training:
                session.report_not_imposed(f"the ranks did not draw at {key[0]} ({name})")
            return out
        is_common = (*key[:2], rank_draws[0].shape) not in self.differing
        if session.settings["larger"] and rank_draws[0].shape == draw.shape:
            is_common = True  # not a draw for each sample, which would be as large as the batch
        if session.is_training and len(rank_draws) > 1 and is_common and _is_repeated(rank_draws, draw, name):
            session.facts["repeated"] = [*session.facts.get("repeated", []), [*key[:2], list(rank_draws[0].shape)]]
        return self.merged_draw(name, args, key, draw, out, rank_draws, is_common)

    def merged_draw(
        self,
        name: str,
        args: Any,
        key: tuple[str, str, int],
        draw: Any,
        out: Any,
        rank_draws: list[Any],
        is_common: bool,
    ) -> Any:
        """The draw with the merged numbers of all ranks."""
        session = self.session
        is_weight = _in_constructor()
        if session.has_started and len(rank_draws) > 1 and not torch.is_grad_enabled():
            session.facts.setdefault("drawn_without_grad", []).append(session.update)
        replacement = _merge_draws(rank_draws, draw, name, is_weight, is_common)
        is_of_all = session.settings["larger"] and (draw.numel() >= _MIN_PER_SAMPLE or not draw.is_floating_point())
        if (
            session.has_started
            and not (is_weight or is_of_all)
            and name != "randperm"
            and self.is_for_batch(rank_draws, draw)
        ):
            session.report_not_imposed(
                f"the ranks draw different random numbers for a whole batch at {key[0]} ({name})"
            )
        if replacement is None:
            session.report_not_imposed(f"random numbers of {key[0]} ({name}) have another shape on one rank")
            return out
        if replacement.shape == draw.shape:
            return _fill(name, args, draw, out, replacement)
        session.facts["widened"] = [*session.facts.get("widened", []), key[0]]
        session.rows = [len(rank_draw) for rank_draw in rank_draws]
        return replacement.to(draw.dtype)

    def is_for_batch(self, rank_draws: list[Any], draw: Any) -> bool:
        """Whether ranks drew different numbers that one rank draws only once, for a whole batch or for weights."""
        first = rank_draws[0]
        if first.shape != draw.shape or all(torch.equal(rank_draw, first) for rank_draw in rank_draws[1:]):
            return False
        rows = self.session.rows[0] if self.session.rows else 0
        is_for_gradient = bool(self.session.num_backwards and rows) and len(first) % rows > 0 if first.dim() else True
        return is_for_gradient or first.numel() < _MIN_PER_SAMPLE < rows

    def replace_by_recorded_rows(self, name: str, args: Any, draw: Any, out: Any) -> Any:
        """Replace the rows of a draw by the next recorded rows of this line."""
        session, location = self.session, user_line()
        queue = self.queues.get((location, name))
        if queue is None:
            line_draws = [
                value[0] for key, value in self.recorded[0].items() if key[0] == location and key[1].split()[0] == name
            ]
            matching_draws = [
                line_draw
                for line_draw in line_draws
                if line_draw.dim() == draw.dim() and line_draw.shape[1:] == draw.shape[1:]
            ]
            combine = torch.cat if draw.dim() else torch.stack
            queue = self.queues[location, name] = [combine(matching_draws) if matching_draws else None, 0]
        (rows, start), count = queue, len(draw) if draw.dim() else 1
        if session.has_started and (not draw.dim() or not session.batch_size or count % session.batch_size):
            session.report_not_imposed(f"{location} ({name}) draws random numbers for a whole batch")
        if rows is None or rows.shape[1:] != draw.shape[1:] or start + count > len(rows):
            return out  # for example because fewer updates were recorded
        queue[1] += count
        return _fill(name, args, draw, out, rows[start : start + count].view(draw.shape))

    def replace_by_global_rows(self, name: str, args: Any, kwargs: Any, out: Any) -> Any:
        """Replace a draw with a row for each sample by rows that depend only on the sample, not on its rank."""
        session = self.session
        distribution = _DISTRIBUTIONS.get(name)
        # a separate generator, such as that of a sampler, has the same seed on all ranks
        if (
            distribution is None
            or kwargs.get("generator") is not None
            or not session.batch_size
            or not out.dim()
            or len(out) != session.batch_size
        ):
            return out
        generator = np.random.Generator(np.random.PCG64(self.num_row_draws))
        self.num_row_draws += 1
        rank, ranks = (session.rank, session.ranks) if session.is_split else (0, 1)
        numbers = _global_numbers(generator, distribution, name, (len(out) * ranks, *out.shape[1:]), args)[rank::ranks]
        if distribution == "bernoulli":
            probability = args[0] if name == "bernoulli" and len(args) == 1 else args[1] if len(args) > 1 else 0.5
            numbers = numbers < (
                probability.double().cpu().numpy() if isinstance(probability, torch.Tensor) else probability
            )
        with torch.no_grad():
            out.copy_(torch.from_numpy(np.ascontiguousarray(numbers)))
        return out

    # --- values

    def record_values(self, name: str, out: Any) -> None:
        """Record the tensors that a line of the script computes."""
        session = self.session
        if len(session.values) >= _MAX_VALUES:
            return
        for index, value in enumerate(out if isinstance(out, tuple | list) else (out,)):
            if type(value) is not torch.Tensor or not 0 < value.numel() <= _MAX_ELEMENTS or value.is_complex():
                continue
            if not value.is_floating_point() and (not value.dim() or name in _CONSTRUCTORS):
                continue
            location = _direct_line()
            if location:
                key = session.key(f"{name}.{index}" if index else name, location)
                session.values.append((key, (value.detach().clone(), not session.num_backwards)))


def _differing_lines(recorded: list[dict[tuple[str, str, int], Any]]) -> set[tuple[str, str, Any]]:
    """(line, operation, shape) of the draws that differ between ranks in some update."""
    lines: set[tuple[str, str, Any]] = set()
    for key, (first, _) in recorded[0].items() if len(recorded) > 1 else ():
        others = [each[key][0] for each in recorded[1:] if key in each]
        if any(other.shape != first.shape or not torch.equal(other, first) for other in others):
            lines.add((key[0], key[1], first.shape))
    return lines


def _global_numbers(
    generator: np.random.Generator, distribution: str, name: str, shape: tuple[int, ...], args: Any
) -> Any:
    """Draw the numbers of the global batch. For "bernoulli", these are uniform, to compare with a probability."""
    if distribution == "normal":
        numbers = generator.standard_normal(shape)
        if name == "normal_":
            mean, deviation = [*args[1:], *[0.0, 1.0][len(args) - 1 :]][:2]
            numbers = numbers * deviation + mean
        return numbers
    numbers = generator.random(shape)
    if name == "uniform_":
        low, high = [*args[1:], *[0.0, 1.0][len(args) - 1 :]][:2]
        numbers = numbers * (high - low) + low
    elif distribution == "integers":
        bounds = [each for each in args if isinstance(each, int)]  # high, or low and high
        low, high = [0, *bounds][-2:]
        numbers = low + np.floor(numbers * (high - low))
    return numbers


def _fill(name: str, args: Any, draw: Any, out: Any, replacement: Any) -> Any:
    """Write `replacement` into the result of a draw, and return the result."""
    with torch.no_grad():
        draw.copy_(replacement)
        if name == "native_dropout":
            out[0].copy_(args[0] * replacement / (1 - args[1]))
    return out


def _is_repeated(rank_draws: list[Any], draw: Any, name: str) -> bool:
    """Whether ranks drew the same numbers for their local samples, for which one rank draws different numbers."""
    first = rank_draws[0]
    are_of_local_samples = (
        name != "randperm"
        and first.dim() > 0
        and first.shape[1:] == draw.shape[1:]
        and len(first) * len(rank_draws) == len(draw)
    )
    return (
        are_of_local_samples
        and first.numel() > 1
        and first.unique().numel() > 1
        and all(torch.equal(each, first) for each in rank_draws)
    )


def _direct_line() -> str:
    """Return the user's innermost line, or "" inside optimizers and wrappers of torch.distributed."""
    frame: Any = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
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
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        if "/torch/nn/parallel/" in frame.f_code.co_filename or "/fsdp/" in frame.f_code.co_filename:
            return ""
        frame = frame.f_back
    return f"{os.path.abspath(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""  # noqa: PTH100


def _merge_draws(rank_draws: list[Any], draw: Any, name: str, is_weight: bool, is_common: bool) -> Any:
    """Return the draws of all ranks as one draw, or None if the shapes do not allow it.

    A draw that fills an existing tensor, such as a weight, keeps its shape and gets the numbers of rank 0, because
    DistributedDataParallel broadcasts these.
    """
    first = rank_draws[0]
    keeps_shape = is_weight or name in _IN_PLACE or name == "randperm"
    if name == "randperm" and sum(len(rank_draw) for rank_draw in rank_draws) == len(draw):
        starts = [sum(len(rank_draw) for rank_draw in rank_draws[:number]) for number in range(len(rank_draws))]
        return torch.cat([rank_draw + start for rank_draw, start in zip(rank_draws, starts, strict=True)])
    for dim in range(first.dim()):
        other_dims = [rank_draw.shape[:dim] + rank_draw.shape[dim + 1 :] for rank_draw in rank_draws]
        is_sum = all(other == other_dims[0] for other in other_dims) and sum(
            rank_draw.shape[dim] for rank_draw in rank_draws
        ) == (draw.shape[dim] if draw.dim() > dim else -1)
        if is_sum and draw.shape[:dim] + draw.shape[dim + 1 :] == other_dims[0]:
            return torch.cat(rank_draws, dim)
    if first.shape != draw.shape:
        return None
    if keeps_shape or not first.dim() or is_common:
        return first
    return torch.cat(rank_draws)


def _in_constructor() -> bool:
    """Whether a module is being constructed, whose weights have the same shape on any number of ranks."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in ("__init__", "reset_parameters") and isinstance(
            frame.f_locals.get("self"), nn.Module
        ):
            return True
        if frame.f_code.co_name == "<module>" and is_user_file(frame.f_code.co_filename):
            return False
        frame = frame.f_back
    return False
