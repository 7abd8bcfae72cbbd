"""The first updates once more, in one process and in float64: what the gradient of all samples of an update is.

Runs on rank 0 when the script is done, on the script's own model: its parameters and buffers are put in for a while
(`torch.func.functional_call`), as they were before the update, so nothing of the model is copied and no hook of
DistributedDataParallel runs. Nothing is sent: other ranks may have gone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from everyrank.audit.events import ReplayedUpdate, Unchecked
from everyrank.audit.watch.gradients import sample
from everyrank.audit.watch.keeper import Keeper, generator_states
from everyrank.audit.watch.kept import Kept, KeptBackward, ReplayError, State, backward_path
from everyrank.audit.watch.losses import DROPOUTS
from everyrank.audit.watch.recorder import tensors

__all__ = ["run_replay", "term_weights"]

_MOST_SECONDS = 60.0  # in all
_WAIT_SECONDS = 15.0  # for the other ranks to end, too
_SAME_WEIGHT = 1e-6  # relative


def run_replay(keeper: Keeper) -> None:
    """Replay the updates that were kept, in this process if it is rank 0, and write down what each gives."""
    recorder, end = keeper.recorder, time.monotonic() + _MOST_SECONDS
    keeper.is_over = True
    if keeper.states:
        _wait_for_all(keeper)
    for update, state in sorted(keeper.states.items()):
        if update >= recorder.update:
            break  # the script has ended before its step
        try:
            with recorder.muted(), undisturbed(keeper.root, state):
                pieces = _read_pieces(keeper, update)
                replay = _Replay(keeper, state, pieces, end)
                recorder.arrays(f"replay{update}", replay.content())
        except Exception as error:
            recorder.write(Unchecked(message=f"replay of update {update}: {_why(error)}"))
            return  # of the others it would be the same
        weights = {f"{rank}.{micro}": weight for (rank, micro), weight in zip(pieces, replay.weights, strict=True)}
        recorder.write(
            ReplayedUpdate(
                number=update,
                weights=weights,
                is_weighted=replay.is_weighted,
                coupling=replay.coupling,
                without_dropout=replay.functions.drops,
                sizes=replay.sizes,
            )
        )


def _wait_for_all(keeper: Keeper) -> None:
    """Until the other ranks have ended, or will not: what they have kept is whole then."""
    end = time.monotonic() + _WAIT_SECONDS
    places = [keeper.recorder.folder / f"done{rank}" for rank in range(keeper.world_size)]
    while not all(place.exists() for place in places) and time.monotonic() < end:
        time.sleep(0.05)


def _why(error: Exception) -> str:
    """In a line: what we refuse, or why the model fails when it runs once more."""
    if isinstance(error, SendsError):
        return "the model or the loss calls a collective"
    if isinstance(error, ReplayError):
        return str(error)
    said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return f"the model does not run once more in float64 ({said[:200]})"


def term_weights(pieces: Sequence[KeptBackward]) -> list[float] | None:
    """By what to multiply the root of each piece, so that each of the N terms of all of them weighs 1/N.

    None where that is not known: no loss was seen, or several that would have to weigh differently.
    """
    if len({tuple((loss.name, loss.line) for loss in piece.losses) for piece in pieces}) != 1:
        return None
    weights: list[list[float]] = []  # by loss
    for losses in zip(*(piece.losses for piece in pieces), strict=True):
        scales = [loss.scale for loss in losses if loss.scale and loss.terms and loss.reduction in ("mean", "sum")]
        if len(scales) < len(losses):
            return None
        count = sum(loss.terms for loss in losses)
        factors = [loss.terms if loss.reduction == "mean" else 1.0 for loss in losses]
        weights.append([factor / (count * scale) for factor, scale in zip(factors, scales, strict=True)])
    if not weights or not np.allclose(weights, weights[0], rtol=_SAME_WEIGHT, atol=0):
        return None
    return weights[0]


def _read_pieces(keeper: Keeper, update: int) -> dict[tuple[int, int], KeptBackward]:
    """The backwards of this update on all ranks, by rank and number."""
    folder = keeper.recorder.folder
    paths: dict[int, list[Any]] = {}
    for rank in range(keeper.world_size):
        paths[rank] = sorted(folder.glob(backward_path(folder, rank, update, "*").name), key=_micro)
        if not paths[rank]:
            raise ReplayError(f"rank {rank} has kept nothing of it")
    device = next(keeper.root.parameters()).device

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.cuda(device.index)

    return {
        (rank, _micro(path)): torch.load(path, map_location=place, weights_only=False)
        for rank, own in paths.items()
        for path in own
    }


def _micro(path: Path) -> int:
    return int(path.stem.rpartition(".")[2])


class _Replay:
    """One update: its gradient from each backward alone, and from all its samples as one batch."""

    def __init__(self, keeper: Keeper, state: State, pieces: dict[tuple[int, int], KeptBackward], end: float) -> None:
        self.root, self.state, self.end = keeper.root, state, end
        self.names = {
            name: keeper.gradients.names[id(p)] for name, p in self.root.named_parameters() if p.requires_grad
        }
        self.places, self.pieces = list(pieces), list(pieces.values())
        self.world_size = keeper.world_size
        weights = term_weights(self.pieces)
        self.weights = weights or [1 / len(self.pieces)] * len(self.pieces)
        # several losses may have any weights that the script gives them
        self.is_weighted = weights is not None and len(self.pieces[0].losses) == 1
        self.coupling = ""  # why the effect of batch norm could not be measured
        self.sizes = [num_rows(piece) for piece in self.pieces]
        self.functions = StandIn()

    def content(self) -> dict[str, np.ndarray]:
        """Samples of the gradients, by "kind name".

        piece.R.M  of backward M of rank R, as its root was
        whole      their sum, each with its weight: what a step should be given
        union      of all samples as one batch
        apart      the same, with batch norm over the samples of one backward at a time
        alone      as whole, without dropout, as union and apart are
        """
        found: dict[str, np.ndarray] = {}
        try:
            each = self.each()
        except SendsError:
            self.coupling = "sends"
            try:
                return self._named("union", self.union(None))
            except Exception as error:
                raise ReplayError(
                    f"the model calls a collective in its forward; as one batch: {_why(error)}"
                ) from error
        for (rank, micro), gradient in zip(self.places, each, strict=True):
            found |= self._named(f"piece.{rank}.{micro}", gradient)
        whole = self.weighted(each)
        found |= self._named("whole", whole)
        if self.functions.num_norms and len(self.pieces) > 1:
            try:
                found |= self._coupling(whole)
            except Exception as error:
                self.coupling = _why(error)
        return found

    def _coupling(self, whole: dict[str, Any]) -> dict[str, np.ndarray]:
        if self.functions.has_drawn:
            self.functions.drops = True
            whole = self.weighted(self.each())
        parts = {"union": self.union(None), "apart": self.union(self.sizes), "alone": whole}
        return {key: value for kind, part in parts.items() for key, value in self._named(kind, part).items()}

    def each(self) -> list[dict[str, Any]]:
        """The gradient of each backward, as float64 gives it."""
        return [self.gradient(lambda root, piece=piece: self._root_of(root, piece), False) for piece in self.pieces]

    def weighted(self, each: list[dict[str, Any]]) -> dict[str, Any]:
        names = {name: None for gradient in each for name in gradient}
        pairs = list(zip(self.weights, each, strict=True))
        return {name: sum(weight * own[name] for weight, own in pairs if name in own) for name in names}

    def union(self, segments: list[int] | None) -> dict[str, Any]:
        """The gradient of all samples as one batch; batch norm over so many at a time where `segments` are given."""
        sizes = self.sizes
        inputs = as_one_batch([piece.inputs for piece in self.pieces], sizes)

        def root_of(root: Any) -> Any:
            args, kwargs = wide(inputs)
            outputs = list(tensors(self._forward(root, args, kwargs, self.pieces[0].generator)))
            if self.functions.has_drawn:
                raise ReplayError("random numbers are drawn in forward: over one batch they are others")
            ends = np.cumsum(sizes).tolist()
            roots = [
                _follow(piece, [part_of(out, end - size, end, ends[-1]) for out in outputs])
                for piece, size, end in zip(self.pieces, sizes, ends, strict=True)
            ]
            return sum(weight * one for weight, one in zip(self.weights, roots, strict=True))

        self.functions.segments = segments
        try:
            return self.gradient(root_of, True)
        finally:
            self.functions.segments = None

    def gradient(self, root_of: Callable[[Any], Any], is_whole: bool) -> dict[str, Any]:
        """Of the number that `root_of(model)` computes, by name; a recomputation in backward finds the same tensors."""
        if time.monotonic() > self.end:
            raise ReplayError(f"{_MOST_SECONDS:g} s were spent on the replay")
        held = {name: wide(value) for name, value in self.state.tensors.items()}
        trained = {name: held[name].requires_grad_() for name in self.names}
        holder = _Holder(self.root)
        self.functions.num_norms, self.functions.has_drawn = 0, False

        def work(root: Any) -> None:
            torch.autograd.backward(root_of(root))

        size = 1 if is_whole else self.world_size
        with as_world_of(size), self.functions:
            inside = {f"root.{name}": value for name, value in held.items()}
            torch.func.functional_call(holder, inside, (work,))
        return {name: value.grad for name, value in trained.items() if value.grad is not None}

    def _root_of(self, root: Any, piece: KeptBackward) -> Any:
        args, kwargs = wide(piece.inputs)
        return _follow(piece, list(tensors(self._forward(root, args, kwargs, piece.generator))))

    def _forward(self, root: Any, args: Any, kwargs: Any, generator: list[Any]) -> Any:
        torch.set_rng_state(generator[0])
        for cuda in generator[1:]:
            torch.cuda.set_rng_state(cuda, next(root.parameters()).device)
        out = root(*args, **kwargs)
        self.functions.has_drawn |= not all(map(torch.equal, generator_states(root), generator))
        return out

    def _named(self, kind: str, gradient: dict[str, Any]) -> dict[str, np.ndarray]:
        return {f"{kind} {self.names[name]}": sample(value) for name, value in gradient.items()}


class _Holder(torch.nn.Module):
    """So that work on a model, and not its forward alone, is done while other tensors stand in for its own."""

    def __init__(self, root: Any) -> None:
        super().__init__()
        self.root = root

    def forward(self, work: Callable[[Any], Any]) -> Any:
        return work(self.root)


def _follow(piece: KeptBackward, outputs: Sequence[Any]) -> Any:
    """The root of a piece, from what the model has returned: the same functions, called again."""
    known = dict(zip(piece.outputs, outputs, strict=True))

    def value_of(value: Any) -> Any:
        if not isinstance(value, Kept):
            return wide(value)
        if value.number not in known:
            raise ReplayError("the loss is of something that torch does not show to come of the model's output")
        if known[value.number] is None:
            raise ReplayError("the model returns no row for each sample (its loss is computed inside)")
        return known[value.number]

    for step in piece.steps:
        args, kwargs = tree_map(value_of, (step.args, step.kwargs))
        with torch.set_grad_enabled(step.is_grad):
            known |= dict(zip(step.results, tensors(step.function(*args, **kwargs)), strict=True))
    root = value_of(Kept(piece.root))
    if not root.requires_grad:
        raise ReplayError("the loss is computed by an autograd.Function of the script's own")
    return root


def wide(value: Any) -> Any:
    """A copy, floating-point tensors as float64."""

    def widened(one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        return one.to(torch.float64, copy=True) if one.is_floating_point() else one.clone()

    return tree_map(widened, value)


# --- the inputs of several forward passes as those of one, and its outputs cut up again


def part_of(out: Any, begin: int, end: int, total: int) -> Any:
    """Of an output the samples from `begin` to `end`; None where its first dim is not the samples."""
    return out[begin:end] if out.dim() and out.shape[0] == total else None


def num_rows(piece: KeptBackward) -> int:
    """How many samples a forward had: of its first tensor that has dims, the first."""
    return next((len(tensor) for tensor in tensors(piece.inputs) if tensor.dim()), 1)


def as_one_batch(inputs: Sequence[Any], sizes: list[int]) -> Any:
    """The inputs of several forwards as those of one: put together where they have a row for each sample."""
    flat = [tree_flatten(value) for value in inputs]
    if any(spec != flat[0][1] for _, spec in flat):
        raise ReplayError("the inputs of its forwards are not alike")
    parts: list[Any] = []
    for leaves in zip(*(values for values, _ in flat), strict=True):
        if not isinstance(leaves[0], torch.Tensor):
            is_same = all(leaf == leaves[0] for leaf in leaves)
        elif all(leaf.dim() and len(leaf) == size for leaf, size in zip(leaves, sizes, strict=True)):
            if len({leaf.shape[1:] for leaf in leaves}) > 1:
                raise ReplayError("the inputs of its forwards have different lengths")
            parts.append(torch.cat(list(leaves)))
            continue
        else:
            is_same = all(leaf.shape == leaves[0].shape and torch.equal(leaf, leaves[0]) for leaf in leaves)
        if not is_same:
            raise ReplayError("inputs that have no row for each sample differ between its forwards")
        parts.append(leaves[0])
    return tree_unflatten(parts, flat[0][1])


# --- what stands in for other ranks, for dropout, and for what batch norm looks at


_SENDING = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "reduce_scatter", "broadcast"),
    *("reduce_scatter_tensor", "all_to_all", "all_to_all_single", "reduce", "gather", "scatter", "barrier"),
    *("send", "recv", "isend", "irecv", "broadcast_object_list", "_all_gather_base"),
    *("all_gather_single", "reduce_scatter_single", "gather_single"),  # torch 2.13, 2.13 and 2.14 have these
)


class SendsError(Exception):
    """The model calls a collective in its forward."""


@contextlib.contextmanager
def undisturbed(root: Any, state: State) -> Generator[None]:
    """What is set for the replay is put back after it."""
    modules = list(root.modules())
    before = [module.training for module in modules], torch.get_default_dtype(), torch.is_grad_enabled()
    devices = [parameter.device for parameter in root.parameters() if parameter.device.type == "cuda"][:1]
    try:
        with torch.random.fork_rng(devices):
            for module, is_training in zip(modules, state.are_training, strict=True):
                module.training = is_training
            torch.set_default_dtype(torch.float64)
            torch.set_grad_enabled(True)
            yield
    finally:
        for module, is_training in zip(modules, before[0], strict=True):
            module.training = is_training
        torch.set_default_dtype(before[1])
        torch.set_grad_enabled(before[2])


class StandIn(TorchFunctionMode):
    """Counts batch norms over a batch, or makes them look at segments of it; can leave dropout out."""

    def __init__(self) -> None:
        super().__init__()
        self.num_norms, self.has_drawn, self.drops = 0, False, False
        self.segments: list[int] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUTS and self.drops:
            return args[0] if args else kwargs["input"]
        if func is F.batch_norm and _normalises_over_batch(args, kwargs):
            self.num_norms += 1
            if self.segments is not None:
                times, rest = divmod(len(args[0]), sum(self.segments))
                if rest:
                    raise ReplayError("batch norm over rows that are not samples")
                parts = args[0].split([size * times for size in self.segments])
                return torch.cat([func(part, *args[1:], **kwargs) for part in parts])
        return func(*args, **kwargs)


def _normalises_over_batch(args: Any, kwargs: Any) -> bool:
    return bool(kwargs.get("training", args[5] if len(args) > 5 else False))


class _NothingSent(TorchDispatchMode):
    """Stops what would be sent in a way that `as_world_of` does not know."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            raise SendsError
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def as_world_of(size: int) -> Generator[None]:
    """So many ranks are said to be there. In a world of one an all-reduce is no change; nothing is ever sent."""

    def sent(*_args: Any, **_kwargs: Any) -> Any:
        raise SendsError

    def stays(_tensor: Any, _op: Any = None, _group: Any = None, async_op: bool = False, **_kwargs: Any) -> None:
        if async_op:
            raise SendsError

    answers = {name: stays if size == 1 and name == "all_reduce" else sent for name in _SENDING}
    answers |= {"get_world_size": lambda *_, **__: size, "get_rank": lambda *_, **__: 0}
    with _replaced(dist, answers), _replaced(dist.distributed_c10d, answers), _NothingSent():
        yield


@contextlib.contextmanager
def _replaced(place: Any, answers: dict[str, Any]) -> Generator[None]:
    """Functions of a module, by name, as long as the block lasts."""
    before = {name: getattr(place, name) for name in answers if hasattr(place, name)}
    try:
        for name in before:
            setattr(place, name, answers[name])
        yield
    finally:
        for name, function in before.items():
            setattr(place, name, function)
