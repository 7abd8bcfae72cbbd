"""The tensor plan, `Workload.tensor_plan`: which modules are split, and how.

It maps module names (`*` matches one component) to one of these words:

    colwise          a Linear with split output features; its input is whole
    rowwise          a Linear with split input features; outputs are summed over ranks
    colwise_gather   colwise, and the output is gathered: for a head
    colwise_loss     colwise, and the loss is computed on the split output: F.cross_entropy over a split vocabulary
    vocabulary       an Embedding with split rows; outputs are summed over ranks
    gather           a module that passes its first argument to several colwise ones, with one all-reduce in backward
    sequence         a norm on a part of the sequence if the layout has sequence=true (else no effect)
    replicate        whole on every rank, like modules that are not in the plan: every rank computes the same
    replicate_sum    whole, but used on split features (a norm inside attention heads): gradients are summed over ranks

With `sequence=true` the activations between the split modules are split too, along the sequence: the sums of `rowwise`
and `vocabulary` are scattered, and `gather`, `colwise_gather` and `colwise_loss` gather it (Korthikanti et al. 2022).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from torch import nn

from everyrank.errors import UnsupportedLayoutError

__all__ = ["PLAN_WORDS", "check_module", "resolve"]

PLAN_WORDS = (
    "colwise",
    "rowwise",
    "colwise_gather",
    "colwise_loss",
    "vocabulary",
    "gather",
    "sequence",
    "replicate",
    "replicate_sum",
)
# module type, and the dimension of its weight that is split
_SPLIT: Mapping[str, tuple[type[nn.Module], int]] = {
    "colwise": (nn.Linear, 0),
    "rowwise": (nn.Linear, 1),
    "colwise_gather": (nn.Linear, 0),
    "colwise_loss": (nn.Linear, 0),
    "vocabulary": (nn.Embedding, 0),
}


def resolve(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return module name -> word for every module that the plan matches; later patterns win.

    A module of several names is matched by each of them, and returned under its first.
    """
    first_names = {module: name for name, module in model.named_modules()}
    named = {name: first_names[module] for name, module in model.named_modules(remove_duplicate=False) if name}
    names = list(named)
    result: dict[str, str] = {}
    for pattern, word in plan.items():
        if word not in PLAN_WORDS:
            close = difflib.get_close_matches(word, PLAN_WORDS, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise UnsupportedLayoutError(
                f"tensor_plan: {pattern!r}: {word!r}: {hint}give one of {', '.join(PLAN_WORDS)}"
            )
        matches = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        matched = [name for name in names if matches.fullmatch(name)]
        if not matched:
            shapes = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names))
            close = difflib.get_close_matches(pattern, shapes, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(shapes[:8])}"
            raise UnsupportedLayoutError(f"tensor_plan: {pattern!r} matches no module of the model{hint}")
        result.update(dict.fromkeys((named[name] for name in matched), word))
    return result


def check_module(name: str, module: nn.Module, word: str, degree: int) -> None:
    """Raise `UnsupportedLayoutError` for a module that cannot be split like that over `degree` ranks."""
    if word not in _SPLIT:
        return
    kind, dim = _SPLIT[word]
    if not isinstance(module, kind):
        raise UnsupportedLayoutError(
            f"tensor_plan: {name}: {word} splits an nn.{kind.__name__}, and this is {type(module).__name__}"
        )
    length = module.get_parameter("weight").shape[dim]
    if length % degree:
        dimension = {"rowwise": "input features", "vocabulary": "rows"}.get(word, "output features")
        raise UnsupportedLayoutError(
            f"tensor_plan: {name} has {length} {dimension}, which tensor={degree} does not divide; "
            f"take a degree that divides {length}"
        )
