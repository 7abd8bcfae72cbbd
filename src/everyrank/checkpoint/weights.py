"""The model alone: safetensors or a plain state dict, out of a checkpoint and into a workload."""

from __future__ import annotations

import dataclasses
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from everyrank.checkpoint.storage import contents_of, read
from everyrank.errors import UsageError
from everyrank.runs import Checkpoint, require_whole
from everyrank.workload import Workload

__all__ = ["export", "read_weights", "with_pretrained"]

WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")


def check_weights_suffix(path: Path, flag: str) -> None:
    """Raise `UsageError` for a file of weights by another name than these."""
    if path.suffix not in WEIGHT_SUFFIXES:
        raise UsageError(f"{flag} {path}: give a name that ends in {', '.join(WEIGHT_SUFFIXES)}")


def export(checkpoint: Checkpoint, path: Path) -> dict[str, Tensor]:
    """Write the model of a checkpoint as one file that needs no everyrank, under all names of its state dict.

    Of parameters that have an average (`Workload.ema_decay`) that one: it is what was evaluated.

    Raises `UsageError` for a damaged checkpoint and for a place that cannot be written.
    """
    check_weights_suffix(path, "export")
    require_whole(checkpoint, deep=True)
    there = contents_of(checkpoint)
    kept = {name: about for name, about in there.items() if name.startswith("model/")}
    for alias, name in checkpoint.about.aliases.items():
        if f"model/{name}" not in kept:
            raise UsageError(f"{checkpoint.path}: {alias} is tied to {name}, which is not there")
    averages = {name: name.replace("model/", "average/", 1) for name in kept}
    places = {name: average if average in there else name for name, average in averages.items()}
    tensors = {places[name]: torch.zeros(about.size, dtype=about.properties.dtype) for name, about in kept.items()}
    read(tensors, checkpoint)
    state = {name.removeprefix("model/"): tensors[place] for name, place in places.items()}
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            state |= {name: state[kept].clone() for name, kept in checkpoint.about.aliases.items()}
            about = {"format": "pt", "workload": checkpoint.about.workload, "step": str(checkpoint.about.step)}
            save_file(state, partial, metadata=about)
        else:
            state |= {name: state[kept] for name, kept in checkpoint.about.aliases.items()}
            torch.save(state, partial)
        partial.replace(path)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch's writer and that of safetensors have their own
        what = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(f"{path}: cannot be written ({what}); give another place") from error
    finally:
        partial.unlink(missing_ok=True)
    return state


def read_weights(path: Path) -> dict[str, Tensor]:
    """The state dict in a file; nothing in it is run.

    One level of wrapping is taken off where others put one: {"state_dict": ...}, {"model": ...}, and the `module.` of
    DistributedDataParallel. Raises `UsageError` for a file that is none.
    """
    check_weights_suffix(path, "--pretrained")
    if not path.is_file():
        raise UsageError(f"--pretrained {path}: there is no such file")
    try:
        if path.suffix == ".safetensors":
            found: Any = load_file(path)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a pickle that is not torch's: what follows says it
                found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"--pretrained {path}: it holds more than tensors, and opening that could run a program; "
            "save a state dict, or safetensors"
        ) from error
    except (OSError, SafetensorError) as error:
        raise UsageError(f"--pretrained {path}: cannot be read ({error})") from error
    except Exception as error:  # torch's readers raise anything
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UsageError(f"--pretrained {path}: no file of weights alone ({line})") from error
    for key in ("state_dict", "model", "model_state_dict"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise UsageError(f"--pretrained {path}: no state dict of tensors, but {type(found).__name__}")
    return {str(name).removeprefix("module."): tensor for name, tensor in found.items()}


def with_pretrained(workload: Workload, path: Path) -> Workload:
    """The workload, its model beginning with the weights in a file.

    Raises `UsageError` for a file that is none; building the model raises it for weights that are not the model's.
    """
    weights = read_weights(path)

    def model(*devices: Any) -> nn.Module:
        built = workload.model(*devices)
        own = built.state_dict()
        missing = sorted(own.keys() - weights.keys())
        foreign = sorted(weights.keys() - own.keys())
        if missing or foreign:
            what = f"the file lacks {missing[0]}" if missing else f"the model has no {foreign[0]}"
            raise UsageError(
                f"--pretrained {path}: not this model's weights: {what} "
                f"({len(missing)} missing, {len(foreign)} foreign)"
            )
        for name, tensor in weights.items():
            if tensor.shape != own[name].shape:
                raise UsageError(
                    f"--pretrained {path}: {name} has shape {tuple(tensor.shape)}, the model's {tuple(own[name].shape)}"
                )
            if _kind(tensor.dtype) != _kind(own[name].dtype):
                raise UsageError(
                    f"--pretrained {path}: {name} is {tensor.dtype}, the model's {own[name].dtype}: other numbers"
                )
        for name, _ in built.named_parameters():
            if not bool(weights[name].isfinite().all()):
                raise UsageError(f"--pretrained {path}: {name} has numbers that are NaN or infinite")
        built.load_state_dict(weights)
        return built

    return dataclasses.replace(workload, model=model)


def _kind(dtype: torch.dtype) -> str:
    """What may be turned into one another: a cast between kinds loses more than digits."""
    if dtype.is_complex or dtype is torch.bool:
        return str(dtype)
    return "floating" if dtype.is_floating_point else "whole"
