"""Compare a layout with one device, and name the first divergence and its likely cause.

The rules (section 5 of the design, docs/parity.md):

- In float64 the loss of every update equals `single` to 1e-10 relative, the count of loss terms is equal, and each
  final tensor, relative to its largest element, is within ten times its noise floor: `single` against `single` with
  the samples of every micro-batch in reverse. (A parameter whose true gradient is zero, such as a key's bias, moves by
  noise alone under Adam, so no fixed tolerance is right.)
- The layout's own precision is compared too, within ten times the band of perturbed runs of `single`: samples
  reversed, and the initial weights moved by one unit in the last place of that precision.
- Ranks that hold whole replicas hold the same bits.
- Evaluation adds up to the same sums and counts.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from everyrank.collectives import all_equal, sum_over_ranks
from everyrank.data import Update, all_updates, updates_per_epoch
from everyrank.errors import CannotRunError, NotFiniteError
from everyrank.layout import Layout
from everyrank.parallel.build import has_batch_norm
from everyrank.record import Parity
from everyrank.strategies import prepare
from everyrank.train import blame_workload, evaluate, planned_updates, run_updates
from everyrank.workload import Workload
from everyrank.world import World, alone, on_rank_0, tell

__all__ = ["Subject", "Trace", "check_layout", "chosen_updates", "subject_of", "trace"]

_LOSS_BASE = {"float64": 1e-10, "float32": 1e-6, "bf16": 1e-3, "fp16": 1e-3}
_TENSOR_BASE = {"float64": 1e-12, "float32": 1e-6, "bf16": 1e-3, "fp16": 1e-3}
_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FLOOR_FACTOR = 10.0
_KEEP_BYTES = 2 << 30  # of states kept while looking for the first divergence


@dataclass(frozen=True)
class Trace:
    """What one run leaves: for each update the loss and the global count; evaluation; the final tensors.

    `states` holds the tensors before the first update and after each of the kept ones; on rank 0 only.
    """

    losses: list[float]
    counts: list[float]
    evaluation: dict[str, tuple[float, float]]
    final: dict[str, Tensor]
    replicas_equal: bool
    states: list[dict[str, Tensor]]


@dataclass
class Subject:
    """What is compared: a workload with its data, the updates to run, and the runs of `single` made so far."""

    workload: Workload
    train_data: Any
    eval_data: Any
    updates: list[Update]
    notes: list[str]
    has_batch_norm: bool
    references: dict[tuple[str, int], list[Trace]] = field(default_factory=dict[tuple[str, int], list[Trace]])


def subject_of(workload: Workload, train_data: Any, eval_data: Any, steps: int) -> Subject:
    """The workload as it is checked: dropout set to 0, and few updates that still cross an epoch and a ragged batch."""
    with blame_workload():
        model = workload.model()
        num_dropouts = _without_dropout(model)
    quiet = dataclasses.replace(workload, model=lambda: _quiet(workload.model()))
    steps = min(steps, planned_updates(workload, len(train_data)))
    updates = chosen_updates(len(train_data), workload.global_batch, steps)
    notes = [f"dropout set to 0 in {num_dropouts} modules"] if num_dropouts else []
    return Subject(quiet, train_data, eval_data, updates, notes, has_batch_norm(model))


def chosen_updates(length: int, global_batch: int, steps: int) -> list[Update]:
    """`steps` updates: the first of epoch 0, its last (which may be ragged), and the first of epoch 1.

    The order of samples is a function of seed, epoch and step alone, so the updates between can be left out.
    """
    per_epoch = updates_per_epoch(length, global_batch)
    if per_epoch <= steps // 2 or steps < 3:
        return list(all_updates(steps, per_epoch))
    first = steps // 2 - 1
    places = [(0, index) for index in range(first)] + [(0, per_epoch - 1)]
    places += [(1, index) for index in range(steps - first - 1)]
    return [Update(step, epoch, index) for step, (epoch, index) in enumerate(places)]


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


def trace(
    subject: Subject,
    layout: Layout,
    world: World,
    reverse: bool = False,
    jitter: int = 0,
    updates: Sequence[Update] | None = None,
    keep: int = 0,
) -> Trace:
    """Run the updates under `layout`. A collective over `world`.

    `reverse` turns the samples round within each micro-batch, a `jitter` above 0 moves the initial weights by one
    unit in the last place, up or down as that seed says; `keep` is after how many updates (from the first) the tensors are kept.
    """
    workload = subject.workload
    if jitter:
        step = torch.finfo(_DTYPES[layout.precision]).eps
        workload = dataclasses.replace(workload, model=lambda: _moved(subject.workload.model(), step, jitter))
    updates = subject.updates if updates is None else updates
    with blame_workload():
        prepared = prepare(workload, layout, world)
    states = [prepared.state()] if keep else []
    shares: list[Tensor] = []
    for share in run_updates(workload, subject.train_data, layout, world, prepared, updates, reverse):
        shares.append(share)
        if len(states) <= keep and keep:
            states.append(prepared.state())
    is_shared = prepared.reads.count > 1
    totals = sum_over_ranks(torch.stack(shares), world) if is_shared else torch.stack(shares).cpu()
    evaluation: dict[str, tuple[float, float]] = {}
    if subject.eval_data is not None and not keep:
        evaluation = evaluate(workload, subject.eval_data, layout, world, prepared)
    tensors = [*prepared.model.parameters(), *prepared.model.buffers()] if prepared.replicas and is_shared else []
    replicas_equal = all_equal(tensors, world) if is_shared else True
    final = prepared.state()
    del prepared
    gc.collect()
    return Trace(
        losses=[total / count if count else float("nan") for total, count in totals.tolist()],
        counts=totals[:, 1].tolist(),
        evaluation=evaluation,
        final=final,
        replicas_equal=replicas_equal,
        states=states,
    )


@torch.no_grad()
def _moved(model: nn.Module, step: float, seed: int) -> nn.Module:
    """The model with each weight multiplied by 1 + step, 1 or 1 - step."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        signs = torch.randint(-1, 2, parameter.shape, generator=generator)
        parameter.mul_(1 + step * signs)
    return model


def check_layout(subject: Subject, layout: Layout, world: World, key: str) -> tuple[Parity, list[float]]:
    """Compare `layout` with `single`: the outcome, and the losses in the layout's own precision, on every rank.

    `key` is a name used once. A layout that cannot run here is `not_verified`, with the reason.
    """
    checks = list(subject.notes)
    result = Parity("equal", bitwise=True)
    losses: list[float] = []
    for precision in dict.fromkeys(["float64", layout.precision]):
        variant = dataclasses.replace(layout, precision=precision)
        try:
            run = _trace_in_place(subject, variant, world, f"{key}/{precision}")
        except CannotRunError as error:
            return Parity("not_verified", reason=str(error), checks=checks), []
        finding = on_rank_0(
            world, f"{key}/{precision}/compare", lambda: _compare_with_single(subject, variant, world, run)  # noqa: B023
        )
        outcome = tell(world, f"{key}/{precision}/outcome", "" if finding is None else str(int(finding.is_equal)))
        losses = run.losses if run is not None else []
        if outcome == "0":
            cause = _locate(subject, variant, world, f"{key}/{precision}", finding)
            if finding is not None:
                result = _failed(finding, precision, checks, cause)
            else:
                result = Parity("different")
            break
        if finding is not None:
            checks.append(f"{precision}: {finding.text}")
            if precision == "float64":
                result = Parity(
                    "equal",
                    bitwise=finding.loss_difference == 0.0,
                    max_relative_difference=finding.loss_difference,
                    tolerance=finding.loss_tolerance,
                )
    if result.status == "equal":
        result = dataclasses.replace(result, checks=checks)
    return result, losses


def _trace_in_place(subject: Subject, layout: Layout, world: World, key: str, **options: Any) -> Trace | None:
    """`trace` where the layout runs: on all ranks, or on rank 0 alone while the others wait (None there)."""
    if layout.axis is not None:
        return trace(subject, layout, world, **options)
    return on_rank_0(world, f"{key}/alone", lambda: trace(subject, layout, alone(world), **options))


@dataclass(frozen=True)
class _Finding:
    """How a run compares with `single`. Update and tensor are those of the first difference beyond tolerance."""

    is_equal: bool
    loss_difference: float
    loss_tolerance: float
    text: str
    what: str = ""
    update: int = -1
    cause: str | None = None


def _references(subject: Subject, layout: Layout, world: World) -> list[Trace]:
    """`single` in the precision of `layout`, then perturbed; run once for each precision. On rank 0."""
    # With batch norm, cutting a batch into micro-batches is another mathematics: then single does it too.
    accumulate = layout.accumulate if subject.has_batch_norm else 1
    key = (layout.precision, accumulate)
    if key not in subject.references:
        single = Layout("single", accumulate=accumulate, precision=layout.precision)
        here = alone(world)
        runs = [trace(subject, single, here), trace(subject, single, here, reverse=True)]
        if layout.precision != "float64":
            runs += [trace(subject, single, here, jitter=seed) for seed in (1, 2, 3)]
        subject.references[key] = runs
    return subject.references[key]


def _compare_with_single(subject: Subject, layout: Layout, world: World, run: Trace | None) -> _Finding:
    assert run is not None, "rank 0 takes part in every run"
    single, *perturbed = _references(subject, layout, world)
    return compare(single, perturbed, run, layout.precision, subject.updates)


def compare(
    single: Trace, perturbed: Sequence[Trace], run: Trace, precision: str, updates: Sequence[Update]
) -> _Finding:
    """Hold a run against `single` by the rules above. Pure arithmetic."""
    base = _LOSS_BASE[precision]
    floors = list(
        itertools.accumulate(
            (max(_relative(a, trace.losses[i]) for trace in perturbed) for i, a in enumerate(single.losses)), max
        )
    )
    tolerances = [base if precision == "float64" else max(base, _FLOOR_FACTOR * floor) for floor in floors]
    differences = [_relative(a, b) for a, b in zip(single.losses, run.losses, strict=True)]
    loss_difference, loss_tolerance = max(differences), max(tolerances)

    def differs(what: str, update: int, cause: str | None = None) -> _Finding:
        return _Finding(False, loss_difference, loss_tolerance, "", what, update, cause)

    for index, (here, there) in enumerate(zip(single.counts, run.counts, strict=True)):
        if _relative(here, there) > 1e-6:
            return differs(f"update {index}, count of loss terms", index, _count_cause(here, there))
    if precision == "float64" and floors[-1] > 1e-8:
        return differs(
            "single itself",
            -1,
            f"with the samples of each batch in reverse, single's own loss differs by {floors[-1]:.1e}: the model draws "
            "random numbers (dropout as a function?), or the loss is no sum over samples",
        )
    for index, (difference, tolerance) in enumerate(zip(differences, tolerances, strict=True)):
        if not difference <= tolerance:  # NaN differs from everything
            return differs(f"update {index}, loss", index)
    if not run.replicas_equal:
        return differs("the replicas", len(updates) - 1, "ranks hold different weights: each one trained alone")
    worst = 0.0
    for name, tensor in single.final.items():
        floor = max(_tensor_difference(tensor, trace.final[name]) for trace in perturbed)
        tolerance = max(_TENSOR_BASE[precision], _FLOOR_FACTOR * floor)
        difference = _tensor_difference(tensor, run.final.get(name))
        worst = max(worst, difference)
        if not difference <= tolerance:
            return differs(f"update {len(updates) - 1}, tensor {name}", len(updates) - 1)
    for name, (total, count) in single.evaluation.items():
        run_total, run_count = run.evaluation[name]
        if _relative(count, run_count) > 1e-12:
            return differs(
                f"evaluation, count of {name}", -1, f"{name} counted {run_count:g} terms, in one process {count:g}"
            )
        spread = max(_relative(total, trace.evaluation[name][0]) for trace in perturbed)
        if precision == "float64" and _relative(total, run_total) > max(1e-9, _FLOOR_FACTOR * spread):
            return differs(f"evaluation, sum of {name}", -1)
    text = (
        f"{len(differences)} losses differ by at most {loss_difference:.1e} (tolerance {loss_tolerance:.1e}), "
        f"{len(single.final)} tensors by at most {worst:.1e} (within ten noise floors)"
    )
    return _Finding(True, loss_difference, loss_tolerance, text)


def _relative(reference: float, value: float) -> float:
    if reference == value:
        return 0.0
    difference = abs(value - reference) / max(abs(reference), 1e-300)
    return difference if difference == difference else float("inf")


def _tensor_difference(reference: Tensor, value: Tensor | None) -> float:
    """The largest difference, relative to the largest element of the reference; inf for another shape or NaN."""
    if value is None or value.shape != reference.shape:
        return float("inf")
    if reference.numel() == 0 or torch.equal(reference, value):
        return 0.0
    wide, other = reference.double(), value.double()
    difference = float((wide - other).abs().max() / wide.abs().max().clamp(min=1e-300))
    return difference if difference == difference else float("inf")


def _count_cause(single: float, run: float) -> str:
    return (
        f"the loss counted {run:g} terms over all ranks, and {single:g} in one process: it returns a mean over its own "
        "slice (a local mean); return (the sum over the terms, the number of terms)"
    )


def _failed(finding: _Finding, precision: str, checks: list[str], located: tuple[str, str | None]) -> Parity:
    first, cause = located
    return Parity(
        "different",
        bitwise=False,
        max_relative_difference=finding.loss_difference,
        tolerance=finding.loss_tolerance,
        first_divergence=f"{first} ({precision})",
        cause=finding.cause or cause,
        checks=checks,
    )


def _locate(
    subject: Subject, layout: Layout, world: World, key: str, finding: _Finding | None
) -> tuple[str, str | None]:
    """Run again, keeping the tensors, up to the update where the losses parted: the first tensor and the cause."""
    text = tell(world, f"{key}/until", None if finding is None else f"{finding.update} {finding.cause is not None}")
    until, known = int(text.split()[0]), text.endswith("True")
    if known or until < 0:
        return (finding.what, None) if finding else ("", None)
    size = sum(p.numel() * p.element_size() for p in subject.workload.model().parameters())
    until = min(until + 1, max(1, _KEEP_BYTES // (3 * size)))
    updates = subject.updates[:until]
    options: dict[str, Any] = {"updates": updates, "keep": until}
    run = _trace_in_place(subject, layout, world, f"{key}/located", **options)

    def look() -> tuple[str, str | None]:
        assert run is not None
        assert finding is not None
        accumulate = layout.accumulate if subject.has_batch_norm else 1
        single = Layout("single", accumulate=accumulate, precision=layout.precision)
        reference = trace(subject, single, alone(world), **options)
        reverse = trace(subject, single, alone(world), reverse=True, **options)
        first = _first_difference(reference.states, reverse.states, run.states, layout.precision)
        return (_where(*first) if first else finding.what), _cause(
            subject, updates, reference, run, first, world.size
        )

    return on_rank_0(world, f"{key}/look", look) or ("", None)


def _first_difference(
    reference: list[dict[str, Tensor]], reverse: list[dict[str, Tensor]], run: list[dict[str, Tensor]], precision: str
) -> tuple[int, str] | None:
    """(number of updates done, name) of the first tensor beyond its tolerance."""
    for done, (here, floor, there) in enumerate(zip(reference, reverse, run, strict=True)):
        for name, tensor in here.items():
            tolerance = max(_TENSOR_BASE[precision], _FLOOR_FACTOR * _tensor_difference(tensor, floor[name]))
            if not _tensor_difference(tensor, there.get(name)) <= tolerance:
                return done, name
    return None


def _where(done: int, name: str) -> str:
    return f"before any update, tensor {name}" if done == 0 else f"update {done - 1}, tensor {name}"


def _cause(
    subject: Subject,
    updates: Sequence[Update],
    reference: Trace,
    run: Trace,
    first: tuple[int, str] | None,
    size: int,
) -> str | None:
    """The likely cause, from what differs first."""
    if first is None:
        return None
    done, name = first
    if done == 0:
        return "the ranks did not start from the same weights: building the model draws on something unseeded"
    index = done - 1
    if _relative(reference.losses[index], run.losses[index]) > 1e-8:
        if updates[index].epoch > 0 and index and updates[index - 1].epoch == 0:
            return "it begins with the second epoch: the epoch does not reach the order of the samples (set_epoch)"
        names = "batch norm over one rank's samples only, or " if subject.has_batch_norm else ""
        return f"the loss differs before the weights do: {names}ranks that do not read the samples they should"
    if not run.replicas_equal:
        return "ranks hold different weights: gradients are not added up over the ranks"
    if "running_" in name or "num_batches_tracked" in name:
        return "only batch norm differs: its statistics are not those of all ranks"
    ratio = _update_ratio(reference.states[done - 1 : done + 1], run.states[done - 1 : done + 1])
    if size > 1 and abs(ratio / size - 1) < 0.05:
        return f"the update is {ratio:.3g} times that of one device, the number of ranks: sum where the mean is meant"
    if size > 1 and abs(ratio * size - 1) < 0.05:
        return f"the update is {ratio:.3g} times that of one device: divided by the number of ranks once too often"
    if index and len(set(reference.counts)) > 1 and reference.counts[index] != reference.counts[index - 1]:
        return "it begins with an update of another size: the gradients are not normalised by the global count"
    return "the gradients that reach the optimizer are not the sum over all samples of the global batch"


def _update_ratio(reference: list[dict[str, Tensor]], run: list[dict[str, Tensor]]) -> float:
    """How many times larger the update of `run` is, by least squares over all floating-point tensors."""
    product = square = 0.0
    for name, before in reference[0].items():
        if before.is_floating_point() and "running_" not in name:
            own = (reference[1][name] - before).double()
            other = (run[1][name] - run[0][name]).double()
            product += float((own * other).sum())
            square += float((own * own).sum())
    return product / square if square else 1.0
