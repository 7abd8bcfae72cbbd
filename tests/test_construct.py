"""Building a model on the meta device, and one that lives on two devices."""

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


class Furnished(zoo.TiedModel):
    """Tied weights, a scalar parameter, a buffer in no state that is computed when the model is built."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.register_buffer("table", torch.linspace(0.5, 1.5, 8), persistent=False)
        self.register_buffer("offset", torch.randn(8))

    def forward(self, tokens: Tensor, shift: Tensor) -> Tensor:
        return super().forward(tokens, shift * self.scale) * self.table.mean() + self.offset.mean()


class FurnishedDecoder(Decoder):
    """The same of a decoder, whose blocks can be cut into stages and whose matrices can be split."""

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
    found = []
    for text in texts:
        with mock.patch.object(file_backed, "_SMALLEST", 1):  # so that even these are put into files
            prepared = prepare(workload(), parse_layout(text), world)
        buffers = {f"buffer {name}": buffer.clone() for name, buffer in prepared.model.named_buffers()}
        found.append({**prepared.full_state(), **buffers})
        assert not any(tensor.is_meta for tensor in (*prepared.model.parameters(), *prepared.model.buffers()))
    return found


def furnished() -> Any:
    return zoo.workload("tied", model=Furnished)


def furnished_decoder() -> Any:
    return zoo.workload("decoder", model=FurnishedDecoder)


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
def test_meta_is_bit_equal_to_building_in_full(ranks: Any, count: int, workload: Any, texts: list[str]) -> None:
    """Every tensor of every rank before the first update: parameters, buffers, also those in no state."""
    both = ["single", *texts, *(f"{text}{',' if ':' in text else ':'}meta=true" for text in texts)]
    for rank, (single, *states) in enumerate(ranks(count, initial_states, workload, both)):
        assert len(states) == 2 * len(texts)
        for full, meta in zip(states[: len(texts)], states[len(texts) :], strict=True):
            assert full.keys() == meta.keys()
            for name, tensor in full.items():
                assert torch.equal(tensor, meta[name]), (rank, name)
                if rank == 0 and name in single:
                    assert torch.equal(tensor, single[name]), name
            assert rank or single.keys() == meta.keys()


class Aliased(nn.Module):
    """Large enough for a file; one weight is drawn after it is registered, by another name of its memory."""

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


def test_a_model_in_files_has_the_numbers_of_one_in_memory() -> None:
    """Ties stay, and what another variable may still write to stays where that writes."""
    torch.manual_seed(5)
    expected = Aliased()
    torch.manual_seed(5)
    with file_backed.built_in_files():
        found = Aliased()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    in_files = {name for name, tensor in found.state_dict().items() if tensor.untyped_storage().filename is not None}
    assert in_files == {"layer.weight", "tied.weight", "table"}
    assert found.tied.weight is found.layer.weight
    file_backed.put_into_file(found.layer.weight, torch.float64)
    assert found.layer.weight.dtype is torch.float64
    path = found.layer.weight.untyped_storage().filename
    assert path is not None
    assert not Path(path).exists()  # mapped, and gone with the tensor


def test_a_full_disk_is_one_line() -> None:
    """And no signal in the middle of initialisation."""
    full = mock.patch.object(file_backed, "_make_room", side_effect=OSError(28, "No space left on device"))
    with full, pytest.raises(CannotRunError, match=r"8 MiB .*No space left on device.*TMPDIR"):
        file_backed.file_backed(torch.zeros(1 << 21))


def pretrained_states(world: World, texts: list[str], path: Path) -> list[dict[str, Tensor]]:
    workload = with_pretrained(furnished_decoder(), path)
    return [prepare(workload, parse_layout(text), world).full_state() for text in texts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_meta_begins_with_the_weights_of_a_file(ranks: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    """Under names that DistributedDataParallel gives them; tied ones twice."""
    path = tmp_path / "weights.safetensors"
    torch.manual_seed(7)
    state = {name: torch.randn_like(tensor).to(dtype) for name, tensor in FurnishedDecoder().state_dict().items()}
    state["head.weight"] = state["embedding.weight"].clone()
    save_file({f"module.{name}": tensor for name, tensor in state.items()}, path)
    for found in ranks(2, pretrained_states, ["fsdp:meta=true", "tensor:meta=true", "pipeline:meta=true"], path)[0]:
        assert found.keys() == state.keys()
        for name, tensor in state.items():
            assert torch.equal(found[name], tensor.float()), name


def check_meta(world: World, layout: str, forgets: str) -> str:
    subject = parity_case(furnished_decoder(), *open_data(furnished_decoder(), world), steps=4)
    tensors = init_model._tensors

    def forgetful(model: nn.Module) -> dict[str, Tensor]:
        found = tensors(model)
        found.pop(forgets).fill_(0.25)  # whatever was there
        return found

    with mock.patch.object(init_model, "_tensors", forgetful) if forgets else contextlib.nullcontext():
        return check_layout(subject, parse_layout(layout), world, f"meta/{layout}/{forgets}")[0].status


@pytest.mark.integration
@pytest.mark.parametrize("layout", ["fsdp:meta=true", "tensor:meta=true", "pipeline:meta=true"])
def test_meta_trains_alike(ranks: Any, layout: str) -> None:
    """And a buffer that nobody fills is found."""
    assert ranks(2, check_meta, layout, "")[0] == "equal"
    assert ranks(2, check_meta, layout, "table")[0] != "equal"


class Halves(nn.Module):
    """The classic toy: the first layer on one device, the second on another."""

    def __init__(self, devices: list[torch.device]) -> None:
        super().__init__()
        self.devices = devices
        self.first = nn.Linear(5, 8, device=devices[0])
        self.second = nn.Linear(8, 2, device=devices[1])

    def forward(self, values: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(values)).to(self.devices[1]))


def check_halves(world: World, text: str) -> Any:
    workload = zoo.workload("frozen", "adamw", model=Halves, num_devices=2, blocks=None)
    subject = parity_case(workload, *open_data(workload, world), steps=8)
    return check_layout(subject, parse_layout(text), world, f"halves/{text}")[0]


@pytest.mark.parametrize("text", ["single:devices=2", "ddp:devices=2", "ddp", "ddp:devices=2,accumulate=2"])
def test_two_devices_equal_one(ranks: Any, text: str) -> None:
    """On CPU both devices are the same one: the code path is what is checked here."""
    parity = ranks(2, check_halves, text)[0]
    assert parity.status == "equal", parity
    assert parity.max_relative_difference <= 1e-10


def places(world: World, layout: str, num_cuda: int) -> list[str]:
    import dataclasses

    here = dataclasses.replace(world, device=torch.device("cuda", world.local_rank))
    with mock.patch.object(torch.cuda, "device_count", return_value=num_cuda):
        try:
            return [str(device) for device in init_model._devices(parse_layout(layout), here)]
        except CannotRunError as error:
            return [str(error)]


def test_devices_of_a_rank(ranks: Any) -> None:
    """Each rank has two of its own; too few are said."""
    assert ranks(2, places, "ddp:devices=2", 4) == [["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]]
    assert ranks(2, places, "ddp", 2) == [["cuda:0"], ["cuda:1"]]
    assert "needs 4 CUDA devices, 2" in ranks(2, places, "ddp:devices=2", 2)[1][0]
