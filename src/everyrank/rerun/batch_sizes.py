"""Changes the batch sizes in a script, because one rank with the batches of N ranks needs N times larger ones."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

__all__ = ["BATCH_SIZES", "sizes_that_divide", "with_larger_batches", "with_larger_batches_in_args"]

BATCH_SIZES = "batch sizes"  # stands for all names that look like a batch size

_BATCH_SIZE_NAME = re.compile(
    r"(^|_)(batch|batch_?size|bs|bsz|mbs|(num_|n_)?envs|per_(rank|device|gpu|process|proc)(_train)?(_batch_?size)?)$",
    re.IGNORECASE,
)
_GLOBAL_SIZE_NAME = re.compile(r"global|total|world|all_", re.IGNORECASE)


def with_larger_batches(tree: ast.Module, factor: int, name: str = BATCH_SIZES) -> None:
    """Multiply the integers of this name in a script, in place. By default, multiply all batch sizes."""
    integers = [  # `batch_size = bs = 4` has one integer with two names
        value
        for value, of_name in _named_integers(tree)
        if of_name == name or (name == BATCH_SIZES and _is_batch_size(of_name))
    ]
    for value in {id(value): value for value in integers}.values():
        value.value *= factor


def sizes_that_divide(source: bytes, rows: int) -> list[str]:
    """The names of integers in a script that divide the samples of a batch, but for its batch sizes: `prompts = 4`.

    `source` is the file as it is, because Python finds out its encoding.
    """
    names = [
        name
        for value, name in _named_integers(ast.parse(source))
        if name and value.value > 1 and rows % value.value == 0 and not _is_batch_size(name)
    ]
    return list(dict.fromkeys(names))


def _named_integers(tree: ast.Module) -> Iterator[tuple[Any, str]]:
    """Yield (constant, name) of the positive integers that a script assigns to names, arguments and defaults."""
    pairs: list[tuple[ast.expr | None, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs += zip(node.value.elts, map(_target_name, target.elts), strict=False)
                else:
                    pairs.append((node.value, _target_name(target)))
        elif isinstance(node, ast.AnnAssign):
            pairs.append((node.value, _target_name(node.target)))
        elif isinstance(node, ast.arguments):
            names = [each.arg for each in (*node.posonlyargs, *node.args)]
            pairs += zip(node.defaults, names[len(names) - len(node.defaults) :], strict=True)
            pairs += zip(node.kw_defaults, [each.arg for each in node.kwonlyargs], strict=True)
        elif isinstance(node, ast.Dict):
            names = [str(key.value) if isinstance(key, ast.Constant) else "" for key in node.keys]
            pairs += zip(node.values, names, strict=True)
        elif isinstance(node, ast.Call):
            option = _option(node)
            pairs += [
                (each.value, option if option and each.arg == "default" else each.arg or "") for each in node.keywords
            ]
    for value, name in pairs:
        if isinstance(value, ast.Constant) and type(value.value) is int and value.value > 0:
            yield value, name


def with_larger_batches_in_args(args: list[str], factor: int) -> list[str]:
    """The arguments of a script with larger batch sizes, from `--batch-size 4` or `--batch-size=4`."""
    result, option = list[str](), ""
    for arg in args:
        name, equals, value = arg.partition("=")
        if option and arg.isdecimal() and _is_batch_size(option):
            result.append(str(int(arg) * factor))
        elif arg.startswith("-") and equals and value.isdecimal() and _is_batch_size(_option_name(name)):
            result.append(f"{name}={int(value) * factor}")
        else:
            result.append(arg)
        option = _option_name(arg) if arg.startswith("-") and not equals else ""
    return result


def _is_batch_size(name: str) -> bool:
    return bool(_BATCH_SIZE_NAME.search(name)) and not _GLOBAL_SIZE_NAME.search(name)


def _target_name(target: ast.expr) -> str:
    return getattr(target, "id", getattr(target, "attr", ""))


def _option_name(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def _option(call: ast.Call) -> str:
    """The name of the option that `add_argument("--batch-size", ...)` defines; "" of another call."""
    if getattr(call.func, "attr", "") != "add_argument":
        return ""
    names = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return next((_option_name(name) for name in names if name.startswith("--")), "")
