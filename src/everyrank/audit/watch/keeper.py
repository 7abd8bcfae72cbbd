"""What a replay needs of each backward: the inputs of its forward, the generator, and how the loss came of its output.

Under `audit --replay`, for the first updates. Each rank writes a file for each backward; rank 0 also keeps parameters
and buffers as they were. What was computed of the model's output is kept as the torch functions that were called, with
their arguments: a script's own code cannot be called again, these can. What cannot be kept is said, and nothing of that
update and the later ones is replayed.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from everyrank.audit.events import Unchecked
from everyrank.audit.watch.gradients import Gradients
from everyrank.audit.watch.kept import Kept, KeptBackward, ReplayError, State, Step, backward_path, writable
from everyrank.audit.watch.losses import Losses
from everyrank.audit.watch.recorder import Recorder, harmless, tensors

__all__ = ["Keeper", "generator_states", "install_keeper"]

_MOST_PARAMETERS = 20_000_000
_MOST_BYTES = 64 * 2**20  # of the inputs and targets of a rank's update
_MOST_STEPS = 500  # functions from the output to the loss
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size, slice, type(...))


class Keeper:
    """Keeps what the first updates need to be run again."""

    def __init__(self, recorder: Recorder, losses: Losses, gradients: Gradients) -> None:
        self.recorder, self.losses, self.gradients = recorder, losses, gradients
        self.root: Any = None  # the model, without what wraps it
        self.world_size = 1
        self.states: dict[int, State] = {}
        self.is_over = False
        self.piece: KeptBackward | None = None
        self.known: dict[int, Any] = {}  # tensors that are computed again, by id; held, so ids stay theirs
        self.num_bytes: dict[int, int] = {}  # by update

    @property
    def rank(self) -> int:
        """A process without a process group is rank 0."""
        return max(self.recorder.rank, 0)

    @property
    def is_wanted(self) -> bool:
        """Whether this update is one that is to be replayed, and what happens now is the script's doing."""
        recorder = self.recorder
        is_inside = self.is_over or recorder.is_muted or recorder.phase.startswith("backward")  # there it recomputes
        return not is_inside and recorder.update < recorder.settings.replay

    def give_up(self, why: Any) -> None:
        """Say it; what was kept of the updates before is replayed."""
        self.is_over, self.piece, self.known = True, None, {}
        self.states.pop(self.recorder.update, None)
        self.recorder.write(Unchecked(message=f"replay: {why}"))

    @harmless("replay: what a forward is given")
    def before(self, module: Any, args: Any, kwargs: Any) -> None:
        """Keep the inputs of a forward; on rank 0 the model as it is, at the first of an update."""
        root = module.module if isinstance(module, DistributedDataParallel) else module
        try:
            with self.recorder.muted():
                self._refuse(root)
                self.root = root
                self.world_size = dist.get_world_size() if dist.is_initialized() else 1
                self.piece = KeptBackward(tree_map(self._input, (args, kwargs)), generator_states(root))
                if self.rank == 0 and self.recorder.update not in self.states:
                    self.states[self.recorder.update] = _state_of(root)
        except ReplayError as why:
            self.give_up(why)

    def after(self, output: Any) -> None:
        """What is computed of this output is kept from now on."""
        if self.piece is not None:
            self.known = {id(tensor): tensor for tensor in tensors(output)}
            self.piece.outputs = [id(tensor) for tensor in tensors(output)]

    @harmless("replay: what is computed of the model's output")
    def called(self, function: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Keep a torch function that was given what is known: its results are known, too."""
        given = list(tensors((args, kwargs)))
        if function is torch.Tensor.__setitem__ and id(args[0]) in self.known:
            self.give_up("the model's output, or what is computed of it, is written into")
            return
        results = list(tensors(out))
        if self.piece is None or not results or not any(id(tensor) in self.known for tensor in given):
            return
        if any(id(result) not in self.known and any(result is tensor for tensor in given) for result in results):
            if any(result.requires_grad for result in results):
                self.give_up(f"the loss is added up in place ({function.__name__}) in a tensor of the script's own")
            return  # a sum of the script's own, for its log
        try:
            with self.recorder.muted():
                args, kwargs = tree_map(self._argument, (tuple(args), dict(kwargs)))
        except ReplayError as why:
            self.give_up(why)
            return
        numbers = [id(tensor) for tensor in results]
        self.piece.steps.append(Step(writable(function), args, kwargs, numbers, torch.is_grad_enabled()))
        self.known |= {id(tensor): tensor for tensor in results}
        if len(self.piece.steps) > _MOST_STEPS:
            self.give_up(f"more than {_MOST_STEPS} functions between the model's output and the loss")

    @harmless("replay: a backward")
    def backward(self, roots: Any, has_gradient: bool) -> KeptBackward | None:
        """The piece that this backward ends, with the steps to its root alone."""
        piece, known = self.piece, self.known
        self.piece, self.known = None, {}
        roots = [roots] if isinstance(roots, torch.Tensor) else list(roots)
        if piece is None:
            self.give_up("a backward without a forward of the model of its own")
        elif len(roots) != 1 or roots[0].numel() != 1 or has_gradient:
            self.give_up("a backward of something that is not one number")
        elif id(roots[0]) not in known:
            self.give_up("the loss is computed of the model's output by something that torch does not show")
        else:
            piece.root = id(roots[0])
            piece.steps = _leading_to(piece)
            return piece
        return None

    def write(self, piece: KeptBackward, update: int, micro: int) -> None:
        """Into a file of its own, whole or not at all."""
        path = backward_path(self.recorder.folder, self.rank, update, micro)
        try:
            with self.recorder.muted():
                torch.save(piece, path.with_suffix(".part"))
                os.replace(path.with_suffix(".part"), path)  # noqa: PTH105
        except Exception as error:
            self.give_up(f"what leads to the loss cannot be written to a file ({type(error).__name__}: {error})"[:200])

    def _refuse(self, root: Any) -> None:
        parameters = list(root.parameters())
        kinds = {type(module).__name__ for module in root.modules()}
        device = parameters[0].device.type
        number = sum(parameter.numel() for parameter in parameters)
        if self.piece is not None:
            raise ReplayError("two forwards of the model, then a backward")
        if self.root is not None and root is not self.root:
            raise ReplayError("several models are trained, or one in parts that are called one by one")
        if "FullyShardedDataParallel" in kinds or any(hasattr(parameter, "to_local") for parameter in parameters):
            raise ReplayError("the parameters are sharded (fully_shard, FSDP or DTensor)")
        if torch.is_autocast_enabled(device):
            raise ReplayError("forward runs under autocast: its rounding is larger than what there is to see")
        if any(parameter.dtype not in (torch.float32, torch.float64) for parameter in parameters):
            raise ReplayError("parameters of less than float32")
        if number > _MOST_PARAMETERS:
            raise ReplayError(f"{number:,} parameters, more than {_MOST_PARAMETERS:,}")

    def _copied(self, tensor: Any) -> Any:
        update = self.recorder.update
        self.num_bytes[update] = self.num_bytes.get(update, 0) + tensor.numel() * tensor.element_size()
        if self.num_bytes[update] > _MOST_BYTES:
            raise ReplayError(f"more than {_MOST_BYTES >> 20} MiB of inputs and targets on a rank for an update")
        return tensor.detach().clone()

    def _input(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            if not isinstance(value, _PLAIN):
                raise ReplayError(f"an input of the model is of {type(value).__name__}")
            return value
        if value.requires_grad:
            raise ReplayError("an input of the model needs a gradient")
        return self._copied(value)

    def _argument(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in self.known:
            return Kept(id(value))
        if value.requires_grad:
            raise ReplayError("the loss is of more than the model's output: of something else that needs a gradient")
        return self._copied(value)


def _leading_to(piece: KeptBackward) -> list[Step]:
    """The steps that its root depends on, in order: what was computed for a log is left out."""
    needed, kept = {piece.root}, []
    for step in reversed(piece.steps):
        if needed.intersection(step.results):
            kept.append(step)
            tree_map(
                lambda value: needed.add(value.number) if isinstance(value, Kept) else None, (step.args, step.kwargs)
            )
    return kept[::-1]


def generator_states(root: Any) -> list[Any]:
    """Of the CPU's generator; and of the CUDA device's that the model is on."""
    device = next(root.parameters()).device
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _state_of(root: Any) -> State:
    held = {name: value.detach().clone() for name, value in [*root.named_parameters(), *root.named_buffers()]}
    return State(held, [module.training for module in root.modules()])


class Called(TorchFunctionMode):
    """Shows the keeper each torch function that the script calls outside of its model."""

    def __init__(self, keeper: Keeper) -> None:
        super().__init__()
        self.keeper = keeper

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keeper = self.keeper
        out = func(*args, **(kwargs or {}))
        if keeper.known and keeper.losses.depth == 0 and keeper.is_wanted:
            keeper.called(func, args, kwargs or {}, out)
        return out


def install_keeper(keeper: Keeper) -> None:
    """Look at the forwards and backwards of the updates that are to be replayed. After the other hooks: around them."""
    module_call, autograd_backward = torch.nn.Module.__call__, torch.autograd.backward

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_kept = keeper.is_wanted and keeper.losses.depth == 0 and torch.is_grad_enabled()
        if not is_kept or not any(parameter.requires_grad for parameter in self.parameters()):
            return module_call(self, *args, **kwargs)
        keeper.before(self, args, kwargs)
        output = module_call(self, *args, **kwargs)
        keeper.after(output)
        return output

    def backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
        if not keeper.is_wanted:
            return autograd_backward(roots, *args, **kwargs)
        given = list(tensors((args[:1], kwargs.get("grad_tensors"))))
        piece = keeper.backward(roots, bool(given))
        update, micro, terms = keeper.recorder.update, keeper.recorder.micro, keeper.losses.terms
        out = autograd_backward(roots, *args, **kwargs)
        if piece is not None:
            piece.losses = [term for term in terms if term.scale]
            keeper.write(piece, update, micro)
        return out

    torch.nn.Module.__call__, torch.autograd.backward = call, backward
    Called(keeper).__enter__()
