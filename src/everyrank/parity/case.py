"""What is compared: a workload made quiet, its data, and few updates that still meet what goes wrong."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from everyrank.data import Epoch, Streamed, Update, all_updates, epoch_of, planned_updates
from everyrank.errors import UnsupportedLayoutError
from everyrank.layout import SAMPLE_AXES, Layout, check_reference
from everyrank.layout.options import BuildOptions
from everyrank.loop import wrap_user_errors
from everyrank.parallel.batch_norm import has_batch_norm
from everyrank.parallel.dropout.apply import count_dropouts
from everyrank.parallel.init_model import on_cpu, on_meta
from everyrank.workload import Workload, changed

__all__ = ["QUICK_STEPS", "ParityCase", "Segments", "by_gradient", "chosen_updates", "parity_case", "single_like"]

Segments = list[list[Update]]
"""Updates to run; each segment begins from the initial state."""

QUICK_STEPS = 6
_LOW_STEPS = 8  # in a precision below float64, where rounding has grown over most of what could be seen by then
_EVAL_BATCHES = 4  # at either end of the evaluation data, and not fewer
_EVAL_SAMPLES = 32  # than so many samples


@dataclass
class ParityCase:
    """What is compared: a workload with its data, the updates to run, and the runs of `single` made so far.

    eval_ends    the first and the last batches of the evaluation data, which are evaluated; the whole of a stream
    segments     of each kind of `single` (its layout as text): the updates that can be compared
    from_disk    kinds of `single` that an earlier call had left
    names        of each kind of `single`: the file in which it is kept between calls
    references   of each kind of `single`: its `Reference`; rank 0 alone has them
    precisions   beside float64, those of the layouts themselves are compared
    by_gradient  nothing moved (a learning rate of 0): the optimizer is replaced by one whose update is the gradient
    of_gradients the same with such an optimizer, for own parallel code; made when it is first asked for
    reference    the layout that stands in for `single`, where one device cannot hold the model
    accumulate   micro-batches of `single`, where the whole batch did not fit
    """

    workload: Workload
    train_data: Any
    eval_data: Any
    eval_ends: Any
    steps: int
    notes: list[str]
    has_batch_norm: bool
    is_quick: bool = False
    is_cached: bool = False
    by_gradient: bool = False
    segments: dict[str, Segments] = field(default_factory=dict[str, Segments])
    from_disk: set[str] = field(default_factory=set[str])
    names: dict[str, str | None] = field(default_factory=dict[str, Any])
    references: dict[str, Any] = field(default_factory=dict[str, Any])
    of_gradients: ParityCase | None = None
    reference: Layout | None = None
    accumulate: int = 1

    def look(self) -> nn.Module:
        """The model for a look at it; without memory where no rank is to hold all of it."""
        return _look(self.workload, self.reference)

    def precisions(self, layout: Layout) -> list[str]:
        """In which precisions a layout is compared: float64, and its own."""
        return ["float64"] if self.is_quick else list(dict.fromkeys(["float64", layout.precision]))

    def forget_kept(self, single: str) -> bool:
        """Let go of what earlier calls have left, where this kind of `single` is among it: it is run anew."""
        if single not in self.from_disk:
            return False
        for kept in self.from_disk:
            self.segments.pop(kept)
            self.references.pop(kept, None)
        self.from_disk.clear()
        self.is_cached = False  # to be read; what is made is kept under the names that are known
        return True

    def planned(self, precision: str) -> Segments:
        """The updates to begin with."""
        steps = self.steps if precision == "float64" else min(self.steps, _LOW_STEPS)
        return [chosen_updates(epoch_of(self.workload, self.train_data), steps)]


def parity_case(
    workload: Workload,
    train_data: Any,
    eval_data: Any,
    steps: int,
    *,
    is_quick: bool = False,
    is_cached: bool = False,
    reference: Layout | None = None,
) -> ParityCase:
    """The workload as it is checked: few updates that still cross an epoch and a ragged batch.

    Exact dropout stays on; where torch draws the masks it is set to 0.
    """
    is_exact, quiet = workload.dropout == "exact", workload
    with wrap_user_errors():
        model = _look(workload, reference)
        num_dropouts = count_dropouts(model) if is_exact else _without_dropout(model)
    if not is_exact:
        quiet = changed(workload, model=lambda *devices: _quiet(workload.model(*devices)))
    steps = min(steps, planned_updates(workload, train_data))
    is_on = "compared with dropout on" if is_exact else "dropout set to 0"
    notes = [f"{is_on} in {num_dropouts} modules"] if num_dropouts else []
    if is_quick:
        notes.append(f"quick: left out are the layout's own precision, and updates after {min(steps, QUICK_STEPS)}")
        steps = min(steps, QUICK_STEPS)
    ends = _ends(eval_data, workload.eval_batch or workload.global_batch)
    if isinstance(ends, _Ends):
        notes.append(f"evaluated: {len(ends)} of {len(eval_data)} samples, the first and the last")
    return ParityCase(
        quiet,
        train_data,
        eval_data,
        ends,
        steps,
        notes,
        has_batch_norm(model),
        is_quick=is_quick,
        is_cached=is_cached and reference is None,
        reference=reference,
    )


def _look(workload: Workload, reference: Layout | None) -> nn.Module:
    return on_meta(workload) if reference is not None and reference.read(BuildOptions).meta else on_cpu(workload)


def chosen_updates(epoch: Epoch, steps: int) -> list[Update]:
    """`steps` updates: the first of epoch 0, its last (which may be ragged), and the first of epoch 1.

    The order of samples is a function of seed, epoch and step alone, so the updates between can be left out.
    """
    per_epoch = epoch.updates
    if per_epoch <= steps // 2 or steps < 3:
        return list(all_updates(steps, per_epoch))
    first = steps // 2 - 1
    places = [(0, index) for index in range(first)] + [(0, per_epoch - 1)]
    places += [(1, index) for index in range(steps - first - 1)]
    return [Update(step, epoch, index) for step, (epoch, index) in enumerate(places)]


def single_like(case: ParityCase, layout: Layout, precision: str, world_size: int) -> Layout:
    """The layout of one process with the mathematics of `layout` on so many ranks, in this precision.

    That is `single`, or the layout that stands in for it, unless `layout` changes the mathematics: then its own
    simulation. With batch norm, cutting a batch into micro-batches is another mathematics, too: then `single` does it.
    Where the whole batch does not fit it is cut as well, but not as the layout does: a loss that is a mean over what
    it gets would be the same in equal parts.

    Raises `LayoutError` for a reference that is none for this layout.
    """
    if case.reference is not None:
        check_reference(layout, case.reference, world_size)
    if not layout.is_exact and case.reference is not None:
        raise UnsupportedLayoutError(
            f"layout {layout} changes the mathematics: it is compared with its simulation in one process; leave out "
            "--reference"
        )
    if not layout.is_exact:
        return dataclasses.replace(layout.simulation(world_size), precision=precision)
    single = case.reference or Layout("single")
    accumulate = max(single.accumulate, case.accumulate)
    if case.has_batch_norm:
        accumulate = layout.accumulate
    elif case.accumulate > 1:
        sizes = layout.mesh(world_size)
        parts = layout.accumulate * math.prod(size for axis, size in sizes.items() if axis in SAMPLE_AXES)
        accumulate += parts == accumulate
    return dataclasses.replace(single, accumulate=accumulate, precision=precision)


def _ends(data: Any, batch: int) -> Any:
    """The first and the last batches of the evaluation data; all of it where it is not longer, or a stream."""
    if data is None or isinstance(data, Streamed):
        return data
    length, some = len(data), max(_EVAL_BATCHES, -(-_EVAL_SAMPLES // batch)) * batch
    last = -(-length // batch) * batch - some  # where the last batches begin, the ragged one with them
    return _Ends(data, [*range(some), *range(last, length)]) if last > some else data


class _Ends(Dataset[Any]):
    """Some samples of a dataset."""

    def __init__(self, dataset: Any, samples: Sequence[int]) -> None:
        self.dataset, self.samples = dataset, samples
        self.deterministic = getattr(dataset, "deterministic", False)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.samples[index]]


def _quiet(model: nn.Module) -> nn.Module:
    _without_dropout(model)
    return model


def _without_dropout(model: nn.Module) -> int:
    """Set every dropout to 0; how many modules that changed."""
    changed = 0
    for module in model.modules():
        for name in ("p",) if isinstance(module, nn.modules.dropout._DropoutNd) else ("dropout",):  # pyright: ignore[reportPrivateUsage]
            value = getattr(module, name, None)
            if isinstance(value, float) and value > 0:
                setattr(module, name, 0.0)
                changed += 1
    return changed


def by_gradient(workload: Workload) -> Workload:
    """The workload whose update is the gradient itself: plain SGD of learning rate 1."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=1.0)

    return changed(workload, optimizer=optimizer, schedule=None)
