"""Functions of the script that draw batches: recorded, and put together from several ranks, as the batches of loaders.

A function counts if its source draws random numbers and it returns or yields tensors without a gradient, without
calling a model. Only the script itself is looked at, not the files that it imports.
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
from everyrank.rerun.inside.batches import NotMergedError, decoded, encoded, is_equal, merged, num_bytes, rows_of_batch
from everyrank.rerun.inside.session import Session

__all__ = ["run_with_sources"]

_DECORATOR = "_everyrank_source"
_LOOP = "_everyrank_batches"
_DRAWS = ("rand", "Generator", "normal", "multinomial", "bernoulli", "poisson", "choice", "sample")
_MOST_BYTES = 3e8


def run_with_sources(session: Session, path: str) -> None:
    """Run a script as `runpy.run_path` does, with its functions that draw under a decorator.

    Raises what the script raises.
    """
    tree = ast.parse(Path(path).read_bytes(), path)
    if session.settings["larger"]:
        with_larger_batches(tree, len(session.imposed), session.settings["larger"])
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.decorator_list and _draws(node):
            name = ast.Name(_DECORATOR, ast.Load())
            node.decorator_list = [ast.copy_location(name, node)]  # its line stays that of `def`
    for loop in _training_loops(tree):
        name = ast.copy_location(ast.Name(_LOOP, ast.Load()), loop.iter)
        loop.iter = ast.copy_location(ast.Call(name, [loop.iter], []), loop.iter)
    setattr(builtins, _DECORATOR, functools.partial(_watched, session))
    setattr(builtins, _LOOP, functools.partial(_watched_loop, session))
    module = types.ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    code = compile(tree, path, "exec", dont_inherit=True)
    exec(code, module.__dict__)  # noqa: S102  (the script that the user gives)


def _training_loops(tree: ast.Module) -> list[ast.For]:
    """The innermost loops that call `backward`, or a function of the script that does."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    names, calls = {"backward"}, {function.name: _calls(function) for function in functions}
    while more := {name for name, called in calls.items() if called & names} - names:
        names |= more
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For) and _calls(node) & names]
    return [loop for loop in loops if not any(other in loops for other in ast.walk(loop) if other is not loop)]


def _calls(node: ast.AST) -> set[str]:
    functions = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    return {getattr(function, "attr", getattr(function, "id", "")) for function in functions}


def _draws(function: ast.FunctionDef) -> bool:
    """Whether a function names something that draws."""
    names = [getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(function)]
    return any(word in name for name in names for word in _DRAWS if isinstance(name, str))


def _watched(session: Session, function: Any) -> Any:
    """The function, whose results are recorded or imposed."""
    if inspect.isgeneratorfunction(function):
        return _watched_generator(session, function)

    @functools.wraps(function)
    def source(*args: Any, **kwargs: Any) -> Any:
        if not session.is_active or session.in_source:
            return function(*args, **kwargs)
        key = session.key_of_update(f"source {function.__code__.co_firstlineno}")
        parts = [each["sources"][key] for each in session.imposed if key in each.get("sources", {})]
        is_imposed = len(parts) == len(session.imposed) > 0
        is_own = is_imposed and not all(is_equal(part, parts[0]) for part in parts[1:])
        calls = session.num_calls
        with session.natural() if is_own else contextlib.nullcontext():
            result = function(*args, **kwargs)
        with session.quiet():
            if session.imposed:
                return _together(session, parts, result) if is_own or (is_imposed and len(parts) == 1) else result
            if session.num_calls == calls and _is_batch(result):
                _record(session, key, result)
        return result

    return source


def _watched_generator(session: Session, function: Any) -> Any:
    """The generator function, whose items are recorded or imposed."""

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


def _watched_loop(session: Session, items: Any) -> Any:
    """What a training loop iterates over: batches that do not come from a DataLoader are recorded, or imposed."""
    if not session.is_active or session.in_source or not hasattr(items, "__iter__"):
        return items
    key = session.key("loop")
    session.facts.setdefault("loops", []).append([key[0], key[2], session.update])
    if not session.imposed:
        return _recorded_items(session, key, iter(items), _is_chosen)
    return _imposed_items(session, key, items) if session.settings["reads"] else items


def _imposed_items(session: Session, key: tuple[str, str, int], iterator: Any) -> Any:
    """The recorded items of all ranks, put together; the iterator itself if the ranks have read the same."""
    lists = [each["sources"][key]["items"] for each in session.imposed if key in each.get("sources", {})]
    is_imposed = len(lists) == len(session.imposed)
    is_common = len(lists) > 1 and all(is_equal(items, lists[0]) for items in lists[1:])
    return _items_together(session, lists) if is_imposed and not is_common else iterator


def _recorded_items(session: Session, key: tuple[str, str, int], iterator: Any, is_batch: Callable[[Any], bool]) -> Any:
    """The items of a generator, recorded as long as they are batches that no model computes."""
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
    """Record an item, unless it is too large or cannot be put together."""
    size = session.facts.get("bytes", 0) + num_bytes(item)
    try:
        if size <= _MOST_BYTES:
            items.append(encoded(item))
    except NotMergedError:
        return False
    session.facts["bytes"] = size
    return size <= _MOST_BYTES


def _items_together(session: Session, lists: list[list[Any]]) -> Any:
    """What the generator has given on the ranks, one by one as one batch."""
    for index in range(max(map(len, lists))):
        with session.quiet():
            parts = [items[index] for items in lists if index < len(items)]
            item = _together(session, parts, decoded(parts[0]))
        yield item


def _is_batch(result: Any) -> bool:
    tensors = [each for each in _leaves(result) if isinstance(each, torch.Tensor)]
    return any(each.dim() for each in tensors) and not any(each.requires_grad for each in tensors)


def _is_chosen(item: Any) -> bool:
    """Whether a training loop is given a batch: tensors, arrays, or a list of indices."""
    if isinstance(item, tuple | dict):
        return any(map(_is_chosen, item.values() if isinstance(item, dict) else item))
    if isinstance(item, list):
        return all(isinstance(each, int) for each in item) or any(map(_is_chosen, item))
    return _is_batch(item) or getattr(item, "ndim", 0) > 0


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in _leaves(each)]
    return [leaf for each in value for leaf in _leaves(each)] if isinstance(value, list | tuple) else [value]


def _record(session: Session, key: tuple[str, str, int], result: Any) -> None:
    try:
        size = session.facts.get("bytes", 0) + num_bytes(result)
        if size <= _MOST_BYTES:
            session.facts["bytes"] = size
            session.sources.append((key, encoded(result)))
    except NotMergedError:
        pass  # it returns something else, which this run leaves as it is


def _together(session: Session, parts: list[Any], result: Any) -> Any:
    """What the function has given on the ranks, as one batch."""
    try:
        whole = decoded(merged(parts))
    except NotMergedError as error:
        session.refuse(str(error))
        return result
    session.rows = [rows_of_batch(part) for part in parts]
    session.batch_size = sum(session.rows)
    return whole
