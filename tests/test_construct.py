"""Initialization of a model on the meta device, in files, and on two devices."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import zoo
from everyrank import parse_layout
from everyrank.builtin import Decoder, DecoderShape
from everyrank.checkpoint import with_pretrained
from everyrank.errors import CannotRunError
from everyrank.loop import open_data
from everyrank.parallel import file_backed, init_model
from everyrank.parity import check_layout, parity_case
from everyrank.strategies import prepare
from everyrank.world import World


class ModelWithBuffers(zoo.TiedModel):
    """A model with tied weights, a scalar parameter, and a non-persistent buffer computed in `__init__`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.register_buffer("table", torch.linspace(0.5, 1.5, 8), persistent=False)
        self.register_buffer("offset", torch.randn(8))

    def forward(self, tokens: Tensor, shift: Tensor) -> Tensor:
        return super().forward(tokens, shift * self.scale) * self.table.mean() + self.offset.mean()


class DecoderWithBuffers(Decoder):
    """A decoder with the same scalar and buffers. It supports pipeline stages and tensor parallelism."""

    def __init__(self) -> None:
        super().__init__(DecoderShape(4, 4, width=16, hidden=24, vocabulary=12, tied=True))
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.register_buffer("table", torch.linspace(0.5, 1.5, 8), persistent=False)
        self.register_buffer("offset", torch.randn(8))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        stream = self.embedding(tokens) * self.scale * self.table.mean() + self.offset.mean()
        for block in self.blocks:
            stream = block(stream, positions)
        return self.head(self.norm(stream))


def initial_states(world: World, workload: Any, texts: list[str]) -> list[dict[str, Tensor]]:
    """Return the full state and the buffers before the first update, for each layout."""
    states = []
    for text in texts:
        with mock.patch.object(file_backed, "_SMALLEST", 1):  # so that even these small tensors are put into files
            prepared = prepare(workload(), parse_layout(text), world)
        buffers = {f"buffer {name}": buffer.clone() for name, buffer in prepared.model.named_buffers()}
        states.append({**prepared.full_state(), **buffers})
        assert not any(tensor.is_meta for tensor in (*prepared.model.parameters(), *prepared.model.buffers()))
    return states


def furnished() -> Any:
    return zoo.workload("tied", model=ModelWithBuffers)


def furnished_decoder() -> Any:
    return zoo.workload("decoder", model=DecoderWithBuffers)


def furnished_experts() -> Any:
    return zoo.workload("experts")


META = [
    (2, furnished, ["fsdp"]),
    (3, furnished, ["fsdp"]),
    (2, furnished_decoder, ["tensor", "pipeline", "pipeline:schedule=interleaved", "fsdp:context=2"]),
    (2, furnished_experts, ["fsdp:expert=2"]),
    (4, furnished_decoder, ["fsdp:tensor=2", "ddp:tensor=2", "fsdp:replicate=2", "pipeline:shard=2"]),
    (4, furnished_decoder, ["pipeline:tensor=2", "pipeline:replicate=2"]),
]


@pytest.mark.parametrize(("count", "workload", "texts"), META, ids=lambda value: str(getattr(value, "__name__", value)))
def test_initialization_on_meta_is_bitwise_equal(ranks: Any, count: int, workload: Any, texts: list[str]) -> None:
    """Compares all parameters and buffers of every rank before the first update, with and without meta=true."""
    layouts = ["single", *texts, *(f"{text}{',' if ':' in text else ':'}meta=true" for text in texts)]
    for rank, (single, *states) in enumerate(ranks(count, initial_states, workload, layouts)):
        assert len(states) == 2 * len(texts)
        for full, meta in zip(states[: len(texts)], states[len(texts) :], strict=True):
            assert full.keys() == meta.keys()
            for name, tensor in full.items():
                assert torch.equal(tensor, meta[name]), (rank, name)
                if rank == 0 and name in single:
                    assert torch.equal(tensor, single[name]), name
            assert rank or single.keys() == meta.keys()


class LargeModel(nn.Module):
    """A model large enough for files. One weight is initialized through a second tensor with the same memory."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.empty(256, 128)
        self.weight = nn.Parameter(weight)
        nn.init.normal_(weight)
        self.layer = nn.Linear(256, 128)
        self.tied = nn.Linear(256, 128)
        self.tied.weight = self.layer.weight
        self.small = nn.Parameter(torch.randn(3))
        self.register_buffer("table", torch.randn(128, 256))


def test_file_backed_model_equals_one_in_memory() -> None:
    """Tied weights stay tied. A tensor with a second reference to its memory is not moved to a file."""
    torch.manual_seed(5)
    expected = LargeModel()
    torch.manual_seed(5)
    with file_backed.built_in_files():
        file_backed_model = LargeModel()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(file_backed_model.state_dict()[name], tensor), name
    in_files = {
        name for name, tensor in file_backed_model.state_dict().items() if tensor.untyped_storage().filename is not None
    }
    assert in_files == {"layer.weight", "tied.weight", "table"}
    assert file_backed_model.tied.weight is file_backed_model.layer.weight
    file_backed.put_into_file(file_backed_model.layer.weight, torch.float64)
    assert file_backed_model.layer.weight.dtype is torch.float64
    path = file_backed_model.layer.weight.untyped_storage().filename
    assert path is not None
    assert not Path(path).exists()  # the file is unlinked while it is mapped


def test_full_disk_gives_a_one_line_error() -> None:
    """Without this check, initialization would be killed by a signal."""
    full_disk = mock.patch.object(file_backed, "_make_room", side_effect=OSError(28, "No space left on device"))
    with full_disk, pytest.raises(CannotRunError, match=r"8 MiB .*No space left on device.*TMPDIR"):
        file_backed.file_backed(torch.zeros(1 << 21))


def pretrained_states(world: World, texts: list[str], path: Path) -> list[dict[str, Tensor]]:
    workload = with_pretrained(furnished_decoder(), path)
    return [prepare(workload, parse_layout(text), world).full_state() for text in texts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_meta_loads_pretrained_weights(ranks: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    """The file has the "module." prefix of DistributedDataParallel, and contains tied weights twice."""
    path = tmp_path / "weights.safetensors"
    torch.manual_seed(7)
    state = {name: torch.randn_like(tensor).to(dtype) for name, tensor in DecoderWithBuffers().state_dict().items()}
    state["head.weight"] = state["embedding.weight"].clone()
    save_file({f"module.{name}": tensor for name, tensor in state.items()}, path)
    for loaded in ranks(2, pretrained_states, ["fsdp:meta=true", "tensor:meta=true", "pipeline:meta=true"], path)[0]:
        assert loaded.keys() == state.keys()
        for name, tensor in state.items():
            assert torch.equal(loaded[name], tensor.float()), name


def check_meta(world: World, layout: str, uninitialized: str) -> str:
    """Return the parity status of a layout where initialization skips the tensor `uninitialized`."""
    subject = parity_case(furnished_decoder(), *open_data(furnished_decoder(), world), steps=4)
    tensors = init_model._tensors

    def tensors_without_one(model: nn.Module) -> dict[str, Tensor]:
        tensors_to_fill = tensors(model)
        tensors_to_fill.pop(uninitialized).fill_(0.25)  # an arbitrary value, as in uninitialized memory
        return tensors_to_fill

    with mock.patch.object(init_model, "_tensors", tensors_without_one) if uninitialized else contextlib.nullcontext():
        return check_layout(subject, parse_layout(layout), world, f"meta/{layout}/{uninitialized}")[0].status


@pytest.mark.integration
@pytest.mark.parametrize("layout", ["fsdp:meta=true", "tensor:meta=true", "pipeline:meta=true"])
def test_training_with_meta_is_equal(ranks: Any, layout: str) -> None:
    """The comparison also detects a buffer that is not initialized."""
    assert ranks(2, check_meta, layout, "")[0] == "equal"
    assert ranks(2, check_meta, layout, "table")[0] != "equal"


class TwoDeviceModel(nn.Module):
    """A model with its first layer on one device and its second on another."""

    def __init__(self, devices: list[torch.device]) -> None:
        super().__init__()
        self.devices = devices
        self.first = nn.Linear(5, 8, device=devices[0])
        self.second = nn.Linear(8, 2, device=devices[1])

    def forward(self, values: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(values)).to(self.devices[1]))


def check_two_device_model(world: World, text: str) -> Any:
    workload = zoo.workload("frozen", "adamw", model=TwoDeviceModel, num_devices=2, blocks=None)
    subject = parity_case(workload, *open_data(workload, world), steps=8)
    return check_layout(subject, parse_layout(text), world, f"halves/{text}")[0]


@pytest.mark.parametrize("text", ["single:devices=2", "ddp:devices=2", "ddp", "ddp:devices=2,accumulate=2"])
def test_model_on_two_devices_equals_one_device(ranks: Any, text: str) -> None:
    """On CPU both devices are the same. This tests only the code path."""
    parity = ranks(2, check_two_device_model, text)[0]
    assert parity.status == "equal", parity
    assert parity.max_relative_difference <= 1e-10


def devices_of_rank(world: World, layout: str, num_cuda: int) -> list[str]:
    """Return the devices of this rank if the host has `num_cuda` GPUs, or the error."""
    import dataclasses

    cuda_world = dataclasses.replace(world, device=torch.device("cuda", world.local_rank))
    with mock.patch.object(torch.cuda, "device_count", return_value=num_cuda):
        try:
            return [str(device) for device in init_model._devices(parse_layout(layout), cuda_world)]
        except CannotRunError as error:
            return [str(error)]


def test_each_rank_gets_its_own_devices(ranks: Any) -> None:
    """If the host has too few, the error gives both numbers."""
    assert ranks(2, devices_of_rank, "ddp:devices=2", 4) == [["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]]
    assert ranks(2, devices_of_rank, "ddp", 2) == [["cuda:0"], ["cuda:1"]]
    assert "needs 4 CUDA devices, 2" in ranks(2, devices_of_rank, "ddp:devices=2", 2)[1][0]
