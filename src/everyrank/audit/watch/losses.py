"""Finds losses, the number of terms of each loss, and its factor in the gradient.

A TorchFunctionMode gets every torch function. A loss is the result of a function such as `F.cross_entropy`, or a mean
or sum of tensors that are computed from the model's outputs. In a model's forward, it is a mean or sum that the model
returns. A sum that is divided by the number of its unmasked elements is a mean over these.

A hook on the loss gets the derivative of the backward's root with respect to it, which is the scale that the script
applies.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn._reduction import legacy_get_string
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from everyrank.audit.events import EvalLoss, EvalShare, EvalSlice, LossTerm
from everyrank.audit.watch.gathered_tensors import GatherTracker
from everyrank.audit.watch.pretend_cuda import PretendCuda
from everyrank.audit.watch.random_draws import DrawTracker
from everyrank.audit.watch.ratio_metrics import RatioTracker
from everyrank.audit.watch.recorder import Recorder, harmless, local, tensors
from everyrank.audit.watch.source_location import caller_is_user_code, user_line

__all__ = ["FunctionMode", "Losses"]

LOSSES = {
    F.cross_entropy,
    F.nll_loss,
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.kl_div,
}
_MAX_SHARE_VALUES = 100_000  # larger tensors of zeros and ones, for example one value for each pixel, are ignored
REDUCTIONS = {torch.Tensor.mean: "mean", torch.mean: "mean", torch.Tensor.sum: "sum", torch.sum: "sum"}
WAITS = {
    torch.Tensor.item: "item",
    torch.Tensor.tolist: "tolist",
    torch.Tensor.cpu: "cpu",
    torch.Tensor.numpy: "numpy",
    torch.Tensor.__bool__: "bool",
    torch.Tensor.__float__: "float",
    torch.Tensor.__int__: "int",
}
_DIVISIONS = {torch.Tensor.div, torch.Tensor.true_divide, torch.div, torch.true_divide, torch.Tensor.__truediv__}
_SCALINGS = {torch.Tensor.mul, torch.Tensor.div, torch.Tensor.__rmul__, torch.mul, torch.div, torch.Tensor.__rdiv__}
_SLICES = {torch.Tensor.__getitem__, torch.Tensor.narrow, torch.Tensor.masked_select, torch.where, torch.narrow}
DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}


class Losses:
    """The losses between a forward and its backward, and counters of other calls."""

    def __init__(self) -> None:
        self.terms: list[LossTerm] = []
        self.derived: dict[
            int, Any
        ] = {}  # tensors computed from the model's outputs, by id; held, so that no id is reused
        self.held_tensors: list[Any] = []
        self.sums: dict[int, LossTerm] = {}  # by the id of the sum
        self.inner_terms: dict[int, list[LossTerm]] = {}  # by the id of a number that a forward computes: its losses
        self.returned_terms: list[LossTerm] = []  # those that the module that ended last has returned
        self.hooked_tensors: dict[int, int] = {}  # by the id of a term: that of the tensor whose gradient is its scale
        self.gathers, self.noise, self.ratios = GatherTracker(), DrawTracker(), RatioTracker()
        self.depth = 0  # of module calls
        self.num_dropouts = 0
        self.is_evaluating = False  # the last forward had no gradients
        self.slice_lines: set[str] = set()  # lines that slice or mask a tensor in an evaluation
        self.scaling_lines: list[str] = []  # lines that multiply or divide a number computed from the model's outputs
        self.waits: Counter[tuple[str, str]] = Counter()

    def forward_done(self, output: Any) -> None:
        """Track tensors that are computed from this output. A number in it may already be a loss."""
        self.derived = {id(tensor): tensor for tensor in tensors(output)}
        if any(_is_scalar(tensor) and tensor.requires_grad for tensor in self.derived.values()):
            self.module_done(output)
            for term in self.returned_terms:
                if not any(term is other for other in self.terms):
                    self.terms.append(term)
        self.inner_terms, self.returned_terms = {}, []

    def module_done(self, output: Any) -> None:
        """Remember the losses that a module returns. A wrapper may return a copy with the same losses."""
        if self.inner_terms:
            terms = [term for tensor in tensors(output) for term in self.inner_terms.get(id(tensor), ())]
            self.returned_terms = terms or self.returned_terms

    def backward_done(self) -> list[LossTerm]:
        """Return the losses in the graph of a backward, and forget all losses."""
        finished = [term for term in self.terms if term.scale]
        self.terms, self.held_tensors, self.derived, self.scaling_lines = [], [], {}, []
        self.sums, self.inner_terms, self.returned_terms, self.hooked_tensors = {}, {}, [], {}
        self.gathers.forget()
        self.noise.forget()
        self.ratios.forget()
        return finished


class FunctionMode(TorchFunctionMode):
    """Gets each torch function that the script calls, as `torch.overrides` defines them."""

    def __init__(self, recorder: Recorder, losses: Losses, pretend: PretendCuda | None) -> None:
        super().__init__()
        self.recorder, self.losses, self.pretend = recorder, losses, pretend

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.pretend is not None:
            replaced, args, kwargs = self.pretend.rewrite(func, args, kwargs)
            if replaced is not None:
                return replaced
        out = func(*args, **kwargs)
        has_shapes = not any(is_lazy(value) for value in (out, *args[:1]))  # a lazy parameter has none yet
        if has_shapes and not self.recorder.is_muted:
            self._record(func, args, kwargs, out)
        return out

    @harmless("losses and other torch functions")
    def _record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        args, kwargs = _positional(args, kwargs)
        self.losses.gathers.track_function(func, args, kwargs, out)
        if not self.losses.is_evaluating:
            self.losses.noise.track_function(self.recorder, func, args, kwargs, out, self.losses.depth > 0)
        elif self.losses.depth == 0:
            self.losses.ratios.track_function(self.recorder, func, args, out)
        if func in WAITS:
            self._record_wait(func)
        elif not torch.is_grad_enabled():
            self._record_evaluation(func, args, kwargs, out)
        else:
            self._record_computation(func, args, kwargs, out)

    def _record_wait(self, func: Any) -> None:
        if caller_is_user_code():
            self.losses.waits[WAITS[func], user_line()] += 1

    def _record_evaluation(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record mean losses and slices of an evaluation."""
        self.losses.num_dropouts += _draws_dropout(func, args, kwargs)
        self._record_slice(func, args)
        if func in LOSSES and _is_scalar(out) and _reduction(kwargs) == "mean":
            with self.recorder.muted():
                value, count = float(out), num_terms(func, args, kwargs)
            self.recorder.write(EvalLoss(line=user_line(), value=value, terms=count))
        elif func in REDUCTIONS and self.losses.is_evaluating and self.losses.depth == 0 and _is_scalar(out):
            self._record_share(args[0])

    def _record_share(self, values: Any) -> None:
        """Record the share of ones, if all values are zeros and ones."""
        count = values.numel()
        if not (values.dim() and 0 < count <= _MAX_SHARE_VALUES and caller_is_user_code()):
            return
        with self.recorder.muted():
            ones = int(torch.count_nonzero(local(values)))
            is_binary = values.dtype == torch.bool or ones == int((local(values) == 1).sum())
        if is_binary:
            self.recorder.write(EvalShare(line=user_line(), value=ones / count, terms=count))

    def _record_slice(self, func: Any, args: Any) -> None:
        if func in _SLICES and _may_drop_samples(func, args) and caller_is_user_code():
            line = user_line()
            if line not in self.losses.slice_lines:
                self.losses.slice_lines.add(line)
                self.recorder.write(EvalSlice())

    def _record_computation(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        losses = self.losses
        losses.num_dropouts += _draws_dropout(func, args, kwargs)
        if losses.is_evaluating:
            self._record_slice(func, args)
        is_derived = bool(losses.derived) and any(id(tensor) in losses.derived for tensor in tensors((args, kwargs)))
        if is_derived and losses.depth == 0:
            for tensor in tensors(out):
                if tensor.requires_grad:
                    losses.derived[id(tensor)] = tensor
        if not (_is_scalar(out) and out.requires_grad):
            return
        if func in _SCALINGS and is_derived and losses.depth == 0 and _is_scalar(args[0]):
            losses.scaling_lines.append(user_line())
        elif func in LOSSES:
            reduction = _reduction(kwargs)
            with self.recorder.muted():
                count = num_terms(func, args, kwargs)
            self._add_loss(func, out, count, "mean" if reduction == "batchmean" else reduction)
        elif func in REDUCTIONS and (is_derived or losses.depth) and args[0].dim():
            with self.recorder.muted():
                nonzero = int(torch.count_nonzero(local(args[0])))
            self._add_loss(func, out, args[0].numel(), REDUCTIONS[func], nonzero)
        elif losses.sums or losses.inner_terms:
            self._track_combination(func, args, kwargs, out)

    def _track_combination(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Track a number that is computed from losses. A sum divided by its count becomes a mean."""
        losses = self.losses
        term = losses.sums.get(id(args[0])) if func in _DIVISIONS and len(args) > 1 else None
        if term is not None:
            with self.recorder.muted():
                divisor = (
                    args[1] if isinstance(args[1], int | float) else float(args[1]) if _is_scalar(args[1]) else 0.0
                )
            counts = (term.terms, term.nonzero)
            if divisor in counts and divisor and not getattr(args[1], "requires_grad", False):
                term.terms, term.reduction, term.scale = divisor, "mean", 0.0
                out.register_hook(lambda grad: self._add_scale(term, grad))
                losses.hooked_tensors[id(term)] = id(out)
                losses.held_tensors.append(out)
        if losses.depth:
            terms = [term for tensor in tensors((args, kwargs)) for term in losses.inner_terms.get(id(tensor), ())]
            if terms:
                losses.inner_terms[id(out)] = terms
                losses.held_tensors.append(out)

    def _add_loss(self, func: Any, out: Any, count: float, reduction: str, nonzero: int | None = None) -> None:
        recorder, losses = self.recorder, self.losses
        term = LossTerm(func.__name__, user_line(), count, reduction, nonzero)
        with recorder.muted():
            term.value = float(out.detach()) if type(out) is torch.Tensor else math.nan
        losses.hooked_tensors[id(term)] = id(out)
        if reduction == "sum":
            losses.sums[id(out)] = term
        if losses.depth and func in REDUCTIONS:
            losses.inner_terms[id(out)] = [term]  # it is a loss only if the model returns it
        else:
            losses.terms.append(term)
        out_id = id(out)
        # a sum that is divided by its count later gets its hook after the division
        out.register_hook(
            lambda grad: self._add_scale(term, grad) if losses.hooked_tensors.get(id(term)) == out_id else None
        )
        losses.held_tensors.append(out)

    @harmless("the scale of a loss")
    def _add_scale(self, term: LossTerm, grad: Any) -> None:
        with self.recorder.muted():
            term.scale += float(grad)


def _positional(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a call, with `input` and `other` by position."""
    kwargs = dict(kwargs)
    for position, name in enumerate(("input", "other")):
        if len(args) == position and name in kwargs:
            args = (*args, kwargs.pop(name))
    return args, kwargs


def _reduction(kwargs: Any) -> str:
    """The reduction of a loss function, also by its old arguments `size_average` and `reduce`."""
    old_args = kwargs.get("size_average"), kwargs.get("reduce")
    if old_args == (None, None):
        return kwargs.get("reduction", "mean")
    return legacy_get_string(*old_args, emit_warning=False)


def _draws_dropout(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call draws a dropout mask."""
    if func is F.scaled_dot_product_attention:
        return kwargs.get("dropout_p", args[4] if len(args) > 4 else 0) > 0
    return func in DROPOUTS and kwargs.get("training", True) and kwargs.get("p", 0.5) > 0


def _may_drop_samples(func: Any, args: Any) -> bool:
    """Whether an indexing operation may drop surplus samples of an evaluation, which are rows.

    An index with less than half of the rows is taken for a lookup in a table.
    """
    if func is not torch.Tensor.__getitem__:
        return True
    tensor, index = args[0], args[1]
    first = index[0] if isinstance(index, tuple) and index else index
    if isinstance(first, slice):
        return first != slice(None)
    if not isinstance(first, torch.Tensor) or not tensor.dim():
        return False
    return first.dtype == torch.bool or len(tensor) / 2 < first.numel() < len(tensor)


def _is_scalar(out: Any) -> bool:
    return isinstance(out, torch.Tensor) and out.dim() == 0


def num_terms(func: Any, args: Any, kwargs: Any) -> float:
    """The number of terms of a loss, without ignored targets and weighted by class weights."""
    output = args[0] if args else kwargs["input"]
    target = kwargs.get("target", args[1] if len(args) > 1 else None)
    if func in (F.cross_entropy, F.nll_loss):
        if target.is_floating_point():
            return target.numel() / target.shape[1] if target.dim() > 1 else 1.0  # without the dim of classes
        counts = target != kwargs.get("ignore_index", -100)
        weight = kwargs.get("weight")
        return float(weight[target[counts]].sum()) if weight is not None else float(counts.sum())
    if func is F.kl_div and kwargs.get("reduction") == "batchmean":
        return float(output.shape[0])
    return float(output.numel())
