"""The contents of a checkpoint, independent of the layout: tensors by their names in the model, and a few values.

    average/<name>              moving averages of parameters, where the workload has an ema_decay
    model/<name>                parameters and persistent buffers; a sharded one as a sharded tensor
    optimizer/<name>/<key>      the optimizer's state of that parameter
    generators/<rank>           random generators of Python and numpy

A rank may hold only a part (a shard, or the optimizer state that it owns); all ranks together hold everything.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from everyrank.checkpoint.generators import generators, set_generators
from everyrank.checkpoint.state_entries import copied_entries, loads_by_itself
from everyrank.errors import UsageError, WorkloadError
from everyrank.parallel.pipeline.blocks import held_elsewhere
from everyrank.parallel.trainable import Trainable
from everyrank.world import World

__all__ = [
    "aliases_of",
    "load_copies",
    "load_state",
    "model_tensors",
    "targets_for",
    "tensors_of",
    "unsaveable",
    "values_of",
]

# A plain number in an optimizer's state is saved as a tensor without dimensions; a suffix of its key is its type.
_NUMBERS: dict[str, type] = {"#bool": bool, "#int": int, "#float": float}
# Implementation choices of an optimizer that depend on the device and do not change the algorithm.
_DEVICE_OPTIONS = ("foreach", "fused", "capturable")
_EXTRA_STATE = "_extra_state"  # torch's name for the result of `Module.get_extra_state`


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; tied ones once, under the first name.

    Parameters and buffers share memory with the model. Entries that `state_dict` creates, such as extra state, are
    copies. Raises `WorkloadError` for a state dict with other values, and for copies that could not be loaded.
    """
    tensors: dict[str, Tensor] = {}
    aliases = aliases_of(model)
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise WorkloadError(f"the model's state has {name}, which is not a tensor; train it with --save-every 0")
        if name not in aliases:
            tensors[f"model/{name}"] = value.detach()
    lost = [name for name in copied_entries(model) if name.rpartition(".")[2] != _EXTRA_STATE]
    if lost and not any(loads_by_itself(module) for module in model.modules()):
        raise WorkloadError(
            f"{lost[0]} in the model's state is a copy, which a resumed training could not load; "
            "register a buffer, or train it with --save-every 0"
        )
    return tensors


def load_copies(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load entries of the model's state that are copies, such as extra state. Raises `UsageError` for unknown ones."""
    copies = {name: tensors[f"model/{name}"] for name in copied_entries(model) if f"model/{name}" in tensors}
    if copies:
        unknown = model.load_state_dict(copies, strict=False).unexpected_keys
        if unknown:
            raise UsageError(f"{unknown[0]} of the checkpoint is not loaded by the model's load_state_dict")


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Return the other names of tied tensors: alias -> the name in the checkpoint."""
    first_names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in first_names:
            aliases[name] = first_names[id(value)]
        first_names.setdefault(id(value), name)
    return aliases


def tensors_of(trainable: Trainable, world: World) -> dict[str, Tensor]:
    """Return all tensors of this rank, without copies."""
    tensors = model_tensors(trainable.model) | _averages(trainable)
    for name, parameter in _named(trainable.model, trainable.optimizer).items():
        for key, value in trainable.optimizer.state.get(parameter, {}).items():
            entry = _as_tensor(value, name, key)
            if entry is not None:
                tensors[f"optimizer/{name}/{key}{entry[1]}"] = entry[0]
    tensors[f"generators/{world.rank}"] = generators()
    return tensors


def _averages(trainable: Trainable) -> dict[str, Tensor]:
    ema = trainable.ema
    return {f"average/{name}": tensor for name, tensor in zip(ema.names, ema.tensors, strict=True)} if ema else {}


def _as_tensor(value: Any, name: str, key: str) -> tuple[Tensor, str] | None:
    if value is None:
        return None
    if isinstance(value, Tensor):
        return value.detach(), ""
    for mark, kind in _NUMBERS.items():
        if type(value) is kind:
            return torch.tensor(value, dtype=torch.int64 if kind is not float else torch.float64), mark
    raise WorkloadError(
        f"the optimizer keeps {key} of {name} as {type(value).__name__}, which cannot be saved; "
        "train with --save-every 0"
    )


def _named(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """Return the parameters of this rank's optimizer by their names in the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters: dict[str, nn.Parameter] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise WorkloadError("the optimizer has a parameter that is not in the model; train with --save-every 0")
            parameters[names[id(parameter)]] = parameter
    return parameters


def values_of(trainable: Trainable) -> dict[str, Any]:
    """Return copies of the schedule, the loss scale and the optimizer's groups, without parameters.

    Also the class names of optimizer and schedule. They are equal on all ranks.
    """
    scaler = trainable.scaler
    return {
        "groups": [
            {key: _copied(value) for key, value in group.items() if key != "params"}
            for group in trainable.optimizer.param_groups
        ],
        "kinds": _kinds(trainable),
        "schedule": _copied(trainable.schedule.state_dict()) if trainable.schedule is not None else None,
        "scale": [scaler.scale, scaler.good_steps] if scaler is not None else None,
    }


def _copied(value: Any) -> Any:
    """Return a copy of a value of the schedule or a group. Raises `WorkloadError` if Python cannot copy it."""
    try:
        return copy.deepcopy(value)
    except Exception as error:  # an object of the user may raise any exception
        raise unsaveable(error) from error


def unsaveable(error: Exception) -> WorkloadError:
    """Return the error for an object that cannot be copied, or saved without a pickle that could run code."""
    reason = next(iter(str(error).strip().splitlines()), "")
    return WorkloadError(
        "the schedule or the optimizer's groups hold an object that cannot be saved safely "
        f"({type(error).__name__}: {reason}); train with --save-every 0"
    )


def _kinds(trainable: Trainable) -> list[str]:
    """Return the class names of optimizer and schedule."""
    return [type(trainable.optimizer).__name__, type(trainable.schedule).__name__]


def targets_for(trainable: Trainable, world: World, saved: Mapping[str, TensorStorageMetadata]) -> dict[str, Tensor]:
    """Return the tensors of this rank to load into: those of the model, and new ones for the optimizer.

    Raises `UsageError` if the model differs from the saved one.
    """
    targets = model_tensors(trainable.model)
    for name in copied_entries(trainable.model):  # such as extra state, which may have another shape than at the start
        full_name = f"model/{name}"
        if full_name in targets and full_name in saved and not isinstance(targets[full_name], DTensor):
            metadata = saved[full_name]
            targets[full_name] = torch.zeros(metadata.size, dtype=metadata.properties.dtype)
    _check_same(targets, {f"model/{name}" for name in held_elsewhere(trainable.model)}, saved)
    targets |= {name: tensor for name, tensor in _averages(trainable).items() if name in saved}
    parameters = _named(trainable.model, trainable.optimizer)
    for full_name, metadata in saved.items():
        kind, _, suffix = full_name.partition("/")
        name, _, _ = suffix.rpartition("/")
        if kind == "optimizer" and name in parameters:
            targets[full_name] = _empty(parameters[name], metadata)
    generators_name = f"generators/{world.rank}"
    if generators_name in saved:
        targets[generators_name] = torch.empty(saved[generators_name].size, dtype=torch.float64)
    return targets


def _check_same(
    model: Mapping[str, Tensor], elsewhere: set[str], saved_tensors: Mapping[str, TensorStorageMetadata]
) -> None:
    saved = {name for name in saved_tensors if name.startswith("model/")}
    for name in sorted((model.keys() | elsewhere) ^ saved):
        where = "the model" if name in saved else "the checkpoint"
        raise UsageError(f"{name.removeprefix('model/')} is not in {where}; the checkpoint is of a different model")
    for name, tensor in model.items():
        if tensor.shape != saved_tensors[name].size:
            raise UsageError(
                f"{name.removeprefix('model/')} has shape {tuple(saved_tensors[name].size)} in the checkpoint and "
                f"{tuple(tensor.shape)} in the model; the checkpoint is of a different model"
            )


def _empty(parameter: nn.Parameter, metadata: TensorStorageMetadata) -> Tensor:
    """Return an empty tensor for optimizer state; one of the parameter's shape is sharded like the parameter."""
    if metadata.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=metadata.properties.dtype).detach()
    if isinstance(parameter, DTensor) and metadata.size.numel() > 1:
        raise UsageError(
            f"the optimizer keeps a state of shape {tuple(metadata.size)} for a parameter of {tuple(parameter.shape)}, "
            "which cannot be sharded like the parameter; resume under ddp or single"
        )
    return torch.zeros(metadata.size, dtype=metadata.properties.dtype)


@torch.no_grad()
def load_state(
    trainable: Trainable,
    world: World,
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
    *,
    saved: Mapping[str, TensorStorageMetadata],
    schedule_step: int | None = None,
) -> None:
    """Load optimizer, schedule, loss scale and generators; the model's tensors were read in place.

    `saved` has the dtypes in the checkpoint. With `schedule_step` a schedule that does not follow the evaluation starts
    anew: its saved state is not used, and it takes that many steps from its beginning, because it was built for a
    different length of the training.
    """
    optimizer = trainable.optimizer
    first_rates = [group["lr"] for group in optimizer.param_groups]
    state = optimizer.state_dict()
    if values["kinds"] != _kinds(trainable):
        was, now = " and ".join(values["kinds"]), " and ".join(_kinds(trainable))
        raise UsageError(
            f"the checkpoint has {was} (optimizer and schedule), this training has {now}; use the same classes"
        )
    if len(values["groups"]) != len(state["param_groups"]):
        raise UsageError(
            f"the optimizer had {len(values['groups'])} groups of parameters and has {len(state['param_groups'])} now; "
            "the checkpoint is of a different optimizer"
        )
    for group, saved_group in zip(state["param_groups"], values["groups"], strict=True):
        group.update({key: value for key, value in saved_group.items() if key not in _DEVICE_OPTIONS})
    # torch numbers parameters over all groups; a parameter has the same index in its group as when it was saved
    name_of = {id(parameter): name for name, parameter in _named(trainable.model, optimizer).items()}
    state_by_name = _by_parameter(tensors)
    pairs = [
        (index, name_of[id(parameter)])
        for numbered, group in zip(state["param_groups"], optimizer.param_groups, strict=True)
        for index, parameter in zip(numbered["params"], group["params"], strict=True)
    ]
    state["state"] = {index: state_by_name[name] for index, name in pairs if name in state_by_name}
    optimizer.load_state_dict(state)
    _restore_dtypes(optimizer, name_of, state_by_name, saved)
    if trainable.schedule is not None and values["schedule"] is not None:
        if schedule_step is None or trainable.follows_evaluation:
            trainable.schedule.load_state_dict(values["schedule"])
        else:
            for group, rate in zip(optimizer.param_groups, first_rates, strict=True):
                group["lr"] = rate
            trainable.advance_schedule(schedule_step)
    if trainable.scaler is not None and values["scale"] is not None:
        trainable.scaler.scale, trainable.scaler.good_steps = values["scale"]
    generator_states = tensors.get(f"generators/{world.rank}")
    if generator_states is not None:
        set_generators(generator_states)


def _restore_dtypes(
    optimizer: Optimizer,
    name_of: Mapping[int, str],
    state_by_name: Mapping[str, Mapping[str, Any]],
    saved: Mapping[str, TensorStorageMetadata],
) -> None:
    """Undo the casts of `Optimizer.load_state_dict`, which gives masks, counters and moments the parameter's dtype.

    If the parameter has another dtype than in the checkpoint, its floating-point state keeps the cast.
    """
    for parameter, state in optimizer.state.items():
        name = name_of.get(id(parameter), "")
        saved_parameter = saved.get(f"model/{name}")
        has_saved_dtype = saved_parameter is not None and saved_parameter.properties.dtype == parameter.dtype
        for key, value in state_by_name.get(name, {}).items():
            loaded = state.get(key)
            if key == "step" or not isinstance(value, Tensor) or not isinstance(loaded, Tensor):
                continue  # torch casts "step" only where its kernels need it
            if loaded.dtype != value.dtype and (has_saved_dtype or not value.is_floating_point()):
                state[key] = value.to(loaded.device)


def _by_parameter(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    by_parameter: dict[str, dict[str, Any]] = {}
    for full_name, tensor in tensors.items():
        kind, _, suffix = full_name.partition("/")
        if kind != "optimizer":
            continue
        name, _, key = suffix.rpartition("/")
        plain, mark, kind = key.partition("#")
        value = _NUMBERS[mark + kind](tensor.item()) if mark else tensor
        by_parameter.setdefault(name, {})[plain] = value
    return by_parameter
