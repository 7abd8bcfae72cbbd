"""Finds losses, the number of terms of each, and the factor of each in the gradient.

A mode sees every torch function. A loss is the result of a function such as `F.cross_entropy`, or a mean or a sum over
something computed from the model's outputs. Inside a model's forward it is a mean or a sum that the model returns. A
sum divided by the number of its elements that are not masked is a mean over these.

A hook on the loss gets the derivative of the backward's root by it, which is the script's own scale.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from everyrank.audit.events import EvalLoss, EvalShare, EvalSlice, LossTerm
from everyrank.audit.watch.gathers import Gathers
from everyrank.audit.watch.noise import Noise
from everyrank.audit.watch.place import caller_is_own, where
from everyrank.audit.watch.pretend_cuda import PretendCuda
from everyrank.audit.watch.ratios import Ratios
from everyrank.audit.watch.recorder import Recorder, harmless, local, tensors

__all__ = ["Functions", "Losses"]

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
_MOST_SHARED = 100_000  # values of a batch, such as one for each pixel, beyond which they are not looked at
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
_CUTS = {torch.Tensor.__getitem__, torch.Tensor.narrow, torch.Tensor.masked_select, torch.where, torch.narrow}
DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}


class Losses:
    """The losses between a forward and its backward, and counters."""

    def __init__(self) -> None:
        self.terms: list[LossTerm] = []
        self.derived: dict[
            int, Any
        ] = {}  # tensors computed from the model's outputs, by id; held, so that no id is reused
        self.kept: list[Any] = []
        self.sums: dict[int, LossTerm] = {}  # by the id of the sum
        self.inside: dict[int, list[LossTerm]] = {}  # by the id of a number that a forward computes: its losses
        self.returned: list[LossTerm] = []  # those that the module that ended last has returned
        self.hooked: dict[int, int] = {}  # by the id of a term: that of the tensor whose gradient is its scale
        self.gathers, self.noise, self.ratios = Gathers(), Noise(), Ratios()
        self.depth = 0  # of module calls
        self.num_dropouts = 0
        self.is_evaluating = False  # the last forward had no gradients
        self.cuts: set[str] = set()  # lines that slice or mask a tensor in an evaluation
        self.scalings: list[str] = []  # lines that multiply or divide a number computed from the model's outputs
        self.waits: Counter[tuple[str, str]] = Counter()

    def forward_done(self, output: Any) -> None:
        """Track what is computed from this output; a number in it may be a loss already."""
        self.derived = {id(tensor): tensor for tensor in tensors(output)}
        if any(_is_scalar(tensor) and tensor.requires_grad for tensor in self.derived.values()):
            self.module_done(output)
            for term in self.returned:
                if not any(term is known for known in self.terms):
                    self.terms.append(term)
        self.inside, self.returned = {}, []

    def module_done(self, output: Any) -> None:
        """Track the losses that a module returns. A wrapper may return a copy with the same losses."""
        if self.inside:
            terms = [term for tensor in tensors(output) for term in self.inside.get(id(tensor), ())]
            self.returned = terms or self.returned

    def backward_done(self) -> list[LossTerm]:
        """The losses that a backward has been through; all others are forgotten."""
        done = [term for term in self.terms if term.scale]
        self.terms, self.kept, self.derived, self.scalings = [], [], {}, []
        self.sums, self.inside, self.returned, self.hooked = {}, {}, [], {}
        self.gathers.forget()
        self.noise.forget()
        self.ratios.forget()
        return done


class Functions(TorchFunctionMode):
    """Sees each torch function that the script calls, as `torch.overrides` defines them."""

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
        if not self.recorder.is_muted:
            self._look(func, args, kwargs, out)
        return out

    @harmless("losses and other torch functions")
    def _look(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self.losses.gathers.called(func, args, kwargs, out)
        if not self.losses.is_evaluating:
            self.losses.noise.called(self.recorder, func, args, kwargs, out, self.losses.depth > 0)
        elif self.losses.depth == 0:
            self.losses.ratios.called(self.recorder, func, args, out)
        if func in WAITS:
            self._wait(func)
        elif not torch.is_grad_enabled():
            self._evaluated(func, args, kwargs, out)
        else:
            self._computed(func, args, kwargs, out)

    def _wait(self, func: Any) -> None:
        if caller_is_own():
            self.losses.waits[WAITS[func], where()] += 1

    def _evaluated(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record mean losses and slices of an evaluation."""
        self.losses.num_dropouts += _drops(func, kwargs)
        self._cut(func, args)
        if func in LOSSES and _is_scalar(out) and kwargs.get("reduction", "mean") == "mean":
            with self.recorder.muted():
                value, count = float(out), num_terms(func, args, kwargs)
            self.recorder.write(EvalLoss(line=where(), value=value, terms=count))
        elif func in REDUCTIONS and self.losses.is_evaluating and self.losses.depth == 0 and _is_scalar(out):
            self._share(args[0])

    def _share(self, values: Any) -> None:
        """Record the share of ones, if all values are zeros and ones."""
        count = values.numel()
        if not (values.dim() and 0 < count <= _MOST_SHARED and caller_is_own()):
            return
        with self.recorder.muted():
            ones = int(torch.count_nonzero(local(values)))
            is_binary = values.dtype == torch.bool or ones == int((local(values) == 1).sum())
        if is_binary:
            self.recorder.write(EvalShare(line=where(), value=ones / count, terms=count))

    def _cut(self, func: Any, args: Any) -> None:
        if func in _CUTS and _may_drop_samples(func, args) and caller_is_own():
            line = where()
            if line not in self.losses.cuts:
                self.losses.cuts.add(line)
                self.recorder.write(EvalSlice())

    def _computed(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        losses = self.losses
        losses.num_dropouts += _drops(func, kwargs)
        if losses.is_evaluating:
            self._cut(func, args)
        is_derived = bool(losses.derived) and any(id(tensor) in losses.derived for tensor in tensors((args, kwargs)))
        if is_derived and losses.depth == 0:
            for tensor in tensors(out):
                if tensor.requires_grad:
                    losses.derived[id(tensor)] = tensor
        if not (_is_scalar(out) and out.requires_grad):
            return
        if func in _SCALINGS and is_derived and losses.depth == 0 and _is_scalar(args[0]):
            losses.scalings.append(where())
        elif func in LOSSES:
            reduction = kwargs.get("reduction", "mean")
            with self.recorder.muted():
                count = num_terms(func, args, kwargs)
            self._loss(func, out, count, "mean" if reduction == "batchmean" else reduction)
        elif func in REDUCTIONS and (is_derived or losses.depth) and args[0].dim():
            with self.recorder.muted():
                nonzero = int(torch.count_nonzero(local(args[0])))
            self._loss(func, out, args[0].numel(), REDUCTIONS[func], nonzero)
        elif losses.sums or losses.inside:
            self._combined(func, args, kwargs, out)

    def _combined(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Track a number that is computed from losses: a sum over its count is a mean, others keep their losses."""
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
                out.register_hook(lambda grad: self._scaled(term, grad))
                losses.hooked[id(term)] = id(out)
                losses.kept.append(out)
        if losses.depth:
            terms = [term for tensor in tensors((args, kwargs)) for term in losses.inside.get(id(tensor), ())]
            if terms:
                losses.inside[id(out)] = terms
                losses.kept.append(out)

    def _loss(self, func: Any, out: Any, count: float, reduction: str, nonzero: int | None = None) -> None:
        recorder, losses = self.recorder, self.losses
        term = LossTerm(func.__name__, where(), count, reduction, nonzero)
        with recorder.muted():
            term.value = float(out.detach()) if type(out) is torch.Tensor else math.nan
        losses.hooked[id(term)] = id(out)
        if reduction == "sum":
            losses.sums[id(out)] = term
        if losses.depth and func in REDUCTIONS:
            losses.inside[id(out)] = [term]  # it is a loss only if the model returns it
        else:
            losses.terms.append(term)
        number = id(out)
        # a sum that is divided by its count is hooked where it has been divided
        out.register_hook(lambda grad: self._scaled(term, grad) if losses.hooked.get(id(term)) == number else None)
        losses.kept.append(out)

    @harmless("the scale of a loss")
    def _scaled(self, term: LossTerm, grad: Any) -> None:
        with self.recorder.muted():
            term.scale += float(grad)


def _drops(func: Any, kwargs: Any) -> bool:
    """Whether this call draws a dropout mask."""
    if func is F.scaled_dot_product_attention:
        return kwargs.get("dropout_p", 0) > 0
    return func in DROPOUTS and kwargs.get("training", True) and kwargs.get("p", 0.5) > 0


def _may_drop_samples(func: Any, args: Any) -> bool:
    """Whether an operation may drop rows that an evaluation has too many of: along the first dimension.

    A list of rows that leaves out most of them is a lookup in a table.
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
    """The number of terms of a loss: ignored targets do not count, and class weights do."""
    output = args[0] if args else kwargs["input"]
    target = kwargs.get("target", args[1] if len(args) > 1 else None)
    if func in (F.cross_entropy, F.nll_loss):
        if target.is_floating_point():
            return float(target.shape[0]) if target.dim() > 1 else 1.0
        counts = target != kwargs.get("ignore_index", -100)
        weight = kwargs.get("weight")
        return float(weight[target[counts]].sum()) if weight is not None else float(counts.sum())
    if func is F.kl_div and kwargs.get("reduction") == "batchmean":
        return float(output.shape[0])
    return float(output.numel())
