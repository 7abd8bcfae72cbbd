"""What a checkpoint holds, whatever the layout: tensors under names of the model, and a few plain values.

    average/<name>              moving averages of parameters, where the workload has an ema_decay
    model/<name>                parameters and persistent buffers; a sharded one as a sharded tensor
    optimizer/<name>/<key>      what the optimizer keeps for that parameter
    generators/<rank>           random generators of Python and numpy

Any rank may know only a part (a shard, or the parameters whose optimizer state it owns); together they know all.
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
from everyrank.errors import UsageError, WorkloadError
from everyrank.parallel.pipeline.blocks import held_elsewhere
from everyrank.parallel.trainable import Trainable
from everyrank.world import World

__all__ = ["aliases_of", "load_state", "model_tensors", "targets_for", "tensors_of", "values_of"]

# A plain number in an optimizer's state is kept as a tensor without dimensions; its key says what it was.
_NUMBERS: dict[str, type] = {"#bool": bool, "#int": int, "#float": float}
# How an optimizer computes where it runs; the mathematics is the same.
_OF_THE_DEVICE = ("foreach", "fused", "capturable")


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by their names here; of tied ones the first. Raises `WorkloadError` for others.

    They are the model's own: what is read into them is in the model.
    """
    found: dict[str, Tensor] = {}
    aliases = aliases_of(model)
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise WorkloadError(f"the model's state has {name}, which is no tensor; train it with --save-every 0")
        if name not in aliases:
            found[f"model/{name}"] = value.detach()
    return found


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Further name of a tied tensor -> the name under which it is kept."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in first:
            found[name] = first[id(value)]
        first.setdefault(id(value), name)
    return found


def tensors_of(trainable: Trainable, world: World) -> dict[str, Tensor]:
    """All tensors of this rank, as they are now: they are not copies."""
    found = model_tensors(trainable.model) | _averages(trainable)
    for name, parameter in _named(trainable.model, trainable.optimizer).items():
        for key, value in trainable.optimizer.state.get(parameter, {}).items():
            kept = _as_tensor(value, name, key)
            if kept is not None:
                found[f"optimizer/{name}/{key}{kept[1]}"] = kept[0]
    found[f"generators/{world.rank}"] = generators()
    return found


def _averages(trainable: Trainable) -> dict[str, Tensor]:
    own = trainable.ema
    return {f"average/{name}": tensor for name, tensor in zip(own.names, own.tensors, strict=True)} if own else {}


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
    """The parameters of this rank's optimizer by their names in the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, nn.Parameter] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise WorkloadError("the optimizer has a parameter that the model has not; train with --save-every 0")
            found[names[id(parameter)]] = parameter
    return found


def values_of(trainable: Trainable) -> dict[str, Any]:
    """Copies of the optimizer's groups without their parameters, of schedule and loss scale: alike on every rank."""
    groups = [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in trainable.optimizer.param_groups
    ]
    scaler = trainable.scaler
    return {
        "groups": groups,
        "kinds": _kinds(trainable),
        "schedule": copy.deepcopy(trainable.schedule.state_dict()) if trainable.schedule is not None else None,
        "scale": [scaler.scale, scaler.good_steps] if scaler is not None else None,
    }


def _kinds(trainable: Trainable) -> list[str]:
    """Names of the classes of optimizer and schedule."""
    return [type(trainable.optimizer).__name__, type(trainable.schedule).__name__]


def targets_for(trainable: Trainable, world: World, kept: Mapping[str, TensorStorageMetadata]) -> dict[str, Tensor]:
    """Tensors of this rank to read into: the model's own, and new ones for the optimizer.

    Raises `UsageError` where the model is not the one that was saved.
    """
    found = model_tensors(trainable.model)
    _check_same(found, {f"model/{name}" for name in held_elsewhere(trainable.model)}, kept)
    found |= {name: tensor for name, tensor in _averages(trainable).items() if name in kept}
    parameters = _named(trainable.model, trainable.optimizer)
    for full, about in kept.items():
        kind, _, rest = full.partition("/")
        name, _, _ = rest.rpartition("/")
        if kind == "optimizer" and name in parameters:
            found[full] = _empty(parameters[name], about)
    own = f"generators/{world.rank}"
    if own in kept:
        found[own] = torch.empty(kept[own].size, dtype=torch.float64)
    return found


def _check_same(model: Mapping[str, Tensor], elsewhere: set[str], kept: Mapping[str, TensorStorageMetadata]) -> None:
    saved = {name for name in kept if name.startswith("model/")}
    for name in sorted((model.keys() | elsewhere) ^ saved):
        where = "the model" if name in saved else "the checkpoint"
        raise UsageError(f"{name.removeprefix('model/')} is not in {where}: another model was saved")
    for name, tensor in model.items():
        if tensor.shape != kept[name].size:
            raise UsageError(
                f"{name.removeprefix('model/')} has shape {tuple(kept[name].size)} in the checkpoint and "
                f"{tuple(tensor.shape)} in the model: another model was saved"
            )


def _empty(parameter: nn.Parameter, about: TensorStorageMetadata) -> Tensor:
    """A tensor for the optimizer's state; one of the parameter's shape is cut as the parameter is."""
    if about.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=about.properties.dtype).detach()
    if isinstance(parameter, DTensor) and about.size.numel() > 1:
        raise UsageError(
            f"the optimizer keeps a state of shape {tuple(about.size)} for a parameter of {tuple(parameter.shape)}, "
            "which cannot be cut as the parameter is; go on under ddp or single"
        )
    return torch.zeros(about.size, dtype=about.properties.dtype)


@torch.no_grad()
def load_state(
    trainable: Trainable,
    world: World,
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
    *,
    schedule_step: int | None = None,
) -> None:
    """Give optimizer, schedule, scale and generators what was read; the model's tensors were read in place.

    With `schedule_step` the saved state of the schedule is not used: the schedule, which was built for a different
    length of the training, takes so many steps from its beginning.
    """
    optimizer = trainable.optimizer
    first_rates = [group["lr"] for group in optimizer.param_groups]
    state = optimizer.state_dict()
    if values["kinds"] != _kinds(trainable):
        was, now = " and ".join(values["kinds"]), " and ".join(_kinds(trainable))
        raise UsageError(f"it was trained with {was} (optimizer and schedule), this is {now}: another training")
    if len(values["groups"]) != len(state["param_groups"]):
        raise UsageError(
            f"the optimizer had {len(values['groups'])} groups of parameters and has {len(state['param_groups'])} now: "
            "another optimizer was saved"
        )
    for group, saved in zip(state["param_groups"], values["groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key not in _OF_THE_DEVICE})
    # torch numbers the parameters of all groups through; a parameter has the same place in a group here and there
    own = {id(parameter): name for name, parameter in _named(trainable.model, optimizer).items()}
    of_name = _by_parameter(tensors)
    pairs = [
        (index, own[id(parameter)])
        for numbered, group in zip(state["param_groups"], optimizer.param_groups, strict=True)
        for index, parameter in zip(numbered["params"], group["params"], strict=True)
    ]
    state["state"] = {index: of_name[name] for index, name in pairs if name in of_name}
    optimizer.load_state_dict(state)
    if trainable.schedule is not None and values["schedule"] is not None:
        if schedule_step is None or trainable.follows_evaluation:
            trainable.schedule.load_state_dict(values["schedule"])
        else:
            for group, rate in zip(optimizer.param_groups, first_rates, strict=True):
                group["lr"] = rate
            trainable.advance_schedule(schedule_step)
    if trainable.scaler is not None and values["scale"] is not None:
        trainable.scaler.scale, trainable.scaler.good_steps = values["scale"]
    own_generators = tensors.get(f"generators/{world.rank}")
    if own_generators is not None:
        set_generators(own_generators)


def _by_parameter(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for full, tensor in tensors.items():
        kind, _, rest = full.partition("/")
        if kind != "optimizer":
            continue
        name, _, key = rest.rpartition("/")
        plain, mark, kind = key.partition("#")
        value = _NUMBERS[mark + kind](tensor.item()) if mark else tensor
        found.setdefault(name, {})[plain] = value
    return found
