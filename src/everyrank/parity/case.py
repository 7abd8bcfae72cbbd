"""The workload without dropout, its data, and the few updates that a check compares."""

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

__all__ = [
    "QUICK_STEPS",
    "ParityCase",
    "Segments",
    "chosen_updates",
    "parity_case",
    "single_like",
    "with_gradient_update",
]

Segments = list[list[Update]]
"""Updates to run. Each segment starts from the initial state."""

QUICK_STEPS = 6
_LOW_PRECISION_STEPS = 8  # in lower precision, rounding errors hide most mistakes after more updates
_EVAL_BATCHES = 4  # batches from each end of the evaluation data
_EVAL_SAMPLES = 32  # minimum number of samples from each end


@dataclass
class ParityCase:
    """A workload with its data, the updates to run, and the runs of `single` so far.

    eval_ends    the first and last batches of the evaluation data, which are evaluated; the whole of a stream
    segments     layout of `single` as text -> the updates that can be compared
    from_disk    layouts of `single` whose run was read from the cache
    names        layout of `single` -> its file in the cache
    references   layout of `single` -> its `Reference`, on rank 0 only
    compares_gradients   the optimizer is replaced by one whose update is the gradient, because the learning rate is 0
                 and nothing moves, or for a custom parallelize function
    gradient_case   this case with such an optimizer; made at the first call of `gradient_case`
    reference    the layout that substitutes `single` if one device cannot hold the model
    accumulate   micro-batches of `single` if the whole batch does not fit
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
    compares_gradients: bool = False
    segments: dict[str, Segments] = field(default_factory=dict[str, Segments])
    from_disk: set[str] = field(default_factory=set[str])
    names: dict[str, str | None] = field(default_factory=dict[str, Any])
    references: dict[str, Any] = field(default_factory=dict[str, Any])
    gradient_case: ParityCase | None = None
    reference: Layout | None = None
    accumulate: int = 1

    def build_for_inspection(self) -> nn.Module:
        """Build the model to inspect its modules; on the meta device if no rank can hold all of it."""
        return _build_for_inspection(self.workload, self.reference)

    def precisions(self, layout: Layout) -> list[str]:
        """Return the precisions to compare a layout in: float64 and its own."""
        return ["float64"] if self.is_quick else list(dict.fromkeys(["float64", layout.precision]))

    def forget_cached(self, single: str) -> bool:
        """Drop all runs that came from the cache if this layout's is one of them, so that `single` runs again."""
        if single not in self.from_disk:
            return False
        for layout_text in self.from_disk:
            self.segments.pop(layout_text)
            self.references.pop(layout_text, None)
        self.from_disk.clear()
        self.is_cached = False  # stop reading; new runs are still written under the names in `names`
        return True

    def planned(self, precision: str) -> Segments:
        """Return the updates to try first, as one segment."""
        steps = self.steps if precision == "float64" else min(self.steps, _LOW_PRECISION_STEPS)
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
    """Prepare a workload for the check: a few updates that include the end of an epoch and an uneven last batch.

    Exact dropout stays on. Dropout whose masks torch draws is set to 0.
    """
    is_exact, workload_without_dropout = workload.dropout == "exact", workload
    with wrap_user_errors():
        model = _build_for_inspection(workload, reference)
        num_dropouts = count_dropouts(model) if is_exact else _without_dropout(model)
    if not is_exact:
        workload_without_dropout = changed(workload, model=lambda *devices: _drop_dropout(workload.model(*devices)))
    steps = min(steps, planned_updates(workload, train_data))
    dropout_text = "compared with dropout on" if is_exact else "dropout set to 0"
    notes = [f"{dropout_text} in {num_dropouts} modules"] if num_dropouts else []
    if is_quick:
        notes.append(f"quick: left out are the layout's own precision, and updates after {min(steps, QUICK_STEPS)}")
        steps = min(steps, QUICK_STEPS)
    eval_ends = _ends(eval_data, workload.eval_batch or workload.global_batch)
    if isinstance(eval_ends, _Ends):
        notes.append(f"evaluated: {len(eval_ends)} of {len(eval_data)} samples, the first and the last")
    return ParityCase(
        workload_without_dropout,
        train_data,
        eval_data,
        eval_ends,
        steps,
        notes,
        has_batch_norm(model),
        is_quick=is_quick,
        is_cached=is_cached and reference is None,
        reference=reference,
    )


def _build_for_inspection(workload: Workload, reference: Layout | None) -> nn.Module:
    return on_meta(workload) if reference is not None and reference.read(BuildOptions).meta else on_cpu(workload)


def chosen_updates(epoch: Epoch, steps: int) -> list[Update]:
    """Choose `steps` updates: the first of epoch 0, its last (perhaps uneven) one, and the first of epoch 1.

    The updates in between can be skipped: the sample order depends only on seed, epoch and step.
    """
    per_epoch = epoch.updates
    if per_epoch <= steps // 2 or steps < 3:
        return list(all_updates(steps, per_epoch))
    num_first = steps // 2 - 1
    positions = [(0, index) for index in range(num_first)] + [(0, per_epoch - 1)]
    positions += [(1, index) for index in range(steps - num_first - 1)]
    return [Update(step, epoch, index) for step, (epoch, index) in enumerate(positions)]


def single_like(case: ParityCase, layout: Layout, precision: str, world_size: int) -> Layout:
    """Return the one-process layout that should train the same model as `layout` on `world_size` ranks.

    This is `single` or its substitute. For a different algorithm, such as local SGD, it is the simulation. With batch
    norm, micro-batches change the result, so `single` uses as many as the layout. If the whole batch does not fit,
    `single` uses micro-batches too, but of a different number than the layout's parts: with equal parts, a loss that
    wrongly takes a local mean would also agree.

    Raises `LayoutError` for a reference that does not suit this layout.
    """
    if case.reference is not None:
        check_reference(layout, case.reference, world_size)
    if not layout.is_exact and case.reference is not None:
        raise UnsupportedLayoutError(
            f"layout {layout} is not equivalent to one device, and is compared with its simulation; leave out "
            "--reference"
        )
    if not layout.is_exact:
        if layout.axis is None and world_size == 1:  # dataparallel takes all devices
            world_size = max(1, torch.cuda.device_count())
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
    """Return the first and last batches of the evaluation data, or all of it if it is short or a stream."""
    if data is None or isinstance(data, Streamed):
        return data
    length, num_at_each_end = len(data), max(_EVAL_BATCHES, -(-_EVAL_SAMPLES // batch)) * batch
    start_of_last = -(-length // batch) * batch - num_at_each_end  # start of the last batches, including the uneven one
    return (
        _Ends(data, [*range(num_at_each_end), *range(start_of_last, length)])
        if start_of_last > num_at_each_end
        else data
    )


class _Ends(Dataset[Any]):
    """A dataset with a subset of the samples of another dataset."""

    def __init__(self, dataset: Any, samples: Sequence[int]) -> None:
        self.dataset, self.samples = dataset, samples
        self.deterministic = getattr(dataset, "deterministic", False)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.samples[index]]


def _drop_dropout(model: nn.Module) -> nn.Module:
    _without_dropout(model)
    return model


def _without_dropout(model: nn.Module) -> int:
    """Set every dropout to 0, also probabilities of functions. Return the number of changed modules."""
    num_changed = 0
    for module in model.modules():
        names = [
            name
            for name, value in vars(module).items()
            if isinstance(value, float) and value > 0 and _is_dropout(module, name)
        ]
        for name in names:
            setattr(module, name, 0.0)
        num_changed += bool(names)
    return num_changed


def _is_dropout(module: nn.Module, attribute: str) -> bool:
    """Whether an attribute is a probability of dropout.

    For example `Dropout.p`, `LSTM.dropout`, `LlamaAttention.attention_dropout` of transformers, `DropPath.drop_prob` of
    timm, or `StochasticDepth.p` of torchvision.
    """
    is_dropout_module = (
        isinstance(module, nn.modules.dropout._DropoutNd)  # pyright: ignore[reportPrivateUsage]
        or type(module).__name__ == "StochasticDepth"
    )
    return "drop" in attribute.lower() or (attribute == "p" and is_dropout_module)


def with_gradient_update(workload: Workload) -> Workload:
    """Return the workload with SGD of learning rate 1, so that an update equals the gradient."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1.0)

    return changed(workload, optimizer=optimizer, schedule=None)
