"""Checks that the same batches, random numbers and weights give the same updates on N ranks and on one rank.

The first difference is reported, with the line where it begins.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from everyrank.audit.finding import Findings, short_location
from everyrank.relations.lines import DifferingLine, first_differing, first_scaled
from everyrank.relations.numbers import (
    as_reals,
    constant_factor,
    first_different_rates,
    join_ranks,
    relative_difference,
    tolerance_of,
)
from everyrank.relations.objects import lines_of_state
from everyrank.relations.printed import evaluates, judge_printed
from everyrank.relations.samples import samples_of_batch
from everyrank.relations.schedule import is_scaled_by_ranks
from everyrank.rerun import Imposed, RankRecording, RecordedUpdate, ScriptRecording

__all__ = [
    "comparable_updates",
    "judge_evaluations",
    "judge_ranks",
    "misses_evaluation",
    "num_comparable",
    "num_with_same_inputs",
]

_MAX_BATCHES = 8  # to compare, to find whether all ranks read the same samples
_EVALUATES = (".eval()", "inference_mode", "validat", "evaluat")  # in the text of a script
_INTEGER_DRAWS = {"randint", "randperm", "multinomial"}
_ROW_TOLERANCE = 1e-5
_HOOK_TOLERANCE = 0.03  # relative, for a communication hook that compresses gradients
_SMALL_DIFFERENCE = 0.02  # of the norm, as for gradients that are rounded to 8 bits
# of compressed gradients: zeros that one rank does not have, numbers that are enough to tell, rounded ones
_EXTRA_ZERO_SHARE, _MIN_NONZERO, _ROUNDED_SHARE = 0.05, 32, 0.5
_NO_LIMIT = 10**9
_FACTOR_TOLERANCE = 1e-6  # of the factor by which a learning rate is scaled


class _NotComparedError(Exception):
    """Two runs cannot be compared, for this reason."""


class _OtherInputsError(_NotComparedError):
    """The model is given other numbers on one rank."""


@dataclasses.dataclass(frozen=True)
class _Case:
    many: ScriptRecording
    single: RankRecording
    num_updates: int
    tolerance: float
    limit: str  # why later updates cannot be compared

    @property
    def num_ranks(self) -> int:
        return len(self.many.ranks)

    @functools.cached_property
    def local(self) -> frozenset[str]:
        """Parameters that differ between ranks at the start while others are equal, such as local experts."""
        first_values = [rank.updates[0].before for rank in self.many.ranks]
        common = [name for name in first_values[0] if all(name in each for each in first_values)]
        drifting = {
            name
            for name in common
            if any(
                each[name].shape == first_values[0][name].shape
                and relative_difference(each[name], first_values[0][name]) > _ROW_TOLERANCE
                for each in first_values[1:]
            )
        }
        return frozenset(drifting) if len(drifting) < len(common) else frozenset()

    def pairs(self, update: int) -> tuple[list[RecordedUpdate], RecordedUpdate]:
        return [rank.updates[update] for rank in self.many.ranks], self.single.updates[update]


def comparable_updates(many: ScriptRecording, single: RankRecording) -> int:
    """The number of first updates with the same numbers of batches and backwards in all runs."""
    runs = [rank.updates for rank in (*many.ranks, single)]
    count = 0
    for updates in zip(*runs, strict=False):
        if len({(update.batches, len(update.losses)) for update in updates}) > 1:
            break
        count += 1
    return count


def num_comparable(many: ScriptRecording, single: ScriptRecording) -> tuple[int, bool]:
    """(number of first updates that can be compared, whether all later updates can be compared, too)."""
    try:
        case = _make_case(many, single)
    except _NotComparedError:
        return 0, False
    return case.num_updates, not case.limit


def num_with_same_inputs(many: ScriptRecording, single: ScriptRecording) -> int:
    """The number of first updates in which one rank's model gets the samples of all ranks, by sums of the inputs."""
    of_ranks, of_one = ([rank.facts.get("input_sums", {}) for rank in run.ranks] for run in (many, single))
    for update, sums in of_one[0].items():
        rank_sums = [sums_of_rank.get(update, []) for sums_of_rank in of_ranks]
        if any(len(each) != len(sums) for each in rank_sums):
            return update
        for index, number in enumerate(sums):
            numbers = [each[index] for each in rank_sums]
            margin = 1e-4 * max(1.0, *map(abs, numbers))
            is_same = all(abs(each - number) <= margin for each in numbers)
            if not is_same and abs(sum(numbers) - number) > margin:
                return update
    return len(single.ranks[0].updates)


def judge_ranks(
    many: ScriptRecording,
    single: ScriptRecording,
    rank_0_alone: ScriptRecording | None,
    run_alone: Callable[[Imposed], ScriptRecording],
    findings: Findings,
) -> int:
    """Add the differences to `findings`, or why the runs cannot be compared. Returns the number of equal updates.

    many          the script on N ranks
    single        the script on one rank, with the batches, random numbers and learning rates of `many`
    rank_0_alone  the script on one rank, with only rank 0's batches and the parameters of `many`, for local numbers
    run_alone     runs the script on one rank again, for numbers of rank 0's evaluation and of other ranks
    """
    try:
        case = _make_case(many, single)
    except _NotComparedError as error:
        if isinstance(error, _OtherInputsError) and _scaled_inputs(many, single.ranks[0], findings):
            return 0
        findings.add_unchecked(f"{len(many.ranks)} ranks against one: not compared, because {error}")
        return 0
    if case.limit:
        findings.add_unchecked(f"updates after the first {case.num_updates} against one rank: {case.limit}")
    _judge_draws(case, findings)
    by_gradient, by_rate = Findings(), Findings()
    differs = _judge_gradients(case, by_gradient)
    changed = _judge_rates(case, by_rate, case.num_updates if differs is None else differs + 1)
    findings.extend(by_gradient if changed is None else by_rate)  # the rate comes first: it moves the parameters
    for reason in by_gradient.unchecked:
        findings.add_unchecked(reason)
    differs = differs if changed is None else changed
    _judge_states(case, findings, differs if differs is not None else case.num_updates)
    if differs is None and rank_0_alone is not None and not rank_0_alone.failure:
        judge_printed(many, case.single, rank_0_alone.ranks[0], run_alone, case.num_updates, case.tolerance, findings)
    return case.num_updates if differs is None else differs


def judge_evaluations(
    many: ScriptRecording,
    single: ScriptRecording,
    rank_0_alone: ScriptRecording,
    run_alone: Callable[[Imposed], ScriptRecording],
    findings: Findings,
) -> None:
    """Add printed numbers that differ, if the updates of both runs are equal.

    The arguments are those of `judge_ranks`.
    """
    all_findings = Findings()
    if judge_ranks(many, single, rank_0_alone, run_alone, all_findings):
        findings.extend(finding for finding in all_findings if finding.rule == "ranks.printed")
    else:
        for reason in all_findings.unchecked:
            findings.add_unchecked(f"numbers of evaluations: {reason}")


def misses_evaluation(many: ScriptRecording, text: str) -> bool:
    """Whether a run of a script with this source was ended before it reached an evaluation."""
    rank = many.ranks[0]
    if rank.facts.get("came_to_end") or evaluates(rank) or not rank.batches:
        return False
    is_unread = any(
        number not in rank.facts.get("training_loaders", []) for number in rank.facts.get("loader_places", {})
    )
    return is_unread or any(word in text for word in _EVALUATES)


def _make_case(many: ScriptRecording, single: ScriptRecording) -> _Case:
    """Check that the two runs can be compared. Raises `_NotComparedError`."""
    if many.failure:
        raise _NotComparedError(f"the script failed in the comparison on {len(many.ranks)} ranks ({many.failure})")
    recorded = single.ranks[0]
    limit, end = _first_refused(many, recorded)
    if single.failure and len(recorded.updates) < end:
        limit = f"the script does not run on one rank with the batches of all ({single.failure})"
        end = len(recorded.updates)
    if limit and not end:
        raise _NotComparedError(limit)
    if not all(rank.updates for rank in (*many.ranks, recorded)):
        raise _NotComparedError("no optimizer step was recorded")
    if _reads_same(many) and not _has_parts_of_model(many, recorded):
        raise _NotComparedError("all ranks read the same samples")
    num_updates = min(comparable_updates(many, recorded), end)
    if not num_updates:
        firsts = [rank.updates[0] for rank in (*many.ranks, recorded)]
        if firsts[0].batches != firsts[-1].batches or len(firsts[0].losses) != len(firsts[-1].losses):
            numbers = f"{len(firsts[0].losses)} backwards on each rank, {len(firsts[-1].losses)} on one"
            raise _NotComparedError(f"an update has different numbers of batches ({numbers})")
        raise _NotComparedError("ranks read different numbers of batches before their first update")
    _check_inputs(many, recorded)
    first = recorded.updates[0]
    tensors = [*first.gradients.values(), *first.before.values(), *(v.tensor for v in recorded.values.values())]
    tolerance = tolerance_of(tensors)
    if tolerance is None:
        raise _NotComparedError("the script computes in 16 bits")
    return _Case(many, recorded, num_updates, tolerance, limit)


def _first_refused(many: ScriptRecording, single: RankRecording) -> tuple[str, int]:
    """(reason, number of updates before it) of the first input that could not be imposed; ("", _NO_LIMIT) if none."""
    refused = [(update, reason) for rank in (*many.ranks, single) for reason, update in rank.facts.get("refused", [])]
    update, reason = min(refused, default=(_NO_LIMIT, ""))
    return reason, update


def _reads_same(many: ScriptRecording) -> bool:
    """Whether all ranks train on the same batches, like the members of an ensemble."""
    read: list[list[list[int]]] = []
    for rank in many.ranks:
        training_loaders = rank.facts.get("training_loaders", [])
        read.append(
            [samples_of_batch(batch) for key, batch, _ in rank.batches if key[0] in training_loaders][:_MAX_BATCHES]
        )
    return any(read[0]) and len(read) > 1 and all(of_rank == read[0] for of_rank in read[1:])


def _has_parts_of_model(many: ScriptRecording, single: RankRecording) -> bool:
    """Whether ranks have shards of the parameters of one rank, as in tensor parallelism."""
    first_values = many.ranks[0].updates[0].before
    return any(
        name in first_values and first_values[name].numel() < whole.numel()
        for name, whole in single.updates[0].before.items()
    )


def _check_inputs(many: ScriptRecording, single: RankRecording) -> None:
    """Check that the model gets the same samples and starts with the same weights. Raises `_NotComparedError`."""
    texts = [rank.facts.get("texts_given", []) for rank in many.ranks]
    if any(given != texts[0] for given in texts):
        raise _NotComparedError("each rank calls the model with a different text, such as the name of a task")
    inputs = [rank.inputs for rank in many.ranks]
    if any(len(given) != len(single.inputs) for given in inputs):
        raise _NotComparedError("the model runs a different number of times on one rank")
    for index, single_inputs in enumerate(single.inputs):
        rank_inputs = [given[index] for given in inputs]
        if any(len(rank_input) != len(single_inputs) for rank_input in rank_inputs):
            raise _NotComparedError("the model gets different arguments on one rank")
        for column, value in enumerate(single_inputs):
            values = [rank_input[column] for rank_input in rank_inputs]
            if all(relative_difference(each, value) < 1e-6 for each in values):
                continue
            # batch norm takes the rows of each rank by their order, and dropout masks are merged in the order of ranks
            num_rows = len(values[0]) if values[0].dim() else 0
            has_order = bool(single.facts.get("batch_norms")) or (num_rows > 0 and _draws_differ(many, num_rows))
            if not _are_parts(values, value, has_order):
                raise _OtherInputsError(
                    "the batches of the ranks do not come from a DataLoader, and could not be merged"
                )
    is_repeated = _repeats_samples(inputs, single.inputs) or _draws_same_samples(many, single)
    if is_repeated and _draws_differ(many):
        raise _NotComparedError("all ranks read the same samples, with different random numbers")
    first = single.updates[0]
    for name, weight in first.before.items():
        rank_inputs = [rank.updates[0].before.get(name) for rank in many.ranks]
        joined = join_ranks(rank_inputs, weight)
        if joined.tensor is not None and relative_difference(joined.tensor, weight) > 1e-6:
            raise _NotComparedError(f"{name} starts with different weights on one rank")


def _repeats_samples(inputs: list[list[list[Any]]], single_inputs: list[list[Any]]) -> bool:
    """Whether all ranks give the model the same samples, which one rank gets once for each rank."""
    import torch

    is_longer = any(
        value.shape != rank_value.shape
        for row, rank_row in zip(single_inputs, inputs[0], strict=True)
        for value, rank_value in zip(row, rank_row, strict=True)
    )
    return is_longer and all(
        rank_value.shape == value.shape and torch.equal(rank_value, value)
        for given in inputs[1:]
        for rank_row, row in zip(given, inputs[0], strict=True)
        for rank_value, value in zip(rank_row, row, strict=True)
    )


def _draws_same_samples(many: ScriptRecording, single: RankRecording) -> bool:
    """Whether all ranks of a script without a loader draw the same integers, such as the indices of its samples."""
    draws = [operation.split()[0] for _, operation, _ in single.facts.get("repeated", [])]
    return not many.ranks[0].batches and any(draw in _INTEGER_DRAWS for draw in draws)


def _draws_differ(many: ScriptRecording, num_rows: int = 1) -> bool:
    """Whether ranks draw different random numbers while training, in a multiple of `num_rows` rows, as dropout does."""
    import torch

    draws = [rank.draws for rank in many.ranks]
    for key, draw in draws[0].items():
        first = draw.tensor
        if not draw.is_training or not first.dim() or not len(first) or len(first) % num_rows:
            continue
        others = [each[key].tensor for each in draws[1:] if key in each]
        if any(other.shape != first.shape or not torch.equal(other, first) for other in others):
            return True
    return False


def _scaled_inputs(many: ScriptRecording, single: RankRecording, findings: Findings) -> bool:
    """Find the line before the model in which each rank multiplies or shifts its samples by a different number."""
    line = first_scaled(many, single)
    if line is None:
        return False
    has_factors = any(abs(factor - 1) > _ROW_TOLERANCE for factor in line.factors)
    numbers = ", ".join(f"{number:.6g}" for number in (line.factors if has_factors else line.shifts))
    findings.add(
        "WARN",
        "ranks.input",
        line.location,
        "with the same batches, the inputs of the model on the ranks are those on one rank "
        f"{'multiplied by' if has_factors else 'plus'} {numbers}",
        "compute this number from the data of all ranks, or on rank 0, and broadcast it",
        other_lines=(line.scalar_location,),
    )
    return True


def _are_parts(values: list[Any], value: Any, has_order: bool) -> bool:
    """Whether the inputs of ranks together are the input of one rank: by samples, or by parts of each sequence."""
    import torch

    for dim in range(value.dim()):
        shapes = {each.shape[:dim] + each.shape[dim + 1 :] for each in (*values, value) if each.dim() == value.dim()}
        if len(shapes) == 1 and sum(each.shape[dim] for each in values) == value.shape[dim]:
            return _are_rows_equal(torch.cat(values, dim), value, has_order or dim > 0)
    return False


def _are_rows_equal(rows: Any, others: Any, has_order: bool) -> bool:
    """Whether two batches have the same samples, in any order unless `has_order`, as for two views of each sample."""
    import torch

    if relative_difference(rows, others) <= _ROW_TOLERANCE or has_order or rows.dim() < 2:
        return relative_difference(rows, others) <= _ROW_TOLERANCE
    flat = [as_reals(each).flatten(1) for each in (rows, others)]
    weights = torch.linspace(1.0, 2.0, flat[0].shape[1], dtype=torch.float64).sqrt()  # one number for each sample
    in_order = [each[(each @ weights).argsort()] for each in flat]
    return relative_difference(*in_order) <= _ROW_TOLERANCE


# --- gradients and parameters


def _judge_gradients(case: _Case, findings: Findings) -> int | None:
    """Return the first update whose gradients or parameters differ, and add a finding; None if all are equal."""
    for update in range(case.num_updates):
        ranks, single = case.pairs(update)
        if not single.gradients:
            return None
        for kind, rule in (("gradients", "ranks.gradient"), ("after", "ranks.parameters")):
            names = _differing(case, ranks, single, kind)
            if names and _explains_hook(case, findings, update):
                return update
            if names:
                _report_difference(case, findings, update, kind, rule, names)
                return update
    return None


def _values(update: RecordedUpdate, kind: str) -> dict[str, Any]:
    return update.gradients if kind == "gradients" else update.after


def _differing(case: _Case, ranks: list[RecordedUpdate], single: RecordedUpdate, kind: str) -> dict[str, float]:
    """The relative difference of each tensor that differs from one rank, by name; -1 if the ranks differ, too."""
    import torch

    tolerance = case.tolerance * (1 if kind == "gradients" else 10)
    single_values = {
        name: tensor for name, tensor in _values(single, kind).items() if tensor is not None and tensor.numel()
    }
    if not single_values:
        return {}
    scale = max(float(torch.linalg.vector_norm(as_reals(tensor))) for tensor in single_values.values()) * 1e-4
    names: dict[str, float] = {}
    for name, tensor in single_values.items():
        parts = [_values(rank, kind).get(name) for rank in ranks]
        joined = join_ranks(parts, tensor)
        if joined.tensor is None:
            continue
        difference = relative_difference(joined.tensor, tensor, scale)
        if difference > tolerance:
            names[name] = difference if joined.is_same or name in case.local else -1.0
    return names


def _explains_hook(case: _Case, findings: Findings, update: int) -> bool:
    """Whether a communication hook explains a difference, which must not be a factor of the number of ranks."""
    hook = case.many.ranks[0].facts.get("comm_hook", "")
    if not hook:
        return False
    ranks, single = case.pairs(update)
    pairs = [(ranks[0].gradients.get(name), value) for name, value in single.gradients.items()]
    held = [
        (single_value, rank_value)
        for single_value, rank_value in pairs
        if single_value is not None and rank_value is not None
    ]
    factor = constant_factor(held, _HOOK_TOLERANCE) if held else None
    if factor is not None and any(
        math.isclose(factor, expected, rel_tol=_HOOK_TOLERANCE) for expected in (case.num_ranks, 1 / case.num_ranks)
    ):
        return False
    findings.add_unchecked(
        f"gradients of {case.num_ranks} ranks against one: the communication hook of {short_location(hook)} "
        "changes them"
    )
    return True


def _report_difference(
    case: _Case, findings: Findings, update: int, kind: str, rule: str, names: dict[str, float]
) -> None:
    ranks, single = case.pairs(update)
    quantity = "gradient" if kind == "gradients" else "value after the step"
    if any(difference < 0 for difference in names.values()):
        _report_unaveraged(case, findings, update, names, single)
        return
    worst = max(names, key=lambda name: names[name])
    text = (
        f"update {update}: with the same batches, {case.num_ranks} ranks and one rank differ in the {quantity} of "
        f"{worst} by {names[worst]:.2g} of its norm ({len(names)} of {len(single.gradients)} parameters differ)"
    )
    values = {name: value for name, value in _values(single, kind).items() if value is not None}
    wholes = {
        name: join_ranks([_values(rank, kind).get(name) for rank in ranks], value) for name, value in values.items()
    }
    pairs = [(wholes[name].tensor, value) for name, value in values.items() if wholes[name].tensor is not None]
    is_rounded = bool(case.many.ranks[0].facts.get("comm_hook"))
    differing = [(wholes[name].tensor, values[name]) for name in names if name in wholes]
    factor = constant_factor(differing, _HOOK_TOLERANCE if is_rounded else 1e-3) if kind == "gradients" else None
    reason, location, other_lines = _explained(case, update, kind, factor)
    changes = _rounded_or_small(pairs, names[worst]) if kind == "gradients" else ""
    if changes and not reason:
        findings.add_unchecked(f"gradients of {case.num_ranks} ranks against one: in update {update} {changes}")
        return
    if kind == "gradients" and not reason:
        line = first_differing(case.many, case.single, case.tolerance) if update == 0 else None
        reason, location, other_lines = (
            _begun_at(case, line) if line is not None else ("", single.step, list(single.backwards))
        )
    findings.add(
        "WARN",
        rule,
        location,
        f"{text}: {reason or 'no rule explains it'}",
        "make the computation the same on any number of ranks, or ignore this if ranks are intended to differ",
        other_lines=tuple(other_lines),
    )


def _explained(case: _Case, update: int, kind: str, factor: float | None) -> tuple[str, str, list[str]]:
    """(reason, line, further lines) of a difference; ("", the line of the step, []) if there is no reason."""
    single = case.single.updates[update]
    if factor is not None:
        reason = f"they are {factor:.4g} times those of one rank{_factor_reason(factor, case.num_ranks)}"
        location = single.backwards[-1] if single.backwards else single.step
        return reason, location, [*case.many.ranks[0].facts.get("sent_at", []), single.step]
    if update == 0 and kind == "after" and single.optimizer:
        reason = "the gradients are equal, so the optimizer updates them differently: check its parameter groups"
        return reason, single.optimizer, [single.step]
    line = first_differing(case.many, case.single, case.tolerance) if update == 0 and kind == "gradients" else None
    # gradients that are sent after the backward may be compressed intentionally
    return _begun_at(case, line) if line is not None and line.is_of_forward else ("", single.step, [])


def _begun_at(case: _Case, line: DifferingLine) -> tuple[str, str, list[str]]:
    """(reason, line, further lines) of a difference that begins at a line."""
    numbers = ", ".join(f"{number:.5g}" for number in line.ranks)
    reason = (
        f"the difference begins at {short_location(line.location)} ({line.operation}): {numbers} on the ranks, "
        f"{line.single:.5g} on one"
    )
    if line.sums:
        reason += (
            f"; {short_location(line.sums[-1])} is a sum over the ranks, which averaged gradients divide by "
            f"{case.num_ranks}"
        )
    return reason, line.location, [*line.sums[-2:], case.single.updates[0].step]


def _rounded_or_small(pairs: list[tuple[Any, Any]], apart: float) -> str:
    """Why a difference that begins at no line may be intended, because ranks send compressed gradients; "" if not.

    Compressed gradients have few different values, few significant bits, or zeros where one rank has none.
    """
    import torch

    ranks, single = (torch.cat([as_reals(pair[index]).flatten() for pair in pairs]) for index in (0, 1))
    if apart < _SMALL_DIFFERENCE:
        return f"they differ by {apart:.2g} of their norm, and no line was found where this begins"
    if float(((ranks == 0) != (single == 0)).double().mean()) > _EXTRA_ZERO_SHARE:
        share = float((ranks == 0).double().mean())
        return f"{share:.0%} of their elements are 0, and different ones from one rank: only some elements are sent"
    nonzero = ranks[ranks != 0]
    if (
        len(nonzero) >= _MIN_NONZERO
        and len(nonzero.abs().unique()) < len(nonzero) / 4
        and len(single.abs().unique()) > len(single) / 2
    ):
        return "they have few different values: they are rounded before they are sent"
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        # the sum of two 16-bit numbers, and half of it, may need a few more bits
        if (
            len(nonzero) >= _MIN_NONZERO
            and float((nonzero.to(dtype).double() == nonzero).double().mean()) > _ROUNDED_SHARE
        ):
            return f"they are rounded to {name}"
    return ""


def _factor_reason(factor: float, num_ranks: int) -> str:
    if math.isclose(factor, 1 / num_ranks, rel_tol=0.01):
        return ": a sum over samples whose gradients are averaged over the ranks"
    if math.isclose(factor, num_ranks, rel_tol=0.01):
        return ": a mean over samples whose gradients are summed over the ranks"
    return ""


def _report_unaveraged(
    case: _Case, findings: Findings, update: int, names: dict[str, float], single: RecordedUpdate
) -> None:
    """Report parameters that each rank updates with its local gradient, unless ranks are averaged later."""
    own_gradient_names = [name for name, difference in names.items() if difference < 0]
    stepped = [[rank.after.get(name) for rank in case.pairs(update)[0]] for name in own_gradient_names]
    # Adam's first step may hide different gradients; ranks that are still equal have not been averaged, either
    are_apart = not all(
        rank_values[0] is not None and join_ranks(rank_values, rank_values[0]).is_same for rank_values in stepped
    )
    for later in range(update, case.num_updates if are_apart else update):
        ranks, whole_update = case.pairs(later)
        held = [[rank.before.get(name) for rank in ranks] for name in own_gradient_names]
        if (
            later > update
            and whole_update.before
            and all(
                rank_values[0] is not None and join_ranks(rank_values, rank_values[0]).is_same for rank_values in held
            )
        ):
            findings.add_unchecked(
                f"{case.num_ranks} ranks against one: not compared, because ranks train separately and are averaged "
                f"later (local SGD)"
            )
            return
    if len(case.single.updates[update].gradients) == len(own_gradient_names) and case.num_updates < 3:
        findings.add_unchecked(f"{case.num_ranks} ranks against one: not compared, because there were too few updates")
        return
    constructed_at = case.single.facts.get("constructed_at", {})
    findings.add(
        "WARN",
        "ranks.own-gradient",
        single.step,
        f"update {update}: {len(own_gradient_names)} of {len(single.gradients)} parameters are updated with a "
        f"different gradient on each rank, for example {own_gradient_names[0]}: it is never averaged, so the ranks "
        "drift apart",
        "average the gradients of these parameters over the ranks before the step",
        other_lines=tuple(
            dict.fromkeys(
                line for name in own_gradient_names for line in constructed_at.get(name.partition(": ")[0], [])
            )
        ),
    )


# --- draws, rates, states


def _judge_draws(case: _Case, findings: Findings) -> None:
    by_line: dict[str, list[Any]] = {}
    for location, operation, shape in case.single.facts.get("repeated", []):
        by_line.setdefault(location, [operation, shape])
    for location, (operation, shape) in by_line.items():
        is_mask = operation in ("bernoulli_", "native_dropout")
        findings.add(
            "NOTE" if is_mask else "WARN",
            "ranks.draws",
            location,
            f"all {case.num_ranks} ranks draw the same {'dropout masks' if is_mask else 'random numbers'} "
            f"{tuple(shape)} for different samples ({operation}); one rank draws different ones for each sample",
            "seed each rank differently after the model is constructed: torch.manual_seed(seed + rank)",
        )


def _judge_rates(case: _Case, findings: Findings, end: int) -> int | None:
    """Return the first update whose learning rate is not a constant multiple of that of one rank, and add a finding."""
    factors: dict[tuple[str, int], float] = {}  # in the first update of each parameter group of each optimizer
    not_judged: set[tuple[str, int]] = set()
    for update in range(end):
        ranks, single = case.pairs(update)
        different_rates = first_different_rates([rank.rates for rank in ranks])
        if different_rates is not None:
            rates_text = ", ".join(f"{rate:.6g}" for rate in different_rates)
            findings.add(
                "WARN",
                "ranks.rate",
                single.step,
                f"update {update}: ranks step with different learning rates: {rates_text}",
                "step the scheduler with the same number on all ranks, such as the loss averaged over the ranks",
            )
            return update
        for group, (single_rate, rank_rate) in enumerate(zip(single.rates, ranks[0].rates, strict=False)):
            key = single.optimizer, group
            if not single_rate or not rank_rate or key in not_judged:
                continue
            factor = rank_rate / single_rate
            if math.isclose(factor, factors.setdefault(key, factor), rel_tol=_FACTOR_TOLERANCE):
                continue
            curves = [
                [each.rates[group] for each in run.updates if len(each.rates) > group and _is_of(each, single)]
                for run in (case.many.ranks[0], case.single)
            ]
            stretched = is_scaled_by_ranks(curves[0], curves[1], case.num_ranks)
            if stretched is None:
                findings.add_unchecked("learning rates against one rank: there were too few updates")
            if stretched is not False:
                not_judged.add(key)
                continue
            findings.add(
                "WARN",
                "ranks.rate",
                single.step,
                f"update {update}: the learning rate is {rank_rate:.6g} on {case.num_ranks} ranks, and "
                f"{single_rate:.6g} on one rank with the same batches",
                "compute the schedule, and the metric of ReduceLROnPlateau, from all ranks",
                other_lines=tuple(case.single.facts.get("schedules", [])),
            )
            return update
    return None


def _is_of(update: RecordedUpdate, other: RecordedUpdate) -> bool:
    """Whether two updates are steps of the same optimizer."""
    return update.optimizer == other.optimizer


def _judge_states(case: _Case, findings: Findings, end: int) -> None:
    """Compare buffers, and parameters that no optimizer updates, such as averaged copies."""
    for update in range(min(end, case.num_updates)):
        ranks, single = case.pairs(update)
        for name, state in single.states.items():
            rank_tensors: list[Any] = [rank.states.get(name) for rank in ranks]
            if state.numel() == 0 or any(rank_tensor is None for rank_tensor in rank_tensors):
                continue
            joined = join_ranks(rank_tensors, state)
            is_whole = all(rank_tensor.shape == state.shape for rank_tensor in rank_tensors)  # not a shard
            if is_whole and relative_difference(sum(rank_tensors), state) < max(case.tolerance, _FACTOR_TOLERANCE):
                continue  # sums over the samples of each rank, which are added up later
            if joined.tensor is None or relative_difference(joined.tensor, state) <= max(case.tolerance * 100, 1e-6):
                continue  # rank 0 has the state of one rank
            if not joined.is_same and (_are_shared_later(case, name, update) or _are_samples(rank_tensors, state)):
                continue
            description = "is the same on all ranks, and" if joined.is_same else "is of each rank's own samples:"
            description = description if is_whole else "is sharded over the ranks, and"
            lines = (*lines_of_state(case.single, name), single.step)
            findings.add(
                "WARN",
                "ranks.state",
                lines[0],
                f"after update {update}, the state {name} {description} differs from that of one rank by "
                f"{relative_difference(joined.tensor, state):.2g} of its norm",
                "reduce its inputs over the ranks, or compute it on one rank and broadcast it",
                other_lines=lines[1:],
            )
            return


def _are_shared_later(case: _Case, name: str, update: int) -> bool:
    """Whether ranks have the same state after a later update, because it is reduced only sometimes."""
    for later in range(update + 1, case.num_updates):
        rank_tensors: list[Any] = [rank.updates[later].states.get(name) for rank in case.many.ranks]
        if (
            all(rank_tensor is not None and rank_tensor.shape == rank_tensors[0].shape for rank_tensor in rank_tensors)
            and join_ranks(rank_tensors, rank_tensors[0]).is_same
        ):
            return True
    return False


def _are_samples(rank_tensors: list[Any], state: Any) -> bool:
    """Whether a state stores samples, like a replay buffer: ranks have the rows of one rank at different positions."""
    rows = [
        {_row(row) for row in rank_tensor if bool(row.any())} for rank_tensor in rank_tensors if rank_tensor.dim() > 1
    ]
    single_rows = {_row(row) for row in state if bool(row.any())} if state.dim() > 1 else set[tuple[float, ...]]()
    all_rows = set[tuple[float, ...]]().union(*rows)
    return len(single_rows) > 1 and 2 * len(single_rows & all_rows) > min(len(single_rows), len(all_rows))


def _row(row: Any) -> tuple[float, ...]:
    return tuple(round(number, 6) for number in as_reals(row).flatten()[:16].tolist())
