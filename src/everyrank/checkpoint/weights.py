"""Exports a model as safetensors or a plain state dict, and loads such weights into a workload."""

from __future__ import annotations

import contextlib
import json
import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from everyrank.checkpoint.contents import aliases_of
from everyrank.checkpoint.state_entries import copied_entries, loads_by_itself
from everyrank.checkpoint.storage import contents_of, read
from everyrank.errors import UsageError
from everyrank.runs import Checkpoint, require_whole
from everyrank.workload import Workload, changed

__all__ = ["export", "read_weights", "with_pretrained"]

WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")


def check_weights_suffix(path: Path, flag: str) -> None:
    """Raise `UsageError` for a file name without one of these suffixes."""
    if path.suffix not in WEIGHT_SUFFIXES:
        raise UsageError(f"{flag} {path}: give a name that ends in {', '.join(WEIGHT_SUFFIXES)}")


def export(checkpoint: Checkpoint, path: Path) -> dict[str, Tensor]:
    """Write the model of a checkpoint as one file that needs no everyrank. Return its state dict, with all names.

    Parameters with an average (`Workload.ema_decay`) are exported as that average, with which they were evaluated.

    Raises `UsageError` for a damaged checkpoint and for a path that cannot be written.
    """
    check_weights_suffix(path, "export")
    require_whole(checkpoint, deep=True, command="everyrank checkpoint export")
    entries = contents_of(checkpoint)
    model_entries = {name: metadata for name, metadata in entries.items() if name.startswith("model/")}
    for alias, name in checkpoint.metadata.aliases.items():
        if f"model/{name}" not in model_entries:
            raise UsageError(f"{checkpoint.path}: {alias} is tied to {name}, which is missing")
    averages = {name: name.replace("model/", "average/", 1) for name in model_entries}
    saved_names = {name: average if average in entries else name for name, average in averages.items()}
    tensors = {
        saved_names[name]: torch.zeros(metadata.size, dtype=metadata.properties.dtype)
        for name, metadata in model_entries.items()
    }
    read(tensors, checkpoint)
    state = {name.removeprefix("model/"): tensors[saved_name] for name, saved_name in saved_names.items()}
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            state |= {name: state[target].clone() for name, target in checkpoint.metadata.aliases.items()}
            metadata = {"format": "pt", "workload": checkpoint.metadata.workload, "step": str(checkpoint.metadata.step)}
            save_file(state, partial, metadata=metadata)
        else:
            state |= {name: state[target] for name, target in checkpoint.metadata.aliases.items()}
            torch.save(state, partial)
        partial.replace(path)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors raise their own errors
        reason = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(f"{path}: cannot be written ({reason}); give another path") from error
    finally:
        with contextlib.suppress(OSError):  # it would hide the error above, which has the same cause
            partial.unlink(missing_ok=True)
    return state


_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""The names of dtypes in safetensors."""


class _Safetensors(Mapping[str, Tensor]):
    """The tensors of a safetensors file; each is read only when it is accessed.

    Raises `SafetensorError` or `OSError` for an invalid file. The format is a header's length (8 bytes, little
    endian), the header as JSON, and the numbers: https://huggingface.co/docs/safetensors.
    """

    def __init__(self, path: Path) -> None:
        with safe_open(path, framework="np"):  # validates the header
            self.path = path
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
        self.data_start = 8 + length
        self.metadata = {name: metadata for name, metadata in header.items() if name != "__metadata__"}

    def __iter__(self) -> Iterator[str]:
        return iter(self.metadata)

    def __len__(self) -> int:
        return len(self.metadata)

    def shape(self, name: str) -> Tensor:
        """Return a tensor of its shape and dtype, on the meta device."""
        kind = self.metadata[name]["dtype"]
        if kind not in _DTYPES:
            raise SafetensorError(f"{name} is {kind}, which torch does not have")
        return torch.empty(self.metadata[name]["shape"], dtype=_DTYPES[kind], device="meta")

    def __getitem__(self, name: str) -> Tensor:
        tensor = torch.empty_like(self.shape(name), device="cpu")
        if tensor.numel():
            with self.path.open("rb") as file:
                file.seek(self.data_start + self.metadata[name]["data_offsets"][0])
                byte_view: Any = tensor.view(-1).view(torch.uint8).numpy()
                if file.readinto(byte_view) != tensor.nbytes:
                    raise UsageError(f"--pretrained {self.path}: the file ends within {name}; give a complete file")
        return tensor


_DDP_PREFIX = "module."


class _Weights(Mapping[str, Tensor]):
    """The tensors of a file under the names that a model has for them: model name -> file name in `names`."""

    def __init__(self, weights: Mapping[str, Tensor], names: Mapping[str, Any] | None = None) -> None:
        self.weights = weights
        self.names = {str(name): name for name in weights} if names is None else names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[self.names[name]]

    def named_for(self, model: nn.Module) -> _Weights:
        """Return the same tensors under the names of the model's state dict, as far as it has them.

        Removes the prefix of DistributedDataParallel if all names have it, and the model needs other names. A file may
        have a tied tensor under only one of its names, as safetensors of Hugging Face do.
        """
        tied_names = aliases_of(model)
        model_names = model.state_dict().keys()
        names = self.names
        if not names.keys() <= model_names and all(name.startswith(_DDP_PREFIX) for name in names):
            names = {name.removeprefix(_DDP_PREFIX): file_name for name, file_name in names.items()}
        present = {tied_names.get(name, name): file_name for name, file_name in names.items()}
        missing = [name for name in model_names if name not in names and tied_names.get(name, name) in present]
        return _Weights(self.weights, {**names, **{name: present[tied_names.get(name, name)] for name in missing}})

    def shapes(self) -> dict[str, Tensor]:
        """Tensors of the same shapes and dtypes; those of safetensors are on the meta device."""
        weights = self.weights
        if isinstance(weights, _Safetensors):
            return {name: weights.shape(file_name) for name, file_name in self.names.items()}
        return dict(self)


def read_weights(path: Path) -> _Weights:
    """Return the state dict in a file, without running code in it. Tensors of safetensors are read when accessed.

    It removes wrapping such as {"state_dict": ...}, {"model": ...} and {"model_state_dict": ...}, also nested. Raises
    `UsageError` for an invalid file.
    """
    check_weights_suffix(path, "--pretrained")
    if not path.is_file():
        raise UsageError(f"--pretrained {path}: no such file")
    try:
        if path.suffix == ".safetensors":
            weights: Any = _Safetensors(path)
            _Weights(weights).shapes()
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns about foreign pickles; the error below explains
                weights = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(f"--pretrained {path}: {_why_not_unpickled(path)}") from error
    except (OSError, SafetensorError) as error:
        raise UsageError(f"--pretrained {path}: cannot be read ({error})") from error
    except Exception as error:  # torch's readers may raise any exception
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UsageError(f"--pretrained {path}: not a file with only weights ({line})") from error
    for key in ("state_dict", "model", "model_state_dict"):
        if (
            not isinstance(weights, _Safetensors)
            and isinstance(weights, Mapping)
            and isinstance(weights.get(key), Mapping)
        ):
            weights = weights[key]
    if isinstance(weights, _Safetensors):
        return _Weights(weights)
    if not isinstance(weights, Mapping):
        raise UsageError(f"--pretrained {path}: not a state dict of tensors, but {type(weights).__name__}")
    other = next((name for name, value in weights.items() if not isinstance(value, Tensor)), None)
    if other is not None:
        raise UsageError(
            f"--pretrained {path}: not a state dict of tensors: {other!r} is {type(weights[other]).__name__}; "
            "save only model.state_dict()"
        )
    return _Weights(weights)


_TORCH_STARTS = (b"PK", b"\x80")  # a zip file, and the pickle of older versions


def _why_not_unpickled(path: Path) -> str:
    """Return why torch refused to unpickle a file, and what to do."""
    with path.open("rb") as file:
        start = file.read(40)
    if start.startswith(_TORCH_STARTS):
        return "it has more than tensors, and opening it could run code; save a state dict, or safetensors"
    first_line = start.split(b"\n")[0].decode(errors="replace")
    fix = "git lfs pull" if first_line.startswith("version https://git-lfs") else "download it again"
    return f"not a file of torch.save, because it begins with {first_line!r}; perhaps an incomplete download: {fix}"


def with_pretrained(workload: Workload, path: Path) -> Workload:
    """Return the workload with a model that starts from the weights in a file.

    Raises `UsageError` for an invalid file; building the model raises it for weights that do not fit.
    """
    file_weights = read_weights(path)

    def model(*devices: Any) -> nn.Module:
        new_model = workload.model(*devices)
        weights = file_weights.named_for(new_model)
        shapes = weights.shapes()
        model_state = new_model.state_dict()
        missing = sorted(model_state.keys() - shapes.keys())
        unknown = sorted(shapes.keys() - model_state.keys())
        if missing or unknown:
            difference = f"the file lacks {missing[0]}" if missing else f"the model has no {unknown[0]}"
            raise UsageError(
                f"--pretrained {path}: the weights are of a different model: {difference} "
                f"({len(missing)} missing, {len(unknown)} unknown)"
            )
        for name in shapes.keys() - copied_entries(new_model):  # extra state may have any shape
            tensor = shapes[name]
            if tensor.shape != model_state[name].shape:
                raise UsageError(
                    f"--pretrained {path}: {name} has shape {tuple(tensor.shape)}, the model's "
                    f"{tuple(model_state[name].shape)}"
                )
            if _kind(tensor.dtype) != _kind(model_state[name].dtype):
                raise UsageError(
                    f"--pretrained {path}: {name} is {tensor.dtype}, the model's {model_state[name].dtype}: "
                    "a different kind of number"
                )
        if not any(
            tensor.is_meta for tensor in model_state.values()
        ):  # a meta tensor has no values; another rank loads them
            _load(new_model, weights, path)
        return new_model

    return changed(workload, model=model)


@torch.no_grad()
def _load(model: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Copy the weights into a model with tensors of the same names and shapes, one tensor at a time if possible."""
    for name, _ in model.named_parameters():
        if not all(bool(_wider(chunk).isfinite().all()) for chunk in weights[name].reshape(-1).split(1 << 20)):
            raise UsageError(f"--pretrained {path}: {name} has numbers that are NaN or infinite")
    if copied_entries(model) or any(loads_by_itself(module) for module in model.modules()):
        model.load_state_dict(dict(weights))
        return
    for name, tensor in model.state_dict().items():
        tensor.copy_(weights[name])


def _wider(tensor: Tensor) -> Tensor:
    """Return the tensor in a dtype for which torch has `isfinite`, which it does not have for 8 bits."""
    return tensor.float() if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1 else tensor


def _kind(dtype: torch.dtype) -> str:
    """Return the kind of a dtype. A cast between kinds loses more than digits."""
    if dtype.is_complex or dtype is torch.bool:
        return str(dtype)
    return "floating" if dtype.is_floating_point else "whole"
