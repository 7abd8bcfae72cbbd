"""The real prepare and step on fake tensors: what every rank holds and sends, on more ranks than there are cores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from everyrank.builtin import DECODER_EXPERTS, Decoder, DecoderShape, decoder_plan
from everyrank.errors import UsageError
from everyrank.layout import parse_layout
from everyrank.plan import traced
from everyrank.plan.calibrate import decoder_workload
from everyrank.plan.hardware import GIB, parse_cluster
from everyrank.plan.pretend import first_sample, trace_step
from everyrank.plan.trace import StorageTrace
from everyrank.plan.traced import LayoutMemory, answer_workload, trace_layout
from everyrank.workload import Workload
from everyrank.world import World

TENSOR = pytest.param("fsdp:tensor=2,precision=bf16", marks=pytest.mark.integration)
BLOCKS, WIDTH, LENGTH, VOCABULARY = 4, 32, 16, 64


def decoder(num_blocks: int = BLOCKS, batch: int = 64) -> Workload:
    shape = DecoderShape(num_blocks=num_blocks, num_heads=4, width=WIDTH, hidden=64, vocabulary=VOCABULARY)
    return decoder_workload(shape, 64, LENGTH, global_batch=batch, sequence_dim=1, steps=1)


def parameter_bytes(workload: Workload) -> int:
    return sum(p.nbytes for p in workload.model().parameters())


def test_fsdp_on_64_ranks_sends_what_its_page_promises() -> None:
    """An all-gather of each block forward and backward, and of the rest; a reduce-scatter of each; one all-reduce."""
    traced = trace_step(decoder(), parse_layout("fsdp"), 64, rank=63)
    assert traced.collectives() == {
        "_allgather_base_": 2 * BLOCKS + 1,
        "_reduce_scatter_base_": BLOCKS + 1,
        "allreduce_": 1,
    }
    # of 64 parts of parameters, gradients and two moments, with padding
    assert traced.state_bytes < parameter_bytes(decoder()) * 4 / 64 * 1.2
    assert traced.peak_bytes == sum(traced.categories.values())


def test_replicas_reduce_and_broadcast() -> None:
    """ddp reduces each bucket; zero1 broadcasts from each rank that owns parameters."""
    assert set(trace_step(decoder(), parse_layout("ddp"), 64).collectives()) == {"allreduce_"}
    zero1 = trace_step(decoder(), parse_layout("zero1"), 8, rank=3)
    assert zero1.collectives()["broadcast_"] == 8


def test_a_pipeline_of_four_stages() -> None:
    """Inner stages receive and send; each micro-batch passes once each way."""
    layout = parse_layout("pipeline:microbatches=8")
    first, inner = (trace_step(decoder(), layout, 4, rank) for rank in (0, 1))
    assert first.collectives()["send"] == 8
    assert inner.collectives()["send"] == inner.collectives()["recv_"] == 16
    assert first.peak_bytes > inner.peak_bytes, "the first stage keeps the most micro-batches"
    assert first.build_bytes < first.peak_bytes, "the whole model, which gives the shape of an input, is not counted"


@pytest.mark.parametrize(
    "layout",
    [
        "local_sgd",
        pytest.param("fsdp:replicate=4,recompute", marks=pytest.mark.integration),
        pytest.param("context", marks=pytest.mark.integration),
        TENSOR,
    ],
)
def test_other_layouts_on_many_ranks(layout: str) -> None:
    """They run, and hold something."""
    traced = trace_step(decoder(), parse_layout(layout), 8, rank=7)
    assert traced.peak_bytes > traced.state_bytes > 0
    assert traced.flops > 0


def test_operators_are_kernels_with_their_operations() -> None:
    """Attention on a CPU has its operations, backward 2.5 times as many; looking up a device is no kernel."""
    operators = trace_step(decoder(num_blocks=1, batch=8), parse_layout("ddp"), 2).operators
    attention = [operator.flops for operator in operators if "scaled_dot" in operator.name]
    forward = 2 * 2 * 4 * LENGTH * LENGTH * WIDTH  # two products of 4 samples, all heads together
    assert attention == [forward, forward * 5 // 2]
    assert not {"device", "promote_types"} & {operator.name for operator in operators}
    assert any(operator.is_strided for operator in operators), "rotary positions take every second number"


def test_recomputing_holds_less_and_computes_more() -> None:
    plain, again = (trace_step(decoder(), parse_layout(layout), 2) for layout in ("ddp", "ddp:recompute"))
    assert again.peak_bytes < plain.peak_bytes
    assert again.flops > plain.flops


def test_tensor_parallel_keeps_only_its_state_between_updates() -> None:
    """Parameters, gradients and two moments; the check of views, which remembers outputs, has ended."""
    traced = trace_step(decoder(num_blocks=1), parse_layout("tensor"), 2)
    assert traced.state_bytes < 4.2 * parameter_bytes(decoder(num_blocks=1))


def test_what_dtensor_computes_shapes_with_is_not_memory() -> None:
    """A rank of two has half of the logits; DTensor asks fake tensors of all logits for the shape of the loss."""
    shape = DecoderShape(num_blocks=1, num_heads=4, width=WIDTH, hidden=64, vocabulary=4096)
    workload = decoder_workload(shape, 8, LENGTH, global_batch=8, sequence_dim=1, steps=1)
    traced = trace_step(workload, parse_layout("tensor"), 2)
    half_of_logits = 8 * LENGTH * 4096 // 2 * 4
    assert max(change for change, *_ in traced.events) == half_of_logits
    products = [operator.flops for operator in traced.operators if operator.name in ("mm", "addmm")]
    assert max(products) == 2 * 8 * LENGTH * WIDTH * 4096 // 2


def test_experts_get_equal_parts_of_the_tokens() -> None:
    """Fake tensors have no counts: their sum is spread evenly, so half of the rows come back from the other rank."""
    shape = DecoderShape(1, 4, WIDTH, 64, VOCABULARY, experts=4)
    workload = dataclasses.replace(
        decoder(batch=8), model=lambda: Decoder(shape), tensor_plan=decoder_plan(shape), experts=DECODER_EXPERTS
    )
    traced = trace_step(workload, parse_layout("expert"), 2)
    sent = [operator.bytes for operator in traced.operators if operator.name == "alltoall_base_"]
    rows = 8 // 2 * LENGTH * shape.top_k
    assert sent == [4 * 8, *[rows * WIDTH * 4] * 4]
    assert traced.state_bytes < trace_step(workload, parse_layout("ddp"), 2).state_bytes


def test_counts_that_are_known_by_their_sum() -> None:
    """However a mixture counts: one_hot, bincount, scatter_add; other numbers stay unknown."""
    with FakeTensorMode(), StorageTrace():
        chosen = torch.zeros(5, 2, dtype=torch.long)
        ones = torch.ones_like(chosen.flatten())
        for counts in (
            F.one_hot(chosen.flatten(), 4).sum(0),
            torch.bincount(chosen.flatten(), minlength=4),
            torch.zeros(4, dtype=torch.long).scatter_add_(0, chosen.flatten(), ones),
        ):
            assert counts.tolist() == [2, 3, 2, 3]
            assert torch.stack([counts, counts]).sum().item() == 20
        assert ones.sum().item() == 1


@pytest.mark.integration
def test_two_depths_are_as_good_as_all() -> None:
    """Of 16 like blocks 4 and 6 are traced, and the line meets the whole model to the byte."""
    deep = decoder(16, batch=8)
    layout = parse_layout("fsdp")
    line = trace_layout(deep, layout, 4, first_sample(deep))
    whole = trace_step(deep, layout, 4)
    assert "4 and 6 of 16" in line.note
    assert line.allocated == pytest.approx(max(whole.peak_bytes, whole.build_bytes), rel=1e-3)
    assert dict(line.collectives) == whole.collectives()
    assert line.flops == whole.flops


class Choosy(nn.Module):
    """A model whose shapes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, value: Tensor) -> Tensor:
        return self.layer(value[value.sum(1).nonzero().squeeze(1)])


def other(model: Callable[[], nn.Module]) -> Workload:
    data = torch.utils.data.TensorDataset(torch.ones(16, 8), torch.ones(16, 8))

    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return F.mse_loss(output, target, reduction="sum"), target.numel()

    return Workload("other", model, lambda: data, loss, lambda m: torch.optim.SGD(m.parameters(), 0.1), 16, steps=1)


@pytest.mark.parametrize("layout", ["single", "single:precision=float64"])
def test_tied_weights_count_once(layout: str) -> None:
    """Also after a conversion, which replaces the parameters of fake tensors."""

    def two_layers(is_tied: bool) -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))
        if is_tied:
            model[2].weight = model[0].weight
        return model

    tied, untied = (
        trace_step(other(lambda is_tied=is_tied: two_layers(is_tied)), parse_layout(layout), 1)
        for is_tied in (True, False)
    )
    assert 2 * tied.categories["parameters"] == untied.categories["parameters"]


def test_a_model_that_cannot_be_traced_is_never_said_to_fit() -> None:
    """Its parameters are counted, the reason is named."""
    answer = answer_workload(other(Choosy), "choosy", "choosy.py", parse_cluster("2xh100"), ["ddp"])
    row = answer["layouts"][0]
    assert row["verdict"] == "may not fit"
    assert row["categories"]["parameters"] == (8 * 8 + 8) * 4
    assert "not traced" in row["note"]


def test_a_model_that_reads_files_when_it_is_built(tmp_path: Path) -> None:
    """Weights of torch and numpy are read as fakes; a file that is missing is an error of the workload."""
    torch.save(torch.ones(8, 8), tmp_path / "weight.pt")
    np.save(tmp_path / "weight.npy", np.ones((8, 8), dtype=np.float32))

    def reading(read: Callable[[], Tensor]) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            model = nn.Linear(8, 8)
            model.weight = nn.Parameter(read())
            return model

        return make

    for read in (
        lambda: torch.load(tmp_path / "weight.pt", weights_only=True),
        lambda: torch.from_numpy(np.load(tmp_path / "weight.npy")),
    ):
        found = trace_layout(other(reading(read)), parse_layout("ddp"), 2, (torch.ones(1, 8), torch.ones(1, 8)))
        assert found.is_whole
        assert found.categories["parameters"] >= (8 * 8 + 8) * 4
    lost = other(reading(lambda: torch.load(tmp_path / "none.pt", weights_only=True)))
    with pytest.raises(UsageError, match=r"none\.pt"):
        trace_layout(lost, parse_layout("ddp"), 2, (torch.ones(1, 8), torch.ones(1, 8)))


@pytest.mark.integration
def test_the_smallest_change_of_a_workload() -> None:
    """On a card too small for it, the change fits and is another layout."""
    workload = decoder(batch=64)
    cluster = parse_cluster("2xt4", memory=2.5 * 2**30 + 6 * 2**20)
    answer = answer_workload(workload, "decoder", "decoder.py", cluster, ["ddp"])
    row = answer["layouts"][0]
    assert row["verdict"] == "may not fit"
    assert row["change"]["layout"] != "ddp"
    assert row["change"]["layout"] in row["change"]["command"]


def test_growing_segments_are_the_smallest_change() -> None:
    """Where gaps between blocks are too much for the card, and the bytes in them are not."""
    gaps = LayoutMemory(0, {}, 7.9 * GIB, 0.0, 10 * GIB, 8 * GIB, 0.0, 0.0, 0.0, {}, True, "traced whole")
    cluster = parse_cluster("2xa100", memory=12.5 * GIB)
    assert gaps.verdict(12.5 * GIB) == "may not fit"
    change = traced._change("ddp", lambda _: gaps, cluster, "decoder.py", decoder())
    assert change["layout"] == "ddp"
    assert change["command"].startswith("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True everyrank train decoder.py")
    full = dataclasses.replace(gaps, expandable=10 * GIB)
    assert "segments" not in traced._change("ddp", lambda _: full, cluster, "decoder.py", decoder())["what"]


@pytest.mark.parametrize(
    ("text", "batch", "what", "layout"),
    [
        ("single", 64, "bf16, recompute, micro-batches 1/8 as large", "single:accumulate=8,precision=bf16,recompute"),
        ("single:recompute", 64, "bf16, micro-batches 1/8 as large", "single:accumulate=8,precision=bf16,recompute"),
        ("single", 4, "bf16, recompute, micro-batches 1/2 as large", "single:accumulate=2,precision=bf16,recompute"),
    ],
)
def test_changes_that_fit_only_together(text: str, batch: int, what: str, layout: str) -> None:
    """No single change is enough on one GPU, but all together are."""
    full = LayoutMemory(0, {}, 10 * GIB, 0.0, 10 * GIB, 10 * GIB, 0.0, 0.0, 0.0, {}, True, "traced whole")
    small = dataclasses.replace(full, allocated=GIB, reserved=GIB, expandable=GIB)

    def memory_of(other: str) -> LayoutMemory:
        return small if all(option in other for option in ("accumulate", "bf16", "recompute")) else full

    change = traced._change(
        text, memory_of, parse_cluster("1xa100", memory=8 * GIB), "decoder.py", decoder(batch=batch)
    )
    assert (change["what"], parse_layout(change["layout"])) == (what, parse_layout(layout))
    assert change["layout"] in change["command"]


def test_pretended_worlds_end() -> None:
    """A second one may follow, and none stands beside a real process group."""
    for rank in (0, 5):
        with World.pretend(6, rank) as world:
            assert (world.rank, world.size, torch.distributed.get_world_size()) == (rank, 6, 6)
    assert not torch.distributed.is_initialized()
    with pytest.raises(UsageError, match="rank"), World.pretend(2, 2):
        pass


def test_kernels_of_a_gpu() -> None:
    """RMSNorm keeps its input and one number a row, and an optimizer takes all parameters at once."""
    layout = parse_layout("single:precision=bf16")
    on_cpu, on_gpu = (trace_step(decoder(), layout, 1, on_gpu=on_gpu) for on_gpu in (False, True))
    names = [operator.name for operator in on_gpu.operators]
    norms = 2 * BLOCKS + 1
    assert (names.count("rms_norm"), names.count("rms_norm_backward")) == (norms, norms)
    assert any(name.startswith("_foreach_addcdiv") for name in names)
    assert len(names) < 0.7 * len(on_cpu.operators)
    kept = 64 * LENGTH * WIDTH * 4  # a tensor of activations
    assert on_gpu.categories["activations"] < on_cpu.categories["activations"] - norms * kept / 2
    assert any(operator.is_half for operator in on_gpu.operators if operator.flops)
