"""Records batches that functions and loops of the script yield, and merges those of several ranks.

A function counts if its source draws random numbers and it returns or yields tensors without a gradient, without
calling a model. Only the script is changed, not the files that it imports.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from everyrank.rerun.batch_sizes import with_larger_batches
from everyrank.rerun.inside.batches import (
    NotMergedError,
    decode_batch,
    encode_batch,
    is_equal,
    merge_batches,
    num_bytes,
    rows_of_batch,
)
from everyrank.rerun.inside.session import Session

__all__ = ["run_with_sources"]

_DECORATOR = "_everyrank_source"
_LOOP = "_everyrank_batches"
_DRAWS = ("rand", "Generator", "normal", "multinomial", "bernoulli", "poisson", "choice", "sample")
_MAX_BYTES = 3e8


def run_with_sources(session: Session, path: str) -> None:
    """Run a script like `runpy.run_path`, with a decorator on its functions that draw random numbers.

    Raises the errors of the script.
    """
    tree = ast.parse(Path(path).read_bytes(), path)
    if session.settings["larger"]:
        with_larger_batches(tree, len(session.imposed), session.settings["larger"])
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.decorator_list and _draws_random_numbers(node):
            name = ast.Name(_DECORATOR, ast.Load())
            node.decorator_list = [ast.copy_location(name, node)]  # keep the line of `def`
    for loop in _training_loops(tree):
        name = ast.copy_location(ast.Name(_LOOP, ast.Load()), loop.iter)
        loop.iter = ast.copy_location(ast.Call(name, [loop.iter], []), loop.iter)
    setattr(builtins, _DECORATOR, functools.partial(_with_recording, session))
    setattr(builtins, _LOOP, functools.partial(_loop_with_recording, session))
    module = types.ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    code = compile(tree, path, "exec", dont_inherit=True)
    exec(code, module.__dict__)  # noqa: S102  (the user's script)


def _training_loops(tree: ast.Module) -> list[ast.For]:
    """The innermost loops that call `backward`, directly or through functions of the script."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    names, calls = {"backward"}, {function.name: _calls(function) for function in functions}
    while new_names := {name for name, called_names in calls.items() if called_names & names} - names:
        names |= new_names
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For) and _calls(node) & names]
    return [loop for loop in loops if not any(other in loops for other in ast.walk(loop) if other is not loop)]


def _calls(node: ast.AST) -> set[str]:
    functions = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    return {getattr(function, "attr", getattr(function, "id", "")) for function in functions}


def _draws_random_numbers(function: ast.FunctionDef) -> bool:
    """Whether a function mentions a function that draws random numbers."""
    names = [getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(function)]
    return any(word in name for name in names for word in _DRAWS if isinstance(name, str))


def _with_recording(session: Session, function: Any) -> Any:
    """Wrap a function to record or impose its results."""
    if inspect.isgeneratorfunction(function):
        return _generator_with_recording(session, function)

    @functools.wraps(function)
    def source(*args: Any, **kwargs: Any) -> Any:
        if not session.is_active or session.in_source:
            return function(*args, **kwargs)
        key = session.key_of_update(f"source {function.__code__.co_firstlineno}")
        rank_results = [each["sources"][key] for each in session.imposed if key in each.get("sources", {})]
        is_imposed = len(rank_results) == len(session.imposed) > 0
        differs_by_rank = is_imposed and not all(
            is_equal(rank_result, rank_results[0]) for rank_result in rank_results[1:]
        )
        num_calls = session.num_calls
        in_evaluation = session.has_started and not torch.is_grad_enabled()
        of_update = _results_in_update(session, key) if in_evaluation else []
        with session.script_draws() if differs_by_rank or of_update else contextlib.nullcontext():
            result = function(*args, **kwargs)
        with session.quiet():
            if of_update and _is_among(result, of_update):
                return result  # it depends only on the arguments, such as the number of a file
            if session.imposed:
                return (
                    _merge_results(session, rank_results, result)
                    if differs_by_rank or (is_imposed and len(rank_results) == 1)
                    else result
                )
            if session.num_calls == num_calls and _is_batch(result):
                _record(session, key, result)
        return result

    return source


def _generator_with_recording(session: Session, function: Any) -> Any:
    """Wrap a generator function to record or impose its items."""

    @functools.wraps(function)
    def source(*args: Any, **kwargs: Any) -> Any:
        iterator = function(*args, **kwargs)
        if not session.is_active or session.in_source:
            return iterator
        key = session.key("source", f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}")
        if not session.imposed:
            return _recorded_items(session, key, iterator, _is_batch)
        return _imposed_items(session, key, iterator)

    return source


def _loop_with_recording(session: Session, items: Any) -> Any:
    """Wrap the iterable of a training loop to record or impose batches that do not come from a DataLoader."""
    if not session.is_active or session.in_source or not hasattr(items, "__iter__"):
        return items
    key = session.key("loop")
    session.facts.setdefault("loops", []).append([key[0], key[2], session.update])
    if not session.imposed:
        return _recorded_items(session, key, iter(items), _is_batch_or_indices)
    return _imposed_items(session, key, items) if session.settings["reads"] else items


def _imposed_items(session: Session, key: tuple[str, str, int], iterator: Any) -> Any:
    """The merged items of all ranks, or the iterator itself if all ranks have the same items."""
    lists = [each["sources"][key]["items"] for each in session.imposed if key in each.get("sources", {})]
    is_imposed = len(lists) == len(session.imposed)
    are_equal = len(lists) > 1 and all(is_equal(items, lists[0]) for items in lists[1:])
    return _merge_items(session, lists) if is_imposed and not are_equal else iterator


def _recorded_items(session: Session, key: tuple[str, str, int], iterator: Any, is_batch: Callable[[Any], bool]) -> Any:
    """Yield the items of a generator. Record them as long as they are batches that no model computes."""
    items: list[Any] = []
    session.sources.append((key, {"items": items}))
    is_recorded = True
    while True:
        calls = session.num_calls + session.num_batches
        try:
            item = next(iterator)
        except StopIteration:
            return
        if is_recorded:
            with session.quiet():
                is_recorded = (
                    session.num_calls + session.num_batches == calls
                    and is_batch(item)
                    and _append(session, items, item)
                )
            if not is_recorded:
                session.sources[:] = [each for each in session.sources if each[0] != key]
        yield item


def _append(session: Session, items: list[Any], item: Any) -> bool:
    """Record an item, unless it is too large or cannot be merged. Returns whether it was recorded."""
    size = session.facts.get("bytes", 0) + num_bytes(item)
    try:
        if size <= _MAX_BYTES:
            items.append(encode_batch(item))
    except NotMergedError:
        return False
    session.facts["bytes"] = size
    return size <= _MAX_BYTES


def _merge_items(session: Session, lists: list[list[Any]]) -> Any:
    """Yield the merged items of the ranks, one by one."""
    for index in range(max(map(len, lists))):
        with session.quiet():
            rank_items = [items[index] for items in lists if index < len(items)]
            item = _merge_results(session, rank_items, decode_batch(rank_items[0]))
        yield item


def _is_batch(result: Any) -> bool:
    tensors = [each for each in _leaves(result) if isinstance(each, torch.Tensor)]
    return any(each.dim() for each in tensors) and not any(each.requires_grad for each in tensors)


def _is_batch_or_indices(item: Any) -> bool:
    """Whether an item of a training loop is a batch: tensors, arrays, or a list of indices."""
    if isinstance(item, tuple | dict):
        return any(map(_is_batch_or_indices, item.values() if isinstance(item, dict) else item))
    if isinstance(item, list):
        return all(isinstance(each, int) for each in item) or any(map(_is_batch_or_indices, item))
    return _is_batch(item) or getattr(item, "ndim", 0) > 0


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in _leaves(each)]
    return [leaf for each in value for leaf in _leaves(each)] if isinstance(value, list | tuple) else [value]


def _record(session: Session, key: tuple[str, str, int], result: Any) -> None:
    try:
        size = session.facts.get("bytes", 0) + num_bytes(result)
        if size <= _MAX_BYTES:
            session.facts["bytes"] = size
            session.sources.append((key, encode_batch(result)))
    except NotMergedError:
        pass  # the function returns something else, which is not imposed


def _results_in_update(session: Session, key: tuple[str, str, int]) -> list[Any]:
    """Return the recorded results of a function of all ranks and calls in the update."""
    return [
        result
        for rank_recording in session.imposed
        for other, result in rank_recording.get("sources", {}).items()
        if other[:2] == key[:2]
    ]


def _is_among(result: Any, recorded: list[Any]) -> bool:
    try:
        encoded = encode_batch(result)
    except NotMergedError:
        return False
    return any(is_equal(each, encoded) for each in recorded)


def _merge_results(session: Session, rank_results: list[Any], result: Any) -> Any:
    """The merged results of a function on all ranks; `result` if they cannot be merged."""
    try:
        merged_batch = decode_batch(merge_batches(rank_results))
    except NotMergedError as error:
        session.report_not_imposed(str(error))
        return result
    session.rows = [rows_of_batch(rank_result) for rank_result in rank_results]
    session.batch_size = sum(session.rows)
    return merged_batch
