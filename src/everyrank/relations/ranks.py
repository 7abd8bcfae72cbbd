"""N ranks are one: the same batches, draws and weights give the same updates on N ranks and on one.

The first thing that differs is reported, with the line where the difference begins.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from everyrank.audit.finding import Findings, short_place
from everyrank.relations.lines import Differing, first_differing, first_scaled
from everyrank.relations.numbers import constant_factor, relative_difference, tolerance_of, whole
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

_BATCHES = 8  # whose samples tell whether all ranks read the same
_EVALUATES = (".eval()", "inference_mode", "validat", "evaluat")  # in the text of a script
_SAME_ROWS = 1e-5
_ROUNDED_BY_HOOK = 0.03  # by a communication hook that compresses gradients
_SMALL = 0.02  # of the norm: as rounding to 8 bits changes gradients
_SPARSE, _MANY, _ROUNDED_SHARE = 0.05, 32, 0.5  # of compressed gradients: zeros, numbers that tell, rounded ones
_MANY_UPDATES = 10**9
_ANY_FACTOR = 1e-6  # a learning rate that is scaled by the ranks has one factor in all updates


class _NotComparedError(Exception):
    """Why two runs cannot be compared."""


class _OtherInputsError(_NotComparedError):
    """The model is given other numbers on one rank."""


@dataclasses.dataclass(frozen=True)
class _Case:
    many: ScriptRecording
    one: RankRecording
    num_updates: int
    tolerance: float
    limit: str  # why later updates cannot be compared

    @property
    def num_ranks(self) -> int:
        return len(self.many.ranks)

    @functools.cached_property
    def local(self) -> frozenset[str]:
        """Parameters that begin differently on each rank, beside others that begin alike: experts of each rank."""
        held = [rank.updates[0].before for rank in self.many.ranks]
        common = [name for name in held[0] if all(name in each for each in held)]
        apart = {
            name
            for name in common
            if any(
                each[name].shape == held[0][name].shape and relative_difference(each[name], held[0][name]) > _SAME_ROWS
                for each in held[1:]
            )
        }
        return frozenset(apart) if len(apart) < len(common) else frozenset()

    def pairs(self, update: int) -> tuple[list[RecordedUpdate], RecordedUpdate]:
        return [rank.updates[update] for rank in self.many.ranks], self.one.updates[update]


def comparable_updates(many: ScriptRecording, one: RankRecording) -> int:
    """Updates that all ranks and the one rank began after the same number of batches."""
    runs = [rank.updates for rank in (*many.ranks, one)]
    count = 0
    for updates in zip(*runs, strict=False):
        if len({(update.batches, len(update.losses)) for update in updates}) > 1:
            break
        count += 1
    return count


def num_comparable(many: ScriptRecording, one: ScriptRecording) -> tuple[int, bool]:
    """(number of first updates in which the runs can be compared, whether the later ones can, too)."""
    try:
        case = _case(many, one)
    except _NotComparedError:
        return 0, False
    return case.num_updates, not case.limit


def num_with_same_inputs(many: ScriptRecording, one: ScriptRecording) -> int:
    """The number of first updates in which the model gets the samples of all ranks, by the sums of its inputs."""
    of_ranks, of_one = ([rank.facts.get("input_sums", {}) for rank in run.ranks] for run in (many, one))
    for update, sums in of_one[0].items():
        parts = [sums_of_rank.get(update, []) for sums_of_rank in of_ranks]
        if any(len(each) != len(sums) for each in parts):
            return update
        for index, number in enumerate(sums):
            numbers = [each[index] for each in parts]
            margin = 1e-4 * max(1.0, *map(abs, numbers))
            is_same = all(abs(each - number) <= margin for each in numbers)
            if not is_same and abs(sum(numbers) - number) > margin:
                return update
    return len(one.ranks[0].updates)


def judge_ranks(
    many: ScriptRecording,
    one: ScriptRecording,
    alone: ScriptRecording | None,
    run_alone: Callable[[Imposed], ScriptRecording],
    findings: Findings,
) -> int:
    """Add what differs to `findings`, or why the runs cannot be compared. Returns the number of equal updates.

    many   the script on N ranks
    one    the script on one rank, with the batches, draws and rates of `many`
    alone  on one rank, with those of rank 0 only and the parameters of `many`: tells rank 0's own numbers
    run_alone  runs it on one rank again: tells numbers of rank 0's own evaluation, and of other ranks
    """
    try:
        case = _case(many, one)
    except _NotComparedError as error:
        if isinstance(error, _OtherInputsError) and _scaled_inputs(many, one.ranks[0], findings):
            return 0
        findings.not_checked(f"{len(many.ranks)} ranks against one: not compared, because {error}")
        return 0
    if case.limit:
        findings.not_checked(f"updates after the first {case.num_updates} against one rank: {case.limit}")
    _repeated_draws(case, findings)
    by_gradient, by_rate = Findings(), Findings()
    differs = _gradients(case, by_gradient)
    changed = _rates(case, by_rate, case.num_updates if differs is None else differs + 1)
    findings.extend(by_gradient if changed is None else by_rate)  # the rate comes first: it moves the parameters
    for why in by_gradient.unchecked:
        findings.not_checked(why)
    differs = differs if changed is None else changed
    _states(case, findings, differs if differs is not None else case.num_updates)
    if differs is None and alone is not None and not alone.trouble:
        judge_printed(many, case.one, alone.ranks[0], run_alone, case.num_updates, case.tolerance, findings)
    return case.num_updates if differs is None else differs


def judge_evaluations(
    many: ScriptRecording,
    one: ScriptRecording,
    alone: ScriptRecording,
    run_alone: Callable[[Imposed], ScriptRecording],
    findings: Findings,
) -> None:
    """Add printed numbers that differ, if the updates of both runs are equal.

    The arguments are those of `judge_ranks`.
    """
    others = Findings()
    if judge_ranks(many, one, alone, run_alone, others):
        findings.extend(finding for finding in others if finding.rule == "ranks.printed")
    else:
        for why in others.unchecked:
            findings.not_checked(f"numbers of evaluations: {why}")


def misses_evaluation(many: ScriptRecording, text: str) -> bool:
    """Whether a run of a script with this text was ended before it came to an evaluation."""
    rank = many.ranks[0]
    if rank.facts.get("came_to_end") or evaluates(rank) or not rank.batches:
        return False
    is_unread = any(number not in rank.facts.get("trained", []) for number in rank.facts.get("loader_places", {}))
    return is_unread or any(word in text for word in _EVALUATES)


def _case(many: ScriptRecording, one: ScriptRecording) -> _Case:
    """Check that the two runs can be compared. Raises `_NotComparedError`."""
    if many.trouble:
        raise _NotComparedError(f"the script failed in the comparison on {len(many.ranks)} ranks ({many.trouble})")
    recorded = one.ranks[0]
    limit, end = _first_refused(many, recorded)
    if one.trouble and len(recorded.updates) < end:
        limit = f"the script does not run on one rank with the batches of all ({one.trouble})"
        end = len(recorded.updates)
    if limit and not end:
        raise _NotComparedError(limit)
    if not all(rank.updates for rank in (*many.ranks, recorded)):
        raise _NotComparedError("no optimizer step was seen")
    if _reads_same(many) and not _has_parts_of_model(many, recorded):
        raise _NotComparedError("all ranks read the same samples")
    num_updates = min(comparable_updates(many, recorded), end)
    if not num_updates:
        firsts = [rank.updates[0] for rank in (*many.ranks, recorded)]
        if firsts[0].batches != firsts[-1].batches or len(firsts[0].losses) != len(firsts[-1].losses):
            numbers = f"{len(firsts[0].losses)} backwards on each rank, {len(firsts[-1].losses)} on one"
            raise _NotComparedError(f"an update is made of different numbers of batches ({numbers})")
        raise _NotComparedError("ranks read different numbers of batches before their first update")
    _check_inputs(many, recorded)
    first = recorded.updates[0]
    tensors = [*first.gradients.values(), *first.before.values(), *(v.tensor for v in recorded.values.values())]
    tolerance = tolerance_of(tensors)
    if tolerance is None:
        raise _NotComparedError("the script computes in 16 bits")
    return _Case(many, recorded, num_updates, tolerance, limit)


def _first_refused(many: ScriptRecording, one: RankRecording) -> tuple[str, int]:
    """(what could not be imposed first, number of updates before it); ("", a large number) if all was imposed."""
    refused = [(update, why) for rank in (*many.ranks, one) for why, update in rank.facts.get("refused", [])]
    update, why = min(refused, default=(_MANY_UPDATES, ""))
    return why, update


def _reads_same(many: ScriptRecording) -> bool:
    """Whether all ranks train on the same batches, as the members of an ensemble do."""
    read: list[list[list[int]]] = []
    for rank in many.ranks:
        trained = rank.facts.get("trained", [])
        read.append([samples_of_batch(batch) for key, batch, _ in rank.batches if key[0] in trained][:_BATCHES])
    return any(read[0]) and len(read) > 1 and all(of_rank == read[0] for of_rank in read[1:])


def _has_parts_of_model(many: ScriptRecording, one: RankRecording) -> bool:
    """Whether ranks hold parts of the parameters of one rank, as in tensor parallelism."""
    held = many.ranks[0].updates[0].before
    return any(name in held and held[name].numel() < whole.numel() for name, whole in one.updates[0].before.items())


def _check_inputs(many: ScriptRecording, one: RankRecording) -> None:
    """Check that the model is given the same samples and begins with the same weights."""
    texts = [rank.facts.get("texts_given", []) for rank in many.ranks]
    if any(given != texts[0] for given in texts):
        raise _NotComparedError("each rank calls the model with a different text, such as the name of a task")
    inputs = [rank.inputs for rank in many.ranks]
    if any(len(given) != len(one.inputs) for given in inputs):
        raise _NotComparedError("the model runs a different number of times on one rank")
    for index, together in enumerate(one.inputs):
        parts = [given[index] for given in inputs]
        if any(len(part) != len(together) for part in parts):
            raise _NotComparedError("the model is given different arguments on one rank")
        for column, value in enumerate(together):
            values = [part[column] for part in parts]
            is_same = all(each.shape == value.shape and relative_difference(each, value) < 1e-6 for each in values)
            has_order = bool(one.facts.get("batch_norms"))  # batch norm takes the rows of each rank by their order
            if not is_same and not _are_parts(values, value, has_order):
                raise _OtherInputsError(
                    "the batches of the ranks do not come from a DataLoader, and could not be put together"
                )
    first = one.updates[0]
    for name, weight in first.before.items():
        parts = [rank.updates[0].before.get(name) for rank in many.ranks]
        joined = whole(parts, weight)
        if joined.tensor is not None and relative_difference(joined.tensor, weight) > 1e-6:
            raise _NotComparedError(f"{name} begins with different weights on one rank")


def _scaled_inputs(many: ScriptRecording, one: RankRecording, findings: Findings) -> bool:
    """Name the line before the model at which each rank scales or shifts its samples in its own way."""
    line = first_scaled(many, one)
    if line is None:
        return False
    is_factor = any(abs(factor - 1) > _SAME_ROWS for factor in line.factors)
    numbers = ", ".join(f"{number:.6g}" for number in (line.factors if is_factor else line.shifts))
    findings.add(
        "WARN",
        "ranks.input",
        line.place,
        f"with the same batches, the samples that the model is given are {numbers} times those of one rank"
        if is_factor
        else f"with the same batches, the samples that the model is given are those of one rank plus {numbers}",
        "compute what scales or shifts the samples from all ranks' data, or on rank 0, and broadcast it",
        also=(line.numbers,),
    )
    return True


def _are_parts(values: list[Any], value: Any, has_order: bool) -> bool:
    """Whether the inputs of ranks are parts of that of one rank: its samples, or pieces of each sequence."""
    import torch

    for dim in range(value.dim()):
        shapes = {each.shape[:dim] + each.shape[dim + 1 :] for each in (*values, value) if each.dim() == value.dim()}
        if len(shapes) == 1 and sum(each.shape[dim] for each in values) == value.shape[dim]:
            return _are_rows_equal(torch.cat(values, dim), value, has_order or dim > 0)
    return False


def _are_rows_equal(rows: Any, others: Any, has_order: bool) -> bool:
    """Whether two batches hold the same samples: in any order, as two views of each have, unless the order matters."""
    import torch

    if relative_difference(rows, others) <= _SAME_ROWS or has_order or rows.dim() < 2:
        return relative_difference(rows, others) <= _SAME_ROWS
    flat = [each.double().flatten(1) for each in (rows, others)]
    weights = torch.linspace(1.0, 2.0, flat[0].shape[1], dtype=torch.float64).sqrt()  # one number for each sample
    in_order = [each[(each @ weights).argsort()] for each in flat]
    return relative_difference(*in_order) <= _SAME_ROWS


# --- gradients and parameters


def _gradients(case: _Case, findings: Findings) -> int | None:
    """The first update whose gradients or parameters differ."""
    for update in range(case.num_updates):
        ranks, one = case.pairs(update)
        if not one.gradients:
            return None
        for kind, rule in (("gradients", "ranks.gradient"), ("after", "ranks.parameters")):
            names = _differing(case, ranks, one, kind)
            if names and _is_by_hook(case, findings, update):
                return update
            if names:
                _report_difference(case, findings, update, kind, rule, names)
                return update
    return None


def _values(update: RecordedUpdate, kind: str) -> dict[str, Any]:
    return update.gradients if kind == "gradients" else update.after


def _differing(case: _Case, ranks: list[RecordedUpdate], one: RecordedUpdate, kind: str) -> dict[str, float]:
    """How far each tensor is from that of one rank, by name; -1 where ranks should hold the same one and do not."""
    import torch

    tolerance = case.tolerance * (1 if kind == "gradients" else 10)
    ours = {name: tensor for name, tensor in _values(one, kind).items() if tensor is not None and tensor.numel()}
    if not ours:
        return {}
    scale = max(float(torch.linalg.vector_norm(tensor.double())) for tensor in ours.values()) * 1e-4
    names: dict[str, float] = {}
    for name, tensor in ours.items():
        parts = [_values(rank, kind).get(name) for rank in ranks]
        joined = whole(parts, tensor)
        if joined.tensor is None:
            continue
        apart = relative_difference(joined.tensor, tensor, scale)
        if apart > tolerance:
            names[name] = apart if joined.is_same or name in case.local else -1.0
    return names


def _is_by_hook(case: _Case, findings: Findings, update: int) -> bool:
    """Whether a communication hook explains a difference: any but a factor of the number of ranks."""
    hook = case.many.ranks[0].facts.get("comm_hook", "")
    if not hook:
        return False
    ranks, one = case.pairs(update)
    pairs = [(ranks[0].gradients.get(name), value) for name, value in one.gradients.items()]
    held = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
    factor = constant_factor(held, _ROUNDED_BY_HOOK) if held else None
    if factor is not None and any(
        math.isclose(factor, times, rel_tol=_ROUNDED_BY_HOOK) for times in (case.num_ranks, 1 / case.num_ranks)
    ):
        return False
    findings.not_checked(
        f"gradients of {case.num_ranks} ranks against one: the communication hook of {short_place(hook)} changes them"
    )
    return True


def _report_difference(
    case: _Case, findings: Findings, update: int, kind: str, rule: str, names: dict[str, float]
) -> None:
    ranks, one = case.pairs(update)
    word = "gradient" if kind == "gradients" else "value after the step"
    if any(apart < 0 for apart in names.values()):
        _report_own(case, findings, update, names, one)
        return
    worst = max(names, key=lambda name: names[name])
    text = (
        f"update {update}: with the same batches, {case.num_ranks} ranks and one rank differ in the {word} of {worst} "
        f"by {names[worst]:.2g} of its norm ({len(names)} of {len(one.gradients)} parameters differ)"
    )
    values = {name: value for name, value in _values(one, kind).items() if value is not None}
    wholes = {name: whole([_values(rank, kind).get(name) for rank in ranks], value) for name, value in values.items()}
    pairs = [(wholes[name].tensor, value) for name, value in values.items() if wholes[name].tensor is not None]
    is_rounded = bool(case.many.ranks[0].facts.get("comm_hook"))
    differing = [(wholes[name].tensor, values[name]) for name in names if name in wholes]
    factor = constant_factor(differing, _ROUNDED_BY_HOOK if is_rounded else 1e-3) if kind == "gradients" else None
    reason, place, also = _explained(case, update, kind, factor)
    changes = _rounded_or_small(pairs, names[worst]) if kind == "gradients" else ""
    if changes and not reason:
        findings.not_checked(f"gradients of {case.num_ranks} ranks against one: in update {update} {changes}")
        return
    if kind == "gradients" and not reason:
        line = first_differing(case.many, case.one, case.tolerance) if update == 0 else None
        reason, place, also = _begun_at(case, line) if line is not None else ("", one.step, list(one.backwards))
    findings.add(
        "WARN",
        rule,
        place,
        f"{text}: {reason or 'no rule explains it'}",
        "make the computation the same on any number of ranks, or ignore this if ranks are meant to differ",
        also=tuple(also),
    )


def _explained(case: _Case, update: int, kind: str, factor: float | None) -> tuple[str, str, list[str]]:
    """(reason, line, further lines) of a difference; ("", the line of the step, []) if there is no reason."""
    one = case.one.updates[update]
    if factor is not None:
        reason = f"they are {factor:.4g} times those of one rank{_factor_reason(factor, case.num_ranks)}"
        place = one.backwards[-1] if one.backwards else one.step
        return reason, place, [*case.many.ranks[0].facts.get("sent_at", []), one.step]
    if update == 0 and kind == "after" and one.optimizer:
        reason = "the gradients are equal, so the optimizer steps them differently: look at its parameter groups"
        return reason, one.optimizer, [one.step]
    line = first_differing(case.many, case.one, case.tolerance) if update == 0 and kind == "gradients" else None
    # what is sent after the backward may be compressed on purpose
    return _begun_at(case, line) if line is not None and line.is_of_forward else ("", one.step, [])


def _begun_at(case: _Case, line: Differing) -> tuple[str, str, list[str]]:
    """(reason, line, further lines) of a difference that begins at a line."""
    numbers = ", ".join(f"{number:.5g}" for number in line.ranks)
    reason = (
        f"the difference begins at {short_place(line.place)} ({line.operation}): {numbers} on the ranks, "
        f"{line.one:.5g} on one"
    )
    if line.sums:
        reason += (
            f"; {short_place(line.sums[-1])} is a sum over the ranks, which averaged gradients divide by "
            f"{case.num_ranks}"
        )
    return reason, line.place, [*line.sums[-2:], case.one.updates[0].step]


def _rounded_or_small(pairs: list[tuple[Any, Any]], apart: float) -> str:
    """Why a difference that begins at no line may be meant: ranks send gradients that are compressed; "" if not.

    Compressed gradients have few different values, few significant bits, or zeros where one rank has none.
    """
    import torch

    ranks, one = (torch.cat([pair[index].double().flatten() for pair in pairs]) for index in (0, 1))
    if apart < _SMALL:
        return f"they differ by {apart:.2g} of their norm, and no line was found where this begins"
    if float(((ranks == 0) != (one == 0)).double().mean()) > _SPARSE:
        share = float((ranks == 0).double().mean())
        return f"{share:.0%} of their elements are 0, and other ones than on one rank: they are sent in part"
    kept = ranks[ranks != 0]
    if len(kept) >= _MANY and len(kept.abs().unique()) < len(kept) / 4 and len(one.abs().unique()) > len(one) / 2:
        return "they have few different values: they are rounded before they are sent"
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        # the sum of two numbers of 16 bits, and half of it, may need a few more
        if len(kept) >= _MANY and float((kept.to(dtype).double() == kept).double().mean()) > _ROUNDED_SHARE:
            return f"they are rounded to {name}"
    return ""


def _factor_reason(factor: float, num_ranks: int) -> str:
    if math.isclose(factor, 1 / num_ranks, rel_tol=0.01):
        return ": a sum over samples whose gradients are averaged over the ranks"
    if math.isclose(factor, num_ranks, rel_tol=0.01):
        return ": a mean over samples whose gradients are summed over the ranks"
    return ""


def _report_own(case: _Case, findings: Findings, update: int, names: dict[str, float], one: RecordedUpdate) -> None:
    """Report parameters that each rank steps with a gradient of its own, unless ranks are averaged later."""
    own = [name for name, apart in names.items() if apart < 0]
    stepped = [[rank.after.get(name) for rank in case.pairs(update)[0]] for name in own]
    # Adam's first step hides different gradients: ranks that have not drifted apart have not been averaged, either
    are_apart = not all(part[0] is not None and whole(part, part[0]).is_same for part in stepped)
    for later in range(update, case.num_updates if are_apart else update):
        ranks, whole_update = case.pairs(later)
        held = [[rank.before.get(name) for rank in ranks] for name in own]
        if (
            later > update
            and whole_update.before
            and all(part[0] is not None and whole(part, part[0]).is_same for part in held)
        ):
            findings.not_checked(
                f"{case.num_ranks} ranks against one: not compared, because ranks step by themselves and are averaged "
                f"later (local SGD)"
            )
            return
    if len(case.one.updates[update].gradients) == len(own) and case.num_updates < 3:
        findings.not_checked(f"{case.num_ranks} ranks against one: not compared, because there were too few updates")
        return
    made_at = case.one.facts.get("made_at", {})
    findings.add(
        "WARN",
        "ranks.own-gradient",
        one.step,
        f"update {update}: {len(own)} of {len(one.gradients)} parameters are stepped with a different gradient on each "
        f"rank, for example {own[0]}: it is averaged on no update, and the ranks drift apart",
        "average the gradients of these parameters over the ranks before the step",
        also=tuple(dict.fromkeys(line for name in own for line in made_at.get(name.partition(": ")[0], []))),
    )


# --- draws, rates, states


def _repeated_draws(case: _Case, findings: Findings) -> None:
    by_line: dict[str, list[Any]] = {}
    for place, operation, shape in case.one.facts.get("repeated", []):
        by_line.setdefault(place, [operation, shape])
    for place, (operation, shape) in by_line.items():
        is_mask = operation in ("bernoulli_", "native_dropout")
        findings.add(
            "NOTE" if is_mask else "WARN",
            "ranks.draws",
            place,
            f"all {case.num_ranks} ranks draw the same {'dropout masks' if is_mask else 'random numbers'} "
            f"{tuple(shape)} for samples of their own ({operation}); one rank draws different ones for each sample",
            "seed each rank differently after the model is made: torch.manual_seed(seed + rank)",
        )


def _rates(case: _Case, findings: Findings, end: int) -> int | None:
    """The first update whose learning rate is neither that of one rank nor a constant factor of it."""
    factors: list[float] = []
    for update in range(end):
        ranks, one = case.pairs(update)
        for rank in ranks[1:]:
            if any(not math.isclose(a, b, rel_tol=1e-6) for a, b in zip(rank.rates, ranks[0].rates, strict=False)):
                findings.add(
                    "WARN",
                    "ranks.rate",
                    one.step,
                    f"update {update}: ranks step with different learning rates: {_list([r.rates for r in ranks])}",
                    "let all ranks step the scheduler with the same number, such as the loss averaged over the ranks",
                )
                return update
        for ours, theirs in zip(one.rates, ranks[0].rates, strict=False):
            if ours and theirs:
                factors.append(theirs / ours)
        if factors and not math.isclose(factors[-1], factors[0], rel_tol=_ANY_FACTOR):
            curves = [[u.rates[0] for u in run.updates if u.rates] for run in (case.many.ranks[0], case.one)]
            stretched = is_scaled_by_ranks(curves[0], curves[1], case.num_ranks)
            if stretched is None:
                findings.not_checked("learning rates against one rank: there were too few updates")
            if stretched is not False:
                return None
            findings.add(
                "WARN",
                "ranks.rate",
                one.step,
                f"update {update}: the learning rate is {ranks[0].rates[0]:.6g} on {case.num_ranks} ranks, and "
                f"{one.rates[0]:.6g} on one rank with the same batches",
                "compute the schedule, and the number that a plateau is judged by, from all ranks",
                also=tuple(case.one.facts.get("schedules", [])),
            )
            return update
    return None


def _list(rates: list[list[float]]) -> str:
    return ", ".join(f"{rate[0]:.6g}" for rate in rates if rate)


def _states(case: _Case, findings: Findings, end: int) -> None:
    """Buffers and modules that no optimizer steps, such as averaged copies."""
    for update in range(min(end, case.num_updates)):
        ranks, one = case.pairs(update)
        for name, state in one.states.items():
            parts: list[Any] = [rank.states.get(name) for rank in ranks]
            if state.numel() == 0 or any(part is None for part in parts):
                continue
            joined = whole(parts, state)
            if relative_difference(sum(parts), state) < max(case.tolerance, _ANY_FACTOR):
                continue  # sums of each rank, which are added up later
            if joined.tensor is None or relative_difference(joined.tensor, state) <= max(case.tolerance * 100, 1e-6):
                continue  # rank 0's is that of one rank
            if not joined.is_same and (_are_shared_later(case, name, update) or _are_samples(parts, state)):
                continue
            whose = "is the same on all ranks, and" if joined.is_same else "is of each rank's own samples:"
            lines = (*lines_of_state(case.one, name), one.step)
            findings.add(
                "WARN",
                "ranks.state",
                lines[0],
                f"after update {update}, the state {name} {whose} differs from that of one rank by "
                f"{relative_difference(joined.tensor, state):.2g} of its norm",
                "reduce what it is computed from over the ranks, or keep it on one and broadcast it",
                also=lines[1:],
            )
            return


def _are_shared_later(case: _Case, name: str, update: int) -> bool:
    """Whether ranks hold the same state after a later update: it is reduced only now and then."""
    for later in range(update + 1, case.num_updates):
        parts: list[Any] = [rank.updates[later].states.get(name) for rank in case.many.ranks]
        if all(part is not None and part.shape == parts[0].shape for part in parts) and whole(parts, parts[0]).is_same:
            return True
    return False


def _are_samples(parts: list[Any], state: Any) -> bool:
    """Whether a state keeps samples, as a replay buffer does: the rows of ranks are those of one rank, elsewhere."""
    rows = [{_row(row) for row in part if bool(row.any())} for part in parts if part.dim() > 1]
    ours = {_row(row) for row in state if bool(row.any())} if state.dim() > 1 else set[tuple[float, ...]]()
    theirs = set[tuple[float, ...]]().union(*rows)
    return len(ours) > 1 and 2 * len(ours & theirs) > min(len(ours), len(theirs))


def _row(row: Any) -> tuple[float, ...]:
    return tuple(round(number, 6) for number in row.double().flatten()[:16].tolist())
