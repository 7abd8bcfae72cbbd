"""In a test-suite: a training, or the gradients of own parallel code, asserted to be those of one device.

    from everyrank.testing import assert_same_gradients, assert_same_training

    def test_layouts():
        assert_same_training(my_workload(), ["ddp", "fsdp", "my_parallel.py:tensor=2"])

Ranks are processes of their own, started and ended within each call; on CPU unless `device` says otherwise.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import cloudpickle

from everyrank import api
from everyrank.errors import UnsupportedLayoutError, UsageError, is_user_code
from everyrank.launch import Launch, run_ranks
from everyrank.layout import Layout, ParallelContract, parse_layout
from everyrank.options import VerifyOptions
from everyrank.record import Parity
from everyrank.workload import Source, Workload

if TYPE_CHECKING:
    from torch import nn

__all__ = ["assert_same_gradients", "assert_same_training"]


def assert_same_training(
    workload: Workload | Source,
    layouts: Sequence[Layout | str] | Layout | str,
    processes: int = 2,
    *,
    steps: int = 6,
    quick: bool = True,
    reference: Layout | str | None = None,
    device: str | None = "cpu",
    backend: str | None = None,
    timeout_seconds: float = 120.0,
) -> None:
    """Assert that each layout computes the same training as one device. Same checks as `everyrank verify`.

    Args:
        workload: A `Workload`, which may contain closures and lambdas, or the result of `find_workload`.
        layouts: One or more layouts as you type them ("fsdp:tensor=2", "my_parallel.py:tensor=2"), or as `Layout`.
        processes: Number of ranks of each layout.
        steps: Number of updates to compare. The last of the first epoch and the first of the second are among them.
        quick: Compare only in float64. False: in the layout's own precision, too.
        reference: The layout to compare with, if the model does not fit one device.
        device: cpu or cuda.
        backend: shm, gloo, nccl or mpi. None: shm for ranks of one host on CPU, otherwise nccl.
        timeout_seconds: Longest wait for another rank.

    Raises:
        AssertionError: A layout is not equivalent, is not supported by this workload, or cannot run here. The message
            has a line for each: the first difference, its size, and the likely cause.
        EveryrankError: The call is wrong, or code of the workload raises an error.

    Examples:
        >>> from everyrank import find_workload
        >>> from everyrank.testing import assert_same_training
        >>> assert_same_training(find_workload("digits"), ["ddp", "zero1"], steps=3)
    """
    __tracebackhide__ = True  # pytest then shows the user's line
    named = [layouts] if isinstance(layouts, Layout | str) else layouts
    parsed = [parse_layout(layout) if isinstance(layout, str) else layout for layout in named]
    launch = Launch(processes=processes, device=device, backend=backend, timeout_seconds=timeout_seconds)
    options = VerifyOptions(steps=steps, quick=quick, show=False, reference=str(reference) if reference else None)
    try:
        with _sent_by_value(*_callables(workload)):
            records = api.verify(workload, parsed, launch, options=options)
    except UnsupportedLayoutError as error:
        raise AssertionError(f"{', '.join(map(str, parsed))}: refused: {error}") from None
    findings = [_finding(record.layout, record.parity) for record in records if record.parity.status != "equal"]
    if findings:
        raise AssertionError("\n".join(findings))


def assert_same_gradients(
    model: nn.Module | Callable[[], nn.Module],
    parallelize: Callable[[Any, Any], Any],
    inputs: tuple[Any, Any],
    loss: Callable[[Any, Any], tuple[Any, Any]],
    mesh: Mapping[str, int],
    *,
    contract: ParallelContract | None = None,
    sequence_dim: int | None = None,
    clip_norm: float | None = None,
    allow_uncompared: Sequence[str] = (),
    device: str | None = "cpu",
    backend: str | None = None,
    timeout_seconds: float = 120.0,
) -> None:
    """Assert that the gradients of `parallelize(model, mesh)` on all ranks are those of `model` on one device.

    The comparison is in float64. Buffers of asynchronous collectives hold NaN until they are waited for.

    Args:
        model: A module, of which each rank gets a copy, or `() -> nn.Module`, called after seeding.
        parallelize: `(model, mesh) -> model`, with torch's DeviceMesh of these axes. May be a closure or a lambda.
        inputs: One batch (input, target), each a tensor (N, ...), or a tuple or dict of tensors. Ranks along a "batch"
            axis get parts of it, so N is at least their number.
        loss: `(output, target) -> (sum, count)`: the sum of the loss terms, and their number.
        mesh: Axis -> ranks along it, outermost first. Their product is the number of processes.
        contract: What the ranks of an axis read, and what the gradient is. None: `parallelize.contract`, or the
            `contract` of its module, or the usual names (`ParallelContract`).
        sequence_dim: The sequence dimension of the input, for an axis that splits it.
        clip_norm: Also clip the gradients to this norm, with the contract's `clip_grad_norm` if it has one.
        allow_uncompared: Names of tensors, or patterns such as "blocks.*.qkv.weight", that need not be compared. A
            part of a tensor is not compared if no DTensor describes it and the contract's `gather` does not gather
            it. That fails unless you list it here.
        device: cpu or cuda.
        backend: shm, gloo, nccl or mpi. None: shm for ranks of one host on CPU, otherwise nccl.
        timeout_seconds: Longest wait for another rank.

    Raises:
        AssertionError: A gradient differs, or tensors were not compared. The message has the first difference, its
            size, and the likely cause.
        EveryrankError: The call is wrong, or user code raises an error.

    Examples:
        >>> import torch
        >>> from torch.distributed.fsdp import fully_shard
        >>> from everyrank.testing import assert_same_gradients
        >>> assert_same_gradients(
        ...     model=torch.nn.Linear(4, 2),
        ...     parallelize=lambda model, mesh: fully_shard(model, mesh=mesh),
        ...     inputs=(torch.randn(8, 4), torch.randn(8, 2)),
        ...     loss=lambda output, target: (((output - target) ** 2).sum(), target.numel()),
        ...     mesh={"data": 2},
        ... )
    """
    from torch import nn

    __tracebackhide__ = True
    if contract is None:
        contract = getattr(parallelize, "contract", getattr(parallelize, "__globals__", {}).get("contract"))
    build: Any = (lambda: copy.deepcopy(model)) if isinstance(model, nn.Module) else model
    size = _size(inputs)
    workload = Workload(
        name="gradients",
        model=build,
        train_data=lambda: [_row(inputs, index) for index in range(size)],
        loss=loss,
        optimizer=_sgd,
        global_batch=size,
        steps=1,
        sequence_dim=sequence_dim,
        clip_norm=clip_norm,
    )
    processes = math.prod(mesh.values())
    launch = Launch(processes=processes, device=device, backend=backend, timeout_seconds=timeout_seconds)
    layout = Layout(_place(parallelize), degrees=dict(mesh))
    with _sent_by_value(parallelize, loss, model, *(model.modules() if isinstance(model, nn.Module) else ())):
        arguments = (workload, layout, parallelize, contract, launch)
        parity: Parity = run_ranks(launch, "everyrank.parity.rank:verify_gradients_rank", *arguments)[0]
    if parity.status != "equal":
        raise AssertionError(_finding(str(layout), parity))
    left_out = [
        name for name in parity.not_compared if not any(fnmatchcase(name, pattern) for pattern in allow_uncompared)
    ]
    if left_out:
        raise AssertionError(
            f"{layout}: not compared: {', '.join(left_out)}: no DTensor says which part of them a rank has. Give the "
            "contract a gather that puts them together, ParallelContract(gather=lambda model, mesh: {name: whole "
            f"tensor}}), or allow it, allow_uncompared=[{left_out[0]!r}{', ...' * (len(left_out) > 1)}]"
        )


def _finding(layout: str, parity: Parity) -> str:
    """Format one line: layout, first divergence, difference, and likely cause."""
    text = f"{layout}: {parity.outcome}"
    if parity.max_relative_difference is not None:
        text += f": off by {parity.max_relative_difference:.1e} (tolerance {parity.tolerance:.0e})"
    return text + (f"; likely cause: {parity.cause}" if parity.cause else "")


def _place(function: Any) -> str:
    """Return the layout name of a function: `test_model.py:parallelize`."""
    code = getattr(function, "__code__", None)
    file = Path(code.co_filename).name if code is not None else ""
    return f"{file if file.endswith('.py') else 'given.py'}:{getattr(function, '__name__', type(function).__name__)}"


def _size(inputs: tuple[Any, Any]) -> int:
    """Return the batch size. Raises `UsageError` if it is no (input, target) of tensors."""
    sizes = {leaf.shape[0] if leaf.dim() else 0 for leaf in _leaves(inputs)}
    if not isinstance(inputs, tuple) or len(inputs) != 2 or len(sizes) != 1 or 0 in sizes:
        raise UsageError(
            "inputs: give (input, target), tensors of one batch, whose first dimension is as long in all of them"
        )
    return sizes.pop()


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value] if hasattr(value, "dim") else []


def _row(value: Any, index: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _row(item, index) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_row(item, index) for item in value)
    return value[index] if hasattr(value, "dim") else value


def _sgd(model: Any) -> Any:
    from torch.optim import SGD

    return SGD(model.parameters(), lr=1.0)


def _callables(workload: Workload | Source) -> list[Any]:
    return list(vars(workload).values()) if isinstance(workload, Workload) else []


@contextlib.contextmanager
def _sent_by_value(*values: Any) -> Generator[None]:
    """Send objects from the user's modules by value if a rank cannot import these modules.

    This happens when pytest loads test files with `--import-mode=importlib`.
    """
    modules = {getattr(value, "__module__", None) or type(value).__module__ for value in values}
    hidden = [module for name in modules if (module := sys.modules.get(name)) is not None and _is_hidden(module)]
    for module in hidden:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in hidden:
            cloudpickle.unregister_pickle_by_value(module)


def _is_hidden(module: ModuleType) -> bool:
    """Whether a rank, with the same `sys.path` but not `sys.modules`, cannot find this module."""
    file = getattr(module, "__file__", None)
    if file is None or not is_user_code(file) or module.__name__ == "__main__":
        return False
    folders: list[str] | None = None
    is_hidden = None
    for end in range(1, module.__name__.count(".") + 2):
        try:
            is_hidden = PathFinder.find_spec(".".join(module.__name__.split(".")[:end]), folders)
        except (ImportError, KeyError, ValueError):
            return True
        if is_hidden is None:
            return True
        folders = list(is_hidden.submodule_search_locations or [])
    return is_hidden is None or is_hidden.origin != file
