"""Which models a pipeline can split into stages, and which tensors each stage keeps."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from everyrank import Workload, parse_layout
from everyrank.errors import UnsupportedLayoutError
from everyrank.loop import open_data
from everyrank.parallel.mesh import open_mesh
from everyrank.parallel.pipeline.stage import Stages, apply_pipeline
from everyrank.parity import check_layout, parity_case
from everyrank.world import World


class Scale(nn.Module):
    """Multiplies by a buffer, as rotary positions do."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("factors", torch.linspace(0.5, 1.5, 8), persistent=persistent)

    def forward(self, value: Tensor) -> Tensor:
        return value * self.factors


class Block(nn.Module):
    def __init__(self, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.shared = shared

    def forward(self, value: Tensor) -> Tensor:
        return value + self.linear(value if self.shared is None else self.shared(value))


class Model(nn.Module):
    """Blocks and a head. `shared` is a module of the first `num_sharing` blocks."""

    def __init__(self, shared: nn.Module | None = None, num_sharing: int = 0, num_blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(shared if index < num_sharing else None) for index in range(num_blocks))
        self.norm: nn.Module = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = block(value)
        return self.head(self.norm(value))


class SharedOutside(Model):
    """The final norm is also a module of the first block."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__(shared, num_sharing=1)
        self.norm = shared


class UnitOutput(Model):
    """Its output has length 1, as that of CLIP."""

    def forward(self, value: Tensor) -> Tensor:
        return F.normalize(super().forward(value), dim=-1, eps=0.0)


class LogOutput(Model):
    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = block(value)
        return value.log()


class MissingValues(Model):
    """It also returns its input, which may have NaN, and adds the NaN to each output."""

    def forward(self, value: Tensor) -> Any:
        return super().forward(value.nan_to_num()) + value[:, :1], value


class UsesFirstBlock(UnitOutput):
    def forward(self, value: Tensor) -> Tensor:
        first = self.blocks[0](value)
        return F.normalize(self.head(self.blocks[1](first) + 1e-3 * first), dim=-1, eps=0.0)


def shared_scale_model() -> Model:
    return UnitOutput(Scale(persistent=False), num_sharing=4, num_blocks=4)


def workload(model: Callable[[], nn.Module]) -> Workload:
    """Return a classification of 64 samples with 8 features."""
    values = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return Workload(
        name="stages",
        model=model,
        train_data=lambda: TensorDataset(values, values[:, :3].argmax(1)),
        loss=lambda output, target: (F.cross_entropy(output, target, reduction="sum"), len(target)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        global_batch=16,
        steps=3,
        blocks="blocks",
    )


SHARING = {
    "a norm outside": (lambda: SharedOutside(nn.LayerNorm(8)), "blocks.0 and a module outside blocks share a weight"),
    "a norm in blocks": (lambda: Model(nn.LayerNorm(8), 2), "blocks.0 and blocks.1 share a weight"),
    "persistent buffers": (lambda: Model(Scale(True), 2), "share the module blocks.0.shared with persistent buffers"),
    "persistent buffers outside": (lambda: SharedOutside(Scale(True)), "blocks.0.shared with persistent buffers"),
}


@pytest.mark.parametrize("case", SHARING)
def test_shared_modules_are_refused(ranks: Any, case: str) -> None:
    model, message = SHARING[case]
    assert message in ranks(2, refusal, model)[0]


def refusal(world: World, model: Callable[[], nn.Module]) -> str:
    layout = parse_layout("pipeline")
    with pytest.raises(UnsupportedLayoutError) as error:
        apply_pipeline(model(), workload(model), layout, open_mesh(layout, world))
    return str(error.value)


@pytest.mark.parametrize("model", [shared_scale_model, lambda: SharedOutside(Scale(False))])
def test_stage_keeps_the_buffers_that_it_uses(model: Callable[[], Model]) -> None:
    """Without persistent buffers, a module may be shared. The buffers outside are the same list on all stages."""
    whole, value = model(), torch.randn(4, 8)
    count = len(whole.blocks)
    spans = [range(count // 2), range(count // 2, count)]
    first_output = nn.Sequential(*whole.blocks[: count // 2])(value)
    for rank, (received, expected) in enumerate([(None, first_output), (first_output, whole(value))]):
        split = copy.deepcopy(whole)
        stages = Stages(split, "blocks", spans, size=2, coordinate=rank)
        output, _ = stages.run(rank, received, functools.partial(split, value))
        assert torch.equal(output, expected)
        assert len(stages.outside_buffers()) == (whole.norm is whole.blocks[0].shared)


def test_shared_buffers_are_equal_to_single(ranks: Any) -> None:
    """Also if the model is first built on the meta device."""
    for layout in ("pipeline", "pipeline:meta=true"):
        assert ranks(2, status, layout)[0] == "equal"


def status(world: World, layout: str) -> str:
    case = parity_case(workload(shared_scale_model), *open_data(workload(shared_scale_model), world), steps=3)
    return check_layout(case, parse_layout(layout), world, "stages")[0].status


def check_block_order(model: Model, value: Tensor) -> None:
    stages = Stages(model, "blocks", [range(1), range(1, 2)], size=2, coordinate=0)
    stages.check_block_order(lambda: model(value))


@pytest.mark.parametrize("model", [UnitOutput, LogOutput])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_may_normalize_the_output_of_the_blocks(model: type[Model], dtype: torch.dtype) -> None:
    """The fake output of the last block must not give NaN there: zeros and equal features would."""
    check_block_order(model().to(dtype), torch.ones(64, 32, 8, dtype=dtype))


def test_model_may_have_missing_values() -> None:
    check_block_order(MissingValues(), torch.full((4, 8), torch.nan))


def test_output_of_an_earlier_block_is_refused() -> None:
    with pytest.raises(UnsupportedLayoutError, match="the output of a block outside the next block"):
        check_block_order(UsesFirstBlock(), torch.ones(4, 8))
