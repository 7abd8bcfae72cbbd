"""Keep the trace of a workload in a file, and compare a later version of the code, torch or machine with it.

The file is JSON: losses, counts, tolerances for rounding, and a few elements of each tensor. It contains no code, so
any such file is safe to read.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everyrank.data import Streamed
from everyrank.layout import Layout
from everyrank.measure.provenance import provenance
from everyrank.parallel.full_state import state_tensors
from everyrank.parallel.init_model import on_cpu
from everyrank.parity.case import ParityCase
from everyrank.parity.compare import LOSS_BASE, LOSS_FACTOR, tensor_tolerance
from everyrank.parity.reference import Reference, ensure_references, relative
from everyrank.parity.samples import sample_fingerprint
from everyrank.parity.trace import trace as run_trace
from everyrank.world import World

__all__ = ["FORMAT", "KeptComparison", "compare_kept", "elements", "make_trace"]

FORMAT = "everyrank trace 1"
_ELEMENTS = 64  # number of elements that are kept of each tensor
_SAMPLES = 32  # number of samples of the training data in the checksum
_INITIAL_ROUNDING = 1e-6  # relative; a different torch may compute slightly different initial weights


def make_trace(case: ParityCase, world: World, command: list[str]) -> dict[str, Any]:
    """Run `single` in float64 with its perturbed runs, and return what the file keeps. On rank 0 of one process."""
    ensure_references(case, Layout("single", precision="float64"), world, "kept")
    reference: Reference = next(run for text, run in case.references.items() if "float64" in text)
    workload, trace = case.workload, reference.trace
    # a separate run, because a reference keeps only the largest gradient of all updates
    first_update = run_trace(
        case, Layout("single", precision="float64"), world, [reference.segments[0][:1]], measure=True, evaluates=False
    )
    model = on_cpu(workload)
    initial = {name: tensor.detach() for name, tensor in state_tensors(model).items()}
    final = trace.finals[0]
    return {
        "format": FORMAT,
        "experiment": {
            "workload": workload.name,
            "settings": {
                name: str(value) for name, value in (workload.source.settings if workload.source else {}).items()
            },
            "seed": workload.seed,
            "global batch": workload.global_batch,
            "updates": sum(map(len, reference.segments)),
            "tensors": {name: list(value.shape) for name, value in final.items()},
            "training data": _data_checksum(case.train_data),
        },
        "losses": trace.losses,
        "counts": trace.counts,
        "loss_tolerances": [
            # relative to the loss itself, also where the floor is relative to a larger scale
            max(LOSS_BASE["float64"], LOSS_FACTOR["float64"] * floor)
            * max(1.0, reference.loss_scale / max(abs(loss), 1e-300))
            for floor, loss in zip(reference.loss_floors, trace.losses, strict=True)
        ],
        "evaluation": {name: list(pair) for name, pair in trace.evaluation.items()},
        "initial": {name: elements(value) for name, value in initial.items()},
        "gradients": {name: elements(value) for name, value in first_update.gradients.items()},
        "final": {name: elements(value) for name, value in final.items()},
        "final_tolerances": {
            name: tensor_tolerance(reference, 0, name, value, "float64") for name, value in final.items()
        },
        "versions": provenance(workload, case.train_data, world, command),
        "notes": case.notes,
    }


def elements(tensor: Tensor) -> list[float]:
    """Return some elements, evenly spaced, always the same for a shape."""
    flat = tensor.detach().reshape(-1)
    last = max(0, flat.numel() - 1)
    # linspace counts in float32, which saved files rely on, and which may round the last index up
    indices = torch.linspace(0, last, min(_ELEMENTS, flat.numel())).long().clamp(max=last)
    return flat[indices].double().cpu().tolist()


def _data_checksum(data: Any) -> str:
    """Return a checksum of the number of samples and of some samples, evenly spaced; "" for a stream."""
    if isinstance(data, Streamed) or not hasattr(data, "__getitem__"):
        return ""
    count = len(data)
    content = hashlib.blake2b(str(count).encode(), digest_size=16)
    for number in range(min(_SAMPLES, count)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # for augmentation
            content.update(str(sample_fingerprint(data[number * count // min(_SAMPLES, count)])).encode())
    return content.hexdigest()


# --- the comparison


@dataclass(frozen=True)
class KeptComparison:
    """The result of comparing two kept traces.

    status       "equal": up to rounding; "different"; "not comparable": not the same experiment
    text         the first difference, or the largest one and what rounding allows
    cause        the likely cause; "" if unknown
    changes      versions and machine that differ: `torch: 2.12.0 before, 2.13.0 now`
    """

    status: str
    text: str
    cause: str = ""
    changes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the lines to print."""
        rows = [f"{self.status}: {self.text}"]
        rows += [f"likely cause: {self.cause}"] if self.cause else []
        return rows + ([f"changed since then: {'; '.join(self.changes)}"] if self.changes else [])


def compare_kept(before: dict[str, Any], now: dict[str, Any]) -> KeptComparison:
    """Compare two kept traces of one workload."""
    changes = _changes(before["versions"], now["versions"], ("torch", "python", "commit", "system", "processor"))
    changes += _changes(before["versions"], now["versions"], ("threads_per_rank", "accelerator"))
    result = (
        _experiment_difference(before, now)
        or _initial_difference(before, now)
        or _update_difference(before, now)
        or _final_difference(before, now)
    )
    if result is None:
        pairs = zip(before["losses"], now["losses"], _tolerances(before, now), strict=True)
        worst, allowed = max(((relative(a, b), limit) for a, b, limit in pairs), key=lambda pair: pair[0] / pair[1])
        text = f"{len(now['losses'])} losses differ by at most {worst:.1e}, and rounding allows {allowed:.0e}"
        result = KeptComparison("equal", text)
    return KeptComparison(result.status, result.text, result.cause, tuple(changes))


def _changes(before: dict[str, Any], now: dict[str, Any], names: Sequence[str]) -> list[str]:
    return [
        f"{name.replace('_', ' ')}: {before.get(name)} before, {now.get(name)} now"
        for name in names
        if before.get(name) != now.get(name)
    ]


def _experiment_difference(before: dict[str, Any], now: dict[str, Any]) -> KeptComparison | None:
    """Check that settings, data and tensors are the same, because other runs cannot be compared."""
    old, new = before["experiment"], now["experiment"]
    rows: list[str] = []
    for name in new:
        if old.get(name) == new[name]:
            continue
        if isinstance(new[name], dict) and isinstance(old.get(name), dict):
            keys = [key for key in {**old[name], **new[name]} if old[name].get(key) != new[name].get(key)]
            kind = "setting" if name == "settings" else "tensor"
            rows += [f"{kind} {key}: {old[name].get(key)} before, {new[name].get(key)} now" for key in keys[:3]]
            rows += [f"{len(keys) - 3} more {name}"] if len(keys) > 3 else []
        else:
            rows.append(f"{name}: {old.get(name)} before, {new[name]} now")
    if not rows:
        return None
    return KeptComparison("not comparable", f"not the same experiment: {'; '.join(rows)}")


def _initial_difference(before: dict[str, Any], now: dict[str, Any]) -> KeptComparison | None:
    for name, values in now["initial"].items():
        old = before["initial"].get(name, [])
        scale = max((abs(value) for value in old if math.isfinite(value)), default=0.0)
        difference = _largest_difference(old, values)
        if difference > _INITIAL_ROUNDING * scale + 1e-300:
            return KeptComparison(
                "not comparable",
                f"the initial weights are different: {name} by {difference:.1e}",
                "a seed, the initialization, or the order in which random numbers are drawn has changed",
            )
    return None


def _largest_difference(old: Sequence[float], new: Sequence[float]) -> float:
    """Return the largest difference of two elements; inf if the lengths are different."""
    return max(map(_difference, old, new), default=0.0) if len(old) == len(new) else math.inf


def _difference(old: float, new: float) -> float:
    """Return the difference of two numbers: 0 if both are the same infinity or NaN, and inf if only one is finite."""
    if old == new or (math.isnan(old) and math.isnan(new)):
        return 0.0
    return math.inf if math.isnan(old - new) else abs(old - new)


def _tolerances(before: dict[str, Any], now: dict[str, Any]) -> list[float]:
    return [max(pair) for pair in zip(before["loss_tolerances"], now["loss_tolerances"], strict=True)]


def _update_difference(before: dict[str, Any], now: dict[str, Any]) -> KeptComparison | None:
    rows = zip(before["losses"], now["losses"], before["counts"], now["counts"], _tolerances(before, now), strict=True)
    for update, (old, new, old_count, new_count, allowed) in enumerate(rows):
        if old_count != new_count:
            text = f"update {update} has {old_count:g} loss terms before, {new_count:g} now"
            return KeptComparison(
                "different", text, "the loss counts its terms differently, or different samples are read"
            )
        if not relative(old, new) <= allowed:
            text = (
                f"the loss of update {update} is {old:.9g} before, {new:.9g} now: off by {relative(old, new):.1e}, and "
                f"rounding allows {allowed:.0e}"
            )
            return KeptComparison("different", text, _cause_of_update(before, now, update, old, new))
    return None


def _cause_of_update(before: dict[str, Any], now: dict[str, Any], update: int, old: float, new: float) -> str:
    """Return the likely cause of the first loss that differs."""
    if update == 0:
        factor = new / old if old else math.inf
        ratios = [b / a for a, b in zip(before["losses"], now["losses"], strict=True) if a]
        is_scale = abs(factor - 1) > 1e-3 and abs(factor - (_round_factor(factor) or 0.0)) < 1e-9 * abs(factor)
        if is_scale:
            return f"the loss is {_round_factor(factor):.6g} times what it was: a scale in the loss has changed"
        if old and len(ratios) > 1 and max(ratios) - min(ratios) < 1e-6:
            return f"each loss is {factor:.6g} times what it was"
        return "the same weights give a different loss: the model's forward pass, the loss, or the samples have changed"
    ratio = _gradient_ratio(before, now)
    if ratio is not None and abs(ratio - 1) > 1e-6:
        return (
            f"the first loss is equal, but the gradients are {ratio:.6g} times what they were: a scale in the backward "
            "pass has changed"
        )
    if ratio is None and _gradient_ratios(before, now):
        return "the first loss is equal, but the gradients are different: the backward pass has changed"
    if update == 1 and ratio is not None:
        return "the first loss and gradients are equal: the optimizer or the learning rate has changed"
    if update == 1:
        return "the first loss is equal: the optimizer, the learning rate, the samples, or a buffer has changed"
    return f"updates 0 to {update - 1} are equal: a schedule, the order of samples, or a buffer has changed"


def _round_factor(factor: float) -> float | None:
    """Return the nearest integer to a factor, or one divided by an integer if the factor is below 1."""
    if not math.isfinite(factor) or factor == 0:
        return None
    return float(round(factor)) if abs(factor) >= 1 else 1 / round(1 / factor)


def _gradient_ratio(before: dict[str, Any], now: dict[str, Any]) -> float | None:
    """Return the factor between the magnitudes of the first gradients; None if it is not the same for all."""
    ratios = _gradient_ratios(before, now)
    return statistics.median(ratios) if ratios and max(ratios) - min(ratios) < 1e-6 * max(ratios) else None


def _gradient_ratios(before: dict[str, Any], now: dict[str, Any]) -> list[float]:
    """Return new / old of the elements of the first gradients that are not close to 0."""
    pairs = [
        (old, new)
        for name, values in now["gradients"].items()
        for old, new in zip(before["gradients"].get(name, []), values, strict=False)
    ]
    scale = max((old for old, _ in pairs), default=0.0)
    return [new / old for old, new in pairs if old > 1e-3 * scale]


def _final_difference(before: dict[str, Any], now: dict[str, Any]) -> KeptComparison | None:
    for name, values in now["final"].items():
        limits = [side["final_tolerances"].get(name) for side in (before, now)]
        if None in limits:  # no tolerance: only rounding changes this tensor
            continue
        difference = _largest_difference(before["final"][name], values)
        if difference and (math.isinf(difference) or not difference <= max(limits)):
            return KeptComparison(
                "different",
                f"all losses are equal, and {name} differs by {difference:.1e} at the end; rounding allows "
                f"{max(limits):.0e}",
                "an update after the last loss, weight decay, or a buffer has changed",
            )
    for name, (total, count) in now["evaluation"].items():
        old = before["evaluation"].get(name)
        if old is None or old[1] != count or (_difference(old[0], total) and not relative(old[0], total) <= 1e-6):
            old_text = "missing" if old is None else f"{old[0]:.9g} of {old[1]:g}"
            new_text = f"{total:.9g} of {count:g}"
            text = f"all updates are equal, and {name} of the evaluation is {old_text} before, {new_text} now"
            return KeptComparison("different", text, "the metric, or the evaluation data, has changed")
    return None
